"""Files that several processes have: replaced as a whole, written through to the disk, and locked.

A lock belongs to an open file and falls with it, however the process ends.
"""

from __future__ import annotations

import contextlib
import errno
import os
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
    """Yield a hidden path beside a file, to be written, which takes its place on the disk: whole or not at all.

    ``name``: what an error calls the file; None: its path.

    Raises:
        StorageError: it cannot be written; what was there before stays.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    with storage_errors(name or path):
        try:
            part.unlink(missing_ok=True)  # of another process that had this number, or a link that leads elsewhere
            yield part
            sync(part)
            part.replace(path)
            sync(path.parent)
        finally:
            part.unlink(missing_ok=True)


def replace_file(path: Path, text: str) -> None:
    """Write a text file whole or not at all. Raises StorageError; what was there before then stays."""
    target, data = path.resolve(), text.encode("utf-8", "replace")  # a link stays one
    with storage_errors(path):
        if target.exists() and not target.is_file():  # a pipe or a device: nothing to replace
            target.write_bytes(data)
            return
    with replacing(target, name=path) as part:
        part.write_bytes(data)
