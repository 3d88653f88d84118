"""Processors and memory that are short: kept from the run, taken by others, or shared among too many threads."""

from __future__ import annotations

from steadytrain.format import count, percent, size
from steadytrain.monitor.evidence import Evidence
from steadytrain.monitor.ledger import PASSES
from steadytrain.monitor.rules.cause import LEAST, TRUSTED, Cause, clip
from steadytrain.monitor.rules.pace import IDLE, Pace, is_limited_by_quota, mean_pace

PARALLEL = 0.88
"""Share of the work of training on a CPU that more cores divide among them (Amdahl's law)."""

WORKING = (*PASSES, "optimizer", "evaluation", "warmup", "startup")

MAJOR_FAULT_SECONDS = 200e-6
"""What a page that comes back from a fast disk costs whoever waits for it, at least."""

MEMORY_FULL = 0.92
"""Of what a process may have: above this the kernel takes pages away to give others."""

USUAL_KERNEL = 0.04
"""Of the processor time of training on a CPU that the kernel takes where nothing is wrong."""

MINOR_FAULTS = 20_000
"""A second: fewer do not matter."""


def affinity(evidence: Evidence) -> Cause | None:
    """Find a process that may use a part of the machine's cores only, and wants more."""
    machine, pace = evidence.machine, mean_pace(evidence)
    if machine is None or pace is None or is_limited_by_quota(machine) or machine.cores >= machine.machine_cores:
        return None
    free = machine.machine_cores
    share = clip(_share_bound_by_cores(evidence, pace) * (1 - _time_left(machine.cores, free)))
    if share < LEAST or not pace.is_saturated:
        return None
    are = "it is" if machine.cores == 1 else "they are"
    return Cause(
        name="affinity",
        share=share,
        sentence=(
            f"The run may use {count(machine.cores, 'core')} of the machine's {free}, and {are} busy all the time: that"
            f" costs {percent(share)} of it."
        ),
        evidence=(*_core_figures(evidence), f"affinity, or a container's set of cores, leaves {machine.cores}"),
        change=f"give it {free} cores: taskset -c 0-{free - 1}, docker run --cpuset-cpus, Slurm's --cpus-per-task",
        saves=share,
    )


def quota(evidence: Evidence) -> Cause | None:
    """Find a control group's quota that gives the run less processor time than it wants."""
    machine, pace = evidence.machine, mean_pace(evidence)
    if machine is None or pace is None or not is_limited_by_quota(machine) or not pace.is_saturated:
        return None
    used = machine.cpu if machine.cpu is not None else float(machine.cores)
    late = (machine.throttled_seconds or 0.0) / max(machine.seconds, 1e-9)  # of all processors taken together
    running = 1 - late / max(late + used, 1e-9)
    free = max(machine.cores, machine.machine_cores)
    share = clip(_share_bound_by_cores(evidence, pace) * (1 - running * _time_left(machine.cores, free)))
    if share < LEAST:
        return None
    return Cause(
        name="quota",
        share=share,
        sentence=(
            f"A control group's quota leaves the run {used:.1f} of the machine's {count(free, 'core')}: that costs"
            f" {percent(share)} of the time."
        ),
        evidence=(*_core_figures(evidence), f"it was held back {percent(1 - running)} of the time"),
        change=f"raise the quota to {count(free, 'core')}: docker run --cpus={free}, Kubernetes' limits.cpu, CPUQuota",
        saves=share,
    )


def oversubscription(evidence: Evidence) -> Cause | None:
    """Find more computing threads than there are cores, which take turns."""
    threads, cores = evidence.compute_threads, evidence.cores
    if not evidence.takes_turns:
        return None
    best = _fastest_threads(evidence, most=cores)
    num, left = best if best is not None else (cores, _time_without_turns(evidence, threads))
    share = clip(evidence.ledger.share(*PASSES) * (1 - left))
    if share < LEAST:
        return None
    how = "measured" if best is not None else "estimated"
    figures = [f"a pass takes {1 / left:.1f} times as long with {threads} threads as with {num} ({how})"]
    if evidence.machine is not None and evidence.machine.involuntary_switches is not None:
        figures.append(f"{evidence.machine.involuntary_switches:,.0f} times a second a thread is made to wait")
    turns = f"{threads} threads compute on {count(cores, 'core')} and take turns"
    return Cause(
        name="oversubscription",
        share=share,
        sentence=f"{turns}: that costs {percent(share)} of the time.",
        evidence=tuple(figures),
        change=f"--set parallel.compute_threads={num}",
        saves=share,
    )


def undersubscription(evidence: Evidence) -> Cause | None:
    """Find fewer computing threads than there are cores, while cores are idle."""
    hosts = evidence.started.machine.get("hosts")
    ranks = hosts.count(hosts[0]) if isinstance(hosts, list) and hosts else 1  # of this machine, which share its cores
    threads, cores, pace = evidence.compute_threads, evidence.cores // ranks, mean_pace(evidence)
    if not evidence.on_cpu or pace is None or pace.idle is None or threads >= cores:
        return None
    if "threads_seconds" in evidence.started.machine:
        return None  # it was measured, and more of them take no less time
    free = min(cores, threads + round(pace.idle))
    best = _fastest_threads(evidence, least=threads + 1)
    num, left = best if best is not None else (free, _time_left(threads, free))
    share = clip(evidence.ledger.share(*PASSES) * (1 - left))
    if free <= threads or share < LEAST:
        return None
    how = "measured" if best is not None else "estimated"
    who = count(threads, "thread computes", "threads compute")
    return Cause(
        name="compute_threads",
        share=share,
        sentence=f"{who} while {count(pace.idle, 'core')} are idle: that costs {percent(share)} of the time.",
        evidence=(*_core_figures(evidence), f"a pass with {num} threads takes {percent(left)} of the time ({how})"),
        change=f"--set parallel.compute_threads={num}",
        saves=share,
    )


def noisy_neighbour(evidence: Evidence) -> Cause | None:
    """Find other processes, or other guests of the host, that take processors which the run wants."""
    machine, pace = evidence.machine, mean_pace(evidence)
    if machine is None or pace is None or machine.cpu is None or pace.idle is None:
        return None
    if pace.idle > 2 * IDLE * pace.cores or is_limited_by_quota(machine):
        return None
    steal = machine.steal or 0.0
    taken = steal + (machine.others or 0.0)
    used = machine.cpu + machine.ranks  # all ranks here are hindered
    share = clip(_share_bound_by_cores(evidence, pace) * taken / max(taken + used, 1e-9))
    if share < LEAST:
        return None
    who, change = "Other processes", "end the other work on this machine, or wait for it (top tells what it is)"
    if steal > taken / 2:
        who, change = "Other guests of this host", "choose a machine type with cores of its own, or another host"
    sentence = f"{who} take {count(taken, 'core')} that the run wants: that costs {percent(share)} of the time."
    figures = _core_figures(evidence)
    return Cause(name="noisy_neighbour", share=share, sentence=sentence, evidence=figures, change=change, saves=share)


def memory(evidence: Evidence) -> Cause | None:
    """Find pages that are taken away and come back from the disk."""
    machine = evidence.machine
    if machine is None:
        return None
    by_pressure, limit = machine.pressure.get("memory", 0.0), machine.memory_limit_bytes
    is_full = (machine.available_bytes or 0) < (1 - MEMORY_FULL) * (limit or 0)
    is_short = by_pressure >= LEAST / 3 or bool(machine.swap_bytes) or is_full
    by_faults = (machine.major_faults or 0.0) * MAJOR_FAULT_SECONDS if is_short else 0.0  # else files are mapped
    share = clip(max(by_pressure, by_faults))
    if share < LEAST:
        return None
    figures = []
    if machine.major_faults is not None:
        figures.append(f"{machine.major_faults:,.0f} pages a second come back from a disk")
    if by_pressure:
        figures.append(f"something waits for memory {percent(by_pressure)} of the time (pressure)")
    if machine.memory_bytes is not None:
        of = f" of {size(limit)} that it may have" if limit else ""
        figures.append(f"the run has {size(machine.memory_bytes)}{of}")
    if machine.available_bytes is not None:
        figures.append(f"{size(machine.available_bytes)} are left")
    accumulate = 2 * evidence.recipe.optim.accumulate
    change = "end what else fills the memory (top, sorted by RES), or raise the limit"
    if limit and (machine.memory_bytes or 0) >= 0.5 * limit and evidence.recipe.batch_size % accumulate == 0:
        change = f"--set optim.accumulate={accumulate}"  # the run itself fills the memory
    sentence = f"Memory is short: {percent(share)} of the time goes into fetching back what was moved out of it."
    return Cause(name="memory", share=share, sentence=sentence, evidence=tuple(figures), change=change, saves=share)


def allocator(evidence: Evidence) -> Cause | None:
    """Find steps that ask the system for memory which the step before gave back: page faults by the thousand."""
    machine = evidence.machine
    if machine is None or not evidence.on_cpu or machine.system_share is None:
        return None
    faults, kernel = machine.minor_faults or 0.0, max(0.0, machine.system_share - USUAL_KERNEL)
    share = clip(evidence.ledger.share(*PASSES, "optimizer") * kernel)
    if faults < MINOR_FAULTS or share < LEAST:
        return None
    return Cause(
        name="allocator",
        share=share,
        sentence=(
            f"{percent(share)} of the time the kernel hands out memory that was given back just before: the allocator"
            " does not keep what is freed."
        ),
        evidence=(
            f"{faults:,.0f} page faults a second",
            f"{percent(machine.system_share)} of the run's processor time is the kernel's",
        ),
        change=(
            "start it without LD_PRELOAD and without variables MALLOC_* and GLIBC_TUNABLES (steady doctor names them)"
        ),
        saves=share,
    )


def _core_figures(evidence: Evidence) -> tuple[str, ...]:
    machine = evidence.machine
    if machine is None:
        return ()
    uses = [f"{count(machine.cores, 'core')} of {machine.machine_cores} may be used"]
    if machine.cpu is not None:
        uses.append(f"the run uses {machine.cpu:.2f}")
    if machine.others is not None:
        uses.append(f"others {machine.others:.2f}")
    if machine.idle is not None:
        uses.append(f"{machine.idle:.2f} idle")
    if (machine.steal or 0.0) >= 0.05:
        uses.append(f"{machine.steal:.2f} taken by the host")
    figures = [", ".join(uses)]
    if machine.pressure.get("cpu", 0.0) >= LEAST:
        figures.append(f"something waits for a core {percent(machine.pressure['cpu'])} of the time (pressure)")
    return tuple(figures)


def _share_bound_by_cores(evidence: Evidence, pace: Pace) -> float:
    """Return the share of the wall time in which more processor time would help."""
    return clip(evidence.ledger.share(*WORKING) + pace.exposed) if evidence.on_cpu else pace.exposed


def _time_left(before: int, after: int) -> float:
    """Return what is left of the time with ``after`` cores in place of ``before``: Amdahl's law.

    >>> _time_left(2, 2), round(_time_left(1, 2), 2)
    (1.0, 0.56)
    """
    return (1 - PARALLEL + PARALLEL / after) / (1 - PARALLEL + PARALLEL / before)


def _time_without_turns(evidence: Evidence, threads: int) -> float:
    """Return what would be left of a pass without threads that take turns, where no measured pass says otherwise.

    Those that wait for each other go on when the last of them has had its turn: it takes as many times as long as there
    are threads for each core. Nothing is said where the cores are not full of it.
    """
    pace, cores, measured = mean_pace(evidence), evidence.cores, evidence.measured
    is_measured = measured is not None and any(name.startswith("threads=") for name in measured.passes)
    if (is_measured and _fastest_threads(evidence, most=cores) is None) or pace is None or not pace.is_saturated:
        return 1.0
    return 1.0 if threads <= 2 * cores else cores / threads


def _fastest_threads(evidence: Evidence, *, least: int = 1, most: int = 4096) -> tuple[int, float] | None:
    """Return the fastest measured number of threads and its time over that of the run's passes; None if none is faster.

    Threads that take turns may be lucky for a pass or two: the mean of the run's own is what counts.
    """
    measured, mean = evidence.measured, evidence.mean_seconds(*PASSES)
    if measured is None or mean <= 0:
        return None
    passes = {int(name.partition("=")[2]): s for name, s in measured.passes.items() if name.startswith("threads=")}
    passes = {threads: seconds for threads, seconds in passes.items() if least <= threads <= most and seconds > 0}
    if not passes:
        return None
    threads = min(passes, key=lambda threads: passes[threads])
    left = passes[threads] / mean
    return (threads, left) if left <= 1 - TRUSTED else None
