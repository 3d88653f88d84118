"""What a watched run is said to be doing, in words that the terminal and the page share."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

from steadytrain.reports.buckets import SHOWN
from steadytrain.reports.format import duration
from steadytrain.reports.snapshot import Now


def standing(now: Now) -> str:
    """Whether it goes on.

    >>> from steadytrain.reports.liveness import Signs
    >>> standing(Now(moment=0.0, name="a", directory="a", model="mlp", signs=Signs(status="running", process=4711)))
    'running, process 4711'
    """
    signs = now.signs
    if signs.status == "waiting":
        return f"starting, process {signs.process}" if signs.process else "not started yet"
    if signs.status != "running":
        return signs.status
    return f"running on {signs.host}" if signs.host else f"running, process {signs.process}"


def alarms(now: Now) -> Iterator[str]:
    """What must not be overlooked, a line each: nothing moves, no sign of life, a failure; often nothing."""
    if now.stalled is not None and now.signs.status == "running":
        told = now.stalled
        usual = f"{duration(told.expected_seconds)} are usual"
        yield f"stalled: {told.what} has not moved for {duration(told.seconds)} ({usual}): {told.culprit}"
    if now.signs.silent:
        who = f"process {now.signs.process} is alive" if now.signs.process else f"it runs on {now.signs.host}"
        yield f"no sign of life since {at(now.signs.last)} ({duration(now.moment - now.signs.last)} ago): {who}"
    if now.signs.status in ("failed", "interrupted"):
        yield f"{now.signs.status}: {now.signs.why}"


def label_of(now: Now, bucket: str) -> str:
    """The name of a bucket of the ledger; of a run that goes on the newest seconds are pending.

    >>> from steadytrain.reports.liveness import Signs
    >>> label_of(Now(moment=0.0, name="a", directory="a", model="mlp", signs=Signs(status="running")), "other")
    'other, pending'
    """
    label = SHOWN[bucket].label
    return f"{label}, pending" if bucket == "other" and now.signs.status == "running" else label


def at(moment: float) -> str:
    """The time of day here, with the day where that is not today."""
    there = datetime.fromtimestamp(moment)
    return f"{there:%H:%M:%S}" if there.date() == datetime.now().date() else f"{there:%Y-%m-%d %H:%M:%S}"
