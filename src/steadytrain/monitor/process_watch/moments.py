"""What one look at a watched process tells: everything is the change since the look before, as a rate."""

from __future__ import annotations

from dataclasses import dataclass, field

from steadytrain.machine.nvml import GpuLoad


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


@dataclass(frozen=True, kw_only=True)
class ProcessLoad:
    """One process of the tree in one interval; bytes, faults and switches are per second.

    ``cpu``: in cores, all threads; ``command``: its command line. ``threads``: the main one first, then those that ran
    or wait for storage; ``num_threads`` counts all. ``disk_read_bytes`` came from a device, ``read_bytes`` by any
    reading call, pages from the cache included. ``devices``: GPU devices that it holds open, such as ``nvidia0``.
    """

    pid: int
    parent: int
    name: str
    command: str
    cpu: float
    threads: tuple[ThreadLoad, ...]
    num_threads: int
    memory_bytes: int | None = None
    swapped_bytes: int | None = None
    disk_read_bytes: float | None = None
    read_bytes: float | None = None
    major_faults: float | None = None
    involuntary_switches: float | None = None
    devices: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class MachineLoad:
    """The processors that the watched process may use, in cores, and what waits for what.

    ``processors``: by affinity alone; ``quota``: of its control groups; ``cores``: the less of the two. ``others``:
    used by processes outside the tree; ``throttled``: share of the quota's periods in which it was used up.
    ``pressure``: share of the time in which something on the machine waited for ``cpu``, ``memory``, ``io``.
    ``swap_in_bytes``: per second.
    """

    cores: int
    processors: int
    quota: float | None = None
    idle: float | None = None
    iowait: float | None = None
    steal: float | None = None
    others: float | None = None
    throttled: float | None = None
    pressure: dict[str, float] = field(default_factory=dict)
    swap_in_bytes: float | None = None
    available_bytes: int | None = None
    memory_bytes: int | None = None


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
        """Of the whole tree, in cores."""
        return sum(process.cpu for process in self.processes)
