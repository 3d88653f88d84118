"""Which evaluation's weights are the best: rules compared on the same trainings, by images that no choice has seen.

Each training runs once and keeps what every evaluation answers on a pool of images (``validation/`` and ``test/`` of a
set together). Then, many times, a few of the pool are drawn as the validation images; each rule chooses an evaluation
by these, and is asked for top-1 and log loss of the chosen weights on the rest of the pool. So a rule costs no
training, and all rules see the same curves. Nothing here changes what is trained: no patience, no schedule that waits.

Rules: ``top1`` (the first of equals, the default until November 2026), ``top1,loss`` (of equal top-1 the lower loss),
``loss``, ``loss within`` (the lowest loss among evaluations within a standard error of the best top-1), ``top1 within``
(the highest top-1 among those within a standard error of the lowest loss), ``top1-loss`` (the default: what of ``loss
within`` can be decided at each evaluation), ``last``, and ``hindsight`` (the best on the rest of the pool, which nobody
can choose). ``claimed_too_much`` is top-1 on the validation images less that on the rest, for the chosen weights.

Cases: ``finetune`` (MobileNetV2 from Google's ImageNet weights, 60 images a class, all defaults) and ``train`` (the
default from scratch on small images, of ``cifar`` and ``digits`` alone). Sets as in ``finetune_probe.py``.

Each training's answers are kept in ``--work`` and not made again: the same command goes on.

usage: python benchmarks/best_weights.py --work FOLDER [--data FOLDER] [--sets NAME[=FOLDER] ...] [--seeds 2]
           [--epochs 8] [--size 96] [--draws 200] [--kept] [--save]
       FOLDER of the data holds clothing-10.tar, cifar10-png.tar.zst and weights/mobilenetv2_100/
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import machine
import steadytrain as st
from accuracy import GOOGLES
from finetune_peers import PARTS
from finetune_probe import images_of
from steadytrain.config.figures import USUAL, is_better
from steadytrain.config.plain import plain
from steadytrain.reports import spread
from steadytrain.training.evaluation import Evaluation, evaluate_module
from steadytrain.training.loop import evaluating

Floats = NDArray[np.float64]
VALIDATION = (64, 200)
"""Images that the choice is made on: a tenth and a fifth of a few hundred."""
FROM_SCRATCH = {"cifar": 30, "digits": 60}
"""Sets that a network is trained on from scratch as well, and for how many epochs."""


def pooled(images: Path) -> Path:
    """Link the validation and the test images of a set into one folder."""
    pool = images / "pool"
    if not pool.exists():
        part = images / ".pool.part"
        shutil.rmtree(part, ignore_errors=True)
        for name in ("validation", "test"):
            for path in sorted((images / name).glob("*/*")):
                place = part / path.parent.name
                place.mkdir(parents=True, exist_ok=True)
                (place / f"{name}-{path.name}").symlink_to(path.resolve())
        part.rename(pool)
    return pool


def answers(
    case: str, images: Path, seed: int, file: Path, args: argparse.Namespace
) -> tuple[Floats, NDArray[np.int64]]:
    """Train once; return log-probabilities [evaluations, n, classes] of the pool, and its labels."""
    if not file.exists():
        seen: list[Evaluation] = []

        def keep(*words: Any, **more: Any) -> Evaluation:
            seen.append(evaluate_module(*words, **{**more, "keep_logits": True}))
            return seen[-1]

        changes: dict[str, object] = {"data.val": str(pooled(images)), "seed": seed, "every.keep": 1}
        run = args.work / "turn" / file.stem
        shutil.rmtree(run, ignore_errors=True)
        loop = vars(evaluating)
        loop["evaluate_module"] = keep  # of each evaluation, its answers
        try:
            if case == "finetune":
                (weights,) = (args.data / "weights" / "mobilenetv2_100").glob("*.safetensors")
                recipe: dict[str, object] = {"data.size": args.size, "budget.epochs": args.epochs}
                recipe["model.weights"] = str(weights.resolve())
                settings = dict(setting.split("=", 1) for setting in GOOGLES)
                google = {k: [0.5, 0.5, 0.5] if k.startswith("data.") else v for k, v in settings.items()}
                st.finetune(
                    str(images / "train"),
                    {**changes, **recipe, **google, "model.name": "timm/mobilenetv2_100"},
                    run=run,
                    progress=False,
                )
            else:
                changes["budget.epochs"] = FROM_SCRATCH[images.name]
                recipe_ = st.default_recipe(str(images / "train"), changes)
                st.train(st.Run.create(run, recipe_), progress=False)
        finally:
            loop["evaluate_module"] = evaluate_module
        logits = np.stack([evaluation.logits for evaluation in seen if evaluation.logits is not None])
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.with_suffix(".part").open("wb") as part:
            np.savez(part, logits=logits, labels=np.asarray(seen[0].labels))
        file.with_suffix(".part").rename(file)
        shutil.rmtree(run)
        machine.say(f"{file.stem}: top-1 by evaluation {[round(evaluation.top1, 3) for evaluation in seen]}")
    with np.load(file) as kept:
        log_p = torch.from_numpy(kept["logits"]).double().log_softmax(2).numpy()
        return log_p, kept["labels"]


def within(values: Floats, errors: Floats, by: Floats) -> int:
    """Return the lowest of ``by`` among those whose value is within a standard error of the lowest value."""
    best = int(values.argmin())
    return int(np.where(values <= values[best] + errors[best], by, np.inf).argmin())


def default(top1: Floats, loss: Floats, n: int) -> int:
    """Return what a run keeps, which compares each evaluation with the best before it."""
    best = 0
    for now in range(1, len(top1)):
        best = now if is_better(USUAL, (top1[now], loss[now]), (top1[best], loss[best]), n) else best
    return best


def rules(right: Floats, losses: Floats) -> Mapping[str, int]:
    """Return what each rule chooses of evaluations [E, n]: whether images are right, and their losses."""
    top1, loss, n = right.mean(1), losses.mean(1), right.shape[1]
    top1_error, loss_error = (top1 * (1 - top1) / n) ** 0.5, losses.std(1, ddof=1) / n**0.5
    return {
        "top1": int(top1.argmax()),
        "top1,loss": within(-top1, np.zeros_like(top1), loss),
        "loss": int(loss.argmin()),
        "loss within": within(-top1, top1_error, loss),
        "top1 within": within(loss, loss_error, -top1),
        USUAL: default(top1, loss, n),
        "last": len(top1) - 1,
    }


def compared(log_p: Floats, labels: NDArray[np.int64], n: int, draws: int) -> dict[str, dict[str, float]]:
    """Return mean top-1 and log loss, on the rest of the pool, of what each rule chooses by ``n`` images."""
    right = (log_p.argmax(2) == labels).astype(np.float64)
    losses = -np.take_along_axis(log_p, labels[None, :, None], 2)[:, :, 0]
    random, sums = np.random.default_rng(0), dict[str, list[tuple[float, float, float]]]()
    for _ in range(draws):
        order = random.permutation(len(labels))
        by, rest = order[:n], order[n:]
        top1, loss = right[:, rest].mean(1), losses[:, rest].mean(1)
        chosen = {**rules(right[:, by], losses[:, by]), "hindsight": int(top1.argmax())}
        for name, at in chosen.items():
            claim = right[at, by].mean() - top1[at]
            sums.setdefault(name, []).append((top1[at], loss[at], claim))
    return {
        name: dict(zip(("top1", "loss", "claimed_too_much"), map(float, np.mean(rows, 0)), strict=True))
        for name, rows in sums.items()
    }


def summary(trainings: Sequence[dict[str, dict[str, float]]]) -> dict[str, Any]:
    """Return means over trainings of each rule, and of its gain over ``top1``, with their intervals."""
    document: dict[str, Any] = {}
    for name in trainings[0]:
        gains = {key: [row[name][key] - row["top1"][key] for row in trainings] for key in ("top1", "loss")}
        means = {key: float(np.mean([row[name][key] for row in trainings])) for key in trainings[0][name]}
        document[name] = {**means, "gain": {key: plain(spread(values)) for key, values in gains.items()}}
    return document


def main() -> None:
    """Train what has no kept answers yet, and record how the rules compare."""
    parser = machine.parser(
        __doc__,
        data="clothing-10.tar, cifar10-png.tar.zst and weights/mobilenetv2_100/",
        work="images and kept answers",
    )
    parser.add_argument("--sets", nargs="+", default=["clothing", "cifar", "digits"])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--size", type=int, default=96)
    parser.add_argument("--draws", type=int, default=200)
    parser.add_argument("--kept", action="store_true", help="compare what is kept, and train nothing")
    args = parser.parse_args()
    args.work = args.work.resolve()
    document: dict[str, Any] = {"epochs": args.epochs, "size": args.size, "parts": PARTS, "draws": args.draws}
    trainings: dict[str, dict[str, tuple[Floats, NDArray[np.int64]]]] = {"finetune": {}, "train": {}}
    for seed in range(args.seeds):
        for chosen in args.sets:
            images, name = images_of(chosen, args.data, args.work), chosen.partition("=")[0]
            for case in ("finetune", "train") if name in FROM_SCRATCH else ("finetune",):
                file = args.work / "kept" / f"{name}-{case}-{args.epochs}-{args.size}-{seed}.npz"
                if file.exists() or not args.kept:
                    trainings[case][f"{name}-{seed}"] = answers(case, images, seed, file, args)
    for case, kept in trainings.items():
        curves = {
            name: [round(float((p.argmax(1) == labels).mean()), 4) for p in log_p]
            for name, (log_p, labels) in kept.items()
        }
        rows = {
            n: {name: compared(*pair, n, args.draws) for name, pair in kept.items() if len(pair[1]) >= 2 * n}
            for n in VALIDATION
        }
        document[case] = {
            "pool": {name: len(labels) for name, (_, labels) in kept.items()},
            "top1_by_evaluation": curves,
            **{f"by_{n}_images": {"all": summary(list(each.values())), **each} for n, each in rows.items() if each},
        }
    machine.record("best_weights", machine.rounded(document, 4), save=args.save)


if __name__ == "__main__":
    main()
