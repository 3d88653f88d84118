"""Causes that lie around a process: it is stopped, held back, or shares what it needs. Functions of what was seen."""

from __future__ import annotations

from steadytrain.monitor.process_watch.cause import Cause, free, idle, is_full, own_part, waits, works
from steadytrain.monitor.process_watch.seen import Seen

HUNG_SECONDS = 10.0
_PERIODS = 0.1
_QUEUED = 0.15


def stopped(seen: Seen) -> Cause | None:
    """A signal has stopped it."""
    if not seen.stopped:
        return None
    sentence = "the process is stopped (Ctrl-Z, a debugger, or SIGSTOP): it runs no code"
    return Cause(name="stopped", share=1.0, sentence=sentence, change="`fg` in its terminal, or `kill -CONT` it")


def hung(seen: Seen) -> Cause | None:
    """No processor time, no reading, no GPU work for a while."""
    if seen.quiet_seconds < HUNG_SECONDS or seen.stopped:
        return None
    those = (seen.main, *seen.workers[:4])
    stuck = " in the kernel, for a disk or a server that does not answer" if seen.main.disk > 0.5 else ""
    return Cause(
        name="hung",
        share=1.0,
        sentence=f"nothing has moved for {seen.quiet_seconds:.0f} s: all of its threads sleep{stuck}",
        evidence=tuple(line for one in those for line in waits(one)),
        change="dump the stacks (`py-spy dump --pid`, or SIGUSR1 where faulthandler listens) before ending it",
    )


def spinning(seen: Seen) -> Cause | None:
    """All GPUs at 100 % at little power, and nothing else moves: kernels that wait for other ranks."""
    power = [gpu.power_watts / gpu.power_limit_watts for gpu in seen.gpus if gpu.power_watts and gpu.power_limit_watts]
    if not power or seen.working < 0.99 or max(power) > 0.35 or (seen.disk_read_bytes or 0) > 0:
        return None
    if any(one.active for one in (*seen.workers, *seen.helpers)):
        return None
    return Cause(
        name="communication",
        share=0.5,
        sentence=f"{works(seen)} at {max(power):.0%} of its power, and no worker moves: its kernels seem to wait for "
        "other ranks",
        evidence=(*waits(seen.main), *(waits(seen.workers[0]) if seen.workers else ())),
        change="look at the other ranks: one that has ended or stands still holds all of them",
    )


def memory(seen: Seen) -> Cause | None:
    """Memory is short: pages come back from swap, or the kernel reclaims while others wait."""
    pressure, swapped = seen.machine.pressure.get("memory", 0.0), seen.machine.swap_in_bytes or 0.0
    if pressure < 0.1 and not (swapped > 1e6 and seen.swapped_bytes > 0):
        return None
    left, whole = seen.machine.available_bytes, seen.machine.memory_bytes
    return Cause(
        name="memory",
        share=max(pressure, idle(seen) if swapped > 1e6 else 0.0),
        sentence=f"memory is short: something waited for it {pressure:.0%} of the time"
        + (f", {swapped / 1e6:.0f} MB/s come back from swap" if swapped > 1e5 else ""),
        evidence=(
            f"{seen.swapped_bytes / 1e9:.1f} GB of the watched processes are in swap",
            f"{seen.major_faults:.0f} page faults a second go to disk",
            *([f"{left / 1e9:.1f} of {whole / 1e9:.0f} GB available"] if left is not None and whole else []),
        ),
        change="fewer or smaller workers (each holds a copy of what it touches), a smaller batch, or more memory",
    )


def quota(seen: Seen) -> Cause | None:
    """A control group holds it back."""
    periods, limit = seen.machine.throttled or 0.0, seen.machine.quota
    if limit is None or periods < _PERIODS:
        return None
    return Cause(
        name="quota",
        share=periods if not seen.gpus else (idle(seen) if periods >= 0.25 else idle(seen) * periods),
        sentence=f"a quota of {limit:.3g} cores holds the process back in {periods:.0%} of its periods: it uses "
        f"{seen.cpu:.1f} cores",
        evidence=(works(seen),),
        change="a larger CPU limit of the container or job, or fewer threads than its cores",
    )


def noisy_neighbour(seen: Seen) -> Cause | None:
    """Other processes take the cores that the watched ones wait for."""
    others, queued = seen.machine.others or 0.0, seen.queued or 0.0
    held_back = (seen.machine.throttled or 0.0) >= _PERIODS  # that time counts as waiting for a processor, too
    if held_back or queued < _QUEUED or others < max(0.25, 0.2 * seen.machine.processors) or not is_full(seen):
        return None
    fed = max((one.busy for one in seen.feeders), default=0.0)
    starved = idle(seen) * fed * (1 - own_part(seen))
    slowed = 0.0 if seen.gpus else seen.working * queued
    return Cause(
        name="noisy_neighbour",
        share=min(1.0, starved + slowed),
        sentence=f"other processes use {others:.1f} of {seen.machine.processors} cores: the watched threads wait "
        f"for one in {queued:.0%} of the time in which they could run",
        evidence=(works(seen), f"the watched processes use {seen.cpu:.1f} cores, {free(seen):.1f} are free"),
        change="end or move the other work, or give this one cores of its own (taskset, cpuset)",
    )


def steal(seen: Seen) -> Cause | None:
    """The hypervisor runs other virtual machines on the same cores."""
    share = (seen.machine.steal or 0.0) / seen.machine.processors
    if share < 0.1:
        return None
    return Cause(
        name="steal",
        share=share if not seen.gpus else min(share, idle(seen)),
        sentence=f"the hypervisor takes {share:.0%} of the cores away for other virtual machines",
        evidence=(works(seen),),
        change="another machine type, or one with cores of its own",
    )


def oversubscription(seen: Seen) -> Cause | None:
    """More compute threads than cores."""
    limit, queued = seen.machine.cores, seen.queued or 0.0
    if queued < 0.2 or seen.runnable < 1.25 * limit + 0.25 or (seen.machine.others or 0.0) > 0.25 * limit:
        return None
    return Cause(
        name="oversubscription",
        share=0.5 * seen.working * queued if not seen.gpus else idle(seen) * queued,
        sentence=f"{seen.runnable:.1f} threads of the training could run at a time on {limit} cores: they wait for one "
        f"another {queued:.0%} of the time",
        evidence=(
            works(seen),
            f"main threads are pushed off their core {seen.involuntary_switches:.0f} times a second",
        ),
        change="fewer compute threads (OMP_NUM_THREADS), or fewer processes on this machine",
    )


def device_shared(seen: Seen) -> Cause | None:
    """Others compute on the same GPU."""
    shared = [gpu for gpu in seen.gpus if gpu.others]
    if not shared:
        return None
    named = ", ".join(f"GPU {gpu.index}: {gpu.others}" for gpu in shared)
    return Cause(
        name="device_shared",
        share=0.1,
        sentence=f"other processes compute on the same GPU ({named}); utilisation counts theirs as well",
        change="another GPU (CUDA_VISIBLE_DEVICES), or end them",
    )


ALL = (stopped, hung, memory, quota, noisy_neighbour, steal, oversubscription, spinning, device_shared)
