"""Causes that hold a GPU back (copies to it, its clock, whom it is shared with), and ranks that wait for each other."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from steadytrain.events import DeviceStats
from steadytrain.format import count, duration, percent, size
from steadytrain.monitor.evidence import Evidence
from steadytrain.monitor.ledger import BUCKETS, COMPUTE, PASSES
from steadytrain.monitor.rules.cause import LEAST, Cause, VerdictRule, clip, name_process

STANDS_OUT = 0.5  # a rank is late where it waits for the others less than this part of what they wait
MORE = 1.2  # a rank has more to do than the others where it gets so many times their images


def gpu(evidence: Evidence) -> Iterator[Cause]:
    """Find a GPU that waits for copies, whose clock is held down, or on which other processes compute."""
    ledger = evidence.ledger
    if (share := ledger.share("transfer")) >= LEAST:
        seconds, side = evidence.mean_seconds("transfer"), int(evidence.started.model.get("size") or 0)
        figures = [f"{duration(seconds)} per update"]
        if side and seconds > 0:
            figures.append(f"that is {evidence.recipe.batch_size * side * side * 3 / seconds / 1e9:.1f} GB per second")
        sentence = f"The GPU waits {percent(share)} of the time for batches to be copied to it."
        yield Cause(name="transfer", share=share, sentence=sentence, evidence=tuple(figures), change="steady doctor")

    def speed(device: DeviceStats) -> float:
        return min(1.0, (device.clock_hertz or 0.0) / (device.clock_limit_hertz or 1.0))

    if evidence.on_cpu:
        return
    if slow := [d for d in evidence.devices if d.throttled and d.clock_hertz and d.clock_limit_hertz]:
        device = min(slow, key=speed)
        share = clip(ledger.share(*COMPUTE) * (1 - speed(device)))
        reasons = ", ".join(str(reason) for reason in device.throttled)
        figures = [f"{(device.clock_hertz or 0) / 1e6:.0f} of {(device.clock_limit_hertz or 0) / 1e6:.0f} MHz"]
        if device.power_watts and device.power_limit_watts:
            most = device.power_most_watts
            is_highest = most is not None and device.power_limit_watts >= 0.99 * most
            highest = ", the highest limit that it takes" if is_highest else ""
            figures.append(f"{device.power_watts:.0f} of {device.power_limit_watts:.0f} W{highest}")
        if device.temperature is not None:
            figures.append(f"{device.temperature:.0f} degrees")
        yield Cause(
            name="device_throttled",
            share=share,
            sentence=f"GPU {device.index} runs below its full clock ({reasons}): that costs {percent(share)} of the "
            "time.",
            evidence=tuple(figures),
            change=_remedy(device),
            saves=share if _remedy(device) else 0.0,
        )
    if any(device.processes for device in evidence.devices):
        device = max(evidence.devices, key=lambda device: device.processes or 0)
        others, busy = device.processes or 0, device.utilisation
        share = clip(ledger.share(*COMPUTE) * others / (others + 1))
        who = count(others, "other process runs", "other processes run")
        figures = [] if busy is None else [f"the GPU was busy {percent(busy)} of the time, for all processes together"]
        for process in device.other_processes:
            memory = process.get("memory_bytes")
            figures.append(name_process(process) + ("" if memory is None else f" holds {size(memory)} of its memory"))
        yield Cause(
            name="device_shared",
            share=share,
            sentence=f"{who} on GPU {device.index}: that costs up to {percent(share)} of the time.",
            evidence=tuple(figures),
            change="stop the other processes (nvidia-smi lists them), or choose another GPU: --device cuda:N",
            saves=share,
        )


def _remedy(device: DeviceStats) -> str:
    """Return what raises a clock, by the first reason that a person can change; empty where there is none."""
    reasons, index, most = " ".join(map(str, device.throttled)), device.index, device.power_most_watts
    if "heat" in reasons:
        return "improve its cooling, or choose another machine"
    if "hardware slowdown" in reasons or "power brake" in reasons:
        return "check its power supply and cooling, or choose another machine"
    if "power limit" in reasons and most and 0.99 * most > (device.power_limit_watts or most):
        return f"raise its power limit: nvidia-smi -i {index} -pl {most:.0f}, as root"
    if "set clocks" in reasons:
        return f"nvidia-smi -i {index} -rgc and -rac, as root, unless its clock was set on purpose"
    return ""


def ranks(evidence: Evidence) -> Iterator[Cause]:
    """Find exchanges of gradients that computing does not hide, and one rank that the others wait for."""
    if evidence.servers is not None:
        return  # workers wait for servers, not for each other
    waits = {rank: one.by_bucket.get("communication", 0.0) for rank, one in evidence.ranks.items()}
    share = min(waits.values()) if len(waits) > 1 else evidence.ledger.share("communication")
    # Ranks that are late by turns wait for each other, and no exchange is to blame.
    share = min([share, *(one.exchanging for one in evidence.ranks.values() if one.exchanging is not None)])
    batch = evidence.recipe.batch_size
    yield Cause(
        name="communication",
        share=share,
        sentence=f"{percent(share)} of the time goes into exchanging gradients while nothing is computed.",
        evidence=(*([count(len(waits), "rank")] if len(waits) > 1 else []), f"{count(batch, 'image')} per update"),
        change=f"--batch-size {2 * batch}, with a learning rate to match (--lr): half as many exchanges",
        saves=share / 2,
    )
    if len(waits) < 2:
        return
    late = min(waits, key=lambda rank: waits[rank])
    usual = median(share for rank, share in waits.items() if rank != late)
    share = clip(usual - waits[late])
    if share < LEAST or waits[late] > STANDS_OUT * usual:
        return
    images = evidence.ranks[late].images
    others = [one.images for rank, one in evidence.ranks.items() if rank != late and one.images]
    if others and images >= MORE * median(others):
        computing = {rank: sum(one.by_bucket.get(b, 0.0) for b in PASSES) for rank, one in evidence.ranks.items()}
        # With equal shares each takes as long for an image as those do who compute while all of them do.
        compute = median(seconds for rank, seconds in computing.items() if rank != late)
        equal = compute * (images + sum(others)) / (1 + len(others)) / median(others)
        unequal = clip(computing[late] - equal)
        if unequal >= LEAST:
            batches = evidence.started.machine.get("micro_batches")
            yield Cause(
                name="straggler",
                share=unequal,
                sentence=f"Rank {late} has {images / median(others):.1f} times as many images of each update as the "
                f"others, which wait for it: equal shares would save {percent(unequal)} of the time.",
                evidence=(
                    f"{images:,} images were loaded for rank {late}, {median(others):,.0f} for each other",
                    f"it computes {percent(computing[late])} of the time, the others {percent(compute)}",
                ),
                change=f"use a number of ranks that divides the {batches} micro-batches of an update, or start a new"
                " run with these ranks",
                saves=unequal,
            )
            return
    shares = evidence.ranks[late].by_bucket
    other_ranks = [one.by_bucket for rank, one in evidence.ranks.items() if rank != late]
    theirs = {b: median(other.get(b, 0.0) for other in other_ranks) for b in BUCKETS}
    worst = max((b for b in BUCKETS if b != "communication"), key=lambda b: shares.get(b, 0.0) - theirs[b])
    spends = f"it spends {percent(shares.get(worst, 0.0))} in {worst.replace('_', ' ')}"
    yield Cause(
        name="straggler",
        share=share,
        sentence=f"Rank {late} is slower than the others, which wait for it {percent(share)} of the time.",
        evidence=(
            f"rank {late} waits for the others {percent(waits[late])} of the time; they wait {percent(usual)}",
            f"{spends}, the others {percent(theirs[worst])}"
            if (stopped := evidence.ranks[late].stopped) < share / 2
            else f"its process was stopped {percent(stopped)} of the time (SIGSTOP, a frozen container or machine)",
        ),
        change=f"steady doctor --json on rank {late}'s machine, and steady doctor --against it on another's",
        saves=share,
    )


RULES = (
    VerdictRule(
        "gpu",
        gpu,
        explains={"device_throttled": ("precision",)},
        slows={"device_throttled": "updates", "device_shared": "updates"},
    ),
    VerdictRule("ranks", ranks, explains={"straggler": ("communication",)}),
)
