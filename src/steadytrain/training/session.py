"""One attempt at a run: its parts, assembled from the recipe and the newest checkpoint, and what is saved of them."""

from __future__ import annotations

import json
import math
import queue
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from statistics import median
from typing import Any

import torch
from torch import nn

from steadytrain.config import Data, Recipe, schedules
from steadytrain.config.batches import Batches
from steadytrain.config.plain import build as build_part
from steadytrain.cost.bill import BillPart, make_bill, merge_parts, part_of, parts_from
from steadytrain.cost.prices import Price, known_price, to_dict
from steadytrain.data.loader import ImageLoader, Placement
from steadytrain.distributed.async_engine import AsyncEngine
from steadytrain.distributed.engine import Engine
from steadytrain.distributed.process_group import Group
from steadytrain.distributed.ray_cluster import Cluster
from steadytrain.distributed.world import World
from steadytrain.errors import DivergedError, RunError
from steadytrain.events import Compiled, EventLog, Halved, Saved, Started
from steadytrain.machine.process import StartPart, StartTimer, opened_data
from steadytrain.models import Built, Input, first_epochs, set_train_mode
from steadytrain.optim import set_lr, set_momentum
from steadytrain.run import Run
from steadytrain.training import build, checkpoints
from steadytrain.training.compute.compile import RecordedWork, compile_update, record_update
from steadytrain.training.compute.recompute import recompute_parts
from steadytrain.training.consensus import Alone, ByServers, Together
from steadytrain.training.data import DataSets, open_data
from steadytrain.training.memory import PassLimit
from steadytrain.training.profile.clock import Clock
from steadytrain.training.profile.timing import pass_of, use_fastest_threads
from steadytrain.training.state import Cursor, State, preserve_buffers, preserve_process
from steadytrain.training.step import Share, Update, images_per_rank, share_of
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
    startup: dict[str, float]
    startup_waits: dict[str, float]
    startup_disk_bytes: int | None
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
        lr = self._peak_lr * self.rate(step)
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
            startup=self.startup,
            startup_waits=self.startup_waits,
            startup_disk_bytes=self.startup_disk_bytes,
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


class _StartLedger:
    """Where the seconds of a start go, part by part: each of them, and of it the wait for processors and disks."""

    def __init__(self, began: float) -> None:
        self.seconds: dict[str, float] = {}
        self.waits: dict[str, float] = {}
        self.disk_bytes: int | None = None
        self._began, self._timer = began, StartTimer()

    def passed(self, part: str) -> StartPart:
        """Close a part."""
        self.seconds[part] = time.perf_counter() - self._began - sum(self.seconds.values())
        figures = self._timer.part()
        # Of what was before the process, nothing is known; CUDA starts in the driver, whatever it waits for there.
        if figures.waited is not None and part not in ("process", "device"):
            self.waits[part] = figures.waited
        return figures

    def passed_data(self) -> None:
        """Close the part of the data, to which belongs that a command opened them before its run began."""
        opened, before = self.passed("data"), opened_data(self._began)
        earlier = min(self.seconds["process"], before.seconds)
        self.seconds["process"] -= earlier
        self.seconds["data"] += earlier
        self.waits["data"] = self.waits.get("data", 0.0) + (before.waited or 0.0)
        self.disk_bytes = None if opened.disk_bytes is None else opened.disk_bytes + (before.disk_bytes or 0)


@contextmanager
def open_session(
    run: Run,
    log: EventLog,
    *,
    allow_import: bool | None,
    began: float | None = None,
    group: Group | None = None,
    cluster: Cluster | None = None,
) -> Iterator[Session]:
    """Build the session of one attempt, resumed from the newest intact checkpoint; closes what it opened.

    The caller has locked the run. ``allow_import``, ``began``, ``group`` and ``cluster`` as of :func:`.loop.steps`.
    """
    recipe = run.recipe
    began = time.perf_counter() if began is None else began
    process_began = time.time() - (time.perf_counter() - began)
    price = known_price(recipe.parallel.price)
    start = _StartLedger(began)
    start.passed("process")
    notices: queue.SimpleQueue[str] = queue.SimpleQueue()
    halved: queue.SimpleQueue[Halved] = queue.SimpleQueue()
    choices: queue.SimpleQueue[Placement] = queue.SimpleQueue()
    notice = notices.put
    world = build.ALONE if group is None else group.world
    if cluster is not None:
        world = cluster.world
    # Workers beside the first take their weights from the servers.
    saved = None if cluster is not None and world.rank else _newest_checkpoint(run, group, notice)
    before = None if saved is None else saved["about"]["machine"]
    device = build.prepare_device(recipe, world)
    if device.type == "cuda":
        start.passed("device")
    with ExitStack() as stack:
        stack.enter_context(preserve_process(device))
        gpus = build.gpus_of_ranks(group, device)
        sharing = stack.enter_context(build.near_gpu(group, device, notice))
        if cluster is not None:
            sharing = world.local_size
        machine = build.set_up_machine(recipe, device, before, notice, ranks=world.size, sharing=sharing)
        data = _open_data(run.data, recipe.seed, group, notice)
        stack.callback(data.close)
        if cluster is not None:
            cluster.describe({"recipe": recipe.digest, "set of images": data.train.digest}, log.attempt)
        is_together = cluster is None or recipe.parallel.staleness == 0
        sharers = world if is_together else build.ALONE
        share = own_share(recipe, sharers, before or _begun_with(run, recipe, sharers, group), notice)
        machine["micro_batches"] = share.micro_batches
        if gpus:
            machine["gpus"] = gpus
        if group is not None:
            machine |= {"ranks": world.size, "hosts": group.hosts, "launcher": world.launcher}
        if cluster is not None:
            machine |= {"ranks": world.size, "engine": "async", "servers": cluster.where()}
        if world.size > 1 and is_together:
            machine["images_per_rank"] = images_per_rank(share, world.size)
        build.require_schedule(recipe, data.num_train)
        for records in filter(None, (data.train, data.val)):
            records.digest  # noqa: B018 - it is kept; a file without a card is read whole for it
        start.passed_data()
        torch.manual_seed(recipe.seed)
        imports_model = not recipe.model.from_file if allow_import is None else allow_import
        built, input = build.model(recipe, data, allow_import=imports_model)
        begun = None if saved is None else _begun_input(run, log, group)
        if begun is not None and begun != input:  # as under a name of timm's that meant another preprocessing
            notice(_kept_input_words(begun, input, built.name))
            if begun.size != input.size:
                sized = recipe.with_({"data.size": begun.size})
                built, _ = build.model(sized, data, allow_import=imports_model)
            input = begun
        if world.rank:
            torch.manual_seed(recipe.seed + world.rank)  # the same weights as the others, but dropout of its own
        start.passed("model")
        engine = build.engine(recipe, device, group, cluster, num_train=data.num_train)
        state = build.state(recipe, built, engine, num_train=data.num_train, allow_import=allow_import, input=input)
        if saved is None:
            for note in (
                *built.notes,
                *state.policy.notes,
                *build.remarks(recipe, built, input, data, parts=share.micro_batches),
            ):
                notice(note)
        else:
            _resume(state, saved, run, recipe, data, notice)
        if cluster is not None and cluster.progress is not None:  # the others have trained on
            step = cluster.progress["step"]
            state.cursor = Cursor(step, step * recipe.batch_size)
            if step < recipe.batches(data.num_train).steps:  # its own running statistics are to settle first
                state.evaluated = max(state.evaluated, state.cursor.position / data.num_train)
        epochs = recipe.batches(data.num_train).images / data.num_train
        waiting = first_epochs(built, recipe.model.train, epochs=epochs)
        if waiting:
            set_phase(recipe, built, waiting, state.cursor.position / data.num_train)
        feed, val_feed = build.feeds(recipe, data, input, state, share, notice, choices.put, sharing=sharing)
        stack.callback(feed.close)
        if val_feed is not None:
            stack.callback(val_feed.close)
        machine["feed_threads"] = feed.threads
        writer: Writer[Saved | None] = Writer(device)
        stack.callback(writer.close)
        clock = build.clock(device, began)
        loss = build.loss(recipe, data, device, allow_import=allow_import)
        update = build.update(
            recipe,
            built,
            build.training_input(recipe, input, data.num_train, state.cursor.position),
            state,
            clock,
            share,
            num_classes=len(data.classes),
            num_labels=data.num_labels,
            loss=loss,
            allow_import=allow_import,
            limit=PassLimit(
                "update", halved.put, _images_at_once(run, group), mode="halve" if group is None else "restart"
            ),
        )
        start.passed("state")
        if recompute_parts(recipe, update, state, notice) is not None:
            start.passed("recompute")
        with clock.within("warmup"):
            if group is not None:
                _agree_on_passes(update, state, group)
            if saved is None and group is None and cluster is None:
                machine |= use_fastest_threads(recipe, update, state, notice)
                start.passed("threads")
            update, compiled = compile_update(recipe, update, state, group, notice)
            if recipe.precision.compile != "none":
                machine |= {} if compiled is None else {"compile": compiled.mode}
                start.passed("compile")
        update = record_update(recipe, update, state, group, notice)
        if isinstance(update.work, RecordedWork):
            stack.callback(update.work.close)
        build.notice_change(before, machine, "compile", notice)
        session = Session(
            run=run,
            log=log,
            data=data,
            built=built,
            input=input,
            state=state,
            consensus=_consensus(group, engine),
            update=update,
            compiled=compiled,
            feed=feed,
            val_feed=val_feed,
            val_limit=PassLimit("evaluation", halved.put),
            notices=notices,
            halved=halved,
            choices=choices,
            machine=machine,
            gpus=build.sampled_gpus(group, gpus),
            clock=clock,
            startup=start.seconds,
            startup_waits=start.waits,
            startup_disk_bytes=start.disk_bytes,
            laps=Laps(),
            first_epochs=waiting,
            began=process_began,
            price=price,
            earlier=_earlier_parts(run, log, saved),
            deadline=began + 60 * (recipe.budget.minutes or math.inf) - _seconds_before(run, recipe),
            writer=writer,
            saved=time.monotonic(),
        )
        if isinstance(engine, AsyncEngine):
            engine.on_numbered = session.set_rates
        yield session


def _consensus(group: Group | None, engine: Engine) -> Alone:
    if isinstance(engine, AsyncEngine) and engine.is_synchronous:
        return ByServers(engine)
    return Alone() if group is None else Together(group)


def _earlier_parts(run: Run, log: EventLog, saved: dict[str, Any] | None) -> list[BillPart]:
    """Return what the attempts before this one used, as the checkpoint and the events tell."""
    saved_parts = json.loads(saved["about"].get("spent", "[]")) if saved else []
    spans = [span for attempt, span in run.progress().spans.items() if attempt < log.attempt]
    logged = [part_of(started, seconds=last - (started.began or started.time)) for started, last in spans]
    return merge_parts(parts_from(saved_parts), logged)


def _begun_input(run: Run, log: EventLog, group: Group | None) -> Input | None:
    """Return the preprocessing of the attempt before, which the weights have learned; None where it is not known."""
    earlier = [started for attempt, (started, _) in sorted(run.progress().spans.items()) if attempt < log.attempt]
    values = earlier[-1].model.get("input") if earlier else None
    if group is not None:
        values = group.all_gather_json(values)[0]
    return build_part(Input, values) if values else None


def _kept_input_words(begun: Input, now: Input, name: str) -> str:
    """Say in what the preprocessing that a run began with differs from the one that a new run would have."""
    words = []
    for key, value in vars(begun).items():
        if value != (other := getattr(now, key)):
            old, new = (" ".join(f"{v:g}" for v in x) if isinstance(x, tuple) else f"{x}" for x in (value, other))
            words.append(f"{key} {old}, not {new}")
    return (
        f"images are prepared as when this run began ({'; '.join(words)}), though {name} has others by now: a new run"
        " takes these"
    )


def _images_at_once(run: Run, group: Group | None) -> int | None:
    """Return how many images the memory had room for in updates before, on the rank with the least; None: for all."""
    if group is None:
        return run.progress().images_at_once
    halved = [event.images for event in run.events(group.world.rank, condensed=True) if isinstance(event, Halved)]
    return min(filter(None, group.all_gather_json(min(halved, default=None))), default=None)


def _agree_on_passes(update: Update, state: State, group: Group) -> None:
    """Find by a pass over drawn images, before the first update, how many of them each rank has memory for.

    Nothing is exchanged in such a pass, so no rank waits for one whose memory runs out. It leaves no trace, and has
    room beside it for what most optimizers keep: two numbers for each parameter. Batch norms that wait for those of
    other ranks cannot be tried.

    Raises:
        RankLostError: another rank has no memory for one image; FailedError: this one has not.
    """
    limit, size = update.limit, update.share.size
    assert limit is not None
    device, limit_here = state.engine.device, replace(limit, mode="halve")
    is_synchronous = any(type(part).__name__.startswith("Synchronous") for part in state.module.modules())
    has_own_pass = not (is_synchronous or state.engine.is_sharded)
    with group.all_or_none(), preserve_process(device), preserve_buffers(state.module):
        if has_own_pass:
            num_moments = 0 if state.optimizer.state else 2
            spare = [torch.empty_like(parameter) for parameter in update.parameters for _ in range(num_moments)]
            alone = replace(update, call=state.module)
            limit_here.fit(lambda at_once: pass_of(alone, state, at_once).seconds(), size)
            del spare
    limit.images = limit_here.images
    least = min(group.all_gather_json(limit_here.at_once(size)))
    if least < limit.at_once(size):
        limit.agree(least)


def _seconds_before(run: Run, recipe: Recipe) -> float:
    """Seconds of all attempts before this one, as their events tell; 0 where the recipe sets no time."""
    times: dict[int, list[float]] = {}
    for event in run.events(condensed=True) if recipe.budget.minutes else ():
        times.setdefault(event.attempt, []).append(event.time)
    return sum(seen[-1] - seen[0] for attempt, seen in times.items() if attempt)


def set_phase(recipe: Recipe, built: Built, first_epochs: Mapping[str, float], epoch: float) -> None:
    """Freeze the parameters whose first epoch is to come, and train those whose it is."""
    waiting = {name for name, first in first_epochs.items() if first > epoch + 1e-9}
    for name, parameter in built.module.named_parameters():
        if name in first_epochs:
            parameter.requires_grad_(name not in waiting)
    model = recipe.model
    set_train_mode(built, model.train, batch_norm=model.batch_norm, freeze=model.freeze, waiting=waiting)


def own_share(recipe: Recipe, world: World, before: dict[str, Any] | None, notice: Callable[[str], None]) -> Share:
    """The part of each batch that is this rank's; ``before``: facts of the machine in the checkpoint, if any."""
    count = (before or {}).get("micro_batches")
    waiting = {"model.batch_norm=synchronous": recipe.model.batch_norm == "synchronous"}
    waiting["parallel.shard"] = recipe.parallel.shard
    even_for = next((key for key, waits in waiting.items() if waits), "")
    share = share_of(world, recipe.batch_size, recipe.optim.accumulate, count, even_for=even_for)
    if count not in (None, share.micro_batches):
        notice(
            f"an update had {count} micro-batches, fewer than there are ranks, and has {share.micro_batches}:"
            " batch norms see smaller ones from here on"
        )
    return share


def _begun_with(run: Run, recipe: Recipe, world: World, group: Group | None) -> dict[str, Any] | None:
    """Return the micro-batches that a run without a checkpoint was begun with, if its batch does not suit these ranks.

    The batch is that of the ranks that began it, and those of now share its micro-batches as after a checkpoint.
    """
    if recipe.batch_size % (recipe.optim.accumulate * world.size) == 0:
        return None
    started = run.progress().started if world.is_first else None
    count = None if started is None else started.machine.get("micro_batches")
    return {"micro_batches": count if group is None else group.all_gather_json(count)[0]}


def _newest_checkpoint(run: Run, group: Group | None, notice: Callable[[str], None]) -> dict[str, Any] | None:
    """Load the newest intact checkpoint; of several ranks the first reads it, and sends it to the others."""
    saved = None
    with nullcontext() if group is None else group.all_or_none():
        if (group is None or group.world.is_first) and (place := checkpoints.newest(run.checkpoints, notice)):
            saved = checkpoints.load(place)
    if group is None:
        return saved
    plain, tensors = group.broadcast(*((None, {}) if saved is None else checkpoints.split(saved)))
    return None if plain is None else checkpoints.join(plain, tensors)


def _open_data(named: Data, seed: int, group: Group | None, notice: Callable[[str], None]) -> DataSets:
    """Open the data; of several ranks the first of each machine comes first, since it may have to pack them."""
    open_here = partial(open_data, named, seed=seed, say=notice)
    if group is None:
        return open_here()
    data = group.run_first_then_rest(open_here, is_first=group.world.is_local_first)
    about = data.about()
    group.require_same("other images", [about["train_digest"], about["val_digest"]])
    return data


def _resume(
    state: State, saved: dict[str, Any], run: Run, recipe: Recipe, data: DataSets, notice: Callable[[str], None]
) -> None:
    """Load what was saved by the same recipe on the same data. Raises RunError where it was by others."""
    about = saved["about"]
    if about["digest"] != recipe.digest:
        raise RunError(
            f"the checkpoint belongs to a run of another recipe (model {about['model']}, digest {about['digest']};"
            f" this run: {recipe.model.name}, {recipe.digest}): remove it, or use the run folder that it came from"
        )
    if about["train_digest"] != data.train.digest:
        started = run.progress().started
        before = started.data.get("num_train") if started is not None else None
        counts = f"{data.num_train:,} training images" + (f", were {before:,}" if before is not None else "")
        raise RunError(
            f"{recipe.data.train} has changed since this run was started ({counts}; digest {data.train.digest[:12]},"
            f" was {str(about['train_digest'])[:12]}): choose another --run folder, or put the old data back"
        )
    state.load_state_dict(saved)
    if about["val_digest"] != data.about()["val_digest"]:
        notice("the validation data have changed since this run began: the best weights are chosen again")
        state.best, state.plateau, state.probe = -1.0, schedules.Plateau(drops=state.plateau.drops), None
