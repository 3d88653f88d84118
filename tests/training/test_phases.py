"""What is trained when: by name, by phase, and a classifier that is fitted to features first."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from steadytrain import events
from steadytrain.config import Recipe
from steadytrain.data.packing.pack import pack
from steadytrain.data.recordio.reader import Records
from steadytrain.data.results.predictions import read_predictions
from steadytrain.errors import ModelError, RecipeError, RunError
from steadytrain.format import percent
from steadytrain.machine.process import StopRequest
from steadytrain.monitor import diagnose, ledger
from steadytrain.reports.verdict import verdict_text
from steadytrain.run import Run
from steadytrain.training import checkpoints, evaluate, restore, steps, train
from steadytrain.training.features.folds import fit_classifier, minimize
from steadytrain.training.features.table import feature_table
from steadytrain.training.loop.replay import replay

Weights = Callable[[Path], bytes]


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "model.safetensors")


def train_for(run: Run, updates: int) -> None:
    """Train, and stop after so many updates as Ctrl-C does."""
    seen: list[events.Event] = []
    for event in steps(run, stop=lambda: "SIGINT" if len(seen) >= updates else None):
        if isinstance(event, events.Step):
            seen.append(event)
    assert run.finished() is None


def changed(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> set[str]:
    """Names of the parameters and buffers that differ."""
    return {name for name in before if not torch.equal(before[name], after[name])}


def test_frozen_parts_and_their_statistics_stay(recipe: Recipe, trained_weights: Path, tmp_path: Path) -> None:
    names = [name for name in load_file(trained_weights) if name.endswith("weight")]
    first = names[0].rpartition(".")[0]
    changes = {"model.weights": str(trained_weights), "model.freeze": (f"{first}*",), "budget.epochs": 1}
    train(Run.create(tmp_path / "run", recipe.with_(changes)))
    moved = changed(load_file(trained_weights), weights_of(tmp_path / "run"))
    assert moved and not any(name.startswith(f"{first}.") for name in moved)


def test_a_pattern_that_matches_nothing_is_named_with_what_is_near(recipe: Recipe, tmp_path: Path) -> None:
    with pytest.raises(
        ModelError, match=r"model.freeze has 'layr1\*', which matches no parameter of resnet20.*Did you mean layer1"
    ):
        train(Run.create(tmp_path / "run", recipe.with_({"model.name": "resnet20", "model.freeze": ("layr1*",)})))


def test_freezing_everything_is_refused(recipe: Recipe, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="leaves nothing"):
        train(Run.create(tmp_path / "run", recipe.with_({"model.freeze": ("*",)})))


@pytest.mark.parametrize("stop", [10, *(pytest.param(stop, marks=pytest.mark.slow) for stop in (4, 13))])
@pytest.mark.parametrize(
    ("text", "optimizer"),
    [
        ("head:0.5+gradual", "adamw"),
        pytest.param("head:1+full", "sgd", marks=pytest.mark.slow),
        pytest.param("gradual", "sgd", marks=pytest.mark.slow),
        pytest.param("head:1+full", "adamw", marks=pytest.mark.slow),
        pytest.param("head:0.5+gradual", "sgd", marks=pytest.mark.slow),
        pytest.param("gradual", "adamw", marks=pytest.mark.slow),
    ],
)
def test_a_phased_run_that_is_interrupted_comes_to_the_same_bits(
    recipe: Recipe, tmp_path: Path, weights: Weights, text: str, optimizer: str, stop: int
) -> None:
    """Before, at and after the update with which the body joins."""
    changes = {"model.train": text, "optim.name": optimizer, "optim.lr": 0.002, "every.save_steps": 5}
    phased = recipe.with_({**changes, "every.keep": 9})
    train(Run.create(tmp_path / "whole", phased))
    run = Run.create(tmp_path / "parts", phased)
    train_for(run, stop)
    train(run)
    assert weights(tmp_path / "parts") == weights(tmp_path / "whole")


def test_only_the_classifier_moves_in_the_first_phase(recipe: Recipe, trained_weights: Path, tmp_path: Path) -> None:
    phased = recipe.with_({"model.weights": str(trained_weights), "model.train": "head:1+full", "every.save_steps": 1})
    run = Run.create(tmp_path / "run", phased.with_({"every.keep": 99}))
    seen = list(steps(run))
    models = {step: checkpoints.load(run.checkpoints / f"step-{step:08d}")["model"] for step in (1, 10, 11)}
    head = changed(models[1], models[10])
    assert 1 <= len(head) <= 2
    assert len(changed(models[10], models[11])) > 2
    assert any(isinstance(e, events.Noticed) and "trained from here on" in e.message and e.step == 11 for e in seen)


@pytest.mark.parametrize("change", [{"precision.compile": "default"}, {"parallel.graph": True}])
def test_phases_are_neither_compiled_nor_recorded(recipe: Recipe, change: dict[str, object]) -> None:
    with pytest.raises(RecipeError, match="parameters join later"):
        recipe.with_({"model.train": "gradual", **change})


@pytest.mark.parametrize("change", [{"optim.loss": "focal"}, {"optim.class_weights": "balanced"}])
def test_a_probe_has_no_other_loss(recipe: Recipe, change: dict[str, object]) -> None:
    with pytest.raises(RecipeError, match=r"a probe (is fitted by cross-entropy|weighs all images alike)"):
        recipe.with_({"model.train": "probe", "budget.epochs": 0, **change})


def test_a_probe_fits_the_classifier_and_nothing_else(recipe: Recipe, trained_weights: Path, tmp_path: Path) -> None:
    probe = recipe.with_({"model.weights": str(trained_weights), "model.train": "probe", "budget.epochs": 0, "seed": 3})
    run = Run.create(tmp_path / "run", probe)
    seen = list(steps(run))
    (evaluated,) = (e for e in seen if isinstance(e, events.Evaluated))
    assert (evaluated.step, evaluated.n) == (0, 80) and evaluated.top1 > 0.8
    assert isinstance(seen[-1], events.Ended) and seen[-1].status == "finished"
    moved = changed(load_file(trained_weights), weights_of(tmp_path / "run"))
    assert 1 <= len(moved) <= 2
    assert evaluate(run).top1 == evaluated.top1
    assert list(steps(run)) == [], "it is finished"
    train(Run.create(tmp_path / "again", probe))
    assert not changed(weights_of(tmp_path / "run"), weights_of(tmp_path / "again"))


def test_a_probe_tells_how_far_it_is_and_has_a_bucket_of_its_own(
    recipe: Recipe, trained_weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("steadytrain.training.finetuning.linear_probe.TOLD_SECONDS", 0.0)
    probe = recipe.with_({"model.weights": str(trained_weights), "model.train": "probe:2", "budget.epochs": 0})
    run = Run.create(tmp_path / "run", probe)
    seen = list(steps(run))
    told = [event for event in seen if isinstance(event, events.ProbeProgress)]
    assert [event.images for event in told] == sorted(event.images for event in told) and len(told) > 6
    assert (told[0].images, told[-1].images, told[-1].total) == (0, 640, 640)
    assert told[-2].fit_seconds is None and told[-1].fit_seconds is not None and told[-1].seconds > 0
    assert all(0 <= event.wait_seconds <= event.seconds for event in told) and (told[-1].feed["images"] or 0) >= 320
    held = ledger(run)
    assert sum(held.seconds.values()) == pytest.approx(held.wall_seconds)
    assert held.seconds["probe"] == pytest.approx(told[-1].seconds + told[-1].fit_seconds, abs=0.5)
    assert torch.is_grad_enabled()


def test_a_probe_of_features_in_the_cache_has_the_same_bits_and_says_where_they_are_from(
    recipe: Recipe, trained_weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe = recipe.with_(
        {"model.weights": str(trained_weights), "model.train": "probe:2", "budget.epochs": 0, "seed": 5}
    )
    found = {}
    for name in ("own", "own-again", "table"):
        if name != "own-again":
            monkeypatch.setenv("STEADYTRAIN_CACHE", str(tmp_path / f"cache-{name}"))
        run = Run.create(tmp_path / name, probe)
        if name == "table":  # made by another command
            with Records.open(run.recipe.data.train) as records:
                feature_table(restore(tmp_path / "own"), records)
        seen = list(steps(run))
        told = [event for event in seen if isinstance(event, events.ProbeProgress)][-1]
        said = [event.message for event in seen if isinstance(event, events.Noticed) and "probe:" in event.message]
        found[name] = told.reused, "320 of 640 from the cache" in said[0]
    assert list(found.values()) == [(0, False), (320, True), (320, True)]
    assert not changed(*(weights_of(tmp_path / name) for name in ("own", "own-again")))
    assert not changed(*(weights_of(tmp_path / name) for name in ("own", "table")))


def test_folds_of_a_probe_are_answered_by_classifiers_that_have_not_seen_them(
    recipe: Recipe, trained_weights: Path, tmp_path: Path
) -> None:
    changes = {"model.weights": str(trained_weights), "model.train": "probe", "budget.epochs": 0, "model.folds": 5}
    run = Run.create(tmp_path / "run", recipe.with_(changes))
    seen = list(steps(run))
    told = [event for event in seen if isinstance(event, events.ProbeProgress)][-1]
    assert len(told.by_fold) == 5 and told.fold_top1 == pytest.approx(np.mean(told.by_fold), abs=0.01)
    said = [event.message for event in seen if isinstance(event, events.Noticed) and "5 folds" in event.message]
    assert f"top-1 {100 * (told.fold_top1 or 0):.1f} %" in said[0] and "deviation" in said[0]
    rows = list(read_predictions(run.directory / "folds.csv"))
    assert len({row.record for row in rows}) == len(rows) == 320
    assert np.mean([row.true == row.predicted for row in rows]) == pytest.approx(told.fold_top1)
    assert np.mean([row.loss for row in rows]) == pytest.approx(told.fold_loss, rel=1e-3)
    with (run.directory / "folds.csv").open(encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    for fold, top1 in enumerate(told.by_fold):
        assert top1 == np.mean([line["true"] == line["predicted"] for line in lines if line["fold"] == str(fold)])
    plain = Run.create(tmp_path / "plain", recipe.with_({**changes, "model.folds": 0}))
    train(plain)
    assert not changed(weights_of(run.directory), weights_of(plain.directory)), "the classifier is the same"


def test_folds_of_anything_but_a_probe_are_refused(recipe: Recipe) -> None:
    with pytest.raises(RecipeError, match=r"model\.folds=5.*add --train probe"):
        recipe.with_({"model.train": "probe+full", "model.folds": 5})
    with pytest.raises(RecipeError, match="from 2 to 100"):
        recipe.with_({"model.train": "probe", "budget.epochs": 0, "model.folds": 1})


def test_a_probe_has_no_update_to_replay(recipe: Recipe, trained_weights: Path, tmp_path: Path) -> None:
    probe = recipe.with_({"model.weights": str(trained_weights), "model.train": "probe", "budget.epochs": 0})
    run = Run.create(tmp_path / "run", probe)
    train(run)
    with pytest.raises(RunError, match="no update to replay"):
        replay(run)


def test_a_probe_that_is_stopped_leaves_how_far_it_came(recipe: Recipe, trained_weights: Path, tmp_path: Path) -> None:
    probe = recipe.with_({"model.weights": str(trained_weights), "model.train": "probe:9", "budget.epochs": 0})
    run = Run.create(tmp_path / "run", probe)
    told: list[events.Event] = []
    for event in steps(run, stop=lambda: "SIGINT" if told else None):
        told.extend([event] if isinstance(event, events.ProbeProgress) else [])
    assert isinstance(event, events.Ended) and event.status == "interrupted" and not any(run.checkpoints.glob("step-*"))
    assert all(isinstance(e, events.ProbeProgress) and e.fit_seconds is None for e in told)
    assert "checkpoint" not in verdict_text(diagnose(run), "run")
    train(run)
    assert run.finished() is not None and ledger(run).seconds["lost"] > 0
    assert "checkpoint" not in verdict_text(diagnose(run), "run").partition("time:")[0]


def test_a_request_within_a_probe_knows_that_nothing_of_it_is_saved(
    recipe: Recipe, trained_weights: Path, tmp_path: Path
) -> None:
    answers: list[bool] = []

    class Asked(StopRequest):
        def __call__(self) -> str | None:
            answers.append(self.is_probing())
            return super().__call__()

    both = recipe.with_({"model.weights": str(trained_weights), "model.train": "probe+full", "budget.epochs": 1})
    kinds = {type(event): len(answers) for event in steps(Run.create(tmp_path / "run", both), stop=Asked())}
    assert any(answers[: kinds[events.ProbeProgress]]) and not any(answers[kinds[events.ProbeProgress] :])


def test_training_goes_on_from_a_probe(recipe: Recipe, trained_weights: Path, tmp_path: Path) -> None:
    both = recipe.with_({"model.weights": str(trained_weights), "model.train": "probe:2+full", "optim.ema": 0.9})
    seen = list(steps(Run.create(tmp_path / "whole", both)))
    assert [e.step for e in seen if isinstance(e, events.Evaluated)] == [0, 10, 20]


@pytest.mark.slow
def test_training_from_a_probe_resumes_to_the_same_bits(
    recipe: Recipe, trained_weights: Path, tmp_path: Path, weights: Weights
) -> None:
    both = recipe.with_({"model.weights": str(trained_weights), "model.train": "probe:2+full", "optim.ema": 0.9})
    train(Run.create(tmp_path / "whole", both))
    run = Run.create(tmp_path / "parts", both)
    train_for(run, 7)
    train(run)
    assert weights(tmp_path / "parts") == weights(tmp_path / "whole")


def test_a_probe_that_no_epoch_is_better_than_is_kept_and_told_after_a_resume_too(
    recipe: Recipe, trained_weights: Path, tmp_path: Path, weights: Weights
) -> None:
    undone = recipe.with_({"model.weights": str(trained_weights), "optim.lr": 3.0, "every.log_steps": 1})
    run = Run.create(tmp_path / "undone", undone.with_({"model.train": "probe+full"}))
    train_for(run, 13)
    seen = list(steps(run))
    evaluated = [e for e in run.events() if isinstance(e, events.Evaluated)]
    assert [e.step for e in evaluated] == [0, 10, 20] and max(e.top1 for e in evaluated[1:]) < evaluated[0].top1
    (told,) = (
        e.message for e in seen if isinstance(e, events.Noticed) and "no epoch was better than the probe" in e.message
    )
    assert f"best.safetensors holds it (validation top-1 {percent(evaluated[0].top1, 1)})" in told
    probe = train(Run.create(tmp_path / "probe", undone.with_({"model.train": "probe", "budget.epochs": 0})))
    assert not changed(load_file(probe.run.weights), load_file(run.directory / "best.safetensors"))
    assert evaluate(run).top1 == evaluated[0].top1


def test_what_updates_made_of_a_probe_is_told(
    recipe: Recipe, tmp_path: Path, write_module: Callable[[str, str], Path]
) -> None:
    layers = "nn.Flatten(), nn.Linear(64, 3), nn.Tanh(), nn.Linear(3, num_classes)"  # three features say little
    write_module("narrow", f"from torch import nn\n\ndef net(num_classes):\n    return nn.Sequential({layers})\n")
    both = recipe.with_({"model.name": "narrow:net", "model.train": "probe+full", "budget.epochs": 6})
    both = both.with_({"optim.name": "adamw", "optim.lr": 0.03, "every.undone": "continue"})
    seen = list(steps(Run.create(tmp_path / "run", both)))
    first, *others = (e.top1 for e in seen if isinstance(e, events.Evaluated))
    assert max(others) > first
    (told,) = (e.message for e in seen if isinstance(e, events.Noticed) and "fine-tuning raised" in e.message)
    assert f"from {percent(first, 1)}, the probe's, to {percent(max(others), 1)}" in told


@pytest.mark.parametrize(
    "layers",
    [
        "nn.Conv2d(1, num_classes, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()",
        "nn.Flatten(), nn.Linear(64, num_classes), nn.ReLU()",
    ],
)
def test_a_classifier_that_is_no_linear_layer_is_refused(
    recipe: Recipe, tmp_path: Path, write_module: Callable[[str, str], Path], layers: str
) -> None:
    name = f"strange{len(layers)}"
    write_module(name, f"from torch import nn\n\ndef net(num_classes):\n    return nn.Sequential({layers})\n")
    probe = recipe.with_({"model.name": f"{name}:net", "model.train": "probe", "budget.epochs": 0})
    with pytest.raises(ModelError, match="is not one linear layer that ends the network"):
        train(Run.create(tmp_path / "run", probe))
    seen = list(steps(Run.create(tmp_path / "trained", probe.with_({"model.train": "probe+full", "budget.epochs": 2}))))
    (told,) = (e.message for e in seen if isinstance(e, events.Noticed) and "without a probe" in e.message)
    assert told.startswith("all parameters are trained at once, without a probe: ")
    assert "is not one linear layer" in told and isinstance(seen[-1], events.Ended)
    assert [e.step for e in seen if isinstance(e, events.Evaluated)] == [10, 20]


def test_the_fit_is_that_of_scikit_learn() -> None:
    linear = pytest.importorskip("sklearn.linear_model")
    from sklearn.datasets import load_digits

    digits = load_digits()
    x = torch.tensor(digits.data, dtype=torch.float32)[:600]
    x = (x - x.mean(0)) / x.std()
    labels = torch.tensor(digits.target)[:600].long()
    for penalty in (1.0, 0.01, 1e-4):
        theirs = linear.LogisticRegression(C=1 / (600 * penalty), tol=1e-8, max_iter=5000).fit(
            x.numpy(), labels.numpy()
        )
        weight, bias = minimize(lambda: [(x, labels)], 10, penalty, None)

        def loss(w: torch.Tensor, b: torch.Tensor, penalty: float = penalty) -> float:
            value = torch.nn.functional.cross_entropy(x @ w.T.float() + b.float(), labels)
            return float(value + penalty / 2 * w.square().sum())

        ours = loss(weight, bias)
        best = loss(torch.tensor(theirs.coef_), torch.tensor(theirs.intercept_))
        assert ours == pytest.approx(best, rel=1e-4), penalty


def test_the_classifier_takes_features_as_they_are() -> None:
    generator = torch.Generator().manual_seed(0)
    x = 5 + 0.01 * torch.randn(200, 8, generator=generator)
    labels = (x[:, 0] > 5).long()
    weight, bias, _, top1 = fit_classifier(x, labels, torch.arange(200) % 5 == 0, 2)
    assert top1 > 0.9
    assert float(((x @ weight.T + bias).argmax(1) == labels).float().mean()) > 0.95


def test_the_penalty_is_chosen_on_images_that_no_pass_was_fitted_to(recipe: Recipe, tmp_path: Path) -> None:
    noise = np.random.default_rng(0)
    from PIL import Image

    for k in range(120):
        place = tmp_path / "images" / f"class {k % 2}"
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(noise.integers(0, 256, (8, 8), np.uint8)).save(place / f"{k}.png")
    pack(tmp_path / "images", tmp_path / "noise")
    data = {"data.train": str(tmp_path / "noise.rec"), "model.train": "probe:3", "budget.epochs": 0}
    seen = list(steps(Run.create(tmp_path / "run", recipe.with_({**data, "batch_size": 8}))))
    (message,) = (e.message for e in seen if isinstance(e, events.Noticed) and "penalty" in e.message)
    assert "penalty 1 " in message or "penalty 0.1 " in message, "nothing can be learned of noise"


def test_a_grey_image_through_three_channels_is_what_summed_filters_make_of_it() -> None:
    """timm's networks for one channel sum the filters of the first convolution; here the image has three channels."""
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    colour = timm.create_model("mobilenetv2_100", num_classes=5).eval()
    grey = timm.create_model("mobilenetv2_100", num_classes=5, in_chans=1).eval()
    state = colour.state_dict()
    state["conv_stem.weight"] = state["conv_stem.weight"].sum(1, keepdim=True)
    grey.load_state_dict(state)
    images = torch.rand(2, 1, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(colour(images.expand(-1, 3, -1, -1)), grey(images), rtol=1e-4, atol=1e-5)
