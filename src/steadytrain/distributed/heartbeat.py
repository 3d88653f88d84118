"""Heartbeat: each rank tells every second that it lives and where it is, and watches the next rank.

A rank that was killed, or whose machine lost its power or its network, sends no farewell: those that wait for its
gradients would wait for half an hour. Here its beats stop, the rank before it notices after ``SILENT`` seconds, and
every rank is told which one it was. All of it goes through the rendezvous store, not through the collective that hangs.
The store itself may be on a machine that is gone, where every request hangs: a second thread watches whether its
answers still come.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from steadytrain.distributed.world import World
from steadytrain.errors import RankLostError

BEAT = 1.0
"""Seconds between two beats."""

SILENT = 30.0
"""Seconds without a beat after which a rank counts as lost."""

GRACE = 10.0
"""Seconds that a rank has, when another is lost, to leave the collective and end by itself."""

_FAILED, _LEFT, _STOP = "failed", "left", "stop"
_AGAIN = ": run the same command again"  # not where a rank failed: its own message says what to do
_AWAY = 3  # beats that a rank may miss, where a collective has failed, before it counts as gone
_LOOKS = 4


class Heartbeat:
    """The signs of this rank, and what the others' say.

    Args:
        store: where all of them met, a ``torch.distributed.Store``.
        world: of this rank.
        hosts: the machine of each rank.

    Attributes:
        at: returns what this rank is doing, in words, and for how many seconds; None: not known.
        end: called with the message, in a thread of its own, where another rank was lost and this one does not leave
            the collective; by default it ends the process.
        stop: the signal by which any rank was asked to stop, a beat or two after that rank has told; None: none was.
    """

    def __init__(self, store: Any, world: World, hosts: Sequence[str]) -> None:
        self.at: Callable[[], tuple[str, float]] | None = None
        self.end: Callable[[str], None] = _end
        self.stop: str | None = None
        self._store, self._world, self._hosts = store, world, hosts
        self._left = threading.Event()
        self._looked = threading.Condition()
        self._failed: str | None = None
        self._number = 0
        self._threads = [
            threading.Thread(target=do, name=name, daemon=True)
            for name, do in (("steady-heartbeat", self._beat), ("steady-heartbeat-guard", self._guard))
        ]
        for thread in self._threads:
            thread.start()

    def fail(self, message: str) -> None:
        """Tell the others that this rank fails, and why; the first failure counts."""
        self._report(self._world.rank, f"failed: {message}")

    def ask_to_stop(self, signal: str, about: Mapping[str, Any]) -> None:
        """Tell the others that this rank was asked to stop, and why: what it does may have no place to agree on it."""
        with suppress(RuntimeError):
            asked = {"rank": self._world.rank, "host": self._hosts[self._world.rank], "signal": signal, **about}
            self._store.compare_set(_STOP, "", json.dumps(asked))

    def asked_to_stop(self) -> Mapping[str, Any] | None:
        """Return which rank was the first to be asked to stop, its host, the signal and what it told; None: none."""
        with suppress(RuntimeError):
            if self._store.check([_STOP]):
                return dict(json.loads(self._store.get(_STOP)))
        return None

    def lost(self) -> str | None:
        """Say which rank was lost, where a collective has just failed, and what to do about it."""
        for _ in range(_LOOKS):
            before = self._all_beats()
            with self._looked:
                if self._looked.wait_for(lambda: self._failed is not None, _AWAY * BEAT):
                    return self._failed
            for rank, beat in self._all_beats().items():
                if beat == before.get(rank) and (beat is None or beat[0] != _LEFT):
                    self._report(rank, f"is gone{_at(beat)}{_AGAIN}")
                    return self._failed
        return None

    def where(self) -> dict[int, tuple[str, float]]:
        """Say what each other rank last reported to be doing, and for how many seconds."""
        return {rank: (str(beat[1]), float(beat[2])) for rank, beat in self._all_beats().items() if beat is not None}

    def close(self) -> None:
        """Stop beating; closing twice is fine."""
        if not self._left.is_set():
            with suppress(RuntimeError):
                self._store.set(f"sign/{self._world.rank}", json.dumps([_LEFT, "", 0.0]))
        self._left.set()
        for thread in self._threads:
            thread.join(5 * BEAT)

    def _beat(self) -> None:
        silent, before = 0, None  # counted in beats of its own: a rank that was stopped knows nothing of others
        other = (self._world.rank + 1) % self._world.size
        while not self._left.wait(BEAT):
            self._number += 1
            try:
                at = ("", 0.0) if self.at is None else self.at()
                self._store.set(f"sign/{self._world.rank}", json.dumps([self._number, *at]))
                beat = self._read_beat(other)
                silent = silent + 1 if beat == before and (beat is None or beat[0] != _LEFT) else 0
                before = beat
                if silent * BEAT > SILENT:
                    self._report(other, f"has sent no heartbeat for {SILENT:.0f} s{_at(beat)}{_AGAIN}")
                self._look()
                if self.stop is None and (asked := self.asked_to_stop()) is not None:
                    self.stop = str(asked["signal"])
            except RuntimeError:  # the store is in a process of rank 0, or of its launcher
                self._fail(f"{self._place()} is gone{_AGAIN}")

    def _guard(self) -> None:
        """Watch that the store answers, and end this rank where another one is lost."""
        silent, before = 0, 0
        ended: float | None = None
        while not self._left.wait(BEAT):
            silent, before = silent + 1 if self._number == before else 0, self._number
            if silent * BEAT > SILENT:
                self._fail(f"{self._place()} has not responded for {SILENT:.0f} s{_AGAIN}")
            if self._failed is not None:
                ended = ended or time.monotonic()
                if time.monotonic() - ended > GRACE:
                    self.end(self._failed)
                    return

    def _place(self) -> str:
        """The host of the store, in words for a message."""
        host = f" on {self._hosts[0]}" if self._hosts[0] else ""
        return f"rank 0{host}, or the launcher's rendezvous,"

    def _all_beats(self) -> dict[int, list[Any] | None]:
        """The last beat of each other rank: its number, what it was doing, for how many seconds."""
        with suppress(RuntimeError):
            return {rank: self._read_beat(rank) for rank in range(self._world.size) if rank != self._world.rank}
        return {}

    def _read_beat(self, rank: int) -> list[Any] | None:
        key = f"sign/{rank}"
        if not self._store.check([key]):
            return None
        beat = json.loads(self._store.get(key))
        return beat if isinstance(beat, list) else None

    def _report(self, rank: int, message: str) -> None:
        failure = json.dumps({"rank": rank, "message": message, "process": os.getpid()})
        with suppress(RuntimeError):
            self._store.compare_set(_FAILED, "", failure)
            self._look()

    def _look(self) -> None:
        if self._failed is None and self._store.check([_FAILED]):
            failure = json.loads(self._store.get(_FAILED))
            rank = int(failure["rank"])
            self._fail(f"rank {rank} on {self._hosts[rank]} {failure['message']}")

    def _fail(self, message: str) -> None:
        with self._looked:
            self._failed = self._failed or message
            self._looked.notify_all()


def _at(beat: list[Any] | None) -> str:
    return f", at {beat[1]}" if beat and beat[1] else ""


def _end(message: str) -> None:
    os.write(2, f"steady: {message}\n".encode(errors="replace"))
    os._exit(RankLostError.exit_code)
