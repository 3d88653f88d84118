"""Resources that the system grants a process: affinity, and the quotas and limits of its control groups.

Both versions of control groups are read.

>>> 1 <= cores()
True
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from steadytrain.machine.procfs import PRESSURES, ROOT, pressure_seconds, read, read_counters

_UNLIMITED = 1 << 62  # version 1 says so: the largest number of whole pages


def cores(root: Path = ROOT) -> int:
    """Count the processors that this process may use: by affinity and by quota (a fraction counts whole).

    ``root``: where ``proc`` and ``sys`` lie.
    """
    most = len(allowed(os.getpid()))  # by the main thread's, which trains, whichever asks
    return max(1, min(most, math.ceil(quota(root) or most)))


def allowed(pid: int = 0) -> frozenset[int]:
    """Return the processors that a process (0: this thread) may run on by affinity; none where it has ended."""
    if not hasattr(os, "sched_getaffinity"):
        return frozenset(range(os.cpu_count() or 1))
    try:
        return frozenset(os.sched_getaffinity(pid))
    except OSError:
        return frozenset()


def near_processors(devices: Sequence[str], allowed: frozenset[int], root: Path = ROOT) -> list[frozenset[int]]:
    """Return for each rank of a machine the processors near its GPU: of its NUMA node, else of its socket's nodes.

    All, where on sockets too some rank would have less than an even share, or the system does not tell.

    Args:
        devices: the GPUs of the ranks by their places on the PCI bus: ``0000:3b:00.0``.
        allowed: the processors of these ranks by affinity.
    """
    system, nodes, packages = root / "sys/devices/system", dict[str, frozenset[int]](), dict[str, str | None]()
    for folder in (system / "node").glob("node[0-9]*"):
        ranges = re.findall(r"(\d+)-?(\d*)", read(folder / "cpulist") or "")
        if processors := [n for first, last in ranges for n in range(int(first), int(last or first) + 1)]:
            nodes[folder.name[4:]] = allowed.intersection(processors)
            packages[folder.name[4:]] = read(system / f"cpu/cpu{processors[0]}/topology/physical_package_id")
    sockets = {n: frozenset[int]().union(*(nodes[m] for m in nodes if packages[m] == packages[n])) for n in nodes}
    places = [read(root / "sys/bus/pci/devices" / device / "numa_node") or "" for device in devices]
    for groups in (nodes, sockets):
        near = [groups.get(place, frozenset()) for place in places]
        if all(len(processors) * len(near) >= len(allowed) * near.count(processors) for processors in near):
            return near
    return [allowed] * len(devices)


def quota(root: Path = ROOT, *, pid: int | None = None) -> float | None:
    """Return the tightest CPU quota around a process (None: this one), in processors; None where there is none."""
    quotas = []
    for group in groups(root, "cpu", pid=pid):
        version_2 = (read(group / "cpu.max") or "").split()
        version_1 = [read(group / "cpu.cfs_quota_us") or "", read(group / "cpu.cfs_period_us") or ""]
        for words in (version_2, version_1):  # no limit is "max" in the one, -1 in the other
            if len(words) == 2 and all(word.isdecimal() for word in words) and int(words[1]):
                quotas.append(int(words[0]) / int(words[1]))
    return min(quotas, default=None)


def groups(root: Path, controller: str, *, pid: int | None = None) -> list[Path]:
    """List the folders of the control groups that hold a process, innermost first.

    In a container the path named is often the host's and does not exist here: its ancestors are tried as well, up to
    the mount itself, which is then the container's own group.

    Args:
        controller: such as ``cpu`` or ``memory``.
        pid: of another process.
    """
    mount, folders = root / "sys/fs/cgroup", []
    for line in (read(root / f"proc/{pid or 'self'}/cgroup") or "").splitlines():
        _, names, path = (*line.split(":", 2), "", "")[:3]
        if names and controller not in names.split(","):
            continue
        bases = (mount / names, mount / controller) if names else (mount, mount / "unified")
        inner = Path(path.lstrip("/"))
        folders += [base / part for base in bases for part in (inner, *inner.parents)]
    return [folder for folder in dict.fromkeys(folders) if folder.is_dir()]


def throttled_periods(root: Path = ROOT, *, pid: int | None = None) -> tuple[int, int] | None:
    """Return in how many periods a quota was used up, and of how many: of the group that throttled the most."""
    periods = []
    for group in groups(root, "cpu", pid=pid):
        counters = read_counters(group / "cpu.stat")
        if counters.get("nr_periods"):
            periods.append((counters.get("nr_throttled", 0), counters["nr_periods"]))
    return max(periods, default=None)


def out_of_memory_kills(root: Path = ROOT) -> int | None:
    """Return how often the kernel ended a process of this control group for want of memory."""
    for group in groups(root, "memory"):
        for file in ("memory.events", "memory.oom_control"):
            if (kills := read_counters(group / file).get("oom_kill")) is not None:
                return kills
    return None


def throttled_seconds(root: Path = ROOT) -> float | None:
    """Return for how long quotas have stopped this process's groups: what a group withholds, those in it miss too."""
    seconds: list[float] = []
    for group in groups(root, "cpu"):
        counters = read_counters(group / "cpu.stat")
        units = (("throttled_usec", 1e-6), ("throttled_time", 1e-9))
        seconds += [counters[name] * unit for name, unit in units if name in counters]
    return max(seconds, default=None)


def pressures(root: Path = ROOT) -> dict[str, float]:
    """Return the seconds in which something waited for ``cpu``, ``memory`` or ``io``.

    A group's own pressure tells of this process; the machine's also of all others. The topmost group of all, which has
    no type, is the machine.
    """
    innermost = next((group for group in groups(root, "cpu") if (group / "cgroup.type").exists()), None)
    files = {name: innermost / f"{name}.pressure" if innermost else root / "proc/pressure" / name for name in PRESSURES}
    totals = {name: pressure_seconds(file) for name, file in files.items()}
    return {name: seconds for name, seconds in totals.items() if seconds is not None}


@dataclass(frozen=True)
class MemoryLimit:
    """The tightest memory limit around a process, and what is left of it."""

    num_bytes: int
    left_bytes: int | None


def memory_limit(root: Path = ROOT) -> MemoryLimit | None:
    """Return the tightest memory limit; of the pages of files those not used lately count as free."""
    limits: list[MemoryLimit] = []
    for group in groups(root, "memory"):
        for limit_file, used_file, droppable in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            limit, used = read(group / limit_file) or "", read(group / used_file) or ""
            if limit.isdecimal() and int(limit) < _UNLIMITED:
                free = read_counters(group / "memory.stat").get(droppable, 0)
                limits.append(MemoryLimit(int(limit), int(limit) - int(used) + free if used.isdecimal() else None))
    return min(limits, default=None, key=lambda limit: limit.num_bytes)
