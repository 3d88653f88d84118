"""Trained weights in use: restored from a run or from one file, evaluated on data, asked for classes of image files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from steadytrain import config as recipes
from steadytrain import models
from steadytrain.config.plain import build as build_typed
from steadytrain.data.loader import Batch, ImageLoader, packed_side
from steadytrain.data.packing.images import BadImageError
from steadytrain.data.packing.prepare import prepare
from steadytrain.data.predictions import write_predictions
from steadytrain.data.recordio.reader import Records
from steadytrain.data.sources.filenames import is_ignored, is_image
from steadytrain.errors import DataError, ModelError, RecipeError, RunError, SteadyError
from steadytrain.models import Input
from steadytrain.run import Run
from steadytrain.training import build, checkpoints
from steadytrain.training.data import load, open_data, open_records, require_outputs
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
        """Open an exact pass over a source of images, cropped as this model wants them."""
        crop, pin = build.evaluation_crop(self.input), self.policy.device.type == "cuda"
        return ImageLoader(source, crop, batch_size=batch_size, ids=ids, train=False, threads=threads, pin=pin)


def restore(
    place: str | Path | Run,
    *,
    which: Which = "last",
    model: str | None = None,
    device: str = "auto",
    numbers: str = "fp32",
) -> Trained:
    """Load trained weights into their model.

    Args:
        place: a run or its folder, or a weights file: one that steadytrain wrote, or another together with ``model``.
        which: of a run, the ``last`` weights (once it has finished) or the ``best`` by validation top-1.
        model: name of the model. Needed for files that do not say it, and for a ``pkg.mod:factory``, which
            is only ever imported when it is named here, or in your own code as the model of the run.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:1``.
        numbers: precision: as in :class:`steadytrain.config.Precision`.

    Raises:
        RunError: no run, or no weights in it yet.
        ModelError: weights and model do not fit.
    """
    path = _weights_file(place.directory if isinstance(place, Run) else Path(place), which)
    policy = Policy(recipes.Precision(numbers), build.choose_device(device))  # type: ignore[arg-type]
    tensors, about = checkpoints.read_weights(path) if path.suffix == ".safetensors" else ({}, {})
    if "model" not in about:
        return _foreign(path, model, policy)
    try:
        spec = recipes.Model(about["model"]["name"], options=about["model"]["options"])
        input, classes = build_typed(Input, about["input"]), tuple(str(name) for name in about["classes"])
    except (KeyError, TypeError, RecipeError) as error:
        raise ModelError(
            f"the header of {path} is damaged ({error}): take another copy, or the weights of a checkpoint"
        ) from error
    if model is not None and models.find(model, allow_import=True).name != spec.name:
        raise ModelError(f"{path} holds weights of {spec.name}, not of {model}: drop --model")
    is_named = isinstance(place, Run) and not place.recipe.model.from_file and place.recipe.model.name == spec.name
    built = models.build(
        spec,
        num_classes=len(classes),
        channels=input.channels,
        size=input.size,
        allow_import=model is not None or is_named,
    )
    try:
        built.module.load_state_dict(tensors)
    except RuntimeError as error:
        raise ModelError(f"{path} does not fit {built.name}: {str(error).splitlines()[-1].strip()}") from error
    return Trained(policy.prepare(built.module).eval(), policy, input, classes, built.name, path)


def evaluate(
    place: str | Path | Run | Trained,
    data: str | Path | None = None,
    *,
    which: Which = "last",
    batch_size: int = 128,
    threads: int | None = None,
    progress: Callable[[int, int], object] | None = None,
    per_image: str | Path | None = None,
) -> Evaluation:
    """Evaluate a run or a weights file on every image of a data set.

    Args:
        place: as for :func:`restore`, or what it gave.
        data: a record file or a folder of the same classes; None takes the run's own validation data.
        which: as for :func:`restore`.
        batch_size: images at a time; the answer does not depend on it.
        threads: of the loader; None chooses.
        progress: called with the images done so far, and all there are, after each batch.
        per_image: a CSV file to write, with a line for each image (see :mod:`steadytrain.data.predictions`).

    Raises:
        DataError: the data's classes are not the model's.
        StorageError: ``per_image`` cannot be written.
    """
    trained = place if isinstance(place, Trained) else restore(place, which=which)
    opened, ids = _evaluation_data(trained, data)
    with opened, trained.feed(opened, ids=ids, batch_size=batch_size, threads=threads) as feed:

        def batches() -> Iterator[Batch]:
            done = 0
            for batch in feed:
                done += len(batch)
                yield batch
                if progress is not None:
                    progress(done, feed.num_samples)

        num_outputs = None if per_image is None else feed.num_samples
        evaluation = evaluate_module(
            trained.module,
            batches(),
            trained.policy,
            trained.input,
            len(trained.classes),
            num_outputs=num_outputs,
        )
        if per_image is not None and evaluation.outputs is not None:
            numbers = np.arange(len(opened)) if ids is None else ids
            write_predictions(Path(per_image), opened, numbers, trained.classes, evaluation.outputs)
        return evaluation


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
    input = built.input.filled(224, build.DEFAULT_MEAN, build.DEFAULT_STD)
    names = tuple(str(k) for k in range(outputs))
    return Trained(policy.prepare(built.module).eval(), policy, input, names, built.name, path)


@dataclass(frozen=True)
class Prediction:
    """The likeliest classes of one file, best first, with their probabilities; or why there are none."""

    path: Path
    classes: tuple[str, ...] = ()
    probabilities: tuple[float, ...] = ()
    error: str | None = None


class Files:
    """Image files as a source for the loader: record i is the i-th file, every label 0."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = paths
        self.labels: NDArray[np.int64] = np.zeros(len(paths), np.int64)

    def __len__(self) -> int:
        return len(self.paths)

    def image(self, i: int) -> bytes:
        """The bytes of file ``i``. Raises DataError."""
        try:
            return self.paths[i].read_bytes()
        except OSError as error:
            raise DataError(f"cannot read {self.paths[i]}: {error.strerror}") from error


def _images(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = sorted(p for p in path.rglob("*") if is_image(p.name) and not is_ignored(p.name) and p.is_file())
    if not files:
        raise DataError(f"{path} is a folder without images: name image files, or a folder of them")
    return files


def predict(
    place: str | Path | Run | Trained,
    paths: str | Path | Sequence[str | Path],
    *,
    top: int = 5,
    which: Which = "last",
) -> Iterator[Prediction]:
    """Predict the ``top`` classes of each file, in order; one that cannot be read says so and the next one follows.

    Args:
        place: as for :func:`restore`, or what it gave.
        paths: an image file or several; a folder stands for the images in it and below, in the order of their names.
        top: classes to return for each.
        which: as for :func:`restore`.

    Raises:
        DataError: a folder without images.
    """
    files = [file for path in ([paths] if isinstance(paths, str | Path) else paths) for file in _images(Path(path))]
    trained = place if isinstance(place, Trained) else restore(place, which=which)
    top = min(top, len(trained.classes))
    for path in files:
        try:
            with trained.feed(Files([path]), batch_size=1, threads=1) as feed, torch.no_grad():
                (batch,) = load(feed, trained.policy.device)
                with trained.policy.autocast():
                    images = trained.policy.images(batch.images, trained.input.mean, trained.input.std)
                    logits = trained.module(images).float()
        except SteadyError as error:
            if not isinstance(error.__cause__, BadImageError):
                raise
            yield Prediction(path, error=str(error.__cause__))
            continue
        likely = logits.softmax(1).topk(top)
        names = tuple(trained.classes[k] for k in likely.indices[0].tolist())
        yield Prediction(path, names, tuple(likely.values[0].tolist()))
