"""Where seconds go on a device that works while the host goes on: its events are read late, and nothing waits for them.

Host time around a wait says little there: a batch that comes late costs nothing while the device still has work. So an
update leaves four marks in the device's queue, before forward, backward and optimizer and behind it; when they have
passed, the time between them is the device's, and what lies between two updates is its idle time. That goes to whatever
the host was at meanwhile; where the host had already asked for the next update, to the transfer that it waited for.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from steadytrain.training.clock import COMPUTE, Clock


class Span(NamedTuple):
    """Some time, by ``time.perf_counter()``, and the bucket that it belongs to."""

    bucket: str
    began: float
    ended: float


class Mark(Protocol):
    """A place in a device's queue of work: what ``torch.cuda.Event(enable_timing=True)`` is."""

    def record(self) -> None:
        """Put it behind all work that was asked for."""

    def query(self) -> bool:
        """Whether the device has come to it."""

    def synchronize(self) -> None:
        """Wait until it has."""

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds from here to another that has passed as well."""


def attribute(device: Sequence[Span], host: Sequence[Span], began: float, ended: float) -> dict[str, float]:
    """Seconds by bucket from ``began`` to ``ended``, all of them.

    Args:
        device: what the device worked at, in order, apart from each other.
        host: what the host was at, in order, without gaps from ``began`` to ``ended``.
        began, ended: by ``time.perf_counter()``.

    >>> host = [Span("forward", 0, 1), Span("input", 1, 6), Span("forward", 6, 7)]
    >>> attribute([Span("forward", 0, 4), Span("forward", 6, 7)], host, 0, 7)
    {'forward': 5.0, 'input': 2.0}
    """
    seconds: dict[str, float] = {}
    at, rest = began, deque(host)
    for span in [*device, Span("", ended, ended)]:
        _idle(seconds, rest, at, min(max(at, span.began), ended))
        start, end = max(at, span.began), min(span.ended, ended)
        if end > start:
            seconds[span.bucket] = seconds.get(span.bucket, 0.0) + end - start
        at = max(at, end)
    return seconds


def _idle(seconds: dict[str, float], host: deque[Span], began: float, ended: float) -> None:
    """The device's idle time, by what the host was at; spans that ended before are dropped."""
    while host and host[0].ended <= began:
        host.popleft()
    for span in host:
        start, end = max(span.began, began), min(span.ended, ended)
        if span.began >= ended:
            return
        if end > start:
            # While the host asks for an update's work, the device has nothing to do but wait for its images.
            bucket = "transfer" if span.bucket in COMPUTE else span.bucket
            seconds[bucket] = seconds.get(bucket, 0.0) + end - start


class DeviceClock(Clock):
    """A clock whose updates are timed on the device. What it tells is complete up to the last mark that has passed.

    Args:
        began: as of :class:`~steadytrain.training.clock.Clock`.
        mark: makes a mark on the device.
    """

    def __init__(self, began: float, mark: Callable[[], Mark]) -> None:
        super().__init__(began)
        self._mark = mark
        self._host: list[Span] = []
        self._marks: deque[tuple[str, float, Mark]] = deque()  # the bucket that begins there, and when it was asked for
        self._device: list[Span] = []
        self._known = began  # up to here all is attributed
        self._anchor: tuple[Mark, float] | None = None
        self._open: tuple[str, float] | None = None

    def to(self, bucket: str) -> None:
        now = time.perf_counter()
        self._host.append(Span(self.bucket, self.since, now))
        if bucket in COMPUTE or self.bucket in COMPUTE:
            if self._anchor is None:
                self._anchor = self._now()
            mark = self._mark()
            mark.record()
            self._marks.append((bucket if bucket in COMPUTE else "", now, mark))
        self.bucket, self.since = bucket, now

    def updated(self, step: int, images: int) -> None:
        self.step = step
        self.images += images  # what was exposed in it is not known yet

    def move(self, source: str, target: str, seconds: float | None = None) -> None:
        left = float("inf") if seconds is None else seconds
        for i in range(len(self._host) - 1, -1, -1):
            span = self._host[i]
            if span.bucket != source or left <= 0:
                continue
            middle = max(span.began, span.ended - left)
            left -= span.ended - middle
            self._host[i : i + 1] = [Span(source, span.began, middle), Span(target, middle, span.ended)]
        if seconds is None:
            super().move(source, target)

    def warmed_up(self) -> None:
        self._read()
        self._device = [span._replace(bucket="warmup") for span in self._device]
        self._marks = deque((bucket and "warmup", asked, mark) for bucket, asked, mark in self._marks)
        self._open = None if self._open is None else ("warmup", self._open[1])
        super().warmed_up()

    def seconds(self) -> Mapping[str, float]:
        self.to(self.bucket)
        self._read()
        known = self._up_to()
        for bucket, some in attribute(self._device, self._host, self._known, known).items():
            self._seconds[bucket] += some
        self._host = [span._replace(began=max(span.began, known)) for span in self._host if span.ended > known]
        self._device = [span._replace(began=max(span.began, known)) for span in self._device if span.ended > known]
        self._known = max(self._known, known)
        return {bucket: some for bucket, some in self._seconds.items() if some > 0}

    def told_seconds(self) -> float:
        return self._known - self.began

    def settle(self) -> None:
        if self._marks:
            self._marks[-1][2].synchronize()

    def _up_to(self) -> float:
        """Until when all is known: where marks are on their way, until the newest that has passed."""
        if not self._marks:
            return self.since
        return min(self._marks[0][1], self._open[1] if self._open else self._marks[0][1])

    def _read(self) -> None:
        """Take in the marks that have passed."""
        while self._marks and self._marks[0][2].query():
            bucket, asked, mark = self._marks.popleft()
            assert self._anchor is not None
            before, at = self._anchor
            # The two clocks drift apart by millionths; nothing is done before it is asked for.
            now = max(asked, at + before.elapsed_time(mark) / 1000)
            if self._open is not None:
                self._device.append(Span(*self._open, now))
            self._open = (bucket, now) if bucket else None
            self._anchor = mark, now

    def _now(self) -> tuple[Mark, float]:
        mark = self._mark()
        mark.record()
        mark.synchronize()
        return mark, time.perf_counter()
