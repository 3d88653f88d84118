"""Where the records of a file begin, and the columns of their headers, as numpy arrays.

Offsets come from the ``.idx`` or, without one, from jumping along the frames; headers are gathered a block at a time.
No Python object is made per record, so 1.28 million of them take tens of megabytes.
"""

from __future__ import annotations

import struct
from array import array
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from steadytrain.errors import DataError
from steadytrain.records.recordio import HEADER_BYTES, MAGIC, MAX_PAYLOAD, read_payload, unpack

Offsets = NDArray[np.int64]

_FRAME = struct.Struct("<II")
_BLOCK = 16384  # records gathered at a time: a few megabytes


def read_index(path: Path) -> Offsets:
    """Byte offsets of an ``.idx``, rising; its keys are not used.

    Raises:
        DataError: a line is not ``key TAB offset``.
    """
    try:
        offsets = np.loadtxt(path, dtype=np.int64, delimiter="\t", usecols=1, comments=None, ndmin=1)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise DataError(f"{path} is no index ({error}): delete it, the records are then found without it") from error
    offsets.sort()
    return offsets


def scan(file: memoryview) -> Offsets:
    """Find every record by jumping from frame to frame.

    Raises:
        DataError: the file is damaged or cut short; says at which byte, and where the next whole record begins.
    """
    offsets = array("q")
    size, at, within = len(file), 0, False
    unpack_from, magic_here, mask = _FRAME.unpack_from, MAGIC, MAX_PAYLOAD
    while at + 8 <= size:
        magic, word = unpack_from(file, at)
        cflag, length = word >> 29, word & mask
        if magic != magic_here or (cflag in (2, 3)) is not within or cflag > 3:
            raise DataError(f"damaged at byte {at:,}{_next_whole(file, at + 4)}")
        if not within:
            offsets.append(at)
        within = cflag in (1, 2)
        at += 8 + (length + 3 & ~3)
    if at != size or within:
        raise DataError(f"cut short: its last record needs more than the {size:,} bytes that are there")
    return np.frombuffer(offsets, dtype=np.int64) if offsets else np.empty(0, np.int64)


def resynchronise(file: memoryview, start: int) -> int | None:
    """The first byte at or after ``start`` where a record begins, or None: how to go on after damage.

    An aligned magic followed by the cflag of a beginning can be nothing else: payloads never hold it.
    """
    start += -start % 4
    words = np.frombuffer(file[: len(file) // 4 * 4], dtype="<u4")
    for at in range(start // 4, len(words) - 1, 1 << 20):
        block = words[at : at + (1 << 20) + 1]
        found = np.flatnonzero((block[:-1] == MAGIC) & (block[1:] >> 29 <= 1))
        if found.size:
            return int(found[0] + at) * 4
    return None


def _next_whole(file: memoryview, start: int) -> str:
    at = resynchronise(file, start)
    return "" if at is None else f" (the next whole record begins at byte {at:,})"


@dataclass(frozen=True)
class Columns:
    """The headers of N records: ``ids`` int64[N], and ``labels`` float32[N, L]."""

    ids: NDArray[np.int64]
    labels: NDArray[np.float32]


def read_columns(file: memoryview, offsets: Offsets) -> Columns:
    """Ids and labels of the records at ``offsets``.

    Raises:
        DataError: an offset begins no record, a record is too short, or records differ in how many labels they have.
    """
    ids = np.empty(len(offsets), np.int64)
    flags = np.empty(len(offsets), np.int64)
    labels = np.empty((len(offsets), 1), np.float32)
    for start in range(0, len(offsets), _BLOCK):
        part = slice(start, start + _BLOCK)
        heads = _gather(file, offsets[part], 8 + HEADER_BYTES)
        words = heads.view("<u4")
        _require_records(words, offsets[part])
        flags[part], ids[part] = words[:, 2], heads[:, 16:24].copy().view("<u8")[:, 0].astype(np.int64)
        labels[part] = heads.view("<f4")[:, 3:4]
        # A magic inside the header itself cuts it in parts: rare enough to be read one by one.
        for row in np.flatnonzero((words[:, 1] & MAX_PAYLOAD < HEADER_BYTES) & (words[:, 1] >> 29 == 1)):
            record = unpack(read_payload(file, int(offsets[start + row])))
            ids[start + row], labels[start + row] = record.id, record.labels[0]
            flags[start + row] = len(record.labels) if len(record.labels) > 1 else 0
    widths = np.unique(np.maximum(flags, 1))
    if len(widths) > 1:
        raise DataError(f"its records hold {widths[0]} to {widths[-1]} labels: only equally many can be used")
    vectors = flags.astype(bool)
    if vectors.any():
        labels = _vectors(file, offsets, vectors, labels, int(widths[0]))
    return Columns(ids, labels)


def _gather(file: memoryview, offsets: Offsets, width: int) -> NDArray[np.uint8]:
    """uint8[n, width] from each offset on."""
    if offsets.size and (offsets.min() < 0 or offsets.max() + width > len(file)):
        raise DataError(f"an offset lies beyond the end of the file ({len(file):,} bytes)")
    data = np.frombuffer(file, dtype=np.uint8)
    gathered: NDArray[np.uint8] = data[offsets[:, None] + np.arange(width)]
    return gathered


def _require_records(words: NDArray[np.uint32], offsets: Offsets) -> None:
    wrong = (words[:, 0] != MAGIC) | (words[:, 1] >> 29 > 1)
    short = (words[:, 1] >> 29 == 0) & (words[:, 1] & MAX_PAYLOAD < HEADER_BYTES)
    if wrong.any():
        raise DataError(f"no record begins at byte {offsets[wrong][0]:,}")
    if short.any():
        raise DataError(f"the record at byte {offsets[short][0]:,} is too short for an image header: not image records")


def _vectors(
    file: memoryview, offsets: Offsets, vectors: NDArray[np.bool_], single: NDArray[np.float32], width: int
) -> NDArray[np.float32]:
    """Labels that follow the header, float32[N, width]; records with none keep the one in the header."""
    labels = np.repeat(single, width, axis=1)
    rows = np.flatnonzero(vectors)
    for start in range(0, len(rows), _BLOCK):
        part = rows[start : start + _BLOCK]
        frames = _gather(file, offsets[part], 8).view("<u4")[:, 1]
        whole = (frames & MAX_PAYLOAD) >= HEADER_BYTES + 4 * width
        labels[part[whole]] = _gather(file, offsets[part[whole]] + 8 + HEADER_BYTES, 4 * width).view("<f4")
        for row in part[~whole]:
            labels[row] = unpack(read_payload(file, int(offsets[row]))).labels
    return labels
