"""One attempt at a run: its parts, assembled from the recipe and the newest checkpoint, and what is saved of them."""

from __future__ import annotations

import json
import math
import queue
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from statistics import median
from typing import Any

import torch
from torch import nn

from steadytrain.config import Recipe, schedules
from steadytrain.config.batches import Batches
from steadytrain.cost.bill import BillPart, make_bill, merge_parts, part_of
from steadytrain.cost.prices import Price, to_dict
from steadytrain.data.loader import ImageLoader, Placement
from steadytrain.errors import DivergedError
from steadytrain.events import Compiled, EventLog, Halved, Saved, Started
from steadytrain.machine.process import StartPart, StartTimer, opened_data
from steadytrain.models import Built, Input, set_train_mode
from steadytrain.optim import set_lr, set_momentum
from steadytrain.run import Run
from steadytrain.training import build, checkpoints
from steadytrain.training.clock import Clock
from steadytrain.training.consensus import Alone
from steadytrain.training.data import DataSets
from steadytrain.training.memory import PassLimit
from steadytrain.training.state import State
from steadytrain.training.step import Update
from steadytrain.training.writer import Writer


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

    def passed_data(self) -> None:
        """Close the part of the data, to which belongs that a command opened them before its run began."""
        opened, before = self.passed("data"), opened_data(self.began)
        earlier = min(self.seconds["process"], before.seconds)
        self.seconds["process"] -= earlier
        self.seconds["data"] += earlier
        self.waits["data"] = self.waits.get("data", 0.0) + (before.waited or 0.0)
        self.disk_bytes = None if opened.disk_bytes is None else opened.disk_bytes + (before.disk_bytes or 0)


@dataclass
class Session:
    """One attempt at a run: its parts, ready to step.

    ``notices`` are lines for the user, ``halved`` tells where memory ran out, ``choices`` the places of the loader's
    threads, all still to be written; ``gpus``: UUIDs of those that this process samples;
    ``val_limit``: how many images are evaluated at a time;
    ``writer``: of checkpoints and weights; ``saved``: when the last checkpoint was asked for, by ``time.monotonic()``;
    ``save_costs``: what each took from training; ``save_cost``: their median, which every update asks for;
    ``save_seconds``: until the last one was on the disk; ``first_epochs``: of parameters that are not trained from the
    beginning, by name; ``deadline``: when the time of the run is over, by ``time.perf_counter()``;
    ``began``: when the process started, seconds since 1970; ``price``: of an hour of each machine, if it is known;
    ``earlier``: what the attempts before used. ``evaluate_seconds``: of the last evaluation; ``last_step``: where the
    run ends early, if it does.
    """

    run: Run
    log: EventLog
    data: DataSets
    built: Built
    input: Input
    state: State
    consensus: Alone
    update: Update
    compiled: Compiled | None
    feed: ImageLoader
    val_feed: ImageLoader | None
    val_limit: PassLimit
    notices: queue.SimpleQueue[str]
    halved: queue.SimpleQueue[Halved]
    choices: queue.SimpleQueue[Placement]
    machine: dict[str, Any]
    gpus: tuple[str, ...]
    clock: Clock
    start: StartLedger
    laps: Laps
    first_epochs: Mapping[str, float]
    began: float
    price: Price | None
    earlier: list[BillPart]
    writer: Writer[Saved | None]
    saved: float
    save_costs: list[float] = field(default_factory=list)
    save_cost: float = 0.0
    save_seconds: float = 0.0
    deadline: float = math.inf
    evaluate_seconds: float = 0.0
    last_step: int | None = None

    @cached_property
    def recipe(self) -> Recipe:
        return self.run.recipe

    @cached_property
    def batches(self) -> Batches:
        """The images of each update."""
        return self.recipe.batches(self.data.num_train)

    @cached_property
    def steps(self) -> int:
        """Updates in the whole run."""
        return self.batches.steps

    @cached_property
    def rate(self) -> schedules.Schedule:
        """The learning rate of each update, as a share of the peak."""
        return self._by_progress(schedules.schedule(self.recipe.optim, **self._length))

    @cached_property
    def momentum(self) -> schedules.Schedule | None:
        """The momentum of each update; None: it stays as it is."""
        moves = schedules.momentum(self.recipe.optim, **self._length)
        return None if moves is None else self._by_progress(moves)

    def _by_progress(self, law: schedules.Schedule) -> schedules.Schedule:
        """Let a law follow the images seen where batches grow."""
        progress = self.batches.progress
        return (lambda step: law(progress(step))) if self.batches.is_growing else law

    @property
    def _length(self) -> dict[str, float]:
        """How long the run and an epoch are, in batches of the first size: what schedules are laid out in."""
        return {"steps": self.batches.first, "steps_per_epoch": self.data.num_train / self.recipe.batch_size}

    @property
    def epoch(self) -> float:
        """Passes over the training data done, at most the epochs asked for: the last update may go beyond them."""
        return min(self.state.cursor.position / self.data.num_train, self.recipe.budget.epochs or math.inf)

    @cached_property
    def is_first(self) -> bool:
        """Whether this is the rank that writes what all have in common."""
        return self.state.engine.world.is_first

    @property
    def evaluated_module(self) -> nn.Module:
        """The network that is evaluated and exported: the average, if there is one."""
        return self.state.module if self.state.ema is None else self.state.ema.module

    @property
    def is_done(self) -> bool:
        """Whether the run has come to its end, the planned one or an earlier one."""
        return self.state.cursor.step == (self.steps if self.last_step is None else self.last_step)

    @property
    def is_out_of_time(self) -> bool:
        """Whether an evaluation and a checkpoint are all that the run has time for; the first rank's clock decides."""
        return self.is_first and time.perf_counter() + self.evaluate_seconds + self.save_seconds >= self.deadline

    @property
    def is_out_of_patience(self) -> bool:
        """Whether the last evaluations were no better than those before, as often as the recipe allows."""
        patience = self.recipe.budget.patience
        return patience is not None and self.state.misses >= patience

    def end_here(self, why: str) -> None:
        """End the run after the last update, and say why."""
        if not self.is_done:
            self.last_step = self.state.cursor.step
            self.notices.put(f"the run ends early, at epoch {self.epoch:.4g}: {why}")

    @cached_property
    def phase_steps(self) -> frozenset[int]:
        """Updates before which some parameters begin to be trained."""
        positions = {epoch * self.data.num_train for epoch in self.first_epochs.values()}
        return frozenset(math.ceil(self.batches.step(position) - 1e-9) for position in positions)

    def begin_phase(self) -> None:
        """Begin to train what waited for this update.

        The optimizer has had the parameters in its groups, without gradients: their state begins now.
        """
        set_phase(self.recipe, self.built, self.first_epochs, self.state.cursor.position / self.data.num_train)
        self.update = replace(self.update, call=self.state.engine.prepare(self.state.module, self.state.cursor.step))
        trained = [parameter for parameter in self.state.module.parameters() if parameter.requires_grad]
        self.notices.put(
            f"epoch {self.epoch:.4g}: {sum(p.numel() for p in trained):,} parameters are trained from here on"
        )

    @cached_property
    def _peak_lr(self) -> float:
        return self.recipe.optim.scaled_lr(self.recipe.batch_size)

    def lr(self, step: int) -> float:
        """The learning rate of the update after ``step`` of them."""
        lr = self._peak_lr * self.rate(step) * 0.5 ** sum(step >= first - 1 for first in self.recipe.every.slower)
        return lr if self.plateau is None else lr * self.plateau.lowered(self.state.plateau.drops)

    def set_rates(self, step: int) -> None:
        """Set the optimizer's learning rate and momentum to those of the update after ``step`` of them."""
        set_lr(self.state.optimizer, self.lr(step))
        if self.momentum is not None:
            set_momentum(self.state.optimizer, self.momentum(step))

    @cached_property
    def plateau(self) -> schedules.StageSpan | None:
        """The stage whose rate waits for evaluations; None: there is none."""
        last = schedules.spans(self.recipe.optim, **self._length)[-1]
        return last if last.stage.law == "plateau" else None

    def started(self) -> Started:
        """The attempt's first event."""
        return build.started(
            self.recipe,
            self.data,
            self.built,
            self.input,
            self.machine,
            step=self.state.cursor.step,
            startup=self.start.seconds,
            startup_waits=self.start.waits,
            startup_disk_bytes=self.start.disk_bytes,
            began=self.began,
            price=self._price_and_spent(),
        )

    def _price_and_spent(self) -> dict[str, Any] | None:
        """Return the price, with what the attempts before cost in its currency."""
        if self.price is None:
            return None
        same = [part for part in self.earlier if part.price is not None and part.price.currency == self.price.currency]
        bill = make_bill(same)
        return {**to_dict(self.price), "spent": bill.so_far if bill else 0.0}

    def spent(self) -> list[BillPart]:
        """Return what all attempts used up to now, this one included."""
        seconds = time.perf_counter() - self.clock.began
        return merge_parts(self.earlier, [part_of(replace(self.started(), attempt=self.log.attempt), seconds=seconds)])

    def is_save_due(self, *, evaluated: bool = False) -> bool:
        """Return whether a checkpoint is due by time: of several ranks, the first one's decides.

        What one costs is the median of those written so far: a disk that was busy once does not put the next one off.
        The first evaluation is always saved, and tells what a checkpoint costs. Where the last one is still being
        written, no other is due, but after an evaluation.
        """
        due = self.recipe.every.seconds_between_saves(self.save_cost, evaluated=evaluated)
        is_time = self.is_first and time.monotonic() - self.saved >= due
        return is_time and (evaluated or not self.writer.is_writing("checkpoint"))

    def save(self) -> None:
        """Have a checkpoint written of a state that can be trained on; all ranks gather it, the first one writes.

        Raises:
            DivergedError: loss or weights are not finite: a loss tells of an update only when the next one is made.
        """
        if not self.state.engine.takes_part:
            return
        self.require_finite(self.settled_loss())
        began = time.perf_counter()
        self.require_finite_weights()
        self.write_checkpoint(began)
        self.laps.restart()

    def write_checkpoint(self, began: float) -> None:
        """Have a checkpoint written, whatever the weights are; training pauses for it since ``began``."""
        engine, directory, keep = self.state.engine, self.run.checkpoints, self.recipe.every.keep
        with self.clock.within("checkpoint"):
            if (step := engine.collect()) is not None:
                self.state.cursor.step, self.state.cursor.position = step, step * self.recipe.batch_size
            step = self.state.cursor.step
            about = {"digest": self.recipe.digest, "model": self.built.name, "machine": self.machine}
            about |= {name: self.data.about()[name] for name in ("train_digest", "val_digest")}
            about["spent"] = json.dumps([part.to_dict() for part in self.spent()])
            state = self.state.state_dict() | {"about": about}
            if not self.is_first:
                return
            plain, live = checkpoints.split(state)
            tensors = self.writer.stage("checkpoint", live)
        paused, now = time.perf_counter() - began, time.time()

        def write() -> Saved:
            cpu_began = time.thread_time()
            written = checkpoints.save(directory, step, plain, tensors, keep=keep)
            return Saved(
                step=step,
                path=str(written.path.relative_to(self.run.directory)),
                bytes=written.bytes,
                seconds=time.perf_counter() - began,
                paused_seconds=paused,
                cpu_seconds=time.thread_time() - cpu_began,
                began=now - paused,
            )

        self.writer.submit("checkpoint", write)
        self.saved = time.monotonic()

    def written(self) -> Iterator[Saved]:
        """Yield an event for each checkpoint that is on the disk since the last call.

        Raises:
            StorageError: one, or weights, could not be written.
        """
        for saved in self.writer.results():
            if saved is not None:
                self.save_costs.append(saved.cost)
                self.save_cost, self.save_seconds = median(self.save_costs), saved.seconds
                self.laps.lap()
                yield saved
                self.laps.restart()  # what its reader does is no part of an update

    def finish_writing(self) -> Iterator[Saved]:
        """Wait until all is written; events and errors as of :meth:`written`."""
        with self.clock.within("checkpoint"):
            self.writer.wait()
        yield from self.written()

    def export(self, name: str) -> None:
        """Have the weights that are evaluated written into the run's folder, with what their users need."""
        weights = self.state.engine.whole(self.evaluated_module.state_dict())
        if self.is_first:
            about = {
                "model": {"name": self.built.name, "options": dict(self.recipe.model.options)},
                "classes": list(self.data.classes),
                "multi_label": self.data.num_labels is not None,
                "input": vars(self.input),
                "licence": self.built.licence,
                "digest": self.recipe.digest,
                "step": self.state.cursor.step,
            }
            if self.built.symbol:
                about["symbol"] = self.built.symbol
            if self.data.is_unnamed:
                about["unnamed"] = True
            with self.clock.within("checkpoint"):
                tensors = self.writer.stage("weights", weights)
            self.writer.submit("weights", partial(checkpoints.write_weights, self.run.directory / name, tensors, about))

    def settled_loss(self) -> float:
        """Return the sum of losses since the last log line, when the device has done what the host had asked for."""
        loss = self.state.meters.loss()
        self.laps.lap()  # or those steps would be counted with the evaluation or the saving that follows
        return loss

    def require_finite(self, loss: float) -> None:
        """Raise DivergedError for a loss that is not finite."""
        if not math.isfinite(loss):
            raise self.diverged(f"the loss is {loss}")

    def require_finite_weights(self, module: nn.Module | None = None) -> None:
        """Raise DivergedError for weights that are not finite, of the network or of ``module``."""
        with self.clock.within("checkpoint"), torch.no_grad():
            engine, parameters = self.state.engine, (module or self.state.module).parameters()
            values = [engine.own_values(parameter) for parameter in parameters]
            # A sum is finite only where all values are. It takes a tenth of the time; of large ones it overflows.
            is_finite = bool(torch.stack([value.sum().isfinite() for value in values]).all()) or all(
                bool(value.isfinite().all()) for value in values
            )
        if not is_finite:
            raise self.diverged("some weights are NaN or infinite")

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
