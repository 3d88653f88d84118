"""What a sample says of packing, against what packing then gives."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.data.loader.pictures import encode, scene

from steadytrain.data.images.encode import PackSettings, native
from steadytrain.data.loader import Crop
from steadytrain.data.loader.estimate import Estimate, alternatives, draw_sample, estimate, measure_sides, regress
from steadytrain.data.packing.pack import pack
from steadytrain.data.sources.folder import list_folder
from steadytrain.errors import DataError

CUT = Crop(kind="resized-crop", size=48, flip=True)
WAYS = [
    PackSettings(),
    PackSettings(shorter_side=64),
    PackSettings(shorter_side=64, quality=60),
    PackSettings(encoding="raw"),
]


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """120 JPEGs of many sizes, in two classes and two splits."""
    for number in range(120):
        folder = tmp_path / "photos" / ("train", "val")[number % 3 == 0] / ("cat", "dog")[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number}.jpg").write_bytes(encode(scene(number, 80 + number, 100 + 2 * number), "JPEG"))
    return tmp_path / "photos"


def _packed_bytes(source: Path, out: Path, settings: PackSettings) -> int:
    packed = pack(source, out, shorter_side=settings.shorter_side, quality=settings.quality, encoding=settings.encoding)
    return sum(path.stat().st_size for path, _ in packed)


def _tried(source: Path, most: int) -> list[Estimate]:
    return estimate(draw_sample(list_folder(source), most=most), WAYS, CUT, seconds=0.03)


def test_a_sample_of_all_is_what_packing_gives_to_the_byte(photos: Path, tmp_path: Path) -> None:
    for number, way in enumerate(_tried(photos, most=1000)):
        assert round(way.num_bytes) == _packed_bytes(photos, tmp_path / f"{number}", way.settings)
        assert way.error == 0
        assert way.images_per_cpu_second is not None and way.images_per_cpu_second > 0
        assert way.pack_seconds > 0 and way.left_out == 0


@pytest.mark.slow
def test_a_third_of_the_images_comes_close_and_says_how_close(photos: Path, tmp_path: Path) -> None:
    for number, way in enumerate(_tried(photos, most=40)):
        actual = _packed_bytes(photos, tmp_path / f"{number}", way.settings)
        assert abs(way.num_bytes - actual) < 4 * way.error + 0.002 * actual
        assert way.error < 0.1 * actual


def test_what_cannot_be_used_is_counted_and_takes_no_bytes(photos: Path) -> None:
    whole = _tried(photos, most=1000)[0]
    for path in sorted(photos.rglob("*.jpg"))[::10]:
        path.write_bytes(path.read_bytes()[:300])
    cut_short = _tried(photos, most=1000)[0]
    assert cut_short.left_out == 12
    assert cut_short.num_bytes < whole.num_bytes


def test_a_source_without_a_sound_image_is_refused(photos: Path) -> None:
    for path in photos.rglob("*.jpg"):
        path.write_bytes(b"nothing")
    with pytest.raises(DataError, match="none of 120 images can be used"):
        _tried(photos, most=1000)


def test_the_ways_change_one_thing_at_a_time(photos: Path) -> None:
    shorter, largest = measure_sides(draw_sample(list_folder(photos)))
    assert 80 <= shorter < largest <= 338
    large = alternatives(PackSettings(), shorter=500, largest=800)
    assert large[0] == PackSettings()
    assert [(way.shorter_side, way.quality, way.encoding, way.restart, way.subsampling) for way in large[1:7]] == [
        (256, 95, "auto", 4, "420"),
        (384, 95, "auto", 4, "420"),
        (256, 85, "auto", 4, "420"),
        (256, 95, "auto", 0, "420"),
        (256, 95, "auto", 4, "444"),
        (256, 95, "raw", 4, "420"),
    ]
    assert [(way.shorter_side, way.mark_kept) for way in large[7:]] == [(None, True)] * (native is not None)
    assert [way.encoding for way in alternatives(PackSettings(), shorter=32, largest=32)] == ["auto", "jpg", "raw"]
    auto = PackSettings(subsampling="auto")
    assert [way.subsampling for way in alternatives(auto, shorter=500, largest=800)[1:7]] == [
        *["auto"] * 4, "420", "420",
    ]  # fmt: skip
    assert {way.subsampling for way in alternatives(PackSettings(encoding="webp"), shorter=500, largest=800)} == {"420"}
    assert {way.subsampling for way in alternatives(PackSettings(grey=True), shorter=500, largest=800)} == {"420"}


def test_regression_beats_the_mean_where_large_files_stay_large() -> None:
    random = np.random.default_rng(0)
    known = random.lognormal(10, 1, 10_000)
    values = 0.5 * known + random.normal(0, 100, len(known))
    some = random.choice(len(known), 200, replace=False)
    estimated, error = regress(values[some], known[some], float(known.mean()), len(known))
    assert abs(estimated - values.sum()) < 3 * error
    assert error < 0.1 * values[some].std() / np.sqrt(200) * len(known)
