"""Fit the classifier to the features of the frozen network: a few passes over the images, then a convex problem.

What comes before the classifier does not change, so each image is sent through it once, and multinomial logistic
regression on what comes out takes seconds (Kornblith et al. 2019, "Do Better ImageNet Models Transfer Better?").
Training all of the network from such a classifier on distorts its features less than from a random one (Kumar et al.
2022, "Fine-Tuning can Distort Pretrained Features and Underperform Out-of-Distribution").
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from steadytrain.data.loader import Batch
from steadytrain.data.results.predictions import write_predictions
from steadytrain.data.sources.select import fold_numbers, split_by_fraction
from steadytrain.errors import ModelError, StorageError
from steadytrain.events import ProbeProgress
from steadytrain.training import build
from steadytrain.training.data import load
from steadytrain.training.evaluation import image_outputs
from steadytrain.training.features.folds import fit_classifier, out_of_fold
from steadytrain.training.features.series import Series, find_series
from steadytrain.training.features.table import FEATURE_BATCH, TableWriter, open_table, table_folder
from steadytrain.training.inference.classifier import classifier_of, features_and_logits
from steadytrain.training.inference.trained import Trained
from steadytrain.training.memory import PassLimit
from steadytrain.training.session.session import Session
from steadytrain.training.state import in_mode

HELD_OUT = 0.2
"""Share of each class of the training images that the penalty is chosen on; the fit that is kept has them all."""

TOLD_SECONDS = 1.0
"""Seconds between two events of the progress."""


def fit_head(session: Session, passes: int, stop: Callable[[], str | None]) -> Iterator[ProbeProgress]:
    """Fit the classifier of a session that has made no update, and yield how far it is; stopped, it is not fitted.

    The first pass sees each training image as evaluation does, the others as training does. Of several ranks each
    computes the features of its batches, and all get the first rank's classifier. A process alone keeps the features of
    the first pass in the cache (:mod:`~steadytrain.training.features.table`), or has them from there.

    Raises:
        ModelError: the classifier is not one linear layer.
    """
    state, recipe, data = session.state, session.recipe, session.data
    trained, head = frozen(session), find_head(session)
    progress = ProbeProgress(step=0, images=0, total=passes * data.num_train)
    yield progress
    parts = []
    for number in range(passes):
        part, progress = yield from compute_features(session, trained, head, number, stop, progress)
        if part is None:
            return
        parts.append(part)
    yield progress
    began = time.perf_counter()
    values, ids = (torch.cat(tables) for tables in zip(*parts, strict=True))
    records = np.arange(len(data.train)) if data.train_ids is None else data.train_ids
    labels, groups = np.asarray(data.train.labels, np.int64), None if data.groups is None else data.groups[records]
    classes = torch.from_numpy(labels[ids.cpu().numpy()]).to(ids.device)
    _, held_out = split_by_fraction(labels[records], fraction=HELD_OUT, seed=recipe.seed, sets=groups)
    is_held = torch.isin(ids, torch.from_numpy(records[held_out]).to(ids.device))
    weight, bias, penalty, top1 = fit_classifier(values, classes, is_held, len(data.classes))
    folded = _answer_folds(session, *parts[0]) if recipe.model.folds else {}
    copies = [head]
    if state.ema is not None:
        copies += [b for a, b in zip(state.module.modules(), state.ema.module.modules(), strict=True) if a is head]
    with torch.no_grad():
        for name, value in (("weight", weight), ("bias", bias)):
            parameters = [parameter for copy in copies if (parameter := getattr(copy, name)) is not None]
            masters = [state.policy.master(parameter) for parameter in parameters[:1]]
            value = state.engine.broadcast(value)
            for parameter in (*parameters, *masters):
                parameter.copy_(value.view_as(parameter))
    seconds = time.perf_counter() - began
    is_parted = (data.held_out or recipe.model.folds) and state.engine.world.rank == 0  # the rank that says it
    series = _find_series(session, *parts[0]) if is_parted else None
    fitted: dict[str, Any] = {"fit_seconds": seconds, "features": values.shape[1], "penalty": penalty, "top1": top1}
    yield msgspec.structs.replace(progress, **fitted, **folded, series="" if series is None else series.words)


def _answer_folds(session: Session, features: Tensor, numbers: Tensor) -> dict[str, Any]:
    """Answer about each training image by a classifier that has not seen it; write the answers beside the run.

    ``numbers``: of the records that ``features`` are of. Returns fields of :class:`ProbeProgress`.
    """
    data, recipe, world = session.data, session.recipe, session.state.engine.world
    order = numbers.argsort()
    values, ids = features[order].cpu().numpy(), numbers[order].cpu().numpy()
    labels = np.asarray(data.train.labels, np.int64)[ids]
    groups = None if data.groups is None else data.groups[ids]
    fold_of = fold_numbers(labels, folds=recipe.model.folds, seed=recipe.seed, groups=groups)
    device = session.state.engine.device
    answers = out_of_fold(values, labels, fold_of, len(data.classes), groups=groups, device=device)
    if world.rank == 0:
        logits = torch.from_numpy(answers.logits)
        outputs = image_outputs(logits, logits.argmax(1), torch.from_numpy(labels)).numpy()
        write_predictions(session.run.directory / "folds.csv", data.train, ids, data.classes, outputs, folds=fold_of)
    figures = {"fold_top1": answers.top1, "fold_loss": answers.loss, "fold_loss_error": answers.loss_error}
    return {"by_fold": list(answers.by_fold), **figures}


def _find_series(session: Session, features: Tensor, numbers: Tensor) -> Series | None:
    """Find series of photographs that the groups of a session's data do not keep together."""
    data, ids = session.data, numbers.cpu().numpy()
    names, labels = list(data.train.names()), np.asarray(data.train.labels, np.int64)[ids]
    groups = None if data.groups is None else data.groups[ids]
    own = [names[number] for number in ids]
    return find_series(features.cpu().numpy(), labels, own, groups=groups, others=names)


def find_head(session: Session) -> nn.Module:
    """Return the layer of a session's network that a probe fits. Raises ModelError: it is not one linear layer."""
    try:
        with in_mode(session.state.module, "evaluation"):
            return classifier_of(frozen(session))
    except ModelError as error:
        raise ModelError(f"{error}; use --train head, or --train head:1+full") from error


def frozen(session: Session) -> Trained:
    """Return the network of a session that has made no update, as what computes features takes it."""
    name = session.built.name
    return Trained(session.state.module, session.state.policy, session.input, session.data.classes, name, Path(name))


def compute_features(
    session: Session,
    trained: Trained,
    head: nn.Module,
    number: int,
    stop: Callable[[], str | None],
    before: ProbeProgress,
) -> Generator[ProbeProgress, None, tuple[tuple[Tensor, Tensor] | None, ProbeProgress]]:
    """Send each training image through the frozen network once, and yield how far all passes are.

    Returns float32 [N, D] features and int64 [N] record numbers; None where any rank was asked to stop.

    ``number``: of the pass: 0 crops as evaluation does, later ones as training does. ``stop`` is asked before each
    batch. ``before``: the progress of the passes before it.
    """
    state, data, world = session.state, session.data, session.state.engine.world
    n, is_stopped, rows = data.num_train, False, []
    table: Path | None = None
    if number == 0 and world.size == 1:  # ranks share the pass
        with suppress(StorageError):  # there may be no cache
            table = table_folder(trained, data.train, head=head)
    ids = torch.zeros(n, dtype=torch.int64)
    limit = PassLimit("evaluation", on_halved=lambda halved: None, mode="halve" if world.size == 1 else "fixed")
    values: Tensor | None = None
    stride = FEATURE_BATCH * world.size
    began = last_report = time.perf_counter()
    waited, batches = before.wait_seconds, 0
    feed = build.training_feed(
        session.recipe,
        data,
        session.input,
        state.engine.device,
        crop=build.evaluation_crop(session.input) if number == 0 else None,
        batch_size=FEATURE_BATCH,
        start=number * n,
        stop=number * n + -(-n // stride) * stride,
        shard=(world.rank, world.size),
        threads=session.feed.task.num_threads,
    )

    if table is not None:
        numbers = feed.ids_at(np.arange(n))
        if (kept := open_table(table, len(data.train), numbers)) is not None:
            feed.close()
            if stop():
                return None, before
            values, ids = (torch.from_numpy(array).to(state.engine.device) for array in (kept.values[numbers], numbers))
            done, seconds = before.images + n, before.seconds + time.perf_counter() - began
            return (values, ids), msgspec.structs.replace(before, images=done, seconds=seconds, reused=n)

    def until_stopped() -> Iterator[Batch]:
        nonlocal is_stopped
        for batch in feed:
            session.clock.to(session.clock.bucket)  # the watchdog sees that it moves
            if is_stopped := bool(stop()):
                return
            places = torch.from_numpy(batch.positions - number * n)
            is_new = places < n  # the last batch goes on into the next epoch
            ids[places[is_new]] = torch.from_numpy(batch.ids[is_new.numpy()])
            rows.append((places, is_new))
            yield batch

    def progress() -> ProbeProgress:
        return msgspec.structs.replace(
            before,
            images=before.images + min(n, batches * stride),
            seconds=before.seconds + time.perf_counter() - began,
            wait_seconds=waited,
            feed={name: value for name, value in vars(feed.stats()).items() if name != "by_loop"},
        )

    with in_mode(state.module, "evaluation"), feed:
        for batch, (places, is_new) in zip(load(until_stopped(), state.engine.device), rows, strict=False):
            with torch.no_grad():
                inputs, _ = features_and_logits(head, trained, batch.images, limit)
            if values is None:
                values = inputs.new_zeros(n, inputs.shape[1])
            values[places[is_new].to(inputs.device)] = inputs[is_new.to(inputs.device)]
            waited, batches = waited + batch.wait_seconds, batches + 1
            if time.perf_counter() - last_report >= TOLD_SECONDS and batches * stride < n:
                last_report = time.perf_counter()
                yield progress()
        reached = progress()
    device = state.engine.device
    if float(state.engine.sum(torch.tensor(float(is_stopped), device=device))):
        return None, reached
    assert values is not None, "a pass has a batch for each rank"
    if table is not None:
        with suppress(StorageError), TableWriter.open(table, len(data.train), values.shape[1]) as writer:
            writer.write(ids.numpy(), values.cpu().numpy())
    # A row is one rank's, and 0 in the tables of the others: their sum is exact.
    values, ids = (state.engine.sum(table.to(device)) for table in (values, ids))
    return (values, ids), reached
