"""Examine a record file that may be damaged: what is wrong with it, at which byte, and what can still be read."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from steadytrain.data.checking.copies import ImageSet, find_alike_images, find_copies, find_copies_of, find_leaks
from steadytrain.data.checking.findings import Findings, Report, remedies_for_records
from steadytrain.data.checking.record_labels import RecordLabels, check_labels
from steadytrain.data.checking.record_scan import RecordScan, scan_records
from steadytrain.data.images.file_types import recognise
from steadytrain.data.recordio.card import Card, card_of, card_path
from steadytrain.data.recordio.framing import index_path
from steadytrain.data.recordio.index import read_index
from steadytrain.data.recordio.lst import RecordList, describe_record, list_path
from steadytrain.errors import DataError
from steadytrain.files import read_text
from steadytrain.format import OnProgress


@dataclass(frozen=True)
class Examined:
    """A record file as it was found; ``card``: what lies beside it, fitting or not; None where it cannot be read."""

    path: Path
    report: Report
    scan: RecordScan
    labels: RecordLabels
    card: Card | None = None

    @property
    def headers(self) -> NDArray[np.void]:
        return self.scan.headers

    @property
    def sound(self) -> NDArray[np.bool_]:
        """bool[N], records that can be used: framed, labelled and (where that was tried) decoded without a fault."""
        sound: NDArray[np.bool_] = self.labels.fits & self.scan.sound
        return sound

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, by the card, or their numbers; empty where labels are none."""
        return tuple(self.labels.classes)


def examine_records(
    path: Path,
    *,
    others: Sequence[Path] = (),
    before: Sequence[Examined] = (),
    decode: bool = True,
    near: bool = False,
    workers: int = 1,
    most: int | None = None,
    progress: OnProgress = lambda done, total: None,
) -> Examined:
    """Examine a record file.

    Args:
        others: record files of other splits: images that are in them as well are found.
        before: files of the same split that were examined already: images that are in them, too, are duplicates.
        decode, workers, progress: as for :func:`.scan_records`, of all files.
        near: find also images that look alike: encoded again, scaled or mirrored.
        most: findings to keep of each kind; None: all.

    Raises:
        DataError: there is no such file.
        FailedError: the disk fails, or no process can be started.
    """
    began = time.monotonic()
    findings = Findings(most)
    others = others if decode else ()
    total, done = sum(file.stat().st_size for file in (path, *others) if file.is_file()), 0

    def scan_file(file: Path, findings: Findings) -> RecordScan:
        nonlocal done
        before = done
        scan = scan_records(
            file,
            findings,
            decode=decode,
            near=near,
            workers=workers,
            progress=lambda part, _: progress(before + part, total),
        )
        done += scan.size
        return replace(scan, listed=_list_beside(file, scan)) if len(scan.headers) else scan

    scan = scan_file(path, findings)
    if not len(scan.headers):
        return _no_records(path, scan, findings, began)
    card = _check_card(path, scan, findings)
    labels = check_labels(path, scan, card, findings)
    _check_index(path, scan, findings)
    facts = scan.images.add_shape()
    if decode:
        images = _image_set(scan, tuple(labels.classes))
        find_copies(images, findings)
        find_alike_images(images, images, findings)
        for file in before:
            find_copies_of(images, _image_set(file.scan, file.classes, file.path.name), findings)
    else:
        facts.append("the images themselves were not checked")
    for other in others:
        theirs = scan_file(other, Findings(0))
        if len(theirs.headers):
            num_leaks = find_leaks(images, _image_set(theirs, tuple(labels.classes), other.name), findings)
            facts.append(f"{num_leaks:,} of the {len(theirs.headers):,} images of {other.name} are in it")
        else:
            facts.append(f"{other.name} holds no whole record: there is nothing to compare with")
    findings.name_records(scan.name)
    num_sound = int((labels.fits & scan.sound).sum())
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
    return Examined(path, report, scan, labels, card)


def _image_set(scan: RecordScan, classes: Sequence[str], file: str = "") -> ImageSet:
    """Return the images of a scan to be compared; ``file``: the name of another file than the one that is examined."""

    def class_of(row: int) -> str:
        label = float(scan.headers["label"][row])
        if not classes:
            return ""
        return classes[int(label)] if label.is_integer() and 0 <= label < len(classes) else f"{label:g}"

    def words(row: int) -> str:
        return describe_record(row, file, scan.name(row)) if file else scan.words(row)

    return ImageSet(scan.images.prints, scan.images.hashes, scan.place, words, class_of)


def _no_records(path: Path, scan: RecordScan, findings: Findings, began: float) -> Examined:
    """The outcome where not one whole record is there."""
    file_type = recognise(scan.start, scan.size)
    what, remedies = "a file without one whole record", (("fetch or copy it again", "not one whole record is there"),)
    if file_type is not None:
        findings = Findings(findings.most)  # in a file of another kind no byte is out of place
        findings.add("other-file", file_type.name, name=path.name)
        what, remedies = file_type.name, ((file_type.advice, ""),)
    seconds = time.monotonic() - began
    report = Report(path=str(path), what=what, findings=findings, bytes=scan.size, remedies=remedies, seconds=seconds)
    return Examined(path, report, scan, RecordLabels(what, scan.sound))


def _check_index(records: Path, scan: RecordScan, findings: Findings) -> None:
    """Hold the index beside a record file against its records."""
    path = index_path(records)
    if not path.exists():
        findings.add("index-missing", name=path.name)
        return
    try:
        offsets = read_index(path)
    except DataError as error:
        findings.add("index-wrong", str(error).removeprefix(f"cannot read {path}: "), name=path.name)
        return
    if not len(offsets):
        findings.add("index-missing", "it is empty", name=path.name)
        return
    begins = scan.headers["start"]
    gaps = scan.gaps if len(scan.gaps) else np.zeros((1, 2), np.int64)
    gap = np.searchsorted(gaps[:, 0], offsets, side="right") - 1
    in_gap = (gap >= 0) & (offsets < gaps[gap, 1])  # what an index says of damaged places is no fault of its own
    wrong = offsets[~np.isin(offsets, begins) & ~in_gap]
    lacking = begins[scan.readable & ~np.isin(begins, offsets)]
    again = offsets[1:][np.diff(offsets) == 0]
    for places, text in (
        (wrong, f"of {len(offsets):,} entries begin no record, the first names"),
        (lacking, f"of {len(begins):,} records are not in it, the first at"),
        (again, "entries are there twice, the first for"),
    ):
        if len(places):
            findings.add("index-wrong", f"{len(places):,} {text} byte {places[0]:,}", name=path.name)


def _list_beside(records: Path, scan: RecordScan) -> RecordList | None:
    """Read the list beside a record file, by which its records are named; None where there is none, or of others."""
    try:
        listed = RecordList.read(list_path(records))
    except DataError:
        return None
    num_known = int(np.isin(scan.headers["id"][scan.readable].astype(np.int64), listed.ids).sum())
    return listed if num_known > 0 and 2 * num_known >= int(scan.readable.sum()) else None


def _check_card(records: Path, scan: RecordScan, findings: Findings) -> Card | None:
    """Hold the card beside a record file against its records; return it, also where it does not fit."""
    path = card_path(records)
    try:
        card = card_of(records)
    except DataError as error:
        try:
            card = Card.from_json(read_text(path, most=None))
        except (DataError, OSError, UnicodeDecodeError):
            findings.add("card-wrong", str(error).removeprefix(f"{path}: "), name=path.name)
            return None
    if card is None:
        findings.add("card-missing", name=path.name)
        return None
    stated: list[tuple[int | str, int | str, str]] = [
        (card.bytes, scan.size, "bytes"),
        (card.num_images, len(scan.headers), "images"),
        (card.digest[:12] or scan.digest[:12], scan.digest[:12], "as its sha256"),
    ]
    for there, here, what in stated:
        if there != here:
            findings.add("card-wrong", f"it states {there} {what}, the file has {here}", name=path.name)
            break
    return card
