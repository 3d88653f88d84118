"""A run that ends before its budget: by patience or by the clock, with the best weights kept."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from steadytrain import events
from steadytrain.config import Budget, Recipe
from steadytrain.errors import RecipeError
from steadytrain.reports import summarise
from steadytrain.run import Run
from steadytrain.training import checkpoints, steps, train

Weights = Callable[[Path], bytes]


@pytest.fixture
def hopeless(recipe: Recipe) -> Recipe:
    """Learns nothing: its first evaluation is its best; 10 updates an epoch."""
    return recipe.with_({"optim.lr": 1e-12, "budget.epochs": 9, "budget.patience": 2, "every.best": "top1"})


def test_patience_ends_a_run_and_says_when_and_why(hopeless: Recipe, tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", hopeless)
    seen = list(steps(run))
    assert [e.epoch for e in seen if isinstance(e, events.Evaluated)] == [1, 2, 3]
    assert isinstance(seen[-1], events.Ended) and (seen[-1].status, seen[-1].step) == ("finished", 30)
    (message,) = (e.message for e in seen if isinstance(e, events.Noticed) and "ends early" in e.message)
    assert message.startswith("the run ends early, at epoch 3: validation top-1 has not risen above ")
    assert "in 2 evaluations; the best weights are kept" in message
    assert run.weights.exists() and (run.directory / "best.safetensors").exists()
    assert checkpoints.saved(run.checkpoints)[-1].name == "step-00000030"
    assert list(steps(run)) == [], "it is finished"
    assert summarise(run).progress.step == 30


def test_a_run_that_goes_on_rising_is_left_alone(recipe: Recipe, tmp_path: Path, weights: Weights) -> None:
    seen = list(steps(Run.create(tmp_path / "patient", recipe.with_({"budget.patience": 2}))))
    assert isinstance(seen[-1], events.Ended) and seen[-1].step == 20
    train(Run.create(tmp_path / "plain", recipe))
    assert weights(tmp_path / "patient") == weights(tmp_path / "plain")


@pytest.mark.parametrize("interrupted", [20, *(pytest.param(n, marks=pytest.mark.slow) for n in (5, 25))])
def test_an_interrupted_run_ends_at_the_same_update(
    hopeless: Recipe, tmp_path: Path, weights: Weights, interrupted: int
) -> None:
    train(Run.create(tmp_path / "whole", hopeless))
    run = Run.create(tmp_path / "parts", hopeless)
    seen: list[events.Event] = []
    for event in steps(run, stop=lambda: "SIGINT" if len(seen) >= interrupted else None):
        if isinstance(event, events.Step):
            seen.append(event)
    outcome = train(run)
    assert (outcome.status, outcome.step) == ("finished", 30)
    assert weights(tmp_path / "parts") == weights(tmp_path / "whole")


def test_a_run_that_was_killed_after_its_last_checkpoint_ends_at_once(hopeless: Recipe, tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", hopeless)
    train(run)
    lines = run.log_path().read_text().splitlines(keepends=True)
    run.log_path().write_text("".join(line for line in lines if json.loads(line)["kind"].lower() != "ended"))
    run.weights.unlink()
    seen = list(steps(Run.open(run.directory)))
    assert not any(isinstance(e, events.Step) for e in seen)
    assert isinstance(seen[-1], events.Ended) and seen[-1].step == 30
    assert run.weights.exists()


def test_the_clock_ends_a_run_with_an_evaluation_and_a_checkpoint(recipe: Recipe, tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", recipe.with_({"budget.epochs": 9, "budget.minutes": 1e-6}))
    seen = list(steps(run))
    assert [(e.step, e.n) for e in seen if isinstance(e, events.Evaluated)] == [(1, 80)]
    assert isinstance(seen[-1], events.Ended) and (seen[-1].status, seen[-1].step) == ("finished", 1)
    assert any(isinstance(e, events.Noticed) and "minutes are over" in e.message for e in seen)
    assert checkpoints.saved(run.checkpoints)[-1].name == "step-00000001"


def test_the_clock_counts_earlier_attempts(recipe: Recipe, tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", recipe.with_({"budget.epochs": 50, "budget.minutes": 1}))
    seen: list[events.Event] = []
    for event in steps(run, stop=lambda: "SIGINT" if len(seen) >= 5 else None):
        if isinstance(event, events.Step):
            seen.append(event)
    lines = [json.loads(line) for line in run.log_path().read_text().splitlines()]
    lines[-1]["time"] += 40 * 60  # as if the first attempt had taken so long
    run.log_path().write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert train(run.directory).step == 6
    said = [event.message for event in run.events() if isinstance(event, events.Noticed)]
    assert any("its 1 minute is over; the best weights are kept" in message for message in said)


@pytest.mark.parametrize("hours", [8, -8])
def test_a_clock_that_is_set_while_a_run_trains_moves_none_of_its_minutes(
    recipe: Recipe, tmp_path: Path, hours: int
) -> None:
    run = Run.create(tmp_path / "run", recipe.with_({"budget.minutes": 5}))
    seen: list[events.Event] = []
    for event in steps(run, stop=lambda: "SIGINT" if len(seen) >= 5 else None):
        if isinstance(event, events.Step):
            seen.append(event)
    lines = [json.loads(line) for line in run.log_path().read_text().splitlines()]
    last = max(number for number, line in enumerate(lines) if line["kind"] == "Accounted")
    for line in lines[last - 1 :]:
        line["time"] += 3600 * hours
    run.log_path().write_text("".join(json.dumps(line) + "\n" for line in lines))
    ((_, seconds),) = Run.open(run.directory).progress().spans.values()
    assert 0 < seconds < 300
    assert train(run.directory).step == 20


def test_patience_without_validation_is_refused(recipe: Recipe) -> None:
    with pytest.raises(RecipeError, match="without validation images nothing says when to end"):
        recipe.with_({"budget.patience": 3, "data.holdout": 0})
    with pytest.raises(RecipeError, match=r"budget.patience is 0; it must be 1 or more evaluations"):
        Budget(epochs=3, patience=0)
