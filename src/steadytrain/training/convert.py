"""MXNet checkpoints into weights files of steadytrain, and weights into MXNet checkpoints."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from steadytrain.errors import ModelError, storage_error
from steadytrain.interop.mxnet.checkpoint import open_checkpoint, swap_colours
from steadytrain.interop.mxnet.graph import build_network
from steadytrain.interop.mxnet.match import match_known
from steadytrain.interop.mxnet.params import write_params
from steadytrain.interop.mxnet.states import read_states
from steadytrain.interop.mxnet.symbol import parse_symbol, read_symbol, symbol_json, write_symbol
from steadytrain.interop.mxnet.trace import export_symbol
from steadytrain.models import Input
from steadytrain.models.class_names import imagenet_synsets, names_of_synsets
from steadytrain.training.checkpoints import write_weights
from steadytrain.training.inference import Trained

_EPOCH = re.compile(r"(.+)-\d{4,}$")


@dataclass(frozen=True)
class Converted:
    """What was written.

    Args:
        files: in the order of writing.
        model: the network's name.
        input: what its images have to be.
        num_classes: its outputs.
        num_values: of its parameters and buffers.
        difference: between the outputs of MXNet's graph and of the known architecture on random images, as a share of
            their largest value; None where the graph itself was kept.
        notes: for the user, a line each.
    """

    files: tuple[Path, ...]
    model: str
    input: Input
    num_classes: int
    num_values: int
    difference: float | None = None
    notes: tuple[str, ...] = ()


def convert_from_mxnet(
    place: str,
    out: Path,
    *,
    symbol: Path | None = None,
    keep_graph: bool = False,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    size: int | None = None,
    bgr: bool = False,
) -> Converted:
    """Write an MXNet checkpoint as a ``.safetensors`` file that evaluates, predicts and fine-tunes by itself.

    Its names are those of timm's or torchvision's network where it is one of them: both give the same outputs on random
    images. Else the file holds MXNet's graph.

    Args:
        place: the ``.params`` file, or another name of :mod:`steadytrain.interop.mxnet.files`.
        out: the file to write.
        symbol: the graph's file; None: the one beside the arrays.
        keep_graph: keep MXNet's graph, whatever network it is.
        mean, std: of the images, of values from 0 to 1; None: what is usual for such a network.
        size: side of the images, in pixels; None: what suits the arrays.
        bgr: it was trained on BGR images: turn the first layer's colours round, so that it takes RGB.

    Raises:
        ModelError: files that are not there, damaged, or hold what cannot be converted.
        StorageError: ``out`` cannot be written.
    """
    checkpoint = open_checkpoint(place) if symbol is None else open_checkpoint(str(symbol), params=Path(place))
    params = swap_colours(checkpoint.symbol, checkpoint.params) if bgr else checkpoint.params
    checkpoint.require_params()
    network = checkpoint.network(size=size)
    state = network.state(params)
    matched = None if keep_graph else match_known(network, state)
    network.module.load_state_dict(state, strict=False)
    assumed_mean, assumed_std, reason = checkpoint.scaling
    notes = []
    if mean is None and std is None:
        notes.append(
            f"MXNet's files do not say how images were scaled; assumed: {reason} (--rgb-mean and --rgb-std set others)"
        )
    synsets = imagenet_synsets(network.num_outputs)
    classes = checkpoint.classes if len(checkpoint.classes) == network.num_outputs else names_of_synsets(synsets)
    if not checkpoint.classes and classes:
        notes.append(
            f"its {network.num_outputs:,} outputs are taken for ImageNet's classes (synset.txt beside it says others)"
        )
    for flag, values in (("--rgb-mean", mean), ("--rgb-std", std)):
        if values is not None and len(values) != network.channels:
            raise ModelError(f"{flag} has {len(values)} values, and the network takes {network.channels} channels")
    input = Input(
        size=network.size,
        mean=tuple(mean or assumed_mean),
        std=tuple(std or assumed_std),
        crop=1.0 if network.size <= 64 else 0.875,
        interpolation="bilinear",
        channels=network.channels,
    )
    name = f"mxnet:{checkpoint.symbol_path.name}" if matched is None else matched.known.name
    if matched is None and not keep_graph:
        notes.append("no network of timm or torchvision is the same: the file holds MXNet's graph")
    named = checkpoint.synsets if checkpoint.classes else synsets
    about: dict[str, Any] = {
        "model": {"name": name, "options": {} if matched is None else dict(matched.known.options)},
        "classes": list(classes or map(str, range(network.num_outputs))),
        "synsets": list(named) if len(named) == network.num_outputs else [],
        "multi_label": any(
            checkpoint.symbol.nodes[k].op == "LogisticRegressionOutput" for k, _ in network.symbol.heads
        ),
        "input": vars(input),
        "licence": "unknown",
        "source": {"format": "mxnet", "mxnet_version": checkpoint.symbol.version, "bgr": bgr},
    }
    about |= {"symbol": symbol_json(network.symbol)} if matched is None else {}
    tensors = network.module.state_dict() if matched is None else matched.state
    write_weights(out, tensors, about)
    return Converted(
        (out,),
        name,
        input,
        network.num_outputs,
        sum(value.numel() for value in tensors.values() if value.is_floating_point()),
        None if matched is None else matched.difference,
        tuple(notes),
    )


def convert_to_mxnet(trained: Trained, out: Path) -> Converted:
    """Write weights as ``PREFIX-0000.params`` and ``PREFIX-symbol.json``, which MXNet 1.9.1 loads and scores equally.

    ``synset.txt`` with the names of the classes is written beside them, unless there is another one.

    Args:
        trained: of :func:`steadytrain.training.restore`.
        out: the ``.params`` file: its name ends with a hyphen and at least four digits, the epoch.

    Raises:
        ModelError: another name, or a network with a call for which MXNet has no operator: all of them are listed.
        StorageError: a file cannot be written.
    """
    match = _EPOCH.fullmatch(out.stem)
    if out.suffix != ".params" or match is None:
        raise ModelError(f"MXNet loads PREFIX-0000.params: write to {out.with_suffix('')}-0000.params instead of {out}")
    prefix, size, channels = match[1], trained.input.size or 224, trained.input.channels
    if trained.symbol:
        symbol = parse_symbol(trained.symbol, where=trained.name)
        network = build_network(symbol, channels=channels, size=size)
        params = network.params(trained.module.state_dict())
    else:
        module = trained.module.to("cpu", torch.float32)
        exported = export_symbol(
            module, name=trained.name, channels=channels, size=size, is_multi_label=trained.is_multi_label
        )
        symbol, params = exported.symbol, exported.params
    files = [out, out.with_name(f"{prefix}-symbol.json")]
    write_params(out, params)
    write_symbol(files[1], symbol)
    notes = []
    synset, text = out.with_name("synset.txt"), "".join(f"{name}\n" for name in _synset_lines(trained))
    if not synset.exists() or synset.read_text(encoding="utf-8", errors="replace") == text:
        try:
            synset.write_text(text, encoding="utf-8")
        except OSError as error:
            raise storage_error(error, synset) from error
        files.append(synset)
    else:
        notes.append(f"{synset} is another model's: the names of the classes were not written")
    if trained.temperature != 1:
        notes.append(
            f"the temperature of {trained.temperature:.4g} is not in MXNet's files: its probabilities are uncalibrated"
        )
    return Converted(
        tuple(files),
        trained.name,
        trained.input,
        len(trained.classes),
        sum(value.size for value in params.values()),
        notes=tuple(notes),
    )


def _synset_lines(trained: Trained) -> list[str]:
    """What names the classes: their synsets first, where they have some."""
    if not trained.synsets:
        return list(trained.classes)
    return [f"{synset} {name}" for synset, name in zip(trained.synsets, trained.classes, strict=True)]


def convert_states(path: Path, symbol_path: Path, out: Path) -> int:
    """Write SGD's momentum of a ``.states`` file as ``.safetensors``, by MXNet's names; return the number of arrays.

    Args:
        path: the ``.states`` file.
        symbol_path: of the network: the order of its arguments is that of the states.
        out: the file to write.

    Raises:
        ModelError: states of another optimizer, or of another network.
    """
    states, symbol = read_states(path), read_symbol(symbol_path)
    moving = {
        symbol.nodes[place].name for node in symbol.nodes if len(node.inputs) == 5 for place, _ in node.inputs[3:]
    }
    names = [
        node.name
        for node in symbol.nodes
        if node.is_variable and node.name not in moving and node.name != "data" and not node.name.endswith("label")
    ]
    if states and max(states) >= len(names):
        raise ModelError(
            f"{path} has states of parameter {max(states)}, and {symbol_path} has {len(names)}: they are of another"
            " network, or of several devices"
        )
    tensors = {names[key]: torch.tensor(value) for key, value in states.items() if value is not None}
    write_weights(out, tensors, {"optimizer": "sgd", "state": "momentum"})
    return len(tensors)
