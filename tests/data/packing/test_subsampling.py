"""Chroma at full or half resolution: which is stored, what it costs and saves, and crops of both, byte for byte."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simplejpeg
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from tests.data.loader.pictures import Pictures, everything, scene

from steadytrain.cli import main
from steadytrain.data.images import jpeg
from steadytrain.data.images.encode import (
    MIN_CHROMA_PSNR,
    PackSettings,
    encode_jpeg,
    pack_bytes,
    pack_pixels,
    subsampled_chroma_psnr,
)
from steadytrain.data.loader import ImageLoader
from steadytrain.data.loader.crop import Crop
from steadytrain.data.packing.pack import pack
from steadytrain.data.recordio.card import Card
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
    assert PackSettings(subsampling="auto").to_dict()["subsampling"] == "auto"


def test_full_chroma_keeps_the_edges_of_drawings() -> None:
    for seed in range(5):
        half, full = (encode_jpeg(drawing(seed), 95, most=4, subsampling=way) for way in ("420", "444"))
        assert (chroma_of(half), chroma_of(full)) == ("420", "444")
        assert psnr(full, drawing(seed)) > psnr(half, drawing(seed)) + 8
        assert len(full) > len(half)


def test_auto_takes_full_chroma_for_drawings_and_rarely_for_photographs(extracted: Callable[[str], Path]) -> None:
    auto = PackSettings(subsampling="auto", shorter_side=256)
    assert [chroma_of(pack_pixels(drawing(seed), auto).data) for seed in range(5)] == ["444"] * 5
    paths = sorted(extracted("imagenet-sample-200.tar").rglob("*.JPEG"))[::5]
    stored = [chroma_of(pack_bytes(path.read_bytes(), auto).data) for path in paths]
    assert stored.count("420") >= 36 and stored.count("420") + stored.count("444") == 40


def test_auto_sees_colours_that_half_the_chroma_would_blur() -> None:
    """Red and grey of equal luma in columns: alternating they are lost, two pixels wide they are not."""
    fine, coarse = (np.tile(np.repeat([[255, 0, 0], [76, 76, 76]], wide, axis=0), (40, 20, 1)) for wide in (1, 2))
    assert subsampled_chroma_psnr(fine.astype(np.uint8)) < 20
    assert subsampled_chroma_psnr(coarse.astype(np.uint8)) == math.inf
    assert subsampled_chroma_psnr(drawing(1)) < MIN_CHROMA_PSNR < subsampled_chroma_psnr(np.asarray(scene(1, 200, 300)))


@pytest.mark.parametrize("size", [(1, 1), (1, 50), (7, 3), (33, 47)])
@pytest.mark.parametrize("way", ["444", "auto"])
def test_any_size_and_grey_are_stored(size: tuple[int, int], way: str) -> None:
    settings = PackSettings(subsampling=way, encoding="jpg")  # type: ignore[arg-type]
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
        ({"subsampling": "auto", "encoding": "webp"}, "auto is for colour JPEGs, and --encoding webp stores none"),
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
    assert "subsampling" not in file.card.settings and "full_chroma" not in file.card.to_json()


def test_card_of_auto_counts_images_with_full_chroma(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "photos" / "a").mkdir(parents=True)
    (tmp_path / "photos" / "b").mkdir(parents=True)
    for seed in range(3):
        Image.fromarray(drawing(seed)).save(tmp_path / "photos" / "a" / f"{seed}.png")
        Image.new("RGB", (300, 200), (seed * 80, 90, 90)).save(tmp_path / "photos" / "b" / f"{seed}.png")
    options = ["--subsampling", "auto", "--encoding", "jpg"]
    assert main(["pack", str(tmp_path / "photos"), str(tmp_path / "set"), *options]) == 0
    assert "stored    6 jpg; 0 byte for byte; 3 jpg encoded with all colours (4:4:4)" in capsys.readouterr().out
    card = Card.from_json((tmp_path / "set.json").read_text())
    assert card.full_chroma == 3 and Card.from_json(card.to_json()) == card


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
