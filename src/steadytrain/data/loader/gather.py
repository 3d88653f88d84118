"""The squares of a batch from kept images: one gather, without a loop over samples, where they are only moved."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from steadytrain.data.loader.crop import Crop
from steadytrain.data.loader.decode import cut_from
from steadytrain.data.loader.image_cache import Loose, Store
from steadytrain.data.loader.jpeg import Pixels
from steadytrain.data.loader.sampler import Floats, Ints

BLOCK_BYTES = 2**18  # of images gathered at a time: it stays in a core's cache, and is never returned to the system


class Canvas:
    """Memory of one thread to gather through: images as they are, and between borders of zeros."""

    def __init__(self) -> None:
        self.rows = 0
        self._made_for: tuple[int, ...] = ()

    def fit(self, height: int, width: int, channels: int, pad: int, side: int) -> None:
        """Be good for ``rows`` images of this shape, padded by ``pad``, and squares of ``side``."""
        wanted = (height, width, channels, pad, side)
        if wanted == self._made_for:
            return
        self.rows = max(1, BLOCK_BYTES // (height * width * channels))
        self.images = np.empty((self.rows, height, width, channels), dtype=np.uint8)
        padded = np.zeros((self.rows, height + 2 * pad, width + 2 * pad, channels), dtype=np.uint8)
        self.inside = padded[:, pad : pad + height, pad : pad + width]
        self.windows = _windows(padded, side)
        self._made_for = wanted


@dataclass(frozen=True, eq=False)
class Spots:
    """Where squares lie that are only moved: ``samples``, ``rows`` and ``columns`` int64[b], ``flips`` bool[b].

    Rows and columns are those of the image with its padding around; a mirrored square is cut first.
    """

    samples: Ints
    rows: Ints
    columns: Ints
    flips: NDArray[np.bool_]


def spots(cut: Crop, height: int, width: int, samples: Ints, draws: Floats) -> Spots:
    """Where the squares of samples lie, all of them images of one size that ``cut`` only moves.

    >>> cut = Crop(kind="pad-crop", size=32, pad=4)
    >>> found = spots(cut, 32, 32, np.array([7]), np.array([[0.0, 0.0, 0.99]]))
    >>> found.rows.tolist(), found.columns.tolist(), found.flips.tolist()
    ([8], [0], [False])
    """
    n = len(samples)
    rows, columns = np.broadcast_to(cut.corners(np.array([[height, width]]), draws) + padding(cut), (n, 2)).T
    return Spots(samples, rows, columns, cut.flips(draws, n))


def padding(cut: Crop) -> int:
    """Pixels of zeros around each image."""
    return cut.pad if cut.kind == "pad-crop" else 0


def gather(out: Pixels, store: Store | Loose, samples: Ints, cut: Crop, draws: Floats, canvas: Canvas) -> None:
    """Write the squares of kept samples, uint8[b, S, S, C], as :func:`~steadytrain.data.loader.decode.cut_into` would.

    Args:
        out: where to.
        store: holds every one of ``samples``.
        samples: int64[b].
        draws: float64[b, num_draws] of these samples.
        canvas: of the calling thread.
    """
    if isinstance(store, Loose):
        _cut_each(out, store, store.sizes[samples], samples, cut, draws)
        return
    height, width = store.pixels.shape[1:3]
    if cut.only_shifts(height, width):
        gather_spots(out, store.pixels, spots(cut, height, width, samples, draws), cut, canvas)
    else:
        _cut_each(out, store, np.broadcast_to([[height, width]], (len(samples), 2)), samples, cut, draws)


def gather_spots(out: Pixels, pixels: Pixels, where: Spots, cut: Crop, canvas: Canvas) -> None:
    """Write the squares, uint8[b, S, S, C], of images uint8[n, H, W, C] that are only moved."""
    height, width, channels = pixels.shape[1:]
    if cut.kind == "none" and not cut.flip and height == width == cut.size:
        np.take(pixels, where.samples, axis=0, out=out, mode="clip")
        return
    pad = padding(cut)
    canvas.fit(height, width, channels, pad, cut.size)
    columns = np.where(where.flips, width + 2 * pad - cut.size - where.columns, where.columns)  # in a mirrored image
    for at in range(0, len(columns), canvas.rows):
        some = slice(at, at + canvas.rows)
        block = Spots(where.samples[some], where.rows[some], columns[some], where.flips[some])
        _gather_block(out[some], pixels, block, canvas)


def _cut_each(out: Pixels, store: Store | Loose, sizes: Ints, samples: Ints, cut: Crop, draws: Floats) -> None:
    plan = cut.plan(sizes, draws)
    for row, sample in enumerate(samples.tolist()):
        cut_from(out[row], store.image(sample), cut, plan, row)


def _gather_block(out: Pixels, pixels: Pixels, block: Spots, canvas: Canvas) -> None:
    # The mirrored samples go last, so that both halves are copied by one slice each.
    order = np.argsort(block.flips, kind="stable")
    n = len(order)
    plain = n - int(np.count_nonzero(block.flips))
    images = canvas.images[:n]
    np.take(pixels, block.samples[order], axis=0, out=images, mode="clip")
    canvas.inside[:plain] = images[:plain]
    for channel in range(pixels.shape[3]):  # runs of single bytes: four times as fast as runs of three
        canvas.inside[plain:n, ..., channel] = images[plain:, :, ::-1, channel]
    place = np.empty_like(order)
    place[order] = np.arange(n)
    out[...] = canvas.windows[place, block.rows, block.columns]


def _windows(padded: Pixels, side: int) -> Pixels:
    """A view of every square of every image: uint8[n, rows, columns, side, side, C]."""
    n, height, width, channels = padded.shape
    image, row, column, channel = padded.strides
    shape = (n, height - side + 1, width - side + 1, side, side, channels)
    return np.lib.stride_tricks.as_strided(padded, shape, (image, row, column, row, column, channel))
