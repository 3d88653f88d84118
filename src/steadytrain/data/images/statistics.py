"""Mean and standard deviation of pixels, and the levels that images of 16 bits use."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from PIL import Image

from steadytrain.data.arrays import Ints, Pixels
from steadytrain.format import count

SMALL = 128 * 128  # pixels up to which all are counted, many images at a time: a call costs as much as so many pixels
EVERY = 8  # rows of a larger one
DARK = 2**12  # values of an image of 16 bits: below it at most 16 of 256 levels are left
_STACK = 64
_ROWS = 256  # rows of squares up to 255 * 255, whose sum float32 still holds exactly


class PixelCount:
    """Counts of pixel values of ``L`` and ``RGB`` images, whose order does not matter. Totals can be added."""

    def __init__(self) -> None:
        self._totals: Ints = np.zeros((4, 3), np.int64)
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

    def totals(self) -> Ints:
        """Return int64[4, 3]: of red, green, blue, and grey (of ``L`` images) number, sum, sum of squares."""
        self._count_stack()
        return self._totals

    def _count_stack(self) -> None:
        if self._stacked:
            pixels = self._stack[: self._stacked]
            self._count(pixels.reshape(-1, *pixels.shape[2:]))
        self._stacked = 0

    def _count(self, pixels: Pixels) -> None:
        """Sum down the columns by products with ones, the fastest that numpy has; each of them exact in float32."""
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


def mean_and_std(totals: Ints, *, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation of each channel, of values in [0, 1]; empty where nothing was counted.

    Args:
        totals: of one or several :class:`PixelCount`, added.
        channels: 3 adds grey images to each colour; 1 takes the grey ones alone.
    """
    rows = totals[:3] + totals[3] if channels == 3 else totals[3:]
    if not rows[:, 0].all():
        return (), ()
    # In whole numbers, but for the divisions: no rounding, however many pixels there are.
    sums = [(n, first, second) for n, first, second in rows.tolist()]
    means = tuple(first / (255 * n) for n, first, _ in sums)
    return means, tuple(math.sqrt((second * n - first * first) / (255 * n) ** 2) for n, first, second in sums)


class DeepImages:
    """Images of 16 bits whose range is not known, their largest value, and images by what of them is not kept.

    ``dark`` of them, which are not black, have no value of more than 12 bits; the largest is ``dark_peak``.
    """

    def __init__(
        self, count: int = 0, peak: int = 0, lost: Mapping[str, int] | None = None, dark: int = 0, dark_peak: int = 0
    ) -> None:
        self.count, self.peak, self.lost = count, peak, Counter(lost)
        self.dark, self.dark_peak = dark, dark_peak

    def add(self, peak: int, lost: Iterable[str] = ()) -> None:
        """Count in an image by its ``info["peak"]`` (-1: none) and the words of its ``info["lost"]``."""
        self.lost.update(lost)
        if peak >= 0:
            self.count, self.peak = self.count + 1, max(self.peak, peak)
            if 0 < peak < DARK:
                self.dark, self.dark_peak = self.dark + 1, max(self.dark_peak, peak)

    def note(self) -> list[Any]:
        """Return the arguments that make an equal one, as plain data."""
        return [self.count, self.peak, self.lost, self.dark, self.dark_peak]

    def __add__(self, other: DeepImages) -> DeepImages:
        peaks = max(self.peak, other.peak), max(self.dark_peak, other.dark_peak)
        return DeepImages(self.count + other.count, peaks[0], self.lost + other.lost, self.dark + other.dark, peaks[1])

    def remarks(self) -> list[str]:
        """Say what is not kept, and how many images have it; last what :meth:`remark` says."""
        lost = (f"{count(number, 'image has', 'images have')} {words}" for words, number in self.lost.items())
        return [*lost, *filter(None, [self.remark()])]

    def remark(self) -> str:
        """Say what is lost, where none of them uses the upper bits, and how to keep it; or where some are nearly black.

        >>> DeepImages(3, 4016).remark()[:72], DeepImages(3, 60000).remark()
        ('3 images of 16 bits have no value above 4,016, as those of 12 bits have,', '')
        >>> DeepImages(3, 60000, dark=1, dark_peak=900).remark()[:72]
        '1 of 3 images of 16 bits is nearly black: no value above 900, others up '
        """
        if self.is_mixed:
            return (
                f"{self.dark:,} of {self.count:,} images of 16 bits {'is' if self.dark == 1 else 'are'} nearly black:"
                f" no value above {self.dark_peak:,}, others up to {self.peak:,}, and 65,535 is read as white. Look at"
                " them: those of a camera of fewer bits have to be scaled, also where the model will be used"
            )
        bits = next((bits for bits in (8, 10, 12, 14) if self.peak < 2**bits), 16)
        if not self.count or bits == 16:
            return ""
        images = "1 image of 16 bits has" if self.count == 1 else f"{self.count:,} images of 16 bits have"
        return (
            f"{images} no value above {self.peak:,}, as those of {bits} bits have, and the files do not say so: 65,535"
            f" is read as white, so that of 256 levels {(self.peak + 128) // 257 + 1} are left. Scale the files first"
            f" (ImageMagick: mogrify -evaluate multiply {2 ** (16 - bits)} FILES), and alike those that the model will"
            " be used on"
        )

    @property
    def is_mixed(self) -> bool:
        """Return whether some are nearly black, and others are not."""
        return self.dark > 0 and self.peak >= 2**14
