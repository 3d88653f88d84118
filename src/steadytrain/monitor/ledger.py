"""The ledger of a run: each second of its wall time in exactly one bucket, in sum and over time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

INPUT = ("input_storage", "input_decode", "input_augment", "input_batch", "input_other")
"""Waiting for a batch, by what the feed's threads were busy with meanwhile; ``input_other``: with nothing of it."""

COMPUTE = ("forward", "backward", "optimizer", "update")
"""The update itself; ``update``: of updates that nothing tells the parts of."""

PASSES = ("forward", "backward", "update", "host")
"""Forward and backward passes, with what calls them: an update without its optimizer."""

BUCKETS = (
    "startup",
    "warmup",
    "probe",
    *INPUT,
    "epoch_gap",
    "transfer",
    "host",
    *COMPUTE,
    "communication",
    "evaluation",
    "checkpoint",
    "logging",
    "measuring",
    "lost",
    "other",
)
"""Where a second of a run can go. ``lost``: done again after a restart, or for nothing."""

STEADY = (*INPUT, "transfer", "host", *COMPUTE, "communication", "logging")
"""The buckets of every update: the steady state."""


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """Seconds of a run by bucket, over all of its attempts.

    Args:
        wall_seconds: of all attempts, each from the start of its process; pauses between them are not in it.
        away_seconds: those pauses.
        seconds: of every bucket of :data:`BUCKETS`; they add up to ``wall_seconds``.
        steps: updates that count: those that a restart repeated are counted once.
        images: that those updates were made with.
        warmup_images: of these, the ones whose computing is all in ``warmup``: of an attempt without later updates.

    >>> ledger = Ledger(wall_seconds=10.0, away_seconds=0.0, seconds=empty() | {"forward": 6.0, "evaluation": 4.0},
    ...                 steps=30, images=300)
    >>> ledger.images_per_second, ledger.steady_images_per_second, ledger.share("evaluation", "checkpoint")
    (30.0, 50.0, 0.4)
    """

    wall_seconds: float
    away_seconds: float
    seconds: Mapping[str, float]
    steps: int
    images: int
    warmup_images: int = 0

    @property
    def images_per_second(self) -> float:
        """Overall: images over the wall time; 0 where there is none."""
        return self.images / self.wall_seconds if self.wall_seconds > 0 else 0.0

    @property
    def steady_images_per_second(self) -> float:
        """Images over the seconds of :data:`STEADY`: without starts, evaluations, checkpoints; the wait is in it."""
        steady = sum(self.seconds[bucket] for bucket in STEADY)
        return max(0, self.images - self.warmup_images) / steady if steady > 0 else 0.0

    def share(self, *buckets: str) -> float:
        """Return these buckets' share of the wall time, 0 to 1. Raises KeyError for a name that is no bucket."""
        seconds = sum(self.seconds[bucket] for bucket in buckets)
        return seconds / self.wall_seconds if self.wall_seconds > 0 else 0.0

    @property
    def shares(self) -> dict[str, float]:
        """The share of each bucket."""
        return {bucket: self.share(bucket) for bucket in BUCKETS}


@dataclass(frozen=True, kw_only=True)
class Interruption:
    """The end of an attempt that another one followed, and the seconds that it cost.

    Args:
        how: in a word or some: saved and stopped, interrupted, failed, killed.
        step: updates done when it ended.
        again_seconds: of its work after the checkpoint that the next attempt went on from: done again.
        start_seconds: of the next attempt, from its process's start to usual updates.
        away_seconds: between the two.
    """

    attempt: int
    how: str
    step: int
    again_seconds: float
    start_seconds: float
    away_seconds: float

    @property
    def paid_seconds(self) -> float:
        """Paid seconds in which the run did not get further."""
        return self.again_seconds + self.start_seconds

    @property
    def seconds(self) -> float:
        """All that the interruption cost, the time without a machine included."""
        return self.paid_seconds + self.away_seconds


def goodput(interruptions: Sequence[Interruption], ledger: Ledger) -> float | None:
    """Return the share of a run's time, pauses included, that interruptions did not cost; None before it has begun.

    >>> cost = Interruption(attempt=1, how="killed", step=9, again_seconds=2.0, start_seconds=3.0, away_seconds=5.0)
    >>> goodput([cost], Ledger(wall_seconds=95.0, away_seconds=5.0, seconds=empty(), steps=1, images=1))
    0.9
    """
    total = ledger.wall_seconds + ledger.away_seconds
    return max(0.0, 1 - sum(cost.seconds for cost in interruptions) / total) if total > 0 else None


def empty() -> dict[str, float]:
    """Return zero seconds for every bucket."""
    return dict.fromkeys(BUCKETS, 0.0)


SHORTEST_SLICE = 1e-6  # seconds: floating-point seconds since 1970 are no finer


@dataclass(frozen=True, kw_only=True)
class Slice:
    """A stretch of a run: its bounds, seconds since 1970, and its seconds by bucket, empty buckets left out."""

    began: float
    ended: float
    attempt: int
    seconds: Mapping[str, float]


def slices(totals: Sequence[tuple[float, float, Mapping[str, float]]], attempt: int) -> Iterator[Slice]:
    """Yield the differences of consecutive totals, oldest first; the first slice begins with the attempt.

    A total is an attempt's wall seconds up to a moment, when that was, and its seconds in each bucket.
    """
    before, seconds = 0.0, empty()
    for (wall, time, _), rising in zip(totals, monotonic([total for *_, total in totals]), strict=True):
        length = wall - before
        if length > SHORTEST_SLICE:
            more = {bucket: value for bucket in BUCKETS if (value := rising[bucket] - seconds[bucket]) > 0}
            yield Slice(began=time - length, ended=time, attempt=attempt, seconds=more)
            before, seconds = wall, rising


def monotonic(totals: Sequence[Mapping[str, float]]) -> list[dict[str, float]]:
    """Move seconds between buckets so that no bucket falls from one total to the next; each sum stays.

    Seconds are re-sorted late: computing turns out to have been warm-up, a device reports afterwards. Where a bucket
    falls, it had too much before, and the excess belongs to the buckets that rise.

    >>> monotonic([{"forward": 3.0, "warmup": 0.0}, {"forward": 1.0, "warmup": 4.0}])
    [{'forward': 1.0, 'warmup': 2.0}, {'forward': 1.0, 'warmup': 4.0}]
    """
    rising = [dict(total) for total in totals]
    for later, seconds in pairwise(reversed(rising)):
        excess = sum(max(0.0, value - later[bucket]) for bucket, value in seconds.items())
        if excess <= 0:
            continue
        room = {bucket: max(0.0, later[bucket] - value) for bucket, value in seconds.items()}
        share = min(1.0, excess / sum(room.values())) if any(room.values()) else 0.0
        for bucket, value in seconds.items():
            seconds[bucket] = min(value, later[bucket]) + room[bucket] * share
    return rising


def merge_slices(slices: Iterable[Slice], width: float) -> Iterator[Slice]:
    """Join neighbours of one attempt until they are ``width`` seconds long."""
    joined: Slice | None = None
    for piece in slices:
        if joined is None or joined.attempt != piece.attempt or joined.ended - joined.began >= width:
            if joined:
                yield joined
            joined = piece
            continue
        names = [b for b in BUCKETS if b in joined.seconds or b in piece.seconds]
        seconds = {b: joined.seconds.get(b, 0.0) + piece.seconds.get(b, 0.0) for b in names}
        # The newest clock counts: it may have been set in between.
        joined = replace(piece, began=piece.began - (joined.ended - joined.began), seconds=seconds)
    if joined:
        yield joined
