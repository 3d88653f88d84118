"""WebDataset shards: members that share a key, ``000123.jpg`` and ``000123.cls``, are one sample.

A key is a member's name up to the first dot of its last part. Labels come from ``.cls`` (a number, a class name, or
several labels as a cell of a table holds them), else from a field of ``.json``, else from ``.txt`` where those are
class names and no captions.
"""

from __future__ import annotations

import json
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

import numpy as np

from steadytrain.config.plain import parse_json
from steadytrain.data.filenames import is_ignored, is_image
from steadytrain.data.recordio.card import LabelNames
from steadytrain.data.sources.labels import classes_from_numbers, is_padded, whole_number
from steadytrain.data.sources.listing import FileList, Labels, Listing
from steadytrain.data.sources.several import name_labels, read_cells
from steadytrain.data.sources.source import Request, SourceKind
from steadytrain.errors import DataError
from steadytrain.format import Say, few

LABELS = ("cls", "json", "txt")
NUMBER_FIELDS = ("label", "cls", "class", "class_id", "class_index", "label_id", "category_id", "target", "y")
NAME_FIELDS = ("class_name", "label_name", "classname", "category", "category_name", "synset", "wnid")

_MOST_NAMES = 100_000
_MOST_BYTES = {"cls": 4096, "json": 1 << 20, "txt": 1 << 16}
_LONGEST_NAME = 64
_SAMPLE_MEMBERS = 10_000


@dataclass
class _Sample:
    """One sample: its key, the row of its image, and the rows of all members by suffix."""

    key: str
    image: int = -1
    parts: dict[str, int] = field(default_factory=dict)


def is_webdataset(files: FileList) -> bool:
    """Return whether archives hold samples: images in no folders of classes, with labels of their key beside them."""
    parts = (name.rpartition("/") for name in files.names if is_image(name))
    folders = {folder for folder, _, base in parts if not is_ignored(base)}
    if folders and any(name[-4:].lower() == ".cls" for name in files.names):
        return True
    if len(folders) != 1:
        return False
    # Samples are neighbours, so that looking at the first ones is enough.
    first = list(islice(files.names, _SAMPLE_MEMBERS))
    sidecars = {name.rpartition(".")[0] for name in first if name.lower().endswith((".json", ".txt"))}
    return any(is_image(name) and name.rpartition(".")[0] in sidecars for name in first)


def list_samples(request: Request) -> list[Listing]:
    """List the samples of shards, in the order of the shards and of the samples in them.

    Without a class list one is made of the names that the samples give, else of their numbers.

    Raises:
        DataError: no sample has both, two images or two labels for one key, or labels that are none.
    """
    files, root, say = request.members, request.where, request.say
    kind = _kind_of_labels(files, root)
    reader = _LabelReader(files, root, kind)
    rows = array("q")
    texts: list[str] = []
    known: dict[str, str] = {}
    lacking: dict[str, list[str]] = {"image": [], "label": []}
    for sample in _samples(files, root):
        if sample.image < 0 or kind not in sample.parts:
            lacking["label" if sample.image >= 0 else "image"].append(sample.key)
            continue
        rows.append(sample.image)
        text = reader.label(sample)
        texts.append(known.setdefault(text, text))
    if not rows and set(lacking["image"]) & set(lacking["label"]):
        raise DataError(
            f"{root}: images and labels of one key ({lacking['image'][0]}) are not next to each other:"
            " write the members of each key one after the other (tar --sort=name)"
        )
    for part, keys in lacking.items():
        if keys and not rows:
            raise DataError(f"{root}: no sample has an image and a label; {len(keys):,} have no {part} ({few(keys)})")
        if keys:
            plural, article = "s" * (len(keys) > 1), "an" if part == "image" else "a"
            say(f"{len(keys):,} sample{plural} without {article} {part} skipped ({few(keys, 3)})")
    longest = max(known, key=len)
    if kind == "txt" and (len(longest) > _LONGEST_NAME or "\n" in longest or 2 * len(known) > len(texts)):
        raise DataError(
            f"{root}: the .txt members look like captions, not class names ({longest[:40]!r}; {len(known):,}"
            f" different ones for {len(texts):,} images): add a .cls with the class to each sample"
        )
    names, label_names, labels = _labels_of(texts, reader, request.classes, say)
    paths = None
    if len(files.archives) > 1:
        paths = (f"{files.archives[files.archive(row)]}/{files.names[row]}" for row in rows)
    return [replace(files.listing(rows, labels, names=paths, root=root, classes=names), label_names=label_names)]


def _labels_of(
    texts: Sequence[str], reader: _LabelReader, classes: Sequence[str] | None, say: Say
) -> tuple[tuple[str, ...], tuple[str, ...], Labels]:
    """Class names, names of label columns, and labels: one of the two is empty."""
    where = str(reader.root)
    cells = read_cells(set(texts), header="", where=where, classes=classes, say=say)
    numbers = [number for text in texts if (number := whole_number(text)) is not None]
    if cells is None and len(numbers) == len(texts) and not isinstance(classes, LabelNames):
        named = reader.names_in_order(max(numbers), say)
        if named is not None or not any(map(is_padded, set(texts))):
            of_images = np.array(numbers, np.int64)
            class_names, labels = classes_from_numbers(of_images, names=named, classes=classes, where=where, say=say)
            return class_names, (), labels
    return name_labels(texts, cells, where=where, classes=classes, say=say)


def _samples(files: FileList, root: Path) -> Iterator[_Sample]:
    """Group neighbours of one key."""
    sample: _Sample | None = None
    shard = -1
    for row, name in enumerate(files.names):
        folder, _, base = name.rpartition("/")
        stem, _, suffix = base.partition(".")
        if is_ignored(base) or not suffix or base.startswith("__"):
            continue
        key = f"{folder}/{stem}" if folder else stem
        if sample is None or key != sample.key or shard != files.archive(row):
            if sample is not None:
                yield sample
            sample, shard = _Sample(key), files.archive(row)
        suffix = suffix.lower()
        if suffix in sample.parts:
            raise DataError(
                f"{root}: the sample {key} has two members .{suffix}: each key may appear only once in a shard"
            )
        sample.parts[suffix] = row
        if "." in suffix or not is_image(f"a.{suffix}"):
            continue
        if sample.image >= 0:
            raise DataError(
                f"{root}: the sample {key} has two images, {files.names[sample.image]} and {name}: keep one of them"
            )
        sample.image = row
    if sample is not None:
        yield sample


def _kind_of_labels(files: FileList, root: Path) -> str:
    """The kind of member that holds the labels: the first of ``LABELS`` that most samples have."""
    counts = Counter(name.rpartition("/")[2].partition(".")[2].lower() for name in files.names)
    most = max(counts[kind] for kind in LABELS)
    if most:
        return next(kind for kind in LABELS if 2 * counts[kind] >= most)
    dotted = next((name for name in files.names if name.rpartition("/")[2].count(".") > 1), None)
    if dotted is not None:
        raise DataError(
            f"{root}: no sample has a label: a key ends at the first dot, and {dotted} has several: name members"
            " KEY.jpg and KEY.cls, without a dot in KEY"
        )
    raise DataError(f"{root}: no sample has a label: each needs a .cls, .json or .txt next to its image")


@dataclass
class _LabelReader:
    """Reads samples' labels, and gathers the names that their JSON gives to the numbers of classes."""

    files: FileList
    root: Path
    kind: str
    names: dict[str, str] = field(default_factory=dict)
    numbers: dict[str, str] = field(default_factory=dict)
    clash: str = ""

    def label(self, sample: _Sample) -> str:
        """The label of a sample, a number or a name. Raises DataError where a number and a name contradict others."""
        fields = self._fields(sample) if "json" in sample.parts else {}
        text = (self._label_field(fields, sample) if self.kind == "json" else self._text(sample, self.kind)).strip()
        if not text:
            raise DataError(f"{self.root}: the .{self.kind} of sample {sample.key} is empty")
        if (value := whole_number(text)) is None:
            return text
        number = str(value)
        name = next((str(fields[key]) for key in (*NAME_FIELDS, *NUMBER_FIELDS) if _is_name(fields.get(key))), None)
        if name is None:
            return text if is_padded(text) else number
        known, before = self.names.setdefault(number, name), self.numbers.get(name, number)
        if len(self.numbers) < _MOST_NAMES:
            self.numbers.setdefault(name, number)
        if known != name and before != number:
            raise DataError(
                f"{self.root}: label {number} is called {known} and {name} (sample {sample.key}), and {name} is also"
                f" label {before}: number the classes the same way in all shards"
            )
        if known != name:
            self.clash = self.clash or f"label {number} is called {known} and {name}"
        return number

    def _fields(self, sample: _Sample) -> dict[str, object]:
        try:
            fields, why = parse_json(self._text(sample, "json")), ""
            json.dumps(fields, ensure_ascii=False).encode()  # half a character is no name
        except (ValueError, RecursionError) as error:
            fields, why = None, f" ({error})"
        if not isinstance(fields, dict):
            raise DataError(f"{self.root}: the .json of sample {sample.key} is not a JSON object{why}")
        return fields

    def _label_field(self, fields: dict[str, object], sample: _Sample) -> str:
        for key in (*NUMBER_FIELDS, *NAME_FIELDS):
            value = fields.get(key)
            if isinstance(value, str | int | float) and not isinstance(value, bool) and not is_image(str(value)):
                return str(value)
            if isinstance(value, list):
                raise DataError(
                    f"{self.root}: the field {key!r} of sample {sample.key} is a list, but each image in a shard"
                    " has one label: use a table for several labels"
                )
        raise DataError(
            f"{self.root}: the .json of sample {sample.key} has no label field"
            f" ({', '.join(NUMBER_FIELDS[:4])}, ...; it has {few([str(key) for key in fields]) or 'none'})"
        )

    def _text(self, sample: _Sample, kind: str) -> str:
        row, most = sample.parts[kind], _MOST_BYTES[kind]
        if (size := int(self.files.sizes[row])) > most:
            raise DataError(
                f"{self.root}: the .{kind} of sample {sample.key} has {size:,} bytes, more than {most:,}: it cannot"
                " be a label"
            )
        try:
            return self.files.read(row).decode("utf-8-sig")
        except UnicodeDecodeError:
            raise DataError(f"{self.root}: the .{kind} of sample {sample.key} is not UTF-8 text") from None

    def names_in_order(self, largest: int, say: Say) -> list[str] | None:
        """Names in the order of the numbers, where every number up to the largest has one of its own."""
        if self.clash:
            say(f"{self.root}: class numbers are used as names ({self.clash})")
            return None
        numbers = [str(number) for number in range(largest + 1)] if len(self.names) == largest + 1 else []
        if not numbers or self.names.keys() != set(numbers) or len(set(self.names.values())) < len(numbers):
            return None
        return [self.names[number] for number in numbers]


def _is_name(value: object) -> bool:
    return isinstance(value, str) and whole_number(value) is None and 0 < len(value) <= 200 and not is_image(value)


WEBDATASET = SourceKind(
    "WebDataset shards", lambda request: request.is_archive and is_webdataset(request.members), list_samples
)
