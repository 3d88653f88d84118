"""Compressed exchange in torch's DistributedDataParallel, by real processes over gloo."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.distributed.ranks import as_group
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from steadytrain.distributed import engine
from steadytrain.distributed.compression import CompressionName, TwoBit, pack, split_residual
from steadytrain.distributed.engine import Engine
from steadytrain.distributed.process_group import Group
from steadytrain.errors import InputError

ROUNDS = 6


class Given(nn.Module):
    """Its gradients are what it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.key3 = nn.Parameter(torch.zeros(37))
        self.fixed = nn.Parameter(torch.zeros(3), requires_grad=False)
        # As in training with channels_last: in memory the values have another order than in the shape.
        self.key5 = nn.Parameter(torch.zeros(4, 3, 3, 3).to(memory_format=torch.channels_last))

    def forward(self, key3: Tensor, key5: Tensor) -> Tensor:
        return (self.key3 * key3).sum() + (self.key5 * key5).sum()


class Exchanged:
    """A module as one of several ranks, in buckets of ``bucket_bytes``; ``saved``: what was left earlier."""

    def __init__(
        self, group: Group, name: CompressionName, *, bucket_bytes: int = 100, saved: dict[str, Tensor] | None = None
    ) -> None:
        self.module = Given()
        self.engine = Engine(torch.device("cpu"), group, compress=name)
        self.engine.load_state_dict(saved or {})
        with pytest.MonkeyPatch.context() as patch:
            small = partial(DistributedDataParallel, bucket_cap_mb=bucket_bytes / 2**20)
            patch.setattr(engine, "DistributedDataParallel", small)
            self.parallel = self.engine.prepare(self.module)

    def means(self, key3: Tensor, key5: Tensor) -> tuple[Tensor, Tensor]:
        """What this rank's gradients have become."""
        self.module.zero_grad()
        self.engine.backward(self.parallel(key3, key5), last=True)
        assert self.module.key3.grad is not None and self.module.key5.grad is not None
        return self.module.key3.grad.clone(), self.module.key5.grad.clone()


def _rounds(key3: Tensor, key5: Tensor, group: Group) -> dict[str, Any]:
    """Six rounds; the same, saved and taken up by another object after three; and what is left at the end."""
    whole, first = Exchanged(group, "2bit"), Exchanged(group, "2bit", bucket_bytes=10**9)
    document: dict[str, Any] = {"whole3": [], "whole5": [], "resumed3": []}
    for number in range(ROUNDS):
        gradients = key3[number, group.world.rank], key5[number, group.world.rank]
        three, five = whole.means(*gradients)
        document["whole3"].append(three)
        document["whole5"].append(five)
        if number == ROUNDS // 2:
            first = Exchanged(group, "2bit", saved=first.engine.state_dict())
        document["resumed3"].append(first.means(*gradients)[0])
    return document | {"saved": whole.engine.state_dict()}


@pytest.fixture(scope="module")
def golden(data_folder: Path) -> dict[str, Tensor]:
    path = data_folder / "mxnet-golden" / "gradient-compression.npz"
    if not path.exists():
        pytest.skip(f"{path} is missing")
    with np.load(path, allow_pickle=False) as arrays:
        return {name: torch.from_numpy(array) for name, array in arrays.items()}


@pytest.fixture(scope="module")
def two_ranks(golden: dict[str, Tensor]) -> list[dict[str, Any]]:
    return as_group(partial(_rounds, golden["gradient/key3"], golden["gradient/key5"]), 2)


def test_updates_are_half_of_what_mxnets_two_workers_pull(
    golden: dict[str, Tensor], two_ranks: list[dict[str, Any]]
) -> None:
    for rank in two_ranks:
        for key in (3, 5):
            assert torch.equal(2 * torch.stack(rank[f"whole{key}"]), golden[f"dist_sync/0.5/w2/key{key}/pulled"])


def test_what_is_left_follows_its_parameter_when_buckets_change(
    golden: dict[str, Tensor], two_ranks: list[dict[str, Any]]
) -> None:
    for of_rank in two_ranks:
        assert list(of_rank["saved"]) == ["key3", "key5"]  # what is not trained has none
        for name, saved in of_rank["saved"].items():
            for rank, kept in enumerate(saved):
                left = torch.zeros(kept.numel())
                for gradient in golden[f"gradient/{name}"][:, rank]:
                    left = pack(gradient.flatten(), left, 0.5).residual
                assert torch.equal(kept, left.view(kept.shape))


def test_a_resumed_exchange_goes_on_bit_for_bit(two_ranks: list[dict[str, Any]]) -> None:
    for rank in two_ranks:
        assert torch.equal(torch.stack(rank["resumed3"]), torch.stack(rank["whole3"]))


def _odd_and_halves(group: Group) -> dict[str, Any]:
    """Gradients that are no numbers on rank 1; then small ones as fp16 and bf16."""
    rank = group.world.rank
    odd = Exchanged(group, "2bit")
    key3, key5 = torch.full((37,), 0.6), torch.full((4, 3, 3, 3), 0.6)
    bad = key3.clone()
    bad[0], bad[1] = (float("nan"), float("inf")) if rank == 1 else (0.6, 0.6)
    document: dict[str, Any] = {"bad": odd.means(bad, key5)[0], "next": odd.means(key3, key5)[0]}
    halves: tuple[CompressionName, ...] = "fp16", "bf16"
    for name in halves:
        draw = torch.Generator().manual_seed(rank)
        exchanged = Exchanged(group, name)
        tensors = torch.randn(37, generator=draw), torch.randn(4, 3, 3, 3, generator=draw)
        document[name] = torch.cat([mean.flatten() for mean in exchanged.means(*tensors)])
        document[f"{name} left"] = exchanged.engine.state_dict()
    return document


def test_three_ranks_get_the_same_bits_and_hear_of_what_is_no_number() -> None:
    answers = as_group(_odd_and_halves, 3)
    for answer in answers:
        assert answer["bad"][:2].isnan().all() and answer["bad"][2:].isfinite().all()
        assert answer["next"].isfinite().all()  # the run may skip that update and go on
        assert answer["fp16 left"] == {}
    draws = [torch.Generator().manual_seed(rank) for rank in range(3)]
    mean = torch.stack([torch.cat([torch.randn(37, generator=g), torch.randn(108, generator=g)]) for g in draws]).mean(
        0
    )
    for name, tolerance in (("fp16", 2e-3), ("bf16", 2e-2)):
        torch.testing.assert_close(answers[0][name], mean, rtol=tolerance, atol=tolerance)
        assert all(torch.equal(rank[name], answers[0][name]) for rank in answers)


def _both_learned(images: Tensor, labels: Tensor, group: Group) -> dict[str, Any]:
    return {
        "none": _learned(Engine(torch.device("cpu"), group), images, labels),
        "2bit": _learned(Engine(torch.device("cpu"), group, compress="2bit", threshold=0.005), images, labels),
    }


def _learned(engine: Engine, images: Tensor, labels: Tensor) -> dict[str, Any]:
    """Softmax regression, 60 updates of 2 x 64 images; the share of right answers on the rest."""
    torch.manual_seed(0)
    module = nn.Linear(64, 10)
    parallel = engine.prepare(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    for step in range(60):
        begin = (2 * step + engine.world.rank) * 64 % 1280
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(parallel(images[begin : begin + 64]), labels[begin : begin + 64])
        engine.backward(loss, last=True)
        optimizer.step()
    right = module(images[1280:]).argmax(1) == labels[1280:]
    return {"top1": float(right.float().mean()), "weight": module.weight.detach()}


def test_handwritten_digits_are_learned_with_a_sixteenth_of_the_bytes() -> None:
    from sklearn.datasets import load_digits  # here, so that the ranks need not import it

    digits = load_digits()
    images, labels = torch.from_numpy(digits.data).float() / 16, torch.from_numpy(digits.target)
    first, second = as_group(partial(_both_learned, images, labels), 2)
    for name in ("none", "2bit"):
        assert torch.equal(first[name]["weight"], second[name]["weight"])
    assert first["none"]["top1"] > 0.85 and first["2bit"]["top1"] > first["none"]["top1"] - 0.03


@given(st.integers(1, 9), st.integers(1, 9))
def test_the_model_is_owed_as_much_with_any_number_of_ranks(before: int, now: int) -> None:
    saved = torch.arange(1.0, before + 1).unsqueeze(1).expand(before, 2)
    shares = torch.stack([split_residual(saved, rank=rank, size=now) for rank in range(now)])
    torch.testing.assert_close(shares.mean(0), saved.mean(0))
    if before == now:
        assert torch.equal(shares, saved)


@pytest.mark.parametrize("threshold", [0.0, -1.0, float("nan"), float("inf")])
def test_a_threshold_that_is_no_step_is_refused(threshold: float) -> None:
    with pytest.raises(InputError, match=r"the threshold of 2bit is .*; it must be above 0"):
        TwoBit(Given(), threshold=threshold)
