"""Lists and tables of images: MXNet's ``.lst``, CSV, TSV, texts and JSON lines, each line a path and its labels.

A table's columns are those that the user names, else found by its header if it has one, else by what stands in them.
One column of labels names classes; where its cells hold several labels, or where several columns hold numbers, labels
are vectors. A column ``split`` takes the table apart.
"""

from __future__ import annotations

import contextlib
import os
import re
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from steadytrain.data.filenames import SPLITS, order_splits, repeated, split_words
from steadytrain.data.names import Names
from steadytrain.data.recordio.card import LabelNames
from steadytrain.data.recordio.lst import name_by_folders, read_lines, require_exact
from steadytrain.data.recordio.reader import MOST_CLASSES
from steadytrain.data.sources import parquet
from steadytrain.data.sources.archives import SourceFile
from steadytrain.data.sources.columns import MOST_LISTED, ONE_HOT, TableColumns, find_columns, plain_name
from steadytrain.data.sources.labels import (
    align_columns,
    class_name,
    classes_from_numbers,
    is_number,
    is_padded,
    require_in_list,
    say_places,
    whole_number,
)
from steadytrain.data.sources.listing import Labels, Listing
from steadytrain.data.sources.paths import NamedImages, none_found
from steadytrain.data.sources.rows import JSON_LINES, Rows, find_delimiter, read_rows, read_text
from steadytrain.data.sources.several import Cells, name_labels, read_cells, say_label_names
from steadytrain.data.sources.source import COLUMNS, ROOT, Request, SourceKind
from steadytrain.errors import DataError
from steadytrain.format import Say

_Row = tuple[int, list[str]]  # with the number of its line
_MOST_ERRORS = 5
_SAMPLE = 200
_EACH_TWICE = 2
"""Images for each different number, on average, from which on numbers with decimals or signs name classes."""
_ENDINGS = (".csv", ".tsv", ".txt", ".lst", ".jsonl", ".ndjson", ".manifest")
_NO_CLASSES = "has label vectors or labels that are not class numbers: --classes does not apply"


def read_list(
    path: Path,
    *,
    root: Path | None = None,
    prefixes: Sequence[str] | None = None,
    classes: Sequence[str] | None = None,
    say: Say = lambda _: None,
) -> Listing:
    """Read a ``.lst``. The order, ids and labels are the list's own.

    One whole number from 0 on for each image is its class. Classes are named by the folders of the images, where each
    label has one folder and each folder one label, or else by their numbers. Of ``classes`` a label is the one of its
    folder's name, or else the one in its place.

    Args:
        root: the folder that its paths start from; None: the list's own.
        prefixes: as for :class:`~steadytrain.data.sources.paths.NamedImages`.
        classes: class names in the order of their labels.

    Raises:
        DataError: the file cannot be read, lines are malformed or contradict each other (named by number), or labels
            are not in ``classes``.
    """
    root = path.parent if root is None else root
    images = NamedImages(root, table=path, prefixes=prefixes, say=say)
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
            try:
                values.extend([require_exact(label) for label in line.labels])
            except ValueError as error:
                wrong.append((number, str(error)))
                continue
            width = len(line.labels)
            written.append(line.path)
            ids.append(line.id)
            numbers.append(number)
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
        _repeated_rows(written, numbers, lambda row: ", ".join(map("{:g}".format, vectors[row])), wrong, root)
    _refuse_wrong(path, written, wrong, "list")
    single = vectors[:, 0]
    is_class = width == 1 and bool(np.all((single >= 0) & (single == np.floor(single)) & (single < 2**24)))
    labels: Labels = single.astype(np.int64) if is_class else vectors
    names, sizes, times = images.locate(written)
    if labels.ndim > 1 and isinstance(classes, LabelNames):
        labels = align_columns(labels, (), classes, where=str(path))
        return Listing("", root, (), names, labels, sizes, times, np.array(ids), label_names=classes)
    class_names, labels = _name_classes(path, labels, names, classes, say)
    listing = Listing("", root, class_names, names, labels, sizes, times, np.array(ids))
    _check_labels(str(path), [listing], images.located, say)
    return listing


def _repeated_rows(
    names: Names, numbers: Sequence[int], label: Callable[[int], str], wrong: list[tuple[int, str]], root: Path
) -> list[int]:
    """Rows that repeat an earlier one, whose label is the same; one with another label goes to ``wrong``."""
    again = []
    lead = os.path.join(os.path.abspath(root), "")  # noqa: PTH100, PTH118
    for row, before in repeated(names, lambda name: os.path.normpath(name.replace("\\", "/")).removeprefix(lead)):
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


def _name_classes(
    path: Path, labels: Labels, names: Names, classes: Sequence[str] | None, say: Say
) -> tuple[tuple[str, ...], Labels]:
    """Class names and labels; of a class list by the folders of the images where these are in it, else by place."""
    if labels.ndim > 1:
        if classes is not None:
            raise DataError(f"{path} {_NO_CLASSES}")
        return (), labels
    numbers = labels.astype(np.int64)
    folders = _name_by_set(path, numbers, names, say) if classes is None else name_by_folders(numbers, names)
    if classes is not None:
        if folders and set(folders) <= set(classes):
            return classes_from_numbers(numbers, names=folders, classes=classes, where=str(path))
        require_in_list(numbers, classes, str(path))
        say_places(str(path), classes, numbers, say)
        return tuple(classes), numbers
    largest = int(numbers.max())
    if largest >= MOST_CLASSES:
        raise DataError(
            f"{path} has label {largest:,}; at most {MOST_CLASSES:,} classes are possible: number them from 0"
        )
    return folders or tuple(str(number) for number in range(largest + 1)), numbers


def _name_by_set(path: Path, numbers: NDArray[np.int64], names: Names, say: Say) -> tuple[str, ...]:
    """Name classes by the folders of their images, also by those of the lists of the same set beside this one.

    A list that lacks a class, as a small validation list may, does not say what its number means; the others do. Where
    they contradict it, they are of another set.
    """
    named = name_by_folders(numbers, names)
    folders = {(label, _folder(name)): name for label, name in zip(numbers.tolist(), names, strict=True)}
    others = [file for file in sorted(path.parent.glob("*.lst")) if file != path and _set_of(file) == _set_of(path)]
    used: list[str] = []
    for other in others:
        with contextlib.suppress(OSError, ValueError):  # one of another form, or damaged, is read where it is packed
            pairs = _folders_in(other)
            if not pairs.keys() <= folders.keys():
                folders, used = folders | pairs, [*used, other.name]
    together = name_by_folders(np.array([label for label, _ in folders], np.int64), list(folders.values()))
    if not used or not together:
        return named
    verb = "names" if len(used) == 1 else "name"
    say(f"{path}: {', '.join(used)} beside it {verb} the {len(together):,} classes too")
    return together


def _folders_in(path: Path) -> dict[tuple[int, str], str]:
    """Return a path for each class number and folder in a list. Raises ValueError where it has other labels."""
    pairs = dict[tuple[int, str], str]()
    for _, line in read_lines(path):
        if isinstance(line, ValueError):
            raise line
        [label] = line.labels
        if not (0 <= label < MOST_CLASSES and label.is_integer()):
            raise ValueError(f"{label} is no class number")
        pairs[int(label), _folder(line.path)] = line.path
    return pairs


def _folder(name: str) -> str:
    return name.replace("\\", "/").rpartition("/")[0]


def _set_of(path: Path) -> tuple[str, ...]:
    """Return what the names of lists of one set share: all but the words of splits, and the numbers of chunks.

    >>> _set_of(Path("pets_0_train.lst")) == _set_of(Path("pets_val.lst")), _set_of(Path("pets37-val.lst"))
    (True, ('pets37',))
    """
    words = re.split("[-_. ]+", path.stem.casefold())
    return tuple(word for word in words if not word.isdigit() and (not split_words(word)[0] or split_words(word)[1]))


def read_table(request: Request, path: Path, images: NamedImages, stored_at: Path) -> list[Listing]:
    """Read a table of a source; the order is its own.

    Args:
        request: with the class list, if there is one (else words are sorted by code point, numbers by their value), and
            the columns that the user has named.
        path: the table, as it was named.
        images: where its paths lead.
        stored_at: where its bytes lie.

    Returns:
        One listing, or one for each split, training set first; all with one class list.

    Raises:
        DataError: no UTF-8, malformed lines (named by number), columns that cannot be told apart, or an image with two
            labels.
    """
    request.opened[path] = SourceFile(path, stored_at, "text", 0)
    where, classes, say = str(path), request.classes, request.say
    sample = list(islice((line for line in read_text(stored_at, path) if line.strip()), _SAMPLE))
    if not sample:
        raise DataError(f"{path} lists no images")

    def is_file(name: str) -> bool:
        return images.find(name) is not None

    try:
        delimiter = find_delimiter(sample)
        rows = read_rows(stored_at, path, delimiter)
        if not (first := list(islice(rows, _SAMPLE))):
            raise DataError("it lists no images")
        options: dict[str, Any] = {
            "group": request.group,
            "named": request.columns,
            "is_headed": delimiter == JSON_LINES,
        }
        numbered = [*first, *_rows_of_new_values(rows, first)]
        columns = find_columns([row for _, row in first], numbered=numbered, is_file=is_file, **options)
    except DataError as error:
        raise error if where in str(error) else DataError(f"{path}: {error}") from None
    columns.remark(path, [row for _, row in first], say)
    rows = islice(read_rows(stored_at, path, delimiter), 1 if columns.names else 0, None)
    body = _read_body(path, images.root, rows, columns, classes, say)
    class_names, label_names, labels = _labels_of(path, body, columns, classes, say)
    if columns.split is not None:
        _say_contradictions(where, columns, body, say)
    splits = np.array(body.splits)
    parts = {split: np.flatnonzero(splits == split) for split in dict.fromkeys(body.splits)}
    if "train" not in parts and len(parts) == 1:
        parts = {"": np.arange(len(splits))}
    elif "train" not in parts:
        raise DataError(f"{where} has {' and '.join(sorted(parts))} in its split column, but no train")
    listings = []
    for split, numbers in order_splits(parts).items():
        listing = images.listing(body.names.take(numbers), labels[numbers], classes=class_names, split=split)
        parted = body.groups.take(numbers) if columns.group is not None else None
        label_column = plain_name(columns) if len(columns.labels) == 1 else ""
        listings.append(replace(listing, label_names=label_names, groups=parted, label_column=label_column))
    _check_labels(where, listings, images.located, say)
    return listings


def _rows_of_new_values(rows: Iterable[_Row], first: Sequence[_Row]) -> Iterator[_Row]:
    """Yield further rows with a value that a column of few values had not before; none of two columns alone."""
    seen = [{row[place] for _, row in first if len(row) > place} for place in range(len(first[0][1]))]
    for number, row in rows if len(seen) > 2 else ():
        for value, values in zip(row, seen, strict=False):
            if value not in values and len(values) <= MOST_LISTED:
                values.add(value)
                yield number, row


def _check_labels(where: str, listings: Sequence[Listing], located: Sequence[NDArray[np.int64]], say: Say) -> None:
    """Compare the labels of images with those of other names of their files, and with the folders that these lie in.

    ``located`` has numbers of the files, or 0. Raises DataError where two names of one file have two labels.
    """
    files, labels = np.concatenate(located), np.concatenate([listing.labels for listing in listings])
    order = np.argsort(files, kind="stable")
    is_same = (np.diff(files[order]) == 0) & (files[order][1:] != 0)
    is_other = np.diff(labels[order].reshape(len(order), -1), axis=0).any(1)
    for at in np.flatnonzero(is_same & is_other)[:1]:
        names, classes = [name for listing in listings for name in listing.names], listings[0].classes
        first, second = sorted(order[at : at + 2])
        two = f", {classes[labels[first]]} and {classes[labels[second]]}" if classes else ""
        same = f" ({names[second]} is the same file)" if names[first] != names[second] else ""
        raise DataError(f"{where}: {names[first]} has two labels{two}{same}: keep one of them")
    if listings[0].classes:
        _say_other_classes(where, listings, say)


def _say_contradictions(where: str, columns: TableColumns, body: _Body, say: Say) -> None:
    """Say how many images lie in a folder of another split than the table's column says."""
    first, num_others, _ = _in_other_folders(zip(body.names, body.splits, strict=True), SPLITS)
    if num_others:
        column = f"the column {columns.names[columns.split or 0].strip()!r}" if columns.names else "a column"
        verb = "is" if num_others == 1 else "are"
        say(
            f"warning: {where}: {num_others:,} of {len(body.splits):,} images {verb} in a folder of another split than"
            f" {column} says ({first}): the column counts; correct it where the folders are right"
        )


def _say_other_classes(where: str, listings: Sequence[Listing], say: Say) -> None:
    """Say how many images lie in a folder that is named after another class than theirs.

    Classes called by numbers and folders have to be the same: other numbers divide images (``7/1.jpg``).
    """
    folded, num_images = [name.casefold() for name in listings[0].classes], sum(map(len, listings))
    labelled = ((name, folded[n]) for part in listings for name, n in zip(part.names, part.labels, strict=True))
    first, num_others, uses = _in_other_folders(labelled, {name: name for name in folded})
    is_same_set = len(uses) == len(folded) and uses.total() == num_images
    if num_others and len(uses) > 1 and (is_same_set or not all(map(is_number, folded))):
        is_most = 2 * num_others > uses.total()
        say(
            f"{'warning: ' * is_most}{where}: the folders of {num_others:,} of {num_images:,} images are named after"
            f" another class ({first}): the table counts{', so check its column of labels' * is_most}"
        )


def _in_other_folders(
    values: Iterable[tuple[str, str]], known: Mapping[str, str]
) -> tuple[str, int, Counter[frozenset[str]]]:
    """Return the first image whose value is not what names of its folders are ``known`` for, how many, and of which."""
    first, num_others, uses = "", 0, Counter[frozenset[str]]()
    of_folder: dict[str, frozenset[str]] = {}
    for name, value in values:
        folder = name.replace("\\", "/").rpartition("/")[0]
        if folder not in of_folder:
            of_folder[folder] = frozenset(known[part] for part in folder.casefold().split("/") if part in known)
        if labels := of_folder[folder]:
            uses[labels] += 1
            if value not in labels:
                first, num_others = first or f"{name} is {value}", num_others + 1
    return first, num_others, uses


@dataclass
class _Body:
    """The rows of a table, in columns; an image that stands in it twice counts once.

    Args:
        texts: the label of each image, where one column has it; else empty.
        cells: what these hold, where they hold several labels.
        vectors: float32[N, L], where several columns have labels.
    """

    names: Names = field(default_factory=Names)
    texts: list[str] = field(default_factory=list)
    cells: Cells | None = None
    vectors: NDArray[np.float32] = field(default_factory=lambda: np.empty((0, 0), np.float32))
    splits: list[str] = field(default_factory=list)
    groups: Names = field(default_factory=Names)


def _read_body(
    path: Path, root: Path, rows: Rows, columns: TableColumns, classes: Sequence[str] | None, say: Say
) -> _Body:
    """Paths, labels, splits and groups of all rows. Raises DataError with the numbers of lines that are wrong."""
    body, numbers, values = _Body(), array("q"), array("f")
    known: dict[str, str] = {}  # one text of each
    wrong: list[tuple[int, str]] = []
    for number, row in rows:
        try:
            name, label, split = columns.cells(row)
            if split == "none":
                continue
            if columns.group is not None:
                if not row[columns.group].strip():
                    raise ValueError(f"the group ({columns.names[columns.group].strip()}) is empty")
                body.groups.append(row[columns.group].strip())
        except ValueError as error:
            wrong.append((number, str(error)))
            continue
        body.names.append(name)
        numbers.append(number)
        body.splits.append(split)
        if isinstance(label, str):
            body.texts.append(known.setdefault(label, label))
        else:
            values.extend(label)
    width = len(columns.labels)

    def label_of(row: int) -> str:
        text = body.texts[row] if body.texts else str(tuple(values[row * width : (row + 1) * width]))
        return f"{text} ({body.splits[row]})" if body.splits[row] else text

    if columns.labels and body.texts:
        body.cells = read_cells(known, header=plain_name(columns), where=str(path), classes=classes, say=say)
    if not isinstance(classes, LabelNames) and (body.cells is None or body.cells.is_multi_hot):
        wrong += [(row, "the label is empty") for row, text in zip(numbers, body.texts, strict=False) if not text]
    again = _repeated_rows(body.names, numbers, label_of, wrong, root)
    _refuse_wrong(path, body.names, wrong, "table")
    body.vectors = np.array(values, np.float32).reshape(len(body.names), -1)
    if again:
        kept = np.setdiff1d(np.arange(len(body.names)), again)
        body.texts = [body.texts[row] for row in kept.tolist()] if body.texts else []
        body.vectors = body.vectors[kept]
        body.splits = [body.splits[row] for row in kept.tolist()]
        body.names = body.names.take(kept)
        body.groups = body.groups.take(kept) if columns.group is not None else body.groups
        plural = "s repeat an earlier one and are" if len(again) > 1 else " repeats an earlier one and is"
        say(f"{path}: {len(again):,} line{plural} used once")
    return body


def _labels_of(
    path: Path, body: _Body, columns: TableColumns, classes: Sequence[str] | None, say: Say
) -> tuple[tuple[str, ...], tuple[str, ...], Labels]:
    """Class names, names of label columns, and labels: one of the two is empty."""
    where, label_list = str(path), classes if isinstance(classes, LabelNames) else None
    vectors: Labels
    if body.texts and columns.is_one_hot:
        raise DataError(f"{where} has one column of labels, which are classes: drop --label-column {ONE_HOT}")
    if body.texts and (body.cells is not None or label_list is not None or not _are_values(body.texts, classes)):
        return name_labels(body.texts, body.cells, where=where, classes=classes, say=say)
    if body.texts:
        if classes is not None:
            raise DataError(f"{where} {_NO_CLASSES}")
        return (), (), np.array([float(text) for text in body.texts], np.float32)[:, None]
    vectors, label_names = _fill_vectors(where, body.vectors, say), tuple[str, ...]()
    if columns.names:
        label_names = tuple(columns.names[place].strip() or f"column {place + 1}" for place in columns.labels)
    if label_list is not None:
        vectors = align_columns(vectors, label_names, label_list, where=where)
        label_names = label_list
    is_one_hot = vectors.shape[1] > 1 and bool(np.isin(vectors, (0, 1)).all() and (vectors.sum(1) == 1).all())
    if columns.is_one_hot and not is_one_hot:
        odd = body.names[int(np.argmax(((vectors == 1).sum(1) != 1) | ((vectors != 0).sum(1) != 1)))]
        raise DataError(f"{where}: {odd} has not one 1 among zeros: correct it, or drop --label-column {ONE_HOT}")
    if label_list is None and is_one_hot and (columns.is_one_hot or (classes is not None and label_names)):
        named = classes_from_numbers(vectors.argmax(1), names=label_names or None, classes=classes, where=where)
        return named[0], (), named[1]
    if classes is not None and label_list is None:
        raise DataError(f"{where} {_NO_CLASSES}")
    say_label_names(where, label_names, vectors, say)
    if is_one_hot and label_list is None:
        say(f"{where}: each image has exactly one of these labels: --label-column {ONE_HOT} makes them classes")
    return (), label_names, vectors


def _fill_vectors(where: str, vectors: NDArray[np.float32], say: Say) -> NDArray[np.float32]:
    """Read -1 as 0 where all values are -1 and 1, and empty cells as 0."""
    empty = np.isnan(vectors)
    if not empty.any() and bool((np.abs(vectors) == 1).all()) and bool((vectors < 0).any()):
        say(f"{where}: the labels are -1 and 1: -1 is read as 0, that the image lacks the label")
        return np.maximum(vectors, 0)
    if num_empty := int(empty.sum()):
        say(f"{where}: {num_empty:,} empty cells among the labels are read as 0, that the image lacks the label")
    return np.where(empty, np.float32(0), vectors)


def _are_values(texts: Sequence[str], classes: Sequence[str] | None) -> bool:
    """Return whether labels are numbers to be kept: with decimals, an exponent or a sign, and seldom the same."""
    different = set(texts)
    if not all(map(is_number, different)) or None not in map(whole_number, different):
        return False
    if any(map(is_padded, different)) or (classes is not None and set(map(class_name, different)) <= set(classes)):
        return False
    return len(texts) < _EACH_TWICE * len(different)


def _list_table_file(request: Request) -> list[Listing]:
    path = request.where
    images = NamedImages(request.root or path.parent, table=path, say=request.say)
    return read_table(request, path, images, parquet.as_text(request.files[0].stored_at, request.scratch))


def list_lst(
    request: Request, path: Path, root: Path, *, prefixes: Sequence[str] | None = None, is_source: bool = False
) -> list[Listing]:
    """Read a ``.lst``, and refuse one of which no image is there; arguments as for :class:`.NamedImages`."""
    listing = read_list(path, root=root, prefixes=prefixes, classes=request.classes, say=request.say)
    if np.all(listing.sizes < 0):
        raise none_found(path, root, listing.names, is_source=is_source)
    return [listing]


def _list_list(request: Request) -> list[Listing]:
    return list_lst(request, request.where, request.root or request.where.parent)


def _is_table(request: Request) -> bool:
    name = request.where.name.lower()
    is_text = request.kinds == {"text"} and ("." not in name or any(ending in name for ending in _ENDINGS))
    return is_text or parquet.is_of_paths(request)


LIST = SourceKind("a list (.lst)", lambda request: request.kinds == {"list"}, _list_list, (ROOT,), is_one_file=True)
TABLE = SourceKind("a table (CSV, JSON lines, Parquet)", _is_table, _list_table_file, (ROOT, COLUMNS), is_one_file=True)
