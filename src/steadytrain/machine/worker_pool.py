"""Run work in child processes: results in order, and whatever ends a child costs one item, not the work.

Strangers' files are decoded in children: a decoder's crash then costs one file. Plain children with pipes, not
``multiprocessing``: that would run the caller's main module again in every child (a script without a guard, a notebook)
or fork a process that has threads.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, TypeVar

from steadytrain.errors import FailedError, SteadyError
from steadytrain.machine.children import ending, start_module

_PORTIONS_IN_FLIGHT = 3  # portions that each child has or waits for
_READY = b"ready"

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
        SteadyError: what the function raised.
    """
    if workers == 0:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's, about strangers' files
            yield from (function(portion) for portion in portions)
        return
    children: list[_Child] = []
    idle: SimpleQueue[_Child] = SimpleQueue()
    is_closed = False

    def run(portion: Sequence[Item], *, again: bool = True) -> list[Result]:
        """Have a child do a portion; a thread for each child waits here."""
        child = idle.get()
        try:
            if child.process.poll() is not None and not is_closed:  # it ended while it had nothing to do
                child.end()
                child.start()
            result = child.call(portion)
            if isinstance(result, SteadyError):
                raise result
            return [result]
        except (EOFError, OSError, pickle.UnpicklingError):
            if is_closed:
                raise
            ending = child.end()
            child.start()
            if not again:
                return [on_crash(portion[0], ending)]
        finally:
            idle.put(child)
        # One of several killed it: take them one at a time, in the same order. A single one gets a second chance: the
        # system ends processes too, where memory runs out, and that is no fault of the item.
        return [result for item in portion for result in run((item,), again=len(portion) > 1)]

    threads = ThreadPoolExecutor(workers, thread_name_prefix="children")
    waiting: deque[Future[list[Result]]] = deque()
    try:
        for _ in range(workers):
            children.append(_Child(pickle.dumps(function, protocol=5)))
            idle.put(children[-1])
        for portion in portions:
            waiting.append(threads.submit(run, portion))
            if len(waiting) >= workers * _PORTIONS_IN_FLIGHT:
                yield from waiting.popleft().result()
        while waiting:
            yield from waiting.popleft().result()
    finally:
        is_closed = True
        for child in children:
            child.process.kill()
        threads.shutdown(wait=True, cancel_futures=True)
        for child in children:
            child.end()


class _Child:
    """A child process that applies one pickled function to portions; started anew where it has died."""

    def __init__(self, function: bytes) -> None:
        self._function = function
        self.start()

    def start(self) -> None:
        try:
            self.process = start_module(__name__, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        except FailedError as error:
            raise FailedError(f"{error}: give --workers 1") from error
        assert self.process.stdin is not None and self.process.stdout is not None
        self._input, self._output = self.process.stdin, self.process.stdout
        self._is_ready = False
        with suppress(OSError):  # one that has ended already is found out when it is called
            self._input.write(self._function)
            self._input.flush()

    def call(self, portion: Sequence[Any]) -> Any:
        if not self._is_ready:  # waited for only now, so that children start side by side
            if self._output.read(len(_READY)) != _READY:
                raise FailedError(f"a child of {sys.executable} ended before it began (see above): give --workers 1")
            self._is_ready = True
        pickle.dump(portion, self._input, protocol=5)
        self._input.flush()
        return pickle.load(self._output)  # from our own child

    def end(self) -> str:
        """Kill it if it still lives, and let go of its pipes; return how it ended: ``SIGSEGV``, ``exit code 1``."""
        self.process.kill()
        for pipe in (self._input, self._output):
            with suppress(OSError):
                pipe.close()
        return ending(self.process.wait())


def main() -> None:
    """Run a child of :func:`map_in_children`: read a function, then portions, and write their results."""
    portions = sys.stdin.buffer
    with suppress(EOFError, BrokenPipeError), os.fdopen(os.dup(1), "wb") as results:
        os.dup2(2, 1)  # what a library prints must not get among the results
        function = pickle.load(portions)
        results.write(_READY)
        results.flush()
        while True:
            portion = pickle.load(portions)
            try:
                result: Any = function(portion)
            except SteadyError as error:  # no fault of an item, and no crash: the parent raises it
                result = error
            pickle.dump(result, results, protocol=5)
            results.flush()
