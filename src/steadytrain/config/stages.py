"""The words of ``optim.schedule`` and ``optim.warmup``: laws of the learning rate, one after another."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from steadytrain.config.foreign import our_value
from steadytrain.config.settings import BELOW_1, UP_TO_1, ValueLimit
from steadytrain.config.words import number, refused
from steadytrain.errors import did_you_mean

LAWS: dict[str, tuple[str, ...]] = {
    "constant": (),
    "linear": ("to",),
    "cosine": ("to",),
    "poly": ("power", "to"),
    "exponential": ("factor", "to"),
    "inverse-sqrt": ("scale",),
    "step": ("factor",),
    "factor": ("every", "factor", "to"),
    "restarts": ("every", "times", "shrink", "to"),
    "one-cycle": ("up", "from", "to", "momentum"),
    "triangular": ("every", "from", "shrink"),
    "plateau": ("on", "patience", "factor", "to"),
    "mxnet/factor": ("step", "factor", "to"),
    "mxnet/multi-factor": ("step", "factor"),
    "mxnet/poly": ("max_update", "power", "to"),
    "mxnet/cosine": ("max_update", "to"),
}
"""The laws by name, with the parameters that each takes."""

RISING = ("one-cycle", "triangular")
"""Laws that begin low and rise by themselves: there is no warm-up before them."""

NEEDED = {"factor": "every", "restarts": "every", "triangular": "every", "mxnet/factor": "step"}
"""Parameters that a law requires."""

_EPOCHS = ValueLimit(lambda value: 0 < value < math.inf, "epochs above 0")
_INSIDE = ValueLimit(lambda value: 0 < value < 1, "a share above 0, below 1")
_WHOLE = ValueLimit(lambda value: value >= 1 and value % 1 == 0, "a whole number, 1 or more")
LIMITS = {
    "to": ValueLimit(lambda value: 0 <= value <= 1, "a share of the peak, 0 to 1"),
    "from": _INSIDE,
    "power": ValueLimit(lambda value: 0 < value < math.inf, "above 0"),
    "factor": UP_TO_1,
    "every": _EPOCHS,
    "scale": _EPOCHS,
    "times": ValueLimit(lambda value: 1 <= value < math.inf, "1 or more"),
    "shrink": UP_TO_1,
    "up": _INSIDE,
    "momentum": BELOW_1,
    "patience": _WHOLE,
    "on": ValueLimit(lambda value: value in ("top1", "loss"), "top1 or loss"),
    "step": ValueLimit(_WHOLE.holds, "whole numbers of updates, 1 or more, rising, such as 30/60/80"),
    "max_update": _WHOLE,
}
WARMUPS = "linear, linear:SHARE, constant:SHARE or power:EXPONENT"


@dataclass(frozen=True)
class Stage:
    """One law of a schedule.

    Args:
        law: one of :data:`LAWS`.
        epochs: how long it lasts; None: what the others leave of the run.
        numbers: values of its parameters.
        updates: those of ``step`` in MXNet's laws.
        on: what ``plateau`` looks at, ``top1`` (of several labels: mAP) or ``loss``.
    """

    law: str
    epochs: float | None = None
    numbers: Mapping[str, float] = field(default_factory=dict)
    updates: tuple[int, ...] = ()
    on: str = "top1"


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
    (Stage(law='linear', epochs=5.0, numbers={'to': 1.0}, updates=(), on='top1'), Stage(law='cosine', epochs=None, \
numbers={}, updates=(), on='top1'))
    """
    stages = tuple(_stage(text, word) for word in text.split())
    if not stages:
        raise refused("optim.schedule", text, f"it must be one of {', '.join(LAWS)}, or several of them")
    if len(stages) > 1 and (exclusive := [stage.law for stage in stages if stage.law.startswith("mxnet/")]):
        raise refused("optim.schedule", text, f"{exclusive[0]} counts updates from the first one: use it alone")
    if [stage.law for stage in stages[:-1] if stage.law == "plateau"]:
        raise refused("optim.schedule", text, "plateau must be its last stage")
    if any(stage.law in RISING for stage in stages[1:]):
        raise refused("optim.schedule", text, f"{' and '.join(RISING)} begin low: put it first")
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
    law, colon, length = head.partition(":")
    if law not in LAWS:
        same = our_value("schedule", law)
        near = f" Did you mean {same}?" if same != law else did_you_mean(law, LAWS)
        raise refused("optim.schedule", text, f"{law!r} must be one of {', '.join(LAWS)}.{near}")
    epochs = number(length) if colon else None
    if epochs is not None and not 0 < epochs < math.inf:
        raise refused("optim.schedule", text, f"the epochs of a stage must be above 0, such as {law}:30")
    numbers: dict[str, float] = {}
    updates: tuple[int, ...] = ()
    on = "top1"
    for setting in settings:
        name, _, value = setting.partition("=")
        if name not in LAWS[law]:
            takes = f"takes {', '.join(LAWS[law])}" if LAWS[law] else "takes none"
            near = did_you_mean(name, LAWS[law])
            raise refused("optim.schedule", text, f"{law} has no parameter {name!r}: it {takes}.{near}")
        written = value.split("/") if name == "step" else [value]
        values: list[Any] = written if name == "on" else list(map(number, written))
        is_rising = all(a < b for a, b in pairwise(values)) and not (law == "mxnet/factor" and values[1:])
        if not (is_rising and all(map(LIMITS[name].holds, values))):
            raise refused("optim.schedule", text, f"{law}'s {name} must be {LIMITS[name].words}")
        if name == "step":
            updates = tuple(map(int, values))
        elif name == "on":
            on = value
        else:
            numbers[name] = values[0]
    if (needed := NEEDED.get(law)) and needed not in numbers and not (needed == "step" and updates):
        raise refused("optim.schedule", text, f"{law} needs {needed}, such as {law},{needed}=30")
    return Stage(law, epochs, numbers, updates, on)
