"""What a file is, by its content; compressed ones are decompressed whole, and bombs and cut ones refused."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import pickle
import shutil
import sys
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import zstandard
from tests.data.sources.samples import encoded, write_tar

from steadytrain.data.sources import archives
from steadytrain.data.sources.archives import SourceFile, open_source
from steadytrain.errors import DataError

COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": zstandard.compress,
}


def _open(path: Path, content: bytes | None = None) -> SourceFile:
    if content is not None:
        path.write_bytes(content)
    return open_source(path, path.parent / "scratch", lambda _: None)


@pytest.mark.parametrize("suffix", COMPRESS)
def test_a_compressed_file_is_decompressed_once_and_its_content_looked_at(tmp_path: Path, suffix: str) -> None:
    plain = write_tar(tmp_path / "a.tar", {"1.png": encoded(1)}).read_bytes()
    path = tmp_path / f"named.anyhow.{suffix}"
    path.write_bytes(COMPRESS[suffix](plain) * (2 if suffix == "gz" else 1))  # gzip may be several in one
    messages: list[str] = []
    opened = open_source(path, tmp_path / "scratch", messages.append)
    assert opened.kind == "tar"
    assert opened.path == path
    assert opened.stored_at.read_bytes() == plain * (2 if suffix == "gz" else 1)
    assert opened.time == path.stat().st_mtime_ns
    assert len(messages) == 1 and "decompressing" in messages[0]


@pytest.mark.parametrize("suffix", ["gz", "bz2", "xz"])
def test_truncated_or_damaged_source_is_an_error_and_leaves_no_files(tmp_path: Path, suffix: str) -> None:
    whole = COMPRESS[suffix](np.random.default_rng(0).bytes(50_000))
    damaged = bytearray(whole)
    damaged[len(whole) // 2] ^= 0xFF
    with pytest.raises(DataError, match=r"a\.x is cut short: copy or download it again"):
        _open(tmp_path / "a.x", whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"a\.x is (damaged|cut short)"):
        _open(tmp_path / "a.x", bytes(damaged))
    assert list((tmp_path / "scratch").iterdir()) == []


@pytest.mark.parametrize("suffix", COMPRESS)
def test_a_bomb_is_refused(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "FREE_OF_RATIO", 1 << 20)
    bomb = COMPRESS[suffix](bytes(32 << 20))
    with pytest.raises(DataError, match="more than 200 times its size: it may be a bomb"):
        _open(tmp_path / "a.x", bomb)
    assert list((tmp_path / "scratch").iterdir()) == []


def test_room_is_looked_for_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(100, 90, 10))
    with pytest.raises(DataError, match=r"has to be decompressed and .*scratch has 10 bytes free, fewer than its \d+"):
        _open(tmp_path / "a.gz", gzip.compress(b"x" * 1000))


def test_zstd_without_a_module_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    monkeypatch.setitem(sys.modules, "compression.zstd", None)
    monkeypatch.setitem(sys.modules, "compression", None)
    with pytest.raises(DataError, match=r"decompress it \(zstd -d .*a\.zst\), or pip install zstandard"):
        _open(tmp_path / "a.zst", zstandard.compress(b"x"))


def _npy() -> bytes:
    file = io.BytesIO()
    np.save(file, np.zeros(3))
    return file.getvalue()


REFUSED = {
    "pickle": (pickle.dumps([1]), "a Python pickle: do not load it"),
    "image": (encoded(1), "a PNG image: put the images of each class into their own folder"),
    "npy": (_npy(), "a NumPy array"),
    "page": (b"<!doctype html><html>404</html>", "an HTML page: fetch it again"),
    "pointer": (b"version https://git-lfs.github.com/spec/v1\noid", "a Git LFS pointer, .* git lfs pull"),
    "rar": (b"Rar!\x1a\x07\0", "a RAR archive: unpack it"),
    "empty": (b"", "is empty: copy or download it again"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_kinds_are_named_with_a_remedy(tmp_path: Path, case: str) -> None:
    content, message = REFUSED[case]
    with pytest.raises(DataError, match=rf"a\.x is {message.removeprefix('is ')}"):
        _open(tmp_path / "a.x", content)


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"path,label\na.jpg,cat\n", "text"),
        (b"BMW_1.jpg,bmw\n", "text"),
        (b"MZ.jpg 1\n", "text"),
        ("a.jpg,é".encode("utf-16"), "text"),
        (b"12\t1.000000\tcat/1.jpg\n", "list"),
        (b"12\tcat/1.jpg\tcat\n", "text"),
        (b"\0\0\x08\x03\0\0\0\1", "idx"),
        (b"\x01\x02\x03\x04\0\0", ""),
    ],
)
def test_kinds_by_content(tmp_path: Path, content: bytes, kind: str) -> None:
    assert _open(tmp_path / "a.anything", content).kind == kind
