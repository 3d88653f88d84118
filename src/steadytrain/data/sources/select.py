"""Parts of listings: some classes, a share held out, several merged, one in shards. Listings in, listings out."""

from __future__ import annotations

import hashlib
import os
import unicodedata
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from steadytrain.data.arrays import Ints
from steadytrain.data.filenames import is_image
from steadytrain.data.images.decode import BadImageError
from steadytrain.data.images.look import look_in_children
from steadytrain.data.images.near import LEAST_SIDE
from steadytrain.data.names import Names
from steadytrain.data.recordio.hashes import HASHES, ImageHashes
from steadytrain.data.sources.groups import group_images, group_keys, say_whole_classes
from steadytrain.data.sources.labels import class_name, is_number, whole_number
from steadytrain.data.sources.listing import (
    PORTION_FILES,
    Labels,
    Listing,
    Piece,
    Pieces,
    look_at_files,
    read_file,
    read_piece,
)
from steadytrain.errors import DataError, did_you_mean
from steadytrain.format import Say, count, few
from steadytrain.machine.cgroups import cores

Identical = Literal["near", "pixels", "bytes"]

_NO_LABEL = frozenset(["", "nan", "null", "n/a", "na", "#n/a", "<na>", "none", "-1", "undefined"])


@dataclass(frozen=True)
class Selection:
    """The part of a source that is taken, and its split.

    Args:
        only, exclude: classes to keep, and to leave out; empty keeps all.
        val_fraction: of each class to hold out for validation; None: none.
        train_per_class: instead, how many images of each class to train with.
        seed: chooses which.
        identical: what images have to share to stay on one side of the split, as of :func:`find_sets`.
        group_by: what else keeps them there, as of :func:`find_sets`.
        test_validates: a source without a validation part validates with its test part, as published figures do.
    """

    only: Sequence[str] = ()
    exclude: Sequence[str] = ()
    val_fraction: float | None = None
    train_per_class: int | None = None
    seed: int = 0
    identical: Identical = "near"
    group_by: str | None = None
    test_validates: bool = False

    def of(self, listings: Sequence[Listing], say: Say) -> list[Listing]:
        """Apply it. Raises DataError for values that do not fit the source.

        Args:
            listings: of the source.
            say: takes remarks, a line each.
        """
        if not 0 <= self.seed < 2**64:
            raise DataError(f"--seed is {self.seed}; it must be from 0 to 2**64 - 1")
        chosen = choose(without_loose(listings, say), only=self.only, exclude=self.exclude)
        remark(chosen, say)
        if self.test_validates and "val" not in {listing.split for listing in chosen}:
            chosen = [replace(part, split="val") if part.split == "test" else part for part in chosen]
        if self.val_fraction is None and self.train_per_class is None:
            return chosen
        if splits := ", ".join(listing.split for listing in chosen if listing.split):
            raise DataError(f"the source already has splits ({splits}): drop --val-fraction and --train-per-class")
        sets = find_sets(chosen[0], self.identical, say, self.group_by)
        if self.train_per_class is None:
            say_whole_classes(chosen[0].labels, sets, chosen[0].classes, say)
        parts = hold_out(
            chosen[0], fraction=self.val_fraction, per_class=self.train_per_class, seed=self.seed, sets=sets
        )
        if num_left := len(chosen[0]) - sum(map(len, parts)):
            say(
                f"{count(num_left, 'image')} in neither part: they belong together with images of which"
                " --train-per-class takes as many as it needs"
            )
        return parts


def take(listing: Listing, rows: Ints | slice) -> Listing:
    """Return some images of a listing, in the order of ``rows``; of a slice, numbers are not copied."""
    names: Names | list[str]
    if isinstance(listing.names, Names):
        names = listing.names.take(rows)
    else:
        names = list(listing.names[rows] if isinstance(rows, slice) else [listing.names[row] for row in rows])
    return replace(
        listing,
        names=names,
        labels=listing.labels[rows],
        sizes=listing.sizes[rows],
        times=listing.times[rows],
        ids=None if listing.ids is None else listing.ids[rows],
        pieces=None if listing.pieces is None else listing.pieces.take(rows),
        groups=None if listing.groups is None else listing.groups.take(rows),
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
        raise DataError("labels are vectors, so classes cannot be chosen: drop --only and --exclude")
    for name in (*only, *exclude):
        if name not in classes and (name in only or f"{name}/" not in listings[0].passed_over):
            raise DataError(f"there is no class {name}.{did_you_mean(name, classes)} The classes: {few(classes)}")
    left = [number for number, name in enumerate(classes) if (not only or name in only) and name not in exclude]
    if len(left) < 2:
        raise DataError(f"{len(left)} of {len(classes)} classes would be left: a classifier needs at least two")
    renumbered = np.full(len(classes), -1, np.int64)
    renumbered[left] = np.arange(len(left))
    chosen = []
    for listing in listings:
        labels = renumbered[listing.labels.astype(np.int64)]
        part = take(listing, np.flatnonzero(labels >= 0))
        chosen.append(replace(part, labels=labels[labels >= 0], classes=tuple(classes[number] for number in left)))
    return chosen


def hold_out(
    listing: Listing,
    *,
    fraction: float | None = None,
    per_class: int | None = None,
    seed: int = 0,
    sets: Ints | None = None,
) -> list[Listing]:
    """Split a listing in two, for training and for validation; a pure function of labels, seed and sets.

    Args:
        listing: of any images.
        fraction: of each class to validate with, above 0 and below 1.
        per_class: instead, how many images of each class to train with; the rest validates (Caltech-256: 60), but for
            the rest of sets of which a part is needed to have as many.
        seed: chooses which.
        sets: of images that stay together, as :func:`find_sets` returns them.

    Raises:
        DataError: a value out of range, a class with fewer images, or label vectors.
    """
    if fraction is not None and per_class is not None:
        raise DataError("--val-fraction and --train-per-class both split the source: use one of them")
    if per_class is not None:
        if listing.labels.ndim > 1:
            raise DataError("labels are vectors, so the images of a class cannot be counted: use --val-fraction")
        if per_class < 1:
            raise DataError(f"--train-per-class is {per_class}; it must be 1 or more")
        counts = zip(listing.classes, listing.counts(), strict=True)
        if short := [f"{name} ({count})" for name, count in counts if 0 < count < per_class]:
            plural = "es have" if len(short) > 1 else " has"
            raise DataError(
                f"{len(short)} class{plural} fewer than {per_class} images ({few(short)}): use a smaller number,"
                " or exclude them"
            )
        train, val = _draw_exactly(listing.labels.astype(np.int64), per_class, seed, sets)
    elif fraction is not None and 0 < fraction < 1:
        train, val = split_by_fraction(listing.labels, fraction=fraction, seed=seed, sets=sets)
    else:
        raise DataError(f"the fraction to hold out is {fraction}; it must be above 0 and below 1")
    if not len(val):
        constraint = "" if sets is None else " without separating images that belong together"
        raise DataError(f"no image of {len(listing):,} would be left for validation{constraint}: hold out more")
    return [replace(take(listing, train), split="train"), replace(take(listing, val), split="val", passed_over=[])]


def split_by_fraction(labels: Labels, *, fraction: float, seed: int, sets: Ints | None = None) -> tuple[Ints, Ints]:
    """Split image numbers in two, class by class.

    Of n images of a class ``round(n * fraction)`` are held out, but at least one of two or more, and never all: with
    a ``fraction`` above 0 every class that can is in both parts. Label vectors are split without regard to them. The
    ``seed``, 0 to 2**64 - 1, chooses which images. Where ``sets`` of images have to stay together, the numbers are as
    near to these as whole sets allow.

    Returns:
        The numbers to train on and those held out, int64, each rising; together they are 0 to N - 1.

    Raises:
        DataError: the fraction is out of range.

    >>> train, val = split_by_fraction(np.array([0, 0, 0, 1, 1, 1]), fraction=0.34, seed=1)
    >>> len(train), len(val), sorted([*train.tolist(), *val.tolist()])
    (4, 2, [0, 1, 2, 3, 4, 5])
    """
    if not 0 <= fraction < 1:
        raise DataError(f"the fraction to hold out is {fraction}; it must be from 0 up to, not including, 1")
    groups = labels.astype(np.int64) if labels.ndim == 1 else np.zeros(len(labels), np.int64)
    counts = np.unique(groups, return_counts=True)[1]
    most = np.maximum(counts - 1, 0)
    wanted = np.minimum(np.maximum(np.rint(counts * fraction).astype(np.int64), 1), most) if fraction else 0 * counts
    is_held_out = _draw(groups, wanted, most, seed, sets)
    return np.flatnonzero(~is_held_out), np.flatnonzero(is_held_out)


def fold_numbers(labels: Labels, *, folds: int, seed: int, groups: Ints | None = None) -> Ints:
    """Deal images to folds that are alike in size and in their share of each class: int64[N], 0 to ``folds`` - 1.

    Groups that have several classes come first, the largest ahead, each to the fold that has least of these; then those
    of each class from the largest to single images, which even out what is left.

    Args:
        labels: [N], the class of each image; vectors, [N, L], count for nothing.
        folds: how many; DataError for fewer than two, or more than there are groups.
        seed: 0 to 2**64 - 1; chooses which images.
        groups: int64[N], the number of each image's group, which stays whole; None: each stands alone.

    >>> fold_of = fold_numbers(np.array([0, 0, 0, 1, 1, 1]), folds=2, seed=1, groups=np.array([7, 7, 5, 8, 6, 6]))
    >>> np.bincount(fold_of).tolist(), bool(fold_of[0] == fold_of[1]), bool(fold_of[4] == fold_of[5])
    ([3, 3], True, True)
    """
    classes = np.unique(labels, return_inverse=True)[1] if labels.ndim == 1 else np.zeros(len(labels), np.int64)
    _, first, numbers = np.unique(np.arange(len(labels)) if groups is None else groups, True, True)
    sizes = np.bincount(numbers)
    if not 2 <= folds <= len(sizes):
        raise DataError(f"{folds} folds of {len(sizes):,} groups of images: it must be from 2 to {len(sizes):,}")
    totals = np.bincount(classes)
    counts = np.zeros((folds, len(totals)), np.int64)
    keys, fold_of = _splitmix64(len(labels), seed)[first], np.zeros(len(sizes), np.int64)
    is_mixed = np.zeros(len(sizes), np.bool_)
    is_mixed[numbers[classes != classes[first][numbers]]] = True
    mixed, by_group, ends = np.flatnonzero(is_mixed), np.argsort(numbers, kind="stable"), np.cumsum(sizes)
    for group in mixed[np.lexsort((keys[mixed], -sizes[mixed]))].tolist():
        rows = by_group[ends[group] - sizes[group] : ends[group]]
        present, images = np.unique(classes[rows], return_counts=True)
        crowding = ((2 * counts[:, present] + images) * images / totals[present] ** 2).sum(axis=1)
        fold_of[group] = np.lexsort((counts.sum(axis=1), crowding))[0]
        counts[fold_of[group], present] += images
    pure = np.flatnonzero(~is_mixed)
    pure = pure[np.lexsort((keys[pure], -sizes[pure], classes[first[pure]]))]
    kinds = np.stack([classes[first[pure]], sizes[pure]], axis=1)
    for same in np.split(pure, np.flatnonzero((np.diff(kinds, axis=0) != 0).any(axis=1)) + 1) if len(pure) else ():
        label, size = classes[first[same[0]]], int(sizes[same[0]])
        has, total = counts[:, label], counts.sum(axis=1)
        most = -(-int(has.max() - has.min()) // size) - (-len(same) // folds)
        heights = has[:, None] + size * np.arange(most)  # of a fold, each time that it takes one more group
        order = np.lexsort((np.repeat(total, most), heights.ravel()))[: len(same)]
        fold_of[same] = order // most
        counts[:, label] += size * np.bincount(fold_of[same], minlength=folds)
    return fold_of[numbers]


def _draw_exactly(labels: Ints, per_class: int, seed: int, sets: Ints | None) -> tuple[Ints, Ints]:
    """Draw so many images of each class, or all that it has; return their numbers and those of the others.

    Where no set fits into what is missing, the smallest that is large enough gives a part; its rest is in neither.
    """
    _, number, most = np.unique(labels, return_inverse=True, return_counts=True)
    wanted = np.minimum(most, per_class)
    is_drawn = _draw(labels, wanted, wanted, seed, sets)
    is_left = np.zeros(len(labels), np.bool_)
    for label in np.flatnonzero(np.bincount(number[is_drawn], minlength=len(most)) < wanted).tolist():
        assert sets is not None
        while (missing := wanted[label] - int((is_drawn & (number == label)).sum())) > 0:
            rows = np.flatnonzero((number == label) & ~is_drawn)
            is_free = ~is_left[rows] if (~is_left[rows]).any() else np.ones(len(rows), np.bool_)
            names, sizes = np.unique(sets[rows[is_free]], return_counts=True)
            chosen = names[np.lexsort((sizes, sizes < missing))[0]]
            is_drawn[rows[sets[rows] == chosen][:missing]] = True
            is_left |= sets == chosen
    return np.flatnonzero(is_drawn), np.flatnonzero(~is_drawn & ~is_left)


def draw_evenly(numbers: Ints, labels: Labels, most: int | None) -> Ints:
    """Return at most so many numbers: the same share of each class, evenly spread; the order is kept.

    Args:
        numbers: int64[n] of images.
        labels: of all images; of several labels each no class is looked at.
        most: None: all.

    >>> draw_evenly(np.arange(6), np.array([0, 1, 0, 1, 0, 1]), 2)
    array([0, 5])
    """
    if most is None or len(numbers) <= most:
        return numbers
    by_class = numbers[labels[numbers].argsort(kind="stable")] if labels.ndim == 1 else numbers
    chosen: Ints = np.sort(by_class[np.linspace(0, len(numbers) - 1, most).astype(np.int64)])
    return chosen


def _draw(labels: Ints, wanted: Ints, most: Ints, seed: int, sets: Ints | None) -> NDArray[np.bool_]:
    """Draw images at random.

    Args:
        labels: int64[N].
        wanted, most: int64[C], images to draw of each class that there is, and how many it may be at most.
        sets: int64[N], the set of each image, which is drawn as a whole or not at all; None: each stands alone.

    Returns:
        bool[N].
    """
    order = np.lexsort((_splitmix64(len(labels), seed), labels))
    _, number, counts = np.unique(labels, return_inverse=True, return_counts=True)
    is_drawn = np.zeros(len(labels), np.bool_)
    if sets is None:
        is_drawn[order] = np.arange(len(labels)) - np.repeat(np.cumsum(counts) - counts, counts) < np.repeat(
            wanted, counts
        )
        return is_drawn
    by_set = np.argsort(sets, kind="stable")
    members = np.split(by_set, np.flatnonzero(np.diff(sets[by_set])) + 1)
    members_of = {int(sets[rows[0]]): rows for rows in members if len(rows)}
    missing, num_drawn, seen = wanted.copy(), 0 * wanted, set[int]()

    def draw(rows: Ints, *, anyway: bool = False) -> bool:
        """Draw a set if that brings its classes nearer to what is wanted, and leaves of each what has to be left."""
        classes, sizes = np.unique(number[rows], return_counts=True)
        gain = np.abs(missing[classes]).sum() - np.abs(missing[classes] - sizes).sum()
        if (gain <= 0 and not anyway) or (num_drawn[classes] + sizes > most[classes]).any():
            return False
        missing[classes] -= sizes
        num_drawn[classes] += sizes
        is_drawn[rows] = True
        return True

    for row in order.tolist():  # single images as without sets: the first ones of each class
        if (set_number := int(sets[row])) not in seen:
            seen.add(set_number)
            draw(members_of[set_number])
    for label in np.flatnonzero((wanted > 0) & (num_drawn == 0)).tolist():  # sets larger than twice what is wanted
        own_sets = dict.fromkeys(sets[row] for row in order[number[order] == label].tolist())
        any(
            draw(rows, anyway=True)
            for rows in sorted((members_of[int(set_number)] for set_number in own_sets), key=len)
        )
    return is_drawn


def find_sets(listing: Listing, identical: Identical, say: Say, group_by: str | None = None) -> Ints | None:
    """Find images that must not be parted: those that are the same, that look alike, or belong together by a user.

    Args:
        identical: by ``bytes``, which are read where several images have as many; by their ``pixels``, for which every
            image is decoded; ``near``: copies that were scaled, mirrored or encoded again, too.
        say: takes what was found.
        group_by: as of :func:`~steadytrain.data.sources.groups.group_keys`; of a column the listing has the values.

    Returns:
        int64[N], the number of each image's set; None where each stands alone.
    """
    keys: Sequence[str | None] | None = listing.groups
    if keys is None and group_by is not None:
        keys = group_keys(listing.names, listing.labels, listing.classes, group_by)
    hashes = _same_bytes(listing) if identical == "bytes" else _look(listing, identical, say)
    return group_images(hashes, listing.labels, keys=keys, name=listing.names.__getitem__, say=say)


def _same_bytes(listing: Listing) -> ImageHashes:
    """Digest the images of which others have as many bytes."""
    _, inverse, counts = np.unique(listing.sizes, return_inverse=True, return_counts=True)
    hashes = np.zeros(len(listing), HASHES)
    for row in np.flatnonzero(counts[inverse] > 1).tolist():
        with suppress(BadImageError, OSError):  # reported when it is packed
            [place] = listing.places(row, row + 1)
            digest = hashlib.sha256(read_piece(place) if isinstance(place, Piece) else read_file(place)).digest()
            hashes["stored"][row] = np.frombuffer(digest, np.uint64, 2)
    return hashes


def _look(listing: Listing, identical: Identical, say: Say) -> ImageHashes:
    """Hash the pixels of all images, upright and of 8 bits, however their files differ."""
    quicker = "; --identical bytes compares files alone" * (identical == "near")
    say(f"decoding {len(listing):,} images once to find copies before the split{quicker}")
    places = (listing.places(*portion) for portion in listing.portions())
    look_at = partial(look_at_files, near=True) if identical == "near" else look_at_files
    looks = look_in_children(places, look_at, workers=min(cores(), 1 + len(listing) // PORTION_FILES))
    hashes = np.zeros(len(listing), HASHES)
    for row, look in enumerate(look for portion in looks for look in portion):
        hashes["stored"][row] = np.frombuffer(look.fingerprint, np.uint64)
        if min(look.width, look.height) >= LEAST_SIDE:
            hashes["near"][row] = np.frombuffer(look.near, np.uint64)
    return hashes


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
    """Return the images that lie beside the folders of classes, and drop them from what is passed over."""
    cleaned = []
    for listing in listings:
        if loose := [name for name in listing.passed_over if is_image(name)]:
            noun = "images without a class are" if len(loose) > 1 else "image without a class is"
            say(f"{f'{listing.split}: ' * bool(listing.split)}{len(loose):,} {noun} skipped ({few(loose, 3)})")
            listing = replace(listing, passed_over=Names(name for name in listing.passed_over if not is_image(name)))
        cleaned.append(listing)
    return cleaned


def remark(listings: Sequence[Listing], say: Say) -> None:
    """Return remarks on classes: clutter, similar names, names that stand for no label."""
    classes, labels = listings[0].classes, listings[0].labels
    alike: dict[str, str] = {}
    for name in classes:
        key = " ".join(unicodedata.normalize("NFKC", class_name(name)).casefold().split())
        other = alike.setdefault(key.lstrip("0") or "0", name)
        if other != name:
            is_plain = " ".join(other.casefold().split()) == " ".join(name.casefold().split())
            say(
                f"{other!r} and {name!r} are two classes that differ only in"
                f" {'case or spaces' if is_plain else 'leading zeros or forms of letters'}: rename one if they are the"
                " same"
            )
        if name.strip().casefold() in _NO_LABEL:
            say(f"{name!r} is a class here: leave it out with --exclude {name} if it stands for images without a label")
    numbers = [name for name in classes if is_number(name)]
    if 0 < len(numbers) < len(classes):
        words = [name for name in classes if not is_number(name)]
        say(
            f"some class names are numbers ({few(numbers, 3)}) and some are words ({few(words, 3)}): rename"
            " those that mean the same"
        )
    if labels.ndim == 2 and labels.shape[1] == 1:
        values = labels[:, 0]
        odd = values[(values < 0) | (values % 1 != 0) | (values >= 2**24)]
        example = f", such as {np.format_float_positional(odd[0], trim='-')}," if len(odd) else ""
        say(f"labels are not class numbers{example} and are stored unchanged: training needs 0, 1, 2 and so on")


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
    parts = [listing.groups for listing in listings]
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
        groups=None if None in parts else Names(group for part in parts for group in part or ()),
        label_column=listings[0].label_column * (len({listing.label_column for listing in listings}) == 1),
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
    each, more = divmod(len(listing), count)
    bounds = [number * each + min(number, more) for number in range(count + 1)]
    parts = [take(listing, slice(start, stop)) for start, stop in pairwise(bounds)]
    return [parts[0], *(replace(part, passed_over=[]) for part in parts[1:])]


def _align_columns(listings: Sequence[Listing]) -> list[Listing]:
    """Listings whose label vectors have their columns in one order."""
    names = listings[0].label_names
    aligned: list[Listing] = []
    for listing in listings:
        if sorted(listing.label_names) != sorted(names):
            other = few(sorted(set(listing.label_names) ^ set(names)))
            raise DataError(
                f"the sources have different labels in their vectors (not in all of them: {other}): give them as one"
                " table, or name the same columns in each"
            )
        if listing.label_names != names:
            order = [listing.label_names.index(name) for name in names]
            listing = replace(listing, labels=listing.labels[:, order], label_names=names)
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

    def column(name: str, value: int) -> NDArray[Any]:
        """Put a column together, of a value where a part has none."""
        columns = [(part, getattr(part, name)) for part in parts]
        return np.concatenate([np.full(len(part), value) if values is None else values for part, values in columns])

    crc, deflated = column("crc", -1), column("deflated", 0).astype(np.bool_)
    return Pieces(
        paths=Names(path for part in parts for path in part.paths),
        file=np.concatenate([part.file + np.int32(start) for part, start in zip(parts, starts[:-1], strict=True)]),
        offset=column("offset", 0),
        size=column("size", 0),
        deflated=deflated if deflated.any() else None,
        pixels=shapes.pop(),
        crc=crc if (crc >= 0).any() else None,
        inflated=column("inflated", -1) if deflated.any() else None,
    )
