"""JPEG by libjpeg-turbo, and no more of it than is needed.

The rows below a crop need not be decoded: in a baseline JPEG of one scan, whose blocks are stored from top to bottom,
the decoder is told of a smaller height. It then stops there, and complains about the bytes that are left over, by
which it says that all before them was sound. Every row that is asked for has the pixels of a full decode.
"""

from __future__ import annotations

import re
from typing import Any, Literal

import numpy as np
import simplejpeg
from numpy.typing import NDArray

from steadytrain.records.pixels import is_common_jpeg

Pixels = NDArray[np.uint8]
Channels = Literal[1, 3]

_LEFT_OVER = re.compile(r"Corrupt JPEG data: \d+ extraneous bytes before marker 0xd9")
_COLOURS = {1: "GRAY", 3: "RGB"}
_MCU = 16  # rows that are decoded together, at most

# Markers: start of a baseline frame (Huffman coded, sequential), of any other frame, of a scan; a restart interval.
_BASELINE, _OTHERS = (0xC0, 0xC1), {*range(0xC2, 0xD0)} - {0xC4, 0xC8, 0xCC}
_SCAN, _RESTARTS = 0xDA, 0xDD


def is_jpeg(data: Any) -> bool:
    """Whether these bytes begin as a JPEG does."""
    return bytes(data[:2]) == b"\xff\xd8"


def size(data: Any) -> tuple[int, int] | None:
    """Height and width; None for what is no common JPEG of grey, YCbCr or RGB, which is left to Pillow."""
    if not is_jpeg(data) or not is_common_jpeg(data):
        return None
    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(data)
    except ValueError:
        return None
    return (height, width) if colours in ("Gray", "YCbCr", "RGB") else None


def decode(data: Any, shape: tuple[int, int, int], memory: Pixels, *, shrink: int = 1) -> Pixels:
    """All rows.

    Args:
        data: the file's bytes.
        shape: height, width, and the channels that are wanted (1 or 3).
        memory: to decode into; at least the size of the result.
        shrink: 1, 2, 4 or 8 times fewer pixels in each direction (rounded up).

    Returns:
        uint8[H, W, C].

    Raises:
        ValueError: the data are damaged, or cut short.
    """
    height, width = -(-shape[0] // shrink), -(-shape[1] // shrink)
    wanted = {"min_height": height, "min_width": width} if shrink > 1 else {}
    array: Pixels = simplejpeg.decode_jpeg(data, _COLOURS[shape[2]], buffer=memory, **wanted)
    if array.shape != (height, width, shape[2]):
        raise ValueError(f"decoded to {array.shape}, not to {(height, width, shape[2])}")
    return array


def decode_top(
    data: Pixels, shape: tuple[int, int, int], memory: Pixels, *, rows: int, shrink: int = 1
) -> Pixels | None:
    """The first ``rows`` rows (of the full size), and some more; None where that is not to be had, or not worth it.

    ``data`` are changed meanwhile. The other arguments are those of :func:`decode`.

    Raises:
        ValueError: these rows are damaged.
    """
    # Chroma is interpolated from the rows below as well: two (shrunk) rows more than are asked for.
    height = -(-(rows + 2 * shrink) // _MCU) * _MCU
    if height > shape[0] - _MCU:
        return None
    at = _height_of_single_scan(data.data)
    if at == 0:
        return None
    before = data[at : at + 2].copy()
    data[at : at + 2] = height >> 8, height & 0xFF
    try:
        return decode(data, (height, *shape[1:]), memory, shrink=shrink)
    except ValueError as error:
        if not _LEFT_OVER.fullmatch(str(error)):
            raise
    finally:
        data[at : at + 2] = before
    made = height // shrink, -(-shape[1] // shrink), shape[2]
    return memory[: made[0] * made[1] * made[2]].reshape(made)


def _height_of_single_scan(data: memoryview) -> int:
    """Where a JPEG keeps its height, if it is baseline, of a single scan, and without restarts; else 0."""
    at, frame, components = 2, 0, 0
    try:
        while data[at] == 0xFF:
            marker = data[at + 1]
            if marker == 0xFF:  # padding
                at += 1
                continue
            if marker in _BASELINE:
                frame, components = at + 5, data[at + 9]
            elif marker == _SCAN:
                return frame if data[at + 4] == components else 0
            elif marker == _RESTARTS or marker in _OTHERS:
                return 0
            at += 2 + (data[at + 2] << 8 | data[at + 3])
    except IndexError:
        return 0
    return 0
