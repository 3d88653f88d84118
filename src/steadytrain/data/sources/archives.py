"""Files as sources: what a file is, by its first bytes; its decompression; the members of tars and zips.

``tarfile`` and ``zipfile`` read the headers. Around them stand limits: extension headers of a tar are at most 1 MiB,
members of a zip may not share their bytes, a compressed file may not decompress to 200 times its size, and a name is
shown but never used as a path. Nothing is unpacked: a member is a name and the place of its bytes.
"""

from __future__ import annotations

import bz2
import gzip
import importlib
import io
import lzma
import posixpath
import re
import shlex
import shutil
import stat
import struct
import tarfile
import zipfile
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, BinaryIO, NamedTuple, cast

import numpy as np

from steadytrain.data.filenames import is_ignored, is_image
from steadytrain.data.images.file_types import LOOK_AT, recognise
from steadytrain.data.names import Names
from steadytrain.data.sources.listing import MOST_RATIO, FileList, Pieces
from steadytrain.data.sources.rows import is_json_lines, is_of_paths
from steadytrain.data.sources.zip_names import are_plain, ask_for_code_page, decode
from steadytrain.data.storage.local_files import open_patiently
from steadytrain.errors import DataError, read_errors, storage_error
from steadytrain.format import Say, count, printable

FREE_OF_RATIO = 256 << 20  # bytes out that any file may have

_CHUNK = 1 << 20
_COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ\0": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
_MAY_BE_TEXT = ("text", "a list of images (.lst)", "a BMP image")  # two letters prove nothing
_MOST_LINKS = 8  # one behind the other
_BLOCK = 512
_MOST_EXTENSION = 1 << 20  # bytes of a long name or of pax records
_TAR_KINDS = {
    **dict.fromkeys((tarfile.LNKTYPE, tarfile.SYMTYPE), "a link"),
    **dict.fromkeys((tarfile.CHRTYPE, tarfile.BLKTYPE), "a device"),
    **dict.fromkeys((tarfile.DIRTYPE, b"D"), "folder"),
    tarfile.FIFOTYPE: "a pipe",
    b"M": "the rest of another volume's file",
    b"V": "a volume's label",
}
_ZIP_METHODS = {9: "deflate64", 12: "bzip2", 14: "lzma", 93: "zstd", 95: "xz", 99: "AES"}
_ENCRYPTED, _UTF8 = 0x1, 0x800
_UNICODE_PATH = 0x7075  # APPNOTE 4.6.9
_ENDING = re.compile(r"(\.tar(\.\w+)?|\.tgz|\.zip)$", re.IGNORECASE)


@dataclass(frozen=True)
class SourceFile:
    """A file whose bytes can be read as they lie."""

    path: Path  # as the user named it
    stored_at: Path  # where the bytes are: ``path``, or the decompressed copy in the scratch folder
    kind: str  # tar, zip, rec, idx, parquet, arrow, list (MXNet's), text, or empty where it is none of them
    time: int  # ns, when ``path`` was last changed
    zip_names: str = ""  # the code page of a zip's names, where the user has named it


def open_source(path: Path, scratch: Path, say: Say, zip_names: str = "") -> SourceFile:
    """Recognise a file, and decompress it where it is compressed; ``zip_names``: the code page of a zip's names.

    Raises:
        DataError: it cannot be read, is empty, of a kind that is refused with a remedy, damaged, or a bomb.
        StorageError: no room to decompress it.
    """
    if path.suffix.lower() == ".lst" and not is_of_paths(path):
        return SourceFile(path, path, "list", path.stat().st_mtime_ns)
    start = _read_start(path)
    stored_at = path
    if compression := _compression(start):
        stored_at = unpack(path, _decompressed(path, compression), scratch, say, path.stat().st_size)
        start = _read_start(stored_at, path)
    kind = _kind(start, path, stored_at.stat().st_size)
    return SourceFile(path, stored_at, kind, path.stat().st_mtime_ns, zip_names)


def open_sources(paths: Sequence[Path], scratch: Path, say: Say, zip_names: str = "") -> list[SourceFile]:
    """Open several files; that some are decompressed is said once."""
    compressed = [path for path in paths if path.suffix.lower() != ".lst" and is_compressed(path)]
    if len(compressed) > 1:
        first = compressed[0].name
        say(f"decompressing {len(compressed):,} files once ({first}, ...), so that every image can be reached")
    say = say if len(compressed) == 1 else lambda _: None
    return [open_source(path, scratch, say, zip_names) for path in paths]


def is_compressed(path: Path) -> bool:
    """Return whether a file is compressed as a whole. Raises DataError where it cannot be read, or is empty."""
    return bool(_compression(_read_start(path)))


def _compression(start: bytes) -> str:
    return next((name for magic, name in _COMPRESSED.items() if start.startswith(magic)), "")


def _read_start(path: Path, name: Path | None = None) -> bytes:
    with read_errors(name or path), open_patiently(path) as file:
        start = file.read(LOOK_AT)
    if not start:
        raise DataError(f"{name or path} is empty: copy or download it again")
    return start


def _kind(start: bytes, path: Path, size: int) -> str:
    if is_tar(start) or start[257:262] == b"ustar":
        return "tar"
    if start.startswith(b"\x0a\x23\xd7\xce"):
        return "rec"
    if len(start) > 4 and start[:2] == b"\0\0" and 0x08 <= start[2] <= 0x0E and 1 <= start[3] <= 8:
        return "idx"
    if start.startswith((b"PAR1", b"\xff\xff\xff\xff")):
        return "parquet" if start[0] == ord("P") else "arrow"
    if is_json_lines(start):
        return "text"
    file_type = recognise(start, size)
    if file_type is not None and file_type.name == "a zip archive":
        return "zip"
    is_text = b"\0" not in start or start.startswith((b"\xff\xfe", b"\xfe\xff"))
    if file_type is not None and not (is_text and file_type.name in _MAY_BE_TEXT):
        raise DataError(f"{path} is {file_type.name}: {file_type.advice}")
    if file_type is not None and file_type.name.startswith("a list"):
        return "list" if is_image(start.splitlines()[0].decode(errors="replace").rstrip()) else "text"
    return "text" if is_text else ""


def unpack(path: Path, chunks: Iterable[bytes], scratch: Path, say: Say, size: int) -> Path:
    """Write what ``size`` bytes at ``path`` hold into the scratch folder; return where. Raises as open_source."""
    most = max(FREE_OF_RATIO, MOST_RATIO * size)
    target = scratch / f"{len(list(scratch.iterdir())) if scratch.is_dir() else 0}-{path.stem}"
    try:
        scratch.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(scratch).free
        if free < size:
            raise DataError(
                f"{path} has to be decompressed and {scratch} has {free:,} bytes free, fewer than its {size:,}:"
                " free some room, or decompress it yourself to another disk"
            )
        say(f"decompressing {path} once, so that every image can be reached")
        with target.open("wb") as file:
            for chunk in chunks:
                if file.tell() + len(chunk) > most:
                    raise DataError(
                        f"{path} decompresses to more than {MOST_RATIO} times its size: it may be a bomb; if it"
                        " is none, decompress it yourself"
                    )
                file.write(chunk)
    except OSError as error:
        target.unlink(missing_ok=True)
        raise storage_error(error, target) from error
    except BaseException:
        target.unlink(missing_ok=True)
        raise
    return target


def _decompressed(path: Path, compression: str) -> Iterator[bytes]:
    """The content of a compressed file, a chunk at a time. Raises DataError where it is damaged."""
    damaged: tuple[type[Exception], ...] = (OSError, ValueError, zlib.error, lzma.LZMAError)
    openers: dict[str, Callable[[BinaryIO], Any]] = {"gzip": gzip.open, "bzip2": bz2.open, "xz": lzma.open}
    if compression == "zstd":
        openers["zstd"], error_type = _zstd(path)
        damaged = (*damaged, error_type)
    try:
        with open_patiently(path) as raw, openers[compression](raw) as source:
            while chunk := source.read(_CHUNK):
                yield chunk
    except EOFError:
        raise DataError(f"{path} is cut short: {_whole_again(str(path))}") from None
    except MemoryError:
        raise DataError(f"{path} needs more memory to be decompressed than there is: decompress it yourself") from None
    except damaged as error:
        raise DataError(f"{path} is damaged ({error}): copy or download it again") from error


def _whole_again(name: str) -> str:
    """The remedy for a file that is cut short, perhaps on purpose: ``photos.zip.001``, ``photos.tar.gz.partaa``."""
    stem, dot, ending = name.rpartition(".")
    if re.fullmatch(r"0\d+|part\w+", ending) is None:
        return "copy or download it again"
    return f"it is one of several parts, so join them: cat {shlex.quote(stem + dot)}* > {shlex.quote(stem)}"


def _zstd(path: Path) -> tuple[Callable[[BinaryIO], Any], type[Exception]]:
    """Return a reader of zstd, and the error that it raises."""
    with suppress(ModuleNotFoundError):
        zstandard = importlib.import_module("zstandard")
        reader = partial(zstandard.ZstdDecompressor().stream_reader, read_across_frames=True)
        return reader, zstandard.ZstdError
    with suppress(ModuleNotFoundError):
        zstd = importlib.import_module("compression.zstd")  # Python 3.14
        return zstd.open, zstd.ZstdError
    raise DataError(
        f"{path} is compressed by zstd, which this Python cannot read: decompress it (zstd -d {path}), or"
        " pip install zstandard"
    )


class Member(NamedTuple):
    """One member of an archive."""

    name: str  # as the archive spells it; bytes that are not UTF-8 are escaped as in file names
    offset: int  # byte of the archive where its content begins
    stored: int  # bytes it takes there
    size: int  # bytes it has once inflated
    deflated: bool = False
    kind: str = "file"  # or folder, or what else it is: a link
    target: str = ""  # of a link, the name of the member that it leads to, where that is known
    crc: int = -1  # the CRC-32 that its bytes must have once inflated; -1 where the archive has none


def read_archives(archives: Sequence[SourceFile], say: Say, *, by_stem: bool = False) -> FileList:
    """List what archives, tars or zips, hold, in their order and in that of their members.

    With ``by_stem`` each archive's members lie in a folder named as the archive is: one archive for each class.

    Raises:
        DataError: one is damaged, or no archive; by stem, two have one name.
    """

    def walk(archive: SourceFile) -> Iterator[Member]:
        with open_patiently(archive.stored_at) as file:
            of = str(archive.path)
            members = walk_tar(file, of) if archive.kind == "tar" else walk_zip(file, of, archive.zip_names)
            yield from _move_under(_stem(archive.path.name), members) if by_stem else members

    if by_stem:
        _require_other_stems([str(archive.path) for archive in archives])
    for archive in archives:
        if archive.kind not in ("tar", "zip"):
            raise DataError(f"{archive.path} is no archive: give tars or zips alone")
    return _gather(archives, map(walk, archives), say)


def holds_only_tars(files: FileList) -> bool:
    """Return whether an archive holds only tars, hidden files and texts aside."""
    bases = (name.rpartition("/")[2] for name in files.names)
    suffixes = {posixpath.splitext(base)[1].lower() for base in bases if not base.startswith(".")}
    return ".tar" in suffixes and suffixes <= {".tar", ".txt", ".md", ".csv", ""}


def read_inner_tars(outer: SourceFile, say: Say) -> FileList:
    """List what the tars inside a tar hold: each one's members in a folder named as that tar is.

    Raises:
        DataError: the outer or an inner one is damaged, or two have one name.
    """

    def walk() -> Iterator[Member]:
        with open_patiently(outer.stored_at) as file:
            tars = []
            for member in walk_tar(file, str(outer.path)):
                base = member.name.rpartition("/")[2]
                if member.kind == "file" and base.lower().endswith(".tar") and not is_ignored(base):
                    tars.append(member)
            _require_other_stems([tar.name for tar in tars], of=f" in {outer.path}")
            for tar in tars:
                of = f"{tar.name} in {outer.path}"
                inner = walk_tar(file, of, start=tar.offset, end=tar.offset + tar.size)
                yield from _move_under(_stem(tar.name), inner)

    return _gather([outer], [walk()], say)


def _gather(archives: Sequence[SourceFile], walks: Iterable[Iterable[Member]], say: Say) -> FileList:
    """Put members of archives into columns; a link to another member is that member once more, behind all others."""
    names = Names()
    folders: set[str] = set()
    columns = {"file": array("i"), "offset": array("q"), "stored": array("q")}
    if any(archive.kind == "zip" for archive in archives):  # members of tars lie there as they are
        columns |= {"size": array("q"), "deflated": array("b"), "crc": array("q")}
    skipped: list[str] = []
    num_skipped = 0

    def add(name: str, values: Iterable[int]) -> None:
        names.append(name)
        for column, value in zip(columns.values(), values, strict=False):
            column.append(value)

    for number, members in enumerate(walks):
        first = len(names)
        links: list[Member] = []
        others: list[Member] = []
        for member in members:
            if ".." in member.name and ".." in member.name.split("/"):
                others.append(member._replace(kind="a path with .."))
            elif member.kind == "file":
                add(member.name, (number, member.offset, member.stored, member.size, member.deflated, member.crc))
            elif member.kind == "folder":
                folders.add(member.name)
            else:
                (links if member.target else others).append(member)
        rows = {posixpath.normpath(names[row]): row for row in range(first, len(names))} if links else {}
        targets = {posixpath.normpath(link.name): posixpath.normpath(link.target) for link in links}
        for link in links:
            name = targets[posixpath.normpath(link.name)]
            for _ in range(_MOST_LINKS):
                name = name if name in rows else targets.get(name, name)
            if name in rows:
                add(link.name, [column[rows[name]] for column in columns.values()])
            else:
                others.append(link)
        num_skipped += len(others)
        skipped += [f"{printable(member.name)}, {member.kind}" for member in others[: 3 - len(skipped)]]
    if num_skipped:
        say(f"{count(num_skipped, 'member')} skipped ({'; '.join(skipped)}{'; ...' * (num_skipped > len(skipped))})")
    table = {name: np.asarray(column) for name, column in columns.items()}
    size = table.get("size", table["stored"])
    deflated = table["deflated"].astype(np.bool_) if "deflated" in table else None
    return FileList(
        names=names,
        sizes=size,
        times=np.array([archive.time for archive in archives], np.int64)[table["file"]],
        pieces=Pieces(
            paths=tuple(str(archive.stored_at) for archive in archives),
            file=table["file"],
            offset=table["offset"],
            size=table["stored"],
            deflated=deflated,
            crc=table.get("crc"),
            inflated=size if deflated is not None and deflated.any() else None,
        ),
        archives=tuple(archive.path.name for archive in archives),
        folders=frozenset(folders),
    )


def _move_under(folder: str, members: Iterable[Member]) -> Iterator[Member]:
    for member in members:
        target = f"{folder}/{member.target}" if member.target else ""
        yield member._replace(name=f"{folder}/{member.name}", target=target)


def _require_other_stems(names: Sequence[str], *, of: str = "") -> None:
    """Refuse archives whose images would come into one class, perhaps under one name."""
    known: dict[str, str] = {}
    for name in names:
        if (other := known.setdefault(_stem(name), name)) != name:
            raise DataError(f"{other} and {name}{of} have one name, and each is a class of that name: rename one")


def _stem(name: str) -> str:
    """The name of an archive without its suffix."""
    base = Path(name).name
    return _ENDING.sub("", base) or base


def is_tar(start: bytes) -> bool:
    """Return whether a file that begins with these bytes (512 or more) is a tar: its first header's sum fits.

    >>> is_tar(b"PK" * 256)
    False
    """
    try:
        tarfile.TarInfo.frombuf(start[:_BLOCK], "utf-8", "surrogateescape")
    except tarfile.HeaderError:
        return False
    return True


class _BoundedReads:
    """A file as ``tarfile`` reads headers from it: no read is unbounded, or goes beyond the tar's end."""

    def __init__(self, file: BinaryIO, end: int, of: str) -> None:
        self._file, self._end, self._of = file, end, of
        self.seek, self.tell = file.seek, file.tell

    def read(self, size: int) -> bytes:
        at = self.tell()
        if not 0 <= size <= _MOST_EXTENSION:
            raise DataError(
                f"{self._of} is damaged at byte {at - _BLOCK:,}: a name of {size:,} bytes, more than"
                f" {_MOST_EXTENSION:,}"
            )
        with read_errors(self._of):
            data = self._file.read(max(0, min(size, self._end - at)))
        if len(data) < size:
            place = at + len(data)
            raise DataError(f"{self._of} is cut short at byte {place:,}, within a header: copy or download it again")
        return data


TAR_ERRORS = (tarfile.TarError, ValueError, ArithmeticError, LookupError, RecursionError)
"""Errors that ``tarfile`` raises for headers which it cannot read: it documents the first."""


def walk_tar(file: BinaryIO, of: str, *, start: int = 0, end: int | None = None) -> Iterator[Member]:
    """Every member of the tar that lies in ``file`` from byte ``start`` to ``end``, by default all of the file.

    Tars that were put one behind the other (``cat a.tar b.tar``) are read as one. A tar that stops without the zeros
    that end it was cut short, perhaps between two members, and is refused.

    Raises:
        DataError: damaged or cut short; names the byte, and the tar as ``of`` does.
    """
    end = file.seek(0, 2) if end is None else end
    source = _BoundedReads(file, end, of)
    # tarfile itself takes any damage behind the first member for the end: so headers are asked for one by one.
    empty = io.BytesIO(bytes(2 * _BLOCK))
    with tarfile.TarFile(fileobj=empty, encoding="utf-8", errors="surrogateescape") as headers:
        headers.fileobj = cast(IO[bytes], source)
        at = start
        while True:
            if at >= end:
                raise DataError(
                    f"{of} has no end: no zeros stand at byte {end:,}, behind its last member, so it was cut short"
                    " there or never closed: copy or make it again (if that is all there was: head -c 1024 /dev/zero"
                    f" >> {of})"
                )
            source.seek(at)
            try:
                info = tarfile.TarInfo.fromtarfile(headers)
            except DataError:
                raise
            except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
                next_tar = _skip_zeros(source, at, end)
                if next_tar is None:
                    return
                at = next_tar
                continue
            except TAR_ERRORS as error:
                raise DataError(
                    f"{of} is damaged at byte {at:,} (no tar header there): copy or make it again"
                ) from error
            member = _tar_member(info)
            if info.size < 0 or headers.offset <= at or "\0" in info.name:
                problem = "a name with a zero byte" if info.size >= 0 else f"{info.size} is no size"
                raise DataError(f"{of} is damaged at byte {at:,}: {problem}")
            if member.offset + member.size > end:
                raise DataError(
                    f"{of} is cut short: {printable(member.name)} needs {member.size:,} bytes from byte"
                    f" {member.offset:,} on, and the tar ends at {end:,}: copy or download it again"
                )
            yield member
            at = headers.offset


def _skip_zeros(source: _BoundedReads, at: int, end: int) -> int | None:
    """Find the byte at which another tar follows the zeros that end one; None where none does."""
    while at + _BLOCK <= end:
        source.seek(at)
        data = source.read(min(_CHUNK, (end - at) // _BLOCK * _BLOCK))
        if text := data.lstrip(b"\0"):
            place = (len(data) - len(text)) // _BLOCK * _BLOCK
            return at + place if is_tar(data[place : place + _BLOCK]) else None
        at += len(data)
    return None


def _tar_member(info: tarfile.TarInfo) -> Member:
    name = info.name
    kind = _TAR_KINDS.get(info.type) or ("folder" if name.endswith("/") else "file")
    size = info.size if kind == "file" or info.type not in tarfile.SUPPORTED_TYPES else 0
    target = ""
    if info.type == tarfile.LNKTYPE:
        target = info.linkname
    elif info.type == tarfile.SYMTYPE:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(name), info.linkname))
    if info.issparse():
        kind, size = "a sparse file", 0
    return Member(name, info.offset_data, size, size, kind=kind, target=target)


def walk_zip(file: BinaryIO, of: str, zip_names: str = "") -> Iterator[Member]:
    """Every member of a zip, which messages call ``of``: stored and deflated ones, zip64 included.

    Raises:
        DataError: damaged, cut short, in several volumes, encrypted, images packed by another method, or names of
            folders by a code page that nothing tells, ``zip_names`` neither.
    """
    size = file.seek(0, 2)
    try:
        archive = zipfile.ZipFile(file)
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, OverflowError, struct.error) as error:
        if "not a zip file" in str(error):
            error_text = f"is cut short (its directory, at the end, is missing): {_whole_again(of)}"
        else:
            error_text = f"is damaged ({error}): copy or download it again"
        raise DataError(f"{of} {error_text}") from error
    total = 0
    code_page = _code_page(archive.infolist(), of, zip_names)
    for info in archive.infolist():
        name, kind = _zip_name(info, code_page), "file"
        mode = info.external_attr >> 16 if info.create_system in (3, 19) else 0  # Unix, macOS
        if name.endswith("/") or stat.S_ISDIR(mode):
            kind = "folder"
        elif stat.S_IFMT(mode) not in (0, stat.S_IFREG):
            kind = "a link" if stat.S_ISLNK(mode) else "a device"
        if info.volume:
            raise DataError(f"{of} is one of several volumes: join them (zip -s 0 {of} --out whole.zip)")
        total += info.compress_size
        if total > size:  # members that share their bytes: a bomb
            raise DataError(f"{of}: its members need more bytes than it has: it is damaged, or a bomb")
        if kind != "file":
            yield Member(name, 0, 0, 0, kind=kind)
            continue
        if info.flag_bits & _ENCRYPTED:
            raise DataError(f"{of} is encrypted ({printable(name)}): unzip it with its password and give the folder")
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            method = _ZIP_METHODS.get(info.compress_type, f"method {info.compress_type}")
            if is_image(name):
                raise DataError(
                    f"{of} packs {printable(name)} by {method}; stored and deflated members are read:"
                    " unzip it and give the folder"
                )
            yield Member(name, 0, 0, 0, kind=f"packed by {method}")
            continue
        deflated = info.compress_type == zipfile.ZIP_DEFLATED
        offset = _zip_content(file, info)
        if (
            offset < 0
            or offset + info.compress_size > archive.start_dir
            or not (deflated or info.file_size == info.compress_size)
        ):
            raise DataError(
                f"{of} is damaged ({printable(name)}) at byte {info.header_offset:,}: copy or download it again"
            )
        yield Member(name, offset, info.compress_size, info.file_size, deflated, crc=info.CRC)


def _zip_content(file: BinaryIO, info: zipfile.ZipInfo) -> int:
    """Find a member's first byte, behind a local header with lengths of its own; -1 where there is none."""
    if info.header_offset < 0:
        return -1
    file.seek(info.header_offset)
    header = file.read(30)
    if len(header) < 30 or not header.startswith(b"PK\3\4"):
        return -1
    name, extra = struct.unpack("<2H", header[26:])
    return info.header_offset + 30 + int(name + extra)


def _zip_name(info: zipfile.ZipInfo, code_page: str) -> str:
    """A member's name; ``code_page`` is that of names that are not marked as UTF-8."""
    name = _unicode_name(info) or info.orig_filename
    if (data := _unmarked_name(info)) is not None:
        name = decode(data, code_page)
    name = name.partition("\0")[0]
    # Old Windows programs; elsewhere a backslash is a letter like any other.
    return name.replace("\\", "/") if info.create_system == 0 and "/" not in name else name


def _unmarked_name(info: zipfile.ZipInfo) -> bytes | None:
    """The bytes of a name in an encoding that is not told; None for another name."""
    if info.flag_bits & _UTF8 or info.orig_filename.isascii() or _unicode_name(info):
        return None
    return info.orig_filename.encode("cp437")


def _are_utf8(names: Iterable[bytes]) -> bool:
    try:
        return bool([name.decode("utf-8") for name in names])
    except UnicodeDecodeError:
        return False


def _unicode_name(info: zipfile.ZipInfo) -> str:
    """The name in the extra field that Info-ZIP's programs write it to; empty where there is none for this name."""
    extra = b"" if info.flag_bits & _UTF8 else info.extra
    while len(extra) >= 4:
        kind, size = struct.unpack("<2H", extra[:4])
        field, extra = extra[4 : 4 + size], extra[4 + size :]
        if kind == _UNICODE_PATH and field[:1] == b"\1" and len(field) > 5:
            checksum = zlib.crc32(info.orig_filename.encode("cp437"))
            if struct.unpack("<I", field[1:5])[0] == checksum:
                return field[5:].decode("utf-8", "replace")
    return ""


def _code_page(infos: Sequence[zipfile.ZipInfo], of: str, named: str) -> str:
    """Return the code page of names that are not marked as UTF-8; ``named`` by the user, if it is not empty.

    Raises:
        DataError: folders have such names, none is named, and they are neither UTF-8 (macOS) nor the standard's.
    """
    names = [name for info in infos if (name := _unmarked_name(info)) is not None]
    if named or not names or _are_utf8(names):
        return named or "utf-8"
    has_folders = not all(name.rpartition(b"/")[0].isascii() for name in names)
    if has_folders and not are_plain(names):
        raise ask_for_code_page(names, of)
    return "cp437"  # or names of files alone, which are shown and no more
