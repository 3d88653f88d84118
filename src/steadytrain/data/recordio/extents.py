"""Where the bytes of images lie on disk, so that they can be asked for before they are needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


class Extents(NamedTuple):
    """Of N images.

    Args:
        paths: files.
        file: int64[N], a number into ``paths``.
        offset, size: int64[N] bytes.
    """

    paths: Sequence[str]
    file: Ints
    offset: Ints
    size: Ints

    def stretches(self, *, gap: int) -> list[tuple[str, int, int]]:
        """Path, first and end byte of each stretch to read, in the order of the files; gaps of up to ``gap`` bytes go.

        >>> two = Extents(["a"], np.zeros(3, np.int64), np.array([90, 0, 40]), np.array([10, 30, 40]))
        >>> two.stretches(gap=10)
        [('a', 0, 100)]
        >>> two.stretches(gap=0)
        [('a', 0, 30), ('a', 40, 80), ('a', 90, 100)]
        """
        if not len(self.file):
            return []
        order = np.lexsort((self.offset, self.file))
        file, first, end = self.file[order], self.offset[order], self.offset[order] + self.size[order]
        begins = np.ones(len(order), dtype=np.bool_)
        begins[1:] = (file[1:] != file[:-1]) | (first[1:] > end[:-1] + gap)
        starts = np.flatnonzero(begins)
        ends = np.maximum.reduceat(end, starts)
        return [
            (self.paths[which], at, to)
            for which, at, to in zip(file[starts].tolist(), first[starts].tolist(), ends.tolist(), strict=True)
        ]


def of_files(parts: Sequence[tuple[str, Ints, Ints]], starts: Sequence[int], numbers: Ints) -> Extents:
    """Extents of some images of several files that follow each other.

    Args:
        parts: path, offsets and sizes of all images of each file.
        starts: the number of each file's first image, and the end of the last.
        numbers: of the images.
    """
    file = np.searchsorted(np.asarray(starts), numbers, side="right") - 1
    offset, size = np.empty_like(numbers), np.empty_like(numbers)
    for which in np.unique(file).tolist():
        here, (_, offsets, sizes) = file == which, parts[which]
        within = numbers[here] - starts[which]
        offset[here], size[here] = offsets[within], sizes[within]
    return Extents([path for path, _, _ in parts], file, offset, size)
