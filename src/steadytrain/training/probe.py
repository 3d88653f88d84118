"""The headroom probe: how fast the feed is alone, the updates alone, and both, on the run's own data and model.

A feed of its own makes the batches, from where the run stands in its stream; a copy of the network with an optimizer of
its own is trained on them at learning rate 0; both are thrown away. So it can be asked of any run: one that is yet to
begin, in the middle of its training, or finished. Each of the three takes its turn several times, and medians are told,
so that what comes and goes on a shared machine moves little.
"""

from __future__ import annotations

import copy
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Literal

from steadytrain.config import Recipe
from steadytrain.data.loader import BlockShuffle, ImageLoader
from steadytrain.distributed.engine import SingleEngine
from steadytrain.errors import FailedError, InputError, RunError, SteadyError, StorageError, first_line
from steadytrain.events import Ceilings, Event, Noticed, StepMeasured
from steadytrain.monitor import RunHistory
from steadytrain.run import Run
from steadytrain.training import build
from steadytrain.training.clock import Clock
from steadytrain.training.graphed import graphed
from steadytrain.training.isolation import undisturbed
from steadytrain.training.passes import measure_step
from steadytrain.training.peak import wait_for
from steadytrain.training.rank_share import share
from steadytrain.training.session import Session, open_session
from steadytrain.training.state import State
from steadytrain.training.step import Update
from steadytrain.training.transfer import Loaded, load

SECONDS = 15.0
"""How long to measure, if nobody says otherwise."""
ROUNDS = 3
LEAST_BATCHES, LEAST_UPDATES = 4, 2
"""Of the feed, and of the updates and of both, in each turn. The feed makes several at a time."""
SETTLE_SECONDS = 60.0
"""The longest time given to the feed for decoding images that it will keep."""
WARM_UPDATES = 2

Say = Callable[[str], None]
Place = Literal["threads", "process"]


@dataclass(frozen=True)
class Probed:
    """What the probe found.

    ``measured``: None where the network refuses (see :func:`passes.measure_step`). ``remark``: what is to be kept in
    mind about the figures.
    """

    ceilings: Ceilings
    measured: StepMeasured | None
    remark: str | None = None

    @property
    def events(self) -> tuple[Event, ...]:
        """What there is to write into a run's log."""
        return (self.ceilings, *([] if self.measured is None else [self.measured]))


def probe_run(
    run: Run, *, seconds: float = SECONDS, force: bool = False, allow_import: bool = False, say: Say = lambda told: None
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
        SteadyError: as for training: data, model or device are not there.
    """
    if not 0 < seconds <= 3600:
        raise InputError(f"seconds is {seconds}; it must be above 0, up to 3600")
    busy = run.is_held()
    if busy and not force:
        raise RunError(
            f"{run.directory} is being trained by process {run.holder()}: a probe would slow it down and measure half a"
            " machine; wait for its end, or stop it and go on afterwards (--force measures all the same)"
        )
    past = _read_past(run)
    placed = past.samples.placed
    place: Place = "process" if placed is not None and placed.place == "process" else "threads"
    with tempfile.TemporaryDirectory(prefix="steadytrain-probe-") as folder:
        aside = Run(Path(folder), _as_trained(run, past))
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
            _append(run, probed, _reason_not_to(past, session, busy=busy or run.is_held()), say)
    return probed


def probe_beside(session: Session) -> Iterator[Event]:
    """Probe the session of a run that is about to train, for :data:`SECONDS`; not a bit of what it trains changes.

    Yields what is going on, then ``Ceilings`` and ``StepMeasured``. Where they cannot be had, a notice tells why.
    """
    step = session.state.cursor.step
    yield Noticed(message=f"probe: measuring the feed, the updates and both for {SECONDS:g} seconds or more", step=step)
    try:
        with session.clock.within("measuring"):
            probed = probe(session, seconds=SECONDS)
    except Exception as error:  # noqa: BLE001 - what is wrong with data or model, training itself will say
        yield Noticed(message=f"the probe failed ({first_line(error)}): training goes on without", step=step)
        return
    yield from probed.events
    if probed.remark is not None:
        yield Noticed(message=f"probe: {probed.remark}", step=step)


def probe(
    session: Session,
    *,
    seconds: float = SECONDS,
    place: Place = "threads",
    say: Say = lambda told: None,
) -> Probed:
    """Measure the feed, the updates and both of a session, beside it.

    Args:
        session: whose recipe, data and network are measured; it does not change.
        seconds: how long to measure, in all.
        place: where the feed's threads live.
        say: told what goes on.
    """
    device = session.state.engine.device
    with undisturbed(device), _feed(session, place) as feed:
        batches = load(feed, device)
        held = [next(batches) for _ in range(WARM_UPDATES)]
        remark = _settle(feed, batches, say)
        state, update = _own_state(session)
        for batch in held:
            update(state, batch, 0.0)
        say(f"measuring the feed, the updates and both for {seconds:g} seconds or more")
        turns = _Turns(feed, batches, held, state, update)
        told = [turns.one(seconds / ROUNDS / 3) for _ in range(ROUNDS)]
        ceilings = Ceilings(
            step=session.state.cursor.step,
            feed_images_per_second=median(one[0] for one in told),
            compute_images_per_second=median(one[1] for one in told),
            both_images_per_second=median(one[2] for one in told),
            seconds=turns.seconds / 3,
        )
        del state, update, turns  # their memory is wanted
        return Probed(ceilings, measure_step(session, held[0]), remark)


@contextmanager
def _feed(session: Session, place: Place) -> Iterator[ImageLoader]:
    """A feed of the same batches without end, from where the run stands."""
    recipe, data = session.recipe, session.data
    device = session.state.engine.device
    on_gpu = device.type == "cuda"
    with ImageLoader(
        data.train,
        build.training_cut(recipe, session.input, data),
        batch_size=recipe.batch_size,
        seed=recipe.seed,
        ids=data.train_ids,
        start=session.state.cursor.position,
        threads=session.feed.threads,
        pin=on_gpu,
        device=device if on_gpu else None,
        on_bad=lambda bad: None,  # training tells of it
        blocks=BlockShuffle() if recipe.data.order == "blocks" else None,
        place=place,
    ) as feed:
        yield feed


def _own_state(session: Session) -> tuple[State, Update]:
    """A network and all that belongs to it, to be thrown away."""
    recipe, built = session.recipe, replace(session.built, module=copy.deepcopy(session.state.module))
    state = build.state(recipe, built, SingleEngine(session.state.engine.device))
    whole = share(state.engine.world, recipe.batch_size, recipe.optim.accumulate)
    update = build.update(recipe, built, session.input, state, Clock(time.perf_counter()), whole)
    forward = session.update.forward if session.compiled else update.forward
    return state, graphed(recipe, replace(update, forward=forward), state, None, lambda told: None)


def _settle(feed: ImageLoader, batches: Iterator[Loaded], say: Say) -> str | None:
    """Take batches until all images are kept that will be: then the feed is as fast as in later epochs.

    Returns:
        What to keep in mind, if that did not come about.
    """
    began, told, taken = time.monotonic(), False, 0
    while not (feed.is_steady() if feed.place == "threads" else not feed.keeps or taken >= 2 * feed.num_samples):
        taken += len(next(batches).labels)
        passed = time.monotonic() - began
        if passed > SETTLE_SECONDS:
            return (
                f"the feed had not decoded all images that it will keep in {SETTLE_SECONDS:g} seconds: in later epochs"
                " it is faster than was measured"
            )
        if passed > 1 and not told:
            say("decoding the images that training keeps in memory")
            told = True
    return None


class _Turns:
    """The three in turns: feed alone, both, updates alone, in images per second."""

    def __init__(
        self,
        feed: ImageLoader,
        batches: Iterator[Loaded],
        held: list[Loaded],
        state: State,
        update: Update,
    ) -> None:
        self._feed, self._batches, self._held = feed, batches, held
        self._state, self._update = state, update
        self._device = state.engine.device
        self.seconds = 0.0

    def one(self, seconds: float) -> tuple[float, float, float]:
        """One turn of each: feed, updates, both."""
        for _ in range(self._feed.depth):  # ready before the clock starts
            next(self._batches)
        feed = self._rate(self._taken, seconds, LEAST_BATCHES)
        self._both()
        both = self._rate(self._both, seconds, LEAST_UPDATES)
        # The feed is to be at rest, with all that it makes ahead ready, while the updates have the machine.
        time.sleep(1.2 * self._feed.depth * self._feed.batch_size / feed)
        return feed, self._rate(self._updated, seconds, LEAST_UPDATES), both

    def _rate(self, work: Callable[[], int], seconds: float, least: int) -> float:
        """Images per second of some work, for so long and at least so often."""
        wait_for(self._device)
        images, times, began = 0, 0, time.perf_counter()
        while times < least or time.perf_counter() - began < seconds:
            images += work()
            times += 1
        wait_for(self._device)
        passed = time.perf_counter() - began
        self.seconds += passed
        return images / passed

    def _taken(self) -> int:
        return len(next(self._batches).labels)

    def _updated(self) -> int:
        batch = self._held[self._state.cursor.step % len(self._held)]
        self._update(self._state, batch, 0.0)
        return len(batch.labels)

    def _both(self) -> int:
        batch = next(self._batches)
        self._update(self._state, batch, 0.0)
        return len(batch.labels)


def _read_past(run: Run) -> RunHistory:
    """Read what a run's events say, perhaps one that has not begun."""
    history = RunHistory(run.recipe)
    for event in run.events(condensed=True):
        history.take(event)
    return history


def _as_trained(run: Run, past: RunHistory) -> Recipe:
    """Return the run's recipe, with as many compute threads as it had."""
    threads = None if past.started is None else past.started.machine.get("compute_threads")
    if run.recipe.parallel.compute_threads is not None or not isinstance(threads, int):
        return run.recipe
    return run.recipe.with_({"parallel.compute_threads": threads})


def _reason_not_to(past: RunHistory, session: Session, *, busy: bool) -> str | None:
    """Why what was found does not belong into the run's events; None where it does."""
    if busy:
        return "it was being trained meanwhile"
    before = {} if past.started is None else past.started.machine
    if (ranks := before.get("ranks", 1)) > 1:
        return f"it was trained by {ranks} ranks, and one process was measured"
    for name in ("device", "cpu", "cores"):
        if name in before and before[name] != session.machine[name]:
            return f"it was trained elsewhere ({name} was {before[name]} and is {session.machine[name]})"
    return None


def _append(run: Run, probed: Probed, reason: str | None, say: Say) -> None:
    """Write what was found into the run's events, unless there is a reason not to."""
    try:
        if reason is None:
            with run.log_beside() as log:
                for event in probed.events:
                    log.append(event)
    except StorageError as error:
        reason = str(error)
    if reason is not None:
        say(f"this is not written into the events of {run.directory}: {reason}")
