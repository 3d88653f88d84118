"""Differences between operating systems: the one module that asks which this is.

A flag that a system lacks is 0 here. A call that it lacks is made in another way, or left out where it only saves time.
What a whole feature stands on, such as ``fork``, raises OSError where there is none: the feature asks
:func:`require_posix` before it begins. Windows has been tried only by taking away the names that it lacks.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import IO, Any

from steadytrain.errors import InputError

IS_LINUX = sys.platform == "linux"
IS_POSIX = sys.platform != "win32"

NO_FOLLOW: int = getattr(os, "O_NOFOLLOW", 0)
"""The flag that opens no symbolic link."""
NO_WAIT: int = getattr(os, "O_NONBLOCK", 0)
TO_SYNC: int = os.O_RDONLY if IS_POSIX else os.O_RDWR
"""How a file is opened that is to be written through: Windows asks for the right to write."""
ASK_TO_SAVE: tuple[int, ...] = tuple(getattr(signal, name) for name in ("SIGUSR1", "SIGUSR2") if hasattr(signal, name))
KILL: int = getattr(signal, "SIGKILL", signal.SIGTERM)

_File = IO[Any] | int
_os: Any = os  # of names that a system may lack
_resource: Any = import_module("resource") if IS_POSIX else None


def _nothing(*args: Any, **options: Any) -> Any:
    """Do nothing: the system has no such call, and all goes on without it."""


def _missing(*args: Any, **options: Any) -> Any:
    raise OSError(errno.ENOSYS, "this system has no such call")


fork: Callable[[], int] = getattr(os, "fork", _missing)
kill_group: Callable[[int, int], None] = getattr(os, "killpg", _missing)
poll: Callable[[], Any] = getattr(select, "poll", _missing)
send_fds: Callable[..., int] = getattr(socket, "send_fds", _missing)
recv_fds: Callable[..., tuple[bytes, list[int], int, Any]] = getattr(socket, "recv_fds", _missing)
call_after_fork: Callable[..., None] = getattr(os, "register_at_fork", _nothing)
set_blocking: Callable[[int, bool], None] = getattr(os, "set_blocking", _nothing)
user_id: Callable[[], int] = getattr(os, "geteuid", int)
"""The user's number; 0, as files say of their owners, where users have none."""


def require_posix(what: str) -> None:
    """Raise InputError where a feature needs Linux or macOS."""
    if not IS_POSIX:
        raise InputError(f"{what} needs Linux or macOS: on Windows, run the same command in WSL2")


def open_descriptor(path: str | Path, flags: int, mode: int = 0o777) -> int:
    """Open a file as ``os.open`` does, its bytes unchanged; no child inherits it. Raises OSError."""
    return os.open(path, flags | getattr(os, "O_BINARY", 0), mode)


@contextmanager
def opened_folder(folder: Path) -> Iterator[int]:
    """Open a folder, no link to one, to lock it; -1, which cannot be locked, where the system opens no folders."""
    if not IS_POSIX:
        yield -1
        return
    descriptor = open_descriptor(folder, os.O_RDONLY | _os.O_DIRECTORY | NO_FOLLOW)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


if sys.platform != "win32":
    import fcntl

    pread, pwrite = os.pread, os.pwrite

    def flock(file: _File, *, shared: bool = False, wait: bool = True) -> None:
        """Lock an open file. Raises BlockingIOError where another has it, OSError where there are no locks."""
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))

    def unlock(file: _File) -> None:
        """Let go of the lock of a file that stays open."""
        fcntl.flock(file, fcntl.LOCK_UN)

else:
    import msvcrt

    _LOCKED = 0x7FFF_FFFE  # a byte that few files have: others cannot read what is locked
    _seeking = threading.Lock()

    @contextmanager
    def _at(file: int, place: int) -> Iterator[None]:
        """Stand at a place of a file, one thread at a time, and go back."""
        with _seeking, ExitStack() as stack:
            stack.callback(os.lseek, file, os.lseek(file, 0, os.SEEK_CUR), os.SEEK_SET)
            os.lseek(file, place, os.SEEK_SET)
            yield

    def _lock_byte(file: _File, mode: int) -> None:
        number = file if isinstance(file, int) else file.fileno()
        with _at(number, _LOCKED):
            msvcrt.locking(number, mode, 1)

    def flock(file: _File, *, shared: bool = False, wait: bool = True) -> None:
        """Lock an open file; there are neither shared locks nor those of folders (OSError)."""
        if shared or file == -1:
            raise OSError(errno.ENOLCK, "there are no such locks")
        while True:
            try:
                return _lock_byte(file, msvcrt.LK_NBLCK)
            except PermissionError as error:
                if not wait:
                    raise BlockingIOError(errno.EAGAIN, "another process has it") from error
            time.sleep(0.1)

    def unlock(file: _File) -> None:
        """Let go of the lock of a file that stays open. Raises OSError where there is none."""
        _lock_byte(file, msvcrt.LK_UNLCK)

    def pread(file: int, size: int, offset: int, /) -> bytes:
        """Read up to so many bytes at a place."""
        with _at(file, offset):
            return os.read(file, size)

    def pwrite(file: int, data: Any, offset: int, /) -> int:
        """Write bytes at a place; return how many were."""
        with _at(file, offset):
            return os.write(file, data)


def lock_open_file(file: int, *, locks: bool) -> None:
    """Lock all bytes of an open file, apart from :func:`flock`, or let go of them. Linux only. Raises OSError."""
    calls: Any = import_module("fcntl")
    kind = calls.F_WRLCK if locks else calls.F_UNLCK
    calls.fcntl(file, calls.F_OFD_SETLKW, struct.pack("@hhqqi0q", kind, os.SEEK_SET, 0, 0, 0))  # struct flock


def advise(file: int, how: str, start: int = 0, size: int = 0) -> None:
    """Tell the system how (``WILLNEED``, ``RANDOM``) a part of a file will be read, if it listens. Raises OSError."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file, start, size, getattr(os, f"POSIX_FADV_{how}"))


def reserve(file: int, size: int) -> None:
    """Have the system keep room for a file: else a write to its map could end the process. Raises OSError."""
    _os.posix_fallocate(file, 0, size) if hasattr(os, "posix_fallocate") else os.ftruncate(file, size)


def allocated_bytes(status: os.stat_result) -> int:
    """Return what a file takes on the disk; its size where the system does not tell."""
    return 512 * int(getattr(status, "st_blocks", -(-status.st_size // 512)))


def soft_limit(name: str) -> int | None:
    """Return a limit of this process, such as ``NOFILE``; None where there is none."""
    if _resource is None:
        return None
    limit: int = _resource.getrlimit(getattr(_resource, f"RLIMIT_{name}"))[0]
    return None if limit == _resource.RLIM_INFINITY else limit


def allow_open_files(num_files: int) -> None:
    """Raise this process's limit of open files, so that so many more can be opened, as far as the system lets it."""
    needed = num_files + 512  # beside those that a process announces
    if (soft := soft_limit("NOFILE")) is not None and soft < needed:
        hard = _resource.getrlimit(_resource.RLIMIT_NOFILE)[1]
        most = needed if hard == _resource.RLIM_INFINITY else min(needed, hard)
        with suppress(OSError, ValueError):
            _resource.setrlimit(_resource.RLIMIT_NOFILE, (max(soft, most), hard))


def peak_resident_bytes() -> int:
    """Return the most memory that this process has had."""
    if _resource is None:
        return int(import_module("psutil").Process().memory_info().peak_wset)
    return int(_resource.getrusage(_resource.RUSAGE_SELF).ru_maxrss) * (1 if sys.platform == "darwin" else 1024)


def usage(who: str, name: str) -> int:
    """Return a count that Linux keeps, of ``SELF``, ``CHILDREN`` or this ``THREAD``; 0 elsewhere."""
    return int(getattr(_resource.getrusage(getattr(_resource, f"RUSAGE_{who}")), name)) if IS_LINUX else 0


def keep_on(pid: int, processors: Collection[int]) -> bool:
    """Let a process (0: this thread) run on some processors alone; False where that is not to be had."""
    with suppress(OSError, AttributeError):  # a sandbox forbids it, or a cpuset has just changed
        _os.sched_setaffinity(pid, processors)
        return True
    return False


def seconds_since_boot() -> float:
    """Return the seconds since the system started. Linux only."""
    clocks: Any = time
    return float(clocks.clock_gettime(clocks.CLOCK_BOOTTIME))


def in_foreground() -> bool:
    """Say whether this process and its children have a terminal's keys: all of them get what Ctrl-C sends."""
    for file in (0, 2, 1):
        with suppress(OSError):
            return not IS_POSIX or _os.tcgetpgrp(file) == _os.getpgrp()
    return False


@contextmanager
def without_interrupts() -> Iterator[None]:
    """Start children in the block that hear no Ctrl-C, not even as they begin; on Windows soon after."""
    set_mask = getattr(signal, "pthread_sigmask", _nothing)
    before = set_mask(getattr(signal, "SIG_BLOCK", 0), [signal.SIGINT])
    try:
        yield
    finally:
        set_mask(getattr(signal, "SIG_SETMASK", 0), before)
