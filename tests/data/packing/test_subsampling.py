"""Chroma at full or half resolution: which is stored, what it costs and saves, and crops of both, byte for byte."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simplejpeg
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from tests.data.loader.pictures import Pictures, everything, scene

from steadytrain.data.images import jpeg
from steadytrain.data.images.encode import (
    PackSettings,
    encode_jpeg,
    pack_bytes,
    pack_pixels,
)
from steadytrain.data.loader import ImageLoader
from steadytrain.data.loader.crop import Crop
from steadytrain.data.packing.pack import pack
from steadytrain.errors import DataError

Pixels = NDArray[np.uint8]


def drawing(seed: int, height: int = 200, width: int = 300) -> Pixels:
    """Lines, text and discs in strong colours."""
    draw = random.Random(seed)
    colours = [(255, 0, 0), (0, 0, 255), (0, 200, 0), (255, 0, 255), (255, 220, 0)]
    image = Image.new("RGB", (width, height), colours[seed % 5])
    pen = ImageDraw.Draw(image)
    for _ in range(30):
        colour, x, y = draw.choice(colours), draw.randrange(width), draw.randrange(height)
        pen.line([(x, y), (draw.randrange(width), draw.randrange(height))], fill=colour, width=2)
        pen.ellipse([x, y, x + 20, y + 14], outline=colour)
        pen.text((x, y), "Exit 12", fill=colour)
    return np.asarray(image)


def chroma_of(data: bytes) -> str:
    return str(simplejpeg.decode_jpeg_header(data)[3])


def psnr(data: bytes, pixels: Pixels) -> float:
    error = simplejpeg.decode_jpeg(data).astype(np.float64) - pixels
    return float(10 * np.log10(255**2 / (error**2).mean()))


def test_the_default_stays_half_the_chroma_and_leaves_cards_and_caches_as_they_are() -> None:
    assert chroma_of(pack_pixels(drawing(1), PackSettings()).data) == "420"
    assert "subsampling" not in PackSettings().to_dict()


def test_full_chroma_keeps_the_edges_of_drawings() -> None:
    for seed in range(5):
        half, full = (encode_jpeg(drawing(seed), 95, most=4, subsampling=way) for way in ("420", "444"))
        assert (chroma_of(half), chroma_of(full)) == ("420", "444")
        assert psnr(full, drawing(seed)) > psnr(half, drawing(seed)) + 8
        assert len(full) > len(half)


@pytest.mark.parametrize("size", [(1, 1), (1, 50), (7, 3), (33, 47)])
def test_any_size_and_grey_are_stored(size: tuple[int, int]) -> None:
    settings = PackSettings(subsampling="444", encoding="jpg")
    colour, grey = (np.asarray(scene(1, *size, mode=mode)) for mode in ("RGB", "L"))
    assert simplejpeg.decode_jpeg(pack_pixels(colour, settings).data).shape == colour.shape
    assert pack_pixels(grey, settings).data == pack_pixels(grey, PackSettings(encoding="jpg")).data


def test_jpegs_that_need_not_change_stay_as_they_are() -> None:
    data = encode_jpeg(drawing(1), 90, most=0)
    assert pack_bytes(data, PackSettings(subsampling="444")).data == data


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"subsampling": "444", "encoding": "png"}, "444 is for colour JPEGs, and --encoding png stores none"),
        ({"subsampling": "444", "encoding": "webp"}, "444 is for colour JPEGs, and --encoding webp stores none"),
        ({"subsampling": "444", "grey": True}, "444 is for colour JPEGs, and --grey stores none"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(DataError, match=message):
        PackSettings(**settings)  # type: ignore[arg-type]


def test_the_card_says_how(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        Image.fromarray(drawing(1)).save(tmp_path / "photos" / name / "1.png")
    (file,) = pack(tmp_path / "photos", tmp_path / "set", subsampling="444")
    assert file.card.settings["subsampling"] == "444"
    (file,) = pack(tmp_path / "photos", tmp_path / "other")
    assert "subsampling" not in file.card.settings


@pytest.fixture(params=["native", "libjpeg"])
def decoder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "libjpeg":
        monkeypatch.setattr(jpeg, "parts", None)
    elif jpeg.parts is None:
        pytest.skip("the native decoder is not built, or this processor has no AVX2")
    yield request.param


@pytest.mark.parametrize("way", ["420", "444"])
@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("most", [0, 1, 4, 7])
def test_crops_have_the_bytes_of_a_whole_decode(decoder: str, way: str, mode: str, most: int) -> None:
    sizes = [(64, 64), (65, 97), (90, 61), (70, 341), (131, 128), (48, 47)]
    pixels = [np.asarray(scene(n, *size, mode=mode)) for n, size in enumerate(sizes)]
    images = [encode_jpeg(image, 95, most=most, subsampling=way) for image in pixels]  # type: ignore[arg-type]
    # The same pixels, decoded whole and stored bare. Squares are too large for images to be shrunk while decoding.
    whole = [pack_bytes(image, PackSettings(encoding="raw")).data for image in images]
    for crop in (
        Crop(kind="resized-crop", size=56, area=(0.3, 1.0), flip=True, channels=1 if mode == "L" else 3),
        Crop(kind="pad-crop", size=44, pad=4, flip=True),
        Crop(kind="none", size=56, crop=0.875),
    ):
        for train in (True, False):
            options: dict[str, Any] = {"batch_size": 6, "train": train, "stop": 48 if train else None, "threads": 1}
            with (
                ImageLoader(Pictures(images), crop, keep_bytes=0, **options) as ours,
                ImageLoader(Pictures(whole), crop, keep_bytes=0, **options) as theirs,
            ):
                got, expected = everything(ours), everything(theirs)
                assert np.array_equal(got[0], expected[0]), (crop.kind, train)
                assert np.array_equal(got[1], expected[1]) and len(got[1]) == (48 if train else 6)
