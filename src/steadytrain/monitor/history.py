"""The book of a run: events in, one by one and while it runs; its ledger and its evidence out, at any time.

Durations that were measured (in ``Accounted``, ``Step``, ``Ended``) go before the times that events are stamped with,
so that a clock that was set moves nothing between two of them. What a killed attempt did after its last ``Accounted``,
and all of an attempt of a log without any, is put together from its steps, evaluations and checkpoints: what is left
of the stamped time is ``other``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from steadytrain.config import Recipe
from steadytrain.errors import RunError
from steadytrain.events import (
    Accounted,
    Ceilings,
    DeviceStats,
    Ended,
    Evaluated,
    Event,
    Failed,
    FeedStats,
    MachineStats,
    Saved,
    Started,
    Step,
    StepMeasured,
)
from steadytrain.monitor.attempt import WARM_UPDATES, Attempt, Mark
from steadytrain.monitor.evidence import Evidence
from steadytrain.monitor.gathered import FIRST, LATER, START, Gathered
from steadytrain.monitor.ledger import INPUT, STEADY, Ledger, empty
from steadytrain.monitor.means import COUNTED
from steadytrain.monitor.slices import LEAST_SECONDS, Point, Slice, merged, slices
from steadytrain.monitor.step_times import Paces

NUMBERS: dict[type[Event], tuple[str, ...]] = {
    Started: ("step", "steps", "steps_per_epoch", "batch_size"),
    Step: ("step", "position", "n", "seconds", "wait_seconds"),
    Accounted: ("step", "images", "wall_seconds"),
    FeedStats: ("step", "threads", "ready", *COUNTED),
    Evaluated: ("step", "seconds"),
    Saved: ("step", "seconds"),
    Ended: ("step", "seconds"),
    StepMeasured: ("fixed_seconds",),
    MachineStats: ("seconds", "cores"),
    DeviceStats: ("seconds", "index"),
}
"""What must be numbers for an event to be believed: a log that was edited by hand ends nothing."""


class RunHistory:
    """One run as its events tell it; it takes the events of all ranks, each rank's in their order.

    Args:
        recipe: of the run.
        rank: whose ledger this is; events of other ranks are kept in books of their own.
    """

    def __init__(self, recipe: Recipe, rank: int = 0) -> None:
        self.recipe = recipe
        self.rank = rank
        self.ended: Ended | Failed | None = None
        self._attempts: list[Attempt] = []
        self._away = 0.0
        self._gathered = Gathered()
        self._paces = Paces()
        self._others: dict[int, RunHistory] = {}

    @property
    def started(self) -> Started | None:
        """How the newest attempt began; None before the first did."""
        return next((one.started for one in reversed(self._attempts) if one.started), None)

    @property
    def position(self) -> int:
        """Images that the run has come to, repeated ones counted once."""
        return _position(self._attempts[-1]) if self._attempts else 0

    def take(self, event: Event) -> None:
        """Absorb one event; kinds that tell nothing of time only move the clock."""
        if event.rank != self.rank:
            if event.rank not in self._others:
                self._others[event.rank] = RunHistory(self.recipe, event.rank)
            self._others[event.rank].take(event)
            return
        if not _is_sound(event):
            return
        if isinstance(event, Started) or (isinstance(event, Accounted) and self._is_new(event)):
            self._begin(event)
        if isinstance(event, (Ended, Failed)):
            self.ended = event
        if event.attempt == 0 and isinstance(event, (Ceilings, StepMeasured)):  # while nobody trained
            self._gathered.take(event, LATER)
        if not self._attempts or self._is_new(event):
            return
        self._attempts[-1].take(event)
        self._watch(event)

    def ledger(self) -> Ledger:
        """Where the seconds went so far; all zeros before the run began."""
        total = empty()
        usual, wall = self._usual(), 0.0
        for attempt in self._attempts:
            counted = attempt.end() if attempt.cut is None else attempt.at_wall(attempt.cut)
            for bucket, seconds in self._by_bucket(counted, attempt, usual).items():
                total[bucket] += seconds
            total["lost"] += max(0.0, attempt.wall - counted.wall)
            wall += max(attempt.wall, counted.wall)
        step = self._attempts[-1].step if self._attempts else 0
        return Ledger(wall_seconds=wall, away_seconds=self._away, seconds=total, steps=step, images=self.position)

    def timeline(self, bins: int | None = None) -> tuple[Slice, ...]:
        """The run in stretches, oldest first: together they are the ledger.

        Args:
            bins: as many at most, and one more for each attempt and each loss; None: as fine as was told.
        """
        usual = self._usual()
        told = [one for attempt in self._attempts for one in self._slices(attempt, usual)]
        if bins is None:
            return tuple(told)
        return tuple(merged(told, sum(one.ended - one.began for one in told) / max(1, bins)))

    def evidence(self) -> Evidence:
        """What is known so far. Raises RunError before the run began."""
        started = self.started
        if started is None:
            raise RunError("nothing was started in this run yet: start it, then look at it again")
        ledger, gathered = self.ledger(), self._gathered
        first, later = self._by_epoch(started)
        used_first, used = self._cores_used(started)
        books = {self.rank: self} | self._others
        return Evidence(
            ledger=ledger,
            started=started,
            recipe=self.recipe,
            ended=self.ended,
            position=self.position,
            first_epoch=first,
            later=later,
            step_seconds=self._paces.seconds,
            wait_seconds=self._paces.waits,
            step_parts=_parts(ledger),
            slowest=self._paces.slowest,
            feed=gathered.feed(LATER, FIRST, START),
            feed_first=gathered.feed(FIRST, START),
            machine=_in_updates(gathered.machine(LATER, FIRST, START), used),
            machine_first=_in_updates(gathered.machine(FIRST, START), used_first),
            devices=gathered.gpus(LATER, FIRST, START),
            measured=gathered.measured,
            ceilings=gathered.ceilings,
            compiled=gathered.compiled,
            placed=gathered.placed,
            evaluations=gathered.evaluations,
            checkpoints=gathered.checkpoints,
            stalls=tuple(gathered.stalls),
            ranks={rank: book.ledger().shares for rank, book in books.items()},
            exchanging={rank: book.exchanging() for rank, book in books.items()},
            fed={rank: book.fed() for rank, book in books.items()},
            attempts=len(self._attempts),
        )

    def exchanging(self) -> float | None:
        """The share of its wall time that exchanging with other ranks takes by itself; None where that was not told."""
        told = [one.exchange for one in self._attempts if one.exchange is not None]
        wall = sum(one.wall for one in self._attempts)
        return sum(told) / wall if told and wall > 0 else None

    def fed(self) -> int:
        """Images that this rank's feed has made; 0 where that is not known."""
        told = self._gathered.feed(LATER, FIRST, START)
        return 0 if told is None else told.images

    def _is_new(self, event: Event) -> bool:
        """Whether it belongs to no attempt that is known to have begun."""
        return not self._attempts or event.attempt != self._attempts[-1].number

    def _begin(self, event: Event) -> None:
        attempt = Attempt(event.attempt, event if isinstance(event, Started) else None, event.time)
        if self._attempts and attempt.started:
            self._away += max(0.0, attempt.marks[0].time - self._attempts[-1].last_time)
            for earlier in reversed(self._attempts):
                if earlier.lose_after(attempt.started.step):
                    break
        self._attempts.append(attempt)
        self._gathered.begin()
        self.ended = None

    def _watch(self, event: Event) -> None:
        attempt = self._attempts[-1]
        warm = attempt.updates > WARM_UPDATES
        if isinstance(event, Step):
            if warm:
                self._paces.add(event.step, event.seconds, event.wait_seconds)
            return
        length = _num_train(attempt.started)
        is_first = not length or _position(attempt) <= length + attempt.batch_size
        self._gathered.take(event, START if not warm else FIRST if is_first else LATER)

    def _usual(self) -> dict[str, float]:
        """Seconds of an update's parts, of those that were not warm-up."""
        marks = [(one.marks[-1], one.marks[-1].step - one.first_step - WARM_UPDATES) for one in self._attempts]
        marks = [(mark, count) for mark, count in marks if count > 0]
        updates = sum(count for _, count in marks)
        names = ("forward", "backward", "optimizer")
        if not updates:
            return dict.fromkeys(names, 0.0)
        return {name: sum(mark.seconds.get(name, 0.0) for mark, _ in marks) / updates for name in names}

    def _by_bucket(self, mark: Mark, attempt: Attempt, usual: Mapping[str, float]) -> dict[str, float]:
        """The ledger's buckets from the recorded ones, up to a moment of an attempt; they add up to as much."""
        seconds = empty() | {name: value for name, value in mark.seconds.items() if name != "input"}
        for bucket, part in zip(INPUT, _portions(mark.seconds.get("input", 0.0), mark.stages), strict=True):
            seconds[bucket] = part
        updates = max(0, mark.step - attempt.first_step)
        back = min(seconds["warmup"], min(WARM_UPDATES, updates) * sum(usual.values()))
        if back > 0:
            seconds["warmup"] -= back
            for name, value in usual.items():
                seconds[name] += back * value / sum(usual.values())
        if self._gathered.measured:
            _move_to_host(seconds, self._gathered.measured)
        return seconds

    def _slices(self, attempt: Attempt, usual: Mapping[str, float]) -> Iterable[Slice]:
        marks = [*attempt.marks[1:], attempt.end()]
        if attempt.cut is not None:
            at = attempt.at_wall(attempt.cut)
            marks = [mark for mark in marks if mark.wall < at.wall] + [at]
        yield from slices(
            [Point(mark.wall, mark.time, self._by_bucket(mark, attempt, usual)) for mark in marks], attempt.number
        )
        last, lost = marks[-1], attempt.wall - marks[-1].wall
        if attempt.cut is not None and lost > LEAST_SECONDS:
            yield Slice(began=last.time, ended=last.time + lost, attempt=attempt.number, seconds={"lost": lost})

    def _by_epoch(self, started: Started) -> tuple[dict[str, float] | None, dict[str, float] | None]:
        """Shares of the steady buckets in the first pass over the data and after it."""
        length = _num_train(started)
        if not length or self.position <= length + 2 * started.batch_size:
            return None, None
        usual, first, later = self._usual(), empty(), empty()
        for attempt in self._attempts:
            then, now = (self._by_bucket(mark, attempt, usual) for mark in (_middle(attempt), attempt.end()))
            for bucket in STEADY:
                first[bucket] += then[bucket]
                later[bucket] += max(0.0, now[bucket] - then[bucket])
        return _shares(first), _shares(later)

    def _cores_used(self, started: Started) -> tuple[float | None, float | None]:
        """Cores that the process uses in its updates: in the first pass over the data, and after it if there was more.

        None where that was not told, or is not all: a feed in a process of its own computes as well.
        """
        if self._gathered.placed is not None and self._gathered.placed.place == "process":
            return None, None
        ends = [(_middle(attempt), attempt.end()) for attempt in self._attempts]
        first = _ratio((middle.update_cpu, middle.updating) for middle, _ in ends)
        later = _ratio((end.update_cpu - mid.update_cpu, end.updating - mid.updating) for mid, end in ends)
        return first, later or first


def _middle(attempt: Attempt) -> Mark:
    """Where an attempt stood at the end of the first pass over the data; at its end where it came to no second one."""
    length = _num_train(attempt.started)
    if not length or _position(attempt) <= length:
        return attempt.end()
    return attempt.at_images(max(0, length - _position(attempt) + attempt.images))


def _ratio(parts: Iterable[tuple[float, float]]) -> float | None:
    """The sum of the first over the sum of the second; None where there is nothing of either."""
    told = list(parts)
    above, below = sum(one for one, _ in told), sum(one for _, one in told)
    return above / below if above > 0 and below > 0 else None


def _in_updates(machine: MachineStats | None, used: float | None) -> MachineStats | None:
    """What a machine does during the updates of the run, from what it does all the time and what they use of it.

    Where the run waits for a disk or a lock between updates, or evaluates, it uses less of its cores then, or more.
    """
    if machine is None or machine.cpu is None or machine.idle is None or used is None:
        return machine
    there = machine.cpu + machine.idle
    return replace(machine, cpu=min(used, there), idle=max(0.0, there - used))


def _position(attempt: Attempt) -> int:
    return attempt.first_step * attempt.batch_size + attempt.images


def _num_train(started: Started | None) -> int:
    told = started.data.get("num_train") if started else None
    return told if isinstance(told, int) else 0


def _portions(seconds: float, weights: Iterable[float]) -> list[float]:
    held = list(weights)
    total = sum(held)
    return [seconds * one / total for one in held] if total > 0 else [0.0] * (len(held) - 1) + [seconds]


def _move_to_host(seconds: dict[str, float], measured: StepMeasured) -> None:
    """What of the forward and backward passes does not shrink with the batch, the part measured, is the host's."""
    full = measured.passes.get("full", 0.0)
    part = min(1.0, max(0.0, measured.fixed_seconds / full)) if full > 0 else 0.0
    for name in ("forward", "backward"):
        seconds["host"] += seconds[name] * part
        seconds[name] *= 1 - part


def _shares(seconds: Mapping[str, float]) -> dict[str, float]:
    total = sum(seconds[bucket] for bucket in STEADY)
    return {bucket: seconds[bucket] / total if total > 0 else 0.0 for bucket in STEADY}


def _parts(ledger: Ledger) -> dict[str, float]:
    """Mean seconds of an update by part, those of the update that counts."""
    if ledger.steps <= 0:
        return {}
    parts = {bucket: ledger.seconds[bucket] for bucket in STEADY if bucket not in INPUT}
    parts["input"] = sum(ledger.seconds[bucket] for bucket in INPUT)
    return {name: seconds / ledger.steps for name, seconds in parts.items()}


def _is_sound(event: Event) -> bool:
    numbers = (event.time, *(getattr(event, name) for name in NUMBERS.get(type(event), ())))
    if isinstance(event, StepMeasured):
        numbers = (*numbers, *event.passes.values()) if isinstance(event.passes, Mapping) else (None,)
    return all(isinstance(one, (int, float)) and -1e18 < one < 1e18 for one in numbers) and (
        not isinstance(event, Accounted) or isinstance(event.seconds, Mapping)
    )
