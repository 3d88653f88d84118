"""Causes in the loop's thread during an update: whose code it is in, what it waits for, and who takes its processor.

Time of that thread is either run, queued for a processor, or waited. The kernel counts the first two exactly; looks at
the thread tell what it waits for and where (:class:`~steadytrain.events.ThreadStats`). What looks cannot tell apart,
Python code that runs from code that waits for a lock, the exact sums do: what is left of the waiting is for locks.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from steadytrain.config.phases import parse_train
from steadytrain.events import Ceilings, StepMeasured, ThreadStats
from steadytrain.format import count, duration, percent
from steadytrain.monitor.evidence import BESIDE, Evidence, PartTimes
from steadytrain.monitor.ledger import PASSES
from steadytrain.monitor.rules.cause import (
    LEAST,
    OF_FEED,
    OF_UPDATES,
    REDUCE_THREAD,
    STOP_OTHERS,
    Cause,
    VerdictRule,
    clip,
)

COMPUTING = ("transfer", "host", "forward", "backward", "optimizer", "update")
BATCHES = ("input", "epoch_gap", "communication")
KNOWN = ("sleeps", "waits", "disk", "computing threads")
THROTTLED = 0.03  # share of the time: where a quota holds the process back for longer, it is what bounds it
AT_WORK = 0.1  # share of a core: another Python thread that uses more is one to speak of
EXPLAINED = 2 / 3  # share of what updates take too long: where the causes explain less, the rest is told first
MUCH_LONGER = 0.25  # share of an update: what it has to take longer than alone, on a machine that is never quite still
LEAST_UNEXPLAINED = 0.1  # share of the time
RAN = 0.9  # share of an update: a training thread that was on a processor for so long waited for nothing
ENOUGH = 0.05  # share of the images: updates that are fewer say little of how long others take
ALIKE = 0.5  # of what an update takes longer: each of its larger parts does at least so much, where it is the processor
WEIGHTY = 0.1  # share of an update: a part that is large enough to be timed
EXPLAIN = {
    *("model_waits", "host_code", "busy_thread", "noisy_neighbour", "threads", "decode", "augment", "gather"),
    *("affinity", "growth", "quota", "oversubscription", "compute_threads", "memory", "allocator", "recompile"),
    *("device_throttled", "device_shared", "sync"),
}
"""Causes that make an update take longer than the same passes alone."""
# Of looks during a backward pass: that find Python's lock kept where nothing is wrong, and beyond that where hooks run.
USUALLY_HELD, HELD_BY_HOOKS = 0.25, 0.15
LEAST_CODE = 0.05  # share of the time: lines of a network that call torch run Python as well, and stay below it


@dataclass(frozen=True, kw_only=True)
class LoopTime:
    """Shares of the run's wall time that the loop's thread spends in updates, without what it waits for batches.

    Args:
        passes: all of it.
        queued: waiting for a processor: itself, or a computing thread that it waits for.
        ran: on a processor: itself, or a computing thread where that runs less.
        waits: place -> waiting in code of others: asleep, for a lock, for a file.
        runs: place -> running code of others, and nothing of torch.
        lock: waiting for Python's lock, which another thread of this process holds; in whatever the loop does.
        unknown: waiting, and nothing tells for what.
        optimizer: of ``waits`` and ``runs``, what lies in the optimizer's part of updates.
    """

    passes: float
    queued: float
    ran: float
    waits: Mapping[str, float]
    runs: Mapping[str, float]
    lock: float
    unknown: float
    optimizer: float

    @property
    def foreign(self) -> float:
        """Share of foreign code, and of waits for a lock that it holds."""
        return sum(self.waits.values()) + sum(self.runs.values()) + self.lock


def busy_thread(evidence: Evidence) -> Mapping[str, Any] | None:
    """Return the other Python thread of this process that uses a processor most, if one does."""
    threads = evidence.newest(ThreadStats)
    if threads is None or not threads.others or threads.seconds <= 0:
        return None
    busiest = max(threads.others, key=lambda thread: float(thread["ran"]))
    return busiest if busiest["ran"] >= AT_WORK * threads.seconds else None


def loop_time(evidence: Evidence) -> LoopTime | None:
    """Return what the loop's thread does in updates; None where the run was not looked at, or made no updates."""
    threads, passes = evidence.newest(ThreadStats), evidence.ledger.share(*PASSES, "optimizer")
    if not evidence.on_cpu:  # where a device computes, the host's time counts while the device waits for it
        passes = evidence.ledger.share("host", "transfer")
    if threads is None:
        return None
    updating = [threads.loop[bucket] for bucket in (*COMPUTING, *BATCHES) if bucket in threads.loop]
    total = sum(at["seconds"] for at in updating)
    ran, queued = sum(at.get("ran", 0.0) for at in updating), sum(at.get("queued", 0.0) for at in updating)
    computing = sum(threads.loop[bucket]["seconds"] for bucket in COMPUTING if bucket in threads.loop)
    if computing <= 0 or passes <= 0:
        return None
    by_what: defaultdict[str, float] = defaultdict(float)
    waits: defaultdict[str, float] = defaultdict(float)
    python: defaultdict[str, float] = defaultdict(float)
    runs: defaultdict[str, float] = defaultdict(float)
    optimizer, is_kept = 0.0, busy_thread(evidence) is not None
    for seen in threads.places:
        bucket, activity, place, seconds = seen["bucket"], seen["what"], seen["place"], float(seen["seconds"])
        if bucket in BATCHES and activity not in ("computes", "runs"):
            by_what["batches"] += seconds
        elif bucket in COMPUTING:
            if activity == "holds" and not evidence.on_cpu:
                activity = "computes"  # it launches, and takes the lock back before a look can have it
            elif activity == "holds" and not place and bucket == "backward":
                # It runs without the lock there, and another of our threads may have had it for a moment.
                often = seconds - USUALLY_HELD * threads.loop[bucket]["seconds"]
                is_hook = not is_kept and often > HELD_BY_HOOKS * threads.loop[bucket]["seconds"]
                activity, place = ("holds", "a hook or a backward() in Python") if is_hook else ("computes", "")
                seconds = often if is_hook else seconds
            if activity == "holds":
                # Whoever is queued in the midst of a line keeps the lock meanwhile: that time is the neighbours'.
                seconds *= 1 - min(1.0, queued / max(total, 1e-9))
                activity, place = ("python", "") if is_kept else ("runs", place or f"Python code of the {bucket} part")
            by_what[activity] += seconds
            kind = {"python": python, "runs": runs}.get(activity, waits if activity in KNOWN[:3] else None)
            if kind is not None:
                kind[place] += seconds
                optimizer += seconds if place and bucket == "optimizer" else 0.0
    scale, is_counted = passes / computing, ran > 0 or queued > 0
    blocked = max(0.0, total - ran - queued - by_what["batches"]) if is_counted else 0.0
    locked = max(0.0, blocked - sum(by_what[activity] for activity in KNOWN))
    if (machine := evidence.machine) is not None and (machine.throttled_seconds or 0.0) > THROTTLED * machine.seconds:
        locked = 0.0  # a quota stops threads, and the kernel counts that nowhere
    part = min(1.0, locked / by_what["python"]) if by_what["python"] > 0 else 0.0
    for place, seconds in python.items():
        runs[place] += seconds * (1 - part)
        if not is_kept:
            waits[place] += seconds * part
    # A pass waits for the last of its threads: it is late where one or the other is queued, each by itself.
    late = threads.compute["queued"] / computing if threads.compute is not None else 0.0
    queueing = 1 - (1 - min(1.0, queued / computing)) * (1 - min(1.0, late))
    on_processor = sum(threads.loop[bucket].get("ran", 0.0) for bucket in COMPUTING if bucket in threads.loop)
    least = (
        min(on_processor, threads.compute["ran"])
        if threads.compute is not None and threads.compute["ran"] > 0
        else on_processor
    )
    lock = by_what["python"] * part * scale if is_kept else 0.0
    for bucket in ("evaluation", "logging", "checkpoint", "startup") if is_kept else ():
        lock += _locked(evidence, bucket)
    runs.pop("", None)
    unknown = waits.pop("", 0.0)
    return LoopTime(
        passes=passes,
        queued=passes * queueing,
        ran=passes * min(1.0, least / computing) if is_counted else passes,
        waits={place: seconds * scale for place, seconds in waits.items()},
        runs={place: seconds * scale for place, seconds in runs.items()},
        lock=lock,
        unknown=unknown * scale,
        optimizer=optimizer * scale,
    )


def disturbed(evidence: Evidence) -> float:
    """Return the share of an update in which its threads wait for a core: single passes' timings prove little then."""
    loop = loop_time(evidence)
    return 0.0 if loop is None else loop.queued / loop.passes


def _locked(evidence: Evidence, bucket: str) -> float:
    """Return the share of the run that the loop's thread waits for a lock in a bucket that is no update."""
    threads = evidence.newest(ThreadStats)
    if threads is None or (totals := threads.loop.get(bucket)) is None or totals["seconds"] <= 0:
        return 0.0
    seen = [place for place in threads.places if place["bucket"] == bucket and place["what"] in ("python", "holds")]
    waited = totals["seconds"] - totals.get("ran", 0.0) - totals.get("queued", 0.0)
    locked = min(max(0.0, waited), sum(float(place["seconds"]) for place in seen))
    return evidence.ledger.share(bucket) * min(1.0, locked / totals["seconds"])


def rivals(evidence: Evidence) -> dict[str, float]:
    """Return the cores that ``others`` take from this process, and a busy ``thread`` of its own beside the training."""
    machine, thread = evidence.whole or evidence.machine, busy_thread(evidence)
    others = (machine.others or 0.0) if machine is not None else 0.0
    threads = evidence.newest(ThreadStats)
    seconds = threads.seconds if threads is not None else 0.0
    return {"others": others, "thread": float(thread["ran"]) / seconds if thread else 0.0}


def host_code(evidence: Evidence) -> Iterator[Cause]:
    """Find foreign code that holds the loop up: it sleeps, runs, or holds Python's lock."""
    loop, threads = loop_time(evidence), evidence.newest(ThreadStats)
    if loop is None or threads is None or threads.looks <= 0:
        return
    looks = count(threads.looks, "look")
    figures = [f"{looks} at the training thread, one in {duration(threads.seconds / threads.looks)}"]
    waits, runs = sum(loop.waits.values()), sum(loop.runs.values())
    places = {place: loop.waits.get(place, 0.0) + loop.runs.get(place, 0.0) for place in (*loop.waits, *loop.runs)}
    # Where code waits, it also runs a little; where it only runs, lines that call torch are among it.
    chance = 2 * math.sqrt(LEAST_CODE * (1 - LEAST_CODE) / threads.looks)  # two standard deviations of so few looks
    # Whoever loses its core in between keeps the lock longer.
    least = (LEAST_CODE + chance) * (1 + 2 * loop.queued / loop.passes)
    share = clip(waits + (runs if runs >= least or waits > runs else 0.0))
    if share > 0:
        where = max(places, key=lambda place: places[place])
        ranked = sorted(places.items(), key=lambda item: -item[1])[:3]
        figures[:0] = [f"{place}: {percent(part)} of the time" for place, part in ranked if part >= LEAST / 3]
        mostly = "mostly" if places[where] >= (waits + runs) / 2 else "the most of it"
        if is_wait := waits >= runs:
            sentence = f"Code on the training thread waits for {percent(share)} of the time, {mostly} in {where}."
            change = f"remove the wait (a sleep, a lock, a file, a request) from {where}"
        else:
            sentence = f"Code outside of torch runs on the training thread for {percent(share)} of the time,"
            sentence += f" {mostly} in {where}."
            change = f"make {where} faster, call it less often, or move it to another process"
        yield Cause(
            name="model_waits" if is_wait else "host_code",
            share=share,
            sentence=sentence,
            evidence=tuple(figures),
            change=change,
            saves=share,
        )
    thread = busy_thread(evidence)
    if thread is not None:
        busy = rivals(evidence)
        queued = loop.queued * busy["thread"] / max(busy["thread"] + busy["others"], 1e-9)
        # It keeps nothing from others while it does not run.
        share = min(clip(loop.lock + queued), busy["thread"])
        kept = [what for what, part in (("Python's lock", loop.lock), ("a core", queued)) if part >= LEAST / 3]
        lock = threads.lock_seconds / max(1, threads.looks)
        at = f", in {thread['place']}," if thread["place"] else ""
        yield Cause(
            name="busy_thread",
            share=share,
            sentence=f"Thread {thread['name']} of this process{at} keeps {' or '.join(kept)} from the training "
            f"thread for {percent(share)} of the time.",
            evidence=(
                f"it used a processor {percent(thread['ran'] / threads.seconds)} of the time",
                f"the training thread waited for a lock {percent(loop.lock)} of the time",
                f"a sample waited {duration(lock)} for Python's lock on average",
            ),
            change=REDUCE_THREAD,
            saves=share,
        )


def unexplained(evidence: Evidence, causes: Sequence[Cause]) -> list[Cause]:
    """Return the causes with one more for time in updates that none explains: more than the same passes take alone.

    Where updates take longer while another thread or other processes are at work, it is put down to those: they share
    Python's lock, or caches and memory, where nobody is seen to wait. Else it is ``unexplained``, and so are waits for
    which there is no place.
    """
    loop, mean = loop_time(evidence), evidence.mean_seconds(*PASSES, "optimizer")
    references = dict(_references(evidence))
    thread, meanwhile = busy_thread(evidence), _meanwhile(evidence)
    # Others beside whom updates take no longer explain nothing.
    are_others = rivals(evidence)["others"] >= BESIDE * evidence.cores and meanwhile >= LEAST_UNEXPLAINED
    is_beside = thread is not None or are_others
    # Each was timed in a moment of its own, which may have been a lucky one: of three, two have to say so where nobody
    # is known who could have made the others late.
    ranked = sorted(references, key=lambda name: references[name])
    name = ranked[1 if len(ranked) > 2 and not is_beside else 0] if ranked else ""
    excess, passes = 0.0, evidence.ledger.share(*PASSES, "optimizer")
    if name and mean > 0 and evidence.on_cpu:
        excess = passes * max(0.0, 1 - references[name] / mean)
    # Waiting for a processor is explained, even where nothing can be done about what has it.
    queued = 0.0 if loop is None else loop.queued
    explained = max(queued, sum(cause.share for cause in causes if cause.name in EXPLAIN))
    share = 0.0
    if excess >= MUCH_LONGER * passes and explained < EXPLAINED * excess:
        share = excess - explained
    unknown = 0.0 if loop is None or not evidence.on_cpu or evidence.takes_turns else loop.unknown
    if is_beside and thread is None:
        share = min(share, meanwhile)
    if name and (share < LEAST_UNEXPLAINED or not is_beside) and slower_stretch(evidence) is not None:
        share, is_beside = min(share, passes * _never_as_fast(evidence, references[name])), False
    if max(share, unknown) < LEAST_UNEXPLAINED:  # threads that take turns wait for each other
        return list(causes)
    figures, is_longer = [], excess >= MUCH_LONGER * passes
    if is_longer:
        figures.append(f"an update takes {duration(mean)}, {name} {duration(references[name])}")
    figures.append(f"the causes that were found explain {percent(explained)} of the time")
    threads, machine = evidence.newest(ThreadStats), evidence.whole or evidence.machine
    if share > unknown and is_beside:
        return _beside(evidence, share, causes, figures)
    if loop is not None and threads is not None:
        figures.append(f"the training thread waited {percent(loop.unknown)} of the time, and nothing tells for what")
        if is_longer and loop.ran >= RAN * loop.passes:
            figures.append(
                f"it was on a processor {percent(loop.ran / loop.passes)} of an update: it did more, or the processor"
                " was slower (its clock, or other guests of this host)"
            )
        figures.append(f"a sample waited {duration(threads.lock_seconds / max(1, threads.looks))} for Python's lock")
        figures += [
            f"thread {other['name']} ran for {duration(other['ran'])}, in {other['place']}" for other in threads.others
        ]
    if machine is not None and machine.involuntary_switches is not None:
        figures.append(f"threads were preempted {machine.involuntary_switches:,.0f} times per second")
    if machine is not None and machine.minor_faults is not None:
        figures.append(f"{machine.minor_faults + (machine.major_faults or 0.0):,.0f} page faults per second")
    share = clip(max(share, unknown))
    cause = Cause(
        name="unexplained",
        share=share,
        sentence=f"{percent(share)} of the time is unexplained: "
        + ("updates take longer than they need" if is_longer else "the training thread waits")
        + ", and nothing that was measured says why.",
        evidence=tuple(figures),
        change="py-spy dump --pid PID while it runs, or steady watch -- and the training command",
    )
    return [*causes, cause]


def _meanwhile(evidence: Evidence) -> float:
    """Return the share by which updates took longer while other processes were at work than while they were not.

    It is compared within the run, where all else is the same; infinite where others were at work always, or never.
    """
    company = evidence.company
    (images, seconds), (images_beside, seconds_beside) = company.alone, company.beside
    if min(images, images_beside) < max(1.0, ENOUGH * (images + images_beside)) or seconds + seconds_beside <= 0:
        return math.inf
    longer = max(0.0, seconds_beside - images_beside * seconds / images)
    return evidence.ledger.share(*PASSES, "optimizer") * longer / (seconds + seconds_beside)


def slower_stretch(evidence: Evidence) -> tuple[PartTimes, PartTimes] | None:
    """Return the fastest and the slowest stretch of the run where between them the processor itself was slower.

    That is so where the training thread was on a processor all along and all larger parts of an update took longer
    alike. Code of the run, more work or a wait lengthens one part or another; a lower clock, or other guests of the
    host on the same core, lengthens them all, and no figure of this system tells of it.
    """
    loop, parts, recipe = loop_time(evidence), evidence.parts, evidence.recipe
    if loop is None or not evidence.on_cpu or loop.ran < RAN * loop.passes or not parts:
        return None
    if recipe.data.grow_size or parse_train(recipe.model.train).has_phases:
        return None  # larger images, or more layers that are trained, take longer
    fastest, slowest = (choose(parts, key=lambda part: sum(part.seconds.values())) for choose in (min, max))
    longer = sum(slowest.seconds.values()) >= (1 + MUCH_LONGER) * sum(fastest.seconds.values()) > 0
    return (fastest, slowest) if longer and steadiest_part(fastest, slowest) is None else None


def steadiest_part(before: PartTimes, after: PartTimes) -> str | None:
    """Return the larger part of an update that took longer least, later in the run; None where all did alike.

    A part that stays behind the rest is a clock: it tells how fast the processor was, whatever became of the others.
    """
    whole = sum(before.seconds.values())
    longer = {n: after.seconds[n] / s for n, s in before.seconds.items() if s >= WEIGHTY * whole and s > 0}
    name = min(longer, key=lambda name: longer[name], default="")
    rise = sum(after.seconds.values()) / max(whole, 1e-9) - 1
    return name if name and longer[name] - 1 < ALIKE * rise else None


def _never_as_fast(evidence: Evidence, reference: float) -> float:
    """Return the share of an update by which even the fastest ones take longer than ``reference``.

    The passes were measured in a moment of the run, on a processor whose speed swings by more than that share. The
    run's fastest updates (one in twenty) met it at its best as well, so only what they take longer is the run's own.
    """
    mean = evidence.mean_seconds(*PASSES, "optimizer")
    fastest = min(seconds for seconds in (evidence.updates.fast, evidence.updates.seconds[0], mean) if seconds > 0)
    return max(0.0, fastest - reference) / mean


def _beside(evidence: Evidence, share: float, causes: Sequence[Cause], figures: Sequence[str]) -> list[Cause]:
    """Put the excess of updates down to a busy thread of this process, or else to other processes."""
    thread, others = busy_thread(evidence), rivals(evidence)["others"]
    name = "busy_thread" if thread is not None else "noisy_neighbour"
    known = [cause for cause in causes if cause.name == name]
    share = clip(share + sum(cause.share for cause in known))
    costs = f"updates take longer meanwhile: that costs {percent(share)} of the time."
    if thread is not None:
        sentence = (
            f"Thread {thread['name']} of this process runs Python code at {thread['place'] or 'its work'}, and {costs}"
        )
        change = REDUCE_THREAD
    else:
        sentence = f"Other processes use {count(others, 'core')}, and {costs}"
        change = STOP_OTHERS
        figures = [*figures, "what is left to share are caches, memory, and cores with two hardware threads"]
    seen = [figure for cause in known for figure in cause.evidence]
    cause = Cause(name=name, share=share, sentence=sentence, evidence=(*figures, *seen), change=change, saves=share)
    return [*(other for other in causes if other.name != name), cause]


def _references(evidence: Evidence) -> Iterator[tuple[str, float]]:
    """Yield reference times of an update without its wait: how each was measured, seconds."""
    optimizer, machine = evidence.mean_seconds("optimizer"), evidence.started.machine
    measured, probed = evidence.newest(StepMeasured), evidence.newest(Ceilings)
    if measured is not None and measured.passes.get("full", 0.0) > 0:
        yield "measured alone", measured.passes["full"] + optimizer
    if probed is not None and probed.compute_images_per_second > 0:
        yield "in the probe", evidence.recipe.batch_size / probed.compute_images_per_second
    trials = machine.get("threads_seconds")
    alone = trials.get(str(evidence.compute_threads), 0.0) if isinstance(trials, Mapping) else 0.0
    if alone > 0:
        yield "alone before the run", alone * int(machine.get("micro_batches", 1) or 1) + optimizer
    if evidence.updates.fast > 0:
        yield "the fastest quarter", evidence.updates.fast


RULES = (
    VerdictRule(
        "host_code",
        host_code,
        explains={
            "model_waits": ("launch", "batch_size", "sync", "growth"),
            "host_code": ("launch", "batch_size", "growth"),
            "busy_thread": (*OF_FEED, *OF_UPDATES, "noisy_neighbour", "evaluation"),
        },
        slows={"model_waits": "updates", "host_code": "updates", "busy_thread": "all", "unexplained": "updates"},
    ),
)
