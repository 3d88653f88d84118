"""``steady watch --pid N`` and ``steady watch -- COMMAND``: a training process that is not ours."""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from steadytrain.cli.console import note, note_on_terminal, print_json, print_text
from steadytrain.cli.render import shorten_name
from steadytrain.config.plain import plain
from steadytrain.errors import InputError
from steadytrain.format import clock, pairs, percent, wrap
from steadytrain.machine.children import exit_code, start
from steadytrain.machine.platform import in_foreground
from steadytrain.machine.process import given_environment, take_signals
from steadytrain.monitor.process_watch import Cause, Moment, Reading, Sampler, read
from steadytrain.monitor.rules import LEAST
from steadytrain.reports.verdict import MAX_COLUMNS

KEPT_SECONDS = 120.0
_RECENT_SECONDS = 30.0
_READ_SECONDS = 2.0
_LINE_SECONDS = 5.0
_SETTLE_SECONDS = 5.0
_SENT_BY_TERMINAL = ("SIGINT", "SIGQUIT")
_FORWARDED = (*_SENT_BY_TERMINAL, "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")


class ProcessHistory:
    """The last two minutes of a watched process, the newest reading, and for how long which cause came first."""

    def __init__(self, pid: int, command: str, *, settles: bool) -> None:
        program, space, arguments = command.partition(" ")
        self.name = f"{pid} ({PurePath(program).name}{space}{arguments})"
        self.reading: Reading | None = None
        self.by_cause: dict[str, float] = defaultdict(float)
        self._moments: list[Moment] = []
        self._settles = settles
        self._read_at = 0.0

    @property
    def seconds(self) -> float:
        """Seconds that the process was watched."""
        return self._moments[-1].at if self._moments else 0.0

    def look(self, sampler: Sampler) -> None:
        """Look once more; every two seconds all of the last half minute is read anew."""
        moment = sampler.look()
        if moment is None:
            return
        self._moments = [*(earlier for earlier in self._moments if moment.at - earlier.at <= KEPT_SECONDS), moment]
        if moment.at - self._read_at >= _READ_SECONDS:
            self.reading = self.read(moment.at - _RECENT_SECONDS)
            if self.reading.seen is not None:
                self.by_cause[self.reading.causes[0].name] += moment.at - self._read_at
            self._read_at = moment.at

    def read(self, since: float = 0.0) -> Reading:
        """Read what is kept, without the first seconds of a command, in which it loads its libraries."""
        settling = min(_SETTLE_SECONDS, self.seconds / 3) if self._settles and self.seconds >= 6 else 0.0
        return read([moment for moment in self._moments if moment.at > settling and moment.at >= since])

    def is_over(self, seconds: float | None) -> bool:
        """Return whether the watch is at least so many seconds long."""
        return seconds is not None and self.seconds >= seconds


def watch_process(
    *, pid: int | None = None, command: Sequence[str] = (), seconds: float | None = None, json: bool = False
) -> int:
    """Watch a process and all that it started, or a command that is started here, and say what holds it back.

    Of ``pid`` there is a line every five seconds; Ctrl-C ends the watch, and never the process. A command's output is
    passed through, and its verdict goes to standard error.

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
        raise InputError("watching another process needs Linux's /proc, which does not exist here")
    if (pid is None) == (not command):
        raise InputError("use either --pid N or a command after --, not both")
    if seconds is not None and seconds <= 0:
        raise InputError(f"--seconds is {seconds:g}; it must be above 0")
    if pid is None:
        return _watch_command(command, seconds, json)
    with Sampler(pid) as sampler:
        history = ProcessHistory(pid, sampler.command, settles=False)
        note(f"watching process {shorten_name(history.name, 40)}; Ctrl-C stops watching, not the process")
        written = 0.0
        with contextlib.suppress(KeyboardInterrupt):
            while not history.is_over(seconds) and sampler.lives:
                time.sleep(sampler.pause)
                history.look(sampler)
                if history.reading is not None and history.seconds - written >= _LINE_SECONDS:
                    written = history.seconds
                    note(process_line(history.seconds, history.reading))
        state = "still running" if sampler.lives else "ended"
    _print_verdict(history, state, None, json=json)
    return 0


def _watch_command(command: Sequence[str], seconds: float | None, json: bool) -> int:
    name = " ".join(command)  # told before it starts: from then on the terminal is its own
    note_on_terminal(f"watching process {shorten_name(f'({name})', 40)}; the verdict comes when it ends")
    with started_command(command, stdout=sys.stderr.fileno() if json else None) as process:
        history = ProcessHistory(process.pid, name, settles=True)
        with contextlib.suppress(InputError), Sampler(process.pid) as sampler:  # it may have ended already
            while not history.is_over(seconds):
                try:
                    process.wait(sampler.pause)
                    break
                except subprocess.TimeoutExpired:
                    history.look(sampler)
        if history.is_over(seconds) and process.poll() is None:
            _print_verdict(history, "still running", None, json=json, to_stderr=True)
    code = exit_code(process.returncode)
    if not history.is_over(seconds):
        _print_verdict(history, f"ended with exit code {code}", code, json=json, to_stderr=True)
    return code


@contextlib.contextmanager
def started_command(command: Sequence[str], *, stdout: int | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """Run ``command`` as its shell would, pass signals on to it, and wait for it in the end: it is never ended here.

    What a terminal sends to all of its foreground processes (Ctrl-C) is not passed on, as the command has it already.

    Args:
        command: the program and its arguments, no shell.
        stdout: where its standard output goes: a file number, or None for ours.

    Raises:
        InputError: it cannot be started.
    """
    process = start(command, variables=given_environment(), stdout=stdout)

    def forward(number: int) -> None:
        if signal.Signals(number).name not in _SENT_BY_TERMINAL or not in_foreground():
            process.send_signal(number)

    # What we ignore, such as under nohup, the command has inherited.
    names = [name for name in _FORWARDED if signal.getsignal(getattr(signal, name)) is not signal.SIG_IGN]
    with take_signals(names, forward):
        try:
            yield process
        finally:
            process.wait()


def _print_verdict(
    history: ProcessHistory, state: str, exit_code: int | None, *, json: bool, to_stderr: bool = False
) -> None:
    reading = history.read()
    if json:
        keys = ("name", "share", "sentence", "evidence", "change")  # what a change saves is not known from outside
        document: dict[str, Any] = {
            "process": history.name,
            "state": state,
            "exit_code": exit_code,
            "seconds": round(history.seconds, 3),
            "causes": [{key: plain(getattr(cause, key)) for key in keys} for cause in reading.causes],
            "rhythm": plain(reading.rhythm),
            "seconds_by_cause": {cause: round(seconds, 3) for cause, seconds in history.by_cause.items()},
            "seen": plain(reading.seen),
            "not_measurable": list(reading.not_measurable),
        }
        print_json(document)
        sys.stdout.flush()
        return
    width = min(shutil.get_terminal_size().columns, MAX_COLUMNS)
    for line in process_verdict(reading, history.name, history.seconds, state, history.by_cause, width):
        note(line) if to_stderr else print_text(line)


def process_verdict(
    reading: Reading, name: str, seconds: float, state: str, by_cause: Mapping[str, float], width: int
) -> list[str]:
    """Format a verdict in at most ``width`` columns: the likeliest cause, its evidence, the change, other causes.

    Args:
        reading: of the whole watch, or of its end.
        seconds: how long it was watched.
        state: what became of the process, such as ``still running``.
        by_cause: seconds in which each cause came first.
    """
    first, *others = reading.causes
    ending = f": {state}, watched for {clock(seconds)}"
    lines = [f"process {shorten_name(name, width - 8 - len(ending))}{ending}", "", *wrap(_sentence(first), width, "")]
    lines += [line for figure in first.evidence for line in wrap(figure, width, "  - ", "    ")]
    if (rhythm := reading.rhythm) is not None:
        text = f"it alternates between {percent(rhythm.low, 0)} and {percent(rhythm.high, 0)}"
        text += f"; {rhythm.cycles:.0f} periods observed"
        lines += wrap(text, width, "  - ", "    ")
    if first.change:
        lines += wrap(first.change, width, "  change: ", "          ")
        lines.append(f"  more: steady help {first.name}")
    if others:
        lines += ["", "then:"]
        lines += [line for cause in others for line in wrap(_sentence(cause), width, "  - ", "    ")]
    if len(by_cause) > 1:
        longest = sorted(by_cause.items(), key=lambda item: -item[1])
        text = ", ".join(f"{cause} {clock(spent)}" for cause, spent in longest)
        lines += ["", *wrap(f"over the whole watch: {text}", width, "")]
    return [*lines, "", *wrap("not measurable here: " + "; ".join(reading.not_measurable), width, "", "  ")]


def _sentence(cause: Cause) -> str:
    share = f" ({percent(cause.share, 0)} of the time)" if cause.share >= LEAST else ""
    return f"{cause.name}{share}: {cause.sentence}"


def process_line(seconds: float, reading: Reading) -> str:
    """Describe what is seen now as one ``key=value`` line."""
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
