"""The headroom probe: how fast the loader is alone, the updates alone, and both, on the run's own data and model.

A loader of its own makes the batches, from where the run stands in its stream; a copy of the network with an optimizer
of its own is trained on them at learning rate 0; both are thrown away. So it can be asked of any run: one that is yet
to begin, in the middle of its training, or finished. Each of the three takes its turn several times, and medians count,
so that what comes and goes on a shared machine moves little.
"""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from statistics import median
from typing import Literal

from steadytrain.data.loader import ImageLoader
from steadytrain.data.storage.scratch import temporary_scratch
from steadytrain.distributed.engine import Engine
from steadytrain.errors import FailedError, InputError, RunError, SteadyError, StorageError, first_line
from steadytrain.events import Ceilings, Event, FeedPlaced, Noticed, StepMeasured
from steadytrain.format import Say
from steadytrain.monitor import RunHistory
from steadytrain.monitor.history_reader import read_any
from steadytrain.run import Run
from steadytrain.training import build
from steadytrain.training.compute.compile import record_update
from steadytrain.training.compute.timing import images_per_second
from steadytrain.training.data import DeviceBatch, load
from steadytrain.training.profile.step_cost import measure_step
from steadytrain.training.session.opening import open_session
from steadytrain.training.session.session import Session
from steadytrain.training.state import preserve_process

SECONDS = 15.0
"""Seconds of measuring, unless others are asked for."""
ROUNDS = 3
LEAST_BATCHES, LEAST_UPDATES = 4, 2
"""The fewest batches of the feed, and updates alone and with the feed, in each turn. The feed makes several at a time.
"""
SETTLE_SECONDS = 60.0
"""The longest time given to the feed for decoding images that it will keep."""
WARM_UPDATES = 2

Place = Literal["threads", "process"]


@dataclass(frozen=True)
class Probed:
    """The result of the probe.

    ``measured``: None where the network refuses (see :func:`.step_cost.measure_step`). ``remark``: what to keep in mind
    about the figures. ``events``: both, for a run's log.
    """

    ceilings: Ceilings
    measured: StepMeasured | None
    remark: str | None = None

    @property
    def events(self) -> tuple[Event, ...]:
        return (self.ceilings,) if self.measured is None else (self.ceilings, self.measured)


def probe_run(
    run: Run,
    *,
    seconds: float = SECONDS,
    force: bool = False,
    allow_import: bool = False,
    say: Say = lambda message: None,
) -> Probed:
    """Probe a run that nobody trains at the moment; its folder is only read, but for what is added to its events.

    The network begins with fresh weights, whatever its checkpoints hold: neither speed depends on them. What was found
    is appended to the run's events as of attempt 0, which belongs to no attempt: its ledger stays what it was. It is
    not where the folder cannot be written, where the run was trained on another machine, and with ``force`` beside one
    that is being trained; ``say`` is told so.

    Args:
        run: it may be yet to begin, interrupted or finished.
        seconds: how long to measure, in all; at least some updates and batches are.
        force: measure although the run is being trained, which slows that down and is slowed down by it.
        allow_import: import the recipe's ``pkg.mod:factory`` model.
        say: told what goes on, a line each.

    Raises:
        InputError: ``seconds`` that cannot be.
        RunError: the run is being trained right now.
        FailedError: the network cannot be copied or trained, or memory is short.
        SteadyError: as for training.
    """
    if not 0 < seconds <= 3600:
        raise InputError(f"seconds is {seconds}; it must be above 0, up to 3600")
    busy = run.is_held()
    if busy and not force:
        raise RunError(
            f"{run.directory} is being trained by process {run.holder()}: a probe would slow it down and measure half a"
            " machine; wait for its end, or stop it and go on afterwards (--force measures all the same)"
        )
    past = read_any(run)
    recipe, threads = run.recipe, None if past.started is None else past.started.machine.get("compute_threads")
    if recipe.parallel.compute_threads is None and isinstance(threads, int):
        recipe = recipe.with_({"parallel.compute_threads": threads})
    placed = past.newest(FeedPlaced)
    place: Place = "process" if placed is not None and placed.place == "process" else "threads"
    with temporary_scratch() as folder:
        aside = Run(folder, recipe)
        with aside.log() as log, open_session(aside, log, allow_import=allow_import) as session:
            session.state.cursor.step, session.state.cursor.position = past.step, past.position
            try:
                probed = probe(session, seconds=seconds, place=place, say=say)
            except SteadyError:
                raise
            except Exception as error:
                raise FailedError(f"{run.directory} cannot be probed: {first_line(error)}") from error
            if probed.remark is not None:
                say(probed.remark)
            reason = _reason_not_to(past, session, busy=busy or run.is_held())
    try:
        if reason is None:
            with run.log_beside() as log:
                for event in probed.events:
                    log.append(event)
    except StorageError as error:
        reason = str(error)
    if reason is not None:
        say(f"this is not written into the events of {run.directory}: {reason}")
    return probed


def probe_beside(session: Session) -> Iterator[Event]:
    """Probe the session of a run that is about to train, for :data:`SECONDS`; not a bit of what it trains changes.

    Yields what is going on, then ``Ceilings`` and ``StepMeasured``. Where they cannot be had, a notice tells why.
    """
    step = session.state.cursor.step
    yield Noticed(message=f"probe: measuring loading, the updates and both for {SECONDS:g} seconds or more", step=step)
    try:
        with session.clock.within("measuring"):
            probed = probe(session, seconds=SECONDS)
    except Exception as error:  # noqa: BLE001 - what is wrong with data or model, training itself will say
        yield Noticed(message=f"the probe failed ({first_line(error)}): training continues without", step=step)
        return
    yield from probed.events
    if probed.remark is not None:
        yield Noticed(message=f"probe: {probed.remark}", step=step)


def probe(
    session: Session,
    *,
    seconds: float = SECONDS,
    place: Place = "threads",
    say: Say = lambda message: None,
) -> Probed:
    """Measure the feed, the updates and both of a session, beside it, which does not change.

    Args:
        seconds: how long to measure, in all.
        place: where the feed's threads live.
        say: told what goes on.
    """
    device, recipe = session.state.engine.device, session.recipe
    with (
        preserve_process(device),
        build.training_feed(
            recipe,
            session.data,
            replace(session.input, size=session.update.image_shape[0]),
            device,
            batch_size=recipe.batch_size,
            start=session.state.cursor.position,
            threads=session.feed.task.num_threads,
            on_bad=lambda bad: None,  # training tells of it
            place=place,
        ) as feed,
    ):
        batches = load(feed, device)
        warm_batches = [next(batches) for _ in range(WARM_UPDATES)]
        remark = settle(feed, batches, say)
        train = _trainer_of_a_copy(session)
        for batch in warm_batches:
            train(batch)
        say(f"measuring loading, the updates and both for {seconds:g} seconds or more")
        ceilings = _in_turns(session, feed, batches, warm_batches, train, seconds)
        del train  # its memory is wanted
        return Probed(ceilings, measure_step(session, warm_batches[0]), remark)


def _trainer_of_a_copy(session: Session) -> Callable[[DeviceBatch], int]:
    """Return what updates a copy of the network by a batch, and gives its number of images."""
    recipe, built = session.recipe, replace(session.built, module=copy.deepcopy(session.state.module))
    state = build.state(recipe, built, Engine(session.state.engine.device))
    loss = session.update.objective.loss
    update = build.update(recipe, built, session.input, state, num_labels=session.data.num_labels, loss=loss)
    update = replace(update, augmentation=session.update.augmentation)
    if session.compiled:
        update = replace(update, forward=session.update.forward)
    update = record_update(recipe, update, state, None, lambda message: None)

    def train(batch: DeviceBatch) -> int:
        update(state, batch, 0.0)
        return len(batch.labels)

    return train


def settle(
    feed: ImageLoader, batches: Iterator[DeviceBatch], say: Say, *, seconds: float = SETTLE_SECONDS
) -> str | None:
    """Take batches until all images are kept that will be: then the feed is as fast as in later epochs.

    Args:
        feed: whose ``batches`` these are.
        say: told what goes on, where it takes a while.
        seconds: after which it is given up.

    Returns:
        What to keep in mind, if that did not come about.
    """
    began, is_told, num_images = time.monotonic(), False, 0
    while not (feed.is_steady() if feed.place == "threads" else not feed.keeps or num_images >= 2 * feed.num_samples):
        num_images += len(next(batches).labels)
        passed = time.monotonic() - began
        if passed > seconds:
            return (
                f"in {seconds:g} seconds not all images were decoded that will be kept in memory: loading"
                " will be faster in later epochs than was measured"
            )
        if passed > 1 and not is_told:
            say("decoding the images that training keeps in memory")
            is_told = True
    return None


def _in_turns(
    session: Session,
    feed: ImageLoader,
    batches: Iterator[DeviceBatch],
    held: list[DeviceBatch],
    train: Callable[[DeviceBatch], int],
    seconds: float,
) -> Ceilings:
    """Measure feed alone, updates alone and both, in turns."""
    device, again = session.state.engine.device, itertools.cycle(held)
    rates: dict[str, list[float]] = {"feed": [], "compute": [], "both": []}
    total = 0.0

    def measure(name: str, work: Callable[[], int], least: int) -> float:
        nonlocal total
        rate, passed = images_per_second(device, work, seconds=seconds / ROUNDS / 3, least=least)
        rates[name].append(rate)
        total += passed
        return rate

    for _ in range(ROUNDS):
        for _ in range(feed.task.depth):  # ready before the clock starts
            next(batches)
        fed = measure("feed", lambda: len(next(batches).labels), LEAST_BATCHES)
        train(next(batches))
        measure("both", lambda: train(next(batches)), LEAST_UPDATES)
        # The feed is to be at rest, with all that it makes ahead ready, while the updates have the machine.
        time.sleep(1.2 * feed.task.depth * feed.task.batch_size / fed)
        measure("compute", lambda: train(next(again)), LEAST_UPDATES)
    return Ceilings(
        step=session.state.cursor.step,
        feed_images_per_second=median(rates["feed"]),
        compute_images_per_second=median(rates["compute"]),
        both_images_per_second=median(rates["both"]),
        seconds=total / 3,
    )


def _reason_not_to(past: RunHistory, session: Session, *, busy: bool) -> str | None:
    """Return why the measurement does not belong into the run's events; None where it does."""
    if busy:
        return "it was being trained meanwhile"
    before = {} if past.started is None else past.started.machine
    if (ranks := before.get("ranks", 1)) > 1:
        return f"it was trained by {ranks} ranks, and one process was measured"
    machine = session.started.machine
    for name in ("device", "cpu", "cores"):
        if name in before and before[name] != machine[name]:
            return f"it was trained elsewhere ({name} was {before[name]} and is {machine[name]})"
    return None
