"""A command that somebody else wrote, started as its shell would: same files, same signals, its exit code."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType
from typing import Any, Self

from steadytrain.errors import InputError
from steadytrain.launch.supervise import in_foreground
from steadytrain.machine.process import given_environment

_FORWARDED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
_BY_TERMINAL = ("SIGINT", "SIGQUIT")


class Started:
    """Runs ``command`` and never ends it: leaving waits for it. Signals sent to this process are passed on.

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
        self._before: dict[int, Any] = {}
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
                    self._forward(getattr(signal, name), by_terminal=name in _BY_TERMINAL)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            self._process.wait()
        finally:
            for number, handler in self._before.items():
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
        """Whether it ended within so many seconds."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _forward(self, number: int, *, by_terminal: bool) -> None:
        if signal.getsignal(number) is signal.SIG_IGN:
            return  # nohup: the command inherits that

        def pass_on(_: int, __: FrameType | None) -> None:
            if not (by_terminal and in_foreground()):
                self._process.send_signal(number)

        handler: Callable[[int, FrameType | None], None] = pass_on
        self._before[number] = signal.signal(number, handler)
