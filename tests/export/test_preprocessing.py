"""ONNX files that preprocess: any image goes in as bytes, and what the network sees is what the loader makes of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from PIL import Image
from torch import nn

import steadytrain as st
from steadytrain.cli import main
from steadytrain.data.loader.crop import Crop
from steadytrain.data.loader.decode import cut_from
from steadytrain.errors import FailedError, ModelError
from steadytrain.export import preprocessing
from steadytrain.export.formats import write_module
from steadytrain.models.weights import Input

SIZES = [(1, 1), (37, 500), (500, 37), (200, 3000), (29, 31), (33, 64), (481, 640), (32, 32)]


def photo(height: int, width: int, seed: int = 0) -> np.ndarray:
    """An image of soft colours, uint8[H, W, 3]."""
    small = np.random.default_rng(seed).integers(0, 256, (max(1, height // 8), max(1, width // 8), 3), dtype=np.uint8)
    return np.asarray(Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC))


@pytest.mark.parametrize(
    "rule",
    [
        {"crop": 0.875},
        {"crop": 0.95, "interpolation": "bicubic"},
        {"fit": "squash"},
        {"fit": "squash", "crop": 0.875, "interpolation": "bicubic"},
        {"fit": "pad", "fill": (124, 116, 104)},
        {"fit": "pad", "crop": 0.875},
        {"fit": "pad", "channels": 1, "fill": (99,)},
        {"channels": 1, "crop": 0.875, "interpolation": "bicubic"},
    ],
    ids=str,
)
def test_the_network_sees_what_the_loader_makes_of_images_of_any_size(rule: dict[str, Any], tmp_path: Path) -> None:
    crop, path = Crop(kind="none", size=32, **rule), tmp_path / "net.onnx"
    mean, std = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)) if crop.channels == 3 else ((0.4,), (0.2,))
    network = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * crop.channels, 3)).eval()
    write_module(network, torch.zeros(2, crop.channels, 32, 32), path)
    input = Input(size=32, mean=mean, std=std, channels=crop.channels)
    preprocessing.add_preprocessing(path, crop, input, temperature=2.0, is_multi_label=False)
    assert {node.domain for node in onnx.load(path).graph.node} == {""}, "standard operators alone"
    session = onnxruntime.InferenceSession(path)
    for height, width in SIZES:
        images = np.stack([photo(height, width, seed) for seed in range(3)])
        squares = np.empty((3, 32, 32, crop.channels), np.uint8)
        plan = crop.plan(np.array([[height, width]]), np.empty((1, 0)))
        for square, image in zip(squares, images, strict=True):
            plain = image if crop.channels == 3 else np.asarray(Image.fromarray(image).convert("L"))[..., None]
            cut_from(square, np.ascontiguousarray(plain), crop, plan, 0)
        expected = ((squares / 255 - np.array(mean)) / np.array(std)).transpose(0, 3, 1, 2)
        logits, probabilities, actual = session.run(["logits", "probabilities", "images"], {"pixels": images})
        levels = np.abs(actual - expected) * 255 * np.array(std).reshape(-1, 1, 1)
        assert levels.max() < 2.01, (height, width)
        assert levels.mean() < 0.15, (height, width)
        with torch.no_grad():
            np.testing.assert_allclose(logits, network(torch.from_numpy(actual)).numpy(), atol=1e-5)
        np.testing.assert_allclose(probabilities, torch.from_numpy(logits / 2).softmax(1).numpy(), atol=1e-6)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run on stripes, upright or lying, in colour."""
    folder = tmp_path_factory.mktemp("stripes")
    for name in ("lying", "upright"):
        (folder / "photos" / name).mkdir(parents=True)
        for number in range(20):
            pixels = np.random.default_rng(number).integers(0, 99, (40, 60, 3), dtype=np.uint8)
            pixels[(slice(None, None, 4),) if name == "lying" else (slice(None), slice(None, None, 4))] += 150
            Image.fromarray(pixels).save(folder / "photos" / name / f"{number}.png")
    words = ["--model", "lenet", "--size", "32", "--epochs", "2", "--batch-size", "8", "--device", "cpu"]
    assert main(["train", str(folder / "photos"), *words, "--run", str(folder / "run")]) == 0
    return folder / "run"


def test_an_exported_run_answers_as_predict_does(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(run), "-o", str(tmp_path / "a.onnx"), "--with-preprocessing"]) == 0
    words = capsys.readouterr().out
    assert "images of 1 x 1 to 3000 x 200: pixels differ from predict's by" in words
    session = onnxruntime.InferenceSession(tmp_path / "a.onnx")
    about = json.loads(session.get_modelmeta().custom_metadata_map["steadytrain-pixels"])
    for height, width in SIZES:
        Image.fromarray(photo(height, width)).save(tmp_path / "a.png")
        [ours] = st.predict(run, tmp_path / "a.png", top=2)
        [theirs] = session.run(["probabilities"], {"pixels": photo(height, width)[None]})[0]
        by_class = dict(zip(about["classes"], theirs.tolist(), strict=True))
        assert by_class == pytest.approx(dict(zip(ours.classes, ours.probabilities, strict=True)), abs=0.01)
    with pytest.raises(
        ModelError, match=r"a\.onnx takes pixels, for programs of your own \(--with-preprocessing\): name the run"
    ):
        st.restore(tmp_path / "a.onnx")


def test_an_export_says_that_predict_computes_in_other_numbers(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model", "lenet", "--size", "32", "--epochs", "1", "--batch-size", "8", "--device", "cpu"]
    for numbers in ("bf16", "fp32"):
        again = tmp_path / numbers
        photos = str(run.parent / "photos")
        assert main(["train", photos, *words, "--precision", numbers, "--run", str(again)]) == 0
        assert main(["export", str(again), "-o", str(tmp_path / "a.onnx"), "--with-preprocessing"]) == 0
        said = "predict and serve answer in bf16" in "".join(capsys.readouterr())
        assert said == (numbers == "bf16")


def test_a_file_whose_preprocessing_is_wrong_is_not_kept(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preprocessing, "MOST_LEVELS", -1)
    with pytest.raises(FailedError, match=r"pixels differ from the loader's by .* of 256 levels"):
        st.export_model(run, tmp_path / "a.onnx", with_preprocessing=True, say=lambda line: None)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("more", "named"), [(["-o", "a.pt2"], "a.pt2 in fp32"), (["-o", "a.onnx", "--int8"], "a.onnx in int8")]
)
def test_other_files_are_refused(run: Path, more: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(run), "--with-preprocessing", *more]) == 2
    assert f".onnx files in fp32, not for {named}: leave it out" in capsys.readouterr().err
