"""Parameter groups: every trainable parameter once, norms and biases spared, frozen bodies left alone."""

from __future__ import annotations

from collections import Counter
from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from steadytrain import models, optim
from steadytrain.config import Model, Optim
from steadytrain.errors import ModelError
from steadytrain.models import Built, Input
from steadytrain.models.weights import under

Train = Literal["full", "head", "discriminative"]
TINY_VIT = Model("timm/vit_tiny_patch16_224", options={"depth": 2, "embed_dim": 48, "num_heads": 3})
NETS = {
    "resnet20": (Model("resnet20"), 16),
    "mlp": (Model("mlp"), 16),
    "mobilenet": (Model("timm/mobilenetv2_100"), 32),
    "transformer": (TINY_VIT, 32),
    "factory": (Model("torchvision.models:squeezenet1_1"), 64),
}


def build(net: str) -> Built:
    model, size = NETS[net]
    return models.build(model, num_classes=5, channels=3, size=size, allow_import=True)


@given(
    net=st.sampled_from(sorted(NETS)),
    train=st.sampled_from(["full", "head", "discriminative"]),
    decay=st.floats(0.1, 1),
    weight_decay=st.floats(0, 0.1),
)
@settings(deadline=None, max_examples=15)
def test_each_trainable_parameter_is_in_one_group(net: str, train: Train, decay: float, weight_decay: float) -> None:
    built = build(net)
    groups = models.parameter_groups(built, train=train, decay=decay, weight_decay=weight_decay)
    counts = Counter(id(p) for group in groups for p in group["params"])
    assert counts == Counter(id(p) for p in built.module.parameters() if p.requires_grad)
    assert all(group["params"] and 0 < group["lr_scale"] <= 1 for group in groups)
    assert len({group["name"] for group in groups}) == len(groups) or decay > 0.9
    decayed = {id(p) for group in groups if group["weight_decay"] for p in group["params"]}
    assert not any(id(p) in decayed for p in built.module.parameters() if p.ndim <= 1)


def test_what_a_network_asks_to_spare_is_spared() -> None:
    built = build("transformer")
    groups = models.parameter_groups(built, train="full", decay=1, weight_decay=0.05)
    spared = {id(p) for group in groups if group["weight_decay"] == 0 for p in group["params"]}
    parameters = dict(built.module.named_parameters())
    assert {id(parameters["pos_embed"]), id(parameters["cls_token"])} <= spared
    assert id(parameters["patch_embed.proj.weight"]) not in spared


def test_a_network_may_ask_for_rates_of_its_own() -> None:
    built = models.build(Model("quick8", options={"width": 8}), num_classes=5, channels=3, size=16)
    groups = models.parameter_groups(built, train="full", decay=1, weight_decay=0.1)
    scale = {id(p): group["lr_scale"] for group in groups for p in group["params"]}
    scales = {name: scale[id(p)] for name, p in built.module.named_parameters()}
    assert {name for name, value in scales.items() if value == 64} == {
        f"groups.{group}.norm{norm}.bias" for group in range(3) for norm in (1, 2)
    }
    assert set(scales.values()) == {1, 64}


def test_norms_and_biases_of_any_shape_are_spared() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.LayerNorm([4, 8, 8]), nn.Flatten(), nn.Linear(256, 5))
    groups = models.parameter_groups(Built(net, "mine:net", Input(), ("3",)), train="full", decay=1, weight_decay=0.1)
    decayed = {id(p) for group in groups if group["weight_decay"] for p in group["params"]}
    assert {name for name, p in net.named_parameters() if id(p) in decayed} == {"0.weight", "3.weight"}


@pytest.mark.parametrize("net", sorted(NETS))
def test_rates_fall_from_the_classifier_to_the_stem(net: str) -> None:
    built = build(net)
    groups = models.parameter_groups(built, train="discriminative", decay=0.5, weight_decay=0)
    scale = {id(p): group["lr_scale"] for group in groups for p in group["params"]}
    names = [(name, scale[id(p)]) for name, p in built.module.named_parameters()]
    assert {value for name, value in names if under(name, built.head)} == {1.0}
    body = [value for name, value in names if not under(name, built.head)]
    assert min(body) < max(body) <= 1
    assert all(float(torch.tensor(value).log2()) % 1 == 0 for value in body)


def test_layers_of_a_plain_net_are_its_top_level_modules() -> None:
    built = build("mlp")
    groups = models.parameter_groups(built, train="discriminative", decay=0.5, weight_decay=0.1)
    assert sorted({group["lr_scale"] for group in groups}) == [0.25, 0.5, 1.0]


@pytest.mark.parametrize("net", ["mobilenet", "resnet20"])
def test_training_the_head_leaves_the_body_bit_for_bit(net: str) -> None:
    built = build(net)
    before = {name: value.clone() for name, value in built.module.state_dict().items()}
    groups = models.parameter_groups(built, train="head", decay=1, weight_decay=0.1)
    optimizer = optim.build(Optim(lr=0.1), groups, lr=0.1, device=torch.device("cpu"))
    models.set_train_mode(built, "head")
    for _ in range(2):
        built.module(torch.rand(4, 3, 32, 32)).square().sum().backward()
        optimizer.step()
    moved = {name for name, value in built.module.state_dict().items() if not torch.equal(value, before[name])}
    assert moved == {name for name in before if under(name, built.head)}


def test_frozen_batch_norms_keep_their_statistics_while_their_scales_and_shifts_are_trained() -> None:
    built = build("mobilenet")
    before = {name: value.clone() for name, value in built.module.state_dict().items()}
    groups = models.parameter_groups(built, train="full", decay=1, weight_decay=0.0)
    optimizer = optim.build(Optim(lr=0.1), groups, lr=0.1, device=torch.device("cpu"))
    models.set_train_mode(built, "full", batch_norm="frozen")
    built.module(torch.rand(4, 3, 32, 32)).square().sum().backward()
    optimizer.step()
    kept = {name for name, value in built.module.state_dict().items() if torch.equal(value, before[name])}
    assert kept == {name for name, _ in built.module.named_buffers()}


def test_training_everything_moves_running_statistics() -> None:
    built = build("resnet20")
    models.set_train_mode(built, "full")
    assert all(part.training for part in built.module.modules())


@pytest.mark.parametrize("train", ["full", "discriminative"])
def test_a_network_without_parameters_is_refused(train: Train) -> None:
    built = Built(nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Dropout(), nn.Flatten()), "own", Input(), ())
    with pytest.raises(ModelError, match=r"own has no parameter that could be trained: give a network that has some"):
        models.parameter_groups(built, train=train, decay=0.5, weight_decay=0.0)


def test_head_mode_needs_a_known_head() -> None:
    built = Built(nn.Flatten(), "mine:flat", Input(), ())
    with pytest.raises(ModelError, match="the classifier of mine:flat is not known"):
        models.parameter_groups(built, train="head", decay=1, weight_decay=0)
