"""Metrics of an evaluation: precision, recall and F1 of each class and their means, and how far probabilities are true.

They are computed from exact counts over the whole data set, never as a mean over batches.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from steadytrain.training.evaluation import Evaluation

BINS = 15
"""Equal-width bins of the top-1 probability (Guo et al. 2017, "On Calibration of Modern Neural Networks")."""


@dataclass(frozen=True)
class Score:
    """Precision, recall and F1 as fractions; None where there is nothing to divide by.

    ``precision``: of the images predicted as a class, those that are of it. ``recall``: of the images of a class, those
    predicted as it. ``f1``: their harmonic mean.
    """

    precision: float | None
    recall: float | None
    f1: float | None


@dataclass(frozen=True)
class Bin:
    """Images whose top-1 probability is above ``low`` and at most ``high``: how many, its mean, and how many right."""

    low: float
    high: float
    n: int
    confidence: float | None
    top1: float | None


@dataclass(frozen=True)
class Calibration:
    """How far top-1 probabilities are true.

    ``ece``: the expected calibration error, the mean over images of the difference between probability and accuracy in
    their bin. ``confidence``: the mean top-1 probability. Both are NaN where a probability is not finite.
    """

    ece: float
    confidence: float
    bins: tuple[Bin, ...]


def class_scores(evaluation: Evaluation) -> tuple[Score, ...]:
    """Compute precision, recall and F1 of each class, in the order of the outputs.

    A class that has no images has neither recall nor F1; one that is never predicted has no precision, and an F1 of 0.

    Args:
        evaluation: with the outputs for each image.

    >>> outputs = np.array([[0, 0.9, 0.1, 1], [0, 0.8, 0.2, 1], [0, 0.6, 0.9, 2]], np.float32)
    >>> told = Evaluation(n=3, loss=0.4, top1=2 / 3, top5=1.0, right=(2, 0), total=(2, 1), outputs=outputs)
    >>> class_scores(told)[0]
    Score(precision=0.6666666666666666, recall=1.0, f1=0.8)
    """
    assert evaluation.outputs is not None
    predicted = np.bincount(evaluation.outputs[:, 0].astype(np.int64), minlength=len(evaluation.total)).tolist()
    return tuple(
        Score(
            precision=right / guesses if guesses else None,
            recall=right / n if n else None,
            f1=2 * right / (n + guesses) if n else None,
        )
        for right, n, guesses in zip(evaluation.right, evaluation.total, predicted, strict=True)
    )


def macro(scores: tuple[Score, ...]) -> Score:
    """Average scores over the classes that have images, all weighing the same; a precision of None counts as 0."""
    present = [score for score in scores if score.recall is not None]
    if not present:
        return Score(None, None, None)
    columns = zip(*((score.precision or 0.0, score.recall or 0.0, score.f1 or 0.0) for score in present), strict=True)
    return Score(*(sum(column) / len(present) for column in columns))


def calibration(evaluation: Evaluation, bins: int = BINS) -> Calibration:
    """Compute the expected calibration error (Guo et al. 2017, equation 3).

    Args:
        evaluation: with the outputs for each image.
        bins: of equal width, between 0 and 1.

    >>> outputs = np.array([[0, 0.9, 0.1, 1], [0, 0.9, 2.3, 2]], np.float32)
    >>> told = Evaluation(n=2, loss=1.2, top1=0.5, top5=1.0, right=(1, 0), total=(1, 1), outputs=outputs)
    >>> round(calibration(told).ece, 6)
    0.4
    """
    assert evaluation.outputs is not None
    p, right = evaluation.outputs[:, 1].astype(np.float64), evaluation.outputs[:, 3] == 1
    is_finite = bool(np.isfinite(p).all()) and len(p) > 0
    at = np.clip(np.ceil(p * bins) - 1, 0, bins - 1).astype(np.int64) if is_finite else np.zeros(0, np.int64)
    counts = np.bincount(at, minlength=bins)
    sums, rights = ((np.bincount(at, values, bins) if is_finite else np.zeros(bins)) for values in (p, right))
    rows = tuple(
        Bin(k / bins, (k + 1) / bins, n, total / n if n else None, r / n if n else None)
        for k, (n, total, r) in enumerate(zip(counts.tolist(), sums.tolist(), rights.tolist(), strict=True))
    )
    if not is_finite:
        return Calibration(float("nan"), float("nan"), rows)
    return Calibration(float(np.abs(sums - rights).sum()) / len(p), float(sums.sum()) / len(p), rows)
