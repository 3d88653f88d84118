"""Precision, recall and F1, average precision and calibration, from exact counts and scores of whole data sets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from steadytrain.errors import DataError
from steadytrain.format import count, percent
from steadytrain.intervals import wilson


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


UNEVEN = 10.0
"""The ratio of the images of the largest class to those of the smallest from which on macro recall stands by top-1."""


def class_ratio(counts: Iterable[int]) -> float:
    """Return how many times as many images the largest class has as the smallest that has any.

    >>> class_ratio([761, 23, 0]), class_ratio([])
    (33.08695652173913, 1.0)
    """
    present = [images for images in counts if images > 0]
    return max(present) / min(present) if present else 1.0


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
    by_class = areas_under_roc if figure == "auc" else average_precisions
    if labels.ndim == 1:  # of several labels a logit ranks as its probability does
        scores = logits.astype(np.float64)
        scores = np.exp(scores - np.logaddexp.reduce(scores, 1, keepdims=True))
        every = by_class(scores, labels[:, None] == np.arange(scores.shape[1]))
    else:  # a label at a time: a table of all in float64 would be the largest of all
        columns = zip(logits.T[:, :, None], labels.T[:, :, None], strict=True)
        every = tuple(by_class(logit.astype(np.float64), label)[0] for logit, label in columns)
    values = [value for value in every if value is not None]
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


BINS = 15
"""Equal-width bins of the top-1 probability (Guo et al. 2017, "On Calibration of Modern Neural Networks")."""

_DRAWS, _PARTS = 500, 32  # of chance; and of a bin, whose images count as equally sure in it


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
    """The calibration of top-1 probabilities; of several labels, of those of each label for each image.

    ``ece``: the expected calibration error, the mean over images of the difference between probability and accuracy in
    their bin; of several labels, over images and labels, between probability and the share that has the label.
    ``confidence``: the mean probability. ``chance``, ``chance_high``: the ECE that a perfectly calibrated model shows
    with these probabilities on as many images, in the mean and in 95 % of cases at most. All are NaN where a
    probability is not finite.
    """

    ece: float
    confidence: float
    chance: float
    chance_high: float
    bins: tuple[Bin, ...]

    @property
    def figures(self) -> dict[str, float]:
        """The figures by their keys in JSON."""
        chance = {"ece_by_chance": self.chance, "ece_by_chance_high": self.chance_high}
        return {"ece": self.ece, **chance, "confidence": self.confidence}


def chance_words(chance: float, high: float, n: int) -> str:
    """Say what ECE a perfectly calibrated model shows on ``n`` images, in the mean and in 95 % of cases at most."""
    return f"a perfectly calibrated model shows {percent(chance, 1)} (up to {percent(high, 1)}) on {count(n, 'image')}"


def calibration_of(p: NDArray[np.float64], right: NDArray[np.bool_], bins: int = BINS) -> Calibration:
    """Compute the expected calibration error of probabilities float64[n] of what is ``right``, bool[n], or not."""
    is_finite = bool(np.isfinite(p).all()) and len(p) > 0
    p = p if is_finite else np.zeros(0)
    at = np.clip(np.ceil(p * bins) - 1, 0, bins - 1).astype(np.int64)
    counts = np.bincount(at, minlength=bins)
    sums, rights = (np.bincount(at, values, bins) if is_finite else np.zeros(bins) for values in (p, right))
    rows = tuple(
        Bin(k / bins, (k + 1) / bins, n, total / n if n else None, r / n if n else None)
        for k, (n, total, r) in enumerate(zip(counts.tolist(), sums.tolist(), rights.tolist(), strict=True))
    )
    if not is_finite:
        nan = float("nan")
        return Calibration(nan, nan, nan, nan, rows)
    ece, confidence, chance = np.abs(sums - rights).sum() / len(p), sums.sum() / len(p), _draw_eces(p, at, bins)
    return Calibration(float(ece), float(confidence), float(chance.mean()), float(np.quantile(chance, 0.95)), rows)


def _draw_eces(p: NDArray[np.float64], at: NDArray[np.int64], bins: int) -> NDArray[np.float64]:
    """Draw ECEs of a perfectly calibrated model: each prediction is right with its own probability, and by chance.

    The consistency bars of Broecker and Smith 2007, "Increasing the Reliability of Reliability Diagrams", for the
    probabilities at hand. The same each time; images of a bin that are nearly equally sure are drawn together.

    Args:
        p: float64[n], the probabilities.
        at: int64[n], the bin of each.
    """
    part = np.clip(np.ceil((p * bins - at) * _PARTS) - 1, 0, _PARTS - 1).astype(np.int64)
    cells, inverse, sizes = np.unique(at * _PARTS + part, return_inverse=True, return_counts=True)
    expected = np.bincount(inverse, p)
    drawn = np.random.default_rng(0).binomial(sizes, np.clip(expected / sizes, 0, 1), (_DRAWS, len(cells)))
    starts = np.flatnonzero(np.diff(cells // _PARTS, prepend=-1))
    eces: NDArray[np.float64] = np.abs(np.add.reduceat(drawn - expected, starts, axis=1)).sum(1) / len(p)
    return eces


@dataclass(frozen=True)
class Promise:
    """The probability from which on answers are right as often as was asked, on images that were held out.

    ``threshold``: the probability. ``coverage``: the share of images with such an answer. ``top1``, ``low``, ``high``:
    the share of them that is right, and its 95 % interval. ``images``: what these are, in words.
    """

    target: float
    threshold: float
    coverage: float
    top1: float
    low: float
    high: float
    images: str

    @property
    def words(self) -> str:
        """Say from which probability on, of how many answers, and what was seen."""
        return (
            f"sure from a probability of {percent(self.threshold, 1)} on: {percent(self.coverage, 1)} of {self.images},"
            f" of which {percent(self.top1, 1)} are right ({100 * self.low:.1f} to {percent(self.high, 1)})"
        )


def coverage_curve(p: NDArray[Any], right: NDArray[np.bool_]) -> tuple[NDArray[np.float64], NDArray[np.int64], Any]:
    """Rank answers by their probability, the surest first.

    Returns:
        float64 [m] distinct probabilities, falling; int64 [m] answers with at least that; and int64 [m] right ones.

    >>> p, n, num_right = coverage_curve(np.array([0.9, 0.6, 0.6]), np.array([True, True, False]))
    >>> p.tolist(), n.tolist(), num_right.tolist()
    ([0.9, 0.6], [1, 3], [1, 2])
    """
    order = np.argsort(-p, kind="stable")
    ends = np.append(np.flatnonzero(np.diff(p[order])), len(order) - 1) if len(order) else np.zeros(0, np.int64)
    return p[order][ends].astype(np.float64), ends + 1, np.cumsum(right[order])[ends]


def promise(
    p: NDArray[Any], right: NDArray[np.bool_], target: float, images: str, effective_n: float | None = None
) -> Promise:
    """Find the least probability from which on so large a share of answers is right, beyond doubt.

    That is where the lower end of its 95 % interval (Wilson) is the ``target`` at least: on few images even answers
    that are all right promise less.

    Args:
        p: float [n], of each answer.
        right: bool [n].
        target: the share that is to be right.
        images: what they are, in words.
        effective_n: how many independent answers these are worth; None: all.

    Raises:
        DataError: it cannot be promised; the message says what can.

    >>> found = promise(np.linspace(1, 0, 200), np.arange(200) < 150, 0.9, "200 images")
    >>> found.coverage, round(found.low, 3)
    (0.79, 0.903)
    """
    values, n, num_right = coverage_curve(p, right)
    share = (effective_n or len(p)) / max(1, len(p))
    intervals = [wilson(r / k, k * share) for r, k in zip(num_right.tolist(), n.tolist(), strict=True)]
    enough = [row for row, interval in enumerate(intervals) if interval.low >= target]
    if not enough:
        best = max(range(len(intervals)), key=lambda row: intervals[row].low, default=None)
        most = "" if best is None else f": at most {intervals[best].low:.3f}, of the surest {percent(n[best] / len(p))}"
        raise DataError(f"--abstain-at {target:g} cannot be promised on {images}{most}; more images may allow more")
    row = enough[-1]
    return Promise(
        target,
        float(values[row]),
        float(n[row]) / len(p),
        float(num_right[row]) / float(n[row]),
        intervals[row].low,
        intervals[row].high,
        images,
    )
