"""Images that lie one behind the other as bare pixels, each perhaps after a few bytes of labels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from steadytrain.data.sources.listing import Listing
from steadytrain.data.sources.names import Names
from steadytrain.data.sources.pieces import Pieces, Pixels


class Array(NamedTuple):
    """A run of images of one shape.

    Args:
        name: to be told of its images.
        path: the file that holds it.
        start: byte where the first image's pixels begin.
        stride: bytes from one image to the next.
        num_images: in it.
        time: nanoseconds, when the file was last changed.
    """

    name: str
    path: str
    start: int
    stride: int
    num_images: int
    time: int


def list_arrays(
    arrays: Sequence[Array],
    pixels: Pixels,
    labels: NDArray[np.int64],
    *,
    root: Path,
    classes: tuple[str, ...],
    split: str = "",
) -> Listing:
    """Arrays of one shape as one listing, in their order."""
    counts = np.array([one.num_images for one in arrays], np.int64)
    file = np.repeat(np.arange(len(arrays), dtype=np.int32), counts)
    within = np.arange(len(file)) - np.repeat(np.cumsum(counts) - counts, counts)
    columns = np.array([(one.start, one.stride, one.time) for one in arrays], np.int64)[file]
    offsets: NDArray[np.int64] = columns[:, 0] + within * columns[:, 1]
    sizes = np.full(len(file), pixels.height * pixels.width * pixels.channels, np.int64)
    return Listing(
        split=split,
        root=root,
        classes=classes,
        names=Names(f"{one.name}[{number}]" for one in arrays for number in range(one.num_images)),
        labels=labels,
        sizes=sizes,
        times=columns[:, 2].copy(),
        ids=np.arange(len(file)),
        pieces=Pieces(tuple(one.path for one in arrays), file, offsets, sizes, pixels=pixels),
    )
