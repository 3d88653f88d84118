"""The servers of the asynchronous engine: each has a range of all parameters, and makes the updates of it.

The parameters of a run, one after another in the order of the optimizer's groups and each in the order of its memory,
are one long vector; :func:`cut` divides it among the servers by bytes. A server runs any optimizer of the table on its
range: those that work element by element do not see where a tensor was cut, and the others get whole tensors.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from steadytrain.distributed.compression import HALVES, CompressionName

Vector: TypeAlias = NDArray[Any]
MakeOptimizer: TypeAlias = Callable[[list[dict[str, Any]]], Optimizer]
TensorState: TypeAlias = dict[str, tuple[bool, Any]]
"""An optimizer's state of a tensor: by name, whether it has an element for each of the tensor's, and the value."""

REMEMBERED = 1000
"""Batches before the newest one of which a server knows whether it has made their updates."""
MOMENTUM = ("momentum_buffer", "momentum")
"""The names of a tensor's momentum in the state of torch's, timm's and MXNet's optimizers."""


@dataclass(frozen=True)
class ParameterPlace:
    """Location of a parameter: its group, its first element among those of all, and its memory layout."""

    group: int
    start: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def end(self) -> int:
        size = 1
        for side in self.shape:
            size *= side
        return self.start + size


def places_of(groups: Sequence[Mapping[str, Any]]) -> tuple[ParameterPlace, ...]:
    """Lay all parameters of an optimizer's groups one behind the other."""
    places: list[ParameterPlace] = []
    for number, group in enumerate(groups):
        for parameter in group["params"]:
            start = places[-1].end if places else 0
            places.append(ParameterPlace(number, start, tuple(parameter.shape), tuple(parameter.stride())))
    return tuple(places)


def cut(places: Sequence[ParameterPlace], servers: int, *, whole: bool) -> tuple[int, ...]:
    """Divide all elements evenly among servers: the borders, one more than there are servers.

    ``whole``: only between two tensors, at the border that is nearest.

    >>> places = [ParameterPlace(0, 0, (10,), (1,)), ParameterPlace(0, 10, (100, 10), (10, 1))]
    >>> cut(places, 2, whole=False), cut(places, 2, whole=True)
    ((0, 505, 1010), (0, 10, 1010))
    """
    total = places[-1].end
    even = [total * number // servers for number in range(servers + 1)]
    if whole:
        borders = [0, *(place.end for place in places)]
        even = [min(borders, key=lambda border: abs(border - wanted)) for wanted in even]
    return tuple(even)


class ParameterServer:
    """A range of all parameters, and the optimizer that updates it. One caller at a time.

    Each worker has a momentum of its own, of its gradients alone; a checkpoint has their mean. With Nesterov's momentum
    this is DANA-Slim: Hakimi et al. 2019, "Taming Momentum in a Distributed Asynchronous Environment".
    """

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._weights = torch.empty(0)
        self._parameters: dict[int, nn.Parameter] = {}  # by their number among all
        self._groups: list[int] = []  # of all groups, those of this server's optimizer
        self._optimizer: Optimizer | None = None
        self._pulled: dict[int, Tensor] = {}  # by worker: the weights that it has, where the optimizer wants to know
        self._momenta: dict[int, dict[int, dict[str, Tensor]]] = {}  # by worker, parameter and name
        self._first_momenta: dict[int, dict[str, Tensor]] = {}  # what each worker begins with
        self._shares: dict[int, Tensor] = {}  # by worker, of an update that is made of all of them
        self._applied, self._seconds = 0, 0.0
        self._batches: set[int] = set()  # whose updates were made here
        self._keeps_gradients = True

    def load(
        self,
        places: Sequence[ParameterPlace],
        groups: Sequence[Mapping[str, Any]],
        make: MakeOptimizer,
        step: int,
        first: int,
        weights: Vector,
        states: Mapping[int, TensorState],
        *,
        whole: bool,
        keeps_gradients: bool,
    ) -> None:
        """Take over a range of the parameters.

        Args:
            places: of all parameters.
            groups: the optimizer's, without parameters: each with its rate, weight decay and so on.
            make: makes the optimizer of groups with parameters.
            step: updates that are made.
            first: where this server's range begins.
            weights: float32 [n], of its range.
            states: what the optimizer had of each parameter's part in this range, by the parameter's number.
            whole: the optimizer wants tensors of their shapes, none of which is cut.
            keeps_gradients: the optimizer leaves gradients as they are, which lie in shared memory.
        """
        self._weights = torch.from_numpy(weights.copy())
        end, self._parameters = first + len(weights), {}
        for number, place in enumerate(places):
            start, stop = max(place.start, first), min(place.end, end)
            if start < stop:
                part = self._weights[start - first : stop - first]
                self._parameters[number] = nn.Parameter(
                    part.as_strided(place.shape, place.stride) if whole else part, requires_grad=True
                )
        self._groups = sorted({places[number].group for number in self._parameters})
        self._spans = {
            n: slice(max(places[n].start, first) - first, min(places[n].end, end) - first) for n in self._parameters
        }
        self._applied, self._keeps_gradients = step, keeps_gradients
        self._batches.clear()
        self._optimizer = None
        if self._parameters:
            own_groups = [
                {**groups[k], "params": [p for n, p in self._parameters.items() if places[n].group == k]}
                for k in self._groups
            ]
            self._optimizer = make(own_groups)
            for number, state in states.items():
                parameter = self._parameters[number]
                self._optimizer.state[parameter] = {
                    name: torch.from_numpy(np.array(value)).as_strided(parameter.shape, parameter.stride())
                    if is_alike
                    else deepcopy(value)
                    for name, (is_alike, value) in state.items()
                }
        self._momenta.clear()
        self._first_momenta = self._momentum()

    def pull(self, rank: int) -> tuple[Vector, int, float]:
        """Return the weights, float32 [n], how many updates are in them, and the seconds that the last one took."""
        if self._wants_pulled:
            self._pulled[rank] = self._weights.clone()
        return self._weights.numpy(), self._applied, self._seconds

    def push(
        self,
        rank: int,
        batch: int,
        form: CompressionName,
        missing: Sequence[int],
        options: Sequence[Mapping[str, Any]],
        gradient: Vector,
    ) -> tuple[Vector, int, float]:
        """Make the update of a worker's gradient, once for each batch; return as :meth:`pull` does.

        Args:
            rank: of the worker.
            batch: that the gradient is of.
            form: the compression of the gradient.
            missing: parameters, by number, that have no gradient.
            options: of each of the run's groups: rate, and whatever else a schedule moves.
            gradient: of the range: float32 [n], or compressed.
        """
        if batch not in self._batches:
            began = time.perf_counter()
            self._step(rank, self._decompress(gradient, form), missing, options)
            self.skip(batch)
            self._seconds = time.perf_counter() - began
        return self.pull(rank)

    def skip(self, batch: int) -> None:
        """Count the update of a batch as made."""
        self._batches = {batch, *(number for number in self._batches if number > batch - REMEMBERED)}
        self._applied += 1

    def push_share(
        self,
        rank: int,
        update: int,
        form: CompressionName,
        missing: Sequence[int],
        options: Sequence[Mapping[str, Any]],
        shares: int,
        gradient: Vector,
    ) -> None:
        """Take a worker's share of update number ``update``, and make it when all ``shares`` are there."""
        if update != self._applied:
            return  # it was made before this worker was started again
        self._shares[rank] = self._decompress(gradient, form).clone()
        if len(self._shares) == shares:
            total = torch.zeros_like(self._weights)
            for worker in sorted(self._shares):
                total += self._shares[worker]
            self._shares.clear()
            self._step(0, total, missing, options)  # one worker's momentum for the gradients of all
            self._applied += 1

    def has_applied(self, batch: int) -> bool:
        """Return whether this server has applied the update of a batch."""
        return batch in self._batches

    def save(self) -> tuple[Vector, int, dict[int, TensorState]]:
        """Return the weights, how many updates are in them, and the optimizer's state by parameter."""
        states: dict[int, TensorState] = {}
        for number, parameter in self._parameters.items():
            state = {} if self._optimizer is None else self._optimizer.state.get(parameter, {})
            state = {**state, **_mean([momentum[number] for momentum in self._momenta.values()])}
            states[number] = {name: saved_value(name, value, parameter) for name, value in state.items()}
        return self._weights.numpy(), self._applied, states

    @property
    def _wants_pulled(self) -> bool:
        return type(self._optimizer).__name__ == "DCASGD"

    def _step(self, rank: int, gradient: Tensor, missing: Sequence[int], options: Sequence[Mapping[str, Any]]) -> None:
        if self._optimizer is None:
            return
        for number, parameter in self._parameters.items():
            part = gradient[self._spans[number]]
            parameter.grad = None if number in missing else part.as_strided(parameter.shape, parameter.stride())
            if self._wants_pulled and rank in self._pulled:  # the delay is from what this worker had
                before = self._pulled[rank][self._spans[number]]
                self._optimizer.state[parameter]["previous"] = before.as_strided(parameter.shape, parameter.stride())
        for group, number in zip(self._optimizer.param_groups, self._groups, strict=True):
            group.update(options[number])
        momentum = self._momenta.get(rank) or deepcopy(self._first_momenta)
        for number, parameter in self._parameters.items():
            state = self._optimizer.state[parameter]
            for name in MOMENTUM:
                state.pop(name, None)
            state.update(momentum[number])
        self._optimizer.step()
        self._momenta[rank] = self._momentum()
        for parameter in self._parameters.values():
            parameter.grad = None

    def _momentum(self) -> dict[int, dict[str, Tensor]]:
        """Return the optimizer's momentum of each parameter, by number and name."""
        states: Mapping[Any, Any] = {} if self._optimizer is None else self._optimizer.state
        return {
            number: {name: states[parameter][name] for name in MOMENTUM if name in states[parameter]}
            for number, parameter in self._parameters.items()
        }

    def _decompress(self, gradient: Vector, form: CompressionName) -> Tensor:
        """Return a gradient as float32 [n]."""
        values = as_tensor(gradient)
        if form in HALVES:
            return values.view(HALVES[form]).float()
        return values if self._keeps_gradients else values.clone()


def compress(gradient: Tensor, form: CompressionName) -> Vector:
    """Compress a gradient, float32 [n] on the CPU, for sending."""
    if form in HALVES:
        return gradient.to(HALVES[form]).view(torch.int16).numpy()
    return gradient.numpy()


def as_tensor(array: Vector) -> Tensor:
    """Return a tensor of an array's memory, which may be shared and is only read."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(array)


def saved_value(name: str, value: Any, parameter: Tensor) -> tuple[bool, Any]:
    """Return whether a value of an optimizer's state is like its parameter, and the value: then in memory order."""
    if name != "step" and isinstance(value, Tensor) and value.shape == parameter.shape:
        laid_out = torch.empty_strided(parameter.shape, parameter.stride(), dtype=value.dtype)
        laid_out.copy_(value)
        return True, laid_out.as_strided((value.numel(),), (1,)).numpy()
    return False, deepcopy(value)


def _mean(momenta: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the mean of what workers have, by name; a worker may lack some."""
    values: dict[str, list[Tensor]] = {}
    for momentum in momenta:
        for name, value in momentum.items():
            values.setdefault(name, []).append(value)
    return {name: torch.stack(of_workers).mean(0) for name, of_workers in values.items()}
