"""A few lines at the foot of a terminal, redrawn by a thread of their own; lines above them stay.

It imports rich, so it is itself imported only where there is a terminal to draw on. Whoever
feeds it facts pays for an attribute, never for a drawing.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Self, cast

from rich.console import Console
from rich.live import Live
from rich.text import Text

if TYPE_CHECKING:
    from types import TracebackType
    from typing import IO

DRAWS_PER_SECOND = 6


class Foot:
    """Draws ``lines(width, ascii_only)`` below everything that is printed, until it is closed; then it is gone.

    Args:
        stream: the terminal.
        lines: gives the lines now, for a width in columns and for whether the terminal's encoding has no box-drawing
            characters; called on the drawing thread only.

    While it is open, what others write to ``sys.stderr`` (and to ``sys.stdout`` where that is a terminal too) appears
    above it. The thread is joined on exit.
    """

    def __init__(self, stream: object, lines: Callable[[int, bool], list[Text]]) -> None:
        self._console = Console(file=cast("IO[str]", stream), force_terminal=True, highlight=False, soft_wrap=False)
        self._lines = lines
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._draw, name="steady-foot", daemon=True)
        self._live = Live(
            console=self._console,
            auto_refresh=False,  # rich's own refreshing thread is never joined
            transient=True,
            redirect_stdout=sys.stdout is not None and sys.stdout.isatty(),
        )

    def __enter__(self) -> Self:
        self._live.start()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._done.set()
        self._thread.join()
        self._live.stop()

    @property
    def width(self) -> int:
        """Columns of the terminal now."""
        return self._console.width

    def print(self, text: str, style: str = "") -> None:
        """A line that stays, above the foot."""
        self._console.print(Text(text, style=style))

    def _draw(self) -> None:
        while not self._done.wait(1 / DRAWS_PER_SECOND):
            width, ascii_only = self._console.width, self._console.options.ascii_only
            lines = self._lines(width, ascii_only)
            for text in lines:
                text.truncate(max(1, width - 1), overflow="crop" if ascii_only else "ellipsis")
            self._live.update(Text("\n").join(lines), refresh=True)


def bar(share: float, columns: int, ascii_only: bool) -> Text:
    """A bar of that many columns, filled to ``share`` (0 to 1)."""
    filled = round(max(0.0, min(1.0, share)) * columns)
    full, empty = ("#", "-") if ascii_only else ("━", "━")
    return Text.assemble((full * filled, "green"), (empty * (columns - filled), "bright_black"))


def bar_line(left: str, share: float | None, right: str, width: int, ascii_only: bool) -> Text:
    """``left``, a bar that takes what room there is (up to 40 columns; none for an unknown ``share``), ``right``."""
    room = min(40, width - len(left) - len(right) - 5)
    middle = [] if share is None or room < 5 else [bar(share, room, ascii_only)]
    return Text("  ").join([Text(left, style="bold"), *middle, Text(right)])
