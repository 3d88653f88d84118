"""Memory that the processes of one launch on one machine have in common, so that they keep one copy of the images.

It is a file in ``/dev/shm``, or the folder that ``STEADYTRAIN_SHM`` names, found by a name that follows from the user,
the launch and what is kept in it. What holds, whatever happens:

- it begins as zeros, whoever comes first, and nobody waits for another;
- all of it is reserved before it is used: where there is no room, that is an error and no signal later on;
- as soon as all processes of the launch have it, it loses its name: whatever ends them then leaves nothing behind. If
  they never all come, the last one that ends in order removes it;
- each process that has it holds a lock on it (``flock``), which falls with the process. A file that nobody holds was
  left by processes that were killed: it is not looked into, and removed by the next process of this user that shares.

A file is made without a name (``O_TMPFILE``), locked, and then given its name, which fails if there is such a file.
"""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import stat
import struct
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

VARIABLE, USUAL = "STEADYTRAIN_SHM", "/dev/shm"  # names another folder in memory
ROOM = 2  # of the room that is free there, one part in so many is used at most: others need it, too
STEP_BYTES = 2**24  # at least so much more is reserved at a time
MOST_RANKS = 4096

_HEAD = MOST_RANKS  # bytes: one for each process, 1 where it has come
_COUNTS = (  # how many processes of the launch are on this machine, and which of them this is
    ("LOCAL_WORLD_SIZE", "LOCAL_RANK"),  # torchrun
    ("OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),  # Open MPI
    ("MPI_LOCALNRANKS", "MPI_LOCALRANKID"),  # MPICH, Intel MPI
)
_LAUNCH = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "PMIX_NAMESPACE")
_PART = ("WORLD_SIZE", "GROUP_RANK")  # of a launch: two agents of one machine are two groups


@dataclass(frozen=True)
class Ranks:
    """The processes of one launch on one machine: what they call it, how many they are, and which of them this is.

    ``count`` and ``rank`` are None where that is not known.
    """

    launch: str
    count: int | None = None
    rank: int | None = None


def ranks_here(launch: str | None, variables: Mapping[str, str]) -> Ranks | None:
    """The processes that this one may share memory with; None where it is alone.

    Args:
        launch: a name that they have agreed on; empty: none; None: what torchrun or MPI have told them.
        variables: the environment.

    >>> ranks_here(None, {"LOCAL_WORLD_SIZE": "8", "LOCAL_RANK": "3", "MASTER_PORT": "29500"})
    Ranks(launch='MASTER_PORT=29500', count=8, rank=3)
    >>> ranks_here(None, {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_PORT": "29500"}) is None
    True
    """
    count, rank = _count(variables)
    if launch is None:
        told = [f"{name}={variables[name]}" for name in _LAUNCH if name in variables]
        if not told or count is None or count < 2:
            return None
        launch = " ".join(told + [f"{name}={variables[name]}" for name in _PART if name in variables])
    return Ranks(launch, count, rank) if launch else None


def _count(variables: Mapping[str, str]) -> tuple[int | None, int | None]:
    for size, place in _COUNTS:
        if variables.get(size, "").isdigit() and variables.get(place, "").isdigit():
            count, rank = int(variables[size]), int(variables[place])
            if rank < count <= MOST_RANKS:
                return count, rank
    return None, None


class Common:
    """Memory that this process has in common with others: ``memory`` uint8[size], of zeros to begin with.

    It is there as long as this object, or a view of its memory.

    Args:
        ranks: who shares it.
        what: is kept in it: whoever gives the same gets the same memory.
        size: in bytes.
        least: so many of them can be used at once, more after :meth:`reserve`; None: all.

    Raises:
        OSError: there is no such memory here, or no room for it.
    """

    def __init__(self, ranks: Ranks, what: str, size: int, least: int | None = None) -> None:
        if not hasattr(os, "O_TMPFILE"):
            raise OSError(errno.ENOSYS, "that needs Linux")
        sweep()
        told = "\n".join((ranks.launch, str(ranks.count), what, str(size)))
        path = _folder() / f"{_prefix()}{hashlib.sha256(told.encode()).hexdigest()[:32]}"
        self._file = file = _held(path)
        self._end = weakref.finalize(self, _leave, path, file, os.getpid())
        self._size, self._reserved = size, 0
        try:
            self.reserve(size if least is None else least)
            os.ftruncate(file, _HEAD + size)
            whole = np.frombuffer(mmap.mmap(file, _HEAD + size), dtype=np.uint8)
        except OSError:
            self._end()
            raise
        self.memory: NDArray[np.uint8] = whole[_HEAD:]
        if ranks.count is not None:
            whole[ranks.rank] = 1
            if whole[: ranks.count].all():
                _unlink(path, file)

    def reserve(self, size: int) -> None:
        """Let so many bytes be used, from the first on. Raises OSError where there is no room for them."""
        if size > self._reserved:
            size = min(self._size, max(size, self._reserved + STEP_BYTES)) if self._reserved else size
            _reserve(self._file, _HEAD + size)
            self._reserved = size

    @contextmanager
    def alone(self) -> Iterator[None]:
        """While this lasts, nobody else who has the memory is here; not for several threads at once."""
        # Of the open file, unlike other locks on its bytes, and apart from flock.
        fcntl.fcntl(self._file, fcntl.F_OFD_SETLKW, _lock(fcntl.F_WRLCK))
        try:
            yield
        finally:
            fcntl.fcntl(self._file, fcntl.F_OFD_SETLKW, _lock(fcntl.F_UNLCK))


def _lock(kind: int) -> bytes:
    """``struct flock`` of a whole file."""
    return struct.pack("@hhqqi0q", kind, os.SEEK_SET, 0, 0, 0)


def sweep() -> None:
    """Remove what killed processes of this user have left."""
    for path in _folder().glob(f"{_prefix()}*"):
        with suppress(OSError):
            file = _opened(path)
            try:
                _remove_if_left(path, file)
            finally:
                os.close(file)


def _folder() -> Path:
    return Path(os.environ.get(VARIABLE, USUAL))


def _prefix() -> str:
    return f"steadytrain-{os.getuid()}-"


def _held(path: Path) -> int:
    """The open file of this name, locked as one that is used; made if there is none."""
    while True:
        file = _joined(path)
        if file is None:
            file = _made(path)
        if file is not None:
            return file


def _joined(path: Path) -> int | None:
    """The file that others use; None where there is none, or no longer."""
    try:
        file = _opened(path)
    except FileNotFoundError:
        return None
    try:
        if not _remove_if_left(path, file):
            fcntl.flock(file, fcntl.LOCK_SH)  # waits for nobody but one who is just looking whether it was left
            if _is(path, file):
                return file
    except BaseException:
        os.close(file)
        raise
    os.close(file)
    return None


def _opened(path: Path) -> int:
    """A file of this user. Raises PermissionError where it is somebody else's."""
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    told = os.fstat(file)
    if told.st_uid == os.getuid() and stat.S_ISREG(told.st_mode):
        return file
    os.close(file)
    raise PermissionError(errno.EACCES, "somebody else has made a file of that name", str(path))


def _made(path: Path) -> int | None:
    """A new file; None where somebody else was faster."""
    file = os.open(path.parent, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_SH)
        files = os.open("/proc/self/fd", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.link(str(file), path, src_dir_fd=files, follow_symlinks=True)
        finally:
            os.close(files)
    except FileExistsError:
        os.close(file)
        return None
    except BaseException:
        os.close(file)
        raise
    return file


def _remove_if_left(path: Path, file: int) -> bool:
    """Whether nobody uses a file, which is then removed. Whoever asks must not hold it, or let go of it then."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    _unlink(path, file)
    return True


def _unlink(path: Path, file: int) -> None:
    with suppress(FileNotFoundError):
        if _is(path, file):
            path.unlink()


def _is(path: Path, file: int) -> bool:
    """Whether an open file is still found under this name."""
    with suppress(FileNotFoundError):
        return os.path.samestat(path.stat(follow_symlinks=False), os.fstat(file))
    return False


def _reserve(file: int, size: int) -> None:
    """All of a file's bytes, by whichever process comes first; OSError where there is no room."""
    told = os.fstat(file)
    missing = size - 512 * told.st_blocks
    room = os.statvfs(file)
    if missing > room.f_bavail * room.f_frsize // ROOM:
        free = room.f_bavail * room.f_frsize / 1e6
        raise OSError(errno.ENOSPC, f"{_folder()} has {free:,.0f} MB free, and half of that may be used")
    os.posix_fallocate(file, 0, size)  # or a write to the map could end the process


def _leave(path: Path, file: int, owner: int) -> None:
    """Let go of a file; the last one removes it. A forked process has the lock in common with its parent."""
    if os.getpid() == owner:
        _remove_if_left(path, file)
        os.close(file)
