"""What is stored of one file: its own bytes where they will do, else the right pixels in the right format."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from tests.data.packing.pictures import picture

from steadytrain.data.images.decode import BadImageError
from steadytrain.data.images.encode import PackedImage, PackSettings, pack_bytes
from steadytrain.data.images.statistics import PixelCount
from steadytrain.data.packing.portions import pack_file
from steadytrain.errors import DataError


def _encode(image: Image.Image, name: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, name, **options)
    return file.getvalue()


def _pixels(data: bytes) -> NDArray[np.uint8]:
    return np.asarray(Image.open(io.BytesIO(data)))


def _pack(image: Image.Image, name: str, **settings: object) -> tuple[bytes, PackedImage]:
    data = _encode(image, name)
    return data, pack_bytes(data, PackSettings(**settings))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "size", "mode", "settings"),
    [
        ("JPEG", (300, 200), "RGB", {}),
        ("JPEG", (300, 200), "L", {}),
        ("JPEG", (20, 20), "RGB", {}),
        ("JPEG", (300, 200), "RGB", {"shorter_side": 200}),
        ("JPEG", (300, 200), "RGB", {"encoding": "jpg", "quality": 10}),
        ("JPEG", (300, 200), "L", {"grey": True}),
        ("PNG", (64, 64), "RGB", {}),
        ("PNG", (9, 5), "L", {}),
        ("PNG", (300, 200), "RGB", {"encoding": "png"}),
        ("WEBP", (300, 200), "RGB", {"encoding": "webp"}),
        ("PPM", (300, 200), "RGB", {"encoding": "raw"}),
        ("PPM", (30, 20), "L", {"encoding": "raw", "grey": True}),
        ("WEBP", (300, 200), "RGB", {"encoding": "pass"}),
        ("PNG", (300, 200), "P", {"encoding": "pass"}),
    ],
)
def test_what_need_not_change_stays_byte_for_byte(
    name: str, size: tuple[int, int], mode: str, settings: dict[str, object]
) -> None:
    data, packed = _pack(picture(1, size, mode), name, **settings)
    assert packed.data == data
    assert packed.kept
    assert (packed.width, packed.height) == size


@pytest.mark.parametrize(
    ("name", "size", "mode", "settings", "becomes"),
    [
        ("PNG", (65, 10), "RGB", {}, "jpg"),
        ("PNG", (64, 64), "P", {}, "png"),
        ("PNG", (64, 64), "RGB", {"encoding": "jpg"}, "jpg"),
        ("BMP", (64, 20), "RGB", {}, "png"),
        ("WEBP", (300, 200), "RGB", {}, "jpg"),
        ("JPEG", (300, 200), "CMYK", {}, "jpg"),
        ("JPEG", (300, 200), "RGB", {"encoding": "png"}, "png"),
        ("JPEG", (300, 200), "RGB", {"grey": True}, "jpg"),
        ("JPEG", (300, 200), "RGB", {"shorter_side": 60}, "jpg"),
        ("JPEG", (300, 300), "RGB", {"shorter_side": 64}, "png"),
        ("JPEG", (300, 200), "RGB", {"encoding": "webp"}, "webp"),
        ("PNG", (300, 200), "RGBA", {"encoding": "webp"}, "webp"),
        ("WEBP", (300, 200), "RGB", {"encoding": "webp", "grey": True}, "webp"),
        ("PNG", (30, 20), "L", {"encoding": "raw"}, "ppm"),
        ("PPM", (300, 200), "1", {"encoding": "raw"}, "ppm"),
    ],
)
def test_what_must_change_gets_the_format_that_its_size_asks_for(
    name: str, size: tuple[int, int], mode: str, settings: dict[str, object], becomes: str
) -> None:
    _, packed = _pack(picture(1, size, mode), name, **settings)
    assert (packed.format, packed.kept) == (becomes, False)
    assert Image.open(io.BytesIO(packed.data)).format == {"jpg": "JPEG"}.get(becomes, becomes.upper())


@pytest.mark.parametrize("encoding", ["auto", "raw"])
@pytest.mark.parametrize("mode", ["L", "RGB", "P", "1", "RGBA"])
def test_small_images_lose_nothing(mode: str, encoding: str) -> None:
    image = picture(3, (32, 32), mode)
    _, packed = _pack(image, "BMP" if mode == "RGBA" else "PNG", encoding=encoding)
    assert np.array_equal(_pixels(packed.data), np.asarray(image.convert("L" if mode in ("L", "1") else "RGB")))


def test_sixteen_bit_files_are_never_stored_as_they_are(data_folder: Path) -> None:
    path = data_folder / "odd-images/jpeg_decoder/tests/reftest/images/grayscale_16x24_sampling2x2.png"
    packed = pack_file(str(path), PackSettings(encoding="png"))
    assert isinstance(packed, PackedImage)
    assert not packed.kept
    assert packed.data[24] == 8
    assert packed.channels == 1


@pytest.mark.parametrize(("size", "side", "becomes"), [((900, 600), 100, (150, 100)), ((99, 500), 100, (99, 500))])
def test_the_shorter_side_is_scaled_down_and_never_up(
    size: tuple[int, int], side: int, becomes: tuple[int, int]
) -> None:
    _, packed = _pack(picture(1, size), "JPEG", shorter_side=side)
    assert (packed.width, packed.height) == becomes
    assert Image.open(io.BytesIO(packed.data)).size == becomes


@pytest.mark.parametrize(("side", "name"), [(256, "JPEG"), (120, "JPEG"), (120, "PNG"), (50, "TIFF")])
def test_a_photograph_made_smaller_is_as_good_as_by_pillow(data_folder: Path, side: int, name: str) -> None:
    image = Image.open(data_folder / "odd-images" / "exif_orientation" / "Landscape_1.jpg")
    packed = pack_bytes(_encode(image, name, quality=95), PackSettings(shorter_side=side, encoding="png"))
    ours = _pixels(packed.data).astype(float)
    theirs = np.asarray(image.resize((packed.width, packed.height), Image.Resampling.BICUBIC), float)
    psnr = 10 * np.log10(255**2 / np.mean((ours - theirs) ** 2))
    assert psnr > 38


def test_turned_photographs_are_stored_upright_and_without_exif(data_folder: Path) -> None:
    for number in (3, 6):
        path = data_folder / "odd-images" / "exif_orientation" / f"Portrait_{number}.jpg"
        packed = pack_file(str(path), PackSettings())
        assert isinstance(packed, PackedImage)
        stored = Image.open(io.BytesIO(packed.data))
        assert stored.size == (packed.width, packed.height) == (1200, 1800)
        assert not stored.getexif()


def test_photographs_that_stay_turned_are_measured_upright(data_folder: Path) -> None:
    path = data_folder / "odd-images" / "exif_orientation" / "Portrait_6.jpg"
    packed = pack_file(str(path), PackSettings(encoding="pass"))
    assert isinstance(packed, PackedImage)
    assert packed.data == path.read_bytes()
    assert (packed.width, packed.height) == (1200, 1800)


@pytest.mark.parametrize("name", ["extraneous-bytes-after-sos", "subtract-with-overflow"])
def test_readable_files_with_something_amiss_are_stored_sound(data_folder: Path, name: str) -> None:
    path = data_folder / "odd-images/jpeg_decoder/tests/crashtest/images" / f"{name}.jpg"
    packed = pack_file(str(path), PackSettings())
    assert isinstance(packed, PackedImage)
    assert not packed.kept
    assert pack_bytes(packed.data, PackSettings()).kept


def test_a_lossless_jpeg_is_stored_as_a_common_one(data_folder: Path) -> None:
    path = data_folder / "odd-images/jpeg_decoder/tests/reftest/images/lossless/1/jpeg_lossless_sel1-8bit.jpg"
    for settings in (PackSettings(), PackSettings(shorter_side=100)):
        packed = pack_file(str(path), settings)
        assert isinstance(packed, PackedImage)
        assert (packed.format, packed.kept, packed.channels) == ("jpg", False, 1)


def test_profiles_and_comments_are_not_stored_anew() -> None:
    data = _encode(picture(1, (20, 20), "P"), "PNG", icc_profile=bytes(5000))
    assert len(pack_bytes(data, PackSettings()).data) < 3000


def test_a_photograph_cut_anywhere_is_refused() -> None:
    data = _encode(picture(1, (160, 120)), "JPEG")
    for size in (len(data) - 3, len(data) * 3 // 4, len(data) // 2, 400):
        with pytest.raises(BadImageError, match=r"cut short|damaged"):
            pack_bytes(data[:size], PackSettings())


def test_an_animation_is_stored_as_its_first_frame() -> None:
    data = _encode(picture(1), "WEBP", save_all=True, append_images=[picture(2)], lossless=True)
    packed = pack_bytes(data, PackSettings(encoding="webp"))
    assert not packed.kept
    assert len(packed.data) < len(data)


@pytest.mark.parametrize(("mode", "header"), [("RGB", b"P6\n40 30\n255\n"), ("L", b"P5\n40 30\n255\n")])
def test_bare_pixels_are_a_ppm_that_any_program_reads(mode: str, header: bytes) -> None:
    _, packed = _pack(picture(1, mode=mode), "PNG", encoding="raw")
    assert packed.data == header + picture(1, mode=mode).tobytes()
    assert np.array_equal(_pixels(packed.data), np.asarray(picture(1, mode=mode)))


@pytest.mark.parametrize(("encoding", "width"), [("jpg", 65_501), ("webp", 16_384)])
def test_what_a_format_cannot_hold_is_refused_and_a_smaller_one_stored(encoding: str, width: int) -> None:
    data = _encode(Image.new("RGB", (width, 1)), "PNG")
    with pytest.raises(BadImageError, match=f"at most {width - 1:,} a side: give --encoding png"):
        pack_bytes(data, PackSettings(encoding=encoding))  # type: ignore[arg-type]
    data = _encode(Image.new("RGB", (width - 1, 1)), "PNG")
    assert pack_bytes(data, PackSettings(encoding=encoding)).width == width - 1  # type: ignore[arg-type]
    assert pack_bytes(data, PackSettings(encoding="png")).kept


def test_webp_costs_fewer_bytes_at_less_quality() -> None:
    sizes = [len(_pack(picture(1, (300, 200)), "PNG", encoding="webp", quality=q)[1].data) for q in (30, 95)]
    assert sizes[0] < sizes[1]


def test_statistics_are_of_the_pixels_stored() -> None:
    count = PixelCount()
    packed = pack_bytes(_encode(picture(1, (200, 100)), "JPEG"), PackSettings(shorter_side=20, grey=True), count)
    assert packed.channels == 1
    assert count.totals()[3, 0] == 40 * 20
    assert not count.totals()[:3].any()


@pytest.mark.parametrize(
    ("prepare", "reason"),
    [
        (lambda path: path.write_bytes(b""), "empty: 0 bytes"),
        (lambda path: path.symlink_to("nowhere"), "a broken link"),
        (lambda path: path.mkdir(), "a folder, not a file"),
        (lambda path: None, "no such file or directory"),
    ],
)
def test_reasons_are_short_and_in_words(tmp_path: Path, prepare: Callable[[Path], object], reason: str) -> None:
    prepare(tmp_path / "a.jpg")
    assert pack_file(str(tmp_path / "a.jpg"), PackSettings()) == reason


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quality": 0}, "--quality is 0; it must be from 1 to 100"),
        ({"shorter_side": 0}, "--shorter-side is 0"),
        ({"encoding": "jpeg"}, "--encoding is 'jpeg'; .* Did you mean jpg"),
        ({"encoding": "pass", "shorter_side": 9}, "--shorter-side would change them"),
        ({"encoding": "pass", "grey": True}, "--grey would change them"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(DataError, match=message):
        PackSettings(**settings)  # type: ignore[arg-type]
