"""One start of a run: its seconds by bucket, at its end and at any moment before."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from steadytrain.events import BUCKETS, UPDATING, Accounted, Ended, Evaluated, Event, FeedStats, Saved, Started, Step
from steadytrain.monitor.waits import NOTHING, Stages, Waits

PARTS = ("transfer", "host", "forward", "backward", "optimizer", "communication", "logging")
WARM_UPDATES = 2
"""The first updates of an attempt, whose computing is recorded as warm-up."""


@dataclass
class Mark:
    """A moment of an attempt up to which its seconds were accounted for: all are counted from the attempt's begin.

    ``time``: seconds since 1970; ``seconds``: by recorded bucket, ``update`` for updates that nothing tells the parts
    of; ``stages``: of the input wait; ``update_cpu``: processor time of the updates.
    """

    wall: float
    time: float
    step: int
    images: int
    seconds: Mapping[str, float]
    stages: Stages = NOTHING
    update_cpu: float = 0.0

    @property
    def updating(self) -> float:
        """Seconds of the updates."""
        return sum(self.seconds.get(bucket, 0.0) for bucket in UPDATING)

    def towards(self, later: Mark, share: float) -> Mark:
        """A moment between this mark and a later one, as if all had gone on evenly."""
        names = self.seconds.keys() | later.seconds.keys()
        return Mark(
            wall=_between(self.wall, later.wall, share),
            time=_between(self.time, later.time, share),
            step=round(_between(self.step, later.step, share)),
            images=round(_between(self.images, later.images, share)),
            seconds={n: _between(self.seconds.get(n, 0.0), later.seconds.get(n, 0.0), share) for n in names},
            stages=_stages([_between(a, b, share) for a, b in zip(self.stages, later.stages, strict=True)]),
            update_cpu=_between(self.update_cpu, later.update_cpu, share),
        )


@dataclass
class Tail:
    """What followed the newest mark, put together from single events: a clock, and what explains its seconds."""

    time: float
    wait: float = 0.0
    work: float = 0.0
    evaluation: float = 0.0
    checkpoint: float = 0.0
    unexplained: float = 0.0

    @property
    def wall(self) -> float:
        """All of it."""
        return self.wait + self.work + self.evaluation + self.checkpoint + self.unexplained

    def tick(self, time: float) -> None:
        """The clock goes on; one that is set back stands still."""
        self.unexplained += max(0.0, time - self.time)
        self.time = time

    def explain(self, seconds: float) -> float:
        """What has just happened took so long; whatever the clock says of it, it did."""
        self.unexplained = max(0.0, self.unexplained - seconds)
        return seconds


@dataclass
class Attempt:
    """One start of a run, absorbed event by event.

    ``cut``: its wall seconds that count; what came after was done for nothing (None: all count). ``saved``: step ->
    wall seconds at which its checkpoint was on disk. ``exchange``: seconds that exchanging with other ranks took, where
    that was told.
    """

    number: int
    started: Started | None
    began: float
    marks: list[Mark] = field(default_factory=list)
    saved: dict[int, float] = field(default_factory=dict)
    ended: Ended | None = None
    cut: float | None = None
    step: int = 0
    images: int = 0
    exchange: float | None = None
    _waits: Waits = field(default_factory=Waits)
    _is_accounted: bool = False

    def __post_init__(self) -> None:
        startup = sum(_positive(self.started.startup).values()) if self.started else 0.0
        self.step = self.first_step
        origin = Mark(wall=0.0, time=self.began - startup, step=self.step, images=0, seconds={})
        base = Mark(wall=startup, time=self.began, step=self.step, images=0, seconds={"startup": startup})
        self.marks = [origin, base]
        self._tail = Tail(self.began)

    @property
    def first_step(self) -> int:
        """Updates that were done before this attempt."""
        return self.started.step if self.started else 0

    @property
    def batch_size(self) -> int:
        """Images an update."""
        return self.started.batch_size if self.started else 0

    @property
    def updates(self) -> int:
        """Updates done in this attempt, whatever became of them."""
        return max(0, self.step - self.first_step)

    @property
    def wall(self) -> float:
        """Seconds since its process started."""
        return self.marks[-1].wall + self._tail.wall

    @property
    def last_time(self) -> float:
        """Of its newest event, seconds since 1970."""
        return self._tail.time

    def take(self, event: Event) -> None:
        """Absorb an event of this attempt; what tells nothing of time still moves the clock."""
        self._tail.tick(event.time)
        match event:
            case Step():
                self._stepped(event)
            case Accounted():
                self._accounted(event)
            case FeedStats():
                self._waits.told(event)
            case Evaluated():
                self._tail.evaluation += self._took(event.seconds)
            case Saved():
                self._tail.checkpoint += self._took(event.seconds)
                self.saved[event.step] = self.wall
            case Ended():
                self.ended = event
                self._close(event)

    def end(self) -> Mark:
        """Where it stands now."""
        tail, mark = self._tail, self.marks[-1]
        more = {"input": tail.wait, "evaluation": tail.evaluation, "checkpoint": tail.checkpoint}
        more |= {name: tail.work * share for name, share in _parts(mark.seconds).items()}
        more["other"] = tail.unexplained
        seconds = {n: mark.seconds.get(n, 0.0) + more.get(n, 0.0) for n in mark.seconds.keys() | more.keys()}
        stages = self._waits.after(tail.wait)
        end = Mark(self.wall, tail.time, self.step, max(self.images, mark.images), seconds, stages)
        end.update_cpu = mark.update_cpu * end.updating / mark.updating if mark.updating else 0.0
        return end

    def at_wall(self, wall: float) -> Mark:
        """Where it stood after so many seconds."""
        return self._at(lambda mark: mark.wall, wall)

    def at_images(self, images: int) -> Mark:
        """Where it stood after so many images."""
        return self._at(lambda mark: mark.images, images)

    def lose_after(self, step: int) -> bool:
        """A later attempt goes on from this step's checkpoint: what came after counts no more.

        Returns:
            Whether that checkpoint was made in this attempt, so that those before lose nothing.
        """
        if step > self.step or (step == self.step and self.ended is not None and self.updates):
            return True
        if step in self.saved:
            self._cut(self.saved[step])
            return True
        if self.started is not None and step > self.first_step:  # saved, but killed before it could say so
            self._cut(self._at(lambda mark: mark.step, step).wall)
            return True
        self._cut(0.0)
        return False

    def _cut(self, wall: float) -> None:
        self.cut = wall if self.cut is None else min(self.cut, wall)

    def _at(self, key: Callable[[Mark], float], value: float) -> Mark:
        marks = [*self.marks, self.end()]
        for before, after in pairwise(marks):
            if key(after) >= value:
                length = key(after) - key(before)
                return before.towards(after, max(0.0, (value - key(before)) / length) if length > 0 else 1.0)
        return marks[-1]

    def _stepped(self, event: Step) -> None:
        seconds, wait = max(0.0, event.seconds), max(0.0, min(event.wait_seconds, event.seconds))
        self._tail.explain(seconds)
        self._tail.wait += wait
        self._tail.work += seconds - wait
        self.step = event.step
        self.images += event.n

    def _took(self, seconds: float) -> float:
        """What of an evaluation or a checkpoint lies after the newest mark: that may have been made in the middle."""
        rest = min(seconds, self._tail.unexplained) if self._is_accounted else seconds
        return self._tail.explain(max(0.0, rest))

    def _accounted(self, event: Accounted) -> None:
        before = self.marks[-1]
        if not math.isfinite(event.wall_seconds) or (self._is_accounted and event.wall_seconds < before.wall):
            return
        if not self._is_accounted:  # it tells of the start, too
            self.marks = [Mark(0.0, event.time - event.wall_seconds, self.first_step, 0, {})]
            before, self._is_accounted = self.marks[0], True
        self.step, self.images = max(self.step, event.step), max(self.images, event.images)
        mark = Mark(event.wall_seconds, event.time, event.step, event.images, _whole(event))
        told = event.update_cpu_seconds
        mark.update_cpu = max(0.0, told) if isinstance(told, (int, float)) else 0.0
        if isinstance(event.exchange_seconds, (int, float)):
            self.exchange = max(0.0, event.exchange_seconds)
        self.marks.append(mark)
        self._waits.waited(mark, mark.seconds.get("input", 0.0) - before.seconds.get("input", 0.0))
        self._tail = Tail(event.time)
        late = {step: wall for step, wall in self.saved.items() if wall > mark.wall}
        self.saved.update(dict.fromkeys(late, mark.wall))  # a clock that was set forward

    def _close(self, event: Ended) -> None:
        """A log that does not account for its seconds tells at its end how many there were."""
        if self._is_accounted:
            return
        told = _positive(self.started.startup) if self.started else {}
        missing = told.get("process", 0.0) + event.seconds - self.wall
        if missing > 0 and not told:
            base = self.marks[-1]
            base.wall, base.seconds = missing, {"startup": missing}
            self.marks[0].time = base.time - missing
            self.saved = {step: wall + missing for step, wall in self.saved.items()}
        else:
            self._tail.unexplained = max(0.0, self._tail.unexplained + missing)


def _parts(seconds: Mapping[str, float]) -> dict[str, float]:
    """How an update is made up, as far as it was told; adds up to 1."""
    held = {name: seconds.get(name, 0.0) for name in PARTS}
    total = sum(held.values())
    return {name: value / total for name, value in held.items()} if total > 0 else {"update": 1.0}


def _whole(event: Accounted) -> dict[str, float]:
    """What was told, by known buckets and adding up: what is missing is in ``other``."""
    seconds: dict[str, float] = {}
    for name, value in _positive(event.seconds).items():
        known = name if name in BUCKETS else "other"
        seconds[known] = seconds.get(known, 0.0) + value
    total, wall = sum(seconds.values()), max(0.0, event.wall_seconds)
    if total > wall:
        return {name: value * wall / total for name, value in seconds.items()}
    return seconds | {"other": seconds.get("other", 0.0) + wall - total}


def _positive(seconds: Mapping[str, float]) -> dict[str, float]:
    known = {name: value for name, value in seconds.items() if isinstance(value, (int, float))}
    return {name: float(value) for name, value in known.items() if value > 0 and math.isfinite(value)}


def _between(a: float, b: float, share: float) -> float:
    return a + (b - a) * share


def _stages(values: list[float]) -> Stages:
    read, decode, augment, batch, other = values
    return read, decode, augment, batch, other
