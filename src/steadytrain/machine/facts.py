"""Facts of this machine: the cores and the memory that this process may use, the processor, the GPUs, the caches.

Nothing here imports torch, and nothing fails: what cannot be found out is left out.

>>> 1 <= cores() and 0 < memory_bytes()
True
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from steadytrain.errors import StorageError
from steadytrain.machine.cgroups import cores as cores
from steadytrain.machine.cgroups import memory_limit
from steadytrain.machine.cgroups import quota as quota
from steadytrain.machine.gpus import visible_gpus
from steadytrain.machine.nvml import NoNvml, open_gpus, read_kernel_module
from steadytrain.machine.procfs import ROOT, parse_table, read

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
    """One GPU: its name, its driver's version, its memory where NVML tells it."""

    name: str
    memory_bytes: int | None
    driver: str


def memory_bytes(root: Path = ROOT) -> int:
    """Return the memory that this process may use: the machine's, or its control groups' limit where that is less.

    ``root``: where ``proc`` and ``sys`` lie.
    """
    machine, limit = psutil.virtual_memory().total, memory_limit(root)
    return machine if limit is None else min(machine, limit.num_bytes)


def resident_bytes() -> int:
    """Return the memory that this process has now."""
    return int(psutil.Process().memory_info().rss)


def cpu_model(root: Path = ROOT) -> str:
    """Return the processor's name, such as ``AMD EPYC 7B13``."""
    table = cpuinfo(root)
    return table.get("model name") or table.get("cpu model") or platform.processor() or platform.machine()


def cpu_features(root: Path = ROOT) -> frozenset[str]:
    """Return the features of the processor in the kernel's names; nothing where it lists none."""
    table = cpuinfo(root)
    return frozenset((table.get("flags") or table.get("Features") or "").split())


def isa(root: Path = ROOT) -> str:
    """Name the best vector instruction set: ``avx512``, ``avx2``, ``avx``, ``sse4.2``, ``sse2``, ``sve``, ``neon``.

    Where the kernel lists no features, the machine's architecture, such as ``arm64``.
    """
    features = cpu_features(root)
    supported = [name for name, needed in _INSTRUCTION_SETS if needed <= features]
    return supported[-1] if supported else platform.machine()


def cpuinfo(root: Path = ROOT) -> dict[str, str]:
    """Read what the kernel tells of the first processor."""
    return parse_table((read(root / "proc/cpuinfo") or "").split("\n\n")[0])


def accelerators(variables: Mapping[str, str] = os.environ, root: Path = ROOT) -> tuple[Accelerator, ...]:
    """List the NVIDIA GPUs that CUDA shows to this process, in its order; nothing without a driver.

    Args:
        variables: its environment.
        root: where ``proc`` lies, in which the driver lists its GPUs where NVML cannot be used.
    """
    with suppress(NoNvml), open_gpus() as (driver, readers):
        memories = [(gpu.name(), gpu.memory()) for gpu in visible_gpus(readers, variables)]
        return tuple(Accelerator(name=name, memory_bytes=m and int(m.total), driver=driver) for name, m in memories)
    version, gpus = read_kernel_module(root)
    shown = visible_gpus(gpus, variables)
    return tuple(Accelerator(name=gpu.name, memory_bytes=None, driver=version or "") for gpu in shown)


def facts() -> dict[str, Any]:
    """Return what a measurement depends on, ready for JSON."""
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


def user_cache(variables: Mapping[str, str] = os.environ) -> Path | None:
    """Return the folder for the caches of all of this user's programs; None for a user without a home."""
    folder = variables.get("XDG_CACHE_HOME")
    try:
        return Path(folder) if folder else Path.home() / ".cache"
    except RuntimeError:
        return None


def cache_folder(variables: Mapping[str, str] = os.environ) -> Path | None:
    """Return the folder for what could be made again: packed copies, counts of models, compiled code.

    ``$STEADYTRAIN_CACHE``, else ``steadytrain`` in the user's cache; None for a user without a home.

    >>> cache_folder({"STEADYTRAIN_CACHE": "/scratch/me"}), cache_folder({"XDG_CACHE_HOME": "/var/cache"})
    (PosixPath('/scratch/me'), PosixPath('/var/cache/steadytrain'))
    """
    folder, user = variables.get("STEADYTRAIN_CACHE"), user_cache(variables)
    return Path(folder) if folder else user and user / "steadytrain"


def require_cache_folder() -> Path:
    """Return :func:`cache_folder`. Raises StorageError: this user has no home."""
    folder = cache_folder()
    if folder is None:
        raise StorageError("this user has no home folder for a cache: set STEADYTRAIN_CACHE to a folder")
    return folder


def tasks_on(node: int, tasks: str) -> int | None:
    """Return how many tasks a node of a Slurm step has, by Slurm's list of all nodes; None where it is no such list.

    >>> tasks_on(2, "2(x3)"), tasks_on(1, "2,1"), tasks_on(0, "some")
    (2, 1, None)
    """
    counts: list[int] = []
    for part in tasks.split(","):
        if (read := re.fullmatch(r"([0-9]+)(?:\(x([0-9]+)\))?", part)) is None:
            return None
        counts += [int(read[1])] * int(read[2] or 1)
    return counts[min(node, len(counts) - 1)]
