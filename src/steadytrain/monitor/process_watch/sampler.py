"""Sample a process and its descendants several times a second; each sample is a :class:`Moment`.

It never touches what it watches: everything is read from ``/proc``. A look lasts as long as there are threads to read;
:attr:`Sampler.pause` grows with it, so that watching takes at most a fiftieth of one processor.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from steadytrain.errors import InputError
from steadytrain.machine import cgroups
from steadytrain.machine.nvml import GpuWatcher
from steadytrain.machine.process_tree import (
    ProcessStat,
    ProcessTree,
    command_line,
    open_gpu_devices,
    read_schedstat,
    read_stat,
    thread_ids,
    waits_in,
)
from steadytrain.machine.procfs import (
    PAGE_BYTES,
    PRESSURES,
    ProcessorSeconds,
    parse_table,
    pressure_seconds,
    processor_seconds,
    read,
    read_counters,
)
from steadytrain.machine.sampler import busiest_between, shares_between
from steadytrain.monitor.process_watch.moments import MachineLoad, Moment, ProcessLoad, ThreadLoad

SHORTEST_PAUSE, LONGEST_PAUSE = 0.1, 2.0
_COST = 0.02
_SLOW_SECONDS = 1.0
_STATES_EVERY = 10
_MEAN_OF = 10
_ENDED = "ZX"


class Sampler:
    """Watches ``pid`` and its descendants, also those whose parents have ended since.

    Args:
        pid: the process.
        gpus: a reader of GPUs; one is opened where none is given.

    Raises:
        InputError: there is no such process, or it has ended.
    """

    def __init__(self, pid: int, *, gpus: GpuWatcher | None = None) -> None:
        first = read_stat(f"/proc/{pid}")
        if first is None:
            raise InputError(f"there is no process {pid}: `ps aux` lists those that run")
        if first.state in _ENDED:
            raise InputError(f"process {pid} ({first.name}) has already ended")
        if not first.virtual_bytes and first.parent in (0, 2):
            raise InputError(f"{pid} ({first.name}) is a kernel thread, not a process")
        self.pid, self._started = pid, first.started
        self.pause = SHORTEST_PAUSE
        self._tree = ProcessTree(pid)
        self._known: dict[int, _ProcessReader] = {}
        self._gpus = gpus or GpuWatcher()
        self._machine = _MachineReader()
        self._began = self._last = time.monotonic()
        self._slow_at = -_SLOW_SECONDS
        self._count, self._cost = 0, 0.0
        self._missing: dict[str, None] = {}
        self.look()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._gpus.close()

    @property
    def command(self) -> str:
        """Its command line, or its program's name where permission is lacking."""
        stat = read_stat(f"/proc/{self.pid}")
        return command_line(self.pid) or ("" if stat is None else stat.name)

    @property
    def lives(self) -> bool:
        """Return whether the watched process still runs."""
        stat = read_stat(f"/proc/{self.pid}")
        return stat is not None and stat.started == self._started and stat.state not in _ENDED

    def look(self) -> Moment | None:
        """Return what happened since the last look; None where nothing of the tree is left."""
        began, worked = time.monotonic(), time.process_time()
        seconds, self._last = max(1e-6, began - self._last), began
        self._count += 1
        stats = {pid: stat for pid, stat in self._tree.stats().items() if stat.state not in _ENDED}
        self._known = {pid: self._known.get(pid) or _ProcessReader(pid, self._missing) for pid in stats}
        if began - self._slow_at >= _SLOW_SECONDS:
            self._slow_at = began
            strangers = self._tree.strangers()
            strangers.pop(os.getpid(), None)
            self._machine.read_slowly(self.pid, stats, strangers)
            for known in self._known.values():
                known.read_slowly()
        every = self._count % _STATES_EVERY == 0
        loads = tuple(self._known[pid].read(stat, seconds, every=every) for pid, stat in stats.items())
        machine = self._machine.read(sum(load.cpu for load in loads))
        devices_of = [known.devices for known in self._known.values()]
        devices = {name for names in devices_of for name in names or ()}
        if devices and self._gpus.missing:
            self._missing[f"what the GPU does ({self._gpus.missing})"] = None
        if "kfd" in devices:
            self._missing["what the GPU does (it is an AMD GPU; only NVIDIA's are supported)"] = None
        gpus = self._gpus.read(set(stats), None if None in devices_of else devices)
        self._cost += (time.process_time() - worked - self._cost) / min(self._count, _MEAN_OF)
        self.pause = min(LONGEST_PAUSE, max(SHORTEST_PAUSE, self._cost / _COST))
        if machine is None or not loads:
            return None
        return Moment(
            at=began - self._began,
            seconds=seconds,
            processes=loads,
            machine=machine,
            gpus=gpus,
            missing=tuple(self._missing),
        )


@dataclass(frozen=True)
class ThreadCounters:
    """A thread's counters at a look, all since it began.

    ``queued``: seconds ready for a processor before it got one, ``turns``: how often it got one; None where the kernel
    does not tell. ``ahead``: seconds of the queue that were told already and that ``queued`` will hold later.
    """

    name: str
    state: str
    ran: float
    queued: float | None
    turns: int | None
    ahead: float = 0.0


def queued_seconds(before: ThreadCounters, now: ThreadCounters, seconds: float) -> tuple[float, float]:
    """Return how long a thread was ready for a processor without one, and what of that the kernel has yet to count.

    The kernel counts a wait when it ends. A thread that could run at both looks and got no processor in between has
    been waiting all the time that it did not run.

    >>> ready = ThreadCounters("python", "R", 1.0, 2.0, 10)
    >>> queued_seconds(ready, ready, 0.1)
    (0.1, 0.1)
    >>> queued_seconds(replace(ready, ahead=0.1), ThreadCounters("python", "R", 1.05, 2.125, 11), 0.1)
    (0.025, 0.0)
    """
    if now.queued is None or before.queued is None:
        return 0.0, 0.0
    if before.state == now.state == "R" and now.turns == before.turns:
        waited = max(0.0, seconds - (now.ran - before.ran))
        return round(waited, 9), before.ahead + waited
    counted = max(0.0, now.queued - before.queued)
    return round(counted - min(before.ahead, counted), 9), 0.0


class _ProcessReader:
    """Sample one process and its threads; what is not readable here becomes a key of ``missing``."""

    def __init__(self, pid: int, missing: dict[str, None]) -> None:
        self.devices: tuple[str, ...] | None = ()
        self._pid, self._missing = pid, missing
        self._threads: dict[int, ThreadCounters] = {}
        self._command = ""
        self._io: tuple[int, int] | None = None
        self._faults: int | None = None
        self._swapped_bytes: int | None = None
        self._switches: tuple[float, int] | None = None
        self._switch_rate: float | None = None

    def read_slowly(self) -> None:
        """Read what changes seldom; about once a second."""
        self._command = command_line(self._pid)
        status = parse_table(read(f"/proc/{self._pid}/status"))
        swapped = status.get("VmSwap", "").split()
        self._swapped_bytes = int(swapped[0]) * 1024 if swapped else None
        self.devices = open_gpu_devices(self._pid)
        if self.devices is None:
            self._missing["which GPUs the process uses (/proc/PID/fd is not readable by this user)"] = None
        before, now = self._switches, (time.monotonic(), int(status.get("nonvoluntary_ctxt_switches", "0")))
        if before is not None and now[0] > before[0]:
            self._switch_rate = (now[1] - before[1]) / (now[0] - before[0])
        self._switches = now

    def read(self, stat: ProcessStat, seconds: float, *, every: bool) -> ProcessLoad:
        """Return what happened since the last look, so many seconds ago.

        ``every``: look closely also at threads that did nothing.
        """
        pid, tids = self._pid, thread_ids(self._pid)
        for ended in self._threads.keys() - set(tids):
            del self._threads[ended]
        threads = [load for tid in tids if (load := self._read_thread(tid, seconds, every=every)) is not None]
        faults = 0 if self._faults is None else max(0, stat.major_faults - self._faults)
        self._faults = stat.major_faults
        disk_bytes: float | None = None
        all_bytes: float | None = None
        io = parse_table(read(f"/proc/{pid}/io"))
        if "read_bytes" in io:
            now = int(io["read_bytes"]), int(io["rchar"])
            before, self._io = self._io or now, now
            disk_bytes, all_bytes = ((after - was) / seconds for after, was in zip(now, before, strict=True))
        else:
            self._missing["what is read from disk (/proc/PID/io is not readable by this user)"] = None
        return ProcessLoad(
            pid=pid,
            parent=stat.parent,
            name=stat.name,
            command=self._command,
            cpu=sum(thread.cpu for thread in threads),
            threads=tuple(load for load in threads if load.tid == pid or load.cpu > 0.005 or load.state == "D"),
            num_threads=stat.num_threads,
            memory_bytes=stat.pages * PAGE_BYTES,
            swapped_bytes=self._swapped_bytes,
            disk_read_bytes=disk_bytes,
            read_bytes=all_bytes,
            major_faults=faults / seconds,
            involuntary_switches=self._switch_rate,
            devices=self.devices or (),
        )

    def _read_thread(self, tid: int, seconds: float, *, every: bool) -> ThreadLoad | None:
        folder, before = f"/proc/{self._pid}/task/{tid}", self._threads.get(tid)
        scheduled = read_schedstat(folder)
        # Most threads of a training process sleep all the time: of those one file is read, not three.
        moved = before is None or scheduled is None or scheduled[0] > before.ran or before.state in "RD"
        if before is not None and not (moved or every or tid == self._pid):
            return ThreadLoad(tid=tid, name=before.name, cpu=0.0, queued=0.0, state=before.state)
        stat = read_stat(folder)
        if stat is None:
            return None
        if scheduled is None and read_schedstat(folder) is None and read_stat(folder) is not None:
            self._missing["how long threads wait for a processor (/proc/PID/schedstat does not exist)"] = None
        now = ThreadCounters(stat.name, stat.state, *(scheduled or (stat.cpu_seconds, None, None)))
        queued, ahead = (0.0, 0.0) if before is None else queued_seconds(before, now, seconds)
        self._threads[tid] = replace(now, ahead=ahead) if ahead else now
        place: str | None = ""
        if now.state == "D" or (now.state == "S" and (moved or tid == self._pid)):
            place = waits_in(self._pid, tid)
            if place is None:
                self._missing["what sleeping threads wait for (/proc/PID/syscall is not readable by this user)"] = None
        return ThreadLoad(
            tid=tid,
            name=now.name,
            cpu=0.0 if before is None else max(0.0, now.ran - before.ran) / seconds,
            queued=None if now.queued is None else min(1.0, queued / seconds),
            state=now.state,
            waits_in=place or "",
        )


class _MachineReader:
    """Sample the machine around a watched process: processors and who uses them, quota, pressure, swapping."""

    def __init__(self) -> None:
        self._before: tuple[float, float, dict[int, ProcessorSeconds], dict[str, float]] | None = None
        self._allowed: frozenset[int] = frozenset()
        self._quota: float | None = None
        self._throttled: float | None = None
        self._periods: tuple[int, int] | None = None
        self._swapped: tuple[float, int] | None = None
        self._swap_in: float | None = None
        self._memory: dict[str, int] = {}
        self._strangers: tuple[float, Mapping[int, ProcessStat]] = (0.0, {})
        self._busiest: tuple[Mapping[str, Any], ...] = ()

    def read_slowly(self, pid: int, pids: Iterable[int], strangers: Mapping[int, ProcessStat]) -> None:
        """Read what changes seldom, or in steps of a tenth of a second or more; about once a second."""
        self._allowed = frozenset().union(*map(cgroups.allowed, pids))
        self._quota = cgroups.quota(pid=pid)
        self._memory = read_counters("/proc/meminfo")
        before, self._strangers = self._strangers, (time.monotonic(), strangers)
        self._busiest = busiest_between(before[1], strangers, self._strangers[0] - before[0])
        periods = cgroups.throttled_periods(pid=pid)
        if periods and self._periods and periods[1] > self._periods[1]:
            self._throttled = (periods[0] - self._periods[0]) / (periods[1] - self._periods[1])
        self._periods = periods
        pages = read_counters("/proc/vmstat").get("pswpin")
        swapped = None if pages is None else (time.monotonic(), pages)
        if swapped and self._swapped and swapped[0] > self._swapped[0]:
            self._swap_in = (swapped[1] - self._swapped[1]) * PAGE_BYTES / (swapped[0] - self._swapped[0])
        self._swapped = swapped

    def read(self, tree_cpu: float) -> MachineLoad | None:
        """Return what happened since the last reading; None at the first.

        Args:
            tree_cpu: cores that the watched processes used meanwhile.
        """
        pressures = {name: pressure_seconds(Path("/proc/pressure") / name) for name in PRESSURES}
        known = {name: total for name, total in pressures.items() if total is not None}
        now = (time.monotonic(), time.process_time(), processor_seconds(), known)
        before, self._before = self._before, now
        if before is None:
            return None
        seconds, watching = (max(1e-6, after - was) for after, was in zip(now[:2], before[:2], strict=True))
        usable = now[2].keys() & before[2].keys() & (self._allowed or now[2].keys())
        busy, idle, iowait, steal = (
            shares_between(before[2], now[2], usable, seconds) if usable else (None, None, None, None)
        )
        processors = len(usable) or len(now[2]) or 1
        return MachineLoad(
            cores=max(1, min(processors, math.ceil(self._quota or processors))),
            processors=processors,
            quota=self._quota,
            idle=idle,
            iowait=iowait,
            steal=steal,
            others=None if busy is None else max(0.0, busy - tree_cpu - watching / seconds),
            throttled=self._throttled,
            pressure={
                name: min(1.0, (total - before[3][name]) / seconds)
                for name, total in known.items()
                if name in before[3]
            },
            swap_in_bytes=self._swap_in,
            available_bytes=self._memory.get("MemAvailable"),
            memory_bytes=self._memory.get("MemTotal"),
            other_processes=self._busiest,
        )
