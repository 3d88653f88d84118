"""Answers out of fold: those of scikit-learn's logistic regression that has not seen the image."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss

from steadytrain.data.arrays import Ints
from steadytrain.training.features import folds
from steadytrain.training.features.folds import Features, OutOfFold, out_of_fold, standard_error


def _blobs(n: int = 300, spread: float = 2.0) -> tuple[np.ndarray, Ints, Ints]:
    """Features of three classes that overlap, their labels and five stratified folds."""
    rng = np.random.default_rng(0)
    labels = np.arange(n) % 3
    values = rng.normal(size=(n, 20)) + spread * np.eye(3, 20)[labels]
    return values.astype(np.float32), labels.astype(np.int64), (np.arange(n) // 3 % 5).astype(np.int64)


def test_answers_are_those_of_scikit_learn_fitted_to_the_other_folds() -> None:
    values, labels, folds = _blobs()
    answers = out_of_fold(values, labels, folds, 3)
    scaled = (values - values.mean(0)) / np.sqrt(((values - values.mean(0)) ** 2).mean())
    expected = np.empty((300, 3))
    for fold in range(5):
        out = folds == fold
        oracle = LogisticRegression(C=1 / ((~out).sum() * answers.penalty), tol=1e-8, max_iter=10_000)
        expected[out] = oracle.fit(scaled[~out], labels[~out]).predict_proba(scaled[out])
    np.testing.assert_allclose(answers.probabilities, expected, atol=1e-3)
    assert answers.loss == pytest.approx(log_loss(labels, expected), abs=1e-3)
    is_right = expected.argmax(1) == labels
    assert answers.top1 == is_right.mean()
    assert answers.by_fold == tuple(is_right[folds == fold].mean() for fold in range(5))


def test_features_that_say_nothing_are_right_by_chance_though_fitted_to_perfectly() -> None:
    rng = np.random.default_rng(0)
    values, labels = rng.normal(size=(200, 400)).astype(np.float32), rng.integers(0, 4, 200)
    answers = out_of_fold(values, labels, np.arange(200) % 5, 4)
    assert abs(answers.top1 - 0.25) < 0.1 and answers.penalty >= 0.1
    assert answers.loss < np.log(4) + 2 * answers.loss_error


def test_copies_in_one_fold_are_no_help_and_in_two_they_are() -> None:
    rng = np.random.default_rng(0)
    once, labels = rng.normal(size=(100, 300)), rng.integers(0, 4, 100)
    values = np.repeat(once, 2, 0).astype(np.float32)

    def top1(fold_of: Ints) -> OutOfFold:
        return out_of_fold(values, np.repeat(labels, 2), fold_of, 4)

    assert top1(np.arange(200) % 5).top1 > 0.8 > 0.45 > top1(np.arange(200) // 2 % 5).top1


def test_the_error_of_the_loss_counts_a_group_as_one() -> None:
    values, labels, folds = _blobs()
    alone = out_of_fold(values, labels, folds, 3)
    assert alone.loss_error == pytest.approx(standard_error(_losses(alone, labels)), rel=1e-4)
    thrice = [np.repeat(part, 3, 0) for part in (values, labels, folds)]
    grouped = out_of_fold(thrice[0], thrice[1], thrice[2], 3, groups=np.repeat(np.arange(300), 3))
    assert grouped.loss_error == pytest.approx(alone.loss_error, rel=0.02)


def _losses(answers: OutOfFold, labels: Ints) -> np.ndarray:
    return -np.log(answers.probabilities[np.arange(len(labels)), labels])


def test_what_cannot_be_answered_is_refused() -> None:
    values, labels, folds = _blobs()
    with pytest.raises(ValueError, match="two folds"):
        out_of_fold(values, labels, np.zeros_like(folds), 3)
    with pytest.raises(ValueError, match="one class for each image"):
        out_of_fold(values, np.eye(3, dtype=np.int64)[labels], folds, 3)


def test_features_that_are_read_in_blocks_have_the_same_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values, labels, fold_of = _blobs()
    np.save(tmp_path / "x.npy", values)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    whole, y = out_of_fold(values, labels, fold_of, 3), torch.from_numpy(labels)
    fitted = folds.fit_classifier(values, y, y % 2 == 0, 3)
    again = out_of_fold(mapped, labels, fold_of, 3)
    assert np.array_equal(again.logits, whole.logits), "the rows are the same"
    monkeypatch.setattr(folds, "MOST_BYTES", 1000)
    monkeypatch.setattr(folds, "BLOCK_BYTES", 7 * 20 * 4)
    blocks = out_of_fold(mapped, labels, fold_of, 3)
    np.testing.assert_allclose(blocks.probabilities, whole.probabilities, atol=1e-3)
    assert blocks.penalty == whole.penalty
    blocked = folds.fit_classifier(mapped, y, y % 2 == 0, 3)
    torch.testing.assert_close(blocked[0], fitted[0], rtol=1e-2, atol=1e-3)
    assert blocked[2:] == fitted[2:]


def test_a_table_of_one_block_is_standardised_once_and_stays_as_it_is() -> None:
    values = torch.from_numpy(_blobs()[0])
    before, features = values.clone(), Features(values, "cpu")
    centred = values - values.mean(0)
    expected = centred / centred.square().mean().sqrt()
    everything, labels = torch.ones(300, dtype=torch.bool), torch.zeros(300, dtype=torch.int64)
    ((first, _),), ((second, _),) = features.choose(everything, labels)(), features.choose(everything, labels)()
    assert torch.equal(first, expected) and first.data_ptr() == second.data_ptr()
    assert torch.equal(values, before)


def test_a_fit_reads_no_more_than_a_block_of_a_large_table_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    values, labels, fold_of = _blobs(3000)
    read, sizes = Features._read, list[int]()

    def watched(features: Features, part: slice) -> torch.Tensor:
        rows = read(features, part)
        sizes.append(rows.nbytes)
        return rows

    monkeypatch.setattr(folds, "MOST_BYTES", values.nbytes - 1)
    monkeypatch.setattr(folds, "BLOCK_BYTES", 8000)
    monkeypatch.setattr(Features, "_read", watched)
    out_of_fold(values, labels, fold_of, 3, penalties=[1.0])
    assert max(sizes) == 8000
