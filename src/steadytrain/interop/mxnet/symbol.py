"""MXNet's symbol JSON: a graph of operators, as every release from 0.8 to 2.0 wrote it.

A node's parameters stand under ``param`` before 0.9, ``attr`` from 0.9 to 0.11 and ``attrs`` since; all are texts.
Before 0.9 the moving statistics of a batch norm are no nodes: they are added here under their usual names.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from steadytrain.errors import ModelError, storage_errors
from steadytrain.files import require_content

_MAX_BYTES = 64 << 20
_VERSION = 10901
"""The version in files of ours: MXNet 1.9.1."""
NORMS = ("BatchNorm", "BatchNorm_v1", "CuDNNBatchNorm", "_contrib_SyncBatchNorm")
SHAPE = "__shape__"
"""The attribute of a variable that holds its shape."""
_DTYPE = "__dtype__"
_MEAN, _STD = "__steadytrain_mean__", "__steadytrain_std__"
_STATISTICS = ("moving_mean", "moving_var")


@dataclass(frozen=True)
class Node:
    """An operator, or with the operator ``null`` a variable; its inputs are (node, output) of nodes before it."""

    op: str
    name: str
    attrs: Mapping[str, str] = field(default_factory=dict)
    inputs: tuple[tuple[int, int], ...] = ()

    @property
    def is_variable(self) -> bool:
        return self.op == "null"


@dataclass(frozen=True)
class Symbol:
    """A graph: nodes in an order in which they can be computed, and what it returns.

    ``version`` is that of the MXNet that wrote it, such as 10901; 0 where it does not say it, as before 0.9.
    """

    nodes: tuple[Node, ...]
    heads: tuple[tuple[int, int], ...]
    version: int = 0

    def used(self) -> set[int]:
        """Numbers of the nodes on which the heads depend."""
        waiting, seen = [node for node, _ in self.heads], set[int]()
        while waiting:
            number = waiting.pop()
            if number not in seen:
                seen.add(number)
                waiting += [node for node, _ in self.nodes[number].inputs]
        return seen

    def with_node(self, number: int, node: Node) -> Symbol:
        """A copy with one node replaced."""
        return replace(self, nodes=(*self.nodes[:number], node, *self.nodes[number + 1 :]))


def read_symbol(path: Path) -> Symbol:
    """Read a ``-symbol.json`` file. Raises ModelError: no such file, or no symbol."""
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ModelError(f"{path} has more than {_MAX_BYTES >> 20} MiB: no symbol is so large; name another file")
        require_content(path)
        return parse_symbol(path.read_text(encoding="utf-8-sig"), where=str(path))
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ModelError(f"{path}, byte {error.start:,}: not UTF-8 text: name the -symbol.json file") from error


def parse_symbol(text: str, *, where: str) -> Symbol:
    """Parse symbol JSON of any era.

    Args:
        text: the JSON.
        where: the file's name, for messages.

    Raises:
        ModelError: no JSON, no symbol, or nodes that do not form a graph.

    >>> old = '{"nodes": [{"op": "null", "param": {}, "name": "data", "inputs": [], "attr": {"lr_mult": "2"}}, {"op":'
    >>> old += ' "Flatten", "param": {}, "name": "flat", "inputs": [[0, 0]]}], "arg_nodes": [0], "heads": [[1, 0]]}'
    >>> [node.op for node in parse_symbol(old, where="old.json").nodes]
    ['null', 'Flatten']
    """
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{where} is no JSON ({error}): it is damaged, fetch it again") from error
    nodes = document.get("nodes") if isinstance(document, dict) else None
    heads = document.get("heads") if isinstance(document, dict) else None
    if not isinstance(nodes, list) or not isinstance(heads, list):
        raise ModelError(f"{where} has no nodes and heads: it is no MXNet symbol; name the -symbol.json file")
    parsed = tuple(_parse_node(node, number, where) for number, node in enumerate(nodes))
    ends = tuple(_parse_entry(head, len(parsed), "head", where) for head in heads)
    if not ends:
        raise ModelError(f"{where} has no heads: there is nothing that it returns")
    version = document.get("attrs", {})
    version = version.get("mxnet_version") if isinstance(version, dict) else None
    number = version[1] if isinstance(version, list) and len(version) == 2 and isinstance(version[1], int) else 0
    return _with_statistics(Symbol(parsed, ends, number))


def _parse_node(node: Any, number: int, where: str) -> Node:
    if not isinstance(node, dict) or not isinstance(node.get("op"), str) or not isinstance(node.get("name"), str):
        raise ModelError(f"{where}, node {number}: it has no op and name: it is damaged, fetch it again")
    attrs: dict[str, str] = {}
    # Where there are parameters apart (0.8), the other table holds the user's own: groups, rates.
    for key in ("param",) if "param" in node else ("attr", "attrs"):
        table = node.get(key) or {}
        if not isinstance(table, dict):
            raise ModelError(f"{where}, node {number} ({node['name']}): {key} is no table: it is damaged")
        attrs |= {str(name): str(value) for name, value in table.items()}
    inputs = node.get("inputs") or []
    if not isinstance(inputs, list):
        raise ModelError(f"{where}, node {number} ({node['name']}): its inputs are no list: it is damaged")
    entries = tuple(_parse_entry(entry, number, f"node {number} ({node['name']})", where) for entry in inputs)
    return Node(node["op"], node["name"], attrs, entries)


def _parse_entry(entry: Any, limit: int, what: str, where: str) -> tuple[int, int]:
    """Parse [node, output] or [node, output, version]; the node has a number below the limit."""
    if isinstance(entry, list) and len(entry) in (2, 3) and all(isinstance(value, int) for value in entry):
        node, output = entry[:2]
        if 0 <= node < limit and output >= 0:
            return node, output
    raise ModelError(f"{where}, {what}: the input {str(entry)[:40]} is no node before it: it is damaged")


def _with_statistics(symbol: Symbol) -> Symbol:
    """Give each batch norm that lacks them (before 0.9) the variables of its moving statistics."""
    if not any(node.op in NORMS and len(node.inputs) == 3 for node in symbol.nodes):
        return symbol
    nodes, places = list[Node](), list[int]()
    for node in symbol.nodes:
        inputs = tuple((places[number], output) for number, output in node.inputs)
        if node.op in NORMS and len(inputs) == 3:
            added = [Node("null", f"{node.name}_{name}") for name in _STATISTICS]
            inputs += tuple((len(nodes) + k, 0) for k in range(len(added)))
            nodes += added
        places.append(len(nodes))
        nodes.append(replace(node, inputs=inputs))
    return Symbol(tuple(nodes), tuple((places[number], output) for number, output in symbol.heads), symbol.version)


_SCORES = {
    *(
        "SoftmaxOutput",
        "Softmax",
        "softmax",
        "SoftmaxActivation",
        "log_softmax",
        "LogisticRegressionOutput",
        "SVMOutput",
    )
}


def single_output(symbol: Symbol) -> Symbol:
    """Keep of several outputs the only one that is a classifier's: others are features, or losses beside it.

    >>> nodes = (Node("null", "data"), Node("SoftmaxOutput", "softmax", {}, ((0, 0),)))
    >>> single_output(Symbol(nodes, ((0, 0), (1, 0)))).heads
    ((1, 0),)
    """
    scores = [head for head in symbol.heads if symbol.nodes[head[0]].op in _SCORES]
    return replace(symbol, heads=tuple(scores)) if len(scores) == 1 < len(symbol.heads) else symbol


def with_poolings_of_2015(symbol: Symbol) -> Symbol | None:
    """Return a symbol of before 0.9 whose poolings round up where they do not say how; None for any other.

    Until the parameter ``pooling_convention`` came in 2016, windows that lie in part beyond the picture counted.
    """
    at = [
        number
        for number, node in enumerate(symbol.nodes)
        if node.op in ("Pooling", "Pooling_v1") and "pooling_convention" not in node.attrs
    ]
    if symbol.version or not at:
        return None
    for number in at:
        node = symbol.nodes[number]
        symbol = symbol.with_node(number, replace(node, attrs={**node.attrs, "pooling_convention": "full"}))
    return symbol


def record_input(
    symbol: Symbol, channels: int, size: int, mean: Sequence[float] | None = None, std: Sequence[float] | None = None
) -> Symbol:
    """Record the images in a symbol: their shape where MXNet's ``infer_shape`` reads it, with any batch.

    Shapes that a program gives (``bind``, ``infer_shape(data=...)``) take precedence over it. ``mean`` and ``std``, of
    values from 0 to 1, are for :func:`recorded_scaling` alone: MXNet has no place for them.

    >>> record_input(Symbol((Node("null", "data"),), ((0, 0),)), 3, 224).nodes[0].attrs
    {'__shape__': '(0, 3, 224, 224)'}
    """
    scaling = {_MEAN: mean, _STD: std} if mean and std else {}
    for number, node in enumerate(symbol.nodes):
        if node.is_variable and node.name == "data":
            attrs = {**node.attrs, SHAPE: str((0, channels, size, size))}
            attrs |= {key: str(tuple(values)) for key, values in scaling.items() if values}
            return symbol.with_node(number, replace(node, attrs=attrs))
    return symbol


def record_arrays(symbol: Symbol, shapes: Mapping[str, Sequence[int]]) -> Symbol:
    """Let variables that say a shape and a number format (Gluon's do) say those of their float32 arrays.

    MXNet refuses to bind a symbol whose ``__shape__`` contradicts its layers, as that of a replaced classifier does.

    Args:
        symbol: of a network.
        shapes: of its arrays, by name; other variables but ``data`` (labels) lose what they say.

    >>> symbol = Symbol((Node("null", "fc_weight", {"__shape__": "(10, 0)", "__dtype__": "2"}),), ((0, 0),))
    >>> record_arrays(symbol, {"fc_weight": (3, 16)}).nodes[0].attrs
    {'__shape__': '(3, 16)', '__dtype__': '0'}
    """
    nodes = []
    for node in symbol.nodes:
        attrs = dict(node.attrs)
        if node.is_variable and node.name in shapes:
            attrs |= {SHAPE: str(tuple(shapes[node.name]))} if SHAPE in attrs else {}
            attrs |= {_DTYPE: "0"} if _DTYPE in attrs else {}
        elif node.is_variable and node.name != "data":
            attrs = {key: value for key, value in attrs.items() if key not in (SHAPE, _DTYPE)}
        elif node.is_variable and _DTYPE in attrs:
            attrs[_DTYPE] = "0"
        nodes.append(node if attrs == node.attrs else replace(node, attrs=attrs))
    return replace(symbol, nodes=tuple(nodes))


def recorded_scaling(symbol: Symbol, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    """Return the mean and standard deviation of images that a symbol of ours records; None in others.

    >>> symbol = record_input(Symbol((Node("null", "data"),), ((0, 0),)), 1, 28, (0.5,), (0.25,))
    >>> recorded_scaling(symbol, 1), recorded_scaling(symbol, 3)
    (((0.5,), (0.25,)), None)
    """
    attrs = next((node.attrs for node in symbol.nodes if node.is_variable and node.name == "data"), {})
    try:
        mean, std = (tuple(map(float, attrs.get(key, "").strip("(),").split(","))) for key in (_MEAN, _STD))
    except ValueError:
        return None
    is_whole = len(mean) == len(std) == channels and all(map(math.isfinite, mean)) and all(0 < s < 1e6 for s in std)
    return (mean, std) if is_whole else None


def symbol_json(symbol: Symbol) -> str:
    """Render a symbol in the form of MXNet 1.x.

    >>> parse_symbol(symbol_json(Symbol((Node("null", "data"),), ((0, 0),))), where="here").heads
    ((0, 0),)
    """
    nodes = []
    for node in symbol.nodes:
        table: dict[str, Any] = {"op": node.op, "name": node.name}
        table |= {"attrs": dict(node.attrs)} if node.attrs else {}
        nodes.append(table | {"inputs": [[number, output, 0] for number, output in node.inputs]})
    document = {
        "nodes": nodes,
        "arg_nodes": [number for number, node in enumerate(symbol.nodes) if node.is_variable],
        "node_row_ptr": list(range(len(nodes) + 1)),
        "heads": [[number, output, 0] for number, output in symbol.heads],
        "attrs": {"mxnet_version": ["int", symbol.version or _VERSION]},
    }
    return json.dumps(document, indent=2)


def write_symbol(path: Path, symbol: Symbol) -> None:
    """Write a ``-symbol.json`` file. Raises StorageError."""
    with storage_errors(path):
        path.write_text(f"{symbol_json(symbol)}\n", encoding="utf-8")


_HARMLESS = {
    *("workspace", "cudnn_tune", "cudnn_off", "num_args", "ndev", "out_grad", "grad_scale", "smooth_alpha"),
    *("ignore_label", "use_ignore", "normalization", "margin", "regularization_coefficient"),
    *("use_linear", "ctx_group", "lr_mult", "wd_mult", "force_mirroring", "valid_thresh"),
}
"""Parameters that change speed, memory or training, and no output."""


class Attributes:
    """The parameters of a node, by name and kind; each getter raises ModelError for a value that is none."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.left = {key for key in node.attrs if not key.startswith("__")} - _HARMLESS

    def text(self, key: str, default: str) -> str:
        self.left.discard(key)
        return self.node.attrs.get(key, default)

    def choice(self, key: str, default: str, *choices: str) -> str:
        value = self.text(key, default)
        if value not in choices:
            raise self.error(key, f"{' or '.join(choices)} can be converted")
        return value

    def flag(self, key: str, default: bool) -> bool:
        text = self.text(key, str(default)).strip().lower()
        if text not in ("true", "false", "1", "0", "none"):
            raise self.error(key, "it must be True or False")
        return text in ("true", "1")

    def number(self, key: str, default: float | None = None) -> float:
        text = self.text(key, "" if default is None else str(default))
        try:
            return float(text.rstrip("L"))
        except ValueError:
            raise self.error(key, "it must be a number") from None

    def whole(self, key: str, default: int | None = None) -> int:
        value = self.number(key, default)
        if value != value or value in (float("inf"), float("-inf")) or value != int(value):
            raise self.error(key, "it must be a whole number")
        return int(value)

    def optional(self, key: str) -> int | None:
        """A whole number, or None."""
        return None if self.text(key, "None") == "None" else self.whole(key)

    def items(self, key: str, default: str = "()") -> tuple[int | None, ...]:
        """Whole numbers and None; a single number is a tuple of one."""
        text = re.sub(r"(?<=\d)L\b", "", self.text(key, default))
        try:
            value = ast.literal_eval(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            value = "?"
        value = value if isinstance(value, list | tuple) else (value,)
        if not all(part is None or type(part) is int for part in value):
            raise self.error(key, "it must be a tuple of whole numbers")
        return tuple(value)

    def ints(self, key: str, default: str = "()") -> tuple[int, ...]:
        """Whole numbers; None stands for none at all."""
        value = self.items(key, default)
        if value == (None,):
            return ()
        if any(part is None for part in value):
            raise self.error(key, "it must be a tuple of whole numbers")
        return tuple(part for part in value if part is not None)

    def pair(self, key: str, default: str) -> tuple[int, int]:
        """Two numbers, of height and width; an empty tuple means the default."""
        value = self.ints(key, default) or self.ints("", default)
        if len(value) != 2:
            raise self.error(key, "only two dimensions (images) can be converted")
        return value[0], value[1]

    def error(self, key: str, limit: str) -> ModelError:
        value = self.node.attrs.get(key, "missing")
        return ModelError(f"the node {self.node.name} ({self.node.op}) has {key}={value[:60]}: {limit}")

    def require_all_read(self) -> None:
        """Raise ModelError for a parameter that no getter asked for: what it means would be lost in silence."""
        if self.left:
            key = min(self.left)
            raise self.error(key, "steadytrain does not know this parameter, so the network cannot be converted")
