"""Checks that an event's values have the types of its kind: a log may be damaged, edited or a stranger's.

What reads events relies on it: a number is a number that can be computed and printed with, a table has its keys, and
nothing is nested deeper than any kind needs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from itertools import pairwise
from types import NoneType
from typing import Any, get_type_hints

from steadytrain.config.plain import Check, checker
from steadytrain.events.schema import SHAPE, Event, Started, Step

MOST = 1e18
"""Numbers beyond it are no seconds, bytes, images or rates (peak operations per second are ``float`` too)."""

_MOST_WHOLE = int(MOST)  # whole numbers are compared with it in half the time

LAST_TIME = 253_000_000_000.0
"""Seconds since 1970 that a calendar has a date for: the year 9987."""

MOST_DEPTH = 12
"""Tables and lists within each other; the deepest of ours has four."""

MAY_BE_NAN = frozenset({"loss", "top1", "top5", "mean_ap", "lr", "images_per_second", "wait_share", "grad_norm"})
"""Fields that hold what a diverged run measured, infinities included."""


def is_sound(event: Event) -> bool:
    """Return whether every value of an event fits its field."""
    values, checks = vars(event), _checks(type(event))  # type: ignore[arg-type]  # a class can be hashed
    for name in checks.whole:
        if type(value := values[name]) is not int or not 0 <= value < _MOST_WHOLE:
            return False
    for name in checks.finite:
        if (type(value := values[name]) is not float and type(value) is not int) or not -MOST < value < MOST:
            return False
    if not 0 <= values["time"] <= LAST_TIME:
        return False
    for name, fits in checks.others:
        if not fits(values[name]):
            return False
    return not isinstance(event, Started) or _is_laid_out(event)


def _is_laid_out(event: Started) -> bool:
    """Return whether the updates of an attempt have images, and its stages of the batch follow each other."""
    rows = [(0, 0, event.batch_size), *map(tuple, event.growth)]
    rising = all(row[0] <= other[0] and row[1] <= other[1] for row, other in pairwise(rows))
    return (
        rising and all(images > 0 for _, _, images in rows) and event.steps_per_epoch >= 0 and event.began <= LAST_TIME
    )


def is_plain(value: object, depth: int = MOST_DEPTH) -> bool:
    """Return whether a value is JSON of a sane depth whose numbers are finite."""
    if isinstance(value, str | bool | NoneType):
        return True
    if isinstance(value, int | float):
        return -MOST < value < MOST
    if not depth or not isinstance(value, dict | list | tuple):
        return False
    return all(is_plain(item, depth - 1) for item in (value.values() if isinstance(value, dict) else value))


@dataclass(frozen=True)
class _Checks:
    """The fields of a kind: numbers apart, because a log has little but steps, which have nothing else."""

    whole: tuple[str, ...]
    finite: tuple[str, ...]
    others: tuple[tuple[str, Check], ...]


@cache
def _checks(kind: type[Event]) -> _Checks:
    hints = get_type_hints(kind)
    whole = tuple(name for name, hint in hints.items() if hint is int)
    finite = tuple(
        name for name, hint in hints.items() if hint is float and not (name in MAY_BE_NAN and kind is not Step)
    )
    others = (f for f in fields(kind) if f.name not in (*whole, *finite))
    return _Checks(
        whole, finite, tuple((f.name, _check_of(f.name, f.metadata.get(SHAPE, hints[f.name]))) for f in others)
    )


def _check_of(name: str, hint: Any) -> Check:
    if name not in MAY_BE_NAN:
        return checker(hint, _LEAVES, (list, tuple))
    return _is_any_float if hint is float else lambda value: value is None or _is_any_float(value)


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and -MOST < value < MOST  # type: ignore[operator]


def _is_any_float(value: object) -> bool:
    if type(value) is int:
        return -MOST < value < MOST
    return type(value) is float and (not math.isfinite(value) or -1e300 < value < 1e300)


_LEAVES: Mapping[Any, Check] = {
    float: _is_number,
    float | None: lambda value: value is None or _is_number(value),
    int: lambda value: type(value) is int and 0 <= value < MOST,
    Any: is_plain,
}
