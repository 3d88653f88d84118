"""Struct arrays that scipy writes are read; damaged and inflating files end in one line."""

from __future__ import annotations

import contextlib
import io
import struct
import zlib
from collections.abc import Sequence

import numpy as np
import pytest
from scipy.io import savemat

from steadytrain.data.sources import matfile
from steadytrain.data.sources.matfile import read_structs
from steadytrain.errors import DataError

ROWS = [(1, "n01440764", 0.5, "täst"), (300, "n0", -2.0, ""), (70_000, "x" * 40, 1e300, "日本")]
KIND = [("ILSVRC2012_ID", "O"), ("WNID", "O"), ("value", "O"), ("words", "O")]


def _file(
    rows: Sequence[tuple[object, ...]] = ROWS, *, compress: bool = False, shape: tuple[int, int] = (-1, 1)
) -> bytes:
    file = io.BytesIO()
    savemat(file, {"first": np.eye(2), "synsets": np.array(rows, KIND).reshape(shape)}, do_compression=compress)
    return file.getvalue()


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("shape", [(-1, 1), (1, -1)])
def test_fields_of_every_structure(compress: bool, shape: tuple[int, int]) -> None:
    found = read_structs(_file(compress=compress, shape=shape), "synsets", ("WNID", "ILSVRC2012_ID", "value", "words"))
    assert [tuple(one[name] for name, _ in KIND) for one in found] == ROWS


@pytest.mark.parametrize("kind", [np.uint8, np.int16, np.uint32, np.float32, np.int64])
def test_numbers_of_every_kind(kind: type[np.generic]) -> None:
    rows = [(kind(7), "a", 1.0, "b")]
    assert read_structs(_file(rows), "synsets", ("ILSVRC2012_ID",)) == [{"ILSVRC2012_ID": 7.0}]


def test_what_is_not_there_is_named() -> None:
    with pytest.raises(DataError, match="holds no struct array called classes"):
        read_structs(_file(), "classes", ("WNID",))
    with pytest.raises(DataError, match="its synsets have no field gloss"):
        read_structs(_file(), "synsets", ("WNID", "gloss"))


@pytest.mark.parametrize("compress", [False, True])
def test_every_cut_ends_in_one_line(compress: bool) -> None:
    whole = _file(compress=compress)
    for end in range(0, len(whole) - 8, 5):
        with pytest.raises(DataError):
            read_structs(whole[:end], "synsets", ("WNID",))


def test_any_byte_may_be_wrong() -> None:
    whole = _file()
    for at in range(128, len(whole), 3):
        damaged = bytearray(whole)
        damaged[at] ^= 0xFF
        with contextlib.suppress(DataError):
            read_structs(bytes(damaged), "synsets", ("ILSVRC2012_ID", "WNID"))


def test_an_element_that_inflates_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matfile, "_MOST_BYTES", 1 << 16)
    bomb = zlib.compress(bytes(1 << 20))
    with pytest.raises(DataError, match="inflates to more than 65536 bytes"):
        read_structs(_file()[:128] + struct.pack("<II", 15, len(bomb)) + bomb, "synsets", ("WNID",))
