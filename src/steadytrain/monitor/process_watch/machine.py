"""The machine around a foreign process: its processors, who else uses them, quota, pressure, swapping."""

from __future__ import annotations

import math
import time
from collections.abc import Collection
from dataclasses import dataclass, field

from steadytrain.monitor.process_watch import proc
from steadytrain.monitor.process_watch.facts import MachineLoad

_SWAP_PAGES = "pswpin"


@dataclass(frozen=True)
class _Counters:
    at: float
    processors: dict[int, tuple[float, float, float, float]]
    own_seconds: float
    pressure: dict[str, float]


@dataclass
class Machine:
    """Takes the counters at each look and tells what they did since the one before."""

    _before: _Counters | None = None
    _quota: float | None = None
    _throttled: float | None = None
    _periods: tuple[int, int] | None = None
    _swapped: tuple[float, int] | None = None
    _swap_in: float | None = None
    _allowed: set[int] = field(default_factory=set)
    _memory: dict[str, str] = field(default_factory=dict)

    def slow(self, pid: int, pids: Collection[int]) -> None:
        """Take in what changes seldom or is told in steps of a tenth of a second and more; about once a second."""
        self._allowed = set().union(*(proc.allowed(one) or set() for one in pids))
        self._quota = proc.quota(pid)
        self._memory = proc.table("/proc/meminfo")
        periods = proc.throttled(pid)
        if periods and self._periods and periods[0] > self._periods[0]:
            self._throttled = (periods[1] - self._periods[1]) / (periods[0] - self._periods[0])
        self._periods = periods
        self._look_at_swap()

    def _look_at_swap(self) -> None:
        told = proc.table("/proc/vmstat").get(_SWAP_PAGES)
        now = None if told is None else (time.monotonic(), int(told))
        if now and self._swapped and now[0] > self._swapped[0]:
            self._swap_in = (now[1] - self._swapped[1]) * proc.PAGE_BYTES / (now[0] - self._swapped[0])
        self._swapped = now

    def look(self, tree_cpu: float) -> MachineLoad | None:
        """What happened since the last look; None at the first.

        Args:
            tree_cpu: cores that the watched processes used meanwhile.
        """
        now = _Counters(
            at=time.monotonic(),
            processors=proc.processor_times(),
            own_seconds=time.process_time(),
            pressure=proc.pressure(),
        )
        before, self._before = self._before, now
        return None if before is None else self._load(before, now, tree_cpu)

    def _load(self, before: _Counters, now: _Counters, tree_cpu: float) -> MachineLoad:
        seconds = max(1e-6, now.at - before.at)
        mine = (self._allowed or set(now.processors)) & set(now.processors) & set(before.processors)
        gone = [
            sum(max(0.0, now.processors[one][which] - before.processors[one][which]) for one in mine) / seconds
            for which in range(4)
        ]
        own = (now.own_seconds - before.own_seconds) / seconds
        busy, idle, iowait, steal = gone if mine else (None, None, None, None)
        cores = len(mine) or len(now.processors) or 1
        return MachineLoad(
            cores=max(1, min(cores, math.ceil(self._quota or cores))),
            processors=cores,
            quota=self._quota,
            idle=idle,
            iowait=iowait,
            steal=steal,
            others=None if busy is None else max(0.0, busy - tree_cpu - own),
            throttled=self._throttled,
            pressure={
                what: min(1.0, (total - before.pressure[what]) / seconds)
                for what, total in now.pressure.items()
                if what in before.pressure
            },
            swap_in_bytes=self._swap_in,
            available_bytes=self._bytes("MemAvailable"),
            memory_bytes=self._bytes("MemTotal"),
        )

    def _bytes(self, name: str) -> int | None:
        told = self._memory.get(name, "").split()
        return int(told[0]) * 1024 if told and told[0].isdigit() else None
