"""The sample at each position, and what is drawn for it: pure functions of a seed and a position.

The training stream has no end: ``epoch = position // n``, and within an epoch every sample stands exactly once. Nothing
here has a state that a thread, a restart or another number of workers could change: whoever asks for a position
gets the same answer.

Randomness comes from Philox 4x32-10, a counter-based generator (Salmon, Moraes, Dror, Shaw: "Parallel random numbers:
as easy as 1, 2, 3", SC 2011): a bijection of a 128-bit counter under a 64-bit key. The key is the seed, the counter
says what the numbers are for.

>>> order = GlobalOrder(5, seed=1)
>>> order.ids(np.arange(10)).tolist()
[1, 0, 2, 4, 3, 3, 4, 0, 1, 2]
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from steadytrain.config.settings import FROM_1, check, setting
from steadytrain.data.arrays import Floats, Ints
from steadytrain.data.loader.rank_cache import RankMemory

# The lowest byte of the counter's last word: what the numbers are for.
_DRAWS, _SHUFFLE, _BLOCKS, _WINDOW, _FLIPS, _BALANCE = range(6)
TRANSFORMS = 16
"""The purpose of the first kind of transforms of batches; each kind has one of its own."""
_KEPT_WINDOWS = 4

_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_MULTIPLIERS = np.array([[0xCD9E8D57], [0xD2511F53]], dtype=np.uint64)  # of the third word, then of the first
_WEYL = (0x9E3779B9, 0xBB67AE85)
_COUNTERS = 8192  # counters at a time, so that the ten rounds stay in a core's cache


def philox(counter: NDArray[np.uint64], key: int) -> NDArray[np.uint64]:
    """Compute Philox 4x32-10 of each counter.

    Args:
        counter: uint64[4, n], each entry below 2**32, lowest word first.
        key: 64 bits.

    Returns:
        uint64[4, n], each entry 32 random bits.
    """
    if counter.shape[1] > _COUNTERS:
        parts = [philox(counter[:, at : at + _COUNTERS], key) for at in range(0, counter.shape[1], _COUNTERS)]
        return np.concatenate(parts, axis=1)
    even, odd, product = counter[0::2].copy(), counter[1::2].copy(), np.empty_like(counter[0::2])
    for round_key in _round_keys(key):  # in place: arrays made anew take a third longer
        np.multiply(even[::-1], _MULTIPLIERS, out=product)
        np.right_shift(product, _HALF, out=even)
        even ^= odd
        even ^= round_key
        np.bitwise_and(product, _LOW, out=odd)
    return np.stack((even[0], odd[0], even[1], odd[1]))


@functools.lru_cache(maxsize=64)
def _round_keys(key: int) -> list[NDArray[np.uint64]]:
    words = key & 0xFFFFFFFF, key >> 32
    rounds = [
        [(word + step * weyl) & 0xFFFFFFFF for word, weyl in zip(words, _WEYL, strict=True)] for step in range(10)
    ]
    return [np.array(pair, dtype=np.uint64)[:, None] for pair in rounds]


def uniforms(seed: int, positions: Ints, draws: int, purpose: int = _DRAWS) -> Floats:
    """Draw numbers in [0, 1), ``draws`` for each position: float64[len(positions), draws], 32 bits each.

    Draw ``j`` of a position depends on the seed, the purpose (0 to 255), the position and ``j`` alone, so asking for
    more draws, or for other positions beside it, changes nothing.
    """
    blocks = -(-draws // 4)
    counter = np.zeros((4, len(positions), blocks), dtype=np.uint64)
    wide = positions.astype(np.uint64)[:, None]
    counter[0], counter[1] = wide & _LOW, wide >> _HALF
    counter[2], counter[3] = np.arange(blocks), purpose
    words = philox(counter.reshape(4, -1), seed).reshape(4, len(positions), blocks)
    numbers: Floats = np.moveaxis(words, 0, 2).reshape(len(positions), 4 * blocks)[:, :draws].astype(np.float64)
    numbers *= 2.0**-32
    return numbers


def alternating_flips(seed: int, samples: Ints, epochs: Ints) -> Floats:
    """Draw numbers of which those below 0.5 say that a sample is flipped: in every other epoch, half of them first.

    What even epochs flip, odd ones do not (Jordan 2024, "94% on CIFAR-10 in 3.29 seconds on a single GPU").
    """
    numbers: Floats = (uniforms(seed, samples, 1, _FLIPS)[:, 0] + 0.5 * (epochs % 2)) % 1
    return numbers


class Draws:
    """The random numbers of a stream: :func:`uniforms` for many positions at a time. Safe from several threads.

    Args:
        seed: 0 to 2**63 - 1.
        draws: numbers for each position.
    """

    AHEAD = 4096  # positions; a quarter as many would take twice as long each

    def __init__(self, seed: int, draws: int) -> None:
        self.draws = draws
        # Two threads may both make a block: it is the same.
        self._block = functools.lru_cache(maxsize=4)(
            lambda block: uniforms(seed, np.arange(block * Draws.AHEAD, (block + 1) * Draws.AHEAD), draws)
        )

    def at(self, positions: Ints) -> Floats:
        """Return float64[len(positions), draws] for positions that follow each other."""
        if self.draws == 0:
            return np.empty((len(positions), 0))
        first, end = int(positions[0]), int(positions[-1]) + 1
        blocks = range(first // self.AHEAD, (end - 1) // self.AHEAD + 1)
        numbers = [self._block(block) for block in blocks]
        start = blocks[0] * self.AHEAD
        joined = numbers[0] if len(numbers) == 1 else np.concatenate(numbers)
        return joined[first - start : end - start]


def permutation(n: int, seed: int, purpose: tuple[int, int, int]) -> NDArray[np.int32 | np.int64]:
    """Put 0 to ``n - 1`` into the random order of a ``purpose``: the upper words of the counter, 32 bits each.

    It is int32[n], or int64[n] above 2**31 samples.
    Every number gets a random key with itself in the lowest bits; the keys are sorted. All keys differ, so any correct
    sort gives the same order on any machine.
    """
    half = (n + 1) // 2  # counters, of which each gives a number of the lower half and one of the upper half
    mask = np.uint64((1 << max(n - 1, 1).bit_length()) - 1)
    keys = np.empty((2, half), dtype=np.uint64)
    for at in range(0, half, _COUNTERS):
        counter = np.zeros((4, min(_COUNTERS, half - at)), dtype=np.uint64)
        counter[0] = np.arange(at, at + counter.shape[1])
        counter[1], counter[2], counter[3] = purpose
        words = philox(counter, seed)
        for row, first in enumerate((at, half + at)):
            part = keys[row, at : at + counter.shape[1]]
            np.bitwise_and((words[2 * row] << _HALF) | words[2 * row + 1], ~mask, out=part)
            part |= np.arange(first, first + len(part), dtype=np.uint64)
    order = keys.reshape(-1)[:n]
    order.sort()
    order &= mask
    return order.astype(np.int32 if n <= 2**31 else np.int64)


class GlobalOrder:
    """The training order in which any sample may follow any other. Safe from several threads.

    The order of a large set's next epoch is made in the background, from the middle of an epoch on.

    Args:
        n: size of the data set, at least 1.
        seed: 0 to 2**63 - 1.
        share: gives memory that other ranks have, too, by what it holds and its size; raises OSError. Ranks of one
            machine then make the order of a large set once. None: this process has its own.
        stop: the position that is never reached; None: there is no end.
    """

    LARGE = 2**20  # samples; the order of so many takes a thirtieth of a second

    def __init__(
        self, n: int, seed: int, share: Callable[[str, int], RankMemory] | None = None, stop: int | None = None
    ) -> None:
        self.n = n
        self.seed = seed
        self._share, self._stop = share, stop
        self._lock = threading.Lock()
        self._epochs: dict[int, NDArray[np.int32 | np.int64]] = {}
        self._shared: dict[int, RankMemory] = {}  # of epochs whose order lies in it
        self._num_begun = 0  # epochs of which the order was made in the background, or is

    def ids(self, positions: Ints) -> Ints:
        """Return the sample at each position, int64 from 0 to n - 1; positions must not fall."""
        first, last = int(positions[0]) // self.n, int(positions[-1]) // self.n
        if self.n >= self.LARGE and int(positions[-1]) % self.n >= self.n // 2:
            self._begin_epoch(last + 1)
        if first == last:
            return self._epoch(first)[positions - first * self.n].astype(np.int64)
        out = np.empty(len(positions), dtype=np.int64)
        epochs = positions // self.n
        for epoch in range(first, last + 1):
            is_in = epochs == epoch
            out[is_in] = self._epoch(epoch)[positions[is_in] - epoch * self.n]
        return out

    def _epoch(self, epoch: int) -> NDArray[np.int32 | np.int64]:
        order = self._epochs.get(epoch)
        if order is not None:
            return order
        with self._lock:
            order = self._epochs.get(epoch)
            if order is None:
                order = self._make_epoch(epoch) if self.n < self.LARGE else self._make_shared(epoch)
                # Batches are made a few at a time and in order: the epochs around the newest are all that is asked for.
                self._epochs = {e: o for e, o in self._epochs.items() if e >= epoch - 1} | {epoch: order}
                self._shared = {e: memory for e, memory in self._shared.items() if e in self._epochs}
        return order

    def _begin_epoch(self, epoch: int) -> None:
        """Make an order in the background, once, if it will be needed; who needs it before waits for it."""
        if self._num_begun <= epoch and (self._stop is None or epoch * self.n < self._stop):
            self._num_begun = epoch + 1
            threading.Thread(target=self._make_ahead, args=(epoch,), name="order", daemon=True).start()

    def _make_ahead(self, epoch: int) -> None:
        with suppress(MemoryError, OSError):  # who needs the order makes it then, and tells
            self._epoch(epoch)

    def _make_shared(self, epoch: int) -> NDArray[np.int32 | np.int64]:
        """Make the order of an epoch, or take that which another rank of this machine has made."""
        kind = np.dtype(np.int32 if self.n <= 2**31 else np.int64)
        try:
            if self._share is None:
                return self._make_epoch(epoch)
            what = f"{type(self).__name__} {self.n} {self.seed} {epoch}"
            shared = self._shared[epoch] = self._share(what, 8 + kind.itemsize * self.n)
            is_made, order = shared.memory[:1], shared.memory[8:].view(kind)
            with shared.alone():
                if not is_made[0]:
                    order[:] = self._make_epoch(epoch)
                    is_made[0] = 1
        except OSError:  # no room, or a system without such locks
            self._shared.pop(epoch, None)
            return self._make_epoch(epoch)
        return order

    def _make_epoch(self, epoch: int) -> NDArray[np.int32 | np.int64]:
        return permutation(self.n, self.seed, (epoch & 0xFFFFFFFF, epoch >> 32, _SHUFFLE))


class BalancedOrder(GlobalOrder):
    """A training order in which all classes are equally frequent. Safe from several threads.

    An epoch has as many positions as there are samples, and each class the same number of them; one more in some
    classes where that does not divide, in others the next epoch. Within a class every sample stands equally often, but
    for one: those of a rare class several times, of a frequent one some, others in the next epoch. An epoch is a
    function of its number and the seed alone.

    >>> order = BalancedOrder(np.array([0, 0, 0, 0, 0, 1]), seed=1)
    >>> order.ids(np.arange(6)).tolist()
    [2, 1, 0, 5, 5, 5]

    Args:
        labels: int64[n], the class of each sample.
        seed, share, stop: as of :class:`GlobalOrder`.
    """

    def __init__(
        self, labels: Ints, seed: int, share: Callable[[str, int], RankMemory] | None = None, stop: int | None = None
    ) -> None:
        super().__init__(len(labels), seed, share, stop)
        self.labels = labels

    @functools.cached_property
    def counts(self) -> Ints:
        """Samples of each class, int64."""
        return np.asarray(np.unique(self.labels, return_counts=True)[1])

    def _make_epoch(self, epoch: int) -> NDArray[np.int32 | np.int64]:
        shuffled = super()._make_epoch(epoch)
        by_class = shuffled[np.argsort(self.labels[shuffled], kind="stable")]
        each, more = divmod(self.n, len(self.counts))
        shares = each + ((np.arange(len(self.counts)) - epoch * more) % len(self.counts) < more)
        starts = np.cumsum(self.counts) - self.counts
        parts = [
            by_class[start + np.arange(share) % size]
            for start, size, share in zip(starts, self.counts, shares, strict=True)
        ]
        places = permutation(self.n, self.seed, (epoch & 0xFFFFFFFF, epoch >> 32, _BALANCE))
        order: NDArray[np.int32 | np.int64] = np.concatenate(parts)[places]
        return order


@dataclass(frozen=True, kw_only=True)
class BlockShuffle:
    """A shuffle for disks that are slow to seek: blocks of neighbouring records, mixed within a window.

    Each epoch, the records are divided into blocks of ``size`` neighbours; the blocks are put in a random order; of
    that stream each ``window`` blocks are shuffled together, sample by sample. Whoever reads a window ahead
    (``readahead``) reads ``window`` stretches from the disk, not ``window * size`` scattered images. As in the global
    order, an epoch holds every sample exactly once, and any position can be asked for at any time.

    What is lost is breadth (docs/feed.md).

    ``window``: blocks that are mixed with each other. A window, and the one that is read ahead, should fit into memory:
    ``2 * size * window`` encoded images.

    Raises:
        InputError: a number below 1.
    """

    size: int = setting(64, "Samples in a block.", limit=FROM_1)
    window: int = setting(64, "Blocks that are mixed.", limit=FROM_1)

    def __post_init__(self) -> None:
        check(self, "BlockShuffle")


class BlockOrder:
    """The training order of a :class:`BlockShuffle`. Safe from several threads.

    >>> order = BlockOrder(10, seed=1, blocks=BlockShuffle(size=2, window=2))
    >>> order.ids(np.arange(10)).tolist()
    [3, 0, 2, 1, 4, 5, 7, 6, 8, 9]

    Args:
        n: size of the data set, at least 1.
        seed: 0 to 2**63 - 1.
    """

    def __init__(self, n: int, seed: int, blocks: BlockShuffle) -> None:
        self.n = n
        self.seed = seed
        self.blocks = blocks
        self.window = min(n, blocks.size * blocks.window)
        """Samples that are mixed with each other."""
        # Two threads may both make one: it is the same.
        self._window = functools.lru_cache(maxsize=_KEPT_WINDOWS)(self._make_window)
        self._block_order = functools.lru_cache(maxsize=2)(
            lambda epoch: permutation(-(-n // blocks.size), seed, _purpose(_BLOCKS, epoch))
        )

    def ids(self, positions: Ints) -> Ints:
        """Return the sample at each position, int64 from 0 to n - 1; positions in any order."""
        epochs, places = np.divmod(positions, self.n)
        windows, within = np.divmod(places, self.window)
        out = np.empty(len(positions), dtype=np.int64)
        for epoch, window in np.unique(np.stack((epochs, windows)), axis=1).T.tolist():
            is_in = (epochs == epoch) & (windows == window)
            out[is_in] = self._window(epoch, window)[within[is_in]]
        return out

    def bounds(self, position: int) -> tuple[int, int]:
        """Return the first position of the window that a position lies in, and the end of it."""
        epoch, place = divmod(position, self.n)
        first = place // self.window * self.window
        return epoch * self.n + first, epoch * self.n + min(first + self.window, self.n)

    def _make_window(self, epoch: int, window: int) -> Ints:
        """Return the samples of one window in their order."""
        size, first = self.blocks.size, window * self.window
        order = self._block_order(epoch)
        mixed = permutation(min(self.window, self.n - first), self.seed, _purpose(_WINDOW, epoch, window))
        places = first + mixed.astype(np.int64)
        # The last block of the data may be short; what stands behind it is moved on as if it were not.
        rank = int(np.flatnonzero(order == len(order) - 1)[0])
        missing = len(order) * size - self.n
        places[places >= (rank + 1) * size - missing] += missing
        ids: Ints = order[places // size].astype(np.int64) * size + places % size
        return ids


class RepeatedOrder:
    """An order in which each sample stands several times in a row: repeated augmentation (Hoffer et al. 2020).

    Each time it is cropped, flipped and transformed anew, since these are drawn from the position. An epoch has as many
    positions as there are samples: every sample stands in one of ``times`` epochs, so many times.

    >>> RepeatedOrder(GlobalOrder(5, seed=1), 2).ids(np.arange(10)).tolist()
    [1, 1, 0, 0, 2, 2, 4, 4, 3, 3]
    """

    def __init__(self, order: GlobalOrder | BlockOrder, times: int) -> None:
        self.order = order
        self.times = times

    def ids(self, positions: Ints) -> Ints:
        """Return the sample at each position, int64 from 0 to n - 1; positions as the order wants them."""
        return self.order.ids(positions // self.times)


def _purpose(purpose: int, epoch: int, window: int = 0) -> tuple[int, int, int]:
    """Make the counter's upper words; of an epoch 56 bits count."""
    return epoch & 0xFFFFFFFF, window, purpose | (epoch >> 32 << 8 & 0xFFFFFFFF)
