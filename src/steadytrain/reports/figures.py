"""What came of a run, in figures."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from steadytrain.events import Evaluated, Started
from steadytrain.monitor import Ledger
from steadytrain.reports.epochs import stretches
from steadytrain.reports.history import History
from steadytrain.reports.liveness import Status, came_out

Z95 = 1.959963984540054  # the standard normal's 97.5 % quantile


@dataclass(frozen=True)
class Interval:
    """From ``low`` to ``high``, both fractions."""

    low: float
    high: float


def wilson(fraction: float, n: int) -> Interval:
    """The 95 % confidence interval of a share of ``n`` independent trials.

    Stays within 0 and 1, and is right also for small ``n`` and for shares near 0 or 1, where the textbook
    normal interval is not (E. B. Wilson, Probable inference, the law of succession, and statistical inference,
    J. Am. Stat. Assoc. 22, 1927, 209-212).

    Args:
        fraction: the share seen, from 0 to 1.
        n: number of trials; with none, nothing is known and the interval is everything.

    >>> wilson(0.9, 100)
    Interval(low=0.8256343384950865, high=0.9447708629393249)
    >>> wilson(1.0, 0)
    Interval(low=0.0, high=1.0)
    """
    if n <= 0 or not 0 <= fraction <= 1:
        return Interval(0.0, 1.0)
    spread = Z95**2 / n
    middle = (fraction + spread / 2) / (1 + spread)
    half = Z95 / (1 + spread) * math.sqrt(fraction * (1 - fraction) / n + spread / (4 * n))
    return Interval(max(0.0, middle - half), min(1.0, middle + half))


@dataclass(frozen=True, kw_only=True)
class Score:
    """One evaluation; ``top1_95``: the 95 % confidence interval of ``top1`` over the ``n`` images."""

    step: int
    epoch: float
    n: int
    loss: float
    top1: float
    top1_95: Interval
    top5: float
    seconds: float
    weights: str

    @staticmethod
    def of(event: Evaluated) -> Score:
        """The score that an event tells."""
        return Score(
            step=event.step,
            epoch=event.epoch,
            n=event.n,
            loss=event.loss,
            top1=event.top1,
            top1_95=wilson(event.top1, event.n),
            top5=event.top5,
            seconds=event.seconds,
            weights=event.weights,
        )


@dataclass(frozen=True, kw_only=True)
class Summary:
    """A run in figures. Durations in seconds, accuracies as fractions, None where nothing was told.

    ``status`` with ``why``: for ``interrupted`` and ``failed`` what is known of the reason.
    ``best``: the evaluation with the highest top-1 (the first of equals); ``last``: the newest.
    ``seconds_per_epoch``: of training steps alone.
    ``images_per_second``: the median of the log lines (the steady state).
    ``images_per_second_overall``: images of the updates that count, repeated ones once, over ``seconds``.
    ``seconds``: wall time of all attempts, pauses between them left out. ``restarts``: attempts after the first;
    ``repeated_steps``: updates done again after them. ``wait_share``: of the steps' seconds, spent waiting for images.
    ``not_finite``: log lines whose loss is no finite number. ``began``: seconds since 1970.
    """

    name: str
    directory: str
    digest: str
    model: str
    status: Status
    why: str
    steps_done: int
    steps: int
    epochs_done: float
    epochs: float
    best: Score | None
    last: Score | None
    train_loss: float | None
    train_top1: float | None
    seconds_per_epoch: float | None
    images_per_second: float | None
    images_per_second_overall: float | None
    wait_share: float | None
    seconds: float
    attempts: int
    restarts: int
    repeated_steps: int
    batch_size: int
    lr: float
    parameters: int | None
    num_train: int | None
    num_val: int | None
    num_classes: int | None
    checkpoints: int
    not_finite: int
    began: float
    notices: tuple[str, ...] = ()
    machine: Mapping[str, Any] = field(default_factory=dict)


def summary(told: History, spent: Ledger) -> Summary:
    """A run in figures, from what happened in it and where its time went."""
    started, recipe = told.started, told.run.recipe
    status, why = came_out(told)
    lines = list(stretches(told))
    step_seconds = sum(line.seconds for line in lines)
    best = max(told.evaluated, key=_rank, default=None)
    rates = [event.images_per_second for event in told.logged if math.isfinite(event.images_per_second)]
    return Summary(
        name=told.run.name,
        directory=str(told.run.directory),
        digest=started.digest,
        model=str(started.model.get("name") or recipe.model.name),
        status=status,
        why=why,
        steps_done=told.step,
        steps=started.steps,
        epochs_done=told.epoch(told.step),
        epochs=told.epoch(started.steps),
        best=Score.of(best) if best else None,
        last=Score.of(told.evaluated[-1]) if told.evaluated else None,
        train_loss=told.logged[-1].loss if told.logged else None,
        train_top1=told.logged[-1].top1 if told.logged else None,
        seconds_per_epoch=step_seconds / told.epoch(sum(line.steps for line in lines)) if step_seconds else None,
        images_per_second=median(rates) if rates else None,
        images_per_second_overall=spent.images_per_second if spent.wall_seconds > 0 else None,
        wait_share=sum(line.seconds * line.event.wait_share for line in lines) / step_seconds if step_seconds else None,
        seconds=spent.wall_seconds,
        attempts=len(told.attempts),
        restarts=len(told.attempts) - 1,
        repeated_steps=told.repeated_steps,
        batch_size=started.batch_size,
        lr=recipe.optim.scaled_lr(recipe.batch_size),
        **_sizes(started),
        checkpoints=len(told.saved),
        not_finite=sum(not math.isfinite(event.loss) for event in told.logged),
        began=told.attempts[0].started.time,
        notices=tuple(str(event.message) for event in told.noticed),
        machine=dict(started.machine),
    )


def _sizes(started: Started) -> dict[str, int | None]:
    classes = started.data.get("classes")
    return {
        "parameters": _whole(started.model.get("parameters")),
        "num_train": _whole(started.data.get("num_train")),
        "num_val": _whole(started.data.get("num_val")),
        "num_classes": len(classes) if isinstance(classes, list) else None,
    }


def _rank(event: Evaluated) -> float:
    return event.top1 if math.isfinite(event.top1) else -1.0


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) else None
