"""Curves of runs as plain data, for the pages' scripts to draw; long ones are thinned."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from steadytrain.events import EpochTrained, Evaluated, Logged, Step, top1_95
from steadytrain.monitor import RunHistory
from steadytrain.monitor.history import MAX_RECENT
from steadytrain.monitor.series import six_digits, thin

TEMPLATES = Path(__file__).parent / "templates"
# Distinct for people with any colour vision, and at least 3:1 against both a white and a near-black page.
COLOURS = ("#3d7dd6", "#d4691e", "#2f9169", "#b5559b", "#8a77d8", "#94800f", "#2f93a8", "#cf5454")
MAX_CURVES = 16  # curves of the best runs, over each other at first
DASHES = ("solid", "dash", "dot", "dashdot")
LAYOUTS = {"channels-last": "NHWC", "channels-first": "NCHW"}
"""Short names of images' layouts in memory."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A curve of a live chart.

    Args:
        column: of the series.
        label: what it is, in the chart's key; before its values where a chart has several curves.
        colour: of ``live.css``.
        look: ``area``: filled to the axis; ``limit``: a dashed line.
    """

    column: str
    label: str = ""
    colour: str = "a"
    look: Literal["line", "area", "limit"] = "line"


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
            Curve(column="pressure_cpu", label="processors"),
            Curve(column="pressure_memory", label="memory", colour="b"),
            Curve(column="pressure_io", label="disks", colour="c"),
        ),
        hover=".1%",
        ticks=".0%",
    ),
    LiveChart(
        id="memory",
        series="machine",
        title="Memory of the run",
        description="Memory of the run",
        curves=(Curve(column="memory", look="area"),),
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
            Curve(column="memory", label="memory", colour="d"),
            Curve(column="power", label="power", colour="e"),
        ),
        hover=".0%",
        ticks=".0%",
        range=(0, 1.04),
    ),
)
"""The charts of the live page beside loss, accuracy and ledger; each GPU has one of the last. A further column of
:data:`~steadytrain.monitor.series.COLUMNS` is drawn by a further :class:`Curve`."""


Trace = dict[str, Any]
Drawn = Step | Logged | EpochTrained | Evaluated
E = TypeVar("E", bound=Drawn)


def style(index: int) -> dict[str, str]:
    """Return the colour and the dash by which the run of that index is known everywhere on a page."""
    return {"colour": COLOURS[index % len(COLOURS)], "dash": DASHES[index // len(COLOURS) % len(DASHES)]}


def has_line(figure: Mapping[str, Any]) -> bool:
    """Return whether a figure of :func:`charts` has two points to join; that of a probe has one."""
    return any(len(trace["y"]) > 1 for trace in figure["traces"])


def charts(histories: Sequence[RunHistory]) -> list[dict[str, Any]]:
    """Return a report's figures, without those for which nothing was logged.

    Each: ``id``, ``title``, ``format`` (of y, in d3's language), ``zero`` (the y axis starts there), ``traces``.
    A trace: ``run`` (index), ``role`` (``train`` or ``val`` for what is logged in training and evaluated, ``only``
    where there is one line a run), ``epoch`` and ``seconds`` (either may be x), ``step``, ``y`` (None where it is not
    finite), and for accuracies of an evaluation ``low`` and ``high``, its 95 % confidence interval.
    """

    def curve(role: str, events: Callable[[RunHistory], Sequence[E]], value: Callable[[E], float]) -> list[Trace]:
        traces = []
        for run, history in enumerate(histories):
            shown = events(history)
            values = [six_digits(value(event)) for event in shown]
            indices = thin(values)
            traces.append(_trace(run, role, history, [shown[i] for i in indices], [values[i] for i in indices]))
        return traces

    def logged(value: Callable[[Logged], float]) -> list[Trace]:
        return curve("only", lambda history: history.logged, value)

    def trained(
        value: Callable[[Logged | EpochTrained], float], *, of: Sequence[RunHistory] = histories
    ) -> list[Trace]:
        return curve("train", lambda history: _most_means(history) if history in of else [], value)

    def evaluated(value: Callable[[Evaluated], float]) -> list[Trace]:
        return curve("val", lambda history: history.evaluated, value)

    top1 = [score_trace(history, run) for run, history in enumerate(histories)]
    single = [history for history in histories if not history.is_multi_label]  # nothing of a training has an mAP
    names = (["Top-1 accuracy"] if single else []) + (["mAP"] if len(single) < len(histories) else [])
    accuracies = _alternate(trained(lambda means: means.top1, of=single), top1)
    losses = _alternate(trained(lambda means: means.loss), evaluated(lambda event: event.loss))
    figures = (
        ("top1", " and ".join(names), ".1%", False, accuracies),
        ("loss", "Loss", ".4f", False, losses),
        ("lr", "Learning rate", ".4~g", True, curve("only", _rates, lambda event: event.lr)),
        ("rate", "Images per second", ",.4~r", True, logged(lambda line: line.images_per_second)),
        ("wait", "Waiting for images", ".1%", True, logged(lambda line: line.wait_share)),
    )
    return [
        {"id": name, "title": title, "format": form, "zero": zero, "traces": traces}
        for name, title, form, zero, traces in figures
        if any(y is not None for trace in traces for y in trace["y"])
    ]


def _trace(run: int, role: str, history: RunHistory, events: Sequence[Drawn], values: Sequence[float | None]) -> Trace:
    return {
        "run": run,
        "role": role,
        "epoch": [round(history.epoch(event.step), 4) for event in events],
        "seconds": [round(history.elapsed(event.time), 2) for event in events],
        "step": [event.step for event in events],
        "y": list(values),
    }


def score_trace(history: RunHistory, run: int = 0) -> Trace:
    """Return the curve of a run's evaluations, with the intervals of its accuracies where these are known."""
    values = [six_digits(event.score) for event in history.evaluated]
    drawn = [history.evaluated[i] for i in thin(values)]
    trace = _trace(run, "val", history, drawn, [values[i] for i in thin(values)])
    if history.is_multi_label or not any(event.n for event in history.evaluated):  # a log may not say of how many
        return trace
    intervals = [top1_95(event) for event in drawn]
    return trace | {end: [six_digits(getattr(interval, end)) for interval in intervals] for end in ("low", "high")}


def score_chart(curves: Sequence[Trace | None]) -> list[dict[str, Any]]:
    """Return the figure of runs' evaluations, each a :func:`score_trace`; none where there is nothing to join."""
    traces = [{**curve, "run": run} for run, curve in enumerate(curves) if curve is not None]
    figure = {"id": "top1", "title": "Validation accuracy", "format": ".1%", "zero": False, "traces": traces}
    return [figure] if has_line(figure) else []


def coverage_chart(curves: Sequence[tuple[Sequence[float], Sequence[float]]]) -> dict[str, Any]:
    """Return the figure of accuracy over coverage, with its own x, of each run's shares of images and of right ones."""
    empty: Trace = {"role": "val", "epoch": [], "seconds": [], "step": []}
    traces = [{**empty, "run": run, "x": list(x), "y": list(y)} for run, (x, y) in enumerate(curves) if len(x) > 1]
    figure = {"id": "coverage", "title": "Accuracy over coverage", "format": ".1%", "zero": False, "traces": traces}
    return {**figure, "x": "share of images, the surest predictions first"}


def _most_means(history: RunHistory) -> Sequence[Logged | EpochTrained]:
    """Return the training means to draw: of the log lines or, where there are more of them, of the epochs."""
    epochs = list(history.trained.values())
    return epochs if len(epochs) > len(history.logged) else history.logged


def _rates(history: RunHistory) -> Sequence[Step | Logged]:
    """Return the updates of a short run, the log lines of another, for the learning rate."""
    has_all = len(history.attempts) == 1 and 0 < len(history.recent) < MAX_RECENT
    return list(history.recent) if has_all or not history.logged else history.logged


def _alternate(first: Sequence[Trace], second: Sequence[Trace]) -> list[Trace]:
    return [trace for pair in zip(first, second, strict=True) for trace in pair]
