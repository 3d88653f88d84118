"""Reading a disk: the global order and the order by blocks, with and without reading ahead.

A record file of ``--gib`` is made of the images of DATA, again and again. Each measurement is a process of its own that
begins with nothing of the file in the page cache and, after the first batch, takes others for ``--seconds``: ``read``
copies the encoded bytes and decodes nothing, so that the disk is the limit; ``train`` decodes and cuts to 224 pixels.
With ``--memory`` it runs in a control group of so many MiB, where this user may make one (root, as a rule): the file is
then larger than the memory that could cache it, however large the machine. ``read_over`` is what came from the disk
over what was needed: above 1 the system read what nobody asked for.

usage: python benchmarks/feed_order.py DATA [--gib 4] [--memory 1536] [--seconds 10] [--threads 2] [--rounds 2]
       [--at FOLDER] [--save]
       DATA is a folder of classes or an archive of photographs; FOLDER, on the disk to measure, takes the file
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil

import machine
from steadytrain.data.images.encode import to_ppm
from steadytrain.data.loader import BlockShuffle, Crop, ImageLoader
from steadytrain.data.recordio.framing import pack_header
from steadytrain.data.recordio.reader import Extents, Records
from steadytrain.data.recordio.writer import RecordWriter
from steadytrain.data.sources.unpacked import Unpacked

DOT = to_ppm(np.zeros((8, 8, 3), np.uint8))
ORDERS = {"global": None, "blocks": BlockShuffle(), "small window": BlockShuffle(size=64, window=16)}


class Bytes:
    """The bytes of records, read and forgotten: what a feed costs the disk, and next to nothing of the processor."""

    def __init__(self, records: Records) -> None:
        self.records = records
        self.labels = records.labels

    def __len__(self) -> int:
        return len(self.records)

    def image(self, number: int, /) -> bytes:
        np.array(self.records.image(number))
        return DOT

    def extents(self, numbers: Any, /) -> Extents:
        return self.records.extents(numbers)

    def scatter(self) -> None:
        self.records.scatter()

    def expect(self, stretches: Any, /) -> None:
        self.records.expect(stretches)

    def settle(self, numbers: Any, /) -> None:
        self.records.settle(numbers)

    def fill(self, needed: int, /) -> None:
        self.records.fill(needed)

    stays = True


def main() -> None:
    parser = machine.parser(__doc__, rounds=2)
    parser.add_argument("data")
    parser.add_argument("--gib", type=float, default=4.0)
    parser.add_argument("--memory", type=int, default=1536)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--at", type=Path)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=asked.at) as folder, limited(asked.memory) as group:
        file, images = make(asked.data, Path(folder) / "images.rec", int(asked.gib * 2**30))
        turns: dict[str, list[dict[str, Any]]] = {}
        for _ in range(asked.rounds):
            for work, order, ahead in product(("read", "train"), ORDERS, (False, True)):
                values = {"file": str(file), "group": group, "work": work, "order": order, "ahead": ahead}
                values |= {"seconds": asked.seconds, "threads": asked.threads}
                name = f"{work}, {order}, {'read ahead' if ahead else 'not read ahead'}"
                forget(file)
                done = subprocess.run(
                    [sys.executable, __file__, json.dumps(values)], stdout=subprocess.PIPE, text=True, check=True
                )
                turns.setdefault(name, []).append(json.loads(done.stdout))
                machine.say(f"{name}: {turns[name][-1]}")
        about = {"images": images, "bytes": file.stat().st_size, "threads": asked.threads, "seconds": asked.seconds}
        about |= {"memory_mib": asked.memory if group else None, "read_ahead_kb": system_reads_ahead(file)}
        figures = {name: {key: median(run[key] for run in runs) for key in runs[0]} for name, runs in turns.items()}
        machine.record("feed_order", {**about, "figures": figures}, save=asked.save)


def make(data: str, path: Path, size: int) -> tuple[Path, int]:
    """Write a record file of at least ``size`` bytes; return it and its number of images."""
    with Unpacked.open(data) as source, RecordWriter(path) as writer:
        images = [source.image(number) for number in range(len(source))]
        number = written = 0
        while written < size:
            image = images[number % len(images)]
            writer.write(pack_header(float(number % 10), id=number) + image, key=number)
            number, written = number + 1, written + len(image)
    return path, number


def forget(path: Path) -> None:
    """Take a file out of the page cache."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def system_reads_ahead(path: Path) -> int | None:
    """Return the kilobytes that the system reads ahead on this file's disk by default."""
    device = path.stat().st_dev
    block = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve()
    for place in (block, block.parent):
        if (place / "queue" / "read_ahead_kb").exists():
            return int((place / "queue" / "read_ahead_kb").read_text())
    return None


@contextmanager
def limited(mib: int) -> Iterator[str | None]:
    """Make a control group of so much memory, for processes to enter; None where none can be made."""
    root = Path("/sys/fs/cgroup")
    first = (root / "memory").is_dir()
    group = (root / "memory" if first else root) / f"feed-order-{os.getpid()}"
    try:
        group.mkdir()
        (group / ("memory.limit_in_bytes" if first else "memory.max")).write_text(str(mib * 2**20))
    except OSError as error:
        machine.say(f"no control group ({error}): the machine's memory is the limit")
        yield None
        return
    try:
        yield str(group)
    finally:
        group.rmdir()


def measure(request: dict[str, Any]) -> None:
    """Measure one order, in a process of its own."""
    if request["group"]:
        (Path(request["group"]) / "cgroup.procs").write_text(str(os.getpid()))
    with Records.open(request["file"]) as records:
        if request["work"] == "read":
            source: Any = Bytes(records)
            cut = Crop(kind="none", size=8)
        else:
            source, cut = records, Crop(kind="resized-crop", size=224, flip=True)
        feed = ImageLoader(
            source,
            cut,
            batch_size=128,
            threads=request["threads"],
            blocks=ORDERS[request["order"]],
            read_ahead=request["ahead"],
            keep_bytes=0,
        )
        sizes = records.extents(np.arange(len(records))).size
        process, began = psutil.Process(), time.perf_counter()
        with feed:
            batches = iter(feed)
            next(batches)  # it also loads the libraries
            first, began = time.perf_counter() - began, time.perf_counter()
            before, seconds, images, needed, passed = process.io_counters().read_bytes, feed.stats(), 0, 0, 0.0
            while passed < request["seconds"]:
                batch = next(batches)
                passed = time.perf_counter() - began
                images += len(batch)
                needed += int(sizes[batch.ids].sum())
            read = process.io_counters().read_bytes - before
            waited = feed.stats().read_seconds - seconds.read_seconds
    figures = {
        "images_per_second": round(images / passed, 1),
        "bytes_per_second": round(needed / passed),
        "read_over": round(read / needed, 3),
        "first_batch_seconds": round(first, 3),
        "read_share": round(waited / (passed * feed.task.num_threads), 3),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].startswith("{"):
        measure(json.loads(sys.argv[1]))
    else:
        main()
