"""Finding records and reading their headers, in whole and in damaged files."""

from __future__ import annotations

import errno
import os
import struct
from pathlib import Path

import numpy as np
import pytest

from steadytrain import files
from steadytrain.data.recordio.framing import MAGIC, frame, pack_header
from steadytrain.data.recordio.index import read_columns, read_index, resynchronise, scan, write_index
from steadytrain.errors import DataError, StorageError

MAGIC_BYTES = struct.pack("<I", MAGIC)
MAGIC_LABEL = struct.unpack("<f", MAGIC_BYTES)[0]


def _file(*payloads: bytes) -> memoryview:
    return memoryview(b"".join(frame(payload) for payload in payloads))


def test_columns_are_read_without_the_images() -> None:
    file = _file(*(pack_header(i % 3, id=100 + i) + bytes(i) for i in range(50)))
    columns = read_columns(file, scan(file))
    assert columns.ids.tolist() == list(range(100, 150))
    assert columns.labels[:, 0].tolist() == [i % 3 for i in range(50)]


@pytest.mark.parametrize("labels", [(1.0, 2.0), (MAGIC_LABEL, 3.0, MAGIC_LABEL), (0.5,)])
def test_label_vectors_are_read_also_where_they_hold_the_magic(labels: tuple[float, ...]) -> None:
    file = _file(*(pack_header(labels, id=i) + MAGIC_BYTES for i in range(3)))
    assert read_columns(file, scan(file)).labels.tobytes() == np.array([labels] * 3, np.float32).tobytes()


def test_a_magic_in_the_header_itself_is_put_back() -> None:
    file = _file(pack_header(MAGIC_LABEL, id=MAGIC), pack_header(2.0, id=MAGIC << 32 | 7), pack_header(3.0, id=1))
    columns = read_columns(file, scan(file))
    assert columns.ids.view(np.uint64).tolist() == [MAGIC, MAGIC << 32 | 7, 1]
    assert columns.labels[:, 0].tolist() == [MAGIC_LABEL, 2.0, 3.0]


def test_records_with_unequally_many_labels_are_refused() -> None:
    file = _file(pack_header(1.0, id=0), pack_header([1.0, 2.0, 3.0], id=1))
    with pytest.raises(DataError, match="hold 1 to 3 labels"):
        read_columns(file, scan(file))


@pytest.mark.parametrize("flag", [2**32 - 1, 20])
def test_labels_that_the_file_has_no_room_for_are_refused(flag: int) -> None:
    file = _file(*(struct.pack("<IfQQ", flag, 0, i, 0) + bytes(50) for i in range(2)))
    with pytest.raises(DataError, match=f"{flag:,} labels"):
        read_columns(file, scan(file))


def test_records_that_are_no_images_are_refused() -> None:
    file = _file(b"plain text, which MXRecordIO stores just as well"[:20])
    with pytest.raises(DataError, match="byte 0 is too short for an image header"):
        read_columns(file, scan(file))


def test_damage_is_placed_and_the_next_whole_record_named() -> None:
    file = bytearray(_file(*(pack_header(i, id=i) + bytes(96) for i in range(4))))
    file[128] ^= 1
    with pytest.raises(DataError, match=r"damaged at byte 128 \(the next whole record begins at byte 256\)"):
        scan(memoryview(file))
    assert resynchronise(memoryview(file), 129) == 256
    assert resynchronise(memoryview(file), 385) is None


WHOLE = _file(pack_header(0, id=0) + b"12345", pack_header(1, id=1) + MAGIC_BYTES * 9, pack_header(2, id=2) + bytes(99))
ENDS = [*scan(WHOLE).tolist(), len(WHOLE)]


@pytest.mark.parametrize("size", range(len(WHOLE)))
def test_a_file_that_is_cut_short_is_never_taken_for_whole(size: int) -> None:
    if size in ENDS:  # as good as a shorter file
        assert scan(WHOLE[:size]).tolist() == ENDS[: ENDS.index(size)]
        return
    with pytest.raises(DataError, match="cut short"):
        scan(WHOLE[:size])


def test_an_index_that_cannot_be_written_leaves_the_one_that_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.rec").write_bytes(WHOLE.tobytes())
    (tmp_path / "a.idx").write_text("before")

    def fail(path: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(files, "sync", fail)
        with pytest.raises(StorageError, match=r"^the disk is full at .*a\.idx"):
            write_index(tmp_path / "a.rec", tmp_path / "a.idx")
    assert (tmp_path / "a.idx").read_text() == "before"
    write_index(tmp_path / "a.rec", tmp_path / "a.idx")
    assert read_index(tmp_path / "a.idx").tolist() == scan(WHOLE).tolist()


def test_an_index_gives_rising_offsets_whatever_its_keys(tmp_path: Path) -> None:
    (tmp_path / "a.idx").write_text("n01/x 1.jpg\t64\r\n54\t0\r\n-3\t32\r\n")
    assert read_index(tmp_path / "a.idx").tolist() == [0, 32, 64]


def test_file_that_is_no_index_is_refused_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "a.idx").write_text("version https://example.org/spec\n")
    with pytest.raises(DataError, match=r"a\.idx is not an index"):
        read_index(tmp_path / "a.idx")


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ("0\t0\n1\t18446744073709551615\n", "line 2 names byte 18446744073709551615, and no file is as long"),
        ("0\t0\n1\t-\n", r"line 2 is '1\\t-', not a key, a tab and an offset"),
        ("0\t0\n12\n", "line 2 is '12', not a key"),
        ("0\t1e400\n", "line 1 is"),
    ],
)
def test_the_line_that_makes_an_index_none_is_named(lines: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "a.idx").write_text(lines)
    with pytest.raises(DataError, match=rf"a\.idx is not an index \({why}"):
        read_index(tmp_path / "a.idx")


@pytest.mark.parametrize("offset", ["9" * 5000, "\N{SUPERSCRIPT TWO}", "-1"])
def test_an_offset_that_is_no_number_of_bytes_is_named_in_a_line(tmp_path: Path, offset: str) -> None:
    path = tmp_path / "a.idx"
    path.write_bytes(f"0\t0\n1\t{offset}\n2\t".encode() + b"\xff\n")
    with pytest.raises(DataError, match=r"^a\.idx is not an index \(line 2 .*\)$") as caught:
        read_index(path)
    assert len(str(caught.value)) < 200
