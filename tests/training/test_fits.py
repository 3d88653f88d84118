"""Ways in which long images become square, compared by probes out of fold: said where another is surely better."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from steadytrain.config import Recipe
from steadytrain.events import Ended, Evaluated, Noticed
from steadytrain.run import Run
from steadytrain.training import steps
from steadytrain.training.clock import Clock
from steadytrain.training.features.table import FeatureTable, feature_table
from steadytrain.training.finetuning import fits
from steadytrain.training.finetuning.plan import plan_finetune

Photos = Callable[..., Path]


@pytest.fixture(scope="module")
def start(from_resnet20: Recipe) -> Recipe:
    """A probe of a network of digits, which takes images of any size."""
    return from_resnet20.with_({"model.train": "probe", "budget.epochs": 0, "data.size": 16, "data.pad": 0})


@pytest.fixture
def write_photos(tmp_path: Path) -> Photos:
    """Two classes of noise, with a white square at the left or the right end, or in the middle."""

    def write(*, width: int, ends: bool) -> Path:
        draw, folder = np.random.default_rng(0), tmp_path / "photos"
        for label, place in enumerate((0, width - 8) if ends else (width // 2 - 8, width // 2)):
            (folder / str(label)).mkdir(parents=True)
            for number in range(60):
                pixels = draw.integers(0, 100, (16, width), np.uint8)
                pixels[4:12, place : place + 8] = 255
                Image.fromarray(pixels).save(folder / str(label) / f"{number}.png")
        return folder

    return write


def lines(recipe: Recipe, run: Path) -> list[str]:
    """What a run says of fits."""
    messages = [e.message for e in steps(Run.create(run, recipe)) if isinstance(e, Noticed)]
    return [message for message in messages if "--fit" in message]


def test_a_probe_whose_crop_cuts_the_classes_off_names_the_flag(
    start: Recipe, write_photos: Photos, tmp_path: Path
) -> None:
    recipe = start.with_({"data.train": str(write_photos(width=64, ends=True)), "data.fit": "crop"})
    (line,) = lines(recipe, tmp_path / "run")
    assert "resnet20 at 16 pixels (" in line and "is better than crop here, by " in line
    gain, error = map(float, re.findall(r"by (\S+) ± (\S+) of the loss", line)[0])
    assert gain > 2 * error > 0


@pytest.mark.parametrize(("width", "ends", "fit"), [(64, True, "squash"), (64, False, "crop"), (16, True, "crop")])
def test_nothing_is_said_where_no_other_fit_is_surely_better(
    start: Recipe, write_photos: Photos, tmp_path: Path, width: int, ends: bool, fit: str
) -> None:
    data = {"data.train": str(write_photos(width=width, ends=ends)), "data.fit": fit, "model.folds": 4}
    assert lines(start.with_(data), tmp_path / "run") == []


def test_a_comparison_of_fits_ends_when_asked_to_and_the_probe_is_on_the_disk(
    start: Recipe, write_photos: Photos, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    photos = str(write_photos(width=64, ends=True))
    run = Run.create(tmp_path / "run", start.with_({"data.train": photos, "data.fit": "crop"}))
    buckets, passes, moves, compute, change = list[str](), list[int](), list[list[str]](), feature_table, Clock.to

    def to(clock: Clock, bucket: str) -> None:
        buckets.append(bucket)
        change(clock, bucket)

    def watched(*arguments: Any, progress: Callable[[int, int], object], **options: Any) -> FeatureTable:
        def show(done: int, total: int) -> None:
            assert (run.directory / "best.safetensors").exists()
            passes.append(done)
            before = len(buckets)
            progress(done, total)
            moves.append(buckets[before:])

        return compute(*arguments, progress=show, **options)

    monkeypatch.setenv("STEADYTRAIN_CACHE", str(tmp_path / "cache"))  # where there are no features of these photos
    monkeypatch.setattr(Clock, "to", to)
    monkeypatch.setattr(fits, "feature_table", watched)
    events = list(steps(run, stop=lambda: "SIGTERM" if len(passes) == 2 else None))
    assert passes == [0, 32] and moves == [["probe"]], "it moves, and ends within the pass"
    assert isinstance(events[-1], Ended) and events[-1].status != "finished"
    assert any(isinstance(event, Evaluated) for event in events)
    assert any("is better than crop here" in line for line in lines(run.recipe, run.directory))
    assert run.finished() is not None


@pytest.mark.parametrize("chosen", [pytest.param(True, marks=pytest.mark.slow), False])
def test_minutes_take_the_better_fit_unless_the_user_chose_one(
    start: Recipe, write_photos: Photos, chosen: bool
) -> None:
    photos = str(write_photos(width=64, ends=True))
    recipe = start.with_({"data.train": photos, "data.fit": "crop", "model.train": "probe+full", "budget.epochs": 8})
    keys = {"model.name", "model.weights", "data.size", *(["data.fit"] if chosen else [])}
    said: list[str] = []
    plan = plan_finetune(recipe, 60, chosen=keys, began=time.perf_counter(), say=said.append)
    assert (plan.recipe.data.fit == "crop") == chosen
    assert {event.fit for event in plan.tried} == {"squash", "pad"}
    assert [event.verdict for event in plan.tried if event.verdict == "chosen"] == ["chosen"] * (not chosen)
    assert any("is better than crop here" in line for line in said)
