"""MXNet checkpoints into weights files of steadytrain, and weights into MXNet checkpoints."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from steadytrain.data.storage.scratch import scratch_beside
from steadytrain.errors import FailedError, ModelError, storage_errors
from steadytrain.files import replace_file
from steadytrain.interop.mxnet.checkpoint import open_checkpoint, require_arrays, swap_colours
from steadytrain.interop.mxnet.graph import build_network, with_loss
from steadytrain.interop.mxnet.match import TOLERANCE, match_known
from steadytrain.interop.mxnet.params import read_params, write_params
from steadytrain.interop.mxnet.states import read_states
from steadytrain.interop.mxnet.symbol import (
    parse_symbol,
    read_symbol,
    record_arrays,
    record_input,
    symbol_json,
    write_symbol,
)
from steadytrain.interop.mxnet.trace import export_symbol
from steadytrain.models import Input
from steadytrain.models.class_names import imagenet_synsets, names_of_synsets
from steadytrain.training.checkpoints import stage, write_weights
from steadytrain.training.inference.trained import Trained

_EPOCH = re.compile(r"(.+)-\d{4,}$")


@dataclass(frozen=True)
class Converted:
    """The files that were written, and what they hold.

    Args:
        files: in the order of writing.
        model: the network's name.
        input: what its images have to be.
        num_classes: its outputs.
        num_values: of its parameters and buffers.
        difference: largest difference between the logits of MXNet's graph and of the torch network, as a share of the
            largest logit; None where the graph itself was kept.
        compared_on: by which images they were compared, in words.
        notes: for the user, a line each.
    """

    files: tuple[Path, ...]
    model: str
    input: Input
    num_classes: int
    num_values: int
    difference: float | None = None
    compared_on: str = "random images"
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
    name, separate = (place, None) if symbol is None else (str(symbol), Path(place))
    checkpoint = open_checkpoint(name, params=separate, size=size)
    params = swap_colours(checkpoint.symbol, checkpoint.params) if bgr else checkpoint.params
    checkpoint.require_params()
    network = checkpoint.network()
    state = network.state(params)
    matched = None if keep_graph else match_known(network, state)
    network.module.load_state_dict(state, strict=False)
    assumed_mean, assumed_std, reason = checkpoint.scaling
    notes = [*checkpoint.notes]
    if reason and mean is None and std is None:
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
    write_weights(out, stage(tensors), about)
    return Converted(
        (out,),
        name,
        input,
        network.num_outputs,
        sum(value.numel() for value in tensors.values() if value.is_floating_point()),
        None if matched is None else matched.difference,
        notes=tuple(notes),
    )


def convert_to_mxnet(trained: Trained, out: Path, images: NDArray[np.uint8], *, what: str = "images") -> Converted:
    """Write weights as ``PREFIX-0000.params`` and ``PREFIX-symbol.json``, which MXNet 1.9.1 loads and scores equally.

    Both files are read back before they get their names: their graph must give the model's logits for ``images``.
    ``synset.txt`` with the names of the classes is written beside them, unless there is another one.

    Args:
        trained: of :func:`steadytrain.training.restore`.
        out: the ``.params`` file: its name ends with a hyphen and at least four digits, the epoch.
        images: uint8 [B, H, W, C], cut as the model wants them.
        what: the images, in words.

    Raises:
        ModelError: another name, or a network with a call for which MXNet has no operator: all of them are listed.
        FailedError: what was written computes something else than the model; the files were not kept.
        StorageError: a file cannot be written.
    """
    match = _EPOCH.fullmatch(out.stem)
    if out.suffix != ".params" or match is None:
        raise ModelError(f"MXNet loads PREFIX-0000.params: write to {out.with_suffix('')}-0000.params instead of {out}")
    size, channels = trained.input.size or 224, trained.input.channels
    module = trained.module.to("cpu", torch.float32).eval()
    if trained.symbol:
        symbol = parse_symbol(trained.symbol, where=trained.name)
        network = build_network(symbol, channels=channels, size=size)
        params = network.params(module.state_dict())
        symbol = with_loss(symbol, is_multi_label=trained.is_multi_label)
    else:
        exported = export_symbol(
            module, name=trained.name, channels=channels, size=size, is_multi_label=trained.is_multi_label
        )
        symbol, params = exported.symbol, exported.params
    shapes = {name.partition(":")[2]: array.shape for name, array in params.items()}
    symbol = record_input(record_arrays(symbol, shapes), channels, size, trained.input.mean, trained.input.std)
    files = [out, out.with_name(f"{match[1]}-symbol.json")]
    with scratch_beside(out) as scratch:
        parts = [scratch / file.name for file in files]
        write_params(parts[0], params)
        write_symbol(parts[1], symbol)
        batch = trained.policy.images(torch.from_numpy(images), trained.input.mean, trained.input.std).contiguous()
        with torch.no_grad():
            difference = _difference(module(batch), _read_back(parts[1], parts[0], channels, size)(batch))
        if not difference <= TOLERANCE:  # of a NaN neither is true
            raise FailedError(
                f"{out} was not written: on {what} its graph, read back, gives logits that differ from those of"
                f" {trained.name} by {difference:.1e} of the largest ({TOLERANCE:.0e} is allowed): the network computes"
                " something that the symbol does not say, such as a hook, or a layer with a forward of its own"
            )
        with storage_errors(out):
            for part, file in zip(parts, files, strict=True):
                part.replace(file)
    notes = []
    names = map(" ".join, zip(trained.synsets, trained.classes, strict=True)) if trained.synsets else trained.classes
    synset, text = out.with_name("synset.txt"), "".join(f"{name}\n" for name in names)
    if not synset.exists() or synset.read_text(encoding="utf-8", errors="replace") == text:
        replace_file(synset, text)
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
        difference,
        what,
        tuple(notes),
    )


def _read_back(symbol_path: Path, params_path: Path, channels: int, size: int) -> nn.Module:
    """Build the network that a pair of MXNet's files holds, with its weights."""
    symbol, named = read_symbol(symbol_path), read_params(params_path)
    assert isinstance(named, dict)
    params = {name.partition(":")[2]: array for name, array in named.items()}
    require_arrays(symbol, params, symbol_path, params_path)
    network = build_network(symbol, params, channels=channels, size=size)
    network.module.load_state_dict(network.state(params), strict=False)
    return network.module.eval()


def _difference(expected: Tensor, logits: Tensor) -> float:
    """Return the largest difference as a share of the largest logit, or of 1; infinity for other shapes."""
    if expected.shape != logits.shape:
        return float("inf")
    return float((expected - logits).abs().max() / expected.abs().max().clamp(min=1.0))


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
    write_weights(out, stage(tensors), {"optimizer": "sgd", "state": "momentum"})
    return len(tensors)
