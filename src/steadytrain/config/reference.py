"""The keys of the recipe as a reference, and the help of flags: all from the settings' fields.

>>> row = next(row for row in recipe_keys("model") if row.key == "model.decay")
>>> row.train, row.finetune, row.example
('0.75', '0.8', '--set model.decay=0.7')
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from functools import cache
from typing import Any

from steadytrain.config.defaults import usual_recipe
from steadytrain.config.plain import describe_type, hints_of, leaves
from steadytrain.config.recipe import Recipe, recipe_settings
from steadytrain.errors import RecipeError, did_you_mean


@dataclass(frozen=True)
class RecipeKey:
    """One key of the recipe, in words: its type, the defaults of ``train`` and ``finetune``, meaning and example."""

    key: str
    type: str
    train: str
    finetune: str
    meaning: str
    example: str


def recipe_keys(part: str = "") -> Iterator[RecipeKey]:
    """Yield every key of a part of the recipe, or of all of it.

    Raises:
        RecipeError: there is no such part.
    """
    parts = {name: hint for name, hint in hints_of(Recipe).items() if is_dataclass(hint)}
    if part and part not in parts:
        raise RecipeError(f"the recipe has no part {part!r}: it has {', '.join(parts)}.{did_you_mean(part, parts)}")
    for key, setting in recipe_settings().items():
        name, _, field = key.rpartition(".")
        if part in ("", name):
            example, shown = setting.example, key
            if isinstance(example, dict):
                shown, example = next((f"{key}.{option}", value) for option, value in example.items())
            value = _usual_values(finetune=False).get(key) if example is None else example
            text, hint = _words(value).replace(", ", ","), hints_of(parts[name] if name else Recipe)[field]
            train, finetune = usual_texts(key)
            yield RecipeKey(key, describe_type(hint), train, finetune, setting.meaning, f"--set {shown}={text}")


def usual_texts(key: str) -> tuple[str, str]:
    """Return the default of a key in words, of ``train`` and of ``finetune``."""
    usual = recipe_settings()[key].usual
    if usual:
        return (usual, usual) if isinstance(usual, str) else usual
    return _words(_usual_values(finetune=False).get(key)), _words(_usual_values(finetune=True).get(key))


def flag_help(key: str, verb: str = "") -> str:
    """Return what ``--help`` of a verb says of the flag that sets a key; without a verb, the defaults of both.

    >>> flag_help("optim.ema", "train")
    'Decay per update of averaged weights, which are evaluated and exported; 0: none. [default: none]'
    >>> flag_help("budget.patience", "train").rpartition(". ")[2]
    '[default: never]'
    >>> flag_help("budget.patience", "resume").rpartition(". ")[2]  # there it is the run's value
    'The learning rate falls as planned for the whole run.'
    """
    setting = recipe_settings()[key]
    assert setting.flag is not None
    text, value = setting.flag.help or setting.meaning, setting.usual or _usual_values(finetune=True).get(key)
    if value is None or value is False or setting.flag.kind is bool or verb == "resume":
        return text
    train, finetune = usual_texts(key)
    both = train if train == finetune else f"train: {train}; finetune: {finetune}"
    return f"{text} [default: {({'train': train, 'finetune': finetune}).get(verb, both)}]"


@cache
def _usual_values(*, finetune: bool) -> Mapping[str, Any]:
    return dict(leaves(usual_recipe("DATA", finetune=finetune, small=False).to_dict()))


def _words(value: object) -> str:
    if value is None or value in ({}, [], ()):
        return "none"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        return f"[{', '.join(map(_words, value))}]"
    return value if isinstance(value, str) else json.dumps(value)
