"""Images that belong together: copies, near copies, and what a user keeps together. A split must not part them.

Near copies are linked by their perceptual hashes. Such links may chain images of which the first and the last have
nothing in common: a group beyond :data:`GIANT_SHARE` of its class in which no image looks like all others is cut at its
weakest links, those of the most bits, until its parts are small enough or alike.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from math import inf
from typing import TypeVar

import numpy as np
from PIL import Image

from steadytrain.data.arrays import Ints
from steadytrain.data.images.decode import BadImageError, decode_file, orientation, read_header, to_pixels, turn
from steadytrain.data.images.look import duplicates
from steadytrain.data.images.near import MOST_BITS, SEEN_ROWS, Hashes, begin_hashes, count_bits, end_hashes, near_pairs
from steadytrain.data.recordio.card import RunClasses
from steadytrain.data.recordio.hashes import HASHES, ImageHashes, cached_path, hashes_file
from steadytrain.data.recordio.reader import Records
from steadytrain.data.sources.listing import Labels
from steadytrain.errors import DataError, SteadyError, storage_errors
from steadytrain.files import replace_file
from steadytrain.format import OnProgress, Say, count, few, printable
from steadytrain.machine.cgroups import cores

C = TypeVar("C")

FOLDER = "folder"
"""Value of ``--group-by``: images of one folder below that of their class belong together."""

GIANT_SHARE, GIANT_IMAGES = 0.2, 16
"""Share of a class, and images, beyond which a chain of near copies is cut: more than what is held out."""

_PORTION, _MOST_COMPARED = 64, 64


def decided_classes(classes: C | None, group_by: str | None) -> C | RunClasses | None:
    """Return a class list; without one, where folders are groups, that of a source whose top folders are its classes.

    Folders of the same names in all classes are groups then, and no splits.
    """
    return RunClasses() if classes is None and group_by == FOLDER else classes


def is_column(group_by: str) -> bool:
    """Return whether ``--group-by`` names a table's column: it is neither ``folder`` nor a pattern with a group."""
    with suppress(re.error):
        return group_by != FOLDER and re.compile(group_by).groups == 0
    return True


def group_keys(names: Iterable[str], labels: Labels, classes: Sequence[str], group_by: str) -> list[str | None]:
    """Return what each image belongs to; None where it stands alone.

    Args:
        names: of the images' files, with folders.
        labels, classes: of the images.
        group_by: ``folder``: the folders below that of the class; else a regular expression, whose first group is the
            key.

    Raises:
        DataError: a name that the expression does not match, or no folder below a class.
    """
    if is_column(group_by):
        raise DataError(
            f"--group-by is {group_by!r}: it must be folder, a column of the table that is read, or a regular"
            r" expression with a group for the images' names, such as '(patient\d+)_'"
        )
    keys: list[str | None] = []
    if group_by == FOLDER:
        numbers = labels.astype(np.int64).tolist() if labels.ndim == 1 and classes else [-1] * len(labels)
        for name, number in zip(names, numbers, strict=True):
            parts, of_class = name.split("/")[:-1], classes[number].split("/") if number >= 0 else []
            starts = [at for at in range(len(parts)) if of_class and parts[at : at + len(of_class)] == of_class]
            keys.append("/".join(parts[starts[0] + len(of_class) :] if starts else parts) or None)
        if not any(keys):
            raise DataError(
                "--group-by folder: no image lies in a folder below that of its class, such as cat/series-7/1.jpg"
            )
        return keys
    pattern, unmatched = re.compile(group_by), []
    for name in names:
        match = pattern.search(name)
        keys.append(None if match is None else match.group(1))
        if keys[-1] is None:
            unmatched.append(name)
    if unmatched:
        raise DataError(
            f"--group-by {shlex.quote(group_by)} does not match {count(len(unmatched), 'image')} of {len(keys):,}"
            f" ({few(unmatched, 3)}): give an expression whose first group is in every name"
        )
    return keys


def make_hashes(records: Records, progress: OnProgress | None = None, *, most_bytes: float = inf) -> ImageHashes | None:
    """Return the hashes of all images; of records that have none they are made, and kept in the cache.

    An image that cannot be decoded has the digest of its bytes alone. None for larger records than ``most_bytes``, and
    for those in a store, all of which would be fetched. Raises StorageError where the records cannot be read.
    """
    if records.hashes is not None or records.num_bytes > most_bytes or records.traffic() is not None:
        return records.hashes
    n = len(records)
    rows = np.zeros(n, HASHES)

    def fill(start: int) -> int:
        stop = min(start + _PORTION, n)
        begun = [_begin(records, number) for number in range(start, stop)]
        rows[start:stop] = np.frombuffer(b"".join(end_hashes(begun)), HASHES)
        return stop

    with ThreadPoolExecutor(cores(), "hashes") as pool:
        for done in pool.map(fill, range(0, n, _PORTION)):
            if progress is not None:
                progress(done, n)
    with suppress(SteadyError):  # no cache: they are made again next time
        path = cached_path(records.digest)
        with storage_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, hashes_file(rows.tobytes(), records.digest))
    records.hashes = rows
    return rows


def _begin(records: Records, number: int) -> bytes:
    """Begin the hashes of an image, of one that cannot be decoded by its bytes alone; zeros for a damaged record."""
    with suppress(DataError):
        data, pixels = bytes(records.image(number)), np.zeros((1, 1), np.uint8)
        with suppress(BadImageError, MemoryError):
            image = read_header(data)
            decoded, _ = decode_file(image, data, SEEN_ROWS)
            pixels = turn(to_pixels(decoded) if isinstance(decoded, Image.Image) else decoded, orientation(image))
        return begin_hashes(pixels, stored=data)
    return bytes(32)


def group_images(
    hashes: ImageHashes | None,
    labels: Labels,
    *,
    keys: Sequence[str | None] | None = None,
    name: Callable[[int], str],
    say: Say,
) -> Ints | None:
    """Group images by their hashes and by what the user keeps together; ``say`` takes how many groups there are.

    Args:
        hashes: of N images; None: not known.
        labels: [N] or [N, L].
        keys: as of :func:`group_keys`.
        name: returns the name of an image.

    Returns:
        int64[N], the first image of each image's group; None where each stands alone.
    """
    n = len(labels)
    hashes = np.zeros(n, HASHES) if hashes is None else hashes
    near = np.ascontiguousarray(hashes["near"])
    firm = [
        (rows[0], row) for column in ("source", "stored") for rows in duplicates(hashes[column]) for row in rows[1:]
    ]
    if keys is not None:
        first: dict[str, int] = {}
        firm += [(first.setdefault(key, row), row) for row, key in enumerate(keys) if key is not None]
    joined = _join(np.arange(n), np.array(firm, np.int64).reshape(-1, 2))
    by_bits = [joined.copy() for _ in range(MOST_BITS + 1)]  # by links of at most so many bits
    for pairs in near_pairs(near):
        for bits, numbers in enumerate(by_bits):
            by_bits[bits] = _join(numbers, pairs[pairs[:, 2] <= bits, :2])
    if (by_bits[-1] == np.arange(n)).all():
        return None
    numbers = _cut_chains([joined, *by_bits], near, labels, name, say)
    more = ", and of --group-by" if keys is not None else ""
    more += "; each group stays together"
    more += "" if keys is not None else ". Other photographs of one scene are not recognised: name them with --group-by"
    say(f"{n:,} images are {count(len(np.unique(numbers)), 'group')} of copies and near copies{more}")
    return numbers


def _join(numbers: Ints, pairs: Ints) -> Ints:
    """Return the group of each image, the first image in it, where those of each pair are joined too."""
    while True:
        ends = np.sort(numbers[pairs], axis=1)
        pairs, ends = (rows[ends[:, 0] < ends[:, 1]] for rows in (pairs, ends))
        if not len(pairs):
            return numbers
        np.minimum.at(numbers, ends[:, 1], ends[:, 0])
        while ((first := numbers[numbers]) != numbers).any():
            numbers = first


def _cut_chains(by_bits: Sequence[Ints], near: Hashes, labels: Labels, name: Callable[[int], str], say: Say) -> Ints:
    """Cut groups that are too large, and alike only one by one; return the group of each image.

    ``by_bits``: groups by firm links alone, then by those of at most 0, 1, ... bits.
    """
    n, whole = len(labels), by_bits[-1]
    classes = np.unique(labels, return_inverse=True)[1] if labels.ndim == 1 else np.zeros(n, np.int64)
    limits = np.maximum(GIANT_IMAGES, GIANT_SHARE * np.bincount(classes)[classes])  # of each image's class
    numbers = whole
    for finer in by_bits[-2::-1]:
        largest = np.zeros(n)
        np.maximum.at(largest, numbers, limits)
        too_large = np.flatnonzero(np.bincount(numbers, minlength=n) > largest)
        chains = [group for group in too_large.tolist() if _is_chain(near[numbers == group])]
        numbers = np.where(np.isin(numbers, chains), finer, numbers)
    for group in np.unique(whole[numbers != whole]).tolist():
        rows, of = np.flatnonzero(whole == group), "their class" if labels.ndim == 1 else "all"
        say(
            f"{len(rows):,} images are near copies one of the next ({printable(name(group))} and so on), more than a"
            f" fifth of {of}: the chain is cut at its weakest links into {len(np.unique(numbers[rows])):,} parts"
        )
    return numbers


def _is_chain(near: Hashes) -> bool:
    """Return whether no image of a group looks like all others, of those most like the average image."""
    near = np.unique(near[near[:, 0] > 0], axis=0)
    bits = np.unpackbits(np.ascontiguousarray(near[:, :1]).view(np.uint8), axis=1)
    off_average = (bits != (2 * bits.sum(axis=0) > len(bits))).sum(axis=1)
    for centre in near[np.argsort(off_average, kind="stable")[:_MOST_COMPARED]]:
        if (count_bits(centre[:, None] ^ near[:, 0]).min(axis=0) <= MOST_BITS).all():
            return False
    return True


def say_whole_classes(labels: Labels, groups: Ints | None, classes: Sequence[str], say: Say) -> None:
    """Say which classes are one group each, of which nothing can be held out."""
    if groups is None or labels.ndim > 1:
        return
    pairs = np.unique(np.stack([labels.astype(np.int64), groups]), axis=1)[0]
    is_whole = (np.bincount(pairs) == 1) & (np.bincount(labels.astype(np.int64)) > 1)
    if names := [classes[number] for number in np.flatnonzero(is_whole).tolist()]:
        verb = "is" if len(names) == 1 else "are each"
        say(f"{few(names)} {verb} one group of images that belong together: none of them can be held out")
