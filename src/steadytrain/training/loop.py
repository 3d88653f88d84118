"""The loop: a generator of events. There are no callbacks; who wants to know, looks at what it yields."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch

from steadytrain import checkpoints
from steadytrain.errors import DivergedError, FailedError, SteadyError
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
    Saved,
    Step,
)
from steadytrain.feed import Batch, Feed
from steadytrain.run import Run
from steadytrain.training.clock import Clock, Waits
from steadytrain.training.evaluation import evaluate_module
from steadytrain.training.measuring import Measuring
from steadytrain.training.probe import probe_beside
from steadytrain.training.session import Session, opened
from steadytrain.training.transfer import Loaded, load
from steadytrain.training.watched import starting, watched

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
    told = list(run.events(sparse=True))
    ended = [event for event in told if isinstance(event, Ended)][-1]
    evaluated = [event for event in told if isinstance(event, Evaluated)]
    return Outcome(ended.status, ended.step, evaluated[-1] if evaluated else None)


def steps(
    run: Run,
    *,
    stop: Callable[[], str | None] = lambda: None,
    allow_import: bool = False,
    began: float | None = None,
    probe: bool = False,
) -> Iterator[Event]:
    """Take a run from where it stands to its end, yielding each event after it was written.

    Args:
        run: a finished one yields nothing.
        stop: asked before the first update and after each; the name of a signal asks the loop to save and end.
        allow_import: import the recipe's ``pkg.mod:factory`` model.
        began: when the attempt began, by ``time.perf_counter()``; what was done since is start-up. None: now.
        probe: measure first how fast the feed, the updates and both can be, which changes nothing of the run.

    Raises:
        SteadyError: bad data, no room, a run in use; written as a ``Failed`` event first where that can be.
    """
    if run.finished():
        return
    began = time.perf_counter() if began is None else began
    with run.lock(), run.log() as log:
        session: Session | None = None
        try:
            with starting(run, log) as started, opened(run, log, allow_import=allow_import, began=began) as session:
                started()
                first = session.state.cursor.position
                with watched(session):
                    asked = yield from _written(log, session.clock, _train(session, stop, probe=probe))
                yield log.append(_ended(session, asked, first))
        except Exception as caught:
            error = _out_of_memory(caught, run) or caught
            step = 0 if session is None else session.state.cursor.step
            with contextlib.suppress(SteadyError):
                if session is not None:
                    log.append(session.clock.account())
                log.append(Failed(error=type(error).__name__, message=str(error), step=step))
            if error is caught:
                raise
            raise error from caught


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
        f" ({str(error).splitlines()[0]}): lower --batch-size, or split each batch with --set optim.accumulate=..."
    )


def _train(session: Session, stop: Callable[[], str | None], *, probe: bool) -> Events:
    """To the end, or until somebody asks to stop; returns the signal that did."""
    state, clock = session.state, session.clock
    peak = session.recipe.optim.scaled_lr(session.recipe.batch_size)
    pace, saves, waits = _Pace(), _Saves(session), Waits(clock, session.data.num_train)
    measuring = Measuring(session)
    yield session.started()
    if probe:
        yield from probe_beside(session)
        pace.restart()
    yield from _noticed(session)
    yield from _evaluated(session, stop, pace, saves)  # due at once where the attempt before was stopped in one
    asked = stop()
    for batch in () if asked else load(session.feed, state.engine.world.device, clock):
        waits.sort(batch.wait_seconds, state.cursor.position, batch.labels.shape[0])
        lr = peak * session.rate(state.cursor.step)
        session.update(state, batch, lr)
        stepped = _stepped(session, batch, lr, pace)
        yield stepped
        if measuring.is_due(stepped.seconds):
            yield from measuring.measure(batch)
            pace.restart()
        del batch
        done = state.cursor.step == session.steps
        if state.cursor.step % session.recipe.every.log_steps == 0 or done:
            logged = _logged(session, pace, lr)
            yield logged
            _require_number(logged.loss, session)
        yield from _noticed(session)
        yield from _evaluated(session, stop, pace, saves)
        asked = stop()
        if saves.due() or done or asked:
            yield from _saved(session, pace, saves)
        if clock.is_due():
            yield from _accounts(session)
        if asked:
            break
    yield from _noticed(session)
    if not asked:
        export(session, "model.safetensors")
    clock.settle()
    yield from _accounts(session)
    return asked


def _saved(session: Session, pace: _Pace, saves: _Saves) -> Iterator[Event]:
    _require_number(_settled_loss(session, pace), session)
    _require_sound_weights(session)
    yield saves.save()
    pace.restart()


def _accounts(session: Session) -> Iterator[Event]:
    """Where the seconds of the attempt went so far, and what the feed has done."""
    yield session.clock.account()
    yield FeedStats(step=session.state.cursor.step, **vars(session.feed.stats()))


def _require_number(loss: float, session: Session) -> None:
    if not math.isfinite(loss):
        raise _diverged(f"the loss is {loss}", session)


def _require_sound_weights(session: Session) -> None:
    """Refuse to save what cannot be trained on: a loss tells of an update only when the next one is made."""
    with session.clock.within("checkpoint"):
        finite = torch.stack([parameter.isfinite().all() for parameter in session.state.module.parameters()])
        is_sound = bool(finite.all())
    if not is_sound:
        raise _diverged("some weights are no numbers any more", session)


def _diverged(what: str, session: Session) -> DivergedError:
    step, optim = session.state.cursor.step, session.recipe.optim
    lr = optim.scaled_lr(session.recipe.batch_size) * session.rate(step - 1)
    return DivergedError(
        f"{what} at step {step} (learning rate {lr:g}): lower the learning rate (--lr), warm up longer"
        " (--set optim.warmup_epochs=...) or clip (--set optim.clip_norm=1); what was saved before is intact"
    )


class _Pace:
    """Images, seconds of steps and seconds waited since the last log line; evaluating and saving do not count."""

    def __init__(self) -> None:
        self.images = 0
        self.seconds = self.waited = 0.0
        self.restart()

    def restart(self) -> None:
        """The next lap begins now."""
        self._began = time.perf_counter()

    def lap(self) -> float:
        """Seconds since the lap began; the next one begins."""
        seconds = time.perf_counter() - self._began
        self.seconds += seconds
        self.restart()
        return seconds


def _settled_loss(session: Session, pace: _Pace) -> float:
    """The sum of losses since the last log line, when the device has done what the host had only asked for."""
    loss = session.state.meters.loss()
    pace.lap()  # or those steps would be counted with the evaluation or the saving that follows
    return loss


class _Saves:
    """When a checkpoint is due by the recipe's steps or minutes, and the saving itself."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._time = time.monotonic()

    def due(self) -> bool:
        every, step = self._session.recipe.every, self._session.state.cursor.step
        by_steps = every.save_steps is not None and step % every.save_steps == 0
        return by_steps or time.monotonic() - self._time >= every.save_minutes * 60

    def save(self) -> Saved:
        session = self._session
        step = session.state.cursor.step
        place = session.run.checkpoints
        with session.clock.within("checkpoint"):
            written = checkpoints.save(place, step, session.checkpoint(), keep=session.recipe.every.keep)
        self._time = time.monotonic()
        name = str(written.path.relative_to(session.run.directory))
        return Saved(step=step, path=name, bytes=written.bytes, seconds=written.seconds)


class _StoppedError(Exception):
    """Someone asked to stop in the middle of an evaluation."""


def _stepped(session: Session, batch: Loaded, lr: float, pace: _Pace) -> Step:
    cursor, n = session.state.cursor, batch.labels.shape[0]
    pace.images += n
    pace.waited += batch.wait_seconds
    seconds = pace.lap()
    wait = batch.wait_seconds
    return Step(step=cursor.step, position=cursor.position, n=n, seconds=seconds, wait_seconds=wait, lr=lr)


def _logged(session: Session, pace: _Pace, lr: float) -> Logged:
    with session.clock.within("logging"):
        loss, top1, norm = session.state.meters.take(session.state.engine)
    pace.lap()  # waited for as above
    rate, share = pace.images / pace.seconds, pace.waited / pace.seconds
    pace.images, pace.seconds, pace.waited = 0, 0.0, 0.0
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


def _evaluated(session: Session, stop: Callable[[], str | None], pace: _Pace, saves: _Saves) -> Iterator[Event]:
    if session.val_feed is None or not _evaluation_is_due(session):
        return
    _settled_loss(session, pace)
    yield from _evaluate(session, session.val_feed, stop, saves)
    pace.restart()


def _evaluate(session: Session, feed: Feed, stop: Callable[[], str | None], saves: _Saves) -> Iterator[Event]:
    state = session.state
    began = time.perf_counter()
    module = state.module if state.ema is None else state.ema.module
    try:
        with session.clock.within("evaluation"):
            told = evaluate_module(
                module, _until(feed, stop, session.clock), state.policy, session.input, len(session.data.classes)
            )
    except _StoppedError:
        return
    except Exception:
        with contextlib.suppress(SteadyError):  # the updates are sound whatever became of the validation data
            _require_sound_weights(session)
            yield saves.save()
        raise
    state.evaluated = session.epoch
    yield Evaluated(
        step=state.cursor.step,
        epoch=session.epoch,
        n=told.n,
        loss=told.loss,
        top1=told.top1,
        top5=told.top5,
        seconds=time.perf_counter() - began,
        weights="model" if state.ema is None else "ema",
    )
    if told.top1 > state.best and math.isfinite(told.loss):
        state.best = told.top1
        export(session, "best.safetensors")
    if state.cursor.step == session.steps and not math.isfinite(told.loss):
        raise _diverged(f"the loss on the validation images is {told.loss}", session)


def _evaluation_is_due(session: Session) -> bool:
    period, cursor = session.recipe.every.evaluate_epochs, session.state.cursor
    passed = _periods(session.epoch, period) > _periods(session.state.evaluated, period)
    return passed or (cursor.step == session.steps and session.state.evaluated < session.epoch)


def _periods(epoch: float, period: float) -> int:
    return math.floor(epoch / period + 1e-9)  # 0.3 / 0.1 is 2.9999999999999996


def _until(feed: Feed, stop: Callable[[], str | None], clock: Clock) -> Iterator[Batch]:
    for batch in feed:
        clock.to(clock.bucket)  # whoever watches sees that it moves
        if stop():
            raise _StoppedError
        yield batch


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


def export(session: Session, name: str) -> Path:
    """Write the weights that are evaluated (the average, if there is one) into the run's folder."""
    state = session.state
    module = state.module if state.ema is None else state.ema.module
    path = session.run.directory / name
    with session.clock.within("checkpoint"):
        checkpoints.write_weights(path, module.state_dict(), session.about())
    return path
