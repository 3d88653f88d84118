"""System calls in which a training process sleeps, by name; numbers are those of Linux's ``unistd.h``.

>>> name(202, "x86_64"), name(98, "aarch64"), name(9999, "x86_64")
('futex', 'futex', 'system call 9999')
"""

from __future__ import annotations


def _table(listed: str) -> dict[int, str]:
    return {int(number): name for name, number in (pair.split() for pair in listed.split(","))}


_X86_64 = _table("""
    read 0, write 1, open 2, close 3, stat 4, fstat 5, lstat 6, poll 7, ioctl 16, pread64 17, pwrite64 18,
    readv 19, writev 20, select 23, pause 34, nanosleep 35, connect 42, accept 43, sendto 44, recvfrom 45,
    sendmsg 46, recvmsg 47, wait4 61, flock 73, fsync 74, fdatasync 75, getdents 78, rt_sigtimedwait 128,
    futex 202, getdents64 217, clock_nanosleep 230, epoll_wait 232, waitid 247, openat 257, newfstatat 262,
    pselect6 270, ppoll 271, epoll_pwait 281, accept4 288, preadv 295, statx 332, io_uring_enter 426,
    futex_waitv 449
""")
_GENERIC = _table("""
    epoll_pwait 22, ioctl 29, flock 32, openat 56, close 57, getdents64 61, read 63, write 64, readv 65,
    writev 66, pread64 67, pwrite64 68, preadv 69, pselect6 72, ppoll 73, newfstatat 79, fstat 80, fsync 82,
    fdatasync 83, waitid 95, futex 98, nanosleep 101, clock_nanosleep 115, rt_sigtimedwait 137, accept 202,
    connect 203, sendto 206, recvfrom 207, sendmsg 211, recvmsg 212, accept4 242, wait4 260, statx 291,
    io_uring_enter 426, futex_waitv 449
""")
_TABLES = {"x86_64": _X86_64, "aarch64": _GENERIC, "riscv64": _GENERIC, "loongarch64": _GENERIC}

ON_A_FILE = {
    *("read", "write", "pread64", "pwrite64", "readv", "writev", "preadv", "fsync", "fdatasync", "getdents"),
    *("getdents64", "ioctl", "fstat", "flock", "recvfrom", "recvmsg", "sendto", "sendmsg"),
}
"""Those whose first argument is an open file."""
FILES_BY_NAME = {"open", "openat", "stat", "lstat", "newfstatat", "statx"}
SLEEPS = {"nanosleep", "clock_nanosleep", "pause"}
CHILDREN = {"wait4", "waitid"}


def name(number: int, machine: str) -> str:
    """A system call's name on such a machine (as ``platform.machine()`` says it)."""
    return _TABLES.get(machine, {}).get(number, f"system call {number}")
