"""Facts of this machine: the cores and the memory that this process may really use, the processor, the accelerators.

Nothing here imports torch, and nothing fails: what cannot be found out is left out.

>>> 1 <= cores() and 0 < memory_bytes()
True
"""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil

ROOT = Path("/")

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


def cores(root: Path = ROOT) -> int:
    """Processors that this process may use: by affinity and by its control groups' quota (a fraction counts whole).

    Args:
        root: where ``proc`` and ``sys`` lie.
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([allowed, *(math.ceil(told) for told in _quotas(root))]))


def quota(root: Path = ROOT) -> float | None:
    """The tightest CPU quota of the control groups around this process, in processors; None where there is none.

    Args:
        root: where ``proc`` and ``sys`` lie.
    """
    return min(_quotas(root), default=None)


def memory_bytes(root: Path = ROOT) -> int:
    """Memory that this process may use: the machine's, or its control groups' limit where that is less.

    Args:
        root: where ``proc`` and ``sys`` lie.
    """
    return min([psutil.virtual_memory().total, *_memory_limits(root)])


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


def groups(root: Path, controller: str) -> Iterator[Path]:
    """The folders of the control groups that hold this process, innermost first, of both versions.

    In a container the path told is often the host's and does not exist here: its ancestors are tried as well, up to
    the mount itself, which is then the container's own group.

    Args:
        root: where ``proc`` and ``sys`` lie.
        controller: such as ``cpu`` or ``memory``.
    """
    mount = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, names, path = line.split(":", 2)
        if names and controller not in names.split(","):
            continue
        bases = (mount / names, mount / controller) if names else (mount, mount / "unified")
        inner = Path(path.lstrip("/"))
        for base in bases:
            yield from (base / part for part in (inner, *inner.parents) if (base / part).is_dir())


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
    driver = _text(nvml.nvmlSystemGetDriverVersion())
    for index in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        memory = int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
        yield Accelerator(name=_text(nvml.nvmlDeviceGetName(handle)), memory_bytes=memory, driver=driver)


def _text(told: str | bytes) -> str:
    return told.decode() if isinstance(told, bytes) else told  # releases of the library differ


def _quotas(root: Path) -> Iterator[float]:
    """The CPU quota of each control group around this process, in processors."""
    for group in groups(root, "cpu"):
        version_2 = _read(group / "cpu.max").split()
        if len(version_2) == 2 and version_2[0] != "max":
            yield int(version_2[0]) / int(version_2[1])
        quota, period = _read(group / "cpu.cfs_quota_us"), _read(group / "cpu.cfs_period_us")
        if quota and period and int(quota) > 0:
            yield int(quota) / int(period)


def _memory_limits(root: Path) -> Iterator[int]:
    for group in groups(root, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            limit = _read(group / name)
            if limit.isdigit():
                yield int(limit)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


@lru_cache(maxsize=4)
def _cpuinfo(root: Path) -> dict[str, str]:
    first = _read(root / "proc/cpuinfo").split("\n\n")[0]
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}
