"""Whether a load oscillates, and how: square waves with noise are measured, anything else gives no alarm."""

from __future__ import annotations

from itertools import accumulate
from random import Random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.monitor.process_watch.series import averaged, square

from steadytrain.monitor.process_watch.rhythm import even, levels, rhythm

SEEDS = st.integers(0, 2**32)


def sampled_square(
    num: int, period: float, duty: float, low: float, high: float, noise: float, jitter: float, seed: int
) -> list[float]:
    """Means over unit intervals of a square wave whose periods differ by ``jitter``, with white noise, from 0 to 1."""
    random, fine = Random(seed), 20
    length = period * (1 + jitter * random.uniform(-1, 1))
    place, values = random.random() * length, []
    for _ in range(num):
        total = 0.0
        for _ in range(fine):
            total += high if place < duty * length else low
            place += 1 / fine
            if place >= length:
                place, length = place - length, period * (1 + jitter * random.uniform(-1, 1))
        values.append(min(1.0, max(0.0, total / fine + random.gauss(0, noise))))
    return values


@given(
    period=st.floats(6, 40),
    cycles=st.floats(6, 15),
    duty=st.floats(0.2, 0.8),
    low=st.floats(0, 0.3),
    swing=st.floats(0.5, 0.7),
    noise=st.sampled_from([0.0, 0.03, 0.08]),
    jitter=st.sampled_from([0.0, 0.08]),
    seed=SEEDS,
)
def test_period_and_duty_of_a_noisy_square_wave_are_found(
    period: float, cycles: float, duty: float, low: float, swing: float, noise: float, jitter: float, seed: int
) -> None:
    assume(min(duty, 1 - duty) * period >= 2.5)
    assume(noise < 0.08 or (cycles >= 10 and period >= 10))  # much noise wants more to be heard through
    values = sampled_square(round(period * cycles), period, duty, low, low + swing, noise, jitter, seed)
    pattern = rhythm(values, interval_seconds=0.2)
    assert pattern is not None
    assert pattern.period_seconds == pytest.approx(period * 0.2, rel=0.1)
    assert pattern.duty == pytest.approx(duty, abs=0.1)
    assert pattern.low < pattern.high


@given(num=st.integers(0, 400), level=st.floats(0, 1), spread=st.floats(0, 0.06), seed=SEEDS)
def test_a_steady_load_is_no_oscillation(num: int, level: float, spread: float, seed: int) -> None:
    random = Random(seed)
    values = [min(1.0, max(0.0, level + random.gauss(0, spread))) for _ in range(num)]
    assert rhythm(values, interval_seconds=0.2) is None


@given(num=st.integers(0, 400), kind=st.sampled_from(["even", "normal", "spikes"]), seed=SEEDS)
def test_noise_is_no_oscillation(num: int, kind: str, seed: int) -> None:
    random = Random(seed)
    if kind == "even":
        values = [random.random() for _ in range(num)]
    elif kind == "normal":
        values = [min(1.0, max(0.0, random.gauss(0.5, 0.25))) for _ in range(num)]
    else:
        values = [float(random.random() < 0.2) for _ in range(num)]
    assert rhythm(values, interval_seconds=0.2) is None


def test_noise_that_wanders_hardly_ever_looks_like_an_oscillation() -> None:
    def wander(random: Random) -> list[float]:
        steps = accumulate((random.gauss(0, 0.15) for _ in range(200)), lambda value, step: 0.8 * value + step)
        return [min(1.0, max(0.0, 0.5 + value)) for value in steps]

    alarms = sum(rhythm(wander(Random(seed)), interval_seconds=0.2) is not None for seed in range(200))
    assert alarms <= 10


@given(num=st.integers(12, 300), share=st.floats(0.1, 0.9))
def test_starting_or_stopping_once_is_no_oscillation(num: int, share: float) -> None:
    cut = round(share * num)
    assume(0 < cut < num)
    assert rhythm([0.0] * cut + [1.0] * (num - cut), interval_seconds=0.2) is None
    assert rhythm([step / num for step in range(num)], interval_seconds=0.2) is None


def test_two_periods_are_too_few_to_believe_in() -> None:
    assert rhythm(([1.0] * 10 + [0.0] * 10) * 2, interval_seconds=0.2) is None


@pytest.mark.parametrize("period", [2.5, 4.0, 9.0])
def test_a_driver_that_averages_a_second_hides_neither_period_nor_duty(period: float) -> None:
    mean = averaged(square(period, 0.6), 1.0)
    pattern = rhythm([round(mean(step * 0.1), 2) for step in range(600)], interval_seconds=0.1)
    assert pattern is not None
    assert pattern.period_seconds == pytest.approx(period, rel=0.1)
    assert pattern.duty == pytest.approx(0.6, abs=0.1)


def test_the_period_is_the_shortest_that_fits() -> None:
    pattern = rhythm(([1.0] * 6 + [0.0] * 4) * 20, interval_seconds=1.0)
    assert pattern is not None and pattern.period_seconds == pytest.approx(10.0, rel=0.001)
    assert pattern.cycles == pytest.approx(20.0, rel=0.001)


@given(st.lists(st.tuples(st.floats(0.05, 3.0), st.floats(0, 1)), min_size=1, max_size=60), st.floats(0.05, 2.0))
def test_spacing_intervals_evenly_makes_means_of_what_was_there(
    intervals: list[tuple[float, float]], to: float
) -> None:
    times = list(accumulate(length for length, _ in intervals))
    values = [value for _, value in intervals]
    assert all(min(values) - 1e-6 <= value <= max(values) + 1e-6 for value in even(times, values, to))


def test_intervals_of_one_length_stay_as_they_are() -> None:
    assert even([0.5, 1.0, 1.5, 2.0], [0.1, 0.9, 0.1, 0.9], 0.5) == pytest.approx([0.1, 0.9, 0.1, 0.9])
    assert even([], [], 0.5) == []


def test_levels_are_those_at_rest_and_not_those_on_the_way() -> None:
    assert levels([0.0] * 5 + [0.4, 0.6] * 2 + [1.0] * 9) == (0.0, 1.0)
    assert levels([0.7, 0.7]) == (0.7, 0.7)
