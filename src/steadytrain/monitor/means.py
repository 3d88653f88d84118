"""Many samples of the feed, the machine or a GPU as one: sums, means weighted by time, extremes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Generic, TypeVar

from steadytrain.events import DeviceStats, FeedStats, MachineStats

Sampled = TypeVar("Sampled", MachineStats, DeviceStats)

SUMS = {"seconds", "throttled_seconds", "energy_joules"}
MOST = {"memory_bytes", "threads", "temperature", "processes"}
LEAST = {"available_bytes"}
NEWEST = {"time", "attempt", "rank", "cores", "machine_cores", "index", "name"}
NEWEST |= {"memory_limit_bytes", "memory_total_bytes", "power_limit_watts", "clock_limit_hertz"}

STAGES = ("read_seconds", "decode_seconds", "augment_seconds", "batch_seconds")
COUNTED = (*STAGES, "blocked_seconds", "images", "bytes", "asked", "starved")
"""What a feed tells cumulatively, in numbers that are always there."""


class Mean(Generic[Sampled]):
    """Samples of a machine or a GPU, one after the other; what none of them tells stays None.

    >>> mean: Mean[MachineStats] = Mean()
    >>> mean.add(MachineStats(seconds=1.0, cores=2, machine_cores=2, cpu=1.0))
    >>> mean.add(MachineStats(seconds=3.0, cores=2, machine_cores=2, cpu=2.0))
    >>> (told := mean.told()) and (told.seconds, told.cpu, told.idle)
    (4.0, 1.75, None)
    """

    def __init__(self) -> None:
        self._newest: Sampled | None = None
        self._values: dict[str, float] = {}
        self._weights: dict[str, float] = {}
        self._listed: dict[str, list[str]] = {}

    def add(self, sample: Sampled) -> None:
        """One more sample."""
        self._newest = sample
        weight = max(0.0, sample.seconds)
        for name, value in vars(sample).items():
            if isinstance(value, Mapping):
                for key, one in value.items():
                    self._add(f"{name}.{key}", one, weight)
            elif isinstance(value, (list, tuple)):
                listed = self._listed.setdefault(name, [])
                listed += [one for one in value if one not in listed]
            elif isinstance(value, (int, float)) and name not in NEWEST:
                self._add(name, value, weight)

    def told(self) -> Sampled | None:
        """All samples as one; None where there was none."""
        newest = self._newest
        if newest is None:
            return None
        changes: dict[str, object] = {name: tuple(values) for name, values in self._listed.items()}
        for field in fields(newest):
            if field.name in self._values:
                value = self._value(field.name)
                changes[field.name] = round(value) if "int" in str(field.type) else value
        inner = [name for name in self._values if name.startswith("pressure.")]
        if inner:
            changes["pressure"] = {name.partition(".")[2]: self._value(name) for name in inner}
        return replace(newest, **changes)  # type: ignore[arg-type]

    def _add(self, name: str, value: float, weight: float) -> None:
        if name in SUMS:
            self._values[name] = self._values.get(name, 0.0) + value
        elif name in MOST:
            self._values[name] = max(self._values.get(name, value), value)
        elif name in LEAST:
            self._values[name] = min(self._values.get(name, value), value)
        else:
            self._values[name] = self._values.get(name, 0.0) + value * weight
            self._weights[name] = self._weights.get(name, 0.0) + weight

    def _value(self, name: str) -> float:
        weight = self._weights.get(name, 1.0)
        return self._values[name] / weight if weight > 0 else 0.0


class FeedSum:
    """What a feed did in several stretches of a run, each the difference of two cumulative ``FeedStats``."""

    def __init__(self) -> None:
        self._told: FeedStats | None = None

    def add(self, before: FeedStats | None, after: FeedStats) -> None:
        """One more stretch; None: since the feed was made."""
        more = after if before is None else difference(before, after)
        self._told = more if self._told is None else _together(self._told, more)

    def told(self) -> FeedStats | None:
        """The stretches as one; None where there was none."""
        return self._told


def difference(before: FeedStats, after: FeedStats) -> FeedStats:
    """What the feed did between two cumulative tellings; all of ``after`` where the feed was made anew between them."""
    counted = {name: getattr(after, name) - getattr(before, name) for name in COUNTED}
    if min(counted.values()) < -1e-6:
        return after
    ready = after.ready * after.asked - before.ready * before.asked
    return replace(
        after,
        **counted,
        ready=max(0.0, ready / counted["asked"]) if counted["asked"] else after.ready,
        cpu_seconds=_signed(after.cpu_seconds, before.cpu_seconds, -1.0),
        per_thread=_each(after.per_thread, before.per_thread, -1.0),
    )


def _together(one: FeedStats, more: FeedStats) -> FeedStats:
    asked = one.asked + more.asked
    return replace(
        more,
        **{name: getattr(one, name) + getattr(more, name) for name in COUNTED},
        ready=(one.ready * one.asked + more.ready * more.asked) / asked if asked else more.ready,
        cpu_seconds=_signed(one.cpu_seconds, more.cpu_seconds, 1.0),
        per_thread=_each(more.per_thread, one.per_thread, 1.0),
    )


def _signed(one: float | None, other: float | None, sign: float) -> float | None:
    return None if one is None or other is None else one + sign * other


def _each(
    threads: Sequence[Mapping[str, float]], others: Sequence[Mapping[str, float]], sign: float
) -> tuple[Mapping[str, float], ...]:
    """Thread by thread, where they are as many."""
    if len(threads) != len(others):
        return tuple(threads)
    pairs = zip(threads, others, strict=True)
    return tuple({name: value + sign * other.get(name, 0.0) for name, value in one.items()} for one, other in pairs)
