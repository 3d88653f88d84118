"""Compare the engines on a link: the seconds of an update with each of them, by the model of :mod:`.scale`.

- One device alone computes whole batches, and needs no link.
- ``ddp`` exchanges buckets while the backward pass goes on; what remains when it ends is exposed.
- Compressed to 16 or 2 bits, a bucket costs a latency and its part of the rest of the time that ``steady bandwidth``
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
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

from steadytrain.config import Parallel
from steadytrain.distributed.powersgd import num_values
from steadytrain.format import duration, fold, percent, text_table
from steadytrain.tuning.scale import Gradient, MachineCluster, buckets, exposed_seconds, fit_backend

NEAR = 0.1
"""A more exact engine is recommended if it is slower by no more than this share. A choice, not a measurement."""

BACKWARD_SHARE = 2 / 3
"""Of an update's computation: the backward pass makes two products for each one of the forward pass."""

USUAL_SECONDS = (0.1, 1.0, 10.0)
"""Updates to compare engines for where nobody says how long one takes."""

_VALUE = 4  # bytes of a float32


@dataclass(frozen=True, kw_only=True)
class ExchangeSpeed:
    """The predicted speed of one engine.

    Args:
        engine: in words.
        flags: of ``steady train``.
        step_seconds: of an update, on average.
        exposed_seconds: of these, the part of the exchange that computing does not hide.
        accuracy: what the engine costs in accuracy, in words.
    """

    engine: str
    flags: str
    step_seconds: float
    exposed_seconds: float
    accuracy: str


_EXACT = "the same updates as one device makes, within rounding"
_ACCURACY = {
    "fp16": "gradients rounded to 16 bits; tiny ones become 0",
    "bf16": "gradients rounded to 8 bits of precision",
    "powersgd": "of each gradient what narrow matrices hold at once, and the rest later: compare the accuracy of a"
    " short run first; a larger parallel.power_rank is nearer",
    "2bit": "small gradients arrive late, and parallel.threshold must suit the model: compare the accuracy of a short"
    " run first",
    "local": "ranks drift apart between two averages: the more updates, ranks and learning rate, the less accurate;"
    " --local-from exchanges gradients first, where that costs most",
    "async": "gradients are of weights some updates old, the more workers the older: compare the accuracy of a short"
    " run first; --staleness bounds it, and --optimizer dcasgd compensates for it",
}


def compare_engines(
    backend: Mapping[str, Any], shapes: Sequence[Sequence[int]], ranks: int, step_seconds: float
) -> list[ExchangeSpeed]:
    """Predict the seconds of an update with each engine, the most exact engine first.

    Args:
        backend: of a document of ``steady bandwidth --json``.
        shapes: of the parameters, in the network's order.
        ranks: 2 or more.
        step_seconds: that an update computes on each of them, without any exchange.
    """
    cluster, defaults = MachineCluster(between=fit_backend(backend, ranks)), Parallel()
    sizes = [_VALUE * prod(shape) for shape in shapes]
    # The last layers' gradients are ready first, and evenly, for want of a measurement.
    gradients = [Gradient(bytes=size, ready=(k + 1) / len(sizes)) for k, size in enumerate(reversed(sizes))]
    filled, total = buckets(gradients), sum(sizes)
    backward = BACKWARD_SHARE * step_seconds
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

    def speed(engine: str, flags: str, exposed: float, accuracy: str) -> ExchangeSpeed:
        return ExchangeSpeed(
            engine=engine,
            flags=flags,
            step_seconds=step_seconds + exposed,
            exposed_seconds=exposed,
            accuracy=accuracy,
        )

    rank, every, flag = defaults.power_rank, defaults.sync_every, "--set parallel.compress"
    sent = _VALUE * num_values([list(shape) for shape in shapes], rank)
    alone = ExchangeSpeed(
        engine="one device alone",
        flags="",
        step_seconds=ranks * step_seconds,
        exposed_seconds=0.0,
        accuracy="this link is too slow for these updates: more devices on it bring nothing",
    )
    return [
        alone,
        speed("ddp", "", exposed_seconds(filled, backward, whole), _EXACT),
        *(speed(f"ddp, {way}", f"{flag}={way}", compressed(way), _ACCURACY[way]) for way in ("fp16", "bf16")),
        speed(f"ddp, powersgd of rank {rank}", f"{flag}=powersgd", 2 * whole(sent / 2), _ACCURACY["powersgd"]),
        speed("ddp, 2bit", f"{flag}=2bit", compressed("2bit"), _ACCURACY["2bit"]),
        speed(
            f"local, every {every} updates",
            f"--engine local --sync-every {every}",
            whole(total) / every,
            _ACCURACY["local"],
        ),
        speed("async, 1 server", f"--engine async --workers {ranks}", pushed(), _ACCURACY["async"]),
    ]


def recommend(speeds: Sequence[ExchangeSpeed]) -> ExchangeSpeed:
    """Choose the most exact engine that is nearly as fast as the fastest."""
    fastest = min(speed.step_seconds for speed in speeds)
    return next(speed for speed in speeds if speed.step_seconds <= (1 + NEAR) * fastest)


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
        rows = [asdict(speed) for speed in speeds]
        tables.append({"step_seconds": seconds, "engines": rows, "recommended": recommend(speeds).engine})
    return tables


def engines_text(tables: Sequence[Mapping[str, Any]], width: int) -> str:
    """Return the comparison as a table: a column for each duration of an update, a star at the recommended engine."""
    lines = [["an update computes for", *(duration(table["step_seconds"]) for table in tables)]]
    for k, row in enumerate(tables[0]["engines"]):
        cells = [
            f"{duration(table['engines'][k]['step_seconds'])}{' *' if table['recommended'] == row['engine'] else '  '}"
            for table in tables
        ]
        lines.append([row["engine"], *cells])
    text = [text_table(lines, right=range(1, len(lines[0])))]
    for name in dict.fromkeys(table["recommended"] for table in tables):
        row = next(row for row in tables[0]["engines"] if row["engine"] == name)
        flags = f" ({row['flags']})" if row["flags"] else ""
        text += fold(f"* {name}{flags}: {row['accuracy']}", width).splitlines()
    near = (
        f"starred: the most exact engine within {percent(NEAR)} of the fastest; predicted, with communication exposed"
    )
    return "\n".join([*text, *fold(near, width).splitlines()])
