"""A checkpoint of MXNet, read: its graph, its arrays, and what its input most likely was."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from steadytrain.errors import ModelError
from steadytrain.interop.mxnet.files import PREFIX, find_files, read_synsets
from steadytrain.interop.mxnet.graph import Network, build_network, cut, infer_input
from steadytrain.interop.mxnet.operators import LAYERS
from steadytrain.interop.mxnet.params import Array, read_params
from steadytrain.interop.mxnet.symbol import (
    NORMS,
    Node,
    Symbol,
    read_symbol,
    recorded_scaling,
    single_output,
    with_poolings_of_2015,
)

CIFAR = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
TRAIN_IMAGENET = (123.68, 116.779, 103.939)
"""Mean of MXNet's ``train_imagenet.py``, of pixels from 0 to 255, which are not divided by anything."""
_RAW_MEAN = 10.0
"""Moving mean of a batch norm on images above which these were pixels from 0 to 255."""


@dataclass(frozen=True)
class Checkpoint:
    """An MXNet checkpoint: its graph and arrays.

    Args:
        symbol: of ``symbol_path``.
        symbol_path: the graph's file.
        params_path: the file of its arrays; None where there is none.
        params: arrays by name, without ``arg:`` and ``aux:``; empty where there is no file.
        channels, size: of the images that it takes.
        classes, synsets: names of its outputs, of ``synset.txt`` beside the files; else empty.
        notes: what was taken for granted, a line each.
    """

    symbol: Symbol
    symbol_path: Path
    params_path: Path | None = None
    params: Mapping[str, Array] = field(default_factory=dict)
    channels: int = 3
    size: int = 224
    classes: tuple[str, ...] = ()
    synsets: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def network(
        self,
        *,
        num_classes: int | None = None,
        channels: int | None = None,
        size: int | None = None,
        layer_before_fullc: str | None = None,
    ) -> Network:
        """Build its module, without its weights; None: as in the checkpoint. Raises ModelError.

        ``layer_before_fullc``: cut it after this layer and put a classifier of ``num_classes`` there.
        """
        symbol = self.symbol
        if layer_before_fullc is not None:
            symbol = cut(symbol, layer_before_fullc, num_classes or 2)
        channels, size = channels or self.channels, size or self.size
        # Other sizes and channels give layers other shapes, which whoever loads the weights adapts or refuses.
        values = self.params if (channels, size) == (self.channels, self.size) else _free(symbol, self.params)
        return build_network(symbol, values, channels=channels, size=size, num_classes=num_classes)

    def require_params(self) -> Path:
        """The file of its arrays. Raises ModelError where there is none."""
        if self.params_path is None:
            prefix = str(self.symbol_path).removesuffix("-symbol.json")
            raise ModelError(
                f"{self.symbol_path} is a network without weights: put its .params file beside it"
                f" ({prefix}-0000.params), or name both files"
            )
        return self.params_path

    @property
    def scaling(self) -> tuple[tuple[float, ...], tuple[float, ...], str]:
        """Mean and standard deviation (of values from 0 to 1) that it was most likely trained with, and the reason.

        MXNet's files do not say it; where steadytrain wrote them the symbol does, and there is no reason.
        """
        if (recorded := recorded_scaling(self.symbol, self.channels)) is not None:
            return *recorded, ""
        if self.channels != 3:
            return (0.0,) * self.channels, (1.0,) * self.channels, "as MXNet's MNIST examples: values from 0 to 1"
        norm = _norm_on_images(self.symbol)
        if norm is not None and norm in self.params and float(np.abs(self.params[norm]).max()) > _RAW_MEAN:
            return (0.0,) * 3, (1 / 255,) * 3, "its first layer normalises pixels from 0 to 255"
        if any(node.name.endswith("_fwd") for node in self.symbol.nodes):
            values, name = (CIFAR, "CIFAR-10") if self.size == 32 else (IMAGENET, "ImageNet")
            return *values, f"it comes from Gluon, whose models for {name} were trained so"
        mean = tuple(value / 255 for value in TRAIN_IMAGENET)
        return mean, (1 / 255,) * 3, "as MXNet's train_imagenet.py: pixels from 0 to 255 less their mean"


def swap_colours(symbol: Symbol, params: Mapping[str, Array]) -> dict[str, Array]:
    """Make a network that was trained on BGR images take RGB: reverse the colours in its first layers' arrays.

    Raises:
        ModelError: the images go into another operator than a batch norm or a convolution.
    """
    turned = dict(params)
    images = {number for number, node in enumerate(symbol.nodes) if node.is_variable and node.name == "data"}
    for number, node in enumerate(symbol.nodes):
        if not node.inputs or node.inputs[0][0] not in images:
            continue
        names = [symbol.nodes[place].name for place, _ in node.inputs[1:]]
        if node.op in _PASSING or node.op in NORMS:
            images.add(number)
            turned |= {name: params[name][::-1].copy() for name in names if node.op in NORMS}
        elif node.op == "Convolution" and params[names[0]].shape[1] == 3:
            turned[names[0]] = params[names[0]][:, ::-1].copy()
        else:
            raise ModelError(
                f"--bgr turns round the colours of a first convolution, and the images go into {node.name} ({node.op}):"
                " leave it out, and turn the images round"
            )
    return turned


_PASSING = {"identity", "_copy", "Cast", "cast", "amp_cast"}


def _free(symbol: Symbol, params: Mapping[str, Array]) -> dict[str, Array]:
    """The arrays that are no parameters of layers, by which shapes are not checked."""
    layered = {symbol.nodes[number].name for node in symbol.nodes if node.op in LAYERS for number, _ in node.inputs[1:]}
    return {name: array for name, array in params.items() if name not in layered}


def _norm_on_images(symbol: Symbol) -> str | None:
    """Name of the moving mean of a batch norm that the images go into; None without one."""
    images: set[int] = {number for number, node in enumerate(symbol.nodes) if node.is_variable and node.name == "data"}
    for number, node in enumerate(symbol.nodes):
        if node.inputs and node.inputs[0][0] in images:
            if node.op in _PASSING:
                images.add(number)
            elif node.op in NORMS and len(node.inputs) == 5:
                return symbol.nodes[node.inputs[3][0]].name
    return None


def open_checkpoint(
    name: str,
    *,
    params: Path | None = None,
    size: int | None = None,
    also: Sequence[int] = (),
    layer_before_fullc: str | None = None,
) -> Checkpoint:
    """Read the pair of files that a name stands for.

    Args:
        name: with or without ``mxnet:`` before it, as :mod:`steadytrain.interop.mxnet.files` says.
        params: take the arrays of this file instead.
        size: side of its images, in pixels; None: what suits the arrays, of the usual ones and ``also``.
        layer_before_fullc: what stands behind this layer is not looked at: it will be cut off.

    Raises:
        ModelError: no such files, or none that can be read; or the arrays do not belong to the symbol.
    """
    symbol_path, newest = find_files(name.removeprefix(PREFIX))
    params_path = params or newest
    written = read_symbol(symbol_path)
    symbol = single_output(written)
    notes = []
    if len(symbol.heads) < len(written.heads):
        kept = symbol.nodes[symbol.heads[0][0]].name
        others = [written.nodes[node].name for node, _ in written.heads]
        others.remove(kept)
        notes.append(f"of its outputs {kept} is taken, and not {', '.join(others)}")
    looked_at = symbol if layer_before_fullc is None else _before(symbol, layer_before_fullc)
    if params_path is None:
        fit = infer_input(looked_at, {}, size=size, also=also)
        return Checkpoint(symbol, symbol_path, size=fit.size, notes=tuple(notes))
    arrays = read_params(params_path)
    if isinstance(arrays, list):
        if arrays:
            raise ModelError(
                f"{params_path} holds {len(arrays)} arrays without names, and a checkpoint has one for each: save it"
                " with mx.model.save_checkpoint or net.export"
            )
        arrays = {}
    arrays = {re.sub(r"^(arg|aux):", "", name): array for name, array in arrays.items()}
    arrays.pop("data", None)  # of a whole executor: the last batch's images
    if (full := _with_prefix(looked_at, arrays)) is not arrays:
        notes.append(
            f"{params_path} lacks the prefix of Gluon's block, {next(iter(full)).removesuffix(next(iter(arrays)))}"
        )
        arrays = full
    if named := _named_by_order(symbol, arrays):
        arrays = _the_one_that_fits(looked_at, named, symbol_path, params_path, size=size, also=also)
        notes.append(
            f"{params_path} is of Gluon's save_parameters: its arrays are taken for the symbol's in their order, which"
            " their kinds and shapes fit"
        )
    require_arrays(looked_at, arrays, symbol_path, params_path)
    fit = infer_input(looked_at, arrays, size=size, also=also)
    if fit.is_old:
        notes.append("its poolings are those of 2015, which round up: only so do its arrays fit")
        symbol = with_poolings_of_2015(symbol) or symbol
    classes, synsets = read_synsets(symbol_path.parent)
    channels, side = fit.channels, fit.size
    return Checkpoint(symbol, symbol_path, params_path, arrays, channels, side, classes, synsets, tuple(notes))


def _before(symbol: Symbol, layer: str) -> Symbol:
    """The part of a symbol up to a layer, flattened: enough to find out what images it takes."""
    classifier = cut(symbol, layer, 2)
    kept = [*classifier.nodes[:-5]]  # without the new classifier
    kept.append(Node("Flatten", "features", {}, ((len(kept) - 1, 0),)))
    return Symbol(tuple(kept), ((len(kept) - 1, 0),), symbol.version)


_OF_GLUON = re.compile(r"(?:\w+\.)*(weight|bias|gamma|beta|running_mean|running_var|alpha)")
_KINDS = {
    **dict.fromkeys(NORMS, ("gamma", "beta", "running_mean", "running_var")),
    "LeakyReLU": ("alpha",),
}
"""Operator -> what Gluon calls its arrays, in the order of its inputs; of all others weight and bias."""


_SUMS = ("elemwise_add", "broadcast_add", "_Plus", "_plus", "_add", "broadcast_plus")


def _named_by_order(symbol: Symbol, arrays: Mapping[str, Array]) -> list[dict[str, Array]]:
    """Name arrays of Gluon's ``save_parameters`` (``features.0.weight``) as the symbol does, one after the other.

    Their names belong to Gluon's code, but their order is that of its layers, which is the symbol's as a rule: of a
    sum Gluon's blocks register the branch first that the symbol names first (ResNet v2) or last (v1). None are returned
    where they have other names, or are of other kinds or numbers; shapes are not compared.
    """
    kinds = [match and match[1] for match in map(_OF_GLUON.fullmatch, arrays)]
    if not arrays or not all(kinds) or not any("." in name for name in arrays):
        return []
    candidates = list[dict[str, Array]]()
    for is_reversed in (False, True):
        wanted: dict[str, str] = {}
        for number in _in_order(symbol, is_reversed=is_reversed):
            node = symbol.nodes[number]
            if node.op in LAYERS:
                names = [symbol.nodes[place].name for place, _ in node.inputs[1:]]
                wanted |= dict(zip(names, _KINDS.get(node.op, ("weight", "bias")), strict=False))
        named = dict(zip(wanted, arrays.values(), strict=False))
        if list(wanted.values()) == kinds and not any(list(named) == list(other) for other in candidates):
            candidates.append(named)
    return candidates


def _in_order(symbol: Symbol, *, is_reversed: bool) -> list[int]:
    """Numbers of the nodes that the heads need, inputs first; ``is_reversed``: of a sum with its last branch first."""
    ordered, seen = list[int](), set[int]()
    waiting = [(number, False) for number, _ in reversed(symbol.heads)]
    while waiting:
        number, has_inputs = waiting.pop()
        if has_inputs:
            ordered.append(number)
        elif number not in seen:
            seen.add(number)
            node = symbol.nodes[number]
            waiting.append((number, True))
            places = [place for place, _ in node.inputs]
            waiting += [(place, False) for place in (places if is_reversed and node.op in _SUMS else places[::-1])]
    return ordered


def _the_one_that_fits(
    symbol: Symbol,
    candidates: Sequence[dict[str, Array]],
    symbol_path: Path,
    params_path: Path,
    *,
    size: int | None,
    also: Sequence[int],
) -> dict[str, Array]:
    """Return the arrays whose shapes suit the layers. Raises ModelError where none do, or several."""
    fitting = list[dict[str, Array]]()
    for arrays in candidates:
        with contextlib.suppress(ModelError):
            infer_input(symbol, arrays, size=size, also=also)
            fitting.append(arrays)
    if len(fitting) == 1:
        return fitting[0]
    reason = "fit it in two orders" if fitting else "do not have the shapes of its layers in their order"
    raise ModelError(
        f"{params_path} is of Gluon's save_parameters, whose names belong to its code, and its arrays {reason}"
        f" ({symbol_path}): let MXNet write both files (net.load_parameters, net.hybridize, one forward, net.export)"
    )


def _with_prefix(symbol: Symbol, arrays: dict[str, Array]) -> dict[str, Array]:
    """Put a block's prefix before names of which Gluon stripped it, if one prefix gives the symbol all it needs."""
    wanted, first = set(_parameters(symbol)), next(iter(arrays), "")
    prefixes = [name.removesuffix(first) for name in wanted if name.endswith(first) and first not in wanted]
    fitting = [prefix for prefix in prefixes if wanted <= {prefix + name for name in arrays}]
    return {fitting[0] + name: array for name, array in arrays.items()} if len(fitting) == 1 else arrays


def _parameters(symbol: Symbol) -> list[str]:
    used = symbol.used()
    return [
        symbol.nodes[place].name
        for number, node in enumerate(symbol.nodes)
        if number in used and node.op in LAYERS
        for place, _ in node.inputs[1:]
        if symbol.nodes[place].is_variable
    ]


def require_arrays(symbol: Symbol, arrays: Mapping[str, Array], symbol_path: Path, params_path: Path) -> None:
    """Raise ModelError where the symbol's layers have parameters that ``arrays`` lacks."""
    parameters = _parameters(symbol)
    missing = [name for name in dict.fromkeys(parameters) if name not in arrays]
    if not missing:
        return
    gluon = (
        ": these are names of Gluon's save_parameters, which belong to its code, and their order is not the symbol's:"
        " let MXNet write both files (net.load_parameters, net.hybridize, one forward, net.export)"
        if all(map(_OF_GLUON.fullmatch, arrays))
        else ": these are statistics of batch norms: save them too, as mx.model.save_checkpoint does (aux:NAME)"
        if all(re.search(r"_(moving|running)_(mean|var)$", name) for name in missing)
        else ": are they of the same network?"
    )
    some = ", ".join(missing[:4]) + (", ..." if len(missing) > 4 else "")
    raise ModelError(
        f"{params_path} lacks {len(missing)} of the {len(set(parameters))} arrays of {symbol_path} ({some}){gluon}"
    )
