"""The feed does not keep up: storage, too few threads, a stage that is too slow, or nothing that its threads did."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from steadytrain.data.storage.store import is_uri
from steadytrain.events import MachineStats
from steadytrain.format import count, duration, percent, size
from steadytrain.monitor.evidence import Evidence
from steadytrain.monitor.ledger import INPUT
from steadytrain.monitor.rules.cause import LEAST, NAMED, Cause, VerdictRule, clip, name_process
from steadytrain.monitor.rules.pace import STAGES, WAITS, Pace, gap_share, paces, probe_pace

DOING = {
    "read": "reading",
    "decode": "decoding images",
    "augment": "cropping and resizing images",
    "batch": "assembling batches",
}
# Of photographs as JPEG, roughly: what the sizes of images are judged by where only their bytes are known.
BYTES_PER_PIXEL = 0.5
WITH_MARKERS = 0.73
"""Time to decode parts of JPEGs with restart markers, of that without: measured on 800 photographs of 500 x 375."""
USUAL_DECODE = (60e-6, 40e-9)  # seconds that decoding one image takes on a slow core, and for each encoded byte of it
USUAL_AUGMENT = (60e-6, 40e-9)  # the same of cutting and resizing, and for each pixel that the model sees
FAR_FROM_USUAL = 0.25
SLEEPS = 0.5  # feed threads that wait for more than this part of their busy time do little else
MOST_RAW_BYTES = 20e9
MOSTLY = 0.75  # share of the threads' busy time: a stage with so much of it is what they do
# More threads help where they save the first part of the waiting, and are the cure where they save the second.
MATTERS, CURES = 0.3, 0.7
# Where later passes lose no more than this part of what the first loses, storage is the first pass's affair.
FIRST_ONLY = 0.25


@dataclass(frozen=True, kw_only=True)
class Blame:
    """One cause of input waits in a stretch of the run: its ``name``, share of the wall time, and the change."""

    name: str
    pace: Pace
    share: float
    saves: float = 0.0
    change: str = ""


def blames(evidence: Evidence, pace: Pace) -> Iterator[Blame]:
    """Yield the causes of input waits in a stretch: stages that wait, too few threads, slow stages."""
    asleep, more, left = list[Blame](), list[Blame](), pace.exposed
    enough = pace.enough_threads()
    threads_save = pace.saved(pace.with_threads(enough)) if enough > pace.threads else 0.0
    if pace.is_unexplained:
        yield Blame(name="waiting", pace=pace, share=pace.exposed)
    else:
        for stage in STAGES:  # where threads wait in a stage, more of them wait at the same time
            if pace.waits(stage) >= WAITS * pace.busy:
                share = clip(pace.saved(pace.without(pace.waits(stage))))
                change = f"--threads {enough}" if enough > pace.threads else ""
                asleep.append(Blame(name=stage, pace=pace, share=share, saves=min(share, threads_save), change=change))
        left = max(0.0, left - max((blame.share for blame in asleep), default=0.0))
        spared = min(left, threads_save)
        if spared > 0 and spared >= MATTERS * pace.exposed:
            # Where more threads cure it they are the cause; else a stage is, and they are one thing to do about it.
            share = left if spared >= CURES * left else spared
            more = [Blame(name="threads", pace=pace, share=share, saves=spared, change=f"--threads {enough}")]
        yield from (*asleep, *more)
    cured = sum(blame.share for blame in more if blame.share >= left)
    for stage in STAGES[1:]:
        share = pace.saved(pace.without_stages({stage: 0.0}))
        share = clip(min(share, left) if asleep else share)
        if share < 2 * cured:  # all that it costs, or nearly, is that the loop waits
            continue
        remedies = [_remedy(evidence, pace, stage), *((blame.saves, blame.change) for blame in more), (0.0, "")]
        saves, change = max(remedies)
        if saves < LEAST / 2:  # nobody can do without it: lost is what the loop waits, or what is more than usual
            saves, change = 0.0, ""
            beyond = pace.saved(pace.without_stages({stage: min(1.0, _usual_part(evidence, pace, stage))}))
            share = min(share, max(pace.exposed, beyond))
        if share > 0 and all(blame.name != stage for blame in asleep):
            yield Blame(name=stage, pace=pace, share=share, saves=min(saves, share), change=change)


def feed(evidence: Evidence) -> Iterator[Cause]:
    """Find what the loop waits for, or what takes the cores from the update: storage, too few threads, a slow stage."""
    probe = probe_pace(evidence)
    stretches = paces(evidence) if probe is None else (probe,)
    blamed = [blame for pace in stretches for blame in blames(evidence, pace)]
    for name in {blame.name: None for blame in blamed}:
        parts = [blame for blame in blamed if blame.name == name]
        worst, share = max(parts, key=lambda blame: blame.share), sum(blame.share for blame in parts)
        if share < LEAST:
            continue
        share, saves, change, pace = clip(share), clip(sum(blame.saves for blame in parts)), worst.change, worst.pace
        figures, waits = _feed_figures(pace), f"The loop waits {percent(share)} of the time for images"
        if name == "read":
            yield _storage(evidence, stretches, replace(worst, share=share, saves=saves))
            continue
        if name == "waiting":
            is_known = pace.feed is not None
            part = percent(clip(pace.busy / pace.threads / pace.step))
            why = (
                f"the loader's threads are busy only {part} of it"
                if is_known
                else "the log has no figures of the data loader"
            )
            sentence = f"{waits}, and {why}."
            change, saves = "steady diagnose --probe RUN" if is_known else "", 0.0
        elif name == "threads":
            stage = max(STAGES, key=pace.stage)
            subject = "the only loader thread spends" if pace.threads == 1 else f"its {pace.threads} threads spend"
            idle = pace.idle or 0.0
            free = f" while {count(idle, 'core')} {'is' if idle == 1 else 'are'} idle" if idle >= 0.05 else ""
            doing = "working" if stage == "batch" else DOING[stage]
            if stage != "batch" and pace.stage(stage) < MOSTLY * pace.busy:
                doing = f"working, the longest at {doing}"
            sentence = (
                f"{waits}, and {subject} {percent(min(1.0, pace.busy / pace.threads / pace.step))} of the time"
                f" {doing}{free}."
            )
        else:
            waited = evidence.ledger.share(*INPUT) if probe is None else probe.exposed
            sentence, saves = _stage_sentence(pace, name, share, waited), min(saves, share)
        name = "gather" if name == "batch" else name
        yield Cause(name=name, share=share, sentence=sentence, evidence=figures, change=change, saves=saves)


def _stage_sentence(pace: Pace, stage: str, share: float, waited: float) -> str:
    doing = DOING[stage]
    costs = f"{doing.capitalize()} costs {percent(share)} of the time"
    if pace.is_by_loop:
        return (
            f"{costs}: batches are so small that the training loop makes them itself, several at a time, from images"
            " in memory, and more threads would not help."
        )
    part = percent(pace.stage(stage) / max(pace.busy, 1e-12))
    waits = f"The loop waits {percent(share)} of the time for images: {part} of the loader's work is {doing}"
    if pace.asleep > SLEEPS * pace.busy and share <= waited + LEAST / 3:
        return f"{waits}, and most of that is waiting, not computing."
    if pace.is_saturated or pace.held_up > pace.wait or share > waited + LEAST / 3:
        used = pace.step * (pace.machine.cpu or 0.0) if pace.machine else 0.0
        cores = clip(pace.stage(stage) * pace.on_processor / used) if used else 0.0
        takes = f"it takes {percent(cores)} of what the cores do, and {pace.work} wait for them"
        return f"{costs}: {takes if cores >= LEAST / 3 else f'the loop and its {pace.work} wait for it'}."
    return f"{waits}, and more threads would not help."


def _storage(evidence: Evidence, stretches: Sequence[Pace], blame: Blame) -> Cause:
    """Describe reading that holds the loop up in every pass over the data, or only in the first."""
    pace, share, data = blame.pace, blame.share, str(evidence.recipe.data.train)
    feed, machine = pace.feed, pace.machine
    assert feed is not None
    images = max(feed.images, 1)
    figures = [
        _update_figure(pace),
        f"reading one image of {size(feed.bytes / images)} takes {duration(feed.read_seconds / images)}",
        f"{percent(pace.asleep / max(pace.busy, 1e-12))} of the loader's busy time is waiting for bytes from a disk"
        if pace.is_from_disk
        else f"{percent(pace.stage('read') / max(pace.busy, 1e-12))} of the loader's busy time is reading",
    ]
    if machine is not None:
        if machine.disk_read_bytes is not None:
            figures.append(f"{size(machine.disk_read_bytes)} per second are read from a disk")
        if machine.iowait is not None and machine.iowait >= 0.05:
            figures.append(f"{machine.iowait:.1f} cores wait for a disk")
        if (pressure := machine.pressure.get("io", 0.0)) >= LEAST:
            figures.append(f"processes wait for a disk {percent(pressure)} of the time (pressure)")
    neighbours, own_rate = _disk_neighbours(machine)
    figures += [f"{name} reads and writes {size(moved)} per second" for name, moved in neighbours]
    most = [name for name, moved in neighbours if moved >= NAMED * (own_rate + sum(moved for _, moved in neighbours))]
    also = f" {', '.join(most)} {'use' if len(most) > 1 else 'uses'} the disks of this machine as well." if most else ""
    waits = [(stretch, stretch.without(stretch.waits("read"))) for stretch in stretches]
    lost = [stretch.saved(step) / stretch.loop if stretch.loop > 0 else 0.0 for stretch, step in waits]
    if len(lost) == 2 and lost[1] <= FIRST_ONLY * lost[0]:
        return Cause(
            name="storage_first_epoch",
            share=share,
            sentence="In the first epoch the loop waits for storage "
            f"for {percent(share)} of the run's time; afterwards the images are in memory.{also}",
            evidence=tuple(figures),
            change=nearer_advice(data)
            if is_uri(data)
            else f"read the files into memory before training: cat {_files(data)} > /dev/null",
            saves=share,
        )
    change, saves = nearer_advice(data), share
    if blame.change and not pace.is_from_disk:  # each image is far away, and several can be on their way at once
        change, saves = blame.change, min(share, blame.saves)
    if most and sum(moved for _, moved in neighbours) >= own_rate:
        change = f"stop the other processes that use the disk, or {change}"
    every = ", in every epoch" if pace.work == "updates" else ""
    sentence = f"The loop waits for storage {percent(share)} of the time{every}.{also}"
    return Cause(name="storage", share=share, sentence=sentence, evidence=tuple(figures), change=change, saves=saves)


def nearer_advice(data: str) -> str:
    """Advise a faster disk, or a local copy of an object in a store.

    >>> nearer_advice("photos/")
    'copy the images to a faster disk: cp -r photos/ FOLDER, and train on FOLDER'
    """
    if is_uri(data):
        return (
            f"download {data} before training, or give the cache room for all of it (STEADYTRAIN_OBJECT_BYTES): another"
            " run on this machine then reads it from the disk"
        )
    return f"copy the images to a faster disk: cp {_files(data)} FOLDER, and train on FOLDER"


def _files(data: str) -> str:
    return data if data.endswith(".rec") else f"-r {data}"


def _disk_neighbours(machine: MachineStats | None) -> tuple[list[tuple[str, float]], float]:
    """Return other processes that use disks, with the bytes per second of each, and the bytes per second of the run."""
    if machine is None:
        return [], 0.0
    rates = [(name_process(process), process.get("disk_bytes") or 0.0) for process in machine.other_processes]
    own_rate = (machine.disk_read_bytes or 0.0) + (machine.disk_write_bytes or 0.0)
    return [(name, moved) for name, moved in rates if moved > 0], own_rate


def epoch_gap(evidence: Evidence) -> Iterator[Cause]:
    """Find first batches of epochs that come late."""
    share = clip(evidence.ledger.share("epoch_gap") + gap_share(evidence))
    gaps = max(1.0, math.floor(evidence.position / evidence.num_train)) if evidence.num_train else 1.0
    sentence = f"The first batch of each epoch is late: the loop waits {percent(share)} of the time for them."
    figures = (f"{duration(share * evidence.ledger.wall_seconds / gaps)} at each of {count(gaps, 'epoch')}",)
    yield Cause(name="epoch_gap", share=share, sentence=sentence, evidence=figures)


def _remedy(evidence: Evidence, pace: Pace, stage: str) -> tuple[float, str]:
    """Return what the change that helps a slow stage saves, and the change; 0 and "" where there is none."""
    feed, data = pace.feed, evidence.recipe.data.train
    if feed is None or stage not in ("decode", "augment"):
        return 0.0, ""
    usual = _usual_part(evidence, pace, stage)
    if stage == "decode" and usual < FAR_FROM_USUAL:
        return pace.saved(pace.without_stages({"decode": usual})), "steady doctor"
    # Pack anew: smaller images, or bare pixels where they are small already.
    seen, bytes_per_image = _model_side(evidence), feed.bytes / max(feed.images, 1)
    side = max(256, math.ceil(seen * 8 / 14) * 2)
    factor = side * side * 4 / 3 / max(bytes_per_image / BYTES_PER_PIXEL, 1e-12)
    if factor < 0.7:
        decode = factor * (1.0 if evidence.started.data.get("restart_markers", True) else WITH_MARKERS)
        step = pace.without_stages({"read": factor, "decode": decode, "augment": max(factor, 0.5)})
        return pace.saved(step), f"steady pack {data} smaller --shorter-side {side}"
    if bytes_per_image <= 3 * seen * seen and seen <= 64 and evidence.num_train * seen * seen * 3 <= MOST_RAW_BYTES:
        return pace.saved(pace.without_stages({"decode": 0.05})), f"steady pack {data} pixels --encoding raw"
    return 0.0, ""


def _usual_part(evidence: Evidence, pace: Pace, stage: str) -> float:
    """Return a stage's usual time on one core, as a share of its time here."""
    feed = pace.feed
    if feed is None or feed.images <= 0 or stage not in ("decode", "augment"):
        return 1.0
    took = pace.stage(stage) * pace.on_processor / pace.batch_size
    amount = feed.bytes / feed.images if stage == "decode" else _model_side(evidence) ** 2
    fixed, growing = USUAL_DECODE if stage == "decode" else USUAL_AUGMENT
    return (fixed + growing * amount) / max(took, 1e-12)


def _model_side(evidence: Evidence) -> int:
    """Return the side of the square that the model sees, in pixels."""
    return int(evidence.started.model.get("size") or evidence.recipe.data.size or 224)


def _update_figure(pace: Pace) -> str:
    what = "an update takes" if pace.work == "updates" else f"{pace.work} of a batch take"
    return f"{what} {duration(pace.step)}, {duration(pace.wait)} of it waiting for a batch"


def _feed_figures(pace: Pace) -> tuple[str, ...]:
    figures, feed = [_update_figure(pace)], pace.feed
    if feed is None or feed.images <= 0:
        return tuple(figures)
    stages = [f"{name} {duration(pace.stage(name) / pace.batch_size)}" for name in STAGES if pace.stage(name) > 0]
    figures.append(f"an image takes {', '.join(stages)}; {size(feed.bytes / feed.images)} each")
    on = "" if feed.cpu_seconds is None else f", {percent(pace.on_processor)} of that on a processor"
    figures.append(f"{count(pace.threads, 'thread')} busy {percent(clip(pace.busy / pace.threads / pace.step))}{on}")
    if pace.idle is not None:
        figures.append(f"{pace.idle:.1f} of {count(pace.cores, 'core')} idle")
    if pace.held_up > 0:
        figures.append(f"{duration(pace.held_up)} of each update is waiting for a core that the loader uses")
    if feed.asked:
        figures.append(f"{feed.starved} of {feed.asked} requests for a batch had to wait")
    return tuple(figures)


RULES = (VerdictRule("feed", feed, explains={"storage": ("epoch_gap", "waiting")}), VerdictRule("epoch_gap", epoch_gap))
