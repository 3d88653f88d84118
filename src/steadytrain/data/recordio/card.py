"""The card beside a record file: what is in it, said once, in JSON.

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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from steadytrain.config.plain import build, check_types, plain
from steadytrain.data.sources import filenames
from steadytrain.errors import DataError, RecipeError

KIND = "steadytrain.card"
VERSION = 1

_SPOTS = 64
_SPOT_BYTES = 4096


class Rejected(NamedTuple):
    """A file that was left out, and why."""

    name: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Card:
    """What a record file holds.

    Args:
        classes: names, in the order of their labels; empty for label vectors.
        counts: images of each class.
        num_images: records in the file.
        height, width: smallest, median and largest, in pixels, upright.
        channels: 1 when every image is grey, else 3.
        mean, std: of all pixels, per channel, in [0, 1]; from ``stats_images`` images, exact over those.
        stats_images: how many images ``mean`` and ``std`` are taken from (each of them up to 50,000, then every k-th).
        label_width: labels of each record.
        label_names: of the columns of label vectors, where the source told them.
        by_class: the records lie class by class with ids 0, 1, 2, ...: labels follow from ``counts``.
        kept: images stored byte for byte as they came; the others were encoded anew.
        encodings: images by format (``jpg``, ``png``, ...).
        settings: what :class:`~steadytrain.data.packing.encode.Settings` said.
        bytes: size of the ``.rec``.
        digest: sha256 (hex) of the ``.rec``.
        spots: sha256 (hex) of a few blocks of it; see :func:`digest_of_spots`.
        source: what was packed.
        rejected: files left out, with the reason.
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
    kept: int = 0
    encodings: Mapping[str, int] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    bytes: int = 0
    digest: str = ""
    spots: str = ""
    source: str = ""
    rejected: tuple[Rejected, ...] = ()

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

    def to_json(self) -> str:
        """Indented JSON, the form of ``OUT.json``."""
        told = {"kind": KIND, "version": VERSION, **plain(self)}
        told["rejected"] = [one._asdict() for one in self.rejected]
        return json.dumps(told, indent=1) + "\n"

    @staticmethod
    def from_json(text: str) -> Card:
        """Read what :meth:`to_json` wrote.

        Raises:
            DataError: it is no card, one of a later version, or a damaged one.
        """
        told = _told(text)
        if told is None:
            raise DataError(f'this JSON is no card: it lacks "kind": "{KIND}"')
        if told.get("version") != VERSION:
            raise DataError(f"a card of version {told.get('version')}; this steadytrain reads version {VERSION}")
        rest = {name: value for name, value in told.items() if name not in ("kind", "version", "rejected")}
        try:
            rejected = tuple(Rejected(str(one["name"]), str(one["reason"])) for one in told.get("rejected", ()))
            return build(Card, {**rest, "rejected": rejected})
        except (RecipeError, KeyError, TypeError) as error:
            raise DataError(f"a damaged card: {error}") from error


def _told(text: str) -> dict[str, Any] | None:
    """The members of a card; None for what is none. Raises DataError for what was one."""
    try:
        told = json.loads(text)
    except (ValueError, RecursionError) as error:
        if f'"{KIND}"' in text:
            raise DataError(f"a damaged card: {error}") from error
        return None
    return told if isinstance(told, dict) and told.get("kind") == KIND else None


def together(cards: Sequence[Card]) -> Card:
    """One card for several files of one class list: sums, extremes, and means by the images that they were taken from.

    The medians are those of the file whose median height is the middle one; settings and source are the first one's.

    >>> one, two = (Card(classes=("a", "b"), counts=(n, 1), num_images=n + 1, height=(n, n, n)) for n in (2, 5))
    >>> both = together([one, two])
    >>> both.counts, both.num_images, both.height
    ((7, 2), 9, (2, 2, 5))
    """
    if len(cards) == 1:
        return cards[0]
    channels = max(card.channels for card in cards)
    counted = [card for card in cards if card.mean]
    mean, std = _moments([card for card in counted if card.channels == channels])
    encodings: Counter[str] = Counter()
    for card in cards:
        encodings.update(card.encodings)
    return replace(
        cards[0],
        counts=tuple(map(sum, zip(*(card.counts for card in cards), strict=True))),
        num_images=sum(card.num_images for card in cards),
        height=_spread([card.height for card in cards]),
        width=_spread([card.width for card in cards]),
        channels=channels,
        mean=mean,
        std=std,
        stats_images=sum(card.stats_images for card in counted),
        by_class=False,
        kept=sum(card.kept for card in cards),
        encodings=dict(sorted(encodings.items())),
        bytes=sum(card.bytes for card in cards),
        digest="",
        spots="",
        rejected=tuple(one for card in cards for one in card.rejected),
    )


def _spread(found: Sequence[tuple[int, int, int]]) -> tuple[int, int, int]:
    middle = sorted(one[1] for one in found)[(len(found) - 1) // 2]
    return min(one[0] for one in found), middle, max(one[2] for one in found)


def _moments(cards: Sequence[Card]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    total = sum(card.stats_images for card in cards)
    if not total:
        return (), ()
    shares = [card.stats_images / total for card in cards]
    mean = [
        sum(s * m for s, m in zip(shares, told, strict=True)) for told in zip(*(c.mean for c in cards), strict=True)
    ]
    squares = [[m * m + d * d for m, d in zip(card.mean, card.std, strict=True)] for card in cards]
    second = [sum(s * q for s, q in zip(shares, told, strict=True)) for told in zip(*squares, strict=True)]
    return tuple(mean), tuple(math.sqrt(max(q - m * m, 0)) for q, m in zip(second, mean, strict=True))


def digest_of_spots(read: Callable[[int, int], bytes | memoryview], size: int) -> str:
    """sha256 (hex) of up to 64 blocks of 4 KiB, spread evenly over a file from its first to its last bytes.

    It tells files of one size apart in a moment, however large they are.

    Args:
        read: gives the bytes from one offset to another.
        size: of the file, in bytes.
    """
    found = hashlib.sha256(size.to_bytes(8, "little"))
    most = max(size - _SPOT_BYTES, 0)
    for number in range(_SPOTS):
        at = most * number // (_SPOTS - 1)
        found.update(read(at, min(at + _SPOT_BYTES, size)))
    return found.hexdigest()


def card_path(records: Path) -> Path:
    """Where the card of a ``.rec`` lies."""
    return records.with_suffix(".json")


def card_of(records: Path) -> Card | None:
    """The card beside a ``.rec``; None where there is none (a ``.json`` of something else is not one).

    Raises:
        DataError: it is damaged, or describes another file.
    """
    path = card_path(records)
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, UnicodeDecodeError):
        return None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    try:
        if _told(text) is None:
            return None
        card = Card.from_json(text)
    except DataError as error:
        raise DataError(f"{path}: {error}: pack again, or remove it") from error
    size = records.stat().st_size
    if card.bytes != size:
        raise DataError(
            f"{path} does not describe {records.name}: it tells of {card.bytes:,} bytes, the file has {size:,}:"
            " copy both again, pack again, or remove the card"
        )
    return card


def read_classes(path: str | Path) -> tuple[str, ...]:
    """The class list of a card, given as ``OUT.json`` or as the ``OUT.rec`` that it lies beside.

    Raises:
        DataError: there is no such card, or it lists no classes.
    """
    given = Path(path)
    at = card_path(given) if given.suffix == ".rec" else given
    try:
        card = Card.from_json(at.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"cannot read the card {at}: {error.strerror}: give the .json that pack wrote") from error
    except (DataError, UnicodeDecodeError) as error:
        raise DataError(f"{at}: {error}: give the .json that pack wrote") from error
    if not card.classes:
        raise DataError(f"{at} lists no classes (its labels are vectors): give another card")
    return card.classes


def refuse_other_classes(found: tuple[str, ...], wanted: tuple[str, ...], *, of: str | Path, card: str | Path) -> None:
    """Refuse a set whose class list is not the one wanted, in the same order.

    Args:
        found, wanted: class names.
        of: the set that has ``found``.
        card: where the list that is wanted can be had, for the remedy.

    Raises:
        DataError: names what differs, and the remedy.

    >>> refuse_other_classes(("cat", "elk"), ("cat", "dog"), of="val.rec", card="train.json")
    Traceback (most recent call last):
    steadytrain.errors.DataError: val.rec has other classes (without dog; with elk): pack it with --classes train.json
    """
    if found == wanted:
        return
    lacks, adds = set(wanted) - set(found), set(found) - set(wanted)
    told = [f"without {_few(lacks)}"] if lacks else []
    told += [f"with {_few(adds)}"] if adds else []
    what = "; ".join(told) or "the same in another order"
    raise DataError(f"{of} has other classes ({what}): pack it with --classes {card}")


def _few(names: set[str], most: int = 5) -> str:
    listed = ", ".join(sorted(names)[:most])
    return f"{listed} and {len(names) - most} more" if len(names) > most else listed


def record_files(path: str | Path) -> list[Path]:
    """The record files that a name stands for, in their order: one, or several by braces and wildcards.

    Raises:
        DataError: there is none of that name.
    """
    named = Path(path)
    if named.exists() or not filenames.is_pattern(str(path)):
        return [named]
    return filenames.expand(str(path))


def card_for(path: Path) -> Card | None:
    """The card of what a name stands for: of several files one for all; None where one lacks it.

    Raises:
        DataError: a card is damaged, describes another file, or the files have different classes.
    """
    files = record_files(path)
    cards = [card for card in map(card_of, files) if card is not None]
    if len(cards) < len(files):
        return None
    for file, card in zip(files, cards, strict=True):
        refuse_other_classes(card.classes, cards[0].classes, of=file, card=files[0].with_suffix(".json"))
        if card.label_names != cards[0].label_names:
            raise DataError(f"{file} has other labels in its vectors than {files[0]}: pack both from one table")
    return together(cards)
