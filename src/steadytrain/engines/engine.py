"""What the training loop asks of the thing that connects it to other devices and machines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn


@dataclass(frozen=True)
class World:
    """Who this process is: its ``rank`` of ``size``, and the device that it computes on."""

    device: torch.device
    rank: int = 0
    size: int = 1


class Engine(Protocol):
    """Gradients in, an update out. A rank sees its share of each global batch."""

    @property
    def world(self) -> World:
        """Rank, size and device of this process."""

    def prepare(self, module: nn.Module) -> nn.Module:
        """The module to call in training; the one given keeps its parameters and names."""

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        """Add a micro-batch's gradients; ``last`` says that the update follows, so exchange may begin."""

    def clip(self, parameters: Iterable[nn.Parameter], max_norm: float) -> torch.Tensor:
        """Scale the gradients to at most this global norm; returns the norm before, a scalar on the device."""

    def step(self, update: Callable[[], None]) -> None:
        """Run the optimizer's update, with whatever exchange must stand before or after it."""

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """The mean over ranks of a tensor of any shape, on the device."""

    def state_dict(self) -> dict[str, Any]:
        """What must be saved to go on bit for bit (residuals, outer momentum); may be empty."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what :meth:`state_dict` gave."""

    def barrier(self) -> None:
        """Wait until every rank is here."""

    def close(self) -> None:
        """Leave the group; closing twice is fine."""
