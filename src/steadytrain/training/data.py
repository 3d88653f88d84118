"""The data sets of a run, opened and checked against each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from steadytrain.config import Data
from steadytrain.data.loader import packed_side
from steadytrain.data.packing.prepare import Prepared
from steadytrain.data.packing.prepare import prepare as prepare_records
from steadytrain.data.recordio.reader import Records
from steadytrain.data.recordio.shards import record_files
from steadytrain.data.sources.split import hold_out
from steadytrain.errors import DataError

LISTS = (".lst", ".csv", ".tsv", ".txt")
TOLD_REJECTED = 100
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

    def about(self) -> dict[str, Any]:
        """What a run's first event says of its data."""
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
            "num_rejected": len(rejected),
            "rejected": [list(one) for one in rejected[:TOLD_REJECTED]],
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
    """Open what a recipe names, packing it if need be, and say what the training data are. Raises DataError."""
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
    train_ids, val_ids = hold_out(train.labels, fraction=data.holdout, seed=seed)
    if not len(val_ids):
        raise DataError(f"{train.path} has one image of each class: none can be held out; give --val DATA")
    say(
        f"no validation data given: {len(val_ids)} of {len(train)} images ({data.holdout:.0%} of each class)"
        " are held out (--val DATA to choose your own)"
    )
    return DataSets(train, train, train_ids, val_ids, train.classes, held_out=True)


def _prepare_train(data: Data, prepare: Callable[..., Prepared]) -> Prepared:
    classes = None if data.classes is None else Path(data.classes)
    return prepare(data.train, classes=classes, root=data.root, labels=data.labels)


def _prepare_val(data: Data, val: str, train: Path, prepare: Callable[..., Prepared]) -> Prepared:
    """The validation data; where they are a list or a table, its paths start where those of the training data do."""
    root = data.root if Path(val).suffix.lower() in LISTS else None
    return prepare(val, classes=_val_classes(data, train), only="val", root=root)


def _val_classes(data: Data, train: Path) -> Path | None:
    """The card whose class list the validation data must have: the one that was named, else the training data's."""
    card = record_files(train)[0].with_suffix(".json") if data.classes is None else Path(data.classes)
    return card if card.exists() else None


def open_records(path: Path) -> Records:
    """Open one record file whose images have one class each. Raises DataError."""
    opened = Records.open(path)
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
    """Refuse labels that a model for ``num_classes``, those ``of`` something, has no output for. Raises DataError."""
    largest = int(opened.labels.max(initial=0))
    if largest >= num_classes:
        raise DataError(f"{opened.path} has label {largest}, and {of} has {num_classes} classes (from 0 on)")


def _require_same_classes(train: Records, val: Records) -> None:
    if train.card is None or val.card is None or train.classes == val.classes:
        return
    here, there = set(train.classes), set(val.classes)
    told = [f"only in training: {_few(here - there)}"] if here - there else []
    told += [f"only in validation: {_few(there - here)}"] if there - here else []
    why = "; ".join(told) or "the same names in another order"
    raise DataError(
        f"{train.path} and {val.path} have different class lists ({why}):"
        f" pack the validation images again with --classes {record_files(train.path)[0].with_suffix('.json')}"
    )


def _few(names: set[str]) -> str:
    shown = sorted(names)[:5]
    return ", ".join(shown) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
