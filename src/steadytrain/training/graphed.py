"""An update's work as one graph of a device's kernels, recorded once and replayed (CUDA graphs): MXNet's ``hybridize``.

Where a network's operations take a GPU less time than Python takes to ask for them, the device waits for the host. A
recorded graph of all of them, forward, backward and optimizer, is asked for at once. It reads and writes the same
memory each time, so what comes from outside is copied there before: images, labels, learning rates. The average of the
weights follows outside of it, since its pace is a number of the host's that changes with every update.

The kernels are those that operations would ask for, in the same order: weights are the same to the last bit. See
"CUDA graphs" in PyTorch's notes on CUDA semantics for what a graph may hold: nothing that waits for the device.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Protocol

import torch

from steadytrain.config import Recipe
from steadytrain.distributed.process_group import Group
from steadytrain.errors import RecipeError, first_line
from steadytrain.training.clock import Clock
from steadytrain.training.state import State
from steadytrain.training.step import Update, by_operations

WARM_UP = 3
"""Updates before the graph is recorded: libraries choose their kernels, and the optimizer makes its state."""


class Recorder(Protocol):
    """How a device records what it is asked for."""

    def warm(self, work: Callable[[], None]) -> None:
        """Do it as it is done while recording, operation by operation."""

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Record it, and do nothing of it; what does it, each time."""


class OnCuda:
    """CUDA graphs, on a stream of their own.

    Args:
        device: a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def warm(self, work: Callable[[], None]) -> None:
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            work()
        current.wait_stream(self._stream)

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        # Other threads go on meanwhile, and allocate pinned memory, ask for events.
        with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
            work()
        return graph.replay


def require_graphs(recipe: Recipe, device: torch.device) -> None:
    """Raises RecipeError where the recipe asks for a graph and the device has none."""
    if recipe.parallel.graph and device.type != "cuda":
        raise RecipeError(
            f"parallel.graph=True wants a GPU, and this trains on the {device.type.upper()}: leave --graph out"
            " (--compile may help small networks here)"
        )


def graphed(recipe: Recipe, update: Update, state: State, group: Group | None, notice: Callable[[str], None]) -> Update:
    """The update with its work as a graph, where the recipe asks for that.

    Args:
        recipe: as the run has it.
        update: as :func:`.build.update` makes it, or by compiled code.
        state: of the run.
        group: the ranks that train together; several exchange gradients, which is not recorded.
        notice: is told that it was recorded, or why not.
    """
    if not recipe.parallel.graph:
        return update
    if group is not None:
        notice("--graph is for one process: several ranks exchange gradients in an update, and go on without it")
        return update
    return replace(update, work=Graphed(OnCuda(state.engine.device), notice))


class Graphed:
    """The work of an update (:data:`~steadytrain.training.step.Work`), by a graph from the fourth update on.

    Where it cannot be recorded, work goes on operation by operation.

    Args:
        recorder: of the device.
        notice: is told that it was recorded, or why not.
    """

    def __init__(self, recorder: Recorder, notice: Callable[[str], None]) -> None:
        self._recorder, self._notice = recorder, notice
        self._updates = 0
        self._is_refused = False
        self._graph: Callable[[], None] | None = None
        self._images = self._labels = torch.empty(0)
        self._rates: list[torch.Tensor] = []

    def fresh(self) -> Graphed:
        """Another one, for another network."""
        return Graphed(self._recorder, lambda told: None)

    def __call__(self, update: Update, state: State, images_BHWC: torch.Tensor, labels: torch.Tensor) -> None:
        if self._graph is None and self._updates >= WARM_UP and not self._is_refused:
            self._record(update, state, images_BHWC, labels)
        if self._graph is None:
            self._updates += 1
            self._recorder.warm(lambda: by_operations(update, state, images_BHWC, labels))
            return
        update.clock.to("forward")
        self._images.copy_(images_BHWC)
        self._labels.copy_(labels)
        for rate, group in zip(self._rates, state.optimizer.param_groups, strict=True):
            rate.fill_(group["lr"])
        self._graph()

    def _record(self, update: Update, state: State, images_BHWC: torch.Tensor, labels: torch.Tensor) -> None:
        began = time.perf_counter()
        self._images, self._labels = images_BHWC.clone(), labels.clone()
        silent = replace(update, clock=Clock(began))  # the marks of a device's clock are none of the work
        try:
            with _rates_on(state.engine.device, state.optimizer) as self._rates:
                self._graph = self._recorder.record(lambda: by_operations(silent, state, self._images, self._labels))
        except Exception as error:  # noqa: BLE001 - whatever a network's code or a library does that no graph may hold
            self._is_refused = True
            state.module.zero_grad(set_to_none=True)
            state.optimizer.zero_grad(set_to_none=True)
            self._notice(f"updates cannot be recorded as a graph ({_reason(error)}): training goes on without")
            return
        self._notice(f"updates are one graph from here on, recorded in {time.perf_counter() - began:.2f} s")


def _reason(error: BaseException) -> str:
    """What went wrong first: that the recording then ends in disorder is told on top of it."""
    while error.__context__ is not None:
        error = error.__context__
    return first_line(error)


@contextlib.contextmanager
def _rates_on(device: torch.device, optimizer: torch.optim.Optimizer) -> Iterator[list[torch.Tensor]]:
    """Meanwhile, an optimizer finds its learning rates in the device's memory, and believes that a graph holds it."""
    groups = optimizer.param_groups
    before = [dict(group) for group in groups]
    rates = [torch.tensor(group["lr"], dtype=torch.float32, device=device) for group in groups]
    for group, rate in zip(groups, rates, strict=True):
        group |= {"lr": rate} | ({"capturable": True} if "capturable" in group else {})
    try:
        yield rates
    finally:
        for group, was in zip(groups, before, strict=True):
            group.update(was)
