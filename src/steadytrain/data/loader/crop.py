"""Crops of images of any size to the square that a model sees: what to take, and where to put it.

Only geometry stands here, for many images at once in numpy; the pixels are moved in ``decode`` (any image) and in
``image_cache`` (images kept in memory), which both follow the same :class:`CropPlan` and so give the same bytes.

``resized-crop``
    A box of random area and ratio, resized to the square ("Inception" crop: Szegedy et al., "Going deeper with
    convolutions", 2015). As in torchvision: ten tries of area (uniform) and ratio (log-uniform); the first that fits is
    placed at random; if none fits, the largest centred box whose ratio is allowed.
``pad-crop``
    The shorter side is resized to the square's (left alone if it is that already), ``pad`` pixels of zeros are put
    around, and a random square is taken (He et al., "Deep residual learning", 2015, section 4.2).
``none``, and every evaluation
    The shorter side is resized to ``size / crop``, rounded down as timm does, and the centre square is taken.

That is the fit ``crop``. Two others show whole images, whose random boxes have ratios relative to the image's own:

``squash``
    Box or image is resized to the square, each axis by a scale of its own.
``pad``
    Its longer side is resized to the square's, and what is left on both sides of the shorter is filled (letterbox).

>>> crop = Crop(kind="none", size=224, crop=0.875)
>>> plan = crop.plan(np.array([[512, 768]]), np.empty((1, 0)))
>>> plan.boxes.tolist(), plan.resized.tolist(), plan.corners.tolist()
([[0, 0, 768, 512]], [[256, 384]], [[16, 80]])
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from steadytrain.config import Data
from steadytrain.config.defaults import SMALL as SMALL
from steadytrain.config.defaults import usual_crop
from steadytrain.config.parts import ImageFit
from steadytrain.config.plain import check_types
from steadytrain.data.arrays import Floats, Ints
from steadytrain.errors import InputError

SHRINK_MARGIN = 1.5  # times the target's resolution are left when a JPEG is shrunk while it is decoded
NEVER_SHRUNK = 128  # pixels a side: images up to here may be kept decoded, and must give the same bytes either way

_TRIES = 10
_REACH = 2  # pixels of the coarser grid that bicubic resizing looks at, on each side; bilinear 1
_FLIP, _X, _Y, _FIRST_TRY = 0, 1, 2, 4  # columns of the draws


class Square(NamedTuple):
    """One row of a :class:`CropPlan`, as plain numbers."""

    box: list[int]
    resized: list[int]
    corner: list[int]
    flip: bool
    shrink: int


@dataclass(frozen=True)
class CropPlan:
    """The part of each of ``n`` images to take, and its place in the square.

    Args:
        boxes: int64[n, 4], left, top, right, bottom in the image's pixels: this part is resized ...
        resized: int64[n, 2], ... to this height and width ...
        corners: int64[n, 2], ... and the square begins at this row and column of that; in the padding, if negative.
        flips: bool[n], mirror the whole square left to right afterwards.
        shrinks: int64[n], 1, 2, 4 or 8: the image may be decoded with this many times fewer pixels in each direction.
    """

    boxes: Ints
    resized: Ints
    corners: Ints
    flips: NDArray[np.bool_]
    shrinks: Ints

    def __len__(self) -> int:
        return len(self.flips)

    @cached_property
    def squares(self) -> list[Square]:
        """All rows."""
        columns = (self.boxes, self.resized, self.corners, self.flips, self.shrinks)
        return list(map(Square._make, zip(*(column.tolist() for column in columns), strict=True)))


@dataclass(frozen=True, kw_only=True)
class Crop:
    """The rule by which a square is cropped from an image, in training and in evaluation.

    Args:
        kind: ``resized-crop``, ``pad-crop`` or ``none``; see the module.
        size: side of the square in pixels.
        area: smallest and largest fraction of the image's area, for ``resized-crop``.
        ratio: smallest and largest width / height, for ``resized-crop``.
        pad: pixels of zeros on each side, for ``pad-crop``.
        flip: mirror half of the training images; ``alternating``: in odd epochs those that even ones left alone.
        crop: fraction of the shorter side that evaluation keeps.
        interpolation: of every resize; always antialiased.
        channels: 3 (RGB) or 1 (grey).
        fit: ``crop``, ``squash`` or ``pad``; see the module.
        fill: value of each channel, 0 to 255, beside padded images; empty: black.

    Raises:
        InputError: a value is out of range.
    """

    kind: Literal["resized-crop", "pad-crop", "none"]
    size: int
    area: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    pad: int = 4
    flip: bool | Literal["alternating"] = False
    crop: float = 1.0
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"
    channels: Literal[1, 3] = 3
    fit: ImageFit = "crop"
    fill: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_types(self, "crop")
        _require(self.size >= 1, "size", self.size, "1 pixel or more")
        _require(0 < self.area[0] <= self.area[1] <= 1, "area", self.area, "two increasing fractions up to 1")
        _require(0 < self.ratio[0] <= self.ratio[1], "ratio", self.ratio, "two increasing numbers above 0")
        _require(self.pad >= 0, "pad", self.pad, "0 pixels or more")
        _require(0 < self.crop <= 1, "crop", self.crop, "a fraction above 0, up to 1")

    @property
    def num_draws(self) -> int:
        """Random numbers that each sample needs."""
        return {"resized-crop": _FIRST_TRY + 2 * _TRIES, "pad-crop": _Y + 1, "none": int(bool(self.flip))}[self.kind]

    def for_evaluation(self) -> Crop:
        """Return the same square without anything random."""
        return replace(self, kind="none", flip=False)

    def only_shifts(self, height: int, width: int) -> bool:
        """Return whether images of this size are only shifted, never resized."""
        is_filled = self.kind == "pad-crop" and self.fit == "pad"  # by a colour; what is shifted, by zeros
        if self.kind == "resized-crop" or is_filled or (self.fit != "crop" and height != width):
            return False
        return min(height, width) == self._resized_side

    def never_shrinks(self, height: int, width: int) -> bool:
        """Return whether a JPEG of this size is decoded at its full size, whatever is drawn."""
        by_longer = self.kind == "resized-crop" or self.fit == "pad"
        side = max(height, width) if by_longer else min(height, width)
        return side < 2 * SHRINK_MARGIN * self._resized_side or max(height, width) <= NEVER_SHRUNK

    @property
    def _resized_side(self) -> int:
        """Side that a box or an image is resized to: the shorter one, the longer one (``pad``), or both."""
        return math.floor(self.size / self.crop) if self.kind == "none" else self.size

    def plan(self, sizes: Ints, draws: Floats) -> CropPlan:
        """Plan the squares of images of these sizes.

        Args:
            sizes: int64[n, 2], height and width of each image.
            draws: float64[n, num_draws], uniform in [0, 1).
        """
        n = len(sizes)
        side, is_random = self._resized_side, self.kind == "resized-crop"
        boxes = np.concatenate((np.zeros_like(sizes), sizes[:, ::-1]), axis=1)
        boxes = self._random_boxes(sizes, draws) if is_random else boxes
        sides = boxes[:, [3, 2]] - boxes[:, [1, 0]]
        if self.fit == "pad":  # rounded as timm's ResizeKeepRatio
            resized = np.rint(side * sides / sides.max(axis=1, keepdims=True)).astype(np.int64).clip(1)
        elif is_random or self.fit == "squash":
            resized = np.full((n, 2), side)
        else:
            shorter = sides.min(axis=1, keepdims=True)
            resized = np.where(sides == shorter, side, side * sides // shorter)  # the longer down, as torchvision
        shrinks = _shrinks(boxes, resized, sizes)
        boxes = _snapped(boxes, shrinks, sizes) if is_random else boxes
        return CropPlan(boxes, resized, self.corners(resized, draws), self.flips(draws, n), shrinks)

    def seen(self, sizes: Ints) -> Floats:
        """Return the share of the pixels of images of these sizes that evaluation sees, float64[n].

        >>> Crop(kind="none", size=224, crop=0.875).seen(np.array([[300, 400], [224, 224]])).round(3).tolist()
        [0.575, 0.766]
        """
        plan = self.for_evaluation().plan(sizes, np.empty((len(sizes), 0)))
        first, last = plan.corners.clip(0), np.minimum(plan.corners + self.size, plan.resized)
        shares: Floats = ((last - first) / plan.resized).prod(axis=1)
        return shares

    def needed(self, plan: CropPlan) -> Ints:
        """Return left, top, right, bottom of all pixels that count in making the squares, int64[n, 4].

        Less than the box, where only a window of what it is resized to is seen: resizing looks no further than that.
        """
        boxes = plan.boxes
        sizes, resized, corners = boxes[:, 2:] - boxes[:, :2], plan.resized[:, ::-1], plan.corners[:, ::-1]
        windowed = ((corners > 0) | (corners + self.size < resized)).any(axis=1, keepdims=True)
        if not windowed.any():
            return boxes
        scales = sizes / resized
        beyond = np.where(scales == 1, 0, np.ceil(_REACH * scales.clip(1)).astype(np.int64) + 2)
        first = boxes[:, :2] + np.floor(corners.clip(0) * scales).astype(np.int64) - beyond
        last = boxes[:, :2] + np.ceil((corners + self.size) * scales).astype(np.int64) + beyond
        first, last = first.clip(boxes[:, :2], boxes[:, 2:] - 1), last.clip(None, boxes[:, 2:])
        return np.concatenate((first, np.maximum(last, first + 1)), axis=1)

    def flips(self, draws: Floats, n: int) -> NDArray[np.bool_]:
        """Return which of ``n`` samples are mirrored, bool[n]."""
        flips: NDArray[np.bool_] = draws[:, _FLIP] < 0.5 if self.flip else np.zeros(n, dtype=np.bool_)
        return flips

    def corners(self, resized: Ints, draws: Floats) -> Ints:
        """Return row and column of the squares in images resized to ``resized`` (int64[n, 2], or [1, 2] for all).

        They are negative where the square begins in the padding.
        """
        half = (resized - self.size) / 2
        centred = np.where(half < 0, np.ceil(half), np.rint(half)).astype(np.int64)
        if self.kind != "pad-crop":
            return centred
        free, first = (resized - self.size, 0) if self.fit == "crop" else (0, centred)
        return first + (draws[:, _X : _Y + 1][:, ::-1] * (free + 2 * self.pad + 1)).astype(np.int64) - self.pad

    def _random_boxes(self, sizes: Ints, draws: Floats) -> Ints:
        height, width = sizes[:, :1], sizes[:, 1:]
        tries = draws[:, _FIRST_TRY:].reshape(len(sizes), _TRIES, 2)
        area = height * width * _between(tries[..., 0], *self.area)
        own = 1.0 if self.fit == "crop" else width / height
        ratio = own * np.exp(_between(tries[..., 1], math.log(self.ratio[0]), math.log(self.ratio[1])))
        widths = np.rint(np.sqrt(area * ratio)).astype(np.int64)
        heights = np.rint(np.sqrt(area / ratio)).astype(np.int64)
        fits = (widths > 0) & (widths <= width) & (heights > 0) & (heights <= height)
        first = np.arange(len(sizes)), fits.argmax(axis=1)
        fitted, w, h = fits[first][:, None], widths[first][:, None], heights[first][:, None]
        left = (draws[:, [_X]] * (width - w + 1)).astype(np.int64)
        top = (draws[:, [_Y]] * (height - h + 1)).astype(np.int64)
        if not fitted.all():
            widest = np.maximum(np.minimum(width, np.rint(height * own * self.ratio[1])), 1).astype(np.int64)
            highest = np.maximum(np.minimum(height, np.rint(width / own / self.ratio[0])), 1).astype(np.int64)
            w, h = np.where(fitted, w, widest), np.where(fitted, h, highest)
            left, top = np.where(fitted, left, (width - w) // 2), np.where(fitted, top, (height - h) // 2)
        return np.concatenate((left, top, left + w, top + h), axis=1)


def crop_for(
    data: Data,
    *,
    size: int,
    channels: Literal[1, 3],
    largest: int,
    crop: float | None = None,
    interpolation: Literal["bilinear", "bicubic"] | None = None,
    fit: ImageFit | None = None,
    fill: tuple[int, ...] = (),
) -> Crop:
    """Make the crop that a recipe's ``data`` asks for, its open choices settled by the images and the model.

    Args:
        size: side of the square, in pixels.
        largest: longest side of any image of the data, in pixels.
        crop, interpolation, fit: the model's own, taken where ``data`` says nothing.
        channels, fill: as of :class:`Crop`.

    >>> crop_for(Data(train="digits.rec"), size=28, channels=1, largest=28).kind
    'pad-crop'
    """
    small = largest <= SMALL
    return Crop(
        kind=("pad-crop" if small else "resized-crop") if data.augment == "auto" else data.augment,
        size=size,
        area=data.area,
        ratio=data.ratio,
        pad=data.pad,
        flip=channels == 3 if data.flip is None else data.flip,
        crop=data.crop or crop or usual_crop(largest),
        interpolation=data.interpolation or interpolation or "bilinear",
        channels=channels,
        fit=data.fit or fit or "crop",
        fill=fill,
    )


def packed_side(size: int | None) -> int:
    """Return the shorter side, in pixels, at which a folder is packed for a model that sees ``size`` (None: unknown).

    >>> packed_side(None), packed_side(384)
    (256, 438)
    """
    larger = -(-(size or 224) * 8 // 7)
    return max(256, larger - larger % 2)


def _require(holds: bool, name: str, value: object, limit: str) -> None:
    if not holds:
        raise InputError(f"crop.{name} is {value!r}; it must be {limit}")


def _between(uniform: Floats, low: float, high: float) -> Floats:
    return low + uniform * (high - low)


def _shrinks(boxes: Ints, resized: Ints, sizes: Ints) -> Ints:
    """Find the largest of 8, 4, 2, 1 that leaves boxes :data:`SHRINK_MARGIN` times the resolution they are resized to.

    Images of up to :data:`NEVER_SHRUNK` pixels a side have 1.
    """
    room = ((boxes[:, [3, 2]] - boxes[:, [1, 0]]) / resized).min(axis=1) / SHRINK_MARGIN
    return np.where(sizes.max(axis=1) > NEVER_SHRUNK, 1 << np.log2(room.clip(1, 8)).astype(np.int64), 1)


def _snapped(boxes: Ints, shrinks: Ints, sizes: Ints) -> Ints:
    """Move the boxes by less than a shrunk pixel, so that they begin and end between two of those."""
    if (shrinks == 1).all():
        return boxes
    step = shrinks[:, None]
    first = boxes[:, :2] // step * step
    last = np.minimum(-(-boxes[:, 2:] // step) * step, sizes[:, ::-1])
    return np.concatenate((first, last), axis=1)
