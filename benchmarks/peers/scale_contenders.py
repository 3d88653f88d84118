"""Who trains the same network on the same images: ours, bare DistributedDataParallel, MXNet's parameter server."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any

from machine import cpu_seconds
from peers.scale_images import MEAN, STD
from steadytrain.events import Evaluated, Started, Step
from steadytrain.launch.supervise import free_port, rank_variables
from steadytrain.run import Run

HERE = Path(__file__).resolve().parent
SERVE = "import os; os.dup2(2, 1); import mxnet"  # a server and a scheduler serve while they are imported
MOST_SECONDS = 1200.0


class ContenderError(Exception):
    """A contender failed; its text is what it said last, ``reason`` the last line of that without any path."""

    @property
    def reason(self) -> str:
        """The part of the message that may be published."""
        return re.sub(r"\S*/", "", str(self).strip().splitlines()[-1])


@dataclass(frozen=True, kw_only=True)
class Work:
    """The training that all contenders do.

    Args:
        images: ``IMAGES-train.rec`` and ``IMAGES-val.rec``, packed as a user would, for ours, and the same images
            decoded, ``IMAGES-train.npy`` and so on, for the peers.
        batch: images of an update, over all processes.
        steps: updates, of which the first ``warm`` are not timed.
        seed: of initialisation, order and crops.
    """

    images: str
    batch: int
    steps: int
    seed: int = 0
    warm: int = 5
    lr: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 5e-4


@dataclass(frozen=True, kw_only=True)
class Told:
    """The result of a contender.

    ``step_seconds``: wall clock of an update, whatever is between two of them included; ``right``: images of the
    validation that were classified right; ``seconds`` of the whole command, ``cpu_seconds`` of all its processes;
    ``loopback_bytes``: what this machine sent to itself meanwhile; ``exchanged_bytes``: pushed and pulled in an update,
    and ``staleness``: of pushes, mean and largest, where the contender tells it.
    """

    step_seconds: float
    right: int
    parameters: int
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    loopback_bytes: int = 0
    exchanged_bytes: float | None = None
    staleness: tuple[float, int] | None = None


@dataclass(frozen=True)
class Process:
    """A process of a contender, with what it writes."""

    process: subprocess.Popen[bytes]
    out: IO[bytes]
    errors: IO[bytes]


def steadytrain(work: Work, folder: Path, procs: int, cores: set[int] | None = None) -> Told:
    """Run ``steady train`` by so many processes; ``cores``: on these only."""
    with processes(
        [(train_command(work, folder / "run", *(("--procs", str(procs)) if procs > 1 else ())), {})], cores
    ) as started:
        answers(started)
    return told_by(Run.open(folder / "run"), work.warm)


def train_command(work: Work, run: Path, *words: str) -> list[str]:
    """Return the ``steady train`` of the work into a run's folder."""
    command = [sys.executable, "-m", "steadytrain", "train"]
    command += [f"{work.images}-train.rec", "--val", f"{work.images}-val.rec"]
    command += ["--model", "resnet20", "--batch-size", str(work.batch), "--seed", str(work.seed), "--run", str(run)]
    for key, value in settings(work).items():
        command += ["--set", f"{key}={json.dumps(value)}"]
    return [*command, *words]


def told_by(run: Run, warm: int) -> Told:
    """Return the result of a run by its events, without the first ``warm`` updates."""
    events = list(run.events())
    steps = [event for event in events if isinstance(event, Step) and event.step >= warm]
    held_out = [event for event in events if isinstance(event, Evaluated)][-1]
    return Told(
        step_seconds=(steps[-1].time - steps[0].time) / (steps[-1].step - steps[0].step),
        right=round(held_out.top1 * held_out.n),
        parameters=next(event for event in events if isinstance(event, Started)).model["parameters"],
    )


def settings(work: Work) -> dict[str, Any]:
    return {
        "budget.steps": work.steps,
        "optim.lr": work.lr,
        "optim.base_batch_size": None,
        "optim.momentum": work.momentum,
        "optim.nesterov": False,
        "optim.weight_decay": work.weight_decay,
        "optim.warmup_epochs": 0,
        "data.mean": [round(float(value), 4) for value in MEAN],
        "data.std": [round(float(value), 4) for value in STD],
        "every.evaluate_epochs": 10_000,  # one always ends the run
    }


def ddp(work: Work, folder: Path, ranks: int) -> Told:
    """Run a bare script over gloo, each rank with its share of the cores."""
    threads = max(1, len(os.sched_getaffinity(0)) // ranks)
    job = json.dumps(asdict(work) | {"threads": threads})
    command, port = [sys.executable, str(HERE / "scale_ddp.py"), job], free_port()
    with processes([(command, rank_variables(rank, ranks, port)) for rank in range(ranks)]) as started:
        (line,) = filter(None, answers(started))  # of the one rank that speaks
    return Told(**json.loads(line))


@contextmanager
def no_watch(started: Sequence[Process]) -> Iterator[None]:
    """Do nothing while a contender works."""
    yield


def mxnet(
    work: Work,
    folder: Path,
    ranks: int,
    python: str,
    *,
    store: str = "dist_sync",
    servers: int = 1,
    meanwhile: Callable[[Sequence[Process]], AbstractContextManager[None]] = no_watch,
) -> Told:
    """Run a kvstore's scheduler, servers and workers, as its local tracker starts them."""
    variables = {
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_PS_ROOT_PORT": str(free_port()),
        "DMLC_NODE_HOST": "127.0.0.1",
        "DMLC_NUM_WORKER": str(ranks),
        "DMLC_NUM_SERVER": str(servers),
        "MXNET_SUBGRAPH_BACKEND": "NONE",
        "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // ranks)),
    }
    worker = [python, str(HERE / "scale_mxnet.py"), json.dumps(asdict(work) | {"store": store})]
    roles = ["scheduler", *["server"] * servers]
    nodes = [([python, "-c", SERVE], variables | {"DMLC_ROLE": role}) for role in roles]
    workers = [(worker, variables | {"DMLC_ROLE": "worker"})] * ranks
    with processes(nodes + workers) as started, meanwhile(started[len(nodes) :]):
        lines = [json.loads(line) for line in answers(started[len(nodes) :])]
    updates = [line["updates"] for line in lines]
    return Told(
        step_seconds=max(line["seconds"] for line in lines) / (updates[0] if store == "dist_sync" else sum(updates)),
        right=next(line["right"] for line in lines if "right" in line),
        parameters=lines[0]["parameters"],
    )


def measured(contender: Callable[[Path], Told]) -> Told:
    """Give a contender one turn in a folder of its own, and measure what it took of the machine."""
    with tempfile.TemporaryDirectory() as folder:
        bytes_before, cpu_before, began = _loopback_bytes(), cpu_seconds(), time.perf_counter()
        commands = contender(Path(folder))
        return replace(
            commands,
            seconds=time.perf_counter() - began,
            cpu_seconds=cpu_seconds() - cpu_before,
            loopback_bytes=_loopback_bytes() - bytes_before,
        )


def answers(started: Sequence[Process]) -> list[str]:
    """Return the last line of each one's output, when all have ended well."""
    until = time.monotonic() + MOST_SECONDS
    while any(running.process.poll() is None for running in started):
        time.sleep(0.05)
        if any(running.process.poll() for running in started):
            break
        if time.monotonic() > until:
            raise ContenderError(f"it did not end within {MOST_SECONDS:.0f} s")
    return [_last_line(running) for running in started]


def _last_line(process: Process) -> str:
    for file in (process.out, process.errors):
        file.seek(0)
    if process.process.poll():
        raise ContenderError(f"it ended with {process.process.returncode}: {process.errors.read().decode()[-2000:]}")
    lines = process.out.read().decode().splitlines()
    return lines[-1] if lines else ""


@contextmanager
def processes(
    commands: Sequence[tuple[Sequence[str], Mapping[str, str]]], cores: set[int] | None = None
) -> Iterator[list[Process]]:
    """Run commands with their variables, and kill them at the end. Each finds its own number of threads."""
    inherited = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    with ExitStack() as stack:
        started = []
        for command, variables in commands:
            out, errors = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(2))
            process = subprocess.Popen(
                command, env={**inherited, **variables}, stdin=subprocess.DEVNULL, stdout=out, stderr=errors
            )
            stack.callback(process.wait)
            stack.callback(process.kill)  # before it is waited for
            if cores is not None:
                os.sched_setaffinity(process.pid, cores)
            started.append(Process(process, out, errors))
        yield started


def _loopback_bytes() -> int:
    """Return the bytes sent so far; 0 where the system does not tell."""
    counter = Path("/sys/class/net/lo/statistics/tx_bytes")
    return int(counter.read_text(encoding="ascii")) if counter.exists() else 0
