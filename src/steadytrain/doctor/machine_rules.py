"""Rules about processors, memory, folders, limits and the clock."""

from __future__ import annotations

from collections.abc import Iterator

from steadytrain.doctor.facts import Facts
from steadytrain.doctor.finding import Finding, Severity, percent, size, some

GB = 1e9
_SLOW_CLOCKS = {"hpet", "acpi_pm", "jiffies", "refined-jiffies", "pit", "xen"}
# These drivers call their ordinary, changing clock "powersave"; what they save is in another file.
_PREFERENCE_DRIVERS = {"intel_pstate", "amd-pstate-epp", "amd_pstate_epp"}


def fewer_cores(facts: Facts) -> Iterator[Finding]:
    """Affinity or a quota leaves fewer processors than the machine has."""
    cpu, load = facts.processor, facts.load
    if cpu.usable is None or cpu.logical is None:
        return
    why = "Decoding, and training on a CPU, have no more than these."
    if cpu.quota is not None and cpu.quota < min(cpu.logical, cpu.allowed or cpu.logical):
        late = load.throttled_share or 0.0
        held = f", and was reached in {percent(late)} of its periods" if late >= 0.01 else ""
        what = f"the control group's quota is {some(cpu.quota, 'core')} of the machine's {cpu.logical}{held}"
        remedy = "raise it (docker run --cpus, Kubernetes' limits.cpu, systemd's CPUQuota)"
        yield Finding("quota", "warn" if late >= 0.05 or cpu.quota < 2 else "note", what, why, remedy)
    if cpu.allowed is not None and cpu.allowed < cpu.logical:
        what = f"affinity leaves {some(cpu.allowed, 'core')} of the machine's {cpu.logical}"
        remedy = "ask for more (taskset, numactl, docker run --cpuset-cpus, Slurm's --cpus-per-task)"
        yield Finding("affinity", "note", what, why, remedy)


def busy(facts: Facts) -> Iterator[Finding]:
    """Other work wants the processors, or the hypervisor withholds them."""
    load, cpu = facts.load, facts.processor
    if load.load_1 is not None and cpu.logical and load.load_1 >= 0.5 * cpu.logical:
        waiting = load.pressure_cpu_share
        more = f"; in {percent(waiting)} of the last 10 s something waited for a core" if waiting else ""
        what = f"the load is {load.load_1:.1f} on {some(cpu.logical, 'core')}{more}"
        remedy = "see with top what runs; end it or wait before measuring anything"
        severity: Severity = "warn" if load.load_1 >= cpu.logical else "note"
        yield Finding("load", severity, what, "Other work takes its share of the cores: all here is slower.", remedy)
    if (load.steal_share or 0.0) >= 0.05:
        what = f"the hypervisor withheld {percent(load.steal_share or 0.0)} of the processors' time just now"
        remedy = "choose a machine type with cores of its own, or another host"
        yield Finding("steal", "warn", what, "Other guests on the host are served first.", remedy)
    for kind, name, share, least in (
        ("memory", "memory", load.pressure_memory_share, 0.05),
        ("disk", "io", load.pressure_io_share, 0.3),
    ):
        if (share or 0.0) >= least:
            what = f"in {percent(share or 0.0)} of the last 10 s something waited for {kind}"
            remedy = f"see what uses it (/proc/pressure/{name}, top, iotop)"
            yield Finding(f"pressure-{kind}", "warn", what, "Training waits as well, at times.", remedy)


def clocks(facts: Facts) -> Iterator[Finding]:
    """The processor's clock is held down, or telling the time is slow or wrong."""
    cpu, system = facts.processor, facts.system
    saving = cpu.governor == "powersave" and cpu.frequency_driver not in _PREFERENCE_DRIVERS
    if saving or cpu.energy_preference == "power":
        how = "governor is powersave" if saving else "energy preference is power"
        why = "The clock stays at its lowest, or rises late."
        remedy = "cpupower frequency-set -g performance (as root), or the power profile performance"
        yield Finding("governor", "warn", f"the processor's {how}", why, remedy)
    if cpu.mhz_allowed and cpu.mhz_max and cpu.mhz_allowed < 0.95 * cpu.mhz_max:
        what = f"the processor's clock may rise to {cpu.mhz_allowed:.0f} of {cpu.mhz_max:.0f} MHz"
        remedy = f"cpupower frequency-set -u {cpu.mhz_max:.0f}MHz (as root), where it was not meant so"
        yield Finding("clock-capped", "warn", what, "All work on the CPU is so much slower.", remedy)
    if system.clock_source in _SLOW_CLOCKS:
        what = f"the kernel takes the time from {system.clock_source}"
        why = "Each look at the clock is a call of the kernel or slower; steps and stages are timed all along."
        remedy = "boot with clocksource=tsc, if the machine's tsc is stable"
        yield Finding("clock-source", "note", what, why, remedy)
    if (system.clock_behind_seconds or 0.0) > 86_400:
        days = (system.clock_behind_seconds or 0.0) / 86_400
        what = f"this machine's clock is wrong: {some(round(days), 'day')} earlier than files that are installed on it"
        why = "Certificates are refused, and the times of runs are wrong."
        yield Finding("clock-wrong", "warn", what, why, "set it (timedatectl set-ntp true)")


def memory_short(facts: Facts) -> Iterator[Finding]:
    """Little memory is left, or processes were ended for want of it, or it is on disk."""
    memory = facts.memory
    most = memory.limit_bytes or memory.total_bytes
    if (
        most
        and memory.available_bytes is not None
        and memory.available_bytes < max(0.1 * most, min(2 * GB, 0.5 * most))
    ):
        whose = "the control group's limit" if memory.limit_bytes else "the machine's memory"
        what = f"{size(memory.available_bytes)} of {whose} ({size(most)}) is left"
        why = "What asks for more is ended by the kernel, without a word of its own."
        remedy = "end what holds it, or raise the limit" if memory.limit_bytes else "end what holds it"
        yield Finding("memory", "warn", what, why, remedy)
    if memory.out_of_memory_kills:
        what = f"for want of memory the kernel ended {some(memory.out_of_memory_kills, 'process', 'processes')} here"
        why = "Since this control group began. A run that vanished without a message was one of them."
        yield Finding("memory-kills", "note", what, why, "raise the limit, or train with a smaller --batch-size")
    used = memory.swap_used_bytes or 0
    if used > 64e6:
        what = f"{size(used)} of memory lies on disk (swap)"
        severity: Severity = "warn" if (facts.load.pressure_memory_share or 0.0) > 0.01 else "note"
        why = "What is needed of it comes back at the disk's speed."
        yield Finding("swap", severity, what, why, "end what fills the memory; swapoff -a once there is room")


def memory_settings(facts: Facts) -> Iterator[Finding]:
    """Settings of the kernel that training on a CPU feels, and small shared memory."""
    memory, shm = facts.memory, facts.places.get("shm")
    if memory.huge_pages == "never":
        why = "Training on a CPU asks for them: large tensors otherwise cost a page fault for each 4 kB."
        remedy = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled (as root)"
        yield Finding("huge-pages", "note", "transparent huge pages are switched off", why, remedy)
    if memory.overcommit == "never":
        why = "Address space counts as memory: what torch and steadytrain reserve without using may be refused."
        remedy = "sysctl vm.overcommit_memory=0 (as root), where it was not meant so"
        yield Finding("overcommit", "note", "the kernel does not overcommit memory", why, remedy)
    if shm is not None and shm.total_bytes is not None and shm.total_bytes < GB:
        what = f"/dev/shm holds {size(shm.total_bytes)}"
        why = "steadytrain's feed does not use it; worker processes of PyTorch's DataLoader, and NCCL, do."
        yield Finding("shm", "note", what, why, "for those: docker run --shm-size=8g, or --ipc=host")


def folders(facts: Facts) -> Iterator[Finding]:
    """Folders on a network, full, or not writable."""
    meant = {"here": "the current folder", "cache": "the cache of packed images", "weights": "the cache of weights"}
    meant |= {"temporary": "the folder for temporary files"}
    for name, words in meant.items():
        place = facts.places.get(name)
        if place is None:
            continue
        where = f"{words} ({place.path})"
        move = {"cache": "STEADYTRAIN_CACHE", "weights": "HF_HOME", "temporary": "TMPDIR"}.get(name)
        remedy = f"set {move} to a folder on a local disk" if move else "work in a folder on a local disk"
        if place.network and name in ("cache", "here"):
            what = f"{where} is on a network file system ({place.kind})"
            why = (
                "Images are read over the network each epoch, at its speed." if name == "cache" else "So are runs here."
            )
            yield Finding(f"network.{name}", "warn" if name == "cache" else "note", what, why, remedy)
        yield from _room(name, where, facts, remedy)


def _room(name: str, where: str, facts: Facts, remedy: str) -> Iterator[Finding]:
    place = facts.places[name]
    if place.writable is False:
        severity: Severity = "note" if name == "here" else "warn"
        why = "What belongs there cannot be written."
        yield Finding(f"not-writable.{name}", severity, f"{where} cannot be written to", why, remedy)
    elif place.free_files is not None and place.free_files < 1000:
        why = "Nothing can be written, though there are free bytes."
        what = f"the file system of {where} has room for {some(place.free_files, 'more file')}"
        yield Finding(f"full.{name}", "warn", what, why, f"remove files, or {remedy}")
    elif (
        place.free_bytes is not None and place.total_bytes and place.free_bytes < min(5 * GB, 0.05 * place.total_bytes)
    ):
        what = f"{size(place.free_bytes)} is free for {where}"
        why = "Packed images, checkpoints or weights may not fit."
        yield Finding(f"full.{name}", "warn", what, why, f"free some room, or {remedy}")


def limits(facts: Facts) -> Iterator[Finding]:
    """Limits of this process that are easily met."""
    told = facts.limits
    if told.open_files is not None and told.open_files < 1024:
        most = 65_536 if told.open_files_most is None else min(told.open_files_most, 65_536)
        higher = "raise the hard limit (limits.conf, systemd's LimitNOFILE, docker run --ulimit nofile=65536)"
        raised = f"ulimit -n {most}" if most > told.open_files else higher
        why = "steadytrain keeps few files open; data in many shards, and other loaders, may meet it."
        yield Finding("open-files", "note", f"a process may have {told.open_files} files open", why, raised)
    if told.address_space_bytes is not None:
        what = f"a process may have {size(told.address_space_bytes)} of address space"
        why = "torch and CUDA reserve many times what they use, and fail."
        yield Finding(
            "address-space", "warn", what, why, "ulimit -v unlimited; limit memory by a control group instead"
        )
