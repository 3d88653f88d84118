"""Every member of a tar is met, at the byte where it lies; a damaged tar ends in one line."""

from __future__ import annotations

import io
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
from tests.data.sources.samples import write_tar

from steadytrain.data.sources.archives import Member, is_tar, walk_tar
from steadytrain.errors import DataError

BLOCK = 512
LONG = "/".join(["a folder with a rather long name"] * 8) + "/pictüre.png"
CONTENT = {"a/1.png": b"x" * 700, "a/empty.png": b"", LONG: b"y" * 512, "日本/" + "n" * 150 + ".jpg": b"z"}


def _walk(path: Path) -> list[Member]:
    with path.open("rb") as file:
        return list(walk_tar(file, str(path)))


def _content(path: Path) -> dict[str, bytes]:
    data = path.read_bytes()
    return {
        member.name: data[member.offset : member.offset + member.stored]
        for member in _walk(path)
        if member.kind == "file"
    }


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_names_in_any_script(tmp_path: Path, form: int) -> None:
    assert _content(write_tar(tmp_path / "a.tar", CONTENT, format=form)) == CONTENT


@pytest.mark.parametrize("form", ["v7", "ustar", "gnu", "oldgnu", "posix"])
def test_all_formats_of_gnu_tar(tmp_path: Path, form: str) -> None:
    if shutil.which("tar") is None:
        pytest.skip("there is no tar here")
    wanted = {"data/sub/b.jpg": b"B" * 1000, "data/" + "n" * 80 + ".jpg": b"N" * 10}
    for name, data in wanted.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    subprocess.run(["tar", f"--format={form}", "-cf", "a.tar", "data"], cwd=tmp_path, check=True)
    assert _content(tmp_path / "a.tar") == wanted
    assert {member.name.rstrip("/") for member in _walk(tmp_path / "a.tar") if member.kind == "folder"} == {
        "data",
        "data/sub",
    }


def test_members_and_bytes_are_those_that_the_standard_library_finds(data_folder: Path) -> None:
    path = data_folder / "clothing-10.tar"
    with tarfile.open(path) as tar:
        assert [(m.name, m.offset_data, m.size) for m in tar] == [(m.name, m.offset, m.size) for m in _walk(path)]


def test_links_devices_and_sparse_files_are_distinguished(tmp_path: Path) -> None:
    kinds = {
        "hard.jpg": (tarfile.LNKTYPE, "a link"),
        "soft.jpg": (tarfile.SYMTYPE, "a link"),
        "null": (tarfile.CHRTYPE, "a device"),
        "pipe": (tarfile.FIFOTYPE, "a pipe"),
        "folder": (tarfile.DIRTYPE, "folder"),
    }
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name, (kind, _) in kinds.items():
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "elsewhere"
            tar.addfile(info)
        tar.addfile(tarfile.TarInfo("real.jpg"))
    kind_of = {member.name.rstrip("/"): member.kind for member in _walk(tmp_path / "a.tar")}
    assert kind_of == {**{name: word for name, (_, word) in kinds.items()}, "real.jpg": "file"}


@pytest.mark.parametrize("form", ["gnu", "posix"])
def test_what_follows_a_sparse_file_is_found(tmp_path: Path, form: str) -> None:
    if shutil.which("tar") is None:
        pytest.skip("there is no tar here")
    with (tmp_path / "holes.img").open("wb") as file:
        for number in range(40):  # more runs than one header holds
            file.seek(number << 16)
            file.write(b"data")
    (tmp_path / "next.jpg").write_bytes(b"next")
    command = ["tar", f"--format={form}", "-S", "-cf", "a.tar", "holes.img", "next.jpg"]
    subprocess.run(command, cwd=tmp_path, check=True)
    members = _walk(tmp_path / "a.tar")
    assert [member.kind for member in members] == ["a sparse file", "file"]
    assert _content(tmp_path / "a.tar") == {"next.jpg": b"next"}


def test_a_tar_inside_a_file_is_walked_in_its_bounds(tmp_path: Path) -> None:
    inner = write_tar(tmp_path / "inner.tar", {"1.jpg": b"one"}).read_bytes()
    outer = b"before".ljust(100) + inner + b"after"
    [member] = walk_tar(io.BytesIO(outer), "a.tar", start=100, end=100 + len(inner))
    assert outer[member.offset : member.offset + member.size] == b"one"


def test_sizes_beyond_eight_gigabytes_are_numbers_in_base_256(tmp_path: Path) -> None:
    info = tarfile.TarInfo("big.jpg")
    info.size = 9 << 30
    (tmp_path / "a.tar").write_bytes(info.tobuf(tarfile.GNU_FORMAT))
    with pytest.raises(DataError, match=r"cut short: big.jpg needs 9,663,676,416 bytes from byte 512 on"):
        _walk(tmp_path / "a.tar")


def test_names_that_would_lead_elsewhere_are_no_more_than_names(tmp_path: Path) -> None:
    names = ["../../etc/passwd", "/etc/passwd", "a\n\x1b[31mb.jpg"]
    assert [member.name for member in _walk(write_tar(tmp_path / "a.tar", dict.fromkeys(names, b"x")))] == names


def test_every_cut_ends_in_one_line_or_costs_nothing(tmp_path: Path) -> None:
    whole = write_tar(tmp_path / "a.tar", CONTENT, format=tarfile.PAX_FORMAT).read_bytes()
    members = len(_walk(tmp_path / "a.tar"))
    for end in range(BLOCK + 1, len(whole), 100):
        try:
            entries = list(walk_tar(io.BytesIO(whole[:end]), "a.tar"))
        except DataError as error:
            assert "cut short" in str(error)
        else:
            assert len(entries) == members


def test_damage_is_reported_with_its_byte_offset(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", {"1.jpg": b"x", "2.jpg": b"y"})
    data = bytearray(path.read_bytes())
    data[2 * BLOCK + 5] ^= 1
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"a.tar is damaged at byte 1,024 \(no tar header there\)"):
        _walk(path)


CHAINED = tarfile.TarInfo("long")  # the name of what follows, which may be another such, and so on
CHAINED.type, CHAINED.size = tarfile.GNUTYPE_LONGNAME, 1


@pytest.mark.parametrize(
    ("kind", "size", "content", "message"),
    [
        (b"L", 1 << 40, b"", "a name of 1,099,511,627,776 bytes"),
        (b"x", 2 << 20, b"", "a name of 2,097,152 bytes"),
        (b"x", 512, b"99 path=a\n".ljust(512, b"\0"), "is damaged at byte 0"),
        (b"x", 512, b"nonsense".ljust(512, b"!"), "has no end|is damaged at byte 0"),  # Python 3.13 tells sooner
        (b"x", 512, b"9999999999999999999999 path=a\n".ljust(512, b"\0"), "is damaged at byte 0"),
        (b"L", 1, 3000 * (b"a".ljust(512, b"\0") + CHAINED.tobuf(tarfile.GNU_FORMAT)), "is damaged at byte 0"),
        (b"x", 512, b"12 size=-12\n".ljust(512, b"\0"), "-12 is no size"),
        (
            b"x",
            512,
            b"29 size=99999999999999999999\n".ljust(512, b"\0"),
            "cut short: 1.jpg needs 99,999,999,999,999,999,999",
        ),
    ],
)
def test_hostile_headers_cost_no_memory(kind: bytes, size: int, content: bytes, message: str) -> None:
    info = tarfile.TarInfo("long")
    info.type, info.size = kind, size
    file = info.tobuf(tarfile.GNU_FORMAT) + content + tarfile.TarInfo("1.jpg").tobuf()
    with pytest.raises(DataError, match=message):
        list(walk_tar(io.BytesIO(file), "a.tar"))


def test_what_begins_like_no_tar_is_none(data_folder: Path) -> None:
    assert is_tar((data_folder / "clothing-10.tar").read_bytes()[:BLOCK])
    assert not is_tar(bytes(BLOCK))
    assert not is_tar((data_folder / "cifar10-png.tar.zst").read_bytes()[:BLOCK])


def test_a_tar_that_is_cut_off_between_two_members_is_refused(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", {"a/1.jpg": b"x" * 512, "b/1.jpg": b"y" * 512})
    data = path.read_bytes()
    for end in (2 * BLOCK, 4 * BLOCK):
        path.write_bytes(data[:end])
        with pytest.raises(DataError, match=f"has no end: no zeros stand at byte {end:,}, .*head -c 1024 /dev/zero"):
            _walk(path)
        path.write_bytes(data[:end] + bytes(1024))  # as the message says
        assert len(_walk(path)) == end // (2 * BLOCK)


def test_tars_one_behind_the_other_are_one(tmp_path: Path) -> None:
    files = [write_tar(tmp_path / f"{name}.tar", {f"{name}/1.jpg": name.encode()}) for name in "ab"]
    together = tmp_path / "c.tar"
    together.write_bytes(b"".join(path.read_bytes() for path in files))
    assert _content(together) == {"a/1.jpg": b"a", "b/1.jpg": b"b"}
    together.write_bytes(files[0].read_bytes() + bytes(3 << 20) + files[1].read_bytes())
    assert _content(together) == {"a/1.jpg": b"a", "b/1.jpg": b"b"}
    together.write_bytes(files[0].read_bytes() + b"what tapes leave behind" * 100)
    assert _content(together) == {"a/1.jpg": b"a"}
