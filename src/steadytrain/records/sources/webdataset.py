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

from steadytrain.errors import DataError
from steadytrain.records.listing import Listing, is_ignored, is_image
from steadytrain.records.names import Names
from steadytrain.records.sources import naming
from steadytrain.records.sources.members import Members, Say, few

LABELS = ("cls", "json", "txt")
NUMBER_FIELDS = ("label", "cls", "class", "class_id", "class_index", "label_id", "category_id", "target", "y")
NAME_FIELDS = ("class_name", "label_name", "classname", "category", "category_name", "name", "synset", "wnid")

_MOST_BYTES = {"cls": 4096, "json": 1 << 20, "txt": 1 << 16}
_LONGEST_NAME = 64
_LOOKED_AT = 10_000  # members


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
    if any(name.endswith(".cls") for name in members.names):
        return True
    if len({name.rpartition("/")[0] for name in members.names if is_image(name)}) != 1:
        return False
    # Samples are neighbours, so that looking at the first ones is enough.
    first = [name for name, _ in zip(members.names, range(_LOOKED_AT), strict=False)]
    sidecars = {name.rpartition(".")[0] for name in first if name.endswith((".json", ".txt"))}
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
    names: dict[str, str] = {}
    lacking: dict[str, list[str]] = {"image": [], "label": []}
    kind = _kind_of_labels(members, root)
    for sample in _samples(members, root):
        if sample.image < 0 or kind not in sample.parts:
            lacking["label" if sample.image >= 0 else "image"].append(sample.key)
            continue
        rows.append(sample.image)
        text = _label(members, sample, kind, names, root)
        texts.append(known.setdefault(text, text))
    _tell(lacking, bool(rows), root, say)
    if kind == "txt":
        _refuse_captions(texts, root)
    numbers = [naming.whole(text) for text in set(texts)]
    if None in numbers:
        listed, labels = naming.from_texts(texts, classes=classes, where=str(root))
    else:
        values = np.fromiter((naming.whole(text) for text in texts), np.int64, len(texts))
        named = _all_named(names, int(values.max(initial=0)))
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
    if not most:
        raise DataError(f"{root}: no sample has a label: each needs a .cls, .json or .txt beside its image")
    return next(kind for kind in LABELS if 2 * counts[kind] >= most)


def _tell(lacking: dict[str, list[str]], any_left: bool, root: Path, say: Say) -> None:
    for what, keys in lacking.items():
        if keys and not any_left:
            raise DataError(f"{root}: no sample has an image and a label; {len(keys):,} lack the {what} ({few(keys)})")
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


def _all_named(names: dict[str, str], largest: int) -> list[str] | None:
    """Names in the order of the numbers, where every number up to the largest has one of its own."""
    if len(names) != largest + 1 or len(set(names.values())) != len(names):
        return None
    return (
        [names[str(number)] for number in range(largest + 1)]
        if set(names) == set(map(str, range(largest + 1)))
        else None
    )


def _label(members: Members, sample: _Sample, kind: str, names: dict[str, str], root: Path) -> str:
    """The label of a sample; ``names`` takes in what its JSON calls the number."""
    fields = _fields(members, sample, root) if "json" in sample.parts else {}
    text = _from(fields, sample, root) if kind == "json" else _text(members, sample, kind, root)
    if not text.strip():
        raise DataError(f"{root}: the .{kind} of sample {sample.key} is empty")
    number = naming.whole(text.strip())
    if number is None:
        return text.strip()
    name = next((fields[key] for key in (*NAME_FIELDS, *NUMBER_FIELDS) if _is_name(fields.get(key))), None)
    if name is not None:
        names.setdefault(str(number), str(name))
    return str(number)


def _from(fields: dict[str, object], sample: _Sample, root: Path) -> str:
    for key in (*NUMBER_FIELDS, *NAME_FIELDS):
        value = fields.get(key)
        if isinstance(value, str | int | float) and not isinstance(value, bool):
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
        return members.piece(row).read().decode("utf-8")
    except UnicodeDecodeError:
        raise DataError(f"{root}: the .{kind} of sample {sample.key} is no UTF-8 text") from None


def _is_name(value: object) -> bool:
    return isinstance(value, str) and naming.whole(value) is None and 0 < len(value) <= 200
