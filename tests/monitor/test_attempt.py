"""One start of a run, looked at in its middle."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from tests.monitor.recorder import Recorder

from steadytrain.events import FeedStats, Saved, Started
from steadytrain.monitor.attempt import Attempt, InputWait, Mark, stage_shares


def absorbed(run: Recorder) -> Attempt:
    first, *others = run.events
    assert isinstance(first, Started)
    attempt = Attempt(1, first, first.time)
    for event in [first, *others]:
        attempt.take(event)
    return attempt


@pytest.fixture
def run() -> Recorder:
    """Ten updates of a second, accounted for every five; then two more and an evaluation."""
    recorder = Recorder()
    recorder.start(startup=3.0)
    for index in range(12):
        recorder.update(forward=0.75, input=0.25)
        if index in (4, 9):
            recorder.account()
    recorder.evaluate(2.0)
    return recorder


def test_where_it_stands_is_the_account_and_what_came_after(run: Recorder) -> None:
    now = absorbed(run).end()
    assert now.wall == pytest.approx(3.0 + 12.0 + 2.0)
    assert (now.step, now.images) == (12, 120)
    assert now.seconds["evaluation"] == pytest.approx(2.0)
    assert now.seconds["input"] == pytest.approx(12 * 0.25)
    assert sum(now.seconds.values()) == pytest.approx(now.wall)


def test_a_moment_between_two_accounts_lies_evenly_between_them(run: Recorder) -> None:
    attempt = absorbed(run)
    then = attempt.at_wall(3.0 + 7.0)
    assert then.images == 70
    assert then.seconds["input"] == pytest.approx(7 * 0.25)
    assert attempt.at_images(70).wall == pytest.approx(10.0)
    assert attempt.at_images(110).wall == pytest.approx(15.0)  # half of what followed the newest account
    assert attempt.at_wall(1e9).wall == attempt.wall


def test_updates_after_the_checkpoint_of_a_later_start_do_not_count(run: Recorder) -> None:
    run.save(1.0)
    at = run.wall
    run.update(forward=1.0)
    attempt = absorbed(run)
    assert attempt.lose_after(12)
    assert attempt.cut == pytest.approx(at)
    assert not attempt.lose_after(0), "the checkpoint is older than the attempt"
    assert attempt.cut == 0.0


def test_updates_made_while_a_checkpoint_is_written_are_not_in_it() -> None:
    run = Recorder()
    run.start(startup=3.0)
    run.update(forward=1.0)
    saved = Saved(step=1, path="a", bytes=1, seconds=3.5, paused_seconds=0.5, cpu_seconds=1.0, began=run.time)
    run.idle(0.5)  # the pause, which no update has
    run.update(forward=4.0)
    attempt = absorbed(run)
    attempt.take(replace(saved, time=run.time))
    assert attempt.lose_after(1)
    assert attempt.cut == pytest.approx(run.wall - 4.0)
    assert saved.cost == 1.5 and replace(saved, paused_seconds=None, cpu_seconds=None).cost == 3.5


def test_an_account_that_is_older_than_the_one_before_is_passed_over(run: Recorder) -> None:
    attempt = absorbed(run)
    before = attempt.end()
    older = next(event for event in run.events if event.kind == "Accounted")
    attempt.take(older)
    assert attempt.end().wall == pytest.approx(before.wall)


def mark_at(step: int) -> Mark:
    return Mark(wall=0.0, time=0.0, step=step, images=0, seconds={})


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
def test_stretches_are_split_by_their_own_work_in_either_order_of_events(first: str) -> None:
    waits, points = InputWait(), [mark_at(10), mark_at(20)]
    for point, seconds, stats in zip(
        points, (2.0, 3.0), (told(10, read=5.0), told(20, read=5.0, decode=1.0)), strict=True
    ):
        if first == "stats":
            waits.add_stats(stats)
        waits.add_wait(point, seconds)
        if first == "mark":
            waits.add_stats(stats)
    assert points[0].stages == pytest.approx((2.0, 0.0, 0.0, 0.0, 0.0))
    assert points[1].stages == pytest.approx((2.0, 3.0, 0.0, 0.0, 0.0))


def test_a_stretch_of_which_the_feed_tells_later_is_split_when_it_does() -> None:
    waits, points = InputWait(), [mark_at(10), mark_at(20)]
    waits.add_wait(points[0], 1.0)
    waits.add_wait(points[1], 1.0)
    assert points[1].stages == (0.0, 0.0, 0.0, 0.0, 2.0)
    waits.add_stats(told(20, decode=4.0))
    assert points[0].stages == (0.0, 1.0, 0.0, 0.0, 0.0)
    assert points[1].stages == (0.0, 2.0, 0.0, 0.0, 0.0)


def test_what_follows_the_newest_figures_is_split_as_all_before_it() -> None:
    waits = InputWait()
    waits.add_wait(mark_at(10), 4.0)
    waits.add_stats(told(10, read=1.0, augment=3.0))
    assert waits.after(2.0) == pytest.approx((1.5, 0.0, 4.5, 0.0, 0.0))


def test_threads_that_could_have_made_more_are_not_waited_for() -> None:
    assert stage_shares(None, told(1, decode=1.0, blocked=1.1)) == (0.0, 0.0, 0.0, 0.0, 1.0)
    assert stage_shares(None, told(1)) == (0.0, 0.0, 0.0, 0.0, 1.0)
    assert stage_shares(told(1, decode=1.0, blocked=9.0), told(2, decode=2.0, blocked=9.5)) == (0.0, 1.0, 0.0, 0.0, 0.0)


def test_a_feed_made_anew_counts_from_nothing() -> None:
    assert stage_shares(told(1, decode=100.0), told(2, read=1.0)) == (1.0, 0.0, 0.0, 0.0, 0.0)
