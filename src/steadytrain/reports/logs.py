"""Logs of other programs, as far as reports use them; their readers stand above, and are called by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FunctionType
from typing import Any, Protocol, cast

from steadytrain.config import Recipe
from steadytrain.config.factories import LOGS, find_row
from steadytrain.events import Event


class _Epoch(Protocol):
    @property
    def images_per_second(self) -> float: ...


class _Span(Protocol):
    @property
    def seconds(self) -> float: ...


class ForeignRun(Protocol):
    """A run read from another program's log: its events, and what they cannot hold. What it leaves out is NaN."""

    directory: Path
    settings: dict[str, Any]
    num_workers: int
    steps_per_epoch: float | None
    batch_size: int | None
    began: float
    ended_as: str

    @property
    def title(self) -> str: ...
    @property
    def remarks(self) -> list[str]: ...
    @property
    def recipe(self) -> Recipe: ...
    @property
    def is_complete(self) -> bool: ...
    @property
    def ending(self) -> str: ...
    @property
    def num_devices(self) -> int | None: ...
    @property
    def seconds_left(self) -> float | None: ...
    @property
    def epochs(self) -> Mapping[int, _Epoch]: ...
    def spans(self) -> Mapping[int, _Span]: ...
    def events(self) -> Iterator[Event]: ...


def may_be_log(path: Path) -> bool:
    """Return whether a file begins with text, perhaps gzipped: whether it is worth reading as a log."""
    return bool(_reader("may_be_log")(path))


def read_log(path: Path) -> list[ForeignRun]:
    """Read all runs of a log file. Raises DataError: it cannot be read, or is no log of a program that is known."""
    runs: list[ForeignRun] = _reader("read")(path)
    return runs


def _reader(name: str) -> Callable[[Path], Any]:
    reader: Callable[[Path], Any] | None = find_row(LOGS, name, cast("type[Callable[[Path], Any]]", FunctionType))
    assert reader is not None, name
    return reader
