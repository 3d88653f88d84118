"""Compare sizes of images and networks by the probes of their features, out of fold, and measure how fast they are."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from msgspec.structs import replace

from steadytrain import models
from steadytrain.config import Recipe
from steadytrain.config.defaults import FINETUNED_MODELS, LEAST_EPOCHS
from steadytrain.config.phases import parse_train
from steadytrain.data.arrays import Ints
from steadytrain.data.sources.select import fold_numbers, split_by_fraction
from steadytrain.errors import ModelError
from steadytrain.events import Tried
from steadytrain.format import Say
from steadytrain.models.registry import catalogue, licence_kind
from steadytrain.training import build
from steadytrain.training.compute.timing import timed, use_fastest_threads
from steadytrain.training.data import DataSets, DeviceBatch, load, open_data
from steadytrain.training.device import prepare_device, set_up_machine
from steadytrain.training.features.folds import out_of_fold
from steadytrain.training.features.table import FEATURE_BATCH, feature_table
from steadytrain.training.finetuning.tries import FIRST_EPOCHS
from steadytrain.training.inference.trained import Trained
from steadytrain.training.precision import Policy
from steadytrain.training.state import preserve_process

RESERVE = 0.1
"""Share of the minutes that nothing is planned for: measured rates are of a moment, and saving takes time too."""

MEASURE_SHARE, MEASURE_SECONDS = 0.03, 6.0
"""The most that each of the two measurements takes: this share of the minutes, and so many seconds."""

SIZES = (96, 160, 224)
"""Sides of images that are compared, in pixels: none is above the side that folders are packed at."""

COMPARE_SHARE, LEAST_COMPARED = 0.25, 300
"""The share of the minutes that comparing takes; and the least images of a comparison, where there are as many."""

MOST_NETWORKS = 4
"""Networks that are compared: each has to be made, and measured."""

UPDATES_GAIN = 0.7
"""What updates leave of a probe's loss, about: where only a worse size leaves time for them (docs/laboratory.md)."""

FOLDS = 5


@dataclass(frozen=True)
class Rates:
    """Measurements on the user's images, with the loader: images per second, and seconds of a start.

    ``features``: through the frozen network. ``full``: in updates of all that the recipe trains. ``startup``: to open
    the data and to make the network, which the run does again.
    """

    features: float
    full: float
    startup: float

    def at(self, size: int, measured: int) -> Rates:
        """Return the rates at another size of images: time grows with their area."""
        share = (measured / size) ** 2
        return Rates(self.features * share, self.full * share, self.startup)


def list_candidates(recipe: Recipe, chosen: Container[str], *, allow_import: bool) -> list[Recipe]:
    """Return the recipe with each network whose weights are here, and with each size that it takes: those of a probe.

    What the user chose stays. Nothing is fetched for it, and no weights of a non-commercial licence are taken.
    """
    if not parse_train(recipe.model.train).probe_passes:
        return [recipe]
    names = [recipe.model.name]
    is_bound = bool(recipe.model.options) or recipe.data.mean is not None or recipe.model.weights is not None
    if "model.name" not in chosen and recipe.model.pretrained and not is_bound:
        here = [entry for entry in catalogue() if entry.weights == "at hand" and entry.name != recipe.model.name]
        free = [entry.name for entry in here if licence_kind(entry.licence) != "non-commercial"]
        names += sorted(free, key=lambda name: name not in FINETUNED_MODELS)
    candidates = []
    for name in names[:MOST_NETWORKS]:
        source, usable = models.find(name, allow_import=allow_import), list[Recipe]()
        for size in () if "data.size" in chosen else SIZES:
            try:
                models.require_size(source, recipe.model.options, size)
            except ModelError:
                continue
            usable.append(recipe.with_({"model.name": name, "data.size": size}))
        candidates += usable or [recipe.with_({"model.name": name})]
    return candidates


@dataclass(frozen=True)
class Compared:
    """The best of the candidates, its rates on so many images, and what each candidate came to."""

    recipe: Recipe
    rates: Rates
    num_train: int
    num_val: int
    num_test: int
    tried: tuple[Tried, ...]


def compare(candidates: Sequence[Recipe], minutes: float, *, began: float, allow_import: bool, say: Say) -> Compared:
    """Compare candidates by the out-of-fold loss of their probes, the fastest first, while that takes little time.

    Of many images, a part of each class is enough.
    """
    first, seconds = candidates[0], min(MEASURE_SECONDS, MEASURE_SHARE * 60 * minutes)
    measured = dict[str, tuple[Rates, int]]()
    for recipe in candidates:
        if recipe.model.name not in measured:
            measured[recipe.model.name] = measure(recipe, seconds=seconds, allow_import=allow_import)
    rated = []
    for recipe in candidates:
        rates, side = measured[recipe.model.name]
        rated.append((recipe, rates.at(recipe.data.size or side, side)))
    rated.sort(key=lambda pair: -pair[1].features)
    device = prepare_device(first)
    with preserve_process(device), closing(open_data(first.data, first.model, seed=first.seed)) as data:
        set_up_machine(first, device, None, lambda message: None)
        n, num_val, tried = data.num_train, data.num_val, list[Tried]()
        numbers = [COMPARE_SHARE * 60 * minutes / total for total in accumulate(1 / r.features for _, r in rated)]
        rated = [pair for pair, number in zip(rated, numbers, strict=True) if number >= min(n, LEAST_COMPARED)]
        if len(rated) < 2 or data.num_labels is not None or n < 4 * FOLDS:
            return Compared(*(rated or [(first, measured[first.model.name][0])])[0], n, num_val, data.num_test, ())
        folds = _folds(data, numbers[len(rated) - 1] / n, first.seed)
        for recipe, rates in rated:
            tried.append(_try_features(recipe, data, folds, allow_import=allow_import))
            left = 60 * minutes * (1 - RESERVE) - (time.perf_counter() - began) - n / rates.features
            fitting = max(0.0, left / (n / rates.full + num_val / rates.features))
            tried[-1] = replace(tried[-1], epochs=fitting)
            say(tried[-1].words)
    best = best_of(tried)
    tried[best] = replace(tried[best], verdict="chosen")
    recipe = rated[best][0]
    rates, _ = measure(recipe, seconds=seconds, allow_import=allow_import)  # other sizes were estimated
    return Compared(recipe, rates, n, num_val, data.num_test, tuple(tried))


def best_of(tried: Sequence[Tried]) -> int:
    """Return which of the candidates is taken, by the loss of their probes and the epochs that they have time for.

    The lowest loss wins among those with time for :data:`.FIRST_EPOCHS`, if it is within a standard error of the lowest
    with time for :data:`.LEAST_EPOCHS`, which wins else; and another only where its probe is better than what updates
    may leave of that loss.
    """

    def lowest(epochs: float) -> int | None:
        fitting = [k for k, each in enumerate(tried) if (each.epochs or 0.0) >= epochs]
        return min(fitting, key=lambda k: tried[k].loss, default=None)

    best, few, many = lowest(0) or 0, lowest(LEAST_EPOCHS), lowest(FIRST_EPOCHS)
    if few is None or tried[best].loss < UPDATES_GAIN * tried[few].loss:
        return best
    is_close = many is not None and tried[many].loss <= tried[few].loss + (tried[few].loss_error or 0.0)
    return many if is_close and many is not None else few


def _folds(data: DataSets, share: float, seed: int) -> tuple[Ints, Ints, Ints]:
    """Return the numbers of a share of the training records, their labels and their folds, groups together."""
    ids = np.arange(len(data.train)) if data.train_ids is None else data.train_ids
    labels = np.asarray(data.train.labels, np.int64)
    if share < 1:
        ids = ids[split_by_fraction(labels[ids], fraction=share, seed=seed)[1]]
    groups = ids if data.groups is None else data.groups[ids]
    folds = min(FOLDS, len(np.unique(groups)))
    return ids, labels[ids], fold_numbers(labels[ids], folds=folds, seed=seed, groups=groups)


def _try_features(recipe: Recipe, data: DataSets, folds: tuple[Ints, Ints, Ints], *, allow_import: bool) -> Tried:
    """Fit probes of a frozen network to all folds but one, and return what they say of that."""
    began, (ids, labels, fold_of) = time.perf_counter(), folds
    built, input = build.model(recipe, data, allow_import=allow_import)
    policy = Policy(recipe.precision, prepare_device(recipe))
    module = policy.prepare(built.module).eval()
    trained = Trained(module, policy, input, data.classes, built.name, Path(built.name))
    table = feature_table(trained, data.train, ids=ids, threads=recipe.parallel.threads, say=lambda line: None)
    groups = None if data.groups is None else data.groups[ids]
    answers = out_of_fold(table.values[ids], labels, fold_of, len(data.classes), groups=groups)
    return Tried(
        step=0,
        what="features",
        model=built.name,
        size=input.size or 0,
        loss=answers.loss,
        loss_error=answers.loss_error,
        top1=answers.top1,
        seconds=time.perf_counter() - began,
        verdict="",
    )


def measure(recipe: Recipe, *, seconds: float, allow_import: bool) -> tuple[Rates, int]:
    """Time the frozen network, and updates of all that the recipe trains, on the user's images.

    A network is made for it and thrown away; nothing is written. Returns the rates, and the size of the images.

    Raises:
        ModelError: the classifier is not one linear layer.
    """
    began = time.perf_counter()
    device = prepare_device(recipe)
    with preserve_process(device), closing(open_data(recipe.data, recipe.model, seed=recipe.seed)) as data:
        set_up_machine(recipe, device, None, lambda message: None)
        torch.manual_seed(recipe.seed)
        built, input = build.model(recipe, data, allow_import=allow_import)
        state = build.state(recipe, built, build.engine(recipe, device, None), input=input)
        update = build.update(recipe, built, input, state, num_classes=len(data.classes), num_labels=data.num_labels)
        startup = time.perf_counter() - began
        use_fastest_threads(recipe, update, state, lambda message: None)

        def send_through(batch: DeviceBatch) -> None:
            state.module.eval()
            with torch.no_grad(), state.policy.autocast():
                state.module(state.policy.images(batch.images, input.mean, input.std))

        def step(batch: DeviceBatch) -> None:
            models.set_train_mode(built, recipe.model.train, batch_norm=recipe.model.batch_norm)
            update(state, batch, 1e-12)

        rates: list[float] = []
        for size, work in ((FEATURE_BATCH, send_through), (recipe.batch_size, step)):
            feed = build.training_feed(
                recipe, data, input, device, batch_size=size, start=0, stop=None, threads=recipe.parallel.threads
            )
            with feed:
                rates.append(_rate(load(feed, device), work, size, device, seconds / 2))
        features, full = rates
        return Rates(features, full, startup), input.size or 0


def _rate(
    batches: Iterator[DeviceBatch], work: Callable[[DeviceBatch], None], size: int, device: torch.device, seconds: float
) -> float:
    """Images per second of loading and ``work``, after a first batch that is not counted."""
    work(next(batches))
    images, began = 0, time.perf_counter()
    while images < 2 * size or time.perf_counter() - began < seconds:
        timed(device, lambda: work(next(batches)))
        images += size
    return images / (time.perf_counter() - began)
