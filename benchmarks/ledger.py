"""Completeness of a run's ledger: its sum against a clock outside the process, with the verdict of each run.

Five different runs, by the commands that a user types, each in a process of its own:

- ``cifar10``: ResNet-20 on CIFAR-10, packed as PNG, with its evaluations;
- ``photographs``: ``timm/resnet18`` at 128 pixels on large JPEGs, read in place from their folder;
- ``busy``: a network that computes next to nothing, checkpoints every 20 updates, evaluation every fifth of an epoch;
- ``killed``: ended by SIGKILL in its midst, and gone on with;
- ``process``: small updates for so long that the feed looks for its place and what a step is made of is measured.

``outside_seconds``: from the start of each process to its end, by this one's clock; ``wall_seconds``: what the ledger
says; ``sum_share``: the buckets over that; ``unaccounted_share``: what the ledger has not, the interpreter's own end
above all; ``other_share``: the bucket of that name.

usage: python benchmarks/ledger.py --data FOLDER --work FOLDER [--cases cifar10 ...] [--save]
       FOLDER of the data holds cifar10-png.tar.zst and clothing-10.tar
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import machine
from accuracy import merged
from machine import STEADY, unpacked

SHOWN = 0.001


def cifar(data: Path, work: Path) -> tuple[str, str]:
    """Pack training and validation images."""
    images = unpacked(data / "cifar10-png.tar.zst", work / "cifar10")
    if not (work / "cifar10-test.rec").exists():
        _steady("pack", str(images), str(work / "cifar10"), "--force")
    return str(work / "cifar10-train.rec"), str(work / "cifar10-test.rec")


def clothing(data: Path, work: Path) -> str:
    """Unpack a folder of photographs, ``train`` and ``val``."""
    images = unpacked(data / "clothing-10.tar", work / "clothing")
    merged(images)
    return str(images)


def on_cifar(*words: str) -> Callable[[Path, Path], list[str]]:
    """Return a command that trains on CIFAR-10."""

    def command(data: Path, work: Path) -> list[str]:
        train, val = cifar(data, work)
        return [train, "--val", val, *words]

    return command


CASES: dict[str, Callable[[Path, Path], list[str]]] = {
    "cifar10": on_cifar("--model", "resnet20", "--epochs", "1"),
    "photographs": lambda data, work: [
        *(clothing(data, work), "--model", "timm/resnet18", "--size", "128", "--epochs", "1", "--batch-size", "16")
    ],
    "busy": on_cifar(
        *("--model", "mlp", "--epochs", "1", "--batch-size", "256"),
        *("--set", "every.save_steps=20", "--set", "every.evaluate_epochs=0.2"),
    ),
    "killed": on_cifar("--model", "resnet20", "--epochs", "0.5", "--set", "every.save_steps=60"),
    "process": on_cifar("--model", "mlp", "--epochs", "30", "--batch-size", "64"),
}
KILLED_AFTER_SECONDS = 30.0


def measure(name: str, data: Path, work: Path) -> dict[str, Any]:
    """Run one case: its processes timed from outside, then its ledger."""
    run = work / "runs" / name
    shutil.rmtree(run, ignore_errors=True)
    command = ["train", *CASES[name](data, work), "--run", str(run)]
    outside = _killed(command) if name == "killed" else 0.0
    began = time.perf_counter()
    _steady(*command)
    outside += time.perf_counter() - began
    ledger = json.loads(_asked("report", str(run), "--json"))["runs"][0]["ledger"]
    verdict = json.loads(_asked("diagnose", str(run), "--json"))
    wall, buckets = ledger["wall_seconds"], ledger["seconds"]
    first = verdict["causes"][0]
    return {
        "command": " ".join(["steady", *(word.replace(str(work), "WORK") for word in command)]),
        "outside_seconds": outside,
        "wall_seconds": wall,
        "sum_share": sum(buckets.values()) / wall,
        "unaccounted_share": 1 - wall / outside,
        "other_share": buckets["other"] / wall,
        "shares": {bucket: seconds / wall for bucket, seconds in buckets.items() if seconds > SHOWN * wall},
        "images_per_second": ledger["images_per_second"],
        "steady_images_per_second": ledger["steady_images_per_second"],
        "verdict": {key: first[key] for key in ("name", "share", "sentence", "saves")}
        | {"change": first["change"].replace(str(work), "WORK")},
    }


def _killed(command: list[str]) -> float:
    """Return seconds of a process that is killed in its midst."""
    began = time.perf_counter()
    with subprocess.Popen([*STEADY, *command], stdout=sys.stderr) as process:
        try:
            process.wait(KILLED_AFTER_SECONDS)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
    return time.perf_counter() - began


def _steady(*words: str) -> None:
    subprocess.run([*STEADY, *words], check=True, stdout=sys.stderr)


def _asked(*words: str) -> bytes:
    return subprocess.run([*STEADY, *words], check=True, stdout=subprocess.PIPE).stdout


def main() -> None:
    """Measure, print, and save where the command line asks for it."""
    parser = machine.parser(
        __doc__, data="cifar10-png.tar.zst and clothing-10.tar", work="data and runs", choose=("--cases", CASES)
    )
    args = parser.parse_args()
    work = args.work.resolve()
    figures = {name: measure(name, args.data, work) for name in args.cases}
    machine.record(machine.of_cases("ledger", args.cases, CASES), figures, save=args.save)


if __name__ == "__main__":
    main()
