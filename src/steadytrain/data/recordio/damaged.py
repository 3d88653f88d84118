"""Walk a record file that may be damaged: every whole record, and every stretch of bytes that belongs to none.

A part of a record is believed when it ends where the next one begins, or where the file does. After damage the walk
goes on at the next place where a record begins: an aligned magic with the cflag of a beginning can be nothing else,
since payloads never hold one; where bytes were lost or added and alignment with them, a magic at any byte will do, if
the frame behind it leads to another magic or to the file's end.

The file is read once, from front to back, in blocks (not mapped: a file that shrinks meanwhile, or a disk that fails,
must not kill the process).
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from steadytrain.data.recordio.framing import HEADER_BYTES, MAGIC, MAX_PAYLOAD
from steadytrain.data.storage.array_cache import file_state
from steadytrain.data.storage.local_files import open_patiently
from steadytrain.errors import DataError, FailedError, StorageError, read_errors
from steadytrain.files import Closing

_ANYWHERE = re.compile(re.escape(struct.pack("<I", MAGIC)))
_FRAME = struct.Struct("<II")
_HEAD_BYTES = 8 + HEADER_BYTES
_BLOCK = 1 << 18  # bytes read at a time


class ByteSource(Closing):
    """A file that is read by offset, up to where it ended when it was opened. A context manager.

    ``digested``: take its sha256 from what is read anyhow, as long as that leaves out nothing.

    Raises:
        DataError: there is no such file, or it may not be read.
    """

    def __init__(self, path: Path, *, digested: bool = False) -> None:
        self.path = path
        self._sha256 = hashlib.sha256() if digested else None
        self._num_digested = 0
        self._block, self._start = b"", 0
        with read_errors(path):
            self._file = open_patiently(path)
            self.size, self._state = path.stat().st_size, file_state(path)

    def read(self, offset: int, size: int) -> bytes:
        """Read ``size`` bytes, fewer only at the file's end.

        Raises:
            DataError: the file has become shorter.
            FailedError: the disk cannot give them.
        """
        size = max(0, min(size, self.size - offset))
        if not size or offset < self._start:  # a look back leaves the block where the walk is
            return self._read(offset, size)
        if offset + size > self._start + len(self._block):
            self._block = self._read(offset, min(max(size, _BLOCK), self.size - offset))
            self._start = offset
        return self._block[offset - self._start : offset - self._start + size]

    def _read(self, offset: int, size: int) -> bytes:
        try:
            self._file.seek(offset)
            data = self._file.read(size)
        except StorageError as error:
            reason = getattr(error.__cause__, "strerror", None) or error
            raise FailedError(
                f"cannot read {self.path} at byte {offset:,} ({reason}): the disk may be failing; copy what it still"
                " gives (ddrescue does), and check the copy"
            ) from error
        if len(data) < size:
            raise DataError(
                f"{self.path} became shorter while being read ({self.size:,} bytes, then {offset + len(data):,}): wait"
                " until it is written"
            )
        if self._sha256 is not None and offset <= self._num_digested < offset + len(data):
            self._sha256.update(memoryview(data)[self._num_digested - offset :])
            self._num_digested = offset + len(data)
        return data

    def digest(self) -> str:
        """Return the sha256 (hex) of the file; what has not been read yet is read now."""
        assert self._sha256 is not None
        while self._read(self._num_digested, min(_BLOCK, self.size - self._num_digested)):
            pass
        return self._sha256.hexdigest()

    def has_changed(self) -> bool:
        """Return whether the file was written to, replaced or removed since it was opened."""
        return file_state(self.path) != self._state

    def close(self) -> None:
        self._file.close()


@dataclass(frozen=True)
class Gap:
    """Bytes ``start`` to ``end`` that belong to no whole record.

    Args:
        needed: bytes that the last record of a file announces, which is cut short; 0 for other damage.
        id: of the record that was lost, where its header can still be read.
    """

    start: int
    end: int
    needed: int = 0
    id: int | None = None


class Record(NamedTuple):
    """A whole record.

    Args:
        start, end: bytes of the file, frame and padding included.
        length: bytes of payload.
        cflag: of its first part, 0 for a record in one part.
        head: 24 bytes behind the frame: an image header, where the first part is as long.
    """

    start: int
    end: int
    length: int
    cflag: int
    head: bytes


def whole_records(source: ByteSource) -> Iterator[Record | Gap]:
    """Yield the records and gaps of a file, in their order; together they are all of its bytes."""
    at = 0
    while at < source.size:
        step = _record_at(source, at) or _gap_at(source, at)
        yield step
        at = step.end


def _record_at(source: ByteSource, at: int) -> Record | None:
    """Return the record that begins at ``at``, whole with all of its parts; None where none does."""
    head = source.read(at, _HEAD_BYTES)
    frame, end, length = head[:8], at, -4
    while True:
        start, announced = end, _announced_end(frame, end)
        if announced is None or not _is_believed(source, start, announced):
            return None
        word = int.from_bytes(frame[4:], "little")
        cflag, end, length = word >> 29, announced, length + 4 + (word & MAX_PAYLOAD)
        if (cflag in (2, 3)) is (start == at):  # a beginning in the middle, or none where one should be
            return None
        if cflag in (0, 3):
            return Record(at, end, length, head[7] >> 5, head[8:].ljust(HEADER_BYTES, b"\0"))
        frame = source.read(end, 8)


def _is_believed(source: ByteSource, at: int, end: int) -> bool:
    """Return whether a part that begins at ``at`` ends at ``end``, and holds no other's beginning."""
    if end > source.size or _holds_magic(source, at + 4, end):
        return False
    following = source.size if end == source.size else _announced_end(source.read(end, 8), end)
    # Where nothing sound begins behind it: that is damaged, or bytes of this one are missing and it reaches too far.
    return (following is not None and following <= source.size) or _resume(source, at, end) >= end


def _announced_end(frame: bytes, at: int) -> int | None:
    """Return where a part says that it ends; None for what is no frame."""
    if len(frame) < 8:
        return None
    magic, word = _FRAME.unpack_from(frame)
    return at + 8 + ((word & MAX_PAYLOAD) + 3 & ~3) if magic == MAGIC and word >> 29 <= 3 else None


def _holds_magic(source: ByteSource, at: int, stop: int) -> bool:
    """Return whether a magic stands at ``at``, or a multiple of 4 behind it, before ``stop``."""
    for start in range(at, stop, _BLOCK):
        data = source.read(start, min(_BLOCK, stop - start))
        if (np.frombuffer(data, "<u4", count=len(data) // 4) == MAGIC).any():
            return True
    return False


def _gap_at(source: ByteSource, at: int) -> Gap:
    """Return the damage at ``at``, up to where a record begins again."""
    end, head = _resume(source, at, source.size), source.read(at, _HEAD_BYTES)
    announced = _announced_end(head, at) or 0
    needed = announced - at if announced > end == source.size else 0
    return Gap(at, end, needed, int.from_bytes(head[16:24], "little") if len(head) == _HEAD_BYTES else None)


def _resume(source: ByteSource, at: int, stop: int) -> int:
    """Find where a record begins again behind ``at``; ``stop`` where none does before that."""
    for start in range(at + 1, stop, _BLOCK):
        data = source.read(start, _BLOCK + 7)
        for match in _ANYWHERE.finditer(data):
            place = start + match.start()
            frame = data[match.start() : match.start() + 8]
            if match.start() < _BLOCK and place < stop and _begins(source, frame, place, at):
                return place
    return stop


def _begins(source: ByteSource, frame: bytes, place: int, aligned_with: int) -> bool:
    """Return whether a magic is the beginning of a record."""
    end = _announced_end(frame, place)
    if end is None or frame[7] >> 5 > 1:
        return False
    if (place - aligned_with) % 4 == 0 or end == source.size:
        return True
    following = source.read(end, 8)
    return _announced_end(following, end) is not None and (following[7] >> 5 in (2, 3)) is (frame[7] >> 5 == 1)
