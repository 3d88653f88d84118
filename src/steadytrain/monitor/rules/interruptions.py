"""Interruptions of training: starts, restarts, compiling, evaluations, checkpoints, log lines."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from steadytrain.events import Compiled, ProbeProgress, ThreadStats
from steadytrain.format import count, duration, percent, size
from steadytrain.monitor.evidence import Evidence
from steadytrain.monitor.ledger import INPUT, STEADY
from steadytrain.monitor.rules.cause import LEAST, Cause, VerdictRule, clip
from steadytrain.monitor.rules.loader import nearer_advice
from steadytrain.monitor.rules.pace import is_throttled, mean_pace

USUAL_EVALUATION = 0.10  # share of the time: what an evaluation after each epoch may well take
WANTED = 0.05  # share of the time: what evaluations are to take afterwards
LONGEST_LINE = 0.1  # seconds that a log line may take, on any terminal
USUAL_MINUTES = 5.0  # minutes between two checkpoints
LONG_SECONDS = 5.0  # seconds to make data, model or state ready: that it takes as long is worth a word of its own
LEAST_SLOW = 1.0  # seconds that evaluations take beyond that, in all
LEAST_WAIT = 1.0  # seconds that a start waits, or runs code of others: less is in every start
SLOW_EVALUATION = 2.0  # times the forward passes of as many training images
SLOWEST_DISK = 1e5  # bytes a second
CROWDED, QUIET = 0.5, 0.1  # pressure of processors and of disks: waits of a start are for processes without a core
DISK_RATE = 50e6  # bytes a second of a slow disk
LEAST_SHOWN = 0.1  # seconds of a part that waited for a disk
STORAGE = ("storage", "storage_first_epoch", "storage_start")
OF_STORAGE = ("input", "startup")  # the parts of a run whose waits these have
UPDATE = ("forward", "backward", "optimizer", "update", "host")
SAVE_SECONDS = 1.0  # seconds that a checkpoint takes beyond that only where something is wrong
STARTING = {"data": "Opening the data", "model": "Building the model", "state": "Preparing the optimizer state"}


def evaluations(evidence: Evidence) -> Iterator[Cause]:
    """Find evaluations that are too long, or too frequent."""
    ledger, every = evidence.ledger, evidence.recipe.every
    share, (num, seconds) = ledger.share("evaluation"), evidence.evaluations
    if share < (LEAST if every.evaluate_epochs < 1 else USUAL_EVALUATION):
        return
    often = "each epoch" if every.evaluate_epochs == 1 else f"every {every.evaluate_epochs:g} epochs"
    figures = [f"{count(num, 'evaluation')} of {duration(seconds / num)}, one {often}"] if num else []
    if num_val := evidence.started.data.get("num_val"):
        figures.append(f"{num_val:,} images each")
    ratio = share / (1 - share) if share < 1 else 1e6
    rarer = max(1, math.ceil(every.evaluate_epochs * ratio * (1 - WANTED) / WANTED - 1e-9))  # whole epochs
    fewer = max(1, math.floor(num * every.evaluate_epochs / rarer))  # one always ends the run
    is_short = num <= 1 or fewer >= num
    images = float(evidence.started.data.get("num_val") or 0) * num
    forward = evidence.mean_seconds("forward", "host") / max(evidence.recipe.batch_size, 1)
    excess = seconds - SLOW_EVALUATION * images * forward
    is_slow = is_short and evidence.on_cpu and images > 0 and forward > 0 and excess >= LEAST_SLOW
    figures += [f"{place}: {duration(took)}" for place, took in _foreign_seconds(evidence, "evaluation").items()]
    if is_slow:
        share = clip(excess / ledger.wall_seconds)
        figures.append(f"the same images take {duration(images * forward)} in training's forward passes")
    short = f"The evaluation takes {percent(share)} of the time: the run is short, or the validation set is large."
    yield Cause(
        name="evaluation",
        share=share,
        sentence=f"Evaluation is slower than training's forward passes: that costs {percent(share)} of the time."
        if is_slow
        else short
        if is_short
        else f"{count(num, 'evaluation')} take {percent(share)} of the time.",
        evidence=tuple(figures),
        change="" if is_short else f"--set every.evaluate_epochs={rarer}",
        saves=0.0 if is_short else share * (1 - fewer / num),
        is_usual=num <= 1 and not is_slow,
    )


def checkpoints(evidence: Evidence) -> Iterator[Cause]:
    """Find checkpoints that are too long, or too frequent."""
    ledger, every = evidence.ledger, evidence.recipe.every
    share, (num, seconds) = ledger.share("checkpoint"), evidence.checkpoints
    if share < LEAST:
        return
    each = seconds / max(num, 1)
    minutes = max(USUAL_MINUTES, float(math.ceil(each / (WANTED / 2) / 60)))
    fewer = 1 + math.floor(ledger.wall_seconds * (1 - share) / 60 / minutes)
    is_rare = every.save_minutes is None and every.save_steps is None  # saving bounds its share by itself
    is_short = is_rare or fewer >= num
    often = f", every {count(every.save_steps, 'update')}" if every.save_steps and not is_short else ""
    changes = ["--set every.save_steps=none"] if every.save_steps else []
    if every.save_minutes is not None and (not changes or minutes != every.save_minutes):
        changes.append(f"--set every.save_minutes={minutes:g}")
    bytes_each = 12.0 * float(evidence.started.model.get("parameters") or 0)  # weights, and two moments of each
    is_slow = is_short and each >= SAVE_SECONDS + bytes_each / DISK_RATE
    why = ": the disk is slow" if is_slow else ", because the run is short" if is_short else ""
    yield Cause(
        name="checkpoint",
        share=share,
        sentence=f"Writing {count(max(num, 1), 'checkpoint')}{often} takes {percent(share)} of the time{why}.",
        evidence=(f"{count(num, 'checkpoint')} of {duration(each)}",) if num else (),
        change="" if is_short else " ".join(changes),
        saves=0.0 if is_short else share * (1 - fewer / num),
        is_usual=is_short and not is_slow,
    )


def log_lines(evidence: Evidence) -> Iterator[Cause]:
    """Find log lines that are too long, or too frequent, and a log on a slow disk."""
    ledger, every = evidence.ledger, evidence.recipe.every
    share, steps, seconds = ledger.share("logging"), max(ledger.steps, 1), ledger.seconds["logging"]
    if share < LEAST:
        return
    update = evidence.mean_seconds(*(bucket for bucket in STEADY if bucket != "logging"))
    if every.log_steps > 1 and seconds / steps * every.log_steps > max(LONGEST_LINE, 2 * update):
        # No line takes that long: all updates do.
        yield Cause(
            name="logging",
            share=share,
            sentence=f"Writing the event log takes {percent(share)} of the time: the run's folder is slow.",
            evidence=(f"{duration(seconds / steps)} at each update, even at those without a log line",),
            change="put the run's folder on a local disk: --run FOLDER",
            saves=share,
        )
        return
    each = seconds / max(1.0, ledger.steps / every.log_steps)
    seldom = every.log_steps * 2 ** math.ceil(math.log2(share / (LEAST / 3)))
    yield Cause(
        name="logging",
        share=share,
        sentence=f"Writing log lines and the code that reads the events delay the loop for {percent(share)} of the "
        "time.",
        evidence=(f"a line every {count(every.log_steps, 'update')}, {duration(each)} a line",),
        change=f"--set every.log_steps={seldom}",
        saves=share * (1 - every.log_steps / seldom),
    )


def stops(evidence: Evidence) -> Iterator[Cause]:
    """Find time in which the process was stopped, or its machine was."""
    machine, wall = evidence.machine, evidence.ledger.wall_seconds
    if evidence.stopped <= 0 or wall <= 0 or (machine is not None and is_throttled(machine)):
        return  # a quota stops threads as well, and the kernel counts that nowhere
    share = clip(evidence.stopped / wall)
    yield Cause(
        name="stopped",
        share=share,
        sentence=f"The process was stopped for {duration(evidence.stopped)}, {percent(share)} of the time: none of its"
        " threads ran or waited for anything.",
        evidence=("its threads used no processor meanwhile, queued for none, and waited for no lock",),
        change="find what stops it: Ctrl-Z, SIGSTOP, a frozen container (docker pause), a suspended machine",
        saves=share,
    )


def lost_work(evidence: Evidence) -> Iterator[Cause]:
    """Find work that was lost when an attempt was killed."""
    ledger, pace = evidence.ledger, mean_pace(evidence)
    share, seconds = ledger.share("lost"), ledger.seconds["lost"]
    if share < LEAST:
        return
    num, written = evidence.checkpoints
    seconds_per_save = written / num if num else 1.0
    restarts = max(evidence.attempts - 1, 1)
    is_early = evidence.lost_before_updates > seconds / 2  # no checkpoint holds a part of it
    work = (
        "an attempt ended before its first update"
        if is_early
        else "work after the last checkpoint before an interruption"
    )
    # Young's interval (J. W. Young, Comm. ACM 17, 1974, 530-531): what is written and what is lost cost the same.
    interval = math.sqrt(2 * seconds_per_save * ledger.wall_seconds / max(evidence.attempts, 1))
    left = min(1.0, interval * restarts / seconds)  # half of it is lost, and half of it written
    change, saves = "", 0.0
    if left <= 0.9 and pace is not None and not is_early:
        saves = share * (1 - left)
        change = f"--set every.save_minutes={interval / 60:.0f}"
        if interval < 120:
            change = f"--set every.save_steps={max(1, round(interval / pace.step))}"
    yield Cause(
        name="restart",
        share=share,
        sentence=f"{percent(share)} of the time was lost: {work}.",
        evidence=(
            f"{duration(seconds)} were repeated after {count(restarts, 'restart')}",
            *([f"a checkpoint takes {duration(seconds_per_save)} to write"] if num and not is_early else []),
        ),
        change=change,
        saves=saves,
    )


def starts(evidence: Evidence) -> Iterator[Cause]:
    """Find a slow start: one that waited for storage or something else, ran foreign code, or was long in itself."""
    ledger, started = evidence.ledger, evidence.started
    share, seconds, wall = ledger.share("startup"), ledger.seconds["startup"], ledger.wall_seconds
    if share < LEAST:
        return
    parts = {name: spent for name, spent in started.startup.items() if name != "compile"}
    ranked = sorted(parts.items(), key=lambda part: -part[1])
    figures = [f"{name}: {duration(spent)}" for name, spent in ranked]
    waits, usual = dict(started.startup_waits), {"process", "device"}
    if not evidence.on_cpu:  # the first pass on a GPU loads the kernels of CUDA's libraries, and waits for the GPU
        usual.add("state")
        waits.pop("state", None)
    reading, read = waits.pop("data", 0.0), started.startup_disk_bytes
    # Where few bytes come from a disk, it waited for others: for processes that pack, for another rank.
    pressure = {} if evidence.whole is None else evidence.whole.pressure
    is_crowded = pressure.get("cpu", 0.0) >= CROWDED and pressure.get("io", 1.0) <= QUIET
    is_reading = reading >= LEAST_WAIT and read is not None and read >= SLOWEST_DISK * reading and not is_crowded
    paged = sum(float(look["seconds"]) for look in _looks(evidence, "startup") if look["what"] == "disk")
    also = ""
    if is_reading and sum(waits.values()) >= LEAST_WAIT and paged >= sum(waits.values()) / 2:
        reading, waits, also = reading + sum(waits.values()), {}, " and the code"  # libraries come from a disk as well
    if is_reading:
        rate = f": {size(read or 0)} from a disk"
        if not also:
            rate += f", {size((read or 0) / max(parts.get('data', 0.0), reading))} per second"
        yield Cause(
            name="storage_start",
            share=clip(reading / wall),
            sentence=f"Reading the data{also} before the first update waited {duration(reading)} for storage,"
            f" {percent(clip(reading / wall))} of the time{rate}.",
            evidence=tuple(figures),
            change=nearer_advice(str(evidence.recipe.data.train)),
            saves=clip(reading / wall),
        )
        if also:
            return
    waiting, code = sum(waits.values()), _foreign_seconds(evidence, "startup")
    name, spent = next((part for part in ranked if part[0] not in usual), ("", 0.0))
    is_long = spent >= LONG_SECONDS and spent / wall >= LEAST
    if max(waiting, sum(code.values())) >= LEAST_WAIT or (is_long and not (name == "data" and is_reading)):
        cost = max(waiting, sum(code.values()), spent if is_long else 0.0)
        part = percent(clip(cost / wall))
        if waiting >= max(LEAST_WAIT, cost):
            longest = max(waits, key=lambda part: waits[part])
            doing = STARTING.get(longest, longest) if len(waits) == 1 else "Starting"
            sentence = f"{doing} waited {duration(waiting)}, {part} of the time, for a network, a disk or a lock."
        elif is_long and spent >= cost and ranked[0][0] != name:  # what every start has took longer
            cost, longest = seconds, f"{ranked[0][0]} {duration(ranked[0][1])}, {name} {duration(spent)}"
            sentence = f"Starting took {duration(seconds)}, {percent(share)} of the time: {longest}."
        elif is_long and spent >= cost:
            sentence = f"{STARTING.get(name, name)} took {duration(spent)}, {part} of the time."
        else:
            sentence = f"Code of the run took {duration(cost)} before the first update, {part} of the time."
        if LEAST_WAIT <= waiting < cost:
            figures.append(f"it waited {duration(waiting)} for a network, a disk or a lock")
        figures += [f"{place}: {duration(took)}" for place, took in code.items()]
        yield Cause(name="startup", share=clip(cost / wall), sentence=sentence, evidence=tuple(figures))
    else:
        sentence = f"Starting took {duration(seconds)}, {percent(share)} of the time, because the run is short."
        yield Cause(name="startup", share=share, sentence=sentence, evidence=tuple(figures), is_usual=True)


def probe(evidence: Evidence) -> Iterator[Cause]:
    """Say what a probe took: it is the run's own work."""
    progress, share = evidence.newest(ProbeProgress), evidence.ledger.share("probe")
    if progress is not None:
        sentence = f"The probe took {percent(share)} of the time: {progress.words}."
        yield Cause(name="probe", share=share, sentence=sentence, is_usual=True)


def _foreign_seconds(evidence: Evidence, bucket: str) -> dict[str, float]:
    """Return place -> seconds of foreign code, by samples of the training thread."""
    places: dict[str, float] = {}
    for look in _looks(evidence, bucket):
        if look["place"]:
            places[look["place"]] = places.get(look["place"], 0.0) + float(look["seconds"])
    return places


def add_disk_waits(evidence: Evidence, causes: Sequence[Cause]) -> list[Cause]:
    """Add to the storage cause the other waits for the same disk: of code, checkpoints and files.

    Libraries are read where they are first used, in the middle of updates as well. What another cause said of these
    seconds (a checkpoint, a warm-up) is then said.
    """
    wall, stored = evidence.ledger.wall_seconds, [cause for cause in causes if cause.name in STORAGE]
    waits = {bucket: _disk_seconds(evidence, bucket) for bucket in evidence.ledger.seconds if bucket not in OF_STORAGE}
    waited = sum(waits.values())
    if not stored or waited < max(LEAST_WAIT, LEAST / 3 * wall):
        return list(causes)
    first, more = max(stored, key=lambda cause: cause.share), clip(waited / wall)
    parts = ", ".join(f"{bucket} {duration(took)}" for bucket, took in waits.items() if took >= LEAST_SHOWN)
    merged = replace(
        first,
        share=clip(first.share + more),
        saves=clip(first.saves + more) if first.saves else 0.0,
        sentence=f"{first.sentence} Code and files of the run waited another {duration(waited)} for it,"
        f" {percent(more)} of the time.",
        evidence=(*first.evidence, f"other waits for the disk: {parts}"),
    )
    explained = {"checkpoint": waits.get("checkpoint", 0.0), "warmup": sum(waits.get(part, 0.0) for part in UPDATE)}
    return [
        merged if cause is first else cause
        for cause in causes
        if cause is first or explained.get(cause.name, 0.0) < cause.share * wall / 2
    ]


def _disk_seconds(evidence: Evidence, bucket: str) -> float:
    """Return the seconds of a bucket that waited for a disk; of ``measuring`` also those that imported code."""
    return sum(
        float(look["seconds"])
        for look in _looks(evidence, bucket)
        if look["what"] == "disk" or (bucket == "measuring" and str(look["place"]).startswith("<module>"))
    )


def _looks(evidence: Evidence, bucket: str) -> list[Mapping[str, Any]]:
    """Return the samples of the training thread in a bucket."""
    threads = evidence.newest(ThreadStats)
    return [] if threads is None else [look for look in threads.places if look["bucket"] == bucket]


def compilation(evidence: Evidence) -> Iterator[Cause]:
    """Find compilation that does not pay in so short a run, recompilation, and a long warm-up."""
    compiled, started, ledger = evidence.newest(Compiled), evidence.started, evidence.ledger
    if compiled is None:
        share, seconds = ledger.share("warmup"), ledger.seconds["warmup"]
        sentence = f"Warming up took {duration(seconds)}, {percent(share)} of the time, because the run is short."
        yield Cause(name="warmup", share=share, sentence=sentence, is_usual=True)
    else:
        wall, images = ledger.wall_seconds, max(0, started.batches.images - int(started.batches.position(started.step)))
        gain = (compiled.eager_seconds - compiled.compiled_seconds) * images / max(compiled.images, 1)
        if gain < compiled.seconds and wall > 0:
            paid = compiled.images_until_paid
            took = f"Compiling took {duration(compiled.seconds)}, {percent(compiled.seconds / wall)} of the time"
            why = f"pays off after {paid:,} images; this run has {images:,}" if paid else "never pays off"
            with_it, without = duration(compiled.compiled_seconds), duration(compiled.eager_seconds)
            yield Cause(
                name="compile",
                share=clip((compiled.seconds + max(0.0, -gain)) / wall),
                sentence=f"{took}, which {why}.",
                evidence=(f"a pass takes {with_it}, and {without} without it", *compiled.breaks[:3]),
                change="omit --compile (precision.compile=none)",
                saves=clip((compiled.seconds - gain) / wall),
            )

    _, middle, slow = evidence.updates.seconds
    mean = evidence.mean_seconds(*(bucket for bucket in STEADY if bucket not in (*INPUT, "logging")))
    # Updates all over the run take many times as long as the others.
    if mean_pace(evidence) is None or mean <= 0 or not started.machine.get("compile") or not 0 < 3 * middle <= slow:
        return
    usual = max(0.0, middle - evidence.updates.waits[1])
    share = max(0.0, ledger.share("forward", "backward", "update") * (1 - usual / mean))
    yield Cause(
        name="recompile",
        share=share,
        sentence=f"The network is recompiled throughout the run: {percent(share)} of the time.",
        evidence=(f"an update takes {duration(middle)}, but one in twenty {duration(slow)} or more",),
    )


RULES = (
    VerdictRule("evaluations", evaluations),
    VerdictRule("checkpoints", checkpoints),
    VerdictRule("log_lines", log_lines),
    VerdictRule("lost_work", lost_work),
    VerdictRule("stops", stops),
    VerdictRule("starts", starts),
    VerdictRule("probe", probe),
    VerdictRule("compilation", compilation),
)
