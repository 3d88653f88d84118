"""Threads that make numbered jobs piece by piece, a few ahead of whoever takes the results, in order.

What holds, whatever happens:

- results come out in the order of their numbers; at most ``depth`` of them are begun and not yet taken (back-pressure),
  or not yet released, where whoever takes them does so for somebody else;
- a job that fails raises in the consumer when its turn comes, after every result before it;
- :meth:`Stream.close`, the consumer dropping the stream, and its end all stop the threads: each of them finishes the
  piece it is at, or leaves it where it asks its workspace, and ends. They hold no reference to the stream itself;
- from when a job has several results, the threads end, and whoever takes the results does the jobs: work so short takes
  turns with that anyway, by the interpreter's lock, and to hand the lock over costs more than the work.
- a process forked from this one has none of the threads: reading the stream there raises, and its end there is silent.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Generic

from steadytrain.data.loader.job import Failure, Job, R, W, attempt
from steadytrain.data.loader.times import Asked, Times
from steadytrain.errors import FeedError


class Stream(Generic[W, R]):
    """An iterator over results 0, 1, 2, ...; the threads start at once.

    Args:
        begin: makes the job of a result ``number``, which may have so many; called in order, under a lock: it must be
            quick.
        workspace: makes a thread's own workspace.
        total: number of results; None: without end.
        threads: how many.
        depth: results begun and not yet taken, at most, or as many as a job should have.
        together: how many that is now; quick as well, and asked no more when there are several: that stays.
        times: grows as pieces are done.
        each: the same for each thread.
        asked: grows as results are taken.
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
        times: Times,
        together: Callable[[], int] = lambda: 1,
        each: Sequence[Times] = (),
        asked: Asked | None = None,
        holds: bool = False,
    ) -> None:
        self.holds = holds
        self._shared = shared = _Shared(begin, together, total, depth, times, asked or Asked())
        self._workspace = workspace
        self._here: W | None = None  # of whoever takes the results
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
            while not self._shared.waited():
                self._work_here()
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
        while not self._shared.filled():
            self._work_here()

    @property
    def depth(self) -> int:
        """Results that may be begun and not yet taken."""
        return self._shared.depth

    @property
    def is_made_here(self) -> bool:
        """Whether jobs are done by whoever takes the results."""
        return self._shared.together() > 1

    def _work_here(self) -> None:
        """Do the next piece, as soon as there is room for it."""
        self._here = self._here or self._workspace()
        worker = _Worker[W](Times())
        if (task := self._shared.piece(worker, here=True)) is not None:
            _do(self._shared, self._here, worker, *task)

    def stop_beginning(self) -> int:
        """Let no further job be begun: the stream ends with those that are. Returns how many results that makes."""
        return self._shared.stop_beginning()

    def doing(self) -> list[tuple[str, W | None, float]]:
        """Of each thread: its name, its workspace while it is at a piece, and since when (``time.perf_counter()``)."""
        pairs = zip(self._threads, self._workers, strict=False)
        return [(thread.name, worker.at, worker.since) for thread, worker in pairs if thread.is_alive()]

    def abandon(self, error: BaseException) -> None:
        """Raise an error in whoever waits for the next result, and never wait for the threads: one of them hangs."""
        self._threads.clear()  # the list that whatever would wait has as well
        self._shared.fail(Failure(error))

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
        self,
        begin: Callable[[int, int], Job[W, R]],
        together: Callable[[], int],
        total: int | None,
        depth: int,
        times: Times,
        asked: Asked,
    ) -> None:
        self.asked = asked
        self.begin = begin
        self._ask, self._count = together, 1
        self.total = total
        self._depth = depth
        self.times = times
        self.lock = threading.RLock()
        self.ready = threading.Condition(self.lock)  # the result whose turn it is
        self.room = threading.Condition(self.lock)  # something to do, or the end
        self.begun = 0
        self.taken = 0
        self.noted = 0  # of those taken or asked for, as many as ``asked`` knows of
        self.released = 0  # of those taken, as many as make room for others
        self.job: tuple[int, Job[W, R]] | None = None  # the newest, while pieces of it are left
        self.done: dict[int, R | Failure] = {}
        self.fills_up = False  # until there is no room: what there is may be less than a job should have
        self.stopped = False
        self.closed = threading.Event()  # the same, for whoever does not want the lock
        self._process = os.getpid()

    @property
    def is_foreign(self) -> bool:
        """Whether this is a forked process: the threads stayed behind, and one of them may have held the lock."""
        return os.getpid() != self._process

    def together(self) -> int:
        """Results that a job should have now."""
        if self._count == 1:
            self._count = self._ask()
        return self._count

    @property
    def depth(self) -> int:
        """Results that may be begun and not yet taken."""
        return max(self._depth, self.together())

    def is_due_here(self, *, ahead: bool = False) -> bool:
        """Whether there is something to do for whoever takes the results: for the next one, or ``ahead`` of it."""
        if self.together() == 1:
            return False
        if self.job is None and self.begun != self.total:
            return self._room_for() > 0 if ahead else self.taken == self.begun
        return self.job is not None

    def waited(self) -> bool:
        """Wait for the next result, or the end; False: whoever takes it has to do something for it first."""
        with self.lock:
            while not self.stopped and self.taken != self.total:
                if self.is_due_here():
                    return False
                if self.noted == self.taken:
                    self.asked.note(len(self.done) if self.taken in self.done else 0)
                    self.noted += 1
                if self.taken in self.done:
                    break
                self.ready.wait()
            return True

    def next(self, release: int) -> R:
        """The next result, in order, when it was :meth:`waited` for; and make room for so many more."""
        with self.lock:
            if self.taken not in self.done:
                if self.taken == self.total:
                    raise StopIteration
                raise FeedError("the feed was closed while it was read: iterate it again")
            result = self.done.pop(self.taken)
            self.taken += 1
            self.release(release)
        if isinstance(result, Failure):
            raise result.error
        return result

    def release(self, count: int) -> None:
        """Make room for more results."""
        with self.lock:
            self.released += count
            # Waking a thread costs as much as a small batch: let there be room for a few.
            if count and self.begun - self.released <= self.depth // 2:
                self.room.notify_all()

    def wake(self) -> None:
        """Wake whoever waits for room."""
        with self.lock:
            self.fills_up = True
            self.room.notify_all()

    def filled(self) -> bool:
        """Wait until all that has been begun, and all that there is room for, is ready; False: as of :meth:`waited`."""
        with self.lock:
            while not self.stopped and len(self.done) < self._most() and not self._has_failed():
                if self.is_due_here(ahead=True):
                    return False
                self.ready.wait()
            return True

    def stop_beginning(self) -> int:
        """Begin nothing more, and say how many results that makes."""
        with self.lock:
            self.total = self.begun
            self.room.notify_all()
            return self.total

    def _has_failed(self) -> bool:
        return isinstance(self.done.get(self.taken), Failure)

    def _most(self) -> int:
        """Results that can be ready before anything else is released."""
        end = self.released + self.depth
        return (end if self.total is None else min(end, self.total)) - self.taken

    def piece(self, worker: _Worker[W], *, here: bool = False) -> tuple[int, Job[W, R], Callable[[W], None]] | None:
        """The next thing to do, for a thread or ``here``; None when there is nothing more."""
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
                if not here and self.together() > 1:
                    self.ready.notify_all()  # who waits has to go on alone
                    return None
                if count := self._room_for():
                    self._begin(count)
                    continue
                if here and not self.is_due_here():
                    return None  # a thread took what there was to do: room would come only from taking its result
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
        results = attempt(job.finish) if job.error is None else Failure(job.error)
        with self.lock:
            if self.stopped:
                return
            each: Sequence[R | Failure] = [results] if isinstance(results, Failure) else results
            for k, result in enumerate(each):
                self._put(number + k, result)

    def fail(self, failure: Failure) -> None:
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

    def _room_for(self) -> int:
        """How many results the next job may have; 0: there is no room for it."""
        room = self.depth - (self.begun - self.released)
        wanted = self.together()
        self.fills_up = self.fills_up and room > 0
        count = wanted if room >= wanted else room * self.fills_up
        return count if self.total is None else min(count, self.total - self.begun)

    def _begin(self, count: int) -> None:
        job = attempt(lambda: self.begin(self.begun, count))
        if isinstance(job, Failure):
            self._put(self.begun, job)
            self.begun += 1
            return
        self.job = self.begun, job
        if len(job.pieces) > 1:
            self.room.notify_all()
        self.begun += job.count

    def _put(self, number: int, result: R | Failure) -> None:
        self.done[number] = result
        if number == self.taken or len(self.done) >= self._most():
            self.ready.notify_all()


def _end(shared: _Shared[W, R], threads: list[threading.Thread]) -> None:
    """Tell the threads of a dropped stream to stop, in whatever thread the garbage collector runs."""
    if shared.is_foreign:
        return
    shared.stop()
    # It could hang here, but at the exit it must be done: a thread back from native code after it kills the process.
    if not threading.main_thread().is_alive():
        _join(threads)


def _join(threads: list[threading.Thread]) -> None:
    """Wait for the threads that still run: at the interpreter's exit, of a stream that was dropped before it."""
    for thread in threads:
        if thread.is_alive() and thread is not threading.current_thread():
            thread.join()


def _work(shared: _Shared[W, R], workspace: Callable[[], W], worker: _Worker[W]) -> None:
    """What each thread does."""
    own = attempt(workspace)
    if isinstance(own, Failure):
        shared.fail(own)
        return
    own.closed = shared.closed
    while (task := shared.piece(worker)) is not None:
        _do(shared, own, worker, *task)
        del task  # nothing of a batch stays with a waiting thread


def _do(
    shared: _Shared[W, R], own: W, worker: _Worker[W], number: int, job: Job[W, R], piece: Callable[[W], None]
) -> None:
    """A piece of a job."""
    worker.at, worker.since, cpu_seconds = own, time.perf_counter(), time.thread_time()
    own.times = Times()
    failure = attempt(partial(piece, own))
    own.times.cpu_seconds = time.thread_time() - cpu_seconds
    shared.complete(number, job, failure.error if isinstance(failure, Failure) else None, own.times, worker)
    worker.at, worker.since = None, time.perf_counter()
