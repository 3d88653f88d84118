"""A whole search on real images: its choices, its reasons, and that nothing is measured twice."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator

import pytest

from steadytrain.config import Recipe
from steadytrain.config.recipe import ASIDE
from steadytrain.errors import FailedError, InputError, RecipeError
from steadytrain.tuning.probes import Prober
from steadytrain.tuning.report import document, recipe_file, table
from steadytrain.tuning.trials import Trial, json_key
from steadytrain.tuning.tune import Tuned, tune


@pytest.fixture(scope="module")
def prober() -> Iterator[Prober]:
    with Prober() as entered:
        yield entered


@pytest.fixture(autouse=True)
def _empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("STEADYTRAIN_CACHE", str(tmp_path_factory.mktemp("cache")))


def names(trials: list[Trial]) -> list[str]:
    return [json_key(trial.what, trial.setting) for trial in trials]


def free(recipe: Recipe) -> Recipe:
    return recipe.with_({"parallel.threads": None})


def value(tuned: Tuned, key: str) -> object:
    return next(choice.value for choice in tuned.choices if choice.key == key)


@pytest.mark.slow
def test_a_search_goes_on_where_it_was_interrupted(prober: Prober, recipe: Recipe) -> None:
    recipe, first, second = free(recipe), list[Trial](), list[Trial]()

    def interrupt(trial: Trial) -> None:
        first.append(trial)
        if len(first) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tune(recipe, prober=prober, seconds=90, say=interrupt)
    tuned = tune(recipe, prober=prober, seconds=90, say=second.append)
    assert second and not set(names(first)) & set(names(second))
    assert set(names(first)) | set(names(second)) == set(names(list(tuned.trials)))

    third = list[Trial]()
    again = tune(recipe, prober=prober, seconds=90, say=third.append)
    assert not set(names(second)) & set(names(third))
    assert tuned.missing or (again.recipe == tuned.recipe and again.choices == tuned.choices)
    assert {choice.key for choice in tuned.choices} >= {
        "batch_size",
        "precision.name",
        "parallel.threads",
        "optim.lr",
    }
    assert any(trial.what == "both" for trial in tuned.trials)
    assert all(choice.reason for choice in tuned.choices)
    assert (tuned.gain is not None) == ("the recipe as it was" not in tuned.missing)
    assert 2 <= tuned.recipe.batch_size <= 32  # a tenth of 320 images
    lines = table(tuned, 80).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].split()[:4] == ["measured", "batch", "precision", "compile"]
    assert sum(line.startswith(("updates ", "loading ", "both ")) for line in lines) == len(tuned.trials)
    assert document(tuned)["gain"] == tuned.gain


def test_what_the_user_chose_stays(prober: Prober, recipe: Recipe) -> None:
    chosen = {"batch_size", "precision.name", "parallel.threads", "optim.lr"}
    tuned = tune(recipe, prober=prober, seconds=90, chosen=chosen)
    assert (tuned.recipe.batch_size, tuned.recipe.parallel.threads, tuned.recipe.optim.lr) == (32, 2, 0.05)
    assert tuned.recipe.precision.name == recipe.precision.name
    assert [choice.key for choice in tuned.choices] == ["precision.compile"]


def test_a_batch_that_cannot_be_trained_is_refused(prober: Prober, recipe: Recipe) -> None:
    with pytest.raises(FailedError, match=r"batches of 32 cannot be trained here \(.*\): give a smaller --batch-size"):
        tune(recipe.with_({"precision.name": "tf32"}), prober=prober, seconds=90, chosen={"batch_size"}, free={"batch"})


def test_ranks_share_the_batch(prober: Prober, recipe: Recipe) -> None:
    tuned = tune(free(recipe), prober=prober, seconds=90, free={"batch"}, ranks=2)
    assert tuned.recipe.batch_size % 2 == 0
    assert {trial.what for trial in tuned.trials} == {"updates"}
    assert max(trial.setting.batch_size for trial in tuned.trials) <= 16  # of each rank's


def test_a_recipe_without_updates_is_refused(prober: Prober, recipe: Recipe) -> None:
    probe = recipe.with_({"model.train": "probe", "budget.epochs": 0})
    with pytest.raises(RecipeError, match="makes no updates: there is nothing to tune"):
        tune(probe, prober=prober, seconds=90)


def test_too_little_time_says_how_much_it_takes(prober: Prober, recipe: Recipe) -> None:
    with pytest.raises(InputError, match="is too short to measure anything here: give --minutes 1"):
        tune(recipe, prober=prober, seconds=0.01)


@pytest.mark.slow
def test_the_written_recipe_is_the_tuned_one(prober: Prober, recipe: Recipe) -> None:
    odd = free(recipe).with_({"data.transforms": ["mixup:0.2"], "optim.options": {"foreach": True}, "seed": 7})
    tuned = tune(odd, prober=prober, seconds=20, free={"batch", "threads", "rate"})
    text = recipe_file(tuned, finetune=False, name="tuned.toml")
    read = Recipe.from_dict({name: part for name, part in tomllib.loads(text).items() if name not in ASIDE})
    for key in ("batch_size", "seed", "optim.lr", "parallel.threads"):
        part, _, name = key.rpartition(".")
        written, chosen = (getattr(r, part) if part else r for r in (read, tuned.recipe))
        assert getattr(written, name) == getattr(chosen, name)
    assert read.data.transforms == tuned.recipe.data.transforms and read.optim.options == {"foreach": True}
    lines = text.splitlines()
    at = lines.index(f"batch_size = {tuned.recipe.batch_size}")
    assert lines[at - 1].startswith("# ") and value(tuned, "batch_size") == tuned.recipe.batch_size
