"""Curves of runs as plain data, for the page's script to draw; long ones are thinned. Needs no plotting library."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from steadytrain.events import Evaluated, Logged
from steadytrain.reports.figures import wilson
from steadytrain.reports.history import History

MAX_POINTS = 4000
# Told apart by people with any colour vision, and at least 3:1 against both a white and a near-black page.
COLOURS = ("#3d7dd6", "#d4691e", "#2f9169", "#b5559b", "#8a77d8", "#94800f", "#2f93a8", "#cf5454")
DASHES = ("solid", "dash", "dot", "dashdot")

Trace = dict[str, Any]


def charts(told: Sequence[History]) -> list[dict[str, Any]]:
    """The page's figures, those left out for which nothing was logged.

    Each: ``id``, ``title``, ``format`` (of y, in d3's language), ``zero`` (the y axis starts there), ``traces``.
    A trace: ``run`` (index), ``role`` (``train`` or ``val`` for what is logged in training and evaluated, ``only``
    where there is one line a run), ``epoch`` and ``seconds`` (either may be x), ``step``, ``y`` (None where it is not
    finite), and for accuracies of an evaluation ``low`` and ``high``, its 95 % confidence interval.
    """
    made = (
        ("top1", "Top-1 accuracy", ".2%", [t for i, h in enumerate(told) for t in _accuracies(i, h)]),
        ("loss", "Loss", ".4f", [t for i, h in enumerate(told) for t in _losses(i, h)]),
        ("lr", "Learning rate", ".4~g", [_logged(i, h, "only", lambda e: e.lr) for i, h in enumerate(told)]),
        ("rate", "Images per second", ",.4~r", [_logged(i, h, "only", _rate) for i, h in enumerate(told)]),
        (
            "wait",
            "Waiting for images",
            ".1%",
            [_logged(i, h, "only", lambda e: e.wait_share) for i, h in enumerate(told)],
        ),
    )
    return [
        {"id": name, "title": title, "format": form, "zero": name not in ("top1", "loss"), "traces": traces}
        for name, title, form, traces in made
        if any(trace["y"] for trace in traces)
    ]


def style(index: int) -> dict[str, str]:
    """The colour and the dash by which the run of that index is known everywhere on a page."""
    return {"colour": COLOURS[index % len(COLOURS)], "dash": DASHES[index // len(COLOURS) % len(DASHES)]}


def thin(values: Sequence[float | None], limit: int = MAX_POINTS) -> list[int]:
    """Which points of a long curve to draw: the least and the greatest of each stretch, so that no spike is lost.

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
    kept = {0, count - 1}
    stretches = max(1, (limit - 2) // 2)
    for k in range(stretches):
        stretch = range(1 + k * (count - 2) // stretches, 1 + (k + 1) * (count - 2) // stretches)
        known = [(value, i) for i in stretch if (value := values[i]) is not None]
        kept |= {min(known)[1], max(known)[1]} if known else {stretch[0]}
    return sorted(kept)


def _accuracies(index: int, told: History) -> list[Trace]:
    intervals = [wilson(event.top1, event.n) for event in told.evaluated]
    scores = _trace(index, told, "val", told.evaluated, [event.top1 for event in told.evaluated])
    scores["low"] = [_short(interval.low) for interval in intervals]
    scores["high"] = [_short(interval.high) for interval in intervals]
    return [_logged(index, told, "train", lambda event: event.top1), scores]


def _losses(index: int, told: History) -> list[Trace]:
    scores = _trace(index, told, "val", told.evaluated, [event.loss for event in told.evaluated])
    return [_logged(index, told, "train", lambda event: event.loss), scores]


def _rate(event: Logged) -> float:
    return event.images_per_second


def _logged(index: int, told: History, role: str, value: Callable[[Logged], float]) -> Trace:
    values = [value(event) for event in told.logged]
    kept = thin([_short(one) for one in values])
    return _trace(index, told, role, [told.logged[i] for i in kept], [values[i] for i in kept])


def _trace(
    index: int, told: History, role: str, events: Sequence[Logged | Evaluated], values: Sequence[float]
) -> Trace:
    return {
        "run": index,
        "role": role,
        "epoch": [round(event.epoch, 4) for event in events],
        "seconds": [round(told.elapsed(event), 2) for event in events],
        "step": [event.step for event in events],
        "y": [_short(value) for value in values],
    }


def _short(value: float) -> float | None:
    """Six digits are more than a screen can show; what is not finite is a gap."""
    return float(f"{value:.6g}") if math.isfinite(value) else None
