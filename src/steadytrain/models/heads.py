"""The classifier of a network: where it is, and a fresh one for other classes."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn


def find_head(module: nn.Module, num_classes: int) -> tuple[str, ...]:
    """The name of the last linear layer or convolution that has ``num_classes`` outputs; empty if there is none."""
    named = [name for name, part in module.named_modules() if name and _num_outputs(part) == num_classes]
    return tuple(named[-1:])


@torch.no_grad()
def make_fresh(module: nn.Module, head: tuple[str, ...]) -> None:
    """Draw a classifier that begins almost without an opinion: weights of standard deviation 0.01, biases 0.

    What networks draw for themselves can be meant for training from scratch: timm's MobileNetV2 begins with weights up
    to 0.3 for ten classes, hence a loss of 7 where chance has 2.3, and the first updates tear the body apart (40 % on
    a thousand photographs after six epochs instead of 80 %). Not zero, because some classifiers end in a ReLU.
    """
    for name in head:
        part = module.get_submodule(name)
        if isinstance(part, nn.Linear | nn.Conv2d):
            part.weight.normal_(std=0.01)
            if part.bias is not None:
                part.bias.zero_()


def replaced(before: int | None, now: int) -> str:
    """What to tell the user of a classifier that was not taken over; ``before`` is None or 0 where there was none."""
    fresh = f"a fresh one for {now}"
    return f"the classifier of {before} classes was replaced by {fresh}" if before else f"no classifier in it: {fresh}"


def under(name: str, prefixes: Iterable[str]) -> bool:
    """Whether a parameter or module of this name belongs to one of the modules ``prefixes``.

    >>> under("fc.weight", ["fc"]), under("fc2.weight", ["fc"])
    (True, False)
    """
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)


def _num_outputs(part: nn.Module) -> int | None:
    if isinstance(part, nn.Linear):
        return part.out_features
    return part.out_channels if isinstance(part, nn.Conv2d) else None
