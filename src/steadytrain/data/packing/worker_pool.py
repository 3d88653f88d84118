"""Work in child processes: results in order, and whatever ends a child costs one item, not the work.

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
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from steadytrain.errors import FailedError

_AHEAD = 3  # portions in flight for each child
_READY = b"ready"

# One thread each: the children themselves are the parallelism.
_THREADS = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
# glibc would map each photograph's pixels anew and give them back: of a child's time a quarter went to page faults.
_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(128 << 20)}
_START = """
import sys
sys.path[:] = {path!r}
from steadytrain.data.packing.worker_pool import {what}
{what}({module!r})
"""

Item = TypeVar("Item")
Answer = TypeVar("Answer")


def do_all(
    portions: Iterable[Sequence[Item]],
    do: Callable[[Sequence[Item]], Answer],
    died: Callable[[Item, str], Answer],
    *,
    workers: int,
) -> Generator[Answer]:
    """Answers to portions of work, in order.

    A child that dies is replaced. Its portion is done again an item at a time, each with an answer of its own, and an
    item on which two children have died is answered by ``died``. Close the iterator to end it early: no child and no
    thread outlives it.

    Args:
        portions: taken as they are needed, a few ahead of the answers.
        do: a function that pickle can find by its name, or a ``functools.partial`` of one; called in the children.
        died: the answer for an item on which a child died, and how that ended (``SIGSEGV``); called here, on a thread.
        workers: children; 0 does everything here, where a crash is a crash.

    Raises:
        FailedError: no child could be started.
    """
    if workers == 0:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's, about strangers' files
            yield from (do(portion) for portion in portions)
        return
    pool = _Pool(do, died, workers)
    waiting: deque[Future[list[Answer]]] = deque()
    try:
        for portion in portions:
            waiting.append(pool.submit(portion))
            if len(waiting) >= workers * _AHEAD:
                yield from waiting.popleft().result()
        while waiting:
            yield from waiting.popleft().result()
    finally:
        pool.close()


def start(
    module: str, *, stdin: int | None = None, stdout: int | None = None, inherits: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """A child that loads ``module`` at once and runs its ``main()``; it hears no Ctrl-C.

    Args:
        module: by its name.
        stdin, stdout: the child's ends of pipes; what it prints is to go to standard error.
        inherits: other files that are open in the child, under the same numbers.

    Raises:
        FailedError: no process can be started.
    """
    return _start("run", module, stdin, stdout, inherits)


def _start(
    what: str, module: str, stdin: int | None, stdout: int | None, inherits: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    variables = {**_MEMORY, **os.environ, **_THREADS}
    command = [sys.executable, "-c", _START.format(path=sys.path, module=module, what=what)]
    try:
        with _deaf():
            return subprocess.Popen(command, stdin=stdin, stdout=stdout, env=variables, pass_fds=inherits)
    except OSError as error:
        raise FailedError(f"cannot start {sys.executable} ({error.strerror})") from error


class _Pool(Generic[Item, Answer]):
    """Children, and a thread for each that carries portions to it and answers back."""

    def __init__(
        self, do: Callable[[Sequence[Item]], Answer], died: Callable[[Item, str], Answer], workers: int
    ) -> None:
        self._what = pickle.dumps(do, protocol=5)
        self._module = getattr(do, "func", do).__module__
        self._died = died
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

    def submit(self, portion: Sequence[Item]) -> Future[list[Answer]]:
        return self._threads.submit(self._do, portion)

    def close(self) -> None:
        self._closed = True
        for child in tuple(self._children):
            child.kill()
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._end_all()

    def _end_all(self) -> None:
        for child in tuple(self._children):
            child.end()

    def _start(self) -> _Child:
        child = _Child(self._module)
        self._children.add(child)
        child.tell(self._what)
        return child

    def _do(self, portion: Sequence[Item], *, again: bool = True) -> list[Answer]:
        child = self._idle.get()
        try:
            if not child.lives and not self._closed:  # it ended while it had nothing to do
                child.end()
                self._children.discard(child)
                child = self._start()
            return [child.ask(portion)]
        except (EOFError, OSError, pickle.UnpicklingError):
            if self._closed:
                raise
            code = child.end()
            self._children.discard(child)
            child = self._start()
            if not again:
                return [self._died(portion[0], _ending(code))]
        finally:
            self._idle.put(child)
        # One of several killed it: take them one at a time, in the same order. A single one gets a second chance: the
        # system ends processes too, where memory runs out, and that is no fault of the item.
        return [answer for item in portion for answer in self._do((item,), again=len(portion) > 1)]


class _Child:
    """One child process, which loads ``module`` at once; ``tell`` gives it its work, then ``ask`` is a call to it."""

    def __init__(self, module: str) -> None:
        try:
            self._process = _start("serve", module, subprocess.PIPE, subprocess.PIPE)
        except FailedError as error:
            raise FailedError(f"{error}: give --workers 1") from error
        assert self._process.stdin is not None and self._process.stdout is not None
        self._to, self._from = self._process.stdin, self._process.stdout
        self._is_ready = False

    def tell(self, what: bytes) -> None:
        """Hand over the function, pickled."""
        with suppress(OSError):  # one that has ended already is found out when it is asked
            self._to.write(what)
            self._to.flush()

    def ask(self, portion: Sequence[Any]) -> Any:
        if not self._is_ready:  # waited for only now, so that children start side by side
            self._require_ready()
        pickle.dump(portion, self._to, protocol=5)
        self._to.flush()
        return pickle.load(self._from)  # from our own child

    def _require_ready(self) -> None:
        if self._from.read(len(_READY)) != _READY:
            raise FailedError(f"a child of {sys.executable} ended before it began (see above): give --workers 1")
        self._is_ready = True

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


@contextmanager
def _deaf() -> Iterator[None]:
    """Children that are started meanwhile hear no Ctrl-C, not even as they begin: the parent does, and ends them."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def serve(module: str) -> None:
    """The life of a child: a function, then portions, come by standard input, answers go by standard output.

    Args:
        module: that of the function, loaded at once.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears of Ctrl-C, and ends its children
    warnings.simplefilter("ignore")
    portions = sys.stdin.buffer
    with suppress(EOFError, BrokenPipeError), os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)  # what a library prints must not get among the answers
        _load(module)
        do = pickle.load(portions)
        answers.write(_READY)
        answers.flush()
        while True:
            answer = do(pickle.load(portions))
            pickle.dump(answer, answers, protocol=5)
            answers.flush()


def run(module: str) -> None:
    """The life of a child of :func:`start`."""
    # The parent hears of these, and ends its children: a job that is asked to end needs its batches until it has saved.
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    warnings.simplefilter("ignore")
    importlib.import_module(module).main()


def _load(module: str) -> None:
    """Import a module without what its package's own file would import: all public names, half of a child's start."""
    package = module.rpartition(".")[0]
    found = importlib.util.find_spec(package) if package and package not in sys.modules else None
    if found is not None:
        bare = types.ModuleType(package)
        bare.__path__ = list(found.submodule_search_locations or ())
        sys.modules[package] = bare
    importlib.import_module(module)
