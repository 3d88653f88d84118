"""A long run measures once what its steps are made of, and a short one leaves it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from steadytrain.cli.render import event_line
from steadytrain.config import Budget, Recipe
from steadytrain.events import Accounted, Ceilings, Step, StepMeasured
from steadytrain.run import Run
from steadytrain.training import steps
from steadytrain.training.profile import probe, step_cost


def test_a_short_run_is_left_alone(recipe: Recipe, tmp_path: Path) -> None:
    long = replace(recipe, budget=Budget(steps=60))
    assert not [e for e in steps(Run.create(tmp_path / "run", long)) if isinstance(e, StepMeasured)]


def test_a_long_run_measures_once_and_trains_the_same_weights(
    recipe: Recipe, tmp_path: Path, weights: Callable[[Path], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    long = replace(recipe, budget=Budget(steps=60))
    list(steps(Run.create(tmp_path / "without", long)))
    monkeypatch.setattr(step_cost, "allowed_seconds", lambda seconds, left, **_: math.inf if left == 40 else 0.0)
    events = list(steps(Run.create(tmp_path / "with", long)))
    [measured] = [event for event in events if isinstance(event, StepMeasured)]
    account = [event for event in events if isinstance(event, Accounted)][-1]
    after = next(event for event in events[events.index(measured) :] if isinstance(event, Step))
    assert measured.step == step_cost.LEAST_UPDATES and measured.batch_size == 32
    assert account.seconds["measuring"] > 0 and after.seconds < account.seconds["measuring"]
    assert measured.seconds is not None and 0 < measured.seconds <= account.seconds["measuring"]
    assert event_line(measured) == f"measured step={measured.step} seconds={measured.seconds:.2f}"
    assert weights(tmp_path / "with") == weights(tmp_path / "without")


def test_a_probe_comes_first_and_changes_no_weight(
    recipe: Recipe, tmp_path: Path, weights: Callable[[Path], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "SECONDS", 0.3)
    list(steps(Run.create(tmp_path / "without", recipe)))
    events = list(steps(Run.create(tmp_path / "with", recipe), probe=True))
    [ceilings] = [event for event in events if isinstance(event, Ceilings)]
    assert ceilings.step == 0 and events.index(ceilings) < next(i for i, e in enumerate(events) if isinstance(e, Step))
    assert weights(tmp_path / "with") == weights(tmp_path / "without")
