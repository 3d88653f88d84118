"""Networks of the runs: plain ones that a CPU steps through in some tens of milliseconds, and some with a fault."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn

from faults import counted


class Plain(nn.Module):
    """Three convolutions with strides, batch norms, and a classifier."""

    def __init__(self, num_classes: int, in_chans: int, width: int) -> None:
        super().__init__()
        widths = [in_chans, width, 2 * width, 4 * width]
        self.body = nn.Sequential(*(_layer(a, b) for a, b in pairwise(widths)))
        self.fc = nn.Linear(widths[-1], num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.fc(self.body(images).mean(dim=(2, 3)))
        return logits


class Waiting(Plain):
    """Its forward waits in training, as for a lock or another machine."""

    def __init__(self, num_classes: int, in_chans: int, width: int, seconds: float) -> None:
        super().__init__(num_classes, in_chans, width)
        self.seconds = seconds

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if self.training:
            counted.sleep(self.seconds)
        return super().forward(images)


class Slowed(Plain):
    """Its own code takes time: in the forward pass of training or of evaluation, or in the backward pass."""

    def __init__(self, num_classes: int, in_chans: int, width: int, where: str, how: str, seconds: float, span: str):
        super().__init__(num_classes, in_chans, width)
        begin, end = map(float, span.removesuffix(":grows").split(":"))

        def act(*_: object) -> None:
            if counted.is_between(begin, end):
                counted.WAYS[how](seconds * (2 * counted.progress() if span.endswith(":grows") else 1.0))

        self.act, self.where = act, where
        if where == "backward":
            self.fc.register_full_backward_hook(act)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if self.where == ("forward" if self.training else "evaluation"):
            self.act()
        return super().forward(images)


class Table(Plain):
    """A large table of parameters besides, of which each step uses a row; every one of them is updated."""

    def __init__(self, num_classes: int, in_chans: int, width: int, rows: int, trained: bool) -> None:
        super().__init__(num_classes, in_chans, width)
        self.table = nn.Parameter(torch.zeros(rows, 1024), requires_grad=trained)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return super().forward(images) + self.table[0, 0]


class Keeping(Plain):
    """It keeps something of every batch, and computes on all of it again: in torch alone, nothing that waits."""

    def __init__(self, num_classes: int, in_chans: int, width: int, rows: int, last: float) -> None:
        super().__init__(num_classes, in_chans, width)
        self.rows, self.last, self.kept = rows, last, list[torch.Tensor]()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits = super().forward(images)
        if self.training:
            if counted.is_between(0.0, self.last):
                self.kept.append(logits.detach().mean().repeat(self.rows, 256))
            counted.during(lambda: torch.cat(self.kept).sin().mean())
        return logits


class Threaded(Plain):
    """Its code sets the number of computing threads in the midst of training."""

    def __init__(self, num_classes: int, in_chans: int, width: int, threads: int, begin: float) -> None:
        super().__init__(num_classes, in_chans, width)
        self.threads, self.begin = threads, begin

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if self.training and counted.is_between(self.begin, 2.0) and torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)
        return super().forward(images)


def plain(num_classes: int, in_chans: int, width: int = 32) -> nn.Module:
    """Build the network without a fault."""
    return Plain(num_classes, in_chans, width)


def waiting(num_classes: int, in_chans: int, width: int = 32, seconds: float = 0.05) -> nn.Module:
    """Build a network whose forward pass waits for ``seconds``."""
    return Waiting(num_classes, in_chans, width, seconds)


def slowed(
    num_classes: int,
    in_chans: int,
    width: int = 32,
    where: str = "forward",
    how: str = "sleep",
    seconds: float = 0.01,
    span: str = "0:2",
) -> nn.Module:
    """Build a network with code that takes ``seconds``, from one share of the run to another (``0:2``: always)."""
    return Slowed(num_classes, in_chans, width, where, how, seconds, span)


def table(num_classes: int, in_chans: int, width: int = 32, rows: int = 8192, trained: bool = True) -> nn.Module:
    """Build a network with ``rows`` times 1,024 more parameters, all updated at every step; or frozen."""
    return Table(num_classes, in_chans, width, rows, trained)


def late(num_classes: int, in_chans: int, width: int = 32, seconds: float = 5.0, how: str = "sleep") -> nn.Module:
    """Build a network that takes ``seconds`` to be made, as where weights are fetched."""
    counted.WAYS[how](seconds)
    return Plain(num_classes, in_chans, width)


def keeping(num_classes: int, in_chans: int, width: int = 32, rows: int = 8, last: float = 2.0) -> nn.Module:
    """Build a network that keeps ``rows`` of each batch, up to a share of the run, and computes on all of them."""
    return Keeping(num_classes, in_chans, width, rows, last)


def threaded(num_classes: int, in_chans: int, width: int = 32, threads: int = 1, begin: float = 0.0) -> nn.Module:
    """Build a network that computes with ``threads`` from a share of the run on."""
    return Threaded(num_classes, in_chans, width, threads, begin)


def _layer(num_in: int, num_out: int) -> nn.Module:
    convolution = nn.Conv2d(num_in, num_out, 3, stride=2, padding=1, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(num_out), nn.ReLU(inplace=True))
