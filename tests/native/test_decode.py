"""Parts of JPEGs, decoded: the pixels of simplejpeg and of Pillow, or nothing at all; not a byte beside the part."""

from __future__ import annotations

import io
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import simplejpeg
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image
from tests.native.test_restart import picture

jpeg = pytest.importorskip("steadytrain.native", reason="the native decoder is not built: no cargo")
pytestmark = pytest.mark.skipif(not jpeg.DECODES, reason="this processor has no AVX2")

Pixels = NDArray[np.uint8]
Box = tuple[int, int, int, int]
Channels = Literal[1, 3]
COLOURS = {1: "GRAY", 3: "RGB"}


def part(data: bytes, box: Box, *, channels: Channels = 3, gap: int = 5, size: int | None = None) -> Pixels | None:
    """A part, decoded into the middle of memory whose other bytes must stay as they are; None: not to be had."""
    height, row = max(box[3] - box[1], 0), max(box[2] - box[0], 0) * channels
    memory = np.full((height + 2, row + gap), 0xA5, np.uint8)
    source = np.frombuffer(data, np.uint8)
    pixels = jpeg.decode(
        memory.ctypes.data + row + gap,
        row + gap,
        source.ctypes.data,
        len(data) if size is None else size,
        box,
        channels=channels,
    )
    inner = memory[1:-1, :row].copy()
    memory[1:-1, :row] = 0xA5
    assert (memory == 0xA5).all(), "it wrote beside the part"
    return inner.reshape(height, -1, channels) if pixels else None


def whole(data: bytes, channels: Channels = 3, *, strict: bool = True) -> Pixels:
    array: Pixels = simplejpeg.decode_jpeg(data, COLOURS[channels], strict=strict)
    return array


def whatever(data: bytes) -> Pixels:
    """What libjpeg-turbo makes of a file, be it damaged."""
    try:
        return whole(data, strict=False)
    except ValueError:  # not for its pixels: a damaged profile, say
        return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


def cropped(pixels: Pixels, box: Box) -> Pixels:
    left, top, right, bottom = box
    return pixels[top:bottom, left:right]


def is_part_of(pixels: Pixels, data: bytes, box: Box, **options: Any) -> bool:
    """Whether a part can be had, and has these pixels."""
    decoded = part(data, box, **options)
    return decoded is not None and np.array_equal(decoded, cropped(pixels, box))


def boxes(draw: random.Random, size: tuple[int, ...], n: int) -> list[Box]:
    """Some boxes, those of all sizes as likely as each other, and the whole image."""
    height, width = size[:2]
    boxes: list[Box] = [(0, 0, width, height)]
    for _ in range(n):
        left, top = draw.randrange(width), draw.randrange(height)
        boxes.append((left, top, draw.randint(left + 1, width), draw.randint(top + 1, height)))
    return boxes


def segment(marker: int, body: bytes) -> bytes:
    return bytes((0xFF, marker)) + (len(body) + 2).to_bytes(2, "big") + body


def inserted(data: bytes, *segments: bytes) -> bytes:
    """Right after the file's first marker and the JFIF segment."""
    return data[:20] + b"".join(segments) + data[20:]


def patched(data: bytes, find: bytes, at: int, *put: int) -> bytes:
    """Bytes put in ``at`` places behind the first ``find``."""
    begin = data.index(find) + at
    return data[:begin] + bytes(put) + data[begin + len(put) :]


@st.composite
def cases(draw: st.DrawFn) -> tuple[bytes, Box, Channels]:
    """A JPEG of a kind that is decoded, a part of it, and channels."""
    options: dict[str, Any] = {"quality": draw(st.integers(1, 100)), "optimize": draw(st.booleans())}
    options["restart_marker_blocks"] = draw(st.sampled_from([0, 0, 1, 2, 3, 5, 8, 50]))
    mode = draw(st.sampled_from(["RGB", "RGB", "RGB", "L"]))
    if mode == "RGB":
        options["subsampling"] = draw(st.sampled_from([0, 1, 2]))
    # Chroma of one or two columns is left to a full decoder.
    height = draw(st.integers(1, 90))
    width = draw(st.integers(5 if options.get("subsampling") else 1, 90))
    left, top = draw(st.integers(0, width - 1)), draw(st.integers(0, height - 1))
    box = left, top, draw(st.integers(left + 1, width)), draw(st.integers(top + 1, height))
    data = picture(height, width, seed=draw(st.integers(0, 9)), mode=mode, **options)
    return data, box, draw(st.sampled_from([1, 3, 3]))


@given(cases(), st.sampled_from([0, 1, 200]))
def test_a_part_has_the_pixels_of_a_full_decode(case: tuple[bytes, Box, Channels], gap: int) -> None:
    data, box, channels = case
    assert is_part_of(whole(data, channels), data, box, channels=channels, gap=gap)


@given(cases())
def test_pillow_sees_the_same(case: tuple[bytes, Box, Channels]) -> None:
    data, box, channels = case
    image = Image.open(io.BytesIO(data))
    if channels == 1:
        image.draft("L", image.size)
    expected = np.asarray(image.convert("L" if channels == 1 else "RGB")).reshape(*image.size[::-1], channels)
    assert is_part_of(expected, data, box, channels=channels)


@pytest.mark.parametrize("subsampling", [0, 1, 2])
@pytest.mark.parametrize("restarts", [0, 1, 2, 3, 4, 7, 100])
def test_parts_that_begin_and_end_anywhere(subsampling: int, restarts: int) -> None:
    """Of 3 by 4 MCUs, or twice as many: intervals that divide a row of them, and that do not."""
    data = picture(47, 61, quality=90, subsampling=subsampling, restart_marker_blocks=restarts)
    expected = whole(data)
    for left, right in [(0, 1), (0, 61), (7, 9), (15, 17), (16, 32), (31, 48), (60, 61)]:
        for top, bottom in [(0, 1), (0, 47), (7, 9), (15, 17), (16, 32), (46, 47)]:
            assert is_part_of(expected, data, (left, top, right, bottom))


def steps_of_two_bytes(data: bytes) -> bytes:
    """The same file, its steps told in two bytes each."""
    parts = data.split(b"\xff\xdb")
    tables = [segment(0xDB, bytes((0x10 | p[2],)) + b"".join(bytes((0, b)) for b in p[3:67]) + b"") for p in parts[1:]]
    return parts[0] + b"".join(table + p[67:] for table, p in zip(tables, parts[1:], strict=True))


def adobe(transform: int) -> bytes:
    return segment(0xEE, b"Adobe\0\x64\0\0\0\0" + bytes((transform,)))


PLAIN = picture(60, 70, quality=85, subsampling=2)
STORED_AS_RGB = picture(60, 70, keep_rgb=True)
NO_JFIF = PLAIN[:2] + PLAIN[20:]
WHOLE, NARROW, TALLER = (0, 0, 70, 60), (0, 0, 4, 60), (0, 0, 70, 90)

ODD = {
    "EXIF, a profile and a comment": picture(
        60, 70, exif=b"Exif\0\0" + bytes(30), icc_profile=b"x" * 300, comment=b"!"
    ),
    "a preview in the header": inserted(PLAIN, segment(0xE1, picture(16, 16))),
    "fill bytes before markers": PLAIN.replace(b"\xff\xc0", b"\xff\xff\xff\xc0").replace(b"\xff\xda", b"\xff\xff\xda"),
    "fill bytes before restart markers": picture(60, 70, restart_marker_blocks=4).replace(b"\xff\xd1", b"\xff\xff\xd1"),
    "fill bytes at the end": PLAIN[:-2] + b"\xff\xff\xff\xd9",
    "bytes after the end": PLAIN + b"\xff\xd0 and more",
    "steps of two bytes": steps_of_two_bytes(PLAIN),
    "an extended frame": PLAIN.replace(b"\xff\xc0", b"\xff\xc1"),
    "no JFIF segment": NO_JFIF,
    "YCbCr, says Adobe": NO_JFIF[:2] + adobe(1) + NO_JFIF[2:],
    "YCbCr, as Adobe says last": NO_JFIF[:2] + adobe(0) + adobe(1) + NO_JFIF[2:],
    "YCbCr, as JFIF says against Adobe": inserted(PLAIN, adobe(0)),
    "tables that are told anew": inserted(PLAIN, segment(0xDB, bytes(1) + bytes(range(1, 65)))),
    "grey of several samples": patched(picture(60, 70, mode="L"), b"\xff\xc0", 11, 0x22),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_but_sound_files_are_decoded(name: str) -> None:
    data, draw = ODD[name], random.Random(name)
    expected = whole(data)
    assert all(is_part_of(expected, data, box) for box in boxes(draw, (60, 70), 10))


def several_scans() -> bytes:
    """Three colours one after the other, each of them the same."""
    grey = picture(60, 70, mode="L")
    frame, scan = grey.index(b"\xff\xc0"), grey.index(b"\xff\xda")
    frame_header = b"\x08\0\x3c\0\x46\x03" + b"".join(bytes((name, 0x11, 0)) for name in (1, 2, 3))
    header = grey[:frame] + segment(0xC0, frame_header) + grey[frame + 13 : scan]
    scans = [segment(0xDA, bytes((1, name, 0, 0, 63, 0))) + grey[scan + 10 : -2] for name in (1, 2, 3)]
    return header + b"".join(scans) + b"\xff\xd9"


def by_simplejpeg(subsampling: str) -> bytes:
    pixels = np.ascontiguousarray(np.asarray(Image.open(io.BytesIO(PLAIN)).convert("RGB")))
    data: bytes = simplejpeg.encode_jpeg(pixels, 85, "RGB", subsampling)
    return data


LEFT_ALONE = {
    "empty": b"",
    "two bytes": b"\xff\xd8",
    "no JPEG": b"GIF89a" + bytes(100),
    "progressive": picture(60, 70, progressive=True),
    "CMYK": picture(60, 70, mode="CMYK"),
    "stored as RGB": STORED_AS_RGB,
    "RGB, as Adobe says last": NO_JFIF[:2] + adobe(1) + adobe(0) + NO_JFIF[2:],
    "of a transform that Adobe does not have": NO_JFIF[:2] + adobe(2) + NO_JFIF[2:],
    "4:4:0": by_simplejpeg("440"),
    "4:1:1": by_simplejpeg("411"),
    "chroma of two columns": picture(60, 4, subsampling=2),
    "several scans": several_scans(),
    "12 bits": patched(PLAIN, b"\xff\xc0", 4, 12),
    "arithmetic": PLAIN.replace(b"\xff\xc0", b"\xff\xc9"),
    "height told after the scan": patched(PLAIN, b"\xff\xc0", 5, 0, 0)[:-2] + b"\xff\xdc\0\4\0\x3c\xff\xd9",
    "grey of no samples": patched(picture(60, 70, mode="L"), b"\xff\xc0", 11, 0x20),
    "a step of none": patched(PLAIN, b"\xff\xdb", 5, 0),
    "no steps": PLAIN.replace(b"\xff\xdb", b"\xff\xec"),
    "no tables": PLAIN.replace(b"\xff\xc4", b"\xff\xec"),
    "a table that is full": patched(PLAIN, b"\xff\xc4", 5, 2),
    "no end": PLAIN[:-2],
    "more than there is": PLAIN[:-3] + b"abc\xff\xd9",
    "taller than its pixels": patched(PLAIN, b"\xff\xc0", 5, 0, 90),
}


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_what_is_of_another_kind_or_damaged_is_left_alone(name: str) -> None:
    data, box = LEFT_ALONE[name], TALLER if "taller" in name else NARROW if "two columns" in name else WHOLE
    assert part(data, box) is None and part(data, box, channels=1) is None


@pytest.mark.parametrize(
    "box",
    [
        (0, 0, 71, 60),
        (0, 0, 70, 61),
        (70, 0, 71, 1),
        (0, 60, 1, 61),
        (5, 5, 5, 6),
        (5, 6, 6, 5),
        (-1, 0, 4, 4),
        (0, -1, 4, 4),
        (2**32, 0, 2**32 + 4, 4),
        (0, 2**32, 4, 2**32 + 4),
        (0, 0, 2**31, 2**31),
    ],
)
def test_a_part_outside_the_image_is_none(box: Box) -> None:
    memory = np.zeros(100, np.uint8)
    source = np.frombuffer(PLAIN, np.uint8)
    stride = max(0, 3 * (box[2] - box[0]))
    assert not jpeg.decode(memory.ctypes.data, stride, source.ctypes.data, len(PLAIN), box)
    assert not memory.any()


@pytest.mark.parametrize("stride", [29, 0, -30, 2**63])
def test_rows_that_would_overlap_are_refused(stride: int) -> None:
    memory, source = np.zeros(2000, np.uint8), np.frombuffer(PLAIN, np.uint8)
    assert not jpeg.decode(memory.ctypes.data + 900, stride, source.ctypes.data, len(PLAIN), (0, 0, 10, 10))
    assert not memory.any()


def test_nothing_is_decoded_on_a_processor_that_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jpeg, "DECODES", False)
    assert part(PLAIN, (0, 0, 70, 60)) is None


@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_a_file_cut_short_is_decoded_as_far_as_it_goes(share: float) -> None:
    """It ends too early, and says so: parts above are those of a full decode, parts below are not to be had."""
    data = picture(160, 120, quality=90, subsampling=2)
    scan = data.index(b"\xff\xda")
    cut = data[: scan + int(share * (len(data) - scan))] + b"\xff\xd9"
    expected = whole(data)
    with ThreadPoolExecutor(1) as fresh:  # whose memory has no rest of other files
        seen = list(fresh.map(lambda top: part(cut, (0, top, 120, top + 1)), range(160)))
    rows = [row for row in seen if row is not None]
    assert 0 < len(rows) < 160 * share + 32 and seen[len(rows) :] == [None] * (160 - len(rows))
    assert np.array_equal(np.concatenate(rows), expected[: len(rows)])
    assert part(data, (0, 0, 120, 160)) is not None and part(cut, (0, 0, 120, 160)) is None
    assert all(part(data, (0, 0, 120, 20), size=size) is None for size in (0, 1, scan, scan + 14, len(data) - 1))


@given(st.integers(0, 2**32), st.integers(1, 6), cases())
def test_hostile_bytes_never_make_another_picture(seed: int, num: int, case: tuple[bytes, Box, Channels]) -> None:
    """Damage elsewhere is not noticed. What of the part is made is what libjpeg-turbo makes of it, damage and all."""
    draw, (sound, box, channels) = random.Random(seed), case
    data = bytearray(sound)
    for _ in range(num):
        at = draw.randrange(len(data)) if draw.random() < 0.5 else draw.randrange(min(700, len(data)))
        if draw.random() < 0.2:
            del data[at : at + draw.randrange(1, 9)]
        else:
            data[at] = draw.choice([0, 0xFF, 0xD0, 0xD9, draw.randrange(256)])
    pixels = part(bytes(data), box, channels=channels)
    try:
        expected = None if pixels is None else whole(bytes(data), channels, strict=False)
    except ValueError:
        return
    if pixels is not None and expected is not None:
        assert np.array_equal(pixels, cropped(expected, box))


def test_threads_do_not_disturb_each_other() -> None:
    images = [
        picture(100 + 9 * seed, 160, seed=seed, optimize=seed % 2 == 0, subsampling=seed % 3) for seed in range(8)
    ]
    expected = [whole(data) for data in images]
    wrong: list[int] = []

    def work(number: int) -> None:
        every = boxes(random.Random(number), expected[number].shape, 40)
        wrong.extend(number for box in every if not is_part_of(expected[number], images[number], box))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert not wrong


@pytest.mark.parametrize("interval", [0, 4])
def test_parts_of_photographs_have_the_pixels_of_a_full_decode(extracted: Callable[[str], Path], interval: int) -> None:
    paths = sorted(extracted("imagenet-sample-200.tar").rglob("*.JPEG"))[interval::10]
    for path in paths:
        data = jpeg.restart(path.read_bytes(), interval) if interval else path.read_bytes()
        expected = whole(data)
        every = boxes(random.Random(path.name), expected.shape, 3)
        assert all(is_part_of(expected, data, box) for box in every), path.name
    assert len(paths) == 20


def test_of_odd_and_hostile_files_a_part_is_what_libjpeg_turbo_makes_of_it(data_folder: Path) -> None:
    had = 0
    for path in sorted((data_folder / "odd-images").rglob("*")):
        data = path.read_bytes() if path.is_file() else b""
        size = jpeg_size(data)
        for box in boxes(random.Random(path.name), size, 5) if size and size[0] * size[1] < 2**21 else []:
            if (pixels := part(data, box)) is not None:
                assert np.array_equal(pixels, cropped(whatever(data), box)), path.name
                had += 1
    assert had > 100


def jpeg_size(data: bytes) -> tuple[int, int] | None:
    """Height and width of a baseline JPEG; None of what is none."""
    at = max(data.find(b"\xff\xc0"), data.find(b"\xff\xc1"))
    height, width = int.from_bytes(data[at + 5 : at + 7], "big"), int.from_bytes(data[at + 7 : at + 9], "big")
    return (height, width) if at > 0 and height and width else None
