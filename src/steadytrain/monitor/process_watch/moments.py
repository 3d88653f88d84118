"""One sample of a watched process: changes since the sample before, as rates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from steadytrain.machine.nvml import GpuLoad
from steadytrain.machine.process_tree import CALLS_ON_FILES, CALLS_ON_PATHS


@dataclass(frozen=True, kw_only=True)
class ThreadLoad:
    """One thread in one interval.

    ``cpu``: share of the interval on a processor; ``queued``: share in which it could have run and had none, None where
    the kernel does not tell. ``state``: the kernel's letter at the end of the interval: R runs, S sleeps, D waits for
    storage (or for another part of the kernel), T is stopped, Z has ended. ``waits_in``: the system call it sleeps in,
    with the file where there is one, such as ``read /data/a.jpg``; empty where it runs or where that is not readable.
    """

    tid: int
    name: str
    cpu: float
    queued: float | None = None
    state: str = "S"
    waits_in: str = ""

    @property
    def busy(self) -> float:
        """Share of the interval on a processor or ready for one."""
        return min(1.0, self.cpu + (self.queued or 0.0))

    @property
    def waits_for_disk(self) -> bool:
        """Return whether it waits for a file or a disk, and not for a device, a pipe or another process."""
        call, _, file = self.waits_in.partition(" ")
        if file.startswith("/dev/"):
            return False
        if self.state == "D":
            return not file or file.startswith("/")
        return self.state == "S" and (call in CALLS_ON_PATHS or (call in CALLS_ON_FILES and file[:1] == "/"))


@dataclass(frozen=True, kw_only=True)
class ProcessLoad:
    """One process of the tree in one interval; bytes are per second.

    ``cpu``: in cores, all threads; ``command``: its command line. ``threads``: the main one first, then those that ran
    or wait for storage. ``disk_read_bytes`` came from a device. ``devices``: GPU devices that it holds open, such as
    ``nvidia0``.
    """

    pid: int
    parent: int
    name: str
    command: str
    cpu: float
    threads: tuple[ThreadLoad, ...]
    memory_bytes: int | None = None
    swapped_bytes: int | None = None
    disk_read_bytes: float | None = None
    devices: tuple[str, ...] = ()

    @property
    def busy(self) -> float:
        """Share of the interval of its busiest thread on a processor or ready for one."""
        return max((thread.busy for thread in self.threads), default=0.0)

    @property
    def waits_for_disk(self) -> bool:
        """Return whether one of its threads waits for a file or a disk."""
        return any(thread.waits_for_disk for thread in self.threads)

    @property
    def waits_in(self) -> str:
        """The system call that its main thread sleeps in."""
        return self.threads[0].waits_in if self.threads else ""


@dataclass(frozen=True, kw_only=True)
class MachineLoad:
    """The processors that the watched process may use, in cores, and the machine's pressure.

    ``processors``: by affinity alone; ``quota``: of its control groups; ``cores``: the less of the two. ``others``:
    used by processes outside the tree; ``throttled``: share of the quota's periods in which it was used up.
    ``pressure``: share of the time in which something on the machine waited for ``cpu``, ``memory``, ``io``.
    ``swap_in_bytes``: per second. ``other_processes``: the busiest of the others, about a second ago: ``pid``,
    ``name``, ``user`` and ``cores`` of each.
    """

    cores: int
    processors: int
    quota: float | None = None
    idle: float | None = None
    iowait: float | None = None
    others: float | None = None
    throttled: float | None = None
    pressure: dict[str, float] = field(default_factory=dict)
    swap_in_bytes: float | None = None
    other_processes: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Moment:
    """One interval: it ended ``at`` seconds after the watch began and lasted ``seconds``.

    ``missing``: what is not measurable here, in words.
    """

    at: float
    seconds: float
    processes: tuple[ProcessLoad, ...]
    machine: MachineLoad
    gpus: tuple[GpuLoad, ...] = ()
    missing: tuple[str, ...] = ()

    @property
    def cpu(self) -> float:
        """Processor time of the whole tree, in cores."""
        return sum(process.cpu for process in self.processes)
