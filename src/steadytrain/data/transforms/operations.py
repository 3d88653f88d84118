"""Operations on the pixels of many images at once, each with numbers of its own: uint8 [n, H, W, C] to the same.

Four kinds of operations, each one pass over the images: a map of places (``warp``), a linear map of colours
(``recolor``), a table of 256 values for each image and channel (``look_up``), and sharpening (``sharpen``). They are
those of torchvision.transforms.v2, which the tests compare them with: equal to within one of 255 levels (two where grey
is blended in), since sums are rounded here and truncated there.

Numbers that are drawn come from the host; those that the pixels say (means, histograms) stay on the device.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from steadytrain.data.arrays import Floats

LUMA = (0.2989, 0.587, 0.114)
"""Weights of red, green and blue in grey, as torchvision has them (ITU-R BT.601)."""

PIECE = 2**17
"""Values that :func:`warp` moves at once on a CPU: 0.5 MB of float32, which stays in a cache; twice as fast or more."""

_YIQ = np.array([[0.299, 0.587, 0.114], [0.595716, -0.274453, -0.321263], [0.211456, -0.522591, 0.311135]])
_FROM_YIQ = np.linalg.inv(_YIQ)


def to_device(values: NDArray[np.floating] | NDArray[np.integer] | NDArray[np.bool_], like: Tensor) -> Tensor:
    """Copy numbers of the host to the device of a tensor, without waiting; floats become float32.

    To a GPU they go by page-locked memory, which torch hands out again once the copy is done: a copy of other memory
    waits until the GPU has done all that was asked of it before.
    """
    values = np.ascontiguousarray(values, np.float32 if values.dtype.kind == "f" else values.dtype)
    numbers = torch.from_numpy(values)
    return numbers.pin_memory().to(like.device, non_blocking=True) if like.is_cuda else numbers.to(like.device)


def turns(degrees: Floats) -> Floats:
    """Make the maps that rotate images counter-clockwise about their centres: float64[n, 2, 3] for :func:`warp`."""
    cos, sin = np.cos(np.radians(degrees)), np.sin(np.radians(degrees))
    zero = np.zeros_like(cos)
    return np.stack((np.stack((cos, -sin, zero), 1), np.stack((sin, cos, zero), 1)), 1)


def warp(images: Tensor, maps: Floats, fill: Tensor) -> Tensor:
    """Move pixels, with bilinear interpolation.

    Args:
        images: uint8[n, H, W, C].
        maps: float64[n, 2, 3]: where the pixel at (x, y, 1) of the result comes from, in pixels from the centre.
        fill: float32[C], the colour of what lies outside of the image.
    """
    if images.device.type == "cpu" and len(images) > (some := max(1, PIECE // images[0].numel())):
        pieces = (slice(k, k + some) for k in range(0, len(images), some))
        return torch.cat([warp(images[piece], maps[piece], fill) for piece in pieces])
    n, height, width, channels = images.shape
    across, down = (torch.arange(side, device=images.device) - (side - 1) / 2 for side in (width, height))
    m = to_device(maps, images)[:, :, :, None, None]
    places = torch.empty((n, height, width, 2), device=images.device)  # -1 and 1: the edges of an image
    for k, scale in enumerate((2 / width, 2 / height)):
        # A pixel comes from the same place in however large a batch: products and sums of single numbers, no matrices.
        torch.mul(m[:, k, 0] * across + m[:, k, 1] * down[:, None] + m[:, k, 2], scale, out=places[..., k])
    values = torch.empty((n, channels, height, width), device=images.device).copy_(images.permute(0, 3, 1, 2))
    values -= fill[:, None, None]
    moved = functional.grid_sample(values, places, mode="bilinear", padding_mode="zeros", align_corners=False)
    moved += fill[:, None, None]
    return torch.empty_like(images).copy_(moved.round_().clamp_(0, 255).permute(0, 2, 3, 1))


def recolor(images: Tensor, maps: Tensor, shifts: Tensor) -> Tensor:
    """Map colours linearly: ``maps @ colour + shifts``.

    Args:
        images: uint8[n, H, W, C].
        maps: float32[n, C, C].
        shifts: float32[n, C], in levels.
    """
    planes = images.movedim(3, 0).float()  # of one channel each: so the innermost loops are long
    weights = maps[..., None, None]
    out = torch.empty_like(images)
    for channel in range(len(planes)):
        value = planes[0] * weights[:, channel, 0]
        for other in range(1, len(planes)):
            value += planes[other] * weights[:, channel, other]
        value += shifts[:, channel, None, None]
        out[..., channel] = value.round_().clamp_(0, 255)
    return out


def brightness(factors: Floats, channels: int) -> Floats:
    """Make colour maps that multiply by a factor: float64[n, C, C]."""
    return factors[:, None, None] * np.eye(channels)


def saturation(factors: Floats, channels: int) -> Floats:
    """Make colour maps that blend with grey, which is what the factor 0 gives: float64[n, C, C]."""
    grey = np.ones((channels, 1)) @ np.array([LUMA]) / sum(LUMA) if channels == 3 else np.eye(1)
    factor = factors[:, None, None]
    return factor * np.eye(channels) + (1 - factor) * grey


def hue(shares: Floats) -> Floats:
    """Make colour maps that turn colours about grey by a share of the circle: float64[n, 3, 3].

    It is a rotation in the YIQ space, as in MXNet's ``HueJitterAug``: linear, and much cheaper than by way of HSV.
    """
    cos, sin = np.cos(2 * np.pi * shares), np.sin(2 * np.pi * shares)
    turn = np.zeros((len(shares), 3, 3))
    turn[:, 0, 0] = 1
    turn[:, 1, 1], turn[:, 1, 2], turn[:, 2, 1], turn[:, 2, 2] = cos, -sin, sin, cos
    maps: Floats = _FROM_YIQ @ turn @ _YIQ
    return maps


def grey_levels(images: Tensor) -> Tensor:
    """Compute the mean grey level of each image, float32[n]."""
    height, width, channels = images.shape[1:]
    sums = images.sum((1, 2), dtype=torch.int64)  # exact, in whatever order
    weights = LUMA if channels == 3 else (1.0,)
    level = sum(sums[:, channel] * (weight / (height * width)) for channel, weight in enumerate(weights))
    assert isinstance(level, Tensor)
    return level.float()


def look_up(images: Tensor, tables: Tensor) -> Tensor:
    """Replace each value by that of a table: uint8[n, 256] for all channels of an image, or uint8[n, C, 256]."""
    if tables.dim() == 2:
        return tables.gather(1, images.flatten(1).long()).reshape(images.shape)
    planes = tables.gather(2, images.flatten(1, 2).transpose(1, 2).long())
    return planes.transpose(1, 2).reshape(images.shape)


def posterised(bits: NDArray[np.integer]) -> NDArray[np.uint8]:
    """Make tables that keep the highest bits: uint8[n, 256]."""
    return np.arange(256, dtype=np.uint8) & (256 - (1 << (8 - bits))).astype(np.uint8)[:, None]


def solarised(thresholds: Floats) -> NDArray[np.uint8]:
    """Make tables that invert the levels from a threshold on: uint8[n, 256]; 0 inverts all."""
    levels = np.arange(256)
    return np.where(levels >= thresholds[:, None], 255 - levels, levels).astype(np.uint8)


def autocontrast_tables(images: Tensor) -> Tensor:
    """Make tables that spread the levels of each channel from 0 to 255: uint8[n, C, 256]."""
    low, high = (extreme.float()[..., None] for extreme in (images.amin((1, 2)), images.amax((1, 2))))
    levels = torch.arange(256, dtype=torch.float32, device=images.device)
    stretched = ((levels - low) * (255 / (high - low).clamp(min=1))).clamp(0, 255)
    return torch.where(high > low, stretched, levels).to(torch.uint8)


def equalise_tables(images: Tensor) -> Tensor:
    """Make tables that spread the levels of each channel evenly, by its histogram, as Pillow does: uint8[n, C, 256]."""
    n, height, width, channels = images.shape
    rows = images.permute(0, 3, 1, 2).reshape(n * channels, height * width).long()
    counts = torch.zeros(n * channels, 256, dtype=torch.int32, device=images.device)
    counts.scatter_add_(1, rows, torch.ones_like(rows, dtype=torch.int32))
    below = counts.cumsum(1) - counts
    levels = torch.arange(256, device=images.device)
    highest = torch.where(counts > 0, levels, 0).amax(1, keepdim=True)
    step = (height * width - counts.gather(1, highest)) // 255
    spread = ((below + step // 2) // step.clamp(min=1)).clamp(max=255)
    return torch.where(step > 0, spread, levels).to(torch.uint8).reshape(n, channels, 256)


def sharpen(images: Tensor, factors: Floats) -> Tensor:
    """Blend images with a smoothed copy, which is what the factor 0 gives; their outermost pixels stay as they are."""
    height, width = images.shape[1:3]
    if height < 3 or width < 3:
        return images
    values = images.float()
    rows = values[:, :-2] + values[:, 1:-1] + values[:, 2:]
    inner = values[:, 1:-1, 1:-1]
    smooth = ((rows[:, :, :-2] + rows[:, :, 1:-1] + rows[:, :, 2:] + 4 * inner) / 13).round_()
    factor = to_device(factors, images)[:, None, None, None]
    out = images.clone()
    out[:, 1:-1, 1:-1] = (smooth + factor * (inner - smooth)).round_().clamp_(0, 255).to(torch.uint8)
    return out


def beta_quantiles(alpha: float, uniform: Floats) -> Floats:
    """Draw from Beta(alpha, alpha): the quantiles at numbers uniform in [0, 1).

    The lower half of the distribution is integrated over ``y = x ** alpha``, where the density has no pole; the upper
    half is its mirror image.
    """
    y = np.linspace(0, 0.5**alpha, 4097)
    density = (1 - y ** (1 / alpha)) ** (alpha - 1)
    shares = np.concatenate(([0.0], np.cumsum((density[1:] + density[:-1]) / 2)))
    below = np.interp(np.minimum(uniform, 1 - uniform), 0.5 * shares / shares[-1], y) ** (1 / alpha)
    return np.where(uniform < 0.5, below, 1 - below)


def boxes(height: int, width: int, areas: Floats, ratios: Floats, places: Floats, *, whole: bool) -> NDArray[np.int64]:
    """Place boxes of some share of the area and some ratio (width / height): int64[n, 4] top, left, bottom, right.

    ``places``: float64[n, 2] in [0, 1): of the box's corner among those that leave it ``whole``, else of its centre.
    """
    heights = np.minimum(np.rint(np.sqrt(areas * height * width / ratios)), height).astype(np.int64)
    widths = np.minimum(np.rint(np.sqrt(areas * height * width * ratios)), width).astype(np.int64)
    if whole:
        top = (places[:, 0] * (height - heights + 1)).astype(np.int64)
        left = (places[:, 1] * (width - widths + 1)).astype(np.int64)
        return np.stack((top, left, top + heights, left + widths), 1)
    top = (places[:, 0] * height).astype(np.int64) - heights // 2
    left = (places[:, 1] * width).astype(np.int64) - widths // 2
    corners = np.stack((top, left, top + heights, left + widths), 1)
    return corners.clip(0, np.array([height, width, height, width]))


def inside(height: int, width: int, corners: NDArray[np.int64], like: Tensor) -> Tensor:
    """Return which pixels lie in each image's box: bool[n, H, W, 1]."""
    top, left, bottom, right = to_device(corners, like).unbind(1)
    rows, columns = (torch.arange(side, device=like.device) for side in (height, width))
    in_rows = (rows >= top[:, None]) & (rows < bottom[:, None])
    in_columns = (columns >= left[:, None]) & (columns < right[:, None])
    return (in_rows[:, :, None] & in_columns[:, None])[..., None]
