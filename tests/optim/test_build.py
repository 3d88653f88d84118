"""What is particular to some optimizers, their table and their errors; what holds for all is in test_conformance."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from steadytrain import optim
from steadytrain.config import Optim
from steadytrain.config.parts import OPTIMIZERS, TIMM_OPTIMIZERS
from steadytrain.errors import RecipeError

CPU = torch.device("cpu")
BUILT_IN = sorted(optim.kinds())
FUSED = [name for name, kind in optim.kinds().items() if kind.fused]


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


def test_the_recipes_names_are_those_of_the_table() -> None:
    assert set(OPTIMIZERS) == set(optim.kinds())


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


@pytest.mark.parametrize("name", ["sgd", "nag"])
def test_sgd_and_nag_are_torchs_and_zero_momentum_at_the_start_changes_nothing(name: str) -> None:
    ours, theirs = filters(), filters()
    optimizer = torch.optim.SGD([theirs], lr=0.1, momentum=0.9, nesterov=name == "nag", weight_decay=5e-4)
    assert torch.equal(train(ours, make([ours], name), range(4)), train(theirs, optimizer, range(4)))


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


@pytest.mark.parametrize("name", FUSED)
def test_the_foreach_variant_makes_the_same_updates(name: str) -> None:
    ours, theirs = filters(), filters()
    optimizer = make([theirs], name, options={"foreach": True})
    assert optimizer.defaults["foreach"] and not optimizer.defaults["fused"]
    assert torch.allclose(train(ours, make([ours], name), range(4)), train(theirs, optimizer, range(4)), atol=1e-6)


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
    [("part", "left parameters out"), ("none", "cannot be imported"), ("filters", "is refused"), ("Tensor", "refused")],
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


def test_each_tensor_has_noise_of_its_own() -> None:
    parameters = [nn.Parameter(torch.zeros(4)) for _ in range(20)]
    groups = [{"params": parameters[k : k + 10], "weight_decay": 0.0} for k in (0, 10)]
    optimizer = optim.build(Optim("sgld"), groups, lr=0.1, device=CPU)
    for parameter in parameters:
        parameter.grad = torch.zeros(4)
    optimizer.step()
    assert len({tuple(parameter.tolist()) for parameter in parameters}) == 20


def test_langevin_dynamics_samples_from_the_posterior() -> None:
    weights = nn.Parameter(torch.zeros(5_000))
    optimizer = optim.build(Optim("sgld"), [{"params": [weights], "weight_decay": 0.0}], lr=0.02, device=CPU)
    for _ in range(300):
        weights.grad = 4 * weights.detach()  # of the loss 2 w^2: a normal distribution of variance 1/4
        optimizer.step()
    assert weights.mean().item() == pytest.approx(0, abs=0.03)
    assert weights.var().item() == pytest.approx(0.25, rel=0.08)


def test_adagrad_on_a_gpu_takes_kernels_that_every_torch_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)  # the tensors below have no memory
    with FakeTensorMode():
        weight = nn.Parameter(torch.empty(4, 3, device="cuda"))
        weight.grad = torch.empty(4, 3, device="cuda")
        groups = [{"params": [weight], "weight_decay": 0.0}]
        optimizer = optim.build(Optim("adagrad", lr=0.1), groups, lr=0.1, device=torch.device("cuda"))
        optimizer.step()
    assert not optimizer.param_groups[0]["fused"]


class Copies(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts tensors of the host that are copied to a device within the block, for which the host would wait."""

    seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default and (kwargs or {}).get("device") == torch.device("meta"):
            self.seen += args[0].device.type == "cpu"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", [name for name in BUILT_IN if name != "sgld"])  # it draws on a real device alone
def test_no_update_copies_numbers_to_the_device(name: str) -> None:
    weight = nn.Parameter(torch.empty(4, 3, device="meta"))
    weight.grad = torch.empty(4, 3, device="meta")
    groups = [{"params": [weight], "weight_decay": 1e-4}]
    optimizer = optim.build(Optim(name, lr=0.1), groups, lr=0.1, device=torch.device("meta"))
    with Copies() as copies:  # type: ignore[no-untyped-call]
        optimizer.step()
    assert not copies.seen


def test_a_bare_name_of_timms_optimizers_is_never_one_that_is_built_in() -> None:
    from timm.optim import list_optimizers  # type: ignore[attr-defined]

    assert not set(TIMM_OPTIMIZERS) & set(OPTIMIZERS)
    assert set(TIMM_OPTIMIZERS) <= set(list_optimizers())
