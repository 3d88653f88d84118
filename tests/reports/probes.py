"""A probe as a run records it: made up, at times of our own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from msgspec.structs import replace
from tests.reports.runs import evaluated, started

from steadytrain.events import Accounted, Event, MachineStats, ProbeProgress, Saved, ThreadStats

FEED = {"images": 794, "bytes": 794 * 20_000, "threads": 1, "read_seconds": 1.0, "decode_seconds": 8.0}
FEED |= {"augment_seconds": 1.0, "batch_seconds": 0.1, "blocked_seconds": 60.0, "cpu_seconds": 9.0}


def progress(images: int, **more: Any) -> ProbeProgress:
    """So many of 794 images, ten a second."""
    return ProbeProgress(step=0, images=images, total=794, seconds=images / 10, feed=FEED, **more)


def probe_alone(
    *, wall: float = 120.0, machine: dict[str, Any] | None = None, queued: float = 0.0, **of_feed: float
) -> Iterator[Event]:
    """A probe of 79.4 s of features and 24 s of the fit, in a run that makes no updates."""
    fitted = progress(794, fit_seconds=24.0, features=1280, penalty=0.1, top1=0.8)
    fitted = replace(fitted, feed={**FEED, **of_feed}, wait_seconds=of_feed.get("wait", 2.0))
    yield replace(started(steps=0), startup={"process": 8.0, "data": 0.5})
    yield from (progress(0), progress(412), fitted)
    yield replace(evaluated(0, n=250), seconds=3.0)
    yield Saved(step=0, path="checkpoints/step-00000000", bytes=9_000_000, seconds=0.1)
    spent = {"probe": 103.4, "evaluation": 3.0, "checkpoint": 0.1}
    spent["startup"] = wall - sum(spent.values())
    yield Accounted(step=0, images=0, wall_seconds=wall, seconds=spent)
    yield ThreadStats(
        step=0,
        seconds=wall,
        looks=1000,
        cost_seconds=0.1,
        lock_seconds=0.1,
        loop={"probe": {"seconds": 103.4, "ran": 30.0, "queued": queued}},
    )
    usual: dict[str, Any] = {"seconds": wall, "cores": 2, "machine_cores": 2, "cpu": 1.4, "others": 0.0, "idle": 0.6}
    yield MachineStats(**usual | {"pressure": {"cpu": 0.01, "io": 0.0, "memory": 0.0}} | (machine or {}))
