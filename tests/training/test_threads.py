"""How many threads compute is measured where a pass is short; the answer is kept, so that bits repeat."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from steadytrain import Budget, Data, Model, Optim, Parallel, Recipe, Run, train
from steadytrain.events import Noticed, Started
from steadytrain.machine import facts
from steadytrain.training.compute.timing import SLACK

needs_cores = pytest.mark.skipif(facts.cores() < 2, reason="one core: there is nothing to choose")


@pytest.fixture(autouse=True)
def all_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """All cores to choose from."""
    monkeypatch.delenv("OMP_NUM_THREADS")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own, in which nothing has been measured."""
    monkeypatch.setenv("STEADYTRAIN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def _recipe(digits: Path, parallel: Parallel = Parallel()) -> Recipe:  # noqa: B008 - frozen
    return Recipe(
        data=Data(train=str(digits), holdout=0.0),
        model=Model("mlp"),
        optim=Optim("sgd", lr=0.05),
        budget=Budget(steps=3),
        parallel=parallel,
        batch_size=16,
    )


def _trained(folder: Path, recipe: Recipe) -> tuple[Started, list[str], dict[str, bytes]]:
    """The first event, what was noticed, the weights."""
    run = Run.create(folder, recipe)
    train(run)
    events = list(run.events())
    (started,) = (event for event in events if isinstance(event, Started))
    messages = [event.message for event in events if isinstance(event, Noticed)]
    weights = load_file(folder / "model.safetensors")
    return started, messages, {name: value.numpy().tobytes() for name, value in weights.items()}


@needs_cores
def test_the_fewest_threads_that_take_hardly_longer_compute_and_others_are_told_of(
    digits: Path, tmp_path: Path, cache: Path
) -> None:
    before = torch.get_num_threads()
    started, notices, _ = _trained(tmp_path / "run", _recipe(digits))
    if "threads_seconds" not in started.machine:
        pytest.skip("other programs take the cores: nothing was measured")
    seconds = {int(count): took for count, took in started.machine["threads_seconds"].items()}
    assert set(seconds) >= {1, facts.cores()} and min(seconds.values()) > 0
    count = started.machine["compute_threads"]
    assert seconds[count] <= SLACK * min(seconds.values())
    assert all(took > SLACK * min(seconds.values()) for number, took in seconds.items() if number < count)
    assert any("compute threads" in notice for notice in notices) == (count < facts.cores())
    assert torch.get_num_threads() == before


@needs_cores
@pytest.mark.parametrize("fewest", [1, 2])
def test_what_was_measured_once_holds_for_the_same_command(
    digits: Path, tmp_path: Path, cache: Path, fewest: int
) -> None:
    first = _trained(tmp_path / "first", _recipe(digits))[0]
    (kept,) = (cache / "threads").iterdir()
    assert json.loads(kept.read_text()) == first.machine["threads_seconds"]
    kept.write_text(json.dumps({"1": 1.0 if fewest == 1 else 9.0, "2": 2.0}))
    again = [_trained(tmp_path / name, _recipe(digits)) for name in ("second", "third")]
    assert [events[0].machine["compute_threads"] for events in again] == [fewest, fewest]
    assert again[0][2] == again[1][2]


def test_measuring_leaves_no_trace_in_the_weights(digits: Path, tmp_path: Path, cache: Path) -> None:
    measured = _trained(tmp_path / "measured", _recipe(digits))
    count = measured[0].machine["compute_threads"]
    trained = _trained(tmp_path / "told", _recipe(digits, Parallel(compute_threads=count)))
    assert "threads_seconds" not in trained[0].machine
    assert measured[2] == trained[2]


@pytest.mark.parametrize("parallel", [Parallel(compute_threads=2), Parallel(deterministic=True)])
def test_what_the_recipe_says_is_not_measured(
    digits: Path, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, parallel: Parallel
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # wanted for a GPU by --deterministic, which sets it
    started, _, _ = _trained(tmp_path / "run", _recipe(digits, parallel))
    assert "threads_seconds" not in started.machine and not (cache / "threads").exists()


def test_where_nothing_can_be_kept_all_cores_compute(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("STEADYTRAIN_CACHE", str(tmp_path / "file"))
    started, _, _ = _trained(tmp_path / "run", _recipe(digits))
    assert started.machine["compute_threads"] == facts.cores() and "threads_seconds" not in started.machine
