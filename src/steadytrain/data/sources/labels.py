"""Labels as people write them, words or numbers, to class numbers and class names, or to label vectors.

A class list that is given decides: words are looked up in it; whole numbers that are no names in it are places in it.
Without one, words are sorted by code point, as folders are.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from steadytrain.data.recordio.card import LabelNames
from steadytrain.data.recordio.lst import LARGEST_LABEL
from steadytrain.data.recordio.reader import MOST_CLASSES
from steadytrain.data.sources.filenames import few
from steadytrain.data.sources.listing import Labels
from steadytrain.errors import DataError, did_you_mean

MOST_LABELS = 10_000
SEVERAL_LABELS = frozenset(["labels", "tags", "classes", "categories", "attributes"])
"""Names of columns that may hold several labels in a cell."""

_MOST_DIGITS = 18


def whole_number(text: str) -> int | None:
    """A whole number from 0 on, also as spreadsheets spell it; None for any other text.

    >>> whole_number("7"), whole_number("7.0"), whole_number("007"), whole_number("7.5"), whole_number("-1")
    (7, 7, 7, None, None)
    """
    digits = text[: -len(text.partition(".")[2]) - 1] if "." in text else text
    if not digits.isascii() or not digits.isdigit() or len(digits) > _MOST_DIGITS:
        return None
    return int(digits) if not text[len(digits) :].strip(".0") else None


def is_number(text: str) -> bool:
    """Whether a text is a number that a record can hold."""
    try:
        return abs(float(text)) <= LARGEST_LABEL
    except ValueError:
        return False


def class_name(text: str) -> str:
    """A class name as it is stored: composed Unicode, without blanks around it."""
    return unicodedata.normalize("NFC", text.strip())


def classes_from_texts(
    texts: Sequence[str], *, classes: Sequence[str] | None, where: str
) -> tuple[tuple[str, ...], NDArray[np.int64]]:
    """Class names and class numbers of labels that are texts.

    Where every label is a whole number, classes are in the order of the numbers, and named by them. Without ``classes``
    the class list is made of the labels that occur.

    Raises:
        DataError: a label is not in ``classes``.

    >>> classes_from_texts(["dog", "cat", "dog"], classes=None, where="a.csv")
    (('cat', 'dog'), array([1, 0, 1]))
    >>> classes_from_texts(["10", "9", "10"], classes=None, where="a.csv")
    (('9', '10'), array([1, 0, 1]))
    >>> classes_from_texts(["1", "0"], classes=("cat", "dog"), where="a.csv")
    (('cat', 'dog'), array([1, 0]))
    """
    places: dict[str, int] = {}  # of the different labels, in the order in which they come
    inverse = np.fromiter((places.setdefault(text, len(places)) for text in texts), np.int64)
    numbers = [whole_number(text) for text in places]
    all_numbers = None not in numbers
    labels = [str(number) for number in numbers] if all_numbers else [class_name(text) for text in places]
    if classes is None:
        names = tuple(sorted(set(labels), key=int if all_numbers else None))
    else:
        names = tuple(classes)
        if all_numbers and not set(labels) <= set(names):
            places_in_list = np.array(numbers, np.int64)
            require_in_list(places_in_list, names, where)
            return names, places_in_list[inverse]
    number_of = {name: number for number, name in enumerate(names)}
    require_known([label for label in labels if label not in number_of], names, where)
    return names, np.array([number_of[label] for label in labels], np.int64)[inverse]


def classes_from_numbers(
    numbers: NDArray[np.int64], *, names: Sequence[str] | None, classes: Sequence[str] | None, where: str
) -> tuple[tuple[str, ...], NDArray[np.int64]]:
    """Class names and class numbers of labels that are numbers in a file.

    Args:
        numbers: int64[N] from 0 on.
        names: of the numbers, where the source has them; None names them "0", "1" and so on.
        classes: the class list; None makes one of ``names``, or of the numbers up to the largest.
        where: they come from, for messages.

    Raises:
        DataError: a number is negative, has no name or that of another, is not in ``classes``, or is too large.

    >>> classes_from_numbers(np.array([2, 0]), names=None, classes=None, where="labels.idx")
    (('0', '1', '2'), array([2, 0]))
    """
    smallest, largest = int(numbers.min(initial=0)), int(numbers.max(initial=0))
    if smallest < 0 or largest >= MOST_CLASSES:
        value = smallest if smallest < 0 else largest
        raise DataError(f"{where} has label {value:,}; class numbers are 0 to {MOST_CLASSES - 1:,}")
    if names is None:
        if classes is None:
            return tuple(str(number) for number in range(largest + 1)), numbers
        return classes_from_texts([str(number) for number in numbers.tolist()], classes=classes, where=where)
    named = tuple(class_name(name) for name in names)
    if len(set(named)) < len(named):
        twice = next(name for place, name in enumerate(named) if name in named[:place])
        raise DataError(f"{where} has two classes called {twice}: rename one")
    require_in_list(numbers, named, where)
    if classes is None or tuple(classes) == named:
        return named, numbers
    number_of = {name: number for number, name in enumerate(classes)}
    used = [named[number] for number in np.unique(numbers).tolist()]
    require_known([name for name in used if name not in number_of], tuple(classes), where)
    return tuple(classes), np.array([number_of.get(name, -1) for name in named], np.int64)[numbers]


def require_two_classes(classes: Sequence[str], labels: Labels, where: str) -> None:
    """Raise DataError where there is only one class to tell apart."""
    if labels.ndim == 1 and len(classes) < 2:
        raise DataError(f"{where} has only one class, {few(list(classes)) or 0}: a classifier needs at least two")


def require_in_list(numbers: Labels, names: Sequence[str], where: str) -> None:
    """Raise DataError where a class number is beyond the class list."""
    largest = int(numbers.max(initial=0))
    if largest >= len(names):
        last = f" ({names[-1]})" if names else ""
        raise DataError(f"{where} has label {largest}; the class list ends at {len(names) - 1}{last}")


def require_known(unknown: Sequence[str], names: tuple[str, ...], where: str) -> None:
    """Raise DataError where a class list, ``names``, lacks classes of a source, ``unknown``."""
    if unknown:
        raise DataError(
            f"{where} holds classes that the class list lacks: {few(sorted(unknown))}.{did_you_mean(unknown[0], names)}"
            f" Remove them, or use the list of a set that has them (the list: {few(names)})"
        )


def label_separator(texts: Sequence[str], *, header: str, where: str) -> str:
    """The sign that joins several labels in the cells of one column; empty where each cell is one label.

    ``;`` and ``|`` always join. A blank joins only in a column that is named for several (``tags``) and whose cells are
    at least twice as many as the words in them, as only combinations are.

    Raises:
        DataError: it cannot be told.

    >>> label_separator(["cat;dog", "cat"], header="label", where="a.csv")
    ';'
    >>> label_separator(["red cat"], header="", where="a.csv")
    ''
    """
    cells = set(texts)
    signs = [sign for sign in ";|" if any(sign in cell for cell in cells)]
    if len(signs) > 1:
        raise DataError(f"{where}: labels contain both ';' and '|': use only one of them as the separator")
    if signs or header not in SEVERAL_LABELS or not any(" " in cell for cell in cells):
        return signs[0] if signs else ""
    words = {word for cell in cells for word in cell.split()}
    if len(cells) <= len(words):
        return ""
    if len(cells) >= 2 * len(words):
        return " "
    raise DataError(
        f"{where}: it is unclear whether spaces separate several labels in the column {header!r} ({len(cells):,} cells"
        f" of {len(words):,} words): separate them by ';', or name the column 'label' if each cell is one class"
    )


def multi_hot(
    texts: Sequence[str], sign: str, *, where: str, classes: Sequence[str] | None = None
) -> tuple[tuple[str, ...], NDArray[np.float32]]:
    """Names of the labels, sorted or as ``classes`` lists them, and float32[N, L] with 1 for each that a cell holds.

    An empty cell is an image without a label; an empty ``sign`` joins nothing.

    Raises:
        DataError: more than 10,000 labels, or one that ``classes`` lacks.

    >>> multi_hot(["dog;cat", "dog"], ";", where="a.csv")
    (('cat', 'dog'), array([[1., 1.],
           [0., 1.]], dtype=float32))
    """
    words = {text: text.split(sign) if sign else [text] for text in set(texts)}
    parts = {text: {class_name(word) for word in split if word.strip()} for text, split in words.items()}
    used = set().union(*parts.values())
    names = tuple(sorted(used) if classes is None else classes)
    require_known(list(used - set(names)), names, where)
    if len(names) > MOST_LABELS:
        raise DataError(f"{where} has {len(names):,} labels; {MOST_LABELS:,} are the most that vectors are made of")
    column_of = {name: column for column, name in enumerate(names)}
    vectors = np.zeros((len(texts), len(names)), np.float32)
    for row, text in enumerate(texts):
        vectors[row, [column_of[name] for name in parts[text]]] = 1
    return names, vectors


def align_columns(labels: Labels, names: Sequence[str], wanted: LabelNames, *, where: str) -> Labels:
    """Put the columns of label vectors, called ``names`` (empty: they have none), into the order of a class list.

    Raises:
        DataError: other columns than the list has, or not as many.
    """
    if not names and labels.shape[1] == len(wanted):
        return labels
    if sorted(names) != sorted(wanted):
        differ = few(sorted(set(names) ^ set(wanted))) if names else f"{labels.shape[1]:,} without names"
        raise DataError(
            f"{where} has other labels than the class list ({differ}; the list: {few(wanted)}): give it a column for"
            " each of the list, or use the list of a set that has them"
        )
    return labels[:, [list(names).index(name) for name in wanted]]


def require_zero_or_one(labels: Labels, *, where: str) -> None:
    """Raise DataError for label vectors that do not say of each label whether an image has it."""
    if labels.ndim == 1 or bool(((labels == 0) | (labels == 1)).all()):
        return
    row, column = (int(at[0]) for at in np.nonzero((labels != 0) & (labels != 1)))
    raise DataError(
        f"{where} has label vectors with other values than 0 and 1 ({labels[row, column]:g} in image {row}): training"
        " needs one class for each image, or a 1 for each label that an image has and a 0 for each other"
    )
