"""GPUs: as NVIDIA's library tells of them, else its tool, else the kernel."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from steadytrain.doctor.facts import Accelerators, Gpu
from steadytrain.doctor.nvml import Unusable, gpus
from steadytrain.machine.procfs import beside, decimal, read, table, whole

_QUERY = "name,driver_version,compute_cap,memory.total,memory.used"
_VENDORS = {"0x10de": "NVIDIA", "0x1002": "AMD", "0x8086": "Intel"}
# PCI classes: a display controller (VGA, 3D, other), a processing accelerator.
_CLASSES = ("0x0300", "0x0302", "0x0380", "0x1200")


def accelerators(root: Path, nvml: Any = None) -> Accelerators:
    """The facts about GPUs.

    Args:
        root: where ``proc``, ``sys`` and ``dev`` lie.
        nvml: the module ``pynvml``; None: the installed one, if there is one.
    """
    found = _by_nvml(nvml or _installed())
    if found.driver is None:
        found = replace(_by_kernel(root) or _by_tool() or found, driver_error=found.driver_error)
    bus = beside(root / "sys/bus/pci", "devices/*") if (root / "sys/bus/pci").is_dir() else None
    files = len(beside(root / "dev", "nvidia[0-9]*")) if (root / "dev").is_dir() else None
    on_bus = None if bus is None else tuple(name for folder in bus if (name := _on_bus(folder)))
    return replace(found, on_bus=on_bus, device_files=files)


def _installed() -> Any:
    try:
        return import_module("pynvml")
    except ImportError:
        return None


def _by_nvml(nvml: Any) -> Accelerators:
    if nvml is None:
        return Accelerators()
    try:
        driver, found = gpus(nvml)
    except Unusable as error:
        return Accelerators(driver_error=str(error))
    return Accelerators(driver=driver, driver_by="nvml", gpus=found)


def _by_tool() -> Accelerators | None:
    """By ``nvidia-smi``, if it is there and answers in time."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    command = [tool, f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError):
        return None
    rows = [[cell.strip() for cell in line.split(",")] for line in told.stdout.splitlines()]
    rows = [row for row in rows if len(row) == len(_QUERY.split(","))]
    if not rows:
        return None
    found = tuple(
        Gpu(
            name=name,
            capability=capability if decimal(capability) is not None else None,
            memory_bytes=_mebibytes(total),
            memory_used_bytes=_mebibytes(used),
        )
        for name, _, capability, total, used in rows
    )
    return Accelerators(driver=rows[0][1], driver_by="nvidia-smi", gpus=found)


def _mebibytes(text: str) -> int | None:
    amount = whole(text)
    return None if amount is None else amount << 20


def _by_kernel(root: Path) -> Accelerators | None:
    """By what the driver's module writes: its version, and the names of the GPUs."""
    told = re.search(r"Kernel Module\s+(?:for \S+\s+)?([\d.]+)", read(root / "proc/driver/nvidia/version") or "")
    if told is None:
        return None
    files = beside(root / "proc/driver/nvidia/gpus", "*/information")
    names = [table(read(file)).get("Model") for file in files]
    found = tuple(Gpu(name=name) for name in names if name)
    return Accelerators(driver=told[1], driver_by="proc", gpus=found)


def _on_bus(folder: Path) -> str | None:
    """The vendor of a PCI device if it is a GPU of one who makes them for training."""
    vendor, kind = read(folder / "vendor"), read(folder / "class") or ""
    return _VENDORS.get(vendor or "") if kind.startswith(_CLASSES) else None
