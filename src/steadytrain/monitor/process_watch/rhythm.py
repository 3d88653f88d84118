"""Detect oscillation of a utilisation: its period, and the part of it for which the load is high.

The period is the first high hill of the autocorrelation, refined at its multiples (hills of the autocorrelation are
what M. Vlachos, P. Yu and V. Castelli, "On periodicity detection and structural similarity", SDM 2005, confirm a period
by); the two levels are those that part the values best (N. Otsu, "A threshold selection method from gray-level
histograms", 1979). What is found must also be seen: the load must really rise about once a period.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import mul
from statistics import fmean, median, median_low, pstdev

LEAST_SWING = 0.15
_LEAST_CYCLES = 3.0
_LEAST_SAMPLES_A_PERIOD = 4
_LEAST_CORRELATION = 0.3
_MOST_IRREGULAR = 0.5


@dataclass(frozen=True, kw_only=True)
class Rhythm:
    """A load that is ``high`` for ``duty`` (a share) of each ``period_seconds`` and ``low`` for the rest.

    ``strength``: the autocorrelation at the period, 1 where each period is like the one before. ``cycles`` were seen.
    """

    period_seconds: float
    duty: float
    low: float
    high: float
    strength: float
    cycles: float

    @property
    def threshold(self) -> float:
        """Between the two levels."""
        return (self.low + self.high) / 2


def rhythm(values: Sequence[float], *, interval_seconds: float) -> Rhythm | None:
    """Find the oscillation of evenly spaced ``values``; None where they are steady, only noisy, or too few.

    Args:
        values: loads, such as utilisation from 0 to 1.
        interval_seconds: between two of them. Periods from four of these to a third of the whole are found; the duty is
            right where both of its parts last for two and a half.

    >>> swing = rhythm([0.95, 0.95, 0.95, 0.1, 0.1] * 8, interval_seconds=0.5)
    >>> round(swing.period_seconds, 2), round(swing.duty, 2), swing.high, swing.low
    (2.5, 0.6, 0.95, 0.1)
    >>> rhythm([0.9, 0.91, 0.9, 0.89] * 10, interval_seconds=0.5) is None
    True
    """
    num = len(values)
    if num < _LEAST_CYCLES * _LEAST_SAMPLES_A_PERIOD:
        return None
    low, high = levels(values)
    if high - low < LEAST_SWING:
        return None
    correlation = autocorrelation(values, int(num / _LEAST_CYCLES))
    peak = _first_hill(correlation, num)
    if peak is None:
        return None
    period = _refined(autocorrelation(values, num - num // 4), peak)
    if num / period < _LEAST_CYCLES or not _is_seen(values, period, low, high):
        return None
    return Rhythm(
        period_seconds=period * interval_seconds,
        duty=min(1.0, max(0.0, (fmean(values) - low) / (high - low))),
        low=low,
        high=high,
        strength=correlation[peak],
        cycles=num / period,
    )


def even(times: Sequence[float], values: Sequence[float], interval_seconds: float) -> list[float]:
    """Resample means over uneven intervals at even spacing.

    Args:
        times: seconds at which each interval ended, ascending; the first began one typical interval before.
        values: the mean over each.
        interval_seconds: of the answer.

    >>> even([1.0, 2.0, 4.0], [1.0, 0.0, 0.5], 1.0)
    [1.0, 0.0, 0.5, 0.5]
    """
    if not times:
        return []
    first = times[0] - (median_low(b - a for a, b in pairwise(times)) if len(times) > 1 else interval_seconds)
    ends = [first, *times]
    total = [0.0, *accumulate(value * (b - a) for value, (a, b) in zip(values, pairwise(ends), strict=True))]
    num = int((ends[-1] - first) / interval_seconds + 1e-9)

    def total_until(at: float) -> float:
        right = min(max(1, bisect_left(ends, at)), len(ends) - 1)
        width = ends[right] - ends[right - 1]
        part = (at - ends[right - 1]) / width if width > 0 else 0.0
        return total[right - 1] + (total[right] - total[right - 1]) * part

    totals = [total_until(first + step * interval_seconds) for step in range(num + 1)]
    return [(b - a) / interval_seconds for a, b in pairwise(totals)]


def levels(values: Sequence[float]) -> tuple[float, float]:
    """Return the lower quartile of the lower and the upper one of the higher values: between, a load is on its way.

    They are parted where the variance between both sides is largest (Otsu).

    >>> levels([0.1, 0.1, 0.2, 0.9, 0.9, 1.0, 0.1])
    (0.1, 0.9)
    """
    ordered = sorted(values)
    sums, num = list(accumulate(ordered)), len(ordered)
    if ordered[0] == ordered[-1]:
        return ordered[0], ordered[0]

    def between(cut: int) -> float:
        distance = sums[cut - 1] / cut - (sums[-1] - sums[cut - 1]) / (num - cut)
        return cut * (num - cut) * distance * distance

    cut = max(range(1, num), key=between)
    return ordered[(cut - 1) // 4], ordered[cut + (num - cut - 1) * 3 // 4]


def autocorrelation(values: Sequence[float], most: int) -> list[float]:
    """Correlate the values with themselves (Pearson), shifted by 0 to ``most`` places.

    >>> [round(value, 2) for value in autocorrelation([0, 1, 0, 1, 0, 1], 2)]
    [1.0, -1.0, 1.0]
    """
    mean = fmean(values)
    centred = [value - mean for value in values]
    squares = [0.0, *accumulate(value * value for value in centred)]
    correlations = []
    for lag in range(most + 1):
        product = sum(map(mul, centred, centred[lag:]))
        energy = squares[len(centred) - lag] * (squares[-1] - squares[lag])
        correlations.append(product / math.sqrt(energy) if energy > 0 else 0.0)
    return correlations


def _first_hill(correlation: Sequence[float], num: int) -> int | None:
    """Find the first hill that is nearly as high as any, behind the first valley, and too high for noise."""
    valley = next((lag for lag, value in enumerate(correlation) if value < 0.1), None)
    if valley is None:
        return None
    hills = [
        lag
        for lag in range(max(valley, _LEAST_SAMPLES_A_PERIOD), len(correlation) - 1)
        if correlation[lag - 1] <= correlation[lag] >= correlation[lag + 1]
    ]
    highest = max((correlation[lag] for lag in hills), default=0.0)
    if highest < _LEAST_CORRELATION:
        return None
    first = next(lag for lag in hills if correlation[lag] >= 0.85 * highest)
    top = max(range(first, min(len(correlation), first + first // 4 + 1)), key=correlation.__getitem__)
    # Of white noise the correlation of n pairs has a standard deviation of 1 / sqrt(n).
    return top if correlation[top] >= 4 / math.sqrt(num - top) else None


def _refined(correlation: Sequence[float], peak: int) -> float:
    """The period in samples: the top of the hill between samples, and of the hills at its multiples."""
    period, multiple = _top(correlation, peak), 2
    while (round(period * multiple) + peak // 4) < len(correlation) - 1:
        middle = round(period * multiple)
        reach = range(middle - max(1, peak // 4), middle + max(1, peak // 4) + 1)
        lag = max(reach, key=correlation.__getitem__)
        if correlation[lag] < 0.6 * correlation[peak] or lag in (reach[0], reach[-1]):
            break
        period = _top(correlation, lag) / multiple
        multiple += 1
    return period


def _top(correlation: Sequence[float], lag: int) -> float:
    """The top of the parabola through three neighbours."""
    before, top, after = correlation[lag - 1 : lag + 2]
    bend = before - 2 * top + after
    return lag + (0.5 * (before - after) / bend if bend < 0 else 0.0)


def _is_seen(values: Sequence[float], period: float, low: float, high: float) -> bool:
    """Return whether the values, smoothed over a tenth of the period, rise nearly evenly, once a period.

    A rise is where they come above two thirds of the way up, having been below one third.
    """
    width = max(1, round(period / 10))
    sums = [0.0, *accumulate(values)]
    swing, was_low, rises = high - low, False, []
    for at in range(len(values) - width + 1):
        value = (sums[at + width] - sums[at]) / width
        if value < low + swing / 3:
            was_low = True
        elif was_low and value > low + swing * 2 / 3:
            rises.append(at)
            was_low = False
    lengths = [b - a for a, b in pairwise(rises)]
    if len(lengths) < 2:
        return False
    return 0.7 <= median(lengths) / period <= 1.4 and pstdev(lengths) / fmean(lengths) <= _MOST_IRREGULAR
