"""What happened in a run besides learning: starts, restarts, notices, checkpoints, failures, ends."""

from __future__ import annotations

import math
from collections.abc import Iterator

from steadytrain.events import Ended, Event, Failed
from steadytrain.reports.format import duration, rate, size, when
from steadytrain.reports.history import Attempt, History

MAX_SAVED = 8
MAX_NOTICED = 100

Line = dict[str, str]


def happened(told: History) -> list[Line]:
    """A line for each thing, oldest first: ``when`` (UTC), ``step``, ``what`` and ``tone`` (good, warn, bad, none)."""
    lines = [*_starts(told), *_saved(told), *_noticed(told), *_stalled(told), *_not_finite(told), *_endings(told)]
    return [line for _, line in sorted(lines, key=lambda one: one[0])]


def _line(time: float, step: int, what: str, tone: str = "") -> tuple[float, Line]:
    return time, {"when": when(time), "step": f"step {step:,}", "what": what, "tone": tone}


def _starts(told: History) -> Iterator[tuple[float, Line]]:
    before: Attempt | None = None
    ended = {event.attempt for event in told.endings}
    for attempt in told.attempts:
        event = attempt.started
        if before is None:
            yield _line(event.time, event.step, "started")
        else:
            if before.started.attempt not in ended:
                stopped = before.started.time + before.seconds
                yield _line(stopped, before.last_step, "stopped without a word: killed, or the machine went", "warn")
            repeated = before.last_step - event.step
            again = f", {repeated:,} steps to repeat" if repeated > 0 else ""
            yield _line(event.time, event.step, f"restarted (attempt {event.attempt}){again}")
        before = attempt


def _saved(told: History) -> Iterator[tuple[float, Line]]:
    earlier = told.saved[:-MAX_SAVED]
    if earlier:
        spent = duration(sum(event.seconds for event in earlier))
        yield _line(earlier[0].time, earlier[0].step, f"{len(earlier):,} earlier checkpoints, {spent} in all")
    for event in told.saved[-MAX_SAVED:]:
        yield _line(event.time, event.step, f"saved {event.path}, {size(event.bytes)} in {duration(event.seconds)}")


def _noticed(told: History) -> Iterator[tuple[float, Line]]:
    for event in told.noticed[:MAX_NOTICED]:
        yield _line(event.time, _step(event), str(event.message), "warn")
    if (more := len(told.noticed) - MAX_NOTICED) > 0:
        yield _line(told.noticed[-1].time, _step(told.noticed[-1]), f"{more:,} more notices", "warn")


def _stalled(told: History) -> Iterator[tuple[float, Line]]:
    for event in told.stalled[-MAX_NOTICED:]:
        what = f"{event.what} did not move for {duration(event.seconds)}: {event.culprit} (stacks: {event.stacks})"
        yield _line(event.time, event.step, what, "bad")


def _not_finite(told: History) -> Iterator[tuple[float, Line]]:
    for event in told.logged:
        if not math.isfinite(event.loss):
            yield _line(event.time, event.step, "the training loss is not a finite number from here on", "bad")
            return


def _endings(told: History) -> Iterator[tuple[float, Line]]:
    for event in told.endings:
        match event:
            case Failed():
                yield _line(
                    event.time,
                    _step(event) or _reached(told, event.attempt),
                    f"failed: {event.error}: {event.message}",
                    "bad",
                )
            case Ended():
                speed = f", {rate(event.images / event.seconds)} images/s" if event.seconds > 0 else ""
                tone = "good" if event.status == "finished" else "warn"
                yield _line(event.time, event.step, f"{event.status} after {duration(event.seconds)}{speed}", tone)


def _reached(told: History, attempt: int) -> int:
    return max((one.last_step for one in told.attempts if one.started.attempt == attempt), default=0)


def _step(event: Event) -> int:
    step = getattr(event, "step", 0)
    return step if isinstance(step, int) else 0
