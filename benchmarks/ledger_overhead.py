"""The cost of the ledger for a step: its clock, the accounts, the loader's statistics, the samplers, the watchdog.

A model that does nothing is trained by the whole loop (feed from records, events), in processes of their own that take
turns: with everything recorded as it always is (``as_it_is``), and with all of that taken out (``without``): the clock
stands still, nothing is accounted for or sampled, and the feed's threads read no clocks. What lies between the two is
the ledger's cost. It is given over the time of real steps: ResNet-20 at 32 pixels, batch 128; ResNet-50 at 224, batch
16. One thread computes, on both sides; passes that a run may make to measure its own step are left out on both: what
those may take is bounded where they are made, and the ledger holds it (``measuring``).

- ``training_thread``: processor time of the thread that trains, the sampler's work beside it not included.
- ``all_threads``: processor time of the whole process, the feed's and the sampler's threads included. This counts.

Processor time hardly depends on what else the machine does. The differences are medians over the rounds, each of two
processes that followed each other; ``share_of_step`` may be 0.5 % at most.

usage: python benchmarks/ledger_overhead.py [--rounds 9] [--steps 3000] [--nets resnet20 ...] [--save]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import machine
import train_step

HERE = Path(__file__).resolve().parent
BAR = 0.005
WARM_STEPS = 300
SIDES = ("as_it_is", "without")
NETS = ("resnet20", "inception", "resnet50")


def take_out() -> None:
    """Let nothing be recorded of where time goes."""
    from steadytrain.data.loader import batch_worker, pipeline
    from steadytrain.data.loader.pipeline import RequestCounts
    from steadytrain.training.clock import Clock, Waits
    from steadytrain.training.loop import attempt

    still: dict[str, Any] = {"to": None, "move": None, "warmed_up": None, "is_due": False, "seconds": {}}
    _put(Clock, **{name: lambda self, *arguments, value=value: value for name, value in still.items()})
    _put(Clock, within=lambda self, bucket: contextlib.nullcontext())
    _put(Waits, sort=lambda self, *arguments: None)
    _put(attempt, _start_monitors=lambda *arguments, **options: contextlib.nullcontext())
    _put(attempt, looking=lambda log, progress: contextlib.nullcontext(SimpleNamespace(attach=lambda clock: None)))
    _put(RequestCounts, note=lambda self, ready: None)
    for module in (batch_worker, pipeline):
        _put(module, time=SimpleNamespace(perf_counter=lambda: 0.0, thread_time=lambda: 0.0))


def _put(place: Any, **others: Any) -> None:
    for name, other in others.items():
        assert hasattr(place, name), f"{place} has no {name} any more: what it cost would not be taken out"
        setattr(place, name, other)


def steps_of(batch: int, steps: int, records: str) -> dict[str, float]:
    """Return seconds a step of a run whose model does nothing, after a warm-up."""
    from steadytrain import Budget, Data, Every, Model, Optim, Parallel, Recipe, Run
    from steadytrain.events import Step
    from steadytrain.training import steps as run_steps
    from steadytrain.training.profile.step_cost import StepMeasuring

    _put(StepMeasuring, is_due=lambda self, seconds: False)
    recipe = Recipe(
        data=Data(train=records, size=32, holdout=0.0),
        model=Model(train_step.NOTHING),
        optim=Optim("sgd", lr=0.01, nesterov=False),
        budget=Budget(steps=WARM_STEPS + steps),
        every=Every(log_steps=100),
        parallel=Parallel(compute_threads=1),
        batch_size=batch,
    )
    marks: list[tuple[float, float, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        for event in run_steps(Run.create(Path(folder) / "run", recipe), allow_import=True):
            if isinstance(event, Step) and event.step in (WARM_STEPS, WARM_STEPS + steps):
                marks.append((time.perf_counter(), time.thread_time(), time.process_time()))
    wall, training, all_ = ((after - before) / steps for before, after in zip(*marks, strict=True))
    return {"wall": wall, "training_thread": training, "all_threads": all_}


def child(arguments: list[str]) -> Any:
    """Run this script in a process of its own; return its answer."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])}
    return machine.ask([sys.executable, str(HERE / "ledger_overhead.py"), *arguments], environment)


def real_seconds(folder: Path, nets: list[str]) -> dict[str, float]:
    """Return seconds of a step of the networks that the bar is about."""
    values = {}
    for name in nets:
        case = train_step.CASES[name]
        records = train_step.write_records(folder / name, case.side, case.channels, max(2 * case.batch, 64))
        command = [sys.executable, str(HERE / "train_step.py"), "--one", "ours", name, str(records)]
        values[name], _ = train_step.child(command)
    return values


def compare(batch: int, rounds: int, steps: int, records: Path) -> dict[str, Any]:
    """Run both in turns; return microseconds a step."""
    taken: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    for _, side in machine.in_turns(SIDES, rounds):
        taken[side].append(child(["--one", side, str(batch), str(steps), str(records)]))
    return {
        kind: {side: 1e6 * median(turn[kind] for turn in taken[side]) for side in SIDES}
        | dict(_cost([1e6 * (a[kind] - b[kind]) for a, b in zip(*taken.values(), strict=True)]))
        for kind in ("wall", "training_thread", "all_threads")
    }


def _cost(differences: list[float]) -> Iterator[tuple[str, Any]]:
    yield "cost", median(differences)
    yield "cost_quartiles", machine.quartiles(differences)


def measure(nets: list[str], rounds: int, steps: int) -> dict[str, Any]:
    """Measure all networks."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        records = train_step.write_records(folder / "nothing", 32, 3, 1024)
        real = real_seconds(folder, nets)
        cases = {}
        for case in nets:
            batch = train_step.CASES[case].batch
            costs = compare(batch, rounds, steps, records)
            share = costs["all_threads"]["cost"] / 1e6 / real[case]
            cases[case] = {"batch": batch, "real_step_ms": 1e3 * real[case], "microseconds": costs} | {
                "share_of_step": share,
                "met": share <= BAR,
            }
    return {"rounds": rounds, "steps": steps, "bar": BAR, **machine.rounded(cases)}


def main() -> None:
    """Measure, print, and save where the command line asks for it."""
    parser = machine.parser(__doc__, choose=("--nets", NETS), rounds=9)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        side, batch, steps, records = args.one
        if side == "without":
            take_out()
        print(json.dumps(steps_of(int(batch), int(steps), records)))
    else:
        machine.record("ledger_overhead", measure(args.nets, args.rounds, args.steps), save=args.save)


if __name__ == "__main__":
    main()
