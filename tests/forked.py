"""Processes forked from one that has loaded torch, where loading it is not the fact: that takes a core two seconds."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[1]


def context() -> ForkServerContext:
    """What forks them, with all loaded that each would load anew."""
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload(["hypothesis.strategies", "pytest", "steadytrain.training", "torch._dynamo"])
    return forks


@contextmanager
def importable() -> Iterator[None]:
    """Processes that are started meanwhile find the modules of the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(PROJECT)
        yield


def start(
    function: Callable[..., object],
    *arguments: object,
    errors: Path | str = os.devnull,
    variables: Mapping[str, str] | None = None,
) -> ForkServerProcess:
    """Start ``function(*arguments)`` in a process of its own; its exit code is what is returned, None for 0.

    Args:
        function: of a module's top level, such as ``steadytrain.cli.main``.
        errors: what its standard error is written to; its standard output is not kept.
        variables: of its environment, besides those of this process.
    """
    process = context().Process(target=_call, args=(function, arguments, str(errors), dict(variables or {})))
    with importable():
        process.start()
    return process


def _call(
    function: Callable[..., object], arguments: tuple[object, ...], errors: str, variables: dict[str, str]
) -> None:
    os.environ.update(variables)
    for number, path in ((1, os.devnull), (2, errors)):
        os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY), number)
    sys.exit(function(*arguments))  # type: ignore[arg-type]
