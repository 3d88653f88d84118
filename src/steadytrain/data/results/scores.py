"""Precision, recall, F1 and average precision, from exact counts and from the scores of whole data sets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class ClassScore:
    """Precision, recall and F1 as fractions; None where there is nothing to divide by.

    ``precision``: of the images predicted as a class, those that are of it. ``recall``: of the images of a class, those
    predicted as it. ``f1``: their harmonic mean.
    """

    precision: float | None
    recall: float | None
    f1: float | None


def score_of(right: int, n: int, guesses: int) -> ClassScore:
    """Compute the score of a class: images rightly predicted as it, images of it, images predicted as it."""
    return ClassScore(
        precision=right / guesses if guesses else None,
        recall=right / n if n else None,
        f1=2 * right / (n + guesses) if n else None,
    )


def macro(scores: Sequence[ClassScore]) -> ClassScore:
    """Average scores over the classes that have images, all weighing the same; a precision of None counts as 0."""
    present = [score for score in scores if score.recall is not None]
    if not present:
        return ClassScore(None, None, None)
    columns = zip(*((score.precision or 0.0, score.recall or 0.0, score.f1 or 0.0) for score in present), strict=True)
    return ClassScore(*(sum(column) / len(present) for column in columns))


@dataclass(frozen=True)
class LabelScore(ClassScore):
    """Add to the score of a label the images that have it, for which it is predicted, and for which rightly so.

    ``ap``: its average precision; None where no image has it.
    """

    n: int
    predicted: int
    right: int
    ap: float | None


def label_scores(
    scores: NDArray[Any], predicted: NDArray[np.bool_], has_label: NDArray[np.bool_]
) -> tuple[LabelScore, ...]:
    """Compute the scores of each label.

    Args:
        scores: float[n, L], logits or probabilities, by which images are ranked.
        predicted, has_label: bool[n, L].
    """
    counts = ((part).sum(0).tolist() for part in (predicted & has_label, has_label, predicted))
    return tuple(
        LabelScore(**vars(score_of(right, n, guesses)), right=right, n=n, predicted=guesses, ap=ap)
        for right, n, guesses, ap in zip(*counts, average_precisions(scores, has_label), strict=True)
    )


def mean_over_classes(figure: str, logits: NDArray[np.float32], labels: NDArray[Any]) -> float:
    """Average over classes, each against the rest by its probabilities, their ``auc`` or average precision (``map``).

    Classes of which there is none are left out; NaN without any. ``labels``: int64[n], or [n, K] of several an image.
    """
    scores = logits.astype(np.float64)
    if labels.ndim == 1:  # of several labels a logit ranks as its probability does
        scores = np.exp(scores - np.logaddexp.reduce(scores, 1, keepdims=True))
        labels = labels[:, None] == np.arange(scores.shape[1])
    by_class = (areas_under_roc if figure == "auc" else average_precisions)(scores, labels)
    values = [value for value in by_class if value is not None]
    return sum(values) / len(values) if values else float("nan")


def areas_under_roc(scores: NDArray[Any], labels: NDArray[Any]) -> tuple[float | None, ...]:
    """Compute the area under the ROC curve of each label: how often an image that has it scores above one that has not.

    Of equal scores half count, as by scikit-learn's ``roc_auc_score``. A label that all images have, or none, has none.
    """
    areas = list[float | None]()
    for score, has_label in zip(scores.T, labels.T > 0, strict=True):
        _, place, counts = np.unique(score, return_inverse=True, return_counts=True)
        ranks = (np.cumsum(counts) - (counts - 1) / 2)[place]  # from 1; equal scores share their mean
        positives, negatives = int(has_label.sum()), int((~has_label).sum())
        above = ranks[has_label].sum() - positives * (positives + 1) / 2
        areas.append(float(above / (positives * negatives)) if positives and negatives else None)
    return tuple(areas)


def average_precisions(scores: NDArray[Any], labels: NDArray[Any]) -> tuple[float | None, ...]:
    """Compute the average precision of each label, over all images at once.

    The images are ranked by their scores; from each score to the next lower one recall rises, and the precision at the
    lower one is weighted by that (no interpolation, equal scores count together), as scikit-learn's
    ``average_precision_score`` does. Of a label that no image has there is none; NaN where a score is not finite.

    Args:
        scores: float32[n, K], logits or probabilities.
        labels: [n, K], 1 for each label that an image has, else 0.

    >>> average_precisions(np.array([[0.9], [0.8], [0.1]], np.float32), np.array([[1], [0], [1]]))
    (0.8333333333333333,)
    """
    precisions: list[float | None] = []
    for score, has_label in zip(scores.T, labels.T, strict=True):
        positives = int(has_label.sum())
        if not positives or not np.isfinite(score).all():
            precisions.append(float("nan") if positives else None)
            continue
        order = np.argsort(-score, kind="stable")
        ends = np.append(np.flatnonzero(np.diff(score[order])), len(order) - 1)
        right = np.cumsum(has_label[order] > 0)[ends]
        gains = np.diff(right, prepend=0)
        precisions.append(float((gains * (right / (ends + 1))).sum() / positives))
    return tuple(precisions)
