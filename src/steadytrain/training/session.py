"""Everything a run needs, built from its recipe and its newest checkpoint."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from steadytrain.config import Recipe
from steadytrain.data.loader import Choice, ImageLoader
from steadytrain.distributed.process_group import Group
from steadytrain.errors import RunError
from steadytrain.events import Compiled, EventLog, Started
from steadytrain.models import Built, Input
from steadytrain.optim import schedules
from steadytrain.run import Run
from steadytrain.training import build, checkpoints
from steadytrain.training.clock import Clock
from steadytrain.training.consensus import Agreement, Alone, Together
from steadytrain.training.data import DataSets, open_data
from steadytrain.training.graphed import require_graphs
from steadytrain.training.isolation import torch_put_back
from steadytrain.training.pass_setup import ready
from steadytrain.training.rank_share import Share
from steadytrain.training.state import State
from steadytrain.training.step import Update


@dataclass
class Session:
    """One attempt at a run: its parts, ready to step."""

    run: Run
    recipe: Recipe
    log: EventLog
    data: DataSets
    built: Built
    input: Input
    state: State
    agreement: Agreement
    update: Update
    compiled: Compiled | None
    rate: Callable[[int], float]
    steps: int
    steps_per_epoch: float
    feed: ImageLoader
    val_feed: ImageLoader | None
    notices: queue.SimpleQueue[str]
    choices: queue.SimpleQueue[Choice]
    machine: dict[str, Any]
    clock: Clock
    startup: dict[str, float]

    @property
    def epoch(self) -> float:
        """Passes over the training data done."""
        return self.state.cursor.position / self.data.num_train

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that writes what all have in common."""
        return self.state.engine.world.is_first

    @property
    def evaluated_module(self) -> nn.Module:
        """The network that is evaluated and exported: the average, if there is one."""
        state = self.state
        return state.module if state.ema is None else state.ema.module

    def about(self) -> dict[str, Any]:
        """What must stand beside weights for anyone to use them: model, classes, preprocessing."""
        recipe = self.recipe
        return {
            "model": {"name": self.built.name, "options": dict(recipe.model.options)},
            "classes": list(self.data.classes),
            "input": vars(self.input),
            "licence": self.built.licence,
            "digest": recipe.digest,
            "step": self.state.cursor.step,
        }

    def started(self) -> Started:
        """The attempt's first event."""
        parameters = list(self.built.module.parameters())
        return Started(
            digest=self.recipe.digest,
            step=self.state.cursor.step,
            steps=self.steps,
            steps_per_epoch=self.steps_per_epoch,
            batch_size=self.recipe.batch_size,
            data=self.data.about(),
            model={
                "name": self.built.name,
                "parameters": sum(p.numel() for p in parameters),
                "trainable": sum(p.numel() for p in parameters if p.requires_grad),
                "licence": self.built.licence,
                "weights": self.built.weights,
                "size": self.input.size,
            },
            machine=self.machine,
            startup=self.startup,
        )

    def checkpoint(self) -> dict[str, Any]:
        """The state to save, with what its bits depend on."""
        return self.state.state_dict() | {
            "about": {"digest": self.recipe.digest, "model": self.built.name, "machine": self.machine}
            | {name: self.data.about()[name] for name in ("train_digest", "val_digest")}
        }


@contextmanager
def open_session(
    run: Run, log: EventLog, *, allow_import: bool, began: float | None = None, group: Group | None = None
) -> Iterator[Session]:
    """Build the session of one attempt, resumed from the newest intact checkpoint; closes what it opened.

    Args:
        run: locked by the caller.
        log: of this attempt; warnings go there as events and come out of ``session.notices``, as what the feed has
            chosen comes out of ``session.choices``.
        allow_import: whether a ``pkg.mod:factory`` model may be imported.
        began: when the attempt began, by ``time.perf_counter()``; None: now.
        group: the ranks that train together; None: this process is alone.
    """
    recipe = run.recipe
    began = time.perf_counter() if began is None else began
    startup: dict[str, float] = {}

    def passed(part: str) -> None:
        startup[part] = time.perf_counter() - began - sum(startup.values())

    passed("process")
    notices: queue.SimpleQueue[str] = queue.SimpleQueue()
    choices: queue.SimpleQueue[Choice] = queue.SimpleQueue()
    world, sharing = (build.ALONE, 1) if group is None else (group.world, group.sharing)
    saved = _newest(run, group, notices.put)
    build.require_determinism(recipe)
    device = build.choose_device(recipe.parallel.device, world)
    require_graphs(recipe, device)
    if group is not None:
        build.require_own_devices(group, device)
    with ExitStack() as stack:
        stack.enter_context(torch_put_back(device))
        before = None if saved is None else saved["about"]["machine"]
        machine = build.set_up_machine(recipe, device, before, notices.put, ranks=world.size, sharing=sharing)
        data = _open_data(recipe, group, notices.put)
        stack.callback(data.close)
        own = build.own_share(recipe, world, before, notices.put)
        machine |= {"micro_batches": own.micro_batches} if group is None else _ranks(group, own)
        passed("data")
        torch.manual_seed(recipe.seed)
        built, told = build.model(recipe, data, allow_import=allow_import)
        if world.rank:
            torch.manual_seed(recipe.seed + world.rank)  # the same weights as the others, but dropout of its own
        passed("model")
        state = build.state(recipe, built, build.engine(recipe, device, group))
        if saved is None:
            for note in (*built.notes, *state.policy.notes, *build.remarks(recipe, built, told, data)):
                notices.put(note)
        else:
            _resume(state, saved, recipe, data, notices.put)
        feed, val_feed = build.feeds(recipe, data, told, state, own, notices.put, choices.put, sharing=sharing)
        stack.callback(feed.close)
        if val_feed is not None:
            stack.callback(val_feed.close)
        machine["feed_threads"] = feed.threads
        steps_per_epoch = data.num_train / recipe.batch_size
        clock = build.clock(device, began)
        steps = build.num_steps(recipe, data.num_train)
        update = build.update(recipe, built, told, state, clock, own)
        passed("state")
        is_new = saved is None and group is None
        made = ready(recipe, update, state, told, group, notices.put, chooses_threads=is_new, passed=passed)
        machine |= made.facts
        build.tell_changes(before, machine, ("compile",), notices.put)
        yield Session(
            run=run,
            recipe=recipe,
            log=log,
            data=data,
            built=built,
            input=told,
            state=state,
            agreement=Alone() if group is None else Together(group),
            update=made.update,
            compiled=made.compiled,
            rate=schedules.schedule(recipe.optim, steps=steps, steps_per_epoch=steps_per_epoch),
            steps=steps,
            steps_per_epoch=steps_per_epoch,
            feed=feed,
            val_feed=val_feed,
            notices=notices,
            choices=choices,
            machine=machine,
            clock=clock,
            startup=startup,
        )


def _newest(run: Run, group: Group | None, notice: Callable[[str], None]) -> dict[str, Any] | None:
    """The newest intact checkpoint; of several ranks the first reads it, and gives it to the others."""
    if group is None:
        return _load_newest(run, notice)
    saved = None
    with group.all_or_none():
        if group.world.is_first:
            saved = _load_newest(run, notice)
    rest, tensors = group.broadcast(*((None, {}) if saved is None else checkpoints.taken_apart(saved)))
    return None if rest is None else checkpoints.put_together(rest, tensors)


def _load_newest(run: Run, notice: Callable[[str], None]) -> dict[str, Any] | None:
    found = checkpoints.newest(run.checkpoints, notice)
    return None if found is None else checkpoints.load(found)


def _open_data(recipe: Recipe, group: Group | None, notice: Callable[[str], None]) -> DataSets:
    """Open the data; of several ranks the first of each machine comes first, since it may have to pack them."""

    def data() -> DataSets:
        return open_data(recipe.data, seed=recipe.seed, say=notice)

    if group is None:
        return data()
    open_session = group.run_first_then_rest(data, is_first=group.world.is_local_first)
    about = open_session.about()
    group.require_same("other images", [about["train_digest"], about["val_digest"]])
    return open_session


def _ranks(group: Group, own: Share) -> dict[str, Any]:
    """What the first event says of the ranks."""
    world = group.world
    return {
        "micro_batches": own.micro_batches,
        "ranks": world.size,
        "hosts": group.hosts,
        "launcher": world.launcher,
    }


def _resume(state: State, saved: dict[str, Any], recipe: Recipe, data: DataSets, notice: Callable[[str], None]) -> None:
    """Take up what was saved, by the same recipe on the same data."""
    _require_same(saved["about"], recipe, data)
    state.load_state_dict(saved)
    if saved["about"]["val_digest"] != data.about()["val_digest"]:
        notice("the validation data have changed since this run was started: what is best is found anew")
        state.best = -1.0  # no weight depends on them, so the run goes on


def _require_same(about: dict[str, Any], recipe: Recipe, data: DataSets) -> None:
    if about["digest"] != recipe.digest:
        raise RunError(
            f"the checkpoint belongs to a run of another recipe (model {about['model']}, digest {about['digest']};"
            f" this run: {recipe.model.name}, {recipe.digest}): remove it, or use the run folder that it came from"
        )
    if about["train_digest"] != data.train.digest:
        raise RunError(
            f"{data.train.path} has changed since this run was started (digest {data.train.digest}, was"
            f" {about['train_digest']}): choose another --run folder, or put the old data back"
        )
