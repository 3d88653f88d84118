"""The engine: what connects the training loop to other devices and machines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import nn

from steadytrain.distributed.world import World


class Engine(Protocol):
    """Gradients in, an update out. A rank sees its share of each global batch.

    Attributes:
        on_exposed: called when an update's gradients are computed and their exchange, which began meanwhile, is not
            over yet: from then on nothing hides it. May be None.
    """

    on_exposed: Callable[[], None] | None

    @property
    def world(self) -> World:
        """The rank and the number of ranks."""

    @property
    def device(self) -> torch.device:
        """The device of this rank."""

    def prepare(self, module: nn.Module) -> nn.Module:
        """Wrap the module for training; the original keeps its parameters and names."""

    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        """Enclose forward and backward of one micro-batch; ``last``: the update follows."""

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        """Add a micro-batch's gradients; with ``last`` they are exchanged, and all ranks have their mean."""

    def clip(self, parameters: Iterable[nn.Parameter], max_norm: float) -> torch.Tensor:
        """Scale the gradients to at most this global norm; returns the norm before, a scalar on the device."""

    def step(self, update: Callable[[], None]) -> None:
        """Run the optimizer's update, with whatever exchange must stand before or after it."""

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum a tensor of any shape over the ranks, on its device."""

    def broadcast_buffers(self, *modules: nn.Module) -> None:
        """Give rank 0's buffers (running statistics) to all ranks."""

    def all_gather(self, value: torch.Tensor) -> list[torch.Tensor]:
        """Gather a tensor of each rank, all of one shape, on the CPU, in the order of the ranks."""

    def state_dict(self) -> dict[str, Any]:
        """Return what must be saved to go on bit for bit (residuals, outer momentum). All ranks call it."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""


class SingleEngine:
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

    def broadcast_buffers(self, *modules: nn.Module) -> None:
        pass

    def all_gather(self, value: torch.Tensor) -> list[torch.Tensor]:
        return [value.cpu()]

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass  # what several ranks had left to send is owed by nobody now
