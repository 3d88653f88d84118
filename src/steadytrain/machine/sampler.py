"""Sample the machine and its GPUs during a run: a thread that writes events at intervals.

Linux tells most of it, under ``/proc`` and in the control groups; elsewhere psutil gives what it can. What a source
does not tell is in no reading, and so in :attr:`MachineStats.missing`; it is never a zero.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import psutil

from steadytrain.errors import SteadyError
from steadytrain.events import EventLog, MachineStats, Noticed
from steadytrain.machine import cgroups
from steadytrain.machine.nvml import GpuSampler, NoNvml
from steadytrain.machine.platform import IS_LINUX, usage
from steadytrain.machine.process_tree import ProcessStat, ProcessTree, owner
from steadytrain.machine.procfs import (
    PAGE_BYTES,
    PRESSURES,
    ROOT,
    parse_table,
    processor_seconds,
    read,
    read_counters,
)

_GRACE_SECONDS = 10.0  # a driver that does not answer keeps no run from ending
_MOST_NAMED = 3  # other processes that a sample names for their cores, and for their use of disks
_LEAST_NAMED, _LEAST_DISK = 0.05, 1e6  # cores, or bytes a second, that each of them uses at least
_BUSY_DISK = 0.1  # share of the time: only then it is asked which processes use disks, as that takes a file of each
_NO_DISKS = ("loop", "ram", "zram")
_REMEDIES = {
    "Library Not Found": "in a container set NVIDIA_DRIVER_CAPABILITIES=compute,utility",
    "mismatch": "restart the machine, as its driver was updated",
    "not installed": "pip install nvidia-ml-py",
}
_FIELDS = frozenset(MachineStats.__struct_fields__)
_OPTIONAL = frozenset(field.name for field in msgspec.structs.fields(MachineStats) if field.default is None)


@contextmanager
def sampling(
    log: EventLog,
    *,
    ranks: Iterable[int] = (),
    gpus: Collection[str] = (),
    open_gpus: Callable[[Collection[str]], GpuSampler] = GpuSampler,
) -> Iterator[None]:
    """Write ``MachineStats``, and ``DeviceStats`` of the run's GPUs, while the body runs, and once more when it ends.

    After ``pause(t)`` seconds each, ``t`` seconds after the start: a day's run has some 3,000 of them. One takes
    about a millisecond of processor time, and 20 us for each other process of the machine, of which it reads at most
    500. What fails is told in the log, once, and never in the body.

    Args:
        ranks: processes that train the same run on this machine.
        gpus: UUIDs of the GPUs on which the run computes on this machine.
        open_gpus: opens these GPUs; a :class:`NoNvml` is told in the log.
    """
    ended = threading.Event()
    words = (log, ended, ranks, partial(open_gpus, gpus) if gpus else None)
    thread = threading.Thread(target=_sample, args=words, name="steady-sample", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(_GRACE_SECONDS)


def pause(elapsed_seconds: float) -> float:
    """Return the seconds to the next sample: a hundredth of the time so far, from 1 s to 30 s.

    >>> pause(0), pause(600), pause(86400)
    (1.0, 6.0, 30.0)
    """
    return min(30.0, max(1.0, elapsed_seconds / 100))


def _sample(
    log: EventLog, ended: threading.Event, ranks: Iterable[int], open_gpus: Callable[[], GpuSampler] | None
) -> None:
    try:
        gpus = None
        try:
            gpus = open_gpus() if open_gpus else None
        except NoNvml as error:
            what = "the GPU's use, clock, power, memory and other processes are not measurable"
            fitting = (remedy for word, remedy in _REMEDIES.items() if word in str(error))
            remedy = next(fitting, "steady doctor says more")
            log.append(Noticed(message=f"{what} (NVML: {str(error).rstrip('.')}): {remedy}", step=0))
        machine = LinuxCounters(ranks=ranks) if IS_LINUX else PsutilCounters()
        with closing(gpus) if gpus else nullcontext():
            began = time.perf_counter()
            before = machine.read()
            is_last = False
            while not is_last:
                is_last = ended.wait(pause(time.perf_counter() - began))
                after = machine.read()
                log.append(stats_between(before, after))
                for stats in gpus.read(machine.pids) if gpus else ():
                    log.append(stats)
                before = after
    except SteadyError:
        return  # the log cannot be written: whoever trains meets that too
    except Exception as error:  # noqa: BLE001 - a thread's edge: no run ends because it cannot be watched
        with suppress(SteadyError):
            log.append(Noticed(message=f"the machine is no longer sampled: {error!r}", step=0))


@dataclass(frozen=True, kw_only=True)
class Counters:
    """Counters and gauges at a moment; those that this system lacks have no key.

    ``totals`` only grow: seconds, counts, bytes. ``levels``: threads, bytes. ``processors``: the seconds that each of
    those which may be used was busy, idle, waiting for a disk, and taken by other virtual machines. ``disks``: the
    seconds that each was busy. ``others``: other processes of the machine, by number; ``others_disk_bytes``: read from
    disks and written, by those that may be looked at, while a disk is busy.
    """

    at: float
    cores: int
    machine_cores: int
    quota: float = 0.0
    totals: Mapping[str, float]
    levels: Mapping[str, int]
    processors: Mapping[int, tuple[float, float, float, float]] = field(default_factory=dict)
    disks: Mapping[str, float] = field(default_factory=dict)
    others: Mapping[int, ProcessStat] = field(default_factory=dict)
    others_disk_bytes: Mapping[int, int] = field(default_factory=dict)


class LinuxCounters:
    """Reads the counters of Linux for this process and its descendants: about a millisecond each time.

    ``ranks``: processes that train the same run on this machine, with their children: they are not others. Where one of
    them is a parent of this process, this one's own time is no rank's.
    """

    def __init__(self, root: Path = ROOT, *, ranks: Iterable[int] = ()) -> None:
        self._root = root
        self._tree = ProcessTree(os.getpid(), root)
        self._ranks = [ProcessTree(pid, root) for pid in ranks]
        self._disks: tuple[float, Mapping[str, float]] = 0.0, {}  # of the reading before: when, and busy seconds
        # The network's devices, without what the kernel makes up; nothing in a container, which has only such.
        self._networks = frozenset(link.parent.name for link in (root / "sys/class/net").glob("*/device"))

    @property
    def pids(self) -> frozenset[int]:
        """Ids of the process, the run's ranks on this machine, and their descendants."""
        return self._tree.pids.union(*(rank.pids for rank in self._ranks))

    def read(self) -> Counters:
        """Read all counters."""
        root, tree, limit = self._root, self._tree.read(), cgroups.memory_limit(self._root)
        seconds_here = 0.0 if tree is None else tree.seconds  # not a rank's, where one of them is a parent of ours
        ranks = [(rank, stats.seconds) for rank in self._ranks if (stats := rank.read()) is not None]
        vmstat, meminfo = read_counters(root / "proc/vmstat"), read_counters(root / "proc/meminfo")
        swapped = [vmstat[name] for name in ("pswpin", "pswpout") if name in vmstat]
        totals: dict[str, float | None] = {
            "switches": usage("SELF", "ru_nivcsw"),
            "ranks": sum(seconds - seconds_here * (self._tree.pid in rank.pids) for rank, seconds in ranks),
            "throttled_seconds": cgroups.throttled_seconds(root),
            "swap_bytes": sum(swapped) * PAGE_BYTES if swapped else None,
            "network_bytes": _network_bytes(read(root / "proc/net/dev") or "", self._networks),
            **{f"pressure_{name}": seconds for name, seconds in cgroups.pressures(root).items()},
        }
        most, left = meminfo.get("MemTotal"), meminfo.get("MemAvailable")
        if limit is not None and (most is None or limit.num_bytes < most):
            known = [size for size in (left, limit.left_bytes) if size is not None]
            most, left = limit.num_bytes, max(0, min(known)) if known else None
        levels: dict[str, int | None] = {"memory_limit_bytes": most, "available_bytes": left}
        if tree is not None:
            totals |= {
                "cpu": tree.seconds,
                "system": tree.system_seconds,
                "children": tree.children_seconds,
                "minor_faults": tree.minor_faults,
                "major_faults": tree.major_faults,
                "disk_read_bytes": tree.disk_read_bytes,
                "disk_write_bytes": tree.disk_write_bytes,
            }
            levels |= {"threads": tree.num_threads, "memory_bytes": tree.memory_bytes}
        ours = self.pids
        others = {pid: stat for pid, stat in self._tree.strangers().items() if pid not in ours}
        now, disks = time.perf_counter(), _disk_seconds(read(root / "proc/diskstats") or "")
        (then, before), self._disks = self._disks, (now, disks)
        busy = max((disks[name] - before.get(name, disks[name]) for name in disks), default=0.0)
        return Counters(
            at=now,
            cores=cgroups.cores(root),
            machine_cores=os.cpu_count() or 1,
            totals={name: value for name, value in totals.items() if value is not None},
            levels={name: level for name, level in levels.items() if level is not None},
            quota=cgroups.quota(root) or 0.0,
            processors=processor_seconds(root, cgroups.allowed(os.getpid())),
            disks=disks,
            others=others,
            others_disk_bytes=self._tree.disk_bytes(others) if busy >= _BUSY_DISK * (now - then) else {},
        )


class PsutilCounters:
    """Counters of this process where there is no ``/proc``: what psutil gives without looking at every process."""

    pids: frozenset[int] = frozenset({os.getpid()})

    def __init__(self) -> None:
        self._process = psutil.Process()

    def read(self) -> Counters:
        """Read all counters."""
        with self._process.oneshot():
            times, memory = self._process.cpu_times(), self._process.memory_info()
            threads, switches = self._process.num_threads(), self._process.num_ctx_switches().involuntary
        machine, network = psutil.virtual_memory(), psutil.net_io_counters()
        processors = {
            number: (sum(of) - of.idle - getattr(of, "iowait", 0.0), of.idle, getattr(of, "iowait", 0.0), 0.0)
            for number, of in enumerate(psutil.cpu_times(percpu=True))
        }
        totals = {"cpu": times.user + times.system, "system": times.system, "switches": switches}
        return Counters(
            at=time.perf_counter(),
            cores=cgroups.cores(),
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


def stats_between(before: Counters, after: Counters) -> MachineStats:
    """Return what happened between two readings of the same counters.

    Counters that went back (a child that nobody waited for has ended) count as nothing.
    """
    seconds = max(after.at - before.at, 1e-9)
    per_second = {
        name: max(0.0, after.totals[name] - before.totals[name]) / seconds
        for name in before.totals.keys() & after.totals.keys()
    }
    values: dict[str, Any] = {name: value for name, value in {**per_second, **after.levels}.items() if name in _FIELDS}
    cpu = values.get("cpu")
    if common := before.processors.keys() & after.processors.keys():
        busy, values["idle"], values["iowait"], values["steal"] = shares_between(
            before.processors, after.processors, common, seconds
        )
        if cpu is not None:
            values["others"] = max(0.0, busy - cpu - values.get("ranks", 0.0))
    if "throttled_seconds" in values:  # of the whole interval
        values["throttled_seconds"] *= seconds
    if "switches" in per_second:
        values["involuntary_switches"] = per_second["switches"]
    if cpu is not None:
        values["system_share"] = min(1.0, per_second["system"] / cpu) if cpu else 0.0
    if busy_seconds := [after.disks[name] - before.disks[name] for name in before.disks.keys() & after.disks.keys()]:
        values["disk_busy"] = min(1.0, max(0.0, *busy_seconds) / seconds)
    pressure = {
        name: round(min(1.0, per_second[f"pressure_{name}"]), 6)
        for name in PRESSURES
        if f"pressure_{name}" in per_second
    }
    unknown = _OPTIONAL - values.keys() | {f"pressure.{name}" for name in PRESSURES if name not in pressure}
    values = {name: round(value, 6) if isinstance(value, float) else value for name, value in values.items()}
    return MachineStats(
        seconds=round(seconds, 6),
        cores=after.cores,
        machine_cores=after.machine_cores,
        quota=after.quota,
        pressure=pressure,
        other_processes=busiest_between(
            before.others, after.others, seconds, disk_bytes=(before.others_disk_bytes, after.others_disk_bytes)
        ),
        missing=tuple(sorted(unknown)),
        **values,
    )


def shares_between(
    before: Mapping[int, tuple[float, float, float, float]],
    after: Mapping[int, tuple[float, float, float, float]],
    processors: Iterable[int],
    seconds: float,
) -> list[float]:
    """Return the use of some processors' time, in cores: busy, idle, waiting for a disk, stolen."""
    return [sum(max(0.0, after[number][k] - before[number][k]) for number in processors) / seconds for k in range(4)]


def busiest_between(
    before: Mapping[int, ProcessStat],
    after: Mapping[int, ProcessStat],
    seconds: float,
    *,
    disk_bytes: tuple[Mapping[int, int], Mapping[int, int]] = ({}, {}),
) -> tuple[Any, ...]:
    """Name the processes that used most cores between two readings, and those that used disks most.

    Each has ``pid``, ``name``, ``user``, ``cores``, and where it used a disk ``disk_bytes``, per second. Those that
    began meanwhile count from their beginning, those that have ended do not count.

    ``disk_bytes``: ``Counters.others_disk_bytes`` of the two readings.
    """
    last = max((stat.started for stat in before.values()), default=None)
    used: dict[int, float] = {}
    for pid, stat in after.items():
        earlier = before.get(pid)
        if earlier is not None and earlier.started == stat.started:
            used[pid] = (stat.cpu_seconds - earlier.cpu_seconds) / seconds
        elif last is not None and stat.started >= last:
            used[pid] = stat.cpu_seconds / seconds
    was, now = disk_bytes
    moved = {pid: (now[pid] - was[pid]) / seconds for pid in used if pid in was and pid in now}
    named = dict[int, None]()
    for amounts, least in ((used, _LEAST_NAMED), (moved, _LEAST_DISK)):
        most = sorted((pid for pid in amounts if amounts[pid] >= least), key=lambda pid: -amounts[pid])
        named |= dict.fromkeys(most[:_MOST_NAMED])
    return tuple(
        {"pid": pid, "name": after[pid].name, "user": owner(pid), "cores": round(used[pid], 3)}
        | ({"disk_bytes": round(moved[pid])} if moved.get(pid, 0) >= _LEAST_DISK else {})
        for pid in named
    )


def _disk_seconds(diskstats: str) -> dict[str, float]:
    """The tenth number behind a disk's name: the milliseconds in which it had something to do."""
    lines = (line.split() for line in diskstats.splitlines())
    busy = {words[2]: int(words[12]) / 1000 for words in lines if len(words) > 12}
    return {name: seconds for name, seconds in busy.items() if not name.startswith(_NO_DISKS)}


def _network_bytes(text: str, devices: frozenset[str]) -> float | None:
    """``eth0: bytes packets errs drop fifo frame compressed multicast bytes ...``: received and sent."""
    numbers = {name: words.split() for name, words in parse_table(text).items()}
    counted = [words for name, words in numbers.items() if (name in devices if devices else name != "lo")]
    return sum(int(words[0]) + int(words[8]) for words in counted) if counted else None
