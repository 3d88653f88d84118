"""A process and its children, as the kernel counts for them under ``/proc``.

The children of children belong to it too. What a child did is not lost when it ends: the kernel adds it to the
process that waited for it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from steadytrain.machine.open_files import Kept, count_in

_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
_MOST_NEW = 500  # processes that are looked at between two readings


@dataclass(frozen=True, kw_only=True)
class Counted:
    """What a process and its children have done since they began, in seconds, counts and bytes, and what they hold."""

    seconds: float
    system_seconds: float
    children_seconds: float
    minor_faults: int
    major_faults: int
    threads: int
    memory_bytes: int
    read_bytes: int | None
    write_bytes: int | None


class ProcessTree:
    """One process and its children, which are found as they come and go.

    Args:
        pid: of the process.
        root: where ``proc`` lies.
    """

    def __init__(self, pid: int, root: Path) -> None:
        self._proc = root / "proc"
        self._pid = pid
        self._own = _Member(self._proc / str(pid))
        self._children: dict[int, _Member] = {}
        self._seen: set[str] = set()  # in the folder, of the processes those that were asked

    @property
    def pids(self) -> frozenset[int]:
        """Of the process and of the children that were there at the last reading."""
        return frozenset((self._pid, *self._children))

    def read(self) -> Counted | None:
        """What they have done so far; None where the process is gone, or another may not look at it."""
        self._look()
        own = self._own.read()
        if own is None:
            return None
        told = {pid: member.read() for pid, member in self._children.items()}
        for pid in [pid for pid, of in told.items() if of is None]:
            self._children.pop(pid).close()
        children = [of for of in told.values() if of is not None]
        waited = own.waited_user + own.waited_system
        apart = sum(of.user + of.system + of.waited_user + of.waited_system for of in children)
        return Counted(
            seconds=(own.user + own.system + waited + apart) / _TICKS,
            system_seconds=(own.system + own.waited_system + sum(of.system + of.waited_system for of in children))
            / _TICKS,
            children_seconds=(waited + apart) / _TICKS,
            minor_faults=own.minor_faults + sum(of.minor_faults for of in children),
            major_faults=own.major_faults + sum(of.major_faults for of in children),
            threads=own.threads + sum(of.threads for of in children),
            # What a child shares is in the parent's count already: libraries, the feed's batches.
            memory_bytes=(own.pages + sum(max(0, of.pages - of.shared_pages) for of in children)) * _PAGE,
            read_bytes=_sum(of.read_bytes for of in (own, *children)),
            write_bytes=_sum(of.write_bytes for of in (own, *children)),
        )

    def close(self) -> None:
        """Let go of the files."""
        for member in (self._own, *self._children.values()):
            member.close()

    def _look(self) -> None:
        """Find the children that have come: each process of the machine is asked once who its parent is."""
        try:
            there = set(os.listdir(self._proc))  # noqa: PTH208 - the names alone, as fast as can be
        except OSError:
            return
        # Those with higher numbers first: the others are older, but where the kernel began its numbers anew.
        asked = (int(name) for name in there - self._seen if name.isdigit())
        new = sorted(asked, key=lambda pid: (pid <= self._pid, pid))
        self._seen = there.difference(map(str, new[_MOST_NEW:]))
        new = new[:_MOST_NEW]
        parents = {pid: _parent(self._proc / str(pid) / "stat") for pid in new}
        known = {self._pid, *self._children}
        while found := {pid for pid, parent in parents.items() if parent in known and pid not in known}:
            known |= found
            self._children |= {pid: _Member(self._proc / str(pid)) for pid in found}


@dataclass(slots=True, kw_only=True)
class _Told:
    minor_faults: int
    major_faults: int
    user: int
    system: int
    waited_user: int
    waited_system: int
    threads: int
    pages: int
    shared_pages: int
    read_bytes: int | None
    write_bytes: int | None


class _Member:
    """One process; each of its files is opened once."""

    def __init__(self, folder: Path) -> None:
        self._stat, self._statm, self._io = (Kept(folder / name) for name in ("stat", "statm", "io"))

    def read(self) -> _Told | None:
        # The name, in parentheses, may hold anything. Behind it: the state, then numbers, as in man 5 proc.
        told = self._stat.read().rpartition(b")")[2].split()
        if len(told) < 22:
            return None
        minor, waited_minor, major, waited_major, user, system, waited_user, waited_system = map(int, told[7:15])
        statm, io = self._statm.read().split(), self._io.read()
        return _Told(
            minor_faults=minor + waited_minor,
            major_faults=major + waited_major,
            user=user,
            system=system,
            waited_user=waited_user,
            waited_system=waited_system,
            threads=int(told[17]),
            pages=int(told[21]),
            shared_pages=int(statm[2]) if len(statm) > 2 else 0,
            read_bytes=count_in(io, "read_bytes"),
            write_bytes=count_in(io, "write_bytes"),
        )

    def close(self) -> None:
        for file in (self._stat, self._statm, self._io):
            file.close()


def _parent(path: Path) -> int:
    """Of a process; 0 where it has ended."""
    try:
        told = path.read_bytes().rpartition(b")")[2].split()
    except OSError:
        return 0
    return int(told[1]) if len(told) > 1 else 0


def _sum(told: Iterable[int | None]) -> int | None:
    """The sum of what is known; None where nothing is."""
    known = [number for number in told if number is not None]
    return sum(known) if known else None
