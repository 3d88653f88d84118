"""A row for each epoch, from log lines that know nothing of epochs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from steadytrain.events import Evaluated, Logged
from steadytrain.reports.history import History


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """One epoch: means over its training steps, the evaluation that ended it (if any), and the seconds of its steps."""

    epoch: int
    step: int
    train_loss: float | None = None
    train_top1: float | None = None
    val_loss: float | None = None
    val_top1: float | None = None
    val_top5: float | None = None
    n: int | None = None
    seconds: float | None = None
    images_per_second: float | None = None


def epochs(told: History) -> tuple[Epoch, ...]:
    """A row for each epoch that was begun, the last one perhaps in part.

    A log line counts towards the epochs that its steps lie in, by the number of those steps. An evaluation up to one
    step after an epoch's end belongs to that epoch.
    """
    length = told.started.steps_per_epoch
    if length <= 0 or not told.step:
        return ()
    evaluated = {_epoch_of(score.step, length): score for score in told.evaluated}
    means = _means(told, length)
    return tuple(
        Epoch(
            epoch=index,
            step=min(told.step, math.ceil(index * length)),
            **means.get(index, {}),
            **_evaluation(evaluated.get(index)),
        )
        for index in range(1, _epoch_of(told.step, length) + 1)
    )


@dataclass(frozen=True)
class Stretch:
    """A log line with the steps after ``first`` that it stands for, and the seconds that they took."""

    event: Logged
    first: int
    steps: int
    seconds: float


def stretches(told: History) -> Iterator[Stretch]:
    """The log lines as stretches of steps, oldest first; those without a rate left out."""
    # A step's own seconds are those of the host, which on a GPU only asks for the work; a log line has waited for it.
    first = 0
    for event in told.logged:
        steps, rate = event.step - first, event.images_per_second
        if steps > 0 and math.isfinite(rate) and rate > 0:
            yield Stretch(event, first, steps, steps * told.started.batch_size / rate)
        first = event.step


def _epoch_of(step: int, length: float) -> int:
    """The epoch, from 1, in which an update lies; the update that straddles two belongs to the first."""
    return max(1, math.ceil((step - 1) / length))


def _means(told: History, length: float) -> dict[int, dict[str, Any]]:
    """For each epoch: the means of its log lines, its seconds (all of its steps, if all were told of) and its rate."""
    sums: dict[int, list[float]] = {}
    for line in stretches(told):
        for index in range(_epoch_of(line.first + 1, length), _epoch_of(line.event.step, length) + 1):
            last, first = (
                min(line.event.step, math.ceil(index * length)),
                max(line.first, math.ceil((index - 1) * length)),
            )
            weight = last - first
            shares = (1.0, line.event.loss, line.event.top1, line.seconds / line.steps)
            if weight > 0:
                so_far = sums.setdefault(index, [0.0] * len(shares))
                sums[index] = [total + weight * share for total, share in zip(so_far, shares, strict=True)]
    return {
        index: {
            "train_loss": loss / steps,
            "train_top1": top1 / steps,
            "seconds": seconds,
            "images_per_second": steps * told.started.batch_size / seconds,
        }
        for index, (steps, loss, top1, seconds) in sums.items()
    }


def _evaluation(event: Evaluated | None) -> dict[str, Any]:
    if event is None:
        return {}
    return {"val_loss": event.loss, "val_top1": event.top1, "val_top5": event.top5, "n": event.n}
