"""The learning rate of each update, as a share of its peak: pure functions of the update's number, in any order.

Updates count from 0. No update is spent at rate 0: the warm-up begins one update above it, and the falling laws
begin at the peak and would reach ``final`` at the update after the last. MXNet's schedulers see ``num_update = k + 1``
at update k; the warm-up and the drops of ``step`` are theirs at the same update, ``cosine`` and ``poly`` theirs at
``num_update = k``. Not taken over: that they remember the largest number they were ever asked for, so that a run
resumed past its end trains at full rate.

>>> from steadytrain.config import Optim
>>> rate = schedule(Optim(schedule="cosine", warmup_epochs=0.5), steps=10, steps_per_epoch=4)
>>> [round(rate(k), 3) for k in range(10)]
[0.5, 1.0, 1.0, 0.962, 0.854, 0.691, 0.5, 0.309, 0.146, 0.038]
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable

from steadytrain.config import Optim

Schedule = Callable[[int], float]
"""From an update's number, 0 or more, to the share of the peak rate."""


def schedule(spec: Optim, *, steps: int, steps_per_epoch: float) -> Schedule:
    """The recipe's schedule: ``warmup_epochs`` of a linear rise, then its law over the updates that are left.

    Args:
        spec: ``schedule``, ``warmup_epochs`` and the law's own constants. Milestones count from the run's start.
        steps: updates in the whole run; later numbers get the last value.
        steps_per_epoch: updates in one epoch, a fraction where the batches do not divide the data.
    """
    warmup = spec.warmup_epochs * steps_per_epoch
    law = LAWS[spec.schedule](spec, warmup, steps, steps_per_epoch)
    return lambda step: (step + 1) / warmup if step + 1 < warmup else law(step)


def constant(spec: Optim, warmup: float, steps: int, steps_per_epoch: float) -> Schedule:
    """Always the peak."""
    return lambda step: 1.0


def step(spec: Optim, warmup: float, steps: int, steps_per_epoch: float) -> Schedule:
    """Multiplied by ``factor`` once ``milestones`` epochs are done; the warm-up does not shift them."""
    drops = [epoch * steps_per_epoch for epoch in spec.milestones]
    return lambda step: float(spec.factor ** bisect_right(drops, step))


def cosine(spec: Optim, warmup: float, steps: int, steps_per_epoch: float) -> Schedule:
    """Half a cosine from the peak to ``final`` (Loshchilov & Hutter 2017, SGDR, without restarts)."""
    fall = _fall(warmup, steps)
    return lambda step: spec.final + (1 - spec.final) * (1 + math.cos(math.pi * fall(step))) / 2


def poly(spec: Optim, warmup: float, steps: int, steps_per_epoch: float) -> Schedule:
    """``(1 - t) ** power`` from the peak to ``final``."""
    fall = _fall(warmup, steps)
    return lambda step: spec.final + (1 - spec.final) * (1 - fall(step)) ** spec.power


LAWS: dict[str, Callable[[Optim, float, int, float], Schedule]] = {
    "constant": constant,
    "cosine": cosine,
    "poly": poly,
    "step": step,
}


def _fall(warmup: float, steps: int) -> Schedule:
    """Share of the way from the end of the warm-up to the end of the run, 0 to 1."""
    length = max(steps - warmup, 1.0)
    return lambda step: min(max(step - warmup, 0.0) / length, 1.0)
