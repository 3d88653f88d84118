"""What the system lets a process use: affinity, and the quotas and limits of the control groups around it.

Both versions of control groups are read.

>>> 1 <= cores()
True
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from steadytrain.machine.procfs import PRESSURES, ROOT, KernelFile, counter, pressure_seconds, read, read_counters

_UNLIMITED = 1 << 62  # version 1 says so: the largest number of whole pages


def cores(root: Path = ROOT) -> int:
    """Count the processors that this process may use: by affinity and by quota (a fraction counts whole).

    Args:
        root: where ``proc`` and ``sys`` lie.
    """
    return max(1, min([len(allowed()), *(math.ceil(quota) for quota in _quotas(root))]))


def allowed(pid: int = 0) -> frozenset[int]:
    """Return the processors that a process may run on by affinity; none where it has ended.

    Args:
        pid: of the process; 0: this thread.
    """
    if not hasattr(os, "sched_getaffinity"):
        return frozenset(range(os.cpu_count() or 1))
    try:
        return frozenset(os.sched_getaffinity(pid))
    except OSError:
        return frozenset()


def quota(root: Path = ROOT, *, pid: int | None = None) -> float | None:
    """Return the tightest CPU quota around a process, in processors; None where there is none.

    Args:
        root: where ``proc`` and ``sys`` lie.
        pid: of another process.
    """
    return min(_quotas(root, pid), default=None)


def _quotas(root: Path, pid: int | None = None) -> Iterator[float]:
    for group in groups(root, "cpu", pid=pid):
        version_2 = (read(group / "cpu.max") or "").split()
        version_1 = [read(group / "cpu.cfs_quota_us") or "", read(group / "cpu.cfs_period_us") or ""]
        for words in (version_2, version_1):  # no limit is "max" in the one, -1 in the other
            if len(words) == 2 and all(word.isdecimal() for word in words) and int(words[1]):
                yield int(words[0]) / int(words[1])


def groups(root: Path, controller: str, *, pid: int | None = None) -> Iterator[Path]:
    """List the folders of the control groups that hold a process, innermost first.

    In a container the path named is often the host's and does not exist here: its ancestors are tried as well, up to
    the mount itself, which is then the container's own group.

    Args:
        root: where ``proc`` and ``sys`` lie.
        controller: such as ``cpu`` or ``memory``.
        pid: of another process.
    """
    mount = root / "sys/fs/cgroup"
    for line in (read(root / f"proc/{pid or 'self'}/cgroup") or "").splitlines():
        _, names, path = (*line.split(":", 2), "", "")[:3]
        if names and controller not in names.split(","):
            continue
        bases = (mount / names, mount / controller) if names else (mount, mount / "unified")
        inner = Path(path.lstrip("/"))
        for base in bases:
            yield from (base / part for part in (inner, *inner.parents) if (base / part).is_dir())


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


@dataclass(frozen=True, kw_only=True)
class CgroupStats:
    """What control groups withheld since they began, in seconds; the tightest memory limit, and what is left of it."""

    cores: int
    throttled_seconds: float | None
    pressure_seconds: dict[str, float]
    memory_limit_bytes: int | None
    memory_left_bytes: int | None


def read_cgroups(root: Path = ROOT) -> CgroupStats:
    """Read the control groups around this process once."""
    with closing(CgroupReader(root)) as reader:
        return reader.read()


class CgroupReader:
    """Reads the control groups around this process again and again; finds them anew when it is moved to others.

    Args:
        root: where ``proc`` and ``sys`` lie.
    """

    def __init__(self, root: Path = ROOT) -> None:
        self._root = root
        self._membership = KernelFile(root / "proc/self/cgroup")
        self._known_membership: bytes | None = None
        self._core_limits: tuple[object, ...] = ()
        self._pressures: dict[str, KernelFile] = {}
        self._files: list[KernelFile] = [self._membership]

    def read(self) -> CgroupStats:
        """Read all of it; the number of cores anew only where something has changed: that takes a millisecond."""
        membership = self._membership.read()
        if membership != self._known_membership:
            self._open_groups()
            self._known_membership = membership
        core_limits = (allowed(), *(file.read() for file in self._quotas))
        if core_limits != self._core_limits:
            self._core_limits, self._cores = core_limits, cores(self._root)
        pressures = {name: pressure_seconds(file.read()) for name, file in self._pressures.items()}
        limit, left = self._memory()
        return CgroupStats(
            cores=self._cores,
            throttled_seconds=self._throttled(),
            pressure_seconds={name: seconds for name, seconds in pressures.items() if seconds is not None},
            memory_limit_bytes=limit,
            memory_left_bytes=left,
        )

    def close(self) -> None:
        """Close the files."""
        for file in self._files:
            file.close()

    def _open(self, path: Path) -> KernelFile:
        self._files.append(KernelFile(path))
        return self._files[-1]

    def _open_groups(self) -> None:
        for file in self._files[1:]:
            file.close()
        del self._files[1:]
        cpu = list(dict.fromkeys(groups(self._root, "cpu")))
        self._quotas = [self._open(group / name) for group in cpu for name in ("cpu.max", "cpu.cfs_quota_us")]
        self._core_limits = ()
        self._cpu_stats = [self._open(group / "cpu.stat") for group in cpu]
        # A group's own pressure tells of this process; the machine's also of all others. The topmost group of all,
        # which has no type, is the machine.
        innermost = next((group for group in cpu if (group / "cgroup.type").exists()), None)
        self._pressures = {
            name: self._open(innermost / f"{name}.pressure" if innermost else self._root / "proc/pressure" / name)
            for name in PRESSURES
        }
        self._memory_files = [
            (self._open(group / limit), self._open(group / used), self._open(group / "memory.stat"), droppable)
            for group in dict.fromkeys(groups(self._root, "memory"))
            for limit, used, droppable in (
                ("memory.max", "memory.current", "inactive_file"),
                ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
            )
            if (group / limit).exists()
        ]

    def _throttled(self) -> float | None:
        """Of the group that withheld the most: what a group withholds, those in it do not get either."""
        seconds: list[float] = []
        for file in self._cpu_stats:
            text = file.read()
            for name, unit in (("throttled_usec", 1e-6), ("throttled_time", 1e-9)):
                if (count := counter(text, name)) is not None:
                    seconds.append(count * unit)
        return max(seconds, default=None)

    def _memory(self) -> tuple[int | None, int | None]:
        """The tightest limit, and what is left of it; of the pages of files those not used lately can be dropped."""
        limits: list[tuple[int, int | None]] = []
        for limit_file, used_file, stat_file, droppable in self._memory_files:
            limit = limit_file.number()
            if limit is None or limit >= _UNLIMITED:
                continue
            used = used_file.number()
            limits.append((limit, None if used is None else limit - used + (counter(stat_file.read(), droppable) or 0)))
        return min(limits, default=(None, None), key=lambda pair: pair[0])
