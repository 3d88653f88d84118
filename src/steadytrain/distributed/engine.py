"""What the training loop asks of the thing that connects it to other devices and machines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import nn

from steadytrain.distributed.world import World


class Engine(Protocol):
    """Gradients in, an update out. A rank sees its share of each global batch.

    Attributes:
        on_exposed: called when an update's gradients are computed and their exchange, which began meanwhile, is not
            over yet; from then on it is not hidden behind anything. None: nobody wants to know.
    """

    on_exposed: Callable[[], None] | None

    @property
    def world(self) -> World:
        """Which of how many ranks this is."""

    @property
    def device(self) -> torch.device:
        """What it computes on."""

    def prepare(self, module: nn.Module) -> nn.Module:
        """The module to call in training; the one given keeps its parameters and names."""

    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        """Around forward and backward of one micro-batch; ``last`` says that the update follows."""

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        """Add a micro-batch's gradients; with ``last`` they are exchanged: all ranks have their mean then."""

    def clip(self, parameters: Iterable[nn.Parameter], max_norm: float) -> torch.Tensor:
        """Scale the gradients to at most this global norm; returns the norm before, a scalar on the device."""

    def step(self, update: Callable[[], None]) -> None:
        """Run the optimizer's update, with whatever exchange must stand before or after it."""

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over ranks of a tensor of any shape, on its device."""

    def align(self, *modules: nn.Module) -> None:
        """Give the modules' buffers (running statistics) of the first rank to all."""

    def each(self, own: torch.Tensor) -> list[torch.Tensor]:
        """A tensor of each rank, all of one shape, on the CPU, in the order of the ranks."""

    def state_dict(self) -> dict[str, Any]:
        """What must be saved to go on bit for bit (residuals, outer momentum); may be empty. All ranks ask."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what :meth:`state_dict` gave."""
