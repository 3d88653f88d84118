"""The server of an asynchronous run: it holds the weights, makes every update, and gives out the batches.

A :class:`ParameterServer` is one actor of Ray that all workers call. Its methods run one at a time between two waits,
so that a push is made whole or not at all, whatever dies.

- **Batches.** Workers train on whole batches of the run's order, and batch ``b`` is at the positions ``b * batch_size``
  on. A batch is assigned to one worker at a time, and counts as done when its update is made. What a worker had when it
  died goes to others. The last batch is worker 0's, when all others are done: it ends with the final weights.
- **Updates.** The number of a push is the step that the schedule follows. Its staleness is how many updates were made
  since its worker pulled the weights that it was computed with.
"""

from __future__ import annotations

import asyncio
import bisect
import os
import platform
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple, TypeAlias

import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from steadytrain.distributed.compression import HALVES, CompressionName

Vector: TypeAlias = NDArray[Any]
ParameterLayout: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""Shape and strides of a parameter."""
Momentum: TypeAlias = dict[int, dict[str, Tensor]]
"""An optimizer's momentum, by the number of the parameter and its name in the state."""

MOMENTUM = ("momentum_buffer", "momentum")
"""The names of a tensor's momentum in the state of torch's, timm's and MXNet's optimizers."""
LEAVE_SECONDS = 10.0
"""Seconds for which workers wait for each other at the end of a run."""


@dataclass(frozen=True)
class Training:
    """The training that the server does, as worker 0 publishes it.

    Args:
        layouts: of the parameters, in the order of the optimizer's groups.
        weights: float32 [n], all parameters one behind the other, each in the order of its memory.
        optimizer: its ``state_dict``.
        make: makes the optimizer of groups with parameters.
        set_rates: sets the rate and momentum of an optimizer to those of the update after so many.
        staleness_power: the learning rate of a push that missed ``s`` updates is divided by ``(1 + s)`` to this power.
        steps: updates of the whole run.
        step: updates that are made, of the batches below ``after`` without the ``unfinished``.
    """

    layouts: tuple[ParameterLayout, ...]
    weights: Vector
    optimizer: Mapping[str, Any]
    make: Callable[[list[dict[str, Any]]], Optimizer]
    set_rates: Callable[[Optimizer, int], None]
    staleness_power: float
    steps: int
    step: int
    unfinished: Sequence[int]
    after: int


class Pushed(NamedTuple):
    """The answer to a push: the newest weights, and how the update was.

    ``weights``: float32 [n], of ``step`` updates. ``staleness``: updates that the push has missed. ``seconds``: that
    the update took. ``batches``: another one for the worker; None: the run is over.
    """

    weights: Vector
    step: int
    staleness: int
    seconds: float
    batches: list[int] | None


class ServerState(NamedTuple):
    """Weights, float32 [n], and state of the optimizer after ``step`` updates, and which batches are in them."""

    weights: Vector
    optimizer: dict[str, Any]
    step: int
    unfinished: list[int]
    after: int


class ParameterServer:
    """The weights of a run, the optimizer that updates them, and the batches that are to be trained on.

    Each worker has a momentum of its own, of its gradients alone; a checkpoint has their mean. With Nesterov's momentum
    this is DANA-Slim: Hakimi et al. 2019, "Taming Momentum in a Distributed Asynchronous Environment".

    Args:
        size: workers of the run.
    """

    def __init__(self, size: int) -> None:
        torch.set_num_threads(1)
        self.size = size
        self._description: dict[str, Any] | None = None  # None: worker 0 has not opened the run yet
        self._step = 0
        self._next = 0  # the lowest batch that was never assigned
        self._returned: list[int] = []  # batches that were assigned in vain, in order
        self._assigned: dict[int, set[int]] = {}  # by worker
        self._pulled: dict[int, int] = {}  # by worker: updates in the weights that it computes with
        self._pulled_weights: dict[int, Tensor] = {}  # by worker, where the optimizer wants to know
        self._momenta: dict[int, Momentum] = {}  # by worker
        self._joins: Counter[int] = Counter()  # by worker: what one waits for is none of its successor's
        self._left: set[int] = set()
        self._is_closed = False
        self._changed = asyncio.Condition()

    async def where(self) -> str:
        """Return its machine and process, in words."""
        return f"{platform.node()}, process {os.getpid()}"

    async def join(self, rank: int, seconds: float) -> dict[str, Any] | None:
        """Admit a worker, in place of one of the same number; None while the run is not open, after ``seconds``."""
        self._joins[rank] += 1
        await self._give_back(rank)
        await self._wait(lambda: self._description is not None, seconds)
        return None if self._description is None else {**self._description, "step": self._step}

    async def open(self, description: dict[str, Any], training: Training) -> None:
        """Open the run, as worker 0."""
        self._description, self._training = description, training
        self._step, self._next = training.step, training.after
        self._returned = sorted(training.unfinished)
        self._weights = torch.from_numpy(training.weights.copy())
        self._parameters = [nn.Parameter(view) for view in views_of(self._weights, training.layouts)]
        groups = training.optimizer["param_groups"]
        self._optimizer = training.make(
            [{**group, "params": [self._parameters[number] for number in group["params"]]} for group in groups]
        )
        self._optimizer.load_state_dict(dict(training.optimizer))
        self._momenta, self._first_momentum = {}, self._momentum()
        await self._notify()

    async def leave(self, rank: int) -> None:
        """Sign off a worker that ends well; the run ends with the first one. At its end workers leave together."""
        await self._give_back(rank)
        self._left.add(rank)
        self._is_closed |= rank == 0
        await self._notify()
        await self._wait(lambda: len(self._left) >= self.size, LEAVE_SECONDS if self._is_over else 0.0)

    async def close(self) -> None:
        """End the run: nothing more is assigned."""
        self._is_closed = True
        await self._notify()

    async def _give_back(self, rank: int) -> None:
        """Give the batches of a worker that is gone to the others."""
        self._pulled.pop(rank, None)
        for batch in self._assigned.pop(rank, ()):
            bisect.insort(self._returned, batch)
        await self._notify()

    async def assign(self, rank: int, count: int = 1, seconds: float = 0.0) -> list[int] | None:
        """Assign up to ``count`` batches to a worker; None: the run is over.

        Where there are none it waits for one, at most ``seconds``: another worker may be lost.
        """
        joins = self._joins[rank]
        await self._wait(lambda: self._is_over or self._has_batch(rank), seconds)
        return self._take(rank, count) if joins == self._joins[rank] else []

    def _take(self, rank: int, count: int) -> list[int] | None:
        if self._is_over:
            return None
        batches: list[int] = []
        while len(batches) < count and self._has_batch(rank):
            if self._returned:
                batches.append(self._returned.pop(0))
            else:
                batches.append(self._next)
                self._next += 1
            self._assigned.setdefault(rank, set()).add(batches[-1])
        return batches

    @property
    def _is_over(self) -> bool:
        return self._is_closed or (self._description is not None and self._step >= self._training.steps)

    def _has_batch(self, rank: int) -> bool:
        """Return whether there is a batch for this worker now."""
        last = self._training.steps - 1
        if self._returned and self._returned[0] < last:
            return True
        if self._returned or self._next == last:
            return rank == 0 and self._step == last  # all others are done
        return self._next < last

    async def pull(self, rank: int, *, computes: bool) -> Pushed:
        """Return the weights; ``computes``: the worker begins to compute a gradient with them."""
        if computes:
            self._pulled[rank] = self._step
        return self._answer(rank, 0, 0.0, [])

    async def push(
        self, rank: int, batch: int, form: CompressionName, missing: Sequence[int], gradient: Vector
    ) -> Pushed:
        """Make the update of a worker's gradient; nothing of a batch that is not assigned to it (any more).

        Args:
            rank: of the worker.
            batch: that the gradient is of.
            form: the compression of the gradient.
            missing: parameters, by number, that have no gradient.
            gradient: float32 [n], or compressed.
        """
        if batch not in self._assigned.get(rank, ()):
            return self._answer(rank, 0, 0.0, [])
        began = time.perf_counter()
        staleness = self._step - self._pulled.get(rank, self._step)
        self._update(rank, staleness, decompress(gradient, form), missing)
        self._assigned[rank].discard(batch)
        self._step += 1
        seconds = time.perf_counter() - began
        self._pulled[rank] = self._step
        answer = self._answer(rank, staleness, seconds, self._take(rank, 1))
        await self._notify()
        return answer

    def _answer(self, rank: int, staleness: int, seconds: float, batches: list[int] | None) -> Pushed:
        weights = self._weights.clone()  # Ray sends it while the next update is made
        if self._wants_pulled:
            self._pulled_weights[rank] = weights
        return Pushed(weights.numpy(), self._step, staleness, seconds, batches)

    @property
    def _wants_pulled(self) -> bool:
        return type(self._optimizer).__name__ == "DCASGD"

    def _update(self, rank: int, staleness: int, gradient: Tensor, missing: Sequence[int]) -> None:
        views = views_of(gradient, self._training.layouts)
        for number, (parameter, view) in enumerate(zip(self._parameters, views, strict=True)):
            parameter.grad = None if number in missing else view
        if self._wants_pulled and rank in self._pulled_weights:  # the delay is from what this worker had
            before = views_of(self._pulled_weights[rank], self._training.layouts)
            for parameter, view in zip(self._parameters, before, strict=True):
                self._optimizer.state[parameter]["previous"] = view
        self._use_momentum(self._momenta.get(rank) or deepcopy(self._first_momentum))
        self._training.set_rates(self._optimizer, self._step)
        groups = self._optimizer.param_groups
        rates = [group["lr"] for group in groups]
        for group in groups:
            group["lr"] /= (1 + staleness) ** self._training.staleness_power
        self._optimizer.step()
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
        self._momenta[rank] = self._momentum()
        self._optimizer.zero_grad()

    def _momentum(self) -> Momentum:
        state = self._optimizer.state
        return {
            number: {name: state[parameter][name] for name in MOMENTUM if name in state[parameter]}
            for number, parameter in enumerate(self._parameters)
        }

    def _use_momentum(self, momentum: Momentum) -> None:
        for number, parameter in enumerate(self._parameters):
            state = self._optimizer.state[parameter]
            for name in MOMENTUM:
                state.pop(name, None)
            state.update(momentum[number])

    async def save(self) -> ServerState:
        """Return all that a checkpoint needs, of one instant between two updates."""
        if self._momenta:
            momenta = list(self._momenta.values())
            self._use_momentum({number: _mean([m[number] for m in momenta]) for number in momenta[0]})
        state = deepcopy(self._optimizer.state_dict())
        assigned = (batch for batches in self._assigned.values() for batch in batches)
        return ServerState(
            self._weights.numpy().copy(), state, self._step, sorted([*self._returned, *assigned]), self._next
        )

    async def _wait(self, condition: Callable[[], bool], seconds: float | None = None) -> None:
        """Wait until a condition holds, at most ``seconds``."""
        if condition() or seconds == 0:
            return
        async with self._changed:
            try:
                await asyncio.wait_for(self._changed.wait_for(condition), seconds)
            except TimeoutError:
                return

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


def layouts_of(parameters: Sequence[Tensor]) -> tuple[ParameterLayout, ...]:
    """Return shape and strides of each parameter."""
    return tuple((tuple(parameter.shape), tuple(parameter.stride())) for parameter in parameters)


def views_of(flat: Tensor, layouts: Sequence[ParameterLayout]) -> list[Tensor]:
    """Return a view of each parameter in a tensor of all of them.

    >>> [view.tolist() for view in views_of(torch.arange(6), [((2,), (1,)), ((2, 2), (1, 2))])]
    [[0, 1], [[2, 4], [3, 5]]]
    """
    views: list[Tensor] = []
    start = 0
    for shape, stride in layouts:
        views.append(flat.as_strided(shape, stride, start))
        start += prod(shape)
    return views


def compress(gradient: Tensor, form: CompressionName) -> Vector:
    """Compress a gradient, float32 [n] on the CPU, for sending."""
    if form in HALVES:
        return gradient.to(HALVES[form]).view(torch.int16).numpy()
    return gradient.numpy()


def decompress(gradient: Vector, form: CompressionName) -> Tensor:
    """Return a gradient as float32 [n], in memory of its own: that of the array is shared, and only read."""
    values = as_tensor(gradient)
    return values.view(HALVES[form]).float() if form in HALVES else values.clone()


def as_tensor(array: Vector) -> Tensor:
    """Return a tensor of an array's memory, which may be shared and is only read."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(array)


def _mean(momenta: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the mean of what workers have, by name; a worker may lack some."""
    values: dict[str, list[Tensor]] = {}
    for momentum in momenta:
        for name, value in momentum.items():
            values.setdefault(name, []).append(value)
    return {name: torch.stack(of_workers).mean(0) for name, of_workers in values.items()}
