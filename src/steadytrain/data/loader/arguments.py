"""What a feed is given, looked at before anything begins: what cannot be is refused with its value and the remedy."""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from steadytrain.data.loader.batch_worker import Source
from steadytrain.data.loader.sampler import Ints
from steadytrain.errors import DataError, InputError, did_you_mean

Place = Literal["threads", "process", "auto"]

_LABELS = ((np.dtype(np.int64), 1), (np.dtype(np.float32), 2))  # type and dimensions


def used_ids(source: Source, ids: object) -> Ints:
    """The records to use, int64[n]: ``ids``, or all. Raises DataError where they are none of the data's."""
    n = len(source)
    if n == 0:
        raise DataError("the data has no images: a feed needs one at least")
    if ids is None:
        return np.arange(n)
    given = np.array(ids)
    if given.ndim != 1 or len(given) == 0:
        raise DataError(f"ids has the shape {given.shape}: give one number at least, in one dimension")
    if given.dtype.kind not in "iu":
        remedy = ": np.flatnonzero(mask) makes them of a mask" if given.dtype.kind == "b" else ""
        raise DataError(f"ids are of type {given.dtype}; they must be whole numbers{remedy}")
    used: Ints = given.astype(np.int64)
    if used.min() < 0 or used.max() >= n:
        raise DataError(f"ids run from {used.min()} to {used.max()}; the data's run from 0 to {n - 1}")
    return used


def checked_labels(source: Source) -> NDArray[np.int64] | NDArray[np.float32]:
    """The source's labels. Raises DataError where they are not what the batches are to have."""
    labels, n = source.labels, len(source)
    if isinstance(labels, np.ndarray) and (labels.dtype, labels.ndim) in _LABELS and len(labels) == n:
        return labels
    found = f"{labels.dtype}{list(labels.shape)}" if isinstance(labels, np.ndarray) else type(labels).__name__
    raise DataError(f"the labels are {found}; they must be a numpy array, int64[{n}] or float32[{n}, L]")


def checked_place(place: Place) -> Place:
    """Where threads live. Raises InputError."""
    known = get_args(Place)
    if place not in known:
        near = did_you_mean(str(place), known)
        raise InputError(f"place is {place!r}; it must be one of {', '.join(known)}{near and '.' + near}")
    return place


def checked_shard(shard: tuple[int, int]) -> tuple[int, int]:
    """Which share of how many. Raises InputError."""
    pair = tuple(shard) if isinstance(shard, tuple | list) else ()
    whole = len(pair) == 2 and all(isinstance(one, int | np.integer) for one in pair)
    if not whole or not 0 <= pair[0] < pair[1]:
        raise InputError(f"shard={shard}: give (i, n) with i from 0 to n - 1")
    return int(pair[0]), int(pair[1])


def checked_share(share: tuple[int, int], batch_size: int) -> tuple[int, int]:
    """Where a batch lies in a larger one, and how large that is. Raises InputError."""
    first, of = at_least(0, "share", share[0]), at_least(1, "share", share[1])
    if first + batch_size > of:
        raise InputError(f"share={share}: a batch of {batch_size} from {first} on does not lie in {of}")
    return first, of


def checked_seed(seed: int) -> int:
    """0 to 2**63 - 1. Raises InputError."""
    if at_least(0, "seed", seed) >= 2**63:
        raise InputError(f"seed={seed}: 2**63 - 1 is the most")
    return int(seed)


def at_least(least: int, name: str, value: int) -> int:
    """A whole number. Raises InputError where it is none, or less."""
    if not isinstance(value, int | np.integer) or isinstance(value, bool):
        raise InputError(f"{name}={value!r}: it must be a whole number")
    if value < least:
        raise InputError(f"{name}={value}: {least} is the least")
    return int(value)
