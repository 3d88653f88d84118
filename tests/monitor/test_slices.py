"""Stretches of a run: rising sums, no gap between neighbours, merged without loss."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steadytrain.monitor.ledger import BUCKETS, empty
from steadytrain.monitor.slices import Point, Slice, merged, rising, slices

amounts = st.dictionaries(st.sampled_from(BUCKETS), st.floats(0, 100).map(lambda value: round(value, 3)))


@given(st.lists(amounts, min_size=1, max_size=8))
def test_sums_made_to_rise_keep_their_total_and_their_end(told: list[dict[str, float]]) -> None:
    totals, wall = [], 0.0
    for more in told:  # whatever is told of the buckets, the clock goes on
        wall += 1.0 + sum(more.values())
        held = empty() | more
        totals.append({bucket: value * wall / (sum(held.values()) or 1.0) for bucket, value in held.items()})
        if not sum(more.values()):
            totals[-1]["other"] = wall
    made = rising(totals)
    assert made[-1] == totals[-1]
    for now, later, total in zip(made, [*made[1:], made[-1]], totals, strict=True):
        assert sum(now.values()) == pytest.approx(sum(total.values()))
        assert all(0 <= now[bucket] <= later[bucket] + 1e-6 for bucket in BUCKETS)


def test_neighbours_follow_each_other_without_a_gap() -> None:
    points = [
        Point(2.0, 1002.0, empty() | {"startup": 2.0}),
        Point(2.0, 1002.0, empty() | {"startup": 2.0}),
        Point(5.0, 1005.0, empty() | {"startup": 2.0, "forward": 3.0}),
    ]
    one, two = slices(points, 1)
    assert (one.began, one.ended, one.seconds) == (1000.0, 1002.0, {"startup": 2.0})
    assert (two.began, two.ended, two.seconds) == (1002.0, 1005.0, {"forward": 3.0})


def test_merged_stretches_hold_what_their_parts_did() -> None:
    parts = [Slice(began=i, ended=i + 1, attempt=1 + i // 6, seconds={"forward": 0.75, "host": 0.25}) for i in range(8)]
    made = list(merged(parts, 3.0))
    assert [(one.began, one.ended, one.attempt) for one in made] == [(0, 3, 1), (3, 6, 1), (6, 8, 2)]
    assert made[0].seconds == pytest.approx({"forward": 2.25, "host": 0.75})
    assert list(merged([], 1.0)) == []
