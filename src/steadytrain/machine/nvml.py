"""Ask NVIDIA's management library: what the GPUs are, what they do, and who uses them.

The only place that calls ``pynvml`` (of nvidia-ml-py). What a GPU, a driver or a release of the library cannot tell
raises ``NVMLError`` there and is None here; units and codes are those of its reference.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Any

from steadytrain.events import DeviceStats
from steadytrain.machine.gpus import other_processes, visible_gpus
from steadytrain.machine.process_tree import owner
from steadytrain.machine.procfs import ROOT, parse_table, read

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
    """An NVIDIA GPU as its driver tells of it. ``throttled_by`` are the reasons what limits its clock.

    ``index``: nvidia-smi's; ``visible``: whether CUDA shows it, or a slice of it, to this process; ``exclusive``:
    whether a single process may use it; ``power_most_watts``: the highest limit that may be set.
    """

    name: str
    index: int | None = None
    uuid: str | None = None
    visible: bool = True
    capability: str | None = None
    memory_bytes: int | None = None
    memory_used_bytes: int | None = None
    processes: tuple[GpuProcess, ...] | None = None
    busy_share: float | None = None
    mhz: int | None = None
    mhz_max: int | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    power_default_watts: float | None = None
    power_most_watts: float | None = None
    temperature: int | None = None
    throttled_by: tuple[str, ...] | None = None
    ecc_errors: int | None = None
    mig: bool | None = None
    exclusive: bool | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the GPU in CUDA_VISIBLE_DEVICES."""
        return (self.uuid,) if self.uuid else ()

    @property
    def slices(self) -> None:
        """Parts of the GPU, not known here: None."""


@dataclass(frozen=True, kw_only=True)
class Driver:
    """NVIDIA's driver and its GPUs; ``told_by``: ``nvml`` or ``proc``; ``error``: why NVML did not answer."""

    version: str | None = None
    told_by: str | None = None
    error: str | None = None
    gpus: tuple[Gpu, ...] = ()


@dataclass(frozen=True, kw_only=True)
class GpuLoad:
    """One GPU between two looks at a watched process: ``utilisation`` is the share of time in which any kernel ran.

    ``ours``: whether the watched processes compute on it, None where that cannot be told.
    """

    index: int
    name: str
    utilisation: float | None = None
    memory_bytes: int | None = None
    memory_total_bytes: int | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    ours: bool | None = None


class GpuReader:
    """Asks one GPU, or one slice (MIG) of it; ``read("Name")`` is ``nvmlDeviceGetName`` of it, or None.

    Args:
        index: as nvidia-smi counts.
        whole: the GPU that this is a slice of; None: it is none.
    """

    def __init__(self, nvml: Any, handle: Any, index: int = 0, whole: GpuReader | None = None) -> None:
        self.nvml = nvml
        self.handle = handle
        self.index = index
        self.whole = whole
        self._sampled_until = 0
        self._utilisation: float | None = None

    def read(self, name: str, *arguments: Any) -> Any:
        """Return what the library answers; None where it does not."""
        function = getattr(self.nvml, f"nvmlDeviceGet{name}", None)
        try:
            return None if function is None else function(self.handle, *arguments)
        except _errors(self.nvml):
            return None

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Its UUID, and of a slice also the older name: GPU, instance, part."""
        uuid = self.read("UUID") or ""
        if self.whole is None:
            return (uuid,)
        place = [self.read(f"{kind}InstanceId") for kind in ("Gpu", "Compute")]
        return (uuid, f"MIG-{self.whole.names[0]}/{place[0]}/{place[1]}")

    @cached_property
    def slices(self) -> tuple[GpuReader, ...] | None:
        """Its parts (MIG); None where it is not partitioned."""
        if self.whole is not None or (self.read("MigMode") or (0,))[0] != 1:
            return None
        handles = (self.read("MigDeviceHandleByIndex", part) for part in range(self.read("MaxMigDeviceCount") or 0))
        return tuple(GpuReader(self.nvml, handle, self.index, self) for handle in handles if handle is not None)

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
        running = self.read("ComputeRunningProcesses_v2") if running is None else running  # of older drivers
        if running is None:
            return None
        return tuple(GpuProcess(pid=int(process.pid), memory_bytes=process.usedGpuMemory) for process in running)

    def process_name(self, pid: int) -> str | None:
        """Return the path of a process's program; None where it belongs to another user or container."""
        try:
            return self.nvml.nvmlSystemGetProcessName(pid) or None
        except UnicodeDecodeError as error:
            return bytes(error.object).decode(errors="replace")
        except _errors(self.nvml):
            return None

    def power_most_watts(self) -> float | None:
        """Return the highest power limit that may be set."""
        limits = self.read("PowerManagementLimitConstraints")
        return None if limits is None else limits[1] / 1000

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


def _errors(nvml: Any) -> tuple[type[Exception], ...]:
    """Return the errors of the module: that of a driver without a function's newest version is of another kind.

    It decodes names as UTF-8, which they need not be.
    """
    return (nvml.NVMLError, getattr(nvml, "NVMLLibraryMismatchError", nvml.NVMLError), UnicodeDecodeError)


def load_nvml(nvml: Any = None) -> tuple[Any, list[GpuReader]]:
    """Start the library: its module, and a reader for each GPU. Call ``nvmlShutdown`` in the end.

    ``nvml``: the module ``pynvml``; None: the installed one.

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
    gpus = []
    try:
        for index in range(nvml.nvmlDeviceGetCount()):
            with suppress(nvml.NVMLError):  # lost, or not this user's: others may be well
                gpus.append(GpuReader(nvml, nvml.nvmlDeviceGetHandleByIndex(index), index))
    except nvml.NVMLError as error:
        nvml.nvmlShutdown()
        raise NoNvml(str(error)) from error
    return nvml, gpus


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


def read_kernel_module(root: Path = ROOT) -> tuple[str | None, tuple[Gpu, ...]]:
    """Return the driver's version, and the GPUs by name, as its kernel module tells them without NVML."""
    module = root / "proc/driver/nvidia"
    version = re.search(r"Kernel Module\s+(?:for \S+\s+)?([\d.]+)", read(module / "version") or "")
    tables = [parse_table(read(file)) for file in sorted(module.glob("gpus/*/information"))]
    gpus = [Gpu(name=of["Model"], uuid=of.get("GPU UUID")) for of in tables if "Model" in of]
    return version and version[1], tuple(replace(gpu, index=index) for index, gpu in enumerate(gpus))


def read_driver(root: Path = ROOT, nvml: Any = None, variables: Mapping[str, str] = os.environ) -> Driver:
    """Return the driver and all that is known of its GPUs, from NVML, else from its kernel module.

    ``nvml``: the module ``pynvml``; None: the installed one, if there is one.
    """
    try:
        with open_gpus(nvml) as (version, readers):
            shown = {device.index for device in visible_gpus(readers, variables)}
            gpus = tuple(gpu_facts(gpu, visible=gpu.index in shown) for gpu in readers)
            return Driver(version=version, told_by="nvml", gpus=gpus)
    except NoNvml as error:
        kernel, gpus = read_kernel_module(root)
        known = visible_gpus(gpus, variables)
        gpus = tuple(replace(gpu, visible=gpu in known) for gpu in gpus)
        reason = None if isinstance(error.__cause__, ImportError) else str(error)
        return Driver(version=kernel, told_by=kernel and "proc", error=reason, gpus=gpus)


def gpu_facts(gpu: GpuReader, *, visible: bool = True) -> Gpu:
    """Return all that is known of a GPU; ``visible``: whether CUDA shows it to this process."""
    nvml, read = gpu.nvml, gpu.read
    capability, memory, busy = read("CudaComputeCapability"), gpu.memory(), read("UtilizationRates")
    running, mig, mode = gpu.processes(), read("MigMode"), read("ComputeMode")

    return Gpu(
        name=gpu.name(),
        index=gpu.index,
        uuid=gpu.names[0] or None,
        visible=visible,
        capability=None if capability is None else f"{capability[0]}.{capability[1]}",
        memory_bytes=None if memory is None else int(memory.total),
        memory_used_bytes=None if memory is None else int(memory.used),
        processes=None
        if running is None
        else tuple(replace(process, name=gpu.process_name(process.pid)) for process in running),
        busy_share=None if busy is None else busy.gpu / 100,
        mhz=read("ClockInfo", nvml.NVML_CLOCK_SM),
        mhz_max=read("MaxClockInfo", nvml.NVML_CLOCK_SM),
        power_watts=gpu.read_watts("PowerUsage"),
        power_limit_watts=gpu.read_watts("EnforcedPowerLimit"),
        power_default_watts=gpu.read_watts("PowerManagementDefaultLimit"),
        power_most_watts=gpu.power_most_watts(),
        temperature=read("Temperature", nvml.NVML_TEMPERATURE_GPU),
        throttled_by=gpu.throttle_reasons(),
        ecc_errors=read("TotalEccErrors", nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC),
        mig=None if mig is None else bool(mig[0]),
        exclusive=None if mode is None else mode == nvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS,
        pcie_width=read("CurrPcieLinkWidth"),
        pcie_width_max=read("MaxPcieLinkWidth"),
    )


class GpuSampler:
    """Samples the GPUs on which a run computes.

    Power is the energy counter's difference, utilisation the mean of the driver's own samples, and the share of the
    multiprocessors and tensor cores that worked comes from GPM (Hopper and later): all of the whole interval. Memory,
    clock, temperature and the reasons for a lower clock are those of the moment. Of a slice (MIG) the clock is the
    whole GPU's, and what the whole GPU draws is not told.

    Args:
        uuids: of the GPUs, or of their slices, with or without ``GPU-`` and ``MIG-``.
        variables: the process's environment: what CUDA shows counts where the driver knows none of the UUIDs.

    Raises:
        NoNvml: as :func:`load_nvml`; or which GPUs they are cannot be told.
    """

    def __init__(
        self,
        uuids: Collection[str],
        nvml: Any = None,
        *,
        variables: Mapping[str, str] = os.environ,
        root: Path = ROOT,
    ) -> None:
        self._nvml, gpus = load_nvml(nvml)
        wanted = {_bare(uuid) for uuid in uuids}
        chosen = [device for gpu in gpus for device in (gpu, *(gpu.slices or ())) if _bare(device.names[0]) in wanted]
        if not chosen and len(visible := visible_gpus(gpus, variables)) == len(wanted):
            chosen = visible
        self._gpus = [_SampledGpu(gpu, root) for gpu in chosen]
        if not chosen:
            self.close()
            raise NoNvml(f"it does not know {', '.join(sorted(uuids))}")

    def read(self, pids: Set[int]) -> tuple[DeviceStats, ...]:
        """Return what each has done since it was last asked.

        ``pids``: our own processes; all others that compute there are somebody else's.
        """
        return tuple(gpu.read(pids) for gpu in self._gpus)

    def close(self) -> None:
        """Close the library."""
        for gpu in self._gpus:
            gpu.close()
        with suppress(self._nvml.NVMLError):
            self._nvml.nvmlShutdown()


def _bare(uuid: str) -> str:
    return uuid.removeprefix("GPU-").removeprefix("MIG-")


class _SampledGpu:
    """One GPU, or a slice of one, and how its counters stood when it was last asked.

    GPM takes samples of all its counters into memory that the library allocates, and computes from two of them. Those
    of a slice (MIG) the whole GPU tells.
    """

    def __init__(self, gpu: GpuReader, root: Path) -> None:
        self._gpu, self._name, self._root = gpu, gpu.name(), root
        self._at = perf_counter()
        self._energy = gpu.read("TotalEnergyConsumption")
        gpu.utilisation()  # the driver's samples go back to before us
        self._gpm_samples: list[Any] = []
        self._has_gpm_sample = False
        nvml = gpu.nvml
        with suppress(*_errors(nvml), AttributeError):  # older releases of the library have no GPM at all
            if nvml.nvmlGpmQueryDeviceSupport((gpu.whole or gpu).handle).isSupportedDevice:
                self._gpm_samples = [nvml.nvmlGpmSampleAlloc() for _ in range(2)]
        self._active_shares()

    def read(self, pids: Set[int]) -> DeviceStats:
        gpu, nvml, whole = self._gpu, self._gpu.nvml, self._gpu.whole or self._gpu
        at = perf_counter()
        seconds = max(at - self._at, 1e-9)
        self._at = at
        energy, self._energy = self._energy, gpu.read("TotalEnergyConsumption")
        joules: float | None = None  # by a counter in millijoules, which begins anew with the driver
        if energy is not None and self._energy is not None and self._energy >= energy:
            joules = float(self._energy - energy) / 1000
        usage, reasons = gpu.usage(), whole.throttle_reasons()
        clocks = [whole.read(name, nvml.NVML_CLOCK_SM) for name in ("ClockInfo", "MaxClockInfo")]
        clock, clock_limit = (None if megahertz is None else megahertz * 1e6 for megahertz in clocks)
        sm_active, tensor_active = self._active_shares()
        values = {
            **usage,
            "sm_active": sm_active,
            "tensor_active": tensor_active,
            "power_watts": usage["power_watts"] if joules is None else round(joules / seconds, 3),
            "power_most_watts": gpu.power_most_watts(),
            "energy_joules": joules,
            "clock_hertz": clock,
            "clock_limit_hertz": clock_limit,
            "temperature": whole.read("Temperature", nvml.NVML_TEMPERATURE_GPU),
        }
        running = {process.pid: process for process in gpu.processes() or ()}
        others = other_processes(running.keys(), pids, root=self._root)
        values["processes"] = None if others is None else len(others)
        largest = sorted(map(running.__getitem__, others or ()), key=lambda process: -(process.memory_bytes or 0))
        unknown = {name for name, value in [*values.items(), ("throttled", reasons)] if value is None}
        return DeviceStats(
            seconds=round(seconds, 6),
            index=gpu.index,
            name=self._name,
            throttled=tuple(word for word in reasons or () if word != "idle"),
            other_processes=tuple(
                {
                    "pid": process.pid,
                    "name": Path(gpu.process_name(process.pid) or "").name,
                    "user": owner(process.pid),
                    "memory_bytes": process.memory_bytes,
                }
                for process in largest[:_MOST_NAMED]
            ),
            missing=tuple(name for name in DeviceStats.__struct_fields__ if name in unknown),
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
            if self._gpu.whole is None:
                nvml.nvmlGpmSampleGet(self._gpu.handle, self._gpm_samples[1])
            else:
                instance = self._gpu.read("GpuInstanceId")
                nvml.nvmlGpmMigSampleGet(self._gpu.whole.handle, instance, self._gpm_samples[1])
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
        except _errors(nvml):
            self._has_gpm_sample = False
            return None, None
        sm, tensor = (
            None if metric.nvmlReturn != 0 else round(metric.value / 100, 4) for metric in request.metrics[:2]
        )
        return sm, tensor


class GpuWatcher:
    """Reads all GPUs of this machine beside other processes; ``missing`` says why there are none, if so. Close it.

    ``nvml``: the module ``pynvml``; None: the installed one.
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

        ``open_devices``: device files that they hold open, such as ``nvidia0``; None where that is not readable.
        """
        return tuple(self._load(gpu, pids, open_devices) for gpu in self._gpus)

    def _load(self, gpu: GpuReader, pids: Set[int], open_devices: Collection[str] | None) -> GpuLoad:
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
        return GpuLoad(index=gpu.index, name=gpu.name(), **gpu.usage(), ours=ours)
