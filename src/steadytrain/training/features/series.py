"""Series: photographs of one scene, such as frames of a video, that differ too much for the hashes of near copies.

Features tell them: in a series the nearest image is far nearer than the tenth, elsewhere it is hardly nearer. Where a
split parts a series, its validation images have been seen, nearly, and their accuracy is too high.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from steadytrain.data.arrays import Ints
from steadytrain.format import count, percent
from steadytrain.training.inference.limits import nearest, unit_rows

NEAR = 0.5
"""Cosine distance of the nearest image, in those of the tenth, below which both are of one series. Of 500 to 600
flowers, hands and garments 1 to 2 % are below, of frames of one scene 89 % (MobileNetV2, 2026-11-29)."""

LEAST_SHARE, LEAST_HITS, LEAST_LIFT = 0.25, 0.1, 3.0
"""Share of images in series that is worth a word; where names tell them, share that also shares the name of its nearest
image, and how much more often than by chance. Photographs of textures, which are like each other, come to 12 %."""

MOST_QUERIES, MOST_IMAGES = 2_000, 50_000
"""Images that are looked at, and among how many; of more, those whose names follow each other."""

_NEIGHBOURS = 10
_STEMS = (r"[^/\d]*\d+", r"(?:[^/\d]*\d+){2}", r"[^/]+(?=[ _-][^/ _-]*$)")
"""What files of one series may share: the name up to its first or second number, or without its last word."""


@dataclass(frozen=True)
class Series:
    """Series that groups do not keep together.

    Args:
        share: of the images, those that have another far nearer than the rest.
        group_by: a regular expression for ``--group-by`` that keeps the nearest images together; None: no part of the
            names does.
        groups: how many it makes.
    """

    share: float
    group_by: str | None
    groups: int

    @property
    def words(self) -> str:
        """A sentence of what is wrong, and the remedy.

        >>> print(Series(0.89, None, 0).words)  # doctest: +ELLIPSIS
        89 % of the images have one far nearer than all others, as frames of a scene have; ...
        """
        words = f"{percent(self.share)} of the images have one far nearer than all others, as frames of a scene have; a"
        words += " split that parts them makes validation look better than it is: --group-by "
        if self.group_by is None:
            return f"{words}(folder, a column or a regular expression of names) keeps them together"
        return f"{words}{shlex.quote(self.group_by)} keeps {count(self.groups, 'series', 'series')} together"


def find_series(
    values: NDArray[np.float32], labels: Ints, names: Sequence[str], *, groups: Ints | None = None, seed: int = 0
) -> Series | None:
    """Find images of one scene by their features, and what their names share; None where there are few.

    Args:
        values: float32 [N, D] features.
        labels: int64 [N].
        names: of the images' files, with folders.
        groups: int64 [N]; images that are kept together already do not count.
        seed: draws the images that are looked at.
    """
    rows = np.array(sorted(range(len(names)), key=names.__getitem__)[:MOST_IMAGES])
    if len(rows) < 5 * _NEIGHBOURS:
        return None
    known = torch.from_numpy(values[rows]).float()
    known = unit_rows(known - known.mean(0))
    queries = np.random.default_rng(seed).permutation(len(rows))[:MOST_QUERIES]
    own = np.arange(len(rows)) if groups is None else groups[rows]
    distances, neighbours = nearest(known, known[queries], _NEIGHBOURS, groups=own, own=own[queries])
    squares = distances.square().numpy()  # twice the cosine distance
    is_near = np.isfinite(squares[:, -1]) & (squares[:, 0] < NEAR * squares[:, -1])
    best, chosen = 0.0, Series(float(is_near.mean()), None, 0)
    for pattern, keys in _shared_names([names[row] for row in rows]):
        numbers, sizes = np.unique(keys, return_inverse=True, return_counts=True)[1:]
        hits = int((numbers[neighbours[is_near, 0]] == numbers[queries[is_near]]).sum())
        _, places, of_both = np.unique([numbers, labels[rows]], axis=1, return_inverse=True, return_counts=True)
        others = (of_both[places.ravel()] - 1) / (np.bincount(labels[rows])[labels[rows]] - 1).clip(1)
        chance = float(others[queries[is_near]].sum())
        if hits >= max(LEAST_HITS * len(queries), LEAST_LIFT * chance) and hits - chance > best:
            best, chosen = hits - chance, Series(chosen.share, pattern, len(sizes))
    return chosen if chosen.share >= LEAST_SHARE or chosen.group_by is not None else None


def _shared_names(names: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield regular expressions for ``--group-by``, and what their first groups are in each name."""
    for stem in _STEMS:
        for simple, general in ((f"({stem})[^/]*$", f"({stem}|[^/]*)[^/]*$"), (f"^(.*/{stem})", f"^(.*/{stem}|.*)")):
            pattern = simple if all(re.search(simple, name) for name in names) else general
            yield pattern, [match.group(1) for name in names if (match := re.search(pattern, name))]
    if all("/" in name for name in names):
        yield "^(.*)/", [name.rpartition("/")[0] for name in names]
