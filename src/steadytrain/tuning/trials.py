"""The measurements of a tuning: settings, and a search that measures them while there is time."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from itertools import product
from statistics import fmean
from typing import Any

from steadytrain.config import Recipe
from steadytrain.config.plain import leaves
from steadytrain.format import size
from steadytrain.tuning.probes import ProbeCache, ProbeOutcome, Prober, What
from steadytrain.tuning.rules import predict_bytes, room_bytes

KEYS = {
    "batch_size": "batch_size",
    "precision": "precision.name",
    "compile": "precision.compile",
    "threads": "parallel.threads",
}
"""Fields of :class:`Setting` -> their keys in the recipe."""

TURNS = 2
"""Measurements of each contender at the end."""

UPDATES = 3
"""The least number of updates of a measurement, warm-up included."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One way to compute and to load; ``threads``: of the loader, None: the default."""

    batch_size: int
    precision: str
    compile: str
    threads: int | None

    @staticmethod
    def of(recipe: Recipe) -> Setting:
        """Return the setting of a recipe."""
        values = dict(leaves(recipe.to_dict()))
        return Setting(**{name: values[key] for name, key in KEYS.items()})

    def apply(self, recipe: Recipe) -> Recipe:
        """Return the recipe with this setting."""
        return recipe.with_({key: getattr(self, name) for name, key in KEYS.items()})


@dataclass(frozen=True)
class Trial:
    """One measurement: what was measured, with which setting, and the outcome."""

    what: What
    setting: Setting
    outcome: ProbeOutcome


def json_key(what: What, setting: Setting) -> str:
    """Return the key of a measurement in the cache. Updates alone do not depend on the loader's threads."""
    values = asdict(setting)
    if what == "updates":
        del values["threads"]
    return json.dumps({"what": what, **values}, sort_keys=True)


@dataclass(kw_only=True)
class Search:
    """Makes measurements while there is time, looks up earlier ones in the cache, and keeps what came of them.

    Args:
        recipe: the recipe to tune; ``facts``: of its data, its model and the device.
        deadline: by ``time.perf_counter()``; ``budget``: seconds of the whole search.
        trials: all measurements, in their order; ``missing``: what there was no time for.
    """

    recipe: Recipe
    facts: Mapping[str, Any]
    prober: Prober
    cache: ProbeCache
    deadline: float
    budget: float
    say: Callable[[Trial], None]
    trials: list[Trial] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    @property
    def is_cpu(self) -> bool:
        return bool(self.facts["device_type"] == "cpu")

    @property
    def room(self) -> float:
        """Bytes of memory for training."""
        return room_bytes(self.facts["memory_bytes"], is_cpu=self.is_cpu)

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
        key, seconds = json_key(what, setting), min(max(self.budget / 200, 0.2), 3.0) * (2 if turn else 1)
        turn_key = f"{key} turn {turn}" if turn else key
        outcome, limit = self.cache.get(turn_key), min(self.deadline - time.perf_counter(), share * self.budget)
        is_too_short = outcome is not None and outcome.trouble == "timeout" and limit > 1.5 * outcome.limit_seconds
        if (outcome is None or is_too_short) and expected + 2 * seconds < limit:
            outcome = self.prober.ask(
                what,
                setting.apply(self.recipe),
                seconds=seconds,
                limit_seconds=limit,
                settle_seconds=min(10.0, self.budget / 12),
            )
            self.cache.put(turn_key, outcome)
            self.say(Trial(what, setting, outcome))
        if outcome is not None and all(json_key(t.what, t.setting) != key for t in self.trials):
            self.trials.append(Trial(what, setting, outcome))
        return outcome

    def updates(self, setting: Setting) -> ProbeOutcome | None:
        """Measure updates alone; not if smaller batches show that memory or time will not suffice."""
        expected = 0.0
        smaller = {
            t.setting.batch_size: t.outcome
            for t in self.trials
            if t.what == "updates" and t.outcome.trouble is None and t.setting.batch_size < setting.batch_size
        }
        if smaller:
            expected = UPDATES * setting.batch_size / smaller[max(smaller)].images_per_second
            memory = {batch: float(outcome.figures["memory_bytes"]) for batch, outcome in smaller.items()}
            needed = predict_bytes(memory, setting.batch_size)
            if len(memory) > 1 and needed > self.room:
                outcome = ProbeOutcome({}, "memory", f"not tried: about {size(needed)} of {size(self.room)}")
                self.trials.append(Trial("updates", setting, outcome))
                return outcome
        return self.ask("updates", setting, expected=expected)

    def rate(self, setting: Setting) -> float | None:
        """Measure updates alone; return images per second, 0 where they fail or leave too little memory free.

        None: there was no time.
        """
        outcome = self.updates(setting)
        if outcome is None:
            return None
        return outcome.images_per_second if outcome.trouble is None and self.fits(outcome) else 0.0

    def fits(self, outcome: ProbeOutcome) -> bool:
        """Return whether a measurement leaves enough memory free."""
        return float(outcome.figures.get("memory_bytes", 0.0)) <= self.room

    def failure(self) -> str:
        """Say why the newest measurement that has failed did."""
        last = next((t.outcome for t in reversed(self.trials) if t.outcome.trouble), None)
        if last is None:
            return "no memory left"
        return last.error + ("; give more --minutes" if last.trouble == "timeout" else "")
