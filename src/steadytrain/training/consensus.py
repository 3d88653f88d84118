"""What ranks have to decide alike: to stop, to save, to measure. Each has its own signals and clocks.

Their wishes go round beside the updates: begun at the end of one update and read at the end of a later one, so that
nobody waits. How many updates lie between is chosen so that it costs nothing to speak of, by the first rank.
"""

from __future__ import annotations

import time
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist

from steadytrain.distributed.process_group import Group

SIGNALS = ("", "SIGINT", "SIGTERM", "SIGUSR1")
"""By the number that goes round: where several were sent, the last of these counts."""

PAUSE = 0.25
"""Seconds between two rounds, about."""

MOST_UPDATES = 256


class Wish(NamedTuple):
    """What a rank wants, or all of them do: to stop, by a signal of this name; to save; to measure."""

    stop: str | None = None
    save: bool = False
    measure: bool = False


class Agreement(Protocol):
    """How ranks come to one decision."""

    def ask(self, own: Wish) -> Wish:
        """After an update: what all do now. A wish that is not granted at once is to be repeated."""

    def ask_now(self, own: Wish) -> Wish:
        """The same, where it may take a moment; nothing is measured then."""

    def close(self) -> None:
        """Nothing is asked any more."""


class Alone:
    """One process does what it likes."""

    def ask(self, own: Wish) -> Wish:
        return own

    def ask_now(self, own: Wish) -> Wish:
        return own

    def close(self) -> None:
        pass


class Together:
    """What any rank wants, all do.

    Args:
        group: the ranks.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._going: tuple[dist.Work, torch.Tensor] | None = None
        self._updates, self._left = 1, 1  # between two rounds; until the next
        self._began, self._done = time.perf_counter(), 0  # of the last round, and the updates since
        self._is_measuring_wanted = False

    def ask(self, own: Wish) -> Wish:
        self._is_measuring_wanted |= own.measure  # it is wanted once
        self._left -= 1
        self._done += 1
        if self._left:
            return Wish()
        heard = self._heard()
        self._is_measuring_wanted &= not heard.measure
        self._begin(own._replace(save=own.save and not heard.save))  # it is saved now
        self._left = self._updates
        return heard

    def ask_now(self, own: Wish) -> Wish:
        first = self._heard()
        self._begin(own)
        then = self._heard()
        self._left = self._updates
        return Wish(then.stop or first.stop, first.save or then.save)  # what is to be measured goes round again

    def close(self) -> None:
        self._heard()

    def _begin(self, own: Wish) -> None:
        updates = self._pace() if self._group.world.is_first else 0
        wishes = [SIGNALS.index(own.stop or ""), own.save, self._is_measuring_wanted, updates]
        told = torch.tensor([int(one) for one in wishes])
        self._going = self._group.begin_max(told), told

    def _pace(self) -> int:
        """Updates until the next round: as before where there was none since the last one."""
        now = time.perf_counter()
        seconds, done = now - self._began, self._done
        self._began, self._done = now, 0
        return min(MOST_UPDATES, max(1, round(PAUSE * done / max(seconds, 1e-6)))) if done else self._updates

    def _heard(self) -> Wish:
        if self._going is None:
            return Wish()
        work, told = self._going
        self._going = None
        work.wait()
        stop, save, measure, self._updates = told.tolist()
        return Wish(SIGNALS[stop] or None, bool(save), bool(measure))
