"""A worker's engine with its coordinator and its server, all in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import nn

from steadytrain import optim
from steadytrain.config import Optim
from steadytrain.distributed.asynchronous.cluster import Cluster
from steadytrain.distributed.asynchronous.engine import AsyncEngine
from steadytrain.distributed.asynchronous.server import ParameterServer

CPU = torch.device("cpu")
MAKE = partial(optim.build, Optim("sgd", momentum=0.0, weight_decay=0.0), lr=0.1, device=CPU)


class InProcess:
    """What :class:`Cluster` does over Ray, by direct calls."""

    def __init__(self, loop: asyncio.AbstractEventLoop, server: ParameterServer, rank: int) -> None:
        self.rank, self.description = rank, dict[str, Any]()
        self._loop, self._server = loop, server
        self.progress = self.call(ParameterServer.join, rank, 0.0)

    def call(self, method: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        return self._loop.run_until_complete(getattr(self._server, method.__name__)(*arguments, **options))


def set_rates(optimizer: torch.optim.Optimizer, step: int) -> None:
    optim.set_lr(optimizer, 0.1)


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


class Worker:
    """A worker of a network of one weight, which sets the gradient itself."""

    def __init__(self, loop: asyncio.AbstractEventLoop, server: ParameterServer, rank: int, **options: Any) -> None:
        self.weight = nn.Parameter(torch.tensor([1.0]))
        cluster = cast(Cluster, InProcess(loop, server, rank))
        self.engine = AsyncEngine(CPU, cluster, steps=100, batch_size=1, set_rates=set_rates, **options)
        self.optimizer = self.engine.optimizer(MAKE([{"params": [self.weight]}]), MAKE)
        self.engine.prepare(nn.Module())

    def begin(self) -> None:
        """Pull the weights, where it had none, and begin to compute."""
        for batch in self.engine.next_batches() or self.engine.wait_for_batch():
            self.engine.delivered(batch)
        self.engine.begin_update(0)

    def push(self, gradient: float) -> float:
        """Push, pull, and return the weight that it has then."""
        self.weight.grad = torch.tensor([gradient])
        self.optimizer.step()
        return self.weight.item()


def in_one_process(weight: float, gradient: float, divisor: float = 1.0) -> float:
    """Return a weight after an update at a part of the rate."""
    parameter = nn.Parameter(torch.tensor([weight]))
    parameter.grad = torch.tensor([gradient])
    optimizer = MAKE([{"params": [parameter]}])
    set_rates(optimizer, 0)
    optimizer.param_groups[0]["lr"] /= divisor
    optimizer.step()
    return parameter.item()


@pytest.mark.parametrize(
    ("options", "power"), [({}, 1.0), ({"staleness_power": 0.5}, 0.5), ({"staleness_power": 0.0}, 0.0)]
)
def test_the_rate_of_a_push_is_divided_by_one_plus_the_updates_that_it_missed(
    loop: asyncio.AbstractEventLoop, options: dict[str, float], power: float
) -> None:
    server = ParameterServer(3)
    workers = [Worker(loop, server, rank, **options) for rank in range(3)]
    for worker in workers:
        worker.begin()
    weight = 1.0
    for staleness, worker in enumerate(workers):
        weight = in_one_process(weight, 1.5, (1 + staleness) ** power)
        assert worker.push(1.5) == weight


def test_the_rate_of_a_push_that_missed_nothing_is_the_schedules(loop: asyncio.AbstractEventLoop) -> None:
    worker, weight = Worker(loop, ParameterServer(1), 0), 1.0
    for _ in range(5):
        worker.begin()
        weight = in_one_process(weight, 0.7)
        assert worker.push(0.7) == weight
