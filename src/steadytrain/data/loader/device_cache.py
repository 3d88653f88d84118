"""Kept images on the device that uses them: a batch is a gather there, and only its numbers cross to it.

Once every image of a data set is kept, all are of one size, and a square is only moved within them, their pixels are
copied to the device, if they take no more than an eighth of what is free there. From then on the feed's threads draw
what they always draw, and a batch comes as :class:`ResidentBatch`: which samples, from which row and column, mirrored
or not. Its squares are the same, byte for byte.

torch is imported when there is a device to copy to.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from steadytrain.data.loader.batch import Batch
from steadytrain.data.loader.crop import Crop
from steadytrain.data.loader.gather import Canvas, Spots, gather_spots, padding
from steadytrain.data.loader.image_cache import Kept, Store
from steadytrain.data.loader.jpeg import Pixels
from steadytrain.data.loader.sampler import Ints
from steadytrain.machine import facts

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

SHARE = 8  # of the free memory of a device, one part in so many is used at most


class Resident:
    """The images of one feed on a device, as soon as they are there. Safe from several threads.

    Args:
        device: any that torch knows; the CPU, too, where it is merely another copy.
        cut: how the squares are cut.
        budget_bytes: the most that the images may take; None: an eighth of what is free when they are copied.
    """

    def __init__(self, device: torch.device, cut: Crop, *, budget_bytes: int | None = None) -> None:
        self.device = device
        self.cut = cut
        self.budget_bytes = budget_bytes
        self.store: Store | None = None
        """Where the images come from, once they are on the device."""
        self.is_settled = False
        """Whether it is known if they will be."""
        self._images: torch.Tensor | None = None
        self._is_tried = False
        self._lock = threading.Lock()

    @property
    def bytes(self) -> int:
        """What lies on the device."""
        images = self._images
        return 0 if images is None else images.numel()

    def wants(self, kept: Kept) -> Store | None:
        """The images to :meth:`load`, told to one caller only; None where it is too early, or they are not such."""
        if self._is_tried or not kept.full:
            return None
        with self._lock:
            first, self._is_tried = not self._is_tried, True
        store = kept.store
        if isinstance(store, Store) and self.cut.only_shifts(*store.pixels.shape[1:3]):
            return store if first else None
        self.is_settled = True
        return None

    def load(self, store: Store) -> None:
        """Copy images to the device, if they fit; takes as long as the copy does."""
        import torch

        budget = _free_bytes(self.device) // SHARE if self.budget_bytes is None else self.budget_bytes
        if store.pixels.size <= budget:
            with suppress(torch.OutOfMemoryError):  # somebody else was faster
                self._images = _copied(store.pixels, self.device)
                self.store = store
        self.is_settled = True

    def gather(self, where: Spots) -> torch.Tensor:
        """The squares, uint8[b, S, S, C] on the device, by its current stream; the caller does not wait for it."""
        import torch
        from torch.nn.functional import pad

        assert self._images is not None, "nothing was loaded"
        samples, rows, columns, flips = self._sent(where)
        if self.device.type == "cuda":
            self._images.record_stream(torch.cuda.current_stream(self.device))
        images = self._images.index_select(0, samples)
        side, around = self.cut.size, padding(self.cut)
        if images.shape[1:3] != (side, side) or around:
            images = pad(images, (0, 0, around, around, around, around))
            b, height, width, channels = images.shape
            row, line = width * channels, side * channels
            shape = (b, height - side + 1, width - side + 1, side, line)  # every square of every image, not copied
            windows = images.as_strided(shape, (height * row, row, channels, row, 1))
            squares = windows[torch.arange(b, device=self.device), rows, columns]
            images = squares.view(b, side, side, channels)
        return torch.where(flips.bool()[:, None, None, None], images.flip(2), images) if self.cut.flip else images

    def _sent(self, where: Spots) -> torch.Tensor:
        """The numbers on the device: int64[4, b]."""
        import torch

        numbers = torch.from_numpy(np.stack((where.samples, where.rows, where.columns, where.flips)).astype(np.int64))
        if self.device.type == "cuda":
            numbers = numbers.pin_memory()  # or the host would wait for the copy; its memory is reused after it
        return numbers.to(self.device, non_blocking=True)


class ResidentBatch(Batch):
    """A batch whose images lie on a device: :meth:`gather` makes its squares there.

    ``images`` gathers the same squares on the host, when it is first asked for.
    """

    def __init__(
        self,
        resident: Resident,
        where: Spots,
        labels: NDArray[np.int64] | NDArray[np.float32],
        ids: Ints,
        positions: Ints,
    ) -> None:
        for name, value in {"labels": labels, "ids": ids, "positions": positions}.items():
            object.__setattr__(self, name, value)
        object.__setattr__(self, "_resident", resident)
        object.__setattr__(self, "_where", where)

    _resident: Resident
    _where: Spots

    @cached_property
    def images(self) -> Pixels:
        store, side = self._resident.store, self._resident.cut.size
        assert store is not None
        out = np.empty((len(self), side, side, store.pixels.shape[3]), dtype=np.uint8)
        gather_spots(out, store.pixels, self._where, self._resident.cut, Canvas())
        return out

    def gather(self) -> torch.Tensor:
        """The images, uint8[B, H, W, C] on the device."""
        return self._resident.gather(self._where)


def _free_bytes(device: torch.device) -> int:
    """Of the device's memory; of this machine's in all where the device cannot say."""
    import torch

    ask = getattr(torch.get_device_module(device), "mem_get_info", None)
    return facts.memory_bytes() if ask is None else int(ask(device)[0])


def _copied(pixels: Pixels, device: torch.device) -> torch.Tensor:
    """The same bytes on a device, when the copy is done; what is queued there goes on meanwhile."""
    import torch

    host = torch.from_numpy(pixels)
    if device.type != "cuda":
        return host.to(device, copy=True)
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        images = host.to(device, non_blocking=True)
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record(stream)
    done.synchronize()
    return images
