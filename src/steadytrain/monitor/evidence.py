"""The facts that a verdict is based on: a view of a run's history."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from steadytrain.config import Recipe
from steadytrain.errors import RunError
from steadytrain.events import (
    Ceilings,
    Compiled,
    DeviceStats,
    FeedStats,
    MachineStats,
    ServerStats,
    Started,
    StepMeasured,
    ThreadStats,
)
from steadytrain.monitor.history import RunHistory, read_history
from steadytrain.monitor.ledger import INPUT, STEADY, Ledger, empty
from steadytrain.monitor.samples import FIRST, LATER, START
from steadytrain.run import Run


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The facts about a run as far as it has come; None and empty where nothing was recorded.

    Args:
        ledger: of rank 0.
        started: how the newest attempt began.
        recipe: what is trained.
        position: images that the run has come to.
        first_epoch: shares of the seconds of ``ledger.STEADY`` by bucket, in the first pass over the data; None in a
            run that has not come beyond it.
        later: the same of what follows.
        first_part: of those seconds, the share that lies in the first pass.
        step_seconds: 5th, 50th and 95th percentile of an update's seconds, its wait included, warm-up left out; zeros
            where there was none.
        wait_seconds: the same percentiles of the wait in them.
        fast_update: seconds without its wait of an update that a quarter of them undercut; 0 where there was none.
        step_parts: mean seconds of an update: ``input``, ``transfer``, ``host``, ``forward``, ``backward``,
            ``optimizer``, ``update`` (of unknown parts), ``communication``, ``logging``.
        slowest: the slowest updates after the warm-up: step -> seconds; at most 32.
        feed: what the feed did in the steady part (later epochs where there are some, else all after the first
            figures): counts and seconds are differences, nothing cumulative.
        feed_first: the same of the first pass over the data.
        machine: means over the steady part, weighted by time (``cpu`` and ``idle``: during updates); sums of
            ``seconds`` and ``throttled_seconds``, the most of ``memory_bytes`` and ``threads``, the least of
            ``available_bytes``.
        machine_first: the same of the first pass over the data.
        devices: the same of each GPU; ``energy_joules`` is a sum.
        measured, ceilings, compiled, threads: the newest of their kind.
        evaluations: how many, and their seconds in all.
        checkpoints: how many, and the seconds in all that training paused for them.
        ranks: rank -> shares of its wall time by bucket.
        exchanging: rank -> the share of it that exchanging takes by itself; None where that is not recorded.
        servers: what rank 0 exchanged with its servers in all; None: it has none.
        fed: rank -> images that its feed has made.
        attempts: how often the run was started.
        unreadable: lines of its event logs that are no events.
    """

    ledger: Ledger
    started: Started
    recipe: Recipe
    position: int = 0
    first_epoch: Mapping[str, float] | None = None
    later: Mapping[str, float] | None = None
    first_part: float = 0.0
    step_seconds: tuple[float, float, float] = (0.0, 0.0, 0.0)
    wait_seconds: tuple[float, float, float] = (0.0, 0.0, 0.0)
    fast_update: float = 0.0
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
    threads: ThreadStats | None = None
    evaluations: tuple[int, float] = (0, 0.0)
    checkpoints: tuple[int, float] = (0, 0.0)
    ranks: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    exchanging: Mapping[int, float | None] = field(default_factory=dict)
    servers: ServerStats | None = None
    fed: Mapping[int, int] = field(default_factory=dict)
    attempts: int = 1
    unreadable: int = 0

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
        """Threads that compute on a processor: one at least."""
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


def evidence(run: Run) -> Evidence:
    """Read the evidence of a run, of all of its ranks; the run may still be going on.

    Raises:
        RunError: nothing was started in it yet.
    """
    return gather_evidence(read_history(run))


def gather_evidence(history: RunHistory) -> Evidence:
    """Collect the evidence in a history. Raises RunError before the run began."""
    started = history.started
    if started is None:
        raise RunError("this run has not started yet: start it, then try again")
    ledger, samples, steps = history.ledger(), history.samples, history.step_times
    parts: dict[str, float] = {}
    if ledger.steps > 0:
        parts = {bucket: ledger.seconds[bucket] for bucket in STEADY if bucket not in INPUT}
        parts["input"] = sum(ledger.seconds[bucket] for bucket in INPUT)

    middles = [attempt.after_first_epoch() for attempt in history.attempts]
    ends = [attempt.end() for attempt in history.attempts]
    first_epoch = later = None
    first_part = 0.0
    length = history.attempts[-1].num_train
    if length and history.position > length + 2 * started.batch_size:
        first_seconds, later_seconds = empty(), empty()
        for attempt, middle, end in zip(history.attempts, middles, ends, strict=True):
            then, now = history.by_bucket(middle, attempt), history.by_bucket(end, attempt)
            for bucket in STEADY:
                first_seconds[bucket] += then[bucket]
                later_seconds[bucket] += max(0.0, now[bucket] - then[bucket])
        first_epoch, later = _steady_shares(first_seconds), _steady_shares(later_seconds)
        spent = [sum(seconds[bucket] for bucket in STEADY) for seconds in (first_seconds, later_seconds)]
        first_part = _ratio(spent[0], sum(spent)) or 0.0
    cores_first = cores = None
    if samples.placed is None or samples.placed.place != "process":  # a feed in a process of its own computes as well
        cpu_first, cpu = (sum(mark.update_cpu for mark in marks) for marks in (middles, ends))
        updating_first, updating = (sum(mark.updating for mark in marks) for marks in (middles, ends))
        cores_first = _ratio(cpu_first, updating_first)
        cores = _ratio(cpu - cpu_first, updating - updating_first) or cores_first
    feeds = {rank: other.samples.feed(LATER, FIRST, START) for rank, other in history.ranks.items()}
    return Evidence(
        ledger=ledger,
        started=started,
        recipe=history.recipe,
        position=history.position,
        first_epoch=first_epoch,
        later=later,
        first_part=first_part,
        step_seconds=steps.seconds,
        wait_seconds=steps.waits,
        fast_update=steps.fast_update,
        step_parts={name: seconds / ledger.steps for name, seconds in parts.items()},
        slowest=steps.slowest,
        feed=samples.feed(LATER, FIRST, START),
        feed_first=samples.feed(FIRST, START),
        machine=_during_updates(samples.machine(LATER, FIRST, START), cores),
        machine_first=_during_updates(samples.machine(FIRST, START), cores_first),
        devices=samples.gpus(LATER, FIRST, START),
        measured=samples.measured,
        ceilings=samples.ceilings,
        compiled=samples.compiled,
        threads=samples.threads,
        evaluations=samples.evaluations,
        checkpoints=samples.checkpoints,
        ranks={rank: other.ledger().shares for rank, other in history.ranks.items()},
        exchanging={rank: other.exchanging for rank, other in history.ranks.items()},
        servers=samples.servers,
        fed={rank: feed.images if feed else 0 for rank, feed in feeds.items()},
        attempts=len(history.attempts),
        unreadable=history.unreadable,
    )


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
