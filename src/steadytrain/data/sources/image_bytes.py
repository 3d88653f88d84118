"""The bytes of one image, from a file or from inside one; and why they cannot be had.

An image that cannot be read is one thing, which is counted and left out or replaced. A machine that has no files or no
memory left to open it is another: that is no fault of the image, and ends the work.
"""

from __future__ import annotations

import errno
import os
import stat
import zlib

from steadytrain.data.packing.pixels import BadImageError
from steadytrain.data.sources.pieces import Piece
from steadytrain.errors import StorageError

_LARGEST_FILE = 1 << 30
_KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
_MACHINE = {
    errno.EMFILE: "this process has too many files open: raise the limit (ulimit -n)",
    errno.ENFILE: "this machine has too many files open: raise the limit (sysctl fs.file-max)",
    errno.ENOMEM: "no memory is left",
}


def read_file(path: str) -> bytes:
    """All bytes of an image file. Raises BadImageError, which says why not, and StorageError."""
    try:
        return _read(path)
    except OSError as error:
        raise unreadable(error, path) from None


def read_piece(piece: Piece) -> bytes:
    """All bytes of an image inside a file. Raises BadImageError, which says why not, and StorageError."""
    if piece.size > _LARGEST_FILE:
        raise BadImageError(f"{piece.size:,} bytes, more than {_LARGEST_FILE:,}")
    try:
        return piece.read()
    except OSError as error:
        raise unreadable(error, piece.path) from None
    except zlib.error as error:
        raise BadImageError(f"damaged in the archive: {error}") from None


def unreadable(error: OSError, path: str) -> BadImageError | StorageError:
    """What an error of the system says of an image: that it is bad; or that the machine is at its end."""
    if error.errno in _MACHINE:
        return StorageError(f"{path} cannot be opened: {_MACHINE[error.errno]}")
    if isinstance(error, FileNotFoundError) and os.path.islink(path):  # noqa: PTH114
        return BadImageError("a link that leads nowhere")
    return BadImageError((error.strerror or str(error)).lower())


def _read(path: str) -> bytes:
    # Looked at before it is opened: a pipe would keep us waiting. Of a small file a file object is half the cost.
    told = os.stat(path)  # noqa: PTH116
    if not stat.S_ISREG(told.st_mode):
        raise BadImageError(f"{_KINDS.get(stat.S_IFMT(told.st_mode), 'a device')}, not a file")
    if told.st_size > _LARGEST_FILE:
        raise BadImageError(f"{told.st_size:,} bytes, more than {_LARGEST_FILE:,}")
    file = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
    try:
        data = os.read(file, told.st_size + 1)
        if len(data) == told.st_size:
            return data
    finally:
        os.close(file)
    with open(path, "rb", buffering=0) as whole:  # noqa: PTH123 - it grows, or comes in parts
        return whole.read()
