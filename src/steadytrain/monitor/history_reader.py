"""Read a run's history; of a long log, what was read before is taken from the user's cache.

A history that a long log came to is stored with the place up to which it goes and a digest of all bytes before it. It
is used only while the log begins with the very same bytes, by the same code; else the log is read from its start. A
log whose inode, size and times are those of then is taken for the same without reading its bytes.
Nothing is written into the run's folder, and what is stored can be deleted at any time.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields
from functools import cache, reduce
from operator import or_
from pathlib import Path
from typing import Any, get_type_hints

import msgspec

from steadytrain.config import Recipe
from steadytrain.errors import RunError, SteadyError
from steadytrain.events import KINDS, Failed, LogReader, Step, Unknown
from steadytrain.events.log import id_of
from steadytrain.files import open_regular, replace_file
from steadytrain.format import count
from steadytrain.machine.facts import cache_folder
from steadytrain.monitor.history import MAX_RECENT, RunHistory
from steadytrain.monitor.ledger import Ledger
from steadytrain.run import Run

LEAST_BYTES = 1 << 20
"""Bytes of a log up to which it is read again each time: it takes some hundredths of a second."""

SETTLED_SECONDS = 2.0
"""Seconds after its last change from which on a file's time tells a later change."""

MAX_STORED = 128
"""Histories in the cache; the oldest go first."""

MOST_STORED_BYTES = 64 << 20
"""The most bytes of a stored history: one of a million events has some."""

_CHUNK_BYTES = 1 << 20

NOT_STORED = ("recipe", "_others", "_joined")
"""Fields of a history that come from other files."""


class LogHistory:
    """The history that one log comes to, as far as it was read."""

    def __init__(self, run: Run, rank: int = 0) -> None:
        self._run, self._rank = run, rank
        self._reader = LogReader(run.log_path(rank))
        self._stored = 0  # bytes of the log that the stored history goes to
        self.history = RunHistory(run.recipe, rank)

    def read(self) -> RunHistory:
        """Read the new events; return the history."""
        for _ in self.read_in_parts():
            pass
        return self.history

    def read_in_parts(self) -> Iterator[float]:
        """Read the new events in parts and yield the share of the log read after each: a long run takes seconds."""
        if not self._reader.offset and self._restore():
            yield self._share
        generation = self._reader.generation
        for chunk in self._reader.chunks():
            if generation != self._reader.generation:
                generation = self._reader.generation
                self._restart()
            for event in chunk:
                self.history.take(event)
            yield self._share
        if generation != self._reader.generation:  # it is gone
            self._restart()
            yield 1.0
        if self._reader.offset - self._stored >= LEAST_BYTES:
            self._store()

    @property
    def _share(self) -> float:
        return self._reader.offset / max(1, self._reader.size)

    def _restart(self) -> None:
        self.history = RunHistory(self._run.recipe, self._rank)
        self._stored = 0

    def _restore(self) -> bool:
        """Go on from the stored history, if there is one of this log and nothing of it was changed."""
        path, log = self._path(), self._run.log_path(self._rank)
        with suppress(OSError, ValueError, TypeError, RecursionError, msgspec.MsgspecError):
            if path is None or log.stat().st_size < LEAST_BYTES or path.stat().st_size > MOST_STORED_BYTES:
                return False
            head, _, state = path.read_bytes().partition(b"\n")
            about, seal = json.loads(head)
            if seal != _seal(about, state):
                return False
            code, offset, stamp, digest = about
            if code != _code() or ((stamp is None or stamp != _stamp(log)) and digest != _digest(log, offset)[0]):
                return False
            history = _decode(state, self._run.recipe)
            self._reader.skip(offset)
            self.history, self._stored = history, offset
            return True
        return False

    def _store(self) -> None:
        """Store the history; without a place for it the next reading takes longer."""
        if (path := self._path()) is None or len(self.history.ranks) > 1:
            return
        self._stored, log = self._reader.offset, self._run.log_path(self._rank)
        state = _encode(self.history)
        if len(state) > MOST_STORED_BYTES:
            return
        with suppress(SteadyError, OSError):
            digest, file_id = _digest(log, self._stored)
            if not digest or file_id != self._reader.file_id:  # another file has the log's name by now
                return
            about = [_code(), self._stored, _stamp(log), digest]
            head = json.dumps([about, _seal(about, state)])
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, head.encode() + b"\n" + state)
            others = sorted(path.parent.glob("*.history"), key=lambda other: other.stat().st_mtime)
            for old in others[:-MAX_STORED]:
                old.unlink()

    def _path(self) -> Path | None:
        folder, log = cache_folder(), self._run.log_path(self._rank)
        name = hashlib.sha256(os.fsencode(log.resolve())).hexdigest()[:24]
        return folder / "histories" / f"{name}.history" if folder else None


_HINTS: dict[str, Any] = get_type_hints(RunHistory) | {
    "recent": list[Step],
    "_newest": dict[str, reduce(or_, [*KINDS.values(), Unknown])],  # type: ignore[misc]
}
_FIELDS = {field.name: _HINTS[field.name] for field in fields(RunHistory) if field.name not in NOT_STORED}
_decoder = msgspec.msgpack.Decoder(msgspec.defstruct("StoredHistory", list(_FIELDS.items())))


def _encode(history: RunHistory) -> bytes:
    """Encode what a history holds of its own log."""
    return msgspec.msgpack.encode({name: getattr(history, name) for name in _FIELDS}, enc_hook=list)


def _decode(state: bytes, recipe: Recipe) -> RunHistory:
    """Decode a history. Raises msgspec.MsgspecError where it is not one."""
    values = msgspec.structs.asdict(_decoder.decode(state))
    history = RunHistory(recipe, **values)
    history.recent = deque(values["recent"], MAX_RECENT)
    for attempt in history.attempts:
        attempt.share_marks()
    return history


def _stamp(log: Path) -> list[int] | None:
    """Return what changes with a log: inode, size, times; None where it was changed just now. Raises OSError."""
    status = log.stat()
    is_settled = time.time() - status.st_ctime > SETTLED_SECONDS
    return [status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns] if is_settled else None


def _seal(about: Any, state: bytes) -> str:
    """Return a digest of all that is stored."""
    return hashlib.sha256(json.dumps(about).encode() + state).hexdigest()


def _digest(log: Path, num_bytes: int) -> tuple[str, tuple[int, int]]:
    """Return a digest of so many first bytes of a log, empty where it has fewer, and which file it is.

    Raises OSError.
    """
    known, left = hashlib.sha256(), num_bytes
    with open_regular(log) as file:
        file_id = id_of(file)
        while left and (data := file.read(min(left, _CHUNK_BYTES))):
            known.update(data)
            left -= len(data)
    return "" if left else known.hexdigest(), file_id


@cache
def _code() -> str:
    """Return a digest of the code that folds events: other code may come to another history. Raises OSError."""
    root = Path(__file__).parents[1]
    sources = [path for part in ("monitor", "events", "config") for path in sorted((root / part).glob("*.py"))]
    return hashlib.sha256(b"".join(map(Path.read_bytes, sources))).hexdigest()


def read_history(run: Run, *, all_ranks: bool = True) -> RunHistory:
    """Read a run's history; the run may still be going on.

    ``all_ranks``: False: rank 0 alone.

    Raises:
        RunError: nothing was started in it yet.
    """
    history = read_any(run, all_ranks=all_ranks)
    if history.started is not None:
        return history
    if isinstance(history.ended, Failed):
        raise RunError(f"{run.directory} never started: {history.ended.error}: {history.ended.message}")
    if history.unreadable:
        damaged = count(history.unreadable, "line")
        raise RunError(f"{run.directory}: no start of the run can be read in its event log ({damaged} damaged)")
    raise RunError(f"{run.directory} has no events yet: start the run, then try again")


def read_any(run: Run, *, all_ranks: bool = False) -> RunHistory:
    """Read the history of a run that may not have begun."""
    history, *others = (LogHistory(run, rank).read() for rank in (run.ranks() if all_ranks else [0]))
    history.join(others)
    return history


def ledger(run: Run | str | Path) -> Ledger:
    """Return the ledger of a run, or of the run in a folder: of its first rank, so far.

    Raises:
        RunError: nothing was started in it yet.
    """
    return read_history(Run.open(run), all_ranks=False).ledger()
