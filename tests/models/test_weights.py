"""Weights into networks: every key accounted for, real networks still right, bodies bit for bit."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from steadytrain import models
from steadytrain.config import Model, Precision
from steadytrain.errors import ModelError
from steadytrain.models.class_names import imagenet_synsets
from steadytrain.models.weights import find_head, load_weights, under, without_prefixes
from steadytrain.training import precision

MOBILENET = "weights/mobilenetv2_100/mobilenetv2_100_timm_layout.safetensors"
SQUEEZENET = "weights/squeezenet1.1/squeezenet1_1_torchvision_layout.pth"
SMALL = ("digits", "inception-bn-28-small", "lenet", "mlp", "resnet20")


def network(name: str = "digits", classes: int = 10, channels: int = 3, **more: Any) -> models.Built:
    torch.manual_seed(classes)
    return models.build(Model(name, **more), num_classes=classes, channels=channels, size=16)


def saved(folder: Path, state: dict[str, Tensor], header: dict[str, Any] | None = None) -> str:
    path = folder / "weights.safetensors"
    save_file(state, path, metadata={"steadytrain": json.dumps(header)} if header else None)
    return str(path)


@pytest.fixture(scope="session")
def photographs(extracted: Callable[[str], Path]) -> Tensor:
    """uint8[50, 224, 224, 3]: one image of every 20th class of ImageNet, in order; shorter side 256, centre."""
    files = sorted(extracted("imagenet-sample-200.tar").glob("*.JPEG"))[::4]
    return torch.from_numpy(np.stack([_centre(Image.open(path).convert("RGB")) for path in files]))


def _centre(image: Image.Image) -> np.ndarray[Any, np.dtype[np.uint8]]:
    scale = 256 / min(image.size)
    image = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BILINEAR)
    left, top = (image.width - 224) // 2, (image.height - 224) // 2
    return np.asarray(image.crop((left, top, left + 224, top + 224)))


def accuracy(built: models.Built, images: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> float:
    policy = precision.Policy(Precision(), torch.device("cpu"))
    module = policy.prepare(built.module).eval()
    with torch.no_grad():
        logits = torch.cat([module(policy.images(part, mean, std)) for part in images.chunk(8)])
    return float((logits.argmax(1) == torch.arange(len(images)) * 20).float().mean())


def test_mobilenet_is_right_on_photographs(data_folder: Path, photographs: Tensor) -> None:
    model = Model("timm/mobilenetv2_100", weights=str(data_folder / MOBILENET), options={"pad_type": "same"})
    built = models.build(model, num_classes=1000, channels=3, size=224)
    # Its maker scaled images to [-1, 1], which the file does not say.
    assert accuracy(built, photographs, (0.5,) * 3, (0.5,) * 3) == pytest.approx(0.82, abs=0.03)
    assert built.scaling_guessed
    assert models.num_outputs(model) == 1000


def test_squeezenet_of_torchvision_is_right_on_photographs(data_folder: Path, photographs: Tensor) -> None:
    model = Model("torchvision.models:squeezenet1_1", weights=str(data_folder / SQUEEZENET))
    built = models.build(model, num_classes=1000, channels=3, size=224, allow_import=True)
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    assert accuracy(built, photographs, mean, std) == pytest.approx(0.64, abs=0.03)
    assert built.notes == ()
    assert built.head == ("classifier.1",)
    assert models.num_outputs(model, allow_import=True) == 1000


@given(name=st.sampled_from(SMALL), before=st.integers(2, 12), after=st.integers(2, 12))
@settings(deadline=None, max_examples=15)
def test_a_replaced_head_leaves_the_body_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory, name: str, before: int, after: int
) -> None:
    first = network(name, before)
    path = saved(tmp_path_factory.mktemp("weights"), first.module.state_dict())
    second = network(name, after, weights=path)
    old, new = first.module.state_dict(), second.module.state_dict()
    body = [key for key in new if not under(key, second.head)]
    assert all(torch.equal(old[key], new[key]) for key in body)
    head = [key for key in new if under(key, second.head)]
    assert head and all(torch.equal(old[key], new[key]) for key in head) is (before == after)
    note = f"the classifier of {before:,} classes was replaced by a fresh one for {after:,}"
    assert (note in second.notes) is (before != after)


@pytest.mark.parametrize("name", ["timm/mobilenetv2_100", "torchvision.models:squeezenet1_1"])
def test_a_fresh_head_begins_at_chance(tmp_path: Path, name: str) -> None:
    first = models.build(Model(name), num_classes=1000, channels=3, size=64, allow_import=True)
    model = Model(name, weights=saved(tmp_path, first.module.state_dict()))
    built = models.build(model, num_classes=10, channels=3, size=64, allow_import=True)
    logits = built.module(torch.randn(16, 3, 64, 64))
    loss = nn.functional.cross_entropy(logits, torch.arange(16) % 10)
    assert loss.item() == pytest.approx(2.303, abs=0.15)  # log 10; timm's own fresh classifier has 7
    loss.backward()  # type: ignore[no-untyped-call]
    assert all(p.grad is not None and p.grad.any() for p in built.module.parameters())


def test_a_file_without_a_classifier_gets_a_fresh_one(tmp_path: Path) -> None:
    state = {key: value for key, value in network().module.state_dict().items() if not key.startswith("fc")}
    built = network(weights=saved(tmp_path, state))
    assert built.notes == ("no classifier in it: a fresh one for 10",)


def test_all_that_does_not_fit_is_listed_at_once() -> None:
    built = network()
    state = dict(built.module.state_dict())
    state["stem.weight"] = state.pop("features.0.weight")
    state["features.1.bias"] = torch.zeros(7)
    with pytest.raises(ModelError) as caught:
        load_weights(built.module, state, head=built.head, what="the weights of a.pth and digits")
    assert str(caught.value) == (
        "the weights of a.pth and digits do not fit: 1 missing (features.0.weight); 1 not expected (stem.weight);"
        " 1 of another shape (features.1.bias (7,) instead of (32,)). Are they the weights of another model?"
    )


def test_a_long_list_is_shortened() -> None:
    built = network("resnet20")
    with pytest.raises(ModelError, match=r"97 missing \(conv1.weight, .* and 89 more\)") as caught:
        load_weights(built.module, {"x": torch.zeros(1)}, head=("none",), what="these")
    assert len(str(caught.value)) < 400


def test_counters_of_old_files_may_be_missing(tmp_path: Path) -> None:
    state = {k: v for k, v in network().module.state_dict().items() if not k.endswith("num_batches_tracked")}
    assert network(weights=saved(tmp_path, state)).notes == ()


@given(st.lists(st.sampled_from(["module.", "_orig_mod."]), max_size=2, unique=True))
def test_wrappers_names_are_taken_off(prefixes: list[str]) -> None:
    state = {f"{''.join(prefixes)}{name}": torch.zeros(1) for name in ("a.weight", "module.b")}
    assert set(without_prefixes(state, ["a.weight", "module.b"])) == {"a.weight", "module.b"}


@pytest.mark.parametrize(("number", "wanted"), [(3, 1), (1, 3)])
def test_grey_and_colour_nets_agree_on_grey_images(tmp_path: Path, number: int, wanted: int) -> None:
    first = network("resnet20", channels=number)
    second = network("resnet20", channels=wanted, weights=saved(tmp_path, first.module.state_dict()))
    grey = torch.rand(2, 1, 16, 16)
    ours, theirs = (built.module.eval()(grey.expand(-1, c, -1, -1)) for built, c in ((first, number), (second, wanted)))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert re.search(r"conv1.weight was adapted to (grey|colour) images", second.notes[0])


def test_a_transformers_positions_are_resized(tmp_path: Path) -> None:
    options: Any = {"depth": 1, "embed_dim": 48, "num_heads": 3}
    model = Model("timm/vit_tiny_patch16_224", options=options)
    first = models.build(model, num_classes=4, channels=3, size=64)
    path = saved(tmp_path, first.module.state_dict())
    second = models.build(Model(model.name, weights=path, options=options), num_classes=4, channels=3, size=96)
    old, new = first.module.state_dict(), second.module.state_dict()
    assert (old["pos_embed"].shape, new["pos_embed"].shape) == ((1, 17, 48), (1, 37, 48))
    assert all(torch.equal(old[key], new[key]) for key in new if key != "pos_embed")


def in_its_authors_names(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """ConvNeXt's parameters as its authors publish them: other names, 1x1 convolutions in place of linear layers."""
    renamed = [
        (r"^stem\.", "downsample_layers.0."),
        (r"^stages\.(\d+)\.blocks\.", r"stages.\1."),
        (r"^stages\.(\d+)\.downsample\.", r"downsample_layers.\1."),
        (r"\.conv_dw\.", ".dwconv."),
        (r"\.mlp\.fc(\d)\.", r".pwconv\1."),
        (r"^head\.norm\.", "norm."),
        (r"^head\.fc\.", "head."),
    ]
    values = {}
    for name, value in state.items():
        for pattern, by in renamed:
            name = re.sub(pattern, by, name)
        values[name] = value.flatten(1) if value.ndim == 4 and value.shape[2:] == (1, 1) else value
    return values


def test_a_foreign_layout_is_converted_with_its_classifier(tmp_path: Path) -> None:
    name = "timm/convnext_atto"
    state = models.build(Model(name), num_classes=20, channels=3, size=64).module.state_dict()
    model = Model(name, weights=saved(tmp_path, in_its_authors_names(state)))
    assert models.num_outputs(model) == 20
    same = models.build(model, num_classes=20, channels=3, size=64)
    assert all(torch.equal(value, state[key]) for key, value in same.module.state_dict().items())
    other = models.build(model, num_classes=5, channels=3, size=64)
    assert other.notes[0] == "the classifier of 20 classes was replaced by a fresh one for 5"


def test_auxiliary_classifiers_are_left_out(tmp_path: Path) -> None:
    first = network()
    beside = {"AuxLogits.fc.weight": torch.zeros(10, 4), "aux1.conv.weight": torch.zeros(4, 3, 1, 1)}
    built = network(weights=saved(tmp_path, first.module.state_dict() | beside))
    assert built.notes == ("its auxiliary classifiers are left out",)
    assert all(torch.equal(v, first.module.state_dict()[k]) for k, v in built.module.state_dict().items())


def test_an_average_of_torchs_is_read(tmp_path: Path) -> None:
    first = network("resnet20")
    path = tmp_path / "checkpoint.pth"  # as torchvision's reference scripts write it
    torch.save({"model": {}, "model_ema": AveragedModel(first.module).state_dict()}, path)
    built = network("resnet20", weights=str(path))
    assert built.notes == (f"the averaged weights (model_ema) of {path} are used",)
    assert all(torch.equal(v, first.module.state_dict()[k]) for k, v in built.module.state_dict().items())


def test_our_own_files_bring_their_preprocessing_and_licence(tmp_path: Path) -> None:
    header = {
        "input": {"size": 24, "mean": [0.1, 0.2, 0.3], "std": [1, 1, 1], "channels": 3},
        "licence": "cc-by-nc-4.0",
    }
    built = network(weights=saved(tmp_path, network().module.state_dict(), header))
    assert (built.input.size, built.input.mean, built.licence) == (24, (0.1, 0.2, 0.3), "cc-by-nc-4.0")
    assert built.notes[0].startswith("NON-COMMERCIAL weights")


def test_a_file_without_the_classifier_has_no_number_of_outputs(tmp_path: Path) -> None:
    path = saved(tmp_path, {"a": torch.zeros(1)})
    with pytest.raises(ModelError, match=r"has no classifier of digits \(fc\)"):
        models.num_outputs(Model("digits", weights=path))
    with pytest.raises(ModelError, match="digits has no weights file: give --weights FILE"):
        models.num_outputs(Model("digits"))


def test_a_head_is_found_where_nobody_named_it() -> None:
    net = nn.Sequential(nn.Conv2d(3, 10, 1), nn.Flatten(), nn.Linear(10, 10), nn.ReLU())
    assert find_head(net, 10) == ("2",)
    assert find_head(net, 11) == ()


def fc(built: models.Built) -> Any:
    """The classifier of the network ``digits``."""
    return built.module.get_submodule("fc")


def named(folder: Path, classes: list[str] | None, count: int = 3) -> tuple[str, models.Built]:
    """The file of a network with a classifier of these classes, and the network."""
    first = network(classes=count)
    return saved(folder, first.module.state_dict(), {"classes": classes} if classes else None), first


def retrained(weights: str, classes: list[str], name: str = "digits") -> models.Built:
    model = Model(name, weights=weights)
    return models.build(model, num_classes=len(classes), channels=3, size=16, classes=classes)


def test_rows_of_a_classifier_follow_the_names_of_the_classes(tmp_path: Path) -> None:
    path, first = named(tmp_path, ["bus", "car", "truck"])
    same = retrained(path, ["bus", "car", "truck"])
    assert same.notes == ()
    assert torch.equal(fc(same).weight, fc(first).weight)
    built = retrained(path, ["Truck", "bus", "car"])
    assert torch.equal(fc(built).weight, fc(first).weight[[2, 0, 1]])
    assert torch.equal(fc(built).bias, fc(first).bias[[2, 0, 1]])
    assert built.notes == ("the classifier's rows were put into the order of the data's classes",)


def test_classes_of_other_names_get_a_fresh_classifier_though_they_are_as_many(tmp_path: Path) -> None:
    path, first = named(tmp_path, ["bus", "car", "truck"])
    for classes in (["bleeding", "polyp", "ulcer"], ["0", "1", "2"]):
        built = retrained(path, classes)
        assert fc(built).weight.abs().max() < 0.06 < fc(first).weight.abs().max()
        assert not fc(built).bias.any()
        loss = nn.functional.cross_entropy(built.module.eval()(torch.randn(15, 3, 16, 16)), torch.arange(15) % 3)
        assert loss.item() == pytest.approx(1.099, abs=0.1)  # log 3
        listed = ", ".join(classes)
        replaced = f"the classifier of bus, car, truck was replaced by a fresh one for {listed}"
        assert built.notes == (f"{replaced}: no class has the same name",)
        body = [key for key in first.module.state_dict() if not under(key, first.head)]
        assert all(torch.equal(first.module.state_dict()[key], built.module.state_dict()[key]) for key in body)


@pytest.mark.parametrize(
    ("classes", "rows", "note"),
    [
        (["bus", "car", "van"], [0, 1, None], "keeps the rows of 2 of 3 classes, by name (bus, car); new: van"),
        (["ape", "car"], [None, 1], "keeps the rows of 1 of 2 classes, by name (car); new: ape"),
        (["car", "truck"], [1, 2], "keeps the rows of the data's 2 classes of 3, by name"),
        (
            ["auk", "bus", "car", "elk", "truck"],
            [None, 0, 1, None, 2],
            "3 of 5 classes, by name (bus, car, truck); new",
        ),
    ],
)
def test_classes_of_the_same_name_keep_their_rows(
    tmp_path: Path, classes: list[str], rows: list[int | None], note: str
) -> None:
    path, first = named(tmp_path, ["bus", "car", "truck"])
    built = retrained(path, classes)
    for place, row in enumerate(rows):
        if row is None:
            assert 0 < fc(built).weight[place].abs().max() < 0.06
            assert not fc(built).bias[place].any()
        else:
            assert torch.equal(fc(built).weight[place], fc(first).weight[row])
            assert torch.equal(fc(built).bias[place], fc(first).bias[row])
    (said,) = built.notes
    assert note in said


def test_weights_that_name_no_classes_keep_their_rows_by_place_and_it_is_said(tmp_path: Path) -> None:
    path, first = named(tmp_path, None)
    built = retrained(path, ["ape", "bee", "cow"])
    assert torch.equal(fc(built).weight, fc(first).weight)
    assert built.notes == ("the weights name no classes: their 3 outputs are taken for ape, bee, cow, in this order",)


def test_a_bare_classifier_of_1000_classes_is_taken_for_imagenets(tmp_path: Path) -> None:
    path, first = named(tmp_path, None, 1000)
    synsets = imagenet_synsets(1000)
    assert retrained(path, list(synsets)).notes == ("the weights name no classes: they are taken for ImageNet's",)
    turned = retrained(path, list(reversed(synsets)))
    assert torch.equal(fc(turned).weight, fc(first).weight.flip(0))
    numbers = retrained(path, [str(number) for number in range(1000)])
    assert torch.equal(fc(numbers).weight, fc(first).weight)
    assert "they are taken for the places of ImageNet's" in numbers.notes[0]
    others = retrained(path, [f"kind {number}" for number in range(1000)])
    assert torch.equal(fc(others).weight, fc(first).weight)
    assert "1,000 outputs are taken for kind 0, kind 1," in others.notes[0]


def test_two_classifiers_of_a_network_follow_the_names_alike(tmp_path: Path) -> None:
    """A distilled transformer has two."""
    shape: dict[str, Any] = {"channels": 3, "size": 32}
    spec: dict[str, Any] = {"options": {"depth": 1, "embed_dim": 32, "num_heads": 2}}
    first = models.build(Model("timm/deit_tiny_distilled_patch16_224", **spec), num_classes=2, **shape)
    state = {key: torch.randn_like(value) for key, value in first.module.state_dict().items()}
    path = saved(tmp_path, state, {"classes": ["car", "bus"]})
    model = Model("timm/deit_tiny_distilled_patch16_224", weights=path, **spec)
    built = models.build(model, num_classes=2, classes=["bus", "car"], **shape)
    assert built.head == ("head", "head_dist")
    after = built.module.state_dict()
    for key in ("head.weight", "head.bias", "head_dist.weight", "head_dist.bias"):
        assert torch.equal(after[key], state[key].flip(0))


def test_a_network_is_built_for_the_size_that_its_weights_were_trained_at(tmp_path: Path) -> None:
    model = Model("timm/vit_tiny_patch16_224", options={"depth": 1})
    first = models.build(model, num_classes=2, channels=3, size=64)
    path = saved(tmp_path, first.module.state_dict(), {"input": {"size": 64}})
    built = models.build(replace(model, weights=path), num_classes=2, channels=3, size=None)
    assert built.input.size == 64
    with torch.no_grad():
        images = torch.randn(1, 3, 64, 64)
        assert torch.equal(built.module.eval()(images), first.module.eval()(images))


@pytest.mark.parametrize(
    "prefix", ["net.", "backbone.", "module.model._orig_mod.", "timm_model.", "ema.module.", "a.b.c."]
)
def test_any_prefix_is_taken_off(tmp_path: Path, prefix: str) -> None:
    first = network("resnet20")
    state = {f"{prefix}{name}": value for name, value in first.module.state_dict().items()}
    beside = {"criterion.weight": torch.ones(3), "val_acc.total": torch.zeros(1)}
    path = saved(tmp_path, state | beside)
    built = network("resnet20", weights=path)
    assert built.notes == ("tensors beside the network are left out: criterion.weight, val_acc.total",)
    assert all(torch.equal(v, first.module.state_dict()[k]) for k, v in built.module.state_dict().items())
    assert models.num_outputs(Model("resnet20", weights=path)) == 10


def test_wrappers_inside_a_network_are_taken_out(tmp_path: Path) -> None:
    first = network("resnet20")
    state = {name.replace("layer1.", "layer1.module._orig_mod."): v for name, v in first.module.state_dict().items()}
    built = network("resnet20", weights=saved(tmp_path, state))
    assert built.notes == ()
    assert all(torch.equal(v, first.module.state_dict()[k]) for k, v in built.module.state_dict().items())


def test_of_two_copies_the_average_is_taken_and_said(tmp_path: Path) -> None:
    first = network("resnet20")
    state = {f"model.{name}": value + 1 for name, value in first.module.state_dict().items()}
    state |= {f"ema_model.module.{name}": value for name, value in first.module.state_dict().items()}
    built = network("resnet20", weights=saved(tmp_path, state))
    assert built.notes == ("the weights under ema_model are used, not those under model",)
    assert all(torch.equal(v, first.module.state_dict()[k]) for k, v in built.module.state_dict().items())


def test_entries_beside_a_network_are_left_out_and_a_larger_network_is_refused(tmp_path: Path) -> None:
    first = network("resnet20")
    state = first.module.state_dict()
    extra = {"loss.weight": torch.ones(10), "total_ops": torch.zeros(1), "layer1.0.total_params": torch.zeros(1)}
    built = network("resnet20", weights=saved(tmp_path, state | extra))
    assert built.notes == ("tensors beside the network are left out: loss.weight",)
    with pytest.raises(ModelError, match=r"not expected \(layer1.3.bn1"):
        network("resnet20", weights=saved(tmp_path, network("resnet32").module.state_dict()))
    lightning = {f"model.{name}": value for name, value in network("resnet32").module.state_dict().items()}
    with pytest.raises(ModelError, match=r"not expected \(layer1.3.bn1"):
        network("resnet20", weights=saved(tmp_path, lightning))


@pytest.mark.parametrize("name", ["flexivit_small", "vit_tiny_patch16_224"])
def test_positions_are_resized_as_timm_resizes_those_of_the_architecture(tmp_path: Path, name: str) -> None:
    options: Any = {"depth": 1, "embed_dim": 48, "num_heads": 3}
    first: Any = timm.create_model(name, num_classes=4, **options)
    nn.init.normal_(first.pos_embed)
    path = saved(tmp_path, first.state_dict())
    overlay = {"file": path, "num_classes": 4}
    theirs: Any = timm.create_model(name, True, overlay, overlay, num_classes=4, img_size=160, **options)
    ours = models.build(Model(f"timm/{name}", weights=path, options=options), num_classes=4, channels=3, size=160)
    assert torch.equal(ours.module.get_parameter("pos_embed"), theirs.pos_embed)
