"""Compressed exchange in torch's DistributedDataParallel, by real processes over gloo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from sklearn.datasets import load_digits
from tests.distributed.ranks import as_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from steadytrain.distributed.compression import CompressionName, make_compression, pack, split_residual
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
    """A module as one of several ranks, in buckets of ``bucket_bytes``."""

    def __init__(self, name: CompressionName, *, threshold: float = 0.5, bucket_bytes: int = 100) -> None:
        self.module = Given()
        self.parallel = DistributedDataParallel(
            self.module, bucket_cap_mb=bucket_bytes / 2**20, gradient_as_bucket_view=True
        )
        made = make_compression(name, self.module, threshold=threshold)
        assert made is not None
        self.compression = made
        made.register(self.parallel)

    def means(self, key3: Tensor, key5: Tensor) -> tuple[Tensor, Tensor]:
        """What this rank's gradients have become."""
        self.module.zero_grad()
        self.parallel(key3, key5).backward()
        assert self.module.key3.grad is not None and self.module.key5.grad is not None
        return self.module.key3.grad.clone(), self.module.key5.grad.clone()

    def saved(self) -> dict[str, Tensor]:
        """What is left on all ranks, as a checkpoint has it."""
        told = {}
        for name, one in self.compression.residuals().items():
            parts = [torch.empty_like(one) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, one)
            told[name] = torch.stack(parts)
        return told


def _rounds(rank: int, key3: Tensor, key5: Tensor) -> dict[str, Any]:
    """Six rounds; the same, saved and taken up by another object after three; and what is left at the end."""
    whole, first = Exchanged("2bit"), Exchanged("2bit", bucket_bytes=10**9)
    told: dict[str, Any] = {"whole3": [], "whole5": [], "resumed3": []}
    for number in range(ROUNDS):
        own = key3[number, rank], key5[number, rank]
        three, five = whole.means(*own)
        told["whole3"].append(three)
        told["whole5"].append(five)
        if number == ROUNDS // 2:
            saved = first.saved()
            first = Exchanged("2bit")
            first.compression.take(saved, rank=rank, size=2)
        told["resumed3"].append(first.means(*own)[0])
    return told | {"left": whole.compression.residuals(), "saved": whole.saved()}


@pytest.fixture(scope="module")
def golden(data_folder: Path) -> dict[str, Tensor]:
    path = data_folder / "mxnet-golden" / "gradient-compression.npz"
    if not path.exists():
        pytest.skip(f"{path} is missing")
    with np.load(path, allow_pickle=False) as arrays:
        return {name: torch.from_numpy(array) for name, array in arrays.items()}


@pytest.fixture(scope="module")
def two_ranks(golden: dict[str, Tensor], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    gradients = golden["gradient/key3"], golden["gradient/key5"]
    return as_ranks(_rounds, 2, tmp_path_factory.mktemp("ranks"), *gradients)


def test_updates_are_half_of_what_mxnets_two_workers_pull(
    golden: dict[str, Tensor], two_ranks: list[dict[str, Any]]
) -> None:
    for told in two_ranks:
        for key in (3, 5):
            assert torch.equal(2 * torch.stack(told[f"whole{key}"]), golden[f"dist_sync/0.5/w2/key{key}/pulled"])


def test_what_is_left_follows_its_parameter_when_buckets_change(
    golden: dict[str, Tensor], two_ranks: list[dict[str, Any]]
) -> None:
    for rank, told in enumerate(two_ranks):
        assert list(told["left"]) == ["key3", "key5"]  # what is not trained has none
        for name in ("key3", "key5"):
            left = torch.zeros(golden[f"gradient/{name}"][0, 0].numel())
            for gradient in golden[f"gradient/{name}"][:, rank]:
                left = pack(gradient.flatten(), left, 0.5).residual
            assert torch.equal(told["left"][name], left.view(told["left"][name].shape))
            assert torch.equal(told["saved"][name][rank], told["left"][name])


def test_a_resumed_exchange_goes_on_bit_for_bit(two_ranks: list[dict[str, Any]]) -> None:
    for told in two_ranks:
        assert torch.equal(torch.stack(told["resumed3"]), torch.stack(told["whole3"]))


def _odd_and_halves(rank: int) -> dict[str, Any]:
    """Gradients that are no numbers on rank 1; then small ones as fp16 and bf16."""
    odd = Exchanged("2bit")
    key3, key5 = torch.full((37,), 0.6), torch.full((4, 3, 3, 3), 0.6)
    bad = key3.clone()
    bad[0], bad[1] = (float("nan"), float("inf")) if rank == 1 else (0.6, 0.6)
    told: dict[str, Any] = {"bad": odd.means(bad, key5)[0], "next": odd.means(key3, key5)[0]}
    for name in ("fp16", "bf16"):
        draw = torch.Generator().manual_seed(rank)
        exchanged = Exchanged(name)
        own = torch.randn(37, generator=draw), torch.randn(4, 3, 3, 3, generator=draw)
        told[name] = torch.cat([one.flatten() for one in exchanged.means(*own)])
        told[f"{name} left"] = exchanged.compression.residuals()
    return told


def test_three_ranks_get_the_same_bits_and_hear_of_what_is_no_number(tmp_path: Path) -> None:
    told = as_ranks(_odd_and_halves, 3, tmp_path)
    for one in told:
        assert one["bad"][:2].isnan().all() and one["bad"][2:].isfinite().all()
        assert one["next"].isfinite().all()  # the run may skip that update and go on
        assert one["fp16 left"] == {}
    draws = [torch.Generator().manual_seed(rank) for rank in range(3)]
    mean = torch.stack([torch.cat([torch.randn(37, generator=g), torch.randn(108, generator=g)]) for g in draws]).mean(
        0
    )
    for name, tolerance in (("fp16", 2e-3), ("bf16", 2e-2)):
        torch.testing.assert_close(told[0][name], mean, rtol=tolerance, atol=tolerance)
        assert all(torch.equal(one[name], told[0][name]) for one in told)


def _both_learned(rank: int, images: Tensor, labels: Tensor) -> dict[str, Any]:
    return {name: _learned(rank, name, images, labels) for name in ("none", "2bit")}


def _learned(rank: int, name: CompressionName, images: Tensor, labels: Tensor) -> dict[str, Any]:
    """Softmax regression, 60 updates of 2 x 64 images; the share of right answers on the rest."""
    torch.manual_seed(0)
    module = nn.Linear(64, 10)
    parallel = DistributedDataParallel(module)
    compression = make_compression(name, module, threshold=0.005)
    if compression is not None:
        compression.register(parallel)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    for step in range(60):
        begin = (2 * step + rank) * 64 % 1280
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(parallel(images[begin : begin + 64]), labels[begin : begin + 64])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    right = module(images[1280:]).argmax(1) == labels[1280:]
    return {"top1": float(right.float().mean()), "weight": module.weight.detach()}


def test_handwritten_digits_are_learned_with_a_sixteenth_of_the_bytes(tmp_path: Path) -> None:
    digits = load_digits()
    images, labels = torch.from_numpy(digits.data).float() / 16, torch.from_numpy(digits.target)
    first, second = as_ranks(_both_learned, 2, tmp_path, images, labels)
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


def test_the_plain_exchange_is_left_to_torch() -> None:
    assert make_compression("none", Given()) is None


@pytest.mark.parametrize("threshold", [0.0, -1.0, float("nan"), float("inf")])
def test_a_threshold_that_is_no_step_is_refused(threshold: float) -> None:
    with pytest.raises(InputError, match=r"the threshold of 2bit is .*; it must be above 0"):
        make_compression("2bit", Given(), threshold=threshold)
