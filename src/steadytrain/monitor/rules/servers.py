"""Parameter servers of the asynchronous engine: exchanges that nothing hides, and one server that all wait for."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from steadytrain.events import ServerStats
from steadytrain.format import count, duration, percent, size
from steadytrain.monitor.evidence import Evidence
from steadytrain.monitor.rules.cause import LEAST, Cause, VerdictRule, clip

STANDS_OUT = 2.0  # a server is slow where its calls take so many times those of the others


def servers(evidence: Evidence) -> Iterator[Cause]:
    """Find what pushing to servers costs a worker, and which server it waits for."""
    stats = evidence.servers
    if stats is None or not stats.pushes or not stats.servers:
        return
    calls = [server["seconds"] / stats.pushes for server in stats.servers]
    updates = [server["update_seconds"] / stats.pushes for server in stats.servers]
    late = max(range(len(calls)), key=lambda number: calls[number])
    share = evidence.ledger.share("communication")
    others = [seconds for number, seconds in enumerate(calls) if number != late]
    waits = clip(share * (1 - max(others) / calls[late])) if others and calls[late] > 0 else 0.0
    if others and waits >= LEAST and calls[late] >= STANDS_OUT * median(others):
        places = evidence.started.machine.get("servers", [])
        yield Cause(
            name="slow_server",
            share=waits,
            sentence=f"Server {late} is slow: workers wait for it {percent(waits)} of the time.",
            evidence=(
                *([f"it is on {places[late]}"] if late < len(places) else []),
                f"a push and a pull take {duration(calls[late])} there, {duration(median(others))} at the others",
                f"its updates take {duration(updates[late])} of that, those of the others"
                f" {duration(median([u for n, u in enumerate(updates) if n != late]))}",
                *rates(stats),
            ),
            change=f"steady doctor on the machine of server {late}: other programs on it, or its link",
            saves=waits,
        )
        share -= waits
    more = len(calls) + 1
    saves = clip(share * (1 - len(calls) / more)) if sum(updates) > 0.5 * sum(calls) else 0.0
    yield Cause(
        name="communication",
        share=clip(share),
        sentence=f"{percent(share)} of the time goes into pushing gradients and pulling weights.",
        evidence=(
            f"a push and a pull take {duration(calls[late])}, the update {duration(max(updates))} of that",
            *rates(stats),
        ),
        change=f"--servers {more}: their updates take half of it or more"
        if saves
        else "--set parallel.compress=bf16: half the bytes of a push",
        saves=saves,
    )


def rates(stats: ServerStats) -> tuple[str, ...]:
    """Describe how often a worker pushes, how much, and how stale that is."""
    pushed, pulled = (sum(server[name] for server in stats.servers) for name in ("pushed_bytes", "pulled_bytes"))
    seconds = max(stats.seconds, 1e-9)
    return (
        f"{count(len(stats.servers), 'server')}: {stats.pushes / seconds:.1f} pushes a second,"
        f" {size(pushed / seconds)}/s out and {size(pulled / seconds)}/s in",
        f"a push has missed {stats.staleness:.1f} updates on average, {stats.staleness_max} at most",
    )


RULES = (VerdictRule("servers", servers),)
