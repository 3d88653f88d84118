"""Precision, recall, F1 and calibration: equal to scikit-learn's, MXNet's and the definition's."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from sklearn.metrics import (
    accuracy_score,
    average_precision_score,
    hamming_loss,
    precision_recall_fscore_support,
)

from steadytrain.intervals import wilson
from steadytrain.training.evaluation import Evaluation
from steadytrain.training.metrics import calibration, class_scores, effective_n, label_metrics, macro, standard_error


def evaluation_of(p: NDArray[np.floating], labels: NDArray[np.int64]) -> Evaluation:
    """What an evaluation counts of probabilities [N, C]."""
    predicted, classes = p.argmax(1), p.shape[1]
    rank = np.where(predicted == labels, 1, 2)
    outputs = np.stack([predicted, p.max(1), np.zeros(len(p)), rank], 1).astype(np.float32)
    right, total = np.bincount(labels[rank == 1], minlength=classes), np.bincount(labels, minlength=classes)
    top1 = float((rank == 1).mean())
    return Evaluation(
        n=len(p),
        loss=0.0,
        top1=top1,
        top5=1.0,
        right=tuple(right.tolist()),
        total=tuple(total.tolist()),
        predicted=tuple(np.bincount(predicted, minlength=classes).tolist()),
        outputs=outputs,
    )


def test_scores_are_those_of_scikit_learn() -> None:
    draw = np.random.default_rng(5)
    p, labels = draw.dirichlet(np.full(6, 0.5), 200), draw.integers(0, 6, 200)
    p[:, 4] = 0  # never predicted
    labels[labels == 2] = 3  # no images: predicted for others' images
    scores = class_scores(evaluation := evaluation_of(p, labels))
    present = [0, 1, 3, 4, 5]
    wanted = precision_recall_fscore_support(labels, p.argmax(1), labels=present, zero_division=0)
    for k, precision, recall, f1 in zip(present, *wanted[:3], strict=True):
        assert (scores[k].precision or 0, scores[k].recall, scores[k].f1) == pytest.approx((precision, recall, f1))
    assert scores[4].precision is None and scores[4].f1 == 0 and scores[2].recall is scores[2].f1 is None
    average = precision_recall_fscore_support(labels, p.argmax(1), labels=present, zero_division=0, average="macro")
    mean = macro(scores)
    assert (mean.precision, mean.recall, mean.f1) == pytest.approx(average[:3])
    assert evaluation.n == 200


def test_f1_is_mxnets_of_pooled_counts(data_folder: Path) -> None:
    folder = data_folder / "mxnet-golden"
    golden = json.loads((folder / "metrics.json").read_text())["fed_in_batches"]
    with np.load(folder / "metrics.npz", allow_pickle=False) as arrays:
        evaluation = evaluation_of(arrays["pred2"], arrays["label2"].astype(np.int64))
    name = next(name for name in golden if "f1" in name and "micro" in name)
    assert class_scores(evaluation)[1].f1 == pytest.approx(golden[name][2]["global_value"])


def test_the_calibration_error_is_that_of_its_definition() -> None:
    draw = np.random.default_rng(6)
    p, labels = draw.dirichlet(np.full(4, 0.3), 300), draw.integers(0, 4, 300)
    p[0] = (1, 0, 0, 0)
    calibrated = calibration(evaluation_of(p, labels))
    confidence, right, error = p.max(1).astype(np.float32).astype(float), p.argmax(1) == labels, 0.0
    for k in range(15):
        inside = (confidence > k / 15) & (confidence <= (k + 1) / 15)
        assert calibrated.bins[k].n == inside.sum()
        if inside.any():
            assert calibrated.bins[k].top1 == pytest.approx(right[inside].mean())
            error += inside.mean() * abs(right[inside].mean() - confidence[inside].mean())
    assert calibrated.ece == pytest.approx(error) and calibrated.confidence == pytest.approx(confidence.mean())


def test_what_is_not_finite_has_no_calibration() -> None:
    calibrated = calibration(evaluation_of(np.array([[np.nan, 0.5]]), np.array([0])))
    assert math.isnan(calibrated.ece) and math.isnan(calibrated.confidence)


def labelled(logits: NDArray[np.float32], labels: NDArray[np.bool_]) -> Evaluation:
    """What an evaluation counts of logits and labels [N, L]."""
    return Evaluation(
        n=len(logits),
        loss=0.0,
        top1=0.0,
        top5=None,
        right=(),
        total=(),
        mean_ap=0.5,
        logits=logits,
        labels=labels.astype(np.float32),
    )


@pytest.mark.parametrize(("threshold", "temperature"), [(0.5, 1.0), (0.3, 1.0), (0.3, 2.5), (0.9, 0.5)])
def test_scores_of_labels_are_those_of_scikit_learn(threshold: float, temperature: float) -> None:
    draw = np.random.default_rng(7)
    logits, labels = draw.normal(size=(200, 6)).astype(np.float32), draw.random((200, 6)) < 0.3
    labels[:, 2] = False  # no image has it
    logits[:, 4] = -20  # never predicted
    metrics = label_metrics(labelled(logits, labels), threshold=threshold, temperature=temperature)
    predicted = 1 / (1 + np.exp(-logits / temperature)) > threshold
    present = [0, 1, 3, 4, 5]
    wanted = precision_recall_fscore_support(labels, predicted, labels=present, zero_division=0)
    for k, precision, recall, f1, n in zip(present, *wanted, strict=True):
        score = metrics.labels[k]
        assert (score.precision or 0, score.recall, score.f1) == pytest.approx((precision, recall, f1))
        assert (score.n, score.predicted) == (n, predicted[:, k].sum())
        assert score.ap == pytest.approx(average_precision_score(labels[:, k], logits[:, k]))
    assert metrics.labels[2].recall is metrics.labels[2].ap is None and metrics.labels[4].precision is None
    for mean, values in (("macro", metrics.macro), ("micro", metrics.micro)):
        chosen = present if mean == "macro" else None
        expected = precision_recall_fscore_support(labels, predicted, labels=chosen, average=mean, zero_division=0)
        assert (values.precision, values.recall, values.f1) == pytest.approx(expected[:3])
    assert metrics.exact_match == accuracy_score(labels, predicted)
    assert metrics.hamming_loss == pytest.approx(hamming_loss(labels, predicted))


def test_the_calibration_error_of_labels_is_of_each_label_of_each_image() -> None:
    p = np.array([[0.95, 0.05], [0.95, 0.05], [0.95, 0.95]])
    logits = np.log(p / (1 - p)).astype(np.float32)
    labels = np.array([[1, 0], [1, 0], [0, 1]], np.bool_)
    calibrated = calibration(labelled(logits, labels))
    assert [(row.n, row.top1) for row in calibrated.bins if row.n] == [(2, 0.0), (4, 0.75)]
    assert calibrated.ece == pytest.approx((2 * 0.05 + 4 * 0.2) / 6, rel=1e-6)
    assert calibrated.confidence == pytest.approx(p.mean(), rel=1e-6)


@pytest.mark.parametrize(("size", "scenes"), [(1, 200), (4, 60), (20, 40)])
@pytest.mark.parametrize("likeness", [0.1, 0.5])
def test_the_interval_holds_the_truth_in_95_of_100_draws_of_scenes(size: int, scenes: int, likeness: float) -> None:
    rng, groups, truth, held = np.random.default_rng(0), np.repeat(np.arange(scenes), size), 0.7, np.zeros(2)
    draws = 600
    for _ in range(draws):
        shares = rng.beta(truth * (1 / likeness - 1), (1 - truth) * (1 / likeness - 1), scenes)
        is_right = rng.random(len(groups)) < shares[groups]
        for k, n in enumerate((effective_n(is_right, groups) or len(groups), len(groups))):
            interval = wilson(float(is_right.mean()), n)
            held[k] += interval.low <= truth <= interval.high
    assert 0.93 <= held[0] / draws <= 0.97
    assert size == 1 or held[1] / draws < (0.94 if likeness < 0.5 else 0.85)  # as if all images were independent


def test_images_that_stand_alone_are_worth_as_many() -> None:
    is_right = np.arange(30) % 3 > 0
    assert effective_n(is_right, None) is None
    assert effective_n(is_right, np.arange(30)) is None


def test_copies_of_an_image_are_worth_one_and_unlike_images_of_a_group_nearly_as_many() -> None:
    rng = np.random.default_rng(1)
    answers, groups = rng.random(200) < 0.6, np.arange(200).repeat(5)
    worth = effective_n(answers.repeat(5), groups)
    assert worth is not None and 195 < worth < 202
    unlike = effective_n(rng.random(1000) < 0.6, groups)
    assert unlike is not None and 850 < unlike <= 1000
    p, error = answers.mean(), standard_error(answers.repeat(5).astype(float), groups)
    assert worth == pytest.approx(p * (1 - p) / error**2, rel=0.02)


@pytest.mark.parametrize("wrong", [0, 3])
def test_where_few_groups_are_wrong_each_counts_as_one_image(wrong: int) -> None:
    groups = np.arange(40).repeat(5)
    assert effective_n(groups >= wrong, groups) == 40
    assert effective_n(groups < wrong, groups) == 40
