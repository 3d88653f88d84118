"""A cause that fits what was seen, and the words that all of them use."""

from __future__ import annotations

from dataclasses import dataclass

from steadytrain.monitor.process_watch.actor import Actor
from steadytrain.monitor.process_watch.seen import Seen

IDLE = 0.15
"""Of the time: where what computes waits for less, nothing is looked for."""


@dataclass(frozen=True, kw_only=True)
class Cause:
    """``share``: of the time that this takes from what computes, as far as it can be told from outside.

    ``change``: what to do about it; empty where there is nothing.
    """

    name: str
    share: float
    sentence: str
    evidence: tuple[str, ...] = ()
    change: str = ""


def subject(seen: Seen) -> str:
    """What computes."""
    if not seen.gpus:
        return "the training process" if seen.trainers == 1 else f"each of the {seen.trainers} training processes"
    return "the GPU" if len(seen.gpus) == 1 else f"each of the {len(seen.gpus)} GPUs"


def works(seen: Seen) -> str:
    """``the GPU works 60 % of each 1.8 s period``, or of the time where it keeps no period."""
    if seen.rhythm is not None:
        return f"{subject(seen)} works {seen.rhythm.duty:.0%} of each {seen.rhythm.period_seconds:.2g} s period"
    return f"{subject(seen)} works {seen.working:.0%} of the time"


def idle(seen: Seen) -> float:
    """Share of the time in which what computes does not work."""
    return max(0.0, 1.0 - seen.working)


def free(seen: Seen) -> float:
    """Cores that nobody uses and that the watched processes may use."""
    machine = seen.machine
    unused = (machine.idle or 0.0) + (machine.iowait or 0.0)
    return max(0.0, unused if machine.quota is None else min(unused, machine.quota - seen.cpu))


def is_full(seen: Seen) -> bool:
    """Whether hardly a core is free."""
    return seen.machine.idle is not None and free(seen) <= max(0.1 * seen.machine.cores, 0.15)


def own_part(seen: Seen) -> float:
    """The watched processes' part of the processor time that is used."""
    return seen.cpu / max(1e-9, seen.cpu + (seen.machine.others or 0.0))


def cores(seen: Seen) -> str:
    """``of 8 cores``."""
    return f"of {seen.machine.cores} {'core' if seen.machine.cores == 1 else 'cores'}"


def crowd(actors: tuple[Actor, ...], seen: Seen) -> str:
    """``8 worker processes``, ``one thread``."""
    kind = "worker process" if seen.workers else "thread"
    more = "worker processes" if seen.workers else "threads"
    return f"one {kind}" if len(actors) == 1 else f"{len(actors)} {more}"


def waits(actor: Actor) -> tuple[str, ...]:
    """What an actor sleeps in, where it does so for a tenth of the time."""
    told = sorted(actor.waits.items(), key=lambda pair: -pair[1])
    named = [f"{name} {share:.0%}" for name, share in told[:3] if share >= 0.1]
    return (f"{actor.label} sleeps in: {', '.join(named)} of the time",) if named else ()


def feeding(seen: Seen) -> tuple[str, ...]:
    """What those that make batches do: on a processor, waiting for files, asleep; and in either half of the rhythm."""
    those = seen.feeders
    if not those:
        return ()
    busy, disk = (sum(getattr(one, what) for one in those) / len(those) for what in ("busy", "disk"))
    told = [
        f"{crowd(those, seen)}: {sum(one.cpu for one in those):.1f} {cores(seen)}; each works, or could, "
        f"{busy:.0%} of the time and waits for files {disk:.0%}"
    ]
    if seen.rhythm and seen.busy_while_low is not None and seen.busy_while_high is not None:
        told.append(f"they burn {seen.busy_while_low:.1f} cores while it is low, {seen.busy_while_high:.1f} while high")
    return tuple(told)
