"""Encoded bytes to the pixels of a square.

JPEG goes through simplejpeg (libjpeg-turbo), everything else, and whatever simplejpeg refuses, through Pillow, by the
rule that packing follows too (:mod:`steadytrain.records.pixels`): an image is bad when that cannot read all of it. Both
decoders give the same pixels. EXIF orientation is not looked at here: packing has turned images upright.

What is resized is resized by Pillow (antialiased; ``Image.resize`` with a box, whose filter may look past the box by
its support). A JPEG far larger than needed is shrunk by 2, 4 or 8 while it is decoded (in its cosine transform), as
long as the box keeps :data:`SHRINK_MARGIN` times the target's resolution. Against Pillow without shrinking that gives
at least :data:`SHRINK_PSNR` dB on photographs (the tests measure it); without shrinking the pixels are Pillow's own.

No image is decoded whose header tells of more than 100 million pixels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import Image

from steadytrain.feed.cut import Cut, Plan
from steadytrain.records.pixels import MAX_PIXELS, BadImageError, flatten, load, read_header

Pixels = NDArray[np.uint8]
Channels = Literal[1, 3]

SHRINK_MARGIN = 1.5
SHRINK_PSNR = 33.0

_MODES = {1: "L", 3: "RGB"}
_FILTERS = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}


@dataclass(slots=True)
class Encoded:
    """An image whose header has been read.

    Args:
        data: all of its bytes.
        height, width: in pixels.
        opened: Pillow's handle, where Pillow is to decode it.
    """

    data: Any
    height: int
    width: int
    opened: Image.Image | None = None


class Scratch:
    """Memory that one thread decodes into, again and again."""

    KEPT = 32 * 2**20

    def __init__(self) -> None:
        self._memory = np.empty(0, dtype=np.uint8)

    def take(self, size: int) -> Pixels:
        """At least ``size`` bytes, good until the next call. What is larger than ``KEPT`` is not kept."""
        if size > self.KEPT:
            return np.empty(size, dtype=np.uint8)
        if size > len(self._memory):
            self._memory = np.empty(min(size + size // 4, self.KEPT), dtype=np.uint8)
        return self._memory


def probe(data: Any) -> Encoded:
    """Read an image's header.

    Args:
        data: bytes-like, the whole image.

    Raises:
        BadImageError: no image, or one of too many pixels.
    """
    encoded = _probe_jpeg(data) or _open(data)
    if encoded.height * encoded.width > MAX_PIXELS:
        raise BadImageError(f"{encoded.height * encoded.width:,} pixels, more than {MAX_PIXELS:,}")
    return encoded


def pixels(encoded: Encoded, channels: Channels, scratch: Scratch, shrink: int = 1) -> Pixels:
    """An image's pixels, uint8[H, W, channels], or ``shrink`` (2, 4, 8; JPEG only) times fewer in each direction.

    They may lie in the scratch memory, and are then good until it is next used.

    Raises:
        BadImageError: the image cannot be decoded.
    """
    if encoded.opened is None:
        try:
            return _decode_jpeg(encoded, channels, shrink, scratch)
        except ValueError:
            encoded = _open(encoded.data)  # Pillow has the last word on what is unreadable
    assert encoded.opened is not None
    image = flatten(load(encoded.opened))
    return np.atleast_3d(np.asarray(image.convert(_MODES[channels])))


def cut_into(out: Pixels, encoded: Encoded, cut: Cut, plan: Plan, row: int, scratch: Scratch) -> None:
    """Decode an image and write the square that row ``row`` of the plan tells of into ``out``, uint8[S, S, C].

    Raises:
        BadImageError: the image cannot be decoded; ``out`` is left undefined.
    """
    shrink = 1 if encoded.opened is not None else _shrink(plan.boxes[row].tolist(), plan.places[row].tolist())
    source = pixels(encoded, cut.channels, scratch, shrink)
    shrunk = source.shape[0] != encoded.height or source.shape[1] != encoded.width
    cut_from(out, source, cut, plan, row, shrink if shrunk else 1)


def cut_from(out: Pixels, source: Pixels, cut: Cut, plan: Plan, row: int, shrunk: int = 1) -> None:
    """The same from an image that is decoded already, uint8[H, W, C], to a ``shrunk``-th of its size."""
    left, top, right, bottom = plan.places[row].tolist()
    width, height = right - left, bottom - top
    if (width, height) != (cut.size, cut.size):
        out[...] = 0
        if width <= 0 or height <= 0:
            return
    box = [edge / shrunk for edge in plan.boxes[row].tolist()]
    small = _resize(source, box, (width, height), cut.interpolation)
    if plan.flips[row]:
        small = small.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        left, right = cut.size - right, cut.size - left
    out[top:bottom, left:right] = np.asarray(small).reshape(height, width, cut.channels)


def _probe_jpeg(data: Any) -> Encoded | None:
    """The header of a JPEG that simplejpeg can decode, else None."""
    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(data)
    except ValueError:
        return None
    return Encoded(data, height, width) if colours in ("Gray", "YCbCr", "RGB") else None


def _open(data: Any) -> Encoded:
    image = read_header(data)
    return Encoded(data, image.height, image.width, image)


def _shrink(box: list[float], place: list[int]) -> int:
    """The largest of 8, 4, 2 and 1 that leaves the box enough resolution."""
    width, height = max(place[2] - place[0], 1), max(place[3] - place[1], 1)
    ratio = min((box[2] - box[0]) / width, (box[3] - box[1]) / height) / SHRINK_MARGIN
    return 1 << min(3, int(math.log2(ratio))) if ratio >= 2 else 1


def _decode_jpeg(encoded: Encoded, channels: Channels, shrink: int, scratch: Scratch) -> Pixels:
    colours, depth = ("GRAY", 1) if channels == 1 else ("RGB", 3)
    height, width = -(-encoded.height // shrink), -(-encoded.width // shrink)
    wanted = {"min_height": height, "min_width": width} if shrink > 1 else {}
    memory = scratch.take(height * width * depth)
    array: Pixels = simplejpeg.decode_jpeg(encoded.data, colours, buffer=memory, **wanted)
    if array.shape != (height, width, depth):
        raise ValueError(f"decoded to {array.shape}, not to {(height, width, depth)}")
    return array


def _resize(source: Pixels, box: list[float], size: tuple[int, int], interpolation: str) -> Image.Image:
    """The box of an image, edges in pixels, brought to ``size`` (width, height)."""
    (height, width), (left, top, right, bottom) = source.shape[:2], box
    exact = (right - left, bottom - top) == size and left.is_integer() and top.is_integer()
    across, down = (0, 0) if exact else (_reach(right - left, size[0]), _reach(bottom - top, size[1]))
    # Pillow stores four bytes a pixel and so has to copy: only what its filter can see, and the crop comes for free.
    x0, y0 = max(0, math.floor(left) - across), max(0, math.floor(top) - down)
    x1, y1 = min(width, math.ceil(right) + across), min(height, math.ceil(bottom) + down)
    channels = source.shape[2]
    mode, start = _MODES[channels], (y0 * width + x0) * channels
    seen = Image.frombytes(mode, (x1 - x0, y1 - y0), source.reshape(-1)[start:], "raw", mode, width * channels, 1)
    if exact:
        return seen
    return seen.resize(size, _FILTERS[interpolation], box=(left - x0, top - y0, right - x0, bottom - y0))


def _reach(side: float, target: int) -> int:
    """How many pixels past the box the filter can see (bicubic's support is 2 pixels of the coarser grid)."""
    return math.ceil(2 * max(side / target, 1)) + 1
