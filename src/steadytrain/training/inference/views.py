"""Weights used on several views of each image, or at another size than they were trained at."""

from __future__ import annotations

import io
import math
from contextlib import redirect_stderr
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torchvision.transforms.v2.functional import five_crop

from steadytrain.errors import InputError, ModelError, first_line
from steadytrain.models.exported import is_exported
from steadytrain.training.inference.trained import Trained

Tta = Literal["flip", "five-crop", "ten-crop"]


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
        logits = torch.stack([self.module(view).float() / self.temperature for view in self.views(images)])
        if self.is_multi_label:
            return functional.logsigmoid(logits).logsumexp(0) - functional.logsigmoid(-logits).logsumexp(0)
        return logits.softmax(2).mean(0).log()

    def views(self, images: Tensor) -> list[Tensor]:
        """Return the views of images [B, C, H, W]."""
        is_last = images.is_contiguous(memory_format=torch.channels_last)
        layout = torch.channels_last if is_last else torch.contiguous_format
        crops = [images] if self.tta == "flip" else five_crop(images, [self.size, self.size])
        views = [crop.contiguous(memory_format=layout) for crop in crops]
        return views if self.tta == "five-crop" else views + [view.flip(3) for view in views]


def with_views(trained: Trained, tta: Tta) -> Trained:
    """Return weights that see several views of each image (test-time augmentation).

    Five crops are the corners and the centre of the square that the resized image has in its middle: its side is that
    of the centre crop, divided by ``crop``.

    Args:
        tta: see :class:`Views`.

    Raises:
        InputError: the centre crop is the whole square already.
    """
    input, size = trained.input, trained.input.size
    assert size is not None
    if tta != "flip":
        uncropped = math.floor(size / (input.crop or 1.0))
        if uncropped <= size:
            raise InputError(
                f"--tta {tta} takes parts of an image, and {trained.name} evaluates all of it (crop 1): use --tta flip"
            )
        input = replace(input, size=uncropped, crop=1.0)
    views = Views(trained.module, tta, size, temperature=trained.temperature, is_multi_label=trained.is_multi_label)
    return replace(trained, module=views, input=input, temperature=1.0)


def with_size(trained: Trained, size: int) -> Trained:
    """Return weights that see images of another side, in pixels. Raises ModelError: the network takes none."""
    if size == trained.input.size:
        return trained
    if is_exported(trained.path):
        raise ModelError(
            f"{trained.path} takes images of {trained.input.size} pixels, as it was exported, not of {size}: leave"
            " --size out"
        )
    try:
        with torch.no_grad(), redirect_stderr(io.StringIO()):  # graphs print their code where they fail
            parameter = next(trained.module.parameters())
            shape = 1, trained.input.channels, size, size
            images = torch.zeros(shape, device=parameter.device, dtype=parameter.dtype)
            if trained.module(images).shape != (1, len(trained.classes)):
                raise ModelError("it gives no logits")
    except Exception as error:
        raise ModelError(
            f"{trained.name} takes no images of {size} pixels ({first_line(error)}): leave --size out"
        ) from error
    return replace(trained, input=replace(trained.input, size=size))
