"""The loader's threads in a child process, so that they and the training loop share no interpreter.

Beside a loop that mostly launches small pieces of work, threads of the same interpreter take its lock from it again and
again. Here a child makes the same batches, byte for byte, in memory that both share.

What holds, whatever happens: a child that dies is an error that says how; a child whose parent dies ends; ending it, or
dropping the last reference to it, ends it at once. Only the parent hears of Ctrl-C and of other signals.

What the two say to each other, pickled:

- To the child: the memory and the task; then whether the batches from the first one on are asked for, how many were
  taken, so that others may be begun, and the slots whose memory is free again.
- From the child: ``"started"``; for each batch, in order, its slot and the bad images met for it; or an
  error.

The images of a slot are written anew only after the child was told that they are free.
"""

from __future__ import annotations

import errno
import itertools
import math
import mmap
import os
import pickle
import subprocess
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import fields, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

import numpy as np
from PIL import Image

from steadytrain.data.arrays import Pixels
from steadytrain.data.loader.batch import Batch, BufferPool, Lease, LoadedBatch, batch_view
from steadytrain.data.loader.batch_worker import BatchWorker, WorkerScratch
from steadytrain.data.loader.pipeline import CLOSED, FORKED, BatchStream, RequestCounts, StageTimes
from steadytrain.data.loader.task import LoaderTask
from steadytrain.errors import FailedError, FeedError, SteadyError
from steadytrain.machine import facts
from steadytrain.machine.children import ending, start_module
from steadytrain.machine.platform import require_posix, reserve

SPARE = 4
"""Batches that the consumer may hold in shared memory; what it keeps beyond that is copied."""
DEEP, DEEP_BYTES = 32, 16 * 2**20
"""Small batches that are made ahead, though fewer are asked for: a message costs the loop as much as a few of them."""

_FULL = (errno.ENOSPC, errno.ENOMEM, errno.EFBIG, errno.EDQUOT)
_WHY = {
    "SIGKILL": "someone killed it, or the system ran out of memory",
    "SIGBUS": "a file was truncated while it was being read, or the disk failed",
}
_LOOK_SECONDS = 1.0
_ALIGNED = 64
_TIMES = tuple(field.name for field in fields(StageTimes))


class SharedBatches:
    """Slots for a batch each, one after the other in one map; behind them, what the child has ``done`` (float64).

    That is: batches made, whether kept images are shared with other ranks, their bytes, and the stage times.

    A nameless file of memory where the system has such (Linux), else one on disk that has no name any more, which it
    keeps in its cache: neither counts against ``/dev/shm``, of which a container often has only 64 MB.

    Args:
        shape: of a batch's images (B, H, W, C).
        file: made by another process (:attr:`file` there); None: make one.

    Raises:
        FeedError: there is no room.
    """

    def __init__(self, shape: tuple[int, int, int, int], count: int, *, file: int | None = None) -> None:
        self.shape, self.count = shape, count
        self._image_bytes = -(-math.prod(shape) // _ALIGNED) * _ALIGNED
        self.slot_bytes = self._image_bytes + -(-24 * shape[0] // _ALIGNED) * _ALIGNED
        done = count * self.slot_bytes
        self.bytes = done + 8 * (3 + len(_TIMES))
        self.file = _create_file(self.bytes) if file is None else file
        weakref.finalize(self, os.close, self.file)
        self._memory = np.frombuffer(mmap.mmap(self.file, self.bytes), np.uint8)
        self.done = self._memory[done:].view(np.float64)

    def batch(self, slot: int, memory: Pixels | None = None) -> Batch:
        """Return the batch of a slot; ``memory`` is the slot's, where it is to be referred to."""
        memory = self._slot(slot) if memory is None else memory
        numbers = memory[self._image_bytes :][: 24 * self.shape[0]].view(np.int64).reshape(3, -1)
        return Batch(memory[: math.prod(self.shape)].reshape(self.shape), *numbers)

    def lend(self, slot: int, take_back: Callable[[int], object]) -> Batch:
        """Return the batch of a slot; the slot is taken back when the last view or tensor of its memory is gone."""
        return self.batch(slot, np.asarray(Lease(self._slot(slot), lambda _: take_back(slot))))

    def slot_of(self, images: Pixels) -> int:
        """Return the slot in which the images of a batch lie."""
        return int(images.ctypes.data - self._memory.ctypes.data) // self.slot_bytes

    def _slot(self, slot: int) -> Pixels:
        return self._memory[slot * self.slot_bytes : (slot + 1) * self.slot_bytes]

    def pin(self) -> None:
        """Lock the pages, for asynchronous copies to a GPU. Raises FeedError where that cannot be had."""
        import torch

        address = self._memory.ctypes.data
        try:
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            torch.cuda.check_error(int(runtime.cudaHostRegister(address, self.bytes, 0)))
        except (RuntimeError, AssertionError) as error:
            why = str(error).partition("\n")[0]
            raise FeedError(f"pin=True: no page-locked memory ({why}): use pin=False") from error
        weakref.finalize(self._memory, runtime.cudaHostUnregister, address).atexit = False


def _create_file(size: int) -> int:
    """Open a file of so many bytes, which nobody else can find, all of them allocated."""
    most = facts.memory_bytes() // 2
    if size > most:  # the system would go on giving until it has to end somebody
        raise FeedError(
            f"{size / 1e6:,.0f} MB of memory to share with the loader process is more than half of the"
            f" machine's ({2 * most / 1e6:,.0f} MB): lower batch_size or depth, or use place='threads'"
        )
    file, memfd_create = -1, getattr(os, "memfd_create", None)
    try:
        if memfd_create:
            file = memfd_create("steadytrain-feed")
        else:
            with tempfile.TemporaryFile() as nameless:
                file = os.dup(nameless.fileno())
        reserve(file, size)
    except OSError as error:
        if file >= 0:
            os.close(file)
        where = "" if memfd_create else f" in {tempfile.gettempdir()} (set TMPDIR to use another folder)"
        remedy = "lower batch_size or depth" if error.errno in _FULL else "use place='threads'"
        raise FeedError(
            f"cannot get {size / 1e6:,.0f} MB of memory to share with the loader process{where}"
            f" ({error.strerror}): {remedy}"
        ) from error
    return file


class LoaderProcess:
    """A child process that makes the batches of a task, one iteration after another.

    ``times``: what the child has done, as of the last :meth:`refresh`.

    Raises:
        FeedError: there is no memory to share, the source cannot be pickled, or no process can be started.
    """

    def __init__(self, task: LoaderTask, *, times: StageTimes) -> None:
        require_posix("place='process'")
        self.depth = max(task.depth, min(DEEP, DEEP_BYTES // math.prod(task.shape)))
        try:
            pickled = pickle.dumps(replace(task, depth=self.depth), protocol=5)
        except Exception as error:
            message = f"{type(task.source).__name__} cannot be pickled ({error})"
            raise FeedError(
                f"{message}, and a separate process needs a source that can be: use place='threads'"
            ) from error
        self._task = task
        self.slots = SharedBatches(task.shape, self.depth + SPARE)
        if task.pin:
            self.slots.pin()
        self.times = times
        self._has_labels = task.source.labels.dtype == np.int64  # in the slots; label vectors are looked up
        # Slots that the consumer has let go of: a deque, as memory comes back in any thread, in the middle of anything.
        self._free = deque[int]()
        self._num_lent = self._taken = 0
        self._has_started = False
        self._abandoned: BaseException | None = None
        self._owner = os.getpid()
        self._connection, theirs = Pipe()
        with theirs:
            try:
                self._process = start_module(__name__, stdin=theirs.fileno(), inherits=(self.slots.file,))
            except FailedError as error:
                raise FeedError(f"{error}: use place='threads'") from error
        self._end = weakref.finalize(self, _end_child, self._process, self._owner)
        with suppress(OSError):  # one that has died is found out when it is heard
            self._connection.send((self.slots.file, self.slots.count))
            self._connection.send_bytes(pickled)

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
            self._receive()
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
                    self._send(0, begins=True)
                requests.note(int(self.slots.done[0]) - self._taken)
                unreleased += 1
                yield self._next(number)
                if unreleased >= most:  # a few at a time: it costs as much as all else
                    self._send(unreleased)
                    unreleased = 0
        except BaseException:
            self.end()
            raise
        finished(self)

    def _next(self, number: int) -> LoadedBatch:
        """Wait for the next batch; nothing else refers to it then."""
        slot, bad = self._receive()
        self._taken += 1
        if is_lent := self._num_lent - len(self._free) < SPARE:
            self._num_lent += 1
            batch = self.slots.lend(slot, self._free.append)
        else:  # the consumer keeps batches: the child must not wait for it
            batch = self.slots.batch(slot)
        first, n = self._task.span(number)
        images, labels = batch_view(batch.images, n, self._task.side(first)), batch.labels[:n]
        ids, positions = batch.ids[:n], batch.positions[:n]
        if not is_lent:
            images, labels, ids, positions = images.copy(), labels.copy(), ids.copy(), positions.copy()
            self._num_lent += 1
            self._free.append(slot)
        return LoadedBatch(
            Batch(images, labels if self._has_labels else self._task.source.labels[ids], ids, positions), bad
        )

    def _send(self, num_released: int, *, begins: bool = False) -> None:
        slots = [self._free.popleft() for _ in range(len(self._free))]
        self._num_lent -= len(slots)
        with suppress(OSError):  # one that has died is found out when it is heard
            self._connection.send((begins, num_released, slots))

    def _receive(self) -> Any:
        """Wait for the next message.

        Raises:
            FeedError: the child has died, or was ended; or what it says is an error.
        """
        try:
            message = self._connection.recv() if self._end.alive else None
        except (EOFError, OSError):
            message = None
        if not self._end.alive:
            raise self._abandoned or FeedError(CLOSED)
        if message is None:
            raise self._died()
        if isinstance(message, BaseException):
            raise message
        return message

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

    def _died(self) -> FeedError:
        code = self._process.wait()
        self.end()
        if code >= 0:
            return FeedError(f"the loader process ended with exit code {code} (see above): use place='threads'")
        name = ending(code)
        why = _WHY.get(name, "a decoder crashed")
        return FeedError(f"the loader process was killed by {name} ({why}): start again; saved checkpoints are intact")


def _end_child(process: subprocess.Popen[bytes], owner: int) -> None:
    """Kill a process and wait for it, in whatever thread the garbage collector runs."""
    if os.getpid() == owner:
        process.kill()
        process.wait()


class Server:
    """Makes the batches of a task in shared memory, one iteration after the other."""

    def __init__(self, task: LoaderTask, slots: SharedBatches, connection: Connection) -> None:
        self.task = task
        self.slots = slots
        # One is always there for whoever fills it: the parent holds no more than its share. The last one used comes
        # first: it may still be in a cache.
        self.free_slots = deque(range(slots.count))
        self.times = StageTimes()
        self._connection = connection
        self._made = 0
        self._begins = SimpleQueue[None]()
        self._stream: BatchStream[WorkerScratch, LoadedBatch] | None = None

    def run(self) -> None:
        """Serve until the process is ended."""
        # One image first, so that all it takes is loaded before a batch is waited for: torch, where it is resized.
        rehearsal = replace(
            self.task, batch_size=1, shard=(0, 1), share=None, keep_bytes=0, read_ahead=False, launch=""
        )
        with suppress(Exception):  # whatever goes wrong is told when it is that image's turn
            rehearsing = BatchWorker(rehearsal, BufferPool(rehearsal.shape, keep=0).take)
            for piece in rehearsing.job([(rehearsal.start, 1)]).pieces:
                piece(WorkerScratch())
        self._connection.send("started")
        worker: BatchWorker | None = None
        while True:
            self._begins.get()
            try:
                if worker is None:
                    worker = BatchWorker(self.task, lambda: self.slots.batch(self.free_slots.pop()).images)
                self._stream = worker.stream(self.times, holds=True)
                for loaded in self._stream:
                    self._put(loaded, worker)
            except Exception as error:  # noqa: BLE001 - a process's edge: it is raised in the other one
                self._connection.send(_portable(error))

    def _put(self, loaded: LoadedBatch, worker: BatchWorker) -> None:
        batch, n = loaded.batch, len(loaded.batch)
        slot = self.slots.slot_of(batch.images)
        to = self.slots.batch(slot)
        to.ids[:n], to.positions[:n] = batch.ids, batch.positions
        if batch.labels.dtype == np.int64:
            to.labels[:n] = batch.labels
        self._made += 1
        times = map(self.times.__getattribute__, _TIMES)
        self.slots.done[:] = (self._made, worker.cache.is_shared, worker.cache.bytes, *times)
        self._connection.send((slot, loaded.bad))

    def listen(self) -> None:
        """Take in messages until the parent is gone, then end the process."""
        parent = os.getppid()
        # A process forked from the parent may hold the other end open for longer than the parent lives.
        with suppress(EOFError, OSError):
            while os.getppid() == parent:
                if not self._connection.poll(_LOOK_SECONDS):
                    continue
                begins, num_released, slots = self._connection.recv()
                self.free_slots.extend(slots)
                if num_released and self._stream is not None:
                    self._stream.release(num_released)
                if begins:
                    self._begins.put(None)
        os._exit(0)


def main() -> None:
    """Serve as a child: until nobody holds the other end of its standard input, or its parent is gone.

    torch is imported only when an image has to be resized.
    """
    os.dup2(2, 1)  # what a library prints is not the parent's output
    Image.init()  # Pillow finds its readers when first asked, and not safely from several threads
    connection = Connection(os.dup(0))
    try:
        file, count = connection.recv()
        task: LoaderTask = pickle.loads(connection.recv_bytes())
        server = Server(task, SharedBatches(task.shape, count, file=file), connection)
    except Exception as error:  # noqa: BLE001 - as above
        message = f"the loader process cannot open the data ({type(error).__name__}: {error}): use place='threads'"
        connection.send(_portable(error if isinstance(error, SteadyError) else FeedError(message)))
        return
    threading.Thread(target=server.listen, daemon=True).start()
    with suppress(BrokenPipeError):
        server.run()
    os._exit(0)


def _portable(error: Exception) -> BaseException:
    """Return an error as another process can have it: what cannot go there whole is told in words."""
    with suppress(Exception):  # whatever a stranger's class does
        if str(pickle.loads(pickle.dumps(error))) == str(error):  # our own, made a moment ago
            return error
    return FeedError(f"the data loader failed ({type(error).__name__}: {error})")
