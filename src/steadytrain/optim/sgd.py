"""Stochastic gradient descent with (Nesterov) momentum: ``m = momentum * m + g``, ``w -= lr * (g + momentum * m)``.

Sutskever et al. 2013, "On the importance of initialization and momentum in deep learning", in the form of
``torch.optim.SGD``; ``g`` includes ``weight_decay * w``. A change of rate acts at once on the whole momentum.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import SGD

from steadytrain.config import Optim
from steadytrain.optim.eager import eager


def make(groups: list[dict[str, Any]], spec: Optim, *, lr: float, fused: bool) -> SGD:
    """Build it. Without momentum there is no state, and ``nesterov`` means nothing.

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
