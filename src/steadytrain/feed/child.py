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
import threading
import weakref
from collections import deque
from contextlib import suppress
from dataclasses import replace

from steadytrain import children
from steadytrain.errors import FailedError, FeedError
from steadytrain.feed.shared import SPARE, Slots
from steadytrain.feed.stream import Times
from steadytrain.feed.task import Task
from steadytrain.feed.tickets import BEGIN, ERROR, MOST_SLOTS, RELEASE, SPAN, TICKET, WAKE, Ticket

CAN_BE = os.name == "posix"
# Of small batches more are made ahead than is asked for: each time that the two wake each other costs as much as one.
DEEP, DEEP_BYTES = 16, 16 * 2**20

_MODULE = "steadytrain.feed.serve"


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
        self.returned: deque[int] = deque()  # slots whose last view is gone, of which the child has not been told
        self.lent = 0  # slots that have views, or had when it was last told
        self._said = bytearray()
        self._has_started = False
        self._hearing = threading.Lock()
        self._owner = os.getpid()
        self._process, self._notes, self._tickets = _start(self.slots.file)
        told = pickle.dumps((self.slots.file, self.slots.count), protocol=5) + work
        # In a thread: a pipe holds 64 kB, and the child reads it only when it has loaded what it needs.
        self._telling = threading.Thread(target=_tell, args=(self._notes, told), name="feed-start", daemon=True)
        self._end = weakref.finalize(
            self, _end, self._process, (self._notes, self._tickets), self._telling, self._hearing, self._owner
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
        return bool(self._said or select.select([self._tickets], [], [], 0)[0])

    def wait(self) -> None:
        """Until it has started. Raises what kept it from doing so."""
        if not self._has_started:
            ((ticket, more),) = self.tickets()
            if ticket.kind == ERROR:
                raise pickle.loads(more)  # from our own child
            self._has_started = True

    def begin(self, start: int, stop: int | None) -> None:
        """Ask for the batches from a position on."""
        self._say(self._returned() + bytes([BEGIN]) + SPAN.pack(start, -1 if stop is None else stop))

    def note(self, released: int, *, wake: bool = False) -> None:
        """Tell it of slots whose memory is free again, of batches that make room for others, and to use all room."""
        self._say(self._returned() + bytes([RELEASE]) * released + bytes([WAKE]) * wake)

    def _returned(self) -> bytes:
        returned = bytes([self.returned.popleft() for _ in range(len(self.returned))])
        self.lent -= len(returned)
        return returned

    def tickets(self) -> list[tuple[Ticket, bytes]]:
        """Those that are there, at least one, each with what follows it.

        Waits for the first, holding no lock that anyone but :meth:`end` would want.

        Raises:
            FeedError: it has died, or was ended.
        """
        found: list[tuple[Ticket, bytes]] = []
        while not found:
            self._hear()
            while (one := self._next()) is not None:
                found.append(one)
        ticket, times = found[-1][0], self.times
        self.is_steady, self.is_shared, self.kept_bytes = ticket.is_steady, ticket.is_shared, ticket.kept_bytes
        times.images, times.bytes, times.read_seconds, times.decode_seconds = ticket[6:10]
        times.batch_seconds, times.blocked_seconds = ticket[10:]
        return found

    def end(self) -> None:
        """Kill it and wait for that; ending twice is fine."""
        self._end()

    def _say(self, notes: bytes) -> None:
        with suppress(BrokenPipeError):  # one that has died is found out when it is heard
            os.write(self._notes, notes)

    def _hear(self) -> None:
        with self._hearing:
            if not self._end.alive:
                raise FeedError("the feed was closed while it was read: iterate it again")
            said = os.read(self._tickets, 65536)
        if not said:
            raise self._died()
        self._said += said

    def _next(self) -> tuple[Ticket, bytes] | None:
        if len(self._said) < TICKET.size:
            return None
        ticket = Ticket._make(TICKET.unpack_from(self._said))
        end = TICKET.size + ticket.more
        if len(self._said) < end:
            return None
        more = bytes(self._said[TICKET.size : end])
        del self._said[:end]
        return ticket, more

    def _died(self) -> FeedError:
        if not self._end.alive:
            return FeedError("the feed was closed while it was read: iterate it again")
        code = self._process.wait()
        self.end()
        if code >= 0:
            return FeedError(f"the feed's process ended with exit code {code} (see above): use the feed's threads")
        name = signal.Signals(-code).name
        why = "somebody ended it, or the system did, as memory ran out" if name == "SIGKILL" else "a decoder crashed"
        return FeedError(f"the feed's process was ended by {name} ({why}): start again; what was saved is intact")


def _start(file: int) -> tuple[subprocess.Popen[bytes], int, int]:
    """The process, our end of the pipe to it, and of the one from it."""
    its_notes, notes = os.pipe()
    tickets, its_tickets = os.pipe()
    try:
        process = children.start(_MODULE, stdin=its_notes, stdout=its_tickets, inherits=(file,))
    except FailedError as error:
        for end in (notes, tickets):
            os.close(end)
        raise FeedError(f"{error}: use the feed's threads") from error
    finally:
        for end in (its_notes, its_tickets):
            os.close(end)
    return process, notes, tickets


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
