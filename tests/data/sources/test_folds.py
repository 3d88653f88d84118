"""Folds: groups whole, classes alike, the same for good, as even as scikit-learn's."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from steadytrain.data.sources.select import fold_numbers
from steadytrain.errors import DataError

FOLDS = [1, 1, 0, 0, 1, 1, 0, 0, 1, 1, 0, 0, 0, 0, 1, 1]


def unevenness(labels: NDArray[np.int64], fold_of: NDArray[np.int64], folds: int) -> float:
    """The deviation over folds of a class's share in them, on average over the classes."""
    totals = np.bincount(labels)
    shares = [np.bincount(labels[fold_of == fold], minlength=len(totals)) / totals for fold in range(folds)]
    return float(np.std(shares, axis=0).mean())


@pytest.mark.parametrize("seed", range(6))
def test_folds_keep_groups_whole_and_are_as_even_as_those_of_scikit_learn(seed: int) -> None:
    selection = pytest.importorskip("sklearn.model_selection")
    rng = np.random.default_rng(seed)
    n, folds, num_classes = int(rng.integers(300, 2000)), int(rng.integers(2, 8)), int(rng.integers(2, 20))
    groups = np.repeat(np.arange(n), rng.geometric(0.3, n))[:n] if seed % 2 else rng.integers(0, n // 4, n)
    labels = rng.integers(0, num_classes, n) if seed % 3 else (groups * 7919) % num_classes
    labels = np.unique(labels, return_inverse=True)[1]
    fold_of = fold_numbers(labels, folds=folds, seed=seed, groups=groups)
    assert all(len(set(fold_of[groups == group])) == 1 for group in np.unique(groups))
    oracle = np.zeros(n, np.int64)
    splitter = selection.StratifiedGroupKFold(folds, shuffle=True, random_state=seed)
    for fold, (_, rows) in enumerate(splitter.split(labels, labels, groups)):
        oracle[rows] = fold
    assert unevenness(labels, fold_of, folds) <= 1.15 * unevenness(labels, oracle, folds)
    sizes = np.bincount(fold_of, minlength=folds)
    assert sizes.max() - sizes.min() <= 0.05 * n / folds + 4


def test_single_images_are_dealt_evenly_by_class_and_in_all() -> None:
    labels = np.repeat(np.arange(7), [3, 11, 1, 8, 20, 4, 6])
    fold_of = fold_numbers(labels, folds=4, seed=3)
    for label in range(7):
        counts = np.bincount(fold_of[labels == label], minlength=4)
        assert counts.max() - counts.min() <= 1
    assert np.ptp(np.bincount(fold_of)) <= 1


def test_folds_are_the_same_for_good_and_go_by_the_seed() -> None:
    labels, groups = np.repeat([0, 1], 8), np.arange(16) // 2
    # Written down once: what was measured on folds years ago can be repeated.
    assert fold_numbers(labels, folds=2, seed=0, groups=groups).tolist() == FOLDS
    assert any(fold_numbers(labels, folds=2, seed=seed, groups=groups).tolist() != FOLDS for seed in range(1, 5))


def test_label_vectors_are_dealt_without_regard_to_them() -> None:
    fold_of = fold_numbers(np.ones((10, 3), np.float32), folds=5, seed=0)
    assert np.bincount(fold_of).tolist() == [2] * 5


@pytest.mark.parametrize("folds", [0, 1, 4])
def test_more_folds_than_groups_are_refused(folds: int) -> None:
    with pytest.raises(DataError, match=f"{folds} folds of 3 groups of images: it must be from 2 to 3"):
        fold_numbers(np.array([0, 0, 1, 1]), folds=folds, seed=0, groups=np.array([4, 4, 9, 2]))
