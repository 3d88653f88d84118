"""The only writer and the only reader of event logs."""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import reduce
from operator import or_
from pathlib import Path
from typing import IO, BinaryIO, Literal, TypeVar

import msgspec
from msgspec.structs import astuple, replace

from steadytrain.errors import RunError, storage_error, storage_errors
from steadytrain.events import schema
from steadytrain.events.schema import VERSION, Event, Score, Started, Unknown, Unreadable, is_plain
from steadytrain.files import Closing, kind_of_file, open_regular
from steadytrain.format import count
from steadytrain.machine.platform import NO_FOLLOW, open_descriptor

KINDS: dict[str, type[Event]] = {
    name: kind
    for name, kind in vars(schema).items()
    if isinstance(kind, type) and issubclass(kind, Event) and kind not in (Event, Score, Unknown, Unreadable)
}
_CHUNK_BYTES = 1 << 16  # what is read at once, and its events, stay in a processor's cache
_HEAD_BYTES = 256
_MOST_LINE_BYTES = 32 << 20  # bytes of an event, which may have a million classes
_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(reduce(or_, KINDS.values()))
_REQUIRED = {
    name: {each.name for each in msgspec.structs.fields(kind) if each.required} for name, kind in KINDS.items()
}

E = TypeVar("E", bound=Event)


class EventLog(Closing):
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
        stamped = replace(event, time=time.time(), attempt=self.attempt, rank=self.rank)
        line, written = encode(stamped), 0
        with self._lock:
            try:
                while written < len(line):  # there may be room for a part of it: the next call says why
                    written += self._file.write(line[written:])
            except OSError as error:
                with suppress(OSError):  # or the next event would stand on the same line
                    if written:  # else the end of the file may be another process's line
                        self._file.truncate(os.fstat(self._file.fileno()).st_size - written)
                raise storage_error(error, self.path) from error
        return stamped

    def close(self) -> None:
        """Close the file; closing twice is fine."""
        with storage_errors(self.path):
            self._file.close()


def encode(event: Event) -> bytes:
    """Encode an event as its line of JSON, in UTF-8.

    >>> encode(Started(digest="a", step=0, steps=9, steps_per_epoch=3.0, batch_size=32))[:43]
    b'{"v":1,"kind":"Started","time":0.0,"attempt'
    """
    try:
        line = _encoder.encode(event)
        if b"null" not in line or all(type(value) is not float or math.isfinite(value) for value in astuple(event)):
            return b'{"v":%d,%b\n' % (VERSION, line[1:])
    except (UnicodeEncodeError, TypeError):  # lone surrogates of a file name that is no UTF-8; a subclass of str, say
        pass
    text = json.dumps(event.to_dict(), ensure_ascii=False, separators=(",", ":"))
    return f"{text}\n".encode("utf-8", "backslashreplace")


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
    return os.fdopen(open_descriptor(path, _FLAGS[mode] | NO_FOLLOW, 0o666), mode, buffering=0)


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


def read(path: Path) -> Iterator[Event]:
    """Yield the events of a file, oldest first, also while another process writes it; none where there is no file."""
    return LogReader(path).read()


def id_of(file: IO[bytes]) -> tuple[int, int]:
    """Return what tells an open file from another that has its name later: device and inode."""
    status = os.fstat(file.fileno())
    return status.st_dev, status.st_ino


class LogReader:
    """The reader of a growing event log: each call yields the events that came since the call before.

    A torn last line waits for its other half; a line in the middle that is no JSON object is an
    :class:`~steadytrain.events.Unreadable`. A file that was
    replaced, or cut shorter than what was read of it, is read again from its beginning, and :attr:`generation` counts
    up: what was derived from its events no longer holds. Cutting off the torn last line alone, as a restart does,
    changes nothing.

    Args:
        path: the ``.jsonl`` file; it need not be there yet.

    >>> import pathlib, tempfile
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "events.jsonl"
    >>> reader = LogReader(path)
    >>> list(reader.read())
    []
    >>> _ = path.write_text('{"v":1,"kind":"Noticed","message":"a"}\\n{"v":1,"kind":"Not')
    >>> [event.kind for event in reader.read()]
    ['Noticed']
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.generation = 0
        self.offset = 0  # after the last whole line that was read
        self.size = 0  # of the file when it was last opened
        self.file_id = 0, 0  # device and inode of that file
        self._head = b""  # its first bytes: another file of the same name begins differently

    def skip(self, offset: int) -> None:
        """Go on after so many bytes, whose events are known from before. Raises OSError."""
        with open_regular(self.path) as file:
            self.file_id = id_of(file)
            self.size = file.seek(0, os.SEEK_END)
            file.seek(0)
            self._head = file.read(min(_HEAD_BYTES, offset))
        self.offset = offset

    def read(self) -> Iterator[Event]:
        """Yield the events since the last call, oldest first. To stop halfway, use :meth:`chunks`."""
        for chunk in self.chunks():
            yield from chunk

    def chunks(self) -> Iterator[list[Event]]:
        """Yield the events since the last call in lists of some hundred; stopping between two lists loses nothing.

        Raises:
            RunError: the file is there and cannot be read.
        """
        try:
            with open_regular(self.path) as file:
                self.file_id = id_of(file)
                self.size = file.seek(0, os.SEEK_END)
                file.seek(0)
                if self.size < self.offset or file.read(len(self._head)) != self._head:
                    self._restart()
                file.seek(self.offset)
                torn, is_too_long = b"", False
                while data := file.read(max(_CHUNK_BYTES, len(torn))):
                    if is_too_long:  # its rest is passed over
                        rest, newline, data = data.partition(b"\n")
                        self.offset += len(rest) + len(newline)
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
                        yield _parse(complete)
                    if len(torn) > _MOST_LINE_BYTES:
                        self.offset += len(torn)
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


def _parse(lines: bytes) -> list[Event]:
    """Parse lines as :func:`from_json` does, all at once where each is of this version."""
    try:
        events: list[Event] = _decoder.decode_lines(lines)
        if all(event.is_sound for event in events if type(event) is Started):
            return events
    except (ValueError, RecursionError):  # of another version, a number that is not finite, damaged, too deep
        pass
    return [from_json(line) or Unreadable() for line in lines.split(b"\n") if line.strip()]


def from_json(line: str | bytes) -> Event | None:
    """Parse one line as an event; None where it is no JSON object, or a value is not of its field's type."""
    try:
        try:
            event: Event = _decoder.decode(line)
        except ValueError:
            event = _convert(json.loads(line))
    except (ValueError, RecursionError):
        return None
    return None if isinstance(event, Started) and not event.is_sound else event


def _convert(document: object) -> Event:
    """Convert the JSON object of a line whose numbers may not be finite, or that is of another version.

    Raises:
        ValueError: it is no object, or a value is not of its field's type.
    """
    if not isinstance(document, dict):
        raise ValueError("no JSON object")
    name = str(document.get("kind"))
    if name in KINDS and document.keys() >= _REQUIRED[name]:
        return msgspec.convert(document, KINDS[name])
    if not is_plain(document):
        raise ValueError("nested too deep")
    stamp = {key: document[key] for key in ("time", "attempt", "rank") if key in document}
    return msgspec.convert({"name": name, "document": document, **stamp}, Unknown)
