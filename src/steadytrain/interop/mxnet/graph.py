"""MXNet's graphs as torch modules: a ``torch.fx.GraphModule``, which trains, compiles, exports and moves as any.

The graph is run with images of zeros while it is built, so every layer's shape is seen and no parameter is needed.
A batch norm with ``fix_gamma`` has a scale of 1 that is not trained, whatever its file holds. Its momentum is 1 minus
MXNet's; its running variance is torch's, unbiased, where MXNet's was biased. Parameters are float32: ``Cast`` between
floating-point formats is left to the number format of training.
"""

from __future__ import annotations

import contextlib
import keyword
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from steadytrain.errors import ModelError, did_you_mean, first_line
from steadytrain.interop.mxnet.operators import DETECTION, LAYERS, MAX_SIDE, MAX_VALUES, OPERATORS, OUTPUTS, Value
from steadytrain.interop.mxnet.params import Array
from steadytrain.interop.mxnet.symbol import NORMS, SHAPE, Attributes, Node, Symbol, with_poolings_of_2015

SIZES = (224, 227, 299, 32, 28, 64, 96, 112, 128, 160, 192, 256, 320, 331, 384, 448, 512)
"""Sides of images, in pixels, that are tried where nothing says what a network was trained for."""
SMALL, SMALL_MAP = 32, 28
"""A network whose last picture of features has this side or more where images have 224 pixels is one for images of 32:
ImageNet's classifiers end with 7 to 14, those of CIFAR-10 with 56."""
_SHAPE = "__steadytrain_shape__"
"""The key of a variable that is a value of the graph and not of a layer: its shape, so that the symbol can be built
without its array.
"""
_ERRORS = (RuntimeError, ValueError, TypeError, IndexError, ArithmeticError)
_SHOWN = 12
_PASSING = {
    *("Flatten", "flatten", "Pooling", "Pooling_v1", "Activation", "relu", "Reshape", "reshape", "identity", "_copy"),
    *("Cast", "cast", "amp_cast", "Dropout", "mean", "squeeze", "_contrib_AdaptiveAvgPooling2D"),
}
"""Operators that may stand behind a classifier."""
_LOSSES = OUTPUTS.keys() - {"softmax", "SoftmaxActivation", "log_softmax", "LogisticRegressionOutput"}  # of one label


@dataclass(frozen=True)
class Network:
    """A module made of a symbol.

    Args:
        module: takes images float32[B, C, H, W], returns logits; freshly initialised.
        symbol: what it was made of: with a new classifier, if there is one.
        names: names of its parameters and buffers, and MXNet's for them. A scale that is fixed to 1 is among them.
        moving: MXNet's names of those that are statistics ("aux").
        head: name of the module that ends it: a dense layer or a convolution; empty where another one does.
        num_outputs: of the classifier.
        channels, size: of the images of zeros that it was built with; ``size`` is their side in pixels.
        last_side: of the last picture of features, in pixels; 0 without one.
    """

    module: fx.GraphModule
    symbol: Symbol
    names: Mapping[str, str]
    moving: frozenset[str]
    head: str
    num_outputs: int
    channels: int
    size: int
    last_side: int

    def state(self, params: Mapping[str, Array]) -> dict[str, Tensor]:
        """Name MXNet's arrays as the module's parameters and buffers, in float32; what ``params`` lacks is left out."""
        fixed = {
            f"{name}.weight"
            for name, part in self.module.named_modules()
            if isinstance(part, nn.BatchNorm2d) and not part.weight.requires_grad
        }
        state = {}
        for key, name in self.names.items():
            if name in params:
                array = params[name]
                state[key] = torch.tensor(np.ones_like(array) if key in fixed else array, dtype=torch.float32)
        return state

    def params(self, state: Mapping[str, Tensor]) -> dict[str, Array]:
        """Name parameters and buffers as MXNet does, ``arg:`` and ``aux:`` included: the way back of :meth:`state`."""
        return {
            f"{'aux' if name in self.moving else 'arg'}:{name}": state[key].detach().float().cpu().numpy()
            for key, name in self.names.items()
        }


def build_network(
    symbol: Symbol,
    params: Mapping[str, Array] | None = None,
    *,
    channels: int = 3,
    size: int = 224,
    num_classes: int | None = None,
    logits: bool = True,
) -> Network:
    """Make a module of a symbol.

    Args:
        symbol: of a classifier of images.
        params: MXNet's arrays by name, without ``arg:`` and ``aux:``: of them those are taken that are values of the
            graph rather than parameters of a layer. Layers are checked against them, the classifier aside.
        channels, size: of the images: the shapes of layers follow from them.
        num_classes: give the classifier so many outputs; None: as many as it has.
        logits: leave out the softmax (or what else turns logits into scores) at the end.

    Raises:
        ModelError: operators or parameters that cannot be converted (all unknown operators at once, with the names of
            their nodes), images of another size than it takes, or arrays of other shapes than its layers have.
    """
    require_operators(symbol)
    if len(symbol.heads) != 1:
        names = ", ".join(symbol.nodes[number].name for number, _ in symbol.heads)
        raise ModelError(
            f"the symbol returns {len(symbol.heads)} values ({names}), and a classifier returns one: save the one that"
            " is meant alone (in MXNet: symbol.get_internals()['NAME_output'].save), or fine-tune from a layer (steady"
            " finetune --layer-before-fullc NAME)"
        )
    end = symbol.heads[0]
    while logits and symbol.nodes[end[0]].op in OUTPUTS and symbol.nodes[end[0]].inputs:
        end = symbol.nodes[end[0]].inputs[0]  # what the softmax gets
    head = find_head(symbol, end[0])
    if num_classes is not None:
        if head is None:
            last = symbol.nodes[end[0]]
            raise ModelError(
                f"{last.name} ({last.op}) ends the network and no dense layer or convolution is its classifier: name"
                " the layer after which a new one begins (--layer-before-fullc NAME)"
            )
        node = symbol.nodes[head]
        key = "num_hidden" if node.op == "FullyConnected" else "num_filter"
        if node.attrs.get(key) != str(num_classes):
            symbol = symbol.with_node(head, replace(node, attrs={**node.attrs, key: str(num_classes)}))
    construction = _Construction(symbol, params or {}, channels, size, head, is_new_head=num_classes is not None)
    value = construction.run(end)
    if logits and value.example.ndim > 2 and all(side == 1 for side in value.example.shape[2:]):
        value = construction.call(torch.flatten, value, 1)
    if logits and value.example.ndim != 2:
        sides = " x ".join(map(str, value.example.shape[1:]))
        last = symbol.nodes[end[0]]
        raise ModelError(
            f"{last.name} ({last.op}) gives {sides} values for images of {size}x{size} pixels, a map of answers, and a"
            " classifier gives one for an image: name the size that it takes, if it is another (--size), or a layer"
            " behind which a classifier begins (steady finetune --layer-before-fullc NAME)"
        )
    return construction.finish(value)


@dataclass(frozen=True)
class FittedSymbol:
    """A symbol with the channels and the side (in pixels) of the images that it takes; ``is_old``: its poolings are
    those of 2015 (:func:`~steadytrain.interop.mxnet.symbol.with_poolings_of_2015`)."""

    symbol: Symbol
    channels: int
    size: int
    is_old: bool = False


def infer_input(
    symbol: Symbol, params: Mapping[str, Array], *, size: int | None = None, also: Sequence[int] = ()
) -> FittedSymbol:
    """Find out the images that a network takes, from its arrays' shapes.

    Args:
        symbol: of a classifier.
        params: its arrays by name.
        size: the side that somebody said; None: it is looked for.
        also: sides that are tried behind the usual ones.

    Raises:
        ModelError: no side in :data:`SIZES` suits them, or as :func:`build_network`.
    """
    require_operators(symbol)
    failed: ModelError | None = None
    old = with_poolings_of_2015(symbol)
    for channels in _channels(symbol, params):
        for side in (size,) if size else (*_sizes(symbol), *also):
            for form in (symbol, old):
                if form is None:
                    continue
                try:
                    network = build_network(form, params, channels=channels, size=side)
                except _SizeError as error:
                    failed = failed or error
                    continue
                if network.last_side >= SMALL_MAP and side == SIZES[0] and not size:
                    with contextlib.suppress(_SizeError):  # one with a dense layer on its features
                        build_network(form, params, channels=channels, size=SMALL)
                        side = SMALL
                return FittedSymbol(form, channels, side, form is old)
    assert failed is not None
    if size:
        raise failed
    raise ModelError(
        f"the arrays fit the symbol at no usual size of images ({failed}): are they of another network, or of an"
        " unusual size (steady convert FILE.params -o OUT.safetensors --size N)?"
    )


def cut(symbol: Symbol, layer: str, num_classes: int) -> Symbol:
    """Cut a symbol after a layer and put a new classifier there, as MXNet's ``fine-tune.py`` does.

    Args:
        symbol: of a trained network.
        layer: name of the last node that is kept, such as ``flatten0`` (``--layer-before-fullc``).
        num_classes: outputs of the dense layer ``fc`` that follows.

    Raises:
        ModelError: there is no such layer.
    """
    names = [node.name for node in symbol.nodes if not node.is_variable]
    name = layer if layer in names else layer.removesuffix("_output")
    if name not in names:
        near = did_you_mean(layer, names) or f" The last ones are {', '.join(names[-6:])}."
        raise ModelError(f"layer_before_fullc is {layer!r}, and the network has no such layer.{near}")
    number = next(k for k, node in enumerate(symbol.nodes) if node.name == name and not node.is_variable)
    names_before = {node.name for node in symbol.nodes[: number + 1]}
    fc = next(text for text in ("fc", "fc_new", "fc_new2") if not {text, f"{text}_weight"} & names_before)
    nodes, count = symbol.nodes[: number + 1], number + 1
    added = (
        Node("null", f"{fc}_weight"),
        Node("null", f"{fc}_bias"),
        Node("FullyConnected", fc, {"num_hidden": str(num_classes)}, ((number, 0), (count, 0), (count + 1, 0))),
    )
    return with_loss(Symbol((*nodes, *added), ((count + 2, 0),), symbol.version))


def with_loss(symbol: Symbol, *, is_multi_label: bool = False) -> Symbol:
    """Let a classifier end with what MXNet's ``Module`` and ``score.py`` train by; Gluon's exports have no loss."""
    [end] = symbol.heads
    op, loss = symbol.nodes[end[0]].op, "LogisticRegressionOutput" if is_multi_label else "SoftmaxOutput"
    if op == loss or (not is_multi_label and op in _LOSSES):
        return symbol
    while symbol.nodes[end[0]].op in OUTPUTS and symbol.nodes[end[0]].inputs:
        end = symbol.nodes[end[0]].inputs[0]
    nodes = [*symbol.nodes[: end[0] + 1]]
    if nodes[-1].op not in ("FullyConnected", "Flatten"):  # maps of one value each, as a convolution gives them
        nodes.append(Node("Flatten", f"{nodes[-1].name}_flat", {}, (end,)))
        end = len(nodes) - 1, 0
    name = "softmax_output" if any(node.name == "softmax" for node in nodes) else "softmax"
    nodes += [Node("null", "softmax_label"), Node(loss, name, {}, (end, (len(nodes), 0)))]
    return Symbol(tuple(nodes), ((len(nodes) - 1, 0),), symbol.version)


def require_operators(symbol: Symbol) -> None:
    """Raise ModelError for operators that are not known, all of them in one line."""
    used = symbol.used()
    wrong: dict[str, list[str]] = {}
    for number, node in enumerate(symbol.nodes):
        if number in used and not node.is_variable and node.op not in OPERATORS:
            wrong.setdefault(node.op, []).append(node.name)
    if detection := sorted(wrong.keys() & DETECTION):
        raise ModelError(
            f"this is a detector ({', '.join(f'{op}: {wrong[op][0]}' for op in detection)}), and steadytrain trains"
            " classifiers: cut it after a layer of its body (--layer-before-fullc NAME), which gives it a classifier"
        )
    if any("quantize" in op for op in wrong):
        raise ModelError(
            "this is an int8 network of mx.contrib.quantization: convert the fp32 one that it was made from"
        )
    if wrong:
        listed = [f"{op} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})" for op, names in wrong.items()]
        more = f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""
        raise ModelError(
            f"{len(wrong)} operator{'s' * (len(wrong) > 1)} of the symbol cannot be converted:"
            f" {'; '.join(listed[:_SHOWN])}{more}. Cut the network before them (--layer-before-fullc NAME), or export"
            " it without them"
        )


def find_head(symbol: Symbol, end: int) -> int | None:
    """Find the classifier: the last dense layer or convolution on the way to the end, with nothing but pooling, shapes
    and activations behind it; None where there is none."""
    number = end
    while True:
        node = symbol.nodes[number]
        if node.op in ("FullyConnected", "Convolution"):
            return number
        if node.op not in _PASSING or not node.inputs:
            return None
        number = node.inputs[0][0]


def _channels(symbol: Symbol, params: Mapping[str, Array]) -> tuple[int, ...]:
    """Channels of the images, by the first convolution's filters; both usual numbers where none says it."""
    for node in symbol.nodes:
        if node.op in ("Convolution", "Convolution_v1") and len(node.inputs) > 1:
            weight = params.get(symbol.nodes[node.inputs[1][0]].name)
            if weight is not None and weight.ndim == 4:
                return (weight.shape[1] * Attributes(node).whole("num_group", 1),)
            break
    return (3, 1)


def _sizes(symbol: Symbol) -> tuple[int, ...]:
    """Sides to try: the one that the symbol says, where it says one."""
    for node in symbol.nodes:
        if node.is_variable and node.name == "data" and SHAPE in node.attrs:
            sides = re.findall(r"\d+", node.attrs[SHAPE])[-2:]
            if len(sides) == 2 and sides[0] == sides[1] and len(sides[0]) <= 4 and 1 < int(sides[0]) <= MAX_SIDE:
                return (int(sides[0]),)
    return SIZES


class _SizeError(ModelError):
    """Images of zeros of this size do not go through the network."""


class _Construction:
    """A network under construction: see :class:`steadytrain.interop.mxnet.operators.Builder`."""

    def __init__(
        self,
        symbol: Symbol,
        params: Mapping[str, Array],
        channels: int,
        size: int,
        head: int | None,
        *,
        is_new_head: bool,
    ) -> None:
        self.symbol, self.values_of, self.channels, self.size = symbol, params, channels, size
        self.head_number, self.is_new_head = head, is_new_head
        self.root, self.graph = nn.Module(), fx.Graph()
        self.names: dict[str, str] = {}
        self.moving: set[str] = set()
        self.owners: dict[str, nn.Parameter | Tensor] = {}
        self.modules: dict[int, str] = {}
        self.data: str | None = None
        self.number, self.last_side = 0, 0

    def run(self, end: tuple[int, int]) -> Value:
        """Add all nodes that the end needs; return its value."""
        symbol = replace(self.symbol, heads=(end,))
        used, results = symbol.used(), dict[tuple[int, int], Value]()
        last_use = {number: at for at in sorted(used) for number, _ in symbol.nodes[at].inputs}
        with torch.no_grad():
            for number in sorted(used):
                node = symbol.nodes[number]
                if node.is_variable:
                    continue
                self.number = number
                for entry in self._value_inputs(node):
                    if entry not in results:
                        if not symbol.nodes[entry[0]].is_variable:
                            raise ModelError(
                                f"the node {node.name} takes output {entry[1]} of {symbol.nodes[entry[0]].name}, which"
                                " has none of that number: the symbol is damaged"
                            )
                        results[entry] = self._variable(symbol.nodes[entry[0]])
                outputs = self._convert(node, [results[entry] for entry in self._value_inputs(node)])
                for output, value in enumerate(outputs):
                    results[number, output] = value
                for entry in [key for key in results if last_use.get(key[0]) == number and key != end]:
                    results[entry] = Value(results[entry].place, results[entry].example[:0])  # its memory is not needed
        if end not in results:
            raise ModelError(f"{symbol.nodes[end[0]].name} is a variable: there is no network; name another symbol")
        return results[end]

    def _value_inputs(self, node: Node) -> Sequence[tuple[int, int]]:
        """Inputs that are values of the graph: of a layer the first one, of an output all but labels."""
        if not node.inputs:
            raise ModelError(f"the node {node.name} ({node.op}) has no inputs: the symbol is damaged")
        return node.inputs[:1] if node.op in LAYERS or node.op in OUTPUTS else node.inputs

    def _convert(self, node: Node, inputs: list[Value]) -> list[Value]:
        attributes = Attributes(node)
        try:
            result = OPERATORS[node.op](self, node, attributes, inputs)
        except ModelError:
            raise
        except _ERRORS as error:
            shapes = " and ".join(str(tuple(value.example.shape)) for value in inputs)
            raise _SizeError(
                f"{node.name} ({node.op}) cannot take {shapes} for images of {self.size}x{self.size} pixels"
                f" and {self.channels} channels: {first_line(error)}; --size sets another"
            ) from error
        attributes.require_all_read()
        return result if isinstance(result, list) else [result]

    def _variable(self, node: Node) -> Value:
        """A variable that is a value: one of the arrays, or the images."""
        array = self.values_of.get(node.name)
        if array is None and _SHAPE in node.attrs:
            shape = [int(side) for side in re.findall(r"\d{1,10}", node.attrs[_SHAPE])]
            _require_values(node, shape)
            array = np.zeros(shape, np.float32)
        if array is not None:
            key = self._free_name(node.name)
            parameter = nn.Parameter(torch.tensor(array, dtype=torch.float32))
            self.root.register_parameter(key, parameter)
            self.names[key] = node.name
            number = self.symbol.nodes.index(node)
            attrs = {**node.attrs, _SHAPE: str(tuple(array.shape))}
            self.symbol = self.symbol.with_node(number, replace(node, attrs=attrs))
            return Value(self.graph.get_attr(key), parameter)
        if self.data is not None:
            raise ModelError(
                f"the network takes {self.data} and {node.name}, and a classifier takes images alone: is {node.name}"
                " missing in the .params file?"
            )
        self.data = node.name
        _require_values(node, (self.channels, self.size, self.size))
        example = torch.zeros(1, self.channels, self.size, self.size)
        first = next((place for place in self.graph.nodes), None)
        if first is None:
            return Value(self.graph.placeholder("images"), example)
        with self.graph.inserting_before(first):
            return Value(self.graph.placeholder("images"), example)

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Value:
        def places(value: Any) -> Any:
            if isinstance(value, list):
                return [places(each) for each in value]
            return value.place if isinstance(value, Value) else value

        def examples(value: Any) -> Any:
            if isinstance(value, list):
                return [examples(each) for each in value]
            return value.example if isinstance(value, Value) else value

        place = self.graph.call_function(function, tuple(map(places, args)), kwargs)
        return self._seen(Value(place, function(*map(examples, args), **kwargs)))

    def layer(self, node: Node, module: nn.Module, value: Value, names: Mapping[str, int]) -> Value:
        key = self._free_name(node.name)
        for name, place in names.items():
            if place >= len(node.inputs) or not self.symbol.nodes[node.inputs[place][0]].is_variable:
                raise ModelError(
                    f"the node {node.name} ({node.op}) has a {name} that is no variable of the symbol: only trained"
                    " parameters can be converted"
                )
            variable = self.symbol.nodes[node.inputs[place][0]].name
            self._check_shape(node, variable, getattr(module, name))
            if variable in self.owners:  # layers that share a parameter
                owner = self.owners[variable]
                if owner.shape != getattr(module, name).shape:
                    raise _SizeError(f"{variable} is shared by layers of different shapes, {node.name} among them")
                setattr(module, name, owner)
            self.owners[variable] = getattr(module, name)
            self.names[f"{key}.{name}"] = variable
            if node.op in NORMS and place > 2:
                self.moving.add(variable)
        self.root.add_module(key, module)
        self.modules[self.number] = key
        place_in_graph = self.graph.call_module(key, (value.place,))
        example = module.eval()(value.example)
        module.train()
        return self._seen(Value(place_in_graph, example))

    def _check_shape(self, node: Node, variable: str, expected: Tensor) -> None:
        array = self.values_of.get(variable)
        is_new = self.number == self.head_number and self.is_new_head
        if array is None or is_new or tuple(array.shape) == tuple(expected.shape):
            return
        raise _SizeError(
            f"{variable} of {node.name} has the shape {tuple(array.shape)}, and {tuple(expected.shape)} suits images of"
            f" {self.size}x{self.size} pixels and {self.channels} channels"
        )

    def _seen(self, value: Value) -> Value:
        if value.example.ndim == 4 and value.example.shape[2] > 1:
            self.last_side = value.example.shape[2]
        return value

    def _free_name(self, name: str) -> str:
        """A name of an attribute that is free: of letters, digits and underscores."""
        key = re.sub(r"\W", "_", name, flags=re.ASCII) or "_"
        key = f"_{key}" if key[0].isdigit() or keyword.iskeyword(key) else key
        while hasattr(self.root, key):
            key += "_"
        return key

    def finish(self, value: Value) -> Network:
        if self.data is None:
            raise ModelError("the symbol takes no images: every variable of it is in the .params file")
        self.graph.output(value.place)
        self.graph.lint()
        head = self.modules.get(-1 if self.head_number is None else self.head_number, "")
        module: Any = fx.GraphModule(self.root, self.graph, "MXNetNetwork")
        layers = _layers(self.graph, self.root, head)
        module.group_matcher = lambda coarse=False: lambda name: layers.get(name.partition(".")[0], 0)  # as timm's nets
        return Network(
            module,
            self.symbol,
            self.names,
            frozenset(self.moving),
            head,
            int(value.example.shape[-1]) if value.example.ndim == 2 else int(value.example.shape[1]),
            self.channels,
            self.size,
            self.last_side,
        )


def _require_values(node: Node, shape: Sequence[int]) -> None:
    """Refuse a variable before its memory is taken that no classifier has. Raises ModelError."""
    if math.prod(shape) > MAX_VALUES:
        values = f"{math.prod(shape):,} values, and up to {MAX_VALUES:,} are taken"
        raise ModelError(f"the variable {node.name} would have {values}: the symbol is damaged")


def _layers(graph: fx.Graph, root: nn.Module, head: str) -> dict[str, int]:
    """The layer of each module, from the bottom up: a block ends with a sum or where branches are joined.

    Where nothing is joined, each convolution and dense layer begins one; the classifier is the top.
    """
    joins = {operator.add, torch.cat}
    has_joins = any(node.target in joins for node in graph.nodes)
    layers, depth = dict[str, int](), 0
    for node in graph.nodes:
        if node.op == "call_module":
            is_weighted = isinstance(root.get_submodule(node.target), nn.Conv2d | nn.Linear)
            depth += is_weighted and not has_joins
            layers[node.target] = depth
        depth += node.target in joins
    return layers | {head: depth + 1}
