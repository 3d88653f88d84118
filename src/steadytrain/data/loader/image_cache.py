"""Images decoded once and kept, if all of them fit into a budget of memory. The bytes of a batch are the same.

The feed shares its cores with training, and decoding a small PNG costs fifty times what copying its pixels does. Small
images of one size are kept as they are first used; a batch is then one gather, without a loop over its samples. Larger
ones, and those of several sizes, are kept from the second pass over the data on: to be kept an image has to be decoded
as a whole, which costs more than the part that a crop shows, and pays only where it is used often. Whether they fit is
judged by the headers of some of them.

:class:`Kept` gives up at the first image that would not give the same bytes (a JPEG so large that it is shrunk while it
is decoded), or does not fit.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from steadytrain.data.loader.crop import NEVER_SHRUNK
from steadytrain.data.loader.jpeg import Pixels
from steadytrain.data.loader.rank_cache import Common
from steadytrain.data.loader.sampler import Ints
from steadytrain.data.packing.pixels import BadImageError

SURVEYED = 256  # images whose headers tell whether all fit
ALIGNED = 64
MARGIN = 1.1  # by so much all may be larger than the surveyed ones let expect
MISJUDGED = (
    16  # times that are asked for, within the budget, in case they are larger still: it costs nothing unless used
)


@dataclass(frozen=True, eq=False, kw_only=True)
class Store:
    """Decoded images: ``pixels`` uint8[n, H, W, C], good where ``filled`` bool[n] says so.

    Where a sample is unreadable, ``steps`` int64[n] leads from it to the one that replaces it, and is 0 elsewhere;
    ``any_steps`` bool[1] says whether there is one. All of it may lie in memory that several processes have in
    ``common``.
    """

    pixels: Pixels
    filled: NDArray[np.bool_]
    steps: Ints
    any_steps: NDArray[np.bool_]
    common: Common | None

    def image(self, sample: int) -> Pixels:
        """One image, uint8[H, W, C]."""
        image: Pixels = self.pixels[sample]
        return image

    def used(self, samples: Ints) -> Ints:
        """The samples that stand for these, themselves mostly."""
        return samples + self.steps[samples] if self.any_steps[0] else samples


@dataclass(frozen=True, eq=False, kw_only=True)
class Loose:
    """Decoded images of any sizes, one behind the other in ``memory``: uint8[bytes].

    Each begins ``at`` int64[n], ``sizes`` int64[n, 2] are heights and widths; ``end`` int64[1] is where the next one
    goes; the rest as in a :class:`Store`.
    """

    memory: Pixels
    channels: int
    at: Ints
    sizes: Ints
    end: Ints
    filled: NDArray[np.bool_]
    steps: Ints
    any_steps: NDArray[np.bool_]
    common: Common | None

    def image(self, sample: int) -> Pixels:
        """One image, uint8[H, W, C]."""
        at, (height, width) = int(self.at[sample]), self.sizes[sample].tolist()
        image: Pixels = self.memory[at : at + height * width * self.channels].reshape(height, width, self.channels)
        return image

    def used(self, samples: Ints) -> Ints:
        """As of a :class:`Store`."""
        return samples + self.steps[samples] if self.any_steps[0] else samples


class Kept:
    """The decoded images of one feed. Safe from several threads: the same sample always has the same pixels.

    Args:
        n: samples.
        budget_bytes: the most that all of them may take.
        share: gives memory that other processes have, too, for what it is told, so large, of which so much is used in
            any case; raises OSError. None: this process has its own.
    """

    def __init__(self, n: int, budget_bytes: int, share: Callable[[str, int, int], Common] | None = None) -> None:
        self.n = n
        self.budget_bytes = budget_bytes
        self.share = share
        self.not_shared = ""
        """Why this process has its own memory, though others were to have it, too."""
        self.store: Store | Loose | None = None
        self.given_up = budget_bytes <= 0
        self.survey: Callable[[], Ints | None] | None = None
        """Heights and widths of some of the images, int64[k, 2], or None where some cannot be kept; without it all are
        taken to be as large as the first."""
        self._any = self._surveyed = False
        self._lock = threading.Lock()
        self._full = False

    @property
    def full(self) -> bool:
        """Whether every sample is in memory."""
        store = self.store
        if not self._full and store is not None:
            self._full = bool(store.filled.all())
        return self._full

    @property
    def bytes(self) -> int:
        """What is kept."""
        store = self.store
        if isinstance(store, Loose):
            return min(int(store.end[0]), len(store.memory))
        if store is None:
            return 0
        return (self.n if self.full else int(store.filled.sum())) * math.prod(store.pixels.shape[1:])

    @property
    def is_shared(self) -> bool:
        """Whether it lies in memory that other processes have, too."""
        return self.store is not None and self.store.common is not None

    def try_any(self) -> None:
        """From now on large images, and those of several sizes, may be kept as well."""
        with self._lock:
            if not self._any:
                self._any, self.given_up = True, self.budget_bytes <= 0

    def give_up(self) -> None:
        """Keep nothing."""
        with self._lock:
            self.store, self.given_up = None, True

    def has(self, sample: int) -> bool:
        """Whether a sample is kept. Raises BadImageError where it is known to be bad."""
        store = self.store
        if store is None or not store.filled[sample]:
            return False
        if store.steps[sample]:
            raise BadImageError("it could not be decoded before")
        return True

    def missing(self, samples: Ints, bad: set[int]) -> Ints:
        """Those of some samples that are not kept, or that another process has found to be bad, and not yet this one.

        Args:
            samples: int64[b].
            bad: the samples that this process has found to be so.
        """
        store = self.store
        if store is None:
            return samples
        missing: Ints = samples[~store.filled[samples]]
        if not store.any_steps[0]:
            return missing
        unheard = [sample for sample in samples[store.steps[samples] != 0].tolist() if sample not in bad]
        return np.concatenate((missing, np.array(unheard, dtype=np.int64)))

    def room_for(self, shape: tuple[int, int, int]) -> bool:
        """Whether images of this shape (H, W, C) are kept; if not, none is from now on."""
        with self._lock:
            if self.store is None and not self.given_up:
                self.store = self._tried(shape)
            if self._is_other(shape) and self._any and not self._surveyed:  # it was begun before several sizes could be
                self.store = self._tried(shape)
            if self.store is None or self._is_other(shape):
                self.store, self.given_up = None, True
            return not self.given_up

    def _is_other(self, shape: tuple[int, int, int]) -> bool:
        return isinstance(self.store, Store) and self.store.pixels.shape[1:] != shape

    def put(self, sample: int, pixels: Pixels) -> None:
        """Keep a sample, once :meth:`room_for` has agreed to its shape."""
        store = self.store
        if isinstance(store, Loose):
            self._lay(store, sample, pixels)
        elif store is not None:  # else another thread met an image that does not fit
            store.pixels[sample] = pixels
            with self._lock:  # no other processor may see the second before the first
                store.filled[sample] = True

    def replace(self, sample: int, by: int) -> None:
        """Let ``by``, which is kept, stand for a sample that cannot be read."""
        store = self.store
        if store is not None:
            store.steps[sample] = by - sample
            store.any_steps[0] = True
            with self._lock:
                store.filled[sample] = True

    def _tried(self, shape: tuple[int, int, int]) -> Store | Loose | None:
        try:
            return self._begun(shape)
        except MemoryError:  # the budget is more than the system gives: nothing depends on what is kept
            return None

    def _begun(self, shape: tuple[int, int, int]) -> Store | Loose | None:
        """Room for all images, of which one has this shape; None where they do not fit, or must not yet."""
        if not self._any and max(shape[:2]) > NEVER_SHRUNK:
            return None
        self._surveyed = self._any
        sizes = self.survey() if self._any and self.survey is not None else np.array([shape[:2]])
        if sizes is None:
            return None
        if (sizes == shape[:2]).all():
            return self._one_size(shape) if self.n * math.prod(shape) <= self.budget_bytes else None
        all_bytes = int(MARGIN * self.n * float(sizes.prod(axis=1).mean()) * shape[2])
        return self._any_sizes(shape[2], all_bytes) if all_bytes <= self.budget_bytes else None

    def _one_size(self, shape: tuple[int, int, int]) -> Store:
        wanted = (*self._notes, ((self.n, *shape), np.uint8))
        memory, common = self._memory(f"images of {shape}", _needed(wanted), _needed(wanted))
        filled, steps, any_steps, pixels = _carved(memory, wanted)
        return Store(pixels=pixels, filled=filled, steps=steps, any_steps=any_steps, common=common)

    def _any_sizes(self, channels: int, all_bytes: int) -> Loose:
        notes = (*self._notes, ((1,), np.int64), ((self.n,), np.int64), ((self.n, 2), np.int64))
        wanted = (*notes, ((min(self.budget_bytes, MISJUDGED * all_bytes),), np.uint8))
        memory, common = self._memory("images of several sizes", _needed(wanted), _needed(notes) + all_bytes)
        filled, steps, any_steps, end, at, sizes, images = _carved(memory, wanted)
        own = {"filled": filled, "steps": steps, "any_steps": any_steps}
        return Loose(memory=images, channels=channels, at=at, sizes=sizes, end=end, common=common, **own)

    @property
    def _notes(self) -> tuple[tuple[tuple[int, ...], Any], ...]:
        return ((self.n,), np.bool_), ((self.n,), np.int64), ((1,), np.bool_)

    def _memory(self, what: str, size: int, least: int) -> tuple[Pixels, Common | None]:
        """Zeros: uint8[size]."""
        if self.share is not None:
            try:
                common = self.share(what, size, least)
                return common.memory, common
            except OSError as error:
                self.not_shared = f"{least / 1e6:,.1f} MB: {error.strerror or error}"
        return np.zeros(size, dtype=np.uint8), None  # the system gives it as it is written to

    def _lay(self, store: Loose, sample: int, pixels: Pixels) -> None:
        """Put a sample behind the others; another thread, or process, may be doing so with the same one."""
        with self._lock, nullcontext() if store.common is None else store.common.alone():
            at = int(store.end[0])
            fits = at + pixels.size <= len(store.memory) and _is_reserved(store, at + pixels.size)
            if fits:
                store.end[0] = at + pixels.size
        if not fits:
            self.give_up()
            return
        store.memory[at : at + pixels.size] = pixels.reshape(-1)
        with self._lock:
            if not store.filled[sample]:
                store.at[sample], store.sizes[sample] = at, pixels.shape[:2]
        with self._lock:  # as in put
            store.filled[sample] = True


def _is_reserved(store: Loose, end: int) -> bool:
    """Whether the images may take so many bytes."""
    if store.common is None:
        return True
    try:
        store.common.reserve(len(store.common.memory) - len(store.memory) + end)
    except OSError:
        return False
    return True


def _needed(wanted: Sequence[tuple[tuple[int, ...], Any]]) -> int:
    """Bytes of arrays of these shapes and types."""
    return sum(-(-math.prod(shape) * np.dtype(kind).itemsize // ALIGNED) * ALIGNED for shape, kind in wanted)


def _carved(memory: Pixels, wanted: Sequence[tuple[tuple[int, ...], Any]]) -> list[NDArray[Any]]:
    """Arrays of these shapes and types, one behind the other in memory."""
    found, at = list[NDArray[Any]](), 0
    for shape, kind in wanted:
        size = math.prod(shape) * np.dtype(kind).itemsize
        found.append(memory[at : at + size].view(kind).reshape(shape))
        at += _needed([(shape, kind)])
    return found
