"""The sharded engine: parameters, gradients and the optimizer's state in parts, one on each rank.

torch's ``fully_shard`` (FSDP2) keeps a part of each tensor on each rank, and gathers the parameters of a block before
it computes and drops them after it. The idea: Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training
Trillion Parameter Models", stage 3. What leaves the engine, for checkpoints and exports, is whole: equal in layout to
what one process has, so that it can be loaded anywhere, and resumed on any number of ranks, in parts or not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from steadytrain.distributed.engine import Engine, synchronize_batch_norms
from steadytrain.distributed.process_group import Group

LEAST_BLOCK, BLOCK = 400_000, 4_000_000
"""Values of a block, which is gathered and dropped as a whole; more only where a single module has them."""


@final
class ShardedEngine(Engine):
    """The engine that keeps a part of each parameter on each rank.

    Args:
        device: of this rank.
        group: the ranks.
        synchronize_norms: take the statistics of batch norms over all ranks.
    """

    def __init__(self, device: torch.device, group: Group, *, synchronize_norms: bool = False) -> None:
        super().__init__(device, group, synchronize_norms=synchronize_norms)
        self._norms_wait = synchronize_norms
        self._sharded: FSDPModule | None = None

    @property
    def is_sharded(self) -> bool:
        return True

    def shard(self, module: nn.Module) -> None:
        if self._norms_wait:
            synchronize_batch_norms(module, self._ranks)
        ranks = self._ranks or dist.group.WORLD
        assert ranks is not None
        mesh = DeviceMesh.from_group(ranks, self.device.type)
        for parameter in module.parameters():
            parameter.data = parameter.data.contiguous()  # fully_shard takes no other layout
        _shard_blocks(module, mesh)
        assert isinstance(module, FSDPModule)
        self._sharded = module

    def prepare(self, module: nn.Module, step: int = 0) -> nn.Module:
        return module

    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        assert self._sharded is not None
        self._sharded.set_requires_gradient_sync(last)
        return nullcontext()

    @contextmanager
    def settled(self, module: nn.Module) -> Iterator[None]:
        """Have all parameters whole on each rank: evaluations give ranks unequal numbers of batches."""
        self.broadcast_buffers(module)
        blocks = [part for part in module.modules() if isinstance(part, FSDPModule)]
        for block in blocks:
            block.set_reshard_after_forward(False, recurse=False)
            block.unshard()
        try:
            yield
        finally:
            for block in blocks:
                block.set_reshard_after_forward(block is not self._sharded, recurse=False)
                block.reshard()

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
        kept = {
            k: {name: _part(value, parameters[k]) for name, value in values.items()}
            for k, values in optimizer_state["state"].items()
        }
        optimizer.load_state_dict({**optimizer_state, "state": kept})

    def load_weights(self, module: nn.Module, state: Any) -> None:
        parts = module.state_dict()
        module.load_state_dict({name: _part(value, parts.get(name)) for name, value in state.items()})


def _part(value: Any, like: Any) -> Any:
    """Return this rank's part of a tensor that is split as another of its shape; any other value as it is."""
    if not isinstance(like, DTensor) or not isinstance(value, Tensor) or value.shape != like.shape:
        return value
    return distribute_tensor(value.to(like.device).contiguous(), like.device_mesh, like.placements)


def _shard_blocks(module: nn.Module, mesh: DeviceMesh, *, is_root: bool = True) -> None:
    """Make blocks of a network, of modules that are called as a whole and have few enough values."""
    if _num_values(module) > BLOCK:
        for child in module.children():
            if _num_values(child) >= LEAST_BLOCK:
                _shard_blocks(child, mesh, is_root=False)
    if is_root or not isinstance(module, nn.ModuleList | nn.ModuleDict):
        fully_shard(module, mesh=mesh)


def _num_values(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
