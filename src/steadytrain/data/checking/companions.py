"""Hold the files beside a record file against its records: the index, the list and the card."""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from steadytrain.data.checking.findings import Findings
from steadytrain.data.checking.record_scan import RecordScan
from steadytrain.data.recordio.card import Card, card_of, card_path
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
    offsets, begins = index.offsets, scan.headers["start"]
    gaps = scan.gaps if len(scan.gaps) else np.zeros((1, 2), np.int64)
    gap = np.searchsorted(gaps[:, 0], offsets, side="right") - 1
    in_gap = (gap >= 0) & (offsets < gaps[gap, 1])  # what an index says of damaged places is no fault of its own
    wrong = np.flatnonzero(~np.isin(offsets, begins) & ~in_gap)
    if len(wrong) > len(offsets) // 2:
        text = f"{len(wrong):,} of its {len(offsets):,} entries begin no record: it is that of another file"
        findings.add("index-wrong", text, name=name)
        return []
    for row in wrong.tolist():
        findings.add("index-wrong", f"key {index.keys[row]}: no record begins there", offset=int(offsets[row]))
    for row in np.flatnonzero(scan.readable & ~np.isin(begins, offsets)).tolist():
        findings.add("index-wrong", "the record is not in it", **scan.place(row))
    for what, column in (("key", index.keys), ("byte", offsets.tolist())):
        for value, times in Counter(column).items():
            if times > 1:
                findings.add("index-wrong", f"{what} {value} is in it {times} times", name=name)
    lost = int(in_gap.sum())
    return [f"the index names {lost:,} record{'s' * (lost != 1)} in the damaged places"] if lost else []


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
        findings.add("list-differs", f"line {number}: {text}", name=path.name)
    readable = np.flatnonzero(scan.readable)
    lines = listed.rows_of(scan.headers["id"][readable])
    if 2 * int((lines >= 0).sum()) < max(len(readable), 1):
        text = f"{int((lines >= 0).sum()):,} of {len(readable):,} records have an id that it lists: it is of others"
        findings.add("list-differs", text, name=path.name)
        return None
    for row in readable[lines < 0].tolist():
        findings.add("list-differs", "the record is not in it", **scan.place(row))
    for line in np.flatnonzero(~np.isin(listed.ids, scan.headers["id"].astype(np.int64))).tolist():
        findings.add("list-differs", f"no record has id {listed.ids[line]}", name=printable(listed.names[line]))
    has_one = (lines >= 0) & (scan.headers["width"][readable] == 1)
    rows, lines = readable[has_one], lines[has_one]
    for place in np.flatnonzero(~listed.agree(lines, scan.headers["label"][rows, None])).tolist():
        row, line = int(rows[place]), int(lines[place])
        there, here = f"{listed.labels_of(line)[0]:g}", f"{scan.headers['label'][row]:g}"
        text = f"{printable(listed.names[line])}: label {there} there, {here} here"
        findings.add("list-differs", text, **scan.place(row))
    return listed


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
    stated: list[tuple[int | str, int | str, str]] = [
        (card.bytes, scan.size, "bytes"),
        (card.num_images, len(scan.headers), "images"),
        (card.digest[:12] or scan.digest[:12], scan.digest[:12], "as its sha256"),
    ]
    for there, here, what in stated:
        if there != here:
            findings.add("card-wrong", f"it states {there} {what}, the file has {here}", name=path.name)
            return card
    labels = scan.headers["label"][scan.readable & scan.headers["is_finite"]]
    labels = labels[(labels >= 0) & (labels < len(card.classes))].astype(np.int64)
    counts = np.bincount(labels, minlength=len(card.classes)).tolist()
    for class_name, written, count in zip(card.classes, card.counts, counts, strict=True):
        if written != count:
            findings.add("card-wrong", f"{written:,} images, the file holds {count:,}", name=class_name)
    return card
