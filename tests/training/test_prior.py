"""Answers by other class frequencies: exact, refused where training had others already, carried by exported files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.nn import functional

from steadytrain.cli import main
from steadytrain.config import Recipe
from steadytrain.errors import DataError, ModelError, SteadyError
from steadytrain.events import Evaluated
from steadytrain.export.export import export_model
from steadytrain.run import Run
from steadytrain.training import Trained, checkpoints, evaluate, restore, train
from steadytrain.training.inference.prior import read_prior, weighting, with_prior
from steadytrain.training.metrics import even_shift, log_ratio

COUNTS = [40, 2, 40, 2]


@pytest.fixture(scope="module")
def uneven(digits_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four digits, two of which have few images."""
    folder = tmp_path_factory.mktemp("uneven")
    for label, count in enumerate(COUNTS):
        (folder / str(label)).mkdir()
        files = sorted((digits_folder / str(label)).iterdir())
        for number in range(count):
            source = files[number % len(files)]
            shutil.copy(source, folder / str(label) / f"{number}-{source.name}")
    return folder


@pytest.fixture
def run(recipe: Recipe, uneven: Path, digits: Path, tmp_path: Path) -> Run:
    changes = {"data.train": str(uneven), "data.val": str(uneven), "batch_size": 8}
    run = Run.create(tmp_path / "run", recipe.with_(changes))
    train(run)
    return run


def logits_of(trained: Trained, seed: int = 0) -> NDArray[np.float64]:
    side, channels = trained.input.size, trained.input.channels
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        logits: torch.Tensor = trained.module(torch.randn(6, channels, side or 1, side or 1, generator=draw))
    return logits.double().numpy()


def test_probabilities_are_bayes_rule_with_the_other_frequencies(run: Run) -> None:
    trained = restore(run)
    prior = with_prior(trained, {"0": 1, "1": 2, "2": 3, "3": 4}, say=lambda line: None)
    p = functional.softmax(torch.from_numpy(logits_of(trained)), 1).numpy()
    expected = p * (np.array([1, 2, 3, 4]) / np.array(COUNTS))
    expected /= expected.sum(1, keepdims=True)
    actual = functional.softmax(torch.from_numpy(logits_of(prior)), 1).numpy()
    assert actual == pytest.approx(expected, abs=1e-6)
    assert with_prior(trained, "training") is trained
    assert logits_of(trained) == pytest.approx(logits_of(restore(run))), "the model itself stays as it is"


def test_a_temperature_comes_first(run: Run) -> None:
    tensors, about = checkpoints.read_weights(run.directory / "best.safetensors")
    checkpoints.write_weights(
        run.directory / "best.safetensors", tensors, about | {"calibration": {"temperature": 2.0}}
    )
    trained = restore(run)
    prior = with_prior(trained, "uniform")
    logits = torch.from_numpy(logits_of(trained)) / 2 + torch.from_numpy(log_ratio(COUNTS))
    expected = logits.softmax(1).numpy()
    assert prior.probabilities(torch.from_numpy(logits_of(prior))).numpy() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("name", ["a.onnx", "a.safetensors"])
def test_an_exported_file_has_it_in_its_outputs_and_takes_no_second_one(run: Run, name: str) -> None:
    path = run.directory.parent / name
    export_model(run, path, prior="uniform", say=lambda line: None)
    again = restore(path)
    assert again.prior == "uniform" and again.class_counts == tuple(COUNTS)
    assert logits_of(again) == pytest.approx(logits_of(with_prior(restore(run), "uniform")), abs=1e-4)
    assert evaluate(again, run.recipe.data.train, say=lambda line: None).other is not None
    with pytest.raises(ModelError, match="has the prior uniform in its outputs"):
        with_prior(again, "uniform")


def test_an_exported_file_without_one_takes_one_later(run: Run) -> None:
    path = run.directory.parent / "plain.onnx"
    export_model(run, path, say=lambda line: None)
    later = with_prior(restore(path), "uniform")
    assert logits_of(later) == pytest.approx(logits_of(with_prior(restore(run), "uniform")), abs=1e-4)


def test_figures_of_both_stand_beside_each_other_where_classes_differ_tenfold(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    source = str(run.recipe.data.train)
    documents = {}
    for words in ([], ["--prior", "uniform"]):
        assert main(["evaluate", str(run.directory), source, "--json", *words]) == 0
        documents[bool(words)] = json.loads(capsys.readouterr().out)["priors"]
    (training, uniform), (first, second) = documents[False], documents[True]
    assert [row["prior"] for row in (training, uniform, first, second)] == [
        "training",
        "uniform",
        "uniform",
        "training",
    ]
    assert uniform == pytest.approx(first) and training == pytest.approx(second)
    newest = [event for event in run.events() if isinstance(event, Evaluated)][-1]
    assert newest.even_top1 is not None and newest.even_macro_recall is not None
    assert main(["evaluate", str(run.directory), source]) == 0
    assert "class frequencies equal: --prior uniform" in capsys.readouterr().out


def test_nothing_is_compared_where_classes_are_about_equal() -> None:
    assert even_shift([30, 4, 10], "") is None and even_shift([30, 3], "") is not None
    assert even_shift([30, 3], "optim.class_weights='balanced'") is None
    assert even_shift([30, 3, 0], "")[2] == even_shift([30, 3, 0], "").min()  # type: ignore[index, union-attr]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"optim.class_weights": "balanced"}, "optim.class_weights='balanced'"),
        ({"data.balance": "classes"}, "data.balance='classes'"),
        ({"optim.loss": "focal"}, "optim.loss='focal'"),
        ({"optim.loss": "binary"}, "optim.loss='binary'"),
    ],
)
def test_a_model_that_learned_other_frequencies_is_refused(
    recipe: Recipe, uneven: Path, tmp_path: Path, change: dict[str, object], words: str
) -> None:
    changed = recipe.with_(
        {"data.train": str(uneven), "data.holdout": 0, "budget.epochs": 1, "batch_size": 8, **change}
    )
    assert weighting(changed) == words
    run = Run.create(tmp_path / "run", changed)
    train(run)
    with pytest.raises(ModelError, match="was trained with"):
        with_prior(restore(run), "uniform")
    shutil.copy(run.weights, tmp_path / "alone.safetensors")
    with pytest.raises(ModelError, match="was trained with"):
        with_prior(restore(tmp_path / "alone.safetensors"), "uniform")


def test_smoothed_labels_are_allowed_with_a_word(run: Run, recipe: Recipe, uneven: Path, tmp_path: Path) -> None:
    changes = {"data.train": str(uneven), "data.holdout": 0, "budget.epochs": 1, "batch_size": 8}
    smooth = Run.create(tmp_path / "smooth", recipe.with_({**changes, "optim.label_smoothing": 0.1}))
    train(smooth)
    lines: list[str] = []
    with_prior(restore(smooth), "uniform", say=lines.append)
    assert lines == [
        "label smoothing 0.1: the frequencies that the model learned are somewhat less uneven than its images'"
    ]


def test_a_probe_that_updates_did_not_improve_has_learned_plain_frequencies(
    recipe: Recipe, uneven: Path, tmp_path: Path
) -> None:
    changes = {"data.train": str(uneven), "data.val": str(uneven), "batch_size": 8, "optim.lr": 1e-12}
    changes |= {"model.train": "probe+full", "optim.class_weights": "balanced", "optim.label_smoothing": 0.1}
    run = Run.create(tmp_path / "run", recipe.with_({**changes, "budget.epochs": 1}))
    train(run)
    best, last = restore(run), restore(run, which="last")
    lines: list[str] = []
    assert best.is_probe and with_prior(best, "uniform", say=lines.append).prior == "uniform" and not lines
    assert evaluate(best, str(uneven), say=lambda line: None).other is not None
    with pytest.raises(ModelError, match="was trained with"):
        with_prior(last, "uniform")


def test_several_labels_have_no_frequencies(labels_recipe: Recipe, tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", labels_recipe.with_({"budget.epochs": 0.2}))
    train(run)
    with pytest.raises(ModelError, match="an image may have several"):
        with_prior(restore(run), "uniform")


def test_an_older_run_takes_them_from_its_images_and_a_file_alone_is_refused(run: Run, tmp_path: Path) -> None:
    path = run.directory / "best.safetensors"
    expected = logits_of(with_prior(restore(run), "uniform"))
    tensors, about = checkpoints.read_weights(path)
    del about["class_counts"]
    checkpoints.write_weights(path, tensors, about)
    assert logits_of(with_prior(restore(run), "uniform")) == pytest.approx(expected)
    shutil.copy(path, tmp_path / "alone.safetensors")
    with pytest.raises(DataError, match="does not say how many training images each class had"):
        with_prior(restore(tmp_path / "alone.safetensors"), "uniform")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.json", '{"cat": 30, "dog": 10}'),
        ("a.csv", "class,count\ncat,30\ndog,10\n"),
        ("a.csv", "dog,0.25\ncat,0.75\n"),
        ("a.tsv", "cat\t3\ndog\t1\n"),
    ],
)
def test_frequencies_and_counts_are_read_from_a_file(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    assert read_prior(tmp_path / name, ("cat", "dog")).tolist() == [0.75, 0.25]


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.json", '{"cat": 1}', "has no frequency of classes: dog"),
        ("a.json", '{"cat": 1, "dog": 1, "cow": 1}', "names classes that the model has not: cow"),
        ("a.json", '{"cat": 0, "dog": 1}', "says 0 of cat: a frequency or count is a number above 0"),
        ("a.json", '{"cat": "many", "dog": 1}', "says 'many' of cat"),
        ("a.json", "[1, 2]", "it is no table"),
        ("a.csv", "cat,1,2\n", "is not a class and its frequency"),
        ("a.csv", "cat,1\ncat,2\n", "the key .*cat.* comes twice"),
        ("a.csv", "cat,nan\ndog,1\n", "has no frequency of classes: cat"),
        ("none.csv", None, "No such file"),
    ],
)
def test_a_file_with_a_mistake_is_refused_by_it(name: str, text: str | None, words: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=words):
        read_prior(tmp_path / name, ("cat", "dog"))


def test_a_word_that_is_no_file_is_a_mistake_of_the_user(run: Run) -> None:
    with pytest.raises(SteadyError, match="it must be uniform, training, or a JSON or CSV file"):
        with_prior(restore(run), "flat")
