"""Predictions for each image of a data set: a CSV file that an evaluation writes and reports read.

A line for each image, in the order of the data set: the ``file`` that it was packed from, where a ``.lst`` beside the
records names it; the record file (``shard``) and the number of the ``record`` in it, from 0; the ``true`` and the
``predicted`` class, with the probability of both; the cross-entropy ``loss``; and the ``rank`` of the true class, 1
where the prediction is right.

Where images may have several labels, ``true`` and ``predicted`` hold those of an image, joined by ``;``, ``wrong`` says
for how many labels the prediction is not what the image has, and a column for each label its probability.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from steadytrain.data.recordio.reader import Records
from steadytrain.errors import DataError, InputError
from steadytrain.files import open_regular, open_text, replacing

MOST_LINES = 65_536
"""Lines that are put together at a time: a million images take no more memory than these."""


class ImageResult(NamedTuple):
    """The prediction for one image: a line of the file."""

    file: str
    shard: str
    record: int
    true: str
    predicted: str
    p_true: float
    p_predicted: float
    loss: float
    rank: int


HEAD = ",".join(ImageResult._fields)


def write_predictions(
    path: Path,
    records: Records,
    ids: NDArray[np.int64],
    classes: Sequence[str],
    outputs: NDArray[np.float32],
    *,
    labels: NDArray[np.int64] | None = None,
    folds: NDArray[np.int64] | None = None,
) -> None:
    """Write a line for each image, whole or not at all.

    Args:
        path: the file; one of that name is replaced.
        ids: int64[N], the record of each image.
        classes: names, in the order of the labels.
        outputs: float32[N, 4]: predicted class, its probability, loss, rank of the true class.
        labels: int64[N], the true class of each image; None: the records' labels.
        folds: int64[N], for one more column: the fold of each image, whose classifier was fitted to the others.

    Raises:
        StorageError: it cannot be written.
    """

    def cells(part: slice) -> Iterator[Sequence[object]]:
        true = (records.labels[ids[part]] if labels is None else labels[part]).tolist()
        values = outputs[part].astype(np.float64)
        more = [()] * len(true) if folds is None else zip(folds[part].tolist())
        for label, p, row, fold in zip(true, np.exp(-values[:, 2]).tolist(), values.tolist(), more, strict=True):
            predicted, p_predicted, loss, rank = row
            figures = (f"{p:.6g}", f"{p_predicted:.6g}", f"{loss:.6g}", int(rank))
            yield classes[label], classes[int(predicted)], *figures, *fold

    _write_table(path, [*ImageResult._fields, *([] if folds is None else ["fold"])], records, ids, cells)


LABELS_HEAD = ("file", "shard", "record", "true", "predicted", "wrong")
"""The first columns where images may have several labels; one for each label follows."""


def write_label_predictions(
    path: Path,
    records: Records,
    ids: NDArray[np.int64],
    classes: Sequence[str],
    probabilities: NDArray[np.float64],
    labels: NDArray[Any],
    *,
    threshold: float = 0.5,
) -> None:
    """Write a line for each image that may have several labels, whole or not at all.

    Args:
        path, records, ids: as of :func:`write_predictions`.
        probabilities: float64[N, L].
        labels: [N, L], 1 for each label that an image has.
        threshold: a label with a probability above it is predicted.

    Raises:
        StorageError: it cannot be written.
    """
    names = np.array(classes, object)

    def cells(part: slice) -> Iterator[Sequence[object]]:
        for p, has_label in zip(probabilities[part], labels[part] > 0, strict=True):
            predicted = p > threshold
            words = (";".join(names[has_label]), ";".join(names[predicted]), int((predicted != has_label).sum()))
            yield *words, *(f"{value:.6g}" for value in p.tolist())

    _write_table(path, (*LABELS_HEAD, *classes), records, ids, cells)


def _write_table(
    path: Path,
    head: Sequence[str],
    records: Records,
    ids: NDArray[np.int64],
    cells: Callable[[slice], Iterable[Sequence[object]]],
) -> None:
    """Write a CSV file whole or not at all: a line for each image, where it lies and its cells. Raises StorageError."""
    with replacing(path) as part, part.open("w", encoding="utf-8", errors="surrogateescape", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(head)
        for first in range(0, len(ids), MOST_LINES):
            block = slice(first, first + MOST_LINES)
            places = records.places(ids[block])
            writer.writerows((*place, *more) for place, more in zip(places, cells(block), strict=True))


def read_predictions(path: Path) -> Iterator[ImageResult]:
    """Yield the lines of such a file. Raises DataError where it is none, or damaged."""
    try:
        with open_text(path, errors="surrogateescape", newline="") as file:
            lines = csv.reader(file)
            head = next(lines, None)
            if head is not None and tuple(head[: len(LABELS_HEAD)]) == LABELS_HEAD:
                raise DataError(f"{path} is of images with several labels each, and one class for each is needed here")
            if head not in (list(ImageResult._fields), [*ImageResult._fields, "fold"]):
                raise DataError(f"{path} does not begin with the columns {HEAD}: write it again")
            for row in lines:
                try:
                    name, shard, record, true, predicted, p_true, p_predicted, loss, rank, *_ = row
                    values = float(p_true), float(p_predicted), float(loss)
                    yield ImageResult(name, shard, int(record), true, predicted, *values, int(rank))
                except ValueError:
                    raise DataError(f"line {lines.line_num} of {path} is damaged: write the file again") from None
    except (OSError, csv.Error) as error:
        raise DataError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error


def read_label_predictions(path: Path) -> tuple[list[str], NDArray[np.bool_], NDArray[np.float64]]:
    """Read the names of labels, bool[N, L] which an image has, and float64[N, L] their probabilities.

    Raises:
        DataError: the file cannot be read, is of images with one class each, or damaged.
    """
    start = len(LABELS_HEAD)
    try:
        with open_text(path, errors="surrogateescape", newline="") as file:
            lines = csv.reader(file)
            head = next(lines, [])
            if tuple(head[:start]) != LABELS_HEAD:
                raise DataError(f"{path} does not begin with the columns {','.join(LABELS_HEAD)}: write it again")
            names = head[start:]
            has_label, probabilities = [], []
            for row in lines:
                try:
                    probabilities.append(np.array(row[start:], np.float64))
                    if len(row) != len(head):
                        raise ValueError
                except ValueError:
                    raise DataError(f"line {lines.line_num} of {path} is damaged: write the file again") from None
                true = set(row[3].split(";"))
                has_label.append([name in true for name in names])
    except (OSError, csv.Error) as error:
        raise DataError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    shape = (len(has_label), len(names))
    return names, np.array(has_label, np.bool_).reshape(shape), np.array(probabilities, np.float64).reshape(shape)


def require_writable(path: Path) -> None:
    """Refuse a file that predictions cannot go to, before anything is evaluated.

    Raises:
        InputError: another ending than ``.csv``, no such folder, or another file of that name.
    """
    if path.suffix.lower() != ".csv":
        raise InputError(f"--per-image {path} ends in {path.suffix or 'nothing'}: it is a CSV file, name it so (.csv)")
    if not path.parent.is_dir():
        raise InputError(f"the folder {path.parent} does not exist: make it, or choose another file for --per-image")
    if path.exists():
        with open_regular(path) as file:
            start = file.read(len(HEAD))
        if start not in (b"", HEAD.encode()) and not start.startswith(",".join(LABELS_HEAD).encode()):
            raise InputError(f"{path} exists and is no list of predictions: choose another file for --per-image")
