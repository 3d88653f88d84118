"""One process, one device: nothing to exchange."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from steadytrain.distributed.world import World


class Single:
    """The engine of one CPU or one GPU."""

    def __init__(self, device: torch.device) -> None:
        self.world = World()
        self.device = device
        self.on_exposed: Callable[[], None] | None = None

    def prepare(self, module: nn.Module) -> nn.Module:
        return module

    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        return nullcontext()

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def clip(self, parameters: Iterable[nn.Parameter], max_norm: float) -> torch.Tensor:
        return nn.utils.clip_grad_norm_(parameters, max_norm)

    def step(self, update: Callable[[], None]) -> None:
        update()

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        return values

    def align(self, *modules: nn.Module) -> None:
        pass

    def each(self, own: torch.Tensor) -> list[torch.Tensor]:
        return [own.cpu()]

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass  # what several ranks had left to send is owed by nobody now
