"""Threads that do numbered jobs piece by piece and deliver the results in order, a few ahead of the consumer.

What holds, whatever happens:

- results come out in the order of their numbers; at most ``depth`` of them are begun and not yet taken (back-pressure),
  or not yet released, where the consumer takes them for somebody else (``holds``);
- a job that fails raises in the consumer when its turn comes, after every result before it;
- :meth:`BatchStream.close`, its end, and dropping its owner (:meth:`BatchStream.end_with`) all stop the threads: each
  of them finishes its piece, or leaves it where it looks at ``closed``, and ends;
- as soon as a job has several results, the threads end and the consumer does the jobs: work so short takes turns with
  the consumer anyway, by the interpreter's lock, and handing the lock over costs more than the work;
- a process forked from this one has none of the threads: reading the stream there raises, and its end there is silent.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Generic, Protocol, TypeVar

from steadytrain.errors import FeedError

FORKED = (
    "the iteration started in the process that this one was forked from: iterate over the loader again in this process"
)
CLOSED = "the data loader was closed while it was being read: iterate over it again"


@dataclass(slots=True)
class StageTimes:
    """Images made, encoded bytes read, and busy seconds of threads by stage; seconds blocked by a full queue.

    ``cpu_seconds``: of the busy ones, those on a processor.
    """

    images: int = 0
    bytes: int = 0
    read_seconds: float = 0.0
    decode_seconds: float = 0.0
    augment_seconds: float = 0.0
    batch_seconds: float = 0.0
    blocked_seconds: float = 0.0
    cpu_seconds: float = 0.0

    def __add__(self, other: StageTimes) -> StageTimes:
        total = replace(self)
        total.add(other)
        return total

    def add(self, other: StageTimes) -> None:
        """Add another's counts."""
        self.images += other.images  # one by one: this runs for each piece
        self.bytes += other.bytes
        self.read_seconds += other.read_seconds
        self.decode_seconds += other.decode_seconds
        self.augment_seconds += other.augment_seconds
        self.batch_seconds += other.batch_seconds
        self.blocked_seconds += other.blocked_seconds
        self.cpu_seconds += other.cpu_seconds


@dataclass(slots=True)
class RequestCounts:
    """Batches that the consumer asked for, those that were not ready, and how many were ready, summed over requests."""

    requests: int = 0
    starved: int = 0
    ready: int = 0

    def note(self, ready: int) -> None:
        """Count one more request, made when so many batches were ready."""
        self.requests += 1
        self.ready += ready
        if not ready:
            self.starved += 1


class Workspace(Protocol):
    """One thread's memory to work in, and the times of its present piece.

    Once ``closed`` is set nobody wants the result any more, and a piece may raise.
    """

    times: StageTimes
    closed: threading.Event


R = TypeVar("R")
W = TypeVar("W", bound=Workspace)


@dataclass(slots=True, eq=False)
class BatchJob(Generic[W, R]):
    """Work in pieces, each done by one thread, in any order; ``finish`` runs once after the last of them.

    It gives ``count`` results, numbered one after the other.
    """

    pieces: list[Callable[[W], None]]
    finish: Callable[[], Sequence[R]]
    count: int = 1
    left: int = field(init=False)
    error: BaseException | None = None

    def __post_init__(self) -> None:
        self.left = len(self.pieces)
        self.pieces.reverse()  # they are popped from the end


@dataclass(frozen=True, eq=False)
class _Failure:
    """The error that a job raised, for the consumer."""

    error: BaseException


class _Worker(Generic[W]):
    """One thread: its times, its workspace while it is at a piece, and since when."""

    def __init__(self, times: StageTimes) -> None:
        self.times = times
        self.workspace: W | None = None
        self.since = time.perf_counter()


class BatchStream(Generic[W, R]):
    """An iterator over results 0, 1, 2, ...; the threads start at once, and end by :meth:`close` or its owner's end.

    Args:
        begin: makes the job that begins with result ``number``, of no more than ``room`` results; called in order,
            under a lock: it must be quick.
        total: number of results; None: without end.
        depth: results begun and not yet taken, at most, while the threads make them.
        times: grows as pieces are done.
        requests: grows as results are taken.
        holds: taking a result makes no room for another: :meth:`release` does.
    """

    def __init__(
        self,
        begin: Callable[[int, int], BatchJob[W, R]],
        workspace: Callable[[], W],
        *,
        total: int | None,
        threads: int,
        depth: int,
        times: StageTimes,
        requests: RequestCounts | None = None,
        holds: bool = False,
    ) -> None:
        self.depth = depth
        """Results that may be begun and not yet taken."""
        self.is_made_by_consumer = False
        self._begin = begin
        self._make_workspace = workspace
        self._total = total
        self._times = times
        self._requests = requests or RequestCounts()
        self._holds = holds
        # From here to ``_done``, all is guarded by the lock.
        self._lock = threading.RLock()
        self._ready = threading.Condition(self._lock)  # the result whose turn it is
        self._room = threading.Condition(self._lock)  # something to do, or the end
        self._begun = self._taken = 0
        self._released = 0  # of those taken, as many as make room for others
        self._job: tuple[int, BatchJob[W, R]] | None = None  # the newest, while pieces of it are left
        self._for_consumer: BatchJob[W, R] | None = None  # the first of several results; it does not count as begun
        self._done: dict[int, R | _Failure] = {}
        self._closed = threading.Event()
        self._process = os.getpid()
        self._consumer: tuple[_Worker[W], W] | None = None
        self._workers = [_Worker[W](StageTimes()) for _ in range(threads)]
        self._threads = [
            threading.Thread(target=self._work, args=(worker,), name=f"feed-{i}", daemon=True)
            for i, worker in enumerate(self._workers)
        ]
        weakref.finalize(self, _end, self._process, self._closed, (self._ready, self._room), self._threads)
        try:
            for thread in self._threads:
                thread.start()
        except BaseException:  # Ctrl-C: nobody has the stream yet, so nobody else would stop the threads
            self.close()
            raise

    def end_with(self, owner: object) -> None:
        """Stop the threads as soon as ``owner`` is dropped, in whatever thread the garbage collector runs."""
        weakref.finalize(owner, self._stop_dropped)

    def __iter__(self) -> Iterator[R]:
        return self

    def __next__(self) -> R:
        if self._is_foreign:
            raise FeedError(FORKED)
        try:
            while not self._wait_for_next():
                self._make_by_consumer()
            with self._lock:
                if self._taken not in self._done:
                    if self._taken == self._total:
                        raise StopIteration
                    raise FeedError(CLOSED)
                result = self._done.pop(self._taken)
                self._taken += 1
                if not self._holds:
                    self.release(1)
            if isinstance(result, _Failure):
                try:
                    raise result.error
                finally:
                    del result  # its traceback has this frame: the cycle would keep what the caller has until gc
            return result
        except BaseException:
            self.close()
            raise

    def release(self, count: int = 1) -> None:
        """Make room for as many results."""
        with self._lock:
            self._released += count
            # Waking a thread costs as much as a small batch: let there be room for a few.
            if self._begun - self._released <= self.depth // 2:
                self._room.notify_all()

    def doing(self) -> list[tuple[str, W | None, float]]:
        """Name each thread, its workspace while it is at a piece, and since when (``time.perf_counter()``)."""
        pairs = zip(self._threads, self._workers, strict=False)
        return [(thread.name, worker.workspace, worker.since) for thread, worker in pairs if thread.is_alive()]

    def abandon(self, error: BaseException) -> None:
        """Raise an error in whoever waits for the next result, and never wait for the threads: one of them hangs."""
        self._threads.clear()  # the list that whatever would wait has as well
        self._fail(error)

    def close(self) -> None:
        """Stop the threads and wait until they have ended; closing twice is fine."""
        if not self._is_foreign:
            self._stop()
            _join(self._threads)

    @property
    def _is_foreign(self) -> bool:
        """Return whether this is a forked process: the threads stayed behind, one of them perhaps with the lock."""
        return os.getpid() != self._process

    def _stop(self) -> None:
        """Let nothing more be begun, and drop what nobody has taken."""
        self._closed.set()
        with self._lock:
            self._job = self._for_consumer = None
            self._done.clear()
            self._ready.notify_all()
            self._room.notify_all()

    def _stop_dropped(self) -> None:
        if self._is_foreign:
            return
        self._stop()
        # It could hang here, but at the exit it must be done: a thread back from native code later kills the process.
        if not threading.main_thread().is_alive():
            _join(self._threads)

    def _fail(self, error: BaseException) -> None:
        """Tell whoever waits for the next result: a thread could not even begin, or hangs."""
        with self._lock:
            self._put(self._taken, _Failure(error))

    def _put(self, number: int, result: R | _Failure) -> None:
        if not self._closed.is_set():
            self._done[number] = result
            if number == self._taken:
                self._ready.notify_all()

    def _wait_for_next(self) -> bool:
        """Wait for the next result, or the end; False: the consumer has to make it first."""
        with self._lock:
            is_noted = False
            while not self._closed.is_set() and self._taken != self._total:
                if self.is_made_by_consumer and self._taken == self._begun:
                    return False
                is_there = self._taken in self._done
                if not is_noted:
                    self._requests.note(len(self._done) if is_there else 0)
                    is_noted = True
                if is_there:
                    break
                self._ready.wait()
            return True

    def _make_by_consumer(self) -> None:
        """Do the next job, as soon as there is room for a result of it."""
        if self._consumer is None:
            self._consumer = _Worker(StageTimes()), self._make_workspace()
        worker, workspace = self._consumer
        with self._lock:
            while self._begun - self._released >= self.depth:
                if self._closed.is_set():
                    return
                self._wait_for_room(worker)
            number, job, self._for_consumer = self._begun, self._for_consumer, None
            if job is None:
                job = self._begin(number, self.depth - (number - self._released) if self._holds else sys.maxsize)
            self._begun += job.count
            self.depth = max(self.depth, job.count)
        for piece in reversed(job.pieces):
            self._do_piece(worker, workspace, number, job, piece)

    def _work(self, worker: _Worker[W]) -> None:
        """Do pieces until there are no more."""
        workspace = _attempt(self._make_workspace)
        if isinstance(workspace, _Failure):
            self._fail(workspace.error)
            return
        workspace.closed = self._closed
        while (task := self._next_piece(worker)) is not None:
            self._do_piece(worker, workspace, *task)
            del task  # nothing of a batch stays with a waiting thread

    def _next_piece(self, worker: _Worker[W]) -> tuple[int, BatchJob[W, R], Callable[[W], None]] | None:
        """Wait for the next piece to do; None when there is nothing more for this thread."""
        with self._lock:
            while not self._closed.is_set():
                if (newest := self._job) is not None:  # once: a garbage collection in this very thread may stop all
                    number, job = newest
                    piece = job.pieces.pop()
                    if not job.pieces:
                        self._job = None
                    return number, job, piece
                if self._begun == self._total or self.is_made_by_consumer:
                    return None
                room = self.depth - (self._begun - self._released)
                if room <= 0:
                    self._wait_for_room(worker)
                    continue
                new_job = _attempt(partial(self._begin, self._begun, room))
                if isinstance(new_job, _Failure):
                    self._put(self._begun, new_job)
                    self._begun += 1
                elif new_job.count > 1:
                    self._for_consumer, self.is_made_by_consumer = new_job, True
                    self._ready.notify_all()
                    self._room.notify_all()
                else:
                    self._job = self._begun, new_job
                    self._begun += 1
                    if len(new_job.pieces) > 1:
                        self._room.notify_all()
            return None

    def _wait_for_room(self, worker: _Worker[W]) -> None:
        since = time.perf_counter()
        self._room.wait()
        blocked = time.perf_counter() - since
        self._times.blocked_seconds += blocked
        worker.times.blocked_seconds += blocked

    def _do_piece(
        self, worker: _Worker[W], workspace: W, number: int, job: BatchJob[W, R], piece: Callable[[W], None]
    ) -> None:
        """Do a piece of a job; after its last one make the results."""
        worker.workspace, worker.since, cpu_seconds = workspace, time.perf_counter(), time.thread_time()
        workspace.times = StageTimes()
        failure = _attempt(partial(piece, workspace))
        workspace.times.cpu_seconds = time.thread_time() - cpu_seconds
        with self._lock:
            self._times.add(workspace.times)
            worker.times.add(workspace.times)
            if isinstance(failure, _Failure):
                job.error = job.error or failure.error
            del failure
            job.left -= 1
            is_last = job.left == 0
        if is_last:
            results = _attempt(job.finish) if job.error is None else _Failure(job.error)
            with self._lock:
                each: Sequence[R | _Failure] = [results] if isinstance(results, _Failure) else results
                for k in range(len(each)):
                    self._put(number + k, each[k])
            # The traceback of an error has this frame and the job: such a cycle would keep the stream until gc.
            job.error = None
            del results, each
        worker.workspace, worker.since = None, time.perf_counter()


def _end(
    process: int, closed: threading.Event, waiting: Sequence[threading.Condition], threads: list[threading.Thread]
) -> None:
    """Stop the threads at the exit of their process, whatever became of the stream, and wait until they have ended."""
    if os.getpid() != process:
        return
    closed.set()
    for condition in waiting:
        with condition:
            condition.notify_all()
    _join(threads)


def _join(threads: list[threading.Thread]) -> None:
    for thread in threads:
        if thread.is_alive() and thread is not threading.current_thread():
            thread.join()


def _attempt(make: Callable[[], R]) -> R | _Failure:
    """Return what a function returns, or its failure."""
    try:
        return make()
    except BaseException as error:  # noqa: BLE001 - a thread's edge: it reaches the consumer
        return _Failure(error)
