"""The table of losses, by name: of one class an image, of several, and of mixed ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from steadytrain.config import Optim
from steadytrain.config.factories import import_factory
from steadytrain.config.losses import SOFTMAX, parse_loss
from steadytrain.errors import RecipeError, first_line

Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""A function of logits float32 [B, K] and targets int64 [B] (a class each) or float32 [B, K] (shares of each class, or
a vector of labels). It returns the mean over images, a float32 scalar.
"""


def cross_entropy(logits: Tensor, targets: Tensor, _: float) -> Tensor:
    """Compute the cross-entropy of each image, float32 [B], of targets float32 [B, K]."""
    return functional.cross_entropy(logits, targets, reduction="none")


def focal(logits: Tensor, targets: Tensor, gamma: float) -> Tensor:
    """Compute the focal loss of each image, float32 [B]: cross-entropy times ``(1 - p) ** gamma`` of the true class.

    Lin et al. 2017, "Focal Loss for Dense Object Detection", in its softmax form; of a mixed image the sum over classes
    by their shares. ``gamma=0`` is cross-entropy.
    """
    log_p = functional.log_softmax(logits, 1)
    return -(targets * (1 - log_p.exp()).clamp(min=1e-7) ** gamma * log_p).sum(1)


def binary(logits: Tensor, targets: Tensor, _: float) -> Tensor:
    """Compute the binary cross-entropy of each label, float32 [B, K]."""
    return functional.binary_cross_entropy_with_logits(logits, targets, reduction="none")


def binary_focal(logits: Tensor, targets: Tensor, gamma: float) -> Tensor:
    """Compute the focal loss of each label, float32 [B, K] (Lin et al. 2017, equation 4, without alpha)."""
    log_p, log_q = functional.logsigmoid(logits), functional.logsigmoid(-logits)
    p, q = log_p.exp().clamp(min=1e-7), log_q.exp().clamp(min=1e-7)
    return -(targets * q**gamma * log_p + (1 - targets) * p**gamma * log_q)


def hinge(logits: Tensor, targets: Tensor, margin: float) -> Tensor:
    """Compute the hinge loss of each label, float32 [B, K]: one against all others, as MXNet's ``SVMOutput``."""
    return targets * (margin - logits).clamp(min=0) + (1 - targets) * (margin + logits).clamp(min=0)


def l1(logits: Tensor, targets: Tensor, _: float) -> Tensor:
    """Compute the absolute difference of logit and target of each label, float32 [B, K]."""
    return (logits - targets).abs()


def l2(logits: Tensor, targets: Tensor, _: float) -> Tensor:
    """Compute the squared difference of logit and target of each label, float32 [B, K].

    Hui and Belkin 2021, "Evaluation of Neural Architectures Trained with Square Loss vs Cross-Entropy in Classification
    Tasks". MXNet's ``L2Loss`` is half of it.
    """
    return (logits - targets).square()


LOSSES: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "cross-entropy": cross_entropy,
    "focal": focal,
    "binary": binary,
    "binary-focal": binary_focal,
    "hinge": hinge,
    "l1": l1,
    "l2": l2,
}
"""Losses by name, of logits and targets float32 [B, K] and a number; ``pkg.mod:factory`` comes on top."""


def balanced_weights(counts: Tensor, num_images: int, *, is_multi_label: bool = False) -> Tensor:
    """Return float32 [K]: what a class weighs (``class_weights="balanced"``).

    Of one class an image ``N / (K * n)``, so that all classes weigh the same in sum and an image weighs 1 on average
    (King and Zeng 2001, "Logistic Regression in Rare Events Data"). Of several labels, what an image that has the label
    weighs beside one that has it not: ``(N - n) / n``. A class without images weighs 1.

    Args:
        counts: [K], images ``n`` of each class.
        num_images: ``N``.
        is_multi_label: an image may have several labels.

    >>> balanced_weights(torch.tensor([6, 2]), 8).tolist()
    [0.6666666865348816, 2.0]
    >>> balanced_weights(torch.tensor([6, 2]), 8, is_multi_label=True).tolist()
    [0.3333333432674408, 3.0]
    """
    n = counts.double()
    weights = (num_images - n) / n if is_multi_label else num_images / (len(n) * n)
    return torch.where((n > 0) & (weights > 0), weights, 1.0).float()


def make_loss(
    spec: Optim,
    *,
    weights: Tensor | None = None,
    is_multi_label: bool = False,
    num_classes: int = 2,
    allow_import: bool = False,
) -> Loss:
    """Make the loss that the recipe names.

    Args:
        spec: its ``loss`` and ``label_smoothing``.
        weights: float32 [K] on the device, of :func:`balanced_weights`; None: all weigh the same.
        is_multi_label: targets are vectors of labels; smoothing then draws them towards 1/2.
        num_classes: K.
        allow_import: import a ``pkg.mod:factory``; only if the user's own code or command line named it.

    Raises:
        RecipeError: a factory that may not be imported or makes no loss, or a loss that does not suit the labels.

    >>> loss = make_loss(Optim(loss="focal:0"))
    >>> loss(torch.zeros(3, 2), torch.tensor([0, 1, 1]))
    tensor(0.6931)
    """
    chosen, smoothing = parse_loss(spec.loss), spec.label_smoothing
    if chosen.is_factory:
        return _own_loss(chosen.name, num_classes, is_multi_label=is_multi_label, allow_import=allow_import)
    name = chosen.name if chosen.name != "auto" else "binary" if is_multi_label else "cross-entropy"
    if is_multi_label and name in SOFTMAX:
        raise RecipeError(
            f"optim.loss is {spec.loss!r}, which is for one class an image, and these images may have several labels:"
            " use --loss binary (or binary-focal, hinge)"
        )
    if name == "cross-entropy" and weights is None:
        return partial(functional.cross_entropy, label_smoothing=smoothing)
    image_losses, parameter = LOSSES[name], chosen.parameter

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        if targets.dim() == 1:
            targets = torch.zeros_like(logits).scatter_(1, targets[:, None], 1.0)
        level = 0.5 if is_multi_label else 1 / logits.shape[1]
        smoothed = targets * (1 - smoothing) + smoothing * level if smoothing else targets
        losses = image_losses(logits, smoothed, parameter)
        if weights is None:
            return losses.mean()
        if is_multi_label:
            return (losses * (1 + targets * (weights - 1))).mean()
        per_image = losses if losses.dim() == 1 else losses.mean(1)
        return (per_image * (targets @ weights)).mean()

    return loss


def _own_loss(path: str, num_classes: int, *, is_multi_label: bool, allow_import: bool) -> Loss:
    """Call the user's factory, and what it makes with two images: it has to give one number."""
    make = import_factory(path, key="optim.loss", flag="--loss", what="a loss", allow_import=allow_import)
    logits, targets = torch.zeros(2, num_classes), torch.zeros(2, dtype=torch.int64)
    try:
        loss: Loss = make()
        value = loss(logits, torch.zeros_like(logits) if is_multi_label else targets)
    except Exception as error:
        raise RecipeError(f"optim.loss={path} failed: {type(error).__name__}: {first_line(error)}") from error
    if not isinstance(value, Tensor) or value.dim() != 0 or not value.is_floating_point():
        result = f"{value.dtype} of shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise RecipeError(
            f"optim.loss={path} gave {result}; a loss of logits [B, K] and targets must be one number, the mean over"
            " images: a tensor without dimensions"
        )
    return loss
