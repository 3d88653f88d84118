"""Updates from a probe, begun again from it: where they undid it, at another rate, or for longer."""

from __future__ import annotations

from collections.abc import Sequence

from steadytrain.events import Evaluated, Tried
from steadytrain.format import compact, count

FIRST_EPOCHS = 8
"""Epochs of the first updates, where the minutes have room for twice as many: those of ``finetune`` without minutes."""

LOWER = 0.3
"""What the learning rate is multiplied by where updates undid the probe, and for the second rate that is tried."""

MOST_UNDONE = 3
"""Times that updates may undo the probe until nothing more is tried: the rate is then 0.027 of the first."""

UNDONE = "undid the probe"
"""Verdict of updates that were ended early."""


def is_below(newest: Evaluated, probe: Evaluated) -> bool:
    """Return whether an evaluation is worse than the probe's: in top-1, and in loss by more than its standard error.

    >>> probe = Evaluated(step=0, epoch=0, n=100, loss=0.5, loss_error=0.05, top1=0.8, top5=1, seconds=1)
    >>> worse = Evaluated(step=9, epoch=1, n=100, loss=0.6, loss_error=0.05, top1=0.7, top5=1, seconds=1)
    >>> is_below(worse, probe), is_below(probe, worse)
    (True, False)
    """
    return newest.loss > probe.loss + (probe.loss_error or 0.0) and newest.top1 < probe.top1


def next_try(tried: Sequence[Tried], probe: Evaluated, fitting: float, *, fills: bool) -> tuple[float, float, str]:
    """Choose the updates that begin next from the probe: learning rate, epochs, and why; 0 epochs: none do.

    The rule: where updates undid the probe, a lower rate. After the first that did not, the other rate; then for twice
    as long at the better one, or for all that is left where less than twice that would remain. It ends where two in a
    row brought less than a standard error of the loss, or the time left is shorter than the longest were. Rates are
    compared over whole schedules: one epoch favours the lower one (Wu et al. 2018, "Understanding Short-Horizon Bias in
    Stochastic Meta-Optimization").

    Args:
        tried: updates so far, oldest first.
        probe: its evaluation.
        fitting: epochs that there is time for.
        fills: use all of the time; else begin again only where the probe was undone, for what is left of the run.
    """
    newest, complete = tried[-1], [each for each in tried if each.verdict != UNDONE]
    rates, room = {each.lr or 0.0 for each in tried}, int(fitting) if fills else fitting

    def chosen(lr: float, epochs: float, why: str) -> tuple[float, float, str]:
        return lr, epochs, f"{why}; from the probe again, {count(epochs, 'epoch')} at a learning rate of {compact(lr)}"

    if newest.verdict == UNDONE:
        worse = f"validation loss {probe.loss:.4f}, then {newest.loss:.4f}"
        why = f"updates at {compact(newest.lr or 0.0)} undid the probe ({worse})"
        if len(tried) - len(complete) >= MOST_UNDONE or room < 1:
            return 0.0, 0.0, f"{why}, and nothing more is tried"
        return chosen((newest.lr or 0.0) * LOWER, first_epochs(room) if fills else room, why)
    losses, newer = [probe.loss, *(each.loss for each in complete)], list(enumerate(complete, 1))[-2:]
    if len(newer) > 1 and all(min(losses[:k]) - each.loss < (each.loss_error or 0.0) for k, each in newer):
        why = "two tries in a row lowered the validation loss by less than its standard error"
        return 0.0, 0.0, f"the run ends early: {why}"
    if room < 0.5 * (newest.epochs or 0.0):
        return 0.0, 0.0, "the time left is too short for another try"
    if len(rates) == 1:
        return chosen((newest.lr or 0.0) * LOWER, first_epochs(room), "another rate is tried")
    lr = min(complete, key=lambda each: each.loss).lr or 0.0
    longest = max(each.epochs or 0.0 for each in complete)
    return chosen(lr, room if room < 4 * longest else 2 * round(longest), "longer updates at the better rate are tried")


def first_epochs(fitting: float) -> int:
    """Return the epochs of updates whose rate was not tried yet, where so many fit.

    >>> [first_epochs(fitting) for fitting in (3.5, 15, 16, 100)]
    [3, 15, 8, 8]
    """
    return int(fitting) if fitting < 2 * FIRST_EPOCHS else FIRST_EPOCHS
