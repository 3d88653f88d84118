"""Rules about torch and the GPUs. The first of them: a GPU that training would silently leave idle."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Literal

from steadytrain.doctor.facts import Facts, Gpu
from steadytrain.doctor.finding import Finding, percent, size, some
from steadytrain.doctor.torch_build import covers

# The oldest driver for each major version of CUDA, on Linux: NVIDIA's "CUDA Compatibility", minor version
# compatibility, and the release notes of the toolkits.
OLDEST_DRIVER = {11: "450.80.02", 12: "525.60.13", 13: "580"}
_SLOW = {"hardware slowdown", "heat", "heat (hardware)", "power brake"}
_ON_CPU = "Training runs on the CPU, without an error and many times slower."
_WHEELS = "see pytorch.org/get-started"


def torch_loads(facts: Facts) -> Iterator[Finding]:
    """torch is there and can be imported, and torchvision, without which timm cannot be."""
    torch = facts.torch
    nothing = "Nothing can be trained, evaluated or predicted."
    if torch.state == "missing":
        remedy = f"pip install torch torchvision in {facts.system.venv or 'this Python'} ({_WHEELS})"
        yield Finding("torch-missing", "bad", "torch is not installed", nothing, remedy)
    elif torch.state in ("broken", "crashed"):
        verb = "cannot be imported" if torch.state == "broken" else "crashes as it is loaded and tried"
        remedy = f"install torch and torchvision anew, from one source ({_WHEELS})"
        yield Finding("torch-broken", "bad", f"torch {verb}: {torch.error}", nothing, remedy)
    elif torch.state == "hangs":
        remedy = "try again; if it hangs once more, look at the GPUs (nvidia-smi) and at the disk that torch is on"
        yield Finding("torch-hangs", "bad", f"torch hangs as it is loaded and tried: {torch.error}", nothing, remedy)
    elif torch.torchvision_error:
        what = f"torchvision cannot be imported beside torch {torch.version}: {torch.torchvision_error}"
        remedy = f"install the torchvision that belongs to torch {torch.version}, from the same source ({_WHEELS})"
        yield Finding("torchvision-broken", "bad", what, "Models of timm cannot be built.", remedy)


def gpu_unused(facts: Facts) -> Iterator[Finding]:
    """There is an NVIDIA GPU, and torch does not see it: why, by the first cause that fits."""
    torch, machine = facts.torch, facts.accelerators
    if torch.state != "works" or torch.sees_gpu or not has_nvidia(facts):
        return
    gpus = _names(facts)
    hidden = facts.variables.get("CUDA_VISIBLE_DEVICES")
    if torch.cuda is None:
        kind = "for ROCm" if torch.rocm else "for the CPU only"
        what = f"{gpus} will not be used: torch {torch.version} is a build {kind}"
        remedy = f"install a build of torch for CUDA {_newest_cuda(machine.driver) or ''}".rstrip() + f" ({_WHEELS})"
        yield Finding("torch-without-cuda", _unless_kept_out(facts), what, _ON_CPU, remedy)
    elif hidden is not None and hidden.strip() in ("", "-1", "NoDevFiles"):
        what = f"{gpus} will not be used: CUDA_VISIBLE_DEVICES={hidden!r} hides every GPU"
        yield Finding("gpu-hidden", "warn", what, _ON_CPU, "unset CUDA_VISIBLE_DEVICES")
    elif "mismatch" in (machine.driver_error or "").lower():
        what = f"{gpus} will not be used: the driver's kernel module and its library are of two versions"
        yield Finding("driver-mismatch", "bad", what, _ON_CPU, "restart the machine: the driver was updated")
    else:
        yield from _driver(facts, gpus)


def _driver(facts: Facts, gpus: str) -> Iterator[Finding]:
    """A driver that is missing or too old, a container that was given no GPU, or what torch says."""
    torch, machine = facts.torch, facts.accelerators
    assert torch.cuda is not None
    oldest = OLDEST_DRIVER.get(int(torch.cuda.partition(".")[0]))
    if facts.system.container not in (None, "none", "wsl") and machine.device_files == 0:
        what = f"{gpus} of the host was not given to this {facts.system.container} container"
        remedy = "start it with its GPUs (docker run --gpus all, with NVIDIA's container toolkit), if it is to use them"
        yield Finding("gpu-not-in-container", "warn", what, _ON_CPU, remedy)
    elif machine.driver is None:
        said = f" ({machine.driver_error})" if machine.driver_error else ""
        what = f"{gpus} will not be used: no NVIDIA driver is loaded{said}"
        yield Finding("driver-missing", "bad", what, _ON_CPU, f"install NVIDIA's driver, {oldest or 'any'} or newer")
    elif oldest and _version(machine.driver) < _version(oldest):
        what = f"{gpus} will not be used: driver {machine.driver} is too old for torch's CUDA {torch.cuda}"
        fitting = _newest_cuda(machine.driver)
        other = f", or install a build of torch for CUDA {fitting} ({_WHEELS})" if fitting else ""
        remedy = f"update the driver to {oldest} or newer{other}"
        yield Finding("driver-too-old", "bad", what, _ON_CPU, remedy)
    else:
        what = f"{gpus} will not be used: torch {torch.version} says: {torch.gpu_error or 'no GPU'}"
        remedy = "run nvidia-smi: if it fails too, mend the driver, else restart the machine"
        yield Finding("gpu-not-seen", "bad", what, _ON_CPU, remedy)


def gpu_fails(facts: Facts) -> Iterator[Finding]:
    """torch sees a GPU but has no code for it, or cannot compute on it."""
    torch = facts.torch
    for index, gpu in enumerate(torch.devices):
        name = f"GPU {index} ({gpu.name})"
        if torch.cuda and torch.built_for and not covers(torch.built_for, gpu.capability):
            what = f"torch {torch.version} has no code for {name}, whose architecture is {_sm(gpu.capability)}"
            why = f"It is built for {', '.join(torch.built_for)}: the first operation on this GPU fails."
            remedy = f"install a build of torch that has {_sm(gpu.capability)} ({_WHEELS})"
            yield Finding(f"gpu-architecture.{index}", "bad", what, why, remedy)
        elif gpu.failure:
            what = f"{name} cannot add two numbers: {gpu.failure}"
            remedy = "look with nvidia-smi for another process that holds it, or for an error of the device"
            yield Finding(f"gpu-failing.{index}", "bad", what, "Training on it fails.", remedy)


def gpu_taken(facts: Facts) -> Iterator[Finding]:
    """Somebody else computes on a GPU, or holds its memory."""
    for index, gpu in _gpus(facts):
        share = gpu.memory_used_bytes / gpu.memory_bytes if gpu.memory_bytes and gpu.memory_used_bytes else 0.0
        busy = gpu.busy_share or 0.0
        if busy < 0.1 and share < 0.1 and not gpu.processes:
            continue
        told = [f"{percent(busy)} busy"] if busy >= 0.1 else []
        if gpu.memory_used_bytes is not None and gpu.memory_bytes is not None:
            told.append(f"{size(gpu.memory_used_bytes)} of {size(gpu.memory_bytes)} taken")
        whom = [f"{one.name or 'process'} ({one.pid})" for one in (gpu.processes or ())[:4]]
        what = f"GPU {index} ({gpu.name}) is in use: {', '.join([*told, *whom])}"
        why = "Training shares its time and has the rest of its memory."
        remedy = "wait for it, end it, or choose another GPU (--device cuda:N)"
        yield Finding(f"gpu-busy.{index}", "warn", what, why, remedy)


def gpu_slowed(facts: Facts) -> Iterator[Finding]:
    """A GPU's clock, power or link is held below what it is made for."""
    for index, gpu in _gpus(facts):
        name = f"GPU {index} ({gpu.name})"
        reasons = sorted(_SLOW & set(gpu.throttled_by or ()))
        if reasons:
            hot = f", at {gpu.temperature} degrees" if gpu.temperature else ""
            what = f"{name} is slowed down: {', '.join(reasons)}{hot}"
            remedy = "mend its cooling or its power supply"
            yield Finding(f"gpu-throttled.{index}", "warn", what, "Its clock is lowered, and all work with it.", remedy)
        if gpu.power_limit_watts and gpu.power_default_watts and gpu.power_limit_watts < 0.98 * gpu.power_default_watts:
            what = f"{name} may draw {gpu.power_limit_watts:.0f} of its {gpu.power_default_watts:.0f} W"
            remedy = f"nvidia-smi -i {index} -pl {gpu.power_default_watts:.0f}, where it was not meant so"
            yield Finding(f"gpu-power.{index}", "warn", what, "Under load its clock stays lower.", remedy)
        if "set clocks" in (gpu.throttled_by or ()) and gpu.mhz and gpu.mhz_max and gpu.mhz < 0.95 * gpu.mhz_max:
            what = f"{name} has its clock set to {gpu.mhz} of {gpu.mhz_max} MHz"
            remedy = f"nvidia-smi -i {index} -rgc and -rac, where it was not meant so"
            yield Finding(f"gpu-clock.{index}", "warn", what, "It computes so much slower.", remedy)
        if gpu.pcie_width and gpu.pcie_width_max and gpu.pcie_width < gpu.pcie_width_max:
            what = f"{name} is connected by {gpu.pcie_width} of {gpu.pcie_width_max} PCIe lanes"
            why = "Batches reach it slower; it matters where images are many and the model is small."
            yield Finding(f"gpu-link.{index}", "note", what, why, "put it into a slot with all lanes, if there is one")


def gpu_state(facts: Facts) -> Iterator[Finding]:
    """Memory errors, partitions, a driver that sleeps between processes."""
    for index, gpu in _gpus(facts):
        name = f"GPU {index} ({gpu.name})"
        if gpu.ecc_errors:
            what = f"{name} had {some(gpu.ecc_errors, 'memory error')} that could not be corrected"
            why = "Results may be wrong, and processes on it are ended."
            yield Finding(
                f"gpu-memory-errors.{index}", "bad", what, why, "restart the machine; if they return, replace it"
            )
        if gpu.mig:
            why = "A process gets one part: its share of the multiprocessors and of the memory."
            remedy = f"nvidia-smi -i {index} -mig 0, where the whole GPU is wanted"
            yield Finding(f"gpu-parts.{index}", "note", f"{name} is divided into parts (MIG)", why, remedy)
        if gpu.persistence is False and sys.platform == "linux":
            why = "The driver starts anew for each process: some seconds."
            yield Finding(f"gpu-persistence.{index}", "note", f"{name} is not kept awake", why, "nvidia-smi -pm 1")


def other_gpus(facts: Facts) -> Iterator[Finding]:
    """GPUs of others than NVIDIA."""
    torch, bus = facts.torch, facts.accelerators.on_bus or ()
    if torch.state != "works" or torch.sees_gpu:
        return
    if "AMD" in bus and not has_nvidia(facts) and torch.rocm is None:
        remedy = f"for a GPU that ROCm supports, install a build of torch for ROCm ({_WHEELS})"
        what = f"an AMD GPU will not be used: torch {torch.version} is not a build for ROCm"
        yield Finding("torch-without-rocm", "note", what, "Training runs on the CPU.", remedy)
    if torch.mps:
        why = "Training runs on the CPU: steadytrain trains on CPUs and CUDA devices."
        yield Finding(
            "mps-unused", "note", "this Mac's GPU will not be used", why, "train where there is an NVIDIA GPU"
        )


def has_nvidia(facts: Facts) -> bool:
    """Whether there is an NVIDIA GPU, by its driver or on the bus."""
    machine = facts.accelerators
    return bool(machine.gpus) or "NVIDIA" in (machine.on_bus or ()) or bool(machine.device_files)


def _unless_kept_out(facts: Facts) -> Literal["bad", "warn"]:
    """A container that was given no GPU may well be meant to have none."""
    kept_out = facts.system.container not in (None, "none", "wsl") and facts.accelerators.device_files == 0
    return "warn" if kept_out else "bad"


def _gpus(facts: Facts) -> Iterator[tuple[int, Gpu]]:
    yield from enumerate(facts.accelerators.gpus)


def _names(facts: Facts) -> str:
    machine = facts.accelerators
    names = [gpu.name for gpu in machine.gpus] or [f"{one} GPU" for one in machine.on_bus or () if one == "NVIDIA"]
    counted = {name: names.count(name) for name in names}
    return ", ".join(name if count == 1 else f"{count} x {name}" for name, count in counted.items()) or "the NVIDIA GPU"


def _newest_cuda(driver: str | None) -> int | None:
    """The newest major version of CUDA that a driver can do."""
    return max(
        (m for m, oldest in OLDEST_DRIVER.items() if driver and _version(driver) >= _version(oldest)), default=None
    )


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".") if part.isdigit())


def _sm(capability: str) -> str:
    return "sm_" + capability.replace(".", "")
