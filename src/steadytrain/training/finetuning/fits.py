"""Compare ways in which long images become square (``data.fit``), by probes out of fold, image by image."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import get_args

import numpy as np
import torch
from torch.nn import functional

from steadytrain.config import Recipe
from steadytrain.config.defaults import MUCH_UNSEEN
from steadytrain.config.parts import ImageFit
from steadytrain.data.arrays import Ints
from steadytrain.data.recordio.reader import Records
from steadytrain.data.sources.select import draw_evenly, fold_numbers
from steadytrain.errors import StorageError
from steadytrain.events import Tried
from steadytrain.format import count
from steadytrain.models import Built, Input
from steadytrain.training import build
from steadytrain.training.data import DataSets
from steadytrain.training.features.folds import OutOfFold, out_of_fold, standard_error
from steadytrain.training.features.table import feature_table
from steadytrain.training.finetuning.linear_probe import frozen
from steadytrain.training.inference.trained import Trained
from steadytrain.training.session.session import Session
from steadytrain.training.state import preserve_modes

FOLDS = 5

LEAST_OUTSIDE = 0.1
"""Share of the pixels outside the central squares of images below which these are square enough for any fit."""

FIT_IMAGES = 300
"""Training images, the same share of each class, by which fits are compared: enough for a difference that matters."""

SURE_ERRORS = 2.0
"""Standard errors of the difference by which another fit has to be better: two others are tried."""


@dataclass(frozen=True)
class Folded:
    """Training images that probes answer out of fold: record numbers, labels, folds and groups, int64 [N] each."""

    ids: Ints
    labels: Ints
    fold_of: Ints
    groups: Ints | None

    def answers(self, trained: Trained, data: DataSets, threads: int | None = None) -> OutOfFold:
        """Fit probes of a frozen network to all folds but one, and answer about that; features stay in the cache."""
        table = feature_table(trained, data.train, ids=self.ids, threads=threads, say=lambda line: None)
        return out_of_fold(table.values[self.ids], self.labels, self.fold_of, len(data.classes), groups=self.groups)


def fold_training(data: DataSets, seed: int, most: int) -> Folded:
    """Deal the training images into folds, groups together; of more than ``most``, the same share of each class."""
    labels = np.asarray(data.train.labels, np.int64)
    ids = draw_evenly(np.arange(len(labels)) if data.train_ids is None else data.train_ids, labels, most)
    groups = None if data.groups is None else data.groups[ids]
    folds = min(FOLDS, len(ids if groups is None else np.unique(groups)))
    return Folded(ids, labels[ids], fold_numbers(labels[ids], folds=folds, seed=seed, groups=groups), groups)


def other_fits(input: Input, records: Records) -> tuple[ImageFit, ...]:
    """Return the other ways in which images may become square; none where they nearly are."""
    sizes = records.sampled_sizes
    if not len(sizes) or 1 - float((sizes.min(1) / sizes.max(1)).mean()) < LEAST_OUTSIDE:
        return ()
    return tuple(fit for fit in get_args(ImageFit) if fit != input.fit)


@dataclass(frozen=True)
class FitGain:
    """What another fit leaves of a probe's loss on ``n`` images: how much less than ``instead``, and its error."""

    tried: Tried
    instead: ImageFit
    gain: float
    error: float
    n: int

    @property
    def is_sure(self) -> bool:
        return self.gain > SURE_ERRORS * self.error

    @property
    def words(self) -> str:
        """Say what is better, by how much, and which flag takes it."""
        loss, fit = self.tried.loss, self.tried.fit
        images, difference = count(self.n, "training image"), f"{self.gain:.4f}, standard error {self.error:.4f}"
        return (
            f"--fit {fit} is better here: by folds of {images}, the loss of a probe is {loss:.4f} with {fit}"
            f" and {loss + self.gain:.4f} with {self.instead} (difference {difference})"
        )


def tried_features(model: str, input: Input, answers: OutOfFold, *, seconds: float, fit: str | None = None) -> Tried:
    """Return the event of a network and a size of images, by the answers of its probes."""
    figures = {"loss": answers.loss, "loss_error": answers.loss_error, "top1": answers.top1, "seconds": seconds}
    return Tried(step=0, what="features", model=model, size=input.size or 0, verdict="", fit=fit, **figures)


def compare_fits(recipe: Recipe, built: Built, trained: Trained, data: DataSets) -> list[FitGain]:
    """Compare the losses of the same training images under each fit, best first; empty where images are nearly square.

    The error is that of the difference, one image or group of them at a time. Features stay in the cache.
    """
    gains, own, input = list[FitGain](), np.zeros(0), trained.input
    others = other_fits(input, data.train)
    folded = fold_training(data, recipe.seed, FIT_IMAGES)
    for fit in (input.fit, *others) if others else ():
        began, crop = time.perf_counter(), build.crop_share(recipe, built.input, input.size or 0, fit)
        answers = folded.answers(
            replace(trained, input=replace(input, fit=fit, crop=crop)), data, recipe.parallel.threads
        )
        logits, labels = torch.from_numpy(answers.logits), torch.from_numpy(folded.labels)
        losses = functional.cross_entropy(logits, labels, reduction="none").double().numpy()
        if fit == input.fit:
            own = losses
            continue
        event = tried_features(built.name, input, answers, seconds=time.perf_counter() - began, fit=fit)
        error = standard_error(own - losses, folded.groups)
        gains.append(FitGain(event, input.fit, float((own - losses).mean()), error, len(losses)))
    return sorted(gains, key=lambda each: -each.gain)


def better_fit(session: Session) -> FitGain | None:
    """Return a fit that is surely better than that of a session which has fitted a probe.

    Looked for where it may matter, and costs none of the user's minutes: where evaluation never sees most of the
    pixels, or ``model.folds`` asks for a better measure; a process alone.
    """
    recipe, data = session.recipe, session.data
    is_worth = session.started.model.get("unseen", 0.0) > MUCH_UNSEEN or recipe.model.folds
    is_free = session.state.engine.world.size == 1 and recipe.budget.minutes is None and data.num_train >= 4 * FOLDS
    gains = list[FitGain]()
    if is_worth and is_free:
        with suppress(StorageError), preserve_modes(session.state.module):  # there may be no cache
            session.state.module.eval()
            gains = compare_fits(recipe, session.built, frozen(session), data)
    return gains[0] if gains and gains[0].is_sure else None
