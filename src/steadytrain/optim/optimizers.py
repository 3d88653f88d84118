"""The table of optimizers, by name, on the fused kernels where torch has them."""

from __future__ import annotations

import ctypes
import inspect
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.optim import SGD, AdamW, Optimizer

from steadytrain.config import Optim

Groups: TypeAlias = list[dict[str, Any]]
Kind = TypeVar("Kind", bound=Optimizer)

_FUSED = ("cpu", "cuda")
"""Devices on which torch updates all tensors of a group in one kernel."""


def eager(kind: type[Kind]) -> type[Kind]:
    """Derive the same optimizer, whose methods never import ``torch.compile``'s part of torch, which takes seconds.

    Torch keeps these methods out of compiled programs by wrappers that import the compiler when they are first called.
    No compiled program of ours has an optimizer in it, so the methods here are those behind the wrappers. What they
    compute, their hooks and their state are torch's own.

    >>> optimizer = eager(SGD)([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    >>> isinstance(optimizer, SGD), type(optimizer).__name__
    (True, 'SGD')
    """
    wrapped = ("add_param_group", "load_state_dict", "state_dict", "zero_grad")
    methods: dict[str, Any] = {name: inspect.unwrap(getattr(kind, name)) for name in wrapped}
    methods["step"] = torch.no_grad()(inspect.unwrap(kind.step))
    return type(kind.__name__, (kind,), methods)


def adamw(groups: Groups, spec: Optim, *, lr: float, fused: bool) -> AdamW:
    """Adam with decoupled weight decay: each update also takes ``lr * weight_decay * w`` off the weights.

    Loshchilov & Hutter 2019, "Decoupled Weight Decay Regularization".
    """
    return eager(AdamW)(groups, lr=lr, betas=spec.betas, eps=spec.eps, fused=fused or None)


def sgd(groups: Groups, spec: Optim, *, lr: float, fused: bool) -> SGD:
    """Stochastic gradient descent with (Nesterov) momentum: ``m = momentum * m + g``, ``w -= lr * (g + momentum * m)``.

    Sutskever et al. 2013, "On the importance of initialization and momentum in deep learning", in the form of
    ``torch.optim.SGD``; ``g`` includes ``weight_decay * w``. A change of rate acts at once on the whole momentum.
    Without momentum there is no state, and ``nesterov`` means nothing.

    The momentum starts as zeros rather than at the first step, which comes to the same: torch's fused kernel
    allocates it uninitialised at the first step, and leaves it so if fp16's loss scaling skips that step.
    """
    nesterov = spec.nesterov and spec.momentum > 0
    optimizer = eager(SGD)(groups, lr=lr, momentum=spec.momentum, nesterov=nesterov, fused=fused or None)
    if spec.momentum > 0:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {"adamw": adamw, "sgd": sgd}
"""Every name of ``recipe.Optim.name``: a factory called with groups, ``spec``, ``lr`` and ``fused``."""


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
