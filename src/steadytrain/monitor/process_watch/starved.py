"""Causes for which what computes waits: it is fed too slowly, or its launches are slow. Functions of what was seen."""

from __future__ import annotations

from steadytrain.monitor.process_watch.cause import (
    IDLE,
    Cause,
    cores,
    crowd,
    feeding,
    free,
    idle,
    is_full,
    own_part,
    subject,
    waits,
    works,
)
from steadytrain.monitor.process_watch.seen import Seen

_BUSY = 0.75
_ONE_CORE = 0.85


def storage(seen: Seen) -> Cause | None:
    """Whoever makes batches waits for files more than it works."""
    those = seen.feeders or (seen.main,)
    disk, busy = (sum(getattr(one, what) for one in those) / len(those) for what in ("disk", "busy"))
    waited = disk if those == (seen.main,) else idle(seen)
    if waited < IDLE or disk < 0.2 or (disk < busy and those != (seen.main,)):
        return None
    who = "its main thread waits" if those == (seen.main,) else f"{crowd(those, seen)} wait"
    who = who.replace("process wait", "process waits").replace("thread wait ", "thread waits ")
    file = next((name for one in those for name in one.waits if "/" in name), "")
    read, waiting = seen.disk_read_bytes, seen.machine.iowait or 0.0
    called = max(seen.read_bytes or 0.0, read or 0.0)  # a call is counted when it returns
    evidence = [
        *feeding(seen),
        *([f"asleep most often in {file}"] if file else []),
        *([] if read is None else [f"{read / 1e6:.1f} MB/s from disk, {called / 1e6:.1f} MB/s read"]),
        *([f"{waiting:.1f} {cores(seen)} idle for I/O"] if waiting >= 0.05 else []),
        *([f"{seen.major_faults:.0f} page faults a second go to disk"] if seen.major_faults >= 10 else []),
    ]
    return Cause(
        name="storage",
        share=min(waited, disk / max(disk + busy, 1e-9)) if those == (seen.main,) else waited,
        sentence=f"{works(seen)}; meanwhile {who} for storage {disk:.0%} of the time",
        evidence=tuple(evidence),
        change="read larger pieces (pack the images into record files), from a faster disk or from memory",
    )


def decode(seen: Seen) -> Cause | None:
    """What makes batches burns all the cores there are."""
    those = seen.feeders
    burnt, busy = sum(one.cpu for one in those), sum(one.busy for one in those)
    if idle(seen) < IDLE or not those or not is_full(seen) or burnt < 0.25 * seen.machine.cores or busy < 0.5:
        return None
    if sum(one.disk for one in those) > busy:
        return None
    return Cause(
        name="decode",
        share=idle(seen) * own_part(seen),
        sentence=f"{works(seen)}; meanwhile {crowd(those, seen)} burn {burnt:.1f} {cores(seen)}: decoding or "
        "augmenting limits it (CPU-bound input)",
        evidence=(*feeding(seen), *waits(seen.main), f"{free(seen):.1f} {cores(seen)} free"),
        change="decode less (smaller images, packed at the size that is trained on), decode faster, or use more cores",
    )


def threads(seen: Seen) -> Cause | None:
    """What makes batches works without pause while cores are free."""
    those = seen.feeders
    if idle(seen) < IDLE or not those or is_full(seen) or free(seen) < 0.4:
        return None
    busiest = max(one.busy for one in those)
    mean = sum(one.busy for one in those) / len(those)
    if mean < _BUSY and not (busiest >= _ONE_CORE and mean < 0.5):
        return None
    one = len(those) == 1 or mean < _BUSY
    who = "one of them" if one and len(those) > 1 else crowd(those, seen)
    return Cause(
        name="threads",
        share=idle(seen),
        sentence=f"{works(seen)}; {who} {'works' if one else 'work'} {busiest if one else mean:.0%} of the time while "
        f"{free(seen):.1f} {cores(seen)} are free: too few workers",
        evidence=(*feeding(seen), *waits(seen.main)),
        change="more workers" + ("" if seen.workers else " (processes, where Python's lock keeps threads waiting)"),
    )


def interpreter(seen: Seen) -> Cause | None:
    """Several threads share one core's worth of time while cores are free: a lock, in Python the interpreter's."""
    those = [one for one in seen.helpers if one.active]
    together = sum(one.cpu for one in those) + seen.main.cpu
    if seen.workers or len(those) < 2 or not 0.8 <= together <= 1.2 or free(seen) < 0.5:
        return None
    if max(one.busy for one in those) >= _ONE_CORE or (seen.gpus and idle(seen) < IDLE):
        return None
    lock = "the interpreter's lock" if seen.is_python else "a lock"
    return Cause(
        name="interpreter",
        share=idle(seen) if seen.gpus else 0.5,
        sentence=f"{works(seen)}; {len(those) + 1} threads share {together:.1f} {cores(seen)}: {lock} lets one run at "
        "a time",
        evidence=(*feeding(seen), *(line for one in those[:2] for line in waits(one))),
        change="worker processes instead of threads, or code that releases the lock",
    )


def single_thread(seen: Seen) -> Cause | None:
    """One thread burns one core and nothing else works."""
    rest = sum(one.busy for one in (*seen.helpers, *seen.workers))
    if seen.main.busy < _ONE_CORE or rest > 0.6 or free(seen) < 0.5:
        return None
    if seen.gpus and (idle(seen) < IDLE or seen.rhythm is None):
        return None
    makes = "makes the batches as well (no workers)" if seen.gpus else "does all the work"
    return Cause(
        name="single_thread",
        share=idle(seen) if seen.gpus else free(seen) / seen.machine.cores,
        sentence=f"{works(seen)}; the main thread burns one core and {makes}, {free(seen):.1f} {cores(seen)} are free",
        evidence=(f"main thread on a processor {seen.main.cpu:.0%} of the time", *feeding(seen)),
        change="workers for the input"
        if seen.gpus
        else ("" if seen.workers else "workers for the input, or ") + "more compute threads (OMP_NUM_THREADS)",
    )


def launch(seen: Seen) -> Cause | None:
    """The main thread burns one core, the GPU is low without any rhythm, nobody else works hard."""
    hard = [one for one in (*seen.workers, *seen.helpers) if one.busy >= 0.5]
    if not seen.gpus or seen.rhythm is not None or idle(seen) < IDLE or seen.main.busy < _ONE_CORE or len(hard) > 1:
        return None
    return Cause(
        name="launch",
        share=idle(seen),
        sentence=f"{works(seen)}, without pauses; the main thread burns one core: launching, or Python, limits it",
        evidence=(f"main thread on a processor {seen.main.cpu:.0%} of the time", *feeding(seen)),
        change="a larger batch, compilation or CUDA graphs, and fewer Python steps and .item() calls an update",
    )


def waiting(seen: Seen) -> Cause | None:
    """What computes waits, and nobody that is seen works or reads."""
    those = seen.feeders or seen.workers
    busy = sum(one.busy for one in those) / len(those) if those else 0.0
    disk = max((one.disk for one in those), default=seen.main.disk)
    unexplained = idle(seen) * (1 - busy) - disk - seen.idle_after_renewals
    if unexplained < IDLE or seen.main.busy >= _ONE_CORE or busy >= 0.5:
        return None
    network = sum(share for one in (seen.main, *those) for name, share in one.waits.items() if _is_network(name))
    if network >= 0.3:
        for_what = "the network or another process"
    elif seen.workers:
        for_what = f"{crowd(seen.workers, seen)} that sleep{'s' * (len(seen.workers) == 1)} as well"
    else:
        for_what = "something that uses no processor here"
    return Cause(
        name="network" if network >= 0.3 else "waiting",
        share=unexplained,
        sentence=f"{works(seen)}, and waits for {for_what} in the rest: {free(seen):.1f} {cores(seen)} are free",
        evidence=(*waits(seen.main), *feeding(seen), *(line for one in those[:2] for line in waits(one))),
        change="look at what it sleeps in: a pause, a lock, a remote store, another rank",
    )


def _is_network(name: str) -> bool:
    return name.endswith(" socket") or name in ("connect", "accept", "accept4")


def epoch_gap(seen: Seen) -> Cause | None:
    """Workers are started anew again and again, and what computes waits until the first of their batches is there."""
    if seen.renewals < 2 or seen.idle_after_renewals < 0.03:
        return None
    every = seen.seconds / seen.renewals
    return Cause(
        name="epoch_gap",
        share=seen.idle_after_renewals,
        sentence=f"{crowd(seen.workers, seen)} ended and started anew about every {every:.2g} s, and {subject(seen)} "
        "waits for the first batch each time",
        evidence=(f"started anew {seen.renewals} times in {seen.seconds:.0f} s", works(seen)),
        change="keep the workers from one epoch to the next (torch: persistent_workers=True)",
    )


def compute(seen: Seen) -> Cause | None:
    """What computes works nearly all the time."""
    if idle(seen) >= IDLE:
        return None
    name = "compute"
    if not seen.gpus and not seen.workers and seen.main.busy < 0.5 and seen.feeders:
        name = "busy"
        sentence = f"{works(seen)}, in {crowd(seen.feeders, seen)} beside the main one: computing or decoding, which "
        sentence += "cannot be told apart from outside"
        change = ""
    elif seen.gpus:
        sentence = f"{works(seen)}: the input keeps up, the model or its communication is what takes the time"
        change = "a smaller number format or compilation; utilisation does not tell whether the kernels are good ones"
    else:
        sentence = f"{works(seen)} on {seen.trainer.cpu:.1f} {cores(seen)}: it computes, the input keeps up"
        change = "" if is_full(seen) else "more compute threads, if the model has work for them"
    return Cause(name=name, share=0.0, sentence=sentence, evidence=(*_gpus(seen), *feeding(seen)), change=change)


def _gpus(seen: Seen) -> list[str]:
    told = []
    for gpu in seen.gpus:
        power = "" if gpu.power_watts is None else f", {gpu.power_watts:.0f} W"
        limit = "" if gpu.power_limit_watts is None else f" of {gpu.power_limit_watts:.0f}"
        memory = "" if gpu.memory_bytes is None else f", {gpu.memory_bytes / 1e9:.1f} GB in use"
        told.append(f"GPU {gpu.index}: {gpu.utilisation or 0:.0%} utilisation{power}{limit if power else ''}{memory}")
    return told


ALL = (storage, decode, threads, single_thread, interpreter, launch, epoch_gap, waiting, compute)
