"""The feed's own process: the same threads, whose batches go to shared memory. :mod:`steadytrain.feed.apart` starts it.

It imports torch only when an image has to be resized.
"""

from __future__ import annotations

import os
import pickle
import select
import threading
from collections import deque
from contextlib import suppress
from dataclasses import replace
from io import BufferedReader
from queue import SimpleQueue

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from steadytrain.errors import FeedError, SteadyError
from steadytrain.feed.bad import BadImage
from steadytrain.feed.fill import Desk, Filler, Made
from steadytrain.feed.shared import Slots
from steadytrain.feed.stream import Stream, Times
from steadytrain.feed.task import Task
from steadytrain.feed.tickets import BAD, BATCH, BEGIN, ERROR, READY, RELEASE, SPAN, TICKET, WAKE, Ticket

LOOK_SECONDS = 1.0


class Places:
    """The free slots, for whoever fills them; one is always there: the other side holds no more than its share."""

    def __init__(self, slots: Slots) -> None:
        self.slots = slots
        self.free = deque(range(slots.count))
        self._base = slots.memory.ctypes.data

    def take(self) -> NDArray[np.uint8]:
        """The images of a free slot."""
        return self.slots.images[self.free.pop()]  # the one last used may still be in a cache

    def number_of(self, images: NDArray[np.uint8]) -> int:
        """The slot that images lie in."""
        where: int = images.__array_interface__["data"][0]
        return (where - self._base) // self.slots.slot_bytes


class Server:
    """Makes the batches that are asked for, one iteration after the other."""

    def __init__(self, task: Task, slots: Slots, tickets: int) -> None:
        self.task = task
        self.places = Places(slots)
        self.times = Times()
        self._tickets = tickets
        self._filler: Filler | None = None
        self._asked: SimpleQueue[Task] = SimpleQueue()
        self._stream: Stream[Desk, Made] | None = None

    def run(self) -> None:
        """Serve until the process is ended."""
        self.tell(READY)
        while True:
            task = self._asked.get()
            try:
                self._serve(task)
            except Exception as error:  # noqa: BLE001 - a process's edge: it is raised in the other one
                self.tell(ERROR, more=_portable(error))

    def begin(self, start: int, stop: int) -> None:
        """Another iteration."""
        self._asked.put(replace(self.task, start=start, stop=None if stop < 0 else stop))

    def release(self) -> None:
        """One batch was taken."""
        if self._stream is not None:
            self._stream.release()

    def wake(self) -> None:
        """Use what room there is."""
        if self._stream is not None:
            self._stream.wake()

    def tell(self, kind: int, slot: int = 0, more: bytes = b"") -> None:
        """Send a ticket."""
        times = self.times
        kept = None if self._filler is None else self._filler.kept
        told = (False, False, 0) if kept is None else (kept.given_up or kept.full, kept.is_shared, kept.bytes)
        did = times.read_seconds, times.decode_seconds, times.batch_seconds, times.blocked_seconds
        ticket = Ticket(kind, slot, len(more), *told, times.images, times.bytes, *did)
        _write(self._tickets, TICKET.pack(*ticket) + more)

    def _serve(self, task: Task) -> None:
        if self._filler is None:
            self._filler = self.task.filler(self.places)
        self._stream = task.stream(self._filler, self.times, holds=True)
        for made in self._stream:
            slot, ids = self.places.number_of(made.batch.images), made.batch.ids
            self.places.slots.ids[slot][: len(ids)] = ids
            bad: list[BadImage] = made.bad
            self.tell(BAD, slot, pickle.dumps(bad, protocol=5)) if bad else self.tell(BATCH, slot)


def main() -> None:
    """The life of the process: it ends when nobody holds the other end of its standard input, or its parent is gone."""
    tickets = os.dup(1)
    os.dup2(2, 1)  # what a library prints must not get among the tickets
    Image.init()  # Pillow finds its readers when first asked, and not safely from several threads
    with os.fdopen(os.dup(0), "rb") as notes:
        try:
            file, count = pickle.load(notes)
            task: Task = pickle.load(notes)
            server = Server(task, Slots(task.shape, count, file=file), tickets)
        except Exception as error:  # noqa: BLE001 - as above
            told = f"the feed's process cannot open the data ({type(error).__name__}: {error}): use the feed's threads"
            more = _portable(error if isinstance(error, SteadyError) else FeedError(told))
            _write(tickets, TICKET.pack(*Ticket(ERROR, 0, len(more), False, False, 0, 0, 0, 0.0, 0.0, 0.0, 0.0)) + more)
            return
        threading.Thread(target=_listen, args=(server, notes), daemon=True).start()
        try:
            server.run()
        except BrokenPipeError:
            os._exit(0)


def _listen(server: Server, notes: BufferedReader) -> None:
    parent = os.getppid()
    while os.getppid() == parent:
        # A process forked from the parent may hold the other end open for longer than the parent lives.
        if not select.select([notes], [], [], LOOK_SECONDS)[0]:
            continue
        said = notes.read1()
        if not said:
            break
        _heed(server, said, notes)
    os._exit(0)


def _heed(server: Server, said: bytes, notes: BufferedReader) -> None:
    at = 0
    while at < len(said):
        note = said[at]
        at += 1
        if note == RELEASE:
            server.release()
        elif note == WAKE:
            server.wake()
        elif note == BEGIN:
            while len(said) < at + SPAN.size:
                said += notes.read1()
            server.begin(*SPAN.unpack_from(said, at))
            at += SPAN.size
        else:
            server.places.free.append(note)


def _write(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data) :]


def _portable(error: BaseException) -> bytes:
    """An error for another process; what cannot go there whole is told in words."""
    with suppress(Exception):  # whatever a stranger's class does
        data = pickle.dumps(error, protocol=5)
        if str(pickle.loads(data)) == str(error):  # our own, made a moment ago
            return data
    return pickle.dumps(FeedError(f"the feed failed ({type(error).__name__}: {error})"), protocol=5)
