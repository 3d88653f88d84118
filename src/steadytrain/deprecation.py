"""Deprecations: one wording for Python names, parameters and flags that still work.

A function or a class that goes is marked by the standard decorator, whose message type checkers show::

    from typing_extensions import deprecated

    @deprecated(str(Deprecation("st.old", since="0.3", until="0.5", instead="st.new")))

Nothing outlives the version it names: ``tests/test_deprecation.py`` fails there. How long: ``docs/promises.md``.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Deprecation:
    """Something that still works: since which version it should not be used, which one lacks it, and what to use.

    >>> print(Deprecation("--mem", since="0.3", until="0.5", instead="--memory"))
    --mem is deprecated since 0.3 and goes with 0.5: use --memory
    """

    what: str
    since: str
    until: str
    instead: str

    def __str__(self) -> str:
        return f"{self.what} is deprecated since {self.since} and goes with {self.until}: use {self.instead}"


def renamed_parameter(old: str, new: str, *, since: str, until: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Let a function take a parameter by its earlier name too, with a DeprecationWarning.

    >>> @renamed_parameter("colour", "color", since="0.3", until="0.5")
    ... def paint(*, color: str) -> str:
    ...     return color
    >>> paint(color="red")
    'red'
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        about = Deprecation(f"{function.__name__}({old}=...)", since, until, f"{new}=...")

        @functools.wraps(function)
        def call(*args: Any, **named: Any) -> R:
            if old in named:
                if new in named:
                    raise TypeError(f"{function.__name__}() takes {new} or, as it was called, {old}: not both")
                warnings.warn(str(about), DeprecationWarning, stacklevel=_level_of_caller())
                named[new] = named.pop(old)
            return function(*args, **named)

        own = inspect.signature(function)
        earlier = inspect.Parameter(old, inspect.Parameter.KEYWORD_ONLY, default=None)
        call.__signature__ = own.replace(parameters=[*own.parameters.values(), earlier])  # type: ignore[attr-defined]
        return call

    return decorate


def _level_of_caller() -> int:
    """Return the ``stacklevel`` of the first frame outside of this package: Python shows warnings of programs alone."""
    stack = enumerate(inspect.stack(0)[1:], 1)
    return next(
        level for level, row in stack if row.frame.f_globals.get("__name__", "").partition(".")[0] != __package__
    )
