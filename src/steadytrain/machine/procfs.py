"""Read files under ``/proc`` and ``/sys``, and parse what they say.

What is missing, or closed to this user, is None or empty and never an error.
"""

from __future__ import annotations

import math
import os
import re
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path("/")
TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
PRESSURES = ("cpu", "memory", "io")
_PIECE = 1 << 14


class ProcessorSeconds(NamedTuple):
    """What became of a processor's seconds since the system started; ``steal``: withheld by a hypervisor."""

    busy: float
    idle: float
    iowait: float
    steal: float


def read(path: Path | str, *, one_piece: bool = False) -> str | None:
    """Return the text of a file, stripped.

    Args:
        path: of the file.
        one_piece: the kernel hands the file out in one piece: read once, without looking for its end.
    """
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)  # a third of the time of Python's files; there are many
    except (OSError, ValueError):
        return None
    try:
        pieces = [os.read(file, _PIECE)]
        while pieces[-1] and not (one_piece and len(pieces[-1]) < _PIECE):
            pieces.append(os.read(file, _PIECE))
    except OSError:
        return None
    finally:
        os.close(file)
    return b"".join(pieces).decode(errors="replace").strip()


class KernelFile:
    """A file that is opened once and read again and again; empty where there is none, or none any more.

    A file below ``/proc/PID`` stays that of the process for which it was opened, whoever is given its number later.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._file: int | None = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._file = None

    def read(self) -> bytes:
        """Return its present content."""
        parts: list[bytes] = []
        try:
            while self._file is not None and (part := os.pread(self._file, 65536, sum(map(len, parts)))):
                parts.append(part)
                if len(part) < 3072:  # the kernel fills a page before it makes one wait for more
                    break
        except OSError:
            return b""
        return b"".join(parts)

    def number(self) -> int | None:
        """Return the whole number that it holds; None for ``max``, ``-1`` and the like."""
        text = self.read().strip()
        return int(text) if text.isdigit() else None

    def close(self) -> None:
        """Close the file; from then on it reads as empty."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def counter(text: bytes, name: str) -> int | None:
    """Return the number behind a name at the beginning of a line.

    >>> counter(b"nr_periods 3\\nnr_throttled 12\\n", "nr_throttled"), counter(b"a: 4 kB", "a"), counter(b"", "a")
    (12, 4, None)
    """
    match = _counter_pattern(name).search(text)
    return None if match is None else int(match[1])


@lru_cache(maxsize=64)
def _counter_pattern(name: str) -> re.Pattern[bytes]:
    return re.compile(rb"^" + re.escape(name.encode()) + rb":?\s+(\d+)", re.MULTILINE)


def parse_int(text: str | None) -> int | None:
    """Parse a whole number.

    >>> parse_int("12"), parse_int("-1"), parse_int("max"), parse_int(None)
    (12, -1, None, None)
    """
    try:
        return None if text is None else int(text)
    except ValueError:
        return None


def parse_float(text: str | None) -> float | None:
    """Parse a finite number."""
    try:
        number = float(text or "")
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def parse_table(text: str | None, separator: str = ":") -> dict[str, str]:
    """Parse lines of a name and a value.

    >>> parse_table("MemTotal:  16 kB\\nMemFree: 4 kB")
    {'MemTotal': '16 kB', 'MemFree': '4 kB'}
    """
    pairs = (line.partition(separator) for line in (text or "").splitlines())
    return {name.strip(): value.strip() for name, found, value in pairs if found}


def read_counters(path: Path) -> dict[str, int]:
    """Read a file of lines such as ``nr_throttled 12``."""
    return {
        name: value for name, text in parse_table(read(path), " ").items() if (value := parse_int(text)) is not None
    }


def read_meminfo(root: Path = ROOT) -> dict[str, int]:
    """Read ``/proc/meminfo``, in bytes."""
    pairs = ((name, text.split()) for name, text in parse_table(read(root / "proc/meminfo")).items())
    return {
        name: int(words[0]) * (1024 if words[-1] == "kB" else 1)
        for name, words in pairs
        if words and words[0].isdigit()
    }


def read_choice(path: Path) -> str | None:
    """Return the word in brackets of a file such as ``always [madvise] never``."""
    words = (read(path) or "").split()
    return next((word.strip("[]") for word in words if word.startswith("[")), None)


def count_range(text: str | None) -> int | None:
    """Count the numbers in a list such as ``0-3,8``.

    >>> count_range("0-3,8"), count_range("0"), count_range("")
    (5, 1, None)
    """
    total = 0
    for part in (text or "").split(","):
        first, _, last = part.partition("-")
        low, high = parse_int(first), parse_int(last or first)
        if low is None or high is None:
            return None
        total += high - low + 1
    return total


def matching(folder: Path, pattern: str) -> list[Path]:
    """List what matches a pattern in a folder, in order; nothing where the folder is missing."""
    try:
        return sorted(folder.glob(pattern))
    except OSError:
        return []


def processor_seconds(stat: bytes, usable: frozenset[int] | None = None) -> dict[int, ProcessorSeconds]:
    """Parse ``/proc/stat``: the seconds of each processor, or of those in ``usable``.

    >>> processor_seconds(b"cpu  1 1 1 1 1 1 1 1 0 0\\ncpu0 100 0 200 800 50 0 0 10 70 0\\nintr 5", frozenset({0}))
    {0: ProcessorSeconds(busy=3.0, idle=8.0, iowait=0.5, steal=0.1)}
    """
    seconds: dict[int, ProcessorSeconds] = {}
    for line in stat.split(b"\n"):
        if not line.startswith(b"cpu"):
            break
        name, *words = line.split()
        if not name[3:] or len(words) < 8 or (usable is not None and int(name[3:]) not in usable):
            continue
        # What follows (guests) is counted in user already.
        user, nice, system, idle, iowait, irq, softirq, steal = (int(word) / TICKS for word in words[:8])
        seconds[int(name[3:])] = ProcessorSeconds(user + nice + system + irq + softirq, idle, iowait, steal)
    return seconds


def pressure_seconds(text: bytes) -> float | None:
    """Parse ``some avg10=1.53 avg60=0.50 avg300=0.10 total=12345``, the total in microseconds."""
    kind, found, total = text.partition(b"\n")[0].partition(b"total=")
    return int(total) / 1e6 if found and kind.startswith(b"some") else None


def steal_ticks(root: Path = ROOT) -> tuple[int, int] | None:
    """Read the ticks that the hypervisor withheld since the start, and all ticks, over all processors."""
    first = (read(root / "proc/stat") or "").split("\n")[0].split()
    if len(first) < 9 or first[0] != "cpu":
        return None
    times = [int(word) for word in first[1:9]]  # user, nice, system, idle, iowait, irq, softirq, steal
    return times[7], sum(times)


def steal_share(before: tuple[int, int] | None, after: tuple[int, int] | None) -> float | None:
    """Return the share that the hypervisor withheld between two answers of :func:`steal_ticks`.

    >>> steal_share((10, 1000), (60, 1200))
    0.25
    """
    if before is None or after is None or after[1] <= before[1]:
        return None
    return round((after[0] - before[0]) / (after[1] - before[1]), 4)
