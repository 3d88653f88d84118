"""Use restored models: evaluate them on a data set, or predict the classes of image files."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from itertools import islice
from pathlib import Path
from threading import Lock
from typing import Any, ParamSpec, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from steadytrain.data import filenames
from steadytrain.data.arrays import Ints
from steadytrain.data.filenames import expand, is_ignored, is_pattern
from steadytrain.data.images.decode import BadImageError, lost_in
from steadytrain.data.images.memory import file_bytes
from steadytrain.data.loader import Batch, ImageLoader, packed_side
from steadytrain.data.loader.task import at_least
from steadytrain.data.packing.memory import Samples, images_of, source_of
from steadytrain.data.packing.prepare import Prepared, prepare
from steadytrain.data.recordio.card import LabelNames
from steadytrain.data.recordio.reader import Records
from steadytrain.data.sources.labels import say_places
from steadytrain.data.sources.listing import Listing
from steadytrain.data.sources.unpacked import upright
from steadytrain.data.storage.local_files import read_patiently
from steadytrain.errors import DataError, InputError, RunError, read_errors
from steadytrain.files import Closing
from steadytrain.format import OnProgress, RowTable, Say, few, print_note
from steadytrain.models.class_names import Match, match_classes
from steadytrain.run import Run
from steadytrain.training import build
from steadytrain.training.data import are_values, load, match_places, open_data, open_records, require_outputs
from steadytrain.training.evaluation import Evaluation, evaluate_module, logits_of, write_per_image
from steadytrain.training.inference.heat_maps import draw, heat_maps
from steadytrain.training.inference.limits import Judge, Judgement, open_judge
from steadytrain.training.inference.trained import Trained, Which, class_names, read_class_file, rename_classes, restore
from steadytrain.training.memory import PassLimit

P = ParamSpec("P")


@dataclass(frozen=True)
class EvaluationData:
    """Images to evaluate a model on, and the model's output for each of their labels.

    Args:
        records: the images; closed by whoever uses them.
        ids: of the records to take; None: all.
        outputs: int64, the model's output for each label (-1 for a class without images); None: the label itself. Where
            an image may have several, the column of the data for each of the model's outputs.
        matched: how many classes were matched by ``name``, ``synset``, ``synonym``, ``number`` (a place in the class
            list) or ``file``; empty where the data have the model's class list.
        batch_size: images at a time, as the model's run evaluated its own data; None for other data.
        groups: int64, of each image, if any belong together.
    """

    records: Records
    ids: NDArray[np.int64] | None = None
    outputs: NDArray[np.int64] | None = None
    matched: Mapping[str, int] = field(default_factory=dict)
    batch_size: int | None = None
    groups: Ints | None = None

    def relabel(self, batch: Batch) -> Batch:
        """Replace the labels of a batch by the model's."""
        if self.outputs is None:
            return batch
        several = batch.labels.ndim > 1
        return replace(batch, labels=batch.labels[:, self.outputs] if several else self.outputs[batch.labels])

    @property
    def digest(self) -> str:
        """sha256 (hex) of the record files and of the ids in them."""
        ids = b"" if self.ids is None else self.ids.tobytes()
        return hashlib.sha256(self.records.digest.encode() + ids).hexdigest()


def evaluate(
    place: str | Path | Run | Trained,
    data: object = None,
    *,
    which: Which = "best",
    classes: str | Path | Sequence[str] | Mapping[str, str] | None = None,
    restrict: bool = False,
    batch_size: int | None = None,
    threads: int | None = None,
    progress: Callable[[int, int], object] | None = None,
    per_image: str | Path | None = None,
    threshold: float = 0.5,
    keep_logits: bool = False,
    path_column: str | None = None,
    label_column: str | Sequence[str] | None = None,
    root: str | Path | None = None,
    say: Say = print_note,
) -> Evaluation:
    """Evaluate a run, a weights file, an exported file or a pretrained model of timm on every image of a data set.

    The data may have fewer classes than the model, and other names for them: see
    :func:`steadytrain.models.class_names.match_classes`. A line on standard error says how many were matched, and how.

    Args:
        place: as for :func:`restore`, or what it returned.
        data: a record file, a folder, or whatever else ``pack`` takes; or images and labels in memory
            (:mod:`steadytrain.data.packing.memory`); None takes the run's own validation data.
        which: as for :func:`restore`.
        classes: as for :func:`restore`; or which class of the model (value) a class of the data (key) is, for those
            that are not matched by name, or a text file of both with a tab between.
        restrict: choose among the data's classes only, an easier task; by default among all outputs of the model.
        batch_size: images at a time; None: as the run evaluated its own data, else 128. Nothing but rounding depends
            on it.
        threads: of the loader; None chooses.
        progress: called with the images done so far, and all there are, after each batch.
        per_image: a CSV file to write, with a line for each image (see :mod:`steadytrain.data.results.predictions`).
        threshold: in that file, of several labels those with a probability above it are predicted.
        keep_logits: return the logits of each image, too.
        path_column, label_column, root: of a table, its columns, and the folder that paths start from.
        say: takes a line where memory runs out, and fewer images go through the network at a time from there on.

    Returns:
        With the outputs for each image, from which :mod:`steadytrain.training.metrics` computes more.

    Raises:
        DataError: the data have classes that the model has not.
        StorageError: ``per_image`` cannot be written.

    >>> import tempfile, timm
    >>> from PIL import Image
    >>> folder = Path(tempfile.mkdtemp())
    >>> for name in ("tench", "goldfish"):
    ...     (folder / "fish" / name).mkdir(parents=True)
    ...     Image.new("RGB", (64, 64)).save(folder / "fish" / name / "1.png")
    >>> torch.save(timm.create_model("test_resnet").state_dict(), folder / "stock.pth")
    >>> trained = restore(folder / "stock.pth", model="timm/test_resnet")
    >>> evaluate(trained, folder / "fish").n
    2
    """
    mapping = read_class_file(classes) if isinstance(classes, str | Path) else classes
    names = None if isinstance(mapping, Mapping) else mapping
    mapping = mapping if isinstance(mapping, Mapping) else {}
    trained = _trained(place, which, names)
    opened = data
    if not isinstance(opened, EvaluationData):
        columns: dict[str, Any] = {"path_column": path_column, "label_column": label_column, "root": root}
        opened = open_evaluation_data(trained, data, classes=mapping, say=say, **columns)
    size, module = batch_size or opened.batch_size or 128, trained.module
    if restrict and trained.is_multi_label:
        raise DataError("--restrict chooses among classes, and an image may have several of these labels: drop it")
    if restrict and opened.outputs is not None:
        module = _Restricted(module, opened.outputs[opened.outputs >= 0])
    with opened.records, trained.feed(opened.records, ids=opened.ids, batch_size=size, threads=threads) as feed:

        def batches() -> Iterator[Batch]:
            num_images = 0
            for batch in feed:
                num_images += len(batch)
                yield opened.relabel(batch)
                if progress is not None:
                    progress(num_images, feed.num_samples)

        evaluation = evaluate_module(
            module,
            batches(),
            trained.policy,
            trained.input,
            len(trained.classes),
            num_outputs=feed.num_samples,
            is_multi_label=trained.is_multi_label,
            keep_logits=keep_logits,
            temperature=trained.temperature,
            shift=trained.other_shift,
            say=say,
        )
        if per_image is not None:
            numbers = np.arange(len(opened.records)) if opened.ids is None else opened.ids
            labels: NDArray[Any] = opened.records.labels[numbers]
            write_per_image(
                Path(per_image),
                opened.records,
                numbers,
                trained.classes,
                evaluation,
                labels=labels if opened.outputs is None or trained.is_multi_label else opened.outputs[labels],
                threshold=threshold,
                temperature=trained.temperature,
            )
        return evaluation


def _trained(place: str | Path | Run | Trained, which: Which, classes: str | Path | Sequence[str] | None) -> Trained:
    """Restore what is named, or rename the classes of what has been restored."""
    if isinstance(place, Trained):
        return place if classes is None else rename_classes(place, class_names(classes))
    return restore(place, which=which, classes=classes)


class _Restricted(nn.Module):
    """A classifier that chooses among some of its outputs: the others get a probability of 0."""

    def __init__(self, module: nn.Module, outputs: NDArray[np.int64]) -> None:
        super().__init__()
        self.module, self.outputs = module, torch.from_numpy(np.unique(outputs))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits = self.module(images)
        chosen = self.outputs.to(logits.device)
        return torch.full_like(logits, -torch.inf).index_copy_(1, chosen, logits[:, chosen])


def open_evaluation_data(
    trained: Trained,
    data: object,
    *,
    root: str | Path | None = None,
    labels: str | Path | None = None,
    classes: Mapping[str, str] | None = None,
    path_column: str | None = None,
    label_column: str | Sequence[str] | None = None,
    split_column: str | None = None,
    zip_names: str | None = None,
    say: Say = print_note,
    progress: OnProgress | None = None,
) -> EvaluationData:
    """Open the images to evaluate a model on, packed first if need be, and match their classes with the model's.

    Args:
        trained: the model.
        data: as for :func:`evaluate`.
        root, labels, path_column, label_column, split_column, zip_names, say, progress: as for
            :func:`steadytrain.data.packing.prepare.prepare`.
        classes: the model's class by that of the data, for those that are not matched by name.

    Raises:
        DataError: as for :func:`evaluate`; or no data named for weights that are not a run's.
    """
    if data is None:
        try:
            run = Run.open(trained.path.parent)
        except RunError as error:
            raise DataError(f"{trained.path} belongs to no run: name the data to evaluate on") from error
        if words := run.outside_notice("data"):
            say(words)
        sets = open_data(run.data, run.recipe.model, seed=run.recipe.seed, run=run)
        if sets.val is None:
            sets.close()
            raise DataError(f"{run.directory} was trained without validation data: name the data to evaluate on")
        for part in (sets.train, sets.test):
            if part is not None and part is not sets.val:
                part.close()
        return EvaluationData(sets.val, sets.val_ids, batch_size=run.recipe.batch_size, groups=sets.val_groups)
    mapping = classes or {}
    if not isinstance(data, str | Path):
        data = source_of(data, path_column=path_column, label_column=label_column, root=root, say=say)
        if data.endswith(".rec"):  # packed: it has no columns any more
            root = path_column = label_column = None
    options: dict[str, Any] = {"root": root, "labels": labels, "zip_names": zip_names, "say": say, "progress": progress}
    options |= {"path_column": path_column, "label_column": label_column, "split_column": split_column}
    if trained.is_multi_label:
        return _open_labels(trained, data, mapping, **options)
    prepared = _prepare(trained, data, mapping, **options)
    records = open_records(prepared.only("val"), say)
    try:
        if records.labels.ndim > 1:
            raise DataError(
                f"{data} has several labels for each image, and {trained.name} names one class for each: give data with"
                " one class for each image"
            )
        require_outputs(records, len(records.classes), of="its card")
        is_by_value = trained.is_unnamed and are_values(records.named_classes, len(trained.classes), data)
        if not (mapping or is_by_value) and match_places(
            records,
            _names_for(trained, records),
            trained.classes,
            is_unnamed=trained.is_unnamed,
            of="the model",
            source=str(data),
            say=say,
        ):
            require_outputs(records, len(trained.classes), of=trained.name)
            return EvaluationData(records, outputs=_places(records), matched={"number": len(np.unique(records.labels))})
        matches = _match(trained, records.classes, records.labels, str(data), mapping)
    except BaseException:
        records.close()
        raise
    if records.classes == trained.classes and len(matches) == len(trained.classes) and not mapping:
        return EvaluationData(records)
    outputs = np.full(len(records.classes), -1, np.int64)
    outputs[list(matches)] = [match.output for match in matches.values()]  # type: ignore[assignment]
    matched = Counter(match.how for match in matches.values())
    listed = ", ".join(f"{n:,} by {how}" for how, n in matched.items())
    if numbers := [int(match.name) for match in matches.values() if match.how == "number"]:
        say_places(str(data), trained.classes, np.array(numbers), say)
    num_found = len({match.output for match in matches.values()})
    say(f"{data} has {num_found:,} of the model's {len(trained.classes):,} classes (matched: {listed})")
    return EvaluationData(records, outputs=outputs, matched=matched)


def _open_labels(trained: Trained, data: str | Path, mapping: Mapping[str, str], **options: Any) -> EvaluationData:
    """Open images with several labels each, those of the model, in any order. Raises DataError for others."""
    if mapping:
        raise DataError(
            f"--classes names classes one for one, and an image may have several of {trained.name}'s: drop it"
        )
    options |= {"trainable": True, "only": "val", "shorter_side": packed_side(trained.input.size)}
    labels = LabelNames(trained.classes)
    records = open_records(
        prepare(data, classes=None if Path(data).suffix == ".rec" else labels, **options).only("val"), options["say"]
    )
    names = list(records.class_list)
    if records.labels.ndim > 1 and sorted(names) == sorted(labels):
        is_same = tuple(names) == labels
        return EvaluationData(records, outputs=None if is_same else np.array([names.index(name) for name in labels]))
    if records.labels.ndim > 1 and records.card is None and len(names) == len(labels):
        say = options["say"]
        say(f"{data} does not name its labels: they are taken for the model's, in their order")
        return EvaluationData(records)
    records.close()
    has = "one class" if records.labels.ndim == 1 else f"other labels ({few(sorted(set(names) ^ set(labels)))})"
    raise DataError(f"{data} has {has} for each image, and {trained.name} names several labels of {few(labels)}")


def _places(records: Records) -> NDArray[np.int64]:
    """Return the output for each label that is a place: the label itself, and -1 for one without images."""
    used = np.unique(records.labels).astype(np.int64)
    outputs = np.full(int(used.max(initial=-1)) + 1, -1, np.int64)
    outputs[used] = used
    return outputs


def _names_for(trained: Trained, records: Records) -> tuple[str, ...]:
    """Return the names of records' classes: by their card, or by a list's folders if some are classes of the model."""
    if records.card is not None:
        return records.classes
    matches = match_classes(records.named_classes, trained.classes, synsets=trained.synsets)
    return records.named_classes if any(match.output is not None for match in matches) else ()


class _UnmatchedError(DataError):
    """The data have classes that the model has not."""


def _prepare(trained: Trained, data: str | Path, mapping: Mapping[str, str], **options: Any) -> Prepared:
    """Pack under the data's own class names; with the model's list where that fails, as for a folder of one class."""

    def check(listing: Listing) -> None:
        if listing.labels.ndim == 1 and not trained.is_unnamed:
            _match(trained, listing.classes, listing.labels, str(data), mapping)

    options |= {"trainable": True, "only": "val", "shorter_side": packed_side(trained.input.size), "check": check}
    failed: DataError | None = None
    for class_list in (None, trained.classes, trained.synsets):
        if class_list == ():
            continue
        try:
            return prepare(data, classes=class_list, **options)
        except _UnmatchedError:
            raise
        except DataError as error:
            failed = failed if class_list == trained.synsets else error
    assert failed is not None
    raise failed


def _match(
    trained: Trained, names: tuple[str, ...], labels: NDArray[Any], data: str, mapping: Mapping[str, str]
) -> dict[int, Match]:
    """Match the classes that have images, by their labels. Raises DataError if the model does not have one of them."""
    used = np.unique(labels).astype(np.int64).tolist()
    if lacking := [name for name in mapping if name not in names]:
        raise _UnmatchedError(f"--classes names classes that {data} has not: {few(lacking)}; it has {few(names)}")

    def match(classes: Sequence[str]) -> dict[str, Match]:
        return dict(zip(classes, match_classes(classes, trained.classes, synsets=trained.synsets), strict=True))

    by_file = {names[label]: mapping[names[label]] for label in used if names[label] in mapping}
    targets = match(list(by_file.values()))
    if unknown := [target for target, result in targets.items() if result.output is None]:
        raise _UnmatchedError(f"--classes names classes that {trained.name} has not: {few(unknown)}")
    matches = match([names[label] for label in used if names[label] not in by_file])
    matches |= {name: replace(targets[target], name=name, how="file") for name, target in by_file.items()}
    by_label = {label: matches[names[label]] for label in used}
    if unmatched := [result for result in by_label.values() if result.output is None]:
        raise _UnmatchedError(_unmatched(trained, data, unmatched, len(used)))
    return by_label


def _unmatched(trained: Trained, data: str, matches: Sequence[Match], num_classes: int) -> str:
    """Return the error for classes that the model does not have."""
    listed = [
        match.name
        if not match.candidates
        else f"{match.name} ({' or '.join(trained.classes[k] for k in match.candidates)}?)"
        for match in matches
    ]
    return (
        f"{len(matches):,} of the {num_classes:,} classes in {data} match none of {trained.name}'s"
        f" {len(trained.classes):,}: {few(listed, 20)}. Rename them, leave them out, or give --classes FILE, a text"
        " file with a line for each: the class of the data, a tab, the class of the model"
    )


@dataclass(frozen=True)
class Prediction:
    """The likeliest classes of one image, best first, with their probabilities; or why there are none.

    Of several labels those above the threshold, of which there may be none. ``judgement``: whether the image is like
    the training images, where that is known (:mod:`steadytrain.training.inference.limits`). ``maps``: JPEGs of the
    image under heat maps of its first classes, where they were asked for. ``path``: of the file; of an image of a
    record file ``photos.rec:17``, its number behind the colon; ``-`` of one in memory.
    """

    path: Path
    classes: tuple[str, ...] = ()
    probabilities: tuple[float, ...] = ()
    error: str | None = None
    judgement: Judgement | None = None
    maps: tuple[bytes, ...] = field(default=(), repr=False)

    @property
    def label(self) -> str | None:
        """The likeliest class; None for an image that cannot be read, and where no label is above the threshold."""
        return self.classes[0] if self.classes else None

    @property
    def probability(self) -> float | None:
        """The probability of :attr:`label`."""
        return self.probabilities[0] if self.probabilities else None

    def to_dict(self) -> dict[str, Any]:
        """Return a row of a table: ``path``, ``label``, ``probability``, then ``label2``, ..., ``error``."""
        row: dict[str, Any] = {"path": str(self.path), "label": self.label, "probability": self.probability}
        for rank, pair in enumerate(zip(self.classes, self.probabilities, strict=True), 1):
            row |= dict(zip((f"label{rank}", f"probability{rank}"), pair, strict=True)) if rank > 1 else {}
        return row | {"error": self.error}


class Predictions(Sequence[Prediction], Closing):
    """Predictions in the order of their images, each computed when it is first asked for; ``next()`` gives one more.

    ``stream`` yields them and keeps none of them. What ends them early is raised by each later read beyond what is
    known. A context manager.
    """

    def __init__(self, stream: Generator[Prediction, None, None]) -> None:
        self.stream, self._known, self._next = stream, list[Prediction](), 0
        self._error: BaseException | None = None

    def __next__(self) -> Prediction:
        self._next += 1
        try:
            return self[self._next - 1]
        except IndexError:
            raise StopIteration from None

    @overload
    def __getitem__(self, number: int) -> Prediction: ...
    @overload
    def __getitem__(self, number: slice) -> list[Prediction]: ...
    def __getitem__(self, number: int | slice) -> Prediction | list[Prediction]:
        more = number + 1 - len(self._known) if isinstance(number, int) and number >= 0 else None
        if more is None or more > 0:
            if self._error is not None:
                raise self._error
            try:
                self._known += islice(self.stream, more)
            except BaseException as error:
                self._error = error
                raise
        return self._known[number]

    def __len__(self) -> int:
        return len(self[:])

    def __repr__(self) -> str:
        return repr(self[:])

    def close(self) -> None:
        """End the loader's threads, and compute no more."""
        self.stream.close()
        self._error = self._error or InputError("the predictions were closed: read them all before that")

    def to_frame(self) -> Any:
        """Return a pandas DataFrame, as of :meth:`Prediction.to_dict`. Raises InputError where there is no pandas."""
        return RowTable(prediction.to_dict() for prediction in self).to_frame()


Images = Any
"""An image file, a folder of them, a pattern such as ``photos/*.jpg``, a record file, the bytes of an image, or images
in memory: of PIL, arrays, tensors, a DataFrame with a column of them or of paths, a data set. An array with 3 or 4 rows
of grey images can also be one in colour, and is: ``list(array)`` is several."""


def _named_images(images: Any) -> Iterator[str | Path | bytes | Callable[[], bytes]]:
    """Yield one image or several: names, bytes, or what reads one of a set. Raises DataError for what is no image."""
    several: Any = images_of(images)
    if several is None:
        several = list(images) if isinstance(images, Iterable) and not isinstance(images, str | bytes) else [images]
    is_set = isinstance(several, Samples)
    read = (lambda number: several[number][0]) if is_set else several.__getitem__
    has_names = not len(several) or isinstance(first := read(0), str | Path | bytes)
    if not has_names:
        file_bytes(first)  # what is wrong is probably so of each image
    for number in range(len(several)):
        item = read(number) if has_names or not is_set else None  # a set's images are read later
        yield item if isinstance(item, str | Path | bytes) else partial(_read_item, read, number)


def _read_item(read: Callable[[int], Any], number: int) -> bytes:
    try:
        return file_bytes(read(number))[0]
    except DataError as error:
        raise BadImageError(str(error)) from None


class Files(Closing):
    """Images of files, folders and record files, as a source for the loader; all labels are 0. A context manager.

    Image files are turned upright by their EXIF orientation, as packing turns them; images of a record file are packed.

    Args:
        images: one or several. A folder stands for the images in it and below, in the order of their names, and a
            record file for all of its images.

    Attributes:
        shorter_side: in pixels, to which a file that has to be turned is scaled down on the way; None: none is.
        lost: files by what of them is not used, in words, as far as they have been read.

    Raises:
        DataError: a folder without images, a pattern that fits no file, or a record file that cannot be opened.
    """

    def __init__(self, images: Images) -> None:
        self.shorter_side: int | None = None
        self.lost = Counter[str]()
        self._places: list[Path | bytes | Callable[[], bytes] | tuple[Records, int]] = []
        self._lock = Lock()
        with ExitStack() as stack:
            for item in _named_images(images):
                for place in image_files([item]) if isinstance(item, str | Path) else [item]:
                    if not isinstance(place, Path) or place.suffix != ".rec":
                        self._places.append(place)
                        continue
                    records = stack.enter_context(Records.open(place))
                    records.require_images()
                    self._places += [(records, number) for number in range(len(records))]
            self._opened = stack.pop_all()
        self.labels: NDArray[np.int64] = np.zeros(len(self._places), np.int64)

    def __len__(self) -> int:
        return len(self._places)

    def read(self, i: int) -> bytes | memoryview:
        """The encoded bytes of image ``i``, as they are stored. Raises DataError, StorageError."""
        place = self._places[i]
        if isinstance(place, tuple):
            return place[0].image(place[1])
        if isinstance(place, bytes):
            return place
        if not isinstance(place, Path):
            with self._lock:  # a data set may be for one thread
                return place()
        with read_errors(place):
            return read_patiently(place.read_bytes, str(place))

    def image(self, i: int) -> bytes | memoryview:
        """The encoded bytes of image ``i``, upright. Raises DataError, BadImageError, StorageError."""
        data = self.read(i)
        if not isinstance(data, bytes):
            return data
        self.lost.update(lost_in(data).values())
        return upright(data, shorter_side=self.shorter_side)

    def path(self, i: int) -> Path:
        """The name of image ``i``, as in :class:`Prediction`."""
        place = self._places[i]
        if isinstance(place, tuple):
            return Path(f"{place[0].path}:{place[1]}")
        return place if isinstance(place, Path) else Path("-")

    def close(self) -> None:
        """Close the record files."""
        self._opened.close()


def image_files(paths: Sequence[str | Path]) -> list[Path]:
    """List image files: for a folder those in it and below, for a pattern those that match.

    Raises:
        DataError: a folder without images, or a pattern that matches no file.
    """
    files: list[Path] = []
    for path in map(Path, paths):
        if not path.exists() and is_pattern(str(path)):
            files += image_files(expand(str(path)))
            continue
        if not path.is_dir():
            if str(path).startswith(("http:/", "https:/")):  # of two slashes a path has one
                raise DataError(f"{path} is an address: fetch the image first, and name its file")
            files.append(path)
            continue
        images = (p for p in path.rglob("*") if filenames.is_image(p.name) and not is_ignored(p.name))
        inside = sorted(p for p in images if p.is_file() or p.is_symlink())  # a broken link is an image that is missing
        if not inside:
            raise DataError(f"{path} is a folder without images: name image files, or a folder of them")
        files += inside
    return files


PREDICTED_AT_ONCE, PREDICTED_PIXELS = 64, 2**19
"""Images that go through the network together at most, and on a CPU their pixels: more leave its caches. MobileNetV2 at
224 pixels, on one core: 71 images a second one by one, 8 at a time 58, 64 at a time 37; ResNet-20 at 32 pixels: 600,
1,630 and 1,910 (2026-11-24)."""


def open_feed(
    trained: Trained,
    source: Files,
    batch_size: int | None,
    threads: int | None,
    on_bad: Callable[[int, str], None],
) -> ImageLoader:
    """Load images as a model wants them; ``on_bad`` takes the number of one that cannot be read, and the reason.

    ``batch_size``: None: up to :data:`PREDICTED_AT_ONCE`, on a CPU fewer of large images.
    """
    crop, device = build.evaluation_crop(trained.input), trained.policy.device.type
    source.shorter_side = packed_side(crop.size)
    if batch_size is None:
        fitting = PREDICTED_PIXELS // crop.size**2 if device == "cpu" else PREDICTED_AT_ONCE
        batch_size = max(1, min(PREDICTED_AT_ONCE, fitting))
    return ImageLoader(
        source,
        crop,
        train=False,
        skip_bad=True,
        batch_size=min(at_least(1, "batch_size", batch_size), len(source)),
        threads=threads,
        pin=device == "cuda",
        on_bad=lambda bad: on_bad(bad.id, bad.reason),
    )


def _as_predictions(stream: Callable[P, Generator[Prediction, None, None]]) -> Callable[P, Predictions]:
    @wraps(stream)
    def call(*args: P.args, **kwargs: P.kwargs) -> Predictions:
        return Predictions(stream(*args, **kwargs))

    return call


@_as_predictions
def predict(
    place: str | Path | Run | Trained,
    images: Images | Files,
    *,
    top: int | None = None,
    which: Which = "best",
    classes: str | Path | Sequence[str] | None = None,
    threshold: float = 0.5,
    abstain_at: float | None = None,
    judge: Judge | None = None,
    explain: int = 0,
    batch_size: int | None = None,
    threads: int | None = None,
) -> Generator[Prediction, None, None]:
    """Predict the ``top`` classes of each image, in order; an image that cannot be read yields an error instead.

    Images are read and decoded by the loader's threads, ahead of the network.

    Args:
        place: as for :func:`restore`, or what it returned.
        images: one or several, as for :class:`Files`; or those, opened, which are left open.
        top: classes to return for each at most; None: 5, or all labels above the threshold.
        which, classes: as for :func:`restore`.
        threshold: of several labels, those with a probability above it.
        abstain_at: the share of answers that are to be right: the others are not sure, which ``judgement`` says.
        judge: of the model's limits; None: those beside its weights, if there are any.
        explain: of so many of its classes, the likeliest, each image has a heat map
            (:mod:`steadytrain.training.inference.heat_maps`).
        batch_size: images at a time, fewer where memory runs out; None: up to 64, on a CPU fewer of large images.
        threads: that load images; None chooses.

    Raises:
        DataError: a folder without images, a pattern that fits no file, a record file that cannot be opened, or
            an ``abstain_at`` that cannot be promised.

    >>> import tempfile, timm
    >>> from PIL import Image
    >>> folder = Path(tempfile.mkdtemp())
    >>> Image.new("RGB", (64, 64)).save(folder / "1.png")
    >>> torch.save(timm.create_model("test_resnet").state_dict(), folder / "stock.pth")
    >>> trained = restore(folder / "stock.pth", model="timm/test_resnet")
    >>> good, bad = predict(trained, [folder / "1.png", folder / "stock.pth"], top=3)
    >>> len(good.classes), bad.error is None
    (3, False)
    """
    if top is not None:
        at_least(1, "top", top)
    trained = _trained(place, which, classes)
    judge = judge or open_judge(trained, abstain_at)
    top = min(top or (len(trained.classes) if trained.is_multi_label else 5), len(trained.classes))
    with ExitStack() as stack:
        source = images if isinstance(images, Files) else stack.enter_context(Files(images))
        if not len(source):
            return
        errors: dict[int, str] = {}
        feed = stack.enter_context(open_feed(trained, source, batch_size, threads, errors.__setitem__))
        limit, first = PassLimit("evaluation", on_halved=lambda halved: print_note(halved.message)), 0
        for batch in load(feed, trained.policy.device):
            n = len(batch.images)
            with torch.no_grad():
                judged: Sequence[Judgement | None] = [None] * n
                if judge is None:
                    logits = logits_of(trained.module, batch.images, trained.policy, trained.input, limit)
                else:
                    logits, judged = judge.answer(batch.images, limit)
                ranked = logits.topk(top)  # by logits: the temperature changes no order
                p = trained.probabilities(logits).gather(1, ranked.indices)
                maps = heat_maps(trained, batch.images, ranked.indices[:, :explain], limit) if explain else None
            rows = zip(range(first, first + n), ranked.indices.tolist(), p.tolist(), judged, strict=True)
            for number, outputs, probabilities, judgement in rows:
                path = source.path(number)
                if number in errors:
                    yield Prediction(path, error=errors.pop(number))
                    continue
                if trained.is_multi_label:  # the likeliest come first
                    outputs = outputs[: sum(value > threshold for value in probabilities)]
                names = tuple(trained.classes[k] for k in outputs)
                cells = () if maps is None else maps[number - first, : len(names)]
                pictures = tuple(draw(trained, source.read(number), each) for each in cells)
                yield Prediction(path, names, tuple(probabilities[: len(names)]), judgement=judgement, maps=pictures)
            first += n
