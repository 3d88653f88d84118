"""The steps of ``gpu_session.py``: each measures one thing on one GPU and says whether it is as it should be.

A step is a function of :class:`Job` that returns its figures; ``passes`` among them is the answer. It runs in a process
of its own, and calls ``job.note`` with what it has so far: where its time ends, that is kept.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from peers.commands import started

PROJECT = Path(__file__).resolve().parents[1]
STEADY = [sys.executable, "-m", "steadytrain"]

CARDS = {"H100 80GB HBM3": (750e12, 2.8e12), "H200": (750e12, 3.8e12)}
"""A part of a card's name -> the least FLOP/s of an 8192 bf16 product, and bytes/s of a copy (read and written), of a
sound one that nobody else uses."""


@dataclass(frozen=True)
class Job:
    """The input of a step.

    Args:
        device: ``cuda`` or ``cpu``.
        quick: a rehearsal: a few small steps, whose figures mean nothing.
        folder: for its files.
        data: an archive of photographs (``.tar``), or None: pictures are drawn.
        seconds: that it has.
        out: the file that :meth:`note` writes.
        cifar: a folder with cifar10-train.rec and cifar10-test.rec, or None.
        weights: a folder of NETWORK*.safetensors, or None: fine-tuning begins with random ones.
    """

    device: str
    quick: bool
    folder: Path
    data: Path | None
    seconds: float
    out: Path
    began: float
    cifar: Path | None = None
    weights: Path | None = None

    @property
    def left(self) -> float:
        """Seconds that remain."""
        return self.seconds - (time.monotonic() - self.began)

    @property
    def numbers(self) -> str:
        """The precision in which networks are measured."""
        return "fp32" if self.device == "cpu" else "bf16"

    def note(self, figures: Mapping[str, Any]) -> None:
        """Keep these figures, whatever happens next."""
        part = self.out.with_suffix(".part")
        part.write_text(json.dumps(figures), encoding="utf-8")
        part.replace(self.out)


Step = Callable[[Job], dict[str, Any]]


# --- the card -------------------------------------------------------------------------------------------------------


def card(job: Job) -> dict[str, Any]:
    """What the card multiplies and copies a second, and what the doctor says of it."""
    import torch

    from steadytrain.training.compute.timing import peak_flops

    device = torch.device(job.device)
    side, size = (512, 2**24) if job.quick else (8192, 2**32)
    a, b = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    product = fastest(device, lambda: torch.mm(a, b), 10)
    source, target = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
    copy = fastest(device, lambda: target.copy_(source), 5)
    figures: dict[str, Any] = {
        "flops_per_second": 2 * side**3 / product,
        "copied_bytes_per_second": 2 * size / copy,
        "peak_flops_of_steadytrain": peak_flops(device, "bf16" if job.device == "cuda" else "fp32"),
    }
    job.note(figures)
    doctor = subprocess.run([*STEADY, "doctor", "--json"], capture_output=True, text=True, check=False, timeout=60)
    figures["doctor"] = json.loads(doctor.stdout) if doctor.stdout else {"error": doctor.stderr[-500:]}
    figures["passes"] = True
    if job.device == "cuda":
        name = torch.cuda.get_device_name(device)
        least = next((least for part, least in CARDS.items() if part in name), (0.0, 0.0))
        figures["passes"] = figures["flops_per_second"] >= least[0] and figures["copied_bytes_per_second"] >= least[1]
        figures["peak_is_close"] = abs(figures["peak_flops_of_steadytrain"] / figures["flops_per_second"] - 1) < 0.15
    return figures


def telemetry(job: Job) -> dict[str, Any]:
    """What the sampler reads under load, beside nvidia-smi at the same moment."""
    if job.device != "cuda":
        return {"passes": True, "left_out": "no GPU"}
    import torch

    from steadytrain.machine.nvml import GpuSampler, NoNvml

    uuid = str(torch.cuda.get_device_properties(0).uuid)
    try:
        sampler = GpuSampler([uuid])
    except NoNvml as error:
        return {"passes": False, "error": f"NVML: {error}"}
    columns = ["utilization.gpu", "memory.used", "power.draw", "clocks.sm", "temperature.gpu"]
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    end, seconds, asked, theirs = time.monotonic() + 1.0, 0.0, 0, [0.0] * len(columns)
    while time.monotonic() < end:
        keep_busy(a)
    sampler.read({os.getpid()})
    began = time.monotonic()
    words = ["nvidia-smi", f"--id=GPU-{uuid}", f"--query-gpu={','.join(columns)}", "--format=csv,noheader,nounits"]
    with ThreadPoolExecutor(1) as pool:
        while time.monotonic() < began + (2 if job.quick else 6):
            answer = pool.submit(subprocess.run, words, capture_output=True, text=True, check=False)
            while not answer.done():
                keep_busy(a)
            row = [float(value) for value in answer.result().stdout.splitlines()[0].split(",")]
            theirs, asked = [x + y for x, y in zip(theirs, row, strict=True)], asked + 1
    ours = sampler.read({os.getpid()})[0]
    seconds = time.monotonic() - began
    mean = dict(zip(columns, (value / asked for value in theirs), strict=True))
    pairs = {
        "utilisation": (ours.utilisation, mean["utilization.gpu"] / 100),
        "memory_bytes": (ours.memory_bytes, mean["memory.used"] * 2**20),
        "power_watts": (ours.power_watts, mean["power.draw"]),
        "clock_hertz": (ours.clock_hertz, mean["clocks.sm"] * 1e6),
        "temperature": (ours.temperature, mean["temperature.gpu"]),
    }
    close = {name: mine is not None and abs(mine / other - 1) < 0.05 for name, (mine, other) in pairs.items() if other}
    sampler.close()
    return {
        "seconds": seconds,
        "event": ours.to_dict(),
        "pairs": pairs,
        "close": close,
        "passes": all(close.values()) and ours.sm_active is not None and ours.tensor_active is not None,
    }


def keep_busy(a: Any) -> None:
    """Multiply for some milliseconds."""
    import torch

    for _ in range(8):
        torch.mm(a, a)
    torch.cuda.synchronize()


# --- updates on images that are there -------------------------------------------------------------------------------


def updates(job: Job) -> dict[str, Any]:
    """ResNet-50's updates beside a plain loop of torchvision's network, in turns in one process."""
    import torch

    size, batch, classes = (64, 8, 10) if job.quick else (224, 256, 1000)
    network = "resnet18" if job.quick else "resnet50"
    device = torch.device(job.device)
    torch.backends.cudnn.benchmark = True
    rounds, seconds = (1, 0.2) if job.quick else (3, 1.5)
    graphs = [] if job.device == "cpu" else [("graph", "plain", {"parallel.graph": True})]
    ways: list[tuple[str, str, dict[str, Any]]] = [("eager", "plain", {}), *graphs]
    if job.device == "cuda":
        ways.append(("compiled", "plain compiled", {"precision.compile": "default"}))
        ways.append(("pure-bf16", "plain compiled", {"precision.name": "pure-bf16", "precision.compile": "default"}))
    rows: dict[str, Any] = {}
    plain: dict[str, Callable[[], float]] = {}
    for name, peer, changes in ways:
        if job.left < 20 and rows:
            rows[name] = {"left_out": "no time"}
            continue
        began = time.monotonic()
        try:
            if peer not in plain:
                plain[peer] = plain_updates(network, device, batch, size, classes, "compiled" in peer, seconds)
            prepared = time.monotonic()
            mine, notes = our_updates(job, network, batch, size, classes, changes, seconds)
            made = time.monotonic()
            pairs = [(mine(), plain[peer]()) for _ in range(rounds)]
        except Exception as error:  # noqa: BLE001 - told as this row's, and the others are measured
            rows[name] = {"error": f"{type(error).__name__}: {error}"[:500]}
            job.note({"rows": rows})
            continue
        rows[name] = {
            "images_per_second": median(a for a, _ in pairs),
            "plain_images_per_second": median(b for _, b in pairs),
            "over_plain": median(a / b for a, b in pairs),
            "rounds": pairs,
            "seconds_to_prepare": made - prepared,
            "seconds_to_prepare_plain": prepared - began,
            "notes": notes,
        }
        job.note({"rows": rows})
        del mine
        if device.type == "cuda":
            torch.cuda.empty_cache()
    over = [row.get("over_plain", 0.0) for row in rows.values() if "left_out" not in row]
    return {"rows": rows, "batch_size": batch, "passes": job.quick or min(over) >= 0.98}


def plain_updates(
    network: str, device: Any, batch: int, size: int, classes: int, compiled: bool, seconds: float
) -> Callable[[], float]:
    """Make the loop that everyone writes: torchvision's network, channels last, autocast, fused SGD; images/s."""
    import torch
    import torchvision
    from torch.nn.functional import cross_entropy

    is_gpu = device.type == "cuda"
    net = getattr(torchvision.models, network)(num_classes=classes).to(device).to(memory_format=torch.channels_last)
    step_net = torch.compile(net) if compiled else net
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4, momentum=0.9, weight_decay=1e-4, fused=is_gpu or None)
    images = torch.randn(batch, 3, size, size, device=device).to(memory_format=torch.channels_last)
    labels = torch.randint(0, classes, (batch,), device=device)

    def update() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=is_gpu):
            loss = cross_entropy(step_net(images), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for _ in range(4):
        update()
    return lambda: rate(device, update, batch, seconds)


def our_updates(
    job: Job, network: str, batch: int, size: int, classes: int, changes: Mapping[str, Any], seconds: float
) -> tuple[Callable[[], float], list[str]]:
    """Make steadytrain's updates, of the same network on images that are there; images/s."""
    import torch

    from steadytrain.training.compute.compile import compile_update, record_update
    from steadytrain.training.data import random_batch

    device, notes, trained = ours(job, f"torchvision/{network}", batch, size, classes, changes)
    update, _ = compile_update(trained.recipe, trained.update, trained.state, None, notes.append)
    update = record_update(trained.recipe, update, trained.state, None, notes.append)
    resident = random_batch(batch, update.image_shape, device, num_classes=classes)
    for _ in range(5):
        update(trained.state, resident, 1e-4)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return lambda: rate(device, lambda: update(trained.state, resident, 1e-4), batch, seconds), notes


@dataclass(frozen=True)
class Ours:
    """A network of steadytrain's that can be updated."""

    recipe: Any
    state: Any
    update: Any


def ours(
    job: Job, model: str, batch: int, size: int, classes: int, changes: Mapping[str, Any], group: Any = None
) -> tuple[Any, list[str], Ours]:
    """Set up a recipe's updates as ``steady bench train`` does, of a rank of a group or of a process alone."""
    from steadytrain.config import Data, Model, Recipe
    from steadytrain.training.device import prepare_device
    from steadytrain.training.profile.bench import set_up

    recipe = Recipe(data=Data(train="drawn"), model=Model(model), batch_size=batch).with_(
        {"parallel.device": job.device, "precision.name": job.numbers, **changes}
    )
    device, notes = prepare_device(recipe), list[str]()
    trained = set_up(recipe, device, notes, size=size, num_classes=classes, allow_import=True, group=group)
    return device, notes, Ours(recipe, trained.state, trained.update)


def rate(device: Any, update: Callable[[], object], batch: int, seconds: float) -> float:
    """Images per second of updates, for so long; the host never runs more than 16 of them ahead."""
    from steadytrain.training.compute.timing import images_per_second, wait_for

    times = 16 if device.type == "cuda" else 1

    def work() -> int:
        for _ in range(times):
            update()
        wait_for(device)
        return times * batch

    return images_per_second(device, work, seconds=seconds, least=1)[0]


def fastest(device: Any, work: Callable[[], object], times: int) -> float:
    """Seconds of the fastest of some repetitions, by the device's events."""
    from steadytrain.training.compute.timing import wait_for
    from steadytrain.training.device import seconds_between, tick

    work()
    taken = []
    for _ in range(times):
        before = tick(device)
        work()
        after = tick(device)
        wait_for(device)
        taken.append(seconds_between(before, after))
    return min(taken)


# --- the ledger -----------------------------------------------------------------------------------------------------


def ledger(job: Job) -> dict[str, Any]:
    """The device clock's seconds beside torch.profiler's: kernels' union is work, gaps are waits."""
    import torch

    from steadytrain.data.loader import Batch
    from steadytrain.training.clock import COMPUTE
    from steadytrain.training.compute.compile import record_update
    from steadytrain.training.compute.timing import wait_for
    from steadytrain.training.data import load

    size, batch, count = (32, 8, 6) if job.quick else (224, 128, 20)
    network = "torchvision/resnet18" if job.quick else "torchvision/resnet50"
    cases: dict[str, tuple[str, int, int, float, dict[str, Any]]] = {
        "images wait": (network, batch, size, 0.0, {}),
        "slow feed": (network, batch, size, 0.02 if job.quick else 0.12, {}),
        "small batch": ("torchvision/resnet18", 4, 32, 0.0, {}),
    }
    if job.device == "cuda":
        cases["small batch, graph"] = ("torchvision/resnet18", 4, 32, 0.0, {"parallel.graph": True})
        cases["small batch, four passes"] = ("torchvision/resnet18", 16, 32, 0.0, {"optim.accumulate": 4})
    rows: dict[str, Any] = {}
    for name, (model, n, side, pause, changes) in cases.items():
        device, notes, trained = ours(job, model, n, side, 10, changes)
        update = record_update(trained.recipe, trained.update, trained.state, None, notes.append)
        clock, warm = update.clock, 6 if job.quick else 24 if pause else 48
        pixels = torch.randint(0, 256, (n, side, side, 3), dtype=torch.uint8)
        images = (pixels.pin_memory() if device.type == "cuda" else pixels).numpy()

        def batches(
            images: Any = images, n: int = n, pause: float = pause, updates: int = warm + count + 2
        ) -> Iterator[Batch]:
            for k in range(updates):
                time.sleep(pause)
                yield Batch(images, np.arange(n) % 10, np.arange(n), np.arange(n) + k * n)

        stream = load(batches(), device, clock)
        for k in range(warm):
            update(trained.state, next(stream), 1e-4)
            if k % 8 == 7:
                clock.seconds()  # as at log lines
        kinds = torch.profiler.ProfilerActivity
        with torch.profiler.profile(activities=[kinds.CUDA if device.type == "cuda" else kinds.CPU]) as profile:
            wait_for(device)
            clock.settle()
            before, began = dict(clock.seconds()), time.perf_counter()
            for _ in range(count):
                update(trained.state, next(stream), 1e-4)
            wait_for(device)
            clock.settle()
            after, wall = dict(clock.seconds()), time.perf_counter() - began
        told = {key: after.get(key, 0.0) - before.get(key, 0.0) for key in after}
        computing = sum(told.get(key, 0.0) for key in COMPUTE)
        row: dict[str, Any] = {"wall_seconds": wall, "ledger": told, "compute_share": computing / sum(told.values())}
        row["notes"] = notes
        if device.type == "cuda":
            work, copies, pageable = device_spans(profile)
            row |= {
                "kernel_seconds": union(work),
                "copy_seconds": union(copies),
                "pageable_copies": pageable,
                "asked_for": sum(span.asked < float("inf") for span in work) / max(1, len(work)),
                "truth_share": union(work) / wall,
            }
            row["off_by"] = row["compute_share"] - row["truth_share"]
        rows[name] = row
        job.note({"rows": rows})
        stream.close()  # type: ignore[attr-defined]
    off = [abs(row.get("off_by", 0.0)) for row in rows.values()]
    return {"rows": rows, "passes": job.device == "cpu" or max(off) <= 0.03}


class Span(NamedTuple):
    """Seconds of a kernel or a copy on the device, and when the host had asked for it (the end of time: not known)."""

    began: float
    ended: float
    asked: float = float("inf")


def device_spans(profile: Any) -> tuple[list[Span], list[Span], int]:
    """The kernels' and the copies' seconds on the device, and how many copies were of pageable memory."""
    kernels, copies, pageable = [], [], 0
    events = list(profile.profiler.kineto_results.events())
    asked = {
        event.correlation_id(): (event.start_ns() + event.duration_ns()) / 1e9
        for event in events
        if "CUDA" not in str(event.device_type()) and event.name().startswith("cu")
    }
    for event in events:
        if "CUDA" not in str(event.device_type()):
            continue
        name, start = event.name(), event.start_ns() / 1e9
        span = Span(start, start + event.duration_ns() / 1e9, asked.get(event.correlation_id(), float("inf")))
        if "HtoD" in name or "DtoH" in name:
            copies.append(span)
            pageable += "ageable" in name
        elif span.ended > span.began and not name.startswith(("cuda", "ProfilerStep")) and "spin_kernel" not in name:
            kernels.append(span)
    return kernels, copies, pageable


SHORTEST_GAP = 10e-6
"""Seconds between two kernels below which the device did not wait for the host."""


def union(spans: Iterable[Span]) -> float:
    """Seconds that these cover together, with the gaps in which the device had been asked for what comes next.

    >>> union([Span(0, 2), Span(1, 3), Span(5, 6)])
    4.0
    >>> union([Span(0, 2), Span(1, 3), Span(5, 6, asked=2.5)])
    6.0
    """
    total, end = 0.0, float("-inf")
    for began, ended, asked in sorted(spans):
        began = end if began - end > 0 and (began - end < SHORTEST_GAP or asked <= end) else max(began, end)
        total += max(0.0, ended - began)
        end = max(end, ended)
    return total


# --- the verdict ----------------------------------------------------------------------------------------------------

NETS = """
import torch, torchvision

class Asking(torch.nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net
        for part in net.modules():
            if isinstance(part, torch.nn.Conv2d):
                part.register_forward_hook(lambda module, inputs, output: output * (1 + 0 * output.sum().item()))

    def forward(self, images):
        return self.net(images)

def asks(num_classes, **options):
    return Asking(torchvision.models.resnet18(num_classes=num_classes))

def plain(num_classes, **options):
    return torchvision.models.resnet18(num_classes=num_classes)
"""


def verdicts(job: Job) -> dict[str, Any]:
    """Runs with a fault each: the first cause of the verdict, those of the start aside, is that fault."""
    (job.folder / "session_nets.py").write_text(NETS, encoding="utf-8")
    records = packed(job)
    size, long = ("64", 1) if job.quick else ("160", 12)
    cases: dict[str, tuple[int, list[str], set[str]]] = {
        ".item() in each layer": (50 * long, ["--model", "session_nets:asks", "--size", size], {"sync", "model_waits"}),
        "batches of 8": (60 * long, ["--batch-size", "8", "--size", "32"], {"batch_size", "launch"}),
        "one loader thread": (12 * long, ["--threads", "1", "--size", size], {"threads", "decode", "augment"}),
    }
    rows: dict[str, Any] = {}
    for name, (steps, words, expected) in cases.items():
        if job.left < 15:
            rows[name] = {"left_out": "no time"}
            continue
        run = job.folder / f"run-{len(rows)}"
        command = [*STEADY, "train", str(records), "--run", str(run), "--device", job.device]
        command += ["--set", f"budget.steps={steps}"]
        defaults = ["--model", "session_nets:plain", "--batch-size", "128"]
        given = {word for word in words if word.startswith("--")}
        for flag, value in zip(defaults[::2], defaults[1::2], strict=True):
            command += [] if flag in given else [flag, value]
        done = child([*command, *words], job.folder, min(job.left, 60))
        asked = child([*STEADY, "diagnose", str(run), "--json"], job.folder, 30)
        document: dict[str, Any] = json.loads(asked.stdout) if asked.stdout else {"error": asked.stderr[-300:]}
        rows[name] = {"rc": done.returncode, "tail": done.stdout[-600:] + done.stderr[-400:], "verdict": document}
        causes = [cause["name"] for cause in document.get("causes", ()) if cause["name"] not in ("startup", "warmup")]
        rows[name]["cause"] = cause = next(iter(causes), None)  # a short run is mostly start
        rows[name]["expected"] = sorted(expected)
        rows[name]["found"] = cause in expected
        rows[name]["events"] = events_of(run, "Started", "ThreadStats", "DeviceStats", "StepMeasured")
        job.note({"rows": rows})
    sound = all(row.get("rc", 0) == 0 for row in rows.values())
    return {"rows": rows, "passes": sound and (job.quick or all(row.get("found", True) for row in rows.values()))}


# --- the start ------------------------------------------------------------------------------------------------------

PLAIN = """
import time
times = {"": time.perf_counter()}
import torch
times["import torch"] = time.perf_counter()
device = torch.device(DEVICE)
torch.zeros(1, device=device)
times["device"] = time.perf_counter()
import torchvision
times["import torchvision"] = time.perf_counter()
net = torchvision.models.resnet50(num_classes=10).to(device)
times["model"] = time.perf_counter()
optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
times["optimizer"] = time.perf_counter()
torch.backends.cudnn.benchmark = True
images, labels = torch.randn(64, 3, 64, 64, device=device), torch.zeros(64, dtype=torch.long, device=device)
for _ in range(3):
    with torch.autocast(device.type, torch.bfloat16):
        loss = torch.nn.functional.cross_entropy(net(images), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
loss.item()
times["three updates"] = time.perf_counter()
names = list(times)
print({name: round(times[name] - times[before], 3) for before, name in zip(names, names[1:])})
"""


def startup(job: Job) -> dict[str, Any]:
    """Seconds of a plain script and of ``steady train`` with three updates; twice each, the second finds warm files."""
    records, rows = packed(job), dict[str, Any]()
    script = PLAIN.replace("DEVICE", repr(job.device))
    train = ["train", str(records), "--model", "torchvision/resnet50", "--size", "64", "--batch-size", "64"]
    train += ["--device", job.device, "--set", "budget.steps=3"]
    for turn in ("first", "second"):
        began = time.monotonic()
        done = child([sys.executable, "-c", script], job.folder, max(1.0, job.left))
        seconds = time.monotonic() - began
        rows[f"plain, {turn}"] = {"seconds": seconds, "parts": done.stdout, "error": done.stderr[-300:]}
        began, run = time.monotonic(), job.folder / f"run-{turn}"
        child([*STEADY, *train, "--run", str(run)], job.folder, max(1.0, job.left))
        seen = events_of(run, "Started", "Accounted")
        rows[f"steady, {turn}"] = {"seconds": time.monotonic() - began, "events": seen}
        job.note({"rows": rows})
    trained = [rows[f"steady, {turn}"]["events"].get("Accounted") is not None for turn in ("first", "second")]
    return {"rows": rows, "passes": all(trained)}


def events_of(run: Path, *kinds: str) -> dict[str, Any]:
    """The newest event of each of these kinds; none of a run that has none."""
    if not (run / "events.jsonl").exists():
        return {}
    events = [json.loads(line) for line in (run / "events.jsonl").read_text(encoding="utf-8").splitlines()]
    return {event["kind"]: event for event in events if event.get("kind") in kinds}


# --- the feed -------------------------------------------------------------------------------------------------------


def feed(job: Job) -> dict[str, Any]:
    """The loader by itself with 1 to 16 threads, then ResNet-50 and ResNet-18 that it feeds."""
    from steadytrain.data.loader.measure import measure

    count, size, batch = (64, 64, 8) if job.quick else (20_000, 224, 256)
    figures: dict[str, Any] = {"threads": {}, "training": {}, "cores": os.cpu_count()}
    loader = partial(photo_loader, job, batch=batch, size=size, count=count)
    most = os.cpu_count() or 1
    for threads in [n for n in (1, 2, 4, 6, 8, 10, 12, 16) if n <= most]:
        steady = measure(loader(threads), seconds=0.3 if job.quick else 2.0).steady
        figures["threads"][threads] = {
            "images_per_second": steady.images_per_second,
            "decode_share": steady.decode_share,
            "blocked_share": steady.blocked_share,
        }
        job.note(figures)
    best = max(figures["threads"], key=lambda threads: figures["threads"][threads]["images_per_second"])
    figures["fastest_threads"] = best
    for network in ["resnet18"] if job.quick else ["resnet50", "resnet18"]:
        for place in ("process", "threads"):
            if job.left < 10:
                continue
            figures["training"][f"{network}, {place}"] = fed(job, network, loader(best, place=place), batch, size)
            job.note(figures)
    first = figures["training"].get("resnet50, threads", {"wait_share": 0.0})
    return figures | {"passes": job.quick or first["wait_share"] < 0.02}


def photo_loader(job: Job, threads: int, *, batch: int, size: int, count: int, **options: Any) -> Any:
    """Make the loader of training crops of the photographs, of which an epoch has ``count``."""
    from steadytrain.data.loader import Crop, ImageLoader
    from steadytrain.data.recordio.reader import Records

    records, crop = Records.open(packed(job)), Crop(kind="resized-crop", size=size, flip=True)
    ids, options = np.arange(count) % len(records), {"pin": job.device == "cuda", "keep_bytes": 0, **options}
    return ImageLoader(records, crop, batch_size=batch, ids=ids, threads=threads, seed=0, **options)


def fed(job: Job, network: str, loader: Any, batch: int, size: int) -> dict[str, Any]:
    """Updates fed by a loader: images/s, the share of waits, and the same on images that are there."""
    from steadytrain.training.compute.timing import wait_for
    from steadytrain.training.data import load, random_batch

    device, _, trained = ours(job, f"torchvision/{network}", batch, size, 10, {})
    resident = random_batch(batch, trained.update.image_shape, device)
    seconds = 0.3 if job.quick else 3.0
    for _ in range(3):
        trained.update(trained.state, resident, 1e-4)
    alone = rate(device, lambda: trained.update(trained.state, resident, 1e-4), batch, seconds / 2)
    stream = load(loader, device, trained.update.clock)
    for _ in range(3 if job.quick else 12):
        trained.update(trained.state, next(stream), 1e-4)
    wait_for(device)
    began, count, waited = time.perf_counter(), 0, 0.0
    while time.perf_counter() - began < seconds:
        coming = next(stream)
        trained.update(trained.state, coming, 1e-4)
        waited, count = waited + coming.wait_seconds, count + 1
        if count % 8 == 0:
            wait_for(device)
    wait_for(device)
    passed = time.perf_counter() - began
    stream.close()  # type: ignore[attr-defined]
    loader.close()
    return {
        "images_per_second": batch * count / passed,
        "alone_images_per_second": alone,
        "of_alone": batch * count / passed / alone,
        "wait_share": waited / passed,
    }


# --- killed and resumed ---------------------------------------------------------------------------------------------


def resumed(job: Job) -> dict[str, Any]:
    """A deterministic run that is killed at its 23rd update of 40 and started again ends with the same bits."""
    records = packed(job)
    ways = {"eager": [], "graph": ["--graph"], "fp16": ["--precision", "fp16"]}
    if job.device == "cpu":
        ways = {"eager": []}
    network, size = ("resnet20", "32") if job.quick else ("torchvision/resnet18", "64")
    common = ["--model", network, "--batch-size", "32", "--size", size, "--deterministic"]
    common += ["--device", job.device, "--set", "budget.steps=40", "--set", "every.save_steps=10"]

    def trained(way: str, name: str, kill_at: int | None) -> dict[str, Any]:
        run = job.folder / f"{way}-{name}"
        words = [*STEADY, "train", str(records), "--run", str(run), *common, *ways[way]]
        if kill_at is not None:
            killed_at = kill_after(words, run, kill_at, job.left)
            done = child(words, job.folder, max(1.0, job.left))
            return {"killed_at": killed_at, "rc": done.returncode, "tail": done.stderr[-300:]}
        done = child(words, job.folder, max(1.0, job.left))
        return {"rc": done.returncode, "tail": done.stderr[-300:]}

    rows: dict[str, Any] = {}
    with ThreadPoolExecutor(6) as pool:  # side by side: what is compared does not depend on speed
        answers = {
            (way, name): pool.submit(trained, way, name, kill_at)
            for way in ways
            for name, kill_at in (("whole", None), ("killed", 23))
        }
        for way in ways:
            rows[way] = {name: answers[way, name].result() for name in ("whole", "killed")}
            rows[way]["equal"] = equal_weights(job.folder / f"{way}-whole", job.folder / f"{way}-killed")
            job.note({"rows": rows})
    return {"rows": rows, "passes": all(row["equal"] is True for row in rows.values())}


def kill_after(words: Sequence[str], run: Path, step: int, seconds: float) -> int | None:
    """Start a command and kill it once its run has made so many updates; return the update."""
    with subprocess.Popen(
        words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    ) as process:
        end, seen = time.monotonic() + seconds, None
        while time.monotonic() < end and process.poll() is None and (seen is None or seen < step):
            time.sleep(0.005)
            if (run / "events.jsonl").exists():
                lines = (run / "events.jsonl").read_text(encoding="utf-8", errors="replace").splitlines()
                steps = [line for line in lines if '"kind":"Step"' in line.replace(" ", "")]
                seen = len(steps) or None
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return seen


def equal_weights(one: Path, other: Path) -> bool | str:
    """Return whether two runs have the same weights to the last bit; else how they differ."""
    from safetensors.numpy import load_file

    try:
        a, b = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
    except OSError as error:
        return str(error)
    different = [name for name in a if not np.array_equal(a[name], b[name])]
    return True if not different else f"{len(different)} of {len(a)} tensors differ"


# --- memory ---------------------------------------------------------------------------------------------------------


def memory(job: Job) -> dict[str, Any]:
    """Where 15 % of the memory is allowed, batches of 512 are halved, and the run goes on."""
    import torch

    from steadytrain import Budget, Data, Every, Model, Optim, Recipe, Run
    from steadytrain.events import Evaluated, Halved
    from steadytrain.training import steps

    if job.device == "cuda":
        torch.cuda.set_per_process_memory_fraction(0.15)
    batch, size = (16, 32) if job.quick else (512, 224)
    records, rows = packed(job), dict[str, Any]()
    for name, changes in {"eager": {}, "compiled": {"precision.compile": "default"}}.items():
        if job.left < 15 or (job.device == "cpu" and name == "compiled"):
            continue
        recipe = Recipe(
            data=Data(train=str(records), size=size, holdout=0.3),
            model=Model("torchvision/resnet18" if job.quick else "torchvision/resnet50"),
            optim=Optim(lr=0.01),
            budget=Budget(steps=3),
            every=Every(log_steps=1),
            batch_size=batch,
        ).with_({"parallel.device": job.device, "precision.name": job.numbers, **changes})
        try:
            seen = list(steps(Run.create(job.folder / f"memory-{name}", recipe)))
            rows[name] = {
                "halved": [(event.during, event.images) for event in seen if isinstance(event, Halved)],
                "evaluated": sum(isinstance(event, Evaluated) for event in seen),
                "reached_bytes": torch.cuda.max_memory_reserved() if job.device == "cuda" else 0,
            }
        except Exception as error:  # noqa: BLE001 - told as this row's
            rows[name] = {"error": f"{type(error).__name__}: {error}"[:500]}
        job.note({"rows": rows})
        if job.device == "cuda":
            torch.cuda.empty_cache()
    halved = [bool(row.get("halved")) and row.get("evaluated", 0) > 0 for row in rows.values()]
    return {"rows": rows, "passes": job.device == "cpu" or all(halved)}


# --- waits for the device -------------------------------------------------------------------------------------------

TRANSFORMS = ("vflip", "rotate:10", "shear:0.1", "randaugment:2,9", "trivialaugment", "color:0.4", "grey:0.2", "erase")


def waits(job: Job) -> dict[str, Any]:
    """Updates while any wait for the device raises: each optimizer, transform, average, clipping, precision."""
    from steadytrain.config.parts import OPTIMIZERS

    cases: dict[str, dict[str, Any]] = {f"optimizer {name}": {"optim.name": name} for name in OPTIMIZERS}
    cases |= {f"transform {name}": {"data.transforms": [name]} for name in (*TRANSFORMS, "mixup:0.2", "cutmix:1")}
    cases |= {
        "ema": {"optim.ema": 0.99},
        "clip": {"optim.clip_norm": 1.0},
        "accumulate": {"optim.accumulate": 4},
        "label smoothing": {"optim.label_smoothing": 0.1},
        "frozen batch norms": {"model.batch_norm": "frozen"},
        "head": {"model.train": "head"},
        "recompute": {"parallel.recompute": True},
    }
    if job.device == "cuda":
        kinds = ("fp32", "tf32", "bf16", "fp16", "pure-bf16", "pure-fp16")
        cases |= {f"precision {name}": {"precision.name": name} for name in kinds}
        cases |= {"fp16 lamb": {"precision.name": "fp16", "optim.name": "timm/lamb", "optim.lr": 1e-3}}
        cases |= {f"fp16 {name}": {"precision.name": "fp16", "optim.name": name} for name in ("adamw", "rmsprop")}
    rows: dict[str, Any] = {}
    for name, changes in list(cases.items())[:: 6 if job.quick else 1]:
        if job.left < 3:
            rows[name] = "no time"
            continue
        rows[name] = waits_of(job, changes)
    failed = {name: reason for name, reason in rows.items() if reason}
    return {"cases": len(rows), "failed": failed, "passes": not failed}


def waits_of(job: Job, changes: Mapping[str, Any]) -> str | None:
    """Why an update waits for the device without a notice of it, or has a notice and does not; None: all is well."""
    import torch

    from steadytrain.training import build
    from steadytrain.training.data import random_batch

    if str(changes.get("optim.name", "")) not in ("", "sgd", "nag"):
        changes = {"optim.lr": 1e-4, **changes}
    is_announced = False
    try:
        device, notes, trained = ours(job, "resnet20", 64, 32, 10, changes)
        update = trained.update
        is_announced = any("waits for the GPU once in each update" in note for note in notes)
        if "data.transforms" in changes:
            from steadytrain.models import Input

            given = Input(size=32, mean=(0.5,) * 3, std=(0.25,) * 3, channels=3)
            augmentation = build.augmentation(trained.recipe, given, 10, update.share.size, device)
            update = replace(update, augmentation=augmentation)
        batch = random_batch(64, update.image_shape, device, num_classes=10)
        for _ in range(3):
            update(trained.state, batch, 1e-4)
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        for _ in range(3):
            update(trained.state, batch, 1e-4)
            if trained.state.ema is not None:
                trained.state.ema.update(trained.state.module, 1)
        return "a notice says that updates wait, and they do not" if is_announced else None
    except Exception as error:  # noqa: BLE001 - the answer
        import traceback

        places = [f"{Path(f.filename).name}:{f.lineno}" for f in traceback.extract_tb(error.__traceback__)]
        if is_announced and any(place.startswith("grad_scaler.py") for place in places):
            return None
        return f"{type(error).__name__}: {str(error).splitlines()[0][:200]} ({' < '.join(places[:-5:-1])})"
    finally:
        if job.device == "cuda":
            torch.cuda.set_sync_debug_mode("default")


# --- compiled and recorded modes ------------------------------------------------------------------------------------


def modes(job: Job) -> dict[str, Any]:
    """Updates by each compile mode, in two passes where it takes them, end near those by torch's own kernels."""
    two = {"optim.accumulate": 2}
    cases: dict[str, dict[str, Any]] = {"once more": two}
    if job.device == "cuda":
        cases |= {
            "default": {"precision.compile": "default", **two},
            "tf32 default": {"precision.compile": "default", "precision.name": "tf32", **two},
            "graph": {"parallel.graph": True, **two},
            "cuda:0": {"parallel.device": "cuda:0", **two},
            "reduce-overhead": {"precision.compile": "reduce-overhead"},  # refused with several passes
            "max-autotune": {"precision.compile": "max-autotune"},  # takes longest
        }
    rows: dict[str, Any] = {}
    weights: dict[str, Any] = {}
    for name, changes in cases.items():
        if job.left < 8:
            rows[name] = {"left_out": "no time"}
            continue
        base = {key: value for key, value in changes.items() if key in ("optim.accumulate", "precision.name")}
        key = json.dumps(base)
        if key not in weights:
            weights[key], _ = after_updates(job, base)
        began = time.monotonic()
        try:
            value, notes = after_updates(job, changes)
            scale = max(float(np.abs(weights[key]).max()), 1e-9)
            off = float(np.abs(value - weights[key]).max()) / scale
            rows[name] = {"largest_difference": off, "notes": notes, "seconds": time.monotonic() - began}
        except Exception as error:  # noqa: BLE001 - told as this row's
            rows[name] = {"error": f"{type(error).__name__}: {str(error)[:400]}"}
        job.note({"rows": rows})
    bad = [name for name, row in rows.items() if "error" in row or row.get("largest_difference", 0) > 5e-2]
    refused = [name for name, row in rows.items() if any("cannot be" in note for note in row.get("notes", ()))]
    return {"rows": rows, "wrong": bad, "refused": refused, "passes": not bad and not refused}


def after_updates(job: Job, changes: Mapping[str, Any]) -> tuple[Any, list[str]]:
    """How four updates change the weights of a small network, all in one vector, and what was said."""
    import torch

    from steadytrain.training.compute.compile import compile_update, record_update
    from steadytrain.training.data import random_batch

    settings = {"precision.name": "fp32", "parallel.device": job.device, **changes}
    device, notes, trained = ours(job, "resnet20", 64, 32, 10, settings)
    update, _ = compile_update(trained.recipe, trained.update, trained.state, None, notes.append)
    update = record_update(trained.recipe, update, trained.state, None, notes.append)
    before = torch.cat([p.detach().flatten().clone() for p in trained.state.module.parameters()])
    batch = random_batch(64, update.image_shape, device, num_classes=10)
    for _ in range(5):
        update(trained.state, batch, 0.01)
    after = torch.cat([p.detach().flatten() for p in trained.state.module.parameters()])
    return (after - before).float().cpu().numpy(), notes


# --- ranks ----------------------------------------------------------------------------------------------------------


def ranks(job: Job) -> dict[str, Any]:
    """NCCL with a world of one: the updates of one process, each engine, synchronous batch norm; all ends by itself."""
    ways: dict[str, dict[str, Any]] = {
        "ddp": {},
        "fp16 hook": {"parallel.compress": "fp16"},
        "powersgd": {"parallel.compress": "powersgd"},
        "fsdp": {"parallel.shard": True},
        "synchronous": {"model.batch_norm": "synchronous"},
        "local": {"parallel.engine": "local"},
    }
    rows: dict[str, Any] = {}

    def asked(changes: Mapping[str, Any]) -> dict[str, Any]:
        words = [sys.executable, __file__, json.dumps({"device": job.device, "changes": changes})]
        done = child(words, job.folder, max(1.0, job.left - 2))
        return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {"error": done.stderr[-600:]}

    with ThreadPoolExecutor(1 if job.device == "cpu" else 3) as pool:  # each starts for longer than it trains
        for name, row in zip(ways, pool.map(asked, ways.values()), strict=True):
            rows[name] = row
            job.note({"rows": rows})
    return {"rows": rows, "passes": not any("error" in row for row in rows.values())}


def one_rank(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Some updates of a rank that is alone in its group, beside those of a process without one."""
    import socket

    import torch

    from steadytrain.config import Data, Model, Recipe
    from steadytrain.distributed.process_group import init_group
    from steadytrain.distributed.world import World
    from steadytrain.training.data import random_batch
    from steadytrain.training.device import prepare_device
    from steadytrain.training.profile.bench import set_up

    recipe = Recipe(data=Data(train="drawn"), model=Model("torchvision/resnet18"), batch_size=64).with_(
        {"parallel.device": asked["device"], **asked["changes"]}
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    figures: dict[str, Any] = {}
    world = World(rank=0, size=1, port=port)
    device = prepare_device(recipe, world)
    with init_group(world) as group:
        trained = set_up(recipe, device, [], size=64, num_classes=10, group=group)
        batch = random_batch(64, trained.update.image_shape, device, num_classes=10)
        for _ in range(3):
            trained.update(trained.state, batch, 0.01)
        figures["images_per_second"] = rate(
            device, lambda: trained.update(trained.state, batch, 1e-4), 64, 1.0 if device.type == "cuda" else 0.1
        )
        figures["backend"] = torch.distributed.get_backend() if torch.distributed.is_initialized() else None
        groups = torch.distributed.distributed_c10d._world.pg_map
        figures["groups"] = [str(torch.distributed.get_backend(group)) for group in groups]
        figures["loss_is_finite"] = bool(trained.state.meters.sums.isfinite().all())
        trained.state.engine.end_run()
        began = time.monotonic()
    figures["seconds_to_end"] = time.monotonic() - began
    return figures


# --- inference, small networks, tests -------------------------------------------------------------------------------


def inference(job: Job) -> dict[str, Any]:
    """``steady bench infer`` of ResNet-50 by torch's kernels, compiled, and ONNX Runtime."""
    network = "timm/resnet18" if job.quick else "timm/resnet50"
    batches = ["1", "4"] if job.quick else ["1", "32", "256"]
    words = [*STEADY, "bench", "infer", network, "--batch-size", *batches, "--device", job.device, "--json"]
    words += ["--seconds", "0.2" if job.quick else "1", "--precision", "fp32"]
    words += [] if job.device == "cpu" else ["bf16", "fp16"]
    words += ["--engines", "eager", "channels-last", *(["onnxruntime"] if job.quick else ["compile", "onnxruntime"])]
    done = child(words, job.folder, max(1.0, job.left - 2))
    document: dict[str, Any] = json.loads(done.stdout) if done.stdout.startswith("{") else {"error": done.stderr[-800:]}
    rows = [row for measured in document.get("networks", ()) for row in measured["engines"]]
    return {"document": document, "said": done.stderr[-500:], "passes": done.returncode == 0 and bool(rows)}


def small(job: Job) -> dict[str, Any]:
    """ResNet-20 on 32 pixels, bound by launching: eager, as a graph, compiled with graphs."""
    from steadytrain.config import Data, Model, Recipe
    from steadytrain.training.profile.bench import measure

    ways: dict[str, dict[str, Any]] = {"eager": {}}
    if job.device == "cuda":
        ways |= {"graph": {"parallel.graph": True}, "reduce-overhead": {"precision.compile": "reduce-overhead"}}
        ways |= {"graph compiled": {"parallel.graph": True, "precision.compile": "default"}}
    rows: dict[str, Any] = {}
    for name, changes in ways.items():
        recipe = Recipe(data=Data(train="drawn"), model=Model("resnet20"), batch_size=128).with_(
            {"parallel.device": job.device, "precision.name": job.numbers, **changes}
        )
        try:
            speed = measure(recipe, size=32, num_classes=10, seconds=0.2 if job.quick else 2.0)
            rows[name] = {"images_per_second": speed.images_per_second, "parts": speed.parts, "notes": speed.notes}
        except Exception as error:  # noqa: BLE001 - told as this row's
            rows[name] = {"error": f"{type(error).__name__}: {str(error)[:400]}"}
        job.note({"rows": rows})
    gain = rows.get("graph", rows["eager"]).get("images_per_second", 0) / rows["eager"]["images_per_second"]
    return {"rows": rows, "graph_over_eager": gain, "passes": job.device == "cpu" or job.quick or gain >= 3}


def tests(job: Job) -> dict[str, Any]:
    """The tests marked ``gpu``."""
    import xml.etree.ElementTree as ElementTree

    report = job.folder / "tests.xml"
    words = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", f"--junitxml={report}", "-q"]
    done = child([*words, str(PROJECT / "tests" / "gpu")], PROJECT, max(1.0, job.left - 2))
    if not report.exists():
        return {"passes": False, "error": (done.stdout + done.stderr)[-1500:]}
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    failed: dict[str, str] = {}
    for case in cases:
        part = case.find("failure")
        part = case.find("error") if part is None else part
        if part is not None:
            failed[str(case.get("name"))] = (part.text or part.get("message") or "")[-900:]
    return {"collected": len(cases), "failed": failed, "tail": done.stdout[-300:], "passes": not failed}


def commands(job: Job) -> dict[str, Any]:
    """What users type first, on the device that is chosen without a word: whether it ends well, and what it shows."""
    records, quick = str(packed(job)), job.quick
    network, size = ("resnet20", "32") if quick else ("timm/resnet50", "224")
    photo = next((path for path in PROJECT.glob("docs/**/*.png")), None)
    epochs = ["--epochs", "1" if quick else "3"]
    where = ["--device", "cpu"] if job.device == "cpu" else []
    seconds = ["--seconds", "0.5" if quick else "4"]
    first = ["train", records, "--run", "first", "--model", network, "--size", size, *epochs, *where]
    after = {
        "evaluate": ["evaluate", "first", records, *where],
        "predict": ["predict", "first", str(photo), *where],
        "report": ["report", "first"],
        "diagnose": ["diagnose", "first"],
        "export": ["export", "first", "--output", "first.pt2"],
        "finetune": [
            "finetune",
            records,
            "--run",
            "tuned",
            "--weights",
            "first/model.safetensors",
            "--epochs",
            "1",
            *where,
        ],
        "small images": ["train", records, "--run", "small", "--model", "resnet20", "--size", "32", *epochs, *where],
        "batch by measuring": ["train", records, "--run", "auto", "--batch-size", "auto", "--epochs", "1", *where],
        "tune": ["tune", records, "--minutes", "0.2" if quick else "0.6", "--output", "tuned.toml", *where],
        "bench": ["bench", "train", "--model", network, "--size", size, *seconds, *where],
        "bandwidth": ["bandwidth", *seconds],
        "scale": ["scale", "--model", network, "--size", size, "--link", "10GbE", *seconds, *where],
    }
    if job.device == "cuda":
        large = ["--run", "large", "--batch-size", "2048", "--set", "budget.steps=3"]
        after["too large a batch"] = ["train", records, "--model", network, "--size", size, *large]
        after["no such GPU"] = ["train", records, "--run", "absent", "--device", "cuda:7"]
    done = {"train": child([*STEADY, *first], job.folder, min(job.left, 60))}
    rows: dict[str, Any] = {}
    with ThreadPoolExecutor(1 if quick else 5) as pool:
        run = {name: [*STEADY, *words] for name, words in after.items()}
        answers = {name: pool.submit(child, words, job.folder, job.left - 2) for name, words in run.items()}
        for name in ("train", *after):
            answer = done.get(name) or answers[name].result()
            rows[name] = {"rc": answer.returncode, "shown": answer.stdout[-4000:], "errors": answer.stderr[-3000:]}
            job.note({"rows": rows})
    expected = {"no such GPU": 2}
    wrong = {name: row["rc"] for name, row in rows.items() if row["rc"] != expected.get(name, 0)}
    return {"rows": rows, "wrong": wrong, "passes": not wrong}


# --- what steps share -----------------------------------------------------------------------------------------------


def child(words: Sequence[str], folder: Path, seconds: float) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder, for so long at most; what it leaves running is killed."""
    paths = [str(PROJECT / "src"), str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "STEADYTRAIN_CACHE": str(folder / "cache")}
    with started(words, cwd=folder, env=environment, stderr=subprocess.PIPE) as process:
        try:
            out, errors = process.communicate(timeout=max(1.0, seconds))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, errors = process.communicate()
            errors += f"\nended after {seconds:.0f} s"
    return subprocess.CompletedProcess(list(words), process.returncode, out, errors)


def packed(job: Job) -> Path:
    """A record file of photographs of ten classes, 256 pixels on the shorter side; drawn ones without data.

    The first step that needs it makes it; steps beside it wait.
    """
    import fcntl

    from PIL import Image

    from steadytrain.data.packing.pack import pack

    count, target = 200 if job.quick else 2000, job.folder.parent / "photos.rec"
    with (job.folder.parent / "photos.lock").open("w") as lock, tempfile.TemporaryDirectory(dir=job.folder) as folder:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.exists():
            return target
        draw = np.random.default_rng(0)
        photos = list(photographs(job.data, Path(folder) / "from")) if job.data else []
        place = Path(folder) / "images"
        for k in range(count):
            to = place / f"class{k % 10}" / f"{k}.jpg"
            to.parent.mkdir(parents=True, exist_ok=True)
            if photos:
                os.link(photos[k % len(photos)], to)
            else:
                small = Image.fromarray(draw.integers(0, 256, (16, 16, 3), dtype=np.uint8))
                small.resize((96, 96) if job.quick else (400, 400), Image.Resampling.BICUBIC).save(to, quality=90)
        pack(place, target.with_suffix(""), shorter_side=256)
    return target


def photographs(archive: Path, folder: Path) -> Iterator[Path]:
    """Unpack an archive of JPEG files."""
    import tarfile

    folder.mkdir()
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    yield from sorted(path for path in folder.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg"))


STEPS: dict[str, tuple[Step, float]] = {
    "card": (card, 25),
    "telemetry": (telemetry, 20),
    "waits": (waits, 45),
    "tests": (tests, 75),
    "startup": (startup, 70),
    "ledger": (ledger, 60),
    "updates": (updates, 150),
    "resumed": (resumed, 60),
    "feed": (feed, 60),
    "memory": (memory, 45),
    "ranks": (ranks, 75),
    "small": (small, 45),
    "verdicts": (verdicts, 80),
    "inference": (inference, 50),
    "modes": (modes, 90),
    "commands": (commands, 150),
}
"""Name -> the step, and the seconds that it has."""

WITHOUT_TIMES = ("waits", "tests", "resumed", "memory", "ranks", "modes", "commands")
"""Steps whose answers do not depend on how busy the GPU is: they run side by side."""

WITHOUT_VALUES = ("waits",)
"""Steps that a pretended GPU can take, since what they ask needs neither values nor times."""


if __name__ == "__main__":
    print(json.dumps(one_rank(json.loads(sys.argv[1]))))
