"""MXNet's graphs as torch modules: each operator and the real checkpoints against what MXNet 1.9.1 computed."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.interop.mxnet.cases import CASES, GOLDEN, Array, Case, Graph, case, forward

from steadytrain.errors import ModelError
from steadytrain.interop.mxnet import graph
from steadytrain.interop.mxnet.checkpoint import open_checkpoint, swap_colours
from steadytrain.interop.mxnet.params import read_params, write_params
from steadytrain.interop.mxnet.symbol import Symbol, parse_symbol, read_symbol, symbol_json, write_symbol

CIFAR = {f"cifar_{name}": f"cifar-resnet/cifar_{name}" for name in ("resnet20_v1", "resnet20_v2", "resnet56_v2")}
REAL = {"squeezenet1.1": "squeezenet1.1/squeezenet1.1", **CIFAR}


def outputs_of(each: Case) -> Array:
    """What the converted graph computes of a case's images."""
    _, channels, size, _ = each.images.shape
    network = graph.build_network(each.symbol, each.params, channels=channels, size=size, logits=False)
    network.module.load_state_dict(network.state(each.params), strict=False)
    with torch.no_grad():
        outputs: Array = network.module.eval()(torch.from_numpy(each.images)).numpy()
    return outputs


@pytest.mark.parametrize("name", CASES)
def test_an_operator_computes_what_mxnet_computes(name: str) -> None:
    with np.load(GOLDEN) as golden:
        np.testing.assert_allclose(outputs_of(case(name)), golden[name], rtol=1e-5, atol=2e-6)


@pytest.mark.peer
def test_operators_compute_what_a_living_mxnet_computes(mxnet_python: str, tmp_path: Path) -> None:
    cases = {f"{name} {seed}": case(name, seed=seed) for name in CASES for seed in (0, 1)}
    living = forward(mxnet_python, cases, tmp_path)
    with np.load(GOLDEN) as golden:
        for name in CASES:
            np.testing.assert_allclose(golden[name], living[f"{name} 0"], rtol=1e-5, atol=2e-6, err_msg=name)
    for name, each in cases.items():
        np.testing.assert_allclose(outputs_of(each), living[name], rtol=1e-5, atol=2e-6, err_msg=name)


@pytest.mark.parametrize("name", REAL)
def test_a_real_checkpoint_gives_mxnets_logits(data_folder: Path, name: str) -> None:
    checkpoint = open_checkpoint(f"mxnet:{data_folder / 'weights' / REAL[name]}")
    with np.load(data_folder / "mxnet-golden" / "forward" / f"{name}.npz") as golden:
        images, logits, mean, std = (golden[key] for key in ("images_NHWC", "logits", "mean", "std"))
    assert (checkpoint.channels, checkpoint.size) == (3, images.shape[1])
    np.testing.assert_allclose(checkpoint.scaling[0], mean, atol=1e-7)
    network = checkpoint.network()
    network.module.load_state_dict(network.state(checkpoint.params), strict=False)
    x = torch.from_numpy(((images.astype(np.float32) / np.float32(255) - mean) / std).transpose(0, 3, 1, 2))
    with torch.no_grad():
        ours = network.module.eval()(x).numpy()
    assert np.abs(ours - logits).max() < 1e-4
    assert (ours.argmax(1) == logits.argmax(1)).all()


def test_the_module_trains_copies_and_is_written_back(data_folder: Path, tmp_path: Path) -> None:
    source = data_folder / "weights" / CIFAR["cifar_resnet20_v2"]
    checkpoint = open_checkpoint(str(source))
    network = checkpoint.network(num_classes=7)
    module = copy.deepcopy(network.module)
    x = torch.randn(4, 3, 32, 32)
    loss = torch.nn.functional.cross_entropy(module(x), torch.arange(4))
    loss.backward()  # type: ignore[no-untyped-call]
    missing = {name for name, value in module.named_parameters() if value.grad is None}
    assert missing == {name for name, value in module.named_parameters() if not value.requires_grad}
    assert (network.head, network.num_outputs) == ("cifarresnetv20_dense0_fwd", 7)
    whole = checkpoint.network()
    whole.module.load_state_dict(whole.state(checkpoint.params), strict=False)
    write_params(tmp_path / "back.params", whole.params(whole.module.state_dict()))
    before, after = read_params(Path(f"{source}-0000.params")), read_params(tmp_path / "back.params")
    assert isinstance(before, dict) and isinstance(after, dict)
    assert before.keys() == after.keys()
    fixed = {name for name, value in before.items() if not np.array_equal(value, after[name])}
    assert all(name.endswith("gamma") and (after[name] == 1).all() for name in fixed)


def old_lenet() -> Case:
    """LeNet as MXNet 0.8 wrote it, with a batch norm, whose statistics its JSON lacks."""
    g = Graph(0)
    x = g.op("Convolution", g.var("data"), g.p("c_w", 8, 1, 5, 5), g.p("c_b", 8), kernel="(5, 5)", num_filter="8")
    x = g.op("Pooling", g.op("Activation", x, act_type="tanh"), pool_type="max", kernel="(2, 2)", stride="(2L, 2L)")
    x = g.op("BatchNorm", x, g.p("bn_gamma", 8), g.p("bn_beta", 8))
    g.nodes[-1] = replace(g.nodes[-1], name="bn")
    x = g.op("FullyConnected", g.op("Flatten", x), g.p("f_w", 10, 8 * 12 * 12), g.p("f_b", 10), num_hidden="10")
    end = g.op("SoftmaxOutput", x, g.var("softmax_label"))
    g.params |= {"bn_moving_mean": np.ones(8, np.float32), "bn_moving_var": np.full(8, 2, np.float32)}
    return Case(
        Symbol(tuple(g.nodes), (end,)),
        g.params,
        g.random.rand(2, 1, 28, 28).astype(np.float32),
        {"bn_moving_mean", "bn_moving_var"},
    )


def as_08(symbol: Symbol) -> str:
    """Symbol JSON in the form of MXNet 0.8."""
    nodes = [
        {
            "op": n.op,
            "param": dict(n.attrs),
            "name": n.name,
            "inputs": [list(i) for i in n.inputs],
            "attr": {"lr_mult": "2"},
        }
        for n in symbol.nodes
    ]
    return json.dumps({"nodes": nodes, "arg_nodes": [], "heads": [list(head) for head in symbol.heads]})


def test_symbols_of_08_get_their_statistics_and_the_size_is_found(tmp_path: Path) -> None:
    each = old_lenet()
    (tmp_path / "lenet-symbol.json").write_text(as_08(each.symbol))
    write_params(tmp_path / "lenet-0010.params", each.prefixed, version=0)
    write_params(tmp_path / "lenet-0002.params", {"arg:x": np.ones(3)}, version=0)
    checkpoint = open_checkpoint(f"mxnet:{tmp_path / 'lenet'}")
    assert checkpoint.params_path == tmp_path / "lenet-0010.params"
    assert (checkpoint.channels, checkpoint.size, checkpoint.symbol.version) == (1, 28, 0)
    network = checkpoint.network()
    state = network.state(checkpoint.params)
    assert network.moving == {"bn_moving_mean", "bn_moving_var"} and (state["bn.weight"] == 1).all()
    assert network.module(torch.from_numpy(each.images)).shape == (2, 10)


def test_mxnets_own_08_symbol_is_built(data_folder: Path) -> None:
    symbol = read_symbol(data_folder / "weights" / "save_000800.json")
    network = graph.build_network(symbol, channels=1, size=8)
    assert network.module(torch.zeros(3, 1, 8, 8)).shape == (3, 10)
    again = parse_symbol(symbol_json(symbol), where="again")
    assert (again.nodes, again.heads) == (symbol.nodes, symbol.heads)


def refused(make: Any) -> str:
    g = Graph(0)
    end = make(g, g.var("data"))
    with pytest.raises(ModelError) as caught:
        graph.build_network(Symbol(tuple(g.nodes), (end,)), g.params, channels=4, size=9)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_cannot_be_converted_is_named_at_once() -> None:
    text = refused(lambda g, x: g.op("Flatten", g.op("RNN", g.op("Custom", g.op("Custom", x), op_type="mine"))))
    assert "2 operators" in text and "Custom (custom1, custom2); RNN (rnn3)" in text
    text = refused(lambda g, x: g.op("_contrib_MultiBoxDetection", g.op("Flatten", x)))
    assert "detector" in text and "multiboxdetection2" in text and "--layer-before-fullc" in text
    text = refused(lambda g, x: g.op("_contrib_quantized_conv", g.op("_contrib_quantize_v2", x)))
    assert text.endswith("an int8 network of mx.contrib.quantization: convert the fp32 one that it was made from")
    text = refused(lambda g, x: g.op("Pooling", x, kernel=(3, 3), pool_type="lp"))
    assert "pooling1 (Pooling) has pool_type=lp" in text
    text = refused(lambda g, x: g.op("Pad", x, pad_width=(0, 0, 0, 0, 0, 0, 0, 1 << 30)))
    assert "a side of 1,073,741,824" in text
    text = refused(lambda g, x: g.norm(x, 4, axis=-1))
    assert "axis=-1: only axis 1 (NCHW)" in text
    text = refused(lambda g, x: g.op("clip", x, a_min=0, a_max=6, a_middle=3))
    assert "clip1 (clip) has a_middle=3" in text
    text = refused(lambda g, x: g.op("elemwise_add", x, g.var("other")))
    assert "takes data and other" in text


def test_a_cut_network_gets_a_new_classifier(data_folder: Path) -> None:
    checkpoint = open_checkpoint(str(data_folder / "weights" / REAL["squeezenet1.1"]))
    network = checkpoint.network(num_classes=5, layer_before_fullc="squeezenet0_pool3_fwd", size=224)
    assert (network.head, network.num_outputs) == ("fc", 5)
    assert network.symbol.nodes[-1].op == "SoftmaxOutput"
    assert "fc_weight" not in network.state(checkpoint.params).keys() & checkpoint.params.keys()
    with pytest.raises(ModelError, match=r"no such layer. Did you mean squeezenet0_pool3_fwd"):
        checkpoint.network(num_classes=5, layer_before_fullc="squeezenet0_pool4_fwd")


def test_bgr_networks_take_rgb(data_folder: Path) -> None:
    checkpoint = open_checkpoint(str(data_folder / "weights" / CIFAR["cifar_resnet20_v2"]))
    network = checkpoint.network()
    x = torch.randn(2, 3, 32, 32)
    outputs = []
    for params, images in ((checkpoint.params, x), (swap_colours(checkpoint.symbol, checkpoint.params), x.flip(1))):
        network.module.load_state_dict(network.state(params), strict=False)
        with torch.no_grad():
            outputs.append(network.module.eval()(images))
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-4, atol=1e-4)


@given(data=st.data())
def test_damaged_symbols_are_errors_of_one_line(data: st.DataObject) -> None:
    text = as_08(old_lenet().symbol)
    start = data.draw(st.integers(0, len(text) - 1))
    end = data.draw(st.integers(start, min(len(text), start + 30)))
    damaged = (
        text[:start]
        + data.draw(st.sampled_from(["", "1", '"', "null", "[]", "{}", "-9", "(", "99999999"]))
        + text[end:]
    )
    try:
        graph.build_network(parse_symbol(damaged, where="a.json"), channels=1, size=28)
    except ModelError as error:
        assert "\n" not in str(error)


def test_missing_files_are_looked_for_where_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data_folder: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError) as caught:
        open_checkpoint("mxnet:resnext-50")
    assert "resnext-50-symbol.json or imagenet1k-resnext-50-symbol.json was looked for in the current folder" in str(
        caught.value
    )
    folder = tmp_path / "zoo"
    folder.mkdir()
    each = old_lenet()
    write_symbol(folder / "imagenet1k-resnext-50-symbol.json", each.symbol)
    write_params(folder / "imagenet1k-resnext-50-0000.params", each.prefixed)
    (folder / "synset.txt").write_text("".join(f"n0000000{k} thing {k}, other\n" for k in range(10)))
    monkeypatch.setenv("STEADYTRAIN_MXNET_MODELS", str(folder))
    checkpoint = open_checkpoint("mxnet:resnext-50")
    assert (checkpoint.classes[3], checkpoint.synsets[3]) == ("thing 3", "n00000003")
    other = data_folder / "weights" / "squeezenet1.1" / "squeezenet1.1-0000.params"
    with pytest.raises(ModelError, match=r"lacks 8 of the 8 arrays .* are they of the same network"):
        open_checkpoint("mxnet:resnext-50", params=other)
