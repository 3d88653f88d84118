"""How long a thread waited for a processor, from counters that tell a wait only when it is over."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from steadytrain.monitor.process_watch.sampler import ThreadCounters, queued_seconds

TICK = 0.01


@given(st.lists(st.booleans(), min_size=40, max_size=400), st.integers(3, 30))
def test_what_is_told_of_the_queue_adds_up_to_the_waits_there_were(runs: list[bool], every: int) -> None:
    """``runs``: in each hundredth of a second whether the thread runs; else it waits for a processor."""
    ran = queued = waiting = told = 0.0
    turns, before, looked_at = 0, ThreadCounters("t", "R", 0.0, 0.0, 0), 0
    for at, (earlier, now) in enumerate(zip([False, *runs], runs, strict=False), start=1):
        if now and not earlier:
            turns, queued, waiting = turns + 1, queued + waiting, 0.0
        ran, waiting = ran + TICK * now, waiting + TICK * (not now)
        if at % every == 0:
            looked_at, after = at, ThreadCounters("t", "R", ran, queued, turns)
            part, ahead = queued_seconds(before, after, every * TICK)
            told, before = told + part, ThreadCounters("t", "R", ran, queued, turns, ahead)
    waited = TICK * (looked_at - sum(runs[:looked_at]))
    assert waited - every * TICK - 1e-6 <= told <= waited + 1e-6


def test_a_thread_that_waits_through_several_looks_is_seen_to_wait_in_each() -> None:
    one = ThreadCounters("t", "R", 1.0, 5.0, 7)
    part, ahead = queued_seconds(one, one, 0.1)
    assert part == 0.1
    two = ThreadCounters("t", "R", 1.0, 5.0, 7, ahead)
    part, ahead = queued_seconds(two, one, 0.1)
    assert (part, round(ahead, 6)) == (0.1, 0.2)
    at_last = ThreadCounters("t", "R", 1.07, 5.23, 8)
    part, ahead = queued_seconds(ThreadCounters("t", "R", 1.0, 5.0, 7, ahead), at_last, 0.1)
    assert (part, ahead) == (0.03, 0.0)


def test_a_thread_that_runs_all_the_time_waits_for_nothing() -> None:
    assert queued_seconds(ThreadCounters("t", "R", 1.0, 5.0, 7), ThreadCounters("t", "R", 1.1, 5.0, 7), 0.1) == (
        0.0,
        0.0,
    )


def test_a_thread_that_slept_waits_for_nothing() -> None:
    asleep = ThreadCounters("t", "S", 1.0, 5.0, 7)
    assert queued_seconds(asleep, asleep, 0.1) == (0.0, 0.0)
    assert queued_seconds(asleep, ThreadCounters("t", "R", 1.0, 5.0, 7), 0.1) == (0.0, 0.0)


def test_a_kernel_that_does_not_count_tells_nothing() -> None:
    one = ThreadCounters("t", "R", 1.0, None, None)
    assert queued_seconds(one, one, 0.1) == (0.0, 0.0)
