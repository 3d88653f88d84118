"""Several small batches at a time, of images that are kept and only moved.

What stands at a batch's positions, what is drawn for it and where its squares lie takes a few dozen calls of numpy,
however few images it has. For a small batch they cost more than its bytes do, and each of them takes the interpreter's
lock from the loop that trains. Made for several batches in one go they cost as much as for one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from steadytrain.data.loader.block_shuffle import BlockOrder
from steadytrain.data.loader.crop import Crop
from steadytrain.data.loader.gather import Spots, spots
from steadytrain.data.loader.image_cache import Store
from steadytrain.data.loader.sampler import Draws, Ints, Order

MOST = 8
"""Batches that are made together, at most: twice as many would take an eighth less."""
MOST_BYTES = 2**20
"""Of the images of all of them: more would not stay in a core's cache."""

Span = tuple[int, int]
"""The first position of a batch, and how many there are."""


@dataclass(frozen=True, eq=False)
class Planned:
    """A batch before its images are there: ``where`` they lie, and the rest as in :class:`~.batch.Batch`."""

    where: Spots
    labels: NDArray[np.int64] | NDArray[np.float32]
    ids: Ints
    positions: Ints


def planned(
    spans: Sequence[Span],
    store: Store,
    *,
    cut: Crop,
    order: Order | BlockOrder | None,
    draws: Draws,
    ids: Ints,
    labels: NDArray[np.int64] | NDArray[np.float32],
) -> list[Planned]:
    """What the batches of some spans are to be.

    Args:
        spans: one behind the other; between two there may be a gap.
        store: holds every sample, and ``cut`` only moves them.
        order, draws: as in :class:`~steadytrain.data.loader.batch_worker.BatchWorker`.
        ids: int64[n], the record of each sample.
        labels: of each record.
    """
    each = [np.arange(first, first + n) for first, n in spans]
    positions = np.concatenate(each)
    drawn = np.concatenate([draws.at(some) for some in each])
    samples = store.used(order.ids(positions) if order else positions)
    records = ids[samples]
    told = labels[records]
    height, width = store.pixels.shape[1:3]
    spot = spots(cut, height, width, samples, drawn)
    batches, start = [], 0
    for _, n in spans:
        rows = slice(start, start + n)
        where = Spots(spot.samples[rows], spot.rows[rows], spot.columns[rows], spot.flips[rows])
        batches.append(Planned(where, told[rows], records[rows], positions[rows]))
        start += n
    return batches
