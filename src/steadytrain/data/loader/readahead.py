"""Asks the system for the bytes of coming batches, so that no thread waits for a disk.

The stream is divided into stretches: windows of a ``BlockOrder``, else about
:data:`AHEAD_BYTES` of images. While the batches of one are made, the bytes of the next are asked for, a batch's share
with each batch, sorted by where they lie and joined where they touch (``posix_fadvise``, which starts reading into the
page cache and returns). So there are always about that many bytes on their way, the disk has a queue to order, and the
order by blocks is read in long runs. The system's own guess is turned off: beside each image it would read its
surroundings, which nobody wants (``read_ahead_kb`` of the disk; measured: fifty times the bytes at 8 MiB).

This changes when bytes are read and nothing else. It ends after one pass over data that fit into half of the memory,
which then holds them all; larger data are read ahead as long as they are used, and asked for once more just before they
are needed, in case memory was short. Nothing is done where the system has no such call (macOS, Windows), or where the
source does not say where its images lie. What it is worth: ``benchmarks/feed_order.py``.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import groupby
from typing import Protocol, runtime_checkable

import numpy as np

from steadytrain.data.loader.block_shuffle import BlockOrder
from steadytrain.data.loader.sampler import Ints, Order
from steadytrain.data.recordio.extents import Extents
from steadytrain.machine import facts

AHEAD_BYTES = 64 * 2**20
MOST_SAMPLES = 2**14  # in a stretch: of small images the bytes are few and the bookkeeping is not
GAP_BYTES = 64 * 2**10  # skipping less than this costs a disk more than reading it


@runtime_checkable
class Located(Protocol):
    """A source that knows where its images lie."""

    def extents(self, numbers: Ints, /) -> Extents:
        """Of these images."""

    def scatter(self) -> None:
        """Tell the system that they are read in no order, and asked for before."""

    def settle(self, numbers: Ints, /) -> None:
        """Wait for what asking for these images looks at, without holding the interpreter's lock."""


@dataclass(slots=True)
class _Stretch:
    """Positions ``first`` to ``end - 1``, and what of their bytes has not been asked for yet, last first."""

    first: int
    end: int
    left: list[tuple[str, int, int]]
    total: int = field(init=False)

    def __post_init__(self) -> None:
        self.total = len(self.left)
        self.left.reverse()

    def take(self, share: float) -> list[tuple[str, int, int]]:
        """What is missing to this share of it."""
        keep = self.total - round(self.total * min(share, 1.0))
        taken = self.left[: keep - 1 if keep else None : -1] if keep < len(self.left) else []
        del self.left[keep:]
        return taken


class Ahead:
    """Reads ahead of one feed. Safe from several threads.

    Args:
        source: where the images lie.
        ids: int64[n], the records that are used.
        order: of training; None: in the order of ``ids``.
        stop: the position that the stream ends before; None: it has no end.
        own: those of some positions that this feed makes.
    """

    def __init__(
        self,
        source: Located,
        ids: Ints,
        order: Order | BlockOrder | None,
        *,
        stop: int | None,
        own: Callable[[Ints], Ints],
    ) -> None:
        self.source = source
        self.ids = ids
        self.order = order
        self.stop = stop
        self.own = own
        sizes = source.extents(ids[:: max(1, len(ids) // 1000)]).size
        mean = max(1, int(sizes.clip(0).mean()))
        self.samples = min(max(1, AHEAD_BYTES // mean), MOST_SAMPLES)
        source.scatter()
        self.fits = mean * len(ids) < facts.memory_bytes() // 2
        self._lock = threading.Lock()
        self._begun: int | None = None
        self._stretches: list[_Stretch] = []

    def reach(self, first: int, end: int) -> None:
        """The batch of positions ``first`` to ``end - 1`` is begun: ask for what comes after it."""
        _ask_all(self._wanted(first, end))

    def again(self, samples: Ints) -> None:
        """These are needed now: of data that do not fit into memory, ask for what may have been dropped since."""
        numbers = self.ids[samples]
        if not self.fits:
            _ask_all(self.source.extents(numbers).stretches(gap=0))
        self.source.settle(numbers)

    def _wanted(self, first: int, end: int) -> list[tuple[str, int, int]]:
        with self._lock:
            self._begun = first if self._begun is None else self._begun
            last = self._begun + len(self.ids) if self.fits else None
            here = self._stretch(first, last)
            following = self._stretch(here.end, last)
            self._stretches = [here, following]
            done = (end - here.first) / max(1, here.end - here.first)
            return here.take(1.0) + following.take(done)

    def _stretch(self, position: int, last: int | None) -> _Stretch:
        for known in self._stretches:
            if known.first <= position < known.end:
                return known
        first, end = self._bounds(position)
        used = min([end, *(bound for bound in (self.stop, last) if bound is not None)])
        return _Stretch(first, end, self._places(position, used))

    def _bounds(self, position: int) -> tuple[int, int]:
        if isinstance(self.order, BlockOrder):
            return self.order.bounds(position)
        first = position // self.samples * self.samples
        return first, first + self.samples

    def _places(self, first: int, end: int) -> list[tuple[str, int, int]]:
        positions = self.own(np.arange(first, max(first, end)))
        if not len(positions):
            return []
        samples = positions if self.order is None else self.order.ids(positions)
        return self.source.extents(self.ids[samples]).stretches(gap=GAP_BYTES)


def read_ahead_of(
    source: object, ids: Ints, order: Order | BlockOrder | None, *, stop: int | None, own: Callable[[Ints], Ints]
) -> Ahead | None:
    """What reads ahead of a feed; None where the source or the system cannot."""
    if isinstance(source, Located) and hasattr(os, "posix_fadvise"):
        return Ahead(source, ids, order, stop=stop, own=own)
    return None


def _ask_all(stretches: list[tuple[str, int, int]]) -> None:
    for path, some in groupby(stretches, key=lambda one: one[0]):
        _ask(path, [(at, to) for _, at, to in some])


def _ask(path: str, stretches: list[tuple[int, int]]) -> None:
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe must not keep us waiting
    except OSError:
        return  # whoever reads it tells
    try:
        for at, to in stretches:
            os.posix_fadvise(file, at, to - at, os.POSIX_FADV_WILLNEED)
    except OSError:
        pass  # a file system that cannot read ahead
    finally:
        os.close(file)
