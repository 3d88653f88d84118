"""Encoded bytes to the pixels of a square.

JPEG goes through simplejpeg (libjpeg-turbo), bare pixels (``bare``) are copied, everything else,
and whatever simplejpeg refuses, goes through Pillow, by the rule that packing follows too
(``pixels``): an image is bad when that cannot read all of it. All give the same pixels. EXIF
orientation is not looked at here: packing has turned images upright.

A JPEG far larger than needed is shrunk by 2, 4 or 8 while it is decoded (in its cosine transform), as long as 1.5 times
the target's resolution is left. Against decoding all of it and resizing with Pillow, a square has at least
:data:`PSNR` dB on photographs, and at least :data:`SHRUNK_PSNR` dB where the image was shrunk; the tests measure it.

No image is decoded whose header tells of more than 100 million pixels.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from steadytrain.data.loader import jpeg
from steadytrain.data.loader.crop import Crop, Plan, Square
from steadytrain.data.loader.jpeg import Channels, Pixels
from steadytrain.data.loader.resample import WASTE, Window, mirror, resample, resize_part
from steadytrain.data.loader.sampler import Ints
from steadytrain.data.packing.images import MAX_PIXELS, BadImageError, flatten, load, read_header
from steadytrain.data.recordio.framing import of_bare

PSNR, SHRUNK_PSNR = 50.0, 33.0

Box = list[int]
"""Left, top, right, bottom, in pixels."""

_MODES = {1: "L", 3: "RGB"}


@dataclass(slots=True)
class Encoded:
    """An image whose header has been read.

    Args:
        data: all of its bytes.
        height, width: in pixels.
        head: of a JPEG that simplejpeg is to decode.
        opened: Pillow's handle, where Pillow is to decode it.
        bare: the pixels, where they lie in ``data`` as they are.
    """

    data: Any
    height: int
    width: int
    head: jpeg.Head | None = None
    opened: Image.Image | None = None
    bare: Pixels | None = None

    @property
    def size(self) -> tuple[int, int]:
        """Height and width."""
        return self.height, self.width


class Part(NamedTuple):
    """Decoded pixels, uint8[H, W, C].

    Args:
        pixels: all of the image, or a part of it.
        top, left: where the part begins, in the image's pixels.
        shrunk: there are this many times fewer pixels in each direction than the image has.
        backwards: blue stands first, and red last.
    """

    pixels: Pixels
    top: int = 0
    left: int = 0
    shrunk: int = 1
    backwards: bool = False


class Scratch:
    """Memory that one thread works in, again and again.

    Args:
        keeps: bytes; what is larger is allocated for once.

    ``augment_seconds``: spent on squares after decoding, since somebody set it to 0.
    """

    def __init__(self, keeps: int = 32 * 2**20) -> None:
        self.keeps = keeps
        self.augment_seconds = 0.0
        self._memory = np.empty(0, dtype=np.uint8)
        self._square = self._memory

    def square(self, shape: tuple[int, ...]) -> Pixels:
        """Other memory, of this shape, good until the next call."""
        if self._square.shape != shape:
            self._square = np.empty(shape, dtype=np.uint8)
        return self._square

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
    head = jpeg.head_of(data)
    bare = None if head else of_bare(data)
    if head is not None:
        encoded = Encoded(data, head.height, head.width, head)
    elif bare is not None:
        encoded = Encoded(data, bare.shape[0], bare.shape[1], bare=bare)
    else:
        encoded = _open(data)
    if encoded.height * encoded.width > MAX_PIXELS:
        raise BadImageError(f"{encoded.height * encoded.width:,} pixels, more than {MAX_PIXELS:,}")
    return encoded


def pixels(encoded: Encoded, channels: Channels, scratch: Scratch) -> Pixels:
    """All of an image's pixels, uint8[H, W, channels].

    They may lie in the scratch memory, and are then good until it is next used.

    Args:
        encoded: the image.
        channels: 3 (RGB) or 1 (grey).
        scratch: of this thread.

    Raises:
        BadImageError: the image cannot be decoded.
    """
    if encoded.bare is not None:
        return _copy_bare(encoded.bare, channels, scratch)
    if encoded.head is not None:
        shape = encoded.height, encoded.width, channels
        with suppress(ValueError):
            return jpeg.decode(encoded.data, shape, scratch.take(math.prod(shape)))
    # Pillow has the last word on what is unreadable.
    image = flatten(load(read_header(encoded.data) if encoded.opened is None else encoded.opened))
    if image.mode != _MODES[channels]:
        image = image.convert(_MODES[channels])
    return np.array(image).reshape(image.height, image.width, channels)


def cut_all(
    out: Pixels,
    encoded: Sequence[Encoded | BadImageError],
    memory: Pixels,
    at: Ints,
    cut: Crop,
    plan: Plan,
    scratch: Scratch,
) -> NDArray[np.bool_]:
    """Make the squares of those images that the native decoder can decode, all in one call; which they are, bool[n].

    Args:
        out: uint8[n, S, S, C], contiguous; what could not be made is left undefined.
        encoded: the images, in the order of the plan.
        memory: their bytes, one behind the other.
        at: int64[n + 1], where each begins, and the last one ends; a bad one has no bytes.
        cut: of which the plan is.
        plan: what to take.
        scratch: of this thread.
    """
    heads = [None if isinstance(image, BadImageError) else image.head for image in encoded]
    able: NDArray[np.bool_] = np.array([head is not None and head.scan > 0 for head in heads]) & (plan.shrinks == 1)
    if jpeg.parts is None or cut.channels != 3 or not able.any():
        return np.zeros(len(encoded), dtype=np.bool_)
    needed, sizes = cut.needed(plan), np.diff(at)
    (width, height), (wide, high) = ((boxes[:, 2:] - boxes[:, :2]).T for boxes in (needed, plan.boxes))
    resizing = jpeg.parts.room_to_resize(high, wide, plan.resized.sum(axis=1), cut.size)
    rooms = np.maximum(jpeg.parts.room_to_decode(width, height), resizing)
    able &= np.maximum(rooms, 3 * high * wide) <= jpeg.parts.MOST_ROOM
    # As Window has it: where most of it would be in vain, it is resized in another way.
    is_moved = (np.column_stack((high, wide)) == plan.resized).all(axis=1)
    able &= is_moved | (plan.resized.prod(axis=1) <= WASTE * cut.size**2)
    if not able.any():
        return able
    told = (at[:-1], np.where(able, sizes, 0), needed, plan.boxes, plan.resized, plan.corners, plan.flips)
    squares = np.column_stack(told).astype(np.int64, copy=False)
    done = np.empty(len(encoded), dtype=np.uint8)
    since = time.perf_counter()
    decoding = jpeg.parts.cut(
        out.ctypes.data,
        cut.size,
        memory.ctypes.data,
        int(at[-1]),
        squares.ctypes.data,
        len(squares),
        done.ctypes.data,
        cubic=cut.interpolation == "bicubic",
        rooms=(int(sizes[able].max()), int((high * wide)[able].max()) * 3, int(rooms[able].max())),
    )
    scratch.augment_seconds += (1 - decoding) * (time.perf_counter() - since)
    return done.astype(np.bool_)


def cut_into(
    out: Pixels, encoded: Encoded, cut: Crop, plan: Plan, row: int, scratch: Scratch, needed: Box | None = None
) -> None:
    """Decode an image and write the square that row ``row`` of the plan tells of into ``out``, uint8[S, S, C].

    Args:
        out: where to.
        encoded: the image.
        cut: of which the plan is.
        plan: what to take.
        row: of the plan.
        scratch: of this thread.
        needed: the row of :meth:`Cut.needed`, where the native decoder is to be tried.

    Raises:
        BadImageError: the image cannot be decoded; ``out`` is left undefined.
    """
    part, square, head = None, plan.squares[row], encoded.head
    if needed is not None and jpeg.parts is not None and head is not None and head.scan and square.shrink == 1:
        part = _decode_box(encoded, needed, cut.channels, square, scratch)
    if part is None and head is not None:
        with suppress(ValueError):
            part = _decode_jpeg(encoded, head, cut.channels, square, scratch)
    part = part or Part(pixels(encoded, cut.channels, scratch))
    since = time.perf_counter()
    _place(out, part, cut, square, scratch)
    scratch.augment_seconds += time.perf_counter() - since


def cut_from(out: Pixels, source: Pixels, cut: Crop, plan: Plan, row: int) -> None:
    """The same from an image that is decoded already, uint8[H, W, C]."""
    _place(out, Part(source), cut, plan.squares[row], Scratch())


def _place(out: Pixels, part: Part, cut: Crop, square: Square, scratch: Scratch) -> None:
    (height, width), (top, left), (x, y, right, bottom) = square.resized, square.corner, square.box
    box = x - part.left, y - part.top, right - part.left, bottom - part.top
    # What of the square lies in the image; the rest is padding.
    y0, x0 = min(max(0, -top), cut.size), min(max(0, -left), cut.size)
    y1, x1 = max(y0, min(cut.size, height - top)), max(x0, min(cut.size, width - left))
    window = Window(box, (height, width), top + y0, left + x0, y1 - y0, x1 - x0, part.shrunk)
    is_inside, flip = (y1 - y0, x1 - x0) == (cut.size, cut.size), square.flip
    if (
        flip
        and is_inside
        and resize_part(out, part.pixels, window, cut.interpolation, mirrored=True, swapped=part.backwards)
    ):
        return
    made = scratch.square(out.shape) if flip else out
    if not is_inside:
        made[...] = 0
    if y1 > y0 and x1 > x0:
        resample(made[y0:y1, x0:x1], part.pixels, window, cut.interpolation)
    if flip:
        mirror(out, made, backwards=part.backwards)


def _open(data: Any) -> Encoded:
    image = read_header(data)
    return Encoded(data, image.height, image.width, opened=image)


def _copy_bare(bare: Pixels, channels: Channels, scratch: Scratch) -> Pixels:
    if bare.ndim == 3 and channels == 1:
        return np.array(Image.fromarray(bare).convert("L"))[..., None]
    height, width = bare.shape[:2]
    memory = scratch.take(height * width * channels)[: height * width * channels].reshape(height, width, channels)
    memory[...] = bare if bare.ndim == 3 else bare[..., None]
    return memory


def _decode_box(encoded: Encoded, box: Box, channels: Channels, square: Square, scratch: Scratch) -> Part | None:
    """What a square needs of a JPEG; None where that cannot be had by itself."""
    left, top, right, bottom = box
    x0, y0, x1, y1 = square.box
    if box == square.box or (y1 - y0, x1 - x0) == tuple(square.resized):
        shape = bottom - top, right - left, channels
        made = out = scratch.take(math.prod(shape))[: math.prod(shape)].reshape(shape)
    else:  # the box is resized as a whole; what is not needed of it is left undefined, and has no bearing on the square
        shape = y1 - y0, x1 - x0, channels
        made = scratch.take(math.prod(shape))[: math.prod(shape)].reshape(shape)
        out = made[top - y0 : bottom - y0, left - x0 : right - x0]
        left, top = x0, y0
    is_made = jpeg.decode_part(encoded.data, box, out, backwards=square.flip)
    return Part(made, top, left, 1, square.flip) if is_made else None


def _decode_jpeg(encoded: Encoded, head: jpeg.Head, channels: Channels, square: Square, scratch: Scratch) -> Part:
    """What a square needs of a JPEG. Raises ValueError where that is damaged."""
    shrink, backwards = square.shrink, square.flip
    shape = head.height, head.width, channels
    memory = scratch.take(-(-shape[0] // shrink) * -(-shape[1] // shrink) * channels)
    made = None
    if isinstance(encoded.data, np.ndarray) and encoded.data.flags.writeable:
        rows = square.box[3]
        made = jpeg.decode_top(encoded.data, head, channels, memory, rows=rows, shrink=shrink, backwards=backwards)
    if made is None:
        made = jpeg.decode(encoded.data, shape, memory, shrink=shrink, backwards=backwards)
    return Part(made, 0, 0, shrink, backwards)
