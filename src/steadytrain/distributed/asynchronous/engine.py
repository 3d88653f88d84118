"""The asynchronous engine: workers that never wait for each other, and a server that holds the weights.

MXNet's ``dist_async`` on Ray (Li et al. 2014, "Scaling Distributed Machine Learning with the Parameter Server"); what
an update is in it, and what survives: docs/async.md. Running statistics of batch norms stay where they are computed;
those that count are worker 0's, which evaluates and saves while the others train on.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from steadytrain.distributed.asynchronous.cluster import Cluster
from steadytrain.distributed.asynchronous.server import (
    ParameterServer,
    Training,
    Vector,
    as_tensor,
    compress,
    layouts_of,
    views_of,
)
from steadytrain.distributed.compression import CompressionName
from steadytrain.distributed.engine import Engine
from steadytrain.distributed.world import World
from steadytrain.events import Event, ServerStats

AHEAD = 2
"""Batches that a worker loads ahead of the one it trains on, and that others have to train on if it dies."""
WAIT_SECONDS = 0.5
"""Seconds for which a worker without a batch waits before it asks whether to stop."""


class RemoteOptimizer(Optimizer):
    """Proxy of the optimizer that the server runs: a step pushes the gradients and pulls the weights.

    Its ``state_dict`` is that of the optimizer in one process.
    """

    def __init__(self, local: Optimizer, exchange: Callable[[], None]) -> None:
        # Torch's own initialiser is left out: it imports torch's compiler, and there is nothing here for it to do.
        self.param_groups, self.defaults = local.param_groups, local.defaults
        self.state: Any = {}
        self._exchange = exchange
        self._state = local.state_dict()

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Push, and pull."""
        assert closure is None, "closures are not supported"
        self._exchange()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients."""
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state that was loaded last, or that :meth:`AsyncEngine.collect` fetched."""
        return self._state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keep a state until :meth:`AsyncEngine.prepare` sends it to the server."""
        if [len(group["params"]) for group in state["param_groups"]] != [len(g["params"]) for g in self.param_groups]:
            raise ValueError("its optimizer has other groups of parameters")
        self._state = dict(state)


@dataclass
class Exchanged:
    """Counts of a worker's exchange with the server since an instant, for an event."""

    since: float
    pushes: int = 0
    staleness: int = 0
    staleness_max: int = 0
    seconds: float = 0.0
    update_seconds: float = 0.0
    pushed_bytes: int = 0
    pulled_bytes: int = 0


class AsyncEngine(Engine):
    """A worker's side of asynchronous training: push gradients to the server, pull weights from it.

    Args:
        device: of this worker.
        cluster: the connection to the server.
        steps: updates of the whole run, of ``batch_size`` images.
        set_rates: sets an optimizer's rate and momentum to those of the update after so many; the server calls it.
        staleness_power: the learning rate of a push that missed ``s`` updates is divided by ``(1 + s)`` to this power
            (Zhang et al. 2016, "Staleness-aware Async-SGD for Distributed Deep Learning"; the power: Xie et al. 2019,
            "Asynchronous Federated Optimization").
        compress: how pushes are compressed: see :mod:`.compression`.
    """

    def __init__(
        self,
        device: torch.device,
        cluster: Cluster,
        *,
        steps: int,
        batch_size: int,
        set_rates: Callable[[Optimizer, int], None],
        staleness_power: float = 1.0,
        compress: CompressionName = "none",
    ) -> None:
        super().__init__(device, compress=compress)
        self.world = World(rank=cluster.rank, size=1)  # nobody waits for another
        self.loads_ahead = False
        self._cluster = cluster
        self._steps, self._batch_size = steps, batch_size
        self._set_rates, self._staleness_power = set_rates, staleness_power
        self._optimizer: RemoteOptimizer | None = None
        self._make: Callable[[list[dict[str, Any]]], Optimizer] | None = None
        self._progress: dict[str, Any] = {}  # which batches are finished, as a checkpoint has it
        self._assigned: deque[int] | None = deque()  # batches that are to be loaded; None: there are no more
        self._loading: deque[int] = deque()  # those that the loader has delivered
        self._batch = 0
        self._step = 0
        self._is_resting = True
        self.exchanged = Exchanged(time.perf_counter())

    def optimizer(self, local: Optimizer, make: Callable[[list[dict[str, Any]]], Optimizer]) -> Optimizer:
        """Return a proxy of an optimizer for this worker; ``make`` makes the optimizer on the server."""
        self._optimizer, self._make = RemoteOptimizer(local, self.exchange), make
        return self._optimizer

    def prepare(self, module: nn.Module, step: int = 0) -> nn.Module:
        """Send the server the weights after ``step`` updates, as the run's first worker, or pull its own."""
        optimizer = self._optimizer
        assert optimizer is not None and self._make is not None, "an engine without its optimizer"
        self._parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        layouts = layouts_of(self._parameters)
        total = sum(parameter.numel() for parameter in self._parameters)
        self._gradient = torch.zeros(total, device=self.device)
        self._gradient_views = views_of(self._gradient, layouts)
        if self._cluster.progress is None:
            memories = [p.detach().as_strided((p.numel(),), (1,)).float().cpu() for p in self._parameters]
            batches = {"unfinished": [], "after": step, **self._progress}
            training = Training(
                layouts=layouts,
                weights=torch.cat(memories).numpy(),
                optimizer=optimizer.state_dict(),
                make=self._make,
                set_rates=self._set_rates,
                staleness_power=self._staleness_power,
                steps=self._steps,
                step=step,
                **batches,
            )
            self._cluster.call(ParameterServer.open, self._cluster.description, training)
        self._pull(computes=False)  # and again when it begins to compute
        return module

    @property
    def joined_step(self) -> int | None:
        return self._cluster.progress["step"] if self._cluster.progress else None

    def begin_update(self, position: int) -> int:
        self._batch = self._loading.popleft()
        if self._is_resting:
            self._pull(computes=True)
            self._is_resting = False
        return self._batch * self._batch_size

    def exchange(self) -> None:
        """Push the gradients of the parameters and pull the weights: the update is made by the server."""
        if self.on_exposed is not None:
            self.on_exposed()
        missing = [number for number, parameter in enumerate(self._parameters) if parameter.grad is None]
        for view, parameter in zip(self._gradient_views, self._parameters, strict=True):
            if parameter.grad is not None:
                view.copy_(parameter.grad)
        sent = compress(self._gradient.cpu(), self._compress)
        began = time.perf_counter()
        pushed = self._cluster.call(
            ParameterServer.push, self._cluster.rank, self._batch, self._compress, missing, sent
        )
        counts = self.exchanged
        counts.pushes += 1
        counts.staleness += pushed.staleness
        counts.staleness_max = max(counts.staleness_max, pushed.staleness)
        counts.seconds += time.perf_counter() - began
        counts.update_seconds += pushed.seconds
        counts.pushed_bytes += sent.nbytes
        counts.pulled_bytes += pushed.weights.nbytes
        self._install(pushed.weights, pushed.step)
        self._take(pushed.batches)

    def end_update(self, step: int, position: int, n: int) -> tuple[int, int]:
        return self._step, self._step * self._batch_size

    def rest(self) -> None:
        self._is_resting = True  # it pulls before it computes again

    def end_run(self) -> None:
        self._cluster.call(ParameterServer.close)

    def account(self, step: int) -> Event:
        now, taken = time.perf_counter(), self.exchanged
        self.exchanged = Exchanged(now)
        return ServerStats(
            step=step,
            seconds=now - taken.since,
            pushes=taken.pushes,
            staleness=taken.staleness / max(1, taken.pushes),
            staleness_max=taken.staleness_max,
            servers=[
                {
                    "seconds": taken.seconds,
                    "update_seconds": taken.update_seconds,
                    "pushed_bytes": taken.pushed_bytes,
                    "pulled_bytes": taken.pulled_bytes,
                }
            ]
            * bool(taken.pushes),
        )

    def _pull(self, *, computes: bool) -> None:
        pulled = self._cluster.call(ParameterServer.pull, self._cluster.rank, computes=computes)
        self._install(pulled.weights, pulled.step)

    def _install(self, weights: Vector, step: int) -> None:
        """Copy the server's weights into the parameters."""
        self._step = step
        views = views_of(as_tensor(weights), layouts_of(self._parameters))
        with torch.no_grad():
            for parameter, view in zip(self._parameters, views, strict=True):
                parameter.copy_(view)

    def next_batches(self) -> list[int]:
        """Return the numbers of the batches that were assigned since the last call, without waiting."""
        batches = list(self._assigned or ())
        if self._assigned:
            self._assigned.clear()
        return batches

    def wait_for_batch(self) -> list[int]:
        """Wait until a batch is assigned; return none where the run is over or this worker is to stop."""
        rank = self._cluster.rank
        self._take(self._cluster.call(ParameterServer.assign, rank, AHEAD))
        if self._assigned is not None and not self._assigned:
            self.rest()
        while self._assigned is not None and not self._assigned and not self.should_stop():
            self._take(self._cluster.call(ParameterServer.assign, rank, 1, WAIT_SECONDS))
        return self.next_batches()

    def delivered(self, batch: int) -> None:
        """Note that the loader has delivered a batch; batches are trained on in the order in which they were noted."""
        self._loading.append(batch)

    def _take(self, batches: Sequence[int] | None) -> None:
        if batches is None:
            self._assigned = None
        elif self._assigned is not None:
            self._assigned.extend(batches)

    def collect(self) -> int:
        """Fetch weights and optimizer state from the server, of one instant between two updates."""
        assert self._optimizer is not None
        self.rest()
        saved = self._cluster.call(ParameterServer.save)
        self._install(saved.weights, saved.step)
        self._optimizer.load_state_dict(saved.optimizer)
        self._progress = {"unfinished": saved.unfinished, "after": saved.after}
        return self._step

    def state_dict(self) -> dict[str, Any]:
        return {"async": self._progress}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._progress = dict(state.get("async", {}))
