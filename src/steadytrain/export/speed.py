"""Inference speed of networks on this machine, engine by engine: the field's inference table.

[speed] = bench_inference(["resnet50"], make_plan(engines=["eager", "openvino"], seconds=1))
speed.engines[0].batches[-1].per_second

Each engine with a network has a process of its own, and engines take turns: what disturbs the machine disturbs all of
them alike. A crash, a lack of memory or an operation that an engine does not have is a result with a sentence.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steadytrain.data.storage.scratch import scratch_beside
from steadytrain.errors import InputError, did_you_mean
from steadytrain.export.engines import BatchSpeed, BenchTask, InferencePlan, Parity, Worker, bench_engines, missing
from steadytrain.export.networks import GONE, NETWORKS
from steadytrain.machine import facts
from steadytrain.models.exported import TENSORRT_GONE
from steadytrain.training.device import choose_device

TURNS = 4
"""Turns in which the time of an engine is measured."""
SAME = 0.99
"""The smallest cosine with which outputs count as those of torch in fp32."""
BASE = "plain"
"""The engine that others are compared with: torch without oneDNN, on a GPU without cuDNN."""

Tell = Callable[[str], object]


@dataclass(frozen=True, kw_only=True)
class EngineSpeed:
    """The speed of an engine with a network.

    Args:
        engine, numbers: its name and its number format.
        provider: what computed, as the engine says it: ``CPU`` or ``CUDA``; empty where nothing was opened, and in
            documents of older versions.
        batches: by rising size; empty where it could not be measured.
        memory_bytes: the peak while it infers: of the process, without what it had before; on a GPU of torch's tensors.
        open_seconds: until the engine was ready, conversion and compiling included.
        parity: of its outputs with those of torch in fp32.
        error: why there are no figures, a sentence.
    """

    engine: str
    numbers: str
    batches: tuple[BatchSpeed, ...] = ()
    memory_bytes: int = 0
    open_seconds: float = 0.0
    parity: Parity | None = None
    error: str = ""
    provider: str = ""

    @property
    def is_same(self) -> bool:
        """Return whether its outputs are those of torch in fp32, as far as they were compared."""
        return self.parity is None or self.parity.cosine >= SAME


@dataclass(frozen=True, kw_only=True)
class NetworkSpeed:
    """A network and what engines reach with it.

    Args:
        name: as the user gave it; ``title`` is that of tables.
        shape: of a sample.
        weights: the file that they are from; empty where they are drawn.
        real: whether outputs were compared on real images.
        error: why nothing was measured, a sentence; ``is_mistake``: by what the user named.
    """

    name: str
    title: str
    shape: tuple[int, ...] = ()
    parameters: int = 0
    weights: str = ""
    real: bool = False
    device: str = "cpu"
    threads: int = 0
    engines: tuple[EngineSpeed, ...] = ()
    error: str = ""
    is_mistake: bool = False

    @property
    def measured(self) -> list[EngineSpeed]:
        """The engines that have figures."""
        return [engine for engine in self.engines if engine.batches]

    def speed(self, engine: str, numbers: str = "fp32") -> EngineSpeed | None:
        """Return what an engine reaches; None where it was not measured."""
        return next((e for e in self.measured if (e.engine, e.numbers) == (engine, numbers)), None)

    def fastest(self, *, latency: bool) -> EngineSpeed | None:
        """Return the engine with the least latency at the smallest batch, or the most samples per second.

        Only engines whose outputs are those of torch in fp32 count, and not the one that others are compared with.
        """
        sound = [e for e in self.measured if e.is_same and e.engine != BASE]
        if latency:
            return min(sound, key=lambda e: e.batches[0].p50_seconds, default=None)
        return max(sound, key=lambda e: e.batches[-1].per_second, default=None)


def make_plan(
    *, engines: Iterable[str] = (), numbers: Iterable[str] = (), device: str = "auto", **options: Any
) -> InferencePlan:
    """Choose engines and number formats for this machine.

    Args:
        engines: names of :func:`bench_engines`; none: all that can be had here but ``compile``, which takes minutes.
        numbers: ``fp32``, ``bf16``, ``fp16``, ``int8``; none: those that the device multiplies fast.
        device: ``auto``, ``cpu``, ``cuda``.
        options: other fields of the plan.

    Raises:
        InputError: there is no such engine, or it has no such numbers.
    """
    place, known = choose_device(device).type, bench_engines()
    chosen, requested = tuple(dict.fromkeys(engines)), tuple(dict.fromkeys(numbers))
    for name in chosen:
        if name not in known:
            reason = f"there is no engine {name!r}: {', '.join(known)}.{did_you_mean(name, known)}"
            raise InputError(TENSORRT_GONE if name == "tensorrt" else reason)
    has_bf16 = place != "cpu" or {"avx512_bf16", "amx_bf16"} & facts.cpu_features()
    usual = ("fp32", *(("bf16",) if has_bf16 else ()), *(("fp16",) if place != "cpu" else ()), "int8")
    pairs: dict[tuple[str, str], str] = {}
    for name in chosen or (name for name in known if name != "compile" and not missing(name, place)):
        pairs |= {(name, each): missing(name, place) for each in known[name] if each in (requested or usual)}
    if not pairs:
        raise InputError(f"none of the engines computes in {', '.join(requested)}: see steady bench infer --help")
    return InferencePlan(engines=pairs, device=place, **options)


def bench_inference(
    networks: Sequence[str] = (), plan: InferencePlan | None = None, *, say: Tell = lambda text: None
) -> Iterator[NetworkSpeed]:
    """Measure networks one after another; yield each when it is measured.

    Args:
        networks: names as :func:`steadytrain.export.networks.load_network` takes them; none: the field's table.
        plan: of :func:`make_plan`; None: its defaults.
        say: takes what is being done, in words.

    Raises:
        InputError: a network that was in the table once.
    """
    for name in networks:
        if name in GONE:
            raise InputError(f"{name} is not in the table any more: {GONE[name]} (steady models lists others)")
    plan = plan or make_plan()
    for name in networks or NETWORKS:
        yield measure_network(name, plan, say)


def measure_network(name: str, plan: InferencePlan, say: Tell = lambda text: None) -> NetworkSpeed:
    """Measure a network in every engine of the plan; nothing that goes wrong is raised."""
    with scratch_beside(Path(tempfile.gettempdir(), "steady-infer")) as scratch, ExitStack() as stack:
        task = BenchTask(name, str(scratch), plan)
        say(f"{name}: preparing")
        with Worker(task) as first:
            about = first.ask("prepare")
        if first.error:
            return NetworkSpeed(name=name, title=name, error=first.error, **about)
        workers = []
        for (engine, numbers), reason in plan.engines.items():
            say(f"{name}: opening {engine} {numbers}")
            worker = stack.enter_context(Worker(task._replace(engine=engine, numbers=numbers), reason))
            worker.ask("open")
            workers.append(worker)
        for size in plan.batches:
            say(f"{name}: batches of {size}")
            for worker in workers:
                worker.ask("begin", batch_size=size)
            for turn in range(TURNS):
                start = turn % len(workers)
                for worker in workers[start:] + workers[:start]:
                    worker.ask("measure", seconds=plan.seconds / TURNS)
        speeds = []
        for worker in workers:
            figures, task = worker.ask("finish"), worker.task
            figures = {} if worker.error else figures
            speeds.append(EngineSpeed(engine=task.engine, numbers=task.numbers, error=worker.error, **figures))
    return NetworkSpeed(name=name, device=plan.device, threads=plan.threads, engines=tuple(speeds), **about)
