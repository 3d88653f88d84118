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

import argparse
import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import machine
from accuracy import STEADY
from cifar10_minutes import EVALUATED, measured, prepared
from peers.commands import asked, cpu_seconds

HERE = Path(__file__).resolve().parent
CONTENDERS = ("quick", "airbench-32", "airbench", "resnet20", "timm", "torch")
NEVER, HOURS = (1.01,), 6 * 3600.0


def command(name: str, start: Path, run: Path, epochs: int, seed: int) -> list[str]:
    """What trains for so many epochs."""
    ours = [*STEADY, "train", f"{start}-train.rec", "--val", f"{start}-val.rec", "--seed", str(seed), "--run", str(run)]
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
    """Let each contender have its turn that has not had it, and tell of all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=os.environ.get("STEADYTRAIN_TEST_DATA"))
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--epochs", type=int, nargs="+", default=[3, 5, 8])
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--save", action="store_true", help="also write benchmarks/results/cifar10_epochs.json")
    args = parser.parse_args()
    if args.data is None:
        parser.error("give --data, the folder that holds cifar10-png.tar.zst")
    args.work.mkdir(parents=True, exist_ok=True)
    start, _ = prepared(Path(args.data), args.work)
    figures: dict[str, dict[str, dict[str, Any]]] = {}
    for epochs in args.epochs:
        for seed in range(args.seeds):
            for name in CONTENDERS:
                kept = args.work / f"{name}-{epochs}-epochs-{seed}.json"
                if not kept.exists() and name in args.only:
                    run = args.work / f"run-{kept.stem}"
                    shutil.rmtree(run, ignore_errors=True)
                    words = command(name, start, run, epochs, seed)
                    print(" ".join(words), file=sys.stderr)
                    outcome = trained(words, epochs, kept.with_suffix(".log"))
                    if run.exists():
                        evaluate = [*STEADY, "evaluate", str(run), "--weights", "last", "--tta", "flip", "--json"]
                        outcome["tta"] = json.loads(asked(evaluate, args.work, HOURS))["top1"]
                    kept.write_text(json.dumps(outcome), encoding="utf-8")
                if kept.exists():
                    by_seed = figures.setdefault(f"{epochs} epochs", {}).setdefault(name, {})
                    by_seed[f"seed {seed}"] = json.loads(kept.read_text(encoding="utf-8"))
    machine.record("cifar10_epochs", figures, save=args.save)


if __name__ == "__main__":
    main()
