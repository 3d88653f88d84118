"""The image loader: batches of images from records, made by threads, in an order that nothing but the seed decides."""

from __future__ import annotations

import os
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self, get_args

import numpy as np
from PIL import Image

from steadytrain.data.loader.batch import BadImage, Batch, BufferPool, LoadedBatch
from steadytrain.data.loader.batch_worker import MOST_BATCHES, BatchWorker, LoaderTask, Source, WorkerScratch
from steadytrain.data.loader.crop import SMALL, Crop
from steadytrain.data.loader.image_cache import DeviceCache
from steadytrain.data.loader.pipeline import RequestCounts, StageTimes, Stream
from steadytrain.data.loader.rank_cache import find_local_ranks, remove_left_files
from steadytrain.data.loader.sampler import BlockShuffle, Ints
from steadytrain.data.loader.subprocess_loader import IS_SUPPORTED, LoaderProcess
from steadytrain.errors import DataError, InputError, SteadyError, did_you_mean
from steadytrain.machine import facts

if TYPE_CHECKING:
    import torch

Place = Literal["threads", "process", "auto"]

MOST_KEPT_BYTES = 2 * 2**30
LEAST_BATCHES = 10_000  # a shorter iteration would not earn back what it takes to start a process


@dataclass(frozen=True, kw_only=True)
class LoaderStats:
    """What a loader has done since it was made, summed over its threads.

    ``bytes`` are encoded ones, ``kept_bytes`` those of decoded images that are kept, ``shared_bytes`` those of them
    that other ranks of the machine have as well, ``device_bytes`` those that are on the device as well; ``read``,
    ``decode``, ``augment`` (cropping, resizing, mirroring, of kept images too) and ``batch`` (order and draws) are busy
    seconds, of which the threads were on a processor for ``cpu``; ``blocked`` are seconds that threads waited because
    enough batches were ready. Of the batches ``asked`` for ``starved`` were not ready; ``ready`` were on the average,
    and ``depth`` can be. ``by_loop``: the iterating thread makes the batches. ``per_thread``: images, and busy,
    cpu and blocked seconds of each thread of this process.
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
    per_thread: list[dict[str, float]]


@dataclass(frozen=True)
class Placement:
    """Where ``place="auto"`` lets the threads live, and why."""

    place: Literal["threads", "process"]
    reason: str


class ImageLoader:
    """Batches of a data set, each iteration from ``start`` anew, with threads of its own while it lasts.

    Training (``train=True``): one endless stream, in which position p belongs to epoch p // n, and each epoch holds
    every sample once in an order of its own; batches are always full and may straddle epochs. What stands at a
    position, its crop and its flip depend on ``seed``, the position and the data only, never on threads, batch size or
    restarts. Evaluation (``train=False``): ``ids`` in order, each exactly once, nothing random, a short last batch.

    The threads end, within the time of a few images, when the iteration ends, when its iterator is dropped, and by
    :meth:`close`. Images are decoded once and kept, if all of them fit into ``keep_bytes`` (see
    :mod:`~steadytrain.data.loader.image_cache`).

    Args:
        source: encoded images and labels, such as ``Records``.
        crop: how the square is cut out.
        batch_size: images in a batch.
        seed: of the order and of all draws.
        ids: int64[n], the records to use; None: all.
        start: the position to begin at.
        stop: the position to end before; None: without end (an evaluation: at the end of the data). In training
            ``stop - start`` must be a multiple of ``batch_size`` (times the number of shards).
        train: training, or evaluation.
        threads: that read and decode; None: all cores with ``pin``, else half of them, since training on a CPU then
            wants the cores itself (see :func:`default_threads`).
        depth: batches begun and not yet taken, at most; of small ones that need no decoding, as many as are made in
            one go (see :mod:`~steadytrain.data.loader.batch_worker`).
        pin: page-locked batches, for asynchronous copies to a GPU (needs torch and a GPU).
        device: where whoever iterates uses the batches. Kept images of one size that are only shifted are copied there,
            if they take no more than an eighth of what is free: a batch is then a
            :class:`~steadytrain.data.loader.image_cache.ResidentBatch`. Not of threads in a process of their own.
        keep_bytes: the most that kept images may take; None: an eighth of the memory, at most 2 GiB; 0: keep none.
        launch: a name given by several processes of this machine whose loaders have the same data: they keep one copy
            of the images, and ``keep_bytes`` is for all of them. None: the launch that torchrun or MPI tell of; empty:
            this process keeps its own (see :mod:`~steadytrain.data.loader.rank_cache`).
        on_bad: told once of each image that cannot be decoded, by the thread that iterates; None: a warning.
        blocks: the order by blocks, which reads a disk in stretches; None: the global one.
        shard: ``(i, n)``: make only every n-th batch of the stream, from the i-th on: the i-th of n processes' share.
        share: ``(first, of)``: of each ``of`` positions of the stream make one batch, from the ``first`` of them on: a
            share of larger batches, which need not be equal for all processes. None: as ``shard`` says.
        read_ahead: whether the system is asked for coming bytes (see :mod:`~steadytrain.data.loader.readahead`).
        place: where the threads live: ``threads``, in this process; ``process``, in one of their own, which opens the
            source, pickled, for itself; ``auto``: as :meth:`choose_place` says, once, before the first batch. The
            batches are the same.
        on_placed: told what ``auto`` has chosen, by the thread that iterates, before the first batch of a stream of
            10,000 batches or more.

    Raises:
        InputError: a number that cannot be; DataError: no images, labels that are none, or ``ids`` that are not in the
        data.

    While iterating: FeedError where a thread cannot go on, or an evaluation meets a bad image; TooManyBadError where
    more than the larger of 1 % and 5 images are bad.
    """

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
        blocks: BlockShuffle | None = None,
        shard: tuple[int, int] = (0, 1),
        share: tuple[int, int] | None = None,
        read_ahead: bool = True,
        place: Place = "threads",
        on_placed: Callable[[Placement], None] | None = None,
    ) -> None:
        used = _check_ids(source, ids)
        _check_labels(source)
        if place not in get_args(Place):
            near = did_you_mean(str(place), get_args(Place))
            raise InputError(f"place is {place!r}; it must be one of {', '.join(get_args(Place))}{near and '.' + near}")
        if at_least(0, "seed", seed) >= 2**63:
            raise InputError(f"seed={seed}; it must be at most 2**63 - 1")
        self.crop = crop if train else crop.for_evaluation()
        self.batch_size = at_least(1, "batch_size", batch_size)
        self.start = at_least(0, "start", start)
        stop = None if stop is None else at_least(0, "stop", stop)
        self.stop = stop if train else min(len(used), len(used) if stop is None else stop)
        self.train = train
        self.shard, self.share = _check_share(shard, share, self.batch_size)
        self.threads = default_threads(pin=pin) if threads is None else at_least(1, "threads", threads)
        self.depth = at_least(1, "depth", depth)
        self.on_bad = on_bad or _warn
        self.num_samples = len(used)
        self.place: Place = place
        if self.stop is not None and train:
            self._check_stop(self.stop)
        if keep_bytes is None:
            keep_bytes = min(MOST_KEPT_BYTES, facts.memory_bytes() // 8)
        self._task = LoaderTask(
            source=source,
            num_images=len(source),
            ids=None if ids is None else used,
            crop=self.crop,
            train=train,
            seed=int(seed),
            blocks=blocks,
            batch_size=self.batch_size,
            start=self.start,
            stop=self.stop,
            share=self.share,
            threads=self.threads,
            depth=self.depth,
            keep_bytes=int(keep_bytes),
            read_ahead=read_ahead,
            ranks=find_local_ranks(launch, os.environ),
        )
        self._pin = pin
        self._on_placed = on_placed
        self._buffers = BufferPool(self._task.shape, keep=max(self.depth, MOST_BATCHES) + 2, pinned=pin)
        self._worker = BatchWorker(
            self._task, self._buffers.take, None if device is None else DeviceCache(device, self.crop)
        )
        self._children: weakref.WeakSet[LoaderProcess] = weakref.WeakSet()
        self._idle: list[LoaderProcess] = []
        self._times_of_children: list[StageTimes] = []
        self._named: set[int] = set()  # bad images that ``on_bad`` was told of
        self._has_warned = False
        self._times = StageTimes()
        self._each = [StageTimes() for _ in range(self.threads)]
        self._requests = RequestCounts()
        self._streams: weakref.WeakSet[Stream[WorkerScratch, LoadedBatch]] = weakref.WeakSet()
        self._process = os.getpid()
        Image.init()  # Pillow finds its readers when first asked, and not safely from several threads

    def __len__(self) -> int:
        """Count the batches of one iteration; TypeError for a stream without end."""
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
        stream = self._worker.stream(self._times, each=self._each, requests=self._requests)
        self._streams.add(stream)
        batches = _Batches(self, stream)
        stream.end_with(batches)
        return batches

    def choose_place(self) -> Placement:
        """Decide where the threads live, from what is known before the first batch.

        In a process, where a training stream of at least 10,000 batches goes to a GPU (``pin``), of images of up to 64
        pixels that are not themselves kept on that GPU, with two usable cores or more, and the source can be pickled.
        In this process otherwise. The reason is what threads of the same interpreter cost a loop: beside steps of half
        a millisecond 87 % of its time for small images, and 14 % for photographs, against 2 % for a process; beside
        longer steps nothing (``benchmarks/results/feed_beside_loop.json``). Only small images have so short steps, and
        only on a GPU: on a CPU the network computes on the cores that a process would need.
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
        if crop.size > SMALL:
            return Placement("threads", f"images above {SMALL} pixels make steps long enough for threads")
        if self._worker.device_cache is not None and is_kept:
            return Placement("threads", "the images fit in GPU memory, so that no process is needed")
        if not IS_SUPPORTED or facts.cores() < 2:
            return Placement("threads", "a separate process needs Linux or macOS and two cores")
        return Placement("process", "threads would slow down the short GPU steps of small images")

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
        """Sum up what has been done so far, over all iterations."""
        for child in self._children:
            child.refresh()
        depths = [stream.depth for stream in self._streams] + [child.depth for child in self._children]
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
            by_loop=any(stream.is_made_by_consumer for stream in self._streams),
            per_thread=[
                {
                    "images": each.images,
                    "busy_seconds": each.read_seconds + each.decode_seconds + each.augment_seconds + each.batch_seconds,
                    "cpu_seconds": each.cpu_seconds,
                    "blocked_seconds": each.blocked_seconds,
                }
                for each in self._each
                if each.images or each.blocked_seconds
            ],
        )

    def doing(self) -> dict[str, str]:
        """Say what each of its threads is at, by its name; of those of another process only that they are."""
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
        """Raise an error in whoever waits for a batch, and never wait for threads that hang: from another thread."""
        for stream in list(self._streams):
            stream.abandon(error)
        for child in list(self._children):
            child.abandon(error)

    @property
    def keeps(self) -> bool:
        """Whether decoded images are being kept; known once the first of them was seen."""
        return self._kept_bytes > 0

    def is_steady(self) -> bool:
        """Tell whether all images are kept that are to be; of threads in this process."""
        cache, device_cache = self._worker.cache, self._worker.device_cache
        return cache.given_up or (cache.full and (device_cache is None or device_cache.is_settled))

    @property
    def _kept_bytes(self) -> int:
        return self._worker.cache.bytes + sum(child.kept_bytes for child in self._children)

    def close(self) -> None:
        """End every iteration and wait for its threads; closing twice is fine, and iterating again is as well."""
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
    """One iteration."""

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


def default_threads(*, pin: bool) -> int:
    """Say how many threads a loader has by default: all cores beside a GPU, half of them beside training on the CPU.

    On a CPU the network computes on every core, and the loader needs a small part of one: more threads would only take
    turns with it.
    """
    cores = facts.cores()
    return cores if pin else max(1, cores // 2)


def at_least(least: int, name: str, value: int) -> int:
    """Check a whole number. Raises InputError where it is none, or less than ``least``."""
    if not isinstance(value, int | np.integer) or isinstance(value, bool):
        raise InputError(f"{name}={value!r}: it must be a whole number")
    if value < least:
        raise InputError(f"{name}={value}: {least} is the least")
    return int(value)


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
    pair = tuple(shard) if isinstance(shard, tuple | list) else ()
    are_whole = len(pair) == 2 and all(isinstance(number, int | np.integer) for number in pair)
    if not are_whole or not 0 <= pair[0] < pair[1]:
        raise InputError(f"shard={shard}: give (i, n) with i from 0 to n - 1")
    index, count = int(pair[0]), int(pair[1])
    if share is None:
        return (index, count), (index * batch_size, count * batch_size)
    first, of = at_least(0, "share", share[0]), at_least(1, "share", share[1])
    if first + batch_size > of:
        raise InputError(f"share={share}: a batch of {batch_size} starting at {first} does not fit into {of}")
    return (index, count), (first, of)


def _warn(bad: BadImage) -> None:
    warnings.warn(f"record {bad.id} cannot be decoded ({bad.reason}); using record {bad.instead} instead", stacklevel=3)
