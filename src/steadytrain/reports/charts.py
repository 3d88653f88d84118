"""Curves of runs as plain data, for the pages' scripts to draw; long ones are thinned."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from steadytrain.events import DeviceStats, EpochTrained, Evaluated, Event, FeedStats, Logged, MachineStats, Step
from steadytrain.intervals import wilson
from steadytrain.monitor import RunHistory

TEMPLATES = Path(__file__).parent / "templates"
MAX_POINTS = 4000
# Distinct for people with any colour vision, and at least 3:1 against both a white and a near-black page.
COLOURS = ("#3d7dd6", "#d4691e", "#2f9169", "#b5559b", "#8a77d8", "#94800f", "#2f93a8", "#cf5454")
DASHES = ("solid", "dash", "dot", "dashdot")
LAYOUTS = {"channels-last": "NHWC", "channels-first": "NCHW"}
"""Of images in memory, in short."""

ChartRow = tuple[float | None, ...]


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A curve of a live chart.

    Args:
        column: of the series.
        label: what it is, in the chart's key; before its values where a chart has several curves.
        colour: of ``live.css``.
        look: ``area``: filled to the axis; ``limit``: a dashed line.
        value: reads it off an event, where it is not computed in :func:`points`; None: the field of that name.
    """

    column: str
    label: str = ""
    colour: str = "a"
    look: Literal["line", "area", "limit"] = "line"
    value: Callable[[Any], float | None] | None = None

    def of(self, event: Event) -> float | None:
        """Return the value that an event has for it."""
        value: float | None = self.value(event) if self.value else getattr(event, self.column)
        return value


@dataclass(frozen=True, kw_only=True)
class LiveChart:
    """A chart of the live page.

    Args:
        id: of its element.
        series: whose columns it shows.
        title: above it.
        description: for those who cannot see it.
        curves: in the order of the key.
        hover: format of a value beside the pointer, in d3's language; ``unit`` stands behind it.
        ticks: format of the y axis; ``suffix`` stands behind it.
        range: of the y axis; None: from 0 to the largest value.
        stacked: whether curves stand upon each other; those that stay at 0 are then left out.
        now: whether the newest value stands beside the title.
    """

    id: str
    series: str
    title: str
    description: str
    curves: tuple[Curve, ...]
    hover: str = ".4~r"
    unit: str = ""
    ticks: str = ""
    suffix: str = ""
    range: tuple[float, float] | None = None
    stacked: bool = False
    now: bool = False


def _pressure(of: str) -> Callable[[MachineStats], float | None]:
    return lambda event: event.pressure.get(of)


LIVE_CHARTS = (
    LiveChart(
        id="rate",
        series="rate",
        title="Images per second",
        description="Images per second, of each log line and overall",
        curves=(Curve(column="steady", label="log line"), Curve(column="overall", label="overall", colour="grey")),
    ),
    LiveChart(
        id="feed",
        series="feed",
        title="Batches ready",
        description="Batches that were ready at each request",
        curves=(
            Curve(column="ready", label="ready", look="area"),
            Curve(column="depth", label="limit", colour="grey", look="limit"),
        ),
        hover=".1f",
        now=True,
    ),
    LiveChart(
        id="starved",
        series="feed",
        title="Batches not ready in time",
        description="Share of the batch requests that had to wait",
        curves=(Curve(column="starved", colour="b", look="area"),),
        hover=".0%",
        ticks=".0%",
        range=(0, 1.04),
        now=True,
    ),
    LiveChart(
        id="cores",
        series="machine",
        title="Processors",
        description="Processors used by this run, by others, waiting for disks and idle",
        curves=(
            Curve(column="cpu", label="this run", colour="cpu"),
            Curve(column="ranks", label="other ranks", colour="ranks"),
            Curve(column="others", label="others", colour="others"),
            Curve(column="iowait", label="disk wait", colour="iowait"),
            Curve(column="steal", label="stolen", colour="steal"),
            Curve(column="idle", label="idle", colour="idle"),
        ),
        hover=".2f",
        unit="cores",
        stacked=True,
        now=True,
    ),
    LiveChart(
        id="pressure",
        series="machine",
        title="Pressure",
        description="Share of the time in which processes waited for processors, memory or disks",
        curves=(
            Curve(column="pressure_cpu", label="processors", value=_pressure("cpu")),
            Curve(column="pressure_memory", label="memory", colour="b", value=_pressure("memory")),
            Curve(column="pressure_io", label="disks", colour="c", value=_pressure("io")),
        ),
        hover=".1%",
        ticks=".0%",
    ),
    LiveChart(
        id="memory",
        series="machine",
        title="Memory of the run",
        description="Memory of the run",
        curves=(Curve(column="memory", look="area", value=lambda event: event.memory_bytes),),
        hover=".3s",
        ticks=".2s",
        suffix="B",
        now=True,
    ),
    LiveChart(
        id="device",
        series="device",
        title="GPU",
        description="What a GPU did",
        curves=(
            Curve(column="utilisation", label="busy"),
            Curve(column="sm_active", label="multiprocessors", colour="c"),
            Curve(column="tensor_active", label="tensor cores", colour="b"),
            Curve(
                column="memory",
                label="memory",
                colour="d",
                value=lambda event: _share(event.memory_bytes, event.memory_total_bytes),
            ),
            Curve(
                column="power",
                label="power",
                colour="e",
                value=lambda event: _share(event.power_watts, event.power_limit_watts),
            ),
        ),
        hover=".0%",
        ticks=".0%",
        range=(0, 1.04),
    ),
)
"""The charts of the live page beside loss, accuracy and ledger; each GPU has one of the last. A row of a series of
machines or GPUs has the curves' columns: a further field is drawn by a further :class:`Curve`."""


def _curves(series: str) -> list[Curve]:
    return [curve for chart in LIVE_CHARTS if chart.series == series for curve in chart.curves]


COLUMNS = {
    "train": ("seconds", "epoch", "step", "loss", "top1"),
    "val": ("seconds", "epoch", "step", "loss", "top1", "low", "high"),
    "rate": ("seconds", "epoch", "step", "steady", "overall"),
    "feed": ("seconds", "ready", "depth", "starved"),
    **{series: ("seconds", *(curve.column for curve in _curves(series))) for series in ("machine", "device")},
}
"""What the rows of the live charts hold, by series."""
# The column by which a series is thinned is the one whose spikes are to be seen.
THINNED_BY = {"train": 3, "val": 3, "rate": 3}

Trace = dict[str, Any]
Drawn = Step | Logged | EpochTrained | Evaluated
E = TypeVar("E", bound=Drawn)


def style(index: int) -> dict[str, str]:
    """Return the colour and the dash by which the run of that index is known everywhere on a page."""
    return {"colour": COLOURS[index % len(COLOURS)], "dash": DASHES[index // len(COLOURS) % len(DASHES)]}


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


def charts(histories: Sequence[RunHistory]) -> list[dict[str, Any]]:
    """Return a report's figures, without those for which nothing was logged.

    Each: ``id``, ``title``, ``format`` (of y, in d3's language), ``zero`` (the y axis starts there), ``traces``.
    A trace: ``run`` (index), ``role`` (``train`` or ``val`` for what is logged in training and evaluated, ``only``
    where there is one line a run), ``epoch`` and ``seconds`` (either may be x), ``step``, ``y`` (None where it is not
    finite), and for accuracies of an evaluation ``low`` and ``high``, its 95 % confidence interval.
    """

    def trace(run: int, role: str, events: Sequence[Drawn], values: Sequence[float]) -> Trace:
        return {
            "run": run,
            "role": role,
            "epoch": [round(histories[run].epoch(event.step), 4) for event in events],
            "seconds": [round(histories[run].elapsed(event.time), 2) for event in events],
            "step": [event.step for event in events],
            "y": [_six_digits(value) for value in values],
        }

    def curve(role: str, events: Callable[[RunHistory], Sequence[E]], value: Callable[[E], float]) -> list[Trace]:
        traces = []
        for run, history in enumerate(histories):
            shown = events(history)
            values = [value(event) for event in shown]
            indices = thin([_six_digits(y) for y in values])
            traces.append(trace(run, role, [shown[i] for i in indices], [values[i] for i in indices]))
        return traces

    def logged(value: Callable[[Logged], float]) -> list[Trace]:
        return curve("only", lambda history: history.logged, value)

    def trained(
        value: Callable[[Logged | EpochTrained], float], *, of: Sequence[RunHistory] = histories
    ) -> list[Trace]:
        return curve("train", lambda history: _most_means(history) if history in of else [], value)

    def evaluated(value: Callable[[Evaluated], float]) -> list[Trace]:
        scores = [history.evaluated for history in histories]
        return [trace(run, "val", events, [value(event) for event in events]) for run, events in enumerate(scores)]

    top1 = evaluated(lambda event: event.score)
    single = [history for history in histories if not history.is_multi_label]  # nothing of a training has an mAP
    names = (["Top-1 accuracy"] if single else []) + (["mAP"] if len(single) < len(histories) else [])
    for scores, history in zip(top1, histories, strict=True):
        if history.is_multi_label:
            continue
        if not any(event.n for event in history.evaluated):  # a log that does not say of how many images
            continue
        intervals = [wilson(event.top1, event.n) for event in history.evaluated]
        scores["low"] = [_six_digits(interval.low) for interval in intervals]
        scores["high"] = [_six_digits(interval.high) for interval in intervals]
    figures = (
        (
            "top1",
            " and ".join(names),
            ".2%",
            False,
            _alternate(trained(lambda means: means.top1, of=single), top1),
        ),
        (
            "loss",
            "Loss",
            ".4f",
            False,
            _alternate(trained(lambda means: means.loss), evaluated(lambda event: event.loss)),
        ),
        ("lr", "Learning rate", ".4~g", True, curve("only", lambda history: history.rates, lambda event: event.lr)),
        ("rate", "Images per second", ",.4~r", True, logged(lambda line: line.images_per_second)),
        ("wait", "Waiting for images", ".1%", True, logged(lambda line: line.wait_share)),
    )
    return [
        {"id": name, "title": title, "format": form, "zero": zero, "traces": traces}
        for name, title, form, zero, traces in figures
        if any(y is not None for trace in traces for y in trace["y"])
    ]


def _most_means(history: RunHistory) -> Sequence[Logged | EpochTrained]:
    """Return the training means to draw: of the log lines or, where there are more of them, of the epochs."""
    epochs = list(history.trained.values())
    return epochs if len(epochs) > len(history.logged) else history.logged


def _alternate(first: Sequence[Trace], second: Sequence[Trace]) -> list[Trace]:
    return [trace for pair in zip(first, second, strict=True) for trace in pair]


@dataclass(frozen=True)
class ChartPoint:
    """One row of a live chart: ``series`` is ``train``, ``val``, ``rate``, ``feed``, ``machine`` or ``device-0``, ...

    A row begins with the seconds of the run's own wall time. Shares are fractions, processors in cores, what is not
    known or not finite is None.
    """

    series: str
    row: ChartRow


def points(event: Event, history: RunHistory, feed_before: FeedStats | None) -> list[ChartPoint]:
    """Return what an event adds to the live charts.

    Args:
        event: newest in the history.
        history: of the run.
        feed_before: the ``FeedStats`` before this one.
    """
    seconds = history.elapsed(event.time)

    def point(series: str, *values: float | None) -> ChartPoint:
        return ChartPoint(series, (round(seconds, 3), *(_six_digits(value) for value in values)))

    match event:
        case Logged():
            overall = history.images / seconds if seconds > 0 else None
            return [
                point("train", event.epoch, event.step, event.loss, None if history.is_multi_label else event.top1),
                point("rate", event.epoch, event.step, event.images_per_second, overall),
            ]
        case Evaluated():
            interval = wilson(event.top1, event.n)
            low, high = (None, None) if event.mean_ap is not None else (interval.low, interval.high)
            return [point("val", event.epoch, event.step, event.loss, event.score, low, high)]
        case FeedStats():  # its figures are sums since the feed was made
            before = feed_before
            if before is not None and (before.attempt != event.attempt or before.asked > event.asked):
                before = None
            requests = event.asked - (before.asked if before else 0)
            if requests <= 0:
                return []
            ready = (event.ready * event.asked - (before.ready * before.asked if before else 0.0)) / requests
            starved = (event.starved - (before.starved if before else 0)) / requests
            return [point("feed", max(0.0, ready), event.depth, min(1.0, max(0.0, starved)))]
        case MachineStats():
            return [point("machine", *(curve.of(event) for curve in _curves("machine")))]
        case DeviceStats():
            return [point(f"device-{event.index}", *(curve.of(event) for curve in _curves("device")))]
    return []


def thin_rows(series: str, rows: Sequence[ChartRow]) -> list[ChartRow]:
    """Return at most :data:`MAX_POINTS` rows: of each stretch those least and greatest in its :data:`THINNED_BY`."""
    column = THINNED_BY.get(series, 1)
    return [rows[i] for i in thin([row[column] for row in rows], MAX_POINTS)] if len(rows) > MAX_POINTS else list(rows)


def _share(part: float | None, total: float | None) -> float | None:
    return part / total if part is not None and total else None


def _six_digits(value: float | None) -> float | None:
    """Round to six digits, more than a screen can show; what is not finite is a gap."""
    if not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value if isinstance(value, int) else float(f"{value:.6g}")
