"""A run that is watched: its events as they come, and what they add up to now. It reads, and holds nothing.

>>> import tempfile
>>> from steadytrain.config import Budget, Data, Model, Recipe
>>> recipe = Recipe(data=Data(train="a.rec"), model=Model("mlp"), budget=Budget(epochs=1))
>>> watched = Watched(Run.create(tempfile.mkdtemp() + "/a", recipe))
>>> watched.read(), watched.signs.status
(False, 'waiting')
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from steadytrain.events import (
    DeviceStats,
    Evaluated,
    Event,
    FeedPlaced,
    FeedStats,
    Logged,
    MachineStats,
    Noticed,
    Stalled,
    Started,
    Step,
)
from steadytrain.events.follow import Tail
from steadytrain.monitor.diagnose import Diagnosis, diagnose
from steadytrain.monitor.history import RunHistory
from steadytrain.reports import points
from steadytrain.reports.elapsed import Elapsed
from steadytrain.reports.history import History, images, take
from steadytrain.reports.liveness import Signs, signs
from steadytrain.reports.points import Point
from steadytrain.reports.remaining import remaining
from steadytrain.run import Run

NOW_SECONDS = 10.0


@dataclass
class Told:
    """All that the events of one generation of a log told.

    ``points``: of the charts, oldest first; ``newest``: of each series; ``stalled``: until an update is made again;
    ``facts``: how many events there were besides steps and log lines.
    """

    history: History
    book: RunHistory
    elapsed: Elapsed = field(default_factory=Elapsed)
    points: list[Point] = field(default_factory=list)
    newest: dict[str, Point] = field(default_factory=dict)
    recent: deque[Step] = field(default_factory=lambda: deque(maxlen=2000))
    feed: FeedStats | None = None
    placed: FeedPlaced | None = None
    machine: MachineStats | None = None
    devices: dict[int, DeviceStats] = field(default_factory=dict)
    stalled: Stalled | None = None
    noticed: Noticed | None = None
    facts: int = 0
    diagnosis: tuple[int, Diagnosis] | None = None


class Watched:
    """Follows a run's event logs and keeps what is shown of it.

    Args:
        run: it may go on, be over, or not have begun.

    Attributes:
        told: what its events told so far.
        generation: counts up where what was told before no longer holds: the log was replaced, or a restart took steps
            back. The points are then those that still count.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.generation = 0
        self._tails: dict[int, Tail] = {}
        self._begin_anew()

    def read(self) -> bool:
        """Take in what was written since the last time; whether that was anything."""
        return sum(1 for _ in self.reading()) > 0

    def reading(self) -> Iterator[float]:
        """The same in pieces, the share of the log that was read after each: a long run takes seconds."""
        for rank in self._ranks():
            tail = self._tails.setdefault(rank, Tail(self.run.directory / _name(rank)))
            generation = tail.generation
            for events in tail.chunks():
                if tail.generation != generation:
                    generation = tail.generation
                    self._begin_anew(but=rank)
                for event in events:
                    self._take(event)
                yield tail.offset / max(1, tail.size)
            if tail.generation != generation:
                self._begin_anew(but=rank)
                yield 1.0

    @property
    def signs(self) -> Signs:
        """Whether the run goes on, now."""
        return signs(self.told.history, time.time())

    @property
    def seconds(self) -> float:
        """Of the run's own wall time, up to now where it goes on."""
        told = self.told
        return told.elapsed.at(time.time()) if self.signs.status == "running" else told.elapsed.total

    @property
    def remaining(self) -> float | None:
        """Seconds until the run ends if it goes on like this; None where that is not known, or nothing moves."""
        seen = self.signs
        if seen.status != "running" or seen.silent or self.told.stalled is not None:
            return None
        left = remaining(self.told.history)
        return None if left is None else max(0.0, left - (time.time() - self._last_step_time()))

    @property
    def images_per_second(self) -> float | None:
        """Of the last seconds of updates, by the clock; None where there were none."""
        recent = self.told.recent
        if len(recent) < 2:
            return None
        last = recent[-1]
        lately = [one for one in recent if one.time >= last.time - NOW_SECONDS and one.attempt == last.attempt]
        spent = last.time - lately[0].time
        return (last.position - lately[0].position) / spent if spent > 0 else None

    @property
    def diagnosis(self) -> Diagnosis | None:
        """The verdict on what is known, found anew when there are new facts; None before the run began."""
        told = self.told
        if told.book.started is None:
            return None
        if told.diagnosis is None or told.diagnosis[0] != told.facts:
            told.diagnosis = (told.facts, diagnose(told.book.evidence()))
        return told.diagnosis[1]

    def _last_step_time(self) -> float:
        return self.told.recent[-1].time if self.told.recent else self.told.history.last_time

    def _ranks(self) -> list[int]:
        numbers = (path.stem.partition("-")[2] for path in self.run.directory.glob("events-*.jsonl"))
        return [0, *sorted(int(number) for number in numbers if number.isdecimal() and int(number))]

    def _begin_anew(self, but: int | None = None) -> None:
        """Forget what was told; the logs are read again, all but the one that is being read."""
        self.generation += 1
        self._tails = {rank: tail for rank, tail in self._tails.items() if rank == but}
        self.told = Told(History(self.run), RunHistory(self.run.recipe))

    def _take(self, event: Event) -> None:
        told = self.told
        told.book.take(event)
        if event.rank:
            return
        if isinstance(event, Started):
            self._restart(event)
        take(told.history, event)
        told.elapsed.seen(event.time)
        if not told.history.attempts:
            return
        _keep(told, event)
        told.facts += not isinstance(event, Step | Logged)
        try:
            made = _points(told, event)
        except (TypeError, AttributeError):  # a log that was edited by hand must not end the watch
            made = []
        for point in made:
            told.points.append(point)
            told.newest[point.series] = point

    def _restart(self, event: Started) -> None:
        told = self.told
        told.elapsed.begin(event)
        told.recent.clear()
        told.stalled = None
        kept = [one for one in told.points if one.series not in ("train", "val", "rate") or _step(one) <= event.step]
        if len(kept) < len(told.points):
            told.points = kept
            self.generation += 1


def _keep(told: Told, event: Event) -> None:
    match event:
        case Step():
            told.recent.append(event)
            told.stalled = None
        case FeedPlaced():
            told.placed = event
        case MachineStats():
            told.machine = event
        case DeviceStats():
            told.devices[event.index] = event
        case Stalled():
            told.stalled = event
        case Noticed():
            told.noticed = event


def _points(told: Told, event: Event) -> list[Point]:
    seconds = told.elapsed.at(event.time)
    match event:
        case Logged():
            done = images(told.history.attempts)
            return [points.trained(event, seconds), points.rated(event, seconds, done)]
        case Evaluated():
            return [points.evaluated(event, seconds)]
        case FeedStats():
            before, told.feed = told.feed, event
            made = points.fed(event, before, seconds)
            return [made] if made else []
        case MachineStats():
            return [points.machine(event, seconds)]
        case DeviceStats():
            return [points.device(event, seconds)]
    return []


def _step(point: Point) -> float:
    return point.row[2] or 0.0


def _name(rank: int) -> str:
    return f"events-{rank}.jsonl" if rank else "events.jsonl"
