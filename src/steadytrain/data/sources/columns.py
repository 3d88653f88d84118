"""The columns of a table for paths, labels and splits: those that the user names, else by their names and contents.

What can be read in two ways is asked about: the message names the columns there are, and the options that choose.
"""

from __future__ import annotations

import math
import os
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from steadytrain.data.filenames import SPLITS, folder_splits, is_image, is_wrapper, split_words
from steadytrain.data.recordio.lst import require_exact
from steadytrain.data.sources.labels import is_number, whole_number
from steadytrain.data.sources.zip_names import require_code_page
from steadytrain.errors import DataError, did_you_mean
from steadytrain.format import Say, few

# Names of columns, in the order of preference.
PATHS = (
    *("path", "filepath", "file_path", "filepaths", "image_path", "img_path", "imagepath", "imgpath"),
    *("image_filepath", "image_file_path", "full_path", "relative_path", "rel_path"),
    *("filename", "file_name", "filenames", "file", "files", "fname", "image_filename", "image_file_name"),
    *("img_filename", "image", "images", "img", "image_name", "img_name", "image_file", "image_index"),
    *("image_id", "imageid", "img_id", "id_code", "isic_id", "photo_id", "source_ref", "image_uri", "id", "name"),
)
LABELS = (
    *("label", "labels", "class", "class_name", "classname", "category", "category_name", "target", "breed", "species"),
    *("diagnosis", "dx", "finding_labels", "emotion", "expression", "cultivar", "variant"),
    *("tag", "tags", "classes", "categories", "class_label", "label_name", "y"),
    *("class_id", "classid", "class_index", "class_idx", "label_id", "labelid", "label_idx"),
    *("category_id", "target_id"),
)
SPLIT = ("split", "set", "subset", "partition", "phase", "usage", "ml_use", "data_set", "dataset")
MOST_LISTED = 10
ONE_HOT = "one-hot"
"""The name that stands for several columns of labels, of which each image has one: its class."""

_NUMBERING = frozenset(["", "id", "index", "idx", "unnamed:_0", "fold", "kfold"])
# Sizes and boxes, which tools write beside the label.
_MEASURES = re.compile(
    r"((image|img|orig|original)_)?(width|height|w|h|size|(file_?)?size|bytes|channels|depth|area|md5|sha\d+)"
    r"|(roi|bbox|box)[._]?\w*|[xy](_?(min|max|\d))?|[xy]c|(left|top|right|bottom)"
)
_FOLDER = re.compile(r"[^./\\][/\\][^/\\]+$")  # the end of a path that has one
_STORES = ("gs", "s3", "s3a", "az", "abfs", "abfss", "wasbs", "oss", "obs", "cos", "hdfs")
_Body = Sequence[Sequence[str]]  # cells of the rows below the header
_MOST_PIXELS = 16
_FEW = 3  # values of a column that may tell the splits in other words than those known
_TRUTHS = {"true": "1", "false": "0"}
_FLAG = re.compile(r"-?\d+(\.0*)?|true|false|yes|no|[tfyn]|", re.IGNORECASE)
_ABBREVIATED = {word[:length]: split for word, split in SPLITS.items() for length in range(2, len(word))}
_MEANINGS = {**SPLITS, "none": "none"}


@dataclass(frozen=True, kw_only=True)
class ColumnNames:
    """Names in a source that the user gives: columns of a table, by names or numbers from 1 on, and names in a zip.

    Args:
        path, split: None finds the column, if there is one. The split's may have the meanings of its values behind it
            (``Usage:PublicTest=val,PrivateTest=test``); ``none`` is no column.
        labels: empty finds them; several columns make label vectors.
        trained: the label's column of the training set's table, for the table of another split; the user does not name
            it, and no other column counts unless it is called like a label's.
        zip_names: the code page of the names in a zip; empty where the zip tells it.
    """

    path: str | None = None
    labels: tuple[str, ...] = ()
    split: str | None = None
    trained: str = ""
    zip_names: str = ""

    def split_meanings(self, names: Iterable[str]) -> tuple[str | None, dict[str, str]]:
        """Return the name of the split's column, one of ``names``, and what its values mean in the user's words."""
        if self.split is None or "=" not in self.split:
            return self.split, {}
        split = self.split.casefold()
        known = [name.strip() for name in names if split.startswith(f"{name.strip()}:".casefold())]
        name = max(known, key=len, default=self.split.partition(":")[0])  # a name may hold colons itself
        text = split[len(name.casefold()) + 1 :]
        meanings = dict(re.findall(r"(.*?)=\s*(\w+)\s*(?:,|$)", text))  # a value may hold commas itself
        if wrong := sorted(meanings.values() - _MEANINGS.keys()):
            raise DataError(f"--split-column {self.split} means {wrong[0]!r}; it must be train, val, test or none")
        return name, {value.strip(): _MEANINGS[split] for value, split in meanings.items()}

    @staticmethod
    def of(
        path: str | None, labels: str | Sequence[str] | None, split: str | None, zip_names: str | None = None
    ) -> ColumnNames:
        """Take the labels' column, or several."""
        names = (labels,) if isinstance(labels, str) else tuple(labels or ())
        require_code_page(zip_names or "utf-8")
        return ColumnNames(path=path, labels=names, split=split, zip_names=zip_names or "")

    def options(self) -> tuple[tuple[str, str], ...]:
        """The options that were given, with their values."""
        pairs = [("--path-column", self.path), *(("--label-column", name) for name in self.labels)]
        pairs += [("--split-column", self.split), ("--zip-names", self.zip_names or None)]
        return tuple((flag, name) for flag, name in pairs if name is not None)


@dataclass(frozen=True)
class TableColumns:
    """The columns of a table, by their meaning."""

    names: tuple[str, ...]  # of all columns; empty without a header
    width: int
    path: int
    labels: tuple[int, ...]  # the label's column; several, each a number; or none, and folders are the classes
    split: int | None = None
    group: int | None = None
    splits: Mapping[str, str] = field(default_factory=lambda: SPLITS)  # by what the split's column holds
    is_guess: bool = False  # the first line is taken for a header only because its path is none
    are_labels_named: bool = False  # by the user
    is_one_hot: bool = False  # the labels are classes, by the user's word

    def cells(self, row: list[str]) -> tuple[str, str | tuple[float, ...], str]:
        """The path, the label or labels, and the split in a row; an empty label may mean that an image has none.

        Of several labels an empty one is NaN. Raises ValueError: what is wrong with it.
        """
        if len(row) < self.width or any(cell.strip() for cell in row[self.width :]):
            raise ValueError(f"{len(row)} cell{'s' * (len(row) != 1)}, the first line has {self.width}")
        name = row[self.path].strip()
        if not name or "\0" in name:
            raise ValueError("the path is empty" if not name else "the path holds a zero byte")
        name = name.removeprefix("file://")
        if "://" in name[:10]:
            name = _key(name)
        if "./" in name or "//" in name:
            name = os.path.normpath(name)
        split = ""
        if self.split is not None and not (split := self.splits.get(row[self.split].strip().casefold(), "")):
            raise ValueError(f"the split {row[self.split]!r} is not train, val or test")
        labels = [row[place].strip() for place in self.labels]
        if not labels:
            labels = ["", *name.replace("\\", "/").split("/")][-2:-1]
            if labels[0] in ("", ".", ".."):
                raise ValueError(f"{name} is in no folder that could be its class")
        if len(labels) > 1:
            return name, tuple(map(self._number, labels)), split
        return name, labels[0], split

    def _number(self, label: str) -> float:
        number = _TRUTHS.get(label.casefold(), label)
        if not number and self.are_labels_named:
            return math.nan
        if not is_number(number):
            raise ValueError(f"the label {label!r} is not a number")
        return require_exact(float(number))

    def remark(self, path: Path, rows: Sequence[Sequence[str]], say: Say) -> None:
        """Say what of a table was guessed, or goes unused; of a column of few words in the first ``rows`` these too."""
        if self.is_guess:
            say(f"{path}: the first line is read as column names ({', '.join(self.names[:5])}), not as an image")
        if not self.labels:
            say(f"{path} has no label column: the folder of an image is its class")
        used = {self.path, *self.labels, self.split, self.group}
        unused = []
        for place, name in enumerate(self.names):
            if place in used or not name.strip():
                continue
            values = {row[place].strip() for row in rows[1:] if len(row) > place}
            are_few = 1 < len(values) <= _FEW and all(value and not is_number(value) for value in values)
            unused.append(name + f" ({', '.join(sorted(values))})" * are_few)
        if unused:
            named = ", ".join(repr(self.names[place].strip()) for place in (self.path, *self.labels[:3]))
            say(f"{path}: paths and labels are read from {named}, not from {', '.join(unused[:5])}")


def find_columns(
    rows: Sequence[Sequence[str]],
    *,
    numbered: Sequence[tuple[int, Sequence[str]]] = (),
    group: str | None = None,
    named: ColumnNames | None = None,
    is_headed: bool = False,
    is_file: Callable[[str], bool] = lambda _: False,
) -> TableColumns:
    """Find the columns by the first rows of a table.

    Args:
        rows: with the names of the columns first, if there are any.
        numbered: these, and more in which splits are looked for, with the numbers of their lines.
        group: the name of the column that says what each image belongs to.
        named: columns that the user has named.
        is_headed: the first row is known to be one of names.
        is_file: whether a path without an image's suffix leads to an image.

    Raises:
        DataError: no path, no label, or several columns that could be it; names them and the remedy.

    >>> find_columns([["id", "breed"], ["0a1f", "boxer"]]).labels
    (1,)
    >>> find_columns([["a.jpg", "0", "1"], ["b.jpg", "1", "1"]]).labels
    (1, 2)
    >>> find_columns([["id", "a", "b"], ["0a1f", "boxer", "pug"]], named=ColumnNames(labels=("b",))).labels
    (2,)
    """
    named = named or ColumnNames()
    split_name, meanings = named.split_meanings(rows[0])
    is_unsplit = split_name == "none" and "none" not in map(plain, rows[0])
    named = replace(named, split=None if is_unsplit else split_name)
    is_one_hot = ONE_HOT in named.labels and ONE_HOT not in map(str.strip, rows[0])
    named = replace(named, labels=tuple(name for name in named.labels if name != ONE_HOT or not is_one_hot))
    has_header = is_headed or _is_header(rows, named)
    names = tuple(rows[0]) if has_header else ()
    width = len(rows[0])
    body = [[cell.strip() for cell in row] for row in rows[has_header:] if len(row) >= width]
    chosen = {flag: _place_of(flag, name, names, width) for flag, name in named.options() if flag != "--label-column"}
    labels = tuple(_place_of("--label-column", name, names, width) for name in named.labels)
    if len({*chosen.values(), *labels}) < len(chosen) + len(labels):
        raise DataError("two options, or --label-column twice, name the same column: name each column once")
    path = chosen.get("--path-column")
    inner = {place for place, name in enumerate(names) if is_headed and "." in name}  # of objects in JSON's objects
    if path is None:
        path = _find_path(names, body, width, {*chosen.values(), *labels}, inner, is_file)
    group_place = None if group is None else _place_of("--group-by", group, names, width)
    left = [place for place in range(width) if place not in {path, group_place, *labels}]
    split = chosen.get("--split-column")
    full = [pair for pair in (numbered or list(enumerate(rows, 1)))[has_header:] if len(pair[1]) >= width]
    tried = [] if is_unsplit else left if split is None else [split]
    lines = {place: {row[place].strip(): number for number, row in reversed(full)} for place in tried}
    if split is not None:
        _require_splits(f"--split-column {named.split}", str(named.split), lines[split], meanings)
    else:
        split = _find_split(names, lines, labels, named.trained)
    left = [place for place in left if place != split]
    if not labels:
        labels = _find_labels(names, body, left, inner, path, width, named.trained)
    header = [plain(name) for name in names]
    twice = [name for place, name in enumerate(header) if place in labels and header.count(name) > 1 and name]
    if twice and not named.labels:
        raise DataError(f"two columns are called {twice[0]!r}: rename one")
    is_guess = has_header and not _has_known(rows[0]) and not named.options()
    return TableColumns(
        names=names,
        width=width,
        path=path,
        labels=labels,
        split=split,
        group=group_place,
        splits=SPLITS | meanings,
        is_guess=is_guess,
        are_labels_named=bool(named.labels),
        is_one_hot=is_one_hot,
    )


def list_columns(names: Sequence[str], width: int = 0) -> str:
    """List the columns of a table for a message."""
    if not names:
        return f"they have no names: 1 to {width}" if width else "no names"
    return ", ".join(name.strip() or "''" for name in names[:MOST_LISTED]) + ", ..." * (len(names) > MOST_LISTED)


def _place_of(flag: str, name: str, names: Sequence[str], width: int) -> int:
    """The place of a column that an option names, by its name, or else by its number from 1 on."""
    for spell in (str.strip, plain):
        places = [place for place, other in enumerate(names) if spell(other) == spell(name)]
        if len(places) > 1:
            raise DataError(
                f"{flag} is {name!r}, and {len(places)} columns are called so: give its number"
                f" ({', '.join(str(place + 1) for place in places)})"
            )
        if places:
            return places[0]
    number = whole_number(name)
    if number is not None and 1 <= number <= width:
        return number - 1
    near = did_you_mean(name, [other.strip() for other in names])
    raise DataError(
        f"{flag} is {name!r}, and there is no such column (the columns: {list_columns(names, width)}).{near}"
    )


def _find_path(
    names: Sequence[str], body: _Body, width: int, taken: set[int], inner: set[int], is_file: Callable[[str], bool]
) -> int:
    header = [plain(name) for name in names]
    free = [place for place in range(width) if place not in taken]
    images = [sum(is_image(row[place]) for row in body) if place in free else 0 for place in range(width)]
    if known := [header.index(name) for name in PATHS if name in header and header.index(name) in free]:
        return next((place for place in known if images[place]), known[0])
    if any(images):
        likely = [place for place in free if images[place] == max(images)]
        if len(likely := [place for place in likely if place not in inner] or likely) > 1:
            raise DataError(
                f"{len(likely)} columns hold names of images: say which one is the path with --path-column (the"
                f" columns: {list_columns(names, width)})"
            )
        return likely[0]
    if files := [place for place in free if body and any(is_file(row[place]) for row in body[:_MOST_PIXELS])]:
        return files[0]
    what = "no column of image paths: name one 'path', or say which it is with --path-column"
    text = f"{what} (the columns: {list_columns(names, width)})"
    if any(re.fullmatch(r"pixels|pixel_?\d+", name) for name in [*header, *map(plain, body[0] if body else [])]):
        text += ". Images that are numbers in a table are not read: write each as a file into a folder for each class"
    elif not header:
        text += ". Of paths without a suffix, give the folder of the images with --root"
    raise DataError(text)


def _find_split(
    names: Sequence[str], lines: Mapping[int, Mapping[str, int]], labels: Sequence[int], trained: str
) -> int | None:
    """The column of splits by its name and its values, of each the first line; what is unclear raises DataError."""
    headers = {place: names[place].strip() if names else str(place + 1) for place in lines}
    called = {place: plain(header) for place, header in headers.items()}
    splits = {place: {SPLITS.get(value.casefold(), "") for value in lines[place]} for place in lines}
    for place in lines:
        if (not names or called[place] in SPLIT) and splits[place] and "" not in splits[place]:
            return place
    others = [place for place in lines if called[place] not in (*LABELS, trained or "label")]
    is_settled = bool(labels) or len(others) < len(lines)
    if not labels and len(lines) == 1:  # what is not called so, or has one word for a split, is the label
        words = {split_words(value)[0] for place in others if "train" in splits[place] for value in lines[place]} - {""}
        others = [place for place in others if called[place] == "split" or (called[place] in SPLIT and len(words) > 1)]
    sure = [place for place in others if {"train"} < splits[place] and "" not in splits[place]]
    if len(sure) > 1:
        raise DataError(f"columns {few([headers[p] for p in sure])} each tell the splits: choose with --split-column")
    for place in others if not sure else []:
        if _may_be_splits(headers[place], lines[place], is_settled=is_settled):
            _require_splits(f"the column {headers[place]!r}", headers[place], lines[place], {})
    return sure[0] if sure else None


def _may_be_splits(header: str, values: Mapping[str, int], *, is_settled: bool) -> bool:
    """Tell whether a column may tell the splits, not only by words for them; ``is_settled``: another has the labels."""
    name, words = plain(header), {value.casefold() for value in values}
    split, others = split_words(header)
    if not 1 < len(words) <= MOST_LISTED:
        return False
    told = {SPLITS[word] for word in words & SPLITS.keys()}
    if is_settled and (len(told) > 1 or (told - {"train"} and not name[:1].isalpha())):
        return True
    if "split" in others and (is_settled or name == "split"):
        return True
    is_told = bool(split) or (not others and name[:1].isalpha())  # "train_test" has two
    rest = [word for word in others if word not in ("is", "in", "for", "used", "flag")]
    is_named = name in SPLIT or (is_told and is_wrapper("_".join(["train", *rest]), ""))
    if all(map(_FLAG.fullmatch, words)):  # "train" with 0 and 1 may be a label of its own
        return is_named and len(words) < 4 and (is_settled or name not in SPLITS)
    are_abbreviated = words <= _ABBREVIATED.keys() and "train" in map(_ABBREVIATED.get, words)  # "DE", "VA" are states
    are_words = "train" in folder_splits([*values]).values() or are_abbreviated
    num_splits = len({*_guess(header, values).values()} - {"none"})
    return (are_words and num_splits > 1) or (is_named and not SPLITS.keys().isdisjoint(words))


def _guess(header: str, values: Mapping[str, int]) -> dict[str, str]:
    """The split that each value of a column, with its first line, may mean, or ``none``."""
    yes = split_words(header)[0]
    if yes and all(map(_FLAG.fullmatch, values)):
        return {v: yes if v[:1] in {*"1tTyY"} else "test" if yes == "train" else "train" for v in values}
    guess = {value: split_words(value)[0] or _ABBREVIATED.get(value.casefold(), "none") for value in values}
    left = [split for split in ("train", "val", "test") if split not in guess.values()]
    unknown = [value for value in sorted(values) if guess[value] == "none"]
    if not all(not value or is_number(value) for value in unknown):
        unknown.sort(key=values.__getitem__)  # tables begin with the training set
    return guess if "train" in guess.values() else guess | dict(zip(unknown, left, strict=False))


def _require_splits(subject: str, name: str, lines: Mapping[str, int], meanings: dict[str, str]) -> None:
    """Refuse values that mean no split; the message gives the option that says what they mean."""
    if unknown := sorted(value for value in lines if value.casefold() not in SPLITS | meanings):
        guess = {value: meanings.get(value.casefold(), split) for value, split in sorted(_guess(name, lines).items())}
        pairs = [f"{value}={split}" for value, split in guess.items() if value.casefold() not in SPLITS][:MOST_LISTED]
        raise DataError(
            f"line {lines[unknown[0]]}: {subject} holds {unknown[0]!r}; it must be train, val or test. Say what each"
            f" value means, as --split-column {shlex.quote(f'{name}:' + ','.join(pairs))} (none: not used), or"
            " --split-column none if the column says something else"
        )


def _find_labels(
    names: Sequence[str], body: _Body, left: Sequence[int], inner: set[int], path: int, width: int, trained: str
) -> tuple[int, ...]:
    """Find the columns of labels; none where folders are the classes.

    A name that says so decides, the training set's first. Of other columns one alone is the label, and several are
    where all hold numbers (without names zeros and ones: they could be anything); ``inner`` ones count where there are
    no others. Then comes a numbering whose numbers come again, as that of classes does, and then the folders of the
    images. All else is asked about.
    """
    header = [plain(name) for name in names] or [""] * width
    if known := [place for name in (trained, *LABELS) for place in left if name and header[place] == name]:
        return (known[0],)
    if trained and names:
        raise DataError(
            f"no column {trained!r}, which holds the labels of the training set (the columns: {list_columns(names)}):"
            " call the column of the labels so, or leave the table out"
        )
    are_images = [bool(body) and all(is_image(row[place]) for row in body) for place in range(width)]
    others = [place for place in left if not are_images[place] and not _MEASURES.fullmatch(header[place])]
    numberings = [place for place in others if names and header[place] in _NUMBERING]
    others = [place for place in others if place not in numberings]
    others = [place for place in others if place not in inner] or others
    is_label = _is_number if names else _is_truth
    if len(others) == 1 or (others and body and all(is_label(row[place]) for row in body for place in others)):
        return tuple(others)
    if not others:
        again = [p for p in numberings if header[p] and len({row[p] for row in body}) < len(body)]
        if len(again) == 1:
            return tuple(again)
        if any(_FOLDER.search(row[path]) for row in body):
            return ()
    if width == 1:
        raise DataError("only one column: each line needs a path and a label, separated by a comma or a tab")
    raise DataError(
        f"which column is the label? Call it 'label', or name it with --label-column (the columns:"
        f" {list_columns(names, width)}); several times for several columns of zeros and ones"
    )


def _is_number(cell: str) -> bool:
    return is_number(_TRUTHS.get(cell.casefold(), cell))


def _is_truth(cell: str) -> bool:
    """Return whether a cell says if, or how much, an image has a label: from 0 to 1; or -1 for no."""
    return _is_number(cell) and (cell.casefold() in _TRUTHS or 0 <= float(cell) <= 1 or float(cell) == -1)


def _key(uri: str) -> str:
    """The path of an object below its bucket. Raises ValueError for an address of the web."""
    scheme, _, rest = uri.partition("://")
    key = rest.partition("/")[2]
    if scheme.casefold() not in _STORES or not key:
        raise ValueError(f"{uri[:60]} is a web address: download the images first")
    return key


def plain(name: str) -> str:
    return name.strip().casefold().replace(" ", "_").replace("-", "_")


def _has_known(cells: Sequence[str]) -> bool:
    return any(plain(cell) in PATHS or plain(cell) in LABELS for cell in cells)


def _is_header(rows: Sequence[Sequence[str]], named: ColumnNames) -> bool:
    first = [cell.strip() for cell in rows[0]]
    if any(is_image(cell) for cell in first):
        return False
    if {plain(name) for _, name in named.options()} & set(map(plain, first)):
        return True
    # A path that lacks its suffix among others that have theirs is a path all the same.
    later = rows[1:2] if not any(is_number(cell) for cell in first) else rows[1:]
    above = [place for place, cell in enumerate(first) if "/" not in cell and "\\" not in cell]
    if later and any(all(place < len(row) and is_image(row[place].strip()) for row in later) for place in above):
        return True
    return _has_known(first) and not any(is_number(cell) for cell in first)


def plain_name(columns: TableColumns) -> str:
    """The name of the label's column, in lower case with underscores; empty where it has none."""
    return plain(columns.names[columns.labels[0]]) if columns.names and columns.labels else ""
