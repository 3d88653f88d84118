"""The servers of an asynchronous run as actors of Ray: where they are started, and how a worker reaches them.

Whoever starts a run (:func:`host_servers`) starts Ray on this machine, or joins the user's cluster by its address, and
has the servers for as long as it lives. A worker is an ordinary process that finds them by the variable
:data:`VARIABLE` (:func:`connect`). Ray carries every byte between them. Its statistics of use, its dashboard and what
it writes on standard error are off.
"""

from __future__ import annotations

import json
import os
import platform
import secrets
import shutil
import signal
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import cycle
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeAlias, TypeVar

import psutil

from steadytrain.distributed.asynchronous.coordinator import Coordinator
from steadytrain.distributed.world import LOOPBACK, World
from steadytrain.errors import InputError, RankLostError, SteadyError, first_line

if TYPE_CHECKING:
    from steadytrain.distributed.asynchronous.server import ParameterServer

VARIABLE = "STEADYTRAIN_SERVERS"
"""Environment variable that tells a worker where the servers are."""
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_worker_niceness": "0",  # it is 15 by itself: workers would wait for servers that any other process delays
}
PASSWORD = "RAY_AUTH_TOKEN"
"""Environment variable with the password by which Ray's processes know each other."""
LOOPBACK_ONLY = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Ray's switch for systems whose firewalls ask: with 0 its processes listen on 127.0.0.1 and nowhere else."""
OPEN_SECONDS = 600.0
"""Seconds for which workers wait at the start for worker 0, which may have to pack the data."""
MEET_SECONDS = 300.0
"""Seconds for which the ranks of a launcher wait for each other at the start."""
LEAVE_SECONDS = 10.0
"""Seconds for which the first rank of a launcher waits at the end for the others' workers."""
RETRY_SECONDS = 1.0
TASK_BYTES = 1 << 30
"""Memory that Ray may give to tasks, of which there are none; else it does not start where little is free."""
_UNREACHABLE = (ConnectionError, OSError, ValueError, RuntimeError, TimeoutError)
"""Errors that Ray raises where there is no cluster, or none can be started."""

T = TypeVar("T")
P = ParamSpec("P")
AsyncMethod: TypeAlias = Callable[Concatenate[Coordinator, P], Coroutine[Any, Any, T]]


def require_ray(feature: str = "--engine async", alternative: str = "use --engine ddp") -> Any:
    """Import Ray. Raises InputError where it is not installed."""
    try:
        import ray
    except ImportError as error:
        raise InputError(
            f"{feature} needs Ray, which cannot be imported ({first_line(error)}): pip install"
            f" 'steadytrain[async]', or {alternative}"
        ) from error
    return ray


class ServerActor:
    """A parameter server in a process of its own, which alone loads torch."""

    def __init__(self) -> None:
        from steadytrain.distributed.asynchronous.server import ParameterServer

        self._server = ParameterServer()

    def call(self, method: str, *arguments: Any, **options: Any) -> Any:
        """Call one of its methods."""
        return getattr(self._server, method)(*arguments, **options)

    def where(self) -> str:
        """Return its machine and process, in words."""
        return f"{platform.node()}, process {os.getpid()}"


@dataclass(frozen=True)
class ServerHandle:
    """Handle of running servers for the process that started them.

    ``variables``: of the environment of workers.
    """

    variables: dict[str, str]
    _coordinator: Any
    _ray: Any

    def lose(self, rank: int) -> int:
        """Report that a worker is gone; return how many of its batches went back to the others."""
        with _lost_servers(self._ray):
            return len(self._ray.get(self._coordinator.lose.remote(rank)))

    def part(self, rank: int) -> None:
        """Wait until no machine needs Ray any more, as a rank of a launcher whose worker has ended well.

        What another machine has of the servers the first rank's worker needs until it has saved.
        """
        until = time.monotonic() + MEET_SECONDS
        with suppress(RankLostError), _lost_servers(self._ray):
            if rank == 0:
                self._ray.get(self._coordinator.dismiss.remote(LEAVE_SECONDS))
                return
            while not self._ray.get(self._coordinator.depart.remote(rank, RETRY_SECONDS)) and time.monotonic() < until:
                pass


@contextmanager
def host_servers(
    *,
    workers: int,
    servers: int,
    staleness: int | None,
    address: str | None = None,
    namespace: str | None = None,
    folder: str | None = None,
    node_ip: str | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> Iterator[ServerHandle]:
    """Run a coordinator and servers for the length of the block.

    Args:
        workers: that will join.
        servers: among which the parameters are divided.
        staleness: as of :class:`.coordinator.Coordinator`.
        address: of a running Ray cluster, such as ``10.0.0.1:6379`` or ``auto``; None: Ray is started here.
        namespace: where the servers have their names; None: one of their own.
        folder: for the files of Ray that is started here; a short path, since sockets lie in it.
        node_ip: of this machine in the cluster; None: Ray finds it.
        should_stop: workers are kept by ranks of a launcher, of which this is the first: wait for the others before
            there are servers, so that these are spread over their machines, while this does not return True.

    Raises:
        InputError: there is no Ray, or no cluster at the address.
        RankLostError: the servers could not be started, or other ranks did not come.
    """
    namespace = namespace or f"steadytrain-{os.getpid()}-{os.urandom(4).hex()}"
    with ExitStack() as stack:
        stack.enter_context(ray_environment({} if address else {LOOPBACK_ONLY: "0", **_token()}))  # for all processes
        ray = require_ray()
        options: dict[str, Any] = {"address": address, "_node_ip_address": node_ip}
        if address is None:
            # No worker of Ray's own: actors are the only processes.
            options = {"address": "local", "num_cpus": 0, "num_gpus": 0, "_node_ip_address": LOOPBACK}
            options |= {"include_dashboard": False, "object_store_memory": store_bytes(), "_memory": TASK_BYTES}
            options["_temp_dir"] = folder
        stack.callback(_shut_down, ray)
        try:
            addresses = _init(ray, namespace, options)
        except _UNREACHABLE as error:
            raise _no_ray("on this machine" if address is None else f"at {address}", error) from error
        make = ray.remote(Coordinator).options(name="coordinator", num_cpus=0, max_concurrency=1000)
        coordinator = make.remote(workers, staleness)
        if should_stop is not None:
            _await_ranks(ray, coordinator, should_stop)
        actors = [
            ray.remote(ServerActor).options(name=f"server-{k}", num_cpus=0, resources={machine: 0.001}).remote()
            for k, machine in zip(range(servers), cycle(_machines(ray)), strict=False)
        ]
        with _lost_servers(ray):
            ray.get([actor.call.remote("has_applied", 0) for actor in actors])
            ray.get(coordinator.watch_servers.remote(actors))
        place = {"address": address or addresses["gcs_address"], "namespace": namespace, "servers": servers}
        yield ServerHandle({VARIABLE: json.dumps({**place, "node_ip": node_ip})}, coordinator, ray)


def run_tasks(address: str, task: Callable[[int, int], T], count: int | None) -> list[T]:
    """Run ``task(rank, count)`` for each rank on a running cluster, on one core each; return their results.

    Ray starts a task up to three times again whose process was killed; another is lost, if one comes to the end.

    Args:
        address: of the cluster, such as ``10.0.0.1:6379`` or ``auto``.
        task: what can be pickled; its machine needs the same steadytrain.
        count: of tasks; None: one for each core of the cluster.

    Raises:
        InputError: there is no Ray, or no cluster at the address.
        SteadyError: a task's.
        RankLostError: no task came to the end.
    """
    with ray_environment({}):
        ray = require_ray("--ray", "start the processes by steady launch")
        try:
            _init(ray, "steadytrain-tasks", {"address": address})
        except _UNREACHABLE as error:
            raise _no_ray(f"at {address}", error) from error
        try:
            size = count or max(1, int(ray.cluster_resources().get("CPU", 1)))

            def call(rank: int, size: int) -> T:  # Ray takes functions only, no other callables
                return task(rank, size)

            remote = ray.remote(num_cpus=1, max_retries=3, scheduling_strategy="SPREAD")(call)
            left, results, lost = [remote.remote(rank, size) for rank in range(size)], list[T](), ""
            while left:
                [done], left = ray.wait(left)
                try:
                    results.append(ray.get(done))
                except ray.exceptions.RayTaskError as error:
                    if isinstance(error.cause, SteadyError):
                        raise error.cause from None
                    raise
                except ray.exceptions.RayError as error:
                    lost = first_line(error)
            if not results:
                raise RankLostError(f"all {size} tasks on the Ray cluster at {address} were lost ({lost})")
            return results
        finally:
            _shut_down(ray)


def _machines(ray: Any) -> list[str]:
    """Return the names by which Ray places an actor on each machine of the cluster, this one first.

    Strategies (SPREAD, node affinity) move nothing that asks for no resource, and a server asks for no core.
    """
    this_node = ray.get_runtime_context().get_node_id()
    nodes = sorted((node["NodeID"] != this_node, node["NodeManagerAddress"]) for node in ray.nodes() if node["Alive"])
    return [f"node:{address}" for _, address in nodes]


def _await_ranks(ray: Any, coordinator: Any, should_stop: Callable[[], bool]) -> None:
    until = time.monotonic() + MEET_SECONDS
    with _lost_servers(ray):
        while (missing := ray.get(coordinator.missing.remote(RETRY_SECONDS))) and not should_stop():
            if time.monotonic() > until:
                ranks = ", ".join(map(str, missing))
                raise RankLostError(f"rank {ranks} did not come in {MEET_SECONDS:g} s: see what it says")


@contextmanager
def enter(
    rank: int, *, address: str, namespace: str, node_ip: str | None, should_stop: Callable[[], bool]
) -> Iterator[ServerHandle]:
    """Reach the servers that the first rank of a launcher hosts, as another of its ranks.

    Raises:
        RankLostError: they are not there.
    """
    place = {"address": address, "namespace": namespace, "node_ip": node_ip}
    with reach(World(), servers=0, seconds=MEET_SECONDS, **place) as cluster:  # type: ignore[arg-type]
        servers = 0
        while not servers and not should_stop():
            servers = cluster.ask(Coordinator.enter, rank, RETRY_SECONDS)
        if not servers:
            raise RankLostError("this rank was asked to end before the run began")
        yield ServerHandle({VARIABLE: json.dumps({**place, "servers": servers})}, cluster._coordinator, cluster._ray)


@contextmanager
def enlist(count: int, *, address: str, namespace: str) -> Iterator[tuple[ServerHandle, int]]:
    """Register more workers for a run that goes on elsewhere, for the length of the block.

    Yields:
        What they need, and the number of the first.

    Raises:
        InputError: there is no such run, or it cannot have more workers.
    """
    try:
        with reach(World(), address=address, namespace=namespace, servers=0, seconds=0.0) as cluster:
            answer = cluster.ask(Coordinator.enlist, count)
            if answer is None:
                raise InputError(f"the run's bound on staleness is too narrow for {count} more workers (--staleness)")
            first, servers = answer
            place = {"address": address, "namespace": namespace, "servers": servers}
            yield ServerHandle({VARIABLE: json.dumps(place)}, cluster._coordinator, cluster._ray), first
    except RankLostError as error:
        raise InputError(f"there is no run to join: {error}") from error


class Cluster:
    """A worker's connection to the servers; make one with :func:`connect`.

    Attributes:
        world: rank and size; ``rank`` and ``size`` of it.
        is_started_here: servers and workers have one parent, on this machine.
        seconds: what the last call of each server took.
        progress: of the run when this worker joined; None: it is the first worker, which opens the run.
    """

    def __init__(self, ray: Any, world: World, *, servers: int) -> None:
        self.world, self.rank, self.size = world, world.rank, world.size
        self.progress: dict[str, Any] | None = None
        self.seconds: list[float] = []
        self.is_started_here = False
        self._description: dict[str, Any] = {}
        self._ray = ray
        with _lost_servers(ray):
            self._coordinator = ray.get_actor("coordinator")
            self.servers = [ray.get_actor(f"server-{k}") for k in range(servers)]

    def join(self) -> None:
        """Join the run; all but worker 0 wait until that one has opened it. Raises RankLostError."""
        until = time.monotonic() + OPEN_SECONDS
        self.progress = self.ask(Coordinator.join, self.rank, 0.0 if self.rank == 0 else 1.0)
        while self.progress is None and self.rank:
            if time.monotonic() > until:
                raise RankLostError(f"worker 0 has not opened the run in {OPEN_SECONDS:g} s: see what it says")
            self.progress = self.ask(Coordinator.join, self.rank, 1.0)

    @property
    def local_pids(self) -> list[int]:
        """The parent of servers and workers, where it is on this machine."""
        return [os.getppid()] if self.is_started_here else []

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
        """Number of workers, and the machine and process of each server, for the events."""
        with _lost_servers(self._ray):
            servers: list[str] = self._ray.get([server.where.remote() for server in self.servers])
        return {"ranks": self.size, "engine": "async", "servers": servers}

    def first_value(self, value: T) -> T:
        """Return the value as it is: no worker waits for another's decisions."""
        return value

    def describe(self, description: dict[str, Any], attempt: int) -> None:
        """Describe this worker's run, and refuse one that is not worker 0's.

        Raises:
            InputError: they differ.
        """
        self._description = {**description, "attempt": attempt}
        differing = [
            name for name, value in description.items() if self.progress and self.progress.get(name, value) != value
        ]
        if self.progress is not None and differing:
            raise InputError(
                f"worker {self.rank} has another {differing[0]} than worker 0 ({description[differing[0]]} and"
                f" {self.progress[differing[0]]}): all workers need the same command and the same files"
            )

    def open(self, **progress: Any) -> None:
        """Open the run for the other workers, as :meth:`.coordinator.Coordinator.open` does."""
        self.ask(Coordinator.open, self._description, **progress)

    def leave(self) -> None:
        """Sign off, at a good end."""
        self.ask(Coordinator.leave, self.rank)

    def ask(self, method: AsyncMethod[P, T], *arguments: P.args, **options: P.kwargs) -> T:
        """Call a method of the coordinator and return its result."""
        with _lost_servers(self._ray):
            result: T = self._ray.get(getattr(self._coordinator, method.__name__).remote(*arguments, **options))
            return result

    def tell(self, method: AsyncMethod[P, T], *arguments: P.args, **options: P.kwargs) -> None:
        """Call a method of the coordinator without waiting for it; later calls come after it."""
        with _lost_servers(self._ray):
            getattr(self._coordinator, method.__name__).remote(*arguments, **options)

    def call_all(
        self, method: Callable[Concatenate[ParameterServer, P], T], *arguments: P.args, **options: P.kwargs
    ) -> list[T]:
        """Call a method of all servers at once, return the results; arrays are read-only views of shared memory."""
        return self.call_each(method, [() for _ in self.servers], *arguments, **options)

    def call_each(
        self, method: Callable[..., T], parts: Sequence[tuple[Any, ...]], *arguments: Any, **options: Any
    ) -> list[T]:
        """Call a method of each server, with ``parts`` as its last arguments, and return the results."""
        began = time.perf_counter()
        with _lost_servers(self._ray):
            calls = [
                server.call.remote(method.__name__, *arguments, *part, **options)
                for server, part in zip(self.servers, parts, strict=True)
            ]
            self.seconds, left = [0.0] * len(calls), list(calls)
            while left:
                done, left = self._ray.wait(left)
                self.seconds[calls.index(done[0])] = time.perf_counter() - began
            results: list[T] = self._ray.get(calls)
            return results


@contextmanager
def connect(world: World) -> Iterator[Cluster]:
    """Reach the servers that the environment names, for the length of the block.

    Raises:
        RankLostError: they are gone.
    """
    place = json.loads(os.environ[VARIABLE])
    with reach(world, seconds=0.0, **place) as cluster:
        cluster.is_started_here = True
        yield cluster


@contextmanager
def reach(
    world: World, *, address: str, namespace: str, servers: int, seconds: float, node_ip: str | None = None
) -> Iterator[Cluster]:
    """Reach servers by the address of their Ray cluster and their namespace, which may take ``seconds`` to be there.

    ``node_ip``: of this machine in the cluster; None: Ray finds it.

    Raises:
        RankLostError: they are not there.
    """
    until = time.monotonic() + seconds
    with ray_environment({}):
        ray = require_ray()
        try:
            while True:
                try:
                    _init(ray, namespace, {"address": address, "_node_ip_address": node_ip})
                    cluster = Cluster(ray, world, servers=servers)
                    break
                except (RankLostError, *_UNREACHABLE) as error:
                    if time.monotonic() >= until:
                        raise RankLostError(
                            f"the servers of this run cannot be reached at {address}: {first_line(error)}"
                        ) from error
                _shut_down(ray)
                time.sleep(RETRY_SECONDS)
            yield cluster
        finally:
            _shut_down(ray)


def _init(ray: Any, namespace: str, options: dict[str, Any]) -> dict[str, Any]:
    """Start or join a cluster; return its addresses. Raises one of :data:`_UNREACHABLE`."""
    with _signals_kept():
        context = ray.init(
            namespace=namespace, log_to_driver=False, configure_logging=False, logging_level="ERROR", **options
        )
    addresses: dict[str, Any] = context.address_info
    return addresses


def _no_ray(where: str, error: Exception) -> InputError:
    return InputError(f"Ray cannot be reached {where}: {first_line(error)}")


def _shut_down(ray: Any) -> None:
    with _signals_kept():
        ray.shutdown()


def has_password(variables: Iterable[str]) -> bool:
    """Return whether variables of an environment say already by what password Ray's processes know each other."""
    return any(name.startswith("RAY_AUTH_") for name in variables)


def make_password() -> str:
    """Make a password that only the processes of one run have."""
    return secrets.token_hex(32)


def _token() -> dict[str, str]:
    """Return the variables of a new password; none if the user has set them."""
    return {} if has_password(os.environ) else {"RAY_AUTH_MODE": "token", PASSWORD: make_password()}


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
def _lost_servers(ray: Any) -> Iterator[None]:
    """Turn a failed call into RankLostError; an error of the called method is raised as it was."""
    try:
        yield
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        if isinstance(cause, SteadyError):
            raise cause from None
        if isinstance(cause, ray.exceptions.RayError):  # one asked another, which is gone
            raise _server_is_gone(cause) from error
        raise RuntimeError(f"a server failed: {first_line(cause)}") from error
    except (ray.exceptions.RayError, ValueError) as error:  # ValueError: no actor of that name
        raise _server_is_gone(error) from error


def _server_is_gone(error: Exception) -> RankLostError:
    return RankLostError(
        f"a server of this run is gone ({first_line(error)}): the same command resumes from the last checkpoint"
    )


def store_bytes() -> int:
    """Return the limit of Ray's shared memory, most of which is never touched."""
    free = shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 1 << 30  # noqa: PTH112
    return max(100_000_000, min(int(0.8 * free), psutil.virtual_memory().available // 2, 16 << 30))
