"""The classifier of a network that somebody else wrote."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn


def find_head(module: nn.Module, num_classes: int) -> tuple[str, ...]:
    """The name of the last linear layer or convolution that has ``num_classes`` outputs; empty if there is none."""
    named = [name for name, part in module.named_modules() if name and _num_outputs(part) == num_classes]
    return tuple(named[-1:])


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
