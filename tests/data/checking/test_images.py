"""One image: what is wrong with it, what is odd about it, as packing sees it."""

from __future__ import annotations

import io
import zlib
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from tests.data.packing.pictures import picture

from steadytrain.data.checking.copies import shared
from steadytrain.data.images.decode import BadImageError
from steadytrain.data.images.encode import PackSettings, pack_bytes
from steadytrain.data.images.look import Fingerprints, duplicates, fingerprint, look_at


def _bytes(image: Image.Image, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def _bomb() -> bytes:
    """A small PNG whose header tells of 400 million pixels."""
    header = b"IHDR" + (20_000).to_bytes(4, "big") * 2 + PNG[24:29]
    return PNG[:12] + header + zlib.crc32(header).to_bytes(4, "big") + PNG[33:]


JPEG, PNG = _bytes(picture(1), "JPEG"), _bytes(picture(1), "PNG")
SIXTEEN = Image.fromarray(np.arange(1200, dtype=np.uint16).reshape(30, 40) * 50)

FAULTS = {
    "cut short": (JPEG[:-200], "truncated-image", ""),
    "png cut short": (PNG[:-200], "truncated-image", ""),
    "damaged": (PNG[:60] + bytes(60) + PNG[120:], "damaged-image", "damaged"),
    "header only": (JPEG[:12], "truncated-image", ""),
    "header damaged": (PNG[:20] + bytes(4) + PNG[24:], "damaged-image", "damaged header"),
    "empty": (b"", "no-image", "empty: 0 bytes"),
    "html": (b"<!doctype html><title>404", "no-image", "an HTML page"),
    "zip": (b"PK\x03\x04" + bytes(60), "no-image", "a zip archive"),
    "heic": (b"\0\0\0\x18ftypheic" + bytes(60), "unusable-image", "a HEIC image, which is not read here"),
    "pixels": (
        bytes(range(1, 193)) * 16,
        "no-image",
        "3,072 bytes of no known format",
    ),
    "float": (_bytes(Image.new("F", (9, 9), 0.5), "TIFF"), "unusable-image", "32-bit float pixels"),
    "bomb": (_bomb(), "unusable-image", "400,000,000 pixels, more than 100,000,000"),
}
ODD = {
    "cmyk": _bytes(picture(1, mode="CMYK"), "JPEG"),
    "palette": _bytes(picture(1).quantize(9), "PNG"),
    "one-bit": _bytes(picture(1, mode="1"), "PNG"),
    "sixteen-bit": _bytes(SIXTEEN, "PNG"),
    "transparency": _bytes(picture(1, mode="RGBA"), "PNG"),
    "frames": _bytes(picture(1), "GIF", save_all=True, append_images=[picture(2)]),
    "long": _bytes(picture(1, (4000, 1)), "PNG"),
    "odd-jpeg": JPEG[:-2] + bytes(40) + JPEG[-2:],
}


@pytest.mark.parametrize("name", FAULTS)
def test_unusable_image_is_reported_with_its_reason(name: str) -> None:
    data, kind, fault = FAULTS[name]
    seen = look_at(data)
    assert (seen.fault, seen.detail[: len(fault)]) == (kind, fault)


@pytest.mark.parametrize("kind", ODD)
def test_odd_image_is_reported_and_still_sound(kind: str) -> None:
    seen = look_at(ODD[kind])
    assert not seen.fault
    assert kind in [finding for finding, _ in seen.odd]


def test_an_ordinary_image_is_not_odd_and_measured_upright() -> None:
    exif = Image.Exif()
    exif[0x0112] = 8
    assert look_at(JPEG)[3:7] == ("jpg", 40, 30, ())
    assert look_at(_bytes(picture(1), "JPEG", exif=exif))[3:7] == ("jpg", 30, 40, (("orientation", "orientation 8"),))


def test_the_same_pixels_have_one_fingerprint_in_every_file() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    decoded = Image.open(io.BytesIO(JPEG))
    on_its_side = _bytes(decoded.transpose(Image.Transpose.ROTATE_90), "PNG", exif=exif)
    same = [JPEG, JPEG + b"xx", _bytes(decoded, "PNG"), _bytes(decoded, "BMP"), on_its_side]
    assert {look_at(data).fingerprint for data in same} == {fingerprint(decoded)}
    grey = decoded.convert("L")
    assert look_at(_bytes(grey, "PNG")).fingerprint == look_at(_bytes(grey.convert("RGB"), "PNG")).fingerprint
    others = {look_at(data).fingerprint for data in (PNG, _bytes(decoded, "JPEG", quality=95), _bytes(grey, "PNG"))}
    assert len(others - {fingerprint(decoded)}) == 3


def _packing_says(data: bytes) -> str:
    try:
        pack_bytes(data, PackSettings())
    except BadImageError as error:
        return str(error)
    return ""


def _told_alike(data: bytes) -> bool:
    """Whether the fault and its detail say what packing says, perhaps in part by the fault's name."""
    seen, reason = look_at(data), _packing_says(data)
    if seen.fault == "truncated-image":
        return reason == "cut short"
    if "bytes of no known format" in seen.detail:
        return reason == "not an image of a known format"
    return seen.detail == reason.removesuffix(", not an image")


@pytest.mark.parametrize("name", FAULTS)
def test_the_reason_is_the_one_that_packing_gives(name: str) -> None:
    assert _told_alike(FAULTS[name][0])


@pytest.mark.slow
def test_check_and_packing_refuse_the_same_strange_images_for_the_same_reasons(data_folder: Path) -> None:
    paths = sorted(path for path in (data_folder / "odd-images").rglob("*") if path.is_file())
    assert len(paths) > 200
    for path in paths:
        data = path.read_bytes()
        assert _told_alike(data), path


@given(at=st.integers(0, len(PNG) - 1), value=st.integers(0, 255), kind=st.sampled_from([JPEG, PNG, *ODD.values()]))
def test_no_damage_crashes_it(at: int, value: int, kind: bytes) -> None:
    at %= len(kind)
    look_at(kind[:at] + bytes([value]) + kind[at + 1 :])
    look_at(kind[:at])


IMAGES = st.lists(st.integers(0, 9), max_size=40)


def _prints(images: list[int]) -> Fingerprints:
    # Half of each is the same for many: no one word of a fingerprint may decide; zeros are no image.
    return np.array([[1 + image % 3] * 8 + [image // 3] * 8 for image in images], np.uint8).reshape(-1, 16)


@given(IMAGES)
def test_groups_are_those_of_equal_images_in_their_order(images: list[int]) -> None:
    places = defaultdict(list)
    for number, image in enumerate(images):
        places[image].append(number)
    wanted = sorted(group for group in places.values() if len(group) > 1)
    assert list(duplicates(_prints(images))) == wanted


@given(IMAGES, IMAGES)
def test_each_shared_image_of_the_second_set_is_reported_once(ours: list[int], theirs: list[int]) -> None:
    wanted = [(ours.index(image), number) for number, image in enumerate(theirs) if image in ours]
    assert shared(_prints(ours), _prints(theirs)) == wanted
