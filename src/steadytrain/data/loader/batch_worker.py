"""Makes the samples of a batch: reads, decodes and cuts them into the batch's own memory.

A training image that cannot be read is replaced by the next sample of the data that can (in the data's order, starting
again after its end), cut with the same draws: what stands at a position depends on the seed, the position and the data
alone, never on what other positions met. An evaluation replaces nothing and raises.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from steadytrain.data.loader import bundle
from steadytrain.data.loader.batch import Batch, Memory
from steadytrain.data.loader.block_shuffle import BlockOrder
from steadytrain.data.loader.bundle import Planned, Span, planned
from steadytrain.data.loader.crop import NEVER_SHRUNK, Crop
from steadytrain.data.loader.decode import Encoded, cut_all, cut_into, pixels, probe
from steadytrain.data.loader.device_cache import Resident, ResidentBatch
from steadytrain.data.loader.gather import gather, gather_spots
from steadytrain.data.loader.image_cache import SURVEYED, Kept, Loose, Store
from steadytrain.data.loader.job import Job
from steadytrain.data.loader.jpeg import Pixels
from steadytrain.data.loader.quarantine import BadImage, Quarantine
from steadytrain.data.loader.readahead import Ahead
from steadytrain.data.loader.sampler import Draws, Floats, Ints, Order
from steadytrain.data.loader.worker_scratch import READ_BYTES, Raw, WorkerScratch, copied
from steadytrain.data.packing.pixels import BadImageError
from steadytrain.errors import DataError, FeedError, SteadyError

PIECE = 32  # samples that one thread takes at a time, at most


class Source(Protocol):
    """Encoded images and their labels, by number: what a feed needs of a data set (``Records`` is one)."""

    def __len__(self) -> int: ...

    @property
    def labels(self) -> NDArray[np.int64] | NDArray[np.float32]:
        """int64[N] or float32[N, L]."""

    def image(self, number: int, /) -> Any:
        """The encoded bytes of one image, bytes-like. Called from several threads."""


@dataclass(frozen=True, eq=False)
class LoadedBatch:
    """A batch, and the bad images met in making it."""

    batch: Batch
    bad: list[BadImage]


@dataclass(slots=True, eq=False)
class BatchBuffer:
    """A batch in the making: images uint8[n, S, S, C], ids int64[n] and positions int64[n]."""

    images: Pixels
    ids: Ints
    positions: Ints
    bad: list[BadImage] = field(default_factory=list)


class BatchWorker:
    """Makes batches of one data set, each as a job of pieces.

    Args:
        source: where the images come from.
        ids: int64[n], the records to use; samples are numbered 0 to n - 1 in this order.
        cut: how; what it has of randomness is drawn from ``seed`` and the position.
        order: of training; None: evaluation, in the order of ``ids``.
        seed: of the draws.
        buffers: for the images of a batch.
        kept: the decoded images.
        threads: among which a batch is divided.
        ahead: what reads ahead; None: nothing does.
        resident: where kept images are put besides; None: nowhere.
    """

    def __init__(
        self,
        source: Source,
        ids: Ints,
        cut: Crop,
        order: Order | BlockOrder | None,
        *,
        seed: int,
        buffers: Memory,
        kept: Kept,
        threads: int,
        ahead: Ahead | None = None,
        resident: Resident | None = None,
    ) -> None:
        self.source = source
        self.ids = ids
        self.cut = cut
        self.order = order
        self.draws = Draws(seed, cut.num_draws)
        self.buffers = buffers
        self.kept = kept
        self.kept.survey = self._survey
        self._began: int | None = None
        self.threads = threads
        self.ahead = ahead
        self.resident = resident
        self.labels = source.labels
        self._one_at_a_time = threading.Lock()
        self.quarantine = Quarantine(ids, replaces=order is not None, name=getattr(source, "name", None))

    def together(self, n: int) -> int:
        """How many batches of ``n`` images one job may make now: several, where they are small and need no decoding."""
        if self.resident is not None and not self.resident.is_settled:
            return 1
        if self._moved is None:
            return 1
        if self._is_resident:
            return bundle.MOST
        return max(1, min(bundle.MOST, bundle.MOST_BYTES // (n * self.cut.size**2 * self.cut.channels)))

    def job(self, spans: Sequence[Span]) -> Job[WorkerScratch, LoadedBatch]:
        """The batches at some spans of positions: one, or as many as may be made :meth:`together`."""
        [(first, n), *more] = spans
        if self._is_second_pass(first):
            self.kept.try_any()
        made: list[LoadedBatch] = []
        if self._is_resident and self._moved is not None:
            return Job([partial(self._fill, partial(self._place, spans, made))], lambda: made, count=len(spans))
        if more:
            images = [self.buffers.take()[:n] for _, n in spans]
            copy = partial(self._copy_several, spans, images, made)
            return Job([partial(self._fill, copy)], lambda: made, count=len(spans))
        sheet = BatchBuffer(self.buffers.take()[:n], np.empty(n, dtype=np.int64), np.arange(first, first + n))
        step = n if self.kept.full else max(1, min(PIECE, -(-n // self.threads)))
        pieces: list[Callable[[WorkerScratch], None]] = [
            partial(self._fill, partial(self._fill_rows, sheet, slice(at, min(at + step, n))))
            for at in range(0, n, step)
        ]
        if self.ahead is not None and not self.kept.full:
            pieces.insert(0, partial(self._reach, self.ahead, first, first + n))
        if self.resident is not None and (store := self.resident.wants(self.kept)) is not None:
            pieces.insert(0, partial(self._load, self.resident, store))
        return Job(pieces, partial(self._finish, sheet))

    def _is_second_pass(self, first: int) -> bool:
        """Whether all samples have been had: a stream has come so far, or an evaluation begins again."""
        if self._began is None:
            self._began = first
            return False
        return first >= self._began + len(self.ids) if self.order is not None else first == self._began

    def _reach(self, ahead: Ahead, first: int, end: int, desk: WorkerScratch) -> None:
        since = time.perf_counter()
        ahead.reach(first, end)
        desk.times.read_seconds += time.perf_counter() - since

    def _load(self, resident: Resident, store: Store, desk: WorkerScratch) -> None:
        since = time.perf_counter()
        resident.load(store)
        desk.times.batch_seconds += time.perf_counter() - since

    @property
    def _is_resident(self) -> bool:
        """Whether the images are on their device."""
        return self.resident is not None and self.resident.store is not None

    @property
    def _moved(self) -> Store | None:
        """The kept images, where they are all there, are only moved, and none of them is bad and not yet told."""
        store = self.kept.store if self.kept.full else None
        if not isinstance(store, Store) or not self.cut.only_shifts(*store.pixels.shape[1:3]):
            return None
        is_told = not store.any_steps[0] or self.quarantine.samples.issuperset(np.flatnonzero(store.steps).tolist())
        return store if is_told else None

    def _plan(self, spans: Sequence[Span], desk: WorkerScratch) -> list[Planned]:
        since, store = time.perf_counter(), self._moved
        assert store is not None
        plans = planned(
            spans, store, cut=self.cut, order=self.order, draws=self.draws, ids=self.ids, labels=self.labels
        )
        desk.times.images += sum(n for _, n in spans)
        desk.times.batch_seconds += time.perf_counter() - since
        return plans

    def _place(self, spans: Sequence[Span], made: list[LoadedBatch], desk: WorkerScratch) -> None:
        """Batches of images that are on their device already."""
        resident = self.resident
        assert resident is not None
        for plan in self._plan(spans, desk):
            made.append(LoadedBatch(ResidentBatch(resident, plan.where, plan.labels, plan.ids, plan.positions), []))

    def _copy_several(
        self, spans: Sequence[Span], images: list[Pixels], made: list[LoadedBatch], desk: WorkerScratch
    ) -> None:
        """Batches of kept images that are only moved."""
        store = self._moved
        assert store is not None
        for plan in self._plan(spans, desk):
            since, out = time.perf_counter(), images.pop(0)
            desk.turn_to(int(plan.ids[0]))
            gather_spots(out, store.pixels, plan.where, self.cut, desk.canvas)
            made.append(LoadedBatch(Batch(out, plan.labels, plan.ids, plan.positions), []))
            desk.times.augment_seconds += time.perf_counter() - since

    def _finish(self, sheet: BatchBuffer) -> list[LoadedBatch]:
        batch = Batch(sheet.images, self.labels[sheet.ids], sheet.ids, sheet.positions)
        return [LoadedBatch(batch, sheet.bad)]

    def _fill(self, fill: Callable[[WorkerScratch], None], desk: WorkerScratch) -> None:
        """Make some samples of a batch; what goes wrong names the record."""
        try:
            fill(desk)
        except SteadyError:
            raise
        except Exception as error:
            what = f"record {desk.record}: {type(error).__name__}: {error}"
            raise FeedError(f"the feed failed at {what}; a thread could not go on") from error

    def _fill_rows(self, sheet: BatchBuffer, rows: slice, desk: WorkerScratch) -> None:
        since = time.perf_counter()
        positions = sheet.positions[rows]
        samples = self.order.ids(positions) if self.order else positions
        draws = self.draws.at(positions)
        sheet.ids[rows] = self.ids[samples]
        desk.times.batch_seconds += time.perf_counter() - since
        desk.times.images += len(positions)
        store = None if self.kept.given_up else self._keep(samples, sheet, desk)
        if store is None:
            self._fill_decoded(sheet, rows, samples, draws, desk)
            return
        samples = store.used(samples)
        sheet.ids[rows] = self.ids[samples]
        since = time.perf_counter()
        gather(sheet.images[rows], store, samples, self.cut, draws, desk.canvas)
        desk.times.augment_seconds += time.perf_counter() - since

    def _fill_decoded(self, sheet: BatchBuffer, rows: slice, samples: Ints, draws: Floats, desk: WorkerScratch) -> None:
        """Each image decoded and cut in one go."""
        scratch = desk.scratch
        for some, raw in self._read(samples, desk):
            since = time.perf_counter()
            encoded = [_probe(image) for image in raw.images]
            sizes = np.array([(1, 1) if isinstance(e, BadImageError) else e.size for e in encoded])
            plan = self.cut.plan(sizes, draws[some])
            first = rows.start + some.start
            desk.turn_to(int(sheet.ids[first]))
            scratch.augment_seconds = 0.0
            out = sheet.images[first : first + len(encoded)]
            made = cut_all(out, encoded, raw.memory, raw.at, self.cut, plan, scratch)
            left = np.flatnonzero(~made).tolist()
            needed = self.cut.needed(plan).tolist() if left else []
            for row in left:
                image, at = encoded[row], first + row
                desk.turn_to(int(sheet.ids[at]))
                try:
                    if isinstance(image, BadImageError):
                        raise image
                    cut_into(sheet.images[at], image, self.cut, plan, row, scratch, needed[row])
                except BadImageError as fault:
                    cut_one = partial(self._cut_one, sheet.images[at], draws[some][row : row + 1], desk)
                    sample = int(samples[some][row])
                    sheet.ids[at] = self.ids[self.quarantine.replace(sample, fault, cut_one, sheet.bad)]
            desk.times.augment_seconds += scratch.augment_seconds
            desk.times.decode_seconds += time.perf_counter() - since - scratch.augment_seconds

    def _cut_one(self, out: Pixels, draws: Floats, desk: WorkerScratch, sample: int) -> None:
        """Cut another sample in place of one that is bad. Raises BadImageError."""
        encoded = probe(self._bytes(sample))
        plan = self.cut.plan(np.array([encoded.size]), draws)
        cut_into(out, encoded, self.cut, plan, 0, desk.scratch)

    def _keep(self, samples: Ints, sheet: BatchBuffer, desk: WorkerScratch) -> Store | Loose | None:
        """Decode those of the samples that are not kept yet; None where images of this data are not to be kept."""
        store = self.kept.store
        missing = self.kept.missing(samples, self.quarantine.samples)
        if store is not None and len(missing) == 0:
            return store
        desk.turn_to(int(self.ids[missing[0]]))
        # Several threads would only take the interpreter's lock from each other, and be slower than one.
        with self._one_at_a_time if self._takes_turns(int(missing[0])) else nullcontext():
            since, before, reading = time.perf_counter(), desk.times.bytes, desk.times.read_seconds
            for sample in missing.tolist():
                desk.turn_to(int(self.ids[sample]))
                try:
                    self._keep_one(desk, sample)
                except BadImageError as fault:
                    other = self.quarantine.replace(sample, fault, partial(self._keep_one, desk), sheet.bad)
                    self.kept.replace(sample, by=other)
                if self.kept.given_up:
                    return None
            if desk.times.bytes > before:  # else another thread has done it meanwhile
                reading = desk.times.read_seconds - reading
                desk.times.decode_seconds += time.perf_counter() - since - reading
        store = self.kept.store  # it may be another one by now, begun while these were put into the first
        return store if store is not None and store.filled[samples].all() else None

    def _survey(self) -> Ints | None:
        """Heights and widths of images spread over the data, int64[k, 2]; None where one of them cannot be kept."""
        found = []
        for sample in np.unique(np.linspace(0, len(self.ids) - 1, SURVEYED, dtype=np.int64)).tolist():
            with suppress(BadImageError):
                found.append(probe(self._bytes(sample)))
        return np.array([one.size for one in found]).reshape(-1, 2) if all(map(self._is_exact, found)) else None

    def _is_exact(self, encoded: Encoded) -> bool:
        """Whether an image that is decoded as a whole gives the same bytes as one that is decoded for a square."""
        return encoded.head is None or self.cut.never_shrinks(*encoded.size)

    def _takes_turns(self, sample: int) -> bool:
        """Whether decoding is mostly the interpreter's work: of a small image, through Pillow."""
        try:
            encoded = probe(self._bytes(sample))
        except BadImageError:
            return True
        return encoded.head is None and max(encoded.size) <= NEVER_SHRUNK

    def _keep_one(self, desk: WorkerScratch, sample: int) -> None:
        """Decode a sample into the kept ones, unless it is there. Raises BadImageError."""
        if self.kept.given_up or self.kept.has(sample):
            return
        since, before = time.perf_counter(), desk.times.bytes
        view = self._bytes(sample)
        [data] = copied([view], len(view), desk, since).images
        encoded = probe(data)
        if not self._is_exact(encoded):
            self.kept.give_up()
            desk.times.bytes = before  # it will be read again
        elif self.kept.room_for((*encoded.size, self.cut.channels)):
            self.kept.put(sample, pixels(encoded, self.cut.channels, desk.scratch))

    # -- reading ------------------------------------------------------------------------------------------------

    def _bytes(self, sample: int) -> memoryview:
        """A view of a sample's encoded bytes. Raises BadImageError where the record is damaged."""
        try:
            return memoryview(self.source.image(int(self.ids[sample]))).cast("B")
        except (DataError, OSError) as error:
            raise BadImageError(str(error)) from error

    def _read(self, samples: Ints, desk: WorkerScratch) -> Iterator[tuple[slice, Raw]]:
        """The samples' bytes in memory of this thread, as many samples at a time as :data:`READ_BYTES` allows."""
        start, size, views, since = 0, 0, list[memoryview | BadImageError](), time.perf_counter()
        if self.ahead is not None:
            self.ahead.again(samples)
        for at, sample in enumerate(samples.tolist()):
            desk.turn_to(int(self.ids[sample]))
            try:
                view: memoryview | BadImageError = self._bytes(sample)
            except BadImageError as fault:
                view = fault
            more = 0 if isinstance(view, BadImageError) else len(view)
            if views and size + more > READ_BYTES:
                yield slice(start, at), copied(views, size, desk, since)
                start, size, views, since = at, 0, [], time.perf_counter()
            views.append(view)
            size += more
        yield slice(start, len(samples)), copied(views, size, desk, since)


def _probe(data: Pixels | BadImageError) -> Encoded | BadImageError:
    if isinstance(data, BadImageError):
        return data
    try:
        return probe(data)
    except BadImageError as fault:
        return fault
