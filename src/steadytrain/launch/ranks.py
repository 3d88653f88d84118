"""Ranks of one machine, started and kept by the command that wants them: as torchrun does, without loading torch.

They get the same files and signals as this process; the first one has the terminal, and what the others write to
standard error is shown where they fail. Where one is killed (out of memory, by hand), the others end, and all of them
are started anew: they go on from the last checkpoint. What ends by an error of its own is not cured by another start.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import IO, Any

from steadytrain.distributed.world import LOOPBACK
from steadytrain.errors import InputError, RankLostError
from steadytrain.launch.endings import exit_code, verdict

GRACE = 30.0
"""Seconds that the others have to end by themselves, and then again when they are asked to, before they are killed."""

LASTING = 300.0
"""Ranks that worked for so many seconds have been worth their start: earlier ones do not count against them."""

SHOWN_LINES = 20
_FORWARDED = ("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP")
_PR_SET_PDEATHSIG = 1  # <sys/prctl.h>


def keep_ranks(
    command: Sequence[str], count: int, *, restarts: int = 3, say: Callable[[str], None] = lambda message: None
) -> int:
    """Start ``count`` ranks of a command, wait for them, and start them again where one was killed.

    Args:
        command: program and arguments, the same for each.
        count: of ranks, 1 or more.
        restarts: so often in a row they are started anew.
        say: told of each new start, and why.

    Returns:
        The exit code: that of the rank that failed first by itself, or 75 where all were asked to stop and have saved.

    Raises:
        InputError: the command cannot be started.
    """
    asked: list[int] = []
    left = restarts
    with _signals(asked) as forward:
        while True:
            began = time.monotonic()
            ranks = _Ranks(command, count, asked)
            forward.append(ranks.send)
            for number in asked:  # before there was anyone to pass it on to
                ranks.send(number)
            try:
                killed = ranks.wait()
            finally:
                forward.clear()
                ranks.end()
            if time.monotonic() - began > LASTING:
                left = restarts
            if killed is None or asked or not left:
                return ranks.code(say)
            left -= 1
            say(f"rank {killed.rank} was ended by {killed.signal}: all {count} ranks start again")


@dataclass
class _Rank:
    rank: int
    process: subprocess.Popen[bytes]
    errors: IO[bytes] | None

    @property
    def signal(self) -> str | None:
        """The name of the signal that ended it, if one did."""
        code = self.process.returncode
        return None if code is None or code >= 0 else signal.Signals(-code).name

    def last_lines(self) -> list[str]:
        """Of what it wrote to standard error."""
        if self.errors is None:
            return []
        self.errors.seek(0)
        return self.errors.read().decode(errors="replace").splitlines()[-SHOWN_LINES:]


class _Ranks:
    """One start of all of them."""

    def __init__(self, command: Sequence[str], count: int, asked: Sequence[int]) -> None:
        self._asked = asked
        self._ranks: list[_Rank] = []
        self._ended: list[_Rank] = []
        self._first: _Rank | None = None
        port = free_port()
        sys.stdout.flush()
        sys.stderr.flush()
        for rank in range(count):
            self._ranks.append(_start(command, rank, count, port))

    def wait(self) -> _Rank | None:
        """Until all have ended; the rank that a signal ended, not one of ours, and not another rank's end."""
        running, ending, told = list(self._ranks), float("inf"), 0
        while running:
            time.sleep(0.05)
            for one in [one for one in running if one.process.poll() is not None]:
                running.remove(one)
                self._ended.append(one)
                if one.process.returncode and self._first is None:
                    self._first, ending = one, time.monotonic() + GRACE
                elif one.process.returncode < 0 and not self._asked and self._is_lost(self._first):
                    self._first = one  # the others noticed before this process did
            if running and time.monotonic() > ending:
                self.send(signal.SIGTERM if not told else signal.SIGKILL)
                told, ending = told + 1, time.monotonic() + GRACE
        return self._first if self._first is not None and self._first.signal is not None else None

    def code(self, say: Callable[[str], None]) -> int:
        """The exit code of all of them, and what the one that failed said, if that was not the first rank."""
        failed, first = self._first, self._ranks[0].process.returncode
        if failed is not None and failed.rank and (failed.signal or not first):
            for line in failed.last_lines():
                say(f"rank {failed.rank}: {line}")
        return verdict(exit_code(one.process.returncode) for one in self._ended)

    def send(self, number: int) -> None:
        """A signal to all that still run."""
        for one in self._ranks:
            with suppress(ProcessLookupError):
                one.process.send_signal(number)

    def end(self) -> None:
        """Leave none behind."""
        for one in self._ranks:
            if one.process.poll() is None:
                one.process.kill()
                one.process.wait()

    @staticmethod
    def _is_lost(one: _Rank | None) -> bool:
        return one is not None and one.process.returncode == RankLostError.exit_code


def _start(command: Sequence[str], rank: int, count: int, port: int) -> _Rank:
    errors = tempfile.TemporaryFile() if rank else None  # noqa: SIM115 - read when the rank has ended
    try:
        process = subprocess.Popen(
            command,
            env=os.environ | variables(rank, count, port),
            stdin=None if rank == 0 else subprocess.DEVNULL,
            stdout=None if rank == 0 else subprocess.DEVNULL,
            stderr=errors,
            preexec_fn=die_with_parent,
        )
    except OSError as error:
        raise InputError(f"cannot start {command[0]}: {error.strerror or error}") from error
    return _Rank(rank, process, errors)


def variables(
    rank: int, size: int, port: int, *, first: int = 0, here: int | None = None, address: str = LOOPBACK
) -> Mapping[str, str]:
    """What tells a process which rank it is: torchrun's words.

    Args:
        rank, size: of all.
        port: where they meet, at ``address``.
        first: the lowest rank of its machine.
        here: ranks on its machine; None: all.
        address: of rank 0's machine.

    >>> told = variables(3, 4, 29500, first=2, here=2, address="gpu1")
    >>> told["RANK"], told["LOCAL_RANK"], told["MASTER_ADDR"]
    ('3', '1', 'gpu1')
    """
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank - first),
        "LOCAL_WORLD_SIZE": str(size if here is None else here),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
    }


def die_with_parent() -> None:
    """In a child: SIGTERM, by which ranks save, when its parent is gone, however that ended. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def in_foreground() -> bool:
    """Whether this process and its children have a terminal's keys: all of them get what Ctrl-C sends."""
    for file in (0, 2, 1):
        try:
            return os.tcgetpgrp(file) == os.getpgrp()
        except OSError:
            continue
    return False


def free_port() -> int:
    """A port of this machine that nobody listens on just now."""
    with socket.socket() as one:
        one.bind((LOOPBACK, 0))
        port: int = one.getsockname()[1]
        return port


@contextmanager
def _signals(asked: list[int]) -> Iterator[list[Callable[[int], None]]]:
    """Pass signals on to whatever is in the list, and note them; what a terminal sends, all ranks have already."""
    forward: list[Callable[[int], None]] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        for send in forward:
            send(number)

    def note(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        if not in_foreground():  # kill -INT: no terminal has sent it to the others
            for send in forward:
                send(number)

    handlers: dict[str, Any] = dict.fromkeys(_FORWARDED, pass_on) | {"SIGINT": note}
    before = {name: signal.signal(getattr(signal, name), handler) for name, handler in handlers.items()}
    try:
        yield forward
    finally:
        for name, handler in before.items():
            signal.signal(getattr(signal, name), handler)
