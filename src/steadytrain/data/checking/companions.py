"""Hold the files beside a record file against its records: the index, the list and the card."""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from steadytrain.data.checking.findings import Findings
from steadytrain.data.checking.record_scan import RecordScan, payload_in
from steadytrain.data.recordio.card import Card, card_of, card_path
from steadytrain.data.recordio.damaged import ByteSource
from steadytrain.data.recordio.framing import unpack
from steadytrain.data.recordio.lst import RecordList, list_path
from steadytrain.errors import DataError
from steadytrain.files import open_text, read_text
from steadytrain.format import printable, whole_number


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


def find_index(path: Path) -> Index | None:
    """Read an index; None where there is none."""
    index, offsets = Index(), array("q")
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


def check_index(index: Index | None, scan: RecordScan, findings: Findings, *, name: str) -> list[str]:
    """Hold an index against the records of its file. Returns remarks."""
    if index is None or index.wrong or not len(index.offsets):
        kind = "index-missing" if index is None else "index-unreadable" if index.wrong else "index-empty"
        findings.add(kind, index.wrong if index else "", name=name)
        return []
    keys, offsets, begins = index.keys, index.offsets, scan.headers["start"]
    gaps = scan.gaps if len(scan.gaps) else np.zeros((1, 2), np.int64)
    gap = np.searchsorted(gaps[:, 0], offsets, side="right") - 1
    in_gap = (gap >= 0) & (offsets < gaps[gap, 1])  # what an index says of damaged places is no fault of its own
    wrong = np.flatnonzero(~np.isin(offsets, begins) & ~in_gap)
    if len(wrong) > len(offsets) // 2:
        text = f"{len(wrong):,} of its {len(offsets):,} entries begin no record: it is that of another file"
        findings.add("index-other", text, name=name)
        return []
    for row in wrong.tolist():
        findings.add("index-offset", f"key {keys[row]}", offset=int(offsets[row]))
    for row in np.flatnonzero(scan.readable & ~np.isin(begins, offsets)).tolist():
        findings.add("index-lacks", **scan.place(row))
    for row in _repeated(offsets):
        findings.add("index-repeats", f"key {keys[row]}: its offset appears before", offset=int(offsets[row]))
    for key, times in Counter(keys).items():
        if times > 1:
            findings.add("index-repeats", f"key {key} appears {times} times")
    ids = dict(zip(begins.tolist(), scan.headers["id"].tolist(), strict=True))
    pairs = zip(keys, offsets.tolist(), strict=True)
    if other := [(key, ids[offset]) for key, offset in pairs if offset in ids and key != str(ids[offset])]:
        text = f"{len(other):,} of {len(keys):,}: key {other[0][0]} for id {other[0][1]}, for one"
        findings.add("index-keys", text, name=name)
    lost = int(in_gap.sum())
    return [f"the index names {lost:,} record{'s' * (lost != 1)} in the damaged places"] if lost else []


def _repeated(values: NDArray[np.int64]) -> list[int]:
    """Return the places of values that have been there before."""
    firsts = np.unique(values, return_index=True)[1]
    places: list[int] = np.setdiff1d(np.arange(len(values)), firsts).tolist()
    return places


def check_list(records: Path, scan: RecordScan, findings: Findings) -> RecordList | None:
    """Hold the list beside a record file against its records; None where there is none, or it is of other records."""
    path = list_path(records)
    if not path.exists():
        return None
    try:
        listed = RecordList.read(path)
    except DataError as error:
        findings.add("list-unreadable", str(error).removeprefix(f"cannot read {path}: "), name=path.name)
        return None
    for number, text in listed.wrong.items():
        findings.add("list-line", f"line {number}: {text}", name=path.name)
    headers, readable = scan.headers, np.flatnonzero(scan.readable)
    ids, firsts, times = np.unique(headers["id"][readable], return_index=True, return_counts=True)
    rows = readable[firsts[times == 1]]  # an id of several records says nothing of either
    lines = listed.rows_of(headers["id"][rows])
    if 2 * int((lines >= 0).sum()) < max(len(rows), 1):
        text = f"{int((lines >= 0).sum()):,} of {len(headers):,} records have an id that it lists: it is of others"
        findings.add("list-other", text, name=path.name)
        return None
    for row in rows[lines < 0].tolist():
        findings.add("list-lacks", **scan.place(row))
    extra = np.flatnonzero(~np.isin(listed.ids, ids.astype(np.int64))).tolist()
    for kind, places in (("list-extra", extra), ("list-repeats", _repeated(listed.ids))):
        for line in places:
            findings.add(kind, f"index {listed.ids[line]}", name=printable(listed.names[line]))
    _check_labels_of_list(records, scan, listed, rows[lines >= 0], lines[lines >= 0], findings)
    return listed


def _check_labels_of_list(
    records: Path,
    scan: RecordScan,
    listed: RecordList,
    rows: NDArray[np.int64],
    lines: NDArray[np.int64],
    findings: Findings,
) -> None:
    """Add records ``rows`` whose labels are not those of their ``lines``; several labels are read from the file."""
    differs = ~listed.agree(lines, scan.headers["label"][rows, None])
    with ByteSource(records) as source:
        for place in np.flatnonzero(differs | (scan.headers["width"][rows] > 1)).tolist():
            row, line = int(rows[place]), int(lines[place])
            stored = np.array([unpack(payload_in(source, scan.span(row))).labels], np.float32)
            if not listed.agree(lines[place : place + 1], stored)[0]:
                there, here = (", ".join(f"{label:g}" for label in row) for row in (listed.labels_of(line), stored[0]))
                text = f"{printable(listed.names[line])}: {there} there, {here} here"
                findings.add("list-label", text, **scan.place(row))


def check_card(records: Path, scan: RecordScan, findings: Findings) -> Card | None:
    """Hold the card beside a record file against its records; return it, also where it does not fit."""
    path = card_path(records)
    try:
        card = card_of(records)
    except DataError as error:
        try:
            card = Card.from_json(read_text(path, most=None))
        except (DataError, OSError, UnicodeDecodeError):
            findings.add("card-unreadable", str(error).removeprefix(f"{path}: "), name=path.name)
            return None
    if card is None:
        findings.add("card-missing", name=path.name)
        return None
    stated = [
        ("card-size", card.bytes, scan.size, "bytes"),
        ("card-count", card.num_images, len(scan.headers), "images"),
        ("card-digest", card.digest[:12], scan.digest[:12], "as its sha256"),
        ("card-digest", card.spots[:12], scan.spots[:12], "as the sha256 of some blocks"),
    ]
    for kind, there, here, what in stated:
        is_later = kind == "card-digest" and findings.has("card-size", "card-count", "card-digest")
        if there and there != here and not is_later:
            texts = [f"{value:,}" if isinstance(value, int) else value for value in (there, here)]
            findings.add(kind, f"it states {texts[0]} {what}, the file has {texts[1]}", name=path.name)
    if not findings.has("card-count"):
        labels = scan.headers["label"][scan.readable & scan.headers["is_finite"]]
        labels = labels[(labels >= 0) & (labels < len(card.classes))].astype(np.int64)
        counts = np.bincount(labels, minlength=len(card.classes)).tolist()
        for class_name, written, count in zip(card.classes, card.counts, counts, strict=True):
            if written != count:
                findings.add("card-classes", f"{written:,} images, the file holds {count:,}", name=class_name)
    return card
