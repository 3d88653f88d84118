"""WebDataset shards: members that share a key, ``000123.jpg`` and ``000123.cls``, are one sample.

A key is a member's name up to the first dot of its last part. Labels come from ``.cls`` (a number, or a class name),
else from a field of ``.json``, else from ``.txt`` where those are class names and no captions.
"""

from __future__ import annotations

import json
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from steadytrain.data.sources import naming
from steadytrain.data.sources.listing import Listing, is_ignored, is_image
from steadytrain.data.sources.members import Members, Say, few
from steadytrain.data.sources.names import Names
from steadytrain.errors import DataError

LABELS = ("cls", "json", "txt")
NUMBER_FIELDS = ("label", "cls", "class", "class_id", "class_index", "label_id", "category_id", "target", "y")
NAME_FIELDS = ("class_name", "label_name", "classname", "category", "category_name", "name", "synset", "wnid")

_LOOSE = frozenset(["name", "category"])  # may well name the image, or something coarser than the class
_MOST_NAMES = 100_000

_MOST_BYTES = {"cls": 4096, "json": 1 << 20, "txt": 1 << 16}
_LONGEST_NAME = 64
_LOOKED_AT = 10_000  # members


@dataclass
class _Called:
    """What the samples' JSON calls the numbers of classes."""

    root: Path
    names: dict[str, str] = field(default_factory=dict)
    numbers: dict[str, str] = field(default_factory=dict)
    clash: str = ""
    doubt: str = ""  # the loose field that labels were read from

    def add(self, number: str, name: str, sample: _Sample, *, loose: bool) -> None:
        """Take in one pair. Raises DataError where a name has two numbers and a number two names."""
        other, before = self.names.setdefault(number, name), self.numbers.get(name, number)
        if len(self.numbers) < _MOST_NAMES:
            self.numbers.setdefault(name, number)
        if other == name:
            return
        if before != number and not loose:
            raise DataError(
                f"{self.root}: label {number} is called {other} and {name} (sample {sample.key}), and {name} is label"
                f" {before} too: number the classes alike in all shards"
            )
        self.clash = self.clash or f"label {number} is called {other} and {name}"

    def in_order(self, largest: int, say: Say) -> list[str] | None:
        """Names in the order of the numbers, where every number up to the largest has one of its own."""
        if self.clash:
            say(f"{self.root}: classes are named by their numbers ({self.clash})")
            return None
        if len(self.names) != largest + 1 or len(set(self.names.values())) < len(self.names):
            return None
        wanted = [str(number) for number in range(largest + 1)]
        return [self.names[number] for number in wanted] if self.names.keys() == set(wanted) else None


@dataclass
class _Sample:
    """One sample: its key, the row of its image, and what its label files say."""

    key: str
    image: int = -1
    parts: dict[str, int] = field(default_factory=dict)


def is_samples(members: Members) -> bool:
    """Whether archives hold samples: images with labels of the same key beside them, and not in folders of classes."""
    if not any(is_image(name) for name in members.names):
        return False
    if any(name[-4:].lower() == ".cls" for name in members.names):
        return True
    if len({name.rpartition("/")[0] for name in members.names if is_image(name)}) != 1:
        return False
    # Samples are neighbours, so that looking at the first ones is enough.
    first = [name for name, _ in zip(members.names, range(_LOOKED_AT), strict=False)]
    sidecars = {name.rpartition(".")[0] for name in first if name.lower().endswith((".json", ".txt"))}
    return any(is_image(name) and name.rpartition(".")[0] in sidecars for name in first)


def list_samples(members: Members, *, root: Path, classes: Sequence[str] | None, say: Say) -> Listing:
    """List the samples of shards, in the order of the shards and of the samples in them.

    Args:
        members: of one or several tars.
        root: what the user named, for messages.
        classes: the class list; None makes one of the names that the samples tell of, else of their numbers.
        say: takes remarks: samples without an image or a label.

    Raises:
        DataError: no sample has both, two images or two labels for one key, or labels that are none.
    """
    rows = array("q")
    texts: list[str] = []
    known: dict[str, str] = {}
    called = _Called(root)
    lacking: dict[str, list[str]] = {"image": [], "label": []}
    compound = ""
    kind = _kind_of_labels(members, root)
    for sample in _samples(members, root):
        if sample.image < 0 or kind not in sample.parts:
            lacking["label" if sample.image >= 0 else "image"].append(sample.key)
            compound = compound or next((part for part in sample.parts if "." in part and is_image(part)), "")
            continue
        rows.append(sample.image)
        text = _label(members, sample, kind, called)
        texts.append(known.setdefault(text, text))
    _tell(lacking, bool(rows), compound, root, say)
    if kind == "txt":
        _refuse_captions(texts, root)
    if called.doubt and len(set(texts)) == len(texts) > 2:
        raise DataError(
            f"{root}: the field {called.doubt!r} is different in every sample ({texts[0][:40]!r}, ...), so it is no"
            " class: add a .cls with the class to each sample"
        )
    numbers = [naming.whole(text) for text in set(texts)]
    if None in numbers:
        listed, labels = naming.from_texts(texts, classes=classes, where=str(root))
    else:
        values = np.fromiter((naming.whole(text) for text in texts), np.int64, len(texts))
        named = called.in_order(int(values.max(initial=0)), say)
        listed, labels = naming.from_numbers(values, names=named, classes=classes, where=str(root))
    shards = len(members.archives) > 1
    told = Names(f"{members.archives[members.archive(row)]}/" * shards + members.names[row] for row in rows)
    return members.listing(rows, told, labels, root=root, classes=listed)


def _samples(members: Members, root: Path) -> Iterator[_Sample]:
    """Neighbours of one key, together."""
    sample: _Sample | None = None
    shard = -1
    for row, name in enumerate(members.names):
        folder, _, base = name.rpartition("/")
        stem, _, suffix = base.partition(".")
        if is_ignored(base) or not suffix or base.startswith("__"):
            continue
        key = f"{folder}/{stem}" if folder else stem
        if sample is None or key != sample.key or shard != members.archive(row):
            if sample is not None:
                yield sample
            sample, shard = _Sample(key), members.archive(row)
        _add(sample, suffix.lower(), row, members, root)
    if sample is not None:
        yield sample


def _add(sample: _Sample, suffix: str, row: int, members: Members, root: Path) -> None:
    if suffix in sample.parts:
        raise DataError(
            f"{root}: the sample {sample.key} has two members .{suffix}: every key may stand once in a shard"
        )
    sample.parts[suffix] = row
    if "." in suffix or not is_image(f"a.{suffix}"):
        return
    if sample.image >= 0:
        raise DataError(
            f"{root}: the sample {sample.key} has two images, {members.names[sample.image]} and {members.names[row]}:"
            " keep one of them"
        )
    sample.image = row


def _kind_of_labels(members: Members, root: Path) -> str:
    """The kind of member that tells the labels: the first of ``LABELS`` that most samples have."""
    counts = Counter(name.rpartition("/")[2].partition(".")[2].lower() for name in members.names)
    most = max(counts[kind] for kind in LABELS)
    dotted = next((name for name in members.names if name.rpartition("/")[2].count(".") > 1), None)
    if not most and dotted is not None:
        raise DataError(
            f"{root}: no sample has a label: a key ends at the first dot, and {dotted} has several: name members"
            " KEY.jpg and KEY.cls, with no dot in KEY"
        )
    if not most:
        raise DataError(f"{root}: no sample has a label: each needs a .cls, .json or .txt beside its image")
    return next(kind for kind in LABELS if 2 * counts[kind] >= most)


def _tell(lacking: dict[str, list[str]], any_left: bool, compound: str, root: Path, say: Say) -> None:
    if not any_left and set(lacking["image"]) & set(lacking["label"]):
        raise DataError(
            f"{root}: images and labels of one key ({lacking['image'][0]}) lie apart, and samples are read in one go:"
            " write the members of each key one after the other (tar --sort=name)"
        )
    hint = f", whose members are called KEY.{compound}: call them KEY.{compound.rpartition('.')[2]}" * bool(compound)
    for what, keys in lacking.items():
        if keys and not any_left:
            raise DataError(
                f"{root}: no sample has an image and a label; {len(keys):,} lack the {what} ({few(keys)}){hint}"
            )
        if keys:
            plural, article = "s" * (len(keys) > 1), "an" if what == "image" else "a"
            say(f"{len(keys):,} sample{plural} without {article} {what} passed over ({few(keys, 3)})")


def _refuse_captions(texts: Sequence[str], root: Path) -> None:
    distinct = set(texts)
    longest = max(distinct, key=len)
    if len(longest) > _LONGEST_NAME or "\n" in longest or 2 * len(distinct) > len(texts):
        raise DataError(
            f"{root}: the .txt members look like captions, not class names ({longest[:40]!r}; {len(distinct):,}"
            f" different ones for {len(texts):,} images): add a .cls with the class to each sample"
        )


def _label(members: Members, sample: _Sample, kind: str, called: _Called) -> str:
    """The label of a sample; ``called`` takes in what its JSON calls the number."""
    root = called.root
    fields = _fields(members, sample, root) if "json" in sample.parts else {}
    text = _from(fields, sample, called) if kind == "json" else _text(members, sample, kind, root)
    if not text.strip():
        raise DataError(f"{root}: the .{kind} of sample {sample.key} is empty")
    number = naming.whole(text.strip())
    if number is None:
        return text.strip()
    key = next((key for key in (*NAME_FIELDS, *NUMBER_FIELDS) if _is_name(fields.get(key))), None)
    if key is not None:
        called.add(str(number), str(fields[key]), sample, loose=key in _LOOSE)
    return str(number)


def _from(fields: dict[str, object], sample: _Sample, called: _Called) -> str:
    root = called.root
    for key in (*NUMBER_FIELDS, *NAME_FIELDS):
        value = fields.get(key)
        if isinstance(value, str | int | float) and not isinstance(value, bool) and not is_image(str(value)):
            called.doubt = key if key in _LOOSE else ""
            return str(value)
        if isinstance(value, list):
            raise DataError(
                f"{root}: the field {key!r} of sample {sample.key} is a list: shards with one label an image are read;"
                " give several labels in a table"
            )
    raise DataError(
        f"{root}: the .json of sample {sample.key} has no field that is a label ({', '.join(NUMBER_FIELDS[:4])}, ...;"
        f" it has {few([str(key) for key in fields]) or 'none'})"
    )


def _fields(members: Members, sample: _Sample, root: Path) -> dict[str, object]:
    try:
        told = json.loads(_text(members, sample, "json", root))
    except (ValueError, RecursionError):
        told = None
    if not isinstance(told, dict):
        raise DataError(f"{root}: the .json of sample {sample.key} is no JSON object")
    return told


def _text(members: Members, sample: _Sample, kind: str, root: Path) -> str:
    row = sample.parts[kind]
    if members.size(row) > _MOST_BYTES[kind]:
        raise DataError(
            f"{root}: the .{kind} of sample {sample.key} has {members.size(row):,} bytes, more than"
            f" {_MOST_BYTES[kind]:,}: it is no label"
        )
    try:
        return members.piece(row).read().decode("utf-8-sig")
    except UnicodeDecodeError:
        raise DataError(f"{root}: the .{kind} of sample {sample.key} is no UTF-8 text") from None


def _is_name(value: object) -> bool:
    return isinstance(value, str) and naming.whole(value) is None and 0 < len(value) <= 200 and not is_image(value)
