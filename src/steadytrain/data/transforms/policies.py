"""RandAugment, TrivialAugment, AutoAugment and AugMix: operations drawn for each image, with values of its own.

A policy makes layers. In a layer each image has one :class:`Op` with a value of its own; images with operations of the
same kind go through one call. Values and names are those of torchvision.transforms.v2.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from statistics import NormalDist

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from steadytrain.config.transforms import Transform
from steadytrain.data.arrays import Floats
from steadytrain.data.transforms import operations
from steadytrain.data.transforms.operations import to_device

Ops = NDArray[np.int64]


Op = IntEnum(
    "Op",
    "IDENTITY SHEAR_X SHEAR_Y TRANSLATE_X TRANSLATE_Y ROTATE BRIGHTNESS COLOR CONTRAST SHARPNESS POSTERIZE SOLARIZE"
    " AUTOCONTRAST EQUALIZE INVERT",
    start=0,
)
"""One operation of a policy."""

_MOVES = (Op.SHEAR_X, Op.SHEAR_Y, Op.TRANSLATE_X, Op.TRANSLATE_Y, Op.ROTATE)
_COLOURS = (Op.BRIGHTNESS, Op.COLOR, Op.CONTRAST)
_TABLES = (Op.POSTERIZE, Op.SOLARIZE, Op.INVERT)
_BALANCES = (Op.AUTOCONTRAST, Op.EQUALIZE)
_ALL = np.arange(14)  # operations of RandAugment and TrivialAugment: all but INVERT
_MIXED = np.array([Op.AUTOCONTRAST, Op.EQUALIZE, Op.POSTERIZE, Op.ROTATE, Op.SOLARIZE, *_MOVES[:4]])
"""AugMix's transforms: none that a test of robustness (ImageNet-C) uses as well."""


@dataclass(frozen=True)
class Ranges:
    """The highest level (1) of each operation.

    Args:
        shear: share of the other side.
        translate: share of the side; or pixels, if it is above 1.
        degrees: of a rotation.
        blend: how far the factor of brightness, colour, contrast and sharpness is from 1.
        bits: of 8 that are dropped; ``least_bits`` are dropped at level 0.
    """

    shear: float = 0.3
    translate: float = 150 / 331
    degrees: float = 30.0
    blend: float = 0.9
    bits: int = 4
    least_bits: int = 0


USUAL = Ranges()
WIDE = Ranges(shear=0.99, translate=32.0, degrees=135.0, blend=0.99, bits=6)
AUGMIX = Ranges(translate=1 / 3, bits=8, least_bits=4)


def values_of(ops: Ops, levels: Floats, signs: Floats, ranges: Ranges, height: int, width: int) -> Floats:
    """Compute what each operation takes: a shear, pixels, degrees, a difference from 1, bits or a threshold.

    Args:
        levels: float64[n] from 0 to 1.
        signs: float64[n], -1 or 1, of operations that go either way.
    """

    def pixels(side: int) -> Floats:
        moved: Floats = np.trunc(levels * (ranges.translate if ranges.translate > 1 else ranges.translate * side))
        return moved

    values = signs * levels * ranges.blend
    for op, of_op in (
        (Op.SHEAR_X, signs * levels * ranges.shear),
        (Op.SHEAR_Y, signs * levels * ranges.shear),
        (Op.TRANSLATE_X, signs * pixels(width)),
        (Op.TRANSLATE_Y, signs * pixels(height)),
        (Op.ROTATE, signs * levels * ranges.degrees),
        (Op.POSTERIZE, 8 - np.rint(ranges.least_bits + levels * (ranges.bits - ranges.least_bits))),
        (Op.SOLARIZE, 255 * (1 - levels)),
    ):
        values = np.where(ops == op, of_op, values)
    return values


def apply_ops(images: Tensor, ops: Ops, values: Floats, fill: Tensor) -> None:
    """Apply one operation to each image, in place.

    Args:
        images: uint8[n, H, W, C].
        ops: int64[n], of :class:`Op`.
        values: float64[n], as of :func:`values_of`.
        fill: float32[C], the colour of what lies outside of an image.
    """
    height, width, channels = images.shape[1:]

    def these(kinds: tuple[Op, ...]) -> tuple[Tensor, Tensor, Ops, Floats] | None:
        numbers = np.flatnonzero(np.isin(ops, kinds))
        if not len(numbers):
            return None
        rows = to_device(numbers, images)
        return rows, images.index_select(0, rows), ops[numbers], values[numbers]

    if (chosen := these(_MOVES)) is not None:
        rows, some, which, value = chosen
        images.index_copy_(0, rows, operations.warp(some, _maps(which, value, height, width), fill))
    if (chosen := these(_COLOURS)) is not None:
        rows, some, which, value = chosen
        maps = operations.brightness(1 + value, channels)
        maps[which == Op.COLOR] = operations.saturation(1 + value[which == Op.COLOR], channels)
        towards = operations.grey_levels(some) * to_device(np.where(which == Op.CONTRAST, -value, 0), images)
        shifts = towards[:, None].expand(-1, channels)
        images.index_copy_(0, rows, operations.recolor(some, to_device(maps, images), shifts))
    if (chosen := these(_TABLES)) is not None:
        rows, some, which, value = chosen
        tables = operations.solarised(np.where(which == Op.INVERT, 0, value))
        few = which == Op.POSTERIZE
        tables[few] = operations.posterised(value[few].astype(np.int64))
        images.index_copy_(0, rows, operations.look_up(some, to_device(tables, images)))
    for op, make in zip(_BALANCES, (operations.autocontrast_tables, operations.equalise_tables), strict=True):
        if (chosen := these((op,))) is not None:
            rows, some, _, _ = chosen
            images.index_copy_(0, rows, operations.look_up(some, make(some)))
    if (chosen := these((Op.SHARPNESS,))) is not None:
        rows, some, _, value = chosen
        images.index_copy_(0, rows, operations.sharpen(some, 1 + value))


def _maps(ops: Ops, values: Floats, height: int, width: int) -> Floats:
    """Make the maps of places of operations that move pixels, float64[n, 2, 3]; shears leave an edge where it is."""
    maps = operations.turns(np.where(ops == Op.ROTATE, values, 0))
    for op, row, column, shift in ((Op.SHEAR_X, 0, 1, height / 2), (Op.SHEAR_Y, 1, 0, width / 2)):
        maps[:, row, column] += np.where(ops == op, values, 0)
        maps[:, row, 2] += np.where(ops == op, values * shift, 0)
    maps[:, 0, 2] -= np.where(ops == Op.TRANSLATE_X, values, 0)
    maps[:, 1, 2] -= np.where(ops == Op.TRANSLATE_Y, values, 0)
    return maps


def randaugment(images: Tensor, draws: Floats, transform: Transform, fill: Tensor) -> Tensor:
    """Apply some operations, drawn with equal chances, one after the other (Cubuk et al. 2020).

    Four draws an operation: which, its sign, how far from the magnitude, whether at all.
    """
    height, width = images.shape[1:3]
    for at in range(0, 4 * int(transform.number("operations")), 4):
        which, sign, off, skipped = draws[:, at : at + 4].T
        ops = _ALL[(which * len(_ALL)).astype(np.int64)]
        normal = np.array([NormalDist().inv_cdf(number + 2.0**-33) for number in off.tolist()])
        levels = ((transform.number("magnitude") + transform.number("deviation") * normal) / 30).clip(0, 1)
        values = values_of(ops, levels, np.where(sign < 0.5, -1.0, 1.0), USUAL, height, width)
        ops = np.where(skipped < transform.number("probability"), ops, Op.IDENTITY)
        apply_ops(images, ops, values, fill)
    return images


def trivialaugment(images: Tensor, draws: Floats, transform: Transform, fill: Tensor) -> Tensor:
    """Apply one operation with a magnitude from a wide range (Mueller and Hutter 2021, the wide space)."""
    ops = _ALL[(draws[:, 0] * len(_ALL)).astype(np.int64)]
    levels = (draws[:, 2] * 31).astype(np.int64) / 30
    signs = np.where(draws[:, 1] < 0.5, -1.0, 1.0)
    apply_ops(images, ops, values_of(ops, levels, signs, WIDE, *images.shape[1:3]), fill)
    return images


def autoaugment(images: Tensor, draws: Floats, transform: Transform, fill: Tensor) -> Tensor:
    """Apply one of 25 pairs of operations, each with a chance and a magnitude that were learned (Cubuk et al. 2019)."""
    table = learned(str(transform.values[0]))
    pairs = table[(draws[:, 0] * len(table)).astype(np.int64)]
    for k in range(2):
        ops, chances, levels = pairs[:, k].T
        chance, sign = draws[:, 1 + 2 * k], draws[:, 2 + 2 * k]
        which = np.where(chance < chances, ops, Op.IDENTITY).astype(np.int64)
        signs = np.where(sign < 0.5, -1.0, 1.0)
        apply_ops(images, which, values_of(which, levels / 9, signs, USUAL, *images.shape[1:3]), fill)
    return images


def augmix(images: Tensor, draws: Floats, transform: Transform, fill: Tensor) -> Tensor:
    """Mix chains of one to three operations, and that with the image (Hendrycks et al. 2020).

    The weights of the chains are drawn from Dirichlet(1, ..., 1), the share of the image from Beta(1, 1), which is
    uniform. The chains of all images go through each layer together.
    """
    chains, most = int(transform.number("chains")), int(transform.number("operations"))
    height, width = images.shape[1:3]
    n, columns = len(images), 2 + chains * (2 + 3 * most)
    draws, share = draws[:, :columns], draws[:, 0].astype(np.float32)
    uniform_of = draws[:, 2:].reshape(n, chains, -1)
    weights = -np.log(1 - uniform_of[:, :, 0])
    weights /= weights.sum(1, keepdims=True).clip(1e-12)
    lengths = 1 + (uniform_of[:, :, 1] * most).astype(np.int64)
    chain = images.repeat_interleave(chains, 0)
    for k in range(most):
        which, sign, level = (uniform_of[:, :, 2 + 3 * k + j].reshape(-1) for j in range(3))
        ops = np.where(lengths.reshape(-1) > k, _MIXED[(which * len(_MIXED)).astype(np.int64)], Op.IDENTITY)
        levels = np.floor(level * max(1, transform.number("magnitude"))) / 9
        values = values_of(ops, levels.clip(0, 1), np.where(sign < 0.5, -1.0, 1.0), AUGMIX, height, width)
        apply_ops(chain, ops, values, fill)
    mixed = images * to_device(1 - share, images)[:, None, None, None]
    for k in range(chains):
        weight = to_device(weights[:, k] * share, images)[:, None, None, None]
        mixed += chain[k::chains] * weight
    return mixed.round_().clamp_(0, 255).to(torch.uint8)


@cache
def learned(name: str) -> Floats:
    """Return the policy that was learned on some data, float64[25, 2, 3]: operation, chance and magnitude of each pair.

    The published ones (Cubuk et al. 2019, appendix), as torchvision lists them.
    """
    from torchvision.transforms import AutoAugment, AutoAugmentPolicy

    def row(word: str, chance: float, magnitude: int | None) -> tuple[float, float, float]:
        return float(Op[re.sub("([XY])$", r"_\1", word).upper()]), chance, magnitude or 0

    pairs = AutoAugment(AutoAugmentPolicy(name)).policies
    return np.array([[row(*operation) for operation in pair] for pair in pairs])
