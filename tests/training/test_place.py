"""A run whose feed moves to a process of its own in the midst of it is the same run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from steadytrain.config import Recipe
from steadytrain.data.loader import choice, moving
from steadytrain.data.loader.choice import Choice, Gauge
from steadytrain.events import FeedPlaced, Step
from steadytrain.run import Run
from steadytrain.training import steps


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long run ends in a process, whatever was measured, after a few batches."""
    monkeypatch.setattr("steadytrain.machine.facts.cores", lambda: 2)  # with one, nothing is measured
    monkeypatch.setattr(moving, "SETTLE_SECONDS", 0.0)
    monkeypatch.setattr(moving, "SETTLE_BATCHES", 2)
    monkeypatch.setattr(moving, "LONGEST_SECONDS", 10.0)
    monkeypatch.setattr(choice, "BLOCKS", 1)
    monkeypatch.setattr(choice, "BATCHES", 4)
    monkeypatch.setattr(moving, "worth_trying", lambda threads, *, made_here: None)

    def judge(threads: Gauge, process: Gauge) -> Choice:
        return replace(real(threads, process), place="process")

    real = choice.judge
    monkeypatch.setattr(moving, "judge", judge)


def _until(run: Run, last: int | None) -> tuple[int, FeedPlaced | None]:
    """Take a run to a step, or a little beyond where its feed found its place; that, and what it told."""
    placed: list[FeedPlaced] = []
    at, end = 0, last

    def stop() -> str | None:
        return "SIGTERM" if end is not None and at >= end else None

    for event in steps(run, stop=stop):
        if isinstance(event, Step):
            at = event.step
        elif isinstance(event, FeedPlaced):
            placed.append(event)
            end = end or at + 40
    return at, placed[0] if placed else None


@pytest.mark.usefixtures("moves")
def test_a_move_changes_no_weight_and_is_told(recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = recipe.with_({"budget.steps": 20_000, "budget.epochs": None, "every.evaluate_epochs": 10_000.0})
    moved, stayed = (Run.create(tmp_path / name, long) for name in ("moved", "stayed"))
    last, told = _until(moved, None)
    assert told is not None and told.place == "process" and told.step == last - 40
    assert told.batch_seconds and told.batches and None not in (told.threads_cost, told.process_cost)
    monkeypatch.setattr("steadytrain.data.loader.image_loader.LEAST_BATCHES", 100_000)
    assert _until(stayed, last) == (last, None)
    one, other = (next(run.checkpoints.glob(f"*{last}")) for run in (moved, stayed))
    for path in one.glob("*.safetensors"):
        assert path.read_bytes() == (other / path.name).read_bytes()
