"""The ledger's own words: shares and rates."""

from __future__ import annotations

import pytest

from steadytrain.events import BUCKETS as RECORDED
from steadytrain.monitor.ledger import BUCKETS, COMPUTE, INPUT, STEADY, Ledger, empty

TOLD = Ledger(
    wall_seconds=100.0,
    away_seconds=5.0,
    seconds=empty() | {"startup": 10.0, "input_decode": 20.0, "forward": 60.0, "evaluation": 10.0},
    steps=80,
    images=800,
)


def test_both_rates_are_told() -> None:
    assert TOLD.images_per_second == 8.0
    assert TOLD.steady_images_per_second == 10.0


def test_shares_are_of_the_wall_time() -> None:
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
