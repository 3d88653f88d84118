"""The cost of loader threads to the thread that launches a GPU's operations, by the interpreter's lock.

Stands in for a training loop on a fast GPU: a Python thread launches 1,000 small operations every 80 ms, as for eager
ResNet-50 with a large batch, and every 20 ms; then it sleeps until the period is over. Beside it the loader decodes
packed photographs to crops of 224 pixels with 1, 2, 4, 8 and 14 threads of the same process, or in a process of its own
(``process``). The launching thread has the first core, the loader the others; the loop takes batches at 0.8 of the rate
that the loader reaches alone.

Figures are medians over the rounds, of turns without a loader, with threads and with a process that follow each other.
The time in which the launching thread was ready to run while its core did something else is left out (Linux's
``schedstat``); its waits for the lock are not.

- ``launch_ms``: what 1,000 launches and the taking of batches took.
- ``us_per_image``: of the launching thread, for each image that was taken: what is more than without a loader.
- ``take_us_per_image``: CPU time of that thread for taking batches, a part of it that other programs do not disturb,
  round by round; none where no batch came.
- ``share``: ``us_per_image`` times the images a second, the part of the launching thread's time that is lost.

Where few cores are there, many threads make no more images than one: what can be measured is the cost of an image.

usage: python benchmarks/feed_lock.py --data FOLDER [--rounds 5] [--seconds 1.5] [--threads 1 2 4 8 14] [--save]
       FOLDER holds imagenet-sample-200.tar
"""

from __future__ import annotations

import math
import os
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

import machine
from feed_beside_loop import CUTS, Clock, loader_on, resident
from peers import feed_works
from steadytrain.data.loader import ImageLoader
from steadytrain.data.recordio.reader import Records

OPERATIONS, PERIODS, LOAD, DEPTH = 1000, (0.080, 0.020), 0.8, 8


class Side:
    """One contender: a loader with so many threads in a place, or none."""

    def __init__(self, place: str, threads: int, records: Records, core: set[int]) -> None:
        self.name = place if place != "threads" else f"threads {threads}"
        self.size = CUTS["packed"][1]
        self.launches: list[float] = []
        self.images = 0
        self.taking = 0.0
        self.rate = 0.0
        if place == "none":
            self.feed: ImageLoader | None = None
            self.batches = resident(records, "packed")
            return
        options: dict[str, Any] = {"place": place, "threads": threads, "depth": DEPTH, "keep_bytes": 0}
        self.feed, self.batches = loader_on(core, records, "packed", **options)

    def alone(self, seconds: float) -> None:
        """Find the rate of the loader when nothing runs beside it."""
        began, images = time.perf_counter(), 0
        while time.perf_counter() - began < seconds:
            images += len(next(self.batches))
        self.rate = images / (time.perf_counter() - began)

    def turn(self, seconds: float, period: float, rate: float) -> None:
        """Launch and take for some time."""
        a, b, clock = torch.zeros(8), torch.ones(8), Clock()
        end, due = time.perf_counter() + seconds, 0.0
        self.launches, self.images, self.taking = [], 0, 0.0
        while (began := time.perf_counter()) < end:
            since = clock()
            due += rate * period
            before = time.thread_time()
            while due >= self.size and self._is_ready():
                self.images += len(next(self.batches))
                due -= self.size
            self.taking += time.thread_time() - before
            for _ in range(OPERATIONS):
                torch.add(a, b, out=a)
            wall, _, queued = (now - then for now, then in zip(clock(), since, strict=True))
            self.launches.append(wall - queued)
            time.sleep(max(0.0, began + period - time.perf_counter()))

    def _is_ready(self) -> bool:
        """Return whether a batch is there: waiting for one would be counted as launching."""
        streams = [] if self.feed is None else list(self.feed._streams)
        return all(stream._taken in stream._done for stream in streams)

    def close(self) -> None:
        self.batches = iter(())
        if self.feed is not None:
            self.feed.close()


def compare(records: Records, threads: list[int], rounds: int, seconds: float) -> dict[str, Any]:
    """Measure all sides in turns, for each period."""
    first, *others = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {first})
    core = set(others or [first])
    figures: dict[str, Any] = {}
    for period in PERIODS:
        rows: dict[str, list[tuple[float, float, float, float]]] = {}
        for _ in range(rounds):
            base = 0.0
            for place, count in [("none", 1), *(("threads", n) for n in threads), ("process", max(threads))]:
                side = Side(place, count, records, core)
                if place != "none":
                    side.alone(seconds / 2)
                side.turn(seconds, period, LOAD * side.rate)
                launch = sum(side.launches) / len(side.launches)
                base = launch if place == "none" else base
                images = side.images / len(side.launches)  # of a period
                lost = (launch - base) / images * 1e6 if images else 0.0
                taking = side.taking / side.images * 1e6 if side.images else math.nan
                rows.setdefault(side.name, []).append((launch * 1000, lost, images / period, taking))
                side.close()
        figures[f"{1000 * period:.0f} ms"] = {
            name: {
                "launch_ms": round(median(row[0] for row in some), 3),
                "us_per_image": round(median(row[1] for row in some), 2),
                "us_per_image_rounds": [round(row[1], 2) for row in some],
                "take_us_per_image": [round(row[3], 2) for row in some if row[3] > 0],
                "images_per_second": round(median(row[2] for row in some)),
                "share": round(median(row[1] * row[2] for row in some) / 1e6, 4),
            }
            for name, some in rows.items()
        }
    return figures


def main() -> None:
    torch.set_num_threads(1)
    parser = machine.parser(__doc__, data="imagenet-sample-200.tar", rounds=5)
    parser.add_argument("--seconds", type=float, default=1.5)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2, 4, 8, 14])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        packed = feed_works.make("packed", args.data, Path(folder) / "packed").records
        with Records.open(packed) as records:
            figures = compare(records, args.threads, args.rounds, args.seconds)
    about = {"operations": OPERATIONS, "load": LOAD, "batch_size": CUTS["packed"][1]}
    machine.record("feed_lock", about | {"periods": figures}, save=args.save)


if __name__ == "__main__":
    main()
