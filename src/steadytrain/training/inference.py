"""Trained weights in use: restored from a run, a file or timm, evaluated on data, asked for classes of image files."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from steadytrain import config as recipes
from steadytrain import models
from steadytrain.config.plain import build as build_typed
from steadytrain.data.loader import Batch, ImageLoader, packed_side
from steadytrain.data.packing.pack import Progress
from steadytrain.data.packing.prepare import Prepared, Say, prepare, print_note
from steadytrain.data.recordio.card import LabelNames, read_classes
from steadytrain.data.recordio.reader import Records
from steadytrain.data.sources.filenames import expand, few, is_ignored, is_image, is_pattern
from steadytrain.data.sources.listing import Listing
from steadytrain.data.sources.unpacked import upright
from steadytrain.errors import DataError, ModelError, RecipeError, RunError
from steadytrain.format import epoch, score_name
from steadytrain.interop.mxnet.checkpoint import open_checkpoint
from steadytrain.interop.mxnet.files import PREFIX
from steadytrain.machine import facts
from steadytrain.machine.process import keep_memory
from steadytrain.models import Input, exported
from steadytrain.models.class_names import Match, imagenet_synsets, match_classes, names_of_synsets
from steadytrain.models.registry import licence_note, pretrained_licence
from steadytrain.run import Run
from steadytrain.training import build, checkpoints
from steadytrain.training.compute.precision import Policy, set_products
from steadytrain.training.data import load, open_data, open_records, require_outputs
from steadytrain.training.evaluation import Evaluation, evaluate_module, logits_of, write_per_image
from steadytrain.training.memory import PassLimit

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
        is_multi_label: an image may have several of the classes, each of which has a probability of its own.
        temperature: by which logits are divided before they become probabilities: 1 where it was not calibrated.
        calibrated_on: the digest of the images that it was fitted on, empty where it was not.
        licence: of the weights, or of those that they were trained from; empty where there are none.
        symbol: MXNet's symbol JSON that it was made of; empty elsewhere.
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
    is_multi_label: bool = False
    temperature: float = 1.0
    calibrated_on: str = ""
    licence: str = ""
    symbol: str = ""

    @property
    def title(self) -> str:
        """The model's name for others to read: that of an MXNet checkpoint without its folder."""
        return f"{PREFIX}{Path(self.name).name}" if self.name.startswith(PREFIX) else self.name

    def probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        """Turn logits [B, K] into probabilities: of each label by itself where an image may have several."""
        scaled = logits.double() / self.temperature
        return scaled.sigmoid() if self.is_multi_label else scaled.softmax(1)

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
        place: a run or its folder; a weights file: one that steadytrain wrote, MXNet's (``.params``, with its symbol
            beside it, or ``mxnet:PREFIX``), or another together with ``model``; an exported file or folder
            (:mod:`steadytrain.export`), whatever engine runs it; or the name of a pretrained model of timm, such as
            ``timm/resnet18.a1_in1k``: its weights are fetched once, and ``Trained.notes`` says what their licence
            restricts.
        which: of a run, the ``best`` weights by validation top-1 (of several labels: mAP), whose figures the run
            reports as its result, or the ``last``. Without validation there are only the last; while a run goes on,
            only the best so far.
        model: name of the model. Needed for files that do not say it, and for a ``pkg.mod:factory``, which
            is only ever imported when it is named here, or in your own code as the model of the run.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:1``.
        numbers: precision, as in :class:`steadytrain.config.Precision`; None: the run's, else ``fp32``. An exported
            file has its own.
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
    if not isinstance(place, Run) and model is None and is_mxnet(place):
        return _restore_mxnet(str(place), _policy(numbers, build.choose_device(device)), names)
    path = _weights_file(place.directory if isinstance(place, Run) else Path(place), which)
    if path.suffix in exported.SUFFIXES:
        return _restore_exported(path, model, device, numbers, names)
    tensors, about = checkpoints.read_weights(path) if path.suffix == ".safetensors" else ({}, {})
    if "model" not in about:
        return _restore_foreign(path, model, _policy(numbers, build.choose_device(device)), names)
    try:
        spec = recipes.Model(about["model"]["name"], options=about["model"]["options"])
        input, stored = build_typed(Input, about["input"]), tuple(str(name) for name in about["classes"])
        calibrated = about.get("calibration") or {}
        temperature, calibrated_on = float(calibrated.get("temperature", 1)), str(calibrated.get("data", ""))
        if not 0 < temperature < float("inf"):
            raise ValueError(f"temperature {temperature:g}")
    except (AttributeError, KeyError, TypeError, ValueError, RecipeError) as error:
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
        symbol=str(about.get("symbol", "")),
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
    trained = Trained(
        module,
        policy,
        input,
        stored,
        built.name,
        path,
        synsets=tuple(about.get("synsets", ())),
        chosen=chosen,
        notes=notes,
        is_multi_label=bool(about.get("multi_label")),
        temperature=temperature,
        calibrated_on=calibrated_on,
        licence=str(about.get("licence", "")),
        symbol=built.symbol,
    )
    return trained if names is None else _rename_classes(trained, names)


def _restore_exported(
    path: Path, model: str | None, device: str, numbers: str | None, names: tuple[str, ...] | None
) -> Trained:
    """Open an exported file with its engine; images, classes and temperature are those that it describes."""
    if model is not None:
        raise ModelError(f"{path} is a whole network, not the weights of one: drop --model {model}")
    if device != "auto":
        build.choose_device(device)
    opened = exported.open_exported(path, device=device)
    described = opened.description
    if numbers not in (None, described.numbers):
        raise ModelError(f"{path} was exported to compute in {described.numbers}, not in {numbers}: drop --precision")
    note = licence_note(described.licence) if described.licence else None
    trained = Trained(
        opened.module,
        _set_policy(recipes.Precision("fp32", channels_last=False), opened.device),
        described.input,
        described.classes,
        described.model,
        path,
        synsets=described.synsets,
        chosen=f"{opened.engine}, {described.numbers}",
        notes=(note,) if note else (),
        is_multi_label=described.is_multi_label,
        temperature=described.temperature,
        calibrated_on=described.calibrated_on,
        licence=described.licence,
    )
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
    if is_mxnet(name) or Path(place).exists() or not (name.startswith("timm/") or name == os.path.basename(name)):  # noqa: PTH119
        return None
    if name.startswith("timm/"):
        return models.find(name).name
    if Path(name).suffix in (".safetensors", ".pth", ".th", ".pt", ".bin", ".ckpt", ".tar", *exported.SUFFIXES):
        return None
    try:
        return models.find(name).name
    except ModelError:
        return None


def is_mxnet(place: str | Path) -> bool:
    """Return whether ``place`` names an MXNet checkpoint.

    >>> is_mxnet("mxnet:resnet-18"), is_mxnet("model-0003.params"), is_mxnet("model-symbol.json"), is_mxnet("runs/a")
    (True, True, True, False)
    """
    return str(place).startswith(PREFIX) or str(place).endswith((".params", "-symbol.json"))


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
        outputs: int64, the model's output for each label (-1 for a class without images); None: the label itself. Where
            an image may have several, the column of the data for each of the model's outputs.
        matched: how many classes were matched by ``name``, ``synset``, ``synonym``, ``number`` or ``file``; empty
            where the data have the model's class list.
        batch_size: images at a time, as the model's run evaluated its own data; None for other data.
    """

    records: Records
    ids: NDArray[np.int64] | None = None
    outputs: NDArray[np.int64] | None = None
    matched: Mapping[str, int] = field(default_factory=dict)
    batch_size: int | None = None

    def relabel(self, batch: Batch) -> Batch:
        """Return a batch of them with the model's labels in place of their own."""
        if self.outputs is None:
            return batch
        several = batch.labels.ndim > 1
        return replace(batch, labels=batch.labels[:, self.outputs] if several else self.outputs[batch.labels])

    @property
    def digest(self) -> str:
        """sha256 (hex) of the images: which they are, and in what files."""
        ids = b"" if self.ids is None else self.ids.tobytes()
        return hashlib.sha256(self.records.digest.encode() + ids).hexdigest()


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
    threshold: float = 0.5,
    keep_logits: bool = False,
    say: Say = print_note,
) -> Evaluation:
    """Evaluate a run, a weights file, an exported file or a pretrained model of timm on every image of a data set.

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
        threshold: in that file, of several labels those with a probability above it are predicted.
        keep_logits: return the logits of each image, too.
        say: takes a line where memory runs out, and fewer images go through the network at a time from there on.

    Returns:
        With the outputs for each image, from which :mod:`steadytrain.training.metrics` computes more.

    Raises:
        DataError: the data have classes that the model has not.
        StorageError: ``per_image`` cannot be written.

    >>> import tempfile, timm
    >>> from PIL import Image
    >>> folder = Path(tempfile.mkdtemp())
    >>> for name in ("tench", "goldfish"):
    ...     (folder / "fish" / name).mkdir(parents=True)
    ...     Image.new("RGB", (64, 64)).save(folder / "fish" / name / "1.png")
    >>> torch.save(timm.create_model("test_resnet").state_dict(), folder / "stock.pth")
    >>> trained = restore(folder / "stock.pth", model="timm/test_resnet")
    >>> evaluate(trained, folder / "fish").n
    2
    """
    mapping = read_class_file(classes) if isinstance(classes, str | Path) else classes
    names = None if isinstance(mapping, Mapping) else mapping
    mapping = mapping if isinstance(mapping, Mapping) else {}
    if isinstance(place, Trained):
        trained = place if names is None else _rename_classes(place, _class_names(names))
    else:
        trained = restore(place, which=which, classes=names)
    opened = data if isinstance(data, EvaluationData) else open_evaluation_data(trained, data, classes=mapping, say=say)
    size, module = batch_size or opened.batch_size or 128, trained.module
    if restrict and trained.is_multi_label:
        raise DataError("--restrict chooses among classes, and an image may have several of these labels: drop it")
    if restrict and opened.outputs is not None:
        module = _Restricted(module, opened.outputs[opened.outputs >= 0])
    with opened.records, trained.feed(opened.records, ids=opened.ids, batch_size=size, threads=threads) as feed:

        def batches() -> Iterator[Batch]:
            num_images = 0
            for batch in feed:
                num_images += len(batch)
                yield opened.relabel(batch)
                if progress is not None:
                    progress(num_images, feed.num_samples)

        evaluation = evaluate_module(
            module,
            batches(),
            trained.policy,
            trained.input,
            len(trained.classes),
            num_outputs=feed.num_samples,
            is_multi_label=trained.is_multi_label,
            keep_logits=keep_logits,
            temperature=trained.temperature,
            say=say,
        )
        if per_image is not None:
            numbers = np.arange(len(opened.records)) if opened.ids is None else opened.ids
            labels: NDArray[Any] = opened.records.labels[numbers]
            write_per_image(
                Path(per_image),
                opened.records,
                numbers,
                trained.classes,
                evaluation,
                labels=labels if opened.outputs is None or trained.is_multi_label else opened.outputs[labels],
                threshold=threshold,
                temperature=trained.temperature,
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
        sets = open_data(run.data, seed=run.recipe.seed)
        if sets.val is None:
            sets.close()
            raise DataError(f"{run.directory} was trained without validation data: name the data to evaluate on")
        if sets.val is not sets.train:
            sets.train.close()
        return EvaluationData(sets.val, sets.val_ids, batch_size=run.recipe.batch_size)
    mapping = classes or {}
    if trained.is_multi_label:
        return _open_labels(trained, data, mapping, root=root, labels=labels, say=say, progress=progress)
    prepared = _prepare(trained, data, mapping, root=root, labels=labels, say=say, progress=progress)
    records = open_records(prepared.only("val"))
    try:
        if records.labels.ndim > 1:
            raise DataError(
                f"{data} has several labels for each image, and {trained.name} names one class for each: give data with"
                " one class for each image"
            )
        require_outputs(records, len(records.classes), of="its card")
        matches = _match(trained, records.classes, records.labels, str(data), mapping)
    except BaseException:
        records.close()
        raise
    if records.classes == trained.classes and len(matches) == len(trained.classes) and not mapping:
        return EvaluationData(records)
    outputs = np.full(len(records.classes), -1, np.int64)
    outputs[list(matches)] = [match.output for match in matches.values()]  # type: ignore[assignment]
    matched = Counter(match.how for match in matches.values())
    listed = ", ".join(f"{n:,} by {how}" for how, n in matched.items())
    num_found = len({match.output for match in matches.values()})
    say(f"{data} has {num_found:,} of the model's {len(trained.classes):,} classes (matched: {listed})")
    return EvaluationData(records, outputs=outputs, matched=matched)


def _open_labels(trained: Trained, data: str | Path, mapping: Mapping[str, str], **options: Any) -> EvaluationData:
    """Open images with several labels each, those of the model, in any order. Raises DataError for others."""
    if mapping:
        raise DataError(
            f"--classes names classes one for one, and an image may have several of {trained.name}'s: drop it"
        )
    options |= {"trainable": True, "only": "val", "shorter_side": packed_side(trained.input.size)}
    labels = LabelNames(trained.classes)
    records = open_records(
        prepare(data, classes=None if Path(data).suffix == ".rec" else labels, **options).only("val")
    )
    names = list(records.class_list)
    if records.labels.ndim > 1 and sorted(names) == sorted(labels):
        is_same = tuple(names) == labels
        return EvaluationData(records, outputs=None if is_same else np.array([names.index(name) for name in labels]))
    if records.labels.ndim > 1 and records.card is None and len(names) == len(labels):
        say = options["say"]
        say(f"{data} does not name its labels: they are taken for the model's, in their order")
        return EvaluationData(records)
    records.close()
    has = "one class" if records.labels.ndim == 1 else f"other labels ({few(sorted(set(names) ^ set(labels)))})"
    raise DataError(f"{data} has {has} for each image, and {trained.name} names several labels of {few(labels)}")


class _UnmatchedError(DataError):
    """The data have classes that the model has not."""


def _prepare(trained: Trained, data: str | Path, mapping: Mapping[str, str], **options: Any) -> Prepared:
    """Pack under the data's own class names; with the model's list where that fails, as for a folder of one class."""

    def check(listing: Listing) -> None:
        if listing.labels.ndim == 1:
            _match(trained, listing.classes, listing.labels, str(data), mapping)

    options |= {"trainable": True, "only": "val", "shorter_side": packed_side(trained.input.size), "check": check}
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
    if unknown := [target for target, result in targets.items() if result.output is None]:
        raise _UnmatchedError(f"--classes names classes that {trained.name} has not: {few(unknown)}")
    matches = match([names[label] for label in used if names[label] not in named])
    matches |= {name: replace(targets[target], name=name, how="file") for name, target in named.items()}
    by_label = {label: matches[names[label]] for label in used}
    if unmatched := [result for result in by_label.values() if result.output is None]:
        raise _UnmatchedError(_unmatched(trained, data, unmatched, len(used)))
    return by_label


def _unmatched(trained: Trained, data: str, matches: Sequence[Match], num_classes: int) -> str:
    """Return the error for classes that the model does not have."""
    listed = [
        match.name
        if not match.candidates
        else f"{match.name} ({' or '.join(trained.classes[k] for k in match.candidates)}?)"
        for match in matches
    ]
    return (
        f"{len(matches):,} of the {num_classes:,} classes in {data} match none of {trained.name}'s"
        f" {len(trained.classes):,}: {few(listed, 20)}. Rename them, leave them out, or give --classes FILE, a text"
        " file with a line for each: the class of the data, a tab, the class of the model"
    )


def _policy(numbers: str | None, device: torch.device) -> Policy:
    return _set_policy(recipes.Precision(numbers or "fp32"), device)  # type: ignore[arg-type]


def _set_policy(precision: recipes.Precision, device: torch.device) -> Policy:
    policy = Policy(precision, device)
    set_products(precision, device)
    if device.type == "cpu":  # as training does: else each pass takes its memory from the system, and gives it back
        keep_memory(facts.memory_bytes())
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
    """Describe which of a run's weights a file holds."""
    best = run.progress().best
    if path.name == "best.safetensors" and best is not None:
        return f"best by validation {score_name(best.mean_ap is not None)}, epoch {epoch(best.epoch)}"
    if path.name == run.weights.name:
        return "last" if best is not None else "last: nothing was validated"
    return ""


def _weights_file(place: Path, which: Which) -> Path:
    if not place.is_dir():
        if not place.exists():
            raise RunError(
                f"{place} is neither a run's folder, a file of weights or an exported one, nor a model's name: there is"
                " nothing of that name"
            )
        return place
    if not (place / "recipe.json").exists() and (place / "config.json").exists():
        return place / "model.safetensors"  # a folder as the Hugging Face hub has them
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


def _restore_mxnet(place: str, policy: Policy, names: tuple[str, ...] | None) -> Trained:
    """Load an MXNet checkpoint; its classes are those of ``synset.txt`` beside it, else ImageNet's, or numbers."""
    spec = recipes.Model(place if place.startswith(PREFIX) else f"{PREFIX}{place}", pretrained=True)
    checkpoint = open_checkpoint(spec.name)
    outputs = checkpoint.network().num_outputs
    built = models.build(spec, num_classes=outputs, channels=checkpoint.channels, size=None)
    trained = _use_foreign(built, policy, checkpoint.require_params(), outputs, names)
    if names is None and len(checkpoint.classes) == outputs:
        trained = replace(trained, classes=checkpoint.classes, synsets=checkpoint.synsets)
    elif names is None and trained.synsets:
        trained = replace(trained, notes=(*trained.notes, f"its {outputs:,} outputs are taken for ImageNet's classes"))
    return trained


def _restore_pretrained(model: str, policy: Policy, names: tuple[str, ...] | None) -> Trained:
    """Load the pretrained weights of a model of timm, which are fetched if they are not on this machine."""
    if not pretrained_licence(model):
        raise ModelError(
            f"there are no pretrained weights of {model}: name a run's folder, or a weights file with --model {model}"
        )
    spec = recipes.Model(model, pretrained=True)
    outputs = models.num_outputs(spec)
    if names is None and not imagenet_synsets(outputs):
        outcome = f"{outputs:,} outputs without names" if outputs else "no classifier"
        raise ModelError(
            f"the pretrained weights of {model} have {outcome}: choose those of an ImageNet classifier (steady models"
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
    about: dict[str, Any] = {"synsets": synsets, "notes": built.notes, "licence": built.licence, "symbol": built.symbol}
    trained = Trained(module, policy, input, classes, built.name, path, **about)
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
    """The likeliest classes of one image, best first, with their probabilities; or why there are none.

    Of several labels those above the threshold, of which there may be none. ``path``: of the file; of an image of a
    record file ``photos.rec:17``, its number behind the colon; ``-`` of bytes.
    """

    path: Path
    classes: tuple[str, ...] = ()
    probabilities: tuple[float, ...] = ()
    error: str | None = None


Images = str | Path | bytes
"""An image file, a folder of them, a pattern such as ``photos/*.jpg``, a record file, or the bytes of an image."""


class Files:
    """Images wherever they lie, as a source for the loader; every label is 0. Close it, or use it as a context manager.

    Image files are turned upright by their EXIF orientation, as packing turns them; images of a record file are packed.

    Args:
        images: one or several. A folder stands for the images in it and below, in the order of their names, and a
            record file for all of its images.

    Attributes:
        shorter_side: in pixels, to which a file that has to be turned is scaled down on the way; None: none is.

    Raises:
        DataError: a folder without images, a pattern that fits no file, or a record file that cannot be opened.
    """

    def __init__(self, images: Images | Sequence[Images]) -> None:
        self.shorter_side: int | None = None
        self._places: list[Path | bytes | tuple[Records, int]] = []
        with ExitStack() as stack:
            for each in [images] if isinstance(images, str | Path | bytes) else images:
                for place in [each] if isinstance(each, bytes) else image_files([each]):
                    if isinstance(place, bytes) or place.suffix != ".rec":
                        self._places.append(place)
                        continue
                    records = stack.enter_context(Records.open(place))
                    records.require_images()
                    self._places += [(records, number) for number in range(len(records))]
            self._opened = stack.pop_all()
        self.labels: NDArray[np.int64] = np.zeros(len(self._places), np.int64)

    def __len__(self) -> int:
        return len(self._places)

    def image(self, i: int) -> bytes | memoryview:
        """The encoded bytes of image ``i``, upright. Raises DataError, BadImageError."""
        place = self._places[i]
        if isinstance(place, tuple):
            return place[0].image(place[1])
        if isinstance(place, bytes):
            return upright(place, shorter_side=self.shorter_side)
        try:
            return upright(place.read_bytes(), shorter_side=self.shorter_side)
        except OSError as error:
            raise DataError(f"cannot read {place}: {error.strerror}") from error

    def path(self, i: int) -> Path:
        """The name of image ``i``, as in :class:`Prediction`."""
        place = self._places[i]
        if isinstance(place, tuple):
            return Path(f"{place[0].path}:{place[1]}")
        return Path("-") if isinstance(place, bytes) else place

    def close(self) -> None:
        """Let go of record files."""
        self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def image_files(paths: Sequence[str | Path]) -> list[Path]:
    """List files: those named, for a folder the images in it and below, for a pattern the files that it fits.

    Raises:
        DataError: a folder without images, or a pattern that fits no file.
    """
    files: list[Path] = []
    for path in map(Path, paths):
        if not path.exists() and is_pattern(str(path)):
            files += image_files(expand(str(path)))
            continue
        if not path.is_dir():
            files.append(path)
            continue
        named = (p for p in path.rglob("*") if is_image(p.name) and not is_ignored(p.name))
        inside = sorted(p for p in named if p.is_file() or p.is_symlink())  # a broken link is an image that is missing
        if not inside:
            raise DataError(f"{path} is a folder without images: name image files, or a folder of them")
        files += inside
    return files


PREDICTED_AT_ONCE, PREDICTED_PIXELS = 64, 2**19
"""Images that go through the network together at most, and on a CPU their pixels: more leave its caches. MobileNetV2 at
224 pixels, on one core: 71 images a second one by one, 8 at a time 58, 64 at a time 37; ResNet-20 at 32 pixels: 600,
1,630 and 1,910 (2026-11-24)."""


def predict(
    place: str | Path | Run | Trained,
    images: Images | Sequence[Images] | Files,
    *,
    top: int | None = None,
    which: Which = "best",
    classes: str | Path | Sequence[str] | None = None,
    threshold: float = 0.5,
    batch_size: int | None = None,
    threads: int | None = None,
) -> Iterator[Prediction]:
    """Predict the ``top`` classes of each image, in order; one that cannot be read says so and the next one follows.

    Images are read and decoded by the loader's threads, ahead of the network.

    Args:
        place: as for :func:`restore`, or what it returned.
        images: one or several, as for :class:`Files`; or those, opened, which are left open.
        top: classes to return for each at most; None: 5, or all labels above the threshold.
        which, classes: as for :func:`restore`.
        threshold: of several labels, those with a probability above it.
        batch_size: images at a time, fewer where memory runs out; None: up to 64, on a CPU fewer of large images.
        threads: that load images; None chooses.

    Raises:
        DataError: a folder without images, a pattern that fits no file, or a record file that cannot be opened.

    >>> import tempfile, timm
    >>> from PIL import Image
    >>> folder = Path(tempfile.mkdtemp())
    >>> Image.new("RGB", (64, 64)).save(folder / "1.png")
    >>> torch.save(timm.create_model("test_resnet").state_dict(), folder / "stock.pth")
    >>> trained = restore(folder / "stock.pth", model="timm/test_resnet")
    >>> good, bad = predict(trained, [folder / "1.png", folder / "stock.pth"], top=3)
    >>> len(good.classes), bad.error is None
    (3, False)
    """
    if isinstance(place, Trained):
        trained = place if classes is None else _rename_classes(place, _class_names(classes))
    else:
        trained = restore(place, which=which, classes=classes)
    top = min(top or (len(trained.classes) if trained.is_multi_label else 5), len(trained.classes))
    with ExitStack() as stack:
        source = images if isinstance(images, Files) else stack.enter_context(Files(images))
        if not len(source):
            return
        errors: dict[int, str] = {}
        crop, pin = build.evaluation_crop(trained.input), trained.policy.device.type == "cuda"
        source.shorter_side = packed_side(crop.size)
        if batch_size is None:
            fitting = PREDICTED_PIXELS // crop.size**2 if trained.policy.device.type == "cpu" else PREDICTED_AT_ONCE
            batch_size = max(1, min(PREDICTED_AT_ONCE, fitting))
        options: dict[str, Any] = {"batch_size": min(batch_size, len(source)), "threads": threads, "pin": pin}
        options["on_bad"] = lambda bad: errors.update({bad.id: bad.reason})
        feed = stack.enter_context(ImageLoader(source, crop, train=False, skip_bad=True, **options))
        limit, first = PassLimit("evaluation", on_halved=lambda halved: print_note(halved.message)), 0
        for batch in load(feed, trained.policy.device):
            n = len(batch.images)
            with torch.no_grad():
                logits = logits_of(trained.module, batch.images, trained.policy, trained.input, limit)
                ranked = logits.topk(top)  # by logits: the temperature changes no order
                p = trained.probabilities(logits).gather(1, ranked.indices)
            rows = zip(range(first, first + n), ranked.indices.tolist(), p.tolist(), strict=True)
            for number, outputs, probabilities in rows:
                path = source.path(number)
                if number in errors:
                    yield Prediction(path, error=errors.pop(number))
                    continue
                if trained.is_multi_label:  # the likeliest come first
                    outputs = outputs[: sum(value > threshold for value in probabilities)]
                names = tuple(trained.classes[k] for k in outputs)
                yield Prediction(path, names, tuple(probabilities[: len(names)]))
            first += n
