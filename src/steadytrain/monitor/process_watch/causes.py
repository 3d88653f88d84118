"""Diagnose a watched process: the classic causes that fit what was seen, the likeliest first, and what is not visible.

Each rule is a pure function of a watch's summary. A cause's share is of the time that it takes from what computes, as
far as it can be told from outside; what its change would save cannot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from steadytrain.monitor.process_watch.moments import Moment
from steadytrain.monitor.process_watch.rhythm import Rhythm
from steadytrain.monitor.process_watch.summary import Activity, WatchSummary, summarise
from steadytrain.monitor.rules.cause import LEAST, Cause, clip

LEAST_SECONDS = 2.0
_IDLE = 0.15  # of the time: where what computes waits for less, nothing is looked for
_HUNG_SECONDS = 10.0
_PERIODS = 0.1
_QUEUED = 0.15
_BUSY = 0.75
_ONE_CORE = 0.85
_OUTSIDE = "loss, images per second and which line of code runs (from outside only the system's view is visible)"


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What was seen, the causes that fit, the likeliest first and never none, and what is not measurable here."""

    seen: WatchSummary | None
    causes: tuple[Cause, ...]
    not_measurable: tuple[str, ...]

    @property
    def rhythm(self) -> Rhythm | None:
        """The oscillation, if there is one."""
        return None if self.seen is None else self.seen.rhythm


def read(moments: Sequence[Moment]) -> Reading:
    """Diagnose a watch.

    Args:
        moments: in the order of time; the whole watch or its last minute.
    """
    if sum(moment.seconds for moment in moments) < LEAST_SECONDS:
        short = Cause(name="unknown", share=0.0, sentence=f"watched for less than {LEAST_SECONDS:.0f} s: too short")
        return Reading(seen=None, causes=(short,), not_measurable=(_OUTSIDE,))
    seen = summarise(moments)
    causes = [cause for rule in RULES if (cause := rule(seen)) is not None]
    causes = [cause for cause in causes if cause.share >= LEAST or cause.name in ("compute", "busy")]
    standing = [cause for cause in causes if cause.name in ("stopped", "hung")]  # they explain all the rest
    if not causes:
        sentence = f"{_works(seen)}, on {seen.cpu:.1f} {_of_cores(seen)}: busy, nothing obvious"
        causes = [Cause(name="nothing", share=0.0, sentence=sentence)]
    ordered = sorted(standing or causes, key=lambda cause: -round(cause.share, 2))
    return Reading(seen=seen, causes=tuple(ordered), not_measurable=(*seen.missing, _OUTSIDE))


def _subject(seen: WatchSummary) -> str:
    """What computes."""
    if not seen.gpus:
        return "the training process" if seen.trainers == 1 else f"each of the {seen.trainers} training processes"
    return "the GPU" if len(seen.gpus) == 1 else f"each of the {len(seen.gpus)} GPUs"


def _works(seen: WatchSummary) -> str:
    """``the GPU works 60 % of each 1.8 s period``, or of the time where it keeps no period."""
    if seen.rhythm is not None:
        return f"{_subject(seen)} works {seen.rhythm.duty:.0%} of each {seen.rhythm.period_seconds:.2g} s period"
    return f"{_subject(seen)} works {seen.working:.0%} of the time"


def _of_cores(seen: WatchSummary) -> str:
    return f"of {seen.machine.cores} {'core' if seen.machine.cores == 1 else 'cores'}"


def _crowd(actors: tuple[Activity, ...], seen: WatchSummary) -> str:
    """``8 worker processes``, ``one thread``."""
    kind, kinds = ("worker process", "worker processes") if seen.workers else ("thread", "threads")
    return f"one {kind}" if len(actors) == 1 else f"{len(actors)} {kinds}"


def _waits(*actors: Activity) -> tuple[str, ...]:
    """What each actor sleeps in, where it does so for a tenth of the time."""
    lines = []
    for actor in actors:
        calls = sorted(actor.waits.items(), key=lambda pair: -pair[1])
        if named := [f"{name} {share:.0%}" for name, share in calls[:3] if share >= 0.1]:
            lines.append(f"{actor.label} sleeps in: {', '.join(named)} of the time")
    return tuple(lines)


def _feeding(seen: WatchSummary) -> tuple[str, ...]:
    """What those that make batches do: on a processor, waiting for files, asleep; and in either half of the rhythm."""
    feeders = seen.feeders
    if not feeders:
        return ()
    busy, disk = _mean_shares(feeders)
    lines = [
        f"{_crowd(feeders, seen)}: {sum(one.cpu for one in feeders):.1f} {_of_cores(seen)}; each works, or could, "
        f"{busy:.0%} of the time and waits for files {disk:.0%}"
    ]
    if seen.rhythm and seen.busy_while_low is not None and seen.busy_while_high is not None:
        low, high = seen.busy_while_low, seen.busy_while_high
        lines.append(f"they burn {low:.1f} cores while it is low, {high:.1f} while high")
    return tuple(lines)


def _mean_shares(actors: tuple[Activity, ...]) -> tuple[float, float]:
    return sum(one.busy for one in actors) / len(actors), sum(one.disk for one in actors) / len(actors)


# Causes that lie around a process: it is stopped, held back, or shares what it needs.


def stopped(seen: WatchSummary) -> Cause | None:
    """A signal has stopped it."""
    if not seen.stopped:
        return None
    sentence = "the process is stopped (Ctrl-Z, a debugger, or SIGSTOP): it runs no code"
    return Cause(name="stopped", share=1.0, sentence=sentence, change="`fg` in its terminal, or `kill -CONT` it")


def hung(seen: WatchSummary) -> Cause | None:
    """No processor time, no reading, no GPU work for a while."""
    if seen.quiet_seconds < _HUNG_SECONDS or seen.stopped:
        return None
    stuck = " in the kernel, for a disk or a server that does not answer" if seen.main.disk > 0.5 else ""
    return Cause(
        name="hung",
        share=1.0,
        sentence=f"nothing has moved for {seen.quiet_seconds:.0f} s: all of its threads sleep{stuck}",
        evidence=_waits(seen.main, *seen.workers[:4]),
        change="dump the stacks (`py-spy dump --pid`, or SIGUSR1 where faulthandler listens) before ending it",
    )


def memory(seen: WatchSummary) -> Cause | None:
    """Memory is short: pages come back from swap, or the kernel reclaims while others wait."""
    pressure, swapped = seen.machine.pressure.get("memory", 0.0), seen.machine.swap_in_bytes or 0.0
    if pressure < 0.1 and not (swapped > 1e6 and seen.swapped_bytes > 0):
        return None
    left, whole = seen.machine.available_bytes, seen.machine.memory_bytes
    return Cause(
        name="memory",
        share=max(pressure, seen.idle if swapped > 1e6 else 0.0),
        sentence=f"memory is short: something waited for it {pressure:.0%} of the time"
        + (f", {swapped / 1e6:.0f} MB/s come back from swap" if swapped > 1e5 else ""),
        evidence=(
            f"{seen.swapped_bytes / 1e9:.1f} GB of the watched processes are in swap",
            f"{seen.major_faults:.0f} page faults a second go to disk",
            *([f"{left / 1e9:.1f} of {whole / 1e9:.0f} GB available"] if left is not None and whole else []),
        ),
        change="fewer or smaller workers (each holds a copy of what it touches), a smaller batch, or more memory",
    )


def quota(seen: WatchSummary) -> Cause | None:
    """A control group holds it back."""
    periods, limit = clip(seen.machine.throttled or 0.0), seen.machine.quota
    if limit is None or periods < _PERIODS:
        return None
    return Cause(
        name="quota",
        share=periods if not seen.gpus else seen.idle if periods >= 0.25 else seen.idle * periods,
        sentence=f"a quota of {limit:.3g} cores holds the process back in {periods:.0%} of its periods: it uses "
        f"{seen.cpu:.1f} cores",
        evidence=(_works(seen),),
        change="a larger CPU limit of the container or job, or fewer threads than its cores",
    )


def noisy_neighbour(seen: WatchSummary) -> Cause | None:
    """Other processes take the cores that the watched ones wait for."""
    others, queued = seen.machine.others or 0.0, seen.queued or 0.0
    is_throttled = (seen.machine.throttled or 0.0) >= _PERIODS  # that time counts as waiting for a processor, too
    if is_throttled or queued < _QUEUED or others < max(0.25, 0.2 * seen.machine.processors) or not seen.is_full:
        return None
    fed = max((one.busy for one in seen.feeders), default=0.0)
    starved = seen.idle * fed * (1 - seen.own_part)
    slowed = 0.0 if seen.gpus else seen.working * queued
    return Cause(
        name="noisy_neighbour",
        share=min(1.0, starved + slowed),
        sentence=f"other processes use {others:.1f} of {seen.machine.processors} cores: the watched threads wait "
        f"for one in {queued:.0%} of the time in which they could run",
        evidence=(_works(seen), f"the watched processes use {seen.cpu:.1f} cores, {seen.free_cores:.1f} are free"),
        change="end or move the other work, or give this one cores of its own (taskset, cpuset)",
    )


def steal(seen: WatchSummary) -> Cause | None:
    """The hypervisor runs other virtual machines on the same cores."""
    share = clip((seen.machine.steal or 0.0) / seen.machine.processors)
    if share < 0.1:
        return None
    return Cause(
        name="steal",
        share=share if not seen.gpus else min(share, seen.idle),
        sentence=f"the hypervisor takes {share:.0%} of the cores away for other virtual machines",
        evidence=(_works(seen),),
        change="another machine type, or one with cores of its own",
    )


def oversubscription(seen: WatchSummary) -> Cause | None:
    """More compute threads than cores."""
    limit, queued = seen.machine.cores, seen.queued or 0.0
    if queued < 0.2 or seen.runnable < 1.25 * limit + 0.25 or (seen.machine.others or 0.0) > 0.25 * limit:
        return None
    return Cause(
        name="oversubscription",
        share=0.5 * seen.working * queued if not seen.gpus else seen.idle * queued,
        sentence=f"{seen.runnable:.1f} threads of the training could run at a time on {limit} cores: they wait for one "
        f"another {queued:.0%} of the time",
        evidence=(
            _works(seen),
            f"main threads are pushed off their core {seen.involuntary_switches:.0f} times a second",
        ),
        change="fewer compute threads (OMP_NUM_THREADS), or fewer processes on this machine",
    )


def communication(seen: WatchSummary) -> Cause | None:
    """All GPUs at 100 % at little power, and nothing else moves: kernels that wait for other ranks."""
    power = [gpu.power_watts / gpu.power_limit_watts for gpu in seen.gpus if gpu.power_watts and gpu.power_limit_watts]
    if not power or seen.working < 0.99 or max(power) > 0.35 or (seen.disk_read_bytes or 0) > 0:
        return None
    if any(one.active for one in (*seen.workers, *seen.helpers)):
        return None
    return Cause(
        name="communication",
        share=0.5,
        sentence=f"{_works(seen)} at {max(power):.0%} of its power, and no worker moves: its kernels seem to wait for "
        "other ranks",
        evidence=_waits(seen.main, *seen.workers[:1]),
        change="look at the other ranks: one that has ended or stands still holds all of them",
    )


def device_shared(seen: WatchSummary) -> Cause | None:
    """Others compute on the same GPU."""
    shared = ", ".join(f"GPU {gpu.index}: {gpu.others}" for gpu in seen.gpus if gpu.others)
    if not shared:
        return None
    return Cause(
        name="device_shared",
        share=0.1,
        sentence=f"other processes compute on the same GPU ({shared}); utilisation counts theirs as well",
        change="another GPU (CUDA_VISIBLE_DEVICES), or end them",
    )


# Causes for which what computes waits: it is fed too slowly, or its launches are slow.


def storage(seen: WatchSummary) -> Cause | None:
    """Whoever makes batches waits for files more than it works."""
    feeders = seen.feeders
    busy, disk = _mean_shares(feeders or (seen.main,))
    waited = seen.idle if feeders else disk
    if waited < _IDLE or disk < 0.2 or (feeders and disk < busy):
        return None
    who = f"{_crowd(feeders, seen)} {'waits' if len(feeders) == 1 else 'wait'}" if feeders else "its main thread waits"
    file = next((name for one in feeders or (seen.main,) for name in one.waits if "/" in name), "")
    from_disk, waiting = seen.disk_read_bytes, seen.machine.iowait or 0.0
    called = max(seen.read_bytes or 0.0, from_disk or 0.0)  # a call is counted when it returns
    evidence = [
        *_feeding(seen),
        *([f"asleep most often in {file}"] if file else []),
        *([] if from_disk is None else [f"{from_disk / 1e6:.1f} MB/s from disk, {called / 1e6:.1f} MB/s read"]),
        *([f"{waiting:.1f} {_of_cores(seen)} idle for I/O"] if waiting >= 0.05 else []),
        *([f"{seen.major_faults:.0f} page faults a second go to disk"] if seen.major_faults >= 10 else []),
    ]
    return Cause(
        name="storage",
        share=waited if feeders else min(waited, disk / max(disk + busy, 1e-9)),
        sentence=f"{_works(seen)}; meanwhile {who} for storage {disk:.0%} of the time",
        evidence=tuple(evidence),
        change="read larger pieces (pack the images into record files), from a faster disk or from memory",
    )


def decode(seen: WatchSummary) -> Cause | None:
    """What makes batches burns all the cores there are."""
    feeders = seen.feeders
    burnt, busy = sum(one.cpu for one in feeders), sum(one.busy for one in feeders)
    if seen.idle < _IDLE or not feeders or not seen.is_full or burnt < 0.25 * seen.machine.cores or busy < 0.5:
        return None
    if sum(one.disk for one in feeders) > busy:
        return None
    return Cause(
        name="decode",
        share=seen.idle * seen.own_part,
        sentence=f"{_works(seen)}; meanwhile {_crowd(feeders, seen)} burn {burnt:.1f} {_of_cores(seen)}: decoding or "
        "augmenting limits it (CPU-bound input)",
        evidence=(*_feeding(seen), *_waits(seen.main), f"{seen.free_cores:.1f} {_of_cores(seen)} free"),
        change="decode less (smaller images, packed at the size that is trained on), decode faster, or use more cores",
    )


def threads(seen: WatchSummary) -> Cause | None:
    """What makes batches works without pause while cores are free."""
    feeders = seen.feeders
    if seen.idle < _IDLE or not feeders or seen.is_full or seen.free_cores < 0.4:
        return None
    busiest, mean = max(one.busy for one in feeders), _mean_shares(feeders)[0]
    if mean < _BUSY and not (busiest >= _ONE_CORE and mean < 0.5):
        return None
    is_one = len(feeders) == 1 or mean < _BUSY
    who = "one of them" if is_one and len(feeders) > 1 else _crowd(feeders, seen)
    return Cause(
        name="threads",
        share=seen.idle,
        sentence=f"{_works(seen)}; {who} {'works' if is_one else 'work'} {busiest if is_one else mean:.0%} of the time "
        f"while {seen.free_cores:.1f} {_of_cores(seen)} are free: too few workers",
        evidence=(*_feeding(seen), *_waits(seen.main)),
        change="more workers" + ("" if seen.workers else " (processes, where Python's lock keeps threads waiting)"),
    )


def single_thread(seen: WatchSummary) -> Cause | None:
    """One thread burns one core and nothing else works."""
    rest = sum(one.busy for one in (*seen.helpers, *seen.workers))
    if seen.main.busy < _ONE_CORE or rest > 0.6 or seen.free_cores < 0.5:
        return None
    if seen.gpus and (seen.idle < _IDLE or seen.rhythm is None):
        return None
    makes = "makes the batches as well (no workers)" if seen.gpus else "does all the work"
    change = "workers for the input"
    if not seen.gpus:
        change = f"{'' if seen.workers else 'workers for the input, or '}more compute threads (OMP_NUM_THREADS)"
    return Cause(
        name="single_thread",
        share=seen.idle if seen.gpus else clip(seen.free_cores / seen.machine.cores),
        sentence=f"{_works(seen)}; the main thread burns one core and {makes}, {seen.free_cores:.1f} {_of_cores(seen)} "
        "are free",
        evidence=(f"main thread on a processor {seen.main.cpu:.0%} of the time", *_feeding(seen)),
        change=change,
    )


def interpreter(seen: WatchSummary) -> Cause | None:
    """Several threads share one core's worth of time while cores are free: a lock, in Python the interpreter's."""
    active = [one for one in seen.helpers if one.active]
    together = sum(one.cpu for one in active) + seen.main.cpu
    if seen.workers or len(active) < 2 or not 0.8 <= together <= 1.2 or seen.free_cores < 0.5:
        return None
    if max(one.busy for one in active) >= _ONE_CORE or (seen.gpus and seen.idle < _IDLE):
        return None
    lock = "the interpreter's lock" if seen.is_python else "a lock"
    return Cause(
        name="interpreter",
        share=seen.idle if seen.gpus else 0.5,
        sentence=f"{_works(seen)}; {len(active) + 1} threads share {together:.1f} {_of_cores(seen)}: {lock} lets one "
        "run at a time",
        evidence=(*_feeding(seen), *_waits(*active[:2])),
        change="worker processes instead of threads, or code that releases the lock",
    )


def launch(seen: WatchSummary) -> Cause | None:
    """The main thread burns one core, the GPU is low without any rhythm, nobody else works hard."""
    hard = [one for one in (*seen.workers, *seen.helpers) if one.busy >= 0.5]
    if not seen.gpus or seen.rhythm is not None or seen.idle < _IDLE or seen.main.busy < _ONE_CORE or len(hard) > 1:
        return None
    return Cause(
        name="launch",
        share=seen.idle,
        sentence=f"{_works(seen)}, without pauses; the main thread burns one core: launching, or Python, limits it",
        evidence=(f"main thread on a processor {seen.main.cpu:.0%} of the time", *_feeding(seen)),
        change="a larger batch, compilation or CUDA graphs, and fewer Python steps and .item() calls an update",
    )


def epoch_gap(seen: WatchSummary) -> Cause | None:
    """Workers are started anew again and again, and what computes waits until the first of their batches is there."""
    if seen.renewals < 2 or seen.idle_after_renewals < 0.03:
        return None
    return Cause(
        name="epoch_gap",
        share=seen.idle_after_renewals,
        sentence=f"{_crowd(seen.workers, seen)} ended and started anew about every {seen.seconds / seen.renewals:.2g} "
        f"s, and {_subject(seen)} waits for the first batch each time",
        evidence=(f"started anew {seen.renewals} times in {seen.seconds:.0f} s", _works(seen)),
        change="keep the workers from one epoch to the next (torch: persistent_workers=True)",
    )


def waiting(seen: WatchSummary) -> Cause | None:
    """What computes waits, and nobody that is seen works or reads."""
    others = seen.feeders or seen.workers
    busy = _mean_shares(others)[0] if others else 0.0
    disk = max((one.disk for one in others), default=seen.main.disk)
    unexplained = seen.idle * (1 - busy) - disk - seen.idle_after_renewals
    if unexplained < _IDLE or seen.main.busy >= _ONE_CORE or busy >= 0.5:
        return None
    waits = [pair for one in (seen.main, *others) for pair in one.waits.items()]
    is_network = sum(s for n, s in waits if n.endswith(" socket") or n in ("connect", "accept", "accept4")) >= 0.3
    if is_network:
        for_what = "the network or another process"
    elif seen.workers:
        for_what = f"{_crowd(seen.workers, seen)} that sleep{'s' * (len(seen.workers) == 1)} as well"
    else:
        for_what = "something that uses no processor here"
    return Cause(
        name="network" if is_network else "waiting",
        share=unexplained,
        sentence=f"{_works(seen)}, and waits for {for_what} in the rest: {seen.free_cores:.1f} {_of_cores(seen)} are "
        "free",
        evidence=(*_waits(seen.main), *_feeding(seen), *_waits(*others[:2])),
        change="look at what it sleeps in: a pause, a lock, a remote store, another rank",
    )


def compute(seen: WatchSummary) -> Cause | None:
    """What computes works nearly all the time."""
    if seen.idle >= _IDLE:
        return None
    name = "compute"
    if not seen.gpus and not seen.workers and seen.main.busy < 0.5 and seen.feeders:
        name = "busy"
        sentence = f"{_works(seen)}, in {_crowd(seen.feeders, seen)} beside the main one: computing or decoding, which "
        sentence += "cannot be told apart from outside"
        change = ""
    elif seen.gpus:
        sentence = f"{_works(seen)}: the input keeps up, the model or its communication is what takes the time"
        change = "a smaller number format or compilation; utilisation does not tell whether the kernels are good ones"
    else:
        sentence = f"{_works(seen)} on {seen.trainer.cpu:.1f} {_of_cores(seen)}: it computes, the input keeps up"
        change = "" if seen.is_full else "more compute threads, if the model has work for them"
    gpus = []
    for gpu in seen.gpus:
        power = "" if gpu.power_watts is None else f", {gpu.power_watts:.0f} W"
        limit = "" if gpu.power_limit_watts is None else f" of {gpu.power_limit_watts:.0f}"
        used = "" if gpu.memory_bytes is None else f", {gpu.memory_bytes / 1e9:.1f} GB in use"
        gpus.append(f"GPU {gpu.index}: {gpu.utilisation or 0:.0%} utilisation{power}{limit if power else ''}{used}")
    return Cause(name=name, share=0.0, sentence=sentence, evidence=(*gpus, *_feeding(seen)), change=change)


RULES: tuple[Callable[[WatchSummary], Cause | None], ...] = (
    *(stopped, hung, memory, quota, noisy_neighbour, steal, oversubscription, communication, device_shared),
    *(storage, decode, threads, single_thread, interpreter, launch, epoch_gap, waiting, compute),
)
