"""Small images of one size, decoded once and kept: a batch is then one gather, without a loop over its samples.

The feed shares its cores with training, and decoding a small PNG costs fifty times what copying its pixels does.
:class:`Kept` fills up as images are first used; it gives up, for good, at the first image that is not small, not of the
same size, or when all of them together would not fit the budget. The bytes of a batch are the same either way.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from steadytrain.feed.cut import Cut, Plan
from steadytrain.feed.decode import Channels, Pixels, Unreadable, cut_from

Ints = NDArray[np.int64]

LARGEST = 128  # pixels a side


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
        """Whether a sample is kept. Raises Unreadable where it is known to be bad."""
        store = self.store
        if store is None or not store.filled[sample]:
            return False
        if store.instead[sample] != sample:
            raise Unreadable("it could not be decoded before")
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
        return max(shape[:2]) <= LARGEST and self.n * math.prod(shape) <= self.budget_bytes


@dataclass(slots=True)
class Canvas:
    """Memory for padded images with a border of zeros, that one thread gathers through again and again."""

    memory: Pixels = field(default_factory=lambda: np.zeros((0, 0, 0, 0), dtype=np.uint8))
    pad: int = 0

    def take(self, n: int, height: int, width: int, channels: Channels | int, pad: int) -> Pixels:
        """uint8[n, height + 2 pad, width + 2 pad, channels]; the border is zero, the inside undefined."""
        shape = (height + 2 * pad, width + 2 * pad, channels)
        if self.memory.shape[1:] != shape or self.pad != pad or len(self.memory) < n:
            self.memory, self.pad = np.zeros((n, *shape), dtype=np.uint8), pad
        return self.memory[:n]


def gather(out: Pixels, store: Store, samples: Ints, cut: Cut, plan: Plan, canvas: Canvas) -> None:
    """Write the squares of kept samples, uint8[b, S, S, C], as :func:`~steadytrain.feed.decode.cut_into` would.

    Args:
        out: where to.
        store: holds every one of ``samples``.
        samples: int64[b].
        plan: for these samples, in this order.
        canvas: of the calling thread.
    """
    if not plan.keeps_pixels():
        for row, sample in enumerate(samples.tolist()):
            cut_from(out[row], store.pixels[sample], cut, plan, row)
        return
    pad = cut.pad if cut.kind == "pad-crop" else 0
    height, width, channels = store.pixels.shape[1:]
    if pad == 0 and height == width == cut.size and not plan.flips.any():
        np.take(store.pixels, samples, axis=0, out=out, mode="clip")
        return
    # The mirrored samples go last, so that both halves are copied by one slice each.
    order = np.argsort(plan.flips, kind="stable")
    mirrored = len(order) - int(np.count_nonzero(plan.flips))
    padded = canvas.take(len(samples), height, width, channels, pad)
    inside = padded[:, pad : pad + height, pad : pad + width]
    images = store.pixels[samples[order]]
    inside[:mirrored] = images[:mirrored]
    for channel in range(channels):  # runs of single bytes: four times as fast as runs of three
        inside[mirrored:, ..., channel] = images[mirrored:, :, ::-1, channel]
    corners = (plan.boxes[:, :2] - plan.places[:, :2]).astype(np.int64) + pad
    free = width + 2 * pad - cut.size
    columns = np.where(plan.flips, free - corners[:, 0], corners[:, 0])
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    out[...] = _windows(padded, cut.size)[place, corners[:, 1], columns]


def _windows(padded: Pixels, side: int) -> Pixels:
    """A view of every square of every image: uint8[n, rows, columns, side, side, C]."""
    n, height, width, channels = padded.shape
    image, row, column, channel = padded.strides
    shape = (n, height - side + 1, width - side + 1, side, side, channels)
    return np.lib.stride_tricks.as_strided(padded, shape, (image, row, column, row, column, channel))
