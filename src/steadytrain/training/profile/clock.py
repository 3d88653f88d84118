"""Where the seconds of an attempt go: at each moment one bucket is open, so they add up to the wall clock.

A change of bucket costs a reading of the clock and an addition, some 150 ns; an update makes about eight. Other threads
may look at ``bucket``, ``since`` and ``step`` at any time.

On a device that works while the host goes on, host time around a wait says little: a batch that comes late costs
nothing while the device still has work. There an update leaves four marks in the device's queue, before forward,
backward and optimizer and behind it; they are read late, and nothing waits for them. The time between them is the
device's, and what lies between two updates is its idle time. That goes to whatever the host was doing meanwhile; where
the host had already asked for the next update, to the transfer that it waited for.

>>> clock = Clock(began=time.perf_counter() - 1.0)  # a second of imports before
>>> clock.to("forward")
>>> seconds = clock.seconds()
>>> 1.0 <= seconds["startup"] < 2.0, set(seconds) <= set(BUCKETS)
(True, True)
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

from steadytrain.events import BUCKETS, UPDATING, Accounted
from steadytrain.machine.sampler import pause

WARM_UP = 2
"""Updates of an attempt whose computing is warm-up."""

COMPUTE = ("forward", "backward", "optimizer")

QUICKEST = 0.2
"""Of several updates, the share in which this rank is the last to come, and waits for the exchange alone."""


class Clock:
    """The seconds of one attempt, bucket by bucket.

    ``began``: by ``time.perf_counter()``; ``startup`` is open since then. ``step``: updates of the run; ``images``:
    trained on in this attempt.
    """

    def __init__(self, began: float) -> None:
        self.began = began
        self.bucket = "startup"
        self.since = began
        self.step = 0
        self.images = 0
        self._warmup_images = 0
        self._seconds = dict.fromkeys(BUCKETS, 0.0)
        self._accounted = began
        self._is_updating = False
        self._cpu_seconds, self._cpu_since = 0.0, 0.0
        self._exposed: list[float] = []  # communication of each update since it was last told
        self._exchange_seconds = 0.0

    def to(self, bucket: str) -> None:
        """Open this one of :data:`~steadytrain.events.BUCKETS`: from now on, seconds belong to it."""
        now = time.perf_counter()
        self._seconds[self.bucket] += now - self.since
        self.bucket, self.since = bucket, now
        if (bucket in UPDATING) != self._is_updating:
            self._toggle_updating()

    @contextmanager
    def within(self, bucket: str) -> Iterator[None]:
        """Open a bucket meanwhile, and afterwards the one before."""
        before = self.bucket
        self.to(bucket)
        try:
            yield
        finally:
            self.to(before)

    def move(self, source: str, target: str, seconds: float | None = None) -> None:
        """Move some of the seconds of a bucket, or all of them, to another one."""
        some = self._seconds[source] if seconds is None else min(seconds, self._seconds[source])
        self._seconds[source] -= some
        self._seconds[target] += some

    def warmed_up(self) -> None:
        """Count all that has been computed so far as warm-up."""
        for bucket in COMPUTE:
            self.move(bucket, "warmup")
        self._warmup_images = self.images

    def seconds(self) -> Mapping[str, float]:
        """Return the seconds of each bucket that has any, up to now."""
        self.to(self.bucket)
        return {bucket: seconds for bucket, seconds in self._seconds.items() if seconds > 0}

    def updated(self, step: int, images: int) -> None:
        """Count an update, the ``step``-th, of so many images."""
        self.step = step
        self.images += images
        self._exposed.append(self._seconds["communication"])

    def is_due(self) -> bool:
        """Return whether to account for the seconds again: as often as the machine is sampled."""
        return self.since - self._accounted >= pause(self.since - self.began)

    def account(self) -> Accounted:
        """Account for the seconds so far, as an event."""
        seconds = self.seconds()
        self._accounted = self.since
        if self._is_updating:  # stop and go on: what has gone so far counts
            self._toggle_updating()
            self._toggle_updating()
        if len(self._exposed) > 1:  # communication without the waits for a rank that comes late now and then
            exposed = sorted(after - before for before, after in pairwise(self._exposed) if after > before)
            if exposed:  # where weights are averaged now and then, most updates exchange nothing
                self._exchange_seconds += exposed[int(QUICKEST * len(exposed))] * len(exposed)
            self._exposed = self._exposed[-1:]
        return Accounted(
            step=self.step,
            images=self.images,
            wall_seconds=self.accounted_seconds(),
            seconds=seconds,
            update_cpu_seconds=self._cpu_seconds or None,
            exchange_seconds=self._exchange_seconds or None,
            warmup_images=self._warmup_images,
        )

    def _toggle_updating(self) -> None:
        """Begin or end an update, during which the CPU seconds of all threads are counted."""
        now = time.process_time()
        if self._is_updating:
            self._cpu_seconds += now - self._cpu_since
        self._is_updating, self._cpu_since = not self._is_updating, now

    def accounted_seconds(self) -> float:
        """Return the wall-clock seconds of the attempt that ``seconds()`` has just accounted for."""
        return self.since - self.began

    def settle(self) -> None:
        """Wait until the device has done all that was asked of it, so that no second is missing."""


class Waits:
    """Sorts the waits for batches, which ``clock`` has counted as ``input``.

    What one that begins another epoch, of ``num_train`` samples, takes beyond the mean of the others is its gap.
    """

    def __init__(self, clock: Clock, num_train: int) -> None:
        self._clock = clock
        self._num_train = num_train
        self._batches = 0
        self._count, self._seconds = 0, 0.0

    def sort(self, seconds: float, position: int, n: int) -> None:
        """Sort the wait for a batch that holds ``n`` samples from ``position`` on; an update follows."""
        begins_an_epoch = (position - 1) // self._num_train != (position + n - 1) // self._num_train
        if begins_an_epoch and self._count:
            self._clock.move("input", "epoch_gap", max(0.0, seconds - self._seconds / self._count))
        elif self._batches:  # the feed begins with the first one: it is like no other
            self._count += 1
            self._seconds += seconds
        if self._batches == WARM_UP:
            self._clock.warmed_up()
        self._batches += 1


class Span(NamedTuple):
    """Some time, by ``time.perf_counter()``, and the bucket that it belongs to."""

    bucket: str
    began: float
    ended: float


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
    seconds: defaultdict[str, float] = defaultdict(float)
    at, waiting = began, deque(host)
    for span in [*device, Span("", ended, ended)]:
        start, end = max(at, span.began), min(span.ended, ended)
        while waiting and waiting[0].ended <= at:
            waiting.popleft()
        for idle in waiting:  # until the span begins, the device was idle: by what the host was at
            if idle.began >= start:
                break
            # While the host asks for an update's work, the device has nothing to do but wait for its images.
            bucket = "transfer" if idle.bucket in COMPUTE else idle.bucket
            seconds[bucket] += max(0.0, min(idle.ended, start, ended) - max(idle.began, at))
        seconds[span.bucket] += max(0.0, end - start)
        at = max(at, end)
    return {bucket: some for bucket, some in seconds.items() if some}


class DeviceClock(Clock):
    """A clock whose updates are timed on the device. What it tells is complete up to the last mark that has passed.

    ``mark`` leaves a mark in the device's queue: a ``torch.cuda.Event(enable_timing=True)`` that is recorded.
    """

    def __init__(self, began: float, mark: Callable[[], Any]) -> None:
        super().__init__(began)
        self._mark = mark
        self._host: list[Span] = []
        self._marks: deque[tuple[str, float, Any]] = deque()  # the bucket that begins there, and when it was asked for
        self._device: list[Span] = []
        self._known = began  # up to here all is attributed
        self._anchor: tuple[Any, float] | None = None  # a mark that has passed, and when
        self._open: tuple[str, float] | None = None

    def to(self, bucket: str) -> None:
        now = time.perf_counter()
        self._host.append(Span(self.bucket, self.since, now))
        if bucket in COMPUTE or self.bucket in COMPUTE:
            if self._anchor is None:
                first = self._mark()
                first.synchronize()
                self._anchor = first, time.perf_counter()
            mark = self._mark()
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
        known = self.since
        if self._marks:  # on their way: all is known until the newest that has passed
            known = min(self._marks[0][1], self._open[1] if self._open else self._marks[0][1])
        for bucket, some in attribute(self._device, self._host, self._known, known).items():
            self._seconds[bucket] += some
        self._host = [span._replace(began=max(span.began, known)) for span in self._host if span.ended > known]
        self._device = [span._replace(began=max(span.began, known)) for span in self._device if span.ended > known]
        self._known = max(self._known, known)
        return {bucket: some for bucket, some in self._seconds.items() if some > 0}

    def accounted_seconds(self) -> float:
        return self._known - self.began

    def settle(self) -> None:
        if self._marks:
            self._marks[-1][2].synchronize()

    def _read(self) -> None:
        """Take in the marks that have passed."""
        while self._marks and self._marks[0][2].query():
            bucket, requested, mark = self._marks.popleft()
            assert self._anchor is not None
            before, at = self._anchor
            # The two clocks drift apart by millionths; nothing is done before it is asked for.
            now = max(requested, at + before.elapsed_time(mark) / 1000)
            if self._open is not None:
                self._device.append(Span(*self._open, now))
            self._open = (bucket, now) if bucket else None
            self._anchor = mark, now
