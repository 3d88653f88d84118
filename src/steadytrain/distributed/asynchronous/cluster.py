"""Ray, which carries what workers of an asynchronous run and their server say to each other; and its cluster.

Ray's processes are started for a run by :mod:`steadytrain.launch.workers`. A worker is an ordinary process that finds
them by the variable :data:`VARIABLE` (:func:`connect`); the first to come has Ray make the server, on the first
machine, where it lives as long as the cluster. Ray's statistics of use, its dashboard and what it writes on standard
error are off.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeAlias, TypeVar

import psutil

from steadytrain.distributed.world import World
from steadytrain.errors import InputError, RankLostError, SteadyError, first_line
from steadytrain.machine.platform import require_posix

if TYPE_CHECKING:
    from steadytrain.distributed.asynchronous.server import ParameterServer

VARIABLE = "STEADYTRAIN_SERVERS"
"""Environment variable that tells a worker where Ray is: ``address`` of its cluster, ``node_ip`` of this machine."""
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_worker_niceness": "0",  # it is 15 by itself: workers would wait for a server that any other process delays
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "5",  # that workers may save; 30 by itself
}
PASSWORD = "RAY_AUTH_TOKEN"
"""Environment variable with the password by which Ray's processes know each other."""
LOOPBACK_ONLY = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Ray's switch for systems whose firewalls ask: with 0 its processes listen on 127.0.0.1 and nowhere else."""
OPEN_SECONDS = 600.0
"""Seconds for which workers wait at the start for worker 0, which may have to pack the data."""
MEET_SECONDS = 300.0
"""Seconds for which the ranks of a launcher wait for each other at the start."""
RETRY_SECONDS = 1.0
"""Seconds between two attempts to reach what may not be there yet."""
TASK_BYTES = 1 << 30
"""Memory that Ray may give to tasks, of which there are none; else it does not start where little is free."""
_UNREACHABLE = (ConnectionError, OSError, ValueError, RuntimeError, TimeoutError)
"""Errors that Ray raises where there is no cluster, or none can be started."""
_FIRST_MACHINE = {"node:__internal_head__": 0.001}
"""The resource by which Ray places an actor on the machine that started the cluster."""

T = TypeVar("T")
P = ParamSpec("P")
ServerMethod: TypeAlias = "Callable[Concatenate[ParameterServer, P], Coroutine[Any, Any, T]]"


def require_ray() -> Any:
    """Import Ray. Raises InputError where it is not installed."""
    require_posix("--engine async")
    try:
        import ray
    except ImportError as error:
        raise InputError(
            f"--engine async needs Ray, which cannot be imported ({first_line(error)}): pip install"
            " 'steadytrain[async]', or use --engine ddp"
        ) from error
    return ray


class Cluster:
    """A worker's connection to the server; make one with :func:`connect`.

    Attributes:
        world: rank and size; ``rank`` of it.
        progress: of the run when this worker joined; None: it is the first worker, which opens the run.
        description: of this worker's run, by which the others know that theirs is the same.
    """

    def __init__(self, ray: Any, world: World, server: Any) -> None:
        self.world, self.rank = world, world.rank
        self.progress: dict[str, Any] | None = None
        self.description: dict[str, Any] = {}
        self._ray, self._server = ray, server

    def join(self) -> None:
        """Join the run; all but worker 0 wait until that one has opened it. Raises RankLostError."""
        from steadytrain.distributed.asynchronous.server import ParameterServer

        until = time.monotonic() + OPEN_SECONDS
        self.progress = self.call(ParameterServer.join, self.rank, 0.0 if self.rank == 0 else 1.0)
        while self.progress is None and self.rank:
            if time.monotonic() > until:
                raise RankLostError(f"worker 0 has not opened the run in {OPEN_SECONDS:g} s: see what it says")
            self.progress = self.call(ParameterServer.join, self.rank, 1.0)

    @property
    def local_pids(self) -> list[int]:
        """The parent of the workers and of Ray, on this machine."""
        return [os.getppid()]

    @property
    def joined_attempt(self) -> int | None:
        """Number of worker 0's attempt; None: this is worker 0."""
        if self.rank == 0:
            return None
        assert self.progress is not None, "a worker that has not joined"
        attempt: int = self.progress["attempt"]
        return attempt

    @property
    def facts(self) -> dict[str, Any]:
        """Number of workers, and the machine and process of the server, for the events."""
        from steadytrain.distributed.asynchronous.server import ParameterServer

        return {"ranks": self.world.size, "engine": "async", "servers": [self.call(ParameterServer.where)]}

    def first_value(self, value: T) -> T:
        """Return the value as it is: no worker waits for another's decisions."""
        return value

    def describe(self, description: dict[str, Any], attempt: int) -> None:
        """Describe this worker's run, and refuse one that is not worker 0's.

        Raises:
            InputError: they differ.
        """
        self.description = {**description, "attempt": attempt}
        differing = [
            name for name, value in description.items() if self.progress and self.progress.get(name, value) != value
        ]
        if self.progress is not None and differing:
            raise InputError(
                f"worker {self.rank} has another {differing[0]} than worker 0 ({description[differing[0]]} and"
                f" {self.progress[differing[0]]}): all workers need the same command and the same files"
            )

    def leave(self) -> None:
        """Sign off, at a good end."""
        from steadytrain.distributed.asynchronous.server import ParameterServer

        self.call(ParameterServer.leave, self.rank)

    def call(self, method: ServerMethod[P, T], *arguments: P.args, **options: P.kwargs) -> T:
        """Call a method of the server and return its result; arrays are read-only views of shared memory."""
        with _lost_server(self._ray):
            result: T = self._ray.get(getattr(self._server, method.__name__).remote(*arguments, **options))
            return result


@contextmanager
def connect(world: World) -> Iterator[Cluster]:
    """Reach the server of the run whose Ray cluster the environment names, for the length of the block.

    Raises:
        RankLostError: the cluster is not there, or gone.
    """
    from steadytrain.distributed.asynchronous.server import ParameterServer  # loads torch

    place = json.loads(os.environ[VARIABLE])
    until = time.monotonic() + MEET_SECONDS
    with ray_environment({}):
        ray = require_ray()
        make = ray.remote(ParameterServer).options(
            name="server",
            get_if_exists=True,
            lifetime="detached",  # it outlives the worker that asks for it
            num_cpus=0,
            max_concurrency=1000,  # workers that wait
            resources=_FIRST_MACHINE,
        )
        try:
            while True:
                try:
                    _init(ray, {"address": place["address"], "_node_ip_address": place["node_ip"]})
                    with _lost_server(ray):
                        server = make.remote(world.size)
                    break
                except (RankLostError, *_UNREACHABLE) as error:
                    if time.monotonic() >= until:
                        raise RankLostError(
                            f"the server of this run cannot be reached at {place['address']}: {first_line(error)}"
                        ) from error
                _shut_down(ray)
                time.sleep(RETRY_SECONDS)
            yield Cluster(ray, world, server)
        finally:
            _shut_down(ray)


def _init(ray: Any, options: dict[str, Any]) -> None:
    """Join a cluster. Raises one of :data:`_UNREACHABLE`."""
    quiet = {"log_to_driver": False, "configure_logging": False, "logging_level": "ERROR"}
    with _signals_kept():
        ray.init(namespace="steadytrain", **quiet, **options)


def _shut_down(ray: Any) -> None:
    with _signals_kept():
        ray.shutdown()


def has_password(variables: Iterable[str]) -> bool:
    """Return whether variables of an environment say already by what password Ray's processes know each other."""
    return any(name.startswith("RAY_AUTH_") for name in variables)


def make_password() -> str:
    """Make a password that only the processes of one run have."""
    return secrets.token_hex(32)


@contextmanager
def ray_environment(variables: dict[str, str]) -> Iterator[None]:
    """Set variables of Ray that the user has not set, and forget on exit what Ray sets."""
    before = dict(os.environ)
    os.environ.update({name: value for name, value in {**_QUIET, **variables}.items() if name not in before})
    try:
        yield
    finally:
        for name in [name for name in os.environ if name.startswith("RAY_") and name not in before]:
            del os.environ[name]


@contextmanager
def _signals_kept() -> Iterator[None]:
    """Restore the signal handlers that Ray replaces."""
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            with suppress(ValueError):  # not in the main thread, where Ray has set none either
                signal.signal(number, handler)


@contextmanager
def _lost_server(ray: Any) -> Iterator[None]:
    """Turn a failed call into RankLostError; an error of the called method is raised as it was."""
    try:
        yield
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, SteadyError):
            raise error.cause from None
        raise RuntimeError(f"the server failed: {first_line(error.cause)}") from error
    except ray.exceptions.RayError as error:
        raise RankLostError(
            f"the server of this run is gone ({first_line(error)}): the same command resumes from the last checkpoint"
        ) from error


def store_bytes() -> int:
    """Return the limit of Ray's shared memory, most of which is never touched."""
    free = shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 1 << 30  # noqa: PTH112
    return max(100_000_000, min(int(0.8 * free), psutil.virtual_memory().available // 2, 16 << 30))
