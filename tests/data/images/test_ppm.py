"""Bare pixels: what is written is read back, without a copy; anything else is left alone."""

from __future__ import annotations

import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from steadytrain.data.images.decode import BadImageError, decode, from_ppm
from steadytrain.data.images.encode import to_ppm


@given(height=st.integers(1, 40), width=st.integers(1, 40), colour=st.booleans())
def test_written_ppm_is_read_back_by_us_and_by_pillow(height: int, width: int, colour: bool) -> None:
    shape = (height, width, 3) if colour else (height, width)
    pixels = np.random.default_rng(height * width).integers(0, 256, shape, np.uint8)
    data = to_ppm(pixels)
    read = from_ppm(data)
    assert read is not None
    assert np.array_equal(read, pixels)
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(data))), pixels)


def test_pixels_are_not_copied() -> None:
    memory = np.frombuffer(bytearray(to_ppm(np.zeros((2, 3, 3), np.uint8))), np.uint8)
    read = from_ppm(memory)
    assert read is not None
    assert np.shares_memory(read, memory)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"P6\n",
        b"P6\n2 1\n255\n12345",
        b"P6\n2 1\n255\n1234567",
        b"P6\n0 1\n255\n",
        b"P6\n2 1\n254\n123456",
        b"P6\n2  1\n255\n123456",
        b"P6\n# no\n2 1\n255\n123456",
        b"P3\n1 1\n255\n1 2 3",
        b"P6\n999999999 999999999\n255\n",
        b"\xff\xd8\xff\xe0" + bytes(40),
    ],
)
def test_anything_else_is_left_to_a_decoder(data: bytes) -> None:
    assert from_ppm(data) is None


def test_floats_in_the_form_of_a_ppm_are_refused() -> None:
    with pytest.raises(BadImageError, match="32-bit float"):
        decode(b"Pf\n2 2\n-1.0\n" + bytes(16))
