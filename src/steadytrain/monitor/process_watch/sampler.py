"""Sample a process and its descendants several times a second; each sample is a :class:`Moment`.

It never touches what it watches: everything is read from ``/proc``. A look lasts as long as there are threads to read;
:attr:`Sampler.pause` grows with it, so that watching takes at most a fiftieth of one processor.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from steadytrain.errors import InputError
from steadytrain.files import Closing
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
_FIRST_SECONDS, _SLOW_SECONDS = 0.3, 1.0  # seconds between two readings of the machine: the first two, all others
_STATES_EVERY = 10
_MEAN_OF = 10
_ENDED = "ZX"


class Sampler(Closing):
    """Watches ``pid`` and its descendants, also those whose parents have ended since.

    Raises:
        InputError: there is no such process, or it has ended.
    """

    def __init__(self, pid: int) -> None:
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
        self._gpus = GpuWatcher()
        self._machine = _MachineReader(pid)
        self._began = self._last = time.monotonic()
        self._count, self._cost = 0, 0.0
        self._missing: dict[str, None] = {}
        self.look()

    def close(self) -> None:
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
        """Return what happened since the last look; None at first, and where nothing of the tree is left."""
        began, worked = time.monotonic(), time.process_time()
        seconds, self._last = max(1e-6, began - self._last), began
        self._count += 1
        stats = {pid: stat for pid, stat in self._tree.stats().items() if stat.state not in _ENDED}
        self._known = {pid: self._known.get(pid) or _ProcessReader(pid, self._missing) for pid in stats}
        is_due = self._machine.is_due
        if is_due:
            for known in self._known.values():
                known.read_slowly()
        every = self._count % _STATES_EVERY == 0
        loads = tuple(self._known[pid].read(stat, seconds, every=every) for pid, stat in stats.items())
        self._machine.used_seconds += sum(load.cpu for load in loads) * seconds
        if is_due:
            strangers = self._tree.strangers()
            strangers.pop(os.getpid(), None)
            self._machine.read(stats, strangers)
        devices_of = [known.devices for known in self._known.values()]
        devices = {name for names in devices_of for name in names or ()}
        if devices and self._gpus.missing:
            self._missing[f"what the GPU does ({self._gpus.missing})"] = None
        if "kfd" in devices:
            self._missing["what the GPU does (it is an AMD GPU; only NVIDIA's are supported)"] = None
        gpus = self._gpus.read(set(stats), None if None in devices_of else devices)
        self._cost += (time.process_time() - worked - self._cost) / min(self._count, _MEAN_OF)
        self.pause = min(LONGEST_PAUSE, max(SHORTEST_PAUSE, self._cost / _COST))
        if self._machine.load is None or not loads:
            return None
        return Moment(
            at=began - self._began,
            seconds=seconds,
            processes=loads,
            machine=self._machine.load,
            gpus=gpus,
            missing=tuple(self._missing),
        )


class _ProcessReader:
    """Sample one process and its threads; what is not readable here becomes a key of ``missing``."""

    def __init__(self, pid: int, missing: dict[str, None]) -> None:
        self.devices: tuple[str, ...] | None = ()
        self._pid, self._missing = pid, missing
        self._threads: dict[int, tuple[str, str, float, float | None]] = {}  # name, state, seconds it ran and queued
        self._command = ""
        self._disk_bytes: int | None = None
        self._swapped_bytes: int | None = None

    def read_slowly(self) -> None:
        """Read what changes seldom; about once a second."""
        self._command = command_line(self._pid)
        swapped = parse_table(read(f"/proc/{self._pid}/status")).get("VmSwap", "").split()
        self._swapped_bytes = int(swapped[0]) * 1024 if swapped else None
        self.devices = open_gpu_devices(self._pid)
        if self.devices is None:
            self._missing["which GPUs the process uses (/proc/PID/fd is not readable by this user)"] = None

    def read(self, stat: ProcessStat, seconds: float, *, every: bool) -> ProcessLoad:
        """Return what happened since the last look, so many seconds ago.

        ``every``: look closely also at threads that did nothing.
        """
        pid, tids = self._pid, thread_ids(self._pid)
        for ended in self._threads.keys() - set(tids):
            del self._threads[ended]
        threads = [load for tid in tids if (load := self._read_thread(tid, seconds, every=every)) is not None]
        disk_rate: float | None = None
        if disk_bytes := parse_table(read(f"/proc/{pid}/io")).get("read_bytes"):
            before, self._disk_bytes = self._disk_bytes, int(disk_bytes)
            disk_rate = 0.0 if before is None else (self._disk_bytes - before) / seconds
        else:
            self._missing["what is read from disk (/proc/PID/io is not readable by this user)"] = None
        return ProcessLoad(
            pid=pid,
            parent=stat.parent,
            name=stat.name,
            command=self._command,
            cpu=sum(thread.cpu for thread in threads),
            threads=tuple(load for load in threads if load.tid == pid or load.cpu > 0.005 or load.state == "D"),
            memory_bytes=stat.pages * PAGE_BYTES,
            swapped_bytes=self._swapped_bytes,
            disk_read_bytes=disk_rate,
            devices=self.devices or (),
        )

    def _read_thread(self, tid: int, seconds: float, *, every: bool) -> ThreadLoad | None:
        folder = f"/proc/{self._pid}/task/{tid}"
        known, scheduled = self._threads.get(tid), read_schedstat(folder)
        name, state, ran_before, queued_before = known or ("", "", 0.0, None)
        # Most threads of a training process sleep all the time: of those one file is read, not three.
        moved = known is None or scheduled is None or scheduled[0] > ran_before or state in "RD"
        if not (moved or every or tid == self._pid):
            return ThreadLoad(tid=tid, name=name, cpu=0.0, queued=0.0, state=state)
        stat = read_stat(folder)
        if stat is None:
            return None
        if scheduled is None and read_schedstat(folder) is None and read_stat(folder) is not None:
            self._missing["how long threads wait for a processor (/proc/PID/schedstat does not exist)"] = None
        ran, queued = scheduled[:2] if scheduled else (stat.cpu_seconds, None)
        self._threads[tid] = stat.name, stat.state, ran, queued
        place: str | None = ""
        if stat.state == "D" or (stat.state == "S" and (moved or tid == self._pid)):
            place = waits_in(self._pid, tid)
            if place is None:
                self._missing["what sleeping threads wait for (/proc/PID/syscall is not readable by this user)"] = None
        waited = 0.0 if queued_before is None or queued is None else max(0.0, queued - queued_before)
        return ThreadLoad(
            tid=tid,
            name=stat.name,
            cpu=0.0 if known is None else max(0.0, ran - ran_before) / seconds,
            queued=None if queued is None else min(1.0, waited / seconds),
            state=stat.state,
            waits_in=place or "",
        )


class _MachineReader:
    """Sample the machine around a watched process: processors and who uses them, quota, pressure, swapping.

    ``used_seconds``: processor time of the watched processes since the last reading. ``load``: what happened between
    the last two readings; None before there were two.
    """

    def __init__(self, pid: int) -> None:
        self.used_seconds = 0.0
        self.load: MachineLoad | None = None
        self._pid = pid
        self._at, self._own_seconds = -math.inf, 0.0
        self._processors = processor_seconds()
        self._counters: dict[str, float] = {}
        self._strangers: Mapping[int, ProcessStat] = {}

    @property
    def is_due(self) -> bool:
        """Return whether it is time for the next reading."""
        return time.monotonic() - self._at >= (_FIRST_SECONDS if self.load is None else _SLOW_SECONDS)

    def read(self, pids: Iterable[int], strangers: Mapping[int, ProcessStat]) -> None:
        """Read the machine.

        Args:
            pids: the watched processes.
            strangers: all others but this one.
        """
        at, own_seconds, processors = time.monotonic(), time.process_time(), processor_seconds()
        seconds, own = at - self._at, own_seconds - self._own_seconds
        quota = cgroups.quota(pid=self._pid)
        counters: dict[str, float] = {}
        for name in PRESSURES:
            if (waited := pressure_seconds(Path("/proc/pressure") / name)) is not None:
                counters[name] = waited
        if periods := cgroups.throttled_periods(pid=self._pid):
            counters["throttled"], counters["periods"] = periods
        if (pages := read_counters("/proc/vmstat").get("pswpin")) is not None:
            counters["swapped"] = pages * PAGE_BYTES
        grown = {name: now - self._counters[name] for name, now in counters.items() if name in self._counters}
        if math.isfinite(seconds):
            allowed = frozenset().union(*map(cgroups.allowed, pids))
            usable = processors.keys() & self._processors.keys() & (allowed or processors.keys())
            shares: list[Any] = [None] * 4
            if usable:
                shares = [*shares_between(self._processors, processors, usable, seconds)]
            busy, idle, iowait, _ = shares
            cores = len(usable) or len(processors) or 1
            self.load = MachineLoad(
                cores=max(1, min(cores, math.ceil(quota or cores))),
                processors=cores,
                quota=quota,
                idle=idle,
                iowait=iowait,
                others=None if busy is None else max(0.0, busy - (self.used_seconds + own) / seconds),
                throttled=grown["throttled"] / grown["periods"] if grown.get("periods") else None,
                pressure={name: min(1.0, grown[name] / seconds) for name in PRESSURES if name in grown},
                swap_in_bytes=grown["swapped"] / seconds if "swapped" in grown else None,
                other_processes=busiest_between(self._strangers, strangers, seconds),
            )
        self._at, self._own_seconds, self._processors = at, own_seconds, processors
        self._counters, self._strangers, self.used_seconds = counters, strangers, 0.0
