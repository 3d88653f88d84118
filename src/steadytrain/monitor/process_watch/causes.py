"""Diagnose a watched process: the classic causes that fit what was seen, the likeliest first, and what is not visible.

Each rule is a pure function of a watch's summary. A cause's share is of the time that it takes from what computes, as
far as it can be told from outside; what its change would save cannot.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from steadytrain.format import percent
from steadytrain.monitor.process_watch.moments import Moment
from steadytrain.monitor.process_watch.rhythm import Rhythm
from steadytrain.monitor.process_watch.summary import Activity, WatchSummary, summarise
from steadytrain.monitor.rules.cause import LEAST, Cause, clip, name_process

LEAST_SECONDS = 2.0
_IDLE = 0.15  # share of the time: where what computes waits for less, nothing is looked for
_HUNG_SECONDS = 10.0
_PERIODS = 0.1
_QUEUED = 0.15
_BUSY = 0.75
_ONE_CORE = 0.85
_OUTSIDE = (
    "loss, images per second and the line of code that runs (only the operating system's view is visible from outside)"
)


@dataclass(frozen=True, kw_only=True)
class Reading:
    """A watch's summary, the causes that fit it (at least one, the likeliest first), and what is not measurable."""

    seen: WatchSummary | None
    causes: tuple[Cause, ...]
    not_measurable: tuple[str, ...]

    @property
    def rhythm(self) -> Rhythm | None:
        """The oscillation of the load, if there is one."""
        return None if self.seen is None else self.seen.rhythm


def read(moments: Sequence[Moment]) -> Reading:
    """Diagnose a watch.

    ``moments``: in the order of time; the whole watch or its last minute.
    """
    if sum(moment.seconds for moment in moments) < LEAST_SECONDS:
        short = Cause(name="unknown", share=0.0, sentence=f"watched for less than {LEAST_SECONDS:.0f} s: too short")
        return Reading(seen=None, causes=(short,), not_measurable=(_OUTSIDE,))
    seen = summarise(moments)
    causes = [cause for cause in standing(seen) if cause.share >= LEAST]  # it explains all the rest
    if not causes:
        causes = [*machine(seen), *gpu(seen), *feeding(seen), *main_thread(seen), *waiting(seen), *compute(seen)]
        causes = [cause for cause in causes if cause.share >= LEAST or cause.name in ("compute", "busy")]
    if not causes:
        sentence = f"{_works(seen)}, on {seen.cpu:.1f} {_of_cores(seen)}: busy, no bottleneck found"
        causes = [Cause(name="nothing", share=0.0, sentence=sentence)]
    ordered = sorted(causes, key=lambda cause: -round(cause.share, 2))
    return Reading(seen=seen, causes=tuple(ordered), not_measurable=(*seen.missing, _OUTSIDE))


def standing(seen: WatchSummary) -> Iterator[Cause]:
    """Find a process that a signal has stopped, or that uses no processor, reads nothing and has no GPU work."""
    if seen.stopped:
        sentence = "the process is stopped (Ctrl-Z, a debugger, or SIGSTOP): it runs no code"
        yield Cause(name="stopped", share=1.0, sentence=sentence, change="`fg` in its terminal, or `kill -CONT` it")
    elif seen.quiet_seconds >= _HUNG_SECONDS:
        stuck = " in the kernel, waiting for a disk or a server that does not respond" if seen.main.disk > 0.5 else ""
        yield Cause(
            name="hung",
            share=1.0,
            sentence=f"no activity for {seen.quiet_seconds:.0f} s: all threads sleep{stuck}",
            evidence=_waits(seen.main, *seen.workers[:4]),
            change="dump the stacks (`py-spy dump --pid`, or SIGUSR1 if faulthandler is registered) before you kill it",
        )


def machine(seen: WatchSummary) -> Iterator[Cause]:
    """Find memory and processors that are short: held back by a control group, taken by others, or by each other."""
    pressure, swapped = seen.machine.pressure.get("memory", 0.0), seen.machine.swap_in_bytes or 0.0
    if pressure >= 0.1 or (swapped > 1e6 and seen.swapped_bytes > 0):
        yield Cause(
            name="memory",
            share=max(pressure, seen.idle if swapped > 1e6 else 0.0),
            sentence=f"memory is short: processes waited for it {percent(pressure, 0)} of the time"
            + (f", {swapped / 1e6:.0f} MB/s are read back from swap" if swapped > 1e5 else ""),
            evidence=(f"{seen.swapped_bytes / 1e9:.1f} GB of the watched processes are in swap",),
            change="fewer or smaller workers (each holds its own copy of the data it touches), a smaller batch, or "
            "more memory",
        )
    throttled, limit = clip(seen.machine.throttled or 0.0), seen.machine.quota
    if limit is not None and throttled >= _PERIODS:
        yield Cause(
            name="quota",
            share=throttled if not seen.gpus else seen.idle if throttled >= 0.25 else seen.idle * throttled,
            sentence=f"a quota of {limit:.3g} cores throttles the process in {percent(throttled, 0)} of its periods: it"
            f" uses {seen.cpu:.1f} cores",
            evidence=(_works(seen),),
            change="raise the CPU limit of the container or job, or use fewer threads than its cores",
        )
    others, queued, cores = seen.machine.others or 0.0, seen.queued or 0.0, seen.machine.cores
    # Time that is throttled counts as waiting for a processor, too.
    if (
        throttled < _PERIODS
        and queued >= _QUEUED
        and others >= max(0.25, 0.2 * seen.machine.processors)
        and seen.is_full
    ):
        starved = seen.idle * max((actor.busy for actor in seen.feeders), default=0.0) * (1 - seen.own_part)
        slowed = 0.0 if seen.gpus else seen.working * queued
        yield Cause(
            name="noisy_neighbour",
            share=clip(starved + slowed),
            sentence=f"other processes use {others:.1f} of {seen.machine.processors} cores: the watched threads wait "
            f"for a core {percent(queued, 0)} of the time in which they could run",
            evidence=(
                _works(seen),
                f"the watched processes use {seen.cpu:.1f} cores, {seen.free_cores:.1f} are free",
                *(
                    f"{name_process(process)} uses {process['cores']:.1f} cores"
                    for process in seen.machine.other_processes
                ),
            ),
            change="stop or move the other processes, or reserve cores for this one (taskset, cpuset)",
        )
    if queued >= 0.2 and seen.runnable >= 1.25 * cores + 0.25 and others <= 0.25 * cores:
        yield Cause(
            name="oversubscription",
            share=0.5 * seen.working * queued if not seen.gpus else seen.idle * queued,
            sentence=f"{seen.runnable:.1f} training threads are runnable at a time on {cores} cores: they wait for "
            f"each other {percent(queued, 0)} of the time",
            evidence=(_works(seen),),
            change="use fewer compute threads (OMP_NUM_THREADS), or run fewer processes on this machine",
        )


def gpu(seen: WatchSummary) -> Iterator[Cause]:
    """Find kernels that wait for other ranks: full load, little power, nothing else moves."""
    power = [gpu.power_watts / gpu.power_limit_watts for gpu in seen.gpus if gpu.power_watts and gpu.power_limit_watts]
    moves = (seen.disk_read_bytes or 0) > 0 or any(actor.active for actor in (*seen.workers, *seen.helpers))
    if power and seen.working >= 0.99 and max(power) <= 0.35 and not moves:
        yield Cause(
            name="communication",
            share=0.5,
            sentence=f"{_works(seen)} at {percent(max(power), 0)} of its power limit, and no worker is active: its"
            " kernels seem to wait for other ranks",
            evidence=_waits(seen.main, *seen.workers[:1]),
            change="check the other ranks: all of them wait if one has ended or hangs",
        )


def feeding(seen: WatchSummary) -> Iterator[Cause]:
    """Find why batches come too slowly: workers wait for files, all cores are busy, or there are too few workers."""
    feeders = seen.feeders
    busy, disk = _mean_shares(feeders or (seen.main,))
    waited = seen.idle if feeders else disk
    if waited >= _IDLE and disk >= 0.2 and not (feeders and disk < busy):
        who = (
            f"{_crowd(feeders, seen)} {'waits' if len(feeders) == 1 else 'wait'}"
            if feeders
            else "its main thread waits"
        )
        file = next((name for actor in feeders or (seen.main,) for name in actor.waits if "/" in name), "")
        from_disk, waiting = seen.disk_read_bytes, seen.machine.iowait or 0.0
        evidence = [
            *_feeders(seen),
            *([f"waits most often in {file}"] if file else []),
            *([] if from_disk is None else [f"{from_disk / 1e6:.1f} MB/s from disk"]),
            *([f"{waiting:.1f} {_of_cores(seen)} idle for I/O"] if waiting >= 0.05 else []),
        ]
        yield Cause(
            name="storage",
            share=waited if feeders else min(waited, disk / max(disk + busy, 1e-9)),
            sentence=f"{_works(seen)}; meanwhile {who} for storage {percent(disk, 0)} of the time",
            evidence=tuple(evidence),
            change="read larger pieces (pack the images into record files), or read from a faster disk or from memory",
        )
    if not feeders or seen.idle < _IDLE:
        return
    burnt, free = sum(actor.cpu for actor in feeders), f"{seen.free_cores:.1f} {_of_cores(seen)}"
    if seen.is_full and burnt >= 0.25 * seen.machine.cores and busy * len(feeders) >= 0.5 and disk <= busy:
        yield Cause(
            name="decode",
            share=seen.idle * seen.own_part,
            sentence=f"{_works(seen)}; meanwhile {_crowd(feeders, seen)} burn {burnt:.1f} {_of_cores(seen)}: decoding "
            "or augmenting limits it (CPU-bound input)",
            evidence=(*_feeders(seen), *_waits(seen.main), f"{free} free"),
            change="decode less (pack smaller images, at the training size), decode faster, or use more cores",
        )
    busiest = max(actor.busy for actor in feeders)
    if not seen.is_full and seen.free_cores >= 0.4 and (busy >= _BUSY or (busiest >= _ONE_CORE and busy < 0.5)):
        is_one = len(feeders) == 1 or busy < _BUSY
        who = "one of them" if is_one and len(feeders) > 1 else _crowd(feeders, seen)
        works = f"{'works' if is_one else 'work'} {percent(busiest if is_one else busy, 0)} of the time"
        yield Cause(
            name="threads",
            share=seen.idle,
            sentence=f"{_works(seen)}; {who} {works} while {free} are free: too few workers",
            evidence=(*_feeders(seen), *_waits(seen.main)),
            change="more workers" + ("" if seen.workers else " (use processes if Python's GIL blocks threads)"),
        )


def main_thread(seen: WatchSummary) -> Iterator[Cause]:
    """Find a main thread that keeps a core busy while nothing else works."""
    others, free = (*seen.workers, *seen.helpers), f"{seen.free_cores:.1f} {_of_cores(seen)}"
    burns = f"main thread on a processor {percent(seen.main.cpu, 0)} of the time"
    is_idle = not seen.gpus or seen.idle >= _IDLE
    is_alone = seen.main.busy >= _ONE_CORE and sum(actor.busy for actor in others) <= 0.6 and seen.free_cores >= 0.5
    if is_alone and is_idle and not (seen.gpus and seen.rhythm is None):
        makes = "also makes the batches (no workers)" if seen.gpus else "does all the work"
        change = "workers for the input"
        if not seen.gpus:
            change = f"{'' if seen.workers else 'workers for the input, or '}more compute threads (OMP_NUM_THREADS)"
        yield Cause(
            name="single_thread",
            share=seen.idle if seen.gpus else clip(seen.free_cores / seen.machine.cores),
            sentence=f"{_works(seen)}; the main thread keeps one core busy and {makes}, {free} are free",
            evidence=(burns, *_feeders(seen)),
            change=change,
        )
    is_hard = sum(actor.busy >= 0.5 for actor in others) > 1
    if seen.gpus and seen.rhythm is None and seen.idle >= _IDLE and seen.main.busy >= _ONE_CORE and not is_hard:
        yield Cause(
            name="launch",
            share=seen.idle,
            sentence=f"{_works(seen)}, without pauses; the main thread keeps one core busy: kernel launches or "
            "Python code limit it",
            evidence=(burns, *_feeders(seen)),
            change="use a larger batch, compilation or CUDA graphs, and fewer Python steps and .item() calls per "
            "update",
        )


def waiting(seen: WatchSummary) -> Iterator[Cause]:
    """Find waits for workers that are started again each epoch, and waits while no process in sight works or reads."""
    if seen.renewals >= 2:
        yield Cause(
            name="epoch_gap",
            share=seen.idle_after_renewals,
            sentence=f"{_crowd(seen.workers, seen)} ended and restarted about every "
            f"{seen.seconds / seen.renewals:.2g} s, and {_subject(seen)} waits for the first batch each time",
            evidence=(f"restarted {seen.renewals} times in {seen.seconds:.0f} s", _works(seen)),
            change="keep the workers between epochs (torch: persistent_workers=True)",
        )
    others = seen.feeders or seen.workers
    busy = _mean_shares(others)[0]
    disk = max((actor.disk for actor in others), default=seen.main.disk)
    unexplained = seen.idle * (1 - busy) - disk - seen.idle_after_renewals
    if unexplained < _IDLE or seen.main.busy >= _ONE_CORE or busy >= 0.5:
        return
    waits = [pair for actor in (seen.main, *others) for pair in actor.waits.items()]
    is_network = sum(s for n, s in waits if n.endswith(" socket") or n in ("connect", "accept", "accept4")) >= 0.3
    if is_network:
        for_what = "the network or another process"
    elif seen.workers:
        for_what = f"{_crowd(seen.workers, seen)} that sleep{'s' * (len(seen.workers) == 1)} as well"
    else:
        for_what = "something that uses no CPU time here"
    yield Cause(
        name="network" if is_network else "waiting",
        share=unexplained,
        sentence=f"{_works(seen)}, and waits for {for_what} in the rest: {seen.free_cores:.1f} {_of_cores(seen)} are "
        "free",
        evidence=(*_waits(seen.main), *_feeders(seen), *_waits(*others[:2])),
        change="check what it waits for: a sleep, a lock, a remote store, another rank",
    )


def compute(seen: WatchSummary) -> Iterator[Cause]:
    """Find a device, or processors, that compute nearly all the time."""
    if seen.idle >= _IDLE:
        return
    name = "compute"
    if not seen.gpus and not seen.workers and seen.main.busy < 0.5 and seen.feeders:
        name, change = "busy", ""
        sentence = (
            f"{_works(seen)}, in {_crowd(seen.feeders, seen)} besides the main thread: computing or decoding, which "
        )
        sentence += "look the same from outside"
    elif seen.gpus:
        sentence = f"{_works(seen)}: the input keeps up; the model or its communication takes the time"
        change = "try lower precision or compilation; utilisation does not show whether the kernels are efficient"
    else:
        sentence = (
            f"{_works(seen)} on {seen.trainer.cpu:.1f} {_of_cores(seen)}: it is computing, and the input keeps up"
        )
        change = "" if seen.is_full else "use more compute threads, if the model has work for them"
    gpus = []
    for gpu in seen.gpus:
        power = "" if gpu.power_watts is None else f", {gpu.power_watts:.0f} W"
        limit = "" if gpu.power_limit_watts is None else f" of {gpu.power_limit_watts:.0f}"
        used = "" if gpu.memory_bytes is None else f", {gpu.memory_bytes / 1e9:.1f} GB in use"
        gpus.append(
            f"GPU {gpu.index}: {percent(gpu.utilisation or 0, 0)} utilisation{power}{limit if power else ''}{used}"
        )
    yield Cause(name=name, share=0.0, sentence=sentence, evidence=(*gpus, *_feeders(seen)), change=change)


def _subject(seen: WatchSummary) -> str:
    """Name the device that computes."""
    if not seen.gpus:
        return "the training process" if seen.trainers == 1 else f"each of the {seen.trainers} training processes"
    return "the GPU" if len(seen.gpus) == 1 else f"each of the {len(seen.gpus)} GPUs"


def _works(seen: WatchSummary) -> str:
    """``the GPU works 60 % of each 1.8 s period``, or of the time where it keeps no period."""
    if seen.rhythm is not None:
        return (
            f"{_subject(seen)} works {percent(seen.rhythm.duty, 0)} of each {seen.rhythm.period_seconds:.2g} s period"
        )
    return f"{_subject(seen)} works {percent(seen.working, 0)} of the time"


def _of_cores(seen: WatchSummary) -> str:
    return f"of {seen.machine.cores} {'core' if seen.machine.cores == 1 else 'cores'}"


def _crowd(actors: tuple[Activity, ...], seen: WatchSummary) -> str:
    """``8 worker processes``, ``one thread``."""
    kind, kinds = ("worker process", "worker processes") if seen.workers else ("thread", "threads")
    return f"one {kind}" if len(actors) == 1 else f"{len(actors)} {kinds}"


def _waits(*actors: Activity) -> tuple[str, ...]:
    """Return the system call that each actor sleeps in, if it does so for a tenth of the time."""
    lines = []
    for actor in actors:
        calls = sorted(actor.waits.items(), key=lambda pair: -pair[1])
        if named := [f"{name} {percent(share, 0)}" for name, share in calls[:3] if share >= 0.1]:
            lines.append(f"{actor.label} sleeps in: {', '.join(named)} of the time")
    return tuple(lines)


def _feeders(seen: WatchSummary) -> tuple[str, ...]:
    """Describe what the makers of batches do: computing, waiting for files, asleep."""
    if not (feeders := seen.feeders):
        return ()
    busy, disk = _mean_shares(feeders)
    works = f"each works, or could, {percent(busy, 0)} of the time and waits for files {percent(disk, 0)}"
    return (f"{_crowd(feeders, seen)}: {sum(actor.cpu for actor in feeders):.1f} {_of_cores(seen)}; {works}",)


def _mean_shares(actors: tuple[Activity, ...]) -> tuple[float, float]:
    """Return the actors' mean busy share and their mean share of waiting for files."""
    num = max(1, len(actors))
    return sum(actor.busy for actor in actors) / num, sum(actor.disk for actor in actors) / num
