"""Images with several labels: trained on label by label, ranked by mAP, or refused in a sentence."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score
from tests.data.sources.samples import encoded

from steadytrain.config import Recipe
from steadytrain.data.packing.pack import pack
from steadytrain.data.recordio.framing import pack_header
from steadytrain.data.recordio.writer import RecordWriter
from steadytrain.errors import DataError, RecipeError
from steadytrain.events import Evaluated, Event, Noticed, Started
from steadytrain.run import Run
from steadytrain.training import build, evaluate, predict, restore, steps, train
from steadytrain.training.data import open_data
from steadytrain.training.inference.views import Views
from steadytrain.training.profile.explain import explain

LABELS = ("even", "large", "round")
REST = {"model": {"name": "digits"}, "budget": {"epochs": 1}, "batch_size": 8}


def read_table(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """True labels and probabilities, [N, L], of a run's ``predictions.csv``."""
    with path.open() as file:
        rows = list(csv.DictReader(file))
    labels = [[name in row["true"].split(";") for name in LABELS] for row in rows]
    return np.array(labels), np.array([[float(row[name]) for name in LABELS] for row in rows])


def test_a_run_learns_labels_and_its_best_weights_are_those_of_the_highest_map(
    labels_recipe: Recipe, tmp_path: Path
) -> None:
    run = Run.create(tmp_path / "run", labels_recipe)
    train(run)
    evaluations = [event for event in run.events() if isinstance(event, Evaluated)]
    best = run.progress().best
    assert best is not None and best.mean_ap == max(event.mean_ap or 0 for event in evaluations) > 0.9
    assert best.top5 is None and 0.5 < best.top1 < 1
    labels, probabilities = read_table(run.predictions)
    assert average_precision_score(labels, probabilities) == pytest.approx(best.mean_ap, abs=1e-9)
    assert ((probabilities > 0.5) == labels).all(1).mean() == best.top1
    again = evaluate(run, batch_size=17)
    assert (again.mean_ap, again.top1) == (best.mean_ap, best.top1)
    losses = -np.log(np.where(labels, probabilities, 1 - probabilities))
    assert losses.mean() == pytest.approx(best.loss, rel=1e-4)


def test_the_first_event_names_the_labels(labels_recipe: Recipe, tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", labels_recipe.with_({"budget.epochs": 0.2}))
    train(run)
    [started] = [event for event in run.events() if isinstance(event, Started)]
    assert started.data["classes"] == list(LABELS) and started.data["multi_label"] is True


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param(
            {"optim.label_smoothing": 0.1, "optim.class_weights": "balanced", "data.transforms": ("mixup", "cutmix")},
            marks=pytest.mark.slow,  # test_methods has one that is mixed and weighted
        ),
        {"optim.loss": "binary-focal", "optim.ema": 0.9, "optim.accumulate": 2},
    ],
)
def test_a_run_that_was_stopped_goes_on_to_the_same_bits(
    labels_recipe: Recipe, tmp_path: Path, weights: Callable[[Path], bytes], changes: dict[str, object]
) -> None:
    recipe = labels_recipe.with_({"budget.epochs": 1.5, **changes})
    train(Run.create(tmp_path / "whole", recipe))
    parts = Run.create(tmp_path / "parts", recipe)
    taken: list[Event] = []
    for event in steps(parts, stop=lambda: "SIGTERM" if len(taken) > 20 else None):
        taken.append(event)
    train(parts)
    assert parts.progress().attempt == 2
    assert weights(tmp_path / "parts") == weights(tmp_path / "whole")
    ours, theirs = (Run.open(tmp_path / name).progress().evaluated for name in ("parts", "whole"))
    assert ours is not None and theirs is not None and ours.mean_ap == theirs.mean_ap


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data.balance": "classes"}, "leave --balance out; --class-weights balanced weighs rare labels"),
        (
            {"model.train": "probe+head"},
            "fits one class for each image, and these may have several labels: use --train",
        ),
        ({"optim.loss": "cross-entropy"}, "these images may have several labels: use --loss binary"),
        ({"optim.loss": "focal"}, "these images may have several labels: use --loss binary"),
    ],
)
def test_what_needs_one_class_is_refused(
    labels_recipe: Recipe, tmp_path: Path, changes: dict[str, object], words: str
) -> None:
    recipe = labels_recipe.with_(changes)
    with pytest.raises(RecipeError, match=words):
        train(Run.create(tmp_path / "run", recipe))
    with pytest.raises(RecipeError, match=words):
        explain(recipe)


def test_balanced_weights_are_of_the_labels_that_are_trained_on(labels_recipe: Recipe) -> None:
    recipe = labels_recipe.with_({"optim.class_weights": "balanced"})
    data = open_data(recipe.data, seed=recipe.seed)
    loss = build.loss(recipe, data, torch.device("cpu"))
    counts, n = data.class_counts, data.num_train
    data.close()
    assert n == 320 and counts.shape == (3,)
    for k in range(3):
        target = torch.eye(3)[k][None]
        expected = np.log(2) * (2 + (n - counts[k]) / counts[k]) / 3
        assert float(loss(torch.zeros(1, 3), target)) == pytest.approx(expected, rel=1e-6)


def test_a_mixed_image_has_shares_of_the_labels_of_both(labels_recipe: Recipe) -> None:
    recipe = labels_recipe.with_({"data.transforms": ("mixup:1",)})
    data = open_data(recipe.data, seed=recipe.seed)
    data.close()
    assert data.num_labels == 3
    _, input = build.model(recipe, data, allow_import=False)
    augmentation = build.augmentation(recipe, input, 3, 4, torch.device("cpu"))
    assert augmentation is not None
    labels = torch.tensor([[1.0, 0, 0], [0, 1, 0], [0, 0, 0], [1, 1, 1]])
    _, mixed = augmentation(torch.zeros(4, 8, 8, 1, dtype=torch.uint8), labels, np.arange(4))
    for row, other in ((0, 2), (1, 3), (2, 0), (3, 1)):  # half a batch away
        differs = labels[row] != labels[other]
        share = (mixed[row] - labels[other])[differs] / (labels[row] - labels[other])[differs]
        assert 0 < float(share[0]) < 1 and torch.allclose(share, share[0])
        assert torch.equal(mixed[row][~differs], labels[row][~differs])


def test_a_validation_table_gets_the_labels_of_the_training_data(
    labels_recipe: Recipe, labelled_digits: Path, digits_folder: Path, tmp_path: Path
) -> None:
    table = digits_folder / "val.csv"
    images = [str(path.relative_to(digits_folder)) for path in sorted(digits_folder.glob("*/*.png"))[:6]]
    table.write_text("path,labels\n" + "".join(f"{image},{'round' * (n > 2)}\n" for n, image in enumerate(images)))
    data = open_data(labels_recipe.with_({"data.val": str(table)}).data, seed=0)
    data.close()
    assert data.val is not None and data.classes == LABELS
    assert data.val.labels.tolist() == [[0, 0, 0]] * 3 + [[0, 0, 1]] * 3
    table.write_text("path,labels\n" + "".join(f"{image},rund\n" for image in images))
    with pytest.raises(DataError, match=r"the class list lacks: rund\. Did you mean round\?"):
        open_data(labels_recipe.with_({"data.val": str(table)}).data, seed=0)
    with pytest.raises(
        DataError, match=r"holds classes that the class list lacks: 0, 1, .*the list: even, large, round"
    ):
        open_data(labels_recipe.with_({"data.val": str(digits_folder)}).data, seed=0)


def test_columns_of_a_validation_table_may_stand_in_another_order(tmp_path: Path, digits_folder: Path) -> None:
    images = sorted(digits_folder.glob("*/*.png"))[:40]
    rows = [(str(path), n % 2, n % 3 == 0) for n, path in enumerate(images)]
    (tmp_path / "train.csv").write_text("path,wet,warm\n" + "".join(f"{p},{a},{int(b)}\n" for p, a, b in rows))
    (tmp_path / "val.csv").write_text("path,warm,wet\n" + "".join(f"{p},{int(b)},{a}\n" for p, a, b in rows[:9]))
    pack(tmp_path / "train.csv", tmp_path / "train")
    recipe = Recipe.from_dict({"data": {"train": str(tmp_path / "train.rec"), "val": str(tmp_path / "val.csv")}} | REST)
    data = open_data(recipe.data, seed=0)
    data.close()
    assert data.classes == ("wet", "warm") and data.val is not None
    assert data.val.labels.tolist() == [[a, int(b)] for _, a, b in rows[:9]]


def test_records_without_a_card_have_labels_by_number(tmp_path: Path) -> None:
    def write(name: str, vectors: list[list[float]]) -> Path:
        with RecordWriter(tmp_path / f"{name}.rec") as writer:
            for n, vector in enumerate(vectors):
                writer.write(pack_header(vector, id=n) + encoded(n), key=n)
        return tmp_path / f"{name}.rec"

    path = write("a", [[n % 2, n % 3 == 0, 1] for n in range(40)])
    recipe = Recipe.from_dict({"data": {"train": str(path)}, "parallel": {"device": "cpu"}, **REST})
    evaluated = train(Run.create(tmp_path / "run", recipe)).evaluated
    assert evaluated is not None and evaluated.mean_ap is not None
    assert restore(tmp_path / "run").classes == ("0", "1", "2")
    assert evaluate(tmp_path / "run", path).n == 40
    with pytest.raises(DataError, match=r"values than 0 and 1 \(2 in image 1\)"):
        open_data(recipe.with_({"data.train": str(write("b", [[0, 1], [2, 0], [1, 1]]))}).data, seed=0)


def test_one_label_for_each_image_is_said(tmp_path: Path, digits_folder: Path) -> None:
    images = sorted(digits_folder.glob("*/*.png"))[:40]
    table = tmp_path / "a.csv"
    table.write_text("path,wet,dry\n" + "".join(f"{path},{n % 2},{1 - n % 2}\n" for n, path in enumerate(images)))
    recipe = Recipe.from_dict({"data": {"train": str(table)}, "parallel": {"device": "cpu"}, **REST})
    run = Run.create(tmp_path / "run", recipe)
    train(run)
    messages = [event.message for event in run.events() if isinstance(event, Noticed)]
    assert any(
        "exactly one of the 2 labels" in line and "one column 'label' makes them classes" in line for line in messages
    )


def test_labels_that_no_validation_image_has_are_said(labels_recipe: Recipe, digits_folder: Path) -> None:
    table = digits_folder / "few.csv"
    images = [str(path.relative_to(digits_folder)) for path in sorted(digits_folder.glob("*/*.png"))[:6]]
    table.write_text("path,labels\n" + "".join(f"{image},even\n" for image in images))
    messages: list[str] = []
    open_data(labels_recipe.with_({"data.val": str(table)}).data, seed=0, say=messages.append).close()
    assert "2 labels have no validation image, and no part in mAP: large, round" in messages


def test_labels_above_the_threshold_are_predicted(labels_recipe: Recipe, digits_folder: Path, tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", labels_recipe)
    train(run)
    images = [sorted((digits_folder / digit).glob("*.png"))[0] for digit in ("0", "1", "8")]
    zero, one, eight = predict(run, images)
    assert set(zero.classes) == {"even", "round"} and set(eight.classes) == {"even", "large", "round"}
    assert one.classes == () and one.error is None
    [all_labels] = predict(run, images[1], threshold=0)
    assert set(all_labels.classes) == set(LABELS)
    assert list(all_labels.probabilities) == sorted(all_labels.probabilities, reverse=True)
    assert max(all_labels.probabilities) < 0.5
    [first] = predict(run, images[2], top=1)
    assert first.classes == eight.classes[:1]


def test_other_data_are_evaluated_by_their_labels_names(
    labels_recipe: Recipe, labelled_digits: Path, digits_folder: Path, digits: Path, tmp_path: Path
) -> None:
    run = Run.create(tmp_path / "run", labels_recipe)
    train(run)
    whole = evaluate(run, labelled_digits)
    rows = [line.split(",") for line in labelled_digits.read_text().splitlines()[1:]]
    order = ("round", "even", "large")
    table = digits_folder / "columns.csv"
    lines = [",".join((path, *(str(int(name in has.split(";"))) for name in order))) for path, has in rows]
    table.write_text("\n".join([",".join(("path", *order)), *lines]))
    pack(table, tmp_path / "columns")
    for data in (table, tmp_path / "columns.rec"):
        document = evaluate(run, data)
        assert (document.n, document.mean_ap, document.total, document.loss) == (
            400,
            whole.mean_ap,
            whole.total,
            whole.loss,
        )
    table.write_text(table.read_text().replace("path,round", "path,oval"))
    with pytest.raises(DataError, match=r"other labels than the class list \(oval, round"):
        evaluate(run, table)
    with pytest.raises(DataError, match="has one class for each image, and digits names several labels of"):
        evaluate(run, digits)
    single = Run.create(tmp_path / "single", labels_recipe.with_({"data.train": str(digits), "budget.epochs": 0.2}))
    train(single)
    with pytest.raises(DataError, match="several labels for each image, and digits names one class for each"):
        evaluate(single, labelled_digits)


def test_views_average_the_probability_of_each_label() -> None:
    images = torch.randn(5, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    last = torch.nn.Linear(16, 3)
    net = torch.nn.Sequential(torch.nn.Flatten(), last)
    expected = (net(images).sigmoid() + net(images.flip(3)).sigmoid()) / 2
    views = Views(net, "flip", 4, is_multi_label=True)
    torch.testing.assert_close(views(images).sigmoid(), expected)
    torch.nn.init.zeros_(last.weight)
    torch.nn.init.constant_(last.bias, 90.0)  # a probability of 1 in float32
    torch.testing.assert_close(views(images), torch.full((5, 3), 90.0))
