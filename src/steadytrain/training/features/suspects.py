"""Labels that may be wrong, by the answers of classifiers that have not seen the image.

Confident learning (Northcutt, Jiang & Chuang 2021, "Confident Learning: Estimating Uncertainty in Dataset Labels"): an
image counts for a class where its probability reaches the mean that images with this label have. The table of given
labels against such classes says how many labels of each pair are wrong, and as many images are named: those whose other
class is likeliest beside their own. The first are those whose own label is least likely.

It is done twice: those that are named first are left out of the fits, which wrong labels spoil, and all are answered
anew. Of photographs with 5 to 20 % of their labels flipped, that finds 3 to 10 points more of them, and 1 to 6 points
more of those that it names are wrong.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from steadytrain.data.arrays import Floats, Ints
from steadytrain.data.sources.select import fold_numbers
from steadytrain.training.features.folds import OutOfFold, out_of_fold

SURE_ERROR = 0.05
"""Below this error out of fold the named images are worth a share of wrong labels: elsewhere many are the classifier's
own mistakes (of X-rays whose probe is right in 71 %, 28 % for a true 10)."""

_BLOCK = 65_536  # rows whose distances are computed together


@dataclass(frozen=True)
class Suspects:
    """Images whose label may be wrong, the most suspicious first.

    Args:
        rows: int64 [S], numbers of images.
        suggested: int64 [S], the likeliest class of each.
        labels: int64 [N], the given labels of all images.
        probabilities: float64 [N, K], out of fold.
        answers: of classifiers that were fitted to all labels, from before the suspects were left out.
    """

    rows: Ints
    suggested: Ints
    labels: Ints
    probabilities: Floats
    answers: OutOfFold

    @property
    def pairs(self) -> list[tuple[int, int, int]]:
        """Given label, suggested class and number of images of each pair that is mixed up, the most frequent first."""
        counts = Counter(zip(self.labels[self.rows].tolist(), self.suggested.tolist(), strict=True))
        return sorted(((*pair, n) for pair, n in counts.items()), key=lambda row: (-row[2], row))

    @property
    def share(self) -> float | None:
        """The share of labels that are named; None where the classifier errs too often for it to mean anything."""
        return len(self.rows) / len(self.labels) if self.answers.top1 > 1 - SURE_ERROR else None


def find_suspects(
    values: NDArray[np.float32],
    labels: Ints,
    num_classes: int,
    *,
    groups: Ints | None = None,
    folds: int = 5,
    seed: int = 0,
) -> Suspects:
    """Find images whose label the classifiers of the other folds do not believe.

    Args:
        values: float32 [N, D] features of a network that was not trained on these labels.
        labels: int64 [N].
        num_classes: outputs of the classifiers.
        groups: int64 [N], images that belong together; None: each stands alone.
        folds, seed: how the images are dealt; of fewer groups there are as many folds.

    Raises:
        DataError: one group of images.

    >>> rng = np.random.default_rng(0)
    >>> labels = np.arange(100) % 2
    >>> values = (rng.normal(size=(100, 5)) + 9 * labels[:, None]).astype(np.float32)
    >>> labels[[3, 50]] = 1 - labels[[3, 50]]
    >>> sorted(find_suspects(values, labels, 2).rows.tolist())
    [3, 50]
    """
    folds = min(folds, len(labels if groups is None else np.unique(groups)))
    fold_of = fold_numbers(labels, folds=folds, seed=seed, groups=groups)
    answers = out_of_fold(values, labels, fold_of, num_classes, groups=groups)
    trusted = np.ones(len(labels), np.bool_)
    trusted[rank_suspects(labels, answers.probabilities)] = False
    few = np.bincount(labels[trusted], minlength=num_classes) < folds
    trusted |= few[labels]  # a class is not taken from the fits
    probabilities = out_of_fold(values, labels, fold_of, num_classes, trusted=trusted).probabilities
    rows = rank_suspects(labels, probabilities)
    return Suspects(rows, probabilities[rows].argmax(1), labels, probabilities, answers)


def rank_suspects(labels: Ints, probabilities: Floats) -> Ints:
    """Return the images whose label is likely wrong, the least likely label first: int64 [S].

    Args:
        labels: int64 [N].
        probabilities: float64 [N, K], of each image by a classifier that was not fitted to it.
    """
    n, num_classes = probabilities.shape
    own, counts = probabilities[np.arange(n), labels], np.bincount(labels, minlength=num_classes)
    wrong = _count_wrong(labels, probabilities, own, counts)
    is_suspect = np.zeros(n, np.bool_)
    for label, other in zip(*np.nonzero(wrong), strict=True):
        if counts[label] > 1:
            images = np.flatnonzero(labels == label)
            margin = probabilities[images, other] - own[images]
            is_suspect[images[np.argsort(-margin)[: wrong[label, other]]]] = True
    rows = np.flatnonzero(is_suspect & (probabilities.argmax(1) != labels))
    return rows[np.argsort(own[rows])]


def _count_wrong(labels: Ints, probabilities: Floats, own: Floats, counts: Ints) -> Ints:
    """Estimate the number of images with each label that are of each other class: int64 [K, K], 0 on the diagonal."""
    num_classes = len(counts)
    usual = np.bincount(labels, own, num_classes) / counts.clip(1)
    is_likely = probabilities >= np.where(counts > 0, usual, 2.0).clip(2e-6) - 1e-6
    guess = np.where(is_likely.sum(1) > 1, probabilities.argmax(1), is_likely.argmax(1))
    joint = np.zeros((num_classes, num_classes), order="F")  # sums are then rounded as cleanlab rounds them
    np.add.at(joint, (labels[is_likely.any(1)], guess[is_likely.any(1)]), 1)
    diagonal = np.diag_indices(num_classes)
    joint[diagonal] = joint[diagonal].clip(1)
    joint = (joint.T / joint.sum(1) * counts).T  # as many as there are with each label
    joint = np.array([_round_to_sum(row) for row in joint / joint.sum() * len(labels)])
    kept = joint[diagonal].clip(1)  # one image at least keeps its label, at the cost of the others
    lacking = kept - joint[diagonal]
    joint -= (lacking / (np.count_nonzero(joint, axis=1) - 1.0).clip(1))[:, None]
    joint[diagonal] = 0
    return joint.clip(0).astype(np.int64)


def _round_to_sum(values: Floats) -> Floats:
    """Round numbers so that they add up to their rounded sum: those change that are nearest to the next number."""
    whole = values.round()
    while lacking := int(round(values.sum()) - whole.sum()):
        order = np.argsort(values - whole)
        whole[order[::-1][:lacking] if lacking > 0 else order[:-lacking]] += np.sign(lacking)
    return whole


def nearest(values: NDArray[np.float32], row: int, among: Ints) -> int | None:
    """Return the image most like another by the cosine of their features; None where there is none.

    Args:
        values: float32 [N, D].
        row: of the image.
        among: int64 [M], the numbers of those to choose from.
    """
    wanted, best, found = values[row], -np.inf, None
    for first in range(0, len(among), _BLOCK):
        block = values[among[first : first + _BLOCK]]
        cosines = block @ wanted / np.linalg.norm(block, axis=1).clip(1e-12)
        at = int(cosines.argmax())
        if cosines[at] > best:
            best, found = cosines[at], int(among[first + at])
    return found
