"""Processes that are one job: started together, waited for together, ended together.

:func:`keep_ranks` starts the ranks of ``--procs N`` as torchrun does, without loading torch; :mod:`.node` starts those
of one machine of several; :mod:`.submit` runs a program for each machine. All of them
wait by :func:`steadytrain.machine.children.wait_together`.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import IO

from steadytrain.distributed.world import LOOPBACK
from steadytrain.errors import InputError, RankLostError
from steadytrain.machine.children import ending, exit_code, forward, kill_at_last, send, start, wait_together
from steadytrain.machine.platform import require_posix
from steadytrain.machine.process import take_signals

USAGE = InputError.exit_code
RANK_LOST = RankLostError.exit_code
PREEMPTED = 75
INTERRUPTED = 130

FORWARDED = ("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGINT")
"""Signals that whoever keeps ranks sends on to them."""
GRACE = 30.0
"""Seconds for the other ranks to end by themselves, and then again after SIGTERM, before they are killed."""

LASTING = 300.0
"""Seconds after which a start of the ranks counts as good: earlier ones do not count against the restarts left."""

LOST_TOUCH = "the ranks lost touch with each other, and none of them failed"

SHOWN_LINES = 20


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


def keep_ranks(
    command: Sequence[str],
    count: int,
    *,
    restarts: int = 3,
    independent: bool = False,
    say: Callable[[str], None] = lambda message: None,
    on_killed: Callable[[int], None] = lambda rank: None,
) -> int:
    """Start ``count`` ranks of a command, wait for them, and start them again where one was killed.

    They get the same files and signals as this process; rank 0 has the terminal, and what the others write to standard
    error is shown where they fail. Where one is killed (out of memory, by hand), or out of touch until the others give
    it up (stopped, then continued), all end and are started anew from the last checkpoint. An error of a rank's own is
    not cured by another start.

    Args:
        command: program and arguments, the same for each.
        restarts: how often in a row they are started anew.
        independent: the work of one that is killed is done by the others, which go on; nothing is started anew.
        on_killed: called with each independent rank that was killed.

    Returns:
        The exit code: that of the rank that failed first by itself, or 75 where all were asked to stop and have saved;
        0 where one of independent ranks came to the end.

    Raises:
        InputError: the command cannot be started.
    """
    require_posix("training with several ranks")
    ranks: list[subprocess.Popen[bytes]] = []

    def say_killed(rank: int) -> None:
        if independent and (code := ranks[rank].returncode) < 0 and not received:
            say(killed_notice(rank, code, is_last=all(process.poll() for process in ranks)))
            on_killed(rank)

    left = restarts
    with take_signals(FORWARDED, partial(forward, ranks)) as received:
        while True:
            began = time.monotonic()
            ranks.clear()
            errors: list[IO[bytes]] = []  # of all but rank 0, which has the terminal
            with kill_at_last(ranks):
                port = free_port()
                for rank in range(count):
                    if rank:
                        errors.append(tempfile.TemporaryFile())  # noqa: SIM115 - read when the rank has ended
                    variables = os.environ | rank_variables(rank, count, port)
                    ranks.append(start_rank(command, variables, errors[-1] if rank else None))
                for number in received:  # before there was anyone to forward it to
                    send(ranks, number)
                ended = wait_together(
                    ranks,
                    ask_to_end=lambda: send(ranks, signal.SIGTERM),
                    grace_seconds=GRACE,
                    lenience_seconds=GRACE,
                    may_be_killed=count - 1 if independent else 0,
                    on_end=say_killed,
                )
            codes = [process.returncode for process in ranks]
            if independent:
                if 0 in codes:
                    return 0
                ended.sort(key=lambda rank: codes[rank] < 0)  # an error of its own says more than a kill
            failed = next((rank for rank in ended if codes[rank]), 0)
            if codes[failed] == RANK_LOST and not received:
                # The others may notice that a rank was killed before its end is seen here.
                failed = next((rank for rank in ended if codes[rank] < 0), failed)
            if time.monotonic() - began > LASTING:
                left = restarts
            is_killed = codes[failed] < 0
            is_lost = RANK_LOST in codes and {*codes} <= {0, RANK_LOST, PREEMPTED, -signal.SIGTERM}
            if (is_killed or is_lost) and left and not received and not independent:
                left -= 1
                what = f"rank {failed} was killed by {ending(codes[failed])}" if is_killed else LOST_TOUCH
                say(f"{what}: restarting all {count} ranks")
                continue
            is_stopped = bool(received) and codes[failed] in (INTERRUPTED, -received[0])  # and rank 0 has said so
            if failed and not is_stopped and (is_killed or not codes[0] or independent):
                say_last_lines(f"rank {failed}", errors[failed - 1], say)
            return job_exit_code(exit_code(codes[rank]) for rank in ended)


def start_rank(
    command: Sequence[str], variables: Mapping[str, str], errors: IO[bytes] | None
) -> subprocess.Popen[bytes]:
    """Start a rank that ends with this process: one with our files, or one that only writes ``errors``."""
    null = None if errors is None else subprocess.DEVNULL
    return start(command, variables=variables, ends_with_us=True, stdin=null, stdout=null, stderr=errors)


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


def say_last_lines(who: str, file: IO[bytes], say: Callable[[str], None]) -> None:
    """Say the last lines of what a process that failed has written to standard error."""
    file.seek(0)
    for line in file.read().decode(errors="replace").splitlines()[-SHOWN_LINES:]:
        say(f"{who}: {line}")


def killed_notice(rank: int, code: int, *, is_last: bool) -> str:
    """Word that an independent rank was killed; ``is_last``: none still runs, and none came to the end.

    >>> killed_notice(1, -9, is_last=False)
    'rank 1 was killed by SIGKILL: the others do its work'
    """
    rest = "no rank is left, run the same command again to continue" if is_last else "the others do its work"
    return f"rank {rank} was killed by {ending(code)}: {rest}"


def free_port() -> int:
    """Find a port of this machine that nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
        return port
