"""The pace of the loop: the time of an update, what the feed and the processors need for one, and what bounds it.

An update takes as long as the slowest of three: the feed's threads making a batch, the update itself, and the
processors doing what both ask of them. Where the processors compute the update too, it takes longer by what the feed
takes of them (:attr:`Pace.held_up`). That is the whole model: a change moves one of these, and what it saves is the
difference of the largest. Where the loop makes its batches itself (``by_loop``), it takes what both take.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from steadytrain.events import FeedStats, MachineStats, ProbeProgress, ThreadStats
from steadytrain.monitor.evidence import Evidence
from steadytrain.monitor.ledger import INPUT, STEADY
from steadytrain.monitor.rules.host import THROTTLED, loop_time, rivals

# Share of the cores that may be idle on a machine that has nothing left to give: threads wait for each other a bit.
IDLE = 0.10
WAITS = 0.15  # a stage that waits for less than this part of the busy time of all does not count as waiting
FROM_DISK = 0.3  # images are read from a disk where at least this part of their bytes is
# Of the cores: what an update's threads use of them alone, since they wait for each other after each operation.
FULL = 0.87
STAGES = ("read", "decode", "augment", "batch")
PROBE_COUNTS = ("images", "bytes", "threads", "asked", "starved")
PROBE_SECONDS = (*(f"{stage}_seconds" for stage in STAGES), "blocked_seconds", "cpu_seconds")

NEAR = 6  # updates before or after the first batch of an epoch in which its lateness shows: batches are made some ahead
LEAST_UPDATES = 8 * NEAR  # updates of an epoch in which something can be said to be near its beginning
STANDS_OUT = 3.0  # times the usual update that one takes which a gap holds up, at least


@dataclass(frozen=True, kw_only=True)
class Pace:
    """A mean update, in one stretch of the run: all of it, its first pass over the data or what came later.

    Args:
        loop: share of the wall time that this stretch's updates take.
        step: seconds of an update, its wait included.
        wait: seconds of those that the loop waits for the batch.
        batch_size: images of it.
        feed: what the threads of the feed did; None where that is not known.
        machine: what the processors did; None where they were not sampled.
        cores: that this process may use.
        compute_threads: that compute the updates; 0 where a device does.
        queued: share of an update without its wait in which its threads wait for a processor; None: not looked at.
        feed_queued: seconds for each one that the feed's threads ran in which they waited for a processor.
        others: cores that other processes, and threads that are neither the update's nor the feed's, take.
        work: what is done with a batch: ``updates``, or ``features`` of a probe.
    """

    loop: float
    step: float
    wait: float
    batch_size: int
    feed: FeedStats | None
    machine: MachineStats | None
    cores: int
    compute_threads: int
    queued: float | None = None
    feed_queued: float = 0.0
    others: float = 0.0
    work: str = "updates"

    @property
    def exposed(self) -> float:
        """Share of the wall time that the loop waits for batches in this stretch."""
        return self.loop * self.wait / self.step if self.step > 0 else 0.0

    @property
    def update(self) -> float:
        """Seconds of an update without its wait."""
        return self.step - self.wait

    @property
    def busy(self) -> float:
        """Seconds that the feed's threads, taken together, are busy with one batch."""
        return sum(self.stage(name) for name in STAGES)

    def stage(self, name: str) -> float:
        """Return the seconds of one stage: ``read``, ``decode``, ``augment`` or ``batch``."""
        feed = self.feed
        if feed is None or feed.images <= 0:
            return 0.0
        return float(getattr(feed, f"{name}_seconds")) * self.batch_size / feed.images

    @property
    def threads(self) -> int:
        """Threads of the feed."""
        return max(1, self.feed.threads if self.feed else 1)

    @property
    def is_by_loop(self) -> bool:
        """Return whether the loop makes its batches itself."""
        return self.feed is not None and self.feed.by_loop

    @property
    def on_processor(self) -> float:
        """Share of the threads' busy time that they are on a processor; 1 where it is not known."""
        if self.feed is None or self.feed.cpu_seconds is None or self.busy <= 0:
            return 1.0
        busy = sum(float(getattr(self.feed, f"{name}_seconds")) for name in STAGES)
        return min(1.0, self.feed.cpu_seconds / busy)

    @property
    def idle(self) -> float | None:
        """Cores with nothing to do, waiting for disks included; None where it is not known."""
        machine = self.machine
        if machine is None or machine.idle is None:
            return None
        if is_limited_by_quota(machine):  # the others are idle, but not its to use
            return 0.0 if is_throttled(machine) else max(0.0, min(machine.idle, machine.cores - (machine.cpu or 0.0)))
        return machine.idle + (machine.iowait or 0.0)

    @property
    def is_saturated(self) -> bool:
        """Return whether all cores are busy."""
        return self.idle is not None and self.idle <= IDLE * self.cores

    @property
    def asleep(self) -> float:
        """Seconds of :attr:`busy` that the threads neither run nor wait for a processor: they wait for something else.

        On full cores any stage may wait for its turn; only reading, which computes nothing, waits for what it reads.
        """
        off = max(0.0, self.busy * (1 - self.on_processor * (1 + self.feed_queued)))
        return min(off, self.stage("read")) if self.is_saturated else off

    @property
    def is_from_disk(self) -> bool:
        """Return whether the feed reads from a disk, and not from the page cache."""
        machine, feed = self.machine, self.feed
        if machine is None or feed is None or feed.images <= 0 or self.step <= 0:
            return False
        needed = feed.bytes / feed.images * self.batch_size / self.step
        return needed > 0 and (machine.disk_read_bytes or 0.0) >= FROM_DISK * needed

    @property
    def is_unexplained(self) -> bool:
        """Return whether the loop's waits are not explained by the feed: its threads are idle most of the time."""
        is_fed_slowly = self.is_by_loop or self.busy / self.threads >= 0.6 * self.step
        return self.busy <= 0 or not (is_fed_slowly or self.is_saturated)

    @property
    def granted(self) -> float:
        """Cores that the run has and could have: what it uses and what is idle, without what others take."""
        if self.machine is None or self.machine.cpu is None or self.idle is None:
            return float(self.cores)
        return max(self.machine.cpu + self.idle, 1e-3)

    @property
    def used(self) -> float:
        """Cores that the run uses; 0 where it is not known."""
        return 0.0 if self.machine is None or self.idle is None else self.machine.cpu or 0.0

    @property
    def processors(self) -> float:
        """Seconds that an update takes at least, for the processor time that it and its batch need."""
        return self.step * self.used / self.granted

    @property
    def held_up(self) -> float:
        """Seconds of an update in which its threads wait for processors that the feed's threads have.

        Several threads wait for the last of them after each operation: each moment in which any of them is queued holds
        all of them up. One thread is held up by no more than what its processor time leaves of the update. Of the time
        queued, the feed's part is its part of those who have the cores; where nobody looked, no more than something
        waited for a core (pressure: the mean of the cores).
        """
        if not self.compute_threads or self.machine is None or not self.used or self.is_by_loop:
            return 0.0
        if self.queued is not None:
            waited = self.queued * self.update * self.feed_cores / max(self.feed_cores + self.others, 1e-9)
            if self.compute_threads > 1 and self.granted > 1:
                return waited
        else:
            waited = self.machine.pressure.get("cpu", 1.0) * self.cores * self.step
        full = FULL if self.compute_threads > 1 and self.granted > 1 else 1.0
        alone = self.beside_feed / (min(self.compute_threads, self.granted) * full)
        return min(max(0.0, self.update - alone), waited)

    @property
    def beside_feed(self) -> float:
        """Processor seconds of an update that the feed's threads do not take."""
        return max(0.0, self.step * self.used - self.busy * self.on_processor)

    @property
    def spun(self) -> float:
        """Processor seconds of an update that its threads spin while they wait for one that has no core."""
        return 0.0 if self.queued is None else self.held_up * max(0.0, min(self.compute_threads, self.granted) - 1)

    @property
    def feed_cores(self) -> float:
        """Cores that the feed's threads use."""
        return self.busy * self.on_processor / self.step if self.step > 0 else 0.0

    def with_threads(self, threads: int) -> float:
        """Seconds of an update with so many threads in the feed."""
        if self.is_by_loop:
            return self.step
        return min(self.step, max(self.busy / threads, self.update, self.processors))

    def with_compute_threads(self, threads: int, passes: float, left: float) -> float:
        """Seconds of an update whose passes, of ``passes`` seconds, take ``left`` of them with so many threads.

        Threads that wait for each other spin: all of them have a core meanwhile, which the feed's do not get.
        """
        beside_passes = max(0.0, self.beside_feed - passes * self.compute_threads)
        computing = beside_passes + threads * left * passes
        bound = (computing + self.busy * self.on_processor) / self.granted
        return min(self.step, max(self.step - passes * (1 - left), bound))

    def without(self, seconds: float, on_processor: float = 0.0) -> float:
        """Seconds of an update if the feed's threads were busy ``seconds`` less a batch, a share of it computing."""
        if self.is_by_loop:
            return max(self.step - seconds, self.update)
        computing = seconds * on_processor
        part = min(1.0, computing / max(self.busy * self.on_processor, 1e-12))
        update = self.update - self.held_up * part
        if computing > 0:
            bound = max(0.0, self.processors - (computing + self.spun * part) / self.granted)
        else:  # what computes still shares the cores: with each other, whatever others leave of them today
            bound = self.step * self.used / self.cores
        stays = self.wait if self.is_unexplained else 0.0
        paced = max((self.busy - seconds) / self.threads, update) + stays
        return min(self.step, max(paced, bound, self.step - seconds))

    def without_stages(self, factors: Mapping[str, float]) -> float:
        """Seconds of an update if stages of the feed took these factors of their time."""
        seconds = sum(self.stage(name) * (1 - factor) for name, factor in factors.items())
        return self.without(seconds, self.on_processor)

    def saved(self, step: float) -> float:
        """Share of the wall time that is saved if an update takes ``step`` seconds."""
        return self.loop * (self.step - step) / self.step if self.step > 0 else 0.0

    def saved_by_updates(self, share: float) -> float:
        """Share of the wall time saved if updates take ``share`` of it less: batches come no sooner for that."""
        if self.is_by_loop or self.is_unexplained:
            return share
        return min(share, self.saved(min(self.step, self.busy / self.threads)))

    def waits(self, stage: str) -> float:
        """Seconds of a batch that the threads wait in a stage: reading waits first, then what takes longest.

        Where the images come from a disk, all waiting is for it: files are mapped, and whoever first looks at their
        bytes waits.
        """
        asleep = self.asleep
        if self.is_from_disk:
            return asleep if stage == "read" else 0.0
        for name in ("read", *sorted(STAGES[1:], key=self.stage, reverse=True)):
            waits = min(asleep, self.stage(name))
            if name == stage:
                return waits
            asleep -= waits
        return 0.0

    def enough_threads(self) -> int:
        """The fewest threads beyond which more of them save nothing worth having."""
        most = 64 if self.asleep > WAITS * self.busy else max(self.threads + 1, self.cores)
        goal = self.with_threads(most)
        near = goal + (self.step - goal) / 20
        return next((n for n in range(self.threads, most) if self.with_threads(n) <= near), most)


def is_throttled(machine: MachineStats) -> bool:
    """Return whether a control group's quota throttled the process."""
    return (machine.throttled_seconds or 0.0) > THROTTLED * machine.seconds


def is_limited_by_quota(machine: MachineStats) -> bool:
    """Return whether a quota, and not affinity, limits the cores."""
    uses = (machine.cpu, machine.ranks, machine.others, machine.idle, machine.iowait, machine.steal)
    seen = sum(cores for cores in uses if cores is not None)
    return is_throttled(machine) or (machine.cores < machine.machine_cores and seen >= machine.cores + 0.5)


def paces(evidence: Evidence) -> tuple[Pace, ...]:
    """Return the pace of the first pass over the data and of what came later, or of a run that has only one of them.

    They differ where files come from a disk at first and from memory afterwards, or decoded images are kept.
    """
    both = mean_pace(evidence)
    shares = [shares for shares in (evidence.first.shares, evidence.steady.shares) if shares is not None]
    if both is None or len(shares) < 2:
        return () if both is None else (both,)
    first, later = (sum(part.get(bucket, 0.0) for bucket in INPUT) for part in shares)
    loop, gap = evidence.ledger.share(*STEADY), gap_share(evidence)
    images = min(1.0, evidence.num_train / evidence.position) if evidence.position else 0.5
    begin, later_loop = loop * evidence.first_part, max(0.0, loop * (1 - evidence.first_part) - gap)
    update = both.step / (loop - gap)  # seconds of one, for each share of the wall time
    waiting = max(0.0, loop * (1 - evidence.first_part) * later - gap) / max(later_loop, 1e-9)
    return (
        _pace(evidence, begin, update * begin / max(images, 1e-9), first, is_first=True),
        _pace(evidence, later_loop, update * later_loop / max(1 - images, 1e-9), min(1.0, waiting)),
    )


def mean_pace(evidence: Evidence) -> Pace | None:
    """Return the pace of all updates, without the waits around epochs' beginnings; None before there are some."""
    ledger = evidence.ledger
    loop, gap = ledger.share(*STEADY), gap_share(evidence)
    if ledger.steady_images_per_second <= 0 or loop <= 0 or loop <= gap:
        return None
    step = evidence.recipe.batch_size / ledger.steady_images_per_second * (loop - gap) / loop
    return _pace(evidence, loop - gap, step, max(0.0, ledger.share(*INPUT) - gap) / (loop - gap))


def probe_pace(evidence: Evidence) -> Pace | None:
    """Return the pace of a probe's features; None where there is none, or updates take more of the time."""
    probe, ledger, threads = evidence.newest(ProbeProgress), evidence.ledger, evidence.newest(ThreadStats)
    if probe is None or not probe.images_per_second or ledger.share("probe") <= ledger.share(*STEADY):
        return None
    loop = min(ledger.share("probe"), probe.seconds / ledger.wall_seconds)
    step, waiting = evidence.recipe.batch_size / probe.images_per_second, min(1.0, probe.wait_seconds / probe.seconds)
    at = threads.loop.get("probe") if threads is not None else None
    queued = min(1.0, at.get("queued", 0.0) / at["seconds"]) if at and at["seconds"] > 0 else None
    feed: dict[str, Any] = {name: probe.feed.get(name) or 0.0 for name in PROBE_SECONDS}
    feed |= {name: int(probe.feed.get(name) or 0) for name in PROBE_COUNTS}
    return replace(_pace(evidence, loop, step, waiting), feed=FeedStats(step=0, **feed), queued=queued, work="features")


def gap_share(evidence: Evidence) -> float:
    """Return the share of the wall time that the loop waits around the beginnings of epochs, beyond the usual.

    It is read from the slowest updates: those near the first batch of an epoch that take many times the usual. What the
    ledger has as ``epoch_gap`` is not in it.
    """
    num_train, batch = evidence.num_train, evidence.recipe.batch_size
    usual, wall = evidence.updates.seconds[1], evidence.ledger.wall_seconds
    if num_train < LEAST_UPDATES * batch or usual <= 0 or wall <= 0:
        return 0.0
    late = 0.0
    for step, seconds in evidence.updates.slowest.items():
        epochs = evidence.started.batches.position(step) / num_train
        is_near = round(epochs) >= 1 and abs(epochs - round(epochs)) <= NEAR * batch / num_train
        late += seconds - usual if seconds >= STANDS_OUT * usual and is_near else 0.0
    return min(late / wall, evidence.ledger.share(*INPUT))


def _pace(evidence: Evidence, loop: float, step: float, waiting: float, *, is_first: bool = False) -> Pace:
    feed, other = (evidence.first.feed, evidence.feed) if is_first else (evidence.feed, evidence.first.feed)
    if feed is None or (feed.images <= 0 and other is not None):
        feed = other
    thread, threads = loop_time(evidence), evidence.newest(ThreadStats)
    fed = threads.feed if threads is not None else None
    return Pace(
        loop=loop,
        step=step,
        wait=step * waiting,
        batch_size=evidence.recipe.batch_size,
        feed=feed,
        machine=(evidence.first.machine if is_first else None) or evidence.machine,
        cores=evidence.cores,
        compute_threads=evidence.compute_threads if evidence.on_cpu else 0,
        queued=None if thread is None else thread.queued / thread.passes,
        feed_queued=fed["queued"] / fed["ran"] if fed and fed.get("ran") else 0.0,
        others=sum(rivals(evidence).values()),
    )
