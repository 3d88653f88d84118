"""Detect oscillation of a utilisation: its period, and the part of it for which the load is high.

The two levels are those that part the values best (N. Otsu, "A threshold selection method from gray-level histograms",
1979). The period is the usual time between two rises from the lower to the higher one; most of them have to be about
that long, and the load has to resemble itself a period later more than noise would.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from statistics import fmean, median, median_low

import numpy as np

LEAST_SWING = 0.15
_LEAST_CYCLES = 3
_LEAST_SAMPLES_A_PERIOD = 4
_LEAST_CORRELATION = 0.3
_SIMILAR = 0.3  # share of the usual time between two rises: the others differ by no more
_LEAST_SIMILAR = 0.7


@dataclass(frozen=True, kw_only=True)
class Rhythm:
    """A load that is ``high`` for ``duty`` (a share) of each ``period_seconds`` and ``low`` for the rest.

    ``cycles`` of it were seen.
    """

    period_seconds: float
    duty: float
    low: float
    high: float
    cycles: float


def rhythm(values: Sequence[float], *, interval_seconds: float) -> Rhythm | None:
    """Find the oscillation of evenly spaced ``values``; None where they are steady, only noisy, or too few.

    Args:
        values: loads, such as utilisation from 0 to 1.
        interval_seconds: between two of them. Periods from four of these to a quarter of the whole are found; the duty
            is right where both of its parts last for two and a half.

    >>> swing = rhythm([0.95, 0.95, 0.95, 0.1, 0.1] * 8, interval_seconds=0.5)
    >>> round(swing.period_seconds, 2), round(swing.duty, 2), swing.high, swing.low
    (2.5, 0.6, 0.95, 0.1)
    >>> rhythm([0.9, 0.91, 0.9, 0.89] * 10, interval_seconds=0.5) is None
    True
    """
    if len(values) < _LEAST_CYCLES * _LEAST_SAMPLES_A_PERIOD:
        return None
    low, high = levels(values)
    lengths = [b - a for a, b in pairwise(_rises(values, low, high))]
    if high - low < LEAST_SWING or len(lengths) < _LEAST_CYCLES:
        return None
    usual = median(lengths)
    similar = [length for length in lengths if abs(length - usual) <= max(1, _SIMILAR * usual)]
    period = fmean(similar) if similar else usual
    if len(similar) < _LEAST_SIMILAR * len(lengths) or period < _LEAST_SAMPLES_A_PERIOD:
        return None
    lag = round(period)
    # Of white noise the correlation of n pairs has a standard deviation of 1 / sqrt(n).
    if np.corrcoef(values[:-lag], values[lag:])[0, 1] < max(_LEAST_CORRELATION, 4 / math.sqrt(len(values) - lag)):
        return None
    return Rhythm(
        period_seconds=period * interval_seconds,
        duty=min(1.0, max(0.0, (fmean(values) - low) / (high - low))),
        low=low,
        high=high,
        cycles=len(values) / period,
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
    typical = median_low([b - a for a, b in pairwise(times)] or [interval_seconds])
    ends = np.array([times[0] - typical, *times])
    totals = np.concatenate([[0.0], np.cumsum(np.diff(ends) * values)])
    grid = ends[0] + interval_seconds * np.arange(int((ends[-1] - ends[0]) / interval_seconds + 1e-9) + 1)
    return [float(mean) for mean in np.diff(np.interp(grid, ends, totals)) / interval_seconds]


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


def _rises(values: Sequence[float], low: float, high: float) -> list[int]:
    """Find where the load comes above two thirds of the way up, having been below one third."""
    swing, was_low, rises = high - low, False, []
    for at, value in enumerate(values):
        if value < low + swing / 3:
            was_low = True
        elif was_low and value > low + swing * 2 / 3:
            rises.append(at)
            was_low = False
    return rises
