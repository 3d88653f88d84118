"""What ``--prior`` and ``--calibrate`` do to networks that ``steady finetune`` made by its defaults.

``limits.py`` measures both on frozen features. Here MobileNetV2 (Google's ImageNet weights) is fine-tuned as a user
does who says nothing: the probe, then updates of all layers, best weights by a fifth of the images.

- ``prior``: half of the classes have 1/20 of the images of the others; updates for ``--epochs``. Macro recall and top-1
  on a balanced test of other images: of the default, of the same weights with ``--prior uniform``, and of one trained
  with ``--class-weights balanced``.
- ``temperature``: log loss before and after, where 500 images that were not trained on fit the temperature, kept where
  the product keeps it. The first draw fits the run's validation images, as ``--calibrate`` does, and is judged on the
  test images; the others draw as many of both together, and are judged on the rest.

Sets: ``cifar`` (300 images of each class), and any folder of classes, or of parts of classes, as ``NAME=FOLDER``. Each
training is kept in ``--work`` and not made again: the same command goes on where it was stopped.

usage: python benchmarks/limits_finetuned.py --work FOLDER [--data FOLDER] [--prior NAME=FOLDER ...]
           [--temperature NAME[=FOLDER] ...] [--seeds 3] [--epochs 4] [--draws 5] [--size 96] [--per-class 60] [--save]
       FOLDER of the data holds cifar10-png.tar.zst and weights/mobilenetv2_100/
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import machine
from accuracy import GOOGLES
from finetune_peers import PARTS
from limits import CUT, images_of, loss_of
from machine import cpu_seconds, steady
from steadytrain.errors import DataError
from steadytrain.training import evaluate, restore
from steadytrain.training.evaluation import Evaluation
from steadytrain.training.features.held_out import LEAST_TO_CALIBRATE, SURE_ERRORS
from steadytrain.training.inference.calibration import fit

Files = dict[str, list[Path]]
CONTENDERS: dict[str, tuple[str, ...]] = {"default": (), "class_weights": ("--class-weights", "balanced")}
MOST_TESTED = 1000


def drawn(folder: Path, seed: int) -> Files:
    """Return the images of each class, of all parts of a set, in an order of the seed."""
    draw = np.random.default_rng(seed)
    parts = [folder / part for part in PARTS if (folder / part).is_dir()] or [folder]
    names = sorted({place.name for part in parts for place in part.iterdir() if place.is_dir()})
    files = {name: sorted(path for part in parts for path in (part / name).iterdir()) for name in names}
    return {name: [paths[k] for k in draw.permutation(len(paths))] for name, paths in files.items()}


def linked(files: Mapping[str, Sequence[Path]], folder: Path) -> Path:
    """Link images into a folder for each class."""
    for name, paths in files.items():
        (folder / name).mkdir(parents=True)
        for path in paths:
            (folder / name / f"{path.parent.parent.name}-{path.name}").symlink_to(path.resolve())
    return folder


def finetuned(turn: Path, words: Sequence[str], seed: int, args: argparse.Namespace) -> Path:
    """Fine-tune the images in ``turn/train`` by the defaults and what else is said; return the run."""
    (weights,) = (args.data / "weights" / "mobilenetv2_100").glob("*.safetensors")
    command = ["finetune", str(turn / "train"), "--run", str(turn / "run"), "--size", str(args.size)]
    command += ["--model", "timm/mobilenetv2_100", "--weights", str(weights.resolve()), "--seed", str(seed)]
    steady(*command, *(word for setting in GOOGLES for word in ("--set", setting)), *words)
    return turn / "run"


def begun(turn: Path) -> Path:
    """Return an empty folder for a training."""
    shutil.rmtree(turn, ignore_errors=True)
    turn.mkdir(parents=True)
    return turn


def prior(folder: Path, contender: str, seed: int, turn: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Fine-tune with half of the classes cut to 1/20; return top-1 and macro recall by each class frequency."""
    files = drawn(folder, seed)
    rare = np.random.default_rng(seed).permutation(sorted(files))[: len(files) // 2].tolist()
    n = {name: min(args.per_class, 2 * len(paths) // 3) for name, paths in files.items()}
    taken = {name: paths[: max(2, n[name] // CUT) if name in rare else n[name]] for name, paths in files.items()}
    fewest = min(len(paths) - n[name] for name, paths in files.items())
    begun(turn)
    linked(taken, turn / "train")
    linked({name: paths[n[name] :][: min(fewest, PARTS["test"])] for name, paths in files.items()}, turn / "test")
    before = cpu_seconds()
    words = (*CONTENDERS[contender], "--epochs", str(args.epochs))
    answer = evaluate(restore(finetuned(turn, words, seed, args)), turn / "test")
    figures = {"training": {"top1": answer.top1, "macro_recall": answer.macro.recall}}
    if answer.other is not None:
        figures["uniform"] = dict(zip(("top1", "macro_recall"), answer.other, strict=True))
    document = {"images": sum(map(len, taken.values())), "test": answer.n, **figures}
    document["cpu_seconds"] = round(cpu_seconds() - before, 1)
    machine.say(f"{turn.name}: {document}")
    return document


def temperature(folder: Path, seed: int, turn: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Fine-tune with 500 validation images; return the log loss before and after of each draw."""
    files, (begin, end) = drawn(folder, seed), (args.per_class, args.per_class + -(-LEAST_TO_CALIBRATE // args.classes))
    begun(turn)
    linked({name: paths[:begin] for name, paths in files.items()}, turn / "train")
    linked({name: paths[begin:end] for name, paths in files.items()}, turn / "validation")
    linked({name: paths[end:][: MOST_TESTED // len(files)] for name, paths in files.items()}, turn / "test")
    trained = restore(finetuned(turn, ("--val", str(turn / "validation")), seed, args))
    answers = [evaluate(trained, turn / part, keep_logits=True) for part in ("validation", "test")]
    logits = np.concatenate([answer.logits for answer in answers if answer.logits is not None])
    labels = np.concatenate([answer.labels for answer in answers if answer.labels is not None])
    draws, draw = [], np.random.default_rng(seed)
    for number in range(args.draws):
        order = draw.permutation(len(labels)) if number else np.arange(len(labels))
        fitted, rest = np.split(order, [answers[0].n])
        draws.append(after(logits, labels, fitted, rest))
    machine.say(f"{turn.name}: {draws}")
    return draws


def after(logits: np.ndarray, labels: np.ndarray, rows: np.ndarray, rest: np.ndarray) -> dict[str, Any]:
    """Fit a temperature to some rows, keep it where the product does, and judge it on the others."""
    figures = Evaluation(len(rows), 0.0, 0.0, None, (), (), logits=logits[rows], labels=labels[rows])
    try:
        found = fit(figures)
        value = found.temperature if found.gain > SURE_ERRORS * found.gain_error else 1.0
    except DataError:
        value = 1.0
    losses = {key: loss_of(logits[rest], labels[rest], t) for key, t in (("before", 1.0), ("after", value))}
    top1 = float((logits[rest].argmax(1) == labels[rest]).mean())
    return {"fitted": len(rows), "test": len(rest), "temperature": value, "top1": top1, **losses}


def summary(rows: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return macro recall and top-1 of each contender, and what the prior gains over class weights, seed by seed."""
    named = {"default": ("default", "training"), "prior_uniform": ("default", "uniform")}
    named["class_weights"] = ("class_weights", "training")
    means = {
        name: {key: float(np.mean([row[by][key] for row in rows[of]])) for key in ("macro_recall", "top1")}
        for name, (of, by) in named.items()
    }
    pairs = zip(rows["default"], rows["class_weights"], strict=True)
    gains = [ours["uniform"]["macro_recall"] - other["training"]["macro_recall"] for ours, other in pairs]
    return {**means, "gain_over_class_weights": {"mean": float(np.mean(gains)), "each": gains}, "seeds": rows}


def main() -> None:
    """Train what has no kept result yet, and record all."""
    parser = machine.parser(__doc__, data="cifar10-png.tar.zst, weights/mobilenetv2_100/", work="images and trainings")
    parser.add_argument("--prior", nargs="*", default=[])
    parser.add_argument("--temperature", nargs="*", default=["cifar"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument("--size", type=int, default=96)
    parser.add_argument("--per-class", type=int, default=60)
    args: argparse.Namespace = parser.parse_args()
    torch.set_num_threads(1)
    work: Path = args.work.resolve()
    document: dict[str, Any] = {
        "size": args.size,
        "per_class": args.per_class,
        "epochs": args.epochs,
        "temperature": {},
    }

    def turn(kind: str, name: str, seed: int) -> Path:
        return work / "turn" / f"{kind}-{name}-{args.size}-{args.per_class}-{seed}"

    def kept(path: Path, measure: Any) -> Any:
        return machine.kept(work / "kept" / f"{path.name}.json", partial(measure, turn=path, args=args))

    for chosen in args.temperature:
        name, folder = chosen.partition("=")[0], images_of(chosen, args.data, work)
        args.classes = len(drawn(folder, 0))
        document["temperature"][name] = kept(turn("temperature", name, 0), partial(temperature, folder, 0))
    folders = {chosen.partition("=")[0]: images_of(chosen, args.data, work) for chosen in args.prior}
    rows: dict[str, dict[str, list[dict[str, Any]]]] = {name: {of: [] for of in CONTENDERS} for name in folders}
    for seed in range(args.seeds):
        for name, folder in folders.items():
            for contender in CONTENDERS:
                path = turn(f"{contender}-{args.epochs}", name, seed)
                rows[name][contender].append(kept(path, partial(prior, folder, contender, seed)))
    document["prior"] = {name: summary(of) for name, of in rows.items()}
    machine.record("limits_finetuned", machine.rounded(document, 4), save=args.save)


if __name__ == "__main__":
    main()
