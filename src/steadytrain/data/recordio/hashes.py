"""Hashes of the images of record files, by which copies are found: mapped from a file beside the records.

``OUT.hashes`` has 64 bytes that name the records by their digest, and then 48 for each image. Packing writes it; of
records that have none it is made when a split needs it, and lies in the cache.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from steadytrain.data.arrays import Ints
from steadytrain.machine.facts import require_cache_folder

SUFFIX = ".hashes"

HASHES = np.dtype([("near", "<u8", 2), ("source", "<u8", 2), ("stored", "<u8", 2)])
"""Of an image: its perceptual hash, the digest of the file that it came from, and that of what is stored."""

ImageHashes = NDArray[np.void]  # [N] of HASHES

_MAGIC, _HEADER_BYTES = b"steadytrain.hashes.2", 64


def hashes_file(rows: bytes | bytearray, digest: str) -> bytes:
    """Return the content of the file of records with this sha256 (hex); ``rows`` as of ``images.near.end_hashes``."""
    return (_MAGIC + bytes.fromhex(digest)).ljust(_HEADER_BYTES, b"\0") + rows


def read_hashes(path: Path, digest: str, num_images: int) -> ImageHashes | None:
    """Map the hashes of so many images of records with this digest; None where the file is not theirs, or not there."""
    with suppress(OSError, ValueError):
        if path.is_file() and path.stat().st_size == _HEADER_BYTES + HASHES.itemsize * num_images:
            with path.open("rb") as file:
                if file.read(_HEADER_BYTES) == hashes_file(b"", digest):
                    return np.memmap(path, HASHES, "r", _HEADER_BYTES, (num_images,))
    return None


def cached_path(digest: str) -> Path:
    """Return where the hashes of records lie that have none beside them. Raises StorageError."""
    return require_cache_folder() / "hashes" / f"{digest[:32]}{SUFFIX}"


def find_shared(hashes: ImageHashes, others: ImageHashes) -> Ints:
    """Return which images, int64 [n], are among others: made of the same file, or stored as the same bytes."""
    is_there = np.zeros(len(hashes), np.bool_)
    for column in ("source", "stored"):
        ours, theirs = (np.ascontiguousarray(part[column]) for part in (hashes, others))
        is_there |= ours.any(axis=1) & np.isin(ours.view("V16").ravel(), theirs.view("V16").ravel())
    return np.flatnonzero(is_there)
