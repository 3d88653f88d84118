"""Tables of the old practice on CIFAR-10, at a scale that two cores can do: ResNet-20 on 500 images of each class.

- ``batches`` (``recipes/cifar10-batches.toml``): batches of 64 to 1,280, the rate as it is and scaled to it.
- ``optimizers`` (``recipes/cifar10-optimizers.toml``): SGD, NAG, and LBSGD with one and with four batches an update.
- ``schedules`` (``recipes/cifar10-schedules.toml``): the same network with each learning-rate schedule.

Each file is a sweep (``steady sweep``) that goes on where it was interrupted. Top-1 is that of all 10,000 test images
after the last pass; accuracy does not depend on how busy the machine is.

usage: python benchmarks/old_practice.py --data FOLDER --work FOLDER [--tables NAME ...] [--seeds 1] [--save]
       FOLDER of the data holds cifar10-png.tar.zst
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import machine
from machine import steady, unpacked

RECIPES = Path(__file__).resolve().parent.parent / "recipes"
PER_CLASS = 500
TABLES = ("batches", "optimizers", "schedules")


def main() -> None:
    """Run the sweeps, and record all."""
    parser = machine.parser(__doc__, data="cifar10-png.tar.zst", work="records and sweeps", choose=("--tables", TABLES))
    parser.add_argument("--seeds", type=int, default=1)
    args = parser.parse_args()
    train, val = (args.work / name for name in ("small-train.rec", "test.rec"))
    if not (train.exists() and val.exists()):
        images = unpacked(args.data / "cifar10-png.tar.zst", args.work / "cifar10")
        steady("pack", str(images / "test"), str(args.work / "test"), "--force")
        steady("pack", str(images / "train"), str(args.work / "small"), "--train-per-class", str(PER_CLASS), "--force")
    figures: dict[str, dict[str, Any]] = {}
    for table in args.tables:
        folder, recipe = args.work / f"{table}-sweep", RECIPES / f"cifar10-{table}.toml"
        words = (str(train), "--val", str(val), "--run", str(folder), "--seeds", str(args.seeds))
        steady("sweep", str(recipe), *words)
        rows = json.loads((folder / "sweep.json").read_text(encoding="utf-8"))["rows"]
        kept = ("last", "last_spread", "status")
        figures[table] = {row["name"]: {name: row[name] for name in kept} for row in rows}
    machine.record(
        machine.of_cases("old_practice", args.tables, TABLES),
        {"images": 10 * PER_CLASS, "tables": figures},
        save=args.save,
    )


if __name__ == "__main__":
    main()
