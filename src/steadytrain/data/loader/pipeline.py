"""Threads that do numbered jobs piece by piece and deliver the results in order, a few ahead of the consumer.

What holds, whatever happens:

- results come out in the order of their numbers; at most ``depth`` of them are begun and not yet taken (back-pressure),
  or not yet released, where the consumer takes them for somebody else (``holds``);
- a job that fails raises in the consumer when its turn comes, after every result before it;
- :meth:`Stream.close`, dropping the stream, and its end all stop the threads: each of them finishes its piece, or
  leaves it where it looks at ``closed``, and ends. They hold no reference to the stream itself;
- as soon as a job has several results, the threads end and the consumer does the jobs: work so short takes turns with
  the consumer anyway, by the interpreter's lock, and handing the lock over costs more than the work;
- a process forked from this one has none of the threads: reading the stream there raises, and its end there is silent.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Generic, Protocol, TypeVar

from steadytrain.errors import FeedError


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
class Job(Generic[W, R]):
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
    """What a job raised, for the consumer."""

    error: BaseException


class Stream(Generic[W, R]):
    """An iterator over results 0, 1, 2, ...; the threads start at once.

    Args:
        begin: makes the job of result ``number``, which may have so many results; called in order, under a lock: it
            must be quick.
        workspace: makes a thread's workspace.
        total: number of results; None: without end.
        threads: how many.
        depth: results begun and not yet taken, at most, or as many as a job should have.
        times: grows as pieces are done.
        results_per_job: how many a job should have now; quick as well, and not called again once there are several.
        each: the times of each thread.
        requests: grows as results are taken.
        holds: taking a result makes no room for another job: :meth:`release` does.
    """

    def __init__(
        self,
        begin: Callable[[int, int], Job[W, R]],
        workspace: Callable[[], W],
        *,
        total: int | None,
        threads: int,
        depth: int,
        times: StageTimes,
        results_per_job: Callable[[], int] = lambda: 1,
        each: Sequence[StageTimes] = (),
        requests: RequestCounts | None = None,
        holds: bool = False,
    ) -> None:
        self._holds = holds
        self._shared = shared = _Shared(begin, results_per_job, total, depth, times, requests or RequestCounts())
        self._workspace = workspace
        self._consumer_workspace: W | None = None
        self._workers: list[_Worker[W]] = [_Worker(each[i] if each else StageTimes()) for i in range(threads)]
        self._threads = [
            threading.Thread(target=_work, args=(shared, workspace, worker), name=f"feed-{i}", daemon=True)
            for i, worker in enumerate(self._workers)
        ]
        weakref.finalize(shared, _join, self._threads)
        weakref.finalize(
            self, _stop_dropped, shared, self._threads
        )  # at the interpreter's exit the later ones come first
        for thread in self._threads:
            thread.start()

    def __iter__(self) -> Iterator[R]:
        return self

    def __next__(self) -> R:
        shared = self._shared
        if shared.is_foreign:
            raise FeedError("the feed was begun in the process that this one was forked from: iterate it anew here")
        try:
            while not shared.wait_for_next():
                self._consumer_workspace = self._consumer_workspace or self._workspace()
                worker = _Worker[W](StageTimes())
                if (task := shared.next_piece(worker, by_consumer=True)) is not None:
                    _do_piece(shared, self._consumer_workspace, worker, *task)
            return shared.take(0 if self._holds else 1)
        except BaseException:
            self.close()
            raise

    def release(self, count: int = 1) -> None:
        """Make room for as many results as were taken while the stream ``holds``."""
        self._shared.release(count)

    @property
    def depth(self) -> int:
        """Results that may be begun and not yet taken."""
        return self._shared.depth

    @property
    def is_made_by_consumer(self) -> bool:
        """Whether the consumer does the jobs."""
        return self._shared.results_per_job() > 1

    def doing(self) -> list[tuple[str, W | None, float]]:
        """Name each thread, its workspace while it is at a piece, and since when (``time.perf_counter()``)."""
        pairs = zip(self._threads, self._workers, strict=False)
        return [(thread.name, worker.workspace, worker.since) for thread, worker in pairs if thread.is_alive()]

    def abandon(self, error: BaseException) -> None:
        """Raise an error in whoever waits for the next result, and never wait for the threads: one of them hangs."""
        self._threads.clear()  # the list that whatever would wait has as well
        self._shared.fail(error)

    def close(self) -> None:
        """Stop the threads and wait until they have ended; closing twice is fine."""
        if not self._shared.is_foreign:
            self._shared.stop()
            _join(self._threads)


class _Worker(Generic[W]):
    """What is known of one thread: its times, its workspace while it is at a piece, and since when."""

    def __init__(self, times: StageTimes) -> None:
        self.times = times
        self.workspace: W | None = None
        self.since = time.perf_counter()


class _Shared(Generic[W, R]):
    """What the consumer and the threads share; every field is guarded by ``lock``."""

    def __init__(
        self,
        begin: Callable[[int, int], Job[W, R]],
        ask_results_per_job: Callable[[], int],
        total: int | None,
        depth: int,
        times: StageTimes,
        requests: RequestCounts,
    ) -> None:
        self.begin = begin
        self._ask_results_per_job, self._results_per_job = ask_results_per_job, 1
        self.total = total
        self._depth = depth
        self.times = times
        self.requests = requests
        self.lock = threading.RLock()
        self.ready = threading.Condition(self.lock)  # the result whose turn it is
        self.room = threading.Condition(self.lock)  # something to do, or the end
        self.begun = 0
        self.taken = 0
        self.noted = 0  # of those taken or asked for, as many as ``requests`` knows of
        self.released = 0  # of those taken, as many as make room for others
        self.job: tuple[int, Job[W, R]] | None = None  # the newest, while pieces of it are left
        self.done: dict[int, R | _Failure] = {}
        self.stopped = False
        self.closed = threading.Event()  # the same, for whoever does not want the lock
        self._process = os.getpid()

    @property
    def is_foreign(self) -> bool:
        """Whether this is a forked process: the threads stayed behind, and one of them may have held the lock."""
        return os.getpid() != self._process

    def results_per_job(self) -> int:
        """Results that a job should have now; several once are several for good."""
        if self._results_per_job == 1:
            self._results_per_job = self._ask_results_per_job()
        return self._results_per_job

    @property
    def depth(self) -> int:
        """Results that may be begun and not yet taken."""
        return max(self._depth, self.results_per_job())

    def consumer_has_to_work(self) -> bool:
        """Whether the next result is not there unless the consumer does something for it."""
        if self.results_per_job() == 1:
            return False
        return self.job is not None or (self.begun != self.total and self.taken == self.begun)

    def wait_for_next(self) -> bool:
        """Wait for the next result, or the end; False: the consumer has to work for it first."""
        with self.lock:
            while not self.stopped and self.taken != self.total:
                if self.consumer_has_to_work():
                    return False
                if self.noted == self.taken:
                    self.requests.note(len(self.done) if self.taken in self.done else 0)
                    self.noted += 1
                if self.taken in self.done:
                    break
                self.ready.wait()
            return True

    def take(self, release: int) -> R:
        """Take the next result, in order, that :meth:`wait_for_next` saw; and make room for so many more."""
        with self.lock:
            if self.taken not in self.done:
                if self.taken == self.total:
                    raise StopIteration
                raise FeedError("the feed was closed while it was read: iterate it again")
            result = self.done.pop(self.taken)
            self.taken += 1
            self.release(release)
        if isinstance(result, _Failure):
            raise result.error
        return result

    def release(self, count: int) -> None:
        """Make room for more results."""
        with self.lock:
            self.released += count
            # Waking a thread costs as much as a small batch: let there be room for a few.
            if count and self.begun - self.released <= self.depth // 2:
                self.room.notify_all()

    def next_piece(
        self, worker: _Worker[W], *, by_consumer: bool = False
    ) -> tuple[int, Job[W, R], Callable[[W], None]] | None:
        """Wait for the next piece to do; None when there is nothing more for this thread, or for the consumer now."""
        with self.lock:
            while not self.stopped:
                if (newest := self.job) is not None:  # once: stop() may run in this very thread, by garbage collection
                    number, job = newest
                    piece = job.pieces.pop()
                    if not job.pieces:
                        self.job = None
                    return number, job, piece
                if self.begun == self.total:
                    return None
                if not by_consumer and self.results_per_job() > 1:
                    self.ready.notify_all()  # who waits has to go on alone
                    return None
                wanted = self.results_per_job()
                if self.depth - (self.begun - self.released) >= wanted:
                    self._begin(wanted if self.total is None else min(wanted, self.total - self.begun))
                    continue
                if by_consumer and not self.consumer_has_to_work():
                    return None  # a thread took what there was to do: room would come only from taking its result
                since = time.perf_counter()
                self.room.wait()
                blocked = time.perf_counter() - since
                self.times.blocked_seconds += blocked
                worker.times.blocked_seconds += blocked
            return None

    def _begin(self, count: int) -> None:
        job = _attempt(partial(self.begin, self.begun, count))
        if isinstance(job, _Failure):
            self._put(self.begun, job)
            self.begun += 1
            return
        self.job = self.begun, job
        if len(job.pieces) > 1:
            self.room.notify_all()
        self.begun += job.count

    def complete(
        self, number: int, job: Job[W, R], error: BaseException | None, times: StageTimes, worker: _Worker[W]
    ) -> None:
        """Count a piece of a job as done, or failed; after the last one make the results."""
        with self.lock:
            self.times.add(times)
            worker.times.add(times)
            job.error = job.error or error
            job.left -= 1
            if job.left:
                return
        results = _attempt(job.finish) if job.error is None else _Failure(job.error)
        with self.lock:
            if not self.stopped:
                each: Sequence[R | _Failure] = [results] if isinstance(results, _Failure) else results
                for k, result in enumerate(each):
                    self._put(number + k, result)

    def fail(self, error: BaseException) -> None:
        """Tell whoever waits for the next result: a thread could not even begin, or hangs."""
        with self.lock:
            if not self.stopped:
                self._put(self.taken, _Failure(error))

    def stop(self) -> None:
        """Let nothing more be begun, and drop what nobody has taken."""
        self.closed.set()
        with self.lock:
            self.stopped = True
            self.job = None
            self.done.clear()
            self.ready.notify_all()
            self.room.notify_all()

    def _put(self, number: int, result: R | _Failure) -> None:
        self.done[number] = result
        if number == self.taken:
            self.ready.notify_all()


def _stop_dropped(shared: _Shared[W, R], threads: list[threading.Thread]) -> None:
    """Tell the threads of a dropped stream to stop, in whatever thread the garbage collector runs."""
    if shared.is_foreign:
        return
    shared.stop()
    # It could hang here, but at the exit it must be done: a thread back from native code after it kills the process.
    if not threading.main_thread().is_alive():
        _join(threads)


def _join(threads: list[threading.Thread]) -> None:
    for thread in threads:
        if thread.is_alive() and thread is not threading.current_thread():
            thread.join()


def _work(shared: _Shared[W, R], make_workspace: Callable[[], W], worker: _Worker[W]) -> None:
    """Do pieces until there are no more: what each thread runs."""
    workspace = _attempt(make_workspace)
    if isinstance(workspace, _Failure):
        shared.fail(workspace.error)
        return
    workspace.closed = shared.closed
    while (task := shared.next_piece(worker)) is not None:
        _do_piece(shared, workspace, worker, *task)
        del task  # nothing of a batch stays with a waiting thread


def _do_piece(
    shared: _Shared[W, R], workspace: W, worker: _Worker[W], number: int, job: Job[W, R], piece: Callable[[W], None]
) -> None:
    worker.workspace, worker.since, cpu_seconds = workspace, time.perf_counter(), time.thread_time()
    workspace.times = StageTimes()
    failure = _attempt(partial(piece, workspace))
    workspace.times.cpu_seconds = time.thread_time() - cpu_seconds
    shared.complete(number, job, failure.error if isinstance(failure, _Failure) else None, workspace.times, worker)
    worker.workspace, worker.since = None, time.perf_counter()


def _attempt(make: Callable[[], R]) -> R | _Failure:
    """Return what a function returns, or its failure."""
    try:
        return make()
    except BaseException as error:  # noqa: BLE001 - a thread's edge: it reaches the consumer
        return _Failure(error)
