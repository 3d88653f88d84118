"""MXNet's RecordIO, byte for byte: framing and image headers.

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

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from steadytrain.data.storage.local_files import ByteRanges
from steadytrain.errors import DataError

MAGIC = 0xCED7230A
MAX_PAYLOAD = 2**29 - 1
HEADER_BYTES = 24

_MAGIC = struct.pack("<I", MAGIC)
_FRAME = struct.Struct("<II")
_HEADER = struct.Struct("<IfQQ")

Buffer = bytes | memoryview
Readable = memoryview | ByteRanges


@dataclass(frozen=True)
class ImageRecord:
    """One payload taken apart. ``image`` is a view into what it was taken from."""

    labels: tuple[float, ...]
    id: int
    image: memoryview


def pack_header(label: float | Sequence[float], *, id: int) -> bytes:
    """Pack the bytes that stand before an image: a single label goes into the header, several follow it.

    Args:
        label: one number or a vector; stored as float32.
        id: of the image, 0 to 2**64 - 1.
    """
    if isinstance(label, int | float):
        return _HEADER.pack(0, label, id, 0)
    return _HEADER.pack(len(label), 0.0, id, 0) + struct.pack(f"<{len(label)}f", *label)


def unpack(payload: Buffer) -> ImageRecord:
    """Take a payload apart. Raises DataError: it is too short for its header and labels."""
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
    """Frame a payload as it stands in a file.

    Raises:
        DataError: it is longer than the format can say (512 MiB less one byte).
    """
    if len(payload) > MAX_PAYLOAD:
        raise DataError(f"a record of {len(payload):,} bytes is too long: the format ends at {MAX_PAYLOAD:,}")
    cuts, at = [], payload.find(_MAGIC)
    while at >= 0:
        if at % 4 == 0:
            cuts.append(at)
        at = payload.find(_MAGIC, at + 1)
    if not cuts:
        return b"".join((_FRAME.pack(MAGIC, len(payload)), payload, bytes(-len(payload) % 4)))
    starts, ends = [0, *(cut + 4 for cut in cuts)], [*cuts, len(payload)]
    cflags = [1, *[2] * (len(cuts) - 1), 3]
    parts = []
    for cflag, start, end in zip(cflags, starts, ends, strict=True):
        parts += [_FRAME.pack(MAGIC, cflag << 29 | (end - start)), payload[start:end]]
    return b"".join([*parts, bytes(-len(payload) % 4)])


def read_payload(file: Readable, offset: int) -> memoryview:
    """Return the payload of the record that begins at ``offset``: a view into ``file`` unless it lies there in parts.

    Raises:
        DataError: no record begins there, or the file ends within it.
    """
    parts = [file[start:end] for start, end in find_parts(file, offset)]
    return parts[0] if len(parts) == 1 else memoryview(_MAGIC.join(parts))


def find_parts(file: Readable, offset: int) -> list[tuple[int, int]]:
    """Return where the parts of the record that begins at ``offset`` start and end; its payload is not read.

    Raises:
        DataError: no record begins there, or the file ends within it.
    """
    cflag, start, end = _part(file, offset)
    if cflag not in (0, 1):
        raise DataError(f"byte {offset:,} is in the middle of a record")
    parts = [(start, end)]
    while cflag not in (0, 3):
        cflag, start, end = _part(file, end + -end % 4)
        if cflag not in (2, 3):
            raise DataError(f"the record at byte {offset:,} lacks its end")
        parts.append((start, end))
    return parts


def _part(file: Readable, offset: int) -> tuple[int, int, int]:
    """Return the cflag of a part, and where its bytes start and end."""
    if not 0 <= offset <= len(file) - 8:
        raise DataError(f"the file ends at byte {len(file):,}, before the record at byte {offset:,}")
    magic, word = _FRAME.unpack(file[offset : offset + 8])
    if magic != MAGIC:
        raise DataError(f"no record begins at byte {offset:,}")
    start = offset + 8
    end = start + (word & MAX_PAYLOAD)
    if end > len(file):
        raise DataError(f"the file ends at byte {len(file):,}, within the record at byte {offset:,}")
    return word >> 29, start, end


def index_path(path: Path) -> Path:
    """Return where the ``.idx`` of a ``.rec`` lies."""
    return path.with_suffix(".idx")
