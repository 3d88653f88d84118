"""Make batches: read, decode and crop samples into the batch's own memory.

A training image that cannot be read is replaced by the next sample of the data that can (in the data's order, starting
again after its end), cropped with the same draws: what stands at a position depends on the seed, the position and the
data alone, never on what other positions met. An evaluation replaces nothing and raises.

To plan a batch (its samples, their draws, their crops) takes a few dozen calls of numpy, however few images it has.
Small images that are cached and only shifted cost less than these calls, each of which takes the interpreter's lock
from the training loop. So several such batches are planned in one go, which costs as much as one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import numpy as np

from steadytrain.data.arrays import Floats, Ints, Pixels
from steadytrain.data.images.decode import BadImageError
from steadytrain.data.loader.batch import BadImage, Batch, LoadedBatch, Quarantine, batch_view
from steadytrain.data.loader.decode import Encoded, Scratch, cut_all, cut_into, pixels, probe
from steadytrain.data.loader.image_cache import (
    SURVEYED,
    CachedImages,
    DeviceCache,
    GatherScratch,
    ImageCache,
    ResidentBatch,
    gather,
    gather_shifted,
    shifts_of,
)
from steadytrain.data.loader.pipeline import BatchJob, BatchStream, RequestCounts, StageTimes
from steadytrain.data.loader.readahead import LocatedSource, Readahead
from steadytrain.data.loader.sampler import (
    BalancedOrder,
    BlockOrder,
    Draws,
    GlobalOrder,
    RepeatedOrder,
    alternating_flips,
)
from steadytrain.data.loader.task import BatchSpan, LoaderTask, encoded_image
from steadytrain.errors import DataError, FeedError, SteadyError

PIECE = 32  # samples that one thread takes at a time, at most
READ_BYTES = 4 * 2**20  # encoded bytes that one thread reads at a time, unless one image has more
MOST_BATCHES = 16  # batches made together, at most; with 8, a loop around a model that does nothing takes 10 % longer
MOST_BYTES = 2**20  # bytes of the images of batches made together: more would not stay in a core's cache


@dataclass(slots=True)
class WorkerScratch:
    """One thread's workspace."""

    times: StageTimes = field(default_factory=StageTimes)
    decoding: Scratch = field(default_factory=Scratch)
    gathering: GatherScratch = field(default_factory=GatherScratch)
    encoded: Scratch = field(default_factory=partial(Scratch, 2 * READ_BYTES))
    record: int = -1  # the one that the thread works at, for messages
    closed: threading.Event = field(default_factory=threading.Event)  # set when the loader is closed

    def begin_record(self, record: int) -> None:
        """Note the record that is worked at next. Raises FeedError where the loader was closed, to end the piece."""
        self.record = record
        if self.closed.is_set():
            raise FeedError("the data loader was closed")

    def copy(self, views: list[memoryview | BadImageError], size: int, since: float) -> EncodedImages:
        """Copy encoded images, ``size`` bytes in all, to the thread's own memory; reading began at ``since``.

        A mapped page may have to come from a disk first. numpy releases the interpreter's lock while it copies, so that
        stalls this thread alone; the seconds count as reading.
        """
        memory, ends, copies = self.encoded.take(size), [0], list[Pixels | BadImageError]()
        for view in views:
            start, end = ends[-1], ends[-1] + (0 if isinstance(view, BadImageError) else len(view))
            ends.append(end)
            if isinstance(view, BadImageError):
                copies.append(view)
                continue
            copies.append(memory[start:end])
            memory[start:end] = np.frombuffer(view, dtype=np.uint8)
        self.times.bytes += size
        self.times.read_seconds += time.perf_counter() - since
        return EncodedImages(memory, np.array(ends), copies)


class EncodedImages(NamedTuple):
    """Encoded images, copied to a thread's memory one behind the other, at the offsets ``at`` (int64[n + 1])."""

    memory: Pixels
    at: Ints
    images: list[Pixels | BadImageError]


class BatchWorker:
    """Makes batches of a task, each as a job of pieces for any threads; several streams may share one.

    Args:
        take_buffer: gives memory for the images of a batch, uint8[B, H, W, C], free again when the last view is gone.
        device_cache: the GPU's copy of the cached images; None: there is none.

    Raises:
        DataError: the data have changed.
    """

    def __init__(
        self, task: LoaderTask, take_buffer: Callable[[], Pixels], device_cache: DeviceCache | None = None
    ) -> None:
        if len(source := task.source) != task.num_images:
            raise DataError(
                f"the data has {len(source)} images now and had {task.num_images} when the loader was created: do not"
                " change data while it is in use"
            )
        self.task = task
        self.source = source
        self.ids = task.records
        n = len(self.ids)
        self.crop = task.largest_crop
        self._crops = {side: replace(self.crop, size=side) for _, side in task.stages} or {self.crop.size: self.crop}
        share = None if task.ranks is None else task.share_memory
        self.order: GlobalOrder | BlockOrder | RepeatedOrder | None = None
        if task.train:
            stop = None if task.end is None else -(-task.end // task.repeats)
            order: GlobalOrder | BlockOrder
            if task.balance:
                labels = source.labels if task.ids is None else source.labels[task.ids]
                order = BalancedOrder(np.asarray(labels, np.int64), task.seed, share, stop)
            elif task.blocks is not None:
                order = BlockOrder(n, task.seed, task.blocks)
            else:
                order = GlobalOrder(n, task.seed, share, stop)
            self.order = order if task.repeats == 1 else RepeatedOrder(order, task.repeats)
        self.draws = Draws(task.seed, self.crop.num_draws)
        self.take_buffer = take_buffer
        self.cache = ImageCache(n, task.cache_bytes, share, self._survey)
        self.device_cache = device_cache
        self.readahead: Readahead | None = None
        if task.read_ahead and isinstance(source, LocatedSource):
            self.readahead = Readahead(source, self.ids, self.order, stop=task.end, select_own=task.select_own)
        self.labels = source.labels
        self.quarantine = Quarantine(self.ids, replaces=task.train, describe=getattr(source, "describe", None))
        self._first: int | None = None  # the position at which the first stream began
        self._shifted: CachedImages | None = None

    def stream(
        self,
        times: StageTimes,
        *,
        requests: RequestCounts | None = None,
        holds: bool = False,
        numbers: list[int] | None = None,
    ) -> BatchStream[WorkerScratch, LoadedBatch]:
        """Start threads that make the batches of the task, in order.

        ``numbers``: make these batches instead. It has at least one; whoever appends another, at any time, calls
        :meth:`BatchStream.release` to have it made.
        """
        task, total = self.task, self.task.total if numbers is None else None

        def begin(number: int, room: int) -> BatchJob[WorkerScratch, LoadedBatch]:
            if numbers is not None:
                return self.job([task.span(numbers[number])])
            count = min(self.batches_per_job(task.batch_size), room if total is None else min(room, total - number))
            return self.job([task.span(number + k) for k in range(count)])

        return BatchStream(
            begin,
            WorkerScratch,
            total=total,
            threads=task.num_threads,
            depth=task.depth if numbers is None else len(numbers),
            times=times,
            requests=requests,
            holds=holds or numbers is not None,
        )

    def batches_per_job(self, n: int) -> int:
        """Return how many batches of ``n`` images to make together now: several small ones that need no decoding."""
        if self._shifted_images() is None or (self.device_cache is not None and not self.device_cache.is_settled):
            return 1
        if self._is_on_device:
            return MOST_BATCHES
        return max(1, min(MOST_BATCHES, MOST_BYTES // (n * self.crop.size**2 * self.crop.channels)))

    def job(self, spans: Sequence[BatchSpan]) -> BatchJob[WorkerScratch, LoadedBatch]:
        """Plan the batches at some spans of positions: one, or as many as :meth:`batches_per_job` allows."""
        [(first, n), *more] = spans
        if self._first is None:
            self._first = first
        # Each sample has been used once where a training stream is an epoch further, or an evaluation begins again.
        elif first == self._first if self.order is None else first >= self._first + len(self.ids) * self.task.repeats:
            self.cache.keep_any_size()
        cached = self._shifted_images()
        if cached is not None and (more or self._is_on_device):
            images = None if self._is_on_device else [self.take_buffer()[:count] for _, count in spans]
            loaded: list[LoadedBatch] = []
            piece = partial(self._gather_batches, spans, cached, images, loaded)
            return BatchJob([_naming_its_record(piece)], lambda: loaded, count=len(spans))
        labels = np.empty((n, *self.labels.shape[1:]), dtype=self.labels.dtype)
        ids, positions = np.empty(n, dtype=np.int64), np.arange(first, first + n)
        memory = batch_view(self.take_buffer(), n, self.task.side(first))
        batch = LoadedBatch(Batch(memory, labels, ids, positions), [])
        step = n if self.cache.full else max(1, min(PIECE, -(-n // self.task.num_threads)))
        pieces: list[Callable[[WorkerScratch], None]] = [
            _naming_its_record(partial(self._fill_rows, batch, slice(at, min(at + step, n))))
            for at in range(0, n, step)
        ]
        if self.readahead is not None and not self.cache.full:
            pieces.insert(0, partial(_timed, "read_seconds", partial(self.readahead.reach, first, first + n)))
        if self.device_cache is not None and not self.device_cache.is_settled and self.cache.full:
            pieces.insert(0, partial(_timed, "batch_seconds", partial(self.device_cache.load, self.cache)))
        return BatchJob(pieces, lambda: [batch])

    @property
    def _is_on_device(self) -> bool:
        return self.device_cache is not None and self.device_cache.source is not None

    def _shifted_images(self) -> CachedImages | None:
        """Return the cached images if a batch only shifts them, all are there, and each bad one has been reported."""
        if self._shifted is None and self.cache.full and not self.task.stages:
            cached = self.cache.images
            if cached is None or cached.pixels is None or not self.crop.only_shifts(*cached.pixels.shape[1:3]):
                return None
            if not cached.any_steps[0] or self.quarantine.samples.issuperset(np.flatnonzero(cached.steps).tolist()):
                self._shifted = cached
        return self._shifted

    def _gather_batches(
        self,
        spans: Sequence[BatchSpan],
        cached: CachedImages,
        images: list[Pixels] | None,
        loaded: list[LoadedBatch],
        scratch: WorkerScratch,
    ) -> None:
        """Make the batches of some spans: in ``images``, one array each; None: on the device, whose cache has them."""
        since = time.perf_counter()
        assert cached.pixels is not None
        first, end = spans[0][0], sum(spans[-1])
        positions_of = [np.arange(first, end)]
        if end - first != sum(n for _, n in spans):  # between two spans there is a gap
            positions_of = [np.arange(first, first + n) for first, n in spans]
        positions = np.concatenate(positions_of)
        samples = self.order.ids(positions) if self.order else positions
        draws = self._draws(positions_of, samples)
        samples = cached.replaced(samples)
        height, width = cached.pixels.shape[1:3]
        where = shifts_of(self.crop, height, width, samples, draws)
        ids = self.ids[samples]
        labels = self.labels[ids]
        scratch.times.images += len(positions)
        scratch.times.batch_seconds += time.perf_counter() - since
        start = 0
        for number, (_, n) in enumerate(spans):
            rows = slice(start, start + n)
            start += n
            facts = labels[rows], ids[rows], positions[rows]
            if images is None:
                assert self.device_cache is not None
                loaded.append(LoadedBatch(ResidentBatch(self.device_cache, where[rows], *facts), []))
                continue
            since = time.perf_counter()
            scratch.begin_record(int(ids[rows.start]))
            gather_shifted(images[number], cached.pixels, where[rows], self.crop, scratch.gathering)
            loaded.append(LoadedBatch(Batch(images[number], *facts), []))
            scratch.times.augment_seconds += time.perf_counter() - since

    def _fill_rows(self, loaded: LoadedBatch, rows: slice, scratch: WorkerScratch) -> None:
        """Make some rows of a batch: from cached images, or each decoded and cropped in one go."""
        since, batch = time.perf_counter(), loaded.batch
        positions, ids = batch.positions[rows], batch.ids[rows]
        samples = self.order.ids(positions) if self.order else positions
        draws = self._draws([positions], samples)
        ids[:] = self.ids[samples]
        scratch.times.batch_seconds += time.perf_counter() - since
        scratch.times.images += len(positions)
        cached = None if self.cache.given_up else self._fill_cache(samples, loaded.bad, scratch)
        if cached is not None:
            since = time.perf_counter()
            samples = cached.replaced(samples)
            ids[:] = self.ids[samples]
            crop = self._crops[batch.images.shape[1]]
            gather(batch.images[rows], cached, samples, crop, draws, scratch.gathering)
            scratch.times.augment_seconds += time.perf_counter() - since
        else:
            for part, encoded in self._read(samples, scratch):
                out = batch.images[rows][part]
                self._decode(out, ids[part], encoded, samples[part], draws[part], loaded.bad, scratch)
        batch.labels[rows] = self.labels[ids]

    def _draws(self, spans: list[Ints], samples: Ints) -> Floats:
        """Draw the random numbers of samples, float64[n, num_draws]; ``spans``: stretches of their positions."""
        draws = np.concatenate([self.draws.at(positions) for positions in spans])
        if self.crop.flip == "alternating":  # column 0 decides whether an image is mirrored
            draws[:, 0] = alternating_flips(self.task.seed, samples, np.concatenate(spans) // len(self.ids))
        return draws

    def _decode(
        self,
        out: Pixels,
        ids: Ints,
        encoded: EncodedImages,
        samples: Ints,
        draws: Floats,
        bad: list[BadImage],
        scratch: WorkerScratch,
    ) -> None:
        """Decode and crop encoded images into ``out``; write the ids of images that replace bad ones to ``ids``."""
        since, decoding, crop = time.perf_counter(), scratch.decoding, self._crops[out.shape[1]]
        heads: list[Encoded | BadImageError] = []
        for image, sample in zip(encoded.images, samples.tolist(), strict=True):
            scratch.record = int(self.ids[sample])
            try:
                heads.append(image if isinstance(image, BadImageError) else probe(image))
            except BadImageError as fault:
                heads.append(fault)
        sizes = np.array([(1, 1) if isinstance(head, BadImageError) else head.size for head in heads])
        plan = crop.plan(sizes, draws)
        scratch.begin_record(int(ids[0]))
        decoding.augment_seconds = 0.0
        done = cut_all(out, heads, encoded.memory, encoded.at, crop, plan, decoding)
        left = np.flatnonzero(~done).tolist()
        needed = crop.needed(plan).tolist() if left else []
        for row in left:
            head = heads[row]
            scratch.begin_record(int(ids[row]))
            try:
                if isinstance(head, BadImageError):
                    raise head
                cut_into(out[row], head, crop, plan, row, decoding, needed[row])
            except BadImageError as fault:
                if self.task.skip_bad:
                    out[row] = 0
                    number = int(ids[row])
                    bad.append(BadImage(number, str(fault), number, self.quarantine.describe(number)))
                    continue

                def use(other: int, row: int = row) -> None:
                    head = probe(self._bytes(other))
                    plan = crop.plan(np.array([head.size]), draws[row : row + 1])
                    cut_into(out[row], head, crop, plan, 0, decoding)

                ids[row] = self.ids[self.quarantine.replace(int(samples[row]), fault, use, bad)]
        scratch.times.augment_seconds += decoding.augment_seconds
        scratch.times.decode_seconds += time.perf_counter() - since - decoding.augment_seconds

    def _fill_cache(self, samples: Ints, bad: list[BadImage], scratch: WorkerScratch) -> CachedImages | None:
        """Decode those of the samples that are not cached yet; return None where the batch has to decode for itself."""
        since, reading = time.perf_counter(), scratch.times.read_seconds
        missing = self.cache.missing(samples, self.quarantine.samples).tolist()
        for sample in missing:
            scratch.begin_record(int(self.ids[sample]))
            try:
                self._cache_image(scratch, sample)
            except BadImageError as fault:
                other = self.quarantine.replace(sample, fault, partial(self._cache_image, scratch), bad)
                self.cache.replace(sample, by=other)
            if self.cache.given_up:
                return None
        if missing:
            reading = scratch.times.read_seconds - reading
            scratch.times.decode_seconds += time.perf_counter() - since - reading
        cached = self.cache.images  # it may be another one by now, begun while these were put into the first
        return cached if cached is not None and cached.filled[samples].all() else None

    def _cache_image(self, scratch: WorkerScratch, sample: int) -> None:
        """Decode a sample into the cache, unless it is there. Raises BadImageError."""
        if self.cache.given_up or self.cache.has(sample):
            return
        since, before = time.perf_counter(), scratch.times.bytes
        view = self._bytes(sample)
        [data] = scratch.copy([view], len(view), since).images
        head = probe(data)
        if not self._is_exact(head):
            self.cache.give_up()
            scratch.times.bytes = before  # it will be read again
        elif self.cache.room_for((*head.size, self.crop.channels)):
            self.cache.put(sample, pixels(head, self.crop.channels, scratch.decoding))

    def _survey(self) -> Ints | None:
        """Read heights and widths of images spread over the data, int64[k, 2]; None where one cannot be cached."""
        heads, samples = [], np.unique(np.linspace(0, len(self.ids) - 1, SURVEYED, dtype=np.int64))
        if self.readahead is not None:
            self.readahead.source.settle(self.ids[samples])  # together, where they come from far away
        for sample in samples.tolist():
            with suppress(BadImageError):
                heads.append(probe(self._bytes(sample)))
        return np.array([head.size for head in heads]).reshape(-1, 2) if all(map(self._is_exact, heads)) else None

    def _is_exact(self, head: Encoded) -> bool:
        """Return whether decoding a whole image gives the same bytes as decoding it for a square."""
        return head.head is None or self._crops[min(self._crops)].never_shrinks(*head.size)

    def _bytes(self, sample: int) -> memoryview:
        """Return a view of a sample's encoded bytes; errors as of :func:`encoded_image`."""
        return encoded_image(self.source, int(self.ids[sample]), self.quarantine.describe)

    def _read(self, samples: Ints, scratch: WorkerScratch) -> Iterator[tuple[slice, EncodedImages]]:
        """Copy the samples' bytes to memory of this thread, as many at a time as :data:`READ_BYTES` allows."""
        start, size, views, since = 0, 0, list[memoryview | BadImageError](), time.perf_counter()
        if self.readahead is not None:
            self.readahead.again(samples)
        for at, sample in enumerate(samples.tolist()):
            scratch.begin_record(int(self.ids[sample]))
            try:
                view: memoryview | BadImageError = self._bytes(sample)
            except BadImageError as fault:
                view = fault
            more = 0 if isinstance(view, BadImageError) else len(view)
            if views and size + more > READ_BYTES:
                yield slice(start, at), scratch.copy(views, size, since)
                start, size, views, since = at, 0, [], time.perf_counter()
            views.append(view)
            size += more
        yield slice(start, len(samples)), scratch.copy(views, size, since)


def _timed(stage: str, do: Callable[[], None], scratch: WorkerScratch) -> None:
    """Do something, whose seconds count as those of a stage."""
    since = time.perf_counter()
    do()
    setattr(scratch.times, stage, getattr(scratch.times, stage) + time.perf_counter() - since)


def _naming_its_record(piece: Callable[[WorkerScratch], None]) -> Callable[[WorkerScratch], None]:
    """Wrap a piece so that an unexpected error names the record that it was working at."""

    def run(scratch: WorkerScratch) -> None:
        try:
            piece(scratch)
        except SteadyError:
            raise
        except Exception as error:
            place = f"record {scratch.record}: {type(error).__name__}: {error}"
            raise FeedError(f"the data loader failed at {place}") from error

    return run
