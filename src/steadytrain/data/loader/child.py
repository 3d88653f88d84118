"""The process that a feed may have for its threads: started, talked to, and ended.

What holds, whatever happens: a child that dies is an error that says how; a child whose parent dies ends; ending it, or
dropping the last reference to it, ends it at once. Only the parent hears of Ctrl-C and of other signals.
"""

from __future__ import annotations

import math
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
import weakref
from collections import deque
from contextlib import suppress
from dataclasses import replace
from typing import Any

from steadytrain.data.loader.messages import BEGIN, ERROR, LENGTH, MOST_SLOTS, RELEASE, SPAN, WAKE, meaning
from steadytrain.data.loader.shared_memory import SPARE, Slots
from steadytrain.data.loader.task import Task
from steadytrain.data.loader.times import Times
from steadytrain.data.packing import worker_pool
from steadytrain.errors import FailedError, FeedError

# Whether a slot's memory is free is seen by the references to its arrays, which are exact with the interpreter's lock.
CAN_BE = os.name == "posix" and getattr(sys, "_is_gil_enabled", lambda: True)()
# Of small batches more are made ahead than is asked for: a note to the child costs the loop as much as a few of them.
DEEP, DEEP_BYTES = 32, 16 * 2**20

_MODULE = "steadytrain.data.loader.serve"
_WHY = {
    "SIGKILL": "somebody ended it, or the system did, as memory ran out",
    "SIGBUS": "a file was cut short while it was read, or its disk fails",
}


class Child:
    """A process that makes the batches of a task, for one iteration after the other.

    Args:
        task: ``start`` and ``stop`` are told anew for each iteration.
        pin: page-locked memory.
        times: what the child has done, kept up to date.

    Raises:
        FeedError: there is no memory to share, the source cannot be pickled, or no process can be started.
    """

    def __init__(self, task: Task, *, pin: bool, times: Times) -> None:
        if not CAN_BE or task.depth + SPARE > MOST_SLOTS:
            raise FeedError('place="process" needs Linux or macOS and a depth below 250: use "threads"')
        self.depth = max(task.depth, min(DEEP, DEEP_BYTES // math.prod(task.shape)))
        work = _pickled(replace(task, depth=self.depth))
        self.slots = Slots(task.shape, self.depth + SPARE)
        if pin:
            self.slots.pin()
        self.times = times
        self.is_steady, self.is_shared, self.kept_bytes = False, False, 0
        self._lent = deque[int]()  # slots that whoever iterates may still look at
        self._free = bytearray()  # those that he does not, of which the child has not been told
        self.heard = 0  # entries of the board that were taken
        self._made = 0  # those that are known to be there
        self._said, self._messages = bytearray(), deque[bytes]()
        self._has_started = False
        self._abandoned: BaseException | None = None
        self._hearing = threading.Lock()
        self._owner = os.getpid()
        self._process, self._notes, self._told = _start(self.slots.file)
        told = pickle.dumps((self.slots.file, self.slots.count), protocol=5) + work
        # In a thread: a pipe holds 64 kB, and the child reads it only when it has loaded what it needs.
        self._telling = threading.Thread(target=_tell, args=(self._notes, told), name="feed-start", daemon=True)
        self._end = weakref.finalize(
            self, _end, self._process, (self._notes, self._told), self._telling, self._hearing, self._owner
        )
        self._telling.start()

    @property
    def is_foreign(self) -> bool:
        """Whether this is a forked process, whose child it is not."""
        return os.getpid() != self._owner

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    @property
    def is_ready(self) -> bool:
        """Whether it has started, or failed to."""
        return self._has_started or bool(self._said or _has_more(self._told))

    def wait(self) -> None:
        """Until it has started. Raises what kept it from doing so."""
        if not self._has_started:
            error = self.message()
            if error is not None:
                raise error
            self._has_started = True

    @property
    def is_alive(self) -> bool:
        """Whether it has not been ended; one that has died by itself is found out when it is heard."""
        return self._end.alive

    @property
    def ready(self) -> int:
        """Entries of the board that were not taken yet."""
        return self.slots.board.made - self.heard

    def begin(self, start: int, stop: int | None) -> None:
        """Ask for the batches from a position on."""
        self._say(self._returned() + bytes([BEGIN]) + SPAN.pack(start, -1 if stop is None else stop))

    def note(self, released: int, *, wake: bool = False) -> None:
        """Tell it of slots whose memory is free again, of batches that make room for others, and to use all room."""
        self._say(self._returned() + bytes([RELEASE]) * released + bytes([WAKE]) * wake)

    def lends(self, slot: int) -> bool:
        """Whether the arrays of a slot may be handed out; if not, as too many are kept, it is free again at once."""
        if len(self._lent) >= SPARE:
            self._sweep()
        lends = len(self._lent) < SPARE
        (self._lent if lends else self._free).append(slot)
        return lends

    def _returned(self) -> bytes:
        self._sweep()
        free = bytes(self._free)
        self._free.clear()
        return free

    def _sweep(self) -> None:
        """Find the slots that nobody looks at any more."""
        for _ in range(len(self._lent)):
            slot = self._lent.popleft()
            (self._free if self.slots.is_free(slot) else self._lent).append(slot)

    def take(self) -> int:
        """The next entry of the board, waited for. Raises as :meth:`wait_for` does."""
        if self.heard == self._made:
            self.wait_for(self.heard + 1)
        self.heard += 1
        return self.slots.board[self.heard - 1]

    def wait_for(self, count: int) -> None:
        """Wait until there have been so many entries, or the newest is an error.

        Holds no lock meanwhile that anyone but :meth:`end` would want.

        Raises:
            FeedError: it has died, or was ended.
        """
        board = self.slots.board
        while (made := board.made) < count and not (made and meaning(board[made - 1])[0] == ERROR):
            self._hear(wait=board.ask(made))
        self._made = made
        self.is_steady, self.is_shared, self.kept_bytes = board.did(self.times)

    def message(self) -> Any:
        """The next one, waited for. Raises as :meth:`wait_for` does."""
        while not self._messages:
            self._hear()
        return pickle.loads(self._messages.popleft())  # from our own child

    def end(self) -> None:
        """Kill it and wait for that; ending twice is fine."""
        self._end()

    def abandon(self, error: BaseException) -> None:
        """Kill it, and raise this error in whoever waits for it."""
        self._abandoned = error
        self.end()

    def _say(self, notes: bytes) -> None:
        with suppress(BrokenPipeError):  # one that has died is found out when it is heard
            os.write(self._notes, notes)

    def _hear(self, *, wait: bool = True) -> None:
        """Take in what is in the pipe, or will be; empty messages have done what they are for."""
        with self._hearing:
            if not self._end.alive:
                raise self._closed()
            if not wait and not _has_more(self._told):
                return
            said = os.read(self._told, 65536)
        if not said:
            raise self._died()
        self._said += said
        while len(self._said) >= LENGTH.size:
            end = LENGTH.size + LENGTH.unpack_from(self._said)[0]
            if len(self._said) < end:
                break
            if end > LENGTH.size:
                self._messages.append(bytes(self._said[LENGTH.size : end]))
            del self._said[:end]

    def _closed(self) -> BaseException:
        return self._abandoned or FeedError("the feed was closed while it was read: iterate it again")

    def _died(self) -> BaseException:
        if not self._end.alive:
            return self._closed()
        code = self._process.wait()
        self.end()
        if code >= 0:
            return FeedError(f"the feed's process ended with exit code {code} (see above): use the feed's threads")
        name = signal.Signals(-code).name
        why = _WHY.get(name, "a decoder crashed")
        return FeedError(f"the feed's process was ended by {name} ({why}): start again; what was saved is intact")


def _start(file: int) -> tuple[subprocess.Popen[bytes], int, int]:
    """The process, our end of the pipe to it, and of the one from it."""
    its_notes, notes = os.pipe()
    told, its_told = os.pipe()
    try:
        process = worker_pool.start(_MODULE, stdin=its_notes, stdout=its_told, inherits=(file,))
    except FailedError as error:
        for end in (notes, told):
            os.close(end)
        raise FeedError(f"{error}: use the feed's threads") from error
    finally:
        for end in (its_notes, its_told):
            os.close(end)
    return process, notes, told


def _has_more(pipe: int) -> bool:
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    return bool(poll.poll(0))


def _pickled(task: Task) -> bytes:
    try:
        return pickle.dumps(task, protocol=5)
    except Exception as error:
        told = f"{type(task.source).__name__} cannot be pickled ({error})"
        raise FeedError(f"{told}, and another process needs a source that can: use the feed's threads") from error


def _tell(notes: int, told: bytes) -> None:
    with suppress(OSError):  # one that has ended already is found out when it is read from
        while told:
            told = told[os.write(notes, told) :]


def _end(
    process: subprocess.Popen[bytes],
    pipes: tuple[int, int],
    telling: threading.Thread,
    hearing: threading.Lock,
    owner: int,
) -> None:
    """Kill a process, wait for it, and close its pipes, in whatever thread the garbage collector runs."""
    if os.getpid() != owner:
        return
    process.kill()
    process.wait()
    telling.join()
    with hearing:  # whoever listens has met the end by now
        for end in pipes:
            os.close(end)
