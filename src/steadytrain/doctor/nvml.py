"""Reading GPUs through NVIDIA's management library: everything asked goes by :class:`Reader`.

Names, units and codes are those of its reference; what a GPU or a driver cannot tell raises ``NVMLError`` there and
is None here.
"""

from __future__ import annotations

from typing import Any

from steadytrain.doctor.facts import Gpu, GpuProcess
from steadytrain.machine.nvml import Reader, reasons, text, watts


class Unusable(Exception):
    """The library cannot be used here; the text says why."""


def gpus(nvml: Any) -> tuple[str, tuple[Gpu, ...]]:
    """The driver's version and every GPU.

    Args:
        nvml: the module ``pynvml``.

    Raises:
        Unusable: no driver, or one that does not fit the library.
    """
    try:
        nvml.nvmlInit()
    except (nvml.NVMLError, OSError) as error:
        raise Unusable(str(error)) from error
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        return text(nvml.nvmlSystemGetDriverVersion()), tuple(_gpu(Reader(nvml, handle)) for handle in handles)
    except nvml.NVMLError as error:
        raise Unusable(str(error)) from error
    finally:
        nvml.nvmlShutdown()


def _gpu(of: Reader) -> Gpu:
    nvml, read = of.nvml, of.read
    capability, memory, busy = read("CudaComputeCapability"), read("MemoryInfo"), read("UtilizationRates")
    ecc, mig = read("EccMode"), read("MigMode")
    return Gpu(
        name=text(read("Name") or "NVIDIA GPU"),
        capability=None if capability is None else f"{capability[0]}.{capability[1]}",
        memory_bytes=None if memory is None else int(memory.total),
        memory_used_bytes=None if memory is None else int(memory.used),
        processes=_processes(of),
        busy_share=None if busy is None else busy.gpu / 100,
        mhz=read("ClockInfo", nvml.NVML_CLOCK_SM),
        mhz_max=read("MaxClockInfo", nvml.NVML_CLOCK_SM),
        memory_mhz=read("ClockInfo", nvml.NVML_CLOCK_MEM),
        memory_mhz_max=read("MaxClockInfo", nvml.NVML_CLOCK_MEM),
        power_watts=watts(read("PowerUsage")),
        power_limit_watts=watts(read("EnforcedPowerLimit")),
        power_default_watts=watts(read("PowerManagementDefaultLimit")),
        temperature=read("Temperature", nvml.NVML_TEMPERATURE_GPU),
        throttled_by=reasons(of),
        ecc=None if ecc is None else bool(ecc[0]),
        ecc_errors=read("TotalEccErrors", nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC),
        mig=None if mig is None else bool(mig[0]),
        persistence=_switch(read("PersistenceMode")),
        pcie_generation=read("CurrPcieLinkGeneration"),
        pcie_generation_max=read("MaxPcieLinkGeneration"),
        pcie_width=read("CurrPcieLinkWidth"),
        pcie_width_max=read("MaxPcieLinkWidth"),
    )


def _processes(of: Reader) -> tuple[GpuProcess, ...] | None:
    running = of.read("ComputeRunningProcesses")
    if running is None:
        return None
    return tuple(
        GpuProcess(pid=one.pid, name=_name(of.nvml, one.pid), memory_bytes=one.usedGpuMemory) for one in running
    )


def _name(nvml: Any, pid: int) -> str | None:
    """A process's name; None where it belongs to somebody else, or to another container."""
    try:
        return text(nvml.nvmlSystemGetProcessName(pid)) or None
    except nvml.NVMLError:
        return None


def _switch(told: int | None) -> bool | None:
    return None if told is None else bool(told)
