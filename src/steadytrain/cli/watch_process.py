"""``steady watch --pid N`` and ``steady watch -- COMMAND``: a training process that is not ours."""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Self

from steadytrain.cli.console import Foot, Stream, note, print_json
from steadytrain.cli.render import shorten_name
from steadytrain.config.plain import plain
from steadytrain.errors import InputError
from steadytrain.format import clock, pairs
from steadytrain.launch.supervise import in_foreground
from steadytrain.machine.process import given_environment
from steadytrain.monitor.process_watch import Cause, Moment, Reading, Sampler, read
from steadytrain.monitor.rules import LEAST
from steadytrain.reports.verdict import MAX_COLUMNS, wrap

if TYPE_CHECKING:
    from rich.text import Text

KEPT_SECONDS = 120.0
_RECENT_SECONDS = 30.0
_READ_SECONDS = 2.0
_LINE_SECONDS = 5.0
_SETTLE_SECONDS = 5.0
_MOMENTS_SHOWN = 200
_FORWARDED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
_SENT_BY_TERMINAL = ("SIGINT", "SIGQUIT")


class ProcessHistory:
    """The last two minutes of a watched process, the newest reading, and for how long which cause came first."""

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
        """Take one more look in; every two seconds all of the last half minute is read anew."""
        self.moments.append(moment)
        self.newest = (*self.newest[-_MOMENTS_SHOWN:], moment)
        while moment.at - self.moments[0].at > KEPT_SECONDS:
            self.moments.popleft()
        if moment.at - self._read_at >= _READ_SECONDS:
            self.reading = self.read(moment.at - _RECENT_SECONDS)
            if self.reading.seen is not None:
                self.by_cause[self.reading.causes[0].name] += moment.at - self._read_at  # type: ignore[assignment]
            self._read_at = moment.at

    def read(self, since: float = 0.0) -> Reading:
        """Read what is kept, without the first seconds of a command, in which it loads its libraries."""
        settling = min(_SETTLE_SECONDS, self.seconds / 3) if self._settles and self.seconds >= 6 else 0.0
        return read([moment for moment in self.moments if moment.at > settling and moment.at >= since])

    def is_over(self, seconds: float | None) -> bool:
        """Say whether it was watched for so many seconds."""
        return seconds is not None and self.seconds >= seconds


def watch_process(
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
    if pid is None:
        return _watch_command(command, seconds, json)
    if pid <= 0:
        raise InputError(f"--pid is {pid}; process numbers are above 0")
    with Sampler(pid) as sampler:
        history = ProcessHistory(name=_name(pid, sampler.command), settles=False)
        note(f"watching process {shorten_name(history.name, 40)}; Ctrl-C ends the watch, not the process")
        with contextlib.suppress(KeyboardInterrupt), _shown(history):
            while not history.is_over(seconds) and sampler.lives:
                time.sleep(sampler.pause)
                _look(sampler, history)
        state = "still running" if sampler.lives else "ended"
    _print_verdict(history, state, None, json=json, to_stderr=False)
    return 0


def _watch_command(command: Sequence[str], seconds: float | None, json: bool) -> int:
    with StartedCommand(command, stdout=sys.stderr.fileno() if json else None) as started:
        history = ProcessHistory(name=_name(started.pid, " ".join(command)), settles=True)
        with contextlib.suppress(InputError), Sampler(started.pid) as sampler:  # it may have ended already
            while not history.is_over(seconds) and not started.wait(sampler.pause):
                _look(sampler, history)
        if started.exit_code is None:
            _print_verdict(history, "still running", None, json=json, to_stderr=True)
    code = started.exit_code or 0
    if not history.is_over(seconds):
        _print_verdict(history, f"ended with exit code {code}", code, json=json, to_stderr=True)
    return code


def _name(pid: int, command: str) -> str:
    program, space, rest = command.partition(" ")
    return f"{pid} ({PurePath(program).name}{space}{rest})"


def _look(sampler: Sampler, history: ProcessHistory) -> None:
    moment = sampler.look()
    if moment is not None:
        history.take(moment)


@contextlib.contextmanager
def _shown(history: ProcessHistory) -> Iterator[None]:
    """Draw on a terminal, or write a line every five seconds, while a process is watched."""
    stream = Stream(sys.stderr)
    if stream.isatty():
        from steadytrain.cli.watch_screen import process_lines

        def lines(width: int, ascii_only: bool) -> list[Text]:
            return process_lines(history.name, history.newest, history.reading, width, ascii_only)

        with Foot(stream, lines):
            yield
        return
    done = threading.Event()

    def write() -> None:
        while not done.wait(_LINE_SECONDS):
            if history.reading is not None:
                stream.write(process_line(history.seconds, history.reading) + "\n")
                stream.flush()

    thread = threading.Thread(target=write, name="steady-watch-lines", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _print_verdict(history: ProcessHistory, state: str, exit_code: int | None, *, json: bool, to_stderr: bool) -> None:
    reading, name, seconds, by_cause = history.read(), history.name, history.seconds, history.by_cause
    if json:
        keys = ("name", "share", "sentence", "evidence", "change")  # what a change saves is not known from outside
        document: dict[str, Any] = {
            "process": name,
            "state": state,
            "exit_code": exit_code,
            "seconds": round(seconds, 3),
            "causes": [{key: plain(getattr(cause, key)) for key in keys} for cause in reading.causes],
            "rhythm": plain(reading.rhythm),
            "seconds_by_cause": {cause: round(spent, 3) for cause, spent in by_cause.items()},
            "seen": plain(reading.seen),
            "not_measurable": list(reading.not_measurable),
        }
        print_json(document)
        sys.stdout.flush()
        return
    width = min(shutil.get_terminal_size().columns, MAX_COLUMNS)
    for line in process_verdict(reading, name, seconds, state, by_cause, width):
        if to_stderr:
            note(line)
        else:
            print(line)


def process_verdict(
    reading: Reading, name: str, seconds: float, state: str, by_cause: Mapping[str, float], width: int
) -> list[str]:
    """Word a verdict in lines of at most ``width`` columns: the likeliest cause, its evidence, the change, the others.

    Args:
        reading: of the whole watch, or of its end.
        name: of the process.
        seconds: how long it was watched.
        state: what became of it, such as ``still running``.
        by_cause: seconds in which each cause came first.
        width: columns.
    """
    first, *others = reading.causes
    ending = f": {state}, watched for {clock(seconds)}"
    lines = [f"process {shorten_name(name, width - 8 - len(ending))}{ending}", "", *wrap(_sentence(first), width, "")]
    lines += [line for figure in first.evidence for line in wrap(figure, width, "  - ", "    ")]
    if (rhythm := reading.rhythm) is not None:
        text = f"it swings between {rhythm.low:.0%} and {rhythm.high:.0%}; {rhythm.cycles:.0f} periods were seen"
        lines += wrap(text, width, "  - ", "    ")
    if first.change:
        lines += wrap(first.change, width, "  change: ", "          ")
    if others:
        lines += ["", "then:"]
        lines += [line for cause in others for line in wrap(_sentence(cause), width, "  - ", "    ")]
    if len(by_cause) > 1:
        longest = sorted(by_cause.items(), key=lambda item: -item[1])
        text = ", ".join(f"{cause} {clock(spent)}" for cause, spent in longest)
        lines += ["", *wrap(f"over the whole watch: {text}", width, "")]
    return [*lines, "", *wrap("not measurable here: " + "; ".join(reading.not_measurable), width, "", "  ")]


def _sentence(cause: Cause) -> str:
    share = f" ({cause.share:.0%} of the time)" if cause.share >= LEAST else ""
    return f"{cause.name}{share}: {cause.sentence}"


def process_line(seconds: float, reading: Reading) -> str:
    """Word what is seen now as one ``key=value`` line."""
    values: dict[str, object] = {"seconds": f"{seconds:.0f}", "cause": reading.causes[0].name}
    if (seen := reading.seen) is not None:
        values["working"] = f"{seen.working:.2f}"
        values |= {f"gpu{gpu.index}": f"{gpu.utilisation or 0.0:.2f}" for gpu in seen.gpus}
        values |= {"cpu": f"{seen.cpu:.2f}", "cores": seen.machine.cores}
        machine = {name: getattr(seen.machine, name) for name in ("idle", "iowait", "others")}
        values |= {name: f"{value:.2f}" for name, value in machine.items() if value is not None}
        if seen.disk_read_bytes is not None:
            values["disk_read_bytes"] = f"{seen.disk_read_bytes:.0f}"
        if seen.rhythm is not None:
            values |= {"period_seconds": f"{seen.rhythm.period_seconds:.2f}", "duty": f"{seen.rhythm.duty:.2f}"}
    return "watch " + pairs(values)


class StartedCommand:
    """Runs ``command`` as its shell would and never ends it: leaving waits for it. Signals to us are passed on.

    What a terminal sends to all of its foreground processes (Ctrl-C) is not passed on, as the command has it already.

    Args:
        command: the program and its arguments, no shell.
        stdout: where its standard output goes: a file number, or None for ours.

    Raises:
        InputError: it cannot be started.
    """

    def __init__(self, command: Sequence[str], *, stdout: int | None = None) -> None:
        if not command:
            raise InputError("nothing to start: give the command after --, as in `steady watch -- python train.py`")
        self._handlers: dict[int, Any] = {}
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            self._process = subprocess.Popen(command, stdout=stdout, env=given_environment())
        except FileNotFoundError as error:
            raise InputError(f"cannot start {command[0]}: there is no such command or file") from error
        except (OSError, ValueError) as error:
            raise InputError(f"cannot start {command[0]}: {getattr(error, 'strerror', None) or error}") from error

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for name in _FORWARDED:
                if hasattr(signal, name):
                    self._forward(getattr(signal, name), by_terminal=name in _SENT_BY_TERMINAL)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            self._process.wait()
        finally:
            for number, handler in self._handlers.items():
                signal.signal(number, handler)

    @property
    def pid(self) -> int:
        """Its process number."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """As a shell tells it: 128 and the signal's number where one ended it; None while it runs."""
        code = self._process.poll()
        return code if code is None or code >= 0 else 128 - code

    def wait(self, seconds: float) -> bool:
        """Say whether it ended within so many seconds."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _forward(self, number: int, *, by_terminal: bool) -> None:
        if signal.getsignal(number) is signal.SIG_IGN:
            return  # nohup: the command inherits that

        def forward(_: int, __: FrameType | None) -> None:
            if not (by_terminal and in_foreground()):
                self._process.send_signal(number)

        self._handlers[number] = signal.signal(number, forward)
