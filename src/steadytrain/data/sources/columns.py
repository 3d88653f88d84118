"""Which column of a table is what: paths, labels, splits; by its header if it has one, else by what stands in it."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from steadytrain.data.sources.listing import SPLITS, is_image
from steadytrain.data.sources.lst import LARGEST_LABEL
from steadytrain.errors import DataError

# In the order of preference.
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
MANY = frozenset(["labels", "tags", "classes", "categories", "attributes"])
DELIMITERS = "\t,;|"

_NUMBERING = frozenset(["", "id", "index", "idx", "unnamed:_0"])


@dataclass(frozen=True)
class Columns:
    """The place of each thing in a row.

    Args:
        names: of all columns; empty without a header.
        width: cells of a row.
        path: column of the path.
        labels: the label's column; or several, each a number.
        split: column of the split, if there is one.
        numbering: column that numbers the lines, where no header says so.
        is_guess: the first line is taken for a header only because its path is none.
    """

    names: tuple[str, ...]
    width: int
    path: int
    labels: tuple[int, ...]
    split: int | None = None
    numbering: int | None = None
    is_guess: bool = False

    @property
    def label_name(self) -> str:
        """The header of the only label column, casefolded; empty without a header."""
        return _plain(self.names[self.labels[0]]) if self.names else ""

    @property
    def label_names(self) -> tuple[str, ...]:
        """The headers of several label columns; none for one column, or without a header."""
        several = self.labels if self.names and len(self.labels) > 1 else ()
        return tuple(self.names[place].strip() or f"column {place + 1}" for place in several)

    @property
    def unused(self) -> list[str]:
        """Names of columns that are nothing of all that."""
        used = {self.path, *self.labels, self.split}
        return [name for place, name in enumerate(self.names) if place not in used and name.strip()]


def delimiter(lines: Sequence[str]) -> str:
    """What separates the cells: the sign that gives most of these lines equally many; a blank where there is none.

    Raises:
        DataError: nothing separates anything.

    >>> delimiter(["a.jpg,cat", "b.jpg,dog;elk"]), delimiter(["a.jpg 0", "b c.jpg 1"])
    (',', ' ')
    """
    best, share = "", 0
    for sign in DELIMITERS:
        widths = [len(next(csv.reader([line], delimiter=sign), [])) for line in lines]
        width, count = Counter(widths).most_common(1)[0]
        if width == 1 < widths[0]:  # most lines are wrong, and will be told
            count = 1
        if max(width, widths[0]) > 1 and count > share:
            best, share = sign, count
    if best:
        return best
    if all(len(line.split()) > 1 for line in lines):
        return " "
    raise DataError("one column only: a path and a label in each line are needed, separated by a comma or a tab")


def choose(rows: Sequence[Sequence[str]]) -> Columns:
    """Find the columns by the first rows of a table.

    Raises:
        DataError: no path, no label, or several columns that could be it; names them and the remedy.

    >>> choose([["id", "breed"], ["0a1f", "boxer"]]).labels
    (1,)
    >>> choose([["a.jpg", "0", "1"], ["b.jpg", "1", "1"]]).labels
    (1, 2)
    """
    header = _is_header(rows)
    names = tuple(rows[0]) if header else ()
    body = [row for row in rows[header:] if len(row) >= len(rows[0])]
    width = len(rows[0])
    plain = [_plain(name) for name in names]
    path = _path(plain, body, width)
    split = _split(plain, body, [place for place in range(width) if place != path])
    left = [place for place in range(width) if place not in (path, split)]
    numbering = _numbering(body, left) if not header and len(left) > 1 else None
    labels = _labels(plain, body, [place for place in left if place != numbering])
    if twice := [name for place, name in enumerate(plain) if place in labels and plain.count(name) > 1 and name]:
        raise DataError(f"two columns are called {twice[0]!r}: give each label a name of its own")
    return Columns(names, width, path, labels, split, numbering, header and not _has_known(rows[0]))


def is_number(text: str) -> bool:
    """Whether a cell holds a number that a record can hold."""
    try:
        return abs(float(text)) <= LARGEST_LABEL
    except ValueError:
        return False


def _plain(name: str) -> str:
    return name.strip().casefold().replace(" ", "_").replace("-", "_")


def _is_header(rows: Sequence[Sequence[str]]) -> bool:
    first = [cell.strip() for cell in rows[0]]
    if any(is_image(cell) for cell in first):
        return False
    # A path that lacks its suffix among others that have theirs is a path all the same.
    later = rows[1:2] if not any(is_number(cell) for cell in first) else rows[1:]
    above = [place for place, cell in enumerate(first) if "/" not in cell and "\\" not in cell]
    above_images = any(all(place < len(row) and is_image(row[place].strip()) for row in later) for place in above)
    if later and above_images:
        return True
    return _has_known(first) and not any(is_number(cell) for cell in first)


def _has_known(first: Sequence[str]) -> bool:
    return any(_plain(cell) in PATHS or _plain(cell) in LABELS for cell in first)


def _path(plain: list[str], body: Sequence[Sequence[str]], width: int) -> int:
    images = [sum(is_image(row[place].strip()) for row in body) for place in range(width)]
    known = [plain.index(name) for name in PATHS if name in plain]
    holding = [place for place in known if images[place]]
    if holding or known:
        return (holding or known)[0]
    if max(images):
        return images.index(max(images))
    if plain:
        raise DataError(f"no column of image paths: call one 'path' (the columns: {_told(plain)})")
    raise DataError("no paths of images, and no first line that names columns: a table begins with path,label")


def _split(plain: list[str], body: Sequence[Sequence[str]], left: list[int]) -> int | None:
    """The column that says train or val: by its name and what stands in it; without a header by that alone."""
    for place in left:
        values = {row[place].strip().casefold() for row in body}
        named = not plain or plain[place] in SPLIT
        if named and values and values <= SPLITS.keys():
            return place
        if plain and plain[place] == "split" and values & SPLITS.keys():
            other = sorted(values - SPLITS.keys())[0]
            raise DataError(f"the column 'split' holds {other!r}; it may hold train, val and test")
    return None


def _numbering(body: Sequence[Sequence[str]], left: list[int]) -> int | None:
    """The column that counts the lines, from 0 or from 1 on."""
    for place in left if len(body) > 2 else ():
        told = [row[place].strip() for row in body]
        if any(told == [str(number + first) for number in range(len(told))] for first in (0, 1)):
            return place
    return None


def _labels(plain: list[str], body: Sequence[Sequence[str]], left: list[int]) -> tuple[int, ...]:
    known = [place for name in LABELS for place in left if plain and plain[place] == name]
    if known:
        return (known[0],)
    rest = [place for place in left if not plain or plain[place] not in _NUMBERING]
    if len(rest) == 1 or (rest and body and all(is_number(row[place].strip()) for row in body for place in rest)):
        return tuple(rest)
    if not plain and rest:
        raise DataError(f"{len(left)} columns beside the path: name them in a first line, such as path,label")
    if not rest:
        raise DataError(f"no column of labels: call one 'label' (the columns: {_told(plain) or 'a path alone'})")
    raise DataError(f"which column is the label? Call it 'label' (the columns: {_told(plain)})")


def _told(plain: list[str]) -> str:
    return ", ".join(plain[:10]) + ", ..." * (len(plain) > 10)
