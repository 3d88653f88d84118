"""Hold the files beside a record file against its records: the index, the list and the card."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from steadytrain.data.checking.findings import Findings
from steadytrain.data.checking.record_scan import RecordScan
from steadytrain.data.recordio.card import Card, card_of, card_path
from steadytrain.data.recordio.framing import index_path
from steadytrain.data.recordio.index import read_index
from steadytrain.data.recordio.lst import RecordList, list_path
from steadytrain.errors import DataError
from steadytrain.files import read_text


def check_index(records: Path, scan: RecordScan, findings: Findings) -> None:
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


def list_beside(records: Path, scan: RecordScan) -> RecordList | None:
    """Read the list beside a record file, by which its records are named; None where there is none, or of others."""
    try:
        listed = RecordList.read(list_path(records))
    except DataError:
        return None
    num_known = int(np.isin(scan.headers["id"][scan.readable].astype(np.int64), listed.ids).sum())
    return listed if num_known > 0 and 2 * num_known >= int(scan.readable.sum()) else None


def check_card(records: Path, scan: RecordScan, findings: Findings) -> Card | None:
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
