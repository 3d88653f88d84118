"""The data sets of a run, and their batches on the device."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from steadytrain.config import Data, Model
from steadytrain.config.batches import Batches
from steadytrain.config.strangers import ADDRESS_KEYS
from steadytrain.data.checking.findings import FEW_TO_MEASURE, few_to_measure
from steadytrain.data.loader import Batch, ResidentBatch, packed_side
from steadytrain.data.packing.prepare import Prepared
from steadytrain.data.packing.prepare import prepare as prepare_records
from steadytrain.data.recordio.card import RunClasses, card_for, read_classes, record_files
from steadytrain.data.recordio.reader import Records
from steadytrain.data.results.scores import UNEVEN, class_ratio
from steadytrain.data.sources.groups import decided_classes, make_hashes, say_whole_classes
from steadytrain.data.sources.labels import require_zero_or_one, say_doubt
from steadytrain.data.sources.layout import TABLES
from steadytrain.data.sources.listing import Labels
from steadytrain.data.storage.store import refuse_inner_addresses
from steadytrain.data.transforms.operations import to_device
from steadytrain.errors import DataError
from steadytrain.events import Started
from steadytrain.format import OnProgress, Say, count, few, percent, whole_number
from steadytrain.machine.process import StartPart, StartTimer
from steadytrain.models import usual_size
from steadytrain.run import Run
from steadytrain.training.clock import Clock
from steadytrain.training.split import Split, choose_split, count_seen, find_groups, group_unseen

Part = Literal["train", "val", "test"]

_DIGITS = 10
MOST_REJECTED = 100
"""Rejected files that a run's first event names; the card names them all."""


@dataclass(frozen=True)
class DataSets:
    """The data of a run, for training and validation, and for the test at its end.

    Args:
        train, val, test: opened record files; ``val`` is None without validation, ``test`` without a test.
        train_ids, val_ids: int64 record numbers to use; None uses all.
        classes: names, in the order of the labels; of images with several labels, the names of these.
        held_out: whether ``val_ids`` were held out of the training file.
        split: what was held out, where that was.
        grouping: groups the records of a part: of ``train`` where nothing was held out, ``val`` or ``test``.
    """

    train: Records
    val: Records | None
    train_ids: NDArray[np.int64] | None
    val_ids: NDArray[np.int64] | None
    classes: tuple[str, ...]
    held_out: bool
    split: Split | None = None
    grouping: Callable[[Records, Part], NDArray[np.int64] | None] = lambda records, part: None
    test: Records | None = None
    shorter_side: int | None = None

    @cached_property
    def groups(self) -> NDArray[np.int64] | None:
        """int64 [N], the group of each record of ``train``, by its number; None: each image stands alone.

        Copies of an image, near copies and what the user keeps together: no split may part them.
        """
        return self.grouping(self.train, "train") if self.split is None else self.split.groups

    @cached_property
    def val_groups(self) -> NDArray[np.int64] | None:
        """int64 [num_val], the group of each validation image; None: each stands alone."""
        if self.val is self.train:
            return None if self.groups is None else self.groups[self.val_ids]
        return None if self.val is None else self.grouping(self.val, "val")

    @cached_property
    def test_groups(self) -> NDArray[np.int64] | None:
        """Groups of the test images, as :attr:`val_groups`."""
        return None if self.test is None else self.grouping(self.test, "test")

    @cached_property
    def num_train(self) -> int:
        return len(self.train) if self.train_ids is None else len(self.train_ids)

    @property
    def num_val(self) -> int:
        if self.val is None:
            return 0
        return len(self.val) if self.val_ids is None else len(self.val_ids)

    @property
    def num_test(self) -> int:
        return 0 if self.test is None else len(self.test)

    @cached_property
    def num_test_seen(self) -> int:
        """Test images that are training or validation images, as far as hashes are known."""
        seen = [self.train] if self.val in (None, self.train) else [self.train, self.val]
        return 0 if self.test is None else count_seen(self.test, *seen) or 0

    @property
    def num_labels(self) -> int | None:
        """Labels that an image may have several of; None where each has one class."""
        return len(self.classes) if self.train.labels.ndim > 1 else None

    @property
    def is_unnamed(self) -> bool:
        """Return whether classes are called by numbers, their places in records that name none."""
        return self.num_labels is None and not self.train.named_classes and self.classes == self.train.classes

    @property
    def class_counts(self) -> NDArray[np.int64]:
        """Training images of each class, or with each label: int64[K]."""
        return self._count(self.train, self.train_ids)

    @property
    def class_ratio(self) -> float:
        """The ratio of the largest class to the smallest, of training or validation images; 1 of several labels."""
        parts = [(self.train, self.train_ids), (self.val, self.val_ids)] if self.num_labels is None else []
        return max((class_ratio(self._count(part, ids).tolist()) for part, ids in parts if part is not None), default=1)

    def _count(self, records: Records, ids: NDArray[np.int64] | None) -> NDArray[np.int64]:
        if ids is None:
            counts = records.label_counts
            return np.pad(counts, (0, max(0, len(self.classes) - len(counts))))
        labels = records.labels[ids]
        if labels.ndim > 1:
            return np.asarray((labels > 0).sum(0), np.int64)
        return np.bincount(np.asarray(labels, np.int64), minlength=len(self.classes)).astype(np.int64)

    @property
    def validated(self) -> tuple[Records, NDArray[np.int64], tuple[str, ...]]:
        """The records that are validated on, int64 numbers of those that are, and the classes."""
        assert self.val is not None
        return self.val, np.arange(len(self.val)) if self.val_ids is None else self.val_ids, self.classes

    def about(self) -> dict[str, Any]:
        """Describe the data for a run's first event."""
        card, test = self.train.card, self.test
        rejected, settings = ((), {}) if card is None else (card.rejected, card.settings)
        return {
            "train": self.train.name,
            "train_digest": self.train.digest,
            "num_train": self.num_train,
            "val": None if self.val is None else self.val.name,
            "val_digest": None if self.val is None else self.val.digest,
            "num_val": self.num_val,
            **({} if test is None else {"test": test.name, "test_digest": test.digest, "num_test": len(test)}),
            **({"class_ratio": self.class_ratio} if self.class_ratio >= UNEVEN else {}),
            "held_out": self.held_out,
            "split": "" if self.split is None else self.split.digest,
            "classes": list(self.classes),
            "class_counts": self.class_counts.tolist(),
            "multi_label": self.num_labels is not None,
            "channels": self.train.channels,
            "largest_side": self.train.largest_side,
            "shorter_side": self.shorter_side,
            "restart_markers": bool(settings.get("restart")) and settings.get("encoding") != "pass",
            "num_rejected": len(rejected),
            "rejected": [list(file) for file in rejected[:MOST_REJECTED]],
        }

    def close(self) -> None:
        for records in (self.train, self.val, self.test):
            if records is not None:
                records.close()  # twice, where images were held out, which is fine


@dataclass(frozen=True)
class OpenedData:
    """The record files that a recipe names, packed where need be, and open: what its defaults and its run begin with.

    Args:
        named: what the recipe says of the data.
        shorter_side: at which images are packed, in pixels.
        train, val, test: the open records; ``val`` and ``test`` are None where there are no such images.
        remarks: lines about the source that a user should know.
        cost: the part of a start that finding, packing and opening them took.
    """

    named: Data
    shorter_side: int
    train: Records
    val: Records | None
    remarks: tuple[str, ...]
    cost: StartPart
    test: Records | None = None

    def suits(self, data: Data, shorter_side: int) -> bool:
        """Return whether another recipe's data, packed at this side, would be these."""
        return self.shorter_side == shorter_side and _what_is_opened(self.named) == _what_is_opened(data)

    def close(self) -> None:
        """Let go of the files; closing twice is fine."""
        for records in (self.train, self.val, self.test):
            if records is not None:
                records.close()


def _what_is_opened(data: Data) -> tuple[object, ...]:
    paths = (data.train, data.val, data.test, data.root, data.labels, data.classes)
    columns = (data.path_column, data.label_column, data.split_column, data.zip_names)
    return *(None if path is None else str(path) for path in paths), *columns


def side_to_pack(data: Data, model: Model | None, begun: Started | None) -> int:
    """Return the shorter side at which images are packed: what the network asks for, or that of a run that began."""
    # Runs of version 0.2, which name no side, were packed without a look at the network.
    if begun is not None and (side := begun.data.get("shorter_side")):
        return int(side)
    return packed_side(data.size or (None if model is None or begun is not None else usual_size(model)))


def open_named(
    data: Data,
    model: Model | None = None,
    *,
    begun: Started | None = None,
    say: Say = lambda message: None,
    remark: Say = lambda message: None,
    say_reused: bool = False,
    progress: OnProgress | None = None,
) -> OpenedData:
    """Open what a recipe names; all but record files is packed once into the cache, and ``say`` is told so.

    Args:
        data, model: of the recipe.
        begun: how the run began that is taken up again: what can be read otherwise by now is read as it was then.
        say: is called with each line on what is done.
        remark: is called at once with those that are kept as ``remarks``, where the source has to be packed.
        say_reused: whether it is worth a line that an earlier copy is used.
        progress: as of :func:`~steadytrain.data.packing.pack.pack`.

    Raises:
        DataError: nothing there, fewer than two classes, labels that nothing can learn.
        RecipeError: an address within this machine or its network, which only a file names.
    """
    refuse_inner_addresses(
        {key: getattr(data, name) for key in ADDRESS_KEYS if (name := key.partition(".")[2]) in data.from_file}
    )
    side = side_to_pack(data, model, begun)
    open_as = partial(_open_as, side=side, say=say, remark=remark, say_reused=say_reused, progress=progress)
    if begun is None:
        return open_as(data, is_new=True)
    if data.classes is not None or Path(data.train).suffix == ".rec":
        return validate_as_begun(open_as(data), begun)
    return _open_as_begun(data, begun, open_as)


def _began_with_split(data: Data, begun: Started | None) -> bool:
    """Return whether a run began on a source with a part that validates."""
    has_val = begun is not None and begun.data.get("val_digest") is not None and not begun.data.get("held_out")
    return data.val is None and has_val


def validate_as_begun(opened: OpenedData, begun: Started | None) -> OpenedData:
    """Return data whose test images validate where a run of 0.2 began so: its split stays."""
    if opened.val is not None or opened.test is None or not _began_with_split(opened.named, begun):
        return opened
    line = f"the test images of {opened.named.train} validate, as when this run began: no test is left for its end"
    return replace(opened, val=opened.test, test=None, remarks=(*opened.remarks, line))


def _open_as_begun(data: Data, begun: Started, open_as: Callable[..., OpenedData]) -> OpenedData:
    """Open data as a new run would or, where that refuses them or reads other classes or splits, as the run began.

    What one version takes for classes, a later one may take for splits or ask about. Whether the images are still the
    same is for the caller to compare, by their digests.
    """
    classes = RunClasses(() if begun.is_multi_label else begun.data.get("classes", ()))
    is_split = _began_with_split(data, begun)

    def is_same(opened: OpenedData) -> bool:
        is_new = data.test is None and opened.test is not None and "test_digest" not in begun.data
        has_splits = data.val is None and (opened.val is not None or is_new)
        return classes in ((), opened.train.class_list) and has_splits == is_split

    opened: OpenedData | None = None
    refusal: DataError | None = None
    try:
        opened = validate_as_begun(open_as(data), begun)
        if is_same(opened):
            return opened
    except DataError as error:
        refusal = error
    for split in ("none", None) if data.split_column is None and not is_split else (data.split_column,):
        with suppress(DataError):
            again = validate_as_begun(open_as(replace(data, split_column=split), classes=classes or None), begun)
            if is_same(again):
                if opened is not None:
                    opened.close()
                line = f"{data.train} is read as when this run began, when its classes and splits were decided"
                return replace(again, named=data, remarks=(*again.remarks, line))
            again.close()
    if opened is None:
        assert refusal is not None
        raise refusal
    return opened


def _open_as(
    data: Data, *, side: int, classes: RunClasses | None = None, is_new: bool = False, remark: Say, **options: Any
) -> OpenedData:
    """Open what a recipe names, with a class list where it names none; options as of :func:`open_named`."""
    timer = StartTimer()
    remarks: list[str] = []

    def keep(line: str) -> None:
        remarks.append(line)
        remark(line)

    prepare = partial(prepare_records, trainable=True, shorter_side=side, remark=keep, **options)
    with ExitStack() as opened:
        prepared = _prepare_train(data, classes, prepare)
        train = opened.enter_context(open_records(prepared.train, remarks.append))
        _require_classes(train, str(data.train))

        def open_part(named: str | Path | None, part: Path | None, split: Literal["val", "test"]) -> Records | None:
            if named is not None:
                part = _prepare_other(data, named, split, train, prepare).only(split)
            return None if part is None else opened.enter_context(open_records(part, remarks.append))

        val, test = open_part(data.val, prepared.val, "val"), open_part(data.test, prepared.test, "test")
        if val is not None and test is not None and len(val) == len(test) and val.digest == test.digest:
            test = None  # the user validates with them
            if data.test is not None:
                remarks.append(f"{data.test} has the validation images, by which weights are chosen: no test is made")
        if is_new and val is None and data.holdout != 0:
            make_hashes(train, options["progress"])
        opened.pop_all()
        return OpenedData(data, side, train, val, tuple(dict.fromkeys(remarks)), timer.part(), test)


def open_data(
    data: Data, model: Model | None = None, *, seed: int, run: Run | None = None, say: Say = lambda message: None
) -> DataSets:
    """Open what a recipe names, as :func:`open_named` does, and make its data sets. Raises what both raise.

    ``run``: that they were, or are to be, the data of.
    """
    opened = open_named(data, model, begun=None if run is None else run.progress().started, say=say)
    try:
        return data_sets(opened, data, seed=seed, run=run, say=say)
    except BaseException:
        opened.close()
        raise


def data_sets(
    opened: OpenedData, data: Data, *, seed: int, run: Run | None = None, say: Say = lambda message: None
) -> DataSets:
    """Choose classes and the images that validate of open records, and say their remarks; the sets close them.

    Args:
        opened: the records.
        data: of the recipe.
        seed: of the recipe: chooses what is held out.
        run: that keeps what is held out; None: nothing is kept.
        say: takes lines about the data.

    Raises:
        DataError: class lists that differ, labels that no output is for, or none that can be held out.
    """
    train, val, side = opened.train, opened.val, opened.shorter_side
    for remark in opened.remarks:
        say(remark)
    classes = _class_list(data, train, say)
    require_outputs(train, len(classes), of="its card" if classes == train.class_list else str(data.classes))
    counts = DataSets(train, None, None, None, classes, held_out=False).class_counts
    if empty := [classes[number] for number in np.flatnonzero(counts == 0).tolist()]:
        subject = f"class {empty[0]} has" if len(empty) == 1 else f"{len(empty):,} classes ({few(empty)}) have"
        say(f"{subject} no training images: the model cannot learn to name them")
    if train.labels.ndim > 1 and bool((train.labels.sum(1) == 1).all()):
        say(
            f"each image has exactly one of the {len(classes):,} labels, which are learned one by one all the same: a"
            " table with one column 'label' makes them classes, of which one is chosen"
        )
    for part, named, records in (("validation", data.val, val), ("test", data.test, opened.test)):
        if records is not None:
            source = records.name if named is None else str(named)
            _require_same_classes(train, records, classes, source, say, part=part)
            require_outputs(records, len(classes), of=str(train.path))
    if opened.test is not None:
        images = count(len(opened.test), "test image is", "test images are")
        say(f"{images} left alone until the end of the run, where the best weights are evaluated on them once")
    if val is not None:
        _say_unmeasured(val.labels, counts, classes, say)
    begun = None if run is None else run.progress().started
    if begun is None:
        _say_seen("validation", val, [train], say)
        _say_seen("test", opened.test, [train] if val is None else [train, val], say)
    is_earlier = begun is not None and "split" not in begun.data  # and knew no groups
    options: dict[str, Any] = {} if is_earlier else {"grouping": partial(_group_part, data)}
    if val is not None or data.holdout == 0:
        return DataSets(train, val, None, None, classes, held_out=False, test=opened.test, shorter_side=side, **options)
    split = choose_split(train, data, seed=seed, run=run, say=say)
    if not len(split.val_ids):
        each = "one image" if split.groups is None else "one group of images"
        raise DataError(f"{data.train} has {each} of each class: none can be held out; give --val DATA")
    wanted, share = percent(data.share_held_out(len(train)), 0), percent(len(split.val_ids) / len(train), 0)
    share_words = f"{wanted}{' of each class' * (train.labels.ndim == 1)}"
    if split.groups is not None:
        share_words += ", by whole groups" if share == wanted else f" was wanted, whole groups come to {share}"
    say(
        f"no validation data given: {len(split.val_ids):,} of {len(train):,} images ({share_words}) are held out"
        " (--val DATA to choose your own)"
    )
    say_whole_classes(train.labels, split.groups, classes, say)
    _say_unmeasured(train.labels[split.val_ids], counts, classes, say)
    options |= {"split": split, "test": opened.test, "shorter_side": side}
    return DataSets(train, train, split.train_ids, split.val_ids, classes, held_out=True, **options)


def _group_part(data: Data, records: Records, part: Part) -> NDArray[np.int64] | None:
    """Group the records of a part of the data by their images and by the source that they come from."""
    if part == "train":
        return find_groups(records, data)
    named = data.val if part == "val" else data.test
    return group_unseen(records, data if named is None else _as_train(data, named))


def _say_seen(part: str, records: Records | None, others: Sequence[Records], say: Say) -> None:
    """Say how many validation or test images are training images, or validation images."""
    if records is not None and (seen := count_seen(records, *others)):
        what = "training images" if len(others) == 1 else "training or validation images"
        say(
            f"{seen:,} of {count(len(records), f'{part} image')} are {what} (the same file or bytes): accuracy on them"
            " says nothing about new images; steady check names them"
        )


def _class_list(data: Data, train: Records, say: Callable[[str], None]) -> tuple[str, ...]:
    """Return the names of the classes: the training data's, or for records that name none those that were named."""
    if data.classes is None or train.labels.ndim > 1 or train.named_classes:
        return train.class_list
    classes = read_classes(data.classes)
    match_places(train, (), classes, is_unnamed=False, of=str(data.classes), source=str(data.train), say=say)
    return classes


def _say_unmeasured(
    labels: Labels, train_counts: NDArray[np.int64], classes: tuple[str, ...], say: Callable[[str], None]
) -> None:
    """Say which classes no validation image has, and that so few images measure little."""
    if labels.ndim > 1:
        if unseen := np.flatnonzero(~(labels > 0).any(0)).tolist():
            subject = count(len(unseen), "label has", "labels have")
            say(f"{subject} no validation image, and no part in mAP: {few([classes[number] for number in unseen])}")
        return
    is_seen = np.bincount(labels.astype(np.int64), minlength=len(classes))[: len(classes)] > 0
    if unseen := np.flatnonzero(~is_seen & (train_counts > 0)).tolist():
        is_one, names = len(unseen) == 1, few([classes[number] for number in unseen])
        subject = f"class {names} has" if is_one else f"{len(unseen):,} classes ({names}) have"
        single = ", and one image in all" if (train_counts[unseen] == 1).all() else ""
        say(
            f"{subject} no validation image{single}, so {'its' if is_one else 'their'} accuracy is not measured: add"
            " images, or give --val DATA"
        )
    if words := few_to_measure(len(labels)):
        say(
            f"{count(len(labels), 'validation image')} cannot measure accuracy ({words}): add images, or give --val"
            f" DATA, with {FEW_TO_MEASURE} or more"
        )


def _prepare_train(data: Data, classes: RunClasses | None, prepare: Callable[..., Prepared]) -> Prepared:
    class_list = decided_classes(classes if data.classes is None else Path(data.classes), data.group_by)
    if _is_val_alone_a_table(data):  # where paths start, and which columns count, is then said of that
        return prepare(data.train, classes=class_list, zip_names=data.zip_names)
    columns = {"path_column": data.path_column, "label_column": data.label_column, "split_column": data.split_column}
    return prepare(
        data.train, classes=class_list, root=data.root, labels=data.labels, zip_names=data.zip_names, **columns
    )


def _is_val_alone_a_table(data: Data) -> bool:
    return data.labels is None and _is_table(data.val) and not _is_table(data.train)


def _is_table(source: str | Path | None) -> bool:
    return source is not None and Path(source).suffix.lower() in (*TABLES, ".txt")


def _as_train(data: Data, place: str | Path) -> Data:
    """Name validation or test data as if they were trained on.

    A table's paths start where those of the training data do, and its columns are called alike.
    """
    has_split = _is_val_alone_a_table(data) or data.split_column == "none"
    data = replace(data, train=place, labels=None, split_column=data.split_column if has_split else None)
    return data if _is_table(place) else replace(data, root=None, path_column=None, label_column=(), split_column=None)


def _prepare_other(
    data: Data, place: str | Path, split: Literal["val", "test"], train: Records, prepare: Callable[..., Prepared]
) -> Prepared:
    """Prepare validation or test data, with the classes that were named, else those of the training data."""
    card = record_files(train.path)[0].with_suffix(".json") if data.classes is None else Path(data.classes)
    other, options = _as_train(data, place), dict[str, Any](only=split)
    options |= {name: getattr(other, name) for name in ("root", "path_column", "label_column", "split_column")}
    options |= {"zip_names": data.zip_names}
    if _is_table(place):
        options |= {"trained_column": "" if train.card is None else train.card.label_column}
    named = train.named_classes or None  # by the list beside records that have no card
    prepared = prepare(place, classes=card if card.exists() else named, **options)
    found = None if named or card.exists() else card_for(prepared.only(split))
    if found is not None and Path(place).suffix != ".rec" and are_values(found.classes, len(train.classes), place):
        return prepare(place, classes=train.classes, **options)
    return prepared


def are_values(names: Sequence[str], num_classes: int, source: str | Path) -> bool:
    """Tell whether the names of a source's classes are some of the numbers of ``num_classes`` places.

    Those of a table are, and those of folders where these are sorted as numbers are: up to 10.
    """
    numbers = [number for name in names if (number := whole_number(name)) is not None and name == str(number)]
    are_numbers = len(numbers) == len(names) > 0 and max(numbers) < num_classes
    return are_numbers and len(names) < num_classes and (_is_table(source) or num_classes <= _DIGITS)


def open_records(path: Path, say: Callable[[str], None] = lambda message: None) -> Records:
    """Open record files whose images have one class each, or several labels of 0 or 1. Raises DataError."""
    opened = Records.open(path)
    try:
        opened.require_images(say)
        require_zero_or_one(opened.labels, where=str(path))
        opened.say_unkept(say)
    except DataError:
        opened.close()
        raise
    return opened


def _require_classes(train: Records, source: str) -> None:
    names: Sequence[str] = train.class_list
    if train.labels.ndim == 1:
        names = [names[number] for number in np.flatnonzero(train.label_counts).tolist()]
    if len(names) < 2:
        raise DataError(
            f"{source} has images of {len(names) or 'no'} class{f' ({names[0]})' if names else ''}: a classifier needs"
            " at least two"
        )


def require_outputs(opened: Records, num_classes: int, *, of: str) -> None:
    """Refuse labels for which a model of ``num_classes``, those ``of`` something, has no output. Raises DataError."""
    largest = int(opened.labels.max(initial=0)) if opened.labels.ndim == 1 else opened.labels.shape[1] - 1
    if largest >= num_classes:
        raise DataError(f"{opened.path} has label {largest}, and {of} has {num_classes} classes (from 0 on)")


def _require_same_classes(
    train: Records, val: Records, classes: tuple[str, ...], source: str, say: Callable[[str], None], *, part: str
) -> None:
    kinds = [
        "several labels for each image" if opened.labels.ndim > 1 else "one class for each image"
        for opened in (train, val)
    ]
    if kinds[0] != kinds[1]:
        raise DataError(f"{train.path} has {kinds[0]} and {val.path} {kinds[1]}: give both of one kind")
    if train.labels.ndim > 1 and None in (train.card, val.card):
        return
    names, is_unnamed = val.class_list, not train.named_classes and classes == train.classes
    if train.labels.ndim == 1:
        names = val.names_among(classes)
        where = {"of": "the training data", "source": source}
        if match_places(val, names, classes, is_unnamed=is_unnamed, **where, say=say):
            return
        if val.card is None and names == classes[: len(names)]:
            return
    if names == classes:
        return
    only_train, only_val = sorted(set(classes) - set(names)), sorted(set(names) - set(classes))
    differences = [f"only in training: {few(only_train)}"] if only_train else []
    differences += [f"only in {part}: {few(only_val)}"] if only_val else []
    card = "CARD, that of the packed training images"
    if train.card is not None:
        card = str(record_files(train.path)[0].with_suffix(".json"))
    raise DataError(
        f"{train.path} and {val.path} have different class lists"
        f" ({'; '.join(differences) or 'the same names in another order'}):"
        f" pack the {part} images again with --classes {card}"
    )


def match_places(
    records: Records,
    names: tuple[str, ...],
    classes: tuple[str, ...],
    *,
    is_unnamed: bool,
    of: str,
    source: str,
    say: Callable[[str], None],
) -> bool:
    """Tell whether labels are places in a class list, because they or the list have no names; ``say`` is told so.

    Args:
        records: whose labels they are, int64[N].
        names: of their classes; empty where nothing names them.
        classes: the class list.
        is_unnamed: these are numbers, the places of the labels in records that name no classes.
        of: what the list is of, for messages.
        source: what the records were made of, for messages.
        say: takes a line.

    Raises:
        DataError: the records name another number of classes than there are places.
    """
    if is_unnamed and names == classes and len(classes) > _DIGITS:
        say(
            f"{of} names no classes: the numbers in {source} are taken for its labels (10 is label 10; im2rec sorts"
            " folders by name, where 10 follows 1)"
        )
    if (names and not is_unnamed) or names == classes:
        return False
    if names and len(names) != len(classes):
        raise DataError(
            f"{of} names no classes, so that those of {source} can only be matched by their places, and it has"
            f" {len(classes):,} of them, not {len(names):,} ({few(names)}): put the .lst that im2rec made beside the"
            " records, or pack both from one source"
        )
    if names:
        pairs = few([f"{number} is {name}" for number, name in enumerate(names)], 3)
        say(f"{of} names no classes: those of {source} are taken in their order ({pairs})")
    elif not is_unnamed:
        used = np.unique(records.labels).astype(np.int64).tolist()
        pairs = few([f"{number} is {classes[number]}" for number in used if number < len(classes)], 3)
        say(f"{source} names no classes: its labels are places in the class list of {of} ({pairs})")
        say_doubt(source, classes, [number for number in used if number < len(classes)], say)
    return True


@dataclass(frozen=True)
class DeviceBatch:
    """A batch on the device: images uint8 [B, H, W, C], labels int64 [B], or float32 [B, L] of several for each image;
    and the host's wait for the loader.
    """

    images: torch.Tensor
    labels: torch.Tensor
    wait_seconds: float


def random_batch(
    n: int,
    shape: tuple[int, int, int],
    device: torch.device,
    *,
    num_classes: int = 1,
    num_labels: int | None = None,
) -> DeviceBatch:
    """Draw a batch of ``n`` random images of height, width and channels, the same each time, and their labels.

    ``num_labels``: of which each image has some; None: it has one of ``num_classes``.
    """
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (n, *shape), dtype=torch.uint8, generator=generator)
    if num_labels is None:
        labels = torch.randint(0, num_classes, (n,), generator=generator)
    else:
        labels = torch.randint(0, 2, (n, num_labels), generator=generator).float()
    return DeviceBatch(images.to(device), labels.to(device), 0.0)


def load(
    batches: Iterable[Batch], device: torch.device, clock: Clock | None = None, *, ahead: bool = True
) -> Iterator[DeviceBatch]:
    """Yield each batch on the device; ``clock``, if there is one, counts the wait and the transfer.

    On a CPU the tensors are the loader's own buffers, not copies. On a GPU the next batch is copied from pinned
    memory, or gathered from images that are there already, on a stream of its own while the current one is used.

    Args:
        ahead: ask for the next batch before the current one is used.
    """
    clock = clock or Clock(time.perf_counter())
    waits = _wait_for_each(batches, clock)
    if device.type == "cuda" and ahead:
        yield from _load_ahead(waits, device, clock)
        return
    for batch, seconds in waits:
        yield DeviceBatch(_images(batch, device), torch.from_numpy(batch.labels).to(device), seconds)


def join_batches(batches: Iterator[DeviceBatch], plan: Batches, step: int) -> Iterator[DeviceBatch]:
    """Make the batches of updates from ``step`` on of those of the first size, some in a row joined to one."""
    for update in itertools.count(step):
        parts = list(itertools.islice(batches, plan.size(update) // plan.stages[0].images))
        if not parts:
            return
        images, labels = [part.images for part in parts], [part.labels for part in parts]
        waited = sum(part.wait_seconds for part in parts)
        del parts
        yield DeviceBatch(torch.cat(images), torch.cat(labels), waited)
        del images, labels


def _images(batch: Batch, device: torch.device) -> torch.Tensor:
    if isinstance(batch, ResidentBatch):
        return batch.gather()
    images = torch.from_numpy(batch.images)
    return images if device.type == "cpu" else images.to(device, non_blocking=device.type == "cuda")


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
            labels = to_device(batch.labels, images)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record(stream)
        copying.append((copied, batch))  # the pinned buffer must outlive its copy
        clock.to("host")
        return DeviceBatch(images, labels, seconds), copied

    coming = start()
    while coming is not None:
        loaded, copied = coming
        current = torch.cuda.current_stream(device)
        current.wait_event(copied)
        for tensor in (loaded.images, loaded.labels):
            tensor.record_stream(current)
        while copying and copying[0][0].query():
            copying.popleft()
        coming = start()
        yield loaded
