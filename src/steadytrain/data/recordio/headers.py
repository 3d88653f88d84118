"""The headers of records that may be damaged: what can be read of each, and what is wrong with it."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from steadytrain.data.checking.findings import Findings
from steadytrain.data.recordio.frames import ByteSource, Whole, payload_of
from steadytrain.data.recordio.framing import HEADER_BYTES, MAX_PAYLOAD

_HEADER = struct.Struct("<IfQQ")


@dataclass(frozen=True)
class Headers:
    """Of N records.

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
        """bool[N]: there is a header, and room for the labels that it tells of."""
        return self.widths > 0

    @staticmethod
    def joined(parts: Sequence[Headers]) -> Headers:
        """Those of several stretches of a file, in order."""
        columns = ("offsets", "ends", "ids", "widths", "labels", "finite", "detection")
        kinds = ("i8", "i8", "u8", "i8", "f4", "?", "?")
        return Headers(
            *(
                np.concatenate([np.empty(0, kind), *(getattr(part, name) for part in parts)])
                for name, kind in zip(columns, kinds, strict=True)
            )
        )


def read_headers(source: ByteSource, records: Whole, first: int, found: Findings) -> Headers:
    """Read the headers of whole records, and add what is wrong with each to ``found``.

    Args:
        source: the file.
        records: some of its records.
        first: number of the first of them.
        found: takes the findings.
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
    _tell(headers, records, flags, first, found)
    return headers


def is_detection(labels: NDArray[np.float32]) -> bool:
    """Whether a label vector tells of objects and boxes, as MXNet's detection records do.

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
    return payload_of(source.read(start, end - start))


def _tell(headers: Headers, records: Whole, flags: NDArray[np.int64], first: int, found: Findings) -> None:
    def add(kind: str, row: int, detail: str) -> None:
        known = records.lengths[row] >= HEADER_BYTES
        id_ = int(headers.ids[row]) if known else None
        found.add(kind, detail, offset=int(headers.offsets[row]), record=first + row, id=id_)

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
