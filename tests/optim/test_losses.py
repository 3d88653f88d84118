"""Losses: equal to those of torch, torchvision and scikit-learn; the default is torch's cross-entropy to the bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from steadytrain.config import Budget, Data, Model, Optim, Recipe
from steadytrain.errors import RecipeError
from steadytrain.events import Noticed
from steadytrain.optim import balanced_weights, make_loss
from steadytrain.run import Run
from steadytrain.training import train
from steadytrain.training.remarks import rare_class_remark

LOGITS = torch.randn(64, 5, generator=torch.Generator().manual_seed(0)) * 4
CLASSES = torch.arange(64) % 5
SHARES = torch.softmax(LOGITS.roll(1, 0), 1)
VECTORS = (LOGITS.roll(2, 0) > 0).float()


def signed_hinge(x: Tensor, t: Tensor) -> Tensor:
    return functional.relu(1 - x * (2 * t - 1)).mean()


def torchvision_focal(x: Tensor, t: Tensor) -> Tensor:
    from torchvision.ops import sigmoid_focal_loss

    value: Tensor = sigmoid_focal_loss(x, t, alpha=-1, gamma=2, reduction="mean")
    return value


ORACLES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross-entropy": functional.cross_entropy,
    "focal:0": functional.cross_entropy,
    "focal:2": lambda x, t: -(t * (1 - x.softmax(1)) ** 2 * x.log_softmax(1)).sum(1).mean(),
    "binary": functional.binary_cross_entropy_with_logits,
    "binary-focal:2": torchvision_focal,
    "hinge": signed_hinge,
    "l1": functional.l1_loss,
    "l2": functional.mse_loss,
}


@pytest.mark.parametrize("name", ORACLES)
def test_each_loss_is_that_of_torch_or_torchvision(name: str) -> None:
    loss, one_hot = make_loss(Optim(loss=name)), functional.one_hot(CLASSES, 5).float()
    torch.testing.assert_close(loss(LOGITS, CLASSES), ORACLES[name](LOGITS, one_hot))
    if name not in ("hinge", "binary-focal:2"):  # a share weighs the loss of each answer, not the answer itself
        torch.testing.assert_close(loss(LOGITS, SHARES), ORACLES[name](LOGITS, SHARES))


@pytest.mark.parametrize("name", ["binary", "binary-focal:2", "hinge", "l1", "l2"])
def test_label_vectors_are_judged_label_by_label(name: str) -> None:
    loss = make_loss(Optim(loss=name), is_multi_label=True)
    torch.testing.assert_close(loss(LOGITS, VECTORS), ORACLES[name](LOGITS, VECTORS))


@pytest.mark.parametrize("name", ORACLES)
def test_gradients_are_finite_where_a_prediction_is_certain(name: str) -> None:
    logits = (LOGITS * 1000).requires_grad_()
    make_loss(Optim(loss=name.replace("focal:2", "focal:0.5")))(logits, CLASSES).backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None and logits.grad.isfinite().all()


@pytest.mark.parametrize("targets", [CLASSES, SHARES])
def test_the_default_is_the_cross_entropy_of_torch_to_the_last_bit(targets: Tensor) -> None:
    mine = make_loss(Optim(label_smoothing=0.1))(LOGITS, targets)
    assert torch.equal(mine, functional.cross_entropy(LOGITS, targets, label_smoothing=0.1))


def test_balanced_weights_are_those_of_scikit_learn_and_of_pos_weight() -> None:
    from sklearn.utils.class_weight import compute_class_weight

    labels = np.repeat([0, 1, 2], [50, 8, 6])
    counts = torch.from_numpy(np.bincount(labels, minlength=3))
    weights = balanced_weights(counts, 64)
    expected = compute_class_weight("balanced", classes=np.arange(3), y=labels)
    np.testing.assert_allclose(weights, expected, rtol=1e-6)
    logits, targets = LOGITS[:, :3], torch.from_numpy(labels)
    loss = make_loss(Optim(class_weights="balanced"), weights=weights)(logits, targets)
    torch.testing.assert_close(loss, functional.cross_entropy(logits, targets, weights, reduction="sum") / 64)
    positive = balanced_weights(VECTORS.sum(0), 64, is_multi_label=True)
    loss = make_loss(Optim(), weights=positive, is_multi_label=True)(LOGITS, VECTORS)
    expected_loss = functional.binary_cross_entropy_with_logits(LOGITS, VECTORS, pos_weight=positive)
    torch.testing.assert_close(loss, expected_loss)


def test_weights_do_not_depend_on_how_a_batch_is_split() -> None:
    loss = make_loss(Optim(), weights=torch.tensor([4.0, 1, 1, 1, 0.1]))
    halves = (loss(LOGITS[:32], CLASSES[:32]) + loss(LOGITS[32:], CLASSES[32:])) / 2
    torch.testing.assert_close(loss(LOGITS, CLASSES), halves)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"loss": "focl"}, "Did you mean focal"),
        ({"loss": "focal:-1"}, "gamma must be 0 or more"),
        ({"loss": "hinge:0"}, "margin must be above 0"),
        ({"loss": "l2:3"}, "takes no number"),
        ({"loss": "a.b:c", "label_smoothing": 0.1}, "does its own weighting and smoothing"),
    ],
)
def test_a_wrong_loss_is_refused_with_the_remedy(values: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        Optim(**values)


def test_cross_entropy_is_refused_for_several_labels() -> None:
    with pytest.raises(RecipeError, match="--loss binary"):
        make_loss(Optim(loss="cross-entropy"), is_multi_label=True)


@pytest.mark.parametrize("change", [{"loss": "binary"}, {"loss": "focal"}, {"class_weights": "balanced"}])
def test_a_run_learns_by_another_loss_and_says_so(recipe: Recipe, change: dict[str, Any], tmp_path: Path) -> None:
    from steadytrain.cli.explain import head_lines

    lr = 1.0 if change.get("loss") == "binary" else 0.05
    chosen = replace(recipe, optim=replace(recipe.optim, lr=lr, **change))
    outcome = train(Run.create(tmp_path / "run", chosen))
    assert outcome.evaluated is not None and outcome.evaluated.top1 is not None and outcome.evaluated.top1 > 0.3
    started = outcome.run.progress().started
    assert started is not None
    head = "\n".join(head_lines(chosen, started))
    assert ("classes weighted" if "class_weights" in change else f"loss {change['loss']}") in head


def test_an_own_loss_is_imported_only_if_the_user_named_it(
    recipe: Recipe, tmp_path: Path, write_module: Callable[[str, str], Path]
) -> None:
    write_module("own_loss", "import torch\ndef make():\n    return torch.nn.functional.cross_entropy\n")
    write_module("bad_loss", "def make():\n    return lambda logits, targets: logits.sum(1)\n")
    usual = train(Run.create(tmp_path / "usual", recipe))
    named = recipe.with_({"optim.loss": "own_loss:make"})
    mine = train(Run.create(tmp_path / "mine", named))
    assert usual.evaluated is not None and mine.evaluated is not None and usual.evaluated.loss == mine.evaluated.loss
    from_file = Recipe.from_json(named.to_json())
    with pytest.raises(RecipeError, match=r"--loss own_loss:make .*allow_import=True"):
        train(Run.create(tmp_path / "file", from_file))
    assert train(Run.create(tmp_path / "file", from_file), allow_import=True).status == "finished"
    assert "loss" in from_file.with_(seed=3).optim.from_file
    assert "loss" not in from_file.with_({"optim.loss": "a:b"}).optim.from_file
    assert from_file.with_({"model.name": "mlp"}).optim.from_file, "naming the model allows nothing for the loss"
    with pytest.raises(RecipeError, match=r"shape \[2\]"):
        train(Run.create(tmp_path / "bad", recipe.with_({"optim.loss": "bad_loss:make"})))


@pytest.mark.parametrize("phases", ["full", "head", "probe", "probe+head", "probe+discriminative"])
@pytest.mark.parametrize("num_labels", [None, 3])
def test_remedies_for_rare_classes_are_those_that_the_same_command_takes(phases: str, num_labels: int | None) -> None:
    budget = Budget(epochs=0 if phases == "probe" else 4)
    recipe = Recipe(data=Data(train="photos"), model=Model(name="resnet20", train=phases), budget=budget)
    counts = np.array([2, 80, 90])
    data: Any = SimpleNamespace(class_counts=counts, classes=["a", "b", "c"], num_labels=num_labels)
    [words] = rare_class_remark(recipe, data)
    assert ("--prior uniform" in words) == (num_labels is None)
    for flag, key, value in [
        ("--balance classes", "data.balance", "classes"),
        ("--class-weights balanced", "optim.class_weights", "balanced"),
    ]:
        try:
            recipe.with_({key: value})
            is_taken = num_labels is None or key != "data.balance"
        except RecipeError:
            is_taken = False
        assert (flag in words) == is_taken


def test_a_rare_class_is_named_and_a_balanced_run_trains_something_else(
    recipe: Recipe,
    tmp_path: Path,
    write_digits: Callable[[Path, int, int], Path],
    weights: Callable[[Path], bytes],
) -> None:
    images = write_digits(tmp_path / "images", 300, 3)
    for path in sorted((images / "2").iterdir())[8:]:
        path.unlink()
    recipe = recipe.with_({"data.train": str(images), "every.save_steps": 3})
    usual = train(Run.create(tmp_path / "usual", recipe)).run
    notices = " ".join(event.message for event in usual.events() if isinstance(event, Noticed))
    assert "1 class is rare (2 " in notices and "--balance classes" in notices
    assert "--class-weights balanced" in notices and "--prior uniform" in notices
    balanced = recipe.with_({"data.balance": "classes"})
    whole = train(Run.create(tmp_path / "whole", balanced)).run
    assert "rare" not in " ".join(event.message for event in whole.events() if isinstance(event, Noticed))
    assert weights(whole.directory) != weights(usual.directory)
