"""Which evaluation's weights are the best: by which figure, in which direction, and what else goes by it."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from sklearn.metrics import average_precision_score, roc_auc_score

from steadytrain.cli.foreign_flags import read_flags
from steadytrain.config import Every, Recipe
from steadytrain.config.figures import FIGURES, SIGN, figure_value, is_better
from steadytrain.config.plain import hints_of
from steadytrain.data.results.scores import areas_under_roc, mean_over_classes
from steadytrain.errors import DivergedError, RecipeError
from steadytrain.events import Evaluated, Noticed, Step
from steadytrain.monitor import read_history
from steadytrain.reports import summarise
from steadytrain.reports.tables import facts
from steadytrain.run import Run
from steadytrain.training import checkpoints, steps, train
from steadytrain.training.evaluation import Evaluation
from steadytrain.training.loop import evaluating
from steadytrain.training.metrics import figure
from steadytrain.training.state import State
from steadytrain.tuning.sweep import Case, Point, rows
from steadytrain.tuning.sweep_runs import best_score

NEW_KEYS = ("figure", "best_loss")
"""What checkpoints of older versions do not hold."""


def softmax(logits: np.ndarray) -> np.ndarray:
    e = np.exp(logits - logits.max(1, keepdims=True))
    return np.asarray(e / e.sum(1, keepdims=True))


@pytest.mark.parametrize("classes", [2, 5])
def test_auc_and_map_are_scikit_learns(classes: int) -> None:
    draw = np.random.default_rng(classes)
    logits = draw.normal(size=(300, classes)).astype(np.float32)
    labels = draw.integers(0, classes, 300)
    p = softmax(logits.astype(np.float64))
    auc = roc_auc_score(labels, p[:, 1]) if classes == 2 else roc_auc_score(labels, p, multi_class="ovr")
    one_hot = labels[:, None] == np.arange(classes)
    assert mean_over_classes("auc", logits, labels) == pytest.approx(auc, abs=1e-12)
    ap = average_precision_score(one_hot, p, average="macro")
    assert mean_over_classes("map", logits, labels) == pytest.approx(ap, abs=1e-12)


def test_auc_of_several_labels_leaves_out_what_no_image_has_or_each() -> None:
    draw = np.random.default_rng(3)
    logits, labels = draw.normal(size=(80, 4)).astype(np.float32), draw.random((80, 4)) < 0.4
    labels[:, 1], labels[:, 3] = False, True
    logits = logits.round(1)  # with equal ones
    areas = areas_under_roc(logits, labels)
    assert areas[1] is areas[3] is None
    wanted = [roc_auc_score(labels[:, k], logits[:, k]) for k in (0, 2)]
    assert [areas[0], areas[2]] == pytest.approx(wanted, abs=1e-12)
    assert mean_over_classes("auc", logits, labels.astype(np.float32)) == pytest.approx(np.mean(wanted), abs=1e-12)
    assert math.isnan(mean_over_classes("auc", logits, np.zeros(80, np.int64)[:, None] + [1, 1, 1, 1]))


def test_every_figure_of_a_recipe_can_be_computed() -> None:
    logits, labels = np.eye(6, dtype=np.float32) * 5, np.arange(6)
    ones = (1,) * 6
    evaluation = Evaluation(
        n=6, loss=0.03, top1=1.0, top5=1.0, right=ones, total=ones, predicted=ones, logits=logits, labels=labels
    )
    assert {name: figure(evaluation, name) for name in FIGURES} == {**dict.fromkeys(FIGURES, 1.0), "loss": 0.03}
    known = [kind for kind in get_args(hints_of(Every)["best"]) if kind is not type(None)]
    assert set(get_args(known[0])) == set(FIGURES) == set(SIGN)


def test_a_standard_error_of_top1_is_bridged_by_the_loss() -> None:
    def better(now: tuple[float, float], *, n: int = 100, name: str = "top1-loss") -> bool:
        return is_better(name, now, (0.8, 0.5), n)  # a standard error of 4 points

    assert better((0.77, 0.4)) and not better((0.75, 0.1)) and not better((0.83, 0.6)) and better((0.85, 0.6))
    assert not better((0.77, 0.4), n=10_000)
    assert not better((0.77, 0.4), name="top1") and better((0.81, 9.0), name="top1")
    assert not better((1.0, math.nan)) and not better((math.nan, 0.1)) and not better((1.0, math.inf))
    assert is_better("loss", (-0.4, 0.4), (-0.5, 0.5), 9) and is_better("auc", (0.1, 1.0), (-math.inf, math.inf), 9)


@pytest.fixture
def longer(recipe: Recipe) -> Recipe:
    return recipe.with_({"budget.epochs": 4, "every.evaluate_epochs": 0.5, "optim.lr": 0.5})


@pytest.mark.parametrize("name", [None, *FIGURES])
def test_a_run_keeps_the_weights_of_its_figure(longer: Recipe, tmp_path: Path, name: Any) -> None:
    run = Run.create(tmp_path / "run", longer.with_({"every.best": name}))
    seen = [event for event in steps(run) if isinstance(event, Evaluated)]
    assert len(seen) == 8 and {event.figure for event in seen} == {name or "top1-loss"}
    best: Evaluated | None = None
    for event in seen:
        value = SIGN[event.figure or ""] * (event.figure_value or 0.0)
        before = (-math.inf, math.inf) if best is None else (best.goodness, best.loss)
        assert event.goodness == value and event.is_best == is_better(
            event.figure or "", (value, event.loss), before, event.n
        )
        best = event if event.is_best else best
    assert best is not None and run.progress().best == best
    history = read_history(run).best
    assert history is not None and history.step == best.step
    assert checkpoints.read_weights(run.directory / "best.safetensors")[1]["step"] == best.step
    if name in ("macro-recall", "f1"):
        assert best.figure_value == (best.macro_recall if name == "macro-recall" else best.macro_f1)
    shown_row, label = (
        facts(summarise(run)),
        "best top-1" if name in (None, "top1", "top1-loss") else "top-1, best weights",
    )
    shown = {"macro-recall": "macro recall", "f1": "macro F1", "auc": "AUC", "map": "mAP"}.get(name)
    assert shown_row[label].endswith(f", {shown} {figure_value(name or '', best.figure_value or 0.0)}" if shown else "")


def test_a_run_of_an_older_version_goes_on_by_top1(
    longer: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, whole = Run.create(tmp_path / "run", longer), State.state_dict
    with monkeypatch.context() as old:
        old.setattr(State, "state_dict", lambda self: {k: v for k, v in whole(self).items() if k not in NEW_KEYS})
        seen: list[Step] = []
        for event in steps(run, stop=lambda: "SIGINT" if len(seen) >= 20 else None):
            if isinstance(event, Step):
                seen.append(event)
    train(Run.create(tmp_path / "run", longer))
    later = [event for event in run.events() if isinstance(event, Evaluated) and event.attempt == 2]
    assert {event.figure for event in later} == {"top1"}


def test_best_weights_of_updates_that_are_made_again_are_none_of_the_run_any_more(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run.create(tmp_path / "run", recipe.with_({"every.save_steps": 10, "every.best": "top1"}))
    train(run)
    assert checkpoints.read_weights(run.directory / "best.safetensors")[1]["step"] == 20
    shutil.rmtree(run.checkpoints / "step-00000020")  # as killed after the evaluation, before its checkpoint
    run.weights.unlink()
    lines = run.log_path().read_text().splitlines(keepends=True)
    run.log_path().write_text("".join(line for line in lines if json.loads(line)["kind"] not in ("Saved", "Ended")))
    monkeypatch.setattr(evaluating, "is_better", lambda *known: False)  # as on a device that gives other bits
    run = Run.open(run.directory)
    later = [event for event in steps(run) if isinstance(event, Evaluated)]
    assert [(event.step, event.is_best) for event in later] == [(20, True)]
    assert run.progress().best == later[0]


def test_best_weights_that_replaced_lost_ones_stay_until_better_ones_come(
    longer: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run.create(tmp_path / "run", longer.with_({"every.save_steps": 5, "every.keep": 100}))
    train(run)
    best = run.directory / "best.safetensors"
    first, *others = sorted(run.checkpoints.glob("step-*"))
    assert checkpoints.read_weights(best)[1]["step"] > int(first.name.removeprefix("step-")) + 5
    for path in others:  # as killed before the second checkpoint
        shutil.rmtree(path)
    run.weights.unlink()
    lines = run.log_path().read_text().splitlines(keepends=True)
    run.log_path().write_text("".join(line for line in lines if json.loads(line)["kind"] not in ("Saved", "Ended")))
    later = iter([True])  # the first evaluation is better than before the checkpoint, and none is after it
    monkeypatch.setattr(evaluating, "is_better", lambda *known: next(later, False))
    run = Run.open(run.directory)
    again = [(event.step, event.is_best) for event in steps(run) if isinstance(event, Evaluated)]
    assert len(again) > 1 and [is_best for _, is_best in again] == [True, *[False] * (len(again) - 1)]
    assert checkpoints.read_weights(best)[1]["step"] == again[0][0]


def test_another_figure_chooses_again_and_says_so(longer: Recipe, tmp_path: Path) -> None:
    run, seen = Run.create(tmp_path / "run", longer.with_({"every.best": "loss"})), list[Step]()
    for event in steps(run, stop=lambda: "SIGINT" if len(seen) >= 20 else None):
        if isinstance(event, Step):
            seen.append(event)
    assert Run.create(tmp_path / "run", longer).recipe.every.best == "loss", "the same command goes on as it began"
    train(again := Run.create(tmp_path / "run", longer.with_({"every.best": "f1"})))
    events = [event for event in again.events() if event.attempt == 2]
    notices = [event.message for event in events if isinstance(event, Noticed)]
    assert "the best weights are chosen by f1 from here on, no longer by loss" in notices
    first = next(event for event in events if isinstance(event, Evaluated))
    assert (first.figure, first.is_best) == ("f1", True)


def test_patience_follows_the_figure(longer: Recipe, tmp_path: Path) -> None:
    changes = {"optim.lr": 1e-12, "budget.patience": 1, "every.best": "auc", "budget.epochs": 9}
    train(run := Run.create(tmp_path / "run", longer.with_(changes)))
    (message,) = (e.message for e in run.events() if isinstance(e, Noticed) and "ends early" in e.message)
    assert "validation AUC has not risen above 0." in message


def test_a_sweep_is_sorted_by_the_figure_of_its_runs_in_its_direction(longer: Recipe, tmp_path: Path) -> None:
    cases = []
    for lr in (1e-12, 0.5):
        run = Run.create(tmp_path / f"lr={lr}", longer.with_({"every.best": "loss", "optim.lr": lr}))
        train(run)
        cases.append(Case(Point(run.name, {"optim.lr": lr}), (run,)))
    good, bad = rows(cases)
    losses = [run.progress().best for run in (cases[1].runs[0], cases[0].runs[0])]
    assert (good.name, bad.name) == ("lr=0.5", "lr=1e-12")
    assert [row.chosen for row in (good, bad)] == [f" loss {event.loss:.4f}" for event in losses if event is not None]
    assert best_score(cases[1]) == good.goodness > bad.goodness


def test_auc_of_validation_images_of_one_class_is_refused(
    recipe: Recipe, tmp_path: Path, write_digits: Callable[[Path, int, int], Path]
) -> None:
    images = write_digits(tmp_path / "few", 60, 3)
    one = shutil.copytree(next(path for path in sorted(images.iterdir()) if path.is_dir()), tmp_path / "val" / "0")
    changes = {"data.train": str(images), "data.val": str(one.parent), "every.best": "auc"}
    with pytest.raises(RecipeError, match="all validation images are of the same class"):
        train(Run.create(tmp_path / "run", recipe.with_(changes)))


def test_top5_of_few_classes_is_refused(
    recipe: Recipe, tmp_path: Path, write_digits: Callable[[Path, int, int], Path]
) -> None:
    few = {"data.train": str(write_digits(tmp_path / "few", 60, 3)), "data.val": None, "data.holdout": 0.2}
    with pytest.raises(RecipeError, match=r"every\.best is 'top5', which is 100 % for five classes or fewer"):
        train(Run.create(tmp_path / "run", recipe.with_({**few, "every.best": "top5"})))


_NAN = """
import torch
from torch import nn

class Net(nn.Linear):
    def forward(self, images):
        outputs = super().forward(images.flatten(1))
        return outputs if self.training else outputs * float("nan")

def make(num_classes, channels=3):
    return Net(channels * 64, num_classes)
"""


def test_where_no_evaluation_is_finite_the_last_weights_are_kept(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nan_net.py").write_text(_NAN)
    monkeypatch.syspath_prepend(str(tmp_path))
    changes = {"model.name": "nan_net:make", "data.size": 8, "optim.ema": None}
    run = Run.create(tmp_path / "run", recipe.with_(changes))
    with pytest.raises(
        DivergedError, match=r"images is nan .*no evaluation was finite.*model.safetensors has the last"
    ):
        train(run)
    assert not any(event.is_best for event in run.events() if isinstance(event, Evaluated))
    assert not (run.directory / "best.safetensors").exists()
    tensors, _ = checkpoints.read_weights(run.weights)
    assert all(bool(tensor.isfinite().all()) for tensor in tensors.values())


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("--metric f1", "f1"),
        ("--metric=balanced_accuracy", "macro-recall"),
        ("--eval-metric loss", "loss"),
        ("--eval_metric roc_auc", "auc"),
        ("--monitor val_loss", "loss"),
        ("--monitor val_accuracy", "top1"),
        ("--metric_for_best_model eval_loss --greater_is_better false", "loss"),
        ("--best top5", "top5"),
    ],
)
def test_words_of_other_tools_name_a_figure(words: str, name: str) -> None:
    read, _ = read_flags(["photos", *words.split()])
    assert " ".join(read).replace("=", " ") == f"photos --best {name}"
