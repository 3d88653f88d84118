"""Restart markers without decoding: the pixels of simplejpeg and of Pillow are the judges, hostile bytes the test."""

from __future__ import annotations

import io
import random
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simplejpeg
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

jpeg = pytest.importorskip("steadytrain.native", reason="the native decoder is not built: no cargo")

MARKERS = re.compile(rb"\xff([\xd0-\xd7])")


def picture(height: int, width: int, *, seed: int = 0, mode: str = "RGB", **options: Any) -> bytes:
    """A JPEG with edges, slopes and noise."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width]
    planes = [(x * (k + 2) + y * 3) % 256 for k in range(3)]
    pixels = np.stack(planes, axis=-1) // 2 + rng.integers(0, 128, (height, width, 3))
    file = io.BytesIO()
    Image.fromarray(pixels.astype(np.uint8)).convert(mode).save(file, "JPEG", **options)
    return file.getvalue()


def decoded(data: bytes) -> NDArray[np.uint8]:
    colours = "GRAY" if simplejpeg.decode_jpeg_header(data)[2] == "Gray" else "RGB"
    array: NDArray[np.uint8] = simplejpeg.decode_jpeg(data, colours)
    return array


def scan_of(data: bytes) -> bytes:
    return data[data.rindex(b"\xff\xda") :]


@given(
    height=st.integers(1, 70),
    width=st.integers(1, 90),
    interval=st.sampled_from([1, 2, 3, 4, 7, 100, 65535]),
    subsampling=st.sampled_from([0, 1, 2]),
    quality=st.sampled_from([10, 75, 95, 100]),
    mode=st.sampled_from(["RGB", "L"]),
    optimize=st.booleans(),
    blocks=st.sampled_from([0, 1, 5]),
)
def test_pixels_stay_and_markers_stand_in_order(
    height: int, width: int, interval: int, subsampling: int, quality: int, mode: str, optimize: bool, blocks: int
) -> None:
    options = {"subsampling": subsampling} if mode == "RGB" else {}
    data = picture(
        height, width, mode=mode, quality=quality, optimize=optimize, restart_marker_blocks=blocks, **options
    )
    restarted = jpeg.restart(data, interval)
    assert restarted is not None
    assert np.array_equal(decoded(restarted), decoded(data))
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(restarted))), np.asarray(Image.open(io.BytesIO(data))))
    across, down = {0: (8, 8), 1: (16, 8), 2: (16, 16)}[subsampling if mode == "RGB" else 0]
    num = -(-height // down) * -(-width // across)
    numbers = [word[0] & 7 for word in MARKERS.findall(scan_of(restarted))]
    assert numbers == [number % 8 for number in range(-(-num // interval) - 1)]


def test_every_segment_is_kept() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    data = picture(64, 48, quality=90, exif=exif, comment=b"hello", icc_profile=b"x" * 3000)
    restarted = jpeg.restart(data, 2)
    before, after = Image.open(io.BytesIO(data)), Image.open(io.BytesIO(restarted))
    assert after.getexif() == before.getexif() and after.info["icc_profile"] == before.info["icc_profile"]
    assert after.info["comment"] == b"hello"


def test_adding_markers_twice_is_adding_them_once() -> None:
    data = picture(120, 160, quality=90)
    assert jpeg.restart(jpeg.restart(data, 3), 5) == jpeg.restart(data, 5)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xd8",
        b"GIF89a",
        picture(40, 40, progressive=True),
        picture(40, 40, mode="CMYK"),
        picture(40, 40)[:-200],
        picture(40, 40)[:-2],
        picture(40, 40)[:-3] + b"abc\xff\xd9",
    ],
    ids=["empty", "start", "gif", "progressive", "cmyk", "cut", "no end", "more"],
)
def test_what_is_no_sound_baseline_jpeg_is_left_alone(data: bytes) -> None:
    assert jpeg.restart(data, 4) is None


def test_an_interval_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="interval is 0; it must be from 1 to 65535"):
        jpeg.restart(picture(8, 8), 0)


def test_threads_do_not_disturb_each_other() -> None:
    images = [picture(100 + 9 * seed, 160, seed=seed, optimize=seed % 2 == 0) for seed in range(8)]
    expected = [jpeg.restart(data, 4) for data in images]
    wrong: list[int] = []

    def work(number: int) -> None:
        wrong.extend(number for _ in range(40) if jpeg.restart(images[number], 4) != expected[number])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert not wrong


@given(st.integers(0, 2**32), st.integers(1, 12), st.sampled_from([1, 4, 100]))
def test_hostile_bytes_never_make_another_picture(seed: int, damages: int, interval: int) -> None:
    draw = random.Random(seed)
    data = bytearray(picture(48, 64, seed=seed % 5, quality=draw.choice([30, 90]), optimize=draw.random() < 0.5))
    for _ in range(damages):
        at = draw.randrange(len(data))
        if draw.random() < 0.2:
            del data[at : at + draw.randrange(1, 9)]
        else:
            data[at] = draw.choice([0, 0xFF, draw.randrange(256)])
    restarted = jpeg.restart(bytes(data), interval)
    try:
        before = decoded(bytes(data))
    except ValueError:
        return
    if restarted is not None:
        assert np.array_equal(decoded(restarted), before)


def test_photographs_keep_their_pixels(extracted: Callable[[str], Path]) -> None:
    images = [path.read_bytes() for path in sorted(extracted("imagenet-sample-200.tar").rglob("*.JPEG"))]
    restarts = [jpeg.restart(data, 4) for data in images]
    assert len(images) == 200 and None not in restarts
    for before, after in zip(images, restarts, strict=True):
        assert np.array_equal(decoded(before), decoded(after))
    assert sum(map(len, restarts)) / sum(map(len, images)) < 1.03
