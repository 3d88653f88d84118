"""Why bytes cannot be used as an image, in a few words and with the remedy where there is one.

>>> why_no_image(b"\\0\\0\\0\\x18ftypheic" + bytes(60))
'a HEIC image, which is not read here: convert it to JPEG or PNG'
>>> why_no_image(b"\\xff\\xd8\\xff\\xc3\\0\\x0b\\x10\\0\\x20\\0\\x20\\1" + bytes(60))
'a lossless JPEG of 16 bits, which is not read here: convert it to PNG'
>>> why_no_image(b"PK\\3\\4" + bytes(60))
'a zip archive, not an image'
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal, NamedTuple

from steadytrain.data.checking.file_types import LOOK_AT, is_image_name, recognise

CUT_SHORT = "cut short"
_CONVERT = "convert it to JPEG or PNG"
_FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
_LOSSLESS = {0xC3, 0xC7, 0xCB, 0xCF}
_HIERARCHICAL = {0xC5, 0xC6, 0xC7, 0xCD, 0xCE, 0xCF}
_SCAN, _END = 0xDA, 0xD9
# What Pillow says, by versions past and present, and what it means.
_TOLD = (
    (re.compile("truncated|not enough image data|end of file|EOF", re.IGNORECASE), CUT_SHORT),
    (re.compile("broken data stream|decoder error|unrecognized data|cannot load"), "damaged: it cannot be decoded"),
    (re.compile("broken PNG|bad header checksum|chunk"), "damaged: a chunk is broken"),
    # Its "cannot identify" names a buffer's address: noise, and different in every process.
    (re.compile("cannot identify"), "damaged header"),
)


class Frame(NamedTuple):
    """What the frame header of a JPEG says; ``kind`` is its marker's second byte, ``parts`` the number of colours."""

    kind: int
    bits: int
    height: int
    width: int
    parts: int


def why_no_image(data: bytes | memoryview, error: Exception | None = None) -> str:
    """The reason why the header of a file could not be read.

    Args:
        data: all of it.
        error: what the decoder said.
    """
    told = recognise(bytes(data[:LOOK_AT]), len(data))
    if told is None:
        return "not an image of a known format"
    if "Git LFS" in told.name:
        return "a Git LFS pointer, not the image: fetch it with git lfs pull"
    if "not read here" in told.name:
        return f"{told.name}: {_CONVERT}"
    if not is_image_name(told.name):
        return told.name if ":" in told.name or "nothing else" in told.name else f"{told.name}, not an image"
    if told.name == "a JPEG image":
        return _why_no_jpeg(data)
    if _ends_early(data):
        return CUT_SHORT
    if told.name == "a TIFF image" and (error is None or "cannot identify" in str(error)):
        return f"a TIFF of a kind that is not read here, or damaged: {_CONVERT}"
    return "damaged header" if error is None or "decoder object" in str(error) else why_damaged(error)


def _ends_early(data: bytes | memoryview) -> bool:
    """Whether a WebP is shorter than it says, or the tables of a TIFF would lie beyond its end."""
    start = bytes(data[:8])
    if start[:4] == b"RIFF":
        return int.from_bytes(start[4:], "little") + 8 > len(data)
    orders: dict[bytes, Literal["little", "big"]] = {b"II*\0": "little", b"MM\0*": "big"}
    order = orders.get(start[:4])
    return order is not None and int.from_bytes(start[4:], order) >= len(data)


def why_damaged(error: Exception) -> str:
    """The reason in what a decoder says of pixels that it could not decode."""
    told = str(error) or type(error).__name__
    return next((meaning for pattern, meaning in _TOLD if pattern.search(told)), f"damaged: {told}")


def frame_of(data: bytes | memoryview) -> Frame | None:
    """The frame header of a JPEG; None where there is none before the first scan."""
    for marker, at in _markers(data):
        if marker in _FRAMES and at + 10 <= len(data):
            height, width = int.from_bytes(data[at + 5 : at + 7], "big"), int.from_bytes(data[at + 7 : at + 9], "big")
            return Frame(marker, data[at + 4], height, width, data[at + 9])
    return None


def scan_of(data: bytes | memoryview) -> int:
    """Where the first scan of a JPEG begins; the number of its bytes where there is none."""
    return next((at for marker, at in _markers(data) if marker == _SCAN), len(data))


def _markers(data: bytes | memoryview) -> Iterator[tuple[int, int]]:
    """The second bytes of a JPEG's markers, and where they stand, as far as its first scan or its end."""
    at = 2
    while at + 4 <= len(data) and data[at] == 0xFF:
        marker = data[at + 1]
        if marker != 0xFF:
            yield marker, at
        if marker in (_SCAN, _END):
            return
        # Any number of 0xFF may stand before a marker; every marker this early has a length.
        at += 1 if marker == 0xFF else 2 + int.from_bytes(data[at + 2 : at + 4], "big")


def _why_no_jpeg(data: bytes | memoryview) -> str:
    frame = frame_of(data)
    if frame is None:
        return "damaged header" if _has_scan_or_end(data) else CUT_SHORT
    if frame.kind in _LOSSLESS:
        return f"a lossless JPEG of {frame.bits} bits, which is not read here: convert it to PNG"
    if frame.kind in _HIERARCHICAL:
        return f"a hierarchical JPEG, which is not read here: {_CONVERT}"
    if frame.bits == 12:
        return "a JPEG of 12 bits, which is not read here: convert it to 8 bits"
    if not frame.height or not frame.width:
        return f"damaged header: {frame.width} x {frame.height} pixels"
    return "damaged header"


def _has_scan_or_end(data: bytes | memoryview) -> bool:
    return any(bytes((0xFF, marker)) in bytes(data) for marker in (_SCAN, _END))
