"""Ask NVIDIA's management library: what the GPUs are, what they do, and who uses them.

The only place that calls ``pynvml`` (of nvidia-ml-py). What a GPU, a driver or a release of the library cannot tell
raises ``NVMLError`` there and is None here; units and codes are those of its reference.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Any, Self

from steadytrain.events import DeviceStats
from steadytrain.machine.process_tree import owner

_MOST_NAMED = 3  # other processes that a sample names
# Bits of nvmlDeviceGetCurrentClocksEventReasons.
REASONS = {
    0x001: "idle",
    0x002: "set clocks",
    0x004: "power limit",
    0x008: "hardware slowdown",
    0x010: "sync boost",
    0x020: "heat",
    0x040: "heat (hardware)",
    0x080: "power brake",
    0x100: "display clocks",
}


class NoNvml(Exception):
    """The library cannot be used here; the text says why."""


@dataclass(frozen=True, kw_only=True)
class GpuProcess:
    """A process that computes on a GPU."""

    pid: int
    name: str | None = None
    memory_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """An NVIDIA GPU as its driver tells of it. ``throttled_by`` are the reasons what limits its clock."""

    name: str
    capability: str | None = None
    memory_bytes: int | None = None
    memory_used_bytes: int | None = None
    processes: tuple[GpuProcess, ...] | None = None
    busy_share: float | None = None
    mhz: int | None = None
    mhz_max: int | None = None
    memory_mhz: int | None = None
    memory_mhz_max: int | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    power_default_watts: float | None = None
    temperature: int | None = None
    throttled_by: tuple[str, ...] | None = None
    ecc: bool | None = None
    ecc_errors: int | None = None
    mig: bool | None = None
    persistence: bool | None = None
    pcie_generation: int | None = None
    pcie_generation_max: int | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None


@dataclass(frozen=True, kw_only=True)
class GpuLoad:
    """One GPU between two looks at a watched process: ``utilisation`` is the share of time in which any kernel ran.

    ``ours``: whether the watched processes compute on it, None where that cannot be told; ``others``: how many other
    processes do.
    """

    index: int
    name: str
    utilisation: float | None = None
    memory_bytes: int | None = None
    memory_total_bytes: int | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    ours: bool | None = None
    others: int | None = None


class GpuReader:
    """Asks one GPU; ``read("Name")`` is ``nvmlDeviceGetName`` of it, or None."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self.nvml = nvml
        self.handle = handle
        self._sampled_until = 0
        self._utilisation: float | None = None

    def read(self, name: str, *arguments: Any) -> Any:
        """Return what the library answers; None where it does not."""
        function = getattr(self.nvml, f"nvmlDeviceGet{name}", None)
        try:
            return None if function is None else function(self.handle, *arguments)
        except (self.nvml.NVMLError, UnicodeDecodeError):  # pynvml decodes names as UTF-8, which they need not be
            return None

    def read_watts(self, name: str) -> float | None:
        """Return a power, which the library tells in milliwatts."""
        milliwatts = self.read(name)
        return None if milliwatts is None else milliwatts / 1000

    def name(self) -> str:
        """Return the GPU's name."""
        return self.read("Name") or "NVIDIA GPU"

    def throttle_reasons(self) -> tuple[str, ...] | None:
        """Return why the clock is not higher now; nothing where it could not be."""
        bits = self.read("CurrentClocksEventReasons")
        bits = self.read("CurrentClocksThrottleReasons") if bits is None else bits  # the name of older drivers
        return None if bits is None else tuple(word for bit, word in REASONS.items() if bits & bit)

    def processes(self) -> tuple[GpuProcess, ...] | None:
        """Return the processes that compute on it, by the machine's numbers, without their names."""
        running = self.read("ComputeRunningProcesses")
        if running is None:
            return None
        return tuple(GpuProcess(pid=int(process.pid), memory_bytes=process.usedGpuMemory) for process in running)

    def process_name(self, pid: int) -> str | None:
        """Return the path of a process's program; None where it belongs to another user or container."""
        try:
            return self.nvml.nvmlSystemGetProcessName(pid) or None
        except UnicodeDecodeError as error:  # pynvml decodes it as UTF-8, which it need not be
            return bytes(error.object).decode(errors="replace")
        except self.nvml.NVMLError:
            return None

    def utilisation(self) -> float | None:
        """Return the mean of the driver's samples since the last call (at first the newest one alone).

        Where there is no new sample, what it was at the last call; where a driver keeps none, its present figure, a
        mean over up to a second.
        """
        answer = self.read("Samples", self.nvml.NVML_GPU_UTILIZATION_SAMPLES, self._sampled_until)
        fresh = [sample for sample in answer[1] if sample.timeStamp > self._sampled_until] if answer else []
        if fresh:
            used = fresh if self._sampled_until else fresh[-1:]  # what the driver saw before is not of this watch
            self._utilisation = round(sum(sample.sampleValue.uiVal for sample in used) / len(used) / 100, 4)
            self._sampled_until = max(sample.timeStamp for sample in fresh)
        if self._sampled_until:
            return self._utilisation
        rates = self.read("UtilizationRates")
        return None if rates is None else float(rates.gpu) / 100

    def memory(self) -> Any:
        """Return the bytes in ``total`` and ``used``, as nvidia-smi has them: the driver's own are not in use."""
        version = getattr(self.nvml, "nvmlMemory_v2", None)  # the first version counts what the driver reserves
        memory = None if version is None else self.read("MemoryInfo", version)
        return self.read("MemoryInfo") if memory is None else memory

    def usage(self) -> dict[str, Any]:
        """Return how busy it is, the memory taken and in all, the power drawn and its limit."""
        memory = self.memory()
        return {
            "utilisation": self.utilisation(),
            "memory_bytes": None if memory is None else int(memory.used),
            "memory_total_bytes": None if memory is None else int(memory.total),
            "power_watts": self.read_watts("PowerUsage"),
            "power_limit_watts": self.read_watts("EnforcedPowerLimit"),
        }


def load_nvml(nvml: Any = None) -> tuple[Any, list[GpuReader]]:
    """Start the library: its module, and a reader for each GPU. Call ``nvmlShutdown`` in the end.

    Args:
        nvml: the module ``pynvml``; None: the installed one.

    Raises:
        NoNvml: no library, no driver, or one that does not fit the library.
    """
    try:
        nvml = nvml or import_module("pynvml")
    except ImportError as error:
        raise NoNvml("nvidia-ml-py is not installed") from error
    try:
        nvml.nvmlInit()
    except (nvml.NVMLError, OSError) as error:
        raise NoNvml(str(error)) from error
    try:
        count = nvml.nvmlDeviceGetCount()
        return nvml, [GpuReader(nvml, nvml.nvmlDeviceGetHandleByIndex(index)) for index in range(count)]
    except nvml.NVMLError as error:
        nvml.nvmlShutdown()
        raise NoNvml(str(error)) from error


@contextmanager
def open_gpus(nvml: Any = None) -> Iterator[tuple[str, list[GpuReader]]]:
    """Give the driver's version and all GPUs, and close the library after that; raises as :func:`load_nvml`."""
    nvml, gpus = load_nvml(nvml)
    try:
        yield nvml.nvmlSystemGetDriverVersion(), gpus
    except nvml.NVMLError as error:
        raise NoNvml(str(error)) from error
    finally:
        nvml.nvmlShutdown()


def gpu_facts(gpu: GpuReader) -> Gpu:
    """Return all that is known of a GPU."""
    nvml, read = gpu.nvml, gpu.read
    capability, memory, busy = read("CudaComputeCapability"), gpu.memory(), read("UtilizationRates")
    ecc, mig, persistence = (read(name) for name in ("EccMode", "MigMode", "PersistenceMode"))
    running = gpu.processes()

    return Gpu(
        name=gpu.name(),
        capability=None if capability is None else f"{capability[0]}.{capability[1]}",
        memory_bytes=None if memory is None else int(memory.total),
        memory_used_bytes=None if memory is None else int(memory.used),
        processes=None
        if running is None
        else tuple(replace(process, name=gpu.process_name(process.pid)) for process in running),
        busy_share=None if busy is None else busy.gpu / 100,
        mhz=read("ClockInfo", nvml.NVML_CLOCK_SM),
        mhz_max=read("MaxClockInfo", nvml.NVML_CLOCK_SM),
        memory_mhz=read("ClockInfo", nvml.NVML_CLOCK_MEM),
        memory_mhz_max=read("MaxClockInfo", nvml.NVML_CLOCK_MEM),
        power_watts=gpu.read_watts("PowerUsage"),
        power_limit_watts=gpu.read_watts("EnforcedPowerLimit"),
        power_default_watts=gpu.read_watts("PowerManagementDefaultLimit"),
        temperature=read("Temperature", nvml.NVML_TEMPERATURE_GPU),
        throttled_by=gpu.throttle_reasons(),
        ecc=None if ecc is None else bool(ecc[0]),
        ecc_errors=read("TotalEccErrors", nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC),
        mig=None if mig is None else bool(mig[0]),
        persistence=None if persistence is None else bool(persistence),
        pcie_generation=read("CurrPcieLinkGeneration"),
        pcie_generation_max=read("MaxPcieLinkGeneration"),
        pcie_width=read("CurrPcieLinkWidth"),
        pcie_width_max=read("MaxPcieLinkWidth"),
    )


class GpuSampler:
    """Samples the GPUs that CUDA shows to this process.

    Power is the energy counter's difference, utilisation the mean of the driver's own samples, and the share of the
    multiprocessors and tensor cores that worked comes from GPM (Hopper and later): all of the whole interval. Memory,
    clock, temperature and the reasons for a lower clock are those of the moment.

    Args:
        nvml: the module ``pynvml``; None: the installed one.
        visible: as in ``CUDA_VISIBLE_DEVICES``; None: all.
        uuids: of the GPUs to sample among these, with or without ``GPU-``; empty, or where none is there (parts of a
            GPU have ids of their own): all of them.

    Raises:
        NoNvml: as :func:`load_nvml`.
    """

    def __init__(self, nvml: Any = None, visible: str | None = None, *, uuids: Collection[str] = ()) -> None:
        self._nvml, gpus = load_nvml(nvml)
        names = [gpu.read("UUID") or "" for gpu in gpus]
        visible_gpus, wanted = _visible_gpus(visible, names), {uuid.removeprefix("GPU-") for uuid in uuids}
        chosen = [index for index in visible_gpus if names[index].removeprefix("GPU-") in wanted] or visible_gpus
        self._gpus = [_SampledGpu(index, gpus[index]) for index in chosen]

    @classmethod
    def find(cls, uuids: Collection[str] = ()) -> Self | None:
        """Sample those of this machine; None where there are none, or no library or driver."""
        try:
            return cls(visible=os.environ.get("CUDA_VISIBLE_DEVICES"), uuids=uuids)
        except NoNvml:
            return None

    def read(self, pids: Set[int]) -> tuple[DeviceStats, ...]:
        """Return what each has done since it was last asked.

        Args:
            pids: our own processes; all others that compute there are somebody else's.
        """
        return tuple(gpu.read(pids) for gpu in self._gpus)

    def close(self) -> None:
        """Close the library."""
        for gpu in self._gpus:
            gpu.close()
        with suppress(self._nvml.NVMLError):
            self._nvml.nvmlShutdown()


class _SampledGpu:
    """One GPU, and how its counters stood when it was last asked.

    GPM takes samples of all its counters into memory that the library allocates, and computes from two of them.
    """

    def __init__(self, index: int, gpu: GpuReader) -> None:
        self._index, self._gpu, self._name = index, gpu, gpu.name()
        self._at = perf_counter()
        self._energy = gpu.read("TotalEnergyConsumption")
        gpu.utilisation()  # the driver's samples go back to before us
        self._gpm_samples: list[Any] = []
        self._has_gpm_sample = False
        nvml = gpu.nvml
        with suppress(nvml.NVMLError, AttributeError):  # older releases of the library have no GPM at all
            if nvml.nvmlGpmQueryDeviceSupport(gpu.handle).isSupportedDevice:
                self._gpm_samples = [nvml.nvmlGpmSampleAlloc() for _ in range(2)]
        self._active_shares()

    def read(self, pids: Set[int]) -> DeviceStats:
        gpu, nvml = self._gpu, self._gpu.nvml
        at = perf_counter()
        seconds = max(at - self._at, 1e-9)
        self._at = at
        energy, self._energy = self._energy, gpu.read("TotalEnergyConsumption")
        joules: float | None = None  # by a counter in millijoules, which begins anew with the driver
        if energy is not None and self._energy is not None and self._energy >= energy:
            joules = float(self._energy - energy) / 1000
        usage, reasons = gpu.usage(), gpu.throttle_reasons()
        clocks = [gpu.read(name, nvml.NVML_CLOCK_SM) for name in ("ClockInfo", "MaxClockInfo")]
        clock, clock_limit = (None if megahertz is None else megahertz * 1e6 for megahertz in clocks)
        sm_active, tensor_active = self._active_shares()
        values = {
            **usage,
            "sm_active": sm_active,
            "tensor_active": tensor_active,
            "power_watts": usage["power_watts"] if joules is None else round(joules / seconds, 3),
            "energy_joules": joules,
            "clock_hertz": clock,
            "clock_limit_hertz": clock_limit,
            "temperature": gpu.read("Temperature", nvml.NVML_TEMPERATURE_GPU),
        }
        others = _other_processes(gpu.processes(), pids)
        values["processes"] = None if others is None else len(others)
        largest = sorted(others or (), key=lambda process: -(process.memory_bytes or 0))[:_MOST_NAMED]
        unknown = {name for name, value in [*values.items(), ("throttled", reasons)] if value is None}
        return DeviceStats(
            seconds=round(seconds, 6),
            index=self._index,
            name=self._name,
            throttled=tuple(word for word in reasons or () if word != "idle"),
            other_processes=tuple(
                {
                    "pid": process.pid,
                    "name": Path(gpu.process_name(process.pid) or "").name,
                    "user": owner(process.pid),
                    "memory_bytes": process.memory_bytes,
                }
                for process in largest
            ),
            missing=tuple(field.name for field in fields(DeviceStats) if field.name in unknown),
            **values,
        )

    def close(self) -> None:
        for sample in self._gpm_samples:
            with suppress(self._gpu.nvml.NVMLError):
                self._gpu.nvml.nvmlGpmSampleFree(sample)
        self._gpm_samples = []

    def _active_shares(self) -> tuple[float | None, float | None]:
        """The share of the multiprocessors, and of the tensor cores, that worked since the last call."""
        nvml = self._gpu.nvml
        if not self._gpm_samples:
            return None, None
        self._gpm_samples.reverse()  # the older one is written anew
        try:
            nvml.nvmlGpmSampleGet(self._gpu.handle, self._gpm_samples[1])
            had_sample, self._has_gpm_sample = self._has_gpm_sample, True
            if not had_sample:
                return None, None
            request = nvml.c_nvmlGpmMetricsGet_t()
            request.version = nvml.NVML_GPM_METRICS_GET_VERSION
            request.sample1, request.sample2 = self._gpm_samples
            request.numMetrics = 2
            request.metrics[0].metricId = nvml.NVML_GPM_METRIC_SM_UTIL
            request.metrics[1].metricId = nvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL
            nvml.nvmlGpmMetricsGet(request)
        except nvml.NVMLError:
            self._has_gpm_sample = False
            return None, None
        sm, tensor = (
            None if metric.nvmlReturn != 0 else round(metric.value / 100, 4) for metric in request.metrics[:2]
        )
        return sm, tensor


def _other_processes(running: tuple[GpuProcess, ...] | None, pids: Set[int]) -> list[GpuProcess] | None:
    """Return the processes that are not ours.

    In a container the driver may tell the numbers that they have outside: where none is ours but some are told, ours
    may be among them, and nothing is known.
    """
    if running is None:
        return None
    others = [process for process in running if process.pid not in pids]
    if others and len(others) == len(running):
        with suppress(OSError):  # the first namespace of the kernel has a fixed number (linux/proc_ns.h)
            if Path("/proc/self/ns/pid").readlink().name != "pid:[4026531836]":
                return None
    return others


def _visible_gpus(visible: str | None, uuids: list[str]) -> list[int]:
    """Indices of the GPUs named by number, or by (the beginning of) an id; CUDA stops at the first it does not know.

    >>> _visible_gpus(None, ["GPU-a1", "GPU-b2"]), _visible_gpus("GPU-b,0", ["GPU-a1", "GPU-b2"])
    ([0, 1], [1, 0])
    """
    if visible is None:
        return list(range(len(uuids)))
    chosen: list[int] = []
    for word in (word.strip() for word in visible.split(",")):
        if word.isdigit():
            matches = [int(word)] if int(word) < len(uuids) else []
        else:
            matches = [index for index, uuid in enumerate(uuids) if word and uuid.startswith(word)]
        if not matches:
            break
        chosen.append(matches[0])
    return chosen


class GpuWatcher:
    """Reads all GPUs of this machine beside other processes; ``missing`` says why there are none, if so. Close it.

    Args:
        nvml: the module ``pynvml``; None: the installed one.
    """

    def __init__(self, nvml: Any = None) -> None:
        self.missing = ""
        self._nvml: Any = None
        self._gpus: list[GpuReader] = []
        try:
            self._nvml, self._gpus = load_nvml(nvml)
        except NoNvml as error:
            self.missing = str(error)

    def close(self) -> None:
        """Close the library."""
        if self._nvml is not None:
            self._nvml.nvmlShutdown()
        self._nvml, self._gpus = None, []

    def read(self, pids: Set[int], open_devices: Collection[str] | None) -> tuple[GpuLoad, ...]:
        """Return what every GPU does now.

        Args:
            pids: the watched processes.
            open_devices: device files that they hold open, such as ``nvidia0``; None where that is not readable.
        """
        return tuple(self._load(index, gpu, pids, open_devices) for index, gpu in enumerate(self._gpus))

    def _load(self, index: int, gpu: GpuReader, pids: Set[int], open_devices: Collection[str] | None) -> GpuLoad:
        """An open device file alone does not say that a process computes there: CUDA opens those of all GPUs.

        But the driver's process numbers are the machine's, and in a container ours are others: so where the file is
        open and somebody computes there, it is us.
        """
        processes, minor = gpu.processes(), gpu.read("MinorNumber")
        users = None if processes is None else {process.pid for process in processes}
        ours: bool | None = None
        if users is not None and users & pids:
            ours = True
        elif open_devices is not None and minor is not None:
            ours = False if f"nvidia{minor}" not in open_devices else True if users else None
        is_hidden = users is None or ours is None or (ours and not users & pids)  # ours may stand under another number
        others = None if is_hidden or users is None else len(users - pids)
        return GpuLoad(index=index, name=gpu.name(), **gpu.usage(), ours=ours, others=others)
