"""CIFAR-10 at equal epochs: top-1 on the 10,000 test images, and CPU seconds an epoch, ours against others.

- ``quick``: ``recipes/cifar10.toml``. ``airbench-32``: a script after the paper that it builds on (SGD), with
  the same layers and as narrow; ``airbench``: as wide as published, with four times the arithmetic.
- ``resnet20``: ``steady train --model resnet20``. ``timm``: the same net trained with timm's parts; ``torch``: by a
  plain PyTorch script.

``top1`` is that after each epoch, of each image as it is; ``tta`` that after the last one, with averages over flips
(airbench: over shifts as well). Each trains by a whole schedule of so many epochs. ``cpu_seconds_per_epoch`` are those
of all processes of a contender over its epochs, start and evaluations included: on a machine that others use, seconds
of wall time would measure the others.

Each finished contender is kept in ``--work``, so it can be done in pieces: ``--only quick``, then ``--only timm``, ...

usage: python benchmarks/cifar10_epochs.py --data FOLDER --work FOLDER [--epochs 3 5 8] [--only NAME ...] [--seeds 1]
                                           [--save]
       FOLDER of the data holds cifar10-png.tar.zst
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import machine
from cifar10_minutes import EVALUATED, measured, prepared
from machine import STEADY, cpu_seconds
from peers.commands import asked

HERE = Path(__file__).resolve().parent
CONTENDERS = ("quick", "airbench-32", "airbench", "resnet20", "timm", "torch")
NEVER, HOURS = (1.01,), 6 * 3600.0


def command(name: str, start: Path, run: Path, epochs: int, seed: int) -> list[str]:
    """Return the command that trains a contender for so many epochs."""
    train, val = f"{start}-train.rec", f"{start}-test.rec"
    ours = [*STEADY, "train", train, "--val", val, "--seed", str(seed), "--run", str(run)]
    theirs = (str(start), str(epochs), str(seed))
    peer: dict[str, tuple[str, ...]] = {
        "airbench": ("cifar_airbench.py", "64"),
        "airbench-32": ("cifar_airbench.py", "32"),
        "timm": ("cifar_timm.py",),
        "torch": ("cifar_torch.py",),
    }
    if name in peer:
        script, *more = peer[name]
        return [sys.executable, str(HERE / "peers" / script), *theirs, *more]
    chosen = ("--recipe", str(HERE.parent / "recipes" / "cifar10.toml")) if name == "quick" else ("--model", "resnet20")
    return [*ours, *chosen, "--epochs", str(epochs)]


def trained(words: Sequence[str], epochs: int, log: Path) -> dict[str, Any]:
    """Run a contender to its end."""
    before = cpu_seconds()
    measurement = measured(words, NEVER, HOURS, log)
    seconds = (cpu_seconds() - before) / epochs
    evaluated = [json.loads(line) for line in log.read_text("utf-8").splitlines() if line.startswith(EVALUATED[1])]
    tta = {"tta": evaluated[-1]["tta"]} if evaluated and "tta" in evaluated[-1] else {}
    return {"top1": [line["top1"] for line in measurement["told"]], **tta, "cpu_seconds_per_epoch": round(seconds, 1)}


def main() -> None:
    """Measure every contender that has no kept result yet, and record all."""
    parser = machine.parser(
        __doc__, data="cifar10-png.tar.zst", work="records, logs and finished results", choose=("--only", CONTENDERS)
    )
    parser.add_argument("--epochs", type=int, nargs="+", default=[3, 5, 8])
    parser.add_argument("--seeds", type=int, default=1)
    args = parser.parse_args()
    start, _ = prepared(args.data, args.work)

    def turn(name: str, epochs: int, seed: int, file: Path) -> dict[str, Any]:
        run = args.work / f"run-{file.stem}"
        shutil.rmtree(run, ignore_errors=True)
        words = command(name, start, run, epochs, seed)
        machine.say(" ".join(words))
        outcome = trained(words, epochs, file.with_suffix(".log"))
        if run.exists():
            evaluate = [*STEADY, "evaluate", str(run), "--weights", "last", "--tta", "flip", "--json"]
            outcome["tta"] = json.loads(asked(evaluate, args.work, HOURS))["top1"]
        return outcome

    figures: dict[str, dict[str, dict[str, Any]]] = {}
    for epochs, seed, name in product(args.epochs, range(args.seeds), CONTENDERS):
        file = args.work / f"{name}-{epochs}-epochs-{seed}.json"
        if name in args.only or file.exists():
            by_seed = figures.setdefault(f"{epochs} epochs", {}).setdefault(name, {})
            by_seed[f"seed {seed}"] = machine.kept(file, partial(turn, name, epochs, seed, file))
    machine.record("cifar10_epochs", figures, save=args.save)


if __name__ == "__main__":
    main()
