"""Antialiased resizing: a box of an image to a size, and of that the square that is wanted.

Two ways, the same to within a level or two: torch's kernel for bytes, where this processor has it (AVX2 or AVX-512:
five times as fast as Pillow, and it writes straight into the batch), and Pillow's ``resize``, everywhere else and
for shapes so long that most of what is resized would be thrown away. Which one is used depends on the processor and the
shapes alone. Where the native decoder is built, its kernel stands in for torch's, with the same bytes; otherwise
torch is imported when the first image is resized.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np
from PIL import Image

from steadytrain.data.loader import jpeg
from steadytrain.data.loader.jpeg import Pixels

Interpolation = Literal["bilinear", "bicubic"]

WASTE = 4  # times the wanted pixels: beyond that, only the window is resized

_FILTERS = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}
_MODES = {1: "L", 3: "RGB"}
_SUPPORT = 2  # of bicubic, in pixels of the coarser grid; bilinear has 1


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

    @property
    def whole(self) -> bool:
        """Whether the window is all of the resized box."""
        return (self.height, self.width) == self.resized

    @property
    def is_wasteful(self) -> bool:
        """Whether resizing all of the box would mostly be in vain."""
        return math.prod(self.resized) > WASTE * self.height * self.width


def resample(out: Pixels, source: Pixels, window: Window, interpolation: Interpolation) -> None:
    """Write a window into ``out``, uint8[window.height, window.width, C].

    Args:
        out: where to; any strides.
        source: uint8[H, W, C], contiguous.
        window: what.
        interpolation: of the resizing.
    """
    left, top, right, bottom = window.box
    if window.shrunk == 1 and (bottom - top, right - left) == window.resized:
        y, x = top + window.top, left + window.left
        out[...] = source[y : y + window.height, x : x + window.width]
        return
    if resize_part(out, source, window, interpolation):
        return
    kernel = None if window.is_wasteful else _kernel(interpolation)
    if kernel is None:
        _by_pillow(out, source, window, interpolation)
    else:
        _by_torch(out, source, window, kernel)


def resize_part(
    out: Pixels,
    source: Pixels,
    window: Window,
    interpolation: Interpolation,
    *,
    mirrored: bool = False,
    swapped: bool = False,
) -> bool:
    """The same by the native decoder, if that can be (else ``out`` is left undefined), and mirrored at once.

    Args:
        out, source, window, interpolation: those of :func:`resample`.
        mirrored: ``out`` is turned left to right.
        swapped: red and blue change places.
    """
    left, top, right, bottom = window.box
    is_moved = window.shrunk == 1 and (bottom - top, right - left) == window.resized
    if jpeg.parts is None or source.shape[2] != 3 or is_moved or window.is_wasteful:
        return False
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
            mirrored=mirrored,
            swapped=swapped,
        )
    )


def mirror(out: Pixels, image: Pixels, *, backwards: bool = False) -> None:
    """Write an image, uint8[H, W, C], into other memory, turned left to right.

    Args:
        out: where to, contiguous.
        image: contiguous.
        backwards: its channels are to be turned around as well. Then each row is turned around byte by byte, which
            goes by eight bytes at a time.
    """
    if backwards or image.shape[2] == 1:
        rows = len(image), -1
        word = next(size for size in (8, 4, 2, 1) if image[0].size % size == 0)
        out.reshape(rows).view(f">u{word}")[...] = image.reshape(rows).view(f"<u{word}")[:, ::-1]
        return
    for channel in range(image.shape[2]):  # runs of single bytes: several times as fast as runs of three
        out[..., channel] = image[:, ::-1, channel]


def _by_torch(out: Pixels, source: Pixels, window: Window, kernel: Callable[..., Any]) -> None:
    import torch

    left, top, right, bottom = window.box
    height, width = window.resized
    shrunk = window.shrunk
    # The kernel for bytes takes contiguous pixels only; for a whole row it is no copy.
    box = np.ascontiguousarray(source[top // shrunk : -(-bottom // shrunk), left // shrunk : -(-right // shrunk)])
    # The size of the last, partial pixel of a shrunk image must not change the scale.
    scales = (None, None) if shrunk == 1 else (height * shrunk / (bottom - top), width * shrunk / (right - left))
    direct = window.whole and out.flags.c_contiguous
    target = out if direct else np.empty((height, width, source.shape[2]), dtype=np.uint8)
    pixels, result = (torch.from_numpy(array[None]).permute(0, 3, 1, 2) for array in (box, target))
    kernel(pixels, (height, width), False, *scales, out=result)
    if not direct:
        out[...] = target[window.top : window.top + window.height, window.left : window.left + window.width]


def _by_pillow(out: Pixels, source: Pixels, window: Window, interpolation: Interpolation) -> None:
    left, top, right, bottom = (edge / window.shrunk for edge in window.box)
    x_scale, y_scale = (right - left) / window.resized[1], (bottom - top) / window.resized[0]
    wanted = (
        left + window.left * x_scale,
        top + window.top * y_scale,
        min(right, left + (window.left + window.width) * x_scale),
        min(bottom, top + (window.top + window.height) * y_scale),
    )
    # Pillow stores four bytes a pixel and so has to copy: only what its filter sees of the box.
    across, down = (math.ceil(_SUPPORT * max(scale, 1)) + 1 for scale in (x_scale, y_scale))
    x0, y0 = max(math.floor(left), math.floor(wanted[0]) - across), max(math.floor(top), math.floor(wanted[1]) - down)
    x1, y1 = min(math.ceil(right), math.ceil(wanted[2]) + across), min(math.ceil(bottom), math.ceil(wanted[3]) + down)
    stride, channels = source.shape[1] * source.shape[2], source.shape[2]
    start = y0 * stride + x0 * channels
    mode = _MODES[channels]
    seen = Image.frombytes(mode, (x1 - x0, y1 - y0), source.reshape(-1)[start:], "raw", mode, stride, 1)
    moved = (wanted[0] - x0, wanted[1] - y0, wanted[2] - x0, wanted[3] - y0)
    small = seen.resize((window.width, window.height), _FILTERS[interpolation], box=moved)
    out[...] = np.asarray(small).reshape(out.shape)


@functools.cache
def _kernel(interpolation: Interpolation) -> Callable[..., Any] | None:
    """torch's kernel for bytes; None where this processor would get a slow stand-in, on several threads."""
    import torch

    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        return None
    # As torch.nn.functional.interpolate calls them, but into memory that is there.
    kernels = torch._C._nn
    kernel: Callable[..., Any]
    kernel = kernels._upsample_bilinear2d_aa if interpolation == "bilinear" else kernels._upsample_bicubic2d_aa
    return kernel
