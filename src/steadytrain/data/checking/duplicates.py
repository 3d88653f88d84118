"""Images with the same bytes, found by their fingerprints: within a set, with other labels, in two sets.

>>> prints = np.frombuffer(b"".join(bytes([n]) * 16 for n in (1, 2, 1, 3, 1)), np.uint8).reshape(-1, 16)
>>> [group.tolist() for group in same(prints)]
[[0, 2, 4]]
>>> shared(prints[:2], prints[2:]).tolist()
[[0, 0], [0, 2]]
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

Fingerprints = NDArray[np.uint8]
"""uint8[N, 16]"""


def same(prints: Fingerprints) -> Iterator[NDArray[np.int64]]:
    """Numbers of the images that are the same, group by group; each group rises, and so do the groups' first ones."""
    order, starts = _sorted(prints)
    sizes = np.diff(np.append(starts, len(order)))
    several = np.flatnonzero(sizes > 1)
    firsts = order[starts[several]]
    for group in several[np.argsort(firsts, kind="stable")].tolist():
        yield order[starts[group] : starts[group] + sizes[group]]


def shared(ours: Fingerprints, theirs: Fingerprints) -> NDArray[np.int64]:
    """int64[M, 2]: the numbers of images that are in both sets, for each of ``theirs`` the first of ``ours``."""
    pairs = [
        (int(group[0]), int(number) - len(ours))
        for group in same(np.concatenate([ours, theirs]))
        if group[0] < len(ours)
        for number in group[group >= len(ours)]
    ]
    return np.array(sorted(pairs, key=lambda pair: pair[1]), np.int64).reshape(-1, 2)


def _sorted(prints: Fingerprints) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The order that brings equal ones together, each group rising; and where in it the groups start."""
    words = np.ascontiguousarray(prints).view(np.uint64)
    order = np.lexsort((words[:, 1], words[:, 0]))
    words = words[order]
    first = np.ones(len(words), np.bool_)
    first[1:] = (words[1:] != words[:-1]).any(axis=1)
    return order, np.flatnonzero(first)
