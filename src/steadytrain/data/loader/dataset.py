"""The image loader for custom PyTorch loops: an ``IterableDataset`` whose items are whole batches.

::

    dataset = ImageLoaderDataset(records, Crop(kind="resized-crop", size=224, flip=True), batch_size=128)
    loader = DataLoader(dataset, batch_size=None)  # or iterate over the dataset itself
    for epoch in range(90):
        for images, labels in loader:  # uint8[128, 3, 224, 224] as channels_last, int64[128]
            images = images.to(device, non_blocking=True).float() / 255

The threads are the loader's own, so ``num_workers`` stays 0. Nothing is copied: the tensors are views of a batch's
memory, which goes back to the loader when the last of them dies.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from steadytrain.data.loader.batch import Batch
from steadytrain.data.loader.crop import Crop
from steadytrain.data.loader.image_cache import ResidentBatch
from steadytrain.data.loader.image_loader import ImageLoader
from steadytrain.data.loader.task import Source, at_least
from steadytrain.errors import InputError

Tensors = tuple[torch.Tensor, torch.Tensor]

_DIVIDERS = ("DataLoaderDispatcher", "IterableDatasetShard")
"""Classes of accelerate, and of transformers, which give each process a part of what they iterate over."""


def tensors(batch: Batch) -> Tensors:
    """Return images uint8[B, C, H, W] and labels of a batch, not copied: the images stay channels last in memory.

    ``torch.from_dlpack(batch.images)`` gives the same memory as uint8[B, H, W, C], and so do other libraries' readers
    of DLPack. The images of a :class:`~steadytrain.data.loader.image_cache.ResidentBatch` are on its device.
    """
    images = batch.gather() if isinstance(batch, ResidentBatch) else torch.from_numpy(batch.images)
    return images.permute(0, 3, 1, 2), torch.from_numpy(batch.labels)


class ImageLoaderDataset(IterableDataset[Tensors]):
    """Batches of a data set as tensors.

    In training the stream has no end. An iteration is ``steps`` batches and continues where the last one stopped or was
    interrupted, while the threads keep working ahead. No sample is dropped or repeated between iterations, and
    :attr:`position` (or :meth:`state_dict`) is all that must be saved to continue bit for bit. Evaluation starts
    from the beginning each time.

    With ``torch.distributed`` each process loads its share of the stream; together they see each sample once per epoch.
    In evaluation, a process may have one batch fewer or a smaller one: weight means by the number of images. Where
    something else divides batches among processes (``accelerator.prepare``), it needs whole ones: ``shard=(0, 1)``.

    Args:
        source: encoded images and labels: ``Records``, ``Unpacked``, or another ``Source``.
        crop: how each image is cropped.
        batch_size: images per batch in one process.
        steps: batches in one iteration of training; None: as many as one pass over the data has, rounded up.
        start: first position in the stream that all processes share; in evaluation, of each iteration.
        train: training or evaluation.
        shard: ``(rank, processes)``; None: those of ``torch.distributed``, where it is initialised by now.
        options: of ``ImageLoader``: ``seed``, ``threads``, ``ids``, ``blocks``, ``pin``, ...

    Raises:
        InputError: a number is out of range, ``stop`` is given in training (use ``steps``), or, while iterating,
            ``torch.distributed`` was initialised after the data set was created, or a process's share would be divided
            once more.
        DataError: there are no images. While iterating also whatever ``ImageLoader`` raises.
    """

    def __init__(
        self,
        source: Source,
        crop: Crop,
        *,
        batch_size: int,
        steps: int | None = None,
        start: int = 0,
        train: bool = True,
        shard: tuple[int, int] | None = None,
        **options: Any,
    ) -> None:
        if train and options.get("stop") is not None:
            raise InputError(
                f"stop={options['stop']}: set the length of an ImageLoaderDataset by steps (batches in one"
                " iteration) instead"
            )
        self._finds_shard = shard is None
        self.shard = _distributed() if shard is None else shard
        self.position = start
        """The place in the stream of all processes at which the next iteration begins."""
        self._options = {"source": source, "crop": crop, "batch_size": batch_size, "train": train, **options}
        self._loader = self._make_loader()
        self._batches: Iterator[Batch] | None = None
        if steps is not None:
            at_least(1, "steps", steps)
        stride = self._loader.task.batch_size * self._loader.task.shard[1]
        self.steps = (steps or -(-self._loader.num_samples // stride)) if train else len(self._loader)

    def __len__(self) -> int:
        """Return the number of batches of one iteration."""
        return self.steps

    def __iter__(self) -> Iterator[Tensors]:
        if get_worker_info() is not None:
            raise _not_copied()
        if self.shard[1] > 1 and (divider := _divider(sys._getframe().f_back)):
            raise InputError(
                f"{divider} divides batches among processes, and this ImageLoaderDataset is process {self.shard[0]}'s"
                f" share of {self.shard[1]} already, so that images would never be seen: pass shard=(0, 1) to it, or"
                " keep its loader out of accelerator.prepare"
            )
        if self._finds_shard and _distributed() != self.shard:
            rank, processes = _distributed()
            raise InputError(
                f"this is process {rank} of {processes}, but the ImageLoaderDataset was created before the"
                " process group: create it after torch.distributed.init_process_group, or pass shard=(rank, processes)"
            )
        if not self._loader.task.train:
            yield from map(tensors, self._loader)
            return
        for _ in range(self.steps):
            if self._batches is None:
                self._batches = iter(self._loader)
            try:
                batch = next(self._batches)
            except BaseException:  # Ctrl-C included: the stream stays where it is
                self.close()
                raise
            self.position += self._loader.task.batch_size * self._loader.task.shard[1]
            yield tensors(batch)

    def state_dict(self) -> dict[str, int]:
        """Return what it takes to go on."""
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from there; with another number of processes or another batch size, too."""
        self.close()
        self.position = state["position"]
        self._loader = self._make_loader()

    def close(self) -> None:
        """End the threads; iterating again begins them anew, where it stopped."""
        self._batches = None
        self._loader.close()
        self._loader = self._make_loader()

    def __getstate__(self) -> object:
        raise _not_copied()

    def _make_loader(self) -> ImageLoader:
        return ImageLoader(**self._options, start=self.position, shard=self.shard)


def _not_copied() -> InputError:
    return InputError(
        "an ImageLoaderDataset runs its own threads and cannot be copied to worker processes: use"
        " DataLoader(dataset, batch_size=None, num_workers=0), or create another dataset"
    )


def _divider(frame: FrameType | None) -> str:
    """Return what iterates here and gives each process a part of it, from the frame that asks for a batch; or nothing.

    Neither torch nor these packages let a data set know that they do.
    """
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, DataLoader | IterableDataset) and type(caller).__name__ in _DIVIDERS:
            return f"{type(caller).__module__.partition('.')[0]}'s {type(caller).__name__}"
        frame = frame.f_back
    return ""


def _distributed() -> tuple[int, int]:
    """Return the rank and the number of processes."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return 0, 1
    return torch.distributed.get_rank(), torch.distributed.get_world_size()
