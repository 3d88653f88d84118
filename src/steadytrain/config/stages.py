"""The words of ``optim.schedule`` and ``optim.warmup``: laws of the learning rate, one after another."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from steadytrain.config.foreign import our_value
from steadytrain.config.laws import Stage, find_law, law_names, law_of
from steadytrain.config.words import number, refused
from steadytrain.errors import did_you_mean

WARMUPS = "linear, linear:SHARE, constant:SHARE or power:EXPONENT"


@dataclass(frozen=True)
class Warmup:
    """The warm-up of the rate: ``kind`` linear, constant or power; ``share`` of the peak it starts from; ``power``."""

    kind: str = "linear"
    share: float = 0.0
    power: float = 1.0


def parse_schedule(text: str) -> tuple[Stage, ...]:
    """Parse ``optim.schedule``: stages ``LAW[:EPOCHS][,NAME=VALUE...]`` with spaces between them.

    Raises:
        RecipeError: an unknown law or parameter, or a value beyond its limit, with what it must be.

    >>> parse_schedule("linear:5,to=1 cosine")
    (Stage(law='linear', epochs=5.0, values={'to': 1.0}), Stage(law='cosine', epochs=None, values={}))
    """
    stages = tuple(_stage(text, word) for word in text.split())
    if not stages:
        raise refused("optim.schedule", text, f"it must be one of {', '.join(law_names())}, or several of them")
    if len(stages) > 1 and (alone := [stage.law for stage in stages if law_of(stage).counts_updates]):
        raise refused("optim.schedule", text, f"{alone[0]} counts updates from the first one: use it alone")
    if [stage.law for stage in stages[:-1] if stage.law == "plateau"]:
        raise refused("optim.schedule", text, "plateau must be its last stage")
    if rising := [stage.law for stage in stages[1:] if law_of(stage).rises]:
        raise refused("optim.schedule", text, f"{rising[0]} begins low: put it first")
    if sum(stage.epochs is None for stage in stages) > 1:
        raise refused("optim.schedule", text, "all stages but one need their epochs, such as 'cosine:80 constant:15'")
    return stages


def parse_warmup(text: str) -> Warmup:
    """Parse ``optim.warmup``. Raises RecipeError.

    >>> parse_warmup("power:2"), parse_warmup("constant:0.1").share
    (Warmup(kind='power', share=0.0, power=2.0), 0.1)
    """
    kind, colon, value = text.partition(":")
    start = number(value) if colon else {"linear": 0.0, "power": 2.0}.get(kind, math.nan)
    if kind in ("linear", "constant") and 0 <= start <= 1 and (kind, start) != ("constant", 0):
        return Warmup(kind, share=start)
    if kind == "power" and 0 < start < math.inf:
        return Warmup(kind, power=start)
    raise refused(
        "optim.warmup",
        text,
        f"it must be {WARMUPS}, where SHARE is of the peak, up to 1 (its length: optim.warmup_epochs)."
        f"{did_you_mean(kind, ('linear', 'constant', 'power'))}",
    )


def _stage(text: str, word: str) -> Stage:
    head, *settings = word.split(",")
    name, colon, length = head.partition(":")
    law = find_law(name)
    if law is None:
        same = our_value("schedule", name)
        near = f" Did you mean {same}?" if same != name else did_you_mean(name, law_names())
        raise refused("optim.schedule", text, f"{name!r} must be one of {', '.join(law_names())}.{near}")
    epochs = number(length) if colon else None
    if epochs is not None and not 0 < epochs < math.inf:
        raise refused("optim.schedule", text, f"the epochs of a stage must be above 0, such as {name}:30")
    values: dict[str, Any] = {}
    for setting in settings:
        key, _, value = setting.partition("=")
        if key not in law.takes:
            takes = f"takes {', '.join(law.takes)}" if law.takes else "takes none"
            near = did_you_mean(key, law.takes)
            raise refused("optim.schedule", text, f"{name} has no parameter {key!r}: it {takes}.{near}")
        parameter = law.takes[key]
        values[key] = parameter.read(value)
        if not parameter.holds(values[key]):
            raise refused("optim.schedule", text, f"{name}'s {key} must be {parameter.words}")
    if law.needs and law.needs not in values:
        raise refused("optim.schedule", text, f"{name} needs {law.needs}, such as {name},{law.needs}=30")
    return Stage(name, epochs, values)
