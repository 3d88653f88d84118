"""Synchronous batch norms: two ranks with halves of a batch are as one process that has all of it."""

from __future__ import annotations

import torch
from tests.distributed.ranks import as_group
from timm.layers.norm_act import BatchNormAct2d
from torch import nn

from steadytrain.distributed.ddp import DDPEngine
from steadytrain.distributed.process_group import Group

PARTS = 2


def _net() -> nn.Sequential:
    torch.manual_seed(3)
    norms = nn.BatchNorm2d(4), BatchNormAct2d(5, act_layer=nn.ReLU)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), norms[0], nn.ReLU(), nn.Conv2d(4, 5, 3), norms[1], nn.Flatten(), nn.LazyLinear(3)
    )


def _images() -> torch.Tensor:
    return 3 + torch.randn(8, 2, 7, 7, generator=torch.Generator().manual_seed(5))


def _trained(net: nn.Module, call: nn.Module, images: torch.Tensor, engine: DDPEngine | None) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(2):
        loss = call(images).square().mean()
        loss.backward() if engine is None else engine.backward(loss, last=True)
        optimizer.step()
        optimizer.zero_grad()


def _half(group: Group) -> dict[str, torch.Tensor]:
    net = _net()
    net(_images())  # the lazy layer gets its weights
    net.load_state_dict(_state())
    engine = DDPEngine(group, torch.device("cpu"), synchronise_norms=True)
    _trained(net, engine.prepare(net), _images().chunk(PARTS)[group.world.rank], engine)
    net.eval()
    with torch.no_grad():
        return {**net.state_dict(), "logits": net(_images())}


def _state() -> dict[str, torch.Tensor]:
    net = _net()
    net(_images())
    return _net_from(net)


def _net_from(net: nn.Module) -> dict[str, torch.Tensor]:
    for part in net.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.reset_running_stats()
    return {name: one.clone() for name, one in net.state_dict().items()}


def test_halves_of_a_batch_are_normalised_as_the_whole() -> None:
    alone = _net()
    alone(_images())
    alone.load_state_dict(_state())
    _trained(alone, alone, _images(), None)
    alone.eval()
    with torch.no_grad():
        whole = {**alone.state_dict(), "logits": alone(_images())}
    for told in as_group(_half, PARTS):
        assert told.keys() == whole.keys()
        for name, one in whole.items():
            torch.testing.assert_close(told[name], one, rtol=1e-4, atol=1e-5, msg=name)
