"""Quantiles, confidence intervals and the spread over repeats of a figure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

Z95 = 1.959963984540054  # the standard normal's 97.5 % quantile


def quantiles(values: Sequence[float], *shares: float) -> tuple[float, ...]:
    """Return quantiles, each a value of the sample: the least that so large a share of the values does not exceed.

    Args:
        values: in any order, one at least.
        shares: above 0, to 1.

    >>> quantiles([float(value) for value in range(1, 101)], 0.05, 0.5, 0.95)
    (5.0, 50.0, 95.0)
    """
    ordered = sorted(values)
    return tuple(ordered[max(0, math.ceil(share * len(ordered) - 1e-9) - 1)] for share in shares)


@dataclass(frozen=True)
class Interval:
    """An interval from ``low`` to ``high``, both fractions."""

    low: float
    high: float

    @property
    def words(self) -> str:
        """Both ends, in percent: 65.3 to 78.6."""
        return f"{100 * self.low:.1f} to {100 * self.high:.1f}"


def wilson(fraction: float, n: float) -> Interval:
    """Return the 95 % confidence interval of a share of ``n`` independent trials.

    Stays within 0 and 1, and is right also for small ``n`` and for shares near 0 or 1, where the textbook
    normal interval is not (E. B. Wilson, Probable inference, the law of succession, and statistical inference,
    J. Am. Stat. Assoc. 22, 1927, 209-212).

    Args:
        fraction: the share seen, from 0 to 1.
        n: number of trials, or as many as dependent ones are worth; with none, the interval is everything.

    >>> wilson(0.9, 100)
    Interval(low=0.8256343384950865, high=0.9447708629393249)
    >>> wilson(1.0, 0)
    Interval(low=0.0, high=1.0)
    """
    if n <= 0 or not 0 <= fraction <= 1:
        return Interval(0.0, 1.0)
    spread = Z95**2 / n
    middle = (fraction + spread / 2) / (1 + spread)
    half = Z95 / (1 + spread) * math.sqrt(fraction * (1 - fraction) / n + spread / (4 * n))
    return Interval(max(0.0, middle - half), min(1.0, middle + half))


@dataclass(frozen=True)
class Spread:
    """A figure over ``n`` repeats: its mean, the sample standard deviation ``std``, the 95 % interval of the mean."""

    n: int
    mean: float
    std: float
    mean_95: Interval


def spread(values: Iterable[float], *, are_shares: bool = False) -> Spread | None:
    """Return mean and spread of a figure over repeats; None for fewer than two finite values.

    The interval is Student's: the mean, plus and minus t(0.975, n - 1) std / sqrt(n). It is exact where the figure is
    normally distributed over seeds, and says nothing about other data or another recipe.

    Args:
        values: one of each repeat.
        are_shares: keep the interval within 0 and 1.

    >>> told = spread([0.90, 0.92, 0.91])
    >>> round(told.mean, 4), round(told.std, 4), round(told.mean_95.low, 4), round(told.mean_95.high, 4)
    (0.91, 0.01, 0.8852, 0.9348)
    """
    known = [value for value in values if math.isfinite(value)]
    if len(known) < 2:
        return None
    middle, std = fmean(known), stdev(known)
    half = student95(len(known) - 1) * std / math.sqrt(len(known))
    low, high = middle - half, middle + half
    return Spread(
        len(known), middle, std, Interval(max(0.0, low), min(1.0, high)) if are_shares else Interval(low, high)
    )


def student95(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t for 1 or more degrees of freedom (Abramowitz & Stegun, 26.7.3-4)."""

    def within(angle: float) -> float:  # the probability of |t| <= sqrt(freedom) tan(angle)
        cosine, term, total = math.cos(angle), 1.0, 0.0
        for k in range(freedom // 2):
            total += term
            term *= cosine**2 * ((2 * k + 2) / (2 * k + 3) if freedom % 2 else (2 * k + 1) / (2 * k + 2))
        if freedom % 2:
            return 2 / math.pi * (angle + math.sin(angle) * cosine * total)
        return math.sin(angle) * total

    low, high = 0.0, math.pi / 2
    while (middle := (low + high) / 2) not in (low, high):
        low, high = (middle, high) if within(middle) < 0.95 else (low, middle)
    return math.sqrt(freedom) * math.tan(low)
