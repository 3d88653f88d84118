"""MXNet 1.9.1's schedulers as laws ``mxnet/...``: the same rate at the same update.

MXNet's schedulers see ``num_update = k + 1`` at update k, and so do these. What they do not take over: that a scheduler
remembers the largest number it was ever asked for, so that a run resumed past its end trains at full rate.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable

from steadytrain.config.laws import ABOVE_0, SHARE, UPDATE, UPDATES, WHOLE, Law, StageSpan
from steadytrain.config.laws import FACTOR as SHARE_LEFT


def _factor(span: StageSpan, step: float) -> float:
    """FactorScheduler: a drop is seen at ``num_update = i * step + 1``."""
    drops = int(step) // span.stage.updates[0]
    return float(max(span.number("factor") ** drops, span.number("to")))


def _multi_factor(span: StageSpan, step: float) -> float:
    """MultiFactorScheduler, by updates (``step``) or by milestones in epochs, rounded to updates."""
    drops = span.stage.updates or [round(epoch * span.per_epoch) for epoch in span.optim.milestones]
    return float(span.number("factor") ** bisect_right(drops, step))


def _falling(shape: Callable[[StageSpan, float], float]) -> Callable[[StageSpan, float], float]:
    """Poly and Cosine: ``shape`` of the share of updates that are left; 1 if the warm-up takes all of them."""

    def law(span: StageSpan, step: float) -> float:
        most, begin, to = span.stage.values.get("max_update", span.end), round(span.begin), span.number("to")
        if begin >= most:
            return 1.0
        return to + (1 - to) * shape(span, 1 - (min(step + 1, most) - begin) / (most - begin))

    return law


FACTOR = Law(
    share=_factor,
    takes={"step": UPDATE, "factor": SHARE_LEFT, "to": SHARE},
    needs="step",
    counts_updates=True,
)
MULTI_FACTOR = Law(
    share=_multi_factor,
    takes={"step": UPDATES, "factor": SHARE_LEFT},
    counts_updates=True,
    at_milestones=True,
)
POLY = Law(
    share=_falling(lambda span, left: float(left ** span.number("power"))),
    takes={"max_update": WHOLE, "power": ABOVE_0, "to": SHARE},
    counts_updates=True,
)
COSINE = Law(
    share=_falling(lambda span, left: (1 + math.cos(math.pi * (1 - left))) / 2),
    takes={"max_update": WHOLE, "to": SHARE},
    counts_updates=True,
)
