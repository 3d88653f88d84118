"""Compare the engines on a link: the seconds of an update with each of them, by the model of :mod:`.scale`.

- One device alone computes whole batches, and needs no link.
- ``ddp`` exchanges buckets while the backward pass goes on; what remains when it ends is exposed.
- Compressed to 16 bits, a bucket costs a latency and its part of the rest of the time that ``steady bandwidth``
  measured for one exchange of all of them.
- ``powersgd`` has two all-reduces after the pass, of what its two matrices hold.
- ``local`` has one all-reduce of all weights in ``sync_every`` updates, which nothing hides.
- ``async`` with one server beside the first worker: that worker computes all the time, each other one pushes gradients
  and pulls weights over the link between two batches, and all of them share the server's end of it.

Left out: what computing an exchange takes from a CPU that computes the passes, what power iterations compute, and what
a server takes to apply an update.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from steadytrain.config import Parallel
from steadytrain.distributed.powersgd import num_values
from steadytrain.format import duration, fold, percent, text_table
from steadytrain.tuning.scale import MachineCluster, buckets, even_gradients, exposed_seconds, fit_link

NEAR = 0.1
"""Share by which a more exact engine may be slower and is recommended all the same. A choice, not a measurement."""

BACKWARD_SHARE = 2 / 3
"""Share of an update's computation that is the backward pass: two products for each one of the forward pass."""

USUAL_SECONDS = (0.1, 1.0, 10.0)
"""Updates to compare engines for where nobody says how long one takes."""

_VALUE = 4  # bytes of a float32
_RANK, _EVERY = Parallel().power_rank, Parallel().sync_every
_COMPARE = "compare the accuracy of a short run first"

_ENGINES = (  # name, flags of steady train, and what it costs in accuracy: the most exact first
    ("one device alone", "", "this link is too slow for these updates: more devices on it bring nothing"),
    ("ddp", "", "the same updates as one device makes, within rounding"),
    ("ddp, fp16", "--set parallel.compress=fp16", "gradients rounded to 16 bits; tiny ones become 0"),
    ("ddp, bf16", "--set parallel.compress=bf16", "gradients rounded to 8 bits of precision"),
    (
        f"ddp, powersgd of rank {_RANK}",
        "--set parallel.compress=powersgd",
        f"of each gradient what narrow matrices hold at once, and the rest later: {_COMPARE}; a larger"
        " parallel.power_rank is nearer",
    ),
    (
        f"local, every {_EVERY} updates",
        f"--engine local --sync-every {_EVERY}",
        "ranks drift apart between two averages: the more updates, ranks and learning rate, the less accurate;"
        " --local-from exchanges gradients first, where that costs most",
    ),
    (
        "async, 1 server",
        "--engine async --workers {ranks}",
        f"gradients are of weights some updates old, the more workers the older: {_COMPARE};"
        " --optimizer dcasgd compensates for it",
    ),
)


def compare_engines(
    backend: Mapping[str, Any], shapes: Sequence[Sequence[int]], ranks: int, step_seconds: float
) -> list[dict[str, Any]]:
    """Predict the seconds of an update with each engine, the most exact engine first.

    Args:
        backend: of a document of ``steady bandwidth --json``.
        shapes: of the parameters, in the network's order.
        ranks: 2 or more.
        step_seconds: that an update computes on each of them, without any exchange.

    Returns:
        For each: ``engine``, ``flags`` of ``steady train``, ``step_seconds`` of an update on average, what of these
        computing does not hide (``exposed_seconds``), and what it costs in ``accuracy``, in words.
    """
    cluster = MachineCluster(between=fit_link(backend, ranks))
    sizes = [_VALUE * prod(shape) for shape in shapes]
    filled, total, backward = buckets(even_gradients(sizes)), sum(sizes), BACKWARD_SHARE * step_seconds
    measured = {way["way"]: way["seconds"] for way in backend["ways"]}

    def whole(bytes: float) -> float:
        return cluster.all_reduce_seconds(bytes, ranks)

    def compressed(way: str) -> float:
        start = min(whole(0), measured[way])
        return exposed_seconds(filled, backward, lambda num: start + (measured[way] - start) * num / total)

    def pushed() -> float:
        link, num_remote, batch = cluster.between, ranks - 1, ranks * step_seconds  # a worker's batch is a whole one
        transfer = link.latency_seconds + total / link.bytes_per_second
        cycle = max(batch + 2 * transfer, num_remote * total / link.bytes_per_second)
        return 1 / (1 / batch + num_remote / cycle) - step_seconds

    exposed = [
        0.0,
        exposed_seconds(filled, backward, whole),
        compressed("fp16"),
        compressed("bf16"),
        2 * whole(_VALUE * num_values([list(shape) for shape in shapes], _RANK) / 2),
        whole(total) / _EVERY,
        pushed(),
    ]
    rows = [
        {
            "engine": name,
            "flags": flags.format(ranks=ranks),
            "step_seconds": step_seconds + seconds,
            "exposed_seconds": seconds,
            "accuracy": accuracy,
        }
        for (name, flags, accuracy), seconds in zip(_ENGINES, exposed, strict=True)
    ]
    rows[0]["step_seconds"] = ranks * step_seconds
    return rows


def recommend(speeds: Sequence[Mapping[str, Any]]) -> str:
    """Choose the most exact engine that is nearly as fast as the fastest; return its name."""
    most = (1 + NEAR) * min(speed["step_seconds"] for speed in speeds)
    return next(str(speed["engine"]) for speed in speeds if speed["step_seconds"] <= most)


def engines_document(
    document: Mapping[str, Any], shapes: Sequence[Sequence[int]], step_seconds: float | None
) -> list[dict[str, Any]]:
    """Compare engines on the first back end of a document of ``steady bandwidth``, which is the one that training uses.

    Args:
        step_seconds: that an update computes; None: some usual values.

    Returns:
        For each of these: ``step_seconds``, ``engines``, and the name of the ``recommended`` one.
    """
    tables = []
    for seconds in USUAL_SECONDS if step_seconds is None else (step_seconds,):
        speeds = compare_engines(document["backends"][0], shapes, document["procs"], seconds)
        tables.append({"step_seconds": seconds, "engines": speeds, "recommended": recommend(speeds)})
    return tables


def engines_text(tables: Sequence[Mapping[str, Any]], width: int) -> str:
    """Return the comparison as a table: a column for each duration of an update, a star at the recommended engine."""
    lines = [["an update computes for", *(duration(table["step_seconds"]) for table in tables)]]
    notes = []
    for rows in zip(*(table["engines"] for table in tables), strict=True):
        name, flags, accuracy = (rows[0][key] for key in ("engine", "flags", "accuracy"))
        is_best = [table["recommended"] == name for table in tables]
        marks = [" *" if best else "  " for best in is_best]
        lines.append([name, *(f"{duration(row['step_seconds'])}{mark}" for row, mark in zip(rows, marks, strict=True))])
        notes += [f"* {name}{f' ({flags})' if flags else ''}: {accuracy}"] if any(is_best) else []
    notes.append(
        f"starred: the most exact engine within {percent(NEAR)} of the fastest; predicted, with communication exposed"
    )
    return "\n".join([text_table(lines, right=range(1, len(lines[0]))), *(fold(note, width) for note in notes)])
