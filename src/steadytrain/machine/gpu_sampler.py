"""What the GPUs do beside a run, as NVIDIA's library tells it.

Power is the energy counter's difference, utilisation the mean of the driver's own samples, and the share of the
multiprocessors and tensor cores that worked comes from GPM (Hopper and later): all of the whole interval. Memory,
clock, temperature and the reasons for a lower clock are those of the moment.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Set
from contextlib import suppress
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any, Self

from steadytrain.events import DeviceStats
from steadytrain.machine.nvml import Reader, reasons, text, watts


class Gpus:
    """The GPUs that CUDA shows to this process.

    Args:
        nvml: the module ``pynvml``.
        visible: as in ``CUDA_VISIBLE_DEVICES``; None: all.

    Raises:
        NVMLError: the library's own, or OSError: there is no driver that it could use.
    """

    def __init__(self, nvml: Any, visible: str | None) -> None:
        self._nvml = nvml
        nvml.nvmlInit()
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        chosen = _chosen(visible, [text(Reader(nvml, handle).read("UUID") or "") for handle in handles])
        self._gpus = [_Gpu(index, Reader(nvml, handles[index])) for index in chosen]

    @classmethod
    def found(cls) -> Self | None:
        """Those of this machine; None where there are none, or no library or driver."""
        try:
            nvml: Any = import_module("pynvml")
        except ImportError:
            return None
        try:
            return cls(nvml, os.environ.get("CUDA_VISIBLE_DEVICES"))
        except (nvml.NVMLError, OSError):
            return None

    def read(self, pids: Set[int]) -> tuple[DeviceStats, ...]:
        """What each has done since it was last asked.

        Args:
            pids: our own processes; all others that compute there are somebody else's.
        """
        return tuple(gpu.read(pids) for gpu in self._gpus)

    def close(self) -> None:
        """Let go of the library."""
        for gpu in self._gpus:
            gpu.close()
        with suppress(self._nvml.NVMLError):
            self._nvml.nvmlShutdown()


class _Gpu:
    """One GPU, and how its counters stood when it was last asked."""

    def __init__(self, index: int, of: Reader) -> None:
        self._index, self._of = index, of
        self._name = text(of.read("Name") or "NVIDIA GPU")
        self._active = _Active(of)
        self._at = time.perf_counter()
        self._energy = of.read("TotalEnergyConsumption")
        self._sampled = 0
        self._utilisation()  # the driver's samples go back to before us
        self._active.read()

    def read(self, pids: Set[int]) -> DeviceStats:
        of, nvml = self._of, self._of.nvml
        at = time.perf_counter()
        seconds = max(at - self._at, 1e-9)
        self._at = at
        memory, held, joules = of.read("MemoryInfo"), reasons(of), self._joules()
        sm_active, tensor_active = self._active.read()
        told = {
            "utilisation": self._utilisation(),
            "sm_active": sm_active,
            "tensor_active": tensor_active,
            "memory_bytes": None if memory is None else int(memory.used),
            "memory_total_bytes": None if memory is None else int(memory.total),
            "power_watts": watts(of.read("PowerUsage")) if joules is None else round(joules / seconds, 3),
            "power_limit_watts": watts(of.read("EnforcedPowerLimit")),
            "energy_joules": joules,
            "clock_hertz": _hertz(of.read("ClockInfo", nvml.NVML_CLOCK_SM)),
            "clock_limit_hertz": _hertz(of.read("MaxClockInfo", nvml.NVML_CLOCK_SM)),
            "temperature": of.read("Temperature", nvml.NVML_TEMPERATURE_GPU),
            "processes": _others(of.read("ComputeRunningProcesses"), pids),
        }
        unknown = {name for name, value in told.items() if value is None} | ({"throttled"} if held is None else set())
        return DeviceStats(
            seconds=round(seconds, 6),
            index=self._index,
            name=self._name,
            throttled=tuple(word for word in held or () if word != "idle"),
            missing=tuple(field.name for field in fields(DeviceStats) if field.name in unknown),
            **told,
        )

    def close(self) -> None:
        self._active.close()

    def _joules(self) -> float | None:
        """Since the last call, by a counter in millijoules; it begins anew with the driver."""
        before, self._energy = self._energy, self._of.read("TotalEnergyConsumption")
        if before is None or self._energy is None or self._energy < before:
            return None
        return float(self._energy - before) / 1000

    def _utilisation(self) -> float | None:
        """The mean of what the driver has sampled since the last call; what it tells now, where it gives no samples."""
        told = self._of.read("Samples", self._of.nvml.NVML_GPU_UTILIZATION_SAMPLES, self._sampled)
        samples = () if told is None else tuple(told[1])
        new = [sample for sample in samples if sample.timeStamp > self._sampled]
        if not new:
            now = self._of.read("UtilizationRates")
            return None if now is None else float(now.gpu) / 100
        self._sampled = max(sample.timeStamp for sample in new)
        return round(float(sum(sample.sampleValue.uiVal for sample in new)) / len(new) / 100, 4)


class _Active:
    """The share of the multiprocessors, and of the tensor cores, that worked between two calls: GPM's figures.

    GPM takes samples of all its counters into memory that the library allocates, and computes from two of them.
    """

    def __init__(self, of: Reader) -> None:
        self._of = of
        self._samples: list[Any] = []
        nvml = of.nvml
        with suppress(nvml.NVMLError, AttributeError):  # older releases of the library have no GPM at all
            if nvml.nvmlGpmQueryDeviceSupport(of.handle).isSupportedDevice:
                self._samples = [nvml.nvmlGpmSampleAlloc() for _ in range(2)]
        self._has_one = False

    def read(self) -> tuple[float | None, float | None]:
        nvml = self._of.nvml
        if not self._samples:
            return None, None
        self._samples.reverse()  # the older one is written anew
        try:
            nvml.nvmlGpmSampleGet(self._of.handle, self._samples[1])
            had_one, self._has_one = self._has_one, True
            return self._between() if had_one else (None, None)
        except nvml.NVMLError:
            self._has_one = False
            return None, None

    def close(self) -> None:
        for sample in self._samples:
            with suppress(self._of.nvml.NVMLError):
                self._of.nvml.nvmlGpmSampleFree(sample)
        self._samples = []

    def _between(self) -> tuple[float | None, float | None]:
        nvml = self._of.nvml
        asked = nvml.c_nvmlGpmMetricsGet_t()
        asked.version = nvml.NVML_GPM_METRICS_GET_VERSION
        asked.sample1, asked.sample2 = self._samples
        wanted = (nvml.NVML_GPM_METRIC_SM_UTIL, nvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL)
        asked.numMetrics = len(wanted)
        for place, metric in enumerate(wanted):
            asked.metrics[place].metricId = metric
        nvml.nvmlGpmMetricsGet(asked)
        sm, tensor = (asked.metrics[place] for place in range(len(wanted)))
        return _share(sm), _share(tensor)


def _share(metric: Any) -> float | None:
    """A percentage; None where this one could not be computed."""
    return None if metric.nvmlReturn != 0 else round(metric.value / 100, 4)


def _hertz(megahertz: int | None) -> float | None:
    return None if megahertz is None else megahertz * 1e6


def _others(running: Iterable[Any] | None, pids: Set[int]) -> int | None:
    """Processes that are not ours.

    In a container the driver may tell the numbers that they have outside: where none is ours but some are told, ours
    may be among them, and nothing is known.
    """
    if running is None:
        return None
    found = {one.pid for one in running}
    return None if found and not found & pids and _is_contained() else len(found - pids)


def _is_contained() -> bool:
    """Whether processes have other numbers here than on the machine: theirs is not the first namespace of the kernel.

    That one has a fixed number (``PROC_PID_INIT_INO`` in ``linux/proc_ns.h``).
    """
    with suppress(OSError):
        return Path("/proc/self/ns/pid").readlink().name != "pid:[4026531836]"
    return False


def _chosen(visible: str | None, uuids: list[str]) -> list[int]:
    """Indices of the GPUs named by number, or by (the beginning of) an id; CUDA stops at the first it does not know.

    >>> _chosen(None, ["GPU-a1", "GPU-b2"]), _chosen("GPU-b,0", ["GPU-a1", "GPU-b2"]), _chosen("", ["GPU-a1"])
    ([0, 1], [1, 0], [])
    """
    if visible is None:
        return list(range(len(uuids)))
    chosen: list[int] = []
    for word in (word.strip() for word in visible.split(",")):
        if word.isdigit():
            found = [int(word)] if int(word) < len(uuids) else []
        else:
            found = [index for index, uuid in enumerate(uuids) if word and uuid.startswith(word)]
        if not found:
            break
        chosen.append(found[0])
    return chosen
