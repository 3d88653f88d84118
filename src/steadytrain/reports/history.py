"""A run's events, put in order for tables and curves: one pass, however often the run was stopped.

A restarted run repeats the steps after its last checkpoint. What it told of them before was told of weights that are
lost, so each ``Started`` takes back every figure after the step it goes on from: the newest attempt wins. The time
that the lost steps took is still counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from steadytrain.errors import RunError
from steadytrain.events import (
    Ended,
    Evaluated,
    Event,
    Failed,
    FeedStats,
    Logged,
    Noticed,
    Saved,
    Stalled,
    Started,
    Step,
)
from steadytrain.run import Run

At = TypeVar("At", Logged, Evaluated)


@dataclass
class Attempt:
    """One start of the run.

    ``seconds``: its wall time; ``before``: that of all attempts before it (pauses between them left out);
    ``images``: trained on, also those that a restart repeated; ``last_step``: reached, lost or not.
    """

    started: Started
    before: float = 0.0
    seconds: float = 0.0
    images: int = 0
    last_step: int = 0


@dataclass
class History:
    """What happened in a run, oldest first; ``logged`` and ``evaluated`` without what a restart repeated.

    ``ending``: how the newest attempt ended, None while it goes on or if it was killed. ``repeated_steps``: updates
    that were done again after restarts. ``last_time``: of the newest event, seconds since 1970.
    """

    run: Run
    attempts: list[Attempt] = field(default_factory=list)
    logged: list[Logged] = field(default_factory=list)
    evaluated: list[Evaluated] = field(default_factory=list)
    saved: list[Saved] = field(default_factory=list)
    noticed: list[Noticed] = field(default_factory=list)
    stalled: list[Stalled] = field(default_factory=list)
    endings: list[Ended | Failed] = field(default_factory=list)
    feed: FeedStats | None = None
    ending: Ended | Failed | None = None
    repeated_steps: int = 0
    last_time: float = 0.0

    @property
    def started(self) -> Started:
        """How the newest attempt began."""
        return self.attempts[-1].started

    @property
    def step(self) -> int:
        """Updates done that count."""
        return self.attempts[-1].last_step

    def epoch(self, step: float) -> float:
        """How many times the training set has been seen after so many updates."""
        return step / self.started.steps_per_epoch if self.started.steps_per_epoch > 0 else 0.0

    def elapsed(self, event: Event) -> float:
        """Seconds of the run's own wall time at which an event happened, pauses between attempts left out."""
        earlier = [attempt for attempt in self.attempts if attempt.started.attempt <= event.attempt]
        attempt = earlier[-1] if earlier else self.attempts[0]
        return attempt.before + max(0.0, event.time - attempt.started.time)


def history(run: Run) -> History:
    """Read a run, also while it goes on.

    Raises:
        RunError: nothing was started in it yet.
    """
    told = History(run)
    for event in run.events(sparse=True):
        take(told, event)
    if told.attempts:
        return told
    if isinstance(told.ending, Failed):
        raise RunError(f"{run.directory} never started: {told.ending.error}: {told.ending.message}")
    raise RunError(f"{run.directory} has no events yet: nothing was trained in it; start it, then report on it")


def take(told: History, event: Event) -> None:
    """Put one event in its place, in the order in which they were written."""
    if isinstance(event, Started) and _sound(event, "step", "steps", "steps_per_epoch", "batch_size"):
        _begin(told, event)
    if not told.attempts:
        told.ending = event if isinstance(event, Failed) else None
        return
    attempt = told.attempts[-1]
    told.last_time = max(told.last_time, event.time)
    if event.attempt == attempt.started.attempt:  # not one that failed before it had started
        attempt.seconds = max(attempt.seconds, event.time - attempt.started.time)
    match event:
        case Step() if _sound(event, "step", "position"):
            attempt.images = event.position - attempt.started.step * attempt.started.batch_size
            attempt.last_step = event.step
        case Logged() if _sound(event, "step", "epoch", "loss", "top1", "lr", "images_per_second", "wait_share"):
            told.logged.append(event)
        case Evaluated() if _sound(event, "step", "epoch", "n", "loss", "top1", "top5", "seconds"):
            told.evaluated.append(event)
        case Saved() if _sound(event, "step", "bytes", "seconds"):
            told.saved.append(event)
        case Noticed():
            told.noticed.append(event)
        case Stalled() if _sound(event, "step", "seconds"):
            told.stalled.append(event)
        case FeedStats():
            told.feed = event
        case Failed():
            told.ending = event
            told.endings.append(event)
        case Ended() if _sound(event, "step", "seconds", "images"):
            told.ending = event
            told.endings.append(event)
            attempt.seconds = max(attempt.seconds, event.seconds)
            attempt.images = max(attempt.images, event.images)


def _begin(told: History, event: Started) -> None:
    before = sum(attempt.seconds for attempt in told.attempts)
    if told.attempts:
        told.repeated_steps += max(0, told.attempts[-1].last_step - event.step)
    told.attempts.append(Attempt(event, before=before, last_step=event.step))
    told.ending = None
    told.logged = _up_to(told.logged, event.step)
    told.evaluated = _up_to(told.evaluated, event.step)


def _up_to(events: Sequence[At], step: int) -> list[At]:
    return [event for event in events if event.step <= step]


def _sound(event: Event, *names: str) -> bool:
    """Whether these fields are numbers: a log that was edited by hand must not end a report."""
    return all(isinstance(getattr(event, name), (int, float)) for name in names)


def finished(told: History) -> bool:
    """Whether the run was trained to its end."""
    return any(isinstance(event, Ended) and event.status == "finished" for event in told.endings)


def images(attempts: Iterable[Attempt]) -> int:
    """All images that were trained on, those of repeated steps included."""
    return sum(attempt.images for attempt in attempts)
