"""What a feed is to do, as plain data that another process can be given."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from steadytrain.data.loader.batch import Memory
from steadytrain.data.loader.batch_worker import BatchWorker, LoadedBatch, Source
from steadytrain.data.loader.block_shuffle import BlockOrder, BlockShuffle
from steadytrain.data.loader.crop import Crop
from steadytrain.data.loader.device_cache import Resident
from steadytrain.data.loader.image_cache import Kept
from steadytrain.data.loader.job import Job
from steadytrain.data.loader.pipeline import Stream
from steadytrain.data.loader.rank_cache import Common, Ranks
from steadytrain.data.loader.readahead import read_ahead_of
from steadytrain.data.loader.sampler import Ints, Order
from steadytrain.data.loader.times import Asked, Times
from steadytrain.data.loader.worker_scratch import WorkerScratch
from steadytrain.errors import DataError

FINGERPRINTED = 64  # images that tell data from other data


@dataclass(frozen=True, kw_only=True, eq=False)
class Task:
    """The batches of a feed: the same wherever they are made.

    Args:
        source: encoded images and labels; pickled where another process is to open it for itself.
        num_images: in the source.
        ids: int64[n], the records to use; None: all.
        cut: as it is used, that of an evaluation for an evaluation.
        train: training, or evaluation.
        seed, blocks, batch_size, start, stop, threads, depth, keep_bytes, read_ahead: as in
            :class:`~steadytrain.data.loader.image_loader.ImageLoader`.
        share: of each so many positions (the second number) a batch is made from this one on (the first).
        ranks: the processes that keep one copy of the images; None: this one alone.
    """

    source: Source
    num_images: int
    ids: Ints | None
    cut: Crop
    train: bool
    seed: int
    blocks: BlockShuffle | None
    batch_size: int
    start: int
    stop: int | None
    share: tuple[int, int]
    threads: int
    depth: int
    keep_bytes: int
    read_ahead: bool
    ranks: Ranks | None = None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Of the images of a batch."""
        return (self.batch_size, self.cut.size, self.cut.size, self.cut.channels)

    @property
    def total(self) -> int | None:
        """Batches; None: without end."""
        if self.stop is None:
            return None
        offset, stride = self.share
        return -(-max(0, self.stop - self.start - offset) // stride)

    def span(self, number: int) -> tuple[int, int]:
        """The first position of batch ``number``, and how many there are."""
        offset, stride = self.share
        first = self.start + number * stride + offset
        return first, self.batch_size if self.stop is None else min(self.batch_size, self.stop - first)

    def after(self, number: int) -> Task:
        """What is left of it when so many batches were made."""
        return replace(self, start=self.start + number * self.share[1])

    def own(self, positions: Ints) -> Ints:
        """Those of some positions that are made."""
        offset, stride = self.share
        place = (positions - self.start) % stride - offset
        own: Ints = positions[(positions >= self.start) & (place >= 0) & (place < self.batch_size)]
        return own

    def filler(self, buffers: Memory, resident: Resident | None = None) -> BatchWorker:
        """Makes the batches in such memory, by any number of streams; kept images are put on a device as well.

        Raises:
            DataError: the data have changed.
        """
        if len(self.source) != self.num_images:
            raise DataError(f"the data have {len(self.source)} images now, and had {self.num_images}: do not change it")
        used = np.arange(self.num_images) if self.ids is None else self.ids
        order = self._order(len(used)) if self.train else None
        ahead = read_ahead_of(self.source, used, order, stop=self.stop, own=self.own) if self.read_ahead else None
        return BatchWorker(
            self.source,
            used,
            self.cut,
            order,
            ahead=ahead,
            seed=self.seed,
            buffers=buffers,
            kept=Kept(len(used), self.keep_bytes, None if self.ranks is None else partial(self._common, self.ranks)),
            threads=self.threads,
            resident=resident,
        )

    def stream(
        self,
        filler: BatchWorker,
        times: Times,
        *,
        each: Sequence[Times] = (),
        asked: Asked | None = None,
        holds: bool = False,
    ) -> Stream[WorkerScratch, LoadedBatch]:
        """Threads that make them, in order."""

        def begin(number: int, count: int) -> Job[WorkerScratch, LoadedBatch]:
            return filler.job([self.span(number + k) for k in range(count)])

        return Stream(
            begin,
            WorkerScratch,
            total=self.total,
            threads=self.threads,
            depth=self.depth,
            times=times,
            each=each,
            asked=asked,
            holds=holds,
            together=lambda: filler.together(self.batch_size),
        )

    def _common(self, ranks: Ranks, kept: str, size: int, least: int) -> Common:
        """Memory for decoded images that is common to all whose feeds have the same samples. Raises OSError."""
        told = (kept, self.cut.channels, self.train, self.num_images, _fingerprint(self.source))
        ids = b"" if self.ids is None else self.ids.tobytes()
        return Common(ranks, hashlib.sha256(repr(told).encode() + ids).hexdigest(), size, least)

    def _order(self, n: int) -> Order | BlockOrder:
        return Order(n, self.seed) if self.blocks is None else BlockOrder(n, self.seed, self.blocks)


def _fingerprint(source: Source) -> str:
    """What tells data from other data: their own digest, or that of their labels and of some of the images."""
    digest = getattr(source, "digest", None)
    if isinstance(digest, str):
        return digest
    told = hashlib.sha256(source.labels.tobytes())
    for number in np.unique(np.linspace(0, len(source) - 1, FINGERPRINTED, dtype=np.int64)).tolist():
        with suppress(DataError, OSError):
            told.update(source.image(number))
    return told.hexdigest()
