"""A run whose loader works in a process of its own is the same run, and says so."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest

from steadytrain.config import Recipe
from steadytrain.data.loader import ImageLoader, Placement, image_loader
from steadytrain.events import FeedPlaced
from steadytrain.run import Run
from steadytrain.training import steps


def test_the_place_of_the_loader_changes_no_weight_and_is_told_once(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_loader, "LEAST_BATCHES", 1)
    short = recipe.with_({"budget.steps": 30, "budget.epochs": None})
    weights = []
    places: tuple[Literal["threads", "process"], ...] = ("threads", "process")
    for place in places:
        placement = Placement(place, "a test")
        monkeypatch.setattr(ImageLoader, "choose_place", lambda loader, placement=placement: placement)
        run = Run.create(tmp_path / place, short)
        placed = [event for event in steps(run) if isinstance(event, FeedPlaced)]
        assert [(event.step, event.place, event.reason) for event in placed] == [(placed[0].step, place, "a test")]
        weights.append(
            {path.name: path.read_bytes() for path in next(run.checkpoints.glob("*30")).glob("*.safetensors")}
        )
    assert weights[0] == weights[1] and weights[0]
