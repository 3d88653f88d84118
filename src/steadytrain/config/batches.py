"""The one table from an update's number to its batch, its place in the stream, and the size of its images.

Training images are one endless stream of positions. Update k takes those from ``position(k)`` to
``position(k + 1) - 1``. A batch that grows (Smith et al. 2018, "Don't decay the learning rate, increase the batch
size") makes stages of equal batches, which begin with the first update at or behind an epoch.

>>> batches = lay_out(parse_growth(["2@1", "4@2"]), batch_size=10, num_train=40, epochs=4)
>>> [(stage.update, stage.position, stage.images) for stage in batches.stages], batches.steps
([(0, 0, 10), (4, 40, 20), (6, 80, 80)], 7)
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from steadytrain.config.words import at_epochs
from steadytrain.errors import RecipeError

MOST_IMAGES = 2**20
"""The most images of an update."""


class Growth(NamedTuple):
    """The batch is multiplied by a whole number, 2 or more, after so many epochs."""

    times: int
    epoch: float


class SizeStage(NamedTuple):
    """Training images from a position of the stream on are squares of so many pixels a side."""

    position: int
    size: int


class BatchStage(NamedTuple):
    """Updates of equal batches: the number of the first one, where it begins in the stream, and images an update."""

    update: int
    position: int
    images: int


@dataclass(frozen=True)
class Batches:
    """The updates of a run: ``stages`` in rising order, and how many updates there are."""

    stages: tuple[BatchStage, ...]
    steps: int

    @property
    def is_growing(self) -> bool:
        """Return whether updates differ in size."""
        return len(self.stages) > 1

    @property
    def images(self) -> int:
        """Positions that all updates take together."""
        return int(self.position(self.steps))

    @property
    def first(self) -> float:
        """All updates, counted in batches of the first size."""
        return self.images / self.stages[0].images

    @cached_property
    def _updates(self) -> list[int]:
        return [stage.update for stage in self.stages]

    def stage(self, step: float) -> BatchStage:
        """Return the stage of the update after ``step`` of them."""
        return self.stages[0] if len(self.stages) == 1 else self.stages[bisect_right(self._updates, step) - 1]

    def size(self, step: int) -> int:
        """Return how many images the update after ``step`` of them takes."""
        return self.stage(step).images

    def position(self, step: float) -> float:
        """Return the position at which the update after ``step`` of them begins."""
        stage = self.stage(step)
        return stage.position + (step - stage.update) * stage.images

    def step(self, position: float) -> float:
        """Return how many updates, and which share of one, lie before a position."""
        stage = next(stage for stage in reversed(self.stages) if stage.position <= max(position, 0))
        return stage.update + (position - stage.position) / stage.images

    def progress(self, step: float) -> float:
        """Return the updates before one, counted in batches of the first size: laws of the rate follow this."""
        if len(self.stages) == 1:
            return step
        return self.position(step) / self.stages[0].images

    def updates(self, progress: float) -> float:
        """Return the updates that ``progress`` batches of the first size are: what :meth:`progress` undoes."""
        if len(self.stages) == 1:
            return progress
        return round(self.step(progress * self.stages[0].images), 9)


def parse_growth(texts: Iterable[str]) -> tuple[Growth, ...]:
    """Parse ``optim.grow_batch``: ``TIMES@EPOCH``, with rising epochs.

    Raises:
        RecipeError: something else, with what it must be.

    >>> parse_growth(["2@30", "5@60.5"])
    (Growth(times=2, epoch=30.0), Growth(times=5, epoch=60.5))
    """
    must = "TIMES@EPOCH, a whole number from 2 on and rising epochs above 0, such as 2@30,2@60"
    return tuple(Growth(*pair) for pair in at_epochs("optim.grow_batch", texts, must, least=2, most=10**7, after=0))


def parse_sizes(texts: Iterable[str]) -> tuple[tuple[int, float], ...]:
    """Parse ``data.grow_size``: ``SIZE@EPOCH``, with rising epochs; return sizes and epochs.

    Raises:
        RecipeError: something else, with what it must be.

    >>> parse_sizes(["128@0", "160@6"])
    ((128, 0.0), (160, 6.0))
    """
    must = "SIZE@EPOCH, from 1 to 4096 pixels and rising epochs, such as 128@0,160@6,192@12"
    return tuple(at_epochs("data.grow_size", texts, must, least=1, most=4096, after=-1))


def lay_out_sizes(
    sizes: Iterable[tuple[int, float]], batches: Batches, *, num_train: int, usual: int
) -> tuple[SizeStage, ...]:
    """Lay out the sizes of training images: each from the first update at or behind its epoch on, before it ``usual``.

    Raises:
        RecipeError: a size is due after the end of the run.

    >>> batches = lay_out([], batch_size=10, num_train=45, epochs=3)
    >>> [tuple(stage) for stage in lay_out_sizes([(128, 0), (160, 1)], batches, num_train=45, usual=224)]
    [(0, 128), (50, 160)]
    """
    stages = [SizeStage(0, usual)]
    for size, epoch in sizes:
        update = math.ceil(round(batches.step(round(epoch * num_train)), 9))
        position = int(batches.position(update))
        if update >= batches.steps:
            raise RecipeError(
                f"data.grow_size has {size}@{epoch:g}, and the run of {batches.images / num_train:.4g} epochs ends"
                " before that: leave it out, or train longer (--epochs)"
            )
        stages = [*(stage for stage in stages if stage.position < position), SizeStage(position, size)]
    return tuple(stages)


def lay_out(
    growths: Iterable[Growth], *, batch_size: int, num_train: int, epochs: float = 0, steps: int | None = None
) -> Batches:
    """Lay out the updates of a run; ``steps`` says how many, else they are enough to complete every one of ``epochs``.

    Raises:
        RecipeError: the batch is to grow after the end of the run.
    """
    stages, end = [BatchStage(0, 0, batch_size)], round(epochs * num_train)
    for growth in growths:
        update, position, images = stages[-1]
        updates = max(not position, -(-(round(growth.epoch * num_train) - position) // images))  # 1 of the first size
        update, position = update + updates, position + updates * images
        if update >= steps if steps is not None else position >= end:
            run = f"{steps:,} updates" if steps is not None else f"{epochs:g} epochs"
            raise RecipeError(
                f"optim.grow_batch has {growth.times}@{growth.epoch:g}, and the run of {run} ends before that: leave it"
                " out, or train longer (--epochs)"
            )
        grown = BatchStage(update, position, images * growth.times)
        stages = [*stages[: len(stages) - (updates == 0)], grown]
    if steps is None:
        update, position, images = stages[-1]
        steps = update + max(1, -(-(end - position) // images)) if epochs else 0
    return Batches(tuple(stages), steps)
