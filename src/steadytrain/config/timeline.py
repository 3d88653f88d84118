"""The course of a run: learning rate, momentum, images and epoch of each update, as functions of its number."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from steadytrain.config import schedules
from steadytrain.config.batches import Batches
from steadytrain.config.laws import StageSpan
from steadytrain.config.recipe import Recipe


@dataclass(frozen=True)
class Timeline:
    """The updates of a recipe on ``num_train`` images; "at ``step``" means of the update after ``step`` of them.

    Raises:
        RecipeError: when asked, where the schedule does not fit the run.

    >>> from steadytrain.config import Budget, Data, Model, Optim
    >>> recipe = Recipe(data=Data(train="x"), model=Model("x"), optim=Optim(lr=0.2), budget=Budget(epochs=2))
    >>> timeline = Timeline(recipe, num_train=512)
    >>> timeline.steps, timeline.steps_per_epoch, [round(timeline.lr(step), 4) for step in (0, 4, 7)]
    (8, 4.0, [0.2, 0.1, 0.0076])
    """

    recipe: Recipe
    num_train: int

    @cached_property
    def batches(self) -> Batches:
        """The images of each update."""
        return self.recipe.batches(self.num_train)

    @cached_property
    def steps(self) -> int:
        """Updates in the whole run."""
        return self.batches.steps

    @property
    def steps_per_epoch(self) -> float:
        """Updates in an epoch, as long as the batch has its first size."""
        return self.num_train / self.recipe.batch_size

    @property
    def epochs(self) -> float:
        """Passes over the training data that all updates make."""
        return self.batches.images / self.num_train

    def epoch(self, position: int) -> float:
        """Return the passes done at a position, at most the epochs asked for: the last update may go beyond them."""
        return min(position / self.num_train, self.recipe.budget.epochs or math.inf)

    def update_at(self, epoch: float) -> int:
        """Return the first update that begins at or after an epoch."""
        return math.ceil(self.batches.step(epoch * self.num_train) - 1e-9)

    @cached_property
    def peak(self) -> float:
        """The highest learning rate: the recipe's, which may be one for another batch size."""
        optim = self.recipe.optim
        return optim.lr * self.recipe.batch_size / optim.base_batch_size if optim.base_batch_size else optim.lr

    def lr(self, step: int, drops: int = 0) -> float:
        """Return the learning rate at ``step``; ``drops``: how often evaluations have lowered it."""
        halvings = sum(step >= first - 1 for first in self.recipe.every.slower)
        lr = self.peak * self._share(self.batches.progress(step) - self._begin) * 0.5**halvings
        lr *= next((times for first, times in reversed(self.recipe.every.rates) if times and step >= first - 1), 1.0)
        return lr if self.plateau is None else lr * self.plateau.lowered(drops)

    def momentum(self, step: int) -> float | None:
        """Return the momentum at ``step``, or Adam's first beta; None: it stays as it is."""
        return None if self._momentum is None else self._momentum(self.batches.progress(step) - self._begin)

    @property
    def moves_momentum(self) -> bool:
        """Return whether the schedule changes the momentum."""
        return self._momentum is not None

    @cached_property
    def spans(self) -> tuple[StageSpan, ...]:
        """The stages of the schedule in their places, which are counted in batches of the first size."""
        return schedules.spans(self.recipe.optim, **self._length)

    @cached_property
    def plateau(self) -> StageSpan | None:
        """The stage whose rate waits for evaluations; None: there is none."""
        return self.spans[-1] if self.recipe.waits_for_evaluations else None

    @cached_property
    def _share(self) -> schedules.Schedule:
        return schedules.schedule(self.recipe.optim, **self._length)

    @cached_property
    def _momentum(self) -> schedules.Schedule | None:
        return schedules.momentum(self.recipe.optim, **self._length)

    @property
    def _begin(self) -> int:
        """The update that the schedule counts from: the first since updates began again from the probe."""
        tries = self.recipe.every.tries
        return tries[-1][0] if tries else 0

    @property
    def _length(self) -> dict[str, float]:
        return {"steps": self.batches.first - self._begin, "steps_per_epoch": self.steps_per_epoch}
