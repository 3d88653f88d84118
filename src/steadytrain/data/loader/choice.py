"""Where a feed's threads are to live, found out by measuring beside the loop that takes its batches.

The loop's time for a batch is measured while the feed works as it does, and while it is held still with batches ready:
what lies between the two is what the feed costs. Windows of both kinds alternate and are compared in pairs. Each figure
is a median of many pairs, and there are several: other programs, which come and go, move some of the pairs.

Threads are what a feed begins with. Only where each figure says that they cost the loop more than :data:`LIMIT` is a
process tried, in the midst of the same stream; it stays if each of its figures is below each of theirs.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Literal

Place = Literal["threads", "process"]

LIMIT = 0.05  # of the loop's time: less is not worth a process
TAKEN = 0.02  # of the loop's own time, waiting for batches aside: below that, a process would change nothing
BLOCKS, BATCHES = 3, 96  # so many batches of each kind in a block
LONGEST_SECONDS = 0.02  # of a batch: a loop so slow is not bound by its interpreter, or not by much


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What was chosen, and the evidence.

    ``batch_seconds`` is the loop's time for a batch beside an idle feed; the costs are shares of that, the median
    figure of each place; None where it was not measured. ``batches`` were measured.
    """

    place: Place
    reason: str
    batch_seconds: float | None = None
    threads_cost: float | None = None
    process_cost: float | None = None
    batches: int = 0


class Gauge:
    """Tells what a feed costs the loop, batch by batch.

    A cycle has four times ``depth`` batches: the feed is held while the ``depth`` that are ready are taken; then it
    fills up again, which is not measured; then it works as it always does.

    Args:
        depth: of the feed.
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.cycles = max(8, BATCHES // depth)  # of a block
        self.batches = 0
        self.held: list[float] = []
        self.free: list[float] = []
        self.alone: list[float] = []  # of the free windows, the loop's own time
        self._own = self._called = 0.0

    @property
    def place(self) -> int:
        """Of the next batch in its cycle."""
        return self.batches % (4 * self.depth)

    @property
    def holds(self) -> bool:
        """Whether the feed is to be held while the next batch is taken."""
        return self.place < self.depth

    @property
    def done(self) -> bool:
        """Whether there is enough to judge by."""
        return len(self.free) == BLOCKS * self.cycles

    @property
    def batch_seconds(self) -> float:
        """The loop's time for a batch beside an idle feed."""
        return median(self.held) / self.depth

    def add(self, own: float, called: float) -> None:
        """The next batch: seconds that the feed was asked for it, and that the loop then took."""
        self._own += own
        self._called += called
        self.batches += 1
        if self.place == self.depth:
            self.held.append(self._own)
        elif self.place == 0:
            self.free.append(self._own + self._called)
            self.alone.append(self._own)
        if self.place % self.depth == 0:
            self._own = self._called = 0.0

    def costs(self) -> list[float]:
        """What the feed costs, as shares of the loop's time, by each block."""
        return self._over(self.free)

    def taken(self) -> list[float]:
        """The same of the loop's own time, waiting for batches aside."""
        return self._over(self.alone)

    def _over(self, seconds: list[float]) -> list[float]:
        shares = [free / held - 1 for free, held in zip(seconds, self.held, strict=True)]
        return [median(shares[at : at + self.cycles]) for at in range(0, len(shares), self.cycles)]


def worth_trying(threads: Gauge, *, made_here: bool = False) -> str | None:
    """None where a process is to be tried instead of threads; else why not.

    ``made_here``: whoever waits for a batch makes it meanwhile.
    """
    if threads.batch_seconds > LONGEST_SECONDS:
        return f"a batch takes the loop {1000 * threads.batch_seconds:.0f} ms"
    if min(threads.costs()) <= LIMIT:
        return f"threads do not clearly cost the loop more than {LIMIT:.0%}"
    if min(threads.taken()) <= TAKEN and not made_here:
        return "the loop waits for batches; it is not slowed down itself"
    return None


def judge(threads: Gauge, process: Gauge) -> Choice:
    """Choose between the two."""
    better = max(process.costs()) < min(threads.costs())
    return Choice(
        place="process" if better else "threads",
        reason="a process costs the loop less" if better else "a process did not clearly cost the loop less",
        batch_seconds=threads.batch_seconds,
        threads_cost=median(threads.costs()),
        process_cost=median(process.costs()),
        batches=threads.batches + process.batches,
    )


def stay(reason: str, threads: Gauge | None = None) -> Choice:
    """Threads, without trying anything else."""
    if threads is None or not threads.free:
        return Choice(place="threads", reason=reason)
    cost = median(threads.costs())
    seconds, batches = threads.batch_seconds, threads.batches
    return Choice(place="threads", reason=reason, batch_seconds=seconds, threads_cost=cost, batches=batches)
