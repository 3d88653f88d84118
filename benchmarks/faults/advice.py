"""The advice of a verdict as settings of the next run."""

from __future__ import annotations

import shlex
from itertools import pairwise
from typing import Any

from steadytrain.cli.options import key_of, parse_setting

PACKS = "steady pack"
"""The key of the flags that the data are to be packed with."""

_KEPT = {"budget.steps", "budget.epochs", "data.train", "model.name"}


def settings_of(change: str) -> dict[str, Any] | None:
    """Return the recipe's keys and values that the advised flags set; None where a run cannot be given the change.

    >>> settings_of("--threads 2"), settings_of("--set every.evaluate_epochs=1 --batch-size 64")
    ({'parallel.threads': 2}, {'every.evaluate_epochs': 1, 'batch_size': 64})
    >>> settings_of("steady pack FOLDER small.rec --shorter-side 73")
    {'steady pack': ('--shorter-side', '73')}
    >>> settings_of("give the container more cores: docker run --cpus 2"), settings_of("")
    (None, None)
    """
    try:
        words = shlex.split(change.replace("`", " "))
    except ValueError:
        return None
    if words[:2] == ["steady", "pack"]:
        return {PACKS: tuple(words[4:])} if len(words) > 4 and words[4].startswith("--") else None
    document: dict[str, Any] = {}
    for flag, value in pairwise(words):
        key = key_of(flag) if flag.startswith("--") else None
        if flag == "--set" and "=" in value:
            document.__setitem__(*parse_setting(value.rstrip(",;.")))
        elif key is not None:
            document[key] = parse_setting(f"x={value.rstrip(',;.')}")[1]
    return document if document and not document.keys() & _KEPT else None
