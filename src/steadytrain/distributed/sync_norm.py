"""Batch norms whose statistics are over the micro-batches of all ranks, for shares so small that their own are noise.

Mean and variance are taken over all ranks in the forward pass, and their gradients over all of them in the backward one
(Peng et al. 2018, "MegDet: A Large Mini-Batch Object Detector"). It costs two exchanges in each layer and pass that
nothing hides. Torch's own ``SyncBatchNorm`` runs on GPUs only, and drops the activation that timm's layers have inside.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce as _all_reduce

all_reduce: Any = _all_reduce  # torch gives it no types
_KINDS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def synchronise(module: nn.Module, group: dist.ProcessGroup | None = None) -> int:
    """Let all batch norms of a module that is in training take their statistics over all ranks; returns how many.

    Parameters, buffers and their names stay; norms that are set to evaluation go on as they are. All ranks have to call
    the module equally often.

    Args:
        module: changed in place.
        group: the ranks; None: all.
    """
    found = [one for one in module.modules() if isinstance(one, _KINDS)]
    for one in found:
        kind: Any = type(one)
        one.__class__ = _synchronised(kind, group)
    return len(found)


@cache
def _synchronised(kind: type[Any], group: dist.ProcessGroup | None) -> type[Any]:
    """A kind of batch norm that does something else in training. The group is the class's: modules are copied."""

    def forward(self: Any, images: Tensor) -> Tensor:
        if not self.training:
            return kind.forward(self, images)  # type: ignore[no-any-return]
        told = _normalised(self, images)
        # timm's BatchNormAct2d and its like
        return self.act(self.drop(told)) if hasattr(self, "act") and hasattr(self, "drop") else told

    return type(f"Synchronous{kind.__name__}", (kind,), {"forward": forward, "ranks": group})


def _normalised(norm: Any, images: Tensor) -> Tensor:
    dims = [0, *range(2, images.dim())]
    shape = [1, -1] + [1] * (images.dim() - 2)
    values = images.float()
    count = torch.tensor(float(values.numel() // values.shape[1]), device=values.device)
    told: Tensor = all_reduce(torch.cat([values.sum(dims), count[None]]), group=norm.ranks)
    total = told[-1].detach()
    mean = told[:-1] / total
    apart = values - mean.view(shape)
    variance = all_reduce(apart.square().sum(dims), group=norm.ranks) / total
    _remember(norm, mean.detach(), variance.detach() * total / (total - 1).clamp(min=1))
    normalised: Tensor = apart * torch.rsqrt(variance + norm.eps).view(shape)
    if norm.weight is not None:
        normalised = normalised * norm.weight.view(shape)
    if norm.bias is not None:
        normalised = normalised + norm.bias.view(shape)
    return normalised.to(images.dtype)


@torch.no_grad()
def _remember(norm: Any, mean: Tensor, variance: Tensor) -> None:
    """The running statistics, as torch's batch norms keep them."""
    if norm.running_mean is None:
        return
    norm.num_batches_tracked.add_(1)
    share = 1 / float(norm.num_batches_tracked) if norm.momentum is None else norm.momentum
    norm.running_mean.lerp_(mean.to(norm.running_mean.dtype), share)
    norm.running_var.lerp_(variance.to(norm.running_var.dtype), share)
