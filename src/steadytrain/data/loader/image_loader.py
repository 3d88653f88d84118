"""The image loader: threads read, decode and crop images into batches, in an order that depends on the seed only."""

from __future__ import annotations

import os
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from PIL import Image

from steadytrain.config.calls import checked
from steadytrain.data.arrays import Ints
from steadytrain.data.loader.batch import BadImage, Batch, BufferPool, LoadedBatch
from steadytrain.data.loader.batch_worker import MOST_BATCHES, BatchWorker, WorkerScratch
from steadytrain.data.loader.crop import Crop
from steadytrain.data.loader.image_cache import DeviceCache
from steadytrain.data.loader.pipeline import BatchStream, RequestCounts, StageTimes
from steadytrain.data.loader.rank_cache import remove_left_files
from steadytrain.data.loader.subprocess_loader import LoaderProcess
from steadytrain.data.loader.task import LoaderTask, Source
from steadytrain.errors import SteadyError
from steadytrain.files import Closing
from steadytrain.format import percent
from steadytrain.machine import facts

if TYPE_CHECKING:
    import torch

LoaderPlace = Literal["threads", "process", "auto"]

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


class ImageLoader(Closing):
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
        device: device that uses the batches. Cached images of equal size whose crops are only shifts are copied to
            it if they take at most an eighth of its free memory; a batch is then a
            :class:`~steadytrain.data.loader.image_cache.ResidentBatch`. Ignored with ``place="process"``, and where
            squares have several sizes.
        on_bad: called once for each image that cannot be decoded, in the iterating thread; None: a warning.
        place: ``threads``: in this process; ``process``: in a child process, which opens the pickled source itself;
            ``auto``: decide by :meth:`choose_place`, once, before the first batch. The batches are the same.
        on_placed: called with the decision of ``auto``, in the iterating thread, before the first batch of a stream of
            at least 1,000 batches.
        queue: tells which batches to make, by number from ``start`` on, instead of all of them in order; they are made
            in this process.
        settings: ``batch_size`` and whatever else :class:`~steadytrain.data.loader.task.LoaderTask` has.

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
        device: torch.device | None = None,
        on_bad: Callable[[BadImage], None] | None = None,
        place: LoaderPlace = "threads",
        on_placed: Callable[[Placement], None] | None = None,
        queue: BatchQueue | None = None,
        **settings: Any,
    ) -> None:
        self.task = task = _make_task(source=source, crop=crop, **settings)
        task.check()
        self.on_bad = on_bad or (lambda bad: warnings.warn(str(bad), stacklevel=3))
        self.num_samples = len(task.records)
        self.place: LoaderPlace = place if queue is None else "threads"
        self._queue = queue
        remove_left_files()
        self._on_placed = on_placed
        self._buffers = BufferPool(task.shape, keep=max(task.depth, MOST_BATCHES) + 2, pinned=task.pin)
        device_cache = None if device is None or task.stages else DeviceCache(device, task.largest_crop)
        self._worker = BatchWorker(task, self._buffers.take, device_cache)
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
        total = self.task.total
        if total is None:
            raise TypeError("a training stream without stop has no length")
        return total

    def ids_at(self, positions: Ints) -> Ints:
        """Return the records that stand at some positions of the stream, int64; positions must not fall."""
        order = self._worker.order
        return self.task.records[positions if order is None else order.ids(positions)]

    def __iter__(self) -> Iterator[Batch]:
        if os.getpid() != self._process:
            # Forked: begin without what the parent's threads may have been at, locks and all.
            self._process = os.getpid()
            self._worker = BatchWorker(self.task, self._buffers.take)
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
        crop, n = self.task.largest_crop, self.num_samples
        image_bytes = crop.size**2 * crop.channels
        is_kept = crop.kind != "resized-crop" and n * image_bytes <= self.task.cache_bytes
        if not self._is_long:
            return Placement("threads", f"a separate process pays off from {LEAST_BATCHES:,} training batches")
        if not self.task.pin:
            return Placement(
                "threads", "a network on the CPU needs the cores, and its steps are long enough for threads"
            )
        if self._worker.device_cache is not None and is_kept:
            return Placement("threads", "the images fit in GPU memory, so that no process is needed")
        if facts.cores() < 2:
            return Placement("threads", "a separate process needs two cores")
        share = self.task.num_threads * THREAD_RATE * (THREAD_SIZE / crop.size) ** 2 * LOCK_SECONDS
        if share <= MOST_LOST:
            pool = f"{self.task.num_threads} thread{'s' * (self.task.num_threads > 1)}"
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
        return self.task.train and (self.task.total is None or self.task.total >= LEAST_BATCHES)

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
            threads=self.task.num_threads,
            asked=self._requests.requests,
            starved=self._requests.starved,
            ready=self._requests.ready / max(1, self._requests.requests),
            depth=max([self.task.depth, *depths]),
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
        if self.task.ranks is not None and self._times_of_children:
            remove_left_files()  # what a child had when it was killed
        self._idle.clear()
        self._buffers.clear()

    def _child(self) -> LoaderProcess:
        """Return a child process, one that is idle or a new one. Raises FeedError where there can be none."""
        if self._idle:
            return self._idle.pop()
        self._times_of_children.append(StageTimes())
        child = LoaderProcess(self.task, times=self._times_of_children[-1])
        self._children.add(child)
        return child

    def _name_bad(self, bad: BadImage) -> None:
        if bad.id not in self._named:
            self._named.add(bad.id)
            self.on_bad(bad)

    def _warn_if_not_shared(self) -> None:
        """Warn once where images that were to be kept once for several ranks are not."""
        if self.task.ranks is None or self._has_warned or not self.keeps:
            return
        self._has_warned = True
        if self.stats().shared_bytes == 0:
            why = self._worker.cache.not_shared or "no room in /dev/shm"
            warnings.warn(
                f"decoded images are not shared between the processes on this machine ({why}): each keeps its"
                " own copy; enlarge /dev/shm (docker: --shm-size), or set STEADYTRAIN_SHM to a folder in memory",
                stacklevel=3,
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


_make_task = checked(LoaderTask)
