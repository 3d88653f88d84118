"""Suspect labels: those that cleanlab names on the same probabilities, in its order, and those that were wrong."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from steadytrain.data.arrays import Floats, Ints
from steadytrain.errors import DataError
from steadytrain.training.features import suspects
from steadytrain.training.features.suspects import find_suspects, nearest_rows, rank_suspects

GOLDEN = Path(__file__).parents[1] / "golden/suspects/cleanlab-rankings.json"


def draw(seed: int, n: int, k: int, rate: float, sharp: float) -> tuple[Ints, Floats]:
    """Labels of which some are wrong, and probabilities that are right as often as ``sharp`` makes them."""
    rng = np.random.default_rng(seed)
    true = rng.integers(0, k, n)
    labels = np.where(rng.random(n) < rate, rng.integers(0, k, n), true)
    logits = rng.normal(size=(n, k)) + sharp * np.eye(k)[true]
    p = np.exp(logits - logits.max(1, keepdims=True))
    return labels, p / p.sum(1, keepdims=True)


@pytest.mark.parametrize("case", json.loads(GOLDEN.read_text())["cases"], ids=lambda case: str(case["draw"]))
def test_the_ranking_is_that_of_cleanlab(case: dict[str, list[int]]) -> None:
    """How the rankings were made stands in the file."""
    assert rank_suspects(*draw(*case["draw"])).tolist() == case["rows"]


def _photographs(flips: float, spread: float = 5.0) -> tuple[np.ndarray, Ints, Ints]:
    """Features of 400 images of four classes, their labels of which a share is wrong, and the numbers of these."""
    rng = np.random.default_rng(0)
    true = np.arange(400) % 4
    values = (rng.normal(size=(400, 30)) + spread * np.eye(4, 30)[true]).astype(np.float32)
    wrong = np.sort(rng.permutation(400)[: round(400 * flips)])
    labels = true.copy()
    labels[wrong] = (true[wrong] + rng.integers(1, 4, len(wrong))) % 4
    return values, labels, wrong


@pytest.mark.parametrize("flips", [0.05, 0.1, 0.2])
def test_wrong_labels_are_found_and_few_others_where_classes_are_told_apart(flips: float) -> None:
    values, labels, wrong = _photographs(flips)
    found = find_suspects(values, labels, 4)
    is_wrong = np.isin(found.rows, wrong)
    assert is_wrong.sum() >= 0.9 * len(wrong) and is_wrong.mean() >= 0.9
    true = np.arange(400) % 4
    assert (found.suggested == true[found.rows])[is_wrong].mean() > 0.95
    own = found.probabilities[found.rows, labels[found.rows]]
    assert (np.diff(own) >= 0).all(), "the least likely label comes first"
    assert sum(n for *_, n in found.pairs) == len(found.rows)


def test_no_share_of_wrong_labels_is_claimed_where_the_classifier_errs_often() -> None:
    clean = find_suspects(*_photographs(0.02)[:2], 4)
    assert clean.share is not None and abs(clean.share - 0.02) < 0.01
    assert find_suspects(*_photographs(0.1)[:2], 4).share is None
    assert find_suspects(*_photographs(0.0, spread=1.0)[:2], 4).share is None


def test_copies_of_a_wrong_label_do_not_defend_each_other_in_one_group() -> None:
    values, labels, wrong = _photographs(0.05, spread=2.5)
    twice = [np.repeat(part, 2, 0) for part in (values, labels)]
    wanted = np.isin(np.arange(800) // 2, wrong)
    counts = [
        wanted[find_suspects(twice[0], twice[1], 4, groups=groups).rows].sum() for groups in (None, np.arange(800) // 2)
    ]
    assert counts[1] > counts[0]


def test_of_few_groups_there_are_as_many_folds() -> None:
    labels, groups = np.arange(60) % 2, np.arange(60) // 20  # three patients
    values = (np.random.default_rng(0).normal(size=(60, 5)) + 9 * labels[:, None]).astype(np.float32)
    labels[3] = 1 - labels[3]
    found = find_suspects(values, labels, 2, groups=groups)
    assert found.rows.tolist() == [3] and len(found.answers.by_fold) == 3


def test_a_class_that_is_one_group_is_not_judged_by_classifiers_that_never_saw_it() -> None:
    labels = np.arange(90) % 3
    values = (np.random.default_rng(0).normal(size=(90, 5)) + 9 * np.eye(3, 5)[labels]).astype(np.float32)
    groups = np.where(labels == 2, 90, np.arange(90))  # one patient has the third
    labels[3] = 1
    found = find_suspects(values, labels, 3, groups=groups)
    assert found.rows.tolist() == [3] and found.answers.top1 == pytest.approx(59 / 60)
    assert found.answers.is_answered.tolist() == (labels != 2).tolist()
    with pytest.raises(DataError, match="each class is one group"):
        find_suspects(values, labels, 3, groups=labels)


def test_the_nearest_image_is_that_of_the_smallest_angle(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.array([[1, 0], [10, 1], [0.9, 0.5], [0, 0], [0, 3]], np.float32)
    values.flags.writeable = False  # as it is mapped
    for rows in (2, 100):
        monkeypatch.setattr(suspects, "_BLOCK", rows)
        assert nearest_rows(values, np.array([0, 4]), np.array([1, 2, 3])).tolist() == [1, 2]
        assert nearest_rows(values, np.array([0]), np.array([2, 3])).tolist() == [2]


def test_suspects_stand_beside_sound_images_of_both_classes() -> None:
    values, labels, _ = _photographs(0.05)
    found = find_suspects(values, labels, 4)
    beside = found.nearest(values, 10)
    assert len(beside) == 10
    for row, label, other, (own, near) in zip(found.rows, labels[found.rows], found.suggested, beside, strict=False):
        assert own is not None and near is not None and not {own, near} & set(found.rows.tolist())
        assert (labels[own], labels[near]) == (label, other)
        cosines = values @ values[row] / np.linalg.norm(values, axis=1)
        known = np.setdiff1d(np.flatnonzero(labels == other), found.rows)
        assert near == known[cosines[known].argmax()]
    few = find_suspects(values[:3], np.array([0, 1, 0]), 4)
    assert len(few.nearest(values[:3], 9)) == len(few.rows)
