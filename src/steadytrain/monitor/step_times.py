"""How long updates take, of a run of any length in little memory."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

MAX_KEPT = 4096
MAX_SLOWEST = 32

Percentiles = tuple[float, float, float]


class Paces:
    """The seconds of updates and the wait in them; of many every second, fourth, ... is kept, evenly over the run."""

    def __init__(self) -> None:
        self._kept: list[tuple[float, float]] = []
        self._every = 1
        self._count = 0
        self._slowest: list[tuple[float, int]] = []

    def add(self, step: int, seconds: float, wait: float) -> None:
        """One more update."""
        if len(self._slowest) < MAX_SLOWEST:
            heapq.heappush(self._slowest, (seconds, step))
        elif seconds > self._slowest[0][0]:
            heapq.heapreplace(self._slowest, (seconds, step))
        if self._count % self._every == 0:
            self._kept.append((seconds, wait))
            if len(self._kept) >= MAX_KEPT:
                del self._kept[1::2]
                self._every *= 2
        self._count += 1

    @property
    def seconds(self) -> Percentiles:
        """5th, 50th and 95th percentile of an update's seconds; zeros where there was none."""
        return percentiles([seconds for seconds, _ in self._kept])

    @property
    def waits(self) -> Percentiles:
        """The same of the wait."""
        return percentiles([wait for _, wait in self._kept])

    @property
    def slowest(self) -> dict[int, float]:
        """Step -> seconds of the slowest updates, in the order in which they were made."""
        return dict(sorted((step, seconds) for seconds, step in self._slowest))


def percentiles(values: Sequence[float]) -> Percentiles:
    """5th, 50th and 95th percentile, the nearest value that there is; zeros of nothing.

    >>> percentiles([float(value) for value in range(101)])
    (5.0, 50.0, 95.0)
    """
    if not values:
        return 0.0, 0.0, 0.0
    ordered, last = sorted(values), len(values) - 1
    return ordered[round(0.05 * last)], ordered[round(0.5 * last)], ordered[round(0.95 * last)]
