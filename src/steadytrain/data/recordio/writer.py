"""Write a ``.rec`` and its ``.idx``, so that neither half a file nor the work of hours is ever left or lost."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from array import array
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import IO, Any, BinaryIO, Self

from steadytrain.data.recordio.framing import frame, index_path
from steadytrain.errors import DataError, StorageError, storage_errors
from steadytrain.files import create, lock_at_once
from steadytrain.machine.platform import NO_FOLLOW, open_descriptor

_BLOCK = 1 << 20


class RecordWriter:
    """Writes a ``.rec`` and its ``.idx``; both appear under their names only when all is well.

    A context manager: leaving it normally puts the files in place. Until then the bytes lie in a hidden ``.NAME.part``
    that is locked. Leaving it by an exception removes every trace, unless the work can go on: with ``work`` given,
    what was marked stays after a kill, Ctrl-C or a full disk, and the next writer of the same work takes it up.

    Args:
        path: ends in ``.rec``; its folder is made if need be.
        work: names what is being written, with everything that its bytes depend on; None: never take anything up.

    Attributes:
        companions: texts, their lines or bytes, to be put in place together with the records, by suffix.
        notes: of the marks that were taken up, oldest first.
        starts_over: there were marks, and none could be taken up: of other work, or the disk has changed them.

    Raises:
        DataError: a file is there already, or another process is writing it.
        StorageError: the disk is full or not writable.
    """

    def __init__(self, path: Path, *, force: bool = False, work: str | None = None) -> None:
        self.path = path
        self.companions: dict[str, str | bytes | Iterable[str]] = {}
        self.notes: list[Any] = []
        self.starts_over = False
        self.num_bytes = 0
        self._keys, self._offsets = array("Q"), array("Q")
        self._num_marked = 0
        self._sha256 = hashlib.sha256()
        self._waiting: list[bytes] = []  # records that are neither hashed nor written yet
        self._num_waiting = 0  # bytes of them
        self._unplaced: tuple[str, ...] | None = None  # suffixes of files that are complete under hidden names
        self._journal: IO[bytes] | None = None
        if work is None or not self._take_back(work):
            existing = [p.name for p in (path, index_path(path), path.with_suffix(".json")) if p.exists()]
            if existing and not force:
                raise DataError(
                    f"{', '.join(existing)} exist{'s' * (len(existing) == 1)} in {path.parent}:"
                    " choose another name, or give --force to replace"
                )
        with storage_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = _open_alone(self._part_of(".rec"), path)
            try:
                self._take_up(work)
            except BaseException:
                self._file.close()
                raise

    def __len__(self) -> int:
        return len(self._offsets)

    @property
    def digest(self) -> str:
        """sha256 (hex) of all bytes written so far: of the whole ``.rec`` once everything is. Raises StorageError."""
        with storage_errors(self.path):
            self._flush()
        return self._sha256.hexdigest()

    def index_lines(self) -> Iterator[str]:
        """Yield the lines of the index."""
        return (f"{key}\t{offset}\n" for key, offset in zip(self._keys, self._offsets, strict=True))

    def write(self, payload: bytes, key: int) -> None:
        """Append one record; ``key`` names it in the index. Raises DataError (too long) or StorageError."""
        framed = frame(payload)
        self._keys.append(key)
        self._offsets.append(self.num_bytes)
        self.num_bytes += len(framed)
        self._waiting.append(framed)
        self._num_waiting += len(framed)
        if self._num_waiting >= _BLOCK:
            with storage_errors(self.path):
                self._flush()

    def _flush(self) -> None:
        """Hash and write the records that wait: of small ones a call for each would cost more than the work."""
        if not self._waiting:
            return
        block = b"".join(self._waiting)
        self._waiting.clear()
        self._num_waiting = 0
        self._sha256.update(block)
        self._file.write(block)
        self._file.flush()

    def read(self, start: int, end: int) -> bytes:
        """Return bytes that were written. Raises StorageError."""
        with storage_errors(self.path), self._part_of(".rec").open("rb", buffering=0) as file:
            self._flush()
            file.seek(start)
            return file.read(end - start)

    def mark(self, note: Any) -> None:
        """Make sure of all records so far; ``note`` (plain data) says what the caller needs to go on from here.

        Raises:
            StorageError: the disk is full or not writable.
        """
        if self._journal is None:
            return
        new = slice(self._num_marked, len(self))
        with storage_errors(self.path):
            self._flush()
            os.fsync(self._file.fileno())
            keys, offsets = encode_numbers(self._keys[new]), encode_numbers(self._offsets[new])
            values = {"first": new.start, "bytes": self.num_bytes, "keys": keys, "offsets": offsets, "note": note}
            _append_line(self._journal, {**values, "sum": _mark_sum(self._sha256, values)})
        self._num_marked = len(self)

    def complete(self) -> None:
        """Have all bytes on the disk, under hidden names, and so leave little that can fail; write nothing after it.

        Leaving the context does this; call it first where several writers should succeed or fail together.

        Raises:
            StorageError: the disk is full or not writable.
        """
        if self._unplaced is not None:
            return
        texts: dict[str, str | bytes | Iterable[str]] = {".idx": self.index_lines(), **self.companions}
        with storage_errors(self.path):
            self._flush()
            os.fsync(self._file.fileno())
            for suffix, lines in texts.items():
                with create(self._part_of(suffix)) as file:
                    parts = [lines] if isinstance(lines, str | bytes) else lines
                    file.writelines(part.encode() if isinstance(part, str) else part for part in parts)
                    file.flush()
                    os.fsync(file.fileno())
        # Records come last: without them nothing looks finished. But where others are replaced they come first, and
        # their companions go before: a kill in between leaves no index and no card of other records.
        self._unplaced = (".rec", *texts) if self.path.exists() else (*texts, ".rec")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        stays = False
        try:
            if kind is None:
                self.place()
            else:
                stays = self._can_go_on(kind)
        except StorageError:
            stays = self._can_go_on(StorageError)
            raise
        finally:
            if not stays:  # after all is in place: the journal alone
                parts = [self._part_of(suffix) for suffix in (".rec", ".idx", *self.companions)]
                for part in parts if self._journal is None else [*parts, self._journal_path]:
                    with suppress(OSError):
                        part.unlink()
            for file in (self._file, self._journal):
                if file is not None:
                    with suppress(OSError):  # a full disk was an error already
                        file.close()

    def _can_go_on(self, kind: type[BaseException]) -> bool:
        """Return whether marked records stay, after an exception, for the next writer: it was no fault of the data."""
        interrupted = not issubclass(kind, Exception) or issubclass(kind, StorageError)
        return interrupted and self._journal is not None and self._num_marked > 0

    def _take_back(self, work: str) -> bool:
        """Return whether a kill came while the files of this work were put in place; take back those that were."""
        part = self._part_of(".rec")
        if not _is_journal(self._journal_path, work) or (part.exists() and self.path.exists()):
            return False
        with suppress(FileNotFoundError), self.path.open("r+b") as file:
            _hold(file, self.path)
            if not _is_journal(self._journal_path, work):  # whoever held it was only about to end
                return False
            self.path.replace(part)
        return True

    def _take_up(self, work: str | None) -> None:
        """Restore what the journal of this work marks, and drop what was written behind it."""
        if work is None:
            self._journal_path.unlink(missing_ok=True)
        else:
            is_same, had_marks = _is_journal(self._journal_path, work), len(_begin_of(self._journal_path)) > 1
            journal = self._journal = self._journal_path.open("r+b") if is_same else create(self._journal_path)
            if not is_same:
                _append_line(journal, {"work": work})
                journal.seek(0)
            num_whole = len(journal.readline())
            for line in journal:
                if not self._take_mark(line):
                    break
                num_whole += len(line)
            journal.seek(num_whole)
            journal.truncate()
            self.starts_over = had_marks and not self.num_bytes
        self._file.truncate(self.num_bytes)
        self._file.seek(0, os.SEEK_END)
        self._num_marked = len(self)

    def _take_mark(self, line: bytes) -> bool:
        """Restore one mark of the journal; return False where it, or a byte before it, is not as it was written."""
        digest, keys, offsets = self._sha256.copy(), array("Q"), array("Q")
        try:
            mark = json.loads(line)
            written, first, end, note = mark.pop("sum"), mark["first"], int(mark["bytes"]), mark["note"]
            append_numbers(mark["keys"], keys)
            append_numbers(mark["offsets"], offsets)
        except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError):
            return False
        self._file.seek(self.num_bytes)
        while block := self._file.read(min(_BLOCK, max(0, end - self._file.tell()))):
            digest.update(block)
        is_whole = line.endswith(b"\n") and first == len(self) and self._file.tell() == end
        if not is_whole or _mark_sum(digest, mark) != written:
            return False  # a kill left it half written, or the disk has changed it
        self._keys.extend(keys)
        self._offsets.extend(offsets)
        self._sha256, self.num_bytes = digest, end
        self.notes.append(note)
        return True

    def place(self) -> None:
        """Put all files under their names; leaving the context does this.

        Call it first where several writers belong together: as long as one context has not been left, a kill between
        them costs nothing, the next writers of the same work take back what stands in its place already.

        Raises:
            StorageError: the disk is not writable any more.
        """
        self.complete()
        suffixes, self._unplaced = self._unplaced or (), ()
        with storage_errors(self.path):
            for suffix in {".json", ".idx", ".hashes", *suffixes} - {".rec"} if suffixes else ():
                self.path.with_suffix(suffix).unlink(missing_ok=True)
            for suffix in suffixes:
                self._part_of(suffix).replace(self.path.with_suffix(suffix))

    @property
    def _journal_path(self) -> Path:
        return self.path.with_name(f".{self.path.name}.journal")

    def _part_of(self, suffix: str) -> Path:
        return self.path.with_name(f".{self.path.stem}{suffix}.part")


def remove_left(path: Path) -> None:
    """Remove what a writer left that was killed when all its files stood in their places."""
    stem = path.stem
    if not path.with_name(f".{stem}.rec.part").exists():  # else another writes there, or its work is not done
        for left in (f".{path.name}.journal", *(f".{stem}{suffix}.part" for suffix in (".idx", ".json", ".lst"))):
            with suppress(OSError):
                path.with_name(left).unlink()


def _is_journal(path: Path, work: str) -> bool:
    """Return whether a journal of this work lies there: a line that names it, then a line for each mark."""
    return _begin_of(path)[:1] == [_line({"work": work})]


def _begin_of(path: Path) -> list[bytes]:
    """Return the first two lines of a journal, as far as there are some."""
    with suppress(OSError), path.open("rb") as file:
        return list(islice(file, 2))
    return []


def _mark_sum(before: Any, values: Mapping[str, Any]) -> str:
    """Return the checksum of a mark and of all bytes before it, of which the digest is given."""
    digest = before.copy()
    digest.update(json.dumps(values).encode())
    return str(digest.hexdigest())


def _append_line(file: IO[bytes], values: dict[str, Any]) -> None:
    file.write(_line(values))
    file.flush()


def _line(values: dict[str, Any]) -> bytes:
    return json.dumps(values).encode() + b"\n"


def encode_numbers(values: array[int]) -> str:
    """Return a column of numbers as text, for a note."""
    return base64.b64encode(values.tobytes()).decode()


def append_numbers(text: str, column: array[int]) -> None:
    """Append what :func:`encode_numbers` made of a column of the same type."""
    column.frombytes(base64.b64decode(text))


def _open_alone(part: Path, path: Path) -> BinaryIO:
    """Open the hidden file, held by this process alone."""
    if part.is_symlink():  # not ours: records would be written where it leads
        part.unlink()
    file = os.fdopen(open_descriptor(part, os.O_RDWR | os.O_CREAT | NO_FOLLOW, 0o666), "r+b")
    try:
        _hold(file, path)
        # Whoever held it may have put it in place between the two lines above: then it is no longer ours to empty.
        if not part.exists() or not os.path.samestat(part.stat(), os.fstat(file.fileno())):
            raise _in_use(path)
    except BaseException:
        file.close()
        raise
    return file


def _hold(file: BinaryIO, path: Path) -> None:
    """Lock a file until it is closed. Raises DataError where another process holds it."""
    if not lock_at_once(file):
        raise _in_use(path)


def _in_use(path: Path) -> DataError:
    return DataError(f"{path} is being written by another process: wait for it or choose another name")
