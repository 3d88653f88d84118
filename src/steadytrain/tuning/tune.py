"""Choose batch size, precision, layout, threads and compiling for this machine by measuring, and give the reasons.

The loader slows updates only through the cores that it takes, which are the same for every batch, number format and
layout. So these are chosen by updates alone, then the loader's threads by updates and loading together. At the end
the result is measured in turns with the largest batch and with the recipe as it was. All measurements are cached: the
same search on the same machine, model and data looks them up, and continues where it was interrupted or ran out of
time.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from statistics import fmean, median
from typing import Any

from steadytrain.config import Recipe
from steadytrain.config.defaults import MAX_BATCH_SHARE
from steadytrain.config.phases import parse_train
from steadytrain.errors import FailedError, InputError, RecipeError
from steadytrain.format import count, duration, percent, rate, size
from steadytrain.reports.tuned import WAITED_SHARE, Choice
from steadytrain.tuning.probes import ProbeCache, ProbeOutcome, Prober, What, cache_path
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
    predict_bytes,
    room_bytes,
    saved_seconds,
    scale_rate,
)

KEYS = {
    "batch": ("batch_size", "batch_size"),
    "precision": ("precision.name", "precision"),
    "layout": ("precision.channels_last", "channels_last"),
    "compile": ("precision.compile", "compile"),
    "optimizer": ("optim.options.foreach", ""),
    "threads": ("parallel.threads", "threads"),
    "rate": ("optim.lr", ""),
}
"""What can be chosen -> its key in the recipe, and the field of :class:`Setting` that is the value of just that."""
NAMES = tuple(KEYS)

WITHOUT = (
    *("batch_size", "seed", "budget", "every", "optim.accumulate", "optim.lr", "optim.base_batch_size"),
    *("optim.schedule", "optim.warmup_epochs", "precision", "parallel.threads"),
)
"""Keys of the recipe that are tuned, or that the speed of an update does not depend on."""

OPTIMIZER_SHARE = 0.05
"""Share of an update below which a variant of the optimizer gains too little to be measured."""

COMPILE_SECONDS, MOST_COMPILE_GAIN = 20.0, 0.3
"""The least time that compiling takes, and the largest gain to expect: shorter runs cannot earn it back."""

TURNS = 2
CHOSEN, LARGEST, AS_IT_WAS = "what was chosen", "the largest batch", "the recipe as it was"
"""What is measured in turns at the end."""

UPDATES = 3
"""The least number of updates of a measurement, warm-up included."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One way to compute and to load.

    ``batch_size`` images an update, in ``accumulate`` parts; ``threads``: of the loader, None: the default.
    """

    batch_size: int
    accumulate: int
    precision: str
    channels_last: bool
    compile: str
    foreach: bool
    threads: int | None

    @staticmethod
    def of(recipe: Recipe) -> Setting:
        """Return the setting of a recipe."""
        return Setting(
            batch_size=recipe.batch_size,
            accumulate=recipe.optim.accumulate,
            precision=recipe.precision.name,
            channels_last=recipe.precision.channels_last,
            compile=recipe.precision.compile,
            foreach=bool(recipe.optim.options.get("foreach", False)),
            threads=recipe.parallel.threads,
        )

    def apply(self, recipe: Recipe) -> Recipe:
        """Return the recipe with this setting."""
        options = {name: value for name, value in recipe.optim.options.items() if name != "foreach"}
        return recipe.with_(
            {
                "batch_size": self.batch_size,
                "optim.accumulate": self.accumulate,
                "precision.name": self.precision,
                "precision.channels_last": self.channels_last,
                "precision.compile": self.compile,
                "optim.options": options | ({"foreach": True} if self.foreach else {}),
                "parallel.threads": self.threads,
            }
        )


@dataclass(frozen=True)
class Trial:
    """One measurement: what was measured, with which setting, and the outcome."""

    what: What
    setting: Setting
    outcome: ProbeOutcome


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """The result of a tuning.

    Args:
        recipe: the tuned one.
        choices: each with its reason.
        advice: what else would help, such as packing.
        trials: all measurements, in their order.
        facts: of data, model and device.
        default_rate, tuned_rate: images per second of loading and updates together; None: not measured.
        missing: what there was no time to measure.
        seconds: that the search took.
        ranks: that train together; each trial is of one rank.
    """

    recipe: Recipe
    choices: tuple[Choice, ...]
    advice: tuple[str, ...]
    trials: tuple[Trial, ...]
    facts: Mapping[str, Any]
    default_rate: float | None
    tuned_rate: float | None
    missing: tuple[str, ...]
    seconds: float
    ranks: int = 1

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
    figures = first.figures
    identity = {name: figures[name] for name in ("data", "device", "cores", "versions")}
    cache = ProbeCache(cache_path(recipe, identity, WITHOUT))
    if again:
        cache.clear()
    search = _Search(
        recipe,
        figures,
        prober,
        cache,
        began + seconds,
        seconds,
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
    return Tuned(
        recipe=recipe.with_({choice.key: choice.value for choice in choices}),
        choices=tuple(choices),
        advice=tuple(search.advice),
        trials=tuple(search.trials),
        facts=figures,
        default_rate=search.default_rate,
        tuned_rate=search.tuned_rate,
        missing=tuple(search.missing),
        seconds=time.perf_counter() - began,
        ranks=ranks,
    )


@dataclass
class _Search:
    """Makes measurements while there is time, looks up earlier ones in the cache, and keeps what came of them.

    ``chosen`` to ``say``: as for :func:`tune`; what came of it: as of :class:`Tuned`.
    """

    recipe: Recipe
    facts: Mapping[str, Any]
    prober: Prober
    cache: ProbeCache
    deadline: float
    budget: float
    chosen: frozenset[str]
    free: frozenset[str]
    ranks: int
    measures: bool
    say: Callable[[Trial], None]
    trials: list[Trial] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)
    default_rate: float | None = None
    tuned_rate: float | None = None

    def may(self, name: str) -> bool:
        """Return whether a choice is free, and not the user's."""
        return name in self.free and KEYS[name][0] not in self.chosen

    @property
    def seconds(self) -> float:
        """Seconds of one measurement."""
        return min(max(self.budget / 200, 0.2), 3.0)

    @property
    def left(self) -> float:
        return self.deadline - time.perf_counter()

    def in_turns(self, settings: Mapping[str, Setting]) -> dict[str, float]:
        """Return images per second of updates and loading together, each the mean of :data:`TURNS` turns."""
        speeds: dict[str, list[float]] = {name: [] for name in settings}
        for turn, (name, setting) in product(range(1, TURNS + 1), settings.items()):
            outcome = self.ask("both", setting, turn=turn)
            if outcome is not None and outcome.trouble is None:
                speeds[name].append(outcome.images_per_second)
        return {name: fmean(rates) for name, rates in speeds.items() if len(rates) == TURNS}

    def ask(
        self, what: What, setting: Setting, *, expected: float = 0.0, share: float = 0.3, turn: int = 0
    ) -> ProbeOutcome | None:
        """Measure, or look up the measurement; return None if there is no time for it.

        Args:
            expected: seconds that it will take at least, beyond those of a measurement.
            share: of the whole time, the most that it may take.
            turn: the number of this repetition, which is twice as long as a first measurement; 0: no repetition.
        """
        key, seconds = json_key(what, setting), self.seconds * (2 if turn else 1)
        turn_key = f"{key} turn {turn}" if turn else key
        outcome, limit = self.cache.get(turn_key), min(self.left, share * self.budget)
        is_too_short = outcome is not None and outcome.trouble == "timeout" and limit > 1.5 * outcome.limit_seconds
        if (outcome is None or is_too_short) and self.measures and expected + 2 * seconds < limit:
            fastest = max((t.outcome.images_per_second for t in self.trials if t.what == "updates"), default=0.0)
            outcome = self.prober.ask(
                what,
                setting.apply(self.recipe),
                seconds=seconds,
                limit_seconds=limit,
                settle_seconds=min(10.0, self.budget / 12),
                updates=max(50, min(300, int(self.left / 3 * fastest / setting.batch_size))),
            )
            self.cache.put(turn_key, outcome)
            self.say(Trial(what, setting, outcome))
        if outcome is not None and not any(json_key(t.what, t.setting) == key for t in self.trials):
            self.trials.append(Trial(what, setting, outcome))
        return outcome

    def updates(self, setting: Setting) -> ProbeOutcome | None:
        """Measure updates alone; not if smaller batches show that memory or time will not suffice."""
        outcomes = {
            t.setting.batch_size // t.setting.accumulate: t.outcome
            for t in self.trials
            if t.what == "updates" and t.outcome.trouble is None and t.setting.batch_size != setting.batch_size
        }
        part, expected = setting.batch_size // setting.accumulate, 0.0
        if smaller := [batch for batch in outcomes if batch < part]:
            expected = UPDATES * setting.batch_size / outcomes[max(smaller)].images_per_second
            memory = {batch: float(outcomes[batch].figures["memory_bytes"]) for batch in smaller}
            needed = predict_bytes(memory, part)
            if len(memory) > 1 and needed > self.room:
                outcome = ProbeOutcome({}, "memory", f"not tried: about {size(needed)} of {size(self.room)}")
                self.trials.append(Trial("updates", setting, outcome))
                return outcome
        return self.ask("updates", setting, expected=expected)

    @property
    def room(self) -> float:
        return room_bytes(self.facts["memory_bytes"], is_cpu=self.facts["device_type"] == "cpu")

    def fits(self, outcome: ProbeOutcome) -> bool:
        """Return whether a measurement leaves enough memory free."""
        return float(outcome.figures.get("memory_bytes", 0.0)) <= self.room


def json_key(what: What, setting: Setting) -> str:
    """Return the key of a measurement in the cache. Updates alone do not depend on the loader's threads."""
    values = asdict(setting)
    if what == "updates":
        del values["threads"]
    return json.dumps({"what": what, **values}, sort_keys=True)


def _choose(search: _Search, *, find_rate: bool) -> list[Choice]:
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
    for name, choose in (("optimizer", _choose_optimizer), ("threads", _choose_threads)):
        if search.may(name):
            setting, reasons[name] = choose(search, setting)
    setting, reasons = _compare_together(search, part, setting, reasons)
    if search.may("compile"):
        setting, reasons["compile"] = _choose_compile(search, setting)
    choices = _choices(recipe, replace(setting, batch_size=setting.batch_size * search.ranks), reasons)
    return [*choices, *([_choose_rate(search, setting, find_rate=find_rate)] if search.may("rate") else [])]


def _choices(recipe: Recipe, setting: Setting, reasons: Mapping[str, str]) -> list[Choice]:
    """Return the keys of the recipe that a setting gives a value, each with its reason."""
    values = asdict(setting)
    choices = [
        Choice(key, values[name], reasons[kind]) for kind, (key, name) in KEYS.items() if name and kind in reasons
    ]
    if setting.accumulate != recipe.optim.accumulate:
        why = f"{count(setting.accumulate, 'micro-batch', 'micro-batches')} of"
        why += f" {setting.batch_size // setting.accumulate} keep the batch of {setting.batch_size}"
        choices.append(Choice("optim.accumulate", setting.accumulate, why))
    if "optimizer" in reasons:
        options = {n: v for n, v in recipe.optim.options.items() if n != "foreach"}
        options |= {"foreach": True} if setting.foreach else {}
        choices.append(Choice("optim.options", options, reasons["optimizer"]))
    return choices


def _sizes(search: _Search) -> list[int]:
    """Batch sizes of a rank to choose from: powers of two, from 2 to a tenth of its training images."""
    most = min(MOST_BATCH, max(2, int(search.facts["num_train"] * MAX_BATCH_SHARE / search.ranks)))
    return [1 << power for power in range(1, most.bit_length()) if 1 << power <= most]


def _choose_batch(search: _Search, setting: Setting, around: int | None = None) -> tuple[Setting, str]:
    """Choose the knee of the curve of rates over batch sizes, or micro-batches of the user's batch."""
    if "batch_size" in search.chosen:
        return _split_batch(search, setting)
    sizes = _sizes(search)
    least = min(LEAST_BATCH, sizes[-1])
    usual = [batch for batch in sizes if batch >= least]
    curve: dict[int, float] = {}
    step, batch = (STEP, least) if around is None else (2, around)
    following: int | None = batch
    while following is not None:
        outcome = search.updates(replace(setting, batch_size=following, accumulate=1))
        if outcome is None:
            search.missing.append(f"batches of {following}")
            break
        is_good = outcome.trouble is None and search.fits(outcome)
        curve[following] = outcome.images_per_second if is_good else 0.0
        any_good = any(curve.values())
        following = next_batch(curve, usual if any_good else sizes, step)
        if following is None and around is not None and any_good and knee(_good(curve)) == around:
            smaller = [size for size in usual if size < around and size not in curve]
            following = smaller[-1] if smaller else None
    good = _good(curve)
    if not good:
        if curve:
            raise FailedError(f"no batch can be trained here: {_why_failed(search)}")
        return setting, "as it was: not measured, there was no time"
    best = knee(good)
    shown = ", ".join(f"{batch}: {rate(good[batch])}" for batch in sorted(good))
    why = f"the smallest within {percent(1 - KNEE)} of the fastest, in images/s of updates: {shown}"
    if best == usual[-1] and best < MOST_BATCH:
        why += f"; more than a tenth of the {search.facts['num_train']:,} training images is not tried"
    return replace(setting, batch_size=best, accumulate=1), why


def _split_batch(search: _Search, setting: Setting) -> tuple[Setting, str]:
    """Keep the user's batch; split it into micro-batches if it does not fit into memory or if they are faster."""
    whole = setting.batch_size
    parts = [whole >> power for power in range(12) if whole % (1 << power) == 0]
    parts = [part for part in parts if part >= min(LEAST_BATCH, whole)]
    curve: dict[int, float] = {}

    def measure(part: int) -> bool:
        outcome = search.updates(replace(setting, batch_size=part, accumulate=1))
        if outcome is not None:
            curve[part] = outcome.images_per_second if outcome.trouble is None and search.fits(outcome) else 0.0
        return outcome is not None

    measure(parts[-1])  # tells what the others take
    for part in parts:
        if part not in curve and not measure(part):
            search.missing.append(f"batches of {part}")
        if curve.get(part):
            if part // 4 in parts and part // 4 not in curve:
                measure(part // 4)
            break
    good = _good(curve)
    if not good:
        if curve:
            raise FailedError(f"no part of a batch of {whole} can be trained here: {_why_failed(search)}")
        return setting, "yours; not measured, there was no time"
    fitting = max(good)
    if not curve.get(whole, 1.0):
        best, why = fitting, f"yours; as a whole it fails here ({_why_failed(search)})"
    elif whole in good and good[whole] >= KNEE * max(good.values()):
        best, why = whole, "yours, and as fast as a whole as in parts"
    elif whole in good:
        best = min(batch for batch in good if good[batch] == max(good.values()))
        why = "yours; parts of it are faster"
    else:
        return setting, "yours; an update of it takes too long to be measured in this time"
    shown = ", ".join(f"{batch}: {rate(good[batch])}" for batch in sorted(good))
    return replace(setting, batch_size=whole, accumulate=whole // best), f"{why}; images/s of updates: {shown}"


def _why_failed(search: _Search) -> str:
    last = next((t.outcome for t in reversed(search.trials) if t.outcome.trouble), None)
    if last is None:
        return "no memory left"
    return last.error + ("; give more --minutes" if last.trouble == "timeout" else "")


def _choose_precision(search: _Search, setting: Setting) -> tuple[Setting, str]:
    """Choose the number format at this batch."""
    precisions = list(search.facts["precisions"])
    settings = {name: replace(setting, precision=name) for name in dict.fromkeys([*precisions, setting.precision])}
    best, why = _fastest(search, settings, precisions[0], "the most exact")
    return replace(setting, precision=best), why


def _choose_layout(search: _Search, setting: Setting) -> tuple[Setting, str]:
    """Choose the memory format at this batch."""
    ways = {"channels-last": True, "channels-first": False}
    settings = {name: replace(setting, channels_last=value) for name, value in ways.items()}
    best, why = _fastest(search, settings, "channels-last", "the usual one")
    return replace(setting, channels_last=ways[best]), why


def _fastest(search: _Search, settings: Mapping[str, Setting], preferred: str, why: str) -> tuple[str, str]:
    """Measure updates with several settings; return the best one's name, and the reason."""
    rates, failed = dict[str, float](), list[str]()
    for name, setting in settings.items():
        outcome = search.updates(setting)
        if outcome is None:
            search.missing.append(name)
        elif outcome.trouble is not None:
            failed.append(f"{name}: {outcome.error}")
        elif search.fits(outcome):
            rates[name] = outcome.images_per_second
    if not rates:
        return preferred, "not measured"
    best = best_of(rates, preferred)
    shown = ", ".join(f"{name} {rate(value)}" for name, value in rates.items())
    reason = f"images/s of updates: {shown}"
    if len(rates) > 1 and best == preferred and max(rates.values()) > rates[best]:
        reason += f"; {why}, as nothing is {percent(GAIN)} faster"
    return best, "; ".join([reason, *failed])


def _choose_optimizer(search: _Search, setting: Setting) -> tuple[Setting, str]:
    """Choose between the optimizer's fused kernel and its foreach variant."""
    if not search.facts["has_fused"]:
        return setting, f"{search.recipe.optim.name} has one variant"
    outcome = search.updates(setting)
    if outcome is None or outcome.trouble is not None:
        return setting, "fused; not measured"
    share = float(outcome.figures["optimizer_share"])
    if share < OPTIMIZER_SHARE:
        return setting, f"fused; the optimizer takes {percent(share)} of an update, so a variant gains nothing"
    ways = {"fused": replace(setting, foreach=False), "foreach": replace(setting, foreach=True)}
    best, why = _fastest(search, ways, "fused", "the usual one")
    return ways[best], f"{best}; {why}"


def _choose_threads(search: _Search, setting: Setting) -> tuple[Setting, str]:
    """Choose the fewest loader threads that are fast enough: on a CPU the updates need the cores."""
    cores, usual = search.facts["cores"], search.facts["usual_threads"]
    loading = search.ask("loading", replace(setting, threads=1))
    updates = search.updates(setting)
    candidates = {usual, cores}
    words = ""
    if loading is not None and updates is not None and loading.images_per_second and updates.images_per_second:
        needed = math.ceil(1.1 * updates.images_per_second / loading.images_per_second)
        candidates.add(min(max(needed, 1), cores))
        words = f"one thread loads {rate(loading.images_per_second)} images/s alone; "
    rates: dict[int, float] = {}
    for threads in sorted(candidates):
        expected = UPDATES * setting.batch_size / updates.images_per_second if updates and updates.figures else 0.0
        outcome = search.ask("both", replace(setting, threads=threads), expected=expected)
        if outcome is None:
            search.missing.append(f"{threads} loader threads")
        elif outcome.trouble is None:
            rates[threads] = outcome.images_per_second
    if not rates:
        return setting, f"the default ({usual}); not measured together with updates"
    best = knee(rates, 1 - GAIN)
    search.tuned_rate = rates[best]
    shown = ", ".join(f"{threads}: {rate(rates[threads])}" for threads in sorted(rates))
    reason = f"{words}images/s of both together by threads: {shown}"
    if search.facts["device_type"] == "cpu" and best < cores:
        reason += f"; the rest of {count(cores, 'core')} is for the updates"
    _advise_packing(search, rates[best], updates, loading)
    return replace(setting, threads=best), reason


def _advise_packing(search: _Search, both: float, updates: ProbeOutcome | None, loading: ProbeOutcome | None) -> None:
    """Advise what would relieve a loader that limits training."""
    if loading is None or not loading.figures or updates is None or not updates.images_per_second:
        return
    if search.facts["device_type"] == "cpu":
        share = float(loading.figures["loader_cpu_seconds"]) * both / search.facts["cores"]
    else:
        share = max(0.0, 1 - both / updates.images_per_second)
    advice = packing_advice(
        share,
        of="cores" if search.facts["device_type"] == "cpu" else "time",
        decode_share=float(loading.figures["decode_share"]),
        keeps=bool(loading.figures["keeps"]),
        stored=search.facts["stored_sides"],
        size=search.facts["size"],
        data=str(search.recipe.data.train),
    )
    search.advice += [] if advice is None else [advice]


def _advise_quiet(search: _Search) -> None:
    """Warn if other programs have disturbed the measurements."""
    figures = [trial.outcome.figures for trial in search.trials]
    shares = [float(row["waited_share"]) for row in figures if "waited_share" in row]
    if shares and median(shares) > WAITED_SHARE:
        search.advice.append(
            f"while this was measured, threads waited {percent(median(shares))} of the time (median) for processors"
            " that other programs had: measure again (--again) when the machine is as it will be in training"
        )


def _compare_together(
    search: _Search, start: Setting, setting: Setting, reasons: dict[str, str]
) -> tuple[Setting, dict[str, str]]:
    """Measure in turns what was chosen, the largest batch, and the recipe as it was; keep the fastest.

    Single measurements err by some percent, and the gains of single choices do not add up.
    """
    if search.tuned_rate is None:
        return setting, reasons
    usual = start.threads or search.facts["usual_threads"]
    contenders = {CHOSEN: setting, AS_IT_WAS: replace(start, threads=usual)}
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
    shown = ", ".join(f"{name} {rate(speed)}" for name, speed in rates.items())
    search.tuned_rate = rates[best]
    if best == LARGEST:
        assert larger is not None
        why = f"{reasons.get('batch', '')}; measured by turns with loading, this is faster ({shown})"
        return larger, {**reasons, "batch": why}
    search.advice.append(
        f"what was chosen one by one is slower together than the recipe as it was, which is kept ({shown})"
    )
    return start, dict.fromkeys(reasons, "as it was: all choices together were slower")


def _largest_batch(search: _Search, setting: Setting) -> Setting | None:
    """Return the setting with the largest batch that fits; None if it has that already."""
    if not search.may("batch"):
        return None
    larger = replace(setting, batch_size=_sizes(search)[-1], accumulate=1)
    if larger.batch_size <= setting.batch_size:
        return None
    outcome = search.updates(larger)
    fits = outcome is not None and outcome.trouble is None and search.fits(outcome)
    return larger if fits else None


def _choose_compile(search: _Search, setting: Setting) -> tuple[Setting, str]:
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


def _choose_rate(search: _Search, setting: Setting, *, find_rate: bool) -> Choice:
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


def _good(curve: Mapping[int, float]) -> dict[int, float]:
    return {batch: rate for batch, rate in curve.items() if rate > 0}
