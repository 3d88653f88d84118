"""Walk through a zip by its central directory, stored and deflated members, zip64 included.

Written out, because the standard library's reader keeps an object of half a kilobyte for each member. The format is
that of PKWARE's APPNOTE 6.3.10; a name without the UTF-8 flag is UTF-8 all the same where it can be (macOS), else code
page 437.
"""

from __future__ import annotations

import stat
import struct
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

from steadytrain.data.sources.listing import is_image, shown
from steadytrain.data.sources.members import Member
from steadytrain.errors import DataError

_END = struct.Struct("<4s4H2IH")
_END64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR = struct.Struct("<4sIQI")
_ENTRY = struct.Struct("<4s6H3I5H2I")
_LOCAL = struct.Struct("<4s5H3I2H")
_FULL, _FULL_COUNT = 0xFFFFFFFF, 0xFFFF
_STORED, _DEFLATED = 0, 8
_METHODS = {9: "deflate64", 12: "bzip2", 14: "lzma", 93: "zstd", 95: "xz", 99: "AES"}
_ENCRYPTED, _UTF8 = 0x1, 0x800


def walk(file: BinaryIO, *, of: str = "") -> Iterator[Member]:
    """Every member of a zip.

    Args:
        file: open for reading.
        of: what to call the zip in messages.

    Raises:
        DataError: damaged, cut short, in several volumes, encrypted, or images packed by another method.
    """
    zipped = _Zip(file, file.seek(0, 2), of or getattr(file, "name", "the zip"))
    directory = zipped.directory()
    at, taken = directory.offset, 0
    for _ in range(directory.num_members):
        entry = zipped.entry(at, directory)
        at += entry.length
        taken += entry.stored
        if taken > zipped.size:  # members that share their bytes: a bomb
            raise DataError(f"{zipped.of}: its members need more bytes than it has: it is damaged, or a bomb")
        yield zipped.member(entry, directory)


class _Directory(NamedTuple):
    """The central directory. ``shift``: bytes that stand before the zip itself (a self-extracting one)."""

    offset: int
    end: int
    num_members: int
    shift: int


class _Entry(NamedTuple):
    name: str
    kind: str
    method: int
    stored: int
    size: int
    local: int
    length: int
    crc: int


class _Zip(NamedTuple):
    """One zip and what to call it."""

    file: BinaryIO
    size: int
    of: str

    def read(self, at: int, size: int) -> bytes:
        try:
            self.file.seek(at)
            data = self.file.read(size)
        except (OSError, ValueError) as error:
            raise DataError(f"cannot read {self.of}: {error}") from error
        if len(data) < size:
            raise self.damaged("is cut short", at)
        return data

    def damaged(self, what: str, at: int) -> DataError:
        return DataError(f"{self.of} {what} at byte {at:,}: copy or download it again")

    def directory(self) -> _Directory:
        """Found from the end of the file: behind the last record may stand a comment of up to 64 KiB."""
        start = max(self.size - _END.size - 0xFFFF, 0)
        tail = self.read(start, self.size - start)
        found = tail.rfind(b"PK\5\6")
        if found < 0 or found + _END.size > len(tail):
            raise DataError(f"{self.of} is cut short (its directory, at the end, is missing): download it again")
        at = start + found
        _, disk, first, _, count, size, offset, _ = _END.unpack_from(tail, found)
        end = self._end64(at, needed=_FULL in (size, offset) or count == _FULL_COUNT)
        if end != at:
            _, _, _, _, disk, first, _, count, size, offset = _END64.unpack(self.read(end, _END64.size))
        if disk or first:
            raise DataError(f"{self.of} is one of several volumes: join them (zip -s 0 {self.of} --out whole.zip)")
        shift = end - size - offset
        if shift < 0:
            raise self.damaged("is damaged", at)
        return _Directory(offset + shift, end, count, shift)

    def _end64(self, at: int, *, needed: bool) -> int:
        """Where the zip64 form of the end's record is; the end itself where there is none."""
        locator = self.read(at - _LOCATOR.size, _LOCATOR.size) if at >= _LOCATOR.size else bytes(_LOCATOR.size)
        magic, _, offset, _ = _LOCATOR.unpack(locator)
        # Bytes that stand before the zip move it as well.
        for place in (offset, at - _LOCATOR.size - _END64.size) if magic == b"PK\6\7" else ():
            if 0 <= place <= self.size - _END64.size and self.read(place, 4) == b"PK\6\6":
                return place
        if needed and magic == b"PK\6\7":
            raise self.damaged("is damaged", at)
        return at

    def entry(self, at: int, directory: _Directory) -> _Entry:
        """One line of the directory."""
        if at + _ENTRY.size > directory.end:
            raise self.damaged("is damaged", at)
        head = _ENTRY.unpack(self.read(at, _ENTRY.size))
        magic, made_by, _, flags, method, _, _, crc, stored, size, name, extra, comment, _, _, attributes, local = head
        if magic != b"PK\1\2":
            raise self.damaged("is damaged", at)
        rest = self.read(at + _ENTRY.size, name + extra)
        stored, size, local = self._wide(rest[name:], stored, size, local, at)
        text = _name(rest[:name], flags, made_by >> 8)
        kind = _kind(text, attributes, made_by >> 8)
        if flags & _ENCRYPTED and kind == "file":
            raise DataError(f"{self.of} is encrypted ({shown(text)}): unzip it with its password and give the folder")
        return _Entry(text, kind, method, stored, size, local, _ENTRY.size + name + extra + comment, crc)

    def _wide(self, extra: bytes, stored: int, size: int, local: int, at: int) -> tuple[int, int, int]:
        """The numbers that did not fit into 32 bits, from the zip64 field: those that are full, in this order."""
        values = [size, stored, local]
        wide = [place for place, value in enumerate(values) if value == _FULL]
        while wide and len(extra) >= 4:
            key, length = struct.unpack_from("<HH", extra)
            if key == 1 and min(length, len(extra) - 4) >= 8 * len(wide):
                for place, value in zip(wide, struct.unpack_from(f"<{len(wide)}Q", extra, 4), strict=True):
                    values[place] = value
                break
            extra = extra[4 + length :]
        if max(values) >= 1 << 62:
            raise self.damaged("is damaged", at)
        return values[1], values[0], values[2]

    def member(self, entry: _Entry, directory: _Directory) -> Member:
        """Where an entry's bytes lie: behind a local header, whose extra field has a length of its own."""
        if entry.kind != "file":
            return Member(entry.name, 0, 0, 0, kind=entry.kind)
        if entry.method not in (_STORED, _DEFLATED):
            method = _METHODS.get(entry.method, f"method {entry.method}")
            if is_image(entry.name):
                raise DataError(
                    f"{self.of} packs {shown(entry.name)} by {method}; stored and deflated members are read:"
                    " unzip it and give the folder"
                )
            return Member(entry.name, 0, 0, 0, kind=f"packed by {method}")
        at = entry.local + directory.shift
        local = _LOCAL.unpack(self.read(at, _LOCAL.size))
        content = at + _LOCAL.size + local[-2] + local[-1]
        if local[0] != b"PK\3\4" or content + entry.stored > directory.offset:
            raise self.damaged(f"is damaged ({shown(entry.name)})", at)
        deflated = entry.method == _DEFLATED
        if not deflated and entry.size != entry.stored:
            raise self.damaged(f"is damaged ({shown(entry.name)})", at)
        return Member(entry.name, content, entry.stored, entry.size, deflated, crc=entry.crc)


def _name(raw: bytes, flags: int, system: int) -> str:
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        text = raw.decode("utf-8", "surrogateescape") if flags & _UTF8 else raw.decode("cp437")
    text = text.partition("\0")[0]
    # Old Windows programs; elsewhere a backslash is a letter like any other.
    return text.replace("\\", "/") if system == 0 and "/" not in text else text


def _kind(name: str, attributes: int, system: int) -> str:
    if name.endswith("/"):
        return "folder"
    mode = attributes >> 16 if system in (3, 19) else 0  # Unix, macOS
    if stat.S_IFMT(mode) in (0, stat.S_IFREG):
        return "file"
    return "folder" if stat.S_ISDIR(mode) else "a link" if stat.S_ISLNK(mode) else "a device"
