"""MXNet's ``.lst``: a line ``index TAB label... TAB path`` for each image."""

from __future__ import annotations

import math
import os
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from steadytrain.data.recordio.reader import MOST_CLASSES
from steadytrain.data.sources.listing import Listing
from steadytrain.data.sources.located import locate
from steadytrain.data.sources.names import Names
from steadytrain.errors import DataError

MOST_TOLD = 5
LARGEST_LABEL = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True)
class Line:
    """One line: the image's id, its labels, and its path as written."""

    id: int
    labels: tuple[float, ...]
    path: str


def parse(line: str) -> Line:
    r"""Take one line apart.

    Raises:
        ValueError: what is wrong with it.

    >>> parse("7\t1.000000\tcat/a b.jpg\n")
    Line(id=7, labels=(1.0,), path='cat/a b.jpg')
    >>> parse("7 1 cat.jpg")
    Traceback (most recent call last):
    ValueError: 1 field separated by tabs, at least 3 are needed (index, label, path)
    """
    fields = line.rstrip("\r\n").split("\t")
    if len(fields) < 3:
        plural = "s" * (len(fields) > 1)
        raise ValueError(f"{len(fields)} field{plural} separated by tabs, at least 3 are needed (index, label, path)")
    index, *labels, path = fields
    if not index.strip().isascii() or not index.strip().isdigit() or int(index) >= 2**63:
        raise ValueError(f"the index {index!r} is not a whole number from 0 on")
    if not path:
        raise ValueError("the path is empty")
    return Line(int(index), tuple(_number(label) for label in labels), path)


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if math.isnan(value) or abs(value) > LARGEST_LABEL:
        raise ValueError(f"the label {text!r} is not a number that a record can hold")
    return value


def read_list(path: Path, *, root: Path | None = None, classes: Sequence[str] | None = None) -> Listing:
    """Read a ``.lst``. The order, ids and labels are the list's own.

    One whole number from 0 on for each image is its class. Classes are named by ``classes``; or by the folders of the
    images, where each label has one folder and each folder one label; or else by their numbers.

    Args:
        path: the list.
        root: the folder that its paths start from; None: the list's own.
        classes: class names in the order of their labels.

    Raises:
        DataError: the file cannot be read, lines are malformed or contradict each other (named by number), or labels
            are not in ``classes``.
    """
    root = path.parent if root is None else root
    if not root.is_dir():
        raise DataError(
            f"there is no folder {root}: give the folder that the paths of {path.name} start from as --root"
        )
    written, ids, table = _read(path)
    labels = _labels(table)
    names, sizes, times = _locate(root, written)
    return Listing(
        split="",
        root=root,
        classes=_classes(path, labels, names, classes),
        names=names,
        labels=labels,
        sizes=sizes,
        times=times,
        ids=ids,
    )


def _read(path: Path) -> tuple[Names, NDArray[np.int64], NDArray[np.float32]]:
    """Paths, ids and labels (float32[N, L]), in columns: a million lines are no objects."""
    names, ids, numbers, labels = Names(), array("q"), array("q"), array("f")
    wrong: list[str] = []
    width = 0
    for number, text in _texts(path):
        try:
            line = parse(text)
            if names and len(line.labels) != width:
                raise ValueError(f"{len(line.labels)} labels, the lines before have {width}")
        except ValueError as error:
            wrong.append(f"line {number}: {error}")
            continue
        width = len(line.labels)
        names.append(os.path.join("", line.path))  # noqa: PTH118
        ids.append(line.id)
        numbers.append(number)
        labels.extend(line.labels)
    wrong += _repeated(np.array(ids, np.int64), np.array(numbers, np.int64))
    if not wrong and names:
        wrong += _contradictions(names, np.array(labels, np.float32).reshape(-1, width), numbers)
    if wrong:
        more = f" (and {len(wrong) - MOST_TOLD} more)" if len(wrong) > MOST_TOLD else ""
        raise DataError(f"{path}: {'; '.join(wrong[:MOST_TOLD])}{more}: mend the list")
    if not names:
        raise DataError(f"{path} lists no images")
    return names, np.array(ids, np.int64), np.array(labels, np.float32).reshape(-1, width)


def _repeated(ids: NDArray[np.int64], numbers: NDArray[np.int64]) -> list[str]:
    """What is to be told of ids that stand in several lines."""
    order = np.argsort(ids, kind="stable")
    again = np.flatnonzero(np.diff(ids[order]) == 0) + 1
    first = np.searchsorted(ids[order], ids[order][again])
    rows = zip(order[again].tolist(), order[first].tolist(), strict=True)
    return [f"line {numbers[row]}: index {ids[row]} stands in line {numbers[at]} already" for row, at in sorted(rows)]


def _contradictions(names: Names, labels: NDArray[np.float32], numbers: Sequence[int]) -> list[str]:
    """What is to be told of images that stand in several lines with different labels."""
    hashes = np.fromiter((hash(os.path.normpath(name)) for name in names), np.int64, len(names))
    order = np.argsort(hashes, kind="stable")
    again = np.flatnonzero(np.diff(hashes[order]) == 0) + 1
    found = []
    for row, before in sorted(zip(order[again].tolist(), order[again - 1].tolist(), strict=True)):
        if np.array_equal(labels[row], labels[before]) or os.path.normpath(names[row]) != os.path.normpath(
            names[before]
        ):
            continue
        now, then = (", ".join(f"{value:g}" for value in labels[one].tolist()) for one in (row, before))
        found.append(f"line {numbers[row]}: {names[row]} has label {now}, and {then} in line {numbers[before]}")
    return found


def _texts(path: Path) -> Iterator[tuple[int, str]]:
    try:
        with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="\n") as file:
            yield from ((number, text) for number, text in enumerate(file, 1) if text.strip())
    except FileNotFoundError:
        raise DataError(f"there is no list {path}") from None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error


def _labels(table: NDArray[np.float32]) -> NDArray[np.int64] | NDArray[np.float32]:
    single = table[:, 0]
    if table.shape[1] == 1 and np.all((single >= 0) & (single == np.floor(single)) & (single < 2**24)):
        return single.astype(np.int64)
    return table


def _classes(
    path: Path, labels: NDArray[np.int64] | NDArray[np.float32], names: Names, given: Sequence[str] | None
) -> tuple[str, ...]:
    if labels.ndim > 1:
        if given is not None:
            raise DataError(f"{path} has label vectors or labels that are no class numbers: --classes does not fit it")
        return ()
    largest = int(labels.max())
    if given is not None:
        if largest >= len(given):
            raise DataError(f"{path} has label {largest}; the class list ends at {len(given) - 1} ({given[-1]})")
        return tuple(given)
    if largest >= MOST_CLASSES:
        raise DataError(f"{path} has label {largest:,}; {MOST_CLASSES:,} classes are the most: number them from 0 on")
    if len(np.unique(labels)) < 2:
        raise DataError(f"{path} has only one class (every label is {largest}): a classifier needs two or more")
    return _folder_names(labels, names) or tuple(str(number) for number in range(largest + 1))


def _folder_names(labels: NDArray[np.int64] | NDArray[np.float32], names: Names) -> tuple[str, ...] | None:
    """Folder names as class names, where labels and folders go together one by one."""
    pairs = set(zip(map(int, labels), (os.path.dirname(name) for name in names), strict=True))  # noqa: PTH120
    last = {label: os.path.basename(folder) for label, folder in pairs}  # noqa: PTH119
    one_to_one = len(pairs) == len(last) == len(set(last.values())) == max(last) + 1
    return tuple(last[label] for label in sorted(last)) if one_to_one and all(last.values()) else None


def _locate(root: Path, written: Names) -> tuple[Names, NDArray[np.int64], NDArray[np.int64]]:
    """Names, sizes and times of the files; of those that are missing -1 and 0."""
    names = Names()
    sizes, times = np.empty(len(written), np.int64), np.empty(len(written), np.int64)
    for number, name in enumerate(written):
        told, sizes[number], times[number] = locate(root, name)
        names.append(told)
    return names, sizes, times
