"""Several ranks: what they spend on talking to each other, and one that the others wait for."""

from __future__ import annotations

from statistics import median

from steadytrain.watch.causes.cause import LEAST, Cause, percent, some, within
from steadytrain.watch.evidence import Evidence
from steadytrain.watch.ledger import BUCKETS

STANDS_OUT = 0.5
"""A rank is late where it waits for the others less than this part of what they wait."""


def communication(evidence: Evidence) -> Cause | None:
    """Exchanging gradients is not hidden behind computing them. What a late rank makes the others wait is not meant."""
    waits = _waits(evidence)
    share = min(waits.values()) if len(waits) > 1 else evidence.ledger.share("communication")
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


def _waits(evidence: Evidence) -> dict[int, float]:
    return {rank: told.get("communication", 0.0) for rank, told in evidence.ranks.items()}
