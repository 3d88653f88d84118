"""Fine-tune within so many minutes: measure the machine on the user's data, then choose the method and its epochs."""

from __future__ import annotations

import time
from collections.abc import Container
from dataclasses import dataclass, replace

from steadytrain.config import Recipe
from steadytrain.config.defaults import PROBE_FIRST, fit_to_epochs, usual_recipe
from steadytrain.config.phases import parse_train
from steadytrain.errors import RecipeError
from steadytrain.events import Tried
from steadytrain.format import Say, count, duration, rate
from steadytrain.training.finetuning.compare import RESERVE, Rates, compare, list_candidates
from steadytrain.training.finetuning.tries import first_epochs

PLANNED = (
    *("model.train", "model.name", "data.size", "data.fit"),
    *("budget.epochs", "budget.steps", "budget.minutes", "budget.fill"),
    *("optim.lr", "optim.ema", "optim.warmup", "optim.warmup_epochs"),
)
"""Keys of the recipe that a plan may set."""

LONG_EPOCH = 60.0
"""Seconds of an epoch beyond which there are two evaluations in each."""


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
    """The recipe that fits the minutes, all options with their verdicts, the measured rates, and what was compared."""

    recipe: Recipe
    options: tuple[Option, ...]
    rates: Rates
    minutes: float
    tried: tuple[Tried, ...] = ()

    @property
    def words(self) -> str:
        """Return what was chosen and why, in a sentence."""
        chosen = next(option for option in self.options if option.verdict == "chosen")
        rates = f"{rate(self.rates.features)} images/s through the frozen network, {rate(self.rates.full)} in updates"
        if chosen.epochs:
            first = self.recipe.budget.epochs or 0.0
            choice = f"{chosen.train}, {count(first, 'epoch')} of {duration(chosen.epoch_seconds)}"
            choice += f" first, of {chosen.epochs} that fit" if chosen.epochs > first else ""
        else:
            choice = f"{chosen.train}, in {duration(chosen.pass_seconds)}: not one epoch of updates fits"
        return f"{count(self.minutes, 'minute')}: {choice} (measured here: {rates})"


def choose(
    rates: Rates,
    *,
    minutes: float,
    spent: float,
    num_train: int,
    num_val: int,
    train: str | None = None,
    refuses: bool = True,
) -> tuple[Option, ...]:
    """Choose a probe and updates for as many epochs as fit, since the best weights are kept; the probe where none does.

    ``spent``: seconds of the minutes that are over. ``train``: a ``model.train`` of the user's, the only option then.
    ``refuses``: raise RecipeError where no option fits; else the first is taken, ``train`` with one epoch at least.

    >>> rates = Rates(features=200, full=25, startup=4)
    >>> options = choose(rates, minutes=3, spent=20, num_train=640, num_val=250)
    >>> [(option.train, option.epochs, option.verdict) for option in options]
    [('probe', 0, 'fits'), ('probe+discriminative', 4, 'chosen')]
    """
    left = 60 * minutes * (1 - RESERVE) - spent - rates.startup
    evaluation = num_val / rates.features
    options = []
    for word in ("probe", PROBE_FIRST) if train is None else (train,):
        plan = parse_train(word)
        passes = plan.probe_passes * num_train / rates.features + (evaluation if plan.probe_passes else 0.0)
        epoch = 0.0 if plan.main == "probe" else num_train / rates.full + evaluation
        epochs = max(0 if refuses or train is None else 1, int((left - passes) / epoch)) if epoch else 0
        fits = epochs >= 1 if epoch else passes <= left
        options.append(Option(word, passes, epoch, epochs, "fits" if fits else "too slow"))
    if refuses and all(option.verdict != "fits" for option in options):
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
    recipe: Recipe,
    minutes: float,
    *,
    chosen: Container[str],
    began: float,
    allow_import: bool = False,
    fetches: bool = False,
    say: Say = lambda message: None,
) -> FinetunePlan:
    """Return the recipe that fits into so many minutes, by measuring and comparing; they end the run if they must.

    Args:
        recipe: of a user's choices, whose keys are ``chosen`` and stay, and the defaults.
        minutes: from ``began`` on, by ``time.perf_counter()``.
        allow_import: import the recipe's ``pkg.mod:factory`` model.
        fetches: networks may be fetched to be compared.
        say: takes a line on each size and network that was compared.

    Raises:
        RecipeError: the minutes are too few; or the epochs leave nothing to choose.
        SteadyError: what the run itself would fail at.
    """
    if "budget.epochs" in chosen or "budget.steps" in chosen:
        raise RecipeError(
            "--budget-minutes chooses the epochs: leave --epochs out, or end a run of so many epochs by the clock with"
            f" --set budget.minutes={minutes:g}"
        )
    can_choose = "model.train" not in chosen and bool(parse_train(recipe.model.train).probe_passes)
    candidates = list_candidates(recipe, chosen, allow_import=allow_import, fetches=fetches)
    keeps_fit = "data.fit" in chosen
    compared = compare(candidates, minutes, began=began, allow_import=allow_import, keeps_fit=keeps_fit, say=say)
    recipe, rates = compared.recipe, compared.rates
    options = choose(
        rates,
        minutes=minutes,
        spent=time.perf_counter() - began + compared.num_test / rates.features,  # the test at the end comes off as well
        num_train=compared.num_train,
        num_val=compared.num_val,
        train=None if can_choose else recipe.model.train,
        refuses=not compared.tried,
    )
    best = next(option for option in options if option.verdict == "chosen")
    fills = bool(parse_train(best.train).probe_passes and best.epochs)
    epochs = first_epochs(best.epochs) if fills else best.epochs
    budget = {"budget.epochs": epochs, "budget.minutes": minutes, "budget.fill": fills}
    usual = usual_recipe(str(recipe.data.train), finetune=True, small=False).optim  # not that of another method
    free = {"optim.warmup": usual.warmup, "optim.warmup_epochs": usual.warmup_epochs}
    if best.epoch_seconds > LONG_EPOCH:
        free["every.evaluate_epochs"] = 0.5  # updates that undo the probe are noticed earlier
    free = {key: value for key, value in free.items() if key not in chosen}
    none = {} if epochs else {"optim.ema": None, "optim.warmup_epochs": 0.0}
    planned = recipe.with_({"model.train": best.train, **budget, **free, **none})
    planned = fit_to_epochs(planned, epochs, chosen=chosen) if epochs else planned
    return FinetunePlan(planned, options, rates, minutes, compared.tried)
