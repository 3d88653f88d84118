"""The facts that a verdict is based on: a view of a run's history, made by :meth:`RunHistory.evidence`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar, cast

from steadytrain.config import Recipe
from steadytrain.events import Accounted, DeviceStats, Event, FeedStats, MachineStats, ServerStats, Started
from steadytrain.monitor.ledger import Ledger
from steadytrain.monitor.samples import UpdateTimes

E = TypeVar("E", bound=Event)
BESIDE = 0.15  # of the cores: other processes that use so many may slow a run none of whose threads waits for a core


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """A part of a run: its first pass over the data, or its steady part. None where nothing was recorded.

    Args:
        shares: of the seconds of ``ledger.STEADY``, by bucket; None in a run that has not come beyond its first pass.
        feed: what the feed did: counts and seconds are differences, nothing cumulative.
        machine: means, weighted by time (``cpu`` and ``idle``: during updates); sums of ``seconds`` and
            ``throttled_seconds``, the most of ``memory_bytes`` and ``threads``, the least of ``available_bytes``.
    """

    shares: Mapping[str, float] | None = None
    feed: FeedStats | None = None
    machine: MachineStats | None = None


@dataclass(frozen=True, kw_only=True)
class RankShares:
    """One rank: shares of its wall time by bucket, and the images that its feed has made.

    ``exchanging``: the share that exchanging takes by itself; None where that is not recorded. ``stopped``: the share
    in which its process was stopped.
    """

    by_bucket: Mapping[str, float] = field(default_factory=dict)
    exchanging: float | None = None
    images: int = 0
    stopped: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Grant:
    """A stretch of an attempt in which it might use as many cores: by affinity ``cores``, by a ``quota`` (0: none).

    ``step``: the updates done when it began; ``images``: trained on in it; ``seconds``: of its updates.
    """

    step: int
    cores: int
    quota: float
    images: int
    seconds: float

    @property
    def amount(self) -> float:
        """Cores' time that it might use."""
        return min(float(self.cores), self.quota or math.inf)


@dataclass(frozen=True, kw_only=True)
class Company:
    """The updates of an attempt while other processes were at work (``beside``) and while they were not (``alone``).

    ``alone`` and ``beside``: images, and the seconds of the updates.
    """

    alone: tuple[int, float] = (0, 0.0)
    beside: tuple[int, float] = (0, 0.0)


@dataclass(frozen=True, kw_only=True)
class PartTimes:
    """The mean update of a stretch of an attempt, up to ``step``: ``seconds`` by recorded bucket, of ``images``."""

    step: int
    images: int
    seconds: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The facts about a run as far as it has come; None and empty where nothing was recorded.

    Args:
        ledger: of rank 0.
        started: how the newest attempt began.
        position: images that the run has come to.
        first: the first pass over the data.
        steady: later passes where there are some, else all after the first figures.
        whole: the machine's means over all of the run, its start and evaluations included.
        first_part: of the seconds of ``ledger.STEADY``, the share that lies in the first pass.
        updates: how long updates take, warm-up left out.
        events: the newest of each kind: see :meth:`newest`.
        devices: means of each GPU over the steady part; ``energy_joules`` is a sum.
        evaluations: how many, and their seconds in all.
        checkpoints: how many, and the seconds in all that training paused for them.
        servers: what rank 0 exchanged with its servers in all; None: it has none.
        stopped: seconds in which the process was stopped: nothing of it ran, queued or waited.
        grants: of the newest attempt, its stretches with as many cores; none where that never changed.
        parts: of the newest attempt, its stretches of as many updates; none where it is too short.
        company: of the newest attempt, its updates with and without other processes at work.
        attempts: how often the run was started.
        lost_before_updates: seconds of attempts that ended before their run's first update, in the start or a probe.
        unreadable: lines of its event logs that are no events.
    """

    ledger: Ledger
    started: Started
    recipe: Recipe
    position: int = 0
    first: Stretch = Stretch()
    steady: Stretch = Stretch()
    whole: MachineStats | None = None
    first_part: float = 0.0
    updates: UpdateTimes = field(default_factory=UpdateTimes)
    events: Mapping[type[Event], Event] = field(default_factory=dict)
    devices: tuple[DeviceStats, ...] = ()
    evaluations: tuple[int, float] = (0, 0.0)
    checkpoints: tuple[int, float] = (0, 0.0)
    ranks: Mapping[int, RankShares] = field(default_factory=dict)
    servers: ServerStats | None = None
    stopped: float = 0.0
    grants: tuple[Grant, ...] = ()
    parts: tuple[PartTimes, ...] = ()
    company: Company = Company()
    attempts: int = 1
    lost_before_updates: float = 0.0
    unreadable: int = 0

    def newest(self, kind: type[E]) -> E | None:
        """Return the newest event of a kind that is measured once, such as ``Ceilings``; None where there is none."""
        return cast("E | None", self.events.get(kind))

    @property
    def feed(self) -> FeedStats | None:
        """The feed's activity in the steady part."""
        return self.steady.feed

    @property
    def machine(self) -> MachineStats | None:
        """The machine's means over the steady part."""
        return self.steady.machine

    @property
    def on_cpu(self) -> bool:
        """Return whether the processors compute the updates."""
        return str(self.started.machine.get("device", "cpu")) == "cpu"

    @property
    def cores(self) -> int:
        """Cores that the run may use."""
        return max(1, self.machine.cores if self.machine else int(self.started.machine.get("cores", 1)))

    @property
    def compute_threads(self) -> int:
        """Threads that compute on a processor, by the newest word: one at least."""
        accounted = self.newest(Accounted)
        newest = accounted.compute_threads if accounted is not None else None
        return newest or self.compute_threads_begun

    @property
    def compute_threads_begun(self) -> int:
        """Threads that computed on a processor when the attempt began."""
        return int(self.started.machine.get("compute_threads", 1) or 1)

    @property
    def takes_turns(self) -> bool:
        """Return whether more threads compute than there are cores, so that they wait for each other."""
        return self.on_cpu and self.compute_threads > self.cores

    @property
    def num_train(self) -> float:
        """Images of the training set; 0 where that is not known."""
        return float(self.started.data.get("num_train", 0) or 0)

    def mean_seconds(self, *buckets: str) -> float:
        """Return the mean seconds of an update in these buckets; 0 before there was one."""
        seconds, steps = (sum(self.ledger.seconds[bucket] for bucket in buckets), self.ledger.steps)
        return seconds / steps if steps > 0 else 0.0
