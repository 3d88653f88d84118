"""Modules and functions as models: their names, and what is made of them."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torchvision.models import resnet18

from steadytrain import models
from steadytrain.config import Model
from steadytrain.errors import ModelError
from steadytrain.models.objects import find_given


def net(num_classes: int, hidden: int = 4) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, hidden), nn.Linear(hidden, num_classes))


def test_what_can_be_imported_is_named_by_its_place() -> None:
    assert models.name_model("resnet20") == "resnet20"
    assert models.name_model(resnet18) == "torchvision.models.resnet:resnet18"
    assert models.name_model(net) == f"{__name__}:net"


def test_other_objects_have_names_that_the_same_code_gives_again() -> None:
    first, again, other = net(3), net(3), net(4)
    assert models.name_model(first) == models.name_model(again) != models.name_model(other)
    assert models.name_model(partial(net, hidden=5)) != models.name_model(partial(net, hidden=6))
    assert models.name_model(lambda num_classes: net(num_classes)).startswith("object:lambda-")


def test_networks_that_were_trained_have_names_of_their_own() -> None:
    def normed(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.GroupNorm(2, 4), nn.Flatten(), nn.LazyLinear(3))

    fresh, of_one, of_other = normed(0), normed(1), normed(1)
    assert models.name_model(fresh) == models.name_model(of_one) == models.name_model(of_other)
    of_one(torch.rand(4, 3, 8, 8))
    with torch.no_grad():
        of_other.get_parameter("2.weight").fill_(2)
    names = [models.name_model(module) for module in (fresh, of_one, of_other)]
    assert len(set(names)) == 3
    assert find_given(names[1]) is of_one


def test_a_module_is_copied_with_its_weights() -> None:
    module = net(3).double().eval()
    built = models.build(Model(models.name_model(module)), num_classes=3, channels=3, size=8)
    assert built.head == ("2",)
    assert all(torch.equal(built.module.state_dict()[key], value.float()) for key, value in module.state_dict().items())
    built.module.get_parameter("2.bias").data.zero_()
    assert module[2].bias.any()  # type: ignore[index]


def test_a_function_gets_what_it_takes() -> None:
    name = models.name_model(partial(net, hidden=5))
    built = models.build(Model(name), num_classes=7, channels=3, size=8)
    assert [value.shape[0] for value in built.module.parameters()] == [5, 5, 7, 7]


def test_what_is_no_classifier_of_the_data_is_refused() -> None:
    with pytest.raises(ModelError, match=r"gives \[2, 4\]: give it such a last layer"):
        models.build(Model(models.name_model(net(3))), num_classes=4, channels=3, size=8)
    with pytest.raises(ModelError, match="the model is an int; it must be a name, "):
        models.name_model(3)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="object:Net-12345678 is a Python object \\(Net\\), and was not given in this"):
        models.find("object:Net-12345678")
