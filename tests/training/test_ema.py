"""The average of the weights: its law, its buffers, its state."""

from __future__ import annotations

import torch
from torch import nn

from steadytrain.training.ema import Ema


def network() -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2))
    return net.to(memory_format=torch.channels_last)


def move(module: nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.rand_like(parameter))
    module(torch.rand(8, 1, 3, 3))  # running statistics move too


def test_an_average_follows_the_weights_by_its_law() -> None:
    module = network()
    average = Ema(module, 0.5)
    expected = {name: p.detach().double() for name, p in module.named_parameters()}
    for n in range(1, 15):
        move(module)
        average.update(module)
        keep = min(0.5, n / (n + 9))
        for name, p in module.named_parameters():
            expected[name] = keep * expected[name] + (1 - keep) * p.detach().double()
    for name, p in average.module.named_parameters():
        torch.testing.assert_close(p.double(), expected[name], rtol=1e-5, atol=1e-6)


def test_a_uniform_average_is_the_mean_of_the_weights_from_its_start_on() -> None:
    module = network()
    average = Ema(module, None, start=3)
    seen = []
    for n in range(1, 9):
        move(module)
        average.update(module)
        if n <= 3:
            assert all(map(torch.equal, average.module.parameters(), module.parameters())), "as they are until then"
            assert not average.is_average
        else:
            seen.append({name: p.detach().double().clone() for name, p in module.named_parameters()})
    for name, p in average.module.named_parameters():
        torch.testing.assert_close(p.double(), sum(s[name] for s in seen) / 5, rtol=1e-6, atol=1e-6)


def test_running_statistics_are_copied_as_they_are() -> None:
    module = network()
    average = Ema(module, 0.99)
    for _ in range(3):
        move(module)
        average.update(module)
    ours, theirs = dict(average.module.named_buffers()), dict(module.named_buffers())
    assert set(ours) == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert ours["1.num_batches_tracked"] == 3


def test_the_average_is_ready_to_be_evaluated() -> None:
    module = network().train()
    average = Ema(module, 0.9)
    assert module.training
    assert not any(part.training for part in average.module.modules())
    assert not any(p.requires_grad for p in average.module.parameters())
    assert all(p.requires_grad for p in module.parameters())
    strides = [(a.stride(), b.stride()) for a, b in zip(average.module.parameters(), module.parameters(), strict=True)]
    assert all(ours == theirs for ours, theirs in strides)


def test_saved_and_loaded_it_goes_on_bit_for_bit() -> None:
    module = network()
    average = Ema(module, 0.9)
    for _ in range(2):
        move(module)
        average.update(module)
    resumed = Ema(network(), 0.9)
    resumed.updates = 2
    resumed.module.load_state_dict(average.module.state_dict())
    assert resumed.state_dict()["updates"] == average.state_dict()["updates"] == 2
    move(module)
    for ema in (average, resumed):
        ema.update(module)
    ours, theirs = average.module.state_dict(), resumed.module.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_settled_statistics_are_those_of_the_averaged_weights_over_all_batches() -> None:
    module = network()
    average = Ema(module, 0.9)
    move(module)
    average.keeps_statistics = True
    average.update(module)
    batches = torch.rand(3, 8, 1, 3, 3)
    for n, images in enumerate(batches, 1):
        average.settle(module, images, share=1 / n)
    outputs = average.module[0](batches.flatten(0, 1))  # type: ignore[index]
    values = dict(average.module.named_buffers())
    torch.testing.assert_close(values["1.running_mean"], outputs.mean((0, 2, 3)))
    each = torch.stack([average.module[0](images).var((0, 2, 3)) for images in batches])  # type: ignore[index]
    torch.testing.assert_close(values["1.running_var"], each.mean(0))
    before = values["1.running_mean"].clone()
    average.update(module)
    assert torch.equal(values["1.running_mean"], before)
    average.keeps_statistics = False
    average.update(module)
    assert torch.equal(values["1.running_mean"], dict(module.named_buffers())["1.running_mean"])
    assert not any(part.training for part in average.module.modules())


def test_frozen_norms_have_nothing_to_settle() -> None:
    module = network()
    average = Ema(module, 0.9)
    assert average.has_statistics(module)
    module[1].eval()
    assert not average.has_statistics(module)
    before = [buffer.clone() for buffer in average.module.buffers()]
    average.settle(module, torch.rand(8, 1, 3, 3), share=1.0)
    assert all(torch.equal(*pair) for pair in zip(before, average.module.buffers(), strict=True))
