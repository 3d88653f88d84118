"""The GPUs that this process may use, the owners of the processes on them, and why torch cannot use one.

Functions of what NVML, ``/proc`` and the environment tell; none of them asks a GPU.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self, TypeVar

from steadytrain.machine.procfs import ROOT

WHEELS = "see pytorch.org/get-started"
# The oldest driver for each major version of CUDA, on Linux: NVIDIA's "CUDA Compatibility", minor version
# compatibility, and the release notes of the toolkits.
OLDEST_DRIVER = {11: "450.80.02", 12: "525.60.13", 13: "580"}
_FIRST_NAMESPACE = "pid:[4026531836]"  # the kernel's first namespace has a fixed number (linux/proc_ns.h)


class CudaDevice(Protocol):
    """A GPU or a part of one (MIG). ``slices``: its parts; None where it has none. ``names``: it is chosen by them."""

    @property
    def names(self) -> Sequence[str]:
        """Its UUID as NVML tells it, and what else CUDA_VISIBLE_DEVICES may call it."""

    @property
    def slices(self) -> Sequence[Self] | None:
        """Its parts; None where it is not partitioned."""


AnyDevice = TypeVar("AnyDevice", bound=CudaDevice)


def visible_gpus(gpus: Sequence[AnyDevice], variables: Mapping[str, str] = os.environ) -> list[AnyDevice]:
    """Return the GPUs that CUDA shows to a process, in the order of CUDA_VISIBLE_DEVICES; all of them without it.

    CUDA reads numbers as C does (``1a`` is 1), ids by their beginning, and stops at the first that it does not know;
    one that is there twice hides all. Of a partitioned GPU it shows one slice, and then nothing else (NVIDIA's "MIG
    User Guide"). Numbers count as nvidia-smi does. CUDA itself counts the fastest GPU first, unless CUDA_DEVICE_ORDER
    is PCI_BUS_ID: that differs only where unlike GPUs are in one machine.

    ``gpus``: of this machine, in the order of nvidia-smi.
    """
    asked = variables.get("CUDA_VISIBLE_DEVICES")
    devices = list(gpus) if asked is None else _chosen(asked, gpus)
    usable = [device for gpu in devices for device in ([gpu] if gpu.slices is None else gpu.slices)]
    slices = {id(part) for gpu in gpus for part in gpu.slices or ()}
    return next(([device] for device in usable if id(device) in slices), usable)


def _chosen(asked: str, gpus: Sequence[AnyDevice]) -> list[AnyDevice]:
    kind = next((kind for kind in ("GPU-", "MIG-") if asked.startswith(kind)), None)
    chosen: list[AnyDevice] = []
    for word in asked.split(",") if kind else map(str.strip, asked.split(",")):
        if kind is None:
            number = re.match(r"\+?(\d+)", word)
            matches = [] if number is None else list(gpus[int(number[1]) :][:1])
        else:
            among = gpus if kind == "GPU-" else [part for gpu in gpus for part in gpu.slices or ()]
            is_asked = word.startswith(kind)
            matches = [gpu for gpu in among if is_asked and any(name.startswith(word) for name in gpu.names)]
        if len(matches) != 1:
            break
        if any(matches[0] is device for device in chosen):
            return []
        chosen += matches
    return chosen


def other_processes(users: Set[int], ours: Set[int], *, root: Path = ROOT) -> set[int] | None:
    """Return the processes on a GPU that are not ours; None where a stranger cannot be told from one of ours.

    The driver counts processes as the machine does. In a container with numbers of its own, ours are on the list under
    others. So it is trusted only where one of ours is on it, and in a container only where all on it run there.

    Args:
        users: processes that compute on a GPU on which we compute, as the driver tells them.
        ours: all processes of the run on this machine.
    """
    if not users & ours:
        return None
    namespace = root / "proc/self/ns/pid"
    try:
        is_first = namespace.readlink().name == _FIRST_NAMESPACE
    except OSError:
        is_first = not (root / "proc").is_dir()  # a system without them, such as Windows
    if not is_first and not all((root / "proc" / str(pid)).exists() for pid in users):
        return None
    return set(users - ours)


@dataclass(frozen=True)
class Unusable:
    """Reason why torch sees no GPU on a machine that has one. ``kind``: a stable word, such as ``driver-too-old``."""

    kind: str
    what: str
    remedy: str


def why_unseen(
    gpus: str,
    *,
    torch: str | None,
    cuda: str | None,
    rocm: str | None = None,
    driver: str | None = None,
    driver_error: str | None = None,
    torch_error: str | None = None,
    container: str | None = None,
    asked: str | None = None,
    num_visible: int | None = None,
) -> Unusable:
    """Return the first cause that fits why torch sees none of the machine's GPUs.

    Args:
        gpus: such as ``2 x NVIDIA A100``.
        torch: its version, the ``cuda`` or ``rocm`` that it is built for, and ``torch_error``: what it says itself.
        driver: the version of NVIDIA's driver; ``driver_error``: why NVML did not answer.
        container: its kind, where no device file of a GPU is in it; it may be empty.
        asked: CUDA_VISIBLE_DEVICES; ``num_visible``: how many GPUs it shows, where that is known.
    """
    oldest = OLDEST_DRIVER.get(int(cuda.partition(".")[0])) if cuda else None
    # The newest major version of CUDA that the driver can do.
    supported = [major for major, least in OLDEST_DRIVER.items() if driver and _version(driver) >= _version(least)]
    fitting = f"install a build of torch for CUDA {max(supported)} ({WHEELS})" if supported else ""
    if cuda is None:
        what = f"torch {torch} is built {'for ROCm' if rocm else 'for the CPU only'}"
        return Unusable("torch-without-cuda", what, fitting or f"install a build of torch for CUDA ({WHEELS})")
    if asked is not None and (num_visible == 0 or asked.strip() in ("", "-1", "NoDevFiles")):
        return Unusable("gpu-hidden", f"CUDA_VISIBLE_DEVICES={asked!r} hides every GPU", "unset CUDA_VISIBLE_DEVICES")
    if "mismatch" in (driver_error or "").lower():
        what = "the driver's kernel module and its library have different versions"
        return Unusable("driver-mismatch", what, "restart the machine: the driver was updated")
    if container is not None:
        what = f"{gpus} of the host is not available in this {f'{container} container'.strip()}"
        remedy = (
            "start it with its GPUs (docker run --gpus all, with NVIDIA's container toolkit), if it should use them"
        )
        return Unusable("gpu-not-in-container", what, remedy)
    if driver is None:
        what = f"no NVIDIA driver is loaded{f' ({driver_error})' if driver_error else ''}"
        return Unusable("driver-missing", what, f"install NVIDIA's driver, {oldest or 'any'} or newer")
    if oldest and _version(driver) < _version(oldest):
        what = f"driver {driver} is too old for torch's CUDA {cuda}"
        remedy = f"update the driver to {oldest} or newer{fitting and f', or {fitting}'}"
        return Unusable("driver-too-old", what, remedy)
    remedy = "run nvidia-smi: if it also fails, repair the driver; otherwise restart the machine"
    return Unusable("gpu-not-seen", f"torch {torch} says: {torch_error or 'no GPU'}", remedy)


def count_names(names: Sequence[str]) -> str:
    """Word GPUs by name and number.

    >>> count_names(["NVIDIA A100", "NVIDIA A100", "Quadro K620"])
    '2 x NVIDIA A100, Quadro K620'
    """
    return ", ".join(name if number == 1 else f"{number} x {name}" for name, number in Counter(names).items())


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text))


def architecture(capability: str) -> str:
    """Return the compiler's name for a compute capability.

    >>> architecture("8.6")
    'sm_86'
    """
    return "sm_" + capability.replace(".", "")


def covers(built_for: Sequence[str], capability: str) -> bool:
    """Return whether a build has code for a GPU: of its generation up to its step, or portable code to translate.

    By NVIDIA's rules of binary and PTX compatibility; code for ``sm_90a`` and its like runs on that one only.

    Args:
        built_for: such as ``sm_75`` and ``compute_90``.
        capability: the GPU's, such as ``8.6``.

    >>> covers(("sm_75", "sm_80"), "8.6"), covers(("sm_75", "sm_80"), "9.0"), covers(("compute_80",), "9.0")
    (True, False, True)
    """
    major, _, minor = capability.partition(".")
    device = (int(major), int(minor or 0))
    for kind, generation, step, only in re.findall(r"(sm|compute)_(\d+)(\d)([af]?)", " ".join(built_for)):
        code = (int(generation), int(step))
        if device == code or (not only and code <= device and (kind == "compute" or code[0] == device[0])):
            return True
    return False
