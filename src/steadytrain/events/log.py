"""Writing events to a file, and reading them again."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from steadytrain.errors import storage_error
from steadytrain.events import measured, told
from steadytrain.events.event import Event, Unknown

KINDS: dict[str, type[Event]] = {
    kind.__name__: kind
    for module in (told, measured)
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, Event) and kind is not Event
}
_FIELDS = {name: frozenset(f.name for f in fields(kind)) for name, kind in KINDS.items()}
_STEP_LINE = b'{"v":1,"kind":"Step",'  # as EventLog writes it

E = TypeVar("E", bound=Event)


_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode  # made once: a step writes a line


class EventLog:
    """Appends events to one file, stamping time, attempt and rank. Safe from several threads.

    Args:
        path: the ``.jsonl`` file; a torn last line, left by a kill, is cut off.
        attempt: number of this start of the run.
        rank: of the writing process.

    Raises:
        StorageError: the file cannot be written.
    """

    def __init__(self, path: Path, attempt: int, rank: int = 0) -> None:
        self.path = path
        self.attempt = attempt
        self.rank = rank
        self._lock = threading.Lock()
        try:
            repair(path)
            # A file name that is no UTF-8 holds lone surrogates: escaped, they are JSON and come back as they were.
            self._file = path.open("a", encoding="utf-8", errors="backslashreplace", buffering=1)
        except OSError as error:
            raise storage_error(error, path) from error

    def append(self, event: E) -> E:
        """Write one line and return the event as written. Raises StorageError."""
        stamped = replace(event, time=time.time(), attempt=self.attempt, rank=self.rank)
        line = _encode(stamped.to_dict()) + "\n"
        try:
            with self._lock:
                self._file.write(line)
        except OSError as error:
            raise storage_error(error, self.path) from error
        return stamped

    def close(self) -> None:
        """Close the file; closing twice is fine."""
        try:
            self._file.close()
        except OSError as error:
            raise storage_error(error, self.path) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def repair(path: Path) -> int:
    """Cut off what follows the last newline, if anything; returns the number of bytes cut."""
    if not path.exists():
        return 0
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        kept = size
        while kept:
            start = max(0, kept - 65536)
            file.seek(start)
            at = file.read(kept - start).rfind(b"\n")
            if at >= 0:
                kept = start + at + 1
                break
            kept = start
        if kept < size:
            file.truncate(kept)
    return size - kept


def read(path: Path, *, sparse: bool = False) -> Iterator[Event]:
    """The events of a file, oldest first; also while another process writes it.

    A torn last line is left out, a line in the middle that is no JSON is passed over.

    Args:
        path: the ``.jsonl`` file.
        sparse: of the ``Step`` lines that follow each other give only the last: all else is there, and a long run,
            which has little but steps in it, is read many times faster.
    """
    with path.open("rb") as file:
        for line in _sparse(file) if sparse else file:
            if not line.endswith(b"\n"):
                return  # still being written: going on would take its other half for a line
            if (event := from_json(line)) is not None:
                yield event


def _sparse(lines: Iterable[bytes]) -> Iterator[bytes]:
    held = b""
    for line in lines:
        if held and not (line.startswith(_STEP_LINE) and line.endswith(b"\n")):
            yield held
            held = b""
        if line.startswith(_STEP_LINE):
            held = line
        else:
            yield line
    if held:
        yield held


def from_json(line: str | bytes) -> Event | None:
    """One line as an event; None where it is no JSON object."""
    try:
        told = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(told, dict):
        return None
    kind = KINDS.get(str(told.get("kind")))
    if kind is None:
        stamp = {name: told[name] for name in ("time", "attempt", "rank") if name in told}
        return Unknown(name=str(told.get("kind")), told=told, **stamp)
    known = _FIELDS[kind.__name__]
    try:
        return kind(**{name: value for name, value in told.items() if name in known})
    except TypeError:
        return Unknown(name=kind.__name__, told=told)
