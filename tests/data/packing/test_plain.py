"""A plain PNG has the pixels that Pillow's reader of files gives; anything else is left to that."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from tests.data.packing.odd_files import encoded
from tests.data.packing.pictures import picture

from steadytrain.data.images.decode import plain_png

PNG = encoded(picture(1, (12, 9)), "PNG")


@given(width=st.integers(1, 70), height=st.integers(1, 70), mode=st.sampled_from(["L", "RGB"]), seed=st.integers(0, 9))
def test_pixels_are_those_of_pillow(width: int, height: int, mode: str, seed: int) -> None:
    image = picture(seed, (width, height), mode)
    pixels = plain_png(encoded(image, "PNG"), most=10_000)
    assert pixels is not None
    assert np.array_equal(pixels, np.asarray(image))


def test_real_ones_are_read_alike(some_cifar: Path) -> None:
    paths = sorted(some_cifar.rglob("*.png"))
    assert len(paths) == 200
    for path in paths:
        pixels = plain_png(path.read_bytes(), most=1024)
        assert pixels is not None
        assert np.array_equal(pixels, np.asarray(Image.open(path)))


def test_image_data_may_lie_in_many_chunks_among_harmless_ones() -> None:
    image = Image.effect_noise((300, 300), 90)
    data = encoded(image, "PNG", dpi=(72, 72))
    assert data.count(b"IDAT") > 1
    pixels = plain_png(data, most=90_000)
    assert pixels is not None
    assert np.array_equal(pixels, np.asarray(image))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        encoded(kind="JPEG"),
        encoded(picture(1, mode="P"), "PNG"),
        encoded(picture(1, mode="RGBA"), "PNG"),
        encoded(picture(1, mode="1"), "PNG"),
        encoded(Image.new("I;16", (9, 9)), "PNG"),
        encoded(picture(1, mode="L"), "PNG", transparency=0),
        encoded(picture(1), "PNG", icc_profile=bytes(100)),
        encoded(picture(1), "PNG", save_all=True, append_images=[picture(2)]),
    ],
    ids=["empty", "JPEG", "palette", "alpha", "1 bit", "16 bits", "transparent", "profile", "animated"],
)
def test_anything_else_is_left_to_pillow(data: bytes) -> None:
    assert plain_png(data, most=100_000) is None


def test_too_large_file_is_not_decoded() -> None:
    data = encoded(picture(1, (40, 30)), "PNG")
    assert plain_png(data, most=40 * 30) is not None
    assert plain_png(data, most=40 * 30 - 1) is None


@given(at=st.integers(0, len(PNG) - 1), value=st.integers(0, 255))
def test_damaged_file_is_never_accepted(at: int, value: int) -> None:
    damaged = PNG[:at] + bytes([value]) + PNG[at + 1 :]
    pixels = plain_png(damaged, most=10_000)
    assert pixels is None or (damaged == PNG and np.array_equal(pixels, np.asarray(Image.open(io.BytesIO(PNG)))))
    assert plain_png(PNG[:at], most=10_000) is None
