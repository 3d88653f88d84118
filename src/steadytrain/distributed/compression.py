"""Gradients made smaller for the way between ranks: as ``fp16`` or ``bf16``, and the names of all compressions.

Every rank ends up with the same bits, by the exchange itself. What each saves: docs/compression.md.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

CompressionName = Literal["none", "fp16", "bf16", "powersgd"]

HALVES: dict[CompressionName, torch.dtype] = {"fp16": torch.float16, "bf16": torch.bfloat16}
"""The number formats of 16 bits, by the names of their compressions."""


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
