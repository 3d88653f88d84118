"""``--explain``: what would be trained, and how it is stored; nothing is trained."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from steadytrain.cli import main
from steadytrain.config.plain import leaves


def _explained(capsys: pytest.CaptureFixture[str], digits: Path, *words: str) -> dict[str, object]:
    assert main(["train", str(digits), "--device", "cpu", "--explain", "--json", *words]) == 0
    values: dict[str, object] = json.loads(capsys.readouterr().out)
    return values


def test_nothing_is_trained(digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    words = [str(digits), "--device", "cpu", "--model", "resnet20", "--run", str(run), "--batch-size", "32"]
    assert main(["train", *words, "--explain"]) == 0
    output = capsys.readouterr().out
    assert "resnet20: 2" in output and "updates" in output and "stored as" in output
    assert not run.exists()


def test_autocast_keeps_parameters_in_fp32(digits: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = _explained(capsys, digits, "--model", "resnet20", "--precision", "bf16")
    assert set(document["stored"]) == {"fp32"} and document["masters"] == 0  # type: ignore[call-overload]


def test_pure_numbers_have_twins(digits: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = _explained(capsys, digits, "--model", "mlp", "--precision", "pure-bf16")
    assert document["stored"] == {"bf16": document["parameters"]} and document["masters"] == document["parameters"]


def test_what_is_computed_again_is_named(digits: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = _explained(capsys, digits, "--model", "resnet20", "--precision", "fp32", "--grad-checkpointing")
    again, asked = document["recomputed"], document["recipe"]
    assert isinstance(again, dict) and isinstance(asked, dict) and asked["parallel"]["recompute"]
    assert "layer1.0" in again["parts"] and again["kept_bytes"] < 0.5 * again["usual_bytes"]
    assert main(["train", str(digits), "--device", "cpu", "--model", "resnet20", "--recompute", "--explain"]) == 0
    assert "MB of activations an image instead of" in " ".join(capsys.readouterr().out.split())
    assert main(["train", str(digits), "--device", "cpu", "--model", "mlp", "--recompute", "--explain"]) == 2
    assert "saves nothing worth its time in mlp" in capsys.readouterr().err


def test_what_cannot_be_is_told_as_training_would(digits: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(digits), "--device", "cpu", "--precision", "tf32", "--explain"]) == 2
    assert "which a CPU does not have" in capsys.readouterr().err
    words = ["train", str(digits), "--device", "cpu", "--epochs", "3", "--warmup-epochs", "5", "--explain"]
    assert main(words) == 2
    assert "the warm-up of 5 epochs is longer than the run of 3:" in capsys.readouterr().err


def test_whose_mean_is_used_is_said(data_folder: Path, digits: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = data_folder / "weights/mobilenetv2_100/mobilenetv2_100_timm_layout.safetensors"
    words = ["finetune", str(digits), "--device", "cpu", "--model", "timm/mobilenetv2_100", "--weights", str(weights)]
    words += ["--size", "32", "--explain"]
    assert main(words) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "scaled: timm/mobilenetv2_100's mean (0.485 0.456 0.406) and timm/mobilenetv2_100's std" in text
    assert main([*words, "--set", "data.mean=[0.5,0.5,0.5]"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "scaled: the recipe's mean (0.5 0.5 0.5) and timm/mobilenetv2_100's std (0.229 0.224 0.225)" in text


def test_defaults_fit_the_data_and_the_budget(
    write_digits: Callable[[Path, int, int], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = write_digits(tmp_path / "few", 200, 10)

    def chosen(*words: str) -> tuple[int, float]:
        assert main(["train", str(few), "--device", "cpu", "--model", "mlp", "--explain", "--json", *words]) == 0
        recipe = json.loads(capsys.readouterr().out)["recipe"]
        return recipe["batch_size"], recipe["optim"]["warmup_epochs"]

    assert chosen() == (16, 0.5)  # 160 images to train on, 30 epochs
    assert chosen("--epochs", "1") == (16, 0.25)
    assert chosen("--set", "budget.steps=9")[1] == pytest.approx(0.25 * 9 * 16 / 160)
    assert chosen("--set", "optim.accumulate=16") == (32, 0.5)
    assert chosen("--batch-size", "128", "--epochs", "2", "--set", "optim.warmup_epochs=2") == (128, 2.0)
    (tmp_path / "own.toml").write_text("batch_size = 64\n[optim]\nwarmup_epochs = 1.0\n")
    assert chosen("--recipe", str(tmp_path / "own.toml"), "--epochs", "2") == (64, 1.0)


ROWS = ["data", "model", "trained", "updates", "optimizer", "learning", "augmentation", "images", "targets", "computed"]


def test_all_that_was_chosen_stands_before_the_counts(digits: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", str(digits), "--device", "cpu", "--model", "resnet20", "--precision", "fp32"]
    words += ["--batch-size", "64", "--ema", "0.99", "--label-smoothing", "0.1", "--set", "model.train=head"]
    assert main([*words, "--epochs", "5", "--warmup-epochs", "1", "--explain"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:10] == [
        "model         resnet20: 269,434 parameters, 268,784 of them frozen",
        "trained       the classifier alone",
        "updates       25 of 64 images: 5 epochs of 5 updates",
        "optimizer     sgd, Nesterov momentum 0.9, weight decay 0.0005, no clipping",
        "learning rate 0.05 = 0.1 x 64/128, warm-up of 1 epoch, cosine to 0",
        "augmentation  pad-crop (4 pixels), no flips",
        "images        8x8 pixels, grey, bilinear; evaluated: whole image",
        "targets       label smoothing 0.1; averaged weights (EMA 0.99) are evaluated",
        "computed      fp32 on cpu, channels last",
    ]


@pytest.mark.parametrize("verb", ["train", "finetune"])
def test_the_head_of_a_run_has_at_most_twelve_lines_of_eighty_columns(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, grey in (("cats", 60), ("dogs", 160)):
        Path("photos", name).mkdir(parents=True)
        for number in range(12):
            Image.new("RGB", (120, 90), (grey + number, grey, 90)).save(Path("photos", name, f"{number}.jpg"))
    words = [verb, "photos", "--model", "resnet20", "--size", "32", "--epochs", "1", "--device", "cpu"]
    if verb == "finetune":
        assert main(["train", *words[1:], "--run", "runs/first"]) == 0
        words += ["--weights", "runs/first/model.safetensors"]
    capsys.readouterr()
    assert main([*words, "--explain"]) == 0
    explained = capsys.readouterr().out.splitlines()
    last = next(number for number, line in enumerate(explained) if line.startswith("computed"))
    assert [line.split()[0] for line in explained[: last + 1] if not line.startswith(" ")] == ROWS and last < 12
    assert main([*words, "--run", "runs/a"]) == 0
    began = capsys.readouterr().err.partition("started ")[2].splitlines()
    head = ["started " + began[0], *began[1 : last + 2]]
    assert head[1:] == explained[: last + 1]
    assert sum(-(-len(line) // 80) for line in head) <= 12
    assert "resized-crop (area 0." in "".join(head) and "flips" in "".join(head)


RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.toml"))
LARGE = ("imagenet-resnet50-16", "imagenet-resnet50-a3")
"""Another has the same network as these, which take seconds to make."""


@pytest.mark.parametrize(
    "file",
    [pytest.param(path, marks=pytest.mark.slow if path.stem in LARGE else (), id=path.stem) for path in RECIPES],
)
def test_recipe_files_can_be_trained_and_say_what_was_measured(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = file.read_text(encoding="utf-8")
    head = " ".join(line.removeprefix("#").strip() for line in text.splitlines() if line.startswith("#"))
    assert re.search(r"Not measured by us.*?: (needs a GPU|benchmarks/)|[Mm]easured .* on 20\d\d-\d\d-\d\d", head), (
        "a receipt, or none"
    )
    verb = "finetune" if file.stem.startswith("finetune") else "train"
    side = 32 if file.stem.startswith("cifar10") else 80
    for label in ("a", "b"):
        (tmp_path / "photos" / label).mkdir(parents=True)
        for number in range(8):
            colour = (16 * number, 128, 255 if label == "a" else 0)
            Image.new("RGB", (side, side), colour).save(tmp_path / "photos" / label / f"{number}.png")
    words = [str(tmp_path / "photos"), "--recipe", str(file), "--device", "cpu", "--set", "model.pretrained=false"]
    words += ["--batch-size", "4"]  # of 16 images
    assert main([verb, *words, "--explain", "--json"]) == 0
    values = dict(leaves(json.loads(capsys.readouterr().out)["recipe"]))
    written = tomllib.loads(text)
    written.pop("sweep", None)  # for steady sweep
    for key, value in leaves(written):
        assert key in ("model.pretrained", "batch_size") or values[key] == value, key
