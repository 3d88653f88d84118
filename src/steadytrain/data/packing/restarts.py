"""Restart markers: JPEGs of which any part can be decoded without the rest.

After every few MCUs ("minimum coded units", 8 or 16 pixels a side) the coder starts anew and leaves a marker (ITU-T
T.81, 1992, section E.1.4). Every decoder reads such files; the native one leaves out the intervals that a crop does
not show. The interval divides a row of MCUs, so that columns can be left out as well as rows.

>>> interval(341, 16, most=4), interval(384, 16, most=4), interval(272, 16, most=4), interval(384, 8, most=4)
(2, 4, 1, 8)
"""

from __future__ import annotations

import io
from contextlib import suppress
from functools import lru_cache
from importlib import import_module
from typing import Any

import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import Image

native: Any = None
with suppress(ImportError):
    native = import_module("steadytrain.native")

_UNIT = 16  # pixels, that ``most`` counts
_MCU = {"Gray": 8, "444": 8, "440": 8, "422": 16, "420": 16, "411": 32}  # pixels across, by chroma


@lru_cache(maxsize=1024)
def interval(width: int, mcu: int, *, most: int) -> int:
    """MCUs from one marker to the next: the largest divisor of a row that is no wider than ``most`` times 16 pixels.

    Args:
        width: of the image, in pixels.
        mcu: width of an MCU, in pixels.
        most: 1 or more.
    """
    across = -(-width // mcu)
    return next(each for each in range(max(1, most * _UNIT // mcu), 0, -1) if across % each == 0)


def encode(pixels: NDArray[np.uint8], quality: int, *, most: int) -> bytes:
    """A baseline JPEG, of 4:2:0 chroma where there is colour.

    Args:
        pixels: uint8[H, W, 3] or uint8[H, W].
        quality: 1 to 100.
        most: as for :func:`interval`; 0: no markers.
    """
    told: dict[str, Any] = {"quality": quality, "subsampling": "4:2:0"}
    if most:
        mcu = _MCU["Gray" if pixels.ndim == 2 else "420"]
        told["restart_marker_blocks"] = interval(pixels.shape[1], mcu, most=most)
    file = io.BytesIO()
    # By Pillow: simplejpeg 1.9.0 has no markers, and its transform is the fast one, whatever it is told: 2.5 dB less at
    # quality 95, and files as large.
    Image.fromarray(pixels).save(file, "JPEG", **told)
    return file.getvalue()


def mark(data: bytes, *, most: int) -> bytes:
    """Add markers to a JPEG without decoding it; where that cannot be, the same bytes.

    Args:
        data: a sound JPEG.
        most: as for :func:`interval`.
    """
    assert native is not None
    _, width, _, chroma = simplejpeg.decode_jpeg_header(data)
    marked: bytes | None = native.restart(data, interval(width, _MCU[chroma], most=most)) if chroma in _MCU else None
    return data if marked is None else marked
