"""Threads that make numbered jobs piece by piece, a few ahead of whoever takes the results, in order.

What holds, whatever happens:

- results come out in the order of their numbers; at most ``depth`` jobs are begun and not yet taken (back-pressure), or
  not yet released, where whoever takes them does so for somebody else;
- a job that fails raises in the consumer when its turn comes, after every result before it;
- :meth:`Stream.close`, the consumer dropping the stream, and its end all stop the threads: each of them finishes the
  piece it is at, or leaves it where it asks its workspace, and ends. They hold no reference to the stream itself.
- a process forked from this one has none of the threads: reading the stream there raises, and its end there is silent.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Generic, Protocol, TypeVar

from steadytrain.errors import FeedError

R = TypeVar("R")
W = TypeVar("W", bound="Workspace")


@dataclass(slots=True)
class Times:
    """What threads did: images made, encoded bytes read, busy seconds by stage, seconds blocked on a full queue.

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

    def __add__(self, other: Times) -> Times:
        return Times(*(getattr(self, count.name) + getattr(other, count.name) for count in fields(self)))

    def add(self, other: Times) -> None:
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
class Asked:
    """What whoever takes results has met: requests, those that found nothing ready, and how many were, in all."""

    results: int = 0
    starved: int = 0
    ready: int = 0

    def note(self, ready: int) -> None:
        """One more request, when so many results were ready."""
        self.results += 1
        self.ready += ready
        if not ready:
            self.starved += 1


class Workspace(Protocol):
    """What one thread has for itself: memory to work in, and what it did in the piece that it is at.

    ``closed`` is given to it: from then on nobody wants what it makes, and a piece may raise.
    """

    times: Times
    closed: threading.Event


@dataclass(slots=True, eq=False)
class Job(Generic[W, R]):
    """Something made in pieces, each by one thread, in any order; ``finish`` runs once after the last of them."""

    pieces: list[Callable[[W], None]]
    finish: Callable[[], R]
    left: int = field(init=False)
    error: BaseException | None = None

    def __post_init__(self) -> None:
        self.left = len(self.pieces)
        self.pieces.reverse()  # they are popped from the end


class Stream(Generic[W, R]):
    """An iterator over the results of jobs 0, 1, 2, ...; the threads start at once.

    Args:
        begin: makes job ``number``; called in order, under a lock: it must be quick.
        workspace: makes a thread's own workspace.
        total: number of jobs; None: without end.
        threads: how many.
        depth: jobs begun and not yet taken, at most.
        times: grows as pieces are done.
        each: the same for each thread.
        asked: grows as results are taken.
        holds: taking a result makes no room for another job: :meth:`release` does.
    """

    def __init__(
        self,
        begin: Callable[[int], Job[W, R]],
        workspace: Callable[[], W],
        *,
        total: int | None,
        threads: int,
        depth: int,
        times: Times,
        each: Sequence[Times] = (),
        asked: Asked | None = None,
        holds: bool = False,
    ) -> None:
        self.holds = holds
        self._shared = shared = _Shared(begin, total, depth, times, asked or Asked())
        self._workers: list[_Worker[W]] = [_Worker(each[i] if each else Times()) for i in range(threads)]
        self._threads = [
            threading.Thread(target=_work, args=(shared, workspace, worker), name=f"feed-{i}", daemon=True)
            for i, worker in enumerate(self._workers)
        ]
        weakref.finalize(shared, _join, self._threads)
        weakref.finalize(self, _end, shared, self._threads)  # at the interpreter's exit the later ones come first
        for thread in self._threads:
            thread.start()

    def __iter__(self) -> Iterator[R]:
        return self

    def __next__(self) -> R:
        if self._shared.is_foreign:
            raise FeedError("the feed was begun in the process that this one was forked from: iterate it anew here")
        try:
            return self._shared.next(0 if self.holds else 1)
        except BaseException:
            self.close()
            raise

    def release(self, count: int = 1) -> None:
        """Make room for as many jobs as results were taken while the stream ``holds``."""
        self._shared.release(count)

    def wake(self) -> None:
        """Let the threads use whatever room there is now, and not only when it is enough for a few jobs."""
        self._shared.wake()

    def fill(self) -> None:
        """Wait until ``depth`` results are ready, or all that there will be, so that the threads have nothing to do."""
        self._shared.wake()
        self._shared.fill()

    def stop_beginning(self) -> int:
        """Let no further job be begun: the stream ends with those that are. Returns how many there are in all."""
        return self._shared.stop_beginning()

    def doing(self) -> list[tuple[str, W | None, float]]:
        """Of each thread: its name, its workspace while it is at a piece, and since when (``time.perf_counter()``)."""
        pairs = zip(self._threads, self._workers, strict=False)
        return [(thread.name, worker.at, worker.since) for thread, worker in pairs if thread.is_alive()]

    def abandon(self, error: BaseException) -> None:
        """Raise an error in whoever waits for the next result, and never wait for the threads: one of them hangs."""
        self._threads.clear()  # the list that whatever would wait has as well
        self._shared.fail(_Failure(error))

    def close(self) -> None:
        """Stop the threads and wait until they have ended; closing twice is fine."""
        if self._shared.is_foreign:
            return
        self._shared.stop()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()


class _Worker(Generic[W]):
    """What is known of one thread: its times, its workspace while it is at a piece, and since when."""

    def __init__(self, times: Times) -> None:
        self.times = times
        self.at: W | None = None
        self.since = time.perf_counter()


class _Shared(Generic[W, R]):
    """What the consumer and the threads share; every field is guarded by ``lock``."""

    def __init__(
        self, begin: Callable[[int], Job[W, R]], total: int | None, depth: int, times: Times, asked: Asked
    ) -> None:
        self.asked = asked
        self.begin = begin
        self.total = total
        self.depth = depth
        self.times = times
        self.lock = threading.RLock()
        self.ready = threading.Condition(self.lock)  # the result whose turn it is
        self.room = threading.Condition(self.lock)  # something to do, or the end
        self.begun = 0
        self.taken = 0
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

    def next(self, release: int) -> R:
        """Wait for the next result, in order, and make room for so many more."""
        with self.lock:
            if self.taken != self.total:
                self.asked.note(len(self.done) if self.taken in self.done else 0)
            while self.taken not in self.done:
                if self.taken == self.total:
                    raise StopIteration
                if self.stopped:
                    raise FeedError("the feed was closed while it was read: iterate it again")
                self.ready.wait()
            result = self.done.pop(self.taken)
            self.taken += 1
            self.release(release)
        if isinstance(result, _Failure):
            raise result.error
        return result

    def release(self, count: int) -> None:
        """Make room for more jobs."""
        with self.lock:
            self.released += count
            # Waking a thread costs as much as a small batch: let there be room for a few.
            if count and self.begun - self.released <= self.depth // 2:
                self.room.notify_all()

    def wake(self) -> None:
        """Wake whoever waits for room."""
        with self.lock:
            self.room.notify_all()

    def fill(self) -> None:
        """Wait until all that has been begun, and all that there is room for, is ready."""
        with self.lock:
            while not self.stopped and len(self.done) < self._most() and not self._has_failed():
                self.ready.wait()

    def stop_beginning(self) -> int:
        """Begin nothing more, and say how many jobs that makes."""
        with self.lock:
            self.total = self.begun
            self.room.notify_all()
            return self.total

    def _has_failed(self) -> bool:
        return isinstance(self.done.get(self.taken), _Failure)

    def _most(self) -> int:
        """Results that can be ready before anything else is released."""
        end = self.released + self.depth
        return (end if self.total is None else min(end, self.total)) - self.taken

    def piece(self, worker: _Worker[W]) -> tuple[int, Job[W, R], Callable[[W], None]] | None:
        """The next thing to do; None when there is nothing more."""
        with self.lock:
            while not self.stopped:
                newest = self.job  # read once: stop() may run in this very thread, by the garbage collector
                if newest is not None:
                    number, job = newest
                    piece = job.pieces.pop()
                    if not job.pieces:
                        self.job = None
                    return number, job, piece
                if self.begun == self.total:
                    return None
                if self.begun - self.released < self.depth:
                    self._begin()
                    continue
                since = time.perf_counter()
                self.room.wait()
                blocked = time.perf_counter() - since
                self.times.blocked_seconds += blocked
                worker.times.blocked_seconds += blocked
            return None

    def complete(
        self, number: int, job: Job[W, R], error: BaseException | None, times: Times, worker: _Worker[W]
    ) -> None:
        """A piece of a job is done, or has failed; after the last one the result is made."""
        with self.lock:
            self.times.add(times)
            worker.times.add(times)
            job.error = job.error or error
            job.left -= 1
            if job.left:
                return
        result = _attempt(job.finish) if job.error is None else _Failure(job.error)
        with self.lock:
            if not self.stopped:
                self._put(number, result)

    def fail(self, failure: _Failure) -> None:
        """A thread could not even begin, or hangs: whoever waits for the next result is told."""
        with self.lock:
            if not self.stopped:
                self._put(self.taken, failure)

    def stop(self) -> None:
        """Let nothing more be begun, and drop what nobody has taken."""
        self.closed.set()
        with self.lock:
            self.stopped = True
            self.job = None
            self.done.clear()
            self.ready.notify_all()
            self.room.notify_all()

    def _begin(self) -> None:
        job = _attempt(lambda: self.begin(self.begun))
        if isinstance(job, _Failure):
            self._put(self.begun, job)
        else:
            self.job = self.begun, job
            if len(job.pieces) > 1:
                self.room.notify_all()
        self.begun += 1

    def _put(self, number: int, result: R | _Failure) -> None:
        self.done[number] = result
        if number == self.taken or len(self.done) >= self._most():
            self.ready.notify_all()


@dataclass(frozen=True, eq=False)
class _Failure:
    error: BaseException


def _attempt(make: Callable[[], R]) -> R | _Failure:
    try:
        return make()
    except BaseException as error:  # noqa: BLE001 - a thread's edge: it reaches the consumer
        return _Failure(error)


def _end(shared: _Shared[W, R], threads: list[threading.Thread]) -> None:
    """Tell the threads of a dropped stream to stop, in whatever thread the garbage collector runs."""
    if shared.is_foreign:
        return
    shared.stop()
    # Waiting for them here could hang, but at the interpreter's exit it must be done: a thread that comes back from
    # native code after that takes the process down with it.
    if not threading.main_thread().is_alive():
        _join(threads)


def _join(threads: list[threading.Thread]) -> None:
    """Wait for the threads that still run: at the interpreter's exit, of a stream that was dropped before it."""
    for thread in threads:
        if thread.is_alive() and thread is not threading.current_thread():
            thread.join()


def _work(shared: _Shared[W, R], workspace: Callable[[], W], worker: _Worker[W]) -> None:
    """What each thread does."""
    own = _attempt(workspace)
    if isinstance(own, _Failure):
        shared.fail(own)
        return
    own.closed = shared.closed
    while (task := shared.piece(worker)) is not None:
        number, job, piece = task
        worker.at, worker.since, cpu_seconds = own, time.perf_counter(), time.thread_time()
        own.times = Times()
        failure = _attempt(partial(piece, own))
        own.times.cpu_seconds = time.thread_time() - cpu_seconds
        shared.complete(number, job, failure.error if isinstance(failure, _Failure) else None, own.times, worker)
        worker.at, worker.since = None, time.perf_counter()
        del task, job, piece, failure  # nothing of a batch stays with a waiting thread
