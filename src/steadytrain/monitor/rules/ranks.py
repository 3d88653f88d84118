"""Several ranks: what they spend on talking to each other, and one that the others wait for."""

from __future__ import annotations

from statistics import median

from steadytrain.format import count, percent
from steadytrain.monitor.evidence import Evidence
from steadytrain.monitor.ledger import BUCKETS, PASSES
from steadytrain.monitor.rules.cause import LEAST, Cause, clip

STANDS_OUT = 0.5
"""A rank is late where it waits for the others less than this part of what they wait."""

MORE = 1.2
"""A rank has more to do than the others where it gets so many times their images."""


def communication(evidence: Evidence) -> Cause | None:
    """Find exchanges of gradients that computing does not hide, apart from waits for a late rank."""
    waits = _waits(evidence)
    share = min(waits.values()) if len(waits) > 1 else evidence.ledger.share("communication")
    # Ranks that are late by turns wait for each other, and no exchange is to blame.
    share = min(share, *(alone for alone in evidence.exchanging.values() if alone is not None), share)
    if share < LEAST:
        return None
    batch = evidence.recipe.batch_size
    return Cause(
        name="communication",
        share=share,
        sentence=f"{percent(share)} of the time the ranks exchange gradients and compute nothing meanwhile.",
        evidence=(f"{count(max(1, len(evidence.ranks)), 'rank')}, {count(batch, 'image')} an update",),
        change=f"--batch-size {2 * batch}, with a learning rate to match (--lr): half as many exchanges",
        saves=share / 2,
    )


def straggler(evidence: Evidence) -> Cause | None:
    """Find one rank that comes late to each exchange while the others wait for it."""
    waits = _waits(evidence)
    if len(waits) < 2:
        return None
    late = min(waits, key=lambda rank: waits[rank])
    usual = median(share for rank, share in waits.items() if rank != late)
    share = clip(usual - waits[late])
    if share < LEAST or waits[late] > STANDS_OUT * usual:
        return None
    if (unequal := _unequal_shares(evidence, late)) is not None:
        return unequal
    others = {
        bucket: median(shares.get(bucket, 0.0) for rank, shares in evidence.ranks.items() if rank != late)
        for bucket in BUCKETS
    }
    shares = evidence.ranks[late]
    worst = max((b for b in BUCKETS if b != "communication"), key=lambda b: shares.get(b, 0.0) - others[b])
    spends = f"it spends {percent(shares.get(worst, 0.0))} in {worst.replace('_', ' ')}"
    return Cause(
        name="straggler",
        share=share,
        sentence=f"Rank {late} is late, and the others wait for it {percent(share)} of the time.",
        evidence=(
            f"rank {late} waits {percent(waits[late])} of the time for the others, they {percent(usual)}",
            f"{spends}, the others {percent(others[worst])}",
        ),
        change=f"steady doctor --json on rank {late}'s machine, and steady doctor --against it on another's",
        saves=share,
    )


def _unequal_shares(evidence: Evidence, late: int) -> Cause | None:
    """Find a late rank that has more images of each update than the others."""
    images, others = evidence.fed.get(late, 0), [n for rank, n in evidence.fed.items() if rank != late and n]
    if not others or images < MORE * median(others):
        return None
    computing = {rank: sum(shares.get(b, 0.0) for b in PASSES) for rank, shares in evidence.ranks.items()}
    # With equal shares each takes as long for an image as those do who compute while all of them do.
    usual = median(seconds for rank, seconds in computing.items() if rank != late)
    equal = usual * (images + sum(others)) / (1 + len(others)) / median(others)
    share = clip(computing[late] - equal)
    if share < LEAST:
        return None
    batches = evidence.started.machine.get("micro_batches")
    return Cause(
        name="straggler",
        share=share,
        sentence=(
            f"Rank {late} has {images / median(others):.1f} times as many images of each update as the others, which"
            f" wait for it: equal shares would save {percent(share)} of the time."
        ),
        evidence=(
            f"{images:,} images were made for rank {late}, {median(others):,.0f} for each other",
            f"it computes {percent(computing[late])} of the time, the others {percent(usual)}",
        ),
        change=f"as many ranks as divide the {batches} micro-batches of an update, or begin anew with these ranks",
        saves=share,
    )


def _waits(evidence: Evidence) -> dict[int, float]:
    return {rank: shares.get("communication", 0.0) for rank, shares in evidence.ranks.items()}
