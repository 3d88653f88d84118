"""Files that several processes have: replaced as a whole, written through to the disk, and locked.

A lock belongs to an open file and falls with it, however the process ends. Where a file system has none (some of those
on a network), every lock is granted, and nothing counts as left by others. A temporary file is made new: nothing that
another process put under its name, such as a link that leads elsewhere, is written through.
"""

from __future__ import annotations

import contextlib
import errno
import io
import itertools
import json
import os
import re
import shutil
import stat
import tempfile
import time
import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import IO, Any, BinaryIO, Self

from steadytrain.errors import ModelError, did_you_mean, read_errors, storage_errors
from steadytrain.machine import platform
from steadytrain.machine.platform import IS_POSIX, NO_FOLLOW, NO_WAIT, TO_SYNC, open_descriptor, opened_folder

_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)  # NFS without its lock daemon, FUSE, Lustre without flock


class Closing(ABC):
    """Something that ``with`` closes."""

    @abstractmethod
    def close(self) -> None:
        """Let go of what is held."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def lock(file: IO[Any] | int, *, shared: bool = False) -> None:
    """Lock an open file against other processes, or together with those that share it; wait until that is possible."""
    _flock(file, shared=shared, wait=True)


def lock_at_once(file: IO[Any] | int, *, shared: bool = False) -> bool:
    """Lock an open file as :func:`lock` does; return False where another process has a lock against it."""
    try:
        _flock(file, shared=shared, wait=False)
    except BlockingIOError:
        return False
    return True


def lock_surely(file: IO[Any] | int) -> bool:
    """Lock an open file as :func:`lock_at_once` does, and return whether no other process can have a lock of it.

    False also where that cannot be known: the file system has no locks, or its locks, as those of NFS, need a file that
    is open for writing.
    """
    try:
        platform.flock(file, wait=False)
    except OSError:
        return False
    return True


def unlock(file: IO[Any] | int) -> None:
    """Let go of the lock of a file that stays open."""
    with contextlib.suppress(OSError):  # there are no locks
        platform.unlock(file)


def _flock(file: IO[Any] | int, *, shared: bool, wait: bool) -> None:
    try:
        platform.flock(file, shared=shared, wait=wait)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise


_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    **dict.fromkeys((stat.S_IFCHR, stat.S_IFBLK), "a device"),
}


def kind_of_file(mode: int) -> str:
    """Return what a file is by its mode, where it is no regular one: a folder, a pipe, a socket, a device; else empty.

    >>> kind_of_file(stat.S_IFIFO | 0o644), kind_of_file(stat.S_IFREG | 0o644)
    ('a pipe', '')
    """
    return "" if stat.S_ISREG(mode) else _KINDS.get(stat.S_IFMT(mode), "no file")


def open_regular(path: Path, *, most: int | None = None) -> io.BufferedReader:
    """Open a regular file for reading: a pipe, a socket or a device may keep a reader for ever.

    ``most``: bytes that it may have; None: any number.

    Raises:
        OSError: it cannot be opened, is something else, or has more bytes.
    """
    file = open(path, "rb", opener=_open_at_once)  # noqa: SIM115 - the caller closes it
    found = os.fstat(file.fileno())
    kind = kind_of_file(found.st_mode)
    if not kind and (most is None or found.st_size <= most):
        return file
    file.close()
    why = f"it is {kind}" if kind else f"it has {found.st_size:,} bytes, more than {most:,}"
    raise OSError(errno.EINVAL, why, str(path))


def _open_at_once(path: str, flags: int) -> int:
    """Open a file without waiting for the other end of a pipe."""
    try:
        return open_descriptor(path, flags | NO_WAIT)
    except BlockingIOError:  # a file server has a lease on it, which only files have, and gives it back when asked
        return open_descriptor(path, flags)


def require_regular(path: Path) -> None:
    """Raise OSError where there is no file, or no regular one, before a library opens it by its name."""
    if kind := kind_of_file(path.stat().st_mode):
        number = errno.EISDIR if kind == "a folder" else errno.EINVAL
        raise OSError(number, os.strerror(number) if kind == "a folder" else f"it is {kind}", str(path))


def require_content(path: Path) -> None:
    """Raise ModelError for weights that cannot be read, or that Git LFS has not fetched: a text stands for the data."""
    with read_errors(path, ModelError), open_regular(path) as stream:
        start = stream.read(23)
    if start == b"version https://git-lfs":
        raise ModelError(f"{path} is a Git LFS pointer, not the data: fetch it with git lfs pull")


def open_text(path: Path, *, encoding: str = "utf-8", **options: Any) -> io.TextIOWrapper:
    """Open a regular file as text. Raises OSError as :func:`open_regular` does."""
    return io.TextIOWrapper(open_regular(path), encoding, **options)


MOST_TEXT_BYTES = 10_000_000
"""The most that a recipe or a note may have."""


def read_text(path: Path, *, most: int | None = MOST_TEXT_BYTES, errors: str = "strict") -> str:
    """Read a regular file of UTF-8 as text. Raises OSError as :func:`open_regular` does, and UnicodeDecodeError."""
    with open_regular(path, most=most) as file:
        return file.read().decode("utf-8", errors)


def read_table(path: Path) -> dict[str, Any]:
    """Read a JSON object that was written for our own use; empty where there is none, or a kill left half of one."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        document = json.loads(read_text(path, most=None))
        return document if isinstance(document, dict) else {}
    return {}


def create(path: Path) -> BinaryIO:
    """Make a new file for writing and reading; what had its name is removed, never opened. Raises OSError."""
    path.unlink(missing_ok=True)
    return os.fdopen(open_descriptor(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | NO_FOLLOW, 0o666), "w+b")


def open_lock(path: Path) -> BinaryIO:
    """Open the file of a lock, made if need be, unless it is a link. Raises OSError."""
    return os.fdopen(open_descriptor(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | NO_FOLLOW, 0o666), "a+b")


@contextlib.contextmanager
def locked(path: Path, *, shared: bool = False) -> Iterator[None]:
    """Hold a file's lock against other processes; an exclusive one makes the file if need be."""
    with path.open("rb") if shared else open_lock(path) as file:
        lock(file, shared=shared)
        yield


def sync(path: Path) -> None:
    """Wait until a file, or a folder's entries, are on the disk. Raises OSError."""
    if not IS_POSIX and path.is_dir():  # no folder is opened there
        return
    descriptor = open_descriptor(path, TO_SYNC)
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
        remove_left(path.parent, path.name)
        with held_folder(path.parent, f".{path.name}.", ".part") as folder:
            part = folder / path.name
            yield part
            for each in [*sorted(other for other in folder.iterdir() if other != part), part]:
                sync(each)
                each.replace(path.with_name(each.name))
            with contextlib.suppress(OSError):  # or else it may be back after a power cut
                folder.rmdir()
            sync(path.parent)


@contextlib.contextmanager
def held_folder(place: Path, prefix: str, suffix: str = "") -> Iterator[Path]:
    """Make a folder in a place, and hold its lock: other processes know that it is in use. It is removed at the end.

    Raises OSError: it cannot be made.
    """
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix, suffix=suffix, dir=place))
        with contextlib.ExitStack() as stack:
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            with contextlib.suppress(FileNotFoundError):  # another process took it for one that was left
                descriptor = stack.enter_context(opened_folder(folder))
                lock(descriptor)
            if folder.exists():
                yield folder
                return


def remove_unheld(folder: Path) -> None:
    """Remove a folder that nobody holds."""
    with contextlib.suppress(OSError), opened_folder(folder) as descriptor:
        if lock_surely(descriptor):
            shutil.rmtree(folder)


def remove_left(folder: Path, name: str = "") -> None:
    """Remove what writers left that were killed, folders that nobody holds: of the file of a name, or of all files."""
    if not name:
        _parts_in.cache_clear()
    form = re.compile(rf"\.{re.escape(name) or '.+'}\.[a-z0-9_]{{8}}\.part")
    for left in filter(form.fullmatch, _parts_in(folder.absolute(), int(time.monotonic() // 60))):
        remove_unheld(folder / left)


@lru_cache(maxsize=16)
def _parts_in(folder: Path, minute: int) -> tuple[str, ...]:
    """List the folders of writers in a folder, once a minute: it may hold a million files, one written every second."""
    return tuple(entry.name for entry in os.scandir(folder) if entry.name.endswith(".part"))


def replace_file(path: Path, text: str | bytes) -> None:
    """Write a file whole or not at all. Raises StorageError; what was there before then stays."""
    target = path.resolve()  # a link stays one
    data = text.encode("utf-8", "replace") if isinstance(text, str) else text
    with storage_errors(path):
        if target.exists() and not target.is_file():  # a pipe or a device: nothing to replace
            target.write_bytes(data)
            return
    with replacing(target, name=path) as part:
        part.write_bytes(data)


def other_spelling(name: str) -> str:
    """Return the path that a name means: with ``~``, backslashes, quotation marks, or accents in another form.

    Args:
        name: of nothing that is there.

    Returns:
        The path, which is there; empty where none is.
    """
    forms = [os.path.expanduser(name), name.strip("'\"")]  # noqa: PTH111 - leaves an unknown user's name as it is
    forms += [name.replace("\\", "/"), *(unicodedata.normalize(form, name) for form in ("NFC", "NFD"))]
    return next((form for form in forms if form not in ("", name) and os.path.lexists(form)), "")


def near_name(name: str) -> str:
    """A hint that ends the message on a file that is not there: another spelling, or the nearest name beside it."""
    if other := other_spelling(name):
        return f" Did you mean {other}?"
    path = Path(name)
    with contextlib.suppress(OSError):
        beside = itertools.islice(path.parent.iterdir(), 10_000)  # of a million names the nearest takes minutes
        return did_you_mean(path.name, [entry.name for entry in beside if entry.name != path.name])
    return ""
