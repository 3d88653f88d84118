"""Exported files compute what their checkpoint does, describe themselves, and need no steadytrain to be used."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import steadytrain as st
from steadytrain.cli import main
from steadytrain.cli.export import _text
from steadytrain.errors import FailedError, InputError, ModelError
from steadytrain.export import export as exporting
from steadytrain.export import formats
from steadytrain.export.hub import model_card
from steadytrain.models import Input
from steadytrain.models.engines import engine
from steadytrain.models.engines import onnx as onnx_engine
from steadytrain.models.engines.engine import KEY, require_library
from steadytrain.models.engines.onnx import ONNXRUNTIME
from steadytrain.models.exported import Description, open_exported, open_module
from steadytrain.training import checkpoints
from steadytrain.training.features import held_out

FORMATS = {".onnx": ("onnx", "onnxscript", "onnxruntime"), ".xml": ("openvino",), ".pt2": ()}

# What a user's own program does: no more than an engine's library, and the JSON in the file.
BEFORE = """
import sys, json, numpy
sys.modules.update(dict.fromkeys(["steadytrain", "openvino_telemetry"]))
path, images = sys.argv[1], numpy.load(sys.argv[2])
"""
AFTER = "print(json.dumps([json.loads(about), logits.tolist()]))"
READERS = {
    ".onnx": """
import onnxruntime
session = onnxruntime.InferenceSession(path)
about = session.get_modelmeta().custom_metadata_map["steadytrain"]
logits = session.run(["logits"], {"images": images})[0]
""",
    ".xml": """
import openvino
network = openvino.Core().read_model(path)
about = network.get_rt_info(["steadytrain"]).astype(str)
logits = openvino.compile_model(network, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})(images)["logits"]
""",
    ".pt2": """
import torch
extra = {"steadytrain": ""}
network = torch.export.load(path, extra_files=extra).module()
about = extra["steadytrain"]
logits = network(torch.from_numpy(images)).detach().numpy()
""",
}


def need(suffix: str) -> None:
    """Skip where a library for a format is missing."""
    for name in FORMATS[suffix]:
        if not _is_there(name):
            pytest.skip(f"{name} is not installed: it is in steadytrain[export] or steadytrain[openvino]")


@pytest.fixture(scope="module")
def run(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run on handwritten digits, with calibrated probabilities."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    words = ["--model", "digits", "--epochs", "2", "--batch-size", "32", "--lr", "0.2", "--set", "data.pad=1"]
    words += ["--set", "parallel.compute_threads=1"]
    assert main(["train", str(digits), *words, "--device", "cpu", "--run", str(folder)]) == 0
    with pytest.MonkeyPatch.context() as patch:  # whatever the few images of this run say of it
        patch.setattr(held_out, "LEAST_TO_CALIBRATE", 1)
        patch.setattr(held_out, "SURE_ERRORS", -100.0)
        st.calibrate(folder)
    return folder


@pytest.fixture(scope="module")
def images(run: Path) -> np.ndarray:
    """The run's validation images, normalised."""
    trained = st.restore(run, device="cpu")
    with exporting.open_samples(trained, None, 100) as samples:
        raw = torch.from_numpy(np.concatenate([batch.images for batch in samples.read()]))
    return trained.policy.images(raw, trained.input.mean, trained.input.std).contiguous().numpy()


@pytest.mark.parametrize("suffix", FORMATS)
def test_an_exported_file_gives_the_checkpoints_answers_here_and_without_steadytrain(
    suffix: str, run: Path, digits: Path, images: np.ndarray, tmp_path: Path
) -> None:
    need(suffix)
    path = tmp_path / f"model{suffix}"
    result = st.export_model(run, path)
    assert result.is_kept and result.images == f"64 validation images of {run}"
    [row] = result.rows
    assert row.difference is not None and row.difference <= 1e-4 and row.top5_agreement == 1
    assert {each.name for each in tmp_path.iterdir()} == {path.name, *(["model.bin"] if suffix == ".xml" else [])}

    trained, exported = st.restore(run, device="cpu", precision="fp32"), st.restore(path)  # runs may be in bf16
    same = ("classes", "input", "temperature", "calibrated_on", "name", "is_multi_label")
    assert all(getattr(exported, name) == getattr(trained, name) for name in same)
    assert trained.temperature != 1
    expected, document = st.evaluate(trained, digits), st.evaluate(path, digits)
    assert (document.n, document.right) == (expected.n, expected.right) and document.loss == pytest.approx(
        expected.loss, 1e-4
    )

    script = BEFORE + READERS[suffix] + AFTER
    np.save(tmp_path / "images.npy", images)
    command = [sys.executable, "-W", "ignore", "-c", script, str(path), str(tmp_path / "images.npy")]
    about, logits = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    with torch.no_grad():
        wanted = trained.module(torch.from_numpy(images)).float()
    assert torch.tensor(logits).topk(5).indices.tolist() == wanted.topk(5).indices.tolist()
    assert about["classes"] == list(trained.classes) and about["input"]["size"] == trained.input.size
    assert about["provenance"]["run"] == "run" and about["difference"] == row.difference
    assert about["provenance"]["figure"] == st.Run.open(run).progress().best.figure  # type: ignore[union-attr]
    assert (
        str(Path(__file__).parents[2]).encode() not in path.read_bytes() and b"site-packages" not in path.read_bytes()
    )


class WrongOnceExported(nn.Module):
    """A network that an exporter gets wrong."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.module(images)
        return logits + 0.5 if torch.compiler.is_exporting() else logits


def test_a_file_that_computes_something_else_is_removed_and_the_older_one_stays(run: Path, tmp_path: Path) -> None:
    trained = st.restore(run, device="cpu")
    path = tmp_path / "model.pt2"
    path.write_bytes(b"an older file")
    with pytest.raises(
        FailedError, match=r"model\.pt2 was removed: its logits differ .* by 0\.5, and 0\.\d+ is allowed"
    ):
        st.export_model(replace(trained, module=WrongOnceExported(trained.module)), path)
    assert path.read_bytes() == b"an older file" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(("faster", "code"), [(0.0, 0), pytest.param(1e9, 1, marks=pytest.mark.slow)])
def test_int8_is_kept_only_where_it_is_faster(
    faster: float,
    code: int,
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    need(".onnx")
    monkeypatch.setattr(exporting, "TURN_SECONDS", 0.01)
    monkeypatch.setattr(exporting, "FASTER", faster)
    path = tmp_path / "model.onnx"
    assert main(["export", str(run), "-o", str(path), "--int8", "--max-loss", "50"]) == code
    out, err = capsys.readouterr()
    assert [line.split()[:2] for line in out.splitlines()[1:4]] == [
        ["checkpoint", "torch"],
        ["onnx", "fp32"],
        ["onnx", "int8"],
    ]
    if code:
        assert "was not kept: it is " in err and not list(tmp_path.iterdir())
        return
    opened = open_exported(path)
    assert opened.description.numbers == "int8" and opened.description.difference
    assert list(tmp_path.iterdir()) == [path]


class Brightness(nn.Module):
    """A classifier of ten shades, which in bfloat16 takes the brightest for the darkest."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        shades = images.float().mean((1, 2, 3))[:, None]
        logits = -((10 * shades - torch.arange(10) - 0.5) ** 2)
        return torch.where(shades > 0.9, logits.flip(1), logits) if images.dtype == torch.bfloat16 else logits


@pytest.fixture(scope="module")
def shades(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of 150 grey images of ten shades; there are few of the brightest, and they come last."""
    folder = tmp_path_factory.mktemp("shades")
    for shade in range(10):
        (folder / str(shade)).mkdir()
        for number in range(16 if shade < 9 else 6):
            pixels = np.full((8, 8), 26 * shade + 12 + number % 3, np.uint8)
            pixels[0, 0] = number  # no two are the same
            Image.fromarray(pixels).save(folder / str(shade) / f"{number}.png")
    return folder


@pytest.mark.parametrize(("images", "num_judged", "lost"), [(None, 150, 4.0), (50, 50, 4.0)])
def test_other_numbers_are_judged_by_all_images_or_evenly_drawn_ones(
    images: int | None,
    num_judged: int,
    lost: float,
    run: Path,
    shades: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(exporting, "TURN_SECONDS", 0.01)
    monkeypatch.setattr(exporting, "FASTER", 0.0)
    trained = st.restore(run, device="cpu")
    trained = replace(trained, module=Brightness(), input=replace(trained.input, mean=(0.0,), std=(1.0,)))
    options: dict[str, Any] = {"numbers": "bf16", "data": shades, "images": images}
    result = st.export_model(trained, tmp_path / "model.pt2", max_loss=lost - 0.5, **options)
    _, exact, other = result.rows
    assert (exact.n, other.n, result.num_compared) == (num_judged, num_judged, min(64, num_judged))
    assert (exact.score, other.score) == (1, 1 - lost / 100)
    assert other.top1_agreement == other.score, "the images of which logits are compared are not enough for this"
    assert result.reason == f"it loses {lost:.2f} points of top-1, and {lost - 0.5:g} are allowed (--max-loss)"
    assert not result.is_kept and not list(tmp_path.iterdir())
    assert st.export_model(trained, tmp_path / "model.pt2", max_loss=lost + 0.5, **options).is_kept
    monkeypatch.setattr(exporting, "FASTER", 1e9)
    slow = st.export_model(trained, tmp_path / "slow.pt2", max_loss=lost + 0.5, **options)
    assert not slow.is_kept and slow.reason.startswith("it is ") and not (tmp_path / "slow.pt2").exists()


def test_a_folder_is_loaded_by_timm_as_it_is(tmp_path: Path) -> None:
    import timm
    from timm.data.config import resolve_data_config

    torch.manual_seed(0)
    torch.save(timm.create_model("test_resnet").state_dict(), tmp_path / "stock.pth")
    trained = st.restore(tmp_path / "stock.pth", model="timm/test_resnet", device="cpu")
    assert st.export_model(trained, tmp_path / "hub").is_kept
    again: Any = timm.create_model(f"local-dir:{tmp_path / 'hub'}", pretrained=True).eval()
    zeros = torch.zeros(1, 3, 160, 160)
    with torch.no_grad():
        assert torch.allclose(again(zeros), trained.module(zeros), atol=1e-5)
    assert again.pretrained_cfg["label_names"][285] == "Egyptian cat"
    config: Any = resolve_data_config(again.pretrained_cfg)  # type: ignore[no-untyped-call]
    assert config["mean"] == trained.input.mean and config["input_size"] == (3, 160, 160)
    card = (tmp_path / "hub" / "README.md").read_text()
    assert "license: other" in card and "Not measured." in card and str(tmp_path) not in card
    restored = st.restore(tmp_path / "hub", device="cpu")
    assert (restored.classes, restored.synsets, restored.input) == (trained.classes, trained.synsets, trained.input)
    assert st.export_model(trained, tmp_path / "hub").is_kept  # replaces what it wrote, and nothing else
    (tmp_path / "hub" / "notes.txt").write_text("years of work")
    with pytest.raises(InputError, match="or has more in it, which would be lost"):
        st.export_model(trained, tmp_path / "hub")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("years of work")
    with pytest.raises(InputError, match="exists, and is no exported folder"):
        st.export_model(trained, tmp_path / "full")


@pytest.mark.parametrize(
    ("fit", "mode", "words"), [("squash", "squash", "both sides are"), ("pad", "border", "filled")]
)
def test_a_folder_for_timm_says_how_images_become_square(
    tmp_path: Path, fit: Literal["squash", "pad"], mode: str, words: str
) -> None:
    import timm
    from timm.data.config import resolve_data_config

    torch.save(timm.create_model("test_resnet").state_dict(), tmp_path / "stock.pth")
    trained = st.restore(tmp_path / "stock.pth", model="timm/test_resnet", device="cpu")
    trained = replace(trained, input=replace(trained.input, fit=fit, crop=1.0))
    st.export_model(trained, tmp_path / "hub" / "my-model")
    model: Any = timm.create_model(f"local-dir:{tmp_path / 'hub' / 'my-model'}", pretrained=True)
    config: Any = resolve_data_config(model.pretrained_cfg)  # type: ignore[no-untyped-call]
    assert (config["crop_mode"], config["crop_pct"]) == (mode, 1.0)
    assert words in (tmp_path / "hub" / "my-model" / "README.md").read_text()
    assert st.restore(tmp_path / "hub" / "my-model", device="cpu").input == trained.input


def test_the_card_of_a_probe_tells_no_epoch() -> None:
    about = Description(model="a", input=Input(), classes=("a", "b"))
    measured = {"n": 1, "top1": 1.0, "top5": None, "mean_ap": None}
    assert "on 1 validation image, by the probe." in model_card(about, {**measured, "epoch": 0.0}, name="a")
    assert "on 1 validation image, after 1 epoch." in model_card(about, {**measured, "epoch": 1.0}, name="a")


def test_weights_are_exported_with_their_temperature(run: Path, tmp_path: Path) -> None:
    trained = st.restore(run, device="cpu")
    assert st.export_model(trained, tmp_path / "model.safetensors").rows[0].difference == 0
    assert st.restore(tmp_path / "model.safetensors").temperature == trained.temperature
    with pytest.raises(ModelError, match="have no network digits: a folder for them is for networks of timm"):
        st.export_model(trained, tmp_path / "hub")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-o", "model.tflite"], "-o model.tflite ends in .tflite: it must end in .onnx"),
        (["-o", "model.onnx", "--bf16"], "model.onnx cannot be written in bf16"),
        (["-o", "model.pt2", "--int8"], "model.pt2 cannot be written in int8: take .onnx or .xml"),
        (["-o", "model.onnx", "--int8", "--fp16"], "--int8 and --fp16 exclude each other"),
        (["-o", "model.onnx", "--aot"], "--aot compiles a .pt2 file"),
        (["-o", "none/model.pt2"], "there is no folder none"),
    ],
)
def test_what_cannot_be_written_is_one_line(
    words: list[str],
    message: str,
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["export", str(run), *words]) == 2
    assert message in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_weights_that_are_not_finite_are_named_not_the_engine(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors, about = checkpoints.read_weights(run / "model.safetensors")
    name = next(name for name, tensor in tensors.items() if tensor.dim() == 4)
    tensors[name][0, 0, 0, :2] = float("nan")
    checkpoints.write_weights(tmp_path / "bad.safetensors", tensors, about)
    assert main(["export", str(tmp_path / "bad.safetensors"), "-o", str(tmp_path / "a.pt2")]) == 2
    error = capsys.readouterr().err
    assert f"weights holds NaN or infinite values ({name}: 2)" in error and "engine" not in error
    assert not (tmp_path / "a.pt2").exists()
    assert any(name in note for note in st.restore(tmp_path / "bad.safetensors").notes)


def small_file(path: Path, metadata: dict[str, str] | None = None) -> Path:
    """A tiny exported network."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 2)).eval()
    formats.write_module(net, torch.zeros(2, 3, 2, 2), path, metadata=metadata)
    return path


def test_files_that_cannot_be_used_say_so_in_one_line(tmp_path: Path) -> None:
    bare = small_file(tmp_path / "bare.pt2")
    assert open_module(bare).module(torch.zeros(5, 3, 2, 2)).shape == (5, 2)
    with pytest.raises(ModelError, match="does not describe its images and classes: export it with steady export"):
        st.restore(bare)
    with zipfile.ZipFile(tmp_path / "strange.pt2", "w") as archive:
        archive.writestr("strange/data/aotinductor/model/strange.wrapper.so", b"what would be run")
    with pytest.raises(ModelError, match=r"strange\.pt2 does not describe its images"):  # else: damaged
        st.restore(tmp_path / "strange.pt2")
    with pytest.raises(ModelError, match=r"strange\.pt2 is an exported file already"):
        st.export_model(tmp_path / "strange.pt2", tmp_path / "a.onnx")
    damaged = small_file(tmp_path / "damaged.pt2", {KEY: '{"model": "x"}'})
    with pytest.raises(ModelError, match=r"the description in .*damaged\.pt2 is damaged"):
        st.restore(damaged)
    for name in ("a.onnx", "a.xml", "a.pt2"):
        if name.endswith("pt2") or all(map(_is_there, FORMATS[Path(name).suffix])):
            (tmp_path / name).write_bytes(b"no model at all")
            with pytest.raises(ModelError, match=f"{name} is damaged"):
                st.restore(tmp_path / name)
    with pytest.raises(ModelError, match="whole network, not the weights of one: drop model resnet20"):
        st.restore(bare, model="resnet20")
    with pytest.raises(ModelError, match=r"tensorrt is not installed here .*: pip install tensorrt"):
        require_library("tensorrt")
    with pytest.raises(ModelError, match=r"bare\.pt2 is no file for OpenVINO, which runs \.xml"):
        open_module(bare, engine="openvino")


def test_onnx_runtime_is_kept_from_reporting_its_use_to_its_makers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(engine.NO_TELEMETRY, raising=False)
    monkeypatch.setattr("importlib.import_module", lambda name: os.environ.get(engine.NO_TELEMETRY))
    assert require_library("onnxruntime") == require_library("onnxruntime.quantization") == "1"
    assert require_library("json") is None


@pytest.mark.parametrize("suffix", FORMATS)
def test_a_flipped_bit_of_the_weights_in_an_exported_file_is_refused(suffix: str, tmp_path: Path) -> None:
    need(suffix)
    path, net = tmp_path / f"net{suffix}", nn.Sequential(nn.Flatten(), nn.Linear(108, 50)).eval()
    formats.write_module(net, torch.zeros(2, 3, 6, 6), path, metadata={"name": "net"})
    assert open_module(path).metadata["name"] == "net"
    weights = path.with_suffix(".bin") if suffix == ".xml" else path
    content = bytearray(weights.read_bytes())
    content[content.index(net.state_dict()["1.weight"].numpy().tobytes()[:16]) + 2] ^= 1
    weights.write_bytes(content)
    with pytest.raises(ModelError, match=rf"^{path} is damaged: .*: export it again$"):
        open_module(path)


def test_an_onnx_file_that_another_program_has_changed_is_opened(tmp_path: Path) -> None:
    need(".onnx")
    onnx, path = require_library("onnx"), tmp_path / "net.onnx"
    onnx_net(path)
    ONNXRUNTIME.add_metadata(path, {"name": "net"})
    network = onnx.load(str(path))
    onnx.checker.check_model(network)
    network.graph.initializer[0].raw_data = bytes(len(network.graph.initializer[0].raw_data))
    onnx.save(network, str(path))
    assert open_module(path).metadata["name"] == "net"


def test_an_openvino_file_that_another_program_wrote_anew_is_opened(tmp_path: Path) -> None:
    need(".xml")
    openvino, path = require_library("openvino"), tmp_path / "net.xml"
    net = nn.Sequential(nn.Flatten(), nn.Linear(108, 50)).eval()
    formats.write_module(net, torch.zeros(2, 3, 6, 6), path, metadata={"name": "net"})
    openvino.save_model(openvino.Core().read_model(path), tmp_path / "half.xml", compress_to_fp16=True)
    assert open_module(tmp_path / "half.xml").metadata["name"] == "net"
    weights = path.with_suffix(".bin")
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(ModelError, match=rf"{path} is damaged"):
        open_module(path)


def test_a_file_that_is_code_is_called_so_before_it_is_opened(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    st.export_model(run, tmp_path / "model.pt2")
    image = tmp_path / "a.png"
    Image.new("L", (8, 8)).save(image)
    capsys.readouterr()  # of the export
    assert main(["predict", str(tmp_path / "model.pt2"), str(image)]) == 0
    assert capsys.readouterr().err.startswith(f"{tmp_path / 'model.pt2'} is code, which runs as it is opened")
    (tmp_path / "model.pt2").write_bytes(b"no model at all")
    assert main(["predict", str(tmp_path / "model.pt2"), str(image)]) == 2
    assert "use only files that you trust" in capsys.readouterr().err


def _is_there(name: str) -> bool:
    try:
        require_library(name)
    except ModelError:
        return False
    return True


def test_a_missing_engine_is_named_with_its_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.onnx").write_bytes(b"x")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ModelError, match=r'onnxruntime is not installed here .*: pip install "steadytrain\[export\]"'):
        st.restore(tmp_path / "a.onnx")
    with pytest.raises(ModelError, match="onnxruntime is not installed here"):
        st.export_model(tmp_path / "weights-that-are-read-later.pth", tmp_path / "b.onnx")


def test_descriptions_of_later_versions_can_be_read() -> None:
    description = Description(model="m", input=Input(size=8, channels=1), classes=("a", "b"))
    values = json.loads(description.to_json()) | {"new": 1}
    assert Description.from_json(json.dumps(values), where="x") == description


def test_networks_of_several_inputs_and_outputs_are_exported(tmp_path: Path) -> None:
    class Two(nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return a + b.sum(1, keepdim=True), a * 2

    need(".onnx")
    inputs = torch.ones(1, 3), torch.ones(1, 4)
    formats.write_module(Two().eval(), inputs, tmp_path / "two.onnx")
    total, double = open_module(tmp_path / "two.onnx").module(torch.ones(5, 3), torch.ones(5, 4))
    assert total.tolist() == [[5.0] * 3] * 5 and double.tolist() == [[2.0] * 3] * 5


class Windows(nn.Module):
    """Attention within windows (five dimensions, as in Hiera), with a mask of as many, and over all (three)."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        attend = nn.functional.scaled_dot_product_attention
        tokens = images.flatten(2).transpose(1, 2).reshape(-1, 1, 4, 4, 3)
        mask = torch.arange(4.0).reshape(1, 1, 4, 1, 1)
        inside = attend(tokens, tokens * 2, tokens + 1, mask * torch.arange(4.0)).reshape(-1, 16, 3)
        return attend(inside, inside, inside, scale=0.3).mean(1)


def test_attention_of_other_than_four_dimensions_is_exported_to_onnx(tmp_path: Path) -> None:
    need(".onnx")
    net = Windows().eval()
    formats.write_module(net, torch.zeros(2, 3, 4, 4), tmp_path / "net.onnx")
    opened = open_module(tmp_path / "net.onnx")
    for count in (1, 2, 5):
        images = torch.randn(count, 3, 4, 4, generator=torch.Generator().manual_seed(count))
        torch.testing.assert_close(opened.module(images), net(images), atol=1e-5, rtol=1e-4)


def onnx_net(path: Path, *, half: bool = False) -> nn.Module:
    """A small classifier as an ``.onnx`` file, of any number of images; ``half``: in fp16."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5)).eval()
    images = torch.zeros(2, 3, 6, 6)
    written, images = (copy.deepcopy(net).half(), images.half()) if half else (net, images)
    formats.write_module(written, images, path)
    return net


def onnx_file(folder: Path) -> Path:
    onnx_net(folder / "net.onnx")
    return folder / "net.onnx"


def drawn(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, 3, 6, 6, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("half", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_onnx_runtime_reads_and_writes_tensors_where_they_lie(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, half: bool
) -> None:
    need(".onnx")
    net = onnx_net(tmp_path / "net.onnx", half=half)
    opened, copies = open_module(tmp_path / "net.onnx"), list[int]()
    from_numpy = torch.from_numpy

    def copied(array: np.ndarray[Any, Any]) -> torch.Tensor:
        copies.append(len(array))
        return from_numpy(array)

    monkeypatch.setattr(torch, "from_numpy", copied)
    atol, rtol = (2e-3, 2e-2) if half else (1e-5, 1e-4)
    kept = []
    for seed, count in enumerate((2, 2, 7, 1, 7, 2)):
        images = drawn(count, seed).to(memory_format=torch.channels_last)
        kept.append((opened.module(images), net(images)))
    for outputs, expected in kept:  # each call has an output of its own
        assert outputs.dtype == torch.float32
        torch.testing.assert_close(outputs, expected, atol=atol, rtol=rtol)
    assert copies == [2, 7, 1], "only the first outputs of a shape come by way of the host"
    assert opened.provider == "CPU"


def test_outputs_whose_shape_depends_on_the_images_are_never_bound(tmp_path: Path) -> None:
    class Positive(nn.Module):
        def forward(self, values: torch.Tensor) -> torch.Tensor:
            return torch.nonzero(values > 0)

    need(".onnx")
    formats.write_module(Positive().eval(), torch.ones(2, 3), tmp_path / "positive.onnx")
    module = open_module(tmp_path / "positive.onnx").module
    for values in ([[1.0, -1.0, 1.0]], [[-1.0, -1.0, 1.0]], [[1.0, 1.0, 1.0]]):
        assert module(torch.tensor(values)).tolist() == torch.nonzero(torch.tensor(values) > 0).tolist()


def _pretend_gpu(monkeypatch: pytest.MonkeyPatch, providers: list[str]) -> list[Any]:
    """An onnxruntime-gpu whose sessions have these providers, whatever was asked; what they were asked for."""
    runtime, asked = require_library("onnxruntime"), list[Any]()

    class Session(runtime.InferenceSession):  # type: ignore[misc,name-defined]
        def __init__(self, path: str, options: object, providers: list[Any]) -> None:
            asked.append(providers[0])
            super().__init__(path, options, providers=["CPUExecutionProvider"])

        def get_providers(self) -> list[str]:
            return providers

    names = {"get_available_providers": lambda: ["CUDAExecutionProvider", "CPUExecutionProvider"]}
    known = {name: getattr(runtime, name) for name in ("SessionOptions", "RunOptions")}
    fake = SimpleNamespace(InferenceSession=Session, **known, **names)
    monkeypatch.setattr(onnx_engine, "require_library", lambda name, extra="": fake)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: SimpleNamespace(cuda_stream=4711, device=device))
    return asked


def test_what_runs_is_what_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime falls back to the CPU without an error where CUDA's libraries do not load."""
    need(".onnx")
    net = onnx_net(tmp_path / "net.onnx")
    asked = _pretend_gpu(monkeypatch, ["CPUExecutionProvider"])
    with pytest.raises(
        ModelError, match=r"cannot run on cuda: .* by its CPUExecutionProvider, .* or take --device cpu"
    ):
        open_module(tmp_path / "net.onnx", device="cuda")
    opened = open_module(tmp_path / "net.onnx", device="auto")
    assert (opened.provider, opened.device.type) == ("CPU", "cpu")
    torch.testing.assert_close(opened.module(drawn(2)), net(drawn(2)), atol=1e-5, rtol=1e-4)
    assert asked[0] == ("CUDAExecutionProvider", {"device_id": 0, "user_compute_stream": "4711"})
    _pretend_gpu(monkeypatch, ["CUDAExecutionProvider", "CPUExecutionProvider"])
    assert open_module(tmp_path / "net.onnx", device="cuda:1").provider == "CUDA"


def test_a_format_for_other_devices_is_refused_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", "timm/test_resnet", "-o", str(tmp_path / "m.xml"), "--device", "cuda:1"]) == 2
    assert "is for cpu, and not for --device cuda:1" in capsys.readouterr().err and not [*tmp_path.iterdir()]


def test_engines_of_tensorrt_are_refused_with_what_to_take(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It never ran as an engine of ours: ONNX Runtime has it."""
    (tmp_path / "old.engine").write_bytes(b"an engine")
    (tmp_path / "old.engine.json").write_text("{}")
    words = [["export", str(run), "-o", str(tmp_path / "m.engine")], ["predict", str(tmp_path / "old.engine"), "a.png"]]
    for line in [*words, ["bench", "infer", "mlp", "--engines", "tensorrt"]]:
        assert main(line) == 2
        assert "export the run as .onnx, which ONNX Runtime runs on a GPU, also by TensorRT" in capsys.readouterr().err
    with pytest.raises(ModelError, match="install onnxruntime-gpu"):
        open_module(onnx_file(tmp_path), engine="onnxruntime-tensorrt", device="auto")


def test_the_device_of_an_export_is_the_one_that_is_named(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(run), "-o", str(tmp_path / "m.safetensors"), "--device", "cuda:77"]) == 2
    assert "cuda:77" in capsys.readouterr().err


@pytest.mark.parametrize(("num_classes", "words"), [(3, "the same likeliest class for 90.0 %"), (6, "five likeliest")])
def test_of_few_classes_an_export_tells_the_likeliest(num_classes: int, words: str) -> None:
    row = exporting.ParityRow("onnx fp32", "onnxruntime", 9, difference=0.0, num_classes=num_classes)
    row = replace(row, top1_agreement=0.9, top5_agreement=1.0)
    text = _text(exporting.Exportation(Path("a.onnx"), True, "64 images", 64, 0.01, (row,)))
    assert words in text and ("five" in text) == (num_classes > 5)
