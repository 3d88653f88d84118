"""Bare pixels as a payload that other programs read as well: a PPM (P6), or a PGM (P5) of one channel.

Only the form that is written here is read here: one space, no comment, 255 as the largest value. Any other PPM is left
to a decoder of images.

>>> told = to_bare(np.zeros((2, 3, 3), np.uint8))
>>> told[:11], len(told), of_bare(told).shape
(b'P6\\n3 2\\n255\\n', 29, (2, 3, 3))
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

Pixels = NDArray[np.uint8]

_HEADER = re.compile(rb"P([56])\n([1-9]\d{0,8}) ([1-9]\d{0,8})\n255\n")
_LONGEST = 32  # bytes, at least those of the longest header


def to_bare(pixels: Pixels) -> bytes:
    """Header and pixels of uint8[H, W, 3] or uint8[H, W]."""
    kind = 6 if pixels.ndim == 3 else 5
    return b"P%d\n%d %d\n255\n" % (kind, pixels.shape[1], pixels.shape[0]) + pixels.tobytes()


def of_bare(data: Any) -> Pixels | None:
    """The pixels in these bytes, uint8[H, W, 3] or uint8[H, W], not copied; None for anything else."""
    head = _HEADER.match(bytes(data[:_LONGEST]))
    if head is None:
        return None
    width, height = int(head[2]), int(head[3])
    shape = (height, width, 3) if head[1] == b"6" else (height, width)
    if len(data) != head.end() + width * height * (3 if len(shape) == 3 else 1):
        return None
    return np.frombuffer(data, np.uint8, offset=head.end()).reshape(shape)
