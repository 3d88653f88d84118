"""Decoding no more of a JPEG than is needed: the same pixels, and nothing at all where that cannot be."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simplejpeg
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image
from tests.data.loader.pictures import encode, scene

from steadytrain.data.images import jpeg
from steadytrain.data.images.decode import is_common_jpeg

Pixels = NDArray[np.uint8]


def bytes_of(data: bytes) -> Pixels:
    return np.frombuffer(data, np.uint8).copy()


def head_of(data: Pixels) -> jpeg.JpegHeader:
    head = jpeg.read_header_of(data)
    assert head is not None
    return head


def full(data: Pixels, shrink: int = 1) -> Pixels:
    shape = (*head_of(data)[:2], 3)
    return jpeg.decode(data, shape, np.empty(np.prod(shape), np.uint8), shrink=shrink)


def top(data: Pixels, rows: int, shrink: int = 1) -> Pixels | None:
    head = head_of(data)
    return jpeg.decode_top(data, head, 3, np.empty(head.height * head.width * 3, np.uint8), rows=rows, shrink=shrink)


@pytest.mark.parametrize("shrink", [1, 2, 4, 8])
def test_the_first_rows_of_photographs_are_those_of_a_full_decode(
    extracted: Callable[[str], Path], shrink: int
) -> None:
    num_found = 0
    for path in sorted(extracted("imagenet-sample-200.tar").rglob("*.JPEG"))[::10]:
        data = bytes_of(path.read_bytes())
        before, whole = data.copy(), full(data, shrink)
        for rows in (1, 15, 16, 17, len(whole) * shrink // 3, len(whole) * shrink // 2):
            got = top(data, rows, shrink)
            needed = -(-rows // shrink)
            assert got is not None and len(got) < len(whole)
            assert np.array_equal(got[:needed], whole[:needed]), (path.name, rows)
            num_found += 1
        assert np.array_equal(data, before), "the bytes are as they were"
    assert num_found == 120


@pytest.mark.parametrize("subsampling", ["4:4:4", "4:2:2", "4:2:0"])
def test_every_chroma_layout(subsampling: str) -> None:
    data = bytes_of(encode(scene(1, 200, 90), "JPEG", subsampling=subsampling))
    whole, got = full(data), top(data, 101)
    assert got is not None and np.array_equal(got[:101], whole[:101])


@pytest.mark.parametrize("interval", [1, 2, 4, 5, 6, 7, 12, 100])
@pytest.mark.parametrize("shrink", [1, 2])
def test_restart_markers_are_no_trouble(interval: int, shrink: int) -> None:
    """Of 13 rows of 6 MCUs: intervals that divide a row of them, that do not, and of several rows."""
    data = bytes_of(encode(scene(1, 200, 90), "JPEG", restart_marker_blocks=interval))
    whole = full(data, shrink)
    for rows in range(10, 170, 13):
        got, needed = top(data, rows, shrink), -(-rows // shrink)
        assert got is not None and np.array_equal(got[:needed], whole[:needed])


@pytest.mark.parametrize("end", [b"", b"\xff\xd9 and more"])
def test_with_restart_markers_the_end_must_be_where_the_file_ends(end: bytes) -> None:
    data = encode(scene(1, 200, 90), "JPEG", restart_marker_blocks=2)
    assert top(bytes_of(data[:-2] + end), 50) is None
    assert top(bytes_of(data[: len(data) * 3 // 4] + end), 50) is None


def test_other_kinds_are_left_to_the_full_decoder() -> None:
    assert top(bytes_of(encode(scene(1, 200, 90), "JPEG", progressive=True)), 50) is None


@given(st.data())
def test_damage_between_restart_markers_shows_as_pillow_shows_it(data: st.DataObject) -> None:
    harmed = bytearray(encode(scene(5, 160, 128), "JPEG", quality=85, restart_marker_blocks=2))
    for _ in range(data.draw(st.integers(1, 3))):
        harmed[data.draw(st.integers(len(harmed) // 3, len(harmed) - 3))] = data.draw(st.integers(0, 255))
    try:
        got = top(bytes_of(bytes(harmed)), 90)
    except ValueError:
        return
    if got is not None:
        assert np.array_equal(got[:90], np.asarray(Image.open(io.BytesIO(harmed)).convert("RGB"))[:90])


def test_where_nothing_is_saved_the_full_decoder_is_used() -> None:
    data = bytes_of(encode(scene(1, 100, 90), "JPEG"))
    assert top(data, 90) is None and top(data, 100) is None


def test_a_file_cut_short_is_found_out_wherever_the_rows_end() -> None:
    data = bytes_of(encode(scene(1, 400, 300), "JPEG", quality=90))[:-2000].copy()
    with pytest.raises(ValueError, match="Premature end"):
        full(data)
    for rows in (50, 200, 350):
        with pytest.raises(ValueError, match="Premature end"):
            top(data, rows)


def test_damage_below_the_rows_does_not_touch_them() -> None:
    data = bytes_of(encode(scene(1, 400, 300), "JPEG", quality=90))
    whole = full(data)
    data[len(data) * 3 // 4 : -2] = 0
    got = top(data, 100)
    assert got is not None and np.array_equal(got[:100], whole[:100])


@pytest.mark.skipif(jpeg.parts is None, reason="the native decoder is not built, or there is no AVX2")
@pytest.mark.parametrize("kind", [bytes, memoryview, bytes_of])
@pytest.mark.parametrize("channels", [1, 3])
def test_a_part_is_decoded_into_the_midst_of_an_image(kind: Callable[[bytes], Any], channels: int) -> None:
    data = encode(scene(1, 100, 90), "JPEG")
    whole = simplejpeg.decode_jpeg(data, "GRAY" if channels == 1 else "RGB")
    out = np.zeros((100, 90, channels), np.uint8)
    assert jpeg.decode_part(kind(data), [20, 30, 70, 71], out[30:71, 20:70])
    assert np.array_equal(out[30:71, 20:70], whole[30:71, 20:70])
    out[30:71, 20:70] = 0
    assert not out.any()


def test_without_the_native_decoder_no_part_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jpeg, "parts", None)
    out = np.zeros((10, 10, 3), np.uint8)
    assert not jpeg.decode_part(encode(scene(1, 20, 20), "JPEG"), [0, 0, 10, 10], out) and not out.any()


def test_the_header_says_where_its_parts_stand() -> None:
    data = encode(scene(1, 100, 90), "JPEG", subsampling="4:2:2", restart_marker_blocks=3)
    head = head_of(bytes_of(data))
    assert (head.height, head.width) == (100, 90)
    assert data[head.frame : head.frame + 4] == bytes((0, 100, 0, 90))
    assert data[head.scan - 1] == 0 and data[head.scan - 14 : head.scan - 12] == b"\xff\xda"


def test_a_preview_inside_the_header_is_not_taken_for_the_image() -> None:
    small = encode(scene(2, 20, 30), "JPEG")
    plain = encode(scene(1, 100, 90), "JPEG")
    data = plain[:2] + b"\xff\xe1" + (len(small) + 2).to_bytes(2, "big") + small + plain[2:]
    for file in (data, small, data):
        head = head_of(bytes_of(file))
        assert (head.height, head.width) == ((100, 90) if file is data else (20, 30))
        assert head.scan > len(small) or file is small


@pytest.mark.parametrize("length", [0, 1, 2, 3, 20, 150, 200, 400, 600])
def test_truncated_header_is_not_read(length: int) -> None:
    data = encode(scene(1, 100, 90), "JPEG")
    assert jpeg.read_header_of(data[:length]) is None


def test_file_that_is_no_jpeg_has_no_header() -> None:
    assert jpeg.read_header_of(b"") is None and jpeg.read_header_of(encode(scene(1, 10, 10))) is None
    assert jpeg.read_header_of(encode(scene(1, 10, 10, mode="CMYK"), "JPEG")) is None
    head = jpeg.read_header_of(encode(scene(1, 10, 12, mode="L"), "JPEG"))
    assert head is not None and head[:2] == (10, 12)


def test_headers_are_read_only_of_jpegs_that_packing_calls_common(data_folder: Path) -> None:
    for path in sorted((data_folder / "odd-images").rglob("*.jp*g")):
        data = path.read_bytes()
        assert jpeg.read_header_of(data) is None or is_common_jpeg(data), path.name


def test_lossless_files_are_left_to_pillow(data_folder: Path) -> None:
    # Decoded at a smaller scale, such a file ends the process inside libjpeg-turbo.
    files = sorted(data_folder.glob("odd-images/jpeg_decoder/tests/reftest/images/lossless/**/*.jpg"))
    assert len(files) > 3
    assert [path.name for path in files if jpeg.read_header_of(bytes_of(path.read_bytes())) is not None] == []
