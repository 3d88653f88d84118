"""Read the labels of a record file, and find records that do not go with the others."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from steadytrain.data.checking.findings import Findings
from steadytrain.data.checking.images import check_classes
from steadytrain.data.checking.record_scan import RecordScan, payload_in
from steadytrain.data.filenames import is_shard
from steadytrain.data.recordio.card import Card
from steadytrain.data.recordio.damaged import ByteSource
from steadytrain.data.recordio.framing import unpack
from steadytrain.data.recordio.reader import (
    MOST_CLASSES,
    names_identities,
    nearest_whole,
    none_is_an_image,
    why_no_image,
)


@dataclass(frozen=True)
class RecordLabels:
    """The labels of a file.

    Args:
        what: it is by them: "image records", "records with label vectors", ...
        fits: bool[N], records whose labels go with those of the others.
        classes: images of each class, by the card's names or the numbers; empty where labels are no classes.
    """

    what: str
    fits: NDArray[np.bool_]
    classes: dict[str, int] = field(default_factory=dict)


def check_labels(path: Path, scan: RecordScan, card: Card | None, findings: Findings) -> RecordLabels:
    """Return what the labels are, and add what does not go with that; nothing where no record holds an image."""
    headers = scan.headers
    bad = sum(findings.counts[kind] for kind in ("no-header", "no-image", "no-picture"))
    if bad >= len(headers):
        detail = next((finding.detail for finding in findings.of("no-image")), "")  # has looked at all of it
        findings.drop("no-image", "no-picture", "no-header")
        findings.add("not-images", none_is_an_image(len(headers), detail or why_no_image(_first_payload(path, scan))))
        return RecordLabels("records that are no image records", np.zeros(len(headers), np.bool_))
    _check_ids(scan, findings)
    fits = scan.readable & ~headers["is_bare"]
    widths = headers["width"]
    # In sets of faces the first label is the class, whatever the others are.
    if headers["is_bare"][0] and names_identities(unpack(_first_payload(path, scan))):
        widths = np.minimum(widths, 1)
    values, counts = np.unique(widths[fits], return_counts=True)
    if len(values) > 1 and 2 * counts.max() <= counts.sum():  # as of objects in boxes
        findings.add("label-vectors", f"{values[0]} to {values[-1]} labels for each image")
        return RecordLabels("records with label vectors", fits)
    width = int(values[counts.argmax()]) if len(values) else 1
    for row in np.flatnonzero(fits & (widths != width)).tolist():
        findings.add("label-width", f"{widths[row]}; most have {width}", **scan.place(row))
    fits = fits & (widths == width) & headers["is_finite"]
    if width == 1:
        return _check_class_numbers(path, scan, card, fits, findings)
    if not (others := int((fits & ~headers["is_binary"]).sum())):
        return RecordLabels(f"records with several of {width:,} labels each", fits)
    findings.add("label-vectors", f"{width} labels for each image, not all 0 or 1 in {others:,} records")
    return RecordLabels("records with label vectors", fits)


def _first_payload(path: Path, scan: RecordScan) -> bytes:
    with ByteSource(path) as source:
        return payload_in(source, scan.span(0))


def _check_class_numbers(
    path: Path, scan: RecordScan, card: Card | None, fits: NDArray[np.bool_], findings: Findings
) -> RecordLabels:
    """Check labels of one number each, of the records that ``fits``: classes by the card, or numbers without gaps."""
    stored = scan.headers["label"]
    whole = nearest_whole(stored)
    wrong = fits & ~((stored >= 0) & (whole == np.floor(whole)))
    if 2 * int(wrong.sum()) > int((scan.readable & ~scan.headers["is_bare"]).sum()):
        low, high = stored[fits].min(), stored[fits].max()
        findings.add("label-vectors", f"one number for each image, from {low!s} to {high!s}")
        return RecordLabels("records with a number each", fits)
    named = card.classes if card else ()
    limit = len(named) or MOST_CLASSES
    reason = f"; the card lists {limit:,}" if named else f"; {limit:,} are the most"
    labels = whole.astype(np.float64)
    for row in np.flatnonzero(wrong | (fits & (labels >= limit))).tolist():
        findings.add("label-not-class", f"label {stored[row]!s}{'' if wrong[row] else reason}", **scan.place(row))
    fits = fits & ~wrong & (labels < limit)
    sizes = np.bincount(labels[fits].astype(np.int64), minlength=len(named)).tolist()
    names = named or [str(number) for number in range(len(sizes))]
    check_classes(names, sizes, findings, required=False)
    for number, (name, size) in enumerate(zip(names, sizes, strict=True)):
        if size == 0 and not is_shard(path.name):
            findings.add("unused-class", f"label {number}", name=name)
    return RecordLabels("image records", fits, dict(zip(names, sizes, strict=True)))


def _check_ids(scan: RecordScan, findings: Findings) -> None:
    rows = np.flatnonzero(scan.readable)
    ids, firsts, inverse = np.unique(scan.headers["id"][rows], return_index=True, return_inverse=True)
    if len(ids) == 1 < len(rows):
        findings.add("same-id", f"all {len(rows):,} records have id {ids[0]}")
        return
    for place in np.flatnonzero(firsts[inverse] != np.arange(len(rows))).tolist():
        findings.add("same-id", f"as record {rows[firsts[inverse[place]]]:,}", **scan.place(int(rows[place])))
