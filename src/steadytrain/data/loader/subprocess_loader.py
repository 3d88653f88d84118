"""The loader's threads in a child process, so that they and the training loop share no interpreter.

Beside a loop that mostly launches small pieces of work, threads of the same interpreter take its lock from it again and
again. Here a child makes the same batches, byte for byte, in memory that both share. For most batches the loop calls
neither the system nor numpy: it looks at a board in that memory, and takes arrays that were made at the beginning.

What holds, whatever happens: a child that dies is an error that says how; a child whose parent dies ends; ending it, or
dropping the last reference to it, ends it at once. Only the parent hears of Ctrl-C and of other signals.

What the two say to each other, through two pipes and on the :class:`Board`:

- To the child: the number of an inherited file and of the slots in it, and a ``LoaderTask``, both pickled; then single
  bytes. ``BEGIN`` (two int64 follow: start, and stop or -1) asks for the batches from a position on; ``RELEASE`` says
  that one was taken, so that another may be begun; every other byte is the number of a slot whose memory is free again.
- From the child: an entry on the board for each batch, in order: a kind, and the slot that the batch lies in. Messages
  go through the pipe, pickled, each behind its length: first of all ``None``, or the error that kept the child from
  starting; then what belongs to entries of another kind than ``BATCH``, and empty ones, which only wake the reader.

The images of a slot are written anew only after a note that they are free: the pipe keeps the two in order.
"""

from __future__ import annotations

import errno
import itertools
import math
import mmap
import os
import pickle
import select
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import fields, replace
from io import BufferedReader
from queue import SimpleQueue
from sys import getrefcount
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from steadytrain.data.loader.batch import Batch, BufferPool, LoadedBatch
from steadytrain.data.loader.batch_worker import BatchWorker, LoaderTask, WorkerScratch
from steadytrain.data.loader.pipeline import RequestCounts, StageTimes, Stream
from steadytrain.data.packing import worker_pool
from steadytrain.errors import FailedError, FeedError, SteadyError
from steadytrain.machine import facts

# Whether a slot's memory is free is seen by the references to its arrays, which are exact with the interpreter's lock.
IS_SUPPORTED = os.name == "posix" and getattr(sys, "_is_gil_enabled", lambda: True)()
SPARE = 4  # batches that the consumer may hold in shared memory; what it keeps beyond that is copied
# Of small batches more are made ahead than is asked for: a note to the child costs the loop as much as a few of them.
DEEP, DEEP_BYTES = 32, 16 * 2**20

RELEASE, BEGIN = 255, 254
MOST_SLOTS = 253
# Kinds of entries. BAD: bad images were met in making the batch, and follow. ERROR: what is raised follows; no batch.
BATCH, BAD, ERROR = range(3)

_SPAN, _LENGTH = struct.Struct("<qq"), struct.Struct("<i")
_ALIGNED = 64
_FULL = (errno.ENOSPC, errno.ENOMEM, errno.EFBIG, errno.EDQUOT)
_WHY = {
    "SIGKILL": "somebody ended it, or the system did, as memory ran out",
    "SIGBUS": "a file was cut short while it was read, or its disk fails",
}
_LOOK_SECONDS = 1.0
_NAP_SECONDS, _NAPS = 1e-3, 16

Labels = NDArray[np.int64] | NDArray[np.float32]


# -- memory that both share ------------------------------------------------------------------------------------------


class Board:
    """One side's view of which batches are ready: the child writes, and the parent looks without asking the system.

    Entries, of which the newest ``places`` stand there; how many there have been (``made``); and what the child's
    threads have done. Of the parent there is a single flag: it waits for an entry, and wants a message by the pipe.

    Args:
        memory: of both, :meth:`bytes_for` the places of it, zeros at first.
        places: for entries: at least as many as can be made and not yet read.
    """

    _MADE, _WAITED_FOR, _ENTRIES = 0, 1, 2
    _TIMES = tuple(time.name for time in fields(StageTimes))
    _DONE = struct.Struct(f"{2 + len(_TIMES)}d")

    def __init__(self, memory: memoryview, places: int) -> None:
        split = 8 * (self._ENTRIES + places)
        self._words = memory[:split].cast("q")
        self._done = memory[split:]
        self._places = places
        self._lock = threading.Lock()

    @classmethod
    def bytes_for(cls, places: int) -> int:
        """Return the size of a board."""
        return 8 * (cls._ENTRIES + places) + cls._DONE.size

    @property
    def made(self) -> int:
        """Entries that there have been: those up to there, and all that they speak of, can be read after this."""
        made = self._words[self._MADE]
        self._fence()
        return made

    def __getitem__(self, number: int) -> int:
        return self._words[self._ENTRIES + number % self._places]

    def put(self, entry: int) -> bool:
        """Add an entry; tell whether the other side waits for it, and is to be sent a message."""
        made = self._words[self._MADE]
        self._words[self._ENTRIES + made % self._places] = entry
        self._fence()
        self._words[self._MADE] = made + 1
        self._fence()
        waited_for = self._words[self._WAITED_FOR] != 0
        if waited_for:
            self._words[self._WAITED_FOR] = 0
        return waited_for

    def ask(self, number: int) -> bool:
        """Ask for a message when entry ``number`` is made; False: it is there already."""
        self._words[self._WAITED_FOR] = 1
        self._fence()
        return self._words[self._MADE] <= number

    def write_done(self, times: StageTimes, is_shared: bool, kept_bytes: int) -> None:
        """Put down what :meth:`read_done` returns."""
        self._DONE.pack_into(self._done, 0, is_shared, kept_bytes, *map(times.__getattribute__, self._TIMES))

    def read_done(self, times: StageTimes) -> tuple[bool, int]:
        """Bring the times up to date; return whether kept images are shared with other ranks, and their bytes."""
        is_shared, kept_bytes, *counts = self._DONE.unpack_from(self._done)
        for name, number in zip(self._TIMES, counts, strict=True):
            setattr(times, name, number)
        times.images, times.bytes = int(times.images), int(times.bytes)
        return bool(is_shared), int(kept_bytes)

    def _fence(self) -> None:
        # What a thread writes and reads reaches another core in another order on some processors (ARM), and a later
        # read may overtake a write on all of them. To give back a lock keeps all before it before it, to take one all
        # after it after it, and a lock is not taken before it was given back: nothing passes the two together.
        with self._lock:
            pass
        with self._lock:
            pass


class SharedBatches:
    """Slots for a batch each, one after the other in one map, and a :class:`Board` behind them.

    A nameless file of memory where the system has such (Linux), else one on disk that has no name any more, which it
    keeps in its cache: neither counts against ``/dev/shm``, of which a container often has only 64 MB.

    Args:
        shape: of a batch's images (B, H, W, C).
        count: of slots.
        file: made by another process (:attr:`file` there); None: make one.

    Raises:
        FeedError: there is no room.
    """

    def __init__(self, shape: tuple[int, int, int, int], count: int, *, file: int | None = None) -> None:
        self.count = count
        images, numbers = -(-math.prod(shape) // _ALIGNED) * _ALIGNED, 8 * shape[0]
        self.slot_bytes = images + -(-3 * numbers // _ALIGNED) * _ALIGNED
        self.bytes = count * self.slot_bytes + Board.bytes_for(count)
        self.file = _create_file(self.bytes) if file is None else file
        map_ = mmap.mmap(self.file, self.bytes)  # lives as long as a view of it
        weakref.finalize(self, os.close, self.file)
        self.board = Board(memoryview(map_)[count * self.slot_bytes :], count)
        self._memory = memory = _MapArray(self.bytes, np.uint8, map_)
        self.each = [
            Batch(
                np.ndarray(shape, np.uint8, memory, at),
                *(np.ndarray(shape[:1], np.int64, memory, at + images + row * numbers) for row in range(3)),
            )
            for at in range(0, count * self.slot_bytes, self.slot_bytes)
        ]
        self._unused = [self._references(slot) for slot in range(count)]

    def pin(self) -> None:
        """Lock the pages, for asynchronous copies to a GPU. Raises FeedError where that cannot be had."""
        import torch

        try:
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            torch.cuda.check_error(int(runtime.cudaHostRegister(self.address, self.bytes, 0)))
        except (RuntimeError, AssertionError) as error:
            why = str(error).partition("\n")[0]
            raise FeedError(f"pin=True: no page-locked memory ({why}): use pin=False") from error
        weakref.finalize(self._memory, runtime.cudaHostUnregister, self.address).atexit = False

    @property
    def address(self) -> int:
        """Where the first slot begins."""
        return self._memory.ctypes.data

    def put(self, batch: Batch) -> int:
        """Put down the numbers of a batch whose images lie in a slot; return which."""
        slot: int = (batch.images.__array_interface__["data"][0] - self.address) // self.slot_bytes
        to, n = self.each[slot], len(batch)
        to.ids[:n], to.positions[:n] = batch.ids, batch.positions
        if fit_in_slot(batch.labels):
            to.labels[:n] = batch.labels
        return slot

    def is_free(self, slot: int) -> bool:
        """Tell whether nobody else refers to a slot's batch and its arrays, nor to any view or tensor of them.

        They are made once, and not anew each time: beside a loop that empties the core's caches, that costs the most.
        """
        return self._references(slot) == self._unused[slot]

    def _references(self, slot: int) -> int:
        batch = self.each[slot]
        own = getrefcount(batch) + getrefcount(batch.images)
        return own + getrefcount(batch.labels) + getrefcount(batch.ids) + getrefcount(batch.positions)


class _MapArray(np.ndarray[tuple[int], np.dtype[np.uint8]]):
    """All of a map, of a type of its own.

    Of a view of a view, numpy remembers only the plain array at the bottom. A slot's arrays have to be remembered: so
    what is beneath them must not be plain.
    """


def fit_in_slot(labels: Labels) -> bool:
    """Tell whether a slot has room for such labels; others, such as vectors, are looked up by the ids."""
    return labels.ndim == 1 and labels.dtype == np.int64


def _create_file(size: int) -> int:
    """Open a file of so many bytes, which nobody else can find, all of them allocated."""
    most = facts.memory_bytes() // 2
    if size > most:  # the system would go on giving until it has to end somebody
        raise FeedError(
            f"{size / 1e6:,.0f} MB of memory to share with the feed's process are more than half of this machine's"
            f" ({2 * most / 1e6:,.0f} MB): lower batch_size or depth, or use the feed's threads"
        )
    file, has_memfd = -1, hasattr(os, "memfd_create")
    try:
        if has_memfd:
            file = os.memfd_create("steadytrain-feed", os.MFD_CLOEXEC)
        else:
            with tempfile.TemporaryFile() as nameless:
                file = os.dup(nameless.fileno())
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file, 0, size)  # or a write to the map could end the process
        else:
            os.ftruncate(file, size)
    except OSError as error:
        if file >= 0:
            os.close(file)
        where = "" if has_memfd else f" in {tempfile.gettempdir()} (TMPDIR chooses another place)"
        remedy = "lower batch_size or depth" if error.errno in _FULL else "use the feed's threads here"
        raise FeedError(
            f"no {size / 1e6:,.0f} MB of memory to share with the feed's process{where} ({error.strerror}): {remedy}"
        ) from error
    return file


# -- the parent ------------------------------------------------------------------------------------------------------


class LoaderProcess:
    """A child process that makes the batches of a task, for one iteration after the other.

    Args:
        task: ``start`` and ``stop`` are told anew for each iteration.
        pin: page-locked memory.
        times: what the child has done, kept up to date.

    Raises:
        FeedError: there is no memory to share, the source cannot be pickled, or no process can be started.
    """

    def __init__(self, task: LoaderTask, *, pin: bool, times: StageTimes) -> None:
        if not IS_SUPPORTED or task.depth + SPARE > MOST_SLOTS:
            raise FeedError('place="process" needs Linux or macOS and a depth below 250: use "threads"')
        self.depth = max(task.depth, min(DEEP, DEEP_BYTES // math.prod(task.shape)))
        try:
            pickled = pickle.dumps(replace(task, depth=self.depth), protocol=5)
        except Exception as error:
            told = f"{type(task.source).__name__} cannot be pickled ({error})"
            raise FeedError(f"{told}, and another process needs a source that can: use the feed's threads") from error
        self.slots = SharedBatches(task.shape, self.depth + SPARE)
        if pin:
            self.slots.pin()
        self.times = times
        self.is_shared, self.kept_bytes = False, 0
        self._lent = deque[int]()  # slots that the consumer may still look at
        self._free = bytearray()  # those that it does not, of which the child has not been told
        self._heard = 0  # entries of the board that were taken
        self._made = 0  # those that are known to be there
        self._received, self._messages = bytearray(), deque[bytes]()
        self._has_started = False
        self._abandoned: BaseException | None = None
        self._hearing = threading.Lock()
        self._owner = os.getpid()
        self._process, self._notes, self._answers = _start_child(self.slots.file)
        start = pickle.dumps((self.slots.file, self.slots.count), protocol=5) + pickled
        # In a thread: a pipe holds 64 kB, and the child reads it only when it has loaded what it needs.
        telling = threading.Thread(target=_write_until_ended, args=(self._notes, start), name="feed-start", daemon=True)
        pipes = self._notes, self._answers
        self._end = weakref.finalize(self, _end_child, self._process, pipes, telling, self._hearing, self._owner)
        telling.start()

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether it has not been ended; one that has died by itself is found out when it is heard."""
        return self._end.alive

    def wait(self) -> None:
        """Wait until it has started. Raises what kept it from doing so."""
        if not self._has_started:
            error = self._message()
            if error is not None:
                raise error
            self._has_started = True

    def batches(
        self, task: LoaderTask, *, pin: bool, requests: RequestCounts, finished: Callable[[LoaderProcess], object]
    ) -> Iterator[LoadedBatch]:
        """Iterate over the batches of a task; not for several threads or iterations at once.

        The child ends with an iteration that fails or is dropped. An error in the child is raised in its turn, of the
        same type and in the same words.

        Args:
            task: what is to be made, from its ``start`` to its ``stop``.
            pin: what of the batches has to be copied is put into page-locked memory as well.
            requests: grows as batches are taken.
            finished: given this child when the last batch was taken.
        """
        labels = None if fit_in_slot(task.source.labels) else task.source.labels
        buffers = BufferPool(task.shape, keep=1, pinned=pin)
        begun, unreleased, most = False, 0, max(1, self.depth // 2)
        try:
            for number in itertools.count() if task.total is None else range(task.total):
                if os.getpid() != self._owner:
                    raise FeedError(
                        "the feed was begun in the process that this one was forked from: iterate it anew here"
                    )
                if not begun:
                    self.wait()
                    begun = True
                    span = task.start, -1 if task.stop is None else task.stop
                    self._note(self._freed_slots() + bytes([BEGIN]) + _SPAN.pack(*span))
                requests.note(self.slots.board.made - self._heard)
                unreleased += 1
                yield self._next(task, number, labels, buffers)
                if unreleased >= most:  # a few at a time: it costs as much as all else
                    self._note(self._freed_slots() + bytes([RELEASE]) * unreleased)
                    unreleased = 0
        except BaseException:
            self.end()
            raise
        finished(self)

    def _next(self, task: LoaderTask, number: int, labels: Labels | None, buffers: BufferPool) -> LoadedBatch:
        """Wait for the next batch; nothing else refers to it then."""
        kind, slot = divmod(self._take_entry(), 256)
        more: Any = [] if kind == BATCH else self._message()
        if kind == ERROR:
            raise more
        batch, lends = self.slots.each[slot], self._lends(slot)
        n = task.span(number)[1]
        if lends and labels is None and n == task.batch_size:
            return LoadedBatch(batch, more)
        images, own_labels, ids, positions = batch.images[:n], batch.labels[:n], batch.ids[:n], batch.positions[:n]
        if not lends:  # the consumer keeps batches: the child must not wait for it
            shared, images = images, buffers.take()[:n]
            images[...] = shared
            own_labels, ids, positions = own_labels.copy(), ids.copy(), positions.copy()
        return LoadedBatch(Batch(images, own_labels if labels is None else labels[ids], ids, positions), more)

    def _lends(self, slot: int) -> bool:
        """Tell whether a slot's arrays may be handed out; if not, as too many are kept, it is free again at once."""
        if len(self._lent) >= SPARE:
            self._sweep()
        lends = len(self._lent) < SPARE
        (self._lent if lends else self._free).append(slot)
        return lends

    def _freed_slots(self) -> bytes:
        self._sweep()
        free = bytes(self._free)
        self._free.clear()
        return free

    def _sweep(self) -> None:
        """Find the slots that nobody looks at any more."""
        for _ in range(len(self._lent)):
            slot = self._lent.popleft()
            (self._free if self.slots.is_free(slot) else self._lent).append(slot)

    def _take_entry(self) -> int:
        """Wait for the next entry of the board; hold no lock meanwhile that anyone but :meth:`end` would want.

        Raises:
            FeedError: the child has died, or was ended.
        """
        board = self.slots.board
        if self._heard == self._made:
            while (made := board.made) == self._heard:
                self._hear(wait=board.ask(made))
            self._made = made
            self.is_shared, self.kept_bytes = board.read_done(self.times)
        self._heard += 1
        return board[self._heard - 1]

    def _message(self) -> Any:
        """Wait for the next message. Raises as :meth:`_take_entry` does."""
        while not self._messages:
            self._hear()
        return pickle.loads(self._messages.popleft())  # from our own child

    def end(self) -> None:
        """Kill it and wait for that; ending twice is fine, and in a forked process nothing happens."""
        self._end()

    def abandon(self, error: BaseException) -> None:
        """Kill it, and raise this error in whoever waits for it."""
        self._abandoned = error
        self.end()

    def _note(self, notes: bytes) -> None:
        with suppress(BrokenPipeError):  # one that has died is found out when it is heard
            os.write(self._notes, notes)

    def _hear(self, *, wait: bool = True) -> None:
        """Take in what is in the pipe, or will be; empty messages have done what they are for."""
        with self._hearing:
            if not self._end.alive:
                raise self._closed()
            if not wait:
                poll = select.poll()
                poll.register(self._answers, select.POLLIN)
                if not poll.poll(0):
                    return
            received = os.read(self._answers, 65536)
        if not received:
            raise self._died()
        self._received += received
        while len(self._received) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._received)[0]
            if len(self._received) < end:
                break
            if end > _LENGTH.size:
                self._messages.append(bytes(self._received[_LENGTH.size : end]))
            del self._received[:end]

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


def _start_child(file: int) -> tuple[subprocess.Popen[bytes], int, int]:
    """Start the process; return it, our end of the pipe to it, and of the one from it."""
    its_notes, notes = os.pipe()
    answers, its_answers = os.pipe()
    try:
        process = worker_pool.start_child(__name__, stdin=its_notes, stdout=its_answers, inherits=(file,))
    except FailedError as error:
        for end in (notes, answers):
            os.close(end)
        raise FeedError(f"{error}: use the feed's threads") from error
    finally:
        for end in (its_notes, its_answers):
            os.close(end)
    return process, notes, answers


def _end_child(
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


def _write_until_ended(file: int, data: bytes) -> None:
    with suppress(OSError):  # one that has ended already is found out when it is read from
        _write(file, data)


def _write(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data) :]


# -- the child -------------------------------------------------------------------------------------------------------


class Server:
    """Makes the batches that are asked for in shared memory, one iteration after the other."""

    def __init__(self, task: LoaderTask, slots: SharedBatches, answers: int) -> None:
        self.task = task
        self.slots = slots
        # One is always there for whoever fills it: the parent holds no more than its share.
        self.free_slots = deque(range(slots.count))
        self.times = StageTimes()
        self._answers = answers
        self._worker: BatchWorker | None = None
        self._asked: SimpleQueue[LoaderTask] = SimpleQueue()
        self._stream: Stream[WorkerScratch, LoadedBatch] | None = None

    def run(self) -> None:
        """Serve until the process is ended."""
        # One image first, so that all it takes is loaded before a batch is waited for: torch, where it is resized.
        rehearsal = replace(self.task, batch_size=1, keep_bytes=0, read_ahead=False, ranks=None)
        with suppress(Exception):  # whatever goes wrong is told when it is that image's turn
            worker = BatchWorker(rehearsal, BufferPool(rehearsal.shape, keep=0).take)
            for piece in worker.job([(rehearsal.start, 1)]).pieces:
                piece(WorkerScratch())
        self._send(pickle.dumps(None))
        while True:
            task = self._asked.get()
            try:
                self._serve(task)
            except Exception as error:  # noqa: BLE001 - a process's edge: it is raised in the other one
                self._put(ERROR, 0, _pickle_error(error))

    def _serve(self, task: LoaderTask) -> None:
        if self._worker is None:  # the slot last used may still be in a cache
            self._worker = BatchWorker(self.task, lambda: self.slots.each[self.free_slots.pop()].images)
        self._stream = self._worker.stream(self.times, holds=True)
        for loaded in self._stream:
            slot = self.slots.put(loaded.batch)
            if loaded.bad:
                self._put(BAD, slot, pickle.dumps(loaded.bad, protocol=5))
            else:
                self._put(BATCH, slot)

    def _put(self, kind: int, slot: int, more: bytes = b"") -> None:
        """Make an entry, with what belongs to it."""
        cache = None if self._worker is None else self._worker.cache
        self.slots.board.write_done(self.times, cache is not None and cache.is_shared, cache.bytes if cache else 0)
        if self.slots.board.put(kind << 8 | slot) or more:
            self._send(more)

    def _send(self, message: bytes) -> None:
        _write(self._answers, _LENGTH.pack(len(message)) + message)

    def listen(self, notes: BufferedReader) -> None:
        """Take in notes until the parent is gone, then end the process."""
        parent, naps = os.getppid(), 0
        # A process forked from the parent may hold the other end open for longer than the parent lives.
        while os.getppid() == parent:
            # While notes come often they are looked for between naps: one that finds nobody listening costs the loop
            # that writes it a few microseconds, one that has to wake a thread on another core several times as much.
            if naps:
                time.sleep(_NAP_SECONDS)
            if not select.select([notes], [], [], 0 if naps else _LOOK_SECONDS)[0]:
                naps = max(0, naps - 1)
                continue
            received = notes.read1()
            if not received:
                break
            self._heed(received, notes)
            naps = _NAPS
        os._exit(0)

    def _heed(self, received: bytes, notes: BufferedReader) -> None:
        at = 0
        while at < len(received):
            note = received[at]
            at += 1
            if note == RELEASE:
                if self._stream is not None:
                    self._stream.release()
            elif note == BEGIN:
                while len(received) < at + _SPAN.size:
                    received += notes.read1()
                start, stop = _SPAN.unpack_from(received, at)
                self._asked.put(replace(self.task, start=start, stop=None if stop < 0 else stop))
                at += _SPAN.size
            else:
                self.free_slots.append(note)


def main() -> None:
    """Serve as a child: until nobody holds the other end of its standard input, or its parent is gone.

    torch is imported only when an image has to be resized.
    """
    answers = os.dup(1)
    os.dup2(2, 1)  # what a library prints must not get among the messages
    Image.init()  # Pillow finds its readers when first asked, and not safely from several threads
    with os.fdopen(os.dup(0), "rb") as notes:
        try:
            file, count = pickle.load(notes)
            task: LoaderTask = pickle.load(notes)
            server = Server(task, SharedBatches(task.shape, count, file=file), answers)
        except Exception as error:  # noqa: BLE001 - as above
            told = f"the feed's process cannot open the data ({type(error).__name__}: {error}): use the feed's threads"
            message = _pickle_error(error if isinstance(error, SteadyError) else FeedError(told))
            _write(answers, _LENGTH.pack(len(message)) + message)
            return
        threading.Thread(target=server.listen, args=(notes,), daemon=True).start()
        try:
            server.run()
        except BrokenPipeError:
            os._exit(0)


def _pickle_error(error: BaseException) -> bytes:
    """Pickle an error for another process; what cannot go there whole is told in words."""
    with suppress(Exception):  # whatever a stranger's class does
        data = pickle.dumps(error, protocol=5)
        if str(pickle.loads(data)) == str(error):  # our own, made a moment ago
            return data
    return pickle.dumps(FeedError(f"the feed failed ({type(error).__name__}: {error})"), protocol=5)
