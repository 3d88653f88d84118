"""What lies beside a record file, held against the file itself: its index and its card."""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from steadytrain.data.checking.findings import Findings
from steadytrain.data.recordio.card import Card, card_of, card_path
from steadytrain.data.recordio.framing import index_path
from steadytrain.data.recordio.headers import Headers
from steadytrain.errors import DataError

LARGEST = 2**63 - 1


@dataclass
class Index:
    """An ``.idx`` as it was found.

    Args:
        path: where it should lie.
        keys: as they stand there.
        offsets: int64, in the order of its lines.
        wrong: why it is no index: a line that is none, or what the system says; empty where it is one.
    """

    path: Path
    keys: list[str] = field(default_factory=list)
    offsets: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    wrong: str = ""

    def key_of(self) -> dict[int, int]:
        """The keys that are whole numbers, by offset."""
        pairs = zip(self.keys, self.offsets.tolist(), strict=True)
        return {offset: int(key) for key, offset in pairs if key.isdigit() and int(key) < 2**64}


def find_index(records: Path) -> Index | None:
    """Read the index of a record file; None where there is none."""
    index = Index(index_path(records))
    offsets = array("q")
    try:
        with index.path.open(encoding="utf-8", errors="replace", newline="\n") as file:
            for number, line in enumerate(file, 1):
                key, tab, offset = line.rstrip("\r\n").rpartition("\t")
                if not line.strip():
                    continue
                if not tab or not offset.strip().isdecimal() or int(offset) > LARGEST:
                    index.wrong = f"line {number}: {line.strip()[:60]!r}"
                    break
                index.keys.append(key)
                offsets.append(int(offset))
    except FileNotFoundError:
        return None
    except OSError as error:
        index.wrong = (error.strerror or str(error)).lower()
    index.offsets = np.frombuffer(offsets, np.int64) if offsets else index.offsets
    return index


def check_index(
    index: Index | None, headers: Headers, gaps: NDArray[np.int64], found: Findings, *, path: Path
) -> list[str]:
    """Hold an index against the records of its file.

    Args:
        index: as it was found.
        headers: of all whole records.
        gaps: int64[G, 2], where bytes belong to no record: what an index says of those is no fault of its own.
        found: takes the findings.
        path: where the index should lie.

    Returns:
        What else there is to say.
    """
    if index is None:
        found.add("index-missing", name=path.name)
    elif index.wrong:
        found.add("index-unreadable", index.wrong, name=path.name)
    elif not len(index.offsets):
        found.add("index-empty", name=path.name)
    else:
        return _check_entries(index, headers, gaps, found)
    return []


def _check_entries(index: Index, headers: Headers, gaps: NDArray[np.int64], found: Findings) -> list[str]:
    in_gap = _inside(index.offsets, gaps)
    known = np.isin(index.offsets, headers.offsets)
    wrong = np.flatnonzero(~known & ~in_gap)
    if len(wrong) > len(index.offsets) // 2:
        told = f"{len(wrong):,} of its {len(index.offsets):,} entries begin no record: it is that of another file"
        found.add("index-other", told, name=index.path.name)
        return []
    for row in wrong.tolist():
        found.add("index-offset", f"key {index.keys[row]}", offset=int(index.offsets[row]))
    for row in np.flatnonzero(headers.readable & ~np.isin(headers.offsets, index.offsets)).tolist():
        found.add("index-lacks", offset=int(headers.offsets[row]), record=row, id=int(headers.ids[row]))
    _, firsts = np.unique(index.offsets, return_index=True)
    for row in np.setdiff1d(np.arange(len(index.offsets)), firsts).tolist():
        found.add(
            "index-repeats", f"key {index.keys[row]}: its offset stands there before", offset=int(index.offsets[row])
        )
    if len(set(index.keys)) < len(index.keys):
        for key, times in Counter(index.keys).items():
            if times > 1:
                found.add("index-repeats", f"key {key} stands there {times} times")
    _compare_keys(index, headers, found)
    lost = int(in_gap.sum())
    return [f"the index names {lost:,} record{'s' * (lost != 1)} in the damaged places"] if lost else []


def _compare_keys(index: Index, headers: Headers, found: Findings) -> None:
    ids = dict(zip(headers.offsets.tolist(), headers.ids.tolist(), strict=True))
    pairs = zip(index.keys, index.offsets.tolist(), strict=True)
    other = [(key, ids[offset]) for key, offset in pairs if offset in ids and key != str(ids[offset])]
    if other:
        (key, id_), n = other[0], len(other)
        found.add("index-keys", f"{n:,} of {len(index.keys):,}: key {key} for id {id_}, for one", name=index.path.name)


def _inside(offsets: NDArray[np.int64], spans: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which offsets lie in one of the spans (rising, start and end)."""
    if not len(spans):
        return np.zeros(len(offsets), np.bool_)
    at = np.searchsorted(spans[:, 0], offsets, side="right") - 1
    inside: NDArray[np.bool_] = (at >= 0) & (offsets < spans[np.maximum(at, 0), 1])
    return inside


def find_card(records: Path, found: Findings) -> Card | None:
    """The card beside a record file, also where it does not fit; what is wrong with it goes to ``found``."""
    path = card_path(records)
    try:
        card = card_of(records)
    except DataError as error:
        try:
            card = Card.from_json(path.read_text(encoding="utf-8"))
        except (DataError, OSError, UnicodeDecodeError):
            found.add("card-unreadable", str(error).removeprefix(f"{path}: "), name=path.name)
            return None
        told = f"it tells of {card.bytes:,} bytes, the file has {records.stat().st_size:,}"
        found.add("card-size", told, name=path.name)
        return card
    if card is None:
        found.add("card-missing", name=path.name)
    return card


def check_card(card: Card, headers: Headers, digest: str, spots: str, found: Findings, *, name: str) -> None:
    """Hold a card against the records of its file.

    Args:
        card: as it was found.
        headers: of all whole records.
        digest, spots: sha256 of the file, and of a few blocks of it.
        found: takes the findings.
        name: of the card's file.
    """
    if card.num_images != len(headers):
        found.add("card-count", f"it tells of {card.num_images:,} images, the file holds {len(headers):,}", name=name)
    elif card.digest and card.digest != digest and not found.counts["card-size"]:
        found.add("card-digest", f"sha256 {card.digest[:12]}, the file has {digest[:12]}", name=name)
    elif card.spots and card.spots != spots and not found.counts["card-size"]:
        found.add("card-digest", f"sha256 of blocks {card.spots[:12]}, the file has {spots[:12]}", name=name)
    single = headers.readable & headers.finite & (headers.labels >= 0) & (headers.labels < len(card.classes))
    counts = np.bincount(headers.labels[single].astype(np.int64), minlength=len(card.classes))
    if not card.classes or len(headers) != card.num_images:
        return
    for name_, told, there in zip(card.classes, card.counts, counts.tolist(), strict=True):
        if told != there:
            found.add("card-classes", f"{told:,} images, the file holds {there:,}", name=name_)
