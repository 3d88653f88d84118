"""Labels as people write them, words or numbers, to class numbers and class names, or to label vectors.

A class list that is given decides: a text that is a name in it is that class, also where it looks like a number. Whole
numbers are places in a list of words; in a list of numbers they are the name of the same value (``1`` is ``001``).
Without a list, words are sorted by code point, as folders are, and numbers by their value; leading zeros stay.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from steadytrain.data.recordio.card import LabelNames
from steadytrain.data.recordio.lst import LARGEST_LABEL
from steadytrain.data.recordio.reader import MOST_CLASSES
from steadytrain.data.sources.listing import Labels
from steadytrain.errors import DataError, did_you_mean
from steadytrain.format import Say, few

_MOST_DIGITS = 18
_MOST_SHOWN = 3
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
# Zero-width spaces, joiners, marks of direction, soft hyphens: nobody sees them. Joiners shape letters within a word.
_INVISIBLE = dict.fromkeys(
    [0x00AD, 0x200B, 0x200E, 0x200F, *range(0x202A, 0x202F), 0x2060, *range(0x2066, 0x206A), 0xFEFF]
)
_BLANKS = dict.fromkeys([0x00A0, 0x2007, 0x202F], " ")  # that do not break lines
_JOINERS = "\u200c\u200d"


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
    """Return whether a text is a number, as spreadsheets and programs write them, that a record can hold.

    >>> is_number("-1"), is_number("0.5"), is_number("1e3"), is_number("1_0"), is_number("nan"), is_number("\uff11")
    (True, True, True, False, False, False)
    """
    return _NUMBER.fullmatch(text) is not None and abs(float(text)) <= LARGEST_LABEL


def class_name(text: str) -> str:
    """A class name as it is stored: composed Unicode, without invisible characters and without blanks around it.

    >>> class_name("cat\u200b") == class_name("\ufeff cat\xa0") == "cat"
    True
    """
    seen = unicodedata.normalize("NFC", text.translate(_INVISIBLE).translate(_BLANKS))
    return seen.strip().strip(_JOINERS).strip()


def classes_from_texts(
    texts: Sequence[str], *, classes: Sequence[str] | None, where: str, say: Say = lambda _: None
) -> tuple[tuple[str, ...], NDArray[np.int64]]:
    """Class names and class numbers of labels that are texts.

    Without ``classes`` the class list is made of the labels that occur. Leading zeros are part of a name; ``7.0`` is
    ``7`` where all labels are whole numbers.

    Args:
        where: they come from, for messages.
        say: is told where numbers were taken for something else than names.

    Raises:
        DataError: a label is not in ``classes``.

    >>> classes_from_texts(["dog", "cat", "dog"], classes=None, where="a.csv")
    (('cat', 'dog'), array([1, 0, 1]))
    >>> classes_from_texts(["10", "9", "10"], classes=None, where="a.csv")
    (('9', '10'), array([1, 0, 1]))
    >>> classes_from_texts(["010", "002"], classes=("001", "002", "010"), where="a.csv")
    (('001', '002', '010'), array([2, 1]))
    >>> classes_from_texts(["1", "0"], classes=("cat", "dog"), where="a.csv")
    (('cat', 'dog'), array([1, 0]))
    """
    places: dict[str, int] = {}  # of the different labels, in the order in which they come
    inverse = np.fromiter((places.setdefault(text, len(places)) for text in texts), np.int64)
    labels = [class_name(text) for text in places]
    marks = {f"{unicodedata.category(label[0])}{unicodedata.category(label[-1])}" for label in labels if label}
    is_printed = marks <= {"PiPf", "PfPi", "PsPi", "PsPf"}  # not those of (cat)
    is_quoted = all(len(label) > 2 and (is_printed or label[0] == label[-1] in "\"'") for label in labels)
    if is_quoted and not set(labels) & set(classes or ()):
        labels = [class_name(label[1:-1]) for label in labels]  # marks around every name are no part of it
    if None not in map(whole_number, labels) and (classes is None or not set(labels) & set(classes)):
        labels = [label.partition(".")[0] for label in labels]
    if classes is None:
        if odd := [label for label in labels if label.casefold() == "nan"]:
            say(f"warning: {where}: {odd[0]} is read as a class: take these lines out if their images have no label")
        are_numbers = all(map(is_number, labels))  # sorted by value; words by code point
        names = tuple(sorted(set(labels), key=lambda name: (float(name) if are_numbers else 0.0, name)))
        number_of: Mapping[str, int] = {name: number for number, name in enumerate(names)}
    else:
        names = tuple(classes)
        number_of = _find_in_list(labels, names, where, say)
    return names, np.array([number_of[label] for label in labels], np.int64)[inverse]


def is_padded(text: str) -> bool:
    """Return whether a text is a whole number with zeros before it: a code, whose zeros are part of its name.

    >>> is_padded("007"), is_padded("0"), is_padded("0.5")
    (True, False, False)
    """
    return len(text) > 1 and text[0] == "0" and whole_number(text) is not None and text[1] != "."


def _find_in_list(labels: Sequence[str], names: tuple[str, ...], where: str, say: Say) -> dict[str, int]:
    """The number of each label in a class list: by its name, by the value of a name, or as a place in a list of words.

    Raises:
        DataError: a label is none of these.
    """
    number_of = {class_name(name): number for number, name in reversed(list(enumerate(names)))}
    number_of |= {name: number for number, name in enumerate(names)}
    matched = {label: number_of[label] for label in labels if label in number_of}
    left = [label for label in labels if label not in matched]
    by_value: dict[int | None, list[int]] = {}
    for number, name in enumerate(names):
        by_value.setdefault(whole_number(name), []).append(number)
    words = by_value.pop(None, [])
    alike = {label: by_value[value] for label in left if (value := whole_number(label)) in by_value}
    if alike and all(len(numbers) == 1 for numbers in alike.values()):
        matched |= {label: numbers[0] for label, numbers in alike.items()}
        pairs = [f"{label} as {names[number]}" for label, [number] in alike.items()]
        say(f"{where}: labels are read as the classes of the same value: {few(pairs, _MOST_SHOWN)}")
    unknown = [label for label in left if label not in matched]
    if unknown and not matched and len(words) == len(names) and None not in map(whole_number, labels):
        numbers = np.array([whole_number(label) for label in labels], np.int64)
        require_in_list(numbers, names, where)
        if other := in_names(numbers.tolist(), names):
            raise DataError(f"{where}: {other}: write the names of the classes in place of numbers")
        say_places(where, names, numbers, say)
        return dict(zip(labels, numbers.tolist(), strict=True))
    require_known(unknown, names, where)
    return matched


def say_places(where: str, names: Sequence[str], numbers: NDArray[np.int64], say: Say) -> None:
    """Say that class numbers are taken for places in a class list, and where something speaks against it."""
    used = np.unique(numbers).tolist()
    pairs = [f"{number} is {names[number]}" for number in used]
    say(f"{where}: labels are numbers without names and are taken for places in the class list: {few(pairs, 3)}")
    say_doubt(where, names, used, say)


def say_doubt(where: str, names: Sequence[str], used: Sequence[int], say: Say) -> None:
    """Say what speaks against taking class numbers for places in a class list: its names, or that they begin at 1."""
    doubt = in_names(used, names)
    if doubt is None and len(used) > 1 and list(used) == list(range(1, len(used) + 1)):
        doubt = "no label is 0: subtract 1 from each if they count from 1"
    if doubt:
        say(f"warning: {where}: {doubt}")


def in_names(numbers: Sequence[int], names: Sequence[str]) -> str | None:
    """Say that numbers stand in names of other classes than those in their places; None where names do not tell.

    >>> in_names([1], ["c1", "c2"]), in_names([1], ["c0", "c1"]), in_names([0, 1], ["c1", "c2"])
    ('label 1 is c2 by its place (from 0 on), and c1 by its name', '', None)
    """
    places: dict[int, list[int]] = {}
    for place, name in enumerate(names):
        for number in set(map(int, re.findall(r"[0-9]{1,18}", name))):
            places.setdefault(number, []).append(place)
    if not all(len(places.get(number, ())) == 1 for number in numbers):
        return None
    others = [(number, places[number][0]) for number in numbers if places[number] != [number]]
    pairs = (f"label {n} is {names[n]} by its place (from 0 on), and {names[place]} by its name" for n, place in others)
    return next(pairs, "")


def classes_from_numbers(
    numbers: NDArray[np.int64],
    *,
    names: Sequence[str] | None,
    classes: Sequence[str] | None,
    where: str,
    say: Say = lambda _: None,
) -> tuple[tuple[str, ...], NDArray[np.int64]]:
    """Class names and class numbers of labels that are numbers in a file.

    Args:
        numbers: int64[N] from 0 on.
        names: of the numbers, where the source has them; None names them "0", "1" and so on.
        classes: the class list; None makes one of ``names``, or of the numbers up to the largest.
        where: they come from, for messages.
        say: is told what numbers without names were taken for.

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
        texts = [str(number) for number in numbers.tolist()]
        class_list, labels = classes_from_texts(texts, classes=classes, where=where, say=say)
        if len(odd := np.flatnonzero(labels != numbers)) and set(texts) <= set(class_list):
            number, place = int(numbers[odd[0]]), int(labels[odd[0]])
            say(
                f"{where}: numbers are read as the names of classes ({number} is the class called {number}, which is"
                f" number {place} of the list), not as places in the class list"
            )
        return class_list, labels
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
        is_from_one = largest == len(names) and int(numbers.min()) > 0
        hint = ": subtract 1 from each label, as classes count from 0" * is_from_one
        raise DataError(f"{where} has label {largest}; the class list ends at {len(names) - 1}{last}{hint}")


def require_known(unknown: Sequence[str], names: tuple[str, ...], where: str) -> None:
    """Raise DataError where a class list, ``names``, lacks classes of a source, ``unknown``."""
    if unknown:
        raise DataError(
            f"{where} holds classes that the class list lacks: {few(sorted(unknown))}.{did_you_mean(unknown[0], names)}"
            f" Remove them, or use the list of a set that has them (the list: {few(names)})"
        )


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
        " needs one class for each image (--label-column names its column of a table), or a 1 for each label that an"
        " image has and a 0 for each other"
    )
