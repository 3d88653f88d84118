"""Throughput of training on a CPU fed from JPEG records, against the same steps on one batch in memory.

One process, one model, one optimizer: blocks of steps on a batch that stays in memory, while the feed's queue is full
and its threads sleep, take turns with blocks of steps that each take their batch from the feed. ``share`` is the
throughput of fed steps over that of resident ones, the median of the rounds' own ratios; ``feed_cpu_share`` the part of
all cores' time that the feed's threads were busy meanwhile, and ``wait_share`` the part that the loop waited.

usage: python benchmarks/end_to_end.py --data FOLDER [--rounds 5] [--steps 6] [--save]
       FOLDER holds imagenet-sample-200.tar, which is packed at 256 pixels, quality 95, as a user would
"""

from __future__ import annotations

import tarfile
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import machine
from steadytrain.config import Budget, Data, Model, Optim, Recipe
from steadytrain.data.packing.pack import pack
from steadytrain.machine import facts
from steadytrain.run import Run
from steadytrain.training.data import DeviceBatch, load
from steadytrain.training.session.opening import open_session
from steadytrain.training.session.session import Session

CASES = {"resnet50": ("timm/resnet50", 16), "resnet18": ("timm/resnet18", 16)}


def packed(folder: Path, out: Path) -> Path:
    """Pack the sample in two classes, at 256 pixels."""
    with tarfile.open(folder / "imagenet-sample-200.tar") as tar:
        tar.extractall(out / "all", filter="data")
    for number, path in enumerate(sorted((out / "all").rglob("*.JPEG"))):
        home = out / "classes" / f"{number % 2}"
        home.mkdir(parents=True, exist_ok=True)
        path.rename(home / path.name)
    return pack(out / "classes", out / "packed.rec", shorter_side=256)[0].path


def compare(case: str, records: Path, rounds: int, steps: int) -> dict[str, Any]:
    """Measure blocks of steps on one batch and of fed steps, in turns."""
    model, batch_size = CASES[case]
    recipe = Recipe(
        data=Data(train=str(records), size=224, holdout=0.0),
        model=Model(model),
        optim=Optim("sgd", lr=0.01),
        budget=Budget(steps=10**6),
        batch_size=batch_size,
    )
    with tempfile.TemporaryDirectory() as folder:
        run = Run.create(Path(folder) / "run", recipe)
        with run.lock(), run.log() as log, open_session(run, log, allow_import=False) as session:
            batches = load(session.feed, session.state.engine.device)
            resident = next(batches)
            block(session, [resident] * 2)
            turns = [turn(session, resident, batches, steps) for _ in range(rounds)]
    middle = {key: median(turn[key] for turn in turns) for key in turns[0]}
    return {
        "batch_size": batch_size,
        "images_per_second": {name: batch_size / middle[name] for name in ("resident", "fed")},
        "share": middle["share"],
        "feed_cpu_share": middle["feed_cpu_share"],
        "wait_share": middle["wait_share"],
        "all_rounds": turns,
    }


def turn(session: Session, resident: DeviceBatch, batches: Iterator[DeviceBatch], steps: int) -> dict[str, float]:
    """Time one block of each kind; return seconds a step."""
    still = block(session, [resident] * steps)
    before = session.feed.stats()
    began = time.perf_counter()
    waited = 0.0
    for _ in range(steps):
        batch = next(batches)
        waited += batch.wait_seconds
        block(session, [batch])
    fed = (time.perf_counter() - began) / steps
    after = session.feed.stats()
    busy = sum(getattr(after, f"{name}_seconds") - getattr(before, f"{name}_seconds") for name in STAGES)
    return {
        "resident": still,
        "fed": fed,
        "share": still / fed,
        "feed_cpu_share": busy / (fed * steps * facts.cores()),
        "wait_share": waited / (fed * steps),
    }


STAGES = ("read", "decode", "batch")


def block(session: Session, batches: list[DeviceBatch]) -> float:
    """Make steps; return seconds a step."""
    began = time.perf_counter()
    for batch in batches:
        session.update(session.state, batch, 0.01)
    return (time.perf_counter() - began) / len(batches)


def main() -> None:
    """Measure, print, and save where the command line asks for it."""
    parser = machine.parser(__doc__, data="imagenet-sample-200.tar", choose=("--cases", CASES), rounds=5)
    parser.add_argument("--steps", type=int, default=6)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        records = packed(arguments.data, Path(folder))
        cases = {case: compare(case, records, arguments.rounds, arguments.steps) for case in arguments.cases}
    name = machine.of_cases("end_to_end", arguments.cases, CASES)
    machine.record(name, {"rounds": arguments.rounds, "steps": arguments.steps, **cases}, save=arguments.save)


if __name__ == "__main__":
    main()
