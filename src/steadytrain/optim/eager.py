"""Torch's optimizers without what only compiled programs need of them, which takes seconds to import."""

from __future__ import annotations

import inspect
from typing import Any, TypeVar

import torch
from torch.optim import Optimizer

Kind = TypeVar("Kind", bound=Optimizer)

_OUTSIDE = ("add_param_group", "load_state_dict", "state_dict", "zero_grad")
"""Methods that torch keeps out of compiled programs, by a wrapper that imports the compiler when it is first called."""


def eager(kind: type[Kind]) -> type[Kind]:
    """The same optimizer, whose methods never import ``torch.compile``'s part of torch.

    No compiled program of ours has an optimizer in it, so its methods are those behind torch's wrappers. What they
    compute, their hooks and their state are torch's own.

    >>> from torch.optim import SGD
    >>> optimizer = eager(SGD)([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    >>> isinstance(optimizer, SGD), type(optimizer).__name__
    (True, 'SGD')
    """
    own: dict[str, Any] = {name: inspect.unwrap(getattr(kind, name)) for name in _OUTSIDE}
    own["step"] = torch.no_grad()(inspect.unwrap(kind.step))
    return type(kind.__name__, (kind,), own)
