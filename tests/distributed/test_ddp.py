"""Ranks that make one update together, as real processes over gloo."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tests.distributed.ranks import as_group
from torch import nn

from steadytrain.distributed.ddp import DDPEngine
from steadytrain.distributed.process_group import Group

CPU = torch.device("cpu")


def _net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def _images(parts: int) -> torch.Tensor:
    return torch.randn(parts, 5, 6, generator=torch.Generator().manual_seed(7))


def _updates(group: Group, own: list[int], parts: int) -> dict[str, torch.Tensor]:
    """Three updates of a net, of whose micro-batches this rank makes some."""
    net = _net()
    engine = DDPEngine(group, CPU)
    exposed: list[int] = []
    engine.on_exposed = lambda: exposed.append(1)
    call = engine.prepare(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        for k in own:
            last = k == own[-1]
            with engine.micro_batch(last=last):
                engine.backward(call(_images(parts)[k]).square().mean() * group.world.size / parts, last=last)
        engine.step(optimizer.step)
        optimizer.zero_grad()
    engine.broadcast_buffers(net)
    return {**net.state_dict(), "exposed": torch.tensor(len(exposed))}


def _two(group: Group) -> dict[str, torch.Tensor]:
    return _updates(group, [group.world.rank], 2)


def _uneven(group: Group) -> dict[str, torch.Tensor]:
    return _updates(group, [0] if group.world.is_first else [1, 2], 3)


@pytest.fixture(autouse=True)
def _as_many_threads() -> Iterator[None]:
    """As the ranks have: how a product is split among threads is in its last bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _alone(parts: int) -> dict[str, torch.Tensor]:
    net = _net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        for k in range(parts):
            (net(_images(parts)[k]).square().mean() / parts).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(net.state_dict())


def _parameters(told: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: told[name] for name, _ in _net().named_parameters()}


@pytest.fixture(scope="module")
def two() -> list[dict[str, torch.Tensor]]:
    """Three updates by two ranks."""
    return as_group(_two, 2)


@pytest.fixture(scope="module")
def uneven() -> list[dict[str, torch.Tensor]]:
    """The same where one of them has twice as many micro-batches."""
    return as_group(_uneven, 2)


def test_two_ranks_equal_one_process_that_accumulates_to_the_last_bit(two: list[dict[str, torch.Tensor]]) -> None:
    first, second = two
    alone = _alone(2)
    for name, one in _parameters(first).items():
        assert torch.equal(one, alone[name]) and torch.equal(one, second[name]), name


def test_ranks_with_unequal_numbers_of_micro_batches_make_the_same_update(
    uneven: list[dict[str, torch.Tensor]],
) -> None:
    first, second = uneven
    alone = _alone(3)
    for name, one in _parameters(first).items():
        assert torch.equal(one, second[name]), name
        torch.testing.assert_close(one, alone[name], rtol=1e-5, atol=1e-6)


def test_the_first_ranks_running_statistics_count(two: list[dict[str, torch.Tensor]]) -> None:
    first, second = two
    assert torch.equal(first["1.running_mean"], second["1.running_mean"])
    net = _net()
    net(_images(2)[0])
    assert not torch.equal(first["1.running_mean"], torch.zeros(8))


def test_it_is_told_when_the_gradients_are_computed_once_in_an_update(uneven: list[dict[str, torch.Tensor]]) -> None:
    assert [int(told["exposed"]) for told in uneven] == [3, 3]
