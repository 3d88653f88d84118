"""The process group of a run: what ranks exchange beside gradients, and which of them failed.

Only tensors and JSON go between ranks; nothing is ever pickled.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from steadytrain.distributed.heartbeat import Heartbeat
from steadytrain.distributed.peers import Peers
from steadytrain.distributed.world import LOOPBACK, World
from steadytrain.errors import (
    FailedError,
    InputError,
    RankLostError,
    StalledError,
    SteadyError,
    StorageError,
    first_line,
)
from steadytrain.files import replace_file
from steadytrain.format import few
from steadytrain.machine import cgroups
from steadytrain.machine.platform import IS_LINUX

RENDEZVOUS_TIMEOUT = timedelta(minutes=10)
"""Time for which ranks wait for each other at the start."""

WAITING_SECONDS = 30.0
"""Seconds after which a rank says for whom it waits at the start: a rank that ended before it came is never met."""

COLLECTIVE_TIMEOUT = timedelta(minutes=30)
"""Time that torch gives one collective; a rank that is gone or stuck is noticed long before."""

FIRST_EXCHANGE_SECONDS = 120.0
"""Seconds that opening a backend and a first exchange over it may take, from when all ranks are there."""

CLOSE_SECONDS = 20.0
"""Seconds that closing the group may take: NCCL may wait for ever for its own threads."""

TURN_TIMEOUT = timedelta(days=7)
"""Time for which one rank may wait for another, for instance while that one packs the data."""

_INTERFACE = "GLOO_SOCKET_IFNAME"
_NUM_FIRST = 1 << 18  # numbers of the first exchange: large messages take other ways than small ones
_LOST = ("gloo", "nccl", "connection closed", "connection reset", "connection refused", "broken pipe", "socket")

T = TypeVar("T")


@contextmanager
def init_group(world: World) -> Iterator[Group]:
    """Join the other ranks for the length of the block.

    Args:
        world: of more than one rank.

    Raises:
        RankLostError: not all of them came in time.
    """
    group = Group(world)
    try:
        yield group
        group.all_gather_json(None)  # rank 0's process may hold the store: nobody leaves before the others
    except BaseException as error:
        if isinstance(error, Exception) and not isinstance(error, SteadyError):
            group.heartbeat.fail(first_line(error))
        if isinstance(error, RankLostError):
            error.says_so = group.heartbeat.is_first_here()
        group.heartbeat.wait_until_heard()
        group.heartbeat.close()
        raise  # what is left of the group goes with the process: to close it, NCCL may wait for ever
    group.close()


class Group:
    """The ranks of one run. All of them call its methods, in the same order; make one with :func:`init_group`.

    Attributes:
        world: rank and size.
        hosts: the machine of each rank.
        sharing: how many ranks use the same cores as this one, this one included.
        local_pids: processes of the other ranks on this machine.
        heartbeat: tells the others that this rank lives, and this one of a rank that does not.
        subgroups: the ranks of each group of some of them that this one is in, by torch's name of it.
        record_path: the file that :meth:`dump` writes, also when a rank fails; None: none.
        place: gives the function that this rank's loop is in, which is written, too.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.record_path: Path | None = None
        self.place: Callable[[], str] = str
        self.subgroups: dict[str, list[int]] = {}
        where = f"tcp://{world.address}:{world.port}"
        waiting = threading.Timer(WAITING_SECONDS, _say_waiting, (world,))
        waiting.daemon = True
        waiting.start()
        try:
            store, _, _ = next(rendezvous(where, world.rank, world.size, timeout=RENDEZVOUS_TIMEOUT))
            store = PrefixStore(f"steadytrain/{_attempt()}", store)
            store.set(f"host/{world.rank}", platform.node())
            store.wait(keys := [f"host/{rank}" for rank in range(world.size)], RENDEZVOUS_TIMEOUT)
            self.hosts = [host.decode() for host in store.multi_get(keys)]
        except (RuntimeError, ValueError) as error:  # what the meeting raises is one or the other
            raise RankLostError(
                f"rank {world.rank} of {world.size} could not meet the others at {world.address}:{world.port}"
                f" ({first_line(error)}): check that all ranks are started, that this is the address of rank 0's"
                " machine, and that no firewall is between them"
            ) from error
        finally:
            waiting.cancel()
        self._connect(store)

    def _connect(self, store: Any) -> None:
        """Open the connections between the ranks' CPUs, and try them out."""
        world = self.world
        # A connection of its own: in the other one a request may wait for minutes for another rank.
        self.heartbeat = Heartbeat(store.clone(), world, self.hosts, _own_address(world))
        self.heartbeat.on_failure = self.dump
        try:
            with self._first_exchange("gloo"):
                dist.init_process_group(
                    "gloo", store=store, rank=world.rank, world_size=world.size, timeout=COLLECTIVE_TIMEOUT
                )
                control = dist.new_group(backend="gloo", timeout=TURN_TIMEOUT)
                assert not isinstance(control, int)  # a number stands for a group that this rank is not in
                self._control = control
                self._try_out(None, torch.device("cpu"), "gloo")
                self._meet()
        except (RuntimeError, ValueError) as error:
            failure = error
            if not isinstance(error, SteadyError):
                problem = f"cannot connect over gloo ({first_line(error)}): {_link_advice('gloo', world)}"
                failure = RankLostError(self.heartbeat.lost() or problem)
            self.heartbeat.fail(str(failure), RankLostError.exit_code)
            self.heartbeat.wait_until_heard()
            self.heartbeat.close()
            raise failure from (None if failure is error else error)

    def _meet(self) -> None:
        """Learn which ranks share this machine and its cores."""
        boot_id = ""  # tells this machine from another of the same name
        with suppress(OSError):
            boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        cores = sorted(cgroups.allowed())
        ranks = self.all_gather_json([platform.node(), boot_id, cores, os.getpid()])
        local = [rank for rank in ranks if rank[:2] == ranks[self.world.rank][:2]]
        self.sharing = sum(not set(rank[2]).isdisjoint(cores) for rank in local)
        self.local_pids: list[int] = [rank[3] for rank in local if rank[3] != os.getpid()]
        self.joined_attempt: int | None = None  # the ranks open one together

    @property
    def facts(self) -> dict[str, Any]:
        """Number and machines of the ranks, for the events."""
        return {"ranks": self.world.size, "hosts": self.hosts, "launcher": self.world.launcher}

    def first_value(self, value: T) -> T:
        """Return the first rank's value, which is plain."""
        first: T = self.all_gather_json(value)[0]
        return first

    def all_gather_json(self, value: Any) -> list[Any]:
        """Gather a JSON value of each rank, in the order of the ranks."""
        encoded = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = self.all_gather(torch.tensor([len(encoded)]))
        padded = torch.zeros(max(int(size) for size in sizes), dtype=torch.uint8)
        padded[: len(encoded)] = encoded
        parts = self.all_gather(padded)
        return [json.loads(bytes(part[: int(size)].tolist())) for part, size in zip(parts, sizes, strict=True)]

    def broadcast(self, metadata: Any, tensors: Mapping[str, torch.Tensor]) -> tuple[Any, dict[str, torch.Tensor]]:
        """Send rank 0's JSON value and tensors to all ranks; the tensors arrive on the CPU.

        The other ranks' arguments do not count.
        """
        layouts = {name: [list(t.shape), str(t.dtype).removeprefix("torch.")] for name, t in tensors.items()}
        metadata, shapes = self.all_gather_json([metadata, layouts] if self.world.is_first else None)[0]
        received = {}
        for name, (shape, dtype) in shapes.items():
            first = self.world.is_first
            tensor = tensors[name].cpu().contiguous() if first else torch.empty(shape, dtype=getattr(torch, dtype))
            with self._blaming():
                dist.broadcast(tensor.view(-1).view(torch.uint8), 0, group=self._control)
            received[name] = tensor
        return metadata, received

    def require_same(self, difference: str, value: Any) -> None:
        """Refuse ranks that were given different values.

        Args:
            difference: from rank 0's, in words, such as ``another recipe``.
            value: plain; of a mapping, the values that differ are named.

        Raises:
            InputError: with rank, host and both values.
        """
        values = self.all_gather_json(value)
        for rank, theirs in enumerate(values):
            if theirs != values[0]:
                raise InputError(
                    f"rank {rank} on {self.hosts[rank]} has {difference} than rank 0 on {self.hosts[0]}"
                    f" ({_difference(theirs, values[0])}): all ranks need the same command and the same files"
                )

    def all_gather(self, value: torch.Tensor) -> list[torch.Tensor]:
        """Gather a tensor of each rank, all of one shape and dtype, on the CPU, in the order of the ranks."""
        value = value.detach().cpu().contiguous()
        parts = [torch.empty_like(value) for _ in range(self.world.size)]
        with self._blaming():
            dist.all_gather(parts, value, group=self._control)
        return parts

    @contextmanager
    def all_or_none(self) -> Iterator[None]:
        """Run the block on every rank; if any rank raises, all raise.

        Raises:
            RankLostError: another rank failed in it; it is named, with what it said.
        """
        failed: Exception | None = None
        try:
            yield
        except Exception as error:  # noqa: BLE001 - it is raised again below, when the others know
            failed = error
        messages = self.all_gather_json(None if failed is None else first_line(failed))
        if failed is not None:
            raise failed
        for rank, message in enumerate(messages):
            if message is not None:
                raise RankLostError(f"rank {rank} on {self.hosts[rank]} failed: {message}")

    def run_first_then_rest(self, fn: Callable[[], T], *, is_first: bool) -> T:
        """Run ``fn`` on the ranks with ``is_first``, then on the others: what the first write, the others find."""
        results: list[T] = []
        for turn in (True, False):
            with self.all_or_none():
                if turn == is_first:
                    results.append(fn())
        return results[0]

    def new_group(self, backend: str, *, device: torch.device | None = None) -> dist.ProcessGroup:
        """Make another group of the same ranks, and try it out.

        ``device``: this rank's GPU, ``cuda:N``, to which NCCL is bound at once: what it needs there is known before the
        memory is full, and an error comes here, not in the first update. None: gloo, of tensors on CPUs.

        Raises:
            FailedError: numbers do not come through it as they were sent.
        """
        self.all_gather_json(None)  # from here on nobody waits for a rank that has something else to do
        with self._first_exchange(backend):
            group = dist.new_group(backend=backend, timeout=COLLECTIVE_TIMEOUT, device_id=device)
            assert not isinstance(group, int)
            self._try_out(group, device or torch.device("cpu"), backend)
        return group

    def new_subgroups(self, ranks: list[list[int]], backend: str, device: torch.device) -> dist.ProcessGroup:
        """Divide the ranks into groups as :meth:`new_group` makes them; return this rank's."""
        with self._first_exchange(backend):
            group, _ = dist.new_subgroups_by_enumeration(ranks, timeout=COLLECTIVE_TIMEOUT, backend=backend)
            assert isinstance(group, dist.ProcessGroup)
            self.subgroups[group.group_name] = dist.get_process_group_ranks(group)
            self._try_out(group, device, backend)
        return group

    @contextmanager
    def _first_exchange(self, backend: str) -> Iterator[None]:
        """End this process, and say why, if the block takes longer than ``FIRST_EXCHANGE_SECONDS``: it may hang."""
        began, before = time.monotonic(), self.heartbeat.at
        self._doing = f"opening {backend}"
        self.heartbeat.at = lambda: (self._doing, time.monotonic() - began)
        timer = threading.Timer(FIRST_EXCHANGE_SECONDS, self._give_up, (backend,))
        timer.daemon = True
        timer.start()
        try:
            with _torch_variables(self.world), _without_output() if backend == "gloo" else nullcontext():
                yield
        finally:
            timer.cancel()
            self.heartbeat.at = before

    def _try_out(self, group: dist.ProcessGroup | None, device: torch.device, backend: str) -> None:
        """Add up known numbers over the ranks, and check the sums."""
        self._doing = f"the start of the first all-reduce over {backend}"
        numbers = torch.arange(_NUM_FIRST, dtype=torch.float32, device=device).remainder_(251)
        total, size = numbers * (dist.get_rank(group) + 1), dist.get_world_size(group)
        work = dist.all_reduce(total, group=group, async_op=True)
        assert work is not None
        self._doing = f"the first all-reduce over {backend}"
        work.wait()
        # Whole numbers up to 2**24 are exact, and the order of the sum does not count: so up to 365 ranks.
        if wrong := int((total - numbers * (size * (size + 1) / 2)).abs().gt(numbers * size / 1024).sum()):
            raise FailedError(
                f"{wrong:,} of {_NUM_FIRST:,} sums of {self._doing} are wrong: {_link_advice(backend, self.world)}"
            )

    def _give_up(self, backend: str) -> None:
        """End this process, whose first exchange hangs: from another thread."""
        places = {rank: words for rank, (words, _) in self.heartbeat.where().items() if words != self._doing}
        late = few([f"rank {rank} on {self.hosts[rank]} is at {words or 'its end'}" for rank, words in places.items()])
        hosts = sorted({*self.hosts})
        all_in = "all are in it" + ", so large packets may be lost: compare the MTU (ip link)" * (len(hosts) > 1)
        error = StalledError(
            f"rank {self.world.rank} on {platform.node()} has waited {FIRST_EXCHANGE_SECONDS:.0f} s in {self._doing}"
            f" ({self.world.size} ranks on {few(hosts)}; {late or all_in}):"
            f" {_link_advice(backend, self.world)}"
        )
        os.write(2, f"steady: {error}\n".encode(errors="replace"))
        self.dump()
        self.heartbeat.fail(str(error), error.exit_code)
        self.heartbeat.wait_until_heard()
        os._exit(error.exit_code)

    def collectives(self) -> list[Any]:
        """Return what torch's flight recorder has of this process: of CPUs, and of GPUs. Nothing where it fails."""
        entries: list[Any] = []
        for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
            with suppress(AttributeError, RuntimeError, ValueError):
                entries += json.loads(getattr(torch._C._distributed_c10d, name)()).get("entries", ())
        return entries

    def dump(self) -> None:
        """Write the last collectives of this rank, if there is a place for them; as JSON, not as torch's pickles."""
        if self.record_path is not None:
            about: dict[str, Any] = {"rank": self.world.rank, "ranks": self.world.size, "time": time.time()}
            about |= {"place": self.place(), "subgroups": self.subgroups}
            with suppress(OSError, StorageError):  # the run's folder may be gone, as where another rank was refused
                replace_file(self.record_path, json.dumps({**about, "entries": self.collectives()}))

    def begin_max(self, values: torch.Tensor) -> dist.Work:
        """Begin an in-place maximum over all ranks; it is there once the work was waited for."""
        work = dist.all_reduce(values, dist.ReduceOp.MAX, group=self._control, async_op=True)
        assert work is not None
        return work

    def blame(self, error: Exception, about: str = "") -> Exception:
        """Turn an error of this rank (others hear ``about``) into the one to report: that of who failed first."""
        if isinstance(error, RankLostError):
            return error
        message = str(error).lower()
        is_collective = isinstance(error, dist.DistError) or (
            isinstance(error, RuntimeError) and any(word in message for word in _LOST)
        )
        if isinstance(error, SteadyError) or not is_collective:
            self.heartbeat.fail(first_line(error) + about, getattr(error, "exit_code", 1))
            return error
        return RankLostError(
            self.heartbeat.lost() or f"another rank was lost ({first_line(error)}): the same command resumes the run"
        )

    @contextmanager
    def _blaming(self) -> Iterator[None]:
        """Name the lost rank where a collective fails."""
        try:
            yield
        except RuntimeError as error:
            raise self.blame(error) from error

    def close(self) -> None:
        """Leave the group, in ``CLOSE_SECONDS`` at most; closing twice is fine."""
        self.heartbeat.close()

        def destroy() -> None:
            if dist.is_initialized():
                with suppress(RuntimeError):  # where another rank is gone, so is what is to be closed
                    dist.destroy_process_group()

        thread = threading.Thread(target=destroy, name="steady-close", daemon=True)
        thread.start()
        thread.join(CLOSE_SECONDS)


def ranks_of(peers: Peers | None) -> Group | None:
    """Return the group of the ranks, where the processes are ranks that wait for each other."""
    return peers if isinstance(peers, Group) else None


def _link_advice(backend: str, world: World) -> str:
    """Say which network a backend uses, and what to try where it carries nothing, or something else."""
    is_nccl, variable = backend == "nccl", "NCCL_SOCKET_IFNAME" if backend == "nccl" else _INTERFACE
    uses = f"chooses its network by itself ({_interface_to(world)} leads to rank 0)"
    uses = f"uses {name}" if (name := os.environ.get(variable)) else uses
    words = f"{backend} {uses}: set {variable} to the interface between the machines, on all of them"
    if not is_nccl:
        return f"{words}, and open its ports to each other"
    words += "; NCCL_DEBUG=INFO prints the links in use"
    if world.size > world.local_size:
        words += "; NCCL_IB_DISABLE=1 does without InfiniBand"
    if world.local_size > 1:
        words += "; NCCL_P2P_DISABLE=1 does without direct access between GPUs, which ACS or an IOMMU may break"
    return words


def _own_address(world: World) -> str:
    """Find the address by which the other ranks reach this machine."""
    local = _route_to(world) or LOOPBACK
    return world.address if local == LOOPBACK and world.local_size < world.size else local


def _say_waiting(world: World) -> None:
    others = "the other ranks" if world.is_first else f"rank 0 at {world.address}:{world.port}"
    minutes = RENDEZVOUS_TIMEOUT.total_seconds() / 60
    message = (
        f"steady: rank {world.rank} of {world.size} has waited {WAITING_SECONDS:g} s for {others}, and waits up to"
        f" {minutes:g} minutes: if one of them has ended, end all and run the same command again\n"
    )
    os.write(2, message.encode(errors="replace"))  # also where only the first rank prints


def _difference(theirs: Any, first: Any) -> str:
    """Name both values, or both of each that differs in a mapping.

    >>> _difference(1, 2), _difference({"lr": 0.1, "seed": 0}, {"lr": 0.2, "seed": 0})
    ('1 and 2', 'lr: 0.1 and 0.2')
    """
    if not isinstance(theirs, dict) or not isinstance(first, dict):
        return f"{theirs} and {first}"
    keys = [key for key in theirs | first if theirs.get(key) != first.get(key)]
    return ", ".join(f"{key}: {theirs.get(key)} and {first.get(key)}" for key in keys)


def _attempt() -> str:
    """Return a name of this start of the ranks, where the store outlives earlier ones.

    It does under torchrun, unless ``TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`` is set: restarted ranks would find the
    addresses of the dead ones. Its count of restarts is each machine's own, so it serves where there is one machine;
    on several, the variable is needed.
    """
    is_one = os.environ.get("GROUP_WORLD_SIZE", "1") == "1"
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if is_one else ""


@contextmanager
def _torch_variables(world: World) -> Iterator[None]:
    """Let gloo use the network that leads to rank 0 (by itself it resolves its host's name), and torch record."""
    values = {_INTERFACE: _interface_to(world), "TORCH_FR_BUFFER_SIZE": "2000"}
    missing = {name: value for name, value in values.items() if value is not None and name not in os.environ}
    os.environ.update(missing)
    try:
        yield
    finally:
        for name in missing:
            del os.environ[name]


@contextmanager
def _without_output() -> Iterator[None]:
    """Drop what C++ writes to standard output, where JSON may go: gloo of torch 2.10 says there that it connects."""
    with ExitStack() as restored:
        with suppress(OSError), open(os.devnull, "wb") as null:  # noqa: PTH123 - there may be no output at all
            output = os.dup(1)
            restored.callback(os.close, output)
            restored.callback(os.dup2, output, 1)
            os.dup2(null.fileno(), 1)
        yield


def _interface_to(world: World) -> str | None:
    """Find the network interface whose IPv4 address leads to rank 0; None where the system does not say."""
    if not IS_LINUX:  # there gloo is left to itself
        return None
    with suppress(OSError):
        local = _route_to(world)
        for name, addresses in psutil.net_if_addrs().items():
            if any(entry.family == socket.AF_INET and entry.address == local for entry in addresses):
                return name
    return None


def _route_to(world: World) -> str | None:
    """Return the address of this machine that leads to rank 0."""
    with suppress(OSError):
        family, kind, *_, address = socket.getaddrinfo(world.address, world.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # of a datagram: nothing is sent
            local = str(probe.getsockname()[0])
        return LOOPBACK if local.startswith("127.") else local
    return None
