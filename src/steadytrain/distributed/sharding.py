"""The sharded engine: parameters, gradients and the optimizer's state in parts, one on each rank.

torch's ``fully_shard`` (FSDP2) keeps some rows of each tensor on each rank, and gathers the parameters of a block
before it computes and drops them after it. The idea: Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward
Training Trillion Parameter Models", stage 3. No rank ever has more than its parts and a block, or a tensor, of all:
the first rank's values come to the others tensor by tensor, and what is saved goes to the first rank's file piece by
piece, in the threads that write. The file is that of one process, so that it can be loaded anywhere, and resumed on any
number of ranks, in parts or not.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from steadytrain.distributed.engine import Engine, synchronize_batch_norms
from steadytrain.distributed.process_group import Group

LEAST_BLOCK, BLOCK = 400_000, 4_000_000
"""Values of a block, which is gathered and dropped as a whole; more only where a single module has them."""


@dataclass(frozen=True)
class Parts:
    """Tensors of which ranks have rows each, on their way to the first rank, which has no tensor whole.

    Args:
        own: this rank's rows, by name; on the first rank also what all ranks have alike.
        whole: meta tensors, those of many bytes a value first.
        divided: names of those that are in rows.
        ranks: that have the rows, in their order; the first rank is the first.
        group: for nothing else, since it is used in threads of its own.
    """

    own: dict[str, Tensor]
    whole: dict[str, Tensor]
    divided: frozenset[str]
    ranks: Sequence[int]
    group: dist.ProcessGroup

    def send(self, copies: Mapping[str, Tensor]) -> None:
        """Send copies of this rank's rows, on the host, to the first rank, which asks for them by :meth:`pieces`."""
        for name in self.whole:
            if name in copies and copies[name].numel():
                dist.send(copies[name].view(-1).view(torch.uint8), 0, group=self.group)

    def pieces(self, copies: Mapping[str, Tensor], name: str) -> Iterator[Tensor]:
        """Yield a tensor's rows, as they come; on the first rank, for all names in the order of ``whole``."""
        yield copies[name]
        whole = self.whole[name]
        if name not in self.divided or not whole.numel():
            return
        for rank, rows in list(zip(self.ranks, whole.chunk(len(self.ranks)), strict=False))[1:]:
            piece = torch.empty(rows.nbytes, dtype=torch.uint8)
            dist.recv(piece, rank, group=self.group)
            yield piece


@final
class ShardedEngine(Engine):
    """The engine that keeps a part of each parameter on each rank.

    Args:
        device: of this rank.
        group: the ranks.
        synchronize_norms: take the statistics of batch norms over all ranks.
        copy_ranks: consecutive ranks that have the parts of one copy, such as those of a machine; other ranks have the
            same parts, and exchange gradients alone ("hybrid": Zhao et al. 2023, "PyTorch FSDP"). None: all ranks.
        gathers_16_bits: gather parameters as bf16, but for blocks with batch norms; gradients are summed in fp32.
    """

    def __init__(
        self,
        device: torch.device,
        group: Group,
        *,
        synchronize_norms: bool = False,
        copy_ranks: int | None = None,
        gathers_16_bits: bool = False,
    ) -> None:
        super().__init__(device, group, synchronize_norms=synchronize_norms)
        self._norms_wait = synchronize_norms
        self._gathers_16_bits = gathers_16_bits
        self._sharded: FSDPModule | None = None
        self._twin: nn.Module | None = None
        self._saving = group.new_group("gloo")
        rows = torch.arange(group.world.size).view(-1, copy_ranks or group.world.size)
        self._copy_ranks: list[int] = rows[0].tolist()
        ranks = self._ranks or dist.group.WORLD
        assert ranks is not None
        if len(rows) == 1:
            self._mesh = DeviceMesh.from_group(ranks, device.type)
            return
        pair = [group.new_subgroups(lists.tolist(), dist.get_backend(ranks), device) for lists in (rows.T, rows)]
        self._mesh = DeviceMesh.from_group(pair, device.type, mesh=rows, mesh_dim_names=("copies", "parts"))

    @property
    def is_sharded(self) -> bool:
        return True

    def shard(self, module: nn.Module) -> None:
        if self._norms_wait:
            synchronize_batch_norms(module, self._ranks)
        memo: dict[int, Any] = {id(value): _on_meta(value) for value in (*module.parameters(), *module.buffers())}
        self._twin = copy.deepcopy(module, memo)
        for parameter in module.parameters():
            parameter.data = parameter.data.contiguous()  # fully_shard takes no other layout
        whole, buffers = dict(module.state_dict()), dict(module.named_buffers())
        self._divide(module)
        assert isinstance(module, FSDPModule)
        self._sharded = module
        self.load_weights(module, whole)
        for name, buffer in module.named_buffers():  # also those that no state has
            buffer.copy_(self._first_value(buffers[name], buffer))

    def _divide(self, module: nn.Module) -> None:
        """Leave parts of a module's parameters here; of what is on meta, memory for them."""
        _shard_blocks(module, self._mesh, gathers_16_bits=self._gathers_16_bits)
        if any(value.is_meta for value in (*module.parameters(), *module.buffers())):
            module.to_empty(device=self.device)

    @torch.no_grad()
    def copy(self, module: nn.Module) -> nn.Module:
        twin, self._twin = self._twin, None
        assert twin is not None
        self._divide(twin)
        assert isinstance(twin, FSDPModule)
        twin.set_reshard_after_forward(True, recurse=False)  # no backward pass does
        for value, source in zip(twin.parameters(), module.parameters(), strict=True):
            self.own_values(value).copy_(self.own_values(source))
        for buffer, other in zip(twin.buffers(), module.buffers(), strict=True):
            buffer.copy_(other)
        return twin

    def prepare(self, module: nn.Module, step: int = 0) -> nn.Module:
        return module

    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        assert self._sharded is not None
        self._sharded.set_requires_gradient_sync(last)
        return nullcontext()

    @contextmanager
    def settled(self, module: nn.Module) -> Iterator[None]:
        self.broadcast_buffers(module)
        try:
            yield
        finally:
            for block in [part for part in module.modules() if isinstance(part, FSDPModule)]:
                block.reshard()  # after a pass without gradients the outermost one is whole

    def blocks(self, module: nn.Module) -> list[nn.Module]:
        blocks = [part for part in module.modules() if isinstance(part, FSDPModule)]
        return [part for part in blocks if not any(other is not part and other in blocks for other in part.modules())]

    def parts(self, tensors: Mapping[str, Tensor]) -> Parts:
        divided = frozenset(name for name, tensor in tensors.items() if isinstance(tensor, DTensor))
        rank, names = self.world.rank, sorted(tensors, key=lambda name: -tensors[name].element_size())
        has_own = divided if rank in self._copy_ranks else frozenset()
        own = {name: self.own_values(tensors[name]) for name in names if rank == 0 or name in has_own}
        whole = {name: torch.empty(tensors[name].shape, dtype=tensors[name].dtype, device="meta") for name in names}
        return Parts(own, whole, divided, self._copy_ranks, self._saving)

    def whole(self, state: Any) -> Any:
        if isinstance(state, DTensor):
            return state.full_tensor()
        if isinstance(state, Mapping):
            return {name: self.whole(value) for name, value in state.items()}
        return [self.whole(value) for value in state] if isinstance(state, list) else state

    def own_values(self, parameter: Tensor) -> Tensor:
        return parameter.to_local() if isinstance(parameter, DTensor) else parameter

    def load(self, module: nn.Module, optimizer: Optimizer, model_state: Any, optimizer_state: Any) -> None:
        self.load_weights(module, model_state)
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        own = {
            k: {name: self._first_value(value, parameters[k]) for name, value in values.items()}
            for k, values in optimizer_state["state"].items()
        }
        optimizer.load_state_dict({**optimizer_state, "state": own})

    @torch.no_grad()
    def load_weights(self, module: nn.Module, state: Any) -> None:
        own = module.state_dict()
        if own.keys() != state.keys():
            raise RuntimeError(f"other tensors: {', '.join(sorted(own.keys() ^ state.keys()))}")
        for name, value in own.items():
            if value.shape != state[name].shape:
                raise RuntimeError(f"{name} has the shape {list(state[name].shape)}, not {list(value.shape)}")
        for name, value in own.items():
            value.copy_(self._first_value(state[name], value))

    def _first_value(self, value: Any, like: Tensor) -> Any:
        """Return the first rank's tensor, or this rank's part of it if ``like`` is one of its shape; all else as it is.

        On other ranks, ``value`` may be a meta tensor.
        """
        if not isinstance(value, Tensor):
            return value
        is_here = self.world.is_first
        here = (
            value.to(self.device).contiguous()
            if is_here
            else torch.empty(value.shape, dtype=value.dtype).to(self.device)
        )
        if isinstance(like, DTensor) and value.shape == like.shape:
            return distribute_tensor(here, like.device_mesh, like.placements)
        return self.broadcast(here).to("cpu" if value.dim() == 0 else self.device)


def _on_meta(value: Tensor) -> Tensor:
    meta = torch.empty(value.shape, dtype=value.dtype, device="meta")  # row-major, as fully_shard takes them
    return nn.Parameter(meta, value.requires_grad) if isinstance(value, nn.Parameter) else meta


def _shard_blocks(module: nn.Module, mesh: DeviceMesh, *, gathers_16_bits: bool, is_root: bool = True) -> None:
    """Make blocks of a network, of modules that are called as a whole and have few enough values."""
    if _num_values(module) > BLOCK:
        for child in module.children():
            if _num_values(child) >= LEAST_BLOCK:
                _shard_blocks(child, mesh, gathers_16_bits=gathers_16_bits, is_root=False)
    if is_root or not isinstance(module, nn.ModuleList | nn.ModuleDict):
        numbers = MixedPrecisionPolicy()
        if gathers_16_bits and not any(isinstance(part, _BatchNorm) for part in module.modules()):
            numbers = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
        fully_shard(module, mesh=mesh, mp_policy=numbers)


def _num_values(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
