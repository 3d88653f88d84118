"""One process, one device: nothing to exchange."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from steadytrain.engines.engine import World


class Single:
    """The engine of one CPU or one GPU."""

    def __init__(self, device: torch.device) -> None:
        self.world = World(device)

    def prepare(self, module: nn.Module) -> nn.Module:
        return module

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def clip(self, parameters: Iterable[nn.Parameter], max_norm: float) -> torch.Tensor:
        return nn.utils.clip_grad_norm_(parameters, max_norm)

    def step(self, update: Callable[[], None]) -> None:
        update()

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        return values

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        assert not state, "a single process keeps no state of its own"

    def barrier(self) -> None:
        pass

    def close(self) -> None:
        pass
