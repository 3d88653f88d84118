"""Compare two models by a test on their predictions for the same images."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from steadytrain.errors import InputError
from steadytrain.format import count, percent
from steadytrain.intervals import Interval

SIGNIFICANT = 0.05
"""Probability below which a difference is called shown."""
RESAMPLES = 10_000
"""Times that the bootstrap draws as many images as there are."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two models on the same images.

    ``n`` images; ``right_a``, ``right_b``: right answers of each; ``only_a``, ``only_b``: images that only this one
    got right; ``p``: of McNemar's test; ``gain``: 95 % interval of top-1 of ``b`` less that of ``a``, as fractions.
    """

    a: str
    b: str
    n: int
    right_a: int
    right_b: int
    only_a: int
    only_b: int
    p: float
    gain: Interval

    @property
    def verdict(self) -> str:
        """The outcome in a sentence."""
        p = f"p = {self.p:.2g}" if self.p >= 0.001 else "p < 0.001"
        better, worse = (self.b, self.a) if self.right_b > self.right_a else (self.a, self.b)
        high, low = sorted((self.right_a / self.n, self.right_b / self.n), reverse=True)
        if self.p < SIGNIFICANT:
            return f"{better} is better than {worse}: {percent(high, 1)} against {percent(low, 1)}, {p}"
        values = f"{percent(self.right_a / self.n, 1)} ({self.a}) and {percent(self.right_b / self.n, 1)} ({self.b})"
        return f"no difference can be shown: {values}, {p}"

    @property
    def details(self) -> str:
        """The figures behind the verdict, in a sentence."""
        return (
            f"{count(self.n, 'image')}: {self.only_a:,} right only in {self.a}, {self.only_b:,} only in {self.b}"
            f" (McNemar's exact test); top-1 of {self.b} less that of {self.a}: {100 * self.gain.low:+.1f} to"
            f" {100 * self.gain.high:+.1f} points (95 %, bootstrap over images)"
        )


def mcnemar(only_a: int, only_b: int) -> float:
    """Return the probability of a split at least as uneven if both models are equally good: exact, two-sided.

    McNemar 1947, "Note on the sampling error of the difference between correlated proportions or percentages", with
    the binomial distribution in place of its normal approximation.

    ``only_a``, ``only_b``: images that only one of the two models got right.

    >>> round(mcnemar(10, 25), 4), mcnemar(3, 3)
    (0.0167, 1.0)
    """
    trials, fewer = only_a + only_b, min(only_a, only_b)
    log_scale = math.lgamma(trials + 1) - trials * math.log(2)
    tail = sum(math.exp(log_scale - math.lgamma(k + 1) - math.lgamma(trials - k + 1)) for k in range(fewer + 1))
    return min(1.0, 2 * tail)


def compare(a: str | Path, b: str | Path) -> Comparison:
    """Compare what two models predicted for the same images.

    ``a``, ``b``: runs' folders, whose ``predictions.csv`` is read, or such files, as ``steady evaluate --per-image``
    writes them.

    Raises:
        InputError: one of them has no predictions, or they are of other images.
    """
    import numpy as np

    first, second = _right_of(Path(a)), _right_of(Path(b))
    if first.keys() != second.keys():
        common = len(first.keys() & second.keys())
        raise InputError(
            f"{a} and {b} were evaluated on other images ({common:,} in common of {len(first):,} and {len(second):,}):"
            " evaluate both on one data set (steady evaluate RUN DATA --per-image FILE.csv) and compare the two files"
        )
    if not first:
        raise InputError(f"{a} holds no predictions: evaluate again (steady evaluate RUN --per-image FILE.csv)")
    n, only_a = len(first), sum(right and not second[image] for image, right in first.items())
    only_b = sum(right and not first[image] for image, right in second.items())
    # A bootstrap of the images draws these three counts, which are all that the difference depends on.
    shares = [only_a / n, only_b / n, (n - only_a - only_b) / n]
    resampled = np.random.default_rng(0).multinomial(n, shares, size=RESAMPLES)
    low, high = np.percentile((resampled[:, 1] - resampled[:, 0]) / n, [2.5, 97.5]).tolist()
    return Comparison(
        a=str(a),
        b=str(b),
        n=n,
        right_a=sum(first.values()),
        right_b=sum(second.values()),
        only_a=only_a,
        only_b=only_b,
        p=mcnemar(only_a, only_b),
        gain=Interval(low, high),
    )


def _right_of(place: Path) -> dict[tuple[str, int, str], bool]:
    """Read whether each image, named by record file, record and true class, was predicted right."""
    from steadytrain.data.results.predictions import read_predictions

    file = place / "predictions.csv" if place.is_dir() else place
    if not file.exists():
        raise InputError(f"there is no {file}: steady evaluate {place} --per-image {file} writes it")
    return {(row.shard, row.record, row.true): row.predicted == row.true for row in read_predictions(file)}
