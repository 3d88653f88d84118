"""One attempt of a run, from the start of its process: seconds by bucket, at its end and at any moment before."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

from steadytrain.config.batches import Batches
from steadytrain.events import (
    BUCKETS,
    UPDATING,
    Accounted,
    Ended,
    Evaluated,
    Event,
    FeedStats,
    MachineStats,
    Saved,
    Started,
    Step,
    Tested,
    ThreadStats,
)
from steadytrain.monitor.evidence import BESIDE, Company, Grant, PartTimes
from steadytrain.monitor.samples import MAX_KEPT, STAGES, Evenly, feed_difference

PARTS = ("transfer", "host", "forward", "backward", "update", "optimizer", "communication", "logging")
STRETCHES = 5  # stretches that an attempt is divided into, to see whether its updates take longer and longer
WARM_UPDATES = 2  # the first updates of an attempt, whose computing is recorded as warm-up

Stages = tuple[float, ...]
"""Seconds or shares of a wait by what the feed did meanwhile, in the order of ``ledger.INPUT``."""
NO_STAGES: Stages = (0.0, 0.0, 0.0, 0.0, 0.0)
UNKNOWN_STAGES: Stages = (0.0, 0.0, 0.0, 0.0, 1.0)


@dataclass
class Mark:
    """An attempt's totals up to a moment, counted from the start of the attempt.

    ``time``: seconds since 1970; ``seconds``: by recorded bucket, ``update`` for updates of unknown parts; ``stages``:
    of the input wait; ``update_cpu``: processor time of the updates. ``pending``: seconds of the wait that ``stages``
    may still divide in another way.
    """

    wall: float
    time: float
    step: int
    images: int
    seconds: Mapping[str, float]
    stages: Stages = NO_STAGES
    update_cpu: float = 0.0
    pending: float | None = None

    @property
    def updating(self) -> float:
        """Seconds of the updates."""
        return sum(self.seconds.get(bucket, 0.0) for bucket in UPDATING)

    def towards(self, later: Mark, share: float) -> Mark:
        """Interpolate between this mark and a later one, as if all had gone on evenly."""

        def between(a: float, b: float) -> float:
            return a + (b - a) * share

        names = self.seconds.keys() | later.seconds.keys()
        return Mark(
            wall=between(self.wall, later.wall),
            time=between(self.time, later.time),
            step=round(between(self.step, later.step)),
            images=round(between(self.images, later.images)),
            seconds={name: between(self.seconds.get(name, 0.0), later.seconds.get(name, 0.0)) for name in names},
            stages=tuple(between(a, b) for a, b in zip(self.stages, later.stages, strict=True)),
            update_cpu=between(self.update_cpu, later.update_cpu),
        )


@dataclass
class InputWait:
    """Splits an attempt's wait for batches by the work of the feed's threads between two ``FeedStats``.

    A thread that reads while the loop waits is what the loop waits for, so the wait is split as the threads' busy
    seconds are: storage, decode, augment, batch. Where they were blocked for longer than they were busy they could
    have made more, and the wait comes from elsewhere: ``input_other``.
    """

    unsettled: list[Mark] = field(default_factory=list)
    _settled: Stages = NO_STAGES
    _pending: float = 0.0
    _base: FeedStats | None = None
    _newest: FeedStats | None = None

    def add_wait(self, mark: Mark, seconds: float) -> None:
        """Take in the seconds waited since the mark before; sets the stages of ``mark``."""
        self._pending += max(0.0, seconds)
        self.unsettled.append(mark)
        mark.pending, mark.stages = self._pending, self.after(0.0)
        if self._newest is not None and self._newest != self._base and self._newest.step == mark.step:
            self._settle()

    def add_stats(self, stats: FeedStats) -> None:
        """Add the feed's totals; they come a moment before or after the mark that they belong to."""
        self._newest = stats
        if self.unsettled and self.unsettled[-1].step == stats.step:
            self._settle()

    def after(self, seconds: float) -> Stages:
        """Return the stages when so many seconds of waiting follow the newest mark."""
        return _add_scaled(self._settled, self._shares(), self._pending + seconds)

    def _shares(self) -> Stages:
        if self._newest is not None and self._newest != self._base:
            return stage_shares(self._base, self._newest)
        total = sum(self._settled)
        return tuple(seconds / total for seconds in self._settled) if total > 0 else UNKNOWN_STAGES

    def _settle(self) -> None:
        shares = self._shares()
        for mark in self.unsettled:
            mark.stages, mark.pending = _add_scaled(self._settled, shares, mark.pending or 0.0), None
        self._settled = _add_scaled(self._settled, shares, self._pending)
        self._base, self._pending = self._newest, 0.0
        self.unsettled.clear()


def stage_shares(before: FeedStats | None, after: FeedStats) -> Stages:
    """Return each stage's share of the busy seconds between two ``FeedStats`` (None: since the feed was made).

    >>> stage_shares(None, FeedStats(step=1, images=8, bytes=0, read_seconds=1.0, decode_seconds=3.0,
    ...                              batch_seconds=0.0, blocked_seconds=0.5, threads=1))
    (0.25, 0.75, 0.0, 0.0, 0.0)
    """
    difference = feed_difference(before, after)
    busy = [max(0.0, getattr(difference, stage)) for stage in STAGES]
    total = sum(busy)
    return (
        UNKNOWN_STAGES if total <= 0 or difference.blocked_seconds > total else (*(part / total for part in busy), 0.0)
    )


def _add_scaled(stages: Sequence[float], more: Sequence[float], factor: float) -> Stages:
    return tuple([a + factor * b for a, b in zip(stages, more, strict=True)])


@dataclass
class Attempt:
    """One attempt of a run, folded event by event.

    ``before``: the run's own seconds before it; ``cut``: its wall seconds that count, since what came after was done
    for nothing (None: all count). ``saved``: step -> wall seconds at which its checkpoint was taken. ``exchange``:
    seconds that exchanging with other ranks took, and ``warmup_images``: images of the updates whose computing is in
    ``warmup``, both where that was recorded. ``launching_measured``: as in :class:`~steadytrain.events.Accounted`.
    ``company``: its updates up to the newest sample of the machine.
    ``stops``: the times at which more seconds became known in which the process was stopped, and all of them by bucket.
    ``process_began`` and ``last_time``, of its newest event, are seconds since 1970. Of many ``marks`` and ``stops``
    only some are kept, evenly.
    """

    number: int
    started: Started | None
    began: float
    before: float = 0.0
    marks: list[Mark] = field(default_factory=list)
    saved: dict[int, float] = field(default_factory=dict)
    ended: Ended | None = None
    cut: float | None = None
    step: int = 0
    images: int = 0
    exchange: float | None = None
    warmup_images: int | None = None
    launching_measured: Sequence[str] = ()
    company: Company = field(default_factory=Company)
    stops: list[tuple[float, Mapping[str, float]]] = field(default_factory=list)
    _granted: list[tuple[float, int, float]] = field(default_factory=list)
    _waits: InputWait = field(default_factory=InputWait)
    _is_accounted: bool = False
    process_began: float = 0.0
    last_time: float = 0.0
    first_position: int = 0
    _clock: float = 0.0
    _tail: dict[str, float] = field(default_factory=dict)
    _late: dict[int, float] = field(default_factory=dict)  # of ``saved``, what came after the newest mark
    _few_marks: Evenly = field(default_factory=Evenly)
    _few_stops: Evenly = field(default_factory=Evenly)

    def __post_init__(self) -> None:
        if self.marks:  # it was stored
            return
        startup = sum(_positive(self.started.startup).values()) if self.started else 0.0
        self.process_began = self.began - startup
        self.last_time = self.began
        self.step = self.first_step
        self.first_position = int(self.started.batches.position(self.first_step)) if self.started else 0
        origin = Mark(wall=0.0, time=self.process_began, step=self.step, images=0, seconds={})
        base = Mark(wall=startup, time=self.began, step=self.step, images=0, seconds={"startup": startup})
        self.marks = [origin, base]
        self._clock = self.began
        self._tail = _empty_tail()

    @cached_property
    def batches(self) -> Batches | None:
        """Images of each update; None where they are not known."""
        return self.started.batches if self.started else None

    @cached_property
    def first_step(self) -> int:
        """Updates done before this attempt."""
        return self.started.step if self.started else 0

    @property
    def _cores_begun(self) -> int:
        """Cores that the process might use when the attempt began; 0 where that is not known."""
        cores = self.started.machine.get("cores") if self.started else None
        return cores if isinstance(cores, int) else 0

    @property
    def batch_size(self) -> int:
        """Images of the run's first update."""
        return self.started.batch_size if self.started else 0

    @property
    def num_train(self) -> int:
        """Images of the training set; 0 where that is not known."""
        count = self.started.data.get("num_train") if self.started else None
        return count if isinstance(count, int) else 0

    @property
    def updates(self) -> int:
        """Updates done in this attempt, those lost later included."""
        return max(0, self.step - self.first_step)

    @property
    def position(self) -> int:
        """Images that the run has come to with this attempt, repeated ones counted once."""
        return self.first_position + self.images

    @property
    def wall(self) -> float:
        """Seconds since its process started."""
        return self.marks[-1].wall + sum(self._tail.values())

    def take(self, event: Event) -> None:
        """Absorb an event of this attempt; every kind at least moves the clock."""
        if isinstance(event, Step):
            self.take_step(event)
            return
        self._tail["other"] += max(0.0, event.time - self._clock)
        self._clock = event.time
        self.last_time = max(self.last_time, event.time)
        match event:
            case Accounted():
                self._take_account(event)
            case FeedStats():
                self._waits.add_stats(event)
            case MachineStats():
                if not self._granted and not event.quota and self._cores_begun > event.cores:
                    self._granted.append((self.began, self._cores_begun, 0.0))  # and fewer by the first sample
                    self._granted.append((event.time, event.cores, 0.0))
                if not self._granted or self._granted[-1][1:] != (event.cores, event.quota):
                    since = event.seconds if self._granted else 0.0  # it may have changed just after the sample before
                    self._granted.append((event.time - since, event.cores, event.quota))
                self._take_company(is_beside=(event.others or 0.0) >= BESIDE * event.cores > 0)
            case ThreadStats():
                stopped = {bucket: of["stopped"] for bucket, of in event.loop.items() if of.get("stopped", 0.0) > 0}
                if stopped and (not self.stops or self.stops[-1][1] != stopped):
                    self._few_stops.add(self.stops, (event.time, stopped))
            case Evaluated() | Tested() | Saved():
                # What lies after the newest mark, which may be in its middle.
                seconds = event.pause if isinstance(event, Saved) else event.seconds
                seconds = min(seconds, self._tail["other"]) if self._is_accounted else seconds
                # A measured duration counts even if the clock disagrees.
                self._tail["checkpoint" if isinstance(event, Saved) else "evaluation"] += max(0.0, seconds)
                self._tail["other"] = max(0.0, self._tail["other"] - max(0.0, seconds))
                if isinstance(event, Saved):  # what was done while it was written is not in it
                    since = max(0.0, event.time - event.began - event.pause) if event.began else 0.0
                    self.saved[event.step] = self._late[event.step] = max(0.0, self.wall - since)
            case Ended():
                self.ended = event
                if not self._is_accounted:
                    self._complete(event)

    def take_step(self, event: Step) -> None:
        """Absorb an update, as :meth:`take` does: a log has little but these, so that each call counts."""
        tail, time, seconds, wait = self._tail, event.time, event.seconds, event.wait_seconds
        other = tail["other"]
        if time > self._clock:  # a clock that was set back stands still
            other += time - self._clock
        self._clock = time
        if time > self.last_time:
            self.last_time = time
        if seconds > 0:  # a measured duration counts even if the clock disagrees
            if wait > 0:
                wait = wait if wait < seconds else seconds
                tail["input"] += wait
                tail["update"] += seconds - wait
            else:
                tail["update"] += seconds
            other = other - seconds if other > seconds else 0.0
        tail["other"] = other
        self.step = event.step
        self.images += event.n

    def end(self) -> Mark:
        """Return the totals up to the newest event."""
        tail, mark = dict(self._tail), self.marks[-1]
        parts = {name: mark.seconds.get(name, 0.0) for name in PARTS}
        if (total := sum(parts.values())) > 0:  # the parts of updates are those of the updates before
            work = tail.pop("update")
            tail |= {name: work * value / total for name, value in parts.items()}
        names = mark.seconds.keys() | tail.keys()
        seconds = {name: mark.seconds.get(name, 0.0) + tail.get(name, 0.0) for name in names}
        images = max(self.images, mark.images)
        end = Mark(self.wall, self._clock, self.step, images, seconds, self._waits.after(tail["input"]))
        end.update_cpu = mark.update_cpu * end.updating / mark.updating if mark.updating else 0.0
        return end

    def stopped(self, time: float = math.inf) -> Mapping[str, float]:
        """Return the seconds by bucket, up to a moment, in which the process was stopped."""
        return next((stopped for known, stopped in reversed(self.stops) if known <= time), {})

    def grants(self) -> tuple[Grant, ...]:
        """Return its stretches with as many cores, oldest first; none where that never changed."""
        if len(self._granted) < 2:
            return ()
        ends = [*(time for time, *_ in self._granted[1:]), math.inf]
        stretches, before = [], self.marks[0]
        for (_, cores, quota), until in zip(self._granted, ends, strict=True):
            after = self.end() if until == math.inf else self._at(lambda mark: mark.time, until)
            images, seconds = after.images - before.images, self._working(after) - self._working(before)
            stretches.append(Grant(step=before.step, cores=cores, quota=quota, images=images, seconds=seconds))
            before = after
        return tuple(stretches)

    def _take_company(self, *, is_beside: bool) -> None:
        """Add the updates since the sample before to those with or without other processes at work.

        What was the warm-up is known by the first account: the sample before it adds nothing, the one after it all.
        """
        if not self.marks[-1].images:
            return
        end, (alone, beside) = self.end(), (self.company.alone, self.company.beside)
        images = max(0, end.images - alone[0] - beside[0])
        seconds = max(0.0, self._working(end) - alone[1] - beside[1])
        if is_beside:
            self.company = Company(alone=alone, beside=(beside[0] + images, beside[1] + seconds))
        else:
            self.company = Company(alone=(alone[0] + images, alone[1] + seconds), beside=beside)

    def _working(self, mark: Mark) -> float:
        """Return the seconds of updates up to a mark, the warm-up and what the process was stopped left out."""
        stopped = sum(seconds for bucket, seconds in self.stopped(mark.time).items() if bucket in UPDATING)
        return max(0.0, mark.updating - mark.seconds.get("warmup", 0.0) - stopped)

    def parts(self) -> tuple[PartTimes, ...]:
        """Return the mean update of :data:`STRETCHES` stretches; nothing where it was accounted for too seldom.

        The first pass over the data is left out where most of the attempt comes after it: there the feed decodes what
        it keeps for later, and takes cores from the updates meanwhile.
        """
        marks = [mark for mark in self.marks if mark.step > self.first_step + WARM_UPDATES]
        later = [mark for mark in marks if mark.images >= self.num_train - self.first_position]
        if len(later) > STRETCHES and later[-1].images - later[0].images > later[-1].images / 2:
            marks = later
        if len(marks) <= STRETCHES:
            return ()
        first, last = marks[0].images, marks[-1].images
        wanted = [first + (last - first) * at / STRETCHES for at in range(STRETCHES + 1)]
        chosen = [min(marks, key=lambda mark: abs(mark.images - images)) for images in wanted]
        stretches = []
        for before, after in pairwise(chosen):
            images, known = after.images - before.images, (self.stopped(before.time), self.stopped(after.time))
            if images <= 0:
                return ()
            seconds = {name: after.seconds.get(name, 0.0) - before.seconds.get(name, 0.0) for name in PARTS}
            stopped = {name: known[1].get(name, 0.0) - known[0].get(name, 0.0) for name in PARTS}
            seconds = {n: max(0.0, s) * self.batch_size / images for n, s in without_stops(seconds, stopped).items()}
            stretches.append(PartTimes(step=after.step, images=images, seconds=seconds))
        return tuple(stretches)

    def at_wall(self, wall: float) -> Mark:
        """Return the totals after so many seconds."""
        return self._at(lambda mark: mark.wall, wall)

    def after_first_epoch(self) -> Mark:
        """Return the totals after the first pass over the data, or at the end if there was no second one."""
        length = self.num_train
        if not length or self.position <= length:
            return self.end()
        return self.at_images(max(0, length - self.first_position))

    def at_images(self, images: int) -> Mark:
        """Return the totals after so many images."""
        return self._at(lambda mark: mark.images, images)

    def lose_after(self, step: int) -> bool:
        """Drop what came after this step's checkpoint, from which a later attempt resumed.

        Returns:
            Whether that checkpoint was made in this attempt, so that those before lose nothing.
        """
        if step > self.step or (step == self.step and self.ended is not None and self.updates):
            return True
        wall = 0.0
        if step in self.saved:
            wall = self.saved[step]
        elif self.started is not None and step > self.first_step:  # saved, but killed before that was written
            wall = self._at(lambda mark: mark.step, step).wall
        self.cut = wall if self.cut is None else min(self.cut, wall)
        return step in self.saved or (self.started is not None and step > self.first_step)

    def _at(self, key: Callable[[Mark], float], value: float) -> Mark:
        marks = [*self.marks, self.end()]
        for before, after in pairwise(marks):
            if key(after) >= value:
                length = key(after) - key(before)
                return before.towards(after, max(0.0, (value - key(before)) / length) if length > 0 else 1.0)
        return marks[-1]

    def _take_account(self, event: Accounted) -> None:
        before = self.marks[-1]
        if self._is_accounted and event.wall_seconds < before.wall:
            return
        if not self._is_accounted:  # the account covers the start, too
            self.marks = [Mark(0.0, event.time - event.wall_seconds, self.first_step, 0, {})]
            before, self._is_accounted = self.marks[0], True
        self.step, self.images = max(self.step, event.step), max(self.images, event.images)
        seconds: dict[str, float] = {"other": 0.0}
        for name, value in _positive(event.seconds).items():
            known = name if name in BUCKETS else "other"
            seconds[known] = seconds.get(known, 0.0) + value
        total, wall = sum(seconds.values()), max(0.0, event.wall_seconds)
        if total > wall:
            seconds = {name: value * wall / total for name, value in seconds.items()}
        else:
            seconds["other"] += wall - total
        mark = Mark(event.wall_seconds, event.time, event.step, event.images, seconds)
        if event.update_cpu_seconds is not None:
            mark.update_cpu = max(0.0, event.update_cpu_seconds)
        if event.exchange_seconds is not None:
            self.exchange = max(0.0, event.exchange_seconds)
        if event.warmup_images is not None:
            self.warmup_images = event.warmup_images
        self.launching_measured = event.launching_measured
        self._few_marks.add(self.marks, mark)
        if len(self._waits.unsettled) > 2 * len(self.marks) + MAX_KEPT:  # no figures of a feed ever come
            self.share_marks()
        self._waits.add_wait(mark, seconds.get("input", 0.0) - before.seconds.get("input", 0.0))
        self._clock, self._tail = event.time, _empty_tail()
        for step, wall in self._late.items():
            if wall > mark.wall:  # a clock that was set forward
                self.saved[step] = mark.wall
        self._late.clear()

    def share_marks(self) -> None:
        """Let the marks whose wait is not divided yet be the kept ones alone."""
        self._waits.unsettled = [mark for mark in self.marks if mark.pending is not None]

    def _complete(self, event: Ended) -> None:
        """Complete the wall time of a log without accounts from the total in its ``Ended`` event."""
        startup = _positive(self.started.startup) if self.started else {}
        missing = startup.get("process", 0.0) + event.seconds - self.wall
        if missing > 0 and not startup:
            base = self.marks[-1]
            base.wall, base.seconds = missing, {"startup": missing}
            self.marks[0].time = base.time - missing
            self.saved = {step: wall + missing for step, wall in self.saved.items()}
            self._late = {step: wall + missing for step, wall in self._late.items()}
        else:
            self._tail["other"] = max(0.0, self._tail["other"] + missing)


def without_stops(seconds: Mapping[str, float], stopped: Mapping[str, float]) -> dict[str, float]:
    """Return seconds by bucket without those in which the process was stopped: nothing of it ran.

    The look that finds a stop comes after it, and the loop may be at the next part of an update by then: where that
    holds less than the stop, the largest part holds it.

    >>> without_stops({"forward": 3.0, "optimizer": 0.5}, {"optimizer": 2.0})
    {'forward': 1.0, 'optimizer': 0.5}
    """
    left = dict(seconds)
    for bucket, length in stopped.items():
        is_elsewhere = bucket in UPDATING and left.get(bucket, 0.0) < length
        at = max(UPDATING, key=lambda name: left.get(name, 0.0)) if is_elsewhere else bucket
        left[at] = max(0.0, left.get(at, 0.0) - length)
    return left


def _empty_tail() -> dict[str, float]:
    """Return zero seconds for each bucket that events after the newest mark are added to; ``other``: unexplained."""
    return dict.fromkeys(("input", "update", "evaluation", "checkpoint", "other"), 0.0)


def _positive(seconds: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in seconds.items() if value > 0}
