"""Find images that are in a set more than once, or in two sets, and those that look alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from steadytrain.data.checking.findings import Findings
from steadytrain.data.images.look import Fingerprints, duplicates
from steadytrain.data.images.near import Alike, Hashes, find_alike

_MOST_LISTED = 4
"""Images of a group under several labels that are listed."""


@dataclass(frozen=True)
class ImageSet:
    """Images that are compared.

    Args:
        prints, hashes: of each, as of :class:`~steadytrain.data.checking.images.ImageTally`.
        place: returns what a finding says of where an image lies.
        words: returns an image's name in a message.
        class_of: returns the name of an image's class; empty where classes are not known.
    """

    prints: Fingerprints
    hashes: Hashes
    place: Callable[[int], dict[str, Any]]
    words: Callable[[int], str]
    class_of: Callable[[int], str]

    def part(self, start: int, stop: int) -> ImageSet:
        """Return the set of some of its images, from ``start`` to ``stop - 1``."""
        return ImageSet(
            self.prints[start:stop],
            self.hashes[start:stop],
            place=lambda row: self.place(start + row),
            words=lambda row: self.words(start + row),
            class_of=lambda row: self.class_of(start + row),
        )

    def differs(self, row: int, other: ImageSet, number: int) -> bool:
        """Return whether an image has another class than one of a set."""
        ours, theirs = self.class_of(row), other.class_of(number)
        return bool(ours and theirs) and ours != theirs


def find_copies(images: ImageSet, findings: Findings, split_of: Callable[[int], str] = lambda row: "") -> None:
    """Add images that are in a set more than once, under one label or several; ``split_of`` one, if it has splits."""
    for group in duplicates(images.prints):
        first, *later = group
        for row in later:
            kind = "leak" if split_of(first) == "train" != split_of(row) else "duplicate"
            findings.add(kind, f"as {images.words(first)}", **images.place(row))
        by_class = {images.class_of(row): row for row in reversed(group)}
        if len(by_class) > 1:
            pairs = sorted(by_class.items(), key=lambda pair: pair[1])
            listed = [f"{name}: {images.words(row)}" for name, row in pairs[:_MOST_LISTED]]
            more = ["..."] * (len(pairs) > _MOST_LISTED)
            findings.add("conflicting-labels", ", ".join([*listed, *more]), **images.place(first))


def find_copies_of(images: ImageSet, others: ImageSet, findings: Findings) -> None:
    """Add images that are in another set of the same split as well, and those that look alike."""
    pairs = dict(reversed(shared(images.prints, others.prints)))  # of several there, the first
    for row, number in sorted(pairs.items()):
        if images.differs(row, others, number):
            ours, theirs = f"{images.class_of(row)}: {images.words(row)}", others.class_of(number)
            findings.add("conflicting-labels", f"{ours}, {theirs}: {others.words(number)}", **images.place(row))
        else:
            findings.add("duplicate", f"as {others.words(number)}", **images.place(row))
    find_alike_images(images, others, findings)


def find_leaks(train: ImageSet, val: ImageSet, findings: Findings) -> int:
    """Add images of a training set that validate as well, and those that look alike; return how many are the same."""
    for number, row, is_mirrored in _alike(val, train):
        findings.add("near-leak", f"like {val.words(number)}{', mirrored' * is_mirrored}", **train.place(row))
    pairs = shared(train.prints, val.prints)
    for row, number in pairs:
        other = ", under another label" * train.differs(row, val, number)
        findings.add("leak", f"{val.words(number)}{other}", **train.place(row))
    return len(pairs)


def find_alike_images(images: ImageSet, others: ImageSet, findings: Findings, *, kind: str = "near-duplicate") -> None:
    """Add images that look like one of ``others``, or like an earlier one where that is the same set."""
    for row, like, is_mirrored in _alike(images, others):
        is_conflict = kind == "near-duplicate" and images.differs(row, others, like)
        detail = f"like {others.words(like)}{', mirrored' * is_mirrored}"
        if is_conflict:
            detail = f"{images.class_of(row)}, {detail} of {others.class_of(like)}"
        findings.add("near-conflict" if is_conflict else kind, detail, **images.place(row))


def _alike(images: ImageSet, others: ImageSet) -> list[Alike]:
    """Find images that look alike and are not the same; none where no perceptual hashes were made."""
    pairs = find_alike(images.hashes, None if others is images else others.hashes)
    return [pair for pair in pairs if (images.prints[pair.row] != others.prints[pair.like]).any()]


def shared(ours: Fingerprints, theirs: Fingerprints) -> list[tuple[int, int]]:
    """Numbers of images that are in both sets: for each of ``theirs`` the first of ``ours``, in the order of theirs.

    >>> prints = np.frombuffer(b"".join(bytes([n]) * 16 for n in (1, 2, 1, 3, 1)), np.uint8).reshape(-1, 16)
    >>> shared(prints[:2], prints[2:])
    [(0, 0), (0, 2)]
    """
    n = len(ours)
    groups = [group for group in duplicates(np.concatenate([ours, theirs])) if group[0] < n]
    pairs = [(group[0], number - n) for group in groups for number in group if number >= n]
    return sorted(pairs, key=lambda pair: pair[1])
