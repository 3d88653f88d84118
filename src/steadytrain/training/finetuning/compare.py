"""Compare sizes of images and networks by the probes of their features, out of fold, and measure how fast they are."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path

import torch
from msgspec.structs import replace

from steadytrain import models
from steadytrain.config import Recipe
from steadytrain.config.defaults import FETCHED_MODELS, FINETUNED_MODELS, LEAST_EPOCHS
from steadytrain.config.phases import parse_train
from steadytrain.errors import ModelError, SteadyError, first_line
from steadytrain.events import Tried
from steadytrain.format import Say
from steadytrain.models import Built
from steadytrain.models.registry import catalogue, has_local_weights, licence_kind
from steadytrain.training import build
from steadytrain.training.compute.timing import timed, use_fastest_threads
from steadytrain.training.data import DataSets, DeviceBatch, load, open_data
from steadytrain.training.device import prepare_device, set_up_machine
from steadytrain.training.features.table import FEATURE_BATCH
from steadytrain.training.finetuning.fits import FIT_IMAGES, FOLDS, compare_fits, fold_training
from steadytrain.training.inference.classifier import classifier_of
from steadytrain.training.inference.trained import Trained
from steadytrain.training.precision import Policy
from steadytrain.training.state import in_mode, preserve_process

RESERVE = 0.1
"""Share of the minutes that nothing is planned for: measured rates are of a moment, and saving takes time too."""

MEASURE_SHARE, MEASURE_SECONDS = 0.03, 6.0
"""The most that measuring a network takes: this share of the minutes, and so many seconds."""

SIZES = (96, 160, 224)
"""Sides of images that are compared, in pixels: none is above the side that folders are packed at."""

COMPARE_SHARE, LEAST_COMPARED = 0.25, 300
"""The share of the minutes that comparing takes; and the least images of a comparison, where there are as many."""

FETCH_SHARE, FITS_SHARE = 0.1, 0.1
"""The share of the minutes that fetching networks takes; and of those that are left, comparing how images are cut."""

MOST_NETWORKS = 4
"""Networks of those here that are compared: each has to be made, and measured."""

UPDATES_GAIN = 0.7
"""What updates leave of a probe's loss, about: where only a worse size leaves time for them (docs/laboratory.md)."""


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


def list_candidates(
    recipe: Recipe, chosen: Container[str], *, allow_import: bool, fetches: bool = False
) -> list[Recipe]:
    """Return the recipe with each network whose weights are here, and with each size that it takes: those of a probe.

    What the user chose stays. No weights of a non-commercial licence are taken. ``fetches``: :data:`.FETCHED_MODELS`
    are candidates as well, the cheapest first.
    """
    if not parse_train(recipe.model.train).probe_passes:
        return [recipe]
    names = [recipe.model.name]
    is_bound = bool(recipe.model.options) or recipe.data.mean is not None or recipe.model.weights is not None
    if "model.name" not in chosen and recipe.model.pretrained and not is_bound:
        here = [entry for entry in catalogue() if entry.weights == "at hand"]
        free = [entry.name for entry in here if licence_kind(entry.licence) != "non-commercial"]
        names += sorted(free, key=lambda name: name not in FINETUNED_MODELS)
        names = [*list(dict.fromkeys(names))[:MOST_NETWORKS], *(FETCHED_MODELS if fetches else ())]
    candidates = []
    for name in dict.fromkeys(names):
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
    tried: tuple[Tried, ...] = ()


def compare(
    candidates: Sequence[Recipe], minutes: float, *, began: float, allow_import: bool, keeps_fit: bool = False, say: Say
) -> Compared:
    """Compare candidates by the out-of-fold loss of their probes, the fastest first, while that takes little time.

    What is compared leaves time for a probe of all images. Of many images, a part of each class is enough. Last, how
    long images become square is compared; ``keeps_fit``: the user is told what is better, and keeps the choice.
    """
    first, opening, share = candidates[0], time.perf_counter(), COMPARE_SHARE * 60 * minutes
    device, tried = prepare_device(first), list[Tried]()

    def seconds_left() -> float:
        return began + 60 * minutes * (1 - RESERVE) - time.perf_counter()

    with preserve_process(device), closing(open_data(first.data, first.model, seed=first.seed)) as data:
        set_up_machine(first, device, None, lambda message: None)
        n, seconds = data.num_train, min(MEASURE_SECONDS, MEASURE_SHARE * 60 * minutes)
        opened, least = time.perf_counter() - opening, min(n, LEAST_COMPARED) / share
        rate = partial(measure, data=data, seconds=seconds, opened=opened, allow_import=allow_import)
        missing = {each.model.name for each in candidates[1:] if each.model.pretrained} - {first.model.name}
        missing = {name for name in missing if not has_local_weights(name)}
        rated = _rate_all(candidates, missing, rate, least, say)
        left = seconds_left() - share
        fastest = next(pair for pair in rated if pair[0].model.name not in missing)
        rated = [pair for pair in rated if (n + data.num_val) / pair[1].features + pair[1].startup <= left]
        totals = accumulate(1 / rates.features for _, rates in rated)
        rated = [pair for pair, total in zip(rated, totals, strict=True) if 1 / total >= least]
        fetched = dict.fromkeys(recipe.model.name for recipe, _ in rated if recipe.model.name in missing)
        lost = _fetch(fetched, FETCH_SHARE * 60 * minutes, say)
        rated = [pair for pair in rated if pair[0].model.name not in lost] or [fastest]
        recipe, rates = rated[0]
        can_fold = parse_train(first.model.train).probe_passes and data.num_labels is None and n >= 4 * FOLDS
        if can_fold and len(rated) > 1:
            folded = fold_training(data, first.seed, int(share / sum(1 / rates.features for _, rates in rated)))
            for recipe, rates in rated:
                _, trained = _freeze(recipe, data, allow_import=allow_import)
                event, _ = folded.try_features(trained, data, recipe.parallel.threads)
                fitting = (seconds_left() - n / rates.features) / (n / rates.full + data.num_val / rates.features)
                tried.append(replace(event, epochs=max(0.0, fitting)))
                say(tried[-1].words)
            best = best_of(tried)
            recipe, tried[best] = rated[best][0], replace(tried[best], verdict="chosen")
            rates, _ = rate(recipe)  # other sizes were estimated
        if can_fold and 2 * min(n, FIT_IMAGES) / rates.features <= FITS_SHARE * seconds_left():
            fits = compare_fits(recipe, *_freeze(recipe, data, allow_import=allow_import), data)
            for event in fits:
                say(event.words)
            if not keeps_fit and (better := [event for event in fits if event.verdict]):
                fits[fits.index(better[0])] = replace(better[0], verdict="chosen")
                recipe = recipe.with_({"data.fit": better[0].fit})
            tried += fits
        return Compared(recipe, rates, n, data.num_val, data.num_test, tuple(tried))


def best_of(tried: Sequence[Tried]) -> int:
    """Return which of the candidates is taken, by the loss of their probes and the epochs that they have time for.

    The lowest loss wins among those with time for :data:`.LEAST_EPOCHS`; another only where its probe is better than
    what updates may leave of that loss. A smaller size for the sake of more epochs cost a point (docs/laboratory.md).
    """

    def lowest(epochs: float) -> int | None:
        fitting = [k for k, each in enumerate(tried) if (each.epochs or 0.0) >= epochs]
        return min(fitting, key=lambda k: tried[k].loss, default=None)

    best, timely = lowest(0) or 0, lowest(LEAST_EPOCHS)
    return best if timely is None or tried[best].loss < UPDATES_GAIN * tried[timely].loss else timely


def _rate_all(
    candidates: Sequence[Recipe],
    missing: Container[str],
    rate: Callable[[Recipe], tuple[Rates, int]],
    least: float,
    say: Say,
) -> list[tuple[Recipe, Rates]]:
    """Measure each network once, those of ``missing`` without weights, and return the candidates, the fastest first.

    A network that fails is left out, unless it is the user's. After one of ``missing`` that makes less than ``least``
    images a second, none is measured: they cost more and more.
    """
    measured, rated = dict[str, tuple[Rates, int] | None](), list[tuple[Recipe, Rates]]()
    for recipe in candidates:
        name, is_missing = recipe.model.name, recipe.model.name in missing
        if name not in measured:
            measured[name] = None
            try:
                measured[name] = rate(recipe.with_({"model.pretrained": False}) if is_missing else recipe)
            except (SteadyError, torch.OutOfMemoryError) as error:
                if name == candidates[0].model.name:
                    raise
                say(f"{name} is not compared: {first_line(error)}")
        if (pair := measured[name]) is not None:
            rates = pair[0].at(recipe.data.size or pair[1], pair[1])
            rated.append((recipe, rates))
            if is_missing and rates.features < least:
                break
    return sorted(rated, key=lambda pair: -pair[1].features)


def _fetch(names: Iterable[str], seconds: float, say: Say) -> set[str]:
    """Fetch the weights of networks within so many seconds in all; return the names of those that stay without."""
    end, lost = time.perf_counter() + seconds, set[str]()
    for name in names:
        if (left := end - time.perf_counter()) <= 0:
            say(f"{name} is not compared: the time for fetching is over")
            lost.add(name)
            continue
        say(f"fetching the weights of {name}, to compare it")
        try:
            models.fetch_weights(models.find(name), seconds=left)
        except ModelError as error:
            say(f"{name} is not compared: {first_line(error)}")
            lost.add(name)
    return lost


def _freeze(recipe: Recipe, data: DataSets, *, allow_import: bool) -> tuple[Built, Trained]:
    """Make the network of a recipe, and what computes its features."""
    built, input = build.model(recipe, data, allow_import=allow_import)
    policy = Policy(recipe.precision, prepare_device(recipe))
    module = policy.prepare(built.module).eval()
    return built, Trained(module, policy, input, data.classes, built.name, Path(built.name))


def measure(recipe: Recipe, *, data: DataSets, seconds: float, opened: float, allow_import: bool) -> tuple[Rates, int]:
    """Time the frozen network, and updates of all that the recipe trains, on the user's images.

    A network is made for it and thrown away. Returns the rates, and the size of the images; ``opened``: the seconds
    that opening the data took.

    Raises:
        ModelError: the classifier is not one linear layer.
    """
    began, device = time.perf_counter(), prepare_device(recipe)
    torch.manual_seed(recipe.seed)
    built, input = build.model(recipe, data, allow_import=allow_import)
    state = build.state(recipe, built, build.engine(recipe, device, None), input=input)
    update = build.update(recipe, built, input, state, data=data)
    startup = opened + time.perf_counter() - began
    if parse_train(recipe.model.train).probe_passes:
        with in_mode(state.module, "evaluation"):
            classifier_of(Trained(state.module, state.policy, input, data.classes, built.name, Path(built.name)))
    use_fastest_threads(recipe, update, state, lambda message: None)

    def send_through(batch: DeviceBatch) -> None:
        state.module.eval()
        with torch.no_grad(), state.policy.autocast():
            state.module(state.policy.images(batch.images, input.mean, input.std))

    def step(batch: DeviceBatch) -> None:
        models.set_train_mode(built, recipe.model.train, batch_norm=recipe.model.batch_norm)
        update(state, batch, 1e-12)

    def images_per_second(size: int, work: Callable[[DeviceBatch], None]) -> float:
        threads = recipe.parallel.threads
        with build.training_feed(
            recipe, data, input, device, batch_size=size, start=0, stop=None, threads=threads
        ) as feed:
            batches = load(feed, device)
            work(next(batches))  # is not counted
            images, start = 0, time.perf_counter()
            while images < 2 * size or time.perf_counter() - start < seconds / 2:
                timed(device, lambda: work(next(batches)))
                images += size
            return images / (time.perf_counter() - start)

    features, full = images_per_second(FEATURE_BATCH, send_through), images_per_second(recipe.batch_size, step)
    return Rates(features, full, startup), input.size or 0
