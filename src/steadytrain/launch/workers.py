"""Workers of the asynchronous engine: started by one command or by each rank of a launcher, with the Ray of their run.

A worker that is killed is started again while the others train on: what it had not finished they do. Where the server
is gone all start again, from the last checkpoint.
"""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, TypeVar

from steadytrain.data.storage.scratch import scratch_beside
from steadytrain.distributed.asynchronous.cluster import (
    LOOPBACK_ONLY,
    MEET_SECONDS,
    PASSWORD,
    RETRY_SECONDS,
    TASK_BYTES,
    VARIABLE,
    has_password,
    make_password,
    ray_environment,
    require_ray,
    store_bytes,
)
from steadytrain.distributed.world import LOOPBACK, World
from steadytrain.errors import InputError, RankLostError
from steadytrain.launch.supervise import (
    FORWARDED,
    GRACE,
    LASTING,
    PREEMPTED,
    RANK_LOST,
    free_port,
    job_exit_code,
    rank_variables,
    say_last_lines,
    start_rank,
)
from steadytrain.machine.children import POLL_SECONDS, ending, exit_code, forward, kill_at_last, python, send, start
from steadytrain.machine.platform import ASK_TO_SAVE, KILL, pread
from steadytrain.machine.process import take_signals

SCRATCH = Path("/tmp/steady")
"""Ray's files are in a folder beside it, with a short path since sockets lie there."""
SHORT_GRACE = 5.0
"""Seconds for workers that have nothing to save."""
LINGER_SECONDS = 2.0
"""Seconds for which a machine's Ray outlives the worker of its first rank: those of others may still let go of it."""

T = TypeVar("T")


@dataclass(frozen=True)
class _RayPlace:
    """Where a run's Ray is: its address, this machine's in it, and variables of the environment of its processes."""

    address: str
    node_ip: str
    variables: dict[str, str]


def keep_workers(command: Sequence[str], count: int, *, restarts: int, say: Callable[[str], None]) -> int:
    """Start Ray and ``count`` workers of a command on this machine, and wait for them.

    They get the same files and signals as this process; worker 0 has the terminal, and what the others write to
    standard error is shown where they fail.

    ``restarts``: how often in a row workers, or all of them, are started again.

    Returns:
        The exit code, as of :func:`.supervise.keep_ranks`.

    Raises:
        InputError: the command cannot be started, or Ray is not there.
    """
    require_ray()
    workers = _Workers(command, restarts, say)
    password = {} if has_password(os.environ) else {PASSWORD: make_password()}
    variables = {LOOPBACK_ONLY: "0", **_password_mode(), **password}
    with take_signals(FORWARDED, workers.forward) as received:
        while True:
            place = _RayPlace(f"{LOOPBACK}:{free_port()}", LOOPBACK, variables)
            try:
                with _ray_node(place, is_head=True, should_stop=lambda: bool(received)):
                    code = workers.run(range(count), place, received)
            except RankLostError as error:
                say(str(error))
                code = RANK_LOST
            if code != RANK_LOST or received or not workers.may_restart():
                return PREEMPTED if code == RANK_LOST and received else code
            say("a server was lost: all start again from the last checkpoint")


def keep_worker(command: Sequence[str], world: World, *, restarts: int, say: Callable[[str], None]) -> int:
    """Run one worker, as a rank of a launcher.

    The first rank of each machine starts Ray there, and joins it to that of the first machine. Arguments and exit code
    are those of :func:`keep_workers`. All end where the server is gone: the launcher starts them again.

    Raises:
        InputError: the workers' machines cannot meet, or not safely; or as :func:`keep_workers`.
    """
    if not has_password(os.environ):
        raise InputError(
            f"{world.launcher} has started {world.size} ranks, and with --engine async they need a password that all"
            f" of them have: set {PASSWORD} (openssl rand -hex 32), or use steady launch, which makes one"
        )
    require_ray()
    workers = _Workers(command, restarts, say, is_launched=True)
    with take_signals(FORWARDED, workers.forward) as received:

        def should_stop() -> bool:
            return bool(received)

        try:
            place = _meet(world, should_stop)
            if not world.is_first:
                host, _, port = place.address.rpartition(":")
                failure = f"the first rank does not answer at {place.address}"
                connect = partial(socket.create_connection, (host, int(port)), RETRY_SECONDS)
                _try_until_there(connect, failure, should_stop).close()
            if world.local_rank:
                return workers.run(range(world.rank, world.rank + 1), place, received)
            with _ray_node(place, is_head=world.is_first, should_stop=should_stop):
                code = workers.run(range(world.rank, world.rank + 1), place, received)
                if world.local_size > 1 and code in (0, PREEMPTED):
                    time.sleep(LINGER_SECONDS)
                return code
        except RankLostError as error:
            say(str(error))
            return PREEMPTED if received else RANK_LOST


def _password_mode() -> dict[str, str]:
    """Return the variable by which Ray asks for the password, unless the user has said how it knows its processes."""
    return {} if "RAY_AUTH_MODE" in os.environ else {"RAY_AUTH_MODE": "token"}


def _meet(world: World, should_stop: Callable[[], bool]) -> _RayPlace:
    """Find where the ranks of a launcher have their Ray: at a port of the first one's machine."""
    is_alone = world.local_size == world.size
    head = LOOPBACK
    if not is_alone:
        failure = f"{world.address}, the first rank's machine, has no address"
        head = _try_until_there(partial(socket.gethostbyname, world.address), failure, should_stop)
        if head.startswith("127."):
            raise InputError(
                f"{world.address}, the first machine, is {head} here, which other machines cannot reach: set an address"
                " that they can reach (MASTER_ADDR; steady launch --set address=10.0.0.1)"
            )
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((head, world.port))  # sends nothing
        node_ip: str = probe.getsockname()[0]
    # Where the ranks meet torchrun may have a store of its own.
    return _RayPlace(
        f"{head}:{world.port - 1}", node_ip, {**_password_mode(), **({LOOPBACK_ONLY: "0"} if is_alone else {})}
    )


@contextmanager
def _ray_node(place: _RayPlace, *, is_head: bool, should_stop: Callable[[], bool]) -> Iterator[None]:
    """Run this machine's node of the run's Ray cluster for the length of the block.

    Raises:
        InputError: Ray does not start.
        RankLostError: this process was asked to end meanwhile.
    """
    with scratch_beside(SCRATCH) as folder, tempfile.TemporaryFile() as log, ray_environment(place.variables):
        words = [f"--node-ip-address={place.node_ip}", f"--temp-dir={folder}", f"--memory={TASK_BYTES}"]
        words += [f"--object-store-memory={store_bytes()}", "--num-cpus=0", "--num-gpus=0"]
        words += ["--block", "--disable-usage-stats", "--include-log-monitor=false"]
        if is_head:
            words += ["--head", f"--port={place.address.rpartition(':')[2]}"]
            words += ["--include-dashboard=false", "--no-monitor"]
        else:
            words += [f"--address={place.address}"]
        ray = python("-m", "ray.scripts.scripts", "start", *words)
        null = subprocess.DEVNULL  # signals that ask ranks to save may be sent to all processes of a job
        pipes: dict[str, Any] = {"stdin": null, "stdout": log, "stderr": log}
        process = start(ray, ends_with_us=True, ignores=ASK_TO_SAVE, own_group=True, **pipes)
        try:
            while b"Ray runtime started" not in (output := pread(log.fileno(), 1 << 20, 0)):
                if process.poll() is not None:
                    raise InputError(f"Ray does not start: {' '.join(output.decode(errors='replace').split())[-600:]}")
                if should_stop():
                    raise RankLostError("this rank was asked to end before the run began")
                time.sleep(POLL_SECONDS)
            yield
        finally:
            process.terminate()
            try:
                process.wait(SHORT_GRACE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _try_until_there(attempt: Callable[[], T], failure: str, should_stop: Callable[[], bool]) -> T:
    """Repeat an attempt until it raises no OSError: machines that have just been started need some time.

    Raises:
        RankLostError: ``failure``, after :data:`MEET_SECONDS` or where this rank was asked to stop.
    """
    until = time.monotonic() + MEET_SECONDS
    while True:
        try:
            return attempt()
        except OSError as error:
            if should_stop() or time.monotonic() > until:
                raise RankLostError(f"{failure}: {error}") from error
        time.sleep(RETRY_SECONDS)


class _Workers:
    """The processes of a run's workers; ``is_launched``: each is a rank of a launcher, whose environment says which."""

    def __init__(
        self, command: Sequence[str], restarts: int, say: Callable[[str], None], *, is_launched: bool = False
    ) -> None:
        self._command, self._restarts, self._say = command, restarts, say
        self._is_launched = is_launched
        self._processes: list[subprocess.Popen[bytes]] = []
        self._left, self._restarted = restarts, time.monotonic()

    def forward(self, number: int) -> None:
        """Pass a signal on."""
        forward(self._processes, number)

    def may_restart(self) -> bool:
        """Count a restart; return whether it is allowed. Those long ago do not count."""
        if time.monotonic() - self._restarted > LASTING:
            self._left = self._restarts
        self._restarted = time.monotonic()
        self._left -= 1
        return self._left >= 0

    def run(self, ranks: range, place: _RayPlace, received: Sequence[int]) -> int:
        """Start the workers of these ranks, restart those that are killed, and return the exit code of all."""
        self._processes.clear()
        errors = [tempfile.TemporaryFile() for _ in ranks]  # noqa: SIM115 - read when the worker has ended
        with kill_at_last(self._processes):
            for rank, file in zip(ranks, errors, strict=True):
                self._processes.append(self._start(rank, len(ranks), place, file))
            for number in received:  # before there was anyone to forward it to
                send(self._processes, number)
            ended: list[int] = []  # places in ``ranks``
            end_at = kill_at = math.inf
            while len(ended) < len(ranks):
                for number, process in enumerate(self._processes):
                    if number in ended or process.poll() is None:
                        continue
                    code, rank = process.returncode, ranks[number]
                    if code < 0 and end_at == math.inf and not received and self.may_restart():
                        self._say(f"worker {rank} was killed by {ending(code)}: it is started again")
                        self._processes[number] = self._start(rank, len(ranks), place, errors[number])
                        continue
                    ended.append(number)
                    if code == RANK_LOST:  # the server is gone: what the others have is lost with it
                        send(self._processes, KILL)
                    if rank == 0 or code:  # the first worker ends the run; another that has done its part does not
                        grace = SHORT_GRACE if code in (0, PREEMPTED) else 0.0
                        end_at = min(end_at, time.monotonic() + grace)
                now = time.monotonic()
                if kill_at == math.inf and now >= end_at:
                    kill_at = now + (GRACE if ranks[0] == 0 and 0 not in ended else SHORT_GRACE)  # the first one saves
                    send(self._processes, signal.SIGTERM)
                elif now >= kill_at:
                    send(self._processes, KILL)
                time.sleep(POLL_SECONDS)
        codes = {ranks[number]: self._processes[number].returncode for number in ended}
        if codes.get(0) == 0:
            return 0
        if RANK_LOST in codes.values():
            return RANK_LOST
        failed = next((rank for rank, code in codes.items() if code), 0)
        if failed:
            say_last_lines(f"worker {failed}", errors[failed - ranks[0]], self._say)
        return job_exit_code(exit_code(code) for code in codes.values())

    def _start(self, rank: int, count: int, place: _RayPlace, errors: IO[bytes]) -> subprocess.Popen[bytes]:
        variables = {} if self._is_launched else rank_variables(rank, count, free_port())
        ray = json.dumps({"address": place.address, "node_ip": place.node_ip})
        variables = {**os.environ, **variables, **place.variables, VARIABLE: ray}
        return start_rank(self._command, variables, errors if rank else None)
