"""Memory of batches that two processes share: one writes the images, the other reads them where they are.

A nameless file of memory where the system has such (Linux), else one on disk that has no name any more, which it keeps
in its cache: neither counts against ``/dev/shm``, of which a container often has only 64 MB.
"""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
import weakref
from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

from steadytrain import devices
from steadytrain.errors import FeedError
from steadytrain.feed.order import Ints

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
        images = -(-int(np.prod(shape)) // _ALIGNED) * _ALIGNED
        self.slot_bytes = images + -(-8 * shape[0] // _ALIGNED) * _ALIGNED
        self.bytes = count * self.slot_bytes
        self.file = _reserve(self.bytes) if file is None else file
        memory = np.frombuffer(mmap.mmap(self.file, self.bytes), dtype=np.uint8)
        weakref.finalize(self, os.close, self.file)  # the map lives as long as a view of it
        slots = memory.reshape(count, self.slot_bytes)
        self.images: list[NDArray[np.uint8]] = [slot[: int(np.prod(shape))].reshape(shape) for slot in slots]
        self.ids: list[Ints] = [slot[images : images + 8 * shape[0]].view(np.int64) for slot in slots]
        self.memory = memory
        self._interfaces: list[dict[str, Any]] = [images.__array_interface__ for images in self.images]

    def pin(self) -> None:
        """Lock the pages, for asynchronous copies to a GPU. Raises FeedError where that cannot be had."""
        import torch

        try:
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            torch.cuda.check_error(int(runtime.cudaHostRegister(self.memory.ctypes.data, self.bytes, 0)))
        except (RuntimeError, AssertionError) as error:
            why = str(error).partition("\n")[0]
            raise FeedError(f"pin=True: no page-locked memory ({why}): use pin=False") from error
        weakref.finalize(self.memory, runtime.cudaHostUnregister, self.memory.ctypes.data).atexit = False

    def lend(self, slot: int, returned: deque[int]) -> NDArray[np.uint8]:
        """The images of a slot; its number is put to ``returned`` when the last view of them is gone."""
        return np.asarray(_Lent(self._interfaces[slot], self.memory, slot, returned))


class _Lent:
    """Stands between a slot and its views: numpy keeps it alive as the base of each of them."""

    __slots__ = ("__array_interface__", "_memory", "_returned", "_slot")

    def __init__(self, images: dict[str, Any], memory: NDArray[np.uint8], slot: int, returned: deque[int]) -> None:
        self.__array_interface__ = images
        self._memory = memory
        self._slot = slot
        self._returned = returned

    def __del__(self) -> None:
        self._returned.append(self._slot)  # atomic: this can be any thread, in the middle of anything


def _reserve(size: int) -> int:
    """An open file of so many bytes, which nobody else can find, all of them allocated."""
    most = devices.memory_bytes() // 2
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
