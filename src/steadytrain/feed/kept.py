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
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from steadytrain.feed.cut import NEVER_SHRUNK
from steadytrain.feed.jpeg import Pixels
from steadytrain.feed.order import Ints
from steadytrain.records.pixels import BadImageError

SURVEYED = 256  # images whose headers tell whether all fit
MARGIN = 1.1  # by so much all may be larger than the surveyed ones let expect


@dataclass(frozen=True, eq=False)
class Store:
    """Decoded images: ``pixels`` uint8[n, H, W, C], good where ``filled`` bool[n] says so.

    ``instead`` int64[n] leads from each sample to itself, or to the sample that replaces it where it is unreadable.
    """

    pixels: Pixels
    filled: NDArray[np.bool_]
    instead: Ints

    def image(self, sample: int) -> Pixels:
        """One image, uint8[H, W, C]."""
        image: Pixels = self.pixels[sample]
        return image


@dataclass(eq=False)
class Loose:
    """Decoded images of any sizes, one behind the other in ``memory``: uint8[budget].

    Each begins ``at`` int64[n], ``sizes`` int64[n, 2] are heights and widths; ``filled`` and ``instead`` as in a
    :class:`Store`. ``end`` is where the next one goes.
    """

    memory: Pixels
    channels: int
    at: Ints
    sizes: Ints
    filled: NDArray[np.bool_]
    instead: Ints
    end: int = 0

    def image(self, sample: int) -> Pixels:
        """One image, uint8[H, W, C]."""
        at, (height, width) = int(self.at[sample]), self.sizes[sample].tolist()
        image: Pixels = self.memory[at : at + height * width * self.channels].reshape(height, width, self.channels)
        return image


class Kept:
    """The decoded images of one feed. Safe from several threads: the same sample always has the same pixels.

    Args:
        n: samples.
        budget_bytes: the most that all of them may take.
    """

    def __init__(self, n: int, budget_bytes: int) -> None:
        self.n = n
        self.budget_bytes = budget_bytes
        self.store: Store | Loose | None = None
        self.given_up = budget_bytes <= 0
        self.survey: Callable[[], Ints | None] | None = None
        """Heights and widths of some of the images, int64[k, 2], or None where some cannot be kept; without it all are
        taken to be as large as the first."""
        self._any = False
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
            return min(store.end, len(store.memory))
        if store is None:
            return 0
        return (self.n if self.full else int(store.filled.sum())) * math.prod(store.pixels.shape[1:])

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
        if store.instead[sample] != sample:
            raise BadImageError("it could not be decoded before")
        return True

    def room_for(self, shape: tuple[int, int, int]) -> bool:
        """Whether images of this shape (H, W, C) are kept; if not, none is from now on."""
        with self._lock:
            if self.store is None and not self.given_up:
                self.store = self._begun(shape)
            if self.store is None or (isinstance(self.store, Store) and self.store.pixels.shape[1:] != shape):
                self.store, self.given_up = None, True
            return not self.given_up

    def put(self, sample: int, pixels: Pixels) -> None:
        """Keep a sample, once :meth:`room_for` has agreed to its shape."""
        store = self.store
        if isinstance(store, Loose):
            self._lay(store, sample, pixels)
        elif store is not None:  # else another thread met an image that does not fit
            store.pixels[sample] = pixels
            store.filled[sample] = True

    def replace(self, sample: int, by: int) -> None:
        """Let ``by``, which is kept, stand for a sample that cannot be read."""
        store = self.store
        if store is not None:
            store.instead[sample] = by
            store.filled[sample] = True

    def _begun(self, shape: tuple[int, int, int]) -> Store | Loose | None:
        """Room for all images, of which one has this shape; None where they do not fit, or must not yet."""
        if not self._any and max(shape[:2]) > NEVER_SHRUNK:
            return None
        sizes = self.survey() if self._any and self.survey is not None else np.array([shape[:2]])
        if sizes is None:
            return None
        filled, instead = np.zeros(self.n, dtype=np.bool_), np.arange(self.n)
        if (sizes == shape[:2]).all():
            fits = self.n * math.prod(shape) <= self.budget_bytes
            return Store(np.empty((self.n, *shape), dtype=np.uint8), filled, instead) if fits else None
        if MARGIN * self.n * float(sizes.prod(axis=1).mean()) * shape[2] > self.budget_bytes:
            return None
        at, kept_sizes = np.zeros(self.n, dtype=np.int64), np.zeros((self.n, 2), dtype=np.int64)
        memory = np.empty(self.budget_bytes, dtype=np.uint8)  # the system gives it as it is written to
        return Loose(memory, shape[2], at, kept_sizes, filled, instead)

    def _lay(self, store: Loose, sample: int, pixels: Pixels) -> None:
        """Put a sample behind the others; another thread may be doing so with the same one."""
        with self._lock:
            at = store.end
            store.end += pixels.size
        if at + pixels.size > len(store.memory):
            self.give_up()
            return
        store.memory[at : at + pixels.size] = pixels.reshape(-1)
        with self._lock:
            if not store.filled[sample]:
                store.at[sample], store.sizes[sample], store.filled[sample] = at, pixels.shape[:2], True
