"""A feed over a source as it lies gives what a feed over its pack gives, odd images included."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.data.loader.pictures import everything, same, scene
from tests.data.packing.odd import GROUPS, Odd
from tests.data.packing.pictures import write_folder

from steadytrain.data.images.decode import BadImageError
from steadytrain.data.images.encode import PackedImage, PackSettings
from steadytrain.data.loader import BadImage, Crop, ImageLoader
from steadytrain.data.loader.decode import Scratch, pixels, probe
from steadytrain.data.packing.pack import pack
from steadytrain.data.packing.portions import pack_file
from steadytrain.data.recordio.reader import Records
from steadytrain.data.sources.unpacked import Unpacked
from steadytrain.errors import FeedError

ROWS = [(group, odd) for group, rows in GROUPS.items() for odd in rows]
NAMES = [f"{group}: {odd.what}" for group, odd in ROWS]
pytestmark = pytest.mark.filterwarnings("ignore")
# Packing looks at the whole of a JPEG; a decoder that wants pixels fills in what is missing.
FILLED_IN = "left out: damaged: image data is missing"


def decoded(source: Records | Unpacked, number: int, channels: int) -> NDArray[np.uint8] | None:
    """An image as the feed sees it, whole; None where it cannot be used."""
    try:
        data = np.frombuffer(source.image(number), np.uint8).copy()
        return pixels(probe(data), 1 if channels == 1 else 3, Scratch()).copy()
    except BadImageError:
        return None


@pytest.mark.parametrize(("group", "odd"), ROWS, ids=NAMES)
def test_an_odd_image_is_what_packing_without_loss_makes_of_it(tmp_path: Path, group: str, odd: Odd) -> None:
    photos = write_folder(tmp_path / "photos", {"cat": 1, "dog": 1})
    path = photos / "cat" / "0000.png"
    path.unlink()
    odd.make(path)
    packed = pack_file(str(path), PackSettings(encoding="raw"))
    if path.is_dir():
        return
    channels = packed.channels if isinstance(packed, PackedImage) else 3
    with Unpacked.open(photos) as unpacked:
        image = decoded(unpacked, 0, channels)
    if isinstance(packed, PackedImage):
        assert image is not None
        assert np.array_equal(image, pixels(probe(packed.data), 3 if channels == 3 else 1, Scratch()))
    else:
        assert image is None or odd.becomes == FILLED_IN


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Photographs that packing stores byte for byte, and small images of all kinds that it stores without loss."""
    for number in range(12):
        path = tmp_path / "photos" / ("cat", "dog")[number % 2] / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        scene(number, 90 + 7 * number, 140 - 5 * number).save(path, quality=90)
    for number, mode in enumerate(["P", "1", "L", "LA", "RGBA", "I;16"]):
        scene(number, 40, 50, mode="L" if mode == "I;16" else mode).convert(mode).save(
            tmp_path / "photos" / "cat" / f"small-{number}.png"
        )
    return tmp_path / "photos"


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("cut", [Crop(kind="resized-crop", size=48, flip=True), Crop(kind="pad-crop", size=64)])
def test_batches_are_those_of_a_pack(photos: Path, train: bool, cut: Crop) -> None:
    pack(photos, photos.parent / "set", encoding="auto", shorter_side=None, workers=1)
    with Records.open(photos.parent / "set.rec") as packed, Unpacked.open(photos) as unpacked:
        assert len(packed) == len(unpacked) == 18
        runs = [
            everything(ImageLoader(source, cut, batch_size=6, seed=4, stop=18, train=train, threads=2))
            for source in (packed, unpacked)
        ]
        assert np.array_equal(packed.labels, unpacked.labels)
    assert same(*runs)


def test_files_are_read_ahead(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected: list[int] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda number, start, size, advice: expected.append(size), raising=False)
    with Unpacked.open(photos) as unpacked:
        loader = ImageLoader(unpacked, Crop(kind="pad-crop", size=64), batch_size=6, train=False, skip_bad=True)
        everything(loader)
        assert sum(expected) >= unpacked.listing.sizes.sum() > 0


def test_a_bad_image_is_replaced_and_named_by_its_file(photos: Path) -> None:
    (photos / "dog" / "1.jpg").write_bytes(b"\xff\xd8 nothing more")
    (photos / "cat" / "0.jpg").unlink()
    (photos / "cat" / "0.jpg").symlink_to("nowhere")
    bad: list[BadImage] = []
    with Unpacked.open(photos) as unpacked:
        feed = ImageLoader(unpacked, Crop(kind="none", size=32), batch_size=6, stop=18, on_bad=bad.append)
        seen = everything(feed)[1]
        reasons = {fault.what: fault.reason for fault in bad}
        assert set(reasons) == {f"image 0 of {photos} (cat/0.jpg)", f"image 12 of {photos} (dog/1.jpg)"}
        assert reasons[f"image 0 of {photos} (cat/0.jpg)"] == "a broken link"
        assert not {fault.id for fault in bad} & set(seen.tolist())
        evaluation = ImageLoader(unpacked, Crop(kind="none", size=32), batch_size=6, train=False)
        with pytest.raises(FeedError, match=r"image 0 of .* \(cat/0\.jpg\) cannot be decoded \(a broken link\)"):
            list(evaluation)
