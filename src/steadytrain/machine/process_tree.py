"""Read processes, their threads and their descendants from ``/proc``.

What has ended, or may not be read by this user, is None or empty and never an error. What a child did is not lost when
it ends: the kernel adds it to the process that waited for it.
"""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from steadytrain.machine.platform import open_descriptor, pread
from steadytrain.machine.procfs import PAGE_BYTES, ROOT, TICKS, read, read_counters

_MOST_NEW = 500  # processes that are looked at between two readings
_MOST_STRANGERS = 500  # other processes that are read each time: 20 us each


@dataclass(slots=True)
class ProcessStat:
    """``stat`` of a process or a thread, times in ticks; ``waited``: of ended children that were waited for.

    Threads of the kernel have no ``virtual_bytes``.
    """

    name: str
    state: str
    parent: int
    minor_faults: int
    waited_minor_faults: int
    major_faults: int
    waited_major_faults: int
    user: int
    system: int
    waited_user: int
    waited_system: int
    num_threads: int
    started: int
    virtual_bytes: int
    pages: int

    @property
    def cpu_seconds(self) -> float:
        """Processor time, without that of children."""
        return (self.user + self.system) / TICKS


def parse_stat(text: str) -> ProcessStat | None:
    """Parse one line of ``stat``; a name may hold anything, brackets and spaces too.

    >>> parse_stat("7 (a) b) S 1 7 7 0 -1 4 9 0 3 0 150 50 0 0 20 0 2 0 1000 0 10 0").name
    'a) b'
    """
    head, _, tail = text.rpartition(")")
    words = tail.split()
    if len(words) < 22:
        return None
    counters = map(int, (words[1], *words[7:15], words[17], *words[19:22]))
    return ProcessStat(head.partition("(")[2], words[0], *counters)


def read_stat(folder: str) -> ProcessStat | None:
    """Read ``stat`` in a process's or a thread's folder."""
    text = read(f"{folder}/stat")
    return None if text is None else parse_stat(text)


def read_schedstat(folder: str) -> tuple[float, float, int] | None:
    """Read a thread's seconds on a processor, its seconds ready for one, and how often it got one."""
    words = (read(f"{folder}/schedstat") or "").split()
    return (int(words[0]) / 1e9, int(words[1]) / 1e9, int(words[2])) if len(words) == 3 else None


class ThreadFiles:
    """A thread of this process whose files stay open, for one who looks at it often: a tenth of the time.

    Its readings are None after it has ended, and where the system has no ``/proc``.
    """

    def __init__(self, tid: int) -> None:
        self._files: dict[str, int] = {}
        for name in ("schedstat", "stat"):
            with contextlib.suppress(OSError):
                self._files[name] = open_descriptor(f"/proc/self/task/{tid}/{name}", os.O_RDONLY)

    def _read(self, name: str) -> bytes | None:
        try:
            return pread(self._files[name], 1024, 0) if name in self._files else None
        except OSError:
            return None

    def times(self) -> tuple[float, float] | None:
        """Read its seconds on a processor, and those that it was ready for one."""
        words = (self._read("schedstat") or b"").split()
        return (int(words[0]) / 1e9, int(words[1]) / 1e9) if len(words) == 3 else None

    def state(self) -> str | None:
        """Read its state, such as ``R`` (running or ready) or ``S`` (sleeping)."""
        words = (self._read("stat") or b"").rpartition(b")")[2].split(None, 1)
        return words[0].decode() if words else None

    def close(self) -> None:
        """Close the files."""
        while self._files:
            os.close(self._files.popitem()[1])


def thread_ids(pid: int) -> list[int]:
    """List a process's threads, the main one first."""
    try:
        tids = [int(entry.name) for entry in os.scandir(f"/proc/{pid}/task")]
    except OSError:
        return []
    return sorted(tids, key=lambda tid: (tid != pid, tid))


def command_line(pid: int) -> str:
    """Read a process's command line, words parted by a space."""
    return (read(f"/proc/{pid}/cmdline") or "").replace("\0", " ").strip()


def owner(pid: int) -> str:
    """Name the user that a process belongs to; the number where it has no name, empty where that is not readable."""
    import psutil

    try:
        return psutil.Process(pid).username()
    except (psutil.Error, OSError):
        return ""


def open_gpu_devices(pid: int) -> tuple[str, ...] | None:
    """List the GPU devices that a process holds open, such as ``nvidia0`` or ``kfd``."""
    try:
        files = [entry.path for entry in os.scandir(f"/proc/{pid}/fd")]
    except OSError:
        return None
    devices = set()
    for file in files:
        try:
            target = os.readlink(file)  # noqa: PTH115 - some thousand of them, as fast as can be
        except OSError:
            continue
        device = target.removeprefix("/dev/")
        if device != target and (device == "kfd" or device.removeprefix("nvidia").isdigit()):
            devices.add(device)
    return tuple(sorted(devices))


def waits_in(pid: int, tid: int) -> str | None:
    """Return the system call that a thread sleeps in, with its file; empty where it runs."""
    text = read(f"/proc/{pid}/task/{tid}/syscall")
    if not text:
        place = read(f"/proc/{pid}/task/{tid}/wchan") or "0"
        return None if place == "0" else place
    words = text.split()
    if not words[0].isdigit():  # "running", or -1 for a wait outside of any call, such as a page fault
        return "page fault" if words[0] == "-1" else ""
    call = system_call(int(words[0]))
    if call not in CALLS_ON_FILES or len(words) < 2:
        return call
    try:
        file = os.readlink(f"/proc/{pid}/fd/{int(words[1], 16)}")  # noqa: PTH115 - as fast as can be
    except (OSError, ValueError):
        return call
    kind, numbered, _ = file.partition(":[")  # pipe:[4711]
    return f"{call} {kind if numbered else file}"


def _parse_calls(listed: str) -> dict[int, str]:
    return {int(number): name for name, number in (pair.split() for pair in listed.split(","))}


# The numbers of Linux's unistd.h, of the calls in which a training process sleeps.
_X86_64 = _parse_calls("""
    read 0, write 1, open 2, close 3, stat 4, fstat 5, lstat 6, poll 7, ioctl 16, pread64 17, pwrite64 18,
    readv 19, writev 20, select 23, pause 34, nanosleep 35, connect 42, accept 43, sendto 44, recvfrom 45,
    sendmsg 46, recvmsg 47, wait4 61, flock 73, fsync 74, fdatasync 75, getdents 78, rt_sigtimedwait 128,
    futex 202, getdents64 217, clock_nanosleep 230, epoll_wait 232, waitid 247, openat 257, newfstatat 262,
    pselect6 270, ppoll 271, epoll_pwait 281, accept4 288, preadv 295, statx 332, io_uring_enter 426,
    futex_waitv 449
""")
_GENERIC = _parse_calls("""
    epoll_pwait 22, ioctl 29, flock 32, openat 56, close 57, getdents64 61, read 63, write 64, readv 65,
    writev 66, pread64 67, pwrite64 68, preadv 69, pselect6 72, ppoll 73, newfstatat 79, fstat 80, fsync 82,
    fdatasync 83, waitid 95, futex 98, nanosleep 101, clock_nanosleep 115, rt_sigtimedwait 137, accept 202,
    connect 203, sendto 206, recvfrom 207, sendmsg 211, recvmsg 212, accept4 242, wait4 260, statx 291,
    io_uring_enter 426, futex_waitv 449
""")
_CALLS = {"x86_64": _X86_64, "aarch64": _GENERIC, "riscv64": _GENERIC, "loongarch64": _GENERIC}

CALLS_ON_FILES = {
    *("read", "write", "pread64", "pwrite64", "readv", "writev", "preadv", "fsync", "fdatasync", "getdents"),
    *("getdents64", "ioctl", "fstat", "flock", "recvfrom", "recvmsg", "sendto", "sendmsg"),
}
"""System calls whose first argument is an open file."""
CALLS_ON_PATHS = {"open", "openat", "stat", "lstat", "newfstatat", "statx"}


def system_call(number: int, architecture: str = platform.machine()) -> str:
    """Name a system call.

    >>> system_call(202, "x86_64"), system_call(98, "aarch64"), system_call(9999, "x86_64")
    ('futex', 'futex', 'system call 9999')
    """
    return _CALLS.get(architecture, {}).get(number, f"system call {number}")


@dataclass(frozen=True, kw_only=True)
class TreeStats:
    """Totals of a process and its descendants since they began, and what they hold now."""

    seconds: float
    system_seconds: float
    children_seconds: float
    minor_faults: int
    major_faults: int
    num_threads: int
    memory_bytes: int
    disk_read_bytes: int | None
    disk_write_bytes: int | None


class ProcessTree:
    """One process and its descendants, which are found as they come and go; those stay whose parents end."""

    def __init__(self, pid: int, root: Path = ROOT) -> None:
        self._proc = root / "proc"
        self.pid = pid
        self._started: dict[int, int] = {}  # by process: a number that is given again is another process
        self._seen: set[str] = set()  # in the folder, of the processes those that were asked
        self._strangers: dict[int, None] = {}  # processes that are neither members nor threads of the kernel
        if (stat := read_stat(f"{self._proc}/{pid}")) is not None:
            self._started[pid] = stat.started

    @property
    def pids(self) -> frozenset[int]:
        """Ids of the process and of the descendants that were there at the last reading."""
        return frozenset(self._started)

    def stats(self) -> dict[int, ProcessStat]:
        """Find and read all members that are there, parents before their children."""
        self._find_new()
        stats = {pid: read_stat(f"{self._proc}/{pid}") for pid in self._started}
        present = {pid: stat for pid, stat in stats.items() if stat and stat.started == self._started[pid]}
        self._started = {pid: stat.started for pid, stat in present.items()}
        return present

    def strangers(self) -> dict[int, ProcessStat]:
        """Read the processes that are no members, as of the last reading; 500 at most, no threads of the kernel."""
        for pid in [pid for pid in self._strangers if str(pid) not in self._seen]:
            del self._strangers[pid]
        stats = {pid: read_stat(f"{self._proc}/{pid}") for pid in list(self._strangers)[:_MOST_STRANGERS]}
        return {pid: stat for pid, stat in stats.items() if stat is not None and pid not in self._started}

    def disk_bytes(self, pids: Iterable[int]) -> dict[int, int]:
        """Read what processes have read from disks and written to them, of those that this user may look at."""
        counted = {pid: read_counters(f"{self._proc}/{pid}/io") for pid in pids}
        return {pid: io["read_bytes"] + io["write_bytes"] for pid, io in counted.items() if "write_bytes" in io}

    def read(self) -> TreeStats | None:
        """Add up what they have done; None where the process is gone, or this user may not look at it."""
        stats = self.stats()
        root = stats.pop(self.pid, None)
        if root is None:
            return None
        members = (root, *stats.values())
        waited = root.waited_user + root.waited_system
        children = sum(stat.user + stat.system + stat.waited_user + stat.waited_system for stat in stats.values())
        pages = root.pages
        for pid, stat in stats.items():  # what a child shares is in the parent's count: libraries, the loader's batches
            statm = (read(f"{self._proc}/{pid}/statm") or "").split()
            pages += max(0, stat.pages - (int(statm[2]) if len(statm) > 2 else 0))
        ios = [read_counters(f"{self._proc}/{pid}/io") for pid in self._started]
        disk = {name: [io[name] for io in ios if name in io] for name in ("read_bytes", "write_bytes")}
        return TreeStats(
            seconds=(root.user + root.system + waited + children) / TICKS,
            system_seconds=sum(stat.system + stat.waited_system for stat in members) / TICKS,
            children_seconds=(waited + children) / TICKS,
            minor_faults=sum(stat.minor_faults + stat.waited_minor_faults for stat in members),
            major_faults=sum(stat.major_faults + stat.waited_major_faults for stat in members),
            num_threads=sum(stat.num_threads for stat in members),
            memory_bytes=PAGE_BYTES * pages,
            disk_read_bytes=sum(disk["read_bytes"]) if disk["read_bytes"] else None,
            disk_write_bytes=sum(disk["write_bytes"]) if disk["write_bytes"] else None,
        )

    def _find_new(self) -> None:
        """Ask each process of the machine once who its parent is."""
        try:
            present = set(os.listdir(self._proc))  # noqa: PTH208 - the names alone, as fast as can be
        except OSError:
            return
        # Those with higher numbers first: the others are older, but where the kernel began its numbers anew.
        unasked = (int(name) for name in present - self._seen if name.isdigit())
        new = sorted(unasked, key=lambda pid: (pid <= self.pid, pid))
        self._seen = present.difference(map(str, new[_MOST_NEW:]))
        stats = {pid: read_stat(f"{self._proc}/{pid}") for pid in new[:_MOST_NEW] if pid not in self._started}
        strangers = {pid: stat for pid, stat in stats.items() if stat is not None}
        while children := [pid for pid, stat in strangers.items() if stat.parent in self._started]:
            for pid in children:
                self._started[pid] = strangers.pop(pid).started
        self._strangers |= {pid: None for pid, stat in strangers.items() if stat.virtual_bytes}
