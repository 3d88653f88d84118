"""Who trains the same network on the same images: ours, bare DistributedDataParallel, MXNet's parameter server."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any

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
        """What may be published."""
        return re.sub(r"\S*/", "", str(self).strip().splitlines()[-1])


@dataclass(frozen=True, kw_only=True)
class Work:
    """What all of them do.

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
    """How one of them did it.

    ``step_seconds``: wall clock of an update, whatever is between two of them included; ``right``: images of the
    validation that were classified right; ``seconds`` of the whole command, ``cpu_seconds`` of all its processes;
    ``loopback_bytes``: what this machine sent to itself meanwhile.
    """

    step_seconds: float
    right: int
    parameters: int
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    loopback_bytes: int = 0


def steadytrain(work: Work, folder: Path, procs: int, cores: set[int] | None = None) -> Told:
    """``steady train``, as so many processes; ``cores``: on these only."""
    run = folder / "run"
    words = [sys.executable, "-m", "steadytrain", "train"]
    words += [f"{work.images}-train.rec", "--val", f"{work.images}-val.rec"]
    words += ["--model", "resnet20", "--batch-size", str(work.batch), "--seed", str(work.seed), "--run", str(run)]
    words += ["--procs", str(procs)] if procs > 1 else []
    for key, value in settings(work).items():
        words += ["--set", f"{key}={json.dumps(value)}"]
    with _processes([(words, {})], cores) as started:
        _answers(started)
    events = list(Run.open(run).events())
    steps = [event for event in events if isinstance(event, Step) and event.step >= work.warm]
    held_out = [event for event in events if isinstance(event, Evaluated)][-1]
    return Told(
        step_seconds=(steps[-1].time - steps[0].time) / (len(steps) - 1),
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
        "data.mean": [round(float(one), 4) for one in MEAN],
        "data.std": [round(float(one), 4) for one in STD],
        "every.evaluate_epochs": 10_000,  # one always ends the run
    }


def ddp(work: Work, folder: Path, ranks: int) -> Told:
    """A bare script over gloo, each rank with its share of the cores."""
    threads = max(1, len(os.sched_getaffinity(0)) // ranks)
    job = json.dumps(asdict(work) | {"threads": threads})
    command, port = [sys.executable, str(HERE / "scale_ddp.py"), job], free_port()
    with _processes([(command, rank_variables(rank, ranks, port)) for rank in range(ranks)]) as started:
        return _told(_answers(started))


def mxnet(work: Work, folder: Path, ranks: int, python: str) -> Told:
    """``dist_sync``: a scheduler, a server and workers, as its local tracker starts them."""
    told = {
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_PS_ROOT_PORT": str(free_port()),
        "DMLC_NODE_HOST": "127.0.0.1",
        "DMLC_NUM_WORKER": str(ranks),
        "DMLC_NUM_SERVER": "1",
        "MXNET_SUBGRAPH_BACKEND": "NONE",
        "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // ranks)),
    }
    worker = [python, str(HERE / "scale_mxnet.py"), json.dumps(asdict(work))]
    nodes = [([python, "-c", SERVE], told | {"DMLC_ROLE": role}) for role in ("scheduler", "server")]
    workers = [(worker, told | {"DMLC_ROLE": "worker"})] * ranks
    with _processes(nodes + workers) as started:
        return _told(_answers(started[2:]))


def measured(contender: Callable[[Path], Told]) -> Told:
    """One turn of a contender in a folder of its own, and what it took of the machine."""
    with tempfile.TemporaryDirectory() as folder:
        bytes_before, cpu_before, began = _loopback_bytes(), _cpu_seconds(), time.perf_counter()
        told = contender(Path(folder))
        return replace(
            told,
            seconds=time.perf_counter() - began,
            cpu_seconds=_cpu_seconds() - cpu_before,
            loopback_bytes=_loopback_bytes() - bytes_before,
        )


@dataclass(frozen=True)
class _Process:
    process: subprocess.Popen[bytes]
    out: IO[bytes]
    errors: IO[bytes]


def _answers(started: Sequence[_Process]) -> list[str]:
    """The last line of each one's output, when all have ended well."""
    until = time.monotonic() + MOST_SECONDS
    while any(one.process.poll() is None for one in started):
        time.sleep(0.05)
        if any(one.process.poll() for one in started):
            break
        if time.monotonic() > until:
            raise ContenderError(f"it did not end within {MOST_SECONDS:.0f} s")
    return [_last_line(one) for one in started]


def _last_line(one: _Process) -> str:
    for file in (one.out, one.errors):
        file.seek(0)
    if one.process.poll():
        raise ContenderError(f"it ended with {one.process.returncode}: {one.errors.read().decode()[-2000:]}")
    lines = one.out.read().decode().splitlines()
    return lines[-1] if lines else ""


@contextmanager
def _processes(
    commands: Sequence[tuple[Sequence[str], Mapping[str, str]]], cores: set[int] | None = None
) -> Iterator[list[_Process]]:
    """Commands with their variables, running, and killed at the end. Each finds its own number of threads."""
    inherited = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    with ExitStack() as stack:
        started = []
        for command, told in commands:
            out, errors = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(2))
            process = subprocess.Popen(
                command, env={**inherited, **told}, stdin=subprocess.DEVNULL, stdout=out, stderr=errors
            )
            stack.callback(process.wait)
            stack.callback(process.kill)  # before it is waited for
            if cores is not None:
                os.sched_setaffinity(process.pid, cores)
            started.append(_Process(process, out, errors))
        yield started


def _told(lines: Sequence[str]) -> Told:
    """What the one rank says that speaks."""
    (line,) = filter(None, lines)
    told = json.loads(line)
    return Told(**told)


def _loopback_bytes() -> int:
    """Sent so far; 0 where the system does not tell."""
    counter = Path("/sys/class/net/lo/statistics/tx_bytes")
    return int(counter.read_text(encoding="ascii")) if counter.exists() else 0


def _cpu_seconds() -> float:
    """Of all processes that this one has started and waited for, and theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
