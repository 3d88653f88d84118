"""Memory of batches that two processes share: one writes the images, the other reads them where they are.

A nameless file of memory where the system has such (Linux), else one on disk that has no name any more, which it keeps
in its cache: neither counts against ``/dev/shm``, of which a container often has only 64 MB.
"""

from __future__ import annotations

import errno
import math
import mmap
import os
import tempfile
import weakref
from sys import getrefcount

import numpy as np
from numpy.typing import NDArray

from steadytrain.data.loader.batch import Batch
from steadytrain.data.loader.board import Board, board_bytes
from steadytrain.errors import FeedError
from steadytrain.machine import facts

SPARE = 4  # batches that whoever iterates may hold in shared memory; what he keeps beyond that is copied

_ALIGNED = 64
_FULL = (errno.ENOSPC, errno.ENOMEM, errno.EFBIG, errno.EDQUOT)


class Slots:
    """So many places for a batch, one after the other in one map.

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
        self.bytes = count * self.slot_bytes + board_bytes(count)
        self.file = _reserve(self.bytes) if file is None else file
        map_ = mmap.mmap(self.file, self.bytes)  # lives as long as a view of it
        weakref.finalize(self, os.close, self.file)
        self.board = Board(memoryview(map_)[count * self.slot_bytes :], count)
        self._memory = memory = _Memory(self.bytes, np.uint8, map_)
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

    def put(self, slot: int, batch: Batch) -> None:
        """Put down what belongs to the images of a slot."""
        to, n = self.each[slot], len(batch)
        to.ids[:n], to.positions[:n] = batch.ids, batch.positions
        if fits(batch.labels):
            to.labels[:n] = batch.labels

    def is_free(self, slot: int) -> bool:
        """Whether nobody else refers to a slot's batch and its arrays, nor to any view or tensor of them.

        They are made once, and not anew each time: beside a loop that empties the core's caches, that costs the most.
        """
        return self._references(slot) == self._unused[slot]

    def _references(self, slot: int) -> int:
        batch = self.each[slot]
        own = getrefcount(batch) + getrefcount(batch.images)
        return own + getrefcount(batch.labels) + getrefcount(batch.ids) + getrefcount(batch.positions)


class _Memory(np.ndarray[tuple[int], np.dtype[np.uint8]]):
    """All of a map, of a type of its own.

    Of a view of a view, numpy remembers only the plain array at the bottom. A slot's arrays have to be remembered: so
    what is beneath them must not be plain.
    """


def fits(labels: NDArray[np.int64] | NDArray[np.float32]) -> bool:
    """Whether a slot has room for such labels; others, such as vectors, are looked up by the ids."""
    return labels.ndim == 1 and labels.dtype == np.int64


def _reserve(size: int) -> int:
    """An open file of so many bytes, which nobody else can find, all of them allocated."""
    most = facts.memory_bytes() // 2
    if size > most:  # the system would go on giving until it has to end somebody
        told = f"{size / 1e6:,.0f} MB of memory to share with the feed's process are more than half of this machine's"
        raise FeedError(f"{told} ({2 * most / 1e6:,.0f} MB): lower batch_size or depth, or use the feed's threads")
    file = -1
    try:
        file = _nameless()
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file, 0, size)  # or a write to the map could end the process
        else:
            os.ftruncate(file, size)
    except OSError as error:
        if file >= 0:
            os.close(file)
        where = "" if hasattr(os, "memfd_create") else f" in {tempfile.gettempdir()} (TMPDIR chooses another place)"
        remedy = "lower batch_size or depth" if error.errno in _FULL else "use the feed's threads here"
        told = f"no {size / 1e6:,.0f} MB of memory to share with the feed's process{where}"
        raise FeedError(f"{told} ({error.strerror}): {remedy}") from error
    return file


def _nameless() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("steadytrain-feed", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
