"""Mean and standard deviation of pixels: sums of whole numbers, rounded once at the end.

Of images of up to 128 x 128 pixels each one is counted, of larger ones those of every eighth row: neighbours hardly
differ, and all of them would cost a fifth of the time of packing.

>>> count = PixelCount()
>>> count.add(np.full((2, 2), 255, np.uint8))
>>> count.add(Image.new("RGB", (2, 2), (0, 0, 255)))
>>> mean_and_std(count.totals(), channels=3)
((0.5, 0.5, 1.0), (0.5, 0.5, 0.0))
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from PIL import Image

SMALL = 128 * 128  # pixels up to which all are counted, many images at a time: a call costs as much as so many pixels
EVERY = 8  # rows of a larger one
_STACK = 64
_ROWS = 256  # of squares up to 255 * 255, whose sum float32 still holds exactly

Counts = NDArray[np.int64]
Pixels = NDArray[np.uint8]


class PixelCount:
    """Counts up ``L`` and ``RGB`` images. The order of images does not matter, and totals can be added."""

    def __init__(self) -> None:
        self._totals: Counts = np.zeros((4, 3), np.int64)
        # Small images of one shape are stacked and counted together.
        self._stack: Pixels = np.empty((0, 0, 0), np.uint8)
        self._stacked = 0

    def add(self, image: Image.Image | Pixels) -> None:
        """Count the pixels of an ``L`` or ``RGB`` image, or of uint8[H, W] or uint8[H, W, 3]."""
        pixels = np.asarray(image)
        if pixels.shape[0] * pixels.shape[1] > SMALL:
            self._count(pixels[min(EVERY, len(pixels)) // 2 :: EVERY])
            return
        if self._stack.shape[1:] != pixels.shape or self._stacked == _STACK:
            self._count_stack()
            self._stack = np.empty((_STACK, *pixels.shape), np.uint8)
        self._stack[self._stacked] = pixels
        self._stacked += 1

    def totals(self) -> Counts:
        """int64[4, 3]: of red, green, blue, and grey (of ``L`` images) the number, the sum, the sum of squares."""
        self._count_stack()
        return self._totals

    def _count_stack(self) -> None:
        if self._stacked:
            pixels = self._stack[: self._stacked]
            self._count(pixels.reshape(-1, *pixels.shape[2:]))
        self._stacked = 0

    def _count(self, pixels: Pixels) -> None:
        """Sums down the columns by products with ones, the fastest that numpy has; each of them exact in float32."""
        sums = np.zeros((2, pixels[0].size), np.int64)
        for top in range(0, len(pixels), _ROWS):
            values = pixels[top : top + _ROWS].reshape(-1, sums.shape[1]).astype(np.float32)
            ones = np.ones(len(values), np.float32)
            sums[0] += (ones @ values).astype(np.int64)
            np.multiply(values, values, out=values)
            sums[1] += (ones @ values).astype(np.int64)
        rows = slice(0, 3) if pixels.ndim == 3 else slice(3, 4)
        self._totals[rows, 0] += pixels.shape[0] * pixels.shape[1]
        self._totals[rows, 1:] += sums.reshape(2, pixels.shape[1], -1).sum(axis=1).T


def mean_and_std(totals: Counts, *, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Per channel, of values in [0, 1]; empty where nothing was counted.

    Args:
        totals: what :meth:`PixelCount.totals` gives, or a sum of those.
        channels: 3 adds grey images to each colour; 1 takes the grey ones alone.
    """
    rows = totals[:3] + totals[3] if channels == 3 else totals[3:]
    if not rows[:, 0].all():
        return (), ()
    moments = [_moments(*(int(n) for n in row)) for row in rows]
    return tuple(mean for mean, _ in moments), tuple(std for _, std in moments)


def _moments(n: int, first: int, second: int) -> tuple[float, float]:
    # Whole numbers up to the last line: no rounding, however many pixels there are.
    return first / (255 * n), math.sqrt((second * n - first * first) / (255 * n) ** 2)
