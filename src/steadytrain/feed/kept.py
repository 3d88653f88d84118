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

from steadytrain.feed.cut import NEVER_SHRUNK, Cut
from steadytrain.feed.decode import cut_from
from steadytrain.feed.jpeg import Pixels
from steadytrain.feed.order import Floats, Ints
from steadytrain.records.pixels import BadImageError

SURVEYED = 256  # images whose headers tell whether all fit
MARGIN = 1.1  # by so much all may be larger than the surveyed ones let expect
BLOCK_BYTES = 2**18  # of images gathered at a time: it stays in a core's cache, and is never returned to the system


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


class Canvas:
    """Memory of one thread to gather through: images as they are, and between borders of zeros."""

    def __init__(self) -> None:
        self.rows = 0
        self._made_for: tuple[int, ...] = ()

    def fit(self, height: int, width: int, channels: int, pad: int, side: int) -> None:
        """Be good for ``rows`` images of this shape, padded by ``pad``, and squares of ``side``."""
        wanted = (height, width, channels, pad, side)
        if wanted == self._made_for:
            return
        self.rows = max(1, BLOCK_BYTES // (height * width * channels))
        self.images = np.empty((self.rows, height, width, channels), dtype=np.uint8)
        padded = np.zeros((self.rows, height + 2 * pad, width + 2 * pad, channels), dtype=np.uint8)
        self.inside = padded[:, pad : pad + height, pad : pad + width]
        self.windows = _windows(padded, side)
        self._made_for = wanted


def gather(out: Pixels, store: Store | Loose, samples: Ints, cut: Cut, draws: Floats, canvas: Canvas) -> None:
    """Write the squares of kept samples, uint8[b, S, S, C], as :func:`~steadytrain.feed.decode.cut_into` would.

    Args:
        out: where to.
        store: holds every one of ``samples``.
        samples: int64[b].
        draws: float64[b, num_draws] of these samples.
        canvas: of the calling thread.
    """
    if isinstance(store, Loose):
        _cut_each(out, store, store.sizes[samples], samples, cut, draws)
        return
    n, (height, width, channels) = len(samples), store.pixels.shape[1:]
    size = np.array([[height, width]])
    if not cut.only_shifts(height, width):
        _cut_each(out, store, np.broadcast_to(size, (n, 2)), samples, cut, draws)
        return
    if cut.kind == "none" and not cut.flip and height == width == cut.size:
        np.take(store.pixels, samples, axis=0, out=out, mode="clip")
        return
    pad = cut.pad if cut.kind == "pad-crop" else 0
    canvas.fit(height, width, channels, pad, cut.size)
    rows, columns = np.broadcast_to(cut.corners(size, draws) + pad, (n, 2)).T
    flips = cut.flips(draws, n)
    columns = np.where(flips, width + 2 * pad - cut.size - columns, columns)
    for at in range(0, n, canvas.rows):
        some = slice(at, at + canvas.rows)
        _gather_block(out[some], store.pixels, samples[some], flips[some], rows[some], columns[some], canvas)


def _cut_each(out: Pixels, store: Store | Loose, sizes: Ints, samples: Ints, cut: Cut, draws: Floats) -> None:
    plan = cut.plan(sizes, draws)
    for row, sample in enumerate(samples.tolist()):
        cut_from(out[row], store.image(sample), cut, plan, row)


def _gather_block(
    out: Pixels, pixels: Pixels, samples: Ints, flips: NDArray[np.bool_], rows: Ints, columns: Ints, canvas: Canvas
) -> None:
    # The mirrored samples go last, so that both halves are copied by one slice each.
    order = np.argsort(flips, kind="stable")
    n = len(order)
    plain = n - int(np.count_nonzero(flips))
    images = canvas.images[:n]
    np.take(pixels, samples[order], axis=0, out=images, mode="clip")
    canvas.inside[:plain] = images[:plain]
    for channel in range(pixels.shape[3]):  # runs of single bytes: four times as fast as runs of three
        canvas.inside[plain:n, ..., channel] = images[plain:, :, ::-1, channel]
    place = np.empty_like(order)
    place[order] = np.arange(n)
    out[...] = canvas.windows[place, rows, columns]


def _windows(padded: Pixels, side: int) -> Pixels:
    """A view of every square of every image: uint8[n, rows, columns, side, side, C]."""
    n, height, width, channels = padded.shape
    image, row, column, channel = padded.strides
    shape = (n, height - side + 1, width - side + 1, side, side, channels)
    return np.lib.stride_tricks.as_strided(padded, shape, (image, row, column, row, column, channel))
