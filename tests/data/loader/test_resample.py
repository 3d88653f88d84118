"""Resizing: torch's kernel and Pillow agree, and only what is wanted is made."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from tests.data.loader.pictures import scene

from steadytrain.data.images import jpeg
from steadytrain.data.loader import decode as module
from steadytrain.data.loader.decode import Window, _by_native, resample

Pixels = NDArray[np.uint8]
Interpolation = Literal["bilinear", "bicubic"]

WINDOWS = [
    Window((10, 20, 150, 110), (64, 64), 0, 0, 64, 64),
    Window((10, 20, 40, 50), (64, 64), 0, 0, 64, 64),
    Window((0, 0, 160, 120), (72, 96), 4, 16, 64, 64),
    Window((0, 0, 160, 120), (48, 64), 0, 10, 40, 54),
    Window((7, 0, 8, 120), (30, 20), 0, 0, 30, 20),
]


def made(source: Pixels, window: Window, interpolation: Interpolation = "bilinear") -> Pixels:
    out = np.full((window.height, window.width, source.shape[2]), 99, np.uint8)
    resample(out, source, window, interpolation)
    return out


def by_pillow_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_kernel", lambda interpolation: None)
    monkeypatch.setattr(jpeg, "parts", None)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_both_ways_agree_to_a_level(
    window: Window, channels: int, interpolation: Interpolation, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = np.array(scene(0, 120, 160))[..., :channels].copy()
    fast = made(source, window, interpolation)
    by_pillow_only(monkeypatch)
    by_pillow = made(source, window, interpolation)
    assert np.abs(fast.astype(int) - by_pillow).max() <= 2
    assert np.abs(fast.astype(float) - by_pillow).mean() < 0.2


@pytest.mark.skipif(jpeg.parts is None, reason="the native decoder is not built, or there is no AVX2")
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("shrunk", [1, 2, 4])
@pytest.mark.parametrize("window", WINDOWS[:4], ids=str)
def test_without_torchs_kernel_the_bytes_are_the_same(
    window: Window, shrunk: int, interpolation: Interpolation, monkeypatch: pytest.MonkeyPatch
) -> None:
    window = window._replace(shrunk=shrunk)
    source = np.array(scene(0, -(-120 // shrunk), -(-160 // shrunk)))
    got = np.zeros((window.height, window.width, 3), np.uint8)
    assert _by_native(got, source, window, interpolation)
    monkeypatch.setattr(jpeg, "parts", None)
    expected = made(source, window, interpolation)
    assert np.array_equal(got, expected)


def test_pillow_resizes_the_crop_exactly_as_pillow_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    by_pillow_only(monkeypatch)
    image = scene(1, 120, 160)
    got = made(np.array(image), WINDOWS[0])
    assert np.array_equal(got, np.asarray(image.crop((10, 20, 150, 110)).resize((64, 64), Image.Resampling.BILINEAR)))


def test_a_window_is_part_of_the_whole() -> None:
    source = np.array(scene(2, 120, 160))
    whole = made(source, Window((0, 0, 160, 120), (72, 96), 0, 0, 72, 96))
    assert np.array_equal(made(source, WINDOWS[2]), whole[4:68, 16:80])


def test_a_shrunk_image_keeps_its_scale_though_its_last_pixel_is_a_part() -> None:
    """157 columns shrunk by 4 are 40, the last of which stands for one column."""
    source = np.repeat(np.linspace(0, 255, 160, dtype=np.uint8)[None, :, None], 64, axis=0)[:, :157]
    shrunk = np.stack([source[::4, i : i + 4].mean(axis=1) for i in range(0, 157, 4)], axis=1).astype(np.uint8)
    box = (0, 0, 157, 64)
    expected = made(np.ascontiguousarray(source), Window(box, (8, 20), 0, 0, 8, 20))
    got = made(shrunk, Window(box, (8, 20), 0, 0, 8, 20, shrunk=4))
    assert np.abs(got.astype(int) - expected).max() <= 3


def test_a_very_long_image_costs_no_more_than_its_window() -> None:
    source = np.zeros((2, 20_000, 3), np.uint8)
    source[:, 10_000:] = 200
    got = made(source, Window((0, 0, 20_000, 2), (224, 2_240_000), 0, 1_120_000 - 112, 224, 224))
    assert got[:, 0].max() <= 110 and got[:, -1].min() >= 90


def test_a_part_of_a_larger_square_is_written_in_place() -> None:
    source = np.array(scene(3, 120, 160))
    square = np.zeros((80, 80, 3), np.uint8)
    resample(square[10:74, 5:69], source, WINDOWS[0], "bilinear")
    assert np.array_equal(square[10:74, 5:69], made(source, WINDOWS[0]))
    square[10:74, 5:69] = 0
    assert not square.any()
