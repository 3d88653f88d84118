"""The data sets of a run, and their batches on the device."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from steadytrain.config import Data
from steadytrain.data.loader import Batch, ResidentBatch, packed_side
from steadytrain.data.packing.prepare import Prepared
from steadytrain.data.packing.prepare import prepare as prepare_records
from steadytrain.data.recordio.card import record_files
from steadytrain.data.recordio.reader import Records
from steadytrain.data.sources.filenames import few
from steadytrain.data.sources.select import split_by_fraction
from steadytrain.errors import DataError
from steadytrain.training.profile.clock import Clock

LISTS = (".lst", ".csv", ".tsv", ".txt")
MOST_REJECTED = 100
"""Rejected files that a run's first event names; the card names them all."""


@dataclass(frozen=True)
class DataSets:
    """What is trained and validated on.

    Args:
        train, val: opened record files; ``val`` is None without validation.
        train_ids, val_ids: int64 record numbers to use; None uses all.
        classes: names, in the order of the labels.
        held_out: whether ``val_ids`` were held out of the training file.
    """

    train: Records
    val: Records | None
    train_ids: NDArray[np.int64] | None
    val_ids: NDArray[np.int64] | None
    classes: tuple[str, ...]
    held_out: bool

    @property
    def num_train(self) -> int:
        return len(self.train) if self.train_ids is None else len(self.train_ids)

    @property
    def num_val(self) -> int:
        if self.val is None:
            return 0
        return len(self.val) if self.val_ids is None else len(self.val_ids)

    @property
    def class_counts(self) -> NDArray[np.int64]:
        """Training images of each class, int64[K]."""
        labels = self.train.labels if self.train_ids is None else self.train.labels[self.train_ids]
        return np.bincount(labels, minlength=len(self.classes)).astype(np.int64)

    @property
    def validated(self) -> tuple[Records, NDArray[np.int64], tuple[str, ...]]:
        """The records that are validated on, int64 numbers of those that are, and the classes."""
        assert self.val is not None
        return self.val, np.arange(len(self.val)) if self.val_ids is None else self.val_ids, self.classes

    def about(self) -> dict[str, Any]:
        """Describe the data for a run's first event."""
        rejected = () if self.train.card is None else self.train.card.rejected
        return {
            "train": str(self.train.path),
            "train_digest": self.train.digest,
            "num_train": self.num_train,
            "val": None if self.val is None else str(self.val.path),
            "val_digest": None if self.val is None else self.val.digest,
            "num_val": self.num_val,
            "held_out": self.held_out,
            "classes": list(self.classes),
            "channels": self.train.channels,
            "largest_side": self.train.largest_side,
            "num_rejected": len(rejected),
            "rejected": [list(file) for file in rejected[:MOST_REJECTED]],
        }

    def close(self) -> None:
        self.train.close()
        if self.val is not None and self.val is not self.train:
            self.val.close()


@dataclass(frozen=True)
class Facts:
    """What defaults are chosen by: images, classes, channels, and pixels of the longest side."""

    num_images: int
    num_classes: int
    channels: int
    largest_side: int


def look(
    data: Data,
    *,
    say: Callable[[str], None] = lambda message: None,
    progress: Callable[[int, int], None] | None = None,
) -> Facts:
    """Open what a recipe names, packing it if need be, and return the facts of the training data. Raises DataError."""
    prepare = partial(prepare_records, one_class=True, shorter_side=packed_side(data.size), say=say, progress=progress)
    train = _prepare_train(data, prepare).train
    if data.val is not None:
        _prepare_val(data, data.val, train, prepare)
    with open_records(train) as opened:
        _require_classes(opened)
        return Facts(len(opened), len(opened.classes), opened.channels, opened.largest_side)


def open_data(data: Data, *, seed: int, say: Callable[[str], None] = lambda message: None) -> DataSets:
    """Open what a recipe names; all but record files is packed once into the cache, and ``say`` is told so.

    Raises:
        DataError: nothing there, class lists that differ, fewer than two classes, label vectors.
    """
    # That an earlier copy is used is no news to a run, whose first event names it.
    prepare = partial(prepare_records, one_class=True, shorter_side=packed_side(data.size), say=say, say_reused=False)
    prepared = _prepare_train(data, prepare)
    train = open_records(prepared.train)
    _require_classes(train)
    require_outputs(train, len(train.classes), of="its card")
    counts = np.bincount(train.labels, minlength=len(train.classes))
    if empty := [train.classes[number] for number in np.flatnonzero(counts == 0).tolist()]:
        subject = f"class {empty[0]} has" if len(empty) == 1 else f"{len(empty):,} classes ({few(empty)}) have"
        say(f"{subject} no training images: the model cannot learn to name them")
    val_path = prepared.val
    if data.val is not None:
        val_path = _prepare_val(data, data.val, train.path, prepare).only("val")
    if val_path is not None:
        val = open_records(val_path)
        _require_same_classes(train, val)
        require_outputs(val, len(train.classes), of=str(train.path))
        return DataSets(train, val, None, None, train.classes, held_out=False)
    if data.holdout == 0:
        return DataSets(train, None, None, None, train.classes, held_out=False)
    train_ids, val_ids = split_by_fraction(train.labels, fraction=data.holdout, seed=seed)
    if not len(val_ids):
        raise DataError(f"{train.path} has one image of each class: none can be held out; give --val DATA")
    say(
        f"no validation data given: {len(val_ids):,} of {len(train):,} images ({data.holdout:.0%} of each class)"
        " are held out (--val DATA to choose your own)"
    )
    return DataSets(train, train, train_ids, val_ids, train.classes, held_out=True)


def _prepare_train(data: Data, prepare: Callable[..., Prepared]) -> Prepared:
    classes = None if data.classes is None else Path(data.classes)
    return prepare(data.train, classes=classes, root=data.root, labels=data.labels)


def _prepare_val(data: Data, val: str | Path, train: Path, prepare: Callable[..., Prepared]) -> Prepared:
    """Prepare the validation data, with the classes that were named, else those of the training data's card."""
    card = record_files(train)[0].with_suffix(".json") if data.classes is None else Path(data.classes)
    root = data.root if Path(val).suffix.lower() in LISTS else None  # where paths in it start, as the training data's
    return prepare(val, classes=card if card.exists() else None, only="val", root=root)


def open_records(path: Path) -> Records:
    """Open one record file whose images have one class each. Raises DataError."""
    opened = Records.open(path)
    try:
        opened.require_images()
    except DataError:
        opened.close()
        raise
    if opened.labels.ndim != 1:
        shape = "x".join(str(n) for n in opened.labels.shape)
        opened.close()
        raise DataError(f"{path} has label vectors ({shape}): training and evaluation need one class for each image")
    return opened


def _require_classes(train: Records) -> None:
    if len(train.classes) < 2:
        named = ", ".join(train.classes) or "none"
        raise DataError(f"{train.path} has {len(train.classes)} class ({named}): a classifier needs at least two")


def require_outputs(opened: Records, num_classes: int, *, of: str) -> None:
    """Refuse labels for which a model of ``num_classes``, those ``of`` something, has no output. Raises DataError."""
    largest = int(opened.labels.max(initial=0))
    if largest >= num_classes:
        raise DataError(f"{opened.path} has label {largest}, and {of} has {num_classes} classes (from 0 on)")


def _require_same_classes(train: Records, val: Records) -> None:
    if train.card is None or val.card is None or train.classes == val.classes:
        return

    def few(names: set[str]) -> str:
        return ", ".join(sorted(names)[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")

    in_train, in_val = set(train.classes), set(val.classes)
    differences = [f"only in training: {few(in_train - in_val)}"] if in_train - in_val else []
    differences += [f"only in validation: {few(in_val - in_train)}"] if in_val - in_train else []
    raise DataError(
        f"{train.path} and {val.path} have different class lists"
        f" ({'; '.join(differences) or 'the same names in another order'}):"
        f" pack the validation images again with --classes {record_files(train.path)[0].with_suffix('.json')}"
    )


@dataclass(frozen=True)
class DeviceBatch:
    """A batch on the device: images uint8 [B, H, W, C], labels int64 [B]; and the host's wait for the loader."""

    images: torch.Tensor
    labels: torch.Tensor
    wait_seconds: float


def random_batch(n: int, shape: tuple[int, int, int], device: torch.device, *, num_classes: int = 1) -> DeviceBatch:
    """Draw a batch of ``n`` random images of height, width and channels, the same each time, and their labels."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (n, *shape), dtype=torch.uint8, generator=generator)
    labels = torch.randint(0, num_classes, (n,), generator=generator)
    return DeviceBatch(images.to(device), labels.to(device), 0.0)


def load(batches: Iterable[Batch], device: torch.device, clock: Clock | None = None) -> Iterator[DeviceBatch]:
    """Yield each batch on the device; ``clock``, if there is one, counts the wait and the transfer.

    On a CPU the tensors are the loader's own buffers, not copies. On a GPU the next batch is copied from pinned
    memory, or gathered from images that are there already, on a stream of its own while the current one is used.
    """
    clock = clock or Clock(time.perf_counter())
    waits = _wait_for_each(batches, clock)
    if device.type == "cuda":
        yield from _load_ahead(waits, device, clock)
        return
    for batch, seconds in waits:
        yield DeviceBatch(_images(batch, device), torch.from_numpy(batch.labels), seconds)


def _images(batch: Batch, device: torch.device) -> torch.Tensor:
    if isinstance(batch, ResidentBatch):
        return batch.gather()
    return torch.from_numpy(batch.images).to(device, non_blocking=True)


def _wait_for_each(batches: Iterable[Batch], clock: Clock) -> Iterator[tuple[Batch, float]]:
    """Yield each batch with the seconds of the wait for it."""
    iterator = iter(batches)
    while True:
        clock.to("input")
        began = time.perf_counter()
        batch = next(iterator, None)
        seconds = time.perf_counter() - began
        clock.to("host")
        if batch is None:
            return
        yield batch, seconds
        del batch  # the buffer may go back to the pool before the next one is asked for


def _load_ahead(waits: Iterator[tuple[Batch, float]], device: torch.device, clock: Clock) -> Iterator[DeviceBatch]:
    """Yield each batch when the copy of the next one has begun."""
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    copying: deque[tuple[Any, Batch]] = deque()

    def start() -> tuple[DeviceBatch, Any] | None:
        waited = next(waits, None)
        if waited is None:
            return None
        batch, seconds = waited
        clock.to("transfer")
        with torch.cuda.stream(stream):
            images = _images(batch, device)
            labels = torch.from_numpy(batch.labels).to(device, non_blocking=True)
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(stream)
        copying.append((done, batch))  # the pinned buffer must outlive its copy
        clock.to("host")
        return DeviceBatch(images, labels, seconds), done

    coming = start()
    while coming is not None:
        loaded, done = coming
        torch.cuda.current_stream(device).wait_event(done)
        for tensor in (loaded.images, loaded.labels):
            tensor.record_stream(torch.cuda.current_stream(device))
        while copying and copying[0][0].query():
            copying.popleft()
        coming = start()
        yield loaded
