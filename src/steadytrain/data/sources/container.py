"""What a file is, by its first bytes; and a compressed one decompressed, once and whole, into the scratch folder."""

from __future__ import annotations

import bz2
import gzip
import importlib
import lzma
import shutil
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from steadytrain.data.checking.file_types import LOOK_AT, recognise
from steadytrain.data.sources.listing import is_image
from steadytrain.data.sources.members import Say
from steadytrain.data.sources.tar import BLOCK, is_tar
from steadytrain.errors import DataError, storage_error

MOST_RATIO = 200  # bytes out for each byte in, above which it is taken for a bomb
FREE_OF_RATIO = 256 << 20  # bytes out that any file may have

_CHUNK = 1 << 20
_COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ\0": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
_MAY_BE_TEXT = ("a text", "a list of images (.lst)", "a BMP image", "a program")  # two letters prove nothing


@dataclass(frozen=True)
class Plain:
    """A file whose bytes can be read as they lie.

    Args:
        path: as it was named.
        at: where the bytes are: ``path``, or what came of it in the scratch folder.
        kind: ``tar``, ``zip``, ``rec``, ``idx``, ``list`` (MXNet's), ``text``, or empty where it is none of them.
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


def is_compressed(path: Path) -> bool:
    """Whether a file is compressed as a whole. Raises DataError where it cannot be read, or is empty."""
    return bool(_compression(_head(path)))


def open_all(paths: Sequence[Path], scratch: Path, say: Say) -> list[Plain]:
    """Look at several files; that some are decompressed is said once."""
    compressed = [path for path in paths if _compression(_head(path))]
    if len(compressed) > 1:
        first = compressed[0].name
        say(f"decompressing {len(compressed):,} files once ({first}, ...), so that every image can be reached")
    return [open_plain(path, scratch, say if len(compressed) == 1 else lambda _: None) for path in paths]


def _head(path: Path, told: Path | None = None) -> bytes:
    told = told or path
    try:
        with path.open("rb") as file:
            head = file.read(LOOK_AT)
    except OSError as error:
        raise DataError(f"cannot read {told}: {error.strerror}") from error
    if not head:
        raise DataError(f"{told} is empty: copy or download it again")
    return head


def _compression(head: bytes) -> str:
    return next((name for magic, name in _COMPRESSED.items() if head.startswith(magic)), "")


def _kind(head: bytes, path: Path) -> str:
    if is_tar(head[:BLOCK]) or head[257:262] == b"ustar":
        return "tar"
    if head.startswith(b"\x0a\x23\xd7\xce"):
        return "rec"
    if len(head) > 4 and head[:2] == b"\0\0" and 0x08 <= head[2] <= 0x0E and 1 <= head[3] <= 8:
        return "idx"
    told = recognise(head, len(head))
    if told is not None and told.name == "a zip archive":
        return "zip"
    is_text = b"\0" not in head or head.startswith((b"\xff\xfe", b"\xfe\xff"))
    if told is not None and not (is_text and told.name in _MAY_BE_TEXT):
        raise DataError(f"{path} is {told.name}: {told.advice}")
    if told is not None and told.name.startswith("a list") and is_image(head.splitlines()[0].decode().rstrip()):
        return "list"
    return "text" if is_text else ""


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
        say(f"decompressing {path} once, so that every image can be reached")
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
