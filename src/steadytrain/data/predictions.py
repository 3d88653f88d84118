"""What a network predicted for each image of a data set: a CSV file that an evaluation writes and reports read.

A line for each image, in the order of the data set: the ``file`` that it was packed from, where a ``.lst`` beside the
records names it; the record file (``shard``) and the number of the ``record`` in it, from 0; the ``true`` and the
``predicted`` class, with the probability of both; the cross-entropy ``loss``; and the ``rank`` of the true class, 1
where the prediction is right.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from steadytrain.data.recordio.reader import Records
from steadytrain.errors import DataError, InputError, storage_error

MOST_LINES = 65_536
"""Lines that are put together at a time: a million images take no more memory than these."""


class ImageResult(NamedTuple):
    """What was predicted for one image: a line of the file."""

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
) -> None:
    """Write a line for each image, whole or not at all.

    Args:
        path: the file; one of that name is replaced.
        records: that were evaluated.
        ids: int64[N], the record of each image.
        classes: names, in the order of the labels.
        outputs: float32[N, 4]: predicted class, its probability, loss, rank of the true class.
        labels: int64[N], the true class of each image; None: the records' labels.

    Raises:
        StorageError: it cannot be written.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("w", encoding="utf-8", errors="surrogateescape", newline="") as file:
            lines = csv.writer(file, lineterminator="\n")
            lines.writerow(ImageResult._fields)
            for first in range(0, len(ids), MOST_LINES):
                numbers = ids[first : first + MOST_LINES]
                true = (records.labels[numbers] if labels is None else labels[first : first + MOST_LINES]).tolist()
                values = outputs[first : first + MOST_LINES].astype(np.float64)
                p_true = np.exp(-values[:, 2]).tolist()
                for place, label, p, row in zip(records.places(numbers), true, p_true, values.tolist(), strict=True):
                    predicted, p_predicted, loss, rank = row
                    figures = (f"{p:.6g}", f"{p_predicted:.6g}", f"{loss:.6g}", int(rank))
                    lines.writerow((*place, classes[label], classes[int(predicted)], *figures))
        part.replace(path)
    except OSError as error:
        raise storage_error(error, path) from error
    finally:
        part.unlink(missing_ok=True)


def read_predictions(path: Path) -> Iterator[ImageResult]:
    """Yield the lines of such a file. Raises DataError where it is none, or damaged."""
    try:
        with path.open(encoding="utf-8", errors="surrogateescape", newline="") as file:
            lines = csv.reader(file)
            if next(lines, None) != list(ImageResult._fields):
                raise DataError(f"{path} does not begin with the columns {HEAD}: write it again")
            for row in lines:
                try:
                    name, shard, record, true, predicted, p_true, p_predicted, loss, rank = row
                    values = float(p_true), float(p_predicted), float(loss)
                    yield ImageResult(name, shard, int(record), true, predicted, *values, int(rank))
                except ValueError:
                    raise DataError(f"line {lines.line_num} of {path} is damaged: write the file again") from None
    except (OSError, csv.Error) as error:
        raise DataError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error


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
        with path.open("rb") as file:
            start = file.read(len(HEAD))
        if start not in (b"", HEAD.encode()):
            raise InputError(f"{path} exists and is no list of predictions: choose another file for --per-image")
