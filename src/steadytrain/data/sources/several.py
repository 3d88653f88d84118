"""Several labels in one cell: joined by a sign, as a list of Python or JSON, or as zeros and ones.

A cell may hold ``cat;dog``, ``cat|dog`` or ``cat, dog``; ``['cat', 'dog']``, as pandas and Keras write lists; or
``0,1,1``, a digit for each label. Whether a comma or a blank joins labels, or belongs to a name (``Smith, J``), is told
by all cells of the column together: labels that are joined in one cell stand alone in others.
"""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from steadytrain.data.recordio.card import LabelNames
from steadytrain.data.sources.labels import class_name, classes_from_texts, require_known
from steadytrain.data.sources.listing import Labels
from steadytrain.errors import DataError
from steadytrain.format import Say, few

MOST_LABELS = 10_000
SEVERAL_LABELS = frozenset(
    ["labels", "tags", "classes", "categories", "attributes", "finding_labels", "attribute_ids", "genres", "objects"]
)
"""Names of columns that may hold several labels in a cell."""

_BITS = {"0": 0, "1": 1, "0.0": 0, "1.0": 1, "false": 0, "true": 1}
_BRACKETS = {"[": "]", "(": ")", "{": "}"}
_ALONE = 0.5  # share of the words in cells with commas that stand alone elsewhere, from which on commas join labels
_LONGEST_LIST = 1 << 16
_QUOTED = r"""(?:'[^'\\]*'|"[^"\\]*")"""
_ITEM, _ARRAY = re.compile(_QUOTED), re.compile(rf"{_QUOTED}(?:\s+{_QUOTED})+")


@dataclass(frozen=True)
class Cells:
    """The cells of a column that hold several labels each.

    Args:
        parts: the labels of each different cell; of ``multi_hot`` ones a digit for each label there is.
        is_multi_hot: cells hold zeros and ones.
    """

    parts: Mapping[str, tuple[str, ...]]
    is_multi_hot: bool = False

    def vectors(
        self, texts: Sequence[str], *, where: str, classes: LabelNames | None = None
    ) -> tuple[tuple[str, ...], NDArray[np.float32]]:
        """Names of the labels, and float32[N, L] with 1 for each that a cell holds; zeros and ones give no names.

        Raises:
            DataError: more than 10,000 labels, or other ones than ``classes``.
        """
        if not self.is_multi_hot:
            return multi_hot([self.parts.get(text, ()) for text in texts], where=where, classes=classes)
        rows = {text: [_BITS[_bit_of(bit)] for bit in bits] for text, bits in self.parts.items()}
        vectors = np.array([rows[text] for text in texts], np.float32)
        if classes is not None and vectors.shape[1] != len(classes):
            raise DataError(
                f"{where} has {vectors.shape[1]:,} labels in a cell, and the class list has {len(classes):,}"
                f" ({few(classes)}): use the list of a set that has as many"
            )
        return classes or (), vectors


def read_cells(
    texts: Iterable[str], *, header: str, where: str, classes: Sequence[str] | None = None, say: Say = lambda _: None
) -> Cells | None:
    """Tell whether cells hold several labels, and which; None where each is one label.

    Args:
        texts: the cells of a column; empty ones do not count.
        header: name of the column, in lower case with underscores; empty where it has none.
        where: they are, for messages.
        classes: the class list, where there is one.
        say: is told what was taken for one label and may be several.

    Raises:
        DataError: it cannot be told.

    >>> read_cells(["['cat', 'dog']", "['cat']"], header="", where="a.csv").parts["['cat', 'dog']"]
    ('cat', 'dog')
    >>> read_cells(["0,1,1", "1,0,1"], header="", where="a.csv").is_multi_hot
    True
    >>> read_cells(["Smith, J", "Lee, K"], header="label", where="a.csv") is None
    True
    """
    cells = {text for text in texts if text.strip()}
    if classes is not None and not isinstance(classes, LabelNames) and cells <= set(classes):
        return None
    if (lists := _read_lists(cells, where)) is not None:
        return Cells(lists, is_multi_hot=_is_multi_hot(lists))
    for sign in (",", ";", "|", None):
        bits = {cell: tuple(part.strip() for part in cell.split(sign)) for cell in cells}
        if _is_multi_hot(bits):
            return Cells(bits, is_multi_hot=True)
    signs = [sign for sign in ";|" if any(sign in cell for cell in cells)]
    if len(signs) > 1:
        raise DataError(f"{where}: labels contain both ';' and '|': use only one of them as the separator")
    if signs:
        return Cells(_split(cells, signs[0]))
    if any("," in cell for cell in cells):
        return _read_commas(cells, header, where, classes, say)
    if any(" " in cell for cell in cells) and header in SEVERAL_LABELS:
        return _read_blanks(cells, header, where)
    return None


def _split(cells: Iterable[str], sign: str | None) -> dict[str, tuple[str, ...]]:
    return {cell: tuple(part.strip() for part in cell.split(sign) if part.strip()) for cell in cells}


def _is_multi_hot(parts: Mapping[str, Sequence[str]]) -> bool:
    """Return whether cells are vectors of zeros and ones: equally long, and not simply two labels called 0 and 1."""
    lengths = set(map(len, parts.values()))
    if len(lengths) != 1 or (length := lengths.pop()) < 2:
        return False
    if any(_bit_of(bit) not in _BITS for bits in parts.values() for bit in bits):
        return False
    return length > 2 or len(parts) > 1 or any(len(set(bits)) < len(bits) for bits in parts.values())


def _read_lists(cells: set[str], where: str) -> dict[str, tuple[str, ...]] | None:
    """The items of cells that are lists, as Python, JSON or NumPy write them; None where none is."""
    lists: dict[str, tuple[str, ...]] = {}
    for cell in cells:
        if _BRACKETS.get(cell[0]) == cell[-1] and (items := _read_list(cell)) is not None:
            lists[cell] = items
    if not lists or (len(lists) < len(cells) and not any("'" in cell or '"' in cell for cell in lists)):
        return None
    for cell in cells - lists.keys():
        if cell[0] == "[":
            raise DataError(f"{where}: the label {cell[:60]!r} begins like a list and is none: write ['cat', 'dog']")
        lists[cell] = (cell,)
    return lists


def _read_list(cell: str) -> tuple[str, ...] | None:
    """The items of a list; None where a text is none. Without commas or quotes it is read as NumPy prints arrays."""
    if len(cell) > _LONGEST_LIST:
        return None
    inside = cell[1:-1].strip()
    if cell[0] == "[" and _ARRAY.fullmatch(inside):  # Python would read 'cat' 'dog' as one text
        return tuple(item[1:-1] for item in _ITEM.findall(inside))
    for read in (json.loads, ast.literal_eval):
        try:
            values = read(cell)
        except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
            continue
        if isinstance(values, dict) and len(values) == 1:  # Label Studio's {"choices": ["cat", "dog"]}
            [values] = values.values()
        if isinstance(values, list | tuple | set) and all(isinstance(value, str | int | float) for value in values):
            return tuple(map(str, values))
        return None
    if cell[0] != "[" or any(sign in inside for sign in "['\""):
        return None
    words = inside.split()
    if all(_bit_of(word) in _BITS for word in words):
        return tuple(words)
    return tuple(item.strip() for item in inside.split(",") if item.strip())


def _bit_of(text: str) -> str:
    return text.casefold().rstrip(".")


def _read_commas(cells: set[str], header: str, where: str, classes: Sequence[str] | None, say: Say) -> Cells | None:
    """Tell whether commas join labels: then these stand alone in other cells, or are numbers, of which cells vary."""
    parts = _split(cells, ",")
    joined = [split for split in parts.values() if len(split) > 1]
    words = {word for split in joined for word in split}
    if isinstance(classes, LabelNames) and words <= set(map(class_name, classes)):
        return Cells(parts)
    alone = {split[0] for split in parts.values() if len(split) == 1}
    uses = Counter(word for split in joined for word in set(split))
    is_shared = max(uses.values(), default=0) > 1
    if all(word.isascii() and word.isdigit() for word in words) and len({len(split) for split in parts.values()}) > 1:
        return Cells(parts)
    if joined and len(words & alone) >= _ALONE * len(words):
        return Cells(parts)
    if header in SEVERAL_LABELS and len(cells) >= 2 * len(words | alone):
        return Cells(parts)
    if header in SEVERAL_LABELS and is_shared:
        raise DataError(
            f"{where}: it is unclear whether commas separate several labels in the column {header!r}"
            f" ({min(cells - alone)!r}): separate them by ';', or name the column 'label' if each cell is one class"
        )
    if is_shared:
        say(f"{where}: each cell is one class, also {min(cells - alone)!r}: separate several labels of an image by ';'")
    return None


def _read_blanks(cells: set[str], header: str, where: str) -> Cells | None:
    """Tell whether blanks join labels: cells are then at least twice as many as words, as only combinations are."""
    words = {word for cell in cells for word in cell.split()}
    if len(cells) <= len(words):
        return None
    if len(cells) >= 2 * len(words):
        return Cells(_split(cells, None))
    raise DataError(
        f"{where}: it is unclear whether spaces separate several labels in the column {header!r} ({len(cells):,} cells"
        f" of {len(words):,} words): separate them by ';', or name the column 'label' if each cell is one class"
    )


def name_labels(
    texts: Sequence[str], cells: Cells | None, *, where: str, classes: Sequence[str] | None, say: Say
) -> tuple[tuple[str, ...], tuple[str, ...], Labels]:
    """Class names, names of several labels (one of the two is empty), and labels, of a text for each image.

    Args:
        texts: of the images; an empty one has none of several labels.
        cells: what :func:`read_cells` told of them.
        where: they are, for messages.
        classes: the class list, or the names of labels, where there are any.

    Raises:
        DataError: labels that the class list lacks, or several where it has classes.
    """
    label_list = classes if isinstance(classes, LabelNames) else None
    is_in_lists = cells is not None and all(len(labels) == 1 for labels in cells.parts.values())
    if cells is not None and is_in_lists and label_list is None:  # of one label each
        texts, cells = [cells.parts[text][0] for text in texts], None
    if cells is None and label_list is None:
        class_names, labels = classes_from_texts(texts, classes=classes, where=where, say=say)
        return class_names, (), labels
    if classes is not None and label_list is None:
        raise DataError(f"{where} has label vectors, several labels for each image: --classes does not apply")
    if cells is None:
        label_names, vectors = multi_hot([[text] if text else [] for text in texts], where=where, classes=label_list)
    else:
        label_names, vectors = cells.vectors(texts, where=where, classes=label_list)
    say_label_names(where, label_names, vectors, say)
    return (), label_names, vectors


def say_label_names(where: str, names: Sequence[str], labels: Labels, say: Say) -> None:
    """Say which labels an image may have several of."""
    if names:
        say(f"{where}: several labels per image, in this order: {few(names, 20)}")
    elif labels.shape[1] > 1:
        say(f"{where}: several labels per image: {labels.shape[1]:,} without names")


def multi_hot(
    labels: Sequence[Sequence[str]], *, where: str, classes: Sequence[str] | None = None
) -> tuple[tuple[str, ...], NDArray[np.float32]]:
    """Names of the labels, sorted or as ``classes`` lists them, and float32[N, L] with 1 for each that an image has.

    Raises:
        DataError: more than 10,000 labels, or one that ``classes`` lacks.

    >>> multi_hot([["dog", "cat"], ["dog"]], where="a.csv")
    (('cat', 'dog'), array([[1., 1.],
           [0., 1.]], dtype=float32))
    """
    named = {tuple(words): {class_name(word) for word in words if word.strip()} for words in labels}
    used = set[str]().union(*named.values())
    names = tuple(sorted(used) if classes is None else classes)
    require_known(list(used - set(names)), names, where)
    if len(names) > MOST_LABELS:
        raise DataError(f"{where} has {len(names):,} labels; {MOST_LABELS:,} are the most that vectors are made of")
    column_of = {name: column for column, name in enumerate(names)}
    vectors = np.zeros((len(labels), len(names)), np.float32)
    for row, words in enumerate(labels):
        vectors[row, [column_of[name] for name in named[tuple(words)]]] = 1
    return names, vectors
