"""What single events add to the charts of a run that is watched: rows of numbers, a function of event and time alone.

A row begins with the seconds of the run's own wall time. Shares are fractions, processors in cores, what is not known
or not finite is None.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from steadytrain.events import DeviceStats, Evaluated, FeedStats, Logged, MachineStats
from steadytrain.reports.curves import MAX_POINTS, thin
from steadytrain.reports.figures import wilson

Row = tuple[float | None, ...]

TRAIN = ("seconds", "epoch", "step", "loss", "top1")
VAL = ("seconds", "epoch", "step", "loss", "top1", "low", "high")
RATE = ("seconds", "epoch", "step", "steady", "overall")
FEED = ("seconds", "ready", "depth", "starved")
CORES = ("cpu", "ranks", "others", "iowait", "steal", "idle", "cores")
MACHINE = ("seconds", *CORES, "pressure_cpu", "pressure_memory", "pressure_io", "memory")
DEVICE = ("seconds", "utilisation", "sm_active", "tensor_active", "memory", "power")


@dataclass(frozen=True)
class Point:
    """One row of a chart: ``series`` is ``train``, ``val``, ``rate``, ``feed``, ``machine`` or ``device-0``, ..."""

    series: str
    row: Row


def trained(event: Logged, seconds: float) -> Point:
    """A log line, as ``TRAIN`` names its columns."""
    return Point("train", _row(seconds, event.epoch, event.step, event.loss, event.top1))


def evaluated(event: Evaluated, seconds: float) -> Point:
    """An evaluation with the 95 % confidence interval of its accuracy, as ``VAL`` names its columns."""
    within = wilson(event.top1, event.n)
    return Point("val", _row(seconds, event.epoch, event.step, event.loss, event.top1, within.low, within.high))


def rated(event: Logged, seconds: float, images: int) -> Point:
    """Images per second at a log line: of its steps, and of all ``images`` over all ``seconds`` so far."""
    overall = images / seconds if seconds > 0 else None
    return Point("rate", _row(seconds, event.epoch, event.step, event.images_per_second, overall))


def fed(event: FeedStats, before: FeedStats | None, seconds: float) -> Point | None:
    """What the feed did since ``before``: its figures are sums since it was made. None where no batch was asked for."""
    since = before if before is not None and _goes_on(before, event) else None
    asked = event.asked - (since.asked if since else 0)
    if asked <= 0:
        return None
    ready = (event.ready * event.asked - (since.ready * since.asked if since else 0.0)) / asked
    starved = (event.starved - (since.starved if since else 0)) / asked
    return Point("feed", _row(seconds, max(0.0, ready), event.depth, min(1.0, max(0.0, starved))))


def machine(event: MachineStats, seconds: float) -> Point:
    """Who used the processors, in cores, and what waited for what, as ``MACHINE`` names its columns."""
    cores = [getattr(event, name) for name in CORES]
    pressure = [event.pressure.get(name) for name in ("cpu", "memory", "io")]
    return Point("machine", _row(seconds, *cores, *pressure, event.memory_bytes))


def device(event: DeviceStats, seconds: float) -> Point:
    """What a GPU did: shares of its time, of its memory and of the power that it may draw."""
    memory = _share(event.memory_bytes, event.memory_total_bytes)
    power = _share(event.power_watts, event.power_limit_watts)
    return Point(
        f"device-{event.index}",
        _row(seconds, event.utilisation, event.sm_active, event.tensor_active, memory, power),
    )


def thinned(rows: Sequence[Row], column: int, limit: int = MAX_POINTS) -> list[Row]:
    """At most ``limit`` rows: of each stretch those in which ``column`` is least and greatest."""
    if len(rows) <= limit:
        return list(rows)
    return [rows[i] for i in thin([row[column] for row in rows], limit)]


def _goes_on(before: FeedStats, event: FeedStats) -> bool:
    return before.attempt == event.attempt and before.asked <= event.asked


def _share(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None


def _row(*values: float | None) -> Row:
    """Six digits are more than a screen can show; a second has three decimals for as long as that is."""
    seconds, *rest = values
    return (round(seconds or 0.0, 3), *(_short(value) for value in rest))


def _short(value: float | None) -> float | None:
    if not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value if isinstance(value, int) else float(f"{value:.6g}")
