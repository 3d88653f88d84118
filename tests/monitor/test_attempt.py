"""One start of a run, looked at in its middle."""

from __future__ import annotations

import pytest
from tests.monitor.recorder import Recorder

from steadytrain.events import Started
from steadytrain.monitor.attempt import Attempt


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
    made = Recorder()
    made.start(startup=3.0)
    for index in range(12):
        made.update(forward=0.75, input=0.25)
        if index in (4, 9):
            made.account()
    made.evaluate(2.0)
    return made


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


def test_what_came_after_a_later_starts_checkpoint_counts_no_more(run: Recorder) -> None:
    run.save(1.0)
    at = run.wall
    run.update(forward=1.0)
    attempt = absorbed(run)
    assert attempt.lose_after(12)
    assert attempt.cut == pytest.approx(at)
    assert not attempt.lose_after(0), "the checkpoint is older than the attempt"
    assert attempt.cut == 0.0


def test_an_account_that_is_older_than_the_one_before_is_passed_over(run: Recorder) -> None:
    attempt = absorbed(run)
    before = attempt.end()
    older = next(event for event in run.events if event.kind == "Accounted")
    attempt.take(older)
    assert attempt.end().wall == pytest.approx(before.wall)
