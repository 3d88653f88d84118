"""Several ranks that make one update together: each computes gradients of its share, and all get the same sum.

Torch's ``DistributedDataParallel`` exchanges them in buckets while the backward pass still goes on (Li et al. 2020,
"PyTorch Distributed: Experiences on Accelerating Data Parallel Training"), over gloo on CPUs and NCCL on GPUs.

What is equal to what: the unit is the micro-batch, of which an update has a number that does not depend on the ranks.
Two ranks with one micro-batch each give, in fp32 and without dropout, bit for bit the parameters of one process that
accumulates both: a sum of two numbers has no order. With more, the order of the sum differs, and with it the last bits.
The running statistics of batch norms are those of the first rank, of its own micro-batches; a process that is alone
takes in all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from steadytrain.distributed.compress import Compression, Name, hook
from steadytrain.distributed.process_group import Group
from steadytrain.distributed.sync_norm import synchronise
from steadytrain.distributed.world import World

_SYNC_BUFFERS = next(  # the newer name first
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in signature(DistributedDataParallel.__init__).parameters
)


class Synchronous:
    """The engine of several ranks that wait for each other at every update.

    Args:
        group: the ranks, met.
        device: that this one computes on.
        compress: what gradients are exchanged as: see :mod:`.compress`.
        threshold: of ``2bit``, in the unit of the mean gradient of a rank's images.
        synchronise_norms: let batch norms take their statistics over all ranks: see :mod:`.norms`.
        bucket_bytes: of gradients that are exchanged at once; None: torch's choice, whose first bucket is small.
    """

    def __init__(
        self,
        group: Group,
        device: torch.device,
        *,
        compress: Name = "none",
        threshold: float = 0.5,
        synchronise_norms: bool = False,
        bucket_bytes: int | None = None,
    ) -> None:
        self.group = group
        self.world: World = group.world
        self.device = device
        self.on_exposed: Callable[[], None] | None = None
        self._bucket_bytes = bucket_bytes
        self._compress: Name = compress
        self._threshold = threshold
        self._synchronises_norms = synchronise_norms
        self._compression: Compression | None = None
        self._saved: Mapping[str, torch.Tensor] = {}
        if device.type == "cuda":
            torch.cuda.set_device(device)
        self._ranks = group.new("nccl") if device.type == "cuda" else None
        self._parallel: DistributedDataParallel | None = None

    def prepare(self, module: nn.Module) -> nn.Module:
        if self._synchronises_norms:
            synchronise(module, self._ranks)
        compression = hook(self._compress, module, threshold=self._threshold, group=self._ranks)
        parallel: Any = DistributedDataParallel
        self._parallel = parallel(
            module,
            device_ids=[self.device] if self.device.type == "cuda" else None,
            process_group=self._ranks,
            **{_SYNC_BUFFERS: False},  # the first rank's count: see align
            bucket_cap_mb=None if self._bucket_bytes is None else self._bucket_bytes / 2**20,
            gradient_as_bucket_view=True,
        )
        if compression is not None:
            compression.register(self._parallel)
            if self._saved:
                compression.take(self._saved, rank=self.world.rank, size=self.world.size)
        self._compression = compression
        return self._parallel

    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        assert self._parallel is not None
        return nullcontext() if last else self._parallel.no_sync()

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        if last and self.on_exposed is not None:
            loss.register_hook(self._expose)  # type: ignore[no-untyped-call]
        loss.backward()  # type: ignore[no-untyped-call]

    def clip(self, parameters: Iterable[nn.Parameter], max_norm: float) -> torch.Tensor:
        return nn.utils.clip_grad_norm_(parameters, max_norm)

    def step(self, update: Callable[[], None]) -> None:
        update()

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        total = values.clone()
        dist.all_reduce(total, group=self._ranks)
        return total

    def align(self, *modules: nn.Module) -> None:
        buffers = [buffer for module in modules for buffer in module.buffers()]
        for dtype in dict.fromkeys(buffer.dtype for buffer in buffers):
            own = [buffer for buffer in buffers if buffer.dtype == dtype]
            flat = torch.cat([buffer.reshape(-1) for buffer in own])
            dist.broadcast(flat, 0, group=self._ranks)
            if not self.world.is_first:
                for buffer, told in zip(own, torch.split(flat, [buffer.numel() for buffer in own]), strict=True):
                    buffer.copy_(told.view(buffer.shape))

    def each(self, own: torch.Tensor) -> list[torch.Tensor]:
        return self.group.each(own)

    def state_dict(self) -> dict[str, Any]:
        if self._compression is None:
            return {}
        return {name: torch.stack(self.each(own)) for name, own in self._compression.residuals().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._saved = state if self._compress == "2bit" else {}

    def _expose(self, gradient: torch.Tensor) -> None:
        # Called as the pass begins: this is then in the queue before what waits for the exchange, and is called when
        # all gradients are computed.
        assert self.on_exposed is not None
        torch.autograd.Variable._execution_engine.queue_callback(self.on_exposed)
