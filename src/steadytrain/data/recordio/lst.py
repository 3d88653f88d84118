r"""The list beside a record file, MXNet's ``.lst``: which file each record was made of.

A line is ``index TAB label... TAB path``: the record's id, its labels as ``%f`` writes them (more digits where those
would change the number), and the path as the source spells it. What would break a line, a tab or a line's end within a
path, is written as ``\t``, ``\n`` or ``\r``, bytes that are not UTF-8 as ``\xe9``; nothing reads these back.

>>> format_line(7, 1, "cat/3.jpg")
'7\t1.000000\tcat/3.jpg\n'
>>> parse_line(format_line(7, [0.5, 1e-9], "a\tb.jpg"))
ListLine(id=7, labels=(0.5, 1e-09), path='a\\tb.jpg')
"""

from __future__ import annotations

import math
import unicodedata
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from steadytrain.data.names import Names
from steadytrain.data.recordio.index import RecordColumns
from steadytrain.errors import read_errors
from steadytrain.files import open_regular, require_regular
from steadytrain.format import printable, whole_number

LARGEST_LABEL = float(np.finfo(np.float32).max)

_LARGEST_EXACT = 1 << 24  # float32
_ESCAPES = str.maketrans({"\t": r"\t", "\n": r"\n", "\r": r"\r"})
_ROUNDING = 1e-6  # rounding of a label that six decimals write


class ListLine(NamedTuple):
    """A line of a ``.lst``: the image's id, its labels, and its path as written."""

    id: int
    labels: tuple[float, ...]
    path: str


def list_path(records: Path) -> Path:
    """Return where the ``.lst`` of a ``.rec`` lies."""
    return records.with_suffix(".lst")


def format_line(id_: int, labels: float | Sequence[float], name: str) -> str:
    """Write a line; labels are those of a record, numbers of 32 bits."""
    values = [labels] if isinstance(labels, int | float) else labels
    if not name.isprintable():
        name = printable(name).translate(_ESCAPES)
    return "\t".join((str(id_), *map(_format_label, values), name)) + "\n"


@lru_cache(maxsize=4096)
def _format_label(value: float) -> str:
    text = f"{value:f}"
    return text if np.float32(text) == np.float32(value) else f"{value:.9g}"


def parse_line(line: str) -> ListLine:
    r"""Parse a line of a ``.lst``: ``index TAB label... TAB path``.

    Raises:
        ValueError: what is wrong with it.

    >>> parse_line("7\t1.000000\tcat/a b.jpg\n")
    ListLine(id=7, labels=(1.0,), path='cat/a b.jpg')
    >>> parse_line("7 \t 1 \t cat/a b.jpg \n").path
    'cat/a b.jpg'
    >>> parse_line("7 1 cat.jpg")
    Traceback (most recent call last):
    ValueError: 1 field separated by tabs, at least 3 are needed (index, label, path)
    """
    fields = line.rstrip("\r\n").split("\t")
    if len(fields) < 3:
        plural = "s" * (len(fields) > 1)
        raise ValueError(f"{len(fields)} field{plural} separated by tabs, at least 3 are needed (index, label, path)")
    index, *texts, path = (field.strip() for field in fields)  # as MXNet's im2rec does
    if whole_number(index) is None:
        raise ValueError(f"the index {index!r} is not a whole number of 0 or more")
    if not path:
        raise ValueError("the path is empty")
    labels = []
    for text in texts:
        try:
            labels.append(float(text))
        except ValueError:
            labels.append(math.nan)
        if not abs(labels[-1]) <= LARGEST_LABEL:
            raise ValueError(f"the label {text!r} is not a number that fits into a record")
    return ListLine(int(index), tuple(labels), path)


def name_by_folders(labels: NDArray[np.int64], paths: Iterable[str]) -> tuple[str, ...]:
    """Name class numbers by the folders of their images, which lists of ``im2rec`` have in their paths.

    Args:
        labels: int64[N], 0 or more.
        paths: of N images.

    Returns:
        A name for each number from 0 to the largest; none where a number has two folders, a folder two numbers, or a
        number no image.

    >>> name_by_folders(np.array([0, 1, 2, 2]), ["1/a.jpg", "10/b.jpg", "2/c.jpg", "2/d.jpg"])
    ('1', '10', '2')
    >>> name_by_folders(np.array([0, 1]), ["a.jpg", "b.jpg"])
    ()
    """
    pairs = set(zip(labels.tolist(), (path.replace("\\", "/").rpartition("/")[0] for path in paths), strict=True))
    folders = {int(label): folder.rpartition("/")[2] for label, folder in pairs}
    one_to_one = len(pairs) == len(folders) == len(set(folders.values())) == max(folders, default=-1) + 1
    if not one_to_one or not all(folders.values()):
        return ()
    return tuple(unicodedata.normalize("NFC", printable(folders[label])) for label in sorted(folders))


def require_exact(label: float) -> float:
    """Return a label. Raises ValueError for a whole number that the 32 bits of a record would turn into another one."""
    if abs(label) > _LARGEST_EXACT and label.is_integer() and float(np.float32(label)) != label:
        raise ValueError(
            f"the label {label:.0f} would be stored as {float(np.float32(label)):.0f} (float32 holds every whole number"
            f" up to {_LARGEST_EXACT:,}): number the labels from 0"
        )
    return label


def read_lines(path: Path) -> Iterator[tuple[int, ListLine | ValueError]]:
    """Yield the number of each line of a ``.lst`` that is not blank, with the line, or what is wrong with it.

    Raises:
        OSError: the file cannot be read.
    """
    require_regular(path)
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="\n") as file:
        for number, text in enumerate(file, 1):
            if text.strip():
                try:
                    line: ListLine | ValueError = parse_line(text)
                except ValueError as error:
                    line = error
                yield number, line


def read_list_columns(path: Path, count: int, width: int) -> RecordColumns | None:
    """Read ids and labels of a list, in a quarter of the time of :meth:`RecordList.read`; None: it cannot be read so.

    Args:
        count: lines that it should have, one for each record.
        width: labels of each line.
    """
    ids, labels = array("q"), array("f")
    try:
        with open_regular(path) as file:
            for line in file:
                index, *texts, _ = line.split(b"\t", width + 1)
                ids.append(int(index))
                labels.extend(map(float, texts))
    except (OSError, ValueError, OverflowError):
        return None
    if len(ids) != count or len(labels) != count * width:
        return None
    return RecordColumns(np.array(ids, np.int64), np.array(labels, np.float32).reshape(count, width))


@dataclass(frozen=True, eq=False)
class RecordList:
    """The lines of a list, in columns.

    Args:
        ids: int64[N], the index of each line.
        labels: float32, those of all lines.
        ends: int64[N + 1], where the labels of each line end, behind a 0.
        names: paths as written.
    """

    ids: NDArray[np.int64]
    labels: NDArray[np.float32]
    ends: NDArray[np.int64]
    names: Names

    @staticmethod
    def read(path: Path) -> RecordList:
        """Read a list, without lines that are none, which MXNet's readers skip as well.

        Raises:
            DataError: there is no such file, or it cannot be read.
        """
        ids, labels, ends, names = array("q"), array("f"), array("q", [0]), Names()
        with read_errors(path):
            for _, line in read_lines(path):
                if isinstance(line, ValueError):
                    continue
                ids.append(line.id)
                labels.extend(line.labels)
                ends.append(len(labels))
                names.append(line.path)
        return RecordList(np.array(ids, np.int64), np.array(labels, np.float32), np.array(ends), names)

    @cached_property
    def _order(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        order = np.argsort(self.ids, kind="stable")
        return order, self.ids[order]

    def lines_of(self, ids: NDArray[np.int64] | NDArray[np.uint64], labels: NDArray[np.float32]) -> NDArray[np.int64]:
        """Return the line of each record with this id and these labels, int64[n]; -1 where it is not known.

        ``labels``: float32[n, L]; one label has to be a line's first: ``im2rec`` stores no more unless it is asked to.
        """
        order, ordered = self._order
        if not len(order):
            return np.full(len(ids), -1)
        signed, width = ids.astype(np.int64), labels.shape[1]
        at = np.minimum(np.searchsorted(ordered, signed), len(order) - 1)
        is_single = np.searchsorted(ordered, signed, side="right") - np.searchsorted(ordered, signed) == 1
        rows = order[at]
        listed = self.labels[np.minimum(self.ends[rows][:, None] + np.arange(width), len(self.labels) - 1)]
        agree = np.isclose(listed, labels, rtol=_ROUNDING, atol=_ROUNDING).all(axis=1)
        if width > 1:
            agree &= np.diff(self.ends)[rows] == width
        return np.where(is_single & agree & (ids < 2**63), rows, -1)

    def name(self, id_: int, labels: Sequence[float]) -> str:
        """Return the path of the image that a record with this id and these labels was made of; empty if unknown."""
        row = int(self.lines_of(np.array([id_], np.int64), np.array([labels], np.float32))[0]) if id_ < 2**63 else -1
        return printable(self.names[row]) if row >= 0 else ""


def describe_record(number: int, path: object, name: str) -> str:
    """Name a record in a message, with its file where that is known.

    >>> describe_record(17, "x.rec", "cats/3.jpg"), describe_record(1700, "x.rec", "")
    ('record 17 of x.rec (cats/3.jpg)', 'record 1700 of x.rec')
    """
    return f"record {number} of {path}{f' ({name})' if name else ''}"
