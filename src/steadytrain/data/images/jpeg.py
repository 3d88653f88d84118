"""JPEG by libjpeg-turbo, and no more of it than is needed.

The rows below a crop need not be decoded: in a baseline JPEG of one scan, whose blocks are stored from top to bottom,
the decoder is told of a smaller height. It then stops there, and complains about the bytes that are left over, by
which it says that all before them was sound. Every row that is asked for has the pixels of a full decode.

Where the native decoder is there (:mod:`steadytrain.native`), no block is decoded that a box does not show; the pixels
are the same.
"""

from __future__ import annotations

import re
from contextlib import suppress
from importlib import import_module
from typing import Any, Literal, NamedTuple

import numpy as np
import simplejpeg

from steadytrain.data.arrays import Pixels
from steadytrain.data.images.file_types import FRAMES, SCAN, markers

parts: Any = None
with suppress(ImportError):
    native = import_module("steadytrain.native")
    parts = native if native.DECODES else None
"""The native decoder; None where it was not built, or this processor lacks what it needs."""

Channels = Literal[1, 3]

# What libjpeg-turbo says of bytes that are left over, up to the end of the image or to a restart marker.
_LEFT_OVER = re.compile(r"Corrupt JPEG data: \d+ extraneous bytes before marker 0x(d[0-79])")
_COLOURS = {1: "GRAY", 3: "RGB"}
_MCU = 16  # rows that are decoded together, at most

_BASELINE = (0xC0, 0xC1)  # frames that are Huffman coded and sequential
_LAST_COMMON = 0xC2  # progressive; the others are rare, and some end the process inside libjpeg-turbo: for Pillow


class JpegHeader(NamedTuple):
    """The header of a JPEG.

    Args:
        height, width: in pixels.
        frame: where the two bytes of its height stand; those of its width follow.
        scan: where the coded pixels begin, if all of them are one baseline scan; else 0.
    """

    height: int
    width: int
    frame: int
    scan: int


def read_header_of(data: Any) -> JpegHeader | None:
    """Read the header; None for what is no common JPEG of grey, YCbCr or RGB, which is left to Pillow."""
    view = memoryview(data)
    if bytes(view[:2]) != b"\xff\xd8" or (frame_and_scan := _find_frame_and_scan(view)) is None:
        return None
    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(data)
    except Exception:  # noqa: BLE001 - a ValueError; a KeyError where chroma has a form that it has no name for, as 4:4:1
        return None
    return JpegHeader(height, width, *frame_and_scan) if colours in ("Gray", "YCbCr", "RGB") else None


def decode(data: Any, shape: tuple[int, int, int], memory: Pixels, *, shrink: int = 1) -> Pixels:
    """Decode all rows.

    Args:
        shape: height, width, and the channels that are wanted (1 or 3).
        memory: to decode into; at least the size of the result.
        shrink: 1, 2, 4 or 8 times fewer pixels in each direction (rounded up).

    Returns:
        uint8[H, W, C].

    Raises:
        ValueError: the data are damaged, or cut short.
    """
    height, width = -(-shape[0] // shrink), -(-shape[1] // shrink)
    limits = {"min_height": height, "min_width": width} if shrink > 1 else {}
    array: Pixels = simplejpeg.decode_jpeg(data, _COLOURS[shape[2]], buffer=memory, **limits)
    if array.shape != (height, width, shape[2]):
        raise ValueError(f"decoded to {array.shape}, not to {(height, width, shape[2])}")
    return array


def decode_part(data: Any, part: list[int], out: Pixels) -> bool:
    """Decode a part of an image, and tell whether that can be done (else ``out`` is left undefined).

    Args:
        part: left, top, right, bottom in pixels.
        out: uint8[bottom - top, right - left, channels]; its pixels lie side by side, its rows anywhere.
    """
    if parts is None:
        return False
    array = data if isinstance(data, np.ndarray) else np.frombuffer(data, dtype=np.uint8)
    is_done: bool = parts.decode(
        out.ctypes.data, out.strides[0], array.ctypes.data, array.size, part, channels=out.shape[2]
    )
    return is_done


def decode_top(
    data: Pixels, head: JpegHeader, channels: Channels, memory: Pixels, *, rows: int, shrink: int = 1
) -> Pixels | None:
    """Decode the first ``rows`` rows (of the full size), and some more; None where that cannot be, or is not worth it.

    ``data`` are changed meanwhile, and belong to ``head``. The other arguments are those of :func:`decode`.

    Raises:
        ValueError: these rows are damaged.
    """
    # Chroma is interpolated from the rows below as well: two (shrunk) rows more than are asked for.
    height = -(-(rows + 2 * shrink) // _MCU) * _MCU
    if height > head.height - _MCU or not head.scan:
        return None
    at = head.frame
    before = data[at : at + 2].copy()
    data[at : at + 2] = height >> 8, height & 0xFF
    try:
        return decode(data, (height, head.width, channels), memory, shrink=shrink)
    except ValueError as error:
        left_over = _LEFT_OVER.fullmatch(str(error))
        if left_over is None:
            raise
        if left_over[1] != "d9" and bytes(data[-2:]) != b"\xff\xd9":  # it may be cut short behind that marker
            return None
    finally:
        data[at : at + 2] = before
    shape = height // shrink, -(-head.width // shrink), channels
    return memory[: shape[0] * shape[1] * shape[2]].reshape(shape)


def _find_frame_and_scan(data: memoryview) -> tuple[int, int] | None:
    """Find where the frame and the scan begin; None where there is no frame of a common kind."""
    frame, kind, colours = 0, 0, 0
    with suppress(IndexError):
        for marker, at in markers(data):
            if marker in FRAMES:
                if frame or marker > _LAST_COMMON:
                    break
                frame, kind, colours = at + 5, marker, data[at + 9]
            elif marker == SCAN and kind in _BASELINE and data[at + 4] == colours:
                return frame, at + 2 + (data[at + 2] << 8 | data[at + 3])
    return (frame, 0) if frame else None
