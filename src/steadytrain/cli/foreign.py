"""``steady watch --pid N`` and ``steady watch -- COMMAND``: a training process that is not ours."""

from __future__ import annotations

import contextlib
import json as json_module
import shutil
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from steadytrain.cli.console import note
from steadytrain.cli.foreign_text import document, plain_line, shortened, verdict
from steadytrain.cli.stream import Stream
from steadytrain.cli.subprocess_command import Started
from steadytrain.errors import InputError
from steadytrain.monitor.process_watch import Moment, Reading, Sampler, read

if TYPE_CHECKING:
    from rich.text import Text

KEPT_SECONDS = 120.0
_NOW_SECONDS = 30.0
_READ_EVERY = 2.0
_LINE_EVERY = 5.0
_SHOWN = 200
_SETTLE_SECONDS = 5.0
_MOST_COLUMNS = 100


class Watched:
    """What a watch keeps: its last two minutes, the newest reading, and for how long which cause came first."""

    def __init__(self, *, name: str, settles: bool) -> None:
        self.name = name
        self.reading: Reading | None = None
        self.by_cause: Counter[str] = Counter()
        self.moments: deque[Moment] = deque()
        self.newest: tuple[Moment, ...] = ()  # what another thread may look at
        self._settles = settles
        self._read_at = 0.0

    @property
    def seconds(self) -> float:
        """How long it was watched."""
        return self.moments[-1].at if self.moments else 0.0

    def take(self, moment: Moment) -> None:
        """One more look; every two seconds all of the last half minute is read anew."""
        self.moments.append(moment)
        self.newest = (*self.newest[-_SHOWN:], moment)
        while moment.at - self.moments[0].at > KEPT_SECONDS:
            self.moments.popleft()
        if moment.at - self._read_at >= _READ_EVERY:
            self.reading = read([one for one in self._settled() if moment.at - one.at <= _NOW_SECONDS])
            if self.reading.seen is not None:
                self.by_cause[self.reading.causes[0].name] += moment.at - self._read_at  # type: ignore[assignment]
            self._read_at = moment.at

    def final(self) -> Reading:
        """The reading of all that is kept."""
        return read(self._settled())

    def _settled(self) -> list[Moment]:
        """Without the first seconds of a command, in which it loads its libraries."""
        until = min(_SETTLE_SECONDS, self.seconds / 3) if self._settles and self.seconds >= 6 else 0.0
        return [one for one in self.moments if one.at > until]


def watch_foreign(
    *, pid: int | None = None, command: Sequence[str] = (), seconds: float | None = None, json: bool = False
) -> int:
    """Watch a process and all that it started, or a command that is started here, and say what holds it back.

    A terminal shows it live; elsewhere there is a line every five seconds. Ctrl-C ends the watch of ``pid``, and never
    the process. A command's output is passed through and nothing is drawn over it; its verdict goes to standard error.

    Args:
        pid: a process that runs already.
        command: what to start instead.
        seconds: for how long to watch; until it ends where that is None. A command goes on after that.
        json: print one document on standard output; a command's own standard output then goes to standard error.

    Returns:
        The exit code: a command's own, else 0.

    Raises:
        InputError: no such process, it has ended, or the command cannot be started.
    """
    if not Path("/proc/self/stat").exists():
        raise InputError("a foreign process is watched through Linux's /proc, which is not here")
    if (pid is None) == (not command):
        raise InputError("give either --pid N or a command after --, not both")
    if seconds is not None and seconds <= 0:
        raise InputError(f"--seconds is {seconds:g}; it must be above 0")
    return _watch_command(command, seconds, json) if pid is None else _watch_pid(pid, seconds, json)


def _watch_pid(pid: int, seconds: float | None, json: bool) -> int:
    if pid <= 0:
        raise InputError(f"--pid is {pid}; process numbers are above 0")
    with Sampler(pid) as sampler:
        watched = Watched(name=_name(pid, sampler.command), settles=False)
        note(f"watching process {shortened(watched.name, 40)}; Ctrl-C ends the watch, not the process")
        with contextlib.suppress(KeyboardInterrupt), _shown(watched, quiet=json):
            while not _is_over(watched, seconds) and sampler.lives:
                time.sleep(sampler.pause)
                _look(sampler, watched)
        how = "still running" if sampler.lives else "ended"
    _tell(watched, how, None, json, to_stderr=False)
    return 0


def _watch_command(command: Sequence[str], seconds: float | None, json: bool) -> int:
    with Started(command, stdout=sys.stderr.fileno() if json else None) as started:
        watched = Watched(name=_name(started.pid, " ".join(command)), settles=True)
        with contextlib.suppress(InputError), Sampler(started.pid) as sampler:  # it may have ended already
            while not _is_over(watched, seconds) and not started.wait(sampler.pause):
                _look(sampler, watched)
        if started.exit_code is None:
            _tell(watched, "still running", None, json, to_stderr=True)
    code = started.exit_code or 0
    if seconds is None or not _is_over(watched, seconds):
        _tell(watched, f"ended with exit code {code}", code, json, to_stderr=True)
    return code


def _name(pid: int, command: str) -> str:
    program, space, rest = command.partition(" ")
    return f"{pid} ({PurePath(program).name}{space}{rest})"


def _look(sampler: Sampler, watched: Watched) -> None:
    moment = sampler.look()
    if moment is not None:
        watched.take(moment)


def _is_over(watched: Watched, seconds: float | None) -> bool:
    return seconds is not None and watched.seconds >= seconds


@contextlib.contextmanager
def _shown(watched: Watched, *, quiet: bool) -> Iterator[None]:
    """Draw on a terminal, or write a line now and then, while it is watched."""
    stream = Stream(sys.stderr)
    if stream.isatty():
        from steadytrain.cli.foreign_view import lines
        from steadytrain.cli.live import Foot

        def drawn(width: int, ascii_only: bool) -> list[Text]:
            return lines(watched.name, watched.newest, watched.reading, width, ascii_only)

        with Foot(stream, drawn):
            yield
    else:
        with _lines(stream, watched):
            yield


@contextlib.contextmanager
def _lines(stream: Stream, watched: Watched) -> Iterator[None]:
    """A plain line every five seconds, on a thread of its own."""
    import threading

    done = threading.Event()

    def write() -> None:
        while not done.wait(_LINE_EVERY):
            if watched.reading is not None:
                stream.write(plain_line(watched.seconds, watched.reading) + "\n")
                stream.flush()

    thread = threading.Thread(target=write, name="steady-watch-lines", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _tell(watched: Watched, how: str, code: int | None, json: bool, *, to_stderr: bool) -> None:
    reading = watched.final()
    if json:
        told: dict[str, Any] = document(reading, watched.name, watched.seconds, how, code, watched.by_cause)
        print(json_module.dumps(told, indent=2))
        sys.stdout.flush()
        return
    width = min(shutil.get_terminal_size().columns, _MOST_COLUMNS)
    text = "\n".join(verdict(reading, watched.name, watched.seconds, how, watched.by_cause, width))
    if to_stderr:
        note_lines(text)
    else:
        print(text)


def note_lines(text: str) -> None:
    """Several lines on standard error."""
    for one in text.split("\n"):
        note(one)
