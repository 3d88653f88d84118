"""Linear classifiers of features: fitted to all images, or to all but a fold, for an answer about each of its images.

An image's answer out of fold comes from a classifier that was not fitted to it, so what the answers say of labels, of
probabilities and of accuracy holds for images that have not been seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from steadytrain.data.arrays import Ints
from steadytrain.training.metrics import standard_error as standard_error

PENALTIES = (1.0, 0.1, 0.01, 1e-3, 1e-4, 1e-5)
"""Candidates for the weight of half the squared norm, of features whose mean square is 1; the strongest first."""

MOST_ITERATIONS = 300
"""The most iterations of L-BFGS: with a line search it comes to its tolerance in a tenth of these."""


@dataclass(frozen=True)
class OutOfFold:
    """Answers about images by classifiers that were not fitted to them.

    Args:
        logits: float32 [N, K], of each image by the classifier of its fold.
        fold_of: int64 [N], from 0.
        penalty: of all folds' classifiers, the one with the lowest loss.
        loss: mean cross-entropy of the logits.
        loss_error: its standard error; images of one group count as one observation.
        top1: share of images whose label has the largest logit.
        by_fold: that share of each fold.
    """

    logits: NDArray[np.float32]
    fold_of: Ints
    penalty: float
    loss: float
    loss_error: float
    top1: float
    by_fold: tuple[float, ...]

    @property
    def probabilities(self) -> NDArray[np.float64]:
        """Softmax of the logits, float64 [N, K]."""
        return torch.from_numpy(self.logits).double().softmax(1).numpy()


def out_of_fold(
    values: NDArray[np.float32],
    labels: Ints,
    fold_of: Ints,
    num_classes: int,
    *,
    groups: Ints | None = None,
    trusted: NDArray[np.bool_] | None = None,
    penalties: Sequence[float] = PENALTIES,
    device: torch.device | str = "cpu",
) -> OutOfFold:
    """Answer about each image by multinomial logistic regression on the images of all other folds.

    The penalty is the one of :data:`PENALTIES` with the lowest loss over all folds; weaker ones than the first that is
    worse are not tried. Each fit starts from that of its fold under the stronger penalty.

    Args:
        values: float32 [N, D] features, a row for each image.
        labels: int64 [N], one class for each image.
        fold_of: int64 [N]; images that belong together are in one fold (:func:`.fold_numbers`).
        num_classes: outputs.
        groups: int64 [N], for ``loss_error``: images of one group are alike. None: each stands alone.
        trusted: bool [N], the images that classifiers are fitted to, and the penalty is chosen on; None: all. All are
            answered.
        penalties: to choose from, the strongest first; that of a classifier alone gives answers that are like its own.
        device: that computes.

    Raises:
        ValueError: labels are vectors, or all images are in one fold.

    >>> rng = np.random.default_rng(0)
    >>> labels = np.arange(60) % 2
    >>> values = (rng.normal(size=(60, 3)) + 6 * labels[:, None]).astype(np.float32)
    >>> answers = out_of_fold(values, labels, np.arange(60) // 12, 2)
    >>> answers.top1, answers.by_fold, answers.logits.shape
    (1.0, (1.0, 1.0, 1.0, 1.0, 1.0), (60, 2))
    """
    if labels.ndim != 1:
        raise ValueError(f"labels have the shape {labels.shape}: out_of_fold takes one class for each image")
    folds = np.unique(fold_of)
    if len(folds) < 2:
        raise ValueError("all images are in one fold: give two folds or more")
    x, _, _ = standardize(torch.tensor(values, device=device))
    y = torch.tensor(labels, dtype=torch.int64, device=device)
    rows = [torch.from_numpy(fold_of == fold).to(device) for fold in folds]
    is_fitted = torch.from_numpy(np.ones(len(y), np.bool_) if trusted is None else trusted).to(device)
    fitted: list[tuple[Tensor, Tensor] | None] = [None] * len(folds)
    best, chosen, penalty = float("inf"), x.new_zeros(len(x), num_classes), penalties[0]
    for candidate in penalties:
        logits = torch.empty_like(chosen)
        for fold, held in enumerate(rows):
            others = ~held & is_fitted
            classifier = minimize(x[others], y[others], num_classes, candidate, fitted[fold])
            fitted[fold], logits[held] = classifier, functional.linear(x[held], *classifier)
        loss = float(functional.cross_entropy(logits[is_fitted], y[is_fitted]))
        if loss >= best:
            break
        best, chosen, penalty = loss, logits, candidate
    losses = functional.cross_entropy(chosen, y, reduction="none").double().cpu().numpy()
    is_right = (chosen.argmax(1) == y).cpu().numpy()
    return OutOfFold(
        chosen.cpu().numpy(),
        np.asarray(fold_of, np.int64),
        penalty,
        float(losses.mean()),
        standard_error(losses, groups),
        float(is_right.mean()),
        tuple(float(is_right[fold_of == fold].mean()) for fold in folds),
    )


def standardize(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Centre features, and divide them by one number so that their mean square is 1; return both as well."""
    centre = values.mean(0)
    scale = (values - centre).square().mean().sqrt().clamp(min=1e-12)
    return (values - centre) / scale, centre, scale


def fit_classifier(
    values: Tensor, labels: Tensor, is_held: Tensor, num_classes: int
) -> tuple[Tensor, Tensor, float, float]:
    """Choose the penalty on the held-out rows by their loss, then fit all rows.

    Features are centred, and divided by one number so that their mean square is 1; the classifier that is returned
    takes them as they are.

    Args:
        values: float32 [N, D]; ``labels`` int64 [N]; ``is_held`` bool [N]: rows to choose the penalty on.

    Returns:
        Weights [num_classes, D], biases [num_classes], the penalty, and top-1 of the held-out rows under it.
    """
    x, centre, scale = standardize(values)
    penalty, top1 = PENALTIES[2], 0.0
    if 0 < int(is_held.sum()) < len(x):
        best, fitted = float("inf"), None
        for candidate in PENALTIES:
            fitted = minimize(x[~is_held], labels[~is_held], num_classes, candidate, fitted)
            logits = functional.linear(x[is_held], *fitted)
            loss = float(functional.cross_entropy(logits, labels[is_held]))
            if loss < best:
                best, penalty = loss, candidate
                top1 = float((logits.argmax(1) == labels[is_held]).float().mean())
    weight, bias = minimize(x, labels, num_classes, penalty, None)
    return weight / scale, bias - weight @ centre / scale, penalty, top1


def minimize(
    x: Tensor, labels: Tensor, num_classes: int, penalty: float, start: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor]:
    """Minimise the mean cross-entropy plus ``penalty`` times half the squared norm of the weights, by L-BFGS.

    Scikit-learn's ``LogisticRegression`` minimises the same with ``C = 1 / (N * penalty)``. (Liu & Nocedal 1989, "On
    the Limited Memory BFGS Method for Large Scale Optimization".)

    >>> x, labels = torch.tensor([[-1.0], [1.0]]), torch.tensor([0, 1])
    >>> weight, bias = minimize(x, labels, 2, 0.1, None)
    >>> bool(weight[1] > 0 > weight[0]), bool(bias.abs().max() < 1e-4)
    (True, True)
    """
    weight = x.new_zeros(num_classes, x.shape[1]) if start is None else start[0].clone()
    bias = x.new_zeros(num_classes) if start is None else start[1].clone()
    parameters = [weight.requires_grad_(), bias.requires_grad_()]
    lbfgs = torch.optim.LBFGS(
        parameters,
        max_iter=MOST_ITERATIONS,
        tolerance_grad=1e-6,
        tolerance_change=1e-9,
        history_size=10,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        lbfgs.zero_grad()
        loss = functional.cross_entropy(functional.linear(x, weight, bias), labels)
        loss = loss + penalty / 2 * weight.square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    with torch.enable_grad():
        lbfgs.step(closure)  # type: ignore[no-untyped-call]
    return weight.detach(), bias.detach()
