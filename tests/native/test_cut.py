"""Squares of several JPEGs in one call: what Pillow's crop of a whole decode shows, and nothing beyond the squares."""

from __future__ import annotations

import io

import numpy as np
import pytest
import simplejpeg
from numpy.typing import NDArray
from PIL import Image

jpeg = pytest.importorskip("steadytrain.native", reason="the native decoder is not built: no cargo")
pytestmark = pytest.mark.skipif(not jpeg.DECODES, reason="this processor has no AVX2")

SIDE = 32


def picture(seed: int, height: int, width: int, **options: int) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=80, **options)
    return file.getvalue()


def moved(at: int, data: bytes, top: int, left: int, size: tuple[int, int], *, flip: bool) -> list[int]:
    """The row that tells of a square that is a box of its image."""
    needed = [left, top, left + SIDE, top + SIDE]
    return [at, len(data), *needed, 0, 0, size[1], size[0], *size, top, left, int(flip)]


def cut(files: list[bytes], rows: list[list[int]]) -> tuple[list[bool], NDArray[np.uint8]]:
    """Which were made, and the squares, around which all bytes must stay 99."""
    data = np.frombuffer(b"".join(files), np.uint8)
    memory = np.full((len(rows) + 2, SIDE, SIDE, 3), 99, np.uint8)
    squares, done = np.array(rows, np.int64), np.full(len(rows), 7, np.uint8)
    jpeg.cut(
        memory[1:].ctypes.data, SIDE, data.ctypes.data, data.size, squares.ctypes.data, len(rows), done.ctypes.data,
        cubic=False, rooms=(max(map(len, files)), 3 * 200 * 200, 1 << 20),
    )  # fmt: skip
    assert (memory[0] == 99).all() and (memory[-1] == 99).all()
    assert set(done.tolist()) <= {0, 1}
    return done.astype(bool).tolist(), memory[1:-1]


@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("restarts", [0, 3])
def test_boxes_of_images_are_their_pixels(flip: bool, restarts: int) -> None:
    files = [picture(seed, 60 + seed, 90 - seed, restart_marker_blocks=restarts) for seed in range(6)]
    begin = np.cumsum([0, *map(len, files)]).tolist()
    places = [(3 * seed, 5 * seed) for seed in range(6)]
    rows = [
        moved(begin[seed], files[seed], top, left, (60 + seed, 90 - seed), flip=flip)
        for seed, (top, left) in enumerate(places)
    ]
    done, squares = cut(files, rows)
    assert all(done)
    for data, (top, left), square in zip(files, places, squares, strict=True):
        expected = simplejpeg.decode_jpeg(data)[top : top + SIDE, left : left + SIDE]
        assert np.array_equal(square, expected[:, ::-1] if flip else expected)


def test_one_that_cannot_be_made_leaves_the_others_alone() -> None:
    good, bad = picture(1, 64, 64), picture(2, 64, 64)[:-40]
    rows = [moved(at, data, 8, 8, (64, 64), flip=False) for at, data in ((0, good), (len(good), bad), (0, good))]
    done, squares = cut([good, bad], rows)
    assert done == [True, False, True]
    assert np.array_equal(squares[0], squares[2]) and np.array_equal(
        squares[0], simplejpeg.decode_jpeg(good)[8:40, 8:40]
    )


@pytest.mark.parametrize("column", range(2, 14))
@pytest.mark.parametrize("value", [-1, -(2**63), 2**62])
def test_numbers_that_cannot_be_are_refused(column: int, value: int) -> None:
    data = picture(3, 64, 64)
    row = moved(0, data, 8, 8, (64, 64), flip=False)
    row[column] = value
    assert cut([data], [row])[0] == [False]


@pytest.mark.parametrize(("at", "size"), [(-1, 10), (10, 2**62), (2**62, 2**62), (0, 0), (10**6, 10)])
def test_bytes_that_are_not_there_are_not_read(at: int, size: int) -> None:
    data = picture(4, 64, 64)
    row = moved(0, data, 8, 8, (64, 64), flip=False)
    row[:2] = [at, size]
    assert cut([data], [row])[0] == [False]
