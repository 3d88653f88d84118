"""Updates from a probe, begun again from it: where they undid it, at another rate, or for longer."""

from __future__ import annotations

from collections.abc import Sequence

from steadytrain.config.defaults import LEAST_EPOCHS
from steadytrain.events import Evaluated, Tried
from steadytrain.format import compact, epoch, percent

FIRST_EPOCHS = 8
"""Epochs of the first updates, where the minutes have room for twice as many: those of ``finetune`` without minutes."""

LOWER = 0.3
"""What the learning rate is multiplied by where updates undid the probe, or did not help."""

LONGER = 1.5
"""Times the length of the best updates, below which more at the same rate would bring little."""

MOST_UNDONE = 2
"""Times that updates are ended because they undid the probe: after that, at 0.09 of the first rate, they go on."""

UNDONE_ERRORS = 3.0
"""Standard errors of the probe's top-1 by which updates undid it: falls of up to two are often made good later."""

UNDONE = "undid the probe"
"""Verdict of updates that were ended early."""


def is_below(newest: Evaluated, probe: Evaluated) -> bool:
    """Return whether an evaluation is worse than the probe's beyond chance, in loss and in top-1.

    >>> probe = Evaluated(step=0, epoch=0, n=100, loss=0.5, loss_error=0.05, top1=0.8, top5=1, seconds=1)
    >>> worse = Evaluated(step=9, epoch=1, n=100, loss=0.9, loss_error=0.05, top1=0.6, top5=1, seconds=1)
    >>> is_below(worse, probe), is_below(probe, worse)
    (True, False)
    """
    n = probe.n + 4
    top1 = (probe.top1 * probe.n + 2) / n  # whose error is not 0 where all are right (Agresti & Coull 1998)
    margin = UNDONE_ERRORS * (top1 * (1 - top1) / n) ** 0.5
    return newest.loss > probe.loss + (probe.loss_error or 0.0) and newest.top1 < probe.top1 - margin


def next_try(tried: Sequence[Tried], probe: Evaluated, fitting: float, *, fills: bool) -> tuple[float, float, str]:
    """Choose the updates that begin next from the probe: learning rate, epochs, and why; 0 epochs: none do.

    The rule: the same rate for longer where updates came to the lowest loss so far; a lower rate where they did not, or
    undid the probe. It ends where two in a row lowered it by less than its standard error, or too little time is left.
    Whole schedules are compared: one epoch favours the lower rate (Wu et al. 2018, "Understanding Short-Horizon Bias in
    Stochastic Meta-Optimization").

    Args:
        tried: updates so far, oldest first.
        probe: its evaluation.
        fitting: epochs that there is time for.
        fills: use all of the time; else begin again only where the probe was undone, for what is left of the run.
    """
    newest, complete = tried[-1], [each for each in tried if each.verdict != UNDONE]
    room, rate, last = int(fitting) if fills else fitting, newest.lr or 0.0, newest.epochs or 0.0

    def chosen(lr: float, epochs: float, why: str) -> tuple[float, float, str]:
        return lr, epochs, f"{why}; from the probe again, {epoch(epochs)} epochs at a learning rate of {compact(lr)}"

    if newest.verdict == UNDONE:
        worse = f"top-1 {percent(probe.top1, 1)}, then {percent(newest.top1, 1)}"
        why = f"updates at {compact(rate)} undid the probe (validation {worse})"
        if room < 1:
            return 0.0, 0.0, f"{why}, and nothing more is tried"
        return chosen(rate * LOWER, first_epochs(room) if fills else room, why)
    losses = [probe.loss, *(each.loss for each in complete)]
    helps = [min(losses[:k]) - each.loss >= (each.loss_error or 0.0) for k, each in enumerate(complete, 1)]
    if helps[-2:] == [False, False]:
        why = "two tries in a row lowered the validation loss by less than its standard error"
        return 0.0, 0.0, f"the run ends early: {why}"
    if room < max(LEAST_EPOCHS, 0.75 * last):
        return 0.0, 0.0, "the time left is too short for another try"
    if losses[-1] < min(losses[:-1]) and room >= LONGER * last:
        return chosen(rate, room if room < 4 * last else round(2 * last), "longer updates are tried")
    return chosen(rate * LOWER, first_epochs(room), "a lower rate is tried")


def first_epochs(fitting: float) -> int:
    """Return the epochs of updates whose rate was not tried yet, where so many fit.

    >>> [first_epochs(fitting) for fitting in (3.5, 15, 16, 100)]
    [3, 15, 8, 8]
    """
    return int(fitting) if fitting < 2 * FIRST_EPOCHS else FIRST_EPOCHS
