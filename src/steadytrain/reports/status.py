"""The state of a run: whether it is going on, how it ended, the time left, and what happened on the way."""

from __future__ import annotations

import math
import platform
import time
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from steadytrain.config import Every
from steadytrain.cost.bill import Bill, bill_of
from steadytrain.cost.prices import Price
from steadytrain.events import Ended, Event, Failed, Halved, MachineStats
from steadytrain.format import clock, count, duration, epoch, rate, size, when
from steadytrain.monitor import RunHistory
from steadytrain.monitor.samples import memory_text
from steadytrain.run import Run

Status = Literal["finished", "running", "interrupted", "failed"]
RECENT_SECONDS = 300.0
SILENT_SECONDS = 60.0  # a run that goes on accounts for its seconds twice as often
PACE_SECONDS = 120.0
FORWARD_SHARE = 1 / 3  # share of an update's work: a forward pass is half as much as the backward one
MAX_SAVED = 8
MAX_NOTICED = 100


@dataclass(frozen=True, kw_only=True)
class Signs:
    """Signs of life of a run.

    ``status``: ``waiting`` until its first attempt has begun; ``why``: of ``interrupted`` and ``failed``. ``process``:
    the id of the process that holds it, where that is alive on this machine; ``host``: the machine it runs on, where
    that is another. ``last``: the time of its newest event, 0 before there is one. ``silent``: it should go on, and has
    written nothing for a minute.
    """

    status: Status | Literal["waiting"]
    why: str = ""
    process: int | None = None
    host: str | None = None
    last: float = 0.0
    silent: bool = False

    @property
    def over(self) -> bool:
        """Return whether the run has ended, or no process is left that could go on."""
        return self.status not in ("waiting", "running")

    def __str__(self) -> str:
        """Describe whether the run is going on.

        >>> str(Signs(status="running", process=4711))
        'running, process 4711'
        """
        if self.status == "waiting":
            return f"starting, process {self.process}" if self.process else "not started yet"
        if self.status != "running":
            return self.status
        return f"running on {self.host}" if self.host else f"running, process {self.process}"


def signs(run: Run, history: RunHistory, now: float) -> Signs:
    """Return the signs of life of a run, perhaps one that has not begun, at a moment (seconds since 1970)."""
    if history.started is None:
        if isinstance(history.ended, Failed):
            why = f"{history.ended.error}: {history.ended.message}"
            return Signs(status="failed", why=why, last=history.ended.time)
        return Signs(status="waiting", process=_alive(run.holder(), now))
    status, why = outcome(run, history)
    last = history.last_time
    if status != "running":
        return Signs(status=status, why=why, last=last)
    host = other_host(history)
    holder = None if host else run.holder()
    return Signs(status=status, process=holder, host=host, last=last, silent=now - last > SILENT_SECONDS)


def outcome(run: Run, history: RunHistory) -> tuple[Status, str]:
    """Return the outcome of a run, and for ``interrupted`` and ``failed`` the reason, as far as it is known."""
    ending = history.ended
    if history.finished:
        return "finished", ""
    if isinstance(ending, Failed):
        step = ending.step or history.step
        return "failed", f"{ending.error} {f'at step {step}' if step else 'before the first update'}: {ending.message}"
    if isinstance(ending, Ended):
        cause = "stopped by a signal or --until" if ending.status == "preempted" else "stopped by the user"
        if not ending.step:
            return "interrupted", f"{cause} before anything was saved: the same command starts from the beginning"
        return "interrupted", f"{cause}, saved at step {ending.step}: the same command resumes it"
    # An attempt whose log has no end, on this machine or on another.
    is_on, began = time.time() - history.last_time < RECENT_SECONDS, history.attempts[-1].began
    if is_on if other_host(history) else _alive(run.holder(), began) is not None:
        return "running", ""
    stats = history.newest(MachineStats)
    if stats is None or stats.attempt != history.attempts[-1].number:
        stats = None
    memory, last = memory_text(stats), f"killed (last event: step {history.step})"
    return "interrupted", "; ".join(filter(None, (last, memory, "the same command resumes it")))


def is_held(run: Run) -> bool:
    """Return whether the process of this machine that held the run's lock last is alive."""
    return _alive(run.holder(), time.time()) is not None


def other_host(history: RunHistory) -> str | None:
    """Return the other machine that the newest attempt was started on; None for this one."""
    host = history.started.machine.get("host") if history.started else None
    return None if host in (None, platform.node()) else str(host)


def _alive(number: int | None, time: float) -> int | None:
    """Return the number if a process of that number existed at that moment and still does."""
    import psutil

    if number is None:
        return None
    try:
        process = psutil.Process(number)
        # Neither a later process that was given the same number nor a dead one that nobody has buried is it.
        is_alive = process.create_time() <= time + 1.0 and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return None
    return number if is_alive else None


def remaining_seconds(history: RunHistory) -> float | None:
    """Return the seconds from the last sign of the run to its end; None where its pace is not known yet.

    Updates at the pace of the last two minutes, each evaluation and checkpoint at their mean so far. An evaluation
    that was never made is taken for as many forward passes as it has images.
    """
    pace, started, every = seconds_per_step(history), history.started, history.recipe.every
    if pace is None or started is None:
        return None
    batches, left = started.batches, max(0, started.steps - history.step)
    updating = seconds = max(0.0, batches.first - batches.progress(history.step)) * pace
    num_val, evaluated, saved = started.data.get("num_val"), history.evaluated, history.saved
    if isinstance(num_val, int) and num_val and started.steps_per_epoch > 0:
        mean_seconds = num_val / max(1, started.batch_size) * pace * FORWARD_SHARE
        if evaluated:
            mean_seconds = sum(event.seconds for event in evaluated) / len(evaluated)
        last, epochs = evaluated[-1].epoch if evaluated else 0.0, history.epoch(started.steps)
        seconds += mean_seconds * evaluations_left(every, last, epochs, one_step=1 / started.steps_per_epoch)
    if saved and left:
        by_steps = left / every.save_steps if every.save_steps else 0.0
        by_time = updating / every.seconds_between_saves(fmean(event.cost for event in saved))
        seconds += max(1.0, by_steps, by_time) * fmean(event.pause for event in saved)
    return seconds


def time_left(history: RunHistory, seen: Signs, now: float) -> float | None:
    """Return the seconds from ``now`` to the end of a run that goes on; None while it stands still, or is over."""
    left = remaining_seconds(history)
    if left is None or seen.status != "running" or seen.silent or history.stalled is not None:
        return None
    last_step = history.recent[-1].time if history.recent else history.last_time
    return max(0.0, left - (now - last_step))


def current_bill(run: Run, history: RunHistory, seen: Signs, now: float, *, price: Price | None = None) -> Bill | None:
    """Return what a run costs at a moment and, where it goes on, at its end; None where no price is known.

    ``price``: of an hour of each machine; None: what each attempt recorded.

    Raises:
        InputError: the prices cannot be used.
    """
    moment = now if seen.status == "running" else None
    return bill_of(run, history, price=price, now=moment, left=time_left(history, seen, now))


def seconds_per_step(history: RunHistory) -> float | None:
    """Return the recent seconds of a batch of the first size, its wait for images included; None before a log line."""
    if not history.logged or history.started is None:
        return None
    since = history.logged[-1].time - PACE_SECONDS
    lines = [event for event in history.logged[-500:] if event.time >= since]
    rates = [line.images_per_second for line in lines if math.isfinite(line.images_per_second)]
    steady = [history.started.batch_size / rate for rate in rates if rate > 0]
    # The first log line of an attempt holds its warm-up: it counts only while there is no other.
    steady = steady[1:] if len(steady) == len(lines) > 1 else steady
    return sum(steady) / len(steady) if steady else None


def evaluations_left(every: Every, last: float, epochs: float, *, one_step: float = 0.0) -> int:
    """Count the evaluations after the one at epoch ``last`` in a run of ``epochs``: one a period, and one at the end.

    ``one_step``: epochs of an update; the last one may reach as far beyond a period.

    >>> evaluations_left(Every(evaluate_epochs=1.0), 0.0, 3.001, one_step=0.003)
    3
    >>> evaluations_left(Every(evaluate_epochs=2.0), 2.0, 5.0)
    2
    """
    if last >= epochs - 1e-9:
        return 0
    periods = math.floor(epochs / every.evaluate_epochs + 1e-9)
    at_end = epochs - periods * every.evaluate_epochs > one_step + 1e-9
    return max(0, periods - math.floor(last / every.evaluate_epochs + 1e-9)) + at_end


def milestones(history: RunHistory) -> list[dict[str, str]]:
    """Return milestones of a run, the oldest first: ``day``, ``time`` (UTC), ``step``, ``what``, ``tone``.

    Starts, restarts, notices, checkpoints, failures, ends. ``tone``: good, warn, bad, or nothing.
    """
    lines: list[tuple[float, int, str, str]] = []
    ended = {event.attempt for event in history.endings}
    for before, attempt in zip([None, *history.attempts], history.attempts, strict=False):
        if before is None:
            lines.append((attempt.began, attempt.first_step, "started", ""))
            continue
        if before.number not in ended:
            message = "stopped without a message: killed, or the machine went down"
            lines.append((before.last_time, before.step, message, "warn"))
        repeated = before.step - attempt.first_step
        again = f", {count(repeated, 'step')} to repeat" if repeated > 0 else ""
        lines.append((attempt.began, attempt.first_step, f"restarted (attempt {attempt.number}){again}", ""))
    if earlier := history.saved[:-MAX_SAVED]:
        spent = duration(sum(event.seconds for event in earlier))
        message = f"{count(len(earlier), 'earlier checkpoint')}, {spent} in all"
        lines.append((earlier[0].time, earlier[0].step, message, ""))
    for save in history.saved[-MAX_SAVED:]:
        message = f"saved {save.path}, {size(save.bytes)} in {duration(save.seconds)}"
        lines.append((save.time, save.step, message, ""))
    if history.test is not None and history.tested is not None:
        words = f"test, {history.test.seen}: {history.test.words}"
        lines.append((history.tested.time, history.step, words, ""))
    noticed, steps = history.noticed, history.progress.steps
    # Before the first update and after the last one nothing has happened to a run; restarts repeat what it said there.
    remarks = {notice.message for notice in noticed if notice.attempt < 2 and notice.step in (0, steps)}
    remarks -= {notice.message for notice in noticed if isinstance(notice, Halved) or notice.is_warning}
    for notice in noticed[:MAX_NOTICED]:
        lines.append((notice.time, _step(notice), str(notice.message), "" if notice.message in remarks else "warn"))
    if (more := len(noticed) - MAX_NOTICED) > 0:
        lines.append((noticed[-1].time, _step(noticed[-1]), count(more, "more notice"), ""))
    for stall in history.stalls[-MAX_NOTICED:]:
        message = f"no progress of {stall.what} for {duration(stall.seconds)}: {stall.culprit} (stacks: {stall.stacks})"
        lines.append((stall.time, stall.step, message, "bad"))
    not_finite = [line for line in history.logged if not math.isfinite(line.loss) and not history.is_foreign]
    if not_finite:
        message = "the training loss is not finite from here on"
        lines.append((not_finite[0].time, not_finite[0].step, message, "bad"))
    if history.unreadable:
        message = f"{count(history.unreadable, 'line')} of the event log: damaged, and left out of every figure"
        lines.append((history.last_time, history.step, message, "warn"))
    for event in history.endings:
        if isinstance(event, Failed):
            reached = max((a.step for a in history.attempts if a.number == event.attempt), default=0)
            lines.append((event.time, _step(event) or reached, f"failed: {event.error}: {event.message}", "bad"))
        else:
            speed = f", {rate(event.images / event.seconds)} images/s" if event.seconds > 0 and event.images else ""
            of = " of this attempt" if len(history.attempts) > 1 else ""
            tone = "good" if event.status == "finished" else "warn"
            lines.append((event.time, event.step, f"{event.status} after {duration(event.seconds)}{of}{speed}", tone))
    lines.sort(key=lambda line: line[0])
    has_clock = history.attempts[0].began > 0  # a log of another program may tell no time
    moments = [when(time).partition(" ") if has_clock else ("", "", clock(time)) for time, *_ in lines]
    return [
        {
            "day": day,
            "time": time,
            "step": f"epoch {epoch(history.epoch(step))}" if history.is_foreign else f"step {step:,}" if steps else "",
            "what": message,
            "tone": tone,
        }
        for (day, _, time), (_, step, message, tone) in zip(moments, lines, strict=True)
    ]


def _step(event: Event) -> int:
    step = getattr(event, "step", 0)
    return step if isinstance(step, int) else 0
