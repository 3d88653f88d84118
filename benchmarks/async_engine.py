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
does not say; ``staleness``: updates between pull and push, mean and largest, where the contender says it.

usage: python benchmarks/async_engine.py --data FOLDER [--rounds 3] [--steps 780] [--images 10000] [--lr 0.1]
                                         [--mxnet-python PATH] [--work FOLDER] [--quick] [--save]
       FOLDER holds cifar10-png.tar.zst; the Python of MXNet 1.9.1 may be given as STEADYTRAIN_MXNET_PYTHON as well;
       figures of another rate than 0.1 have a file of their own, such as results/async_engine_lr_0.02.json
"""

from __future__ import annotations

import argparse
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from machine import rounded
from peers.scale_contenders import Process, Told, Work, answers, mxnet, no_watch, processes, told_by, train_command
from scale import BATCH, Contender, arguments, lack, measure_and_record, prepare, rounds_of
from steadytrain.events import ServerStats
from steadytrain.run import Run

WORKERS = 2
SLICE_SECONDS = 0.1


def ours(work: Work, folder: Path, *words: str, slowed: bool = False) -> Told:
    """Run ``steady train`` with two workers, or two ranks."""
    run = folder / "run"
    with processes([(train_command(work, run, *words), {})]) as started, ExitStack() as stack:
        if slowed:
            stack.enter_context(stop_and_go(partial(second_worker, started[0].process.pid)))
        answers(started)
    taken = told_by(Run.open(run), WORKERS * work.warm)
    ranks = range(WORKERS if "async" in words else 0)
    events = [event for rank in ranks for event in Run.open(run).events(rank) if isinstance(event, ServerStats)]
    pushes = sum(event.pushes for event in events)
    if not pushes:  # both ranks give and get all gradients
        return replace(taken, exchanged_bytes=8.0 * taken.parameters * WORKERS)
    mean = sum(event.staleness * event.pushes for event in events) / pushes
    return replace(
        taken,
        exchanged_bytes=sum(
            server["pushed_bytes"] + server["pulled_bytes"] for event in events for server in event.servers
        )
        / pushes,
        staleness=(mean, max(event.staleness_max for event in events)),
    )


def dist_async(work: Work, folder: Path, *, servers: int, python: str, slowed: bool = False) -> Told:
    """Run MXNet, whose pushes and pulls are all parameters in 32 bits."""

    @contextmanager
    def slow_the_last(workers: Sequence[Process]) -> Iterator[None]:
        with stop_and_go(lambda: workers[-1].process.pid):
            yield

    watch = slow_the_last if slowed else no_watch
    answer = mxnet(work, folder, WORKERS, python, store="dist_async", servers=servers, meanwhile=watch)
    return replace(answer, exchanged_bytes=8.0 * answer.parameters)


def second_worker(pid: int) -> int | None:
    """Return the process of the second worker or rank, once it is there."""
    for child in psutil.Process(pid).children():
        with suppress(psutil.Error):
            if child.environ().get("RANK") == "1":
                return int(child.pid)
    return None


@contextmanager
def stop_and_go(find: Callable[[], int | None]) -> Iterator[None]:
    """Stop a process half of the time while the block runs."""
    is_over = threading.Event()

    def repeat() -> None:
        while not is_over.wait(SLICE_SECONDS):
            with suppress(psutil.Error, ProcessLookupError):
                if (pid := find()) is not None:
                    os.kill(pid, signal.SIGSTOP)
                    time.sleep(SLICE_SECONDS)
                    os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def contenders(python: str | None) -> tuple[dict[str, Contender], dict[str, str]]:
    """Return the contenders; and those that cannot take part, with the reason."""
    two = ("--engine", "async", "--workers", str(WORKERS))
    ddp = ("--procs", str(WORKERS))

    def of(*words: str, slowed: bool = False) -> Contender:
        return lambda work, folder: ours(work, folder, *words, slowed=slowed)

    contenders = {
        "async_1": of(*two),
        "async_bf16": of(*two, "--set", "parallel.compress=bf16"),
        "dcasgd": of(*two, "--optimizer", "dcasgd", "--set", 'optim.options={"momentum": 0.9}'),
        "ddp": of(*ddp),
        "async_1_slowed": of(*two, slowed=True),
        "ddp_slowed": of(*ddp, slowed=True),
    }
    why = lack(python)
    if python is None or why:
        return contenders, {"mxnet": why}
    contenders |= {f"mxnet_{count}": partial(dist_async, servers=count, python=python) for count in (1, 2)}
    contenders["mxnet_1_slowed"] = partial(dist_async, servers=1, python=python, slowed=True)
    return contenders, {}


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure all contenders; figures are medians over the rounds."""
    who, skipped = contenders(args.mxnet_python)
    who = {name: contender for name, contender in who.items() if not args.only or name in args.only}
    images = prepare(args.data / "cifar10-png.tar.zst", folder, args.images, args.val)
    work = Work(images=images, batch=BATCH, steps=args.steps, lr=args.lr)
    turns, failed = rounds_of(who, work, args.rounds)
    return {
        "rounds": args.rounds,
        "batch": BATCH,
        "updates": args.steps,
        "lr": args.lr,
        "train_images": args.images,
        "val_images": args.val,
        "workers": WORKERS,
        "contenders": rounded(
            {name: summary(of_contender, work, args.val) for name, of_contender in turns.items() if of_contender}, 4
        ),
        "skipped": skipped,
        "failed": failed,
    }


def summary(turns: list[Told], work: Work, num_val: int) -> dict[str, Any]:
    """Return medians over the turns of a contender."""
    stale = [turn.staleness for turn in turns if turn.staleness is not None]
    exchanged = [turn.exchanged_bytes / turn.step_seconds for turn in turns if turn.exchanged_bytes is not None]
    rates = [work.batch / turn.step_seconds for turn in turns]
    top1 = [turn.right / num_val for turn in turns]
    return {
        "images_per_second": median(rates),
        "top1": median(top1),
        "exchanged_bytes_per_second": median(exchanged),
        "staleness_mean": median(mean for mean, _ in stale) if stale else None,
        "staleness_max": max(most for _, most in stale) if stale else None,
        "seconds": median(turn.seconds for turn in turns),
        "cpu_seconds": median(turn.cpu_seconds for turn in turns),
        "all_rounds": {"images_per_second": rates, "top1": top1},
    }


def main() -> None:
    """Measure, print, and save where the command line asks for it."""
    parser = arguments(__doc__, rounds=3, steps=780, images=10_000)
    parser.add_argument("--only", nargs="*", help="these contenders")
    parser.add_argument("--lr", type=float, default=Work.lr, help="learning rate of all contenders")
    args = parser.parse_args()
    measure_and_record("async_engine" if args.lr == Work.lr else f"async_engine_lr_{args.lr:g}", args, measure)


if __name__ == "__main__":
    main()
