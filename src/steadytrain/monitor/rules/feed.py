"""The feed does not keep up: too few threads, a stage that is too slow, or nothing that its threads did."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from steadytrain.monitor.evidence import Evidence
from steadytrain.monitor.rules.cause import LEAST, Cause, duration, percent, size, some, within
from steadytrain.monitor.rules.pace import STAGES, WAITS, Pace
from steadytrain.monitor.rules.stretches import gaps as around
from steadytrain.monitor.rules.stretches import paces

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


@dataclass(frozen=True, kw_only=True)
class Blame:
    """What one stretch of the run loses to one thing: ``name``, its share of the wall time, and of the change."""

    name: str
    pace: Pace
    share: float
    saves: float = 0.0
    change: str = ""


def blames(evidence: Evidence, pace: Pace) -> Iterator[Blame]:
    """What waiting for batches in one stretch comes from: stages that wait, too few threads, stages that compute."""
    told, more, left = list[Blame](), list[Blame](), pace.exposed
    if pace.is_unexplained:
        yield Blame(name="waiting", pace=pace, share=pace.exposed)
    else:
        told = [_asleep(pace, stage) for stage in STAGES if pace.waits(stage) >= WAITS * pace.busy]
        left = max(0.0, left - max((one.share for one in told), default=0.0))
        more = _too_few(pace, left)
        yield from (*told, *more)
    cured = sum(one.share for one in more if one.share >= left)
    for stage in STAGES[1:]:
        share = pace.saved(pace.without_stages({stage: 0.0}))
        share = within(min(share, left) if told else share)
        if share < 2 * cured:  # all that it costs, or nearly, is that the loop waits
            continue
        saves, change = max(_remedy(evidence, pace, stage), *((one.saves, one.change) for one in more), (0.0, ""))
        if saves < LEAST / 2:  # nobody can do without it: lost is what the loop waits, or what is more than usual
            saves, change = 0.0, ""
            beyond = pace.saved(pace.without_stages({stage: min(1.0, _usual(evidence, pace, stage))}))
            share = min(share, max(pace.exposed, beyond))
        if share > 0 and all(one.name != stage for one in told):
            yield Blame(name=stage, pace=pace, share=share, saves=min(saves, share), change=change)


def _asleep(pace: Pace, stage: str) -> Blame:
    """A stage in which the threads wait: more of them wait at the same time."""
    share, enough = within(pace.saved(pace.without(pace.waits(stage)))), pace.enough_threads()
    saves, change = min(share, pace.saved(pace.with_threads(enough))), f"--threads {enough}"
    return Blame(name=stage, pace=pace, share=share, saves=saves, change=change if enough > pace.threads else "")


def _too_few(pace: Pace, left: float) -> list[Blame]:
    """Threads that more of them would relieve, on cores that are idle, of what is ``left`` of the waiting.

    Where that cures it they are the cause; where it does not, a stage is, and they are one thing to do about it.
    """
    enough = pace.enough_threads()
    spared = min(left, pace.saved(pace.with_threads(enough)))
    if spared <= 0 or spared < MATTERS * pace.exposed:
        return []
    share = left if spared >= CURES * left else spared
    return [Blame(name="threads", pace=pace, share=share, saves=spared, change=f"--threads {enough}")]


def worst(evidence: Evidence, name: str) -> tuple[Blame, float, float] | None:
    """The worst stretch that a thing is to blame for, with its share and what is saved in all; None below 3 %."""
    found = [blame for pace in paces(evidence) for blame in blames(evidence, pace) if blame.name == name]
    share = sum(blame.share for blame in found)
    if share < LEAST:
        return None
    return max(found, key=lambda blame: blame.share), within(share), within(sum(blame.saves for blame in found))


def threads(evidence: Evidence) -> Cause | None:
    """Cores are idle while the feed's threads cannot keep up."""
    told = worst(evidence, "threads")
    if told is None:
        return None
    blame, share, saves = told
    pace, stage = blame.pace, blame.pace.slowest
    whose = "one thread spends" if pace.threads == 1 else f"{pace.threads} threads spend"
    idle = "" if pace.idle is None else f" while {some(pace.idle, 'core')} {'is' if pace.idle == 1 else 'are'} idle"
    part = pace.busy / pace.threads / pace.step
    sentence = (
        f"The loop waits {percent(share)} of the time for images, and the feed's {whose} {percent(min(1.0, part))} of"
        f" the time {'at work' if stage == 'batch' else DOING[stage]}{idle}."
    )
    return Cause(
        name="threads", share=share, sentence=sentence, evidence=_figures(pace), change=blame.change, saves=saves
    )


def decode(evidence: Evidence) -> Cause | None:
    """Decoding is what the loop waits for, or takes the cores from the update."""
    return _stage(evidence, "decode", "decode")


def augment(evidence: Evidence) -> Cause | None:
    """Cutting, resizing and mirroring is."""
    return _stage(evidence, "augment", "augment")


def gather(evidence: Evidence) -> Cause | None:
    """Putting batches together is."""
    return _stage(evidence, "batch", "gather")


def waiting(evidence: Evidence) -> Cause | None:
    """The loop waits for batches though the feed's threads are not busy, or nothing is known of them."""
    told = worst(evidence, "waiting")
    if told is None:
        return None
    blame, share, _ = told
    feed = blame.pace.feed
    why = "nothing tells what its feed did" if feed is None else "the feed's threads are not busy"
    sentence = f"The loop waits {percent(share)} of the time for images, and {why}."
    change = "" if feed is None else "steady diagnose --probe RUN"
    return Cause(name="waiting", share=share, sentence=sentence, evidence=_figures(blame.pace), change=change)


def epoch_gap(evidence: Evidence) -> Cause | None:
    """The first batch of an epoch comes late."""
    share = within(evidence.ledger.share("epoch_gap") + around(evidence))
    if share < LEAST:
        return None
    num_train = float(evidence.started.data.get("num_train", 0) or 0)
    gaps = max(1.0, math.floor(evidence.position / num_train)) if num_train else 1.0
    seconds = share * evidence.ledger.wall_seconds
    sentence = f"The first batches of the epochs come late: the loop waits {percent(share)} of the time for them."
    told = (f"{duration(seconds / gaps)} at each of {some(gaps, 'epoch')}",)
    return Cause(name="epoch_gap", share=share, sentence=sentence, evidence=told)


def _stage(evidence: Evidence, stage: str, name: str) -> Cause | None:
    told = worst(evidence, stage)
    if told is None:
        return None
    blame, share, saves = told
    pace = blame.pace
    part = pace.stage(stage) / max(pace.busy, 1e-12)
    doing = DOING[stage]
    if pace.is_by_loop:
        sentence = (
            f"{doing.capitalize()} costs {percent(share)} of the time: batches are so small that the loop makes them"
            " itself, several at a time, from images in memory, and more threads would not help."
        )
    elif pace.sleeps:
        sentence = (
            f"The loop waits {percent(share)} of the time for images: the feed's threads spend {percent(part)} of it"
            f" {doing}, and most of that is waiting, not computing."
        )
    elif pace.is_saturated or pace.held_up > pace.wait:
        sentence = (
            f"{doing.capitalize()} costs {percent(share)} of the time: it takes"
            f" {percent(_of_processors(pace, stage))} of what the cores do, and the update waits for them."
        )
    else:
        sentence = (
            f"The loop waits {percent(share)} of the time for images: the feed's threads spend {percent(part)} of it"
            f" {doing}, and more of them would not help."
        )
    return Cause(
        name=name, share=share, sentence=sentence, evidence=_figures(pace), change=blame.change, saves=min(saves, share)
    )


def _of_processors(pace: Pace, stage: str) -> float:
    used = pace.step * (pace.machine.cpu or 0.0) if pace.machine else 0.0
    return within(pace.stage(stage) * pace.on_processor / used) if used else 0.0


def _remedy(evidence: Evidence, pace: Pace, stage: str) -> tuple[float, str]:
    """What the one change saves that helps a slow stage, and the change; nothing where there is none."""
    feed = pace.feed
    if feed is None or stage not in ("decode", "augment"):
        return 0.0, ""
    usual = _usual(evidence, pace, stage)
    if stage == "decode" and usual < FAR_FROM_USUAL:
        return pace.saved(pace.without_stages({"decode": usual})), "steady doctor"
    return _pack(evidence, pace, feed.bytes / max(feed.images, 1))


def _usual(evidence: Evidence, pace: Pace, stage: str) -> float:
    """What a stage usually takes of a core, as a part of what it takes here."""
    feed = pace.feed
    if feed is None or feed.images <= 0 or stage not in ("decode", "augment"):
        return 1.0
    took = pace.stage(stage) * pace.on_processor / pace.batch_size
    each = feed.bytes / feed.images if stage == "decode" else _size(evidence) ** 2
    fixed, growing = USUAL_DECODE if stage == "decode" else USUAL_AUGMENT
    return (fixed + growing * each) / max(took, 1e-12)


def _size(evidence: Evidence) -> int:
    """Side of the square that the model sees, in pixels."""
    return int(evidence.started.model.get("size") or evidence.recipe.data.size or 224)


def _pack(evidence: Evidence, pace: Pace, each: float) -> tuple[float, str]:
    """Packing anew: smaller images, or bare pixels where they are small already."""
    seen = _size(evidence)
    pixels = each / BYTES_PER_PIXEL
    side = max(256, math.ceil(seen * 8 / 14) * 2)
    wanted = side * side * 4 / 3
    data = evidence.recipe.data.train
    if wanted < 0.7 * pixels:
        factor = wanted / pixels
        told = pace.without_stages({"read": factor, "decode": factor, "augment": max(factor, 0.5)})
        return pace.saved(told), f"steady pack {data} smaller --shorter-side {side}"
    num_train = float(evidence.started.data.get("num_train", 0) or 0)
    if each <= 3 * seen * seen and seen <= 64 and num_train * seen * seen * 3 <= MOST_RAW_BYTES:
        return pace.saved(pace.without_stages({"decode": 0.05})), f"steady pack {data} pixels --encoding raw"
    return 0.0, ""


def _figures(pace: Pace) -> tuple[str, ...]:
    """The figures that a judgement of the feed rests on."""
    told = [f"an update takes {duration(pace.step)}, of which {duration(pace.wait)} is waiting for its batch"]
    feed = pace.feed
    if feed is None or feed.images <= 0:
        return tuple(told)
    stages = ", ".join(
        f"{name} {duration(pace.stage(name) / pace.batch_size)}" for name in STAGES if pace.stage(name) > 0
    )
    told.append(f"an image takes {stages}; {size(feed.bytes / feed.images)} each")
    on = "" if feed.cpu_seconds is None else f", {percent(pace.on_processor)} of that on a processor"
    told.append(f"{some(pace.threads, 'thread')} busy {percent(within(pace.busy / pace.threads / pace.step))}{on}")
    if pace.idle is not None:
        told.append(f"{pace.idle:.1f} of {some(pace.cores, 'core')} idle")
    if pace.held_up > 0:
        told.append(f"of an update, {duration(pace.held_up)} is waiting for a core that the feed has")
    if feed.asked:
        told.append(f"{feed.starved} of {feed.asked} requests found no batch ready")
    return tuple(told)
