"""The cost of ``--track`` for a training: processor seconds, images/s in the steady state, and seconds to the end.

The digits of ``steady demo`` are trained by the command line, with each tracker and without one, in turns. The process
that sends a run has a lower priority than the training and reads its log every two seconds. What it takes once, at its
start and at the end (imports, the report, the weights), and what it takes while it sends is all counted: the processor
seconds are those of the command with all that it started. The differences are medians over the rounds, each of two
commands that followed each other.

usage: python benchmarks/tracking.py [--rounds 5] [--epochs 40] [--trackers tensorboard ...] [--save]
"""

from __future__ import annotations

import subprocess
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import machine
from steadytrain import ledger
from steadytrain.reports.trackers import TRACKERS

WITHOUT = "without"
SETTINGS = ("--model", "digits", "--set", "data.pad=1", "--holdout", "0.2", "--batch-size", "64", "--lr", "0.1")


def train(records: Path, run: Path, tracker: str, epochs: int) -> dict[str, float]:
    """Train once, in a process of its own; return what it took."""
    words = ["train", str(records), *SETTINGS, "--epochs", str(epochs), "--run", str(run)]
    words += [] if tracker == WITHOUT else ["--track", tracker]
    cpu, began = machine.cpu_seconds(), time.perf_counter()
    command = [*machine.STEADY, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=records.parent)  # MLflow's is there
    taken = {"seconds": time.perf_counter() - began, "cpu_seconds": machine.cpu_seconds() - cpu}
    if done.returncode or "sends the rest" in done.stderr:
        raise SystemExit(f"{' '.join(words)} failed:\n{done.stderr[-2000:]}")
    return taken | {"images_per_second": ledger(run).steady_images_per_second}


def measure(trackers: list[str], rounds: int, epochs: int) -> dict[str, Any]:
    """Train with each tracker and without, in turns; return medians, and the differences to the run without."""
    sides = [WITHOUT, *trackers]
    taken: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        machine.steady("demo", str(folder / "demo"))
        for number, side in machine.in_turns(sides, rounds):
            run = folder / "runs" / f"{side}-{number}"
            taken[side].append(train(folder / "demo" / "digits.rec", run, side, epochs))
    cases = {side: {kind: median(turn[kind] for turn in turns) for kind in turns[0]} for side, turns in taken.items()}
    costs: dict[str, Any] = {}
    for tracker in trackers:
        pairs = list(zip(taken[tracker], taken[WITHOUT], strict=True))
        more = [with_["cpu_seconds"] - without["cpu_seconds"] for with_, without in pairs]
        rates = [with_["images_per_second"] / without["images_per_second"] for with_, without in pairs]
        costs[tracker] = {"cpu_seconds": median(more), "cpu_seconds_quartiles": machine.quartiles(more)}
        costs[tracker] |= {"images_per_second_ratio": median(rates), "ratio_quartiles": machine.quartiles(rates)}
    return {"rounds": rounds, "epochs": epochs, **machine.rounded({"medians": cases, "costs": costs})}


def main() -> None:
    """Measure, print, and save where the command line asks for it."""
    parser = machine.parser(__doc__, choose=("--trackers", TRACKERS), rounds=5)
    parser.add_argument("--epochs", type=int, default=40)
    args = parser.parse_args()
    name = machine.of_cases("tracking", args.trackers, TRACKERS)
    machine.record(name, measure(args.trackers, args.rounds, args.epochs), save=args.save)


if __name__ == "__main__":
    main()
