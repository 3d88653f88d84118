"""Class frequencies: answers as if classes were as frequent as in another place than the training images.

A classifier that is trained by cross-entropy learns how frequent its classes are. Logits less the log of these
frequencies, plus the log of others, are those of images in which classes are as frequent as that (Menon et al. 2021,
"Long-tail learning via logit adjustment", section 4.1). Nothing is trained again, and the temperature comes first.
"""

from __future__ import annotations

import copy
import csv
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from steadytrain.config import Recipe
from steadytrain.config.losses import parse_loss
from steadytrain.config.phases import parse_train
from steadytrain.config.plain import parse_json, table_of
from steadytrain.config.transforms import MIXING, parse_transforms
from steadytrain.config.words import number
from steadytrain.errors import DataError, InputError, ModelError, RunError
from steadytrain.files import read_text
from steadytrain.format import Say, few, print_note
from steadytrain.run import Run
from steadytrain.training.data import open_data
from steadytrain.training.inference.classifier import classifier_of
from steadytrain.training.inference.trained import Trained
from steadytrain.training.metrics import log_ratio

Prior = str | Path | Mapping[str, float]
"""``uniform``, ``training``, a file of classes and frequencies, or a frequency (or count) for each class."""


def weighting(recipe: Recipe, step: int | None = None) -> str:
    """Return the setting by which training did not see classes as frequent as they are; empty where none did.

    ``step``: of the weights; at 0 they are a probe's, which was fitted by plain cross-entropy of all images.

    >>> from steadytrain.config import Data, Model, Optim
    >>> weighting(Recipe(data=Data(train="a.rec"), model=Model("digits"), optim=Optim(class_weights="balanced")))
    "optim.class_weights='balanced'"
    """
    loss = parse_loss(recipe.optim.loss)
    if parse_train(recipe.model.train).main == "probe" or step == 0:
        return ""
    if recipe.data.balance != "none":
        return f"data.balance={recipe.data.balance!r}"
    if recipe.optim.class_weights != "none":
        return f"optim.class_weights={recipe.optim.class_weights!r}"
    is_plain = not loss.is_factory and loss.name in ("auto", "cross-entropy")
    return "" if is_plain else f"optim.loss={recipe.optim.loss!r}"


def _softening(recipe: Recipe) -> str:
    """Return the settings that draw probabilities together, so that the frequencies learned are less uneven."""
    mixing = [str(transform) for transform in parse_transforms(recipe.data.transforms) if transform.name in MIXING]
    smoothing = recipe.optim.label_smoothing
    return " and ".join([f"label smoothing {smoothing:g}"] * bool(smoothing) + mixing)


def read_prior(prior: Prior, classes: Sequence[str]) -> NDArray[np.float64]:
    """Read the frequencies of classes, which are made to sum to 1: float64 [K], in the order of ``classes``.

    Args:
        prior: as of :func:`with_prior`. A file is JSON, ``{"cat": 120, "dog": 40}``, or a CSV file (or one with tabs)
            of a class and its frequency or count on each line; a first line without a number is its head.

    Raises:
        DataError: the file cannot be read, a class is missing or unknown, or a frequency is not above 0.

    >>> read_prior({"cat": 3, "dog": 1}, ("cat", "dog")).tolist()
    [0.75, 0.25]
    """
    if prior == "uniform":
        return np.full(len(classes), 1 / len(classes))
    where = "the prior" if isinstance(prior, Mapping) else str(prior)
    table = dict(prior) if isinstance(prior, Mapping) else _read_table(Path(prior))
    unknown, lacking = sorted(set(table) - set(classes)), sorted(set(classes) - set(table))
    if names := unknown or lacking:
        words = "names classes that the model has not" if unknown else "has no frequency of classes"
        raise DataError(f"{where} {words}: {few(names)}; give one frequency for each of {few(classes)}")
    values = np.array([number(str(table[name])) for name in classes])
    if wrong := next((name for name, value in zip(classes, values, strict=True) if not 0 < value < math.inf), None):
        raise DataError(f"{where} says {table[wrong]!r} of {wrong}: a frequency or count is a number above 0")
    return np.asarray(values / values.sum())


def _read_table(path: Path) -> dict[str, Any]:
    """Read the frequency of each class. Raises DataError."""
    try:
        text = read_text(path).removeprefix("\ufeff")
        if path.suffix.lower() == ".json":
            document = parse_json(text)
            if not isinstance(document, dict):
                raise ValueError('it is no table such as {"cat": 120, "dog": 40}')
            return document
        rows = [row for row in csv.reader(text.splitlines(), delimiter="\t" if "\t" in text else ",") if row]
        if wrong := next((row for row in rows if len(row) != 2), None):
            raise ValueError(f"the line {wrong} is not a class and its frequency")
        pairs = [(name.strip(), value.strip()) for name, value in rows]
        return table_of(pairs[1:] if pairs and math.isnan(number(pairs[0][1])) else pairs)
    except (OSError, ValueError, csv.Error, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise DataError(f"cannot read the class frequencies in {path}: {reason}") from error


def training_counts(trained: Trained, say: Say = print_note) -> tuple[int, ...]:
    """Return the training images of each class of a model: of its file, else of its run's data.

    Raises:
        DataError: they are not known.
        ModelError: they are not the frequencies that the model learned.
    """
    if trained.is_multi_label:
        raise ModelError(
            f"an image may have several of {trained.title}'s labels: class frequencies are of one an image"
        )
    run: Run | None = None
    with suppress(RunError):
        run = Run.open(trained.path.parent)
    updated_by = None if run is None or trained.is_probe else run.recipe
    if weighted := trained.weighting or ("" if updated_by is None else weighting(updated_by)):
        raise ModelError(
            f"{trained.path} was trained with {weighted}, which shifts class frequencies already, or is not"
            " cross-entropy: drop --prior, or train without it"
        )
    if updated_by is not None and (softening := _softening(updated_by)):
        say(f"{softening}: the frequencies that the model learned are somewhat less uneven than its images'")
    if trained.class_counts:
        return trained.class_counts
    if run is None:
        raise DataError(
            f"{trained.path} does not say how many training images each class had, and lies in no run's folder: drop"
            " --prior, or name the run"
        )
    try:
        sets = open_data(run.data, run.recipe.model, seed=run.recipe.seed, run=run)
    except DataError as error:
        raise DataError(
            f"{run.directory} is of an older version, which did not keep how many images each class had, and its"
            f" training images are not there any more ({error}): drop --prior"
        ) from error
    sets.close()
    return tuple(sets.class_counts.tolist())


def with_prior(trained: Trained, prior: Prior, *, say: Say = print_note) -> Trained:
    """Return a model that answers as if its classes had other frequencies than its training images.

    Args:
        trained: as ``restore`` returns it; it stays as it is.
        prior: ``uniform``; ``training``, which changes nothing; a JSON or CSV file, or a mapping, of the frequency or
            count of each class.
        say: takes a line on what to keep in mind.

    Raises:
        DataError: training frequencies that are not known, or a prior that cannot be used.
        ModelError: weights that learned other frequencies than those of their images, or have a prior already.
    """
    if trained.prior:
        raise ModelError(f"{trained.path} has the prior {trained.prior} in its outputs: take the run that it is of")
    if prior == "training":
        return trained
    if isinstance(prior, str | Path) and prior != "uniform" and not Path(prior).is_file():
        raise InputError(f"--prior is {prior}; it must be uniform, training, or a JSON or CSV file of frequencies")
    target = read_prior(prior, trained.classes)
    shift = trained.temperature * log_ratio(training_counts(trained, say), target)
    name = "a table" if isinstance(prior, Mapping) else Path(prior).name
    module = _shifted(trained, torch.from_numpy(shift).float())
    return replace(trained, module=module, prior=name, prior_shift=tuple(shift.tolist()))


def _shifted(trained: Trained, shift: torch.Tensor) -> nn.Module:
    """Return the network with ``shift`` added to its logits: in the bias of its classifier, where it has one."""
    head: nn.Module | None = None
    with suppress(ModelError):
        head = classifier_of(trained)
    if head is None or head.bias is None:
        return _Shifted(trained.module, shift)
    name = next(name for name, part in trained.module.named_modules() if part is head)
    module = copy.deepcopy(trained.module)
    with torch.no_grad():
        bias = module.get_submodule(name).bias
        assert isinstance(bias, torch.Tensor)
        bias += shift.to(bias)
    return module


class _Shifted(nn.Module):
    """A network, such as an exported file's, whose logits are shifted."""

    def __init__(self, module: nn.Module, shift: torch.Tensor) -> None:
        super().__init__()
        self.module, self.shift = module, shift

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.module(images)
        return logits + self.shift.to(logits)
