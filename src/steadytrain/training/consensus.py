"""Decisions that all ranks must share: to stop, to save, to measure. Each has its own signals and clocks.

Their wishes are exchanged beside the updates: begun at the end of one update and read at the end of a later one, so
that nobody waits. The first rank chooses how many updates lie between, so that the exchange costs next to nothing.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import torch
import torch.distributed as dist

from steadytrain.distributed.process_group import Group
from steadytrain.machine.notices import SIGNAL

SIGNALS = ("", "SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP", SIGNAL)
"""Signals by the number that is exchanged: where several were sent, the last of these counts."""

PAUSE = 0.25
"""Seconds between two exchanges, about."""

MOST_UPDATES = 256


class Wish(NamedTuple):
    """The wish of a rank, or of all: to stop, by a signal of this name; to save; to measure; to end the run.

    With it goes ``save_seconds``, how long a checkpoint takes, which the rank that writes them knows; 0: not known.
    """

    stop: str | None = None
    save: bool = False
    measure: bool = False
    end: bool = False
    save_seconds: float = 0.0


class Alone:
    """The decisions of one process: it does what it wishes."""

    def ask(self, wish: Wish) -> Wish:
        """After an update: return what to do now. A wish that is not granted at once is to be repeated."""
        return wish

    def ask_now(self, wish: Wish) -> Wish:
        """Return what to do now, where it may take a moment; nothing is measured then."""
        return wish

    def close(self) -> None:
        """End the last exchange."""


class Together(Alone):
    """The decisions of several ranks: what any of them wishes, all do."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._pending: tuple[dist.Work, torch.Tensor] | None = None
        self._interval, self._left = 1, 1  # updates between two exchanges; until the next
        self._began, self._done = time.perf_counter(), 0  # of the last exchange, and the updates since
        self._is_measuring_wanted = False

    def ask(self, wish: Wish) -> Wish:
        self._is_measuring_wanted |= wish.measure  # it is wished once
        self._left -= 1
        self._done += 1
        if self._left:
            return Wish()
        decision = self._finish()
        self._is_measuring_wanted &= not decision.measure
        self._begin(wish._replace(save=wish.save and not decision.save))  # it is saved now
        self._left = self._interval
        return decision

    def ask_now(self, wish: Wish) -> Wish:
        first = self._finish()
        self._begin(wish)
        then = self._finish()
        self._left = self._interval
        seconds = max(first.save_seconds, then.save_seconds)
        is_end = first.end or then.end  # what is to be measured is wished again
        return Wish(then.stop or first.stop, first.save or then.save, end=is_end, save_seconds=seconds)

    def close(self) -> None:
        self._finish()

    def _begin(self, wish: Wish) -> None:
        interval = 0
        if self._group.world.is_first:
            # As before where there was no update since the last exchange.
            now, interval = time.perf_counter(), self._interval
            if self._done:
                per_pause = PAUSE * self._done / max(now - self._began, 1e-6)
                interval = min(MOST_UPDATES, max(1, round(per_pause)))
            self._began, self._done = now, 0
        measure = self._is_measuring_wanted
        milliseconds = round(1000 * wish.save_seconds)
        values = torch.tensor([SIGNALS.index(wish.stop or ""), wish.save, measure, wish.end, interval, milliseconds])
        self._pending = self._group.begin_max(values), values

    def _finish(self) -> Wish:
        if self._pending is None:
            return Wish()
        work, values = self._pending
        self._pending = None
        work.wait()
        stop, save, measure, end, self._interval, milliseconds = values.tolist()
        return Wish(SIGNALS[stop] or None, bool(save), bool(measure), bool(end), milliseconds / 1000)
