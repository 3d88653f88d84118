"""Read files of this machine; what fails for a reason that may pass is tried again, from the opening on.

A network file system answers ESTALE after its server was restarted, EIO or ETIMEDOUT where the server was slow and the
mount is a soft one, ENOTCONN where a FUSE process has ended; an interrupted call answers EINTR or EAGAIN. None of these
says anything of the file. They are tried again with growing pauses (:data:`PAUSES_SECONDS`); one that stays is an error
of the system, which ends the work: nobody may take it for a bad image, leave that out and go on.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar, cast

import numpy as np

from steadytrain.data.arrays import Ints, Pixels
from steadytrain.data.storage.array_cache import file_state
from steadytrain.errors import DataError, StorageError
from steadytrain.files import require_regular
from steadytrain.machine.platform import advise, open_descriptor, pread

if TYPE_CHECKING:
    from steadytrain.data.storage.pages import Traffic

PAUSES_SECONDS = (0.1, 0.3, 1.0, 3.0, 10.0)
"""Seconds between the tries of a read; after the last of them it is given up."""

_OF_THE_FILE = frozenset(
    {
        *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENAMETOOLONG),
        *(errno.EINVAL, errno.EILSEQ, errno.EFBIG, errno.EOVERFLOW),
    }
)
_EXHAUSTED = {
    errno.EMFILE: "this process has too many files open: raise the limit (ulimit -n)",
    errno.ENFILE: "this machine has too many files open: raise the limit (sysctl fs.file-max)",
    errno.ENOMEM: "no memory left",
}

_AT_ONCE = 1024  # places that are read together
_NEAR = 4096  # bytes from place to place up to which all between them are read

T = TypeVar("T")


def is_of_the_system(error: OSError) -> bool:
    """Return whether an error says something of the machine, its disks or its network, and nothing of the file.

    >>> is_of_the_system(OSError(errno.ESTALE, "Stale file handle")), is_of_the_system(FileNotFoundError(2, "x"))
    (True, False)
    >>> is_of_the_system(TimeoutError()), is_of_the_system(OSError("cut short"))
    (True, False)
    """
    if error.errno is None:
        return isinstance(error, TimeoutError | ConnectionError | BlockingIOError | InterruptedError)
    return error.errno not in _OF_THE_FILE


def rows_at(data: Pixels, starts: Ints, width: int) -> Pixels:
    """Copy uint8[n, width] from each place of some bytes on: whole rows at a time, not byte by byte."""
    rows = np.ndarray(max(0, len(data) - width + 1), f"V{width}", data, strides=(1,))
    return rows[starts].view(np.uint8).reshape(-1, width)


def read_patiently(read: Callable[[], T], name: str) -> T:
    """Call ``read``, again where it fails for a reason that may pass. It opens the file each time.

    ``name``: of the file, for the message.

    Raises:
        OSError: the file itself cannot be read: there is none, or it may not be read.
        StorageError: the system cannot read it, in the last try either.
    """
    for pause in (*PAUSES_SECONDS, None):
        try:
            return read()
        except OSError as error:
            if not is_of_the_system(error):
                raise
            if pause is None or error.errno in _EXHAUSTED:
                raise _lasting(error, name) from error
        time.sleep(pause)
    raise AssertionError


def _lasting(error: OSError, name: str) -> StorageError:
    """Describe an error of the system that did not pass."""
    if error.errno in _EXHAUSTED:
        return StorageError(f"{name} cannot be opened: {_EXHAUSTED[error.errno]}")
    number = "" if error.errno is None else f" ({errno.errorcode.get(error.errno, 'errno')}, {error.errno})"
    return StorageError(
        f"cannot read {name}: {error.strerror or str(error) or type(error).__name__}{number}, in"
        f" {1 + len(PAUSES_SECONDS)} tries over {sum(PAUSES_SECONDS):.0f} seconds: the disk or the"
        " file server failed, not the image. When it works again, the same command resumes; a file that it has lost has"
        " to be put back or removed"
    )


class _PatientFile(io.RawIOBase):
    """A file that is read from front to back, or by seeking: each read as of :func:`read_patiently`."""

    def __init__(self, path: Path, file: io.FileIO) -> None:
        self._path, self._at, self._file = path, 0, file

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        self._at = self._file.seek(offset, whence) if whence != os.SEEK_CUR else self._at + offset
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        data = read_patiently(partial(self._read, len(buffer)), str(self._path))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

    def _read(self, size: int) -> bytes:
        try:
            self._file.seek(self._at)
            return require_all(self._file.read(size), 0)
        except OSError as error:
            if is_of_the_system(error):
                with contextlib.suppress(OSError):  # the next try is to have it afresh
                    opened = _open_regular(self._path)
                    self._file.close()
                    self._file = opened
            raise

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


def open_patiently(path: Path) -> BinaryIO:
    """Open a file to be read and sought in; what fails for a reason that may pass is tried again.

    Raises:
        OSError: there is none, or it may not be read.
        StorageError: the system cannot read it; also of every read.
    """
    file = read_patiently(partial(_open_regular, path), str(path))
    return cast(BinaryIO, io.BufferedReader(_PatientFile(path, file)))


def _open_regular(path: Path) -> io.FileIO:
    require_regular(path)
    return path.open("rb", buffering=0)


class ByteRanges(ABC):
    """The bytes of a file, read by ranges; slices are copies.

    They may not be here yet, as those of an object in a store: what has to do with that does nothing, unless a class
    says otherwise.
    """

    name: str
    """The path of the file, or the URI of the object."""
    stays = True
    """True where bytes that were read once are on this machine's disk from then on."""
    can_be_mended = True
    """True where ``steady check`` can write anew what lies beside it."""
    num_compared = 256
    """Records that are compared with an index, at most."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read(self, start: int, end: int) -> memoryview:
        """Read the bytes from ``start`` up to ``end``. Raises StorageError: they cannot be had."""

    @abstractmethod
    def gather(self, offsets: Ints, width: int) -> Pixels:
        """Return the ``width`` bytes from each offset on, uint8[n, width]; errors as of :meth:`read`."""

    @abstractmethod
    def expect(self, starts: Ints, ends: Ints) -> None:
        """Begin to read some ranges, which will be needed soon, and return."""

    @abstractmethod
    def digest(self) -> str:
        """Return what tells its content from any other, sha256 (hex)."""

    @abstractmethod
    def identity(self) -> object:
        """Return what tells this state of the file from any other, without reading it."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the file; closing twice is fine."""

    def expect_no_order(self) -> None:
        """Let the system read what is asked for, and nothing around it."""
        return

    def request(self, starts: Ints, ends: Ints) -> Ints:
        """Begin to fetch what is missing of some ranges, before all else; return what :meth:`wait` takes."""
        return np.empty(0, np.int64)

    def wait(self, pages: Ints) -> None:
        """Wait until what was requested is on the disk. Raises StorageError: it cannot be had."""
        return

    def require(self, starts: Ints, ends: Ints) -> None:
        """Wait until some ranges are on the disk; errors as of :meth:`wait`."""
        self.wait(self.request(starts, ends))

    def fill(self) -> None:
        """Fetch all of it, if there is room, while there is nothing that is needed sooner."""
        return

    def share_room(self, total: int) -> None:
        """Note that files of so many bytes, this one among them, are read together."""
        return

    def list_beside(self, suffix: str = ".lst") -> Path | None:
        """Fetch the ``.lst``, or another file, beside it; return its path; None: it is not fetched, or not there."""
        return None

    def traffic(self) -> Traffic | None:
        """Return what was fetched of it since it was opened; None: it lies on this machine."""
        return None

    def __getitem__(self, key: slice) -> memoryview:
        start, end, _ = key.indices(len(self))
        return self.read(start, max(start, end))


class LocalFile(ByteRanges):
    """An open file whose slices are copies, read by calls that can fail and are tried again with a fresh open.

    A map would end the process where a page cannot be read (SIGBUS). Any number of threads may read.

    ``number``: of the open file; it may be closed afterwards.
    """

    def __init__(self, path: Path, number: int) -> None:
        self.path = path
        self.name = str(path)
        opened = _Descriptor(os.dup(number))
        self._descriptor: _Descriptor | None = opened
        self._opened: _Descriptor | None = opened  # keeps the lock that the file has
        self._size = opened.state[0]

    def __len__(self) -> int:
        return self._size

    def read(self, start: int, end: int) -> memoryview:
        """Read the bytes from ``start`` up to ``end``.

        Raises:
            DataError: it is closed.
            StorageError: the system does not give them, or the file has been cut short or replaced.
        """
        if (descriptor := self._descriptor) is None:
            raise DataError("closed")
        size = end - start
        try:  # a scan reads eight bytes of each of a million records: a context would take as long as the call
            data = pread(descriptor.number, size, start)
        except OSError:
            data = b""
        if len(data) == size:
            return memoryview(data)
        try:
            return memoryview(read_patiently(partial(self._reopen_and_read, start, size), str(self.path)))
        except OSError as error:
            raise StorageError(
                f"cannot read {self.path} any more ({error.strerror}): put it back and run the same command again"
            ) from error

    def _reopen_and_read(self, offset: int, size: int) -> bytes:
        descriptor = _Descriptor(open_descriptor(self.path, os.O_RDONLY))
        length, before = descriptor.state[0], self._size
        if length < before:
            raise StorageError(
                f"{self.path} was truncated while being read, from {before:,} to {length:,} bytes: put the whole file"
                " back and run the same command again"
            )
        if self._opened is not None and descriptor.state != self._opened.state:
            raise StorageError(f"{self.path} was replaced while being read: run the same command again")
        data = require_all(pread(descriptor.number, size, offset), size)
        if self._descriptor is not None:
            self._descriptor = descriptor
        return data

    def gather(self, offsets: Ints, width: int) -> Pixels:
        rows = np.empty((len(offsets), width), np.uint8)
        for start in range(0, len(offsets), _AT_ONCE):
            part = offsets[start : start + _AT_ONCE]
            first, end = int(part.min()), int(part.max()) + width
            if end - first <= _NEAR * len(part):
                data = np.frombuffer(self.read(first, end), np.uint8)
                rows[start : start + len(part)] = rows_at(data, part - first, width)
                continue
            self.expect(part, part + width)
            each = self._read_each(part.tolist(), width)
            rows[start : start + len(part)] = np.frombuffer(each, np.uint8).reshape(-1, width)
        return rows

    def _read_each(self, places: list[int], width: int) -> bytes:
        """Read as many bytes from each place on: a million records are opened by such reads."""
        if (descriptor := self._descriptor) is not None:
            number = descriptor.number
            with contextlib.suppress(OSError):
                data = b"".join([pread(number, width, place) for place in places])
                if len(data) == width * len(places):
                    return data
        return b"".join([self.read(place, place + width) for place in places])

    def expect(self, starts: Ints, ends: Ints) -> None:
        """Have the system fetch what will be read, all at once: on a disk that is several times as fast."""
        if (descriptor := self._descriptor) is not None:
            with contextlib.suppress(OSError):
                for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
                    advise(descriptor.number, "WILLNEED", start, end - start)

    def expect_no_order(self) -> None:
        if (descriptor := self._descriptor) is not None:
            with contextlib.suppress(OSError):
                advise(descriptor.number, "RANDOM")

    def digest(self) -> str:
        with self.path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def identity(self) -> object:
        """Return the states of the open file and of what is at its path now: the same, unless it was replaced."""
        opened = self._opened
        return str(self.path.absolute()), opened and file_state(opened.number), file_state(self.path)

    def close(self) -> None:
        """Let go of the file, when the last read has ended; closing twice is fine."""
        self._descriptor, self._opened = None, None


class _Descriptor:
    """An open file by its number; closed when the last reader has let go of it."""

    def __init__(self, number: int) -> None:
        self.number = number
        status = os.fstat(number)
        self.state = status.st_size, status.st_mtime_ns

    def __del__(self) -> None:
        os.close(self.number)


def read_range(path: str, offset: int, size: int) -> bytes:
    """Read ``size`` bytes of a file from ``offset`` on; fewer where it ends before.

    Raises:
        OSError: it cannot be read, or not all that it has.
    """
    with open(path, "rb", buffering=0) as file:  # noqa: PTH123 - called a million times
        file.seek(offset)
        data = file.read(size)
        while data and len(data) < size and (more := file.read(size - len(data))):
            data += more
        return require_all(data, max(0, min(size, os.fstat(file.fileno()).st_size - offset)))


def require_all(data: bytes | None, size: int) -> bytes:
    """Return what was read. Raises OSError where that is less than the file has: a system may give a part."""
    if data is None or len(data) < size:
        raise OSError(errno.EIO, f"only {len(data or b''):,} of {size:,} bytes came")
    return data
