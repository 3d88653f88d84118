"""An image in memory has the pixels that its user sees in it, or is refused."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from steadytrain.data.images.memory import file_bytes, is_image

RGB = np.arange(5 * 7 * 3, dtype=np.uint8).reshape(5, 7, 3)
GREY = RGB[..., 0]


def decoded(value: Any) -> Any:
    return np.asarray(Image.open(io.BytesIO(file_bytes(value)[0])))


@pytest.mark.parametrize(
    ("value", "pixels"),
    [
        (RGB, RGB),
        (RGB[..., ::-1], RGB[..., ::-1]),  # of OpenCV, turned into RGB
        (RGB.transpose(2, 0, 1), RGB),
        (torch.from_numpy(RGB).permute(2, 0, 1), RGB),
        (torch.from_numpy(RGB), RGB),
        (RGB / 255, RGB),
        (torch.from_numpy(RGB).permute(2, 0, 1) / 255, RGB),
        (RGB.astype(np.int64), RGB),
        (GREY, GREY),
        (GREY[..., None], GREY),
        (GREY[None], GREY),
        (GREY > 50, (GREY > 50) * np.uint8(255)),
        (np.dstack([RGB, GREY]), np.dstack([RGB, GREY])),
        (Image.fromarray(RGB), RGB),
        (Image.fromarray(RGB).convert("CMYK"), RGB),
        (Image.fromarray(GREY.astype(np.int32)), GREY),
        ({"bytes": file_bytes(RGB)[0], "path": None}, RGB),
        (np.ones((3, 4, 3), np.uint8), np.ones((3, 4, 3))),  # channels last, where both would do
        (torch.ones(3, 4, 3, dtype=torch.uint8), np.ones((4, 3, 3))),  # channels first
    ],
)
def test_pixels_are_those_of_the_image(value: Any, pixels: Any) -> None:
    assert is_image(value) and (decoded(value) == pixels).all()


def test_the_content_is_named_by_the_pixels() -> None:
    assert file_bytes(RGB)[1] == file_bytes(Image.fromarray(RGB))[1] != file_bytes(255 - RGB)[1]
