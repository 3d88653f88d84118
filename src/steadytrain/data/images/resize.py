"""Scale images down: bicubic and antialiased, in whole numbers, so that every machine makes the same bytes.

The arithmetic is that of the Rust crate fast_image_resize, which took it over from Pillow-SIMD: Catmull-Rom's cubic
(Keys, a = -0.5) stretched to the scale, first down the columns and then along the rows, weights rounded to 16 bits,
sums in whole numbers, each pass rounded to 8 bits. Against Pillow's bicubic, whose weights have 22 bits and which goes
along the rows first, a photograph has at least :data:`PSNR` dB; the tests measure it.

The wheel ``cykooz-resizer`` does it with SSE4.1, AVX2 or NEON, in a sixth of Pillow's time. Where there is no such
wheel (64-bit ARM under Linux), matrix products of numpy do the same to the last bit, in about Pillow's time or half as
much again: every product and every sum is a whole number that the float type holds exactly, so no order of summing and
no processor makes a difference.

>>> resize(np.full((30, 20, 3), 77, np.uint8), (10, 15)).shape
(15, 10, 3)
"""

from __future__ import annotations

import contextlib
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from steadytrain.data.arrays import Pixels

wheel: Any = None
with contextlib.suppress(ImportError):
    import cykooz_resizer

    wheel = cykooz_resizer


PSNR = 50.0

Kernel = Literal["catmull_rom", "bilinear"]

_MOST_BITS, _WEIGHT_BITS = 21, 15
_BLOCK = 16  # rows that are made by one matrix product
_EXACT = 1 << 24  # whole numbers up to here are exact in float32


class _Weights(NamedTuple):
    """The old rows that make each new one: ``first`` row and weights, int32[new, taps], scaled up by 2**``bits``."""

    first: NDArray[np.int64]
    values: NDArray[np.int32]
    bits: int


def resize(pixels: Pixels, size: tuple[int, int], kernel: Kernel = "catmull_rom") -> Pixels:
    """Scale an image down.

    Args:
        pixels: uint8[H, W, 3] or uint8[H, W].
        size: new width and height, at most the old ones, at least 1.
        kernel: the cubic, or a triangle of half its width, which takes about half the time.

    Returns:
        uint8 of the new size; ``pixels`` themselves where that is the old one.
    """
    if (pixels.shape[1], pixels.shape[0]) == size:
        return pixels
    return by_matrices(pixels, size, kernel) if wheel is None else _by_wheel(pixels, size, kernel)


def _by_wheel(pixels: Pixels, size: tuple[int, int], kernel: Kernel) -> Pixels:
    kind = wheel.PixelType.U8x3 if pixels.ndim == 3 else wheel.PixelType.U8
    source = wheel.ImageData(pixels.shape[1], pixels.shape[0], kind, pixels.tobytes())
    resized = wheel.ImageData(*size, kind)
    # Without a pool of threads it stays in this one. A new one costs nothing, and keeps no memory.
    wheel.Resizer().resize(source, resized, _options(kernel))
    return np.frombuffer(resized.get_buffer(), np.uint8).reshape(size[1], size[0], *pixels.shape[2:])


@lru_cache
def _options(kernel: Kernel) -> object:
    algorithm = wheel.ResizeAlg.convolution(wheel.FilterType[kernel])
    return wheel.ResizeOptions(resize_alg=algorithm, use_alpha=False)


def by_matrices(pixels: Pixels, size: tuple[int, int], kernel: Kernel = "catmull_rom") -> Pixels:
    """Scale an image down as :func:`resize` does, by numpy alone."""
    if size[1] != pixels.shape[0]:
        pixels = _columns(pixels, size[1], kernel)
    if size[0] != pixels.shape[1]:
        rows = _columns(np.ascontiguousarray(pixels.swapaxes(0, 1)), size[0], kernel)
        pixels = np.ascontiguousarray(rows.swapaxes(0, 1))
    return pixels


def _columns(pixels: Pixels, height: int, kernel: Kernel) -> Pixels:
    """Scale each column to another height."""
    weights = _weights(len(pixels), height, kernel)
    most = 255 * int(np.abs(weights.values).sum(axis=1).max()) + (1 << weights.bits)
    kind = np.float32 if most <= _EXACT else np.float64
    out = np.empty((height, *pixels.shape[1:]), np.uint8)
    for top in range(0, height, _BLOCK):
        rows = slice(top, min(top + _BLOCK, height))
        start, matrix = _band(weights, rows)
        source = pixels[start : start + matrix.shape[1]].reshape(matrix.shape[1], -1)
        sums = matrix.astype(kind) @ source.astype(kind)
        sums += kind(1 << (weights.bits - 1))
        sums *= kind(0.5**weights.bits)
        np.clip(sums, 0, 255, out=sums)
        out[rows] = sums.reshape(-1, *pixels.shape[1:])  # cut off towards zero
    return out


def _band(weights: _Weights, rows: slice) -> tuple[int, NDArray[np.int32]]:
    """Return the old row where the matrix of some new rows starts, and its part that is not zero."""
    first, values = weights.first[rows], weights.values[rows]
    places = first[:, None] - first[0] + np.arange(values.shape[1])
    matrix = np.zeros((len(first), int(places[values != 0].max()) + 1), np.int32)
    new_rows, taps = np.nonzero(values)
    matrix[new_rows, places[new_rows, taps]] = values[new_rows, taps]
    return int(first[0]), matrix


@lru_cache(maxsize=64)
def _weights(old: int, new: int, kernel: Kernel) -> _Weights:
    """Compute weights by a kernel, each row's sum 2**bits but for rounding."""
    of_kernel, radius = (_cubic, 2.0) if kernel == "catmull_rom" else (_triangle, 1.0)
    scale = old / new
    stretch = max(scale, 1.0)
    radius *= stretch
    centre = (np.arange(new) + 0.5) * scale
    first = np.maximum(np.floor(centre - radius), 0).astype(np.int64)
    last = np.minimum(np.ceil(centre + radius), old).astype(np.int64)
    x = first[:, None] + np.arange(int(np.ceil(radius)) * 2 + 1)
    values = np.where(x < last[:, None], of_kernel((x - (centre - 0.5)[:, None]) * (1.0 / stretch)), 0.0)
    # From left to right, as a loop would: a pairwise sum could differ in the last bit.
    values /= np.cumsum(values, axis=1)[:, -1:]
    most = values.max()
    bits = next((b for b in range(_MOST_BITS) if _rounded(most * 2.0 ** (b + 1)) >= 1 << _WEIGHT_BITS), _MOST_BITS)
    return _Weights(first, _rounded(values * 2.0**bits).astype(np.int32), bits)


def _cubic(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Evaluate Keys' cubic, a = -0.5 (R. Keys, Cubic convolution interpolation for digital image processing, 1981)."""
    x = np.abs(x)
    near = (1.5 * x - 2.5) * x * x + 1.0
    far = (((x - 5.0) * x + 8.0) * x - 4.0) * -0.5
    return np.where(x < 1, near, np.where(x < 2, far, 0.0))


def _triangle(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.maximum(1.0 - np.abs(x), 0.0)


def _rounded(values: NDArray[np.float64] | np.float64) -> NDArray[np.float64]:
    """Round to the nearest whole number, halves away from zero."""
    return np.asarray(np.copysign(np.floor(np.abs(values) + 0.5), values))
