"""Runs to report on, written as training writes them: through an EventLog, at times of our own."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

import steadytrain.events.log as event_log
from steadytrain.config import Budget, Data, Model, Optim, Recipe
from steadytrain.events import Ended, Evaluated, Event, FeedStats, Logged, Noticed, Saved, Started, Step
from steadytrain.run import Run

BEGAN = 1_790_000_000.0
NUM_TRAIN = 45_000
BATCH = 128
STEPS_PER_EPOCH = NUM_TRAIN / BATCH


def recipe(lr: float = 0.1, epochs: float = 3, seed: int = 0) -> Recipe:
    return Recipe(
        data=Data(train="cifar10-train.rec", val="cifar10-val.rec"),
        model=Model("resnet20"),
        optim=Optim("sgd", lr=lr),
        budget=Budget(epochs=epochs),
        batch_size=BATCH,
        seed=seed,
    )


def started(step: int = 0, steps: int = 1055, num_val: int = 5000) -> Started:
    return Started(
        digest="0123456789ab",
        step=step,
        steps=steps,
        steps_per_epoch=STEPS_PER_EPOCH,
        batch_size=BATCH,
        data={
            "train": "cifar10-train.rec",
            "val": "cifar10-val.rec",
            "num_train": NUM_TRAIN,
            "num_val": num_val,
            "classes": ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"],
        },
        model={"name": "resnet20", "parameters": 272_474, "trainable": 272_474, "licence": "", "size": 32},
        machine={
            "device": "cpu",
            "compute_threads": 2,
            "feed_threads": 2,
            "isa": "avx2",
            "torch": "2.15.0",
            "python": "3.11.7",
            "host": "another-machine",
            "cores": 2,
            "precision": "bf16",
        },
    )


def step(number: int, seconds: float = 0.25, wait_seconds: float = 0.003, lr: float = 0.1) -> Step:
    return Step(step=number, position=number * BATCH, n=BATCH, seconds=seconds, wait_seconds=wait_seconds, lr=lr)


def logged(number: int, loss: float = 1.5, top1: float = 0.5, rate: float = 500.0) -> Logged:
    return Logged(
        step=number,
        epoch=number / STEPS_PER_EPOCH,
        loss=loss,
        top1=top1,
        lr=0.1,
        images_per_second=rate,
        wait_share=0.012,
    )


def evaluated(number: int, top1: float = 0.5, loss: float = 1.4, n: int = 5000) -> Evaluated:
    return Evaluated(
        step=number,
        epoch=number / STEPS_PER_EPOCH,
        n=n,
        loss=loss,
        top1=top1,
        top5=min(1.0, top1 + 0.3),
        seconds=2.0,
    )


def course(first: int, last: int, *, total: int, seed: int = 0, best: float = 0.92, every: int = 20) -> Iterator[Event]:
    """What a training run tells from step ``first`` + 1 to ``last`` of ``total``: plausible curves."""
    chance = random.Random(seed)
    for number in range(first + 1, last + 1):
        share = number / total
        lr = 0.1 * (1 + math.cos(math.pi * share)) / 2
        seconds = max(0.05, chance.gauss(0.25, 0.01))
        yield step(number, seconds, seconds * abs(chance.gauss(0.012, 0.006)), lr)
        learned = 1 - math.exp(-4.5 * share)
        if number % every == 0 or number == total:
            top1 = 0.1 + (best + 0.04 - 0.1) * learned + chance.gauss(0, 0.012)
            loss = 2.3 - 2.05 * learned + chance.gauss(0, 0.03)
            rate, wait = chance.gauss(BATCH / 0.25, 9), abs(chance.gauss(0.012, 0.006))
            yield Logged(
                step=number,
                epoch=number / STEPS_PER_EPOCH,
                loss=loss,
                top1=top1,
                lr=lr,
                images_per_second=rate,
                wait_share=wait,
            )
        if number == total or math.floor(number / STEPS_PER_EPOCH) > math.floor((number - 1) / STEPS_PER_EPOCH):
            top1 = 0.1 + (best - 0.1) * learned + chance.gauss(0, 0.008)
            yield evaluated(number, top1, 2.3 - 1.95 * learned)
            yield feed(number)
            yield Saved(step=number, path=f"checkpoints/step-{number:08}", bytes=2_212_345, seconds=0.031)


def feed(number: int) -> FeedStats:
    return FeedStats(
        step=number,
        images=number * BATCH,
        bytes=number * BATCH * 2300,
        read_seconds=number * 0.0004,
        decode_seconds=number * 0.031,
        batch_seconds=number * 0.002,
        blocked_seconds=number * 0.4,
        threads=2,
    )


class Clock:
    """The time that events are stamped with."""

    def __init__(self, now: float = BEGAN) -> None:
        self.now = now

    def time(self) -> float:
        return self.now


def write(run: Run, events: Iterable[Event], clock: Clock, *, end: bool = False) -> None:
    """One attempt of a run: its steps, evaluations and savings take the time that they tell; it may end well."""
    with pytest.MonkeyPatch.context() as patch, run.log() as log:
        patch.setattr(event_log, "time", SimpleNamespace(time=clock.time))
        began, images, last = clock.now, 0, 0
        for event in events:
            clock.now += event.seconds if isinstance(event, Step | Evaluated | Saved) else 0.0
            images += event.n if isinstance(event, Step) else 0
            last = event.step if isinstance(event, Step) else last
            log.append(event)
        if end:
            log.append(Ended(status="finished", step=last, seconds=clock.now - began, images=images))


def finished(folder: Path, name: str = "baseline", *, lr: float = 0.1, best: float = 0.92, epochs: int = 3) -> Run:
    """A run that went through without a stop."""
    run = Run.create(folder / name, recipe(lr, epochs))
    total = math.ceil(epochs * STEPS_PER_EPOCH)
    starts = [started(steps=total), *course(0, total, total=total, best=best, seed=int(lr * 1000))]
    write(run, starts, Clock(), end=True)
    return run


def restarted(folder: Path, name: str = "restarted") -> Run:
    """A run that was killed at step 800 and went on, an hour later, from the checkpoint at step 704."""
    run = Run.create(folder / name, recipe(0.2))
    clock = Clock()
    write(run, [started(), *course(0, 800, total=1055, seed=7)], clock)
    with (run.directory / "events.jsonl").open("a") as file:
        file.write('{"v":1,"kind":"Step","time":17')
    clock.now += 3600
    notice = Noticed(message="checkpoint step-00000800 is corrupt: passed over", step=704)
    write(run, [started(704), notice, *course(704, 1055, total=1055, seed=8)], clock, end=True)
    return run
