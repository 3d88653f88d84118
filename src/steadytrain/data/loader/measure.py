"""How fast a feed is when nothing else runs: who takes its batches does nothing with them."""

from __future__ import annotations

import time
from dataclasses import dataclass

from steadytrain.data.loader.image_loader import ImageLoader
from steadytrain.data.loader.stats import FeedTimes


@dataclass(frozen=True, kw_only=True)
class Speed:
    """What a feed did in some time.

    ``read_share`` and the like are parts of the threads' time (``threads * seconds``, or what they were seen to spend
    where that is more: a piece of work counts when it is done); what is missing to 1 went to the interpreter, to its
    lock, and to other processes on the same cores. ``bytes_per_second`` are encoded bytes.
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
    """The steady state, and how it was reached.

    ``first_pass`` is told apart where decoded images are kept: then every later pass, ``steady``, begins with those.
    It is None also of data so few that all of them may have been decoded before the first batch was taken.
    """

    first_batch_seconds: float
    first_pass: Speed | None
    steady: Speed


def measure(feed: ImageLoader, *, seconds: float) -> Measured:
    """Take batches from a feed for some time; where decoded images are kept, after the passes that decode all of them.

    Args:
        feed: a fresh one; a training feed without ``stop``, or an evaluation, which is then repeated.
        seconds: how long to measure.
    """
    began = time.perf_counter()
    source = _Endless(feed)
    next(source)
    first_batch_seconds = time.perf_counter() - began
    first, steady = _passes(feed, source, seconds)
    feed.close()
    return Measured(
        first_batch_seconds=first_batch_seconds,
        first_pass=first,
        steady=steady,
    )


class _Endless:
    """Iterates over a feed, again and again."""

    def __init__(self, feed: ImageLoader) -> None:
        self._feed = feed
        self._batches = iter(feed)

    def __next__(self) -> int:
        batch = next(self._batches, None)
        if batch is None:
            self._batches = iter(self._feed)
            batch = next(self._batches)
        return len(batch)


def _passes(feed: ImageLoader, source: _Endless, seconds: float) -> tuple[Speed | None, Speed]:
    """The first pass, where it is told apart, and the steady state."""
    is_seen = feed.num_samples > feed.batch_size * (feed.depth + 1)
    if feed.keeps:
        first = _take(feed, source, least=feed.num_samples)
        return first if is_seen else None, _take(feed, source, seconds=seconds)
    first = _take(feed, source, seconds=seconds, most=feed.num_samples)
    if first.images < feed.num_samples:
        return None, first
    _take(feed, source, least=feed.num_samples)  # large images are kept in a second pass, if they fit
    steady = _take(feed, source, seconds=seconds)
    return first if feed.keeps and is_seen else None, steady


def _take(
    feed: ImageLoader, source: _Endless, *, seconds: float = 0.0, least: int = 0, most: int | None = None
) -> Speed:
    """Take batches for at least so many seconds and images, or until there were ``most`` images."""
    before, images, began = feed.stats(), 0, time.perf_counter()
    while (passed := time.perf_counter() - began) < seconds or images < least:
        if most is not None and images >= most:
            break
        images += next(source)
    return _speed(before, feed.stats(), images, passed)


def _speed(before: FeedTimes, after: FeedTimes, images: int, seconds: float) -> Speed:
    available = seconds * after.threads
    read, decode, augment, batch, blocked = (
        getattr(after, f"{stage}_seconds") - getattr(before, f"{stage}_seconds")
        for stage in ("read", "decode", "augment", "batch", "blocked")
    )
    spent = max(available, read + decode + augment + batch + blocked)
    return Speed(
        images=images,
        seconds=seconds,
        images_per_second=images / seconds,
        images_per_second_per_thread=images / available,
        bytes_per_second=(after.bytes - before.bytes) / seconds,
        read_share=read / spent,
        decode_share=decode / spent,
        augment_share=augment / spent,
        batch_share=batch / spent,
        blocked_share=blocked / spent,
    )
