"""The asynchronous engine beside ``ddp`` and MXNet 1.9.1's ``dist_async``, and all with one worker at half its speed.

ResNet-20 on CIFAR-10 from its images, after the same samples: the same batch, crops and mirroring, SGD with momentum,
weight decay of all but norms and biases, half a cosine over the updates of all workers. An update is made of one batch:
of one worker's push in ``async`` and ``dist_async``, of both ranks' halves in ``ddp``. Contenders take turns, and each
round begins with another one:

- ``async_1``, ``async_2``: ``steady train --engine async --workers 2`` with one server and with two;
- ``async_bf16``: with one, and pushes of 16 bits; ``dcasgd``: with one, and delay compensation (momentum 0.9);
- ``ddp``: ``steady train --procs 2``;
- ``mxnet_1``, ``mxnet_2``: two workers of ``dist_async``, with one server and with two;
- ``..._slowed``: the second worker is stopped half of the time (SIGSTOP and SIGCONT, a tenth of a second each).

``images_per_second``: of all workers, without start-up and the first updates; ``top1``: of the held-out images with
the final weights; ``exchanged_bytes_per_second``: pushed and pulled, by the number of parameters where the contender
does not tell; ``staleness``: updates between pull and push, mean and largest, where it is told.

usage: python benchmarks/async_engine.py --data FOLDER [--rounds 3] [--steps 780] [--images 10000]
                                         [--mxnet-python PATH] [--work FOLDER] [--quick] [--save]
       FOLDER holds cifar10-png.tar.zst; the Python of MXNet 1.9.1 may be given as STEADYTRAIN_MXNET_PYTHON as well
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import psutil

import machine
from engine_overhead import rounded
from peers.scale_contenders import HERE, MOST_SECONDS, SERVE, ContenderError, Work, settings
from scale import lack, prepare, say
from steadytrain.events import Evaluated, ServerStats, Started, Step
from steadytrain.launch.supervise import free_port
from steadytrain.run import Run

WORKERS, BATCH = 2, 128
SLICE_SECONDS = 0.1


@dataclass(frozen=True, kw_only=True)
class Told:
    """How one turn went: see the head of the file."""

    images_per_second: float
    right: int
    exchanged_bytes_per_second: float
    staleness: tuple[float, int] | None = None
    seconds: float = 0.0


def ours(work: Work, folder: Path, *words: str, slowed: bool = False) -> Told:
    """``steady train`` with two workers, or two ranks."""
    run = folder / "run"
    command = [sys.executable, "-m", "steadytrain", "train", f"{work.images}-train.rec"]
    command += ["--val", f"{work.images}-val.rec", "--model", "resnet20", "--batch-size", str(work.batch)]
    command += ["--seed", str(work.seed), "--run", str(run), *words]
    for key, value in settings(work).items():
        command += ["--set", f"{key}={json.dumps(value)}"]
    with _running([(command, {})]) as (child,), _slowed(partial(_second_worker, child.pid), slowed):
        _wait([child])
    events = list(Run.open(run).events())
    steps = [event for event in events if isinstance(event, Step) and event.step >= WORKERS * work.warm]
    evaluated = [event for event in events if isinstance(event, Evaluated)][-1]
    parameters = next(event for event in events if isinstance(event, Started)).model["parameters"]
    seconds, updates = steps[-1].time - steps[0].time, steps[-1].step - steps[0].step
    stats = [
        event
        for rank in range(WORKERS if "async" in words else 0)
        for event in Run.open(run).events(rank)
        if isinstance(event, ServerStats) and event.pushes
    ]
    moved, staleness = 8.0 * parameters * updates * (1 if stats else WORKERS), None
    if stats:
        pushes = sum(event.pushes for event in stats)
        both = ("pushed_bytes", "pulled_bytes")
        each = sum(server[name] for event in stats for server in event.servers for name in both) / pushes
        moved = each * updates
        mean = sum(event.staleness * event.pushes for event in stats) / pushes
        staleness = (mean, max(event.staleness_max for event in stats))
    return Told(
        images_per_second=work.batch * updates / seconds,
        right=round(evaluated.top1 * evaluated.n),
        exchanged_bytes_per_second=moved / seconds,
        staleness=staleness,
    )


def mxnet(work: Work, folder: Path, *, servers: int, python: str, slowed: bool = False) -> Told:
    """``dist_async``: a scheduler, servers and two workers, as its local tracker starts them."""
    variables = {
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_PS_ROOT_PORT": str(free_port()),
        "DMLC_NODE_HOST": "127.0.0.1",
        "DMLC_NUM_WORKER": str(WORKERS),
        "DMLC_NUM_SERVER": str(servers),
        "MXNET_SUBGRAPH_BACKEND": "NONE",
        "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // WORKERS)),
    }
    worker = [python, str(HERE / "async_mxnet.py"), json.dumps(asdict(work))]
    roles = ["scheduler", *["server"] * servers]
    commands = [([python, "-c", SERVE], {**variables, "DMLC_ROLE": role}) for role in roles]
    commands += [(worker, {**variables, "DMLC_ROLE": "worker"})] * WORKERS
    with _running(commands) as children, _slowed(lambda: children[-1].pid, slowed):
        answers = [json.loads(line) for line in _wait(children[-WORKERS:])]
    seconds, updates = max(answer["seconds"] for answer in answers), sum(answer["updates"] for answer in answers)
    return Told(
        images_per_second=work.batch * updates / seconds,
        right=next(answer["right"] for answer in answers if "right" in answer),
        exchanged_bytes_per_second=8 * answers[0]["parameters"] * updates / seconds,
    )


def _second_worker(pid: int) -> int | None:
    """The process of the second worker or rank, once it is there."""
    for child in psutil.Process(pid).children():
        if child.environ().get("RANK") == "1":
            return int(child.pid)
    return None


@contextmanager
def _slowed(find: Callable[[], int | None], slowed: bool) -> Iterator[None]:
    """Stop a process half of the time while the block runs."""
    is_over = threading.Event()

    def stop_and_go() -> None:
        while not is_over.wait(SLICE_SECONDS):
            try:
                if (pid := find()) is not None:
                    os.kill(pid, signal.SIGSTOP)
                    time.sleep(SLICE_SECONDS)
                    os.kill(pid, signal.SIGCONT)
            except (psutil.Error, ProcessLookupError):
                pass

    thread = threading.Thread(target=stop_and_go)
    if slowed:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        if slowed:
            thread.join()


@contextmanager
def _running(commands: list[tuple[list[str], dict[str, str]]]) -> Iterator[list[subprocess.Popen[bytes]]]:
    inherited = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    children: list[subprocess.Popen[bytes]] = []
    try:
        for command, variables in commands:
            out, errors = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
            child = subprocess.Popen(
                command, env={**inherited, **variables}, stdin=subprocess.DEVNULL, stdout=out, stderr=errors
            )
            child.files = out, errors  # type: ignore[attr-defined]
            children.append(child)
        yield children
    finally:
        for child in children:
            child.kill()
            child.wait()


def _wait(children: list[subprocess.Popen[bytes]]) -> list[str]:
    """The last line of each one's output, when all have ended well."""
    until = time.monotonic() + MOST_SECONDS
    lines = []
    for child in children:
        try:
            child.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired as error:
            raise ContenderError(f"it did not end within {MOST_SECONDS:.0f} s") from error
        out, errors = child.files  # type: ignore[attr-defined]
        out.seek(0)
        errors.seek(0)
        if child.returncode:
            raise ContenderError(f"it ended with {child.returncode}: {errors.read().decode()[-2000:]}")
        lines.append((out.read().decode().splitlines() or [""])[-1])
    return lines


def contenders(python: str | None) -> tuple[dict[str, Callable[[Work, Path], Told]], dict[str, str]]:
    """Who takes part; and who does not, and why."""
    two = ("--engine", "async", "--workers", str(WORKERS))
    who: dict[str, Callable[[Work, Path], Told]] = {
        "async_1": lambda work, folder: ours(work, folder, *two),
        "async_2": lambda work, folder: ours(work, folder, *two, "--servers", "2"),
        "async_bf16": lambda work, folder: ours(work, folder, *two, "--set", "parallel.compress=bf16"),
        "dcasgd": lambda work, folder: ours(
            work, folder, *two, "--optimizer", "dcasgd", "--set", 'optim.options={"momentum": 0.9}'
        ),
        "ddp": lambda work, folder: ours(work, folder, "--procs", str(WORKERS)),
        "async_1_slowed": lambda work, folder: ours(work, folder, *two, slowed=True),
        "ddp_slowed": lambda work, folder: ours(work, folder, "--procs", str(WORKERS), slowed=True),
    }
    if why := lack(python):
        return who, {"mxnet": why}
    assert python is not None
    who |= {f"mxnet_{count}": partial(mxnet, servers=count, python=python) for count in (1, 2)}
    who["mxnet_1_slowed"] = partial(mxnet, servers=1, python=python, slowed=True)
    return who, {}


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All figures, medians over the rounds."""
    who, skipped = contenders(args.mxnet_python)
    who = {name: one for name, one in who.items() if not args.only or name in args.only}
    images = prepare(args.data / "cifar10-png.tar.zst", folder, args.images, args.val)
    work = Work(images=images, batch=BATCH, steps=args.steps)
    turns: dict[str, list[Told]] = {name: [] for name in who}
    failed: dict[str, str] = {}
    names = list(who)
    for number in range(args.rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            began = time.perf_counter()
            try:
                with tempfile.TemporaryDirectory() as place:
                    told = who[name](replace(work, seed=number), Path(place))
            except ContenderError as error:
                failed[name] = f"round {number + 1}: {error.reason}"
                say(f"round {number + 1}  {name}: FAILED {error}")
                continue
            turns[name].append(replace(told, seconds=time.perf_counter() - began))
            say(f"round {number + 1}  {name:16} {told.images_per_second:7.1f} images/s, {told.right} right")
    return {
        "rounds": args.rounds,
        "batch": BATCH,
        "updates": args.steps,
        "train_images": args.images,
        "val_images": args.val,
        "workers": WORKERS,
        "contenders": rounded({name: summary(told, args.val) for name, told in turns.items() if told}, 4),
        "skipped": skipped,
        "failed": failed,
    }


def summary(turns: list[Told], num_val: int) -> dict[str, Any]:
    """What one contender did."""
    stale = [one.staleness for one in turns if one.staleness is not None]
    return {
        "images_per_second": median(one.images_per_second for one in turns),
        "top1": median(one.right / num_val for one in turns),
        "exchanged_bytes_per_second": median(one.exchanged_bytes_per_second for one in turns),
        "staleness_mean": median(mean for mean, _ in stale) if stale else None,
        "staleness_max": max(most for _, most in stale) if stale else None,
        "seconds": median(one.seconds for one in turns),
        "all_rounds": {
            "images_per_second": [one.images_per_second for one in turns],
            "top1": [one.right / num_val for one in turns],
        },
    }


def main() -> None:
    """Measure, print, perhaps save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=os.environ.get("STEADYTRAIN_TEST_DATA"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=780, help=f"updates of {BATCH} images")
    parser.add_argument("--images", type=int, default=10_000, help="to train on, of 50,000")
    parser.add_argument("--val", type=int, default=2000, help="to evaluate on, of 10,000")
    parser.add_argument("--only", nargs="*", help="these contenders")
    parser.add_argument("--mxnet-python", default=os.environ.get("STEADYTRAIN_MXNET_PYTHON"))
    parser.add_argument("--work", type=Path, help="where the images are kept, packed and decoded (default: nowhere)")
    parser.add_argument("--quick", action="store_true", help="one short round: shows that it works, and nothing else")
    parser.add_argument("--save", action="store_true", help="also write benchmarks/results/async_engine.json")
    args = parser.parse_args()
    if args.data is None:
        parser.error("give --data, the folder that holds cifar10-png.tar.zst")
    args.data = Path(args.data)
    if args.quick:
        args.rounds, args.steps, args.images, args.val = 1, 40, 2560, 500
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.work or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        machine.record("async_engine", measure(args, folder.resolve()), save=args.save)


if __name__ == "__main__":
    main()
