"""Odd images become plain ones by the stated rule; hostile ones are refused."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps
from tests.data.packing.odd_files import SIZE, Tags, banded, of_bits, png, tiff, turned_by
from tests.data.packing.pictures import picture

from steadytrain.data.checking.sources import examine_source
from steadytrain.data.images.decode import (
    BadImageError,
    complete_jpeg,
    decode,
    flatten,
    is_common_jpeg,
    lost_in,
    orientation,
    read_header,
    to_pixels,
    turn,
)
from steadytrain.data.images.encode import PackSettings, pack_bytes
from steadytrain.data.images.look import look_at
from steadytrain.data.loader.decode import Scratch, probe
from steadytrain.data.loader.decode import pixels as pixels_of
from steadytrain.data.packing.pack import pack
from steadytrain.data.sources.unpacked import upright


def _encode(image: Image.Image, name: str = "PNG", **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, name, **options)
    return file.getvalue()


def _pixel(image: Image.Image) -> object:
    return flatten(image).mode, flatten(image).getpixel((0, 0))


def test_transparency_is_laid_over_white() -> None:
    assert _pixel(Image.new("RGBA", (1, 1), (0, 0, 0, 0))) == ("RGB", (255, 255, 255))
    assert _pixel(Image.new("RGBA", (1, 1), (0, 0, 0, 128))) == ("RGB", (127, 127, 127))
    assert _pixel(Image.new("LA", (1, 1), (10, 255))) == ("L", 10)
    assert _pixel(Image.new("LA", (1, 1), (10, 0))) == ("L", 255)


@pytest.mark.parametrize("mode", ["L", "RGB", "P"])
def test_a_colour_that_stands_for_transparent_is_white(mode: str) -> None:
    data = _encode(Image.new(mode, (2, 2), 0), transparency=(0, 0, 0) if mode == "RGB" else 0)
    assert np.asarray(decode(data)).min() == 255


@pytest.mark.parametrize(("colour", "key"), [(0, (1000,)), (2, (1000, 2000, 3000))])
def test_a_colour_of_16_bits_that_stands_for_transparent_is_white(colour: int, key: tuple[int, ...]) -> None:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    pixels = struct.pack(f">{2 * len(key)}H", *key, *(30000 for _ in key))
    chunks = [
        chunk(b"IHDR", struct.pack(">IIBBBBB", 2, 1, 16, colour, 0, 0, 0)),
        chunk(b"tRNS", struct.pack(f">{len(key)}H", *key)),
        chunk(b"IDAT", zlib.compress(b"\0" + pixels)),
        chunk(b"IEND", b""),
    ]
    image = np.asarray(decode(b"\x89PNG\r\n\x1a\n" + b"".join(chunks)))
    assert image.reshape(2, -1).tolist() == [[255] * len(key), [117] * len(key)]


def test_bits_and_palettes() -> None:
    assert _pixel(Image.new("1", (1, 1), 1)) == ("L", 255)
    palette = Image.new("P", (1, 1), 1)
    palette.putpalette([0, 0, 0, 10, 20, 30])
    assert _pixel(palette) == ("RGB", (10, 20, 30))


@pytest.mark.parametrize(("value", "becomes"), [(0, 0), (128, 0), (129, 1), (256, 1), (65535, 255), (32768, 128)])
def test_sixteen_bits_of_grey_are_divided_by_257(value: int, becomes: int) -> None:
    assert np.asarray(decode(_encode(Image.new("I;16", (1, 1), value)))).item() == becomes
    assert _pixel(Image.new("I", (1, 1), value)) == ("L", becomes)


@pytest.mark.parametrize("bits", [9, 10, 12, 14, 15])
@pytest.mark.parametrize("colour", [0, 2])
def test_the_bits_that_a_png_states_are_its_range(bits: int, colour: int) -> None:
    full = np.asarray(picture(1, SIZE, "RGB" if colour else "L")).astype(int)
    pixels = np.asarray(decode(of_bits(bits, states=True, colour=colour))).astype(int)
    assert pixels.shape == full.shape and np.abs(pixels - full).max() <= 1
    upper = (np.asarray(picture(1, SIZE, "RGB" if colour else "L")).astype(">u2") * 257).astype(">u2") >> (16 - bits)
    shifted = png(
        *SIZE, bits=16, colour=colour, pixels=(upper << (16 - bits)).astype(">u2").tobytes(), states=bytes([bits] * 3)
    )
    assert np.abs(np.asarray(decode(shifted)).astype(int) - full).max() <= 1  # as the specification asks for


def test_how_opaque_a_png_of_12_bits_is_stays() -> None:
    values = np.full((8, 8, 4), 4095, ">u2")
    values[..., 1:3] = 0
    for opaque in (4095, 65535):
        values[..., 3] = opaque
        data = png(8, 8, bits=16, colour=6, pixels=values.tobytes(), states=bytes([12] * 4))
        assert decode(data).getpixel((0, 0)) == (255, 0, 0)


@pytest.mark.parametrize(
    "tags",
    [
        {281: (3, [4095])},
        {270: (2, b'<OME><Image><Pixels SignificantBits="12" Type="uint16"/></Image></OME>\0')},
    ],
    ids=["largest value", "OME"],
)
def test_the_range_that_a_tiff_states_is_its_range(tags: Tags) -> None:
    full = np.asarray(picture(1, SIZE, "L"))
    grey = (full.astype(np.uint32) * 4095 // 255).astype("<u2")
    one = {258: (3, [16]), 262: (3, [1]), 277: (3, [1])}
    stated = tiff({**one, **tags}, pixels=grey.tobytes())
    assert np.abs(np.asarray(decode(stated)).astype(int) - full).max() <= 1
    silent = tiff({**one, 281: (3, [4000])}, pixels=grey.tobytes())  # the largest of this image, perhaps
    assert np.asarray(decode(silent)).max() <= 16


@pytest.mark.parametrize("colour", [0, 2])
def test_packing_says_once_that_16_bits_hold_12(colour: int, tmp_path: Path) -> None:
    for number in range(4):
        path = tmp_path / "photos" / str(number % 2) / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(of_bits(12, states=False, colour=colour))
    remarks: list[str] = []
    pack(tmp_path / "photos", tmp_path / "out", say=remarks.append)
    depth, remark = remarks
    assert depth == "4 images have 16 bits a channel, of which 8 are kept"
    assert remark.startswith("4 images of 16 bits have no value above") and "-evaluate multiply 16 FILES" in remark
    report = examine_source(tmp_path / "photos", workers=0)
    assert [finding.detail for finding in report.findings.of("few-levels")] == [remark]
    _encode_16 = np.asarray(picture(1, SIZE, "RGB" if colour else "L")).astype(">u2") * 257
    (tmp_path / "photos/0/4.png").write_bytes(
        png(*SIZE, bits=16, colour=colour, pixels=_encode_16.astype(">u2").tobytes())
    )
    pack(tmp_path / "photos", tmp_path / "again", say=remarks.append)
    depth, remark = remarks[2:]
    assert depth == "5 images have 16 bits a channel, of which 8 are kept"
    assert remark.startswith("4 of 5 images of 16 bits are nearly black: no value above") and "multiply" not in remark
    whole, *named = examine_source(tmp_path / "photos", workers=0).findings.of("few-levels")
    assert whole.detail == remark and whole.name is None
    assert sorted(Path(finding.name or "").stem for finding in named) == ["0", "1", "2", "3"]


def test_a_black_image_of_16_bits_among_bright_ones_is_no_fault(tmp_path: Path) -> None:
    """As a blank slice of a volume."""
    for number, value in enumerate((60_000, 50_000, 40_000, 0)):
        path = tmp_path / "photos" / str(number % 2) / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.full((SIZE[1], SIZE[0]), value, ">u2")
        path.write_bytes(png(*SIZE, bits=16, colour=0, pixels=pixels.tobytes()))
    assert examine_source(tmp_path / "photos", workers=0).findings.of("few-levels") == []


@pytest.mark.parametrize(("bands", "extra"), [(4, ()), (4, (0,)), (5, (0, 0))])
def test_bands_that_are_no_colour_are_dropped_and_said(bands: int, extra: tuple[int, ...], tmp_path: Path) -> None:
    data = banded(bands, *extra)
    assert (np.asarray(decode(data)) == np.asarray(picture(1, SIZE))).all(), "not mixed into a colour"
    for number in range(4):
        path = tmp_path / "photos" / str(number % 2) / f"{number}.tif"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    remarks: list[str] = []
    pack(tmp_path / "photos", tmp_path / "out", say=remarks.append)
    assert remarks == [f"4 images have {bands} bands, of which the first 3 are kept"]
    findings = examine_source(tmp_path / "photos", workers=0).findings
    assert findings.counts["bands"] == 4 and not findings.has("transparency")


def test_a_band_that_is_declared_transparency_is_laid_over_white() -> None:
    assert not lost_in(banded(4, 2))
    mixed, colours = (np.asarray(image).astype(int) for image in (decode(banded(4, 2)), picture(1, SIZE)))
    assert np.abs(mixed - (colours * 77 + 255 * 178) / 255).max() <= 1


@pytest.mark.parametrize(
    ("options", "is_ink"),
    [
        ({}, False),
        ({"tiffinfo": {332: 2}}, False),
        ({"icc_profile": bytes(16) + b"RGB " + bytes(108)}, False),
        ({"tiffinfo": {332: 1}}, True),
        ({"icc_profile": bytes(16) + b"CMYK" + bytes(108)}, True),
    ],
)
def test_four_bands_are_inks_only_where_the_tiff_says_so(options: dict[str, Any], is_ink: bool) -> None:
    data = _encode(picture(1, SIZE, "CMYK"), "TIFF", **options)
    if is_ink:
        assert decode(data).mode == "RGB"
    else:
        with pytest.raises(BadImageError, match=r"four bands stored as CMYK.*convert it to RGB"):
            decode(data)
    assert decode(_encode(picture(1, SIZE, "CMYK"), "JPEG")).mode == "RGB"


@pytest.mark.parametrize(
    ("data", "bits"),
    [
        (_encode(Image.new("I;16", (4, 4)), "PNG"), 16),
        (of_bits(12, states=True), 12),
        (b"P6\n2 2\n65535\n" + bytes(24), 16),
        (b"P5\n# by hand\n2 2\n4095\n" + bytes(8), 16),
        (b"P6\n2 2\n255\n" + bytes(12), 8),
        (_encode(Image.new("RGB", (4, 4)), "PNG"), 8),
        (_encode(Image.new("RGB", (4, 4)), "JPEG"), 8),
        (b"no image", 8),
    ],
)
def test_bits_beyond_eight_are_told(data: bytes, bits: int) -> None:
    assert lost_in(data) == ({"sixteen-bit": f"{bits} bits a channel, of which 8 are kept"} if bits > 8 else {})


def test_values_of_unknown_range_are_refused() -> None:
    with pytest.raises(BadImageError, match="grey values from -1 to -1"):
        flatten(Image.new("I", (1, 1), -1))
    with pytest.raises(BadImageError, match="32-bit float"):
        decode(_encode(Image.new("F", (1, 1), 0.5), "TIFF"))


@pytest.mark.parametrize("name", ["jpg-cmyk-1", "jpg-cmyk-2"])
def test_cmyk_photographs_have_the_colours_that_browsers_show(data_folder: Path, name: str) -> None:
    folder = data_folder / "odd-images" / "jpeg_decoder" / "tests" / "reftest" / "images" / "mozilla"
    ours = np.asarray(decode((folder / f"{name}.jpg").read_bytes()), np.int32)
    theirs = np.asarray(Image.open(folder / f"{name}.png").convert("RGB"), np.int32)
    assert np.abs(ours - theirs).mean() < 4


@pytest.mark.parametrize("kind", ["Landscape", "Portrait"])
def test_photographs_of_every_orientation_stand_upright(data_folder: Path, kind: str) -> None:
    folder = data_folder / "odd-images" / "exif_orientation"
    upright = np.asarray(decode((folder / f"{kind}_1.jpg").read_bytes()), np.int32)
    for number in range(2, 9):
        image = read_header((folder / f"{kind}_{number}.jpg").read_bytes())
        assert orientation(image) == number
        turned = turn(np.asarray(image), number).astype(np.int32)
        assert turned.shape == upright.shape
        # Each file has its number drawn in; all the rest is the same picture, compressed anew.
        assert np.median(np.abs(turned - upright)) <= 3


@pytest.mark.parametrize("number", range(1, 9))
def test_pixels_turn_as_pillow_turns_images(number: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = number
    data = _encode(picture(1, (7, 4)), exif=exif)
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    assert upright is not None
    assert np.array_equal(turn(np.asarray(picture(1, (7, 4))), number), np.asarray(upright))
    assert np.array_equal(np.asarray(decode(data)), np.asarray(upright))


@pytest.mark.parametrize("factor", [1, 2, 3, 7])
@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "RGBA", "LA", "CMYK", "YCbCr", "LAB", "I;16", "I", "key"])
def test_strips_of_a_large_image_have_the_pixels_of_the_whole(
    mode: str, factor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = np.random.default_rng(0).integers(0, 256, (45, 31, 4), dtype=np.uint8)
    if mode in ("I;16", "I"):
        image = Image.fromarray(values[..., 0].astype(np.uint16 if mode == "I;16" else np.int32) * 257)
    elif mode in ("LAB", "YCbCr"):
        image = Image.frombytes(mode, (31, 45), values[..., :3].tobytes())
    else:
        image = Image.fromarray(values).convert("P" if mode == "key" else mode)
        if mode == "key":
            image.info["transparency"] = 0
    flat = flatten(image)
    expected = np.asarray(flat.reduce(factor) if factor > 1 else flat)
    for strip in (1, 31 * 8, 31 * 20, 31 * 45, 10**6):
        monkeypatch.setattr("steadytrain.data.images.decode.STRIP_PIXELS", strip)
        pixels = to_pixels(image, factor=factor)
        assert pixels.shape == expected.shape and np.array_equal(pixels, expected)


def test_the_range_of_a_large_image_is_that_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steadytrain.data.images.decode.STRIP_PIXELS", 1)
    with pytest.raises(BadImageError, match="grey values from -3 to 70000: only 0 to 65535"):
        to_pixels(Image.fromarray(np.array([[5], [70_000], [-3]], np.int32)))


@pytest.mark.parametrize("name", ["PNG", "WEBP", "TIFF", "JPEG"])
def test_orientation_counts_in_every_format(name: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    image = decode(_encode(picture(1, (40, 30)), name, exif=exif))
    assert image.size == (30, 40)


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
@pytest.mark.parametrize("number", range(1, 9))
@pytest.mark.parametrize("mark", ["JPEG", "PNG", "WEBP", "tEXt", "zTXt"])
def test_orientation_counts_wherever_pillow_finds_it(mark: str, number: int) -> None:
    data = turned_by(mark, number)
    wanted = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    for pixels in (pack_bytes(data, PackSettings(encoding="png")).data, upright(data)):
        assert np.abs(np.asarray(decode(pixels)).astype(int) - np.asarray(wanted)).max() <= 1


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"restart_marker_blocks": 1}, {"subsampling": 0}])
@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("missing", [1, 2])
def test_a_jpeg_that_lacks_its_end_alone_is_used(missing: int, mode: str, options: dict[str, int]) -> None:
    whole = _encode(picture(1, SIZE, mode), "JPEG", **options)
    assert whole.endswith(b"\xff\xd9")
    wanted = np.asarray(Image.open(io.BytesIO(whole)))
    data = whole[:-missing]
    packed = pack_bytes(data, PackSettings(encoding="png"))
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(packed.data))), wanted)
    read = pixels_of(probe(data), 1 if mode == "L" else 3, Scratch())
    assert np.array_equal(read.squeeze(), wanted)
    assert look_at(data).odd == (("odd-jpeg", "its last two bytes are missing"),)
    for cut in (3, 4, 11, len(data) // 2):
        with pytest.raises(BadImageError, match=r"cut short|missing"):
            pack_bytes(whole[:-cut], PackSettings())
        with pytest.raises(BadImageError):
            pixels_of(probe(whole[:-cut]), 3, Scratch())


def test_a_progressive_jpeg_that_lacks_a_scan_is_no_whole_one() -> None:
    data = _encode(picture(1, SIZE), "JPEG", progressive=True)
    last = data.rindex(b"\xff\xda")
    assert complete_jpeg(data[:-2]) == data and complete_jpeg(data[:last]) is None
    with pytest.raises(BadImageError, match="cut short"):
        pack_bytes(data[:last], PackSettings())


def test_damaged_exif_does_not_cost_the_image() -> None:
    data = _encode(picture(1), "JPEG", exif=b"Exif\0\0II*\0\xff\xff\xff\xff" + bytes(20))
    assert decode(data).size == (40, 30)


def _png_that_claims(width: int, height: int) -> bytes:
    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(99))) + chunk(b"IEND", b"")


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("size", [(10_001, 10_000), (65_000, 65_000)])
def test_a_bomb_is_refused_by_its_header(size: tuple[int, int]) -> None:
    with pytest.raises(BadImageError, match="more than 100,000,000"):
        read_header(_png_that_claims(*size))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty: 0 bytes"),
        (b"\n <!DOCTYPE html><title>404", "an HTML page, not an image"),
        (b"version https://git-lfs.github.com/spec/v1\noid", "a Git LFS pointer, not the image"),
        (b"plain text", "text, not an image"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "text, not an image"),
        (_encode(picture(1))[:60], "cut short|damaged"),
        (_encode(picture(1))[:-400], "cut short|damaged"),
        (_encode(picture(1), "JPEG")[:300], "cut short|damaged"),
        (_encode(picture(1), "JPEG")[:3], "cut short"),
    ],
)
def test_file_that_is_no_image_is_refused_with_a_reason(data: bytes, reason: str) -> None:
    with pytest.raises(BadImageError, match=reason):
        decode(data)


def test_the_reason_is_the_same_in_every_process() -> None:
    with pytest.raises(BadImageError) as raised:
        read_header(b"\xff\xd8\xff nonsense")
    assert "0x" not in str(raised.value)


def test_hostile_files_never_raise_anything_else(data_folder: Path) -> None:
    folder = data_folder / "odd-images" / "jpeg_decoder" / "tests" / "crashtest"
    paths = sorted(folder.rglob("*.jpg"))
    assert len(paths) > 100
    for path in paths:
        try:
            assert decode(path.read_bytes()).mode in ("L", "RGB")
        except BadImageError as error:
            assert str(error), path


def test_only_the_common_kinds_of_jpeg_are(data_folder: Path) -> None:
    folder = data_folder / "odd-images" / "jpeg_decoder" / "tests" / "reftest" / "images"
    assert is_common_jpeg((folder / "rgb.jpg").read_bytes())
    assert is_common_jpeg((folder / "progressive3.jpg").read_bytes())
    assert not is_common_jpeg((folder / "lossless" / "1" / "jpeg_lossless_sel1-8bit.jpg").read_bytes())
    assert not is_common_jpeg(b"\xff\xd8" + b"\xff" * 100)
    assert not is_common_jpeg(b"\xff\xd8")


@pytest.mark.parametrize("kind", [b"zTXt", b"iTXt", b"tEXt", b"iCCP"])
@pytest.mark.parametrize("is_behind", [False, True])
def test_png_with_long_texts_is_kept(kind: bytes, is_behind: bool) -> None:
    """Pillow refuses to inflate more than 1 MB of a text, or to hold more than 64 MB; none of it is needed."""
    deflated = zlib.compress(bytes(3 << 20))
    content = {
        b"zTXt": b"Raw profile type xmp\0\0" + deflated,
        b"iTXt": b"XML:com.adobe.xmp\0\1\0en\0x\0" + deflated,
        b"tEXt": b"Comment\0" + b"x" * (65 << 20),
        b"iCCP": b"profile\0\0" + deflated,
    }[kind]
    text = len(content).to_bytes(4, "big") + kind + content + zlib.crc32(kind + content).to_bytes(4, "big")
    turned = Image.Exif()
    turned[0x0112] = 6
    file = io.BytesIO()
    Image.new("RGB", (6, 4), (9, 99, 199)).save(file, "PNG", exif=turned)
    data = file.getvalue()
    at = data.rindex(b"IEND") - 4 if is_behind else 33  # behind the header
    with_text = data[:at] + text + data[at:]
    with pytest.raises(ValueError, match=r"Decompressed data too large|Too much memory"):
        Image.open(io.BytesIO(with_text)).load()
    decoded = decode(with_text)
    assert (decoded.size, decoded.getpixel((0, 0))) == ((4, 6), (9, 99, 199))


def test_a_damaged_tiff_is_refused_without_a_line_of_its_library(capfd: pytest.CaptureFixture[str]) -> None:
    data = bytearray(_encode(Image.effect_noise((64, 64), 50), "TIFF", compression="tiff_lzw"))
    data[20:400] = b"\xff" * 380
    with pytest.raises(BadImageError):
        decode(bytes(data))
    assert capfd.readouterr() == ("", "")
