"""GPUs as NVIDIA's management library tells of them, a few times a second."""

from __future__ import annotations

from collections.abc import Collection
from importlib import import_module
from typing import Any

from steadytrain.watch.foreign.facts import GpuLoad


class Gpus:
    """Opens the library and reads every GPU; ``missing`` says why there is nothing to read, if so. Close it.

    Args:
        nvml: the module ``pynvml``; imported where it is not given.
    """

    def __init__(self, nvml: Any = None) -> None:
        self.missing = ""
        self._nvml, self._handles, self._seen = nvml, [], {}  # type: tuple[Any, list[Any], dict[int, tuple[int, float]]]
        try:
            self._nvml = nvml or import_module("pynvml")
            self._nvml.nvmlInit()
        except ImportError:
            self._nvml, self.missing = None, "GPUs: nvidia-ml-py is not installed"
            return
        except (self._error, OSError) as error:
            self._nvml, self.missing = None, f"GPUs: {error}"
            return
        try:
            count = self._nvml.nvmlDeviceGetCount()
            self._handles = [self._nvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
        except self._error as error:
            self.missing = f"GPUs: {error}"

    @property
    def _error(self) -> Any:
        return self._nvml.NVMLError

    def close(self) -> None:
        """Let the library go."""
        if self._nvml is not None:
            self._nvml.nvmlShutdown()
            self._nvml = None
            self._handles = []

    def look(self, pids: Collection[int], held: Collection[str] | None) -> tuple[GpuLoad, ...]:
        """Every GPU now.

        Args:
            pids: the watched processes.
            held: device files that they hold open, such as ``nvidia0``; None where that is not readable.
        """
        return tuple(self._gpu(index, handle, pids, held) for index, handle in enumerate(self._handles))

    def _gpu(self, index: int, handle: Any, pids: Collection[int], held: Collection[str] | None) -> GpuLoad:
        memory, name = self._read("MemoryInfo", handle), self._read("Name", handle)
        power, limit = self._read("PowerUsage", handle), self._read("EnforcedPowerLimit", handle)
        told = self._read("ComputeRunningProcesses", handle)
        users = None if told is None else {int(one.pid) for one in told}
        minor = self._read("MinorNumber", handle)
        ours = _ours(users, pids, held, None if minor is None else f"nvidia{minor}")
        return GpuLoad(
            index=index,
            name=name.decode(errors="replace") if isinstance(name, bytes) else str(name or "NVIDIA GPU"),
            utilisation=self._utilisation(index, handle),
            memory_bytes=None if memory is None else int(memory.used),
            memory_total_bytes=None if memory is None else int(memory.total),
            power_watts=None if power is None else power / 1000,
            power_limit_watts=None if limit is None else limit / 1000,
            ours=ours,
            others=None if users is None or ours is None else _strangers(users, pids, ours),
        )

    def _utilisation(self, index: int, handle: Any) -> float | None:
        """The mean of the driver's own samples since the last look; the newest figure where it keeps none."""
        since, last = self._seen.get(index, (0, 0.0))
        try:
            kind = self._nvml.NVML_GPU_UTILIZATION_SAMPLES
            _, samples = self._nvml.nvmlDeviceGetSamples(handle, kind, since)
        except (self._error, AttributeError):
            samples = ()
        fresh = [one for one in samples if one.timeStamp > since]
        if fresh:
            used = fresh if since else fresh[-1:]
            last = float(sum(one.sampleValue.uiVal for one in used)) / len(used) / 100
            self._seen[index] = (max(one.timeStamp for one in fresh), last)
            return last
        if since:
            return last
        rates = self._read("UtilizationRates", handle)
        return None if rates is None else float(rates.gpu) / 100

    def _read(self, name: str, handle: Any) -> Any:
        function = getattr(self._nvml, f"nvmlDeviceGet{name}", None)
        try:
            return None if function is None else function(handle)
        except self._error:
            return None


def _ours(users: set[int] | None, pids: Collection[int], held: Collection[str] | None, file: str | None) -> bool | None:
    """Whether the watched processes compute on a GPU; None where neither the driver nor open files can tell."""
    if users is not None and users & set(pids):
        return True
    if held is None or file is None:
        return None
    if file not in held:
        return False
    # The file is open: CUDA opens those of all GPUs. The driver's numbers are those of the machine, not of a container:
    # only where it knows other processes of ours can it be believed that this GPU has none of them.
    return True if users else None


def _strangers(users: set[int], pids: Collection[int], ours: bool) -> int | None:
    """Other processes on a GPU; None where ours stands among them under a number that is not known here."""
    mine = users & set(pids)
    return None if ours and not mine else len(users - mine)
