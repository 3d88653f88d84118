"""Torch modules as MXNet's symbols: traced by torch.fx, each call written as an operator of MXNet 1.x.

Layers with parameters stay whole; activations, poolings and the like are traced into the functions that they call, so
that each has one form. What an operator and a function have in common stands in the tables of :mod:`.operators`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx, nn

from steadytrain.errors import ModelError, first_line
from steadytrain.interop.mxnet.graph import with_loss
from steadytrain.interop.mxnet.operators import ACTIVATIONS, ARITHMETIC, REDUCTIONS
from steadytrain.interop.mxnet.params import Array
from steadytrain.interop.mxnet.symbol import Node, Symbol

NodeEntry: TypeAlias = tuple[int, int]
_ERRORS = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError)
LEAVES = (nn.Conv2d, nn.modules.batchnorm._BatchNorm, nn.Linear, nn.PReLU)
_SHOWN = 10


@dataclass(frozen=True)
class TracedSymbol:
    """A symbol that ends with a softmax, and its arrays by name, ``arg:`` and ``aux:`` included."""

    symbol: Symbol
    params: dict[str, Array]


class Tracer(fx.Tracer):
    """Keep layers with parameters whole, those that timm derives from torch's too, but for the activation in them."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        has_parameters = next(m.parameters(), None) is not None
        return isinstance(m, LEAVES) or (has_parameters and super().is_leaf_module(m, module_qualified_name))

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        value = super().call_module(m, forward, args, kwargs)
        act = getattr(m, "act", None) if isinstance(m, LEAVES) else None  # of timm's norms with an activation
        return act(value) if isinstance(act, nn.Module) else value


def trace(module: nn.Module, *, name: str) -> fx.GraphModule:
    """Trace a module as it evaluates: a graph to read, not to run. Raises ModelError where it depends on values."""
    was_training = module.training
    try:
        module.eval()
        return fx.GraphModule(module, Tracer().trace(module))
    except (*_ERRORS, fx.proxy.TraceError) as error:
        raise ModelError(f"{name} cannot be traced ({first_line(error)}): it has no form in MXNet") from error
    finally:
        module.train(was_training)


def export_symbol(
    module: nn.Module, *, name: str, channels: int, size: int, is_multi_label: bool = False
) -> TracedSymbol:
    """Write a network of torch in MXNet's operators.

    Args:
        module: takes images float[B, C, H, W], returns logits.
        name: of the model, for messages.
        channels, size: of the images; pooling to a fixed size is written for this one.
        is_multi_label: end with a sigmoid instead of a softmax.

    Raises:
        ModelError: it cannot be traced, or some of its calls have no operator of MXNet: all of them are listed.
    """
    traced = trace(module, name=name)
    was_training = traced.training
    with torch.no_grad():
        shapes = _shapes(traced.eval(), torch.zeros(1, channels, size, size))
    traced.train(was_training)
    writer = _Writer(traced, shapes)
    wrong: dict[str, list[str]] = {}
    end: NodeEntry = (0, 0)
    for node in traced.graph.nodes:
        if node.op == "output":
            end = writer.entry(node.args[0])
            continue
        try:
            writer.write(node)
        except _NoOperatorError as error:
            wrong.setdefault(str(error), []).append(_place(node))
            writer.entries[node] = (0, 0)
    if wrong:
        listed = [f"{call} ({', '.join(dict.fromkeys(places))[:60]})" for call, places in wrong.items()]
        raise ModelError(
            f"{name} has {len(wrong)} call{'s' * (len(wrong) > 1)} without an operator of MXNet 1.9.1:"
            f" {'; '.join(listed[:_SHOWN])}. Networks of convolutions, batch norms, ReLUs, poolings and dense layers"
            " can be written"
        )
    return TracedSymbol(with_loss(Symbol(tuple(writer.nodes), (end,)), is_multi_label=is_multi_label), writer.params)


class _NoOperatorError(Exception):
    """A call that MXNet has no operator for, in words."""


def _shapes(module: fx.GraphModule, images: Tensor) -> dict[fx.Node, tuple[int, ...]]:
    """Run a traced module; return the shape of each value that is a tensor."""
    interpreter = fx.Interpreter(module)
    interpreter.args_iter = iter([images])
    shapes = {}
    for node in module.graph.nodes:  # Interpreter.run would start a thread, for a progress bar
        interpreter.env[node] = result = interpreter.run_node(node)
        if isinstance(result, Tensor):
            shapes[node] = tuple(result.shape)
    return shapes


def _place(node: fx.Node) -> str:
    """Name a call by the module that makes it, where it is one of torch's, else by its number in the graph."""
    if node.op == "call_module":
        return str(node.target).replace(".", "_")
    path, kind = next(reversed((node.meta.get("nn_module_stack") or {"": ("", object)}).values()))
    return str(path).replace(".", "_") if kind.__module__.startswith("torch.nn.") else node.name


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (int(value[0]), int(value[1]))


class _Writer:
    """A symbol under construction: its nodes, its arrays, and where each value of the traced module stands."""

    def __init__(self, module: fx.GraphModule, shapes: Mapping[fx.Node, tuple[int, ...]]) -> None:
        self.module, self.shapes = module, shapes
        self.modules = dict(module.named_modules())
        self.nodes: list[Node] = []
        self.params: dict[str, Array] = {}
        self.entries: dict[fx.Node, Any] = {}
        self.taken: set[str] = set()
        self.variables: dict[str, NodeEntry] = {}

    def add(self, op: str, name: str, inputs: Sequence[NodeEntry], **attrs: object) -> NodeEntry:
        name = self.free_name(name)
        values = {key: str(value) for key, value in attrs.items()}
        self.nodes.append(Node(op, name, values, tuple(inputs)))
        return len(self.nodes) - 1, 0

    def call(self, op: str, node: fx.Node, *inputs: Any, **attrs: object) -> NodeEntry:
        """Add the operator of a call, of values of the traced module."""
        return self.add(op, _place(node), [self.entry(value) for value in inputs], **attrs)

    def free_name(self, name: str) -> str:
        base = name = re.sub(r"\W", "_", name)
        number = 0
        while name in self.taken:
            number += 1
            name = f"{base}_{number}"
        self.taken.add(name)
        return name

    def variable(self, name: str, value: Tensor | Array | None = None, *, aux: bool = False) -> NodeEntry:
        """A variable, with its array where it is a parameter; the same one for a parameter that is used twice."""
        if name in self.variables:
            return self.variables[name]
        entry = self.add("null", name, [])
        self.variables[name] = entry
        if value is not None:
            array = value.detach().float().cpu().numpy() if isinstance(value, Tensor) else value
            self.params[f"{'aux' if aux else 'arg'}:{self.nodes[entry[0]].name}"] = array
        return entry

    def entry(self, value: Any) -> NodeEntry:
        entry = self.entries.get(value) if isinstance(value, fx.Node) else None
        if not isinstance(entry, tuple):
            raise _NoOperatorError(f"a value that is no tensor, {value}")
        return entry

    def write(self, node: fx.Node) -> None:
        if node.op == "placeholder":
            if self.entries:
                raise _NoOperatorError(f"a second input, {node.target}")
            self.entries[node] = self.variable("data")
        elif node.op == "get_attr":
            owner, _, key = str(node.target).rpartition(".")
            value = getattr(self.module.get_submodule(owner), key)
            self.entries[node] = self.variable(str(node.target).replace(".", "_"), value)
        elif node.op == "call_module":
            self.entries[node] = self.layer(node, self.modules[str(node.target)], self.entry(node.args[0]))
        else:
            self.entries[node] = self.function(node)

    def layer(self, node: fx.Node, part: nn.Module, x: NodeEntry) -> NodeEntry:
        name = _place(node)
        match part:
            case nn.Conv2d():
                return self.convolution(name, part, x)
            case nn.modules.batchnorm._BatchNorm():
                return self.norm(name, part, x)
            case nn.Linear():
                inputs, is_flat = self.inputs(name, part, x), len(self.shapes[node]) == 2
                attrs = {"num_hidden": part.out_features, "no_bias": part.bias is None, "flatten": is_flat}
                return self.add("FullyConnected", name, inputs, **attrs)
            case nn.PReLU():
                return self.add("LeakyReLU", name, [x, self.variable(f"{name}_gamma", part.weight)], act_type="prelu")
        raise _NoOperatorError(type(part).__name__)

    def convolution(self, name: str, part: nn.Conv2d, x: NodeEntry) -> NodeEntry:
        if type(part).forward is not nn.Conv2d.forward:
            raise _NoOperatorError(f"{type(part).__name__}, a convolution with a forward of its own")
        if isinstance(part.padding, str) or part.padding_mode != "zeros":
            raise _NoOperatorError(f"a convolution with padding {part.padding!r} of {part.padding_mode}")
        attrs = {
            "kernel": part.kernel_size,
            "stride": part.stride,
            "pad": part.padding,
            "dilate": part.dilation,
            "num_filter": part.out_channels,
            "num_group": part.groups,
            "no_bias": part.bias is None,
        }
        return self.add("Convolution", name, self.inputs(name, part, x), **attrs)

    def inputs(self, name: str, part: nn.Linear | nn.Conv2d, x: NodeEntry) -> list[NodeEntry]:
        """Return a layer's input with its weight and its bias, if it has one."""
        variables = [x, self.variable(f"{name}_weight", part.weight)]
        return variables if part.bias is None else [*variables, self.variable(f"{name}_bias", part.bias)]

    def norm(self, name: str, part: nn.modules.batchnorm._BatchNorm, x: NodeEntry) -> NodeEntry:
        if part.running_mean is None or part.running_var is None:
            raise _NoOperatorError("a batch norm without statistics")
        ones = torch.ones(part.num_features)
        is_fixed = part.weight is None or (not part.weight.requires_grad and bool((part.weight == 1).all()))
        inputs = [
            x,
            self.variable(f"{name}_gamma", ones if part.weight is None else part.weight),
            self.variable(f"{name}_beta", torch.zeros_like(ones) if part.bias is None else part.bias),
            self.variable(f"{name}_moving_mean", part.running_mean, aux=True),
            self.variable(f"{name}_moving_var", part.running_var, aux=True),
        ]
        momentum = 0.9 if part.momentum is None else 1 - part.momentum
        return self.add("BatchNorm", name, inputs, eps=part.eps, momentum=momentum, fix_gamma=is_fixed)

    def function(self, node: fx.Node) -> Any:
        """A call of a function or of a method of a tensor."""
        if node not in self.shapes:
            return None  # a size: it is read where the tensor that it makes is written
        target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
        handler = _FUNCTIONS.get(target.strip("_"))
        if handler is None:
            raise _NoOperatorError(target)
        try:
            return handler(self, node, *node.args, **node.kwargs)
        except (TypeError, ValueError) as error:
            raise _NoOperatorError(f"{target} with these arguments") from error


def _arithmetic(name: str) -> Callable[..., NodeEntry]:
    """Write a function of two values, either of which may be a number."""
    row = ARITHMETIC[name]

    def handle(w: _Writer, node: fx.Node, a: Any, b: Any, **options: Any) -> NodeEntry:
        if options.get("alpha", 1) != 1 or options.get("rounding_mode") is not None:
            raise _NoOperatorError(f"{name} with {', '.join(options)}")
        if isinstance(a, fx.Node) and isinstance(b, fx.Node):
            return w.call(row.pairs[0] if w.shapes[a] == w.shapes[b] else row.pairs[1], node, a, b)
        if isinstance(a, fx.Node):
            return w.call(row.scalars[0], node, a, scalar=float(b))
        return w.call((row.reversed or row.scalars)[0], node, b, scalar=float(a))

    return handle


def _act(act_type: str) -> Callable[..., NodeEntry]:
    return lambda w, node, x, *_, **__: w.call("Activation", node, x, act_type=act_type)


def _softplus(w: _Writer, node: fx.Node, x: fx.Node, beta: float = 1, threshold: float = 20) -> NodeEntry:
    if beta != 1 or threshold < 20:
        raise _NoOperatorError(f"softplus with {beta}, {threshold}")
    return w.call("Activation", node, x, act_type="softrelu")


def _leaky(act_type: str, default: float | None = None) -> Callable[..., NodeEntry]:
    def handle(w: _Writer, node: fx.Node, x: fx.Node, *values: float, **options: Any) -> NodeEntry:
        options.pop("inplace", None)
        if default is None:
            return w.call("LeakyReLU", node, x, act_type=act_type)
        return w.call("LeakyReLU", node, x, act_type=act_type, slope=next(iter((*values, *options.values())), default))

    return handle


def _gelu(w: _Writer, node: fx.Node, x: fx.Node, approximate: str = "none") -> NodeEntry:
    if approximate != "none":
        raise _NoOperatorError(f"GELU with {approximate}")
    return w.call("LeakyReLU", node, x, act_type="gelu")


def _clip(low: float | None, high: float | None) -> Callable[..., NodeEntry]:
    def handle(
        w: _Writer, node: fx.Node, x: fx.Node, min_val: Any = low, max_val: Any = high, *_: Any, **__: Any
    ) -> Any:
        return w.call("clip", node, x, a_min=float(min_val), a_max=float(max_val))

    return handle


def _gated(gate: str, **attrs: object) -> Callable[..., NodeEntry]:
    """Write a value times a gate of itself."""

    def handle(w: _Writer, node: fx.Node, x: fx.Node, *_: Any, **__: Any) -> NodeEntry:
        entry = w.entry(x)
        return w.add("elemwise_mul", _place(node), [entry, w.add(gate, f"{_place(node)}_gate", [entry], **attrs)])

    return handle


_HARD_SIGMOID = {"alpha": 1 / 6, "beta": 0.5}


def _hard_sigmoid(w: _Writer, node: fx.Node, x: fx.Node, *_: Any, **__: Any) -> NodeEntry:
    return w.call("hard_sigmoid", node, x, **_HARD_SIGMOID)


def _cat(w: _Writer, node: fx.Node, tensors: Any, dim: int = 0, **_: Any) -> NodeEntry:
    return w.call("Concat", node, *tensors, dim=dim, num_args=len(tensors))


def _flatten(w: _Writer, node: fx.Node, x: fx.Node, start_dim: int = 0, end_dim: int = -1) -> NodeEntry:
    rank = len(w.shapes[x])
    if start_dim % rank != 1 or end_dim % rank != rank - 1:
        raise _NoOperatorError(f"flatten from axis {start_dim} to {end_dim}")
    return w.entry(x) if rank == 2 else w.call("Flatten", node, x)


def _view(w: _Writer, node: fx.Node, x: fx.Node, *shape: Any, **_: Any) -> NodeEntry:
    before, after = w.shapes[x], w.shapes[node]
    if before[0] != after[0]:
        raise _NoOperatorError("a reshape over the images of a batch")
    return w.call("Reshape", node, x, shape=(0, *after[1:]))


def _pool(
    w: _Writer, node: fx.Node, x: fx.Node, window: Sequence[Any], *, ceil_mode: bool, **attrs: object
) -> NodeEntry:
    """Write a pooling; ``window``: kernel, stride (the kernel where it is None) and padding."""
    kernel, stride, padding = window
    sides = _pair(kernel), _pair(stride or kernel), _pair(padding)
    attrs |= dict(zip(("kernel", "stride", "pad"), sides, strict=True))
    before, after = w.shapes[x][-2:], w.shapes[node][-2:]
    counts = [(side + 2 * p - k) / s for side, k, s, p in zip(before, *sides, strict=True)]
    windows = {"full": tuple(1 + math.ceil(n) for n in counts), "valid": tuple(1 + math.floor(n) for n in counts)}
    # With ceil_mode torch leaves out windows that lie wholly in the padding; "full" has them.
    named = ("full", "valid") if ceil_mode else ("valid",)
    convention = next((name for name in named if windows[name] == after), None)
    if convention is None:
        raise _NoOperatorError(f"a pooling from {before} to {after} with ceil_mode: another --size may fit")
    return w.call("Pooling", node, x, pooling_convention=convention, **attrs)


def _max_pool(
    w: _Writer, node: fx.Node, x: fx.Node, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1,
    ceil_mode: bool = False, **_: Any,
) -> NodeEntry:  # fmt: skip
    if _pair(dilation) != (1, 1):
        raise _NoOperatorError("a pooling with dilation")
    return _pool(w, node, x, (kernel_size, stride, padding), ceil_mode=ceil_mode, pool_type="max")


def _avg_pool(
    w: _Writer, node: fx.Node, x: fx.Node, kernel_size: Any, stride: Any = None, padding: Any = 0,
    ceil_mode: bool = False, count_include_pad: bool = True, divisor_override: Any = None,
) -> NodeEntry:  # fmt: skip
    if divisor_override:
        raise _NoOperatorError("a pooling with a divisor")
    attrs = {"pool_type": "avg", "count_include_pad": count_include_pad}
    return _pool(w, node, x, (kernel_size, stride, padding), ceil_mode=ceil_mode, **attrs)


def _adaptive(kind: str) -> Callable[..., NodeEntry]:
    """Write pooling to a size: global, left out where nothing changes, or of whole windows."""

    def handle(w: _Writer, node: fx.Node, x: fx.Node, output_size: Any, **_: Any) -> NodeEntry:
        before, after = w.shapes[x][-2:], w.shapes[node][-2:]
        if after == (1, 1):
            return w.call("Pooling", node, x, global_pool=True, kernel=(1, 1), pool_type=kind)
        if after == before:
            return w.entry(x)
        if any(have % want for have, want in zip(before, after, strict=True)):
            raise _NoOperatorError(f"adaptive pooling from {before} to {after}: another --size may divide evenly")
        window = tuple(have // want for have, want in zip(before, after, strict=True))
        return w.call("Pooling", node, x, kernel=window, stride=window, pool_type=kind)

    return handle


def _reduced(op: str) -> Callable[..., NodeEntry]:
    def handle(w: _Writer, node: fx.Node, x: fx.Node, dim: Any, keepdim: bool = False, **_: Any) -> NodeEntry:
        return w.call(op, node, x, axis=(dim,) if isinstance(dim, int) else tuple(dim), keepdims=keepdim)

    return handle


def _conv2d(
    w: _Writer, node: fx.Node, x: fx.Node, weight: fx.Node, bias: fx.Node | None = None, stride: Any = 1,
    padding: Any = 0, dilation: Any = 1, groups: int = 1,
) -> NodeEntry:  # fmt: skip
    shape, inputs = w.shapes[weight], [x, weight, *([] if bias is None else [bias])]
    attrs = {"kernel": shape[2:], "stride": _pair(stride), "pad": _pair(padding), "dilate": _pair(dilation)}
    return w.call("Convolution", node, *inputs, num_filter=shape[0], num_group=groups, no_bias=bias is None, **attrs)


def _getitem(w: _Writer, node: fx.Node, x: fx.Node, index: Any) -> NodeEntry:
    parts = index if isinstance(index, tuple) else (index,)
    if not all(isinstance(part, slice) for part in parts):
        raise _NoOperatorError("an index that is no slice")
    ends = {key: tuple(getattr(part, key) for part in parts) for key in ("start", "stop", "step")}
    if any(isinstance(end, fx.Node) for group in ends.values() for end in group):
        raise _NoOperatorError("a slice whose ends are computed")
    attrs = {"begin": ends["start"], "end": ends["stop"]}
    attrs |= {"step": ends["step"]} if any(ends["step"]) else {}
    return w.call("slice", node, x, **attrs)


def _pad(
    w: _Writer, node: fx.Node, x: fx.Node, pad: Any, mode: str = "constant", value: float | None = None
) -> NodeEntry:
    """Pad height and width by ``Pad``; channels, which it does not pad, by zeros that are joined to them."""
    widths = [*map(int, pad), *(0 for _ in range(8 - len(pad)))]
    if mode != "constant" or value or any(widths[6:]) or min(widths) < 0:
        raise _NoOperatorError("padding that is not with zeros")
    entry, name = w.entry(x), _place(node)
    if any(widths[:4]):
        order = (0, 0, 0, 0, widths[2], widths[3], widths[0], widths[1])
        entry = w.add("Pad", f"{name}_sides", [entry], mode="constant", pad_width=order, constant_value=0)
    before, after = widths[4:6]
    channels = w.shapes[x][1]
    if max(before, after) > channels:
        raise _NoOperatorError("padding by more channels than there are")
    if not before and not after:
        return entry
    zeros = w.add("zeros_like", f"{name}_zeros", [entry])
    joined = [entry]
    if before:
        joined.insert(0, w.add("slice_axis", f"{name}_before", [zeros], axis=1, begin=0, end=before))
    if after:
        joined.append(w.add("slice_axis", f"{name}_after", [zeros], axis=1, begin=0, end=after))
    return w.add("Concat", name, joined, dim=1, num_args=len(joined))


def _same(w: _Writer, node: fx.Node, x: fx.Node, *_: Any, **__: Any) -> NodeEntry:
    return w.entry(x)


def _dropout(w: _Writer, node: fx.Node, x: fx.Node, p: float = 0.5, *_: Any, **__: Any) -> NodeEntry:
    return w.call("Dropout", node, x, p=p)


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{f"{prefix}{name}": _arithmetic(name) for name in ARITHMETIC for prefix in ("", "i")},
    "div": _arithmetic("truediv"),
    **{function.__name__: _act(act_type) for act_type, function in ACTIVATIONS.items()},
    **{function.__name__: _reduced(op) for op, function in REDUCTIONS.items()},
    "softplus": _softplus,
    "leaky_relu": _leaky("leaky", 0.01),
    "elu": _leaky("elu", 1.0),
    "selu": _leaky("selu"),
    "gelu": _gelu,
    "relu6": _clip(0.0, 6.0),
    "hardtanh": _clip(-1.0, 1.0),
    "clamp": _clip(None, None),
    "silu": _gated("Activation", act_type="sigmoid"),
    "hardswish": _gated("hard_sigmoid", **_HARD_SIGMOID),
    "hardsigmoid": _hard_sigmoid,
    **dict.fromkeys(("cat", "concat"), _cat),
    "flatten": _flatten,
    **dict.fromkeys(("view", "reshape"), _view),
    "max_pool2d": _max_pool,
    "avg_pool2d": _avg_pool,
    "adaptive_avg_pool2d": _adaptive("avg"),
    "adaptive_max_pool2d": _adaptive("max"),
    "conv2d": _conv2d,
    "getitem": _getitem,
    "pad": _pad,
    "dropout": _dropout,
    **dict.fromkeys(("contiguous", "clone", "detach", "float"), _same),
}
