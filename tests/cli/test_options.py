"""The flags of the verbs that train are made from the settings of the recipe."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from steadytrain.cli import main, parse
from steadytrain.cli.options import TrainingOptions, parse_setting, read_recipe
from steadytrain.cli.train import num_procs, ranks_of_batch, require_cores
from steadytrain.config import Data, Model, Parallel, Recipe
from steadytrain.config.keywords import FLAGS
from steadytrain.config.plain import plain
from steadytrain.config.recipe import recipe_settings
from steadytrain.config.reference import recipe_keys
from steadytrain.errors import RecipeError
from steadytrain.run import Run

BESIDE = {"budget.epochs": {"budget.steps"}, "model.weights": {"model.pretrained"}}
"""Keys that a flag sets with its own."""


def test_a_flag_and_set_mean_the_same() -> None:
    texts = {row.key: row.example.partition("=")[2] for row in recipe_keys()}
    of_flags, of_set = ["train", "data"], ["train", "data"]
    for _, (key, flag) in FLAGS.items():
        text = "default" if key == "precision.compile" else "none" if texts[key] == "none" else texts[key]
        if text == "none" or (text == "false" and flag.kind is None):
            continue  # nothing is set
        of_flags += [flag.name] if flag.kind is bool or text == "true" else [flag.name, text]
        of_set += ["--set", f"{key}={text}"]
    by_flags, by_set = (plain(parse(words)["options"].changes) for words in (of_flags, of_set))
    extra = {beside for key in by_set for beside in BESIDE.get(key, ())}
    lists = [
        {key: value if isinstance(value, list) else [value] for key, value in values.items() if key not in extra}
        for values in (by_flags, by_set)
    ]
    assert lists[0] == lists[1]
    assert len(by_set) > 25


@pytest.mark.parametrize(
    ("flag", "key"), [("--holdout", "data.holdout"), ("--seed", "seed"), ("--warmup-epochs", "optim.warmup_epochs")]
)
def test_a_flag_of_nothing_is_a_choice_too(flag: str, key: str) -> None:
    assert parse(["train", "data", flag, "0"])["options"].changes == {key: 0}


def test_no_flag_is_no_change() -> None:
    assert TrainingOptions().changes == {} and "options" not in parse(["train", "data"])


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.yaml", "a: &a [1,1,1,1,1,1,1,1,1,1]\n" + "".join(
            f"{c}: &{c} [{','.join(['*' + chr(ord(c) - 1)] * 10)}]\n" for c in "bcdefghi"
        ), "holds more than 100,000 values, those that an anchor repeats included"),
        ("a.yaml", "seed: !!int [1]\n", "cannot be parsed: int stands before a sequence"),
        ("a.yaml", "data: &a {train: *a}\n", "has tables or lists more than 20 deep within each other"),
        ("a.json", '{"a":' * 400 + "1" + "}" * 400, "has tables or lists more than 20 deep within each other"),
        ("a.json", f'{{"a": "{"x" * 10_000_000}"}}', "cannot read .*: it has 10,000,009 bytes, more than 10,000,000"),
    ],
)  # fmt: skip
def test_a_recipe_file_without_end_is_refused(name: str, text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(RecipeError, match=message):
        read_recipe(tmp_path / name)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("1.5e+2", 150.0),
        (".5", 0.5),
        ("010", 10),
        ("-3", -3),
        ("true", True),
        ("on", "on"),
        ("no", "no"),
        ("~", None),
        ("", None),
        ("2026-01-01", "2026-01-01"),
        ("1:30", "1:30"),
        ("'1'", "1"),
        ("!!str 1e-3", "1e-3"),
    ],
)
def test_yaml_is_read_as_its_version_1_2_has_it(text: str, value: object, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(f"optim:\n  lr: {text}\n")
    read = read_recipe(tmp_path / "a.yaml")["optim"]["lr"]
    assert read == value and type(read) is type(value)


def test_on_is_no_switch_in_yaml(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("precision: {channels_last: on}\n")
    recipe = Recipe(data=Data(train="data"), model=Model("mlp"))
    with pytest.raises(RecipeError, match=r"precision.channels_last is 'on'; it must be true or false"):
        TrainingOptions(recipe=tmp_path / "a.yaml").recipe_over(recipe)


def test_a_pipe_for_a_recipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.toml")
    with pytest.raises(RecipeError, match=r"cannot read .*: it is a pipe"):
        read_recipe(tmp_path / "a.toml")


def test_ranks_beyond_the_limit_are_refused_before_any_is_started() -> None:
    with pytest.raises(RecipeError, match=r"^parallel.procs is 257; it must be 1 to 256, or auto$"):
        num_procs("data", TrainingOptions(flags={"procs": 257}))


def test_a_file_does_not_start_more_ranks_than_this_machine_has_room_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("steadytrain.cli.train.cores", lambda: 2)
    monkeypatch.setattr("steadytrain.cli.train.accelerators", list)
    recipe = Recipe(data=Data(train="a.rec"), model=Model("mlp"), parallel=Parallel(procs=9, device="cpu"))
    run = str(Run.create(tmp_path / "run", recipe).directory)
    (tmp_path / "a.json").write_text('{"parallel": {"procs": 200}}')
    for words in (["resume", run], ["train", "a.rec", "--recipe", str(tmp_path / "a.json")]):
        assert main(words) == 2
        assert "ranks, and this machine has 2 cores: at most 4 for each are started" in capsys.readouterr().err
    for options in (TrainingOptions(flags={"procs": 9}), TrainingOptions(flags={"device": "cuda:0,1,2,3,4,5,6,7,8"})):
        require_cores(num_procs("a.rec", options), options)
    assert ranks_of_batch(None, TrainingOptions(recipe=tmp_path / "a.json")) == 200, "nothing is started for a schedule"


def test_every_setting_says_what_it_means_in_the_documentation_of_its_part() -> None:
    from steadytrain import config

    for key, setting in recipe_settings().items():
        part, _, name = key.rpartition(".")
        text = (getattr(config, part.title() or "Recipe").__doc__ or "").replace("``", "")
        assert f"    {name}: {setting.meaning}" in text


def test_a_path_that_exists_is_no_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert parse_setting("data.val=2024.") == ("data.val", 2024.0) and parse_setting("data.val=none")[1] is None
    for name in ("2024.", "none"):
        Path(name).mkdir()
        assert parse_setting(f"data.val={name}") == ("data.val", name)
        assert parse_setting(f"optim.lr={name}")[1] != name
