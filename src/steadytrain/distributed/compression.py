"""Gradients made smaller for the way between ranks: ``fp16``, ``bf16``, or MXNet's ``2bit`` with what is left kept.

compression = hook("2bit", module, threshold=0.01)     # None for "none"; before the module is wrapped
parallel = DistributedDataParallel(module, ...)
compression.register(parallel)                          # once, before the first backward pass

For checkpoints, all ranks together (``each`` gives the tensor of every rank: see :class:`.Group`)::

    saved = {name: torch.stack(each(one)) for name, one in compression.residuals().items()}
    compression.take(saved, rank=rank, size=size)       # of any earlier number of ranks

Every rank ends up with the same bits: two-bit gradients are added in the order of the ranks on each of them, and
16-bit ones by the exchange itself.

**The threshold.** MXNet adds up the gradients of the images of a worker's batch, packs that sum, and divides it by the
number of images of all workers after it has arrived. Here ranks exchange means over their shares. So what was
``threshold`` there is ``threshold / images`` here, where ``images`` is the number that one rank has in an update:
0.5 at 128 images a worker is 0.0039. A step then weighs the same in an update.

**What it saves.** Two bits instead of 32, sixteen times less to send; but each rank receives the bytes of all others,
where the plain exchange sends each value about twice however many they are. Of the traffic it leaves ranks / 32: a
sixteenth with two ranks, half with 16, no gain from 32 on. ``fp16`` and ``bf16`` halve it with any number.

**Loss scaling** multiplies gradients by up to 65536, and the threshold would mean something else with each change of
it: do not combine ``2bit`` with the precision ``fp16``.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from steadytrain.errors import InputError

_FILL = 16  # values that the bytes are filled up to a multiple of
_NOT_FINITE = 1
# Four codes, one in each byte of a word whose first byte is its lowest, come together in its highest byte.
_GATHER = 1 << 30 | 1 << 20 | 1 << 10 | 1


class Packed(NamedTuple):
    """What :func:`pack` gives: ``codes`` uint8 [num_bytes(n)] to send, and ``residual`` float32 [n] to keep."""

    codes: Tensor
    residual: Tensor


def num_bytes(n: int) -> int:
    """How many bytes ``n`` values take.

    >>> num_bytes(37), num_bytes(16), num_bytes(0)
    (12, 4, 0)
    """
    return -(-n // _FILL) * _FILL // 4


def pack(gradient: Tensor, residual: Tensor, threshold: float) -> Packed:
    """Two bits for each value of a gradient; neither argument is changed.

    Args:
        gradient: float32 [n], on any device.
        residual: float32 [n], what is left of earlier gradients; zeros at first.
        threshold: above 0, taken as float32; the step that is sent.
    """
    step = _float32(threshold)
    total = residual + gradient
    steps = functional.hardshrink(total, _below(step)).clamp_(-step, step)
    # On a CPU a sum is the quickest way to see that all are finite; a GPU would have to be waited for.
    odd = None if total.is_cpu and total.sum().isfinite() else ~total.isfinite()
    left = total.sub_(steps)
    codes = functional.pad(steps.div_(step).to(torch.int8), (0, -len(total) % _FILL)).view(torch.int32)
    low = codes & 0x01010101  # in each byte of a word -1, 0 or 1: whether there is a step
    down = codes.bitwise_right_shift_(1).bitwise_and_(0x01010101)
    codes = (low << 1).bitwise_or_(low.bitwise_xor_(down))
    if odd is not None:
        left = torch.where(odd, residual, left)
        codes.view(torch.uint8)[: len(total)].masked_fill_(odd, _NOT_FINITE)
    return Packed(codes.mul_(_GATHER).bitwise_right_shift_(24).to(torch.uint8), left)


def unpack(codes: Tensor, n: int, threshold: float) -> Tensor:
    """What was sent: float32 [n], each value ``threshold``, ``-threshold``, 0, or NaN for what was not finite.

    Args:
        codes: uint8 [num_bytes(n)], from :func:`pack` or from MXNet.
        n: how many values.
        threshold: that of packing.
    """
    return functional.embedding(codes.int(), _table(_float32(threshold), codes.device)).view(-1)[:n]


@lru_cache(maxsize=16)
def _table(step: float, device: torch.device) -> Tensor:
    """The four values of each byte: float32 [256, 4]."""
    codes = torch.arange(256).unsqueeze(1) >> torch.tensor([6, 4, 2, 0]) & 3
    return torch.tensor([0.0, float("nan"), -step, step])[codes].to(device)


def _below(value: float) -> float:
    """The next smaller float32 of one above 0."""
    (bits,) = struct.unpack("i", struct.pack("f", value))
    (smaller,) = struct.unpack("f", struct.pack("i", bits - 1))
    assert isinstance(smaller, float)
    return smaller


def _float32(value: float) -> float:
    (rounded,) = struct.unpack("f", struct.pack("f", value))
    assert isinstance(rounded, float)
    return rounded


CompressionName = Literal["none", "fp16", "bf16", "2bit"]

_LEAST, _MOST = 1e-30, 1e30  # float32 has it, and the next smaller number


class Compression(Protocol):
    """What an engine asks of it."""

    def register(self, parallel: DistributedDataParallel) -> None:
        """Let this exchange the gradients of ``parallel``; once, before the first backward pass."""

    def residuals(self) -> dict[str, Tensor]:
        """What this rank has left to send: float32 in the shape of each parameter, by its name; may be empty.

        The names and shapes are the same on all ranks, and in the same order.
        """

    def take(self, saved: Mapping[str, Tensor], *, rank: int, size: int) -> None:
        """Take up what all ranks had left: tensors of the shape [ranks then, *shape of the parameter].

        There may have been another number of ranks: what rank ``i`` had goes to rank ``i % size``, in such measure that
        the model is owed as much as before.
        """


def make_compression(
    name: CompressionName, module: nn.Module, *, threshold: float = 0.5, group: dist.ProcessGroup | None = None
) -> Compression | None:
    """The compression of that name; None for ``none``, which torch does best by itself.

    Args:
        name: as in a recipe's ``parallel.compress``.
        module: whose gradients are exchanged, not wrapped; it gives the names.
        threshold: of ``2bit``, in the unit of the mean gradient of a rank's share.
        group: the ranks; None: all.

    Raises:
        InputError: a threshold that is not above 0.
    """
    if name == "2bit":
        return TwoBit(module, threshold=threshold, group=group)
    return None if name == "none" else HalfPrecision(torch.float16 if name == "fp16" else torch.bfloat16, group=group)


@dataclass(frozen=True)
class HalfPrecision:
    """Gradients cross as 16-bit numbers, divided by the number of ranks before."""

    dtype: torch.dtype
    group: dist.ProcessGroup | None = None

    def register(self, parallel: DistributedDataParallel) -> None:
        parallel.register_comm_hook(
            self, lambda state, bucket: all_reduce_half(bucket.buffer(), state.dtype, state.group)
        )

    def residuals(self) -> dict[str, Tensor]:
        return {}

    def take(self, saved: Mapping[str, Tensor], *, rank: int, size: int) -> None:
        assert not saved, "16-bit gradients leave nothing behind"


@dataclass
class _Bucket:
    """The parameters of a bucket, by their names, and what is left of their gradients, one after another."""

    names: list[str]
    residual: Tensor


class TwoBit:
    """Gradients cross as two bits a value; what is left is kept by parameter.

    Torch puts parameters into buckets, and does it anew after the first pass: residuals go with their parameters.

    Args:
        module: not wrapped; it gives the names.
        threshold: above 0, in the unit of the mean gradient of a rank's share.
        group: the ranks; None: all.

    Raises:
        InputError: a threshold that is not above 0.
    """

    def __init__(self, module: nn.Module, *, threshold: float, group: dist.ProcessGroup | None = None) -> None:
        if not _LEAST <= threshold <= _MOST:
            raise InputError(f"the threshold of 2bit is {threshold}; it must be above 0 ({_LEAST:g} to {_MOST:g})")
        self.threshold, self.group = threshold, group
        self._parameters = {name: one for name, one in module.named_parameters() if one.requires_grad}
        self._names: dict[Tensor, str] = {one: name for name, one in self._parameters.items()}
        self._buckets: dict[int, _Bucket] = {}
        self._apart: dict[str, Tensor] = {}  # residuals that are in no bucket now, in the order of their memory

    def register(self, parallel: DistributedDataParallel) -> None:
        parallel.register_comm_hook(self, lambda state, bucket: state.begin(bucket))

    def begin(self, bucket: GradBucket) -> Future[Tensor]:
        """Begin to exchange a bucket's gradients: the mean over the ranks of what each of them sends."""
        own = self._bucket(bucket)
        future, own.residual = all_reduce_two_bit(bucket.buffer(), own.residual, self.threshold, self.group)
        return future

    def residuals(self) -> dict[str, Tensor]:
        self._dissolve()
        return {
            name: _in_shape(self._apart[name], one).contiguous()
            if name in self._apart
            else torch.zeros(one.shape, device=one.device)
            for name, one in self._parameters.items()
        }

    def take(self, saved: Mapping[str, Tensor], *, rank: int, size: int) -> None:
        assert saved.keys() == self._parameters.keys(), "residuals of another model"
        self._buckets.clear()
        for name, one in self._parameters.items():
            flat = torch.zeros(one.numel(), device=one.device)
            _in_shape(flat, one).copy_(split_residual(saved[name], rank=rank, size=size))
            self._apart[name] = flat

    def _bucket(self, bucket: GradBucket) -> _Bucket:
        names = [self._names[one] for one in bucket.parameters()]
        known = self._buckets.get(bucket.index())
        if known is not None and known.names == names:
            return known
        if known is not None:  # the buckets are others now
            self._dissolve()
        device = bucket.buffer().device
        parts = [self._apart.pop(name, None) for name in names]
        flat = [
            torch.zeros(self._parameters[name].numel(), device=device) if part is None else part
            for name, part in zip(names, parts, strict=True)
        ]
        made = self._buckets[bucket.index()] = _Bucket(names, torch.cat(flat))
        return made

    def _dissolve(self) -> None:
        for bucket in self._buckets.values():
            sizes = [self._parameters[name].numel() for name in bucket.names]
            self._apart.update(zip(bucket.names, torch.split(bucket.residual, sizes), strict=True))
        self._buckets.clear()


def split_residual(saved: Tensor, *, rank: int, size: int) -> Tensor:
    """What a rank of ``size`` has left, of what the ranks of an earlier time had: [ranks then, *shape] to [*shape].

    The mean over the ranks, which is what the model is owed, stays what it was.

    >>> split_residual(torch.tensor([[1.0], [2.0], [3.0]]), rank=0, size=2)
    tensor([2.6667])
    >>> split_residual(torch.ones(1, 2), rank=1, size=2)
    tensor([0., 0.])
    """
    return saved[rank::size].sum(0) * (size / len(saved))


def all_reduce_half(gradients: Tensor, dtype: torch.dtype, group: dist.ProcessGroup | None = None) -> Future[Tensor]:
    """The mean over the ranks, in place, exchanged as ``dtype``.

    Args:
        gradients: [n], of any floating type.
        dtype: of 16 bits.
        group: the ranks; None: all.
    """
    halves = gradients.to(dtype).div_(dist.get_world_size(group))
    work = dist.all_reduce(halves, group=group, async_op=True)
    assert work is not None

    def widen(future: Future[list[Tensor]]) -> Tensor:
        return gradients.copy_(future.value()[0])

    return work.get_future().then(widen)


def all_reduce_two_bit(
    gradients: Tensor, residual: Tensor, threshold: float, group: dist.ProcessGroup | None = None
) -> tuple[Future[Tensor], Tensor]:
    """The mean over the ranks of what each sends, in place when the future is done; and what this one has left.

    Args:
        gradients: [n], of any floating type.
        residual: float32 [n].
        threshold: as in :func:`.pack`.
        group: the ranks; None: all.
    """
    size, n = dist.get_world_size(group), len(gradients)
    sent = pack(gradients.float(), residual, threshold)
    everyone = sent.codes.new_empty(size * num_bytes(n))
    work = dist.all_gather_into_tensor(everyone, sent.codes, group=group, async_op=True)
    assert work is not None

    def add_up(future: Future[list[Tensor]]) -> Tensor:
        future.value()  # raises what the exchange did
        first, *others = (unpack(codes, n, threshold) for codes in everyone.chunk(size))
        for one in others:  # in the order of the ranks, so that all of them get the same bits
            first += one
        return torch.div(first, size, out=gradients)

    return work.get_future().then(add_up), sent.residual


def _in_shape(flat: Tensor, parameter: Tensor) -> Tensor:
    """Values in the order of a bucket, which is that of the parameter's memory, as a view of the parameter's shape."""
    return flat.as_strided(parameter.shape, parameter.stride(), flat.storage_offset())
