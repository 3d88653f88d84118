"""Networks that are found by the tensors of a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import timm
import torch
import torchvision
from safetensors.torch import save_file

from steadytrain.config import Model
from steadytrain.errors import ModelError
from steadytrain.models import find, find_model, require_fit
from steadytrain.models.nets import BUILTINS


def saved(path: Path, module: torch.nn.Module) -> Path:
    save_file(module.state_dict(), path)
    return path


def test_a_file_s_own_name_says_which_of_the_networks_that_it_fits_it_is_of(tmp_path: Path) -> None:
    net = timm.create_model("efficientnet_b0", num_classes=7)
    assert find_model(saved(tmp_path / "tf_efficientnet_b0-epoch3.safetensors", net)) == "timm/tf_efficientnet_b0"
    assert find_model(saved(tmp_path / "efficientnet_b0.safetensors", net)) == "timm/efficientnet_b0"
    (tmp_path / "config.json").write_text(json.dumps({"architecture": "tf_efficientnet_b0"}))
    assert find_model(saved(tmp_path / "model.safetensors", net)) == "timm/tf_efficientnet_b0"


@pytest.mark.slow
def test_tensors_alone_say_which_network_they_are_of_or_which_it_may_be(tmp_path: Path) -> None:
    messages: list[str] = []
    small = BUILTINS["resnet20"](num_classes=3, channels=3, size=32)
    assert find_model(saved(tmp_path / "a.safetensors", small), messages.append) == "resnet20"
    assert "looking for a network" in messages[0]
    wrapped = torch.nn.DataParallel(timm.create_model("resnet18d", num_classes=5))
    torch.save({"state_dict": wrapped.state_dict()}, tmp_path / "last.pth")
    assert find_model(tmp_path / "last.pth") == "timm/resnet18d"
    net = saved(tmp_path / "b.safetensors", timm.create_model("efficientnet_b0"))
    with pytest.raises(ModelError, match=r"its tensors fit .*timm/tf_efficientnet_b0.*: name it with --model NAME"):
        find_model(net)


@pytest.mark.slow
def test_torchvision_s_own_networks_are_found_and_what_is_none_is_refused(tmp_path: Path) -> None:
    net = saved(tmp_path / "a.safetensors", torchvision.models.squeezenet1_1(num_classes=4))
    assert find_model(net) == "torchvision/squeezenet1_1"
    save_file({"some.weight": torch.zeros(3)}, tmp_path / "b.safetensors")
    with pytest.raises(ModelError, match="no network of steady models has such tensors: name it with --model NAME"):
        find_model(tmp_path / "b.safetensors")


def test_weights_of_another_network_are_refused_before_there_are_images(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.safetensors", timm.create_model("resnet18"))
    state = torch.get_rng_state()
    require_fit(find("timm/resnet18"), Model("timm/resnet18", weights=str(path)), size=None)
    with pytest.raises(ModelError, match="do not fit"):
        require_fit(find("timm/resnet34"), Model("timm/resnet34", weights=str(path)), size=None)
    assert torch.equal(torch.get_rng_state(), state)
