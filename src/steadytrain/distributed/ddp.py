"""Synchronous data parallelism: each rank computes gradients of its share, and all get the same sum.

Torch's ``DistributedDataParallel`` exchanges them in buckets while the backward pass still goes on (Li et al. 2020,
"PyTorch Distributed: Experiences on Accelerating Data Parallel Training"), over gloo on CPUs and NCCL on GPUs.

The number of micro-batches in an update does not depend on the number of ranks. Two ranks with one micro-batch each
give, in fp32 and without dropout, bit for bit the parameters of one process that accumulates both: a sum of two numbers
has no order. With more, the order of the sum differs, and with it the last bits. The running statistics of batch norms
are those of rank 0's own micro-batches; a process that is alone takes in all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce as _all_reduce
from torch.nn.parallel import DistributedDataParallel

from steadytrain.distributed.compression import Compression, CompressionName, make_compression
from steadytrain.distributed.process_group import Group
from steadytrain.distributed.world import World

_SYNC_BUFFERS = next(  # the newer name first
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in signature(DistributedDataParallel.__init__).parameters
)


class DDPEngine:
    """The engine of several ranks that wait for each other at every update.

    Args:
        group: the process group.
        device: of this rank.
        compress: how gradients are compressed: see :mod:`.compression`.
        threshold: of ``2bit``, in the unit of the mean gradient of a rank's images.
        synchronise_norms: take the statistics of batch norms over all ranks: see :func:`synchronize_batch_norms`.
        bucket_bytes: size of a gradient bucket; None: torch's choice, whose first bucket is small.
    """

    def __init__(
        self,
        group: Group,
        device: torch.device,
        *,
        compress: CompressionName = "none",
        threshold: float = 0.5,
        synchronise_norms: bool = False,
        bucket_bytes: int | None = None,
    ) -> None:
        self.group = group
        self.world: World = group.world
        self.device = device
        self.on_exposed: Callable[[], None] | None = None
        self._bucket_bytes = bucket_bytes
        self._compress: CompressionName = compress
        self._threshold = threshold
        self._synchronises_norms = synchronise_norms
        self._compression: Compression | None = None
        self._saved: Mapping[str, torch.Tensor] = {}
        if device.type == "cuda":
            torch.cuda.set_device(device)
        self._ranks = group.new_group("nccl") if device.type == "cuda" else None
        self._parallel: DistributedDataParallel | None = None

    def prepare(self, module: nn.Module) -> nn.Module:
        if self._synchronises_norms:
            synchronize_batch_norms(module, self._ranks)
        compression = make_compression(self._compress, module, threshold=self._threshold, group=self._ranks)
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

    def broadcast_buffers(self, *modules: nn.Module) -> None:
        buffers = [buffer for module in modules for buffer in module.buffers()]
        for dtype in dict.fromkeys(buffer.dtype for buffer in buffers):
            same = [buffer for buffer in buffers if buffer.dtype == dtype]
            flat = torch.cat([buffer.reshape(-1) for buffer in same])
            dist.broadcast(flat, 0, group=self._ranks)
            if not self.world.is_first:
                for buffer, values in zip(same, torch.split(flat, [b.numel() for b in same]), strict=True):
                    buffer.copy_(values.view(buffer.shape))

    def all_gather(self, value: torch.Tensor) -> list[torch.Tensor]:
        return self.group.all_gather(value)

    def state_dict(self) -> dict[str, Any]:
        if self._compression is None:
            return {}
        return {name: torch.stack(self.all_gather(left)) for name, left in self._compression.residuals().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._saved = state if self._compress == "2bit" else {}

    def _expose(self, gradient: torch.Tensor) -> None:
        # Called as the pass begins: this is then in the queue before what waits for the exchange, and is called when
        # all gradients are computed.
        assert self.on_exposed is not None
        torch.autograd.Variable._execution_engine.queue_callback(self.on_exposed)


all_reduce: Any = _all_reduce  # torch gives it no types
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def synchronize_batch_norms(module: nn.Module, group: dist.ProcessGroup | None = None) -> int:
    """Let all batch norms of a module take their training statistics over all ranks; returns how many there are.

    For shares so small that their own statistics are noise. Mean and variance are taken over all ranks in the forward
    pass, and their gradients in the backward one (Peng et al. 2018, "MegDet: A Large Mini-Batch Object Detector").
    That costs two exchanges in each layer and pass that nothing hides. Torch's own ``SyncBatchNorm`` runs on GPUs only,
    and drops the activation inside timm's layers. Parameters, buffers and their names stay; norms in evaluation
    mode are left alone. All ranks have to call the module equally often.

    Args:
        module: changed in place.
        group: the ranks; None: all.
    """
    norms = [part for part in module.modules() if isinstance(part, _BATCH_NORMS)]
    for norm in norms:
        kind: Any = type(norm)
        norm.__class__ = _synchronized_class(kind, group)
    return len(norms)


@cache
def _synchronized_class(kind: type[Any], group: dist.ProcessGroup | None) -> type[Any]:
    """A subclass with another forward pass in training. The group is the class's, since modules are copied."""

    def forward(self: Any, images: Tensor) -> Tensor:
        if not self.training:
            return kind.forward(self, images)  # type: ignore[no-any-return]
        normalized = _normalize(self, images)
        # timm's BatchNormAct2d and its like
        return self.act(self.drop(normalized)) if hasattr(self, "act") and hasattr(self, "drop") else normalized

    return type(f"Synchronous{kind.__name__}", (kind,), {"forward": forward, "ranks": group})


def _normalize(norm: Any, images: Tensor) -> Tensor:
    dims = [0, *range(2, images.dim())]
    shape = [1, -1] + [1] * (images.dim() - 2)
    values = images.float()
    count = torch.tensor(float(values.numel() // values.shape[1]), device=values.device)
    sums: Tensor = all_reduce(torch.cat([values.sum(dims), count[None]]), group=norm.ranks)
    total = sums[-1].detach()
    mean = sums[:-1] / total
    centred = values - mean.view(shape)
    variance = all_reduce(centred.square().sum(dims), group=norm.ranks) / total
    if norm.running_mean is not None:
        with torch.no_grad():  # as torch's batch norms keep them
            norm.num_batches_tracked.add_(1)
            share = 1 / float(norm.num_batches_tracked) if norm.momentum is None else norm.momentum
            unbiased = variance.detach() * total / (total - 1).clamp(min=1)
            norm.running_mean.lerp_(mean.detach().to(norm.running_mean.dtype), share)
            norm.running_var.lerp_(unbiased.to(norm.running_var.dtype), share)
    normalized: Tensor = centred * torch.rsqrt(variance + norm.eps).view(shape)
    if norm.weight is not None:
        normalized = normalized * norm.weight.view(shape)
    if norm.bias is not None:
        normalized = normalized + norm.bias.view(shape)
    return normalized.to(images.dtype)
