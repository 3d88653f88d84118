"""Training passes in blocks of channels: the same numbers but for rounding; what cannot be is refused with a reason."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from steadytrain.errors import ModelError
from steadytrain.training import precision

Forward = Callable[[Any, Tensor], Tensor]


class Net(nn.Module):
    """Convolutions of several kinds around an operation of the test's own, and a head."""

    def __init__(self, forward: Forward = lambda net, x: x) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True))
        self.more = nn.Sequential(*(nn.Conv2d(16, 16, 3, padding=1, bias=k > 0) for k in range(6)))
        self.norm = nn.BatchNorm2d(16)
        self.strided = nn.Conv2d(16, 16, 3, stride=2, padding=1, groups=4)
        self.last = nn.Sequential(nn.Conv2d(16, 24, 1, bias=False), nn.BatchNorm2d(24), nn.ReLU())
        self.head = nn.Linear(24, 5)
        self.own = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.last(self.own(self, self.more(self.first(x)))).mean((2, 3)))  # type: ignore[no-any-return]


def _flat(net: Any, x: Tensor) -> Tensor:
    return x.flatten(2).softmax(2).view(x.shape)


WAYS: dict[str, Forward] = {
    "nothing": lambda net, x: x,
    "residual": lambda net, x: functional.relu(net.norm(x) + x),
    "residual in place": lambda net, x: torch.relu(net.norm(x).add_(x)),
    "grouped, strided": lambda net, x: net.strided(x),
    "max-pooled": lambda net, x: functional.max_pool2d(x, 3, stride=2, padding=1),
    "max-pooled, ceiled": lambda net, x: functional.max_pool2d(x, 2, 2, ceil_mode=True),
    "max-pooled without a stride": lambda net, x: functional.max_pool2d(x, 2),
    "average-pooled": lambda net, x: functional.avg_pool2d(x, 2, 2),
    "average-pooled, padded": lambda net, x: functional.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
    "without such a form": _flat,
    "joined": lambda net, x: net.strided(torch.cat((x[:, :8], x[:, 8:] * 2), 1)),
    "indices": lambda net, x: functional.max_pool2d(x, 2, return_indices=True)[0],
    "a parameter added": lambda net, x: x + net.strided.bias.view(1, -1, 1, 1),
    "drawn": lambda net, x: functional.dropout(x, 0.3),
    "shape": lambda net, x: x.reshape(x.shape[0], 16, -1, x.size(3)),
}


def _gradients(net: nn.Module, images: Tensor) -> dict[str, Tensor]:
    net.zero_grad()
    torch.manual_seed(1)
    loss = functional.cross_entropy(net(images), torch.arange(len(images)) % 5)
    loss.backward()  # type: ignore[no-untyped-call]
    told = {name: one.grad for name, one in net.named_parameters() if one.grad is not None}
    return {"loss": loss.detach()} | told | {name: one.clone() for name, one in net.named_buffers()}


@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_loss_gradients_and_statistics_are_the_same_but_for_rounding(way: str, *, channels_last: bool) -> None:
    torch.manual_seed(0)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    net = Net(WAYS[way]).to(memory_format=layout)
    other = copy.deepcopy(net)
    images = torch.randn(6, 3, 13, 13).contiguous(memory_format=layout)
    precision.use_blocks(other, "net", channels_last=channels_last)
    seen: list[bool] = []
    other.last[0].register_forward_hook(lambda module, given, out: seen.append(out.is_mkldnn))
    one, same = _gradients(net, images), _gradients(other, images)
    assert seen == [True], "the last convolution gives blocks"
    assert one.keys() == same.keys()
    for name, value in one.items():
        apart = (same[name].double() - value.double()).norm()  # a ReLU of nearly 0 may open
        assert apart <= 0.01 * max(value.double().norm(), 0.1), name


def test_evaluation_names_and_copies_are_as_they_were() -> None:
    torch.manual_seed(0)
    net = Net(WAYS["residual"])
    images, names = torch.randn(4, 3, 8, 8), list(net.state_dict())
    before = net.eval()(images)
    precision.use_blocks(net.train(), "net", channels_last=False)
    assert list(net.state_dict()) == names and torch.equal(net.eval()(images), before)
    other = copy.deepcopy(net.train())
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert other(images).abs().max() == 0 < net(images).abs().max()
    other(images).sum().backward()
    assert all(one.grad is None for one in net.parameters())
    assert other.get_parameter("head.bias").grad is not None


def _overwrites(net: Any, x: Tensor) -> Tensor:
    y = net.norm(x)
    functional.relu(y, inplace=True)
    return y + x  # type: ignore[no-any-return]


def _chooses(net: Any, x: Tensor) -> Tensor:
    return x if x.mean() > 0 else -x


def _with_its_own_forward() -> nn.Module:
    net = Net()
    vars(net)["forward"] = lambda x: Net.forward(net, x).softmax(1)
    return net


@pytest.mark.parametrize(
    ("net", "reason"),
    [
        (_with_its_own_forward(), "its forward is not that of its class; leave it out"),
        (Net(_overwrites), "it reads norm after it was overwritten; leave it out"),
        (Net(_chooses), "its operations depend on what it is given"),
        (
            nn.Sequential(nn.Flatten(), nn.Linear(12, 5)),
            "too few of its operations .*0 conversions for 0 convolutions.; leave it out",
        ),
        (
            nn.Sequential(*(one for _ in range(3) for one in (nn.Conv2d(3, 3, 1), nn.SiLU()))),
            "too few of its operations .*6 conversions for 3 convolutions",
        ),
    ],
)
def test_what_cannot_be_is_refused_and_left_as_it_was(net: nn.Module, reason: str) -> None:
    with pytest.raises(ModelError, match=f"precision.blocked cannot be used with mine: {reason}"):
        precision.use_blocks(net, "mine", channels_last=True)
    assert getattr(vars(net).get("forward"), "traced", None) is None
