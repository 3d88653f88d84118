"""The feed does not keep up: storage, too few threads, a stage that is too slow, or nothing that its threads did."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from steadytrain.format import count, duration, percent, size
from steadytrain.monitor.evidence import Evidence
from steadytrain.monitor.rules.cause import LEAST, Cause, clip
from steadytrain.monitor.rules.pace import STAGES, WAITS, Pace, gap_share, paces

DOING = {
    "read": "reading",
    "decode": "decoding images",
    "augment": "cutting and resizing images",
    "batch": "gathering batches",
}
BYTES_PER_PIXEL = 0.5
"""Of photographs as JPEG, roughly: what the sizes of images are judged by where only their bytes are known."""
USUAL_DECODE = (60e-6, 40e-9)
"""Seconds that decoding one image takes on a slow core, and for each encoded byte of it."""
USUAL_AUGMENT = (60e-6, 40e-9)
"""The same of cutting and resizing, and for each pixel that the model sees."""
FAR_FROM_USUAL = 0.25
MOST_RAW_BYTES = 20e9
MATTERS, CURES = 0.3, 0.7
"""More threads help where they save the first part of the waiting, and are the cure where they save the second."""
FIRST_ONLY = 0.25
"""Where later passes lose no more than this part of what the first loses, storage is the first pass's affair."""


@dataclass(frozen=True, kw_only=True)
class Blame:
    """What one stretch of the run loses to one thing: its ``name``, share of the wall time, and the change."""

    name: str
    pace: Pace
    share: float
    saves: float = 0.0
    change: str = ""


def blames(evidence: Evidence, pace: Pace) -> Iterator[Blame]:
    """Yield what waiting for batches in one stretch comes from: stages that wait, too few threads, slow stages."""
    asleep, more, left = list[Blame](), list[Blame](), pace.exposed
    enough = pace.enough_threads()
    threads_save = pace.saved(pace.with_threads(enough))
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


def worst_blame(evidence: Evidence, name: str) -> tuple[Blame, float, float] | None:
    """Return the worst stretch that a thing is to blame for, its share and saving in all; None below 3 %."""
    found = [blame for pace in paces(evidence) for blame in blames(evidence, pace) if blame.name == name]
    share = sum(blame.share for blame in found)
    if share < LEAST:
        return None
    return max(found, key=lambda blame: blame.share), clip(share), clip(sum(blame.saves for blame in found))


def threads(evidence: Evidence) -> Cause | None:
    """Find idle cores while the feed's threads cannot keep up."""
    found = worst_blame(evidence, "threads")
    if found is None:
        return None
    blame, share, saves = found
    pace, stage = blame.pace, blame.pace.slowest
    whose = "one thread spends" if pace.threads == 1 else f"{pace.threads} threads spend"
    idle = "" if pace.idle is None else f" while {count(pace.idle, 'core')} {'is' if pace.idle == 1 else 'are'} idle"
    sentence = (
        f"The loop waits {percent(share)} of the time for images, and the feed's {whose}"
        f" {percent(min(1.0, pace.busy / pace.threads / pace.step))} of the time"
        f" {'at work' if stage == 'batch' else DOING[stage]}{idle}."
    )
    figures = _feed_figures(pace)
    return Cause(name="threads", share=share, sentence=sentence, evidence=figures, change=blame.change, saves=saves)


def decode(evidence: Evidence) -> Cause | None:
    """Find decoding that the loop waits for, or that takes the cores from the update."""
    return _slow_stage(evidence, "decode", "decode")


def augment(evidence: Evidence) -> Cause | None:
    """Find cutting, resizing and mirroring that the loop waits for, or that takes the cores from the update."""
    return _slow_stage(evidence, "augment", "augment")


def gather(evidence: Evidence) -> Cause | None:
    """Find putting batches together that the loop waits for, or that takes the cores from the update."""
    return _slow_stage(evidence, "batch", "gather")


def _slow_stage(evidence: Evidence, stage: str, name: str) -> Cause | None:
    found = worst_blame(evidence, stage)
    if found is None:
        return None
    blame, share, saves = found
    pace, doing = blame.pace, DOING[stage]
    spend = f"the feed's threads spend {percent(pace.stage(stage) / max(pace.busy, 1e-12))} of it {doing}"
    if pace.is_by_loop:
        sentence = (
            f"{doing.capitalize()} costs {percent(share)} of the time: batches are so small that the loop makes them"
            " itself, several at a time, from images in memory, and more threads would not help."
        )
    elif pace.sleeps:
        sentence = (
            f"The loop waits {percent(share)} of the time for images: {spend}, and most of that is waiting, not"
            " computing."
        )
    elif pace.is_saturated or pace.held_up > pace.wait:
        used = pace.step * (pace.machine.cpu or 0.0) if pace.machine else 0.0
        part = clip(pace.stage(stage) * pace.on_processor / used) if used else 0.0
        sentence = (
            f"{doing.capitalize()} costs {percent(share)} of the time: it takes {percent(part)} of what the cores do,"
            " and the update waits for them."
        )
    else:
        sentence = f"The loop waits {percent(share)} of the time for images: {spend}, and more of them would not help."
    figures, saves = _feed_figures(pace), min(saves, share)
    return Cause(name=name, share=share, sentence=sentence, evidence=figures, change=blame.change, saves=saves)


def waiting(evidence: Evidence) -> Cause | None:
    """Find a loop that waits for batches though the feed's threads are not busy, or nothing is known of them."""
    found = worst_blame(evidence, "waiting")
    if found is None:
        return None
    blame, share, _ = found
    is_known = blame.pace.feed is not None
    why = "the feed's threads are not busy" if is_known else "nothing tells what its feed did"
    sentence = f"The loop waits {percent(share)} of the time for images, and {why}."
    change = "steady diagnose --probe RUN" if is_known else ""
    return Cause(name="waiting", share=share, sentence=sentence, evidence=_feed_figures(blame.pace), change=change)


def epoch_gap(evidence: Evidence) -> Cause | None:
    """Find first batches of epochs that come late."""
    share = clip(evidence.ledger.share("epoch_gap") + gap_share(evidence))
    if share < LEAST:
        return None
    gaps = max(1.0, math.floor(evidence.position / evidence.num_train)) if evidence.num_train else 1.0
    sentence = f"The first batches of the epochs come late: the loop waits {percent(share)} of the time for them."
    figures = (f"{duration(share * evidence.ledger.wall_seconds / gaps)} at each of {count(gaps, 'epoch')}",)
    return Cause(name="epoch_gap", share=share, sentence=sentence, evidence=figures)


def storage(evidence: Evidence) -> Cause | None:
    """Find reading that holds the loop up in every pass over the data."""
    found = worst_blame(evidence, "read")
    if found is None or _is_first_only(evidence):
        return None
    blame, share, saves = found
    sentence = f"The loop waits {percent(share)} of the time for images to come from where they lie, in every epoch."
    if blame.change and not blame.pace.is_from_disk:  # each image is far away, and several can be on their way at once
        change, saves = blame.change, min(share, saves)
    else:
        change, saves = f"copy the images to a faster disk: cp {_files(evidence)} FOLDER, and train on FOLDER", share
    figures = _reading_figures(blame.pace)
    return Cause(name="storage", share=share, sentence=sentence, evidence=figures, change=change, saves=saves)


def first_epoch(evidence: Evidence) -> Cause | None:
    """Find reading that holds the loop up in the first pass alone: afterwards the images are in memory."""
    found = worst_blame(evidence, "read")
    if found is None or not _is_first_only(evidence):
        return None
    blame, share, _ = found
    return Cause(
        name="storage_first_epoch",
        share=share,
        sentence=(
            f"In the first epoch the loop waits for images to come from where they lie, {percent(share)} of the time of"
            " the run; afterwards they are in memory."
        ),
        evidence=_reading_figures(blame.pace),
        change=f"read them into memory in one go before training: cat {_files(evidence)} > /dev/null",
        saves=share,
    )


def _is_first_only(evidence: Evidence) -> bool:
    """Tell whether later passes lose little to storage, as parts of their own time."""
    lost = [
        pace.saved(pace.without(pace.waits("read"))) / pace.loop if pace.loop > 0 else 0.0 for pace in paces(evidence)
    ]
    return len(lost) == 2 and lost[1] <= FIRST_ONLY * lost[0]


def _files(evidence: Evidence) -> str:
    data = evidence.recipe.data.train
    return data if data.endswith(".rec") else f"-r {data}"


def _remedy(evidence: Evidence, pace: Pace, stage: str) -> tuple[float, str]:
    """Return what the one change saves that helps a slow stage, and the change; nothing where there is none."""
    feed, data = pace.feed, evidence.recipe.data.train
    if feed is None or stage not in ("decode", "augment"):
        return 0.0, ""
    usual = _usual_part(evidence, pace, stage)
    if stage == "decode" and usual < FAR_FROM_USUAL:
        return pace.saved(pace.without_stages({"decode": usual})), "steady doctor"
    # Pack anew: smaller images, or bare pixels where they are small already.
    seen, each = _model_side(evidence), feed.bytes / max(feed.images, 1)
    side = max(256, math.ceil(seen * 8 / 14) * 2)
    factor = side * side * 4 / 3 / max(each / BYTES_PER_PIXEL, 1e-12)
    if factor < 0.7:
        step = pace.without_stages({"read": factor, "decode": factor, "augment": max(factor, 0.5)})
        return pace.saved(step), f"steady pack {data} smaller --shorter-side {side}"
    if each <= 3 * seen * seen and seen <= 64 and evidence.num_train * seen * seen * 3 <= MOST_RAW_BYTES:
        return pace.saved(pace.without_stages({"decode": 0.05})), f"steady pack {data} pixels --encoding raw"
    return 0.0, ""


def _usual_part(evidence: Evidence, pace: Pace, stage: str) -> float:
    """Return what a stage usually takes of a core, as a part of what it takes here."""
    feed = pace.feed
    if feed is None or feed.images <= 0 or stage not in ("decode", "augment"):
        return 1.0
    took = pace.stage(stage) * pace.on_processor / pace.batch_size
    each = feed.bytes / feed.images if stage == "decode" else _model_side(evidence) ** 2
    fixed, growing = USUAL_DECODE if stage == "decode" else USUAL_AUGMENT
    return (fixed + growing * each) / max(took, 1e-12)


def _model_side(evidence: Evidence) -> int:
    """Return the side of the square that the model sees, in pixels."""
    return int(evidence.started.model.get("size") or evidence.recipe.data.size or 224)


def _feed_figures(pace: Pace) -> tuple[str, ...]:
    figures = [f"an update takes {duration(pace.step)}, of which {duration(pace.wait)} is waiting for its batch"]
    feed = pace.feed
    if feed is None or feed.images <= 0:
        return tuple(figures)
    stages = [f"{name} {duration(pace.stage(name) / pace.batch_size)}" for name in STAGES if pace.stage(name) > 0]
    figures.append(f"an image takes {', '.join(stages)}; {size(feed.bytes / feed.images)} each")
    on = "" if feed.cpu_seconds is None else f", {percent(pace.on_processor)} of that on a processor"
    figures.append(f"{count(pace.threads, 'thread')} busy {percent(clip(pace.busy / pace.threads / pace.step))}{on}")
    if pace.idle is not None:
        figures.append(f"{pace.idle:.1f} of {count(pace.cores, 'core')} idle")
    if pace.held_up > 0:
        figures.append(f"of an update, {duration(pace.held_up)} is waiting for a core that the feed has")
    if feed.asked:
        figures.append(f"{feed.starved} of {feed.asked} requests found no batch ready")
    return tuple(figures)


def _reading_figures(pace: Pace) -> tuple[str, ...]:
    feed, machine = pace.feed, pace.machine
    assert feed is not None
    images = max(feed.images, 1)
    figures = [
        f"an update takes {duration(pace.step)}, of which {duration(pace.wait)} is waiting for its batch",
        f"reading one image of {size(feed.bytes / images)} takes {duration(feed.read_seconds / images)}",
        f"{percent(pace.stage('read') / max(pace.busy, 1e-12))} of the feed's busy time is reading",
    ]
    if machine is not None and machine.disk_read_bytes is not None:
        figures.append(f"{size(machine.disk_read_bytes)} a second come from a disk")
    if machine is not None and machine.iowait is not None and machine.iowait >= 0.05:
        figures.append(f"{machine.iowait:.1f} cores wait for a disk")
    if machine is not None and machine.pressure.get("io", 0.0) >= LEAST:
        figures.append(f"something waits for a disk {percent(machine.pressure['io'])} of the time (pressure)")
    return tuple(figures)
