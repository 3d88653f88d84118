"""Inference speed of networks on this machine, engine by engine: the field's inference table.

speeds = bench_inference(["resnet50"], engines=["eager", "openvino"], seconds=1)
speeds[0].engines[0].batches[-1].per_second

Each engine with a network has a process of its own, and engines take turns: what disturbs the machine disturbs all of
them alike. A crash, a lack of memory or an operation that an engine does not have is a result with a sentence.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from steadytrain.data.storage.scratch import scratch_beside
from steadytrain.errors import InputError, did_you_mean
from steadytrain.export.engines import ENGINES, Parity, Worker, WorkerError, missing, usual_numbers
from steadytrain.export.networks import NETWORKS
from steadytrain.intervals import quantiles
from steadytrain.machine import facts
from steadytrain.training.device import choose_device

TURNS = 4
"""In which the time of an engine is measured."""

LONGEST_PASS = 8.0
"""Seconds: a batch that would take longer is measured with fewer samples."""

PREPARE_SECONDS, OPEN_SECONDS, PASS_SECONDS = 600.0, 900.0, 300.0
"""The longest time that writing a file, opening an engine (which may compile) and a turn may take."""

SAME = 0.99
"""The smallest cosine with which outputs count as those of torch in fp32."""

BASE = "plain"
"""The engine that others are compared with: torch without oneDNN, on a GPU without cuDNN."""


@dataclass(frozen=True, kw_only=True)
class BatchSpeed:
    """Passes of one batch size: their number, percentiles in seconds, and samples per second over all of them.

    ``cpu_seconds`` of all threads of the process, of a pass (median): on a busy machine they say more than the clock.
    """

    batch_size: int
    passes: int
    p50_seconds: float
    p99_seconds: float
    per_second: float
    cpu_seconds: float


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
        parity: of its outputs with those of torch in fp32; None where they cannot be compared.
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
        """Return whether its outputs are those of torch in fp32, as far as they can be compared."""
        return self.parity is None or self.parity.cosine >= SAME


@dataclass(frozen=True, kw_only=True)
class NetworkSpeed:
    """A network and what engines reach with it.

    Args:
        name: as the user gave it; ``title`` is that of tables.
        shape: of a sample.
        weights: the file that they are from; empty where they are drawn.
        real: whether outputs were compared on real images.
        error: why nothing was measured, a sentence.
    """

    name: str
    title: str
    shape: tuple[int, ...] = ()
    kind: str = "images"
    parameters: int = 0
    weights: str = ""
    real: bool = False
    remark: str = ""
    device: str = "cpu"
    threads: int = 0
    engines: tuple[EngineSpeed, ...] = ()
    error: str = ""

    def speed(self, engine: str, numbers: str = "fp32") -> EngineSpeed | None:
        """Return what an engine reaches; None where it was not measured."""
        return next((e for e in self.engines if (e.engine, e.numbers) == (engine, numbers) and e.batches), None)

    def fastest(self, *, latency: bool) -> EngineSpeed | None:
        """Return the engine with the least latency at the smallest batch, or the most samples per second.

        Only engines whose outputs are those of torch in fp32 count, and not the one that others are compared with.
        """
        sound = [e for e in self.engines if e.batches and e.is_same and e.engine != BASE]
        if latency:
            return min(sound, key=lambda e: e.batches[0].p50_seconds, default=None)
        return max(sound, key=lambda e: e.batches[-1].per_second, default=None)


def from_plain(values: Mapping[str, Any]) -> NetworkSpeed:
    """Read what ``plain(speed)`` made.

    >>> from steadytrain.config.plain import plain
    >>> speed = NetworkSpeed(name="a", title="A", engines=(EngineSpeed(engine="eager", numbers="fp32"),))
    >>> from_plain(plain(speed)) == speed
    True
    """
    engines = tuple(
        EngineSpeed(
            **{
                **engine,
                "batches": tuple(BatchSpeed(**batch) for batch in engine["batches"]),
                "parity": engine["parity"] and Parity(**engine["parity"]),
            }
        )
        for engine in values["engines"]
    )
    return NetworkSpeed(**{**values, "shape": tuple(values["shape"]), "engines": engines})


@dataclass(frozen=True, kw_only=True)
class InferencePlan:
    """The measurements to make, validated.

    Args:
        engines: pairs of an engine and its number format; those that cannot be had come with a reason.
        batches: sizes, rising.
    """

    engines: Mapping[tuple[str, str], str]
    batches: tuple[int, ...]
    threads: int
    device: str
    seconds: float
    records: str | None = None
    most: int = 64
    labelled: bool = True


def make_plan(
    *,
    engines: Iterable[str] = (),
    numbers: Iterable[str] = (),
    batches: Iterable[int] = (1, 32),
    threads: int | None = None,
    device: str = "auto",
    seconds: float = 2.0,
    records: Path | None = None,
    most: int = 64,
    labelled: bool = True,
) -> InferencePlan:
    """Choose engines and number formats for this machine.

    Args:
        engines: names of :data:`ENGINES`; none: all that can be had here but ``compile``, which takes minutes.
        numbers: ``fp32``, ``bf16``, ``fp16``, ``int8``; none: those that the device multiplies fast.
        batches: sizes of a batch.
        threads: that compute on a CPU; None: one for each core.
        device: ``auto``, ``cpu``, ``cuda``.
        seconds: for each engine and batch size.
        records: record file with images on which outputs are compared; None: drawn samples.
        most: images of it at most.
        labelled: whether their labels are true, so that engines are scored by them.

    Raises:
        InputError: there is no such engine, or it has no such numbers.
    """
    place = choose_device(device).type
    chosen = tuple(dict.fromkeys(engines))
    for name in chosen:
        if name not in ENGINES:
            raise InputError(f"there is no engine {name!r}: {', '.join(ENGINES)}.{did_you_mean(name, ENGINES)}")
    requested = tuple(dict.fromkeys(numbers))
    pairs: dict[tuple[str, str], str] = {}
    for name in chosen or (name for name in ENGINES if name != "compile"):
        reason = missing(name, place)
        if reason and not chosen:
            continue
        usual = requested or (*usual_numbers(place), "int8")
        pairs |= {(name, number): reason for number in ENGINES[name].numbers if number in usual}
    if not pairs:
        raise InputError(f"none of the engines computes in {', '.join(requested)}: see steady bench infer --help")
    return InferencePlan(
        engines=pairs,
        batches=tuple(sorted(set(batches))),
        threads=threads or facts.cores(),
        device=place,
        seconds=seconds,
        records=None if records is None else str(records),
        most=most,
        labelled=labelled,
    )


def bench_inference(
    networks: Sequence[str] = (),
    plan: InferencePlan | None = None,
    *,
    minutes: float | None = None,
    done: Mapping[str, NetworkSpeed] | None = None,
    on_network: Callable[[NetworkSpeed], object] = lambda speed: None,
    say: Callable[[str], object] = lambda text: None,
) -> list[NetworkSpeed]:
    """Measure networks one after another.

    Args:
        networks: names as :func:`steadytrain.export.engines.load_subject` takes them; none: the field's table.
        plan: of :func:`make_plan`; None: its defaults.
        minutes: begin no network after so long.
        done: measured before, by name: not measured again.
        on_network: called with each network when it is measured.
        say: takes what is being done, in words.
    """
    plan = plan or make_plan()
    end = math.inf if minutes is None else time.monotonic() + 60 * minutes
    speeds = []
    for name in networks or NETWORKS:
        speed = (done or {}).get(name)
        if speed is None and time.monotonic() >= end:
            title = NETWORKS[name].title if name in NETWORKS else name
            speed = NetworkSpeed(name=name, title=title, error=f"not reached within {minutes:g} minutes")
        elif speed is None:
            speed = measure_network(name, plan, say)
            on_network(speed)
        speeds.append(speed)
    return speeds


@dataclass
class _Contender:
    """An engine of a network, while it is measured."""

    worker: Worker
    speed: EngineSpeed
    seconds: dict[int, list[float]] = field(default_factory=dict)
    cpu_seconds: dict[int, list[float]] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)


def measure_network(name: str, plan: InferencePlan, say: Callable[[str], object] = lambda text: None) -> NetworkSpeed:
    """Measure a network in every engine of the plan; nothing that goes wrong is raised."""
    with scratch_beside(Path(tempfile.gettempdir(), "steady-infer")) as scratch:
        folder = str(scratch)
        try:
            with Worker() as worker:
                say(f"{name}: preparing")
                about = worker.ask(
                    "prepare",
                    limit_seconds=PREPARE_SECONDS,
                    name=name,
                    folder=folder,
                    records=plan.records,
                    most=plan.most,
                    labelled=plan.labelled,
                    threads=plan.threads,
                )
        except WorkerError as error:
            return NetworkSpeed(name=name, title=name, error=str(error))
        engines = _measure_engines(name, about, folder, plan, say)
    return NetworkSpeed(
        name=name,
        title=about["title"],
        shape=tuple(about["shape"]),
        kind=about["kind"],
        parameters=about["parameters"],
        weights=about["weights"],
        real=about["real"],
        remark=about["remark"],
        device=plan.device,
        threads=plan.threads,
        engines=engines,
    )


def _measure_engines(
    name: str, about: Mapping[str, Any], folder: str, plan: InferencePlan, say: Callable[[str], object]
) -> tuple[EngineSpeed, ...]:
    """Open all engines one after another, then let them take turns with each batch size."""
    speeds: dict[tuple[str, str], EngineSpeed] = {}
    conversions: dict[str, float | str] = {}
    sizes = [size for size in plan.batches if about["most"] is None or size <= about["most"]] or [about["most"]]
    with ExitStack() as stack:
        contenders: dict[tuple[str, str], _Contender] = {}
        for pair, reason in plan.engines.items():
            say(f"{name}: opening {pair[0]} {pair[1]}")
            contender = _open(name, pair, reason, folder, plan, conversions, stack)
            speeds[pair] = contender if isinstance(contender, EngineSpeed) else contender.speed
            if isinstance(contender, _Contender):
                contenders[pair] = contender
        for size in sizes:
            say(f"{name}: batches of {size}")
            _take_turns(contenders, speeds, size, plan.seconds)
        for pair, contender in contenders.items():
            if not speeds[pair].error:
                speeds[pair] = _finish(contender, folder, comparable=about["comparable"], most=plan.most)
    return tuple(speeds.values())


def _open(
    name: str,
    pair: tuple[str, str],
    reason: str,
    folder: str,
    plan: InferencePlan,
    conversions: dict[str, float | str],
    stack: ExitStack,
) -> _Contender | EngineSpeed:
    """Open an engine, its file written first; an EngineSpeed with an error where that fails."""
    engine, numbers = pair
    file, speed = ENGINES[engine].file(numbers), EngineSpeed(engine=engine, numbers=numbers, error=reason)
    subject: dict[str, Any] = {"name": name, "folder": folder, "engine": engine, "numbers": numbers}
    subject["threads"] = plan.threads
    if reason:
        return speed
    if file and file not in conversions:
        with Worker() as writer:
            try:
                conversions[file] = writer.ask("convert", limit_seconds=PREPARE_SECONDS, **subject)["seconds"]
            except WorkerError as error:
                conversions[file] = f"cannot be written for {ENGINES[engine].title}: {error}"
    converted = conversions.get(file, 0.0)
    if isinstance(converted, str):
        return replace(speed, error=converted)
    worker = stack.enter_context(Worker())
    try:
        opened = worker.ask("open", limit_seconds=OPEN_SECONDS, device=plan.device, **subject)
    except WorkerError as error:
        worker.close()
        return replace(speed, error=str(error))
    return _Contender(worker, replace(speed, open_seconds=converted + opened["seconds"], provider=opened["provider"]))


def _take_turns(
    contenders: Mapping[tuple[str, str], _Contender],
    speeds: dict[tuple[str, str], EngineSpeed],
    size: int,
    seconds: float,
) -> None:
    """Warm every engine up for a batch size, then time it in turns; who fails drops out with a sentence."""

    def ask(pair: tuple[str, str], what: str, limit_seconds: float, **values: Any) -> dict[str, Any] | None:
        if speeds[pair].error:
            return None
        try:
            return contenders[pair].worker.ask(what, limit_seconds=limit_seconds, **values)
        except WorkerError as error:
            contenders[pair].worker.close()
            speeds[pair] = replace(speeds[pair], error=str(error))
            return None

    for pair, contender in contenders.items():
        per_image = [np.median(times) / contender.sizes[before] for before, times in contender.seconds.items()]
        fits = size if not per_image else min(size, max(1, int(LONGEST_PASS / max(per_image))))
        contender.sizes[size] = fits if fits == size else 2 ** int(math.log2(fits))
        ask(pair, "warm", OPEN_SECONDS, batch_size=contender.sizes[size])
    pairs = list(contenders)
    for turn in range(TURNS if pairs else 0):
        for pair in pairs[turn % len(pairs) :] + pairs[: turn % len(pairs)]:
            answer = ask(
                pair, "measure", PASS_SECONDS, batch_size=contenders[pair].sizes[size], seconds=seconds / TURNS
            )
            if answer is not None:
                contenders[pair].seconds.setdefault(size, []).extend(answer["seconds"])
                contenders[pair].cpu_seconds.setdefault(size, []).extend(answer["cpu_seconds"])


def _finish(contender: _Contender, folder: str, *, comparable: bool, most: int) -> EngineSpeed:
    """Sum an engine's turns up and compare its outputs."""
    batches = []
    for size, times in contender.seconds.items():
        p50, p99 = quantiles(times, 0.5, 0.99)
        rate = contender.sizes[size] * len(times) / sum(times)
        batches.append(
            BatchSpeed(
                batch_size=contender.sizes[size],
                passes=len(times),
                p50_seconds=p50,
                p99_seconds=p99,
                per_second=rate,
                cpu_seconds=float(np.median(contender.cpu_seconds[size])),
            )
        )
    try:
        memory = contender.worker.ask("memory", limit_seconds=PASS_SECONDS)["bytes"]
        parity = None
        if comparable:
            limit_seconds = PASS_SECONDS * max(1.0, most / 64)
            parity = Parity(**contender.worker.ask("parity", limit_seconds=limit_seconds, folder=folder))
    except WorkerError as error:
        return replace(contender.speed, error=str(error))
    return replace(contender.speed, batches=tuple(batches), memory_bytes=memory, parity=parity)


def versions() -> dict[str, str]:
    """Return the versions of torch and of the engines that are installed."""
    from importlib.metadata import PackageNotFoundError, version

    installed = {"torch": str(torch.__version__)}
    for package in ("torchvision", "timm", "onnxruntime", "openvino", "tensorrt"):
        try:
            installed[package] = version(package)
        except PackageNotFoundError:
            continue
    return installed
