"""Exact evaluation: every sample of a data set once, counted on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from steadytrain.data.loader import Batch
from steadytrain.models import Input
from steadytrain.training.precision import Policy
from steadytrain.training.transfer import load


@dataclass(frozen=True)
class Evaluation:
    """What a model gets right on a whole data set.

    ``n`` images; mean cross-entropy ``loss``; ``top1`` and ``top5`` as fractions (top5 is 1 for five classes or
    fewer); ``right`` and ``total`` for each class.
    """

    n: int
    loss: float
    top1: float
    top5: float
    right: tuple[int, ...]
    total: tuple[int, ...]


def evaluate_module(
    module: nn.Module,
    batches: Iterable[Batch],
    policy: Policy,
    told: Input,
    num_classes: int,
    *,
    total_of: Callable[[torch.Tensor], torch.Tensor] = lambda own: own,
) -> Evaluation:
    """Run ``module`` over ``batches`` in evaluation mode and count; its training mode is put back afterwards.

    Args:
        module: on the policy's device, giving logits [B, num_classes].
        batches: each sample once, the last batch may be short.
        policy: precision, device and memory format.
        told: the model's mean and standard deviation.
        total_of: of what is counted here, the sum over all that evaluate together, each other batches.
    """
    device = policy.device
    loss = torch.zeros((), dtype=torch.float64, device=device)
    top5 = torch.zeros((), dtype=torch.int64, device=device)
    right = torch.zeros(num_classes, dtype=torch.int64, device=device)
    total = torch.zeros(num_classes, dtype=torch.int64, device=device)
    with _evaluating(module), torch.no_grad():
        for batch in load(batches, device):
            with policy.autocast():
                logits = module(policy.images(batch.images, told.mean, told.std)).float()
            labels = batch.labels
            loss += functional.cross_entropy(logits, labels, reduction="sum").double()
            best = logits.topk(min(5, num_classes), dim=1).indices == labels[:, None]
            top5 += best.sum()
            right.index_add_(0, labels, best[:, 0].long())  # bincount would wait for the device, at every batch
            total.index_add_(0, labels, torch.ones_like(labels))
    loss, top5, right, total = (total_of(own) for own in (loss, top5, right, total))
    n = int(total.sum())
    each = max(1, n)  # an evaluation may be stopped before its first batch
    return Evaluation(
        n=n,
        loss=float(loss) / each,
        top1=int(right.sum()) / each,
        top5=int(top5) / each,
        right=tuple(right.tolist()),
        total=tuple(total.tolist()),
    )


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode
