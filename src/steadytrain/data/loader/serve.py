"""The feed's own process: the same threads, whose batches go to shared memory. ``subprocess_loader`` starts it.

It imports torch only when an image has to be resized.
"""

from __future__ import annotations

import os
import pickle
import select
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import replace
from io import BufferedReader
from queue import SimpleQueue

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from steadytrain.data.loader.batch import Buffers
from steadytrain.data.loader.batch_worker import BatchWorker, LoadedBatch
from steadytrain.data.loader.messages import BAD, BATCH, BEGIN, ERROR, RELEASE, SPAN, WAKE, entry, message
from steadytrain.data.loader.pipeline import Stream
from steadytrain.data.loader.shared_memory import Slots
from steadytrain.data.loader.task import Task
from steadytrain.data.loader.times import Times
from steadytrain.data.loader.worker_scratch import WorkerScratch
from steadytrain.errors import FeedError, SteadyError

LOOK_SECONDS = 1.0
NAP_SECONDS, NAPS = 1e-3, 16


class Places:
    """The free slots, for whoever fills them; one is always there: the other side holds no more than its share."""

    def __init__(self, slots: Slots) -> None:
        self.slots = slots
        self.free = deque(range(slots.count))

    def take(self) -> NDArray[np.uint8]:
        """The images of a free slot."""
        return self.slots.each[self.free.pop()].images  # the one last used may still be in a cache

    def number_of(self, images: NDArray[np.uint8]) -> int:
        """The slot that images lie in."""
        where: int = images.__array_interface__["data"][0]
        return (where - self.slots.address) // self.slots.slot_bytes


class Server:
    """Makes the batches that are asked for, one iteration after the other."""

    def __init__(self, task: Task, slots: Slots, messages: int) -> None:
        self.task = task
        self.places = Places(slots)
        self.times = Times()
        self._messages = messages
        self._filler: BatchWorker | None = None
        self._asked: SimpleQueue[Task] = SimpleQueue()
        self._stream: Stream[WorkerScratch, LoadedBatch] | None = None

    def run(self) -> None:
        """Serve until the process is ended."""
        self._rehearse()
        _write(self._messages, message(pickle.dumps(None)))
        while True:
            task = self._asked.get()
            try:
                self._serve(task)
            except Exception as error:  # noqa: BLE001 - a process's edge: it is raised in the other one
                self.tell(ERROR, 0, _portable(error))

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

    def tell(self, kind: int, slot: int, more: bytes = b"") -> None:
        """Make an entry, with what belongs to it."""
        board = self.places.slots.board
        kept = None if self._filler is None else self._filler.kept
        told = (False, False, 0) if kept is None else (kept.given_up or kept.full, kept.is_shared, kept.bytes)
        board.tell(self.times, *told)
        if board.put(entry(kind, slot)) or more:
            _write(self._messages, message(more))

    def _rehearse(self) -> None:
        """Make an image, so that all it takes is loaded before a batch is waited for: torch, where it is resized."""
        task = replace(self.task, batch_size=1, keep_bytes=0, read_ahead=False, ranks=None)
        with suppress(Exception):  # whatever goes wrong is told when it is that image's turn
            for piece in task.filler(Buffers(task.shape, keep=0)).job([(task.start, 1)]).pieces:
                piece(WorkerScratch())

    def _serve(self, task: Task) -> None:
        if self._filler is None:
            self._filler = self.task.filler(self.places)
        self._stream = task.stream(self._filler, self.times, holds=True)
        for made in self._stream:
            slot, bad = self.places.number_of(made.batch.images), made.bad
            self.places.slots.put(slot, made.batch)
            self.tell(BAD, slot, pickle.dumps(bad, protocol=5)) if bad else self.tell(BATCH, slot)


def main() -> None:
    """The life of the process: it ends when nobody holds the other end of its standard input, or its parent is gone."""
    messages = os.dup(1)
    os.dup2(2, 1)  # what a library prints must not get among the messages
    Image.init()  # Pillow finds its readers when first asked, and not safely from several threads
    with os.fdopen(os.dup(0), "rb") as notes:
        try:
            file, count = pickle.load(notes)
            task: Task = pickle.load(notes)
            server = Server(task, Slots(task.shape, count, file=file), messages)
        except Exception as error:  # noqa: BLE001 - as above
            told = f"the feed's process cannot open the data ({type(error).__name__}: {error}): use the feed's threads"
            _write(messages, message(_portable(error if isinstance(error, SteadyError) else FeedError(told))))
            return
        threading.Thread(target=_listen, args=(server, notes), daemon=True).start()
        try:
            server.run()
        except BrokenPipeError:
            os._exit(0)


def _listen(server: Server, notes: BufferedReader) -> None:
    parent, naps = os.getppid(), 0
    # A process forked from the parent may hold the other end open for longer than the parent lives.
    while os.getppid() == parent:
        # While notes come often they are looked for between naps: one that finds nobody listening costs the loop that
        # writes it a few microseconds, one that has to wake a thread on another core several times as much.
        if naps:
            time.sleep(NAP_SECONDS)
        if not select.select([notes], [], [], 0 if naps else LOOK_SECONDS)[0]:
            naps = max(0, naps - 1)
            continue
        said = notes.read1()
        if not said:
            break
        _heed(server, said, notes)
        naps = NAPS
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
