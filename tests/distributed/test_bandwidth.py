"""Measuring the exchange, by real processes over gloo."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steadytrain.distributed.bandwidth import buckets


@given(st.lists(st.integers(0, 5000), max_size=30), st.integers(1, 8000))
def test_buckets_hold_every_value_once_and_no_more_than_they_must(sizes: list[int], most_bytes: int) -> None:
    parts = buckets(sizes, most_bytes)
    assert sum(parts) == sum(sizes) and all(parts)
    assert all(4 * (part - max(sizes)) < most_bytes for part in parts)
    assert all(4 * full >= most_bytes for full, _ in pairwise(parts))


def test_the_last_tensors_are_exchanged_first() -> None:
    assert buckets([100, 1, 1, 1], most_bytes=8) == [2, 101]


@pytest.mark.parametrize("sizes", [[], [0, 0]])
def test_a_model_without_parameters_has_no_buckets(sizes: list[int]) -> None:
    assert buckets(sizes) == []
