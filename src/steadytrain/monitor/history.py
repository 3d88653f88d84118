"""The one fold of a run's events: events in, one by one and while it runs; ledger, figures and evidence out.

Measured durations (in ``Accounted``, ``Step``, ``Ended``) go before the times that events are stamped with, so that a
clock that was set moves nothing between two of them. What a killed attempt did after its last ``Accounted``, and all of
an attempt of a log without any, is put together from its steps, evaluations and checkpoints: what is left of the
stamped time is ``other``.

A restarted run repeats the steps after its last checkpoint. What it logged of them before belongs to weights that are
lost, so each ``Started`` takes back the figures after the step it goes on from. The time of the lost steps counts.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import cast

from steadytrain.config import Recipe
from steadytrain.errors import RunError
from steadytrain.events import (
    Accounted,
    Ceilings,
    Compiled,
    DeviceStats,
    Ended,
    EpochTrained,
    Evaluated,
    Event,
    Failed,
    FeedPlaced,
    Logged,
    MachineStats,
    Noticed,
    Saved,
    Stalled,
    Started,
    Step,
    StepMeasured,
    Unreadable,
)
from steadytrain.format import count
from steadytrain.monitor.attempt import WARM_UPDATES, Attempt, Mark
from steadytrain.monitor.evidence import E, Evidence, RankShares, Stretch
from steadytrain.monitor.figures import RunReach, RunScore
from steadytrain.monitor.ledger import INPUT, SHORTEST_SLICE, STEADY, Ledger, Slice, empty, merge_slices, slices
from steadytrain.monitor.samples import FIRST, LATER, START, RunSamples, StepTimes
from steadytrain.run import Run


@dataclass(frozen=True, kw_only=True)
class Interruption:
    """The end of an attempt that another one followed, and the seconds that it cost.

    Args:
        attempt: its number.
        how: in a word or some: saved and stopped, interrupted, failed, killed.
        step: updates done when it ended.
        again_seconds: of its work after the checkpoint that the next attempt went on from: done again.
        start_seconds: of the next attempt, from its process's start to usual updates.
        away_seconds: between the two.
    """

    attempt: int
    how: str
    step: int
    again_seconds: float
    start_seconds: float
    away_seconds: float

    @property
    def paid_seconds(self) -> float:
        """Paid seconds in which the run did not get further."""
        return self.again_seconds + self.start_seconds

    @property
    def seconds(self) -> float:
        """All that the interruption cost, the time without a machine included."""
        return self.paid_seconds + self.away_seconds


def goodput(interruptions: Sequence[Interruption], ledger: Ledger) -> float | None:
    """Return the share of a run's time, pauses included, that interruptions did not cost; None before it has begun.

    >>> cost = Interruption(attempt=1, how="killed", step=9, again_seconds=2.0, start_seconds=3.0, away_seconds=5.0)
    >>> goodput([cost], Ledger(wall_seconds=95.0, away_seconds=5.0, seconds=empty(), steps=1, images=1))
    0.9
    """
    total = ledger.wall_seconds + ledger.away_seconds
    return max(0.0, 1 - sum(cost.seconds for cost in interruptions) / total) if total > 0 else None


MAX_RECENT = 2000
MAX_RATES = 8000


class RunHistory:
    """One run, folded from the events of all ranks; those of each rank must come in their order.

    Args:
        recipe: of the run.
        rank: whose history this is; other ranks have histories of their own in :attr:`ranks`.

    Attributes:
        attempts: the starts of the run.
        ended: how the newest attempt ended; None while it goes on or if it was killed.
        endings: how each attempt ended that did not die.
        logged, evaluated: without those that a restart took back; so, too,
        trained: what each epoch came to, by its number.
        rates: the learning rates of steps, of a long run those of some, and the log lines' where steps were not read.
        saved, noticed, stalls: all of them.
        devices: the newest sample of each GPU, by its index.
        stalled: the newest standstill, until an update is made again.
        recent: the newest steps of the newest attempt.
        repeated_steps: updates done again after restarts.
        last_time: of the newest event, seconds since 1970.
        num_facts: events besides steps and log lines.
        unreadable: lines of the logs, of any rank, that are no events.
    """

    def __init__(self, recipe: Recipe, rank: int = 0) -> None:
        self.recipe = recipe
        self.rank = rank
        self.attempts: list[Attempt] = []
        self.away_seconds = 0.0
        self.ended: Ended | Failed | None = None
        self.endings: list[Ended | Failed] = []
        self.logged: list[Logged] = []
        self.evaluated: list[Evaluated] = []
        self.trained: dict[int, EpochTrained] = {}
        self.rates: list[Step | Logged] = []
        self.saved: list[Saved] = []
        self.noticed: list[Noticed] = []
        self.stalls: list[Stalled] = []
        self.stalled: Stalled | None = None
        self.devices: dict[int, DeviceStats] = {}
        self._newest: dict[type[Event], Event] = {}
        self.recent: deque[Step] = deque(maxlen=MAX_RECENT)
        self.repeated_steps = 0
        self.last_time = 0.0
        self.num_facts = 0
        self.unreadable = 0
        self.samples = RunSamples()
        self.step_times = StepTimes()
        self.ranks: dict[int, RunHistory] = {rank: self}

    def take(self, event: Event) -> None:
        """Fold in one event; every kind at least moves the clock."""
        if isinstance(event, Unreadable):
            self.unreadable += 1
            return
        if event.rank != self.rank:
            if event.rank not in self.ranks:
                self.ranks[event.rank] = RunHistory(self.recipe, event.rank)
            self.ranks[event.rank].take(event)
            return
        is_new = not self.attempts or event.attempt != self.attempts[-1].number
        if isinstance(event, Started) or (is_new and isinstance(event, Accounted)):
            self._begin(Attempt(event.attempt, event if isinstance(event, Started) else None, event.time))
            is_new = False
        if event.attempt == 0 and isinstance(event, (Ceilings, StepMeasured)):  # measured while nobody trained
            self._newest[type(event)] = event
        if not self.attempts:
            self.ended = event if isinstance(event, Failed) else None
            return
        self.last_time = max(self.last_time, event.time)
        if not isinstance(event, (Step, Logged)):
            self.num_facts += 1
            self._newest[type(event)] = event
        match event:
            case Step():
                self.recent.append(event)
                self.stalled = None
                self._take_rate(event)
            case Logged():
                self.logged.append(event)
                self._take_rate(event)
            case EpochTrained():
                self.trained[event.epoch] = event
            case Evaluated():
                self.evaluated.append(event)
            case Saved():
                self.saved.append(event)
            case Noticed():
                self.noticed.append(event)
            case Stalled():
                self.stalled = event
                self.stalls.append(event)
            case Ended() | Failed():
                self.ended = event
                self.endings.append(event)
            case DeviceStats():
                self.devices[event.index] = event
        if is_new:
            return
        attempt = self.attempts[-1]
        attempt.take(event)
        is_warm, length = attempt.updates > WARM_UPDATES, attempt.num_train
        if not isinstance(event, Step):
            is_first = not length or attempt.position <= length + attempt.batch_size
            self.samples.take(event, START if not is_warm else FIRST if is_first else LATER)
        elif is_warm:
            self.step_times.add(event.step, event.seconds, event.wait_seconds)

    def _begin(self, attempt: Attempt) -> None:
        if self.attempts and attempt.started:
            before, step = self.attempts[-1], attempt.started.step
            self.away_seconds += max(0.0, attempt.process_began - before.last_time)
            self.repeated_steps += max(0, before.step - step)
            for earlier in reversed(self.attempts):
                if earlier.lose_after(step):
                    break
            self.logged = [line for line in self.logged if line.step <= step]
            self.evaluated = [score for score in self.evaluated if score.step <= step]
            self.trained = {epoch: means for epoch, means in self.trained.items() if means.step <= step}
            self.rates = [event for event in self.rates if event.step <= step]
        if self.attempts:
            before = self.attempts[-1]
            attempt.process_began = max(attempt.process_began, before.last_time)  # no time counts twice
            attempt.before = before.before + before.last_time - before.process_began
        self.attempts.append(attempt)
        self.samples.begin_attempt()
        self._newest.pop(Compiled, None)
        self.recent.clear()
        self.stalled = self.ended = None

    def _take_rate(self, event: Step | Logged) -> None:
        if self.rates and event.step == self.rates[-1].step:
            return
        self.rates.append(event)
        if len(self.rates) > MAX_RATES:
            del self.rates[1::2]

    @property
    def started(self) -> Started | None:
        """The ``Started`` event of the newest attempt; None before the first."""
        return next((attempt.started for attempt in reversed(self.attempts) if attempt.started), None)

    @property
    def finished(self) -> bool:
        """Return whether the run was trained to its end."""
        return any(isinstance(event, Ended) and event.status == "finished" for event in self.endings)

    @property
    def step(self) -> int:
        """Updates done that count."""
        return self.attempts[-1].step if self.attempts else 0

    @property
    def position(self) -> int:
        """Images that the run has reached, repeated ones counted once."""
        return self.attempts[-1].position if self.attempts else 0

    @property
    def images(self) -> int:
        """All images that were trained on, those of repeated steps included."""
        return sum(attempt.images for attempt in self.attempts)

    @property
    def is_foreign(self) -> bool:
        """Return whether another program trained: what its log leaves out is not a number here."""
        return self.started is not None and not self.started.digest

    @property
    def is_multi_label(self) -> bool:
        """Return whether an image may have several labels: evaluations are then ranked by mAP."""
        return self.started is not None and self.started.is_multi_label

    def epoch(self, step: float) -> float:
        """Return how many times the training set has been seen after so many updates: no more than was asked for."""
        per_epoch = self.started.steps_per_epoch if self.started else 0.0
        if self.started is None or per_epoch <= 0:
            return 0.0
        return min(self.started.batches.progress(step) / per_epoch, self.recipe.budget.epochs or math.inf)

    @property
    def progress(self) -> RunReach:
        """The run's progress; zeros before it began."""
        if (started := self.started) is None:
            return RunReach()
        return RunReach(
            step=self.step,
            steps=started.steps,
            epoch=self.epoch(self.step),
            epochs=self.epoch(started.steps),
            share=started.batches.progress(self.step) / started.batches.first if started.steps else 0.0,
        )

    @property
    def best(self) -> RunScore | None:
        """The evaluation with the highest top-1, or mAP (the first of equals)."""
        known = [event.score if math.isfinite(event.score) else -1.0 for event in self.evaluated]
        return RunScore.of(self.evaluated[known.index(max(known))]) if known else None

    @property
    def last(self) -> RunScore | None:
        """The newest evaluation."""
        return RunScore.of(self.evaluated[-1]) if self.evaluated else None

    def elapsed(self, time: float | None = None) -> float:
        """Return the seconds that the run had taken at a moment (None: its newest event), without pauses in between.

        A moment in a pause is the pause's beginning; the newest attempt may go on.
        """
        if not self.attempts:
            return 0.0
        newest = self.attempts[-1]
        time = newest.last_time if time is None else time
        attempts = [attempt for attempt in self.attempts if attempt.process_began <= time]
        attempt = attempts[-1] if attempts else self.attempts[0]
        until = time if attempt is newest else min(time, attempt.last_time)
        return attempt.before + max(0.0, until - attempt.process_began)

    def newest(self, kind: type[E]) -> E | None:
        """Return the newest event of a kind; None where there is none. Of GPUs see :attr:`devices`."""
        return cast("E | None", self._newest.get(kind))

    def evidence(self) -> Evidence:
        """Return the facts that a verdict is based on. Raises RunError before the run began."""
        if self.started is None:
            raise RunError("this run has not started yet: start it, then try again")
        middles = [attempt.after_first_epoch() for attempt in self.attempts]
        ends = [attempt.end() for attempt in self.attempts]
        first_epoch = later = None
        first_part = 0.0
        length = self.attempts[-1].num_train
        if length and self.position > length + 2 * self.started.batch_size:
            first_seconds, later_seconds = empty(), empty()
            for attempt, middle, end in zip(self.attempts, middles, ends, strict=True):
                then, now = self.by_bucket(middle, attempt), self.by_bucket(end, attempt)
                for bucket in STEADY:
                    first_seconds[bucket] += then[bucket]
                    later_seconds[bucket] += max(0.0, now[bucket] - then[bucket])
            first_epoch, later = _steady_shares(first_seconds), _steady_shares(later_seconds)
            spent = [sum(seconds[bucket] for bucket in STEADY) for seconds in (first_seconds, later_seconds)]
            first_part = _ratio(spent[0], sum(spent)) or 0.0
        cores_first = cores = None
        placed, samples = self.newest(FeedPlaced), self.samples
        if placed is None or placed.place != "process":  # a feed in a process of its own computes as well
            cpu_first, cpu = (sum(mark.update_cpu for mark in marks) for marks in (middles, ends))
            updating_first, updating = (sum(mark.updating for mark in marks) for marks in (middles, ends))
            cores_first = _ratio(cpu_first, updating_first)
            cores = _ratio(cpu - cpu_first, updating - updating_first) or cores_first
        return Evidence(
            ledger=self.ledger(),
            started=self.started,
            recipe=self.recipe,
            position=self.position,
            first=Stretch(
                shares=first_epoch,
                feed=samples.feed(FIRST, START),
                machine=_during_updates(samples.machine(FIRST, START), cores_first),
            ),
            steady=Stretch(
                shares=later,
                feed=samples.feed(LATER, FIRST, START),
                machine=_during_updates(samples.machine(LATER, FIRST, START), cores),
            ),
            whole=samples.whole.result(),
            first_part=first_part,
            updates=self.step_times.result(),
            events=dict(self._newest),
            devices=samples.gpus(LATER, FIRST, START),
            evaluations=samples.evaluations,
            checkpoints=samples.checkpoints,
            ranks={rank: other._rank_shares() for rank, other in self.ranks.items()},
            servers=samples.servers,
            stopped=self._stopped_seconds,
            grants=self.attempts[-1].grants(),
            parts=self.attempts[-1].parts(),
            attempts=len(self.attempts),
            unreadable=self.unreadable,
        )

    def _rank_shares(self) -> RankShares:
        feed = self.samples.feed(LATER, FIRST, START)
        ledger = self.ledger()
        return RankShares(
            by_bucket=ledger.shares,
            exchanging=self.exchanging,
            images=feed.images if feed else 0,
            stopped=self._stopped_seconds / ledger.wall_seconds if ledger.wall_seconds > 0 else 0.0,
        )

    @property
    def _stopped_seconds(self) -> float:
        return sum(sum(attempt.stopped().values()) for attempt in self.attempts)

    @property
    def exchanging(self) -> float | None:
        """Share of the wall time that exchanging with other ranks takes; None where it is not recorded."""
        seconds = [attempt.exchange for attempt in self.attempts if attempt.exchange is not None]
        wall = sum(attempt.wall for attempt in self.attempts)
        return sum(seconds) / wall if seconds and wall > 0 else None

    def ledger(self) -> Ledger:
        """Return the ledger so far; all zeros before the run began."""
        total, usual, wall, warmup_images = empty(), self._usual_parts(), 0.0, 0
        for attempt in self.attempts:
            counted = attempt.end() if attempt.cut is None else attempt.at_wall(attempt.cut)
            for bucket, seconds in self.by_bucket(counted, attempt, usual).items():
                total[bucket] += seconds
            total["lost"] += max(0.0, attempt.wall - counted.wall)
            wall += max(attempt.wall, counted.wall)
            if not any(usual.values()):  # no update tells what of the warm-up is usual: all of it stays there
                warmup_images += min(attempt.warmup_images or 0, counted.images)
        return Ledger(
            wall_seconds=wall,
            away_seconds=self.away_seconds,
            seconds=total,
            steps=self.step,
            images=self.position,
            warmup_images=warmup_images,
        )

    def interruptions(self) -> tuple[Interruption, ...]:
        """Return what each end of an attempt before the run's end cost, oldest first."""
        endings, usual = {event.attempt: event for event in self.endings}, self._usual_parts()
        costs = []
        for before, after in pairwise(self.attempts):
            counted = before.wall if before.cut is None else min(before.cut, before.wall)
            end = endings.get(before.number)
            seconds = self.by_bucket(after.end(), after, usual)
            costs.append(
                Interruption(
                    attempt=before.number,
                    how="killed" if end is None else "failed" if isinstance(end, Failed) else end.words,
                    step=before.step,
                    again_seconds=before.wall - counted,
                    start_seconds=seconds["startup"] + seconds["warmup"],
                    away_seconds=max(0.0, after.process_began - before.last_time),
                )
            )
        return tuple(costs)

    def timeline(self, bins: int | None = None) -> tuple[Slice, ...]:
        """Return the run in stretches, oldest first: together they are the ledger.

        Args:
            bins: as many at most, and one more for each attempt and each loss; None: as fine as was recorded.
        """
        usual, pieces = self._usual_parts(), list[Slice]()
        for attempt in self.attempts:
            marks = [*attempt.marks[1:], attempt.end()]
            if attempt.cut is not None:
                cut = attempt.at_wall(attempt.cut)
                marks = [mark for mark in marks if mark.wall < cut.wall] + [cut]
            totals = [(mark.wall, mark.time, self.by_bucket(mark, attempt, usual)) for mark in marks]
            pieces += slices(totals, attempt.number)
            last, lost = marks[-1], attempt.wall - marks[-1].wall
            if attempt.cut is not None and lost > SHORTEST_SLICE:
                seconds = {"lost": lost}
                pieces.append(Slice(began=last.time, ended=last.time + lost, attempt=attempt.number, seconds=seconds))
        if bins is None:
            return tuple(pieces)
        return tuple(merge_slices(pieces, sum(piece.ended - piece.began for piece in pieces) / max(1, bins)))

    def _usual_parts(self) -> dict[str, float]:
        """Return the mean seconds that an image takes in the parts of an update, without the warm-up."""
        marks = [(a.marks[-1], a.marks[-1].images - _warmup_images(a)) for a in self.attempts]
        marks = [(mark, count) for mark, count in marks if count > 0]
        images = sum(count for _, count in marks)
        names = ("forward", "backward", "optimizer", "update")
        return {name: sum(m.seconds.get(name, 0.0) for m, _ in marks) / images if images else 0.0 for name in names}

    def by_bucket(self, mark: Mark, attempt: Attempt, usual: Mapping[str, float] | None = None) -> dict[str, float]:
        """Return the ledger's buckets up to a moment of an attempt; they add up to as much as the recorded ones.

        ``usual``: the seconds of an image in the parts of an update, where they are known already.
        """
        usual = self._usual_parts() if usual is None else usual
        recorded = dict(mark.seconds)
        for bucket, stopped in attempt.stopped(mark.time).items():  # nothing of the process ran: it is no bucket's work
            some = min(stopped, recorded.get(bucket, 0.0))
            recorded |= {bucket: recorded.get(bucket, 0.0) - some, "other": recorded.get("other", 0.0) + some}
        seconds = empty() | {name: value for name, value in recorded.items() if name != "input"}
        wait, weight = recorded.get("input", 0.0), sum(mark.stages)
        for bucket, stage in zip(INPUT, mark.stages, strict=True):
            seconds[bucket] = wait * stage / weight if weight > 0 else 0.0
        if weight <= 0:
            seconds["input_other"] = wait
        # The first updates compute, too: their usual part is no warm-up.
        usual_image = sum(usual.values())
        usual_warmup = min(seconds["warmup"], min(_warmup_images(attempt), mark.images) * usual_image)
        if usual_warmup > 0:
            seconds["warmup"] -= usual_warmup
            for name, value in usual.items():
                seconds[name] += usual_warmup * value / usual_image
        if measured := self.newest(StepMeasured):  # what of the passes does not shrink with the batch is the host's
            full = measured.passes.get("full", 0.0)
            part = min(1.0, max(0.0, measured.fixed_seconds / full)) if full > 0 else 0.0
            for name in ("forward", "backward"):
                if name not in attempt.launching_measured:
                    seconds["host"] += seconds[name] * part
                    seconds[name] *= 1 - part
        return seconds


def _warmup_images(attempt: Attempt) -> int:
    """Return the images of the updates whose computing is recorded as warm-up."""
    recorded = attempt.warmup_images
    return WARM_UPDATES * attempt.batch_size if recorded is None else recorded


def _steady_shares(seconds: Mapping[str, float]) -> dict[str, float]:
    total = sum(seconds[bucket] for bucket in STEADY)
    return {bucket: seconds[bucket] / total if total > 0 else 0.0 for bucket in STEADY}


def _ratio(above: float, below: float) -> float | None:
    return above / below if above > 0 and below > 0 else None


def _during_updates(machine: MachineStats | None, used: float | None) -> MachineStats | None:
    """Return the machine's figures during updates, given its overall figures and the cores that updates use.

    Where the run waits for a disk or a lock between updates, or evaluates, it uses less of its cores then, or more.
    """
    if machine is None or machine.cpu is None or machine.idle is None or used is None:
        return machine
    cores = machine.cpu + machine.idle
    return replace(machine, cpu=min(used, cores), idle=max(0.0, cores - used))


def read_history(run: Run, *, condensed: bool = False, all_ranks: bool = True) -> RunHistory:
    """Read a run's history; the run may still be going on.

    Args:
        run: to read.
        condensed: without the steps that were summed up: the same ledger much faster, but no quantiles of step time.
        all_ranks: False: rank 0 alone.

    Raises:
        RunError: nothing was started in it yet.
    """
    history = RunHistory(run.recipe)
    for rank in run.ranks() if all_ranks else [0]:
        for event in run.events(rank, condensed=condensed):
            history.take(event)
    if history.started is not None:
        return history
    if isinstance(history.ended, Failed):
        raise RunError(f"{run.directory} never started: {history.ended.error}: {history.ended.message}")
    if history.unreadable:
        damaged = count(history.unreadable, "line")
        raise RunError(f"{run.directory}: no start of the run can be read in its event log ({damaged} damaged)")
    raise RunError(f"{run.directory} has no events yet: start the run, then try again")


def ledger(run: Run | str | Path) -> Ledger:
    """Return the ledger of a run, or of the run in a folder: of its first rank, so far.

    Raises:
        RunError: nothing was started in it yet.
    """
    return read_history(Run.open(run), condensed=True, all_ranks=False).ledger()
