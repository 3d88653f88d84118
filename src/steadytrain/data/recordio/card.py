"""The card beside a record file: what is in it, as JSON; and record files named by one pattern.

>>> card = Card(classes=("cat", "dog"), counts=(2, 1), num_images=3, height=(30, 32, 40), width=(30, 32, 48))
>>> Card.from_json(card.to_json()) == card
True
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median_low
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from steadytrain.config.plain import build, check_types, parse_json, plain
from steadytrain.data import filenames
from steadytrain.data.storage.local_files import LocalFile, read_patiently
from steadytrain.errors import DataError, RecipeError, SteadyError
from steadytrain.files import open_regular, read_text

KIND = "steadytrain.card"
VERSION = 1

_SPOTS = 64
_SPOT_BYTES = 4096


class LabelNames(tuple[str, ...]):
    """The class list of images that may have several labels: the names of the columns of their label vectors.

    A source that is read with it gives label vectors, also where no image has more than one label.
    """

    __slots__ = ()


class RunClasses(tuple[str, ...]):
    """A class list of a source of which it is decided which folders are classes, as when its run began; empty: all."""

    __slots__ = ()


class Rejected(NamedTuple):
    """A file that was left out, and why."""

    name: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Card:
    """The contents of a record file.

    Args:
        classes: names, in the order of their labels; empty for label vectors.
        counts: images of each class.
        num_images: records in the file.
        height, width: smallest, median and largest, in pixels, upright.
        channels: 1 when every image is grey, else 3.
        mean, std: of all pixels, per channel, in [0, 1]; from ``stats_images`` images, exact over those.
        stats_images: how many images ``mean`` and ``std`` are taken from (each of them up to 50,000, then every k-th).
        label_width: labels of each record.
        label_names: of the columns of label vectors, where the source names them.
        by_class: the records lie class by class with rising ids without a gap: labels follow from ``counts``.
        first_id: of the first record, where they do; not in the file where it is 0.
        kept: images stored byte for byte as they came; the others were encoded anew.
        encodings: images by format (``jpg``, ``png``, ...).
        settings: those of :class:`~steadytrain.data.images.encode.PackSettings`.
        bytes: size of the ``.rec``.
        digest: sha256 (hex) of the ``.rec``.
        spots: sha256 (hex) of a few blocks of it; see :func:`digest_of_spots`.
        checksums: sha256 (hex) of the index and of the list that were written with it, by suffix.
        source: what was packed.
        label_column: of a table that the labels come from, in lower case; not in the file where there is none.
        rejected: files left out, with the reason.
        remarks: lines on what the images had and the records have not; not in the file where there are none.
    """

    classes: tuple[str, ...]
    counts: tuple[int, ...]
    num_images: int
    height: tuple[int, int, int] = (0, 0, 0)
    width: tuple[int, int, int] = (0, 0, 0)
    channels: int = 3
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    stats_images: int = 0
    label_width: int = 1
    label_names: tuple[str, ...] = ()
    by_class: bool = False
    first_id: int = 0
    kept: int = 0
    encodings: Mapping[str, int] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    bytes: int = 0
    digest: str = ""
    spots: str = ""
    checksums: Mapping[str, str] = field(default_factory=dict)
    source: str = ""
    label_column: str = ""
    rejected: tuple[Rejected, ...] = ()
    remarks: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_types(self, "card")
        if len(self.counts) != len(self.classes):
            raise DataError(f"a card with {len(self.classes)} classes and {len(self.counts)} counts")
        if self.classes and (min(self.counts) < 0 or sum(self.counts) != self.num_images):
            raise DataError(f"a card whose counts of classes do not add up to its {self.num_images} images")
        if self.label_names and len(self.label_names) != self.label_width:
            raise DataError(f"a card with {self.label_width} labels and {len(self.label_names)} names of them")
        if self.channels not in (1, 3) or not len(self.mean) == len(self.std) in (0, self.channels):
            raise DataError(f"a card with {self.channels} channels, mean {self.mean} and std {self.std}")

    @property
    def class_list(self) -> tuple[str, ...]:
        """Return the names of a model's outputs: the classes; of label vectors the names of their columns.

        Columns without names are called by their numbers. Empty for single values that are no classes.
        """
        if self.classes or (self.label_width == 1 and not self.label_names):
            return self.classes
        return LabelNames(self.label_names or map(str, range(self.label_width)))

    def to_json(self) -> str:
        """Return indented JSON, the form of ``OUT.json``."""
        members = {"kind": KIND, "version": VERSION, **plain(self)}
        members["rejected"] = [file._asdict() for file in self.rejected]
        for name in ("first_id", "label_column", "checksums", "remarks"):
            if not members[name]:
                del members[name]
        return json.dumps({**members, "checksum": _checksum(members)}, indent=1) + "\n"

    @staticmethod
    def from_json(text: str) -> Card:
        """Read what :meth:`to_json` wrote.

        Raises:
            DataError: it is no card, one of a later version, or a damaged one.
        """
        members = _members(text)
        if members is None:
            raise DataError(f'this JSON file is not a card: it lacks "kind": "{KIND}"')
        if members.get("version") != VERSION:
            raise DataError(f"a card of version {members.get('version')}; this steadytrain reads version {VERSION}")
        if "checksum" in members and members.pop("checksum") != _checksum(members):
            raise DataError('a damaged card: its checksum is another (remove "checksum" if you have edited it)')
        other = ("kind", "version", "rejected", "full_chroma")  # the last: of earlier versions
        fields = {name: value for name, value in members.items() if name not in other}
        try:
            rejected = tuple(Rejected(str(file["name"]), str(file["reason"])) for file in members.get("rejected", ()))
            return build(Card, {**fields, "rejected": rejected})
        except (RecipeError, KeyError, TypeError) as error:
            raise DataError(f"a damaged card: {error}") from error


def _members(text: str) -> dict[str, Any] | None:
    """Return the members of a card; None for what is none. Raises DataError for what was one."""
    try:
        members = parse_json(text)
    except (ValueError, RecursionError) as error:
        if f'"{KIND}"' in text or '"num_images"' in text:
            raise DataError(f"a damaged card: {error}") from error
        return None
    if not isinstance(members, dict):
        return None
    if members.get("kind") != KIND and members.keys() >= {"version", "classes", "counts", "num_images"}:
        raise DataError(f"a damaged card: its kind is {str(members.get('kind'))[:40]!r}")
    return members if members.get("kind") == KIND else None


def _checksum(members: Mapping[str, Any]) -> str:
    """Return the sha256 (hex) of the members of a card, however they are written."""
    return hashlib.sha256(json.dumps(members, sort_keys=True).encode()).hexdigest()


def merge_cards(cards: Sequence[Card], files: Sequence[Path]) -> Card:
    """Merge the cards of several files: sums, extremes, and means weighted by images.

    The medians are those of the file whose median height is the middle one; settings and source are the first one's.

    Raises:
        DataError: the files have different classes, or other labels in their vectors.

    >>> one, two = (Card(classes=("a", "b"), counts=(n, 1), num_images=n + 1, height=(n, n, n)) for n in (2, 5))
    >>> both = merge_cards([one, two], [Path("one.rec"), Path("two.rec")])
    >>> both.counts, both.num_images, both.height
    ((7, 2), 9, (2, 2, 5))
    """
    if len(cards) == 1:
        return cards[0]
    for file, card in zip(files, cards, strict=True):
        remedy = f"{files[0].with_suffix('.json')}, or both into one: steady pack {files[0]} {file} OUT"
        refuse_other_classes(card.classes, cards[0].classes, of=file, card=remedy)
        if card.label_names != cards[0].label_names:
            raise DataError(f"{file} has other labels in its vectors than {files[0]}: pack both from one table")
    channels = max(card.channels for card in cards)
    counted = [card for card in cards if card.mean]
    mean, std = _merge_moments([card for card in counted if card.channels == channels])
    encodings: Counter[str] = Counter()
    for card in cards:
        encodings.update(card.encodings)
    return replace(
        cards[0],
        counts=tuple(map(sum, zip(*(card.counts for card in cards), strict=True))),
        num_images=sum(card.num_images for card in cards),
        height=_merge_extremes([card.height for card in cards]),
        width=_merge_extremes([card.width for card in cards]),
        channels=channels,
        mean=mean,
        std=std,
        stats_images=sum(card.stats_images for card in counted),
        by_class=False,
        first_id=0,
        kept=sum(card.kept for card in cards),
        encodings=dict(sorted(encodings.items())),
        bytes=sum(card.bytes for card in cards),
        digest="",
        spots="",
        checksums={},
        rejected=tuple(file for card in cards for file in card.rejected),
        remarks=tuple(dict.fromkeys(line for card in cards for line in card.remarks)),
    )


def _merge_extremes(sizes: Sequence[tuple[int, int, int]]) -> tuple[int, int, int]:
    smallest, medians, largest = zip(*sizes, strict=True)
    return min(smallest), median_low(medians), max(largest)


def _merge_moments(cards: Sequence[Card]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    total = sum(card.stats_images for card in cards)
    if not total:
        return (), ()
    shares = [card.stats_images / total for card in cards]
    means = zip(*(card.mean for card in cards), strict=True)
    squares = [[m * m + d * d for m, d in zip(card.mean, card.std, strict=True)] for card in cards]
    mean = [sum(s * m for s, m in zip(shares, channel, strict=True)) for channel in means]
    second = [sum(s * q for s, q in zip(shares, channel, strict=True)) for channel in zip(*squares, strict=True)]
    return tuple(mean), tuple(math.sqrt(max(q - m * m, 0)) for q, m in zip(second, mean, strict=True))


def digest_of_spots(read: Callable[[int, int], bytes | memoryview], size: int) -> str:
    """Digest up to 64 blocks of 4 KiB, spread evenly over a file from its first to its last bytes: sha256 (hex).

    It distinguishes files of one size in a moment, however large they are. ``read`` gives the bytes from one offset to
    another.
    """
    sha256 = hashlib.sha256(size.to_bytes(8, "little"))
    for start, end in zip(*(column.tolist() for column in spots_of(size)), strict=True):
        sha256.update(read(start, end))
    return sha256.hexdigest()


def spots_of(size: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return where the blocks of :func:`digest_of_spots` begin and end."""
    starts = max(size - _SPOT_BYTES, 0) * np.arange(_SPOTS) // (_SPOTS - 1)
    return starts, np.minimum(starts + _SPOT_BYTES, size)


def card_path(records: Path) -> Path:
    """Return where the card of a ``.rec`` lies."""
    return records.with_suffix(".json")


def card_of(records: Path) -> Card | None:
    """Read the card beside a ``.rec``; None where there is none (a ``.json`` of something else is not one).

    Raises:
        DataError: it is damaged, or describes another file.
    """
    path = card_path(records)
    try:
        text = read_patiently(partial(read_text, path, most=None, errors="replace"), str(path))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    try:
        if _members(text) is None:
            return None
        card = Card.from_json(text)
    except DataError as error:
        raise DataError(f"{path}: {error}: pack again, or remove it") from error
    size = records.stat().st_size
    if card.bytes != size:
        raise DataError(
            f"{path} does not describe {records.name}: it states {card.bytes:,} bytes, the file has {size:,}:"
            " copy both again, pack again, or remove the card"
        )
    return card


def companion_fault(path: Path, checksum: str) -> str:
    """Say what is wrong with a file beside a ``.rec`` whose checksum its card has; empty: nothing."""
    try:
        with open_regular(path) as file:
            is_same = hashlib.file_digest(file, "sha256").hexdigest() == checksum
    except OSError as error:
        return f"cannot read {path}: {error.strerror or error}"
    return "" if is_same else f"{path} has changed since it was packed"


def damage_of(records: Path) -> str:
    """Say which file of a packed set is not as it was written; empty where all are, of the records a few blocks."""
    try:
        card = card_of(records)
        if card is None:
            return f"{card_path(records)} is gone, or no card"
        with open_regular(records) as file, closing(LocalFile(records, file.fileno())) as view:
            if card.spots and card.spots != digest_of_spots(view.read, card.bytes):
                return f"{records} has changed since it was packed"
    except (OSError, SteadyError) as error:
        return str(error)
    faults = (companion_fault(records.with_suffix(suffix), value) for suffix, value in card.checksums.items())
    return next(filter(None, faults), "")


def read_classes(path: str | Path) -> tuple[str, ...]:
    """Read the class list of a card, given as ``OUT.json`` or as the ``OUT.rec`` that it lies beside.

    Of label vectors it is a :class:`LabelNames`.

    Raises:
        DataError: there is no such card, or it lists no classes.
    """
    file = Path(path)
    file = card_path(file) if file.suffix == ".rec" else file
    try:
        card = Card.from_json(read_text(file, most=None))
    except OSError as error:
        raise DataError(f"cannot read the card {file}: {error.strerror}: give the .json that pack wrote") from error
    except (DataError, UnicodeDecodeError) as error:
        raise DataError(f"{file}: {error}: give the .json that pack wrote") from error
    if not card.class_list:
        raise DataError(f"{file} lists no classes (its labels are numbers): give another card")
    return card.class_list


def refuse_other_classes(
    classes: tuple[str, ...], wanted: tuple[str, ...], *, of: str | Path, card: str | Path
) -> None:
    """Refuse a set whose class list is not the one wanted, in the same order.

    Args:
        of: the set that has ``classes``.
        card: where the list that is wanted can be had, for the remedy.

    Raises:
        DataError: names what differs, and the remedy.

    >>> refuse_other_classes(("cat", "elk"), ("cat", "dog"), of="val.rec", card="train.json")
    Traceback (most recent call last):
    steadytrain.errors.DataError: val.rec has other classes (without dog; with elk): pack it with --classes train.json
    """
    if classes == wanted:
        return
    differences = []
    for preposition, names in (("without", set(wanted) - set(classes)), ("with", set(classes) - set(wanted))):
        if names:
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            differences.append(f"{preposition} {', '.join(sorted(names)[:5])}{more}")
    difference = "; ".join(differences) or "the same in another order"
    raise DataError(f"{of} has other classes ({difference}): pack it with --classes {card}")


def record_files(path: str | Path) -> list[Path]:
    """List the record files that a name stands for, in their order: one, or several by braces and wildcards.

    Raises:
        DataError: there is none of that name.
    """
    named = Path(path)
    if not filenames.is_pattern(str(path)):
        return [named]
    with suppress(OSError):  # names of many files may be longer than a path may be
        if named.exists():
            return [named]
    return filenames.expand(str(path))


def join_paths(files: Sequence[Path]) -> Path:
    """Name several record files by one pattern."""
    return files[0] if len(files) == 1 else Path("{" + ",".join(map(str, files)) + "}")


def card_for(path: Path) -> Card | None:
    """Read the card of what a name stands for: of several files one for all; None where one lacks it.

    Raises:
        DataError: a card is damaged, describes another file, or the files have different classes.
    """
    files = record_files(path)
    cards = [card for card in map(card_of, files) if card is not None]
    return merge_cards(cards, files) if len(cards) == len(files) else None
