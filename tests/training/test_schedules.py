"""Schedules as a run follows them: rates that wait for evaluations, and a momentum that moves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from steadytrain import optim
from steadytrain.config import Optim, Recipe
from steadytrain.config.schedules import momentum
from steadytrain.errors import RecipeError
from steadytrain.events import Evaluated, Event, Step
from steadytrain.run import Run
from steadytrain.training import build, checkpoints, steps, train

Weights = Callable[[Path], bytes]


def told(run: Run, count: int | None = None) -> list[Event]:
    """The events of a run, which is asked to stop after so many updates."""
    seen: list[Event] = []

    def stop() -> str | None:
        return "SIGTERM" if count and any(e.step >= count for e in seen if isinstance(e, Step)) else None

    for event in steps(run, stop=stop):
        seen.append(event)
    return seen


@pytest.fixture
def plateau(recipe: Recipe) -> Recipe:
    """Evaluated every five updates; at this rate little gets better, so that it falls."""
    return recipe.with_(
        {
            "optim.schedule": "plateau,patience=1,factor=0.5,to=0.2,on=loss",
            "optim.lr": 0.4,
            "every.evaluate_epochs": 0.5,
            "budget.epochs": 4,
        }
    )


def test_a_plateau_lowers_the_rate_after_evaluations_without_a_better_value(plateau: Recipe, tmp_path: Path) -> None:
    events = told(Run.create(tmp_path / "run", plateau))
    expected, best, drops = [], float("inf"), 0
    for event in events:
        if isinstance(event, Step):
            expected.append((event.step, event.lr, 0.4 * max(0.5**drops, 0.2)))
        elif isinstance(event, Evaluated):
            drops += event.loss >= best
            best = min(best, event.loss)
    assert [lr for _, lr, _ in expected] == pytest.approx([lr for _, _, lr in expected])
    assert drops, "nothing fell: the test shows nothing"


@pytest.mark.slow
@pytest.mark.parametrize("count", [10, 23])
def test_a_plateau_goes_on_with_the_same_bits(plateau: Recipe, tmp_path: Path, weights: Weights, count: int) -> None:
    whole, parts = (Run.create(tmp_path / name, plateau) for name in ("whole", "parts"))
    train(whole)
    told(parts, count)
    saved = checkpoints.load(checkpoints.saved(parts.checkpoints)[-1])
    assert saved["plateau"]["best"] is not None
    train(parts)
    rates = [[event.lr for event in run.events() if isinstance(event, Step)] for run in (whole, parts)]
    assert rates[0] == rates[1]
    assert weights(whole.directory) == weights(parts.directory)


def test_one_cycle_moves_the_momentum_against_the_rate(recipe: Recipe, tmp_path: Path, weights: Weights) -> None:
    recipe = recipe.with_({"optim.schedule": "one-cycle", "optim.momentum": 0.95})
    fixed = recipe.with_({"optim.schedule": "one-cycle,momentum=0.95"})
    whole, still = (Run.create(tmp_path / name, changed) for name, changed in (("a", recipe), ("b", fixed)))
    train(whole)
    train(still)
    assert weights(whole.directory) != weights(still.directory)
    saved = checkpoints.load(checkpoints.saved(whole.checkpoints)[-1])
    moves = momentum(recipe.optim, steps=20, steps_per_epoch=10)
    assert moves is not None and moves(6) == pytest.approx(0.85)
    assert saved["optimizer"]["param_groups"][0]["momentum"] == moves(19)


@pytest.mark.parametrize(("name", "key"), [("sgd", "momentum"), ("adamw", "betas")])
def test_the_momentum_of_adam_is_its_first_beta(name: str, key: str) -> None:
    groups = [{"params": [torch.nn.Parameter(torch.ones(2))]}]
    optimizer = optim.build(Optim(name), groups, lr=0.1, device=torch.device("cpu"))
    optim.set_momentum(optimizer, 0.7)
    assert optimizer.param_groups[0][key] == {"momentum": 0.7, "betas": (0.7, 0.999)}[key]


def test_a_schedule_that_does_not_fit_is_refused_before_training(recipe: Recipe, tmp_path: Path) -> None:
    longer = recipe.with_({"optim.schedule": "cosine:80 constant:15"})
    with pytest.raises(RecipeError, match="95 epochs are more than the 2 of the run"):
        train(Run.create(tmp_path / "run", longer))
    graph = recipe.with_({"optim.schedule": "one-cycle", "parallel.graph": True})
    with pytest.raises(RecipeError, match=r"keep it as it is with one-cycle,momentum=0\.9"):
        build.require_schedule(graph, 320)
    build.require_schedule(graph.with_({"optim.schedule": "one-cycle,momentum=0.9"}), 320)
