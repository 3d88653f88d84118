"""What passes of a few images show before a run: parameters that take no part, parts left out, passes of one image."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from steadytrain.config import Precision, Recipe
from steadytrain.errors import RecipeError
from steadytrain.events import Ended
from steadytrain.run import Run
from steadytrain.training import steps
from steadytrain.training.precision import Policy
from steadytrain.training.usage import find_usage

CPU = torch.device("cpu")
WriteModule = Callable[[str, str], Path]


class Net(nn.Module):
    """A network that leaves out its block when ``skips`` says so."""

    def __init__(self, skips: Callable[[Net, Tensor], bool]) -> None:
        super().__init__()
        self.body, self.block, self.spare = nn.Linear(12, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.norm, self.drop = nn.BatchNorm1d(4), nn.Dropout()
        self.skips, self.passes = skips, 0

    def forward(self, images: Tensor) -> Tensor:
        self.passes += 1
        values = self.drop(self.norm(self.body(images.flatten(1))))
        out: Tensor = values if self.skips(self, values) else self.block(values)
        return out


@pytest.mark.parametrize(
    ("skips", "reason"),
    [
        (lambda net, values: False, ""),
        (lambda net, values: bool(torch.rand(()) < 0.1), "it looks at a value in .*test_usage.py:"),
        (lambda net, values: values.abs().max().item() > 1e9, "it looks at a value in .*test_usage.py:"),
        (lambda net, values: len(values.nonzero()) == 0, "it looks at a value in .*test_usage.py:"),
        (lambda net, values: random.random() < 0.1, "it draws from Python's or NumPy's random numbers"),
        (lambda net, values: np.random.rand() < 0.1, "it draws from Python's or NumPy's random numbers"),
        (lambda net, values: net.passes % 2 == 0, "it has left out other ones each time"),
    ],
)
def test_a_network_that_may_leave_out_parts_is_known_before_the_run(
    skips: Callable[[Net, Tensor], bool], reason: str
) -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)  # else each pass may leave the block out, by chance
    module = Net(skips)
    assert module.norm.running_mean is not None
    before, states = random.getstate(), (torch.get_rng_state(), module.norm.running_mean.clone())
    usage = find_usage(module, Policy(Precision(), CPU), (2, 2, 3))
    assert (not usage.varies) if not reason else re.match(reason, usage.varies)
    assert set(usage.unused) == {"spare.weight", "spare.bias"} and usage.is_partial
    assert random.getstate() == before and torch.equal(torch.get_rng_state(), states[0])
    assert torch.equal(module.norm.running_mean, states[1])
    assert all(parameter.grad is None for parameter in module.parameters())


def test_frozen_parameters_are_not_said_to_be_unused() -> None:
    module = Net(lambda net, values: False)
    module.spare.bias.requires_grad_(False)
    [line] = find_usage(module, Policy(Precision(), CPU), (2, 2, 3)).notes(module)
    assert line == "1 parameter gets no gradient and stays as it is: spare.weight"


def test_what_a_network_refuses_is_left_to_the_run() -> None:
    assert not find_usage(nn.Linear(7, 2), Policy(Precision(), CPU), (2, 2, 3)).is_partial


POINT = """
from torch import nn

def make(num_classes, channels=3):
    return nn.Sequential(nn.Conv2d(channels, 4, 8), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, num_classes))
"""


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"batch_size": 1},
            r"batch_size=1 gives passes of one image.*\(1: Expected more than 1 .*--batch-size 2",
        ),
        (
            {"batch_size": 4, "optim.accumulate": 4},
            r"batch_size=4 for optim.accumulate=4 gives passes of one image.*--batch-size 8 or more, larger images",
        ),
    ],
)
def test_a_pass_of_one_image_through_a_batch_norm_of_single_values_is_refused_before_the_run(
    recipe: Recipe, tmp_path: Path, write_module: WriteModule, changes: dict[str, object], words: str
) -> None:
    write_module("point_net", POINT)
    run = Run.create(tmp_path / "run", recipe.with_({"model.name": "point_net:make", "data.size": 8, **changes}))
    with pytest.raises(RecipeError, match=words):
        list(steps(run))


def test_a_pass_of_one_image_is_taken_where_batch_norms_are_frozen(
    recipe: Recipe, tmp_path: Path, write_module: WriteModule
) -> None:
    write_module("point_frozen_net", POINT)
    changes = {"model.name": "point_frozen_net:make", "data.size": 8, "batch_size": 1, "model.batch_norm": "frozen"}
    changes |= {"budget.epochs": None, "budget.steps": 3}
    events = list(steps(Run.create(tmp_path / "run", recipe.with_(changes))))
    assert isinstance(events[-1], Ended) and events[-1].status == "finished"


VOLUMES = """
from torch import nn

def make(num_classes, channels=3):
    convolution = nn.Conv3d(1, 4, (channels, 3, 3))
    return nn.Sequential(nn.Unflatten(1, (1, channels)), convolution, nn.Flatten(), nn.Linear(144, num_classes))
"""


def test_a_network_with_parameters_of_five_dimensions_is_trained(
    recipe: Recipe, tmp_path: Path, write_module: WriteModule
) -> None:
    write_module("volume_net", VOLUMES)
    changes = {"model.name": "volume_net:make", "data.size": 8, "budget.epochs": None, "budget.steps": 3}
    events = list(steps(Run.create(tmp_path / "run", recipe.with_(changes))))
    assert isinstance(events[-1], Ended) and events[-1].status == "finished"
