"""Compare ways in which long images become square (``data.fit``), by probes out of fold, image by image."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, get_args

import msgspec
import numpy as np

from steadytrain.config import Recipe
from steadytrain.config.defaults import MUCH_UNSEEN
from steadytrain.config.parts import ImageFit
from steadytrain.data.arrays import Floats, Ints
from steadytrain.data.recordio.reader import Records
from steadytrain.data.sources.select import draw_evenly, fold_numbers
from steadytrain.errors import StorageError
from steadytrain.events import Tried
from steadytrain.models import Built, Input
from steadytrain.training import build
from steadytrain.training.data import DataSets
from steadytrain.training.features.folds import out_of_fold, standard_error
from steadytrain.training.features.table import feature_table
from steadytrain.training.finetuning.linear_probe import frozen
from steadytrain.training.inference.trained import Trained
from steadytrain.training.session.session import Session
from steadytrain.training.state import in_mode

FOLDS = 5

LEAST_OUTSIDE = 0.1
"""Share of the pixels outside the central squares of images below which these are square enough for any fit."""

FIT_IMAGES = 300
"""Training images, the same share of each class, by which fits are compared: enough for a difference that matters."""

SURE_ERRORS = 2.0
"""Standard errors of the difference by which another fit has to be better: two others are tried."""


class StoppedError(Exception):
    """Somebody asked to stop before all fits were compared."""


@dataclass(frozen=True)
class Folded:
    """Training images that probes answer out of fold: record numbers, labels, folds and groups, int64 [N] each."""

    ids: Ints
    labels: Ints
    fold_of: Ints
    groups: Ints | None

    def try_features(
        self, trained: Trained, data: DataSets, threads: int | None, tick: Callable[[], None] = lambda: None
    ) -> tuple[Tried, Floats]:
        """Fit probes of a frozen network to all folds but one; return what they say of that, and each image's loss.

        Features stay in the cache. ``tick``: called after each batch of the pass, and before the probes; it may raise.
        """
        began, model = time.perf_counter(), trained.name
        table = feature_table(
            trained, data.train, ids=self.ids, threads=threads, progress=lambda *_: tick(), say=lambda line: None
        )
        tick()
        values, classes = table.values[self.ids], len(data.classes)
        answers = out_of_fold(values, self.labels, self.fold_of, classes, groups=self.groups)
        figures: dict[str, Any] = {"loss": answers.loss, "loss_error": answers.loss_error, "top1": answers.top1}
        figures["seconds"] = time.perf_counter() - began
        size = trained.input.size or 0
        return Tried(step=0, what="features", model=model, size=size, verdict="", **figures), answers.losses


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


def compare_fits(
    recipe: Recipe, built: Built, trained: Trained, data: DataSets, tick: Callable[[], None] = lambda: None
) -> list[Tried]:
    """Try the other ways in which images may become square, best first; empty where images are nearly square.

    The verdict of one that is surely better than that of ``trained`` says so, and names the flag: its losses are lower
    beyond the error of the difference, image by image, or group by group. ``tick``: called again and again; it may
    raise.
    """
    tried, own, input, threads = list[Tried](), np.zeros(0), trained.input, recipe.parallel.threads
    folded, others = fold_training(data, recipe.seed, FIT_IMAGES), other_fits(input, data.train)
    for fit in (input.fit, *others) if others else ():
        tick()
        crop = build.crop_share(recipe, built.input, input.size or 0, fit)
        fitted = replace(trained, input=replace(input, fit=fit, crop=crop))
        event, losses = folded.try_features(fitted, data, threads, tick)
        if fit == input.fit:
            own = losses
            continue
        gain, error = float((own - losses).mean()), standard_error(own - losses, folded.groups)
        better = f"--fit {fit} is better than {input.fit} here, by {gain:.4f} ± {error:.4f} of the loss"
        verdict = better if gain > SURE_ERRORS * error else ""
        tried.append(msgspec.structs.replace(event, fit=fit, verdict=verdict))
    return sorted(tried, key=lambda each: each.loss)


def wants_better_fit(session: Session) -> bool:
    """Return whether a better fit is looked for: where it may matter, and costs none of the user's minutes.

    It may where evaluation never sees most of the pixels, or ``model.folds`` asks for a better measure; a process alone
    looks.
    """
    recipe, data = session.recipe, session.data
    is_worth = session.started.model.get("unseen", 0.0) > MUCH_UNSEEN or recipe.model.folds > 0
    is_free = session.state.engine.world.size == 1 and recipe.budget.minutes is None
    return is_worth and is_free and data.num_train >= 4 * FOLDS


def better_fit(session: Session, stop: Callable[[], str | None]) -> Tried | None:
    """Return a fit that is surely better than that of a session which has fitted a probe; None once ``stop`` asks."""

    def tick() -> None:
        session.clock.to(session.clock.bucket)  # the watchdog sees that it moves
        if stop():
            raise StoppedError

    tried = list[Tried]()
    with suppress(StorageError, StoppedError), in_mode(session.state.module, "evaluation"):  # there may be no cache
        tried = compare_fits(session.recipe, session.built, frozen(session), session.data, tick)
    return next((event for event in tried if event.verdict), None)
