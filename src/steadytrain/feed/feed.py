"""The feed: batches of images from records, made by threads, in an order that nothing but the seed decides."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Self

import numpy as np
from PIL import Image

from steadytrain import devices
from steadytrain.errors import DataError, InputError
from steadytrain.feed.ahead import read_ahead_of
from steadytrain.feed.bad import BadImage
from steadytrain.feed.batch import Batch, Buffers
from steadytrain.feed.blocks import BlockOrder, Blocks
from steadytrain.feed.cut import Cut
from steadytrain.feed.fill import Desk, Filler, Made, Source
from steadytrain.feed.kept import Kept
from steadytrain.feed.order import Ints, Order
from steadytrain.feed.stream import Job, Stream, Times

MOST_KEPT_BYTES = 2 * 2**30


@dataclass(frozen=True, kw_only=True)
class FeedTimes:
    """What a feed has done since it was made, summed over its threads.

    ``bytes`` are encoded ones; ``read``, ``decode`` (cutting included) and ``batch`` (order, draws, and the gather of
    kept images) are busy seconds; ``blocked`` are seconds that threads waited because enough batches were ready.
    """

    images: int
    bytes: int
    read_seconds: float
    decode_seconds: float
    batch_seconds: float
    blocked_seconds: float
    threads: int


class Feed:
    """Batches of a data set, each iteration from ``start`` anew, with threads of its own while it lasts.

    Training (``train=True``): one endless stream, in which position p belongs to epoch p // n, and each epoch holds
    every sample once in an order of its own; batches are always full and may straddle epochs. What stands at a
    position, its cut and its flip depend on ``seed``, the position and the data only, never on threads, batch size or
    restarts. Evaluation (``train=False``): ``ids`` in order, each exactly once, nothing random, a short last batch.

    The threads end, within the time of a few images, when the iteration ends, when its iterator is dropped, and by
    :meth:`close`. Small images of one size are decoded once and kept, if all of them fit into ``keep_bytes``.

    Args:
        source: encoded images and labels, such as ``Records``.
        cut: how the square is cut out.
        batch_size: images in a batch.
        seed: of the order and of all draws.
        ids: int64[n], the records to use; None: all.
        start: the position to begin at.
        stop: the position to end before; None: without end (an evaluation: at the end of the data). In training
            ``stop - start`` must be a multiple of ``batch_size`` (times the number of shards).
        train: training, or evaluation.
        threads: that read and decode; None: all cores with ``pin``, else half of them, since training on a CPU then
            wants the cores itself (see :func:`default_threads`).
        depth: batches begun and not yet taken, at most.
        pin: page-locked batches, for asynchronous copies to a GPU (needs torch and a GPU).
        keep_bytes: the most that kept images may take; None: an eighth of the memory, at most 2 GiB; 0: keep none.
        on_bad: told once of each image that cannot be decoded, by the thread that iterates; None: a warning.
        blocks: the order by blocks, which reads a disk in stretches; None: the global one.
        shard: ``(i, n)``: make only every n-th batch of the stream, from the i-th on: the i-th of n processes' share.
        read_ahead: whether the system is asked for coming bytes (see :mod:`~steadytrain.feed.ahead`).

    Raises:
        InputError: a number that cannot be; DataError: no images, or ``ids`` that are not in the data.

    While iterating: FeedError where a thread cannot go on, or an evaluation meets a bad image; TooManyBadError where
    more than the larger of 1 % and 5 images are bad.
    """

    def __init__(
        self,
        source: Source,
        cut: Cut,
        *,
        batch_size: int,
        seed: int = 0,
        ids: Ints | None = None,
        start: int = 0,
        stop: int | None = None,
        train: bool = True,
        threads: int | None = None,
        depth: int = 4,
        pin: bool = False,
        keep_bytes: int | None = None,
        on_bad: Callable[[BadImage], None] | None = None,
        blocks: Blocks | None = None,
        shard: tuple[int, int] = (0, 1),
        read_ahead: bool = True,
    ) -> None:
        used = _used(source, ids)
        self.cut = cut if train else cut.for_evaluation()
        self.batch_size = _at_least(1, "batch_size", batch_size)
        self.start = _at_least(0, "start", start)
        self.stop = stop if train else min(len(used), len(used) if stop is None else stop)
        self.train = train
        self.shard = _checked(shard)
        self.threads = default_threads(pin=pin) if threads is None else _at_least(1, "threads", threads)
        self.depth = _at_least(1, "depth", depth)
        self.on_bad = on_bad or _warn
        self.num_samples = len(used)
        self._check_stop()
        if keep_bytes is None:
            keep_bytes = min(MOST_KEPT_BYTES, devices.memory_bytes() // 8)
        shape = (self.batch_size, cut.size, cut.size, cut.channels)
        order = None if not train else Order(len(used), seed) if blocks is None else BlockOrder(len(used), seed, blocks)
        own = partial(_own, start=start, batch_size=batch_size, shard=self.shard)
        self._filler = Filler(
            source,
            used,
            self.cut,
            order,
            ahead=read_ahead_of(source, used, order, stop=self.stop, own=own) if read_ahead else None,
            seed=seed,
            buffers=Buffers(shape, keep=self.depth + 2, pinned=pin),
            kept=Kept(len(used), keep_bytes),
            threads=self.threads,
        )
        self._times = Times()
        self._streams: weakref.WeakSet[Stream[Desk, Made]] = weakref.WeakSet()
        Image.init()  # Pillow finds its readers when first asked, and not safely from several threads

    def __len__(self) -> int:
        """Batches of one iteration; TypeError for a stream without end."""
        if self.stop is None:
            raise TypeError("a training feed without stop has no length")
        batches = -(-max(0, self.stop - self.start) // self.batch_size)
        index, count = self.shard
        return -(-max(0, batches - index) // count)

    def __iter__(self) -> Iterator[Batch]:
        stream = Stream(
            self._job,
            Desk,
            total=None if self.stop is None else len(self),
            threads=self.threads,
            depth=self.depth,
            times=self._times,
        )
        self._streams.add(stream)
        return _Batches(stream, self.on_bad, self._filler.buffers)

    def stats(self) -> FeedTimes:
        """What has been done so far, over all iterations."""
        times = self._times
        return FeedTimes(
            images=times.images,
            bytes=times.bytes,
            read_seconds=times.read_seconds,
            decode_seconds=times.decode_seconds,
            batch_seconds=times.batch_seconds,
            blocked_seconds=times.blocked_seconds,
            threads=self.threads,
        )

    @property
    def keeps(self) -> bool:
        """Whether decoded images are being kept; known once the first of them was seen."""
        return self._filler.kept.store is not None

    def close(self) -> None:
        """End every iteration and wait for its threads; closing twice is fine, and iterating again is as well."""
        for stream in list(self._streams):
            stream.close()
        self._filler.buffers.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _job(self, number: int) -> Job[Desk, Made]:
        index, count = self.shard
        first = self.start + (number * count + index) * self.batch_size
        last = first + self.batch_size if self.stop is None else min(first + self.batch_size, self.stop)
        return self._filler.job(first, last - first)

    def _check_stop(self) -> None:
        if self.stop is None or not self.train:
            return
        span, step, shards = self.stop - self.start, self.batch_size * self.shard[1], self.shard[1]
        if span < 0 or span % step:
            fitting = self.start + -(-max(span, 0) // step) * step
            raise InputError(
                f"stop={self.stop} is {span} positions after start={self.start}, not a multiple of"
                f" batch_size={self.batch_size}{f' in each of {shards} shards' if shards > 1 else ''}: training batches"
                f" are always full; stop={fitting} would do"
            )


class _Batches(Iterator[Batch]):
    """One iteration."""

    def __init__(self, stream: Stream[Desk, Made], on_bad: Callable[[BadImage], None], buffers: Buffers) -> None:
        self._stream = stream
        self._on_bad = on_bad
        self._buffers = buffers

    def __next__(self) -> Batch:
        try:
            made = next(self._stream)
        except StopIteration:
            self._buffers.clear()  # between two evaluations nobody needs them
            raise
        for bad in made.bad:
            self._on_bad(bad)
        return made.batch


def default_threads(*, pin: bool) -> int:
    """Threads of a feed that is not told how many: all cores beside a GPU, half of them beside training on the CPU.

    On a CPU the network computes on every core, and the feed needs a small part of one: more threads would only take
    turns with it.
    """
    cores = devices.cores()
    return cores if pin else max(1, cores // 2)


def _used(source: Source, ids: Ints | None) -> Ints:
    n = len(source)
    if n == 0:
        raise DataError("the data has no images: a feed needs one at least")
    if ids is None:
        return np.arange(n)
    ids = np.array(ids, dtype=np.int64)
    if ids.ndim != 1 or len(ids) == 0:
        raise DataError(f"ids has the shape {ids.shape}: give one number at least, in one dimension")
    if ids.min() < 0 or ids.max() >= n:
        raise DataError(f"ids run from {ids.min()} to {ids.max()}; the data's run from 0 to {n - 1}")
    return ids


def _own(positions: Ints, *, start: int, batch_size: int, shard: tuple[int, int]) -> Ints:
    """Those of some positions that a shard makes."""
    index, count = shard
    own: Ints = positions[(positions >= start) & ((positions - start) // batch_size % count == index)]
    return own


def _checked(shard: tuple[int, int]) -> tuple[int, int]:
    index, count = shard
    if not 0 <= index < count:
        raise InputError(f"shard={shard}: give (i, n) with i from 0 to n - 1")
    return index, count


def _at_least(least: int, name: str, value: int) -> int:
    if value < least:
        raise InputError(f"{name}={value}: {least} is the least")
    return value


def _warn(bad: BadImage) -> None:
    warnings.warn(
        f"record {bad.id} cannot be decoded ({bad.reason}); record {bad.instead} is used instead", stacklevel=3
    )
