"""Texts and numbers of a struct array in a MATLAB 5 file: enough for ImageNet's ``meta.mat``.

The format is that of "MAT-File Format" (The MathWorks, R2018b), section "Level 5". What a compressed element may
inflate to is bounded.

>>> read_structs(b"not one", "synsets", ("WNID",))
Traceback (most recent call last):
steadytrain.errors.DataError: it is no MATLAB 5 file
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Sequence
from math import prod

from steadytrain.errors import DataError

Value = str | float

_MOST_BYTES = 64 << 20
_COMPRESSED, _MATRIX = 15, 14
_STRUCT, _CHARACTERS = 2, 4
_CODES = {1: "b", 2: "B", 3: "h", 4: "H", 5: "i", 6: "I", 7: "f", 9: "d", 12: "q", 13: "Q"}
_TEXTS = {1: "utf-8", 2: "utf-8", 4: "utf-16-le", 16: "utf-8", 17: "utf-16-le"}


def read_structs(data: bytes, name: str, fields: Sequence[str]) -> list[dict[str, Value]]:
    """Some fields of every element of the struct array called ``name``; of a numeric field its first number.

    Raises:
        DataError: no such file, damaged, or no such array or field.
    """
    if len(data) < 128 or data[124:128] != b"\0\1IM":
        raise DataError("it is no MATLAB 5 file")
    try:
        for kind, content in _elements(data[128:]):
            if kind == _COMPRESSED:
                kind, content = next(_elements(_inflate(content)))
            if kind == _MATRIX and (found := _structs(content, name, fields)) is not None:
                return found
    except (struct.error, StopIteration, KeyError, ValueError, zlib.error) as error:
        raise DataError(f"it is damaged ({error!r})") from error
    raise DataError(f"it holds no struct array called {name}")


def _elements(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Type and content of each element."""
    at = 0
    while at + 8 <= len(data):
        kind, size = struct.unpack_from("<II", data, at)
        if kind >> 16:  # a small one: both in the first word
            kind, size = kind & 0xFFFF, kind >> 16
            yield kind, data[at + 4 : at + 4 + size]
            at += 8
            continue
        if size > len(data) - at - 8:
            raise ValueError(f"an element of {size} bytes, {len(data) - at - 8} are left")
        yield kind, data[at + 8 : at + 8 + size]
        at += 8 + size + (-size % 8 if kind != _COMPRESSED else 0)


def _inflate(data: bytes) -> bytes:
    inflate = zlib.decompressobj()
    whole = inflate.decompress(data, _MOST_BYTES)
    if not inflate.eof:
        raise ValueError(f"an element that is cut short, or inflates to more than {_MOST_BYTES} bytes")
    return whole


def _structs(content: bytes, name: str, fields: Sequence[str]) -> list[dict[str, Value]] | None:
    parts = _elements(content)
    flags, dims, called = next(parts)[1], next(parts)[1], next(parts)[1]
    if flags[0] != _STRUCT or called.decode("ascii", "replace") != name:
        return None
    width = struct.unpack("<i", next(parts)[1])[0]
    packed = next(parts)[1]
    if not 0 < width <= len(packed):
        raise ValueError(f"field names of {width} bytes")
    known = [packed[at : at + width].partition(b"\0")[0].decode() for at in range(0, len(packed), width)]
    if missing := [field for field in fields if field not in known]:
        raise DataError(f"its {name} have no field {missing[0]}")
    count = prod(struct.unpack(f"<{len(dims) // 4}i", dims))
    found: list[dict[str, Value]] = []
    while len(found) < count:
        cells = {field: next(parts)[1] for field in known}
        found.append({field: _value(cells[field]) for field in fields})
    return found


def _value(content: bytes) -> Value:
    parts = _elements(content)
    flags, _, _ = next(parts)[1], next(parts), next(parts)
    kind, data = next(parts)
    if flags[0] == _CHARACTERS:
        return data.decode(_TEXTS[kind])
    return float(struct.unpack_from(f"<{_CODES[kind]}", data)[0])
