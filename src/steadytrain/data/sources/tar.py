"""Walk through a tar by its headers: ustar, GNU (long names, sparse files) and pax, plain or inside another file.

Tars that were put one behind the other (``cat a.tar b.tar``) are read as one. A tar that stops without the zeros that
end it was cut short, perhaps between two members, and is refused.

Written out, because the standard library's reader takes in a long name whole, however long it claims to be, and keeps
an object for each member. The formats are those of POSIX.1-2017 (pax) and GNU tar's manual, "Basic Tar Format".
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from typing import BinaryIO

from steadytrain.data.sources.listing import shown
from steadytrain.data.sources.members import Member
from steadytrain.errors import DataError

BLOCK = 512

_ZEROS = bytes(BLOCK)
_MOST_AT_ONCE = 1 << 20
_MOST_EXTENSION = 1 << 20  # bytes of a long name or of pax records
_KINDS = {
    b"1": "a link",
    b"2": "a link",
    b"3": "a device",
    b"4": "a device",
    b"5": "folder",
    b"6": "a pipe",
    b"D": "folder",
    b"M": "the rest of another volume's file",
    b"S": "a sparse file",
    b"V": "a volume's label",
}
_EMPTY = frozenset([b"1", b"2", b"3", b"4", b"5", b"6"])  # whatever size they claim, nothing follows
_PAX_LENGTH = re.compile(rb"([0-9]{1,7}) ")


def is_tar(head: bytes) -> bool:
    """Whether a file that begins with these bytes (512 or more) is a tar: its first header's sum fits.

    >>> is_tar(b"PK" * 256)
    False
    """
    return len(head) >= BLOCK and head[:BLOCK] != _ZEROS and _fits(head[:BLOCK])


def walk(file: BinaryIO, *, start: int = 0, end: int | None = None, of: str = "") -> Iterator[Member]:
    """Every member of the tar that lies in ``file`` from ``start`` to ``end``.

    Args:
        file: open for reading; unbuffered is best.
        start, end: bytes; None is the end of the file.
        of: what to call the tar in messages.

    Raises:
        DataError: damaged or cut short, with the byte.
    """
    end = file.seek(0, 2) if end is None else end
    of = of or getattr(file, "name", "the tar")
    told: dict[str, str] = {}
    at = start
    while True:
        if at >= end:
            raise _without_end(of, end)
        block = _read(file, at, BLOCK, end, of)
        if block == _ZEROS:
            if (again := _behind_zeros(file, at, end, of)) is None:
                return
            at = again
            continue
        if not _fits(block):
            raise DataError(f"{of} is damaged at byte {at:,} (no tar header there): copy or make it again")
        kind, size = block[156:157], _size(block, at, of)
        content = at + BLOCK
        if kind in b"LKxg":
            told |= _extension(kind, _read(file, content, _bounded(size, at, of), end, of), at, of)
            at = _next(content, size)
            continue
        if kind == b"S":
            content = _after_sparse_map(file, block, content, end, of)
        size = 0 if kind in _EMPTY else _whole(told["size"], at, of) if "size" in told else size
        name = told.get("path") or _name(block)
        if content + size > end:
            raise DataError(
                f"{of} is cut short: {shown(name)} needs {size:,} bytes from byte {content:,} on, and the tar ends at"
                f" {end:,}: copy or download it again"
            )
        yield Member(name, content, size, size, kind=_kind(kind, name, told), target=_target(kind, name, block, told))
        told = {}
        at = _next(content, size)


def _read(file: BinaryIO, at: int, size: int, end: int, of: str) -> bytes:
    try:
        file.seek(at)
        data = file.read(min(size, end - at))
    except OSError as error:
        raise DataError(f"cannot read {of}: {error.strerror}") from error
    if len(data) < size:
        raise DataError(f"{of} is cut short at byte {at + len(data):,}, within a header: copy or download it again")
    return data


def _without_end(of: str, end: int) -> DataError:
    return DataError(
        f"{of} has no end: no zeros stand at byte {end:,}, behind its last member, so it was cut short there or never"
        f" closed: copy or make it again (if that is all there was: head -c 1024 /dev/zero >> {of})"
    )


def _behind_zeros(file: BinaryIO, at: int, end: int, of: str) -> int | None:
    """Where another tar goes on behind the zeros that end one; None where nothing does."""
    while at + BLOCK <= end:
        data = _read(file, at, min(_MOST_AT_ONCE, (end - at) // BLOCK * BLOCK), end, of)
        if filled := len(data) - len(data.lstrip(b"\0")) if data.strip(b"\0") else 0:
            at += filled // BLOCK * BLOCK
            return at if _fits(_read(file, at, BLOCK, end, of)) else None
        at += len(data)
    return None


def _next(content: int, size: int) -> int:
    return content + size + -size % BLOCK


def _fits(block: bytes) -> bool:
    """Whether a header's sum is that of its bytes; some old writers summed them as signed ones."""
    told = block[148:156].replace(b"\0", b" ").split()
    try:
        wanted = int(told[0], 8) if told else -1
    except ValueError:
        return False
    total = sum(block) - sum(block[148:156]) + 8 * 32
    return wanted == total or wanted == total - 256 * sum(byte > 127 for byte in block[:148] + block[156:])


def _size(block: bytes, at: int, of: str) -> int:
    """The size field: octal digits, or a big-endian number where the first bit is set (GNU)."""
    field = block[124:136]
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    try:
        return int(field.replace(b"\0", b" ").strip() or b"0", 8) if field[0] != 0xFF else -1
    except ValueError:
        raise DataError(f"{of} is damaged at byte {at:,}: {field!r} is no size") from None


def _whole(text: str, at: int, of: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise DataError(f"{of} is damaged at byte {at:,}: {text[:20]!r} is no size")
    return int(text)


def _bounded(size: int, at: int, of: str) -> int:
    if not 0 <= size <= _MOST_EXTENSION:
        raise DataError(f"{of} is damaged at byte {at:,}: a name of {size:,} bytes, more than {_MOST_EXTENSION:,}")
    return size


def _extension(kind: bytes, data: bytes, at: int, of: str) -> dict[str, str]:
    """What a member before the real one says of it: a long name, or pax records."""
    if kind in b"LK":
        return {"path" if kind == b"L" else "linkpath": _text(data)}
    if kind != b"x":  # what holds for all members, where no name or size stands
        return {}
    told: dict[str, str] = {}
    start = 0
    while start < len(data) and data[start]:
        length = _PAX_LENGTH.match(data, start)
        stop = start + int(length[1]) if length else 0
        if length is None or not length.end() < stop <= len(data) or data[stop - 1 : stop] != b"\n":
            raise DataError(f"{of} is damaged at byte {at + BLOCK + start:,}: no pax record there")
        key, _, value = data[length.end() : stop - 1].partition(b"=")
        told[key.decode("utf-8", "replace")] = value.decode("utf-8", "surrogateescape")
        start = stop
    return told


def _after_sparse_map(file: BinaryIO, block: bytes, content: int, end: int, of: str) -> int:
    """Where the content of an old GNU sparse file begins: its map may go on in blocks of its own."""
    goes_on = block[482]
    while goes_on:
        goes_on = _read(file, content, BLOCK, end, of)[504]
        content += BLOCK
    return content


def _name(block: bytes) -> str:
    name = _text(block[:100])
    prefix = _text(block[345:500]) if block[257:263] == b"ustar\0" else ""  # GNU keeps times there
    return f"{prefix}/{name}" if prefix else name


def _text(field: bytes) -> str:
    return field.partition(b"\0")[0].decode("utf-8", "surrogateescape")


def _target(kind: bytes, name: str, block: bytes, told: dict[str, str]) -> str:
    """The member that a link leads to, as the archive names it; empty for what is no link."""
    if kind not in (b"1", b"2"):
        return ""
    target = told.get("linkpath") or _text(block[157:257])
    return target if kind == b"1" else posixpath.normpath(posixpath.join(posixpath.dirname(name), target))


def _kind(kind: bytes, name: str, told: dict[str, str]) -> str:
    if kind in _KINDS:
        return _KINDS[kind]
    if any(key.startswith("GNU.sparse") for key in told):
        return "a sparse file"
    return "folder" if name.endswith("/") else "file"
