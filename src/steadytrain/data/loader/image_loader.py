"""The image loader: threads read, decode and crop images into batches, in an order that depends on the seed only."""

from __future__ import annotations

import os
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Protocol, Self

import numpy as np
from PIL import Image

from steadytrain.config.plain import checked
from steadytrain.data.arrays import Ints
from steadytrain.data.loader.batch import BadImage, Batch, BufferPool, LoadedBatch
from steadytrain.data.loader.batch_worker import MOST_BATCHES, BatchWorker, LoaderTask, Source, WorkerScratch
from steadytrain.data.loader.crop import Crop
from steadytrain.data.loader.image_cache import DeviceCache
from steadytrain.data.loader.pipeline import BatchStream, RequestCounts, StageTimes
from steadytrain.data.loader.rank_cache import find_local_ranks, remove_left_files
from steadytrain.data.loader.sampler import BlockShuffle
from steadytrain.data.loader.subprocess_loader import LoaderProcess
from steadytrain.errors import DataError, InputError, SteadyError
from steadytrain.format import percent
from steadytrain.machine import facts

if TYPE_CHECKING:
    import torch

LoaderPlace = Literal["threads", "process", "auto"]

MOST_KEPT_BYTES = 2 * 2**30
MOST_THREADS = 10
"""Default for a GPU: more threads wait for the interpreter's lock. Training crops of packed photographs, 16 cores,
beside an H100: 4 threads 9,542 images/s, 8 14,846, 10 14,716, 12 12,376, 16 12,139 (results/gpu_session.json)."""
LOCK_SECONDS = 92e-6
"""Seconds that an image made by a thread costs the thread that launches, which is busy all the time: 14 % of it at
1,561 photographs a second, where a process costs 2 % (results/feed_beside_loop.json).
"""
THREAD_RATE, THREAD_SIZE = 2_500, 224
"""Images a second that a thread makes, and their side: packed photographs (results/feed.json, gpu_session.json)."""
MOST_LOST = 0.05
LEAST_BATCHES = 1_000  # a shorter iteration would not earn back the seconds that a process takes to start


@dataclass(frozen=True, kw_only=True)
class LoaderStats:
    """Totals over all threads since the loader was created.

    - ``images``: images delivered; ``bytes``: encoded bytes read.
    - ``kept_bytes``: decoded images in the cache; ``shared_bytes``: the part of them that the ranks of this machine
      share; ``device_bytes``: the part of them that was copied to the device.
    - ``read_seconds``, ``decode_seconds``, ``augment_seconds`` (crop, resize and flip), ``batch_seconds`` (order and
      random draws): busy seconds of the threads, of which ``cpu_seconds`` were spent on a processor;
      ``blocked_seconds``: seconds that threads waited because the queue was full.
    - ``asked``: batches requested; ``starved``: requests that had to wait; ``ready``: batches in the queue at a
      request, on average; ``depth``: its limit.
    - ``by_loop``: whether the iterating thread makes the batches itself.
    """

    images: int
    bytes: int
    kept_bytes: int
    shared_bytes: int
    device_bytes: int
    read_seconds: float
    decode_seconds: float
    augment_seconds: float
    batch_seconds: float
    blocked_seconds: float
    cpu_seconds: float
    threads: int
    asked: int
    starved: int
    ready: float
    depth: int
    by_loop: bool


@dataclass(frozen=True)
class Placement:
    """The process in which ``place="auto"`` runs the threads, and the reason."""

    place: Literal["threads", "process"]
    reason: str


class BatchQueue(Protocol):
    """The numbers of the batches to load, for a loader that learns them only as it runs."""

    def next_batches(self) -> list[int]:
        """Return the numbers that became known since the last call; waits for nothing."""
        ...

    def wait_for_batch(self) -> list[int]:
        """Wait until some are known, and return them; none: there are no more."""
        ...

    def delivered(self, batch: int, /) -> None:
        """Note that the consumer is given this batch next."""
        ...


class ImageLoader:
    """Iterable of :class:`Batch`. Each iteration starts at position ``start`` with threads of its own.

    Training (``train=True``) is one endless stream of n samples an epoch: position p belongs to epoch p // n. Each
    epoch contains every sample once (but for ``balance`` and ``repeats``), in a new order; batches are always full and
    may cross the end of an epoch. The sample at a position, its crop and its flip depend only on ``seed``, the position
    and the data, not on threads, batch size or restarts. Evaluation (``train=False``) delivers ``ids`` in order, each
    once, without randomness; the last batch may be smaller.

    The threads end within the time of a few images when the iteration ends, when its iterator is deleted, or on
    :meth:`close`. Decoded images are cached if all of them fit into ``keep_bytes`` (see
    :mod:`~steadytrain.data.loader.image_cache`).

    Args:
        source: encoded images and labels, such as ``Records``.
        crop: how each image is cropped.
        batch_size: images per batch.
        seed: seed of the order and of all random draws, from 0 to 2**63 - 1.
        ids: int64[n], the records to use; None: all of them.
        start: first position.
        stop: end position (exclusive); None: no end in training, the end of the data in evaluation. In training
            ``stop - start`` must be a multiple of ``batch_size`` (times the number of shards).
        train: training or evaluation.
        threads: number of threads; None: all cores if ``pin``, else half of them, because training on a CPU needs the
            cores too (see :func:`default_threads`).
        depth: most batches in progress or in the queue; small batches that need no decoding are made several at a time
            (see :mod:`~steadytrain.data.loader.batch_worker`).
        pin: allocate batches in page-locked memory, for asynchronous copies to a GPU (needs torch and a GPU).
        device: device that uses the batches. Cached images of equal size whose crops are only shifts are copied to
            it if they take at most an eighth of its free memory; a batch is then a
            :class:`~steadytrain.data.loader.image_cache.ResidentBatch`. Ignored with ``place="process"``.
        keep_bytes: most bytes of decoded images to cache; None: an eighth of the memory, at most 2 GiB; 0: no cache.
        launch: name shared by processes on this machine that load the same data: they share one cache, and
            ``keep_bytes`` is for all of them. None: the launch of torchrun or MPI, if any; empty: no sharing (see
            :mod:`~steadytrain.data.loader.rank_cache`).
        on_bad: called once for each image that cannot be decoded, in the iterating thread; None: a warning.
        skip_bad: in evaluation, an image that cannot be decoded is black, and named by ``on_bad`` before its batch
            comes; else it raises. Decoded images are not cached then.
        blocks: shuffle by blocks, for disks that are slow to seek; None: a global shuffle.
        balance: in training, all classes are equally frequent (see
            :class:`~steadytrain.data.loader.sampler.BalancedOrder`); not together with ``blocks``.
        repeats: in training, each sample stands so many times in a row, each time cropped anew (see
            :class:`~steadytrain.data.loader.sampler.RepeatedOrder`); not together with alternating flips.
        sizes: pairs of a position, at which a batch begins, and a side in pixels: from there on, squares have this side
            instead of the crop's, in training. Images are not copied to the device then.
        shard: ``(i, n)``: deliver every n-th batch of the stream, beginning with the i-th.
        share: ``(first, of)``: make one batch of every ``of`` positions, beginning at the ``first`` of them: a part of
            a larger batch, for processes with batches of different size. None: use ``shard``.
        read_ahead: ask the operating system to read coming bytes (see :mod:`~steadytrain.data.loader.readahead`).
        place: ``threads``: in this process; ``process``: in a child process, which opens the pickled source itself;
            ``auto``: decide by :meth:`choose_place`, once, before the first batch. The batches are the same.
        queue: tells which batches to make, by number from ``start`` on, instead of all of them in order; they are made
            in this process.
        on_placed: called with the decision of ``auto``, in the iterating thread, before the first batch of a stream of
            at least 1,000 batches.

    Raises:
        InputError: a number is out of range.
        DataError: there are no images, the labels are not an array of labels, or ``ids`` are not in the data.
        FeedError: while iterating: a thread failed, or evaluation met an image that cannot be decoded.
        TooManyBadError: while iterating: more than 5 images, and more than 1 % of them, cannot be decoded.
    """

    @checked
    def __init__(
        self,
        source: Source,
        crop: Crop,
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
        device: torch.device | None = None,
        keep_bytes: int | None = None,
        launch: str | None = None,
        on_bad: Callable[[BadImage], None] | None = None,
        skip_bad: bool = False,
        blocks: BlockShuffle | None = None,
        balance: bool = False,
        repeats: int = 1,
        sizes: Sequence[tuple[int, int]] = (),
        shard: tuple[int, int] = (0, 1),
        share: tuple[int, int] | None = None,
        read_ahead: bool = True,
        place: LoaderPlace = "threads",
        on_placed: Callable[[Placement], None] | None = None,
        queue: BatchQueue | None = None,
    ) -> None:
        used = _check_ids(source, ids)
        _check_labels(source)
        at_least(0, "seed", seed)
        if balance and (blocks is not None or source.labels.ndim > 1):
            raise InputError("balance=True needs one class for each image, and no shuffle by blocks")
        if at_least(1, "repeats", repeats) > 1 and crop.flip == "alternating":
            raise InputError(f"repeats={repeats} and alternating flips exclude each other: these count passes")
        self.crop = crop if train else crop.for_evaluation()
        self.batch_size = at_least(1, "batch_size", batch_size)
        self.start = at_least(0, "start", start)
        stop = None if stop is None else at_least(0, "stop", stop)
        self.stop = stop if train else min(len(used), len(used) if stop is None else stop)
        self.train = train
        self.shard, self.share = _check_share(shard, share, self.batch_size)
        coming = self._coming_sizes(sizes) if sizes and train else ()
        if coming:
            self.crop = replace(self.crop, size=max(side for _, side in coming))
        self.threads = default_threads(pin=pin) if threads is None else at_least(1, "threads", threads)
        self.depth = at_least(1, "depth", depth)
        self.on_bad = on_bad or _warn
        self.num_samples = len(used)
        self.place: LoaderPlace = place if queue is None else "threads"
        self._queue = queue
        if self.stop is not None and train:
            self._check_stop(self.stop)
        assert not (skip_bad and train), "training replaces what it cannot decode"
        if skip_bad:
            keep_bytes = 0
        if keep_bytes is None:
            keep_bytes = min(MOST_KEPT_BYTES, facts.memory_bytes() // 8)
        self._task = LoaderTask(
            source=source,
            num_images=len(source),
            ids=None if ids is None else used,
            crop=self.crop,
            sizes=coming,
            train=train,
            skip_bad=skip_bad,
            seed=seed,
            blocks=blocks,
            balance=balance,
            repeats=repeats,
            batch_size=self.batch_size,
            start=self.start,
            stop=self.stop,
            share=self.share,
            threads=self.threads,
            depth=self.depth,
            keep_bytes=keep_bytes,
            read_ahead=read_ahead,
            ranks=find_local_ranks(launch, os.environ),
        )
        remove_left_files()
        self._pin = pin
        self._on_placed = on_placed
        self._buffers = BufferPool(self._task.shape, keep=max(self.depth, MOST_BATCHES) + 2, pinned=pin)
        self._worker = BatchWorker(
            self._task, self._buffers.take, None if device is None or coming else DeviceCache(device, self.crop)
        )
        self._children: weakref.WeakSet[LoaderProcess] = weakref.WeakSet()
        self._idle: list[LoaderProcess] = []
        self._times_of_children: list[StageTimes] = []
        self._named: set[int] = set()  # bad images that ``on_bad`` was told of
        self._has_warned = False
        self._times = StageTimes()
        self._requests = RequestCounts()
        self._streams: weakref.WeakSet[BatchStream[WorkerScratch, LoadedBatch]] = weakref.WeakSet()
        self._by_loop = False
        self._process = os.getpid()
        Image.init()  # Pillow finds its readers when first asked, and not safely from several threads

    def __len__(self) -> int:
        """Return the number of batches of one iteration. Raises TypeError for a stream without end."""
        total = self._task.total
        if total is None:
            raise TypeError("a training stream without stop has no length")
        return total

    def __iter__(self) -> Iterator[Batch]:
        if os.getpid() != self._process:
            # Forked: begin without what the parent's threads may have been at, locks and all.
            self._process = os.getpid()
            self._worker = BatchWorker(self._task, self._buffers.take)
            self._streams, self._children, self._idle = weakref.WeakSet(), weakref.WeakSet(), []
        for bad in list(self._worker.quarantine.met):  # in batches, perhaps, that were dropped with another iteration
            self._name_bad(bad)
        if self.place == "auto":
            self._settle_place()
        if self.place == "process":
            return _Batches(self, self._child().batches(self._requests, self._idle.append))
        if self._queue is not None:
            return _Batches(self, self._queued(self._queue))
        stream = self._worker.stream(self._times, requests=self._requests)
        self._streams.add(stream)
        batches = _Batches(self, stream)
        stream.end_with(batches)
        return batches

    def _queued(self, queue: BatchQueue) -> Iterator[LoadedBatch]:
        """Make the batches that the queue names, each when it is known; the end is when there are no more."""
        numbers: list[int] = []
        stream: BatchStream[WorkerScratch, LoadedBatch] | None = None
        num_taken = 0
        try:
            while True:
                more = queue.next_batches() or ([] if num_taken < len(numbers) else queue.wait_for_batch())
                numbers += more
                if num_taken == len(numbers):
                    return
                if stream is None:
                    stream = self._worker.stream(self._times, requests=self._requests, numbers=numbers)
                    self._streams.add(stream)
                elif more:
                    stream.release(len(more))
                loaded = next(stream)
                queue.delivered(numbers[num_taken])
                num_taken += 1
                yield loaded
                del loaded
        finally:
            if stream is not None:
                stream.close()

    def choose_place(self) -> Placement:
        """Decide where the threads live, from what is known before the first batch.

        In a process, where a training stream of at least 1,000 batches goes to a GPU (``pin``), the images are not
        themselves kept on that GPU, two cores or more are usable, the source can be pickled, and threads could take
        more than 5 % of the time of the thread that launches the GPU's work: as many images as they make, times what
        one of them costs that thread by the interpreter's lock. In this process otherwise: on a CPU the network
        computes on the cores that a process would need.
        """
        crop, n = self.crop, self.num_samples
        image_bytes = crop.size**2 * crop.channels
        is_kept = crop.kind != "resized-crop" and n * image_bytes <= self._task.keep_bytes
        if not self._is_long:
            return Placement("threads", f"a separate process pays off from {LEAST_BATCHES:,} training batches")
        if not self._pin:
            return Placement(
                "threads", "a network on the CPU needs the cores, and its steps are long enough for threads"
            )
        if self._worker.device_cache is not None and is_kept:
            return Placement("threads", "the images fit in GPU memory, so that no process is needed")
        if os.name != "posix" or facts.cores() < 2:
            return Placement("threads", "a separate process needs Linux or macOS and two cores")
        share = self.threads * THREAD_RATE * (THREAD_SIZE / crop.size) ** 2 * LOCK_SECONDS
        if share <= MOST_LOST:
            pool = f"{self.threads} thread{'s' * (self.threads > 1)}"
            return Placement("threads", f"{pool} can slow down the launching of GPU work by {percent(share)} at most")
        return Placement("process", "threads would slow down the launching of GPU work")

    def _settle_place(self) -> None:
        """Choose a place, and stay with threads where a process cannot make the batches."""
        placement = self.choose_place()
        if placement.place == "process":
            try:
                child = self._child()
                child.wait()
                self._idle.append(child)
            except SteadyError as error:
                placement = Placement("threads", str(error))
        self.place = placement.place
        if self._on_placed is not None and self._is_long:
            self._on_placed(placement)

    @property
    def _is_long(self) -> bool:
        return self.train and (self._task.total is None or self._task.total >= LEAST_BATCHES)

    def stats(self) -> LoaderStats:
        """Return totals over all iterations so far."""
        for child in self._children:
            child.refresh()
        if streams := list(self._streams):
            self._by_loop = any(stream.is_made_by_consumer for stream in streams)  # and stays so after the last batch
        depths = [stream.depth for stream in streams] + [child.depth for child in self._children]
        cache, device_cache = self._worker.cache, self._worker.device_cache
        return LoaderStats(
            **asdict(sum(self._times_of_children, start=self._times)),
            kept_bytes=self._kept_bytes,
            shared_bytes=(cache.bytes if cache.is_shared else 0)
            + sum(child.kept_bytes for child in self._children if child.is_shared),
            device_bytes=0 if device_cache is None else device_cache.bytes,
            threads=self.threads,
            asked=self._requests.requests,
            starved=self._requests.starved,
            ready=self._requests.ready / max(1, self._requests.requests),
            depth=max([self.depth, *depths]),
            by_loop=self._by_loop,
        )

    def doing(self) -> dict[str, str]:
        """Return what each thread is doing, by thread name; of a child process only that it is running."""
        now, doing = time.perf_counter(), dict[str, str]()
        for stream in list(self._streams):
            for name, scratch, since in stream.doing():
                at = "waiting for space in the queue" if scratch is None else f"working on record {scratch.record}"
                doing[name] = f"{at} for {now - since:.0f} s"
        for child in list(self._children):
            if child.is_alive:
                doing[f"process {child.pid}"] = "producing batches"
        return doing

    def abandon(self, error: BaseException) -> None:
        """Raise an error in the thread that waits for a batch, without joining threads. Call from another thread."""
        for stream in list(self._streams):
            stream.abandon(error)
        for child in list(self._children):
            child.abandon(error)

    @property
    def keeps(self) -> bool:
        """Return whether decoded images are cached; known after the first image."""
        return self._kept_bytes > 0

    def is_steady(self) -> bool:
        """Return whether the cache is complete or was given up; for threads in this process."""
        cache, device_cache = self._worker.cache, self._worker.device_cache
        return cache.given_up or (cache.full and (device_cache is None or device_cache.is_settled))

    @property
    def _kept_bytes(self) -> int:
        return self._worker.cache.bytes + sum(child.kept_bytes for child in self._children)

    def close(self) -> None:
        """End every iteration and join its threads. Closing twice and iterating again are both allowed."""
        for stream in list(self._streams):
            stream.close()
        for child in list(self._children):
            child.end()
        if self._task.ranks is not None and self._times_of_children:
            remove_left_files()  # what a child had when it was killed
        self._idle.clear()
        self._buffers.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _child(self) -> LoaderProcess:
        """Return a child process, one that is idle or a new one. Raises FeedError where there can be none."""
        if self._idle:
            return self._idle.pop()
        self._times_of_children.append(StageTimes())
        child = LoaderProcess(self._task, pin=self._pin, times=self._times_of_children[-1])
        self._children.add(child)
        return child

    def _name_bad(self, bad: BadImage) -> None:
        if bad.id not in self._named:
            self._named.add(bad.id)
            self.on_bad(bad)

    def _warn_if_not_shared(self) -> None:
        """Warn once where images that were to be kept once for several ranks are not."""
        if self._task.ranks is None or self._has_warned or not self.keeps:
            return
        self._has_warned = True
        if self.stats().shared_bytes == 0:
            why = self._worker.cache.not_shared or "no room in /dev/shm"
            warnings.warn(
                f"decoded images are not shared between the processes on this machine ({why}): each keeps its"
                " own copy; enlarge /dev/shm (docker: --shm-size), or set STEADYTRAIN_SHM to a folder in memory",
                stacklevel=3,
            )

    def _coming_sizes(self, sizes: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
        """Return the sizes from the first position on, in rising order. Raises InputError where they cannot be."""
        stages = sorted([(-1, self.crop.size), *((at_least(0, "sizes", at), side) for at, side in sizes)])
        reached = [stage for stage in stages if stage[0] <= self.start][-1]
        coming = [stage for stage in stages if stage[0] > self.start]
        for position, side in coming:
            at_least(1, "sizes", side)
            if (position - self.start) % self.share[1]:
                raise InputError(f"sizes have position {position}, where no batch of start={self.start} begins")
        return reached, *coming

    def _check_stop(self, stop: int) -> None:
        span, step, shards = stop - self.start, self.share[1], self.share[1] // self.batch_size
        if span < 0 or span % step:
            fitting = self.start + -(-max(span, 0) // step) * step
            raise InputError(
                f"stop={stop} is {span} positions after start={self.start}, not a multiple of"
                f" batch_size={self.batch_size}{f' in each of {shards} shards' if shards > 1 else ''}: training batches"
                f" are always full, so use stop={fitting}"
            )


class _Batches(Iterator[Batch]):
    """The iterator over one pass of a loader."""

    def __init__(self, loader: ImageLoader, loaded: Iterator[LoadedBatch]) -> None:
        self._loader = loader
        self._loaded = loaded
        self._next: LoadedBatch | None = None  # while naming its bad images may raise: it is not lost then

    def __next__(self) -> Batch:
        try:
            loaded = self._next = self._next or next(self._loaded)
        except StopIteration:
            self._loader._buffers.clear()  # between two evaluations nobody needs their memory
            raise
        for bad in loaded.bad:
            self._loader._name_bad(bad)
        self._loader._warn_if_not_shared()
        self._next = None
        return loaded.batch


def default_threads(*, pin: bool, sharing: int = 1) -> int:
    """Return the default number of threads: of all cores for a GPU, of half of them when training on the CPU.

    On a CPU the network computes on every core and the loader needs only a small part of one: more threads would
    compete with it. For a GPU there are at most :data:`MOST_THREADS`.

    Args:
        pin: the batches go to a GPU.
        sharing: processes that share the cores, this one included.
    """
    cores = facts.cores() // sharing
    return max(1, min(cores, MOST_THREADS) if pin else cores // 2)


def at_least(least: int, name: str, value: int) -> int:
    """Return a number that is not less than ``least``. Raises InputError."""
    if value < least:
        raise InputError(f"{name}={value}: it must be at least {least}")
    return value


def _check_ids(source: Source, ids: object) -> Ints:
    """Return the records to use, int64[n]: ``ids``, or all. Raises DataError where they are none of the data's."""
    n = len(source)
    if n == 0:
        raise DataError("the data has no images: a data loader needs at least one")
    if ids is None:
        return np.arange(n)
    used = np.array(ids)
    if used.ndim != 1 or len(used) == 0:
        raise DataError(f"ids has shape {used.shape}; it must be a one-dimensional array with at least one number")
    if used.dtype.kind not in "iu":
        remedy = ": use np.flatnonzero(mask) for a mask" if used.dtype.kind == "b" else ""
        raise DataError(f"ids are of type {used.dtype}; they must be whole numbers{remedy}")
    if used.min() < 0 or used.max() >= n:
        raise DataError(f"ids range from {used.min()} to {used.max()}; valid ids are 0 to {n - 1}")
    return used.astype(np.int64)


def _check_labels(source: Source) -> None:
    """Raise DataError where the labels are not what those of batches can be."""
    labels, n = source.labels, len(source)
    if isinstance(labels, np.ndarray):
        if (labels.dtype, labels.ndim) in ((np.dtype(np.int64), 1), (np.dtype(np.float32), 2)) and len(labels) == n:
            return
        kind = f"{labels.dtype}{list(labels.shape)}"
    else:
        kind = type(labels).__name__
    raise DataError(f"the labels are {kind}; they must be a numpy array, int64[{n}] or float32[{n}, L]")


def _check_share(
    shard: tuple[int, int], share: tuple[int, int] | None, batch_size: int
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the shard, and where a batch lies in how large a one. Raises InputError."""
    index, count = shard
    if not 0 <= index < count:
        raise InputError(f"shard={shard}: give (i, n) with i from 0 to n - 1")
    if share is None:
        return (index, count), (index * batch_size, count * batch_size)
    first, of = at_least(0, "share", share[0]), at_least(1, "share", share[1])
    if first + batch_size > of:
        raise InputError(f"share={share}: a batch of {batch_size} starting at {first} does not fit into {of}")
    return (index, count), (first, of)


def _warn(bad: BadImage) -> None:
    warnings.warn(str(bad), stacklevel=3)
