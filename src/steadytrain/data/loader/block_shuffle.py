"""A training order that reads a disk in stretches: blocks of neighbours in a random order, mixed within a window.

Each epoch, the records are divided into blocks of ``size`` neighbours; the blocks are put in a random order; of that
stream each ``window`` blocks are shuffled together, sample by sample. Whoever reads a window ahead
(``readahead``) reads ``window`` stretches from the disk, not ``window * size`` scattered images. As in
the global order, an epoch holds every sample exactly once, and what stands at a position depends on the seed and the
position alone: any position can be asked for at any time, and nothing is saved.

How good the mixing is: two samples of one window come from the same block with probability
``(size - 1) / (window * size - 1)``, about ``1 / window``; in the global order that is ``(size - 1) / (n - 1)``.
Samples of different blocks are as far apart as any two of the data (a third of it on average). What is lost is breadth:
a batch sees at most ``window`` blocks, twice that where it straddles two windows. In data that are sorted by class, as
packed folders are, a block is one class as a rule, so a window holds at most about ``window`` classes.

>>> order = BlockOrder(10, seed=1, blocks=BlockShuffle(size=2, window=2))
>>> order.ids(np.arange(10)).tolist()
[3, 0, 2, 1, 4, 5, 7, 6, 8, 9]
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from steadytrain.data.loader.sampler import Ints, shuffled
from steadytrain.errors import InputError

# The lowest byte of the counter's last word: what the numbers are for (0 and 1 belong to feed.order).
_BLOCKS, _WINDOW = 2, 3
_KEPT = 4  # windows


@dataclass(frozen=True, kw_only=True)
class BlockShuffle:
    """How the order is divided.

    Args:
        size: samples in a block: what is read in one stretch.
        window: blocks that are mixed with each other. A window, and the one that is read ahead, should fit into
            memory: ``2 * size * window`` encoded images.

    Raises:
        InputError: a number below 1.
    """

    size: int = 64
    window: int = 64

    def __post_init__(self) -> None:
        for name, value in (("size", self.size), ("window", self.window)):
            if value < 1:
                raise InputError(f"{name}={value} of BlockShuffle: 1 is the least")


class BlockOrder:
    """The training order of ``n`` samples by blocks. Safe from several threads.

    Args:
        n: size of the data set, at least 1.
        seed: 0 to 2**63 - 1.
        blocks: how it is divided.
    """

    def __init__(self, n: int, seed: int, blocks: BlockShuffle) -> None:
        self.n = n
        self.seed = seed
        self.blocks = blocks
        self.window = min(n, blocks.size * blocks.window)
        """Samples that are mixed with each other."""
        self._lock = threading.Lock()
        self._windows: dict[tuple[int, int], Ints] = {}
        self._orders: dict[int, NDArray[np.int32 | np.int64]] = {}

    def ids(self, positions: Ints) -> Ints:
        """The sample at each position, int64 from 0 to n - 1; positions in any order."""
        epochs, places = np.divmod(positions, self.n)
        windows, within = np.divmod(places, self.window)
        out = np.empty(len(positions), dtype=np.int64)
        for epoch, window in np.unique(np.stack((epochs, windows)), axis=1).T.tolist():
            here = (epochs == epoch) & (windows == window)
            out[here] = self._window(epoch, window)[within[here]]
        return out

    def bounds(self, position: int) -> tuple[int, int]:
        """The first position of the window that a position lies in, and the end of it."""
        epoch, place = divmod(position, self.n)
        first = place // self.window * self.window
        return epoch * self.n + first, epoch * self.n + min(first + self.window, self.n)

    def _window(self, epoch: int, window: int) -> Ints:
        ids = self._windows.get((epoch, window))
        if ids is None:  # two threads may both make it: it is the same
            ids = self._make(epoch, window)
            with self._lock:
                latest = list(self._windows.items())[1 - _KEPT :]
                self._windows = dict([*latest, ((epoch, window), ids)])
        return ids

    def _make(self, epoch: int, window: int) -> Ints:
        """The samples of one window in their order."""
        size, first = self.blocks.size, window * self.window
        order = self._block_order(epoch)
        mixed = shuffled(min(self.window, self.n - first), self.seed, _purpose(_WINDOW, epoch, window))
        places = first + mixed.astype(np.int64)
        # The last block of the data may be short; what stands behind it is moved on as if it were not.
        rank = int(np.flatnonzero(order == len(order) - 1)[0])
        missing = len(order) * size - self.n
        places[places >= (rank + 1) * size - missing] += missing
        ids: Ints = order[places // size].astype(np.int64) * size + places % size
        return ids

    def _block_order(self, epoch: int) -> NDArray[np.int32 | np.int64]:
        with self._lock:
            order = self._orders.get(epoch)
            if order is None:
                order = shuffled(-(-self.n // self.blocks.size), self.seed, _purpose(_BLOCKS, epoch))
                self._orders = {e: o for e, o in self._orders.items() if e >= epoch - 1} | {epoch: order}
        return order


def _purpose(what: int, epoch: int, window: int = 0) -> tuple[int, int, int]:
    """The counter's upper words; of an epoch 56 bits count."""
    return epoch & 0xFFFFFFFF, window, what | (epoch >> 32 << 8 & 0xFFFFFFFF)
