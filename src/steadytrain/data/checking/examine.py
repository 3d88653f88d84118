"""Examine a record file that may be damaged: what is wrong with it, at which byte, and what can still be read.

>>> import tempfile
>>> from steadytrain.data.recordio.framing import pack_header
>>> from steadytrain.data.recordio.writer import RecordWriter
>>> path = Path(tempfile.mkdtemp()) / "two.rec"
>>> with RecordWriter(path) as writer:
...     for number in range(2):
...         writer.write(pack_header(number, id=number) + b"<html>404", key=number)
>>> found = examine_records(path, workers=0).report.findings
>>> [(one.offset, one.record, one.detail) for one in found.of("no-image")]
[(0, 0, 'an HTML page'), (44, 1, 'an HTML page')]
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from steadytrain.data.checking.duplicates import Fingerprints, same, shared
from steadytrain.data.checking.file_types import recognise
from steadytrain.data.checking.findings import Findings, Report
from steadytrain.data.checking.labels import Labels, check_ids, check_labels
from steadytrain.data.checking.look import FINGERPRINT_BYTES
from steadytrain.data.checking.reading import Progress, Seen, read_through
from steadytrain.data.checking.remedies import remedies_for_records
from steadytrain.data.checking.sidecars import Index, check_card, check_index, find_card, find_index
from steadytrain.data.recordio.card import Card, card_path
from steadytrain.data.recordio.framing import index_path
from steadytrain.data.recordio.headers import Headers


@dataclass(frozen=True)
class Examined:
    """A record file as it was found.

    Args:
        path: of the file.
        report: what is wrong with it.
        headers: of its whole records.
        sound: bool[N], records that can be used: framed, labelled and (where that was tried) decoded without a fault.
        classes: by the card, or the numbers; empty where labels are none.
        index, card: what lies beside it, fitting or not.
        prints: uint8[N, 16], the fingerprints of its images, where they were looked at.
    """

    path: Path
    report: Report
    headers: Headers
    sound: NDArray[np.bool_]
    classes: tuple[str, ...] = ()
    index: Index | None = None
    card: Card | None = None
    prints: Fingerprints = field(default_factory=lambda: np.empty((0, FINGERPRINT_BYTES), np.uint8))

    @property
    def has_good_index(self) -> bool:
        """Whether readers can go by its index."""
        return not any(kind.startswith("index-") and kind != "index-keys" for kind in self.report.findings.counts)


def examine_records(
    path: Path,
    *,
    others: Sequence[Path] = (),
    before: Sequence[Examined] = (),
    decode: bool = True,
    workers: int = 1,
    most: int | None = None,
    progress: Progress | None = None,
) -> Examined:
    """Examine a record file.

    Args:
        path: of the file.
        others: record files of other splits: images that are in them as well are found.
        before: files of the same split that were examined already: images that are in them, too, are duplicates.
        decode: look at the images, too; else at framing and headers only.
        workers: processes to decode with; 0 decodes here, where a decoder's crash is a crash.
        most: findings to keep of each kind; None: all.
        progress: called with the bytes done so far, and all there are (of all files).

    Raises:
        DataError: there is no such file.
        FailedError: the disk fails, or no process can be started.
    """
    began = time.monotonic()
    found = Findings(most)
    total = sum(one.stat().st_size for one in (path, *others) if one.is_file())
    done = 0

    def advance(part: int, _: int) -> None:
        if progress is not None:
            progress(done + part, total)

    seen = read_through(path, found, depth="images" if decode else "headers", workers=workers, progress=advance)
    if not len(seen.headers):
        return _no_records(path, seen, found, time.monotonic() - began)
    card = find_card(path, found)
    labels = _labels(seen, card, found)
    if card is not None:
        check_card(card, seen.headers, seen.digest, seen.spots, found, name=card_path(path).name)
    index = find_index(path)
    facts = check_index(index, seen.headers, seen.gaps, found, path=index_path(path))
    if decode:
        _find_same(seen, labels, found)
        for one in before:
            _find_again(seen, labels, one, found)
    else:
        facts.append("the images themselves were not looked at")
    for other in others if decode else ():
        done += path.stat().st_size if not done else 0
        theirs = read_through(other, Findings(0), depth="fingerprints", workers=workers, progress=advance)
        facts.append(_find_leaks(seen, theirs, other, found))
        done += theirs.size
    sound = labels.fits & seen.sound
    report = Report(
        path=str(path),
        what=labels.what,
        findings=found,
        num_images=len(seen.headers),
        num_sound=int(sound.sum()),
        bytes=seen.size,
        classes=labels.classes,
        formats=seen.formats,
        width=seen.width,
        height=seen.height,
        facts=tuple(facts),
        remedies=remedies_for_records(path, found, num_sound=int(sound.sum())),
        seconds=time.monotonic() - began,
    )
    return Examined(path, report, seen.headers, sound, tuple(labels.classes), index, card, seen.prints)


def _find_same(seen: Seen, labels: Labels, found: Findings) -> None:
    """Images that are in the file more than once."""
    rows = np.flatnonzero(seen.prints.any(axis=1))
    for group in same(seen.prints[rows]):
        first, *later = rows[group].tolist()
        for row in later:
            _add(found, seen, "duplicate", row, f"as record {first:,}")
        told = {float(seen.headers.labels[row]): row for row in reversed([first, *later])}
        if labels.classes and len(told) > 1:
            names = list(labels.classes)
            listed = [f"record {row:,} {_class(names, label)}" for label, row in sorted(told.items(), key=_number)]
            _add(found, seen, "conflicting-labels", first, ", ".join(listed[:4]) + ", ..." * (len(listed) > 4))


def _find_again(seen: Seen, labels: Labels, before: Examined, found: Findings) -> None:
    """Images that are in another file of the same split as well."""
    pairs = dict(reversed(_shared(seen.prints, before.prints)))  # of several there, the first
    for row, number in sorted(pairs.items()):
        ours = _class(list(labels.classes), float(seen.headers.labels[row]))
        theirs = _class(list(before.classes), float(before.headers.labels[number]))
        where = f"record {number:,} of {before.path.name}"
        if labels.classes and before.classes and ours != theirs:
            _add(found, seen, "conflicting-labels", row, f"record {row:,} {ours}, {where} {theirs}")
        else:
            _add(found, seen, "duplicate", row, f"as {where}")


def _shared(ours: Fingerprints, theirs: Fingerprints) -> list[tuple[int, int]]:
    """Records of two files that hold the same image."""
    here, there = (np.flatnonzero(prints.any(axis=1)) for prints in (ours, theirs))
    return [(int(here[row]), int(there[number])) for row, number in shared(ours[here], theirs[there]).tolist()]


def _find_leaks(seen: Seen, theirs: Seen, other: Path, found: Findings) -> str:
    """Images that are in another file as well; returns a remark."""
    if not len(theirs.headers):
        return f"{other.name} holds no whole record: there is nothing to compare with"
    pairs = _shared(seen.prints, theirs.prints)
    for row, number in pairs:
        differs = seen.headers.labels[row] != theirs.headers.labels[number]
        _add(found, seen, "leak", row, f"record {number:,} of {other.name}{', under another label' * bool(differs)}")
    return f"{len(pairs):,} of the {len(theirs.headers):,} images of {other.name} are in it"


def _add(found: Findings, seen: Seen, kind: str, row: int, detail: str) -> None:
    headers = seen.headers
    found.add(kind, detail, offset=int(headers.offsets[row]), record=row, id=int(headers.ids[row]))


def _class(names: list[str], label: float) -> str:
    return names[int(label)] if label.is_integer() and 0 <= label < len(names) else f"{label:g}"


def _number(told: tuple[float, int]) -> int:
    return told[1]


def _labels(seen: Seen, card: Card | None, found: Findings) -> Labels:
    """What the file is, by its labels; they are not looked at where not one record holds an image."""
    bad = found.counts["no-header"] + found.counts["label-overrun"] + found.counts["no-image"]
    if bad < len(seen.headers):
        check_ids(seen.headers, found)
        return check_labels(seen.headers, card, found)
    one = next(iter(found.of("no-image") or found.of("no-header") or found.of("label-overrun")), None)
    found.add("not-images", f"not one of {len(seen.headers):,}" + (f"; for one: {one.detail}" if one else ""))
    return Labels("records that are no image records", np.zeros(len(seen.headers), np.bool_))


def _no_records(path: Path, seen: Seen, found: Findings, seconds: float) -> Examined:
    """The outcome where not one whole record is there."""
    told = recognise(seen.start, seen.size)
    advice = (("fetch or copy it again", "not one whole record is there"),)
    if told is not None:
        found = Findings(found.most)  # in a file of another kind no byte is out of place
        found.add("other-file", told.name, name=path.name)
        advice = ((told.advice, ""),)
    report = Report(
        path=str(path),
        what=told.name if told else "a file without one whole record",
        findings=found,
        bytes=seen.size,
        remedies=advice,
        seconds=seconds,
    )
    return Examined(path, report, seen.headers, seen.sound)
