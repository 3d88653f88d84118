"""Fine-tune within so many minutes: measure the machine on the user's data, then choose the method and its epochs."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterator
from contextlib import closing
from dataclasses import dataclass, replace

import torch

from steadytrain import models
from steadytrain.config import Recipe
from steadytrain.config.defaults import LEAST_EPOCHS, PROBE_FIRST, WITHOUT_PROBE, fit_to_epochs, usual_recipe
from steadytrain.config.phases import parse_train
from steadytrain.errors import RecipeError
from steadytrain.format import count, duration, rate
from steadytrain.training import build
from steadytrain.training.compute.timing import timed, use_fastest_threads
from steadytrain.training.data import DataSets, DeviceBatch, load, open_data
from steadytrain.training.device import prepare_device, set_up_machine
from steadytrain.training.features.table import FEATURE_BATCH
from steadytrain.training.finetuning.linear_probe import find_linear
from steadytrain.training.state import preserve_process

PLANNED = (
    *("model.train", "budget.epochs", "budget.steps", "budget.minutes"),
    *("optim.lr", "optim.ema", "optim.warmup", "optim.warmup_epochs"),
)
"""Keys of the recipe that a plan may set."""

RESERVE = 0.15
"""Share of the minutes that nothing is planned for: measured rates are of a moment, and saving takes time too."""

PROBE_SHARE = 0.1
"""The largest share of the planned time that a probe takes before the updates of the whole network."""

MOST_EPOCHS = 8
"""Epochs that are planned at most: those of ``steady finetune`` without a budget."""

MEASURE_SHARE, MEASURE_SECONDS = 0.03, 6.0
"""The most that each of the two measurements takes: this share of the minutes, and so many seconds."""


@dataclass(frozen=True)
class Rates:
    """Measurements on the user's images, with the loader: images per second, and seconds of a start.

    ``features``: through the frozen network. ``full``: in updates of all that the recipe trains. ``startup``: to open
    the data and to make the network, which the run does again.
    """

    features: float
    full: float
    startup: float


@dataclass(frozen=True)
class Option:
    """One way to use the minutes: its word for ``model.train``, what it takes, and the epochs that fit.

    ``pass_seconds``: of the probe's pass, 0 without one; ``epoch_seconds``: of an epoch with its evaluation.
    """

    train: str
    pass_seconds: float
    epoch_seconds: float
    epochs: int
    verdict: str


@dataclass(frozen=True)
class FinetunePlan:
    """The recipe that fits the minutes, all options with their verdicts, and the measured rates."""

    recipe: Recipe
    options: tuple[Option, ...]
    rates: Rates
    minutes: float

    @property
    def words(self) -> str:
        """Return what was chosen and why, in a sentence."""
        chosen = next(option for option in self.options if option.verdict == "chosen")
        rates = f"{rate(self.rates.features)} images/s through the frozen network, {rate(self.rates.full)} in updates"
        if chosen.epochs:
            choice = f"{chosen.train}, {count(chosen.epochs, 'epoch')} of {duration(chosen.epoch_seconds)}"
        else:
            choice = f"{chosen.train}, in {duration(chosen.pass_seconds)}"
            if self.options[-1].train != chosen.train:
                full = self.options[-1]
                fitting = f"{count(full.epochs, 'epoch')} of {duration(full.epoch_seconds)}"
                choice += f"; {fitting} would fit for the whole network, which gains from {LEAST_EPOCHS} on"
        return f"{count(self.minutes, 'minute')}: {choice} (measured here: {rates})"


def choose(
    rates: Rates, *, minutes: float, spent: float, num_train: int, num_val: int, epochs: int, train: str | None = None
) -> tuple[Option, ...]:
    """Choose between a probe and updates of the whole network.

    The rule: the whole network, for as many epochs as fit, up to ``epochs``; the probe where fewer than
    :data:`LEAST_EPOCHS` do. A probe comes before the whole network where it takes at most :data:`PROBE_SHARE` of that
    time: it is a first answer, and where updates make it worse, it is kept.

    >>> rates = Rates(features=200, full=25, startup=4)
    >>> options = choose(rates, minutes=3, spent=20, num_train=640, num_val=250, epochs=8)
    >>> [(option.train, option.epochs, option.verdict) for option in options]
    [('probe', 0, 'fits'), ('probe+discriminative', 4, 'chosen')]

    Args:
        rates: measured ones.
        minutes: in all; ``spent``: seconds of them that are over.
        num_train, num_val: images.
        epochs: most that are planned.
        train: a ``model.train`` of the user's: the only option then.

    Raises:
        RecipeError: not even one pass, or one epoch of the user's choice, fits.
    """
    left = 60 * minutes * (1 - RESERVE) - spent - rates.startup
    evaluation = num_val / rates.features
    words = ("probe", WITHOUT_PROBE) if train is None else (train,)
    options = []
    for word in words:
        plan = parse_train(word)
        passes = plan.probe_passes * num_train / rates.features + (evaluation if plan.probe_passes else 0.0)
        if plan.main == "probe":
            options.append(Option(word, passes, 0.0, 0, "fits" if passes <= left else "too slow"))
            continue
        epoch = num_train / rates.full + evaluation
        fitting = max(0, min(epochs, int((left - passes) / epoch)))
        needed = min(epochs, LEAST_EPOCHS) if train is None else 1
        if train is None and plan.trains_body:
            first = num_train / rates.features + evaluation
            with_probe = max(0, min(epochs, int((left - first) / epoch)))
            if with_probe >= needed and first <= PROBE_SHARE * (first + with_probe * epoch):
                word, passes, fitting = PROBE_FIRST, first, with_probe
        options.append(Option(word, passes, epoch, fitting, "fits" if fitting >= needed else "too slow"))
    if options[-1].verdict != "fits" and options[0].verdict != "fits":
        seconds = options[0].pass_seconds + options[0].epoch_seconds
        least = (seconds + spent + rates.startup) / (1 - RESERVE) / 60
        raise RecipeError(
            f"--budget-minutes {minutes:g} is too short: {options[0].train} takes {duration(seconds)} here, after"
            f" {duration(spent + rates.startup)} to start; give at least {least:.1f}, or choose a smaller --size"
        )
    best = -1 if options[-1].verdict == "fits" else 0
    options[best] = replace(options[best], verdict="chosen")
    return tuple(options)


def plan_finetune(
    recipe: Recipe, minutes: float, *, chosen: Container[str], began: float, allow_import: bool = False
) -> FinetunePlan:
    """Measure, choose, and return the recipe that fits into so many minutes, which end it too if they must.

    Args:
        recipe: of a user's choices and the defaults.
        minutes: from ``began`` on, by ``time.perf_counter()``.
        chosen: keys of the recipe that the user chose: these stay.
        allow_import: import the recipe's ``pkg.mod:factory`` model.

    Raises:
        RecipeError: the minutes are too few; or the epochs leave nothing to choose.
        SteadyError: what the run itself would fail at.
    """
    if "budget.epochs" in chosen or "budget.steps" in chosen:
        raise RecipeError(
            "--budget-minutes chooses the epochs: leave --epochs out, or end a run of so many epochs by the clock with"
            f" --set budget.minutes={minutes:g}"
        )
    rates, data = measure(recipe, seconds=min(MEASURE_SECONDS, MEASURE_SHARE * 60 * minutes), allow_import=allow_import)
    can_choose = "model.train" not in chosen and bool(parse_train(recipe.model.train).probe_passes)
    options = choose(
        rates,
        minutes=minutes,
        spent=time.perf_counter() - began,
        num_train=data.num_train,
        num_val=data.num_val,
        epochs=MOST_EPOCHS,
        train=None if can_choose else recipe.model.train,
    )
    best = next(option for option in options if option.verdict == "chosen")
    changes: dict[str, object] = {"model.train": best.train, "budget.epochs": best.epochs, "budget.minutes": minutes}
    usual = usual_recipe(str(recipe.data.train), finetune=True, small=False).optim
    warmup = {"optim.warmup": usual.warmup, "optim.warmup_epochs": usual.warmup_epochs}
    changes |= {key: value for key, value in warmup.items() if key not in chosen}  # not those of another method
    if not best.epochs:
        changes |= {"optim.ema": None, "optim.warmup_epochs": 0.0}
    planned = recipe.with_(changes)
    if best.epochs:
        planned = fit_to_epochs(planned, best.epochs, chosen=chosen)
    return FinetunePlan(planned, options, rates, minutes)


def measure(recipe: Recipe, *, seconds: float, allow_import: bool) -> tuple[Rates, DataSets]:
    """Time the frozen network, and updates of all that the recipe trains, on the user's images.

    A network is made for it and thrown away; nothing is written.

    Raises:
        ModelError: the classifier is not one linear layer.
    """
    began = time.perf_counter()
    device = prepare_device(recipe)
    with preserve_process(device), closing(open_data(recipe.data, seed=recipe.seed)) as data:
        set_up_machine(recipe, device, None, lambda message: None)
        torch.manual_seed(recipe.seed)
        built, input = build.model(recipe, data, allow_import=allow_import)
        find_linear(built)
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
        return Rates(features, full, startup), data


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
