"""The wait for batches, by what the feed's threads were busy with meanwhile."""

from __future__ import annotations

from typing import Protocol

from steadytrain.events import FeedStats

Stages = tuple[float, float, float, float, float]
NOTHING: Stages = (0.0, 0.0, 0.0, 0.0, 0.0)
UNKNOWN: Stages = (0.0, 0.0, 0.0, 0.0, 1.0)


class Marked(Protocol):
    """A point of an attempt at which its waits by stage are noted."""

    step: int
    stages: Stages


class Waits:
    """Splits an attempt's wait, as it is told, by the work of the feed's threads between two ``FeedStats``.

    A thread that reads while the loop waits is what the loop waits for: the wait is split as the threads' busy seconds
    are, storage, decode, augment, batch, in the order of ``ledger.INPUT``. Where they were blocked for longer than they
    were busy they could have made more, and the wait comes from elsewhere: ``input_other``.
    """

    def __init__(self) -> None:
        self._settled: Stages = NOTHING
        self._pending = 0.0
        self._unsettled: list[tuple[Marked, float]] = []
        self._base: FeedStats | None = None
        self._newest: FeedStats | None = None

    def waited(self, mark: Marked, seconds: float) -> None:
        """So many seconds of waiting up to a mark, since the mark before; notes the stages at the mark."""
        self._pending += max(0.0, seconds)
        self._unsettled.append((mark, self._pending))
        mark.stages = self.after(0.0)
        if self._newest is not None and self._newest is not self._base and self._newest.step == mark.step:
            self._settle()

    def told(self, stats: FeedStats) -> None:
        """What the feed has done so far; it comes a moment before or after the mark that it belongs to."""
        self._newest = stats
        if self._unsettled and self._unsettled[-1][0].step == stats.step:
            self._settle()

    def after(self, seconds: float) -> Stages:
        """The stages when so many seconds of waiting follow the newest mark."""
        return _add(self._settled, self._shares(), self._pending + seconds)

    def _shares(self) -> Stages:
        """Of what is pending."""
        if self._newest is not None and self._newest is not self._base:
            return shares(self._base, self._newest)
        total = sum(self._settled)
        return _add(NOTHING, self._settled, 1 / total) if total > 0 else UNKNOWN

    def _settle(self) -> None:
        split = self._shares()
        for mark, pending in self._unsettled:
            mark.stages = _add(self._settled, split, pending)
        self._settled = _add(self._settled, split, self._pending)
        self._base, self._pending = self._newest, 0.0
        self._unsettled.clear()


def shares(before: FeedStats | None, after: FeedStats) -> Stages:
    """What each stage has of the busy seconds between two tellings (None: since the feed was made); adds up to 1.

    >>> shares(None, FeedStats(step=1, images=8, bytes=0, read_seconds=1.0, decode_seconds=3.0, batch_seconds=0.0,
    ...                        blocked_seconds=0.5, threads=1))
    (0.25, 0.75, 0.0, 0.0, 0.0)
    """
    busy, blocked = _busy(after), after.blocked_seconds
    if before is not None:
        since, waited = [a - b for a, b in zip(busy, _busy(before), strict=True)], blocked - before.blocked_seconds
        if min(*since, waited) >= -1e-6:  # else it is a feed made anew
            busy, blocked = [max(0.0, one) for one in since], waited
    total = sum(busy)
    if total <= 0 or blocked > total:
        return UNKNOWN
    read, decode, augment, batch = (one / total for one in busy)
    return read, decode, augment, batch, 0.0


def _busy(stats: FeedStats) -> list[float]:
    return [stats.read_seconds, stats.decode_seconds, stats.augment_seconds, stats.batch_seconds]


def _add(stages: Stages, more: Stages, factor: float) -> Stages:
    a, b, c, d, e = (one + factor * other for one, other in zip(stages, more, strict=True))
    return a, b, c, d, e
