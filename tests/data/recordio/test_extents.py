"""Where images lie: what is told is what a record takes on disk."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from steadytrain.data.recordio.framing import pack_header
from steadytrain.data.recordio.reader import Extents, Records
from steadytrain.data.recordio.writer import RecordWriter


def write(path: Path, images: list[bytes]) -> None:
    with RecordWriter(path) as writer:
        for number, image in enumerate(images):
            writer.write(pack_header(0.0, id=number) + image, key=number)


def test_each_image_lies_at_its_stated_extent_in_one_or_several_files(tmp_path: Path) -> None:
    images = [bytes([65 + i]) * (5 + 7 * i) for i in range(20)]
    write(tmp_path / "s-00000-of-00002.rec", images[:8])
    write(tmp_path / "s-00001-of-00002.rec", images[8:])
    numbers = np.array([19, 0, 7, 8, 3])
    with Records.open(tmp_path / "s-*.rec") as records:
        places = records.extents(numbers)
        for row, number in enumerate(numbers.tolist()):
            data = Path(places.paths[places.file[row]]).read_bytes()
            part = data[places.offset[row] : places.offset[row] + places.size[row]]
            assert bytes(records.image(number)) == images[number]
            assert images[number] in part and len(part) < len(images[number]) + 48


def test_an_index_in_another_order_is_understood(tmp_path: Path) -> None:
    images = [b"a" * 10, b"b" * 100, b"c" * 30]
    write(tmp_path / "a.rec", images)
    index = tmp_path / "a.idx"
    index.write_text("\n".join(reversed(index.read_text().split("\n")[:3])) + "\n")
    with Records.open(tmp_path / "a.rec") as records:
        places, data = records.extents(np.arange(3)), (tmp_path / "a.rec").read_bytes()
        for row in range(3):
            assert bytes(records.image(row)) in data[places.offset[row] : places.offset[row] + places.size[row]]


pieces = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 300), st.integers(0, 40)), max_size=30)


@given(pieces=pieces, gap=st.integers(0, 50))
def test_stretches_cover_every_byte_and_little_more(pieces: list[tuple[int, int, int]], gap: int) -> None:
    file, offset, size = np.array(pieces, dtype=np.int64).reshape(-1, 3).T
    stretches = Extents(["a", "b", "c"], file, offset, size).stretches(gap=gap)
    covered = {(path, at) for path, first, end in stretches for at in range(first, end)}
    wanted = {("abc"[f], at) for f, first, length in pieces for at in range(first, first + length)}
    assert wanted <= covered
    assert len(covered - wanted) <= gap * len(pieces)
    assert all(a[0] != b[0] or a[2] + gap < b[1] for a, b in pairwise(stretches))
