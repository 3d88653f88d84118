"""What a file is, by its first bytes; and a compressed one decompressed, once and whole, into the scratch folder."""

from __future__ import annotations

import bz2
import gzip
import importlib
import lzma
import shutil
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from steadytrain.errors import DataError, storage_error
from steadytrain.records.sources.members import Say
from steadytrain.records.sources.tar import BLOCK, is_tar

MOST_RATIO = 200  # bytes out for each byte in, above which it is taken for a bomb
FREE_OF_RATIO = 256 << 20  # bytes out that any file may have

_CHUNK = 1 << 20
_COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ\0": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
_IMAGE = "an image", "give the folder with one folder of images for each class"
_WEB_PAGE = "a web page, not data", "download it again"
_REFUSED: dict[bytes, tuple[str, str]] = {
    b"\xff\xd8\xff": _IMAGE,
    b"\x89PNG\r\n": _IMAGE,
    b"GIF8": _IMAGE,
    b"BM": _IMAGE,
    b"RIFF": _IMAGE,
    b"II*\0": _IMAGE,
    b"MM\0*": _IMAGE,
    b"7z\xbc\xaf\x27\x1c": ("a 7z archive", "unpack it (7z x FILE) and give the folder"),
    b"Rar!": ("a RAR archive", "unpack it (unrar x FILE) and give the folder"),
    b"PAR1": ("a Parquet file", "write its images as a folder of classes, or as WebDataset shards"),
    b"ARROW1": ("an Arrow file", "write its images as a folder of classes, or as WebDataset shards"),
    b"\x89HDF\r\n": ("an HDF5 file", "write its images as a folder of classes"),
    b"\x93NUMPY": ("a NumPy array", "write its images as a folder of classes, or as idx files"),
    b"SQLite format 3\0": ("a database", "write its images as a folder of classes, or a table of paths and labels"),
    b"MATLAB 5.0": ("a MATLAB file", "write its images as a folder of classes, or a table of paths and labels"),
    b"%PDF": ("a PDF", "give a folder of images, an archive or a table"),
    b"version https://git-lfs": ("a Git LFS pointer, not the data", "fetch it with git lfs pull"),
    b"<!DOCTYPE": _WEB_PAGE,
    b"<!doctype": _WEB_PAGE,
    b"<html": _WEB_PAGE,
    b"<HTML": _WEB_PAGE,
}


@dataclass(frozen=True)
class Plain:
    """A file whose bytes can be read as they lie.

    Args:
        path: as it was named.
        at: where the bytes are: ``path``, or what came of it in the scratch folder.
        kind: ``tar``, ``zip``, ``rec``, ``idx``, ``text``, or empty where it is none of them.
        time: nanoseconds, when ``path`` was last changed.
    """

    path: Path
    at: Path
    kind: str
    time: int


def open_plain(path: Path, scratch: Path, say: Say) -> Plain:
    """Look at a file, and decompress it where it is compressed.

    Raises:
        DataError: it cannot be read, is empty, of a kind that is told with a remedy, damaged, or a bomb.
        StorageError: no room for what it decompresses to.
    """
    head = _head(path)
    at = path
    if compression := _compression(head):
        at = _decompress(path, compression, scratch, say)
        head = _head(at, path)
    return Plain(path, at, _kind(head, path), path.stat().st_mtime_ns)


def _head(path: Path, told: Path | None = None) -> bytes:
    told = told or path
    try:
        with path.open("rb") as file:
            head = file.read(4096)
    except OSError as error:
        raise DataError(f"cannot read {told}: {error.strerror}") from error
    if not head:
        raise DataError(f"{told} is empty: copy or download it again")
    return head


def _compression(head: bytes) -> str:
    return next((name for magic, name in _COMPRESSED.items() if head.startswith(magic)), "")


def _kind(head: bytes, path: Path) -> str:
    if head.startswith((b"PK\3\4", b"PK\5\6")):
        return "zip"
    if is_tar(head[:BLOCK]):
        return "tar"
    if head.startswith(b"\x0a\x23\xd7\xce"):
        return "rec"
    if len(head) > 4 and head[:2] == b"\0\0" and 0x08 <= head[2] <= 0x0E and 1 <= head[3] <= 8:
        return "idx"
    _refuse_known(head, path)
    is_text = b"\0" not in head or head.startswith((b"\xff\xfe", b"\xfe\xff"))
    return "text" if is_text else ""


def _refuse_known(head: bytes, path: Path) -> None:
    if head[:1] == b"\x80" and head[1:2] in (b"\2", b"\3", b"\4", b"\5"):
        raise DataError(
            f"{path} is a Python pickle, which runs what it holds when it is read: give the data in another form"
        )
    for magic, (what, remedy) in _REFUSED.items():
        if head.startswith(magic) and (len(magic) > 2 or b"\0" in head):
            raise DataError(f"{path} is {what}: {remedy.replace('FILE', path.name)}")


def _decompress(path: Path, compression: str, scratch: Path, say: Say) -> Path:
    opened, errors = _reader(path, compression)
    size = path.stat().st_size
    at = scratch / f"{len(list(scratch.iterdir())) if scratch.is_dir() else 0}-{path.stem}"
    try:
        scratch.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(scratch).free
        if free < size:
            raise DataError(
                f"{path} has to be decompressed and {scratch} has {free:,} bytes free, fewer than its {size:,}:"
                " free some room, or decompress it yourself to another disk"
            )
        say(f"decompressing {path} once, so that every image in it can be reached")
        with path.open("rb") as raw, opened(raw) as source, at.open("wb") as target:
            _copy(source, target, path, max(FREE_OF_RATIO, MOST_RATIO * size), errors)
    except OSError as error:
        at.unlink(missing_ok=True)
        raise storage_error(error, at) from error
    except BaseException:
        at.unlink(missing_ok=True)
        raise
    return at


def _copy(source: BinaryIO, target: BinaryIO, path: Path, most: int, errors: tuple[type[Exception], ...]) -> None:
    done = 0
    while chunk := _read(source, path, errors):
        done += len(chunk)
        if done > most:
            raise DataError(
                f"{path} decompresses to more than {MOST_RATIO} times its size: it is taken for a bomb; if it is none,"
                " decompress it yourself"
            )
        target.write(chunk)


def _read(source: BinaryIO, path: Path, errors: tuple[type[Exception], ...]) -> bytes:
    try:
        return source.read(_CHUNK)
    except EOFError:
        raise DataError(f"{path} is cut short: copy or download it again") from None
    except MemoryError:
        raise DataError(f"{path} needs more memory to be decompressed than there is: decompress it yourself") from None
    except errors as error:
        raise DataError(f"{path} is damaged ({error}): copy or download it again") from error


def _reader(path: Path, compression: str) -> tuple[Callable[[BinaryIO], BinaryIO], tuple[type[Exception], ...]]:
    """What makes a compressed file readable, and what that raises for a damaged one."""
    if compression == "gzip":
        return lambda raw: cast(BinaryIO, gzip.GzipFile(fileobj=raw)), (OSError, zlib.error)
    if compression == "bzip2":
        return lambda raw: cast(BinaryIO, bz2.BZ2File(raw)), (OSError, ValueError)
    if compression == "xz":
        return lambda raw: cast(BinaryIO, lzma.LZMAFile(raw)), (OSError, lzma.LZMAError)
    try:
        zstandard = importlib.import_module("zstandard")
    except ModuleNotFoundError:
        pass
    else:
        return lambda raw: zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True), (
            OSError,
            zstandard.ZstdError,
        )
    try:
        zstd = importlib.import_module("compression.zstd")  # Python 3.14
    except ModuleNotFoundError:
        raise DataError(
            f"{path} is compressed by zstd, which this Python cannot read: decompress it (zstd -d {path}), or"
            " pip install zstandard"
        ) from None
    return zstd.ZstdFile, (OSError, zstd.ZstdError)
