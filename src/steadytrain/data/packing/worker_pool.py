"""Run work in child processes: results in order, and whatever ends a child costs one item, not the work.

Strangers' files are decoded in children: a decoder's crash then costs one file. Plain children with pipes, not
``multiprocessing``: that would run the caller's main module again in every child (a script without a guard, a notebook)
or fork a process that has threads.
"""

from __future__ import annotations

import importlib.util
import os
import pickle
import signal
import subprocess
import sys
import types
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from steadytrain.errors import FailedError

_PORTIONS_IN_FLIGHT = 3  # for each child
_READY = b"ready"

# One thread each: the children themselves are the parallelism.
_THREADS = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
# glibc would map each photograph's pixels anew and give them back: of a child's time a quarter went to page faults.
_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(128 << 20)}

Item = TypeVar("Item")
Result = TypeVar("Result")


def map_in_children(
    portions: Iterable[Sequence[Item]],
    function: Callable[[Sequence[Item]], Result],
    on_crash: Callable[[Item, str], Result],
    *,
    workers: int,
) -> Generator[Result]:
    """Apply a function to portions of work in child processes; yield the results in order.

    A child that dies is replaced. Its portion is done again an item at a time, each with a result of its own, and an
    item on which two children have died gets the result of ``on_crash``. Close the iterator to end it early: no child
    and no thread outlives it.

    Args:
        portions: taken as they are needed, a few ahead of the results.
        function: one that pickle can find by its name, or a ``functools.partial`` of one; called in the children.
        on_crash: takes an item on which a child died, and how that ended (``SIGSEGV``); called here, on a thread.
        workers: children; 0 does everything here, where a crash is a crash.

    Raises:
        FailedError: no child could be started.
    """
    if workers == 0:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's, about strangers' files
            yield from (function(portion) for portion in portions)
        return
    pool = _Pool(function, on_crash, workers)
    waiting: deque[Future[list[Result]]] = deque()
    try:
        for portion in portions:
            waiting.append(pool.submit(portion))
            if len(waiting) >= workers * _PORTIONS_IN_FLIGHT:
                yield from waiting.popleft().result()
        while waiting:
            yield from waiting.popleft().result()
    finally:
        pool.close()


def start_child(
    module: str,
    *,
    entry: str = "run",
    stdin: int | None = None,
    stdout: int | None = None,
    inherits: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """Start a child that loads ``module`` at once and runs its ``main()``; it hears no Ctrl-C.

    Args:
        module: by its name.
        entry: the function of this module that is the child's life: ``run``, or ``serve`` for the children of a pool.
        stdin, stdout: the child's ends of pipes; what it prints is to go to standard error.
        inherits: other files that are open in the child, under the same numbers.

    Raises:
        FailedError: no process can be started.
    """
    program = (
        f"import sys\nsys.path[:] = {sys.path!r}\n"
        f"from steadytrain.data.packing.worker_pool import {entry}\n{entry}({module!r})\n"
    )
    command, variables = [sys.executable, "-c", program], {**_MEMORY, **os.environ, **_THREADS}
    # The child hears no Ctrl-C, not even as it begins: the parent does, and ends it.
    can_block = hasattr(signal, "pthread_sigmask")  # not under Windows
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT]) if can_block else set()
    try:
        return subprocess.Popen(command, stdin=stdin, stdout=stdout, env=variables, pass_fds=inherits)
    except OSError as error:
        raise FailedError(f"cannot start {sys.executable} ({error.strerror})") from error
    finally:
        if can_block:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Pool(Generic[Item, Result]):
    """Children, and a thread for each that carries portions to it and results back."""

    def __init__(
        self, function: Callable[[Sequence[Item]], Result], on_crash: Callable[[Item, str], Result], workers: int
    ) -> None:
        self._function = pickle.dumps(function, protocol=5)
        self._module = getattr(function, "func", function).__module__
        self._on_crash = on_crash
        self._idle: SimpleQueue[_Child] = SimpleQueue()
        self._children: set[_Child] = set()
        self._closed = False
        try:
            for _ in range(workers):
                self._idle.put(self._start())
        except BaseException:
            self._end_all()
            raise
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="children")

    def submit(self, portion: Sequence[Item]) -> Future[list[Result]]:
        return self._threads.submit(self._run, portion)

    def close(self) -> None:
        self._closed = True
        for child in tuple(self._children):
            child.process.kill()
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._end_all()

    def _end_all(self) -> None:
        for child in tuple(self._children):
            child.end()

    def _start(self) -> _Child:
        child = _Child(self._module, self._function)
        self._children.add(child)
        return child

    def _replace(self, child: _Child) -> tuple[_Child, int]:
        """End a child; return another one and the exit code of the first."""
        code = child.end()
        self._children.discard(child)
        return self._start(), code

    def _run(self, portion: Sequence[Item], *, again: bool = True) -> list[Result]:
        child = self._idle.get()
        try:
            if child.process.poll() is not None and not self._closed:  # it ended while it had nothing to do
                child, _ = self._replace(child)
            return [child.call(portion)]
        except (EOFError, OSError, pickle.UnpicklingError):
            if self._closed:
                raise
            child, code = self._replace(child)
            if not again:
                ending = f"exit code {code}"
                with suppress(ValueError):
                    ending = signal.Signals(-code).name
                return [self._on_crash(portion[0], ending)]
        finally:
            self._idle.put(child)
        # One of several killed it: take them one at a time, in the same order. A single one gets a second chance: the
        # system ends processes too, where memory runs out, and that is no fault of the item.
        return [result for item in portion for result in self._run((item,), again=len(portion) > 1)]


class _Child:
    """A child process that loads ``module`` at once and applies one pickled function to portions."""

    def __init__(self, module: str, function: bytes) -> None:
        try:
            self.process = start_child(module, entry="serve", stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        except FailedError as error:
            raise FailedError(f"{error}: give --workers 1") from error
        assert self.process.stdin is not None and self.process.stdout is not None
        self._input, self._output = self.process.stdin, self.process.stdout
        self._is_ready = False
        with suppress(OSError):  # one that has ended already is found out when it is called
            self._input.write(function)
            self._input.flush()

    def call(self, portion: Sequence[Any]) -> Any:
        if not self._is_ready:  # waited for only now, so that children start side by side
            if self._output.read(len(_READY)) != _READY:
                raise FailedError(f"a child of {sys.executable} ended before it began (see above): give --workers 1")
            self._is_ready = True
        pickle.dump(portion, self._input, protocol=5)
        self._input.flush()
        return pickle.load(self._output)  # from our own child

    def end(self) -> int:
        """Kill it if it still lives, and let go of its pipes; return the exit code."""
        self.process.kill()
        for pipe in (self._input, self._output):
            with suppress(OSError):
                pipe.close()
        return self.process.wait()


def serve(module: str) -> None:
    """Live as a child of a pool: a function, then portions, come by standard input, results go by standard output.

    Args:
        module: that of the function, loaded at once.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears of Ctrl-C, and ends its children
    warnings.simplefilter("ignore")
    portions = sys.stdin.buffer
    with suppress(EOFError, BrokenPipeError), os.fdopen(os.dup(1), "wb") as results:
        os.dup2(2, 1)  # what a library prints must not get among the results
        # The module without what its package's own file would import: all public names, half of a child's start.
        package = module.rpartition(".")[0]
        spec = importlib.util.find_spec(package) if package and package not in sys.modules else None
        if spec is not None:
            bare = types.ModuleType(package)
            bare.__path__ = list(spec.submodule_search_locations or ())
            sys.modules[package] = bare
        importlib.import_module(module)
        function = pickle.load(portions)
        results.write(_READY)
        results.flush()
        while True:
            pickle.dump(function(pickle.load(portions)), results, protocol=5)
            results.flush()


def run(module: str) -> None:
    """Live as a child of :func:`start_child`."""
    # The parent hears of these, and ends its children: a job that is asked to end needs its batches until it has saved.
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    warnings.simplefilter("ignore")
    importlib.import_module(module).main()
