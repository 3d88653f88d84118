"""Types of numpy arrays, by what they hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Pixels = NDArray[np.uint8]
"""uint8[H, W, 3], or uint8[H, W] of grey."""


class EveryRecord(Sequence[Any]):
    """The numbers of all ``n`` records, as if they were an array int64[n], which takes no memory.

    >>> EveryRecord(5)[np.array([3, 0])], EveryRecord(5)[::2], EveryRecord(5)[4], len(EveryRecord(5))
    (array([3, 0]), array([0, 2, 4]), 4, 5)
    """

    def __init__(self, n: int) -> None:
        self._numbers = range(n)

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, slice):
            return np.array(self._numbers[key], np.int64)
        return key.copy() if isinstance(key, np.ndarray) else key
