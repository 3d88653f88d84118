"""Cutting out of a JPEG what a box needs: the pixels of a full decode, or nothing at all."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image
from tests.data.loader.pictures import Pictures, encode, everything, scene

from steadytrain.data.loader import ImageLoader, jpeg
from steadytrain.data.loader.crop import Crop
from steadytrain.data.loader.splice import Spliced, splice
from steadytrain.data.packing.encode import Settings, pack_bytes

Pixels = NDArray[np.uint8]
Box = tuple[int, int, int, int]


def spliced(files: Sequence[bytes], boxes: Sequence[Box], shrink: int = 1) -> list[Spliced | None]:
    at = np.cumsum([0] + [len(data) for data in files])
    memory = np.frombuffer(b"".join(files), np.uint8)
    heads = [jpeg.head_of(data) for data in files]
    return splice(memory, at, heads, np.array(boxes), np.full(len(files), shrink))


def decoded(data: Any, shrink: int = 1) -> Pixels:
    head = jpeg.head_of(data)
    assert head is not None
    shape = head.height, head.width, 3
    return jpeg.decode(data, shape, np.empty(np.prod(shape), np.uint8), shrink=shrink)


def shows(data: bytes, part: Spliced, box: Box, shrink: int = 1) -> bool:
    """Whether the part has the box's pixels of the whole image."""
    left, top, right, bottom = box
    rows, columns = slice(top // shrink, -(-bottom // shrink)), slice(left // shrink, -(-right // shrink))
    y, x = part.top // shrink, part.left // shrink
    made = decoded(part.data, shrink)[rows.start - y : rows.stop - y, columns.start - x : columns.stop - x]
    return np.array_equal(made, decoded(data, shrink)[rows, columns])


@st.composite
def cases(draw: st.DrawFn) -> tuple[bytes, Box, int]:
    """An image with restart markers, a box in it, and how many times it is shrunk."""
    height, width = draw(st.integers(1, 150)), draw(st.integers(1, 150))
    options: dict[str, Any] = {"subsampling": draw(st.sampled_from(["4:2:0", "4:2:2", "4:4:4"]))}
    options["quality"] = draw(st.sampled_from([30, 75, 95, 100]))
    options["optimize"] = draw(st.booleans())
    kind = draw(st.sampled_from(["restart_marker_blocks", "restart_marker_rows"]))
    options[kind] = draw(st.integers(1, 12 if kind == "restart_marker_blocks" else 3))
    mode = draw(st.sampled_from(["RGB", "RGB", "L"]))
    data = encode(scene(draw(st.integers(0, 5)), height, width, mode=mode), "JPEG", **options)
    left, top = draw(st.integers(0, width - 1)), draw(st.integers(0, height - 1))
    shrink = draw(st.sampled_from([1, 1, 2, 4, 8]))
    left, top = left // shrink * shrink, top // shrink * shrink
    right, bottom = draw(st.integers(left + 1, width)), draw(st.integers(top + 1, height))
    return data, (left, top, right, bottom), shrink


@given(cases())
def test_a_part_has_the_pixels_of_a_full_decode(case: tuple[bytes, Box, int]) -> None:
    data, box, shrink = case
    (part,) = spliced([data], [box], shrink)
    assert part is None or (len(part.data) < len(data) and shows(data, part, box, shrink))


@given(st.lists(cases(), min_size=2, max_size=6))
def test_images_worked_at_together_come_out_as_alone(some: list[tuple[bytes, Box, int]]) -> None:
    files, boxes = [data for data, _, _ in some], [box for _, box, _ in some]
    for data, box, part in zip(files, boxes, spliced(files, boxes), strict=True):
        (alone,) = spliced([data], [box])
        if part is None or alone is None:
            assert part is alone
        else:
            assert part.data.tobytes() == alone.data.tobytes() and part[1:] == alone[1:]


@pytest.mark.parametrize("name", ["4:2:0", "4:2:2", "4:4:4"])
@pytest.mark.parametrize("restart", [1, 2, 5, 10, 20, 4, 7])
def test_columns_are_cut_where_the_interval_divides_the_row(name: str, restart: int) -> None:
    """160 pixels are 10 MCUs, or 20 of 4:4:4. Of another interval than a divisor only rows are cut."""
    data = encode(scene(1, 160, 160), "JPEG", subsampling=name, restart_marker_blocks=restart)
    box = (40, 60, 70, 100)
    (part,) = spliced([data], [box])
    assert part is not None and shows(data, part, box)
    row = 20 if name == "4:4:4" else 10
    assert (part.width < 160) == (row % restart == 0 and restart < row)
    assert part.height < 160


@pytest.mark.parametrize("rows", [1, 2])
def test_intervals_of_whole_rows_as_cameras_write_them(rows: int) -> None:
    data = encode(scene(2, 400, 300), "JPEG", restart_marker_rows=rows)
    (part,) = spliced([data], [(100, 150, 200, 250)])
    assert part is not None and shows(data, part, (100, 150, 200, 250))
    assert (part.top, part.height, part.width) == ((144, 112, 300) if rows == 1 else (128, 128, 300))


def test_what_has_no_markers_or_is_wanted_whole_is_not_cut() -> None:
    image, small = scene(3, 160, 160), (40, 40, 60, 60)
    files = [
        encode(image, "JPEG"),
        encode(image, "JPEG", progressive=True, restart_marker_rows=1),
        encode(image, "PNG"),
        b"",
    ]
    assert spliced(files, [small] * 4) == [None] * 4
    assert spliced([encode(image, "JPEG", restart_marker_rows=1)], [(0, 0, 160, 159)]) == [None]
    assert spliced([], []) == []


def harmed() -> dict[str, Callable[[bytes], bytes]]:
    """Ways in which restart markers can be wrong; each takes a sound file."""

    def places(data: bytes) -> list[int]:
        return [at for at in range(600, len(data) - 2) if data[at] == 0xFF and 0xD0 <= data[at + 1] <= 0xD7]

    def put(data: bytes, at: int, second: int) -> bytes:
        return data[: at + 1] + bytes((second,)) + data[at + 2 :]

    def swapped(data: bytes) -> bytes:
        one, two = places(data)[20:22]
        return put(put(data, one, data[two + 1]), two, data[one + 1])

    announced = b"\xff\xdd\x00\x04"
    return {
        "a marker is missing": lambda data: data[: (at := places(data)[20])] + data[at + 2 :],
        "a marker too many": lambda data: data[: (at := places(data)[20])] + b"\xff\xd5" + data[at:],
        "eight markers too many": lambda d: d[: (at := places(d)[20])] + d[at : (places(d)[28])] + d[at:],
        "two are swapped": swapped,
        "another marker instead": lambda data: put(data, places(data)[20], 0xC4),
        "cut short": lambda data: data[: places(data)[-3]],
        "no end": lambda data: data[:-2],
        "a shorter interval announced": lambda d: d.replace(announced + b"\0\2", announced + b"\0\1"),
        "a longer interval announced": lambda d: d.replace(announced + b"\0\2", announced + b"\0\5"),
        "a header that ends as a marker does": lambda d: (
            d[: (at := d.index(b"\xff\xda") + 12)] + b"\xff\xd0" + d[at + 2 :]
        ),
        "taller than its pixels": lambda d: d[: (at := d.index(b"\xff\xc0") + 5)] + b"\x01\x00" + d[at + 2 :],
        "wider than its pixels": lambda d: d[: (at := d.index(b"\xff\xc0") + 7)] + b"\x01\x00" + d[at + 2 :],
    }


@pytest.mark.parametrize("how", harmed())
def test_odd_markers_are_left_to_the_full_decoder(how: str) -> None:
    sound = encode(scene(4, 160, 160), "JPEG", quality=90, restart_marker_blocks=2)
    data = harmed()[how](sound)
    assert data != sound
    good, bad, again = spliced([sound, data, sound], [(40, 40, 80, 80)] * 3)
    assert bad is None
    assert good is not None and again is not None, "and its neighbours are none the worse"
    assert shows(sound, again, (40, 40, 80, 80))


@given(st.data())
def test_a_damaged_file_is_never_another_picture_in_silence(data: st.DataObject) -> None:
    """Where a part decodes without complaint, its pixels are those of a full decode, if damage elsewhere allows one."""
    harmed = bytearray(encode(scene(5, 96, 128), "JPEG", quality=85, restart_marker_blocks=2))
    for _ in range(data.draw(st.integers(1, 3))):
        harmed[data.draw(st.integers(len(harmed) // 3, len(harmed) - 1))] = data.draw(st.integers(0, 255))
    box = (20, 30, 70, 60)
    (part,) = spliced([bytes(harmed)], [box])
    if part is None:
        return
    try:
        decoded(part.data)
    except ValueError:
        return
    try:
        whole = np.asarray(Image.open(io.BytesIO(bytes(harmed))).convert("RGB"))
    except OSError:
        return
    y, x = box[1] - part.top, box[0] - part.left
    assert np.array_equal(decoded(part.data)[y : y + 30, x : x + 50], whole[30:60, 20:70])


def test_fill_bytes_and_what_follows_the_image_are_no_trouble() -> None:
    data = encode(scene(6, 160, 160), "JPEG", restart_marker_blocks=2)
    (part,) = spliced([data + b"\xff\xd0\xff\xd9 and more"], [(40, 40, 80, 80)])
    assert part is not None and shows(data, part, (40, 40, 80, 80))


@pytest.mark.parametrize("train", [True, False])
def test_a_feed_of_packed_photographs_gives_the_batches_of_a_full_decode(
    extracted: Callable[[str], Path], train: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = sorted(extracted("imagenet-sample-200.tar").rglob("*.JPEG"))[::4]
    small = [pack_bytes(path.read_bytes(), Settings(shorter_side=256)).data for path in paths]
    images = [encode(Image.open(io.BytesIO(data)), "JPEG", quality=95, restart_marker_blocks=2) for data in small]
    cut = Crop(kind="resized-crop", size=224, flip=True) if train else Crop(kind="none", size=224, crop=0.875)
    monkeypatch.setattr(jpeg, "parts", None)  # which would decode the boxes otherwise

    cuts: list[int] = []

    def counted(*args: Any) -> list[Spliced | None]:
        made = splice(*args)
        cuts.append(sum(part is not None for part in made))
        return made

    def batches() -> tuple[NDArray[Any], ...]:
        with ImageLoader(
            Pictures(images), cut, batch_size=25, train=train, stop=50 if train else None, threads=1
        ) as feed:
            return everything(feed)

    monkeypatch.setattr("steadytrain.data.loader.decode.splice", counted)
    got = batches()
    assert sum(cuts) >= 25, "most images were cut out"
    monkeypatch.setattr(
        "steadytrain.data.loader.decode.splice", lambda memory, at, heads, boxes, shrinks: [None] * len(heads)
    )
    assert all(np.array_equal(one, other) for one, other in zip(got, batches(), strict=True))
