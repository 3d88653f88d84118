"""PowerSGD by real ranks over gloo: the paper's algorithm, resumed bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.distributed.ranks import as_group
from torch import Tensor, nn

from steadytrain.distributed.engine import Engine
from steadytrain.distributed.powersgd import num_values, orthogonalize
from steadytrain.distributed.process_group import Group

CPU = torch.device("cpu")
UPDATES, RANK = 6, 2
SHAPES = {"wide": (12, 30), "filter": (8, 5, 3, 3), "bias": (7,)}


class Given(nn.Module):
    """Its gradients are what it is called with; filters are channels-last, as in training."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.zeros(SHAPES["wide"]))
        self.fixed = nn.Parameter(torch.zeros(20, 20), requires_grad=False)
        self.filter = nn.Parameter(torch.zeros(SHAPES["filter"]).to(memory_format=torch.channels_last))
        self.bias = nn.Parameter(torch.zeros(SHAPES["bias"]))

    def forward(self, gradients: dict[str, Tensor]) -> Tensor:
        return torch.stack([(getattr(self, name) * value).sum() for name, value in gradients.items()]).sum()


def _gradients(rank: int, update: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(10 * update + rank)
    return {name: torch.randn(shape, generator=draw) for name, shape in SHAPES.items()}


class Exchanged:
    """A module as one of several ranks."""

    def __init__(self, group: Group, saved: dict[str, Any] | None = None, *, step: int = 0, first: int = 0) -> None:
        self.module = Given()
        self.engine = Engine(CPU, group, compress="powersgd", power_rank=RANK, power_from=first)
        self.engine.load_state_dict(saved or {})
        self.call = self.engine.prepare(self.module, step)
        self.step, self.exposed = step, 0
        self.engine.on_exposed = self._count

    def _count(self) -> None:
        self.exposed += 1

    def means(self) -> dict[str, Tensor]:
        """What this rank's gradients of the next update have become; of two micro-batches, of half of them each."""
        self.module.zero_grad()
        for last in (False, True):
            with self.engine.micro_batch(last=last):
                self.engine.backward(self.call(_gradients(self.engine.world.rank, self.step)) / 2, last=last)
        self.step += 1
        self.engine.finish_update(self.step)
        return {
            name: parameter.grad.clone()
            for name, parameter in self.module.named_parameters()
            if parameter.grad is not None
        }


def _program(group: Group) -> dict[str, Any]:
    whole, part, later = Exchanged(group), Exchanged(group), Exchanged(group, first=3)
    rounds = [whole.means() for _ in range(UPDATES)]
    for _ in range(3):
        part.means()
    saved = part.engine.state_dict()
    again = Exchanged(group, saved, step=3)
    return {
        "rounds": {str(k): means for k, means in enumerate(rounds)},
        "again": {str(k): again.means() for k in range(3, UPDATES)},
        "later": {str(k): later.means() for k in range(UPDATES)},
        "exposed": whole.exposed,
        "saved": saved["powersgd"],
    }


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return as_group(_program, 2)


def _mean(update: int, name: str) -> Tensor:
    return (_gradients(0, update)[name] + _gradients(1, update)[name]) / 2


def test_it_is_the_algorithm_of_the_paper(ranks: list[dict[str, Any]]) -> None:
    """Algorithms 1 and 2 of Vogels et al. 2019, for two workers, in float64 and with a QR decomposition."""
    for number, name in enumerate(("wide", "filter")):
        n, m = SHAPES[name][0], torch.Size(SHAPES[name][1:]).numel()
        draw = torch.Generator().manual_seed(number)
        right = torch.randn(m, RANK, generator=draw).double()
        errors = [torch.zeros(n, m).double(), torch.zeros(n, m).double()]
        for update in range(UPDATES):
            due = [_gradients(rank, update)[name].double().view(n, m) + errors[rank] for rank in (0, 1)]
            left = torch.linalg.qr((due[0] @ right + due[1] @ right) / 2).Q
            rights = [matrix.T @ left for matrix in due]
            right = (rights[0] + rights[1]) / 2
            errors = [matrix - left @ q.T for matrix, q in zip(due, rights, strict=True)]
            got = ranks[0]["rounds"][str(update)][name]
            torch.testing.assert_close(got.reshape(n, m).double(), left @ right.T, rtol=1e-3, atol=1e-4)


def test_ranks_get_the_same_bits_and_vectors_are_exchanged_whole(ranks: list[dict[str, Any]]) -> None:
    for update in map(str, range(UPDATES)):
        first, second = (rank["rounds"][update] for rank in ranks)
        assert all(torch.equal(first[name], second[name]) for name in SHAPES) and "fixed" not in first
        torch.testing.assert_close(first["bias"], _mean(int(update), "bias"))
        assert torch.linalg.matrix_rank(first["wide"]) == RANK
    assert [rank["exposed"] for rank in ranks] == [UPDATES, UPDATES]


def test_nothing_is_lost_of_what_was_sent_late(ranks: list[dict[str, Any]]) -> None:
    sent = sum(ranks[0]["rounds"][str(k)]["wide"] for k in range(3))
    owed = ranks[0]["saved"]["errors"]["wide"].mean(0)
    torch.testing.assert_close(sent + owed, sum(_mean(k, "wide") for k in range(3)), rtol=1e-4, atol=1e-5)


def test_a_resumed_exchange_goes_on_bit_for_bit(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        for update, means in rank["again"].items():
            assert all(torch.equal(means[name], rank["rounds"][update][name]) for name in SHAPES)


def test_gradients_are_exchanged_whole_until_it_begins(ranks: list[dict[str, Any]]) -> None:
    for update in range(UPDATES):
        wide = ranks[1]["later"][str(update)]["wide"]
        is_whole = torch.allclose(wide, _mean(update, "wide"), atol=1e-6)
        assert is_whole == (update < 3)


@given(st.integers(24, 60), st.integers(1, 4), st.integers(0, 2**31))
def test_columns_become_orthonormal(n: int, columns: int, seed: int) -> None:
    matrix = torch.randn(n, columns, generator=torch.Generator().manual_seed(seed))
    basis = orthogonalize(matrix.clone())
    torch.testing.assert_close(basis.T @ basis, torch.eye(columns), rtol=0, atol=0.05)
    assert torch.equal(orthogonalize(torch.zeros(n, columns)), torch.zeros(n, columns))


def test_it_sends_a_small_part_of_a_network() -> None:
    shapes = [[64, 3, 7, 7], [64], [512, 512, 3, 3], [1000, 512]]
    whole = sum(torch.Size(shape).numel() for shape in shapes)
    assert num_values(shapes, 2) < whole / 100
