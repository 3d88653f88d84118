"""The loader's threads in a child process, so that they and the training loop share no interpreter.

Beside a loop that mostly launches small pieces of work, threads of the same interpreter take its lock from it again and
again. Here a child makes the same batches, byte for byte, in memory that both share.

What holds, whatever happens: a child that dies is an error that says how; a child whose parent dies ends; ending it, or
dropping the last reference to it, ends it at once. Only the parent hears of Ctrl-C and of other signals.

What the two say to each other, through two pipes:

- To the child: which files it inherits, pickled; then single bytes. ``BEGIN`` asks for the batches from the first one
  on; ``RELEASE`` says that one was taken, so that another may be begun; every other byte is the number of a slot whose
  memory is free again.
- From the child: a byte for each batch, in order: the slot that it lies in. Where there is more to say, ``MORE``, a
  length and what is pickled: ``None`` when it has started, a slot and the bad images met for it, or an error.

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
import subprocess
import sys
import tempfile
import threading
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
from PIL import Image

from steadytrain.data.loader.batch import Batch, BufferPool, LoadedBatch, batch_view
from steadytrain.data.loader.batch_worker import BatchWorker, LoaderTask, WorkerScratch
from steadytrain.data.loader.pipeline import CLOSED, FORKED, BatchStream, RequestCounts, StageTimes
from steadytrain.errors import FailedError, FeedError, SteadyError
from steadytrain.machine import facts
from steadytrain.machine.children import ending, start_module

# Whether a slot's memory is free is seen by the references to its arrays, which are exact with the interpreter's lock.
IS_SUPPORTED = os.name == "posix" and getattr(sys, "_is_gil_enabled", lambda: True)()
SPARE = 4  # batches that the consumer may hold in shared memory; what it keeps beyond that is copied
# Of small batches more are made ahead than is asked for: a note to the child costs the loop as much as a few of them.
DEEP, DEEP_BYTES = 32, 16 * 2**20

RELEASE, BEGIN, MORE = 255, 254, 255
MOST_SLOTS = 253

_FULL = (errno.ENOSPC, errno.ENOMEM, errno.EFBIG, errno.EDQUOT)
_WHY = {
    "SIGKILL": "someone killed it, or the system ran out of memory",
    "SIGBUS": "a file was truncated while it was being read, or the disk failed",
}
_LOOK_SECONDS = 1.0
_ALIGNED = 64
_TIMES = tuple(field.name for field in fields(StageTimes))


# -- memory that both share ------------------------------------------------------------------------------------------


class SharedBatches:
    """Slots for a batch each, one after the other in one map; behind them, what the child has ``done`` (float64).

    That is: batches made, whether kept images are shared with other ranks, their bytes, and the stage times.

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
        images, numbers = -(-math.prod(shape) // _ALIGNED) * _ALIGNED, 8 * shape[0]
        self.slot_bytes = images + -(-3 * numbers // _ALIGNED) * _ALIGNED
        done = count * self.slot_bytes
        self.bytes = done + 8 * (3 + len(_TIMES))
        self.file = _create_file(self.bytes) if file is None else file
        weakref.finalize(self, os.close, self.file)
        self._memory = memory = _MapArray(self.bytes, np.uint8, mmap.mmap(self.file, self.bytes))
        # Made once, and not anew each time: beside a loop that empties the core's caches, that would cost the most.
        self.each = [
            Batch(
                np.ndarray(shape, np.uint8, memory, at),
                *(np.ndarray(shape[:1], np.int64, memory, at + images + row * numbers) for row in range(3)),
            )
            for at in range(0, done, self.slot_bytes)
        ]
        self.done = np.ndarray(3 + len(_TIMES), np.float64, memory, done)
        self._unused = [self._references(slot) for slot in range(count)]

    def is_free(self, slot: int) -> bool:
        """Return whether nobody else refers to a slot's batch and its arrays, nor to any view or tensor of them."""
        return self._references(slot) == self._unused[slot]

    def _references(self, slot: int) -> int:
        batch = self.each[slot]
        arrays = getrefcount(batch.images) + getrefcount(batch.labels)
        return getrefcount(batch) + arrays + getrefcount(batch.ids) + getrefcount(batch.positions)

    @property
    def address(self) -> int:
        """Return the address of the first slot."""
        return self._memory.ctypes.data

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


class _MapArray(np.ndarray[tuple[int], np.dtype[np.uint8]]):
    """An array over a whole memory map, of a type of its own.

    Of a view of a view, numpy remembers only the plain array at the bottom. A slot's arrays have to be remembered: so
    what is beneath them must not be plain.
    """


def _create_file(size: int) -> int:
    """Open a file of so many bytes, which nobody else can find, all of them allocated."""
    most = facts.memory_bytes() // 2
    if size > most:  # the system would go on giving until it has to end somebody
        raise FeedError(
            f"{size / 1e6:,.0f} MB of memory to share with the loader process is more than half of the"
            f" machine's ({2 * most / 1e6:,.0f} MB): lower batch_size or depth, or use place='threads'"
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
        where = "" if has_memfd else f" in {tempfile.gettempdir()} (set TMPDIR to use another folder)"
        remedy = "lower batch_size or depth" if error.errno in _FULL else "use place='threads'"
        raise FeedError(
            f"cannot get {size / 1e6:,.0f} MB of memory to share with the loader process{where}"
            f" ({error.strerror}): {remedy}"
        ) from error
    return file


# -- the parent ------------------------------------------------------------------------------------------------------


class LoaderProcess:
    """A child process that makes the batches of a task, one iteration after another.

    Args:
        task: what is to be made.
        pin: page-locked memory.
        times: what the child has done, as of the last :meth:`refresh`.

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
            message = f"{type(task.source).__name__} cannot be pickled ({error})"
            raise FeedError(
                f"{message}, and a separate process needs a source that can be: use place='threads'"
            ) from error
        self._task = task
        count = self.depth + SPARE
        self.slots = SharedBatches(task.shape, count)
        if pin:
            self.slots.pin()
        self.times = times
        self._has_labels = task.source.labels.dtype == np.int64  # in the slots; label vectors are looked up
        self._buffers = BufferPool(task.shape, keep=1, pinned=pin)
        self._lent = deque[int]()  # slots that the consumer may still look at
        self._free = bytearray()  # those that it does not, of which the child has not been told
        self._taken = 0
        self._received, self._messages = bytearray(), deque[Any]()
        self._has_started = False
        self._abandoned: BaseException | None = None
        self._reading = threading.Lock()
        self._owner = os.getpid()
        # In a file: a pipe holds 64 kB, and the child reads it only when it has loaded what it needs.
        pickled_task = _create_file(len(pickled))
        try:
            with os.fdopen(pickled_task, "wb", closefd=False) as file:
                file.write(pickled)
                file.seek(0)
            self._process = start_module(
                __name__, stdin=subprocess.PIPE, stdout=subprocess.PIPE, inherits=(self.slots.file, pickled_task)
            )
        except FailedError as error:
            raise FeedError(f"{error}: use place='threads'") from error
        finally:
            os.close(pickled_task)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._input, self._output = self._process.stdin.fileno(), self._process.stdout.fileno()
        self._end = weakref.finalize(self, _end_child, self._process, self._reading, self._owner)
        self._send(pickle.dumps((pickled_task, self.slots.file, count)))

    @property
    def pid(self) -> int:
        """The id of the loader's process."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Return whether it has not been ended; one that has died by itself is found out when it is heard."""
        return self._end.alive

    @property
    def is_shared(self) -> bool:
        """Return whether kept images lie in memory that other ranks have, too."""
        return bool(self.slots.done[1])

    @property
    def kept_bytes(self) -> int:
        """Return the bytes of decoded images that it keeps."""
        return int(self.slots.done[2])

    def wait(self) -> None:
        """Wait until it has started. Raises what kept it from doing so."""
        if not self._has_started:
            self._take_message()
            self._has_started = True

    def batches(self, requests: RequestCounts, finished: Callable[[LoaderProcess], object]) -> Iterator[LoadedBatch]:
        """Iterate over the batches of the task; not for several threads or iterations at once.

        The child ends with an iteration that fails or is dropped. An error in the child is raised in its turn, of the
        same type and in the same words.

        Args:
            requests: grows as batches are taken.
            finished: given this child when the last batch was taken.
        """
        unreleased, most, total = 0, max(1, self.depth // 2), self._task.total
        try:
            for number in itertools.count() if total is None else range(total):
                if os.getpid() != self._owner:
                    raise FeedError(FORKED)
                if number == 0:
                    self.wait()
                    self._note(BEGIN)
                requests.note(int(self.slots.done[0]) - self._taken)
                unreleased += 1
                yield self._next(number)
                if unreleased >= most:  # a few at a time: it costs as much as all else
                    self._note(RELEASE, unreleased)
                    unreleased = 0
        except BaseException:
            self.end()
            raise
        finished(self)

    def _next(self, number: int) -> LoadedBatch:
        """Wait for the next batch; nothing else refers to it then."""
        slot, bad = self._take_message()
        self._taken += 1
        if len(self._lent) >= SPARE:
            self._sweep()
        is_lent = len(self._lent) < SPARE
        (self._lent if is_lent else self._free).append(slot)
        batch, (first, n) = self.slots.each[slot], self._task.span(number)
        side = self._task.side(first)
        if is_lent and self._has_labels and (n, side) == self._task.shape[:2]:
            return LoadedBatch(batch, bad)
        images, labels = batch_view(batch.images, n, side), batch.labels[:n]
        ids, positions = batch.ids[:n], batch.positions[:n]
        if not is_lent:  # the consumer keeps batches: the child must not wait for it
            shared, images = images, batch_view(self._buffers.take(), n, side)
            images[...] = shared
            labels, ids, positions = labels.copy(), ids.copy(), positions.copy()
        return LoadedBatch(
            Batch(images, labels if self._has_labels else self._task.source.labels[ids], ids, positions), bad
        )

    def _sweep(self) -> None:
        """Find the slots that nobody looks at any more."""
        for _ in range(len(self._lent)):
            slot = self._lent.popleft()
            (self._free if self.slots.is_free(slot) else self._lent).append(slot)

    def _note(self, note: int, times: int = 1) -> None:
        """Send a note, so many times, after those of slots that are free."""
        self._sweep()
        notes = bytes(self._free) + bytes([note]) * times
        self._free.clear()
        self._send(notes)

    def _send(self, notes: bytes) -> None:
        with self._reading, suppress(BrokenPipeError):  # one that has died is found out when it is heard
            if self._end.alive:
                os.write(self._input, notes)

    def _take_message(self) -> Any:
        """Wait for the next message; hold no lock meanwhile that anyone but :meth:`end` would want.

        Raises:
            FeedError: the child has died, or was ended; or what it says is an error.
        """
        while not self._messages:
            self._receive()
        message = self._messages.popleft()
        if isinstance(message, BaseException):
            raise message
        return message

    def _receive(self) -> None:
        """Read what is in the pipe, or will be."""
        with self._reading:
            if not self._end.alive:
                raise self._closed()
            received = os.read(self._output, 65536)
        if not received:
            raise self._died()
        self._received += received
        at = 0
        while at < len(self._received):
            slot, end = self._received[at], at + 1
            if slot != MORE:
                self._messages.append((slot, []))
            else:
                length = int.from_bytes(self._received[end : end + 8], "little")
                end += 8 + length
                if len(self._received) < at + 9 or len(self._received) < end:
                    break
                self._messages.append(pickle.loads(self._received[at + 9 : end]))  # from our own child
            at = end
        del self._received[:at]

    def refresh(self) -> None:
        """Bring the times up to date."""
        for name, value in zip(_TIMES, self.slots.done[3:].tolist(), strict=True):
            setattr(self.times, name, type(getattr(self.times, name))(value))

    def end(self) -> None:
        """Kill it and wait for that; ending twice is fine, and in a forked process nothing happens."""
        self.refresh()
        self._end()

    def abandon(self, error: BaseException) -> None:
        """Kill it, and raise this error in whoever waits for it."""
        self._abandoned = error
        self.end()

    def _closed(self) -> BaseException:
        return self._abandoned or FeedError(CLOSED)

    def _died(self) -> BaseException:
        if not self._end.alive:
            return self._closed()
        code = self._process.wait()
        self.end()
        if code >= 0:
            return FeedError(f"the loader process ended with exit code {code} (see above): use place='threads'")
        name = ending(code)
        why = _WHY.get(name, "a decoder crashed")
        return FeedError(f"the loader process was killed by {name} ({why}): start again; saved checkpoints are intact")


def _end_child(process: subprocess.Popen[bytes], reading: threading.Lock, owner: int) -> None:
    """Kill a process, wait for it, and close its pipes, in whatever thread the garbage collector runs."""
    if os.getpid() == owner:
        process.kill()
        with reading:  # whoever reads has met the end by now
            process.communicate()


# -- the child -------------------------------------------------------------------------------------------------------


class Server:
    """Makes the batches of a task in shared memory, one iteration after the other."""

    def __init__(self, task: LoaderTask, slots: SharedBatches, answers: int) -> None:
        self.task = task
        self.slots = slots
        # One is always there for whoever fills it: the parent holds no more than its share. The last one used comes
        # first: it may still be in a cache.
        self.free_slots = deque(range(len(slots.each)))
        self.times = StageTimes()
        self._answers = answers
        self._made = 0
        self._begins = SimpleQueue[None]()
        self._stream: BatchStream[WorkerScratch, LoadedBatch] | None = None

    def run(self) -> None:
        """Serve until the process is ended."""
        # One image first, so that all it takes is loaded before a batch is waited for: torch, where it is resized.
        rehearsal = replace(self.task, batch_size=1, keep_bytes=0, read_ahead=False, ranks=None)
        with suppress(Exception):  # whatever goes wrong is told when it is that image's turn
            rehearsing = BatchWorker(rehearsal, BufferPool(rehearsal.shape, keep=0).take)
            for piece in rehearsing.job([(rehearsal.start, 1)]).pieces:
                piece(WorkerScratch())
        send_message(self._answers, pickle.dumps(None))
        worker: BatchWorker | None = None
        while True:
            self._begins.get()
            try:
                if worker is None:
                    worker = BatchWorker(self.task, lambda: self.slots.each[self.free_slots.pop()].images)
                self._stream = worker.stream(self.times, holds=True)
                for loaded in self._stream:
                    self._put(loaded, worker)
            except Exception as error:  # noqa: BLE001 - a process's edge: it is raised in the other one
                send_message(self._answers, _pickle_error(error))

    def _put(self, loaded: LoadedBatch, worker: BatchWorker) -> None:
        batch, n = loaded.batch, len(loaded.batch)
        slot: int = (batch.images.ctypes.data - self.slots.address) // self.slots.slot_bytes
        to = self.slots.each[slot]
        to.ids[:n], to.positions[:n] = batch.ids, batch.positions
        if batch.labels.dtype == np.int64:
            to.labels[:n] = batch.labels
        self._made += 1
        times = map(self.times.__getattribute__, _TIMES)
        self.slots.done[:] = (self._made, worker.cache.is_shared, worker.cache.bytes, *times)
        if loaded.bad:
            send_message(self._answers, pickle.dumps((slot, loaded.bad), protocol=5))
        else:
            os.write(self._answers, bytes([slot]))

    def listen(self, notes: BufferedReader) -> None:
        """Take in notes until the parent is gone, then end the process."""
        parent = os.getppid()
        # A process forked from the parent may hold the other end open for longer than the parent lives.
        while os.getppid() == parent:
            if not select.select([notes], [], [], _LOOK_SECONDS)[0]:
                continue
            received = notes.read1()
            if not received:
                break
            for note in received:
                if note == BEGIN:
                    self._begins.put(None)
                elif note != RELEASE:
                    self.free_slots.append(note)
                elif self._stream is not None:
                    self._stream.release()
        os._exit(0)


def main() -> None:
    """Serve as a child: until nobody holds the other end of its standard input, or its parent is gone.

    torch is imported only when an image has to be resized.
    """
    answers = os.dup(1)
    os.dup2(2, 1)  # what a library prints must not get among the messages
    Image.init()  # Pillow finds its readers when first asked, and not safely from several threads
    with os.fdopen(os.dup(0), "rb") as notes:
        try:
            pickled_task, file, count = pickle.load(notes)
            with os.fdopen(pickled_task, "rb") as pickled:
                task: LoaderTask = pickle.load(pickled)
            server = Server(task, SharedBatches(task.shape, count, file=file), answers)
        except Exception as error:  # noqa: BLE001 - as above
            message = f"the loader process cannot open the data ({type(error).__name__}: {error}): use place='threads'"
            send_message(answers, _pickle_error(error if isinstance(error, SteadyError) else FeedError(message)))
            return
        threading.Thread(target=server.listen, args=(notes,), daemon=True).start()
        try:
            server.run()
        except BrokenPipeError:
            os._exit(0)


def send_message(file: int, message: bytes) -> None:
    """Write what is pickled to the parent's pipe."""
    data = bytes([MORE]) + len(message).to_bytes(8, "little") + message
    while data:
        data = data[os.write(file, data) :]


def _pickle_error(error: BaseException) -> bytes:
    """Pickle an error for another process; what cannot go there whole is told in words."""
    with suppress(Exception):  # whatever a stranger's class does
        data = pickle.dumps(error, protocol=5)
        if str(pickle.loads(data)) == str(error):  # our own, made a moment ago
            return data
    return pickle.dumps(FeedError(f"the data loader failed ({type(error).__name__}: {error})"), protocol=5)
