"""The settings of a loader: one record, checked, from which another process makes the same batches."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from steadytrain.data.arrays import EveryRecord, Ints
from steadytrain.data.images.decode import BadImageError
from steadytrain.data.loader.crop import Crop
from steadytrain.data.loader.rank_cache import LocalRanks, RankMemory, find_local_ranks
from steadytrain.data.loader.sampler import BlockShuffle
from steadytrain.data.storage.local_files import is_of_the_system, read_patiently
from steadytrain.errors import DataError, InputError
from steadytrain.machine import facts

FINGERPRINTED = 64  # images that tell data from other data
MOST_KEPT_BYTES = 2 * 2**30
MOST_THREADS = 10
"""Default for a GPU: more threads wait for the interpreter's lock. Training crops of packed photographs, 16 cores,
beside an H100: 4 threads 9,542 images/s, 8 14,846, 10 14,716, 12 12,376, 16 12,139 (results/gpu_session.json)."""

BatchSpan = tuple[int, int]
"""The first position of a batch, and how many there are."""


class Source(Protocol):
    """Encoded images and their labels, by number: what a loader needs of a data set (``Records`` is one)."""

    def __len__(self) -> int: ...

    @property
    def labels(self) -> NDArray[np.int64] | NDArray[np.float32]:
        """int64[N] or float32[N, L]."""

    def image(self, number: int, /) -> Any:
        """Return the encoded bytes of one image, bytes-like. Called from several threads."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LoaderTask:
    """The batches that a loader makes, as plain data for another process: the same ones wherever they are made.

    Raises DataError where there are no images, or ``ids`` are not in the data.

    Args:
        source: encoded images and labels, such as ``Records``; pickled where another process is to open it for itself.
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
        depth: most batches in progress or in the queue; small batches that need no decoding are made several at a time.
        pin: allocate batches in page-locked memory, for asynchronous copies to a GPU (needs torch and a GPU).
        keep_bytes: most bytes of decoded images to cache; None: an eighth of the memory, at most 2 GiB; 0: no cache.
        launch: name shared by processes on this machine that load the same data: they share one cache, and
            ``keep_bytes`` is for all of them. None: the launch of torchrun or MPI, if any; empty: no sharing (see
            :mod:`~steadytrain.data.loader.rank_cache`).
        skip_bad: in evaluation, an image that cannot be decoded is black, and named before its batch comes; else it
            raises. Decoded images are not cached then.
        blocks: shuffle by blocks, for disks that are slow to seek; None: a global shuffle.
        balance: in training, all classes are equally frequent (see
            :class:`~steadytrain.data.loader.sampler.BalancedOrder`); not together with ``blocks``.
        repeats: in training, each sample stands so many times in a row, each time cropped anew (see
            :class:`~steadytrain.data.loader.sampler.RepeatedOrder`); not together with alternating flips.
        sizes: pairs of a position, at which a batch begins, and a side in pixels: from there on, squares have this side
            instead of the crop's, in training.
        shard: ``(i, n)``: deliver every n-th batch of the stream, beginning with the i-th.
        share: ``(first, of)``: make one batch of every ``of`` positions, beginning at the ``first`` of them: a part of
            a larger batch, for processes with batches of different size. None: use ``shard``.
        read_ahead: ask for coming bytes before they are needed (see :mod:`~steadytrain.data.loader.readahead`).
    """

    source: Source
    crop: Crop
    batch_size: int
    seed: int = 0
    ids: Ints | None = None
    start: int = 0
    stop: int | None = None
    train: bool = True
    threads: int | None = None
    depth: int = 4
    pin: bool = False
    keep_bytes: int | None = None
    launch: str | None = None
    skip_bad: bool = False
    blocks: BlockShuffle | None = None
    balance: bool = False
    repeats: int = 1
    sizes: Sequence[tuple[int, int]] = ()
    shard: tuple[int, int] = (0, 1)
    share: tuple[int, int] | None = None
    read_ahead: bool = True
    num_images: int = field(init=False)
    """Images of the source."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_images", len(self.source))
        _check_ids(self.num_images, self.ids)
        if self.ids is not None:
            object.__setattr__(self, "ids", np.array(self.ids, np.int64))  # the caller's own may change

    def check(self) -> None:
        """Refuse what cannot be loaded.

        Raises:
            InputError: a number is out of range.
            DataError: the labels are not an array of labels.
        """
        _check_labels(self.source)
        for least, name in ((0, "seed"), (0, "start"), (1, "batch_size"), (1, "depth"), (1, "repeats"), (1, "threads")):
            value = getattr(self, name)
            at_least(least, name, least if value is None else value)
        assert not (self.skip_bad and self.train), "training replaces what it cannot decode"
        if self.balance and (self.blocks is not None or self.source.labels.ndim > 1):
            raise InputError("balance=True needs one class for each image, and no shuffle by blocks")
        if self.repeats > 1 and self.crop.flip == "alternating":
            raise InputError(f"repeats={self.repeats} and alternating flips exclude each other: these count passes")
        index, count = self.shard
        if not 0 <= index < count:
            raise InputError(f"shard={self.shard}: give (i, n) with i from 0 to n - 1")
        if self.share is not None:
            first, of = at_least(0, "share", self.share[0]), at_least(1, "share", self.share[1])
            if first + self.batch_size > of:
                raise InputError(
                    f"share={self.share}: a batch of {self.batch_size} starting at {first} does not fit into {of}"
                )
        for at, side in self.sizes:
            at_least(1, "sizes", side)
            if at_least(0, "sizes", at) > self.start and (at - self.start) % self.stride[1]:
                raise InputError(f"sizes have position {at}, where no batch of start={self.start} begins")
        if self.stop is not None:
            self._check_stop(at_least(0, "stop", self.stop))

    def _check_stop(self, stop: int) -> None:
        span, step = stop - self.start, self.stride[1]
        shards = step // self.batch_size
        if self.train and (span < 0 or span % step):
            fitting = self.start + -(-max(span, 0) // step) * step
            raise InputError(
                f"stop={stop} is {span} positions after start={self.start}, not a multiple of"
                f" batch_size={self.batch_size}{f' in each of {shards} shards' if shards > 1 else ''}: training batches"
                f" are always full, so use stop={fitting}"
            )

    @cached_property
    def records(self) -> Ints | EveryRecord:
        """The records to use, int64[n]."""
        return EveryRecord(self.num_images) if self.ids is None else self.ids

    @cached_property
    def num_threads(self) -> int:
        """The number of threads."""
        return default_threads(pin=self.pin) if self.threads is None else self.threads

    @cached_property
    def cache_bytes(self) -> int:
        """Bytes of decoded images that may be cached."""
        if self.skip_bad:
            return 0
        return min(MOST_KEPT_BYTES, facts.memory_bytes() // 8) if self.keep_bytes is None else self.keep_bytes

    @cached_property
    def ranks(self) -> LocalRanks | None:
        """The ranks that keep one copy of the images; None: this process alone."""
        return find_local_ranks(self.launch, os.environ)

    @cached_property
    def stride(self) -> tuple[int, int]:
        """First position of a batch, and how many positions lie between two batches."""
        index, count = self.shard
        return (index * self.batch_size, count * self.batch_size) if self.share is None else self.share

    @cached_property
    def end(self) -> int | None:
        """The position that the batches end before; None: without end."""
        n = len(self.records)
        return self.stop if self.train else min(n, n if self.stop is None else self.stop)

    @cached_property
    def stages(self) -> tuple[tuple[int, int], ...]:
        """Positions, and the sides of squares from there on, in pixels; empty: all have that of the crop."""
        if not self.sizes or not self.train:
            return ()
        stages = sorted([(-1, self.crop.size), *self.sizes])
        reached = [stage for stage in stages if stage[0] <= self.start][-1]
        return reached, *(stage for stage in stages if stage[0] > self.start)

    @cached_property
    def largest_crop(self) -> Crop:
        """The crop as it is used, that of an evaluation for an evaluation; of the largest side."""
        if not self.train:
            return self.crop.for_evaluation()
        return replace(self.crop, size=max(side for _, side in self.stages)) if self.stages else self.crop

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The shape of a batch's images."""
        crop = self.largest_crop
        return (self.batch_size, crop.size, crop.size, crop.channels)

    @property
    def total(self) -> int | None:
        """Batches; None: without end."""
        if self.end is None:
            return None
        offset, stride = self.stride
        return -(-max(0, self.end - self.start - offset) // stride)

    def span(self, number: int) -> BatchSpan:
        """Return the first position of batch ``number``, and how many there are."""
        offset, stride = self.stride
        first = self.start + number * stride + offset
        return first, self.batch_size if self.end is None else min(self.batch_size, self.end - first)

    def side(self, position: int) -> int:
        """Return the side of the square at a position, in pixels."""
        if not self.stages:
            return self.crop.size
        return next(side for first, side in reversed(self.stages) if first <= position)

    def select_own(self, positions: Ints) -> Ints:
        """Return those of some positions that this task makes."""
        offset, stride = self.stride
        place = (positions - self.start) % stride - offset
        is_own = (positions >= self.start) & (place >= 0) & (place < self.batch_size)
        return np.asarray(positions[is_own])

    def share_memory(self, what: str, size: int) -> RankMemory:
        """Get memory that all ranks have whose loaders have the same samples. Raises OSError."""
        assert self.ranks is not None
        digest = getattr(self.source, "digest", None)  # what tells data from other data
        if not isinstance(digest, str):
            sampled = hashlib.sha256(self.source.labels.tobytes())
            for number in np.unique(np.linspace(0, self.num_images - 1, FINGERPRINTED, dtype=np.int64)).tolist():
                with suppress(BadImageError):
                    sampled.update(encoded_image(self.source, number))
            digest = sampled.hexdigest()
        content = repr((what, self.crop.channels, self.train, self.num_images, digest)).encode()
        ids = b"" if self.ids is None else self.ids.tobytes()
        return RankMemory(self.ranks, hashlib.sha256(content + ids).hexdigest(), size)


def encoded_image(source: Source, number: int, describe: Callable[[int], str] | None = None) -> memoryview:
    """Return a view of the encoded bytes of an image.

    ``describe``: names an image in messages; None where its number has to do.

    Raises:
        BadImageError: the record is damaged, or its file is gone.
        StorageError: the system cannot read it, after several tries: no other image may stand in for it.
    """
    try:
        try:
            image = source.image(number)
        except OSError as error:
            if not is_of_the_system(error):
                raise
            name = f"image {number}" if describe is None else describe(number)
            image = read_patiently(partial(source.image, number), name)
    except (DataError, OSError) as error:
        # Whoever reports it names the record: no more than the cause is said here.
        damage = error.__cause__ if isinstance(error.__cause__, DataError) else None
        raise BadImageError(str(error) if damage is None else f"damaged: {damage}") from error
    return memoryview(image).cast("B")


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


def _check_ids(n: int, ids: object) -> None:
    """Raise DataError where there are no images, or some records are none of the ``n`` of the data."""
    if n == 0:
        raise DataError("the data has no images: a data loader needs at least one")
    if ids is None:
        return
    used = np.array(ids)
    if used.ndim != 1 or len(used) == 0:
        raise DataError(f"ids has shape {used.shape}; it must be a one-dimensional array with at least one number")
    if used.dtype.kind not in "iu":
        remedy = ": use np.flatnonzero(mask) for a mask" if used.dtype.kind == "b" else ""
        raise DataError(f"ids are of type {used.dtype}; they must be whole numbers{remedy}")
    if used.min() < 0 or used.max() >= n:
        raise DataError(f"ids range from {used.min()} to {used.max()}; valid ids are 0 to {n - 1}")


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
