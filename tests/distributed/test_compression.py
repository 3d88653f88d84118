"""Compressed exchange in torch's DistributedDataParallel, by real processes over gloo."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.distributed.ranks import as_group
from torch import Tensor, nn

from steadytrain.distributed.compression import HALVES, split_residual
from steadytrain.distributed.engine import Engine
from steadytrain.distributed.process_group import Group

SHAPES = (37,), (4, 3, 3, 3)


class Given(nn.Module):
    """Its gradients are what it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.vector = nn.Parameter(torch.zeros(SHAPES[0]))
        self.fixed = nn.Parameter(torch.zeros(3), requires_grad=False)
        # As in training with channels_last: in memory the values have another order than in the shape.
        self.kernel = nn.Parameter(torch.zeros(SHAPES[1]).to(memory_format=torch.channels_last))

    def forward(self, vector: Tensor, kernel: Tensor) -> Tensor:
        return (self.vector * vector).sum() + (self.kernel * kernel).sum()


def _gradients(rank: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(rank)
    return [torch.randn(shape, generator=draw) for shape in SHAPES]


def _means(group: Group) -> dict[str, Any]:
    document: dict[str, Any] = {}
    for name in HALVES:
        module, engine = Given(), Engine(torch.device("cpu"), group, compress=name)
        engine.backward(engine.prepare(module)(*_gradients(group.world.rank)), last=True)
        assert module.vector.grad is not None and module.kernel.grad is not None
        document[name] = torch.cat([module.vector.grad, module.kernel.grad.flatten()])
        document[f"{name} left"] = engine.state_dict()
    return document


def test_three_ranks_get_the_same_bits_near_the_mean() -> None:
    answers = as_group(_means, 3)
    mean = torch.stack([torch.cat([part.flatten() for part in _gradients(rank)]) for rank in range(3)]).mean(0)
    for name, tolerance in (("fp16", 2e-3), ("bf16", 2e-2)):
        torch.testing.assert_close(answers[0][name], mean, rtol=tolerance, atol=tolerance)
        assert all(torch.equal(rank[name], answers[0][name]) for rank in answers)
        assert answers[0][f"{name} left"] == {}


@given(st.integers(1, 9), st.integers(1, 9))
def test_the_model_is_owed_as_much_with_any_number_of_ranks(before: int, now: int) -> None:
    saved = torch.arange(1.0, before + 1).unsqueeze(1).expand(before, 2)
    shares = torch.stack([split_residual(saved, rank=rank, size=now) for rank in range(now)])
    torch.testing.assert_close(shares.mean(0), saved.mean(0))
    if before == now:
        assert torch.equal(shares, saved)
