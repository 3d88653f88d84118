"""Precision, recall, F1 and calibration: equal to scikit-learn's, MXNet's and the definition's."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from sklearn.metrics import precision_recall_fscore_support

from steadytrain.training.evaluation import Evaluation
from steadytrain.training.metrics import calibration, class_scores, macro


def evaluation_of(p: NDArray[np.floating], labels: NDArray[np.int64]) -> Evaluation:
    """What an evaluation counts of probabilities [N, C]."""
    predicted, classes = p.argmax(1), p.shape[1]
    rank = np.where(predicted == labels, 1, 2)
    outputs = np.stack([predicted, p.max(1), np.zeros(len(p)), rank], 1).astype(np.float32)
    right, total = np.bincount(labels[rank == 1], minlength=classes), np.bincount(labels, minlength=classes)
    top1 = float((rank == 1).mean())
    counts = {"right": tuple(right.tolist()), "total": tuple(total.tolist())}
    return Evaluation(n=len(p), loss=0.0, top1=top1, top5=1.0, outputs=outputs, **counts)


def test_scores_are_those_of_scikit_learn() -> None:
    draw = np.random.default_rng(5)
    p, labels = draw.dirichlet(np.full(6, 0.5), 200), draw.integers(0, 6, 200)
    p[:, 4] = 0  # never predicted
    labels[labels == 2] = 3  # no images: predicted for others' images
    scores = class_scores(told := evaluation_of(p, labels))
    present = [0, 1, 3, 4, 5]
    wanted = precision_recall_fscore_support(labels, p.argmax(1), labels=present, zero_division=0)
    for k, precision, recall, f1 in zip(present, *wanted[:3], strict=True):
        assert (scores[k].precision or 0, scores[k].recall, scores[k].f1) == pytest.approx((precision, recall, f1))
    assert scores[4].precision is None and scores[4].f1 == 0 and scores[2].recall is scores[2].f1 is None
    average = precision_recall_fscore_support(labels, p.argmax(1), labels=present, zero_division=0, average="macro")
    mean = macro(scores)
    assert (mean.precision, mean.recall, mean.f1) == pytest.approx(average[:3])
    assert told.n == 200


def test_f1_is_mxnets_of_pooled_counts(data_folder: Path) -> None:
    folder = data_folder / "mxnet-golden"
    golden = json.loads((folder / "metrics.json").read_text())["fed_in_batches"]
    with np.load(folder / "metrics.npz", allow_pickle=False) as arrays:
        told = evaluation_of(arrays["pred2"], arrays["label2"].astype(np.int64))
    name = next(name for name in golden if "f1" in name and "micro" in name)
    assert class_scores(told)[1].f1 == pytest.approx(golden[name][2]["global_value"])


def test_the_calibration_error_is_that_of_its_definition() -> None:
    draw = np.random.default_rng(6)
    p, labels = draw.dirichlet(np.full(4, 0.3), 300), draw.integers(0, 4, 300)
    p[0] = (1, 0, 0, 0)
    told = calibration(evaluation_of(p, labels))
    confidence, right, error = p.max(1).astype(np.float32).astype(float), p.argmax(1) == labels, 0.0
    for k in range(15):
        inside = (confidence > k / 15) & (confidence <= (k + 1) / 15)
        assert told.bins[k].n == inside.sum()
        if inside.any():
            assert told.bins[k].top1 == pytest.approx(right[inside].mean())
            error += inside.mean() * abs(right[inside].mean() - confidence[inside].mean())
    assert told.ece == pytest.approx(error) and told.confidence == pytest.approx(confidence.mean())


def test_what_is_not_finite_has_no_calibration() -> None:
    told = calibration(evaluation_of(np.array([[np.nan, 0.5]]), np.array([0])))
    assert math.isnan(told.ece) and math.isnan(told.confidence)
