"""Encoded bytes to the pixels of a square.

JPEG goes through simplejpeg (libjpeg-turbo), bare pixels (``bare``) are copied, everything else,
and whatever simplejpeg refuses, goes through Pillow, by the rule that packing follows too
(``pixels``): an image is bad when that cannot read all of it. All give the same pixels. EXIF
orientation is not looked at here: packing has turned images upright.

A JPEG far larger than needed is shrunk by 2, 4 or 8 while it is decoded (in its cosine transform), as long as 1.5 times
the target's resolution is left. Against decoding all of it and resizing with Pillow, a square has at least
:data:`PSNR` dB on photographs, and at least :data:`SHRUNK_PSNR` dB where the image was shrunk; the tests measure it.

No image is decoded whose header tells of more than 100 million pixels.

Resizing is antialiased, in two ways, the same to within a level or two: torch's kernel for bytes, where this processor
has it (AVX2 or AVX-512: five times as fast as Pillow, and it writes straight into the batch), and Pillow's ``resize``,
everywhere else and for shapes so long that most of what is resized would be thrown away. Which one is used depends on
the processor and the shapes alone. The native decoder stands in for torch's kernel, with the same bytes; otherwise
torch is imported when the first image is resized.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from steadytrain.data.arrays import Ints, Pixels
from steadytrain.data.images import jpeg
from steadytrain.data.images.decode import (
    MAX_PIXELS,
    BadImageError,
    complete_jpeg,
    from_ppm,
    load,
    read_header,
    to_pixels,
)
from steadytrain.data.images.jpeg import Channels
from steadytrain.data.loader.crop import Crop, CropPlan, Square

PSNR, SHRUNK_PSNR = 50.0, 33.0
WASTE = 4  # times the wanted pixels: beyond that, only the window is resized

Interpolation = Literal["bilinear", "bicubic"]

Box = list[int]
"""A rectangle: left, top, right, bottom, in pixels."""

_MODES = {1: "L", 3: "RGB"}
_FILTERS = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}
_SUPPORT = 2  # reach of bicubic resizing, in pixels of the coarser grid; bilinear has 1


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
    head: jpeg.JpegHeader | None = None
    opened: Image.Image | None = None
    bare: Pixels | None = None

    @property
    def size(self) -> tuple[int, int]:
        """Height and width."""
        return self.height, self.width


class ImagePart(NamedTuple):
    """Decoded pixels, uint8[H, W, C].

    Args:
        top, left: where the part begins, in the image's pixels.
        shrunk: there are this many times fewer pixels in each direction than the image has.
    """

    pixels: Pixels
    top: int = 0
    left: int = 0
    shrunk: int = 1


class Scratch:
    """Memory that one thread works in, again and again.

    ``keeps``: bytes; what is larger is allocated for once.

    ``augment_seconds``: spent on squares after decoding, since somebody set it to 0.
    """

    def __init__(self, keeps: int = 32 * 2**20) -> None:
        self.keeps = keeps
        self.augment_seconds = 0.0
        self._memory = np.empty(0, dtype=np.uint8)
        self._square = self._memory

    def square(self, shape: tuple[int, ...]) -> Pixels:
        """Return other memory, of this shape, good until the next call."""
        if self._square.shape != shape:
            self._square = np.empty(shape, dtype=np.uint8)
        return self._square

    def take(self, size: int) -> Pixels:
        """Return at least ``size`` bytes, good until the next call."""
        if size > self.keeps:
            return np.empty(size, dtype=np.uint8)
        if size > len(self._memory):
            self._memory = np.empty(min(size + size // 4, self.keeps), dtype=np.uint8)
        return self._memory


def probe(data: Any) -> Encoded:
    """Read an image's header. Raises BadImageError: no image, or one of too many pixels."""
    head = jpeg.read_header_of(data)
    bare = None if head else from_ppm(data)
    if head is not None:
        encoded = Encoded(data, head.height, head.width, head)
    elif bare is not None:
        encoded = Encoded(data, bare.shape[0], bare.shape[1], bare=bare)
    else:
        image = read_header(data)
        encoded = Encoded(data, image.height, image.width, opened=image)
    if encoded.height * encoded.width > MAX_PIXELS:
        raise BadImageError(f"{encoded.height * encoded.width:,} pixels, more than {MAX_PIXELS:,}")
    return encoded


def pixels(encoded: Encoded, channels: Channels, scratch: Scratch) -> Pixels:
    """Decode all of an image's pixels, uint8[H, W, channels].

    They may lie in the scratch memory, and are then good until it is next used.

    Raises:
        BadImageError: the image cannot be decoded.
    """
    shape = encoded.height, encoded.width, channels
    if (bare := encoded.bare) is not None:
        if bare.ndim == 3 and channels == 1:
            return np.array(Image.fromarray(bare).convert("L"))[..., None]
        memory = scratch.take(math.prod(shape))[: math.prod(shape)].reshape(shape)
        memory[...] = bare if bare.ndim == 3 else bare[..., None]
        return memory
    if encoded.head is not None:
        with suppress(Exception):
            return jpeg.decode(encoded.data, shape, scratch.take(math.prod(shape)))
        if (whole := complete_jpeg(encoded.data)) is not None:
            return jpeg.decode(whole, shape, scratch.take(math.prod(shape)))
    # Pillow has the last word on what is unreadable.
    array = to_pixels(load(read_header(encoded.data) if encoded.opened is None else encoded.opened))
    if array.ndim == 3 and channels == 1:
        array = np.asarray(Image.fromarray(array).convert("L"))
    if array.ndim == 2 and channels == 3:
        return np.repeat(array[..., None], 3, axis=2)
    return np.require(array.reshape(shape), requirements="W")


def cut_all(
    out: Pixels,
    encoded: Sequence[Encoded | BadImageError],
    memory: Pixels,
    at: Ints,
    crop: Crop,
    plan: CropPlan,
    scratch: Scratch,
) -> NDArray[np.bool_]:
    """Make the squares of those images that the native decoder can decode, all in one call; which they are, bool[n].

    Args:
        out: uint8[n, S, S, C], contiguous; what could not be made is left undefined.
        encoded: the images, in the order of the plan.
        memory: their bytes, one behind the other.
        at: int64[n + 1], where each begins, and the last one ends; a bad one has no bytes.
    """
    heads = [None if isinstance(image, BadImageError) else image.head for image in encoded]
    able: NDArray[np.bool_] = np.array([head is not None and head.scan > 0 for head in heads]) & (plan.shrinks == 1)
    if jpeg.parts is None or crop.channels != 3 or not able.any():
        return np.zeros(len(encoded), dtype=np.bool_)
    needed, sizes = crop.needed(plan), np.diff(at)
    (width, height), (wide, high) = ((boxes[:, 2:] - boxes[:, :2]).T for boxes in (needed, plan.boxes))
    resizing = jpeg.parts.room_to_resize(high, wide, plan.resized.sum(axis=1), crop.size)
    rooms = np.maximum(jpeg.parts.room_to_decode(width, height), resizing)
    able &= np.maximum(rooms, 3 * high * wide) <= jpeg.parts.MOST_ROOM
    # As Window has it: where most of it would be in vain, it is resized in another way.
    is_moved = (np.column_stack((high, wide)) == plan.resized).all(axis=1)
    able &= is_moved | (plan.resized.prod(axis=1) <= WASTE * crop.size**2)
    if not able.any():
        return able
    columns = at[:-1], np.where(able, sizes, 0), needed, plan.boxes, plan.resized, plan.corners, plan.flips
    squares = np.column_stack(columns).astype(np.int64, copy=False)
    is_cut = np.empty(len(encoded), dtype=np.uint8)
    since = time.perf_counter()
    decoding = jpeg.parts.cut(
        out.ctypes.data,
        crop.size,
        memory.ctypes.data,
        int(at[-1]),
        squares.ctypes.data,
        len(squares),
        is_cut.ctypes.data,
        cubic=crop.interpolation == "bicubic",
        rooms=(int(sizes[able].max()), int((high * wide)[able].max()) * 3, int(rooms[able].max())),
    )
    scratch.augment_seconds += (1 - decoding) * (time.perf_counter() - since)
    return is_cut.astype(np.bool_)


def cut_into(
    out: Pixels, encoded: Encoded, crop: Crop, plan: CropPlan, row: int, scratch: Scratch, needed: Box | None = None
) -> None:
    """Decode an image and write the square that row ``row`` of the plan tells of into ``out``, uint8[S, S, C].

    ``needed``: the row of :meth:`Crop.needed`, where the native decoder is to be tried.

    Raises:
        BadImageError: the image cannot be decoded; ``out`` is left undefined.
    """
    part, square, head = None, plan.squares[row], encoded.head
    if needed is not None and head is not None and head.scan and square.shrink == 1:
        part = _decode_box(encoded, needed, crop.channels, square, scratch)
    if part is None and head is not None:
        with suppress(Exception):  # whatever it raises: the image's failure, if it is one of Pillow's too
            part = _decode_jpeg(encoded, head, crop.channels, square, scratch)
    part = part or ImagePart(pixels(encoded, crop.channels, scratch))
    since = time.perf_counter()
    _place(out, part, crop, square, scratch)
    scratch.augment_seconds += time.perf_counter() - since


def cut_from(out: Pixels, source: Pixels, crop: Crop, plan: CropPlan, row: int) -> None:
    """Cut a square from an image that is decoded already, uint8[H, W, C]."""
    _place(out, ImagePart(source), crop, plan.squares[row], Scratch())


def _decode_box(encoded: Encoded, box: Box, channels: Channels, square: Square, scratch: Scratch) -> ImagePart | None:
    """Decode what a square needs of a JPEG by the native decoder; None where that cannot be had by itself."""
    left, top, right, bottom = box
    x0, y0, x1, y1 = square.box
    if (y1 - y0, x1 - x0) == tuple(square.resized):
        x0, y0, x1, y1 = box
    # Else the box is resized as a whole; what is not needed of it is left undefined, and has no bearing on the square.
    shape = y1 - y0, x1 - x0, channels
    decoded = scratch.take(math.prod(shape))[: math.prod(shape)].reshape(shape)
    is_made = jpeg.decode_part(encoded.data, box, decoded[top - y0 : bottom - y0, left - x0 : right - x0])
    return ImagePart(decoded, y0, x0) if is_made else None


def _decode_jpeg(
    encoded: Encoded, head: jpeg.JpegHeader, channels: Channels, square: Square, scratch: Scratch
) -> ImagePart:
    """Decode what a square needs of a JPEG. Raises ValueError where that is damaged."""
    shrink, shape = square.shrink, (head.height, head.width, channels)
    memory, decoded = scratch.take(-(-shape[0] // shrink) * -(-shape[1] // shrink) * channels), None
    if isinstance(encoded.data, np.ndarray) and encoded.data.flags.writeable:
        decoded = jpeg.decode_top(encoded.data, head, channels, memory, rows=square.box[3], shrink=shrink)
    if decoded is None:
        decoded = jpeg.decode(encoded.data, shape, memory, shrink=shrink)
    return ImagePart(decoded, shrunk=shrink)


def _place(out: Pixels, part: ImagePart, crop: Crop, square: Square, scratch: Scratch) -> None:
    (height, width), (top, left), (x, y, right, bottom) = square.resized, square.corner, square.box
    # What of the square lies in the image; the rest is padding.
    y0, x0 = min(max(0, -top), crop.size), min(max(0, -left), crop.size)
    y1, x1 = max(y0, min(crop.size, height - top)), max(x0, min(crop.size, width - left))
    square_pixels = scratch.square(out.shape) if square.flip else out
    if (y1 - y0, x1 - x0) != (crop.size, crop.size):
        square_pixels[...] = crop.fill or 0
    if y1 > y0 and x1 > x0:
        box = x - part.left, y - part.top, right - part.left, bottom - part.top
        window = Window(box, (height, width), top + y0, left + x0, y1 - y0, x1 - x0, part.shrunk)
        resample(square_pixels[y0:y1, x0:x1], part.pixels, window, crop.interpolation)
    if square.flip:
        for channel in range(crop.channels):  # runs of single bytes: several times as fast as runs of three
            out[..., channel] = square_pixels[:, ::-1, channel]


class Window(NamedTuple):
    """A part of a resized box.

    Args:
        box: left, top, right, bottom in the image's pixels; whole numbers. Nothing outside it is looked at.
        resized: height and width that the box is resized to.
        top, left: where in the resized box the window begins.
        height, width: of the window.
        shrunk: the image has this many times fewer pixels in each direction than ``box`` tells of.
    """

    box: tuple[int, int, int, int]
    resized: tuple[int, int]
    top: int
    left: int
    height: int
    width: int
    shrunk: int = 1


def resample(out: Pixels, source: Pixels, window: Window, interpolation: Interpolation) -> None:
    """Write a window into ``out``, uint8[window.height, window.width, C].

    Args:
        out: where to; any strides.
        source: uint8[H, W, C], contiguous.
    """
    left, top, right, bottom = window.box
    if window.shrunk == 1 and (bottom - top, right - left) == window.resized:
        y, x = top + window.top, left + window.left
        out[...] = source[y : y + window.height, x : x + window.width]
    elif math.prod(window.resized) > WASTE * window.height * window.width:
        _by_pillow(out, source, window, interpolation)
    elif not _by_native(out, source, window, interpolation):
        if (kernel := _kernel(interpolation)) is None:
            _by_pillow(out, source, window, interpolation)
        else:
            _by_torch(out, source, window, kernel)


def _by_native(out: Pixels, source: Pixels, window: Window, interpolation: Interpolation) -> bool:
    """Cut a square by the native decoder; return whether it could (else ``out`` is left undefined)."""
    if jpeg.parts is None or source.shape[2] != 3:
        return False
    left, top, right, bottom = window.box
    (height, width), shrunk, stride = window.resized, window.shrunk, source.shape[1] * 3
    y, x = top // shrunk, left // shrunk
    high, wide = -(-bottom // shrunk) - y, -(-right // shrunk) - x
    # As torch is told: the size of the last, partial pixel of a shrunk image must not change the scale.
    down = high / height if shrunk == 1 else 1 / (height * shrunk / (bottom - top))
    across = wide / width if shrunk == 1 else 1 / (width * shrunk / (right - left))
    return bool(
        jpeg.parts.resize(
            out.ctypes.data,
            out.strides[0],
            source.ctypes.data + y * stride + x * 3,
            stride,
            jpeg.parts.Axis(high, height, window.top, window.height, down),
            jpeg.parts.Axis(wide, width, window.left, window.width, across),
            cubic=interpolation == "bicubic",
        )
    )


def _by_torch(out: Pixels, source: Pixels, window: Window, kernel: Callable[..., Any]) -> None:
    import torch

    left, top, right, bottom = window.box
    height, width = window.resized
    shrunk = window.shrunk
    # The kernel for bytes takes contiguous pixels only; for a whole row it is no copy.
    box = np.ascontiguousarray(source[top // shrunk : -(-bottom // shrunk), left // shrunk : -(-right // shrunk)])
    # The size of the last, partial pixel of a shrunk image must not change the scale.
    scales = (None, None) if shrunk == 1 else (height * shrunk / (bottom - top), width * shrunk / (right - left))
    direct = (window.height, window.width) == window.resized and out.flags.c_contiguous
    target = out if direct else np.empty((height, width, source.shape[2]), dtype=np.uint8)
    pixels, result = (torch.from_numpy(array[None]).permute(0, 3, 1, 2) for array in (box, target))
    kernel(pixels, (height, width), False, *scales, out=result)
    if not direct:
        out[...] = target[window.top : window.top + window.height, window.left : window.left + window.width]


def _by_pillow(out: Pixels, source: Pixels, window: Window, interpolation: Interpolation) -> None:
    left, top, right, bottom = (edge / window.shrunk for edge in window.box)
    x_scale, y_scale = (right - left) / window.resized[1], (bottom - top) / window.resized[0]
    box = (
        left + window.left * x_scale,
        top + window.top * y_scale,
        min(right, left + (window.left + window.width) * x_scale),
        min(bottom, top + (window.top + window.height) * y_scale),
    )
    # Pillow stores four bytes a pixel and so has to copy: only what its filter sees of the box.
    across, down = (math.ceil(_SUPPORT * max(scale, 1)) + 1 for scale in (x_scale, y_scale))
    x0, y0 = max(math.floor(left), math.floor(box[0]) - across), max(math.floor(top), math.floor(box[1]) - down)
    x1, y1 = min(math.ceil(right), math.ceil(box[2]) + across), min(math.ceil(bottom), math.ceil(box[3]) + down)
    stride, channels = source.shape[1] * source.shape[2], source.shape[2]
    start = y0 * stride + x0 * channels
    mode = _MODES[channels]
    seen = Image.frombytes(mode, (x1 - x0, y1 - y0), source.reshape(-1)[start:], "raw", mode, stride, 1)
    moved = (box[0] - x0, box[1] - y0, box[2] - x0, box[3] - y0)
    small = seen.resize((window.width, window.height), _FILTERS[interpolation], box=moved)
    out[...] = np.asarray(small).reshape(out.shape)


@functools.cache
def _kernel(interpolation: Interpolation) -> Callable[..., Any] | None:
    """Get torch's kernel for bytes; None where this processor would get a slow stand-in, on several threads."""
    import torch

    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        return None
    # As torch.nn.functional.interpolate calls them, but into memory that is there.
    kernels = torch._C._nn
    kernel: Callable[..., Any]
    kernel = kernels._upsample_bilinear2d_aa if interpolation == "bilinear" else kernels._upsample_bicubic2d_aa
    return kernel
