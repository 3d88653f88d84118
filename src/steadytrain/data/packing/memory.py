"""Data in Python's memory as a source: images are packed once into records, and paths are written as a table.

::

    (images, labels)                    arrays, tensors or lists: N images, and the label of each
    [(image, label), ...]               and any map-style data set of such pairs, as of torch and torchvision
    ImageFolder                         its paths; no transform of a data set is applied
    DataFrame, {"image": [...], ...}    a column of paths or of images, and one of labels
    Dataset of Hugging Face             features Image and ClassLabel

The file lies in the cache, named by its content: the same data give the same file, from which a run resumes by itself.
"""

from __future__ import annotations

import copy
import csv
import hashlib
import io
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from steadytrain.data.images.encode import PackSettings
from steadytrain.data.images.memory import file_bytes, is_array, is_image
from steadytrain.data.names import Names
from steadytrain.data.packing.pack import mute, pack_listings
from steadytrain.data.recordio.card import Card, damage_of
from steadytrain.data.sources.columns import LABELS, PATHS
from steadytrain.data.sources.find import source_name
from steadytrain.data.sources.labels import classes_from_numbers, classes_from_texts
from steadytrain.data.sources.listing import Listing, Pieces
from steadytrain.data.sources.unpacked import upright
from steadytrain.data.storage.scratch import scratch_beside
from steadytrain.errors import DataError, describe_type, storage_errors
from steadytrain.files import lock, open_lock, replace_file, replacing
from steadytrain.format import Say, few, print_note
from steadytrain.machine.facts import require_cache_folder


class Samples(Sequence[tuple[Any, Any]]):
    """Pairs of an image and a label, each read when it is asked for.

    Args:
        data: see the head of this module.
        image, label: of a table, the names of the columns, of labels one or several; None: found by their usual names.
        needs_labels: False: the labels may be None.

    Attributes:
        name, classes: for files and messages; of the labels' numbers, None where the data have no names.
        columns, image, labels: of a table, all by their names; which of them hold the images, and the labels.

    Raises:
        DataError: no such data; says the remedy.
    """

    def __init__(self, data: Any, image: str | None, label: Any, *, needs_labels: bool = True) -> None:
        given = _by_position(data)
        data = _without_transform(given, needs_labels=needs_labels)
        self.name, self.classes = _name_and_classes(given)
        self.columns: dict[Any, Sequence[Any]] | None = None
        self.image, self.labels, names = "", list[str](), list[Any]()
        label = [label] if isinstance(label, str) else list(label or ())
        features = getattr(data, "features", None)  # of a set of Hugging Face its columns by their names
        features = features if isinstance(features, Mapping) and _has_items(data) else {}
        if features:
            kinds = {name: type(feature).__name__ for name, feature in features.items()}
            images, labels = ([name for name in kinds if kinds[name] == kind] for kind in ("Image", "ClassLabel"))
            names, image = list(kinds), image or next(iter(images), None)
            label = label or (labels if len(labels) == 1 else [])
            if image in images:
                data = data.with_format(None).cast_column(image, type(features[image])(decode=False))
        elif isinstance(data, Mapping) or (hasattr(data, "columns") and hasattr(data, "to_dict")):
            self.columns = _columns_of(data)
            names = list(self.columns)
        elif _are_columns(data):
            if len(data[0]) != len(data[1]):
                raise DataError(f"there are {len(data[0]):,} images and {len(data[1]):,} labels: give one for each")
            self.name = "arrays"
        else:
            names = _keys_of_rows(data, needs_labels=needs_labels)
        if names or self.columns is not None:
            remedy = "name it with path_column=" if needs_labels else "rename it: data.rename(columns={...: 'path'})"
            self.image = _column(names, image, PATHS, remedy)
        if self.image and needs_labels:
            remedy = "name it with label_column="
            self.labels = [_column(names, name, LABELS, remedy) for name in label or [None]]
            feature = features.get(self.labels[0])
            self.classes = self.labels if len(label) > 1 else getattr(feature, "names", self.classes)
            _refuse_lists_of_classes(feature, self.labels[0])
        self._data = data

    def __len__(self) -> int:
        if self.columns is not None:
            return len(self.columns[self.image])
        return len(self._data[0] if _are_columns(self._data) else self._data)

    def __getitem__(self, number: Any) -> tuple[Any, Any]:
        if not 0 <= number < len(self):
            raise IndexError(number)
        if _are_columns(self._data):
            image, label = self._data[0][number], self._data[1][number]
        elif self.image:
            names, columns = (self.image, *self.labels), self.columns
            row = self._data[number] if columns is None else {name: columns[name][number] for name in names}
            image, label = row[self.image], [row[name] for name in self.labels] or None
        else:
            item = self._data[number]
            image, label = item if isinstance(item, tuple | list) and len(item) == 2 else (item, None)
        label = label.tolist() if hasattr(label, "tolist") else label
        while isinstance(label, tuple | list) and len(label) == 1:  # a column, as Keras has it
            label = label[0].tolist() if hasattr(label[0], "tolist") else label[0]
        return image, label


def _by_position(data: Any) -> Any:
    """Return what pandas has, which goes by the labels of its rows, in the order of its rows."""
    if _are_columns(data):
        return [part.to_numpy() if hasattr(part, "to_numpy") else part for part in data]
    return list(data) if hasattr(data, "iloc") and not hasattr(data, "columns") else data


def _name_and_classes(data: Any) -> tuple[str, list[str] | None]:
    """Return what a data set, or the one that it is a part of, is called, and its classes, if it lists them."""
    if hasattr(data, "columns"):  # whose attributes are its columns
        return type(data).__name__.lower(), None
    while not hasattr(data, "classes") and hasattr(data, "dataset"):
        data = data.dataset
    listed: Any = getattr(data, "classes", None)
    folder = Path(str(getattr(data, "root", ""))).name if hasattr(data, "samples") else ""
    name = re.sub(r"\W+", "-", folder or type(data).__name__.lower())
    return name, [str(each) for each in listed] if hasattr(listed, "__len__") and len(listed) else None


def _has_items(data: Any) -> bool:
    return hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, str | bytes)


def _columns_of(table: Any) -> dict[Any, Sequence[Any]]:
    names = list(table if isinstance(table, Mapping) else table.columns)
    if any(hasattr(table[name], "features") or hasattr(table[name], "columns") for name in names):
        raise DataError(f"the data have the parts {few(names)}: give one, data[{names[0]!r}], and val= another")
    return {name: list(table[name]) for name in names}


def _keys_of_rows(data: Any, *, needs_labels: bool) -> list[Any]:
    """Return the keys of rows that are mappings; of pairs none. Raises DataError for other data."""
    if not _has_items(data):
        raise DataError(
            f"the data are {describe_type(data)}; they must be the name of a folder or a file, or in memory"
            " (images, labels), a list of pairs, a DataFrame, or a data set with a length (of a DataLoader: its"
            " .dataset); your own loop takes any loader (docs: own-loop)"
        )
    first = data[0] if len(data) else None
    if isinstance(first, Mapping) and not is_image(first):
        return list(first)
    if needs_labels and not (isinstance(first, tuple | list) and len(first) == 2):
        what = f"{describe_type(first)} as first item" if len(data) else "nothing in it"
        raise DataError(f"the data are {describe_type(data)} with {what}; give pairs of an image and a label")
    return []


def _refuse_lists_of_classes(feature: Any, column: str) -> None:
    """Refuse a feature that lists the classes of each image: lists of one length look like vectors of 0 and 1."""
    inner = feature[0] if isinstance(feature, list) else getattr(feature, "feature", None)
    if listed := getattr(inner, "names", None):
        row = f"{{'vector': [float(k in row[{column!r}]) for k in range({len(listed)})]}}"
        raise DataError(
            f"the column {column!r} lists the classes of each image; give vectors of 0 and 1,"
            f" label_column='vector' of data.map(lambda row: {row})"
        )


def _require_values(values: Iterable[Any], where: str) -> None:
    """Refuse a missing value of a table or a list, which would be a class of its own. Raises DataError."""
    for row, value in enumerate(values):
        is_known = isinstance(value, str | os.PathLike) or is_image(value)
        if value is None or (not is_known and str(value) in ("nan", "<NA>", "NaT")):
            raise DataError(f"row {row} of {where}")


def _column(names: Sequence[Any], named: str | None, usual: Sequence[str], remedy: str) -> Any:
    """Find a column: the named one, else the first by the usual names. Raises DataError for none."""
    lower = {str(name).lower().replace(" ", "_"): name for name in names}
    found = named or next((lower[name] for name in usual if name in lower), None)
    if found is None or found not in names:
        what = f"none is {named!r}" if named else f"none is called like {usual[0]!r}"
        raise DataError(f"of the columns {few(list(map(str, names)))} {what}: {remedy}")
    return found


def _are_columns(data: Any) -> bool:
    """Return whether data are images and, behind them, labels; two pairs of an image and a label are not."""
    if not isinstance(data, tuple | list) or len(data) != 2:
        return False
    images, labels = data
    if not hasattr(labels, "__len__") or isinstance(labels, str):
        return False
    if isinstance(images, tuple | list):
        return not (len(images) == 2 and isinstance(images[1], str | int)) and len(images) > 0
    return is_array(images)


def _without_transform(data: Any, *, needs_labels: bool) -> Any:
    """Return a data set without its transforms, which would be applied once for all epochs; of paths, these."""
    if hasattr(data, "dataset") and hasattr(data, "indices"):
        inner = _without_transform(data.dataset, needs_labels=needs_labels)
        return (
            [inner[int(number)] for number in data.indices] if isinstance(inner, list) else _with(data, dataset=inner)
        )
    values = getattr(data, "__dict__", {})  # a DataFrame has a method of that name
    if needs_labels and values.get("target_transform") is not None:
        raise DataError(
            f"the {type(data).__name__} has a target_transform, whose labels its classes do not name: leave it out, or"
            " give a list of pairs of an image and its label"
        )
    instead = {"transform": lambda image: image, "transforms": lambda *pair: pair}
    if given := {name: instead[name] for name in instead if callable(values.get(name))}:
        print_note(
            f"the transform of the {type(data).__name__} is not applied, or each image would have one draw of it for"
            " all epochs; instead: size=224, transforms='randaugment:2,9'"
        )
        data = _with(data, **given)
    if isinstance(samples := getattr(data, "samples", None), list) and samples and hasattr(data, "classes"):
        return [(path, label) for path, label, *_ in samples]
    return data


def _with(data: Any, **values: Any) -> Any:
    data = copy.copy(data)
    vars(data).update(values)
    return data


def source_of(
    data: object,
    *,
    path_column: str | None = None,
    label_column: str | Sequence[str] | None = None,
    root: object = None,
    classes: Sequence[str] | None = None,
    say: Say = lambda message: None,
) -> str:
    """Return the name of data: a path as it is; of data in memory the file that they were packed into.

    Args:
        data: see the head of this module.
        path_column, label_column: of a table; the first may hold images.
        root: the folder that paths start from; None: the working folder.
        classes: the class list, in the order of the labels' numbers; None: that of the data.
        say: takes a line each for what a user should know.

    Raises:
        DataError: no such data, an image or a label that cannot be used; says the remedy.
        StorageError: no room in the cache.
    """
    if isinstance(data, str | os.PathLike):
        return source_name(data)
    samples = Samples(data, path_column, label_column)
    if not len(samples):
        raise DataError(f"the {samples.name} holds no images")
    for name in (samples.image, *samples.labels) if (table := samples.columns) is not None else ():
        remedy = f"drop it, data.dropna(subset=[{name!r}])"
        _require_values((table or {})[name], f"the {samples.name} has nothing in the column {name!r}: {remedy}")
    if not isinstance(samples[0][0], str | os.PathLike):
        return _pack(samples, classes, say)
    columns, names = samples.columns, classes or samples.classes
    if columns is None:
        pairs = list(samples)
        for number, what in enumerate(("image", "label")):
            _require_values((pair[number] for pair in pairs), f"the {samples.name} has no {what}: leave it out")
        columns, samples.image = dict(zip(("path", "label"), map(list, zip(*pairs, strict=True)), strict=True)), "path"
        samples.labels = ["label"]
    if names and len(samples.labels) == 1:
        [column] = samples.labels
        columns = {**columns, column: [_named(value, names, f"the {samples.name}") for value in columns[column]]}
    paths = [os.fspath(path) for path in columns[samples.image]]
    if root is None:  # the table lies elsewhere
        paths = [path if "://" in path else os.path.abspath(path) for path in paths]  # noqa: PTH100
    return _write_table(samples.name, {**columns, samples.image: paths})


def _named(label: Any, classes: Sequence[str], where: str) -> Any:
    """Return the class of a label that is a number; a text as it is. Raises DataError for a number of no class."""
    if hasattr(label, "__len__"):
        return label
    if label not in range(len(classes)):
        raise DataError(f"a label of {where} is {label!r}, and there are {len(classes)} classes: {few(classes)}")
    return classes[int(label)]


def class_list_beside(table: str, classes: Sequence[str]) -> str:
    """Write the class list of a table in memory beside it, as a card; return its path, named by what it lists."""
    card = Card(classes=tuple(classes), counts=(0,) * len(classes), num_images=0)
    path = Path(table).with_name(f"classes-{hashlib.sha256(card.to_json().encode()).hexdigest()[:12]}.json")
    replace_file(path, card.to_json())
    return str(path)


def images_of(data: Any) -> Samples | list[Any] | None:
    """Return data in memory whose labels do not count, to predict; None for paths, bytes and lists of images."""
    if isinstance(data, str | os.PathLike | bytes):
        return None
    if is_image(data):
        return [data]
    if isinstance(data, Mapping) and (images := [v for v in data.values() if is_image(v) and not is_array(v)]):
        return images[:1]  # a row of a data set
    is_set = hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, list | tuple)
    return Samples(data, None, None, needs_labels=False) if is_set or hasattr(data, "columns") else None


def _write_table(name: str, columns: Mapping[str, Iterable[Any]]) -> str:
    """Write a table, named by its content, into the cache."""
    text = io.StringIO()
    csv.writer(text).writerows([columns, *zip(*columns.values(), strict=True)])
    data = text.getvalue().encode("utf-8", "surrogateescape")
    path = require_cache_folder() / "memory" / f"{name}-{hashlib.sha256(data).hexdigest()[:12]}.csv"
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as part:
            part.write_bytes(data)
    return str(path)


def _pack(samples: Samples, classes: Sequence[str] | None, say: Say) -> str:
    """Pack images and labels, named by their content, into the cache, unless they are there."""
    folder, digest = require_cache_folder() / "memory", hashlib.sha256()
    say(f"reading {len(samples):,} images of the {samples.name}, which are packed once into {folder}")
    labels, sizes = list[Any](), list[int]()
    with scratch_beside(folder / samples.name) as scratch:
        with (scratch / "images").open("wb") as file:
            for number, (image, label) in enumerate(samples):
                try:
                    data, content = file_bytes(image)
                except DataError as error:
                    raise DataError(f"image {number} of the {samples.name}: {error}") from None
                digest.update(hashlib.sha256(content).digest())
                sizes.append(file.write(upright(data)))
                labels.append(label)
        listed, numbers, columns = _labels(labels, samples, classes)
        digest.update(json.dumps([listed, columns, numbers.tolist()]).encode())
        path = folder / f"{samples.name}-{digest.hexdigest()[:12]}.rec"
        lengths, zeros = np.array(sizes, np.int64), np.zeros(len(sizes), np.int64)
        places = Pieces([str(scratch / "images")], zeros.astype(np.int32), np.cumsum(lengths) - lengths, lengths)
        listing = Listing(
            split="",
            root=Path(samples.name),
            classes=listed,
            names=Names(map(str, range(len(sizes)))),
            labels=numbers,
            sizes=lengths,
            times=zeros,
            ids=np.arange(len(sizes)),
            pieces=places,
            label_names=columns,
        )
        with open_lock(folder / f".{path.name}.lock") as held:
            lock(held)
            if not path.exists() or damage_of(path):
                known: dict[str, Any] = {"source": samples.name, "scratch": scratch, "progress": mute, "say": say}
                pack_listings([(path, listing)], PackSettings(encoding="pass"), force=True, **known)
    return str(path)


def _labels(
    labels: Sequence[Any], samples: Samples, classes: Sequence[str] | None
) -> tuple[tuple[str, ...], NDArray[Any], tuple[str, ...]]:
    """Return class names and numbers; of several labels for each image, no classes, their vectors and their names."""
    names, where = samples.classes, f"the {samples.name}"
    if all(isinstance(label, str) for label in labels):
        listed, numbers = classes_from_texts(labels, classes=classes or names, where=where)
        return listed, numbers, ()
    try:
        values = np.array(labels, np.float64)
    except (TypeError, ValueError):
        values = np.full(1, np.nan)
    if values.ndim > 2 or (values % 1).any() or not np.isfinite(values).all():
        odd = next((label for label in labels if not isinstance(label, int)), labels[0])
        raise DataError(f"a label of {where} is {odd!r}; give each image a class name or a class number from 0 on")
    if values.ndim == 2 and (len(samples.labels) > 1 or values.max() > 1 or (values.sum(1) != 1).any()):
        columns = classes or names or [str(number) for number in range(values.shape[1])]
        return (), values.astype(np.float32), tuple(columns)
    numbers = (values.argmax(1) if values.ndim == 2 else values).astype(np.int64)  # one-hot, as Keras has it
    listed, numbers = classes_from_numbers(numbers, names=names, classes=classes, where=where)
    return listed, numbers, ()
