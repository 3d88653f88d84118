"""A batch, and the reused memory that its images lie in."""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from steadytrain.errors import FeedError, first_line


@dataclass(frozen=True, eq=False)
class Batch:
    """Samples ready to be trained or evaluated on.

    The images' memory goes back to the feed when the last reference to it dies, any view, or a tensor made by
    ``torch.from_numpy``, included: keep a batch as long as you like. With pinned memory, keep a reference until an
    asynchronous copy to the device has finished.

    Args:
        images: uint8[B, H, W, C], C 1 (grey) or 3 (RGB).
        labels: int64[B], or float32[B, L] for label vectors.
        ids: int64[B], the record that each sample was made from.
        positions: int64[B], where each sample stands in the stream.
    """

    images: NDArray[np.uint8]
    labels: NDArray[np.int64] | NDArray[np.float32]
    ids: NDArray[np.int64]
    positions: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.ids)


class Memory(Protocol):
    """Where the images of batches are put."""

    def take(self) -> NDArray[np.uint8]:
        """uint8[B, H, W, C] of undefined content, free for the next owner when the last view of it is gone."""


class Buffers:
    """Image buffers of one shape, each handed out to one owner at a time.

    Args:
        shape: of each buffer (B, H, W, C).
        keep: unused buffers to hold on to; what comes back beyond that is freed.
        pinned: allocate page-locked memory through torch, for asynchronous copies to a GPU.
    """

    def __init__(self, shape: tuple[int, int, int, int], *, keep: int, pinned: bool = False) -> None:
        self.shape = shape
        self.pinned = pinned
        # A deque's append and pop are atomic: memory can come back in any thread, in the middle of anything.
        self._free: deque[NDArray[np.uint8]] = deque(maxlen=keep)

    def take(self) -> NDArray[np.uint8]:
        """A buffer of undefined content, free for the next owner when the last view of it is gone.

        Raises:
            FeedError: page-locked memory was asked for and cannot be had.
        """
        try:
            memory = self._free.pop()
        except IndexError:
            memory = self._allocate()
        lease = _Lease(memory)
        weakref.finalize(lease, self._free.append, memory).atexit = False
        return np.asarray(lease)

    def clear(self) -> None:
        """Free what is not in use."""
        self._free.clear()

    def _allocate(self) -> NDArray[np.uint8]:
        if not self.pinned:
            return np.empty(self.shape, dtype=np.uint8)
        import torch

        try:
            memory: NDArray[np.uint8] = torch.empty(self.shape, dtype=torch.uint8, pin_memory=True).numpy()
        except RuntimeError as error:
            raise FeedError(f"pin=True: no page-locked memory ({first_line(error)}): use pin=False") from error
        return memory


class _Lease:
    """Stands between a buffer and its views: numpy keeps it alive as the base of each of them."""

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        self.__array_interface__: dict[str, Any] = memory.__array_interface__
