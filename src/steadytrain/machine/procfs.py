"""Read files under ``/proc`` and ``/sys``, and parse what they say.

What is missing, or closed to this user, is None or empty and never an error.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from steadytrain.machine.platform import open_descriptor

ROOT = Path("/")
TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
PRESSURES = ("cpu", "memory", "io")


class ProcessorSeconds(NamedTuple):
    """A processor's seconds since the system started, by use; ``steal``: withheld by a hypervisor."""

    busy: float
    idle: float
    iowait: float
    steal: float


def read(path: Path | str) -> str | None:
    """Return the text of a file, stripped."""
    try:
        file = open_descriptor(path, os.O_RDONLY)  # a third of the time of Python's files; there are many
    except (OSError, ValueError):
        return None
    try:
        pieces = [os.read(file, 1 << 14)]
        while pieces[-1]:
            pieces.append(os.read(file, 1 << 14))
    except OSError:
        return None
    finally:
        os.close(file)
    return b"".join(pieces).decode(errors="replace").strip()


def read_counters(path: Path | str) -> dict[str, int]:
    """Read lines of a name and a whole number, such as ``nr_throttled 12`` or ``MemFree: 4 kB``; kB become bytes."""
    lines = (line.split() for line in (read(path) or "").splitlines())
    counted = (words for words in lines if words[1:] and words[1].isdecimal())
    return {words[0].rstrip(":"): int(words[1]) * (1024 if words[2:] == ["kB"] else 1) for words in counted}


def parse_table(text: str | None, separator: str = ":") -> dict[str, str]:
    """Parse lines of a name and a value.

    >>> parse_table("MemTotal:  16 kB\\nMemFree: 4 kB")
    {'MemTotal': '16 kB', 'MemFree': '4 kB'}
    """
    pairs = (line.partition(separator) for line in (text or "").splitlines())
    return {name.strip(): value.strip() for name, matched, value in pairs if matched}


def processor_seconds(root: Path = ROOT, usable: frozenset[int] | None = None) -> dict[int, ProcessorSeconds]:
    """Read the seconds of each processor, or of those in ``usable``, by use."""
    seconds: dict[int, ProcessorSeconds] = {}
    for line in (read(root / "proc/stat") or "").splitlines():
        if not line.startswith("cpu"):
            break
        name, *words = line.split()
        if not name[3:] or len(words) < 8 or (usable is not None and int(name[3:]) not in usable):
            continue
        # What follows (guests) is counted in user already.
        user, nice, system, idle, iowait, irq, softirq, steal = (int(word) / TICKS for word in words[:8])
        seconds[int(name[3:])] = ProcessorSeconds(user + nice + system + irq + softirq, idle, iowait, steal)
    return seconds


def steal_share(before: Mapping[int, ProcessorSeconds], after: Mapping[int, ProcessorSeconds]) -> float | None:
    """Return the share that the hypervisor withheld between two readings of :func:`processor_seconds`."""
    stolen = sum(seconds.steal for seconds in after.values()) - sum(seconds.steal for seconds in before.values())
    total = sum(map(sum, after.values())) - sum(map(sum, before.values()))
    return round(stolen / total, 4) if before and after and total > 0 else None


def pressure_seconds(path: Path) -> float | None:
    """Read the total of ``some avg10=1.53 avg60=0.50 avg300=0.10 total=12345``, which is in microseconds."""
    match = re.search(r"^some .*\btotal=(\d+)", read(path) or "", re.MULTILINE)
    return None if match is None else int(match[1]) / 1e6
