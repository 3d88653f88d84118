"""Measure how fast ranks exchange gradients of a model's sizes: one at a time and in buckets, whole and compressed.

The figure to compare is that of MXNet's ``tools/bandwidth``, and of others who measure all-reduce: bytes of gradients,
times ``2 (n - 1) / n`` for ``n`` ranks, which is what each of them has to send and to receive where the work is shared
best, over seconds. Compressed gradients count as the 32-bit ones that they stand for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from statistics import median
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from steadytrain.distributed.compression import HALVES, all_reduce_half
from steadytrain.distributed.process_group import Group, init_group
from steadytrain.distributed.world import World
from steadytrain.errors import InputError
from steadytrain.training.compute.timing import timed
from steadytrain.tuning.scale import BUCKET, buckets, even_gradients

Backend = Literal["auto", "gloo", "nccl"]

WAYS = ("tensors", "buckets", *HALVES)
"""One tensor after another; and buckets, all of them at once as in training: as they are, and compressed."""

_VALUE = 4  # bytes of a float32
_FEWEST, _MOST = 3, 10_000
_SMALL_ROUNDS = 200


def measure_links(
    world: World,
    model: Callable[[], tuple[str, list[list[int]]]],
    *,
    backend: Backend = "auto",
    seconds: float = 5.0,
    cores: int = 1,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Meet the other ranks, which all call this, and exchange random gradients of a model's sizes with them.

    Args:
        world: of more than one rank.
        model: gives a name, and the shape of each tensor in the model's order; only the first rank is asked.
        backend: ``gloo`` exchanges what is in the CPUs' memory, ``nccl`` what is in the GPUs'; ``auto``: all there are.
        seconds: for all ways of a back end; what is slow may take longer, for three rounds of each.
        cores: of this machine that its ranks may use; each computes with its share of them.

    Returns:
        The same on all ranks, plain data for JSON: ``model``, ``tensors``, ``parameters``, ``procs``, ``hosts``, and
        ``backends``, each with its ``latency_seconds``, which a single number takes, and its ``ways``:
        ``exchanges`` of one round, which exchanges every gradient once; ``bytes`` of the gradients as float32;
        ``rounds`` that were timed; ``seconds`` of a round, the median on the slowest rank; ``bytes_per_second`` pushed
        and pulled, as MXNet counts; and ``gigabytes_per_second`` of each rank.

    Raises:
        InputError: NCCL is asked for, and there are fewer GPUs than ranks; or the model has no parameters.
        RankLostError: another rank failed or did not come.
    """
    with init_group(world) as group:
        torch.set_num_threads(max(1, cores // group.sharing))
        name, shapes = "", list[list[int]]()
        with group.all_or_none():
            gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
            if backend == "nccl" and gpus < world.local_size:
                raise InputError(
                    f"nccl needs a GPU for each of the {world.local_size} ranks on this machine, and torch finds"
                    f" {gpus}: use gloo"
                )
            if world.is_first:
                name, shapes = model()
                if not sum(map(math.prod, shapes)):
                    raise InputError(f"{name} has no parameters, so nothing would be exchanged: choose another model")
        (name, shapes), _ = group.broadcast((name, shapes), {})
        sizes = [math.prod(shape) for shape in shapes]
        try:
            networks = []
            if all(group.all_gather_json(backend != "gloo" and gpus >= world.local_size)):
                gpu = torch.device("cuda", world.local_rank)
                torch.cuda.set_device(gpu)
                networks.append(_Network("nccl", gpu, group, group.new_group("nccl", device=gpu)))
            if backend != "nccl":
                networks.append(_Network("gloo", torch.device("cpu"), group, None))
            done, total = count(1), len(networks) * len(WAYS)
            backends = []
            for network in networks:
                number = torch.zeros(1, device=network.device)
                latency = network.seconds(partial(dist.all_reduce, number, group=network.ranks), _SMALL_ROUNDS)
                ways = []
                for way, parts, begin in _ways(sizes, network):
                    ways.append(_measure(way, parts, begin, network, seconds / len(WAYS)))
                    progress(next(done), total)
                backends.append({"backend": network.backend, "latency_seconds": latency, "ways": ways})
        except RuntimeError as error:
            raise group.blame(error) from error
        return {
            "model": name,
            "tensors": len(shapes),
            "parameters": sum(sizes),
            "procs": world.size,
            "hosts": list(dict.fromkeys(group.hosts)),
            "backends": backends,
        }


_Begin = Callable[[Tensor], Future[Tensor]]
"""Begins to exchange the gradients of one part, in place."""


@dataclass(frozen=True)
class _Network:
    """Ranks of ``group`` that exchange tensors on ``device`` by one back end; ``ranks`` None: all, over gloo."""

    backend: str
    device: torch.device
    group: Group
    ranks: dist.ProcessGroup | None

    def seconds(self, exchange: Callable[[], object], rounds: int) -> float:
        """Return the median seconds of so many exchanges, on the slowest rank."""
        spent = median(timed(self.device, exchange) for _ in range(rounds))
        return max(map(float, self.group.all_gather_json(spent)))


def _ways(sizes: Sequence[int], network: _Network) -> Iterator[tuple[str, list[int], _Begin]]:
    """Yield each way's name, the values of its parts, and what begins to exchange one."""
    filled = buckets(even_gradients([_VALUE * size for size in sizes]), first_bytes=BUCKET)
    parts, ranks = [bucket.bytes // _VALUE for bucket in filled], network.ranks

    def mean(flat: Tensor) -> Future[Tensor]:
        work = dist.all_reduce(flat.div_(dist.get_world_size(ranks)), group=ranks, async_op=True)
        assert work is not None
        future: Future[Tensor] = work.get_future()
        return future

    yield "tensors", [size for size in sizes if size], mean
    yield "buckets", parts, mean
    for name, dtype in HALVES.items():
        yield name, parts, partial(all_reduce_half, dtype=dtype, group=ranks)


def _measure(way: str, parts: Sequence[int], begin: _Begin, network: _Network, seconds: float) -> dict[str, Any]:
    """Measure one way of exchanging all gradients of a model; return its row of the document."""
    size = network.group.world.size
    gradients = [torch.randn(n, device=network.device) for n in parts]

    def exchange() -> None:
        begun = []
        for flat in gradients:
            begun.append(begin(flat))
            if way == "tensors":
                begun[-1].wait()
        for future in begun:
            future.wait()

    exchange()  # makes connections and takes memory
    rounds = min(max(math.ceil(seconds / max(network.seconds(exchange, 1), 1e-9)), _FEWEST), _MOST)
    spent, num = network.seconds(exchange, rounds), sum(parts) * _VALUE
    return {
        "way": way,
        "exchanges": len(parts),
        "bytes": num,
        "rounds": rounds,
        "seconds": spent,
        "bytes_per_second": 2 * num / spent,
        "gigabytes_per_second": 2 * (size - 1) / size * num / spent / 1e9,
    }
