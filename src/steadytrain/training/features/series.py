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
"""Squared distance of the nearest image, in those of the k-th, below which both are of one series."""

SCALES = (10, 50)
"""The k: images of series of fewer frames than the first, or the second, have their k-th neighbour in another scene."""

LEAST_SHARE, LEAST_HITS, LEAST_LIFT = 0.25, 0.1, 3.0
"""Share of images in series, beyond that of independent images, that is worth a word; where names tell them, share that
also shares the name of its nearest image, and how much more often than by chance. By features of MobileNetV2 1 to 2 %
of flowers, hands and garments are so near, 12 % of textures, and 89 % of frames of one scene (2026-11-29)."""

MOST_QUERIES, MOST_IMAGES, _RUN = 2_000, 50_000, 100
"""Images that are looked at, and among how many; of more, runs of names that follow each other, from all of the set."""

_STEMS = ("[^/0-9]*[0-9]+", "(?:[^/0-9]*[0-9]+){2}", "[^/]+(?=[ _-][^/ _-]*$)")
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
    values: NDArray[np.float32],
    labels: Ints,
    names: Sequence[str],
    *,
    groups: Ints | None = None,
    others: Sequence[str] = (),
    seed: int = 0,
) -> Series | None:
    """Find images of one scene by their features, and what their names share; None where there are few.

    Independent images, too, have near ones where their features have few dimensions. Of dimension d, r1 below
    ``sqrt(NEAR)`` of rk has a probability of 1 - (1 - NEAR^(d/2))^(k - 1). d follows from how fast distances grow
    beyond the k-th (Levina & Bickel 2004, "Maximum Likelihood Estimation of Intrinsic Dimension").

    Args:
        values: float32 [N, D] features.
        labels: int64 [N].
        names: of the images' files, with folders.
        groups: int64 [N]; images that are kept together already do not count.
        others: names of further files that ``--group-by`` would have to match.
        seed: draws the images that are looked at.
    """
    rows = np.array(sorted(range(len(names)), key=names.__getitem__))
    if len(rows) > MOST_IMAGES:
        starts = np.linspace(0, len(rows) - _RUN, MOST_IMAGES // _RUN).astype(np.int64)
        rows = rows[np.unique(starts[:, None] + np.arange(_RUN))]
    scales = [k for k in SCALES if len(rows) >= 5 * k]
    if not scales:
        return None
    known = torch.from_numpy(values[rows]).float()
    known = unit_rows(known - known.mean(0))
    queries = np.random.default_rng(seed).permutation(len(rows))[:MOST_QUERIES]
    own = np.arange(len(rows)) if groups is None else groups[rows]
    distances, neighbours = nearest(known, known[queries], 2 * scales[-1], groups=own, own=own[queries])
    beyond, is_near = max((_beyond_chance(distances.square().numpy(), k) for k in scales), key=lambda pair: pair[0])
    if beyond < LEAST_HITS:
        return None
    best, chosen = 0.0, Series(float(is_near.mean()), None, 0)
    for pattern in _shared_names([*names, *others]):
        keys = [match.group(1) for row in rows if (match := re.search(pattern, names[row]))]
        numbers, sizes = np.unique(keys, return_inverse=True, return_counts=True)[1:]
        hits = int((numbers[neighbours[is_near, 0]] == numbers[queries[is_near]]).sum())
        _, places, of_both = np.unique([numbers, labels[rows]], axis=1, return_inverse=True, return_counts=True)
        alike = (of_both[places.ravel()] - 1) / (np.bincount(labels[rows])[labels[rows]] - 1).clip(1)
        chance = float(alike[queries[is_near]].sum())
        if hits >= max(LEAST_HITS * len(queries), LEAST_LIFT * chance) and hits - chance > best:
            best, chosen = hits - chance, Series(chosen.share, pattern, len(sizes))
    return chosen if beyond >= LEAST_SHARE or chosen.group_by is not None else None


def _beyond_chance(squares: NDArray[np.float32], k: int) -> tuple[float, NDArray[np.bool_]]:
    """Return the share of images with one far nearer than their k-th, less that of independent ones, and which."""
    first, at_k, far = squares[:, 0], squares[:, k - 1], squares[:, 2 * k - 1]
    is_near = np.isfinite(at_k) & (first < NEAR * at_k)
    is_known = np.isfinite(far) & (at_k > 0)
    growth = float(np.median(far[is_known] / at_k[is_known])) if is_known.any() else 1.0
    dimension = 2 * np.log(2) / np.log(max(growth, 1 + 1e-6))
    return float(is_near.mean() - (1 - (1 - NEAR ** (dimension / 2)) ** (k - 1))), is_near


def _shared_names(names: Sequence[str]) -> Iterator[str]:
    """Yield regular expressions for ``--group-by`` that match all names."""
    for stem in _STEMS:
        for simple, general in ((f"({stem})[^/]*$", f"({stem}|[^/]*)[^/]*$"), (f"^(.*/{stem})", f"^(.*/{stem}|.*)")):
            yield simple if all(re.search(simple, name) for name in names) else general
    if all("/" in name for name in names):
        yield "^(.*)/"
