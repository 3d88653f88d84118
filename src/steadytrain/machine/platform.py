"""What differs between operating systems: the one module that asks which this is.

A flag that a system lacks is 0 here. A call that it lacks is made in another way, or left out where it only saves time.
What a whole feature stands on, such as ``fork``, raises OSError where there is none; the feature asks
:func:`require_posix` before it begins. Windows has been tried only with the names taken away that it lacks.
"""

from __future__ import annotations

import errno
import os
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext, suppress
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
    descriptor = open_descriptor(folder, os.O_RDONLY | os.O_DIRECTORY | NO_FOLLOW) if hasattr(os, "O_DIRECTORY") else -1
    try:
        yield descriptor
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def forget_read(mapped: Any) -> None:
    """Let go of a map's memory; what is read again comes from the disk."""
    if hasattr(mapped, "madvise"):
        mapped.madvise(4)  # MADV_DONTNEED, on Linux as on macOS


def allocated_bytes(status: os.stat_result) -> int:
    """Return what a file takes on the disk; its size where the system does not tell."""
    return 512 * int(getattr(status, "st_blocks", -(-status.st_size // 512)))


def _nothing(*args: Any, **options: Any) -> Any:
    """Do nothing: the system has no such call, and all goes on without it."""


def _missing(*args: Any, **options: Any) -> Any:
    raise OSError(errno.ENOSYS, "not to be had on this system")


if sys.platform != "win32":
    import fcntl
    import resource
    import select
    import socket

    pread, pwrite, fork, user_id, set_blocking = os.pread, os.pwrite, os.fork, os.geteuid, os.set_blocking
    poll, send_fds, recv_fds = select.poll, socket.send_fds, socket.recv_fds
    call_after_fork: Callable[..., None] = os.register_at_fork

    def flock(file: _File, *, shared: bool = False, wait: bool = True) -> None:
        """Lock an open file. Raises BlockingIOError where another has it, OSError where there are no locks."""
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))

    def unlock(file: _File) -> None:
        """Let go of the lock of a file that stays open."""
        fcntl.flock(file, fcntl.LOCK_UN)

    def soft_limit(name: str) -> int | None:
        """Return a limit of this process, such as ``NOFILE``; None where there is none."""
        limit = resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))[0]
        return None if limit == resource.RLIM_INFINITY else limit

    def allow_files(needed: int) -> None:
        """Raise the limit of open files to a number, as far as the system lets it."""
        hard, soft = resource.getrlimit(resource.RLIMIT_NOFILE)[1], soft_limit("NOFILE")
        if soft is not None and soft < needed:
            most = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
            with suppress(OSError, ValueError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))

    def peak_resident_bytes() -> int:
        """Return the most memory that this process has had."""
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most * 1024

    def kill_group(pid: int) -> None:
        """Kill a group of processes. Raises OSError where there is none."""
        os.killpg(pid, signal.SIGKILL)

    def in_foreground() -> bool:
        """Say whether this process and its children have a terminal's keys: all of them get what Ctrl-C sends."""
        for file in (0, 2, 1):
            with suppress(OSError):
                return os.tcgetpgrp(file) == os.getpgrp()
        return False

    @contextmanager
    def without_interrupts() -> Iterator[None]:
        """Start children in the block that hear no Ctrl-C, not even as they begin."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

else:
    import msvcrt

    fork = kill_group = poll = recv_fds = send_fds = _missing
    allow_files = call_after_fork = set_blocking = soft_limit = _nothing
    without_interrupts = nullcontext
    _LOCKED = 0x7FFF_FFFE  # a byte that few files have: others cannot read what is locked
    _seeking = threading.Lock()

    @contextmanager
    def _at(file: int, place: int) -> Iterator[None]:
        """Stand at a place of a file, one thread at a time, and go back."""
        with _seeking:
            before = os.lseek(file, 0, os.SEEK_CUR)
            os.lseek(file, place, os.SEEK_SET)
            try:
                yield
            finally:
                os.lseek(file, before, os.SEEK_SET)

    def flock(file: _File, *, shared: bool = False, wait: bool = True) -> None:
        """Lock an open file; there are neither shared locks nor those of folders (OSError)."""
        if shared or file == -1:
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
        while not _lock_byte(file, msvcrt.LK_NBLCK):
            if not wait:
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
            time.sleep(0.05)

    def unlock(file: _File) -> None:
        """Let go of the lock of a file that stays open."""
        _lock_byte(file, msvcrt.LK_UNLCK)

    def _lock_byte(file: _File, mode: int) -> bool:
        number = file if isinstance(file, int) else file.fileno()
        with _at(number, _LOCKED), suppress(PermissionError):  # another has it, or, to unlock, nobody
            msvcrt.locking(number, mode, 1)
            return True
        return False

    def pread(file: int, size: int, offset: int, /) -> bytes:
        """Read up to so many bytes at a place."""
        with _at(file, offset):
            return os.read(file, size)

    def pwrite(file: int, data: Any, offset: int, /) -> int:
        """Write bytes at a place; return how many were."""
        with _at(file, offset):
            return os.write(file, data)

    def user_id() -> int:
        """Return 0: what files say of their owner there."""
        return 0

    def peak_resident_bytes() -> int:
        """Return the most memory that this process has had."""
        import psutil

        return int(psutil.Process().memory_info().peak_wset)

    def in_foreground() -> bool:
        """Return True: all that share a console get its Ctrl-C."""
        return True


if sys.platform == "linux":

    def will_read(file: int, start: int, size: int) -> None:
        """Have the system fetch a part of a file that will be read soon. Raises OSError."""
        os.posix_fadvise(file, start, size, os.POSIX_FADV_WILLNEED)

    def read_in_no_order(file: int) -> None:
        """Have the system read nothing ahead. Raises OSError."""
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)

    def reserve(file: int, size: int) -> None:
        """Have the system keep room for a file: else a write to its map could end the process. Raises OSError."""
        os.posix_fallocate(file, 0, size)

    def lock_open_file(file: int, *, locks: bool) -> None:
        """Lock all bytes of an open file, apart from :func:`flock`, or let go of them. Raises OSError."""
        request = struct.pack("@hhqqi0q", fcntl.F_WRLCK if locks else fcntl.F_UNLCK, os.SEEK_SET, 0, 0, 0)
        fcntl.fcntl(file, fcntl.F_OFD_SETLKW, request)  # struct flock

    def involuntary_switches() -> int:
        """Return how often threads of this process have lost their processor."""
        return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw

    def waits_of_thread() -> int:
        """Return how often this thread has waited."""
        return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw

    def keep_on(pid: int, processors: Collection[int]) -> bool:
        """Let a process (0: this thread) run on some processors alone; False where that is not allowed."""
        with suppress(OSError):  # a sandbox forbids it, or a cpuset has just changed
            os.sched_setaffinity(pid, processors)
            return True
        return False

    def seconds_since_boot() -> float:
        """Return the seconds since the system started."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)

else:
    involuntary_switches = keep_on = lock_open_file = read_in_no_order = will_read = _nothing
    reserve = os.ftruncate
    seconds_since_boot = time.monotonic

    def waits_of_thread() -> int:
        """Return 0: it is not known here."""
        return 0
