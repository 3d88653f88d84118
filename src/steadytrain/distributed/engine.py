"""The engine: how the work of one update is spread over the ranks of a run; and batch norms over all of them.

Each rank computes gradients of its share, and all get the same mean. Torch's ``DistributedDataParallel`` exchanges them
in buckets while the backward pass still goes on (Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data
Parallel Training"), over gloo on CPUs and NCCL on GPUs. docs/ranks.md says what does not depend on the
number of ranks, and why.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from steadytrain.distributed.compression import HALVES, CompressionName, all_reduce_half
from steadytrain.distributed.powersgd import PowerSgd
from steadytrain.distributed.process_group import Group
from steadytrain.distributed.world import World
from steadytrain.errors import FailedError
from steadytrain.events import Event
from steadytrain.format import count

_SYNC_BUFFERS = next(  # the newer name first
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in signature(DistributedDataParallel.__init__).parameters
)


class Engine:
    """Gradients in, their mean over the ranks out. All ranks call the same methods in the same order.

    Args:
        device: of this rank.
        group: the ranks, which wait for each other at every update; None: this process alone.
        compress: how gradients are compressed: see :mod:`.compression`.
        power_rank: columns of the matrices of ``powersgd``.
        power_from: updates that exchange whole gradients before ``powersgd`` begins.
        synchronize_norms: take the statistics of batch norms over all ranks: see :func:`synchronize_batch_norms`.
        recorded: exchange gradients at once, after the last pass of an update, which a CUDA graph may hold.

    Attributes:
        on_exposed: called when an update's gradients are computed and their exchange, which began meanwhile, is not
            over yet: from then on nothing hides it. May be None.
        should_stop: asked while this rank waits for something to do.
        loads_ahead: whether the next batch is known before an update is made.
        finds_unused: whether each update looks for parameters that it brings no gradient, on all ranks alike.
    """

    def __init__(
        self,
        device: torch.device,
        group: Group | None = None,
        *,
        compress: CompressionName = "none",
        power_rank: int = 2,
        power_from: int = 0,
        synchronize_norms: bool = False,
        recorded: bool = False,
    ) -> None:
        self.device = device
        self.world = World() if group is None else group.world
        self.on_exposed: Callable[[], None] | None = None
        self.should_stop: Callable[[], bool] = lambda: False
        self.loads_ahead = True
        self.finds_unused = False
        self._group = group
        self._compress: CompressionName = compress
        self._synchronizes_norms = synchronize_norms
        self._is_recorded, self._exchanges_at_once = recorded, False
        self._power_rank, self._power_from = power_rank, power_from
        self._power: PowerSgd | None = None
        self._is_power = False
        self._saved_power: Mapping[str, Any] | None = None
        self._parallel: DistributedDataParallel | None = None
        self._exchanged: dict[str, nn.Parameter] = {}
        self._ranks: dist.ProcessGroup | None = None  # None: all, over gloo
        self._one = torch.ones(()) if device.type == "cpu" and group is None else None
        if group is not None and device.type == "cuda":
            torch.cuda.set_device(device)
            self._ranks = group.new_group("nccl", device=device)

    def optimizer(self, local: Optimizer, make: Callable[[list[dict[str, Any]]], Optimizer]) -> Optimizer:
        """Return the optimizer to use on this rank in place of ``local``; ``make`` makes such a one of groups."""
        return local

    def prepare(self, module: nn.Module, step: int = 0) -> nn.Module:
        """Wrap the module for training after ``step`` updates; the original keeps its parameters and names."""
        if self._group is None:
            return module
        if self._synchronizes_norms:
            synchronize_batch_norms(module, self._ranks)
        self._exchanged = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
        if self._is_recorded and self._compress == "none" and not self.finds_unused:
            for value in (*module.parameters(), *module.buffers()) if step == 0 else ():
                self.broadcast(value.detach())
            self._exchanges_at_once = True
            return module
        ddp: Any = DistributedDataParallel
        parallel: DistributedDataParallel = ddp(
            _Called(module),
            device_ids=[self.device] if self.device.type == "cuda" else None,
            process_group=self._ranks,
            init_sync=step == 0,  # what is resumed is equal, or each rank's own
            **{_SYNC_BUFFERS: False},  # the first rank's count: see broadcast_buffers
            gradient_as_bucket_view=True,
            find_unused_parameters=self.finds_unused,
        )
        if self._compress == "powersgd":
            self._power = PowerSgd(module, rank=self._power_rank, group=self._ranks)
            if self._saved_power is not None:
                self._power.take(self._saved_power, rank=self.world.rank, size=self.world.size)
        elif self._compress != "none":
            dtype = HALVES[self._compress]
            parallel.register_comm_hook(
                self._ranks, lambda ranks, bucket: all_reduce_half(bucket.buffer(), dtype, ranks)
            )
        if self.world.size > 2 and not self.finds_unused:
            _arrange_buckets(parallel)
        self._parallel = parallel
        self._begin_power(step)
        return parallel

    def _begin_power(self, step: int) -> None:
        """Leave the exchange of gradients to PowerSGD if it has begun after ``step`` updates."""
        self._is_power = self._power is not None and step >= self._power_from
        if self._is_power and self._parallel is not None:
            self._parallel.require_backward_grad_sync = False

    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        """Enclose forward and backward of one micro-batch; ``last``: the update follows."""
        return nullcontext() if last or self._parallel is None else self._parallel.no_sync()

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add a micro-batch's gradients; with ``last`` they are exchanged, and all ranks have their mean."""
        if self._is_power:
            loss.backward()  # type: ignore[no-untyped-call]
            if last and self._power is not None:
                if self.on_exposed is not None:
                    self.on_exposed()
                if self.finds_unused:
                    self._fill_gradients()
                self._power.exchange()
            return
        if last and self._parallel is not None and (exposed := self.on_exposed) is not None:
            # Queued as the pass begins, it stands before what waits for the exchange, and is called when all gradients
            # are computed.
            queue = torch.autograd.Variable._execution_engine.queue_callback
            loss.register_hook(lambda gradient: queue(exposed))  # type: ignore[no-untyped-call]
        if self._one is None or type(loss) is not Tensor or loss.dim() or loss.dtype != torch.float32:
            loss.backward()  # type: ignore[no-untyped-call]
            self._require_gradients(last=last)
            if last and self._exchanges_at_once:
                self._exchange()
            return
        # What Tensor.backward ends in, without the checks before it: for a small network they take as long as the pass.
        torch.autograd.Variable._execution_engine.run_backward(
            (loss,), (self._one,), False, False, (), allow_unreachable=True, accumulate_grad=True
        )
        self._require_gradients(last=last)

    def _require_gradients(self, *, last: bool) -> None:
        """Refuse an exchange that waits for a gradient which did not come: the other ranks would wait for ever."""
        if not last or self.finds_unused or (self._parallel is None and not self._exchanges_at_once):
            return
        if missing := [name for name, parameter in self._exchanged.items() if parameter.grad is None]:
            raise FailedError(
                f"this update brought no gradient to {missing[0]} (of {count(len(missing), 'parameter')}) on rank"
                f" {self.world.rank}, though passes before the run did, and ranks wait for those of all parameters:"
                " make the network compute the same parts in each pass, train with one process, or give --engine local"
            )

    @torch.no_grad()
    def _exchange(self) -> None:
        """Take the mean over the ranks of all gradients, with one exchange for each of their number formats.

        It is what DistributedDataParallel computes: of two ranks, to the last bit.
        """
        if self.on_exposed is not None:
            self.on_exposed()
        by_format: dict[torch.dtype, list[Tensor]] = {}
        for parameter in self._exchanged.values():
            assert parameter.grad is not None
            by_format.setdefault(parameter.grad.dtype, []).append(parameter.grad)
        for gradients in by_format.values():
            # As they lie in memory, which is alike on all ranks.
            rows = [gradient.as_strided((gradient.numel(),), (1,)) for gradient in gradients]
            flat = torch.cat(rows).div_(self.world.size)
            dist.all_reduce(flat, group=self._ranks)
            torch._foreach_copy_(rows, torch.split(flat, [len(row) for row in rows]))

    @torch.no_grad()
    def _fill_gradients(self) -> None:
        """Give parameters that got a gradient on other ranks alone zeros on this one."""
        has = torch.tensor([parameter.grad is not None for parameter in self._exchanged.values()], device=self.device)
        for parameter, elsewhere in zip(self._exchanged.values(), self.sum(has.float()).tolist(), strict=True):
            if elsewhere and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    @property
    def is_recordable(self) -> bool:
        """Return whether a CUDA graph may hold an update of a prepared module, with the exchange of its gradients."""
        return self._parallel is None

    @property
    def waits_for_gradients(self) -> bool:
        """Return whether ranks wait in each update for each other's gradients of all parameters."""
        return self._group is not None

    @property
    def is_sharded(self) -> bool:
        """Return whether each rank has a part of each parameter, so that a pass waits for the other ranks."""
        return False

    def shard(self, module: nn.Module) -> None:
        """Leave a part of each parameter on this rank, where the engine does that; before there is an optimizer."""

    def whole(self, state: Any) -> Any:
        """Return a tensor, or a nested state, with whole tensors in place of parts; all ranks call it."""
        return state

    def copy(self, module: nn.Module) -> nn.Module:
        """Return a copy of a network for its average, divided as it is, its norms as those of the network; once."""
        copied = copy.deepcopy(module)
        if self._group is not None and self._synchronizes_norms:
            synchronize_batch_norms(copied, self._ranks)
        return copied

    def parts(self, tensors: Mapping[str, Tensor]) -> Any:
        """Return the :class:`.sharding.Parts` of tensors that are divided among ranks; None where none are."""
        return None

    def blocks(self, module: nn.Module) -> list[nn.Module]:
        """Return the parts of a network that are gathered as a whole, and compiled apart; none where none are."""
        return []

    def own_values(self, parameter: Tensor) -> Tensor:
        """Return what this rank has of a parameter."""
        return parameter

    def load(self, module: nn.Module, optimizer: Optimizer, model_state: Any, optimizer_state: Any) -> None:
        """Load whole states into a network and its optimizer. Raises RuntimeError or ValueError where they differ.

        Of an engine that :attr:`is_sharded`, the first rank's count, and others may have meta tensors.
        """
        self.load_weights(module, model_state)
        optimizer.load_state_dict(optimizer_state)

    def load_weights(self, module: nn.Module, state: Any) -> None:
        """Load the whole state of a network. Raises RuntimeError where it differs."""
        module.load_state_dict(state)

    def finish_update(self, step: int) -> None:
        """Do what is left of an exchange after the optimizer has made the update number ``step``, from 1."""
        self._begin_power(step)

    @contextmanager
    def settled(self, module: nn.Module) -> Iterator[None]:
        """Give all ranks the weights and buffers that count, of the network or its average, for the block."""
        self.broadcast_buffers(module)
        yield

    @property
    def keeps_ranks_equal(self) -> bool:
        """Return whether all ranks have the same weights and the same state of the optimizer after every update."""
        return True

    @property
    def joined_step(self) -> int | None:
        """Return how many updates others have made of a run that this process joins; None: it begins or resumes it."""
        return None

    @property
    def takes_part(self) -> bool:
        """Return whether this rank takes part in evaluations and checkpoints."""
        return self.world.is_first or self.world.size > 1

    def end_run(self) -> None:
        """Say that the run is over, as its first rank."""

    def begin_update(self, position: int) -> int:
        """Return where the images of the update that begins stand in the stream, of a run that is at ``position``."""
        return position

    def end_update(self, step: int, position: int, n: int) -> tuple[int, int]:
        """Return how many updates are made now, and where the run is, after this rank's of ``n`` images."""
        return step + 1, position + n

    def rest(self) -> None:
        """Say that no update follows for some time."""

    def account(self, step: int) -> Event | None:
        """Return what was exchanged with other processes since the last call, where that is worth an event."""
        return None

    def collect(self) -> int | None:
        """Bring what other processes have of weights and optimizer to rank 0, before they are saved.

        Returns:
            How many updates are in it, where others make some beside this rank.
        """
        return None

    def sum(self, values: Tensor) -> Tensor:
        """Sum a tensor of any shape over the ranks, on its device."""
        if self._group is None:
            return values
        total = values.clone()
        dist.all_reduce(total, group=self._ranks)
        return total

    def broadcast(self, value: Tensor) -> Tensor:
        """Give rank 0's values of a tensor, on its device, to all ranks, in place."""
        if self._group is not None:
            dist.broadcast(value, 0, group=self._ranks)
        return value

    def broadcast_buffers(self, module: nn.Module) -> None:
        """Give rank 0's buffers (running statistics) to all ranks."""
        if self._group is not None:
            for work in [dist.broadcast(buffer, 0, group=self._ranks, async_op=True) for buffer in module.buffers()]:
                assert work is not None
                work.wait()

    def all_gather(self, value: Tensor) -> list[Tensor]:
        """Gather a tensor of each rank, all of one shape, on the CPU, in the order of the ranks."""
        return [value.cpu()] if self._group is None else self._group.all_gather(value)

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs beside weights and optimizer: what all ranks have left to send."""
        if self._power is None:
            return {}
        errors = {name: torch.stack(self.all_gather(left)) for name, left in self._power.errors().items()}
        return {"powersgd": {"right": self._power.right(), "errors": errors}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned, on any number of ranks, before the module is prepared."""
        power = state.get("powersgd")
        self._saved_power = power if isinstance(power, Mapping) else None


def _arrange_buckets(parallel: DistributedDataParallel) -> None:
    """Have torch arrange its buckets of gradients before the first update of a process, not after it.

    It arranges them once, in the order in which gradients come: here from the last parameter to the first. The place
    in a bucket says in which order those of three ranks or more are added.
    """
    trained = [parameter for parameter in parallel.parameters() if parameter.requires_grad]
    total: Tensor = parallel(by=lambda module: sum(parameter.sum() for parameter in trained))
    total.backward()  # type: ignore[no-untyped-call]
    parallel.zero_grad()


class _Called(nn.Module):
    """A network, called by itself or by a function of it: what ranks exchange is in the function's backward pass."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Any, by: Callable[..., Any] | None = None) -> Any:
        return self.module(*inputs) if by is None else by(self.module, *inputs)


_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def synchronize_batch_norms(module: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Let all batch norms of a module take their training statistics over all ranks.

    For shares so small that their own statistics are noise. Mean and variance are taken over all ranks in the forward
    pass, and their gradients in the backward one (Peng et al. 2018, "MegDet: A Large Mini-Batch Object Detector").
    That costs two exchanges in each layer and pass that nothing hides. Torch's own ``SyncBatchNorm`` runs on GPUs only,
    drops the activation inside timm's layers, and has the host wait in each layer; on GPUs its kernels are used.
    Parameters, buffers and their names stay; norms in evaluation mode are left alone. All ranks have to call the module
    equally often.

    Args:
        module: changed in place.
        group: the ranks; None: all.
    """
    for norm in [part for part in module.modules() if isinstance(part, _BATCH_NORMS)]:
        kind: Any = type(norm)
        norm.__class__ = _synchronized_class(kind, group)


@cache
def _synchronized_class(kind: type[Any], group: dist.ProcessGroup | None) -> Any:
    """A subclass with another forward pass in training. The group is the class's, since modules are copied."""

    def forward(self: Any, images: Tensor) -> Tensor:
        if not self.training:
            return kind.forward(self, images)  # type: ignore[no-any-return]
        normalized = (_normalize_by_kernels if _has_kernels(self, images) else _normalize)(self, images, group)
        # timm's BatchNormAct2d and its like
        return self.act(self.drop(normalized)) if hasattr(self, "act") and hasattr(self, "drop") else normalized

    return type(f"Synchronous{kind.__name__}", (kind,), {"forward": forward})


def _has_kernels(norm: Any, images: Tensor) -> bool:
    """Return whether torch has kernels for this norm: on GPUs, with running statistics, if any, by a momentum."""
    return images.device.type == "cuda" and not (norm.momentum is None and norm.running_mean is not None)


def _normalize_by_kernels(norm: Any, images: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    if norm.running_mean is not None:
        norm.num_batches_tracked.add_(1)
    running = norm.running_mean, norm.running_var
    normalized: Tensor = _SynchronousNorm.apply(
        images, norm.weight, norm.bias, *running, norm.momentum or 0.0, norm.eps, group
    )
    return normalized


class _SynchronousNorm(torch.autograd.Function):
    """The function of ``torch.nn.SyncBatchNorm``, by its kernels; the host does not wait for counts of images.

    The activation is read twice in each pass and kept once, in its own numbers. A row of what is exchanged is each
    rank's: its mean, its inverse standard deviation, its count.
    """

    @staticmethod
    def forward(
        ctx: Any,
        images: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        momentum: float,
        eps: float,
        group: dist.ProcessGroup | None,
    ) -> Tensor:
        images = _dense(images)
        mean, invstd = torch.batch_norm_stats(images, eps)
        count = torch.full_like(mean[:1], images.numel() // images.shape[1])
        rows = mean.new_zeros(dist.get_world_size(group), 2 * len(mean) + 1)
        rows[dist.get_rank(group)] = torch.cat([mean, invstd, count])
        dist.all_reduce(rows, group=group)
        means, invstds, counts = rows.tensor_split([len(mean), 2 * len(mean)], dim=1)
        counts = counts.flatten()
        mean, invstd = torch.batch_norm_gather_stats_with_counts(
            images, means.contiguous(), invstds.contiguous(), running_mean, running_var, momentum, eps, counts
        )
        ctx.save_for_backward(images, weight, mean, invstd, counts.to(torch.int32))
        ctx.group = group
        return torch.batch_norm_elemt(images, weight, bias, mean, invstd, eps)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        images, weight, mean, invstd, counts = ctx.saved_tensors
        gradient = _dense(gradient)
        wanted = ctx.needs_input_grad[:3]
        sum_dy, sum_dy_xmu, of_weight, of_bias = torch.batch_norm_backward_reduce(
            gradient, images, mean, invstd, weight, *wanted
        )
        of_images = None
        if wanted[0]:
            sums = torch.cat([sum_dy, sum_dy_xmu])
            dist.all_reduce(sums, group=ctx.group)
            of_images = torch.batch_norm_backward_elemt(  # type: ignore[call-arg]  # torch's stub lacks the counts
                gradient, images, mean, invstd, weight, *sums.chunk(2), counts
            )
        return of_images, of_weight if wanted[1] else None, of_bias if wanted[2] else None, *[None] * 5


def _dense(images: Tensor) -> Tensor:
    """Return images as the kernels take them: channels last, or contiguous."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    is_last = images.dim() in formats and images.is_contiguous(memory_format=formats[images.dim()])
    return images if is_last else images.contiguous()


class _Sum(torch.autograd.Function):
    """The sum of a tensor over the ranks, and of its gradients."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group, total = group, values.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _Sum.forward(ctx, gradient, ctx.group), None


def _normalize(norm: Any, images: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    dims = [0, *range(2, images.dim())]
    shape = [1, -1] + [1] * (images.dim() - 2)
    values = images.float()
    count = values.new_full((1,), values.numel() // values.shape[1])
    sums: Tensor = _Sum.apply(torch.cat([values.sum(dims), count]), group)
    total = sums[-1].detach()
    mean = sums[:-1] / total
    centred = values - mean.view(shape)
    variance = _Sum.apply(centred.square().sum(dims), group) / total
    if norm.running_mean is not None:
        with torch.no_grad():  # as torch's batch norms keep them
            norm.num_batches_tracked.add_(1)
            share = 1 / norm.num_batches_tracked if norm.momentum is None else norm.momentum
            unbiased = variance.detach() * total / (total - 1).clamp(min=1)
            norm.running_mean.lerp_(mean.detach().to(norm.running_mean.dtype), share)
            norm.running_var.lerp_(unbiased.to(norm.running_var.dtype), share)
    normalized: Tensor = centred * torch.rsqrt(variance + norm.eps).view(shape)
    if norm.weight is not None:
        normalized = normalized * norm.weight.view(shape)
    if norm.bias is not None:
        normalized = normalized + norm.bias.view(shape)
    return normalized.to(images.dtype)
