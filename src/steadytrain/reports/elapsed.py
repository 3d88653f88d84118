"""A run's own time: from the start of its first process, the pauses between attempts left out.

>>> from steadytrain.events import Started
>>> told = Elapsed()
>>> first = Started(digest="", step=0, steps=9, steps_per_epoch=3, batch_size=1, time=1010.0, startup={"process": 10.0})
>>> told.begin(first)
>>> told.seen(1050.0)
>>> told.begin(Started(digest="", step=0, steps=9, steps_per_epoch=3, batch_size=1, time=9000.0))
>>> told.at(1020.0), told.at(5000.0), told.at(9001.0), told.away
(20.0, 50.0, 51.0, 7950.0)
"""

from __future__ import annotations

from dataclasses import dataclass

from steadytrain.events import Started


@dataclass
class _Stretch:
    """One attempt: when its process began, its last sign, and the run's own seconds before it."""

    began: float
    last: float
    before: float


class Elapsed:
    """Moments (seconds since 1970) as seconds of the run."""

    def __init__(self) -> None:
        self._stretches: list[_Stretch] = []

    def begin(self, started: Started) -> None:
        """An attempt began; its process is older than its first event."""
        began = started.time - sum(started.startup.values())
        before = 0.0
        if self._stretches:
            last = self._stretches[-1]
            began = max(began, last.last)  # clocks that were set back give no time twice
            before = last.before + last.last - last.began
        self._stretches.append(_Stretch(began, max(began, started.time), before))

    def seen(self, time: float) -> None:
        """The newest attempt gave a sign then."""
        if self._stretches:
            self._stretches[-1].last = max(self._stretches[-1].last, time)

    def at(self, time: float) -> float:
        """Seconds of the run at a moment; one in a pause is the pause's beginning, the newest attempt may go on."""
        earlier = [one for one in self._stretches if one.began <= time] or self._stretches[:1]
        if not earlier:
            return 0.0
        last = earlier[-1]
        until = time if last is self._stretches[-1] else min(time, last.last)
        return last.before + max(0.0, until - last.began)

    @property
    def total(self) -> float:
        """Seconds of the run up to its newest sign."""
        return self.at(self._stretches[-1].last) if self._stretches else 0.0

    @property
    def began(self) -> float:
        """When its first process began, seconds since 1970; 0 before it did."""
        return self._stretches[0].began if self._stretches else 0.0

    @property
    def away(self) -> float:
        """Seconds of the pauses between attempts."""
        if not self._stretches:
            return 0.0
        return self._stretches[-1].last - self.began - self.total
