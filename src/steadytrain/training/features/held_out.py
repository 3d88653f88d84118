"""Answers about images that a model has not seen, and what follows from them: its temperature, and its limits.

Of a probe, whose network has learned nothing from the training images, these are all of them, each answered by a
classifier that was fitted without its fold; of a network that was trained on them, its validation images.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from steadytrain.data.arrays import Ints
from steadytrain.data.recordio.reader import Records
from steadytrain.data.results.predictions import read_predictions
from steadytrain.data.sources.select import draw_evenly, fold_numbers
from steadytrain.errors import DataError, RunError
from steadytrain.events import ProbeProgress
from steadytrain.format import OnProgress, Say, count, print_note
from steadytrain.run import Run
from steadytrain.training import checkpoints
from steadytrain.training.data import DataSets, open_data
from steadytrain.training.evaluation import Evaluation
from steadytrain.training.features.folds import PENALTIES, OutOfFold, out_of_fold
from steadytrain.training.features.table import feature_table
from steadytrain.training.inference.calibration import Fit, fit, require_own_weights
from steadytrain.training.inference.classifier import classifier_of, num_features
from steadytrain.training.inference.inference import EvaluationData, evaluate, open_evaluation_data
from steadytrain.training.inference.limits import (
    NEIGHBOUR,
    Limits,
    head_digest,
    limits_path,
    nearest,
    unit_rows,
    write_limits,
)
from steadytrain.training.inference.trained import Trained, Which, restore
from steadytrain.training.metrics import effective_n

FOLDS = 5
LEAST_TO_CALIBRATE = 500
"""Images from which on a temperature is fitted to them. Fitted to 67 to 110 validation images it made the loss of
other images larger on four sets of four (2026-11-28)."""

SURE_ERRORS = 2.0
"""Standard errors by which the loss has to fall. Where it fell by 1.0 to 1.5, the temperature made that of test images
larger in 5 draws of 6 (``benchmarks/results/limits.json``, 2026-11-29)."""

MOST_BYTES = 64 * 2**20
"""Bytes of the features that are kept of training images: of more images, the same share of each class."""

MOST_JUDGED, MOST_OUTPUTS = 5_000, 2**23
"""Held-out images whose figures are kept, and their logits in all."""

CHEAP_SECONDS, CHEAP_SHARE = 10.0, 0.1
"""Seconds, or share of a run's, that limits may take to be measured at its end without being asked for."""

MOST_MISTAKES, SHOWN = 500, 3
"""Validation images taken wrongly for which the nearest training images are kept, and how many of these."""


@dataclass(frozen=True)
class _Known:
    """Training images of a run, drawn where they are many, with their features."""

    ids: Ints
    labels: NDArray[Any]
    groups: Ints | None
    values: NDArray[np.float32]

    def folds(self, run: Run, num_classes: int) -> OutOfFold:
        """Return the answers about each image of a classifier, as strong as the run's, not fitted to its fold."""
        labels, fitted = np.asarray(self.labels, np.int64), [e for e in run.events() if isinstance(e, ProbeProgress)]
        penalties = [event.penalty for event in fitted if event.penalty is not None][-1:] or PENALTIES
        folds = min(FOLDS, len(labels if self.groups is None else np.unique(self.groups)))
        fold_of = fold_numbers(labels, folds=folds, seed=run.recipe.seed, groups=self.groups)
        return out_of_fold(self.values, labels, fold_of, num_classes, groups=self.groups, penalties=penalties)


def _known_images(
    trained: Trained, sets: DataSets, *, threads: int | None, progress: OnProgress | None, say: Say
) -> _Known:
    """Compute the features of a run's training images, or of as many as :data:`MOST_BYTES` hold."""
    records, numbers = sets.train, np.arange(len(sets.train)) if sets.train_ids is None else sets.train_ids
    ids = draw_evenly(numbers, records.labels, max(1, MOST_BYTES // (2 * num_features(classifier_of(trained)))))
    if len(ids) < len(numbers):
        say(f"{len(ids):,} of {len(numbers):,} training images are taken, the same share of each class")
    table = feature_table(trained, records, ids=ids, threads=threads, progress=progress, say=lambda line: None)
    groups = None if sets.groups is None else sets.groups[ids]
    return _Known(ids, records.labels[ids], groups, table.values[ids])


def _run_of(trained: Trained) -> Run:
    try:
        return Run.open(trained.path.parent)
    except RunError as error:
        raise DataError(f"{trained.path} belongs to no run, whose training images are needed: name a run") from error


def is_cheap(run: Run) -> bool:
    """Return whether :func:`make_limits` takes little beside what a finished run took, at the pace of its evaluation.

    It sends the training images through the network once; a probe has their features already, and fits five more
    classifiers to them.
    """
    progress = run.progress()
    started, evaluated, ended = progress.started, progress.evaluated, progress.ended
    if started is None or evaluated is None or ended is None or evaluated.seconds <= 0:
        return False
    images = int(started.data.get("num_train") or 0) + evaluated.n
    seconds = images * evaluated.seconds / max(1, evaluated.n)
    if progress.best is not None and progress.best.step == 0:
        fits = [event.fit_seconds or 0.0 for event in run.events() if isinstance(event, ProbeProgress)]
        seconds += FOLDS * max(fits, default=0.0)
    return seconds <= max(CHEAP_SECONDS, CHEAP_SHARE * ended.seconds)


def make_limits(
    place: str | Path | Run | Trained,
    *,
    which: Which = "best",
    threads: int | None = None,
    progress: OnProgress | None = None,
    say: Say = print_note,
) -> Limits:
    """Measure the limits of a run's weights, and write them beside these: ``predict`` and ``serve`` use them.

    Features of the training images are computed, and of a network that was trained on them those of its validation
    images. Distances leave an image's own group out.

    Args:
        place: a run or its folder, or its weights.
        which: as for ``restore``.
        threads: of the loader; None chooses.
        progress: called with the images done, and all.
        say: takes a line on what is left out.

    Raises:
        DataError: the run's images are gone, or none was held out.
        ModelError: the network does not end in one linear layer, or the weights are no run's.
        StorageError: the file cannot be written.
    """
    trained = place if isinstance(place, Trained) else restore(place, which=which)
    require_own_weights(trained)
    run, head = _run_of(trained), classifier_of(trained)
    pass_of: dict[str, Any] = {"threads": threads, "progress": progress, "say": lambda line: None}
    of_rows: Ints | None
    with closing(open_data(run.data, run.recipe.model, seed=run.recipe.seed, run=run)) as sets:
        known = _known_images(trained, sets, threads=threads, progress=progress, say=say)
        features, groups = unit_rows(torch.from_numpy(known.values)).half(), known.groups
        most = min(MOST_JUDGED, max(1, MOST_OUTPUTS // len(trained.classes)))
        if trained.is_probe:
            answers, labels = known.folds(run, len(trained.classes)), known.labels
            rows = draw_evenly(np.flatnonzero(answers.is_answered), labels, most)
            logits, labels, values = answers.logits[rows], labels[rows], known.values[rows]
            groups = np.arange(len(known.ids)) if groups is None else groups
            of_rows = own = groups[rows]
            what = f"{count(len(rows), 'training image')} answered out of fold"
        elif sets.val is None:
            raise DataError(f"{run.directory} has no validation images, and its network has seen all others")
        else:
            numbers = np.arange(len(sets.val)) if sets.val_ids is None else sets.val_ids
            rows = draw_evenly(numbers, sets.val.labels, most)
            values, labels = feature_table(trained, sets.val, ids=rows, **pass_of).values[rows], sets.val.labels[rows]
            logits, groups, own = _logits(head, values), None, None
            of_rows = None if sets.val_groups is None else sets.val_groups[np.isin(numbers, rows)]
            what = count(len(rows), "validation image")
        k = min(NEIGHBOUR, len(features) - 1)
        queries = unit_rows(torch.from_numpy(values))
        distances = nearest(features, queries, k, groups=groups, own=own)[0][:, -1].numpy()
        found = {"held_out": what, "num_train": sets.num_train, "head": head_digest(head), "size": trained.input.size}
        if not trained.is_multi_label and (worth := effective_n(logits.argmax(1) == labels, of_rows)) is not None:
            found["effective_n"] = worth
        if sets.val is not None and trained.path.name == "best.safetensors" and not trained.is_multi_label:
            found["neighbours"] = _neighbours_of_mistakes(trained, run, sets.val, features, known.ids, pass_of)
        limits = Limits(features, known.ids, distances, logits, np.asarray(labels), found)
    write_limits(limits_path(trained.path), limits)
    return limits


def _logits(head: nn.Module, values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return what a classifier answers to features: float32 [N, K]."""
    weight, bias = (
        part.detach().float().cpu() if isinstance(part, Tensor) else None for part in (head.weight, head.bias)
    )
    assert weight is not None
    return functional.linear(torch.from_numpy(values), weight.flatten(1), bias).numpy()


def _neighbours_of_mistakes(
    trained: Trained, run: Run, val: Records, features: Tensor, ids: Ints, pass_of: dict[str, Any]
) -> dict[str, list[int]]:
    """Return records of the nearest training images by that of each validation image taken wrongly, the worst first."""
    wrong: list[tuple[float, int]] = []
    with suppress(DataError, IndexError):  # no such file, or records that were packed anew
        rows = (row for row in read_predictions(run.predictions) if row.true != row.predicted)
        wrong = sorted((-row.loss, val.number(row.shard, row.record)) for row in rows)[:MOST_MISTAKES]
    if not wrong:
        return {}
    numbers = np.array([number for _, number in wrong])
    values = feature_table(trained, val, ids=numbers, **pass_of).values[numbers]
    found = nearest(features, unit_rows(torch.from_numpy(values)), min(SHOWN, len(features)))[1]
    return {str(number): ids[row].tolist() for number, row in zip(numbers.tolist(), found.numpy(), strict=True)}


def calibrate(
    place: str | Path | Run | Trained,
    data: str | Path | EvaluationData | None = None,
    *,
    which: Which = "best",
    batch_size: int | None = None,
    threads: int | None = None,
    progress: Callable[[int, int], object] | None = None,
    say: Say = print_note,
) -> Fit:
    """Fit a temperature to trained weights, and keep it in their file: what is restored from it uses it.

    It is kept where it pays: where the loss of each half of the images, by the temperature fitted to the other half,
    falls by more than two standard errors of that. Else it stays at 1, and ``Fit.left`` says why.

    Args:
        place: a run or its folder, or a weights file that steadytrain wrote; or what ``restore`` returned.
        data: images that were not trained on, as for ``evaluate``, :data:`LEAST_TO_CALIBRATE` or more; None takes the
            run's own: of a probe the training images, answered out of fold, else its validation images.
        which, batch_size, threads, progress: as for ``evaluate``.
        say: takes a line on images that are left out.

    Raises:
        DataError: no temperature is best on these images, or they cannot be used.
        ModelError, RunError: the file can keep none, or its run is still training.
        StorageError: it cannot be written; the file is untouched.
    """
    trained = place if isinstance(place, Trained) else restore(place, which=which)
    opened = data if isinstance(data, EvaluationData) else None
    groups: Ints | None = None
    try:
        require_own_weights(trained)
        bare = replace(trained, temperature=1.0)
        if data is None and trained.is_probe:
            result, groups, digest = _answers_out_of_fold(bare, threads=threads, progress=progress, say=say)
        else:
            opened = opened or open_evaluation_data(trained, data)
            digest, groups = opened.digest, opened.groups
            options: dict[str, Any] = {"batch_size": batch_size, "threads": threads, "progress": progress}
            result = evaluate(bare, opened, keep_logits=True, **options)
    finally:
        if opened is not None:
            opened.records.close()
    fitted = fit(result, groups)
    if opened is not None and fitted.n < LEAST_TO_CALIBRATE:
        left = f"{count(fitted.n, 'image')} are fewer than {LEAST_TO_CALIBRATE}, which tell a temperature from chance"
    elif fitted.gain <= SURE_ERRORS * fitted.gain_error:
        error = f"{SURE_ERRORS:g} standard errors ({SURE_ERRORS * fitted.gain_error:.4f})"
        left = f"the loss falls by {max(0, fitted.gain):.4f}, not by {error}"
    else:
        left = ""
    tensors, about = checkpoints.read_weights(trained.path)
    about.pop("calibration", None)
    if not left:
        about["calibration"] = {"temperature": fitted.temperature, "n": fitted.n, "data": digest}
    checkpoints.write_weights(trained.path, tensors, about)
    return replace(fitted, temperature=1.0, left=left) if left else fitted


def _answers_out_of_fold(
    trained: Trained, *, threads: int | None, progress: OnProgress | None, say: Say
) -> tuple[Evaluation, Ints | None, str]:
    """Answer each training image of a probe out of fold; return its group, too, and a digest of the images."""
    run = _run_of(trained)
    with closing(open_data(run.data, run.recipe.model, seed=run.recipe.seed, run=run)) as sets:
        known = _known_images(trained, sets, threads=threads, progress=progress, say=say)
        digest = hashlib.sha256(sets.train.digest.encode() + known.ids.tobytes()).hexdigest()
    answers, labels = known.folds(run, len(trained.classes)), np.asarray(known.labels, np.int64)
    logits, labels = answers.logits[answers.is_answered], labels[answers.is_answered]
    groups = None if known.groups is None else known.groups[answers.is_answered]
    figures = Evaluation(len(labels), answers.loss, answers.top1, None, (), (), logits=logits, labels=labels)
    return figures, groups, digest
