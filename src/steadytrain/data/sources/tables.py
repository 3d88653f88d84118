"""Lists and tables of images: MXNet's ``.lst``, CSV and TSV, each line a path and a label, or several.

A table's columns are found by its header if it has one, else by what stands in them. One column of labels names
classes; where its cells join several labels (``cat;dog``), or where several columns hold numbers, labels are vectors. A
column ``split`` takes the table apart.
"""

from __future__ import annotations

import csv
import os
import re
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from steadytrain.data.recordio.card import LabelNames
from steadytrain.data.recordio.lst import read_lines
from steadytrain.data.recordio.reader import MOST_CLASSES
from steadytrain.data.sources.filenames import SPLITS, few, is_image, order_splits, repeated
from steadytrain.data.sources.labels import (
    align_columns,
    classes_from_texts,
    is_number,
    label_separator,
    multi_hot,
    require_in_list,
    whole_number,
)
from steadytrain.data.sources.listing import Labels, Listing, Names, Say
from steadytrain.data.sources.paths import ImagesInArchives, ImagesInFolder
from steadytrain.errors import DataError, did_you_mean

# Names of columns, in the order of preference.
PATHS = (
    *("path", "filepath", "file_path", "filepaths", "image_path", "img_path", "filename", "file_name", "file", "files"),
    *("image", "images", "img", "image_name", "img_name", "image_file", "image_id", "imageid", "img_id", "id", "name"),
)
LABELS = (
    *("label", "labels", "class", "class_name", "classname", "category", "category_name", "target", "breed", "species"),
    *("diagnosis", "tag", "tags", "classes", "categories", "class_label", "label_name", "y"),
    *("class_id", "label_id", "category_id"),
)
SPLIT = ("split", "set", "subset", "partition", "phase", "usage", "data_set", "dataset")
DELIMITERS = "\t,;|"

_NUMBERING = frozenset(["", "id", "index", "idx", "unnamed:_0"])
_FOLDER = re.compile(r"[^./\\][/\\][^/\\]+$")  # the end of a path that has one
_MOST_ERRORS = 5
_SAMPLE = 200
_LONGEST_LINE = 1 << 20
_NO_CLASSES = "has label vectors or labels that are not class numbers: --classes does not apply"


def is_of_paths(path: Path) -> bool:
    """Whether a ``.lst`` is no more than paths, whose folders are classes."""
    try:
        with path.open(encoding="utf-8-sig", errors="surrogateescape") as file:
            first = next((line for line in islice(file, _SAMPLE) if line.strip()), "").strip()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    return is_image(first) and "\t" not in first and not first.partition(" ")[0].isdigit()


def read_list(
    path: Path,
    *,
    root: Path | None = None,
    prefixes: Sequence[str] | None = None,
    classes: Sequence[str] | None = None,
    say: Say = lambda _: None,
) -> Listing:
    """Read a ``.lst``. The order, ids and labels are the list's own.

    One whole number from 0 on for each image is its class. Classes are named by ``classes``; or by the folders of the
    images, where each label has one folder and each folder one label; or else by their numbers.

    Args:
        path: the list.
        root: the folder that its paths start from; None: the list's own.
        prefixes: as for :class:`~steadytrain.data.sources.paths.ImagesInFolder`.
        classes: class names in the order of their labels.
        say: takes a line about paths that are read in another way than they are written.

    Raises:
        DataError: the file cannot be read, lines are malformed or contradict each other (named by number), or labels
            are not in ``classes``.
    """
    root = path.parent if root is None else root
    images = ImagesInFolder(root, table=path, prefixes=prefixes, say=say)
    written, ids, numbers, values = Names(), array("q"), array("q"), array("f")
    wrong: list[tuple[int, str]] = []
    width = 0
    try:
        for number, line in read_lines(path):
            if isinstance(line, ValueError):
                wrong.append((number, str(line)))
                continue
            if written and len(line.labels) != width:
                wrong.append((number, f"{len(line.labels)} labels, but the lines before have {width}"))
                continue
            width = len(line.labels)
            written.append(line.path)
            ids.append(line.id)
            numbers.append(number)
            values.extend(line.labels)
    except FileNotFoundError:
        raise DataError(f"there is no list {path}") from None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    vectors = np.array(values, np.float32).reshape(len(written), width)
    _, places, inverse = np.unique(np.array(ids, np.int64), return_index=True, return_inverse=True)
    firsts = places[inverse]
    for row in np.flatnonzero(firsts != np.arange(len(ids))).tolist():
        wrong.append((numbers[row], f"index {ids[row]} already appears in line {numbers[int(firsts[row])]}"))
    if not wrong:
        _repeated_rows(written, numbers, lambda row: ", ".join(f"{value:g}" for value in vectors[row].tolist()), wrong)
    _refuse_wrong(path, written, wrong, "list")
    single = vectors[:, 0]
    is_class = width == 1 and bool(np.all((single >= 0) & (single == np.floor(single)) & (single < 2**24)))
    labels: Labels = single.astype(np.int64) if is_class else vectors
    names, sizes, times = images.locate(written)
    if labels.ndim > 1 and isinstance(classes, LabelNames):
        labels = align_columns(labels, (), classes, where=str(path))
        return Listing("", root, (), names, labels, sizes, times, np.array(ids), label_names=classes)
    return Listing("", root, _name_classes(path, labels, names, classes), names, labels, sizes, times, np.array(ids))


def _repeated_rows(
    names: Names, numbers: Sequence[int], label: Callable[[int], str], wrong: list[tuple[int, str]]
) -> list[int]:
    """Rows that repeat an earlier one, whose label is the same; one with another label goes to ``wrong``."""
    again = []
    for row, before in repeated(names, lambda name: os.path.normpath(name.replace("\\", "/"))):
        if label(row) == label(before):
            again.append(row)
        else:
            text = f"{names[row]} has label {label(row)}, and {label(before)} in line {numbers[before]}"
            wrong.append((numbers[row], text))
    return again


def _refuse_wrong(path: Path, names: Names, wrong: Sequence[tuple[int, str]], kind: str) -> None:
    if wrong:
        errors = [f"line {number}: {text}" for number, text in sorted(wrong)]
        more = f" (and {len(errors) - _MOST_ERRORS:,} more)" if len(errors) > _MOST_ERRORS else ""
        raise DataError(f"{path}: {'; '.join(errors[:_MOST_ERRORS])}{more}: fix the {kind}")
    if not names:
        raise DataError(f"{path} lists no images")


def _name_classes(path: Path, labels: Labels, names: Names, classes: Sequence[str] | None) -> tuple[str, ...]:
    if labels.ndim > 1:
        if classes is not None:
            raise DataError(f"{path} {_NO_CLASSES}")
        return ()
    if classes is not None:
        require_in_list(labels, classes, str(path))
        return tuple(classes)
    largest = int(labels.max())
    if largest >= MOST_CLASSES:
        raise DataError(
            f"{path} has label {largest:,}; at most {MOST_CLASSES:,} classes are possible: number them from 0"
        )
    if len(np.unique(labels)) < 2:
        raise DataError(f"{path} has only one class (every label is {largest}): a classifier needs at least two")
    # Folder names, where labels and folders go together one by one.
    pairs = set(zip(labels.tolist(), (os.path.dirname(name) for name in names), strict=True))  # noqa: PTH120
    folders = {int(label): os.path.basename(folder) for label, folder in pairs}  # noqa: PTH119
    one_to_one = len(pairs) == len(folders) == len(set(folders.values())) == max(folders) + 1
    if one_to_one and all(folders.values()):
        return tuple(folders[label] for label in sorted(folders))
    return tuple(str(number) for number in range(largest + 1))


@dataclass(frozen=True)
class Columns:
    """What each column of a table is."""

    names: tuple[str, ...]  # of all columns; empty without a header
    width: int
    path: int
    labels: tuple[int, ...]  # the label's column; several, each a number; or none, and folders are the classes
    split: int | None = None
    group: int | None = None
    numbering: int | None = None  # numbers the lines, where no header says so
    is_guess: bool = False  # the first line is taken for a header only because its path is none

    def cells(self, row: list[str]) -> tuple[str, str | tuple[float, ...], str]:
        """The path, the label or labels, and the split in a row; an empty label may mean that an image has none.

        Raises ValueError: what is wrong with it.
        """
        if len(row) < self.width or any(cell.strip() for cell in row[self.width :]):
            raise ValueError(f"{len(row)} cell{'s' * (len(row) != 1)}, the first line has {self.width}")
        name = row[self.path].strip()
        if not name or "\0" in name:
            raise ValueError("the path is empty" if not name else "the path holds a zero byte")
        name = name.removeprefix("file://")
        if "://" in name[:10]:
            raise ValueError(f"{name[:60]} is a web address: download the images first")
        if "./" in name or "//" in name:
            name = os.path.normpath(name)
        split = ""
        if self.split is not None and not (split := SPLITS.get(row[self.split].strip().casefold(), "")):
            raise ValueError(f"the split {row[self.split]!r} is not train, val or test")
        labels = [row[place].strip() for place in self.labels]
        if not labels:
            labels = ["", *name.replace("\\", "/").split("/")][-2:-1]
            if labels[0] in ("", ".", ".."):
                raise ValueError(f"{name} is in no folder that could be its class")
        if len(labels) > 1:
            for label in labels:
                if not is_number(label):
                    raise ValueError(f"the label {label!r} is not a number")
            return name, tuple(map(float, labels)), split
        return name, labels[0], split

    def remark(self, path: Path, say: Say) -> None:
        """Return what of a table was guessed, or goes unused."""
        if self.is_guess:
            say(f"{path}: the first line is read as column names ({', '.join(self.names[:5])}), not as an image")
        if not self.labels:
            say(f"{path} has no label column: the folder of an image is its class")
        if self.numbering is not None:
            say(f"{path}: column {self.numbering + 1} numbers the lines and is ignored")
        used = {self.path, *self.labels, self.split, self.group}
        if unused := [name for place, name in enumerate(self.names) if place not in used and name.strip()]:
            named = ", ".join(repr(self.names[place].strip()) for place in (self.path, *self.labels[:3]))
            say(f"{path}: paths and labels are read from {named}; not used: {', '.join(unused[:5])}")


def find_delimiter(lines: Sequence[str]) -> str:
    """The sign that gives most of these lines equally many cells; a blank, or the line's end where there is none.

    Raises:
        DataError: nothing separates anything.

    >>> find_delimiter(["a.jpg,cat", "b.jpg,dog;elk"]), find_delimiter(["a.jpg 0", "b c.jpg 1"])
    (',', ' ')
    >>> find_delimiter(["cat/1.jpg", "dog/2 b.jpg"])  # paths alone
    '\\n'
    """
    best, share = "", 0
    for sign in DELIMITERS:
        widths = [len(next(csv.reader([line], delimiter=sign), [])) for line in lines]
        width, count = Counter(widths).most_common(1)[0]
        if width == 1 < widths[0]:  # most lines are wrong, which will be reported
            count = 1
        if max(width, widths[0]) > 1 and count > share:
            best, share = sign, count
    if best:
        return best
    if all(len(line.split()) > 1 for line in lines):
        return " "
    if all(is_image(line.strip()) for line in lines[1:] or lines):
        return "\n"
    raise DataError("only one column: each line needs a path and a label, separated by a comma or a tab")


def find_columns(rows: Sequence[Sequence[str]], *, group: str | None = None) -> Columns:
    """Find the columns by the first rows of a table; ``group`` names the one that says what each image belongs to.

    Raises:
        DataError: no path, no label, or several columns that could be it; names them and the remedy.

    >>> find_columns([["id", "breed"], ["0a1f", "boxer"]]).labels
    (1,)
    >>> find_columns([["a.jpg", "0", "1"], ["b.jpg", "1", "1"]]).labels
    (1, 2)
    """
    has_header = _is_header(rows)
    names = tuple(rows[0]) if has_header else ()
    width = len(rows[0])
    body = [[cell.strip() for cell in row] for row in rows[has_header:] if len(row) >= width]
    header = [_plain(name) for name in names]
    listed = ", ".join(header[:10]) + ", ..." * (len(header) > 10)

    images = [sum(is_image(row[place]) for row in body) for place in range(width)]
    if known := [header.index(name) for name in PATHS if name in header]:
        path = next((place for place in known if images[place]), known[0])
    elif max(images):
        path = images.index(max(images))
    elif header:
        raise DataError(f"no column of image paths: name one 'path' (the columns: {listed})")
    else:
        raise DataError("no image paths, and no first line with column names: a table begins with path,label")

    split = numbering = group_place = None
    left = [place for place in range(width) if place != path]
    if group is not None:
        if _plain(group) not in header:
            near = did_you_mean(group, names)
            raise DataError(
                f"--group is {group!r}, and there is no such column (the columns: {listed or 'no names'}).{near}"
            )
        group_place = header.index(_plain(group))
        left = [place for place in left if place != group_place]
    for place in left:  # by its name and what stands in it; without a header by that alone
        values = {row[place].casefold() for row in body}
        if (not header or header[place] in SPLIT) and values and values <= SPLITS.keys():
            split = place
            break
        if header and header[place] == "split" and values & SPLITS.keys():
            other = sorted(values - SPLITS.keys())[0]
            raise DataError(f"the column 'split' holds {other!r}; it must be train, val or test")
    left = [place for place in left if place != split]
    if not has_header and len(left) > 1 and len(body) > 2:
        counts = [[str(number + first) for number in range(len(body))] for first in (0, 1)]
        numbering = next((place for place in left if [row[place] for row in body] in counts), None)
        left = [place for place in left if place != numbering]

    others = [place for place in left if not header or header[place] not in _NUMBERING]
    if known := [place for name in LABELS for place in left if header and header[place] == name]:
        labels = known[:1]
    elif len(others) == 1 or (others and body and all(is_number(row[place]) for row in body for place in others)):
        labels = others
    elif not header and others:
        raise DataError(f"{len(left)} columns besides the path: add a first line with their names, such as path,label")
    elif not others and any(_FOLDER.search(row[path]) for row in body):
        labels = []
    elif not others and not has_header and width == 1:
        raise DataError(
            "only one column: each line needs a path and a label (where every 80 images in a row are a class:"
            " awk '{print $0 \",\" int((NR-1)/80)}' FILE > labels.csv)"
        )
    elif not others:
        raise DataError(f"no label column: name one 'label' (the columns: {listed or 'a path alone'})")
    else:
        raise DataError(f"which column is the label? Name it 'label' (the columns: {listed})")
    if twice := [name for place, name in enumerate(header) if place in labels and header.count(name) > 1 and name]:
        raise DataError(f"two columns are called {twice[0]!r}: rename one")
    is_guess = has_header and not _has_known(rows[0])
    return Columns(names, width, path, tuple(labels), split, group_place, numbering, is_guess)


def _plain(name: str) -> str:
    return name.strip().casefold().replace(" ", "_").replace("-", "_")


def _has_known(cells: Sequence[str]) -> bool:
    return any(_plain(cell) in PATHS or _plain(cell) in LABELS for cell in cells)


def _is_header(rows: Sequence[Sequence[str]]) -> bool:
    first = [cell.strip() for cell in rows[0]]
    if any(is_image(cell) for cell in first):
        return False
    # A path that lacks its suffix among others that have theirs is a path all the same.
    later = rows[1:2] if not any(is_number(cell) for cell in first) else rows[1:]
    above = [place for place, cell in enumerate(first) if "/" not in cell and "\\" not in cell]
    if later and any(all(place < len(row) and is_image(row[place].strip()) for row in later) for place in above):
        return True
    return _has_known(first) and not any(is_number(cell) for cell in first)


def read_table(
    path: Path,
    images: ImagesInFolder | ImagesInArchives,
    *,
    classes: Sequence[str] | None,
    say: Say,
    stored_at: Path | None = None,
    group: str | None = None,
) -> list[Listing]:
    """Read a table; the order is its own.

    Args:
        path: the table, as it was named.
        images: where its paths lead.
        classes: the class list; None makes one: words sorted by code point, whole numbers by their value.
        say: takes remarks.
        stored_at: where its bytes lie, if not at ``path``.
        group: the name of the column that says what each image belongs to.

    Returns:
        One listing, or one for each split, training set first; all with one class list.

    Raises:
        DataError: no UTF-8, malformed lines (named by number), columns that cannot be told apart, or an image with two
            labels.
    """
    where, stored_at = str(path), stored_at or path
    sample = list(islice((line for line in _read_text(stored_at, path) if line.strip()), _SAMPLE))
    if not sample:
        raise DataError(f"{path} lists no images")
    try:
        delimiter = find_delimiter(sample)
        columns = find_columns([row for _, row in islice(_read_rows(stored_at, path, delimiter), _SAMPLE)], group=group)
    except DataError as error:
        raise error if where in str(error) else DataError(f"{path}: {error}") from None
    columns.remark(path, say)
    rows = islice(_read_rows(stored_at, path, delimiter), 1 if columns.names else 0, None)
    names, cells, sign, splits, groups = _read_body(path, rows, columns, classes, say)
    class_names, label_names, labels = _labels_of(path, cells, sign, columns, classes, say)
    parts = {split: np.flatnonzero(splits == split) for split in dict.fromkeys(splits.tolist())}
    if "train" not in parts and len(parts) == 1:
        parts = {"": np.arange(len(splits))}
    elif "train" not in parts:
        raise DataError(f"{where} has {' and '.join(sorted(parts))} in its split column, but no train")
    listings = []
    for split, numbers in order_splits(parts, say, where).items():
        listing = images.listing(names.take(numbers), labels[numbers], classes=class_names, split=split)
        parted = groups.take(numbers) if columns.group is not None else None
        listings.append(replace(listing, label_names=label_names, groups=parted))
    return listings


def _read_body(
    path: Path, rows: Iterator[tuple[int, list[str]]], columns: Columns, classes: Sequence[str] | None, say: Say
) -> tuple[Names, list[str] | NDArray[np.float32], str | None, NDArray[np.str_], Names]:
    """Paths, labels (texts, or float32[N, L]), splits and groups of all rows; lines that stand twice count once.

    Third: the sign that joins several labels in a text; None where each text is one label.
    """
    names, numbers, values, groups = Names(), array("q"), array("f"), Names()
    texts: list[str] = []
    splits: list[str] = []
    known: dict[str, str] = {}  # one text of each
    wrong: list[tuple[int, str]] = []
    for number, row in rows:
        try:
            name, label, split = columns.cells(row)
            if columns.group is not None:
                if not row[columns.group].strip():
                    raise ValueError(f"the group ({columns.names[columns.group].strip()}) is empty")
                groups.append(row[columns.group].strip())
        except ValueError as error:
            wrong.append((number, str(error)))
            continue
        names.append(name)
        numbers.append(number)
        splits.append(split)
        if isinstance(label, str):
            texts.append(known.setdefault(label, label))
        else:
            values.extend(label)
    width = len(columns.labels)

    def label_of(row: int) -> str:
        text = texts[row] if texts else str(tuple(values[row * width : (row + 1) * width]))
        return f"{text} ({splits[row]})" if splits[row] else text

    header = _plain(columns.names[columns.labels[0]]) if columns.names and columns.labels else ""
    sign = label_separator(texts, header=header, where=str(path)) if texts else None
    if not sign and not isinstance(classes, LabelNames):
        sign = None  # then an empty cell is no image without a label
        wrong += [(number, "the label is empty") for number, text in zip(numbers, texts, strict=False) if not text]
    again = _repeated_rows(names, numbers, label_of, wrong)
    _refuse_wrong(path, names, wrong, "table")
    cells: list[str] | NDArray[np.float32] = texts or np.array(values, np.float32).reshape(len(names), -1)
    if again:
        rows_kept = np.setdiff1d(np.arange(len(names)), again)
        cells = [cells[row] for row in rows_kept.tolist()] if isinstance(cells, list) else cells[rows_kept]
        splits = [splits[row] for row in rows_kept.tolist()]
        names = names.take(rows_kept)
        groups = groups.take(rows_kept) if columns.group is not None else groups
        plural = "s repeat an earlier one and are" if len(again) > 1 else " repeats an earlier one and is"
        say(f"{path}: {len(again):,} line{plural} used once")
    return names, cells, sign, np.array(splits), groups


def _labels_of(
    path: Path,
    cells: list[str] | NDArray[np.float32],
    sign: str | None,
    columns: Columns,
    classes: Sequence[str] | None,
    say: Say,
) -> tuple[tuple[str, ...], tuple[str, ...], Labels]:
    """Class names, names of label columns, and labels: one of the two is empty."""
    where, label_names = str(path), tuple[str, ...]()
    label_list = classes if isinstance(classes, LabelNames) else None
    vectors: Labels
    if not isinstance(cells, list):
        vectors = cells
        if columns.names:
            label_names = tuple(columns.names[place].strip() or f"column {place + 1}" for place in columns.labels)
        if label_list is not None:
            vectors = align_columns(vectors, label_names, label_list, where=where)
            label_names = label_list
    elif sign is not None:
        label_names, vectors = multi_hot(cells, sign, where=where, classes=label_list)
    elif all(map(is_number, set(cells))) and None in map(whole_number, set(cells)):
        vectors = np.array([float(text) for text in cells], np.float32)[:, None]
    else:
        class_names, labels = classes_from_texts(cells, classes=classes, where=where)
        return class_names, (), labels
    if classes is not None and label_list is None:
        raise DataError(f"{where} {_NO_CLASSES}")
    if label_names:
        say(f"{where}: several labels per image, in this order: {few(label_names, 20)}")
    return (), label_names, vectors


def _read_rows(stored_at: Path, path: Path, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Line number and cells of each row that is not blank."""
    if delimiter in " \n":
        lines = enumerate(_read_text(stored_at, path), 1)
        cells = (lambda line: line.rsplit(None, 1)) if delimiter == " " else (lambda line: [line.strip()])
        yield from ((number, cells(line)) for number, line in lines if line.strip())
        return
    reader = csv.reader(_read_text(stored_at, path), delimiter=delimiter, strict=True)
    try:
        for row in reader:
            if any(cell.strip() for cell in row):
                yield reader.line_num, row
    except csv.Error as error:
        raise DataError(f"{path}: line {reader.line_num}: {error}: fix its quotes") from None


def _read_text(stored_at: Path, path: Path) -> Iterator[str]:
    """The lines of a text, of bounded length."""
    try:
        with stored_at.open(encoding="utf-8-sig", newline="") as file:
            for number, line in enumerate(iter(partial(file.readline, _LONGEST_LINE), ""), 1):
                if len(line) == _LONGEST_LINE:
                    raise DataError(
                        f"{path}: line {number} is longer than {_LONGEST_LINE:,} characters: it is not a table"
                    )
                is_hint = number == 1 and line[:4].lower() == "sep=" and len(line.strip()) < 6  # Excel's
                yield "\n" if is_hint else line
    except UnicodeDecodeError as error:
        with stored_at.open("rb") as start:
            form = "UTF-16" if start.read(2) in (b"\xff\xfe", b"\xfe\xff") else "LATIN1"
        raise DataError(
            f"{path} is not UTF-8 text ({error.object[error.start]:#04x} found): save it as UTF-8, or"
            f" iconv -f {form} -t UTF-8 {path.name} > utf8.csv"
        ) from None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
