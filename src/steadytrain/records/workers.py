"""Encoding in child processes, results in order.

Plain children with pipes, not ``multiprocessing``: that would run the caller's main module again in every child (a
script without a guard, a notebook) or fork a process that has threads. A child costs about 0.2 s to start; on small
images, where Python's own lock ends what threads can give, two are 1.9 times as fast as one thread, and two threads
slower than one. Whatever the number of children, results come in the order of the tasks.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import warnings
from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from steadytrain.errors import FailedError
from steadytrain.records.encode import Packed, Settings, pack_file
from steadytrain.records.pieces import Piece
from steadytrain.records.stats import Counts, PixelCount

_AHEAD = 3  # tasks in flight for each child
_READY = b"ready"

# One thread each: the children themselves are the parallelism.
_THREADS = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
# glibc would map each photograph's pixels anew and give them back: of a child's time a quarter went to page faults.
_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(128 << 20)}
# The package's own file would load listings, cards and readers too, half of a child's start: its place is enough.
_START = """
import sys, types
sys.path[:] = {path!r}
package = types.ModuleType("steadytrain.records")
package.__path__ = [{package!r}]
sys.modules.setdefault(package.__name__, package)
from steadytrain.records.workers import serve
serve()
"""


@dataclass(frozen=True, slots=True)
class Task:
    """Images to be encoded, files or pieces of files, and for each whether its pixels are counted."""

    places: tuple[str | Piece, ...]
    counted: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Done:
    """For each file of a task what to store, or why not; and the counts of the pixels to be counted."""

    results: tuple[Packed | str, ...]
    counts: Counts


def encode(task: Task, settings: Settings) -> Done:
    """Do one task, here."""
    count = PixelCount()
    pairs = zip(task.places, task.counted, strict=True)
    results = tuple(pack_file(place, settings, count if counted else None) for place, counted in pairs)
    return Done(results, count.totals())


def encode_all(tasks: Iterable[Task], settings: Settings, *, workers: int) -> Generator[Done]:
    """Do tasks in order, in this process (``workers`` 0 or 1) or in that many children.

    A child that dies on a file (a decoder's crash) is replaced; a file on which two have died is given up, with the
    reason. Close the iterator to end it early: no child and no thread outlives it.

    Raises:
        FailedError: no child could be started.
    """
    if workers <= 1:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's, about strangers' files
            yield from (encode(task, settings) for task in tasks)
        return
    pool = _Pool(settings, workers)
    waiting: deque[Future[Done]] = deque()
    try:
        for task in tasks:
            waiting.append(pool.submit(task))
            if len(waiting) >= workers * _AHEAD:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.close()


class _Pool:
    """Children, and a thread for each that carries tasks to it and results back."""

    def __init__(self, settings: Settings, workers: int) -> None:
        self._settings = settings
        self._idle: SimpleQueue[_Child] = SimpleQueue()
        self._children: set[_Child] = set()
        self._closed = False
        for _ in range(workers):
            self._idle.put(self._start())
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="pack")

    def submit(self, task: Task) -> Future[Done]:
        return self._threads.submit(self._do, task)

    def close(self) -> None:
        self._closed = True
        for child in tuple(self._children):
            child.kill()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for child in tuple(self._children):
            child.end()

    def _start(self) -> _Child:
        child = _Child(self._settings)
        self._children.add(child)
        return child

    def _do(self, task: Task, *, again: bool = True) -> Done:
        child = self._idle.get()
        try:
            if not child.lives and not self._closed:  # it ended while it had nothing to do
                child.end()
                self._children.discard(child)
                child = self._start()
            return child.ask(task)
        except (EOFError, OSError, pickle.UnpicklingError):
            if self._closed:
                raise
            code = child.end()
            self._children.discard(child)
            child = self._start()
            if not again:
                return Done((f"the decoder died of it ({_ending(code)})",), PixelCount().totals())
        finally:
            self._idle.put(child)
        # One of several files killed it: take them one at a time, in the same order. A single one gets a second chance:
        # the system ends processes too, where memory runs out, and that is no fault of the file.
        alone = [Task((p,), (c,)) for p, c in zip(task.places, task.counted, strict=True)]
        parts = [self._do(one, again=len(alone) > 1) for one in alone]
        return Done(tuple(part.results[0] for part in parts), sum((p.counts for p in parts), PixelCount().totals()))


class _Child:
    """One child process; ``ask`` is a call to it."""

    def __init__(self, settings: Settings) -> None:
        variables = {**_MEMORY, **os.environ, **_THREADS}
        command = [sys.executable, "-c", _START.format(path=sys.path, package=str(Path(__file__).parent))]
        try:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=variables)
        except OSError as error:
            raise FailedError(f"cannot start {sys.executable} ({error.strerror}): give --workers 1") from error
        assert self._process.stdin is not None and self._process.stdout is not None
        self._to, self._from = self._process.stdin, self._process.stdout
        self._settings: Settings | None = settings

    def ask(self, task: Task) -> Done:
        if self._settings is not None:  # with the first task, so that children start side by side
            self._meet(self._settings)
            self._settings = None
        pickle.dump(task, self._to, protocol=5)
        self._to.flush()
        done: Done = pickle.load(self._from)  # from our own child
        return done

    def _meet(self, settings: Settings) -> None:
        if self._from.read(len(_READY)) != _READY:
            raise FailedError(f"a child of {sys.executable} ended before it began (see above): give --workers 1")
        pickle.dump(settings, self._to, protocol=5)

    @property
    def lives(self) -> bool:
        """Whether its process has not ended."""
        return self._process.poll() is None

    def kill(self) -> None:
        self._process.kill()

    def end(self) -> int:
        """Kill it if it still lives, and let go of its pipes; returns the exit code."""
        self._process.kill()
        for pipe in (self._to, self._from):
            with suppress(OSError):
                pipe.close()
        return self._process.wait()


def _ending(code: int) -> str:
    with suppress(ValueError):
        return signal.Signals(-code).name
    return f"exit code {code}"


def serve() -> None:
    """The life of a child: settings, then tasks, come by standard input, results go by standard output."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears of Ctrl-C, and ends its children
    warnings.simplefilter("ignore")
    tasks = sys.stdin.buffer
    with suppress(EOFError, BrokenPipeError), os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)  # what a library prints must not get among the answers
        answers.write(_READY)
        answers.flush()
        settings = pickle.load(tasks)
        while True:
            done = encode(pickle.load(tasks), settings)
            pickle.dump(done, answers, protocol=5)
            answers.flush()
