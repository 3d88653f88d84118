"""Linear classifiers of features: fitted to all images, or to all but a fold, for an answer about each of its images.

An image's answer out of fold comes from a classifier that was not fitted to it, so what the answers say of labels, of
probabilities and of accuracy holds for images that have not been seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from steadytrain.data.arrays import Floats, Ints
from steadytrain.training.metrics import standard_error as standard_error

PENALTIES = (1.0, 0.1, 0.01, 1e-3, 1e-4, 1e-5)
"""Candidates for the weight of half the squared norm, of features whose mean square is 1; the strongest first."""

MOST_BYTES, BLOCK_BYTES = 2**29, 2**26
"""Bytes of features that are held in memory; of more, each step of a fit reads them again, in blocks of so many."""

MOST_ITERATIONS = 300
"""The most iterations of L-BFGS: with a line search it comes to its tolerance in a tenth of these."""


Classifier = tuple[Tensor, Tensor]
"""Weights float32 [K, D], and biases float32 [K]."""

Blocks = Callable[[], Iterable[tuple[Tensor, Tensor]]]


@dataclass(frozen=True)
class OutOfFold:
    """Answers about images by classifiers that were not fitted to them.

    Args:
        logits: float32 [N, K], of each image by the classifier of its fold.
        fold_of: int64 [N], from 0.
        penalty: of all folds' classifiers, the one with the lowest loss.
        losses: float64 [N], cross-entropy of the logits.
        loss: their mean.
        loss_error: its standard error; images of one group count as one observation.
        top1: share of images whose label has the largest logit.
        by_fold: that share of each fold.
        is_answered: bool [N]; not those whose class is in no other fold, which no classifier could name. The figures
            are of the others.
    """

    logits: NDArray[np.float32]
    fold_of: Ints
    penalty: float
    losses: Floats
    loss: float
    loss_error: float
    top1: float
    by_fold: tuple[float, ...]
    is_answered: NDArray[np.bool_]

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
        values: float32 [N, D] features, a row for each image; they may be mapped from a file larger than the memory.
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
    y = torch.tensor(labels, dtype=torch.int64, device=device)
    features = Features(values, device)
    is_held = [torch.from_numpy(fold_of == fold).to(device) for fold in folds]
    is_fitted = torch.from_numpy(np.ones(len(y), np.bool_) if trusted is None else trusted).to(device)
    of_folds = np.bincount(np.unique(np.stack([labels, fold_of]), axis=1)[0])  # that have a class
    is_answered = (of_folds > 1)[labels] if (of_folds > 1).any() else np.ones(len(labels), np.bool_)
    judged = is_fitted & torch.from_numpy(is_answered).to(device)
    fitted: list[Classifier | None] = [None] * len(folds)
    best, chosen, penalty = float("inf"), torch.zeros(len(y), num_classes, device=device), penalties[0]
    for candidate in penalties:
        logits = torch.empty_like(chosen)
        for fold, held in enumerate(is_held):
            fitted[fold] = classifier = minimize(
                features.choose(~held & is_fitted, y), num_classes, candidate, fitted[fold]
            )
            logits[held] = features.answer(held, classifier)
        loss = float(functional.cross_entropy(logits[judged], y[judged]))
        if loss >= best:
            break
        best, chosen, penalty = loss, logits, candidate
    losses = functional.cross_entropy(chosen, y, reduction="none").double().cpu().numpy()
    is_right = (chosen.argmax(1) == y).cpu().numpy()
    return OutOfFold(
        chosen.cpu().numpy(),
        np.asarray(fold_of, np.int64),
        penalty,
        losses,
        float(losses[is_answered].mean()),
        standard_error(losses[is_answered], None if groups is None else groups[is_answered]),
        float(is_right[is_answered].mean()),
        tuple(float(is_right[is_answered & (fold_of == fold)].mean()) for fold in np.unique(fold_of[is_answered])),
        is_answered,
    )


class Features:
    """Features, centred and divided by one number so that their mean square is 1, as they are read.

    Up to :data:`MOST_BYTES` are one block, which is standardised once. Of more, one block at a time is in memory: the
    others stay where they are mapped from.

    Args:
        values: float32 [N, D], a tensor or an array.
        device: that computes; another one than the CPU holds all of them.

    Attributes:
        centre, scale: float32 [D], and a number.
    """

    def __init__(self, values: Tensor | NDArray[np.float32], device: torch.device | str) -> None:
        if not isinstance(values, Tensor) and torch.device(device).type != "cpu":
            values = torch.tensor(values, device=device)
        n, row_bytes = len(values), 4 * values.shape[1]
        most = n if isinstance(values, Tensor) or n * row_bytes <= MOST_BYTES else BLOCK_BYTES // row_bytes
        self._values = values
        self._parts = [slice(first, min(first + most, n)) for first in range(0, n, most)]
        self._block: Tensor | None = None
        if len(self._parts) == 1:
            rows = values if isinstance(values, Tensor) else torch.tensor(values)
            self.centre = rows.mean(0)
            block = rows - self.centre
            self.scale = block.square().mean().sqrt().clamp(min=1e-12)
            self._block = block.div_(self.scale)
            return
        self.centre, self.scale = torch.zeros(()), torch.ones(())
        self.centre = self._mean(lambda rows: rows.mean(0))
        self.scale = self._mean(lambda rows: rows.square().mean()).sqrt().clamp(min=1e-12)

    def _read(self, part: slice) -> Tensor:
        """Return a block of standardised features, which is not to be changed."""
        if self._block is not None:
            return self._block
        return torch.tensor(self._values[part]).sub_(self.centre).div_(self.scale)

    def _mean(self, mean: Callable[[Tensor], Tensor]) -> Tensor:
        n, total = self._parts[-1].stop, torch.zeros(())
        for part in self._parts:
            total = total + mean(self._read(part)) * ((part.stop - part.start) / n)
        return total

    def choose(self, is_chosen: Tensor, labels: Tensor) -> Blocks:
        """Return what yields the chosen rows and their labels, of both [N], block by block."""

        def blocks() -> Iterator[tuple[Tensor, Tensor]]:
            for part in self._parts:
                if (rows := is_chosen[part]).all():
                    yield self._read(part), labels[part]
                elif rows.any():
                    yield self._read(part)[rows], labels[part][rows]

        if len(self._parts) > 1:
            return blocks
        kept = list(blocks())
        return lambda: kept

    def answer(self, is_chosen: Tensor, classifier: Classifier) -> Tensor:
        """Return what a classifier of standardised features answers to the chosen rows: float32 [M, K]."""
        return torch.cat([functional.linear(self._read(part)[is_chosen[part]], *classifier) for part in self._parts])


def fit_classifier(
    values: Tensor | NDArray[np.float32], labels: Tensor, is_held: Tensor, num_classes: int
) -> tuple[Tensor, Tensor, float, float]:
    """Choose the penalty on the held-out rows by their loss, then fit all rows.

    Args:
        values: float32 [N, D]; ``labels`` int64 [N]; ``is_held`` bool [N]: rows to choose the penalty on.

    Returns:
        Weights [num_classes, D] and biases [num_classes] for features as they are, the penalty, and top-1 of the
        held-out rows under it.
    """
    features = Features(values, labels.device)
    penalty, top1 = PENALTIES[2], 0.0
    if 0 < int(is_held.sum()) < len(labels):
        best, fitted = float("inf"), None
        for candidate in PENALTIES:
            fitted = minimize(features.choose(~is_held, labels), num_classes, candidate, fitted)
            logits = features.answer(is_held, fitted)
            loss = float(functional.cross_entropy(logits, labels[is_held]))
            if loss < best:
                best, penalty = loss, candidate
                top1 = float((logits.argmax(1) == labels[is_held]).float().mean())
    weight, bias = minimize(features.choose(torch.ones_like(is_held), labels), num_classes, penalty, None)
    return weight / features.scale, bias - weight @ features.centre / features.scale, penalty, top1


def minimize(blocks: Blocks, num_classes: int, penalty: float, start: Classifier | None) -> Classifier:
    """Minimise the mean cross-entropy plus ``penalty`` times half the squared norm of the weights, by L-BFGS.

    Scikit-learn's ``LogisticRegression`` minimises the same with ``C = 1 / (N * penalty)``. (Liu & Nocedal 1989, "On
    the Limited Memory BFGS Method for Large Scale Optimization".)

    Args:
        blocks: yields float32 [B, D] features and int64 [B] labels, and is called at each step.
        num_classes: outputs.
        penalty: above 0.
        start: weights and biases to begin with; None: zeros.

    >>> weight, bias = minimize(lambda: [(torch.tensor([[-1.0], [1.0]]), torch.tensor([0, 1]))], 2, 0.1, None)
    >>> bool(weight[1] > 0 > weight[0]), bool(bias.abs().max() < 1e-4)
    (True, True)
    """
    n = sum(len(labels) for _, labels in blocks())
    x, _ = next(iter(blocks()))
    weight = x.new_zeros(num_classes, x.shape[1]) if start is None else start[0].clone()
    bias = x.new_zeros(num_classes) if start is None else start[1].clone()
    lbfgs = torch.optim.LBFGS(
        [weight.requires_grad_(), bias.requires_grad_()],
        max_iter=MOST_ITERATIONS,
        tolerance_grad=1e-6,
        tolerance_change=1e-9,
        history_size=10,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        lbfgs.zero_grad()
        total = penalty / 2 * weight.square().sum()
        total.backward()  # type: ignore[no-untyped-call]
        for x, labels in blocks():
            loss = len(labels) / n * functional.cross_entropy(functional.linear(x, weight, bias), labels)
            loss.backward()  # type: ignore[no-untyped-call]
            total = total.detach() + loss.detach()
        return total

    with torch.enable_grad():
        lbfgs.step(closure)  # type: ignore[no-untyped-call]
    return weight.detach(), bias.detach()
