"""The ranks of a run, met: what they tell each other beside gradients, and which of them failed.

Only tensors and JSON go between ranks; nothing is ever pickled.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from steadytrain.distributed.heartbeat import Heartbeat
from steadytrain.distributed.world import LOOPBACK, World
from steadytrain.errors import InputError, RankLostError, SteadyError, first_line

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

MEETING = timedelta(minutes=10)
"""So long ranks wait for each other to come."""

EXCHANGE = timedelta(minutes=30)
"""So long one exchange may take. Who stands still, or is gone, is noticed long before: see :mod:`.pulse`."""

TURN = timedelta(days=7)
"""So long one rank may wait for another that packs the data, say."""

_INTERFACE = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915  # Linux, <linux/sockios.h>
_LOST = ("gloo", "nccl", "connection closed", "connection reset", "connection refused", "broken pipe", "socket")

T = TypeVar("T")


@contextmanager
def init_group(world: World) -> Iterator[Group]:
    """Meet the other ranks; they are left at the end.

    Args:
        world: of more than one rank.

    Raises:
        RankLostError: not all of them came.
    """
    group = Group(world)
    try:
        yield group
        group.gather(None)  # the first rank's process may be where all of them meet: nobody leaves before the others
    finally:
        group.close()


class Group:
    """The ranks of one run. All of them call its methods, in the same order; make one with :func:`joined`.

    Attributes:
        world: rank and size.
        hosts: the machine of each rank.
        sharing: ranks that use the same cores as this one, this one with them.
        beside: processes of the other ranks on this machine.
        pulse: tells the others that this rank lives, and of a rank that does not.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        where = f"tcp://{world.address}:{world.port}"
        try:
            store, _, _ = next(rendezvous(where, world.rank, world.size, timeout=MEETING))
            store = PrefixStore(f"steadytrain/{_attempt()}", store)
            with _way_to(world):
                dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size, timeout=EXCHANGE)
                self._beside = _group(dist.new_group(backend="gloo", timeout=TURN))
        except (RuntimeError, ValueError) as error:  # what the meeting raises is one or the other
            raise RankLostError(
                f"rank {world.rank} of {world.size} could not meet the others at {world.address}:{world.port}"
                f" ({first_line(error)}): see that all ranks are started, that this address is the one of rank 0's"
                " machine, and that no firewall is between them"
            ) from error
        self.hosts = [""] * world.size
        self.pulse = Heartbeat(store, world, self.hosts)
        told = self.gather([platform.node(), _machine(), _cores(), os.getpid()])
        self.hosts[:] = [host for host, *_ in told]
        own = told[world.rank]
        here = [one for one in told if one[:2] == own[:2]]
        self.sharing = sum(not set(one[2]).isdisjoint(own[2]) for one in here)
        self.beside: list[int] = [one[3] for one in here if one is not own]

    def gather(self, told: Any) -> list[Any]:
        """What each rank told, as JSON, in the order of the ranks."""
        own = torch.frombuffer(bytearray(json.dumps(told).encode()), dtype=torch.uint8)
        sizes = self._all_of(torch.tensor([len(own)]))
        padded = torch.zeros(max(int(size) for size in sizes), dtype=torch.uint8)
        padded[: len(own)] = own
        parts = self._all_of(padded)
        return [json.loads(bytes(part[: int(size)].tolist())) for part, size in zip(parts, sizes, strict=True)]

    def from_first(self, told: Any, tensors: Mapping[str, torch.Tensor]) -> tuple[Any, dict[str, torch.Tensor]]:
        """What the first rank has, to all: something that is JSON, and tensors, which come on the CPU.

        The others' arguments do not count.
        """
        about = {name: [list(one.shape), str(one.dtype).removeprefix("torch.")] for name, one in tensors.items()}
        given, shapes = self.gather([told, about] if self.world.is_first else None)[0]
        taken = {}
        for name, (shape, dtype) in shapes.items():
            own = tensors[name].cpu().contiguous() if self.world.is_first else torch.empty(shape, dtype=_dtype(dtype))
            with self._named():
                dist.broadcast(own.view(-1).view(torch.uint8), 0, group=self._beside)
            taken[name] = own
        return given, taken

    def require_same(self, what: str, own: Any) -> None:
        """Refuse ranks that were given different things: ``what`` one has that is not the first one's.

        Args:
            what: in words.
            own: plain values; of a mapping, those that differ are told.

        Raises:
            InputError: with rank, host and both values.
        """
        told = self.gather(own)
        for rank, theirs in enumerate(told):
            if theirs != told[0]:
                raise InputError(
                    f"rank {rank} on {self.hosts[rank]} has {what} than rank 0 on {self.hosts[0]}"
                    f" ({_difference(theirs, told[0])}): all ranks need the same command and the same files"
                )

    def each(self, own: torch.Tensor) -> list[torch.Tensor]:
        """The tensor of each rank, which have one shape and type, on the CPU."""
        return self._all_of(own.detach().cpu().contiguous())

    @contextmanager
    def together(self) -> Iterator[None]:
        """What is done here by all ranks has to succeed on all of them, or none goes on.

        Raises:
            RankLostError: another rank failed in it; it is named, with what it said.
        """
        failed: Exception | None = None
        try:
            yield
        except Exception as error:  # noqa: BLE001 - it is raised again below, when the others know
            failed = error
        told = self.gather(None if failed is None else first_line(failed))
        if failed is not None:
            raise failed
        for rank, message in enumerate(told):
            if message is not None:
                raise RankLostError(f"rank {rank} on {self.hosts[rank]} could not go on: {message}")

    def in_turn(self, do: Callable[[], T], *, first: bool) -> T:
        """Some ranks do something, and then the others: what the first write, the others find."""
        done: list[T] = []
        for turn in (True, False):
            with self.together():
                if turn == first:
                    done.append(do())
        return done[0]

    def new(self, backend: str) -> dist.ProcessGroup:
        """The same ranks, exchanging by other means."""
        return _group(dist.new_group(backend=backend, timeout=EXCHANGE))

    def highest(self, values: torch.Tensor) -> dist.Work:
        """Begin to find, of each value, the highest of all ranks: in place, when the work is waited for."""
        work = dist.all_reduce(values, dist.ReduceOp.MAX, group=self._beside, async_op=True)
        assert work is not None
        return work

    def blame(self, error: Exception) -> Exception:
        """An error that ended this rank's part, as it is to be told: of another rank, where that one failed first."""
        if isinstance(error, RankLostError):
            return error
        if isinstance(error, SteadyError) or not _is_lost(error):
            self.pulse.fail(first_line(error))
            return error
        told = self.pulse.lost()
        return RankLostError(told or f"another rank was lost ({first_line(error)}): run the same command again")

    def _all_of(self, own: torch.Tensor) -> list[torch.Tensor]:
        parts = [torch.empty_like(own) for _ in range(self.world.size)]
        with self._named():
            dist.all_gather(parts, own, group=self._beside)
        return parts

    @contextmanager
    def _named(self) -> Iterator[None]:
        """An exchange that fails names the rank that is lost."""
        try:
            yield
        except RuntimeError as error:
            raise self.blame(error) from error

    def close(self) -> None:
        """Leave the others; closing twice is fine."""
        self.pulse.close()
        if dist.is_initialized():
            with suppress(RuntimeError):  # where another rank is gone, so is what is to be closed
                dist.destroy_process_group()


def _difference(theirs: Any, first: Any) -> str:
    """Both values, or both of each that differs in a mapping.

    >>> _difference(1, 2), _difference({"lr": 0.1, "seed": 0}, {"lr": 0.2, "seed": 0})
    ('1 and 2', 'lr: 0.1 and 0.2')
    """
    if not isinstance(theirs, dict) or not isinstance(first, dict):
        return f"{theirs} and {first}"
    keys = [key for key in theirs | first if theirs.get(key) != first.get(key)]
    return ", ".join(f"{key}: {theirs.get(key)} and {first.get(key)}" for key in keys)


def _attempt() -> str:
    """What tells this start of the ranks from those before, where the place that they meet at outlives them.

    That is so under torchrun, unless ``TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`` is set for it: ranks that are started
    again would find the addresses of the dead ones. Its count of restarts is each machine's own, so that it serves
    where there is one; on several, the variable is needed.
    """
    is_one = os.environ.get("GROUP_WORLD_SIZE", "1") == "1"
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if is_one else ""


def _group(made: dist.ProcessGroup | int) -> dist.ProcessGroup:
    assert not isinstance(made, int)  # a number stands for a group that this rank is not in
    return made


def _machine() -> str:
    """What tells this machine from another of the same name."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return ""


def _cores() -> list[int]:
    """Numbers of the cores that this process may use."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found


def _is_lost(error: Exception) -> bool:
    """Whether an exchange failed, and not what this rank did by itself."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in _LOST)


@contextmanager
def _way_to(world: World) -> Iterator[None]:
    """Let gloo use the network that leads to rank 0; it would look its own host's name up, which may be anywhere."""
    name = None if _INTERFACE in os.environ else _interface_to(world)
    if name is None:
        yield
        return
    os.environ[_INTERFACE] = name
    try:
        yield
    finally:
        del os.environ[_INTERFACE]


def _interface_to(world: World) -> str | None:
    with suppress(OSError):
        family, kind, *_, there = socket.getaddrinfo(world.address, world.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as way:
            way.connect(there)  # of a datagram: nothing is sent
            return _interface(way.getsockname()[0])
    return None


def _interface(address: str) -> str | None:
    """The network interface that has an IPv4 address."""
    if fcntl is None:
        return None
    if address.startswith("127."):
        address = LOOPBACK
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                told = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(told[20:24]) == address:
                    return name
    return None
