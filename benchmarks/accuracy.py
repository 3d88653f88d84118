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

import argparse
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import machine

STEADY = [sys.executable, "-m", "steadytrain"]
GOOGLES = ("model.options.pad_type=same", "data.mean=[0.5,0.5,0.5]", "data.std=[0.5,0.5,0.5]")
TOLD = ("last", "best", "seconds", "images_per_second", "steps_done", "epochs_done")


def demo(_: Path, work: Path, seed: int) -> dict[str, Any]:
    """One run of the demo."""
    steady("demo", str(work / "demo"), "--seed", str(seed))
    return told_by(work / "demo" / "runs" / (f"digits-seed-{seed}" if seed else "digits"))


def cifar10(data: Path, work: Path, seed: int) -> dict[str, Any]:
    """CIFAR-10 from its images."""
    images = unpacked(data / "cifar10-png.tar.zst", work / "cifar10")
    if not (work / "cifar10-val.rec").exists():
        steady("pack", str(images), str(work / "cifar10"), "--force")
    train, val, run = (str(work / name) for name in ("cifar10-train.rec", "cifar10-val.rec", f"cifar10-seed-{seed}"))
    steady("train", train, "--val", val, "--model", "resnet20", "--epochs", "3", "--seed", str(seed), "--run", run)
    return told_by(Path(run))


def finetune(data: Path, work: Path, seed: int) -> dict[str, Any]:
    """Photographs, from pretrained weights."""
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
    """``train`` and ``validation`` become ``train``, ``test`` becomes ``val``."""
    if (images / "validation").is_dir():
        for path in sorted((images / "validation").glob("*/*")):
            path.rename(images / "train" / path.parent.name / path.name)
        for folder in (images / "validation").iterdir():
            folder.rmdir()
        (images / "validation").rmdir()
    if (images / "test").is_dir():
        (images / "test").rename(images / "val")


def unpacked(archive: Path, folder: Path) -> Path:
    """The folder that holds ``train``, once the archive is unpacked."""
    if not folder.exists():
        part = folder.with_name(f".{folder.name}.part")
        part.mkdir(parents=True, exist_ok=True)
        if archive.suffix == ".zst":
            subprocess.run(["tar", "--zstd", "-xf", str(archive), "-C", str(part)], check=True)
        else:
            with tarfile.open(archive) as file:
                file.extractall(part, filter="data")
        part.rename(folder)
    return next(path.parent for path in sorted(folder.rglob("train")) if path.is_dir())


def steady(*words: str) -> None:
    subprocess.run([*STEADY, *words], check=True, stdout=sys.stderr)


def told_by(run: Path) -> dict[str, Any]:
    """What the run's own table says."""
    shown = subprocess.run([*STEADY, "report", str(run), "--json"], check=True, stdout=subprocess.PIPE)
    (figures,) = json.loads(shown.stdout)["runs"]
    return {name: figures[name] for name in TOLD}


def main() -> None:
    """Run the cases and record what they reach."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=os.environ.get("STEADYTRAIN_TEST_DATA"))
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--seeds", type=int, help="seeds of each case, from 0 on (else 3, and 1 of CIFAR-10)")
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    if args.data is None and args.cases != ["demo"]:
        parser.error("--data FOLDER: where the images and the weights are")
    args.work.mkdir(parents=True, exist_ok=True)
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
