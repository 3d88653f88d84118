"""The wait for batches by stage: what the feed's threads did in the same time."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from steadytrain.events import FeedStats
from steadytrain.monitor.waits import NOTHING, Stages, Waits, shares


@dataclass
class Point:
    step: int
    stages: Stages = NOTHING


def told(step: int, *, read: float = 0.0, decode: float = 0.0, augment: float = 0.0, blocked: float = 0.0) -> FeedStats:
    return FeedStats(
        step=step,
        images=step,
        bytes=0,
        read_seconds=read,
        decode_seconds=decode,
        augment_seconds=augment,
        batch_seconds=0.0,
        blocked_seconds=blocked,
        threads=1,
    )


@pytest.mark.parametrize("first", ["mark", "stats"])
def test_each_stretch_is_split_by_its_own_work_whichever_of_the_two_is_told_first(first: str) -> None:
    waits, points = Waits(), [Point(10), Point(20)]
    for point, seconds, stats in zip(
        points, (2.0, 3.0), (told(10, read=5.0), told(20, read=5.0, decode=1.0)), strict=True
    ):
        if first == "stats":
            waits.told(stats)
        waits.waited(point, seconds)
        if first == "mark":
            waits.told(stats)
    assert points[0].stages == pytest.approx((2.0, 0.0, 0.0, 0.0, 0.0))
    assert points[1].stages == pytest.approx((2.0, 3.0, 0.0, 0.0, 0.0))


def test_a_stretch_of_which_the_feed_tells_later_is_split_when_it_does() -> None:
    waits, points = Waits(), [Point(10), Point(20)]
    waits.waited(points[0], 1.0)
    waits.waited(points[1], 1.0)
    assert points[1].stages == (0.0, 0.0, 0.0, 0.0, 2.0)
    waits.told(told(20, decode=4.0))
    assert points[0].stages == (0.0, 1.0, 0.0, 0.0, 0.0)
    assert points[1].stages == (0.0, 2.0, 0.0, 0.0, 0.0)


def test_what_follows_the_newest_figures_is_split_as_all_before_it() -> None:
    waits = Waits()
    waits.waited(Point(10), 4.0)
    waits.told(told(10, read=1.0, augment=3.0))
    assert waits.after(2.0) == pytest.approx((1.5, 0.0, 4.5, 0.0, 0.0))


def test_threads_that_could_have_made_more_are_not_waited_for() -> None:
    assert shares(None, told(1, decode=1.0, blocked=1.1)) == (0.0, 0.0, 0.0, 0.0, 1.0)
    assert shares(None, told(1)) == (0.0, 0.0, 0.0, 0.0, 1.0)
    assert shares(told(1, decode=1.0, blocked=9.0), told(2, decode=2.0, blocked=9.5)) == (0.0, 1.0, 0.0, 0.0, 0.0)


def test_a_feed_made_anew_counts_from_nothing() -> None:
    assert shares(told(1, decode=100.0), told(2, read=1.0)) == (1.0, 0.0, 0.0, 0.0, 0.0)
