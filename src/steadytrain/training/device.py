"""The device of a run and its process: chosen, set up, and why a GPU cannot be used, for one who asked for it."""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from steadytrain import __version__
from steadytrain.config import Recipe
from steadytrain.config.parts import listed_gpus
from steadytrain.distributed.process_group import Group
from steadytrain.distributed.world import World
from steadytrain.errors import RecipeError
from steadytrain.format import count
from steadytrain.machine import cgroups, facts, process
from steadytrain.machine.gpus import WHEELS, Unusable, architecture, count_names, covers, why_unseen
from steadytrain.machine.nvml import Driver, read_driver
from steadytrain.machine.platform import IS_LINUX, keep_on
from steadytrain.training import precision

ALONE = World()


def choose_device(name: str, world: World = ALONE) -> torch.device:
    """Choose the device: ``auto`` is a GPU if torch sees one, of several ranks on a machine each its own; else the CPU.

    Of a list (``cuda:0,2``) each rank of a machine takes the one in its place.
    A rank that sees one GPU takes it: schedulers give each rank its own, or all the same, which
    :func:`gpus_of_ranks` tells apart.

    Raises:
        RecipeError: it is not there, or no device that torch can train on here.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if gpus := listed_gpus(name):
        if world.local_size > len(gpus):
            raise RecipeError(
                f"parallel.device is {name!r}: {len(gpus)} GPUs for {world.local_size} ranks of a machine; list as"
                f" many, or start {len(gpus)}"
            )
        name = f"cuda:{gpus[world.local_rank]}"
    if name == "cuda" and world.local_size > 1 and torch.cuda.device_count() > 1:
        name = f"cuda:{world.local_rank}"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "mps", "cuda"):
        raise RecipeError(f"parallel.device is {name!r}; it must be auto, cpu, mps, cuda or cuda:<number>")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise RecipeError(
            f"parallel.device is 'mps' but torch {torch.__version__} sees no GPU of a Mac: use --device auto or cpu"
        )
    if device.type != "cuda":
        return device if device.type == "cpu" else torch.device("mps", 0)  # as tensors there name theirs
    count = torch.cuda.device_count()
    if (device.index or 0) >= count:
        raise RecipeError(f"parallel.device is {name!r} but torch {torch.__version__} {what_there_is(count, world)}")
    return torch.device("cuda", device.index or 0)


def gpus_of_ranks(group: Group | None, device: torch.device) -> list[dict[str, Any]]:
    """Return the GPU on which each rank computes: its ``index`` in its process, and ``uuid``; nothing on CPUs.

    Raises:
        InputError: some ranks compute on GPUs and some do not, or several on the same GPU.
    """
    if group is not None:
        group.require_same("another kind of device (parallel.device)", device.type)
    if device.type != "cuda":
        return []
    gpu = {"index": device.index, "uuid": str(torch.cuda.get_device_properties(device).uuid)}
    if group is None:
        return [gpu]
    gpus: list[dict[str, Any]] = group.all_gather_json(gpu)
    uuids = [gpu["uuid"] for gpu in gpus]
    for rank, uuid in enumerate(uuids):
        if (other := uuids.index(uuid)) != rank:
            raise RecipeError(
                f"ranks {other} and {rank} on {group.hosts[rank]} have the same GPU ({uuid}): each needs one of its"
                " own; start as many ranks a machine as it has GPUs, and give --device cuda or auto"
            )
    return gpus


def sampled_gpus(group: Group | None, gpus: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the UUIDs of the GPUs that this process samples, of those that :func:`gpus_of_ranks` returned.

    One rank of each machine samples NVIDIA's for all: its first.
    """
    if torch.version.hip:
        return ()
    if group is None or not gpus:
        return tuple(gpu["uuid"] for gpu in gpus)
    host = group.hosts[group.world.rank]
    if group.hosts.index(host) != group.world.rank:
        return ()
    return tuple(gpu["uuid"] for gpu, place in zip(gpus, group.hosts, strict=True) if place == host)


def stay_near_gpu(group: Group, device: torch.device, stack: ExitStack, notice: Callable[[str], None]) -> int:
    """Keep this thread, and those it starts, near its GPU until the stack closes; return how many ranks are there."""
    if device.type != "cuda":
        return group.sharing
    gpu: Any = torch.cuda.get_device_properties(device)
    place = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
    allowed, rank = cgroups.allowed(), group.world.rank
    ranks = group.all_gather_json([group.hosts[rank], sorted(allowed), place])
    local = [other for other, about in enumerate(ranks) if about[:2] == ranks[rank][:2]]  # others have other processors
    near = cgroups.near_processors([ranks[other][2] for other in local], allowed)
    mine = near[local.index(rank)]
    if mine != allowed:
        if not keep_on(0, mine):
            return group.sharing
        notice(f"rank {rank} stays on the {len(mine)} of {len(allowed)} processors that are near its GPU")
        stack.callback(keep_on, 0, allowed)
    # A quota is of all ranks, wherever they are.
    return group.sharing if (cgroups.quota() or math.inf) <= len(mine) else near.count(mine)


def prepare_device(recipe: Recipe, world: World = ALONE) -> torch.device:
    """Choose the recipe's device, and set the variables that CUDA's libraries read once, before it computes anything.

    Raises:
        RecipeError: as :func:`choose_device` and :func:`require_usable`; or the recipe asks for a graph of the GPU's
            kernels, and it is no GPU.
    """
    device = choose_device(recipe.parallel.device, world)
    if device.type == "mps":
        _refuse_on_mac(recipe, world)
    if recipe.parallel.graph and device.type != "cuda":
        raise RecipeError(
            f"parallel.graph=True wants a GPU, and this trains on the {device.type.upper()}: leave --graph out"
            " (--compile may help small networks here)"
        )
    if recipe.parallel.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if device.type == "cuda":
        process.grow_segments(recorded=recipe.records_graphs)
        torch.cuda.set_device(device)  # what names no device, an event say, means this one
    usable = require_usable(device)
    if usable.type == "cuda":
        torch.empty(1, device=usable)  # starts CUDA in this process: seconds that are no other stage's
    return usable


def _refuse_on_mac(recipe: Recipe, world: World) -> None:
    """Raise RecipeError where a recipe asks a Mac's GPU for what it does not do here."""
    asked = {
        f"precision.name={recipe.precision.name} (use fp32)": recipe.precision.name != "fp32",
        "precision.compile": recipe.precision.compile != "none",
        "parallel.graph": recipe.parallel.graph,
        "parallel.deterministic": recipe.parallel.deterministic,
        "several ranks": world.size > 1 or recipe.parallel.engine == "async",
    }
    if refused := " and ".join(name for name, is_asked in asked.items() if is_asked):
        raise RecipeError(f"--device mps does not do {refused}: drop that, or use --device cpu")


def set_up_machine(
    recipe: Recipe,
    device: torch.device,
    before: dict[str, Any] | None,
    notice: Callable[[str], None],
    *,
    ranks: int = 1,
    sharing: int = 1,
) -> dict[str, Any]:
    """Set up threads and allocator of this process; return the facts that bits and speed depend on.

    A resumed run with as many ranks gets the number of compute threads that it had, unless the recipe names one.

    Args:
        before: the facts of the attempt that is resumed; None: there is none.
        notice: is called with a line where the bits may differ from those of an uninterrupted run.
        ranks: that train together; ``sharing`` of them, this one included, on the same cores.
    """
    segments = None
    if device.type == "cpu":
        process.keep_memory(facts.memory_bytes() // sharing)
        driver = read_driver() if recipe.parallel.device == "auto" else None
        if driver is not None and driver.gpus and (why := why_hidden(driver)).kind != "gpu-hidden":
            notice(f"trains on the CPU, as torch sees no GPU: {why.what}: {why.remedy}")
    elif device.type == "cuda":
        segments = process.grow_segments(recorded=recipe.records_graphs)
        # Shapes never change in a run: what cuDNN finds fastest for them is found once.
        torch.backends.cudnn.benchmark = not recipe.parallel.deterministic
    if recipe.parallel.deterministic:
        torch.use_deterministic_algorithms(True)
    precision.set_products(recipe.precision, device)
    had = before.get("compute_threads") if before and before.get("ranks", 1) == ranks else None
    threads = recipe.parallel.compute_threads or had or default_compute_threads(sharing)
    torch.set_num_threads(threads)
    machine = {
        "device": precision.name_of(device),
        "compute_threads": threads,
        "spins": os.environ.get("GOMP_SPINCOUNT"),
        "segments": segments,
        "isa": torch.backends.cpu.get_cpu_capability(),
        "steadytrain": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "host": platform.node(),
        "cpu": facts.cpu_model(),
        "cores": facts.cores(),
        "memory_bytes": facts.memory_bytes(),
        "out_of_memory_kills": cgroups.out_of_memory_kills(),
        "precision": recipe.precision.name,
    }
    for name in ("device", "compute_threads", "isa", "torch"):
        notice_change(before, machine, name, notice)
    if before and (had := before.get("steadytrain", __version__)) != __version__:
        notice(f"steadytrain was {had} and is now {__version__}")
    return machine


def notice_change(
    before: dict[str, Any] | None, machine: dict[str, Any], name: str, notice: Callable[[str], None]
) -> None:
    """Tell the user where a fact of the machine is not that of the attempt that is resumed."""
    if before is not None and before.get(name) != machine.get(name):
        notice(f"{name} was {before.get(name)} and is now {machine.get(name)}: the last bits of results may differ")


def default_compute_threads(sharing: int = 1) -> int:
    """Return the threads that OMP_NUM_THREADS asks for, else one for each core; never more than cores."""
    requested, most = os.environ.get("OMP_NUM_THREADS", ""), max(1, facts.cores() // sharing)
    return min(int(requested), most) if requested.isdigit() and int(requested) else most


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
    return not IS_LINUX or any(Path("/dev").glob("nvidia[0-9]*"))


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
