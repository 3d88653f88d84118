"""Precision: images normalised exactly, formats as asked for, loss scaling that skips and adapts without waiting."""

from __future__ import annotations

import math
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from steadytrain import optim
from steadytrain.config import Optim, Precision
from steadytrain.errors import RecipeError
from steadytrain.training import precision
from steadytrain.training.precision import Policy, products, set_products
from steadytrain.training.state import preserve_process

CPU = torch.device("cpu")
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def images_BHWC(b: int, h: int, w: int, c: int) -> Tensor:
    return torch.randint(0, 256, (b, h, w, c), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@given(
    shape=st.tuples(st.integers(1, 4), st.integers(1, 9), st.integers(1, 9), st.sampled_from([1, 3])),
    channels_last=st.booleans(),
)
@settings(deadline=None)
def test_images_are_normalised(shape: tuple[int, int, int, int], channels_last: bool) -> None:
    policy = Policy(Precision(channels_last=channels_last), CPU)
    images, channels = images_BHWC(*shape), shape[3]
    mean, std = MEAN[:channels], STD[:channels]
    got = policy.images(images, mean, std)
    wide = torch.tensor([mean, std], dtype=torch.float64)
    expected = ((images.double() / 255 - wide[0]) / wide[1]).permute(0, 3, 1, 2)
    torch.testing.assert_close(got.double(), expected, atol=1e-6, rtol=1e-6)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    assert got.dtype is torch.float32
    assert got.is_contiguous(memory_format=layout)


def test_images_stay_between_0_and_1_without_a_mean() -> None:
    got = Policy(Precision(), CPU).images(images_BHWC(2, 5, 5, 3), None, None)
    assert 0 <= got.min() < got.max() <= 1


def test_a_slice_of_a_batch_is_normalised_like_the_whole() -> None:
    policy, images = Policy(Precision(), CPU), images_BHWC(6, 8, 8, 3)
    whole = policy.images(images, MEAN, STD)
    parts = [policy.images(part, MEAN, STD) for part in images.chunk(3)]
    assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(policy.images(images[:, ::2, 1:7], MEAN, STD), whole[:, :, ::2, 1:7])


def test_a_mean_for_other_channels_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"data.mean has 3 values .* the images have 1 channel: give one"):
        Policy(Precision(), CPU).images(images_BHWC(1, 4, 4, 1), MEAN, STD)


@pytest.mark.parametrize("channels_last", [True, False])
def test_a_prepared_network_has_the_policys_layout(channels_last: bool) -> None:
    convolution = nn.Conv2d(3, 8, 3)
    prepared = Policy(Precision(channels_last=channels_last), CPU).prepare(convolution)
    assert prepared is convolution
    assert convolution.weight.is_contiguous(memory_format=torch.channels_last) is channels_last


def test_bf16_computes_in_16_bits_and_keeps_the_parameters() -> None:
    policy = Policy(Precision("bf16"), CPU)
    layer = policy.prepare(nn.Linear(4, 2))
    with policy.autocast():
        out = layer(torch.ones(1, 4))
    assert out.dtype is torch.bfloat16
    assert layer.weight.dtype is torch.float32
    assert policy.scale(out) is out
    assert policy.state_dict() == {}


def test_slow_or_missing_instructions_are_said() -> None:
    assert Policy(Precision(), CPU).notes == ()
    notes = Policy(Precision("bf16"), CPU).notes
    assert bool(notes) is not torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if not torch.ops.mkldnn._is_mkldnn_fp16_supported():
        with pytest.raises(RecipeError, match=r"'fp16' and this CPU has no instructions for it: use fp32"):
            Policy(Precision("fp16"), CPU)


def policy_anywhere(numbers: str) -> Policy:
    """A policy, also where this CPU has no instructions for its numbers and a run would be refused."""
    with mock.patch.object(precision, "_remark", return_value=None):
        return Policy(Precision(numbers), CPU)  # type: ignore[arg-type]


def gradient(policy: Policy, layer: nn.Linear, size: float) -> None:
    policy.scale((layer.weight * size).sum()).backward()  # type: ignore[no-untyped-call]


def scaled() -> tuple[Policy, nn.Linear, torch.optim.Optimizer]:
    """fp16's loss scaling, which works on any CPU whatever its arithmetic."""
    layer = nn.Linear(3, 2, bias=False)
    spec = Optim(momentum=0.0, weight_decay=0.0, lr=0.5)
    optimizer = optim.build(spec, [{"params": [layer.weight]}], lr=0.5, device=CPU)
    return policy_anywhere("fp16"), layer, optimizer


def test_scaling_does_not_show_in_the_update() -> None:
    policy, layer, optimizer = scaled()
    before = layer.weight.detach().clone()
    gradient(policy, layer, 0.25)
    assert layer.weight.grad is not None and layer.weight.grad[0, 0] == 0.25 * 65536
    policy.step(optimizer)
    assert torch.equal(layer.weight, before - 0.125)


def test_an_overflow_skips_the_update_and_halves_the_scale() -> None:
    policy, layer, optimizer = scaled()
    before = layer.weight.detach().clone()
    gradient(policy, layer, math.inf)
    policy.step(optimizer)
    assert torch.equal(layer.weight, before)
    assert policy.state_dict()["scale"] == 32768
    optimizer.zero_grad()
    gradient(policy, layer, 1.0)
    policy.step(optimizer)
    assert torch.equal(layer.weight, before - 0.5)


@pytest.mark.parametrize("name", sorted(optim.kinds()))
def test_fp16_says_with_which_optimizers_it_waits_for_the_gpu(name: str) -> None:
    """They are all but those that docs/precision.md names."""
    layer, lines = nn.Linear(2, 2), dict[str, tuple[str, ...]]()
    optimizer = optim.build(Optim(name), [{"params": list(layer.parameters())}], lr=0.1, device=torch.device("cpu"))
    if name == "adagrad":  # fused on a CPU only
        optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]
    for numbers, device in (("fp16", "cuda"), ("fp16", "cpu"), ("bf16", "cuda")):
        policy = policy_anywhere(numbers)
        policy.device = torch.device(device)
        policy.notes = ()
        policy.remark_on(optimizer, name)
        lines[f"{numbers} {device}"] = policy.notes
    assert lines["fp16 cpu"] == lines["bf16 cuda"] == ()
    if name in ("sgd", "nag", "adam", "adamw"):
        assert lines["fp16 cuda"] == ()
    else:
        [line] = lines["fp16 cuda"]
        assert line.startswith("fp16 waits for the GPU once in each update") and f"({name} is not one" in line


def test_unscaled_gradients_have_their_true_size() -> None:
    policy, layer, optimizer = scaled()
    gradient(policy, layer, 0.25)
    policy.unscale(optimizer)
    assert layer.weight.grad is not None and (layer.weight.grad == 0.25).all()
    before = layer.weight.detach().clone()
    policy.step(optimizer)
    assert torch.equal(layer.weight, before - 0.125)


def test_the_loss_scale_comes_back_after_saving() -> None:
    policy, layer, optimizer = scaled()
    gradient(policy, layer, math.inf)
    policy.step(optimizer)
    resumed = policy_anywhere("fp16")
    resumed.load_state_dict(policy.state_dict())
    assert resumed.scale(torch.tensor(1.0)) == 32768
    assert resumed.state_dict() == policy.state_dict()


def test_a_scaled_update_reads_no_value_from_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, layer, optimizer = scaled()

    def refuse(self: Tensor) -> float:
        raise AssertionError("a device value was waited for")

    for name in ("item", "tolist", "__bool__", "__float__"):
        monkeypatch.setattr(Tensor, name, refuse)
    gradient(policy, layer, 1.0)
    policy.unscale(optimizer)
    policy.step(optimizer)


def _switches() -> tuple[object, ...]:
    """Both sets of torch's switches; the older getters raise where the two contradict each other."""
    older = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    with torch.backends.cudnn.flags(enabled=False):  # it reads and restores them
        pass
    return torch.get_float32_matmul_precision(), *older, *(value == "tf32" for value in products())


@pytest.mark.parametrize(("name", "rounds"), [("fp32", False), ("tf32", True)])
def test_what_a_compiler_reads_says_how_products_are_rounded(name: str, rounds: bool) -> None:
    before = _switches()
    with preserve_process(torch.device("cpu")):
        for _ in range(2):
            set_products(Precision(name), torch.device("cuda"))  # type: ignore[arg-type]
            assert _switches() == ("high" if rounds else "highest", *[rounds] * 5)
    assert _switches() == before


def test_what_a_user_has_set_by_one_set_of_switches_is_restored() -> None:
    with preserve_process(torch.device("cpu")):
        torch.backends.cuda.matmul.fp32_precision = "tf32"  # the older getter raises from here on
        with preserve_process(torch.device("cpu")):
            set_products(Precision("tf32"), torch.device("cuda"))
            assert torch.backends.cuda.matmul.allow_tf32 is True
        assert products() == ("tf32", "tf32", "tf32")


def test_a_process_whose_switches_training_leaves_alone_keeps_them() -> None:
    torch.set_float32_matmul_precision("medium")
    try:
        with preserve_process(torch.device("cpu")):
            pass
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("kind", sorted(optim.kinds()))
def test_an_update_on_a_gpu_never_synchronises(name: str, kind: str) -> None:
    device = torch.device("cuda", 0)
    policy = Policy(Precision(name), device)  # type: ignore[arg-type]
    module = policy.prepare(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 6 * 6, 4)))
    images = images_BHWC(4, 8, 8, 3).to(device)
    optimizer = optim.build(Optim(kind), [{"params": list(module.parameters())}], lr=0.1, device=device)
    for k in range(4):
        torch.cuda.set_sync_debug_mode("error" if k else "default")  # the first update may allocate
        try:
            with policy.autocast():
                loss = module(policy.images(images, MEAN, STD)).float().square().mean()
            policy.scale(loss).backward()  # type: ignore[no-untyped-call]
            optim.set_lr(optimizer, 0.1 / (k + 1))
            policy.unscale(optimizer)
            policy.step(optimizer)
            optimizer.zero_grad(set_to_none=True)
        finally:
            torch.cuda.set_sync_debug_mode("default")
