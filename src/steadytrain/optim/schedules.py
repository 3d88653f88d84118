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
    """Make the recipe's schedule: ``warmup_epochs`` of a linear rise, then its law over the updates that are left.

    ``constant`` is always the peak. ``step`` is multiplied by ``factor`` once ``milestones`` epochs are done, which the
    warm-up does not shift. ``cosine`` is half a cosine from the peak to ``final`` (Loshchilov & Hutter 2017, SGDR,
    without restarts), and ``poly`` falls as ``(1 - t) ** power`` between the same.

    Args:
        spec: ``schedule``, ``warmup_epochs`` and the law's own constants. Milestones count from the run's start.
        steps: updates in the whole run; later numbers get the last value.
        steps_per_epoch: updates in one epoch, a fraction where the batches do not divide the data.
    """
    warmup = spec.warmup_epochs * steps_per_epoch
    drops = [epoch * steps_per_epoch for epoch in spec.milestones]

    def rate(step: int) -> float:
        if step + 1 < warmup:
            return (step + 1) / warmup
        if spec.schedule == "constant":
            return 1.0
        if spec.schedule == "step":
            return float(spec.factor ** bisect_right(drops, step))
        share = min(max(step - warmup, 0.0) / max(steps - warmup, 1.0), 1.0)
        left = (1 - share) ** spec.power if spec.schedule == "poly" else (1 + math.cos(math.pi * share)) / 2
        return spec.final + (1 - spec.final) * left

    return rate
