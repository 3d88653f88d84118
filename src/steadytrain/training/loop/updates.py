"""The updates of an attempt: each is followed by a few decisions, to log, to evaluate, to save, to stop."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import replace
from typing import Any

from steadytrain.config.phases import parse_train
from steadytrain.distributed.async_engine import AsyncEngine
from steadytrain.errors import ModelError
from steadytrain.events import (
    EpochTrained,
    Evaluated,
    Event,
    FeedPlaced,
    FeedStats,
    Logged,
    Noticed,
    Resumed,
    ServerStats,
    Step,
)
from steadytrain.format import count, score_name
from steadytrain.monitor.samples import memory_words
from steadytrain.run import RunProgress
from steadytrain.training.clock import Waits
from steadytrain.training.consensus import Wish
from steadytrain.training.data import DeviceBatch, join_batches, load
from steadytrain.training.finetuning.linear_probe import HELD_OUT, fit_head
from steadytrain.training.loop.evaluating import is_due, maybe_evaluate, settle_average
from steadytrain.training.profile.probe import probe_beside
from steadytrain.training.profile.step_cost import StepMeasuring, measure_step
from steadytrain.training.session.session import Session
from steadytrain.training.state import Cursor
from steadytrain.training.step import pass_over

Events = Generator[Event, None, str | None]

LEAST_UNCOLLECTED, MOST_UNCOLLECTED = 100, 10_000
"""Updates between two searches of old objects for garbage, at least and at most; between them, a tenth of those made:
who keeps something of each update makes the search longer and longer."""


def run_updates(
    session: Session, stop: Callable[[], str | None], before: RunProgress, collect: Callable[[], None], *, probe: bool
) -> Events:
    """Train to the end, or until somebody asks to stop; return the signal that did.

    ``collect`` searches old objects for garbage: on all ranks after the same updates, so that none waits for another.
    """
    clock, consensus, every = session.clock, session.consensus, session.recipe.every
    waits, measuring = Waits(clock, session.data.num_train), StepMeasuring(session)
    yield from _begin(session, stop, before, probe=probe)
    signal = consensus.ask_now(Wish(stop=stop())).stop
    if session.is_out_of_patience:
        session.end_here(_patience_words(session))
    seen = replace(session.state.cursor)  # after the update before: other workers may have made some since
    first = collected = seen.step
    for batch in () if signal or session.is_done else _batches(session):
        step = _make_update(session, batch, waits, seen)
        last, seen = seen, Cursor(step.step, step.position)
        yield step
        wish_here = Wish(stop(), session.is_save_due(), measuring.is_due(step.seconds), session.is_out_of_time)
        wish = consensus.ask(wish_here)
        if wish.end:
            session.end_here(f"its {session.recipe.budget.minutes:g} minutes are over; the best weights are kept")
        if wish.measure:
            yield from _measure(session, batch, measuring)
        del batch
        is_done = session.is_done
        _end_epoch(session, last.position)
        logs = (_has_passed(every.log_steps, last.step, seen.step) or is_done) and session.laps.images > 0
        evaluates = is_due(session)
        if is_collection_due(seen.step - collected, seen.step - first, waits=logs or evaluates):
            collected = seen.step
            with clock.within("logging"):
                collect()  # a device goes on meanwhile, and the log line waits for it anyway
        if logs:
            yield from _log(session, step.lr)
        yield from pending_notices(session)
        yield from session.written()
        if evaluates:
            wish = yield from _evaluate_and_ask(session, stop, wish)
            is_done = is_done or wish.end
        signal = wish.stop
        if wish.save or is_done or signal or _has_passed(every.save_steps, last.step, seen.step):
            yield from _save(session, last.position, is_last=is_done or signal is not None)
        if clock.is_due():
            yield from _accounts(session)
            notice_faults(session)
        if signal or is_done:
            break
    yield from _finish(session, signal)
    return signal


def _begin(session: Session, stop: Callable[[], str | None], before: RunProgress, *, probe: bool) -> Iterator[Event]:
    """Tell of the start, and do what comes before the first update of an attempt, or of the run."""
    session.state.engine.should_stop = lambda: stop() is not None
    session.laps.restart()
    yield session.started()
    if session.compiled is not None:
        yield session.compiled
    yield from _resumed(session, before)
    if probe:
        yield from probe_beside(session)
        session.laps.restart()
    yield from pending_notices(session)
    if session.state.cursor.step == 0:
        yield from _probe(session, stop)
    yield from _evaluate(session, stop)  # due at once where the attempt before was stopped in one


def _batches(session: Session) -> Iterator[DeviceBatch]:
    """Give a batch for each update that is still to come."""
    engine = session.state.engine
    # Which batch a worker is given next may depend on what becomes of this one.
    loaded = load(session.feed, engine.device, session.clock, ahead=not isinstance(engine, AsyncEngine))
    return join_batches(loaded, session.batches, session.state.cursor.step)


def _make_update(session: Session, batch: DeviceBatch, waits: Waits, last: Cursor) -> Step:
    """Make an update of a batch; ``last``: where the stream was after the one before."""
    state, laps = session.state, session.laps
    waits.sort(batch.wait_seconds, state.cursor.position, session.batches.size(state.cursor.step))
    if state.cursor.step in session.phase_steps:
        session.begin_phase()
    lr = session.lr(state.cursor.step)
    momentum = None if session.momentum is None else session.momentum(state.cursor.step)
    if is_made := state.cursor.step + 1 not in session.recipe.every.skip:
        with contextlib.nullcontext() if state.ema is None else settle_average(session, state.ema, batch):
            session.update(state, batch, lr, momentum)
    else:
        pass_over(session.update, state, batch)
        session.notices.put(f"update {state.cursor.step} is left out (every.skip)")
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


def _measure(session: Session, batch: DeviceBatch, measuring: StepMeasuring) -> Iterator[Event]:
    """Measure what a step is made of, beside the run."""
    session.state.engine.rest()
    if (measured := measure_step(session, batch, allowed=measuring.allowed)) is not None:
        yield measured
    session.laps.restart()


def _log(session: Session, lr: float) -> Iterator[Event]:
    """Tell loss and speed since the last line; a loss that is not finite ends the run."""
    logged = _logged(session, lr)
    yield logged
    session.require_finite(logged.loss)
    yield from _epochs(session)


def _evaluate_and_ask(session: Session, stop: Callable[[], str | None], wish: Wish) -> Generator[Event, None, Wish]:
    """Evaluate, and ask all ranks again, since it took its time; the run ends where no patience is left."""
    yield from _epochs(session)
    yield from _evaluate(session, stop)
    then = session.consensus.ask_now(Wish(stop() or wish.stop, session.is_save_due(evaluated=True)))
    ends = session.is_out_of_patience and not then.stop
    if ends:
        session.end_here(_patience_words(session))
        yield from pending_notices(session)
    return Wish(then.stop, wish.save or then.save, end=ends)


def _save(session: Session, before: int, *, is_last: bool) -> Iterator[Event]:
    """Have a checkpoint written after an update whose first image stands at ``before``."""
    if is_last:
        _end_epoch(session, before, is_last=True)
    yield from _epochs(session)
    session.save()


def _finish(session: Session, signal: str | None) -> Iterator[Event]:
    """End the attempt: all is written, and at the end of the run the weights are exported."""
    state = session.state
    notice_faults(session)
    if state.probe is not None and not signal:
        session.notices.put(_probe_words(session, state.probe))
    yield from pending_notices(session)
    if session.steps == 0 and not signal:  # a probe alone
        session.save()
    session.consensus.close()
    if session.is_first:
        state.engine.end_run()
    else:
        state.engine.rest()
    if not signal:
        with state.engine.settled(session.evaluated_module):
            session.export("model.safetensors")
    yield from session.finish_writing()
    session.clock.settle()
    yield from _accounts(session)


def is_collection_due(since: int, updates: int, *, waits: bool) -> bool:
    """Return whether old objects are to be searched for garbage.

    Args:
        since: updates since that was done.
        updates: of this attempt.
        waits: the host is about to wait for the device.

    >>> is_collection_due(100, 1_000, waits=True), is_collection_due(100, 20_000, waits=True)
    (True, False)
    >>> is_collection_due(9_999, 20_000, waits=False), is_collection_due(10_000, 20_000, waits=False)
    (False, True)
    """
    return since >= (min(max(LEAST_UNCOLLECTED, updates // 10), MOST_UNCOLLECTED) if waits else MOST_UNCOLLECTED)


def _has_passed(every: int | None, before: int, now: int) -> bool:
    """Return whether a multiple of ``every`` lies between two numbers of updates, or is the second."""
    return every is not None and before // every != now // every


def _patience_words(session: Session) -> str:
    state = session.state
    times = "the last evaluation" if state.misses == 1 else f"{state.misses} evaluations"
    name = score_name(session.data.num_labels is not None)
    return f"validation {name} has not risen above {state.best:.4f} in {times}; the best weights are kept"


def _probe_words(session: Session, probe: float) -> str:
    """Say at the end of a run whether updates made its probe better, and so which of them is kept."""
    best, name = session.state.best, score_name(session.data.num_labels is not None)
    if best > probe:
        return f"fine-tuning raised validation {name} from {probe:.4f}, the probe's, to {best:.4f} (best.safetensors)"
    return (
        f"no epoch was better than the probe, which is kept: best.safetensors holds it (validation {name} {probe:.4f});"
        " --train probe comes to it without updates"
    )


def _probe(session: Session, stop: Callable[[], str | None]) -> Events:
    """Fit the classifier first, where the recipe says so; a run of a probe alone is saved, and done."""
    passes = parse_train(session.recipe.model.train).probe_passes
    if not passes:
        return None
    times = "once" if passes == 1 else f"{passes} times"
    yield Noticed(
        message=f"probe: {session.data.num_train:,} images go through the network {times}, and a new classifier is"
        " fitted to their features",
        step=0,
    )
    try:
        with session.clock.within("warmup"):
            probe = fit_head(session, passes, stop)
    except ModelError as error:
        if not session.steps:
            raise
        yield Noticed(message=f"all parameters are trained at once, without a probe: {error}", step=0)
        return None
    if probe is not None:
        rate = passes * probe.images / probe.pass_seconds
        yield Noticed(
            message=f"probe: {probe.features:,} features of each image in {probe.pass_seconds:.1f} s ({rate:,.0f}"
            f" images/s); classifier fitted in {probe.fit_seconds:.1f} s, penalty {probe.penalty:g} chosen on"
            f" {HELD_OUT:.0%} of them (top-1 {probe.top1:.4f})",
            step=0,
        )
        session.state.evaluated = -1.0  # the classifier is evaluated as it is
    session.laps.restart()
    return None


def _evaluate(session: Session, stop: Callable[[], str | None]) -> Iterator[Event]:
    """Evaluate, if it is time; before the first update, it is the probe that is evaluated."""
    for event in maybe_evaluate(session, stop):
        yield event
        if isinstance(event, Evaluated) and not event.step and session.steps:
            session.state.probe = event.score


def _accounts(session: Session) -> Iterator[Event]:
    """Where the seconds of the attempt went so far, and what the loader has done."""
    yield session.clock.account()
    yield FeedStats(step=session.state.cursor.step, **vars(session.feed.stats()))
    engine = session.state.engine
    if isinstance(engine, AsyncEngine):
        now, exchanged = time.perf_counter(), engine.take_exchanged()
        yield ServerStats(
            step=session.state.cursor.step,
            seconds=now - exchanged.since,
            pushes=exchanged.pushes,
            staleness=exchanged.staleness / max(1, exchanged.pushes),
            staleness_max=exchanged.staleness_max,
            servers=exchanged.servers,
        )


def _logged(session: Session, lr: float) -> Logged:
    laps = session.laps
    with session.clock.within("logging"):
        loss, top1, norm = session.state.meters.take(session.state.engine)
    laps.lap()  # the device has done the work that the host had only asked for
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


def _end_epoch(session: Session, before: int, *, is_last: bool = False) -> None:
    """Keep the sums of an epoch after the last of its updates; ``is_last``: of one that ends with the attempt.

    An update belongs to the epoch of its first image, which stands at ``before``.
    """
    cursor, num_train = session.state.cursor, session.data.num_train
    epoch = before // num_train
    is_whole = cursor.position // num_train > epoch
    if is_whole != is_last:
        session.state.meters.end_epoch(epoch + 1, cursor.step, is_whole=is_whole)


def _epochs(session: Session) -> Iterator[EpochTrained]:
    """Tell of the epochs that ended. It waits for the device, so it comes with what has to wait for it anyway."""
    laps = session.laps
    with session.clock.within("logging"):
        ended = session.state.meters.take_epochs(session.state.engine)
    if ended:
        laps.lap()
        rate = laps.epoch_images / laps.epoch_seconds
        laps.epoch_images, laps.epoch_seconds = 0, 0.0
        for sums in ended:
            yield EpochTrained(**sums._asdict(), images_per_second=rate)


def _resumed(session: Session, before: RunProgress) -> Iterator[Event]:
    """Report the cost of an earlier attempt's end, and what of its log is lost."""
    if session.is_first and before.is_open:
        session.notices.put(_killed_words(before, session.machine))
    if session.is_first and before.unreadable:
        lines = count(before.unreadable, "line")
        session.notices.put(f"{lines} of {session.log.path} could not be read: damaged, and left out of every figure")
    if session.is_first and before.position:
        yield Resumed(
            step=session.state.cursor.step,
            images_repeated=max(0, before.position - session.state.cursor.position),
            seconds_away=time.time() - before.time,
            ranks_before=before.started.machine.get("ranks", 1) if before.started else 1,
            ranks=session.state.engine.world.size,
        )


def _killed_words(before: RunProgress, machine: Mapping[str, Any]) -> str:
    """Return a sentence saying that the previous attempt was killed, and why, if known."""
    words = f"the attempt before (attempt {before.attempt}) was killed, or the machine went down"
    started = before.started.machine if before.started else {}
    then, now = started.get("out_of_memory_kills"), machine["out_of_memory_kills"]
    if started.get("host") == machine["host"] and then is not None and now is not None and now > then:
        words += "; the kernel has ended a process of this control group since, because memory ran out"
    return "; ".join(filter(None, (words, memory_words(before.machine))))


def notice_faults(session: Session) -> None:
    """Take up what was wrong with images since the last call."""
    for message in session.data.new_faults():
        session.notices.put(message)


def pending_notices(session: Session) -> Iterator[Event]:
    """Yield what parts of the session have had to say since the last call."""
    while not session.halved.empty():
        yield replace(session.halved.get(), step=session.state.cursor.step)
    while not session.notices.empty():
        yield Noticed(message=session.notices.get(), step=session.state.cursor.step)
    while not session.choices.empty():
        yield FeedPlaced(step=session.state.cursor.step, **vars(session.choices.get()))
