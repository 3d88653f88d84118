"""The cost of the loader to a launch-bound loop, which keeps a single core busy with small torch operations.

A step trains a small network on a few small tensors and takes about 0.5 ms, nearly all of it the interpreter's and
torch's own overhead, as the host's side of a step on a fast GPU. Beside it the feed makes batches with one thread on
the other core: in the same process (``threads``) or in one of its own (``process``). ``cifar10``: 50,000 small images,
kept decoded, padded, cropped and flipped, 128 in a batch; ``packed``: photographs of 256 pixels, decoded, cropped and
resized to 224, 64 in a batch. The loop takes a batch every so many steps that the feed has to work ``--load`` of the
time, or with every step (``steps_per_batch``; the feed alone is measured first).

Turns without a feed (the same batch again and again), with threads and with a process follow each other in rounds, and
turns beside programs that this one hears nothing of. What those cost, cores cost each other by sharing caches, memory
and clock, and no feed of that work can cost less than ``elsewhere``:

- ``elsewhere``: the same feed makes as many batches;
- ``copies``: one that only copies as many bytes, from random places of a memory as large as the decoded images (256 MB
  at most) to the places of a few batches;
- ``spins``: one that never rests, and touches no memory.

Figures are medians over the rounds. The time in which the loop was ready to run while its core did something else is
left out: it is other programs' (``/proc/thread-self/schedstat``).

- ``step_ms``: what a step took, taking and returning batches included, but not the waiting for those that were not
  ready, which is ``wait_ms``: it depends on how fast the feed is, not on what it costs.
- ``cost``: what ``step_ms`` is more than without a feed, as a share of that, round by round.
- ``cost_over_elsewhere``: the same against the turns in which the feed works elsewhere.
- ``core_cost``: the loop's seconds lost for each CPU second that the feed worked: what a busy core of feed costs, also
  where the machine had too little time for it.

usage: python benchmarks/feed_beside_loop.py --data FOLDER [--rounds 15] [--load 0.8] [--works cifar10 packed] [--save]
       FOLDER holds imagenet-sample-200.tar and cifar10-png.tar.zst
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil
import torch

import machine
from peers import feed_works
from steadytrain.data.loader import Batch, Crop, ImageLoader
from steadytrain.data.recordio.reader import Records

PLACES = ("none", "threads", "process", "elsewhere", "copies", "spins")
PROGRAMS = PLACES[3:]
COPIED_BYTES, COPIED_TO = 2**28, 20
STEP_SECONDS = 0.5e-3
CUTS = {
    "cifar10": (Crop(kind="pad-crop", size=32, flip=True), 128),
    "packed": (Crop(kind="resized-crop", size=224, flip=True), 64),
}
Told = dict[str, Any]


class Loop:
    """Steps of so many small layers."""

    def __init__(self, layers: int) -> None:
        torch.manual_seed(0)
        parts = [part for _ in range(layers) for part in (torch.nn.Linear(32, 32), torch.nn.ReLU())]
        self.module = torch.nn.Sequential(*parts)
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=1e-3, momentum=0.9, foreach=False)
        self.images = torch.zeros(16, 32)

    def take(self, batch: Batch) -> None:
        """Take a batch; on a GPU it would be copied there."""
        self.batch = torch.from_numpy(batch.images), torch.from_numpy(batch.labels)

    def step(self) -> None:
        self.module(self.images).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def cpu_seconds(self, steps: int) -> float:
        """Return the mean CPU seconds of a step."""
        since = time.thread_time()
        for _ in range(steps):
            self.step()
        return (time.thread_time() - since) / steps


def fitting() -> Loop:
    """Build a loop whose step takes about :data:`STEP_SECONDS`."""
    for layers in range(1, 100):
        loop = Loop(layers)
        loop.cpu_seconds(100)
        if median(loop.cpu_seconds(20) for _ in range(20)) >= STEP_SECONDS:
            return loop
    raise SystemExit("no loop of 100 layers takes so long")


class Clock:
    """Seconds of this thread by kind: ``wall``, on a core (``cpu``), and waiting for a core (``queued``)."""

    def __init__(self) -> None:
        path = Path("/proc/thread-self/schedstat")
        self._file = os.open(path, os.O_RDONLY) if path.exists() else None

    def __call__(self) -> tuple[float, float, float]:
        queued = 0.0 if self._file is None else int(os.pread(self._file, 80, 0).split()[1]) / 1e9
        return time.perf_counter(), time.thread_time(), queued


def resident(records: Records, work: str) -> Iterator[Batch]:
    """Repeat the first batch of a work."""
    cut, size = CUTS[work]
    with ImageLoader(records, cut, batch_size=size, threads=1) as feed:
        return itertools.repeat(next(iter(feed)))


def loader_on(core: set[int], records: Records, work: str, **options: Any) -> tuple[ImageLoader, Iterator[Batch]]:
    """Start a loader whose threads, or whose process, have these cores; return it with its batches after the first."""
    cut, size = CUTS[work]
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, core)  # inherited
    feed = ImageLoader(records, cut, batch_size=size, **options)
    batches = iter(feed)
    next(batches)
    os.sched_setaffinity(0, before)
    return feed, batches


class Side:
    """One contender: a feed that goes on and on, or none.

    Args:
        place: where its threads live.
        records: of the work.
        work: its name.
        core: that the feed may use.
    """

    def __init__(self, place: str, records: Records, work: str, core: set[int]) -> None:
        self.place = place
        self.seconds: list[float] = []
        self.waits: list[float] = []
        self.work_seconds: list[float] = []
        self._counter = np.zeros(1, dtype=np.int64)
        self._program: subprocess.Popen[bytes] | None = None
        if place == "none" or place in PROGRAMS:
            self._batches = resident(records, work)
            return
        self.feed, self._batches = loader_on(core, records, work, threads=1, place=place, keep_bytes=2**30)
        for _ in range(len(records) // CUTS[work][1] if self.feed.keeps else 0):
            next(self._batches)

    def start_program(self, records: Path, work: str, core: int, folder: Path) -> None:
        """Let another program work for a batch whenever this side takes one."""
        counter = folder / f"{work}.{self.place}"
        counter.write_bytes(bytes(8))
        self._counter = np.memmap(counter, dtype=np.int64)
        command = [sys.executable, __file__, f"--{self.place}", str(records), work, str(core), str(counter)]
        self._program = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert self._program.stdout is not None
        self._program.stdout.readline()  # it has what it needs
        self._program.send_signal(signal.SIGSTOP)

    def alone(self, seconds: float) -> float:
        """Return the CPU seconds that the loader needs for a batch, with nothing beside it."""
        began, before, count = time.perf_counter(), self._used(), 0
        while time.perf_counter() - began < seconds:
            next(self._batches)
            count += 1
        return (self._used() - before) / count

    def turn(self, loop: Loop, steps: int, steps_per_batch: int) -> None:
        """Make some steps, beginning with the loader at work."""
        time.sleep(0.05)  # the others fill their queues
        if self._program is not None:
            self._program.send_signal(signal.SIGCONT)
        self._go(loop, 4 * steps_per_batch, steps_per_batch)
        used, clock = self._used(), Clock()
        since = clock()
        waited = self._go(loop, steps, steps_per_batch, clock)
        wall, _, queued = (now - then for now, then in zip(clock(), since, strict=True))
        self.seconds.append((wall - queued - waited) / steps)
        self.waits.append(waited / steps)
        self.work_seconds.append((self._used() - used) / steps)
        if self._program is not None:
            self._program.send_signal(signal.SIGSTOP)

    def close(self) -> None:
        if self._program is not None:
            self._program.kill()
            self._program.wait()
        elif self.place != "none":
            self._batches = iter(())
            self.feed.close()

    def _go(self, loop: Loop, steps: int, steps_per_batch: int, clock: Clock | None = None) -> float:
        """Take some steps; the seconds that the loop waited for batches."""
        batches, waited = self._batches, 0.0
        for number in range(steps):
            if number % steps_per_batch == 0:
                before = clock() if clock else (0.0, 0.0, 0.0)
                batch = next(batches)
                if clock:
                    wall, cpu, queued = (now - then for now, then in zip(clock(), before, strict=True))
                    waited += max(0.0, wall - cpu - queued)
                loop.take(batch)
                self._counter[0] += 1
            loop.step()
        return waited

    def _used(self) -> float:
        """Return CPU seconds of this process's other threads, and of its children."""
        there = 0.0
        if self.place == "process":
            there = sum(sum(psutil.Process(child.pid).cpu_times()[:2]) for child in self.feed._children)
        elif self._program is not None:
            there = sum(psutil.Process(self._program.pid).cpu_times()[:2])
        return time.process_time() - time.thread_time() + there


def compare(work: str, records: Records, folder: Path, rounds: int, steps: int, load: float) -> Told:
    """Measure all sides in turns."""
    first, *others = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {first})
    loop = fitting()
    sides = [Side(place, records, work, set(others or [first])) for place in PLACES]
    batch_seconds = sides[1].alone(2.0)
    steps_per_batch = max(1, round(batch_seconds / load / STEP_SECONDS))
    steps = max(steps, 4 * steps_per_batch)
    for side in sides[-len(PROGRAMS) :]:
        side.start_program(records.path, work, (others or [first])[0], folder)
    for number, side in machine.in_turns(sides, rounds):
        machine.say(f"  {work}: round {number + 1} of {rounds}, {side.place}")
        side.turn(loop, steps, steps_per_batch)
    for side in sides:
        side.close()
    size = CUTS[work][1]
    return {
        "batch_size": size,
        "feed_cpu_seconds_per_batch": batch_seconds,
        "steps_per_batch": steps_per_batch,
        "images_per_second_taken": round(size / steps_per_batch / STEP_SECONDS),
        "steps_per_turn": steps,
        **{side.place: _figures(side, sides[0], sides[3]) for side in sides},
    }


def program(what: str, records: Path, work: str, core: int, counter: Path) -> None:
    """Work for as many batches as the counter says, until the process is ended."""
    os.sched_setaffinity(0, {core})
    wanted = np.memmap(counter, dtype=np.int64, mode="r")
    with Records.open(records) as opened:
        works = {"elsewhere": _fed, "copies": _copied, "spins": _spun}[what](opened, work)
        next(works)
        print("ready", flush=True)
        for number in itertools.count():
            while number >= wanted[0] and what != "spins":
                time.sleep(2e-4)
            next(works)


def _fed(records: Records, work: str) -> Iterator[None]:
    cut, size = CUTS[work]
    with ImageLoader(records, cut, batch_size=size, threads=1, keep_bytes=2**30) as feed:
        batches = iter(feed)
        for _ in range(len(records) // size if next(batches) and feed.keeps else 0):
            next(batches)
        while True:
            yield
            next(batches)


def _copied(records: Records, work: str) -> Iterator[None]:
    cut, size = CUTS[work]
    image = cut.size * cut.size * cut.channels
    memory = np.zeros((min(len(records), COPIED_BYTES // image), image), dtype=np.uint8)
    memory += 1  # pages of its own
    batches, random = np.zeros((COPIED_TO, size, image), dtype=np.uint8), np.random.default_rng(0)
    for number in itertools.count():
        yield
        np.take(memory, random.integers(len(memory), size=size), axis=0, out=batches[number % COPIED_TO], mode="clip")


def _spun(records: Records, work: str) -> Iterator[None]:
    while True:
        yield


def _figures(side: Side, none: Side, elsewhere: Side) -> Told:
    figures: Told = {"step_ms": round(1000 * median(side.seconds), 4), "wait_ms": round(1000 * median(side.waits), 4)}
    if side is none:
        return figures
    lost = [mine - other for mine, other in zip(side.seconds, none.seconds, strict=True)]
    ratios = [more / other for more, other in zip(lost, none.seconds, strict=True)]
    besides = [mine / other - 1 for mine, other in zip(side.seconds, elsewhere.seconds, strict=True)]
    return figures | {
        "cost": round(median(ratios), 4),
        "cost_quartiles": [round(value, 4) for value in machine.quartiles(ratios)],
        "cost_over_elsewhere": round(median(besides), 4),
        "core_cost": round(sum(lost) / max(sum(side.work_seconds), 1e-9), 4),
        "feed_cpu_ms_per_step": round(1000 * median(side.work_seconds), 4),
    }


def main() -> None:
    torch.set_num_threads(1)
    parser = machine.parser(
        __doc__, data="imagenet-sample-200.tar and cifar10-png.tar.zst", choose=("--works", CUTS), rounds=15
    )
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--load", type=float, default=0.8)
    args = parser.parse_args()
    works: Told = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in args.works:
            packed = feed_works.make(name, args.data, Path(folder) / name).records
            with Records.open(packed) as records:
                cores = os.sched_getaffinity(0)
                works[name] = compare(name, records, Path(folder), args.rounds, args.steps, args.load)
                os.sched_setaffinity(0, cores)
    machine.record(
        "feed_beside_loop", {"step_seconds": STEP_SECONDS, "load": args.load, "works": works}, save=args.save
    )


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1][2:] in PROGRAMS:
        program(sys.argv[1][2:], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]), Path(sys.argv[5]))
    else:
        main()
