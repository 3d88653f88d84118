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
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import cast

from msgspec.structs import asdict, replace

from steadytrain.config import Recipe
from steadytrain.config.figures import USUAL
from steadytrain.errors import RunError
from steadytrain.events import (
    Accounted,
    Ceilings,
    DeviceStats,
    Ended,
    EpochTrained,
    Evaluated,
    Event,
    Failed,
    FeedPlaced,
    FeedStats,
    Logged,
    MachineStats,
    Noticed,
    Saved,
    Score,
    Stalled,
    Started,
    Step,
    StepMeasured,
    Tested,
    Tried,
    Unreadable,
    top1_95,
)
from steadytrain.format import epoch as epoch_words
from steadytrain.format import percent, score_name
from steadytrain.intervals import Interval
from steadytrain.monitor.attempt import WARM_UPDATES, Attempt, Mark, without_stops
from steadytrain.monitor.evidence import E, Evidence, RankShares, Stretch
from steadytrain.monitor.ledger import (
    INPUT,
    SHORTEST_SLICE,
    STEADY,
    Interruption,
    Ledger,
    Slice,
    empty,
    merge_slices,
    slices,
)
from steadytrain.monitor.lines import LogLines
from steadytrain.monitor.samples import FIRST, LATER, SAMPLED, START, RunSamples, StepTimes
from steadytrain.monitor.series import DRAWN, MAX_POINTS, TAKEN_BACK, ChartPoint, points_of, thin_points

MAX_RECENT = 2000


@dataclass(frozen=True, kw_only=True)
class RunReach:
    """Progress of a run: updates that count, and passes over the data; ``steps`` and ``epochs`` are the whole run's.

    ``share``: of the run's images that it has come to. All are 0 where a log does not tell them.
    """

    step: int = 0
    steps: int = 0
    epoch: float = 0.0
    epochs: float = 0.0
    share: float = 0.0


@dataclass(frozen=True, kw_only=True)
class RunScore:
    """One evaluation; ``top1_95``: the 95 % confidence interval of ``top1`` (:func:`~steadytrain.events.top1_95`).

    ``macro_recall``: the mean of the classes' recall; None in logs of older versions.

    Where an image may have several labels, ``mean_ap`` is the main number, ``top1`` the images with every label right.
    """

    step: int
    epoch: float
    n: int
    loss: float | None
    top1: float
    top1_95: Interval
    top5: float | None
    seconds: float
    weights: str
    mean_ap: float | None = None
    macro_recall: float | None = None
    figure: str | None = None
    figure_value: float | None = None
    effective_n: float | None = None

    @property
    def value(self) -> float:
        """The main number: top-1; of several labels, mAP."""
        return self.top1 if self.mean_ap is None else self.mean_ap

    @property
    def words(self) -> str:
        """The main number with its interval, in percent."""
        return percent(self.value, 1) + (f" ({self.interval.words})" if self.interval else "")

    @property
    def best_label(self) -> str:
        """The name of the main number of the best weights, where another figure may have chosen them."""
        name = score_name(self.mean_ap is not None)
        is_score = self.figure in ((None, USUAL, "top1") if self.mean_ap is None else (None, "map"))
        return f"best {name}" if is_score else f"{name}, best weights"

    @property
    def when(self) -> str:
        """Say when it was made: after a probe, or at which epoch."""
        return f"at epoch {epoch_words(self.epoch)}" if self.epoch else "by the probe"

    @property
    def interval(self) -> Interval | None:
        """The 95 % confidence interval of the main number; None for mAP, or where it or ``n`` is not known."""
        return self.top1_95 if self.mean_ap is None and math.isfinite(self.top1) and self.n > 0 else None

    @staticmethod
    def of(event: Score) -> RunScore:
        """Return the score that an event holds."""
        values = {name: value for name, value in asdict(event).items() if name in RunScore.__dataclass_fields__}
        return RunScore(**values, top1_95=top1_95(event))


@dataclass(frozen=True, kw_only=True)
class UnseenScore(RunScore):
    """The score on test images; ``seen``: the words for what the run has seen of them."""

    seen: str


@dataclass(eq=False, repr=False)
class RunHistory:
    """One run, folded from the events of all ranks; those of each rank must come in their order.

    It takes little memory whatever the length of the run: of what comes with every update, log line, account or sample
    it holds sums, and some thousand for curves. Evaluations, epochs, checkpoints and notices are all there.

    ``rank``: whose history this is; other ranks have histories of their own in :attr:`ranks`.

    Attributes:
        ended: how the newest attempt ended; None while it goes on or if it was killed.
        endings: how each attempt ended that did not die.
        lines: the log lines without those that a restart took back; so, too,
        evaluated: all evaluations, and
        tested: that of the test images, None before the end, and
        trained: what each epoch came to, by its number.
        points: of the live charts, oldest first; of many the extremes of each stretch. ``redrawn`` counts up where
            points before no longer hold: a restart took steps back, or there were too many.
        devices: the newest sample of each GPU, by its index.
        stalled: the newest standstill, until an update is made again.
        recent: the newest steps of the newest attempt.
        repeated_steps: updates done again after restarts.
        last_time: of the newest event, seconds since 1970.
        num_facts: events besides steps and log lines.
        unreadable: lines of the logs, of any rank, that are no events.
    """

    recipe: Recipe
    rank: int = 0
    attempts: list[Attempt] = field(default_factory=list)
    away_seconds: float = 0.0
    ended: Ended | Failed | None = None
    endings: list[Ended | Failed] = field(default_factory=list)
    lines: LogLines = field(default_factory=LogLines)
    evaluated: list[Evaluated] = field(default_factory=list)
    tested: Tested | None = None
    trained: dict[int, EpochTrained] = field(default_factory=dict)
    saved: list[Saved] = field(default_factory=list)
    noticed: list[Noticed] = field(default_factory=list)
    tried: list[Tried] = field(default_factory=list)
    stalls: list[Stalled] = field(default_factory=list)
    stalled: Stalled | None = None
    devices: dict[int, DeviceStats] = field(default_factory=dict)
    recent: deque[Step] = field(default_factory=lambda: deque(maxlen=MAX_RECENT))
    repeated_steps: int = 0
    last_time: float = 0.0
    num_facts: int = 0
    samples: RunSamples = field(default_factory=RunSamples)
    step_times: StepTimes = field(default_factory=StepTimes)
    points: list[ChartPoint] = field(default_factory=list)
    redrawn: int = 0
    _num_points: dict[str, int] = field(default_factory=dict)
    _newest: dict[str, Event] = field(default_factory=dict)
    _others: dict[int, RunHistory] = field(default_factory=dict)
    _unreadable: int = 0
    _joined: list[RunHistory] = field(default_factory=list)

    @property
    def logged(self) -> list[Logged]:
        """The log lines to draw, without those that a restart took back; the newest are all there."""
        return self.lines.kept

    @property
    def ranks(self) -> dict[int, RunHistory]:
        """The history of each rank, by its number."""
        return {self.rank: self, **self._others, **{joined.rank: joined for joined in self._joined}}

    @property
    def unreadable(self) -> int:
        """Lines of the logs, of any rank, that are no events."""
        return self._unreadable + sum(joined._unreadable for joined in self._joined)

    def join(self, others: Sequence[RunHistory]) -> None:
        """Show the other ranks of histories that were folded from the logs of those."""
        self._joined = list(others)

    def take(self, event: Event) -> None:
        """Fold in one event; every kind at least moves the clock."""
        attempt = self.attempts[-1] if self.attempts else None
        if type(event) is Step and attempt and event.attempt == attempt.number and event.rank == self.rank:
            self._take_step(event, attempt)  # which most are
        elif isinstance(event, Unreadable):
            self._unreadable += 1
        elif event.rank != self.rank:
            if event.rank not in self._others:
                self._others[event.rank] = RunHistory(self.recipe, event.rank)
            self._others[event.rank].take(event)
        else:
            feed = self.newest(FeedStats)
            self._take_fact(event)
            if isinstance(event, DRAWN) and not self.rank and self.attempts:
                self._draw(event, feed)

    def _take_step(self, event: Step, attempt: Attempt) -> None:
        attempt.take_step(event)
        self.recent.append(event)
        self.stalled = None
        if event.time > self.last_time:
            self.last_time = event.time
        if event.step > attempt.first_step + WARM_UPDATES:
            self.step_times.add(event)

    def _take_fact(self, event: Event) -> None:
        is_new = not self.attempts or event.attempt != self.attempts[-1].number
        if isinstance(event, Started) or (is_new and isinstance(event, Accounted)):
            self._begin(Attempt(event.attempt, event if isinstance(event, Started) else None, event.time))
            is_new = False
        if event.attempt == 0 and isinstance(event, (Ceilings, StepMeasured)):  # measured while nobody trained
            self._newest[type(event).__name__] = event
        if isinstance(event, Tried):
            self.tried.append(event)
        if not self.attempts:
            self.ended = event if isinstance(event, Failed) else None
            return
        self.last_time = max(self.last_time, event.time)
        if not isinstance(event, (Step, Logged)):
            self.num_facts += 1
            self._newest[type(event).__name__] = event
        match event:
            case Step():
                self.recent.append(event)
                self.stalled = None
            case Logged():
                started = self.attempts[-1].started
                may_thin = started is not None and bool(started.digest) and started.steps_per_epoch > 0
                self.lines.add(event, self.attempts[-1].batches, self.epoch_of if may_thin else None)
            case EpochTrained():
                self.trained[event.epoch] = event
            case Evaluated():
                self.evaluated.append(event)
            case Tested():
                self.tested = event
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
        self.attempts[-1].take(event)
        if isinstance(event, SAMPLED):
            self.samples.take(event, self._phase)

    @property
    def _phase(self) -> int:
        """The phase that the newest attempt is in."""
        attempt = self.attempts[-1]
        is_warm, length = attempt.updates > WARM_UPDATES, attempt.num_train
        is_first = not length or attempt.position <= length + attempt.batch_size
        return START if not is_warm else FIRST if is_first else LATER

    def _draw(self, event: Event, feed: FeedStats | None) -> None:
        """Add an event's points to the live charts; of a series of too many the extremes of each stretch stay."""
        seconds = self.elapsed(event.time)
        for point in points_of(
            event, seconds, images=self.images, is_multi_label=self.is_multi_label, feed_before=feed
        ):
            self.points.append(point)
            self._num_points[point.series] = number = self._num_points.get(point.series, 0) + 1
            if number > MAX_POINTS:
                self._show(thin_points(self.points))

    def _show(self, points: list[ChartPoint]) -> None:
        if len(points) < len(self.points):
            self.points, self._num_points = points, dict(Counter(point.series for point in points))
            self.redrawn += 1

    def _begin(self, attempt: Attempt) -> None:
        if self.attempts and attempt.started:
            before, step = self.attempts[-1], attempt.started.step
            self.away_seconds += max(0.0, attempt.process_began - before.last_time)
            self.repeated_steps += max(0, before.step - step)
            for earlier in reversed(self.attempts):
                if earlier.lose_after(step):
                    break
            self.lines.take_back(step)
            self.evaluated = [score for score in self.evaluated if score.step <= step]
            self.tested = None if self.tested is None or self.tested.step > step else self.tested
            self.trained = {epoch: means for epoch, means in self.trained.items() if means.step <= step}
            self._show([p for p in self.points if p.series not in TAKEN_BACK or (p.row[2] or 0) <= step])
        if self.attempts:
            before = self.attempts[-1]
            attempt.process_began = max(attempt.process_began, before.last_time)  # no time counts twice
            attempt.before = before.before + before.last_time - before.process_began
        self.attempts.append(attempt)
        self.samples.begin_attempt()
        self._newest.pop("Compiled", None)
        self.recent.clear()
        self.stalled = self.ended = None

    @property
    def started(self) -> Started | None:
        """The ``Started`` event of the newest attempt; None before the first."""
        return None if self._begun is None else self._begun.started

    @property
    def _begun(self) -> Attempt | None:
        if self.attempts and self.attempts[-1].started:
            return self.attempts[-1]
        return next((attempt for attempt in reversed(self.attempts) if attempt.started), None)

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
        begun = self._begun
        if begun is None or begun.started is None or begun.batches is None or begun.started.steps_per_epoch <= 0:
            return 0.0
        return min(begun.batches.progress(step) / begun.started.steps_per_epoch, self.recipe.budget.epochs or math.inf)

    def epoch_of(self, step: int) -> int:
        """Return the epoch, from 1, that an update belongs to: that of its first image."""
        begun = self._begun
        assert begun is not None and begun.started is not None and begun.batches is not None
        return 1 + max(0, math.floor(begun.batches.progress(step - 1) / begun.started.steps_per_epoch + 1e-9))

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
        """The evaluation whose weights were kept as the best; the first, where none is known to be."""
        best: Evaluated | None = None
        for event in self.evaluated:
            best = event if event.replaces(best) else best
        return RunScore.of(best or self.evaluated[0]) if self.evaluated else None

    @property
    def last(self) -> RunScore | None:
        """The newest evaluation."""
        return RunScore.of(self.evaluated[-1]) if self.evaluated else None

    @property
    def test(self) -> UnseenScore | None:
        """The score on the test images; None before the end, and without such."""
        return None if self.tested is None else UnseenScore(**vars(RunScore.of(self.tested)), seen=self.tested.seen)

    def elapsed(self, time: float | None = None) -> float:
        """Return the seconds that the run had taken at a moment (None: its newest event), without pauses in between.

        A moment in a pause is the pause's beginning; the newest attempt may go on.
        """
        if not self.attempts:
            return 0.0
        newest = self.attempts[-1]
        time = newest.last_time if time is None else time
        if newest.process_began <= time:
            return newest.before + (time - newest.process_began)
        attempts = [attempt for attempt in self.attempts if attempt.process_began <= time]
        attempt = attempts[-1] if attempts else self.attempts[0]
        until = time if attempt is newest else min(time, attempt.last_time)
        return attempt.before + max(0.0, until - attempt.process_began)

    def newest(self, kind: type[E]) -> E | None:
        """Return the newest event of a kind; None where there is none. Of GPUs see :attr:`devices`."""
        return cast("E | None", self._newest.get(kind.__name__))

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
            events={type(event): event for event in self._newest.values()},
            devices=samples.gpus(LATER, FIRST, START),
            evaluations=samples.evaluations,
            checkpoints=samples.checkpoints,
            ranks={rank: other._rank_shares() for rank, other in self.ranks.items()},
            servers=samples.servers,
            stopped=self._stopped_seconds,
            grants=self.attempts[-1].grants(),
            parts=self.attempts[-1].parts(),
            company=self.attempts[-1].company,
            attempts=len(self.attempts),
            lost_before_updates=sum(cost.again_seconds for cost in self.interruptions() if not cost.step),
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
        """Return what each end of an attempt before the run's end cost, oldest first; the end of a try is none."""
        tried = {event.step for event in self.tried if event.what == "updates"}
        endings, usual = {event.attempt: event for event in self.endings}, self._usual_parts()
        costs = []
        for before, after in pairwise(self.attempts):
            if before.ended is not None and before.step in tried:
                continue
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

        ``bins``: as many at most, and one more for each attempt and each loss; None: as fine as was recorded.
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
        attempts = [(a, a.marks[-1].images - _warmup_images(a)) for a in self.attempts]
        totals = [without_stops(a.marks[-1].seconds, a.stopped()) for a, count in attempts if count > 0]
        images = sum(count for _, count in attempts if count > 0)
        names = ("forward", "backward", "optimizer", "update")
        return {name: sum(total.get(name, 0.0) for total in totals) / images if images else 0.0 for name in names}

    def by_bucket(self, mark: Mark, attempt: Attempt, usual: Mapping[str, float] | None = None) -> dict[str, float]:
        """Return the ledger's buckets up to a moment of an attempt; they add up to as much as the recorded ones.

        ``usual``: the seconds of an image in the parts of an update, where they are known already.
        """
        usual = self._usual_parts() if usual is None else usual
        recorded = without_stops(mark.seconds, attempt.stopped(mark.time))
        recorded["other"] = recorded.get("other", 0.0) + sum(mark.seconds.values()) - sum(recorded.values())
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
