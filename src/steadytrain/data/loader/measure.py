"""Measure the speed of a data loader alone: its batches are taken and dropped."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import chain, repeat

from steadytrain.data.loader.image_loader import ImageLoader

_STAGES = ("read", "decode", "augment", "batch", "blocked")


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Speed of a loader over some time.

    ``read_share`` and the other shares are fractions of the threads' time (``threads * seconds``, or the time they
    report if that is more: work counts when it is done). The rest went to the interpreter, to waiting for its lock,
    and to other processes on the same cores. ``bytes_per_second`` counts encoded bytes.
    """

    images: int
    seconds: float
    images_per_second: float
    images_per_second_per_thread: float
    bytes_per_second: float
    read_share: float
    decode_share: float
    augment_share: float
    batch_share: float
    blocked_share: float


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Speed in the steady state, and before it.

    ``first_pass`` is measured separately if decoded images are cached: later passes (``steady``) use the cache. It is
    None otherwise, and for data so small that all images may be decoded before the first batch is taken.
    """

    first_batch_seconds: float
    first_pass: Speed | None
    steady: Speed


def measure(loader: ImageLoader, *, seconds: float) -> Measured:
    """Take batches for some time; if decoded images are cached, after the passes that fill the cache.

    ``loader``: a new loader: for training without ``stop``, or for evaluation, which is repeated.
    """
    began = time.perf_counter()
    sizes = map(len, chain.from_iterable(repeat(loader)))  # begun again after the last batch of an evaluation
    next(sizes)
    first_batch_seconds = time.perf_counter() - began
    n, task = loader.num_samples, loader.task
    is_seen = n > task.batch_size * (task.depth + 1)
    if loader.keeps:
        first_pass = _take(loader, sizes, least=n)
        _take(loader, sizes, least=task.batch_size * (task.depth + task.num_threads))  # begun before all were kept
        steady = _take(loader, sizes, seconds=seconds)
    else:
        steady = first_pass = _take(loader, sizes, seconds=seconds, most=n)
        if steady.images >= n:
            _take(loader, sizes, least=n)  # large images are kept in a second pass, if they fit
            steady = _take(loader, sizes, seconds=seconds)
    is_told_apart = loader.keeps and is_seen and first_pass is not steady
    loader.close()
    return Measured(
        first_batch_seconds=first_batch_seconds, first_pass=first_pass if is_told_apart else None, steady=steady
    )


def _take(
    loader: ImageLoader, sizes: Iterator[int], *, seconds: float = 0.0, least: int = 0, most: int | None = None
) -> Speed:
    """Take batches for at least so many seconds and images, or until there were ``most`` images."""
    before, images, began = asdict(loader.stats()), 0, time.perf_counter()
    while (passed := time.perf_counter() - began) < seconds or images < least:
        if most is not None and images >= most:
            break
        images += next(sizes)
    after = asdict(loader.stats())
    available = passed * loader.task.num_threads
    busy = {stage: after[f"{stage}_seconds"] - before[f"{stage}_seconds"] for stage in _STAGES}
    spent = max(available, sum(busy.values()))
    return Speed(
        images=images,
        seconds=passed,
        images_per_second=images / passed,
        images_per_second_per_thread=images / available,
        bytes_per_second=(after["bytes"] - before["bytes"]) / passed,
        **{f"{stage}_share": seconds / spent for stage, seconds in busy.items()},
    )
