"""Gradients made smaller for the way between ranks: as ``fp16`` or ``bf16``, or as MXNet's ``2bit`` with residuals.

two_bit = TwoBit(module, threshold=0.01)
parallel = DistributedDataParallel(module, ...)
parallel.register_comm_hook(two_bit, lambda two_bit, bucket: two_bit.begin(bucket))

For checkpoints, all ranks together (``each`` gives the tensor of every rank: see :class:`.Group`)::

    saved = {name: torch.stack(each(left)) for name, left in two_bit.residuals().items()}
    two_bit.take(saved, rank=rank, size=size)       # of any earlier number of ranks

Every rank ends up with the same bits: two-bit gradients are added in the order of the ranks on each of them, and
16-bit ones by the exchange itself.

**The threshold.** MXNet adds up the gradients of the images of a worker's batch, packs that sum, and divides it by the
number of images of all workers after it has arrived. Here ranks exchange means over their shares. So what was
``threshold`` there is ``threshold / images`` here, where ``images`` is the number that one rank has in an update:
0.5 at 128 images a worker is 0.0039. A step then weighs the same in an update.

What it saves, and why it does not go with the precision ``fp16``: docs/compression.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.nn import functional

from steadytrain.errors import InputError

CompressionName = Literal["none", "fp16", "bf16", "2bit", "powersgd"]

_FILL = 16  # values that the bytes are filled up to a multiple of
_NOT_FINITE = 1
# Four codes, one in each byte of a word whose first byte is its lowest, come together in its highest byte.
_GATHER = 1 << 30 | 1 << 20 | 1 << 10 | 1
_LEAST, _MOST = 1e-30, 1e30  # float32 has it, and the next smaller number


class Packed(NamedTuple):
    """Result of :func:`pack`: ``codes`` uint8 [num_bytes(n)] to send, and ``residual`` float32 [n] to keep."""

    codes: Tensor
    residual: Tensor


def num_bytes(n: int) -> int:
    """Return how many bytes ``n`` values take.

    >>> num_bytes(37), num_bytes(16), num_bytes(0)
    (12, 4, 0)
    """
    return -(-n // _FILL) * _FILL // 4


def pack(gradient: Tensor, residual: Tensor, threshold: float) -> Packed:
    """Encode a gradient in two bits a value; neither argument is changed.

    Args:
        gradient: float32 [n], on any device.
        residual: float32 [n], what is left of earlier gradients; zeros at first.
        threshold: above 0, taken as float32; the step that is sent.
    """
    step = float(np.float32(threshold))
    below = float(np.nextafter(np.float32(threshold), np.float32(0)))
    total = residual + gradient
    steps = functional.hardshrink(total, below).clamp_(-step, step)
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
    """Decode what was sent: float32 [n], each value ``threshold``, ``-threshold``, 0, or NaN for what was not finite.

    Args:
        codes: uint8 [num_bytes(n)], from :func:`pack` or from MXNet.
        n: how many values.
        threshold: that of packing.
    """
    return functional.embedding(codes.int(), _table(threshold, codes.device)).view(-1)[:n]


@lru_cache(maxsize=16)
def _table(threshold: float, device: torch.device) -> Tensor:
    """Return the four values of each byte: float32 [256, 4]."""
    codes = torch.arange(256).unsqueeze(1) >> torch.tensor([6, 4, 2, 0]) & 3
    return torch.tensor([0.0, float("nan"), -threshold, threshold])[codes].to(device)


class TwoBit:
    """Exchange of gradients in two bits a value, with a residual for each parameter.

    Args:
        module: whose gradients are exchanged, not wrapped; it gives the names.
        threshold: above 0, in the unit of the mean gradient of a rank's share.
        group: the ranks; None: all.

    Raises:
        InputError: a threshold that is not above 0.
    """

    def __init__(self, module: nn.Module, *, threshold: float, group: dist.ProcessGroup | None = None) -> None:
        if not _LEAST <= threshold <= _MOST:
            raise InputError(f"the threshold of 2bit is {threshold}; it must be above 0 ({_LEAST:g} to {_MOST:g})")
        self.threshold, self.group = threshold, group
        self._names = {parameter: name for name, parameter in module.named_parameters() if parameter.requires_grad}
        # Of the parameters that share a bucket, or of single ones: one after another, in the order of their memory.
        self._residuals: dict[tuple[Tensor, ...], Tensor] = {
            (parameter,): torch.zeros(parameter.numel(), device=parameter.device) for parameter in self._names
        }

    def begin(self, bucket: GradBucket) -> Future[Tensor]:
        """Begin to exchange a bucket's gradients: the mean over the ranks of what each of them sends."""
        parameters = tuple(bucket.parameters())
        if parameters not in self._residuals:  # torch makes other buckets after the first pass
            self._split(parameters)
            self._residuals[parameters] = torch.cat([self._residuals.pop((parameter,)) for parameter in parameters])
        future, self._residuals[parameters] = all_reduce_two_bit(
            bucket.buffer(), self._residuals[parameters], self.threshold, self.group
        )
        return future

    def residuals(self) -> dict[str, Tensor]:
        """Return this rank's residuals: float32 in the shape of each parameter, by its name.

        The names and shapes are the same on all ranks, and in the same order.
        """
        self._split(tuple(self._names))
        return {
            name: _in_shape(self._residuals[parameter,], parameter).contiguous()
            for parameter, name in self._names.items()
        }

    def take(self, saved: Mapping[str, Tensor], *, rank: int, size: int) -> None:
        """Load the residuals that all ranks had: tensors of the shape [ranks then, *shape of the parameter].

        There may have been another number of ranks: what rank ``i`` had goes to rank ``i % size``, in such measure that
        the model is owed as much as before.
        """
        assert saved.keys() == set(self._names.values()), "residuals of another model"
        self._split(tuple(self._names))
        for parameter, name in self._names.items():
            _in_shape(self._residuals[parameter,], parameter).copy_(split_residual(saved[name], rank=rank, size=size))

    def _split(self, parameters: tuple[Tensor, ...]) -> None:
        """Take apart the residuals of all buckets that have any of these parameters."""
        wanted = set(parameters)
        for together in [key for key in self._residuals if len(key) > 1 and not wanted.isdisjoint(key)]:
            parts = torch.split(self._residuals.pop(together), [parameter.numel() for parameter in together])
            self._residuals.update({(parameter,): part for parameter, part in zip(together, parts, strict=True)})


def split_residual(saved: Tensor, *, rank: int, size: int) -> Tensor:
    """Return a rank's part of saved residuals, of any number of ranks: [ranks then, *shape] to [*shape].

    The mean over the ranks, which is what the model is owed, stays what it was.

    >>> split_residual(torch.tensor([[1.0], [2.0], [3.0]]), rank=0, size=2)
    tensor([2.6667])
    >>> split_residual(torch.ones(1, 2), rank=1, size=2)
    tensor([0., 0.])
    """
    return saved[rank::size].sum(0) * (size / len(saved))


def all_reduce_half(gradients: Tensor, dtype: torch.dtype, group: dist.ProcessGroup | None = None) -> Future[Tensor]:
    """Average gradients over the ranks, in place, exchanged as ``dtype``.

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
    """Average over the ranks what each sends, in place when the future is done; also return this rank's residual.

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
        for values in others:  # in the order of the ranks, so that all of them get the same bits
            first += values
        return torch.div(first, size, out=gradients)

    return work.get_future().then(add_up), sent.residual


def _in_shape(flat: Tensor, parameter: Tensor) -> Tensor:
    """View a bucket's values, which are in the order of the parameter's memory, in the parameter's shape."""
    return flat.as_strided(parameter.shape, parameter.stride(), flat.storage_offset())
