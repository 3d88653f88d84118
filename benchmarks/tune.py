"""``steady tune`` against an exhaustive grid: how much of the best throughput it finds, and at what share of the cost.

Six pairs of a model and data. Of each:

- ``grid``: every batch (powers of two from 16 on, at most a tenth of the training images and 512), in fp32 and (where
  the processor multiplies it) bf16, one, half and all of the cores in loader threads: loading and updates together, as
  ``steady tune`` measures them, each in a process of its own.
- ``tune``: the same search as the command's, with an empty cache, within ``--minutes``; its seconds include its start.
  Compiling is left out of both: it would be most of the grid's cost.
- Turns: the best of the grid, what was tuned, and the recipe with defaults, one after another, five times, so that
  what a neighbour takes moves all alike. ``share_of_best`` is the median ratio of tuned to best, ``gain`` of tuned to
  the defaults. ``cost_share``: seconds of ``tune`` over those of the grid.

The bar: a share of 0.95 at least, at a tenth of the cost at most. Every measurement of the grid is kept in ``--work``
at once, and every pair that is done: the same command goes on.

usage: python benchmarks/tune.py --work FOLDER [--data FOLDER] [--pairs NAME ...] [--minutes 2] [--quick] [--save]
       FOLDER of the data holds cifar10-png.tar.zst, clothing-10.tar, imagenet-sample-200.tar
       --quick: shorter measurements (0.3 s), a minute of tuning, and a grid of three batches (16, 64, 256): its cost
       says nothing of the exhaustive one's
"""

from __future__ import annotations

import os
import tarfile
import time
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import machine
import steadytrain as st
from machine import unpacked
from steadytrain.config import Recipe
from steadytrain.config.defaults import MAX_BATCH_SHARE
from steadytrain.machine import facts
from steadytrain.tuning.probes import ProbeCache, ProbeOutcome, Prober
from steadytrain.tuning.trials import Setting, json_key
from steadytrain.tuning.tune import Tuned, tune

PAIRS = {
    "resnet20-cifar10": ("resnet20", "cifar10", {}),
    "quick8-cifar10": ("quick8", "cifar10", {}),
    "lenet-cifar10": ("lenet", "cifar10", {}),
    "mobilenetv3-photos": ("timm/mobilenetv3_small_100", "photos", {"data.size": 160}),
    "resnet18-photos": ("timm/resnet18", "photos", {"data.size": 128}),
    "resnet18-large": ("timm/resnet18", "large", {"data.size": 128}),
}
"""Name -> model, data, and what the recipe says beside them. ``large``: JPEGs of about 500 x 400, as they are."""

FREE = ("batch", "precision", "threads", "rate")
CIFAR_IMAGES, LARGE_COPIES = 10_000, 5
TURNS, LIMIT = 5, 300.0


def data_of(name: str, data: Path, work: Path) -> Path:
    """Pack one of the three kinds of images; return the records."""
    rec = work / f"{name}.rec"
    if rec.exists():
        return rec
    if name == "cifar10":
        images = unpacked(data / "cifar10-png.tar.zst", work / "images-cifar10") / "train"
        each = CIFAR_IMAGES // 10
        folder = linked({c.name: sorted(c.iterdir())[:each] for c in sorted(images.iterdir())}, work / "few-cifar10", 1)
    elif name == "photos":
        folder = unpacked(data / "clothing-10.tar", work / "images-photos") / "train"
    else:
        raw = work / "images-large"
        if not raw.exists():
            raw.mkdir(parents=True)
            with tarfile.open(data / "imagenet-sample-200.tar") as archive:
                archive.extractall(raw, filter="data")
        files = sorted(path for path in raw.rglob("*") if path.suffix.lower() in (".jpeg", ".jpg"))
        classes = {f"class{k}": files[k::10] for k in range(10)}
        folder = linked(classes, work / "few-large", LARGE_COPIES)
    st.pack(folder, work / name)
    return rec


def linked(classes: dict[str, list[Path]], folder: Path, copies: int) -> Path:
    """Link images of each class, each so many times."""
    for name, files in classes.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for copy, path in product(range(copies), files):
            link = folder / name / f"{copy}-{path.name}"
            if not link.exists():
                link.symlink_to(path.resolve())
    return folder


class Grid:
    """Measures settings together with loading, once each; counts the seconds that each has taken."""

    def __init__(self, prober: Prober, recipe: Recipe, path: Path, seconds: float) -> None:
        self._prober, self._recipe, self._seconds = prober, recipe, seconds
        self._cache = ProbeCache(path)

    def measure(self, setting: Setting) -> ProbeOutcome:
        """Measure one setting, or return what was measured of it before."""
        key = json_key("both", setting)
        known = self._cache.get(key)
        if known is None:
            began = time.perf_counter()
            outcome = self.again(setting)
            known = replace(outcome, figures={**outcome.figures, "wall_seconds": time.perf_counter() - began})
            self._cache.put(key, known)
        return known

    def again(self, setting: Setting) -> ProbeOutcome:
        """Measure one setting now."""
        recipe = setting.apply(self._recipe)
        return self._prober.ask("both", recipe, seconds=self._seconds, limit_seconds=LIMIT, settle_seconds=10.0)


def settings_of(recipe: Recipe, num_train: int, precisions: list[str], *, quick: bool) -> list[Setting]:
    """Return every combination; ``quick``: some."""
    powers = (4, 6, 8) if quick else range(4, 10)
    batches = [1 << power for power in powers if 1 << power <= num_train * MAX_BATCH_SHARE]
    start = replace(Setting.of(recipe), compile="none")
    cores = facts.cores()
    threads = sorted({1, max(1, cores // 2), cores})
    return [
        replace(start, batch_size=batch, precision=precision, threads=number)
        for batch, precision, number in product(batches, precisions, threads)
    ]


def described(setting: Setting) -> dict[str, Any]:
    return {
        "batch_size": setting.batch_size,
        "precision": setting.precision,
        "threads": setting.threads,
    }


def pair(name: str, data: Path, work: Path, *, minutes: float, quick: bool) -> dict[str, Any]:
    """Measure one pair."""
    model, images, more = PAIRS[name]
    recipe = st.default_recipe(data_of(images, data, work), {"model.name": model, "parallel.device": "cpu", **more})
    os.environ["STEADYTRAIN_CACHE"] = str(work / f"cache-{name}-{time.time_ns()}")  # what tuning keeps begins empty
    began = time.perf_counter()
    with Prober() as prober:
        tuned: Tuned = tune(recipe, prober=prober, seconds=60 * minutes, free=FREE, began=began)
        tune_seconds = time.perf_counter() - began
        kept = work / f"grid-{name}{'-quick' if quick else ''}.jsonl"
        grid = Grid(prober, recipe, kept, 0.3 if quick else 1.2)
        settings = settings_of(recipe, tuned.facts["num_train"], tuned.facts["precisions"], quick=quick)
        outcomes = {setting: grid.measure(setting) for setting in settings}
        best = max(settings, key=lambda setting: outcomes[setting].images_per_second)
        chosen, usual = Setting.of(tuned.recipe), Setting.of(recipe)
        contenders = {"best": best, "tuned": chosen, "usual": usual}
        figures = [{who: grid.again(setting).figures for who, setting in contenders.items()} for _ in range(TURNS)]
    turns = [{who: float(each.get("images_per_second", 0.0)) for who, each in turn.items()} for turn in figures]
    grid_seconds = sum(float(outcome.figures["wall_seconds"]) for outcome in outcomes.values())
    return {
        "model": model,
        "data": images,
        "num_train": tuned.facts["num_train"],
        "size": tuned.facts["size"],
        "default": described(usual),
        "best": described(best),
        "tuned": described(chosen),
        "turns": turns,
        "share_of_best": median(turn["tuned"] / turn["best"] for turn in turns if turn["best"]),
        "gain": median(turn["tuned"] / turn["usual"] for turn in turns if turn["usual"]),
        "tune_seconds": tune_seconds,
        "tune_measurements": len(tuned.trials),
        "grid_seconds": grid_seconds,
        "grid_measurements": len(settings),
        "cost_share": tune_seconds / grid_seconds,
        "failed": {str(described(s)): o.error for s, o in outcomes.items() if o.trouble},
    }


def main() -> None:
    """Measure the pairs and record what came of them."""
    parser = machine.parser(
        __doc__, data="archives of images", work="data and finished results", choose=("--pairs", PAIRS)
    )
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    minutes = args.minutes or (1.0 if args.quick else 2.0)
    figures: dict[str, Any] = {}
    for name in args.pairs:
        measure = partial(pair, name, args.data, args.work, minutes=minutes, quick=args.quick)
        figures[name] = machine.kept(args.work / f"{name}{'-quick' if args.quick else ''}.json", measure)
    shares = [figure["share_of_best"] for figure in figures.values()]
    costs = [figure["cost_share"] for figure in figures.values()]
    summary = {
        "quick": args.quick,
        "minutes": minutes,
        "bar": {"share_of_best": 0.95, "cost_share": 0.1},
        "worst_share_of_best": min(shares),
        "median_share_of_best": median(shares),
        "worst_cost_share": max(costs),
        "median_cost_share": median(costs),
        "gains": {name: figure["gain"] for name, figure in figures.items()},
    }
    document = {**summary, "pairs": figures}
    machine.record(machine.of_cases("tune", args.pairs, PAIRS), document, save=args.save)


if __name__ == "__main__":
    main()
