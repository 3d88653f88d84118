"""Processors and memory that are short: kept from the run, taken by others, or shared among too many threads."""

from __future__ import annotations

from collections.abc import Iterator

from steadytrain.events import MachineStats, StepMeasured, ThreadStats
from steadytrain.format import count, duration, percent, size
from steadytrain.monitor.evidence import Evidence
from steadytrain.monitor.ledger import PASSES
from steadytrain.monitor.rules.cause import (
    LEAST,
    NAMED,
    OF_FEED,
    OF_UPDATES,
    STOP_OTHERS,
    TRUSTED,
    Cause,
    VerdictRule,
    clip,
    name_process,
)
from steadytrain.monitor.rules.host import disturbed, loop_time, rivals
from steadytrain.monitor.rules.pace import IDLE, is_limited_by_quota, mean_pace, probe_pace
from steadytrain.monitor.rules.update import growth

LEAST_STOLEN = 0.05  # cores: less is what others take on an idle machine, and "0.0" in words
# Share of the work of training on a CPU that more cores divide among them (Amdahl's law): 0.88 and 0.75 on two virtual
# machines, whose cores are threads of a whole one.
PARALLEL = 0.8
BETWEEN = ("startup", "warmup", "probe", "evaluation")
WORKING = (*PASSES, "optimizer", *reversed(BETWEEN))

TURNS = 0.2  # share of an update: threads that take turns wait for a core for as long
MAJOR_FAULT_SECONDS = 200e-6  # what a page that comes back from a fast disk costs whoever waits for it, at least
MEMORY_FULL = 0.92  # share of what a process may have: above this the kernel takes pages away to give others
USUAL_KERNEL = 0.04  # share of the processor time of training on a CPU that the kernel takes where nothing is wrong
TOUCHED = 1.6  # times the kernel's time: a page that is new is slow to touch as well (1.4, 1.75: two virtual machines)
MINOR_FAULTS = 20_000  # a second: fewer do not matter


def cores(evidence: Evidence) -> Iterator[Cause]:
    """Find processors that the run wants and that affinity, a quota, other processes or other guests keep from it."""
    machine, probe = evidence.machine, probe_pace(evidence)
    pace = probe or mean_pace(evidence)
    if machine is None or pace is None:
        return
    # The share of the time in which more processor time would help; what a probe waits is in its bucket.
    exposed = 0.0 if probe and evidence.on_cpu else pace.exposed
    bound = clip((evidence.ledger.share(*WORKING) if evidence.on_cpu else 0.0) + exposed)
    figures, by_quota = _core_figures(machine), is_limited_by_quota(machine)
    free = max(machine.cores, machine.machine_cores)
    if (taken := _taken_away(evidence, figures)) is not None:
        yield taken
    elif pace.is_saturated and not by_quota and machine.cores < free:
        share = clip(bound * (1 - _time_left(machine.cores, free)))
        are = "it is" if machine.cores == 1 else "they are"
        yield Cause(
            name="affinity",
            share=share,
            sentence=f"The run may use {count(machine.cores, 'core')} of the machine's {free}, and {are} busy all the "
            f"time: that costs {percent(share)} of it.",
            evidence=(*figures, f"CPU affinity or the container's core set allows {machine.cores}"),
            change=f"give it {free} cores: taskset -c 0-{free - 1}, docker run --cpuset-cpus, Slurm's --cpus-per-task",
            saves=share,
        )
    if pace.is_saturated and by_quota and taken is None:
        used = machine.cpu if machine.cpu is not None else float(machine.cores)
        late = (machine.throttled_seconds or 0.0) / max(machine.seconds, 1e-9)  # of all processors taken together
        late = min(late, max(0.0, free - used))  # more than the machine has nobody could have used
        running = 1 - late / max(late + used, 1e-9)
        share = clip(bound * (1 - running * _time_left(machine.cores, free)))
        yield Cause(
            name="quota",
            share=share,
            sentence=f"A CPU quota (cgroup) limits the run to {used:.1f} of the machine's {count(free, 'core')}: that "
            f"costs {percent(share)} of the time.",
            evidence=(*figures, *([f"it was throttled {percent(1 - running)} of the time"] if running < 0.995 else [])),
            change=f"raise the quota to {count(free, 'core')}: docker run --cpus={free}, Kubernetes' limits.cpu, "
            "CPUQuota",
            saves=share,
        )
    machine = evidence.whole or machine  # threads wait for cores in the first pass and in evaluations as well
    if by_quota or machine.cpu is None or pace.idle is None:
        return
    figures = _core_figures(machine)
    steal, is_full = machine.steal or 0.0, pace.idle <= 2 * IDLE * pace.cores
    stolen = steal + (machine.others or 0.0)
    part = stolen / max(stolen + machine.cpu + machine.ranks, 1e-9)  # all ranks here are hindered
    loop, threads = loop_time(evidence), evidence.newest(ThreadStats)
    if threads is None or (loop is None and probe is None):
        waited, share = 0.0, clip(bound * part) if is_full else 0.0
    else:  # no more than the run's own threads waited for a core
        spare = max(0.0, 1 - pace.cores / max(pace.compute_threads, pace.cores))  # threads that take turns
        used = pace.feed_cores + rivals(evidence)["thread"] + spare * machine.cpu
        waited = loop.queued if loop is not None else pace.loop * (pace.queued or 0.0)
        queued = 0.0 if loop is None else loop.queued * stolen / max(stolen + used, 1e-9)
        for bucket in BETWEEN:
            if (at := threads.loop.get(bucket)) and at["seconds"] > 0:
                queued += evidence.ledger.share(bucket) * min(1.0, at.get("queued", 0.0) / at["seconds"])
        stolen_share = bound * steal / max(steal + machine.cpu + machine.ranks, 1e-9)
        late = (threads.feed["queued"] if threads.feed else 0.0) / max(threads.seconds, 1e-9)
        fed = clip(late * pace.step / pace.busy) if pace.busy > 0 else 0.0
        share = clip(queued + (stolen_share + pace.exposed * fed * part if is_full else 0.0))
        figures += (f"the training thread waited for a core {percent(waited)} of the time",)
    share = min(share, stolen)  # whoever waited for a core that others had waited no longer than they had it
    if stolen < LEAST_STOLEN:
        return
    sentence = f"take {count(stolen, 'core')} that this run needs: that costs {percent(share)} of the time."
    if steal > stolen / 2:
        sentence = f"Other virtual machines on this host {sentence}"
        change = "choose a machine type with dedicated cores, or another host"
    else:
        busy = [process for process in machine.other_processes if process.get("cores", 0.0) >= 0.05]
        named = [(name_process(process), process["cores"]) for process in busy]
        most = ", ".join(name for name, cores in named if cores >= NAMED * stolen)
        is_most = sum(cores for _, cores in named if cores >= NAMED * stolen) >= stolen / 2
        who = f", {'mostly' if is_most else 'among them'} {most}," if most else ""
        sentence = f"Other processes{who} {sentence}"
        figures += tuple(f"{name} used {cores:.1f} of {count(machine.cores, 'core')}" for name, cores in named)
        change = STOP_OTHERS
    yield Cause(name="noisy_neighbour", share=share, sentence=sentence, evidence=figures, change=change, saves=share)


def _taken_away(evidence: Evidence, figures: tuple[str, ...]) -> Cause | None:
    """Find a part of the attempt in which it might use fewer cores than in another, by how much slower it was.

    What updates take longer since something grows from step to step is not counted again.
    """
    grants = [grant for grant in evidence.grants if grant.images > 0 and grant.seconds > 0]
    most, wall = max((grant.amount for grant in grants), default=0.0), evidence.ledger.wall_seconds
    best = [grant for grant in grants if grant.amount == most]
    fewer = [grant for grant in grants if grant.amount < most]
    if not fewer or wall <= 0:
        return None
    batch, grown = evidence.recipe.batch_size, sum(cause.share for cause in growth(evidence))

    def lost(usual: float) -> float:
        return clip(sum(grant.seconds - usual * grant.images for grant in fewer) / wall - grown)

    usual = sum(grant.seconds for grant in best) / sum(grant.images for grant in best)
    if lost(usual) < LEAST:
        return None
    if (fast := evidence.updates.seconds[0]) > 0:  # near the change, the stretch before it has updates of both kinds
        usual = min(usual, fast / batch)
    share = lost(usual)
    least = min(fewer, key=lambda grant: grant.amount)
    after = grants[grants.index(least) + 1 :]
    is_quota = least.quota > 0 and least.quota < least.cores + 1 and least.quota != best[0].quota
    what = "CPU quota" if is_quota else "CPU affinity"
    when = f"from step {least.step:,}" if least.step else f"until step {after[0].step:,}" if after else ""
    if least.step and after:
        when += f" to step {after[0].step:,}"
    each = least.seconds / least.images * batch
    return Cause(
        name="quota" if is_quota else "affinity",
        share=share,
        sentence=f"The run's {what} changed while it trained: {when} it might use {count(least.amount, 'core')} instead"
        f" of {most:g}, and that costs {percent(share)} of the time.",
        evidence=(
            f"an update takes {duration(each)} with {count(least.amount, 'core')}, {duration(usual * batch)} with"
            f" {count(most, 'core')}",
            *figures,
        ),
        change=f"find what changes it (taskset, a batch system, a container's limits), and leave it at {most:g}",
        saves=share,
    )


def compute_threads(evidence: Evidence) -> Iterator[Cause]:
    """Find more computing threads than there are cores, which take turns, or fewer while cores are idle."""
    if not evidence.on_cpu:
        return
    machine, measured, pace = evidence.machine, evidence.newest(StepMeasured), mean_pace(evidence)
    threads, mean, passes = evidence.compute_threads, evidence.mean_seconds(*PASSES), dict[int, float]()
    for name, seconds in measured.passes.items() if measured is not None else ():
        if name.startswith("threads="):
            passes[int(name.partition("=")[2])] = seconds
    # Threads that take turns may be lucky for a pass or two: the mean of the run's own is what counts.
    turns = evidence.takes_turns
    better = [n for n in passes if passes[n] > 0 and (n <= evidence.cores if turns else n > threads)]
    num = min(better, key=lambda n: passes[n], default=0)
    full = mean if turns or measured is None else measured.passes.get("full", 0.0)  # made a moment before the other
    left = passes[num] / full if num and full > 0 else 1.0
    how = "measured" if left <= 1 - TRUSTED else "estimated"
    if turns:
        if how == "estimated":
            # Measured on two cores of two machines: 4 threads took 1.1 and 1.4 times as long as 2, 8 threads 1.4 times
            # and twice. Nothing is said where the cores are not full of it, and no thread waits for its turn.
            is_full = (pace is not None and pace.is_saturated) or disturbed(evidence) >= TURNS
            is_full = is_full and not passes and threads >= max(4, 2 * evidence.cores)
            num, left = evidence.cores, (evidence.cores / threads) ** 0.35 if is_full else 1.0
        share = clip(evidence.ledger.share(*PASSES) * (1 - left))
        longer = f"{1 / max(left, 1e-9):.{1 if left <= 0.9 else 2}f}"
        figures = [f"a pass takes {longer} times as long with {threads} threads as with {num} ({how})"]
        if machine is not None and machine.involuntary_switches is not None:
            figures.append(f"threads are preempted {machine.involuntary_switches:,.0f} times per second")
        yield Cause(
            name="oversubscription",
            share=share,
            sentence=f"{threads} threads compute on {count(evidence.cores, 'core')} and take turns: that costs "
            f"{percent(share)} of the time.",
            evidence=tuple(figures),
            change=f"--set parallel.compute_threads={num}",
            saves=share,
        )
        return
    was_set = threads != evidence.compute_threads_begun
    if (
        ("threads_seconds" in evidence.started.machine and not was_set)
        or machine is None
        or pace is None
        or pace.idle is None
    ):
        return  # it was measured, and more of them take no less time; or nothing is known
    hosts = evidence.started.machine.get("hosts")
    ranks = hosts.count(hosts[0]) if isinstance(hosts, list) and hosts else 1  # of this machine, which share its cores
    free = min(evidence.cores // ranks, threads + round(pace.idle))
    if free <= threads:
        return
    if how == "estimated" and num:
        return  # it was measured, and takes no less time
    if how == "estimated":
        num, left = free, _time_left(threads, free)
    # Measured alone: beside the feed, the cores may have no room for what a pass takes less.
    saved = pace.saved_by_updates(pace.saved(pace.with_compute_threads(num, mean, left)))
    share = min(clip(evidence.ledger.share(*PASSES) * (1 - left)), clip(saved))
    fast, each = evidence.updates.seconds[0], evidence.mean_seconds(*PASSES, "optimizer")
    if was_set and 0 < fast <= (1 + left) / 2 * each:  # those were made with more
        share = min(share, clip(evidence.ledger.share(*PASSES, "optimizer") * (1 - fast / each)))
    who, change = count(threads, "thread computes", "threads compute"), f"--set parallel.compute_threads={num}"
    figures = [*_core_figures(machine), f"a pass with {num} threads takes {percent(left)} of the time ({how})"]
    if was_set:
        figures.insert(
            0, f"the run began with {evidence.compute_threads_begun}: its code has called torch.set_num_threads"
        )
        change = f"leave torch.set_num_threads({threads}) out of the model's code"
    yield Cause(
        name="compute_threads",
        share=share,
        sentence=f"{who} while {count(pace.idle, 'core')} {'is' if pace.idle == 1 else 'are'} idle: that costs"
        f" {percent(share)} of the time.",
        evidence=tuple(figures),
        change=change,
        saves=share,
    )


def memory(evidence: Evidence) -> Iterator[Cause]:
    """Find pages that come back from the disk, and steps that ask for memory which the step before gave back."""
    machine = evidence.machine
    if machine is None:
        return
    by_pressure, limit = machine.pressure.get("memory", 0.0), machine.memory_limit_bytes
    is_full = (machine.available_bytes or 0) < (1 - MEMORY_FULL) * (limit or 0)
    is_short = by_pressure >= LEAST / 3 or bool(machine.swap_bytes) or is_full
    by_faults = (machine.major_faults or 0.0) * MAJOR_FAULT_SECONDS if is_short else 0.0  # else files are mapped
    share = clip(max(by_pressure, by_faults))
    figures = []
    if machine.major_faults is not None:
        figures.append(f"{machine.major_faults:,.0f} pages per second are read back from disk")
    if by_pressure:
        figures.append(f"processes wait for memory {percent(by_pressure)} of the time (pressure)")
    if machine.memory_bytes is not None:
        of = f" of {size(limit)} allowed" if limit else ""
        figures.append(f"the run uses {size(machine.memory_bytes)}{of}")
    if machine.available_bytes is not None:
        figures.append(f"{size(machine.available_bytes)} are available")
    accumulate = 2 * evidence.recipe.optim.accumulate
    change = "stop other processes that use much memory (top, sorted by RES), or raise the limit"
    if limit and (machine.memory_bytes or 0) >= 0.5 * limit and evidence.recipe.batch_size % accumulate == 0:
        change = f"--set optim.accumulate={accumulate}"  # the run itself fills the memory
    sentence = f"Memory is short: {percent(share)} of the time goes into reading evicted pages back."
    if by_pressure > by_faults:  # it is given up and looked for as well: what is read back may be nothing
        sentence = f"Memory is short: processes wait for it {percent(share)} of the time."
    yield Cause(name="memory", share=share, sentence=sentence, evidence=tuple(figures), change=change, saves=share)

    faults = machine.minor_faults or 0.0
    if not evidence.on_cpu or machine.system_share is None or faults < MINOR_FAULTS:
        return
    kernel_share = TOUCHED * max(0.0, machine.system_share - USUAL_KERNEL)
    share = clip(evidence.ledger.share(*PASSES, "optimizer") * kernel_share)
    yield Cause(
        name="allocator",
        share=share,
        sentence=f"{percent(share)} of the time the kernel hands out memory that was just freed: the "
        "allocator does not keep freed memory.",
        evidence=(
            f"{faults:,.0f} page faults per second",
            f"{percent(machine.system_share)} of the run's CPU time is spent in the kernel",
        ),
        change="start the run without LD_PRELOAD, MALLOC_* and GLIBC_TUNABLES (steady doctor lists them)",
        saves=share,
    )


def _core_figures(machine: MachineStats) -> tuple[str, ...]:
    uses = [f"{machine.cores} of {count(machine.machine_cores, 'core')} usable"]
    if machine.cpu is not None:
        uses.append(f"the run uses {machine.cpu:.2f}")
    if machine.others is not None:
        uses.append(f"others {machine.others:.2f}")
    if machine.idle is not None:
        uses.append(f"{machine.idle:.2f} idle")
    if (machine.steal or 0.0) >= 0.05:
        uses.append(f"{machine.steal:.2f} taken by other virtual machines")
    waits = machine.pressure.get("cpu", 0.0)
    pressed = [f"processes wait for a core {percent(waits)} of the time (pressure)"] if waits >= LEAST else []
    return (", ".join(uses), *pressed)


def _time_left(before: int, after: int) -> float:
    """Return what is left of the time with ``after`` cores in place of ``before``: Amdahl's law.

    >>> _time_left(2, 2), round(_time_left(1, 2), 2)
    (1.0, 0.6)
    """
    return (1 - PARALLEL + PARALLEL / after) / (1 - PARALLEL + PARALLEL / before)


_SHORT = (*OF_FEED, *OF_UPDATES, "noisy_neighbour", "oversubscription", "evaluation", "straggler")
RULES = (
    VerdictRule(
        "cores",
        cores,
        explains={
            "affinity": _SHORT,
            "quota": _SHORT,
            "noisy_neighbour": (*OF_FEED, *OF_UPDATES, "evaluation", "straggler", "communication"),
        },
        slows={"affinity": "all", "quota": "all", "noisy_neighbour": "all"},
    ),
    VerdictRule(
        "compute_threads",
        compute_threads,
        explains={"oversubscription": (*OF_FEED, *OF_UPDATES, "evaluation")},
        slows={"oversubscription": "all", "compute_threads": "updates"},
    ),
    VerdictRule(
        "memory",
        memory,
        explains={"memory": (*OF_FEED, *OF_UPDATES, "storage", "allocator", "evaluation")},
        slows={"memory": "all", "allocator": "updates"},
    ),
)
