"""The exponential moving average of a network's weights, which is often better than the weights themselves.

Polyak & Juditsky 1992, "Acceleration of stochastic approximation by averaging", in its exponential form.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


class Ema:
    """A copy of a network whose parameters follow the original's at a distance.

    ``module`` is the copy: in evaluation mode, without gradients, in the original's memory format.
    ``keeps_statistics``: updates leave the running statistics of batch norms as :meth:`settle` has made them.

    Args:
        module: the network, on its device and in its final memory format.
        decay: share of the average that an update keeps, such as 0.999. At the n-th update it is at most
            ``n / (n + 9)`` (as in TensorFlow's ``ExponentialMovingAverage`` with ``num_updates``), so that a short run
            is not dominated by where it began: the first update takes the weights nearly as they are.
            None averages uniformly, the weights after every update from the one after ``start`` on, and takes the
            weights as they are until then (stochastic weight averaging: Izmailov et al. 2018, "Averaging Weights Leads
            to Wider Optima and Better Generalization").
        start: updates before a uniform average.
        copied: a copy of the network, to be the average; None: it is made here.
        own_values: returns what is averaged here of a parameter, or its average: a rank may have a part of each.
        sources: what each parameter's average follows and is made like, in their order: the fp32 masters of 16-bit
            ones. None: the parameters.
    """

    def __init__(
        self,
        module: nn.Module,
        decay: float | None,
        sources: Iterable[Tensor] | None = None,
        *,
        start: int = 0,
        copied: nn.Module | None = None,
        own_values: Callable[[Tensor], Tensor] = lambda value: value,
    ) -> None:
        self.module = (copied or copy.deepcopy(module)).eval().requires_grad_(False)
        self._own_values = own_values
        self._sources = None if sources is None else list(sources)
        for average, source in zip(self.module.parameters(), self._followed(module), strict=True):
            average.data = average.data if average.dtype == source.dtype else source.detach().clone()
        self.decay = decay
        self.start = start
        self.updates = 0
        self.keeps_statistics = False

    @torch.no_grad()
    def update(self, module: nn.Module, updates: int = 1) -> None:
        """Move towards the weights of ``module``; buffers (running statistics, counts) are copied as they are.

        Those of norms that learn are left alone while ``keeps_statistics``. ``updates``: that were made since the last
        call, of which the weights between are not known.
        """
        self.updates += updates
        n = self.updates
        keep = max(0.0, 1 - 1 / max(1, n - self.start)) if self.decay is None else min(self.decay, n / (n + 9))
        keep **= updates
        averages, sources = (list(map(self._own_values, v)) for v in (self.module.parameters(), self._followed(module)))
        torch._foreach_lerp_(averages, sources, 1 - keep)
        skipped = {id(b) for norm in self._norms(module) for b in norm.buffers()} if self.keeps_statistics else set()
        by_dtype: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
        for average, source in zip(self.module.buffers(), module.buffers(), strict=True):
            if id(average) not in skipped:
                averages, sources = by_dtype.setdefault(average.dtype, ([], []))
                averages.append(average)
                sources.append(source)
        for averages, sources in by_dtype.values():
            torch._foreach_copy_(averages, sources)

    @property
    def is_average(self) -> bool:
        """Return whether the next update makes it an average of weights, rather than the weights as they are."""
        return self.decay is not None or self.updates > self.start

    def has_statistics(self, module: nn.Module) -> bool:
        """Return whether ``module`` has batch norms with running statistics in training mode."""
        return bool(self._norms(module))

    @torch.no_grad()
    def settle(self, module: nn.Module, images_BCHW: Tensor, *, share: float) -> None:
        """Move the running statistics towards those of the averaged weights on these images.

        Args:
            module: the original: its norms that are in evaluation mode are frozen, here too.
            images_BCHW: as the network takes them.
            share: that these images get; 1 forgets all before them. 1, 1/2, ..., 1/n gives the mean over n batches.
        """
        norms = self._norms(module)
        momenta = [norm.momentum for norm in norms]
        for norm in norms:
            norm.momentum = share
            norm.train()
        self.module(images_BCHW)
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
            norm.eval()

    def _norms(self, module: nn.Module) -> list[_BatchNorm]:
        pairs = zip(self.module.modules(), module.modules(), strict=True)
        return [
            norm
            for norm, source in pairs
            if isinstance(norm, _BatchNorm) and source.training and norm.running_mean is not None
        ]

    def _followed(self, module: nn.Module) -> list[Tensor]:
        return list(module.parameters()) if self._sources is None else self._sources

    def state_dict(self) -> dict[str, Any]:
        """The number of updates and the averaged weights."""
        return {"updates": self.updates, "module": self.module.state_dict()}
