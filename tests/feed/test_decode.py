"""Pixels: Pillow's own, or within a stated distance of them; and nothing a stranger sends can do harm."""

from __future__ import annotations

import io
import math
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from tests.feed.pictures import encode, scene

from steadytrain.feed.cut import Cut, Plan
from steadytrain.feed.decode import SHRINK_PSNR, Scratch, cut_from, cut_into, pixels, probe
from steadytrain.records.pixels import BadImageError

Pixels = NDArray[np.uint8]

FILTERS = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}


def psnr(one: Pixels, other: Pixels) -> float:
    """Peak signal to noise ratio in dB; infinite where nothing differs."""
    error = float(np.mean((one.astype(np.float64) - other) ** 2))
    return math.inf if error == 0 else 10 * math.log10(255**2 / error)


def whole(data: bytes, channels: Literal[1, 3] = 3) -> Pixels:
    return pixels(probe(data), channels, Scratch())


def cut_of(data: bytes, cut: Cut, box: tuple[float, float, float, float], *, flip: bool = False) -> Pixels:
    """The square that a box is cut to."""
    out = np.full((cut.size, cut.size, cut.channels), 99, np.uint8)
    plan = Plan(np.array([box], np.float64), np.array([[0, 0, cut.size, cut.size]]), np.array([flip]))
    cut_into(out, probe(data), cut, plan, 0, Scratch())
    return out


def reference(image: Image.Image, cut: Cut, box: tuple[float, float, float, float]) -> Pixels:
    """The same by Pillow alone, all of the image decoded."""
    return np.asarray(image.convert("RGB").resize((cut.size,) * 2, FILTERS[cut.interpolation], box=box))


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("JPEG", {"quality": 90}),
        ("JPEG", {"quality": 90, "progressive": True}),
        ("JPEG", {"quality": 90, "subsampling": 0}),
        ("JPEG", {"quality": 90, "restart_marker_blocks": 4}),
        ("PNG", {}),
        ("WEBP", {"lossless": True}),
        ("BMP", {}),
        ("TIFF", {}),
    ],
)
def test_a_whole_image_has_the_pixels_that_pillow_reads(kind: str, options: dict[str, Any]) -> None:
    data = encode(scene(1, 53, 71), kind, **options)
    assert np.array_equal(whole(data), np.asarray(Image.open(io.BytesIO(data)).convert("RGB")))


def test_every_original_photograph_has_the_pixels_that_pillow_reads(extracted: Callable[[str], Path]) -> None:
    for path in sorted(extracted("imagenet-sample-200.tar").rglob("*.JPEG"))[::5]:
        expected = np.asarray(Image.open(path).convert("RGB"))
        assert np.array_equal(whole(path.read_bytes()), expected), path.name


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_a_cut_is_pillows_resize_of_the_box(kind: str, interpolation: Literal["bilinear", "bicubic"]) -> None:
    image = Image.open(io.BytesIO(encode(scene(2, 120, 160), kind)))
    cut = Cut(kind="none", size=48, interpolation=interpolation)
    for box in [(0, 0, 160, 120), (11, 7, 100, 90), (100, 60, 130, 90), (30.5, 20.25, 99.75, 100.5)]:
        expected = reference(image, cut, box)
        got = cut_of(encode(scene(2, 120, 160), kind), cut, box)
        # Cropping first shifts the box by whole pixels: a rounding may fall to the other side, by one level at most.
        assert np.abs(got.astype(int) - expected).max() <= 1
        assert np.mean(got != expected) < 0.001
        assert np.array_equal(cut_of(encode(scene(2, 120, 160), kind), cut, box, flip=True), got[:, ::-1])


def test_a_cut_at_the_same_scale_copies_pixels() -> None:
    data = encode(scene(3, 60, 80))
    got = cut_of(data, Cut(kind="none", size=32), (10, 20, 42, 52))
    assert np.array_equal(got, whole(data)[20:52, 10:42])


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_shrinking_while_decoding_stays_close_to_pillow(
    extracted: Callable[[str], Path], interpolation: Literal["bilinear", "bicubic"]
) -> None:
    """Photographs of 500 pixels cut to 20 to 160 pixels: shrunk by 8, 4 and 2."""
    found: list[float] = []
    for number, path in enumerate(sorted(extracted("imagenet-sample-200.tar").rglob("*.JPEG"))[::4]):
        image = Image.open(path)
        side = min(image.size)
        for target in (side // 13, side // 6, side // 3):
            cut = Cut(kind="none", size=target, interpolation=interpolation)
            left, top = (image.width - side) * (number % 5) / 4, (image.height - side) / 2
            box = (left, top, left + side, top + side)
            found.append(psnr(cut_of(path.read_bytes(), cut, box), reference(image, cut, box)))
    print(f"{interpolation}: {min(found):.1f} dB at least, {np.median(found):.1f} dB in the middle")
    assert min(found) >= SHRINK_PSNR
    assert np.median(found) >= 40


def test_grey_is_the_luminance_of_colour_and_colour_of_grey_is_grey() -> None:
    image = scene(4, 64, 64)
    data = encode(image, "JPEG", quality=95)
    assert psnr(whole(data, 1)[..., 0], np.asarray(Image.open(io.BytesIO(data)).convert("L"))) > 45
    for kind in ("JPEG", "PNG"):
        grey = encode(image.convert("L"), kind)
        assert whole(grey, 1).shape == (64, 64, 1)
        assert np.array_equal(whole(grey, 3), np.repeat(whole(grey, 1), 3, axis=2))


def test_odd_modes_follow_the_packers_rule() -> None:
    clear = Image.new("RGBA", (20, 20), (200, 10, 10, 0))
    assert (whole(encode(clear)) == 255).all(), "transparency is laid over white"
    deep = Image.fromarray(np.full((20, 20), 0x8080, np.uint16))
    assert (whole(encode(deep)) == 0x80).all()
    palette = scene(5, 20, 20).quantize(16)
    assert np.array_equal(whole(encode(palette)), np.asarray(palette.convert("RGB")))
    cmyk = scene(6, 20, 20).convert("CMYK")
    data = encode(cmyk, "JPEG")
    assert np.array_equal(whole(data), np.asarray(Image.open(io.BytesIO(data)).convert("RGB")))


def test_padding_is_zero_and_mirrors_with_the_image() -> None:
    source = np.full((8, 8, 3), 200, np.uint8)
    cut = Cut(kind="pad-crop", size=8, pad=4)
    plan = Plan(np.array([[0.0, 0, 5, 6]] * 2), np.array([[3, 2, 8, 8]] * 2), np.array([False, True]))
    for row, columns in enumerate([slice(3, 8), slice(0, 5)]):
        out = np.full((8, 8, 3), 99, np.uint8)
        cut_from(out, source, cut, plan, row)
        expected = np.zeros_like(out)
        expected[2:, columns] = 200
        assert np.array_equal(out, expected)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xd8\xff",
        b"not an image at all",
        encode(scene(7, 40, 40), "JPEG")[:-200],
        encode(scene(7, 40, 40))[:-200],
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n",
    ],
    ids=["empty", "start of a JPEG", "text", "half a JPEG", "half a PNG", "PostScript"],
)
def test_what_is_no_whole_image_is_refused(data: bytes) -> None:
    with pytest.raises(BadImageError):
        whole(data)


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_a_bomb_is_refused_by_its_header(kind: str) -> None:
    data = bytearray(encode(Image.new("L", (64, 64)), kind))
    if kind == "PNG":
        data[16:24] = (20_000).to_bytes(4, "big") * 2
        data[29:33] = zlib.crc32(data[12:29]).to_bytes(4, "big")
    else:
        at = data.index(b"\xff\xc0") + 5
        data[at : at + 4] = (20_000).to_bytes(2, "big") * 2
    with pytest.raises(BadImageError, match="pixels"):
        probe(bytes(data))


def test_odd_and_hostile_files_are_read_as_pillow_reads_them_or_refused(data_folder: Path) -> None:
    """Corrupt, lossless, CMYK, progressive, of strange sizes: the same verdict and the same pixels as Pillow's."""
    read = 0
    for path in sorted((data_folder / "odd-images").rglob("*")):
        if path.suffix.lower() not in (".jpg", ".jpeg", ".png"):
            continue
        data = path.read_bytes()
        try:
            got: Pixels | None = whole(data)
        except BadImageError:
            got = None
        try:
            expected = Image.open(path)
            expected.load()
        except (OSError, SyntaxError, Image.DecompressionBombError):
            assert got is None, path.name
            continue
        if expected.mode in ("L", "RGB", "CMYK"):
            assert got is not None and np.array_equal(got, np.asarray(expected.convert("RGB"))), path.name
            read += 1
    assert read > 60
