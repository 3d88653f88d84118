"""A run made by hand: it is told what to do, keeps a clock of its own, and has the events that a run would write."""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec.structs import replace

from steadytrain.config import Budget, Data, Model, Recipe
from steadytrain.events import (
    Accounted,
    Ended,
    Evaluated,
    Event,
    FeedStats,
    Saved,
    Started,
    Step,
)

BATCH = 10
NUM_TRAIN = 200
RECIPE = Recipe(data=Data(train="train.rec"), model=Model("mlp"), budget=Budget(epochs=5), batch_size=BATCH)


@dataclass
class Recorder:
    """``truth``: what the seconds of all attempts really were, by recorded bucket; ``wall``: of each attempt.

    ``accounts``: whether it writes what it knows of its seconds, as runs of an older version do not. ``workers``: of an
    asynchronous run, whose updates count between any two of this one's.
    """

    accounts: bool = True
    time: float = 1_700_000_000.0
    rank: int = 0
    workers: int = 1
    events: list[Event] = field(default_factory=list)
    walls: list[float] = field(default_factory=list)
    saved: dict[int, tuple[int, float]] = field(default_factory=dict)  # step -> attempt (from 0) and its wall then
    step: int = 0
    jump: float = 0.0  # how far the system's clock was set
    busy: list[float] = field(default_factory=lambda: [0.0] * 4)
    blocked: float = 0.0
    _seconds: dict[str, float] = field(default_factory=dict)
    _first: int = 0

    @property
    def wall(self) -> float:
        """Of the newest attempt."""
        return self.walls[-1]

    def start(self, *, startup: float = 2.0, away: float = 0.0, step: int | None = None) -> None:
        """An attempt begins where the newest checkpoint is, or at a step."""
        self.time += away + startup
        self.walls.append(startup)
        self._first = self.step = max(self.saved, default=0) if step is None else step
        self._seconds, self.busy, self.blocked = {"startup": startup}, [0.0] * 4, 0.0
        self._tell(
            Started(
                digest="abc",
                step=self.step,
                steps=1000,
                steps_per_epoch=NUM_TRAIN / BATCH,
                batch_size=BATCH,
                data={"num_train": NUM_TRAIN},
                startup={"process": startup} if self.accounts else {},
            )
        )

    def update(self, **seconds: float) -> None:
        """One update: seconds by recorded bucket, those of ``input`` its wait."""
        for bucket, value in seconds.items():
            self._spend("warmup" if self._is_warm_up(bucket) else bucket, value)
        self.step += self.workers
        wait = seconds.get("input", 0.0)
        self._tell(
            Step(
                step=self.step,
                position=self.step * BATCH,
                n=BATCH * self.workers,
                seconds=sum(seconds.values()),
                wait_seconds=wait,
                lr=0.1,
            )
        )

    def evaluate(self, seconds: float) -> None:
        """One pass over the validation data."""
        self._spend("evaluation", seconds)
        epoch = self.step * BATCH / NUM_TRAIN
        self._tell(Evaluated(step=self.step, epoch=epoch, n=50, loss=1.0, top1=0.5, top5=0.9, seconds=seconds))

    def save(self, seconds: float) -> None:
        """A checkpoint."""
        self._spend("checkpoint", seconds)
        self.saved[self.step] = len(self.walls) - 1, self.wall
        self._tell(Saved(step=self.step, path=f"checkpoints/step-{self.step}", bytes=1, seconds=seconds))

    def idle(self, seconds: float, bucket: str = "other") -> None:
        """Something that no event tells of but the account."""
        self._spend(bucket, seconds)

    def feed(self, *, read: float = 0.0, decode: float = 0.0, augment: float = 0.0, blocked: float = 0.0) -> None:
        """What the feed's threads have done since they were last asked; no time passes."""
        self.busy = [a + b for a, b in zip(self.busy, (read, decode, augment, 0.0), strict=True)]
        self.blocked += blocked

    def account(self, *, feed: bool = True) -> None:
        """Where the seconds went so far, and what the feed did."""
        images = (self.step - self._first) * BATCH
        if self.accounts:
            self._tell(
                Accounted(
                    step=self.step,
                    images=images,
                    wall_seconds=self.wall,
                    seconds=dict(self._seconds),
                    warmup_images=min(images, 2 * self.workers * BATCH),
                ),
            )
        if feed:
            self._tell(self.stats(images))

    def stats(self, images: int) -> FeedStats:
        """The feed's figures so far."""
        return FeedStats(
            step=self.step,
            images=images,
            bytes=1000 * images,
            read_seconds=self.busy[0],
            decode_seconds=self.busy[1],
            augment_seconds=self.busy[2],
            batch_seconds=self.busy[3],
            blocked_seconds=self.blocked,
            threads=2,
            asked=images // BATCH,
        )

    def end(self) -> None:
        """The attempt ends well, with a checkpoint."""
        if self.step not in self.saved:
            self.save(0.1)
        self.account()
        seconds = self.wall - (self._seconds["startup"] if self.accounts else 0.0)
        images = (self.step - self._first) * BATCH
        self._tell(Ended(status="interrupted", step=self.step, seconds=seconds, images=images))

    def _is_warm_up(self, bucket: str) -> bool:
        return self.step - self._first < 2 * self.workers and bucket in ("forward", "backward", "optimizer")

    def _spend(self, bucket: str, seconds: float) -> None:
        self.time += seconds
        self.walls[-1] += seconds
        self._seconds[bucket] = self._seconds.get(bucket, 0.0) + seconds

    def _tell(self, event: Event) -> None:
        self.events.append(replace(event, time=self.time + self.jump, attempt=len(self.walls), rank=self.rank))
