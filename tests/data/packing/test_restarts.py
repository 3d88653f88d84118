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

from steadytrain.data.images import encode
from steadytrain.data.images.encode import (
    PackSettings,
    add_restart_markers,
    encode_jpeg,
    pack_bytes,
    pack_pixels,
    restart_interval,
)
from steadytrain.errors import DataError

needs_native = pytest.mark.skipif(encode.native is None, reason="the native decoder is not built")


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
        ({"restart": 0, "mark_kept": True}, "--restart 0 adds none"),
        ({"encoding": "pass", "mark_kept": True}, "--encoding pass adds none"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(DataError, match=message):
        PackSettings(**settings)  # type: ignore[arg-type]


def test_marking_without_the_native_decoder_is_refused_before_packing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode, "native", None)
    with pytest.raises(DataError, match="needs the native decoder"):
        PackSettings(mark_kept=True)


@needs_native
@pytest.mark.parametrize("chroma", ["4:2:0", "4:2:2", "4:4:4"])
def test_marking_is_without_loss(chroma: str) -> None:
    file = io.BytesIO()
    scene(3, 200, 300).save(file, "JPEG", subsampling=chroma, quality=90)
    plain = file.getvalue()
    marked = add_restart_markers(plain, most=4)
    assert markers(marked) > markers(plain) == 0
    assert np.array_equal(pixels_of(marked), pixels_of(plain))
    packed = pack_bytes(plain, PackSettings(mark_kept=True))
    assert packed.data == marked and not packed.kept and packed.format == "jpg"


@needs_native
def test_what_cannot_be_marked_stays_as_it_is() -> None:
    file = io.BytesIO()
    scene(3, 200, 300).save(file, "JPEG", progressive=True)
    packed = pack_bytes(file.getvalue(), PackSettings(mark_kept=True))
    assert packed.kept and packed.data == file.getvalue()
