"""Runs with all that is measured beside them, written by hand in the shape in which training records it.

``python -m tests.reports.measured_runs FOLDER [--live SECONDS]`` writes one to look at; ``--live`` at the pace of the
clock, as a process that trains would.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from msgspec.structs import replace
from tests.reports.runs import BATCH, NUM_TRAIN, STEPS_PER_EPOCH, evaluated, recipe, started

from steadytrain.events import Accounted, DeviceStats, Ended, Event, FeedStats, Logged, MachineStats, Saved, Step
from steadytrain.run import Run

GIB = 1 << 30


@dataclass
class Attempt:
    """One attempt from its start on, an event after the other; ``now`` is the time that the next one is stamped with.

    ``starving``: the share of the decoding that the loop has to wait for, once the first quarter is over.
    """

    now: float
    steps: int = 1055
    gpus: int = 0
    starving: float = 0.25
    seconds: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.began = self.now
        self.chance = random.Random(7)
        self.fed = {"asked": 0, "starved": 0, "ready": 0.0, "decode": 0.0}
        self.told = self.now

    def events(self) -> Iterator[Event]:
        """All of it, to a good end."""
        self.spend("startup", 5.2)
        opening = started(steps=self.steps)
        yield replace(opening, startup={"process": 3.1, "data": 0.4, "model": 1.7})
        for number in range(1, self.steps + 1):
            yield from self.update(number)
            if number == self.steps or math.floor(number / STEPS_PER_EPOCH) > math.floor(
                (number - 1) / STEPS_PER_EPOCH
            ):
                yield from self.evaluation(number)
            if self.now - self.told >= 2.0 or number == self.steps:
                yield from self.accounts(number)
        seconds, images = self.now - self.began, self.steps * BATCH
        yield Ended(status="finished", step=self.steps, seconds=seconds, images=images)

    def update(self, number: int) -> Iterator[Event]:
        share = number / self.steps
        wait = max(0.0, self.chance.gauss(1.0, 0.3)) * 0.12 * self.starving * (share > 0.25)
        parts = {"forward": 0.078, "backward": 0.141, "optimizer": 0.011, "host": 0.004, "input": 0.001 + wait}
        if number <= 2:
            parts = {"warmup": 1.4}
        for bucket, usual in parts.items():
            self.spend(bucket, usual * max(0.7, self.chance.gauss(1.0, 0.03)))
        self.fed["asked"] += 1
        self.fed["starved"] += wait > 0.01
        self.fed["ready"] += 0.3 if wait else 3.6
        self.fed["decode"] += 0.21
        seconds, lr = sum(parts.values()), 0.1 * (1 + math.cos(math.pi * share)) / 2
        yield Step(step=number, position=number * BATCH, n=BATCH, seconds=seconds, wait_seconds=wait, lr=lr)
        if number % 20 == 0:
            learned = 1 - math.exp(-4.5 * share)
            loss, top1 = 2.3 - 2.05 * learned, 0.1 + 0.86 * learned
            yield Logged(
                step=number,
                epoch=number / STEPS_PER_EPOCH,
                loss=loss + self.chance.gauss(0, 0.03),
                top1=top1 + self.chance.gauss(0, 0.012),
                lr=lr,
                images_per_second=BATCH / seconds * self.chance.gauss(1, 0.02),
                wait_share=wait / seconds,
            )

    def evaluation(self, number: int) -> Iterator[Event]:
        self.spend("evaluation", 6.5)
        yield evaluated(number, 0.1 + 0.8 * (1 - math.exp(-4.5 * number / self.steps)), 2.3 - 1.9 * number / self.steps)
        self.spend("checkpoint", 0.9)
        yield Saved(step=number, path=f"checkpoints/step-{number:08}", bytes=2_212_345, seconds=0.9)

    def accounts(self, number: int) -> Iterator[Event]:
        span, self.told = self.now - self.told, self.now
        wall = self.now - self.began
        yield self.feed(number)
        yield Accounted(step=number, images=number * BATCH, wall_seconds=wall, seconds=dict(self.seconds))
        cores, others = 1.72 + self.chance.gauss(0, 0.04), 0.05 + (0.2 if number % 300 > 250 else 0.0)
        iowait = abs(self.chance.gauss(0.02, 0.01))
        yield MachineStats(
            seconds=span,
            cores=2,
            machine_cores=2,
            cpu=cores,
            others=others,
            idle=max(0.0, 2 - cores - others - iowait),
            iowait=iowait,
            steal=0.0,
            pressure={"cpu": 0.12 + others, "memory": 0.0, "io": iowait / 2},
            memory_bytes=3 * GIB,
            memory_limit_bytes=8 * GIB,
            available_bytes=4 * GIB,
            missing=("disk_busy",),
        )
        for index in range(self.gpus):
            used = min(1.0, 0.82 + self.chance.gauss(0, 0.05) - 0.3 * self.starving * (number / self.steps > 0.25))
            yield DeviceStats(
                seconds=span,
                index=index,
                name="NVIDIA H100",
                utilisation=used,
                sm_active=0.8 * used,
                tensor_active=0.36 * used,
                memory_bytes=31 * GIB,
                memory_total_bytes=80 * GIB,
                power_watts=520 * used,
                power_limit_watts=700,
            )

    def feed(self, number: int) -> FeedStats:
        fed, images = self.fed, number * BATCH
        return FeedStats(
            step=number,
            images=images,
            bytes=images * 2300,
            read_seconds=images * 4e-6,
            decode_seconds=fed["decode"],
            augment_seconds=images * 6e-5,
            batch_seconds=images * 1e-5,
            blocked_seconds=max(0.0, 2 * (self.now - self.began) - fed["decode"] - images * 7e-5),
            cpu_seconds=fed["decode"] * 0.97,
            threads=2,
            asked=int(fed["asked"]),
            starved=int(fed["starved"]),
            ready=fed["ready"] / max(1, fed["asked"]),
            depth=4,
        )

    def spend(self, bucket: str, seconds: float) -> None:
        self.seconds[bucket] = self.seconds.get(bucket, 0.0) + seconds
        self.now += seconds


def line(event: Event, time: float, attempt: int = 1) -> str:
    """The event as it stands in a log, at a time of one's own."""
    return json.dumps(replace(event, time=time, attempt=attempt).to_dict()) + "\n"


def measured(folder: Path, name: str = "measured", *, steps: int = 1055, gpus: int = 0, began: float = 0.0) -> Run:
    """A run that ended well, begun ``began`` seconds since 1970 (0: so that it ends about now)."""
    run = Run.create(folder / name, recipe(epochs=steps / STEPS_PER_EPOCH))
    attempt = Attempt(began or time.time() - 0.3 * steps, steps=steps, gpus=gpus)
    with (run.directory / "events.jsonl").open("a", encoding="utf-8") as file:
        file.writelines(line(event, attempt.now) for event in attempt.events())
    return run


def live(folder: Path, *, gpus: int, steps: int) -> None:
    """Write one as time goes by, holding its lock."""
    run = Run.create(folder, recipe(epochs=steps / STEPS_PER_EPOCH))
    attempt = Attempt(time.time() - 5.2, steps=steps, gpus=gpus)
    with run.lock(), (run.directory / "events.jsonl").open("a", encoding="utf-8", buffering=1) as file:
        for event in attempt.events():
            time.sleep(max(0.0, attempt.now - time.time()))
            file.write(line(event, attempt.now).replace("another-machine", __import__("platform").node()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--live", action="store_true")
    parser.add_argument("--gpus", type=int, default=0)
    parser.add_argument("--steps", type=int, default=math.ceil(3 * NUM_TRAIN / BATCH))
    arguments = parser.parse_args()
    if arguments.live:
        live(arguments.folder, gpus=arguments.gpus, steps=arguments.steps)
    else:
        measured(arguments.folder.parent, arguments.folder.name, gpus=arguments.gpus, steps=arguments.steps)
