"""The images come late from where they lie."""

from __future__ import annotations

from steadytrain.monitor.evidence import Evidence
from steadytrain.monitor.rules.cause import LEAST, Cause, duration, percent, size
from steadytrain.monitor.rules.feed import worst
from steadytrain.monitor.rules.pace import Pace
from steadytrain.monitor.rules.stretches import paces

FIRST_ONLY = 0.25
"""Where later passes lose no more than this part of what the first loses, storage is the first pass's affair."""


def storage(evidence: Evidence) -> Cause | None:
    """Reading holds the loop up in every pass over the data."""
    if _is_first_only(evidence):
        return None
    told = worst(evidence, "read")
    if told is None:
        return None
    blame, share, _ = told
    sentence = f"The loop waits {percent(share)} of the time for images to come from where they lie, in every epoch."
    change, saves = f"copy the images to a faster disk: cp {_files(evidence)} FOLDER, and train on FOLDER", share
    if blame.change and not blame.pace.is_from_disk:  # each image is far away, and several can be on their way at once
        change, saves = blame.change, min(share, told[2])
    return Cause(
        name="storage", share=share, sentence=sentence, evidence=_figures(blame.pace), change=change, saves=saves
    )


def first_epoch(evidence: Evidence) -> Cause | None:
    """Reading holds the loop up in the first pass alone: afterwards the images are in memory."""
    if not _is_first_only(evidence):
        return None
    told = worst(evidence, "read")
    if told is None:
        return None
    blame, share, _ = told
    sentence = (
        f"In the first epoch the loop waits for images to come from where they lie, {percent(share)} of the time of the"
        " run; afterwards they are in memory."
    )
    change = f"read them into memory in one go before training: cat {_files(evidence)} > /dev/null"
    return Cause(
        name="storage_first_epoch",
        share=share,
        sentence=sentence,
        evidence=_figures(blame.pace),
        change=change,
        saves=share,
    )


def _is_first_only(evidence: Evidence) -> bool:
    stretches = paces(evidence)
    if len(stretches) < 2:
        return False
    first, later = stretches
    return _lost(later) <= FIRST_ONLY * _lost(first)


def _lost(pace: Pace) -> float:
    """Share of a stretch's own time that waiting for storage takes."""
    return pace.saved(pace.without(pace.waits("read"))) / pace.loop if pace.loop > 0 else 0.0


def _files(evidence: Evidence) -> str:
    data = evidence.recipe.data.train
    return data if data.endswith(".rec") else f"-r {data}"


def _figures(pace: Pace) -> tuple[str, ...]:
    feed, machine = pace.feed, pace.machine
    assert feed is not None
    told = [
        f"an update takes {duration(pace.step)}, of which {duration(pace.wait)} is waiting for its batch",
        f"reading one image of {size(feed.bytes / max(feed.images, 1))} takes"
        f" {duration(feed.read_seconds / max(feed.images, 1))}",
        f"{percent(pace.stage('read') / max(pace.busy, 1e-12))} of the feed's busy time is reading",
    ]
    if machine is not None and machine.disk_read_bytes is not None:
        told.append(f"{size(machine.disk_read_bytes)} a second come from a disk")
    if machine is not None and machine.iowait is not None and machine.iowait >= 0.05:
        told.append(f"{machine.iowait:.1f} cores wait for a disk")
    if machine is not None and machine.pressure.get("io", 0.0) >= LEAST:
        told.append(f"something waits for a disk {percent(machine.pressure['io'])} of the time (pressure)")
    return tuple(told)
