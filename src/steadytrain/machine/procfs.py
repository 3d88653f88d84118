"""Reading what the kernel tells under ``/proc`` and ``/sys``: None for what is not there or not to be read."""

from __future__ import annotations

import math
from pathlib import Path


def read(path: Path) -> str | None:
    """The text of a file, without the white space around it."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except (OSError, ValueError):
        return None


def number(path: Path) -> int | None:
    """The whole number that a file holds; None for ``max`` and other words."""
    return whole(read(path))


def whole(text: str | None) -> int | None:
    """A text as a whole number.

    >>> whole("12"), whole("-1"), whole("max"), whole(None)
    (12, -1, None, None)
    """
    try:
        return None if text is None else int(text)
    except ValueError:
        return None


def decimal(text: str | None) -> float | None:
    """A text as a number; None for what is none, infinity among it."""
    try:
        number = float(text or "")
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def table(text: str | None, between: str = ":") -> dict[str, str]:
    """Lines of a name and a value.

    >>> table("MemTotal:  16 kB\\nMemFree: 4 kB")
    {'MemTotal': '16 kB', 'MemFree': '4 kB'}
    """
    pairs = (line.partition(between) for line in (text or "").splitlines())
    return {name.strip(): value.strip() for name, found, value in pairs if found}


def counters(path: Path) -> dict[str, int]:
    """A file of lines such as ``nr_throttled 12``."""
    told = table(read(path), " ")
    return {name: value for name, text in told.items() if (value := whole(text)) is not None}


def chosen(path: Path) -> str | None:
    """The word in brackets of a file such as ``always [madvise] never``."""
    words = (read(path) or "").split()
    return next((word.strip("[]") for word in words if word.startswith("[")), None)


def span(text: str | None) -> int | None:
    """How many numbers a list such as ``0-3,8`` holds.

    >>> span("0-3,8"), span("0"), span("")
    (5, 1, None)
    """
    total = 0
    for part in (text or "").split(","):
        first, _, last = part.partition("-")
        low, high = whole(first), whole(last or first)
        if low is None or high is None:
            return None
        total += high - low + 1
    return total


def beside(folder: Path, pattern: str) -> list[Path]:
    """What matches a pattern in a folder, in order; nothing where the folder is not there."""
    try:
        return sorted(folder.glob(pattern))
    except OSError:
        return []
