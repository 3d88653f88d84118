"""Metrics of an evaluation: precision, recall and F1 of each class and their means, the same of several labels for each
image with their average precision, and how far probabilities are true.

They are computed from exact counts over the whole data set, never as a mean over batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from steadytrain.config.figures import NEED_OUTPUTS
from steadytrain.data.arrays import Ints
from steadytrain.data.results.scores import (
    BINS,
    UNEVEN,
    Calibration,
    ClassScore,
    LabelScore,
    class_ratio,
    label_scores,
    mean_over_classes,
    score_of,
)
from steadytrain.data.results.scores import calibration_of as calibration_of
from steadytrain.data.results.scores import macro as macro
from steadytrain.intervals import student95
from steadytrain.training.evaluation import Evaluation


def figure(evaluation: Evaluation, name: str) -> float:
    """Return a figure of :data:`~steadytrain.config.figures.FIGURES`; NaN where there is none: the AUC of one class."""
    if name in NEED_OUTPUTS and (name == "auc" or evaluation.mean_ap is None):
        assert evaluation.logits is not None and evaluation.labels is not None
        return mean_over_classes(name, evaluation.logits, evaluation.labels)
    known = {"map": evaluation.mean_ap, "loss": evaluation.loss, "top5": evaluation.top5}
    known |= {"macro-recall": evaluation.macro.recall, "f1": evaluation.macro.f1}
    value = known.get(name, evaluation.top1)
    return float("nan") if value is None else value


def class_scores(evaluation: Evaluation) -> tuple[ClassScore, ...]:
    """Compute precision, recall and F1 of each class, in the order of the outputs.

    A class that has no images has neither recall nor F1; one that is never predicted has no precision, and an F1 of 0.

    >>> evaluation = Evaluation(n=3, loss=0.4, top1=2 / 3, top5=1.0, right=(2, 0), total=(2, 1), predicted=(3, 0))
    >>> class_scores(evaluation)[0]
    ClassScore(precision=0.6666666666666666, recall=1.0, f1=0.8)
    """
    return tuple(map(score_of, evaluation.right, evaluation.total, evaluation.predicted))


def log_ratio(counts: Sequence[int], prior: NDArray[np.float64] | None = None) -> NDArray[np.float64]:
    """Return what is added to logits: log of the prior less log of the training frequencies, float64 [K].

    Menon et al. 2021, "Long-tail learning via logit adjustment", section 4.1.

    Args:
        counts: training images of each class. One without any was never learned, and gains no more than any other.
        prior: frequencies, which sum to 1; None: equal ones.

    >>> np.exp(log_ratio([30, 10])).round(6).tolist()
    [0.666667, 2.0]
    """
    n = np.asarray(counts, np.float64)
    prior = np.full(len(n), 1 / len(n)) if prior is None else prior
    is_known = n > 0
    ratio = np.log(prior) - np.log(np.where(is_known, n, 1) / n.sum())
    shift: NDArray[np.float64] = np.where(is_known, ratio, ratio[is_known].min(initial=np.inf))
    return shift


def even_shift(counts: Sequence[int], weighted: str) -> NDArray[np.float64] | None:
    """Return what equal frequencies add to logits; None where nothing calls for the comparison.

    That is where the largest class has fewer than :data:`UNEVEN` times the images of the smallest that has any, or
    training was ``weighted``.
    """
    return log_ratio(counts) if class_ratio(counts) >= UNEVEN and not weighted else None


@dataclass(frozen=True)
class LabelMetrics:
    """Metrics where an image may have several labels, those with a probability above ``threshold`` being predicted.

    ``micro``: of all pairs of an image and a label, in one count. ``macro``: means over the labels that any image has.
    ``mean_ap``: the mean of their average precisions, which no threshold changes. ``exact_match``: images of which
    every label is right. ``hamming_loss``: pairs of an image and a label that are wrong.
    """

    threshold: float
    labels: tuple[LabelScore, ...]
    micro: ClassScore
    macro: ClassScore
    mean_ap: float
    exact_match: float
    hamming_loss: float


def label_metrics(evaluation: Evaluation, *, threshold: float = 0.5, temperature: float = 1.0) -> LabelMetrics:
    """Compute the metrics of several labels for each image.

    Args:
        evaluation: with logits and labels.
        threshold: a label with a probability above it is predicted.
        temperature: of the probabilities.
    """
    assert evaluation.logits is not None and evaluation.labels is not None and evaluation.mean_ap is not None
    predicted = probabilities(evaluation.logits, temperature) > threshold
    has_label = evaluation.labels > 0
    labels = label_scores(evaluation.logits, predicted, has_label)
    wrong = predicted != has_label
    n = max(1, len(wrong))
    return LabelMetrics(
        threshold=threshold,
        labels=labels,
        micro=score_of(*(sum(getattr(label, name) for label in labels) for name in ("right", "n", "predicted"))),
        macro=macro(labels),
        mean_ap=evaluation.mean_ap,
        exact_match=int((~wrong).all(1).sum()) / n,
        hamming_loss=int(wrong.sum()) / max(1, wrong.size),
    )


def probabilities(logits: NDArray[np.float32], temperature: float = 1.0) -> NDArray[np.float64]:
    """Turn logits [n, L] of several labels into their probabilities."""
    scaled = logits.astype(np.float64) / temperature
    return np.exp(-np.logaddexp(0, -scaled))


def calibration(evaluation: Evaluation, *, temperature: float = 1.0) -> Calibration:
    """Compute the expected calibration error (Guo et al. 2017, equation 3).

    Args:
        evaluation: with the outputs for each image; or with logits and labels, of several.
        temperature: of the probabilities of several labels; those of outputs have theirs.

    >>> outputs = np.array([[0, 0.9, 0.1, 1], [0, 0.9, 2.3, 2]], np.float32)
    >>> told = Evaluation(n=2, loss=1.2, top1=0.5, top5=1.0, right=(1, 0), total=(1, 1), outputs=outputs)
    >>> round(calibration(told).ece, 6)
    0.4
    """
    if evaluation.mean_ap is not None:
        assert evaluation.logits is not None and evaluation.labels is not None
        values = probabilities(evaluation.logits, temperature)
        return calibration_of(values.ravel(), evaluation.labels.ravel() > 0, BINS)
    assert evaluation.outputs is not None
    return calibration_of(evaluation.outputs[:, 1].astype(np.float64), evaluation.outputs[:, 3] == 1, BINS)


def effective_n(is_right: NDArray[np.bool_], groups: Ints | None) -> float | None:
    """Return how many independent images those in groups are worth, for Wilson's interval; None: all are independent.

    It is their number over the design effect of the groups, and less where these are few (Korn & Graubard 1998; Dean &
    Pagano 2015). Where fewer than five groups have a mistake, or a right answer, a group counts as one image.

    >>> series, image = np.repeat(np.arange(20), 10), np.arange(200)
    >>> round(effective_n(series < 14, series), 1), round(effective_n(image % 10 < 7, series), 1)
    (17.0, 177.5)
    """
    if groups is None or len(np.unique(groups)) == len(groups):
        return None
    numbers, sizes = np.unique(groups, return_inverse=True, return_counts=True)[1:]
    n, p, k = len(groups), float(is_right.mean()), len(groups) ** 2 / float((sizes**2).sum())  # k: as of equal sizes
    if k < 2 or min(len(np.unique(numbers[is_right == value])) for value in (True, False)) < 5:
        return k
    design = (np.bincount(numbers, is_right - p) ** 2).sum() * k / (k - 1) * (n - 1) / (n**2 * p * (1 - p))
    return float(n / max(1.0, design) * (student95(min(1000, n - 1)) / student95(min(1000, int(k - 1)))) ** 2)


def standard_error(values: NDArray[np.float64], groups: Ints | None = None) -> float:
    """Return the standard error of a mean; values of one group may depend on each other (Liang & Zeger 1986).

    >>> pairs = np.array([0.0, 0.0, 1.0, 1.0])
    >>> round(standard_error(pairs), 4), round(standard_error(pairs, np.array([0, 0, 1, 1])), 4)
    (0.2887, 0.5)
    """
    deviations = values - values.mean()
    if groups is not None:
        deviations = np.bincount(np.unique(groups, return_inverse=True)[1], deviations)
    n = len(deviations)
    return float(np.sqrt((deviations**2).sum() * n / max(1, n - 1)) / len(values))
