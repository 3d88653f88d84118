"""Batch norms of averaged weights: statistics of their own, from the last batches before they are used."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from steadytrain.config import Recipe
from steadytrain.events import Step
from steadytrain.run import Run
from steadytrain.training import steps, train

Weights = Callable[[Path], Any]


@pytest.fixture(params=[{"optim.ema": 0.9}, {"optim.swa": 0.5}], ids=["ema", "swa"])
def averaged(recipe: Recipe, request: pytest.FixtureRequest) -> Recipe:
    return recipe.with_({"model.name": "digits", **request.param})


@pytest.mark.parametrize(
    "averaged",
    [pytest.param({"optim.ema": 0.9}, marks=pytest.mark.slow, id="ema"), pytest.param({"optim.swa": 0.5}, id="swa")],
    indirect=True,
)
def test_a_stop_in_the_midst_of_them_changes_no_bit(averaged: Recipe, tmp_path: Path, weights: Weights) -> None:
    whole, parts = Run.create(tmp_path / "whole", averaged), Run.create(tmp_path / "parts", averaged)
    train(whole)
    seen = 0

    def stop() -> str | None:
        return "SIGTERM" if seen == 6 else None  # of 10 an epoch: the statistics are from 3 to 10

    for event in steps(parts, stop=stop):
        seen += isinstance(event, Step)
    train(parts)
    assert weights(whole.directory) == weights(parts.directory)
    best = [load_file(run.directory / "best.safetensors") for run in (whole, parts)]
    assert all(value.equal(best[1][name]) for name, value in best[0].items())


def test_statistics_are_not_those_of_the_weights_that_were_trained(averaged: Recipe, tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", averaged)
    train(run)
    (state,) = run.checkpoints.glob("*20/state.safetensors")
    tensors = load_file(state)
    for name in (name for name in tensors if name.startswith("/model/") and "running_" in name):
        assert not tensors[name].equal(tensors[name.replace("/model/", "/ema/module/")])


def test_the_weights_that_are_trained_do_not_know_of_it(averaged: Recipe, tmp_path: Path) -> None:
    states = []
    for number, changed in enumerate((averaged, averaged.with_({"optim.ema": None}))):
        run = Run.create(tmp_path / f"{number}", changed)
        train(run)
        (state,) = run.checkpoints.glob("*20/state.safetensors")
        states.append({name: value for name, value in load_file(state).items() if name.startswith("/model/")})
    assert states[0].keys() == states[1].keys()
    assert all(value.equal(states[1][name]) for name, value in states[0].items())
