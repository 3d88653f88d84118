"""Examine a record file that may be damaged: what is wrong with it, at which byte, and what can still be read.

>>> import tempfile
>>> from steadytrain.data.recordio.framing import pack_header
>>> from steadytrain.data.recordio.writer import RecordWriter
>>> path = Path(tempfile.mkdtemp()) / "two.rec"
>>> with RecordWriter(path) as writer:
...     for number in range(2):
...         writer.write(pack_header(number, id=number) + b"<html>404", key=number)
>>> findings = examine_records(path, workers=0).report.findings
>>> [finding.detail for finding in findings.of("not-images")]
['none of 2 records holds an image (the first: an HTML page)']
"""

from __future__ import annotations

import math
import struct
import time
from array import array
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from steadytrain.data.checking.findings import Findings, Report, remedies_for_records
from steadytrain.data.checking.images import ImageTally, alike, check_classes, shared
from steadytrain.data.filenames import is_shard
from steadytrain.data.images.file_types import LOOK_AT, recognise
from steadytrain.data.images.look import Look, duplicates, look_at, look_in_children
from steadytrain.data.recordio.card import Card, card_of, card_path, digest_of_spots
from steadytrain.data.recordio.damaged import ByteSource, Gap, Record, whole_records
from steadytrain.data.recordio.framing import HEADER_BYTES, index_path, read_payload, unpack
from steadytrain.data.recordio.lst import RecordList, describe_record, list_path
from steadytrain.data.recordio.reader import (
    MOST_CLASSES,
    names_identities,
    nearest_whole,
    none_is_an_image,
    why_no_image,
)
from steadytrain.errors import DataError
from steadytrain.files import open_text, read_text
from steadytrain.format import OnProgress, printable, whole_number

Bounds = tuple[int, int]  # where a record begins and ends

_HEADER = struct.Struct("<IfQQ")
_ROW = struct.Struct("<qqQqf????")
_COLUMNS = "<i8, <i8, <u8, <i8, <f4, ?, ?, ?, ?"
_PORTION_RECORDS = 32
_PORTION_BYTES = 2 << 20
_BYTES_FOR_A_WORKER = 1 << 19


@dataclass
class Index:
    """The keys and the offsets, int64, of an ``.idx``, in the order of its lines; ``wrong`` says why it is none."""

    keys: list[str] = field(default_factory=list)
    offsets: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    wrong: str = ""

    def key_of(self) -> dict[int, int]:
        """The keys that are whole numbers, by offset."""
        pairs = zip(self.keys, self.offsets.tolist(), strict=True)
        return {offset: number for key, offset in pairs if (number := whole_number(key, 2**64)) is not None}


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
        binary: bool[N], several labels, each 0 or 1.
        bare: bool[N], labels and no picture, as in sets of faces; readers skip them.
    """

    offsets: NDArray[np.int64]
    ends: NDArray[np.int64]
    ids: NDArray[np.uint64]
    widths: NDArray[np.int64]
    labels: NDArray[np.float32]
    finite: NDArray[np.bool_]
    detection: NDArray[np.bool_]
    binary: NDArray[np.bool_]
    bare: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.offsets)

    @property
    def readable(self) -> NDArray[np.bool_]:
        """bool[N]: there is a header, and room for the labels that it announces."""
        return self.widths > 0


@dataclass(frozen=True)
class RecordScan:
    """The results of one pass over a record file.

    Args:
        size: of the file, in bytes.
        start: its first bytes.
        digest: its sha256.
        spots: that of a few blocks of it; see :func:`~steadytrain.data.recordio.card.digest_of_spots`.
        headers: of its whole records.
        gaps: int64[G, 2], bytes that belong to no record.
        sound: bool[N], records with a header, and with an image that can be decoded if that was tried.
        images: what was seen of its images.
        listed: the list beside it, by which records are named; None where there is none, or that of another file.
    """

    size: int
    start: bytes
    digest: str
    spots: str
    headers: Headers
    gaps: NDArray[np.int64]
    sound: NDArray[np.bool_]
    images: ImageTally
    listed: RecordList | None = None

    def name(self, row: int) -> str:
        """Return the file that a record was made of; empty where that is not known."""
        if self.listed is None or not self.headers.readable[row]:
            return ""
        return self.listed.name(int(self.headers.ids[row]), [float(self.headers.labels[row])])

    def words(self, row: int) -> str:
        """Name a record of this file in words."""
        name = self.name(row)
        return f"record {row:,}{f' ({name})' if name else ''}"

    def add(self, findings: Findings, kind: str, row: int, detail: str = "") -> None:
        """Add a finding about a record."""
        offset, id_ = int(self.headers.offsets[row]), int(self.headers.ids[row])
        findings.add(kind, detail, offset=offset, record=row, id=id_)


@dataclass(frozen=True)
class Examined:
    """A record file as it was found.

    Args:
        sound: bool[N], records that can be used: framed, labelled and (where that was tried) decoded without a fault.
        classes: by the card, or the numbers; empty where labels are none.
        index, card: what lies beside it, fitting or not.
    """

    path: Path
    report: Report
    scan: RecordScan
    sound: NDArray[np.bool_]
    classes: tuple[str, ...] = ()
    index: Index | None = None
    card: Card | None = None

    @property
    def headers(self) -> Headers:
        return self.scan.headers

    def describe(self, row: int) -> str:
        """Name a record in a message."""
        return describe_record(row, self.path.name, self.scan.name(row))

    @property
    def has_good_index(self) -> bool:
        """Return whether readers can go by its index."""
        return not any(kind.startswith("index-") and kind != "index-keys" for kind in self.report.findings.counts)


def examine_records(
    path: Path,
    *,
    others: Sequence[Path] = (),
    before: Sequence[Examined] = (),
    decode: bool = True,
    near: bool = False,
    workers: int = 1,
    most: int | None = None,
    progress: OnProgress | None = None,
) -> Examined:
    """Examine a record file.

    Args:
        others: record files of other splits: images that are in them as well are found.
        before: files of the same split that were examined already: images that are in them, too, are duplicates.
        decode: look at the images, too; else at framing and headers only.
        near: find also images that look alike: encoded again, scaled or mirrored.
        workers: processes to decode with; 0 decodes here, where a decoder's crash is a crash.
        most: findings to keep of each kind; None: all.
        progress: called with the bytes done so far, and all there are (of all files).

    Raises:
        DataError: there is no such file.
        FailedError: the disk fails, or no process can be started.
    """
    began = time.monotonic()
    findings = Findings(most)
    total = sum(file.stat().st_size for file in (path, *others) if file.is_file())
    done = 0

    def advance(part: int, _: int) -> None:
        if progress is not None:
            progress(done + part, total)

    scan = scan_records(path, findings, decode=decode, near=near, workers=workers, progress=advance)
    if not len(scan.headers):
        return _no_records(path, scan, findings, began)
    card = _find_card(path, findings)
    scan = replace(scan, listed=_find_list(path, scan, findings))
    labels = _check_labels(path, scan, card, findings)
    if card is not None:
        _check_card(card, scan, findings, name=card_path(path).name)
    index = _find_index(index_path(path))
    facts = _check_index(index, scan, findings, name=index_path(path).name)
    if decode:
        _find_duplicates(scan, labels, findings)
        for file in before:
            _find_duplicates_in(scan, labels, file, findings)
    else:
        facts.append("the images themselves were not checked")
    for other in others if decode else ():
        done += scan.size if not done else 0
        theirs = scan_records(other, Findings(0), near=near, workers=workers, progress=advance)
        theirs = replace(theirs, listed=_find_list(other, theirs, Findings(0)))
        facts.append(_find_leaks(scan, theirs, other, findings))
        done += theirs.size
    findings.name_records(scan.name)
    sound = labels.fits & scan.sound
    num_sound = int(sound.sum())
    report = Report(
        path=str(path),
        what=labels.what,
        findings=findings,
        num_images=len(scan.headers),
        num_sound=num_sound,
        bytes=scan.size,
        classes=labels.classes,
        formats=dict(sorted(scan.images.formats.items())),
        width=scan.images.width,
        height=scan.images.height,
        facts=tuple(facts),
        remedies=remedies_for_records(path, findings, num_sound=num_sound),
        seconds=time.monotonic() - began,
    )
    return Examined(path, report, scan, sound, tuple(labels.classes), index, card)


def _no_records(path: Path, scan: RecordScan, findings: Findings, began: float) -> Examined:
    """The outcome where not one whole record is there."""
    file_type = recognise(scan.start, scan.size)
    remedies = (("fetch or copy it again", "not one whole record is there"),)
    if file_type is not None:
        findings = Findings(findings.most)  # in a file of another kind no byte is out of place
        findings.add("other-file", file_type.name, name=path.name)
        remedies = ((file_type.advice, ""),)
    report = Report(
        path=str(path),
        what=file_type.name if file_type else "a file without one whole record",
        findings=findings,
        bytes=scan.size,
        remedies=remedies,
        seconds=time.monotonic() - began,
    )
    return Examined(path, report, scan, scan.sound)


def scan_records(
    path: Path,
    findings: Findings,
    *,
    decode: bool = True,
    near: bool = False,
    workers: int = 1,
    progress: OnProgress | None = None,
) -> RecordScan:
    """Read a record file from front to back: frames and headers here, images in child processes.

    Args:
        findings: takes what is wrong with frames, headers and images.
        decode: look at the images, too; else at frames and headers only.
        near: make perceptual hashes of them.
        workers: processes for what is beyond headers; 0: here, where a decoder's crash is a crash.
        progress: called with the bytes done so far, and all there are.

    Raises:
        DataError: there is no such file.
        FailedError: the disk fails, or no process can be started.
    """
    images = ImageTally(findings)
    headers = bytearray()  # of whole records
    gaps: list[Bounds] = []
    sound = bytearray()
    sent: deque[tuple[int, int, int, int]] = deque()  # number, start, end and id of records that are looked at
    with ByteSource(path, digested=True) as source:

        def portions() -> Iterator[list[Bounds]]:
            """Records to look at, a few megabytes at a time; gaps and headers are dealt with on the way."""
            portion: list[Bounds] = []
            for step in whole_records(source):
                if isinstance(step, Gap):
                    gaps.append((step.start, step.end))
                    findings.add(step.kind, step.detail, offset=step.start, id=step.id)
                    continue
                number = len(sound)
                header = _read_header(source, step, number, findings)
                headers.extend(_ROW.pack(step.start, step.end, *header))
                has_image = header.width > 0 and not header.is_bare
                sound.append(has_image)
                if has_image:
                    portion.append((step.start, step.end))
                    sent.append((number, step.start, step.end, header.id))
                    if len(portion) == _PORTION_RECORDS or step.end - portion[0][0] >= _PORTION_BYTES:
                        yield portion
                        portion = []
            if portion:
                yield portion

        advance = progress or (lambda done, total: None)
        if not decode:
            for portion in portions():
                advance(portion[-1][1], source.size)
        else:
            look = partial(look_at_records, path=str(path), near=near)
            workers = min(workers, 1 + source.size // _BYTES_FOR_A_WORKER)
            for looks in look_in_children(portions(), look, workers=workers):
                for item in looks:
                    number, start, end, id_ = sent.popleft()
                    sound[number] = not item.fault
                    images.add(item, number, offset=start, record=number, id=id_)
                advance(end, source.size)
        images.add_depth()
        table = np.frombuffer(headers, _COLUMNS)
        digest = source.digest()
        if source.has_changed():
            findings.add("changing", name=path.name)
        return RecordScan(
            size=source.size,
            start=source.read(0, LOOK_AT),
            digest=digest,
            spots=digest_of_spots(lambda start, end: source.read(start, end - start), source.size),
            headers=Headers(*(np.array(table[name]) for name in table.dtype.names or ())),
            gaps=np.array(gaps, np.int64).reshape(-1, 2),
            sound=np.frombuffer(bytes(sound), np.bool_),
            images=images,
        )


class _Header(NamedTuple):
    """A row of :class:`Headers`."""

    id: int
    width: int
    label: float
    is_finite: bool
    is_detection: bool
    is_binary: bool
    is_bare: bool


def _read_header(source: ByteSource, record: Record, number: int, findings: Findings) -> _Header:
    """Read the header of a whole record, and add what is wrong with it."""
    head = record.head
    if record.cflag and record.length >= HEADER_BYTES:  # a magic inside the header itself cuts that in parts
        head = payload_in(source, (record.start, record.end))
    flag, label, id_, _ = _HEADER.unpack_from(head)
    is_finite, objects, binary, width = math.isfinite(label), False, False, max(flag, 1)

    def add(kind: str, detail: str = "") -> None:
        known = id_ if record.length >= HEADER_BYTES else None
        findings.add(kind, detail, offset=record.start, record=number, id=known)

    if record.is_dirty:
        add("padding")
    if record.length < HEADER_BYTES:
        width = 0
        add("no-header", f"{record.length} of {HEADER_BYTES} bytes" if record.length else "an empty record")
    elif HEADER_BYTES + 4 * flag > record.length:
        width = 0
        add("label-overrun", f"{flag:,} labels, with room for {(record.length - HEADER_BYTES) // 4:,}")
    elif flag:
        start = record.start + 8
        data = head if record.cflag else source.read(start, HEADER_BYTES + 4 * flag)
        vector = np.frombuffer(data, "<f4", count=flag, offset=HEADER_BYTES)
        label, is_finite, objects = float(vector[0]), bool(np.isfinite(vector).all()), is_detection(vector)
        binary = bool(((vector == 0) | (vector == 1)).all())
    if is_bare := width > 0 and flag > 0 and record.length == HEADER_BYTES + 4 * flag:
        add("no-picture", f"{flag:,} labels")
    elif width and not is_finite:
        add("label-not-finite", f"label {label}" if width == 1 else "in a vector")
    return _Header(id_, width, label, is_finite, objects, binary, is_bare)


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


@dataclass(frozen=True)
class _Labels:
    """The labels of a file, by kind: "image records", "detection records", ..."""

    what: str
    fits: NDArray[np.bool_]  # records whose labels go with those of the others
    classes: dict[str, int] = field(default_factory=dict)  # images of each; empty where labels are no classes


def _class_name(names: Sequence[str], label: float) -> str:
    """The class of a label; the number itself where it is none."""
    return names[int(label)] if label.is_integer() and 0 <= label < len(names) else f"{label:g}"


def _check_labels(path: Path, scan: RecordScan, card: Card | None, findings: Findings) -> _Labels:
    """Return what the labels are, and add what does not go with that; nothing where no record holds an image."""
    headers = scan.headers
    bad = sum(findings.counts[kind] for kind in ("no-header", "label-overrun", "no-image", "no-picture"))
    if bad >= len(headers):
        with ByteSource(path) as source:
            payload = payload_in(source, (int(headers.offsets[0]), int(headers.ends[0])))
        detail = next((finding.detail for finding in findings.of("no-image")), "")  # has looked at all of it
        findings.drop("no-image", "no-picture", "no-header", "label-overrun")
        findings.add("not-images", none_is_an_image(len(headers), detail or why_no_image(payload)))
        return _Labels("records that are no image records", np.zeros(len(headers), np.bool_))
    _check_ids(scan, findings)
    readable = headers.readable & ~headers.bare
    n = int(readable.sum())
    if 2 * int(headers.detection.sum()) > n:
        widths = headers.widths[headers.detection]
        between = f"{widths.min()} to {widths.max()}" if widths.min() < widths.max() else f"{widths.min()}"
        findings.add("detection", f"{len(widths):,} of {len(headers):,} records, {between} labels each")
        return _Labels("detection records", readable)
    widths, counts = np.unique(headers.widths[readable], return_counts=True)
    width = int(widths[counts.argmax()]) if n else 1
    if _is_of_faces(path, scan):  # the first label is the class, whatever the others are
        width, headers = 1, replace(headers, widths=np.minimum(headers.widths, 1))
    fits = readable & (headers.widths == width)
    for row in np.flatnonzero(readable & ~fits).tolist():
        scan.add(findings, "label-width", row, f"{headers.widths[row]}; most have {width}")
    fits &= headers.finite
    if width > 1:
        if not (others := np.flatnonzero(fits & ~headers.binary)).size:
            return _Labels(f"records with several of {width:,} labels each", fits)
        findings.add("label-vectors", f"{width} labels for each image, not all 0 or 1 in {len(others):,} records")
        return _Labels("records with label vectors", fits)
    whole = nearest_whole(headers.labels)
    wrong = fits & ~((headers.labels >= 0) & (whole == np.floor(whole)))
    if 2 * int(wrong.sum()) > n:
        low, high = headers.labels[fits].min(), headers.labels[fits].max()
        findings.add("label-vectors", f"one number for each image, from {low!s} to {high!s}")
        return _Labels("records with a number each", fits)
    for row in np.flatnonzero(wrong).tolist():
        scan.add(findings, "label-not-class", row, f"label {headers.labels[row]!s}")
    fits &= ~wrong
    labels = whole.astype(np.float64)
    limit = len(card.classes) if card and card.classes else MOST_CLASSES
    for row in np.flatnonzero(fits & (labels >= limit)).tolist():
        text = f"the card lists {limit:,}" if limit < MOST_CLASSES else f"{limit:,} are the most"
        scan.add(findings, "label-unknown", row, f"label {labels[row]:.0f}; {text}")
    fits &= labels < limit
    sizes = np.bincount(labels[fits].astype(np.int64)).tolist()
    names = list(card.classes) if card and card.classes else [str(number) for number in range(len(sizes))]
    sizes += [0] * (len(names) - len(sizes))
    check_classes(names, sizes, findings, required=False)
    if not is_shard(path.name):
        for number, (name, size) in enumerate(zip(names, sizes, strict=True)):
            if size == 0:
                findings.add("unused-class", f"label {number}", name=name)
    return _Labels("image records", fits, dict(zip(names, sizes, strict=True)))


def _is_of_faces(path: Path, scan: RecordScan) -> bool:
    """Return whether a file is laid out as InsightFace's sets of faces; see ``recordio.reader``."""
    headers = scan.headers
    if not headers.bare[0]:
        return False
    with ByteSource(path) as source:
        return names_identities(unpack(payload_in(source, (int(headers.offsets[0]), int(headers.ends[0])))))


def _check_ids(scan: RecordScan, findings: Findings) -> None:
    rows = np.flatnonzero(scan.headers.readable)
    ids, firsts, inverse = np.unique(scan.headers.ids[rows], return_index=True, return_inverse=True)
    if len(ids) == 1 < len(rows):
        findings.add("same-id", f"all {len(rows):,} records have id {ids[0]}")
        return
    for place in np.flatnonzero(firsts[inverse] != np.arange(len(rows))).tolist():
        scan.add(findings, "same-id", int(rows[place]), f"as record {rows[firsts[inverse[place]]]:,}")


def _find_duplicates(scan: RecordScan, labels: _Labels, findings: Findings) -> None:
    """Add images that are in the file more than once, and those that look alike."""
    names = tuple(labels.classes)
    for row, like, is_mirrored in alike(scan.images.prints, scan.images.hashes):
        differs = labels.classes and scan.headers.labels[row] != scan.headers.labels[like]
        text = f"like {scan.words(like)}{', mirrored' * is_mirrored}{', under another label' if differs else ''}"
        scan.add(findings, "near-conflict" if differs else "near-duplicate", row, text)
    for first, *later in duplicates(scan.images.prints):
        for row in later:
            scan.add(findings, "duplicate", row, f"as {scan.words(first)}")
        by_label = {float(scan.headers.labels[row]): row for row in reversed([first, *later])}
        if labels.classes and len(by_label) > 1:
            pairs = sorted(by_label.items(), key=lambda pair: pair[1])
            listed = ", ".join(f"{scan.words(row)} {_class_name(names, label)}" for label, row in pairs[:4])
            scan.add(findings, "conflicting-labels", first, listed + ", ..." * (len(pairs) > 4))


def _find_duplicates_in(scan: RecordScan, labels: _Labels, before: Examined, findings: Findings) -> None:
    """Add images that are in another file of the same split as well, and those that look alike."""
    theirs_too = before.scan.images
    for row, like, is_mirrored in alike(scan.images.prints, scan.images.hashes, theirs_too.prints, theirs_too.hashes):
        text = f"like {before.describe(like)}{', mirrored' * is_mirrored}"
        scan.add(findings, "near-duplicate", row, text)
    pairs = dict(reversed(shared(scan.images.prints, before.scan.images.prints)))  # of several there, the first
    for row, number in sorted(pairs.items()):
        ours = _class_name(tuple(labels.classes), float(scan.headers.labels[row]))
        theirs = _class_name(before.classes, float(before.headers.labels[number]))
        where = before.describe(number)
        if labels.classes and before.classes and ours != theirs:
            scan.add(findings, "conflicting-labels", row, f"{scan.words(row)} {ours}, {where} {theirs}")
        else:
            scan.add(findings, "duplicate", row, f"as {where}")


def _find_leaks(scan: RecordScan, theirs: RecordScan, other: Path, findings: Findings) -> str:
    """Add images that are in a file of another split as well; returns a remark."""
    if not len(theirs.headers):
        return f"{other.name} holds no whole record: there is nothing to compare with"
    near_pairs = alike(theirs.images.prints, theirs.images.hashes, scan.images.prints, scan.images.hashes)
    for number, row, is_mirrored in near_pairs:
        text = f"like {describe_record(number, other.name, theirs.name(number))}{', mirrored' * is_mirrored}"
        scan.add(findings, "near-leak", row, text)
    pairs = shared(scan.images.prints, theirs.images.prints)
    for row, number in pairs:
        differs = scan.headers.labels[row] != theirs.headers.labels[number]
        where = describe_record(number, other.name, theirs.name(number))
        text = f"{where}{', under another label' if differs else ''}"
        scan.add(findings, "leak", row, text)
    return f"{len(pairs):,} of the {len(theirs.headers):,} images of {other.name} are in it"


def _find_index(path: Path) -> Index | None:
    """Read an index; None where there is none."""
    index = Index()
    offsets = array("q")
    try:
        with open_text(path, errors="replace", newline="\n") as file:
            for number, line in enumerate(file, 1):
                key, tab, offset = line.rstrip("\r\n").rpartition("\t")
                if not line.strip():
                    continue
                place = whole_number(offset.strip())
                if not tab or place is None:
                    index.wrong = f"line {number}: {line.strip()[:60]!r}"
                    break
                index.keys.append(key)
                offsets.append(place)
    except FileNotFoundError:
        return None
    except OSError as error:
        index.wrong = (error.strerror or str(error)).lower()
    index.offsets = np.array(offsets, np.int64)
    return index


def _check_index(index: Index | None, scan: RecordScan, findings: Findings, *, name: str) -> list[str]:
    """Hold an index against the records of its file. Returns remarks."""
    if index is None or index.wrong or not len(index.offsets):
        kind = "index-missing" if index is None else "index-unreadable" if index.wrong else "index-empty"
        findings.add(kind, index.wrong if index else "", name=name)
        return []
    headers, offsets = scan.headers, index.offsets
    in_gap = np.zeros(len(offsets), np.bool_)  # what an index says of damaged places is no fault of its own
    if len(scan.gaps):
        at = np.searchsorted(scan.gaps[:, 0], offsets, side="right") - 1
        in_gap = (at >= 0) & (offsets < scan.gaps[np.maximum(at, 0), 1])
    wrong = np.flatnonzero(~np.isin(offsets, headers.offsets) & ~in_gap)
    if len(wrong) > len(offsets) // 2:
        text = f"{len(wrong):,} of its {len(offsets):,} entries begin no record: it is that of another file"
        findings.add("index-other", text, name=name)
        return []
    for row in wrong.tolist():
        findings.add("index-offset", f"key {index.keys[row]}", offset=int(offsets[row]))
    for row in np.flatnonzero(headers.readable & ~np.isin(headers.offsets, offsets)).tolist():
        scan.add(findings, "index-lacks", row)
    _, firsts = np.unique(offsets, return_index=True)
    for row in np.setdiff1d(np.arange(len(offsets)), firsts).tolist():
        text = f"key {index.keys[row]}: its offset appears before"
        findings.add("index-repeats", text, offset=int(offsets[row]))
    for key, times in Counter(index.keys).items():
        if times > 1:
            findings.add("index-repeats", f"key {key} appears {times} times")
    ids = dict(zip(headers.offsets.tolist(), headers.ids.tolist(), strict=True))
    pairs = zip(index.keys, offsets.tolist(), strict=True)
    other = [(key, ids[offset]) for key, offset in pairs if offset in ids and key != str(ids[offset])]
    if other:
        (key, id_), n = other[0], len(other)
        findings.add("index-keys", f"{n:,} of {len(index.keys):,}: key {key} for id {id_}, for one", name=name)
    lost = int(in_gap.sum())
    return [f"the index names {lost:,} record{'s' * (lost != 1)} in the damaged places"] if lost else []


def _find_list(records: Path, scan: RecordScan, findings: Findings) -> RecordList | None:
    """Hold the list beside a record file against its records; None where there is none, or it is of other records."""
    path = list_path(records)
    if not path.exists():
        return None
    try:
        listed = RecordList.read(path)
    except DataError as error:
        findings.add("list-unreadable", str(error).removeprefix(f"cannot read {path}: "), name=path.name)
        return None
    headers = scan.headers
    for number, text in listed.wrong.items():
        findings.add("list-line", f"line {number}: {text}", name=path.name)
    ids, firsts, times = np.unique(headers.ids[headers.readable], return_index=True, return_counts=True)
    rows = np.flatnonzero(headers.readable)[firsts[times == 1]]  # an id of several records says nothing of either
    lines = listed.rows_of(headers.ids[rows])
    if 2 * int((lines >= 0).sum()) < max(len(rows), 1):
        text = f"{int((lines >= 0).sum()):,} of {len(headers):,} records have an id that it lists: it is of others"
        findings.add("list-other", text, name=path.name)
        return None
    for row in rows[lines < 0].tolist():
        scan.add(findings, "list-lacks", row)
    for line in np.flatnonzero(~np.isin(listed.ids, ids.astype(np.int64))).tolist():
        findings.add("list-extra", f"index {listed.ids[line]}", name=printable(listed.names[line]))
    again = np.setdiff1d(np.arange(len(listed)), np.unique(listed.ids, return_index=True)[1])
    for line in again.tolist():
        findings.add("list-repeats", f"index {listed.ids[line]}", name=printable(listed.names[line]))
    rows, lines = rows[lines >= 0], lines[lines >= 0]
    differs = ~listed.agree(lines, headers.labels[rows, None])
    with ByteSource(records) as source:
        for place in np.flatnonzero(differs | (headers.widths[rows] > 1)).tolist():
            row, line = int(rows[place]), int(lines[place])
            span = int(headers.offsets[row]), int(headers.ends[row])
            stored = np.array([unpack(payload_in(source, span)).labels], np.float32)
            if not listed.agree(lines[place : place + 1], stored)[0]:
                theirs, ours = (
                    ", ".join(f"{label:g}" for label in part) for part in (listed.labels_of(line), stored[0])
                )
                scan.add(findings, "list-label", row, f"{printable(listed.names[line])}: {theirs} there, {ours} here")
    return listed


def _find_card(records: Path, findings: Findings) -> Card | None:
    """The card beside a record file, also where it does not fit."""
    path = card_path(records)
    try:
        card = card_of(records)
    except DataError as error:
        try:
            card = Card.from_json(read_text(path, most=None))
        except (DataError, OSError, UnicodeDecodeError):
            findings.add("card-unreadable", str(error).removeprefix(f"{path}: "), name=path.name)
            return None
        text = f"it states {card.bytes:,} bytes, the file has {records.stat().st_size:,}"
        findings.add("card-size", text, name=path.name)
        return card
    if card is None:
        findings.add("card-missing", name=path.name)
    return card


def _check_card(card: Card, scan: RecordScan, findings: Findings, *, name: str) -> None:
    """Hold a card against the records of its file."""
    headers = scan.headers
    if card.num_images != len(headers):
        text = f"it states {card.num_images:,} images, the file holds {len(headers):,}"
        findings.add("card-count", text, name=name)
        return
    if not findings.counts["card-size"]:
        if card.digest and card.digest != scan.digest:
            findings.add("card-digest", f"sha256 {card.digest[:12]}, the file has {scan.digest[:12]}", name=name)
        elif card.spots and card.spots != scan.spots:
            text = f"sha256 of blocks {card.spots[:12]}, the file has {scan.spots[:12]}"
            findings.add("card-digest", text, name=name)
    single = headers.readable & headers.finite & (headers.labels >= 0) & (headers.labels < len(card.classes))
    counts = np.bincount(headers.labels[single].astype(np.int64), minlength=len(card.classes))
    for class_name, written, count in zip(card.classes, card.counts, counts.tolist(), strict=True):
        if written != count:
            findings.add("card-classes", f"{written:,} images, the file holds {count:,}", name=class_name)
