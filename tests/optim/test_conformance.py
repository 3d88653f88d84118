"""One suite for every optimizer: what a user may count on, whichever name is chosen.

Golden values are in :mod:`.test_mxnet`; whole runs, stopped or of two ranks, in ``training/test_methods.py``; 16-bit
parameters in ``training/test_masters.py``; ``--compile`` in ``training/test_compile.py``.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from tests.distributed.ranks import as_group
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from steadytrain import models, optim
from steadytrain.config import Model, Optim
from steadytrain.distributed.engine import Engine
from steadytrain.distributed.process_group import Group

CPU = torch.device("cpu")


def own(groups: Any, *, lr: float) -> Optimizer:
    return torch.optim.SGD(groups, lr=lr, momentum=0.9)


BUILT_IN = sorted(optim.kinds())
DECAY = {name: kind.decay for name, kind in optim.kinds().items()} | {
    "ftrl": "its own",  # the L2 term of the leader: golden values
    "timm/adabelief": "decoupled",
    "timm/adan": "its own",  # proximal: w / (1 + lr * wd)
    "timm/adanw": "decoupled",
    "timm/adopt": "coupled",
    "timm/lamb": "its own",  # inside the trust ratio: golden values
    "timm/lars": "its own",
    "timm/lion": "decoupled",
    "timm/madgrad": "coupled",
    "timm/nadamw": "decoupled",
    "timm/rmsproptf": "coupled",
    "timm/sgdw": "decoupled",
    f"{__name__}:own": "coupled",
}
"""How weight decay works, as ``docs/optimizers.md`` says."""
NAMES = list(DECAY)
RATES = {"adagrad": 1.0, "ftrl": 2.0, "adadelta": 5.0, "timm/lars": 5.0, "timm/lion": 0.02}
"""Learning rates for small problems, where 0.05 would be too slow or too fast."""
OPTIONS: dict[str, dict[str, Any]] = {
    "dcasgd": {"momentum": 0.9, "lamda": 0.0},  # decay is no part of the compensation
    "timm/lars": {"trust_coeff": 0.1},
    "lbsgd": {"momentum": 0.9, "batch_scale": 2, "warmup_epochs": 1, "updates_per_epoch": 4},
}
"""Options with which weight decay is not the same thing coupled and decoupled; and LARS learns biases as fast."""


def make(name: str, groups: list[dict[str, Any]], lr: float = 2.0**-6) -> Optimizer:
    spec = Optim(name, lr=lr, options=OPTIONS.get(name, {}))
    return optim.build(spec, groups, lr=lr, device=CPU, allow_import=True)


def tensors() -> list[nn.Parameter]:
    """Filters in the memory format of images, and biases."""
    torch.manual_seed(0)
    weights = nn.Parameter(torch.randn(8, 4, 3, 3).contiguous(memory_format=torch.channels_last))
    return [weights, nn.Parameter(torch.randn(8))]


def grouped(parameters: Sequence[nn.Parameter], decay: float = 0.0, scale: float = 1.0) -> list[dict[str, Any]]:
    return [{"params": [p], "weight_decay": decay if p.ndim > 1 else 0.0, "lr_scale": scale} for p in parameters]


def train(
    parameters: Sequence[nn.Parameter], optimizer: Optimizer, updates: Iterable[int], *, added: float = 0.0
) -> list[Tensor]:
    """Make updates by gradients that depend on the weights, plus ``added`` times the first; return all weights."""
    for k in updates:
        for parameter in parameters:
            parameter.grad = torch.sin(3 * parameter.detach() + k) + 0.1
        weight = parameters[0]
        assert weight.grad is not None
        weight.grad += added * weight.detach()
        optimizer.step()
    return [parameter.detach().clone() for parameter in parameters]


@pytest.mark.parametrize("name", [name for name in NAMES if name != "sgld"])  # which samples, and does not settle
def test_a_regression_is_solved(name: str) -> None:
    torch.manual_seed(0)
    inputs, truth = torch.randn(256, 8), torch.randn(8, 4)
    weights, rate = nn.Parameter(torch.zeros(8, 4)), RATES.get(name, 0.05)
    optimizer = optim.build(
        Optim(name, lr=rate), [{"params": [weights], "weight_decay": 0.0}], lr=rate, device=CPU, allow_import=True
    )
    losses = []
    for k in range(400):
        loss = functional.mse_loss(inputs @ weights, inputs @ truth)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optim.set_lr(optimizer, rate if name == "ftrl" else rate * (1 - k / 400))
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.02 * losses[0]


OF_EACH_HOUSE = ("sgd", "adamw", "muon", "lbsgd", "timm/lamb", f"{__name__}:own")
"""Torch's, fused and not, ours, MXNet's, timm's and a user's."""


@pytest.mark.parametrize(
    "name",
    [name if name in OF_EACH_HOUSE else pytest.param(name, marks=pytest.mark.slow) for name in NAMES if name != "sgld"],
)
def test_digits_are_told_apart(name: str) -> None:
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.from_numpy(digits.data[:600]).float() / 8 - 1
    labels = torch.from_numpy(digits.target[:600])
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    rate = 0.1 if name == "timm/lars" else 0.4 * RATES.get(name, 0.05)
    optimizer = make(name, grouped(list(net.parameters())), rate)
    for k in range(150):
        optimizer.zero_grad()
        functional.cross_entropy(net(images), labels).backward()  # type: ignore[no-untyped-call]
        optim.set_lr(optimizer, rate if name == "ftrl" else rate * (1 - k / 150))
        optimizer.step()
    assert (net(images).argmax(1) == labels).float().mean() > 0.9


@pytest.mark.parametrize("name", NAMES)
def test_saved_and_loaded_it_goes_on_bit_for_bit(name: str) -> None:
    straight = tensors()
    expected = train(straight, make(name, grouped(straight, 0.1)), range(6))

    first = tensors()
    optimizer = make(name, grouped(first, 0.1))
    train(first, optimizer, range(3))
    saved = optimizer.state_dict()
    for state in saved["state"].values():  # as safetensors gives them back: in the plain memory format
        state.update({key: value.contiguous() for key, value in state.items() if isinstance(value, Tensor)})

    second = [nn.Parameter(parameter.detach().clone()) for parameter in first]
    resumed = make(name, grouped(second, 0.1))
    resumed.load_state_dict(saved)
    assert all(map(torch.equal, train(second, resumed, range(3, 6)), expected))


@pytest.mark.parametrize("name", NAMES)
def test_a_group_trains_at_its_share_of_the_rate(name: str) -> None:
    scaled, slow = tensors(), tensors()
    first = train(scaled, make(name, grouped(scaled, 0.1, scale=0.25)), range(3))
    second = train(slow, make(name, grouped(slow, 0.1), lr=2.0**-8), range(3))
    assert all(map(torch.equal, first, second))
    optimizer = make(name, grouped(scaled, scale=0.25))
    optim.set_lr(optimizer, 0.1)
    assert {group["lr"] for group in optimizer.param_groups} == {np.float32(0.025)}


@pytest.mark.parametrize("name", NAMES)
def test_norms_and_biases_are_not_decayed(name: str) -> None:
    def trained(decay: float) -> dict[str, Tensor]:
        torch.manual_seed(0)
        built = models.build(Model("digits", options={"width": 4}), num_classes=5, channels=3, size=8)
        groups = models.parameter_groups(built, train="full", decay=1, weight_decay=decay)
        optimizer = make(name, groups)
        for k in range(4):
            for number, parameter in enumerate(built.module.parameters()):
                draw = torch.Generator().manual_seed(100 * k + number)
                parameter.grad = torch.randn(parameter.shape, generator=draw)
            optimizer.step()
        return {key: value.detach() for key, value in built.module.named_parameters()}

    with_decay, without = trained(0.5), trained(0.0)
    assert len(with_decay) == 14
    differing = {key for key, value in with_decay.items() if not torch.equal(value, without[key])}
    assert differing == {key for key, value in without.items() if value.ndim > 1}


@pytest.mark.parametrize("name", [name for name, decay in DECAY.items() if decay != "its own"])
def test_decay_is_coupled_or_decoupled_as_it_is_said(name: str) -> None:
    """Coupled: the same as a gradient with the decay in it. Decoupled: the same as weights that are shrunk first."""
    lr, decay = 2.0**-6, 0.5
    usual, coupled, shrunk = tensors(), tensors(), tensors()
    expected = train(usual, make(name, grouped(usual, decay)), range(4))
    by_gradient = train(coupled, make(name, grouped(coupled)), range(4), added=decay)
    optimizer = make(name, grouped(shrunk))
    for k in range(4):
        gradients_at = [nn.Parameter(parameter.detach().clone()) for parameter in shrunk]
        for at, parameter in zip(gradients_at, shrunk, strict=True):
            parameter.grad = torch.sin(3 * at.detach() + k) + 0.1
        shrunk[0].data.mul_(1 - lr * decay)
        optimizer.step()
    results = {
        "coupled": torch.allclose(expected[0], by_gradient[0], rtol=1e-5, atol=1e-6),
        "decoupled": torch.allclose(expected[0], shrunk[0].detach(), rtol=1e-5, atol=1e-6),
    }
    assert [kind for kind, is_same in results.items() if is_same] == [DECAY[name]]


FUSED = [name for name in BUILT_IN if optim.kinds()[name].fused]


@pytest.mark.parametrize("name", NAMES)
def test_fused_kernels_do_the_work_and_nothing_keeps_torch_from_updating_all_tensors_at_once(name: str) -> None:
    groups = make(name, grouped(tensors())).param_groups
    assert all(group.get("fused") is (True if name in FUSED else None) for group in groups) or name not in BUILT_IN
    assert all(group.get("foreach") is not False for group in groups)  # None: torch's own choice, by the device


def test_torch_has_no_fused_kernel_that_is_left_unused() -> None:
    for name, kind in optim.kinds().items():
        base = type(make(name, grouped(tensors()))).__mro__[1]
        if base.__module__.startswith("torch.optim"):
            assert bool(kind.fused) == ("fused" in inspect.signature(base).parameters), name


@pytest.mark.parametrize("name", NAMES)
def test_hooks_of_a_step_are_called_once(name: str) -> None:
    parameters, called = tensors(), list[str]()
    optimizer = make(name, grouped(parameters))
    optimizer.register_step_pre_hook(lambda *arguments: called.append("before"))
    optimizer.register_step_post_hook(lambda *arguments: called.append("after"))
    train(parameters, optimizer, range(1))
    assert called == ["before", "after"]


def _net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def _updated(engine: Engine, name: str, indices: Sequence[int], parts: int = 2) -> list[Tensor]:
    """Four updates of a net by the micro-batches ``own`` of ``parts``."""
    net = _net()
    call = engine.prepare(net)
    optimizer = make(name, grouped(list(net.parameters()), 0.1))
    draw = torch.Generator().manual_seed(7)
    for _ in range(4):
        images = torch.randn(8, 6, generator=draw).chunk(parts)
        for k in indices:
            with engine.micro_batch(last=k == indices[-1]):
                loss = call(images[k]).square().mean() * engine.world.size / parts
                engine.backward(loss, last=k == indices[-1])
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in net.parameters()]


def _by_ranks(group: Group) -> dict[str, Any]:
    document: dict[str, Any] = {}
    for compress in ("none", "fp16", "bf16", "powersgd"):
        for name in NAMES:
            engine = Engine(CPU, group, compress=compress)
            document[f"{compress} {name}"] = _updated(engine, name, [group.world.rank])
    return document


def test_all_ranks_have_the_same_weights_and_those_of_one_process_that_accumulates() -> None:
    first, second = as_group(partial(_by_ranks), 2)
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # as the ranks have
    try:
        alone = {name: _updated(Engine(CPU), name, [0, 1]) for name in NAMES}
    finally:
        torch.set_num_threads(before)
    assert [key for key in first if not all(map(torch.equal, first[key], second[key]))] == []
    assert [name for name in NAMES if not all(map(torch.equal, first[f"none {name}"], alone[name]))] == []
    still = [nn.Parameter(value) for value in _net().parameters()]
    assert not any(torch.equal(first[key][0], still[0]) for key in first)


@pytest.mark.parametrize("name", NAMES)
def test_parts_of_a_batch_make_the_update_of_the_whole(name: str) -> None:
    whole, parts = _updated(Engine(CPU), name, [0], 1), _updated(Engine(CPU), name, [0, 1, 2, 3], 4)
    for this, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(this, other, rtol=1e-4, atol=1e-5)
