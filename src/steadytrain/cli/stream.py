"""Standard error as something that can be written to without a thought: it never raises."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Protocol


class Writable(Protocol):
    """As much of a text file as is written to here."""

    def write(self, text: str, /) -> object: ...
    def flush(self) -> object: ...


class Stream:
    """A text stream that never raises: what cannot be encoded is escaped, and a closed pipe swallows the rest."""

    def __init__(self, file: Writable | None) -> None:
        self._file = file
        self.encoding = getattr(file, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        """Write now, or nothing if the reader is gone."""
        if self._file is not None:
            try:
                self._file.write(text)
            except UnicodeEncodeError:
                self.write(text.encode(self.encoding, "backslashreplace").decode(self.encoding))
            except (OSError, ValueError):
                self._give_up()
        return len(text)

    def flush(self) -> None:
        """Hand what is buffered to the system."""
        if self._file is not None:
            try:
                self._file.flush()
            except (OSError, ValueError):
                self._give_up()

    def isatty(self) -> bool:
        """Whether a person can be drawn for here: a terminal that can move its cursor, and not drawn on already."""
        if self._file is None or os.environ.get("TERM", "") in ("", "dumb", "unknown"):
            return False
        drawn_on = hasattr(self._file, "rich_proxied_file")
        try:
            return not drawn_on and bool(getattr(self._file, "isatty", bool)())
        except ValueError:  # closed
            return False

    def _give_up(self) -> None:
        # The interpreter flushes standard error once more when it exits and would turn its failure into exit code 120.
        if self._file is sys.__stderr__:
            with contextlib.suppress(OSError), open(os.devnull, "w") as nothing:  # noqa: PTH123
                os.dup2(nothing.fileno(), 2)
        self._file = None
