"""The stretches of an attempt, from what its seconds were at some moments."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from steadytrain.monitor.ledger import BUCKETS, empty

LEAST_SECONDS = 1e-6  # of a slice: a time of this century is not told more finely


@dataclass(frozen=True, kw_only=True)
class Slice:
    """A stretch of a run: when, seconds since 1970, and its seconds by bucket, of which all but the empty are told."""

    began: float
    ended: float
    attempt: int
    seconds: Mapping[str, float]


@dataclass(frozen=True)
class Point:
    """A moment of an attempt: its wall seconds so far, when that was, and what was in each bucket by then."""

    wall: float
    time: float
    seconds: Mapping[str, float]


def slices(points: Sequence[Point], attempt: int) -> Iterator[Slice]:
    """What lies between the moments, oldest first: the first begins with the attempt.

    Args:
        points: rising; every one tells every bucket.
        attempt: its number.
    """
    before, held = 0.0, empty()
    for point, seconds in zip(points, rising([point.seconds for point in points]), strict=True):
        length = point.wall - before
        if length > LEAST_SECONDS:
            more = {bucket: seconds[bucket] - held[bucket] for bucket in BUCKETS}
            yield Slice(
                began=point.time - length,
                ended=point.time,
                attempt=attempt,
                seconds={bucket: value for bucket, value in more.items() if value > 0},
            )
            before, held = point.wall, seconds


def rising(totals: Sequence[Mapping[str, float]]) -> list[dict[str, float]]:
    """Sums as they would have been told had all been known at once: none of them falls from one moment to the next.

    What computed is told to have been warm-up when that is over, and a device's seconds are told late: where a bucket
    falls, it had too much before, which then belongs to those that rise.

    >>> rising([{"forward": 3.0, "warmup": 0.0}, {"forward": 1.0, "warmup": 4.0}])
    [{'forward': 1.0, 'warmup': 2.0}, {'forward': 1.0, 'warmup': 4.0}]
    """
    made = [dict(total) for total in totals]
    for now, later in pairwise(reversed(range(len(made)))):
        _lower(made[later], made[now])
    return made


def _lower(seconds: dict[str, float], later: Mapping[str, float]) -> None:
    excess = sum(max(0.0, value - later[bucket]) for bucket, value in seconds.items())
    if excess <= 0:
        return
    room = {bucket: max(0.0, later[bucket] - value) for bucket, value in seconds.items()}
    share = min(1.0, excess / sum(room.values())) if any(room.values()) else 0.0
    for bucket, value in seconds.items():
        seconds[bucket] = min(value, later[bucket]) + room[bucket] * share


def merged(told: Iterable[Slice], width: float) -> Iterator[Slice]:
    """Neighbours put together until they are as long as ``width`` seconds; those of two attempts stay apart."""
    held: Slice | None = None
    for one in told:
        if held and (held.attempt != one.attempt or held.ended - held.began >= width):
            yield held
            held = None
        held = one if held is None else _together(held, one)
    if held:
        yield held


def _together(held: Slice, one: Slice) -> Slice:
    told = held.seconds.keys() | one.seconds.keys()
    seconds = {b: held.seconds.get(b, 0.0) + one.seconds.get(b, 0.0) for b in BUCKETS if b in told}
    # The newest clock is believed: it may have been set in between.
    return replace(held, began=one.began - (held.ended - held.began), ended=one.ended, seconds=seconds)
