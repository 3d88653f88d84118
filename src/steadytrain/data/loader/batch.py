"""A batch, the reused memory that its images lie in, and the bad images that were met in making it."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from steadytrain.data.arrays import EveryRecord, Ints
from steadytrain.data.images.decode import BadImageError
from steadytrain.errors import FeedError, TooManyBadError, first_line

BAD_SHARE, BAD_COUNT = 0.01, 5  # more bad images than the larger of these is too many

_REMEDY = "steady check names all of them, and steady pack leaves them out"


@dataclass(frozen=True, eq=False)
class Batch:
    """Decoded and cropped samples for training or evaluation.

    The loader reuses the images' memory once nothing refers to it any more, neither a view nor a tensor made by
    ``torch.from_numpy``: a batch may be held as long as needed. With pinned memory, hold a reference until an
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


@dataclass(frozen=True)
class BadImage:
    """A record that could not be decoded, why, and the record that was used instead; ``what`` names it in words."""

    id: int
    reason: str
    instead: int
    what: str

    def __str__(self) -> str:
        refused = f"{self.what} cannot be decoded ({self.reason})"
        return f"{refused}; using record {self.instead} instead; steady check names all of them"


@dataclass(frozen=True, eq=False)
class LoadedBatch:
    """A batch, and the bad images met in making it."""

    batch: Batch
    bad: list[BadImage]


def batch_view(buffer: NDArray[np.uint8], n: int, side: int) -> NDArray[np.uint8]:
    """Return memory for ``n`` images of ``side`` pixels, uint8[n, side, side, C], in a buffer for as many or larger.

    >>> batch_view(np.empty((4, 8, 8, 3), np.uint8), 3, 6).shape
    (3, 6, 6, 3)
    """
    if buffer.shape[1] == side:
        return buffer[:n]
    shape = (n, side, side, buffer.shape[3])
    return buffer.reshape(-1)[: math.prod(shape)].reshape(shape)


class BufferPool:
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
        """Return a buffer of undefined content, free for the next owner when the last view of it is gone.

        Raises:
            FeedError: page-locked memory was asked for and cannot be had.
        """
        try:
            memory = self._free.pop()
        except IndexError:
            memory = self._allocate()
        return np.asarray(Lease(memory, self._free.append))

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


class Lease:
    """Stands between memory and its views: numpy keeps it alive as the base of each of them."""

    __slots__ = ("__array_interface__", "_give_back", "_memory")

    def __init__(self, memory: NDArray[np.uint8], give_back: Callable[[NDArray[np.uint8]], object]) -> None:
        self.__array_interface__: dict[str, Any] = memory.__array_interface__
        self._memory, self._give_back = memory, give_back

    def __del__(self) -> None:
        self._give_back(self._memory)


class Quarantine:
    """The bad images of one loader. Safe from several threads.

    A bad sample is replaced by the next one, in the data's order and starting again after its end, that can be used:
    a rule that depends on the data alone, never on what was met before.

    Args:
        ids: int64[n], the record of each sample.
        replaces: whether bad samples are replaced (training) or raise (evaluation).
        describe: names a record in messages; None where its number has to do.

    ``met`` is all that was met; some of it with batches that were never taken.
    """

    def __init__(
        self, ids: Ints | EveryRecord, *, replaces: bool, describe: Callable[[int], str] | None = None
    ) -> None:
        self.ids = ids
        self.replaces = replaces
        self.describe = describe or (lambda number: f"record {number}")
        self.samples: set[int] = set()
        self.met: list[BadImage] = []
        self._lock = threading.Lock()

    def replace(self, sample: int, fault: BadImageError, use: Callable[[int], None], met: list[BadImage]) -> int:
        """Find and use the sample that stands in for a bad one.

        Args:
            use: tries another sample, and raises BadImageError where that is bad as well.
            met: gets the bad images that nobody has met before.

        Raises:
            FeedError: this is an evaluation, or nothing of the data can be decoded.
            TooManyBadError: more than the larger of 1 % and 5 images are bad.
        """
        ids, n, limit = self.ids, len(self.ids), max(BAD_COUNT, int(BAD_SHARE * len(self.ids)))
        if not self.replaces:
            refused = f"{self.describe(int(ids[sample]))} cannot be decoded ({fault})"
            raise FeedError(f"{refused}, and evaluation needs every image: {_REMEDY}") from fault
        faults = {sample: fault}
        for step in range(1, n):
            if len(self.samples | faults.keys()) > limit:
                last, why = next(reversed(faults.items()))
                raise TooManyBadError(
                    f"more than {limit} of {n:,} images cannot be decoded ({self.describe(int(ids[last]))}: {why}):"
                    f" {_REMEDY}"
                )
            other = (sample + step) % n
            try:
                use(other)
            except BadImageError as error:
                faults[other] = error
                continue
            with self._lock:
                new = sorted(faults.keys() - self.samples)
                self.samples |= faults.keys()
                numbers = [int(ids[s]) for s in new]
                bad = [
                    BadImage(number, str(faults[s]), int(ids[other]), self.describe(number))
                    for s, number in zip(new, numbers, strict=True)
                ]
                self.met += bad
            met += bad
            return other
        raise FeedError(f"none of the {n:,} images can be decoded ({fault}): does this file hold images?")
