"""``steady convert``, and MXNet's checkpoints wherever weights are named."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.interop.mxnet.cases import Case, Graph, ask
from tests.interop.mxnet.test_graph import old_lenet

from steadytrain.cli import main
from steadytrain.errors import FailedError
from steadytrain.interop.mxnet.checkpoint import open_checkpoint
from steadytrain.interop.mxnet.convert import convert_to_mxnet
from steadytrain.interop.mxnet.params import read_params, write_params
from steadytrain.interop.mxnet.symbol import Symbol, read_symbol, write_symbol
from steadytrain.training import restore


@pytest.fixture
def squeezenet(data_folder: Path, tmp_path: Path) -> Path:
    """A copy of MXNet's SqueezeNet; its ``.params``."""
    for name in ("squeezenet1.1-0000.params", "squeezenet1.1-symbol.json"):
        shutil.copyfile(data_folder / "weights" / "squeezenet1.1" / name, tmp_path / name)
    return tmp_path / "squeezenet1.1-0000.params"


def run(capsys: pytest.CaptureFixture[str], *words: object) -> Any:
    """A command's JSON; it must succeed."""
    code = main([*map(str, words), "--json"])
    printed = capsys.readouterr()
    assert code == 0, printed.err
    return json.loads(printed.out)


def test_a_checkpoint_is_converted_used_and_written_back(
    squeezenet: Path, extracted: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    images = sorted(extracted("imagenet-sample-200.tar").rglob("*.JPEG"))[:2]
    before = run(capsys, "predict", squeezenet, *images)
    weights = tmp_path / "model.safetensors"
    document = run(capsys, "convert", squeezenet, "-o", weights)
    assert (document["model"], document["classes"]) == ("torchvision/squeezenet1_1", 1000)
    symbol = tmp_path / "squeezenet1.1-symbol.json"
    files = [symbol, squeezenet]
    assert run(capsys, "convert", *files, "-o", tmp_path / "again.safetensors")["model"] == document["model"]
    run(capsys, "convert", squeezenet, "-o", tmp_path / "graph.safetensors", "--keep-graph")
    for file in (weights, tmp_path / "graph.safetensors"):
        after = run(capsys, "predict", file, *images)
        for old, new in zip(before, after, strict=True):
            assert [entry["class"] for entry in old["classes"]] == [entry["class"] for entry in new["classes"]]
            for first, second in zip(old["classes"], new["classes"], strict=True):
                assert first["probability"] == pytest.approx(second["probability"], abs=1e-4)
    (tmp_path / "some").mkdir()
    for image in images:
        shutil.copy(image, tmp_path / "some")
    (tmp_path / "back").mkdir()
    words = ["convert", tmp_path / "graph.safetensors", "-o", tmp_path / "back" / "again-0000.params"]
    document = run(capsys, *words, "--data", tmp_path / "some")
    assert [Path(name).name for name in document["files"]] == ["again-0000.params", "again-symbol.json", "synset.txt"]
    assert document["difference"] < 1e-5 and document["compared_on"] == f"2 images of {tmp_path / 'some'}"
    old, new = read_params(squeezenet), read_params(tmp_path / "back" / "again-0000.params")
    assert isinstance(old, dict) and isinstance(new, dict) and old.keys() == new.keys()
    assert all(np.array_equal(old[name], new[name]) for name in old)
    again = run(capsys, "predict", f"mxnet:{tmp_path / 'back' / 'again'}", *images)
    assert [entry["classes"] for entry in again] == [entry["classes"] for entry in before]
    run(capsys, "convert", weights, "-o", tmp_path / "back" / "traced-0000.params")
    assert main(["predict", str(tmp_path / "back" / "traced-0000.params"), *map(str, images), "--json"]) == 0
    printed = capsys.readouterr()
    assert "how images were scaled" not in printed.err, "the symbol says it, though its nodes are not called as Gluon's"
    for old, new in zip(before, json.loads(printed.out), strict=True):
        assert [entry["class"] for entry in old["classes"]] == [entry["class"] for entry in new["classes"]]
        assert old["classes"][0]["probability"] == pytest.approx(new["classes"][0]["probability"], abs=1e-4)


@pytest.mark.slow
def test_a_checkpoint_is_scored_with_the_mean_that_is_named(
    squeezenet: Path, extracted: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, image in enumerate(sorted(extracted("imagenet-sample-200.tar").rglob("*.JPEG"))[:4]):
        folder = tmp_path / "some" / ("tench", "goldfish")[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(image, folder)
    scaling = ["--rgb-mean", "100,110,120", "--rgb-std", "60"]
    run(capsys, "convert", squeezenet, "-o", tmp_path / "scaled.safetensors", *scaling[:2], "--rgb-std", "60,60,60")
    converted = run(capsys, "evaluate", tmp_path / "scaled.safetensors", tmp_path / "some")
    scored = run(capsys, "evaluate", squeezenet, tmp_path / "some", *scaling)
    assert scored["loss"] == pytest.approx(converted["loss"], rel=1e-4)
    assert run(capsys, "evaluate", squeezenet, tmp_path / "some")["loss"] != pytest.approx(scored["loss"], rel=1e-2)
    for words, message in ((["--rgb-mean", "1,2"], "three numbers"), (["--rgb-std", "0,1,1"], "--rgb-std is '0,1,1'")):
        assert main(["evaluate", str(squeezenet), str(tmp_path / "some"), *words]) == 2
        assert message in capsys.readouterr().err


def test_what_goes_to_mxnet_is_read_back_and_kept_only_if_its_logits_are_the_models(
    some_cifar: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", str(some_cifar / "train"), "--val", str(some_cifar / "test"), "--model", "quick8"]
    run(capsys, *words, "--epochs", 1, "--batch-size", 20, "--run", tmp_path / "run")
    assert main(["convert", str(tmp_path / "run"), "-o", str(tmp_path / "net-0000.params")]) == 0
    printed = re.search(
        r"\(largest difference of logits on 64 validation images of \S+: (\S+) of the largest\)",
        capsys.readouterr().out,
    )
    assert printed is not None and float(printed[1]) < 1e-5
    before = (tmp_path / "net-0000.params").read_bytes()
    trained = restore(tmp_path / "run", device="cpu", precision="fp32")
    [*_, last] = [part for part in trained.module.modules() if isinstance(part, torch.nn.Linear)]
    last.register_forward_hook(lambda part, images, logits: logits * 1.01)
    images = np.random.RandomState(0).randint(0, 256, (4, 32, 32, 3)).astype(np.uint8)
    with pytest.raises(FailedError, match="was not written: on noise its graph, read back, gives logits that differ"):
        convert_to_mxnet(trained, tmp_path / "net-0000.params", images, what="noise")
    assert (tmp_path / "net-0000.params").read_bytes() == before
    assert {path.name for path in tmp_path.iterdir()} == {"run", "net-0000.params", "net-symbol.json", "synset.txt"}


@pytest.mark.peer
def test_mxnet_scores_what_steadytrain_trained(
    mxnet_python: str, some_cifar: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", str(some_cifar / "train"), "--val", str(some_cifar / "test"), "--model", "resnet20"]
    run(capsys, *words, "--epochs", 1, "--batch-size", 20, "--run", tmp_path / "run")
    run(capsys, "convert", tmp_path / "run", "-o", tmp_path / "net-0000.params")
    images = np.random.RandomState(0).randn(2, 3, 32, 32).astype(np.float32)
    np.save(tmp_path / "images.npy", images)
    files = {"symbol": "net-symbol.json", "params": "net-0000.params", "images": "images.npy", "out": "out.npy"}
    paths = {key: str(tmp_path / name) for key, name in files.items()}
    shapes = {"do": "shapes", "symbol": paths["symbol"], "out": str(tmp_path / "shapes.json")}
    ask(mxnet_python, [{"do": "forward"} | paths, shapes], tmp_path)
    known = json.loads((tmp_path / "shapes.json").read_text())
    assert known["data"] == [0, 3, 32, 32] and known["conv1_weight"] == [16, 3, 3, 3], "infer_shape knows the images"
    with torch.no_grad():
        ours = restore(tmp_path / "run", device="cpu", precision="fp32").module(torch.from_numpy(images)).softmax(1)
    np.testing.assert_allclose(np.load(tmp_path / "out.npy"), ours.numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_checkpoint_is_fine_tuned_and_the_run_needs_its_files_no_more(
    data_folder: Path, some_cifar: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("0000.params", "symbol.json"):
        source = data_folder / "weights" / "cifar-resnet" / f"cifar_resnet20_v2-{name}"
        shutil.copyfile(source, tmp_path / f"net-{name}")
    data = ["--val", some_cifar / "test", "--size", 48, "--epochs", 1, "--batch-size", 20]
    words = ["finetune", some_cifar / "train", *data, "--model", f"mxnet:{tmp_path / 'net'}"]
    cut = ["--layer-before-fullc", "cifarresnetv20_flatten0_flatten0"]
    run(capsys, *words, *cut, "--run", tmp_path / "cut")
    for path in tmp_path.glob("net-*"):
        path.unlink()
    assert run(capsys, "evaluate", tmp_path / "cut")["n"] == 100
    run(capsys, "convert", tmp_path / "cut", "-o", tmp_path / "cut-0000.params")
    written = read_params(tmp_path / "cut-0000.params")
    assert isinstance(written, dict) and written["arg:fc_weight"].shape == (10, 64)
    assert open_checkpoint(str(tmp_path / "cut-0000.params")).size == 48, "the symbol says what it was trained on"
    assert (tmp_path / "synset.txt").read_text().split() == sorted(
        path.name for path in (some_cifar / "test").iterdir()
    )


def _of_gluon(end: str) -> Case:
    """A small network as Gluon exports it: its last node is no loss."""
    g = Graph(0)
    x = g.op("Convolution", g.var("data"), g.p("c_w", 8, 3, 3, 3), g.p("c_b", 8), kernel=(3, 3), num_filter=8)
    x = g.op("Pooling", g.op("Activation", x, act_type="relu"), kernel=(1, 1), pool_type="avg", global_pool=True)
    if end == "convolution":
        x = g.op("Convolution", x, g.p("f_w", 4, 8, 1, 1), g.p("f_b", 4), kernel=(1, 1), num_filter=4)
    else:
        x = g.op("FullyConnected", x, g.p("f_w", 4, 8), g.p("f_b", 4), num_hidden=4)
    if end == "softmax":
        x = g.op("softmax", x)
    if end == "loss":
        x = g.op("SoftmaxOutput", x, g.var("softmax_label"))
    return Case(Symbol(tuple(g.nodes), (x,)), g.params, g.random.rand(2, 3, 32, 32).astype(np.float32), set())


ENDS = ["dense", "convolution", "softmax", "loss"]


def _returned(end: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[Case, Path]:
    """A network that came from MXNet and was written back; its ``.params``."""
    net, back = _of_gluon(end), folder / "back-0000.params"
    write_symbol(folder / "net-symbol.json", net.symbol)
    write_params(folder / "net-0000.params", net.prefixed)
    run(capsys, "convert", folder / "net-0000.params", "-o", folder / "net.safetensors", "--size", 32)
    run(capsys, "convert", folder / "net.safetensors", "-o", back)
    return net, back


@pytest.mark.parametrize("end", ENDS)
def test_a_network_that_goes_back_to_mxnet_ends_with_one_loss(
    end: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, back = _returned(end, tmp_path, capsys)
    symbol = read_symbol(back.with_name("back-symbol.json"))
    [(head, _)] = symbol.heads
    assert symbol.nodes[head].op == "SoftmaxOutput"
    assert [symbol.nodes[number].op for number, _ in symbol.nodes[head].inputs] == [
        "Flatten" if end == "convolution" else "FullyConnected",
        "null",
    ]
    assert [node.name for node in symbol.nodes if node.name.endswith("label")] == ["softmax_label"]
    assert [node.op for node in symbol.nodes].count("SoftmaxOutput") == 1 and "softmax" not in {
        node.op for node in symbol.nodes
    }


@pytest.mark.peer
@pytest.mark.parametrize("end", ENDS)
def test_mxnet_scores_and_trains_a_network_that_goes_back(
    end: str, mxnet_python: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    net, _ = _returned(end, tmp_path, capsys)
    np.save(tmp_path / "images.npy", net.images)
    np.save(tmp_path / "labels.npy", np.array([1, 3], np.float32))
    names = {"symbol": "back-symbol.json", "params": "back-0000.params", "images": "images.npy", "out": "out.npy"}
    paths = {key: str(tmp_path / name) for key, name in {**names, "labels": "labels.npy", "prefix": "b"}.items()}
    ask(mxnet_python, [{"do": do, **paths} for do in ("forward", "train")], tmp_path)
    with torch.no_grad():
        ours = restore(tmp_path / "net.safetensors", device="cpu", precision="fp32").module(
            torch.from_numpy(net.images)
        )
    np.testing.assert_allclose(np.load(tmp_path / "out.npy"), ours.softmax(1).numpy(), rtol=1e-4, atol=1e-5)
    trained = read_params(tmp_path / "b-0002.params")
    assert isinstance(trained, dict) and not np.array_equal(trained["arg:f_w"], net.params["f_w"]), (
        "the loss reaches it"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model-0000.params", "-o", "model.pth"], "it must end with .safetensors, or with -0000.params"),
        (["nothing-0000.params", "-o", "model.safetensors"], "there is no nothing-symbol.json"),
        (["mxnet:resnext-50", "-o", "model.safetensors"], "nothing is fetched"),
        (["mxnet:", "-o", "model.safetensors"], "mxnet: needs the name of a checkpoint behind it"),
        (
            ["nets/b-symbol.json", "-o", "b.safetensors"],
            "is a network without weights: put its .params file beside it",
        ),
        (
            ["nets/a-0007.params", "-o", "a.safetensors"],
            "no nets/a-0007.params beside nets/a-symbol.json: name another",
        ),
        (["a.params", "-o", "a.safetensors", "--size", "0"], "--size is 0; it must be from 1 to 4096"),
        (["runs/a", "-o", "model.safetensors"], "runs/a is no checkpoint of MXNet"),
        (["runs/a", "-o", "a-0000.params", "--size", "64"], "--size is for a checkpoint of MXNet that is read"),
        (["a.params", "-o", "a.safetensors", "--data", "photos"], "--data is for what goes to MXNet: drop it"),
        (["a.params", "-o", "a.safetensors", "--rgb-mean", "1,2"], "it must be three numbers of pixels from 0 to 255"),
    ],
)
def test_mistakes_are_said_in_a_line(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("nets").mkdir()
    for name in ("a-symbol.json", "a-0003.params"):
        Path("nets", name).write_text("{}")
    write_symbol(Path("nets/b-symbol.json"), old_lenet().symbol)
    assert main(["convert", *words]) == 2
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 1
