"""The loop: a generator of events. There are no callbacks; who wants to know, looks at what it yields."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import cast

import torch

from steadytrain.distributed.process_group import Group
from steadytrain.errors import FailedError, SteadyError
from steadytrain.events import (
    Ended,
    Evaluated,
    Event,
    EventLog,
    Failed,
    FeedPlaced,
    FeedStats,
    Logged,
    Noticed,
    Resumed,
    Step,
)
from steadytrain.run import Progress, Run
from steadytrain.training.clock import Clock, Waits
from steadytrain.training.consensus import Wish
from steadytrain.training.evaluating import is_due, maybe_evaluate
from steadytrain.training.log_window import Laps
from steadytrain.training.monitors import start_monitors, starting
from steadytrain.training.norm_statistics import refresh_norm_statistics
from steadytrain.training.probe import probe_beside
from steadytrain.training.saving import Saves, export, require_number, save
from steadytrain.training.session import Session, open_session
from steadytrain.training.step_measurement import Measuring
from steadytrain.training.transfer import Loaded, load

Events = Generator[Event, None, str | None]


@dataclass(frozen=True)
class Outcome:
    """How a run stands: ``status`` (finished, interrupted, preempted), updates done and its last evaluation."""

    status: str
    step: int
    evaluated: Evaluated | None


def train(run: Run, *, allow_import: bool = False) -> Outcome:
    """Train a run to its end, resuming by itself, and say how it came out.

    Args:
        run: as made by :meth:`Run.create`; a finished one is left as it is.
        allow_import: import the recipe's ``pkg.mod:factory`` model. Only for recipes that you wrote yourself.

    Raises:
        SteadyError: what the run's ``Failed`` event says.
    """
    for _ in steps(run, allow_import=allow_import):
        pass
    now = run.progress()
    assert now.ended is not None, "steps() returned without an Ended event"
    return Outcome(now.ended.status, now.ended.step, now.evaluated)


def steps(
    run: Run,
    *,
    stop: Callable[[], str | None] = lambda: None,
    allow_import: bool = False,
    began: float | None = None,
    probe: bool = False,
    group: Group | None = None,
) -> Iterator[Event]:
    """Take a run from where it stands to its end, yielding each event after it was written.

    Args:
        run: a finished one yields nothing.
        stop: asked before the first update and after each; the name of a signal asks the loop to save and end.
        allow_import: import the recipe's ``pkg.mod:factory`` model.
        began: when the attempt began, by ``time.perf_counter()``; what was done since is start-up. None: now.
        probe: measure first how fast the feed, the updates and both can be, which changes nothing of the run.
        group: the ranks that train it together, each of which calls this; None: this process is alone.

    Raises:
        RankLostError: another rank failed, or is gone.
        SteadyError: bad data, no room, a run in use; written as a ``Failed`` event first where that can be.
    """
    before = run.progress()
    is_finished = before.finished is not None
    if is_finished if group is None else group.all_gather_json(is_finished)[0]:
        return
    began = time.perf_counter() if began is None else began
    with _held(run, group) as log:
        session: Session | None = None
        try:
            with (
                starting(run, log) as started,
                open_session(run, log, allow_import=allow_import, began=began, group=group) as session,
            ):
                started()
                first = session.state.cursor.position
                with start_monitors(session, group):
                    asked = yield from _written(log, session.clock, _train(session, stop, before, probe=probe))
                yield log.append(_ended(session, asked, first))
        except Exception as caught:
            error = _out_of_memory(caught, run) or caught
            if group is not None:
                error = group.blame(error)
            step = 0 if session is None else session.state.cursor.step
            with contextlib.suppress(SteadyError):
                if session is not None:
                    log.append(session.clock.account())
                log.append(Failed(error=type(error).__name__, message=str(error), step=step))
            if error is caught:
                raise
            raise error from caught


@contextmanager
def _held(run: Run, group: Group | None) -> Iterator[EventLog]:
    """The run for this process alone, or for the ranks together; the log of a new attempt, which has one number."""
    if group is None:
        with run.lock(), run.log() as log:
            yield log
        return
    first = group.world.is_first
    with ExitStack() as stack:
        made: EventLog | None = None
        with group.all_or_none():
            if first:
                stack.enter_context(run.lock())
                made = stack.enter_context(run.log())
        attempt = group.all_gather_json(made and made.attempt)[0]
        yield made or stack.enter_context(run.log(group.world.rank, attempt))


def _written(log: EventLog, clock: Clock, events: Events) -> Events:
    """Each event, written first; the time that this takes, and whoever looks at it, is logging."""
    while True:
        try:
            event = next(events)
        except StopIteration as end:
            return cast("str | None", end.value)
        with clock.within("logging"):
            yield log.append(event)


def _out_of_memory(error: Exception, run: Run) -> FailedError | None:
    """What to do about an error that says that memory ran out; None for any other."""
    cpu = isinstance(error, MemoryError) or "DefaultCPUAllocator" in str(error)
    if not cpu and not isinstance(error, torch.OutOfMemoryError):
        return None
    return FailedError(
        f"{'the memory' if cpu else 'the memory of the GPU'} is not enough for batch_size={run.recipe.batch_size}"
        f" ({str(error).splitlines()[0]}): lower --batch-size, split each batch with --set optim.accumulate=..., or"
        " give --recompute, which keeps every bit and takes more time"
    )


def _train(session: Session, stop: Callable[[], str | None], before: Progress, *, probe: bool) -> Events:
    """To the end, or until somebody asks to stop; returns the signal that did."""
    state, clock = session.state, session.clock
    peak = session.recipe.optim.scaled_lr(session.recipe.batch_size)
    laps, saves, waits = Laps(), Saves(session), Waits(clock, session.data.num_train)
    measuring, agreement = Measuring(session), session.agreement
    yield session.started()
    if session.compiled is not None:
        yield session.compiled
    yield from _resumed(session, before)
    if probe:
        yield from probe_beside(session)
        laps.restart()
    yield from _noticed(session)
    yield from maybe_evaluate(session, stop, laps, saves)  # due at once where the attempt before was stopped in one
    asked = agreement.ask_now(Wish(stop=stop())).stop
    for batch in () if asked else load(session.feed, state.engine.device, clock):
        waits.sort(batch.wait_seconds, state.cursor.position, session.recipe.batch_size)
        lr = peak * session.rate(state.cursor.step)
        refresh_norm_statistics(session, batch, lr)
        stepped = _stepped(session, batch, lr, laps)
        yield stepped
        now = agreement.ask(Wish(stop(), saves.due(), measuring.is_due(stepped.seconds)))
        if now.measure:
            yield from measuring.measure(batch)
            laps.restart()
        del batch
        done = state.cursor.step == session.steps
        if state.cursor.step % session.recipe.every.log_steps == 0 or done:
            logged = _logged(session, laps, lr)
            yield logged
            require_number(logged.loss, session)
        yield from _noticed(session)
        asked, wanted = now.stop, now.save
        if is_due(session):
            yield from maybe_evaluate(session, stop, laps, saves)
            then = agreement.ask_now(Wish(stop=stop() or asked))
            asked, wanted = then.stop, wanted or then.save
        if wanted or saves.due_by_steps() or done or asked:
            yield from save(session, laps, saves)
        if clock.is_due():
            yield from _accounts(session)
        if asked:
            break
    yield from _noticed(session)
    agreement.close()
    if not asked:
        export(session, "model.safetensors")
    clock.settle()
    yield from _accounts(session)
    return asked


def _accounts(session: Session) -> Iterator[Event]:
    """Where the seconds of the attempt went so far, and what the feed has done."""
    yield session.clock.account()
    yield FeedStats(step=session.state.cursor.step, **vars(session.feed.stats()))


def _stepped(session: Session, batch: Loaded, lr: float, laps: Laps) -> Step:
    cursor, n = session.state.cursor, session.recipe.batch_size
    laps.images += n
    laps.waited += batch.wait_seconds
    seconds = laps.lap()
    wait = batch.wait_seconds
    return Step(step=cursor.step, position=cursor.position, n=n, seconds=seconds, wait_seconds=wait, lr=lr)


def _logged(session: Session, laps: Laps, lr: float) -> Logged:
    with session.clock.within("logging"):
        loss, top1, norm = session.state.meters.take(session.state.engine)
    laps.lap()  # waited for as above
    rate, share = laps.images / laps.seconds, laps.waited / laps.seconds
    laps.images, laps.seconds, laps.waited = 0, 0.0, 0.0
    return Logged(
        step=session.state.cursor.step,
        epoch=session.epoch,
        loss=loss,
        top1=top1,
        lr=lr,
        images_per_second=rate,
        wait_share=share,
        grad_norm=norm,
    )


def _resumed(session: Session, before: Progress) -> Iterator[Event]:
    """Say what it costs that an attempt before this one ended."""
    if session.is_first and before.position:
        yield Resumed(
            step=session.state.cursor.step,
            images_repeated=max(0, before.position - session.state.cursor.position),
            seconds_away=time.time() - before.time,
            ranks_before=before.started.machine.get("ranks", 1) if before.started else 1,
            ranks=session.state.engine.world.size,
        )


def _noticed(session: Session) -> Iterator[Event]:
    while not session.notices.empty():
        yield Noticed(message=session.notices.get(), step=session.state.cursor.step)
    while not session.choices.empty():
        yield FeedPlaced(step=session.state.cursor.step, **vars(session.choices.get()))


def _ended(session: Session, asked: str | None, first: int) -> Ended:
    cursor = session.state.cursor
    return Ended(
        status="finished" if asked is None else "interrupted" if asked == "SIGINT" else "preempted",
        step=cursor.step,
        seconds=time.perf_counter() - session.clock.began,
        images=cursor.position - first,
    )
