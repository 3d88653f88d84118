"""Reading ahead: the system is asked for the bytes of coming batches, so that no thread waits for a disk.

The stream is divided into stretches: windows of a ``BlockOrder``, else about :data:`AHEAD_BYTES` of images. While the
batches of one are made, the bytes of the next are asked for, a batch's share with each batch, in the order in which
they lie (``posix_fadvise``): the disk has a queue to order, and blocks are read in long runs. The system's own guess is
turned off: it would read the surroundings of each image (measured: fifty times the bytes, at 8 MiB ``read_ahead_kb``).

It ends after one pass over data that fit into half of the memory, which then holds them all; larger data are asked for
once more just before they are needed, in case memory was short. Objects of a store are fetched to the disk in the same
order; where it has room for all of them and all images will be used, the rest is fetched while the store has nothing
else to do: a request for 4 MiB costs little more than for an image. What it is worth: ``benchmarks/feed_order.py``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from steadytrain.data.arrays import EveryRecord, Ints
from steadytrain.data.loader.sampler import BlockOrder, GlobalOrder, RepeatedOrder
from steadytrain.data.recordio.reader import Extents
from steadytrain.machine import facts

AHEAD_BYTES = 64 * 2**20
MOST_SAMPLES = 2**14  # samples in a stretch: of small images the bytes are few and the bookkeeping is not
_MOST_COUNTED = 2**20  # positions, of which it is counted how many this loader makes
GAP_BYTES = 64 * 2**10  # skipping less than this costs a disk more than reading it


Extent = tuple[str, int, int]
"""Path, first byte and end of what to read."""


@runtime_checkable
class LocatedSource(Protocol):
    """A source that knows where its images lie, and may have to fetch them from a store on the network."""

    @property
    def stays(self) -> bool:
        """Return whether data that were read once are on the disk from then on."""

    def extents(self, numbers: Ints, /) -> Extents:
        """Locate these images."""

    def scatter(self) -> None:
        """Tell the system that images are read in no order, and asked for before."""

    def expect(self, stretches: Sequence[Extent], /) -> None:
        """Begin to read stretches, and return."""

    def settle(self, numbers: Ints, /) -> None:
        """Wait until images are on this machine's disk, without holding the interpreter's lock."""

    def fill(self, needed: int, /) -> None:
        """Fetch all that is not here, if ``needed`` bytes are most of it and there is room."""


@dataclass(slots=True)
class _Stretch:
    """Positions ``first`` to ``end - 1``, their bytes, and how many of these extents were asked for."""

    first: int
    end: int
    extents: list[Extent]
    asked: int = 0

    def take(self, share: float) -> list[Extent]:
        """Return what is missing to this share of it."""
        start, self.asked = self.asked, max(self.asked, round(len(self.extents) * min(share, 1.0)))
        return self.extents[start : self.asked]


class Readahead:
    """Reads ahead of one loader. Safe from several threads.

    Args:
        ids: int64[n], the records that are used.
        order: of training; None: in the order of ``ids``.
        stop: the position that the stream ends before; None: it has no end.
        select_own: returns those of some positions that this loader makes.
    """

    def __init__(
        self,
        source: LocatedSource,
        ids: Ints | EveryRecord,
        order: GlobalOrder | BlockOrder | RepeatedOrder | None,
        *,
        stop: int | None,
        select_own: Callable[[Ints], Ints],
    ) -> None:
        self.source = source
        self.ids = ids
        self.order = order
        self.repeats = order.times if isinstance(order, RepeatedOrder) else 1
        self._blocks = order.order if isinstance(order, RepeatedOrder) else order
        self.stop = stop
        self._select_own = select_own
        sizes = source.extents(ids[:: max(1, len(ids) // 1000)]).size
        mean = max(1, int(sizes.clip(0).mean()))
        self._bytes = mean * len(ids)
        self.samples = min(max(1, AHEAD_BYTES // mean), MOST_SAMPLES)
        source.scatter()
        self.fits = self._bytes < facts.memory_bytes() // 2 and source.stays
        self._lock = threading.Lock()
        self._begun: int | None = None
        self._stretches: list[_Stretch] = []

    def reach(self, first: int, end: int) -> None:
        """Ask for what comes after the batch of positions ``first`` to ``end - 1``, which is begun."""
        if self._begun is None and self._is_whole_pass(first):
            self.source.fill(self._bytes)
        with self._lock:
            self._begun = first if self._begun is None else self._begun
            last = self._begun + len(self.ids) * self.repeats if self.fits else None
            present = self._stretch(first, last)
            following = self._stretch(present.end, last)
            self._stretches = [present, following]
            progress = (end - present.first) / max(1, present.end - present.first)
            extents = present.take(1.0) + following.take(progress)
        self.source.expect(extents)

    def _is_whole_pass(self, first: int) -> bool:
        """Return whether this loader makes about as many images as there are, or more, from a position on."""
        n = len(self.ids)
        if self.stop is None:
            return True
        few = min(n, _MOST_COUNTED)
        share = len(self._select_own(np.arange(first, first + few))) / few
        return share * (self.stop - first) > 0.9 * n

    def again(self, samples: Ints) -> None:
        """Ask for what is needed now and may have been dropped since: of data that do not fit into memory."""
        numbers = self.ids[samples]
        if not self.fits:
            self.source.expect(self.source.extents(numbers).stretches(gap=0))
        self.source.settle(numbers)

    def _stretch(self, position: int, last: int | None) -> _Stretch:
        for known in self._stretches:
            if known.first <= position < known.end:
                return known
        if isinstance(self._blocks, BlockOrder):
            first, end = (bound * self.repeats for bound in self._blocks.bounds(position // self.repeats))
        else:
            first = position // self.samples * self.samples
            end = first + self.samples
        used = min([end, *(bound for bound in (self.stop, last) if bound is not None)])
        positions = self._select_own(np.arange(first, max(first, used)))
        if not len(positions):
            return _Stretch(first, end, [])
        samples = positions if self.order is None else self.order.ids(positions)
        return _Stretch(first, end, self.source.extents(self.ids[samples]).stretches(gap=GAP_BYTES))
