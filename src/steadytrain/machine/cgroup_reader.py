"""The control groups around this process, of both versions: what they withhold from it and what they limit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from steadytrain.machine import cgroups
from steadytrain.machine.open_files import Kept, count_in

_PRESSURES = ("cpu", "memory", "io")
_UNLIMITED = 1 << 62  # version 1 says so: the largest number of whole pages


@dataclass(frozen=True, kw_only=True)
class Held:
    """What the groups say: seconds withheld so far, seconds of waiting so far, memory that is left, and limits."""

    cores: int
    throttled_seconds: float | None
    waited_seconds: dict[str, float]
    memory_limit_bytes: int | None
    memory_left_bytes: int | None


class CgroupReader:
    """The control groups around this process; found anew when it is moved to others.

    Args:
        root: where ``proc`` and ``sys`` lie.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._place = Kept(root / "proc/self/cgroup")
        self._known: object = None
        self._files: list[Kept] = [self._place]

    def read(self) -> Held:
        """What they say now."""
        place = self._place.read()
        if place != self._known:
            self._find()
            self._known = place
        limit, left = self._memory()
        return Held(
            cores=self._cores(),
            throttled_seconds=self._throttled(),
            waited_seconds={name: waited for name in _PRESSURES if (waited := self._waited(name)) is not None},
            memory_limit_bytes=limit,
            memory_left_bytes=left,
        )

    def close(self) -> None:
        """Let go of the files."""
        for file in self._files:
            file.close()

    def _keep(self, path: Path) -> Kept:
        self._files.append(Kept(path))
        return self._files[-1]

    def _find(self) -> None:
        for file in self._files[1:]:
            file.close()
        del self._files[1:]
        cpu = list(dict.fromkeys(cgroups.groups(self._root, "cpu")))
        memory = list(dict.fromkeys(cgroups.groups(self._root, "memory")))
        self._quotas = [self._keep(group / name) for group in cpu for name in ("cpu.max", "cpu.cfs_quota_us")]
        self._stats = [self._keep(group / "cpu.stat") for group in cpu]
        # A group's own pressure tells of this process; the machine's also of all others. The topmost group of all,
        # which has no type, is the machine.
        own = next((group for group in cpu if (group / "cgroup.type").exists()), None)
        self._pressures = {
            name: self._keep(self._root / "proc/pressure" / name if own is None else own / f"{name}.pressure")
            for name in _PRESSURES
        }
        self._limits = [
            (self._keep(group / limit), self._keep(group / used), self._keep(group / "memory.stat"), droppable)
            for group in memory
            for limit, used, droppable in (
                ("memory.max", "memory.current", "inactive_file"),
                ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
            )
            if (group / limit).exists()
        ]
        self._asked: tuple[object, ...] = ()

    def _cores(self) -> int:
        """Looked for in full only where something has changed: that takes a millisecond."""
        asked = (cgroups.allowed(), *(file.read() for file in self._quotas))
        if asked != self._asked:
            self._asked = asked
            self._num_cores = cgroups.cores(self._root)
        return self._num_cores

    def _throttled(self) -> float | None:
        """Of the group that withheld the most: what a group withholds, those in it do not get either."""
        told: list[float] = []
        for file in self._stats:
            text = file.read()
            for name, unit in (("throttled_usec", 1e-6), ("throttled_time", 1e-9)):
                if (count := count_in(text, name)) is not None:
                    told.append(count * unit)
        return max(told, default=None)

    def _waited(self, name: str) -> float | None:
        """``some avg10=1.53 avg60=0.50 avg300=0.10 total=12345``, the total in microseconds."""
        line = self._pressures[name].read().partition(b"\n")[0]
        kind, found, total = line.partition(b"total=")
        return int(total) / 1e6 if found and kind.startswith(b"some") else None

    def _memory(self) -> tuple[int | None, int | None]:
        """The tightest limit, and what is left of it; of the pages of files those not used lately can be dropped."""
        found: list[tuple[int, int | None]] = []
        for limit_file, used_file, stat_file, droppable in self._limits:
            limit = limit_file.number()
            if limit is None or limit >= _UNLIMITED:
                continue
            used = used_file.number()
            found.append((limit, None if used is None else limit - used + (stat_file.count(droppable) or 0)))
        return min(found, default=(None, None), key=lambda pair: pair[0])
