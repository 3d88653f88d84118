"""Files of the kernel that are read again and again: opened once."""

from __future__ import annotations

import os
import re
from functools import lru_cache
from pathlib import Path


class Kept:
    """A file that is opened once and read anew each time; nothing where there is none, or none any more.

    A file below ``/proc/PID`` stays that of the process for which it was opened, whoever is given its number later.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._file: int | None = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._file = None

    def read(self) -> bytes:
        """All that it says now."""
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
        """The whole number that it holds; None for ``max``, ``-1`` and the like."""
        text = self.read().strip()
        return int(text) if text.isdigit() else None

    def count(self, name: str) -> int | None:
        """The number behind a name: a line such as ``nr_throttled 12`` or ``read_bytes: 4096``."""
        return count_in(self.read(), name)

    def close(self) -> None:
        """Let go of it; from then on it says nothing."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def count_in(text: bytes, name: str) -> int | None:
    """The number behind a name at the beginning of a line.

    >>> count_in(b"nr_periods 3\\nnr_throttled 12\\n", "nr_throttled"), count_in(b"a: 4 kB", "a"), count_in(b"", "a")
    (12, 4, None)
    """
    found = _line(name).search(text)
    return None if found is None else int(found[1])


@lru_cache(maxsize=64)
def _line(name: str) -> re.Pattern[bytes]:
    return re.compile(rb"^" + re.escape(name.encode()) + rb":?\s+(\d+)", re.MULTILINE)
