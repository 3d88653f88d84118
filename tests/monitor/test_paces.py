"""Percentiles and slowest updates of long runs, in little memory."""

from __future__ import annotations

import pytest

from steadytrain.monitor.step_times import MAX_KEPT, MAX_SLOWEST, Paces, percentiles


def test_percentiles_of_a_long_run_are_those_of_all_its_updates() -> None:
    paces = Paces()
    for step in range(10 * MAX_KEPT):
        paces.add(step, seconds=(step * 7919 % 1000) / 1000, wait=0.0)
    assert paces.seconds == pytest.approx((0.05, 0.5, 0.95), abs=0.02)
    assert paces.waits == (0.0, 0.0, 0.0)


def test_the_slowest_updates_are_all_found_in_their_order() -> None:
    paces = Paces()
    for step in range(1, 5001):
        paces.add(step, seconds=2.0 if step % 250 == 0 else 0.1, wait=0.0)
    slow = {step: seconds for step, seconds in paces.slowest.items() if seconds > 1}
    assert list(slow) == list(range(250, 5001, 250))
    assert len(paces.slowest) == MAX_SLOWEST


def test_nothing_has_percentiles_of_zero() -> None:
    assert percentiles([]) == (0.0, 0.0, 0.0)
    assert percentiles([3.0]) == (3.0, 3.0, 3.0)
