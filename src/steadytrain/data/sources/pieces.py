"""Images that are not files of their own: where their bytes lie inside archives, shards and arrays.

A listing of an archive is a few columns, not a Python object for each of a million members; the packer's children read
the bytes themselves, from the archive, so nothing is unpacked to a disk.

>>> pieces = Pieces(("a.tar", "b.tar"), np.array([0, 1], np.int32), np.array([512, 1536]), np.array([70, 90]))
>>> pieces[1]
Piece(path='b.tar', offset=1536, size=90, deflated=False, pixels=None, crc=-1)
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

MOST_INFLATED = 1 << 30


class Pixels(NamedTuple):
    """Images stored as bare pixels of one shape. ``planar``: one plane after another (CIFAR), not pixel by pixel."""

    height: int
    width: int
    channels: int
    planar: bool = False

    def of(self, data: bytes) -> NDArray[np.uint8]:
        """The pixels in ``data``: uint8[height, width, 3], or uint8[height, width] of one channel."""
        values = np.frombuffer(data, np.uint8)
        if self.channels == 1:
            return values.reshape(self.height, self.width)
        if self.planar:
            return np.ascontiguousarray(values.reshape(self.channels, self.height, self.width).transpose(1, 2, 0))
        return values.reshape(self.height, self.width, self.channels)


class Piece(NamedTuple):
    """One image inside a file: ``size`` bytes from ``offset`` on, perhaps deflated (zip), perhaps bare pixels.

    ``crc`` is the CRC-32 that the image must have; -1 where none is known.
    """

    path: str
    offset: int
    size: int
    deflated: bool = False
    pixels: Pixels | None = None
    crc: int = -1

    def read(self) -> bytes:
        """The image's bytes.

        Raises:
            OSError: the file cannot be read or ends too early, or the image's checksum is another.
            zlib.error: deflated bytes are damaged, or inflate to more than 1 GiB.
        """
        with open(self.path, "rb", buffering=0) as file:  # noqa: PTH123 - called a million times
            file.seek(self.offset)
            data = file.read(self.size)
        if len(data) < self.size:
            raise OSError(f"cut short: {os.path.basename(self.path)} ends within it")  # noqa: PTH119
        data = _inflate(data) if self.deflated else data
        if self.crc >= 0 and zlib.crc32(data) != self.crc:
            raise OSError(f"damaged: its checksum is not the one that {os.path.basename(self.path)} tells")  # noqa: PTH119
        return data


def _inflate(data: bytes) -> bytes:
    inflater = zlib.decompressobj(-zlib.MAX_WBITS)
    found = inflater.decompress(data, MOST_INFLATED)
    if inflater.unconsumed_tail:
        raise zlib.error(f"it inflates to more than {MOST_INFLATED:,} bytes")
    if not inflater.eof:
        raise zlib.error("it ends too early")
    return found


@dataclass(frozen=True, eq=False)
class Pieces:
    """Where N images lie.

    Args:
        paths: of the files that hold them.
        file: int32[N], a number into ``paths``.
        offset, size: int64[N] bytes.
        deflated: bool[N]; None where none is.
        pixels: the shape of every image, where they are bare pixels.
        crc: int64[N], the CRC-32 of each image, -1 where it is not known; None where none is.
    """

    paths: Sequence[str]
    file: NDArray[np.int32]
    offset: NDArray[np.int64]
    size: NDArray[np.int64]
    deflated: NDArray[np.bool_] | None = None
    pixels: Pixels | None = None
    crc: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.file)

    def __getitem__(self, number: int) -> Piece:
        return Piece(
            self.paths[self.file[number]],
            int(self.offset[number]),
            int(self.size[number]),
            self.deflated is not None and bool(self.deflated[number]),
            self.pixels,
            -1 if self.crc is None else int(self.crc[number]),
        )

    def take(self, numbers: NDArray[np.int64]) -> Pieces:
        """Those of some images, in that order."""
        deflated = None if self.deflated is None else self.deflated[numbers]
        crc = None if self.crc is None else self.crc[numbers]
        file, offset, size = self.file[numbers], self.offset[numbers], self.size[numbers]
        return Pieces(self.paths, file, offset, size, deflated, self.pixels, crc)
