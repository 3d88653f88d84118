"""Hold out part of the images for validation: a pure function of labels and seed, the same everywhere and for good."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from steadytrain.errors import DataError

Ids = NDArray[np.int64]


def hold_out(labels: NDArray[np.int64] | NDArray[np.float32], *, fraction: float, seed: int) -> tuple[Ids, Ids]:
    """Split image numbers in two, class by class.

    Of n images of a class ``round(n * fraction)`` are held out, but at least one of two or more, and never all: with
    a ``fraction`` above 0 every class that can is in both parts. Label vectors are split without regard to them.

    Args:
        labels: int64[N] class numbers, or float32[N, L] vectors.
        fraction: 0 up to, not including, 1.
        seed: chooses which images, 0 to 2**64 - 1.

    Returns:
        The numbers to train on and those held out, int64, each rising; together they are 0 to N - 1.

    Raises:
        DataError: the fraction is out of range.

    >>> train, val = hold_out(np.array([0, 0, 0, 1, 1, 1]), fraction=0.34, seed=1)
    >>> len(train), len(val), sorted([*train.tolist(), *val.tolist()])
    (4, 2, [0, 1, 2, 3, 4, 5])
    """
    if not 0 <= fraction < 1:
        raise DataError(f"the share to hold out is {fraction}; it must be from 0 up to, not including, 1")
    groups = labels.astype(np.int64) if labels.ndim == 1 else np.zeros(len(labels), np.int64)
    order, rank, counts = _shuffled(groups, seed)
    most = np.maximum(counts - 1, 0)
    wanted = np.minimum(np.maximum(np.rint(counts * fraction).astype(np.int64), 1), most) if fraction else 0 * counts
    held = rank < np.repeat(wanted, counts)
    return np.sort(order[~held]), np.sort(order[held])


def keep_per_class(labels: NDArray[np.int64], *, count: int, seed: int) -> tuple[Ids, Ids]:
    """Split image numbers in two: ``count`` of each class to train on, or all that it has, and the rest held out.

    Args:
        labels: int64[N] class numbers.
        count: images of each class, 1 or more.
        seed: chooses which images, 0 to 2**64 - 1.

    Returns:
        The numbers to train on and those held out, int64, each rising; together they are 0 to N - 1.

    >>> train, val = keep_per_class(np.array([0, 0, 0, 1, 1]), count=2, seed=1)
    >>> len(train), len(val)
    (4, 1)
    """
    order, rank, _ = _shuffled(labels, seed)
    return np.sort(order[rank < count]), np.sort(order[rank >= count])


def _shuffled(groups: NDArray[np.int64], seed: int) -> tuple[Ids, Ids, Ids]:
    """Image numbers sorted by class and at random within each, their ranks in their classes, and the classes' sizes."""
    order = np.lexsort((_draws(len(groups), seed), groups))
    _, starts, counts = np.unique(groups[order], return_index=True, return_counts=True)
    return order, np.arange(len(groups)) - np.repeat(starts, counts), counts


def _draws(n: int, seed: int) -> NDArray[np.uint64]:
    """uint64[n]: SplitMix64 at positions 1 to n (Steele, Lea and Flood, OOPSLA 2014), started from a mixed seed.

    Written out, because a library's generator may change from one version to the next, and a split must not.
    """
    golden = np.uint64(0x9E3779B97F4A7C15)
    with np.errstate(over="ignore"):
        start = _mix(np.array([seed], np.uint64) + golden)
        return _mix(start + golden * np.arange(1, n + 1, dtype=np.uint64))


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
