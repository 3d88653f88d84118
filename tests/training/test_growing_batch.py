"""A batch that grows: which images an update takes, what it does to the rate, and that a run goes on in any stage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from tests.distributed.ranks import as_group

from steadytrain import models
from steadytrain.config import Data, Model, Optim, Recipe
from steadytrain.config.batches import Growth, lay_out, parse_growth
from steadytrain.distributed.engine import Engine
from steadytrain.distributed.process_group import Group
from steadytrain.errors import RecipeError
from steadytrain.events import Ended, EpochTrained, Evaluated, Event, Started, Step
from steadytrain.models import Input
from steadytrain.reports import summarise
from steadytrain.reports.schedule import forecast
from steadytrain.run import Run
from steadytrain.training import build, steps, train
from steadytrain.training.data import DataSets, random_batch
from steadytrain.training.profile.explain import explain

Weights = Callable[[Path], bytes]


def _train_for(run: Run, updates: int) -> None:
    seen: list[Event] = []
    for event in steps(run, stop=lambda: "SIGTERM" if len(seen) >= updates else None):
        if isinstance(event, Step):
            seen.append(event)
    assert run.finished() is None


@pytest.fixture
def growing(recipe: Recipe) -> Recipe:
    """320 images: 10 updates of 32, 5 of 64, and 2 of 192 (4 epochs, of which the last batch goes beyond the end)."""
    return recipe.with_({"optim.grow_batch": ["2@1", "3@2"], "budget.epochs": 3, "optim.schedule": "constant"})


def test_a_growing_batch_with_a_uniform_average_is_explained(growing: Recipe) -> None:
    explained = explain(growing.with_({"optim.ema": None, "optim.swa": 0.5}))
    assert explained.steps == 17 and len(explained.started.growth) == 2


@given(
    st.lists(st.tuples(st.integers(2, 4), st.floats(0.01, 2.9)), max_size=3, unique_by=lambda pair: pair[1]),
    st.integers(1, 50),
    st.integers(50, 400),
)
def test_updates_take_the_stream_without_gap_or_overlap(
    pairs: list[tuple[int, float]], batch_size: int, num_train: int
) -> None:
    growths = [Growth(times, epoch) for times, epoch in sorted(pairs, key=lambda pair: pair[1])]
    try:
        batches = lay_out(growths, batch_size=batch_size, num_train=num_train, epochs=3)
    except RecipeError:
        return  # the last batch of a stage goes beyond the run
    position = 0
    for step in range(batches.steps):
        assert batches.position(step) == position
        assert batches.step(position) == step
        factor = 1
        for growth in growths:  # the first update at or behind an epoch has the batch of that epoch
            factor *= growth.times if position >= max(1, round(growth.epoch * num_train)) else 1
        assert batches.size(step) == batch_size * factor
        position += batches.size(step)
    assert batches.images == position >= 3 * num_train > batches.position(batches.steps - 1)


def test_every_update_takes_the_images_of_its_stage(growing: Recipe, tmp_path: Path) -> None:
    seen = list(steps(Run.create(tmp_path / "run", growing)))
    [started] = [event for event in seen if isinstance(event, Started)]
    updates = [event for event in seen if isinstance(event, Step)]
    assert [event.n for event in updates] == [32] * 10 + [64] * 5 + [192] * 2
    assert updates[-1].position == 320 + 320 + 2 * 192 and started.steps == 17
    assert [event.step for event in seen if isinstance(event, Evaluated)] == [10, 15, 17]
    epochs = [(event.epoch, event.step, event.n) for event in seen if isinstance(event, EpochTrained)]
    assert epochs == [(1, 10, 320), (2, 15, 320), (3, 17, 384)]
    assert all(event.images == 1024 for event in seen if isinstance(event, Ended))
    summary = summarise(Run.open(tmp_path / "run"))
    assert (summary.progress.step, summary.progress.epoch, summary.progress.epochs) == (17, 3, 3)


def test_it_is_the_update_of_one_large_batch_in_micro_batches() -> None:
    """The weights to the last bit, and the images by their positions, where the large batch is the recipe's own."""
    weights = []
    for batch_size, accumulate in ((8, 1), (16, 2)):
        recipe = Recipe(
            data=Data(train="-", transforms=("erase:0.5", "mixup:0.2")),
            model=Model("resnet20"),
            optim=Optim(accumulate=accumulate),
            batch_size=batch_size,
        )
        torch.manual_seed(0)
        built = models.build(recipe.model, num_classes=10, channels=3, size=32, allow_import=False)
        input = replace(Input().filled(32, (0.5,) * 3, (0.25,) * 3), size=32, channels=3)
        state = build.state(recipe, built, Engine(torch.device("cpu")))
        labels = cast(DataSets, SimpleNamespace(classes=range(10), num_labels=None))
        update = build.update(recipe, built, input, state, data=labels)
        update(state, random_batch(16, (32, 32, 3), torch.device("cpu"), num_classes=10), 0.1)
        assert (state.cursor.step, state.cursor.position) == (1, 16)
        weights.append({name: value.clone() for name, value in state.module.state_dict().items()})
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


@pytest.mark.parametrize("updates", [12, *(pytest.param(updates, marks=pytest.mark.slow) for updates in (6, 10, 16))])
def test_a_run_goes_on_with_the_same_bits_in_any_stage(
    growing: Recipe, tmp_path: Path, weights: Weights, updates: int
) -> None:
    growing = growing.with_({"data.transforms": ["vflip", "erase:0.5", "mixup:0.2"], "optim.swa": 0.5})
    whole = Run.create(tmp_path / "whole", growing)
    train(whole)
    parts = Run.create(tmp_path / "parts", growing)
    _train_for(parts, updates)
    train(parts)
    assert weights(whole.directory) == weights(parts.directory)


def test_a_schedule_follows_the_epochs_and_the_rate_is_not_scaled(growing: Recipe, tmp_path: Path) -> None:
    falling = growing.with_({"optim.schedule": "linear", "optim.base_batch_size": 32, "optim.lr": 0.05})
    run = Run.create(tmp_path / "run", falling)
    train(run)
    updates = [event for event in run.events() if isinstance(event, Step)]
    for event in updates:
        assert event.lr == pytest.approx(0.05 * (1 - (event.position - event.n) / 1024))
    step = growing.with_({"optim.schedule": "step", "optim.milestones": [1.5]})
    rates = [moment.lr for moment in forecast(step, 320).moments]
    assert [round(rate / rates[0], 6) for rate in rates] == [1.0] * 13 + [0.1] * 4


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"optim.grow_batch": ["1@3"]}, "TIMES@EPOCH"),
        ({"optim.grow_batch": ["2@30", "2@20"]}, "rising epochs"),
        ({"optim.grow_batch": ["2@0.5", "4@0.6"], "batch_size": 2**18}, "up to 1048576"),
        ({"optim.grow_batch": ["2@1"], "parallel.graph": True}, "one size of batch"),
        ({"optim.grow_batch": ["2@1"], "optim.schedule": "mxnet/cosine"}, "counts updates"),
    ],
)
def test_what_cannot_be_is_refused(recipe: Recipe, changes: dict[str, object], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        recipe.with_(changes)


def test_a_batch_that_would_grow_after_the_end_is_refused(recipe: Recipe) -> None:
    with pytest.raises(RecipeError, match="has 2@5, and the run of 2 epochs ends before that"):
        recipe.with_({"optim.grow_batch": ["2@5"]}).batches(320)


def test_the_digest_of_other_recipes_stays(recipe: Recipe) -> None:
    assert recipe.with_({"optim.grow_batch": []}).digest == recipe.digest
    assert recipe.with_({"optim.grow_batch": ["2@1"]}).digest != recipe.digest
    assert parse_growth(recipe.with_({"optim.grow_batch": ["2@01.50"]}).optim.grow_batch) == (Growth(2, 1.5),)


def _train_as_rank(group: Group, folder: str) -> dict[str, Any]:
    for _ in steps(Run.open(folder), group=group, allow_import=True):
        pass
    return {}


@pytest.mark.slow
def test_two_ranks_make_the_updates_of_one_process(
    recipe: Recipe, write_module: Callable[[str, str], Path], tmp_path: Path
) -> None:
    write_module("own_flips", "from torchvision.transforms import v2\ndef flips(): return v2.RandomVerticalFlip(0.5)\n")
    recipe = recipe.with_({"optim.grow_batch": ["2@1"], "model.batch_norm": "frozen"})
    recipe = recipe.with_({"data.transforms": ["erase:0.5", "own_flips:flips", "mixup:0.2"]})
    runs = [Run.create(tmp_path / "two", recipe), Run.create(tmp_path / "one", recipe.with_({"optim.accumulate": 2}))]
    as_group(partial(_train_as_rank, folder=str(runs[0].directory)), 2)
    train(runs[1], allow_import=True)
    updates = [[e.n for e in run.events() if isinstance(e, Step)] for run in runs]
    assert updates[0] == updates[1] and {32, 64} == set(updates[0])
    two, one = (load_file(run.directory / "model.safetensors") for run in runs)
    for name, value in one.items():
        torch.testing.assert_close(value, two[name], rtol=1e-4, atol=1e-5)
