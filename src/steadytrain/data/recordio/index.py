"""Places of a file's records, and the columns of their headers, as numpy arrays.

Offsets come from the ``.idx`` or, without one, from jumping along the frames; headers are gathered a block at a time.
No Python object is made per record, so 1.28 million of them take tens of megabytes.
"""

from __future__ import annotations

import contextlib
import struct
import warnings
from array import array
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from steadytrain.data.recordio.framing import HEADER_BYTES, MAGIC, MAX_PAYLOAD, Readable, read_payload, unpack
from steadytrain.data.storage.local_files import LocalFile, read_patiently, rows_at
from steadytrain.errors import DataError
from steadytrain.files import replace_file, require_regular
from steadytrain.format import whole_number

Offsets = NDArray[np.int64]

_FRAME = struct.Struct("<II")
_BLOCK = 16384  # records gathered at a time: a few megabytes
_WINDOW = 1 << 16  # bytes read at a time where records are smaller than that
_FAR = 16384  # bytes from record to record above which a window holds mostly what nobody asked for


def read_index(path: Path) -> Offsets:
    """Read the byte offsets of an ``.idx``, rising; its keys are not used. An index of blank lines has none.

    Raises:
        DataError: a line is not ``key TAB offset``.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*no data")
            offsets = read_patiently(partial(_load_offsets, path), str(path))
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, OverflowError):
        raise DataError(f"{path.name} is not an index ({_wrong_line(path)})") from None
    if (offsets[1:] < offsets[:-1]).any():
        offsets.sort()
    return offsets


def _load_offsets(path: Path) -> Offsets:
    require_regular(path)
    return np.loadtxt(path, dtype=np.int64, delimiter="\t", usecols=1, comments=None, ndmin=1)


def _wrong_line(path: Path) -> str:
    """Describe the first line of a file that no line of an index is."""
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            fields = line.rstrip("\n").split("\t")
            offset = fields[1].strip() if len(fields) > 1 else ""
            if not line.strip() or whole_number(offset) is not None:
                continue
            if offset.isdecimal():
                return f"line {number} names byte {offset[:60]}, and no file is as long"
            return f"line {number} is {line.strip()[:60]!r}, not a key, a tab and an offset"
    return "it has lines of another form than a key, a tab and an offset"


def write_index(rec: Path, index: Path) -> Path:
    """Write the ``.idx`` of a record file, with keys from 0 on; return its path.

    Raises:
        DataError: the file is damaged, or cannot be read.
        StorageError: the index cannot be written; what was there before stays.
    """
    try:
        with rec.open("rb") as file, contextlib.closing(LocalFile(rec, file.fileno())) as opened:
            offsets = scan(opened)
        if not len(offsets):
            raise DataError(f"cannot index {rec} as {index}: it is empty")
    except OSError as error:
        raise DataError(f"cannot index {rec} as {index}: {error.strerror or error}") from error
    replace_file(index, "".join(f"{key}\t{offset}\n" for key, offset in enumerate(offsets)))
    return index


def scan(file: Readable) -> Offsets:
    """Find every record by jumping from frame to frame.

    Raises:
        DataError: the file is damaged or cut short; says at which byte, and where the next whole record begins.
    """
    unpack_from, size, at, within = _FRAME.unpack_from, len(file), 0, False
    offsets, payload = array("q"), 0
    window, start, end = (file, 0, size) if isinstance(file, memoryview) else (memoryview(b""), 0, 0)
    while at + 8 <= size:
        if at + 8 > end:
            start, end = at, min(size, at + (_WINDOW if payload < _FAR else 8))
            window = file[start:end] if isinstance(file, memoryview) else file.read(start, end)
        magic, word = unpack_from(window, at - start)
        cflag = word >> 29
        if magic != MAGIC or (cflag in (2, 3)) is not within or cflag > 3:
            resumes_at = resynchronise(file, at + 4)
            hint = "" if resumes_at is None else f" (the next whole record begins at byte {resumes_at:,})"
            raise DataError(f"damaged at byte {at:,}{hint}")
        if not within:
            offsets.append(at)
        within, payload = cflag in (1, 2), word & MAX_PAYLOAD
        at += 8 + (payload + 3 & ~3)
    if within or at != size:
        raise DataError(f"cut short: its last record needs more than the {size:,} bytes that are there")
    return np.frombuffer(offsets, dtype=np.int64) if offsets else np.empty(0, np.int64)


def resynchronise(file: Readable, start: int) -> int | None:
    """Find the first byte at or after ``start`` where a record begins after damage; None where there is none.

    An aligned magic followed by the cflag of a beginning can be nothing else: payloads never hold it.
    """
    start += -start % 4
    num_words = len(file) // 4
    for at in range(start // 4, num_words - 1, 1 << 20):
        block = np.frombuffer(file[4 * at : 4 * min(num_words, at + (1 << 20) + 1)], dtype="<u4")
        begins = np.flatnonzero((block[:-1] == MAGIC) & (block[1:] >> 29 <= 1))
        if begins.size:
            return int(begins[0] + at) * 4
    return None


def require_complete(file: Readable, offsets: Offsets) -> None:
    """Raise DataError where the file holds a whole record that the offsets, which rise, leave out.

    A record is left out where it begins right behind a listed one. Damaged bytes, which the writer of the offsets
    left out, are no record.
    """
    for start in range(0, len(offsets), _BLOCK):
        begins = offsets[start : start + _BLOCK]
        frames = _gather(file, begins, 8).view("<u4")[:, 1]
        ends = begins + 8 + ((frames & MAX_PAYLOAD).astype(np.int64) + 3 & ~3)
        nexts = np.append(offsets[start + 1 : start + _BLOCK + 1], len(file))[: len(begins)]
        behind = ends[(frames >> 29 == 0) & (ends < nexts) & (ends + 8 <= len(file))]
        if start == 0 and offsets[0] > 0:
            behind = np.append(np.int64(0), behind)
        frames_behind = _gather(file, behind, 8).view("<u4")
        lacking = behind[(frames_behind[:, 0] == MAGIC) & (frames_behind[:, 1] >> 29 <= 1)]
        if len(lacking):
            raise DataError(f"a record that begins at byte {lacking[0]:,} is not in its index of {len(offsets):,}")


@dataclass(frozen=True)
class RecordColumns:
    """The headers of N records: ``ids`` int64[N], and ``labels`` float32[N, L]."""

    ids: NDArray[np.int64]
    labels: NDArray[np.float32]


def read_columns(file: Readable, offsets: Offsets) -> RecordColumns:
    """Read ids and labels of the records at ``offsets``.

    Raises:
        DataError: an offset begins no record, a record is too short, or records differ in how many labels they have.
    """
    ids = np.empty(len(offsets), np.int64)
    flags = np.empty(len(offsets), np.uint32)
    labels = np.empty((len(offsets), 1), np.float32)
    for start in range(0, len(offsets), _BLOCK):
        part = slice(start, start + _BLOCK)
        flags[part], ids[part], labels[part, 0] = _heads(file, offsets[part])
    least, most = max(1, int(flags.min(initial=2**32 - 1))), max(1, int(flags.max(initial=0)))
    if least < most:
        raise DataError(f"its records hold {least} to {most} labels: only equally many can be used")
    if flags.any():
        labels = _vectors(file, offsets, flags.astype(bool), labels, least)
    return RecordColumns(ids, labels)


def read_heads(file: Readable, offsets: Offsets) -> NDArray[np.uint32]:
    """Read magic, cflag with length, and number of labels of some records, uint32[n, 3].

    Raises:
        DataError: the file ends before.
    """
    return _gather(file, offsets, 12).view("<u4")


def _heads(file: Readable, offsets: Offsets) -> tuple[NDArray[np.uint32], NDArray[np.uint64], NDArray[np.float32]]:
    """Read flag, id and first label of each record."""
    heads = _gather(file, offsets, 8 + HEADER_BYTES)
    words = heads.view("<u4")
    wrong = (words[:, 0] != MAGIC) | (words[:, 1] >> 29 > 1)
    short = (words[:, 1] >> 29 == 0) & (words[:, 1] & MAX_PAYLOAD < HEADER_BYTES)
    if wrong.any():
        raise DataError(f"no record begins at byte {offsets[wrong][0]:,}")
    if short.any():
        raise DataError(f"the record at byte {offsets[short][0]:,} is too short for an image header: not image records")
    flags, labels, ids = words[:, 2].copy(), heads.view("<f4")[:, 3].copy(), heads.view("<u8")[:, 2].copy()
    # A magic inside the header itself cuts that in parts: rare enough to be read one by one.
    for row in np.flatnonzero((words[:, 1] & MAX_PAYLOAD < HEADER_BYTES) & (words[:, 1] >> 29 == 1)):
        record = unpack(read_payload(file, int(offsets[row])))
        ids[row], labels[row], flags[row] = record.id, record.labels[0], len(record.labels)
        flags[row] *= len(record.labels) > 1  # a single one, wherever it stood, has been read
    return flags, ids, labels


def _gather(file: Readable, offsets: Offsets, width: int) -> NDArray[np.uint8]:
    """Gather uint8[n, width] from each offset on."""
    if offsets.size and (offsets.min() < 0 or offsets.max() + width > len(file)):
        last = offsets[(offsets < 0) | (offsets + width > len(file))][0]
        raise DataError(f"the record at byte {last:,} is too short for an image header, or beyond the end of the file")
    if not isinstance(file, memoryview):
        return file.gather(offsets, width)
    return rows_at(np.frombuffer(file, dtype=np.uint8), offsets, width)


def _vectors(
    file: Readable, offsets: Offsets, vectors: NDArray[np.bool_], single: NDArray[np.float32], width: int
) -> NDArray[np.float32]:
    """Read labels that follow the header, float32[N, width]; records with none keep the one in the header."""
    if 4 * width * len(offsets) > len(file):
        raise DataError(f"its records announce {width:,} labels each, more than the file has room for")
    labels = np.repeat(single, width, axis=1)
    rows = np.flatnonzero(vectors)
    step = max(1, _BLOCK // width)
    for start in range(0, len(rows), step):
        part = rows[start : start + step]
        frames = _gather(file, offsets[part], 8).view("<u4")[:, 1]
        is_complete = (frames & MAX_PAYLOAD) >= HEADER_BYTES + 4 * width
        labels[part[is_complete]] = _gather(file, offsets[part[is_complete]] + 8 + HEADER_BYTES, 4 * width).view("<f4")
        for row in part[~is_complete]:
            labels[row] = unpack(read_payload(file, int(offsets[row]))).labels
    return labels
