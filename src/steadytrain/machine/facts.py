"""Facts of this machine: the cores and the memory that this process may really use, the processor, the accelerators.

Nothing here imports torch, and nothing fails: what cannot be found out is left out.

>>> 1 <= cores() and 0 < memory_bytes()
True
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil

from steadytrain.machine.cgroups import ROOT, read
from steadytrain.machine.cgroups import cores as cores
from steadytrain.machine.cgroups import groups as groups
from steadytrain.machine.cgroups import quota as quota
from steadytrain.machine.nvml import text

# Best last. The names are those of the kernel's list of a processor's features.
_INSTRUCTION_SETS = (
    ("sse2", {"sse2"}),
    ("sse4.2", {"sse4_2"}),
    ("avx", {"avx"}),
    ("avx2", {"avx2", "fma"}),
    ("avx512", {"avx512f", "avx512bw", "avx512vl", "avx512dq"}),
    ("neon", {"asimd"}),
    ("sve", {"sve"}),
)


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """One GPU: its name, its memory, its driver's version."""

    name: str
    memory_bytes: int
    driver: str


def memory_bytes(root: Path = ROOT) -> int:
    """Memory that this process may use: the machine's, or its control groups' limit where that is less.

    Args:
        root: where ``proc`` and ``sys`` lie.
    """
    return min([psutil.virtual_memory().total, *_memory_limits(root)])


def resident_bytes() -> int:
    """Memory that this process has now."""
    return int(psutil.Process().memory_info().rss)


def peak_resident_bytes() -> int:
    """The most memory that this process has had."""
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def cpu_model(root: Path = ROOT) -> str:
    """The processor's name, such as ``AMD EPYC 7B13``."""
    told = _cpuinfo(root)
    return told.get("model name") or told.get("cpu model") or platform.processor() or platform.machine()


def isa(root: Path = ROOT) -> str:
    """The best vector instruction set: ``avx512``, ``avx2``, ``avx``, ``sse4.2``, ``sse2``, ``sve``, ``neon``.

    Where the kernel lists no features, the machine's architecture, such as ``arm64``.
    """
    told = _cpuinfo(root)
    features = set((told.get("flags") or told.get("Features") or "").split())
    found = [name for name, needed in _INSTRUCTION_SETS if needed <= features]
    return found[-1] if found else platform.machine()


def accelerators() -> tuple[Accelerator, ...]:
    """The NVIDIA GPUs of this machine, if its driver and ``nvidia-ml-py`` are there; else nothing."""
    try:
        nvml: Any = import_module("pynvml")
    except ImportError:
        return ()
    try:
        nvml.nvmlInit()
    except (nvml.NVMLError, OSError):
        return ()
    try:
        return tuple(_accelerators(nvml))
    except nvml.NVMLError:
        return ()
    finally:
        nvml.nvmlShutdown()


def facts() -> dict[str, Any]:
    """What a measurement depends on, ready for JSON."""
    return {
        "host": platform.node(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "cpu": cpu_model(),
        "isa": isa(),
        "cores": cores(),
        "memory_bytes": memory_bytes(),
        "accelerators": [asdict(accelerator) for accelerator in accelerators()],
    }


def _accelerators(nvml: Any) -> Iterator[Accelerator]:
    driver = text(nvml.nvmlSystemGetDriverVersion())
    for index in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        memory = int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
        yield Accelerator(name=text(nvml.nvmlDeviceGetName(handle)), memory_bytes=memory, driver=driver)


def _memory_limits(root: Path) -> Iterator[int]:
    for group in groups(root, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            limit = read(group / name)
            if limit.isdigit():
                yield int(limit)


@lru_cache(maxsize=4)
def _cpuinfo(root: Path) -> dict[str, str]:
    first = read(root / "proc/cpuinfo").split("\n\n")[0]
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}
