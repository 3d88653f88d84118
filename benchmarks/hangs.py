"""Seconds until a hang is reported: runs whose forward pass never ends, from random updates on, all at a time.

Each run trains as ``steady train`` does and hangs at a drawn update; the first twenty are left out, since their pace is
not known yet and they have half an hour. ``seconds``: from the hang to the
``Stalled`` event; ``stacks``: whether the file that it names holds the line of the hang. Then the run is ended.

usage: python benchmarks/hangs.py --data FOLDER [--runs 10] [--seed 1] [--work FOLDER] [--save]
"""

from __future__ import annotations

import os
import random
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

from steadytrain.machine.process import share_cores

share_cores()

import machine  # noqa: E402
import verdict  # noqa: E402
from faults import data  # noqa: E402
from faults.around import Surroundings  # noqa: E402
from faults.catalogue import BASES  # noqa: E402
from faults.run import _child, command  # noqa: E402
from steadytrain.events import Stalled, read  # noqa: E402

MOST_SECONDS, LONGEST = 60.0, 240.0
FIRST = 20  # updates after which the pace is known at whatever speed


def start(folder: Path, records: Path, step: int, batch: int) -> int:
    """Begin a run that hangs at this update; its process."""
    base = BASES["quick"]
    settings = {**base.settings, "batch_size": batch, "budget.steps": 2000, "parallel.compute_threads": 1}
    patches = {"hang": {"step": step, "file": str(folder.with_suffix(".hung"))}}
    child = os.fork()
    if child == 0:
        words = command(folder, records, base.model, settings)
        _child(words, folder, patches, Surroundings(), folder.with_suffix(".out"), 0)
    return child


def told(folder: Path) -> Stalled | None:
    """Return the standstill that a run has reported, if it has."""
    log = folder / "events.jsonl"
    return next((event for event in read(log) if isinstance(event, Stalled)), None) if log.exists() else None


def measure(records: Path, work: Path, runs: int, seed: int) -> list[dict[str, Any]]:
    """Start all of them, and wait until each has told of its hang."""
    chance = random.Random(seed)
    steps = [round(FIRST * 50 ** chance.random()) for _ in range(runs)]
    folders = [work / f"run-{number}" for number in range(runs)]
    batches = [chance.choice((8, 128)) for _ in steps]
    children = [start(*told_) for told_ in zip(folders, [records] * runs, steps, batches, strict=True)]
    began, stalls = time.monotonic(), dict[int, Stalled]()
    try:
        while len(stalls) < runs and time.monotonic() - began < LONGEST:
            time.sleep(1.0)
            for number, folder in enumerate(folders):
                if number not in stalls and (stalled := told(folder)) is not None:
                    stalls[number] = stalled
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    rows = []
    for number, (folder, step) in enumerate(zip(folders, steps, strict=True)):
        hung, stalled = folder.with_suffix(".hung"), stalls.get(number)
        row: dict[str, Any] = {"step": step, "batch_size": batches[number], "seconds": None, "stacks": False}
        if stalled is not None and hung.exists():
            row["seconds"] = round(stalled.time - float(hung.read_text()), 1)
            row["stacks"] = "patches.py" in (folder / stalled.stacks).read_text() if stalled.stacks else False
            row["culprit"] = stalled.culprit
        rows.append(row)
    return rows


def main() -> None:
    """Measure, print, and save where the command line asks for it."""
    parser = machine.parser(__doc__, data="cifar10-png.tar.zst and imagenet-sample-200.tar")
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--work", type=Path, help="keep the packed data here, for the next time")
    args = parser.parse_args()
    with verdict.folder_at(args.work) as work, tempfile.TemporaryDirectory(dir=work) as runs:
        records = data.make(args.data, work)["cifar"]
        verdict.preload()
        rows = measure(records, Path(runs), args.runs, args.seed)
    for row in rows:
        machine.say(row)
    in_time = sum(row["seconds"] is not None and row["seconds"] <= 1.1 * MOST_SECONDS for row in rows)
    machine.record("hangs", {"in_time": in_time, "runs": len(rows), "rows": rows}, save=args.save)


if __name__ == "__main__":
    main()
