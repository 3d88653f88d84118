"""GPUs as NVIDIA's management library tells of them, a few times a second, and which of them a process uses."""

from __future__ import annotations

from collections.abc import Collection
from importlib import import_module
from typing import Any

from steadytrain.machine.nvml import Reader, text, watts
from steadytrain.monitor.process_watch.facts import GpuLoad


class Gpus:
    """All GPUs of this machine; ``missing`` says why there are none to read, if so. Close it.

    Args:
        nvml: the module ``pynvml``; imported where it is not given.
    """

    def __init__(self, nvml: Any = None) -> None:
        self.missing = ""
        self._nvml: Any = None
        self._gpus: list[Reader] = []
        self._seen: dict[int, tuple[int, float]] = {}
        try:
            library = nvml or import_module("pynvml")
        except ImportError:
            self.missing = "nvidia-ml-py is not installed"
            return
        try:
            library.nvmlInit()
            self._nvml = library
            handles = [library.nvmlDeviceGetHandleByIndex(index) for index in range(library.nvmlDeviceGetCount())]
            self._gpus = [Reader(library, handle) for handle in handles]
        except (library.NVMLError, OSError) as error:
            self.missing = str(error)

    def close(self) -> None:
        """Let the library go."""
        if self._nvml is not None:
            self._nvml.nvmlShutdown()
        self._nvml, self._gpus = None, []

    def look(self, pids: Collection[int], held: Collection[str] | None) -> tuple[GpuLoad, ...]:
        """Every GPU now.

        Args:
            pids: the watched processes.
            held: device files that they hold open, such as ``nvidia0``; None where that is not readable.
        """
        return tuple(self._look(index, gpu, set(pids), held) for index, gpu in enumerate(self._gpus))

    def _look(self, index: int, gpu: Reader, pids: set[int], held: Collection[str] | None) -> GpuLoad:
        memory, told = gpu.read("MemoryInfo"), gpu.read("ComputeRunningProcesses")
        users = None if told is None else {int(one.pid) for one in told}
        minor = gpu.read("MinorNumber")
        ours = _ours(users, pids, held, None if minor is None else f"nvidia{minor}")
        return GpuLoad(
            index=index,
            name=text(gpu.read("Name") or "NVIDIA GPU"),
            utilisation=self._utilisation(index, gpu),
            memory_bytes=None if memory is None else int(memory.used),
            memory_total_bytes=None if memory is None else int(memory.total),
            power_watts=watts(gpu.read("PowerUsage")),
            power_limit_watts=watts(gpu.read("EnforcedPowerLimit")),
            ours=ours,
            others=_others(users, pids, ours),
        )

    def _utilisation(self, index: int, gpu: Reader) -> float | None:
        """The mean of the driver's own samples since the last look, the last one's where there is no new one.

        Where a driver keeps no samples: its newest figure, which is a mean as well, over up to a second.
        """
        since, last = self._seen.get(index, (0, 0.0))
        kind = getattr(self._nvml, "NVML_GPU_UTILIZATION_SAMPLES", None)
        told = None if kind is None else gpu.read("Samples", kind, since)
        fresh = [one for one in told[1] if one.timeStamp > since] if told else []
        if fresh:
            used = fresh if since else fresh[-1:]  # what the driver saw before is not of this watch
            last = float(sum(one.sampleValue.uiVal for one in used)) / len(used) / 100
            self._seen[index] = (max(one.timeStamp for one in fresh), last)
        if fresh or since:
            return last
        rates = gpu.read("UtilizationRates")
        return None if rates is None else float(rates.gpu) / 100


def _ours(users: set[int] | None, pids: set[int], held: Collection[str] | None, file: str | None) -> bool | None:
    """Whether the watched processes compute on a GPU; None where neither the driver nor open files can tell.

    An open device file alone does not say so: CUDA opens those of all GPUs. But the driver's process numbers are the
    machine's, and in a container ours are others: so where the file is open and somebody computes there, it is us.
    """
    if users is not None and users & pids:
        return True
    if held is None or file is None:
        return None
    if file not in held:
        return False
    return True if users else None


def _others(users: set[int] | None, pids: set[int], ours: bool | None) -> int | None:
    """Other processes on a GPU; None where ours may stand among them under a number that is not known here."""
    if users is None or ours is None or (ours and not users & pids):
        return None
    return len(users - pids)
