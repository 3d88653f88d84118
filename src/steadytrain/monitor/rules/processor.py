"""Fewer processors than the run could use: kept from it, taken by others, or shared among too many threads."""

from __future__ import annotations

from steadytrain.monitor.evidence import Evidence
from steadytrain.monitor.ledger import PASSES
from steadytrain.monitor.rules.cause import LEAST, TRUSTED, Cause, percent, some, within
from steadytrain.monitor.rules.pace import IDLE, Pace, is_by_quota
from steadytrain.monitor.rules.stretches import compute_threads, cores, on_cpu, pass_seconds, takes_turns, whole

PARALLEL = 0.88
"""Share of the work of training on a CPU that more cores divide among them (Amdahl's law)."""

WORKING = (*PASSES, "optimizer", "evaluation", "warmup", "startup")


def affinity(evidence: Evidence) -> Cause | None:
    """The process may use a part of the machine's cores only, and wants more."""
    machine, pace = evidence.machine, whole(evidence)
    if machine is None or pace is None or is_by_quota(machine) or machine.cores >= machine.machine_cores:
        return None
    if not pace.is_saturated:
        return None
    free = machine.machine_cores
    share = within(_bound(evidence, pace) * (1 - _time(machine.cores, free)))
    if share < LEAST:
        return None
    sentence = (
        f"The run may use {some(machine.cores, 'core')} of the machine's {machine.machine_cores}, and"
        f" {'it is' if machine.cores == 1 else 'they are'} busy all the time: that costs {percent(share)} of it."
    )
    told = (*_processors(evidence), f"affinity, or a container's set of cores, leaves {machine.cores}")
    change = f"give it {free} cores: taskset -c 0-{free - 1}, docker run --cpuset-cpus, Slurm's --cpus-per-task"
    return Cause(name="affinity", share=share, sentence=sentence, evidence=told, change=change, saves=share)


def quota(evidence: Evidence) -> Cause | None:
    """A control group's quota gives it less processor time than it wants."""
    machine, pace = evidence.machine, whole(evidence)
    if machine is None or pace is None or not is_by_quota(machine) or not pace.is_saturated:
        return None
    used = machine.cpu if machine.cpu is not None else float(machine.cores)
    late = (machine.throttled_seconds or 0.0) / max(machine.seconds, 1e-9)  # of all processors taken together
    running = 1 - late / max(late + used, 1e-9)
    free = max(machine.cores, machine.machine_cores)
    left = running * _time(machine.cores, free)
    share = within(_bound(evidence, pace) * (1 - left))
    if share < LEAST:
        return None
    sentence = (
        f"A control group's quota leaves the run {used:.1f} of the machine's {some(free, 'core')}: that costs"
        f" {percent(share)} of the time."
    )
    told = (*_processors(evidence), f"it was held back {percent(1 - running)} of the time")
    change = f"raise the quota to {some(free, 'core')}: docker run --cpus={free}, Kubernetes' limits.cpu, CPUQuota"
    return Cause(name="quota", share=share, sentence=sentence, evidence=told, change=change, saves=share)


def oversubscription(evidence: Evidence) -> Cause | None:
    """More threads compute than there are cores, and take turns."""
    threads, here = compute_threads(evidence), cores(evidence)
    if not takes_turns(evidence):
        return None
    best = _fastest(evidence, most=here)
    count, left = best if best is not None else (here, _taking_turns(evidence, threads))
    how = "measured" if best is not None else "estimated"
    share = within(evidence.ledger.share(*PASSES) * (1 - left))
    if share < LEAST:
        return None
    sentence = (
        f"{threads} threads compute on {some(here, 'core')} and take turns: that costs {percent(share)} of the time."
    )
    told = [f"a pass takes {1 / left:.1f} times as long with {threads} threads as with {count} ({how})"]
    if evidence.machine is not None and evidence.machine.involuntary_switches is not None:
        told.append(f"{evidence.machine.involuntary_switches:,.0f} times a second a thread is made to wait")
    change = f"--set parallel.compute_threads={count}"
    return Cause(
        name="oversubscription", share=share, sentence=sentence, evidence=tuple(told), change=change, saves=share
    )


def undersubscription(evidence: Evidence) -> Cause | None:
    """Fewer threads compute than there are cores, and cores are idle."""
    threads, here = compute_threads(evidence), cores(evidence) // _beside(evidence)
    pace = whole(evidence)
    if not on_cpu(evidence) or pace is None or pace.idle is None or threads >= here:
        return None
    if "threads_seconds" in evidence.started.machine:
        return None  # it was measured, and more of them take no less time
    free = min(here, threads + round(pace.idle))
    best = _fastest(evidence, least=threads + 1)
    count, left = best if best is not None else (free, _time(threads, free))
    share = within(evidence.ledger.share(*PASSES) * (1 - left))
    if free <= threads or share < LEAST:
        return None
    sentence = (
        f"{some(threads, 'thread computes', 'threads compute')} while {some(pace.idle, 'core')} are idle: that costs"
        f" {percent(share)} of the time."
    )
    how = "measured" if best is not None else "estimated"
    told = (*_processors(evidence), f"a pass with {count} threads takes {percent(left)} of the time ({how})")
    change = f"--set parallel.compute_threads={count}"
    return Cause(name="compute_threads", share=share, sentence=sentence, evidence=told, change=change, saves=share)


def _beside(evidence: Evidence) -> int:
    """Ranks on this machine, which share its cores."""
    hosts = evidence.started.machine.get("hosts")
    return hosts.count(hosts[0]) if isinstance(hosts, list) and hosts else 1


def noisy_neighbour(evidence: Evidence) -> Cause | None:
    """Other processes, or other guests of the host, take processors that the run wants."""
    machine, pace = evidence.machine, whole(evidence)
    if machine is None or pace is None or machine.cpu is None or pace.idle is None:
        return None
    if pace.idle > 2 * IDLE * pace.cores or is_by_quota(machine):
        return None
    steal = machine.steal or 0.0
    taken = steal + (machine.others or 0.0)
    used = machine.cpu + machine.ranks  # all ranks here are hindered
    share = within(_bound(evidence, pace) * taken / max(taken + used, 1e-9))
    if share < LEAST:
        return None
    who = "other guests of this host" if steal > taken / 2 else "other processes"
    sentence = (
        f"{who.capitalize()} take {some(taken, 'core')} that the run wants: that costs {percent(share)} of the time."
    )
    change = (
        "choose a machine type with cores of its own, or another host"
        if steal > taken / 2
        else "end the other work on this machine, or wait for it (top tells what it is)"
    )
    return Cause(
        name="noisy_neighbour",
        share=share,
        sentence=sentence,
        evidence=_processors(evidence),
        change=change,
        saves=share,
    )


def _processors(evidence: Evidence) -> tuple[str, ...]:
    machine = evidence.machine
    if machine is None:
        return ()
    told = [f"{some(machine.cores, 'core')} of {machine.machine_cores} may be used"]
    if machine.cpu is not None:
        told.append(f"the run uses {machine.cpu:.2f}")
    if machine.others is not None:
        told.append(f"others {machine.others:.2f}")
    if machine.idle is not None:
        told.append(f"{machine.idle:.2f} idle")
    if (machine.steal or 0.0) >= 0.05:
        told.append(f"{machine.steal:.2f} taken by the host")
    words = [", ".join(told)]
    if machine.pressure.get("cpu", 0.0) >= LEAST:
        words.append(f"something waits for a core {percent(machine.pressure['cpu'])} of the time (pressure)")
    return tuple(words)


def _bound(evidence: Evidence, pace: Pace) -> float:
    """Share of the wall time in which more processor time would help."""
    waiting = pace.exposed
    return within(evidence.ledger.share(*WORKING) + waiting) if on_cpu(evidence) else waiting


def _time(before: int, after: int) -> float:
    """What is left of the time with ``after`` cores in place of ``before``: Amdahl's law.

    >>> _time(2, 2), round(_time(1, 2), 2)
    (1.0, 0.56)
    """
    return (1 - PARALLEL + PARALLEL / after) / (1 - PARALLEL + PARALLEL / before)


def _compute_threads(evidence: Evidence) -> int:
    return int(evidence.started.machine.get("compute_threads", 0) or 0)


def _taking_turns(evidence: Evidence, threads: int) -> float:
    """What would be left of a pass without threads that take turns, where no pass was measured that says otherwise.

    Those that wait for each other go on when the last of them has had its turn: it takes as many times as long as there
    are threads for each core. Nothing is said where the cores are not full of it.
    """
    pace, here = whole(evidence), cores(evidence)
    tried = evidence.measured is not None and any(name.startswith("threads=") for name in evidence.measured.passes)
    if (
        (tried and _fastest(evidence, most=here) is None)
        or pace is None
        or not pace.is_saturated
        or threads <= 2 * here
    ):
        return 1.0
    return here / threads


def _fastest(evidence: Evidence, *, least: int = 1, most: int = 4096) -> tuple[int, float] | None:
    """The fastest measured number of threads and its time over that of the run's passes; None where none was faster.

    Threads that take turns may be lucky for a pass or two: the mean of the run's own is what counts.
    """
    measured, own = evidence.measured, pass_seconds(evidence)
    if measured is None or own <= 0:
        return None
    tried = {
        int(name.partition("=")[2]): seconds for name, seconds in measured.passes.items() if name.startswith("threads=")
    }
    fitting = {count: seconds for count, seconds in tried.items() if least <= count <= most and seconds > 0}
    if not fitting:
        return None
    count = min(fitting, key=lambda told: fitting[told])
    left = fitting[count] / own
    return (count, left) if left <= 1 - TRUSTED else None
