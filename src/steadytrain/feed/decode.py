"""Encoded bytes to the pixels of a square.

JPEG goes through simplejpeg (libjpeg-turbo), bare pixels (:mod:`steadytrain.records.bare`) are copied, everything else,
and whatever simplejpeg refuses, goes through Pillow, by the rule that packing follows too
(:mod:`steadytrain.records.pixels`): an image is bad when that cannot read all of it. All give the same pixels. EXIF
orientation is not looked at here: packing has turned images upright.

A JPEG far larger than needed is shrunk by 2, 4 or 8 while it is decoded (in its cosine transform), as long as 1.5 times
the target's resolution is left. Against decoding all of it and resizing with Pillow, a square has at least
:data:`PSNR` dB on photographs, and at least :data:`SHRUNK_PSNR` dB where the image was shrunk; the tests measure it.

No image is decoded whose header tells of more than 100 million pixels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from steadytrain.feed import jpeg
from steadytrain.feed.cut import Cut, Plan
from steadytrain.feed.jpeg import Channels, Pixels
from steadytrain.feed.resample import Window, mirror, resample
from steadytrain.records.bare import of_bare
from steadytrain.records.pixels import MAX_PIXELS, BadImageError, flatten, load, read_header

PSNR, SHRUNK_PSNR = 50.0, 33.0


_MODES = {1: "L", 3: "RGB"}


@dataclass(slots=True)
class Encoded:
    """An image whose header has been read.

    Args:
        data: all of its bytes.
        height, width: in pixels.
        opened: Pillow's handle, where Pillow is to decode it.
        bare: the pixels, where they lie in ``data`` as they are.
    """

    data: Any
    height: int
    width: int
    opened: Image.Image | None = None
    bare: Pixels | None = None

    @property
    def size(self) -> tuple[int, int]:
        """Height and width."""
        return self.height, self.width


class Scratch:
    """Memory that one thread works in, again and again.

    Args:
        keeps: bytes; what is larger is allocated for once.
    """

    def __init__(self, keeps: int = 32 * 2**20) -> None:
        self.keeps = keeps
        self._memory = np.empty(0, dtype=np.uint8)

    def take(self, size: int) -> Pixels:
        """At least ``size`` bytes, good until the next call."""
        if size > self.keeps:
            return np.empty(size, dtype=np.uint8)
        if size > len(self._memory):
            self._memory = np.empty(min(size + size // 4, self.keeps), dtype=np.uint8)
        return self._memory


def probe(data: Any) -> Encoded:
    """Read an image's header.

    Args:
        data: bytes-like, the whole image.

    Raises:
        BadImageError: no image, or one of too many pixels.
    """
    size = jpeg.size(data)
    bare = None if size else of_bare(data)
    if bare is not None:
        encoded = Encoded(data, bare.shape[0], bare.shape[1], bare=bare)
    else:
        encoded = _open(data) if size is None else Encoded(data, *size)
    if encoded.height * encoded.width > MAX_PIXELS:
        raise BadImageError(f"{encoded.height * encoded.width:,} pixels, more than {MAX_PIXELS:,}")
    return encoded


def pixels(
    encoded: Encoded, channels: Channels, scratch: Scratch, *, shrink: int = 1, rows: int | None = None
) -> Pixels:
    """An image's pixels, uint8[H, W, channels].

    They may lie in the scratch memory, and are then good until it is next used.

    Args:
        encoded: the image.
        channels: 3 (RGB) or 1 (grey).
        scratch: of this thread.
        shrink: a JPEG may come with 2, 4 or 8 times fewer pixels in each direction.
        rows: those below may be missing; None: all are needed.

    Raises:
        BadImageError: the image cannot be decoded.
    """
    if encoded.bare is not None:
        return _copy_bare(encoded.bare, channels, scratch)
    if encoded.opened is None:
        try:
            return _decode_jpeg(encoded, channels, scratch, shrink, rows)
        except ValueError:
            encoded = _open(encoded.data)  # Pillow has the last word on what is unreadable
    assert encoded.opened is not None
    image = flatten(load(encoded.opened))
    if image.mode != _MODES[channels]:
        image = image.convert(_MODES[channels])
    return np.array(image).reshape(image.height, image.width, channels)


def cut_into(out: Pixels, encoded: Encoded, cut: Cut, plan: Plan, row: int, scratch: Scratch) -> None:
    """Decode an image and write the square that row ``row`` of the plan tells of into ``out``, uint8[S, S, C].

    Raises:
        BadImageError: the image cannot be decoded; ``out`` is left undefined.
    """
    shrink = int(plan.shrinks[row])
    source = pixels(encoded, cut.channels, scratch, shrink=shrink, rows=int(plan.boxes[row, 3]))
    # Pillow shrinks nothing, and may have had to take over.
    cut_from(out, source, cut, plan, row, shrink if source.shape[1] != encoded.width else 1)


def cut_from(out: Pixels, source: Pixels, cut: Cut, plan: Plan, row: int, shrunk: int = 1) -> None:
    """The same from an image that is decoded already, uint8[H, W, C], to a ``shrunk``-th of its size."""
    (height, width), (top, left) = plan.resized[row].tolist(), plan.corners[row].tolist()
    # What of the square lies in the image; the rest is padding.
    y0, x0 = min(max(0, -top), cut.size), min(max(0, -left), cut.size)
    y1, x1 = max(y0, min(cut.size, height - top)), max(x0, min(cut.size, width - left))
    if (y1 - y0, x1 - x0) != (cut.size, cut.size):
        out[...] = 0
    if y1 > y0 and x1 > x0:
        box = tuple(plan.boxes[row].tolist())
        window = Window(box, (height, width), top + y0, left + x0, y1 - y0, x1 - x0, shrunk)
        resample(out[y0:y1, x0:x1], source, window, cut.interpolation)
    if plan.flips[row]:
        mirror(out)


def _open(data: Any) -> Encoded:
    image = read_header(data)
    return Encoded(data, image.height, image.width, image)


def _copy_bare(bare: Pixels, channels: Channels, scratch: Scratch) -> Pixels:
    if bare.ndim == 3 and channels == 1:
        return np.array(Image.fromarray(bare).convert("L"))[..., None]
    height, width = bare.shape[:2]
    memory = scratch.take(height * width * channels)[: height * width * channels].reshape(height, width, channels)
    memory[...] = bare if bare.ndim == 3 else bare[..., None]
    return memory


def _decode_jpeg(encoded: Encoded, channels: Channels, scratch: Scratch, shrink: int, rows: int | None) -> Pixels:
    shape = encoded.height, encoded.width, channels
    memory = scratch.take(-(-shape[0] // shrink) * -(-shape[1] // shrink) * channels)
    if rows is not None and isinstance(encoded.data, np.ndarray) and encoded.data.flags.writeable:
        top = jpeg.decode_top(encoded.data, shape, memory, rows=rows, shrink=shrink)
        if top is not None:
            return top
    return jpeg.decode(encoded.data, shape, memory, shrink=shrink)
