"""The loop: a generator of events. There are no callbacks; who wants to know, looks at what it yields."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch

from steadytrain.config import Recipe
from steadytrain.config.phases import parse_train
from steadytrain.data.storage.runs import FolderUpload, require_same_run, upload_words
from steadytrain.distributed.async_engine import AsyncEngine
from steadytrain.distributed.process_group import Group
from steadytrain.distributed.ray_cluster import Cluster
from steadytrain.errors import FailedError, ModelError, RankLostError, StalledError, SteadyError
from steadytrain.events import (
    Ended,
    EpochTrained,
    Evaluated,
    Event,
    EventLog,
    Failed,
    FeedPlaced,
    FeedStats,
    Logged,
    Noticed,
    Resumed,
    Saved,
    ServerStats,
    Step,
)
from steadytrain.format import count, score_name
from steadytrain.machine.process import StopRequest, collecting_by_hand
from steadytrain.machine.sampler import sampling
from steadytrain.monitor import stacks
from steadytrain.monitor.samples import memory_words
from steadytrain.monitor.threads import looking
from steadytrain.monitor.watchdog import StallLimits, Watchdog
from steadytrain.run import Run, RunProgress
from steadytrain.training import checkpoints
from steadytrain.training.clock import Clock, Waits
from steadytrain.training.consensus import Wish
from steadytrain.training.data import join_batches, load
from steadytrain.training.finetuning.linear_probe import HELD_OUT, fit_head
from steadytrain.training.loop.evaluating import is_due, maybe_evaluate, settle_average
from steadytrain.training.memory import is_out_of_memory
from steadytrain.training.profile.probe import probe_beside
from steadytrain.training.profile.step_cost import StepMeasuring, measure_step
from steadytrain.training.progress import show_progress, wants_progress
from steadytrain.training.session.session import Session, open_session

Events = Generator[Event, None, str | None]

START_SECONDS = 600.0
"""After so long the user is told that a start takes long. It is never ended: a download may take its time."""

LEAST_UNCOLLECTED, MOST_UNCOLLECTED = 100, 10_000
"""Updates between two searches of old objects for garbage, at least and at most; between them, a tenth of those made:
who keeps something of each update makes the search longer and longer."""


@dataclass(frozen=True)
class Outcome:
    """How a run stands: ``status`` (finished, interrupted, preempted), updates done, its last evaluation, the run."""

    status: str
    step: int
    evaluated: Evaluated | None
    run: Run = field(repr=False)


def train(run: Run | str | Path, *, allow_import: bool | None = None, progress: bool | None = None) -> Outcome:
    """Train a run to its end, resuming by itself, and return how it came out.

    Args:
        run: as made by :meth:`Run.create`, or its folder; a finished one is left as it is.
        allow_import: import the recipe's ``pkg.mod:factory`` model or loss; None: what your code named, not a file.
        progress: show how far it is, and each evaluation; None: in a notebook and in a terminal.

    Raises:
        SteadyError: what the run's ``Failed`` event says.
    """
    run = Run.open(run)
    events: Iterable[Event] = steps(run, allow_import=allow_import)
    if (out := wants_progress(progress)) is not None:
        events = show_progress(events, run.recipe, out)
    for _ in events:
        pass
    now = run.progress()
    assert now.ended is not None, "steps() returned without an Ended event"
    return Outcome(now.ended.status, now.ended.step, now.evaluated, run)


def repeat(
    recipe: Recipe,
    number: int = 5,
    /,
    *,
    run: str | Path,
    allow_import: bool | None = None,
    progress: bool | None = None,
) -> tuple[Outcome, ...]:
    """Train a recipe with several seeds, one run after another, and return how each came out.

    What a seed decides: initial weights, order, augmentation and, without validation data, which images are held out.
    The same call resumes: finished runs are left as they are. ``st.report(run, "report.html")`` shows all of them and
    the mean with its 95 % interval; :func:`steadytrain.reports.spread` computes those of any figure.

    Args:
        recipe: with the first seed.
        number: of seeds, from 2 to 1000.
        run: the folder of the runs, which are called ``seed-0``, ``seed-1``, ...
        allow_import, progress: as of :func:`train`.

    Raises:
        SteadyError: as of :meth:`Run.create_repeats` and :func:`train`.
    """
    runs = Run.create_repeats(run, recipe, number)
    return tuple(train(run, allow_import=allow_import, progress=progress) for run in runs)


def steps(
    run: Run | str | Path,
    *,
    stop: Callable[[], str | None] = lambda: None,
    allow_import: bool | None = None,
    began: float | None = None,
    probe: bool = False,
    group: Group | None = None,
    cluster: Cluster | None = None,
) -> Iterator[Event]:
    """Take a run from where it stands to its end, yielding each event after it was written.

    Args:
        run: a run or its folder; a finished one yields nothing.
        stop: asked before the first update and after each; the name of a signal asks the loop to save and end.
        allow_import: import the recipe's ``pkg.mod:factory`` model or loss; None: what your code named, not a file.
        began: when the attempt began, by ``time.perf_counter()``; what was done since is start-up. None: now.
        probe: measure first how fast the loader, the updates and both can be, which changes nothing of the run.
        group: the ranks that train it together, each of which calls this; None: this process is alone.
        cluster: the servers that hold its weights, of which this process is one of the workers.

    Raises:
        RankLostError: another rank failed, or is gone.
        SteadyError: bad data, no room, a run in use; written as a ``Failed`` event first where that can be.
    """
    run = Run.open(run)
    before = run.progress()
    is_finished = before.finished is not None
    if is_finished if group is None else group.all_gather_json(is_finished)[0]:
        return
    began = time.perf_counter() if began is None else began
    is_first = not cluster.rank if cluster is not None else group is None or group.world.is_first
    with _locked(run, group, cluster) as log, _uploading(run, log, is_first=is_first) as ask_upload:
        session: Session | None = None
        if isinstance(stop, StopRequest):
            stop.last_words = lambda: log.append(_unsaved_end(run, began))
        try:
            looks, starting = ExitStack(), Clock(began)
            look = looks.enter_context(looking(log, starting))
            with (
                looks,
                _watch_start(run, log, starting) as start,
                open_session(run, log, allow_import=allow_import, began=began, group=group, cluster=cluster) as session,
            ):
                start.close()
                look.attach(session.clock)
                cursor, first = session.state.cursor, session.state.cursor.position
                monitors = _start_monitors(session, group, stop, relatives=_relatives(group, cluster))
                with monitors, looks, collecting_by_hand() as collect:
                    trained = _train(session, stop, before, collect, probe=probe)
                    signal = yield from _write_each(log, session.clock, trained, ask_upload)
                ended = Ended(
                    status="finished" if signal is None else "interrupted" if signal == "SIGINT" else "preempted",
                    step=cursor.step,
                    seconds=time.perf_counter() - session.clock.began,
                    images=cursor.position - first,
                )
                yield log.append(ended)
            if cluster is not None:
                cluster.ask("leave", cluster.rank)
        except KeyboardInterrupt:
            with contextlib.suppress(SteadyError):
                log.append(_unsaved_end(run, began))
            raise
        except Exception as caught:
            error = _out_of_memory(caught, run) or caught
            if group is not None:
                if isinstance(error, RankLostError) and session is not None and not session.halved.empty():
                    group.heartbeat.fail(str(error))  # this rank's memory ran out: the others wait for it
                error = group.blame(error)
            step = 0 if session is None else session.state.cursor.step
            with contextlib.suppress(SteadyError):
                if session is not None:
                    _notice_faults(session)
                    for event in _notices(session):
                        log.append(event)
                    with contextlib.suppress(Exception):  # it may be the error that is told below
                        for event in session.written():
                            log.append(event)
                    log.append(session.clock.account())
                log.append(Failed(error=type(error).__name__, message=str(error), step=step))
            if error is caught:
                del error  # its traceback refers to this frame: all of the attempt would stay in memory
                raise
            try:
                raise error from caught
            finally:
                del error


def _unsaved_end(run: Run, began: float) -> Ended:
    """Make the end of an attempt that was interrupted without saving: at its newest checkpoint, if there is one."""
    saved = checkpoints.saved(run.checkpoints)
    step = int(saved[-1].name.rpartition("-")[2]) if saved else 0
    return Ended(status="interrupted", step=step, seconds=time.perf_counter() - began, images=0)


def _train(
    session: Session, stop: Callable[[], str | None], before: RunProgress, collect: Callable[[], None], *, probe: bool
) -> Events:
    """Train to the end, or until somebody asks to stop; return the signal that did.

    ``collect`` searches old objects for garbage: on all ranks after the same updates, so that none waits for another.
    """
    state, clock, laps, consensus = session.state, session.clock, session.laps, session.consensus
    waits, measuring = Waits(clock, session.data.num_train), StepMeasuring(session)
    state.engine.should_stop = lambda: stop() is not None
    laps.restart()
    yield session.started()
    if session.compiled is not None:
        yield session.compiled
    yield from _resumed(session, before)
    if probe:
        yield from probe_beside(session)
        laps.restart()
    yield from _notices(session)
    if state.cursor.step == 0:
        yield from _probe(session, stop)
    yield from _evaluate(session, stop)  # due at once where the attempt before was stopped in one
    signal = consensus.ask_now(Wish(stop=stop())).stop
    if session.is_out_of_patience:
        session.end_here(_patience_words(session))
    # Which batch a worker is given next may depend on what becomes of this one.
    loaded = load(session.feed, state.engine.device, clock, ahead=not isinstance(state.engine, AsyncEngine))
    batches = join_batches(loaded, session.batches, state.cursor.step)
    seen = replace(state.cursor)  # after the update before: other workers may have made some since
    first = collected = seen.step
    for batch in () if signal or session.is_done else batches:
        waits.sort(batch.wait_seconds, state.cursor.position, session.batches.size(state.cursor.step))
        if state.cursor.step in session.phase_steps:
            session.begin_phase()
        lr = session.lr(state.cursor.step)
        momentum = None if session.momentum is None else session.momentum(state.cursor.step)
        with contextlib.nullcontext() if state.ema is None else settle_average(session, state.ema, batch):
            session.update(state, batch, lr, momentum)
        last, seen = seen, replace(state.cursor)
        num_images = seen.position - last.position
        laps.images += num_images
        laps.epoch_images += num_images
        laps.waited += batch.wait_seconds
        step = Step(
            step=state.cursor.step,
            position=state.cursor.position,
            n=num_images,
            seconds=laps.lap(),
            wait_seconds=batch.wait_seconds,
            lr=lr,
        )
        yield step
        wish_here = Wish(stop(), session.is_save_due(), measuring.is_due(step.seconds), session.is_out_of_time)
        wish = consensus.ask(wish_here)
        if wish.end:
            session.end_here(f"its {session.recipe.budget.minutes:g} minutes are over; the best weights are kept")
        if wish.measure:
            state.engine.rest()
            if (measured := measure_step(session, batch, allowed=measuring.allowed)) is not None:
                yield measured
            laps.restart()
        del batch
        is_done = session.is_done
        _end_epoch(session, last.position)
        is_line = _has_passed(session.recipe.every.log_steps, last.step, seen.step) or is_done
        evaluates = is_due(session)
        if is_collection_due(seen.step - collected, seen.step - first, waits=is_line or evaluates):
            collected = seen.step
            with clock.within("logging"):
                collect()  # a device goes on meanwhile, and the log line waits for it anyway
        if is_line:
            logged = _logged(session, lr)
            yield logged
            session.require_finite(logged.loss)
            yield from _epochs(session)
        yield from _notices(session)
        yield from session.written()
        if evaluates:
            yield from _epochs(session)
            yield from _evaluate(session, stop)
            then = consensus.ask_now(Wish(stop() or wish.stop, session.is_save_due(evaluated=True)))
            wish = Wish(then.stop, wish.save or then.save)
            if session.is_out_of_patience and not wish.stop:
                session.end_here(_patience_words(session))
                is_done = session.is_done
                yield from _notices(session)
        signal, every = wish.stop, session.recipe.every.save_steps
        if wish.save or is_done or signal or (every is not None and _has_passed(every, last.step, seen.step)):
            if is_done or signal:
                _end_epoch(session, last.position, is_last=True)
            yield from _epochs(session)
            session.save()
        if clock.is_due():
            yield from _accounts(session)
            _notice_faults(session)
        if signal or is_done:
            break
    _notice_faults(session)
    if state.probe is not None and not signal:
        session.notices.put(_probe_words(session, state.probe))
    yield from _notices(session)
    if session.steps == 0 and not signal:  # a probe alone
        session.save()
    consensus.close()
    if session.is_first:
        state.engine.end_run()
    else:
        state.engine.rest()
    if not signal:
        with state.engine.settled(session.evaluated_module):
            session.export("model.safetensors")
    yield from session.finish_writing()
    clock.settle()
    yield from _accounts(session)
    return signal


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


def _has_passed(every: int, before: int, now: int) -> bool:
    """Return whether a multiple of ``every`` lies between two numbers of updates, or is the second."""
    return before // every != now // every


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


@contextmanager
def _locked(run: Run, group: Group | None, cluster: Cluster | None = None) -> Iterator[EventLog]:
    """Lock the run for this process, or for the ranks together; open the log of a new attempt, which has one number."""
    if cluster is not None and cluster.rank:
        assert cluster.progress is not None, "a worker that has not joined"
        with run.log(cluster.rank, cluster.progress["attempt"]) as log:
            yield log
        return
    if group is None:
        with run.lock(), run.log() as log:
            yield log
        return
    with ExitStack() as stack:
        first: EventLog | None = None
        with group.all_or_none():
            if group.world.is_first:
                stack.enter_context(run.lock())
                first = stack.enter_context(run.log())
        attempt = group.all_gather_json(first and first.attempt)[0]
        yield first or stack.enter_context(run.log(group.world.rank, attempt))


@contextmanager
def _uploading(run: Run, log: EventLog, *, is_first: bool) -> Iterator[Callable[[], None]]:
    """Send the run to ``every.upload`` whenever what this yields is called, and at the end; the first rank does.

    Raises:
        RunError: another run is there, or a later state of this one.
        StorageError: at the end not all could be sent.
    """
    uri, every = run.recipe.every.upload, run.recipe.every
    uploads = uri is not None and not every.from_file and is_first
    if uri is not None and uploads:
        require_same_run(run.directory, run.recipe, uri)
    if is_first and (words := upload_words(run.recipe)):
        log.append(Noticed(message=words))
    if uri is None or not uploads:
        yield lambda: None
        return

    def say(message: str) -> None:
        log.append(Noticed(message=message))

    upload = FolderUpload(run.directory, uri, say)
    try:
        yield upload.ask
    except BaseException:
        with contextlib.suppress(SteadyError):  # the first error is the one to tell
            upload.close()
        raise
    upload.close()


def _watch_start(run: Run, log: EventLog, clock: Clock) -> ExitStack:
    """Watch this thread until what this returns is closed; of the progress of a start nothing is known."""
    watch = ExitStack()
    patience = StallLimits(slow=START_SECONDS, end=None)
    watch.enter_context(Watchdog(clock, log=log, folder=run.directory, patience=patience))
    return watch


@contextmanager
def _start_monitors(
    session: Session, group: Group | None, stop: Callable[[], str | None], *, relatives: list[int]
) -> Iterator[None]:
    """Sample the machine and watch the loop of this thread, and the other ranks, until it is left.

    ``relatives``: processes on this machine that train the same run.
    """
    clock, cursor, minutes = session.clock, session.state.cursor, session.recipe.every.stall_minutes
    patience = StallLimits(end=60 * minutes if minutes else None)
    dog = Watchdog(clock, log=session.log, folder=session.run.directory, patience=patience)
    feeds = [session.feed] if session.val_feed is None else [session.feed, session.val_feed]

    def doing() -> dict[str, str]:
        records = {name: words for feed in feeds for name, words in feed.doing().items()}
        places = stacks.busy("feed-") | stacks.children()
        return {name: f"{words}, {places[name]}" for name, words in records.items() if name in places} or records

    def abandon(error: StalledError) -> None:
        for feed in feeds:
            feed.abandon(error)

    def place() -> tuple[str, float]:
        return f"{clock.bucket} of update {cursor.step + 1}", time.perf_counter() - clock.since

    dog.feed, dog.abandon = doing, abandon
    if isinstance(stop, StopRequest):
        dog.stop_signal = lambda: stop.heard
    with ExitStack() as stack:
        if group is not None:  # the other ranks are told where this one is, and this one ends with them
            pulse = group.heartbeat
            stack.callback(setattr, pulse, "end", pulse.end)
            stack.callback(setattr, pulse, "at", None)
            pulse.at, dog.ranks, pulse.end = place, pulse.where, dog.end_for_another
        stack.enter_context(sampling(session.log, ranks=relatives, gpus=session.gpus))
        stack.enter_context(dog)
        yield


def _relatives(group: Group | None, cluster: Cluster | None) -> list[int]:
    """Return the processes on this machine that train the same run; servers and workers are their parent's children."""
    if cluster is not None:
        return [os.getppid()] if cluster.is_started_here else []
    return [] if group is None else group.local_pids


def _write_each(log: EventLog, clock: Clock, events: Events, on_saved: Callable[[], None]) -> Events:
    """Write each event before it is yielded; the time of that, and of whoever looks at it, is logging."""
    while True:
        try:
            event = next(events)
        except StopIteration as end:
            return cast("str | None", end.value)
        before = clock.bucket
        clock.to("logging")
        try:
            written = log.append(event)
            if isinstance(event, Saved):
                on_saved()
            yield written
        finally:
            clock.to(before)


def _out_of_memory(error: Exception, run: Run) -> FailedError | None:
    """Make the error that says what to do where memory ran out; None for any other error."""
    if not is_out_of_memory(error):
        return None
    memory = "the memory of the GPU" if isinstance(error, torch.OutOfMemoryError) else "the memory"
    return FailedError(
        f"{memory} is not enough for batch_size={run.recipe.batch_size}"
        f" ({str(error).splitlines()[0]}): lower --batch-size, split each batch with --set optim.accumulate=..., or"
        " give --recompute, which keeps every bit and takes more time"
    )


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


def _notice_faults(session: Session) -> None:
    for message in session.data.new_faults():
        session.notices.put(message)


def _notices(session: Session) -> Iterator[Event]:
    while not session.halved.empty():
        yield replace(session.halved.get(), step=session.state.cursor.step)
    while not session.notices.empty():
        yield Noticed(message=session.notices.get(), step=session.state.cursor.step)
    while not session.choices.empty():
        yield FeedPlaced(step=session.state.cursor.step, **vars(session.choices.get()))
