"""Other record files as a source: their labels, ids and classes, and where in them the images lie.

An image that the format keeps in parts (it holds the magic number) is put together in the scratch folder; about one in
a hundred thousand photographs is.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from steadytrain.data.recordio.framing import HEADER_BYTES, MAGIC, MAX_PAYLOAD, index_path
from steadytrain.data.recordio.index import read_index, scan
from steadytrain.data.recordio.reader import Records
from steadytrain.data.sources import naming
from steadytrain.data.sources.listing import Listing
from steadytrain.data.sources.members import Say
from steadytrain.data.sources.names import Names
from steadytrain.data.sources.pieces import Pieces
from steadytrain.data.sources.select import merge
from steadytrain.data.sources.splits import by_split, in_order
from steadytrain.errors import DataError

_BLOCK = 16384
_HEAD_WORDS = 3  # magic, cflag and length, number of labels


def list_files(paths: Sequence[Path], *, classes: Sequence[str] | None, scratch: Path, say: Say) -> list[Listing]:
    """List one or several record files, in their order; those named ``...-train.rec``, ``...-val.rec`` as splits.

    Args:
        paths: of the ``.rec``.
        classes: the class list; None takes that of the card, or of the cards together.
        scratch: for images that lie in parts.
        say: takes remarks.

    Raises:
        DataError: a file is no record file, damaged or empty, or has label vectors where ``classes`` are given.
    """
    where = str(paths[0].parent)
    groups = by_split(paths, [path.name for path in paths], where) if len(paths) > 1 else {"": list(paths)}
    listings: list[Listing] = []
    for split, group in in_order(groups, say, where).items():
        given = classes or (listings[0].classes if listings else None) or None
        parts = [_list(path, split, given, scratch) for path in group]
        listings.append(merge(parts) if len(parts) > 1 else parts[0])
    return listings


def _list(path: Path, split: str, given: Sequence[str] | None, scratch: Path) -> Listing:
    with Records.open(path) as records:
        if not len(records):
            raise DataError(f"{path} holds no records")
        labels, classes = records.labels, records.classes
        card = records.card
        if labels.ndim == 1 and (given is not None or classes):
            names = classes if card is not None else None
            classes, labels = naming.from_numbers(labels.astype(np.int64), names=names, classes=given, where=str(path))
        elif given is not None:
            raise DataError(f"{path} has label vectors: --classes does not fit it")
        offsets = _offsets(path)
        if len(offsets) != len(records):
            raise DataError(f"{path} has changed while it was read: run the same command again")
        pieces = _pieces(path, records, offsets, scratch)
        time = path.stat().st_mtime_ns
        in_order_of_classes = card is not None and card.by_class and classes == card.classes
        return Listing(
            split=split,
            root=path,
            classes=classes,
            names=Names(f"{path.name}[{number}]" for number in range(len(records))),
            labels=labels.copy(),
            sizes=pieces.size,
            times=np.full(len(records), time, np.int64),
            ids=None if in_order_of_classes else np.array(records.record_ids),
            pieces=pieces,
            label_names=card.label_names if card is not None else (),
        )


def _offsets(path: Path) -> NDArray[np.int64]:
    """Where the records begin, as a reader finds them: by the index, else by a scan."""
    index = index_path(path)
    found = read_index(index) if index.exists() and index.stat().st_size else np.empty(0, np.int64)
    return found if len(found) else scan(np.memmap(path, np.uint8, "r").data)


def _pieces(path: Path, records: Records, offsets: NDArray[np.int64], scratch: Path) -> Pieces:
    data = np.memmap(path, np.uint8, "r")
    starts, sizes = np.empty_like(offsets), np.empty_like(offsets)
    in_parts = np.zeros(len(offsets), np.bool_)
    for start in range(0, len(offsets), _BLOCK):
        part = slice(start, start + _BLOCK)
        heads = (
            np.ascontiguousarray(data[offsets[part, None] + np.arange(4 * _HEAD_WORDS)]).view("<u4").astype(np.int64)
        )
        before = HEADER_BYTES + 4 * heads[:, 2]
        starts[part] = offsets[part] + 8 + before
        sizes[part] = (heads[:, 1] & MAX_PAYLOAD) - before
        in_parts[part] = heads[:, 1] >> 29 != 0
        wrong = (heads[:, 0] != MAGIC) | ((sizes[part] < 0) & ~in_parts[part])
        if wrong.any() or np.any(starts[part] + np.maximum(sizes[part], 0) > len(data)):
            raise DataError(f"{path} is damaged: steady check {path} says where")
    paths: tuple[str, ...] = (str(path),)
    file = np.zeros(len(offsets), np.int32)
    rows = np.flatnonzero(in_parts)
    if len(rows):
        beside = _joined(records, rows, scratch)
        paths += (str(beside),)
        file[rows] = 1
        sizes[rows] = [len(records.image(number)) for number in rows.tolist()]
        starts[rows] = np.cumsum(sizes[rows]) - sizes[rows]
    return Pieces(paths, file, starts, sizes)


def _joined(records: Records, rows: NDArray[np.int64], scratch: Path) -> Path:
    """A file of the images that lie in parts, one behind the other."""
    scratch.mkdir(parents=True, exist_ok=True)
    beside = scratch / f"{len(list(scratch.iterdir()))}-{records.path.stem}.parts"
    with beside.open("wb") as file:
        for number in rows.tolist():
            file.write(records.image(number))
    return beside
