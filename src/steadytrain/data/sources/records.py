"""Other record files as a source: their labels, ids and classes, and where in them the images lie.

An image that the format keeps in parts (it holds the magic number) is put together in the scratch folder; about one in
a hundred thousand photographs is.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from steadytrain.data.filenames import group_by_split, order_splits
from steadytrain.data.names import Names
from steadytrain.data.recordio.card import LabelNames
from steadytrain.data.recordio.framing import HEADER_BYTES, MAGIC, MAX_PAYLOAD
from steadytrain.data.recordio.reader import Records
from steadytrain.data.sources.labels import align_columns, classes_from_numbers, require_in_list, say_places
from steadytrain.data.sources.listing import Listing, Pieces
from steadytrain.data.sources.select import merge
from steadytrain.data.sources.source import Request, SourceKind
from steadytrain.data.storage.local_files import LocalFile
from steadytrain.data.storage.scratch import new_path
from steadytrain.errors import DataError
from steadytrain.format import Say

_BLOCK = 16384
_HEAD_WORDS = 3  # magic, cflag and length, number of labels


def list_records(request: Request) -> list[Listing]:
    """List one or several record files, in their order; those named ``...-train.rec``, ``...-val.rec`` as splits.

    Without classes the class list is that of the card, or of the cards together. Labels of a file whose classes have
    names, by its card or by the folders in the list beside it, are matched by these with the classes; those of any
    other are places in them. Images that lie in parts are put together in the scratch folder.

    Raises:
        DataError: a file is no record file, damaged or empty, or has label vectors where there are classes.
    """
    if request.is_folder:
        first = next(request.where / name for name in request.entries if name.lower().endswith(".rec"))
        raise DataError(f"{request.where} holds record files: give {first}, or all of them as '{request.where}/*.rec'")
    for file in request.files:
        if file.stored_at != file.path:
            raise DataError(
                f"{file.path} is a compressed record file: decompress it, with its .idx and .json beside it"
            )
    paths, where = request.paths, str(request.paths[0].parent)
    groups = group_by_split(paths, [path.name for path in paths], where) if len(paths) > 1 else {"": list(paths)}
    listings: list[Listing] = []
    for split, group in order_splits(groups).items():
        class_list = request.part(request.where, after=listings).classes or None
        parts = [_list_file(path, split, class_list, request.scratch, request.say) for path in group]
        listings.append(merge(parts) if len(parts) > 1 else parts[0])
    return listings


def _list_file(path: Path, split: str, class_list: Sequence[str] | None, scratch: Path, say: Say) -> Listing:
    with Records.open(path) as records:
        if not len(records):
            raise DataError(f"{path} holds no records")
        records.require_images(say)
        labels, classes, card = records.labels, records.classes, records.card
        label_names = card.label_names if card is not None else ()
        if labels.ndim == 1 and (class_list is not None or classes):
            numbers = labels.astype(np.int64)
            if class_list is None or records.names_among(class_list):
                classes, labels = classes_from_numbers(numbers, names=classes, classes=class_list, where=str(path))
            else:
                require_in_list(numbers, class_list, str(path))
                say_places(str(path), class_list, numbers, say)
                classes, labels = tuple(class_list), numbers
        elif isinstance(class_list, LabelNames) and labels.ndim > 1:
            labels = align_columns(labels, label_names, class_list, where=str(path))
            label_names = class_list
        elif class_list is not None:
            raise DataError(f"{path} has label vectors: --classes does not apply")
        pieces = _locate_images(path, records, scratch)
        in_order_of_classes = card is not None and card.by_class and not card.first_id and classes == card.classes
        return Listing(
            split=split,
            root=path,
            classes=classes,
            names=Names(records.names()),
            labels=labels.copy(),
            sizes=pieces.size,
            times=np.full(len(records), path.stat().st_mtime_ns, np.int64),
            ids=None if in_order_of_classes else np.array(records.record_ids),
            pieces=pieces,
            label_names=label_names,
        )


def _locate_images(path: Path, records: Records, scratch: Path) -> Pieces:
    with path.open("rb") as opened:
        data = LocalFile(path, opened.fileno())
    offsets = records.extents(np.arange(len(records))).offset
    starts, sizes = np.empty_like(offsets), np.empty_like(offsets)
    in_parts = np.zeros(len(offsets), np.bool_)
    for start in range(0, len(offsets), _BLOCK):
        part = slice(start, start + _BLOCK)
        heads: NDArray[np.int64] = data.gather(offsets[part], 4 * _HEAD_WORDS).view("<u4").astype(np.int64)
        before = HEADER_BYTES + 4 * heads[:, 2]
        starts[part] = offsets[part] + 8 + before
        sizes[part] = (heads[:, 1] & MAX_PAYLOAD) - before
        in_parts[part] = heads[:, 1] >> 29 != 0
        wrong = (heads[:, 0] != MAGIC) | ((sizes[part] < 0) & ~in_parts[part])
        if wrong.any() or np.any(starts[part] + np.maximum(sizes[part], 0) > len(data)):
            raise DataError(f"{path} is damaged: run steady check {path}")
    paths: tuple[str, ...] = (str(path),)
    file = np.zeros(len(offsets), np.int32)
    if len(rows := np.flatnonzero(in_parts)):
        joined = new_path(scratch, f"{path.stem}.parts")
        images = [records.image(number) for number in rows.tolist()]
        joined.write_bytes(b"".join(images))
        paths += (str(joined),)
        file[rows] = 1
        sizes[rows] = [len(image) for image in images]
        starts[rows] = np.cumsum(sizes[rows]) - sizes[rows]
    return Pieces(paths, file, starts, sizes)


def _are_records(request: Request) -> bool:
    if not request.is_folder:
        return request.kinds == {"rec"}
    return not request.has_folders and any(name.lower().endswith(".rec") for name in request.entries)


RECORDS = SourceKind("record files (.rec)", _are_records, list_records)
