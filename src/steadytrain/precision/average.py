"""The exponential moving average of a network's weights, which is often better than the weights themselves.

Polyak & Juditsky 1992, "Acceleration of stochastic approximation by averaging", in its exponential form.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn


def ema(module: nn.Module, decay: float, sources: Iterable[Tensor] | None = None) -> Ema:
    """Begin an average at the module's present weights; ``sources`` as for :class:`Ema`."""
    return Ema(module, decay, sources)


class Ema:
    """A copy of a network whose parameters follow the original's at a distance.

    ``module`` is the copy: in evaluation mode, without gradients, in the original's memory format.

    Args:
        module: the network, on its device and in its final memory format.
        decay: share of the average that an update keeps, such as 0.999. At the n-th update it is at most
            ``n / (n + 9)`` (as in TensorFlow's ``ExponentialMovingAverage`` with ``num_updates``), so that a short run
            is not dominated by where it began: the first update takes the weights nearly as they are.
        sources: what each parameter's average follows and is made like, in their order: the fp32 masters of 16-bit
            ones. None: the parameters.
    """

    def __init__(self, module: nn.Module, decay: float, sources: Iterable[Tensor] | None = None) -> None:
        self.module = copy.deepcopy(module).eval().requires_grad_(False)
        self._sources = None if sources is None else list(sources)
        for own, source in zip(self.module.parameters(), self._followed(module), strict=True):
            own.data = own.data if own.dtype == source.dtype else source.detach().clone()
        self.decay = decay
        self.updates = 0

    @torch.no_grad()
    def update(self, module: nn.Module) -> None:
        """Move towards the weights of ``module``; buffers (running statistics, counts) are copied as they are."""
        self.updates += 1
        keep = min(self.decay, self.updates / (self.updates + 9))
        torch._foreach_lerp_(list(self.module.parameters()), self._followed(module), 1 - keep)
        _copy(self.module.buffers(), module.buffers())

    def _followed(self, module: nn.Module) -> list[Tensor]:
        return list(module.parameters()) if self._sources is None else self._sources

    def state_dict(self) -> dict[str, Any]:
        """The number of updates and the averaged weights."""
        return {"updates": self.updates, "module": self.module.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what :meth:`state_dict` gave, in place."""
        self.updates = int(state["updates"])
        self.module.load_state_dict(state["module"])


def _copy(targets: Iterable[Tensor], sources: Iterable[Tensor]) -> None:
    by_dtype: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        pair = by_dtype.setdefault(target.dtype, ([], []))
        pair[0].append(target)
        pair[1].append(source)
    for ours, theirs in by_dtype.values():
        torch._foreach_copy_(ours, theirs)
