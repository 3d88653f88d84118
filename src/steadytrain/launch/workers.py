"""Workers of the asynchronous engine: started beside their servers, by one command or by each rank of a launcher, and
each started again by itself.

A worker that is killed is started again while the others train on: what it had not finished they do. Where a server is
gone all start again, from the last checkpoint.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
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
    ServerHandle,
    enlist,
    enter,
    has_password,
    host_servers,
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
    SHOWN_LINES,
    free_port,
    job_exit_code,
    rank_variables,
    start_rank,
)
from steadytrain.machine.children import (
    POLL_SECONDS,
    die_with_parent,
    ending,
    exit_code,
    forward,
    kill_at_last,
    python,
    send,
    start,
)
from steadytrain.machine.process import take_signals

_LEFT = "STEADYTRAIN_RESTARTS_LEFT"
SCRATCH = Path("/tmp/steady")
"""Ray's files are in a folder beside it, with a short path since sockets lie there."""
SHORT_GRACE = 5.0
"""Seconds for workers that have nothing to save."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class AsyncRun:
    """A run of the asynchronous engine.

    Args:
        servers, staleness, address, namespace: as of :func:`steadytrain.distributed.asynchronous.cluster.host_servers`.
        restarts: how often in a row workers, or all of them, are started again.
        say: takes a line about each new start.
    """

    servers: int = 1
    staleness: int | None = None
    address: str | None = None
    namespace: str | None = None
    restarts: int = 3
    say: Callable[[str], None] = lambda message: None


def keep_workers(command: Sequence[str], count: int, run: AsyncRun) -> int:
    """Start servers and ``count`` workers of a command, and wait for them.

    They get the same files and signals as this process; worker 0 has the terminal, and what the others write to
    standard error is shown where they fail.

    Args:
        command: program and arguments, the same for each.
        count: of workers, 1 or more.

    Returns:
        The exit code, as of :func:`.supervise.keep_ranks`.

    Raises:
        InputError: the command cannot be started, or Ray is not there.
    """
    workers = _Workers(command, run.say, int(os.environ.get(_LEFT, run.restarts)))
    with take_signals(FORWARDED, workers.forward) as received:
        try:
            with (
                scratch_beside(SCRATCH) as folder,
                host_servers(
                    workers=count,
                    servers=run.servers,
                    staleness=run.staleness,
                    address=run.address,
                    namespace=run.namespace,
                    folder=str(folder),
                ) as host,
            ):
                code = workers.run(count, host, received)
        except RankLostError as error:
            run.say(str(error))
            code = RANK_LOST
        if code != RANK_LOST or received or not workers.may_restart():
            return code
    run.say("a server was lost: all start again from the last checkpoint")
    # In a process of its own: Ray starts only once in one with a password of its own.
    return os.execvpe(command[0], list(command), {**os.environ, _LEFT: str(workers.left)})


def join_run(command: Sequence[str], count: int, run: AsyncRun) -> int:
    """Start ``count`` more workers of a run that goes on elsewhere on the same Ray cluster, and wait for them.

    Arguments and exit code are those of :func:`keep_workers`; address and namespace are needed.

    Raises:
        InputError: there is no such run.
    """
    workers = _Workers(command, run.say, run.restarts)
    with (
        take_signals(FORWARDED, workers.forward) as received,
        enlist(count, address=str(run.address), namespace=str(run.namespace)) as (host, first),
    ):
        run.say(f"workers {first} to {first + count - 1} join")
        return workers.run(count, host, received, first=first)


def keep_worker(command: Sequence[str], world: World, run: AsyncRun) -> int:
    """Run one worker, as a rank of a launcher; the first rank has the servers as well.

    Without an address, the first rank of each machine starts Ray there, at the first of which all of them meet.
    Arguments and exit code are those of :func:`keep_workers`. All end where a server is gone: the launcher starts them
    again.

    Raises:
        InputError: the workers' machines cannot meet, or not safely; or as :func:`keep_workers`.
    """
    if run.staleness is not None and 0 < run.staleness < world.size - 1:
        raise InputError(
            f"--staleness {run.staleness} is too narrow for {world.size} workers, of which some would always wait: use"
            f" 0, {world.size - 1} or more"
        )
    workers = _Workers(command, run.say, run.restarts, is_launched=True)
    with take_signals(FORWARDED, workers.forward) as received:

        def should_stop() -> bool:
            return bool(received)

        try:
            with ExitStack() as stack:
                address, node_ip = (
                    (run.address, None) if run.address else stack.enter_context(_ray_of_machine(world, should_stop))
                )
                place: dict[str, Any] = {"address": address, "node_ip": node_ip, "should_stop": should_stop}
                place["namespace"] = run.namespace or f"steadytrain-{world.address}-{world.port}"
                if world.rank:
                    host = stack.enter_context(enter(world.rank, **place))
                else:
                    host = stack.enter_context(
                        host_servers(workers=world.size, servers=run.servers, staleness=run.staleness, **place)
                    )
                code = workers.run(1, host, received, first=world.rank)
                if code in (0, PREEMPTED):
                    host.part(world.rank)
                return code
        except RankLostError as error:
            run.say(str(error))
            return PREEMPTED if received else RANK_LOST


@contextmanager
def _ray_of_machine(world: World, should_stop: Callable[[], bool]) -> Iterator[tuple[str, str]]:
    """Run this machine's node of the run's Ray cluster; yield the cluster's address and this machine's."""
    is_alone = world.local_size == world.size
    if not has_password(os.environ):
        raise InputError(
            f"{world.launcher} has started {world.size} ranks, and with --engine async they need a password that all"
            f" of them have: set {PASSWORD} (openssl rand -hex 32), or use steady launch, which makes one"
        )
    variables = {} if "RAY_AUTH_MODE" in os.environ else {"RAY_AUTH_MODE": "token"}
    with ExitStack() as stack:
        stack.enter_context(ray_environment({**variables, **({LOOPBACK_ONLY: "0"} if is_alone else {})}))
        require_ray()  # which reads these when it is imported
        head = LOOPBACK
        if not is_alone:
            failure = f"{world.address}, the first rank's machine, has no address"
            head = _try_until_there(partial(socket.gethostbyname, world.address), failure, should_stop)
        if head.startswith("127.") and not is_alone:
            raise InputError(
                f"{world.address}, the first machine, is {head} here, which other machines cannot reach: set an address"
                " that they can reach (MASTER_ADDR; steady launch --set address=10.0.0.1)"
            )
        address = f"{head}:{world.port - 1}"  # where the ranks meet torchrun may have a store of its own
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((head, world.port))  # sends nothing
            node_ip: str = probe.getsockname()[0]
        if world.local_rank:
            _await_port(head, world.port - 1, should_stop)
            yield address, node_ip
            return
        folder = stack.enter_context(scratch_beside(SCRATCH))
        words = ["start", "--block", "--disable-usage-stats", "--num-cpus=0", "--num-gpus=0"]
        words += [f"--node-ip-address={node_ip}", f"--temp-dir={folder}", f"--object-store-memory={store_bytes()}"]
        words += [f"--memory={TASK_BYTES}"]
        if world.is_first:
            words += ["--head", f"--port={world.port - 1}", "--include-dashboard=false"]
        else:
            words += [f"--address={address}"]
            _await_port(head, world.port - 1, should_stop)
        log = tempfile.TemporaryFile()  # noqa: SIM115 - closed below
        ray = python("-m", "ray.scripts.scripts", *words)
        process = start(ray, prepare=_outlast_signals, own_group=True, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            while b"Ray runtime started" not in (output := os.pread(log.fileno(), 1 << 20, 0)):
                if process.poll() is not None:
                    raise InputError(f"Ray does not start: {' '.join(output.decode(errors='replace').split())[-600:]}")
                if should_stop():
                    raise RankLostError("this rank was asked to end before the run began")
                time.sleep(POLL_SECONDS)
            yield address, node_ip
        finally:
            process.terminate()
            try:
                process.wait(SHORT_GRACE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            log.close()


def _outlast_signals() -> None:
    """Ignore the signals that ask ranks to save, which may be sent to all processes of a job; end with the rank."""
    die_with_parent()
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


def _await_port(address: str, port: int, should_stop: Callable[[], bool]) -> None:
    def connect() -> None:
        socket.create_connection((address, port), RETRY_SECONDS).close()

    _try_until_there(connect, f"the first rank does not answer at {address}:{port}", should_stop)


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
    """The processes of a run's workers."""

    def __init__(
        self, command: Sequence[str], say: Callable[[str], None], restarts: int, *, is_launched: bool = False
    ) -> None:
        self._command, self._say, self._restarts = command, say, restarts
        self._is_launched = is_launched  # then this process's own environment says which worker it is
        self._processes: list[subprocess.Popen[bytes]] = []
        self._errors: list[IO[bytes]] = []
        self.left, self._restarted = restarts, time.monotonic()
        self._first = self._size = 0

    def forward(self, number: int) -> None:
        """Pass a signal on."""
        forward(self._processes, number)

    def may_restart(self) -> bool:
        """Count a restart; return whether it is allowed. Those long ago do not count."""
        if time.monotonic() - self._restarted > LASTING:
            self.left = self._restarts
        self._restarted = time.monotonic()
        self.left -= 1
        return self.left >= 0

    def run(self, count: int, host: ServerHandle, received: Sequence[int], *, first: int = 0) -> int:
        """Start workers from number ``first`` on, restart those that are killed, and return the exit code of all."""
        self._first, self._size = first, first + count
        self._processes.clear()
        self._errors.clear()
        with kill_at_last(self._processes):
            for place in range(count):
                self._errors.append(tempfile.TemporaryFile())  # noqa: SIM115 - read when the worker has ended
                self._processes.append(self._start(place, host))
            for number in received:  # before there was anyone to forward it to
                send(self._processes, number)
            ended: list[int] = []
            end_at: float | None = None
            kill_at: float | None = None
            while len(ended) < count:
                for place, process in enumerate(self._processes):
                    if place in ended or process.poll() is None:
                        continue
                    is_killed = process.returncode < 0 and end_at is None and not received
                    if is_killed and self.may_restart():
                        self._start_again(place, host)
                        continue
                    ended.append(place)
                    if process.returncode == RANK_LOST:  # a server is gone: what the others have is lost with it
                        send(self._processes, signal.SIGKILL)
                    # The first worker ends the run; another that has done its part does not.
                    if end_at is None and (place + first == 0 or process.returncode):
                        is_good = process.returncode in (0, PREEMPTED)
                        end_at = time.monotonic() + (SHORT_GRACE if is_good else 0.0)
                now = time.monotonic()
                if end_at is not None and kill_at is None and now >= end_at:
                    kill_at = now + (SHORT_GRACE if first or 0 in ended else GRACE)  # the first one saves
                    send(self._processes, signal.SIGTERM)
                elif kill_at is not None and now >= kill_at:
                    send(self._processes, signal.SIGKILL)
                time.sleep(POLL_SECONDS)
        codes = [process.returncode for process in self._processes]
        if (first == 0 and codes[0] == 0) or RANK_LOST in codes:
            return RANK_LOST if codes[0] else 0
        failed = next((place for place in ended if codes[place]), 0)
        if failed + first and codes[failed]:
            self._errors[failed].seek(0)
            for line in self._errors[failed].read().decode(errors="replace").splitlines()[-SHOWN_LINES:]:
                self._say(f"worker {failed + first}: {line}")
        return job_exit_code(exit_code(codes[place]) for place in ended)

    def _start_again(self, place: int, host: ServerHandle) -> None:
        name, rank = ending(self._processes[place].returncode), self._first + place
        left = host.lose(rank)
        batches = f" with {left} batches unfinished, which others do" if left else ""
        self._say(f"worker {rank} was killed by {name}{batches}: it is started again")
        self._processes[place] = self._start(place, host)

    def _start(self, place: int, host: ServerHandle) -> subprocess.Popen[bytes]:
        rank, first = self._first + place, self._first
        variables: Mapping[str, str] = {}
        if not self._is_launched:
            variables = rank_variables(rank, self._size, free_port(), first=first, local_size=self._size - first)
        variables = {**os.environ, **variables, **host.variables}
        return start_rank(self._command, variables, self._errors[place] if rank else None)
