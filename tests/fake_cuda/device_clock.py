"""Runs on GPUs that are not there, in virtual time: where their seconds really go, beside what the ledger says.

A simulated GPU does what is queued on a stream in order, a kernel not before the host has launched it; its clock runs a
little faster than the host's. The host's time passes only where the simulation says so. Loop, loader, update, recorded
graph, clock, history and verdict are the project's own; kernels, the feed and other ranks are made up. The truth is
read from the stream: busy with a kernel, blocked by an exchange or a copy, or empty, and then the host tells why.

    python -m tests.fake_cuda.device_clock            # the table of docs/gpu.md
"""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from msgspec import structs
from torch import nn

from steadytrain.config import Budget, Data, Model, Parallel, Recipe
from steadytrain.data.loader import Batch
from steadytrain.distributed.world import World
from steadytrain.events import Event, Started
from steadytrain.monitor.history import RunHistory
from steadytrain.monitor.ledger import INPUT
from steadytrain.monitor.rules.diagnose import Diagnosis, diagnose
from steadytrain.training import build, data
from steadytrain.training import clock as clocks
from steadytrain.training.clock import Clock, Waits
from steadytrain.training.compute import compile as compiling
from steadytrain.training.data import DeviceBatch
from steadytrain.training.state import Cursor
from steadytrain.training.step import Share, Update

LATENCY = 6e-6
"""Seconds until a GPU begins what was launched on an idle stream."""
QUEUE = 205
"""Launches that may wait for the GPU: CUDA's 1024, since a simulated kernel stands for five."""
DRIFT = 40e-6
"""How much faster the GPU's clock runs than the host's."""
CYCLES = 1.75e9
"""Of the GPU in a second."""

LEDGER = (
    *("forward", "backward", "update", "communication", "optimizer", "transfer", "input", "host", "logging"),
    "evaluation",
)
BATCH = 64


@dataclass(frozen=True)
class Part:
    """Kernels of a part of an update: how many, and the seconds of each."""

    kernels: int
    seconds: float


@dataclass(frozen=True)
class Case:
    """A run: its network's kernels, and what is special about it.

    ``call``: seconds of the host for a launch; ``guards``: before each compiled pass; ``sync``: of the forward kernels,
    after how many the network's code waits for a value (0: never); ``exchange``: seconds that gradients take between
    ranks; ``feed``: seconds that the feed takes for a batch; ``copy``: of a batch to the GPU; ``python``: of the host
    between two updates.
    """

    forward: Part = Part(30, 850e-6)
    backward: Part = Part(60, 850e-6)
    optimizer: Part = Part(4, 1e-3)
    call: float = 50e-6
    guards: float = 0.0
    sync: int = 0
    exchange: float = 0.0
    feed: float = 0.0
    copy: float = 1e-3
    python: float = 60e-6
    accumulate: int = 1
    graph: bool = False
    compiled: bool = False
    device: int = 0
    updates: int = 120
    log_steps: int = 20
    evaluations: int = 2
    rank: int = 0
    ranks: int = 1


SMALL = Case(Part(40, 20e-6), Part(80, 20e-6), Part(2, 60e-6), call=70e-6, copy=40e-6, updates=300)
RANKS = Case(exchange=0.040, ranks=2)

CASES: dict[str, Case] = {
    "one GPU": Case(),
    "exposed exchange": RANKS,
    "late rank": RANKS,
    "slow feed": Case(feed=0.140),
    "host-bound eager": SMALL,
    "graph": replace(SMALL, graph=True),
    "compiled": replace(SMALL, forward=Part(8, 75e-6), backward=Part(16, 75e-6), guards=400e-6, compiled=True),
    "accumulated": replace(SMALL, accumulate=4, updates=80),
    "cuda:3": Case(device=3),
}


class Host:
    """The host's clock, and what the host did meanwhile: ``spans`` are kinds with their beginnings and ends."""

    def __init__(self) -> None:
        self.now = 100.0
        self.kind = "host"
        self.spans: list[tuple[str, float, float]] = []

    def perf_counter(self) -> float:
        return self.now

    process_time = perf_counter

    def until(self, at: float) -> None:
        if at > self.now:
            if self.spans and self.spans[-1][0] == self.kind:
                self.spans[-1] = self.kind, self.spans[-1][1], at
            else:
                self.spans.append((self.kind, self.now, at))
            self.now = at

    def spend(self, seconds: float) -> None:
        self.until(self.now + seconds)

    @contextmanager
    def at(self, kind: str) -> Iterator[None]:
        before, self.kind = self.kind, kind
        yield
        self.kind = before


class Stream:
    """A queue of a GPU: ``tail``: when all that is queued will be done; ``spans``: what it did, apart and in order."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.tail = 0.0
        self.spans: list[tuple[str, float, float]] = []
        self._begins: deque[float] = deque([0.0] * QUEUE, maxlen=QUEUE)

    def launch(self, part: Part, kind: str, call: float) -> None:
        """Launch the kernels of a part, each of which takes the host ``call`` seconds."""
        gpu, now, begins = self.gpu, self.gpu.host.now, self._begins
        if gpu.recording is not None:
            gpu.recording.append(part)
            gpu.host.until(now + part.kernels * call)
            return
        for _ in range(part.kernels):
            now = max(now + call, begins[0])
            began = max(self.tail, now + LATENCY)
            begins.append(began)
            self._work(kind, began, part.seconds)
        gpu.host.until(now)

    def replay(self, parts: Sequence[Part]) -> None:
        """Do the work of a graph that was launched."""
        for part in parts:
            self._work("update", max(self.tail, self.gpu.host.now + LATENCY), part.kernels * part.seconds)

    def _work(self, kind: str, began: float, seconds: float) -> None:
        self.tail = began + seconds
        if self.spans and self.spans[-1][0] == kind and self.spans[-1][2] == began:
            self.spans[-1] = kind, self.spans[-1][1], self.tail
        else:
            self.spans.append((kind, began, self.tail))

    def wait(self, at: float, kind: str) -> None:
        began = max(self.tail, self.gpu.host.now + LATENCY)
        if at > began:
            self.spans.append((kind, began, at))
            self.tail = at

    def wait_event(self, event: Mark) -> None:
        self.wait(event.at, "transfer")


@dataclass
class Gpu:
    """One GPU: the stream of its updates and others; what a graph's recording has so far."""

    host: Host
    recording: list[Part] | None = None
    stream: Stream = field(init=False)

    def __post_init__(self) -> None:
        self.stream = Stream(self)


class Cuda:
    """What of ``torch.cuda`` the loop, the loader and the clock call, on simulated GPUs. GPU 0 is the current one."""

    def __init__(self, host: Host, case: Case) -> None:
        self.host, self.copy = host, case.copy
        self.gpus = [Gpu(host) for _ in range(4)]
        self.gpu = self.gpus[case.device]
        self.current = self.gpus[0]

    def _gpu(self, device: Any = None) -> Gpu:
        if device is None:
            return self.current
        return self.gpu if device.type == "meta" else self.gpus[device.index or 0]

    def current_stream(self, device: Any = None) -> Stream:
        return self._gpu(device).stream

    def new_stream(self, device: Any) -> Stream:
        return Stream(self._gpu(device))

    @contextmanager
    def on_stream(self, stream: Stream) -> Iterator[None]:
        stream.launch(Part(1, self.copy), "copy", 30e-6)
        yield

    def event(self, enable_timing: bool = False) -> Mark:
        return Mark(self)

    def sleep(self, cycles: int) -> None:
        assert self.current.recording is None, "within a graph's recording"
        self.current.stream.launch(Part(1, cycles / CYCLES), "hold", 5e-6)

    @contextmanager
    def on_device(self, device: Any) -> Iterator[None]:
        before, self.current = self.current, self._gpu(device)
        yield
        self.current = before


class Mark:
    """An event on a stream."""

    def __init__(self, cuda: Cuda) -> None:
        self.cuda, self.at = cuda, float("nan")

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or self.cuda.current_stream()
        assert stream.gpu.recording is None, "within a graph's recording"
        self.cuda.host.spend(1.5e-6)
        self.at = max(stream.tail, self.cuda.host.now + LATENCY)

    def query(self) -> bool:
        assert self.cuda.gpu.recording is None, "within a graph's recording"
        self.cuda.host.spend(0.5e-6)
        return self.cuda.host.now >= self.at

    def synchronize(self) -> None:
        self.cuda.host.until(self.at)

    def elapsed_time(self, end: Mark) -> float:
        return 1000 * (end.at - self.at) * (1 + DRIFT)


class Training:
    """An update's kernels on a simulated GPU, in place of network, engine, policy and recorder."""

    def __init__(self, cuda: Cuda, case: Case, others: Sequence[float], arrivals: list[float]) -> None:
        self.gpu, self.case = cuda.gpu, case
        self.others, self.arrivals = others, arrivals
        self.world, self.device = World(), torch.device("cpu")
        self.on_exposed: Callable[[], None] | None = None
        self.links = Stream(self.gpu)

    def forward(self, module: Any, images: Any, labels: Any) -> tuple[torch.Tensor, torch.Tensor]:
        stream, part = self.gpu.stream, self.case.forward
        self.gpu.host.spend(self.case.guards)
        several = self.case.sync or part.kernels
        for _ in range(part.kernels // several):
            stream.launch(replace(part, kernels=several), "forward", self.case.call)
            if self.case.sync:
                self.gpu.host.until(stream.tail)
        return torch.zeros(()), torch.zeros(3)

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        part, buckets = self.case.backward, 4
        self.gpu.host.spend(self.case.guards)
        for _ in range(buckets):
            self.gpu.stream.launch(replace(part, kernels=part.kernels // buckets), "backward", self.case.call)
            if last and self.case.exchange:
                self._exchange(self.case.exchange / buckets)
        if last and self.case.exchange:
            assert self.on_exposed is not None
            self.on_exposed()
            self.gpu.host.spend(100e-6)
            self.gpu.stream.wait(self.links.tail, "communication")

    def _exchange(self, seconds: float) -> None:
        """Exchange a bucket as soon as this rank and the others have computed it."""
        number = len(self.arrivals)
        self.arrivals.append(self.gpu.stream.tail)
        other = self.others[number] if number < len(self.others) else 0.0
        self.links.tail = max(self.links.tail, self.gpu.stream.tail, other) + seconds

    def step(self, optimizer: Any) -> None:
        self.gpu.stream.launch(self.case.optimizer, "optimizer", self.case.call)

    def micro_batch(self, *, last: bool) -> Any:
        return nullcontext()

    def begin_update(self, position: int) -> int:
        return position

    def end_update(self, step: int, position: int, n: int) -> tuple[int, int]:
        return step + 1, position + n

    def finish_update(self, step: int) -> None:
        pass

    def warm(self, work: Callable[[], None]) -> None:
        work()

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        parts = self.gpu.recording = []
        work()
        self.gpu.recording = None

        def play() -> None:
            self.gpu.host.spend(40e-6)
            self.gpu.stream.replay(parts)

        return play


def images(host: Host, case: Case) -> Iterator[Batch]:
    """A feed that makes a batch every so many seconds, four ahead at most."""
    pixels, labels = np.zeros((1, 1, 1, 1), np.uint8), np.zeros(1, np.int64)
    ready, taken = host.now, deque([host.now] * 4, maxlen=4)
    while True:
        ready = max(ready, taken[0]) + case.feed
        with host.at("input"):
            host.until(ready)
        host.spend(20e-6)
        taken.append(host.now)
        yield Batch(pixels, labels, labels, labels)


@dataclass
class Simulated:
    """A run that was simulated: seconds by bucket as they were, and its events."""

    case: Case
    truth: dict[str, float]
    events: list[Event]
    arrivals: list[float]
    held: float
    wall: float

    def history(self) -> RunHistory:
        """The run's history, of this rank."""
        history = RunHistory(recipe(self.case), self.case.rank)
        for event in self.events:
            history.take(event)
        return history

    @property
    def told(self) -> dict[str, float]:
        """The ledger's shares, of the buckets of :data:`LEDGER`; launches of the first two updates are its warm-up."""
        shares = self.history().ledger().shares
        shares["host"] += shares["warmup"]
        return {name: shares[name] if name != "input" else sum(shares[b] for b in INPUT) for name in LEDGER}

    @property
    def true(self) -> dict[str, float]:
        """The true shares."""
        total = sum(self.truth.values())
        return {name: self.truth.get(name, 0.0) / total for name in LEDGER}

    @property
    def off(self) -> float:
        """The most that a bucket is off."""
        told, true = self.told, self.true
        return max(abs(told[name] - true[name]) for name in LEDGER)


def recipe(case: Case) -> Recipe:
    """What a simulated run trains."""
    return Recipe(
        data=Data(train="photos.rec"),
        model=Model("resnet20"),
        budget=Budget(steps=case.updates),
        parallel=Parallel(graph=case.graph),
        batch_size=BATCH * case.ranks,
    )


def simulate(case: Case, others: Sequence[float] = ()) -> Simulated:
    """Train in virtual time; ``others``: when the slowest of the other ranks has computed each bucket of gradients."""
    host = Host()
    cuda = Cuda(host, case)
    began, events, arrivals = host.now, list[Event](), list[float]()
    training = Training(cuda, case, others, arrivals)
    with ExitStack() as stack:
        for module in (clocks, data, compiling):
            stack.enter_context(patch.object(module, "time", host))
        for name, fake in {
            "current_stream": cuda.current_stream,
            "Stream": cuda.new_stream,
            "stream": cuda.on_stream,
            "Event": cuda.event,
            "_sleep": cuda.sleep,
            "device": cuda.on_device,
        }.items():
            stack.enter_context(patch.object(torch.cuda, name, fake))
        stack.enter_context(patch.object(torch.Tensor, "record_stream", lambda tensor, stream: None))
        clock = build.clock(torch.device("cuda", case.device), began)
        training.on_exposed = lambda: clock.to("communication")
        _train(host, clock, training, case, events)
    return Simulated(case, _truth(host, cuda.gpu.stream), events, arrivals, _held(cuda), host.now - began)


def _train(host: Host, clock: Clock, training: Training, case: Case, events: list[Event]) -> None:
    """The loop of ``training.loop``, as far as the clock sees it."""

    def tell(event: Event | None = None) -> None:
        clock.to("logging")
        with host.at("logging"):
            host.spend(50e-6)
        if event is not None:
            events.append(structs.replace(event, attempt=1, time=host.now, rank=case.rank))
        clock.to("host")

    state: Any = SimpleNamespace(
        engine=training,
        optimizer=SimpleNamespace(param_groups=[{"lr": 0.1}]),
        policy=SimpleNamespace(scale=lambda loss: loss, step=training.step),
        meters=SimpleNamespace(add=lambda counts: None, count_waiting=lambda: None),
        cursor=Cursor(),
        module=nn.Identity(),
        ema=None,
    )
    update = Update(
        call=nn.Identity(),
        parameters=(),
        objective=training.forward,  # type: ignore[arg-type]
        forward=training.forward,
        clip_norm=None,
        share=Share(BATCH, case.accumulate, 0, case.accumulate),
        clock=clock,
        image_shape=(1, 1, 3),
    )
    if case.graph:
        update = replace(update, work=compiling.RecordedWork(training, lambda words: None))
    tell(_started(case))
    waits, stream = Waits(clock, 10**9), training.gpu.stream
    batches = data._load_ahead(data._wait_for_each(images(host, case), clock), torch.device("meta"), clock)
    whole = torch.zeros((BATCH, 1, 1, 1)), torch.zeros(BATCH, dtype=torch.long)
    with contextlib.closing(batches):  # type: ignore[type-var]
        for number, batch in zip(range(1, case.updates + 1), batches, strict=False):
            waits.sort(batch.wait_seconds, state.cursor.position, BATCH)
            update(state, DeviceBatch(*whole, batch.wait_seconds), 0.1)
            tell()
            host.spend(case.python)
            if number % case.log_steps == 0:
                with clock.within("logging"), host.at("logging"):
                    host.until(stream.tail)
                    host.spend(100e-6)
                tell()
            if number % (case.updates // case.evaluations) == 0:
                with clock.within("evaluation"), host.at("evaluation"):
                    stream.launch(replace(case.forward, kernels=80), "evaluation", case.call)
                    host.until(stream.tail)
            if number % 37 == 0:
                tell(clock.account())
    clock.settle()
    tell(clock.account())


def _started(case: Case) -> Started:
    return Started(
        digest="0123456789ab",
        step=0,
        steps=case.updates,
        steps_per_epoch=10**7,
        batch_size=BATCH * case.ranks,
        data={"train": "photos.rec", "num_train": 10**9},
        model={"name": "resnet20", "parameters": 272_474, "trainable": 272_474, "size": 32},
        machine={"device": "NVIDIA H100", "cores": 16, "ranks": case.ranks, "precision": "bf16"},
    )


def _truth(host: Host, stream: Stream) -> dict[str, float]:
    """Seconds by bucket: what the stream did, and where it was empty what the host did."""
    seconds: defaultdict[str, float] = defaultdict(float)
    at, begins = host.spans[0][1], [began for _, began, _ in host.spans]
    for kind, began, ended in [*stream.spans, ("", host.now, host.now)]:
        if kind == "hold":  # in its place the stream would have been empty
            continue
        number = max(0, bisect_right(begins, at) - 1)
        while number < len(host.spans) and host.spans[number][1] < began:
            doing, since, until = host.spans[number]
            seconds[doing] += max(0.0, min(until, began) - max(since, at))
            number += 1
        seconds[kind] += ended - began
        at = max(at, ended)
    seconds.pop("", None)
    return dict(seconds)


def _held(cuda: Cuda) -> float:
    return sum(ended - began for kind, began, ended in cuda.gpu.stream.spans if kind == "hold")


def run(name: str) -> Simulated:
    """Simulate a case of :data:`CASES`: of a late rank, the rank that waits for it."""
    case = CASES[name]
    if name == "late rank":
        return late_ranks()[0]
    return simulate(case, simulate(case).arrivals if case.ranks > 1 else ())


def late_ranks() -> tuple[Simulated, Simulated]:
    """Two ranks, of which rank 1 takes a third longer for its passes."""
    slow = replace(RANKS, rank=1, forward=Part(30, 1.1e-3), backward=Part(60, 1.1e-3))
    late = simulate(slow)
    return simulate(RANKS, late.arrivals), late


def verdict(*ranks: Simulated) -> Diagnosis:
    """The verdict on a run of these ranks."""
    history = RunHistory(recipe(ranks[0].case))
    for event in (event for rank in ranks for event in rank.events):
        history.take(event)
    return diagnose(history.evidence())


def main() -> None:
    """Print the table."""
    print(f"| truth / ledger, % | {' | '.join(LEDGER)} | off by |\n|{'---|' * (len(LEDGER) + 2)}")
    for name in CASES:
        simulated = run(name)
        told, true = simulated.told, simulated.true
        cells = [f"{100 * true[b]:.1f} / {100 * told[b]:.1f}" if max(true[b], told[b]) >= 5e-4 else "" for b in LEDGER]
        print(f"| {' | '.join([name, *cells, f'{100 * simulated.off:.1f}'])} |")


if __name__ == "__main__":
    main()
