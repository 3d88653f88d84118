"""Files that several processes have: replaced as a whole, written through to the disk, and locked.

A lock belongs to an open file and falls with it, however the process ends. A temporary file is made new: nothing that
another process put under its name, such as a link that leads elsewhere, is written through.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, BinaryIO

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


NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)  # Windows has only the second
"""Flags that open no symbolic link, and no file as text."""


def create(path: Path) -> BinaryIO:
    """Make a new file for writing and reading; what had its name is removed, never opened. Raises OSError."""
    path.unlink(missing_ok=True)
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | NO_FOLLOW, 0o666), "w+b")


def open_lock(path: Path) -> BinaryIO:
    """Open the file of a lock, made if need be, unless it is a link. Raises OSError."""
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | NO_FOLLOW, 0o666), "a+b")


@contextlib.contextmanager
def locked(path: Path, *, shared: bool = False) -> Iterator[None]:
    """Hold a file's lock against other processes; an exclusive one makes the file if need be."""
    with path.open("rb") if shared else open_lock(path) as file:
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
        _remove_left(path)
        with _created_and_held(part):
            try:
                yield part
                sync(part)
                part.replace(path)
                sync(path.parent)
            finally:
                part.unlink(missing_ok=True)


@contextlib.contextmanager
def _created_and_held(part: Path) -> Iterator[None]:
    """Make a temporary file and hold its lock, by which other writers know that it is in use."""
    while True:
        with create(part) as file:
            if HAS_LOCKS:
                lock(file)
                if os.fstat(file.fileno()).st_nlink == 0:  # another writer took it for one that was left
                    continue
                yield
                return
        yield  # an open file cannot be renamed there
        return


def _remove_left(path: Path) -> None:
    """Remove the temporary files of writers that were killed."""
    name = re.compile(rf"\.{re.escape(path.name)}\.\d+\.part")
    left = [each for each in path.parent.iterdir() if name.fullmatch(each.name)] if HAS_LOCKS else []
    for part in left:
        with contextlib.suppress(OSError):
            if part.is_symlink():
                part.unlink()
                continue
            with part.open("rb") as file:
                if lock_at_once(file):
                    part.unlink()


def replace_file(path: Path, text: str) -> None:
    """Write a text file whole or not at all. Raises StorageError; what was there before then stays."""
    target, data = path.resolve(), text.encode("utf-8", "replace")  # a link stays one
    with storage_errors(path):
        if target.exists() and not target.is_file():  # a pipe or a device: nothing to replace
            target.write_bytes(data)
            return
    with replacing(target, name=path) as part:
        part.write_bytes(data)
