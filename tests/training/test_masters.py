"""16-bit parameters and their fp32 masters: small updates are kept, rounding is torch's, and all of it comes back."""

from __future__ import annotations

import copy
import math
from unittest import mock

import pytest
import torch
from tests.optim.test_conformance import NAMES
from torch import nn
from torch.nn import functional

from steadytrain import optim
from steadytrain.config import Optim, Precision
from steadytrain.training import precision
from steadytrain.training.ema import Ema
from steadytrain.training.precision import Policy

CPU = torch.device("cpu")
DTYPES = {"pure-bf16": torch.bfloat16, "pure-fp16": torch.float16}


def policy_anywhere(numbers: str) -> Policy:
    """A policy, also where this CPU has no instructions for its numbers and a run would be refused."""
    with mock.patch.object(precision, "_remark", return_value=None):
        return Policy(Precision(numbers), CPU)  # type: ignore[arg-type]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4))


def made(numbers: str = "pure-bf16", **more: object) -> tuple[Policy, nn.Sequential, torch.optim.Optimizer]:
    """A policy, a prepared network, and an optimizer of its masters."""
    policy = policy_anywhere(numbers)
    module = policy.prepare(net())
    assert isinstance(module, nn.Sequential)
    spec = Optim(**{"lr": 0.1, "weight_decay": 0.0, **more})  # type: ignore[arg-type]
    groups = [{"params": [policy.master(parameter) for parameter in module.parameters()]}]
    return policy, module, optim.build(spec, groups, lr=spec.lr, device=CPU, allow_import=True)


def update(policy: Policy, module: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (6, 8, 8, 3), dtype=torch.uint8, generator=draw)
    labels = torch.randint(0, 4, (6,), generator=draw)
    with policy.autocast():
        logits = module(policy.images(images, None, None))
    policy.scale(functional.cross_entropy(logits.float(), labels)).backward()  # type: ignore[no-untyped-call]
    policy.step(optimizer)


@pytest.mark.parametrize("name", DTYPES)
def test_all_but_batch_norms_is_stored_in_16_bits(name: str) -> None:
    _, module, _ = made(name)
    assert {key: value.dtype for key, value in module.state_dict().items()} == {
        "0.weight": DTYPES[name],
        "1.weight": torch.float32,
        "1.bias": torch.float32,
        "1.running_mean": torch.float32,
        "1.running_var": torch.float32,
        "1.num_batches_tracked": torch.int64,
        "4.weight": DTYPES[name],
        "4.bias": DTYPES[name],
    }
    assert module.get_parameter("0.weight").is_contiguous(memory_format=torch.channels_last)


def test_updates_too_small_for_16_bits_add_up() -> None:
    policy = Policy(Precision("pure-bf16"), CPU)
    layer = nn.Linear(1, 1, bias=False)
    policy.prepare(layer)
    weight = layer.get_parameter("weight")
    with torch.no_grad():
        weight.fill_(1.0)
    groups = [{"params": [policy.master(weight)]}]
    optimizer = optim.build(Optim(momentum=0.0, weight_decay=0.0), groups, lr=2.0**-10, device=CPU)
    seen = []
    for _ in range(8):
        weight.grad = torch.ones_like(weight)
        policy.step(optimizer)
        seen.append(float(weight.detach()))
    # bf16 has steps of 2**-8 below 1: alone, each update of 2**-10 would be rounded away
    assert seen == [1.0, 1.0, 1.0 - 2**-8, 1.0 - 2**-8, 1.0 - 2**-8, 1.0 - 2**-7, 1.0 - 2**-7, 1.0 - 2**-7]


@pytest.mark.parametrize("clip", [None, 0.01])
@pytest.mark.parametrize("kind", NAMES)
def test_masters_are_updated_as_fp32_parameters_are_by_the_same_gradients(kind: str, clip: float | None) -> None:
    policy, module, optimizer = made(name=kind)
    plain = copy.deepcopy(module).float()
    with torch.no_grad():
        for parameter, theirs in zip(plain.parameters(), module.parameters(), strict=True):
            parameter.copy_(policy.master(theirs))
    spec = Optim(kind, lr=0.1, weight_decay=0.0)
    expected = optim.build(spec, [{"params": list(plain.parameters())}], lr=0.1, device=CPU, allow_import=True)
    draw = torch.Generator().manual_seed(1)
    for _ in range(3):
        for parameter, theirs in zip(plain.parameters(), module.parameters(), strict=True):
            theirs.grad = torch.randn(theirs.shape, generator=draw).to(theirs.dtype)
            parameter.grad = torch.empty_like(parameter).copy_(theirs.grad)
        if clip is not None:
            policy.unscale(optimizer)
            masters = [policy.master(parameter) for parameter in module.parameters()]
            assert nn.utils.clip_grad_norm_(masters, clip) == nn.utils.clip_grad_norm_(plain.parameters(), clip)
        policy.step(optimizer)
        expected.step()
        expected.zero_grad()
        for parameter, theirs in zip(plain.parameters(), module.parameters(), strict=True):
            assert torch.equal(policy.master(theirs), parameter)
            assert torch.equal(theirs, parameter.to(theirs.dtype)) and theirs.grad is None


def test_an_overflow_of_fp16_leaves_parameters_and_masters() -> None:
    policy, module, optimizer = made("pure-fp16")
    before = copy.deepcopy(module.state_dict())
    policy.scale(torch.zeros(()))
    for parameter in module.parameters():
        parameter.grad = torch.full_like(parameter, math.inf)
    policy.step(optimizer)
    after = module.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert policy.state_dict()["scale"] == 32768


@pytest.mark.parametrize("name", DTYPES)
def test_what_was_saved_goes_on_bit_for_bit(name: str) -> None:
    if name == "pure-fp16" and not torch.ops.mkldnn._is_mkldnn_fp16_supported():
        pytest.skip("this CPU has no instructions for fp16")
    policy, module, optimizer = made(name)
    for seed in range(3):
        update(policy, module, optimizer, seed)
    saved = copy.deepcopy((module.state_dict(), optimizer.state_dict(), policy.state_dict()))
    update(policy, module, optimizer, 3)
    resumed, again, theirs = made(name)
    again.load_state_dict(saved[0])
    theirs.load_state_dict(saved[1])
    resumed.load_state_dict(saved[2])
    update(resumed, again, theirs, 3)
    assert all(torch.equal(again.state_dict()[key], value) for key, value in module.state_dict().items())
    masters = policy.state_dict()["masters"], resumed.state_dict()["masters"]
    assert masters[0].keys() == masters[1].keys() == {"0", "1", "2"}
    assert all(torch.equal(masters[0][key], masters[1][key]) for key in masters[0])


def test_an_average_follows_the_masters_in_fp32() -> None:
    policy, module, optimizer = made()
    masters = [policy.master(parameter) for parameter in module.parameters()]
    average = Ema(module, 0.9, masters)
    assert {parameter.dtype for parameter in average.module.parameters()} == {torch.float32}
    expected = [master.detach().clone() for master in masters]
    for seed in range(3):
        update(policy, module, optimizer, seed)
        average.update(module)
        keep = min(0.9, (seed + 1) / (seed + 10))
        expected = [
            torch.lerp(before, master.detach(), 1 - keep) for before, master in zip(expected, masters, strict=True)
        ]
    for parameter, mean in zip(average.module.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter, mean, rtol=1e-6, atol=0)
    with policy.autocast():
        assert average.module(torch.rand(2, 3, 8, 8)).dtype is torch.bfloat16
