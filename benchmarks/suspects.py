"""Wrong labels: how many ``steady check --suspects`` finds, and how many of those that it names are wrong.

Of each set some labels are flipped: to any other class at random, or by confusion (to a class drawn by how likely a
classifier of the true labels finds it for images of the true class, on the mean). Features of a frozen MobileNetV2
(Google's ImageNet weights) are computed once; each draw flips other labels, deals other folds and chooses its penalty
anew. ``precision`` counts every label that was not flipped as right, so what the set itself has wrong counts against
it. ``of_first_n``: of the first n in the ranking of all images by the probability of their label, n the true number,
the share that was flipped.

Each set is a folder of classes; of each class so many images are taken, in the order of their names' digests. Draws
that are done stay in ``--work``: the same command goes on.

usage: python benchmarks/suspects.py --work FOLDER --weights FILE --sets NAME=FOLDER@SIZE@IMAGES ...
           [--draws 5] [--save]
       SIZE in pixels, IMAGES of each class
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

import machine
from accuracy import GOOGLES
from steadytrain.data.sources.select import fold_numbers
from steadytrain.training.data import open_data
from steadytrain.training.features.folds import out_of_fold
from steadytrain.training.features.suspects import find_suspects
from steadytrain.training.features.table import feature_table
from steadytrain.training.inference.trained import frozen_network
from steadytrain.training.loop.defaults import default_recipe

RATES = (0.05, 0.1, 0.2)
KINDS = ("random", "confusion")


def linked(source: Path, folder: Path, num_images: int) -> Path:
    """Link some images of each class; which, depends on their names alone."""
    for images in sorted(path for path in source.iterdir() if path.is_dir()):
        files = sorted(images.iterdir(), key=lambda path: hashlib.sha256(path.name.encode()).digest())
        (folder / images.name).mkdir(parents=True, exist_ok=True)
        for path in files[:num_images]:
            if not (folder / images.name / path.name).exists():
                (folder / images.name / path.name).symlink_to(path.resolve())
    return folder


def features(folder: Path, weights: Path, size: int) -> tuple[np.ndarray, np.ndarray, int, float]:
    """Return features, labels, the number of classes, and the CPU seconds of the features."""
    settings: dict[str, Any] = dict(setting.split("=", 1) for setting in GOOGLES)
    changes = {"model.weights": str(weights), "data.size": size, "data.holdout": 0, "precision.name": "fp32"}
    options = {key.removeprefix("model.options."): value for key, value in settings.items() if "options" in key}
    changes |= {"model.options": options, "data.mean": (0.5,) * 3, "data.std": (0.5,) * 3}
    recipe = default_recipe(str(folder), changes, model="timm/mobilenetv2_100", finetune=True)
    data = open_data(recipe.data, seed=0)
    began = time.process_time()
    values = np.array(feature_table(frozen_network(recipe, data, say=machine.say), data.train, say=machine.say).values)
    seconds = time.process_time() - began
    labels = np.asarray(data.train.labels, np.int64)
    data.close()
    return values, labels, len(data.classes), seconds


def confusion(labels: np.ndarray, probabilities: np.ndarray) -> np.ndarray:
    """Return how likely each class is confused with each other one: [K, K], rows add up to 1."""
    means = np.array([probabilities[labels == k].mean(0) for k in range(probabilities.shape[1])])
    np.fill_diagonal(means, 0)
    return np.asarray(means / means.sum(1, keepdims=True))


def flipped(labels: np.ndarray, rate: float, kind: str, likely: np.ndarray, seed: int) -> np.ndarray:
    """Return labels of which a share is wrong."""
    rng = np.random.default_rng(seed)
    wrong, noisy = rng.permutation(len(labels))[: round(rate * len(labels))], labels.copy()
    others = 1.0 - np.eye(len(likely))
    chances = likely if kind == "confusion" else others / others.sum(1, keepdims=True)
    noisy[wrong] = [rng.choice(len(likely), p=chances[label]) for label in labels[wrong]]
    return noisy


def drawn(
    values: np.ndarray, labels: np.ndarray, num_classes: int, rate: float, kind: str, likely: np.ndarray, seed: int
) -> dict[str, float]:
    """Flip labels, look for them, and count."""
    noisy = flipped(labels, rate, kind, likely, seed)
    began = time.process_time()
    found = find_suspects(values, noisy, num_classes, seed=seed)
    seconds = time.process_time() - began
    is_wrong, n = noisy != labels, int((noisy != labels).sum())
    ranked = np.argsort(found.probabilities[np.arange(len(noisy)), noisy])
    return {
        "recall": float(is_wrong[found.rows].sum() / n),
        "precision": float(is_wrong[found.rows].mean()) if len(found.rows) else 0.0,
        "of_first_n": float(is_wrong[ranked[:n]].mean()),
        "named": len(found.rows),
        "flipped": n,
        "penalty": found.answers.penalty,
        "cpu_seconds": round(seconds, 2),
    }


def measured(name: str, folder: Path, size: int, args: argparse.Namespace) -> dict[str, Any]:
    """Measure a set, but for the draws that are done."""
    file = args.work / f"{name}.json"
    result: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"draws": {}}
    values, labels, num_classes, seconds = features(folder, args.weights, size)
    clean = out_of_fold(values, labels, fold_numbers(labels, folds=5, seed=0), num_classes)
    likely = confusion(labels, clean.probabilities)
    result |= {"images": len(labels), "classes": num_classes, "size": size, "top1_of_clean_labels": clean.top1}
    result.setdefault("cpu_seconds_of_features", round(seconds, 1))
    for rate in RATES:
        for kind in KINDS:
            for seed in range(args.draws):
                key = f"{rate:g} {kind} {seed}"
                if key not in result["draws"]:
                    result["draws"][key] = drawn(values, labels, num_classes, rate, kind, likely, seed)
                    machine.say(f"{name} {key}: {result['draws'][key]}")
                    file.write_text(json.dumps(result))
    result["means"] = {}
    for case in dict.fromkeys(key.rpartition(" ")[0] for key in result["draws"]):
        rows = [row for key, row in result["draws"].items() if key.startswith(f"{case} ")]
        result["means"][case] = {
            figure: {"mean": round(float(np.mean(x)), 4), "deviation": round(float(np.std(x, ddof=1)), 4)}
            for figure in ("recall", "precision", "of_first_n", "cpu_seconds")
            if len(x := [row[figure] for row in rows]) > 1
        }
    return result


def main() -> None:
    """Measure each set, and record the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--sets", nargs="+", required=True, metavar="NAME=FOLDER@SIZE@IMAGES")
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    sets = {}
    for given in args.sets:
        name, _, place = given.partition("=")
        folder, size, images = place.rsplit("@", 2)
        sets[name] = measured(name, linked(Path(folder), args.work / name, int(images)), int(size), args)
    machine.record("suspects", {"sets": sets}, save=args.save)


if __name__ == "__main__":
    main()
