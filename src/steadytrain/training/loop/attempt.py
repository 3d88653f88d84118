"""An attempt at a run, from its lock to its last event: a generator of events. There are no callbacks."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from traceback import format_exception
from typing import TypedDict, Unpack, cast

import msgspec
import torch

from steadytrain.data.storage.runs import FolderUpload, require_same_run, upload_notice
from steadytrain.distributed.peers import Peers
from steadytrain.distributed.process_group import Group, ranks_of
from steadytrain.errors import (
    DivergedError,
    FailedError,
    RankLostError,
    StalledError,
    SteadyError,
    StorageError,
    first_line,
)
from steadytrain.events import Ended, EventLog, Failed, Halved, Noticed, Saved
from steadytrain.machine.process import StopRequest, collecting_by_hand
from steadytrain.machine.sampler import sampling
from steadytrain.monitor import collectives, stacks
from steadytrain.monitor.threads import looking
from steadytrain.monitor.watchdog import StallLimits, Watchdog
from steadytrain.run import Run
from steadytrain.training import checkpoints
from steadytrain.training.clock import Clock
from steadytrain.training.data import OpenedData
from steadytrain.training.device import sampled_gpus
from steadytrain.training.loop.reporting import pending_notices
from steadytrain.training.loop.saving import written
from steadytrain.training.loop.steering import OnEvent, decide
from steadytrain.training.loop.stopping import Stopping, stopping
from steadytrain.training.loop.updates import NUMBERS, Events, run_updates
from steadytrain.training.memory import is_out_of_memory
from steadytrain.training.session.opening import open_session
from steadytrain.training.session.session import Session

START_SECONDS = 600.0
"""Seconds after which a message says that the start takes long. It is never ended: a download may take its time."""

_TORCH_RECORD = "TORCH_FR_DUMP_TEMP_FILE"  # of a pickle: torch writes it where it ends a process, nothing reads it here
_EXPECTED = SteadyError, OSError, ImportError, MemoryError  # their message says enough


class EachAttempt(TypedDict, total=False):
    """Arguments of each attempt at a run, as of :func:`.steps.run_steps` but for two.

    Args:
        since: seconds since 1970; an older file is no notice that the machine goes. None: the beginning of the attempt.
        on_locked: called once the run is locked.
    """

    stop: Callable[[], str | None]
    allow_import: bool | None
    since: float | None
    group: Peers | None
    opened: OpenedData | None
    on_locked: Callable[[], None]
    on_event: OnEvent | None


def attempts(
    run: Run | str | Path, *, began: float | None = None, probe: bool = False, **each: Unpack[EachAttempt]
) -> Events:
    """Take a run from where it stands to its end, yielding each event after it was written.

    It takes more than one attempt where some updates are computed in other numbers (``every.fp32``), or begin again
    from the probe.

    Args:
        run, began, probe: as of :func:`.steps.run_steps`.
        each: for each attempt.

    Raises:
        DivergedError: loss or weights are not finite any more; on all ranks after the same update.
        RankLostError, SteadyError: as of :func:`.steps.run_steps`.
    """
    run = Run.open(run)
    signal: str | None = NUMBERS
    while signal == NUMBERS:
        run = run if each.get("group") else run.as_decided()
        signal = yield from _attempt(run, began, probe=probe, **each)
        began, probe = None, False
    return signal


def _attempt(
    run: Run,
    began: float | None,
    *,
    probe: bool,
    stop: Callable[[], str | None] = lambda: None,
    allow_import: bool | None = None,
    since: float | None = None,
    group: Peers | None = None,
    opened: OpenedData | None = None,
    on_locked: Callable[[], None] = lambda: None,
    on_event: OnEvent | None = None,
) -> Events:
    """Make one attempt; return the signal that ended it, or :data:`NUMBERS`, None where the run is finished."""
    before = run.progress()
    is_finished = before.finished is not None
    if is_finished if group is None else group.first_value(is_finished):
        return None
    run.require_trainable()
    began = time.perf_counter() if began is None else began
    ranks = ranks_of(group)
    if ranks is not None:
        ranks.record_path = collectives.record_path(run.directory, ranks.world.rank)
    with (
        _locked(run, group) as log,
        _uploading(run, log, is_first=group is None or group.world.is_first) as ask_upload,
        _failure_written(run, log, ranks, began) as sessions,
        ExitStack() as looks,
    ):
        on_locked()
        if ranks is not None and _TORCH_RECORD not in os.environ:
            os.environ[_TORCH_RECORD] = str(run.directory / "torch-collectives-")
            looks.callback(os.environ.pop, _TORCH_RECORD, None)
        if isinstance(stop, StopRequest):
            stop.last_words = lambda: log.append(_unsaved_end(run, began))
        opening = open_session(run, log, began=began, allow_import=allow_import, group=group, opened=opened)
        with _watched(opening, run, log, looks, began, ranks) as session:
            sessions.append(session)
            clock = session.clock
            if isinstance(stop, StopRequest):
                stop.is_probing = lambda: clock.bucket == "probe"
            cursor, first = session.state.cursor, session.state.cursor.position
            stops = looks.enter_context(stopping(session, stop, ranks, since or session.started.began))
            monitors = _start_monitors(session, log, ranks, stops, relatives=[] if group is None else group.local_pids)
            # Whatever looks at the updates ends with them: the end of the attempt is the last event of its log.
            with monitors, looks, collecting_by_hand() as collect:
                trained = run_updates(session, stops, before, collect, probe=probe)
                signal = yield from _write_each(log, session, trained, ask_upload, on_event)
            if signal is not None and (words := stops.words()):
                yield log.append(Noticed(message=words, step=cursor.step))
            ended = Ended(
                status="finished" if signal is None else "interrupted" if signal == "SIGINT" else "preempted",
                step=cursor.step,
                seconds=time.perf_counter() - session.clock.began,
                images=cursor.position - first,
            )
            yield log.append(ended)
    return signal


@contextmanager
def _watched(
    opening: AbstractContextManager[Session],
    run: Run,
    log: EventLog,
    looks: ExitStack,
    began: float,
    group: Group | None,
) -> Iterator[Session]:
    """Open the session. A watchdog says so where that takes long, and looks at this thread begin with it."""
    clock, patience = Clock(began), StallLimits(slow=START_SECONDS, end=math.inf)
    look = looks.enter_context(looking(log, clock))
    if group is None or group.world.is_local_first:
        collectives.remove_records(run.directory)
    with ExitStack() as start:
        dog = Watchdog(clock, log=log, folder=run.directory, patience=patience)
        if group is not None:
            _watch_exchange(dog, group)
            group.heartbeat.at = lambda: ("startup", time.perf_counter() - began)
        start.enter_context(dog)
        with opening as session:
            start.close()
            if group is not None:  # a rank that waited long has written a record, but the start is over
                collectives.record_path(run.directory, group.world.rank).unlink(missing_ok=True)
            look.attach(session.clock)
            yield session


@contextmanager
def _failure_written(run: Run, log: EventLog, group: Group | None, began: float) -> Iterator[list[Session]]:
    """Write to the log why the block raised; yield a list for the session, once it is open.

    Where memory ran out the error that is raised says what to do; on several ranks it names the rank that is to blame.
    """
    sessions: list[Session] = []
    try:
        yield sessions
    except KeyboardInterrupt:
        with contextlib.suppress(SteadyError):
            log.append(_unsaved_end(run, began))
        raise
    except Exception as caught:
        error = _out_of_memory(caught, run) or caught
        if sessions and isinstance(error, StorageError):
            error.exit_code = StorageError.exit_code  # the place was good when training began
        if group is not None and not isinstance(error, DivergedError):  # which all ranks raise together
            events = [event for session in sessions for event in session.outbox]
            if isinstance(error, RankLostError) and any(isinstance(event, Halved) for event in events):
                group.heartbeat.fail(str(error))  # this rank's memory ran out: the others wait for it
            path = run.directory / f"traceback-{group.world.rank}.txt"
            error = group.blame(error, "" if isinstance(error, _EXPECTED) else f" ({path} has the traceback)")
        _write_failure(log, sessions[0] if sessions else None, error)
        if group is not None and not isinstance(error, _EXPECTED):
            error = _in_one_line(error, path)
        if error is caught:
            del error  # its traceback refers to this frame: all of the attempt would stay in memory
            raise
        try:
            raise error from caught
        finally:
            del error


def _in_one_line(error: Exception, path: Path) -> FailedError:
    """Turn an unexpected error of a rank into one whose traceback is in a file: the other ranks print as well."""
    with contextlib.suppress(OSError):
        path.write_text("".join(format_exception(error)), encoding="utf-8", errors="backslashreplace")
    kind, line = type(error).__name__, first_line(error)
    return FailedError(f"{line if line.startswith(kind) else f'{kind}: {line}'} ({path} has the traceback)")


def _write_failure(log: EventLog, session: Session | None, error: Exception) -> None:
    """Write why an attempt failed, after all that its session still has to tell."""
    step = 0 if session is None else session.state.cursor.step
    with contextlib.suppress(SteadyError):
        if session is not None:
            for event in pending_notices(session):
                log.append(event)
            with contextlib.suppress(Exception):  # it may be the error that is told below
                for event in written(session):
                    log.append(event)
            log.append(session.clock.account())
        log.append(Failed(error=type(error).__name__, message=str(error), step=step))


def _unsaved_end(run: Run, began: float) -> Ended:
    """Make the end of an attempt that was interrupted without saving: at its newest checkpoint, if there is one."""
    saved = checkpoints.saved(run.checkpoints)
    step = checkpoints.step_of(saved[-1]) if saved else 0
    return Ended(status="interrupted", step=step, seconds=time.perf_counter() - began, images=0)


@contextmanager
def _locked(run: Run, peers: Peers | None) -> Iterator[EventLog]:
    """Lock the run for this process, or for the ranks together; open the log of a new attempt, which has one number."""
    if peers is not None and peers.joined_attempt is not None:
        with run.log(peers.world.rank, peers.joined_attempt) as log:
            yield log
        return
    group = ranks_of(peers)
    if group is None:
        with run.lock() as is_sure, run.log() as log:
            _note_lock(log, run, is_sure=is_sure)
            yield log
        return
    with ExitStack() as stack:
        first: EventLog | None = None
        with group.all_or_none():
            if group.world.is_first:
                is_sure = stack.enter_context(run.lock())
                first = stack.enter_context(run.log())
                _note_lock(first, run, is_sure=is_sure)
        attempt = group.all_gather_json(first and first.attempt)[0]
        yield first or stack.enter_context(run.log(group.world.rank, attempt))


def _note_lock(log: EventLog, run: Run, *, is_sure: bool) -> None:
    """Note where nothing keeps a second process from training the run as well."""
    if not is_sure:
        log.append(
            Noticed(
                message=f"the file system of {run.directory} has no locks: nothing keeps a second process from training"
                " this run as well; start one at a time"
            )
        )


@contextmanager
def _uploading(run: Run, log: EventLog, *, is_first: bool) -> Iterator[Callable[[], None]]:
    """Send the run to ``every.upload`` whenever what this yields is called, and at the end; the first rank does.

    Raises:
        RunError: another run is there, or a later state of this one.
        StorageError: at the end not all could be sent.
    """
    uri, every = run.recipe.every.upload, run.recipe.every
    uploads = uri is not None and "upload" not in every.from_file and is_first
    if uri is not None and uploads:
        require_same_run(run.directory, run.recipe, uri)
    if is_first and (words := upload_notice(run.recipe)):
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


@contextmanager
def _start_monitors(
    session: Session, log: EventLog, group: Group | None, stops: Stopping, *, relatives: list[int]
) -> Iterator[None]:
    """Sample the machine and watch the loop of this thread, and the other ranks, until it is left.

    ``relatives``: processes on this machine that train the same run.
    """
    clock, cursor, minutes = session.clock, session.state.cursor, session.recipe.every.stall_minutes
    patience = StallLimits(end=60 * minutes if minutes else None)
    patience = replace(patience, exchange=max(patience.exchange, 20 * (minutes or 0)))
    dog = Watchdog(clock, log=log, folder=session.run.directory, patience=patience)
    feeds = [session.feed, *(part.feed for part in (session.validation, session.test) if part is not None)]

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
    dog.stop_signal = lambda: stops.heard
    with ExitStack() as stack:
        if group is not None:  # the other ranks are told where this one is, and this one ends with them
            heartbeat = group.heartbeat
            stack.callback(setattr, heartbeat, "end", heartbeat.end)
            stack.callback(setattr, heartbeat, "at", None)
            heartbeat.at, dog.ranks, heartbeat.end = place, heartbeat.where, dog.end_for_another
            heartbeat.silent, begun = session.recipe.parallel.silent_seconds, cursor.step
            heartbeat.has_updated = lambda: cursor.step > begun
            _watch_exchange(dog, group)
        gpus = sampled_gpus(group, session.started.machine.get("gpus", ()))
        stack.enter_context(sampling(log, ranks=relatives, gpus=gpus))
        stack.enter_context(dog)
        yield


def _watch_exchange(dog: Watchdog, group: Group) -> None:
    """Let a watchdog and the other ranks know what this rank exchanges."""
    heartbeat, loop = group.heartbeat, threading.get_ident()

    def own() -> collectives.RankPosition:
        entries: list[collectives.RecordedCollective] = []
        with contextlib.suppress(msgspec.ValidationError):  # a later torch may record something else
            entries = msgspec.convert(group.collectives(), list[collectives.RecordedCollective])
        return collectives.position(entries, time.time(), group.subgroups)

    def hang() -> collectives.Hang | None:
        positions = msgspec.convert(heartbeat.records(), dict[int, collectives.RankPosition | None])
        return next(iter(collectives.find_hangs({**positions, group.world.rank: own()})), None)

    def leave(error: SteadyError) -> None:
        if not isinstance(error, RankLostError):
            heartbeat.fail(str(error), error.exit_code)
            heartbeat.wait_until_heard()

    heartbeat.collectives = lambda: msgspec.to_builtins(own())
    group.place = lambda: stacks.where(loop)
    dog.hang, dog.record, dog.leave, dog.speaks = hang, group.dump, leave, heartbeat.is_first_here


def _write_each(
    log: EventLog, session: Session, events: Events, on_saved: Callable[[], None], on_event: OnEvent | None
) -> Events:
    """Write each event before it is yielded; the time of that, and of whoever looks at it, is logging."""
    clock = session.clock
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
            if on_event is not None:
                yield from decide(session, log, on_event, written)
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
