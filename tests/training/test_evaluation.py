"""Evaluation counts every image once; what was trained can be used again, wherever it went."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from sklearn.metrics import accuracy_score, average_precision_score, balanced_accuracy_score, f1_score

import steadytrain as st
from steadytrain.cli import main
from steadytrain.config import Model, Precision, Recipe
from steadytrain.data.loader import Batch
from steadytrain.data.packing.pack import pack
from steadytrain.data.recordio.reader import Records
from steadytrain.data.results.predictions import read_predictions
from steadytrain.data.results.scores import average_precisions
from steadytrain.errors import DataError, FeedError, ModelError, RecipeError, RunError, SteadyError
from steadytrain.events import Evaluated, Step
from steadytrain.models import Input
from steadytrain.run import Run
from steadytrain.training import checkpoints, evaluate, predict, restore, steps, train
from steadytrain.training.evaluation import Evaluation, _Rows, evaluate_module
from steadytrain.training.inference.inference import Files
from steadytrain.training.precision import Policy


class Given(torch.nn.Module):
    """Gives prepared logits, in order, whatever the images."""

    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__()
        self.logits, self.at = logits, 0

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.at += len(images)
        return self.logits[self.at - len(images) : self.at]


def _batches(labels: np.ndarray, size: int) -> list[Batch]:
    at = range(0, len(labels), size)
    parts = [np.arange(k, min(k + size, len(labels))) for k in at]
    return [Batch(np.zeros((len(p), 2, 2, 3), np.uint8), labels[p], p, p) for p in parts]


@pytest.mark.parametrize("size", [1, 7, 64])
def test_counts_are_exact_whatever_the_batch_size(size: int) -> None:
    draw = np.random.default_rng(3)
    logits, labels = draw.normal(size=(50, 8)), draw.integers(0, 8, 50)
    module = Given(torch.tensor(logits, dtype=torch.float32)).train()
    on_cpu = Policy(Precision(), torch.device("cpu"))
    evaluation = evaluate_module(module, _batches(labels, size), on_cpu, Input(mean=(0.0,) * 3, std=(1.0,) * 3), 8)
    ranks = (logits > np.take_along_axis(logits, labels[:, None], 1)).sum(1)
    assert (evaluation.n, evaluation.top1, evaluation.top5) == (50, (ranks == 0).mean(), (ranks < 5).mean())
    losses = np.log(np.exp(logits).sum(1)) - np.take_along_axis(logits, labels[:, None], 1)[:, 0]
    assert evaluation.loss == pytest.approx(losses.mean(), rel=1e-6)
    assert evaluation.total == tuple(np.bincount(labels, minlength=8))
    assert evaluation.right == tuple(np.bincount(labels[ranks == 0], minlength=8))
    assert module.training


class Narrow(Given):
    """Has memory for so many images at a time."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if len(images) > 5:
            raise RuntimeError("CUDA error: out of memory")
        return super().forward(images)


def test_memory_that_runs_out_is_said_once_and_changes_nothing() -> None:
    draw, notes = np.random.default_rng(3), list[str]()
    logits, labels = torch.tensor(draw.normal(size=(50, 8)), dtype=torch.float32), draw.integers(0, 8, 50)
    on_cpu, input = Policy(Precision(), torch.device("cpu")), Input(mean=(0.0,) * 3, std=(1.0,) * 3)
    whole = evaluate_module(Given(logits), _batches(labels, 10), on_cpu, input, 8)
    assert evaluate_module(Narrow(logits), _batches(labels, 10), on_cpu, input, 8, say=notes.append) == whole
    assert notes == [
        "memory ran out in an evaluation (CUDA error: out of memory): 5 instead of 10 images at a time from here on"
    ]


def test_the_output_for_each_image_adds_up_to_what_is_counted() -> None:
    draw = np.random.default_rng(4)
    logits, labels = draw.normal(size=(50, 8)).astype(np.float32), draw.integers(0, 8, 50)
    logits[:5] = 1.0  # all equal: one of them is predicted
    on_cpu, input = Policy(Precision(), torch.device("cpu")), Input(mean=(0.0,) * 3, std=(1.0,) * 3)
    evaluation = evaluate_module(Given(torch.from_numpy(logits)), _batches(labels, 7), on_cpu, input, 8, num_outputs=50)
    assert evaluation.outputs is not None and evaluation.outputs.shape == (50, 4)
    predicted, p_predicted, loss, rank = evaluation.outputs.T
    softmax = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    assert (predicted == labels).mean() == (rank == 1).mean() == evaluation.top1
    average, present = evaluation.macro, np.unique(labels)
    assert average.recall == pytest.approx(balanced_accuracy_score(labels, predicted), abs=1e-12)
    assert average.f1 == pytest.approx(f1_score(labels, predicted, labels=present, average="macro"), abs=1e-12)
    assert p_predicted == pytest.approx(softmax.max(1), rel=1e-5)
    assert np.exp(-loss) == pytest.approx(softmax[np.arange(50), labels], rel=1e-5)
    assert loss.mean(dtype=np.float64) == pytest.approx(evaluation.loss, rel=1e-6)
    assert (rank[5:] == 1 + (softmax > np.exp(-loss)[:, None] * (1 + 1e-6)).sum(1)[5:]).all()


def _labelled(logits: np.ndarray, labels: np.ndarray, size: int) -> Evaluation:
    on_cpu, input = Policy(Precision(), torch.device("cpu")), Input(mean=(0.0,) * 3, std=(1.0,) * 3)
    module, (n, num_labels) = Given(torch.from_numpy(logits)), labels.shape
    batches = _batches(labels.astype(np.float32), size)
    return evaluate_module(module, batches, on_cpu, input, num_labels, num_outputs=n, is_multi_label=True)


@pytest.mark.parametrize("size", [1, 7, 64])
def test_labels_are_counted_and_ranked_as_by_scikit_learn_whatever_the_batch_size(size: int) -> None:
    draw = np.random.default_rng(5)
    logits, labels = (
        draw.normal(size=(50, 6)).astype(np.float32).round(1),
        draw.random((50, 6)) < 0.3,
    )  # with equal ones
    labels[:, 4] = False  # no image has it
    document = _labelled(logits, labels, size)
    present = [0, 1, 2, 3, 5]
    expected = [average_precision_score(labels[:, k], logits[:, k]) for k in present]
    aps = average_precisions(logits, labels)
    assert aps[4] is None and [aps[k] for k in present] == pytest.approx(expected, abs=1e-12)
    assert document.mean_ap == pytest.approx(np.mean(expected), abs=1e-12) and document.score == document.mean_ap
    assert (document.n, document.top5) == (50, None)
    assert document.top1 == accuracy_score(labels, logits > 0)
    assert document.total == tuple(labels.sum(0)) and document.right == tuple((labels & (logits > 0)).sum(0))
    f1 = f1_score(labels[:, present], logits[:, present] > 0, average="macro", zero_division=0)
    assert document.macro.f1 == pytest.approx(f1, abs=1e-12)
    p = 1 / (1 + np.exp(-logits.astype(np.float64)))
    assert document.loss == pytest.approx(-np.log(np.where(labels, p, 1 - p)).mean(), rel=1e-6)


@pytest.mark.parametrize("most_bytes", [2**26, 4 * 41 * 2])
def test_ranks_have_the_average_precision_of_one_process(most_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = np.random.default_rng(6)
    logits, labels = draw.normal(size=(41, 5)).astype(np.float32), (draw.random((41, 5)) < 0.4).astype(np.float32)
    whole = _labelled(logits, labels, 8)
    monkeypatch.setattr(_Rows, "MOST_BYTES", most_bytes)
    assert (few := _labelled(logits, labels, 8)).mean_ap == whole.mean_ap and few.logits is not None
    assert np.array_equal(few.logits, logits)
    on_cpu, input = Policy(Precision(), torch.device("cpu")), Input(mean=(0.0,) * 3, std=(1.0,) * 3)
    parts: list[list[torch.Tensor]] = []
    for rank in (0, 1):  # what each of two ranks would add up
        rows = np.arange(rank, 41, 2)
        batch = Batch(np.zeros((len(rows), 2, 2, 3), np.uint8), labels[rows], rows, rows)
        summed: list[torch.Tensor] = []

        def keep(count: torch.Tensor, summed: list[torch.Tensor] = summed) -> torch.Tensor:
            summed.append(count.clone())
            return count

        module = Given(torch.from_numpy(logits[rows]))
        evaluate_module(module, [batch], on_cpu, input, 5, num_outputs=41, is_multi_label=True, sum_ranks=keep)
        parts.append(summed[4:])  # behind the counts
    assert max(part.nbytes for part in parts[0]) <= most_bytes
    table = torch.cat([sum(columns) for columns in zip(*parts, strict=True)], 1).numpy()
    assert np.array_equal(table[:, :5], logits) and np.array_equal(table[:, 5:], labels)
    aps = [ap for ap in average_precisions(table[:, :5], table[:, 5:]) if ap is not None]
    assert sum(aps) / len(aps) == whole.mean_ap


def test_an_average_precision_of_outputs_that_are_no_numbers_is_none() -> None:
    logits, labels = np.zeros((4, 2), np.float32), np.ones((4, 2))
    logits[1, 0] = np.nan
    document = _labelled(logits, labels, 4)
    assert np.isnan(document.score) and np.isnan(document.loss)


def test_a_finished_run_tells_of_each_validation_image(recipe: Recipe, tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", recipe)
    train(run)
    best, rows = run.progress().best, list(read_predictions(run.predictions))
    assert best is not None and len(rows) == best.n == 80
    assert {row.shard for row in rows} == {"digits.rec"} and len({row.record for row in rows}) == 80
    assert sum(row.rank == 1 for row in rows) == sum(row.true == row.predicted for row in rows) == best.top1 * 80
    assert np.mean([row.loss for row in rows]) == pytest.approx(best.loss, rel=1e-5)
    assert all(row.p_true <= row.p_predicted + 1e-6 for row in rows)
    with Records.open(recipe.data.train) as records:
        assert [records.classes[records.labels[row.record]] for row in rows] == [row.true for row in rows]
    again = tmp_path / "again.csv"
    evaluate(run, batch_size=17, per_image=again)
    assert [row[:5] for row in read_predictions(again)] == [row[:5] for row in rows]


def test_a_run_that_is_stopped_tells_of_the_images_at_its_best(recipe: Recipe, tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", recipe)
    for event in steps(run, stop=lambda: "SIGTERM" if run.progress().evaluated else None):
        assert event
    best = run.progress().best
    assert best is not None
    assert sum(row.rank == 1 for row in read_predictions(run.predictions)) == best.top1 * best.n


def test_a_finished_run_evaluates_as_it_said(recipe: Recipe, tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", recipe)
    evaluated = train(run).evaluated
    document = evaluate(run.directory, batch_size=17)
    assert evaluated is not None
    assert (document.n, document.top1, document.top5) == (evaluated.n, evaluated.top1, evaluated.top5)
    assert document.loss == pytest.approx(evaluated.loss, rel=1e-5)


def test_the_best_and_the_last_weights_can_be_asked_for(recipe: Recipe, tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", recipe)
    train(run)
    best = [e for e in run.events() if isinstance(e, Evaluated) and e.is_best][-1]
    last = [e for e in run.events() if isinstance(e, Evaluated)][-1]
    assert evaluate(run.directory).top1 == evaluate(run.directory, which="best").top1 == best.top1
    assert evaluate(run.directory, which="last").top1 == last.top1
    assert restore(run.directory).path.name == "best.safetensors"
    assert restore(run.directory).chosen == f"best by validation top-1 and loss, epoch {best.epoch:g}"
    assert restore(run.directory, which="last").chosen == "last"


def test_a_weights_file_alone_is_enough(recipe: Recipe, digits: Path, tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", recipe)
    train(run)
    alone = shutil.copy(run.weights, tmp_path / "alone.safetensors")
    trained = restore(alone)
    assert trained.classes == tuple(str(k) for k in range(10))
    assert evaluate(trained, digits).n == 400


@pytest.mark.slow
def test_the_model_of_weights_from_elsewhere_is_found_by_their_tensors(
    recipe: Recipe, digits: Path, tmp_path: Path
) -> None:
    run = Run.create(tmp_path / "run", recipe)
    train(run)
    tensors, _ = checkpoints.read_weights(run.weights)
    torch.save(tensors, tmp_path / "bare.pth")
    lines: list[str] = []
    found = restore(tmp_path / "bare.pth", say=lines.append)
    assert found.name == "digits" and "has the tensors of digits" in found.notes[0]
    assert len(lines) == 1 and "looking for a network with such tensors" in lines[0]
    assert len(restore(tmp_path / "bare.pth", model="digits").classes) == 10


def test_a_run_without_weights_says_when_there_will_be_some(recipe: Recipe, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="written at its first evaluation and at its end"):
        restore(Run.create(tmp_path / "run", recipe).directory)


def test_a_run_begun_with_a_relative_path_is_evaluated_and_resumed_from_any_folder(
    recipe: Recipe, digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in digits.parent.glob(f"{digits.stem}.*"):
        shutil.copy(path, tmp_path / path.name)
    monkeypatch.chdir(tmp_path)
    run = Run.create("runs/a", recipe.with_({"budget.epochs": 1, "data.train": digits.name}))
    train(run)
    document = evaluate("runs/a")
    monkeypatch.chdir("/")
    assert evaluate(tmp_path / "runs/a").loss == document.loss
    for event in steps(Run.create(tmp_path / "runs/b", run.recipe)):
        if isinstance(event, Step) and event.step == 2:
            break
    assert main(["resume", str(tmp_path / "runs/b")]) == 0
    assert evaluate(tmp_path / "runs/b").loss == document.loss


def test_labels_that_the_model_lacks_are_refused(recipe: Recipe, data_folder: Path, tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", recipe.with_({"budget.epochs": 1}))
    train(run)
    for suffix in (".rec", ".idx"):
        shutil.copy(data_folder / f"mxnet-rec/im2rec/odd{suffix}", tmp_path)
    with pytest.raises(DataError, match=r"odd\.rec"):
        evaluate(run.directory, tmp_path / "odd.rec")


def test_validation_labels_that_the_training_data_lack_are_refused(
    recipe: Recipe, write_digits: Callable[[Path, int, int], Path], tmp_path: Path
) -> None:
    for name, classes in (("three", 3), ("ten", 10)):
        pack(write_digits(tmp_path / name, 60, classes), tmp_path / name)
        (tmp_path / f"{name}.json").unlink()
    data = {"data.train": str(tmp_path / "three.rec"), "data.val": str(tmp_path / "ten.rec")}
    with pytest.raises(
        DataError, match=r"three\.rec and .*ten\.rec have different class lists \(only in validation: 3, 4"
    ):
        train(Run.create(tmp_path / "run", recipe.with_(data)))


def test_one_image_a_class_cannot_be_held_out(
    recipe: Recipe, write_digits: Callable[[Path, int, int], Path], tmp_path: Path
) -> None:
    folder = write_digits(tmp_path / "few", 3, 10)
    with pytest.raises(DataError, match=r"one image of each class.*--val"):
        train(Run.create(tmp_path / "run", recipe.with_({"data.train": str(folder)})))


def test_files_written_by_mxnet_are_trained_on_as_they_are(recipe: Recipe, data_folder: Path, tmp_path: Path) -> None:
    data = data_folder / "mxnet-rec/im2rec/cifar120.rec"
    changed = recipe.with_({"data.train": str(data), "model.name": "resnet20", "budget.epochs": 1})
    run = Run.create(tmp_path / "run", changed)
    assert train(run).evaluated is not None
    assert restore(run.directory).input.size == 32


def test_predictions_come_in_order_with_probabilities(recipe: Recipe, digits_folder: Path, tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", recipe.with_({"budget.epochs": 12}))
    train(run)
    files = sorted(digits_folder.glob("*/*.png"))[::10]
    predictions = list(predict(restore(run.directory), files, top=3))
    assert [prediction.path for prediction in predictions] == files
    assert all(len(prediction.classes) == 3 and sum(prediction.probabilities) <= 1 + 1e-6 for prediction in predictions)
    right = [prediction.classes[0] == prediction.path.parent.name for prediction in predictions]
    assert sum(right) > 0.9 * len(right)


def test_a_folder_stands_for_its_images(recipe: Recipe, digits_folder: Path, tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", recipe)
    train(run)
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "notes.txt").write_text("no image")
    files = sorted((digits_folder / "3").glob("*.png"))
    predictions = list(predict(run, [files[1], digits_folder / "3"], top=1))
    assert [prediction.path for prediction in predictions] == [files[1], *files] and not any(
        prediction.error for prediction in predictions
    )
    with pytest.raises(DataError, match="none is a folder without images"):
        list(predict(run, tmp_path / "none"))


def test_predicting_sees_what_evaluating_sees(recipe: Recipe, digits_folder: Path, tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", recipe)
    train(run)
    trained = restore(run.directory)
    files = sorted(digits_folder.glob("*/*.png"))
    top1 = sum(prediction.classes[0] == prediction.path.parent.name for prediction in predict(trained, files)) / len(
        files
    )
    assert top1 == evaluate(trained, digits_folder).top1


def test_a_model_of_ones_own_is_imported_only_when_it_is_named(
    recipe: Recipe, tmp_path: Path, write_module: Callable[[str, str], Path]
) -> None:
    net = "torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, num_classes))"
    write_module("own_model", f"import torch\ndef make(num_classes, **told):\n    return {net}\n")
    named = recipe.with_({"data.size": 8}).with_({"model.name": "own_model:make"})
    read = Run.create(tmp_path / "run", Recipe.from_json(named.to_json()).with_(batch_size=16))
    for place in (read, read.directory, Run.open(read.directory)):
        with pytest.raises(ModelError, match=r"--model own_model:make .*allow_import=True"):
            train(place)
    train(read, allow_import=True)
    with pytest.raises(ModelError, match="model='own_model:make'"):
        restore(read)
    assert restore(read, model="own_model:make").name == "own_model:make"
    run = Run.create(tmp_path / "named", named.with_({"optim.lr": 0.01}))
    assert train(run).status == "finished"
    assert restore(run).name == "own_model:make"


def test_a_recipe_from_a_file_stays_one_whatever_else_is_changed(recipe: Recipe) -> None:
    read = Recipe.from_dict(recipe.with_({"model": Model("some:factory")}).to_dict())
    assert all("name" in of.model.from_file for of in (read, read.with_(seed=2), replace(read, seed=2)))
    assert "name" in recipe.with_({"model": {"name": "some:factory"}}).model.from_file
    assert "name" not in read.with_({"model.name": "some:factory"}).model.from_file
    assert not read.with_({"model": Model("some:factory")}).model.from_file
    assert "name" in replace(read.model, train="head").from_file & read.with_({"model": read.model}).model.from_file
    assert read.model == Model("some:factory") and "from_file" not in read.to_json()
    with pytest.raises(RecipeError, match=r"unknown key 'model\.from_file'"):
        read.with_({"model.from_file": False})


def test_every_public_function_takes_a_run_a_path_or_a_string(
    recipe: Recipe, digits_folder: Path, tmp_path: Path
) -> None:
    run, image = Run.create(tmp_path / "run", recipe), min(digits_folder.glob("*/*.png"))
    assert st.train(str(run.directory)).status == st.train(run.directory).status == st.train(run).status == "finished"
    rows = []
    for place in (run, run.directory, str(run.directory)):
        assert list(st.steps(place)) == []
        page = st.report(place, tmp_path / "report.md", force=True).read_text()
        trained = st.restore(place)
        predicted = [[*st.predict(from_, files)] for from_ in (place, trained) for files in (image, [str(image)])]
        assert predicted == 4 * predicted[:1]
        rows.append((st.evaluate(place), predicted, str(st.diagnose(place)), st.ledger(place).steps, page))
    assert rows == 3 * rows[:1]
    data, paths = recipe.data, [Path(recipe.data.train), digits_folder]
    assert replace(data, train=paths[0], val=paths[1]) == replace(data, val=str(digits_folder))


def test_a_programming_error_is_no_bad_image(
    recipe: Recipe, digits_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, image = Run.create(tmp_path / "run", recipe), min(digits_folder.glob("*/*.png"))
    train(run)
    [missing, good] = predict(run, ["gone.png", image])
    assert missing.error == "cannot read gone.png: No such file or directory" and good.error is None

    def misspelt(files: Files, i: int) -> bytes:
        return files.path(i).raed_bytes()  # type: ignore[attr-defined, no-any-return]

    monkeypatch.setattr(Files, "image", misspelt)
    with pytest.raises(FeedError, match="raed_bytes"):
        list(predict(run, [image]))


@pytest.mark.parametrize("about", ["null", '{"model": [1]}', '{"model": {"name": "digits", "options": {}}}'])
def test_a_damaged_header_of_weights_is_one_clear_line(tmp_path: Path, about: str) -> None:
    path = tmp_path / "odd.safetensors"
    save_file({"weight": torch.zeros(1)}, path, metadata={"format": "pt", "steadytrain": about})
    with pytest.raises(SteadyError, match=r"odd\.safetensors"):
        restore(path)
