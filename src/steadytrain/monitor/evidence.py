"""What is known of a run, gathered from its events: what a verdict is found from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from steadytrain.config import Recipe
from steadytrain.events import (
    Ceilings,
    Compiled,
    DeviceStats,
    Ended,
    Failed,
    FeedPlaced,
    FeedStats,
    MachineStats,
    Stalled,
    Started,
    StepMeasured,
)
from steadytrain.monitor.ledger import Ledger


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The facts about a run as far as it has come; None and empty where nothing was told.

    Args:
        ledger: of rank 0.
        started: how the newest attempt began.
        recipe: what is trained.
        ended: how the newest attempt ended; None while it goes on, and where it was killed.
        position: images that the run has come to.
        first_epoch: shares of the seconds of ``ledger.STEADY`` by bucket, in the first pass over the data; None in a
            run that has not come beyond it.
        later: the same of what follows.
        step_seconds: 5th, 50th and 95th percentile of an update's seconds, its wait included, warm-up left out; zeros
            where there was none.
        wait_seconds: the same percentiles of the wait in them.
        step_parts: mean seconds of an update: ``input``, ``transfer``, ``host``, ``forward``, ``backward``,
            ``optimizer``, ``update`` (not told apart), ``communication``, ``logging``.
        slowest: the slowest updates after the warm-up: step -> seconds; at most 32.
        feed: what the feed did in the steady part (later epochs where there are some, else all after the first
            figures): differences, nothing cumulative.
        feed_first: the same of the first pass over the data.
        machine: means over the steady part, weighted by time (``cpu`` and ``idle``: during updates); sums of
            ``seconds`` and ``throttled_seconds``, the most of ``memory_bytes`` and ``threads``, the least of
            ``available_bytes``.
        machine_first: the same of the first pass over the data.
        devices: the same of each GPU; ``energy_joules`` is a sum.
        measured, ceilings, placed: the newest of their kind.
        evaluations: how many, and their seconds in all.
        checkpoints: how many, and their seconds in all.
        stalls: all of them, oldest first.
        ranks: rank -> shares of its wall time by bucket.
        exchanging: rank -> the share of it that exchanging takes by itself; None where that was not told.
        fed: rank -> images that its feed has made.
        attempts: how often the run was started.
    """

    ledger: Ledger
    started: Started
    recipe: Recipe
    ended: Ended | Failed | None = None
    position: int = 0
    first_epoch: Mapping[str, float] | None = None
    later: Mapping[str, float] | None = None
    step_seconds: tuple[float, float, float] = (0.0, 0.0, 0.0)
    wait_seconds: tuple[float, float, float] = (0.0, 0.0, 0.0)
    step_parts: Mapping[str, float] = field(default_factory=dict)
    slowest: Mapping[int, float] = field(default_factory=dict)
    feed: FeedStats | None = None
    feed_first: FeedStats | None = None
    machine: MachineStats | None = None
    machine_first: MachineStats | None = None
    devices: tuple[DeviceStats, ...] = ()
    measured: StepMeasured | None = None
    ceilings: Ceilings | None = None
    compiled: Compiled | None = None
    placed: FeedPlaced | None = None
    evaluations: tuple[int, float] = (0, 0.0)
    checkpoints: tuple[int, float] = (0, 0.0)
    stalls: tuple[Stalled, ...] = ()
    ranks: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    exchanging: Mapping[int, float | None] = field(default_factory=dict)
    fed: Mapping[int, int] = field(default_factory=dict)
    attempts: int = 1
