"""Averages of weights by real ranks over gloo: local SGD, post-local SGD and DiLoCo."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.distributed.ranks import as_group
from torch import Tensor, nn

from steadytrain.config import Precision
from steadytrain.distributed.engine import Engine
from steadytrain.distributed.local import LocalEngine, Outer
from steadytrain.distributed.process_group import Group
from steadytrain.training.ema import Ema
from steadytrain.training.precision import Policy
from steadytrain.training.state import Cursor, Meters, State

CPU = torch.device("cpu")
Tensors = dict[str, Tensor]
UPDATES = 8
BREAKS: dict[str, tuple[int, Outer | None]] = {"local": (0, None), "diloco": (0, Outer()), "before local": (8, None)}
"""Runs that are saved after six updates: where they become local, and the outer step."""


def _net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def _images(rank: int, update: int) -> Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(100 * update + rank))


class Training:
    """A net as one of several ranks, trained by an engine of this kind."""

    def __init__(self, engine: Engine, saved: dict[str, Any] | None = None) -> None:
        net = _net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        policy = Policy(Precision(name="fp32"), CPU)
        self.state = State(net, optimizer, policy, engine, Ema(net, 0.5), Meters(CPU), Cursor())
        if saved is not None:
            self.state.load_state_dict(saved)
        self.call = engine.prepare(net, self.state.cursor.step)
        self.exchanges = 0
        engine.on_exposed = self._count

    def _count(self) -> None:
        self.exchanges += 1

    def run(self, updates: int) -> Training:
        state = self.state
        for _ in range(updates):
            step = state.cursor.step
            state.engine.backward(self.call(_images(state.engine.world.rank, step)).square().mean(), last=True)
            state.optimizer.step()
            state.optimizer.zero_grad()
            state.engine.finish_update(step + 1)
            assert state.ema is not None
            state.ema.update(state.module)
            state.cursor.step += 1
        return self

    @property
    def weights(self) -> Tensors:
        return {name: value.clone() for name, value in self.state.module.state_dict().items()}

    @property
    def settled(self) -> Tensors:
        with self.state.engine.settled(self.state.module):
            return self.weights


def _methods(group: Group) -> dict[str, Tensors]:
    """Eight updates by each method; ``mean``: of the weights that evaluation sees between two averages."""

    def local(every: int, first: int = 0, outer: Outer | None = None) -> Training:
        return Training(LocalEngine(CPU, group, every=every, first=first, outer=outer))

    between = local(5).run(7)
    parts = {
        "ddp": Training(Engine(CPU, group)).run(UPDATES).weights,
        "every 1": local(1).run(UPDATES).weights,
        "every 4": local(4).run(UPDATES).weights,
        "mean kept": local(10**6, outer=Outer(1.0, 0.0)).run(4).weights,
        "unchanged": between.weights,
        "settled": between.settled,
        "unchanged after": between.weights,
        "first 8": local(4, first=UPDATES).run(UPDATES).weights,
        "first 4": local(2, first=4).run(UPDATES).weights,
        "diloco": local(2, outer=Outer()).run(UPDATES).weights,
    }
    counted = {"4": local(4).run(UPDATES).exchanges, "4 from 4": local(4, first=4).run(UPDATES).exchanges}
    return parts | {"exchanges": {name: torch.tensor(n) for name, n in counted.items()}}


def _resumed(group: Group) -> dict[str, dict[str, Tensors]]:
    return {name: _break(group, first=first, outer=outer) for name, (first, outer) in BREAKS.items()}


def _break(group: Group, *, first: int, outer: Outer | None) -> dict[str, Tensors]:
    """A run without a break, and one that was saved after six updates and resumed."""

    def make(saved: dict[str, Any] | None = None) -> Training:
        return Training(LocalEngine(CPU, group, every=4, first=first, outer=outer), saved)

    whole, first_part = make().run(11), make().run(6)
    saved = first_part.state.state_dict()
    again = make(saved)
    same = again.weights
    means = {name: value for name, value in saved["model"].items() if value.is_floating_point()}
    assert again.state.ema is not None and whole.state.ema is not None
    again.run(5)
    return {
        "whole": whole.weights | {f"ema {name}": value for name, value in whole.state.ema.module.state_dict().items()},
        "again": again.weights | {f"ema {name}": value for name, value in again.state.ema.module.state_dict().items()},
        "before": first_part.weights,
        "loaded": same,
        "mean": means,
        "other engine": Training(Engine(CPU, group), saved).weights,
    }


@pytest.fixture(scope="module")
def methods() -> list[dict[str, Tensors]]:
    return as_group(_methods, 2)


def _parameters(values: Tensors) -> Tensors:
    return {name: values[name] for name, _ in _net().named_parameters()}


def _equal(first: Tensors, second: Tensors) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def _near(first: Tensors, second: Tensors) -> None:
    for name, value in first.items():
        torch.testing.assert_close(value, second[name], rtol=1e-4, atol=1e-6, msg=name)


def test_averaging_after_each_update_of_sgd_is_exchanging_gradients(methods: list[dict[str, Tensors]]) -> None:
    _near(_parameters(methods[0]["every 1"]), _parameters(methods[0]["ddp"]))


@pytest.mark.parametrize("method", ["every 1", "every 4", "first 4", "diloco"])
def test_ranks_are_equal_after_an_average_running_statistics_too(
    method: str, methods: list[dict[str, Tensors]]
) -> None:
    assert _equal(methods[0][method], methods[1][method])
    assert not _equal(_parameters(methods[0][method]), _parameters(methods[0]["ddp"])) or method == "every 1"


def test_between_two_averages_the_mean_is_evaluated_and_nothing_changes(methods: list[dict[str, Tensors]]) -> None:
    first, second = methods
    assert not _equal(first["unchanged"], second["unchanged"])
    assert _equal(first["settled"], second["settled"])
    for name in ("0.weight", "1.running_mean"):
        torch.testing.assert_close(first["settled"][name], (first["unchanged"][name] + second["unchanged"][name]) / 2)
    for rank in methods:
        assert _equal(rank["unchanged"], rank["unchanged after"])


def test_post_local_sgd_exchanges_gradients_up_to_its_beginning(methods: list[dict[str, Tensors]]) -> None:
    assert _equal(_parameters(methods[0]["first 8"]), _parameters(methods[0]["ddp"]))
    assert not _equal(_parameters(methods[0]["first 4"]), _parameters(methods[0]["ddp"]))


def test_an_exchange_is_told_once_in_so_many_updates(methods: list[dict[str, Tensors]]) -> None:
    for rank in methods:
        assert {name: int(n) for name, n in rank["exchanges"].items()} == {"4": 2, "4 from 4": 4 + 1}


def test_diloco_is_torchs_nesterov_on_the_mean_of_two_trainings(methods: list[dict[str, Tensors]]) -> None:
    """The same by one process: two nets, each with its optimizer, and torch.optim.SGD outside."""
    nets = [_net(), _net()]
    inner = [torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9) for net in nets]
    centre = _net()
    outer = torch.optim.SGD(centre.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    for update in range(UPDATES):
        for rank, (net, optimizer) in enumerate(zip(nets, inner, strict=True)):
            net(_images(rank, update)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if update % 2:
            for middle, *both in zip(centre.parameters(), *(net.parameters() for net in nets), strict=True):
                middle.grad = middle.detach() - (both[0].detach() + both[1].detach()) / 2
            outer.step()
            for net in nets:
                for middle, parameter in zip(centre.parameters(), net.parameters(), strict=True):
                    parameter.data.copy_(middle.data)
    _near(dict(centre.named_parameters()), methods[0]["diloco"])


def test_a_run_saved_between_two_averages_goes_on_bit_for_bit() -> None:
    ranks = as_group(_resumed, 2)
    for name in BREAKS:
        first, second = (rank[name] for rank in ranks)
        for rank in (first, second):
            assert _equal(rank["whole"], rank["again"]) and _equal(rank["before"], rank["loaded"]), name
        assert not _equal(first["before"], second["before"])  # running statistics, before local begins
        for key, mean in first["mean"].items():
            torch.testing.assert_close(mean, (first["before"][key] + second["before"][key]) / 2)
            assert torch.equal(second["other engine"][key], mean), "what another engine, or more ranks, begin with"
