"""Series of a run over its time, for the live charts: a row for each sample; of many, extremes of each stretch."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import msgspec

from steadytrain.events import DeviceStats, Evaluated, Event, FeedStats, Logged, MachineStats, top1_95

MAX_POINTS = 4000

ChartRow = tuple[int | float | None, ...]

Columns = Mapping[str, Callable[[Any], float | None]]
"""Names of columns, and what reads each off an event."""

MACHINE: Columns = {
    **{name: attrgetter(name) for name in ("cpu", "ranks", "others", "iowait", "steal", "idle")},
    "pressure_cpu": lambda event: event.pressure.get("cpu"),
    "pressure_memory": lambda event: event.pressure.get("memory"),
    "pressure_io": lambda event: event.pressure.get("io"),
    "memory": attrgetter("memory_bytes"),
}
DEVICE: Columns = {
    **{name: attrgetter(name) for name in ("utilisation", "sm_active", "tensor_active")},
    "memory": lambda event: _share(event.memory_bytes, event.memory_total_bytes),
    "power": lambda event: _share(event.power_watts, event.power_limit_watts),
}
COLUMNS = {
    "train": ("seconds", "epoch", "step", "loss", "top1"),
    "val": ("seconds", "epoch", "step", "loss", "top1", "low", "high"),
    "rate": ("seconds", "epoch", "step", "steady", "overall"),
    "feed": ("seconds", "ready", "depth", "starved"),
    "machine": ("seconds", *MACHINE),
    "device": ("seconds", *DEVICE),
}
"""Columns of the rows of the live charts, by series."""
DRAWN = (Logged, Evaluated, FeedStats, MachineStats, DeviceStats)
"""Events that add something to the live charts."""

# The column by which a series is thinned is the one whose spikes are to be seen.
THINNED_BY = {"train": 3, "val": 3, "rate": 3}
TAKEN_BACK = ("train", "val", "rate")
"""Series of which a restart takes back the rows after its step, their third column."""


class ChartPoint(msgspec.Struct, frozen=True):
    """One row of a live chart: ``series`` is ``train``, ``val``, ``rate``, ``feed``, ``machine`` or ``device-0``, ...

    A row begins with the seconds of the run's own wall time. Shares are fractions, processors in cores, what is not
    known or not finite is None. :func:`six_digits` of each value are enough to draw.
    """

    series: str
    row: ChartRow


def points_of(
    event: Event, seconds: float, *, images: int, is_multi_label: bool, feed_before: FeedStats | None
) -> list[ChartPoint]:
    """Return what an event adds to the live charts.

    Args:
        seconds: of the run's own wall time.
        images: trained on until then.
        feed_before: the ``FeedStats`` before this one.
    """

    match event:
        case Logged():
            begins, overall = (seconds, event.epoch, event.step), images / seconds if seconds > 0 else None
            top1 = None if is_multi_label else _finite(event.top1)
            return [
                ChartPoint("train", (*begins, _finite(event.loss), top1)),
                ChartPoint("rate", (*begins, _finite(event.images_per_second), overall)),
            ]
        case Evaluated():
            interval = top1_95(event)
            low, high = (None, None) if event.mean_ap is not None else (interval.low, interval.high)
            values = map(_finite, (event.loss, event.score, low, high))
            return [ChartPoint("val", (seconds, event.epoch, event.step, *values))]
        case FeedStats():  # its figures are sums since the feed was made
            before = feed_before
            if before is not None and (before.attempt != event.attempt or before.asked > event.asked):
                before = None
            requests = event.asked - (before.asked if before else 0)
            if requests <= 0:
                return []
            ready = (event.ready * event.asked - (before.ready * before.asked if before else 0.0)) / requests
            starved = (event.starved - (before.starved if before else 0)) / requests
            return [ChartPoint("feed", (seconds, max(0.0, ready), event.depth, min(1.0, max(0.0, starved))))]
        case MachineStats():
            return [ChartPoint("machine", (seconds, *[read(event) for read in MACHINE.values()]))]
        case DeviceStats():
            return [ChartPoint(f"device-{event.index}", (seconds, *[read(event) for read in DEVICE.values()]))]
    return []


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def thin(values: Sequence[float | None], limit: int = MAX_POINTS) -> list[int]:
    """Choose which points of a long curve to draw: the extremes of each stretch, so that no spike is lost.

    Args:
        values: the y of each point; None is a gap.
        limit: points to keep at most.

    Returns:
        Rising indices, the first and the last point among them; all of them where there are few.

    >>> thin([0.0, 9.0, 1.0, 2.0, -5.0, 3.0, 4.0, 2.5], limit=6)
    [0, 1, 2, 4, 6, 7]
    """
    count = len(values)
    if count <= limit:
        return list(range(count))
    indices = {0, count - 1}
    stretches = max(1, (limit - 2) // 2)
    for k in range(stretches):
        stretch = range(1 + k * (count - 2) // stretches, 1 + (k + 1) * (count - 2) // stretches)
        known = [(value, i) for i in stretch if (value := values[i]) is not None]
        indices |= {min(known)[1], max(known)[1]} if known else {stretch[0]}
    return sorted(indices)


def thin_points(points: Sequence[ChartPoint]) -> list[ChartPoint]:
    """Keep half of :data:`MAX_POINTS` of each series that has nearly as many: the extremes of each stretch."""
    by_series = defaultdict[str, list[ChartPoint]](list)
    for point in points:
        by_series[point.series].append(point)
    dropped = set[int]()
    for series, rows in by_series.items():
        if len(rows) > 0.9 * MAX_POINTS:
            column = THINNED_BY.get(series, 1)
            kept = thin([point.row[column] for point in rows], MAX_POINTS // 2)
            dropped |= set(map(id, rows)) - {id(rows[i]) for i in kept}
    return [point for point in points if id(point) not in dropped]


def _share(part: float | None, total: float | None) -> float | None:
    return part / total if part is not None and total else None


def six_digits(value: float | None) -> float | None:
    """Round to six digits, more than a screen can show; what is not finite is a gap."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value if isinstance(value, int) else None
