"""MXNet's ``.params``: arrays, with or without names, as every release from 0.8 to 1.9.1 wrote them.

A file is a list: a magic number, the number of arrays, the arrays, the number of names (0 or as many) and the names.
An array has one of four forms, called V0 (to 0.10), V1 (0.11), V2 (0.12 to 1.9) and V3 (``numpy`` semantics, 2.0).
All numbers are little-endian. What a header says is compared with the bytes that are left before anything is allocated.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np
from numpy.typing import NDArray

from steadytrain.errors import ModelError, read_errors
from steadytrain.files import replacing, require_content

Array: TypeAlias = NDArray[Any]
ParamArrays: TypeAlias = dict[str, Array] | list[Array]

_LIST_MAGIC = 0x112
_V1, _V2, _V3 = 0xF993FAC8, 0xF993FAC9, 0xF993FACA
_DTYPES = {0: "<f4", 1: "<f8", 2: "<f2", 3: "|u1", 4: "<i4", 5: "|i1", 6: "<i8"}
_OTHER_DTYPES = {7: "bool", 8: "int16", 9: "uint16", 10: "uint32", 11: "uint64", 12: "bfloat16"}
_CODES = {np.dtype(text): code for code, text in _DTYPES.items()}
_STORAGE = {1: "row_sparse", 2: "csr"}
_MAX_DIMENSIONS = 32  # dimensions, the most of numpy and of MXNet's shapes
_MAX_BYTES = 1 << 62  # bytes of one array, as numpy counts them
_SMALLEST_ARRAY = 4  # bytes of one without dimensions


def read_params(path: Path) -> ParamArrays:
    """Read a ``.params`` file.

    Returns:
        Arrays by name, or in their order where they have no names. MXNet's empty arrays ("none") have the shape (0,).

    Raises:
        ModelError: no such file, no ``.params``, damaged, or sparse arrays or number formats that are not supported;
            one line with the byte at which it is found.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "model-0000.params"
    >>> write_params(path, {"arg:fc_weight": np.ones((2, 3), np.float32)})
    >>> read_params(path)["arg:fc_weight"].shape
    (2, 3)
    """
    with read_errors(path, ModelError):
        require_content(path)
        with path.open("rb") as stream:
            return _Reader(stream, os.fstat(stream.fileno()).st_size, str(path)).list()


def read_array(stream: BinaryIO, size: int, where: str) -> Array:
    """Read one array without a list around it, as optimizer states hold them. Raises ModelError."""
    return _Reader(stream, size, where).array()


def write_params(path: Path, arrays: Mapping[str, Array] | Sequence[Array], *, version: int = 2) -> None:
    """Write a ``.params`` file, whole or not at all.

    Args:
        path: the file; replaced if it is there.
        arrays: by name or in an order; float16, float32, float64, uint8, int8, int32 or int64.
        version: 0 to 3: the form of each array. MXNet from 0.12 on reads 2, and all later ones read 0 and 1 too.

    Raises:
        ModelError: an array of another number format.
        StorageError: the disk is full or not writable; a file that was there is untouched.
    """
    names = list(arrays) if isinstance(arrays, Mapping) else []
    values = list(arrays.values()) if isinstance(arrays, Mapping) else list(arrays)
    for number, value in enumerate(values):
        if value.dtype.newbyteorder("<") not in _CODES:
            name = names[number] if names else number
            kinds = ", ".join(str(np.dtype(text)) for text in _DTYPES.values())
            raise ModelError(f"{path} cannot hold {name!r} as {value.dtype}: MXNet knows {kinds}; convert it first")
    with replacing(path) as part, part.open("wb") as stream:
        stream.write(struct.pack("<QQQ", _LIST_MAGIC, 0, len(values)))
        for value in values:
            stream.write(_header(value, version))
            stream.write(np.ascontiguousarray(value, value.dtype.newbyteorder("<")).tobytes())
        stream.write(struct.pack("<Q", len(names)))
        for name in names:
            text = name.encode()
            stream.write(struct.pack("<Q", len(text)) + text)


def _header(value: Array, version: int) -> bytes:
    """The bytes before an array's values. Before V3 a shape without dimensions means none: a scalar gets one."""
    assert version in (0, 1, 2, 3), version
    shape = value.shape if value.ndim or version == 3 else (1,)
    if version == 0:
        head = struct.pack(f"<I{len(shape)}I", len(shape), *shape)
    else:
        magic = struct.pack("<I", (_V1, _V2, _V3)[version - 1]) + (b"" if version == 1 else struct.pack("<i", 0))
        head = magic + struct.pack(f"<i{len(shape)}q", len(shape), *shape)
    return head + struct.pack("<iii", 1, 0, _CODES[value.dtype.newbyteorder("<")])  # device 1 is the CPU


class _Reader:
    """A stream of known size; what is asked for beyond its end is an error that names the place."""

    def __init__(self, stream: BinaryIO, size: int, where: str) -> None:
        self.stream, self.size, self.where = stream, size, where
        self.offset = 0

    def list(self) -> ParamArrays:
        first = self.take(8, "the magic number")
        if first != struct.pack("<Q", _LIST_MAGIC):
            raise self.error(f"{_kind(first)} and not MXNet's .params: name the file that belongs to the symbol", at=0)
        _, count = self.unpack("<QQ", "the number of arrays")
        if count * _SMALLEST_ARRAY > self.size - self.offset:
            raise self.error(f"{count:,} arrays are announced, more than {self.size:,} bytes hold", at=16)
        arrays = [self.array() for _ in range(count)]
        at = self.offset
        (num_names,) = self.unpack("<Q", "the number of names")
        if num_names not in (0, count):
            raise self.error(f"{num_names:,} names for {count:,} arrays", at=at)
        if not num_names:
            return arrays
        named: dict[str, Array] = {}
        for array in arrays:
            at = self.offset
            (length,) = self.unpack("<Q", "a name's length")
            try:
                name = self.take(length, "a name").decode()
            except UnicodeDecodeError:
                raise self.error("a name that is no UTF-8", at=at) from None
            if name in named:
                raise self.error(f"the name {name!r} a second time", at=at)
            named[name] = array
        return named

    def array(self) -> Array:
        at = self.offset
        (first,) = self.unpack("<I", "an array's header")
        scalar = False
        if first in (_V2, _V3):
            (storage,) = self.unpack("<i", "the storage type")
            if storage:
                kind = _STORAGE.get(storage, f"unknown, {storage}")
                raise self.error(
                    f"an array whose storage is sparse ({kind}): only dense ones are read; in MXNet"
                    " tostype('default') makes it dense",
                    at=at,
                )
            scalar = first == _V3
        shape = self.shape(at) if first in (_V1, _V2, _V3) else self.dimensions(first, "I", at)
        if shape is None or (not shape and not scalar):
            return np.empty((0,), np.float32)
        _, _, code = self.unpack("<iii", "the device and the number format")
        if code not in _DTYPES:
            named = _OTHER_DTYPES.get(code, "unknown")
            raise self.error(
                f"number format {code} ({named}): float16/32/64, uint8 and int8/32/64 are read; in MXNet"
                " astype('float32') converts it",
                at=self.offset - 4,
            )
        dtype = np.dtype(_DTYPES[code])
        nbytes = math.prod(shape) * dtype.itemsize
        if not nbytes and math.prod(side or 1 for side in shape) * dtype.itemsize > _MAX_BYTES:
            raise self.error(f"an array of the shape {shape}", at=at)  # no values, and too large for numpy
        data = self.take(nbytes, f"the values of an array of shape {shape}")
        return np.frombuffer(data, dtype).reshape(shape)

    def shape(self, at: int) -> tuple[int, ...] | None:
        """Dimensions of 64 bits; None where the shape is unknown."""
        (ndim,) = self.unpack("<i", "the number of dimensions")
        return None if ndim == -1 else self.dimensions(ndim, "q", at)

    def dimensions(self, ndim: int, format: str, at: int) -> tuple[int, ...]:
        if not 0 <= ndim <= _MAX_DIMENSIONS:
            raise self.error(f"an array of {ndim:,} dimensions; there are 0 to {_MAX_DIMENSIONS}", at=at)
        shape = self.unpack(f"<{ndim}{format}", "a shape")
        if any(side < 0 for side in shape):
            raise self.error(f"an array of the shape {shape}", at=at)
        return shape

    def unpack(self, format: str, what: str) -> tuple[int, ...]:
        return struct.unpack(format, self.take(struct.calcsize(format), what))

    def take(self, count: int, what: str) -> bytes:
        left = self.size - self.offset
        if count > left:
            raise self.error(f"{what} takes {count:,} bytes and {left:,} are left", at=self.offset)
        data = self.stream.read(count)
        if len(data) != count:
            raise self.error(f"the file ends in {what}", at=self.offset)
        self.offset += count
        return data

    def error(self, problem: str, *, at: int) -> ModelError:
        remedy = "" if ": " in problem else ": it is damaged or cut short, fetch it again"
        return ModelError(f"{self.where}, byte {at:,}: {problem}{remedy}")


def _kind(first: bytes) -> str:
    """Describe, for a message, a file that begins with these bytes."""
    if first.startswith(b"PK"):
        return "this is a zip archive (a .npz of MXNet 2.0, or a model that is packed)"
    if first.startswith(b"\x93NUMPY"):
        return "this is one of numpy's arrays"
    if first.startswith(b"\x80"):
        return "this is a pickle (optimizer states, or PyTorch's)"
    if first.lstrip().startswith((b"<", b"{")):
        return f"this is text ({first.decode('latin-1')!r}...)"
    return f"it begins with {first.hex(' ')}"
