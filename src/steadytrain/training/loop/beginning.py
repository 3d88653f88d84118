"""The beginning of an attempt, before its first update: its first events, and the fit of a classifier."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any

from steadytrain.config.defaults import GENTLE_EPOCHS, MAX_WARMUP_SHARE
from steadytrain.config.phases import parse_train
from steadytrain.errors import ModelError
from steadytrain.events import Evaluated, Event, Noticed, ProbeProgress, Resumed, Tried
from steadytrain.format import count, duration, percent, rate
from steadytrain.monitor.samples import memory_text
from steadytrain.run import Run, RunProgress
from steadytrain.training.finetuning.fits import better_fit, wants_better_fit
from steadytrain.training.finetuning.linear_probe import HELD_OUT, find_head, fit_head
from steadytrain.training.finetuning.tries import MOST_UNDONE, UNDONE, is_below, next_try
from steadytrain.training.loop.evaluating import maybe_evaluate
from steadytrain.training.loop.reporting import pending_notices
from steadytrain.training.loop.saving import export, finish_writing
from steadytrain.training.profile.probe import probe_beside
from steadytrain.training.session.session import Session


def begin(session: Session, stop: Callable[[], str | None], before: RunProgress, *, probe: bool) -> Iterator[Event]:
    """Tell of the start, and do what comes before the first update of an attempt, or of the run."""
    session.state.engine.should_stop = lambda: stop() is not None
    session.laps.restart()
    if not session.timeline.steps and session.state.cursor.step == 0:
        find_head(session)  # a probe alone that cannot be is refused before the run has begun
    yield session.started
    if session.compiled is not None:
        yield session.compiled
    yield from _resumed(session, before)
    if probe:
        yield from probe_beside(session)
        session.laps.restart()
    yield from pending_notices(session)
    has_probe = session.state.cursor.step == 0 and (yield from _probe(session, stop))
    yield from _evaluate(session, stop)  # due at once where the attempt before was stopped in one
    if has_probe:
        yield from _compare_fits(session, stop)


def _resumed(session: Session, before: RunProgress) -> Iterator[Event]:
    """Report the cost of an earlier attempt's end, and what of its log is lost."""
    if session.is_first and before.is_open:
        session.notice(_killed_notice(before, session.started.machine))
    if session.is_first and before.unreadable:
        lines = count(before.unreadable, "line")
        session.notice(f"{lines} of {session.run.log_path()} could not be read: damaged, and left out of every figure")
    if session.is_first and before.position:
        yield Resumed(
            step=session.state.cursor.step,
            images_repeated=max(0, before.position - session.state.cursor.position),
            seconds_away=time.time() - before.time,
            ranks_before=before.started.machine.get("ranks", 1) if before.started else 1,
            ranks=session.state.engine.world.size,
        )


def _killed_notice(before: RunProgress, machine: Mapping[str, Any]) -> str:
    """Return a sentence saying that the previous attempt was killed, and why, if known."""
    words = f"the attempt before (attempt {before.attempt}) was killed, or the machine went down"
    started = before.started.machine if before.started else {}
    then, now = started.get("out_of_memory_kills"), machine["out_of_memory_kills"]
    if started.get("host") == machine["host"] and then is not None and now is not None and now > then:
        words += "; the kernel has ended a process of this control group since, because memory ran out"
    return "; ".join(filter(None, (words, memory_text(before.machine))))


def _probe(session: Session, stop: Callable[[], str | None]) -> Generator[Event, None, bool]:
    """Fit the classifier first, where the recipe says so; a run of a probe alone is saved, and done.

    Returns whether it was fitted.
    """
    passes = parse_train(session.recipe.model.train).probe_passes
    if not passes:
        return False
    probe: ProbeProgress | None = None
    try:
        with session.clock.within("probe"):
            for probe in fit_head(session, passes, stop):
                yield probe
                if session.clock.is_due() or probe.images in (0, probe.total):
                    yield session.clock.account()
    except ModelError as error:
        if not session.timeline.steps:
            raise
        yield Noticed(message=f"all parameters are trained at once, without a probe: {error}", step=0)
        return False
    if probe is not None and probe.fit_seconds is not None:
        speed = probe.images_per_second
        how = "" if speed is None else f" ({rate(speed)} images/s)"
        how += f" ({probe.reused:,} of {probe.total:,} from the cache)" if probe.reused else ""
        yield Noticed(
            message=f"probe: {probe.features:,} features of each image in {probe.seconds:.1f} s{how}; classifier fitted"
            f" in {probe.fit_seconds:.1f} s, penalty {probe.penalty:g} chosen on {percent(HELD_OUT, 0)} of the training"
            f" images (top-1 {percent(probe.top1, 1)} there)",
            step=0,
        )
        if probe.by_fold:
            loss = f"loss {probe.fold_loss:.4f} (standard error {probe.fold_loss_error:.4f})"
            words = f"{probe.fold_words}, {loss}; folds.csv has each image"
            yield Noticed(message=words, step=0)
        if probe.series:
            yield Noticed(message=f"series: {probe.series}", step=0)
        session.state.evaluated = -1.0  # the classifier is evaluated as it is
    session.laps.restart()
    return probe is not None and probe.fit_seconds is not None


def _evaluate(session: Session, stop: Callable[[], str | None]) -> Iterator[Event]:
    """Evaluate what the attempt before was stopped in, or before the first update the probe."""
    for event in maybe_evaluate(session, stop):
        yield event
        if isinstance(event, Evaluated) and not event.step and session.timeline.steps:
            session.state.probe = event.goodness
            if session.can_begin_again and (session.recipe.budget.fill or session.recipe.every.undone == "restart"):
                export(session, session.run.probe_weights.name)


def _compare_fits(session: Session, stop: Callable[[], str | None]) -> Iterator[Event]:
    """Tell of a fit that is surely better than the probe's, whose weights are on the disk before one is looked for."""
    if stop() or not wants_better_fit(session):
        return
    yield from finish_writing(session)
    with session.clock.within("probe"):
        better = better_fit(session, stop)
    if better is not None:
        yield Noticed(message=better.words, step=0)
    session.laps.restart()


UNDONE_EPOCHS = 3.0
"""Epochs after the probe in which updates can undo it: two of warm-up, and the first at the full rate."""


def is_undone(session: Session) -> bool:
    """Return whether updates were just found to have undone the probe, and are to begin again from it."""
    if session.recipe.every.undone != "restart" or not session.run.probe_weights.exists():
        return False
    progress, cursor = session.run.progress(), session.state.cursor
    probe, newest = progress.probe, progress.evaluated
    if probe is None or newest is None or newest.step != cursor.step or cursor.step <= session.first_step:
        return False
    num_undone = sum(event.verdict == UNDONE for event in progress.tried if event.step < cursor.step)
    per_epoch, left = session.timeline.steps_per_epoch, session.timeline.steps - cursor.step
    is_early = cursor.step - session.first_step <= UNDONE_EPOCHS * per_epoch + 1 and left >= per_epoch
    return is_early and num_undone < MOST_UNDONE and is_below(newest, probe)


def begin_again(session: Session) -> Generator[Event, None, bool]:
    """Decide at the end of updates from a probe whether others begin from it, and write that into the run's recipe.

    They do where these have undone it, and with ``budget.fill`` as long as there is time and it helps. An event tells
    what was tried; a line, why nothing more is.
    """
    run, recipe, undone = session.run, session.recipe, is_undone(session)
    fills = recipe.budget.fill and recipe.budget.minutes is not None
    if not (undone or fills) or not run.probe_weights.exists():
        return False
    progress, first, step = run.progress(), session.first_step, session.state.cursor.step
    scored = [event for event in progress.evaluations if event.step > first and math.isfinite(event.loss)]
    if progress.probe is None or not scored:
        return False
    best, per_epoch = min(scored, key=lambda event: event.loss), session.timeline.steps_per_epoch
    spent = session.clock.seconds()
    seconds = sum(value for bucket, value in spent.items() if bucket not in ("startup", "probe"))
    attempts = [pair for pair in list(progress.spans.values())[:-1] if pair[0].step >= first]
    earlier = [max(0.0, taken - sum(begun.startup.values())) for begun, taken in attempts]
    epochs, updates = (step - first) / per_epoch, [event for event in progress.tried if event.what == "updates"]
    before = [event for event in updates if event.step < step]  # one of this step was decided on before a kill
    losses = [progress.probe.loss, *(event.loss for event in before)]
    verdict = UNDONE if undone else "best so far" if best.loss < min(losses) else "no better"
    tried = Tried(
        step=step,
        what="updates",
        model=session.built.name,
        size=session.input.size or 0,
        loss=best.loss,
        loss_error=best.loss_error,
        top1=best.top1,
        seconds=seconds + sum(earlier),
        verdict=verdict,
        lr=recipe.optim.lr,
        epochs=epochs,
    )
    yield tried
    if fills:
        start = sum(value for part, value in session.started.startup.items() if part != "process")
        left = session.ending.deadline - time.perf_counter() - start
        fitting = left / (tried.seconds / epochs)
    else:
        fitting = session.timeline.epochs - step / per_epoch
    lr, more, why = next_try([*before, tried], progress.probe, fitting, fills=fills)
    if recipe.budget.minutes and not more:
        unused = max(0.0, session.ending.deadline - time.perf_counter())
        why += f"; {duration(unused)} of {count(recipe.budget.minutes, 'minute')} are left"
    session.notice(why)
    yield from pending_notices(session)
    if more:
        changes: dict[str, object] = {"every.tries": (*recipe.every.tries, (step, lr))}
        if fills:
            changes["budget.epochs"] = step / per_epoch + more
            if recipe.optim.warmup_epochs < GENTLE_EPOCHS:  # it was short because the updates before were few
                changes["optim.warmup_epochs"] = min(GENTLE_EPOCHS, MAX_WARMUP_SHARE * more)
        Run.create(run.directory, run.as_decided().recipe.with_(changes))
    return bool(more)
