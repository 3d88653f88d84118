"""Names of losses as a recipe writes them: ``cross-entropy``, ``focal:2``, ``pkg.mod:factory``."""

from __future__ import annotations

from dataclasses import dataclass

from steadytrain.config.factories import FACTORY
from steadytrain.config.words import number, refused
from steadytrain.errors import did_you_mean

PARAMETERS: dict[str, tuple[str, float] | None] = {
    "auto": None,
    "cross-entropy": None,
    "focal": ("gamma", 2.0),
    "binary": None,
    "binary-focal": ("gamma", 2.0),
    "hinge": ("margin", 1.0),
    "l1": None,
    "l2": None,
}
"""Losses by name, with the name and the default of the number that may follow behind a colon."""

SOFTMAX = ("auto", "cross-entropy", "focal")
"""Losses of one distribution over all classes; the others judge each class by itself, so an image may have several."""


@dataclass(frozen=True)
class LossSpec:
    """A loss as a recipe names it: ``name``, or the path of a user's factory, and its number (0 where it has none)."""

    name: str
    parameter: float = 0.0
    is_factory: bool = False

    def __str__(self) -> str:
        has_parameter = not self.is_factory and PARAMETERS[self.name] is not None
        return f"{self.name}:{self.parameter:g}" if has_parameter else self.name


def parse_loss(text: str) -> LossSpec:
    """Read ``NAME``, ``NAME:NUMBER`` or ``pkg.mod:factory``. Raises RecipeError with the nearest names.

    >>> parse_loss("focal"), str(parse_loss("hinge:0.5"))
    (LossSpec(name='focal', parameter=2.0, is_factory=False), 'hinge:0.5')
    >>> parse_loss("crossentropy")
    Traceback (most recent call last):
    steadytrain.errors.RecipeError: optim.loss is 'crossentropy'; it must be one of auto, cross-entropy, focal, binary,\
 binary-focal, hinge, l1, l2, or pkg.mod:factory. Did you mean cross-entropy?
    """
    name, colon, value_text = text.partition(":")
    if name not in PARAMETERS:
        if FACTORY.fullmatch(text):
            return LossSpec(text, is_factory=True)
        near = did_you_mean(name, PARAMETERS)
        names = ", ".join(PARAMETERS)
        raise refused("optim.loss", text, f"it must be one of {names}, or pkg.mod:factory.{near}")
    takes = PARAMETERS[name]
    if takes is None:
        if colon:
            raise refused("optim.loss", text, f"{name} takes no number: write optim.loss={name}")
        return LossSpec(name)
    parameter, default = takes
    value = number(value_text) if colon else default
    if not 0 <= value < float("inf") or (parameter == "margin" and value == 0):
        least = "above 0" if parameter == "margin" else "0 or more"
        raise refused("optim.loss", text, f"its {parameter} must be {least}, such as {name}:{default:g}")
    return LossSpec(name, value)
