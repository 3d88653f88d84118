"""MXNet's RecordIO, byte for byte: framing, image headers, and a writer that never leaves half a file.

Everything is little-endian. A record is ``magic u32, cflag << 29 | length u32, payload, zeros to a multiple of 4``.
A payload that holds the magic at a multiple of 4 is cut there into parts (``cflag`` 1 first, 2 middle, 3 last; 0 is a
whole record) and the magic itself is left out; a reader puts it back. So an aligned magic always begins a part. The
payload of an image record is ``flag u32, label f32, id u64, id2 u64``, then ``flag`` labels (f32), then the encoded
image; with ``flag`` 0 the one label is the one in the header. The text file ``.idx`` beside it holds a line
``key TAB byte offset`` for each record. (dmlc-core ``recordio.h``, MXNet ``recordio.py``.)

>>> frame(b"ab").hex(" ", 4)
'0a23d7ce 02000000 61620000'
>>> payload = pack_header(3.0, id=7) + b"image"
>>> unpack(payload).labels, unpack(payload).id, bytes(unpack(payload).image)
((3.0,), 7, b'image')
"""

from __future__ import annotations

import hashlib
import os
import struct
from array import array
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from steadytrain.errors import DataError, storage_error

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

MAGIC = 0xCED7230A
MAX_PAYLOAD = 2**29 - 1
HEADER_BYTES = 24

_MAGIC = struct.pack("<I", MAGIC)
_FRAME = struct.Struct("<II")
_HEADER = struct.Struct("<IfQQ")

Buffer = bytes | memoryview


@dataclass(frozen=True)
class ImageRecord:
    """One payload taken apart. ``image`` is a view into what it was taken from."""

    labels: tuple[float, ...]
    id: int
    image: memoryview


def pack_header(label: float | Sequence[float], *, id: int) -> bytes:
    """The bytes that stand before an image: a single label goes into the header, several follow it.

    Args:
        label: one number or a vector; stored as float32.
        id: of the image, 0 to 2**64 - 1.
    """
    if isinstance(label, int | float):
        return _HEADER.pack(0, label, id, 0)
    return _HEADER.pack(len(label), 0.0, id, 0) + struct.pack(f"<{len(label)}f", *label)


def unpack(payload: Buffer) -> ImageRecord:
    """Take a payload apart.

    Raises:
        DataError: it is too short for its header and labels.
    """
    view = memoryview(payload)
    if len(view) < HEADER_BYTES:
        raise DataError(f"a record of {len(view)} bytes is too short for an image header ({HEADER_BYTES} bytes)")
    flag, label, id_, _ = _HEADER.unpack_from(view)
    start = HEADER_BYTES + 4 * flag
    if len(view) < start:
        raise DataError(f"a record of {len(view)} bytes is too short for the {flag} labels that its header announces")
    labels = struct.unpack_from(f"<{flag}f", view, HEADER_BYTES) if flag else (label,)
    return ImageRecord(labels, id_, view[start:])


def frame(payload: bytes) -> bytes:
    """A payload as it stands in a file.

    Raises:
        DataError: it is longer than the format can say (512 MiB less one byte).
    """
    if len(payload) > MAX_PAYLOAD:
        raise DataError(f"a record of {len(payload):,} bytes is too long: the format ends at {MAX_PAYLOAD:,}")
    cuts = _aligned_magics(payload)
    starts, ends = [0, *(cut + 4 for cut in cuts)], [*cuts, len(payload)]
    cflags = [1, *[2] * (len(cuts) - 1), 3] if cuts else [0]
    parts = []
    for cflag, start, end in zip(cflags, starts, ends, strict=True):
        parts += [_FRAME.pack(MAGIC, cflag << 29 | (end - start)), payload[start:end]]
    return b"".join([*parts, bytes(-len(payload) % 4)])


def _aligned_magics(payload: bytes) -> list[int]:
    found = []
    at = payload.find(_MAGIC)
    while at >= 0:
        if at % 4 == 0:
            found.append(at)
        at = payload.find(_MAGIC, at + 1)
    return found


def read_payload(file: memoryview, offset: int) -> memoryview:
    """The payload of the record that begins at ``offset``: a view into ``file`` unless it lies there in parts.

    Raises:
        DataError: no record begins there, or the file ends within it.
    """
    cflag, start, end = _part(file, offset)
    if cflag == 0:
        return file[start:end]
    if cflag != 1:
        raise DataError(f"byte {offset:,} is in the middle of a record")
    parts = [file[start:end]]
    while cflag != 3:
        cflag, start, end = _part(file, end + -end % 4)
        if cflag not in (2, 3):
            raise DataError(f"the record at byte {offset:,} lacks its end")
        parts.append(file[start:end])
    return memoryview(_MAGIC.join(parts))


def _part(file: memoryview, offset: int) -> tuple[int, int, int]:
    """The cflag of a part, and where its bytes start and end."""
    if not 0 <= offset <= len(file) - 8:
        raise DataError(f"the file ends at byte {len(file):,}, before the record at byte {offset:,}")
    magic, word = _FRAME.unpack_from(file, offset)
    if magic != MAGIC:
        raise DataError(f"no record begins at byte {offset:,}")
    start = offset + 8
    end = start + (word & MAX_PAYLOAD)
    if end > len(file):
        raise DataError(f"the file ends at byte {len(file):,}, within the record at byte {offset:,}")
    return word >> 29, start, end


def index_path(path: Path) -> Path:
    """Where the ``.idx`` of a ``.rec`` lies."""
    return path.with_suffix(".idx")


class RecordWriter:
    """Writes a ``.rec`` and its ``.idx``; both appear under their names only when all is well.

    A context manager: leaving it normally puts the files in place, leaving it by an exception removes every trace.
    Until then the bytes lie in a hidden ``.NAME.part`` that is locked, and that the next start takes over after a kill.

    Args:
        path: ends in ``.rec``; its folder is made if need be.
        force: replace what is there.

    Attributes:
        beside: texts to be put in place together with the records, by suffix: ``{".json": "..."}``.

    Raises:
        DataError: a file is there already, or another process is writing it.
        StorageError: the disk is full or not writable.
    """

    def __init__(self, path: Path, *, force: bool = False) -> None:
        self.path = path
        self.beside: dict[str, str] = {}
        self._force = force
        self.refuse_existing()
        self._texts: tuple[str, ...] | None = None  # suffixes of what is complete beside the records
        self._keys = array("Q")
        self._offsets = array("Q")
        self._sha256 = hashlib.sha256()
        self.num_bytes = 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = _open_alone(self._part_of(".rec"), path)
        except OSError as error:
            raise storage_error(error, path) from error

    def refuse_existing(self) -> None:
        """Raise DataError where something would be overwritten without ``force``."""
        there = [p.name for p in (self.path, index_path(self.path), self.path.with_suffix(".json")) if p.exists()]
        if there and not self._force:
            raise DataError(
                f"{', '.join(there)} exist{'s' * (len(there) == 1)} in {self.path.parent}:"
                " choose another name, or give --force to replace"
            )

    def __len__(self) -> int:
        return len(self._offsets)

    @property
    def digest(self) -> str:
        """sha256 (hex) of all bytes written so far: of the whole ``.rec`` once everything is."""
        return self._sha256.hexdigest()

    def write(self, payload: bytes, key: int) -> None:
        """Append one record; ``key`` names it in the index. Raises DataError (too long) or StorageError."""
        framed = frame(payload)
        try:
            self._file.write(framed)
        except OSError as error:
            raise storage_error(error, self.path) from error
        self._sha256.update(framed)
        self._keys.append(key)
        self._offsets.append(self.num_bytes)
        self.num_bytes += len(framed)

    def __enter__(self) -> Self:
        return self

    def complete(self) -> None:
        """Have all bytes on the disk, under hidden names, and so leave little that can fail; write nothing after it.

        Leaving the context does this; call it first where several writers should succeed or fail together.

        Raises:
            StorageError: the disk is full or not writable.
        """
        if self._texts is not None:
            return
        index = "".join(f"{key}\t{offset}\n" for key, offset in zip(self._keys, self._offsets, strict=True))
        texts = {".idx": index, **self.beside}
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            for suffix, text in texts.items():
                _write_synced(self._part_of(suffix), text)
        except OSError as error:
            raise storage_error(error, self.path) from error
        self._texts = tuple(texts)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        placed = False
        try:
            if kind is None:
                self.complete()
                self._place()
                placed = True
        finally:
            if not placed:
                self._discard()
            with suppress(OSError):  # a full disk was told already
                self._file.close()

    def _place(self) -> None:
        texts = self._texts or ()
        # Records come last: without them nothing looks finished. But where others are replaced they come first, and
        # their companions go before: a kill in between leaves no index and no card of other records.
        suffixes = (".rec", *texts) if self.path.exists() else (*texts, ".rec")
        try:
            for suffix in (".json", ".idx"):
                self.path.with_suffix(suffix).unlink(missing_ok=True)
            for suffix in suffixes:
                self._part_of(suffix).replace(self.path.with_suffix(suffix))
        except OSError as error:
            raise storage_error(error, self.path) from error

    def _discard(self) -> None:
        for suffix in (".rec", ".idx", *self.beside):
            with suppress(OSError):
                self._part_of(suffix).unlink()

    def _part_of(self, suffix: str) -> Path:
        return self.path.with_name(f".{self.path.stem}{suffix}.part")


def _write_synced(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8", newline="\n") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _open_alone(part: Path, path: Path) -> BinaryIO:
    """Open (and empty) the hidden file, held by this process alone."""
    file = os.fdopen(os.open(part, os.O_RDWR | os.O_CREAT, 0o666), "wb", buffering=1 << 20)
    try:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Whoever held it may have put it in place between the two lines above: then it is no longer ours to empty.
        if not part.exists() or not os.path.samestat(part.stat(), os.fstat(file.fileno())):
            raise BlockingIOError
    except BlockingIOError:
        file.close()
        raise DataError(f"{path} is being written by another process: wait for it or choose another name") from None
    file.truncate()
    return file
