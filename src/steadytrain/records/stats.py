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


class PixelCount:
    """Counts each value of ``L`` and ``RGB`` images. The order of images does not matter, and counts can be added."""

    def __init__(self) -> None:
        self._totals: Counts = np.zeros((4, 256), np.int64)
        # Small images of one size are stacked and counted together.
        self._stack: Image.Image | None = None
        self._like: tuple[str, tuple[int, int]] | None = None
        self._stacked = 0

    def add(self, image: Image.Image) -> None:
        """Count every pixel of an ``L`` or ``RGB`` image."""
        width, height = image.size
        if width * height > _SMALL:
            self._count(image)
            return
        if self._like != (image.mode, image.size) or self._stacked == _STACK:
            self._count_stack()
            self._like = (image.mode, image.size)
            self._stack = Image.new(image.mode, (width, height * _STACK))
        assert self._stack is not None
        self._stack.paste(image, (0, height * self._stacked))
        self._stacked += 1

    def totals(self) -> Counts:
        """int64[4, 256]: red, green, blue, and grey (of ``L`` images)."""
        self._count_stack()
        return self._totals

    def _count_stack(self) -> None:
        if self._stack is not None and self._stacked:
            width, height = self._stack.size
            self._count(self._stack.crop((0, 0, width, height // _STACK * self._stacked)))
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
