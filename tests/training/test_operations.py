"""What a network asks of torch, counted on networks whose operations are known."""

from __future__ import annotations

import linecache
from collections.abc import Callable

import pytest
import torch
from torch import nn

from steadytrain.training.profile.step_cost import Operations


def _seen(work: Callable[[], object]) -> Operations:
    seen = Operations()
    with seen:
        work()
    return seen


def test_operations_are_counted_one_by_one() -> None:
    a, b = torch.ones(3, 3), torch.ones(3, 3)
    assert _seen(lambda: torch.relu(a + b) * 2).count == 3


def test_a_backward_pass_is_counted_too() -> None:
    layer, images = nn.Linear(4, 2), torch.ones(5, 4)
    forward = _seen(lambda: layer(images))
    both = _seen(lambda: layer(images).sum().backward())
    assert both.count > 2 * forward.count


def test_a_convolution_multiplies_what_its_shape_says() -> None:
    layer = nn.Conv2d(3, 8, 3, padding=1, bias=False)
    assert _seen(lambda: layer(torch.ones(2, 3, 10, 10))).flops == 2 * 2 * 8 * 10 * 10 * 3 * 3 * 3


def test_multiplications_of_a_backward_pass_are_left_out_when_asked() -> None:
    layer, images = nn.Linear(4, 2, bias=False), torch.ones(5, 4)
    seen = Operations()
    with seen:
        loss = layer(images).sum()
        seen.counts_flops = False
        loss.backward()
    assert seen.flops == 2 * 5 * 4 * 2


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.sum().item(),
        lambda x: float(x[0]),
        lambda x: 1 if x.sum() > 0 else 0,
        lambda x: int(x[0]),
        lambda x: f"{x[0].item():.3f}",
    ],
    ids=["item", "float", "if", "int", "format"],
)
def test_a_line_that_reads_a_scalar_is_named(wait: Callable[[torch.Tensor], object]) -> None:
    x = torch.ones(3)
    (place,) = _seen(lambda: wait(x)).waits
    file, _, number = place.rpartition(":")
    assert file == __file__
    assert "lambda x:" in linecache.getline(file, int(number))


def test_a_line_is_named_once_with_how_often_it_waited() -> None:
    x = torch.ones(4)
    assert list(_seen(lambda: [float(element) for element in x]).waits.values()) == [4]


def test_what_is_on_the_host_already_is_no_wait() -> None:
    x = torch.arange(4.0)
    assert not _seen(lambda: (x.tolist(), x.numpy(), x.nonzero(), x[x > 1], x.cpu(), x.shape)).waits


def test_a_wait_inside_torch_is_named_by_the_line_that_called_it() -> None:
    norm = nn.BatchNorm1d(2, momentum=None).train()  # reads how many batches it has seen
    (place,) = _seen(lambda: norm(torch.ones(4, 2))).waits
    assert place.rpartition(":")[0] == __file__
