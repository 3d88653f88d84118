"""Processes that are one job: started together, waited for together, ended together.

:func:`keep_ranks` starts the ranks of ``--procs N`` as torchrun does, without loading torch; :mod:`.node` starts those
of one machine of several; :mod:`.submit` runs a program for each machine. All of them wait by :func:`wait_together`.
"""

from __future__ import annotations

import ctypes
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import IO, Any

from steadytrain.distributed.world import LOOPBACK
from steadytrain.errors import InputError, RankLostError

USAGE = InputError.exit_code
RANK_LOST = RankLostError.exit_code
PREEMPTED = 75
INTERRUPTED = 130

GRACE = 30.0
"""Seconds for the other ranks to end by themselves, and then again after SIGTERM, before they are killed."""

LASTING = 300.0
"""Seconds after which a start of the ranks counts as good: earlier ones do not count against the restarts left."""

SHOWN_LINES = 20
_FORWARDED = ("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP")
_PR_SET_PDEATHSIG = 1  # <sys/prctl.h>

Events = queue.SimpleQueue[int | None]
"""The place of a process that has ended; None: a request to end."""


def job_exit_code(codes: Iterable[int]) -> int:
    """Make one exit code of those of several processes, in the order in which they ended.

    The first that failed by itself decides, not one that was stopped because of it. Ranks that were asked to stop and
    have saved make it 75, if nothing else happened.

    >>> job_exit_code([0, 0]), job_exit_code([4, 1, 143]), job_exit_code([75, 0]), job_exit_code([75, 137])
    (0, 1, 75, 137)
    """
    bad = [code for code in codes if code]
    caused_by_others = {RANK_LOST, 128 + signal.SIGTERM}
    for kind in ({*bad} - caused_by_others - {PREEMPTED}, {PREEMPTED}, {RANK_LOST}, {*bad}):
        if matching := [code for code in bad if code in kind]:
            return matching[0]
    return 0


def may_restart(code: int) -> bool:
    """Say whether another start can come to another end.

    >>> [code for code in (0, 1, 2, 4, 75, 130, 137) if may_restart(code)]
    [1, 4, 137]
    """
    return code not in (0, USAGE, PREEMPTED, INTERRUPTED)


def exit_code(returned: int) -> int:
    """Turn a process's return code into a shell's: 128 and the signal's number where one ended it.

    >>> exit_code(-9), exit_code(3)
    (137, 3)
    """
    return 128 - returned if returned < 0 else returned


def watch_ends(processes: Sequence[subprocess.Popen[bytes]], events: Events) -> list[threading.Thread]:
    """Start a thread for each process that puts its place among the events when it ends."""

    def watch(place: int, process: subprocess.Popen[bytes]) -> None:
        process.wait()
        events.put(place)

    threads = [threading.Thread(target=watch, args=pair) for pair in enumerate(processes)]
    for thread in threads:
        thread.start()
    return threads


def wait_together(
    processes: Sequence[subprocess.Popen[bytes]],
    events: Events,
    *,
    ask_to_end: Callable[[], None],
    grace_seconds: float,
    lenience_seconds: float = 0.0,
    may_fail: int = 0,
    kill_if_asked_twice: bool = False,
    on_end: Callable[[int], None] = lambda place: None,
) -> list[int]:
    """Wait until all processes have ended; where one ends badly, or a request comes, the others are made to end.

    Args:
        processes: that :func:`watch_ends` watches.
        events: ends and requests.
        ask_to_end: called once, to ask those that still run.
        grace_seconds: after they were asked; then they are killed.
        lenience_seconds: after a bad end, for the others to end by themselves before they are asked.
        may_fail: so many bad ends change nothing.
        kill_if_asked_twice: a second request ends the grace.
        on_end: called with each place.

    Returns:
        Places in the order in which the processes ended.
    """
    ended: list[int] = []
    deadline: float | None = None
    is_ending = is_asked = False
    while len(ended) < len(processes):
        try:
            place = events.get(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            if is_asked:
                for process in processes:
                    process.kill()
                deadline = None  # nothing outlives SIGKILL for long
            else:
                is_asked, deadline = True, time.monotonic() + grace_seconds
                ask_to_end()
            continue
        if place is not None:
            ended.append(place)
            on_end(place)
        elif is_asked:
            deadline = time.monotonic() if kill_if_asked_twice else deadline
            continue
        is_bad = place is None or sum(processes[place].returncode != 0 for place in ended) > may_fail
        if is_bad and not is_ending and len(ended) < len(processes):
            is_ending = True
            deadline = time.monotonic() + (0.0 if place is None else lenience_seconds)
    return ended


@contextmanager
def requests_to_end(events: Events, names: Sequence[str]) -> Iterator[list[int]]:
    """Take signals for requests to end, in the main thread; the list holds the numbers of those that came."""
    received: list[int] = []

    def ask(number: int, frame: FrameType | None) -> None:
        received.append(number)
        events.put(None)

    is_main = threading.current_thread() is threading.main_thread()
    with _handlers(dict.fromkeys(names, ask) if is_main else {}):
        yield received


@contextmanager
def _handlers(handlers: Mapping[str, Any]) -> Iterator[None]:
    numbers = {getattr(signal, name): handler for name, handler in handlers.items() if hasattr(signal, name)}
    before = {number: signal.signal(number, handler) for number, handler in numbers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def copy_lines(source: IO[bytes], sink: IO[bytes], prefix: bytes) -> None:
    """Copy whole lines, each behind ``prefix``, as they come. A reader that is gone stops nobody."""
    with source:
        for line in source:
            with suppress(OSError, ValueError):
                sink.write(prefix + line if line.endswith(b"\n") else prefix + line + b"\n")
                sink.flush()


def keep_ranks(
    command: Sequence[str], count: int, *, restarts: int = 3, say: Callable[[str], None] = lambda message: None
) -> int:
    """Start ``count`` ranks of a command, wait for them, and start them again where one was killed.

    They get the same files and signals as this process; rank 0 has the terminal, and what the others write to standard
    error is shown where they fail. Where one is killed (out of memory, by hand), all end and are started anew from the
    last checkpoint. An error of a rank's own is not cured by another start.

    Args:
        command: program and arguments, the same for each.
        count: of ranks, 1 or more.
        restarts: how often in a row they are started anew.
        say: takes a line about each new start.

    Returns:
        The exit code: that of the rank that failed first by itself, or 75 where all were asked to stop and have saved.

    Raises:
        InputError: the command cannot be started.
    """
    ranks: list[subprocess.Popen[bytes]] = []
    received: list[int] = []

    def send(number: int) -> None:
        for process in list(ranks):
            with suppress(ProcessLookupError):
                process.send_signal(number)

    def forward(number: int, frame: FrameType | None) -> None:
        received.append(number)
        # A terminal has sent Ctrl-C to all ranks already; kill -INT has not.
        if number != signal.SIGINT or not in_foreground():
            send(number)

    left = restarts
    with _handlers(dict.fromkeys((*_FORWARDED, "SIGINT"), forward)):
        while True:
            began = time.monotonic()
            errors: list[IO[bytes]] = []
            try:
                _start_ranks(command, count, ranks, errors)
                for number in received:  # before there was anyone to forward it to
                    send(number)
                events: Events = queue.SimpleQueue()
                threads = watch_ends(ranks, events)
                ended = wait_together(
                    ranks,
                    events,
                    ask_to_end=lambda: send(signal.SIGTERM),
                    grace_seconds=GRACE,
                    lenience_seconds=GRACE,
                )
                for thread in threads:
                    thread.join()
            finally:
                for process in ranks:
                    if process.poll() is None:
                        process.kill()
                        process.wait()
            codes = [process.returncode for process in ranks]
            failed = next((rank for rank in ended if codes[rank]), None)
            if failed is not None and codes[failed] == RANK_LOST and not received:
                # The others may notice that a rank was killed before its end is seen here.
                failed = next((rank for rank in ended if codes[rank] < 0), failed)
            killed = failed is not None and codes[failed] < 0
            if time.monotonic() - began > LASTING:
                left = restarts
            if not killed or received or not left:
                if failed and (killed or not codes[0]):
                    errors[failed - 1].seek(0)
                    for line in errors[failed - 1].read().decode(errors="replace").splitlines()[-SHOWN_LINES:]:
                        say(f"rank {failed}: {line}")
                return job_exit_code(exit_code(codes[rank]) for rank in ended)
            left -= 1
            assert failed is not None
            name = signal.Signals(-codes[failed]).name
            ranks.clear()
            say(f"rank {failed} was ended by {name}: all {count} ranks start again")


def _start_ranks(
    command: Sequence[str], count: int, ranks: list[subprocess.Popen[bytes]], errors: list[IO[bytes]]
) -> None:
    """Append the processes to ``ranks``, and what all but rank 0 write to standard error to ``errors``."""
    port = free_port()
    sys.stdout.flush()
    sys.stderr.flush()
    for rank in range(count):
        if rank:
            errors.append(tempfile.TemporaryFile())  # noqa: SIM115 - read when the rank has ended
        try:
            process = subprocess.Popen(
                command,
                env=os.environ | rank_variables(rank, count, port),
                stdin=subprocess.DEVNULL if rank else None,
                stdout=subprocess.DEVNULL if rank else None,
                stderr=errors[-1] if rank else None,
                preexec_fn=die_with_parent,
            )
        except OSError as error:
            raise InputError(f"cannot start {command[0]}: {error.strerror or error}") from error
        ranks.append(process)


def rank_variables(
    rank: int, size: int, port: int, *, first: int = 0, local_size: int | None = None, address: str = LOOPBACK
) -> Mapping[str, str]:
    """Make the environment variables, as torchrun names them, that tell a process which rank it is.

    Args:
        rank, size: of all.
        port: where they meet, at ``address``.
        first: the lowest rank of its machine.
        local_size: ranks on its machine; None: all.
        address: of rank 0's machine.

    >>> variables = rank_variables(3, 4, 29500, first=2, local_size=2, address="gpu1")
    >>> variables["RANK"], variables["LOCAL_RANK"], variables["MASTER_ADDR"]
    ('3', '1', 'gpu1')
    """
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank - first),
        "LOCAL_WORLD_SIZE": str(size if local_size is None else local_size),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
    }


def die_with_parent() -> None:
    """Have the system send this child SIGTERM, by which ranks save, when its parent is gone. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def in_foreground() -> bool:
    """Say whether this process and its children have a terminal's keys: all of them get what Ctrl-C sends."""
    for file in (0, 2, 1):
        try:
            return os.tcgetpgrp(file) == os.getpgrp()
        except OSError:
            continue
    return False


def free_port() -> int:
    """Find a port of this machine that nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
        return port
