"""Checkpoints as people have them: several outputs, poolings of 2015, Gluon's parameters, files that are not there."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.interop.mxnet.cases import Array, Case, Entry, Graph, ask
from tests.interop.mxnet.test_graph import as_08

from steadytrain.cli import main
from steadytrain.config import Model
from steadytrain.errors import ModelError
from steadytrain.interop.mxnet.checkpoint import open_checkpoint
from steadytrain.interop.mxnet.params import read_params, write_params
from steadytrain.interop.mxnet.symbol import Symbol, read_symbol, write_symbol
from steadytrain.models import build
from steadytrain.training import restore

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 1234\n"


def conv(g: Graph, x: Entry, filters: int, channels: int, kernel: int = 3, **attrs: object) -> Entry:
    name = f"conv{len(g.nodes)}"
    weight, bias = g.p(f"{name}_weight", filters, channels, kernel, kernel), g.p(f"{name}_bias", filters)
    return g.op("Convolution", x, weight, bias, kernel=(kernel, kernel), num_filter=filters, **attrs)


def dense(g: Graph, x: Entry, units: int, inputs: int, name: str = "fc") -> Entry:
    return g.op("FullyConnected", x, g.p(f"{name}_weight", units, inputs), g.p(f"{name}_bias", units), num_hidden=units)


def classifier(g: Graph, side: int, **pooling: object) -> tuple[Entry, Entry]:
    """A convolution, a pooling whose result has ``side`` pixels, and a dense layer; its features and its softmax."""
    x = conv(g, g.var("data"), 4, 3, stride=(2, 2), pad=(1, 1))
    features = g.op("Flatten", g.op("Pooling", x, kernel=(3, 3), stride=(2, 2), pool_type="max", **pooling))
    return features, g.op("SoftmaxOutput", dense(g, features, 5, 4 * side * side), g.var("softmax_label"))


def save(folder: Path, g: Graph, *heads: Entry, text: str | None = None, version: int = 10901) -> Path:
    """Write a pair of files; return the ``.params``."""
    symbol = Symbol(tuple(g.nodes), heads, version)
    if text is None:
        write_symbol(folder / "net-symbol.json", symbol)
    else:
        (folder / "net-symbol.json").write_text(text)
    write_params(folder / "net-0000.params", Case(symbol, g.params, np.zeros(0), g.aux).prefixed)
    return folder / "net-0000.params"


def test_poolings_of_2015_round_up_where_only_so_the_arrays_fit(tmp_path: Path) -> None:
    """112 pixels, windows of 3 at a distance of 2: 55 today, 56 in 2015."""
    for side, rounded_up in ((56, True), (55, False)):
        g = Graph(0)
        _, end = classifier(g, side)
        path = save(tmp_path, g, end, text=as_08(Symbol(tuple(g.nodes), (end,))))
        checkpoint = open_checkpoint(str(path))
        assert checkpoint.size == 224
        assert any("poolings are those of 2015" in note for note in checkpoint.notes) == rounded_up
        assert checkpoint.network().module(torch.zeros(1, 3, 224, 224)).shape == (1, 5)
    save(tmp_path, *_of_56())  # a symbol of today that lacks the parameter means the default of today
    assert open_checkpoint(str(path)).size == 227


def _of_56() -> tuple[Graph, Entry]:
    g = Graph(0)
    return g, classifier(g, 56)[1]


def test_of_several_outputs_the_classifier_is_taken_and_said(tmp_path: Path) -> None:
    g = Graph(0)
    features, end = classifier(g, 55)
    for heads in ((features, end), (end, features)):
        checkpoint = open_checkpoint(str(save(tmp_path, g, *heads)))
        assert checkpoint.notes[0].startswith("of its outputs softmaxoutput")
        assert checkpoint.network().num_outputs == 5
    other = g.op("SoftmaxOutput", dense(g, features, 5, 4 * 55 * 55, "aux"), g.var("aux_label"))
    path = save(tmp_path, g, end, other)
    with pytest.raises(ModelError, match=r"returns 2 values .* save the one that is meant alone"):
        open_checkpoint(str(path))
    layer = g.nodes[features[0]].name
    cut = open_checkpoint(str(path), layer_before_fullc=layer).network(num_classes=3, layer_before_fullc=layer)
    assert cut.num_outputs == 3


def test_a_map_of_answers_is_no_classifier(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    g = Graph(0)
    end = g.op("SoftmaxOutput", conv(g, g.var("data"), 10, 3, stride=(8, 8)), g.var("label"), multi_output=True)
    path = save(tmp_path, g, end)
    assert main(["convert", str(path), "-o", str(tmp_path / "map.safetensors")]) == 2
    assert "gives 10 x 28 x 28 values for images of 224x224 pixels, a map of answers" in capsys.readouterr().err
    assert not (tmp_path / "map.safetensors").exists()


def test_a_network_of_an_unusual_size_is_converted_with_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    g = Graph(0)
    x = g.op("Flatten", conv(g, g.var("data"), 4, 3))
    path = save(tmp_path, g, g.op("SoftmaxOutput", dense(g, x, 3, 4 * 71 * 71), g.var("label")))
    words = ["convert", str(path), "-o", str(tmp_path / "odd.safetensors")]
    assert main(words) == 2
    assert "of an unusual size (steady convert FILE.params -o OUT.safetensors --size N)" in capsys.readouterr().err
    assert main([*words, "--size", "73", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["input"]["size"] == 73
    assert main([*words, "--size", "74"]) == 2
    trained = restore(path, size=73)  # as evaluate and predict do with --size
    assert (trained.input.size, len(trained.classes)) == (73, 3)


def _norm(g: Graph, width: int) -> list[Entry]:
    names = ("gamma", "beta", "moving_mean", "moving_var")
    return [g.p(f"bn_{name}", width, positive=True, aux=name.startswith("moving")) for name in names]


@pytest.mark.parametrize("is_body_last", [False, True])
def test_gluons_parameters_are_taken_in_their_order(tmp_path: Path, is_body_last: bool) -> None:
    """A block registers its body before its shortcut, whichever of them the symbol names first."""
    g = Graph(0)
    x = g.var("data")
    body = g.op("BatchNorm", conv(g, x, 8, 3, pad=(1, 1)), *_norm(g, 8), fix_gamma=False)
    shortcut = conv(g, x, 8, 3, 1)
    total = g.op("elemwise_add", *((shortcut, body) if is_body_last else (body, shortcut)))
    end = dense(g, g.op("Flatten", g.op("Pooling", total, global_pool=True, pool_type="avg", kernel=(1, 1))), 6, 8)
    path = save(tmp_path, g, end)
    expected = open_checkpoint(str(path)).params
    gluon = {"moving_mean": "running_mean", "moving_var": "running_var"}
    kinds = [name.partition("_")[2] for name in g.params]
    names = [f"0.body.{i}.{gluon.get(kind, kind)}" for i, kind in enumerate(kinds)]
    write_params(path, dict(zip(names, g.params.values(), strict=True)))
    checkpoint = open_checkpoint(str(path))
    assert "is of Gluon's save_parameters" in checkpoint.notes[0]
    assert checkpoint.params.keys() == expected.keys()
    assert all(np.array_equal(checkpoint.params[name], array) for name, array in expected.items())


def test_a_new_classifier_begins_small_or_as_mxnets(tmp_path: Path) -> None:
    """MXNet's fine-tune.py draws it by Xavier(gaussian, in, 2): a deviation of the root of 2 / inputs."""
    g = Graph(0)
    features, end = classifier(g, 55)
    path = save(tmp_path, g, end)
    layer = g.nodes[features[0]].name
    for init, deviation in ((None, 0.01), ("kaiming", (2 / (4 * 55 * 55)) ** 0.5)):
        options = {"layer_before_fullc": layer} | ({"classifier_init": init} if init else {})
        model = Model(f"mxnet:{path}", pretrained=True, options=options)
        built = build(model, num_classes=7, channels=3, size=224)
        weight = built.module.get_submodule(built.head[0]).get_parameter("weight")
        assert weight.shape == (7, 4 * 55 * 55)
        assert abs(weight.std().item() / deviation - 1) < 0.05
    with pytest.raises(ModelError, match="classifier_init is 'orthogonal'; it must be kaiming, or left out"):
        build(replace(model, options={"classifier_init": "orthogonal"}), num_classes=7, channels=3, size=224)


def test_parameters_without_their_blocks_prefix_get_it_back(tmp_path: Path) -> None:
    """Gluon's ``save_params`` left it out; only one prefix that gives the symbol all its arrays is certain."""
    g = Graph(0)
    _, end = classifier(g, 55)
    plain = dict(g.params)
    nodes = [replace(node, name=f"net0_{node.name}") if node.name in plain else node for node in g.nodes]
    g.nodes[:], g.params = nodes, {f"net0_{name}": array for name, array in plain.items()}
    path = save(tmp_path, g, end)
    expected = open_checkpoint(str(path))
    write_params(path, plain)
    checkpoint = open_checkpoint(str(path))
    assert checkpoint.notes == (f"{path} lacks the prefix of Gluon's block, net0_",) and expected.notes == ()
    assert checkpoint.params.keys() == expected.params.keys() == g.params.keys()
    assert all(np.array_equal(checkpoint.params[name], array) for name, array in g.params.items())
    write_params(path, {name: array for name, array in plain.items() if name != "fc_bias"})
    with pytest.raises(ModelError, match="are they of the same network"):
        open_checkpoint(str(path))


def test_arrays_of_a_whole_executor_and_a_symbol_of_windows_are_read(tmp_path: Path) -> None:
    """An executor's arrays hold the last batch, too; an editor of Windows puts a mark before the text."""
    g = Graph(0)
    path = save(tmp_path, g, classifier(g, 55)[1])
    expected = open_checkpoint(str(path))
    write_params(path, {f"arg:{k}": v for k, v in g.params.items()} | {"arg:data": np.zeros((4, 3, 8, 8), np.float32)})
    symbol = tmp_path / "net-symbol.json"
    symbol.write_text(symbol.read_text().replace("\n", "\r\n"), encoding="utf-8-sig")
    read = open_checkpoint(str(path))
    assert read.params.keys() == g.params.keys() and read.network().size == expected.network().size


def test_statistics_that_were_not_saved_are_called_so(tmp_path: Path) -> None:
    g = Graph(0)
    x = conv(g, g.var("data"), 8, 3)
    names = ("gamma", "beta", "moving_mean", "moving_var")
    x = g.op("BatchNorm", x, *(g.p(f"bn_{name}", 8) for name in names))
    x = g.op("Flatten", g.op("Pooling", x, global_pool=True, pool_type="avg"))
    path = save(tmp_path, g, dense(g, x, 5, 8))
    write_params(path, {f"arg:{k}": v for k, v in g.params.items() if "moving" not in k})
    with pytest.raises(ModelError, match=r"lacks 2 of .* these are statistics of batch norms: save them too"):
        open_checkpoint(str(path))


def test_gluons_parameters_that_fit_in_two_orders_or_none_are_explained(tmp_path: Path) -> None:
    def arrays(*shapes: tuple[int, ...]) -> dict[str, Array]:
        kinds = [f"{i}.{kind}" for i in range(3) for kind in ("weight", "bias")]
        return {name: np.zeros(shape, np.float32) for name, shape in zip(kinds, shapes, strict=True)}

    g = Graph(0)
    x = g.var("data")
    total = g.op("elemwise_add", conv(g, x, 8, 3, pad=(1, 1)), conv(g, x, 8, 3, pad=(1, 1)))
    path = save(tmp_path, g, dense(g, g.op("Flatten", g.op("Pooling", total, global_pool=True, pool_type="avg")), 6, 8))
    same: list[tuple[int, ...]] = [(8, 3, 3, 3), (8,), (8, 3, 3, 3), (8,), (6, 8), (6,)]
    for shapes, message in ((same, "fit it in two orders"), ([*same[4:], *same[:4]], "do not have the shapes")):
        write_params(path, arrays(*shapes))
        with pytest.raises(ModelError, match=rf"{message} .*: let MXNet write both files"):
            open_checkpoint(str(path))
    write_params(path, {"0.weight": np.zeros((8, 3, 3, 3), np.float32)})
    with pytest.raises(ModelError, match="their order is not the symbol's: let MXNet write both files"):
        open_checkpoint(str(path))


@pytest.mark.parametrize("name", ["net-0000.params", "net-symbol.json", "net.safetensors", "net.pth"])
def test_a_pointer_of_git_lfs_is_named(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    g, end = _of_56()
    path = save(tmp_path, g, end)
    (tmp_path / name).write_text(POINTER)
    place = tmp_path / name if name.startswith("net.") else path
    assert main(["predict", str(place), "cat.jpg", *(["--model", "resnet20"] if name == "net.pth" else [])]) == 2
    assert f"{name} is a Git LFS pointer, not the data: fetch it with git lfs pull" in capsys.readouterr().err


def gluon_shapes(symbol: Symbol, shapes: dict[str, str]) -> Symbol:
    """A symbol whose variables say shapes and a number format, as Gluon's export writes them."""
    nodes = [
        replace(node, attrs={**node.attrs, "__shape__": shapes.get(node.name, "(0,)"), "__dtype__": "2"})
        if node.is_variable and node.name != "data"
        else node
        for node in symbol.nodes
    ]
    return replace(symbol, nodes=tuple(nodes))


def written_back(tmp_path: Path, some_cifar: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """A checkpoint of two classes as Gluon exports it, fine-tuned to ten, as it was written for MXNet."""
    g = Graph(0)
    x = g.op("BatchNorm", conv(g, g.var("data"), 8, 3, pad=(1, 1)), *_norm(g, 8), fix_gamma=False)
    x = g.op("Flatten", g.op("Pooling", g.op("Activation", x, act_type="relu"), global_pool=True, pool_type="avg"))
    path = save(tmp_path, g, dense(g, x, 2, 8))
    stale = {"fc_weight": "(2, 0)", "fc_bias": "(2,)"}
    write_symbol(tmp_path / "net-symbol.json", gluon_shapes(read_symbol(tmp_path / "net-symbol.json"), stale))
    words = ["--val", str(some_cifar / "test"), "--epochs", "1", "--batch-size", "20", "--run", str(tmp_path / "run")]
    assert main(["finetune", str(some_cifar / "train"), "--model", f"mxnet:{path}", *words]) == 0
    assert main(["convert", str(tmp_path / "run"), "-o", str(tmp_path / "ten-0000.params")]) == 0
    capsys.readouterr()
    return tmp_path / "ten-0000.params"


def test_a_new_classifier_says_its_own_shape_to_mxnet(
    tmp_path: Path, some_cifar: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written_back(tmp_path, some_cifar, capsys)
    arrays = read_params(path)
    assert isinstance(arrays, dict)
    said = {node.name: node.attrs for node in read_symbol(tmp_path / "ten-symbol.json").nodes if node.is_variable}
    assert {name.partition(":")[2] for name in arrays} == said.keys() - {"data", "softmax_label"}
    for name, array in arrays.items():
        attrs = said[name.partition(":")[2]]
        assert (attrs["__shape__"], attrs["__dtype__"]) == (str(array.shape), "0"), name


@pytest.mark.peer
def test_mxnet_binds_a_new_classifier(
    mxnet_python: str, tmp_path: Path, some_cifar: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written_back(tmp_path, some_cifar, capsys)
    np.save(tmp_path / "images.npy", np.zeros((2, 3, 32, 32), np.float32))
    request = {"do": "forward", "symbol": str(tmp_path / "ten-symbol.json"), "params": str(path)}
    ask(mxnet_python, [request | {"images": str(tmp_path / "images.npy"), "out": str(tmp_path / "out.npy")}], tmp_path)
    assert np.load(tmp_path / "out.npy").shape == (2, 10)
