"""A network ready to be trained: found by name, built for the data's classes, its weights loaded, and tried once."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

from steadytrain.config import Model
from steadytrain.errors import ModelError
from steadytrain.models import from_timm, imported, weights, weights_file
from steadytrain.models.heads import under
from steadytrain.models.inputs import Input
from steadytrain.models.licences import remark
from steadytrain.models.lookup import Source, find
from steadytrain.models.made import Made, call, known_options
from steadytrain.models.nets import BUILTINS, HEADS, SIZES
from steadytrain.models.trial import try_forward


@dataclass(frozen=True)
class Built:
    """A network and what belongs to it.

    Args:
        module: on the CPU, in fp32; the weights are loaded, the classifier has the data's classes.
        name: in full, such as ``timm/resnet50``.
        input: what its weights want to see; fields are None where nothing says so.
        licence: of the weights (``unknown`` where they do not say it); empty where the network starts from none.
        notes: things to tell the user, a line each: what was replaced or adapted, what the licence restricts.
        head: names of the classifier's modules.
        weights: what it starts from: ``timm/resnet50.a1_in1k``, a file's path; empty where that is nothing.
    """

    module: nn.Module
    name: str
    input: Input
    licence: str
    notes: tuple[str, ...]
    head: tuple[str, ...]
    weights: str = ""


def build(model: Model, *, num_classes: int, channels: int, size: int | None, allow_import: bool = False) -> Built:
    """Build what the recipe names. Fresh parameters are drawn from torch's global generator: seed it before.

    Args:
        model: name, weights and options.
        num_classes: outputs.
        channels: of the images: 1 or 3.
        size: side of the images in pixels; None: the model's own (``Built.input.size``), or 224.
        allow_import: import a ``pkg.mod:factory``; only if the user named it on this command line.

    Raises:
        ModelError: no such model or option, weights that cannot be had or do not fit, images that it cannot take.
    """
    source = find(model.name, allow_import=allow_import)
    made = _make(source, model, num_classes=num_classes, channels=channels, size=size)
    side = size or made.input.size or 224
    try_forward(made.module, name=source.name, channels=channels, size=side, num_classes=num_classes)
    if model.weights is not None:
        made = _load(made, source.name, Path(model.weights))
    return Built(
        made.module, source.name, made.input, made.licence, made.notes, made.head, model.weights or made.weights
    )


def num_outputs(model: Model, *, allow_import: bool = False) -> int:
    """The number of classes that a recipe's local weights file was trained for.

    Raises:
        ModelError: no file, or no classifier in it.
    """
    if model.weights is None:
        raise ModelError(f"{model.name} has no weights file: give --weights FILE")
    source = find(model.name, allow_import=allow_import)
    # 997 is a number of outputs that no layer but the classifier is likely to have.
    made = _make(source, Model(model.name, options=model.options), num_classes=997, channels=3, size=None)
    file = weights_file.read(Path(model.weights))
    state = weights.in_own_names(made.module, file.tensors, head=made.head)
    outputs = [tensor.shape[0] for key, tensor in state.items() if under(key, made.head) and tensor.ndim]
    if not outputs:
        raise ModelError(f"{model.weights} has no classifier of {source.name} ({', '.join(made.head) or 'unknown'})")
    return outputs[0]


def _make(source: Source, model: Model, *, num_classes: int, channels: int, size: int | None) -> Made:
    if source.kind == "timm":
        return from_timm.make(source.inner, model, num_classes=num_classes, channels=channels, size=size)
    if source.kind == "import":
        return imported.make(source.inner, model, num_classes=num_classes, channels=channels, size=size)
    name = source.inner
    if model.pretrained:
        raise ModelError(
            f"the hub has no weights for the built-in {name}: train it from scratch (steady train), or give"
            " --weights FILE"
        )
    factory = BUILTINS[name]
    known = [p for p in inspect.signature(factory).parameters if p not in ("num_classes", "channels", "size", "depth")]
    known_options(name, model.options, known)
    module = call(name, factory, model.options, num_classes=num_classes, channels=channels, size=size or SIZES[name])
    return Made(module, (HEADS[name],), Input(size=SIZES[name], channels=channels))


def _load(made: Made, name: str, path: Path) -> Made:
    file = weights_file.read(path)
    notes = list(made.notes)
    if file.averaged:
        notes.append(f"the averaged weights ({file.averaged}) of {path} are used")
    notes += weights.load(made.module, file.tensors, head=made.head, what=f"the weights of {path} and {name}")
    if file.licence not in ("", "unknown") and (told := remark(file.licence)):
        notes.append(told)
    seen = file.input or made.input
    if file.input is None and made.input.mean is not None:
        notes.append(
            f"{path} does not say how its images were scaled: the mean {made.input.mean} and std {made.input.std} of"
            f" {name} apply, unless data.mean and data.std say otherwise"
        )
    return replace(made, input=seen.with_channels(made.input.channels), licence=file.licence, notes=tuple(notes))
