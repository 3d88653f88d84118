"""What the system lets this process use of the machine's processors: affinity, and the quota of its control groups.

>>> 1 <= cores()
True
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path("/")

_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


class Spent(NamedTuple):
    """What became of a processor's seconds since the system started; ``steal``: withheld by a hypervisor."""

    busy: float
    idle: float
    iowait: float
    steal: float


def cores(root: Path = ROOT) -> int:
    """Processors that this process may use: by affinity and by its control groups' quota (a fraction counts whole).

    Args:
        root: where ``proc`` and ``sys`` lie.
    """
    return max(1, min([len(allowed()), *(math.ceil(told) for told in _quotas(root))]))


def allowed() -> frozenset[int]:
    """The numbers of the processors that this thread may run on; all of them where the system does not tell."""
    told = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return frozenset(told)


def quota(root: Path = ROOT, *, pid: int | None = None) -> float | None:
    """The tightest CPU quota of the control groups around this process, in processors; None where there is none.

    Args:
        root: where ``proc`` and ``sys`` lie.
        pid: of another process.
    """
    return min(_quotas(root, pid), default=None)


def groups(root: Path, controller: str, *, pid: int | None = None) -> Iterator[Path]:
    """The folders of the control groups that hold this process, innermost first, of both versions.

    In a container the path told is often the host's and does not exist here: its ancestors are tried as well, up to
    the mount itself, which is then the container's own group.

    Args:
        root: where ``proc`` and ``sys`` lie.
        controller: such as ``cpu`` or ``memory``.
        pid: of another process.
    """
    mount = root / "sys/fs/cgroup"
    for line in read(root / f"proc/{pid or 'self'}/cgroup").splitlines():
        _, names, path = (*line.split(":", 2), "", "")[:3]
        if names and controller not in names.split(","):
            continue
        bases = (mount / names, mount / controller) if names else (mount, mount / "unified")
        inner = Path(path.lstrip("/"))
        for base in bases:
            yield from (base / part for part in (inner, *inner.parents) if (base / part).is_dir())


def _quotas(root: Path, pid: int | None = None) -> Iterator[float]:
    """The CPU quota of each control group around a process, in processors."""
    for group in groups(root, "cpu", pid=pid):
        version_2 = read(group / "cpu.max").split()
        version_1 = [read(group / "cpu.cfs_quota_us"), read(group / "cpu.cfs_period_us")]
        for told in (version_2, version_1):  # no limit is "max" in the one, -1 in the other
            if len(told) == 2 and all(word.isdecimal() for word in told) and int(told[1]):
                yield int(told[0]) / int(told[1])


def processor_seconds(stat: bytes, usable: frozenset[int]) -> dict[int, Spent]:
    """The seconds of each processor in ``usable``, of what ``/proc/stat`` says.

    >>> processor_seconds(b"cpu  1 1 1 1 1 1 1 1 0 0\\ncpu0 100 0 200 800 50 0 0 10 70 0\\nintr 5", frozenset({0}))
    {0: Spent(busy=3.0, idle=8.0, iowait=0.5, steal=0.1)}
    """
    found: dict[int, Spent] = {}
    for line in stat.split(b"\n"):
        if not line.startswith(b"cpu"):
            break
        name, *words = line.split()
        if not name[3:] or int(name[3:]) not in usable or len(words) < 8:
            continue
        # What follows (guests) is counted in user already.
        user, nice, system, idle, iowait, irq, softirq, steal = (int(word) / _TICKS for word in words[:8])
        found[int(name[3:])] = Spent(user + nice + system + irq + softirq, idle, iowait, steal)
    return found


def read(path: Path) -> str:
    """What a file of the kernel says; nothing where there is none."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
