"""How fast ranks exchange gradients of a model's own sizes: one at a time and in buckets, whole and compressed.

The figure to compare is that of MXNet's ``tools/bandwidth``, and of others who measure all-reduce: bytes of gradients,
times ``2 (n - 1) / n`` for ``n`` ranks, which is what each of them has to send and to receive where the work is shared
best, over seconds. Compressed gradients count as the 32-bit ones that they stand for.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from statistics import median
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from steadytrain.distributed.compression import all_reduce_half, all_reduce_two_bit, pack, unpack
from steadytrain.distributed.process_group import Group, init_group
from steadytrain.distributed.world import World
from steadytrain.errors import InputError

Backend = Literal["auto", "gloo", "nccl"]

WAYS = ("tensors", "buckets", "fp16", "bf16", "2bit")
"""One tensor after another; and buckets, all of them at once as in training: as they are, and compressed."""

BUCKET = 25 * 2**20
"""Bytes of gradients after which a bucket is full, as in training."""

_VALUE = 4  # bytes of a float32
_THRESHOLD = 0.5  # of gradients that are drawn with standard deviation 1
_FEWEST, _MOST = 3, 10_000
_SMALL_ROUNDS = 200
_MOST_CHECKED = 10_000_000  # values drawn again, for all ranks together


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One way of exchanging all gradients of a model.

    Args:
        way: one of :data:`WAYS`.
        exchanges: of one round, which exchanges every gradient once.
        bytes: of the gradients, as float32.
        rounds: that were timed.
        seconds: of a round: the median, on the slowest rank.
        bytes_per_second: pushed and pulled, as MXNet counts: twice ``bytes``, over ``seconds``.
        gigabytes_per_second: of each rank: ``2 (n - 1) / n`` times ``bytes``, over ``seconds``.
        error: the sum of all absolute differences from a mean made without any exchange, over that mean's own sum of
            absolute values. For ``2bit`` it is the mean of what each rank has to send.
    """

    way: str
    exchanges: int
    bytes: int
    rounds: int
    seconds: float
    bytes_per_second: float
    gigabytes_per_second: float
    error: float


@dataclass(frozen=True, kw_only=True)
class Link:
    """What one back end gives: ``latency_seconds`` is the time that a single number takes."""

    backend: str
    latency_seconds: float
    ways: tuple[Measured, ...]


@dataclass(frozen=True, kw_only=True)
class Links:
    """The links between the ``hosts`` of some ranks, as a model with tensors of these ``sizes`` uses them."""

    model: str
    sizes: list[int]
    hosts: list[str]
    backends: tuple[Link, ...]


@dataclass(frozen=True)
class _Exchange:
    """Between ``ranks`` by one back end, of tensors on ``device``; ``group`` is what they tell each other by."""

    backend: str
    device: torch.device
    group: Group
    ranks: dist.ProcessGroup | None  # None: all, over gloo


@dataclass(frozen=True)
class _Way:
    """How gradients are exchanged: ``parts`` values at a time, each waited for or all begun at once."""

    name: str
    parts: Sequence[int]
    at_once: bool
    begin: Callable[[int, Tensor], Future[Tensor]]
    sent: Callable[[Tensor], Tensor] = Tensor.double


def buckets(sizes: Iterable[int], most_bytes: int = BUCKET) -> list[int]:
    """The numbers of values that are exchanged at once: the model's last tensors first, each bucket filled just over.

    >>> buckets([1000, 10, 300, 300], most_bytes=2000)
    [600, 1010]
    """
    made = [0]
    for size in reversed(list(sizes)):
        if made[-1] * _VALUE >= most_bytes:
            made.append(0)
        made[-1] += size
    return [size for size in made if size]


def links(
    world: World,
    model: Callable[[], tuple[str, list[int]]],
    *,
    backend: Backend = "auto",
    seconds: float = 5.0,
    cores: int = 1,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Links:
    """Meet the other ranks, which all call this, and exchange random gradients of a model's sizes with them.

    Args:
        world: of more than one rank.
        model: gives a name, and the values of each tensor in the model's order; only the first rank is asked.
        backend: ``gloo`` exchanges what is in the CPUs' memory, ``nccl`` what is in the GPUs'; ``auto``: all there are.
        seconds: for all ways of a back end; what is slow may take longer, for three rounds of each.
        cores: of this machine that its ranks may use; each computes with its share of them.
        progress: takes how many ways are measured, of how many.

    Returns:
        the same on all ranks.

    Raises:
        InputError: NCCL is asked for, and there are fewer GPUs than ranks; or the model has no parameters.
        RankLostError: another rank failed or did not come.
    """
    with init_group(world) as group:
        torch.set_num_threads(max(1, cores // group.sharing))
        with group.all_or_none():
            gpu = _gpu(world, backend)
            told = _sizes(model) if world.is_first else ("", [])
        (name, sizes), _ = group.broadcast(told, {})
        try:
            exchanges = _exchanges(group, gpu, backend)
            done = count(1)

            def measured() -> None:
                progress(next(done), len(exchanges) * len(WAYS))

            made = [_link(one, sizes, seconds=seconds, measured=measured) for one in exchanges]
        except RuntimeError as error:
            raise group.blame(error) from error
        return Links(model=name, sizes=sizes, hosts=group.hosts, backends=tuple(made))


def _sizes(model: Callable[[], tuple[str, list[int]]]) -> tuple[str, list[int]]:
    name, sizes = model()
    if not sum(sizes):
        raise InputError(f"{name} has no parameters, so nothing would be exchanged: choose another model")
    return name, sizes


def _gpu(world: World, backend: Backend) -> torch.device | None:
    """A GPU of its own for each rank of this machine, where there are as many and they are wanted."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if backend == "nccl" and gpus < world.local_size:
        raise InputError(
            f"nccl needs a GPU for each of {world.local_size} ranks of this machine, and torch sees {gpus}: use gloo"
        )
    return None if backend == "gloo" or gpus < world.local_size else torch.device("cuda", world.local_rank)


def _exchanges(group: Group, gpu: torch.device | None, backend: Backend) -> list[_Exchange]:
    made = []
    if all(group.all_gather_json(gpu is not None)) and gpu is not None:
        torch.cuda.set_device(gpu)
        ranks = dist.new_group(backend="nccl")
        assert isinstance(ranks, dist.ProcessGroup)
        made.append(_Exchange("nccl", gpu, group, ranks))
    if backend != "nccl":
        made.append(_Exchange("gloo", torch.device("cpu"), group, None))
    return made


def _link(exchange: _Exchange, sizes: Sequence[int], *, seconds: float, measured: Callable[[], None]) -> Link:
    value = torch.zeros(1, device=exchange.device)
    spent = [_timed(lambda: dist.all_reduce(value, group=exchange.ranks), exchange) for _ in range(_SMALL_ROUNDS)]
    latency = _slowest(spent, exchange)
    ways = []
    for way in _ways(sizes, exchange):
        ways.append(_measure(way, exchange, seconds / len(WAYS)))
        measured()
    return Link(backend=exchange.backend, latency_seconds=latency, ways=tuple(ways))


def _ways(sizes: Sequence[int], exchange: _Exchange) -> list[_Way]:
    parts, ranks = buckets(sizes), exchange.ranks
    return [
        _Way("tensors", [size for size in sizes if size], False, lambda _, flat: _mean(flat, ranks)),
        _Way("buckets", parts, True, lambda _, flat: _mean(flat, ranks)),
        _Way("fp16", parts, True, lambda _, flat: all_reduce_half(flat, torch.float16, ranks)),
        _Way("bf16", parts, True, lambda _, flat: all_reduce_half(flat, torch.bfloat16, ranks)),
        _two_bit(parts, exchange),
    ]


def _two_bit(parts: Sequence[int], exchange: _Exchange) -> _Way:
    residuals = [torch.zeros(n, device=exchange.device) for n in parts]

    def begin(number: int, flat: Tensor) -> Future[Tensor]:
        future, residuals[number] = all_reduce_two_bit(flat, residuals[number], _THRESHOLD, exchange.ranks)
        return future

    def sent(flat: Tensor) -> Tensor:
        return unpack(pack(flat, torch.zeros_like(flat), _THRESHOLD).codes, len(flat), _THRESHOLD).double()

    return _Way("2bit", parts, True, begin, sent)


def _mean(flat: Tensor, ranks: dist.ProcessGroup | None) -> Future[Tensor]:
    work = dist.all_reduce(flat.div_(dist.get_world_size(ranks)), group=ranks, async_op=True)
    assert work is not None
    made: Future[Tensor] = work.get_future()
    return made


def _measure(way: _Way, exchange: _Exchange, seconds: float) -> Measured:
    rank, size = exchange.group.world.rank, exchange.group.world.size
    gradients = [_drawn(rank, number, n).to(exchange.device) for number, n in enumerate(way.parts)]
    first = _timed(lambda: _round(way, gradients), exchange)
    error = _error(way, gradients, exchange.group)
    again = _timed(lambda: _round(way, gradients), exchange)  # the first one makes connections and takes memory
    usual = _slowest([min(first, again)], exchange)
    rounds = min(max(math.ceil(seconds / max(usual, 1e-9)), _FEWEST), _MOST)
    spent = _slowest([_timed(lambda: _round(way, gradients), exchange) for _ in range(rounds)], exchange)
    num = sum(way.parts) * _VALUE
    return Measured(
        way=way.name,
        exchanges=len(way.parts),
        bytes=num,
        rounds=rounds,
        seconds=spent,
        bytes_per_second=2 * num / spent,
        gigabytes_per_second=2 * (size - 1) / size * num / spent / 1e9,
        error=error,
    )


def _round(way: _Way, gradients: Sequence[Tensor]) -> None:
    begun = []
    for number, flat in enumerate(gradients):
        begun.append(way.begin(number, flat))
        if not way.at_once:
            begun[-1].wait()
    for future in begun:
        future.wait()


def _error(way: _Way, gradients: Sequence[Tensor], group: Group) -> float:
    """The largest of all ranks. Every rank draws the others' gradients once more, so nothing of it is exchanged.

    Of a large model the first parts are checked, and at least one.
    """
    wrong = whole = 0.0
    checked = 0
    for number, (n, got) in enumerate(zip(way.parts, gradients, strict=True)):
        checked += n * group.world.size
        if number and checked > _MOST_CHECKED:
            break
        wanted = torch.zeros(n, dtype=torch.float64)
        for rank in range(group.world.size):
            wanted += way.sent(_drawn(rank, number, n))
        wanted /= group.world.size
        wrong += float((got.cpu() - wanted).abs().sum())
        whole += float(wanted.abs().sum())
    return max(map(float, group.all_gather_json(wrong / whole if whole else 0.0)))


def _drawn(rank: int, number: int, n: int) -> Tensor:
    """The gradients of a rank: what it draws for part ``number``, the same wherever it is drawn."""
    seed = rank * 1_000_003 + number  # the generator takes 32 bits of it
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def _timed(do: Callable[[], object], exchange: _Exchange) -> float:
    _settle(exchange)
    began = time.perf_counter()
    do()
    _settle(exchange)
    return time.perf_counter() - began


def _settle(exchange: _Exchange) -> None:
    if exchange.device.type == "cuda":
        torch.cuda.synchronize(exchange.device)


def _slowest(seconds: Sequence[float], exchange: _Exchange) -> float:
    return max(map(float, exchange.group.all_gather_json(median(seconds))))
