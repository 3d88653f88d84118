"""The recipe of a user who chooses little, by the command line and by Python."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from huggingface_hub import constants
from PIL import Image

import steadytrain as st
from steadytrain.cli import main
from steadytrain.config.defaults import FINETUNED_MODELS, fit_to_epochs, usual_recipe
from steadytrain.errors import ModelError, RecipeError
from steadytrain.events import Noticed
from steadytrain.models.registry import find, licence_kind

QUICK = {"model.name": "mlp", "budget.epochs": 1, "parallel.device": "cpu"}


@pytest.fixture(autouse=True)
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory of its own, and an empty cache of the hub, which cannot be reached."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path


def _write_photos(folder: Path, count: int, side: int = 80) -> Path:
    for name, grey in (("cats", 60), ("dogs", 160)):
        (folder / name).mkdir(parents=True)
        for number in range(count):
            Image.new("RGB", (side, side), (grey, number % 256, 90)).save(folder / name / f"{number}.png")
    return folder


def _put_into_hub(work: Path, name: str) -> None:
    """Pretend that a model's weights were fetched: their names are all that is looked at."""
    folder = work / "hub" / f"models--timm--{name}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("abc")
    (folder / "snapshots" / "abc").mkdir(parents=True)
    (folder / "snapshots" / "abc" / "model.safetensors").write_bytes(b"")


def test_the_command_line_and_python_make_the_same_recipe(
    write_digits: Callable[[Path, int, int], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    write_digits(Path("digits"), 200, 10)
    words = ["digits", "--model", "mlp", "--epochs", "1", "--device", "cpu", "--explain", "--json"]
    assert main(["train", *words]) == 0
    assert st.default_recipe("digits", QUICK).to_dict() == json.loads(capsys.readouterr().out)["recipe"]
    assert main(["train", *words, "--optimizer", "adamw"]) == 0
    adam = st.default_recipe(Path("digits"), {**QUICK, "optim.name": "adamw"})
    assert adam.to_dict() == json.loads(capsys.readouterr().out)["recipe"]
    assert (adam.optim.lr, adam.batch_size) == (1e-3, 16)


def test_few_photographs_are_better_fine_tuned() -> None:
    def said(*words: object, **changes: object) -> list[str]:
        lines: list[str] = []
        st.default_recipe(str(words[0]), changes, say=lines.append)
        return [line for line in lines if "fine-tuning" in line]

    few = _write_photos(Path("my photos"), 20)
    [advice] = said(few)
    assert advice == (
        "20 images a class are few to train from scratch; fine-tuning does better: steady finetune 'my photos'"
    )
    [advice] = said(few, **{"data.val": "my photos"})
    assert advice.endswith("steady finetune 'my photos' --val 'my photos'")
    assert not said(few, **{"model.name": "resnet20"}), "a model that the user chose is what the user wants"
    assert not said(_write_photos(Path("tiny"), 20, side=32)), "small images have no pretrained models here"
    assert not said(_write_photos(Path("many"), 200))


def test_a_rate_that_a_probe_has_no_use_for_is_named() -> None:
    changes, lines = {"model.name": "resnet20", "optim.lr": 0.1}, list[str]()
    photos = str(_write_photos(Path("photos"), 20))
    for train in ("full", "probe"):
        st.default_recipe(photos, {**changes, "model.train": train}, say=lines.append)
    words = "optim.lr: not used, since a probe makes no updates (--train probe+head trains on from it)"
    assert [line for line in lines if "not used" in line] == [words]


def test_the_model_to_fine_tune_is_the_first_whose_weights_are_here(work: Path) -> None:
    photos, lines = _write_photos(Path("photos"), 20), list[str]()
    with pytest.raises(ModelError, match=r"mobilenetv3_large_100 .*HF_HUB_OFFLINE.*weights=.*steady models"):
        st.default_recipe(photos, finetune=True, say=lines.append)
    assert "mobilenetv3_large_100 (Apache-2.0), whose weights are fetched once (22 MB); --model NAME" in lines[-1]
    _put_into_hub(work, "resnet50.a1_in1k")
    _put_into_hub(work, "resnet18.a1_in1k")
    recipe = st.default_recipe(photos, finetune=True, say=lines.append)
    assert recipe.model.name == "timm/resnet18" and recipe.model.pretrained
    assert any("timm/resnet18 (Apache-2.0), whose weights are on this machine" in line for line in lines)
    assert recipe.model.batch_norm == "frozen" and recipe.batch_size == 2


def test_naming_the_updates_or_the_epochs_replaces_the_other(write_digits: Callable[[Path, int, int], Path]) -> None:
    write_digits(Path("digits"), 60, 3)
    budget = st.default_recipe("digits", {"model.name": "mlp", "budget.steps": 6}).budget
    assert (budget.steps, budget.epochs) == (6, None)
    assert st.default_recipe("digits", {**QUICK, "budget.epochs": 2}).budget.steps is None
    with pytest.raises(RecipeError, match="epochs or steps, not both"):
        st.default_recipe("digits", {**QUICK, "budget.steps": 6})


def test_classes_that_are_balanced_twice_are_announced(write_digits: Callable[[Path, int, int], Path]) -> None:
    write_digits(Path("digits"), 60, 3)
    changes = {**QUICK, "data.balance": "classes", "optim.class_weights": "balanced"}
    for number, change in enumerate(({}, {"data.balance": "none"}, {"optim.class_weights": "none"})):
        run = st.Run.create(f"runs/{number}", st.default_recipe("digits", {**changes, **change}))
        lines = [event.message for event in st.steps(run) if isinstance(event, Noticed)]
        assert any("so that they count twice" in line for line in lines) is (number == 0)


def test_without_weights_nothing_is_frozen_as_if_there_were_some(
    write_digits: Callable[[Path, int, int], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    write_digits(Path("digits"), 60, 3)
    scratch = {**QUICK, "model.name": "timm/resnet10t", "model.pretrained": False}
    lines: list[str] = []
    recipe = st.default_recipe("digits", scratch, finetune=True, say=lines.append)
    assert recipe.model.batch_norm == "train"
    assert (recipe.model.train, recipe.optim.lr) == ("discriminative", 1e-3)  # features at random are worth no probe
    probe = {**scratch, "model.train": "probe+full"}
    assert st.default_recipe("digits", probe, finetune=True).model.train == "probe+full"
    assert "no weights to start from: timm/resnet10t is trained from scratch, for which steady train is made" in lines
    hub = {"model.name": "hf-hub:timm/resnet10t.c3_in1k", "model.pretrained": False}  # a name with a colon is no code
    assert st.default_recipe("digits", {**QUICK, **hub}, finetune=True).model.batch_norm == "train"
    own = {"model.name": "torchvision.models:resnet18", "model.pretrained": False}
    assert st.default_recipe("digits", {**QUICK, **own}, finetune=True).model.batch_norm == "frozen"
    words = ["--model", "timm/resnet10t", "--set", "model.pretrained=false", "--set", "model.batch_norm=frozen"]
    assert main(["finetune", "digits", *words]) == 2
    assert "timm/resnet10t starts without any: leave it out, or start from weights" in capsys.readouterr().err
    assert main(["train", "digits", "--model", "resnet20", "--set", "model.batch_norm=frozen"]) == 2


def test_what_contradicts_the_weights_is_said(write_digits: Callable[[Path, int, int], Path]) -> None:
    write_digits(Path("digits"), 60, 3)
    first = st.train(st.Run.create("runs/a", st.default_recipe("digits", QUICK))).run

    def said(**changes: object) -> list[str]:
        changes = {**QUICK, **{key.replace("__", "."): value for key, value in changes.items()}}
        run = st.Run.create(f"runs/{len(list(Path('runs').iterdir()))}", st.default_recipe("digits", changes))
        return [event.message for event in st.steps(run) if isinstance(event, Noticed)]

    tuned = {"model__weights": str(first.weights)}
    (line,) = [line for line in said(data__mean=[0.5], **tuned) if "data.mean" in line]
    assert line.startswith(f"data.mean is 0.5, and the weights of {first.weights} were trained with 0.")
    assert not any("data.mean" in line for line in said(**tuned))
    assert not any("data.mean" in line for line in said(data__mean=[0.5]))  # there are no weights
    assert any(
        line.startswith("model.train=head keeps parts of mlp as they start") for line in said(model__train="head")
    )
    assert not any("keeps parts" in line for line in said(model__train="head", **tuned))
    recipe = st.default_recipe("digits", {**QUICK, "model.name": "resnet20"})
    frozen = st.Run.create("runs/frozen", recipe.with_({"model.batch_norm": "frozen"}))
    assert any("so that it hardly learns" in e.message for e in st.steps(frozen) if isinstance(e, Noticed))


def test_the_weights_of_every_default_model_are_free() -> None:
    assert {licence_kind(find(name).licence) for name in FINETUNED_MODELS} == {"free"}


def test_weights_of_ours_name_their_model(write_digits: Callable[[Path, int, int], Path]) -> None:
    write_digits(Path("digits"), 60, 3)
    run = st.train(st.Run.create("runs/a", st.default_recipe("digits", QUICK))).run
    assert st.default_recipe("digits", {"model.weights": run.weights}, finetune=True).model.name == "mlp"
    of_run = st.default_recipe("digits", {"model.weights": str(run.directory)}, finetune=True).model
    assert (of_run.name, of_run.weights) == ("mlp", str(run.directory / "best.safetensors"))


@pytest.mark.slow
def test_weights_of_no_network_have_to_name_one(
    write_digits: Callable[[Path, int, int], Path], weights_without_names: Path
) -> None:
    write_digits(Path("digits"), 60, 3)
    with pytest.raises(ModelError, match=r"does not say which model's weights it holds, .*: name it with model="):
        st.default_recipe("digits", {"model.weights": str(weights_without_names)}, finetune=True)


@pytest.fixture
def weights_without_names(tmp_path: Path) -> Path:
    import torch
    from safetensors.torch import save_file

    save_file({"weight": torch.zeros(1)}, tmp_path / "other.safetensors")
    return tmp_path / "other.safetensors"


@pytest.mark.parametrize(
    ("train", "val"),
    [
        ("a-train.rec", "a-val.rec"),
        pytest.param("a_train.rec", "a_validation.rec", marks=pytest.mark.slow),
        pytest.param("train.rec", "val.rec", marks=pytest.mark.slow),
    ],
)
def test_validation_records_beside_training_records_are_used(
    write_digits: Callable[[Path, int, int], Path], train: str, val: str
) -> None:
    folder = write_digits(Path("digits"), 80, 2)
    st.pack(folder, train.removesuffix(".rec"))
    lines: list[str] = []
    assert st.default_recipe(train, QUICK, say=lines.append).data.val is None and not lines
    st.pack(folder, val.removesuffix(".rec"))
    st.pack(folder, "other-val")
    assert st.default_recipe(train, QUICK, say=lines.append).data.val == val
    assert lines == [
        f"validation data: {val}, found beside {train} (--holdout 0.1 holds out a part of {train} instead)"
    ]
    assert st.default_recipe(train, {**QUICK, "data.holdout": 0.1}).data.val is None
    assert st.default_recipe(train, {**QUICK, "data.val": "other-val.rec"}).data.val == "other-val.rec"
    assert main(["train", train, "--model", "mlp", "--epochs", "1", "--device", "cpu", "--run", "runs/a"]) == 0
    assert st.Run.open("runs/a").progress().started.data["num_val"] == 80  # type: ignore[union-attr]


def test_a_size_that_the_network_refuses_is_said_before_the_images_are_read(work: Path) -> None:
    folder = _write_photos(Path("photos"), 2)
    (folder / "cats" / "broken.png").write_bytes(b"no image")
    lines: list[str] = []
    changes = {"model.name": "timm/xcit_nano_12_p16_224", "data.size": 200}
    with pytest.raises(ModelError, match="should divide image dimensions evenly"):
        st.default_recipe("photos", changes, say=lines.append)
    assert not any("packing" in line for line in lines)


@pytest.mark.parametrize("name", ["mlp", "torchvision/resnet18", "torchvision.models:resnet18"])
def test_a_network_whose_weights_are_nowhere_is_refused_before_the_images_are_read(
    name: str, digits: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("steadytrain.training.loop.defaults.open_named")
    with pytest.raises(ModelError, match="weights="):
        st.default_recipe(digits, {"model.name": name}, finetune=True)


FINETUNED = {"model.name": "digits", "model.pretrained": True, "parallel.device": "cpu"}


@pytest.mark.parametrize(
    ("changes", "train", "rate", "warmup"),
    [
        ({}, "probe+discriminative", 1e-3, ("power:3", 2.0)),
        ({"budget.epochs": 2}, "probe+discriminative", 1e-4, ("linear", 0.5)),
        ({"budget.epochs": 2, "optim.lr": 0.002}, "probe+discriminative", 0.002, ("linear", 0.5)),
        ({"budget.epochs": 4}, "probe+discriminative", 1e-3, ("power:3", 1.0)),
        ({"budget.epochs": 40}, "probe+discriminative", 1e-3, ("power:3", 2.0)),
        ({"optim.warmup_epochs": 3}, "probe+discriminative", 1e-3, ("power:3", 3.0)),
        ({"optim.warmup": "linear"}, "probe+discriminative", 1e-3, ("linear", 2.0)),
        ({"optim.schedule": "one-cycle"}, "probe+discriminative", 1e-3, ("linear", 0.0)),
        ({"model.train": "discriminative"}, "discriminative", 1e-3, ("linear", 0.5)),
        ({"data.balance": "classes"}, "discriminative", 1e-3, ("linear", 0.5)),
        ({"data.repeats": 2}, "discriminative", 1e-3, ("linear", 0.5)),
        ({"parallel.engine": "async", "parallel.procs": 2}, "discriminative", 1e-3, ("linear", 0.5)),
    ],
)
def test_fine_tuning_begins_with_a_probe_wherever_it_can(
    digits: Path,
    changes: dict[str, object],
    train: str,
    rate: float,
    warmup: tuple[str, float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("steadytrain.models.require_weights", lambda source: None)
    recipe = st.default_recipe(digits, {**FINETUNED, **changes}, finetune=True)
    assert recipe.model.train == train
    assert (recipe.optim.lr, (recipe.optim.warmup, recipe.optim.warmup_epochs)) == (rate, warmup)


def test_images_with_several_labels_are_fine_tuned_without_a_probe(
    labelled_digits: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("steadytrain.models.require_weights", lambda source: None)
    recipe = st.default_recipe(labelled_digits, FINETUNED, finetune=True)
    assert (recipe.model.train, recipe.optim.warmup) == ("discriminative", "linear")


def test_a_mistake_is_named_whether_or_not_a_probe_comes_first(digits: Path) -> None:
    with pytest.raises(RecipeError, match=r"balance='classes' and model\.train='probe\+full' exclude"):
        st.default_recipe(digits, {**FINETUNED, "data.balance": "classes", "model.train": "probe+full"}, finetune=True)
    with pytest.raises(RecipeError, match="unknown key"):
        st.default_recipe(digits, {**FINETUNED, "optim.rate": 1}, finetune=True)


@pytest.mark.parametrize("law", ["power:5", "linear", "constant:0.1"])
def test_a_law_of_the_warm_up_that_is_chosen_keeps_the_length_that_a_probe_needs(law: str) -> None:
    recipe = usual_recipe("photos", finetune=True, small=False).with_({"optim.warmup": law})
    optim = fit_to_epochs(recipe, 8, chosen={"optim.warmup"}).optim
    assert (optim.warmup, optim.warmup_epochs) == (law, 2.0)
    kept = fit_to_epochs(recipe, 8, chosen={"optim.warmup", "optim.warmup_epochs"}).optim
    assert kept.warmup_epochs == recipe.optim.warmup_epochs, "a length that is chosen stays"
