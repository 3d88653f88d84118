"""What training makes smaller: the loss of a micro-batch, from the bytes of its images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from steadytrain.training.precision import Policy

Forward: TypeAlias = Callable[[nn.Module, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Of a network, images uint8 [B, H, W, C] and labels int64 [B]: the mean loss, a float32 scalar; and what there is to
count, float32 [3] without a gradient: the sum of losses, right answers, images."""


@dataclass(frozen=True)
class Objective:
    """A :data:`Forward`, operation by operation.

    Args:
        policy: numbers, device and memory format.
        mean, std: of the images, as :meth:`steadytrain.training.precision.Policy.images` takes them.
        label_smoothing: as in :class:`steadytrain.config.Optim`.
    """

    policy: Policy
    mean: Sequence[float] | None
    std: Sequence[float] | None
    label_smoothing: float

    def __call__(self, module: nn.Module, images_BHWC: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        images = self.policy.images(images_BHWC, self.mean, self.std)
        with self.policy.autocast():
            logits = module(images)
            loss = functional.cross_entropy(logits.float(), labels, label_smoothing=self.label_smoothing)
        told = loss.detach()
        n = torch.full_like(told, len(labels))
        right = (logits.argmax(1) == labels).sum(dtype=n.dtype)
        return loss, torch.stack((told * n, right, n))
