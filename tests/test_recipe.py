"""Recipes: laws that hold for all of them, and how a wrong one is refused."""

from __future__ import annotations

import dataclasses
import json
import tomllib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steadytrain.cli.options import parse_setting
from steadytrain.config import Budget, Data, Every, Model, Optim, Parallel, Precision, Recipe
from steadytrain.config.defaults import apply_changes, usual_recipe
from steadytrain.config.foreign import foreign_flags
from steadytrain.config.keywords import FLAGS
from steadytrain.config.plain import leaves
from steadytrain.config.recipe import recipe_settings
from steadytrain.config.timeline import Timeline
from steadytrain.errors import RecipeError

BASE = Recipe(data=Data(train="train.rec"), model=Model("resnet20"), budget=Budget(epochs=6))

# For every value that says what is trained: another one that may stand there.
OTHER: dict[str, object] = {
    "data.train": "photos",
    "data.val": "val.rec",
    "data.holdout": 0.2,
    "data.classes": "card.json",
    "data.size": 224,
    "data.group_by": "folder",
    "data.fit": "pad",
    "data.augment": "none",
    "data.area": [0.25, 1.0],
    "data.ratio": [1.0, 1.0],
    "data.pad": 2,
    "data.flip": True,
    "data.crop": 0.95,
    "data.interpolation": "bicubic",
    "data.mean": [0.5, 0.5, 0.5],
    "data.std": [0.25],
    "data.root": "images",
    "data.labels": "truth.txt",
    "data.order": "blocks",
    "data.balance": "classes",
    "data.transforms": ["vflip:0.5", "mixup:0.3"],
    "model.name": "timm/resnet50",
    "model.pretrained": True,
    "model.weights": "a.safetensors",
    "model.train": "head",
    "model.freeze": ["conv1"],
    "model.decay": 0.5,
    "model.batch_norm": "frozen",
    "model.options": {"pad_type": "same"},
    "optim.name": "adamw",
    "optim.lr": 0.05,
    "optim.base_batch_size": 256,
    "optim.momentum": 0.0,
    "optim.nesterov": True,
    "optim.betas": [0.9, 0.95],
    "optim.eps": 1e-6,
    "optim.weight_decay": 0.0,
    "optim.schedule": "poly",
    "optim.warmup_epochs": 1.5,
    "optim.warmup": "power:2",
    "optim.milestones": [2.0, 4.0],
    "optim.factor": 0.2,
    "optim.power": 1.0,
    "optim.final": 0.01,
    "optim.loss": "focal:1.5",
    "optim.class_weights": "balanced",
    "optim.label_smoothing": 0.1,
    "optim.clip_norm": 1.0,
    "optim.ema": 0.999,
    "optim.swa": 0.75,
    "optim.accumulate": 2,
    "optim.grow_batch": ["2@1"],
    "data.path_column": "file",
    "data.label_column": ["kind"],
    "data.split_column": "fold",
    "data.zip_names": "gbk",
    "data.repeats": 3,
    "data.grow_size": ["16@0", "32@1"],
    "optim.options": {"batch_scale": 2},
    "precision.name": "bf16",
    "precision.channels_last": False,
    "precision.compile": "default",
    "budget.epochs": 6.5,
    "budget.patience": 3,
    "budget.minutes": 60.0,
    "budget.fill": True,
    "batch_size": 64,
    "seed": 1,
}
# For every value that does not: where the work is done, and how often something is written.
ELSEWHERE: dict[str, object] = {
    "data.test": "test.rec",
    "parallel.device": "cpu",
    "parallel.threads": 3,
    "parallel.compute_threads": 4,
    "parallel.procs": 2,
    "parallel.price": "2.40",
    "parallel.restarts": 0,
    "parallel.silent_seconds": 120.0,
    "parallel.staleness_power": 0.5,
    "parallel.deterministic": True,
    "parallel.graph": True,
    "parallel.recompute": True,
    "parallel.compress": "bf16",
    "parallel.power_rank": 4,
    "parallel.power_from": 1.0,
    "parallel.engine": "local",
    "parallel.sync_every": 8,
    "parallel.local_from": 1.0,
    "parallel.outer": "diloco",
    "parallel.outer_lr": 0.5,
    "parallel.outer_momentum": 0.8,
    "parallel.shard": True,
    "parallel.shard_ranks": 8,
    "parallel.shard_gather": "bf16",
    "every.log_steps": 5,
    "every.evaluate_epochs": 0.5,
    "every.save_steps": 10,
    "every.save_minutes": 1.0,
    "every.keep": 3,
    "every.best": "auc",
    "every.stall_minutes": 5.0,
    "every.upload": "s3://bucket/runs/a",
    "every.notices": "file:/run/preempted",
    "every.profile": 10,
    "every.profile_ranks": "all",
    "every.track": "tensorboard",
    "every.nonfinite": "skip",
    "every.skip": [120],
    "every.slower": [120, 480],
    "every.rates": [[120, 0.5]],
    "every.fp32": [120],
    "every.undone": "continue",
    "every.tries": [[120, 0.0003]],
}


def _shares(low: float = 0.0, high: float = 1.0) -> st.SearchStrategy[float]:
    return st.floats(low, high)


def _pairs(low: float, high: float) -> st.SearchStrategy[tuple[float, ...]]:
    return st.tuples(_shares(low, high), _shares(low, high)).map(lambda pair: tuple(sorted(pair)))


words = st.characters(codec="utf-8", exclude_characters="\0")
names = st.text(words, min_size=1, max_size=20)
scalars = st.text(words) | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.booleans() | st.none()
channels = st.none() | st.lists(_shares(0.01), min_size=3, max_size=3).map(tuple)
data = st.builds(
    Data,
    train=names,
    val=st.none() | names,
    holdout=_shares(high=0.99),
    size=st.none() | st.integers(1, 4096),
    augment=st.sampled_from(["auto", "resized-crop", "pad-crop", "none"]),
    area=_pairs(0.01, 1),
    ratio=_pairs(0.1, 10),
    pad=st.integers(0, 512),
    flip=st.none() | st.booleans(),
    crop=st.none() | _shares(0.1),
    mean=channels,
    std=channels,
    root=st.none() | names,
    labels=st.none() | names,
    order=st.sampled_from(["global", "blocks"]),
)
models = st.builds(Model, names, decay=_shares(0.01), options=st.dictionaries(names, scalars, max_size=3))
optims = st.builds(
    Optim,
    st.sampled_from(["sgd", "adamw"]),
    lr=st.floats(1e-9, 1e9) | st.integers(1, 10),
    base_batch_size=st.none() | st.integers(1, 4096),
    betas=st.tuples(_shares(high=0.99), _shares(high=0.99)),
    schedule=st.sampled_from(["cosine", "poly", "constant"]),
    milestones=st.sets(st.integers(1, 100)).map(lambda epochs: tuple(sorted(epochs))),
    ema=st.none() | _shares(0.1, 0.9),
)
budgets = st.builds(Budget, epochs=st.floats(0.01, 1000)) | st.builds(Budget, steps=st.integers(1, 10**9))
parallels = st.builds(
    Parallel,
    threads=st.none() | st.integers(1, 256),
    procs=st.none() | st.just("auto") | st.integers(1, 256),
    compress=st.sampled_from(["none", "fp16", "bf16"]),
)
everies = st.builds(Every, log_steps=st.integers(1, 1000), save_minutes=st.floats(0.001, 1000))
recipes = st.builds(
    Recipe,
    data=data,
    model=models,
    optim=optims,
    precision=st.builds(Precision, st.sampled_from(["fp32", "bf16", "fp16"])),
    budget=budgets,
    parallel=parallels,
    every=everies,
    batch_size=st.integers(1, 2**20),
    seed=st.integers(0, 2**63 - 1),
)


@given(recipes)
def test_json_brings_the_same_recipe_back(recipe: Recipe) -> None:
    again = Recipe.from_json(recipe.to_json())
    assert again == recipe
    assert again.digest == recipe.digest
    assert again.differences(recipe) == []


@given(recipes, recipes)
def test_with_the_values_of_another_it_is_the_other(recipe: Recipe, other: Recipe) -> None:
    document = other.to_dict()
    assert recipe.with_(document) == other


def test_no_word_of_other_trainers_stands_for_a_flag_and_key_that_are_called_the_same() -> None:
    flags = {name.replace("_", "-") for name in FLAGS}
    recipe = Recipe(data=Data(train="a.rec"), model=Model("mlp"))
    keys = {key.rpartition(".")[2].replace("_", "-") for key, _ in leaves(recipe.to_dict())}
    same = [word for setting in recipe_settings().values() for word in setting.words.split()]
    assert len(set(same)) == len(same), "a word means one setting"
    theirs = {name for name, rows in foreign_flags().items() if not all(row.values for row in rows)}
    assert not ({*same} | theirs) & flags & keys


@given(recipes)
def test_json_is_readable_anywhere(recipe: Recipe) -> None:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is Python's own word, not JSON")

    json.loads(recipe.to_json(), parse_constant=refuse)


@given(recipes, recipes)
def test_the_digest_is_the_same_only_for_the_same_training(recipe: Recipe, other: Recipe) -> None:
    data = dataclasses.replace(other.data, test=recipe.data.test)
    same = dataclasses.replace(other, data=data, parallel=recipe.parallel, every=recipe.every)
    assert recipe.digest != other.digest or recipe == same


def test_the_tables_above_name_every_value() -> None:
    values = dict(leaves(BASE.to_dict()))
    assert values.keys() - {"budget.steps", "model.folds"} == OTHER.keys() | ELSEWHERE.keys()


@pytest.mark.parametrize("name", OTHER)
def test_the_digest_changes_with_what_is_trained(name: str) -> None:
    changed = BASE.with_({name: OTHER[name]})
    assert changed != BASE
    assert changed.digest != BASE.digest
    assert all(line.startswith(name) for line in BASE.differences(changed))


def test_the_digest_changes_with_the_folds_of_a_probe() -> None:
    probe = BASE.with_({"model.train": "probe", "budget.epochs": 0})
    assert probe.with_({"model.folds": 5}).digest != probe.digest


@pytest.mark.parametrize("name", ELSEWHERE)
def test_the_digest_does_not_change_with_where_it_is_trained(name: str) -> None:
    base = BASE.with_({"parallel.shard": name.startswith("parallel.shard_"), "precision.name": "bf16"})
    changed = base.with_({name: ELSEWHERE[name]})
    assert changed != base
    assert changed.digest == base.digest


@pytest.mark.parametrize(("name", "value"), [("shard_ranks", 8), ("shard_gather", "bf16")])
def test_settings_of_divided_parameters_are_refused_where_none_are_divided(name: str, value: object) -> None:
    with pytest.raises(RecipeError, match=rf"parallel\.{name}=.* exclude each other: it needs parallel\.shard=true"):
        BASE.with_({f"parallel.{name}": value})


def test_numbers_typed_as_whole_or_not_name_the_same_run() -> None:
    typed = BASE.with_({"optim.lr": 1, "budget.epochs": 6.0, "optim.milestones": [1, 2]})
    assert typed.digest == BASE.with_({"optim.lr": 1.0, "budget.epochs": 6, "optim.milestones": [1.0, 2.0]}).digest


def test_a_changed_recipe_leaves_the_old_one_alone() -> None:
    changed = BASE.with_({"optim.lr": 0.2, "model.options.pad_type": "same"}, batch_size=64)
    assert (changed.optim.lr, changed.model.options, changed.batch_size) == (0.2, {"pad_type": "same"}, 64)
    assert (BASE.optim.lr, BASE.model.options, BASE.batch_size) == (0.1, {}, 128)


def test_differences_name_the_value_before_and_after() -> None:
    assert BASE.differences(BASE.with_({"optim.lr": 0.2, "seed": 7})) == ["optim.lr: 0.1 -> 0.2", "seed: 0 -> 7"]


def test_toml_reads_as_a_recipe() -> None:
    text = 'batch_size = 32\n[data]\ntrain = "a.rec"\n[model]\nname = "mlp"\n[optim]\nlr = 1\nbetas = [0.9, 0.99]\n'
    recipe = Recipe.from_dict(tomllib.loads(text))
    assert (recipe.batch_size, recipe.optim.lr, recipe.optim.betas) == (32, 1.0, (0.9, 0.99))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optim.lrr": 1}, "unknown key 'optim.lrr'. Did you mean lr?"),
        ({"optim.batch_size": 8}, "unknown key 'optim.batch_size'. Did you mean batch_size?"),
        ({"data.epochs": 8}, "unknown key 'data.epochs'. Did you mean budget.epochs?"),
        ({"optin.lr": 1}, "unknown key 'optin.lr' in the recipe. Did you mean optim.lr?"),
        ({"bath_size": 1}, "unknown key 'bath_size' in the recipe. Did you mean batch_size?"),
        ({"lr": 0.1}, "unknown key 'lr' in the recipe. Did you mean optim.lr?"),
        (
            {"momentun": 0.1},
            "unknown key 'momentun' in the recipe. Did you mean optim.momentum or parallel.outer_momentum?",
        ),
        ({"name": "a"}, "unknown key 'name' in the recipe. Did you mean model.name or optim.name or precision.name?"),
        ({"seed.x": 1}, "unknown key 'seed.x' in the recipe. Did you mean seed?"),
        ({"model": "mlp"}, "model is 'mlp'; it must be a table of keys and values"),
        ({"optim.lr": 0}, "optim.lr is 0.0; it must be above 0"),
        ({"optim.lr": float("inf")}, "optim.lr is inf; it must be a number"),
        ({"optim.name": "sdg"}, "optim.name is 'sdg'; it must be one of sgd, nag,"),
        ({"optim.schedule": "step"}, "optim.milestones is (); it must be given for schedule=step"),
        ({"optim.milestones": [3, 2]}, "optim.milestones is (3.0, 2.0); it must be rising epochs above 0"),
        ({"optim.accumulate": 3}, "batch_size=128 cannot be split into optim.accumulate=3 equal parts"),
        ({"budget.epochs": 6.0, "budget.steps": 5}, "budget needs epochs or steps, not both: epochs=6.0 steps=5"),
        ({"budget.epochs": None}, "budget needs epochs or steps, not both: epochs=None steps=None"),
        ({"data.train": ""}, "data.train is ''; it must be a .rec file or a folder of classes"),
        ({"data.size": 224.5}, "data.size is 224.5; it must be a whole number or nothing"),
        ({"batch_size": 10**400}, f"batch_size is {10**119}...; it must be a whole number, and a number of at most 9,"),
        ({"data.mean": [0.5, 0.5]}, "data.mean is (0.5, 0.5); it must be 1 or 3 numbers"),
        ({"data.std": [0.0]}, "data.std is (0.0,); it must be above 0 in every channel"),
        ({"model.pretrained": True, "model.weights": "a.pth"}, "model.pretrained and model.weights='a.pth' exclude"),
        ({"model.options": {"a": [1]}}, "model.options is {'a': [1]}; it must be a table whose values are"),
        ({"batch_size": 0}, "batch_size is 0; it must be 1 to 1048576"),
        ({"seed": -1}, "seed is -1; it must be 0 to 2**63 - 1"),
        ({"every.keep": 0}, "every.keep is 0; it must be 1 or more"),
        ({"parallel.threads": 0}, "parallel.threads is 0; it must be 1 to 256"),
    ],
)
def test_an_invalid_recipe_cannot_be_built(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        BASE.with_(changes)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "the recipe is not JSON"),
        ('{"seed": 1, "seed": 2}', "the recipe is not JSON: the key 'seed' comes twice"),
        ("[]", "recipe is []; it must be a table"),
        ("{}", "data, model must be given"),
        ('{"data": {"train": "a"}, "model": {}}', "model.name must be given"),
    ],
)
def test_a_file_that_is_no_recipe_is_refused(text: str, message: str) -> None:
    with pytest.raises(RecipeError, match="^" + message.replace("[", r"\[")):
        Recipe.from_json(text)


def test_a_recipe_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        BASE.seed = 3  # type: ignore[misc]


def test_the_learning_rate_grows_with_the_batch_from_a_stated_base() -> None:
    recipe = BASE.with_({"batch_size": 1024, "optim.lr": 0.1, "optim.base_batch_size": None})
    assert Timeline(recipe, 0).peak == 0.1
    assert Timeline(recipe.with_({"optim.base_batch_size": 256}), 0).peak == pytest.approx(0.4)


def test_a_budget_that_no_machine_can_spend_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"budget\.epochs is 1e\+30; it must be above 0, up to 1,000,000"):
        Budget(epochs=1e30)


def test_two_bits_are_refused_by_name_and_their_threshold_is_read_where_it_meant_nothing() -> None:
    with pytest.raises(RecipeError, match=r"parallel\.compress=2bit was removed: take bf16 .* or powersgd"):
        BASE.with_({"parallel.compress": "2bit"})
    with pytest.raises(RecipeError, match=r"parallel\.threshold was removed with .*: leave it out"):
        BASE.with_({"parallel.threshold": 0.25})
    values = BASE.to_dict()
    assert Recipe.from_dict({**values, "parallel": {**values["parallel"], "threshold": 0.25}}) == BASE


def test_what_cannot_be_compiled_is_refused() -> None:
    compiled = {"precision.compile": "reduce-overhead"}
    with pytest.raises(RecipeError, match=r"compile='reduce-overhead' and optim\.accumulate=4 exclude each other"):
        BASE.with_(compiled | {"optim.accumulate": 4})
    with pytest.raises(RecipeError, match=r"batch_norm='synchronous' exclude each other"):
        BASE.with_(compiled | {"model.batch_norm": "synchronous"})


def test_runs_from_before_there_was_compiled_code_keep_their_digest() -> None:
    then = {"optim.nesterov": True, "data.holdout": 0.1}  # as every recipe of sgd was
    assert BASE.with_(then).digest == "85232729ec1c"


def test_16_bit_gradients_are_not_compressed() -> None:
    with pytest.raises(RecipeError, match=r"compress='bf16' and precision\.name='pure-fp16' exclude each other"):
        BASE.with_({"parallel.compress": "bf16", "precision.name": "pure-fp16"})


def test_none_is_a_word_where_it_is_one_of_the_choices() -> None:
    recipe = BASE.with_(dict([parse_setting("parallel.compress=none")]))
    assert recipe.parallel.compress == "none"


def test_a_recipe_with_the_removed_key_is_read_where_it_was_off_and_refused_where_it_was_on() -> None:
    values = Recipe(data=Data(train="a.rec"), model=Model("resnet20")).to_dict()
    old = {**values, "precision": {**values["precision"], "blocked": False}}
    assert Recipe.from_json(json.dumps(old)) == Recipe.from_dict(values)
    old["precision"]["blocked"] = True
    with pytest.raises(RecipeError, match=r"precision\.blocked was removed"):
        Recipe.from_json(json.dumps(old))
    with pytest.raises(RecipeError, match=r"precision\.blocked was removed"):
        Recipe.from_dict(values).with_({"precision.blocked": True})


def test_sgd_has_no_nesterov_momentum_unless_it_is_named() -> None:
    """As in torch and MXNet; a recipe that is written down says which momentum it has."""
    plain, nag = BASE.with_({"optim": Optim("sgd")}), BASE.with_({"optim": Optim("nag")})
    assert plain.optim.nesterov is False and plain.to_dict()["optim"]["nesterov"] is False
    assert plain.digest != nag.digest
    adamw = BASE.with_({"optim": Optim("adamw")})
    assert adamw.with_({"optim.name": "sgd"}).optim.nesterov is False
    assert adamw.with_({"optim.name": "sgd", "optim.nesterov": True}).optim.nesterov is True
    values = {"data": {"train": "x"}, "model": {"name": "mlp"}, "optim": {"name": "sgd"}}
    assert Recipe.from_dict(values).optim.nesterov is False


def test_the_default_recipe_keeps_its_measured_momentum_and_the_word_sgd_means_sgd() -> None:
    for small in (True, False):
        usual = usual_recipe("photos", finetune=False, small=small)
        assert (usual.optim.name, usual.optim.nesterov) == ("sgd", True)
        assert apply_changes(usual, {}, {"optim.lr": 0.2}).optim.nesterov is True
        assert apply_changes(usual, {}, {"optim.name": "sgd"}).optim.nesterov is False
        assert apply_changes(usual, {"optim": {"name": "sgd"}}, {}).optim.nesterov is False
        named = {"optim": {"name": "sgd", "nesterov": True}}
        assert apply_changes(usual, named, {"optim.name": "sgd"}).optim.nesterov is True
    tuned = usual_recipe("photos", finetune=True, small=False)
    assert apply_changes(tuned, {}, {"optim.name": "sgd"}).optim.nesterov is False


def test_a_recipe_that_was_written_before_keeps_its_momentum() -> None:
    values = BASE.to_dict()
    values["optim"] |= {"name": "sgd", "nesterov": True}  # every recipe.json has said it
    assert Recipe.from_dict(values).optim.nesterov is True
    values["optim"]["name"] = "adamw"
    assert Recipe.from_dict(values).digest == BASE.with_({"optim": Optim("adamw")}).digest


def test_what_leads_out_of_the_machine_counts_only_where_code_names_it(recipe: Recipe) -> None:
    named = recipe.with_({"every.upload": "s3://bucket/a"})
    assert not named.every.from_file
    read = Recipe.from_json(named.to_json())
    assert read == named and read.every.from_file
    assert read.with_(seed=2).every.from_file and read.with_({"every.keep": 3}).every.from_file
    assert "upload" not in read.with_({"every.upload": "s3://bucket/a"}).every.from_file
    assert "from_file" not in named.to_json()


def test_a_word_that_begins_as_an_address_is_no_link_on_a_page() -> None:
    assert "by a file, ``file:PATH`` (docs: spot)" in (Every.__doc__ or "")
