"""The local engine: each rank trains by itself, and all average their weights once in a number of updates.

docs/engines.md has its methods and their sources. Each rank keeps its optimizer's state, as in all three papers.
Between two averages the ranks differ: evaluation and export use the mean of that moment and leave ranks as they are; a
checkpoint holds the mean, for other engines and numbers of ranks, and the state of each rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from steadytrain.distributed.engine import Engine
from steadytrain.distributed.process_group import Group


class Outer(NamedTuple):
    """DiLoCo's outer optimizer: stochastic gradient descent with Nesterov's momentum."""

    lr: float = 0.7
    momentum: float = 0.9


@final
class LocalEngine(Engine):
    """Averages the ranks' weights after each ``every``-th update.

    Args:
        device: of this rank.
        group: the ranks; None: this process alone, whose mean is itself.
        every: updates from one average to the next, 1 or more.
        first: updates at the beginning of the run that exchange gradients instead.
        outer: DiLoCo's outer optimizer; None: ranks take the mean.
    """

    def __init__(
        self,
        device: torch.device,
        group: Group | None = None,
        *,
        every: int,
        first: int = 0,
        outer: Outer | None = None,
    ) -> None:
        super().__init__(device, group)
        self._every, self._first, self._outer = every, first, outer
        self._module: nn.Module = nn.Module()
        # Only with an outer optimizer, by parameter: the weights that its last step gave, and its momentum; the same on
        # all ranks.
        self._anchor: dict[str, Tensor] = {}
        self._momentum: dict[str, Tensor] = {}

    @property
    def keeps_ranks_equal(self) -> bool:
        return self.world.size == 1

    @property
    def waits_for_gradients(self) -> bool:
        return super().waits_for_gradients and self._first > 0

    def prepare(self, module: nn.Module, step: int = 0) -> nn.Module:
        self._module = module
        if step < self._first:
            return super().prepare(module, step)
        self._parallel = None
        if step == 0:
            for value in (*module.parameters(), *module.buffers()):
                self.broadcast(value.detach())
        self._set_anchor()
        return module

    def finish_update(self, step: int) -> None:
        if step < self._first:
            return
        if step == self._first:  # the last update that exchanges gradients; all ranks have the same weights
            if self._parallel is not None:
                self._parallel.require_backward_grad_sync = False
                self._parallel = None
            self._set_anchor()
        elif (step - self._first) % self._every == 0:
            if self.on_exposed is not None:
                self.on_exposed()
            self._synchronize()

    @torch.no_grad()
    def _synchronize(self) -> None:
        """Give all ranks the mean of their weights and buffers, or of the weights what DiLoCo's outer step gives."""
        trained = self._trained(self._module)
        values = [*trained.values(), *_statistics(self._module)]
        means = self._means(values)
        if self._outer is not None:
            lr, momentum = self._outer
            for k, name in enumerate(trained):  # means of statistics, which come behind, stay
                anchor = self._anchor[name]
                gradient = anchor - means[k]
                velocity = self._momentum.setdefault(name, torch.zeros_like(anchor))
                velocity.mul_(momentum).add_(gradient)
                means[k] = anchor.sub_(gradient.add_(velocity, alpha=momentum), alpha=lr)
        torch._foreach_copy_(values, means)

    @contextmanager
    def settled(self, module: nn.Module) -> Iterator[None]:
        with torch.no_grad():
            values = [*self._trained(module).values(), *_statistics(module)]
            before = [value.clone() for value in values]
            torch._foreach_copy_(values, self._means(values))
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(values, before)

    def _means(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Average tensors over the ranks, with one exchange."""
        flat = self.sum(torch.cat([value.detach().reshape(-1).float() for value in values]))
        parts = torch.split(flat.div_(self.world.size), [value.numel() for value in values])
        return [part.view(value.shape) for part, value in zip(parts, values, strict=True)]

    def _trained(self, module: nn.Module) -> dict[str, Tensor]:
        """Return the parameters of a network, or of its average, that are trained and so may differ."""
        names = {name for name, parameter in self._module.named_parameters() if parameter.requires_grad}
        return {name: parameter.detach() for name, parameter in module.named_parameters() if name in names}

    def _set_anchor(self) -> None:
        """Take the mean weights as the anchor of parameters that have none, those that a phase begins to train as well.

        The mean, since ranks differ where a run is resumed, now with an outer optimizer, between two averages.
        """
        new = {name: value for name, value in self._trained(self._module).items() if name not in self._anchor}
        if new and self._outer is not None:
            self._anchor |= dict(zip(new, (mean.clone() for mean in self._means(list(new.values()))), strict=True))

    def state_dict(self) -> dict[str, Any]:
        """Return what the outer optimizer has: its anchor and momentum, the same on all ranks."""
        return {"anchor": self._anchor, "momentum": self._momentum} if self._outer is not None else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self._outer is not None:  # the state of a run without one has neither
            self._anchor, self._momentum = (
                {name: value.to(self.device) for name, value in (state.get(part) or {}).items()}
                for part in ("anchor", "momentum")
            )


def _statistics(module: nn.Module) -> list[Tensor]:
    """Return the buffers that can be averaged: running statistics, but no counts."""
    return [buffer for buffer in module.buffers() if buffer.is_floating_point()]
