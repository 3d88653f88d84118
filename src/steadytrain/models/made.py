"""A network as its maker gives it: untouched by any local weights file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from torch import nn

from steadytrain.config import Scalar
from steadytrain.errors import ModelError, did_you_mean, first_line
from steadytrain.models.inputs import Input

T = TypeVar("T", bound=nn.Module)

FAULTS = (RuntimeError, ValueError, TypeError, AssertionError, LookupError, AttributeError, ArithmeticError)
"""What networks and their makers raise for options, images and weights that they cannot take."""

RESERVED = ("num_classes", "channels", "in_chans", "pretrained", "checkpoint_path", "features_only")
"""What the data and the recipe's own keys decide, so that an option may not."""


@dataclass(frozen=True)
class Made:
    """A network, the names of its classifier's modules, what it wants to see, and things to tell the user."""

    module: nn.Module
    head: tuple[str, ...]
    input: Input
    licence: str = ""
    notes: tuple[str, ...] = ()
    weights: str = ""


def call(name: str, factory: Callable[..., T], options: Mapping[str, Scalar], **given: object) -> T:
    """Call a factory with what is ``given`` and the user's ``options``.

    Raises:
        ModelError: an option that the factory does not know, or a value that it refuses.
    """
    for option in options:
        if option in RESERVED:
            raise ModelError(f"model.options.{option} cannot be set: it follows from the data and the recipe; drop it")
    try:
        return factory(**given, **options)
    except FAULTS as error:
        told = " ".join(f"{key}={value!r}" for key, value in options.items()) or "none given"
        raise ModelError(f"{name} cannot be built: {first_line(error)} (model.options: {told})") from error


def known_options(name: str, options: Mapping[str, Scalar], known: list[str]) -> None:
    """Refuse an option that is none of ``known``. Raises ModelError with the nearest known one."""
    for option in options:
        if option not in known and option not in RESERVED:
            has = ", ".join(known) or "none"
            raise ModelError(f"{name} has no option {option!r}, it has {has}.{did_you_mean(option, known)}")
