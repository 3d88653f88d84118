"""The asynchronous engine: workers that never wait for each other, and servers that hold the weights.

MXNet's ``dist_async`` on Ray (Li et al. 2014, "Scaling Distributed Machine Learning with the Parameter Server"). A
worker computes the gradient of a whole batch, pushes it, and pulls the weights that came of it and of all other
workers' pushes meanwhile. Each push is an update of its own, of as many images as the recipe's batch has; so a run has
as many updates as one process would make, and its learning rate follows the updates of all workers.

With a staleness bound of 0 every worker computes its share of the same batch and the servers make one update of the
sum: what ``ddp`` computes, to rounding.

The running statistics of batch norms stay where they are computed. Those that count are worker 0's: it evaluates and
saves, beside the others, which train on.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from steadytrain.distributed.asynchronous.cluster import Cluster
from steadytrain.distributed.asynchronous.coordinator import Coordinator
from steadytrain.distributed.asynchronous.server import (
    MakeOptimizer,
    ParameterPlace,
    ParameterServer,
    TensorState,
    as_tensor,
    compress,
    cut,
    places_of,
    saved_value,
)
from steadytrain.distributed.compression import CompressionName
from steadytrain.distributed.engine import Engine
from steadytrain.distributed.world import World
from steadytrain.events import Event, ServerStats

AHEAD = 2
"""Batches that a worker loads ahead of the one it trains on, and that others have to train on if it dies."""
WAIT_SECONDS = 0.5
_FIGURES = ("seconds", "update_seconds", "pushed_bytes", "pulled_bytes")
_SAVED = ("unfinished", "after")
_SCHEDULED = ("lr", "momentum", "betas")


class RemoteOptimizer(Optimizer):
    """Proxy of the optimizer that the servers run: a step pushes the gradients and pulls the weights.

    Its ``state_dict`` is that of the optimizer in one process.
    """

    def __init__(self, local: Optimizer, engine: AsyncEngine) -> None:
        # Torch's own initialiser is left out: it imports torch's compiler, and there is nothing here for it to do.
        self.param_groups, self.defaults = local.param_groups, local.defaults
        self.state: Any = {}
        self._engine = engine
        self._loaded: dict[int, dict[str, Any]] = {}

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Push, and pull."""
        assert closure is None, "closures are not supported"
        self._engine.exchange()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients."""
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state that :meth:`AsyncEngine.collect` fetched, in the form of torch's optimizers."""
        groups: list[dict[str, Any]] = []
        count = 0
        for group in self.param_groups:
            numbers = list(range(count, count + len(group["params"])))
            groups.append({**group, "params": numbers})
            count += len(numbers)
        return {"state": self._loaded, "param_groups": groups}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keep a state until :meth:`AsyncEngine.prepare` sends it to the servers."""
        saved = state["param_groups"]
        if [len(group["params"]) for group in saved] != [len(group["params"]) for group in self.param_groups]:
            raise ValueError("its optimizer has other groups of parameters")
        for group, saved_group in zip(self.param_groups, saved, strict=True):
            group.update({name: value for name, value in saved_group.items() if name != "params"})
        self._loaded = dict(state["state"])


@dataclass
class Exchanged:
    """Counts of a worker's exchange with its servers since an instant, for an event."""

    since: float
    pushes: int = 0
    staleness: int = 0
    staleness_max: int = 0
    servers: list[Any] = field(default_factory=list)

    def add(
        self,
        staleness: int,
        seconds: Sequence[float],
        updating: Sequence[float],
        pushed: Sequence[tuple[Any, ...]],
        pulled: Sequence[tuple[Any, ...]],
    ) -> None:
        """Count one push to all servers, with the pull that followed it."""
        self.pushes += 1
        self.staleness += staleness
        self.staleness_max = max(self.staleness_max, staleness)
        self.servers = self.servers or [dict.fromkeys(_FIGURES, 0.0) for _ in seconds]
        for totals, call, update, sent, received in zip(self.servers, seconds, updating, pushed, pulled, strict=True):
            for name, value in zip(_FIGURES, (call, update, sent[-1].nbytes, received[0].nbytes), strict=True):
                totals[name] += value


class AsyncEngine(Engine):
    """A worker's side of asynchronous training: push gradients to the servers, pull weights from them.

    Args:
        device: of this worker.
        cluster: the servers.
        steps: updates of the whole run, of ``batch_size`` images.
        staleness: the bound; None: there is none; 0: all workers make each update together.
        staleness_power: the learning rate of a push that missed ``s`` updates is divided by ``(1 + s)`` to this power
            (Zhang et al. 2016, "Staleness-aware Async-SGD for Distributed Deep Learning"; the power: Xie et al. 2019,
            "Asynchronous Federated Optimization").
        whole: the optimizer wants whole tensors: none is cut between servers.
        keeps_gradients: the optimizer leaves gradients as they are.
        compress: how pushes are compressed: see :mod:`.compression`.
    """

    def __init__(
        self,
        device: torch.device,
        cluster: Cluster,
        *,
        steps: int,
        batch_size: int,
        staleness: int | None = None,
        staleness_power: float = 1.0,
        whole: bool = True,
        keeps_gradients: bool = True,
        compress: CompressionName = "none",
    ) -> None:
        super().__init__(device, compress=compress)
        self.world = World(rank=cluster.rank, size=1)  # nobody waits for another
        self.loads_ahead = False
        self.wish: str | None = None
        self.decision: str | None = None
        self.is_synchronous = staleness == 0
        self._cluster = cluster
        self._steps, self._batch_size = steps, batch_size
        self._staleness_power = staleness_power
        self._whole, self._keeps_gradients = whole, keeps_gradients
        self._optimizer: RemoteOptimizer | None = None
        self._make: MakeOptimizer | None = None
        self._progress: dict[str, Any] = {}  # which batches are finished, as a checkpoint has it
        self._assigned: deque[int] | None = deque()  # batches that are to be loaded; None: there are no more
        self._loading: deque[int] = deque()  # those that the loader has delivered
        self._batch = 0
        self._step = 0
        self._is_resting = True
        self._is_closed = False
        self.exchanged = Exchanged(time.perf_counter())

    # -- the parts of a session ----------------------------------------------------------------------------------------

    def optimizer(self, local: Optimizer, make: MakeOptimizer) -> Optimizer:
        """Return a proxy of an optimizer for this worker; ``make`` makes the optimizer on the servers."""
        self._optimizer, self._make = RemoteOptimizer(local, self), make
        return self._optimizer

    def prepare(self, module: nn.Module, step: int = 0) -> nn.Module:
        """Send the servers the weights after ``step`` updates, as the run's first worker, or pull theirs."""
        optimizer = self._optimizer
        assert optimizer is not None and self._make is not None, "an engine without its optimizer"
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._parameters, self._places = parameters, places_of(optimizer.param_groups)
        self._cuts = cut(self._places, len(self._cluster.servers), whole=self._whole)
        total = self._places[-1].end
        memories = [parameter.detach().as_strided((parameter.numel(),), (1,)) for parameter in parameters]
        self._segments = [_within(memories, self._places, *span) for span in self._spans]
        self._gradient = torch.zeros(total, device=self.device)
        self._gradient_views = [
            self._gradient.as_strided(place.shape, place.stride, place.start) for place in self._places
        ]
        if self._cluster.progress is None:
            self._publish(optimizer, self._make, memories, step)
        optimizer._loaded = {}
        self._step = self._cluster.progress["step"] if self._cluster.progress else step
        self._install(
            self._cluster.call_all(ParameterServer.pull, self._cluster.rank)
        )  # and again when it begins to compute
        return module

    @property
    def joined_step(self) -> int | None:
        return self._cluster.progress["step"] if self._cluster.progress else None

    @property
    def step(self) -> int:
        """Number of updates made, as far as this worker knows."""
        return self._step

    def _publish(self, optimizer: RemoteOptimizer, make: MakeOptimizer, memories: list[Tensor], step: int) -> None:
        """Send weights and optimizer to the servers, and open the run for the other workers."""
        groups = [
            {name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups
        ]
        flat = torch.cat([memory.float().cpu() for memory in memories])
        states: dict[int, TensorState] = {
            number: {name: saved_value(name, value, self._parameters[number]) for name, value in state.items()}
            for number, state in optimizer._loaded.items()
        }
        parts = [
            (start, flat[start:end].numpy(), _cut_states(states, self._places, start, end))
            for start, end in self._spans
        ]
        options = {"whole": self._whole, "keeps_gradients": self._keeps_gradients}
        self._cluster.call_each(ParameterServer.load, parts, self._places, groups, make, step, **options)
        saved = self._progress or {"unfinished": [], "after": step}
        self._cluster.open(steps=self._steps, step=step, unfinished=saved["unfinished"], after=saved["after"])

    @property
    def _spans(self) -> list[tuple[int, int]]:
        return list(pairwise(self._cuts))

    # -- an update -----------------------------------------------------------------------------------------------------

    def begin_update(self, position: int) -> int:
        if not self.is_synchronous:
            self._batch = self._loading.popleft()
            position = self._batch * self._batch_size
        if self._is_resting:
            self._pull()
        return position

    def exchange(self) -> None:
        """Push the gradients of the parameters and pull the weights: the update is made by the servers."""
        if self.on_exposed is not None:
            self.on_exposed()
        cluster, optimizer = self._cluster, self._optimizer
        assert optimizer is not None
        missing = [number for number, parameter in enumerate(self._parameters) if parameter.grad is None]
        pairs = [(view, p.grad) for view, p in zip(self._gradient_views, self._parameters, strict=True)]
        for view, gradient in pairs:
            if gradient is not None:
                view.copy_(gradient)
        sent = self._gradient.cpu()
        if self.is_synchronous:
            self.on_numbered(self._step)
            pushed = self._compressed(sent)
            shares = [(cluster.size, *part) for part in pushed]
            cluster.call_each(
                ParameterServer.push_share, shares, cluster.rank, self._step, self._compress, missing, self._options()
            )
            seconds = cluster.seconds
            self.decision = cluster.ask(Coordinator.arrive, cluster.rank, self._step, self.wish)
            self._is_closed = self.decision == "closed"
            results = self._pull()
            round_trips = [push + pull for push, pull in zip(seconds, cluster.seconds, strict=True)]
            self.exchanged.add(0, round_trips, [result[2] for result in results], pushed, results)
            return
        update, staleness, batches = cluster.ask(Coordinator.begin, cluster.rank, self._batch)
        self.on_numbered(update)
        pushed = self._compressed(sent)
        options = self._options(staleness)
        results = cluster.call_each(
            ParameterServer.push, pushed, cluster.rank, self._batch, self._compress, missing, options
        )
        pulled = self._install(results)
        self.exchanged.add(staleness, cluster.seconds, [result[-1] for result in results], pushed, results)
        cluster.tell(Coordinator.end, cluster.rank, self._batch, pulled)
        self._step = update + 1
        self._take(batches)

    def end_update(self, step: int, position: int, n: int) -> tuple[int, int]:
        if self.is_synchronous:
            self._step += not self._is_closed
            return (step, position) if self._is_closed else (step + 1, position + n)
        return self._step, self._step * self._batch_size

    def rest(self) -> None:
        self._is_resting = True
        if not self.is_synchronous:
            self._cluster.ask(Coordinator.rest, self._cluster.rank)

    def end_run(self) -> None:
        self._cluster.ask(Coordinator.close)

    def account(self, step: int) -> Event:
        now, taken = time.perf_counter(), self.exchanged
        self.exchanged = Exchanged(now)
        return ServerStats(
            step=step,
            seconds=now - taken.since,
            pushes=taken.pushes,
            staleness=taken.staleness / max(1, taken.pushes),
            staleness_max=taken.staleness_max,
            servers=taken.servers,
        )

    def _compressed(self, gradient: Tensor) -> list[tuple[Any]]:
        """Cut a gradient of all elements into a compressed part for each server."""
        return [(compress(gradient[start:end], self._compress),) for start, end in self._spans]

    def _options(self, staleness: int = 0) -> list[dict[str, Any]]:
        """Return the scheduled options of each group, for a push of this staleness."""
        assert self._optimizer is not None
        divisor = (1 + staleness) ** self._staleness_power
        groups = [{name: group[name] for name in _SCHEDULED if name in group} for group in self._optimizer.param_groups]
        return [{**group, "lr": group["lr"] / divisor} for group in groups]

    def _pull(self) -> list[tuple[Any, ...]]:
        results = self._cluster.call_all(ParameterServer.pull, self._cluster.rank)
        pulled = self._install(results)
        self._is_resting = False
        if not self.is_synchronous:
            self._cluster.ask(Coordinator.pull, self._cluster.rank, pulled)
        return results

    def _install(self, results: list[tuple[Any, ...]]) -> int:
        """Copy the servers' weights into the parameters; return how many updates are in all of them."""
        with torch.no_grad():
            for (weights, *_), segments, (start, _) in zip(results, self._segments, self._spans, strict=True):
                values = as_tensor(weights)
                for first, segment in segments:
                    segment.copy_(values[first - start : first - start + len(segment)])
        return min(int(result[1]) for result in results)

    # -- batches -------------------------------------------------------------------------------------------------------

    def next_batches(self) -> list[int]:
        """Return the numbers of the batches that were assigned since the last call, without waiting."""
        batches = list(self._assigned or ())
        if self._assigned:
            self._assigned.clear()
        return batches

    def wait_for_batch(self) -> list[int]:
        """Wait until a batch is assigned; return none where the run is over or this worker is to stop."""
        count = AHEAD
        self._take(self._cluster.ask(Coordinator.assign, self._cluster.rank, count))
        is_resting = False
        while self._assigned is not None and not self._assigned and not self.should_stop():
            if not is_resting:
                self.rest()
                is_resting = True
            self._take(self._cluster.ask(Coordinator.assign, self._cluster.rank, 1, WAIT_SECONDS))
        return self.next_batches()

    def delivered(self, batch: int) -> None:
        """Note that the loader has delivered a batch; batches are trained on in the order in which they were noted."""
        self._loading.append(batch)

    def _take(self, batches: Sequence[int] | None) -> None:
        if batches is None:
            self._assigned = None
        elif self._assigned is not None:
            self._assigned.extend(batches)

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def collect(self) -> int:
        """Fetch weights and optimizer state from the servers, of one instant between two updates; pushes wait."""
        assert self._optimizer is not None
        self.rest()
        self._progress = self._cluster.ask(Coordinator.pause)
        try:
            saved = self._cluster.call_all(ParameterServer.save)
        finally:
            self._cluster.ask(Coordinator.resume)
        self._step = self._progress["step"]
        self._install(saved)
        states: dict[int, dict[str, list[tuple[bool, Any]]]] = {}
        for *_, states_of_server in saved:
            for number, state in states_of_server.items():
                for name, value in state.items():
                    states.setdefault(number, {}).setdefault(name, []).append(value)
        self._optimizer._loaded = {
            number: {name: _joined(parts, self._parameters[number]) for name, parts in state.items()}
            for number, state in sorted(states.items())
        }
        return self._step

    def state_dict(self) -> dict[str, Any]:
        return {"async": {name: self._progress[name] for name in _SAVED if name in self._progress}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._progress = dict(state.get("async", {}))


def _within(
    memories: Sequence[Tensor], places: Sequence[ParameterPlace], start: int, end: int
) -> list[tuple[int, Tensor]]:
    """Return the parts of parameters' memories in a range of all elements, each with where it begins."""
    segments: list[tuple[int, Tensor]] = []
    for memory, place in zip(memories, places, strict=True):
        first, last = max(start, place.start), min(end, place.end)
        if first < last:
            segments.append((first, memory[first - place.start : last - place.start]))
    return segments


def _cut_states(
    states: Mapping[int, TensorState], places: Sequence[ParameterPlace], start: int, end: int
) -> dict[int, TensorState]:
    """Cut the optimizer's states to a range of all elements."""
    in_range: dict[int, TensorState] = {}
    for number, state in states.items():
        first, last = max(start, places[number].start), min(end, places[number].end)
        if first < last:
            part = slice(first - places[number].start, last - places[number].start)
            in_range[number] = {
                name: (is_alike, value[part] if is_alike else value) for name, (is_alike, value) in state.items()
            }
    return in_range


def _joined(parts: Sequence[tuple[bool, Any]], parameter: Tensor) -> Any:
    """Join a value of an optimizer's state from its parts on the servers."""
    is_alike, value = parts[0]
    if not is_alike:
        return value
    flat = torch.cat([as_tensor(part) for _, part in parts])
    return flat.as_strided(parameter.shape, parameter.stride()).clone(memory_format=torch.preserve_format)
