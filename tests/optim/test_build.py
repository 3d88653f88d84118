"""Optimizers: MXNet's own numbers, bit-exact state, and the memory orders that fused kernels need."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from steadytrain import optim
from steadytrain.config import Optim
from steadytrain.config.recipe import OPTIMIZERS
from steadytrain.errors import RecipeError

CPU = torch.device("cpu")
BUILT_IN = sorted(optim.OPTIMIZERS)
NAMES = [*BUILT_IN, *(f"timm/{name}" for name in ("adabelief", "adan", "lamb", "lars", "lion"))]
FUSED = [name for name in BUILT_IN if optim.OPTIMIZERS[name].has_fused]
RATES = {"adagrad": 1.0, "ftrl": 2.0, "adadelta": 5.0, "timm/lars": 5.0, "timm/lion": 0.02}
"""Learning rates for a small regression, where 0.05 would be too slow or too fast."""


def make(parameters: list[nn.Parameter], name: str = "sgd", **more: Any) -> Optimizer:
    spec = Optim(name, **more)
    groups = [{"params": parameters, "weight_decay": spec.weight_decay, "lr_scale": 1.0, "name": "all"}]
    return optim.build(spec, groups, lr=spec.lr, device=CPU)


def filters() -> nn.Parameter:
    torch.manual_seed(0)
    return nn.Parameter(torch.randn(8, 4, 3, 3).contiguous(memory_format=torch.channels_last))


def train(parameter: nn.Parameter, optimizer: Optimizer, updates: range) -> Tensor:
    for k in updates:
        parameter.grad = torch.sin(parameter.detach() * (k + 1))
        optimizer.step()
    return parameter.detach().clone()


@pytest.mark.parametrize("case", ["sgd.m0.plain", "sgd.m0.9.plain", "sgd.m0.9.wd1e-4", "nag.m0.9.plain", "adam.plain"])
def test_updates_are_mxnets(data_folder: Path, case: str) -> None:
    golden = np.load(data_folder / "mxnet-golden" / "optimizers.npz")
    name, decay = case.split(".")[0], 1e-4 if "wd" in case else 0.0
    spec = Optim(
        "adamw" if name == "adam" else "sgd",
        lr=0.01 if name == "adam" else 0.1,
        momentum=0.9 if "m0.9" in case else 0.0,
        nesterov=name == "nag",
    )
    tensors = {kind: nn.Parameter(torch.from_numpy(golden[f"init/{kind}"])) for kind in ("matrix", "vector", "conv")}
    groups = [{"params": [p], "weight_decay": decay if p.ndim > 1 else 0.0} for p in tensors.values()]
    optimizer = optim.build(spec, groups, lr=spec.lr, device=CPU)
    for k in range(12):
        for kind, parameter in tensors.items():
            parameter.grad = torch.from_numpy(golden[f"grad/{kind}"][k])
        optimizer.step()
        for kind, parameter in tensors.items():
            expected = golden[f"{case}/weights/{kind}"][k]
            np.testing.assert_allclose(parameter.detach().numpy(), expected, rtol=1e-5, atol=1e-6)


def test_the_recipes_names_are_those_of_the_table() -> None:
    assert set(OPTIMIZERS) == set(optim.OPTIMIZERS)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "sgld"])
def test_a_regression_is_solved(name: str) -> None:
    torch.manual_seed(0)
    inputs, truth = torch.randn(256, 8), torch.randn(8, 4)
    weights = nn.Parameter(torch.zeros(8, 4))
    rate = RATES.get(name, 0.05)
    optimizer = optim.build(Optim(name, lr=rate), [{"params": [weights], "weight_decay": 0.0}], lr=rate, device=CPU)
    losses = []
    for k in range(400):
        loss = functional.mse_loss(inputs @ weights, inputs @ truth)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optim.set_lr(optimizer, rate if name == "ftrl" else rate * (1 - k / 400))
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.02 * losses[0]


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("ftrl", "sgld", "timm/lars")])
def test_decay_is_taken_from_the_group(name: str) -> None:
    decayed, spared = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    groups = [{"params": [decayed], "weight_decay": 0.5}, {"params": [spared], "weight_decay": 0.0}]
    optimizer = optim.build(Optim(name, lr=0.1), groups, lr=0.1, device=CPU)
    decayed.grad = spared.grad = torch.zeros(3)
    optimizer.step()
    assert (decayed < 1).all()
    assert (spared == 1).all()


def test_each_group_gets_its_share_of_the_rate() -> None:
    groups = [{"params": [filters()], "lr_scale": scale} for scale in (1.0, 0.25)]
    optimizer = optim.build(Optim(lr=0.2), groups, lr=0.2, device=CPU)
    assert [np.float32(group["lr"]) for group in optimizer.param_groups] == [np.float32(0.2), np.float32(0.05)]
    optim.set_lr(optimizer, 0.1)
    assert [group["lr"] for group in optimizer.param_groups] == [np.float32(0.1), np.float32(0.025)]


@pytest.mark.parametrize("name", NAMES)
def test_saved_and_loaded_it_goes_on_bit_for_bit(name: str) -> None:
    straight = filters()
    expected = train(straight, make([straight], name), range(6))

    first = filters()
    optimizer = make([first], name)
    train(first, optimizer, range(3))
    saved = optimizer.state_dict()
    for state in saved["state"].values():  # as safetensors gives them back: in the plain memory format
        state.update({key: value.contiguous() for key, value in state.items() if isinstance(value, Tensor)})

    second = nn.Parameter(first.detach().clone())
    resumed = make([second], name)
    resumed.load_state_dict(saved)
    assert torch.equal(train(second, resumed, range(3, 6)), expected)


@pytest.mark.parametrize("name", FUSED)
def test_fused_kernels_do_the_work(name: str) -> None:
    assert all(group["fused"] for group in make([filters()], name).param_groups)


@pytest.mark.parametrize("name", FUSED)
def test_an_update_that_fp16_skips_leaves_no_trace(name: str) -> None:
    parameter = filters()
    before = parameter.detach().clone()
    optimizer: Any = make([parameter], name)
    parameter.grad = torch.full_like(parameter, float("inf"))
    optimizer.grad_scale, optimizer.found_inf = None, torch.tensor(1.0)
    optimizer.step()  # the very first one: torch's own momentum would be left uninitialised here
    del optimizer.grad_scale, optimizer.found_inf
    assert torch.equal(parameter, before)

    fresh = filters()
    expected = train(fresh, make([fresh], name), range(3))
    assert torch.equal(train(parameter, optimizer, range(3)), expected)


def test_zero_momentum_at_the_start_changes_nothing() -> None:
    ours, theirs = filters(), filters()
    optimizer = torch.optim.SGD([theirs], lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)
    assert torch.equal(train(ours, make([ours]), range(4)), train(theirs, optimizer, range(4)))


def test_adamw_is_torchs_own() -> None:
    ours, theirs = filters(), filters()
    spec = Optim("adamw")
    optimizer = torch.optim.AdamW(
        [theirs],
        lr=np.float32(spec.lr).item(),
        betas=spec.betas,
        eps=spec.eps,
        weight_decay=spec.weight_decay,
        fused=True,
    )
    assert torch.equal(train(ours, make([ours], "adamw"), range(4)), train(theirs, optimizer, range(4)))


@pytest.mark.parametrize("name", NAMES)
def test_hooks_of_a_step_are_called_once(name: str) -> None:
    parameter, called = filters(), list[str]()
    optimizer = make([parameter], name)
    optimizer.register_step_pre_hook(lambda *told: called.append("before"))
    optimizer.register_step_post_hook(lambda *told: called.append("after"))
    train(parameter, optimizer, range(1))
    assert called == ["before", "after"]


@pytest.mark.parametrize("name", FUSED)
def test_gradients_are_dropped_or_set_to_zero_as_asked_and_a_profiler_sees_each_step(name: str) -> None:
    parameter = filters()
    optimizer = make([parameter], name)
    train(parameter, optimizer, range(1))
    optimizer.zero_grad(set_to_none=False)
    assert parameter.grad is not None and not parameter.grad.any()
    optimizer.zero_grad()
    assert parameter.grad is None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        train(parameter, optimizer, range(1))
    assert [event.name for event in seen.events() if event.name.startswith("Optimizer.step")] == [
        f"Optimizer.step#{type(optimizer).__name__}.step"
    ]


def own(groups: Any, *, lr: float, momentum: float = 0.0) -> Optimizer:
    return torch.optim.SGD(groups, lr=lr, momentum=momentum)


def part(groups: Any, *, lr: float) -> Optimizer:
    return torch.optim.SGD([filters()], lr=lr)


def test_a_users_own_optimizer_is_imported_only_where_the_user_named_it() -> None:
    ours, theirs = filters(), filters()
    spec = Optim(f"{__name__}:own", lr=0.1, options={"momentum": 0.5})
    with pytest.raises(RecipeError, match=r"would import code.*add --optimizer"):
        optim.build(spec, [{"params": [ours]}], lr=0.1, device=CPU)
    optimizer = optim.build(spec, [{"params": [ours]}], lr=0.1, device=CPU, allow_import=True)
    expected = torch.optim.SGD([theirs], lr=np.float32(0.1).item(), momentum=0.5)
    assert torch.equal(train(ours, optimizer, range(3)), train(theirs, expected, range(3)))


@pytest.mark.parametrize(
    ("name", "message"),
    [("part", "left parameters out"), ("none", "cannot be imported"), ("filters", "is refused"), ("Path", "refused")],
)
def test_a_factory_that_makes_no_optimizer_of_the_parameters_is_refused(name: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        spec = Optim(f"{__name__}:{name}", lr=0.1)
        optim.build(spec, [{"params": [filters()]}], lr=0.1, device=CPU, allow_import=True)


def test_muon_takes_filters_as_matrices_and_vectors_by_adamw() -> None:
    bias, theirs = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(8))
    weights = filters()
    optimizer = make([weights, bias], "muon", lr=0.01, weight_decay=0.0)
    rate = np.float32(0.01).item()
    adamw = torch.optim.AdamW([theirs], lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
    before = weights.detach().clone()
    for k in range(3):
        bias.grad = torch.sin(bias.detach() * (k + 1))
        theirs.grad = torch.sin(theirs.detach() * (k + 1))
        weights.grad = torch.randn_like(weights)
        optimizer.step()
        adamw.step()
    torch.testing.assert_close(bias, theirs)
    singular = torch.linalg.svdvals((weights.detach() - before).flatten(1))
    assert singular.max() < 4 * singular.min()  # a sum of nearly orthogonal matrices; of gradients alone it is not


def test_nesterov_without_momentum_is_plain_descent() -> None:
    parameter = filters()
    before = parameter.detach().clone()
    optimizer = make([parameter], lr=0.5, momentum=0.0, nesterov=True, weight_decay=0.0)
    after = train(parameter, optimizer, range(1))
    torch.testing.assert_close(after, before - 0.5 * torch.sin(before))
    assert not optimizer.state


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("timm/lamp", {}, r"no optimizer 'timm/lamp'. Did you mean timm/lamb"),
        ("timm/adahessian", {}, "second derivatives"),
        (
            "ftml",
            {"momentum": 0.9},
            r"ftml with optim.options momentum=0.9 is refused: .* \(its options: beta1, beta2, epsilon\)",
        ),
        ("lbsgd", {"warmup_strategy": "cosine"}, "linear, power2, sqrt or lars"),
    ],
)
def test_what_an_optimizer_does_not_take_is_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        make([filters()], name, options=options)


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        RecipeError, match=r"'adamm'; it must be one of sgd, .*timm/NAME or pkg.mod:factory. Did you mean adam"
    ):
        Optim("adamm")


def test_noise_depends_on_the_seed_and_the_update_alone() -> None:
    def noisy(seed: int) -> Tensor:
        parameter = filters()
        groups = [{"params": [parameter], "weight_decay": 0.0}]
        return train(parameter, optim.build(Optim("sgld"), groups, lr=0.1, device=CPU, seed=seed), range(3))

    torch.rand(1)  # torch's own generator plays no part
    assert torch.equal(noisy(1), noisy(1))
    assert not torch.equal(noisy(1), noisy(2))


def test_langevin_dynamics_samples_from_the_posterior() -> None:
    weights = nn.Parameter(torch.zeros(5_000))
    optimizer = optim.build(Optim("sgld"), [{"params": [weights], "weight_decay": 0.0}], lr=0.02, device=CPU)
    for _ in range(300):
        weights.grad = 4 * weights.detach()  # of the loss 2 w^2: a normal distribution of variance 1/4
        optimizer.step()
    assert weights.mean().item() == pytest.approx(0, abs=0.03)
    assert weights.var().item() == pytest.approx(0.25, rel=0.08)
