"""Kernels that compute wrongly are found before training, and their layers compute in fp32; sound networks stay."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import library as implementing

from steadytrain.config import Precision
from steadytrain.training import kernels
from steadytrain.training.kernels import mend_kernels, products_of
from steadytrain.training.precision import Policy

implementations: Any = vars(implementing)["Library"]
CPU = torch.device("cpu")
SIZE = 9

needs_bf16 = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this CPU has no instructions for bf16"
)


class Functional(nn.Module):
    """A convolution that is no module of torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 4, 3, 3) / 6)

    def forward(self, images: Tensor) -> Tensor:
        return nn.functional.conv2d(images, self.weight, stride=2, padding=1)


class Skipping(nn.Module):
    """A network that leaves out a layer in training."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.spare = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 5)

    def forward(self, images: Tensor) -> Tensor:
        images = self.first(images)
        return (images if self.training else self.spare(images)).mean((2, 3))


def net() -> nn.Module:
    torch.manual_seed(0)
    body = (
        nn.Conv2d(3, 4, 3, 2, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3, 2),
        nn.ReLU(),
        Functional(),
    )
    return nn.Sequential(*body, nn.Flatten(), nn.Linear(6, 2))  # maps of 9, 4, 1, 1


def mended(module: nn.Module, *, name: str = "bf16", channels_last: bool = True) -> tuple[nn.Module, list[str]]:
    policy = Policy(Precision(name, channels_last=channels_last), CPU)  # type: ignore[arg-type]
    module = policy.prepare(module)
    return module, mend_kernels(module, policy, [(SIZE, SIZE, 3)], images=8)


def gradients(module: nn.Module, name: str) -> dict[str, Tensor]:
    policy = Policy(Precision(name), CPU)  # type: ignore[arg-type]
    module.train()
    images = torch.rand(8, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(1))
    with policy.autocast():
        nn.functional.cross_entropy(module(images).float(), torch.arange(8) % 2).backward()  # type: ignore[no-untyped-call]
    return {key: value.grad.float() for key, value in module.named_parameters() if value.grad is not None}


@pytest.fixture
def wrong_kernel() -> Iterator[Callable[[Callable[..., bool]], None]]:
    """Have torch compute the weight gradients of some 16-bit convolutions wrongly, in this process."""
    library: Any = implementations("aten", "IMPL")
    right = torch.ops.aten.convolution_backward.default

    def install(is_wrong: Callable[..., bool]) -> None:
        def backward(slope: Tensor, images: Tensor, weight: Tensor, *rest: Any) -> tuple[Any, ...]:
            keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CompositeExplicitAutograd)
            first, second, third = right.redispatch(keys, slope, images, weight, *rest)
            return first, second * 1.5 if is_wrong(images, weight) else second, third

        library.impl("convolution_backward", backward, "CPU")

    yield install
    library._destroy()


@needs_bf16
@pytest.mark.parametrize("name", ["bf16", "pure-bf16"])
@pytest.mark.parametrize("channels_last", [True, False])
def test_a_convolution_of_maps_narrower_than_its_stride_is_computed_in_fp32(name: str, channels_last: bool) -> None:
    module, lines = mended(net(), name=name, channels_last=channels_last)
    [line] = lines
    assert line.startswith(
        "1 layer is computed in fp32: 5 (3x3, stride 2, on maps of 1x1): the bf16 kernels that torch"
    )
    junk = [torch.full((6, 4, 3, 3), float("nan"), dtype=torch.bfloat16) for _ in range(50)]
    del junk
    found = gradients(module, name)["5.weight"]
    found[:, :, 1, 1] = 0  # the only tap that sees more than padding
    assert not found.any()


@needs_bf16
def test_a_mended_network_has_the_gradients_of_fp32_but_for_rounding() -> None:
    exact = net()
    module, _ = mended(copy.deepcopy(exact))
    right, value = gradients(exact, "fp32")["5.weight"], gradients(module, "bf16")["5.weight"]
    assert (value - right).abs().max() < 0.1 * right.abs().max()


@needs_bf16
def test_a_copy_of_a_mended_network_computes_with_its_own_weights() -> None:
    module, _ = mended(net())
    other = copy.deepcopy(module)
    nn.init.zeros_(other.get_parameter("5.weight"))
    images = torch.rand(2, 3, SIZE, SIZE)
    assert torch.equal(other(images)[0], other(images)[1]) and not torch.equal(module(images)[0], module(images)[1])
    assert other.state_dict().keys() == module.state_dict().keys() == net().state_dict().keys()


@needs_bf16
@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(3, 8, 5, 3, 2),
        nn.Conv2d(3, 8, 7, 4, 3),
        nn.Conv2d(3, 9, 3, 2, 1, groups=3),
        nn.Conv2d(3, 8, (1, 3), (1, 2), (0, 1)),
    ],
)
def test_other_kernels_of_that_kind_are_mended(layer: nn.Conv2d) -> None:
    policy = Policy(Precision("bf16"), CPU)
    module = policy.prepare(nn.Sequential(layer, nn.Flatten()))
    assert mend_kernels(module, policy, [(1, 1, 3)], images=4)


@needs_bf16
def test_what_is_not_known_is_found_by_trying(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "KNOWN", ())
    layer = nn.Conv2d(64, 64, 3, 2, 1)
    policy = Policy(Precision("bf16"), CPU)
    module = policy.prepare(nn.Sequential(nn.Conv2d(3, 64, 1), layer, nn.Flatten()))
    is_sound = gradients_are_set(layer)
    assert bool(mend_kernels(module, policy, [(1, 1, 3)], images=32)) != is_sound


def gradients_are_set(layer: nn.Conv2d) -> bool:
    """Whether this torch sets all of a weight gradient in bf16, of maps of one pixel."""
    for _ in range(20):
        junk = [torch.full((64, 64, 3, 3), float("nan"), dtype=dtype) for dtype in (torch.bfloat16, torch.float32) * 4]
        del junk
        with torch.autocast("cpu", torch.bfloat16):
            (gradient,) = torch.autograd.grad(layer(torch.randn(32, 64, 1, 1)).float().sum(), layer.weight)
        gradient[:, :, 1, 1] = 0
        if bool((gradient != 0).any()):
            return False
    return True


@needs_bf16
def test_any_wrong_kernel_is_found_and_left(wrong_kernel: Callable[[Callable[..., bool]], None]) -> None:
    wrong_kernel(lambda images, weight: images.dtype is torch.bfloat16 and weight.shape[2:] == (5, 5))
    torch.manual_seed(0)
    exact = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 5), nn.Flatten(), nn.Linear(36, 2))
    module, lines = mended(copy.deepcopy(exact))
    assert len(lines) == 1 and "1 layer is computed in fp32: 1 (5x5, stride 1, on maps of 7x7)" in lines[0]
    right = gradients(exact, "fp32")
    for key, value in gradients(module, "bf16").items():
        assert (value - right[key]).abs().max() < 0.2 * right[key].abs().max(), key


@needs_bf16
def test_a_layer_that_training_leaves_out_is_tried_too() -> None:
    policy = Policy(Precision("bf16"), CPU)
    module = policy.prepare(Skipping())
    names = {name for names in products_of(module, policy, [(SIZE, SIZE, 3)]).values() for name in names}
    assert names == {"first", "spare"} and module.training


@needs_bf16
def test_a_sound_network_is_left_as_it_is() -> None:
    torch.manual_seed(0)
    module: nn.Module = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Dropout(), nn.Flatten(), nn.Linear(392, 2)
    )
    before, state = copy.deepcopy(module.state_dict()), torch.get_rng_state()
    module, lines = mended(module)
    assert lines == [] and torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())
    assert not any("forward" in vars(part) or part._forward_hooks for part in module.modules())


def test_nothing_is_tried_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "products_of", None)
    assert mended(net(), name="fp32")[1] == []


@needs_bf16
def test_what_was_tried_once_is_not_tried_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, wrong_kernel: Callable[[Callable[..., bool]], None]
) -> None:
    monkeypatch.setenv("STEADYTRAIN_CACHE", str(tmp_path))
    wrong_kernel(lambda images, weight: images.dtype is torch.bfloat16 and weight.shape[1] == 3)
    _, first = mended(net())
    monkeypatch.setattr(kernels, "differs", None)
    assert mended(net())[1] == first and len(first) == 1 and first[0].startswith("2 layers are")
    file = next((tmp_path / "kernels").iterdir())
    file.write_text("no JSON")
    with pytest.raises(TypeError):
        mended(net())
