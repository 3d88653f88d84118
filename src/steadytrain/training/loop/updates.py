"""The updates of an attempt: each is followed by a few decisions, to measure, to log, to evaluate, to save, to stop."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace

import torch

from steadytrain.config.figures import FIGURES, SIGN, figure_value
from steadytrain.events import Event, Step
from steadytrain.run import RunProgress
from steadytrain.training.clock import Clock, Waits
from steadytrain.training.consensus import Wish
from steadytrain.training.data import DeviceBatch, join_batches, load
from steadytrain.training.loop.beginning import begin, begin_again, is_undone
from steadytrain.training.loop.evaluating import evaluate_test, is_due, maybe_evaluate, settle_average
from steadytrain.training.loop.reporting import accounts, end_epoch, epochs, log_line, pending_notices
from steadytrain.training.loop.saving import export, finish_writing, require_finite, save, written
from steadytrain.training.loop.steering import steered
from steadytrain.training.profile.step_cost import StepMeasuring, measure_step
from steadytrain.training.session.session import Session, set_phase
from steadytrain.training.state import Cursor
from steadytrain.training.step import pass_over

Events = Generator[Event, None, str | None]

NUMBERS = "other numbers"
"""The word in place of a signal's name by which the next update is computed in other numbers, by an attempt of its own.
"""

LEAST_UNCOLLECTED, MOST_UNCOLLECTED = 100, 10_000
"""The fewest and the most updates between two searches of old objects for garbage: in between, a tenth of those made.
Where something is kept of each update, the search takes longer and longer.
"""


def run_updates(
    session: Session, stop: Callable[[], str | None], before: RunProgress, collect: Callable[[], None], *, probe: bool
) -> Events:
    """Train to the end, or until somebody asks to stop; return the signal that did.

    :data:`NUMBERS` is one: the next attempt goes on at once, in other numbers.

    ``collect`` searches old objects for garbage: on all ranks after the same updates, so that none waits for another.
    """
    consensus, every, measuring = session.consensus, session.recipe.every, StepMeasuring(session)
    waits, garbage = Waits(session.clock, session.data.num_train), _Garbage(session.clock, collect)
    tracing = _trace_updates(session)
    next(tracing)
    yield from begin(session, stop, before, probe=probe)
    wish = consensus.ask_now(Wish(stop=stop()))
    if _is_out_of_patience(session):
        _end_here(session, _patience_notice(session))
    if is_undone(session):
        session.ending.last_step = session.state.cursor.step
    seen = replace(session.state.cursor)  # after the update before: other workers may have made some since
    for batch in () if wish.stop or session.is_done else _batches(session):
        session = steered(_begin_phase(session))
        session.ending.is_settled = False
        step = _make_update(session, batch, waits, seen)
        last, seen = seen, Cursor(step.step, step.position)
        yield step
        wish = consensus.ask(_wish(session, stop, is_measuring_due=measuring.is_due(step.seconds)))
        if wish.save_seconds and not session.is_first:  # for a notice that its machine is told of
            session.saver.seconds = wish.save_seconds
        if wish.end:
            minutes = session.recipe.budget.minutes
            words = "minute is" if minutes == 1 else "minutes are"
            _end_here(session, f"its {minutes:g} {words} over; the best weights are kept")
        if wish.measure:  # passes over the batch, whose memory is free for all that follows
            yield from _measure(session, batch, measuring)
        del batch
        end_epoch(session, last.position)  # before the log line, which also yields the epochs that ended
        logs = _has_passed(every.log_steps, last.step, seen.step) or session.is_done
        logs = logs and session.laps.images > 0  # where updates are left out, a line may have none
        evaluates = is_due(session)
        # The device computes on while the host collects; a line or an evaluation waits for the device after that.
        garbage.maybe_collect(seen.step - last.step, waits=logs or evaluates)
        if logs:  # before an evaluation and a checkpoint: weights that are not finite get neither
            yield from _log(session, step.lr)
        tracing.send(step.seconds)
        yield from pending_notices(session)
        yield from written(session)
        if is_due(session):  # before the checkpoint, which holds the best score and how often it was missed
            wish = yield from _evaluate_and_ask(session, stop, wish)
        is_last = session.is_done or wish.stop is not None or session.changes_numbers
        session.ending.is_settled = True
        if wish.save or is_last or _has_passed(every.save_steps, last.step, seen.step):
            yield from _save(session, last.position, is_last=is_last)
        if session.clock.is_due():  # last, so that the account has the time of all of these
            yield from accounts(session)
        if is_last:
            break
    tracing.send(None)
    signal = wish.stop or (NUMBERS if session.changes_numbers else None)
    is_stopped = any(not times for _, times in session.ending.rates)
    if signal is None and not is_stopped and (yield from begin_again(session)):
        signal = NUMBERS
    return (yield from _finish(session, stop, signal))


def _batches(session: Session) -> Iterator[DeviceBatch]:
    """Give a batch for each update that is still to come."""
    engine = session.state.engine
    loaded = load(session.feed, engine.device, session.clock, ahead=engine.loads_ahead)
    plan = session.timeline.batches
    return join_batches(loaded, plan, session.state.cursor.step) if plan.is_growing else loaded


def _begin_phase(session: Session) -> Session:
    """Begin to train what waited for this update, if anything did.

    The optimizer has had the parameters in its groups, without gradients: their state begins now.
    """
    if not session.first_epochs or session.state.cursor.step not in session.phase_steps:
        return session
    module, cursor = session.state.module, session.state.cursor
    set_phase(session.recipe, session.built, session.first_epochs, cursor.position / session.data.num_train)
    call = session.state.engine.prepare(module, cursor.step)
    trained = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
    session.notice(f"epoch {session.epoch:.4g}: {trained:,} parameters are trained from here on")
    return replace(session, update=replace(session.update, call=call))


def _make_update(session: Session, batch: DeviceBatch, waits: Waits, last: Cursor) -> Step:
    """Make an update of a batch; ``last``: where the stream was after the one before."""
    state, laps, timeline = session.state, session.laps, session.timeline
    step = state.cursor.step
    waits.sort(batch.wait_seconds, state.cursor.position, timeline.batches.size(step))
    lr = session.lr(step)
    if is_made := step + 1 not in session.recipe.every.skip:
        with contextlib.nullcontext() if state.ema is None else settle_average(session, state.ema, batch):
            session.update(state, batch, lr, timeline.momentum(step))
    else:
        pass_over(session.update, state, batch)
        session.notice(f"update {step + 1} is left out (every.skip)")
    now = replace(state.cursor)
    num_images = now.position - last.position
    laps.images += num_images if is_made else 0  # a line without any has no loss
    laps.epoch_images += num_images
    laps.waited += batch.wait_seconds
    return Step(
        step=now.step,
        position=now.position,
        n=num_images,
        seconds=laps.lap(),
        wait_seconds=batch.wait_seconds,
        lr=lr,
    )


def _wish(session: Session, stop: Callable[[], str | None], *, is_measuring_due: bool) -> Wish:
    """Return what this rank asks for after an update. Only the first rank saves and ends by the clock."""
    signal = stop()  # which may want a checkpoint at once
    saver = session.saver  # to save by the clock is the first rank's, and to save before its machine goes any rank's
    is_save_due = saver.is_due() if session.is_first else saver.is_hurried
    # An evaluation and a checkpoint may be all that the run has time for.
    at_end = saver.seconds + session.closing_seconds
    is_late = session.is_first and time.perf_counter() + at_end >= session.ending.deadline
    return Wish(signal, is_save_due, is_measuring_due, is_late, saver.seconds if session.is_first else 0.0)


def _is_out_of_patience(session: Session) -> bool:
    """Return whether the last evaluations were no better than those before, as often as the recipe allows."""
    patience = session.recipe.budget.patience
    return patience is not None and session.state.misses >= patience


def _end_here(session: Session, why: str) -> None:
    """End the run after the last update, and say why."""
    if not session.is_done:
        session.ending.last_step = session.state.cursor.step
        session.notice(f"the run ends early, at epoch {session.epoch:.4g}: {why}")


def _measure(session: Session, batch: DeviceBatch, measuring: StepMeasuring) -> Iterator[Event]:
    """Measure what a step is made of, beside the run."""
    session.state.engine.rest()
    if (measured := measure_step(session, batch, allowed=measuring.allowed)) is not None:
        yield measured
    session.laps.restart()


def _log(session: Session, lr: float) -> Iterator[Event]:
    """Tell loss and speed since the last line; a loss that is not finite ends the run."""
    logged = log_line(session, lr)
    yield logged
    require_finite(session, logged.loss)
    yield from epochs(session)


def _evaluate_and_ask(session: Session, stop: Callable[[], str | None], wish: Wish) -> Generator[Event, None, Wish]:
    """Evaluate, and ask all ranks again, since it took its time; the run ends where no patience is left."""
    yield from epochs(session)
    yield from maybe_evaluate(session, stop)
    is_save_due = session.is_first and session.saver.is_due(evaluated=True)
    then = session.consensus.ask_now(Wish(stop() or wish.stop, is_save_due))
    if _is_out_of_patience(session) and not then.stop:
        _end_here(session, _patience_notice(session))
        yield from pending_notices(session)
    if is_undone(session):
        session.ending.last_step = session.state.cursor.step
    return Wish(then.stop, wish.save or then.save)


def _save(session: Session, before: int, *, is_last: bool) -> Iterator[Event]:
    """Have a checkpoint written after an update whose first image stands at ``before``."""
    if is_last:
        end_epoch(session, before, is_last=True)
    yield from epochs(session)
    save(session)


def _finish(session: Session, stop: Callable[[], str | None], signal: str | None) -> Events:
    """End the attempt: all is written, and at the end of the run the weights are exported and tested.

    Returns:
        The signal, also where one comes meanwhile.
    """
    state = session.state
    if state.probe is not None and not signal:
        session.notice(_probe_notice(session, state.probe))
    yield from pending_notices(session)
    if session.timeline.steps == 0 and not signal:  # a probe alone
        save(session)
    session.consensus.close()
    if session.is_first:
        state.engine.end_run()
    else:
        state.engine.rest()
    if not signal:
        with state.engine.settled(session.evaluated_module):
            export(session, "model.safetensors")
    yield from finish_writing(session)
    if not signal and not (yield from evaluate_test(session, stop)):
        signal = session.consensus.ask_now(Wish(stop())).stop
    if not signal and session.is_first:
        session.run.probe_weights.unlink(missing_ok=True)
    session.clock.settle()
    yield from accounts(session)
    return signal


class _Garbage:
    """Decides when old objects are searched for garbage: when the host is about to wait for the device, if it can."""

    def __init__(self, clock: Clock, collect: Callable[[], None]) -> None:
        self._clock, self._collect = clock, collect
        self._updates = self._since = 0

    def maybe_collect(self, updates: int, *, waits: bool) -> None:
        """Search, if that is due after so many more updates; ``waits``: the host is about to wait for the device."""
        self._updates += updates
        self._since += updates
        if is_collection_due(self._since, self._updates, waits=waits):
            self._since = 0
            with self._clock.within("logging"):
                self._collect()  # a device goes on meanwhile, and the log line waits for it anyway


TRACED_AFTER = 30
"""Updates of an attempt before those that are traced: its warm-up, and the measuring of what a step is made of."""


def _trace_updates(session: Session) -> Generator[None, float | None]:
    """Trace updates by torch.profiler (Kineto), and a GPU's memory, into the run's folder, as ``every.profile`` says.

    It is sent the seconds of each update, and None after the last.
    """
    every, left = session.recipe.every, session.timeline.steps - session.state.cursor.step
    folder, on_gpu = session.run.directory / "profile", session.state.engine.device.type == "cuda"
    trace = folder / f"rank-{session.state.engine.world.rank}.json.gz"
    num_updates = (every.profile or 0) * (session.is_first or every.profile_ranks == "all")
    if num_updates and trace.exists():
        session.notice(f"{trace} is there already, so no updates are traced: remove it to trace this run again")
        num_updates = 0
    before, traced, seconds = list[float](), list[float](), 0.0 if num_updates else None
    while seconds is not None and len(before) < max(1, min(TRACED_AFTER, (left - num_updates) // 2)):
        if (seconds := (yield)) is not None:
            before.append(seconds)
    if seconds is not None:
        if on_gpu:
            torch.cuda.memory._record_memory_history(max_entries=100_000)
        with torch.profiler.profile(record_shapes=True) as profiler:
            while len(traced) < num_updates and (seconds := (yield)) is not None:
                traced.append(seconds)
        began = time.perf_counter()
        with session.clock.within("checkpoint"):  # other ranks wait as long for it
            folder.mkdir(exist_ok=True)
            profiler.export_chrome_trace(str(trace))
            if on_gpu:
                memory = folder / f"rank-{session.state.engine.world.rank}-memory.pickle"
                torch.cuda.memory._dump_snapshot(str(memory))  # type: ignore[no-untyped-call]
                torch.cuda.memory._record_memory_history(enabled=None)
        session.laps.restart()
        usual, slower = (1000 * statistics.median(times or [0.0]) for times in (before, traced))
        session.notice(
            f"{len(traced)} updates are traced in {folder}: {slower:.1f} ms each, {usual:.1f} ms before, and"
            f" {time.perf_counter() - began:.1f} s to write"
        )
    while True:
        yield


def is_collection_due(since: int, updates: int, *, waits: bool) -> bool:
    """Return whether garbage is to be searched for, so many updates after the last time, of those of an attempt.

    >>> is_collection_due(100, 1_000, waits=True), is_collection_due(100, 20_000, waits=True)
    (True, False)
    >>> is_collection_due(9_999, 20_000, waits=False), is_collection_due(10_000, 20_000, waits=False)
    (False, True)
    """
    return since >= (min(max(LEAST_UNCOLLECTED, updates // 10), MOST_UNCOLLECTED) if waits else MOST_UNCOLLECTED)


def _has_passed(every: int | None, before: int, now: int) -> bool:
    """Return whether a multiple of ``every`` lies between two numbers of updates, or is the second."""
    return every is not None and before // every != now // every


def _patience_notice(session: Session) -> str:
    state = session.state
    times = "the last evaluation" if state.misses == 1 else f"{state.misses} evaluations"
    value = figure_value(state.figure, SIGN[state.figure] * state.best)
    best = f"{'risen above' if SIGN[state.figure] > 0 else 'fallen below'} {value}"
    return f"validation {FIGURES[state.figure]} has not {best} in {times}; the best weights are kept"


def _probe_notice(session: Session, probe: float) -> str:
    """Say at the end of a run whether updates made its probe better, and so which of them is kept."""
    state, event = session.state, session.run.progress().best
    name, sign = f"validation {FIGURES[state.figure]}", SIGN[state.figure]
    before, best = sign * probe, sign * state.best
    from_probe, to = figure_value(state.figure, before), figure_value(state.figure, best)
    if state.best > probe or (event is not None and event.step):
        verb = "lowered" if sign < 0 else "raised" if best > before else "lowered the loss; within a standard error,"
        return f"fine-tuning {verb} {name} from {from_probe}, the probe's, to {to} (best.safetensors)"
    return (
        f"no epoch was better than the probe, which is kept: best.safetensors holds it ({name} {from_probe});"
        " --train probe reaches it without updates"
    )
