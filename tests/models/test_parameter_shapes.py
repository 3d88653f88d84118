"""What a model's gradients weigh."""

from __future__ import annotations

from math import prod

import pytest
import torch
from torch import nn

from steadytrain.config import Model
from steadytrain.errors import ModelError
from steadytrain.models.build import parameter_shapes
from steadytrain.models.nets import BUILTINS


class ReadsAValue(nn.Module):
    """A network that cannot be built without values: it looks at one as it is made."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.fc = nn.Linear(3, num_classes)
        if float(self.fc.weight.detach().abs().max()) > 0:
            self.fc.bias.requires_grad_(False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.fc(images.mean((2, 3)))
        return scores


def test_shapes_are_those_of_the_parameters_in_order() -> None:
    name, shapes = parameter_shapes(Model("resnet20"), num_classes=10)
    module = BUILTINS["resnet20"](num_classes=10, channels=3, size=32)
    assert name == "resnet20" and shapes == [list(parameter.shape) for parameter in module.parameters()]


def test_timms_resnet50_has_25_557_032_values_in_161_tensors() -> None:
    name, shapes = parameter_shapes(Model("resnet50"))
    assert (name, len(shapes), sum(map(prod, shapes))) == ("timm/resnet50", 161, 25_557_032)


def test_a_network_that_reads_values_is_built_with_them() -> None:
    factory = f"{__name__}:{ReadsAValue.__name__}"
    assert parameter_shapes(Model(factory), num_classes=5, allow_import=True) == (factory, [[5, 3]])


def test_no_random_number_is_drawn() -> None:
    before = torch.get_rng_state()
    parameter_shapes(Model("mlp"))
    assert torch.equal(torch.get_rng_state(), before)


def test_an_unknown_model_is_refused() -> None:
    with pytest.raises(ModelError, match="there is no model 'resnet5O'"):
        parameter_shapes(Model("resnet5O"))
