"""Parts of listings: some classes, a share held out, several merged, one in shards. Listings in, listings out."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from steadytrain.data.sources import split
from steadytrain.data.sources.listing import Listing, is_image
from steadytrain.data.sources.members import few
from steadytrain.data.sources.names import Names
from steadytrain.data.sources.naming import whole
from steadytrain.data.sources.pieces import Pieces
from steadytrain.errors import DataError, did_you_mean

Rows = NDArray[np.int64]

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

    def of(self, listings: Sequence[Listing], say: Callable[[str], None]) -> list[Listing]:
        """Apply it. Raises DataError for values that do not fit the source."""
        chosen = choose(without_loose(listings, say), only=self.only, exclude=self.exclude)
        remark(chosen, say)
        if self.val_fraction is None and self.train_per_class is None:
            return chosen
        if len(chosen) > 1:
            told = ", ".join(one.split for one in chosen)
            raise DataError(f"the source is split already ({told}): drop --val-fraction and --train-per-class")
        if not 0 <= self.seed < 2**64:
            raise DataError(f"--seed is {self.seed}; it must be from 0 to 2**64 - 1")
        if self.val_fraction is not None and self.train_per_class is not None:
            raise DataError("--val-fraction and --train-per-class both split the source: give one of them")
        _remark_repeated(chosen[0], say)
        return hold_out(chosen[0], fraction=self.val_fraction, per_class=self.train_per_class, seed=self.seed)


def take(listing: Listing, rows: Rows) -> Listing:
    """Some images of a listing, in the order of ``rows`` (int64, numbers of images)."""
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
    """Keep the images of some classes; labels are numbered anew, in the order that the classes had.

    Args:
        listings: of one class list.
        only: classes to keep; empty keeps all.
        exclude: classes to leave out.

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
            near = did_you_mean(name, classes)
            raise DataError(f"there is no class {name}.{near} The classes: {few(classes)}")
    kept = [number for number, name in enumerate(classes) if (not only or name in only) and name not in exclude]
    if len(kept) < 2:
        raise DataError(f"{len(kept)} of {len(classes)} classes would be left: a classifier needs two or more")
    renumbered = np.full(len(classes), -1, np.int64)
    renumbered[kept] = np.arange(len(kept))
    found = []
    for listing in listings:
        labels = renumbered[listing.labels.astype(np.int64)]
        part = take(listing, np.flatnonzero(labels >= 0))
        found.append(replace(part, labels=labels[labels >= 0], classes=tuple(classes[number] for number in kept)))
    return found


def hold_out(
    listing: Listing, *, fraction: float | None = None, per_class: int | None = None, seed: int = 0
) -> list[Listing]:
    """Split a listing in two, for training and for validation; a pure function of labels and seed.

    Args:
        listing: not split yet.
        fraction: of each class to validate with, above 0 and below 1.
        per_class: instead, how many images of each class to train with; the rest validates (Caltech-256: 60).
        seed: chooses which.

    Raises:
        DataError: a value out of range, a class with fewer images, label vectors, or a listing that is split.
    """
    if listing.split:
        raise DataError(f"the source is split already (it has a part {listing.split}): drop the option")
    if (fraction is None) == (per_class is None):
        raise DataError("give a fraction to hold out, or the images of each class to train with: one of the two")
    if fraction is not None:
        if not 0 < fraction < 1:
            raise DataError(f"the share to hold out is {fraction}; it must be above 0 and below 1")
        train, val = split.hold_out(listing.labels, fraction=fraction, seed=seed)
    else:
        assert per_class is not None
        _require_enough(listing, per_class)
        train, val = split.keep_per_class(listing.labels.astype(np.int64), count=per_class, seed=seed)
    if not len(val):
        raise DataError(f"no image of {len(listing):,} would be left to validate with: hold out more")
    return [replace(take(listing, train), split="train"), replace(take(listing, val), split="val", passed_over=[])]


def without_loose(listings: Sequence[Listing], say: Callable[[str], None]) -> list[Listing]:
    """Say which images lie beside the folders of classes, in none of them; they are not told of again."""
    found = []
    for one in listings:
        if loose := [name for name in one.passed_over if is_image(name)]:
            what = "images in no class are" if len(loose) > 1 else "image in no class is"
            say(f"{f'{one.split}: ' * bool(one.split)}{len(loose):,} {what} passed over ({few(loose, 3)})")
            one = replace(one, passed_over=Names(name for name in one.passed_over if not is_image(name)))
        found.append(one)
    return found


def remark(listings: Sequence[Listing], say: Callable[[str], None]) -> None:
    """Say what is well known, or odd, about classes: clutter, names alike, names that stand for no label."""
    classes = listings[0].classes
    alike: dict[str, str] = {}
    for name in classes:
        other = alike.setdefault(" ".join(name.casefold().split()), name)
        if other != name:
            say(f"{other!r} and {name!r} are two classes that differ in case or blanks alone: mend one if they are one")
        if _CLUTTER.fullmatch(name):
            say(f"{name} is no category but pictures of none of the others: leave it out with --exclude {name}")
        if name.strip().casefold() in _NO_LABEL:
            say(f"{name!r} is a class here: leave it out with --exclude {name} if it stands for images without a label")
    numbers = [name for name in classes if whole(name) is not None]
    if 0 < len(numbers) < len(classes):
        words = [name for name in classes if whole(name) is None]
        told = f"some classes are called by numbers ({few(numbers, 3)}) and some by words ({few(words, 3)})"
        say(f"{told}: mend labels that mean the same")
    if listings[0].labels.ndim == 2 and listings[0].labels.shape[1] == 1:
        values = listings[0].labels[:, 0]
        odd = values[(values < 0) | (values % 1 != 0) | (values >= 2**24)]
        told = f", such as {float(odd[0]):g}," * bool(len(odd))
        say(f"labels are no class numbers{told} and are kept as they are: training needs 0, 1, 2 and so on")


def _remark_repeated(listing: Listing, say: Callable[[str], None]) -> None:
    """Say that files are listed more than once, of which one may train and the other validate."""
    if listing.pieces is None:
        hashes = np.fromiter(map(hash, listing.names), np.int64, len(listing))
        if again := len(hashes) - len(np.unique(hashes)):
            plural = "s repeat an image that is" if again > 1 else " repeats an image that is"
            say(f"{again:,} line{plural} listed before, and may come into the other part: list each once to split them")


def merge(listings: Sequence[Listing]) -> Listing:
    """Several listings as one, in their order.

    Those of one class list are appended. Different lists are united where their classes have names: sorted by code
    point, and labels numbered anew. Columns of label vectors go by their names, in the order of the first.

    Raises:
        DataError: different class lists of which one has only numbers, vectors of other columns or beside classes, or
            bare pixels of different shapes.
    """
    listings = _columns_alike(listings)
    classes, labels = _united(listings)
    root = Path(os.path.commonpath([one.root.absolute() for one in listings]))
    ids = [one.ids for one in listings if one.ids is not None]
    together = np.concatenate(ids) if len(ids) == len(listings) else None
    if together is None or len(np.unique(together)) < len(together):
        together = np.arange(len(labels))
    with_pieces = any(one.pieces is not None for one in listings)
    return Listing(
        split=listings[0].split,
        root=root,
        classes=classes,
        names=Names(name for one in listings for name in _names(one, root)),
        labels=labels,
        sizes=np.concatenate([one.sizes for one in listings]),
        times=np.concatenate([one.times for one in listings]),
        ids=together,
        passed_over=Names(name for one in listings for name in one.passed_over),
        pieces=_merged([one.pieces or _whole_files(one) for one in listings]) if with_pieces else None,
        label_names=listings[0].label_names,
    )


def merge_sources(sources: Sequence[Sequence[Listing]]) -> list[Listing]:
    """Merge what several sources gave, split by split. Raises DataError where they are not split alike."""
    splits = [[one.split for one in listings] for listings in sources]
    if any(found != splits[0] for found in splits):
        told = "; ".join(", ".join(found) if found != [""] else "not split" for found in splits)
        raise DataError(f"the sources are split differently ({told}): pack each by itself, then merge the .rec files")
    return [merge(parts) for parts in zip(*sources, strict=True)]


def shard(listing: Listing, count: int) -> list[Listing]:
    """Contiguous parts whose sizes differ by one at most; ids stay unique over all of them.

    Raises:
        DataError: more parts than images, or fewer than one.
    """
    if not 1 <= count <= len(listing):
        raise DataError(f"{count} shards of {len(listing):,} images: it must be from 1 to {len(listing):,}")
    whole_ids = listing if listing.ids is not None or count == 1 else replace(listing, ids=np.arange(len(listing)))
    parts = [take(whole_ids, rows) for rows in np.array_split(np.arange(len(listing)), count)]
    return [parts[0], *(replace(part, passed_over=[]) for part in parts[1:])]


def _require_enough(listing: Listing, per_class: int) -> None:
    if listing.labels.ndim > 1:
        raise DataError("labels are vectors: images of each class cannot be counted, hold out a fraction")
    if per_class < 1:
        raise DataError(f"the images of each class to train with are {per_class}; it must be 1 or more")
    short = [
        f"{name} ({count})"
        for name, count in zip(listing.classes, listing.counts(), strict=True)
        if 0 < count < per_class
    ]
    if short:
        plural = "es have" if len(short) > 1 else " has"
        raise DataError(
            f"{len(short)} class{plural} fewer than {per_class} images ({few(short)}): ask for fewer, or exclude"
        )


def _columns_alike(listings: Sequence[Listing]) -> list[Listing]:
    """Listings whose label vectors have their columns in one order."""
    wanted = listings[0].label_names
    found: list[Listing] = []
    for one in listings:
        if sorted(one.label_names) != sorted(wanted):
            other = few(sorted(set(one.label_names) ^ set(wanted)))
            raise DataError(
                f"the sources have different labels in their vectors (not in all of them: {other}): give them as one"
                " table, or name the same columns in each"
            )
        if one.label_names != wanted:
            order = [one.label_names.index(name) for name in wanted]
            one = replace(one, labels=one.labels[:, order], label_names=wanted)
        found.append(one)
    return found


def _united(listings: Sequence[Listing]) -> tuple[tuple[str, ...], NDArray[np.int64] | NDArray[np.float32]]:
    lists = [one.classes for one in listings]
    labels: list[Any] = [one.labels for one in listings]
    widths = {part.shape[1:] for part in labels}
    if len(widths) > 1:
        raise DataError("some sources have label vectors of another length, or classes: they cannot be merged")
    if all(found == lists[0] for found in lists):
        return lists[0], np.concatenate(labels)
    if numbered := [found for found in lists if all(whole(name) is not None for name in found)]:
        raise DataError(
            f"the sources have different classes, and those of one are only numbers ({few(numbered[0])}): give its"
            " class names with --classes CARD"
        )
    names = tuple(sorted(set().union(*lists)))
    place = {name: number for number, name in enumerate(names)}
    tables = [np.array([place[name] for name in found], np.int64) for found in lists]
    return names, np.concatenate([table[part.astype(np.int64)] for table, part in zip(tables, labels, strict=True)])


def _names(listing: Listing, root: Path) -> Iterable[str]:
    """Names below a folder that several listings share."""
    if listing.pieces is not None:
        return listing.names
    before = os.path.relpath(listing.root.absolute(), root)
    return listing.names if before == "." else (os.path.join(before, name) for name in listing.names)  # noqa: PTH118


def _whole_files(listing: Listing) -> Pieces:
    paths = Names(os.path.join(listing.root, name) for name in listing.names)  # noqa: PTH118
    return Pieces(paths, np.arange(len(paths), dtype=np.int32), np.zeros(len(paths), np.int64), listing.sizes)


def _merged(pieces: Sequence[Pieces]) -> Pieces:
    shapes = {one.pixels for one in pieces}
    if len(shapes) > 1:
        raise DataError(
            "bare pixels of one shape cannot be merged with other images: pack each by itself, then merge the .rec"
            " files"
        )
    starts = np.cumsum([0, *(len(one.paths) for one in pieces)])
    crcs = [np.full(len(one), -1, np.int64) if one.crc is None else one.crc for one in pieces]
    deflated = [np.zeros(len(one), np.bool_) if one.deflated is None else one.deflated for one in pieces]
    return Pieces(
        paths=Names(path for one in pieces for path in one.paths),
        file=np.concatenate([one.file + np.int32(start) for one, start in zip(pieces, starts[:-1], strict=True)]),
        offset=np.concatenate([one.offset for one in pieces]),
        size=np.concatenate([one.size for one in pieces]),
        deflated=np.concatenate(deflated) if any(part.any() for part in deflated) else None,
        pixels=shapes.pop(),
        crc=np.concatenate(crcs) if any((part >= 0).any() for part in crcs) else None,
    )
