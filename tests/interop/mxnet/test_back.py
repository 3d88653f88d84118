"""From torch to MXNet, and MXNet's zoo under the names of timm and torchvision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from tests.interop.mxnet.cases import Array, ask
from torch import nn

from steadytrain import models
from steadytrain.config import Model
from steadytrain.errors import ModelError
from steadytrain.interop.mxnet.checkpoint import open_checkpoint
from steadytrain.interop.mxnet.graph import build_network, with_loss
from steadytrain.interop.mxnet.match import match_known
from steadytrain.interop.mxnet.params import write_params
from steadytrain.interop.mxnet.symbol import Node, Symbol, write_symbol
from steadytrain.interop.mxnet.trace import TracedSymbol, export_symbol

NETS: dict[str, tuple[Any, int]] = {
    **{name: (name, 32) for name in ("mlp", "lenet", "digits", "resnet20", "inception-bn-28-small", "quick8")},
    "torchvision/resnet18": ("torchvision/resnet18", 64),
    "torchvision/squeezenet1_1": ("torchvision/squeezenet1_1", 64),
    "torchvision/mobilenet_v2": ("torchvision/mobilenet_v2", 64),
    "torchvision/vgg11_bn": ("torchvision/vgg11_bn", 224),
    "timm/mobilenetv2_050": ("timm/mobilenetv2_050", 64),
}
SLOW = {"torchvision/vgg11_bn"}
ZOO = {
    "resnet18_v1": "timm/resnet18",
    "squeezenet1.1": "torchvision/squeezenet1_1",
    "mobilenet0.25": None,
    "resnet18_v2": None,
}
MORE = {
    "resnet34_v1": "timm/resnet34",
    "resnet50_v1": None,  # its strides stand in the first convolution of a block
    "resnet50_v2": None,
    "alexnet": "torchvision/alexnet",
    "squeezenet1.0": "torchvision/squeezenet1_0",
    "vgg11": "torchvision/vgg11",
    "vgg16": "torchvision/vgg16",
    "vgg16_bn": "torchvision/vgg16_bn",
    "densenet121": "timm/densenet121",
    "inceptionv3": "timm/inception_v3",
    "mobilenet1.0": "timm/mobilenetv1_100",
    "mobilenetv2_0.5": None,  # its first block has a 1x1 convolution more
}


def exported(name: str, size: int) -> tuple[nn.Module, TracedSymbol]:
    """A network with drawn weights and statistics, and its form in MXNet."""
    torch.manual_seed(0)
    module = models.build(Model(name), num_classes=10, channels=3, size=size).module.train()
    with torch.no_grad():
        for _ in range(2):  # so that moving statistics are no zeros and ones
            module(torch.randn(4, 3, size, size))
    return module.eval(), export_symbol(module, name=name, channels=3, size=size)


@pytest.mark.parametrize("name", [name for name in NETS if name not in SLOW])
def test_a_torch_network_goes_to_mxnets_operators_and_back(name: str) -> None:
    module, written = exported(*NETS[name])
    size = NETS[name][1]
    params = {key.partition(":")[2]: value for key, value in written.params.items()}
    network = build_network(written.symbol, params, size=size)
    network.module.load_state_dict(network.state(params), strict=False)
    x = torch.randn(2, 3, size, size)
    with torch.no_grad():
        torch.testing.assert_close(network.module.eval()(x), module(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("side", [9, 10])
@pytest.mark.parametrize("pool", [nn.MaxPool2d, nn.AvgPool2d])
def test_windows_that_torch_leaves_out_are_not_written_for_mxnet(pool: Any, side: int) -> None:
    module = nn.Sequential(pool(2, 4, 1, ceil_mode=True), nn.Flatten())  # of 9 pixels one more window has none of them
    written = export_symbol(module, name="pool", channels=2, size=side)
    network = build_network(written.symbol, {}, channels=2, size=side)
    x = torch.randn(2, 2, side, side)
    assert torch.equal(network.module(x), module(x))


def test_a_network_of_several_labels_ends_with_a_sigmoid_whatever_it_had() -> None:
    nodes = (Node("null", "data"), Node("null", "w"), Node("FullyConnected", "softmax", {}, ((0, 0), (1, 0))))
    bare = Symbol(nodes, ((2, 0),))
    single = with_loss(bare)
    assert single.nodes[-1].name == "softmax_output", "the name is taken by a layer"
    several = with_loss(single, is_multi_label=True)
    assert several == with_loss(bare, is_multi_label=True)
    assert with_loss(several, is_multi_label=True) == several and with_loss(several) == single == with_loss(single)
    svm = Symbol((*nodes, Node("SVMOutput", "svm", {}, ((2, 0), (1, 0)))), ((3, 0),))
    assert with_loss(svm) == svm


@pytest.mark.peer
def test_mxnet_loads_what_is_written_and_scores_equally(mxnet_python: str, tmp_path: Path) -> None:
    requests, expected = list[dict[str, Any]](), dict[str, Array]()
    for name, (model, size) in NETS.items():
        module, written = exported(model, size)
        key = name.replace("/", "-")
        files = {kind: str(tmp_path / f"{key}-{kind}") for kind in ("symbol.json", "0000.params")}
        write_symbol(Path(files["symbol.json"]), written.symbol)
        write_params(Path(files["0000.params"]), written.params)
        images = torch.randn(2, 3, size, size)
        np.save(tmp_path / f"{key}.npy", images.numpy())
        with torch.no_grad():
            expected[name] = module(images).softmax(1).numpy()
        request = {"symbol": files["symbol.json"], "params": files["0000.params"]}
        requests.append(
            {
                "do": "forward",
                "images": str(tmp_path / f"{key}.npy"),
                "out": str(tmp_path / f"{key}.out.npy"),
                **request,
            }
        )
    ask(mxnet_python, requests, tmp_path)
    for (name, wanted), request in zip(expected.items(), requests, strict=True):
        np.testing.assert_allclose(np.load(request["out"]), wanted, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.peer
@pytest.mark.parametrize("zoo", [ZOO, pytest.param(MORE, marks=pytest.mark.slow)], ids=["few", "all"])
def test_gluons_zoo_is_known_to_timm_and_torchvision(
    mxnet_python: str, tmp_path: Path, zoo: dict[str, str | None]
) -> None:
    requests: list[dict[str, Any]] = []
    for name in zoo:
        size = 299 if name == "inceptionv3" else 224
        prefix = str(tmp_path / name)
        images = np.random.RandomState(1).randn(2, 3, size, size).astype(np.float32)
        np.save(f"{prefix}.npy", images)
        requests.append({"do": "zoo", "name": name, "prefix": prefix, "size": size, "classes": 20})
        files = {"symbol": f"{prefix}-symbol.json", "params": f"{prefix}-0000.params", "images": f"{prefix}.npy"}
        requests.append({"do": "forward", "out": f"{prefix}.out.npy", **files})
    ask(mxnet_python, requests, tmp_path)
    for name, wanted in zoo.items():
        checkpoint = open_checkpoint(f"mxnet:{tmp_path / name}")
        network = checkpoint.network()
        state = network.state(checkpoint.params)
        matched = match_known(network, state)
        assert (None if matched is None else matched.known.name) == wanted, name
        network.module.load_state_dict(state, strict=False)
        module: nn.Module = network.module
        if matched is not None:
            module = matched.known.make(20)
            module.load_state_dict(matched.state)
        outputs = np.load(tmp_path / f"{name}.out.npy")
        with torch.no_grad():
            ours = module.eval()(torch.from_numpy(np.load(tmp_path / f"{name}.npy"))).numpy()
        assert np.abs(ours - outputs).max() <= 1e-4 * max(1.0, float(np.abs(outputs).max())), name


def test_a_checkpoint_of_mxnet_gets_torchvisions_names(data_folder: Path) -> None:
    weights = data_folder / "weights" / "squeezenet1.1"
    checkpoint = open_checkpoint(str(weights / "squeezenet1.1-0000.params"))
    network = checkpoint.network()
    matched = match_known(network, network.state(checkpoint.params))
    assert matched is not None and matched.known.name == "torchvision/squeezenet1_1" and matched.difference < 1e-5
    published = torch.load(weights / "squeezenet1_1_torchvision_layout.pth", weights_only=True)
    assert matched.state.keys() == published.keys()
    assert all(torch.equal(matched.state[key], published[key]) for key in published)


class Odd(nn.Module):
    """A network with calls that MXNet has no operator for."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc = nn.GroupNorm(1, 3), nn.Linear(3, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.fc(torch.cumsum(self.norm(x), 1).mean((2, 3)))
        return logits


class Scaled(nn.Module):
    """A sum of which MXNet's operator would forget the factor."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.add(x, x, alpha=2).mean((2, 3))


def test_calls_without_an_operator_are_named_at_once() -> None:
    with pytest.raises(ModelError, match=r"add with alpha"):
        export_symbol(Scaled(), name="scaled", channels=3, size=8)
    with pytest.raises(ModelError, match=r"odd has 2 calls without an operator .*: GroupNorm \(norm\); cumsum"):
        export_symbol(Odd(), name="odd", channels=3, size=8)
    same = models.build(Model("timm/tf_mobilenetv3_small_minimal_100"), num_classes=3, channels=3, size=64).module
    with pytest.raises(ModelError, match=r"Conv2dSame, a convolution with a forward of its own \(conv_stem"):
        export_symbol(same, name="tf", channels=3, size=64)
    with pytest.raises(ModelError, match=r"adaptive pooling from \(6, 6\) to \(7, 7\): another --size"):
        export_symbol(torchvision.models.vgg11(num_classes=3, init_weights=False), name="vgg11", channels=3, size=192)
