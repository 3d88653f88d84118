"""Walk a record file that may be damaged: every whole record, every stretch of bytes that belongs to none, and headers.

A part of a record is believed when it ends where the next one begins, or where the file does. After damage the walk
goes on at the next place where a record begins: an aligned magic with the cflag of a beginning can be nothing else,
since payloads never hold one; where bytes were lost or added and alignment with them, a magic at any byte will do, if
the frame behind it leads to another magic or to the file's end.

The file is read once, from front to back, in blocks (not mapped: a file that shrinks meanwhile, or a disk that fails,
must not kill the process).
"""

from __future__ import annotations

import hashlib
import os
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from steadytrain.data.checking.findings import Findings
from steadytrain.data.recordio.framing import HEADER_BYTES, MAGIC, MAX_PAYLOAD, read_payload
from steadytrain.errors import DataError, FailedError

HEAD_BYTES = 8 + HEADER_BYTES

_MAGIC = struct.pack("<I", MAGIC)
_ANYWHERE = re.compile(re.escape(_MAGIC))
_FRAME = struct.Struct("<II")
_LEAST, _MOST = 1 << 16, 1 << 24  # bytes read at a time: few after damage, then more and more
_SEARCH = 1 << 20


class ByteSource:
    """A file that is read by offset, up to where it ended when it was opened. A context manager.

    Args:
        path: of the file.
        digested: take its sha256 from what is read anyhow, as long as that leaves out nothing.

    Raises:
        DataError: there is no such file, or it may not be read.
    """

    def __init__(self, path: Path, *, digested: bool = False) -> None:
        self.path = path
        self._sha256 = hashlib.sha256() if digested else None
        self._num_digested = 0
        try:
            self._file = path.open("rb", buffering=0)
            self._state = _state_of(os.fstat(self._file.fileno()))
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror or error}") from error
        self.size = self._state[0]

    def read(self, offset: int, size: int) -> bytes:
        """Read ``size`` bytes, fewer only at the file's end.

        Raises:
            DataError: the file has become shorter.
            FailedError: the disk cannot give them.
        """
        size = max(0, min(size, self.size - offset))
        try:
            self._file.seek(offset)
            data = self._file.read(size) or b""
            while data and len(data) < size and (more := self._file.read(size - len(data))):
                data += more
        except OSError as error:
            raise FailedError(
                f"cannot read {self.path} at byte {offset:,} ({error.strerror}): the disk may be failing; copy what it"
                " still gives (ddrescue does), and check the copy"
            ) from error
        if len(data) < size:
            raise DataError(
                f"{self.path} becomes shorter while it is read ({self.size:,} bytes, then {offset + len(data):,}): wait"
                " until it is written"
            )
        if self._sha256 is not None and offset <= self._num_digested < offset + len(data):
            self._sha256.update(memoryview(data)[self._num_digested - offset :])
            self._num_digested = offset + len(data)
        return data

    def digest(self) -> str:
        """Return the sha256 (hex) of the file; what has not been read yet is read now."""
        assert self._sha256 is not None
        while self.read(self._num_digested, _MOST):
            pass
        return self._sha256.hexdigest()

    def has_changed(self) -> bool:
        """Return whether the file was written to, replaced or removed since it was opened."""
        try:
            return _state_of(self.path.stat()) != self._state
        except OSError:
            return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()


def _state_of(stat: os.stat_result) -> tuple[int, ...]:
    return stat.st_size, stat.st_mtime_ns, stat.st_ino, stat.st_dev


@dataclass(frozen=True)
class Gap:
    """Bytes ``start`` to ``end`` that belong to no whole record.

    Args:
        kind: of finding; see :mod:`~steadytrain.data.checking.findings`.
        detail: what is known of it.
        id: of the record that was lost, where its header can still be read.
    """

    start: int
    end: int
    kind: str
    detail: str
    id: int | None = None


@dataclass(frozen=True)
class Whole:
    """N whole records that follow each other.

    Args:
        offsets: int64[N], where each begins.
        ends: int64[N], where each ends, padding included.
        lengths: int64[N], bytes of payload.
        heads: uint8[N, 32], the first bytes of each, from its frame on.
        in_parts: bool[N], records that are cut into parts.
        dirty: bool[N], records whose padding is not zeros.
    """

    offsets: NDArray[np.int64]
    ends: NDArray[np.int64]
    lengths: NDArray[np.int64]
    heads: NDArray[np.uint8]
    in_parts: NDArray[np.bool_]
    dirty: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.offsets)


def whole_records(source: ByteSource) -> Iterator[Whole | Gap]:
    """Yield the records and gaps of a file, in their order; together they are all of its bytes."""
    parts: list[_Parts] = []  # of a record that has begun and not ended
    for step in _walk(source):
        if isinstance(step, Gap):
            yield _broken_parts(parts, step.end) if parts else step
            parts.clear()
        elif parts or (step.words >> 29).any():
            yield from _join(step, parts)
        else:
            yield step.as_records()
    if parts:
        yield _broken_parts(parts, parts[-1].end)


@dataclass(frozen=True)
class _Parts:
    """N parts that follow each other: where, the word with cflag and length, the first bytes, dirty padding."""

    offsets: NDArray[np.int64]
    words: NDArray[np.uint32]
    heads: NDArray[np.uint8]
    dirty: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.offsets)

    def __getitem__(self, rows: slice) -> _Parts:
        return _Parts(self.offsets[rows], self.words[rows], self.heads[rows], self.dirty[rows])

    @property
    def start(self) -> int:
        return int(self.offsets[0])

    @property
    def end(self) -> int:
        return int(self.ends[-1])

    @property
    def ends(self) -> NDArray[np.int64]:
        return self.offsets + 8 + ((self.words & MAX_PAYLOAD).astype(np.int64) + 3 & ~3)

    def as_records(self) -> Whole:
        """One record each."""
        lengths = (self.words & MAX_PAYLOAD).astype(np.int64)
        return Whole(self.offsets, self.ends, lengths, self.heads, np.zeros(len(self), np.bool_), self.dirty)


def _join(run: _Parts, open_parts: list[_Parts]) -> Iterator[Whole | Gap]:
    """Join a run's parts to records; ``open_parts`` is what has begun before it, and then what goes on after it."""
    for row, cflag in enumerate((run.words >> 29).tolist()):
        part = run[row : row + 1]
        if cflag in (0, 1) and open_parts:
            yield _broken_parts(open_parts, part.start)
            open_parts.clear()
        if cflag == 0:
            yield part.as_records()
        elif cflag != 1 and not open_parts:
            yield Gap(part.start, part.end, "broken-parts", "its beginning is missing")
        else:
            open_parts.append(part)
            if cflag == 3:
                first = open_parts[0]
                length = sum(int(each.words[0]) & MAX_PAYLOAD for each in open_parts) + 4 * (len(open_parts) - 1)
                yield Whole(first.offsets, part.ends, np.array([length]), first.heads, np.array([True]), part.dirty)
                open_parts.clear()


def _broken_parts(parts: list[_Parts], end: int) -> Gap:
    """Describe a record in parts whose end is missing."""
    head = parts[0].heads[0]
    has_id = int(parts[0].words[0]) & MAX_PAYLOAD >= HEADER_BYTES
    return Gap(parts[0].start, end, "broken-parts", "its end is missing", int(head.view("<u8")[2]) if has_id else None)


def _walk(source: ByteSource) -> Iterator[_Parts | Gap]:
    at, room = 0, _LEAST
    while at < source.size:
        parts, num_linked = _read_parts(source, at, room)
        if num_linked:
            yield parts[:num_linked]
            at = int(parts.ends[num_linked - 1])
            room = min(2 * room, _MOST)
            continue
        end = _end_of(source, at)
        if end is not None:  # longer than the room, or the last one before damage or the file's end
            yield parts[:1]
            at = end
            room = min(2 * room, _MOST)
            continue
        room = _LEAST
        gap = _gap(source, at)
        yield gap
        at = gap.end


def _read_parts(source: ByteSource, at: int, room: int) -> tuple[_Parts, int]:
    """Find every magic in ``room`` bytes from ``at`` on, aligned with it, and how many of them lead to the next."""
    data = source.read(at, room + HEAD_BYTES).ljust(room + HEAD_BYTES, b"\0")
    offsets = 4 * np.flatnonzero(np.frombuffer(data, "<u4", count=room // 4) == MAGIC)
    raw = np.frombuffer(data, np.uint8)
    heads = raw[offsets[:, None] + np.arange(HEAD_BYTES)]
    words = heads.view("<u4")[:, 1].astype(np.uint32)
    parts = _Parts(offsets + at, words, heads, np.zeros(len(offsets), np.bool_))
    if not len(offsets) or offsets[0]:
        return parts, 0
    linked = (words >> 29)[1:] <= 3
    linked &= parts.ends[:-1] == parts.offsets[1:]
    linked &= (words >> 29)[:-1] <= 3
    linked &= parts.ends[1:] <= source.size  # else `_end_of` looks closer
    num_linked = int(np.argmin(linked)) if not linked.all() else len(linked)
    # A part's padding stands right before the next part.
    nexts = offsets[1 : num_linked + 1]
    before = raw[nexts[:, None] + np.arange(-3, 0)]
    padding = (-(words[:num_linked] & MAX_PAYLOAD).astype(np.int64) % 4)[:, None]
    parts.dirty[:num_linked] = ((before != 0) & (np.arange(3, 0, -1) <= padding)).any(axis=1)
    if num_linked == 0 and len(offsets):
        length = int(words[0]) & MAX_PAYLOAD
        parts.dirty[0] = any(source.read(parts.start + 8 + length, -length % 4))
    return parts, num_linked


def _end_of(source: ByteSource, at: int) -> int | None:
    """Find where the part that begins at ``at`` ends, if one does and it holds no other's beginning."""
    end = _announced_end(source.read(at, 8), at)
    if end is None or end > source.size or _next_aligned(source, at + 4, end) is not None:
        return None
    following = source.size if end == source.size else _announced_end(source.read(end, 8), end)
    if following is not None and following <= source.size:
        return end
    # Nothing sound begins where it ends: that is damaged, or bytes of this one are missing and it reaches too far.
    return end if _resume(source, at, end) >= end else None


def _announced_end(frame: bytes, at: int) -> int | None:
    """Return where a part says that it ends; None for what is no frame."""
    if len(frame) < 8:
        return None
    magic, word = _FRAME.unpack_from(frame)
    return at + 8 + ((word & MAX_PAYLOAD) + 3 & ~3) if magic == MAGIC and word >> 29 <= 3 else None


def _next_aligned(source: ByteSource, at: int, stop: int) -> int | None:
    """Find the first magic at ``at``, or a multiple of 4 behind it, before ``stop``."""
    while at < stop:
        data = source.read(at, min(_SEARCH, stop - at))
        magics = np.flatnonzero(np.frombuffer(data, "<u4", count=len(data) // 4) == MAGIC)
        if magics.size:
            return at + 4 * int(magics[0])
        at += _SEARCH
    return None


def _gap(source: ByteSource, at: int) -> Gap:
    """Describe what is wrong at ``at``, up to where a record begins again."""
    end = _resume(source, at, source.size)
    head = source.read(at, HEAD_BYTES)
    announced = _announced_end(head, at)
    id_ = int.from_bytes(head[16:24], "little") if len(head) == HEAD_BYTES else None
    if announced is not None and announced > end == source.size:
        return Gap(at, end, "cut-short", f"needs {announced - at:,} bytes, {end - at:,} are there", id_)
    if announced is not None:
        begins = f"the next one begins at byte {end:,}" if end < source.size else "no other begins behind it"
        return Gap(at, end, "wrong-length", f"would end at byte {announced:,}, but {begins}", id_)
    if head[:4] == _MAGIC[: len(head)] and len(head) < 8:
        return Gap(at, end, "cut-short", f"only {len(head)} bytes of it are there")
    if _announced_end(_MAGIC + head[4:8], at) == end:
        return Gap(at, end, "wrong-magic", f"{head[:4].hex(' ')} stands where {_MAGIC.hex(' ')} should", id_)
    if head[:4] == _MAGIC and int.from_bytes(head[4:8], "little") >> 29 > 3:
        return Gap(at, end, "wrong-length", "its frame is damaged", id_)
    zeros = " (zeros)" if not any(source.read(at, min(end - at, _SEARCH))) else ""
    return Gap(at, end, "stray-bytes", f"{end - at:,} byte{'s' * (end - at > 1)}{zeros}, up to byte {end:,}")


def _resume(source: ByteSource, at: int, stop: int) -> int:
    """Find where a record begins again behind ``at``; ``stop`` where none does before that."""
    start = at + 1
    while start < stop:
        data = source.read(start, _SEARCH + 7)
        for match in _ANYWHERE.finditer(data):
            place = start + match.start()
            frame = data[match.start() : match.start() + 8]
            if match.start() < _SEARCH and place < stop and _begins(source, frame, place, at):
                return place
        start += _SEARCH
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


_HEADER = struct.Struct("<IfQQ")


@dataclass(frozen=True)
class Headers:
    """The headers of N records: what can be read of each.

    Args:
        offsets, ends: int64[N], bytes of the file.
        ids: uint64[N].
        widths: int64[N], how many labels; 0 where there is no header, or none that can be believed.
        labels: float32[N], the first label of each.
        finite: bool[N], all labels are numbers.
        detection: bool[N], the labels are those of objects and their boxes.
    """

    offsets: NDArray[np.int64]
    ends: NDArray[np.int64]
    ids: NDArray[np.uint64]
    widths: NDArray[np.int64]
    labels: NDArray[np.float32]
    finite: NDArray[np.bool_]
    detection: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.offsets)

    @property
    def readable(self) -> NDArray[np.bool_]:
        """bool[N]: there is a header, and room for the labels that it announces."""
        return self.widths > 0

    @staticmethod
    def joined(parts: Sequence[Headers]) -> Headers:
        """Join those of several stretches of a file, in order."""
        columns = ("offsets", "ends", "ids", "widths", "labels", "finite", "detection")
        kinds = ("i8", "i8", "u8", "i8", "f4", "?", "?")
        return Headers(
            *(
                np.concatenate([np.empty(0, kind), *(getattr(part, name) for part in parts)])
                for name, kind in zip(columns, kinds, strict=True)
            )
        )


def read_headers(source: ByteSource, records: Whole, first: int, findings: Findings) -> Headers:
    """Read the headers of whole records, and add what is wrong with each to ``findings``.

    Args:
        source: the file.
        records: some of its records.
        first: number of the first of them.
        findings: takes what is wrong.
    """
    words = records.heads.view("<u4")
    flags = words[:, 2].astype(np.int64)
    labels = records.heads.view("<f4")[:, 3].copy()
    ids = records.heads.view("<u8")[:, 2].copy()
    # A magic inside the header itself cuts that in parts: rare enough to be read one by one.
    cut = records.in_parts & ((words[:, 1] & MAX_PAYLOAD) < HEADER_BYTES) & (records.lengths >= HEADER_BYTES)
    for row in np.flatnonzero(cut).tolist():
        flags[row], labels[row], ids[row], _ = _HEADER.unpack_from(_payload(source, records, row))
    short = records.lengths < HEADER_BYTES
    over = ~short & (HEADER_BYTES + 4 * flags > records.lengths)
    widths = np.where(short | over, 0, np.maximum(flags, 1))
    finite, detection = np.isfinite(labels), np.zeros(len(records), np.bool_)
    for row in np.flatnonzero((widths > 0) & (flags > 0)).tolist():
        vector = _vector(source, records, row, int(flags[row]))
        labels[row], finite[row], detection[row] = vector[0], np.isfinite(vector).all(), is_detection(vector)
    headers = Headers(records.offsets, records.ends, ids, widths, labels, finite, detection)
    _add_findings(headers, records, flags, first, findings)
    return headers


def is_detection(labels: NDArray[np.float32]) -> bool:
    """Return whether a label vector describes objects and boxes, as MXNet's detection records do.

    ``A, B, ...`` (A numbers, the header, of which A and B are the first two), then B numbers for each object: its
    class, left, top, right and bottom as fractions of the image, and perhaps more.

    >>> is_detection(np.array([4, 5, 640, 480, 7, 0.1, 0.2, 0.5, 0.9], np.float32))
    True
    >>> is_detection(np.array([4, 5, 640, 480, 7, 100, 20, 0.5, 0.9], np.float32))
    False
    """
    if len(labels) < 7 or not np.isfinite(labels[:2]).all():
        return False
    head, width = float(labels[0]), float(labels[1])
    if head != int(head) or width != int(width) or head < 2 or width < 5 or (len(labels) - head) % width:
        return False
    objects = labels[int(head) :].reshape(-1, int(width))
    classes, boxes = objects[:, 0], objects[:, 1:5]
    # Objects may be padded with -1, and boxes reach a little over the edge.
    return bool(len(objects) and np.all(classes == np.floor(classes)) and np.all((boxes >= -1) & (boxes <= 2)))


def _vector(source: ByteSource, records: Whole, row: int, width: int) -> NDArray[np.float32]:
    if records.in_parts[row]:
        return np.frombuffer(_payload(source, records, row), "<f4", count=width, offset=HEADER_BYTES)
    return np.frombuffer(source.read(int(records.offsets[row]) + 8 + HEADER_BYTES, 4 * width), "<f4")


def _payload(source: ByteSource, records: Whole, row: int) -> memoryview:
    start, end = int(records.offsets[row]), int(records.ends[row])
    return read_payload(memoryview(source.read(start, end - start)), 0)


def _add_findings(headers: Headers, records: Whole, flags: NDArray[np.int64], first: int, findings: Findings) -> None:
    def add(kind: str, row: int, detail: str) -> None:
        known = records.lengths[row] >= HEADER_BYTES
        id_ = int(headers.ids[row]) if known else None
        findings.add(kind, detail, offset=int(headers.offsets[row]), record=first + row, id=id_)

    for row in np.flatnonzero(records.dirty).tolist():
        add("padding", row, "")
    for row in np.flatnonzero(~headers.readable).tolist():
        length = int(records.lengths[row])
        if length < HEADER_BYTES:
            add("no-header", row, f"{length} of {HEADER_BYTES} bytes" if length else "an empty record")
        else:
            room = (length - HEADER_BYTES) // 4
            add("label-overrun", row, f"{flags[row]:,} labels, with room for {room:,}")
    for row in np.flatnonzero(headers.readable & ~headers.finite).tolist():
        add("label-not-finite", row, f"label {headers.labels[row]}" if headers.widths[row] == 1 else "in a vector")
