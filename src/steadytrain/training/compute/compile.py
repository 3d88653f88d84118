"""Other code for the same update: compiled by ``torch.compile``, or recorded as one CUDA graph.

docs/compile.md says what each does. Compiled is the objective, images to loss, on drawn images before the first update,
by passes that leave no trace. A recorded graph reads and writes the same memory each time: what comes from outside
(images, labels, learning rates) is copied there before, and the average of the weights, whose pace is the host's,
follows outside of it. It may hold nothing that waits for the device, and ranks replay theirs together, or none does.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from inspect import ismethod
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from steadytrain.config import Recipe
from steadytrain.config.parts import GRAPH_OPTIMIZERS
from steadytrain.distributed.process_group import Group
from steadytrain.errors import first_line
from steadytrain.events import Compiled
from steadytrain.machine.facts import cache_folder
from steadytrain.training.clock import Clock
from steadytrain.training.compute.timing import pass_of
from steadytrain.training.state import State, preserve_buffers, preserve_process
from steadytrain.training.step import Forward, Update, run_operations

ROUNDS = 2
SETTLING = {"cpu": 1, "cuda": 4}
"""Passes until compiled code runs at its own speed: on a GPU, graphs of its kernels are recorded in the first ones."""
WARM_UP = 3
"""Updates before a graph is recorded: libraries choose their kernels, and the optimizer makes its state."""

WITHOUT_GRAPHS = {"reduce-overhead": "default", "max-autotune": "max-autotune-no-cudagraphs"}
"""Modes that record CUDA graphs, and those that make the same code without. A graph's gradients lie in its own memory,
which its next launch writes over: several passes cannot add them up (pytorch issue 169545)."""

_PLUMBING = (str(Path(torch.__file__).parent), contextlib.__file__, str(Path(__file__).parent))


def compile_update(
    recipe: Recipe, update: Update, state: State, group: Group | None, notice: Callable[[str], None]
) -> tuple[Update, Compiled | None]:
    """Return the update by compiled code; as it was, and None, where any rank cannot compile: ``notice`` tells why.

    No number of the state changes. Of several ranks, each calls this.
    """
    if recipe.precision.compile == "none":
        return update, None
    device, eager, refusal = state.engine.device, pass_of(update, state), ""
    mode: str = recipe.precision.compile
    forward_in_parts: Forward | None = None
    if records_graphs(mode, device):
        without, why = WITHOUT_GRAPHS[mode], "its CUDA graphs reuse the memory of gradients that several passes add up"
        if update.share.count > 1 or len(eager.batch.labels) < update.share.size:
            notice(f"an update has several passes, for which {mode} is not made ({why}): compiled as {without} instead")
            mode = without
        else:
            forward_in_parts = _compile_late(
                update.objective, without, notice, f"from here on compiled as {without}, not {mode}: {why}"
            )
    with preserve_process(device), preserve_buffers(state.module), _keep_code():
        traced, breaks = _traced_and_pieces(), len(_breaks())
        try:
            eager.seconds()  # warm-up
            eager_seconds = eager.fastest(ROUNDS)
            forward: Forward = update.forward
            for block in state.engine.blocks(state.module):
                vars(block)["forward"] = _CompiledBlock(block, mode)
            if not state.engine.is_sharded:
                forward = _compile(update.objective, mode)
            compiled = replace(eager, forward=forward)
            settling = SETTLING[device.type]
            first = sum(compiled.seconds() for _ in range(settling))
            fastest = compiled.fastest(ROUNDS)
        except Exception as error:  # noqa: BLE001 - whatever a compiler may raise
            cause: BaseException = error
            while (inner := getattr(cause, "inner_exception", None) or cause.__cause__) is not None:
                cause = inner  # what lies behind the compiler's own wrappings
            refusal = first_line(cause)
    for rank, reason in enumerate([refusal] if group is None else group.all_gather_json(refusal)):
        if reason:
            where = "" if group is None else f" on rank {rank} ({group.hosts[rank]})"
            notice(f"warning: the network cannot be compiled{where} ({reason}): training without (see steady doctor)")
            for block in state.engine.blocks(state.module):
                if isinstance(made := vars(block).get("forward"), _CompiledBlock):
                    vars(block)["forward"] = made.before
            return update, None
    graphs, pieces = (now - before for now, before in zip(_traced_and_pieces(), traced, strict=True))
    cut = f"ranks exchange gradients in the backward pass: cut into {pieces} pieces at each 25 MB of them"
    return replace(update, forward=forward, forward_in_parts=forward_in_parts), Compiled(
        step=state.cursor.step,
        mode=mode,
        seconds=max(0.0, first - settling * fastest),
        graphs=pieces,
        breaks=(*dict.fromkeys(_breaks()[breaks:]), *[cut] * (group is not None and pieces > graphs)),
        images=len(eager.batch.labels) * state.engine.world.size,
        eager_seconds=eager_seconds,
        compiled_seconds=fastest,
    )


def _compile(objective: Forward, mode: str) -> Forward:
    """Return the objective by compiled code; of ranks that exchange gradients all of it, not the network alone."""
    compiled: Forward = torch.compile(objective.__call__, mode=mode, dynamic=False)  # type: ignore[operator]

    def forward(call: nn.Module, images_BHWC: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        if isinstance(call, DistributedDataParallel):  # which is never compiled: within it, nothing is parted
            return call(images_BHWC, labels, by=compiled)  # type: ignore[no-any-return]
        return compiled(call, images_BHWC, labels)

    return forward


class _CompiledBlock:
    """The forward of a block that ranks gather for it: compiled in training, as it was in evaluation."""

    def __init__(self, block: nn.Module, mode: str) -> None:
        self.before = block.forward
        forward: Any = self.before if ismethod(self.before) else self.before.__call__  # type: ignore[operator]
        self._compiled: Any = torch.compile(forward, mode=mode, dynamic=False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return (self._compiled if torch.is_grad_enabled() else self.before)(*args, **kwargs)


def records_graphs(mode: str, device: torch.device) -> bool:
    """Return whether code that is compiled in a mode is recorded as CUDA graphs.

    >>> records_graphs("max-autotune", torch.device("cuda")), records_graphs("max-autotune", torch.device("cpu"))
    (True, False)
    """
    return mode in WITHOUT_GRAPHS and device.type == "cuda"


def _compile_late(objective: Forward, mode: str, notice: Callable[[str], None], message: str) -> Forward:
    """Return the objective compiled in another mode at its first call, which lets go of all code and graphs before."""
    compiled: list[Forward] = []

    def forward(module: nn.Module, images_BHWC: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        if not compiled:
            torch.compiler.reset()  # graphs keep the memory of a whole pass
            compiled.append(_compile(objective, mode))
            notice(message)
        with _keep_code():
            return compiled[0](module, images_BHWC, labels)

    return forward


@contextlib.contextmanager
def _keep_code() -> Iterator[None]:
    """Meanwhile, write compiled code into our cache, unless the user has named another folder.

    Torch itself sets the variable, to its own default, when it first looks for it.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir  # takes seconds, which only this needs

    folder, name = cache_folder(), "TORCHINDUCTOR_CACHE_DIR"
    before = os.environ.get(name)
    if folder is None or before not in (None, default_cache_dir()):
        yield
        return
    os.environ[name] = str(folder / "compiled")
    try:
        yield
    finally:
        os.environ[name] = before or default_cache_dir()


def _traced_and_pieces() -> tuple[int, int]:
    """Return how many graphs were traced so far, and of how many pieces: torch cuts one where ranks exchange."""
    counters = torch._dynamo.utils.counters
    return counters["stats"]["unique_graphs"], counters["aot_autograd"]["total"]


def _breaks() -> list[str]:
    """List the graph breaks: where Python came between compiled pieces (the innermost line of no library), and why."""
    breaks = []
    for reason in torch._dynamo.utils.graph_break_reasons:
        places = [(frame.filename, frame.lineno) for frame in reason.user_stack]
        place = next((place for place in reversed(places) if not place[0].startswith(_PLUMBING)), None)
        if place is not None:
            file = Path(place[0])
            file = file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file
            breaks.append(f"{file}:{place[1]}: {reason.reason.strip().partition(chr(10))[0]}")
    return breaks


def record_update(
    recipe: Recipe, update: Update, state: State, group: Group | None, notice: Callable[[str], None]
) -> Update:
    """Return the update with its work as a CUDA graph, where the recipe asks for that.

    ``notice`` is called when it was recorded, or with the reason why not. Of several ranks, each calls this.
    """
    engine = state.engine
    if not recipe.parallel.graph:
        return update
    if recipe.optim.name not in GRAPH_OPTIMIZERS:
        names = ", ".join(GRAPH_OPTIMIZERS)
        notice(f"--graph works with the optimizers {names}; {recipe.optim.name} runs without it")
        return update
    if group is None:
        return replace(update, work=RecordedWork(CudaRecorder(engine.device), notice))
    if not engine.is_recordable:
        why = "are compressed" if recipe.parallel.compress != "none" else "do not come in every pass"
        notice(f"--graph cannot record how ranks exchange gradients that {why}: training without it")
        return update

    def refusals(words: str) -> list[str]:
        every = zip(group.all_gather_json(words), group.hosts, strict=True)
        return [f"{reason} on rank {rank} ({host})" for rank, (reason, host) in enumerate(every) if reason]

    return replace(update, work=RecordedWork(CudaRecorder(engine.device), notice, refusals))


class Recorder(Protocol):
    """The recording of a device's work, to repeat it later."""

    def warm(self, work: Callable[[], None]) -> None:
        """Do the work as it is done while recording, operation by operation."""

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Record the work without doing it; return what does it, each time."""


class CudaRecorder:
    """Records CUDA graphs, on a stream of their own."""

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
        try:
            # Other threads go on meanwhile, and allocate pinned memory, ask for events.
            with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
                work()
        except Exception:
            # A recording that breaks off leaves the generator as if it went on, and every later draw would be refused.
            generator = torch.cuda.default_generators[self._stream.device.index]
            generator.graphsafe_set_state(generator.clone_state())
            raise
        return graph.replay


class RecordedWork:
    """The work of an update (:data:`~steadytrain.training.step.Work`), by a graph from the fourth update on.

    Where it cannot be recorded, work goes on operation by operation.

    Args:
        recorder: of the device.
        notice: is called when it was recorded, or with the reason why not.
        refusals: of the reason why this rank has not recorded it, empty where it has: those of all ranks.
    """

    def __init__(
        self,
        recorder: Recorder,
        notice: Callable[[str], None],
        refusals: Callable[[str], list[str]] = lambda words: [words] if words else [],
    ) -> None:
        self._recorder, self._notice, self._refusals = recorder, notice, refusals
        self._updates = 0
        self._is_refused = False
        self._graph: Callable[[], None] | None = None
        self._images = self._labels = torch.empty(0)
        self._rates: list[torch.Tensor] = []

    def close(self) -> None:
        """Let go of the graph: NCCL ends no group whose exchanges one still holds."""
        self._graph = None

    def __call__(self, update: Update, state: State, images_BHWC: torch.Tensor, labels: torch.Tensor) -> None:
        if self._graph is None and self._updates >= WARM_UP and not self._is_refused:
            self._record(update, state, images_BHWC, labels)
        if self._graph is None:
            self._updates += 1
            self._recorder.warm(lambda: run_operations(update, state, images_BHWC, labels))
            return
        update.clock.to("update")
        self._images.copy_(images_BHWC)
        self._labels.copy_(labels)
        for rate, group in zip(self._rates, state.optimizer.param_groups, strict=True):
            rate.fill_(group["lr"])
        self._graph()

    def _record(self, update: Update, state: State, images_BHWC: torch.Tensor, labels: torch.Tensor) -> None:
        began = time.perf_counter()
        state.meters.count_waiting()
        self._images, self._labels = images_BHWC.clone(), labels.clone()
        limit = update.limit and replace(update.limit, mode="fixed")  # nothing is repeated within a recording
        # The marks of a device's clock are none of the work; that answers are counted is, so it does not wait.
        forward = update.forward.__call__  # type: ignore[operator]
        silent = replace(update, clock=Clock(began), limit=limit, forward=forward)
        exposed, state.engine.on_exposed = state.engine.on_exposed, None
        words, graph = "", None
        try:
            with _rates_on_device(state.engine.device, state.optimizer) as self._rates:
                graph = self._recorder.record(lambda: run_operations(silent, state, self._images, self._labels))
        except Exception as error:  # noqa: BLE001 - whatever a network's code or a library does that no graph may hold
            cause: BaseException = error
            while cause.__context__ is not None:
                cause = cause.__context__  # what went wrong first; that the recording ended in disorder comes on top
            words = first_line(cause) or type(cause).__name__
        finally:
            state.engine.on_exposed = exposed
        if refusals := self._refusals(words):
            self._is_refused = True
            state.module.zero_grad(set_to_none=True)
            state.optimizer.zero_grad(set_to_none=True)
            self._notice(f"updates cannot be recorded as a graph ({refusals[0]}): training continues without")
            return
        self._graph = graph
        self._notice(f"recorded an update as one CUDA graph in {time.perf_counter() - began:.2f} s")


@contextlib.contextmanager
def _rates_on_device(device: torch.device, optimizer: torch.optim.Optimizer) -> Iterator[list[torch.Tensor]]:
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
