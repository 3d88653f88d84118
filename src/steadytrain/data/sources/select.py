"""Parts of listings: some classes, a share held out, several merged, one in shards. Listings in, listings out."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from steadytrain.data.sources.filenames import few, is_image, repeated
from steadytrain.data.sources.labels import whole_number
from steadytrain.data.sources.listing import Labels, Listing, Names, Pieces, Say
from steadytrain.errors import DataError, did_you_mean

Rows = NDArray[np.int64]
"""Numbers of images."""

_NO_LABEL = frozenset(["", "nan", "null", "n/a", "#n/a", "-1", "undefined"])
_CLUTTER = re.compile(r"(?:\d+\.)?clutter|BACKGROUND_Google", re.I)


@dataclass(frozen=True)
class Selection:
    """What is taken of a source, and how it is split.

    Args:
        only, exclude: classes to keep, and to leave out; empty keeps all.
        val_fraction: of each class to hold out for validation; None: none.
        train_per_class: instead, how many images of each class to train with.
        seed: chooses which.
    """

    only: Sequence[str] = ()
    exclude: Sequence[str] = ()
    val_fraction: float | None = None
    train_per_class: int | None = None
    seed: int = 0

    def of(self, listings: Sequence[Listing], say: Say) -> list[Listing]:
        """Apply it. Raises DataError for values that do not fit the source."""
        chosen = choose(without_loose(listings, say), only=self.only, exclude=self.exclude)
        remark(chosen, say)
        if self.val_fraction is None and self.train_per_class is None:
            return chosen
        if splits := ", ".join(listing.split for listing in chosen if listing.split):
            raise DataError(f"the source is split already ({splits}): drop --val-fraction and --train-per-class")
        if not 0 <= self.seed < 2**64:
            raise DataError(f"--seed is {self.seed}; it must be from 0 to 2**64 - 1")
        if chosen[0].pieces is None and (again := sum(1 for _ in repeated(chosen[0].names, str))):
            plural = "s repeat an image that is" if again > 1 else " repeats an image that is"
            say(f"{again:,} line{plural} listed before, and may come into the other part: list each once to split them")
        return hold_out(chosen[0], fraction=self.val_fraction, per_class=self.train_per_class, seed=self.seed)


def take(listing: Listing, rows: Rows) -> Listing:
    """Some images of a listing, in the order of ``rows``."""
    return replace(
        listing,
        names=listing.names.take(rows) if isinstance(listing.names, Names) else [listing.names[row] for row in rows],
        labels=listing.labels[rows],
        sizes=listing.sizes[rows],
        times=listing.times[rows],
        ids=None if listing.ids is None else listing.ids[rows],
        pieces=None if listing.pieces is None else listing.pieces.take(rows),
    )


def choose(listings: Sequence[Listing], *, only: Sequence[str] = (), exclude: Sequence[str] = ()) -> list[Listing]:
    """Keep the images of some classes, all where ``only`` is empty; labels are numbered anew, in the classes' order.

    Raises:
        DataError: there is no such class, fewer than two are left, or labels are vectors.
    """
    if not only and not exclude:
        return list(listings)
    classes = listings[0].classes
    if not classes:
        raise DataError("labels are vectors, and classes cannot be chosen: drop --only and --exclude")
    for name in (*only, *exclude):
        if name not in classes:
            raise DataError(f"there is no class {name}.{did_you_mean(name, classes)} The classes: {few(classes)}")
    kept = [number for number, name in enumerate(classes) if (not only or name in only) and name not in exclude]
    if len(kept) < 2:
        raise DataError(f"{len(kept)} of {len(classes)} classes would be left: a classifier needs two or more")
    renumbered = np.full(len(classes), -1, np.int64)
    renumbered[kept] = np.arange(len(kept))
    chosen = []
    for listing in listings:
        labels = renumbered[listing.labels.astype(np.int64)]
        part = take(listing, np.flatnonzero(labels >= 0))
        chosen.append(replace(part, labels=labels[labels >= 0], classes=tuple(classes[number] for number in kept)))
    return chosen


def hold_out(
    listing: Listing, *, fraction: float | None = None, per_class: int | None = None, seed: int = 0
) -> list[Listing]:
    """Split a listing in two, for training and for validation; a pure function of labels and seed.

    Args:
        listing: of any images.
        fraction: of each class to validate with, above 0 and below 1.
        per_class: instead, how many images of each class to train with; the rest validates (Caltech-256: 60).
        seed: chooses which.

    Raises:
        DataError: a value out of range, a class with fewer images, or label vectors.
    """
    if fraction is not None and per_class is not None:
        raise DataError("--val-fraction and --train-per-class both split the source: give one of them")
    if per_class is not None:
        if listing.labels.ndim > 1:
            raise DataError("labels are vectors: images of each class cannot be counted, hold out a fraction")
        if per_class < 1:
            raise DataError(f"the images of each class to train with are {per_class}; it must be 1 or more")
        counts = zip(listing.classes, listing.counts(), strict=True)
        if short := [f"{name} ({count})" for name, count in counts if 0 < count < per_class]:
            plural = "es have" if len(short) > 1 else " has"
            raise DataError(
                f"{len(short)} class{plural} fewer than {per_class} images ({few(short)}): ask for fewer, or exclude"
            )
        train, val = split_per_class(listing.labels.astype(np.int64), count=per_class, seed=seed)
    elif fraction is not None and 0 < fraction < 1:
        train, val = split_by_fraction(listing.labels, fraction=fraction, seed=seed)
    else:
        raise DataError(f"the share to hold out is {fraction}; it must be above 0 and below 1")
    if not len(val):
        raise DataError(f"no image of {len(listing):,} would be left to validate with: hold out more")
    return [replace(take(listing, train), split="train"), replace(take(listing, val), split="val", passed_over=[])]


def split_by_fraction(labels: Labels, *, fraction: float, seed: int) -> tuple[Rows, Rows]:
    """Split image numbers in two, class by class.

    Of n images of a class ``round(n * fraction)`` are held out, but at least one of two or more, and never all: with
    a ``fraction`` above 0 every class that can is in both parts. Label vectors are split without regard to them. The
    ``seed``, 0 to 2**64 - 1, chooses which images.

    Returns:
        The numbers to train on and those held out, int64, each rising; together they are 0 to N - 1.

    Raises:
        DataError: the fraction is out of range.

    >>> train, val = split_by_fraction(np.array([0, 0, 0, 1, 1, 1]), fraction=0.34, seed=1)
    >>> len(train), len(val), sorted([*train.tolist(), *val.tolist()])
    (4, 2, [0, 1, 2, 3, 4, 5])
    """
    if not 0 <= fraction < 1:
        raise DataError(f"the share to hold out is {fraction}; it must be from 0 up to, not including, 1")
    groups = labels.astype(np.int64) if labels.ndim == 1 else np.zeros(len(labels), np.int64)
    order, rank, counts = _shuffle_classes(groups, seed)
    most = np.maximum(counts - 1, 0)
    wanted = np.minimum(np.maximum(np.rint(counts * fraction).astype(np.int64), 1), most) if fraction else 0 * counts
    held = rank < np.repeat(wanted, counts)
    return np.sort(order[~held]), np.sort(order[held])


def split_per_class(labels: NDArray[np.int64], *, count: int, seed: int) -> tuple[Rows, Rows]:
    """Split image numbers in two: ``count`` of each class to train on, or all that it has, and the rest held out.

    >>> train, val = split_per_class(np.array([0, 0, 0, 1, 1]), count=2, seed=1)
    >>> len(train), len(val)
    (4, 1)
    """
    order, rank, _ = _shuffle_classes(labels, seed)
    return np.sort(order[rank < count]), np.sort(order[rank >= count])


def _shuffle_classes(groups: NDArray[np.int64], seed: int) -> tuple[Rows, Rows, Rows]:
    """Image numbers sorted by class and at random within each, their ranks in their classes, and the classes' sizes."""
    order = np.lexsort((_splitmix64(len(groups), seed), groups))
    _, starts, counts = np.unique(groups[order], return_index=True, return_counts=True)
    return order, np.arange(len(groups)) - np.repeat(starts, counts), counts


def _splitmix64(n: int, seed: int) -> NDArray[np.uint64]:
    """uint64[n]: SplitMix64 at positions 1 to n (Steele, Lea and Flood, OOPSLA 2014), started from a mixed seed.

    Written out, because a library's generator may change from one version to the next, and a split must not.
    """
    golden = np.uint64(0x9E3779B97F4A7C15)
    with np.errstate(over="ignore"):
        start = _mix(np.array([seed], np.uint64) + golden)
        return _mix(start + golden * np.arange(1, n + 1, dtype=np.uint64))


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def without_loose(listings: Sequence[Listing], say: Say) -> list[Listing]:
    """Say which images lie beside the folders of classes, in none of them, and drop them from what is passed over."""
    kept = []
    for listing in listings:
        if loose := [name for name in listing.passed_over if is_image(name)]:
            what = "images in no class are" if len(loose) > 1 else "image in no class is"
            say(f"{f'{listing.split}: ' * bool(listing.split)}{len(loose):,} {what} passed over ({few(loose, 3)})")
            listing = replace(listing, passed_over=Names(name for name in listing.passed_over if not is_image(name)))
        kept.append(listing)
    return kept


def remark(listings: Sequence[Listing], say: Say) -> None:
    """Say what is well known, or odd, about classes: clutter, names alike, names that stand for no label."""
    classes, labels = listings[0].classes, listings[0].labels
    alike: dict[str, str] = {}
    for name in classes:
        other = alike.setdefault(" ".join(name.casefold().split()), name)
        if other != name:
            say(f"{other!r} and {name!r} are two classes that differ in case or blanks alone: mend one if they are one")
        if _CLUTTER.fullmatch(name):
            say(f"{name} is no category but pictures of none of the others: leave it out with --exclude {name}")
        if name.strip().casefold() in _NO_LABEL:
            say(f"{name!r} is a class here: leave it out with --exclude {name} if it stands for images without a label")
    numbers = [name for name in classes if whole_number(name) is not None]
    if 0 < len(numbers) < len(classes):
        words = [name for name in classes if whole_number(name) is None]
        say(
            f"some classes are called by numbers ({few(numbers, 3)}) and some by words ({few(words, 3)}): mend labels"
            " that mean the same"
        )
    if labels.ndim == 2 and labels.shape[1] == 1:
        values = labels[:, 0]
        odd = values[(values < 0) | (values % 1 != 0) | (values >= 2**24)]
        example = f", such as {float(odd[0]):g}," if len(odd) else ""
        say(f"labels are no class numbers{example} and are kept as they are: training needs 0, 1, 2 and so on")


def merge(listings: Sequence[Listing]) -> Listing:
    """Several listings as one, in their order.

    Those of one class list are appended. Different lists are united where their classes have names: sorted by code
    point, and labels numbered anew. Columns of label vectors go by their names, in the order of the first.

    Raises:
        DataError: different class lists of which one has only numbers, vectors of other columns or beside classes, or
            bare pixels of different shapes.
    """
    listings = _align_columns(listings)
    classes, labels = _unite_classes(listings)
    root = Path(os.path.commonpath([listing.root.absolute() for listing in listings]))
    all_ids = [listing.ids for listing in listings if listing.ids is not None]
    ids = np.concatenate(all_ids) if len(all_ids) == len(listings) else None
    if ids is None or len(np.unique(ids)) < len(ids):
        ids = np.arange(len(labels))
    names = Names()
    for listing in listings:
        prefix = os.path.relpath(listing.root.absolute(), root) if listing.pieces is None else "."
        names.extend(name if prefix == "." else os.path.join(prefix, name) for name in listing.names)  # noqa: PTH118
    with_pieces = any(listing.pieces is not None for listing in listings)
    return Listing(
        split=listings[0].split,
        root=root,
        classes=classes,
        names=names,
        labels=labels,
        sizes=np.concatenate([listing.sizes for listing in listings]),
        times=np.concatenate([listing.times for listing in listings]),
        ids=ids,
        passed_over=Names(name for listing in listings for name in listing.passed_over),
        pieces=_merge_pieces(listings) if with_pieces else None,
        label_names=listings[0].label_names,
    )


def merge_sources(sources: Sequence[Sequence[Listing]]) -> list[Listing]:
    """Merge the listings of several sources, split by split. Raises DataError where they are not split alike."""
    splits = [[listing.split for listing in listings] for listings in sources]
    if any(split != splits[0] for split in splits):
        text = "; ".join(", ".join(split) if split != [""] else "not split" for split in splits)
        raise DataError(f"the sources are split differently ({text}): pack each by itself, then merge the .rec files")
    return [merge(parts) for parts in zip(*sources, strict=True)]


def shard(listing: Listing, count: int) -> list[Listing]:
    """Contiguous parts whose sizes differ by one at most; ids stay unique over all of them.

    Raises:
        DataError: more parts than images, or fewer than one.
    """
    if not 1 <= count <= len(listing):
        raise DataError(f"{count} shards of {len(listing):,} images: it must be from 1 to {len(listing):,}")
    if listing.ids is None and count > 1:
        listing = replace(listing, ids=np.arange(len(listing)))
    parts = [take(listing, rows) for rows in np.array_split(np.arange(len(listing)), count)]
    return [parts[0], *(replace(part, passed_over=[]) for part in parts[1:])]


def _align_columns(listings: Sequence[Listing]) -> list[Listing]:
    """Listings whose label vectors have their columns in one order."""
    wanted = listings[0].label_names
    aligned: list[Listing] = []
    for listing in listings:
        if sorted(listing.label_names) != sorted(wanted):
            other = few(sorted(set(listing.label_names) ^ set(wanted)))
            raise DataError(
                f"the sources have different labels in their vectors (not in all of them: {other}): give them as one"
                " table, or name the same columns in each"
            )
        if listing.label_names != wanted:
            order = [listing.label_names.index(name) for name in wanted]
            listing = replace(listing, labels=listing.labels[:, order], label_names=wanted)
        aligned.append(listing)
    return aligned


def _unite_classes(listings: Sequence[Listing]) -> tuple[tuple[str, ...], Labels]:
    lists = [listing.classes for listing in listings]
    labels: list[Any] = [listing.labels for listing in listings]
    if len({part.shape[1:] for part in labels}) > 1:
        raise DataError("some sources have label vectors of another length, or classes: they cannot be merged")
    if all(names == lists[0] for names in lists):
        return lists[0], np.concatenate(labels)
    if numbered := [names for names in lists if all(whole_number(name) is not None for name in names)]:
        raise DataError(
            f"the sources have different classes, and those of one are only numbers ({few(numbered[0])}): give its"
            " class names with --classes CARD"
        )
    united = tuple(sorted(set().union(*lists)))
    number_of = {name: number for number, name in enumerate(united)}
    tables = [np.array([number_of[name] for name in names], np.int64) for names in lists]
    return united, np.concatenate([table[part.astype(np.int64)] for table, part in zip(tables, labels, strict=True)])


def _merge_pieces(listings: Sequence[Listing]) -> Pieces:
    parts = []
    for listing in listings:
        if listing.pieces is not None:
            parts.append(listing.pieces)
            continue
        paths = Names(os.path.join(listing.root, name) for name in listing.names)  # noqa: PTH118
        file = np.arange(len(paths), dtype=np.int32)
        parts.append(Pieces(paths, file, np.zeros(len(paths), np.int64), listing.sizes))
    shapes = {part.pixels for part in parts}
    if len(shapes) > 1:
        raise DataError(
            "bare pixels of one shape cannot be merged with other images: pack each by itself, then merge the .rec"
            " files"
        )
    starts = np.cumsum([0, *(len(part.paths) for part in parts)])
    crcs = [np.full(len(part), -1, np.int64) if part.crc is None else part.crc for part in parts]
    deflated = [np.zeros(len(part), np.bool_) if part.deflated is None else part.deflated for part in parts]
    return Pieces(
        paths=Names(path for part in parts for path in part.paths),
        file=np.concatenate([part.file + np.int32(start) for part, start in zip(parts, starts[:-1], strict=True)]),
        offset=np.concatenate([part.offset for part in parts]),
        size=np.concatenate([part.size for part in parts]),
        deflated=np.concatenate(deflated) if any(column.any() for column in deflated) else None,
        pixels=shapes.pop(),
        crc=np.concatenate(crcs) if any((column >= 0).any() for column in crcs) else None,
    )
