"""Images are scaled down to the same bytes by whatever is at hand, and as well as by Pillow."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image
from tests.data.packing.pictures import picture

from steadytrain.data.images import resize as module
from steadytrain.data.images.resize import PSNR, Kernel, by_matrices, resize

Pixels = NDArray[np.uint8]
needs_wheel = pytest.mark.skipif(module.wheel is None, reason="the wheel cykooz-resizer is not installed here")


def _psnr(ours: Pixels, theirs: Pixels) -> float:
    error = np.mean((ours.astype(float) - theirs.astype(float)) ** 2)
    return float(10 * np.log10(255**2 / error)) if error else np.inf


def _by_pillow(pixels: Pixels, size: tuple[int, int]) -> Pixels:
    return np.asarray(Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC))


@pytest.mark.parametrize("how", [resize, by_matrices])
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_photographs_are_as_good_as_by_pillow(
    extracted: Callable[[str], Path], how: Callable[[Pixels, tuple[int, int]], Pixels], mode: str
) -> None:
    paths = sorted(extracted("clothing-10.tar").rglob("*.jpg"))[::120]
    assert paths
    for path in paths:
        pixels = np.asarray(Image.open(path).convert(mode))
        for size in ((pixels.shape[1] * 2 // 3, pixels.shape[0] * 2 // 3), (100, 130)):
            assert _psnr(how(pixels, size), _by_pillow(pixels, size)) > PSNR


@needs_wheel
@given(data=st.data())
def test_the_wheel_and_the_matrices_make_the_same_bytes(data: st.DataObject) -> None:
    height, width = data.draw(st.integers(1, 300)), data.draw(st.integers(1, 300))
    size = data.draw(st.integers(1, width)), data.draw(st.integers(1, height))
    shape = (height, width, 3) if data.draw(st.booleans()) else (height, width)
    pixels = np.random.default_rng(height * 301 + width).integers(0, 256, shape, np.uint8)
    if data.draw(st.booleans()):
        pixels = (pixels > 127).astype(np.uint8) * 255  # the most that sums and rounding can be made to bear
    kernel: Kernel = data.draw(st.sampled_from(["catmull_rom", "bilinear"]))
    assert np.array_equal(resize(pixels, size, kernel), by_matrices(pixels, size, kernel))


@needs_wheel
def test_every_instruction_set_makes_the_same_bytes() -> None:
    pixels = np.asarray(picture(1, (411, 307)))
    known = module.wheel.Resizer().cpu_extensions
    assert known != module.wheel.CpuExtensions.none
    for kind in (module.wheel.CpuExtensions.none, known):
        resizer = module.wheel.Resizer()
        resizer.cpu_extensions = kind
        source = module.wheel.ImageData(411, 307, module.wheel.PixelType.U8x3, pixels.tobytes())
        image = module.wheel.ImageData(200, 100, module.wheel.PixelType.U8x3)
        resizer.resize(source, image, module._options("catmull_rom"))
        resized = np.frombuffer(image.get_buffer(), np.uint8).reshape(100, 200, 3)
        assert np.array_equal(resized, by_matrices(pixels, (200, 100)))


@pytest.mark.parametrize("how", [resize, by_matrices])
@pytest.mark.parametrize(
    ("old", "new"),
    [((1, 4000), (1, 40)), ((4000, 1), (40, 1)), ((70_000, 2), (1, 1)), ((3, 3), (2, 3)), ((3, 3), (3, 1))],
)
def test_extreme_shapes_keep_a_flat_colour(
    how: Callable[[Pixels, tuple[int, int]], Pixels], old: tuple[int, int], new: tuple[int, int]
) -> None:
    pixels = np.full((old[1], old[0], 3), (250, 130, 5), np.uint8)
    resized = how(pixels, new)
    assert resized.shape == (new[1], new[0], 3)
    assert np.abs(resized.astype(int) - (250, 130, 5)).max() <= 1


def test_an_image_of_that_size_already_is_returned_as_it_is() -> None:
    pixels = np.zeros((5, 7), np.uint8)
    assert resize(pixels, (7, 5)) is pixels
