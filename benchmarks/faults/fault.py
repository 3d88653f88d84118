"""Runs and faults, described: a base that is sound, what is done to it, and what the verdict must say then."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Settings = Mapping[str, Any]
"""The recipe's keys and their values, as ``--set`` takes them."""


@dataclass(frozen=True, kw_only=True)
class Base:
    """A run that nothing is wrong with.

    Args:
        name: of it.
        about: in a few words.
        data: a name of :mod:`faults.data`.
        val: the same, or None.
        model: a built-in or a factory of :mod:`faults.nets`.
        images: that are trained on; updates are these over the batch size.
        settings: all else.
        ranks: processes that train it together.
    """

    name: str
    about: str
    data: str
    val: str | None
    model: str
    images: int
    settings: Settings
    ranks: int = 1


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One thing that goes wrong, or two at a time.

    Args:
        name: of it.
        about: what is done, in a few words.
        base: the run that it is done to.
        expected: the causes that would be right, the best first.
        settings: of the recipe that are changed by it; ``data`` and ``val`` name other data.
        clean: settings of the sound run that it is compared with, where they are not the base's own.
        patches: what the run's own process does to itself before it trains: a name of :mod:`faults.patches` -> value.
        around: what is done around the process: a name of :mod:`faults.around` -> value.
        truth: ``wall``: what the run takes longer than a sound one; ``counted``: seconds that the patch itself counted,
            in the training thread, where nothing can hide them.
        remedies: settings that would mend it, if the verdict's change cannot be applied as it stands; the rest of the
            fault (patches, what is around) is then taken away.
        parts: of a pair, its two faults' names.
    """

    name: str
    about: str
    base: str
    expected: tuple[str, ...]
    settings: Settings = field(default_factory=dict)
    clean: Settings = field(default_factory=dict)
    patches: Settings = field(default_factory=dict)
    around: Settings = field(default_factory=dict)
    truth: str = "wall"
    parts: tuple[str, ...] = ()


def both(fault: Fault, other: Fault) -> Fault:
    """Combine two faults of one base."""
    assert fault.base == other.base and dict(fault.clean) == dict(other.clean), (fault.name, other.name)
    return Fault(
        name=f"{fault.name} + {other.name}",
        about=f"{fault.about}; {other.about}",
        base=fault.base,
        expected=(*fault.expected, *other.expected),
        settings={**fault.settings, **other.settings},
        clean=fault.clean,
        patches={**fault.patches, **other.patches},
        around={**fault.around, **other.around},
        parts=(fault.name, other.name),
    )
