"""Where the seconds of an attempt go: at each moment one bucket is open, so they add up to the wall clock.

A change of bucket costs a reading of the clock and an addition, some 150 ns; an update makes about eight. Other threads
may look at ``bucket``, ``since`` and ``step`` at any time.

>>> told = Clock(began=time.perf_counter() - 1.0)  # a second of imports before
>>> told.to("forward")
>>> seconds = told.seconds()
>>> 1.0 <= seconds["startup"] < 2.0, set(seconds) <= set(BUCKETS)
(True, True)
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise

from steadytrain.events import BUCKETS, UPDATING, Accounted
from steadytrain.machine.sampler import pause

WARM_UP = 2
"""Updates of an attempt whose computing is warm-up."""

COMPUTE = ("forward", "backward", "optimizer")

QUICKEST = 0.2
"""Of several updates, the share in which this rank is the last to come, and waits for the exchange alone."""


class Clock:
    """The seconds of one attempt, bucket by bucket.

    Args:
        began: when the attempt began, as ``time.perf_counter()`` has it; ``startup`` is open since then.

    ``step``: updates of the run; ``images``: trained on in this attempt.
    """

    def __init__(self, began: float) -> None:
        self.began = began
        self.bucket = "startup"
        self.since = began
        self.step = 0
        self.images = 0
        self._seconds = dict.fromkeys(BUCKETS, 0.0)
        self._told = began
        self._is_updating = False
        self._cpu_seconds, self._cpu_since = 0.0, 0.0
        self._exposed: list[float] = []  # communication of each update since it was last told
        self._exchange_seconds = 0.0

    def to(self, bucket: str) -> None:
        """From now on, seconds belong to this one of :data:`~steadytrain.events.BUCKETS`."""
        now = time.perf_counter()
        self._seconds[self.bucket] += now - self.since
        self.bucket, self.since = bucket, now
        if (bucket in UPDATING) != self._is_updating:
            self._turn()

    @contextmanager
    def within(self, bucket: str) -> Iterator[None]:
        """Meanwhile, and afterwards to the one before."""
        before = self.bucket
        self.to(bucket)
        try:
            yield
        finally:
            self.to(before)

    def move(self, source: str, target: str, seconds: float | None = None) -> None:
        """Some of the seconds of a bucket, or all of them, belong to another one."""
        some = self._seconds[source] if seconds is None else min(seconds, self._seconds[source])
        self._seconds[source] -= some
        self._seconds[target] += some

    def warmed_up(self) -> None:
        """All that has been computed so far was warm-up."""
        for bucket in COMPUTE:
            self.move(bucket, "warmup")

    def seconds(self) -> Mapping[str, float]:
        """Of each bucket that has any, up to now."""
        self.to(self.bucket)
        return {bucket: seconds for bucket, seconds in self._seconds.items() if seconds > 0}

    def updated(self, step: int, images: int) -> None:
        """An update is done, the ``step``-th, of so many images."""
        self.step = step
        self.images += images
        self._exposed.append(self._seconds["communication"])

    def is_due(self) -> bool:
        """Whether the seconds are to be told again: as often as the machine is sampled."""
        return self.since - self._told >= pause(self.since - self.began)

    def account(self) -> Accounted:
        """The seconds so far, as an event."""
        seconds = self.seconds()
        self._told = self.since
        if self._is_updating:  # stop and go on: what has gone so far counts
            self._turn()
            self._turn()
        return Accounted(
            step=self.step,
            images=self.images,
            wall_seconds=self.told_seconds(),
            seconds=seconds,
            update_cpu_seconds=self._cpu_seconds or None,
            exchange_seconds=self._exchanged() or None,
        )

    def _exchanged(self) -> float:
        """Seconds of communication, without those that ranks wait for one of them that comes late now and then."""
        if len(self._exposed) > 1:
            each = sorted(after - before for before, after in pairwise(self._exposed))
            self._exchange_seconds += each[int(QUICKEST * len(each))] * len(each)
            self._exposed = self._exposed[-1:]
        return self._exchange_seconds

    def _turn(self) -> None:
        """An update begins, or it is over: what all threads compute meanwhile is counted."""
        now = time.process_time()
        if self._is_updating:
            self._cpu_seconds += now - self._cpu_since
        self._is_updating, self._cpu_since = not self._is_updating, now

    def told_seconds(self) -> float:
        """Of the attempt, those that ``seconds()`` has just told of."""
        return self.since - self.began

    def settle(self) -> None:
        """Wait until all that was asked of the device is done, so that all seconds can be told."""


class Waits:
    """Sorts the waits for batches: what one that begins another epoch takes beyond the mean of the others is its gap.

    Args:
        clock: what has counted them as ``input``.
        num_train: samples in an epoch.
    """

    def __init__(self, clock: Clock, num_train: int) -> None:
        self._clock = clock
        self._num_train = num_train
        self._batches = 0
        self._count, self._seconds = 0, 0.0

    def sort(self, seconds: float, position: int, n: int) -> None:
        """A batch was waited for, which holds the positions from ``position`` on; an update follows.

        Args:
            seconds: of the wait.
            position: of its first sample.
            n: samples in it.
        """
        begins_an_epoch = (position - 1) // self._num_train != (position + n - 1) // self._num_train
        if begins_an_epoch and self._count:
            self._clock.move("input", "epoch_gap", max(0.0, seconds - self._seconds / self._count))
        elif self._batches:  # the feed begins with the first one: it is like no other
            self._count += 1
            self._seconds += seconds
        if self._batches == WARM_UP:
            self._clock.warmed_up()
        self._batches += 1
