"""The only writer and the only reader of event logs."""

from __future__ import annotations

import hashlib
import json
import math
import os
import threading
import time
from collections.abc import Collection, Iterator
from dataclasses import fields
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Literal, Self, TypeVar

from steadytrain.errors import RunError, storage_error, storage_errors
from steadytrain.events import schema
from steadytrain.events.schema import VERSION, Event, Step, Unknown, Unreadable
from steadytrain.events.soundness import is_sound
from steadytrain.files import NO_FOLLOW, kind_of_file, open_regular
from steadytrain.format import count

KINDS: dict[str, type[Event]] = {
    name: kind
    for name, kind in vars(schema).items()
    if isinstance(kind, type) and issubclass(kind, Event) and kind not in (Event, Unknown, Unreadable)
}
_FIELDS = {name: frozenset(f.name for f in fields(kind)) for name, kind in KINDS.items()}
_KEYS = {name: names | {"v", "kind"} for name, names in _FIELDS.items()}
# The beginnings of lines as EventLog writes them.
_BEGINNING, _STARTED = b'{"v":1,"kind":"', b'{"v":1,"kind":"Started",'
_CHUNK_BYTES = 1 << 20
_HEAD_BYTES = 256
_MOST_LINE_BYTES = 32 << 20  # of an event: of a million classes, say
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_decode = json.JSONDecoder().raw_decode

E = TypeVar("E", bound=Event)


class EventLog:
    """The writer: appends events to one file, stamped with time, attempt and rank. Safe from several threads.

    Args:
        path: the ``.jsonl`` file; a torn last line, left by a kill, is cut off.
        attempt: number of this start of the run.
        rank: of the writing process.

    Raises:
        RunError: it is a link.
        StorageError: the file cannot be written.
    """

    def __init__(self, path: Path, attempt: int, rank: int = 0) -> None:
        self.path = path
        self.attempt = attempt
        self.rank = rank
        self._lock = threading.Lock()
        with storage_errors(path):
            repair(path)
            self._file = open_no_follow(path, "ab")  # unbuffered: a kill loses no line

    def append(self, event: E) -> E:
        """Write one line and return the event as written. Raises StorageError."""
        stamped = object.__new__(type(event))  # as by dataclasses.replace, in a fifth of its time
        vars(stamped).update(vars(event), time=time.time(), attempt=self.attempt, rank=self.rank)
        line = encode(stamped)
        try:
            with self._lock:
                written = self._file.write(line)
                while written < len(line):  # there was room for a part of it: the next call says why
                    written += self._file.write(line[written:])
        except OSError as error:
            raise storage_error(error, self.path) from error
        return stamped

    def close(self) -> None:
        """Close the file; closing twice is fine."""
        with storage_errors(self.path):
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def encode(event: Event) -> bytes:
    """Encode an event as its line of JSON, in UTF-8.

    >>> encode(Step(step=1, position=64, n=64, seconds=0.5, wait_seconds=0.0, lr=0.1))[:40]
    b'{"v":1,"kind":"Step","time":0.0,"attempt'
    """
    if type(event) is Step and math.isfinite(event.time + event.seconds + event.wait_seconds + event.lr):
        # A log has little but steps in it: this way they take a fourth of the time, and are the same bytes.
        return (
            f'{{"v":{VERSION},"kind":"Step","time":{event.time},"attempt":{event.attempt},"rank":{event.rank},'
            f'"step":{event.step},"position":{event.position},"n":{event.n},"seconds":{event.seconds},'
            f'"wait_seconds":{event.wait_seconds},"lr":{event.lr}}}\n'
        ).encode()
    # A file name that is no UTF-8 holds lone surrogates: escaped, they are JSON and come back as they were.
    return (_encode(event.to_dict()) + "\n").encode("utf-8", "backslashreplace")


_FLAGS = {"ab": os.O_WRONLY | os.O_APPEND | os.O_CREAT, "r+b": os.O_RDWR}


def open_no_follow(path: Path, mode: Literal["ab", "r+b"]) -> BinaryIO:
    """Open a file of a run for writing, unbuffered, unless that would write elsewhere: into a link or a pipe.

    Raises:
        RunError: it is a link, symbolic or hard, or no file.
        OSError: it cannot be opened.
    """
    refuse_link(path)
    if (names := count_names(path)) > 1:
        raise RunError(
            f"{path} is a hard link: the file has {count(names - 1, 'more name')}, and writing to it would change it"
            " under those as well; make a copy of its own (cp -a RUN COPY), and run the command on that"
        )
    return os.fdopen(os.open(path, _FLAGS[mode] | NO_FOLLOW, 0o666), mode, buffering=0)


def refuse_link(path: Path, remedy: str = "remove the link, or put there what it leads to") -> None:
    """Raise RunError where a file or folder that a run writes is a symbolic link."""
    if path.is_symlink():
        raise RunError(
            f"{path} is a link to {path.readlink()}: a run writes only into its own folder; {remedy}, and run the same"
            " command again"
        )


def count_names(path: Path) -> int:
    """Count the names of a file, its hard links; 0 where there is none. Raises RunError for a pipe or a socket."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return 0
    if (kind := kind_of_file(status.st_mode)) in ("a pipe", "a socket"):
        raise RunError(f"{path} is {kind}, not a file: remove it, and run the same command again")
    return 1 if kind else status.st_nlink


def repair(path: Path) -> int:
    """Cut off what follows the last newline, if anything; return the number of bytes cut."""
    if not os.path.lexists(path):
        return 0
    with open_no_follow(path, "r+b") as file:
        size = end = file.seek(0, os.SEEK_END)
        while end:
            start = max(0, end - 65536)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            end = start + newline + 1
            if newline >= 0:
                break
        if end < size:
            file.truncate(end)
    return size - end


def read(path: Path, *, only: Collection[type[Event]] | None = None) -> Iterator[Event]:
    """Yield the events of a file, oldest first, also while another process writes it; none where there is no file.

    Args:
        path: the ``.jsonl`` file.
        only: as in :class:`LogReader`.
    """
    for chunk in LogReader(path, only=only).chunks():
        yield from chunk


class LogReader:
    """The reader of a growing event log: each call yields the events that came since the call before.

    A torn last line waits for its other half; a line in the middle that is no JSON object is an
    :class:`~steadytrain.events.Unreadable`. A file that was
    replaced, or cut shorter than what was read of it, is read again from its beginning, and :attr:`generation` counts
    up: what was derived from its events no longer holds. Cutting off the torn last line alone, as a restart does,
    changes nothing.

    Args:
        path: the ``.jsonl`` file; it need not be there yet.
        only: kinds of which every event is wanted, many times faster on a long log; of another kind come at least the
            newest of each attempt, and the others may not even be looked at. None: all.

    >>> import pathlib, tempfile
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "events.jsonl"
    >>> reader = LogReader(path)
    >>> list(reader.read())
    []
    >>> _ = path.write_text('{"v":1,"kind":"Noticed","message":"a"}\\n{"v":1,"kind":"Not')
    >>> [event.kind for event in reader.read()]
    ['Noticed']
    """

    def __init__(self, path: Path, *, only: Collection[type[Event]] | None = None) -> None:
        self.path = path
        self._only = None if only is None else {kind.__name__.encode() for kind in only}
        self.generation = 0
        self.offset = 0  # after the last whole line that was read
        self.size = 0  # of the file when it was last opened
        self._head = b""  # its first bytes: another file of the same name begins differently
        self._digest = hashlib.sha256()  # of what was read

    @property
    def digest(self) -> str:
        """The digest of all bytes up to :attr:`offset`."""
        return self._digest.hexdigest()

    def go_on(self, offset: int, digest: str) -> bool:
        """Go on after ``offset`` bytes if the file still begins with those that had this digest; else do nothing."""
        known, left = hashlib.sha256(), offset
        try:
            with open_regular(self.path) as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(0)
                head = file.read(min(_HEAD_BYTES, offset))
                file.seek(0)
                while left and (data := file.read(min(left, _CHUNK_BYTES))):
                    known.update(data)
                    left -= len(data)
        except OSError:
            return False
        if left or known.hexdigest() != digest:
            return False
        self.offset, self.size, self._head, self._digest = offset, size, head, known
        return True

    def read(self) -> Iterator[Event]:
        """Yield the events since the last call, oldest first. To stop halfway, use :meth:`chunks`."""
        for chunk in self.chunks():
            yield from chunk

    def chunks(self) -> Iterator[list[Event]]:
        """Yield the events since the last call in lists of some thousand; stopping between two lists loses nothing.

        Raises:
            RunError: the file is there and cannot be read.
        """
        try:
            with open_regular(self.path) as file:
                self.size = file.seek(0, os.SEEK_END)
                file.seek(0)
                if self.size < self.offset or file.read(len(self._head)) != self._head:
                    self._restart()
                file.seek(self.offset)
                torn, is_too_long = b"", False
                while data := file.read(_CHUNK_BYTES):
                    if is_too_long:  # its rest is passed over
                        rest, newline, data = data.partition(b"\n")
                        self.offset += len(rest) + len(newline)
                        self._digest.update(rest + newline)
                        if not newline:
                            continue
                        is_too_long = False
                        yield [Unreadable()]
                    complete, newline, torn = (torn + data).rpartition(b"\n")
                    if newline:
                        complete += newline
                        if not self.offset:
                            self._head = complete[:_HEAD_BYTES]
                        self.offset += len(complete)
                        self._digest.update(complete)
                        yield _parse(complete if self._only is None else _choose(complete, self._only))
                    if len(torn) > _MOST_LINE_BYTES:
                        self.offset += len(torn)
                        self._digest.update(torn)
                        torn, is_too_long = b"", True
        except FileNotFoundError:
            if self.offset:
                self._restart()
        except OSError as error:
            raise RunError(f"cannot read {self.path}: {error.strerror}; a run's log is a file") from error

    def _restart(self) -> None:
        self.generation += 1
        self.offset = 0
        self._head = b""
        self._digest = hashlib.sha256()


def _choose(lines: bytes, only: Collection[bytes]) -> bytes:
    """Drop the lines of other kinds that a later one of their kind and attempt follows."""
    chosen, seen = [], set[bytes]()
    for line in reversed(lines.split(b"\n")):
        if line.startswith(_BEGINNING):
            kind = line[len(_BEGINNING) : line.find(b'"', len(_BEGINNING))]
            if kind not in only:
                if kind in seen:
                    continue
                seen.add(kind)
        if line.startswith(_STARTED):
            seen.clear()
        chosen.append(line)
    return b"\n".join(reversed(chosen))


def _parse(lines: bytes) -> list[Event]:
    """Parse lines as :func:`from_json` does, those as EventLog writes them in a third of its time."""
    try:
        texts = lines.decode().split("\n")
    except UnicodeDecodeError:  # a damaged byte: each line by itself
        return [from_json(line) or Unreadable() for line in lines.split(b"\n") if line.strip()]
    events = list[Event]()
    for text in texts:
        event = _quick(text)
        if event is None:
            line = text.encode()
            if not line.strip():
                continue
            event = from_json(line) or Unreadable()
        events.append(event)
    return events


def _quick(line: str) -> Event | None:
    """Parse a line that is nothing but a JSON object; None for any other."""
    try:
        document, end = _decode(line)
    except (ValueError, RecursionError):
        return None
    return _event_of(document) if end == len(line) else None


def from_json(line: str | bytes) -> Event | None:
    """Parse one line as an event; None where it is no JSON object, or a value is not of its field's type."""
    try:
        return _event_of(json.loads(line))
    except (ValueError, RecursionError):
        return None


def _event_of(document: object) -> Event | None:
    if not isinstance(document, dict):
        return None
    name = str(document.get("kind"))
    event: Event
    if document.keys() == _KEYS.get(name):
        del document["v"], document["kind"]
        event = object.__new__(KINDS[name])
        object.__setattr__(event, "__dict__", document)  # as its constructor would, in a fifth of its time
        return event if is_sound(event) else None
    try:
        event = KINDS[name](**{key: value for key, value in document.items() if key in _FIELDS[name]})
    except KeyError:
        stamp = {key: document[key] for key in ("time", "attempt", "rank") if key in document}
        event = Unknown(name=name, document=document, **stamp)
    except TypeError:  # fields are missing
        event = Unknown(name=name, document=document)
    return event if is_sound(event) else None
