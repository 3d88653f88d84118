"""The labels and ids of all records together: classes, vectors or detection; what does not go with the rest."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from steadytrain.data.checking.classes import check_classes
from steadytrain.data.checking.findings import Findings
from steadytrain.data.recordio.card import Card
from steadytrain.data.recordio.headers import Headers
from steadytrain.data.recordio.reader import MOST_CLASSES


@dataclass(frozen=True)
class Labels:
    """What the labels of a file are.

    Args:
        what: "image records", "detection records", ...
        fits: bool[N], records whose labels go with those of the others.
        classes: images of each class, by name; empty where labels are no classes.
    """

    what: str
    fits: NDArray[np.bool_]
    classes: dict[str, int] = field(default_factory=dict)


def check_labels(headers: Headers, card: Card | None, found: Findings) -> Labels:
    """Say what the labels are, and add what does not go with that to ``found``.

    Args:
        headers: of all whole records.
        card: of the file, if it has one.
        found: takes the findings.
    """
    readable = headers.readable
    n = int(readable.sum())
    if 2 * int(headers.detection.sum()) > n:
        widths = headers.widths[headers.detection]
        between = f"{widths.min()} to {widths.max()}" if widths.min() < widths.max() else f"{widths.min()}"
        found.add("detection", f"{len(widths):,} of {len(headers):,} records, {between} labels each")
        return Labels("detection records", readable)
    widths, counts = np.unique(headers.widths[readable], return_counts=True)
    width = int(widths[counts.argmax()]) if n else 1
    fits = readable & (headers.widths == width)
    for row in np.flatnonzero(readable & ~fits).tolist():
        _add(found, headers, "label-width", row, f"{headers.widths[row]}; most have {width}")
    fits &= headers.finite
    if width > 1:
        found.add("label-vectors", f"{width} labels for each image")
        return Labels("records with label vectors", fits)
    is_class = (headers.labels >= 0) & (headers.labels == np.floor(headers.labels))
    wrong = fits & ~is_class
    if 2 * int(wrong.sum()) > n:
        told = f"one number for each image, from {headers.labels[fits].min():g} to {headers.labels[fits].max():g}"
        found.add("label-vectors", told)
        return Labels("records with a number each", fits)
    for row in np.flatnonzero(wrong).tolist():
        _add(found, headers, "label-not-class", row, f"label {headers.labels[row]:g}")
    classes, known = _classes(headers, fits & is_class, card, found)
    return Labels("image records", known, classes)


def check_ids(headers: Headers, found: Findings) -> None:
    """Add records whose id another has before them."""
    rows = np.flatnonzero(headers.readable)
    ids, firsts, inverse = np.unique(headers.ids[rows], return_index=True, return_inverse=True)
    if len(ids) == 1 < len(rows):
        found.add("same-id", f"all {len(rows):,} records have id {ids[0]}")
        return
    for place in np.flatnonzero(firsts[inverse] != np.arange(len(rows))).tolist():
        _add(found, headers, "same-id", int(rows[place]), f"as record {rows[firsts[inverse[place]]]}")


def _classes(
    headers: Headers, fits: NDArray[np.bool_], card: Card | None, found: Findings
) -> tuple[dict[str, int], NDArray[np.bool_]]:
    """Images of each class, and which records are in one that there is."""
    labels = headers.labels.astype(np.float64)
    limit = len(card.classes) if card and card.classes else MOST_CLASSES
    beyond = fits & (labels >= limit)
    for row in np.flatnonzero(beyond).tolist():
        told = f"the card lists {limit:,}" if limit < MOST_CLASSES else f"{limit:,} are the most"
        _add(found, headers, "label-unknown", row, f"label {labels[row]:.0f}; {told}")
    counts = np.bincount(labels[fits & ~beyond].astype(np.int64)).tolist()
    names = list(card.classes) if card and card.classes else [str(number) for number in range(len(counts))]
    counts += [0] * (len(names) - len(counts))
    check_classes(names, counts, found, required=False)
    return dict(zip(names, counts, strict=True)), fits & ~beyond


def _add(found: Findings, headers: Headers, kind: str, row: int, detail: str) -> None:
    found.add(kind, detail, offset=int(headers.offsets[row]), record=row, id=int(headers.ids[row]))
