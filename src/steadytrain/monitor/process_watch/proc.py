"""Reading ``/proc``: what the kernel says of one process, of its threads, and of the machine; counters since the start.

The only place that opens these files. What has ended or may not be read is None, never an error.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from steadytrain.machine.cgroups import groups
from steadytrain.machine.cgroups import quota as quota_of
from steadytrain.monitor.process_watch import calls

TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
_PIECE = 1 << 14
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
_MACHINE = platform.machine()


@dataclass(frozen=True)
class Stat:
    """``/proc/PID/stat`` of a process or a thread; ``started`` is in ticks and tells apart who had the same number."""

    name: str
    state: str
    parent: int
    major_faults: int
    cpu_seconds: float
    num_threads: int
    started: int
    memory_bytes: int


def text(path: str, *, whole: bool = False) -> str | None:
    """What a file of the kernel says; None where it is gone or closed to us.

    Args:
        path: of the file.
        whole: the kernel hands it out in one piece.
    """
    try:
        file = os.open(path, os.O_RDONLY)  # a third of the time that Python's files take, and there are many
    except OSError:
        return None
    try:
        pieces = [os.read(file, _PIECE)]
        while pieces[-1] and not (whole and len(pieces[-1]) < _PIECE):
            pieces.append(os.read(file, _PIECE))
    except OSError:
        return None
    finally:
        os.close(file)
    return b"".join(pieces).decode(errors="replace")


def stat(folder: str) -> Stat | None:
    """``stat`` in a process's or a thread's folder."""
    told = text(f"{folder}/stat", whole=True)
    return None if told is None else parse_stat(told)


def parse_stat(told: str) -> Stat | None:
    """One line of ``stat``; a name may hold anything, brackets and spaces too.

    >>> parse_stat("7 (a) b) S 1 7 7 0 -1 4 9 0 3 0 150 50 0 0 20 0 2 0 1000 0 10 0").name
    'a) b'
    """
    head, _, tail = told.rpartition(")")
    words = tail.split()
    if len(words) < 22:
        return None
    return Stat(
        name=head.partition("(")[2],
        state=words[0],
        parent=int(words[1]),
        major_faults=int(words[9]),
        cpu_seconds=(int(words[11]) + int(words[12])) / TICKS,
        num_threads=int(words[17]),
        started=int(words[19]),
        memory_bytes=int(words[21]) * PAGE_BYTES,
    )


def scheduled(folder: str) -> tuple[float, float, int] | None:
    """Of one thread: seconds on a processor, seconds ready for one until it got it, and how often it got one."""
    words = (text(f"{folder}/schedstat", whole=True) or "").split()
    return (int(words[0]) / 1e9, int(words[1]) / 1e9, int(words[2])) if len(words) == 3 else None


def threads(pid: int, root: str = "/proc") -> list[int]:
    """Thread numbers, the main one first."""
    try:
        found = [int(entry.name) for entry in os.scandir(f"{root}/{pid}/task")]
    except OSError:
        return []
    return sorted(found, key=lambda tid: (tid != pid, tid))


def children(pid: int, tids: Sequence[int], root: str = "/proc") -> list[int] | None:
    """The processes that these threads of one started; None where the kernel keeps no such list."""
    told = [text(f"{root}/{pid}/task/{tid}/children") for tid in tids]
    if told and told[0] is None:
        return None
    return [int(word) for one in told for word in (one or "").split()]


def parents(root: str = "/proc") -> dict[int, int]:
    """Every process's parent, by looking at all of them."""
    found = {}
    for entry in os.scandir(root):
        if entry.name.isdigit() and (told := stat(entry.path)) is not None:
            found[int(entry.name)] = told.parent
    return found


def table(path: str) -> dict[str, str]:
    """``key: value`` lines, or ``key value`` ones."""
    pairs = (line.replace(":", " ", 1).split(None, 1) for line in (text(path) or "").splitlines())
    return {pair[0]: pair[1].strip() for pair in pairs if len(pair) == 2}


def command(pid: int, root: str = "/proc") -> str:
    """The command line, words parted by a space."""
    return (text(f"{root}/{pid}/cmdline") or "").replace("\0", " ").strip()


def waits_in(pid: int, tid: int, root: str = "/proc") -> str | None:
    """The system call that a thread sleeps in, with its file; empty where it runs, None where it may not be read."""
    told = text(f"{root}/{pid}/task/{tid}/syscall")
    if not told:
        place = (text(f"{root}/{pid}/task/{tid}/wchan") or "0").strip()
        return None if place in ("", "0") else place
    words = told.split()
    if not words[0].isdigit():  # "running", or -1 for a wait outside of any call, such as a page fault
        return "page fault" if words[0] == "-1" else ""
    called = calls.name(int(words[0]), _MACHINE)
    if called not in calls.ON_A_FILE or len(words) < 2:
        return called
    try:
        file = str(Path(f"{root}/{pid}/fd/{int(words[1], 16)}").readlink())
    except (OSError, ValueError):
        return called
    kind, numbered, _ = file.partition(":[")  # pipe:[4711]
    return f"{called} {kind if numbered else file}"


def gpu_files(pid: int, root: str = "/proc") -> tuple[str, ...] | None:
    """GPU devices that a process holds open, such as ``nvidia0`` or ``kfd``; None where that may not be read."""
    try:
        files = [Path(entry) for entry in os.scandir(f"{root}/{pid}/fd")]
    except OSError:
        return None
    found = set()
    for file in files:
        try:
            target = str(file.readlink())
        except OSError:
            continue
        device = target.removeprefix("/dev/")
        if device != target and (device == "kfd" or device.removeprefix("nvidia").isdigit()):
            found.add(device)
    return tuple(sorted(found))


def allowed(pid: int) -> set[int] | None:
    """The processors that a process may run on, by affinity."""
    try:
        return os.sched_getaffinity(pid)
    except (OSError, AttributeError):
        return None


def processor_times(root: str = "/proc") -> dict[int, tuple[float, float, float, float]]:
    """Seconds of each processor since the start: at work, idle, idle while something waited for a disk, stolen."""
    found = {}
    for line in (text(f"{root}/stat") or "").splitlines():
        words = line.split()
        if words and words[0].startswith("cpu") and words[0] != "cpu":
            user, nice, system, idle, iowait, irq, soft, steal = (int(word) / TICKS for word in words[1:9])
            found[int(words[0][3:])] = (user + nice + system + irq + soft, idle, iowait, steal)
    return found


def pressure(root: str = "/proc") -> dict[str, float]:
    """Seconds in which something waited for ``cpu``, ``memory``, ``io`` since the start."""
    found = {}
    for what in ("cpu", "memory", "io"):
        first = (text(f"{root}/pressure/{what}") or "").split("\n")[0]
        total = first.rpartition("total=")[2]
        if total.isdigit():
            found[what] = int(total) / 1e6
    return found


def quota(pid: int) -> float | None:
    """The tightest quota of the control groups around a process, in processors."""
    return quota_of(pid=pid)


def throttled(pid: int) -> tuple[int, int] | None:
    """Periods of the tightest control group, and those of them in which the quota was used up."""
    found: list[tuple[int, int]] = []
    for group in _groups(pid):
        told = table(f"{group}/cpu.stat")
        if told.get("nr_periods", "0") != "0":
            found.append((int(told["nr_periods"]), int(told.get("nr_throttled", 0))))
    return max(found, key=lambda pair: pair[1], default=None)


def _groups(pid: int) -> Iterator[Path]:
    return groups(Path("/"), "cpu", pid=pid)
