"""Mean and standard deviation are those of the pixels counted, exactly; and those are enough."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.data.packing.pictures import picture

from steadytrain.data.images.statistics import EVERY, SMALL, PixelCount, mean_and_std


def _sizes() -> list[tuple[int, int]]:
    return [(32, 32)] * 70 + [(8, 8), (40, 30), (300, 200), (1, 1), (8, 8)]


def test_statistics_are_those_of_numpy() -> None:
    count = PixelCount()
    pixels = []
    for number, size in enumerate(_sizes()):
        image = picture(number, size)
        count.add(image)
        rows = slice(EVERY // 2, None, EVERY) if size[0] * size[1] > SMALL else slice(None)
        pixels.append(np.asarray(image)[rows].reshape(-1, 3) / 255)
    mean, std = mean_and_std(count.totals(), channels=3)
    assert mean == pytest.approx(np.concatenate(pixels).mean(axis=0), rel=1e-12)
    assert std == pytest.approx(np.concatenate(pixels).std(axis=0), rel=1e-12)


def test_an_eighth_of_a_photograph_is_as_good_as_the_whole(extracted: Callable[[str], Path]) -> None:
    count, whole = PixelCount(), PixelCount()
    for path in sorted(extracted("clothing-10.tar").rglob("*.jpg"))[::30]:
        pixels = np.asarray(Image.open(path).convert("RGB"))
        count.add(pixels)
        for start in range(EVERY):
            whole._count(pixels[start::EVERY])
    ours, expected = (mean_and_std(value.totals(), channels=3) for value in (count, whole))
    assert np.allclose(ours, expected, atol=1e-3)


def test_arrays_are_counted_like_images() -> None:
    first, other = PixelCount(), PixelCount()
    for number, size in enumerate(_sizes()):
        first.add(picture(number, size, "L" if number % 2 else "RGB"))
        other.add(np.asarray(picture(number, size, "L" if number % 2 else "RGB")))
    assert np.array_equal(first.totals(), other.totals())


def test_the_order_and_the_grouping_of_images_change_no_bit() -> None:
    images = [picture(number, size) for number, size in enumerate(_sizes())]
    forward, parts = PixelCount(), [PixelCount() for _ in range(3)]
    for number, image in enumerate(images):
        forward.add(image)
        parts[-number % 3].add(image)
    assert np.array_equal(forward.totals(), parts[2].totals() + parts[0].totals() + parts[1].totals())


def test_grey_images_among_coloured_ones_count_in_every_channel() -> None:
    count = PixelCount()
    count.add(picture(1, (30, 30), "L"))
    grey, _ = mean_and_std(count.totals(), channels=1)
    colour, _ = mean_and_std(count.totals(), channels=3)
    assert colour == grey * 3


@pytest.mark.parametrize("size", [(9000, 2), (2, 9000), (700, 700), (1, 20_000)])
@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_sums_are_exact_where_they_are_largest(size: tuple[int, int], mode: str) -> None:
    count = PixelCount()
    pixels = np.full((size[1], size[0], 3) if mode == "RGB" else (size[1], size[0]), 255, np.uint8)
    first = min(EVERY, size[1]) // 2
    pixels[first, 0] = 254
    count.add(pixels)
    n = size[0] * len(range(first, size[1], EVERY))
    expected = [n, 255 * n - 1, 255**2 * n - (255**2 - 254**2)]
    assert all(row.tolist() == expected for row in (count.totals()[:3] if mode == "RGB" else count.totals()[3:]))


def test_no_counted_pixels_give_no_statistics() -> None:
    assert mean_and_std(PixelCount().totals(), channels=3) == ((), ())
