"""Temperature scaling: one number that makes a trained model's probabilities true, kept with its weights.

Guo et al. 2017, "On Calibration of Modern Neural Networks", section 4.2: logits are divided by a temperature, chosen so
that the negative log likelihood (NLL) of images that were not trained on is least. Above 1 it makes a model less sure.
It changes the order of no probabilities, so no prediction either.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from steadytrain.data.arrays import Ints
from steadytrain.errors import DataError, ModelError, RunError
from steadytrain.run import Run
from steadytrain.training import checkpoints
from steadytrain.training.evaluation import Evaluation
from steadytrain.training.inference.trained import Trained
from steadytrain.training.metrics import calibration_of, standard_error

LEAST, MOST = 0.05, 20.0
"""Temperatures between which the best one must lie: beyond, nearly every image is right, or the model is no better than
a guess, and no temperature is best."""

_ROWS = 8192
_ROUNDS = 100


@dataclass(frozen=True)
class Fit:
    """A temperature and what it does to the ``n`` images that it was fitted on.

    ``score``: top-1; of several labels, mAP: it stays. ``nll_before``, ``ece_before``: with a temperature of 1.
    ``nll``, ``ece``: of each half of the images (every other one, or every other group) with the temperature fitted on
    the other half, which ``halves`` has: none judges itself. ``ece_by_chance``: what a perfectly calibrated model shows
    on so many images. ``gain``, ``gain_error``: by how much the NLL falls so, and its standard error. ``left``: why no
    temperature is kept.
    """

    temperature: float
    halves: tuple[float, float]
    n: int
    score: float
    nll_before: float
    nll: float
    ece_before: float
    ece: float
    ece_by_chance_before: float
    ece_by_chance: float
    gain: float
    gain_error: float
    left: str = ""


def fit_temperature(logits: NDArray[np.float32], labels: NDArray[Any]) -> float:
    """Find the temperature with the least mean NLL: exact and deterministic.

    In the inverse of the temperature the NLL is convex; the root of its derivative is found by Newton's method in a
    bracket, in double precision, to the last few bits.

    Args:
        logits: float32[n, K].
        labels: int64[n] classes, or [n, K] of 0 and 1 of several labels (then the NLL is of each label by itself).

    Raises:
        DataError: no image, logits that are not finite, or the best temperature is beyond :data:`LEAST` or
            :data:`MOST`.

    >>> logits = np.array([[2.0, 0.0], [2.0, 0.0], [2.0, 0.0], [0.0, 2.0]], np.float32)
    >>> round(fit_temperature(logits, np.array([0, 0, 1, 1])), 6)  # right 3 times in 4: 2 / log(3)
    1.820478
    """
    if not len(logits) or not np.isfinite(logits).all():
        raise DataError("the temperature cannot be fitted: there are no images, or outputs that are not finite")
    low, high, inverse = 1 / MOST, 1 / LEAST, 1.0
    if _slopes(logits, labels, low)[0] >= 0 or _slopes(logits, labels, high)[0] <= 0:
        raise DataError(
            f"no temperature from {LEAST:g} to {MOST:g} fits the images, or half of them, best: nearly all predictions"
            " are right, or they are no better than a guess; use more images, or others"
        )
    for _ in range(_ROUNDS):
        slope, curvature = _slopes(logits, labels, inverse)
        low, high = (inverse, high) if slope < 0 else (low, inverse)
        step = inverse - slope / curvature if curvature > 0 else low
        step = step if low < step < high else (low + high) / 2
        if abs(step - inverse) <= 1e-13 * inverse:
            break
        inverse = step
    return 1 / inverse


def _slopes(logits: NDArray[np.float32], labels: NDArray[Any], inverse: float) -> tuple[float, float]:
    """Return the first two derivatives of the summed NLL with respect to the inverse of the temperature."""
    slope = curvature = 0.0
    for z, y in _blocks(logits, labels):
        if y.dim() == 2:
            p = (inverse * z).sigmoid()
            slope += float(((p - y) * z).sum())
            curvature += float((p * (1 - p) * z * z).sum())
        else:
            p = (inverse * z).softmax(1)
            mean = (p * z).sum(1)
            slope += float((mean - z.gather(1, y[:, None])[:, 0]).sum())
            curvature += float((p * (z - mean[:, None]) ** 2).sum())
    return slope, curvature


def _blocks(logits: NDArray[np.float32], labels: NDArray[Any]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield logits float64 [B, K] with labels int64 [B] or float64 [B, K], a part at a time."""
    for first in range(0, len(logits), _ROWS):
        part = torch.from_numpy(np.ascontiguousarray(labels[first : first + _ROWS]))
        z = torch.from_numpy(np.ascontiguousarray(logits[first : first + _ROWS])).double()
        yield z, part.double() if part.dim() == 2 else part.long()


def _likelihoods(
    logits: NDArray[np.float32], labels: NDArray[Any], temperatures: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.bool_]]:
    """Return of each image its NLL (a mean over labels), and probabilities with what they are of, for the ECE."""
    losses, shares, rights = [], [], []
    parts = np.split(temperatures, range(_ROWS, len(temperatures), _ROWS))
    for (z, y), part in zip(_blocks(logits, labels), parts, strict=True):
        scaled = z / torch.from_numpy(part)[:, None]
        if y.dim() == 2:
            losses.append(functional.binary_cross_entropy_with_logits(scaled, y, reduction="none").mean(1))
            shares.append(scaled.sigmoid().flatten())
            rights.append(y.flatten() > 0)
        else:
            losses.append(functional.cross_entropy(scaled, y, reduction="none"))
            best = z.argmax(1)
            shares.append(scaled.softmax(1).gather(1, best[:, None])[:, 0])
            rights.append(best == y)
    return tuple(torch.cat(parts).numpy() for parts in (losses, shares, rights))  # type: ignore[return-value]


def fit(evaluation: Evaluation, groups: Ints | None = None) -> Fit:
    """Fit the temperature on all images of an evaluation, and judge one fitted on each half of them on the other.

    Args:
        evaluation: of a model without a temperature, with its logits.
        groups: int64 [n], images of which are in one half, and count as one in the standard error; None: each alone.

    Raises:
        DataError: as of :func:`fit_temperature`, of all images or of a half.
    """
    logits, labels = evaluation.logits, evaluation.labels
    assert logits is not None and labels is not None
    temperature = fit_temperature(logits, labels)
    half_of = (np.arange(len(logits)) if groups is None else np.unique(groups, return_inverse=True)[1]) % 2
    first, second = (fit_temperature(logits[half_of == half], labels[half_of == half]) for half in (0, 1))
    loss, shares, rights = _likelihoods(logits, labels, np.ones(len(logits)))
    losses, scaled, _ = _likelihoods(logits, labels, np.where(half_of == 0, second, first))
    before, after = calibration_of(shares, rights), calibration_of(scaled, rights)
    return Fit(
        temperature=temperature,
        halves=(first, second),
        n=len(logits),
        score=evaluation.score,
        nll_before=float(loss.mean()),
        nll=float(losses.mean()),
        gain=float((loss - losses).mean()),
        gain_error=standard_error(loss - losses, groups),
        ece_before=before.ece,
        ece=after.ece,
        ece_by_chance_before=before.chance,
        ece_by_chance=after.chance,
    )


def require_own_weights(trained: Trained) -> None:
    """Refuse weights that no temperature can be kept with: others' files, and those of a run that goes on.

    Raises:
        ModelError: not a file that steadytrain wrote.
        RunError: a process trains the run, and may replace the file.
    """
    if trained.path.suffix != ".safetensors" or "model" not in checkpoints.read_weights(trained.path)[1]:
        raise ModelError(
            f"{trained.path} is no weights file of steadytrain's, which a temperature could be kept in: calibrate"
            " weights of a run"
        )
    try:
        is_held = Run.open(trained.path.parent).is_held()
    except RunError:
        return
    if is_held:
        raise RunError(f"{trained.path.parent} is still training, and replaces its weights: calibrate it when it ended")
