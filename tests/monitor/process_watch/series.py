"""Series of moments as a watch would record them, drawn from what each part does with its time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

from steadytrain.monitor.process_watch import GpuLoad, MachineLoad, Moment, ProcessLoad, ThreadLoad

INTERVAL = 0.2
Load = float | Callable[[float], float]


@dataclass(frozen=True)
class Part:
    """What a thread does: on a processor, ready for one, waiting for a disk; a number, or a function of the time."""

    cpu: Load = 0.0
    queued: Load = 0.0
    disk: Load = 0.0
    asleep_in: str = "futex"
    reads: str = "pread64 /data/train.tar"


def square(period: float, duty: float, low: float = 0.02, high: float = 0.97) -> Callable[[float], float]:
    """High for the first ``duty`` of each period, seconds."""
    return lambda at: high if at % period < duty * period else low


def averaged(load: Callable[[float], float], seconds: float) -> Callable[[float], float]:
    """As a driver tells a utilisation: the mean of so many seconds."""
    return lambda at: sum(load(at - seconds * part / 20) for part in range(20)) / 20


@dataclass(frozen=True)
class Scene:
    """A training process, its workers and helping threads, its GPU, and the machine; what is free is what is left."""

    main: Part = field(default_factory=Part)
    workers: Sequence[Part] = ()
    helpers: Sequence[Part] = ()
    gpu: Load | None = None
    cores: int = 8
    others: float = 0.0
    quota: float | None = None
    throttled: float | None = None
    memory_pressure: float = 0.0
    swap_in_bytes: float = 0.0
    swapped_bytes: int = 0
    disk_read_bytes: float = 0.0
    power_watts: float = 300.0
    state: str = "S"
    name: str = "python"

    def moments(self, seconds: float = 30.0, seed: int = 0) -> list[Moment]:
        """The series, with a little noise."""
        noise = Random(seed)
        return [self._moment((step + 1) * INTERVAL, noise) for step in range(round(seconds / INTERVAL))]

    def _moment(self, at: float, noise: Random) -> Moment:
        threads = [self._thread(100 + n, part, at, noise) for n, part in enumerate((self.main, *self.helpers))]
        trainer = self._process(100, 1, threads)
        crew = [
            self._process(200 + n, 100, [self._thread(200 + n, part, at, noise)]) for n, part in enumerate(self.workers)
        ]
        used = sum(value.cpu for value in (trainer, *crew))
        free = max(0.0, self.cores - used - self.others)
        waiting = sum(thread.state == "D" for value in (trainer, *crew) for thread in value.threads)
        iowait = min(free, float(waiting))
        machine = MachineLoad(
            cores=self.cores,
            processors=self.cores,
            quota=self.quota,
            idle=free - iowait,
            iowait=iowait,
            others=self.others,
            throttled=self.throttled,
            pressure={"cpu": 0.0, "memory": self.memory_pressure, "io": 0.0},
            swap_in_bytes=self.swap_in_bytes,
        )
        return Moment(at=at, seconds=INTERVAL, processes=(trainer, *crew), machine=machine, gpus=self._gpus(at, noise))

    def _thread(self, tid: int, part: Part, at: float, noise: Random) -> ThreadLoad:
        cpu = min(1.0, max(0.0, _now(part.cpu, at) * (1 + noise.gauss(0, 0.03))))
        reads = noise.random() < _now(part.disk, at)
        state = self.state if self.state != "S" else "D" if reads else "R" if noise.random() < cpu else "S"
        waits = part.reads if state == "D" else part.asleep_in if state == "S" else ""
        queued = min(1.0 - cpu, _now(part.queued, at))
        return ThreadLoad(tid=tid, name=self.name, cpu=cpu, queued=queued, state=state, waits_in=waits)

    def _process(self, pid: int, parent: int, threads: Sequence[ThreadLoad]) -> ProcessLoad:
        return ProcessLoad(
            pid=pid,
            parent=parent,
            name=self.name,
            command=f"{self.name} train.py",
            cpu=sum(thread.cpu for thread in threads),
            threads=tuple(threads),
            memory_bytes=2 << 30,
            swapped_bytes=self.swapped_bytes,
            disk_read_bytes=self.disk_read_bytes,
        )

    def _gpus(self, at: float, noise: Random) -> tuple[GpuLoad, ...]:
        if self.gpu is None:
            return ()
        used = min(1.0, max(0.0, _now(self.gpu, at) * (1 + noise.gauss(0, 0.02))))
        load = GpuLoad(
            index=0,
            name="NVIDIA H100",
            utilisation=round(used, 2),
            memory_bytes=40 << 30,
            memory_total_bytes=80 << 30,
            power_watts=self.power_watts,
            power_limit_watts=700.0,
            ours=True,
        )
        return (load,)


def _now(load: Load, at: float) -> float:
    return load(at) if callable(load) else load
