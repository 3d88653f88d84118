"""The feed: batches of images from records, made by threads, in an order that nothing but the seed decides."""

from __future__ import annotations

import os
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self

from PIL import Image

from steadytrain.data.loader import bundle
from steadytrain.data.loader.arguments import (
    at_least,
    checked_labels,
    checked_place,
    checked_seed,
    checked_shard,
    checked_share,
    used_ids,
)
from steadytrain.data.loader.batch import Batch, Buffers
from steadytrain.data.loader.batch_worker import LoadedBatch, Source
from steadytrain.data.loader.block_shuffle import BlockShuffle
from steadytrain.data.loader.child import CAN_BE, Child
from steadytrain.data.loader.choice import Choice
from steadytrain.data.loader.crop import Crop
from steadytrain.data.loader.device_cache import Resident
from steadytrain.data.loader.moving import LEAST_BATCHES, moving
from steadytrain.data.loader.pipeline import Stream
from steadytrain.data.loader.quarantine import BadImage
from steadytrain.data.loader.rank_cache import ranks_here, sweep
from steadytrain.data.loader.sampler import Ints
from steadytrain.data.loader.stats import FeedTimes, of_thread
from steadytrain.data.loader.subprocess_loader import Apart
from steadytrain.data.loader.task import Task
from steadytrain.data.loader.times import Asked, Times
from steadytrain.data.loader.worker_scratch import WorkerScratch
from steadytrain.errors import InputError
from steadytrain.machine import facts

if TYPE_CHECKING:
    import torch

MOST_KEPT_BYTES = 2 * 2**30


class ImageLoader:
    """Batches of a data set, each iteration from ``start`` anew, with threads of its own while it lasts.

    Training (``train=True``): one endless stream, in which position p belongs to epoch p // n, and each epoch holds
    every sample once in an order of its own; batches are always full and may straddle epochs. What stands at a
    position, its cut and its flip depend on ``seed``, the position and the data only, never on threads, batch size or
    restarts. Evaluation (``train=False``): ``ids`` in order, each exactly once, nothing random, a short last batch.

    The threads end, within the time of a few images, when the iteration ends, when its iterator is dropped, and by
    :meth:`close`. Images are decoded once and kept, if all of them fit into ``keep_bytes`` (see
    :mod:`~steadytrain.data.loader.image_cache`).

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
        depth: batches begun and not yet taken, at most; of small ones that need no decoding, as many as are made in
            one go (see :mod:`~steadytrain.data.loader.bundle`).
        pin: page-locked batches, for asynchronous copies to a GPU (needs torch and a GPU).
        device: where whoever iterates uses the batches. Kept images of one size that are only moved are copied there,
            if they take no more than an eighth of what is free: a batch is then a
            :class:`~steadytrain.data.loader.device_cache.ResidentBatch`. Not of threads in a process of their own.
        keep_bytes: the most that kept images may take; None: an eighth of the memory, at most 2 GiB; 0: keep none.
        launch: a name given by several processes of this machine whose feeds have the same data: they keep one copy of
            the images, and ``keep_bytes`` is for all of them. None: the launch that torchrun or MPI tell of; empty:
            this process keeps its own (see :mod:`~steadytrain.data.loader.rank_cache`).
        on_bad: told once of each image that cannot be decoded, by the thread that iterates; None: a warning.
        blocks: the order by blocks, which reads a disk in stretches; None: the global one.
        shard: ``(i, n)``: make only every n-th batch of the stream, from the i-th on: the i-th of n processes' share.
        share: ``(first, of)``: of each ``of`` positions of the stream make one batch, from the ``first`` of them on: a
            share of larger batches, which need not be equal for all processes. None: as ``shard`` says.
        read_ahead: whether the system is asked for coming bytes (see :mod:`~steadytrain.data.loader.readahead`).
        place: where the threads live: ``threads``, in this process; ``process``, in one of their own, which opens the
            source, pickled, for itself; ``auto``: found out by measuring what they cost whoever iterates (see
            ``choice``), in the midst of a training stream that is long enough. The batches are
            the same.
        on_choice: told what ``auto`` has chosen, by the thread that iterates.

    Raises:
        InputError: a number that cannot be; DataError: no images, labels that are none, or ``ids`` that are not in the
        data.

    While iterating: FeedError where a thread cannot go on, or an evaluation meets a bad image; TooManyBadError where
    more than the larger of 1 % and 5 images are bad.
    """

    def __init__(
        self,
        source: Source,
        cut: Crop,
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
        place: Literal["threads", "process", "auto"] = "threads",
        on_choice: Callable[[Choice], None] | None = None,
    ) -> None:
        used = used_ids(source, ids)
        checked_labels(source)
        self.cut = cut if train else cut.for_evaluation()
        self.batch_size = at_least(1, "batch_size", batch_size)
        self.start = at_least(0, "start", start)
        stop = None if stop is None else at_least(0, "stop", stop)
        self.stop = stop if train else min(len(used), len(used) if stop is None else stop)
        self.train = train
        self.shard = checked_shard(shard)
        index, count = self.shard
        self.share = (index * self.batch_size, count * self.batch_size)
        if share is not None:
            self.share = checked_share(share, self.batch_size)
        self.threads = default_threads(pin=pin) if threads is None else at_least(1, "threads", threads)
        self.depth = at_least(1, "depth", depth)
        self.on_bad = on_bad or _warn
        self.num_samples = len(used)
        self._check_stop()
        if keep_bytes is None:
            keep_bytes = min(MOST_KEPT_BYTES, facts.memory_bytes() // 8)
        self.place = checked_place(place)
        self._task = Task(
            source=source,
            num_images=len(source),
            ids=None if ids is None else used,
            cut=self.cut,
            train=train,
            seed=checked_seed(seed),
            blocks=blocks,
            batch_size=self.batch_size,
            start=self.start,
            stop=self.stop,
            share=self.share,
            threads=self.threads,
            depth=self.depth,
            keep_bytes=int(keep_bytes),
            read_ahead=read_ahead,
            ranks=ranks_here(launch, os.environ),
        )
        self._pin = pin
        self._on_choice = on_choice
        self._buffers = Buffers(self._task.shape, keep=max(self.depth, bundle.MOST) + 2, pinned=pin)
        self._filler = self._task.filler(self._buffers, None if device is None else Resident(device, self.cut))
        self._children: weakref.WeakSet[Child] = weakref.WeakSet()
        self._idle: list[Child] = []
        self._times_there: list[Times] = []
        self._met: set[int] = set()
        self._told_sharing = False
        self._times = Times()
        self._each = [Times() for _ in range(self.threads)]
        self._asked = Asked()
        self._streams: weakref.WeakSet[Stream[WorkerScratch, LoadedBatch]] = weakref.WeakSet()
        self._process = os.getpid()
        Image.init()  # Pillow finds its readers when first asked, and not safely from several threads

    def __len__(self) -> int:
        """Batches of one iteration; TypeError for a stream without end."""
        if self.stop is None:
            raise TypeError("a training feed without stop has no length")
        total = self._task.total
        assert total is not None
        return total

    def __iter__(self) -> Iterator[Batch]:
        self._leave_the_parents()
        for bad in list(self._filler.quarantine.met):  # in batches, perhaps, that were dropped with another iteration
            self.told(bad)
        total = self._task.total
        if self.place == "process":
            return _Batches(self, self.there(self.child(), 0))
        could_move = CAN_BE and facts.cores() > 1 and self.train and (total is None or total >= LEAST_BATCHES)
        return _Batches(self, moving(self) if self.place == "auto" and could_move else self.here(0))

    def stats(self) -> FeedTimes:
        """What has been done so far, over all iterations."""
        times = sum(self._times_there, start=self._times)
        depths = [stream.depth for stream in self._streams] + [child.depth for child in self._children]
        return FeedTimes(
            images=times.images,
            bytes=times.bytes,
            kept_bytes=self._kept_bytes,
            shared_bytes=self._shared_bytes,
            device_bytes=0 if self._filler.resident is None else self._filler.resident.bytes,
            read_seconds=times.read_seconds,
            decode_seconds=times.decode_seconds,
            augment_seconds=times.augment_seconds,
            batch_seconds=times.batch_seconds,
            blocked_seconds=times.blocked_seconds,
            cpu_seconds=times.cpu_seconds,
            threads=self.threads,
            asked=self._asked.results,
            starved=self._asked.starved,
            ready=self._asked.ready / max(1, self._asked.results),
            depth=max([self.depth, *depths]),
            by_loop=any(stream.is_made_here for stream in self._streams),
            per_thread=[of_thread(each) for each in self._each if each.images or each.blocked_seconds],
        )

    def doing(self) -> dict[str, str]:
        """What each of its threads is at, in words, by its name; of those of another process only that they are."""
        now, doing = time.perf_counter(), dict[str, str]()
        for stream in list(self._streams):
            for name, desk, since in stream.doing():
                at = "waits for room" if desk is None else f"has been at record {desk.record}"
                doing[name] = f"{at} for {now - since:.0f} s"
        for child in list(self._children):
            if child.is_alive:
                doing[f"process {child.pid}"] = "makes the batches"
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

    @property
    def _kept_bytes(self) -> int:
        return self._filler.kept.bytes + sum(child.kept_bytes for child in self._children)

    @property
    def _shared_bytes(self) -> int:
        here = self._filler.kept.bytes if self._filler.kept.is_shared else 0
        return here + sum(child.kept_bytes for child in self._children if child.is_shared)

    def close(self) -> None:
        """End every iteration and wait for its threads; closing twice is fine, and iterating again is as well."""
        for stream in list(self._streams):
            stream.close()
        for child in list(self._children):
            child.end()
        if self._task.ranks is not None and self._times_there:
            sweep()  # what a child had when it was killed
        self._idle.clear()
        self._buffers.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    # -- where the threads live: what feed.moving asks for -----------------------------------------------------------

    def here(self, number: int) -> Stream[WorkerScratch, LoadedBatch]:
        """The batches from ``number`` on, by threads of this process."""
        stream = self._task.after(number).stream(self._filler, self._times, each=self._each, asked=self._asked)
        self._streams.add(stream)
        return stream

    def child(self) -> Child:
        """A child process, one that is idle or a new one. Raises FeedError where there can be none."""
        if self._idle:
            return self._idle.pop()
        self._times_there.append(Times())
        child = Child(self._task, pin=self._pin, times=self._times_there[-1])
        self._children.add(child)
        return child

    def there(self, child: Child, number: int) -> Apart:
        """The batches from ``number`` on, by threads of a child."""
        task = self._task.after(number)
        return Apart(child, task, pin=self._pin, finished=self._idle.append, asked=self._asked)

    def is_steady(self) -> bool:
        """Whether all images are kept that are to be."""
        kept, resident = self._filler.kept, self._filler.resident
        return kept.given_up or (kept.full and (resident is None or resident.is_settled))

    def chosen(self, choice: Choice) -> None:
        """From now on, iterate so."""
        self.place = choice.place
        if choice.place == "process":
            self._filler = self._task.filler(self._buffers)  # what was kept is kept there
            self._buffers.clear()
        if self._on_choice is not None:
            self._on_choice(choice)

    def told(self, bad: BadImage) -> None:
        """A bad image was met, here or there."""
        if bad.id not in self._met:
            self._met.add(bad.id)
            self.on_bad(bad)

    def tell_sharing(self) -> None:
        """Warn once where images that were to be kept once for several processes are not."""
        if self._task.ranks is None or self._told_sharing or not self.keeps:
            return
        self._told_sharing = True
        if self._shared_bytes == 0:
            why = self._filler.kept.not_shared or "no room in /dev/shm"
            warnings.warn(
                f"decoded images are not shared with the other processes of this machine ({why}): each keeps its"
                " own copy; a larger /dev/shm (docker: --shm-size), or STEADYTRAIN_SHM=FOLDER in memory, would do",
                stacklevel=3,
            )

    def free(self) -> None:
        """Between two evaluations nobody needs their memory."""
        self._buffers.clear()

    def _leave_the_parents(self) -> None:
        """In a forked process: begin without what the other one's threads may have been at, locks and all."""
        if os.getpid() != self._process:
            self._process = os.getpid()
            self._filler = self._task.filler(self._buffers)
            self._streams, self._children, self._idle = weakref.WeakSet(), weakref.WeakSet(), []

    def _check_stop(self) -> None:
        if self.stop is None or not self.train:
            return
        span, step, shards = self.stop - self.start, self.share[1], self.share[1] // self.batch_size
        if span < 0 or span % step:
            fitting = self.start + -(-max(span, 0) // step) * step
            raise InputError(
                f"stop={self.stop} is {span} positions after start={self.start}, not a multiple of"
                f" batch_size={self.batch_size}{f' in each of {shards} shards' if shards > 1 else ''}: training batches"
                f" are always full; stop={fitting} would do"
            )


class _Batches(Iterator[Batch]):
    """One iteration."""

    def __init__(self, feed: ImageLoader, made: Iterator[LoadedBatch]) -> None:
        self._feed = feed
        self._made = made
        self._next: LoadedBatch | None = None  # while what is told of it may raise: it is not lost then

    def __next__(self) -> Batch:
        try:
            made = self._next = self._next or next(self._made)
        except StopIteration:
            self._feed.free()
            raise
        for bad in made.bad:
            self._feed.told(bad)
        self._feed.tell_sharing()
        self._next = None
        return made.batch


def default_threads(*, pin: bool) -> int:
    """Threads of a feed that is not told how many: all cores beside a GPU, half of them beside training on the CPU.

    On a CPU the network computes on every core, and the feed needs a small part of one: more threads would only take
    turns with it.
    """
    cores = facts.cores()
    return cores if pin else max(1, cores // 2)


def _warn(bad: BadImage) -> None:
    warnings.warn(
        f"record {bad.id} cannot be decoded ({bad.reason}); record {bad.instead} is used instead", stacklevel=3
    )
