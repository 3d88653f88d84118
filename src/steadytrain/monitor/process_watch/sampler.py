"""Looks at a process and all that it started, some times a second; each look is a :class:`Moment`.

It never touches what it watches: everything is read from ``/proc``. A look lasts as long as there are threads to read;
:attr:`Sampler.pause` grows with it, so that watching takes at most a fiftieth of one processor.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from steadytrain.errors import InputError
from steadytrain.monitor.process_watch import proc
from steadytrain.monitor.process_watch.facts import Moment, ProcessLoad
from steadytrain.monitor.process_watch.gpus import Gpus
from steadytrain.monitor.process_watch.machine import Machine
from steadytrain.monitor.process_watch.threads import Threads

SHORTEST_PAUSE, LONGEST_PAUSE = 0.1, 2.0
_COST = 0.02
_SLOW_SECONDS = 1.0
_STATES_EVERY = 10
_MEAN_OF = 10


@dataclass
class _Process:
    """What is remembered of a process between two looks."""

    started: int
    command: str = ""
    threads: Threads = field(default_factory=Threads)
    io: tuple[int, int] | None = None
    faults: int | None = None
    status: dict[str, str] = field(default_factory=dict)
    switches: tuple[float, int] | None = None
    switch_rate: float | None = None
    devices: tuple[str, ...] | None = ()


class Sampler:
    """Watches ``pid`` and its descendants, also those whose parents have ended since.

    Args:
        pid: the process.
        gpus: a reader of GPUs; one is opened where none is given.

    Raises:
        InputError: there is no such process, or it has ended.
    """

    def __init__(self, pid: int, *, gpus: Gpus | None = None) -> None:
        first = proc.stat(f"/proc/{pid}")
        if first is None:
            raise InputError(f"there is no process {pid}: `ps aux` lists those that run")
        if first.state in "ZX":
            raise InputError(f"process {pid} ({first.name}) has ended already")
        if proc.threads(pid) and not (proc.command(pid) or proc.gpu_files(pid) is None):
            raise InputError(f"{pid} ({first.name}) is a thread of the kernel, not a process")
        self.pid = pid
        self.pause = SHORTEST_PAUSE
        self._known: dict[int, _Process] = {pid: _Process(first.started)}
        self._gpus = gpus or Gpus()
        self._machine = Machine()
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
        """Its command line, or the name of its program where that is closed to us."""
        told = proc.stat(f"/proc/{self.pid}")
        return proc.command(self.pid) or ("" if told is None else told.name)

    @property
    def lives(self) -> bool:
        """Whether the process that was given still runs."""
        now = proc.stat(f"/proc/{self.pid}")
        return now is not None and now.started == self._known[self.pid].started and now.state not in "ZX"

    def look(self) -> Moment | None:
        """What happened since the last look; None where nothing of the tree is left."""
        began, worked = time.monotonic(), time.process_time()
        seconds, self._last = max(1e-6, began - self._last), began
        self._count += 1
        slow = began - self._slow_at >= _SLOW_SECONDS
        pids = self._tree(slow)
        if slow:
            self._slow_at = began
            self._machine.slow(self.pid, pids)
        loads = tuple(load for pid in pids if (load := self._process(pid, seconds, slow)) is not None)
        machine = self._machine.look(sum(load.cpu for load in loads))
        held = self._held(loads)
        gpus = self._gpus.look(pids, held)
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

    def _held(self, loads: Iterable[ProcessLoad]) -> set[str] | None:
        """GPU devices that the tree holds open."""
        files = [self._known[load.pid].devices for load in loads]
        held = {name for one in files for name in one or ()}
        if held and self._gpus.missing:
            self._missing[f"what the GPU does ({self._gpus.missing})"] = None
        if "kfd" in held:
            self._missing["what the GPU does (an AMD one: only NVIDIA's library is asked)"] = None
        return None if None in files else held

    def _tree(self, closely: bool) -> list[int]:
        """The processes alive, parents before children; those known stay though their parents end."""
        found: dict[int, None] = {}
        waiting = [self.pid, *(pid for pid in self._known if pid != self.pid)]
        table: dict[int, int] | None = None
        while waiting:
            pid = waiting.pop(0)
            if pid in found or (told := proc.stat(f"/proc/{pid}")) is None or told.state in "ZX":
                continue
            if self._known.setdefault(pid, _Process(told.started)).started != told.started:
                continue  # the number was given to somebody else
            found[pid] = None
            # Most processes are started by a main thread: the others are asked once a second.
            below = proc.children(pid, proc.threads(pid) if closely else [pid])
            if below is None:
                table = table or proc.parents()
                below = [child for child, parent in table.items() if parent == pid]
            waiting = [*below, *waiting]
        self._known = {pid: one for pid, one in self._known.items() if pid in found or pid == self.pid}
        return list(found)

    def _process(self, pid: int, seconds: float, slow: bool) -> ProcessLoad | None:
        told = proc.stat(f"/proc/{pid}")
        if told is None:
            return None
        known = self._known[pid]
        if slow:
            self._look_slowly(pid, known)
        threads = known.threads.look(pid, seconds, every=self._count % _STATES_EVERY == 0)
        for what in known.threads.missing:
            self._missing[what] = None
        faults = 0 if known.faults is None else told.major_faults - known.faults
        known.faults = told.major_faults
        disk, anywhere = self._reads(pid, known, seconds)
        swapped = known.status.get("VmSwap", "").split()
        return ProcessLoad(
            pid=pid,
            parent=told.parent,
            name=told.name,
            command=known.command,
            cpu=sum(one.cpu for one in threads),
            threads=tuple(one for one in threads if one.tid == pid or one.cpu > 0.005 or one.state == "D"),
            num_threads=told.num_threads,
            memory_bytes=told.memory_bytes,
            swapped_bytes=int(swapped[0]) * 1024 if swapped else None,
            disk_read_bytes=disk,
            read_bytes=anywhere,
            major_faults=max(0, faults) / seconds,
            involuntary_switches=known.switch_rate,
            devices=known.devices or (),
        )

    def _look_slowly(self, pid: int, known: _Process) -> None:
        now = time.monotonic()
        known.command = proc.command(pid)
        known.status = proc.table(f"/proc/{pid}/status")
        known.devices = proc.gpu_files(pid)
        if known.devices is None:
            self._missing["which GPUs the process uses (/proc/PID/fd is not readable by this user)"] = None
        switches = int(known.status.get("nonvoluntary_ctxt_switches", "0"))
        if known.switches is not None and now > known.switches[0]:
            known.switch_rate = (switches - known.switches[1]) / (now - known.switches[0])
        known.switches = (now, switches)

    def _reads(self, pid: int, known: _Process, seconds: float) -> tuple[float | None, float | None]:
        """Bytes per second from a device, and by any reading call."""
        told = proc.table(f"/proc/{pid}/io")
        if "read_bytes" not in told:
            self._missing["what is read from disk (/proc/PID/io is not readable by this user)"] = None
            return None, None
        before, known.io = known.io, (int(told["read_bytes"]), int(told["rchar"]))
        if before is None:
            return 0.0, 0.0
        return (known.io[0] - before[0]) / seconds, (known.io[1] - before[1]) / seconds
