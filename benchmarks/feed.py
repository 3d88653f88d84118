"""Images per second of the feed, beside torchvision's ImageFolder and torch's DataLoader on the same files and work.

Three works, into uint8 batches of 64 (128 for CIFAR-10), nothing else running in the process:

- ``originals``: the same JPEG bytes, 200 ImageNet originals of about 110 kB, as files for torchvision and packed byte
  for byte (``encoding="pass"``) for us: RandomResizedCrop(224), antialiased bilinear, and a horizontal flip;
- ``packed``: those packed at 256 pixels, quality 95 (about 44 kB), as a user would; torchvision gets the packed JPEGs
  as files, so both read the same bytes; the same work;
- ``cifar10``: the same PNG bytes: RandomCrop(32, padding=4) and a horizontal flip. Ours keeps decoded images, and its
  first pass, which decodes them, is told apart.

``torchvision`` is ImageFolder as it comes (Pillow); ``torchvision-io`` gives it ``torchvision.io.decode_image`` and
tensors, its fastest way. Workers are processes there and threads here; with 0 workers its main process does it all.
All contenders are made before the first round and take turns. A turn begins when the one before has refilled its queue
and fallen silent, and first drains what was made ahead. Beside images per second of wall clock stand images per second
of CPU time of the process and its children: other work on the machine hardly shows there.

usage: python benchmarks/feed.py --data FOLDER [--rounds 5] [--seconds 3] [--save]
       FOLDER holds imagenet-sample-200.tar and cifar10-png.tar.zst (either may be missing)
"""

from __future__ import annotations

import argparse
import os
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
import zstandard
from torch.utils.data import DataLoader, RandomSampler
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

import machine
from steadytrain.feed import Cut, Feed
from steadytrain.records.pack import pack
from steadytrain.records.reader import Records

AHEAD = 4  # batches made ahead by every contender: our depth, and about what a DataLoader prefetches
ENDLESS = 10**8


@dataclass
class Contender:
    """Something that gives batches; what it did in each round."""

    name: str
    batches: Iterator[int]
    images_per_second: list[float] = field(default_factory=list)
    images_per_cpu_second: list[float] = field(default_factory=list)

    def turn(self, seconds: float) -> None:
        """Take batches for some time, after those that lay ready."""
        settle()
        for _ in range(2 * AHEAD):
            next(self.batches)
        images, cpu, began = 0, cpu_seconds(), time.perf_counter()
        while (passed := time.perf_counter() - began) < seconds:
            images += next(self.batches)
        self.images_per_second.append(images / passed)
        self.images_per_cpu_second.append(images / (cpu_seconds() - cpu))

    def figures(self) -> dict[str, float]:
        """Medians over the rounds."""
        wall, cpu = median(self.images_per_second), median(self.images_per_cpu_second)
        return {"images_per_second": round(wall, 1), "images_per_cpu_second": round(cpu, 1)}


@dataclass(frozen=True)
class Work:
    """One data set and what is to be done with its images."""

    files: Path
    records: Path
    cut: Cut
    batch_size: int
    pil: v2.Transform
    tensor: v2.Transform


def cpu_seconds() -> float:
    """User and system time of this process and its living children."""
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    return sum(times.user + times.system for times in (process.cpu_times() for process in processes))


def settle() -> None:
    """Wait until nobody fills a queue any more."""
    while True:
        before = cpu_seconds()
        time.sleep(0.2)
        if cpu_seconds() - before < 0.02:
            return


def originals(folder: Path, out: Path) -> Work:
    """The ImageNet sample, in two classes: the least that can be packed."""
    files = out / "files"
    with tarfile.open(folder / "imagenet-sample-200.tar") as tar:
        tar.extractall(files / "all", filter="data")
    for number, path in enumerate(sorted((files / "all").rglob("*.JPEG"))):
        home = files / "train" / f"{number % 2}"
        home.mkdir(parents=True, exist_ok=True)
        path.rename(home / path.name)
    records = pack(files / "train", out / "originals.rec", encoding="pass")[0].path
    return crops_of_224(files / "train", records)


def packed(folder: Path, out: Path) -> Work:
    """The same, packed at 256 pixels, and each of the packed images as a file."""
    records = pack(originals(folder, out / "source").files, out / "packed.rec", shorter_side=256)[0].path
    with Records.open(records) as opened:
        for number, label in enumerate(opened.labels.tolist()):
            home = out / "packed" / f"{label}"
            home.mkdir(parents=True, exist_ok=True)
            (home / f"{number:05}.jpg").write_bytes(opened.image(number))
    return crops_of_224(out / "packed", records)


def crops_of_224(files: Path, records: Path) -> Work:
    """The usual training crop."""
    train = [v2.RandomResizedCrop(224, antialias=True), v2.RandomHorizontalFlip()]
    cut = Cut(kind="resized-crop", size=224, flip=True)
    return Work(files, records, cut, 64, v2.Compose([*train, v2.PILToTensor()]), v2.Compose(train))


def cifar10(folder: Path, out: Path) -> Work:
    """CIFAR-10's training images as PNG files."""
    files = out / "files"
    with (folder / "cifar10-png.tar.zst").open("rb") as raw:
        reader = zstandard.ZstdDecompressor().stream_reader(raw)
        with tarfile.open(fileobj=reader, mode="r|") as tar:
            tar.extractall(files, filter="data")
    home = next(path for path in files.rglob("train") if path.is_dir())
    train = [v2.RandomCrop(32, padding=4), v2.RandomHorizontalFlip()]
    cut = Cut(kind="pad-crop", size=32, pad=4, flip=True)
    records = pack(home, out / "cifar10.rec", encoding="pass")[0].path
    return Work(home, records, cut, 128, v2.Compose([*train, v2.PILToTensor()]), v2.Compose(train))


def ours(work: Work, threads: int, stack: ExitStack, **options: Any) -> Iterator[int]:
    """The feed, without end."""
    records = stack.enter_context(Records.open(work.records))
    feed = Feed(records, work.cut, batch_size=work.batch_size, threads=threads, depth=AHEAD, **options)
    return map(len, iter(stack.enter_context(feed)))


def torchvision(work: Work, workers: int, *, fast: bool) -> Iterator[int]:
    """ImageFolder and DataLoader, without end: sampling with replacement, so that no epoch ever ends."""
    loader: dict[str, Any] = {"loader": decode} if fast else {}
    data = ImageFolder(work.files, transform=work.tensor if fast else work.pil, **loader)
    sampler = RandomSampler(data, replacement=True, num_samples=ENDLESS)
    prefetch = {"prefetch_factor": AHEAD // workers} if workers else {}
    batches = DataLoader(data, work.batch_size, sampler=sampler, num_workers=workers, **prefetch)
    return (len(labels) for _, labels in batches)


def decode(path: str) -> torch.Tensor:
    """torchvision's own decoder."""
    from torchvision.io import ImageReadMode, decode_image, read_file

    return decode_image(read_file(path), mode=ImageReadMode.RGB)


def contenders(work: Work, stack: ExitStack) -> list[Contender]:
    """Peers and ours, all of them running."""
    made = []
    for workers in (0, 1, 2):
        for name, fast in (("torchvision", False), ("torchvision-io", True)):
            made.append(Contender(f"{name}, {workers} workers", torchvision(work, workers, fast=fast)))
    for threads in (1, 2):
        made.append(Contender(f"steadytrain, {threads} threads", ours(work, threads, stack)))
    return made


def compare(work: Work, rounds: int, seconds: float) -> dict[str, Any]:
    """All contenders in turns; medians, and our ratio to each way that torchvision was run."""
    with ExitStack() as stack:
        taking_part = contenders(work, stack)
        if work.cut.kind == "pad-crop":
            first_pass = {f"{threads} threads": decode_all(work, threads) for threads in (1, 2)}
            keep_all(work, [one for one in taking_part if one.name.startswith("steadytrain")])
        else:
            first_pass = {}
        for turn in range(rounds + 1):
            for contender in taking_part:
                contender.turn(seconds if turn else seconds / 3)
        for contender in taking_part:  # the first turn warmed up
            del contender.images_per_second[0], contender.images_per_cpu_second[0]
        told = {contender.name: contender.figures() for contender in taking_part}
    return {"contenders": told, **({"first_pass": first_pass} if first_pass else {}), "ratios": ratios(told)}


def ratios(told: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Ours over each peer: with as many workers as we have threads; by CPU time, over its best number of workers."""
    found: dict[str, dict[str, float]] = {}
    for peer in ("torchvision", "torchvision-io"):
        same = {
            f"{n} threads / {n} workers": told[f"steadytrain, {n} threads"]["images_per_second"]
            / told[f"{peer}, {n} workers"]["images_per_second"]
            for n in (1, 2)
        }
        best = max(figures["images_per_cpu_second"] for name, figures in told.items() if name.startswith(f"{peer},"))
        mine = told["steadytrain, 2 threads"]["images_per_cpu_second"]
        found[peer] = {name: round(value, 2) for name, value in {**same, "per CPU second": mine / best}.items()}
    return found


def decode_all(work: Work, threads: int) -> float:
    """Images per second of the pass that decodes what is then kept."""
    with ExitStack() as stack:
        batches = ours(work, threads, stack)
        with Records.open(work.records) as records:
            n = len(records)
        began, images = time.perf_counter(), 0
        while images < n:
            images += next(batches)
        return round(images / (time.perf_counter() - began), 1)


def keep_all(work: Work, feeds: list[Contender]) -> None:
    """Let every feed go through its data once."""
    with Records.open(work.records) as records:
        n = len(records)
    for contender in feeds:
        images = 0
        while images < n + 1000:
            images += next(contender.batches)


def main() -> None:
    """Unpack, measure, record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=os.environ.get("STEADYTRAIN_TEST_DATA"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    if args.data is None:
        parser.error("--data FOLDER (or STEADYTRAIN_TEST_DATA) says where the images are")
    works: dict[str, tuple[str, Callable[[Path, Path], Work]]] = {
        "originals": ("imagenet-sample-200.tar", originals),
        "packed": ("imagenet-sample-200.tar", packed),
        "cifar10": ("cifar10-png.tar.zst", cifar10),
    }
    with tempfile.TemporaryDirectory(prefix="feed-benchmark-") as scratch:
        told = {
            name: compare(make(Path(args.data), Path(scratch) / name), args.rounds, args.seconds)
            for name, (file, make) in works.items()
            if (Path(args.data) / file).exists()
        }
    machine.record("feed", {"rounds": args.rounds, "seconds": args.seconds, **told}, save=args.save)


if __name__ == "__main__":
    main()
