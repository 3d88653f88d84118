"""Calibration beside chance, and the ratio of class sizes."""

from __future__ import annotations

import math

import numpy as np
import pytest

from steadytrain.data.results.scores import BINS, calibration_of, chance_words, class_ratio


@pytest.mark.parametrize("n", [1, 40, 240, 5_000])
def test_chance_is_what_a_model_shows_whose_probabilities_are_true(n: int) -> None:
    draw = np.random.default_rng(n)
    p = draw.beta(4, 1.2, n)
    told = calibration_of(p, draw.random(n) < p)
    at = np.clip(np.ceil(p * BINS) - 1, 0, BINS - 1).astype(np.int64)
    draws = [np.bincount(at, p - (draw.random(n) < p), BINS) for _ in range(1_000)]
    eces = np.abs(draws).sum(1) / n
    assert told.chance == pytest.approx(eces.mean(), rel=0.06)
    assert told.chance_high == pytest.approx(np.quantile(eces, 0.95), rel=0.08)
    again = calibration_of(p, np.zeros(n, np.bool_))
    assert (again.chance, again.chance_high) == (told.chance, told.chance_high)  # whatever is right


def test_a_calibrated_model_is_within_chance_and_one_that_claims_too_much_is_not() -> None:
    draw = np.random.default_rng(0)
    within = 0
    for _ in range(100):
        p = draw.beta(4, 1.2, 300)
        told = calibration_of(p, draw.random(300) < p)
        within += told.ece <= told.chance_high
    assert 88 <= within <= 100  # of 100, 95 are expected
    claims = calibration_of(np.full(300, 0.95), draw.random(300) < 0.7)
    assert claims.ece > 2 * claims.chance_high


def test_probabilities_at_the_ends_and_that_are_not_finite() -> None:
    sure = calibration_of(np.array([0.0, 1.0, 1.0]), np.array([False, True, True]))
    assert (sure.ece, sure.chance, sure.chance_high) == (0, 0, 0)
    assert math.isnan(calibration_of(np.array([math.nan]), np.array([True])).chance)


def test_words_and_ratios() -> None:
    assert chance_words(0.058, 0.0891, 1) == "a perfectly calibrated model shows 5.8 % (up to 8.9 %) on 1 image"
    assert (class_ratio([100, 10, 0]), class_ratio([3]), class_ratio([0, 0])) == (10, 1, 1)
