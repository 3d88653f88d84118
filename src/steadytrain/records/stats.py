"""Mean and standard deviation of pixels, exact: values are counted, and the counts are whole numbers.

>>> count = PixelCount()
>>> count.add(Image.new("L", (2, 2), 255))
>>> count.add(Image.new("RGB", (2, 2), (0, 0, 255)))
>>> mean_and_std(count.totals(), channels=3)
((0.5, 0.5, 1.0), (0.5, 0.5, 0.0))
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from PIL import Image

_SMALL = 128 * 128  # pixels up to which images are counted many at a time: a call costs as much as so many pixels
_STACK = 64

Counts = NDArray[np.int64]
Pixels = NDArray[np.uint8]


class PixelCount:
    """Counts each value of ``L`` and ``RGB`` images. The order of images does not matter, and counts can be added."""

    def __init__(self) -> None:
        self._totals: Counts = np.zeros((4, 256), np.int64)
        # Small images of one shape are stacked and counted together.
        self._stack: Pixels = np.empty((0, 0, 0), np.uint8)
        self._stacked = 0

    def add(self, image: Image.Image | Pixels) -> None:
        """Count every pixel of an ``L`` or ``RGB`` image, or of uint8[H, W] or uint8[H, W, 3]."""
        if isinstance(image, Image.Image) and image.width * image.height > _SMALL:
            self._count(image)
            return
        pixels = np.asarray(image)
        if pixels.shape[0] * pixels.shape[1] > _SMALL:
            self._count(Image.fromarray(pixels))
            return
        if self._stack.shape[1:] != pixels.shape or self._stacked == _STACK:
            self._count_stack()
            self._stack = np.empty((_STACK, *pixels.shape), np.uint8)
        self._stack[self._stacked] = pixels
        self._stacked += 1

    def totals(self) -> Counts:
        """int64[4, 256]: red, green, blue, and grey (of ``L`` images)."""
        self._count_stack()
        return self._totals

    def _count_stack(self) -> None:
        if self._stacked:
            pixels = self._stack[: self._stacked]
            self._count(Image.fromarray(pixels.reshape(-1, *pixels.shape[2:])))
        self._stacked = 0

    def _count(self, image: Image.Image) -> None:
        rows = slice(0, 3) if image.mode == "RGB" else slice(3, 4)
        self._totals[rows] += np.array(image.histogram(), dtype=np.int64).reshape(-1, 256)


def mean_and_std(totals: Counts, *, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Per channel, of values in [0, 1]; empty where nothing was counted.

    Args:
        totals: what :meth:`PixelCount.totals` gives, or a sum of those.
        channels: 3 adds grey images to each colour; 1 takes the grey ones alone.
    """
    rows = totals[:3] + totals[3] if channels == 3 else totals[3:]
    if not rows.sum():
        return (), ()
    moments = [_moments([int(n) for n in row]) for row in rows]
    return tuple(mean for mean, _ in moments), tuple(std for _, std in moments)


def _moments(counts: list[int]) -> tuple[float, float]:
    n = sum(counts)
    first = sum(value * times for value, times in enumerate(counts))
    second = sum(value * value * times for value, times in enumerate(counts))
    # Whole numbers up to the last line: no rounding, however many pixels there are.
    return first / (255 * n), math.sqrt((second * n - first * first) / (255 * n) ** 2)
