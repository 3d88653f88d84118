"""How long compute threads should wait awake for each other: images per second of ``steady train`` on a CPU.

By ``GOMP_SPINCOUNT``, the turns of a waiting thread before it sleeps: few (1,000), more (20,000), torch's own default,
and what the command chooses by itself; alone on the machine, and beside a neighbour who keeps one core busy from before
the start, or from two seconds after it (``later``), which no choice at the start can see. Compute threads: one a core.

usage: python benchmarks/waiting.py [--rounds 3] [--cases resnet20 ...] [--save]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean, median
from typing import Any

import machine
from steadytrain.machine import facts
from train_step import CASES, write_records

SPINS = {"few": "1000", "more": "20000", "default": "300000", "chosen": None}
NEIGHBOURS = {"none": None, "before": 0.0, "later": 2.0}
NETS = {"resnet20": 24, "resnet20-16": 150, "mlp": 3000}
"""Updates of each."""
NAMES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


@contextmanager
def neighbour(after: float | None) -> Iterator[None]:
    """Somebody else's process that keeps a core busy, from so many seconds on."""
    if after is None:
        yield
        return
    code = f"import time; time.sleep({after})\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", code]) as other:
        if not after:
            threading.Event().wait(0.5)
        try:
            yield
        finally:
            other.kill()


def rate(net: str, records: Path, spins: str | None, after: float | None) -> float:
    """Images per second of the second half of a run."""
    name, _, batch = net.partition("-")
    case = CASES[name]
    size = int(batch or case.batch)
    environment = {key: value for key, value in os.environ.items() if key not in NAMES}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "steadytrain", "train", str(records), "--model", case.model]
        command += ["--batch-size", str(size), "--size", str(case.side), "--run", f"{folder}/run"]
        changes = [f"budget.steps={NETS[net]}", "data.holdout=0.0", f"parallel.compute_threads={facts.cores()}"]
        command += [word for change in changes for word in ("--set", change)]
        with neighbour(after):
            environment |= {} if spins is None else {"GOMP_SPINCOUNT": spins}
            subprocess.run(command, env=environment, capture_output=True, check=True)
        events = (json.loads(line) for line in Path(folder, "run/events.jsonl").read_text().splitlines())
        seconds = [event["seconds"] for event in events if event["kind"] == "Step"]
    return size / fmean(seconds[len(seconds) // 2 :])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cases", nargs="+", default=list(NETS), choices=list(NETS))
    parser.add_argument("--save", action="store_true", help="also write benchmarks/results/waiting.json")
    arguments = parser.parse_args()
    result: dict[str, Any] = {"rounds": arguments.rounds}
    with tempfile.TemporaryDirectory() as folder:
        for net in arguments.cases:
            case = CASES[net.partition("-")[0]]
            records = write_records(Path(folder) / net, case.side, case.channels, 2 * case.batch)
            turns = [(beside, how) for beside in NEIGHBOURS for how in SPINS]
            rates: dict[str, dict[str, list[float]]] = {beside: {how: [] for how in SPINS} for beside in NEIGHBOURS}
            for number in range(arguments.rounds):
                for beside, how in turns[number % len(turns) :] + turns[: number % len(turns)]:
                    rates[beside][how].append(rate(net, records, SPINS[how], NEIGHBOURS[beside]))
            result[net] = {
                "images_per_second": {
                    beside: {how: median(values) for how, values in of.items()} for beside, of in rates.items()
                },
                "all_rounds": rates,
            }
    machine.record(machine.of_cases("waiting", arguments.cases, NETS), result, save=arguments.save)


if __name__ == "__main__":
    main()
