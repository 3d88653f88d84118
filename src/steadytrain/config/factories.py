"""Code of users and of other packages: the form of ``pkg.mod:factory``, and the one place that imports either."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, TypeVar

from steadytrain.errors import InputError, RecipeError, first_line

T = TypeVar("T")

FACTORY = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
OBJECT = "object:"
"""Begins the name of a model that Python code gave as an object."""


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


def is_own_model(name: str) -> bool:
    """Return whether a model's name is that of the user's own code, which may bring weights of its own.

    >>> [is_own_model(name) for name in ("nets:small", "object:Net-1f", "mxnet:resnet", "hf-hub:timm/resnet18")]
    [True, True, False, False]
    """
    return name.startswith(OBJECT) or (FACTORY.fullmatch(name) is not None and not name.startswith("mxnet:"))


def search_current_folder() -> None:
    """Let imports find the modules of the current folder, as a script's own path does not."""
    if "" not in sys.path and (folder := str(Path.cwd())) not in sys.path:
        sys.path.append(folder)  # last, so that nothing installed is hidden
