"""The accuracies that the README states, by the commands that it shows, from the images to the run's own table.

- ``demo``: ``steady demo`` with three seeds: 359 of 1,797 handwritten digits held out.
- ``cifar10``: the 60,000 images as PNG, packed, ``resnet20`` from scratch for 3 epochs; the 10,000 test images.
- ``finetune``: ``timm/mobilenetv2_100`` from ImageNet weights (trained by Google for TensorFlow: hence SAME padding and
  pixels in -1 to 1) on the 890 photographs of ``train`` and ``validation``, 8 epochs; the 275 of ``test``, which no
  choice was made on. The last epoch's weights count, not the best ones'.

Each run has a folder of its own in ``--work`` and goes on there if it was interrupted; a finished one is only read.
Accuracy does not depend on how busy the machine is; the seconds do.

usage: python benchmarks/accuracy.py --data FOLDER --work FOLDER [--cases demo finetune cifar10] [--seeds N] [--save]
       FOLDER of the data holds cifar10-png.tar.zst, clothing-10.tar, weights/mobilenetv2_100/
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import machine
from machine import STEADY, steady, unpacked

GOOGLES = ("model.options.pad_type=same", "data.mean=[0.5,0.5,0.5]", "data.std=[0.5,0.5,0.5]")
TOLD = ("last", "best", "seconds", "images_per_second", "steps_done", "epochs_done")


def demo(_: Path, work: Path, seed: int) -> dict[str, Any]:
    """Train the demo with a seed; return its figures."""
    steady("demo", str(work / "demo"), "--seed", str(seed))
    return told_by(work / "demo" / "runs" / (f"digits-seed-{seed}" if seed else "digits"))


def cifar10(data: Path, work: Path, seed: int) -> dict[str, Any]:
    """Pack CIFAR-10 and train on it from scratch; return the run's figures."""
    images = unpacked(data / "cifar10-png.tar.zst", work / "cifar10")
    if not (work / "cifar10-test.rec").exists():
        steady("pack", str(images), str(work / "cifar10"), "--force")
    train, val, run = (str(work / name) for name in ("cifar10-train.rec", "cifar10-test.rec", f"cifar10-seed-{seed}"))
    steady("train", train, "--val", val, "--model", "resnet20", "--epochs", "3", "--seed", str(seed), "--run", run)
    return told_by(Path(run))


def finetune(data: Path, work: Path, seed: int) -> dict[str, Any]:
    """Fine-tune photographs from pretrained weights; return the run's figures."""
    images = unpacked(data / "clothing-10.tar", work / "clothing")
    merged(images)
    (weights,) = (data / "weights" / "mobilenetv2_100").glob("*.safetensors")
    run = work / f"clothing-seed-{seed}"
    settings = [word for google in GOOGLES for word in ("--set", google)]
    words = ["--model", "timm/mobilenetv2_100", "--weights", str(weights), *settings, "--seed", str(seed)]
    steady("finetune", str(images), *words, "--run", str(run))
    return told_by(run)


CASES = {"demo": demo, "finetune": finetune, "cifar10": cifar10}
SEEDS = {"demo": 3, "finetune": 3, "cifar10": 1}


def merged(images: Path) -> None:
    """Merge ``train`` and ``validation`` into ``train``, and rename ``test`` to ``val``."""
    if (images / "validation").is_dir():
        for path in sorted((images / "validation").glob("*/*")):
            path.rename(images / "train" / path.parent.name / path.name)
        for folder in (images / "validation").iterdir():
            folder.rmdir()
        (images / "validation").rmdir()
    if (images / "test").is_dir():
        (images / "test").rename(images / "val")


def told_by(run: Path) -> dict[str, Any]:
    """Return the figures of the run's own table."""
    shown = subprocess.run([*STEADY, "report", str(run), "--json"], check=True, stdout=subprocess.PIPE)
    (figures,) = json.loads(shown.stdout)["runs"]
    return {name: figures[name] for name in TOLD}


def main() -> None:
    """Run the cases and record what they reach."""
    parser = machine.parser(
        __doc__,
        data="cifar10-png.tar.zst, clothing-10.tar and weights/mobilenetv2_100/",
        needs_data=False,
        work="data and runs",
        choose=("--cases", CASES),
    )
    parser.add_argument("--seeds", type=int, help="seeds of each case, from 0 on (else 3, and 1 of CIFAR-10)")
    args = parser.parse_args()
    if args.data is None and args.cases != ["demo"]:
        parser.error("--data FOLDER: where the images and the weights are")
    figures = {
        name: {
            f"seed {seed}": CASES[name](Path(args.data or "."), args.work, seed)
            for seed in range(args.seeds or SEEDS[name])
        }
        for name in args.cases
    }
    machine.record(machine.of_cases("accuracy", args.cases, CASES), figures, save=args.save)


if __name__ == "__main__":
    main()
