"""Whether a run goes on, how it came out, and when it last gave a sign."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from steadytrain.events import Ended, Failed
from steadytrain.reports.history import History, finished
from steadytrain.run import Run

Status = Literal["finished", "running", "interrupted", "failed"]
RECENT_SECONDS = 300.0
SILENT_SECONDS = 60.0  # a run that goes on accounts for its seconds twice as often


@dataclass(frozen=True, kw_only=True)
class Signs:
    """What is known of the life of a run.

    ``status``: ``waiting`` until its first attempt has begun. ``process``: the id of the process that holds it, where
    that is alive on this machine; ``host``: the machine it runs on, where that is another. ``last``: its newest event,
    seconds since 1970, 0 before there is one. ``silent``: it should go on, and has told nothing for a minute.
    """

    status: Status | Literal["waiting"]
    why: str = ""
    process: int | None = None
    host: str | None = None
    last: float = 0.0
    silent: bool = False

    @property
    def over(self) -> bool:
        """Whether nothing more is to be expected, unless someone starts it again."""
        return self.status not in ("waiting", "running")


def signs(told: History, now: float) -> Signs:
    """The signs of a run, perhaps one that has not begun, at a moment (seconds since 1970)."""
    if not told.attempts:
        process = _alive(told.run.holder(), now)
        if isinstance(told.ending, Failed):
            return Signs(status="failed", why=f"{told.ending.error}: {told.ending.message}", last=told.ending.time)
        return Signs(status="waiting", process=process)
    status, why = came_out(told)
    if status != "running":
        return Signs(status=status, why=why, last=told.last_time)
    host = _elsewhere(told)
    return Signs(
        status=status,
        process=None if host else told.run.holder(),
        host=host,
        last=told.last_time,
        silent=now - told.last_time > SILENT_SECONDS,
    )


def came_out(told: History) -> tuple[Status, str]:
    """How a run came out, and for ``interrupted`` and ``failed`` what is known of the reason."""
    ending = told.ending
    if finished(told):
        return "finished", ""
    if isinstance(ending, Failed):
        return "failed", f"{ending.error} at step {ending.step or told.step}: {ending.message}"
    if isinstance(ending, Ended):
        asked = "preempted" if ending.status == "preempted" else "stopped by the user"
        return "interrupted", f"{asked}, saved at step {ending.step}: the same command goes on"
    if is_going_on(told):
        return "running", ""
    return (
        "interrupted",
        f"killed: its last word was of step {told.attempts[-1].last_step}; the same command resumes it",
    )


def is_going_on(told: History) -> bool:
    """Whether the process that holds the run is alive; for one on another machine, whether it was heard of lately."""
    import time

    if _elsewhere(told):
        return time.time() - told.last_time < RECENT_SECONDS
    return _alive(told.run.holder(), told.started.time) is not None


def is_held(run: Run) -> bool:
    """Whether a process of this machine that held the run's lock last is alive."""
    import time

    return _alive(run.holder(), time.time()) is not None


def _elsewhere(told: History) -> str | None:
    """The other machine that the newest attempt was started on; None for this one."""
    import platform

    host = told.started.machine.get("host")
    return None if host in (None, platform.node()) else str(host)


def _alive(number: int | None, time: float) -> int | None:
    """The number, if a process of that number was there at that moment and still is."""
    import psutil

    if number is None:
        return None
    try:
        process = psutil.Process(number)
        # Neither a later process that was given the same number nor a dead one that nobody has buried is it.
        there = process.create_time() <= time + 1.0 and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return None
    return number if there else None
