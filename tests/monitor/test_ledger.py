"""The ledger's own words: shares and rates."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steadytrain.events import BUCKETS as RECORDED
from steadytrain.monitor.ledger import (
    BUCKETS,
    COMPUTE,
    INPUT,
    STEADY,
    Ledger,
    Slice,
    empty,
    merge_slices,
    monotonic,
    slices,
)

TOLD = Ledger(
    wall_seconds=100.0,
    away_seconds=5.0,
    seconds=empty() | {"startup": 10.0, "input_decode": 20.0, "forward": 60.0, "evaluation": 10.0},
    steps=80,
    images=800,
)


def test_ledger_has_both_rates() -> None:
    assert TOLD.images_per_second == 8.0
    assert TOLD.steady_images_per_second == 10.0


def test_shares_are_fractions_of_the_wall_time() -> None:
    assert TOLD.share("forward", "input_decode") == 0.8
    assert sum(TOLD.shares.values()) == pytest.approx(1.0)
    assert tuple(TOLD.shares) == BUCKETS


def test_a_name_that_is_no_bucket_is_an_error() -> None:
    with pytest.raises(KeyError):
        TOLD.share("input")


def test_every_recorded_bucket_has_its_place() -> None:
    assert set(RECORDED) - {"input"} <= set(BUCKETS)
    assert set(STEADY) <= set(BUCKETS)
    assert {*INPUT, *COMPUTE} <= set(STEADY)


amounts = st.dictionaries(st.sampled_from(BUCKETS), st.floats(0, 100).map(lambda value: round(value, 3)))


@given(st.lists(amounts, min_size=1, max_size=8))
def test_sums_made_to_rise_keep_their_total_and_their_end(sums: list[dict[str, float]]) -> None:
    totals, wall = [], 0.0
    for more in sums:  # whatever is told of the buckets, the clock goes on
        wall += 1.0 + sum(more.values())
        held = empty() | more
        totals.append({bucket: value * wall / (sum(held.values()) or 1.0) for bucket, value in held.items()})
        if not sum(more.values()):
            totals[-1]["other"] = wall
    moment = monotonic(totals)
    assert moment[-1] == totals[-1]
    for now, later, total in zip(moment, [*moment[1:], moment[-1]], totals, strict=True):
        assert sum(now.values()) == pytest.approx(sum(total.values()))
        assert all(0 <= now[bucket] <= later[bucket] + 1e-6 for bucket in BUCKETS)


def test_neighbours_follow_each_other_without_a_gap() -> None:
    points = [
        (2.0, 1002.0, empty() | {"startup": 2.0}),
        (2.0, 1002.0, empty() | {"startup": 2.0}),
        (5.0, 1005.0, empty() | {"startup": 2.0, "forward": 3.0}),
    ]
    piece, two = slices(points, 1)
    assert (piece.began, piece.ended, piece.seconds) == (1000.0, 1002.0, {"startup": 2.0})
    assert (two.began, two.ended, two.seconds) == (1002.0, 1005.0, {"forward": 3.0})


def test_merged_stretches_hold_what_their_parts_did() -> None:
    parts = [Slice(began=i, ended=i + 1, attempt=1 + i // 6, seconds={"forward": 0.75, "host": 0.25}) for i in range(8)]
    merged = list(merge_slices(parts, 3.0))
    assert [(piece.began, piece.ended, piece.attempt) for piece in merged] == [(0, 3, 1), (3, 6, 1), (6, 8, 2)]
    assert merged[0].seconds == pytest.approx({"forward": 2.25, "host": 0.75})
    assert list(merge_slices([], 1.0)) == []
