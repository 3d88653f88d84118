"""The stretches of a run that are judged each for itself, and what stands still where an epoch begins."""

from __future__ import annotations

from collections.abc import Mapping

from steadytrain.events import FeedStats
from steadytrain.monitor.evidence import Evidence
from steadytrain.monitor.ledger import INPUT, PASSES, STEADY
from steadytrain.monitor.rules.pace import Pace

NEAR = 6
"""Updates before or after the first batch of an epoch in which its lateness shows: batches are made some ahead."""

LEAST_UPDATES = 8 * NEAR
"""Of an epoch in which something can be said to be near its beginning."""

STANDS_OUT = 3.0
"""Times the usual update that one takes which a gap holds up, at least."""


def paces(evidence: Evidence) -> tuple[Pace, ...]:
    """The first pass over the data and what came later, or all of a run that has only one of them.

    They differ where files come from a disk at first and from memory afterwards, or decoded images are kept.
    """
    both = whole(evidence)
    if both is None or evidence.first_epoch is None or evidence.later is None:
        return () if both is None else (both,)
    first, later = (_input(told) for told in (evidence.first_epoch, evidence.later))
    ledger = evidence.ledger
    loop = ledger.share(*STEADY)
    part = _part(first, later, ledger.share(*INPUT) / loop, evidence)
    gap = gaps(evidence)
    rest = loop * (1 - part)
    without = max(0.0, rest * later - gap) / max(rest - gap, 1e-9)
    return (
        _pace(evidence, loop * part, both.update / max(1 - first, 1e-3), first, is_first=True),
        _pace(evidence, max(0.0, rest - gap), both.update / max(1 - without, 1e-3), min(1.0, without)),
    )


def whole(evidence: Evidence) -> Pace | None:
    """All updates of the run taken together; None before there are some. What stands still at epochs is not in it."""
    ledger = evidence.ledger
    loop, gap = ledger.share(*STEADY), gaps(evidence)
    if ledger.images <= 0 or loop <= 0 or loop <= gap:
        return None
    step = evidence.recipe.batch_size / ledger.steady_images_per_second * (loop - gap) / loop
    return _pace(evidence, loop - gap, step, max(0.0, ledger.share(*INPUT) - gap) / (loop - gap))


def gaps(evidence: Evidence) -> float:
    """Share of the wall time that the loop waits for batches around the beginnings of epochs, beyond the usual.

    It is read from the slowest updates: those near the first batch of an epoch that take many times the usual. What the
    ledger has as ``epoch_gap`` is not in it.
    """
    num_train, batch = _num_train(evidence), evidence.recipe.batch_size
    usual = evidence.step_seconds[1]
    if num_train < LEAST_UPDATES * batch or usual <= 0:
        return 0.0
    late = (
        seconds - usual
        for step, seconds in evidence.slowest.items()
        if seconds >= STANDS_OUT * usual and _is_near(step * batch / num_train, NEAR * batch / num_train)
    )
    waited = sum(late) / evidence.ledger.wall_seconds if evidence.ledger.wall_seconds > 0 else 0.0
    return min(waited, evidence.ledger.share(*INPUT))


def on_cpu(evidence: Evidence) -> bool:
    """Whether the updates are computed by the processors."""
    return str(evidence.started.machine.get("device", "cpu")) == "cpu"


def cores(evidence: Evidence) -> int:
    """Cores that the run may use."""
    if evidence.machine is not None:
        return max(1, evidence.machine.cores)
    return max(1, int(evidence.started.machine.get("cores", 1)))


def compute_threads(evidence: Evidence) -> int:
    """Threads that compute on a processor: one at least."""
    return int(evidence.started.machine.get("compute_threads", 1) or 1)


def takes_turns(evidence: Evidence) -> bool:
    """Whether more threads compute than there are cores: what they wait for is each other."""
    return on_cpu(evidence) and compute_threads(evidence) > cores(evidence)


def pass_seconds(evidence: Evidence) -> float:
    """Mean seconds of the run's own passes, without the optimizer; 0 before there were some."""
    ledger = evidence.ledger
    return sum(ledger.seconds[bucket] for bucket in PASSES) / ledger.steps if ledger.steps > 0 else 0.0


def _pace(evidence: Evidence, loop: float, step: float, waiting: float, *, is_first: bool = False) -> Pace:
    return Pace(
        loop=loop,
        step=step,
        wait=step * waiting,
        batch_size=evidence.recipe.batch_size,
        feed=_told(evidence.feed_first, evidence.feed) if is_first else _told(evidence.feed, evidence.feed_first),
        machine=(evidence.machine_first if is_first else None) or evidence.machine,
        cores=cores(evidence),
        compute_threads=compute_threads(evidence) if on_cpu(evidence) else 0,
    )


def _told(feed: FeedStats | None, otherwise: FeedStats | None) -> FeedStats | None:
    """What tells of some images, if anything does."""
    return feed if feed is not None and (feed.images > 0 or otherwise is None) else otherwise


def _input(told: Mapping[str, float]) -> float:
    return sum(told.get(bucket, 0.0) for bucket in INPUT)


def _is_near(epochs: float, distance: float) -> bool:
    """Whether a place, in epochs, is no further than this from the beginning of one after the first."""
    return round(epochs) >= 1 and abs(epochs - round(epochs)) <= distance


def _num_train(evidence: Evidence) -> float:
    return float(evidence.started.data.get("num_train", 0) or 0)


def _part(first: float, later: float, both: float, evidence: Evidence) -> float:
    """Share of the loop's time that the first pass has, from how much of each and of both together is waiting."""
    if abs(first - later) > 0.02:
        return min(1.0, max(0.0, (both - later) / (first - later)))
    num_train = _num_train(evidence)
    return min(1.0, num_train / evidence.position) if evidence.position else 0.5
