"""Every member of a zip is met, at the byte where it lies; a damaged or hostile zip ends in one line."""

from __future__ import annotations

import io
import shutil
import struct
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
from tests.data.packing.pictures import write_folder
from tests.data.sources.samples import encoded, found

from steadytrain.data.packing.pack import pack
from steadytrain.data.sources.archives import walk_zip
from steadytrain.data.sources.select import merge
from steadytrain.errors import DataError

FILES = {"a/1.png": encoded(1), "a/empty.txt": b"", "日本/été.jpg": b"y" * 5000}


def _zip(files: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED, comment: bytes = b"") -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
        archive.comment = comment
    return file.getvalue()


def _content(data: bytes) -> dict[str, bytes]:
    values = {}
    for member in walk_zip(io.BytesIO(data), "a.zip"):
        stored = data[member.offset : member.offset + member.stored]
        values[member.name] = zlib.decompress(stored, -zlib.MAX_WBITS) if member.deflated else stored
        assert len(values[member.name]) == member.size
    return values


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_stored_and_deflated_members(method: int) -> None:
    assert _content(_zip(FILES, method)) == FILES


def test_a_comment_and_bytes_before_the_zip_do_no_harm() -> None:
    assert _content(_zip(FILES, comment=b"PK" * 200)) == FILES
    assert _content(b"#!/bin/sh\n" * 50 + _zip(FILES)) == FILES


def test_zip64(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = _zip(FILES)
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 100)
    monkeypatch.setattr(zipfile, "ZIP_FILECOUNT_LIMIT", 1)
    wide = _zip(FILES)
    assert b"PK\6\6" in wide and b"PK\6\6" not in plain
    assert _content(wide) == _content(b"before" + wide) == FILES


def test_folders_and_links_are_distinguished() -> None:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.mkdir("folder")
        link = zipfile.ZipInfo("link.jpg")
        link.create_system, link.external_attr = 3, 0o120777 << 16
        archive.writestr(link, "elsewhere")
        archive.writestr("real.jpg", b"x")
    kinds = {member.name: member.kind for member in walk_zip(file, "a.zip")}
    assert kinds == {"folder/": "folder", "link.jpg": "a link", "real.jpg": "file"}


def test_names_of_old_programs() -> None:
    utf8, dos = "é.jpg".encode(), "é.jpg".encode("cp437")
    data = _zip({"xx.jpg": b"1", "x\\y.jpg": b"2"}, zipfile.ZIP_STORED)
    assert list(_content(data.replace(b"xx.jpg", utf8))) == ["é.jpg", "x\\y.jpg"]
    assert list(_content(_zip({"x.jpg": b"1"}).replace(b"x.jpg", dos))) == ["é.jpg"]
    made_on_dos = data.replace(b"PK\1\2\x14\x03", b"PK\1\2\x14\x00")
    assert list(_content(made_on_dos)) == ["xx.jpg", "x/y.jpg"]


def _patched(data: bytes, at: int, form: str, value: int) -> bytes:
    """A zip whose first directory entry says something else."""
    start = data.index(b"PK\1\2") + at
    return data[:start] + struct.pack(form, value) + data[start + struct.calcsize(form) :]


ONE = {"1.jpg": b"x" * 100}
REFUSED = {
    "encrypted": (_patched(_zip(ONE), 8, "<H", 1), r"a.zip is encrypted \(1.jpg\): unzip it with its password"),
    "another method": (_zip(ONE, zipfile.ZIP_LZMA), "packs 1.jpg by lzma; stored and deflated members are read"),
    "local header elsewhere": (_patched(_zip(ONE), 42, "<I", 7), r"is damaged \(1.jpg\) at byte 7"),
    "larger than the file": (_patched(_zip(ONE), 20, "<I", 1 << 30), "its members need more bytes than it has"),
    "two sizes": (_patched(_zip(ONE, zipfile.ZIP_STORED), 24, "<I", 5), r"is damaged \(1.jpg\)"),
    "no directory": (_zip(ONE)[:-30], "its directory, at the end, is missing"),
    "middle lost": (_zip(ONE)[40:], "a.zip is damaged"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_damaged_and_hostile_zips_end_in_one_line(case: str) -> None:
    data, message = REFUSED[case]
    with pytest.raises(DataError, match=message):
        list(walk_zip(io.BytesIO(data), "a.zip"))


def test_members_that_share_their_bytes_are_a_bomb() -> None:
    data = _zip({f"{number}.jpg": b"x" * 1000 for number in range(2)}, zipfile.ZIP_STORED)
    start, end = data.index(b"PK\1\2"), data.index(b"PK\5\6")
    first = data[start : start + 46 + 5]
    bomb = data[:start] + first * 50 + struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 50, 50, 50 * len(first), start, 0)
    assert end > start
    with pytest.raises(DataError, match="it is damaged, or a bomb"):
        list(walk_zip(io.BytesIO(bomb), "a.zip"))


def test_every_cut_ends_in_one_line() -> None:
    whole = _zip(FILES)
    for end in range(4, len(whole), 7):
        with pytest.raises(DataError, match=r"a\.zip"):
            list(walk_zip(io.BytesIO(whole[:end]), "a.zip"))


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_an_image_that_a_bit_was_lost_of_is_left_out_and_named(tmp_path: Path, method: int) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w", method) as file:
        for name in ("cat", "dog"):
            for number in range(8):
                file.writestr(f"{name}/{number}.png", encoded(number))
        place = file.getinfo("dog/3.png").header_offset
    data = bytearray((tmp_path / "a.zip").read_bytes())
    data[place + 30 + len("dog/3.png") + 40] ^= 4
    (tmp_path / "a.zip").write_bytes(data)
    [(_, card)] = pack(tmp_path / "a.zip", tmp_path / "out", encoding="pass")
    assert [rejected.name for rejected in card.rejected] == ["dog/3.png"]
    assert "damaged" in card.rejected[0].reason
    both = merge([found(tmp_path / "a.zip", tmp_path)[0]] * 2)
    assert both.pieces is not None and both.pieces.take(np.array([9]))[0].crc == zlib.crc32(encoded(1))


@pytest.mark.parametrize("name", ["photos.zip.001", "photos.tar.gz.partaa"])
def test_a_part_of_a_divided_file_is_named_as_one(tmp_path: Path, name: str) -> None:
    folder = write_folder(tmp_path / "photos", {"cat": 2, "dog": 2})
    archive = shutil.make_archive(str(tmp_path / "whole"), "gztar" if "gz" in name else "zip", folder)
    whole = Path(archive).read_bytes()
    (tmp_path / name).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"is cut short.*: it is one of several parts, .*: cat .*\.\* > .*photos"):
        found(tmp_path / name, tmp_path / "scratch")
