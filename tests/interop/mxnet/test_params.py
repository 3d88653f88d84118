"""MXNet's .params: files that MXNet wrote, every form there and back, and damaged ones refused in one line."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from steadytrain.errors import ModelError
from steadytrain.interop.mxnet.params import read_params, write_params

ONE = bytes.fromhex(
    "1201000000000000 0000000000000000 0100000000000000 c9fa93f9 00000000 02000000 0100000000000000 0200000000000000"
    "01000000 00000000 00000000 00000000 0000803f 0100000000000000 0500000000000000 6172673a77"
)
"""What MXNet 1.9.1 writes of one array, arg:w = [[0, 1]] in float32."""


def test_mxnets_files_are_read_and_written_byte_for_byte(data_folder: Path, tmp_path: Path) -> None:
    for name in ("named-v2.params", "list-v2.params"):
        source = data_folder / "mxnet-rec" / "im2rec" / name
        content = read_params(source)
        values = list(content.values()) if isinstance(content, dict) else content
        assert isinstance(content, dict) == name.startswith("named")
        assert {str(value.dtype) for value in values} == {"float32", "float16", "int32"}
        write_params(tmp_path / name, content)
        assert (tmp_path / name).read_bytes() == source.read_bytes()


def test_files_of_the_first_form_are_read(data_folder: Path) -> None:
    content = read_params(data_folder / "weights" / "legacy_ndarray.v0")
    values = list(content.values()) if isinstance(content, dict) else content
    assert [value.tolist() for value in values] == [list(range(128))] * 6


def test_the_bytes_are_mxnets(tmp_path: Path) -> None:
    write_params(tmp_path / "w.params", {"arg:w": np.array([[0, 1]], np.float32)})
    assert (tmp_path / "w.params").read_bytes() == ONE


@given(
    version=st.integers(0, 3),
    values=st.dictionaries(
        st.text(min_size=1, max_size=8).filter(lambda text: text.isprintable()),
        arrays.arrays(
            st.sampled_from(["f2", "f4", "f8", "u1", "i1", "i4", "i8"]),
            arrays.array_shapes(min_dims=1, max_dims=5, min_side=0, max_side=3),
        ),
        max_size=3,
    ),
    named=st.booleans(),
)
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, version: int, values: dict[str, np.ndarray], named: bool
) -> None:
    path = tmp_path_factory.mktemp("params") / "a.params"
    write_params(path, values if named else list(values.values()), version=version)
    content = read_params(path)
    read = list(content.values()) if isinstance(content, dict) else content
    assert list(content if named and values else values) == list(values)
    for before, after in zip(values.values(), read, strict=True):
        np.testing.assert_array_equal(after, before, strict=True)


@given(cut=st.integers(0, len(ONE) - 1), place=st.integers(0, len(ONE) - 1), value=st.integers(0, 255))
def test_damaged_files_are_errors_of_one_line(
    tmp_path_factory: pytest.TempPathFactory, cut: int, place: int, value: int
) -> None:
    path = tmp_path_factory.mktemp("params") / "a.params"
    for content in (ONE[:cut], ONE[:place] + bytes([value]) + ONE[place + 1 :]):
        path.write_bytes(content)
        try:
            read_params(path)
        except ModelError as error:
            assert str(path) in str(error) and "byte" in str(error) and "\n" not in str(error)


HEAD = struct.pack("<QQQ", 0x112, 0, 1)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (struct.pack("<QQQ", 0x112, 0, 1 << 60), "1,152,921,504,606,846,976 arrays are announced"),
        (
            HEAD + struct.pack("<Iiiqqiii", 0xF993FAC9, 0, 2, 1 << 40, 1 << 20, 1, 0, 0),
            "takes 4,611,686,018,427,387,904 bytes",
        ),
        (HEAD + struct.pack("<Iiiqqiii", 0xF993FAC9, 0, 2, 0, 1 << 62, 1, 0, 0), "an array of the shape (0, 4611"),
        (HEAD + struct.pack("<I", 1 << 31), "an array of 2,147,483,648 dimensions"),
        (HEAD + struct.pack("<Iii", 0xF993FAC9, 1, 0), "sparse (row_sparse)"),
        (HEAD + struct.pack("<Iii", 0xF993FAC9, 2, 0), "sparse (csr)"),
        (HEAD + struct.pack("<Iiiqiii", 0xF993FAC9, 0, 1, 1, 1, 0, 12), "number format 12 (bfloat16)"),
        (b"PK\x03\x04" + bytes(40), "zip archive"),
        (b"\x80\x04\x95" + bytes(40), "pickle"),
        (b"<html><body>not found", "this is text"),
    ],
)
def test_hostile_headers_allocate_nothing(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "a.params"
    path.write_bytes(content)
    tracemalloc.start()
    with pytest.raises(ModelError) as caught:
        read_params(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert message in str(caught.value) and peak < 1_000_000


def test_other_number_formats_are_refused_when_written(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot hold 'mask' as bool"):
        write_params(tmp_path / "a.params", {"mask": np.ones(3, bool)})
    assert not list(tmp_path.iterdir())
