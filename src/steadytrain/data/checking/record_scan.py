"""Read a record file that may be damaged once: its frames and headers here, its images in child processes."""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from steadytrain.data.checking.findings import Findings
from steadytrain.data.checking.images import ImageTally
from steadytrain.data.images.file_types import LOOK_AT
from steadytrain.data.images.look import Look, look_at, look_in_children
from steadytrain.data.recordio.damaged import ByteSource, Gap, Record, whole_records
from steadytrain.data.recordio.framing import HEADER_BYTES, read_payload, unpack
from steadytrain.data.recordio.lst import RecordList
from steadytrain.errors import DataError
from steadytrain.format import OnProgress

Bounds = tuple[int, int]
"""Bytes of a file where a record begins and ends."""

_ROW = np.dtype(
    [
        *(("start", "<i8"), ("end", "<i8"), ("id", "<u8"), ("width", "<i8"), ("label", "<f4")),
        *(("is_finite", "?"), ("is_binary", "?"), ("is_bare", "?")),
    ]
)
_PACKED_ROW = struct.Struct("<qqQqf???")
_HEADER = struct.Struct("<IfQQ")
_PORTION_RECORDS = 32
_PORTION_BYTES = 2 << 20
_BYTES_FOR_A_WORKER = 1 << 19


@dataclass(frozen=True)
class RecordScan:
    """The results of one pass over a record file.

    Args:
        start: its first bytes.
        digest: its sha256.
        headers: a row for each whole record: where it starts and ends, its id, ``width`` (how many labels; 0 where
            there is no header, or none that can be believed), the first label; whether all labels are numbers, are 0
            or 1, and are without a picture, as in sets of faces.
        gaps: int64[G, 2], bytes that belong to no record.
        sound: bool[N], records with a header, and with an image that can be decoded if that was tried.
        listed: the list beside it, by which records are named; None where there is none, or that of another file.
    """

    size: int
    start: bytes
    digest: str
    headers: NDArray[np.void]
    gaps: NDArray[np.int64]
    sound: NDArray[np.bool_]
    images: ImageTally
    listed: RecordList | None = None

    @property
    def readable(self) -> NDArray[np.bool_]:
        """bool[N]: there is a header, and room for the labels that it announces."""
        readable: NDArray[np.bool_] = self.headers["width"] > 0
        return readable

    def name(self, row: int) -> str:
        """Return the file that a record was made of; empty where that is not known."""
        header = self.headers[row]
        if self.listed is None or not header["width"]:
            return ""
        return self.listed.name(int(header["id"]), [float(header["label"])])

    def words(self, row: int) -> str:
        """Name a record of this file in words."""
        name = self.name(row)
        return f"record {row:,}{f' ({name})' if name else ''}"

    def place(self, row: int) -> dict[str, Any]:
        """Return where a record lies, for a finding."""
        header = self.headers[row]
        return {"offset": int(header["start"]), "record": row, "id": int(header["id"])}

    def span(self, row: int) -> Bounds:
        """Return where a record begins and ends."""
        return int(self.headers["start"][row]), int(self.headers["end"][row])


def scan_records(
    path: Path,
    findings: Findings,
    *,
    decode: bool = True,
    near: bool = False,
    workers: int = 1,
    progress: OnProgress = lambda done, total: None,
) -> RecordScan:
    """Read a record file from front to back.

    Args:
        decode: look at the images, too; else at frames and headers only.
        near: make perceptual hashes of them.
        workers: processes for what is beyond headers; 0: here, where a decoder's crash is a crash.
        progress: called with the bytes done so far, and all there are.

    Raises:
        DataError: there is no such file.
        FailedError: the disk fails, or no process can be started.
    """
    images = ImageTally(findings)
    with ByteSource(path, digested=True) as source:
        walk = _Walk(source, findings)
        if decode:
            look = partial(look_at_records, path=str(path), near=near)
            workers = min(workers, 1 + source.size // _BYTES_FOR_A_WORKER)
            for looks in look_in_children(walk.portions(), look, workers=workers):
                for item in looks:
                    number = walk.sent.popleft()
                    start, end, id_, *_ = _PACKED_ROW.unpack_from(walk.rows, number * _ROW.itemsize)
                    walk.sound[number] = not item.fault
                    images.add(item, number, offset=start, record=number, id=id_)
                progress(end, source.size)
        else:
            for portion in walk.portions():
                progress(portion[-1][1], source.size)
        images.add_depth()
        digest = source.digest()
        if source.has_changed():
            findings.add("changing", name=path.name)
        return RecordScan(
            size=source.size,
            start=source.read(0, LOOK_AT),
            digest=digest,
            headers=np.frombuffer(bytes(walk.rows), _ROW),
            gaps=np.array(walk.gaps, np.int64).reshape(-1, 2),
            sound=np.frombuffer(bytes(walk.sound), np.bool_),
            images=images,
        )


class _Walk:
    """One pass over a file: what was read of it so far, in bytes, as a file may have a million records.

    ``rows`` are headers of whole records (:data:`_ROW`), ``sound`` a byte for each, ``sent`` the numbers of those whose
    images are looked at just now.
    """

    def __init__(self, source: ByteSource, findings: Findings) -> None:
        self.source = source
        self.findings = findings
        self.rows, self.sound = bytearray(), bytearray()
        self.gaps: list[Bounds] = []
        self.sent: deque[int] = deque()

    def portions(self) -> Iterator[list[Bounds]]:
        """Yield records with images to look at, a few megabytes at a time."""
        portion: list[Bounds] = []
        for step in whole_records(self.source):
            if isinstance(step, Gap):
                self.gaps.append((step.start, step.end))
                size = step.end - step.start
                kind, text = "damaged-frame", f"{size:,} byte{'s' * (size > 1)}, up to byte {step.end:,}"
                if step.needed:
                    kind, text = "cut-short", f"needs {step.needed:,} bytes, {size:,} are there"
                self.findings.add(kind, text, offset=step.start, id=step.id)
            elif self._take(step):
                portion.append((step.start, step.end))
                if len(portion) == _PORTION_RECORDS or step.end - portion[0][0] >= _PORTION_BYTES:
                    yield portion
                    portion = []
        if portion:
            yield portion

    def _take(self, record: Record) -> bool:
        """Take in the header of a whole record, with what is wrong with it; return whether it has an image."""
        number, head = len(self.sound), record.head
        if record.cflag and record.length >= HEADER_BYTES:  # a magic inside the header itself cuts that in parts
            head = payload_in(self.source, (record.start, record.end))
        flag, label, id_, _ = _HEADER.unpack_from(head)
        room, labels, width = record.length - HEADER_BYTES - 4 * flag, np.array([label], np.float32), max(flag, 1)
        if room < 0:
            width = 0
        elif flag:
            data = head if record.cflag else self.source.read(record.start + 8, HEADER_BYTES + 4 * flag)
            labels = np.frombuffer(data, "<f4", count=flag, offset=HEADER_BYTES)
        is_finite, is_bare = bool(np.isfinite(labels).all()), flag > 0 and room == 0
        fault: tuple[str, str] | None = None
        if record.length < HEADER_BYTES:
            fault = "no-header", f"{record.length} of {HEADER_BYTES} bytes"
        elif room < 0:
            fault = "no-header", f"{flag:,} labels, with room for {(record.length - HEADER_BYTES) // 4:,}"
        elif is_bare:
            fault = "no-picture", f"{flag:,} labels"
        elif not is_finite:
            fault = "label-not-class", f"label {label}" if width == 1 else "not a number, in a vector"
        if fault is not None:
            known_id = id_ if record.length >= HEADER_BYTES else None
            self.findings.add(*fault, offset=record.start, record=number, id=known_id)
        is_binary = bool(((labels == 0) | (labels == 1)).all())
        has_image = width > 0 and not is_bare
        self.rows += _PACKED_ROW.pack(
            record.start, record.end, id_, width, float(labels[0]), is_finite, is_binary, is_bare
        )
        self.sound.append(has_image)
        if has_image:
            self.sent.append(number)
        return has_image


def look_at_records(spans: Sequence[Bounds], path: str, *, near: bool) -> list[Look]:
    """Look at the images of some records."""
    looks = []
    with ByteSource(Path(path)) as source:
        for span in spans:
            try:
                image = image_in(source, span)
            except DataError:
                looks.append(Look("damaged-image", "the file is changing while it is read"))
                continue
            look = look_at(image, near=near)
            odd = tuple(("lies-on-its-side" if kind == "orientation" else kind, text) for kind, text in look.odd)
            looks.append(look._replace(odd=odd))
    return looks


def payload_in(source: ByteSource, span: Bounds) -> bytes:
    """The payload of a record. Raises DataError where the file has changed since its frames were read."""
    try:
        return bytes(read_payload(memoryview(source.read(span[0], span[1] - span[0])), 0))
    except DataError as error:
        raise DataError(f"{source.path} is changing while it is read ({error}): wait until it is written") from error


def image_in(source: ByteSource, span: Bounds) -> bytes:
    """The encoded image of a record; raises as :func:`payload_in`."""
    return bytes(unpack(payload_in(source, span)).image)
