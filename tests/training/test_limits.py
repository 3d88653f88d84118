"""A model knows its limits: unlike images, sure answers, a temperature from images that it has not seen."""

from __future__ import annotations

import csv
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.neighbors import NearestNeighbors
from sklearn.preprocessing import normalize

from steadytrain.cli import main
from steadytrain.cli.evaluate import _coverage_figures
from steadytrain.config import Recipe
from steadytrain.data.results.scores import coverage_curve, promise
from steadytrain.errors import DataError
from steadytrain.export.export import export_model
from steadytrain.intervals import wilson
from steadytrain.run import Run
from steadytrain.training import calibrate, predict, restore, train
from steadytrain.training.evaluation import Evaluation
from steadytrain.training.features import held_out
from steadytrain.training.features.held_out import make_limits
from steadytrain.training.inference.limits import (
    energy_of,
    joint_limits,
    limits_path,
    nearest,
    open_judge,
    read_limits,
    unit_rows,
    write_limits,
)
from steadytrain.training.inference.prior import with_prior
from steadytrain.training.metrics import effective_n


@pytest.fixture(scope="module", params=["probe", "full"])
def trained(
    request: pytest.FixtureRequest, recipe: Recipe, trained_weights: Path, tmp_path_factory: pytest.TempPathFactory
) -> Run:
    """A probe of digits, and a network that was trained on them."""
    probe = {"model.weights": str(trained_weights), "model.train": "probe", "budget.epochs": 0}
    recipe = recipe.with_(probe if request.param == "probe" else {"budget.epochs": 4})
    return train(Run.create(tmp_path_factory.mktemp("trained") / "run", recipe)).run


@pytest.fixture
def run(trained: Run, tmp_path: Path) -> Run:
    """A copy of it."""
    return Run.open(shutil.copytree(trained.directory, tmp_path / "run"))


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("foreign")
    draw = np.random.default_rng(0)
    for number in range(20):
        Image.fromarray(draw.integers(0, 256, (8, 8), dtype=np.uint8)).save(folder / f"{number}.png")
    return folder


def test_neighbours_are_those_of_scikit_learn_and_leave_their_own_group_out() -> None:
    draw = np.random.default_rng(0)
    known, queries = draw.normal(size=(9000, 6)), draw.normal(size=(40, 6))
    oracle = NearestNeighbors(n_neighbors=10, algorithm="brute").fit(normalize(known))
    distances, rows = nearest(unit_rows(torch.from_numpy(known)), unit_rows(torch.from_numpy(queries)), 10)
    expected, numbers = oracle.kneighbors(normalize(queries))
    assert distances.numpy() == pytest.approx(expected, abs=1e-3) and (rows.numpy() == numbers).mean() > 0.99
    groups = np.arange(9000) // 3
    far, others = nearest(
        unit_rows(torch.from_numpy(known)),
        unit_rows(torch.from_numpy(known[:30])),
        5,
        groups=groups,
        own=groups[:30],
    )
    assert (groups[others.numpy()] != groups[:30, None]).all()
    assert (far[:, 0] > 0).all(), "an image is no neighbour of itself"


def test_the_energy_is_the_log_of_the_sum_of_exponentials() -> None:
    logits = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    assert torch.equal(energy_of(logits), torch.logsumexp(logits.double(), 1))


@pytest.mark.parametrize("seed", range(3))
def test_both_limits_together_keep_the_share_that_is_asked_for(seed: int) -> None:
    draw = np.random.default_rng(seed)
    distances, energies = draw.random(400), draw.normal(size=400)
    most, least = joint_limits(distances, energies)
    kept = float(((distances <= most) & (energies >= least)).mean())
    assert 0.95 <= kept <= 0.9575
    assert float((energies >= least).mean()) == 0.99, "a fifth of what does not pass"


def test_images_that_were_held_out_pass_and_noise_does_not(run: Run, digits_folder: Path, foreign: Path) -> None:
    limits = make_limits(run, say=lambda line: None)
    assert limits.about["held_out"] == (
        "320 training images answered out of fold" if restore(run).is_probe else "80 validation images"
    )
    assert limits.features.dtype == torch.float16 and limits.features.shape[0] == 320
    assert limits.features.float().norm(dim=1).numpy() == pytest.approx(1, abs=1e-3)
    again = read_limits(limits_path(run.directory / "best.safetensors"))
    assert again.thresholds == limits.thresholds and torch.equal(again.features, limits.features)
    known = [prediction.judgement for prediction in predict(run, digits_folder)]
    strange = [prediction.judgement for prediction in predict(run, foreign)]
    assert np.mean([judgement is not None and not judgement.is_unlike for judgement in known]) > 0.85
    assert np.mean([judgement is not None and judgement.is_unlike for judgement in strange]) > 0.5, "of a tiny network"


def test_more_images_than_there_is_room_for_are_drawn_alike_from_each_class(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    width = make_limits(run, say=lambda line: None).features.shape[1]
    monkeypatch.setattr(held_out, "MOST_BYTES", 100 * 2 * width)
    lines: list[str] = []
    limits = make_limits(run, say=lines.append)
    assert lines == ["100 of 320 training images are taken, the same share of each class"]
    assert limits.features.shape == (100, width) and len(np.unique(limits.ids)) == 100


def test_limits_of_other_weights_are_not_used(run: Run) -> None:
    make_limits(run, say=lambda line: None)
    assert open_judge(restore(run)) is not None
    other = run.directory / "model.safetensors"
    limits_path(run.directory / "best.safetensors").rename(limits_path(other))
    tensors = restore(run, which="last").module.state_dict()
    lines: list[str] = []
    trained = restore(run, which="last")
    with torch.no_grad():
        next(p for n, p in trained.module.named_parameters() if p.shape[:1] == (10,) and p.dim() == 2).add_(1)
    assert tensors and open_judge(trained, say=lines.append) is None
    assert "is for other weights, and is not used" in lines[0]


@pytest.mark.parametrize("fault", ["empty", "damaged", "others", "foreign", "no held-out images"])
def test_a_broken_file_is_named_and_predictions_go_on(
    run: Run, foreign: Path, fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    made, path = make_limits(run, say=lambda line: None), limits_path(run.directory / "best.safetensors")
    content = path.read_bytes()
    if fault == "others":
        shutil.copy(run.directory / "best.safetensors", path)
    elif fault == "no held-out images":
        arrays = {name: getattr(made, name)[:0] for name in ("distances", "logits", "labels")}
        write_limits(path, replace(made, **arrays))
    else:
        bad = {
            "empty": b"",
            "damaged": content[:-9] + bytes([content[-9] ^ 1]) + content[-8:],
            "foreign": b"\x89PNG" * 9,
        }
        path.write_bytes(bad[fault])
    words, image = ["predict", str(run.directory), str(foreign / "0.png")], str(foreign / "0.png")
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert image in out and "unlike" not in out
    assert f"{path} holds no limits of a model (" in err and "steady evaluate RUN --limits makes that of a run" in err
    assert main([*words, "--abstain-at", "0.5"]) == 2
    assert open_judge(restore(run, which="last")) is None
    make_limits(run, say=lambda line: None)
    assert open_judge(restore(run)) is not None


def test_a_prior_changes_no_image_to_an_unlike_one(run: Run, digits_folder: Path) -> None:
    make_limits(run, say=lambda line: None)
    images = sorted(digits_folder.glob("*/*.png"))[::20]
    trained = restore(run)
    plain = [prediction.judgement for prediction in predict(trained, images)]
    table = {name: 1.0 + number for number, name in enumerate(trained.classes)}
    shifted = [prediction.judgement for prediction in predict(with_prior(trained, table), images)]
    for before, after in zip(plain, shifted, strict=True):
        assert before is not None and after is not None
        assert after.energy == pytest.approx(before.energy, abs=1e-4) and after.is_unlike == before.is_unlike
    with pytest.raises(DataError, match="drop one of the two"):
        list(predict(with_prior(trained, table), images, abstain_at=0.9))


def test_a_promise_is_what_the_lower_end_of_the_interval_holds() -> None:
    draw = np.random.default_rng(0)
    p = draw.random(2000)
    right = draw.random(2000) < 0.6 + 0.4 * p
    found = promise(p, right, 0.9, "2,000 images")
    kept = p >= found.threshold
    assert found.low == wilson(float(right[kept].mean()), int(kept.sum())).low >= 0.9
    assert found.coverage == kept.mean() and found.top1 == right[kept].mean()
    with pytest.raises(DataError, match=r"cannot be promised on 40 images: at most 0\.912, of the surest 100 %;"):
        promise(np.linspace(1, 0.5, 40), np.ones(40, np.bool_), 0.95, "40 images")


def test_accuracy_over_coverage_counts_equal_probabilities_together() -> None:
    p, n, right = coverage_curve(np.array([0.5, 0.9, 0.5, 0.7]), np.array([True, True, False, False]))
    assert (p.tolist(), n.tolist(), right.tolist()) == ([0.9, 0.7, 0.5], [1, 2, 4], [1, 1, 2])


def test_the_interval_of_kept_answers_is_that_of_groups() -> None:
    p, is_right, groups = np.linspace(1, 0.1, 40), np.arange(40) % 3 > 0, np.arange(40) // 2
    outputs = np.stack([np.zeros(40), p, np.zeros(40), np.where(is_right, 1, 2)], 1).astype(np.float32)
    result = Evaluation(40, 1.0, float(is_right.mean()), 1.0, (26,), (40,), outputs=outputs)
    worth = effective_n(is_right[:20], groups[:20])
    assert worth is not None and worth < 20
    for known, n in ((groups, worth), (np.arange(40), 20), (None, 20)):
        kept = _coverage_figures(result, float(p[19]) - 0.01, known)["abstention"]
        interval = wilson(float(is_right[:20].mean()), n)
        assert (kept["coverage"], kept["top1_low"], kept["top1_high"]) == (0.5, interval.low, interval.high)


def test_predictions_say_it_in_text_in_json_and_in_csv(
    run: Run, foreign: Path, digits_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, image = str(run.directory), str(foreign / "0.png")
    assert main(["predict", folder, image, "--abstain-at", "0.5"]) == 2
    assert "steady evaluate RUN --limits makes best.limits.safetensors" in capsys.readouterr().err
    assert main(["predict", folder, image, "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)[0]) == {"image", "classes", "error"}, "as before, without limits"
    assert main(["evaluate", folder, "--limits"]) == 0
    assert "pass" in capsys.readouterr().out
    assert main(["predict", folder, image, str(sorted(digits_folder.glob("0/*.png"))[0])]) == 0
    assert "unlike the training images (" in capsys.readouterr().out.splitlines()[0]
    assert main(["predict", folder, image, "--json", "--abstain-at", "0.5"]) == 0
    document = json.loads(capsys.readouterr().out)[0]
    assert document["unlike"] is True and isinstance(document["sure"], bool)
    assert main(["predict", folder, image, "--csv", str(tmp_path / "a.csv"), "--top", "2"]) == 0
    (row,) = csv.DictReader((tmp_path / "a.csv").open())
    assert list(row)[-5:] == ["unlike", "distance", "distance_limit", "energy", "energy_limit"]
    assert row["unlike"] == "yes" and float(row["distance"]) == pytest.approx(document["distance"], rel=1e-4)


def test_an_exported_file_takes_them_along(run: Run, foreign: Path, tmp_path: Path) -> None:
    make_limits(run, say=lambda line: None)
    lines: list[str] = []
    for name in ("a.safetensors", "a.onnx"):
        export_model(run, tmp_path / name, say=lines.append)
    assert lines.count(f"wrote {tmp_path / 'a.limits.safetensors'}: which images are unlike the training images") == 2
    (judged,) = (prediction.judgement for prediction in predict(tmp_path / "a.safetensors", foreign / "0.png"))
    assert judged is not None and judged.is_far
    (alone,) = (prediction.judgement for prediction in predict(tmp_path / "a.onnx", foreign / "0.png"))
    assert alone is not None and alone.distance is None and alone.energy == pytest.approx(judged.energy, abs=0.01)


def test_a_file_is_not_judged_by_the_limits_of_another(run: Run, recipe: Recipe, tmp_path: Path) -> None:
    make_limits(run, say=lambda line: None)
    export_model(run, tmp_path / "a.onnx")
    other = Run.create(tmp_path / "other", recipe.with_({"seed": 1, "budget.epochs": 1}))
    train(other)
    export_model(other, tmp_path / "a.safetensors")  # has none, and leaves those of a.onnx there
    assert open_judge(restore(tmp_path / "a.onnx")) is not None
    make_limits(other, say=lambda line: None)
    export_model(other, tmp_path / "a.safetensors")
    lines: list[str] = []
    assert open_judge(restore(tmp_path / "a.onnx"), say=lines.append) is None and "for another file" in lines[0]
    assert open_judge(restore(tmp_path / "a.safetensors")) is not None


def test_a_temperature_stays_at_1_where_it_does_not_pay(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    left = calibrate(run, say=lambda line: None)
    assert left.temperature == 1 == restore(run).temperature
    if restore(run).is_probe:
        assert left.n == 320 and "2 standard errors (" in left.left
    else:
        assert left.n == 80 and left.left.startswith("80 images are fewer than 500")
