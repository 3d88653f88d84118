"""Labels that may be wrong, by the answers of classifiers that have not seen the image.

Confident learning (Northcutt, Jiang & Chuang 2021), twice: those that are named first are left out of the fits, which
wrong labels spoil, and all are answered anew. The rule: docs/check.md; others: ``benchmarks/results/suspects.json``.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from steadytrain.data.arrays import Floats, Ints
from steadytrain.data.sources.select import fold_numbers
from steadytrain.errors import DataError
from steadytrain.training.features.folds import OutOfFold, out_of_fold
from steadytrain.training.inference.limits import nearest, unit_rows

SURE_ERROR = 0.05
"""Below this error out of fold the named images are worth a share of wrong labels: elsewhere many are the classifier's
own mistakes (of X-rays whose probe is right in 71 %, 28 % for a true 10)."""

_BLOCK = 16_384  # rows whose distances are computed together


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

    def nearest(self, values: NDArray[np.float32], most: int) -> list[tuple[int | None, int | None]]:
        """Return the nearest images of the label and of the suggested class of the first suspects.

        These are no suspects themselves; None where a class has no other image.

        Args:
            values: float32 [N, D], the features.
            most: suspects.
        """
        rows, is_sound = self.rows[:most], np.ones(len(self.labels), np.bool_)
        is_sound[self.rows] = False
        beside = np.full((2, len(rows)), None, object)
        for places, classes in zip(beside, (self.labels[rows], self.suggested[:most]), strict=True):
            for label in np.unique(classes):
                if len(known := np.flatnonzero(is_sound & (self.labels == label))):
                    places[classes == label] = nearest_rows(values, rows[classes == label], known)
        return list(zip(*beside.tolist(), strict=True))


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
        DataError: one group of images, or of each class.

    >>> rng = np.random.default_rng(0)
    >>> labels = np.arange(100) % 2
    >>> values = (rng.normal(size=(100, 5)) + 9 * labels[:, None]).astype(np.float32)
    >>> labels[[3, 50]] = 1 - labels[[3, 50]]
    >>> sorted(find_suspects(values, labels, 2).rows.tolist())
    [3, 50]
    """
    if groups is not None and len(np.unique(np.stack([labels, groups]), axis=1).T) == len(np.unique(labels)):
        raise DataError("each class is one group of images that belong together: no other image could tell its labels")
    folds = min(folds, len(labels if groups is None else np.unique(groups)))
    fold_of = fold_numbers(labels, folds=folds, seed=seed, groups=groups)
    answers = out_of_fold(values, labels, fold_of, num_classes, groups=groups)
    trusted = np.ones(len(labels), np.bool_)
    trusted[rank_suspects(labels, answers.probabilities)] = False
    few = np.bincount(labels[trusted], minlength=num_classes) < folds
    trusted |= few[labels]  # a class is not taken from the fits
    probabilities = out_of_fold(values, labels, fold_of, num_classes, trusted=trusted).probabilities
    known = np.flatnonzero(answers.is_answered)
    rows = known[rank_suspects(labels[known], probabilities[known])]
    return Suspects(rows, probabilities[rows].argmax(1), labels, probabilities, answers)


def rank_suspects(labels: Ints, probabilities: Floats) -> Ints:
    """Return the images whose label is likely wrong, the least likely label first: int64 [S].

    Args:
        labels: int64 [N].
        probabilities: float64 [N, K], of each image by a classifier that was not fitted to it.
    """
    n, num_classes = probabilities.shape
    own, counts = probabilities[np.arange(n), labels], np.bincount(labels, minlength=num_classes)
    usual = np.bincount(labels, own, num_classes) / counts.clip(1)
    counts_for = probabilities >= np.where(counts > 0, usual, 2.0).clip(2e-6) - 1e-6
    likeliest = probabilities.argmax(1)
    counted = np.where(counts_for.sum(1) > 1, likeliest, counts_for.argmax(1))
    is_other = likeliest != labels
    rows = np.argsort(own)[: (is_other & counts_for.any(1) & (counted != labels)).sum()]
    return np.asarray(rows[is_other[rows]])


def nearest_rows(values: NDArray[np.float32], queries: Ints, known: Ints) -> Ints:
    """Return the row of ``known`` that is most like each of ``queries`` by the cosine of their features: int64 [M].

    Args:
        values: float32 [N, D], which may be mapped: some rows are read at a time.
        queries: int64 [M], rows.
        known: int64 [K] of at least one row.
    """
    wanted, blocks = unit_rows(torch.from_numpy(values[queries])), np.array_split(known, -(-len(known) // _BLOCK))
    found = [nearest(unit_rows(torch.from_numpy(values[block])), wanted, 1) for block in blocks]
    best = torch.cat([distances for distances, _ in found], 1).argmin(1).numpy()
    rows: Ints = np.stack([block[at[:, 0].numpy()] for block, (_, at) in zip(blocks, found, strict=True)])
    return np.asarray(rows[best, np.arange(len(queries))])
