"""Names in zips of old Windows programs: read as they were written, where that can be told; else a command is given."""

from __future__ import annotations

import struct
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path

import pytest
from tests.data.sources.samples import encoded, found

from steadytrain.data.sources.zip_names import readings
from steadytrain.errors import DataError


def _zip(path: Path, names: list[str], encoding: str) -> Path:
    """A zip whose names are in an encoding that it does not tell, as programs of the country write it."""
    plain = {f"{number}".ljust(len(name.encode(encoding)), "~"): name for number, name in enumerate(names)}
    with zipfile.ZipFile(path, "w") as archive:
        for number, stand_in in enumerate(plain):
            archive.writestr(stand_in, encoded(number))
    data = path.read_bytes()
    for stand_in, name in plain.items():
        data = data.replace(stand_in.encode(), name.encode(encoding))
    path.write_bytes(data)
    return path


TOLD = {
    "cp936": ["猫狗", "鸟", "T恤", "黄瓜_霜霉病"],
    "cp932": ["ネコ", "犬", "自転車"],
    "cp949": ["고양이", "강아지", "자동차"],
    "cp950": ["汽車", "飛機", "蘋果"],
    "cp866": ["Кошка", "собака", "ЁЖ"],
    "cp1251": ["Кошка", "собака", "яблоко"],
    "cp850": ["São Paulo", "Ærø"],
    "cp1252": ["café", "thé"],
    "cp437": ["Mädchen", "Öl", "señor"],
    "cp737": ["γάτα", "σκύλος"],
}


@pytest.mark.parametrize("encoding", TOLD)
def test_classes_are_called_as_they_were_written(tmp_path: Path, encoding: str) -> None:
    names = [f"{name}/{number}.png" for number, name in enumerate((*TOLD[encoding], "bee", "cat"))]
    messages: list[str] = []
    [listing] = found(_zip(tmp_path / "a.zip", names, encoding), tmp_path / "scratch", messages)
    assert listing.classes == tuple(sorted((*TOLD[encoding], "bee", "cat")))
    [message] = messages
    assert "does not tell the encoding of its names, which are read as" in message and TOLD[encoding][0] in message


@pytest.mark.parametrize(
    ("encoding", "names"),
    [("cp949", ["개"]), ("cp852", ["łódka", "żaba"]), ("cp1256", ["قطة", "كلب"])],
)
def test_names_that_may_mean_several_things_are_asked_about(tmp_path: Path, encoding: str, names: list[str]) -> None:
    path = _zip(tmp_path / "a.zip", [*(f"{name}/1.png" for name in names), "bee/2.png"], encoding)
    with pytest.raises(DataError, match=r"does not tell the encoding of its folders' names") as error:
        found(path, tmp_path / "scratch")
    command = str(error.value).rpartition("FOLDER: ")[2].replace("python3", sys.executable)
    words = [encoding if word in ("ENCODING", "cp1251", "gbk") else word for word in command.split()]
    subprocess.run([*words[:-1], str(tmp_path / "out")], check=True)
    assert found(tmp_path / "out", tmp_path / "scratch")[0].classes == tuple(sorted([*names, "bee"]))


def test_a_name_that_could_be_utf8_is_read_as_the_others_are(tmp_path: Path) -> None:
    """The code of a cat in GBK is that of an e with an accent in UTF-8."""
    path = _zip(tmp_path / "a.zip", ["猫/1.png", "狗/2.png"], "gbk")
    assert found(path, tmp_path / "scratch")[0].classes == ("狗", "猫")


def test_names_of_images_alone_need_no_encoding(tmp_path: Path) -> None:
    path = _zip(tmp_path / "a.zip", ["cat/قطة.png", "dog/2.png"], "cp1256")
    messages: list[str] = []
    assert found(path, tmp_path / "scratch", messages)[0].classes == ("cat", "dog")
    assert messages == []


def test_the_name_that_a_program_wrote_beside_counts(tmp_path: Path) -> None:
    """Info-ZIP's extra field has the name in UTF-8, and the checksum of the other one that it goes with."""
    old = "猫/1.png".encode("gbk")
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        for name, checksum in (("xx/1.png", zlib.crc32(old)), ("yyy/1.png", 7)):
            info = zipfile.ZipInfo(name)
            field = struct.pack("<BI", 1, checksum) + ("猫/1.png" if name[0] == "x" else "no").encode()
            info.extra = struct.pack("<2H", 0x7075, len(field)) + field
            archive.writestr(info, encoded(1))
    path = tmp_path / "a.zip"
    path.write_bytes(path.read_bytes().replace(b"xx/1.png", old))
    assert found(path, tmp_path / "scratch")[0].classes == ("yyy", "猫")


def test_ascii_and_empty_names_say_nothing() -> None:
    assert [reading.encoding for reading in readings([b"\xc3\xa8\xb9\xb7/0.jpg", b"bee/1.jpg"])] == ["gbk"]
    assert all(reading.names == () for reading in readings([b"bee/1.jpg"]))
