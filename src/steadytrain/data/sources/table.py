"""CSV and TSV: a path and a label, or several, in each line.

One column of labels names classes; where its cells join several labels (``cat;dog``), or where several columns hold
numbers, labels are vectors. A column ``split`` takes the table apart.
"""

from __future__ import annotations

import csv
import os
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Protocol, TextIO

import numpy as np
from numpy.typing import NDArray

from steadytrain.data.sources import columns, joined, naming
from steadytrain.data.sources.columns import Columns
from steadytrain.data.sources.listing import SPLITS, Listing
from steadytrain.data.sources.lst import MOST_TOLD
from steadytrain.data.sources.members import Say, few
from steadytrain.data.sources.names import Names
from steadytrain.data.sources.splits import in_order
from steadytrain.errors import DataError

_SAMPLE = 200
_LONGEST_LINE = 1 << 20

Labels = NDArray[np.int64] | NDArray[np.float32]


class Places(Protocol):
    """Where the images are that a table names."""

    def listing(self, names: Sequence[str], labels: Labels, *, classes: tuple[str, ...], split: str) -> Listing: ...


def read_table(
    path: Path, places: Places, *, classes: Sequence[str] | None, say: Say, at: Path | None = None
) -> list[Listing]:
    """Read a table; the order is its own.

    Args:
        path: the table, as it was named.
        places: where its paths lead.
        classes: the class list; None makes one: words sorted by code point, whole numbers by their value.
        say: takes remarks.
        at: where its bytes lie, if not at ``path``.

    Returns:
        One listing, or one for each split, training set first; all with one class list.

    Raises:
        DataError: no UTF-8, malformed lines (named by number), columns that cannot be told apart, or an image with two
            labels.
    """
    lines = _Lines(at or path, path)
    try:
        sign = columns.delimiter(lines.sample())
        chosen = columns.choose([row for _, row in _first(lines.rows(sign))])
    except DataError as error:
        raise error if str(path) in str(error) else DataError(f"{path}: {error}") from None
    _remark(chosen, path, say)
    told = _Told(path)
    body = lines.rows(sign)
    if chosen.names:
        next(body)
    for number, row in body:
        told.add(number, row, chosen)
    told.finish(say)
    return _listings(told, chosen, places, classes, say)


@dataclass
class _Told:
    """What the lines say, in columns: of a million of them no object is kept."""

    path: Path
    names: Names = field(default_factory=Names)
    texts: list[str] = field(default_factory=list)
    numbers: array[float] = field(default_factory=lambda: array("f"))
    splits: list[str] = field(default_factory=list)
    _hashes: array[int] = field(default_factory=lambda: array("q"))
    _lines: array[int] = field(default_factory=lambda: array("q"))
    _known: dict[str, str] = field(default_factory=dict)
    _wrong: list[tuple[int, str]] = field(default_factory=list)

    def add(self, number: int, row: list[str], chosen: Columns) -> None:
        """Take one line in."""
        try:
            name, label, split = _cells(row, chosen)
        except ValueError as error:
            self._wrong.append((number, str(error)))
            return
        self.names.append(name)
        self.splits.append(split)
        self._hashes.append(hash(_key(name)))
        self._lines.append(number)
        if isinstance(label, str):
            self.texts.append(self._known.setdefault(label, label))
        else:
            self.numbers.extend(label)

    @property
    def vectors(self) -> NDArray[np.float32]:
        """float32[N, L]: the labels, where they are numbers in several columns."""
        return np.array(self.numbers, np.float32).reshape(len(self.names), -1)

    def finish(self, say: Say) -> None:
        """Take lines that stand twice once. Raises DataError for malformed lines, for contradictions, or for none."""
        repeated = self._repeated()
        if self._wrong:
            told = [f"line {number}: {what}" for number, what in sorted(self._wrong)]
            more = f" (and {len(told) - MOST_TOLD:,} more)" if len(told) > MOST_TOLD else ""
            raise DataError(f"{self.path}: {'; '.join(told[:MOST_TOLD])}{more}: mend the table")
        if not self.names:
            raise DataError(f"{self.path} lists no images")
        if repeated:
            self._drop(repeated)
            plural = "s repeat an earlier one and are" if len(repeated) > 1 else " repeats an earlier one and is"
            say(f"{self.path}: {len(repeated):,} line{plural} taken once")

    def _repeated(self) -> list[int]:
        """Rows that say what an earlier one says; those that say something else of the same image are wrong."""
        hashes = np.array(self._hashes, np.int64)
        order = np.argsort(hashes, kind="stable")
        starts = np.flatnonzero(np.diff(hashes[order], prepend=hashes[order][:1] - 1))
        sizes = np.diff(starts, append=len(order))
        found = []
        for group in np.flatnonzero(sizes > 1).tolist():
            first, *others = order[starts[group] : starts[group] + sizes[group]].tolist()
            for row in others:
                if _key(self.names[row]) != _key(self.names[first]):
                    continue
                if self._words(row) == self._words(first):
                    found.append(row)
                    continue
                what = f"{self._words(row)}, and {self._words(first)} in line {self._lines[first]}"
                self._wrong.append((self._lines[row], f"{self.names[row]} is {what}"))
        return found

    def _drop(self, rows: list[int]) -> None:
        kept = np.setdiff1d(np.arange(len(self.names)), rows)
        vectors = self.vectors[kept] if self.numbers else None
        self.numbers = array("f", [] if vectors is None else vectors.ravel())
        self.texts = [self.texts[row] for row in kept.tolist()] if self.texts else []
        self.splits = [self.splits[row] for row in kept.tolist()]
        self.names = self.names.take(kept)

    def _words(self, row: int) -> str:
        width = len(self.numbers) // len(self.names)
        label = self.texts[row] if self.texts else str(tuple(self.numbers[row * width : (row + 1) * width]))
        return f"{label}{f' ({self.splits[row]})' if self.splits[row] else ''}"


def _cells(row: list[str], chosen: Columns) -> tuple[str, str | tuple[float, ...], str]:
    if len(row) < chosen.width or any(cell.strip() for cell in row[chosen.width :]):
        raise ValueError(f"{len(row)} cell{'s' * (len(row) != 1)}, the first line has {chosen.width}")
    name = row[chosen.path].strip()
    if not name or "\0" in name:
        raise ValueError("the path is empty" if not name else "the path holds a zero byte")
    if "://" in name[:10]:
        raise ValueError(f"{name[:60]} is a web address: download the images first")
    if "./" in name or "//" in name:
        name = os.path.normpath(name)
    split = ""
    if chosen.split is not None and not (split := SPLITS.get(row[chosen.split].strip().casefold(), "")):
        raise ValueError(f"the split {row[chosen.split]!r} is not train, val or test")
    if len(chosen.labels) > 1:
        return name, tuple(_number(row[place].strip()) for place in chosen.labels), split
    label = row[chosen.labels[0]].strip()
    if not label:
        raise ValueError("the label is empty")
    return name, label, split


def _key(name: str) -> str:
    """What two spellings of one path have in common."""
    return name.replace("\\", "/").removeprefix("./")


def _remark(chosen: Columns, path: Path, say: Say) -> None:
    """Say what of a table was guessed, or goes unused."""
    if chosen.is_guess:
        say(f"{path}: the first line is taken for names of columns ({', '.join(chosen.names[:5])}), not for an image")
    if chosen.numbering is not None:
        say(f"{path}: column {chosen.numbering + 1} counts the lines and is not used")
    if chosen.unused:
        named = ", ".join(repr(chosen.names[place].strip()) for place in (chosen.path, *chosen.labels[:3]))
        say(f"{path}: paths and labels are read from {named}; not used: {', '.join(chosen.unused[:5])}")


def _number(text: str) -> float:
    if not columns.is_number(text):
        raise ValueError(f"the label {text!r} is not a number")
    return float(text)


def _listings(told: _Told, chosen: Columns, places: Places, given: Sequence[str] | None, say: Say) -> list[Listing]:
    where = str(told.path)
    classes, label_names, labels = _labels(told, chosen, given, where, say)
    splits = np.array(told.splits)
    found = {split: np.flatnonzero(splits == split) for split in dict.fromkeys(told.splits)}
    if "train" not in found:
        found = {"": np.arange(len(splits))} if len(found) == 1 else found
        if "" not in found:
            raise DataError(f"{where} has {' and '.join(sorted(found))} in its column of splits, but no train")
    return [
        replace(
            places.listing(told.names.take(rows), labels[rows], classes=classes, split=split), label_names=label_names
        )
        for split, rows in in_order(found, say, where).items()
    ]


def _labels(
    told: _Told, chosen: Columns, given: Sequence[str] | None, where: str, say: Say
) -> tuple[tuple[str, ...], tuple[str, ...], Labels]:
    """Class names, names of label columns, and labels: one of the two is empty."""
    vectors: NDArray[np.float32] | None = None
    names: tuple[str, ...] = chosen.label_names
    if told.numbers:
        vectors = told.vectors
    elif sign := joined.separator(told.texts, header=chosen.label_name, where=where):
        names, vectors = joined.to_vectors(told.texts, sign, where=where)
    elif all(map(columns.is_number, set(told.texts))) and None in map(naming.whole, set(told.texts)):
        vectors = np.array([float(text) for text in told.texts], np.float32)[:, None]
    if vectors is None:
        classes, labels = naming.from_texts(told.texts, classes=given, where=where)
        return classes, (), labels
    if given is not None:
        raise DataError(f"{where} has label vectors or labels that are no class numbers: --classes does not fit it")
    if names:
        say(f"{where}: several labels an image, in this order: {few(names, 20)}")
    return (), names, vectors


@dataclass(frozen=True)
class _Lines:
    """The lines of a text file, and its rows."""

    at: Path
    path: Path

    def sample(self) -> list[str]:
        """The first lines that are not blank."""
        found: list[str] = []
        for line in self._read():
            found += [line] if line.strip() else []
            if len(found) == _SAMPLE:
                break
        if not found:
            raise DataError(f"{self.path} lists no images")
        return found

    def rows(self, sign: str) -> Iterator[tuple[int, list[str]]]:
        """Line number and cells of each row that is not blank."""
        if sign == " ":
            yield from ((n, line.rsplit(None, 1)) for n, line in enumerate(self._read(), 1) if line.strip())
            return
        reader = csv.reader(self._read(), delimiter=sign, strict=True)
        try:
            for row in reader:
                if any(cell.strip() for cell in row):
                    yield reader.line_num, row
        except csv.Error as error:
            raise DataError(f"{self.path}: line {reader.line_num}: {error}: mend its quotes") from None

    def _read(self) -> Iterator[str]:
        try:
            with self.at.open(encoding="utf-8-sig", newline="") as file:
                yield from _bounded(file, self.path)
        except UnicodeDecodeError as error:
            form = "UTF-16" if self.at.read_bytes()[:2] in (b"\xff\xfe", b"\xfe\xff") else "LATIN1"
            raise DataError(
                f"{self.path} is no UTF-8 ({error.object[error.start]:#04x} stands in it): save it as UTF-8, or"
                f" iconv -f {form} -t UTF-8 {self.path.name} > utf8.csv"
            ) from None
        except OSError as error:
            raise DataError(f"cannot read {self.path}: {error.strerror}") from error


def _bounded(file: TextIO, path: Path) -> Iterator[str]:
    for number, line in enumerate(iter(partial(file.readline, _LONGEST_LINE), ""), 1):
        if len(line) == _LONGEST_LINE:
            raise DataError(f"{path}: line {number} is longer than {_LONGEST_LINE:,} letters: it is no table")
        yield "\n" if number == 1 and line[:4].lower() == "sep=" and len(line.strip()) < 6 else line  # Excel's hint


def _first(rows: Iterable[tuple[int, list[str]]]) -> Iterator[tuple[int, list[str]]]:
    return (row for row, _ in zip(rows, range(_SAMPLE), strict=False))
