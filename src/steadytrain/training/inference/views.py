"""Weights used on each image and its mirror image, or at another size than they were trained at."""

from __future__ import annotations

import io
from contextlib import redirect_stderr
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from steadytrain.errors import ModelError, first_line
from steadytrain.models.exported import is_exported
from steadytrain.training.inference.trained import Trained


class FlippedViews(nn.Module):
    """A classifier that sees each image and its mirror image, and gives the logarithm of its mean probabilities.

    Of several labels it gives the logits of these means.

    Args:
        module: the classifier.
        temperature: of the probabilities of each view.
        is_multi_label: each label has a probability of its own.
    """

    def __init__(self, module: nn.Module, *, temperature: float = 1.0, is_multi_label: bool = False) -> None:
        super().__init__()
        self.module, self.temperature, self.is_multi_label = module, temperature, is_multi_label

    def forward(self, images: Tensor) -> Tensor:
        logits = torch.stack([self.module(view).float() / self.temperature for view in (images, images.flip(3))])
        if self.is_multi_label:
            return functional.logsigmoid(logits).logsumexp(0) - functional.logsigmoid(-logits).logsumexp(0)
        return logits.softmax(2).mean(0).log()


def with_flips(trained: Trained) -> Trained:
    """Return weights that see each image and its mirror image (test-time augmentation)."""
    views = FlippedViews(trained.module, temperature=trained.temperature, is_multi_label=trained.is_multi_label)
    return replace(trained, module=views, temperature=1.0)


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
