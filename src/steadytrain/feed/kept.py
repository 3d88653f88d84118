"""Small images of one size, decoded once and kept: a batch is then one gather, without a loop over its samples.

The feed shares its cores with training, and decoding a small PNG costs fifty times what copying its pixels does.
:class:`Kept` fills up as images are first used; it gives up, for good, at the first image that is not small, not of the
same size, or when all of them together would not fit the budget. The bytes of a batch are the same either way.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from steadytrain.feed.cut import NEVER_SHRUNK, Cut
from steadytrain.feed.decode import cut_from
from steadytrain.feed.jpeg import Pixels
from steadytrain.feed.order import Floats, Ints
from steadytrain.records.pixels import BadImageError

BLOCK_BYTES = 2**18  # of images gathered at a time: it stays in a core's cache, and is never returned to the system


@dataclass(frozen=True, eq=False)
class Store:
    """Decoded images: ``pixels`` uint8[n, H, W, C], good where ``filled`` bool[n] says so.

    ``instead`` int64[n] leads from each sample to itself, or to the sample that replaces it where it is unreadable.
    """

    pixels: Pixels
    filled: NDArray[np.bool_]
    instead: Ints


class Kept:
    """The decoded images of one feed. Safe from several threads: the same sample always has the same pixels.

    Args:
        n: samples.
        budget_bytes: the most that all of them may take.
    """

    def __init__(self, n: int, budget_bytes: int) -> None:
        self.n = n
        self.budget_bytes = budget_bytes
        self.store: Store | None = None
        self.given_up = budget_bytes <= 0
        self._lock = threading.Lock()
        self._full = False

    @property
    def full(self) -> bool:
        """Whether every sample is in memory."""
        store = self.store
        if not self._full and store is not None:
            self._full = bool(store.filled.all())
        return self._full

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
            if self.store is None and not self.given_up and self._fits(shape):
                memory = np.empty((self.n, *shape), dtype=np.uint8)
                self.store = Store(memory, np.zeros(self.n, dtype=np.bool_), np.arange(self.n))
            if self.store is None or self.store.pixels.shape[1:] != shape:
                self.store, self.given_up = None, True
            return not self.given_up

    def put(self, sample: int, pixels: Pixels) -> None:
        """Keep a sample, once :meth:`room_for` has agreed to its shape."""
        store = self.store
        if store is not None:  # else another thread met an image of another size
            store.pixels[sample] = pixels
            store.filled[sample] = True

    def replace(self, sample: int, by: int) -> None:
        """Let ``by``, which is kept, stand for a sample that cannot be read."""
        store = self.store
        if store is not None:
            store.instead[sample] = by
            store.filled[sample] = True

    def _fits(self, shape: tuple[int, int, int]) -> bool:
        return max(shape[:2]) <= NEVER_SHRUNK and self.n * math.prod(shape) <= self.budget_bytes


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


def gather(out: Pixels, store: Store, samples: Ints, cut: Cut, draws: Floats, canvas: Canvas) -> None:
    """Write the squares of kept samples, uint8[b, S, S, C], as :func:`~steadytrain.feed.decode.cut_into` would.

    Args:
        out: where to.
        store: holds every one of ``samples``.
        samples: int64[b].
        draws: float64[b, num_draws] of these samples.
        canvas: of the calling thread.
    """
    n, (height, width, channels) = len(samples), store.pixels.shape[1:]
    size = np.array([[height, width]])
    if not cut.only_shifts(height, width):
        plan = cut.plan(np.broadcast_to(size, (n, 2)), draws)
        for row, sample in enumerate(samples.tolist()):
            cut_from(out[row], store.pixels[sample], cut, plan, row)
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
