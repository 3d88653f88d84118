"""Restart markers: where they can be cut by, files that everything reads, and no pixel changed by adding them."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image
from tests.data.loader.pictures import scene

from steadytrain.data.images.encode import (
    PackSettings,
    encode_jpeg,
    pack_bytes,
    pack_pixels,
    restart_interval,
)
from steadytrain.errors import DataError


def pixels_of(data: bytes) -> NDArray[np.uint8]:
    return np.asarray(Image.open(io.BytesIO(data)))


def markers(data: bytes) -> int:
    return sum(data.count(bytes((0xFF, 0xD0 + number))) for number in range(8))


@given(st.integers(1, 5000), st.sampled_from([8, 16, 32]), st.integers(1, 40))
def test_an_interval_divides_the_row_and_is_as_long_as_may_be(width: int, mcu: int, most: int) -> None:
    each, across = restart_interval(width, mcu, most=most), -(-width // mcu)
    assert across % each == 0 and (each == 1 or each * mcu <= 16 * most)
    assert not [longer for longer in range(each + 1, across + 1) if across % longer == 0 and longer * mcu <= 16 * most]


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("size", [(256, 341), (33, 47), (5, 3), (300, 272)])
def test_markers_change_no_pixel_and_stand_where_they_should(mode: str, size: tuple[int, int]) -> None:
    image = np.asarray(scene(1, *size, mode=mode))
    plain, marked = encode_jpeg(image, 95, most=0), encode_jpeg(image, 95, most=4)
    assert np.array_equal(pixels_of(plain), pixels_of(marked))
    assert markers(plain) == 0
    mcu = 8 if mode == "L" else 16
    num = -(-size[0] // mcu) * -(-size[1] // mcu) // restart_interval(size[1], mcu, most=4)
    assert markers(marked) == num - 1


def test_photographs_grow_by_little(extracted: Callable[[str], Path]) -> None:
    sizes = {0: 0, 4: 0}
    for path in sorted(extracted("imagenet-sample-200.tar").rglob("*.JPEG"))[::10]:
        data = path.read_bytes()
        for most in sizes:
            sizes[most] += len(pack_bytes(data, PackSettings(shorter_side=256, restart=most)).data)
    assert 1 < sizes[4] / sizes[0] < 1.02


def test_packing_marks_what_it_encodes_and_nothing_else() -> None:
    small = np.asarray(scene(2, 200, 300))
    assert markers(pack_pixels(small, PackSettings()).data) > 0
    assert markers(pack_pixels(small, PackSettings(restart=0)).data) == 0
    kept = encode_jpeg(small, 90, most=0)
    packed = pack_bytes(kept, PackSettings())
    assert packed.kept and packed.data == kept


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"restart": -1}, "--restart is -1; it must be from 0"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(DataError, match=message):
        PackSettings(**settings)  # type: ignore[arg-type]
