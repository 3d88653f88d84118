"""What a source and the settings come to, as one digest: whatever the packed bytes depend on."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import PIL
import simplejpeg

from steadytrain.data.packing.encode import Settings
from steadytrain.data.sources.listing import Listing, Names, Pieces

LAYOUT = 4  # raised when the same source and settings would be packed into other bytes


def digest(settings: Settings, parts: Iterable[bytes | bytearray]) -> str:
    """sha256 (hex) of settings and whatever else counts."""
    found = hashlib.sha256(json.dumps([LAYOUT, settings.to_dict()], sort_keys=True).encode())
    for part in parts:
        found.update(len(part).to_bytes(8, "little"))
        found.update(part)
    return found.hexdigest()


def work(listing: Listing, settings: Settings, *, scratch: Path) -> str:
    """Names the work of packing one listing with these libraries, so that only the same work is gone on with."""
    versions = json.dumps([PIL.__version__, simplejpeg.__version__]).encode()
    return digest(settings, [versions, *identity([listing], scratch=scratch)])


def identity(listings: Sequence[Listing], *, scratch: Path) -> Iterator[bytes | bytearray]:
    """All that says what would be packed: names, labels, sizes and times of the files, and of those that hold them.

    Args:
        listings: of one source.
        scratch: where some of it was decompressed to; that its name differs from time to time counts for nothing.
    """
    for one in listings:
        yield json.dumps([one.split, one.classes, *one.label_names]).encode()
        names = one.names if isinstance(one.names, Names) else Names(one.names)
        yield from names.parts()
        for column in (one.labels, one.sizes, one.times, one.ids):
            yield b"" if column is None else column.tobytes()
        if one.pieces is not None:
            yield from _places(one.pieces, scratch)


def _places(pieces: Pieces, scratch: Path) -> Iterator[bytes]:
    for path in pieces.paths:
        inside = Path(path).is_relative_to(scratch)
        told = os.path.basename(path) if inside else os.path.abspath(path)  # noqa: PTH100, PTH119
        yield f"{told}\0{_size(path)}".encode("utf-8", "surrogateescape")
    for column in (pieces.file, pieces.offset, pieces.size, pieces.deflated):
        yield b"" if column is None else column.tobytes()
    yield json.dumps(pieces.pixels).encode()


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size  # noqa: PTH116 - perhaps a million times
    except OSError:  # told when it is read
        return -1
