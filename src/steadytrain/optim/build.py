"""The table of optimizers, and what all of them have in common."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from steadytrain.config import Optim
from steadytrain.optim import adamw, sgd

Groups: TypeAlias = list[dict[str, Any]]

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {"adamw": adamw.make, "sgd": sgd.make}
"""Every name of ``recipe.Optim.name``: a factory called with groups, ``spec``, ``lr`` and ``fused``."""

_FUSED = ("cpu", "cuda")
"""Devices on which torch updates all tensors of a group in one kernel."""


def build(spec: Optim, groups: Groups, *, lr: float, device: torch.device) -> Optimizer:
    """Make the optimizer that the recipe names.

    Its ``state_dict`` comes back bit for bit, in the parameters' own memory format whatever format it was saved in:
    torch's fused kernels walk parameter and state in memory order, and would pair the wrong elements otherwise.

    Args:
        spec: name and constants.
        groups: from :func:`steadytrain.models.parameter_groups`; parameters already on ``device`` and in their
            final memory format.
        lr: the peak learning rate; each group's own is ``lr * lr_scale``.
        device: where the parameters are.
    """
    assert all(p.device.type == device.type for group in groups for p in group["params"]), "parameters not on device"
    optimizer = OPTIMIZERS[spec.name](groups, spec, lr=lr, fused=device.type in _FUSED)
    optimizer.register_load_state_dict_post_hook(_match_memory_formats)
    set_lr(optimizer, lr)
    return optimizer


def set_lr(optimizer: Optimizer, lr: float) -> None:
    """Give each group ``lr`` times its own ``lr_scale``: host numbers, so nothing waits for the device.

    Rounded as a float32, which is what a graph of an update finds in the device's memory.
    """
    for group in optimizer.param_groups:
        group["lr"] = ctypes.c_float(lr * group.get("lr_scale", 1.0)).value


def _match_memory_formats(optimizer: Optimizer) -> None:
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.stride() != parameter.stride():
                state[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
