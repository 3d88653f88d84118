"""The rules of a tuning, on curves whose answer is known."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steadytrain.config import Optim
from steadytrain.tuning.rules import (
    HEADROOM,
    KNEE,
    agree,
    best_of,
    knee,
    next_batch,
    predict_bytes,
    room_bytes,
    saved_seconds,
    scale_rate,
)

SIZES = [16, 32, 64, 128, 256, 512, 1024]


def climb(rate: Callable[[int], float]) -> dict[int, float]:
    """Measure as a tuning does, a machine whose rates are a function."""
    curve, batch = dict[int, float](), next(iter(SIZES))
    while batch is not None:
        assert batch not in curve, "nothing is measured twice"
        curve[batch] = rate(batch)
        following = next_batch(curve, SIZES)
        if following is None:
            break
        batch = following
    return curve


def saturating(overhead: float, limit: int = 10**9) -> Callable[[int], float]:
    """A machine that takes ``overhead`` images' time for each update as well; above ``limit`` memory runs out."""
    return lambda batch: 0.0 if batch > limit else 1000 * batch / (batch + overhead)


@pytest.mark.parametrize(("overhead", "best"), [(0.0, 16), (1.0, 32), (4.0, 128), (8.0, 256), (30.0, 512)])
def test_the_knee_is_the_smallest_batch_that_is_nearly_as_fast(overhead: float, best: int) -> None:
    curve = climb(saturating(overhead))
    assert knee(curve) == best
    exhaustive = {batch: saturating(overhead)(batch) for batch in SIZES}
    assert curve[knee(curve)] >= KNEE * 0.97 * max(exhaustive.values())
    assert len(curve) < len(SIZES)


@given(st.floats(0, 2000), st.sampled_from([8, 16, 100, 300, 10**9]))
def test_the_climb_ends_and_finds_a_batch_that_fits(overhead: float, limit: int) -> None:
    rate = saturating(overhead, limit)
    good = {batch: speed for batch, speed in climb(rate).items() if speed}
    if limit >= 16:
        assert knee(good) <= limit
        assert good[knee(good)] >= 0.9 * max(rate(batch) for batch in SIZES)


def test_where_memory_runs_out_the_gap_below_is_searched() -> None:
    curve = climb(saturating(1000.0, limit=130))
    assert curve == pytest.approx({16: 15.748, 64: 60.15, 256: 0.0, 128: 113.475}, rel=1e-3)
    assert next_batch({64: 0.0}, SIZES) == 32  # not even the first one: go down


def test_memory_is_predicted_by_a_line_and_never_falls() -> None:
    assert predict_bytes({16: 1.6e9, 64: 3.4e9}, 256) == pytest.approx(10.6e9)
    assert predict_bytes({16: 3e9, 64: 2.9e9}, 256) == 2.9e9


def test_headroom_is_between_five_and_eight_percent_and_the_loaders_share_comes_on_top() -> None:
    assert 0.05 <= HEADROOM <= 0.08
    gib = 2**30
    assert room_bytes(80 * gib, is_cpu=False) == pytest.approx(80 * gib * (1 - HEADROOM))
    assert room_bytes(80 * gib, is_cpu=False) - room_bytes(80 * gib, is_cpu=True) == 2 * gib
    assert room_bytes(8 * gib, is_cpu=False) - room_bytes(8 * gib, is_cpu=True) == gib


def test_what_is_more_exact_or_usual_stays_unless_another_gains() -> None:
    assert best_of({"fp32": 1000, "bf16": 1020}, "fp32") == "fp32"
    assert best_of({"fp32": 1000, "bf16": 1100}, "fp32") == "bf16"
    assert best_of({"bf16": 900}, "fp32") == "bf16"  # the preferred one crashed


def test_compiling_pays_back_only_in_a_long_run() -> None:
    speeds = {"eager": 500.0, "compiled": 600.0, "compile_seconds": 40.0}
    breaking_even = 40 / (1 / 500 - 1 / 600)
    assert saved_seconds(round(0.9 * breaking_even), **speeds) < 0 < saved_seconds(round(1.1 * breaking_even), **speeds)
    assert saved_seconds(10**9, eager=500, compiled=500, compile_seconds=40) == -40


def test_the_rate_follows_the_batch_by_a_rule_that_is_named() -> None:
    lr, why = scale_rate(Optim("sgd", lr=0.1, base_batch_size=128), 128, 64)
    assert lr == 0.1 and "0.05 in use = 0.1 x 64 / 128" in why  # the recipe itself scales it
    assert scale_rate(Optim("sgd", lr=0.1), 32, 128)[0] == 0.4
    lr, why = scale_rate(Optim("adamw", lr=1e-3), 16, 64)
    assert lr == 0.002 and "square-root" in why
    assert scale_rate(Optim("adamw", lr=1e-3), 64, 64) == (1e-3, "as it was: so is the batch")


def test_ranks_agree_on_what_all_of_them_can_do() -> None:
    choices = [
        {"batch_size": 256, "precision.name": "bf16", "parallel.threads": 8},
        {"batch_size": 128, "precision.name": "tf32", "parallel.threads": 4},
        {"batch_size": 512, "precision.name": "bf16", "parallel.threads": None},
    ]
    agreed = {"batch_size": 128, "precision.name": "tf32", "parallel.threads": None}
    assert agree(choices) == agree(choices[::-1]) == agreed
