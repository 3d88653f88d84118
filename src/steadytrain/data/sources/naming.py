"""Labels as people write them, words or numbers, to class numbers and class names.

A class list that is given decides: words are looked up in it; whole numbers that are no names in it are places in it.
Without one, words are sorted by code point, as folders are.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from steadytrain.data.recordio.reader import MOST_CLASSES
from steadytrain.data.sources.members import few
from steadytrain.errors import DataError, did_you_mean

Labels = NDArray[np.int64]

_MOST_DIGITS = 18


def whole(text: str) -> int | None:
    """A whole number from 0 on, also as spreadsheets spell it; None where it is none.

    >>> whole("7"), whole("7.0"), whole("007"), whole("7.5"), whole("-1"), whole("seven")
    (7, 7, 7, None, None, None)
    """
    digits = text[: -len(text.partition(".")[2]) - 1] if "." in text else text
    if not digits.isascii() or not digits.isdigit() or len(digits) > _MOST_DIGITS:
        return None
    return int(digits) if not text[len(digits) :].strip(".0") else None


def class_name(text: str) -> str:
    """A class name as it is stored: composed, without blanks around it."""
    return unicodedata.normalize("NFC", text.strip())


def from_texts(texts: Sequence[str], *, classes: Sequence[str] | None, where: str) -> tuple[tuple[str, ...], Labels]:
    """Class names and class numbers of labels that are names.

    Where every label is a whole number, classes are in the order of the numbers, and named by them.

    Args:
        texts: a label for each image.
        classes: the class list; None makes one of the labels that occur.
        where: they come from, for messages.

    Raises:
        DataError: a label is not in ``classes``.

    >>> from_texts(["dog", "cat", "dog"], classes=None, where="a.csv")
    (('cat', 'dog'), array([1, 0, 1]))
    >>> from_texts(["10", "9", "10"], classes=None, where="a.csv")
    (('9', '10'), array([1, 0, 1]))
    >>> from_texts(["1", "0"], classes=("cat", "dog"), where="a.csv")
    (('cat', 'dog'), array([1, 0]))
    """
    distinct, inverse = _distinct(texts)
    numbers = [whole(text) for text in distinct]
    told = [str(number) for number in numbers] if None not in numbers else [class_name(text) for text in distinct]
    if classes is None:
        names = tuple(sorted(set(told), key=int if None not in numbers else None))
    else:
        names = tuple(classes)
        if None not in numbers and not set(told) <= set(names):
            return names, _places(np.array(numbers, np.int64), names, where)[inverse]
    place = {name: number for number, name in enumerate(names)}
    _require_known([name for name in told if name not in place], names, where)
    return names, np.array([place[name] for name in told], np.int64)[inverse]


def from_numbers(
    numbers: Labels, *, names: Sequence[str] | None, classes: Sequence[str] | None, where: str
) -> tuple[tuple[str, ...], Labels]:
    """Class names and class numbers of labels that are numbers in a file.

    Args:
        numbers: int64[N] from 0 on.
        names: of the numbers, where the source tells; None names them "0", "1" and so on.
        classes: the class list; None makes one of ``names``, or of the numbers up to the largest.
        where: they come from, for messages.

    Raises:
        DataError: a number is negative, has no name or one of another, is not in ``classes``, or is too large.

    >>> from_numbers(np.array([2, 0]), names=None, classes=None, where="labels.idx")
    (('0', '1', '2'), array([2, 0]))
    """
    smallest, largest = int(numbers.min(initial=0)), int(numbers.max(initial=0))
    if smallest < 0 or largest >= MOST_CLASSES:
        value = smallest if smallest < 0 else largest
        raise DataError(f"{where} has label {value:,}; class numbers are 0 to {MOST_CLASSES - 1:,}")
    if names is not None:
        named = tuple(class_name(name) for name in names)
        if len(set(named)) < len(named):
            twice = next(name for place, name in enumerate(named) if name in named[:place])
            raise DataError(f"{where} has two classes called {twice}: give each a name of its own")
        numbers = _places(numbers, named, where)
        if classes is None or tuple(classes) == named:
            return named, numbers
        place = {name: number for number, name in enumerate(classes)}
        used = np.unique(numbers).tolist()
        _require_known([named[number] for number in used if named[number] not in place], tuple(classes), where)
        return tuple(classes), np.array([place.get(name, -1) for name in named], np.int64)[numbers]
    if classes is None:
        return tuple(str(number) for number in range(largest + 1)), numbers
    return from_texts([str(number) for number in numbers.tolist()], classes=classes, where=where)


def require_two(classes: Sequence[str], labels: NDArray[np.int64] | NDArray[np.float32], where: str) -> None:
    """Raise DataError where there is only one class to tell apart."""
    if labels.ndim == 1 and len(classes) < 2:
        raise DataError(f"{where} has only one class, {few(list(classes)) or 0}: a classifier needs two or more")


def _distinct(texts: Iterable[str]) -> tuple[list[str], Labels]:
    """The different labels in the order in which they come, and for each image which one it has."""
    place: dict[str, int] = {}
    inverse = np.fromiter((place.setdefault(text, len(place)) for text in texts), np.int64)
    return list(place), inverse


def _places(numbers: Labels, names: tuple[str, ...], where: str) -> Labels:
    largest = int(numbers.max(initial=0))
    if largest >= len(names):
        last = f" ({names[-1]})" if names else ""
        raise DataError(f"{where} has label {largest}; the class list ends at {len(names) - 1}{last}")
    return numbers


def _require_known(unknown: list[str], names: tuple[str, ...], where: str) -> None:
    if unknown:
        raise DataError(
            f"{where} has classes that the class list lacks: {few(sorted(unknown))}.{did_you_mean(unknown[0], names)}"
            f" Remove them, or use the list of a set that has them (the list: {few(names)})"
        )
