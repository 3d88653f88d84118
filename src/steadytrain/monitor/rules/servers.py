"""The parameter server of the asynchronous engine: exchanges that nothing hides."""

from __future__ import annotations

from collections.abc import Iterator

from steadytrain.events import ServerStats
from steadytrain.format import duration, percent, size
from steadytrain.monitor.evidence import Evidence
from steadytrain.monitor.rules.cause import Cause, VerdictRule, clip


def servers(evidence: Evidence) -> Iterator[Cause]:
    """Find what pushing to the server costs a worker."""
    stats = evidence.servers
    if stats is None or not stats.pushes or not stats.servers:
        return
    call, update = (
        max(server[name] for server in stats.servers) / stats.pushes  # runs of before had several
        for name in ("seconds", "update_seconds")
    )
    share = clip(evidence.ledger.share("communication"))
    is_updating = update > 0.5 * call
    yield Cause(
        name="communication",
        share=share,
        sentence=f"{percent(share)} of the time goes into pushing gradients and pulling weights.",
        evidence=(f"a push and a pull take {duration(call)}, the update {duration(update)} of that", *rates(stats)),
        change="fewer workers, or --engine ddp: the server makes each update, which takes half of it or more"
        if is_updating
        else "--set parallel.compress=bf16: half the bytes of a push",
        saves=0.0,
    )


def rates(stats: ServerStats) -> tuple[str, ...]:
    """Describe how often a worker pushes, how much, and how stale that is."""
    pushed, pulled = (sum(server[name] for server in stats.servers) for name in ("pushed_bytes", "pulled_bytes"))
    seconds = max(stats.seconds, 1e-9)
    return (
        f"{stats.pushes / seconds:.1f} pushes a second, {size(pushed / seconds)}/s out and"
        f" {size(pulled / seconds)}/s in",
        f"a push has missed {stats.staleness:.1f} updates on average, {stats.staleness_max} at most",
    )


RULES = (VerdictRule("servers", servers),)
