"""Files that several processes have: replaced as a whole, written through to the disk, and locked.

A lock belongs to an open file and falls with it, however the process ends.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from steadytrain.errors import storage_errors

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

HAS_LOCKS = fcntl is not None
"""Where the system has none, every lock is granted."""


def lock(file: IO[Any] | int, *, shared: bool = False) -> None:
    """Lock an open file against other processes, or together with those that share it; wait until that is possible."""
    if fcntl is not None:
        fcntl.flock(file, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)


def lock_at_once(file: IO[Any] | int, *, shared: bool = False) -> bool:
    """Lock an open file as :func:`lock` does; return False where another process has a lock against it."""
    try:
        if fcntl is not None:
            fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock(file: IO[Any] | int) -> None:
    """Let go of the lock of a file that stays open."""
    if fcntl is not None:
        fcntl.flock(file, fcntl.LOCK_UN)


@contextlib.contextmanager
def locked(path: Path, *, shared: bool = False) -> Iterator[None]:
    """Hold a file's lock against other processes; an exclusive one makes the file if need be."""
    with path.open("rb" if shared else "ab") as file:
        lock(file, shared=shared)
        yield


def sync(path: Path) -> None:
    """Wait until a file, or a folder's entries, are on the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot flush a folder; they keep its entries in order by themselves.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP) or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def replacing(path: Path, *, name: Path | None = None) -> Iterator[Path]:
    """Yield a hidden path, to be written, which takes a file's place on the disk: whole or not at all.

    Files that are written beside it take their places beside the file, before it. Where the block raises, nothing is
    left. ``name``: what an error calls the file; None: its path.

    Raises:
        StorageError: it cannot be written; what was there before stays.
    """
    with storage_errors(name or path):
        folder = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent))
        part = folder / path.name
        try:
            yield part
            for each in [*sorted(other for other in folder.iterdir() if other != part), part]:
                sync(each)
                each.replace(path.with_name(each.name))
            sync(path.parent)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def replace_file(path: Path, text: str) -> None:
    """Write a text file whole or not at all. Raises StorageError; what was there before then stays."""
    target, data = path.resolve(), text.encode("utf-8", "replace")  # a link stays one
    with storage_errors(path):
        if target.exists() and not target.is_file():  # a pipe or a device: nothing to replace
            target.write_bytes(data)
            return
    with replacing(target, name=path) as part:
        part.write_bytes(data)
