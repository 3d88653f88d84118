"""Restore trained weights from a run, a file, a foreign checkpoint or timm: a model with classes and preprocessing."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from steadytrain import config as recipes
from steadytrain import models
from steadytrain.config.factories import OBJECT, checkpoint_format
from steadytrain.config.figures import FIGURES, USUAL
from steadytrain.config.phases import parse_train
from steadytrain.config.plain import build as build_typed
from steadytrain.data.loader import ImageLoader
from steadytrain.data.recordio.card import read_classes
from steadytrain.deprecation import renamed_parameter
from steadytrain.errors import DataError, ModelError, RecipeError, RunError
from steadytrain.files import read_text, require_content
from steadytrain.format import Say, epoch, few, score_name
from steadytrain.machine import facts
from steadytrain.machine.process import keep_memory
from steadytrain.models import Input, exported
from steadytrain.models.class_names import imagenet_synsets, names_of_synsets
from steadytrain.models.registry import HUB, ModelSource, licence_note
from steadytrain.run import Run
from steadytrain.training import build, checkpoints
from steadytrain.training.data import DataSets
from steadytrain.training.device import choose_device, require_usable
from steadytrain.training.metrics import even_shift
from steadytrain.training.precision import Policy, exact, set_products
from steadytrain.training.remarks import scaling_remark, scaling_remarks
from steadytrain.training.state import describe_nonfinite

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
        symbol: as of :class:`steadytrain.models.Built`.
        is_unnamed: its classes are called by numbers, their places in records that name none.
        class_counts, weighting, prior, prior_shift, limits: as of :class:`steadytrain.models.exported.Description`.
        is_probe: its classifier was fitted to the features of a network that saw none of its run's images.
    """

    module: nn.Module = field(repr=False)
    policy: Policy = field(repr=False)
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
    is_unnamed: bool = False
    class_counts: tuple[int, ...] = ()
    weighting: str = ""
    prior: str = ""
    prior_shift: tuple[float, ...] = ()
    is_probe: bool = False
    limits: Mapping[str, float | str] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """The model's name for others to read: that of a foreign checkpoint without its folder."""
        prefix = checkpoint_format(self.name)
        return f"{prefix}:{Path(self.name.removeprefix(f'{prefix}:')).name}" if prefix else self.name

    @property
    def other_shift(self) -> NDArray[np.float64] | None:
        """Shift of logits to those of the frequencies to compare with, [K]: those learned, or else equal ones."""
        if self.prior:
            return -np.array(self.prior_shift)
        shift = None if self.is_multi_label else even_shift(self.class_counts, self.weighting)
        return None if shift is None else shift * self.temperature

    @property
    def described(self) -> dict[str, Any]:
        """Facts for the description of an exported file, by the same names."""
        return {name: getattr(self, name) for name in DESCRIBED}

    def probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        """Turn logits [B, K] into probabilities: of each label by itself where an image may have several."""
        scaled = exact(logits) / self.temperature
        return scaled.sigmoid() if self.is_multi_label else scaled.softmax(1)

    def feed(
        self, source: Any, *, ids: NDArray[np.int64] | None = None, batch_size: int, threads: int | None
    ) -> ImageLoader:
        """Open an exact pass over a source of images, cropped as this model wants them."""
        crop, pin = build.evaluation_crop(self.input), self.policy.device.type == "cuda"
        return ImageLoader(source, crop, batch_size=batch_size, ids=ids, train=False, threads=threads, pin=pin)


DESCRIBED = tuple({each.name for each in fields(Trained)} & {each.name for each in fields(exported.Description)})


@renamed_parameter("numbers", "precision", since="0.2", until="0.4")
def restore(
    place: str | Path | Run,
    *,
    which: Which = "best",
    model: models.Given | None = None,
    device: str = "auto",
    precision: str | None = None,
    classes: str | Path | Sequence[str] | None = None,
    size: int | None = None,
    say: Say = lambda message: None,
) -> Trained:
    """Load trained weights into their model.

    Args:
        place: a run or its folder; a weights file: one that steadytrain wrote, MXNet's (``.params``, with its symbol
            beside it, or ``mxnet:PREFIX``), or another together with ``model``; an exported file or folder
            (:mod:`steadytrain.export`), whatever engine runs it; or the name of a pretrained model of timm, such as
            ``timm/resnet18.a1_in1k``: its weights are fetched once, and ``Trained.notes`` says what their licence
            restricts.
        which: of a run, the ``best`` weights on the validation images (``every.best``), whose figures the run
            reports as its result, or the ``last``. Without validation there are only the last; while a run goes on,
            only the best so far.
        model: name of the model. Needed for files that do not say it, and for a ``pkg.mod:factory``, which
            is only ever imported when it is named here, or in your own code as the model of the run. Of a run whose
            model was a Python object: that, or a function that makes the like.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:1``.
        precision: as in :class:`steadytrain.config.Precision`; None: the run's, else ``fp32``. An exported file has
            its own.
        classes: names of the outputs, in their order; or a file of them: a card (``.json``), or a text with a class on
            each line. None: those in the weights file, else ImageNet's if it has a classifier of as many outputs.
        size: of an MXNet checkpoint whose arrays fit no usual size of images: their side, in pixels.
        say: takes a line before the networks are tried that weights without a name may be of, which takes seconds.

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
    names = None if classes is None else class_names(classes)
    model = None if model is None else models.name_model(model)
    if isinstance(place, str | Path):
        run = None
        if (source := find_pretrained(place)) is not None:
            if model is not None:
                raise ModelError(f"{place} is a model's name: drop --model {model}")
            return _restore_pretrained(source, _policy(precision, choose_device(device)), names)
        if model is None and checkpoint_format(str(place)):
            return _restore_checkpoint(str(place), _policy(precision, choose_device(device)), names, size)
        path = weights_file(Path(place), which)
    else:
        run = Run.open(place)
        path = weights_file(run.directory, which)
    if exported.is_exported(path):
        return _restore_exported(path, model, device, precision, names)
    if path.is_file():
        require_content(path)
    tensors, about = checkpoints.read_weights(path) if path.suffix == ".safetensors" else ({}, {})
    if "model" not in about:
        return _restore_foreign(path, model, _policy(precision, choose_device(device)), names, say)
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
    if model is not None and spec.name.startswith(OBJECT):
        spec = replace(spec, name=model)
    elif model is not None and len({models.find(name, allow_import=True).name for name in (model, spec.name)}) > 1:
        raise ModelError(f"{path} holds weights of {spec.name}, not of {model}: drop --model")
    is_named = run is not None and "name" not in run.recipe.model.from_file and run.recipe.model.name == spec.name
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
    policy, notes = _policy_of_run(run, about.get("step", 0), precision, choose_device(device))
    if run is not None and not run.weights.exists():
        notes = (*notes, f"{run.directory} has not finished: these are its best weights so far")
    if fault := describe_nonfinite(built.module):
        notes = (*notes, f"{fault}: what this network says is not to be trusted; train it again")
    module, chosen = policy.prepare(built.module).eval(), "" if run is None else _chosen(run, path)
    more: dict[str, Any] = {name: str(about.get(name, "")) for name in ("licence", "weighting", "prior")}
    more |= {name: tuple(about.get(name, ())) for name in ("synsets", "class_counts", "prior_shift")}
    trained = Trained(
        module,
        policy,
        input,
        stored,
        built.name,
        path,
        chosen=chosen,
        notes=notes,
        is_multi_label=bool(about.get("multi_label")),
        temperature=temperature,
        calibrated_on=calibrated_on,
        symbol=built.symbol,
        is_unnamed=bool(about.get("unnamed")),
        is_probe=run is not None and about.get("step") == 0 and bool(parse_train(run.recipe.model.train).probe_passes),
        **more,
    )
    return rename_classes(trained, names)


def frozen_network(recipe: recipes.Recipe, data: DataSets, *, allow_import: bool = False, say: Say) -> Trained:
    """Build the network that a run would start from, in evaluation mode: its pretrained weights, for its features.

    Its classifier is a new one.

    Args:
        recipe: of the run: its model, size, normalisation, precision and device.
        data: the images that it would be trained on; stay open.
        allow_import: import a ``pkg.mod:factory``.
        say: takes what is to be known of the scale of its images.
    """
    built, input = build.model(recipe, data, allow_import=allow_import)
    for remark in scaling_remarks(recipe, built, input):
        say(remark)
    policy = _set_policy(recipe.precision, choose_device(recipe.parallel.device))
    module, name = policy.prepare(built.module).eval(), built.name
    return Trained(module, policy, input, data.classes, name, Path(built.weights or name), licence=built.licence)


def _restore_exported(
    path: Path, model: str | None, device: str, precision: str | None, names: tuple[str, ...] | None
) -> Trained:
    """Open an exported file with its engine; its description has images, classes and temperature."""
    if model is not None:
        raise ModelError(f"{path} is a whole network, not the weights of one: drop --model {model}")
    if device != "auto":
        choose_device(device)
    opened = exported.open_exported(path, device=device)
    described = opened.description
    if precision not in (None, described.numbers):
        raise ModelError(f"{path} was exported to compute in {described.numbers}, not in {precision}: drop --precision")
    note = licence_note(described.licence) if described.licence else None
    trained = Trained(
        opened.module,
        _set_policy(recipes.Precision("fp32", channels_last=False), opened.device),
        name=described.model,
        path=path,
        chosen=f"{opened.engine} on {opened.device.type.upper()}, {described.numbers}",
        notes=(note,) if note else (),
        **{name: getattr(described, name) for name in DESCRIBED},
    )
    return rename_classes(trained, names)


def find_pretrained(place: str | Path) -> ModelSource | None:
    """Return the model whose pretrained weights ``place`` asks for; None for a path.

    What exists as a file or a folder is a path, whatever its name.

    Raises:
        ModelError: there is no such model of timm.

    >>> find_pretrained("hf-hub:timm/resnet18.a1_in1k").name, find_pretrained("runs/a")
    ('timm/resnet18.a1_in1k', None)
    """
    name = str(place)
    is_timms = name.startswith("timm/") or HUB.match(name) is not None
    if checkpoint_format(name) or Path(place).exists() or not (is_timms or name == os.path.basename(name)):  # noqa: PTH119
        return None
    if is_timms:
        return models.find(name)
    is_file = Path(name).suffix in (".safetensors", ".pth", ".th", ".pt", ".bin", ".ckpt", ".tar")
    if is_file or exported.is_exported(name):
        return None
    try:
        return models.find(name)
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
        lines = [line.strip() for line in read_text(file).removeprefix("\ufeff").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise DataError(f"cannot read the classes in {file}: {reason}") from error
    if not any("\t" in line for line in lines):
        return tuple(lines)
    pairs = [[cell.strip() for cell in line.split("\t")] for line in lines]
    if wrong := next((line for line, cells in zip(lines, pairs, strict=True) if len(cells) != 2), None):
        raise DataError(f"{file} has the line {wrong!r}: each line needs a class of the data, a tab, and the model's")
    return {cells[0]: cells[1] for cells in pairs}


def _policy(precision: str | None, device: torch.device) -> Policy:
    return _set_policy(recipes.Precision(precision or "fp32"), device)  # type: ignore[arg-type]


def _set_policy(precision: recipes.Precision, device: torch.device) -> Policy:
    policy = Policy(precision, require_usable(device))
    set_products(precision, device)
    if device.type == "cpu":  # as training does: else each pass takes its memory from the system, and gives it back
        keep_memory(facts.memory_bytes())
    return policy


def _policy_of_run(
    run: Run | None, step: int, precision: str | None, device: torch.device
) -> tuple[Policy, tuple[str, ...]]:
    """Return the precision in which a run was evaluated after ``step``, or the named one, and a note if they differ."""
    if run is None:
        return _policy(precision, device), ()
    try:
        own = run.recipe.after(step).precision
        policy = _set_policy(own, device)
    except RecipeError as error:
        return _policy(precision, device), (f"evaluated in {precision or 'fp32'}, not as the run was: {error}",)
    if precision in (None, own.name):
        return policy, ()
    note = f"computed in {precision}; without --precision, predict and serve answer in {own.name}, as the run was"
    return _policy(precision, device), (f"{note} evaluated: probabilities differ, and close calls",)


def _run_of(path: Path, about: Mapping[str, Any]) -> Run | None:
    """Return the run that a weights file belongs to; None if it is not a run's."""
    try:
        run = Run.open(path.parent)
    except RunError:
        return None
    return run if run.recipe.digest == about.get("digest") else None


def _chosen(run: Run, path: Path) -> str:
    """Describe which of a run's weights a file holds."""
    best = run.progress().best
    if path.name == "best.safetensors" and best is not None:
        name = FIGURES.get(best.figure or "", score_name(best.mean_ap is not None))
        name += " and loss" * (best.figure == USUAL)
        return f"best by validation {name}, {f'epoch {epoch(best.epoch)}' if best.epoch else 'after the probe'}"
    if path.name == run.weights.name:
        return "last" if best is not None else "last: nothing was validated"
    return ""


def weights_file(place: Path, which: Which = "best") -> Path:
    """Return the file of weights of a run, or of a folder as the Hugging Face hub has them; a file is its own.

    Raises:
        RunError: there is none.
    """
    if not place.is_dir():
        if not place.exists():
            raise RunError(
                f"{place} is neither a run's folder, a file of weights or an exported one, nor a model's name: there is"
                " nothing of that name"
            )
        return place
    if not Run.is_run(place) and (place / "config.json").exists():
        return place / "model.safetensors"  # a folder as the Hugging Face hub has them
    run = Run.open(place)
    files = [place / "best.safetensors", run.weights]
    existing = [path for path in (files if which == "best" else reversed(files)) if path.exists()]
    if not existing:
        raise RunError(f"{place} has no weights yet: they are written at its first evaluation and at its end")
    return existing[0]


def _restore_foreign(path: Path, model: str | None, policy: Policy, names: tuple[str, ...] | None, say: Say) -> Trained:
    """Load a file that does not say what model it is of."""
    remarks = list[str]()
    if model is None:
        model = models.find_model(path, say)
        remarks.append(f"{path} has the tensors of {model}, and is taken for it (--model NAME names another)")
    spec = recipes.Model(model, weights=str(path))
    outputs = models.num_outputs(spec, allow_import=True)
    built = models.build(spec, num_classes=outputs, channels=3, size=None, allow_import=True)
    trained = _use_foreign(built, policy, path, outputs, names)
    notes = [*remarks, *trained.notes]
    if built.scaling_guessed or built.input.mean is None:
        whose = f"{built.name}'s" if built.scaling_guessed else "ImageNet's"
        notes.append(scaling_remark(built, trained.input, whose, whose))
    if trained.synsets:
        notes.append(
            f"{path} names no classes: its {outputs:,} outputs are taken for ImageNet's (or give --classes FILE)"
        )
    elif names is None:
        notes.append(f"{path} names no classes: its {outputs:,} outputs are numbered from 0 (or give --classes FILE)")
    return replace(trained, notes=tuple(notes))


def _restore_checkpoint(place: str, policy: Policy, names: tuple[str, ...] | None, size: int | None) -> Trained:
    """Load a checkpoint of another framework; its classes are those of its files, else ImageNet's, or numbers."""
    prefix = checkpoint_format(place)
    spec = recipes.Model(place if place.startswith(f"{prefix}:") else f"{prefix}:{place}", pretrained=True)
    checkpoint = models.inspect_checkpoint(spec.name, size)
    outputs = checkpoint.num_outputs
    side = size if checkpoint.size == size else None  # else it is another size than the network's, for later
    built = models.build(spec, num_classes=outputs, channels=checkpoint.channels, size=side)
    trained = _use_foreign(built, policy, Path(built.weights), outputs, names)
    if names is None and len(checkpoint.classes) == outputs:
        trained = replace(trained, classes=checkpoint.classes, synsets=checkpoint.synsets)
    elif names is None and trained.synsets:
        trained = replace(trained, notes=(*trained.notes, f"its {outputs:,} outputs are taken for ImageNet's classes"))
    elif names is None:
        note = f"no synset.txt names its {outputs:,} outputs: they are numbered from 0 (or give --classes FILE)"
        trained = replace(trained, notes=(*trained.notes, note))
    return trained


def _restore_pretrained(source: ModelSource, policy: Policy, names: tuple[str, ...] | None) -> Trained:
    """Load the pretrained weights of a model of timm, which are downloaded if they are not on this machine."""
    model = source.name
    if not source.licence:
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
    """Prepare a network that steadytrain did not train; without names its classes are ImageNet's, or numbers."""
    synsets = imagenet_synsets(outputs)
    classes = names_of_synsets(synsets) or tuple(str(number) for number in range(outputs))
    input = built.input.filled(224, build.DEFAULT_MEAN, build.DEFAULT_STD)
    module = policy.prepare(built.module).eval()
    about: dict[str, Any] = {"synsets": synsets, "notes": built.notes, "licence": built.licence, "symbol": built.symbol}
    trained = Trained(module, policy, input, classes, built.name, path, **about)
    return rename_classes(trained, names)


def class_names(classes: str | Path | Sequence[str]) -> tuple[str, ...]:
    """Read the names of a model's outputs, as :func:`restore` takes them. Raises DataError."""
    names = read_class_file(classes) if isinstance(classes, str | Path) else classes
    if isinstance(names, Mapping):
        raise DataError(f"{classes} has two columns: to name a model's outputs give one name on each line")
    if repeated := [name for name, uses in Counter(names).items() if uses > 1]:
        raise DataError(f"--classes has {few(repeated)} more than once: each output needs a different name")
    return tuple(names)


def rename_classes(trained: Trained, names: tuple[str, ...] | None) -> Trained:
    """Give a model's outputs other names; None: they keep theirs. Raises DataError: it has more outputs, or fewer."""
    if names is None:
        return trained
    if len(names) != len(trained.classes):
        raise DataError(
            f"--classes has {len(names):,} names, and {trained.name} has {len(trained.classes):,} outputs: give one"
            " name for each, in their order (or lines of a class of the data, a tab and a class of the model)"
        )
    return replace(trained, classes=names, synsets=(), is_unnamed=False)
