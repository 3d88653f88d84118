"""Rules that find what is wrong with a machine for training, or worth knowing: pure functions of the facts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from steadytrain.doctor.facts import MachineFacts
from steadytrain.format import count, percent, size
from steadytrain.machine.gpus import WHEELS, architecture, covers, why_unseen

Grade = Literal["bad", "warn", "note"]
SEVERITIES: tuple[Grade, ...] = ("bad", "warn", "note")


@dataclass(frozen=True)
class MachineFinding:
    """Something that is wrong or worth knowing.

    Args:
        rule: its name, the same on every machine; of several alike the last part says which: ``gpu-busy.1``.
        severity: ``bad`` (it does not work, or at a fraction of the speed), ``warn`` (it costs), ``note``.
        why: what it costs.
    """

    rule: str
    severity: Grade
    what: str
    why: str
    remedy: str


def _graded(severity: Grade) -> Callable[[str, str, str, str], MachineFinding]:
    return lambda rule, what, why, remedy: MachineFinding(rule, severity, what, why, remedy)


bad, warn, note = map(_graded, SEVERITIES)


_SLOW = {"hardware slowdown", "heat", "heat (hardware)", "power brake"}
_ON_CPU = "Training runs on the CPU, many times slower and without an error message."


def torch_loads(facts: MachineFacts) -> Iterator[MachineFinding]:
    """torch is there and can be imported, and torchvision, without which timm cannot be."""
    torch = facts.torch
    nothing = "Training, evaluation and prediction do not work."
    if torch.state == "missing":
        remedy = f"pip install torch torchvision in {facts.system.venv or 'this Python'} ({WHEELS})"
        yield bad("torch-missing", "torch is not installed", nothing, remedy)
    elif torch.state in ("broken", "crashed"):
        verb = "cannot be imported" if torch.state == "broken" else "crashes when it is loaded and tested"
        remedy = f"reinstall torch and torchvision, both from the same source ({WHEELS})"
        yield bad("torch-broken", f"torch {verb}: {torch.error}", nothing, remedy)
    elif torch.state == "hangs":
        remedy = "try again; if it hangs again, check the GPUs (nvidia-smi) and the disk that torch is installed on"
        yield bad("torch-hangs", f"torch hangs when it is loaded and tested: {torch.error}", nothing, remedy)
    elif torch.torchvision_error:
        what = f"torchvision cannot be imported with torch {torch.version}: {torch.torchvision_error}"
        remedy = f"install the torchvision release for torch {torch.version}, from the same source ({WHEELS})"
        yield bad("torchvision-broken", what, "timm models cannot be built.", remedy)


def gpu_unused(facts: MachineFacts) -> Iterator[MachineFinding]:
    """Find why torch does not see an NVIDIA GPU that is there, by the first cause that fits."""
    torch, machine = facts.torch, facts.accelerators
    if torch.state != "works" or torch.sees_gpu or not has_nvidia(facts):
        return
    # A container that was given no GPU may well be meant to have none.
    container = facts.system.container
    is_kept_out = container not in (None, "none") and machine.device_files == 0
    gpus = machine.names or "the NVIDIA GPU"
    why = why_unseen(
        gpus,
        torch=torch.version,
        cuda=torch.cuda,
        rocm=torch.rocm,
        driver=machine.driver,
        driver_error=machine.driver_error,
        torch_error=torch.gpu_error,
        container=container if is_kept_out else None,
        asked=facts.variables.get("CUDA_VISIBLE_DEVICES"),
        num_visible=len(machine.visible) if machine.gpus else None,
    )
    is_meant = why.kind in ("gpu-hidden", "gpu-not-in-container") or (why.kind == "torch-without-cuda" and is_kept_out)
    what = why.what if why.kind == "gpu-not-in-container" else f"{gpus} will not be used: {why.what}"
    yield MachineFinding(why.kind, "warn" if is_meant else "bad", what, _ON_CPU, why.remedy)


def gpu_fails(facts: MachineFacts) -> Iterator[MachineFinding]:
    """torch sees a GPU but has no code for it, or cannot compute on it."""
    torch = facts.torch
    for index, gpu in enumerate(torch.devices):
        name = f"cuda:{index} ({gpu.name})"
        if torch.cuda and torch.built_for and not covers(torch.built_for, gpu.capability):
            what = f"torch {torch.version} has no code for {name}, whose architecture is {architecture(gpu.capability)}"
            why = f"It is built for {', '.join(torch.built_for)}: the first operation on this GPU fails."
            remedy = f"install a build of torch that has {architecture(gpu.capability)} ({WHEELS})"
            yield bad(f"gpu-architecture.{index}", what, why, remedy)
        elif gpu.failure:
            what = f"{name} cannot add two numbers: {gpu.failure}"
            remedy = "run nvidia-smi and look for another process that uses it, or for a device error"
            yield bad(f"gpu-failing.{index}", what, "Training on it fails.", remedy)


def gpu_taken(facts: MachineFacts) -> Iterator[MachineFinding]:
    """Somebody else computes on a GPU, or holds its memory."""
    for index, gpu in facts.accelerators.visible:
        share = gpu.memory_used_bytes / gpu.memory_bytes if gpu.memory_bytes and gpu.memory_used_bytes else 0.0
        busy = gpu.busy_share or 0.0
        if busy < 0.1 and share < 0.1 and not gpu.processes:
            continue
        usage = [f"{percent(busy)} busy"] if busy >= 0.1 else []
        if gpu.memory_used_bytes is not None and gpu.memory_bytes is not None:
            usage.append(f"{size(gpu.memory_used_bytes)} of {size(gpu.memory_bytes)} in use")
        users = [f"{process.name or 'process'} ({process.pid})" for process in (gpu.processes or ())[:4]]
        what = f"GPU {index} ({gpu.name}) is in use: {', '.join([*usage, *users])}"
        why = "Training shares its time with them and gets the rest of its memory."
        remedy = "wait until they end, stop them, or choose another GPU (--device cuda:N)"
        yield warn(f"gpu-busy.{index}", what, why, remedy)


def gpu_slowed(facts: MachineFacts) -> Iterator[MachineFinding]:
    """A GPU's clock or power is held below what it is made for, or its memory has failed."""
    for index, gpu in facts.accelerators.visible:
        name = f"GPU {index} ({gpu.name})"
        reasons = sorted(_SLOW & set(gpu.throttled_by or ()))
        if reasons:
            hot = f", at {gpu.temperature} degrees" if gpu.temperature else ""
            what = f"{name} is throttled: {', '.join(reasons)}{hot}"
            remedy = "fix its cooling or its power supply"
            why = "It runs at a lower clock, so everything on it is slower."
            yield warn(f"gpu-throttled.{index}", what, why, remedy)
        usual, limit = gpu.power_default_watts, gpu.power_limit_watts
        if limit and usual and limit < 0.98 * usual:
            what = f"{name} is limited to {limit:.0f} of its default {usual:.0f} W"
            most = min(usual, gpu.power_most_watts or usual)
            remedy = f"nvidia-smi -i {index} -pl {most:.0f}, unless it was set on purpose"
            remedy = remedy if most > limit else "ask who runs this machine: no higher limit may be set on it"
            yield warn(f"gpu-power.{index}", what, "Its clock is lower under load.", remedy)
        if "set clocks" in (gpu.throttled_by or ()) and gpu.mhz and gpu.mhz_max and gpu.mhz < 0.95 * gpu.mhz_max:
            what = f"{name} has its clock set to {gpu.mhz} of {gpu.mhz_max} MHz"
            remedy = f"nvidia-smi -i {index} -rgc and -rac, unless it was set on purpose"
            yield warn(f"gpu-clock.{index}", what, "It computes slower in proportion.", remedy)
        if gpu.pcie_width and gpu.pcie_width_max and gpu.pcie_width < gpu.pcie_width_max:
            what = f"{name} is connected by {gpu.pcie_width} of {gpu.pcie_width_max} PCIe lanes"
            why = "Batches take longer to reach it; that matters for small models with many images per second."
            yield note(f"gpu-link.{index}", what, why, "move it to a slot with all lanes, if there is one")
        if gpu.ecc_errors:
            what = f"{name} had {count(gpu.ecc_errors, 'memory error')} that could not be corrected"
            why = "Results may be wrong, and processes on it are killed."
            remedy = "restart the machine; if the errors return, replace the GPU"
            yield bad(f"gpu-memory-errors.{index}", what, why, remedy)


def other_gpus(facts: MachineFacts) -> Iterator[MachineFinding]:
    """GPUs of others than NVIDIA."""
    torch, bus = facts.torch, facts.accelerators.on_bus or ()
    if torch.state != "works" or torch.sees_gpu:
        return
    if "AMD" in bus and not has_nvidia(facts) and torch.rocm is None:
        remedy = f"if ROCm supports the GPU, install a build of torch for ROCm ({WHEELS})"
        what = f"an AMD GPU will not be used: torch {torch.version} is not a build for ROCm"
        yield note("torch-without-rocm", what, "Training runs on the CPU.", remedy)
    if torch.mps:
        why = "Training runs on the CPU: the path to a Mac's GPU is written, and has not run on a Mac yet."
        yield note("mps-unused", "this Mac's GPU will not be used", why, "try --device mps (in fp32)")


def missing_libraries(facts: MachineFacts) -> Iterator[MachineFinding]:
    """Find what slim images lack: a compiler for ``torch.compile``, and the library by which NCCL uses InfiniBand."""
    is_gpu, adapters = facts.torch.sees_gpu, ", ".join(facts.accelerators.infiniband)
    language, packages = ("C", "gcc libc6-dev") if is_gpu else ("C++", "g++")
    if facts.system.compilers is not None and language not in facts.system.compilers:
        what, why = f"no {language} compiler: --compile will not work here", "Training goes on without compiled code."
        yield MachineFinding("no-compiler", "warn" if is_gpu else "note", what, why, f"apt-get install {packages}")
    if adapters and has_nvidia(facts) and facts.accelerators.ibverbs is False:
        why = "NCCL exchanges gradients of several machines by TCP, many times slower, without a word."
        remedy = "apt-get install libibverbs1 librdmacm1 ibverbs-providers"
        yield warn("no-ibverbs", f"no libibverbs beside {adapters} (InfiniBand, RoCE or EFA)", why, remedy)


def has_nvidia(facts: MachineFacts) -> bool:
    """Return whether there is an NVIDIA GPU, by its driver or on the bus."""
    machine = facts.accelerators
    return bool(machine.gpus) or "NVIDIA" in (machine.on_bus or ()) or bool(machine.device_files)


GB = 1e9


# These drivers call their ordinary, changing clock "powersave"; what they save is in another file.
_PREFERENCE_DRIVERS = {"intel_pstate", "amd-pstate-epp", "amd_pstate_epp"}


def fewer_cores(facts: MachineFacts) -> Iterator[MachineFinding]:
    """Affinity or a quota leaves fewer processors than the machine has."""
    cpu, load = facts.processor, facts.load
    if cpu.usable is None or cpu.logical is None:
        return
    why = "Decoding and training on the CPU can use only these."
    if cpu.quota is not None and cpu.quota < min(cpu.logical, cpu.allowed or cpu.logical):
        late = load.throttled_share or 0.0
        throttling = f", and the process was throttled in {percent(late)} of its periods" if late >= 0.01 else ""
        what = f"the CPU quota (cgroup) is {count(cpu.quota, 'core')} of the machine's {cpu.logical}{throttling}"
        remedy = "raise it (docker run --cpus, Kubernetes' limits.cpu, systemd's CPUQuota)"
        yield MachineFinding("quota", "warn" if late >= 0.05 or cpu.quota < 2 else "note", what, why, remedy)
    if cpu.allowed is not None and cpu.allowed < cpu.logical:
        what = f"CPU affinity allows {count(cpu.allowed, 'core')} of the machine's {cpu.logical}"
        remedy = "ask for more (taskset, numactl, docker run --cpuset-cpus, Slurm's --cpus-per-task)"
        yield note("affinity", what, why, remedy)


def busy(facts: MachineFacts) -> Iterator[MachineFinding]:
    """Other work wants the processors, or the hypervisor withholds them."""
    load, cpu = facts.load, facts.processor
    if load.load_1 is not None and cpu.logical and load.load_1 >= 0.5 * cpu.logical:
        waiting = load.pressure_cpu_share
        more = f"; processes waited for a core {percent(waiting)} of the last 10 s" if waiting else ""
        what = f"the load is {load.load_1:.1f} on {count(cpu.logical, 'core')}{more}"
        remedy = "run top to see what runs; stop it, or wait before you measure anything"
        why = "Other processes use part of the cores: everything here is slower."
        yield MachineFinding("load", "warn" if load.load_1 >= cpu.logical else "note", what, why, remedy)
    if load.steal_share is not None and load.steal_share >= 0.05:
        what = f"the hypervisor withheld {percent(load.steal_share)} of the CPU time just now"
        remedy = "choose a machine type with dedicated cores, or another host"
        yield warn("steal", what, "Other virtual machines on the host use it.", remedy)
    waits = (("memory", "memory", load.pressure_memory_share, 0.05), ("disk", "io", load.pressure_io_share, 0.3))
    for kind, name, share, least in waits:
        if share is not None and share >= least:
            what = f"processes waited for {kind} {percent(share)} of the last 10 s"
            remedy = f"find what uses it (/proc/pressure/{name}, top, iotop)"
            yield warn(f"pressure-{kind}", what, "Training also waits at times.", remedy)


def clocks(facts: MachineFacts) -> Iterator[MachineFinding]:
    """The processor's clock is held down."""
    cpu = facts.processor
    saving = cpu.governor == "powersave" and cpu.frequency_driver not in _PREFERENCE_DRIVERS
    if saving or cpu.energy_preference == "power":
        how = "governor is powersave" if saving else "energy preference is power"
        why = "The clock stays at its minimum, or rises late."
        remedy = "cpupower frequency-set -g performance (as root), or the power profile performance"
        yield warn("governor", f"the processor's {how}", why, remedy)
    if cpu.mhz_allowed and cpu.mhz_max and cpu.mhz_allowed < 0.95 * cpu.mhz_max:
        what = f"the processor's clock may rise to {cpu.mhz_allowed:.0f} of {cpu.mhz_max:.0f} MHz"
        remedy = f"cpupower frequency-set -u {cpu.mhz_max:.0f}MHz (as root), unless it was set on purpose"
        yield warn("clock-capped", what, "Everything on the CPU is slower in proportion.", remedy)


def memory_short(facts: MachineFacts) -> Iterator[MachineFinding]:
    """Little memory is left, or processes were ended for want of it, or it is on disk."""
    memory = facts.memory
    most, left = memory.limit_bytes or memory.total_bytes, memory.available_bytes
    if most and left is not None and left < max(0.1 * most, min(2 * GB, 0.5 * most)):
        limit = "the control group's limit" if memory.limit_bytes else "the machine's memory"
        what = f"{size(left)} of {limit} ({size(most)}) is available"
        why = "The kernel kills processes that need more, without a message of theirs."
        yield warn(
            "memory", what, why, f"stop the processes that use it{', or raise the limit' * bool(memory.limit_bytes)}"
        )
    if memory.out_of_memory_kills:
        killed = count(memory.out_of_memory_kills, "process", "processes")
        what = f"the kernel killed {killed} here because memory ran out"
        why = "A run that vanished without a message was probably one of them."
        yield note("memory-kills", what, why, "raise the limit, or train with a smaller --batch-size")
    used = memory.swap_used_bytes or 0
    if used > 64e6:
        what = f"{size(used)} of memory is swapped to disk"
        severity: Grade = "warn" if (facts.load.pressure_memory_share or 0.0) > 0.01 else "note"
        remedy = "stop the processes that fill the memory; run swapoff -a once there is room"
        yield MachineFinding("swap", severity, what, "Reading it back takes as long as the disk needs.", remedy)


def memory_settings(facts: MachineFacts) -> Iterator[MachineFinding]:
    """Settings of the kernel that training on a CPU feels, and small shared memory."""
    memory, shm = facts.memory, facts.places.get("shm")
    if memory.huge_pages == "never":
        why = "Training on a CPU uses them: without them, large tensors cost a page fault for each 4 kB."
        remedy = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled (as root)"
        yield note("huge-pages", "transparent huge pages are switched off", why, remedy)
    if shm is not None and shm.total_bytes is not None and shm.total_bytes < GB:
        what = f"/dev/shm holds {size(shm.total_bytes)}"
        why = "steadytrain's data loader does not need it; PyTorch's DataLoader workers and NCCL do."
        yield note("shm", what, why, "if you use them: docker run --shm-size=8g, or --ipc=host")


def folders(facts: MachineFacts) -> Iterator[MachineFinding]:
    """Folders on a network, full, or not writable."""
    for name, words, variable in (
        ("here", "the current folder", None),
        ("cache", "the cache of packed images", "STEADYTRAIN_CACHE"),
        ("weights", "the cache of weights", "HF_HOME"),
        ("temporary", "the folder for temporary files", "TMPDIR"),
    ):
        place = facts.places.get(name)
        if place is None:
            continue
        where = f"{words} ({place.path})"
        remedy = f"set {variable} to a folder on a local disk" if variable else "work in a folder on a local disk"
        free, total = place.free_bytes, place.total_bytes
        if place.network and name in ("cache", "here"):
            what = f"{where} is on a network file system ({place.kind})"
            read = "Images are read over the network in each epoch."
            why = "Runs here are written over the network as well." if name == "here" else read
            yield MachineFinding(f"network.{name}", "note" if name == "here" else "warn", what, why, remedy)
        if place.writable is False:
            why = "Files that belong there cannot be written."
            what = f"{where} cannot be written to"
            yield MachineFinding(f"not-writable.{name}", "note" if name == "here" else "warn", what, why, remedy)
        elif free is not None and total and free < min(5 * GB, 0.05 * total):
            why = "Packed images, checkpoints or weights may not fit."
            yield warn(f"full.{name}", f"{size(free)} is free for {where}", why, f"free some space, or {remedy}")


_PINNING = ("OMP_PROC_BIND", "GOMP_CPU_AFFINITY", "OMP_PLACES", "KMP_AFFINITY")


def pinned(facts: MachineFacts) -> Iterator[MachineFinding]:
    """Loading torch leaves a process fewer processors than it had: its OpenMP pins the first thread.

    Threads that are started later inherit that: measured with torch 2.15 and OMP_PROC_BIND=true.
    """
    allowed, left = facts.processor.allowed, facts.torch.allowed
    if allowed is None or left is None or left >= allowed:
        return
    causes = [name for name in _PINNING if name in facts.variables]
    by = f" ({', '.join(f'{name}={facts.variables[name]}' for name in causes)})" if causes else ""
    what = f"after loading torch this process may use {count(left, 'core')} of {allowed}{by}"
    why = "The threads that decode images inherit this limit and share these cores."
    remedy = "unset " + (" ".join(causes) or "OpenMP's pinning")
    yield bad("pinned", what, why, remedy)


def threads(facts: MachineFacts) -> Iterator[MachineFinding]:
    """torch computes with more threads than there are cores, or with fewer: by OMP_NUM_THREADS, or for a quota."""
    usable, started = facts.processor.usable, facts.torch.threads
    setting = facts.variables.get("OMP_NUM_THREADS")
    first = (setting or "").split(",")[0].strip()  # ``4,2`` is four threads, with two more inside each
    limit = int(first) if first.isdigit() else None
    others = (
        "steady train uses at most one thread for each core; steady evaluate, steady predict and other programs "
        "use more."
    )
    unset = f"export OMP_NUM_THREADS={usable}, or unset it"
    if usable is None:
        return
    if limit and limit > usable:
        what = f"OMP_NUM_THREADS={setting} on {count(usable, 'core')}"
        yield warn("threads", what, f"Threads compete for the cores. {others}", unset)
    elif limit and limit < usable:
        what = f"OMP_NUM_THREADS={setting} limits computing to {limit} of {usable} cores"
        why = "It applies to training, evaluation and prediction on a CPU, but not to the threads that decode images."
        remedy = "unset OMP_NUM_THREADS, unless many processes share the machine"
        yield MachineFinding("threads", "note" if facts.torch.sees_gpu else "warn", what, why, remedy)
    elif setting is None and started is not None and started > usable:
        what = f"torch starts with {count(started, 'thread')} on {count(usable, 'core')}: it does not know the quota"
        why = f"Threads compete for the cores. {others}"
        yield warn("threads", what, why, f"export OMP_NUM_THREADS={usable}")


def _is_on(value: str) -> bool:
    return value.strip().lower() in ("1", "true", "on", "yes")


# Variables that cost something: the name, for which values, how bad that is, and why.
VARIABLES: tuple[tuple[str, Callable[[str], object], Grade, str], ...] = (
    ("CUDA_LAUNCH_BLOCKING", _is_on, "warn", "Each GPU operation waits for the previous one; meant for debugging."),
    ("PYTORCH_NO_CUDA_MEMORY_CACHING", str.strip, "warn", "The driver allocates each GPU tensor, which is slow."),
    ("NVIDIA_TF32_OVERRIDE", lambda value: value.strip() == "0", "note", "float32 matrix products run without TF32."),
    ("ATEN_CPU_CAPABILITY", str.strip, "warn", "torch uses older instructions than the processor has."),
    ("ONEDNN_MAX_CPU_ISA", str.strip, "warn", "Convolutions use only these instructions."),
    ("DNNL_MAX_CPU_ISA", str.strip, "warn", "Convolutions use only these instructions."),
    ("MKL_ENABLE_INSTRUCTIONS", str.strip, "warn", "Matrix products use only these instructions."),
    ("JSIMD_FORCENONE", _is_on, "warn", "JPEGs are decoded without vector instructions."),
    ("JSIMD_FORCESSE2", _is_on, "warn", "JPEGs are decoded with older instructions than the processor has."),
    ("OMP_THREAD_LIMIT", str.strip, "note", "CPU operations use at most that many threads."),
    ("OMP_WAIT_POLICY", lambda value: value.strip().lower() == "active", "warn", "Idle threads keep cores busy."),
    ("PYTHONDEVMODE", str.strip, "warn", "Python runs extra checks; meant for debugging."),
    ("PYTHONMALLOC", lambda value: value.endswith("debug"), "warn", "Python checks its memory; meant for debugging."),
    ("PYTHONTRACEMALLOC", lambda value: value.strip() not in ("", "0"), "warn", "Python records each allocation."),
)


def set_variables(facts: MachineFacts) -> Iterator[MachineFinding]:
    """Variables that were set for debugging, or for another machine."""
    for name, costs, severity, why in VARIABLES:
        value = facts.variables.get(name)
        if value is not None and costs(value):
            yield MachineFinding(f"variable.{name}", severity, f"{name}={value} is set", why, f"unset {name}")


def image_decoders(facts: MachineFacts) -> Iterator[MachineFinding]:
    """A decoder, or what scales images, that is missing or slower than it could be."""
    decoders = facts.decoders
    anew = "pip install --force-reinstall --no-cache-dir"
    if decoders.simplejpeg_error:
        both = decoders.pillow_error == decoders.simplejpeg_error
        what = f"simplejpeg {'and Pillow ' if both else ''}cannot be loaded: {decoders.simplejpeg_error}"
        remedy = f"{anew} simplejpeg{' pillow' if both else ''}"
        yield bad("simplejpeg", what, "No image can be read.", remedy)
    if decoders.pillow_error and decoders.pillow_error != decoders.simplejpeg_error:
        what = f"Pillow cannot be loaded: {decoders.pillow_error}"
        yield bad("pillow", what, "No image can be read.", f"{anew} pillow")
    if decoders.resizer == "no" or decoders.resizer_error:
        error, install = decoders.resizer_error, anew if decoders.resizer_error else "pip install"
        what = f"cykooz-resizer {f'cannot be loaded: {error}' if error else 'is not installed'}"
        why = "Packing resizes images with numpy, to the same bytes, in about ten times the time."
        remedy = f"{install} cykooz-resizer, if it has a wheel for this system"
        yield warn("resizer", what, why, remedy)
    if decoders.parts_error or (decoders.parts == "no" and facts.processor.isa in ("avx2", "avx512")):
        error = decoders.parts_error
        what = f"the native decoder {f'cannot be loaded: {error}' if error else 'was not built'}"
        why = "The whole JPEG is decoded, not only the crop: a core loads little more than half as many photographs."
        remedy = "install Rust (https://rustup.rs), then steadytrain again from its sources: pip install ."
        yield note("parts", what, why, remedy)


def versions(facts: MachineFacts) -> Iterator[MachineFinding]:
    """Packages that are missing or out of range."""
    for name, package in facts.packages.items():
        if package.version is None and name not in ("torch", "steadytrain"):
            why = "Features that need it fail at first use."
            yield bad(f"missing.{name}", f"{name} is not installed", why, f"pip install '{name}{package.wanted or ''}'")
        elif package.fits is False:
            what = f"{name} {package.version} is outside {package.wanted}"
            why = "steadytrain and its libraries do not support it."
            remedy = f"install Python {package.wanted}" if name == "python" else f"pip install '{name}{package.wanted}'"
            yield warn(f"version.{name}", what, why, remedy)


Rule = Callable[[MachineFacts], Iterator[MachineFinding]]

RULES: tuple[Rule, ...] = (
    gpu_unused,
    torch_loads,
    gpu_fails,
    gpu_taken,
    gpu_slowed,
    other_gpus,
    missing_libraries,
    pinned,
    image_decoders,
    versions,
    busy,
    fewer_cores,
    threads,
    set_variables,
    memory_short,
    folders,
    clocks,
    memory_settings,
)
"""Rules, each a pure function of the facts; within a severity their findings stand in this order."""


def findings(facts: MachineFacts) -> list[MachineFinding]:
    """Apply all rules: what is wrong or worth knowing, the worst first."""
    findings = [finding for rule in RULES for finding in rule(facts)]
    return sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))
