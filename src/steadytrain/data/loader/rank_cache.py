"""Memory that the ranks of a machine have in common, so that they keep one copy of the images.

It is a file in ``/dev/shm``, or the folder that ``STEADYTRAIN_SHM`` names, found by a name that follows from the user,
the launch and what is kept in it. What holds, whatever happens:

- it begins as zeros, whoever comes first, and nobody waits for another;
- all of it is reserved before: where there is no room, that is an error and no signal later on;
- as soon as all processes of the launch have it, it loses its name: whatever ends them then leaves nothing behind. If
  they never all come, the last one that ends in order removes it;
- each process that has it holds a lock on it (``flock``), which falls with the process. A file that nobody holds was
  left by processes that were killed: it is not looked into, and emptied or removed by the next loader of this user,
  whether that shares or not.
"""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import shutil
import stat
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from steadytrain.files import lock, lock_at_once, lock_surely
from steadytrain.machine.facts import tasks_on
from steadytrain.machine.platform import (
    IS_LINUX,
    NO_FOLLOW,
    allocated_bytes,
    lock_open_file,
    open_descriptor,
    reserve,
    user_id,
)

ROOM = 2  # at most one part in so many of the free room there is used: others need it, too
MOST_RANKS = 4096

_HEAD = MOST_RANKS  # bytes: one for each process, 1 where it has come
_COUNTS = (  # how many processes of the launch are on this machine, and which of them this is
    ("LOCAL_WORLD_SIZE", "LOCAL_RANK"),  # torchrun
    ("OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),  # Open MPI
    ("MPI_LOCALNRANKS", "MPI_LOCALRANKID"),  # MPICH, Intel MPI
    ("SLURM_STEP_TASKS_PER_NODE", "SLURM_LOCALID"),  # srun
)
_LAUNCH = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "PMIX_NAMESPACE")
_LAUNCH_BY_SLURM = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
_PART = ("WORLD_SIZE", "GROUP_RANK")  # of a launch: two agents of one machine are two groups


@dataclass(frozen=True)
class LocalRanks:
    """The ranks of one launch on one machine: what they call it, how many they are, and which of them this is.

    ``count`` and ``rank`` are None where that is not known.
    """

    launch: str
    count: int | None = None
    rank: int | None = None


def find_local_ranks(launch: str | None, variables: Mapping[str, str]) -> LocalRanks | None:
    """Find the ranks that this one may share memory with; None where it is alone.

    ``launch``: a name that they have agreed on; empty: none; None: what torchrun or MPI say.

    >>> find_local_ranks(None, {"LOCAL_WORLD_SIZE": "8", "LOCAL_RANK": "3", "MASTER_PORT": "29500"})
    LocalRanks(launch='MASTER_PORT=29500', count=8, rank=3)
    >>> find_local_ranks(None, {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_PORT": "29500"}) is None
    True
    """
    count = rank = None
    node = variables.get("SLURM_NODEID", "")
    for size_name, rank_name in _COUNTS:
        size = tasks_on(int(node) if node.isdecimal() else 0, variables.get(size_name, ""))  # srun says 8(x2),4
        place = variables.get(rank_name, "")
        if size is not None and place.isdecimal() and int(place) < size <= MOST_RANKS:
            count, rank = size, int(place)
            break
    if launch is None:
        words = [f"{name}={variables[name]}" for name in (*_LAUNCH, *_LAUNCH_BY_SLURM) if name in variables]
        if not words or count is None or count < 2:
            return None
        launch = " ".join(words + [f"{name}={variables[name]}" for name in _PART if name in variables])
    return LocalRanks(launch, count, rank) if launch else None


class RankMemory:
    """Memory that this process has in common with other ranks: ``memory`` uint8[size], of zeros to begin with.

    It is there as long as this object, or a view of its memory.

    ``what``: the name of what is kept in it: whoever gives the same gets the same memory.

    Raises:
        OSError: there is no such memory here, or no room for it.
    """

    def __init__(self, ranks: LocalRanks, what: str, size: int) -> None:
        if not IS_LINUX:
            raise OSError(errno.ENOSYS, "sharing needs Linux")
        remove_left_files()
        key = "\n".join((ranks.launch, str(ranks.count), what, str(size)))
        path = _folder() / f"steadytrain-{user_id()}-{hashlib.sha256(key.encode()).hexdigest()[:32]}"
        self._file = file = _open_and_lock(path)
        self._end = weakref.finalize(self, _leave, path, file, os.getpid())
        try:
            self._reserve(_HEAD + size)
            with self.alone():  # a system may lack such locks: that is known now, and not in the middle of training
                pass
            mapped = np.frombuffer(mmap.mmap(file, _HEAD + size), dtype=np.uint8)
        except OSError:
            self._end()
            raise
        self.memory: NDArray[np.uint8] = mapped[_HEAD:]
        if ranks.count is not None:
            mapped[ranks.rank] = 1
            if mapped[: ranks.count].all():
                _unlink(path, file)

    def _reserve(self, size: int) -> None:
        """Have the system keep room for so many bytes. Raises OSError where there is none."""
        missing, free = size - allocated_bytes(os.fstat(self._file)), shutil.disk_usage(self._file).free
        if missing > free // ROOM:
            raise OSError(errno.ENOSPC, f"{_folder()} has {free / 1e6:,.0f} MB free, of which at most half is used")
        reserve(self._file, size)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep every other process that has the memory out meanwhile; not for several threads at once."""
        lock_open_file(self._file, locks=True)
        try:
            yield
        finally:
            lock_open_file(self._file, locks=False)


def remove_left_files() -> None:
    """Remove what killed processes of this user have left; what a process holds, or may hold, stays."""
    if not IS_LINUX:  # nothing is shared here
        return
    for path in _folder().glob(f"steadytrain-{user_id()}-*"):
        with suppress(OSError):
            file = _open(path)
            try:
                if lock_surely(file):
                    _unlink(path, file)
            finally:
                os.close(file)


def _folder() -> Path:
    return Path(os.environ.get("STEADYTRAIN_SHM", "/dev/shm"))


def _open_and_lock(path: Path) -> int:
    """Open the file that others use, or an empty one."""
    while True:
        file = _open(path, os.O_CREAT)
        try:
            if lock_at_once(file):
                os.ftruncate(file, 0)
            lock(file, shared=True)  # waits for nobody but one who is just looking whether it was left
            if _has_name(path, file):
                return file
        except BaseException:
            os.close(file)
            raise
        os.close(file)  # it was removed meanwhile


def _open(path: Path, flags: int = 0) -> int:
    """Open a file of this user. Raises PermissionError where it is somebody else's."""
    file = open_descriptor(path, os.O_RDWR | NO_FOLLOW | flags, 0o600)
    status = os.fstat(file)
    if status.st_uid == user_id() and stat.S_ISREG(status.st_mode):
        return file
    os.close(file)
    raise PermissionError(errno.EACCES, "another user has a file of that name", str(path))


def _unlink(path: Path, file: int) -> None:
    with suppress(FileNotFoundError):
        if _has_name(path, file):
            path.unlink()


def _has_name(path: Path, file: int) -> bool:
    """Return whether an open file is still found under this name."""
    with suppress(FileNotFoundError):
        return os.path.samestat(path.stat(follow_symlinks=False), os.fstat(file))
    return False


def _leave(path: Path, file: int, owner: int) -> None:
    """Let go of a file; the last one removes it. A forked process has the lock in common with its parent."""
    if os.getpid() == owner:
        if lock_at_once(file):
            _unlink(path, file)
        os.close(file)
