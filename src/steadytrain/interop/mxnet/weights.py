"""MXNet's checkpoints as models: the row by which ``--model mxnet:FILE`` and ``--weights FILE.params`` are built."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from torch import nn

from steadytrain.config import Model
from steadytrain.config.factories import checkpoint_format
from steadytrain.errors import ModelError, did_you_mean
from steadytrain.interop.mxnet.checkpoint import Checkpoint, open_checkpoint
from steadytrain.interop.mxnet.graph import build_network
from steadytrain.interop.mxnet.match import translate
from steadytrain.interop.mxnet.symbol import parse_symbol, symbol_json
from steadytrain.models.build import Built, CheckpointFormat, ForeignCheckpoint, make_network
from steadytrain.models.class_names import OutputNames
from steadytrain.models.registry import ModelSource
from steadytrain.models.weights import Input, load_weights, read_weights

_LAYER, _INIT = "layer_before_fullc", "classifier_init"
"""Options of a model: those of MXNet's ``fine-tune.py``."""


def _inspect(name: str, size: int | None) -> ForeignCheckpoint:
    checkpoint = open_checkpoint(name, also=() if size is None else (size,))
    return ForeignCheckpoint(
        num_outputs=checkpoint.network().num_outputs,
        channels=checkpoint.channels,
        size=checkpoint.size,
        classes=checkpoint.classes,
        synsets=checkpoint.synsets,
    )


def _rebuild(name: str, graph: str, channels: int, size: int) -> Built:
    network = build_network(parse_symbol(graph, where=name), channels=channels, size=size)
    return Built(network.module, name, Input(channels=channels), _head(network.head), symbol=graph)


def _load(built: Built, source: ModelSource, model: Model, classes: Sequence[str]) -> Built:
    """Load MXNet's weights into a network that is not made of its symbol, but computes the same."""
    path = str(model.weights)
    checkpoint = open_checkpoint(path)
    network = checkpoint.network()
    plain = Model(model.name, options=model.options)
    same = make_network(source, plain, num_classes=network.num_outputs, channels=network.channels, size=network.size)
    state, _ = translate(network, network.state(checkpoint.params), same.module, name=built.name)
    what, names = f"the weights of {path} and {built.name}", OutputNames(checkpoint.classes, checkpoint.synsets)
    notes = load_weights(built.module, state, head=built.head, what=what, names=names, classes=classes)
    mean, std, reason = checkpoint.scaling
    input = replace(built.input, mean=mean, std=std, channels=network.channels)
    return replace(
        built,
        input=input.with_channels(built.input.channels),
        licence="unknown",
        notes=(*built.notes, *notes, *_scaling_note(reason)),
        weights=path,
        scaling_guessed=bool(reason),
    )


def _make(
    source: ModelSource, model: Model, *, num_classes: int, channels: int, size: int | None, classes: Sequence[str]
) -> Built:
    """Make the module of an MXNet checkpoint, with its weights where the recipe asks for them."""
    for option in model.options:
        if option not in (_LAYER, _INIT):
            near = did_you_mean(option, (_LAYER, _INIT))
            raise ModelError(f"{source.name} has no option {option!r}, it has {_LAYER} and {_INIT}.{near}")
    layer, init = model.options.get(_LAYER), model.options.get(_INIT)
    layer = None if layer is None else str(layer)
    if init not in (None, "kaiming"):
        raise ModelError(f"{_INIT} is {init!r}; it must be kaiming, or left out")
    weights = None if model.weights is None else Path(model.weights)
    params = weights if checkpoint_format(str(weights)) else None
    file = None if weights is None or params else read_weights(weights)
    if file is not None and file.symbol:  # converted before, with its graph
        symbol, seen = parse_symbol(file.symbol, where=str(weights)), file.input or Input()
        checkpoint = Checkpoint(symbol, Path(str(weights)), channels=seen.channels, size=seen.size or 224)
    else:
        checkpoint = open_checkpoint(
            source.inner, params=params, also=() if size is None else (size,), layer_before_fullc=layer
        )
    network = checkpoint.network(num_classes=num_classes, channels=channels, size=size, layer_before_fullc=layer)
    head, notes, mean, std, reason = _head(network.head), [*checkpoint.notes], None, None, ""
    loads = model.pretrained or params is not None
    if loads:
        path = checkpoint.require_params()
        what, names = f"the weights of {path} and {source.name}", OutputNames(checkpoint.classes, checkpoint.synsets)
        state = network.state(checkpoint.params)
        notes += load_weights(network.module, state, head=head, what=what, names=names, classes=classes)
        if init and layer is not None:  # as MXNet's Xavier(gaussian, in, 2); its fine-tune.py begins so
            for name in head:
                nn.init.kaiming_normal_(network.module.get_submodule(name).get_parameter("weight"))
        mean, std, reason = checkpoint.scaling
        notes += _scaling_note(reason)
    input = Input(size=checkpoint.size, mean=mean, std=std, channels=checkpoint.channels).with_channels(channels)
    return Built(
        network.module,
        source.name,
        input,
        head,
        licence="unknown" if loads else "",
        notes=tuple(notes),
        weights=str(checkpoint.params_path) if loads else "",
        scaling_guessed=bool(reason),
        symbol=symbol_json(network.symbol),
    )


def _head(name: str) -> tuple[str, ...]:
    return (name,) if name else ()


def _scaling_note(reason: str) -> list[str]:
    return [f"MXNet's files do not say how images were scaled; assumed: {reason}"] if reason else []


FORMAT = CheckpointFormat(inspect=_inspect, make=_make, load=_load, rebuild=_rebuild)
