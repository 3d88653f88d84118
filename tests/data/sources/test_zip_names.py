"""Names in zips of old Windows programs: asked for, with what they may be, and read by the code page that is named."""

from __future__ import annotations

import struct
import zipfile
import zlib
from pathlib import Path

import pytest
from tests.data.sources.samples import encoded, found

from steadytrain.cli import main
from steadytrain.config import Data
from steadytrain.data.packing.pack import pack
from steadytrain.data.sources.columns import ColumnNames
from steadytrain.data.sources.find import find
from steadytrain.errors import DataError
from steadytrain.training.data import open_data


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


ASKED = {
    "gbk": ["猫狗", "鸟", "T恤", "黄瓜_霜霉病"],
    "cp932": ["ネコ", "犬", "自転車"],
    "cp949": ["고양이", "강아지", "자동차"],
    "big5": ["汽車", "飛機", "蘋果"],
    "cp866": ["Кошка", "собака", "ЁЖ"],
    "cp1251": ["Кошка", "собака", "яблоко"],
    "cp850": ["São Paulo", "Ærø"],
    "cp1252": ["café", "thé"],
    "cp1253": ["γάτα", "σκύλος"],
    "cp874": ["แมว", "สุนัข"],
    "cp1256": ["قطة", "كلب"],
}


def _folders(names: list[str]) -> list[str]:
    return [f"{name}/{number}.png" for number, name in enumerate((*names, "bee", "cat"))]


@pytest.mark.parametrize("encoding", ASKED)
def test_the_code_page_is_asked_for_and_then_used(tmp_path: Path, encoding: str) -> None:
    path = _zip(tmp_path / "a.zip", _folders(ASKED[encoding]), encoding)
    with pytest.raises(DataError, match=r"does not tell the code page of its names \(.*: name .* --zip-names") as error:
        found(path, tmp_path / "scratch")
    assert f": {', '.join(ASKED[encoding][:2])}" in str(error.value)
    columns = ColumnNames(zip_names=encoding)
    [listing] = find(str(path), scratch=tmp_path / "scratch", say=lambda _: None, columns=columns)
    assert listing.classes == tuple(sorted((*ASKED[encoding], "bee", "cat")))


def test_ascii_words_beside_latin_letters_may_be_written_anyhow(tmp_path: Path) -> None:
    path = _zip(tmp_path / "a.zip", ["TrainImages/Mädchen/WhatsApp 0.jpg", "TrainImages/bee/DSCf001.JPG"], "cp437")
    (listing,) = found(path, tmp_path / "scratch")
    assert listing.classes == ("Mädchen", "bee")


def test_latin_letters_are_by_the_standards_code_page(tmp_path: Path) -> None:
    names = ["Mädchen", "Öl", "señor"]
    messages: list[str] = []
    [listing] = found(_zip(tmp_path / "a.zip", _folders(names), "cp437"), tmp_path / "scratch", messages)
    assert listing.classes == tuple(sorted((*names, "bee", "cat")))
    assert messages == []


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("klingon", "--zip-names is klingon, which is no code page"),
        ("ascii", "by which .* cannot be read: name another"),
    ],
)
def test_a_wrong_code_page_is_refused(tmp_path: Path, name: str, problem: str) -> None:
    path = _zip(tmp_path / "a.zip", _folders(["Æble"]), "cp1252")
    with pytest.raises(DataError, match=problem):
        pack(path, tmp_path / "out", zip_names=name)


def test_each_verb_takes_the_code_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = _zip(tmp_path / "a.zip", [f"{name}/{n}.png" for n in range(9) for name in ("猫狗", "鸟")], "gbk")
    for words in (["check"], ["feed", "--seconds", "0.2"]):
        assert main([words[0], str(path), *words[1:]]) == 2 - (words == ["check"])
        assert "猫狗" in "".join(capsys.readouterr())
        assert main([words[0], str(path), *words[1:], "--zip-names", "gbk"]) in (0, 1)
        capsys.readouterr()
    opened = open_data(Data(train=str(path), zip_names="gbk"), seed=0)
    assert "猫狗" in opened.train.classes
    opened.close()


def test_names_that_are_marked_need_no_code_page(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        for number, name in enumerate(("猫/1.png", "狗/2.png")):
            archive.writestr(name, encoded(number))
    columns = ColumnNames(zip_names="cp1251")
    [listing] = find(str(tmp_path / "a.zip"), scratch=tmp_path / "scratch", say=lambda _: None, columns=columns)
    assert listing.classes == ("狗", "猫")


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
