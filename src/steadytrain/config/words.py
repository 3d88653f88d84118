"""Parsers of a recipe's small grammars: numbers, ``VALUE@EPOCH``, and the one way to refuse a word."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from steadytrain.errors import RecipeError


def refused(key: str, text: str, reason: str) -> RecipeError:
    """Make the error for a value of a recipe's key that cannot be read; ``reason`` goes on behind a semicolon."""
    return RecipeError(f"{key} is {text!r}; {reason}")


def number(text: str) -> float:
    """Read a number; what is none is NaN, which no limit holds."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def at_epochs(
    key: str, texts: Iterable[str], must: str, *, least: int, most: int, after: float
) -> list[tuple[int, float]]:
    """Read ``VALUE@EPOCH`` words: whole numbers from ``least`` to ``most``, at rising epochs above ``after``.

    Raises:
        RecipeError: something else, with what it ``must`` be.
    """
    values: list[tuple[int, float]] = []
    for text in texts:
        match = re.fullmatch(r"([0-9]{1,7})@([0-9]*\.?[0-9]+)", text.strip())
        value, epoch = (int(match[1]), float(match[2])) if match else (least - 1, after)
        if not least <= value <= most or epoch <= (values[-1][1] if values else after):
            raise RecipeError(f"{key} has {text!r}; it must be {must}")
        values.append((value, epoch))
    return values
