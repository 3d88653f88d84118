"""What a model says of its limits, beside images that it has not seen: frequencies, temperature, likeness, promises.

All from features of MobileNetV2 (Google's ImageNet weights), computed once for each set. A draw takes ``--per-class``
images of each class to train on; the test images are others of the same classes.

- ``prior``: half of the classes are cut to 1/20. Macro recall and top-1 on a balanced test, of a plain probe, of one
  with class weights (scikit-learn's ``LogisticRegression(class_weight="balanced")``, its ``C`` by five folds), and of
  the plain one with ``--prior uniform``.
- ``temperature``: log loss on test images before and after; fitted to a tenth of the training images that the probe was
  not fitted to, as 0.2 did, and to answers out of fold, kept where the product keeps it.
- ``unlike``: share of images of the other sets that pass, where 95 % of held-out images do: by probability, by energy,
  by distance, by both as the product has it; and the share of test images that passes. Tried and not kept:
  the distance to the fifth neighbour of the predicted class (``of_class``), the product of both tails (``tails``).
- ``promise``: ``--abstain-at 0.95``: share of test images that are answered, and of these right.

Sets: ``clothing``, ``cifar`` (300 images of each class), ``grey`` (made here: three kinds of blurred discs on grey,
like X-rays of one machine), and any folder of classes as ``NAME=FOLDER``. Each result is kept in ``--work``: the same
command goes on where it was stopped.

usage: python benchmarks/limits.py --work FOLDER [--data FOLDER] [--sets NAME[=FOLDER] ...] [--draws 5] [--size 96]
           [--per-class 60] [--save]
       FOLDER of the data holds clothing-10.tar, cifar10-png.tar.zst and weights/mobilenetv2_100/
"""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression, LogisticRegressionCV
from torch.nn import functional

import machine
from steadytrain.data.packing.prepare import prepare
from steadytrain.data.recordio.reader import Records
from steadytrain.data.results.scores import promise
from steadytrain.data.sources.select import fold_numbers
from steadytrain.errors import DataError
from steadytrain.intervals import wilson
from steadytrain.training import restore
from steadytrain.training.evaluation import Evaluation
from steadytrain.training.features.folds import fit_classifier, out_of_fold
from steadytrain.training.features.held_out import SURE_ERRORS
from steadytrain.training.features.table import feature_table
from steadytrain.training.inference.calibration import fit
from steadytrain.training.inference.limits import energy_of, joint_limits, nearest, unit_rows
from steadytrain.training.metrics import log_ratio

CUT = 20
CIFAR_IMAGES = 300


def images_of(chosen: str, data: Path, work: Path) -> Path:
    """Return a folder of classes."""
    name, _, folder = chosen.partition("=")
    if folder:
        return Path(folder)
    if name == "clothing":
        return machine.unpacked(data / "clothing-10.tar", work / "clothing") / "train"
    if name == "cifar":
        return few_of_cifar(data / "cifar10-png.tar.zst", work / "cifar")
    if name == "grey":
        return discs(work / "grey")
    raise SystemExit(f"no such set: {name}; clothing, cifar, grey, or NAME=FOLDER")


def few_of_cifar(archive: Path, folder: Path) -> Path:
    """Unpack the first images of each class of CIFAR-10's training part."""
    counts: Counter[str] = Counter()
    if folder.exists():
        return folder
    with machine.opened(archive) as tar:
        for member in tar:
            *_, part, label, file = ("", "", *member.name.split("/"))
            if not member.isfile() or part != "train" or counts[label] >= CIFAR_IMAGES:
                continue
            counts[label] += 1
            (folder / label).mkdir(parents=True, exist_ok=True)
            content = tar.extractfile(member)
            assert content is not None
            (folder / label / file).write_bytes(content.read())
    return folder


def discs(folder: Path, images: int = 200) -> Path:
    """Make three classes of grey pictures: one disc, two, or a ring, blurred, on uneven grey."""
    from PIL import Image, ImageDraw, ImageFilter

    draw = np.random.default_rng(0)
    for label in ("one", "ring", "two") if not folder.exists() else ():
        (folder / label).mkdir(parents=True)
        for number in range(images):
            picture = Image.new("L", (160, 160), int(draw.integers(60, 110)))
            pen = ImageDraw.Draw(picture)
            for part in range(2 if label == "two" else 1):
                x, y = (
                    (draw.uniform(40, 70) + 50 * part, draw.uniform(50, 110))
                    if label == "two"
                    else draw.uniform(50, 110, 2)
                )
                radius, shade = draw.uniform(14, 26), int(draw.integers(130, 200))
                box = (x - radius, y - radius, x + radius, y + radius)
                pen.ellipse(box, outline=shade, width=6, fill=None if label == "ring" else shade)
            noise = Image.fromarray(draw.integers(0, 256, (160, 160), dtype=np.uint8))
            blurred = Image.blend(picture, noise, 0.15).filter(ImageFilter.GaussianBlur(float(draw.uniform(2, 4))))
            blurred.convert("RGB").save(folder / label / f"{number:03d}.png")
    return folder


def features_of(folder: Path, trained: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return float32 [N, D] features and int64 [N] labels of all images of a folder."""
    packed = prepare(folder, trainable=True, shorter_side=2 * trained.input.size, split_column=None, say=machine.say)
    with Records.open(packed.train) as records:
        values = np.array(feature_table(trained, records, say=machine.say).values)
        return values, np.asarray(records.labels, np.int64)


def draw_rows(labels: np.ndarray, per_class: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return rows to train on, so many of each class, and at most as many others of each to test on."""
    draw, train, test = np.random.default_rng(seed), [], []
    for label in np.unique(labels):
        rows = draw.permutation(np.flatnonzero(labels == label))
        n = min(per_class, 2 * len(rows) // 3)
        train.append(rows[:n])
        test.append(rows[n : n + per_class])
    return np.sort(np.concatenate(train)), np.sort(np.concatenate(test))


def probe(values: np.ndarray, labels: np.ndarray, classes: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Fit the classifier as ``--train probe`` does: weights, biases and the penalty."""
    held = fold_numbers(labels, folds=5, seed=seed) == 0
    weight, bias, penalty, _ = fit_classifier(
        torch.from_numpy(values), torch.from_numpy(labels), torch.from_numpy(held), classes
    )
    return weight, bias, penalty


def recalls(predicted: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Return top-1 and macro recall."""
    of_class = [float((predicted[labels == label] == label).mean()) for label in np.unique(labels)]
    return {"top1": float((predicted == labels).mean()), "macro_recall": float(np.mean(of_class))}


def prior(values: np.ndarray, labels: np.ndarray, per_class: int, seed: int) -> dict[str, Any]:
    """Cut half of the classes to 1/20, and compare what can be done about it."""
    rows, test = draw_rows(labels, per_class, seed)
    classes = int(labels.max()) + 1
    rare = np.random.default_rng(seed).permutation(classes)[: classes // 2]
    kept = [rows[labels[rows] == k][: max(2, per_class // CUT) if k in rare else None] for k in range(classes)]
    rows = np.concatenate(kept)
    x, y = values[rows], labels[rows]
    weight, bias, _ = probe(x, y, classes, seed)
    logits = functional.linear(torch.from_numpy(values[test]), weight, bias).numpy()
    counts = np.bincount(y, minlength=classes).tolist()
    scale = x.std()
    least = min(counts)
    options: dict[str, Any] = {"class_weight": "balanced", "max_iter": 300}
    folds = LogisticRegressionCV(Cs=np.logspace(-4, 1, 6), cv=min(5, least), scoring="neg_log_loss", **options)
    chosen = folds.fit(x / scale, y) if least > 1 else LogisticRegression(C=0.1, **options).fit(x / scale, y)
    return {
        "images": len(rows),
        "plain": recalls(logits.argmax(1), labels[test]),
        "class_weights": recalls(chosen.predict(values[test] / scale), labels[test]),
        "prior_uniform": recalls((logits + log_ratio(counts)).argmax(1), labels[test]),
    }


def loss_of(logits: np.ndarray, labels: np.ndarray, temperature: float) -> float:
    return float(functional.cross_entropy(torch.from_numpy(logits) / temperature, torch.from_numpy(labels)))


def knowing(sets: dict[str, tuple[np.ndarray, np.ndarray]], name: str, per_class: int, seed: int) -> dict[str, Any]:
    """Measure temperature, unlike images and the promise of one draw."""
    values, labels = sets[name]
    rows, test = draw_rows(labels, per_class, seed)
    x, y, classes = values[rows], labels[rows], int(labels.max()) + 1
    weight, bias, penalty = probe(x, y, classes, seed)

    def answers(table: np.ndarray) -> np.ndarray:
        return functional.linear(torch.from_numpy(table), weight, bias).numpy()

    folds = fold_numbers(y, folds=5, seed=seed)
    logits, answered = out_of_fold(x, y, folds, classes, penalties=[penalty]).logits, answers(values[test])
    figures = Evaluation(len(y), 0.0, float((logits.argmax(1) == y).mean()), None, (), (), logits=logits, labels=y)
    before = loss_of(answered, labels[test], 1.0)
    document: dict[str, Any] = {"images": len(y), "test": len(test), "loss_before": before}
    try:
        fitted = fit(figures)
        kept = fitted.temperature if fitted.gain > SURE_ERRORS * fitted.gain_error else 1.0
    except DataError:
        kept = 1.0
    document["temperature"], document["loss_after"] = kept, loss_of(answered, labels[test], kept)
    document["loss_after_tenth"] = by_a_tenth(x, y, values[test], labels[test], seed)
    known = unit_rows(torch.from_numpy(x)).half()
    own = np.arange(len(x))

    def far(table: np.ndarray, **options: Any) -> np.ndarray:
        return nearest(known, unit_rows(torch.from_numpy(table)), 10, **options)[0][:, -1].numpy()

    def p_of(z: np.ndarray) -> np.ndarray:
        return torch.from_numpy(z).double().softmax(1).amax(1).numpy()

    distances, energies = far(x, groups=own, own=own), energy_of(torch.from_numpy(logits)).numpy()
    limit, least = joint_limits(distances, energies)

    def of_class(table: np.ndarray, z: np.ndarray, **options: Any) -> np.ndarray:
        """Return distances to the fifth nearest training image of the predicted class."""
        units, predicted = unit_rows(torch.from_numpy(table)), z.argmax(1)
        result = np.empty(len(table))
        for label in range(classes):
            mine, theirs = predicted == label, y == label
            ids = {key: value[mine] if key == "own" else value[theirs] for key, value in options.items()}
            near = nearest(known[torch.from_numpy(theirs)], units[torch.from_numpy(mine)], 5, **ids)[0]
            result[mine] = near[:, -1].numpy()
        return result

    def tails(d: np.ndarray, e: np.ndarray) -> np.ndarray:
        """Return the product of the shares of held-out images that are farther, and that have less energy."""
        farther = 1 - np.searchsorted(np.sort(distances), d) / (len(distances) + 1)
        return farther * (np.searchsorted(np.sort(energies), e, side="right") + 1) / (len(energies) + 1)

    in_class, rarest = of_class(x, logits, groups=own, own=own), np.quantile(tails(distances, energies), 0.05)
    alone = {"probability": np.quantile(p_of(logits), 0.05), "energy": np.quantile(energies, 0.05)}
    farthest = np.quantile(distances, 0.95)

    def passing(table: np.ndarray) -> dict[str, float]:
        z, d = answers(table), far(table)
        e = energy_of(torch.from_numpy(z)).numpy()
        passes = {"probability": p_of(z) >= alone["probability"], "energy": e >= alone["energy"]}
        passes |= {"distance": d <= farthest, "both": (d <= limit) & (e >= least)}
        passes |= {"of_class": of_class(table, z) <= np.quantile(in_class, 0.95), "tails": tails(d, e) >= rarest}
        return {key: float(value.mean()) for key, value in passes.items()}

    document["passing"] = {
        other: passing(table if other != name else values[test]) for other, (table, _) in sets.items()
    }
    interval = wilson(document["passing"][name]["both"], len(test))
    document["kept_interval"] = [interval.low, interval.high]
    try:
        promised = promise(p_of(logits / kept), logits.argmax(1) == y, 0.95, f"{len(y)} images")
        sure = p_of(answered / kept) >= promised.threshold
        right = (answered.argmax(1) == labels[test])[sure]
        spread = wilson(float(right.mean()), int(sure.sum())) if sure.any() else wilson(1.0, 0)
        document["promise"] = {"coverage": float(sure.mean()), "right": float(right.mean()), "interval": vars(spread)}
    except DataError as error:
        document["promise"] = str(error)
    return document


def by_a_tenth(x: np.ndarray, y: np.ndarray, test: np.ndarray, labels: np.ndarray, seed: int) -> float | None:
    """Return the log loss after a temperature from a tenth of the images, without which the probe was fitted."""
    held = fold_numbers(y, folds=10, seed=seed) == 0
    weight, bias, _ = probe(x[~held], y[~held], int(y.max()) + 1, seed)
    z = functional.linear(torch.from_numpy(x[held]), weight, bias).numpy()
    figures = Evaluation(len(z), 0.0, 0.0, None, (), (), logits=z, labels=y[held])
    try:
        temperature = fit(figures).temperature
    except DataError:
        return None
    return loss_of(functional.linear(torch.from_numpy(test), weight, bias).numpy(), labels, temperature)


def summary(draws: list[dict[str, Any]]) -> dict[str, Any]:
    """Return means over draws of what is compared."""
    both: dict[str, list[float]] = {}
    for row in draws:
        for kind in ("plain", "class_weights", "prior_uniform"):
            both.setdefault(kind, []).append(row["prior"][kind]["macro_recall"])
    gains = np.array(both["prior_uniform"]) - np.array(both["class_weights"])
    names = draws[0]["knowing"]["passing"]
    return {
        "macro_recall": {kind: float(np.mean(values)) for kind, values in both.items()},
        "gain_over_class_weights": {"mean": float(gains.mean()), "each": gains.tolist()},
        "loss": {
            key: float(np.mean(values))
            if (values := [v for row in draws if (v := row["knowing"][key]) is not None])
            else None
            for key in ("loss_before", "loss_after", "loss_after_tenth")
        },
        "passing": {
            other: {
                kind: float(np.mean([row["knowing"]["passing"][other][kind] for row in draws])) for kind in names[other]
            }
            for other in names
        },
    }


def main() -> None:
    """Measure every draw that has no kept result yet, and record all."""
    parser = machine.parser(
        __doc__, data="clothing-10.tar, cifar10-png.tar.zst, weights/mobilenetv2_100/", work="images"
    )
    parser.add_argument("--sets", nargs="+", default=["clothing", "cifar", "grey"])
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument("--size", type=int, default=96)
    parser.add_argument("--per-class", type=int, default=60)
    args: argparse.Namespace = parser.parse_args()
    torch.set_num_threads(1)
    (weights,) = (args.data / "weights" / "mobilenetv2_100").glob("*.safetensors")
    trained = restore(weights, model="timm/mobilenetv2_100")
    trained = replace(trained, input=replace(trained.input, size=args.size))
    work = args.work.resolve()
    sets = {chosen.partition("=")[0]: features_of(images_of(chosen, args.data, work), trained) for chosen in args.sets}
    document: dict[str, Any] = {"size": args.size, "per_class": args.per_class, "sets": {}}
    for name, (values, labels) in sets.items():
        draws = []
        for seed in range(args.draws):
            file = f"{name}-{'-'.join(sets)}-{args.size}-{args.per_class}-{seed}.json"
            measures = {"prior": partial(prior, values, labels), "knowing": partial(knowing, sets, name)}
            draws.append(
                {
                    key: machine.kept(work / "kept" / f"{key}-{file}", partial(call, args.per_class, seed))
                    for key, call in measures.items()
                }
            )
            machine.say(f"{name} {seed}: {draws[-1]['prior']}")
        document["sets"][name] = {"images": len(labels), **summary(draws), "draws": draws}
    machine.record("limits", machine.rounded(document, 4), save=args.save)


if __name__ == "__main__":
    main()
