"""Fine-tuning photographs: ``steady finetune`` against others, from the same weights, for as many epochs.

Each contender trains MobileNetV2 from Google's ImageNet weights on ``train/`` of a set and is asked for its top-1 on
``test/``, of which it knows nothing else; ``validation/`` is for those that choose by it (steadytrain's best weights,
AutoGluon's). Accuracy does not depend on how busy a machine is, so epochs are equal, not minutes; ``cpu_seconds`` are
those of all processes of a contender, its start and its evaluation included.

- ``steady``: ``steady finetune`` with its defaults, which is what ``--budget-minutes`` chooses where these
  epochs fit. ``steady-fresh``: ``--train discriminative``, the default before. ``steady-probe``: ``--train probe``.
- ``torch``: a plain PyTorch script (AdamW at its default rate, a cosine, torchvision's transforms).
- ``timm``: timm's own ``train.py`` at its defaults. ``timm-adamw``: the same, told what its users tell it for
  fine-tuning: AdamW at 5e-4, no warm-up, label smoothing stays at 0.1.
- ``sklearn``: logistic regression on frozen features, its penalty by cross-validation: one pass, no epochs.
  Nothing in it is drawn, so one run stands for every seed.
- ``autogluon``: MultiModalPredictor at its defaults. ``autogluon-20``: with the 20 epochs that are its default.

All are given the image size and the normalisation of the weights. Sets, folders of classes under ``--data``'s own
archives or given by ``--flowers`` and ``--signs``: ``clothing`` (its own three parts, 640, 250 and 275 photographs of
ten classes), ``flowers`` (github.com/Oldpel/flower_photos) and ``signs``
(github.com/ardamavi/Sign-Language-Digits-Dataset), of each class 60 images to train on, 30 to validate, 100 to test.

Every contender of a seed takes its turn before the next seed; each result is kept in ``--work`` and not made again.

usage: python benchmarks/finetune_peers.py --work FOLDER --timm FOLDER [--data FOLDER] [--flowers FOLDER]
           [--signs FOLDER] [--sets NAME ...] [--only NAME ...] [--seeds 5] [--epochs 4] [--size 160] [--save]
       FOLDER of the data holds clothing-10.tar and weights/mobilenetv2_100/; of timm: a checkout with train.py
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import machine
from accuracy import GOOGLES
from machine import STEADY, cpu_seconds, unpacked
from peers import environments
from peers.commands import asked
from steadytrain.config.plain import plain
from steadytrain.reports import spread

PEERS = Path(__file__).resolve().parent / "peers"
OURS = {"steady": (), "steady-fresh": ("--train", "discriminative"), "steady-probe": ("--train", "probe")}
TIMMS = {
    "timm": (),
    "timm-adamw": ("--opt", "adamw", "--lr", "5e-4", "--weight-decay", "0.05", "--warmup-epochs", "0"),
}
AUTOGLUONS = {"autogluon": None, "autogluon-20": 20}
CONTENDERS = (*OURS, "torch", *TIMMS, "sklearn", *AUTOGLUONS)
PARTS = {"train": 60, "validation": 30, "test": 100}
"""Images of each class, where a set has no parts of its own."""

LIMIT = 7200.0
"""Seconds after which a contender is given up."""


def divided(source: Path, folder: Path) -> Path:
    """Link images of each class, divided by the order of their names' digests: it is always the same."""
    if not folder.exists():
        part = folder.with_name(f".{folder.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        for images in sorted(path for path in source.iterdir() if path.is_dir()):
            files = sorted(images.iterdir(), key=lambda path: hashlib.sha256(path.name.encode()).digest())
            for name, number in PARTS.items():
                (part / name / images.name).mkdir(parents=True)
                for path in files[:number]:
                    (part / name / images.name / path.name).symlink_to(path.resolve())
                files = files[number:]
        part.rename(folder)
    return folder


def ours(name: str, images: Path, weights: Path, epochs: int, seed: int, size: int, turn: Path) -> float:
    """Run ``steady finetune``, and ``steady evaluate`` on the test images."""
    words = [
        *STEADY,
        "finetune",
        str(images / "train"),
        "--val",
        str(images / "validation"),
        "--run",
        str(turn / "run"),
    ]
    words += ["--model", "timm/mobilenetv2_100", "--weights", str(weights), "--size", str(size), "--seed", str(seed)]
    words += [word for setting in GOOGLES for word in ("--set", setting)]
    words += OURS[name] if name == "steady-probe" else [*OURS[name], "--epochs", str(epochs)]
    asked(words, turn, LIMIT)
    answer = asked([*STEADY, "evaluate", str(turn / "run"), str(images / "test"), "--json"], turn, LIMIT)
    return float(json.loads(answer)["top1"])


def script(file: str, python: str, *words: str | Path | int, turn: Path) -> float:
    """Run one of the scripts in ``peers/``."""
    answer = asked([python, str(PEERS / file), *map(str, words)], turn, LIMIT)
    return float(json.loads(answer.splitlines()[-1])["top1"])


def timms(
    name: str, checkout: Path, images: Path, weights: Path, epochs: int, seed: int, size: int, turn: Path
) -> float:
    """Run timm's script; return its last evaluation."""
    words = ["--data-dir", str(images), "--train-split", "train", "--val-split", "test", "--model", "mobilenetv2_100"]
    words += ["--pretrained", "--pretrained-path", str(weights), "--model-kwargs", "pad_type=same"]
    words += ["--num-classes", str(len(list((images / "train").iterdir()))), "--img-size", str(size), "-b", "16"]
    words += ["--mean", "0.5", "0.5", "0.5", "--std", "0.5", "0.5", "0.5", "--crop-pct", "0.875", "--device", "cpu"]
    words += ["-j", "2", "--epochs", str(epochs), "--seed", str(seed), "--output", str(turn), "--experiment", "run"]
    asked([sys.executable, str(checkout / "train.py"), *words, *TIMMS[name]], turn, LIMIT)
    with (turn / "run" / "summary.csv").open(newline="", encoding="utf-8") as file:
        return float(list(csv.DictReader(file))[-1]["eval_top1"]) / 100


def contend(name: str, images: Path, weights: Path, seed: int, turn: Path, args: argparse.Namespace) -> float:
    """Fine-tune by one contender; return its top-1 on the test images."""
    if name in OURS:
        return ours(name, images, weights, args.epochs, seed, args.size, turn)
    if name in TIMMS:
        return timms(name, args.timm.resolve(), images, weights, args.epochs, seed, args.size, turn)
    if name == "torch":
        words = (images, weights, args.epochs, seed, args.size)
        return script("finetune_torch.py", sys.executable, *words, turn=turn)
    if name == "sklearn":
        return script("finetune_sklearn.py", sys.executable, images, weights, args.size, turn=turn)
    python = environments.make("autogluon", (args.envs or args.work / "envs").resolve(), {})
    epochs = AUTOGLUONS[name] or args.epochs
    return script("finetune_autogluon.py", str(python), images, weights, epochs, seed, args.size, turn, turn=turn)


def measured(
    name: str, images: Path, weights: Path, seed: int, turn: Path, args: argparse.Namespace
) -> dict[str, float]:
    """Let a contender fine-tune in a fresh folder; return its top-1 and its CPU seconds."""
    shutil.rmtree(turn, ignore_errors=True)
    turn.mkdir(parents=True)
    before = cpu_seconds()
    top1 = contend(name, images, weights, seed, turn, args)
    values = {"top1": top1, "cpu_seconds": round(cpu_seconds() - before, 1)}
    machine.say(f"{turn.name}: {values}")
    return values


def figures(results: dict[str, dict[int, dict[str, float]]]) -> dict[str, Any]:
    """Return mean and spread over seeds of each contender, and of ours less each other's, seed by seed."""
    tops = {name: {seed: row["top1"] for seed, row in of.items()} for name, of in results.items() if of}
    document: dict[str, Any] = {
        name: {
            "top1": list(by_seed.values()),
            "mean": sum(by_seed.values()) / len(by_seed),
            "spread": plain(spread(by_seed.values(), are_shares=True)),
            "cpu_seconds": [results[name][seed]["cpu_seconds"] for seed in by_seed],
        }
        for name, by_seed in tops.items()
    }
    for mine in OURS:
        for other in tops.keys() - OURS.keys() if mine in tops else ():
            both = [seed for seed in tops[mine] if seed in tops[other]]
            document[mine].setdefault("gain", {})[other] = plain(spread(tops[mine][s] - tops[other][s] for s in both))
    return document


def main() -> None:
    """Measure every contender that has no kept result yet, and record all."""
    parser = machine.parser(
        __doc__,
        data="clothing-10.tar and weights/mobilenetv2_100/",
        work="images and finished results",
        choose=("--only", CONTENDERS),
    )
    parser.add_argument("--timm", type=Path, help="a checkout of pytorch-image-models")
    parser.add_argument("--envs", type=Path, help="where the environments of peers are made")
    parser.add_argument("--flowers", type=Path)
    parser.add_argument("--signs", type=Path)
    parser.add_argument("--sets", nargs="+", default=["clothing"], choices=("clothing", "flowers", "signs"))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--size", type=int, default=160)
    args = parser.parse_args()
    if args.timm is None and TIMMS.keys() & set(args.only):
        parser.error("give --timm, a checkout of pytorch-image-models, or --only the others")
    (weights,) = (args.data / "weights" / "mobilenetv2_100").glob("*.safetensors")
    sources: dict[str, Callable[[], Path]] = {
        "clothing": lambda: unpacked(args.data / "clothing-10.tar", args.work / "clothing"),
        "flowers": lambda: divided(args.flowers, args.work / "flowers"),
        "signs": lambda: divided(args.signs, args.work / "signs"),
    }
    document: dict[str, Any] = {"epochs": args.epochs, "size": args.size, "sets": {}, "unavailable": {}}
    for chosen in args.sets:
        images = sources[chosen]().resolve()
        results: dict[str, dict[int, dict[str, float]]] = {name: {} for name in CONTENDERS}
        for seed in range(args.seeds):
            for name in CONTENDERS:
                is_fixed = name == "sklearn" and seed > 0  # it draws nothing
                file = args.work / "kept" / f"{chosen}-{name}-{args.epochs}-{args.size}-{0 if is_fixed else seed}.json"
                if not file.exists() and (name not in args.only or name in document["unavailable"]):
                    continue
                folder = (args.work / "turn" / file.stem).resolve()
                try:
                    turn = partial(measured, name, images, weights.resolve(), seed, folder, args)
                    results[name][seed] = machine.kept(file, turn)
                except environments.UnavailableError as error:
                    document["unavailable"][name] = str(error)
        document["sets"][chosen] = figures(results)
    machine.record("finetune_peers", document, save=args.save)


if __name__ == "__main__":
    main()
