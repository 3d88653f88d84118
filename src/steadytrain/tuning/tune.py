"""Choose batch size, precision, layout, threads and compiling for this machine by measuring, and give the reasons.

The loader slows updates only through the cores that it takes, which are the same for every batch, number format and
layout. So these are chosen by updates alone, then the loader's threads by updates and loading together. At the end
the result is measured in turns with the largest batch and with the recipe as it was. All measurements are cached: the
same search on the same machine, model and data looks them up, and continues where it was interrupted or ran out of
time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from statistics import median
from typing import Any

from steadytrain.config import Recipe
from steadytrain.config.defaults import MAX_BATCH_SHARE
from steadytrain.config.phases import parse_train
from steadytrain.errors import FailedError, InputError, RecipeError
from steadytrain.format import count, duration, percent, rate
from steadytrain.machine import facts as machine_facts
from steadytrain.reports.tuned import WAITED_SHARE, Choice, TuningEvidence
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
    packing_advice,
    saved_seconds,
    scale_rate,
)
from steadytrain.tuning.trials import CHOICES, KEYS, NAMES, UPDATES, Search, Setting, Trial, round_figure

_IDENTITY = ("data", "device", "cores", "versions")  # facts that tell one cache from another
WITHOUT = (
    *("batch_size", "seed", "budget", "every", "optim.accumulate", "optim.lr", "optim.base_batch_size"),
    *("optim.schedule", "optim.warmup_epochs", "precision", "parallel.threads"),
)
"""Keys of the recipe that are tuned, or that the speed of an update does not depend on."""

COMPILE_SECONDS, MOST_COMPILE_GAIN = 20.0, 0.3
"""The least time that compiling takes, and the largest gain to expect: shorter runs cannot earn it back."""

CHOSEN, LARGEST, AS_IT_WAS = "what was chosen", "the largest batch", "the recipe as it was"
"""Settings that are measured in turns at the end."""


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """The result of a tuning: the tuned recipe, its evidence, all measurements in their order, and the facts of data,
    model and device."""

    recipe: Recipe
    evidence: TuningEvidence
    trials: tuple[Trial, ...]
    facts: Mapping[str, Any]


def tune(
    recipe: Recipe,
    *,
    prober: Prober,
    seconds: float,
    chosen: Collection[str] = (),
    free: Collection[str] = NAMES,
    ranks: int = 1,
    find_rate: bool = False,
    measures: bool = True,
    again: bool = False,
    began: float | None = None,
    say: Callable[[Trial], None] = lambda trial: None,
) -> Tuned:
    """Measure, choose, and return the tuned recipe with the reasons; measurements in the cache are not repeated.

    Args:
        recipe: the recipe to tune.
        prober: makes the measurements, on one rank or on all.
        seconds: that the search may take, from ``began`` on; a measurement that would take longer is stopped.
        chosen: keys of the recipe that the user chose: these stay. A batch stays as the sum of micro-batches.
        free: of :data:`NAMES`, what may be chosen.
        ranks: that train together, each on a device like this one; the batch of the recipe is for all of them.
        find_rate: find the learning rate by a range test instead of scaling it.
        measures: False: only look up earlier measurements.
        again: forget earlier measurements.
        began: by ``time.perf_counter()``; None: now.
        say: is called with each new measurement.

    Raises:
        RecipeError: the recipe makes no updates.
        InputError: it cannot be trained, or with ``measures=False`` the cache is empty.
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
        chosen=frozenset(chosen),
        free=frozenset(free),
        ranks=ranks,
        measures=measures,
        say=say,
    )
    choices = _choose(search, find_rate=find_rate)
    _advise_quiet(search)
    if not search.trials:
        raise InputError(
            "nothing was measured for this machine, model and data yet: run the command without --explain"
            if not measures
            else f"{duration(seconds)} is too short to measure anything here: give --minutes 1 or more"
        )
    tuned = recipe.with_({choice.key: choice.value for choice in choices})
    evidence = _evidence(search, tuned, choices, time.perf_counter() - began)
    return Tuned(recipe=tuned, evidence=evidence, trials=tuple(search.trials), facts=known)


def _evidence(search: Search, recipe: Recipe, choices: Sequence[Choice], seconds: float) -> TuningEvidence:
    machine = machine_facts.facts()
    device = machine["cpu"] if search.facts["device_type"] == "cpu" else search.facts["device"]
    versions = ", ".join(f"{name} {version}" for name, version in search.facts["versions"].items())
    return TuningEvidence(
        batch_size=recipe.batch_size // recipe.optim.accumulate // search.ranks,
        threads=recipe.parallel.threads,
        precision=recipe.precision.name,
        channels_last=recipe.precision.channels_last,
        choices=tuple(choices),
        advice=tuple(search.advice),
        missing=tuple(search.missing),
        measurements=tuple(trial.measurement() for trial in search.trials),
        default_rate=search.default_rate and round_figure(search.default_rate),
        tuned_rate=search.tuned_rate and round_figure(search.tuned_rate),
        seconds=round_figure(seconds),
        ranks=search.ranks,
        on=f"{device}, {machine['cores']} cores, {datetime.now(UTC).date().isoformat()}; {versions}",
    )


def _choose(search: Search, *, find_rate: bool) -> list[Choice]:
    """Make all choices that are free, one after another."""
    recipe = search.recipe
    start = Setting.of(recipe)
    # Each rank computes its own part: what is measured is one rank's.
    part = replace(start, batch_size=max(1, start.batch_size // search.ranks))
    setting, reasons = part, dict[str, str]()
    if recipe.optim.accumulate > 1 or recipe.optim.grow_batch:
        search.free -= {"batch"}
    if "batch" in search.free:
        setting, reasons["batch"] = _choose_batch(search, setting)
    elif (outcome := search.updates(setting)) is None or outcome.trouble is not None:
        search.missing.append("updates of the recipe's batch")
    before = setting
    for name, choose in (("precision", _choose_precision), ("layout", _choose_layout)):
        if search.may(name) and not (name == "precision" and recipe.precision.is_pure):
            setting, reasons[name] = choose(search, setting)
    if setting != before and search.may("batch"):
        setting, reasons["batch"] = _choose_batch(search, setting, around=setting.batch_size)
    if search.may("threads"):
        setting, reasons["threads"] = _choose_threads(search, setting)
    setting, reasons = _compare_together(search, part, setting, reasons)
    if search.may("compile"):
        setting, reasons["compile"] = _choose_compile(search, setting)
    choices = _choices(recipe, replace(setting, batch_size=setting.batch_size * search.ranks), reasons)
    return [*choices, *([_choose_rate(search, setting, find_rate=find_rate)] if search.may("rate") else [])]


def _choices(recipe: Recipe, setting: Setting, reasons: Mapping[str, str]) -> list[Choice]:
    """Return the keys of the recipe that a setting gives a value, each with its reason."""
    values = {key: getattr(setting, name) for name, key in KEYS.items()}
    choices = [Choice(CHOICES[name], values[CHOICES[name]], reasons[name]) for name in NAMES if name in reasons]
    if setting.accumulate != recipe.optim.accumulate:
        why = f"{count(setting.accumulate, 'micro-batch', 'micro-batches')} of"
        why += f" {setting.batch_size // setting.accumulate} keep the batch of {setting.batch_size}"
        choices.append(Choice("optim.accumulate", setting.accumulate, why))
    return choices


def _sizes(search: Search) -> list[int]:
    """Batch sizes of a rank to choose from: powers of two, from 2 to a tenth of its training images."""
    most = min(MOST_BATCH, max(2, int(search.facts["num_train"] * MAX_BATCH_SHARE / search.ranks)))
    return [1 << power for power in range(1, most.bit_length()) if 1 << power <= most]


def _choose_batch(search: Search, setting: Setting, around: int | None = None) -> tuple[Setting, str]:
    """Choose the knee of the curve of rates over batch sizes, or micro-batches of the user's batch."""
    if "batch_size" in search.chosen:
        return _split_batch(search, setting)
    sizes = _sizes(search)
    least = min(LEAST_BATCH, sizes[-1])
    usual = [batch for batch in sizes if batch >= least]
    curve: dict[int, float] = {}
    step = STEP if around is None else 2
    following: int | None = least if around is None else around
    while following is not None:
        speed = search.rate(replace(setting, batch_size=following, accumulate=1))
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
    return replace(setting, batch_size=best, accumulate=1), why


def _split_batch(search: Search, setting: Setting) -> tuple[Setting, str]:
    """Keep the user's batch; split it into micro-batches if it does not fit into memory or if they are faster."""
    whole = setting.batch_size
    parts = [whole >> power for power in range(12) if whole % (1 << power) == 0]
    parts = [part for part in parts if part >= min(LEAST_BATCH, whole)]
    curve: dict[int, float] = {}

    def measure(part: int) -> float | None:
        speed = curve.get(part) if part in curve else search.rate(replace(setting, batch_size=part, accumulate=1))
        if speed is not None:
            curve[part] = speed
        return speed

    measure(parts[-1])  # tells what the others take
    for part in parts:
        speed = measure(part)
        if speed is None:
            search.missing.append(f"batches of {part}")
        if speed:  # the largest that fits; is a quarter of it faster?
            if part // 4 in parts:
                measure(part // 4)
            break
    good = _good(curve)
    if not good:
        if curve:
            raise FailedError(f"no part of a batch of {whole} can be trained here: {search.failure()}")
        return setting, "yours; not measured, there was no time"
    if whole not in curve:
        return setting, "yours; an update of it takes too long to be measured in this time"
    if not curve[whole]:
        best, why = max(good), f"yours; as a whole it fails here ({search.failure()})"
    elif good[whole] >= KNEE * max(good.values()):
        best, why = whole, "yours, and as fast as a whole as in parts"
    else:
        best, why = max(good, key=good.__getitem__), "yours; parts of it are faster"
    why += f"; images/s of updates: {_shown(good)}"
    return replace(setting, batch_size=whole, accumulate=whole // best), why


def _good(curve: Mapping[int, float]) -> dict[int, float]:
    return {batch: rate for batch, rate in curve.items() if rate > 0}


def _shown(rates: Mapping[Any, float]) -> str:
    return ", ".join(f"{number}: {rate(rates[number])}" for number in sorted(rates))


def _choose_precision(search: Search, setting: Setting) -> tuple[Setting, str]:
    """Choose the number format at this batch."""
    names = dict.fromkeys([*search.facts["precisions"], setting.precision])
    return _fastest(search, {name: replace(setting, precision=name) for name in names}, "the most exact")


def _choose_layout(search: Search, setting: Setting) -> tuple[Setting, str]:
    """Choose the memory format at this batch."""
    ways = {"channels-last": True, "channels-first": False}
    return _fastest(search, {name: replace(setting, channels_last=last) for name, last in ways.items()}, "the usual")


def _fastest(search: Search, settings: Mapping[str, Setting], why: str) -> tuple[Setting, str]:
    """Measure updates with several settings; return the best one and the reason; the first is preferred (``why``)."""
    preferred, rates, notes = next(iter(settings)), dict[str, float](), list[str]()
    for name, setting in settings.items():
        outcome = search.updates(setting)
        if outcome is None:
            search.missing.append(name)
        elif outcome.trouble is not None:
            notes.append(f"{name}: {outcome.error}")
        elif search.fits(outcome):
            rates[name] = outcome.images_per_second
    if not rates:
        return settings[preferred], "not measured"
    best = best_of(rates, preferred)
    shown = ", ".join(f"{name} {rate(speed)}" for name, speed in rates.items())
    if best == preferred and max(rates.values()) > rates[best]:
        notes.insert(0, f"{why} one, as nothing is {percent(GAIN)} faster")
    return settings[best], "; ".join([f"images/s of updates: {shown}", *notes])


def _choose_threads(search: Search, setting: Setting) -> tuple[Setting, str]:
    """Choose the fewest loader threads that are fast enough: on a CPU the updates need the cores."""
    cores, usual = search.facts["cores"], search.facts["usual_threads"]
    loading, updates = search.ask("loading", replace(setting, threads=1)), search.updates(setting)
    fed = 0.0 if loading is None else loading.images_per_second
    trained = 0.0 if updates is None else updates.images_per_second
    candidates, words, expected = {usual, cores}, "", 0.0
    if trained:
        expected = UPDATES * setting.batch_size / trained
    if fed and trained:
        candidates.add(min(max(math.ceil(1.1 * trained / fed), 1), cores))
        words = f"one thread loads {rate(fed)} images/s alone; "
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
    search.tuned_rate = rates[best]
    reason = f"{words}images/s of both together by threads: {_shown(rates)}"
    if search.is_cpu and best < cores:
        reason += f"; the rest of {count(cores, 'core')} is for the updates"
    if loading is not None and fed and trained:
        _advise_packing(search, loading.figures, rates[best], trained)
    return replace(setting, threads=best), reason


def _advise_packing(search: Search, loading: Mapping[str, Any], both: float, updates: float) -> None:
    """Advise what would relieve a loader that limits training; the rates are of both together and of updates."""
    if search.is_cpu:
        share, of = float(loading["loader_cpu_seconds"]) * both / search.facts["cores"], "cores"
    else:
        share, of = max(0.0, 1 - both / updates), "time"
    advice = packing_advice(
        share,
        of=of,
        decode_share=float(loading["decode_share"]),
        keeps=bool(loading["keeps"]),
        stored=search.facts["stored_sides"],
        size=search.facts["size"],
        data=str(search.recipe.data.train),
    )
    search.advice += [] if advice is None else [advice]


def _advise_quiet(search: Search) -> None:
    """Warn if other programs have disturbed the measurements."""
    figures = [trial.outcome.figures for trial in search.trials]
    shares = [float(row["waited_share"]) for row in figures if "waited_share" in row]
    if shares and median(shares) > WAITED_SHARE:
        search.advice.append(
            f"while this was measured, threads waited {percent(median(shares))} of the time (median) for processors"
            " that other programs had: measure again (--again) when the machine is as it will be in training"
        )


def _compare_together(
    search: Search, start: Setting, setting: Setting, reasons: dict[str, str]
) -> tuple[Setting, dict[str, str]]:
    """Measure in turns what was chosen, the largest batch, and the recipe as it was; keep the fastest.

    Single measurements err by some percent, and the gains of single choices do not add up.
    """
    if search.tuned_rate is None:
        return setting, reasons
    contenders = {CHOSEN: setting, AS_IT_WAS: replace(start, threads=start.threads or search.facts["usual_threads"])}
    if (larger := _largest_batch(search, setting)) is not None:
        contenders[LARGEST] = larger
    rates = search.in_turns({name: other for name, other in contenders.items() if name == CHOSEN or other != setting})
    search.tuned_rate = rates.get(CHOSEN, search.tuned_rate)
    search.default_rate = search.tuned_rate if contenders[AS_IT_WAS] == setting else rates.get(AS_IT_WAS)
    if search.default_rate is None:
        search.missing.append(AS_IT_WAS)
    best = best_of(rates, CHOSEN) if CHOSEN in rates else CHOSEN
    if best == CHOSEN:
        return setting, reasons
    search.tuned_rate = rates[best]
    shown = ", ".join(f"{name} {rate(speed)}" for name, speed in rates.items())
    if best == LARGEST:
        why = f"{reasons.get('batch', '')}; measured by turns with loading, this is faster ({shown})"
        return contenders[LARGEST], {**reasons, "batch": why}
    search.advice.append(
        f"what was chosen one by one is slower together than the recipe as it was, which is kept ({shown})"
    )
    return start, dict.fromkeys(reasons, "as it was: all choices together were slower")


def _largest_batch(search: Search, setting: Setting) -> Setting | None:
    """Return the setting with the largest batch that fits; None if it has that already."""
    if not search.may("batch"):
        return None
    larger = replace(setting, batch_size=_sizes(search)[-1], accumulate=1)
    if larger.batch_size <= setting.batch_size:
        return None
    return larger if search.rate(larger) else None


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


def _choose_rate(search: Search, setting: Setting, *, find_rate: bool) -> Choice:
    """Scale the learning rate to the batch, or find it by a range test."""
    recipe, after = search.recipe, setting.batch_size * search.ranks
    lr, why = scale_rate(recipe.optim, recipe.batch_size, after)
    if find_rate:
        outcome = search.ask("rate", replace(setting, compile="none"), share=1.0)
        if outcome is None or outcome.trouble is not None:
            search.missing.append("the learning rate")
        else:
            suggestion = float(outcome.figures["suggestion"])
            base = recipe.optim.base_batch_size
            lr = float(f"{suggestion * base / after if base else suggestion:.2g}")
            why = f"{suggestion:g} for {after} images, by a range test of {outcome.figures['updates']} updates"
            why += " (Smith 2017)"
    return Choice("optim.lr", lr, why)
