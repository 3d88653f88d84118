"""A temperature is the one with the least loss, changes no prediction, and is kept with the weights."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.optimize import minimize_scalar
from scipy.special import expit, log_softmax

from steadytrain.cli import main
from steadytrain.config import Recipe
from steadytrain.errors import DataError, ModelError, RunError
from steadytrain.run import Run
from steadytrain.training import calibrate, evaluate, predict, restore, train
from steadytrain.training.checkpoints import read_weights
from steadytrain.training.features import held_out
from steadytrain.training.inference.calibration import fit_temperature, require_own_weights
from steadytrain.training.inference.inference import open_evaluation_data
from steadytrain.training.metrics import calibration


def nll(logits: NDArray[np.float32], labels: NDArray[np.int64], temperature: float) -> float:
    scaled = logits.astype(np.float64) / temperature
    if labels.ndim == 2:
        return float(-np.log(expit(np.where(labels > 0, scaled, -scaled))).mean())
    return float(-log_softmax(scaled, 1)[np.arange(len(labels)), labels].mean())


def drawn(seed: int, *, several: bool, n: int = 400) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Logits of a model that is three times as sure as it may be, and labels."""
    draw = np.random.default_rng(seed)
    logits = draw.normal(size=(n, 5)) * 2
    if several:
        labels = (draw.random((n, 5)) < expit(logits)).astype(np.int64)
    else:
        labels = (logits + draw.gumbel(size=logits.shape)).argmax(1)
    return (3 * logits).astype(np.float32), labels


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_the_temperature_is_the_one_that_scipy_finds(seed: int, several: bool) -> None:
    logits, labels = drawn(seed, several=several)
    temperature = fit_temperature(logits, labels)
    expected = minimize_scalar(
        lambda t: nll(logits, labels, t), bounds=(0.05, 20), method="bounded", options={"xatol": 1e-9}
    )
    assert temperature == pytest.approx(expected.x, rel=1e-6)
    assert temperature == pytest.approx(3, rel=0.2), "what made the model too sure is found"
    assert fit_temperature(logits, labels) == temperature


def test_of_two_outputs_it_is_known_in_closed_form() -> None:
    n, right = 50, 40  # one output is 4 above the other, and right in 4 of 5: 4 / T = log(4)
    logits = np.tile(np.array([[4.0, 0.0]], np.float32), (n, 1))
    labels = np.where(np.arange(n) < right, 0, 1)
    assert fit_temperature(logits, labels) == pytest.approx(4 / math.log(4), rel=1e-12)
    assert fit_temperature(logits[:, :1], (labels == 0).astype(np.float32)[:, None]) == pytest.approx(
        4 / math.log(4), rel=1e-12
    )


@given(st.floats(0.3, 4), st.integers(0, 50), st.booleans())
def test_logits_that_are_larger_get_a_temperature_that_is_larger(factor: float, seed: int, several: bool) -> None:
    logits, labels = drawn(seed, several=several, n=60)
    larger = (logits.astype(np.float64) * factor).astype(np.float32)
    assert fit_temperature(larger, labels) == pytest.approx(factor * fit_temperature(logits, labels), rel=1e-4)


@pytest.mark.parametrize(
    ("logits", "labels"),
    [
        ([[2.0, 0], [0, 1]], [0, 1]),  # all right: the surer the better
        ([[2.0, 0], [0, 1]], [1, 0]),  # all wrong
        ([[1.0, 1], [1, 1]], [0, 1]),  # nothing to scale
        ([[math.nan, 1], [1, 2]], [0, 1]),
        (np.zeros((0, 2)), []),
    ],
)
def test_where_no_temperature_is_best_none_is_kept(logits: list[list[float]], labels: list[int]) -> None:
    with pytest.raises(DataError, match=r"no temperature from 0\.05 to 20 fits the .* best|the temperature cannot"):
        fit_temperature(np.array(logits, np.float32), np.array(labels, np.int64))


@pytest.fixture(autouse=True)
def _few_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fit temperatures to the 80 validation images of these runs."""
    monkeypatch.setattr(held_out, "LEAST_TO_CALIBRATE", 1)


@pytest.fixture(params=["classes", "labels"])
def run(request: pytest.FixtureRequest, recipe: Recipe, labels_recipe: Recipe, tmp_path: Path) -> Run:
    """A run that is not well calibrated."""
    chosen = recipe if request.param == "classes" else labels_recipe
    run = Run.create(tmp_path / "run", chosen.with_({"optim.label_smoothing": 0.3, "budget.epochs": 3}))
    train(run)
    return run


def test_a_run_is_calibrated_and_predicts_the_same_with_truer_probabilities(
    run: Run, digits_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    images = sorted(digits_folder.glob("*/*.png"))[::40]
    before, plain = evaluate(run), list(predict(run, images))
    weights_before = read_weights(run.directory / "best.safetensors")[0]
    assert main(["evaluate", str(run.directory), "--calibrate", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    trained = restore(run)
    assert trained.temperature == document["temperature"] != 1
    assert document["nll_before"] == pytest.approx(before.loss, rel=1e-6)
    assert document["nll"] < document["nll_before"], "each half by the temperature of the other"
    assert document["ece_before"] == pytest.approx(calibration(before).ece, abs=1e-7) and document["n"] == 80
    after, scaled = evaluate(run), list(predict(run, images))
    assert (after.top1, after.mean_ap, after.right) == (before.top1, before.mean_ap, before.right)
    assert after.loss < before.loss and document["score"] == after.score
    assert calibration(after, temperature=trained.temperature).ece < calibration(before).ece
    assert [prediction.classes for prediction in scaled] == [prediction.classes for prediction in plain]
    assert any(this.probabilities != other.probabilities for this, other in zip(plain, scaled, strict=True))
    tensors, about = read_weights(run.directory / "best.safetensors")
    assert all(torch.equal(tensors[name], value) for name, value in weights_before.items())
    assert about["calibration"]["temperature"] == document["temperature"]
    assert restore(run, which="last").temperature == 1, "it belongs to one weights file"


def test_images_that_belong_together_are_in_one_half_and_count_as_one(run: Run) -> None:
    trained = restore(run)
    alone, together = (
        calibrate(trained, replace(open_evaluation_data(trained, None), groups=groups))
        for groups in (None, np.arange(80) // 8)
    )
    assert alone.halves != together.halves and alone.gain_error != together.gain_error
    assert alone.nll_before == together.nll_before


def test_predicted_probabilities_are_those_of_the_temperature(
    recipe: Recipe, digits_folder: Path, tmp_path: Path
) -> None:
    run = Run.create(tmp_path / "run", recipe)
    train(run)
    image = sorted(digits_folder.glob("*/*.png"))[7]
    [plain] = predict(run, image, top=10)
    assert main(["evaluate", str(run.directory), "--calibrate"]) == 0
    [scaled] = predict(run, image, top=10)
    powers = np.array(plain.probabilities) ** (1 / restore(run).temperature)
    assert scaled.probabilities == pytest.approx(tuple(powers / powers.sum()), rel=1e-4)


def test_what_is_printed_says_on_what_it_was_fitted_and_judged(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(run.directory)
    assert main(["evaluate", folder, "--calibrate"]) == 0
    output = capsys.readouterr().out
    assert "fitted on 80 images, kept with the weights" in output
    assert "After: each half of the images by the temperature fitted on the other half" in output
    assert "These images also chose the weights" in output
    assert max(map(len, output.splitlines()[1:])) <= 80
    assert main(["evaluate", folder]) == 0
    again = capsys.readouterr()
    assert "the temperature was fitted on these images, so their loss and ECE flatter it" in again.err
    assert "Loss and ECE are of calibrated probabilities: temperature" in again.out
    assert main(["evaluate", folder, str(run.recipe.data.train)]) == 0
    assert "flatter" not in capsys.readouterr().err, "other images"


@pytest.mark.parametrize("words", [["--tta", "flip"], ["--size", "16"], ["--per-image", "a.csv"]])
def test_only_the_weights_as_they_are_can_be_calibrated(
    recipe: Recipe, tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run.create(tmp_path / "run", recipe.with_({"budget.epochs": 0.2}))
    train(run)
    assert main(["evaluate", str(run.directory), "--calibrate", *words]) == 2
    assert f"to the weights as they are, and no more: drop {words[0]}" in capsys.readouterr().err


def test_weights_that_cannot_keep_a_temperature_are_refused(recipe: Recipe, tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", recipe.with_({"budget.epochs": 0.2}))
    train(run)
    trained = restore(run)
    with run.lock(), pytest.raises(RunError, match="is still training, and replaces its weights"):
        require_own_weights(trained)
    require_own_weights(trained)
    torch.save(trained.module.state_dict(), tmp_path / "other.pth")
    other = restore(tmp_path / "other.pth", model="digits", classes=trained.classes)
    with pytest.raises(ModelError, match="no weights file of steadytrain's"):
        require_own_weights(other)
