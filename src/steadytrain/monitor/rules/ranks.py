"""Several ranks: what they spend on talking to each other, and one that the others wait for."""

from __future__ import annotations

from statistics import median

from steadytrain.monitor.evidence import Evidence
from steadytrain.monitor.ledger import BUCKETS, PASSES
from steadytrain.monitor.rules.cause import LEAST, Cause, percent, some, within

STANDS_OUT = 0.5
"""A rank is late where it waits for the others less than this part of what they wait."""

MORE = 1.2
"""A rank has more to do than the others where it gets so many times their images."""


def communication(evidence: Evidence) -> Cause | None:
    """Exchanging gradients is not hidden behind computing them. What a late rank makes the others wait is not meant."""
    waits = _waits(evidence)
    share = min(waits.values()) if len(waits) > 1 else evidence.ledger.share("communication")
    told_alone = [one for one in evidence.exchanging.values() if one is not None]
    if told_alone:  # ranks that are late by turns wait for each other, and no exchange is to blame
        share = min(share, *told_alone)
    if share < LEAST:
        return None
    own = evidence.recipe.batch_size
    sentence = f"{percent(share)} of the time the ranks exchange gradients and compute nothing meanwhile."
    told = (f"{some(max(1, len(evidence.ranks)), 'rank')}, {some(own, 'image')} an update",)
    change = f"--batch-size {2 * own}, with a learning rate to match (--lr): half as many exchanges"
    return Cause(name="communication", share=share, sentence=sentence, evidence=told, change=change, saves=share / 2)


def straggler(evidence: Evidence) -> Cause | None:
    """One rank comes late to each exchange, and the others wait for it."""
    waits = _waits(evidence)
    if len(waits) < 2:
        return None
    late = min(waits, key=lambda rank: waits[rank])
    usual = median(share for rank, share in waits.items() if rank != late)
    share = within(usual - waits[late])
    if share < LEAST or waits[late] > STANDS_OUT * usual:
        return None
    if (unequal := _unequal(evidence, late)) is not None:
        return unequal
    others = {
        bucket: median(told.get(bucket, 0.0) for rank, told in evidence.ranks.items() if rank != late)
        for bucket in BUCKETS
    }
    own = evidence.ranks[late]
    worst = max(
        (name for name in BUCKETS if name != "communication"), key=lambda name: own.get(name, 0.0) - others[name]
    )
    sentence = f"Rank {late} is late, and the others wait for it {percent(share)} of the time."
    told = (
        f"rank {late} waits {percent(waits[late])} of the time for the others, they {percent(usual)}",
        f"it spends {percent(own.get(worst, 0.0))} in {worst.replace('_', ' ')}, the others {percent(others[worst])}",
    )
    change = f"steady doctor --json on rank {late}'s machine, and steady doctor --against it on another's"
    return Cause(name="straggler", share=share, sentence=sentence, evidence=told, change=change, saves=share)


def _unequal(evidence: Evidence, late: int) -> Cause | None:
    """The late rank has more images of each update than the others; None where it has not."""
    own, others = evidence.fed.get(late, 0), [n for rank, n in evidence.fed.items() if rank != late and n]
    if not others or own < MORE * median(others):
        return None
    # With equal shares each takes as long for an image as those do who compute while all of them do.
    usual = median(_passes(evidence, rank) for rank in evidence.ranks if rank != late)
    equal = usual * (own + sum(others)) / (1 + len(others)) / median(others)
    share = within(_passes(evidence, late) - equal)
    if share < LEAST:
        return None
    count = evidence.started.machine.get("micro_batches")
    sentence = (
        f"Rank {late} has {own / median(others):.1f} times as many images of each update as the others, which wait for"
        f" it: equal shares would save {percent(share)} of the time."
    )
    told = (
        f"{own:,} images were made for rank {late}, {median(others):,.0f} for each other",
        f"it computes {percent(_passes(evidence, late))} of the time, the others {percent(usual)}",
    )
    change = f"as many ranks as divide the {count} micro-batches of an update, or begin anew with these ranks"
    return Cause(name="straggler", share=share, sentence=sentence, evidence=told, change=change, saves=share)


def _passes(evidence: Evidence, rank: int) -> float:
    return sum(evidence.ranks[rank].get(bucket, 0.0) for bucket in PASSES)


def _waits(evidence: Evidence) -> dict[int, float]:
    return {rank: told.get("communication", 0.0) for rank, told in evidence.ranks.items()}
