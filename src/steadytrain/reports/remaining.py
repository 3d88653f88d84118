"""How long a run will still take: from its recent pace, with the evaluations and checkpoints to come."""

from __future__ import annotations

import math
from collections.abc import Sequence

from steadytrain.config import Every
from steadytrain.events import Logged
from steadytrain.reports.history import History

RECENT_SECONDS = 120.0
FORWARD_SHARE = 1 / 3  # of an update's work: a forward pass is half as much as the backward one


def remaining(told: History) -> float | None:
    """Seconds from the last sign of the run to its end; None where its pace is not known yet.

    Updates at the pace of the last two minutes, each evaluation and checkpoint at their mean so far. An evaluation
    that was never made is taken for as many forward passes as it has images.
    """
    pace = seconds_per_step(told)
    if pace is None:
        return None
    left = max(0, told.started.steps - told.step)
    return left * pace + _evaluations(told, pace) + _checkpoints(told, left, pace)


def seconds_per_step(told: History) -> float | None:
    """Seconds of an update lately, its wait for images included; None before the first log line."""
    if not told.logged:
        return None
    since = told.logged[-1].time - RECENT_SECONDS
    return _mean_pace([event for event in told.logged[-500:] if event.time >= since], told.started.batch_size)


def _mean_pace(lines: Sequence[Logged], batch_size: int) -> float | None:
    rates = [one.images_per_second for one in lines if math.isfinite(one.images_per_second)]
    steady = [batch_size / rate for rate in rates if rate > 0]
    # The first log line of an attempt holds its warm-up: it counts only while there is no other.
    steady = steady[1:] if len(steady) == len(lines) > 1 else steady
    return sum(steady) / len(steady) if steady else None


def _evaluations(told: History, pace: float) -> float:
    num_val = told.started.data.get("num_val")
    if not isinstance(num_val, int) or not num_val or told.started.steps_per_epoch <= 0:
        return 0.0
    made = told.evaluated
    each = sum(event.seconds for event in made) / len(made) if made else _guess(told, num_val, pace)
    last, epochs = made[-1].epoch if made else 0.0, told.epoch(told.started.steps)
    return each * evaluations_left(told.run.recipe.every, last, epochs, one_step=1 / told.started.steps_per_epoch)


def evaluations_left(every: Every, last: float, epochs: float, *, one_step: float = 0.0) -> int:
    """How many follow after the one at epoch ``last`` in a run of ``epochs``: one a period, and one at the end.

    ``one_step``: epochs of an update; the last one may reach as far beyond a period.

    >>> evaluations_left(Every(evaluate_epochs=1.0), 0.0, 3.001, one_step=0.003)
    3
    >>> evaluations_left(Every(evaluate_epochs=2.0), 2.0, 5.0)
    2
    """
    if last >= epochs - 1e-9:
        return 0
    periods = math.floor(epochs / every.evaluate_epochs + 1e-9)
    at_end = epochs - periods * every.evaluate_epochs > one_step + 1e-9
    return max(0, periods - math.floor(last / every.evaluate_epochs + 1e-9)) + at_end


def _guess(told: History, num_val: int, pace: float) -> float:
    return num_val / max(1, told.started.batch_size) * pace * FORWARD_SHARE


def _checkpoints(told: History, left: int, pace: float) -> float:
    every, made = told.run.recipe.every, told.saved
    if not made or not left:
        return 0.0
    by_steps = left / every.save_steps if every.save_steps else 0.0
    by_time = left * pace / (60 * every.save_minutes)
    return max(1.0, by_steps, by_time) * sum(event.seconds for event in made) / len(made)
