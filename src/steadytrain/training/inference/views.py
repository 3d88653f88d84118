"""Weights used on several views of each image, or at another size than they were trained at.

>>> fixres_size(224, 0.875, (0.08, 1.0)), fixres_size(160, 1.0, (0.25, 1.0))
(288, 192)
"""

from __future__ import annotations

import io
import math
from contextlib import redirect_stderr
from dataclasses import replace
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

from steadytrain.config.batches import parse_sizes
from steadytrain.errors import InputError, ModelError, RunError, did_you_mean, first_line
from steadytrain.models.exported import is_exported
from steadytrain.run import Run
from steadytrain.training.inference.trained import Trained

Tta = Literal["flip", "five-crop", "ten-crop"]
STEP = 32
"""Pixels of which the size by the FixRes rule is a multiple: networks halve their images five times."""


class Views(nn.Module):
    """A classifier that sees several views of each image, and gives the logarithm of its mean probabilities.

    Of several labels it gives the logits of these means.

    Args:
        module: the classifier.
        tta: ``flip``: the image and its mirror image; ``five-crop``: the corners and the centre; ``ten-crop``: those
            and their mirror images (Krizhevsky et al. 2012, section 4.1).
        size: side of a crop.
        temperature: of the probabilities of each view.
        is_multi_label: each label has a probability of its own.
    """

    def __init__(
        self, module: nn.Module, tta: Tta, size: int, *, temperature: float = 1.0, is_multi_label: bool = False
    ) -> None:
        super().__init__()
        self.module, self.tta, self.size = module, tta, size
        self.temperature, self.is_multi_label = temperature, is_multi_label

    def forward(self, images: Tensor) -> Tensor:
        views = [images] if self.tta == "flip" else self._crops(images)
        if self.tta != "five-crop":
            views += [view.flip(3) for view in views]
        logits = torch.stack([self.module(view).float() / self.temperature for view in views])
        if self.is_multi_label:
            return functional.logsigmoid(logits).logsumexp(0) - functional.logsigmoid(-logits).logsumexp(0)
        return logits.softmax(2).mean(0).log()

    def _crops(self, images: Tensor) -> list[Tensor]:
        free = images.shape[2] - self.size
        corners = [(0, 0), (0, free), (free, 0), (free, free), (round(free / 2), round(free / 2))]
        layout = (
            torch.channels_last if images.is_contiguous(memory_format=torch.channels_last) else torch.contiguous_format
        )
        return [
            images[:, :, top : top + self.size, left : left + self.size].contiguous(memory_format=layout)
            for top, left in corners
        ]


def with_views(trained: Trained, tta: str) -> Trained:
    """Return weights that see several views of each image (test-time augmentation).

    Five crops are the corners and the centre of the square that the resized image has in its middle: its side is that
    of the centre crop, divided by ``crop``.

    Args:
        tta: see :class:`Views`.

    Raises:
        InputError: no such views, or the centre crop is the whole square already.
    """
    if tta not in get_args(Tta):
        near = did_you_mean(tta, get_args(Tta))
        raise InputError(f"--tta is {tta!r}; it must be one of {', '.join(get_args(Tta))}.{near}")
    input, size = trained.input, trained.input.size
    assert size is not None
    if tta != "flip":
        uncropped = math.floor(size / (input.crop or 1.0))
        if uncropped <= size:
            raise InputError(
                f"--tta {tta} takes parts of an image, and {trained.name} evaluates all of it (crop 1): use --tta flip"
            )
        input = replace(input, size=uncropped, crop=1.0)
    views = Views(
        trained.module,
        tta,  # type: ignore[arg-type]
        size,
        temperature=trained.temperature,
        is_multi_label=trained.is_multi_label,
    )
    return replace(trained, module=views, input=input, temperature=1.0)


def with_size(trained: Trained, size: int | Literal["fixres"]) -> Trained:
    """Return weights that see images at another size.

    Args:
        size: side in pixels; ``fixres``: the one at which objects look as large as in training
            (:func:`fixres_size`), by the crops of the weights' run, or the usual ones.

    Raises:
        InputError: the run had no random-resized crops.
        ModelError: the network takes no images of this size.
    """
    trained_size = trained.input.size
    assert trained_size is not None
    if size == "fixres":
        seen_size, area = _trained_crops(trained)
        size = fixres_size(seen_size, trained.input.crop or 1.0, area)
    if size == trained_size:
        return trained
    if is_exported(trained.path):
        raise ModelError(
            f"{trained.path} takes images of {trained_size} pixels, as it was exported, not of {size}: leave --size out"
        )
    channels, classes = trained.input.channels, len(trained.classes)
    try:
        with torch.no_grad(), redirect_stderr(io.StringIO()):  # graphs print their code where they fail
            parameter = next(trained.module.parameters())
            images = torch.zeros(1, channels, size, size, device=parameter.device, dtype=parameter.dtype)
            if trained.module(images).shape != (1, classes):
                raise ModelError("it gives no logits")
    except Exception as error:
        raise ModelError(
            f"{trained.name} takes no images of {size} pixels ({first_line(error)}): leave --size out"
        ) from error
    return replace(trained, input=replace(trained.input, size=size))


def fixres_size(size: int, crop: float, area: tuple[float, float]) -> int:
    """Compute at which size objects look as large in evaluation as in training (Touvron et al. 2019, section 3).

    A random-resized crop of the share ``a`` of the area enlarges by ``1 / sqrt(a)``; the mean of ``sqrt(a)`` is what
    counts. The result is the nearest multiple of 32 pixels.

    Args:
        size: of training, in pixels.
        crop: share of the shorter side that evaluation takes.
        area: smallest and largest share of the area of a crop in training.
    """
    low, high = area
    mean = math.sqrt(low) if low == high else 2 / 3 * (high**1.5 - low**1.5) / (high - low)
    return max(STEP, STEP * round(size * crop / mean / STEP))


def _trained_crops(trained: Trained) -> tuple[int, tuple[float, float]]:
    """Look up the size of crops at the end of training and the shares of the area that they took.

    Those of evaluation and the usual ones where no run tells.
    """
    size = trained.input.size or 0
    try:
        recipe = Run.open(trained.path.parent).recipe
    except RunError:
        return size, (0.08, 1.0)
    if sizes := parse_sizes(recipe.data.grow_size):
        size = sizes[-1][0]
    kind = recipe.data.augment
    if kind not in ("auto", "resized-crop") or (kind == "auto" and (trained.input.size or 0) <= 64):
        raise InputError(
            f"--size fixres is for networks that were trained on random-resized crops, and {trained.name} was not:"
            " name a size in pixels"
        )
    return size, recipe.data.area
