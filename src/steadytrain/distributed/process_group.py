"""The process group of a run: what ranks exchange beside gradients, and which of them failed.

Only tensors and JSON go between ranks; nothing is ever pickled.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
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
from steadytrain.errors import InputError, RankLostError, SteadyError, first_line

RENDEZVOUS_TIMEOUT = timedelta(minutes=10)
"""Time for which ranks wait for each other at the start."""

WAITING_SECONDS = 30.0
"""Seconds after which a rank says for whom it waits at the start: a rank that ended before it came is never met."""

COLLECTIVE_TIMEOUT = timedelta(minutes=30)
"""Time that one collective may take. A rank that is stuck or gone is noticed long before: see :mod:`.heartbeat`."""

TURN_TIMEOUT = timedelta(days=7)
"""Time for which one rank may wait for another, for instance while that one packs the data."""

_INTERFACE = "GLOO_SOCKET_IFNAME"
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
    finally:
        group.close()


class Group:
    """The ranks of one run. All of them call its methods, in the same order; make one with :func:`init_group`.

    Attributes:
        world: rank and size.
        hosts: the machine of each rank.
        sharing: how many ranks use the same cores as this one, this one included.
        local_pids: processes of the other ranks on this machine.
        heartbeat: tells the others that this rank lives, and this one of a rank that does not.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        where = f"tcp://{world.address}:{world.port}"
        waiting = threading.Timer(WAITING_SECONDS, _say_waiting, (world,))
        waiting.daemon = True
        waiting.start()
        try:
            store, _, _ = next(rendezvous(where, world.rank, world.size, timeout=RENDEZVOUS_TIMEOUT))
            store = PrefixStore(f"steadytrain/{_attempt()}", store)
            with _gloo_interface(world):
                dist.init_process_group(
                    "gloo", store=store, rank=world.rank, world_size=world.size, timeout=COLLECTIVE_TIMEOUT
                )
                self._control = self.new_group("gloo", TURN_TIMEOUT)
        except (RuntimeError, ValueError) as error:  # what the meeting raises is one or the other
            raise RankLostError(
                f"rank {world.rank} of {world.size} could not meet the others at {world.address}:{world.port}"
                f" ({first_line(error)}): check that all ranks are started, that this is the address of rank 0's"
                " machine, and that no firewall is between them"
            ) from error
        finally:
            waiting.cancel()
        self.hosts = [""] * world.size
        self.heartbeat = Heartbeat(store, world, self.hosts)
        boot_id = ""  # tells this machine from another of the same name
        with suppress(OSError):
            boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        has_affinity = hasattr(os, "sched_getaffinity")
        cores = sorted(os.sched_getaffinity(0)) if has_affinity else list(range(os.cpu_count() or 1))
        ranks = self.all_gather_json([platform.node(), boot_id, cores, os.getpid()])
        self.hosts[:] = [host for host, *_ in ranks]
        local = [rank for rank in ranks if rank[:2] == ranks[world.rank][:2]]
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
        sizes = self._all_gather(torch.tensor([len(encoded)]))
        padded = torch.zeros(max(int(size) for size in sizes), dtype=torch.uint8)
        padded[: len(encoded)] = encoded
        parts = self._all_gather(padded)
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
        return self._all_gather(value.detach().cpu().contiguous())

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

    def new_group(
        self, backend: str, timeout: timedelta = COLLECTIVE_TIMEOUT, *, device: torch.device | None = None
    ) -> dist.ProcessGroup:
        """Make another group of the same ranks.

        ``device``: this rank's GPU, ``cuda:N``, to which NCCL is bound at once: what it needs there is known before the
        memory is full, and an error comes here, not in the first update. None: gloo, of tensors on CPUs.
        """
        group = dist.new_group(backend=backend, timeout=timeout, device_id=device)
        assert not isinstance(group, int)  # a number stands for a group that this rank is not in
        return group

    def begin_max(self, values: torch.Tensor) -> dist.Work:
        """Begin an in-place maximum over all ranks; it is there once the work was waited for."""
        work = dist.all_reduce(values, dist.ReduceOp.MAX, group=self._control, async_op=True)
        assert work is not None
        return work

    def blame(self, error: Exception) -> Exception:
        """Turn an error of this rank into the one to report: another rank's, where that one failed first."""
        if isinstance(error, RankLostError):
            return error
        message = str(error).lower()
        is_collective = isinstance(error, dist.DistError) or (
            isinstance(error, RuntimeError) and any(word in message for word in _LOST)
        )
        if isinstance(error, SteadyError) or not is_collective:
            self.heartbeat.fail(first_line(error))
            return error
        return RankLostError(
            self.heartbeat.lost() or f"another rank was lost ({first_line(error)}): run the same command again"
        )

    def _all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        parts = [torch.empty_like(tensor) for _ in range(self.world.size)]
        with self._blaming():
            dist.all_gather(parts, tensor, group=self._control)
        return parts

    @contextmanager
    def _blaming(self) -> Iterator[None]:
        """Name the lost rank where a collective fails."""
        try:
            yield
        except RuntimeError as error:
            raise self.blame(error) from error

    def close(self) -> None:
        """Leave the group; closing twice is fine."""
        self.heartbeat.close()
        if dist.is_initialized():
            with suppress(RuntimeError):  # where another rank is gone, so is what is to be closed
                dist.destroy_process_group()


def ranks_of(peers: Peers | None) -> Group | None:
    """Return the group of the ranks, where the processes are ranks that wait for each other."""
    return peers if isinstance(peers, Group) else None


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
def _gloo_interface(world: World) -> Iterator[None]:
    """Let gloo use the network that leads to rank 0; by itself it resolves its host's name."""
    name = None if _INTERFACE in os.environ else _interface_to(world)
    if name is not None:
        os.environ[_INTERFACE] = name
    try:
        yield
    finally:
        if name is not None:
            del os.environ[_INTERFACE]


def _interface_to(world: World) -> str | None:
    """Find the network interface whose IPv4 address leads to rank 0; None where the system does not say."""
    if sys.platform != "linux":  # there gloo is left to itself
        return None
    with suppress(OSError):
        family, kind, *_, address = socket.getaddrinfo(world.address, world.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # of a datagram: nothing is sent
            local = probe.getsockname()[0]
        local = LOOPBACK if local.startswith("127.") else local
        for name, addresses in psutil.net_if_addrs().items():
            if any(entry.family == socket.AF_INET and entry.address == local for entry in addresses):
                return name
    return None
