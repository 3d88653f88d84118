"""Choose batch size, precision, threads and compiling for this machine by measuring, and give the reasons.

The loader slows updates only through the cores that it takes, which are the same for every batch and number format. So
these are chosen by updates alone, then the loader's threads by updates and loading together. At the end the result is
measured in turns with the largest batch and with the recipe as it was. All measurements are cached: the same search on
the same machine, model and data looks them up, and continues where it was interrupted or ran out of time.

One process is measured, or one rank of several that measure at the same time, each for itself.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from steadytrain.config import Recipe
from steadytrain.config.defaults import MAX_BATCH_SHARE
from steadytrain.config.phases import parse_train
from steadytrain.errors import FailedError, InputError, RecipeError
from steadytrain.format import count, duration, percent, rate
from steadytrain.machine import facts as machine_facts
from steadytrain.tuning.probes import ProbeCache, Prober, cache_path
from steadytrain.tuning.rules import (
    GAIN,
    KNEE,
    LEAST_BATCH,
    MOST_BATCH,
    STEP,
    best_of,
    knee,
    next_batch,
    saved_seconds,
    scale_rate,
)
from steadytrain.tuning.trials import UPDATES, Search, Setting, Trial

CHOICES = {
    "batch": "batch_size",
    "precision": "precision.name",
    "compile": "precision.compile",
    "threads": "parallel.threads",
    "rate": "optim.lr",
}
"""Names of what can be chosen, with its key in the recipe."""
NAMES = tuple(CHOICES)

_IDENTITY = ("data", "device", "cores", "versions")  # facts that tell one cache from another
WITHOUT = (
    *("batch_size", "seed", "budget", "every", "optim.lr", "optim.base_batch_size"),
    *("optim.schedule", "optim.warmup_epochs", "precision.name", "precision.compile", "parallel.threads"),
)
"""Keys of the recipe that are tuned, or that the speed of an update does not depend on."""

COMPILE_SECONDS, MOST_COMPILE_GAIN = 20.0, 0.3
"""The least time that compiling takes, and the largest gain to expect: shorter runs cannot earn it back."""

CHOSEN, LARGEST, AS_IT_WAS = "what was chosen", "the largest batch", "the recipe as it was"
"""Settings that are measured in turns at the end."""


@dataclass(frozen=True)
class Choice:
    """A key of the recipe, its value, and why."""

    key: str
    value: Any
    reason: str


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """The result of a tuning.

    Args:
        missing: what the time was too short for.
        facts: of data, model and device.
        default_rate, tuned_rate: images per second of loading and updates together; None: not measured.
        machine: the device and its cores, in words; ``day``: the date.
    """

    recipe: Recipe
    choices: tuple[Choice, ...]
    missing: tuple[str, ...]
    trials: tuple[Trial, ...]
    facts: Mapping[str, Any]
    default_rate: float | None
    tuned_rate: float | None
    seconds: float
    machine: str
    day: str

    @property
    def gain(self) -> float | None:
        """Speed over that of the recipe before; None: not measured."""
        if not self.default_rate or not self.tuned_rate:
            return None
        return self.tuned_rate / self.default_rate


def tune(
    recipe: Recipe,
    *,
    prober: Prober,
    seconds: float,
    chosen: Collection[str] = (),
    free: Collection[str] = NAMES,
    ranks: int = 1,
    again: bool = False,
    began: float | None = None,
    say: Callable[[Trial], None] = lambda trial: None,
) -> Tuned:
    """Measure, choose, and return the tuned recipe with the reasons; measurements in the cache are not repeated.

    Args:
        seconds: that the search may take, from ``began`` on; a measurement that would take longer is stopped.
        chosen: keys of the recipe that the user chose: these stay.
        free: of :data:`NAMES`, what may be chosen.
        ranks: that train together, each on a device like this one; the batch of the recipe is for all of them.
        again: forget earlier measurements.
        began: by ``time.perf_counter()``; None: now.

    Raises:
        RecipeError: the recipe makes no updates.
        InputError: it cannot be trained, or the time is too short.
        FailedError: the recipe cannot be measured at all.
    """
    began = time.perf_counter() if began is None else began
    if parse_train(recipe.model.train).main == "probe":
        raise RecipeError(f"model.train={recipe.model.train!r} makes no updates: there is nothing to tune")
    first = prober.ask("facts", recipe, seconds=0, limit_seconds=max(60.0, seconds))
    if first.trouble is not None:
        raise InputError(first.error) if first.trouble == "refused" else FailedError(f"cannot measure: {first.error}")
    known = first.figures
    cache = ProbeCache(cache_path(recipe, {name: known[name] for name in _IDENTITY}, WITHOUT))
    if again:
        cache.clear()
    search = Search(
        recipe=recipe,
        facts=known,
        prober=prober,
        cache=cache,
        deadline=began + seconds,
        budget=seconds,
        say=say,
    )
    names = {name for name in free if CHOICES[name] not in chosen}
    if recipe.optim.accumulate > 1 or recipe.optim.grow_batch:
        names -= {"batch"}
    if recipe.precision.is_pure:
        names -= {"precision"}
    start = Setting.of(recipe)
    # Each rank computes its own part: what is measured is one rank's.
    part = replace(start, batch_size=max(1, start.batch_size // ranks))
    setting, reasons = _choose_updates(search, part, names, ranks)
    if "threads" in names:
        setting, reasons["threads"] = _choose_threads(search, setting)
    setting, reasons, rates = _compare_together(search, part, setting, reasons, names, ranks)
    if "compile" in names:
        setting, reasons["compile"] = _choose_compile(search, setting)
    if not search.trials:
        raise InputError(f"{duration(seconds)} is too short to measure anything here: give --minutes 1 or more")
    batch_size = setting.batch_size * ranks
    values = {"batch": batch_size, "precision": setting.precision, "compile": setting.compile}
    values["threads"] = setting.threads
    choices = [Choice(key, values[name], reasons[name]) for name, key in CHOICES.items() if name in reasons]
    if "rate" in names:
        choices.append(Choice("optim.lr", *scale_rate(recipe.optim, recipe.batch_size, batch_size)))
    machine = machine_facts.facts()
    device = machine["cpu"] if search.is_cpu else known["device"]
    return Tuned(
        recipe=recipe.with_({choice.key: choice.value for choice in choices}),
        choices=tuple(choices),
        missing=tuple(search.missing),
        trials=tuple(search.trials),
        facts=known,
        default_rate=rates.get(AS_IT_WAS),
        tuned_rate=rates.get(CHOSEN),
        seconds=time.perf_counter() - began,
        machine=f"{device}, {machine['cores']} cores",
        day=datetime.now(UTC).date().isoformat(),
    )


def _choose_updates(
    search: Search, start: Setting, names: Collection[str], ranks: int
) -> tuple[Setting, dict[str, str]]:
    """Choose batch and number format by updates alone; the batch once more where another format was chosen."""
    setting, reasons = start, dict[str, str]()
    if "batch" in names:
        setting, reasons["batch"] = _choose_batch(search, setting, _sizes(search, ranks))
    elif search.updates(setting) is None:
        search.missing.append("updates of the recipe's batch")
    if "precision" in names:
        before = setting
        setting, reasons["precision"] = _choose_precision(search, setting)
        if setting != before and "batch" in names:
            sizes = _sizes(search, ranks)
            setting, reasons["batch"] = _choose_batch(search, setting, sizes, around=setting.batch_size)
    if search.trials and all(trial.outcome.trouble not in (None, "timeout") for trial in search.trials):
        raise FailedError(
            f"batches of {setting.batch_size} cannot be trained here ({search.failure()}): give a smaller --batch-size,"
            " or --set optim.accumulate=2"
        )
    return setting, reasons


def _sizes(search: Search, ranks: int) -> list[int]:
    """Return batch sizes of a rank to choose from: powers of two, from 2 to a tenth of its training images."""
    most = min(MOST_BATCH, max(2, int(search.facts["num_train"] * MAX_BATCH_SHARE / ranks)))
    return [1 << power for power in range(1, most.bit_length()) if 1 << power <= most]


def _choose_batch(
    search: Search, setting: Setting, sizes: Sequence[int], around: int | None = None
) -> tuple[Setting, str]:
    """Choose the knee of the curve of rates over batch sizes; ``around``: where it was by other measurements."""
    least = min(LEAST_BATCH, sizes[-1])
    usual = [batch for batch in sizes if batch >= least]
    curve: dict[int, float] = {}
    step = STEP if around is None else 2
    following: int | None = least if around is None else around
    while following is not None:
        speed = search.rate(replace(setting, batch_size=following))
        if speed is None:
            search.missing.append(f"batches of {following}")
            break
        curve[following] = speed
        following = next_batch(curve, usual if any(curve.values()) else sizes, step)
        if following is None and around is not None and any(curve.values()) and knee(_good(curve)) == around:
            following = max((size for size in usual if size < around and size not in curve), default=None)
    good = _good(curve)
    if not good:
        if curve:
            raise FailedError(f"no batch can be trained here: {search.failure()}")
        return setting, "as it was: not measured, there was no time"
    best = knee(good)
    why = f"the smallest within {percent(1 - KNEE)} of the fastest, in images/s of updates: {_shown(good)}"
    if best == usual[-1] and best < MOST_BATCH:
        why += f"; more than a tenth of the {search.facts['num_train']:,} training images is not tried"
    return replace(setting, batch_size=best), why


def _good(curve: Mapping[int, float]) -> dict[int, float]:
    return {batch: rate for batch, rate in curve.items() if rate > 0}


def _shown(rates: Mapping[Any, float]) -> str:
    return ", ".join(f"{name}: {rate(rates[name])}" for name in sorted(rates))


def _choose_precision(search: Search, setting: Setting) -> tuple[Setting, str]:
    """Choose the number format at this batch: the most exact, unless another is faster by :data:`.GAIN`."""
    rates, notes = dict[str, float](), list[str]()
    names = list(dict.fromkeys([*search.facts["precisions"], setting.precision]))
    for name in names:
        outcome = search.updates(replace(setting, precision=name))
        if outcome is None:
            search.missing.append(name)
        elif outcome.trouble is not None:
            notes.append(f"{name}: {outcome.error}")
        elif search.fits(outcome):
            rates[name] = outcome.images_per_second
    if not rates:
        return replace(setting, precision=names[0]), "; ".join(["not measured", *notes])
    best = best_of(rates, names[0])
    if best == names[0] and max(rates.values()) > rates[best]:
        notes.insert(0, f"the most exact one, as nothing is {percent(GAIN)} faster")
    return replace(setting, precision=best), "; ".join([f"images/s of updates: {_shown(rates)}", *notes])


def _choose_threads(search: Search, setting: Setting) -> tuple[Setting, str]:
    """Choose the fewest loader threads that are fast enough: on a CPU the updates need the cores."""
    cores, usual = search.facts["cores"], search.facts["usual_threads"]
    loading, updates = search.ask("loading", replace(setting, threads=1)), search.updates(setting)
    loaded = 0.0 if loading is None else loading.images_per_second
    trained = 0.0 if updates is None else updates.images_per_second
    candidates, words = {usual, cores}, ""
    expected = UPDATES * setting.batch_size / trained if trained else 0.0
    if loaded and trained:
        candidates.add(min(max(math.ceil(1.1 * trained / loaded), 1), cores))
        words = f"one thread loads {rate(loaded)} images/s alone; "
    rates: dict[int, float] = {}
    for threads in sorted(candidates):
        outcome = search.ask("both", replace(setting, threads=threads), expected=expected)
        if outcome is None:
            search.missing.append(f"{threads} loader threads")
        elif outcome.trouble is None:
            rates[threads] = outcome.images_per_second
    if not rates:
        return setting, f"the default ({usual}); not measured together with updates"
    best = knee(rates, 1 - GAIN)
    reason = f"{words}images/s of both together by threads: {_shown(rates)}"
    if search.is_cpu and best < cores:
        reason += f"; the rest of {count(cores, 'core')} is for the updates"
    return replace(setting, threads=best), reason


def _compare_together(
    search: Search, start: Setting, setting: Setting, reasons: dict[str, str], names: Collection[str], ranks: int
) -> tuple[Setting, dict[str, str], dict[str, float]]:
    """Measure in turns what was chosen, the largest batch, and the recipe as it was; keep the fastest.

    Single measurements err by some percent, and the gains of single choices do not add up.

    Returns:
        The setting to keep, its reasons, and the rates of it (:data:`CHOSEN`) and of the recipe :data:`AS_IT_WAS`.
    """
    if not any(trial.what == "both" and trial.outcome.trouble is None for trial in search.trials):
        return setting, reasons, {}
    contenders = {CHOSEN: setting, AS_IT_WAS: replace(start, threads=start.threads or search.facts["usual_threads"])}
    larger = replace(setting, batch_size=_sizes(search, ranks)[-1])
    if "batch" in names and larger.batch_size > setting.batch_size and search.rate(larger):
        contenders[LARGEST] = larger
    rates = search.in_turns({name: other for name, other in contenders.items() if name == CHOSEN or other != setting})
    if contenders[AS_IT_WAS] == setting and CHOSEN in rates:
        rates[AS_IT_WAS] = rates[CHOSEN]
    if AS_IT_WAS not in rates:
        search.missing.append(AS_IT_WAS)
    best = best_of(rates, CHOSEN) if CHOSEN in rates else CHOSEN
    shown = _shown(rates)
    if best == CHOSEN:
        return setting, reasons, rates
    rates[CHOSEN] = rates[best]
    if best == LARGEST:
        why = f"{reasons.get('batch', '')}; measured by turns with loading, this is faster ({shown})"
        return larger, {**reasons, "batch": why}, rates
    return start, dict.fromkeys(reasons, f"as it was: all choices together were slower ({shown})"), rates


def _choose_compile(search: Search, setting: Setting) -> tuple[Setting, str]:
    """Choose to compile if that saves more of the planned run than it takes."""
    recipe = search.recipe
    eager = search.updates(replace(setting, compile="none"))
    if eager is None or eager.trouble is not None:
        return setting, "not measured"
    images = setting.apply(recipe).batches(search.facts["num_train"]).images
    planned = images / eager.images_per_second
    if planned * MOST_COMPILE_GAIN < COMPILE_SECONDS:
        return setting, f"the planned updates take {duration(planned)}: too short to pay back compiling"
    if parse_train(recipe.model.train).has_phases or recipe.model.batch_norm == "synchronous":
        return setting, "this recipe cannot be compiled"
    outcome = search.ask("updates", replace(setting, compile="default"), expected=COMPILE_SECONDS, share=0.5)
    if outcome is None:
        search.missing.append("compiling")
        return setting, "not tried: there was no time left"
    if outcome.trouble is not None or outcome.figures.get("compile_speedup") is None:
        return setting, f"compiling failed: {outcome.error or 'the network refuses'}"
    # Both kinds of passes were timed side by side, which the two rates of updates were not.
    times, took = float(outcome.figures["compile_speedup"]), float(outcome.figures["compile_seconds"])
    compiled = times * eager.images_per_second
    saved = saved_seconds(images, eager=eager.images_per_second, compiled=compiled, compile_seconds=took)
    words = f"passes are {times:.2f} times as fast after {duration(took)}, in a run of {duration(planned)}"
    if saved > GAIN * planned and search.fits(outcome):
        return replace(setting, compile="default"), f"saves {duration(saved)}: {words}"
    return setting, f"does not pay back: {words}"
