"""What the machine does beside a run, and for it: counters read now and then, and what happened between two readings.

Linux tells most of it, under ``/proc`` and in the control groups; elsewhere psutil gives what it can. What a source
does not tell is in no reading, and so in :attr:`MachineStats.missing`; it is never a zero.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import psutil

from steadytrain.events import MachineStats
from steadytrain.machine.cgroup_reader import CgroupReader
from steadytrain.machine.cgroups import ROOT, allowed, cores, processor_seconds
from steadytrain.machine.open_files import Kept, count_in
from steadytrain.machine.process_tree import ProcessTree

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
_NO_DISKS = ("loop", "ram", "zram")
_TOLD = frozenset(told.name for told in fields(MachineStats))


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What has been counted up to a moment, and how things stand; what is not known here has no key.

    ``totals`` only grow: seconds, counts, bytes. ``levels``: threads, bytes. ``processors``: the seconds that each of
    those which may be used was busy, idle, waiting for a disk, and taken by other virtual machines. ``disks``: the
    seconds that each was busy.
    """

    at: float
    cores: int
    machine_cores: int
    totals: Mapping[str, float]
    levels: Mapping[str, int]
    processors: Mapping[int, tuple[float, float, float, float]] = field(default_factory=dict)
    disks: Mapping[str, float] = field(default_factory=dict)


class Machine:
    """Reads the counters of Linux for this process and its children; half a millisecond to one each time.

    Args:
        root: where ``proc`` and ``sys`` lie.
        ranks: processes that train the same run on this machine: they are not others.
    """

    def __init__(self, root: Path = ROOT, *, ranks: Iterable[int] = ()) -> None:
        self._around = CgroupReader(root)
        self._family = ProcessTree(os.getpid(), root)
        self._ranks = [ProcessTree(pid, root) for pid in ranks]
        names = ("stat", "vmstat", "meminfo", "diskstats", "net/dev")
        self._files = {name: Kept(root / "proc" / name) for name in names}
        self._networks = _networks(root)

    @property
    def pids(self) -> frozenset[int]:
        """Of the process and of its children."""
        return self._family.pids

    def read(self) -> Reading:
        """How the counters stand now."""
        totals: dict[str, float | None] = {}
        levels: dict[str, int | None] = {}
        held = self._around.read()
        self._read_family(totals, levels)
        self._read_memory(totals, levels, held.memory_limit_bytes, held.memory_left_bytes)
        counted = [family.read() for family in self._ranks]
        totals["ranks"] = sum(one.seconds for one in counted if one is not None)
        totals["throttled_seconds"] = held.throttled_seconds
        totals |= {f"pressure_{name}": waited for name, waited in held.waited_seconds.items()}
        totals["network_bytes"] = _network_bytes(self._files["net/dev"].read(), self._networks)
        stat = self._files["stat"].read()
        return Reading(
            at=time.perf_counter(),
            cores=held.cores,
            machine_cores=os.cpu_count() or 1,
            totals={name: value for name, value in totals.items() if value is not None},
            levels={name: level for name, level in levels.items() if level is not None},
            processors=processor_seconds(stat, allowed()),
            disks=_disks(self._files["diskstats"].read()),
        )

    def close(self) -> None:
        """Let go of the files."""
        self._around.close()
        for family in (self._family, *self._ranks):
            family.close()
        for file in self._files.values():
            file.close()

    def _read_family(self, totals: dict[str, float | None], levels: dict[str, int | None]) -> None:
        counted = self._family.read()
        if resource is not None:
            totals["switches"] = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
        if counted is None:
            return
        totals["cpu"], totals["system"] = counted.seconds, counted.system_seconds
        totals["children"] = counted.children_seconds
        totals["minor_faults"], totals["major_faults"] = counted.minor_faults, counted.major_faults
        totals["disk_read_bytes"], totals["disk_write_bytes"] = counted.read_bytes, counted.write_bytes
        levels["threads"], levels["memory_bytes"] = counted.threads, counted.memory_bytes

    def _read_memory(
        self, totals: dict[str, float | None], levels: dict[str, int | None], limit: int | None, left: int | None
    ) -> None:
        vmstat, meminfo = self._files["vmstat"].read(), self._files["meminfo"].read()
        swapped = [pages for name in ("pswpin", "pswpout") if (pages := count_in(vmstat, name)) is not None]
        totals["swap_bytes"] = sum(swapped) * _PAGE if swapped else None
        total, available = (_kilobytes(meminfo, name) for name in ("MemTotal", "MemAvailable"))
        binds = limit is not None and (total is None or limit < total)
        levels["memory_limit_bytes"] = limit if binds else total
        levels["available_bytes"] = _least((available, left) if binds else (available,))


class Elsewhere:
    """The same for this process where there is no ``/proc``: what psutil gives without looking at every process."""

    pids: frozenset[int] = frozenset({os.getpid()})

    def __init__(self) -> None:
        self._process = psutil.Process()

    def read(self) -> Reading:
        """How the counters stand now."""
        with self._process.oneshot():
            times, memory = self._process.cpu_times(), self._process.memory_info()
            threads, switches = self._process.num_threads(), self._process.num_ctx_switches().involuntary
        machine, network = psutil.virtual_memory(), psutil.net_io_counters()
        processors = {
            number: (sum(of) - of.idle - getattr(of, "iowait", 0.0), of.idle, getattr(of, "iowait", 0.0), 0.0)
            for number, of in enumerate(psutil.cpu_times(percpu=True))
        }
        totals = {"cpu": times.user + times.system, "system": times.system, "switches": switches}
        return Reading(
            at=time.perf_counter(),
            cores=cores(),
            machine_cores=os.cpu_count() or 1,
            totals=totals if network is None else totals | {"network_bytes": network.bytes_sent + network.bytes_recv},
            levels={
                "threads": threads,
                "memory_bytes": memory.rss,
                "memory_limit_bytes": machine.total,
                "available_bytes": machine.available,
            },
            processors=processors,
        )

    def close(self) -> None:
        """Nothing is held."""


def machine(ranks: Iterable[int] = ()) -> Machine | Elsewhere:
    """Whatever can read the counters of this machine, on which ``ranks`` train the same run."""
    return Machine(ranks=ranks) if sys.platform == "linux" else Elsewhere()


def between(before: Reading, after: Reading) -> MachineStats:
    """What happened between two readings of the same counters.

    Counters that went back (a child that nobody waited for has ended) count as nothing.
    """
    seconds = max(after.at - before.at, 1e-9)
    per_second = {
        name: max(0.0, after.totals[name] - before.totals[name]) / seconds
        for name in before.totals.keys() & after.totals.keys()
    }
    told: dict[str, Any] = {name: value for name, value in {**per_second, **after.levels}.items() if name in _TOLD}
    told |= _shared_out(before, after, seconds, told.get("cpu"), told.get("ranks", 0.0))
    if "throttled_seconds" in told:
        told["throttled_seconds"] *= seconds
    if "switches" in per_second:
        told["involuntary_switches"] = per_second["switches"]
    if told.get("cpu"):
        told["system_share"] = min(1.0, per_second["system"] / told["cpu"])
    elif "cpu" in told:
        told["system_share"] = 0.0
    busy = [after.disks[name] - before.disks[name] for name in before.disks.keys() & after.disks.keys()]
    if busy:
        told["disk_busy"] = min(1.0, max(0.0, *busy) / seconds)
    pressure = {name: value for key, value in per_second.items() if (name := key.removeprefix("pressure_")) != key}
    stats: dict[str, Any] = {
        name: round(value, 6) if isinstance(value, float) else value for name, value in told.items()
    }
    return MachineStats(
        seconds=round(seconds, 6),
        cores=after.cores,
        machine_cores=after.machine_cores,
        pressure={name: round(min(1.0, share), 6) for name, share in sorted(pressure.items())},
        missing=_missing(stats, pressure),
        **stats,
    )


def _shared_out(before: Reading, after: Reading, seconds: float, cpu: float | None, ranks: float) -> dict[str, float]:
    """What became of the time of the processors that may be used, in cores."""
    common = before.processors.keys() & after.processors.keys()
    if not common:
        return {}
    busy, idle, iowait, steal = (
        sum(max(0.0, after.processors[number][k] - before.processors[number][k]) for number in common) / seconds
        for k in range(4)
    )
    told = {"idle": idle, "iowait": iowait, "steal": steal}
    return told if cpu is None else told | {"others": max(0.0, busy - cpu - ranks)}


def _missing(told: Mapping[str, object], pressure: Mapping[str, float]) -> tuple[str, ...]:
    optional = {name for name in _TOLD if MachineStats.__dataclass_fields__[name].default is None}
    unknown = optional - told.keys() | {f"pressure.{name}" for name in ("cpu", "memory", "io") if name not in pressure}
    return tuple(sorted(unknown))


def _disks(diskstats: bytes) -> dict[str, float]:
    """The tenth number behind a disk's name: the milliseconds in which it had something to do."""
    lines = (line.split() for line in diskstats.splitlines())
    told = {words[2].decode(): int(words[12]) / 1000 for words in lines if len(words) > 12}
    return {name: busy for name, busy in told.items() if not name.startswith(_NO_DISKS)}


def _networks(root: Path) -> frozenset[str]:
    """The network's devices, without what the kernel makes up; nothing in a container, which has only such."""
    return frozenset(link.parent.name for link in (root / "sys/class/net").glob("*/device"))


def _network_bytes(text: bytes, devices: frozenset[str]) -> float | None:
    """``eth0: bytes packets errs drop fifo frame compressed multicast bytes ...``: received and sent."""
    lines = (line.partition(b":") for line in text.splitlines())
    told = {name.strip().decode(): numbers.split() for name, found, numbers in lines if found}
    chosen = [numbers for name, numbers in told.items() if (name in devices if devices else name != "lo")]
    return sum(int(numbers[0]) + int(numbers[8]) for numbers in chosen) if chosen else None


def _kilobytes(meminfo: bytes, name: str) -> int | None:
    told = count_in(meminfo, name)
    return None if told is None else told * 1024


def _least(told: Iterable[int | None]) -> int | None:
    known = [number for number in told if number is not None]
    return max(0, min(known)) if known else None
