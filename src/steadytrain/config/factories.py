"""Code that is called by name: the user's own, other packages', and ours that stands above all that calls it.

What reads and does as other programs do (``steadytrain.interop``) is imported by nothing below: it is a row of
:data:`ROWS`, like the entry points by which other packages add theirs, and is loaded when its name is first asked for.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, TypeVar

from steadytrain.errors import InputError, RecipeError, first_line

T = TypeVar("T")

FACTORY = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
OBJECT = "object:"
"""Begins the name of a model that Python code gave as an object."""

CHECKPOINTS, LOGS = "steadytrain.checkpoints", "steadytrain.logs"
OPTIMIZERS, SCHEDULES = "steadytrain.optimizers", "steadytrain.schedules"
_MXNET = "steadytrain.interop.mxnet"
ROWS: Mapping[str, Mapping[str, str]] = {
    CHECKPOINTS: {"mxnet": f"{_MXNET}.weights:FORMAT"},
    LOGS: {"read": "steadytrain.interop.logs.read:read_log", "may_be_log": "steadytrain.interop.logs.read:may_be_log"},
    OPTIMIZERS: {
        name: f"{_MXNET}.optimizers:{name.upper()}_KIND"
        for name in ("signum", "ftml", "dcasgd", "lbsgd", "ftrl", "sgld")
    },
    SCHEDULES: {
        f"mxnet/{law}": f"{_MXNET}.schedules:{law.upper().replace('-', '_')}"
        for law in ("factor", "multi-factor", "poly", "cosine")
    },
}
"""Rows of ours by group and name, as ``module:object``; the groups are those of other packages' entry points.

A checkpoint of another framework is called by the prefix of a model's name (``mxnet:FILE``), or by the end of a file.
"""
_ENDS = {".params": "mxnet", "-symbol.json": "mxnet"}


def import_factory(
    path: str, *, key: str, flag: str, what: str, allow_import: bool, hint: str = ""
) -> Callable[..., Any]:
    """Import a ``pkg.mod:factory`` that the user named, also from the working folder.

    Args:
        path: of the factory.
        key, flag: the recipe's key, and the flag that sets it, for messages; ``what``: a loss, say.
        allow_import: whether the user's own code or command line named it, and not a file.
        hint: ends the message where it cannot be imported.

    Raises:
        RecipeError: it may not be imported, or cannot be.

    >>> import_factory("math:sqrt", key="optim.loss", flag="--loss", what="a loss", allow_import=True)(9)
    3.0
    """
    if not allow_import:
        raise RecipeError(
            f"{path} would import code, which is only done for {what} that you name yourself: if you trust it, add"
            f" {flag} {path} (in Python: allow_import=True)"
        )
    module, _, name = path.partition(":")
    search_current_folder()
    try:
        factory: Callable[..., Any] = getattr(importlib.import_module(module), name)
    except Exception as error:
        raise RecipeError(
            f"{key}={path} cannot be imported: {type(error).__name__}: {first_line(error)}{hint}"
        ) from error
    return factory


def load_entry_point(point: EntryPoint, kind: type[T]) -> T:
    """Load what another package adds. Raises InputError: it cannot be loaded, or is of another type."""
    try:
        value = point.load()
    except Exception as error:
        raise InputError(f"{point.value} cannot be loaded ({first_line(error)}): mend or remove its package") from error
    if not isinstance(value, kind):
        raise InputError(
            f"{point.value} is of type {type(value).__name__}; it must be a {kind.__name__}: mend or remove its package"
        )
    return value


def row_names(group: str) -> tuple[str, ...]:
    """Return the names of a group: ours, then those of other packages."""
    return tuple(dict.fromkeys((*ROWS[group], *_points(group, tuple(sys.path)))))


@cache
def _points(group: str, path: tuple[str, ...]) -> Mapping[str, EntryPoint]:
    """Return other packages' rows by name; ``path``: where packages are looked for, which takes 10 ms."""
    return {point.name: point for point in entry_points(group=group)}


def find_row(group: str, name: str, kind: type[T]) -> T | None:
    """Load what has a name in a group; None where nothing has it. Raises InputError: it cannot be loaded.

    >>> find_row(OPTIMIZERS, "lamp", object) is None
    True
    """
    value = ROWS[group].get(name)
    point = EntryPoint(name, value, group) if value else _points(group, tuple(sys.path)).get(name)
    return load_entry_point(point, kind) if point else None


def checkpoint_format(place: str) -> str:
    """Return the name of the format that a checkpoint of another framework is in; empty for everything else.

    >>> [checkpoint_format(place) for place in ("mxnet:resnet-18", "a-0003.params", "nets:small", "runs/a")]
    ['mxnet', 'mxnet', '', '']
    """
    prefix, colon, _ = place.partition(":")
    if colon and prefix in row_names(CHECKPOINTS):
        return prefix
    return next((name for end, name in _ENDS.items() if place.endswith(end)), "")


def is_own_model(name: str) -> bool:
    """Return whether a model's name is that of the user's own code, which may bring weights of its own.

    >>> [is_own_model(name) for name in ("nets:small", "object:Net-1f", "mxnet:resnet", "hf-hub:timm/resnet18")]
    [True, True, False, False]
    """
    return name.startswith(OBJECT) or (FACTORY.fullmatch(name) is not None and not checkpoint_format(name))


def search_current_folder() -> None:
    """Let imports find the modules of the current folder, as a script's own path does not."""
    if "" not in sys.path and (folder := str(Path.cwd())) not in sys.path:
        sys.path.append(folder)  # last, so that nothing installed is hidden
