"""Trained weights back into a model that can be used: from a run, or from one file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from torch import nn

from steadytrain import config as recipes
from steadytrain import models
from steadytrain.config.plain import build as build_typed
from steadytrain.data.loader import Batch, ImageLoader, packed_side
from steadytrain.data.packing.prepare import prepare
from steadytrain.data.recordio.reader import Records
from steadytrain.errors import DataError, ModelError, RecipeError, RunError
from steadytrain.models import Input
from steadytrain.run import Run
from steadytrain.training import build, checkpoints, precision
from steadytrain.training.data import open_data, open_records, require_outputs
from steadytrain.training.evaluation import Evaluation, evaluate_module
from steadytrain.training.precision import Policy

Which = Literal["last", "best"]


@dataclass(frozen=True)
class Trained:
    """A model ready to be used: on its device, with its classes and preprocessing."""

    module: nn.Module
    policy: Policy
    input: Input
    classes: tuple[str, ...]
    name: str
    path: Path

    def feed(
        self, source: Any, *, ids: NDArray[np.int64] | None = None, batch_size: int, threads: int | None
    ) -> ImageLoader:
        """An exact pass over a source of images, cut as this model wants them."""
        cut = build.evaluation_cut(self.input)
        pin = self.policy.device.type == "cuda"
        return ImageLoader(source, cut, batch_size=batch_size, ids=ids, train=False, threads=threads, pin=pin)


def restore(
    place: str | Path, *, which: Which = "last", model: str | None = None, device: str = "auto", numbers: str = "fp32"
) -> Trained:
    """Load what was trained.

    Args:
        place: a run's folder, or a weights file: one that steadytrain wrote, or another together with ``model``.
        which: of a run, the ``last`` weights (once it has finished) or the ``best`` by validation top-1.
        model: name of the model. Needed for files that do not say it, and for a ``pkg.mod:factory``, which
            is only ever imported when it is named here.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:1``.
        numbers: precision: as in :class:`steadytrain.config.Precision`.

    Raises:
        RunError: no run, or no weights in it yet.
        ModelError: weights and model do not fit.
    """
    path = _weights_file(Path(place), which)
    where = build.choose_device(device)
    policy = precision.policy(recipes.Precision(numbers), where)  # type: ignore[arg-type]
    if path.suffix != ".safetensors":
        return _foreign(path, model, policy)
    tensors, about = checkpoints.read_weights(path)
    if "model" not in about:
        return _foreign(path, model, policy)
    spec, told, classes = _described(path, about)
    if model is not None and models.find(model, allow_import=True).name != spec.name:
        raise ModelError(f"{path} holds weights of {spec.name}, not of {model}: drop --model")
    built = models.build(
        spec,
        num_classes=len(classes),
        channels=told.channels,
        size=told.size,
        allow_import=model is not None,
    )
    try:
        built.module.load_state_dict(tensors)
    except RuntimeError as error:
        raise ModelError(f"{path} does not fit {built.name}: {str(error).splitlines()[-1].strip()}") from error
    return Trained(policy.prepare(built.module).eval(), policy, told, classes, built.name, path)


def _described(path: Path, about: Mapping[str, Any]) -> tuple[recipes.Model, Input, tuple[str, ...]]:
    """What the header of a weights file says of its network, its images and its classes."""
    try:
        spec = recipes.Model(about["model"]["name"], options=about["model"]["options"])
        return spec, build_typed(Input, about["input"]), tuple(str(name) for name in about["classes"])
    except (KeyError, TypeError, RecipeError) as error:
        raise ModelError(
            f"the header of {path} is damaged ({error}): take another copy, or the weights of a checkpoint"
        ) from error


def evaluate(
    place: str | Path | Trained,
    data: str | Path | None = None,
    *,
    which: Which = "last",
    batch_size: int = 128,
    threads: int | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> Evaluation:
    """Evaluate a run or a weights file on every image of a data set.

    Args:
        place: as for :func:`restore`, or what it gave.
        data: a record file or a folder of the same classes; None takes the run's own validation data.
        which: as for :func:`restore`.
        batch_size: images at a time; the answer does not depend on it.
        threads: of the feed; None chooses.
        progress: called with the images done so far, and all there are, after each batch.

    Raises:
        DataError: the data's classes are not the model's.
    """
    trained = place if isinstance(place, Trained) else restore(place, which=which)
    opened, ids = _evaluation_data(trained, data)
    with opened, trained.feed(opened, ids=ids, batch_size=batch_size, threads=threads) as feed:
        batches = feed if progress is None else _told(feed, progress)
        return evaluate_module(trained.module, batches, trained.policy, trained.input, len(trained.classes))


def _told(feed: ImageLoader, progress: Callable[[int, int], object]) -> Iterator[Batch]:
    """The batches of a feed; each is told of when the next is asked for."""
    done = 0
    for batch in feed:
        size = len(batch)
        yield batch
        done += size
        progress(done, feed.num_samples)


def _evaluation_data(trained: Trained, data: str | Path | None) -> tuple[Records, NDArray[np.int64] | None]:
    if data is None:
        run = Run.open(trained.path.parent)
        sets = open_data(run.recipe.data, seed=run.recipe.seed)
        if sets.val is None:
            sets.close()
            raise DataError(f"{run.directory} was trained without validation data: name the data to evaluate on")
        if sets.val is not sets.train:
            sets.train.close()
        return sets.val, sets.val_ids
    side = packed_side(trained.input.size)
    prepared = prepare(data, classes=trained.classes, one_class=True, only="val", shorter_side=side)
    opened = open_records(prepared.only("val"))
    if opened.card is not None and opened.classes != trained.classes:
        opened.close()
        raise DataError(
            f"{data} has {len(opened.classes)} classes ({', '.join(opened.classes[:5])}, ...) and {trained.path} was"
            f" trained on {len(trained.classes)} ({', '.join(trained.classes[:5])}, ...): pack the images again with"
            f" --classes CARD, the card of the training data"
        )
    require_outputs(opened, len(trained.classes), of=trained.name)
    return opened, None


def _weights_file(place: Path, which: Which) -> Path:
    if not place.is_dir():
        if not place.exists():
            raise RunError(f"{place} is neither a run's folder nor a weights file: there is nothing of that name")
        return place
    run = Run.open(place)
    path = run.weights if which == "last" and run.weights.exists() else place / "best.safetensors"
    if not path.exists():
        raise RunError(f"{place} has no weights yet: they are written at its first evaluation and at its end")
    return path


def _foreign(path: Path, model: str | None, policy: Policy) -> Trained:
    if model is None:
        raise ModelError(f"{path} does not say what model it is of: name it with --model")
    spec = recipes.Model(model, weights=str(path))
    outputs = models.num_outputs(spec, allow_import=True)
    built = models.build(spec, num_classes=outputs, channels=3, size=None, allow_import=True)
    told = built.input.filled(224, build.DEFAULT_MEAN, build.DEFAULT_STD)
    names = tuple(str(k) for k in range(outputs))
    return Trained(policy.prepare(built.module).eval(), policy, told, names, built.name, path)
