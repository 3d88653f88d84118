"""One attempt at a run: its parts, ready to step."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from torch import nn

from steadytrain.config import Recipe
from steadytrain.config.phases import parse_train
from steadytrain.config.timeline import Timeline
from steadytrain.data.loader import ImageLoader
from steadytrain.errors import DivergedError
from steadytrain.events import Compiled, Event, Noticed, Started
from steadytrain.machine.process import StartPart, StartTimer
from steadytrain.models import Built, Input, set_train_mode
from steadytrain.run import Run
from steadytrain.training.clock import Clock
from steadytrain.training.consensus import Alone
from steadytrain.training.data import DataSets
from steadytrain.training.memory import PassLimit
from steadytrain.training.session.saver import Saver
from steadytrain.training.state import State
from steadytrain.training.step import Update


class Laps:
    """Images, seconds of steps and seconds waited since the last log line; evaluating and saving do not count.

    ``epoch_images`` and ``epoch_seconds``: since an epoch was last told.
    """

    def __init__(self) -> None:
        self.images = self.epoch_images = 0
        self.seconds = self.waited = self.epoch_seconds = 0.0
        self.restart()

    def restart(self) -> None:
        """Begin the next lap now."""
        self._began = time.perf_counter()

    def lap(self) -> float:
        """Return the seconds since the lap began, and begin the next one."""
        now = time.perf_counter()
        seconds = now - self._began
        self.seconds += seconds
        self.epoch_seconds += seconds
        self._began = now
        return seconds


class StartLedger:
    """Seconds since a start ``began``, part by part, and of each part the wait for processors and disks."""

    def __init__(self, began: float) -> None:
        self.seconds: dict[str, float] = {}
        self.waits: dict[str, float] = {}
        self.disk_bytes: int | None = None
        self.began, self._timer = began, StartTimer()

    def passed(self, part: str) -> StartPart:
        """Close a part."""
        self.seconds[part] = time.perf_counter() - self.began - sum(self.seconds.values())
        figures = self._timer.part()
        # Of what was before the process, nothing is known; CUDA starts in the driver, whatever it waits for there.
        if figures.waited is not None and part not in ("process", "device"):
            self.waits[part] = figures.waited
        return figures

    def passed_data(self, before: StartPart | None) -> None:
        """Close the part of the data, to which belongs that a command opened them ``before`` its run began."""
        opened = self.passed("data")
        self.disk_bytes = opened.disk_bytes
        if before is None or before.began < self.began:  # of a run before this one
            return
        earlier = min(self.seconds["process"], before.seconds)
        self.seconds["process"] -= earlier
        self.seconds["data"] += earlier
        self.waits["data"] = self.waits.get("data", 0.0) + (before.waited or 0.0)
        if self.disk_bytes is not None:
            self.disk_bytes += before.disk_bytes or 0


@dataclass
class Validation:
    """The images that are validated, or tested, on, how many at a time, and the ``seconds`` of the last evaluation."""

    feed: ImageLoader
    limit: PassLimit
    seconds: float = 0.0


@dataclass
class Ending:
    """The end of a run: ``last_step``, if it is earlier than planned; ``deadline``, by ``time.perf_counter()``.

    ``rates``: as of ``every.rates``, with those decided on since. ``is_settled``: what follows an update is decided.
    """

    deadline: float = math.inf
    last_step: int | None = None
    rates: tuple[tuple[int, float], ...] = ()
    is_settled: bool = False

    def __post_init__(self) -> None:
        self.last_step = next((first - 1 for first, times in self.rates if not times), self.last_step)


@dataclass(frozen=True)
class Session:
    """The parts of one attempt at a run, ready to step.

    Args:
        run, data, built, input: what is trained, and on what.
        recipe: the run's, as this attempt computes it (:meth:`.Recipe.after`).
        timeline: rate, momentum, images and epoch of each update.
        state: all that an update changes.
        update: makes one.
        compiled: what compiling came to; None: nothing is compiled.
        consensus: the decisions that ranks share.
        feed: batches to train on.
        validation, test: None: there is nothing to evaluate on.
        saver: of checkpoints and weights.
        clock, laps: where the time goes; since the last log line.
        started: the attempt's first event.
        outbox: events still to be written, without their steps.
        first_epochs: of parameters that are not trained from the beginning, by name.
        ending: when the run is over.
    """

    run: Run
    recipe: Recipe
    data: DataSets
    built: Built
    input: Input
    timeline: Timeline
    state: State
    update: Update
    compiled: Compiled | None
    consensus: Alone
    feed: ImageLoader
    validation: Validation | None
    test: Validation | None
    saver: Saver
    clock: Clock
    laps: Laps
    started: Started
    outbox: deque[Event]
    first_epochs: Mapping[str, float]
    ending: Ending

    @cached_property
    def is_first(self) -> bool:
        """Return whether this is the rank that writes what all have in common."""
        return self.state.engine.world.is_first

    @property
    def epoch(self) -> float:
        """Passes over the training data done, at most the epochs asked for."""
        return self.timeline.epoch(self.state.cursor.position)

    @property
    def is_done(self) -> bool:
        """Return whether the run has come to its end, the planned one or an earlier one."""
        last, planned = self.ending.last_step, self.timeline.steps
        return self.state.cursor.step >= (planned if last is None else last)

    @property
    def closing_seconds(self) -> float:
        """Seconds that an evaluation and the test may take at the end of the run."""
        last = 0.0 if self.validation is None else self.validation.seconds
        each = last / self.data.num_val if last else self.laps.epoch_seconds / max(1, self.laps.epoch_images)
        return last + (0.0 if self.test is None else each * self.data.num_test)

    @property
    def changes_numbers(self) -> bool:
        """Return whether the next update is to be made otherwise than this attempt's: in fp32, or from the probe."""
        after = self.run.recipe.after(self.state.cursor.step)
        differs = (after.precision.name, after.every.tries) != (self.recipe.precision.name, self.recipe.every.tries)
        return not self.is_done and differs

    @cached_property
    def phase_steps(self) -> frozenset[int]:
        """Updates before which some parameters begin to be trained."""
        return frozenset(map(self.timeline.update_at, self.first_epochs.values()))

    @property
    def first_step(self) -> int:
        """The updates of the run before those of this try, which began with the probe."""
        return self.recipe.every.tries[-1][0] if self.recipe.every.tries else 0

    @property
    def can_begin_again(self) -> bool:
        """Return whether updates may begin again from the probe: in one process, and at one batch, size and phase."""
        recipe, plan = self.recipe, parse_train(self.recipe.model.train)
        grows = recipe.optim.grow_batch or recipe.data.grow_size or recipe.optim.swa is not None or plan.has_phases
        depends = bool(grows) or recipe.waits_for_evaluations or recipe.budget.epochs is None
        is_alone = self.state.engine.world.size == 1 and recipe.parallel.engine != "async"
        return bool(plan.probe_passes and self.timeline.steps) and is_alone and not depends

    @property
    def evaluated_module(self) -> nn.Module:
        """The network that is evaluated and exported: the average, if there is one."""
        return self.state.module if self.state.ema is None else self.state.ema.module

    def lr(self, step: int) -> float:
        """Return the learning rate of the update after ``step`` of them."""
        return self.timeline.lr(step, self.state.plateau.drops)

    def notice(self, message: str) -> None:
        """Keep a line for the user."""
        self.outbox.append(Noticed(message=message))

    def diverged(self, what: str) -> DivergedError:
        """Make the error that says what is not finite any more."""
        step, numbers = self.state.cursor.step, self.recipe.precision.name
        first = "" if numbers == "fp32" else "compute in fp32 (--precision fp32), or "
        return DivergedError(
            f"{what} at step {step} ({numbers}, learning rate {self.lr(step - 1):g}): {first}lower the learning rate"
            " (--lr), warm up longer (--warmup-epochs) or clip (--set optim.clip_norm=1); what was saved before is"
            " intact"
        )


def set_phase(recipe: Recipe, built: Built, first_epochs: Mapping[str, float], epoch: float) -> None:
    """Freeze the parameters whose first epoch is to come, and train those whose it is."""
    waiting = {name for name, first in first_epochs.items() if first > epoch + 1e-9}
    for name, parameter in built.module.named_parameters():
        if name in first_epochs:
            parameter.requires_grad_(name not in waiting)
    model = recipe.model
    set_train_mode(built, model.train, batch_norm=model.batch_norm, freeze=model.freeze, waiting=waiting)
