"""Files of other kinds are told by what real writers of them write."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import pickle
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from tests.data.recordio.damage import made_of

from steadytrain.data.images.file_types import LOOK_AT, recognise


def _image(kind: str) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (9, 7), "red").save(file, kind)
    return file.getvalue()


def _in_memory(write: Callable[[io.BytesIO], object]) -> bytes:
    file = io.BytesIO()
    write(file)
    return file.getvalue()


def _tar(file: io.BytesIO) -> None:
    with tarfile.open(fileobj=file, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("a/b.jpg"))


def _xlsx(file: io.BytesIO) -> None:
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("[Content_Types].xml", "<Types/>")


def _zip(file: io.BytesIO) -> None:
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a/b.jpg", "x")


FILES: dict[str, bytes] = {
    "a tar archive": _in_memory(_tar),
    "a zip archive": _in_memory(_zip),
    "an Office document (Excel, Word)": _in_memory(_xlsx),
    "a gzip file": gzip.compress(b"x" * 99),
    "a bzip2 file": bz2.compress(b"x" * 99),
    "an xz file": lzma.compress(b"x" * 99),
    "a NumPy array (.npy)": _in_memory(lambda file: np.save(file, np.zeros(3))),
    "NumPy arrays (.npz)": _in_memory(lambda file: np.savez(file, a=np.zeros(3))),
    "a PyTorch file (.pt, .pth)": _in_memory(lambda file: torch.save({"a": torch.zeros(3)}, file)),
    "a Python pickle": pickle.dumps([1, 2, 3]),
    "a JPEG image": _image("JPEG"),
    "a PNG image": _image("PNG"),
    "a GIF image": _image("GIF"),
    "a BMP image": _image("BMP"),
    "a TIFF image": _image("TIFF"),
    "a WebP image": _image("WEBP"),
    "an AVIF image": _image("AVIF"),
    "an HTML page": b"\xef\xbb\xbf\n <!DOCTYPE html><html><body>404</body>",
    "JSON": b'{"a": 1}',
    "an SVG drawing, which is not read here": b'<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg"/>',
    "text": b"not much of anything\n",
    "a list of images (.lst)": b"0\t1.0\tcat/1.jpg\n",
    "the index (.idx) of a record file": b"0\t0\n1\t128\n",
    "an idx-ubyte file of images (MNIST's form)": bytes.fromhex("00000803 0000ea60 0000001c 0000001c") + bytes(99),
    "an HDF5 file": b"\x89HDF\r\n\x1a\n" + bytes(99),
    "a Parquet file": b"PAR1" + bytes(99),
    "zeros, nothing else": bytes(99),
    "empty: 0 bytes": b"",
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_named_for_what_it_is(name: str) -> None:
    file_type = recognise(FILES[name][:LOOK_AT], len(FILES[name]))
    assert file_type is not None
    assert file_type.name == name
    assert file_type.advice


@pytest.mark.parametrize("begins", [b"\x0a", b"\xff\xd8\xff", b"\x89PNG"])
def test_a_tfrecord_of_examples_or_images_is_named(begins: bytes) -> None:
    data = (8000).to_bytes(8, "little") + bytes(4) + begins.ljust(8000, b"\1") + bytes(4)
    file_type = recognise(data[:LOOK_AT], len(data))
    assert file_type is not None and file_type.name.startswith("a TFRecord file")


def test_weights_of_mxnet_are_named(data_folder: Path) -> None:
    data = (data_folder / "mxnet-rec" / "im2rec" / "named-v2.params").read_bytes()
    file_type = recognise(data, len(data))
    assert file_type is not None
    assert file_type.name == "MXNet arrays (.params, .nd)"


def test_record_file_and_unknown_bytes_have_no_type_name() -> None:
    assert recognise(made_of(b"a").data, 12) is None
    assert recognise(bytes(range(128, 256)), 128) is None


@given(st.binary(max_size=80))
def test_anything_can_be_looked_at(data: bytes) -> None:
    file_type = recognise(data, len(data))
    assert file_type is None or file_type.name
