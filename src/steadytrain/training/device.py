"""The device of a run: why a GPU cannot be used, for one who asked for it, and moments of a device's own clock."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from steadytrain.distributed.world import World
from steadytrain.errors import RecipeError
from steadytrain.format import count
from steadytrain.machine.gpus import WHEELS, Unusable, architecture, count_names, covers, why_unseen
from steadytrain.machine.nvml import Driver, read_driver


def what_there_is(num_gpus: int, world: World) -> str:
    """Word which GPUs torch sees, for one who asked for another, and what to do."""
    sees = f"sees {count(num_gpus, 'GPU')}"
    if not num_gpus:
        why = why_hidden(read_driver())
        return f"{sees}: {why.what}: {why.remedy}; or use --device cpu"
    gpus, asked = read_driver().gpus, os.environ.get("CUDA_VISIBLE_DEVICES")
    hidden = sum(not gpu.visible for gpu in gpus)
    if gpus:
        sees = f"{sees} ({count_names([gpu.name for gpu in gpus if gpu.visible])})"
    if any(gpu.visible and gpu.mig for gpu in gpus):
        sees = f"{sees}: of a partitioned GPU (MIG), CUDA shows a process one slice"
    elif hidden and asked is not None:
        sees = f"{sees}: CUDA_VISIBLE_DEVICES={asked} hides {hidden} of this machine"
    if num_gpus < world.local_size:
        return f"{sees}: start {count(num_gpus, 'rank')} a machine, or use --device cpu"
    return f"{sees}: use cuda:0{f' to cuda:{num_gpus - 1}' if num_gpus > 1 else ''}, or --device cpu"


def has_device_files() -> bool:
    """Return whether this system, or this container, has a GPU's device files; True where GPUs are no files."""
    return sys.platform != "linux" or any(Path("/dev").glob("nvidia[0-9]*"))


def why_hidden(driver: Driver) -> Unusable:
    """Return why torch sees none of the driver's GPUs."""
    error = None
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as refusal:
        error = str(refusal).splitlines()[0]
    return why_unseen(
        count_names([gpu.name for gpu in driver.gpus]),
        torch=torch.__version__,
        cuda=torch.version.cuda,
        rocm=torch.version.hip,
        driver=driver.version,
        driver_error=driver.error,
        torch_error=error,
        container="" if driver.gpus and not has_device_files() else None,
        asked=os.environ.get("CUDA_VISIBLE_DEVICES") if driver.gpus else None,
        num_visible=sum(gpu.visible for gpu in driver.gpus) if driver.gpus else None,
    )


def require_usable(device: torch.device) -> torch.device:
    """Return the device, on which a first tensor was made.

    Raises:
        RecipeError: torch has no code for the GPU, or it takes no further process.
    """
    if device.type != "cuda":
        return device
    about = torch.cuda.get_device_properties(device)
    name, capability, built_for = f"{device} ({about.name})", f"{about.major}.{about.minor}", torch.cuda.get_arch_list()
    if torch.version.cuda and built_for and not covers(built_for, capability):
        raise RecipeError(
            f"{name} has compute capability {capability}, and torch {torch.__version__} is built for"
            f" {', '.join(built_for)}: install a build of torch that has {architecture(capability)} ({WHEELS}), or use"
            " --device cpu"
        )
    try:
        torch.zeros(1, device=device)
    except RuntimeError as error:
        raise RecipeError(f"{name} {_refusal(str(about.uuid), str(error).splitlines()[0])}") from error
    return device


def _refusal(uuid: str, error: str) -> str:
    """Word why a GPU takes no tensor, and what to do."""
    gpu = next((gpu for gpu in read_driver().gpus if (gpu.uuid or "").removeprefix("GPU-") == uuid), None)
    users = [f"{Path(user.name or 'a process').name} (pid {user.pid})" for user in (gpu and gpu.processes) or ()]
    used = f", in use by {', '.join(users[:3])}" if users else ""
    if gpu is not None and gpu.exclusive and "busy or unavailable" in error:
        shared = f"nvidia-smi -i {gpu.index} -c DEFAULT (as root) lets several use it"
        return f"is in exclusive-process mode{used}: use another (--device cuda:N), or {shared}"
    return f"cannot be used{used}: {error}: use another (--device cuda:N), or --device cpu; nvidia-smi shows its state"


def tick(device: torch.device) -> Any:
    """Mark a moment of the device: a time, or of a GPU an event in its current stream, which nothing waits for."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def seconds_between(began: Any, ended: Any) -> float:
    """Return the seconds between two ticks, once the device has reached the second."""
    return float(ended - began) if isinstance(began, float) else float(began.elapsed_time(ended)) / 1000
