"""Several labels in one cell: ``cat;dog``, ``cat|dog``, ``clear primary water``; how to tell them from one label."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from steadytrain.data.sources.columns import MANY
from steadytrain.data.sources.naming import class_name
from steadytrain.errors import DataError

MOST_LABELS = 10_000


def separator(texts: Sequence[str], *, header: str, where: str) -> str:
    """What joins several labels in the cells of one column; empty where each cell is one label.

    ``;`` and ``|`` always join. A blank joins only in a column that is named for several (``tags``) and whose cells are
    at least twice as many as the words in them, as only combinations are.

    Raises:
        DataError: it cannot be told.

    >>> separator(["cat;dog", "cat"], header="label", where="a.csv"), separator(["red cat"], header="", where="a.csv")
    (';', '')
    """
    cells = set(texts)
    signs = [sign for sign in ";|" if any(sign in cell for cell in cells)]
    if len(signs) > 1:
        raise DataError(f"{where}: labels hold both ';' and '|': join several labels by one of them alone")
    if signs or header not in MANY or not any(" " in cell for cell in cells):
        return signs[0] if signs else ""
    words = {word for cell in cells for word in cell.split()}
    if len(cells) <= len(words):
        return ""
    if len(cells) >= 2 * len(words):
        return " "
    raise DataError(
        f"{where}: it cannot be told whether blanks join several labels in the column {header!r} ({len(cells):,} cells"
        f" of {len(words):,} words): join them by ';', or call the column 'label' where each cell is one class"
    )


def to_vectors(texts: Sequence[str], sign: str, *, where: str) -> tuple[tuple[str, ...], NDArray[np.float32]]:
    """Names of the labels, sorted, and float32[N, L] with 1 for each that a cell holds.

    Raises:
        DataError: more than 10,000 labels.

    >>> to_vectors(["dog;cat", "dog"], ";", where="a.csv")
    (('cat', 'dog'), array([[1., 1.],
           [0., 1.]], dtype=float32))
    """
    parts = {text: {class_name(word) for word in text.split(sign) if word.strip()} for text in set(texts)}
    names = tuple(sorted(set().union(*parts.values())))
    if len(names) > MOST_LABELS:
        raise DataError(f"{where} has {len(names):,} labels; {MOST_LABELS:,} are the most that vectors are made of")
    place = {name: column for column, name in enumerate(names)}
    vectors = np.zeros((len(texts), len(names)), np.float32)
    for row, text in enumerate(texts):
        vectors[row, [place[name] for name in parts[text]]] = 1
    return names, vectors
