"""Trained weights in use: restored from a run, a file or timm, evaluated on data, asked for classes of image files."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
from steadytrain.data.packing.pack import Progress
from steadytrain.data.packing.prepare import Prepared, Say, prepare, print_note
from steadytrain.data.predictions import write_predictions
from steadytrain.data.recordio.card import read_classes
from steadytrain.data.recordio.reader import Records
from steadytrain.data.sources.filenames import few, is_ignored, is_image
from steadytrain.data.sources.listing import Listing
from steadytrain.errors import DataError, ModelError, RecipeError, RunError, SteadyError
from steadytrain.format import epoch
from steadytrain.models import Input
from steadytrain.models.class_names import Match, imagenet_synsets, match_classes, names_of_synsets
from steadytrain.models.registry import pretrained_licence
from steadytrain.run import Run
from steadytrain.training import build, checkpoints
from steadytrain.training.compute.precision import Policy, set_products
from steadytrain.training.data import load, open_data, open_records, require_outputs
from steadytrain.training.evaluation import Evaluation, evaluate_module

Which = Literal["best", "last"]


@dataclass(frozen=True)
class Trained:
    """A model ready to be used: on its device, with its classes and preprocessing.

    Args:
        module: in evaluation mode.
        policy: precision and device.
        input: size, mean, standard deviation and crop of its images.
        classes: names of its outputs.
        name: of the model, in full.
        path: of its weights; the model's name where they are timm's.
        synsets: of its classes, where they are ImageNet's; else empty.
        chosen: which of a run's weights these are, in words; empty where they are not a run's.
        notes: for the user, a line each: what was assumed, what the licence of the weights restricts.
    """

    module: nn.Module
    policy: Policy
    input: Input
    classes: tuple[str, ...]
    name: str
    path: Path
    synsets: tuple[str, ...] = ()
    chosen: str = ""
    notes: tuple[str, ...] = ()

    def feed(
        self, source: Any, *, ids: NDArray[np.int64] | None = None, batch_size: int, threads: int | None
    ) -> ImageLoader:
        """Open an exact pass over a source of images, cropped as this model wants them."""
        crop, pin = build.evaluation_crop(self.input), self.policy.device.type == "cuda"
        return ImageLoader(source, crop, batch_size=batch_size, ids=ids, train=False, threads=threads, pin=pin)


def restore(
    place: str | Path | Run,
    *,
    which: Which = "best",
    model: str | None = None,
    device: str = "auto",
    numbers: str | None = None,
    classes: str | Path | Sequence[str] | None = None,
) -> Trained:
    """Load trained weights into their model.

    Args:
        place: a run or its folder; a weights file: one that steadytrain wrote, or another together with ``model``; or
            the name of a pretrained model of timm, such as ``timm/resnet18.a1_in1k``: its weights are fetched once,
            and ``Trained.notes`` says what their licence restricts.
        which: of a run, the ``best`` weights by validation top-1, whose figures the run reports as its result, or the
            ``last``. Without validation there are only the last; while a run goes on, only the best so far.
        model: name of the model. Needed for files that do not say it, and for a ``pkg.mod:factory``, which
            is only ever imported when it is named here, or in your own code as the model of the run.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:1``.
        numbers: precision, as in :class:`steadytrain.config.Precision`; None: the run's, else ``fp32``.
        classes: names of the outputs, in their order; or a file of them: a card (``.json``), or a text with a class on
            each line. None: those in the weights file, else ImageNet's if it has a classifier of as many outputs.

    Raises:
        RunError: no run, or no weights in it yet.
        ModelError: no such model, weights that cannot be fetched or do not fit it, or outputs without names.
        DataError: not as many ``classes`` as outputs, or no such file.

    >>> import tempfile, torch, timm
    >>> path = tempfile.mkdtemp() + "/stock.pth"
    >>> torch.save(timm.create_model("test_resnet").state_dict(), path)
    >>> restore(path, model="timm/test_resnet").classes[285]
    'Egyptian cat'
    """
    names = None if classes is None else _class_names(classes)
    if not isinstance(place, Run) and (model_name := find_pretrained(place)) is not None:
        if model is not None:
            raise ModelError(f"{place} is a model's name: drop --model {model}")
        return _restore_pretrained(model_name, _policy(numbers, build.choose_device(device)), names)
    path = _weights_file(place.directory if isinstance(place, Run) else Path(place), which)
    tensors, about = checkpoints.read_weights(path) if path.suffix == ".safetensors" else ({}, {})
    if "model" not in about:
        return _restore_foreign(path, model, _policy(numbers, build.choose_device(device)), names)
    try:
        spec = recipes.Model(about["model"]["name"], options=about["model"]["options"])
        input, stored = build_typed(Input, about["input"]), tuple(str(name) for name in about["classes"])
    except (KeyError, TypeError, RecipeError) as error:
        raise ModelError(
            f"the header of {path} is damaged ({error}): take another copy, or the weights of a checkpoint"
        ) from error
    if model is not None and models.find(model, allow_import=True).name != spec.name:
        raise ModelError(f"{path} holds weights of {spec.name}, not of {model}: drop --model")
    is_named = isinstance(place, Run) and not place.recipe.model.from_file and place.recipe.model.name == spec.name
    built = models.build(
        spec,
        num_classes=len(stored),
        channels=input.channels,
        size=input.size,
        allow_import=model is not None or is_named,
    )
    try:
        built.module.load_state_dict(tensors)
    except RuntimeError as error:
        raise ModelError(f"{path} does not fit {built.name}: {str(error).splitlines()[-1].strip()}") from error
    run = _run_of(path, about)
    policy, notes = _policy_of_run(run, numbers, build.choose_device(device))
    if run is not None and not run.weights.exists():
        notes = (*notes, f"{run.directory} has not finished: these are its best weights so far")
    module, chosen = policy.prepare(built.module).eval(), "" if run is None else _chosen(run, path)
    trained = Trained(module, policy, input, stored, built.name, path, chosen=chosen, notes=notes)
    return trained if names is None else _rename_classes(trained, names)


def find_pretrained(place: str | Path) -> str | None:
    """Return the full name of the model whose pretrained weights ``place`` asks for; None for a path.

    What exists as a file or a folder is a path, whatever its name.

    Raises:
        ModelError: there is no such model of timm.

    >>> find_pretrained("resnet18.a1_in1k"), find_pretrained("runs/a")
    ('timm/resnet18.a1_in1k', None)
    """
    name = str(place)
    if Path(place).exists() or not (name.startswith("timm/") or name == os.path.basename(name)):  # noqa: PTH119
        return None
    if name.startswith("timm/"):
        return models.find(name).name
    if Path(name).suffix in (".safetensors", ".pth", ".th", ".pt", ".bin", ".ckpt", ".tar"):
        return None
    try:
        return models.find(name).name
    except ModelError:
        return None


def read_class_file(path: str | Path) -> tuple[str, ...] | dict[str, str]:
    """Read the names of a model's outputs, or which class of a model each class of a data set is.

    Args:
        path: a card (``.json``, or the ``.rec`` beside it), or a text with the name of an output on each line, or a
            text whose lines hold a class of the data and a class of the model, with a tab between.

    Returns:
        Names in the order of the outputs; from a text with tabs the model's class by that of the data.

    Raises:
        DataError: no such file, or none of these.
    """
    file = Path(path)
    if file.suffix in (".json", ".rec"):
        return read_classes(file)
    try:
        lines = [line.strip() for line in file.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise DataError(f"cannot read the classes in {file}: {reason}") from error
    if not any("\t" in line for line in lines):
        return tuple(lines)
    pairs = [[cell.strip() for cell in line.split("\t")] for line in lines]
    if wrong := next((line for line, cells in zip(lines, pairs, strict=True) if len(cells) != 2), None):
        raise DataError(f"{file} has the line {wrong!r}: each line needs a class of the data, a tab, and the model's")
    return {cells[0]: cells[1] for cells in pairs}


@dataclass(frozen=True)
class EvaluationData:
    """Images to evaluate a model on, and which of its outputs each of their labels is.

    Args:
        records: the images; closed by whoever uses them.
        ids: of the records to take; None: all.
        outputs: int64, the model's output for each label (-1 for a class without images); None: the label itself.
        matched: how many classes were matched by ``name``, ``synset``, ``synonym``, ``number`` or ``file``; empty
            where the data have the model's class list.
        batch_size: images at a time, as the model's run evaluated its own data; None for other data.
    """

    records: Records
    ids: NDArray[np.int64] | None = None
    outputs: NDArray[np.int64] | None = None
    matched: Mapping[str, int] = field(default_factory=dict)
    batch_size: int | None = None


def evaluate(
    place: str | Path | Run | Trained,
    data: str | Path | EvaluationData | None = None,
    *,
    which: Which = "best",
    classes: str | Path | Sequence[str] | Mapping[str, str] | None = None,
    restrict: bool = False,
    batch_size: int | None = None,
    threads: int | None = None,
    progress: Callable[[int, int], object] | None = None,
    per_image: str | Path | None = None,
) -> Evaluation:
    """Evaluate a run, a weights file or a pretrained model of timm on every image of a data set.

    The data may have fewer classes than the model, and other names for them: see
    :func:`steadytrain.models.class_names.match_classes`. A line on standard error says how many were matched, and how.

    Args:
        place: as for :func:`restore`, or what it returned.
        data: a record file, a folder, or whatever else ``pack`` takes; None takes the run's own validation data.
        which: as for :func:`restore`.
        classes: as for :func:`restore`; or which class of the model (value) a class of the data (key) is, for those
            that are not matched by name, or a text file of both with a tab between.
        restrict: choose among the data's classes only, an easier task; by default among all outputs of the model.
        batch_size: images at a time; None: as the run evaluated its own data, else 128. Nothing but rounding depends
            on it.
        threads: of the loader; None chooses.
        progress: called with the images done so far, and all there are, after each batch.
        per_image: a CSV file to write, with a line for each image (see :mod:`steadytrain.data.predictions`).

    Returns:
        With the outputs for each image, from which :mod:`steadytrain.training.metrics` computes more.

    Raises:
        DataError: the data have classes that the model has not.
        StorageError: ``per_image`` cannot be written.
    """
    mapping = read_class_file(classes) if isinstance(classes, str | Path) else classes
    names = None if isinstance(mapping, Mapping) else mapping
    mapping = mapping if isinstance(mapping, Mapping) else {}
    if isinstance(place, Trained):
        trained = place if names is None else _rename_classes(place, _class_names(names))
    else:
        trained = restore(place, which=which, classes=names)
    opened = data if isinstance(data, EvaluationData) else open_evaluation_data(trained, data, classes=mapping)
    size, module = batch_size or opened.batch_size or 128, trained.module
    if restrict and opened.outputs is not None:
        module = _Restricted(module, opened.outputs[opened.outputs >= 0])
    with opened.records, trained.feed(opened.records, ids=opened.ids, batch_size=size, threads=threads) as feed:

        def batches() -> Iterator[Batch]:
            done = 0
            for batch in feed:
                done += len(batch)
                yield batch if opened.outputs is None else replace(batch, labels=opened.outputs[batch.labels])
                if progress is not None:
                    progress(done, feed.num_samples)

        evaluation = evaluate_module(
            module,
            batches(),
            trained.policy,
            trained.input,
            len(trained.classes),
            num_outputs=feed.num_samples,
        )
        if per_image is not None and evaluation.outputs is not None:
            numbers = np.arange(len(opened.records)) if opened.ids is None else opened.ids
            labels: NDArray[Any] = opened.records.labels[numbers]
            labels = labels if opened.outputs is None else opened.outputs[labels]
            write_predictions(
                Path(per_image), opened.records, numbers, trained.classes, evaluation.outputs, labels=labels
            )
        return evaluation


class _Restricted(nn.Module):
    """A classifier that chooses among some of its outputs: the others get a probability of 0."""

    def __init__(self, module: nn.Module, outputs: NDArray[np.int64]) -> None:
        super().__init__()
        self.module, self.outputs = module, torch.from_numpy(np.unique(outputs))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits = self.module(images)
        chosen = self.outputs.to(logits.device)
        return torch.full_like(logits, -torch.inf).index_copy_(1, chosen, logits[:, chosen])


def open_evaluation_data(
    trained: Trained,
    data: str | Path | None,
    *,
    root: str | Path | None = None,
    labels: str | Path | None = None,
    classes: Mapping[str, str] | None = None,
    say: Say = print_note,
    progress: Progress | None = None,
) -> EvaluationData:
    """Open the images to evaluate a model on, packed first if need be, and match their classes with the model's.

    Args:
        trained: the model.
        data: as for :func:`evaluate`.
        root, labels, say, progress: as for :func:`steadytrain.data.packing.prepare.prepare`.
        classes: the model's class by that of the data, for those that are not matched by name.

    Raises:
        DataError: as for :func:`evaluate`; or no data named for weights that are not a run's.
    """
    if data is None:
        try:
            run = Run.open(trained.path.parent)
        except RunError as error:
            raise DataError(f"{trained.path} belongs to no run: name the data to evaluate on") from error
        sets = open_data(run.recipe.data, seed=run.recipe.seed)
        if sets.val is None:
            sets.close()
            raise DataError(f"{run.directory} was trained without validation data: name the data to evaluate on")
        if sets.val is not sets.train:
            sets.train.close()
        return EvaluationData(sets.val, sets.val_ids, batch_size=run.recipe.batch_size)
    mapping = classes or {}
    prepared = _prepare(trained, data, mapping, root=root, labels=labels, say=say, progress=progress)
    records = open_records(prepared.only("val"))
    try:
        require_outputs(records, len(records.classes), of="its card")
        found = _match(trained, records.classes, records.labels, str(data), mapping)
    except BaseException:
        records.close()
        raise
    if records.classes == trained.classes and len(found) == len(trained.classes) and not mapping:
        return EvaluationData(records)
    outputs = np.full(len(records.classes), -1, np.int64)
    outputs[list(found)] = [match.output for match in found.values()]  # type: ignore[assignment]
    matched = Counter(match.how for match in found.values())
    listed = ", ".join(f"{n:,} by {how}" for how, n in matched.items())
    num_found = len({match.output for match in found.values()})
    say(f"{data} has {num_found:,} of the model's {len(trained.classes):,} classes (matched: {listed})")
    return EvaluationData(records, outputs=outputs, matched=matched)


class _UnmatchedError(DataError):
    """The data have classes that the model has not."""


def _prepare(trained: Trained, data: str | Path, mapping: Mapping[str, str], **options: Any) -> Prepared:
    """Pack under the data's own class names; with the model's list where that fails, as for a folder of one class."""

    def check(listing: Listing) -> None:
        if listing.labels.ndim == 1:
            _match(trained, listing.classes, listing.labels, str(data), mapping)

    options |= {"one_class": True, "only": "val", "shorter_side": packed_side(trained.input.size), "check": check}
    failed: DataError | None = None
    for class_list in (None, trained.classes, trained.synsets):
        if class_list == ():
            continue
        try:
            return prepare(data, classes=class_list, **options)
        except _UnmatchedError:
            raise
        except DataError as error:
            failed = failed if class_list == trained.synsets else error
    assert failed is not None
    raise failed


def _match(
    trained: Trained, names: tuple[str, ...], labels: NDArray[Any], data: str, mapping: Mapping[str, str]
) -> dict[int, Match]:
    """Match the classes that have images, by their labels. Raises DataError where one is no class of the model."""
    used = np.unique(labels).astype(np.int64).tolist()
    if lacking := [name for name in mapping if name not in names]:
        raise _UnmatchedError(f"--classes names classes that {data} has not: {few(lacking)}; it has {few(names)}")

    def match(some: Sequence[str]) -> dict[str, Match]:
        return dict(zip(some, match_classes(some, trained.classes, synsets=trained.synsets), strict=True))

    named = {names[label]: mapping[names[label]] for label in used if names[label] in mapping}
    targets = match(list(named.values()))
    if unknown := [target for target, found in targets.items() if found.output is None]:
        raise _UnmatchedError(f"--classes names classes that {trained.name} has not: {few(unknown)}")
    matches = match([names[label] for label in used if names[label] not in named])
    matches |= {name: replace(targets[target], name=name, how="file") for name, target in named.items()}
    by_label = {label: matches[names[label]] for label in used}
    if unmatched := [found for found in by_label.values() if found.output is None]:
        raise _UnmatchedError(_unmatched(trained, data, unmatched, len(used)))
    return by_label


def _unmatched(trained: Trained, data: str, matches: Sequence[Match], num_classes: int) -> str:
    """Word the refusal of classes that the model has not."""
    listed = [
        match.name
        if not match.candidates
        else f"{match.name} ({' or '.join(trained.classes[k] for k in match.candidates)}?)"
        for match in matches
    ]
    return (
        f"{len(matches):,} of the {num_classes:,} classes in {data} match none of {trained.name}'s"
        f" {len(trained.classes):,}: {few(listed, 20)}. Rename them, leave them out, or give --classes FILE, a text"
        " with a line for each: the class of the data, a tab, the class of the model"
    )


def _policy(numbers: str | None, device: torch.device) -> Policy:
    return _set_policy(recipes.Precision(numbers or "fp32"), device)  # type: ignore[arg-type]


def _set_policy(precision: recipes.Precision, device: torch.device) -> Policy:
    policy = Policy(precision, device)
    set_products(precision, device)
    return policy


def _policy_of_run(run: Run | None, numbers: str | None, device: torch.device) -> tuple[Policy, tuple[str, ...]]:
    """The precision in which a run was evaluated, and a note where this device cannot compute in it."""
    if run is None or numbers is not None:
        return _policy(numbers, device), ()
    try:
        return _set_policy(run.recipe.precision, device), ()
    except RecipeError as error:
        return _policy(None, device), (f"evaluated in fp32, not as the run was: {error}",)


def _run_of(path: Path, about: Mapping[str, Any]) -> Run | None:
    """The run in whose folder weights lie, if they are its own."""
    try:
        run = Run.open(path.parent)
    except RunError:
        return None
    return run if run.recipe.digest == about.get("digest") else None


def _chosen(run: Run, path: Path) -> str:
    """Word which of a run's weights a file holds."""
    best = run.progress().best
    if path.name == "best.safetensors" and best is not None:
        return f"best by validation top-1, epoch {epoch(best.epoch)}"
    if path.name == run.weights.name:
        return "last" if best is not None else "last: nothing was validated"
    return ""


def _weights_file(place: Path, which: Which) -> Path:
    if not place.is_dir():
        if not place.exists():
            raise RunError(
                f"{place} is neither a run's folder, a weights file nor a model's name: there is nothing of that name"
            )
        return place
    run = Run.open(place)
    files = [place / "best.safetensors", run.weights]
    existing = [path for path in (files if which == "best" else reversed(files)) if path.exists()]
    if not existing:
        raise RunError(f"{place} has no weights yet: they are written at its first evaluation and at its end")
    return existing[0]


def _restore_foreign(path: Path, model: str | None, policy: Policy, names: tuple[str, ...] | None) -> Trained:
    """Load a file that does not say what model it is of."""
    if model is None:
        raise ModelError(f"{path} does not say what model it is of: name it with --model")
    spec = recipes.Model(model, weights=str(path))
    outputs = models.num_outputs(spec, allow_import=True)
    built = models.build(spec, num_classes=outputs, channels=3, size=None, allow_import=True)
    trained = _use_foreign(built, policy, path, outputs, names)
    notes = [*trained.notes]
    if built.scaling_guessed or built.input.mean is None:
        whose = f"{built.name}'s" if built.scaling_guessed else "ImageNet's"
        notes.append(build.scaling_remark(built, trained.input, whose, whose))
    if trained.synsets:
        notes.append(
            f"{path} names no classes: its {outputs:,} outputs are taken for ImageNet's (or give --classes FILE)"
        )
    return replace(trained, notes=tuple(notes))


def _restore_pretrained(model: str, policy: Policy, names: tuple[str, ...] | None) -> Trained:
    """Load the pretrained weights of a model of timm, which are fetched if they are not on this machine."""
    if not pretrained_licence(model):
        raise ModelError(
            f"there are no pretrained weights of {model}: name a run's folder, or a weights file with --model {model}"
        )
    spec = recipes.Model(model, pretrained=True)
    outputs = models.num_outputs(spec)
    if names is None and not imagenet_synsets(outputs):
        what = f"{outputs:,} outputs without names" if outputs else "no classifier"
        raise ModelError(
            f"the pretrained weights of {model} have {what}: choose those of an ImageNet classifier (steady models"
            f" --weights lists them), or fine-tune these (steady finetune DATA --model {model})"
        )
    built = models.build(spec, num_classes=outputs, channels=3, size=None)
    return _use_foreign(built, policy, Path(built.weights), outputs, names)


def _use_foreign(
    built: models.Built, policy: Policy, path: Path, outputs: int, names: tuple[str, ...] | None
) -> Trained:
    """Make a network that steadytrain did not train ready; without names its classes are ImageNet's, or numbers."""
    synsets = imagenet_synsets(outputs)
    classes = names_of_synsets(synsets) or tuple(str(number) for number in range(outputs))
    input = built.input.filled(224, build.DEFAULT_MEAN, build.DEFAULT_STD)
    module = policy.prepare(built.module).eval()
    trained = Trained(module, policy, input, classes, built.name, path, synsets=synsets, notes=built.notes)
    return trained if names is None else _rename_classes(trained, names)


def _class_names(classes: str | Path | Sequence[str]) -> tuple[str, ...]:
    """The names of a model's outputs from what a user gave. Raises DataError."""
    names = read_class_file(classes) if isinstance(classes, str | Path) else classes
    if isinstance(names, Mapping):
        raise DataError(f"{classes} has two columns: to name a model's outputs give one name on each line")
    if twice := [name for name, uses in Counter(names).items() if uses > 1]:
        raise DataError(f"--classes has {few(twice)} more than once: each output needs a name of its own")
    return tuple(names)


def _rename_classes(trained: Trained, names: tuple[str, ...]) -> Trained:
    if len(names) != len(trained.classes):
        raise DataError(
            f"--classes has {len(names):,} names, and {trained.name} has {len(trained.classes):,} outputs: give one"
            " name for each, in their order (or lines of a class of the data, a tab and a class of the model)"
        )
    return replace(trained, classes=names, synsets=())


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


def image_files(paths: Sequence[str | Path]) -> list[Path]:
    """List image files: those named, and for a folder those in it and below. Raises DataError for one without any."""
    files: list[Path] = []
    for path in map(Path, paths):
        if not path.is_dir():
            files.append(path)
            continue
        inside = sorted(p for p in path.rglob("*") if is_image(p.name) and not is_ignored(p.name) and p.is_file())
        if not inside:
            raise DataError(f"{path} is a folder without images: name image files, or a folder of them")
        files += inside
    return files


def predict(
    place: str | Path | Run | Trained,
    paths: str | Path | Sequence[str | Path],
    *,
    top: int = 5,
    which: Which = "best",
    classes: str | Path | Sequence[str] | None = None,
) -> Iterator[Prediction]:
    """Predict the ``top`` classes of each file, in order; one that cannot be read says so and the next one follows.

    Args:
        place: as for :func:`restore`, or what it returned.
        paths: an image file or several; a folder stands for the images in it and below, in the order of their names.
        top: classes to return for each.
        which, classes: as for :func:`restore`.

    Raises:
        DataError: a folder without images.
    """
    files = image_files([paths] if isinstance(paths, str | Path) else paths)
    if isinstance(place, Trained):
        trained = place if classes is None else _rename_classes(place, _class_names(classes))
    else:
        trained = restore(place, which=which, classes=classes)
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
