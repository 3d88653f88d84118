"""Adam with decoupled weight decay: Loshchilov & Hutter 2019, "Decoupled Weight Decay Regularization"."""

from __future__ import annotations

from typing import Any

from torch.optim import AdamW

from steadytrain.config import Optim
from steadytrain.optim.eager import eager


def make(groups: list[dict[str, Any]], spec: Optim, *, lr: float, fused: bool) -> AdamW:
    """Build ``torch.optim.AdamW``: each update also takes ``lr * weight_decay * w`` off the weights."""
    return eager(AdamW)(groups, lr=lr, betas=spec.betas, eps=spec.eps, fused=fused or None)
