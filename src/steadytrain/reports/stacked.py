"""The ledger over time, as a chart stacks it: useful work at the bottom, what was waited for above it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from steadytrain.monitor import Slice
from steadytrain.reports.buckets import SHOWN


def stacked(slices: Sequence[Slice]) -> dict[str, Any]:
    """Shares of the time of each slice, for the buckets that hold anything.

    Returns:
        ``edges``: where the slices begin and the last one ends, in seconds of the run (one more than slices);
        ``buckets``: each ``name`` and its ``shares`` (of each slice, 0 to 1), in the order of ``buckets.SHOWN``.
    """
    edges = [0.0]
    for one in slices:
        edges.append(edges[-1] + one.ended - one.began)
    lengths = [sum(one.seconds.values()) for one in slices]
    told = {name: [one.seconds.get(name, 0.0) for one in slices] for name in SHOWN}
    buckets = [
        {"name": name, "shares": [_share(s, length) for s, length in zip(held, lengths, strict=True)]}
        for name, held in told.items()
        if any(held)
    ]
    return {"edges": [round(edge, 3) for edge in edges], "buckets": buckets}


def _share(seconds: float, length: float) -> float:
    return round(seconds / length, 5) if length > 0 else 0.0
