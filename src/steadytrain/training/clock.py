"""Seconds of an attempt by bucket: at each moment one bucket is open, so they add up to the wall clock.

A change of bucket costs a reading of the clock and an addition, some 150 ns; an update makes about eight. Other threads
may look at ``bucket``, ``since`` and ``step`` at any time.

On a device that works while the host goes on, host time around a wait says little. There an update leaves marks in the
device's queue, before each of its parts and behind the last; they are read late, and nothing waits for them. What lies
between, and how gaps in a part are told from work, is in docs/ledger.md ("On a GPU"). The gaps of an exchange are told
otherwise, since it takes as long as the other ranks let it: where it was over before the host asked for what follows,
the device waited for the host.

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
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec

from steadytrain.events import BUCKETS, UPDATING, Accounted
from steadytrain.machine.sampler import pause

WARM_UP = 2
"""Updates of an attempt whose computing is warm-up."""

COMPUTE = ("forward", "backward", "optimizer", "update")
"""The parts of an update. ``update`` is a whole recorded one (a CUDA graph), whose parts cannot be timed."""

ON_DEVICE = (*COMPUTE, "communication")
"""Buckets that a device's marks time."""

HOLD_AFTER, HOLD_EVERY = 5, 512
"""Updates that the host was not ahead of, until it is given a start: at first, and later on."""

HOLD_TIMES = 1.25
"""Times the host's launch of an update for which the device is held."""

MOST_HELD, MOST_CYCLES = 0.25, 1e9
"""The longest that the device is held, in seconds and in cycles of its clock, whatever was measured."""

CYCLES = 2e9
"""Cycles of a device's clock in a second, until its own are measured."""

LATENCY = 1e-4
"""Seconds after which a mark has passed before which nothing was queued; the two clocks are no further apart."""

BACKLOG = 16
"""Marks that are left to be read later."""

QUICKEST = 0.2
"""The share of several updates in which this rank is the last to come, and waits for the exchange alone."""


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
    at, first, last = began, 0, len(host)
    for bucket, start, end in [*device, Span("", ended, ended)]:
        start, end = max(at, start), min(end, ended)
        if start > at:  # until the span begins, the device was idle: by what the host was at
            while first < last and host[first].ended <= at:
                first += 1
            until = min(start, ended)
            for place in range(first, last):
                idle, idle_began, idle_ended = host[place]
                if idle_began >= start:
                    break
                if idle == "transfer":  # it only asks for a copy
                    idle = "host"
                seconds[idle] += max(0.0, min(idle_ended, until) - max(idle_began, at))
        if end > start:
            seconds[bucket] += end - start
        at = max(at, end)
    return {bucket: some for bucket, some in seconds.items() if some}


class _Mark(NamedTuple):
    """A mark of an update in the device's queue: the bucket that begins there (empty: none), and when it was made."""

    bucket: str
    made_at: float
    event: Any
    update: _Update


@dataclass
class _Update:
    """An update on the device.

    ``parts``: as far as its marks were read, and whether each was launched as a whole before the device began it;
    ``launch_seconds``: of the host; ``held``: cycles that the device was held before it.
    """

    began: float
    parts: list[tuple[Span, bool]] = field(default_factory=list)
    launch_seconds: float = 0.0
    held: int = 0
    images: int = 0
    is_warmup: bool = False


@dataclass
class _Work:
    """A part of updates, as the device does it without gaps: the mean of the newest 8 of :attr:`count`.

    ``unsplit``: how many there were before that was known, and their seconds, gaps included.
    """

    seconds: float = 0.0
    count: int = 0
    unsplit: tuple[int, float] = (0, 0.0)

    def add(self, seconds: float) -> None:
        self.count = min(self.count + 1, 8)
        self.seconds += (seconds - self.seconds) / self.count


class DeviceClock(Clock):
    """A clock whose updates are timed on the device. What it tells is complete up to the last update that was done.

    ``mark`` makes a mark in the device's queue: a ``torch.cuda.Event(enable_timing=True)`` that was recorded. ``hold``
    keeps the device busy for so many cycles of its clock, and does not wait for it; None: nothing can.
    """

    def __init__(self, began: float, mark: Callable[[], Any], hold: Callable[[int], None] | None = None) -> None:
        super().__init__(began)
        self._mark, self._hold = mark, hold
        self._host: list[Span] = []
        self._marks: deque[_Mark] = deque()
        self._device: list[Span] = []
        self._known = began  # up to here all is attributed
        self._anchor: tuple[Any, float] | None = None  # a mark that has passed, and when
        self._open: tuple[_Mark, float] | None = None  # the mark that began the part the device is at, and when
        self._launched: _Update | None = None  # the update that is being launched
        self._newest: _Update | None = None  # the newest that was launched
        self._until_hold = HOLD_AFTER
        self._cycles = CYCLES  # of the device's clock in a second
        self._launch_seconds = 0.0  # of the host, for the newest update that was not ahead
        self._work: dict[tuple[float, str], _Work] = {}  # by images of a pass, and bucket
        self._late: dict[str, float] = {}  # of buckets, seconds that turned out to be launching
        self._split: list[tuple[float, str]] = []  # the parts of the newest update, by images of a pass, and bucket
        self._communicated = 0.0

    def to(self, bucket: str) -> None:
        now, before = time.perf_counter(), self.bucket
        self._host.append(Span(before, self.since, now))
        if bucket != before and (bucket in ON_DEVICE or before in ON_DEVICE):
            self._mark_part(bucket if bucket in ON_DEVICE else "", now)
        elif before == "logging":  # the host may have waited for the device: it is known best when its marks passed
            self._read()
        self.bucket, self.since = bucket, now

    def _mark_part(self, bucket: str, now: float) -> None:
        """Mark where a part of an update begins, or where the update ends."""
        if self._anchor is None:
            first = self._mark()
            first.synchronize()
            self._anchor = first, time.perf_counter()
        if self._launched is None:
            self._launched = _Update(now)
            if self._hold is not None and self._until_hold <= 0 < self._launch_seconds:
                self._marks.append(_Mark("host", now, self._mark(), self._launched))
                seconds = min(HOLD_TIMES * self._launch_seconds, MOST_HELD)  # of one that compiled, a minute
                self._launched.held = int(min(seconds * self._cycles, MOST_CYCLES))
                self._hold(self._launched.held)
                self._until_hold = HOLD_EVERY
        self._marks.append(_Mark(bucket, now, self._mark(), self._launched))
        self._launched.launch_seconds = now - self._launched.began
        if not bucket:
            self._newest, self._launched = self._launched, None

    def updated(self, step: int, images: int) -> None:
        self.step = step
        self.images += images
        if self._newest is not None:
            self._newest.images = images
        if len(self._marks) > BACKLOG:
            self._read()

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
        for mark in (*self._marks, *([] if self._open is None else [self._open[0]])):
            mark.update.is_warmup = True
        self._work.clear()
        self._late.clear()
        super().warmed_up()

    def seconds(self) -> Mapping[str, float]:
        self.to(self.bucket)
        self._read()
        known = self.since
        if self._marks:  # on their way: all is known until the oldest update that is not done
            known = min(known, self._marks[0].made_at)
        if self._open is not None:
            mark, since = self._open
            known = min(known, mark.update.parts[0][0].began if mark.update.parts else since)
        for bucket, some in attribute(self._device, self._host, self._known, known).items():
            self._seconds[bucket] += some
        for bucket, late in self._late.items():
            some = min(late, self._seconds[bucket])
            self._late[bucket] -= some
            super().move(bucket, "host", some)
        self._host = [span._replace(began=max(span.began, known)) for span in self._host if span.ended > known]
        self._device = [span._replace(began=max(span.began, known)) for span in self._device if span.ended > known]
        self._known = max(self._known, known)
        return {bucket: some for bucket, some in self._seconds.items() if some > 0}

    def account(self) -> Accounted:
        known = [part for part in self._split if part in self._work and self._work[part].count]
        return msgspec.structs.replace(super().account(), launching_measured=sorted(bucket for _, bucket in known))

    def accounted_seconds(self) -> float:
        return self._known - self.began

    def settle(self) -> None:
        if self._marks:
            self._marks[-1].event.synchronize()

    def _read(self) -> None:
        """Take in the marks that have passed."""
        while self._marks and self._marks[0].event.query():
            mark = self._marks.popleft()
            assert self._anchor is not None
            before, at = self._anchor
            # The two clocks drift apart by millionths; nothing is done before it is asked for, nor after it was seen.
            now = min(max(mark.made_at, at + before.elapsed_time(mark.event) / 1000), time.perf_counter())
            if self._open is not None:
                opened, since = self._open
                is_over = opened.bucket == "communication" and now - mark.made_at < LATENCY
                span = Span("host" if is_over else opened.bucket, since, now)
                mark.update.parts.append((span, since > mark.made_at + LATENCY))
            elif at <= mark.made_at and now - mark.made_at < LATENCY:  # on an idle device, it waited for nothing
                now = mark.made_at
            elif not mark.update.is_warmup:  # all that an update waits for are its images
                self._device.append(Span("transfer", max(mark.made_at, at), now))
            self._anchor = mark.event, now
            self._open = (mark, now) if mark.bucket else None
            if not mark.bucket:
                self._take(mark.update)

    def _take(self, update: _Update) -> None:
        """Take in an update that the device has done, its gaps as launching."""
        parts, update.parts = update.parts, []
        if update.is_warmup:
            self._device += [span._replace(bucket="warmup") for span, _ in parts]
            return
        held = parts[0][0].ended - parts[0][0].began if update.held else 0.0
        if held > LATENCY:
            self._cycles = update.held / held
        passes = max(1, sum([span.bucket in ("forward", "update") for span, _ in parts]))
        images = update.images / passes
        ahead: dict[str, bool] = {}  # of each bucket, whether any part of it was launched before the device began it
        for span, is_ahead in parts:
            bucket, began, ended = span
            middle = ended
            if bucket == "communication":
                self._communicated += ended - began
            elif bucket in COMPUTE:
                ahead[bucket] = ahead.get(bucket, False) or is_ahead
                work = self._work.get((images, bucket))
                if work is None:
                    work = self._work[images, bucket] = _Work()
                if is_ahead:
                    work.add(ended - began)
                    count, unsplit = work.unsplit
                    if count:
                        work.unsplit = 0, 0.0
                        late = self._late.get(bucket, 0.0)
                        self._late[bucket] = late + max(0.0, unsplit - count * work.seconds)
                elif work.count:
                    middle = min(ended, began + work.seconds)
                else:
                    work.unsplit = work.unsplit[0] + 1, work.unsplit[1] + ended - began
            if middle == ended:
                self._device.append(span)
            else:
                self._device += [Span(bucket, began, middle), Span("host", middle, ended)]
        self._exposed.append(self._communicated)
        if all(ahead.values()):
            self._until_hold = HOLD_EVERY
        elif not update.held:
            self._until_hold -= 1
            self._launch_seconds = update.launch_seconds
        elif held < self._launch_seconds:  # its clock is faster than was thought
            self._until_hold = HOLD_AFTER
        self._split = [(images, bucket) for bucket in ahead]
