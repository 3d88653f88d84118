"""What a sweep is made of: values, names, places, rungs; what it trains is in ``tests/cli/test_sweep.py``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steadytrain.config import Budget, Data, Model, Recipe
from steadytrain.errors import InputError, RecipeError, RunError
from steadytrain.run import Run
from steadytrain.tuning.sweep import (
    Point,
    Range,
    create_cases,
    folder_name,
    parse_values,
    points,
    read_spec,
    require_values,
    space_of,
)
from steadytrain.tuning.sweep_runs import FACTOR, rungs
from steadytrain.tuning.sweep_trainers import slots


def parse(text: str) -> Any:
    return float(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0.1,,0.2", "has an empty value in '0.1,,0.2': put"),
        ("0.1,0.1", "has 0.1 more than once"),
        ("1..0.1", "must rise"),
        ("0..1 log", "begin above 0 for log"),
    ],
)
def test_values_that_cannot_be_are_refused_with_the_key(text: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message) as caught:
        parse_values("optim.lr", text, lambda item: item if item == "" else float(item))
    assert "optim.lr" in str(caught.value)


def test_a_range_is_whole_where_both_ends_are() -> None:
    assert parse_values("batch_size", "32..256", parse) == Range(32, 256)
    ranges = [parse_values("x", text, parse) for text in ("32..256", "1e-3..1", "32..256, log")]
    assert [values.is_whole for values in ranges if isinstance(values, Range)] == [True, False, True]
    assert [values.is_log for values in ranges if isinstance(values, Range)] == [False, False, True]


def test_every_combination_goes_with_every_case_under_a_name_of_its_own() -> None:
    listed = points({"batch_size": [64, 128], "optim.lr": [0.1, 0.2]}, {"sgd": {}, "nag": {"optim.name": "nag"}})
    assert len(listed) == len({point.name for point in listed}) == 8
    assert listed[0] == Point("sgd,batch_size=64,lr=0.1", {"batch_size": 64, "optim.lr": 0.1})
    assert listed[-1].changes == {"optim.name": "nag", "batch_size": 128, "optim.lr": 0.2}
    long = points({"optim.schedule": ["a:1", "a,1", "a/1"]})
    assert len({point.name for point in long}) == 3, "though a folder's name tells them not apart"


def test_a_range_needs_a_search_and_a_case_sets_no_key_that_varies() -> None:
    with pytest.raises(InputError, match=r"optim.lr has a range.*--search N"):
        points({"optim.lr": Range(0.1, 1.0)})
    with pytest.raises(InputError, match=r"batch_size is set by the case 'large', too"):
        points({"batch_size": [1, 2]}, {"large": {"batch_size": 3}})


@given(st.text(min_size=1, max_size=300))
def test_any_text_becomes_one_part_of_a_path(text: str) -> None:
    name = folder_name(text)
    assert "/" not in name and "\0" not in name and not name.startswith((".", "-")) and len(name) <= 100


@given(st.floats(1, 300), st.sampled_from([0.5, 1.0, 2.0, 10.0]), st.integers(1, 500))
def test_rungs_rise_and_stand_where_there_are_evaluations(epochs: float, period: float, cases: int) -> None:
    levels = rungs(epochs, period, cases)
    assert levels == sorted(set(levels)) and all(0 < level < epochs for level in levels)
    assert all(level / period == pytest.approx(round(level / period)) for level in levels)
    assert len(levels) == 0 or FACTOR ** len(levels) <= cases


def test_parallel_runs_get_cores_of_their_own() -> None:
    shares = [slot.cores for slot in slots(3, 0, range(8))]
    assert shares == [(0, 1), (2, 3), (4, 5)]
    assert [slot.gpu for slot in slots(None, 3, range(8))] == [0, 1, 2]
    assert len(slots(None, 3, range(8), runs_use_all=True)) == 1
    assert [slot.cores for slot in slots(4, 0, range(2))] == [(0,), (1,), (0,), (1,)]


def test_the_table_of_a_recipe_file_is_read_with_its_types() -> None:
    def parse_word(key: str, text: str) -> Any:
        return None if text == "none" else text

    table = {"seeds": 3, "over": {"batch_size": [64, 128], "optim": {"base_batch_size": [128, "none"]}}}
    spec = read_spec({**table, "cases": {"a": {"optim": {"options": {"momentum": 0.9}}}}})
    space = space_of(spec, {"batch_size": "32;256"}, parse_word)
    assert spec.seeds == 3 and space.over == {"batch_size": ["32", "256"], "optim.base_batch_size": [128, None]}
    assert space.cases == {"a": {"optim.options.momentum": 0.9}}
    with pytest.raises(RecipeError, match=r"unknown key 'sweep.seed'. Did you mean seeds\?"):
        read_spec({"seed": 3})
    with pytest.raises(RecipeError, match=r"sweep.seeds is 0; it must be 1 to 1,000"):
        read_spec({"seeds": 0})
    with pytest.raises(RecipeError, match=r"sweep.cases.a is 3; it must be a table"):
        space_of(read_spec({"cases": {"a": 3}}), {}, parse_word)


def test_nothing_is_made_where_one_case_cannot_be(tmp_path: Path) -> None:
    recipe = Recipe(data=Data(train="a.rec"), model=Model("mlp"), budget=Budget(epochs=1))
    chosen = points({"batch_size": [64, 0]})
    with pytest.raises(RecipeError, match=r"^case batch_size=0: batch_size is 0; it must be 1 to"):
        create_cases(tmp_path / "sweep", chosen, recipe.with_, 2)
    assert not (tmp_path / "sweep").exists()
    cases = create_cases(tmp_path / "sweep", chosen[:1], recipe.with_, 2)
    assert [run.recipe.seed for run in cases[0].runs] == [0, 1]
    Run.create(tmp_path / "run", recipe)
    with pytest.raises(RunError, match="is a run; a sweep needs another folder"):
        create_cases(tmp_path / "run", chosen[:1], recipe.with_, 1)


def test_a_value_that_goes_with_no_other_is_refused_before_the_first_run() -> None:
    recipe = Recipe(data=Data(train="a.rec"), model=Model("mlp"), budget=Budget(epochs=4))
    recipe = recipe.with_({"optim.warmup_epochs": 1})
    require_values({"optim.schedule": ["cosine", "one-cycle"], "optim.warmup_epochs": [0, 1]}, recipe.with_)
    with pytest.raises(RecipeError, match="one-cycle"):
        require_values({"optim.schedule": ["cosine", "one-cycle"], "batch_size": [8, 16]}, recipe.with_)
    with pytest.raises(RecipeError, match=r"unknown key 'optim\.lrr'"):
        require_values({"optim.lrr": [0.1], "batch_size": [8, 16]}, recipe.with_)
