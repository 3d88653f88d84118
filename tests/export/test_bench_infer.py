"""``steady bench infer``: engines in processes of their own, compared on the same samples."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image

from steadytrain.cli import main
from steadytrain.cli.bench_infer import table
from steadytrain.export.engines import BatchSpeed, BenchTask, Parity, Worker, compare
from steadytrain.export.speed import EngineSpeed, NetworkSpeed, make_plan

QUICK = ["--seconds", "0.04", "--threads", "1", "--device", "cpu"]
HAS_EXPORT = all(importlib.util.find_spec(name) for name in ("onnxruntime", "onnxscript", "openvino"))

ODD = """
import os, torch

class Odd(torch.nn.Module):
    def __init__(self, word):
        super().__init__()
        self.word, self.fc = word, torch.nn.Linear(3, 1000)

    def forward(self, images):
        if images.dtype == torch.bfloat16 and self.word == "crash":
            os.abort()
        logits = self.fc(images.mean((2, 3)))
        return -logits if images.dtype == torch.bfloat16 and self.word == "other" else logits

def crash(**options):
    return Odd("crash")

def other(**options):
    return Odd("other")
"""


@pytest.mark.slow
def test_a_small_network_in_every_engine_here(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    engines = ["plain", "channels-last", *(["onnxruntime", "openvino"] if HAS_EXPORT else [])]
    command = ["bench", "infer", "digits", "--engines", *engines, "--batch-size", "1", "4", *QUICK, "--json"]
    command += ["--precision", "fp32", "int8"]
    assert main(command) == 0
    out, _ = capsys.readouterr()
    document = json.loads(out)
    [network] = document["networks"]
    assert (network["name"], network["threads"], network["device"]) == ("digits", 1, "cpu") and not network["error"]
    rows = {(row["engine"], row["numbers"]): row for row in network["engines"]}
    wanted = {(engine, "fp32") for engine in engines}
    wanted |= {("onnxruntime", "int8"), ("openvino", "int8")} if HAS_EXPORT else set()
    assert rows.keys() == wanted
    for (_, numbers), row in rows.items():
        assert row["error"] == "" and row["memory_bytes"] > 0
        assert [batch["batch_size"] for batch in row["batches"]] == [1, 4]
        for batch in row["batches"]:
            assert batch["passes"] > 0 and 0 < batch["p50_seconds"] <= batch["p99_seconds"]
        assert row["parity"]["cosine"] > (0.9999 if numbers == "fp32" else 0.97)


def test_outputs_are_compared_on_images_without_classes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for number in range(3):
        pixels = np.random.default_rng(number).integers(0, 256, (9, 8, 3), np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")
    command = ["bench", "infer", "digits", "--engines", "plain", "--batch-size", "1", *QUICK, "--json"]
    for _ in range(2):
        assert main([*command, "--data", str(tmp_path)]) == 0
        [network] = json.loads(capsys.readouterr().out)["networks"]
        assert network["real"] and network["engines"][0]["parity"]["n"] == 3


def test_a_run_that_is_not_there_is_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["bench", "infer", str(tmp_path / "a"), "--engines", "plain", *QUICK]) == 2
    words = " ".join(capsys.readouterr().out.split())
    assert words.startswith(f"{tmp_path / 'a'}: there is no such file or folder: name a run, a weights file or a")


@pytest.fixture
def labelled(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> list[str]:
    """The command for a network, some of whose answers on the images of ``photos.rec`` are right."""
    torch.manual_seed(0)
    network = timm.create_model("test_resnet")
    draw = np.random.default_rng(0)
    for number in range(12):
        (folder := tmp_path / "photos" / ("n02124075", "n01440764")[number % 2]).mkdir(parents=True, exist_ok=True)
        Image.fromarray(draw.integers(0, 256, (80, 80, 3), np.uint8)).save(folder / f"{number}.png")
    with torch.no_grad():  # some are right: the two classes get what the network likes best
        network.get_parameter("fc.bias")[[285, 0]] += 10
    torch.save(network.state_dict(), tmp_path / "stock.pth")
    assert main(["pack", str(tmp_path / "photos"), str(tmp_path / "photos")]) == 0
    capsys.readouterr()
    name = f"timm/test_resnet={tmp_path / 'stock.pth'}"
    return ["bench", "infer", name, "--precision", "fp32", *QUICK, "--engines", "plain"]


def test_engines_are_scored_by_the_labels_of_the_images(
    labelled: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The accuracy of torch in fp32 is that of steady evaluate on the same images."""
    words = [str(tmp_path / "photos.rec"), "--json"]
    assert main(["evaluate", str(tmp_path / "stock.pth"), *words, "--model", "timm/test_resnet"]) == 0
    scored = json.loads(capsys.readouterr().out)
    assert main([*labelled, "eager", "--data", *words]) == 0
    for engine in json.loads(capsys.readouterr().out)["networks"][0]["engines"]:
        parity = engine["parity"]
        assert (parity["labelled"], parity["right5"]) == (12, 1.0)
        assert parity["right1"] == pytest.approx(scored["top1"]) and 0 < parity["right1"] < 1


@pytest.mark.slow
def test_so_many_images_are_scored_as_were_asked_for_and_a_folder_alone_has_no_labels(
    labelled: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main([*labelled, "--data", str(tmp_path / "photos.rec"), "--images", "5"]) == 0
    assert "right answers on 5 images with labels" in " ".join(capsys.readouterr().out.split())
    assert main([*labelled, "--data", str(tmp_path / "photos" / "n02124075")]) == 0
    assert "with labels" not in capsys.readouterr().out


def test_the_table_says_on_how_many_images_answers_were_right() -> None:
    [network, *_] = of_networks()
    parity = Parity(n=12, cosine=1.0, largest_difference=0.0, top1=1.0, top5=1.0, labelled=5, right1=0.4, right5=1.0)
    engines = tuple(replace(engine, parity=parity) for engine in network.engines)
    text = " ".join(" ".join(table([replace(network, engines=engines)], 200)).split())
    assert "right answers on 5 images with labels" in text and " top-1" in text
    assert "with labels" not in " ".join(table([network], 200))


def test_images_of_classes_that_the_network_lacks_are_not_scored() -> None:
    logits = torch.eye(6)[[0, 1, 2, 3]]
    parity = compare(logits, logits, labels=torch.tensor([0, 2, -1, 3]))
    assert parity.labelled == 3 and parity.right1 == pytest.approx(2 / 3)
    assert compare(logits, logits, labels=torch.full((4,), -1)).right1 is None
    assert compare(logits[:, :4], logits[:, :4], labels=torch.zeros(4, dtype=torch.int64)).right5 is None


@pytest.mark.peer
@pytest.mark.skipif(not HAS_EXPORT, reason="needs onnxruntime and openvino")
def test_every_engine_gives_mxnets_outputs_for_its_checkpoint_and_photographs(
    mxnet_python: str, data_folder: Path, extracted: Callable[[str], Path], tmp_path: Path
) -> None:
    """SqueezeNet 1.1: MXNet 1.9.1 has its own pair of files, our engines the same weights in torch's form."""
    weights = data_folder / "weights" / "squeezenet1.1"
    photographs = sorted(extracted("imagenet-sample-200.tar").rglob("*.JPEG"))[:16]
    for number, photograph in enumerate(photographs):
        (folder := tmp_path / "photographs" / f"{number % 2}").mkdir(parents=True, exist_ok=True)
        shutil.copy(photograph, folder)
    assert main(["pack", str(tmp_path / "photographs"), str(tmp_path / "images")]) == 0
    plan = make_plan(device="cpu", records=str(tmp_path / "images.rec"), images=16, threads=2)
    task = BenchTask(f"squeezenet={next(weights.glob('*.pth'))}", str(tmp_path), plan)
    with Worker(task) as worker:
        assert worker.ask("prepare") and not worker.error
    stored = torch.load(tmp_path / "reference.pt", weights_only=True)
    np.save(tmp_path / "images.npy", stored["samples"].numpy())
    program = Path(__file__).parents[2] / "benchmarks" / "peers" / "infer_mxnet.py"
    files = [weights / "squeezenet1.1-symbol.json", weights / "squeezenet1.1-0000.params"]
    files += [tmp_path / "images.npy", tmp_path / "outputs.npy"]
    subprocess.run([mxnet_python, str(program), "outputs", *map(str, files)], check=True)
    torch.save({**stored, "outputs": torch.from_numpy(np.load(tmp_path / "outputs.npy"))}, tmp_path / "reference.pt")
    for engine in ("plain", "eager", "channels-last", "onnxruntime", "openvino"):
        with Worker(task._replace(engine=engine)) as worker:
            worker.ask("open")
            parity = worker.ask("parity")
        assert not worker.error, worker.error
        assert (parity.n, parity.top1, parity.top5) == (16, 1.0, 1.0) and parity.cosine > 0.99999, engine


def test_a_crash_and_other_outputs_are_in_the_table(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "odd_networks.py").write_text(ODD, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    names = ["odd_networks:crash", "odd_networks:other", "no-such-network"]
    command = ["bench", "infer", *names, "--engines", "eager", "--precision", "fp32", "bf16"]
    assert main([*command, *QUICK, "--batch-size", "1", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "not measured (eager bf16): the process crashed (SIGABRT)" in lines
    rows = [line.split() for line in lines if line.startswith("eager ")]
    assert [row[1] for row in rows] == ["fp32", "fp32", "bf16"]
    assert rows[1][6] == "1.0000" and float(rows[2][6]) < -0.99
    assert any(line.startswith("no-such-network: there is no model") for line in lines)
    summary = [line for line in lines if line.endswith("eager fp32 (CPU)")]
    assert len(summary) == 2  # the other outputs are no sound way to be fast
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize(
    ("change", "cosine", "top1"), [(lambda x: x, 1.0, 1.0), (lambda x: x.flip(1), None, 0.0), (lambda x: -x, -1.0, 0.0)]
)
def test_parity_sees_what_differs(change: object, cosine: float | None, top1: float) -> None:
    logits = torch.arange(40.0).reshape(2, 20) - 10
    assert callable(change)
    parity = compare(change(logits), logits)
    assert parity.top1 == top1 and parity.n == 2
    assert parity.cosine == cosine if cosine is not None else parity.cosine < 0.99


def of_networks() -> list[NetworkSpeed]:
    """Figures as wide as they get."""
    batches = tuple(
        BatchSpeed(
            batch_size=size, passes=9, p50_seconds=1.2345, p99_seconds=12.345, per_second=12345.6, cpu_seconds=2.4
        )
        for size in (1, 256)
    )
    parity = Parity(n=200, cosine=-0.99999, largest_difference=1.0, top1=1.0, top5=1.0)
    rows = (("plain", "fp32", ""), ("channels-last", "bf16", "CPU"), ("onnxruntime", "int8", "CUDA"))
    figures = {"batches": batches, "memory_bytes": 12_345_678_901, "parity": parity}
    engines = tuple(
        EngineSpeed(engine=engine, numbers=numbers, provider=provider, **figures)  # type: ignore[arg-type]
        for engine, numbers, provider in (*rows, ("openvino", "bf16", "CPU"))
    )
    failed = EngineSpeed(engine="compile", numbers="bf16", error="the process crashed (SIGSEGV)")
    common = {"parameters": 138_000_000, "threads": 64, "engines": (*engines, failed)}
    return [
        NetworkSpeed(name="a", title="Inception-ResNet v2", shape=(3, 299, 299), **common),  # type: ignore[arg-type]
        NetworkSpeed(name="b", title="SSDlite, MobileNet v3", shape=(3, 320, 320), **common),  # type: ignore[arg-type]
        NetworkSpeed(name="c", title="no such network", error="there is no model 'c'"),
    ]


@pytest.mark.parametrize("width", [80, 120])
def test_a_table_is_never_wider_than_the_terminal(width: int) -> None:
    lines = list(table(of_networks(), width))
    assert max(map(len, lines)) <= width
    assert "not measured (compile bf16): the process crashed (SIGSEGV)" in lines
    assert ("memory MB" in "\n".join(line for line in lines if line.startswith("engine "))) == (width == 120)


def test_every_figure_says_what_computed_it() -> None:
    lines = [line.split()[:3] for line in table(of_networks(), 120)]
    assert ["engine", "numbers", "on"] in lines and ["onnxruntime", "int8", "CUDA"] in lines
    assert ["channels-last", "bf16", "CPU"] in lines and ["plain", "fp32", "\N{EN DASH}"] in lines  # an older document


@pytest.mark.parametrize(
    ("name", "words"),
    [
        *((name, "it is no image classifier") for name in ("ssd-vgg16", "faster-rcnn", "gnmt", "dcgan")),
        ("inception-bn", "inception_bn:inception_bn in the folder benchmarks"),
    ],
)
def test_networks_that_left_the_table_are_refused_by_name(
    name: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "infer", "digits", name, "--engines", "plain", *QUICK]) == 2
    assert f"{name} is not in the table any more: " in (err := capsys.readouterr().err) and words in err


def test_pretrained_weights_are_asked_about_before_anything_is_measured(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    name = "timm/convnextv2_atto.fcmae_ft_in1k"
    command = ["bench", "infer", "digits", name, "--engines", "eager", "--precision", "fp32", *QUICK]
    assert main(command) == 2
    out, err = capsys.readouterr()
    assert not out and "non-commercial use only (licence cc-by-nc-4.0): add --accept-licence" in err
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # of the process that loads it
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert main([*command, "--accept-licence"]) == 0
    out, err = capsys.readouterr()
    assert f"{name}: NON-COMMERCIAL weights (licence cc-by-nc-4.0)" in err
    assert f"{name}: cannot fetch the weights" in out and "digits: " in out


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--batch-size", "0"], "--batch-size is 0"),
        (["--engines", "plain", "--precision", "bf16", "--device", "cpu"], "none of the engines computes in bf16"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "infer", "digits", *flags]) == 2
    err = capsys.readouterr().err
    assert words in err and err.count("\n") == 1
