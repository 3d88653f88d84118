"""Streaming summaries of samples: of the feed, the machine, its GPUs and the duration of updates."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from msgspec.structs import asdict, replace

from steadytrain.events import (
    DeviceStats,
    Evaluated,
    Event,
    FeedStats,
    MachineStats,
    Saved,
    ServerStats,
    Step,
)
from steadytrain.format import size
from steadytrain.intervals import quantiles

Sampled = TypeVar("Sampled", MachineStats, DeviceStats)
T = TypeVar("T")

MAX_KEPT = 2048
"""Items of a list that a run of any length may have."""

SUMMED = {"seconds", "throttled_seconds", "energy_joules"}
EXTREMES = {"memory_bytes": max, "threads": max, "temperature": max, "processes": max, "available_bytes": min}
MAX_NAMED = 3  # other processes that a mean names for each of what it counts
MAX_PROCESSES = 64  # other processes that a mean remembers
NEWEST = {"time", "attempt", "rank", "cores", "machine_cores", "quota", "index", "name"}
NEWEST |= {"memory_limit_bytes", "memory_total_bytes", "power_limit_watts", "power_most_watts", "clock_limit_hertz"}

STAGES = ("read_seconds", "decode_seconds", "augment_seconds", "batch_seconds")
# The cumulative fields of ``FeedStats`` that are always numbers.
COUNTED = (*STAGES, "blocked_seconds", "images", "bytes", "asked", "starved")
# Phases of a run: before an attempt's feed and model are warm; in the first pass over the data; after it.
START, FIRST, LATER = range(3)
SAMPLED = (FeedStats, MachineStats, DeviceStats, Evaluated, Saved, ServerStats)
MAX_STEPS = 4096
SCARCE = 0.1  # share of the memory: where so little was left, a process was killed for want of it
MAX_SLOWEST = 32
PERCENTILES = (0.05, 0.5, 0.95)


@dataclass
class Evenly:
    """Keeps a list short: of many items the first, every second, fourth, ... and the newest stay.

    >>> items, few = [], Evenly(most=4)
    >>> for item in range(40):
    ...     few.add(items, item)
    >>> items
    [0, 16, 32, 39]
    """

    most: int = MAX_KEPT
    _every: int = 1
    _since: int = 0  # items since the last one that stays
    _is_loose: bool = False  # the newest is not to stay

    def add(self, items: list[T], item: T) -> None:
        """Append an item."""
        if self._is_loose:
            items[-1] = item
        else:
            items.append(item)
        self._since += 1
        self._is_loose = self._since < self._every
        if not self._is_loose:
            self._since = 0
            if len(items) > self.most:
                del items[1:-1:2]
                self._every *= 2


@dataclass
class Mean(Generic[Sampled]):
    """The mean of samples of a machine or a GPU, weighted by time; what no sample has stays None.

    >>> mean: Mean[MachineStats] = Mean()
    >>> mean.add(MachineStats(seconds=1.0, cores=2, machine_cores=2, cpu=1.0))
    >>> mean.add(MachineStats(seconds=3.0, cores=2, machine_cores=2, cpu=2.0))
    >>> (result := mean.result()) and (result.seconds, result.cpu, result.idle)
    (4.0, 1.75, None)
    """

    _newest: Sampled | None = None
    _values: dict[str, float] = field(default_factory=dict)
    _weights: dict[str, float] = field(default_factory=dict)
    _lists: dict[str, list[str]] = field(default_factory=dict)
    _seconds: float = 0.0
    _processes: dict[tuple[Any, ...], dict[str, float]] = field(default_factory=dict)

    def add(self, sample: Sampled) -> None:
        """Add a sample."""
        self._newest = sample
        values = asdict(sample)
        if isinstance(pressure := values.pop("pressure", None), Mapping):
            values |= {f"pressure.{name}": share for name, share in pressure.items()}
        self._add_processes(values.pop("other_processes"), max(0.0, sample.seconds))
        weight = max(0.0, sample.seconds)
        for name, value in values.items():
            if value is None or name in NEWEST:
                continue
            if isinstance(value, (list, tuple)):
                items = self._lists.setdefault(name, [])
                items += [item for item in value if item not in items]
            elif name in EXTREMES:
                before = self._values.get(name)
                self._values[name] = float(value) if before is None else EXTREMES[name](before, float(value))
            elif name in SUMMED:
                self._values[name] = self._values.get(name, 0.0) + value
            else:
                self._values[name] = self._values.get(name, 0.0) + value * weight
                self._weights[name] = self._weights.get(name, 0.0) + weight

    def _add_processes(self, processes: Sequence[Mapping[str, Any]], seconds: float) -> None:
        """Add up the seconds on a core and the disk's bytes of each other process, and the most memory that it held."""
        self._seconds += seconds
        for process in processes:
            sums = self._processes.setdefault(tuple(process.get(name) for name in ("pid", "name", "user")), {})
            if (cores := process.get("cores")) is not None:
                sums["cores"] = sums.get("cores", 0.0) + cores * seconds
            if (moved := process.get("disk_bytes")) is not None:
                sums["disk_bytes"] = sums.get("disk_bytes", 0.0) + moved * seconds
            if (memory := process.get("memory_bytes")) is not None:
                sums["memory_bytes"] = max(float(memory), sums.get("memory_bytes", 0.0))
        if len(self._processes) > 2 * MAX_PROCESSES:
            self._processes = dict(self._busiest(MAX_PROCESSES))

    def _busiest(self, most: int) -> list[tuple[tuple[Any, ...], dict[str, float]]]:
        """Return those with most cores, most memory and most bytes to and from disks, ``most`` of each."""
        named = dict[tuple[Any, ...], None]()
        for measure in ("cores", "memory_bytes", "disk_bytes"):
            having = [key for key, sums in self._processes.items() if sums.get(measure)]
            named |= dict.fromkeys(sorted(having, key=lambda key: -self._processes[key][measure])[:most])
        return [(key, self._processes[key]) for key in named]

    def result(self) -> Sampled | None:
        """Return the mean; None without samples."""
        newest = self._newest
        if newest is None:
            return None
        changes: dict[str, Any] = {name: tuple(items) for name, items in self._lists.items()}
        pressure: dict[str, float] = {}
        hints = type(newest).__annotations__
        for name, value in self._values.items():
            weight = self._weights.get(name, 1.0)
            mean = value / weight if weight > 0 else 0.0
            if name in hints:
                changes[name] = round(mean) if "Whole" in hints[name] else mean
            else:
                pressure[name.partition(".")[2]] = mean
        if pressure:
            changes["pressure"] = pressure
        changes["other_processes"] = tuple(
            {"pid": pid, "name": name, "user": user}
            | {key: value if key == "memory_bytes" else value / max(self._seconds, 1e-9) for key, value in sums.items()}
            for (pid, name, user), sums in self._busiest(MAX_NAMED)
        )
        return replace(newest, **changes)


def memory_text(stats: MachineStats | None) -> str:
    """Describe the memory that a killed process used last; empty if it was not recorded.

    >>> memory_text(MachineStats(seconds=1, cores=2, machine_cores=2, memory_bytes=39 * 10**8,
    ...                           memory_limit_bytes=4 * 10**9, available_bytes=10**8))
    'it last used 3.9 GB of memory, of a limit of 4.0 GB: it probably ran out of memory; lower --batch-size'
    """
    if stats is None or stats.memory_bytes is None or stats.memory_limit_bytes is None:
        return ""
    words = f"it last used {size(stats.memory_bytes)} of memory, of a limit of {size(stats.memory_limit_bytes)}"
    left = stats.memory_limit_bytes - stats.memory_bytes if stats.available_bytes is None else stats.available_bytes
    if left < SCARCE * stats.memory_limit_bytes:
        words += ": it probably ran out of memory; lower --batch-size"
    return words


def feed_difference(before: FeedStats | None, after: FeedStats) -> FeedStats:
    """Return what the feed did between two cumulative events; all of ``after`` where the feed was made anew between.

    What is neither a sum of seconds nor a count is as in ``after``, but ``by_loop`` only where it was so in both.
    """
    if before is None or any(getattr(after, name) - getattr(before, name) < -1e-6 for name in COUNTED):
        return after
    return _combine(after, before, -1, by_loop=before.by_loop and after.by_loop)


def feed_sum(total: FeedStats | None, more: FeedStats) -> FeedStats:
    """Add up what the feed did in two stretches of a run."""
    return more if total is None else _combine(more, total, 1)


def _combine(newest: FeedStats, other: FeedStats, sign: int, **changes: Any) -> FeedStats:
    counted: dict[str, Any] = {name: getattr(newest, name) + sign * getattr(other, name) for name in COUNTED}
    is_known = newest.cpu_seconds is not None and other.cpu_seconds is not None
    cpu = (newest.cpu_seconds or 0.0) + sign * (other.cpu_seconds or 0.0)
    return replace(newest, **counted, cpu_seconds=cpu if is_known else None, **changes)


@dataclass(frozen=True, kw_only=True)
class UpdateTimes:
    """Durations of updates; zeros where there was none.

    Args:
        seconds: 5th, 50th and 95th percentile of an update's seconds, its wait included.
        waits: the same percentiles of the wait in them.
        fast: seconds without its wait of an update that a quarter of them undercut.
        slowest: step -> seconds of the slowest updates, in the order in which they were made; at most 32.
    """

    seconds: tuple[float, ...] = (0.0, 0.0, 0.0)
    waits: tuple[float, ...] = (0.0, 0.0, 0.0)
    fast: float = 0.0
    slowest: Mapping[int, float] = field(default_factory=dict)


@dataclass
class StepTimes:
    """Streaming quantiles of step time and wait; of many steps every second, fourth, ... is kept, evenly."""

    _kept: list[tuple[float, float]] = field(default_factory=list)
    _every: int = 1
    _count: int = 0
    _slowest: list[tuple[float, int]] = field(default_factory=list)

    def add(self, event: Step) -> None:
        """Add an update."""
        slowest = self._slowest
        if len(slowest) < MAX_SLOWEST:
            heapq.heappush(slowest, (event.seconds, event.step))
        elif event.seconds >= slowest[0][0]:
            heapq.heappushpop(slowest, (event.seconds, event.step))
        if self._count % self._every == 0:
            self._kept.append((event.seconds, event.wait_seconds))
            if len(self._kept) >= MAX_STEPS:
                del self._kept[1::2]
                self._every *= 2
        self._count += 1

    def result(self) -> UpdateTimes:
        """Return the times so far."""
        if not self._kept:
            return UpdateTimes()
        return UpdateTimes(
            seconds=quantiles([seconds for seconds, _ in self._kept], *PERCENTILES),
            waits=quantiles([wait for _, wait in self._kept], *PERCENTILES),
            fast=quantiles([max(0.0, seconds - wait) for seconds, wait in self._kept], 0.25)[0],
            slowest=dict(sorted((step, seconds) for seconds, step in self._slowest)),
        )


@dataclass
class RunSamples:
    """The samples of a run by phase, and sums of what is counted."""

    feeds: dict[int, FeedStats] = field(default_factory=dict)
    machines: dict[int, Mean[MachineStats]] = field(default_factory=dict)
    whole: Mean[MachineStats] = field(default_factory=Mean)
    devices: dict[int, dict[int, Mean[DeviceStats]]] = field(default_factory=dict)
    servers: ServerStats | None = None
    evaluations: tuple[int, float] = (0, 0.0)
    checkpoints: tuple[int, float] = (0, 0.0)
    _feed: FeedStats | None = None
    _used: set[int] = field(default_factory=set)

    def begin_attempt(self) -> None:
        """Forget what belongs to a single attempt: its feed, and which GPUs it used."""
        self._feed = None
        self._used = set()

    def take(self, event: Event, phase: int) -> None:
        """Fold in an event that belongs to a phase of the run."""
        match event:
            case FeedStats():
                at = phase if self._feed else START
                self.feeds[at] = feed_sum(self.feeds.get(at), feed_difference(self._feed, event))
                self._feed = event
            case MachineStats():
                self.machines.setdefault(phase, Mean()).add(event)
                self.whole.add(event)
            case DeviceStats():
                self.devices.setdefault(event.index, {}).setdefault(phase, Mean()).add(event)
                self._used.add(event.index)
            case Evaluated():
                self.evaluations = (self.evaluations[0] + 1, self.evaluations[1] + max(0.0, event.seconds))
            case Saved():
                self.checkpoints = (self.checkpoints[0] + 1, self.checkpoints[1] + max(0.0, event.pause))
            case ServerStats():
                self.servers = server_sum(self.servers, event)

    def feed(self, *phases: int) -> FeedStats | None:
        """Return what the feed did in the first of these phases that has samples."""
        return next((self.feeds[phase] for phase in phases if phase in self.feeds), None)

    def machine(self, *phases: int) -> MachineStats | None:
        """Return the machine's mean in the first of these phases that has samples."""
        return _first_mean(self.machines, phases)

    def gpus(self, *phases: int) -> tuple[DeviceStats, ...]:
        """Return the same of each GPU that the newest attempt with samples used."""
        used = self._used or self.devices.keys()
        means = (_first_mean(self.devices[index], phases) for index in sorted(used))
        return tuple(mean for mean in means if mean)


def server_sum(before: ServerStats | None, event: ServerStats) -> ServerStats:
    """Add what was exchanged with the same servers."""
    if before is None or len(before.servers) != len(event.servers):
        return event
    pushes = before.pushes + event.pushes
    stale = before.staleness * before.pushes + event.staleness * event.pushes
    pairs: Any = zip(before.servers, event.servers, strict=True)
    return replace(
        event,
        seconds=before.seconds + event.seconds,
        pushes=pushes,
        staleness=stale / max(1, pushes),
        staleness_max=max(before.staleness_max, event.staleness_max),
        servers=[{name: value + old.get(name, 0.0) for name, value in new.items()} for old, new in pairs],
    )


def _first_mean(means: Mapping[int, Mean[Sampled]], phases: Sequence[int]) -> Sampled | None:
    return next((means[phase].result() for phase in phases if phase in means), None)
