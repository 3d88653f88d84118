"""Fine-tuning beside its own probe: is it ever worse, does the first epoch undo it, what did the default before reach?

Each contender trains MobileNetV2 from Google's ImageNet weights on ``train/`` of a set, chooses its best weights on
``validation/``, and is asked for their top-1 on ``test/``, of which it knows nothing else:

- ``probe``: ``--train probe``, no updates. Nothing but the images that its penalty is chosen on is drawn, so that one
  seed stands for all; ``--all-probes`` draws each.
- ``before``: ``--train discriminative``, the default until November 2026: no probe, all parameters, a fresh classifier.
- ``default``: nothing said: the probe, then all parameters, gently through the first epoch.
- ``abrupt``: the default with the warm-up of ``before``, by which first epochs undo their probes.

Accuracy does not depend on how busy a machine is, so epochs are equal, not minutes. ``first_epoch`` is validation top-1
after the first epoch less that of the probe it began from; ``gain`` is paired by seeds.

Sets: ``clothing`` (its own three parts), ``cifar`` (of each class of CIFAR-10, 60 images to train on, 30 to validate,
100 to test), ``digits`` (scikit-learn's 8x8 scans: 60, 30 and the rest), and any folder of classes as ``NAME=FOLDER``
(60, 30 and 100 of each class, as in ``finetune_peers.py``).

Each result is kept in ``--work`` and not made again: the same command goes on.

usage: python benchmarks/finetune_probe.py --work FOLDER [--data FOLDER] [--sets NAME[=FOLDER] ...] [--only NAME ...]
           [--seeds 5] [--epochs 8] [--size 160] [--all-probes] [--save]
       FOLDER of the data holds clothing-10.tar, cifar10-png.tar.zst and weights/mobilenetv2_100/
"""

from __future__ import annotations

import argparse
import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import machine
from accuracy import GOOGLES
from finetune_peers import LIMIT, PARTS, divided
from machine import STEADY, cpu_seconds, unpacked
from peers.commands import asked
from steadytrain.config.plain import plain
from steadytrain.events import Evaluated
from steadytrain.reports import spread
from steadytrain.run import Run

CONTENDERS: dict[str, tuple[str, ...]] = {
    "probe": ("--train", "probe"),
    "before": ("--train", "discriminative"),
    "default": (),
    "abrupt": ("--set", "optim.warmup=linear", "--warmup-epochs", "0.5"),
}


def scans(folder: Path) -> Path:
    """Write scikit-learn's digits as PNG, a folder for each class."""
    if not folder.exists():
        import numpy as np
        from PIL import Image
        from sklearn.datasets import load_digits

        digits = load_digits()
        for number, (image, label) in enumerate(zip(digits.images, digits.target, strict=True)):
            place = folder / str(label)
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.round(image * (255 / 16)).astype(np.uint8)).save(place / f"{number:04d}.png")
    return folder


def images_of(chosen: str, data: Path, work: Path) -> Path:
    """Return the folder of a set, which holds ``train``, ``validation`` and ``test``."""
    name, _, folder = chosen.partition("=")
    if folder:
        return divided(Path(folder), work / name)
    if name == "clothing":
        return unpacked(data / "clothing-10.tar", work / "clothing")
    if name == "digits":
        return divided(scans(work / "scans"), work / "digits")
    if name == "cifar":
        whole = unpacked(data / "cifar10-png.tar.zst", work / "cifar10")
        return divided(whole / "train", work / "cifar")
    raise SystemExit(f"no such set: {name}; clothing, cifar, digits, or NAME=FOLDER")


def contend(name: str, images: Path, weights: Path, seed: int, turn: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Fine-tune; return top-1 on the test images, and on the validation images after each epoch."""
    shutil.rmtree(turn, ignore_errors=True)
    turn.mkdir(parents=True)
    run = turn / "run"
    words = [*STEADY, "finetune", str(images / "train"), "--val", str(images / "validation"), "--run", str(run)]
    words += ["--model", "timm/mobilenetv2_100", "--weights", str(weights), "--size", str(args.size)]
    words += ["--seed", str(seed), *(word for setting in GOOGLES for word in ("--set", setting)), *CONTENDERS[name]]
    before = cpu_seconds()
    asked(words if name == "probe" else [*words, "--epochs", str(args.epochs)], turn, LIMIT)
    seconds = cpu_seconds() - before
    answer = asked([*STEADY, "evaluate", str(run), str(images / "test"), "--json"], turn, LIMIT)
    evaluated = {round(e.epoch): e.top1 for e in Run.open(run).events() if isinstance(e, Evaluated)}
    values = {"top1": json.loads(answer)["top1"], "validation": evaluated, "cpu_seconds": round(seconds, 1)}
    machine.say(f"{turn.name}: {values}")
    return values


def figures(results: dict[str, dict[int, dict[str, Any]]], num_val: int) -> dict[str, Any]:
    """Return mean and spread over seeds of each contender, and of the default less each other's, seed by seed."""
    document: dict[str, Any] = {}
    for name, rows in results.items():
        tops = [row["top1"] for row in rows.values()]
        document[name] = {
            "seeds": list(rows),
            "top1": tops,
            "spread": plain(spread(tops, are_shares=True)),
            "validation": [list(row["validation"].values()) for row in rows.values()],
            "cpu_seconds": [row["cpu_seconds"] for row in rows.values()],
        }
        curves = [{int(epoch): top1 for epoch, top1 in row["validation"].items()} for row in rows.values()]
        if firsts := [curve[1] - curve[0] for curve in curves if {0, 1} <= curve.keys()]:
            chance = max((curve[0] * (1 - curve[0]) / num_val) ** 0.5 for curve in curves)
            document[name]["first_epoch"] = {
                "less_probe": firsts,
                "spread": plain(spread(firsts)),
                "standard_error": chance,
            }
    for other in results.keys() - {"default"} if "default" in results else ():
        both = results["default"].keys() & results[other].keys()
        gains = [results["default"][seed]["top1"] - results[other][seed]["top1"] for seed in sorted(both)]
        document["default"].setdefault("gain", {})[other] = {"each": gains, "spread": plain(spread(gains))}
    return document


def main() -> None:
    """Measure every contender that has no kept result yet, and record all."""
    parser = machine.parser(
        __doc__,
        data="clothing-10.tar, cifar10-png.tar.zst and weights/mobilenetv2_100/",
        work="images and finished results",
        choose=("--only", CONTENDERS),
    )
    parser.add_argument("--sets", nargs="+", default=["clothing", "cifar", "digits"])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--size", type=int, default=160)
    parser.add_argument("--all-probes", action="store_true", help="probe with every seed")
    args = parser.parse_args()
    (weights,) = (args.data / "weights" / "mobilenetv2_100").glob("*.safetensors")
    work = args.work.resolve()
    document: dict[str, Any] = {"epochs": args.epochs, "size": args.size, "parts": PARTS, "sets": {}}
    for chosen in args.sets:
        images, name = images_of(chosen, args.data, work).resolve(), chosen.partition("=")[0]
        num_val = sum(1 for _ in (images / "validation").glob("*/*"))
        results: dict[str, dict[int, dict[str, Any]]] = {}
        for seed in range(args.seeds):
            for contender in CONTENDERS:
                drawn = seed if contender != "probe" or args.all_probes else 0
                file = work / "kept" / f"{name}-{contender}-{args.epochs}-{args.size}-{drawn}.json"
                if contender in args.only or file.exists():
                    turn = partial(
                        contend, contender, images, weights.resolve(), drawn, work / "turn" / file.stem, args
                    )
                    results.setdefault(contender, {})[seed] = machine.kept(file, turn)
        document["sets"][name] = {
            "images": {part: sum(1 for _ in (images / part).glob("*/*")) for part in ("train", "validation", "test")},
            **figures(results, num_val),
        }
    machine.record("finetune_probe", document, save=args.save)


if __name__ == "__main__":
    main()
