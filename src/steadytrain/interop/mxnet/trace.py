"""Torch modules as MXNet's symbols: traced by torch.fx, each call written as an operator of MXNet 1.x."""

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
from steadytrain.interop.mxnet.params import Array
from steadytrain.interop.mxnet.symbol import Node, Symbol

NodeEntry: TypeAlias = tuple[int, int]
_ERRORS = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError)
LEAVES = (nn.Conv2d, nn.ConvTranspose2d, nn.modules.batchnorm._BatchNorm, nn.Linear, nn.PReLU)
_SHOWN = 10


@dataclass(frozen=True)
class TracedSymbol:
    """A symbol that ends with a softmax, and its arrays by name, ``arg:`` and ``aux:`` included."""

    symbol: Symbol
    params: dict[str, Array]


class Tracer(fx.Tracer):
    """Keep layers with parameters whole, those that timm derives from torch's too."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, LEAVES) or super().is_leaf_module(m, module_qualified_name)


def trace(module: nn.Module, *, name: str) -> fx.GraphModule:
    """Trace a module as it evaluates. Raises ModelError where its code depends on values."""
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
            wrong.setdefault(str(error), []).append(str(node.target))
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
            part = self.modules[str(node.target)]
            self.entries[node] = self.layer(str(node.target).replace(".", "_"), part, self.entry(node.args[0]), node)
        else:
            self.entries[node] = self.function(node)

    def layer(self, name: str, part: nn.Module, x: NodeEntry, node: fx.Node) -> NodeEntry:
        match part:
            case nn.Conv2d() | nn.ConvTranspose2d():
                return self.convolution(name, part, x)
            case nn.modules.batchnorm._BatchNorm():
                return self.norm(name, part, x)
            case nn.Linear():
                inputs = self.inputs(name, part, x)
                attrs = {"num_hidden": part.out_features, "no_bias": part.bias is None, "flatten": self.rank(node) == 2}
                return self.add("FullyConnected", name, inputs, **attrs)
            case nn.PReLU():
                return self.add("LeakyReLU", name, [x, self.variable(f"{name}_gamma", part.weight)], act_type="prelu")
            case nn.Dropout():
                return self.add("Dropout", name, [x], p=part.p)
            case nn.MaxPool2d():
                window = part.kernel_size, part.stride, part.padding
                return self.pool(node, x, "max", *window, part.ceil_mode, part.dilation)
            case nn.AvgPool2d():
                options = {"count_include_pad": part.count_include_pad}
                if part.divisor_override:
                    raise _NoOperatorError("AvgPool2d with a divisor")
                window = part.kernel_size, part.stride, part.padding
                return self.pool(node, x, "avg", *window, part.ceil_mode, **options)
            case nn.AdaptiveAvgPool2d() | nn.AdaptiveMaxPool2d():
                kind = "avg" if isinstance(part, nn.AdaptiveAvgPool2d) else "max"
                return self.adaptive(name, x, kind, part.output_size, node)
            case nn.Flatten():
                return self.flatten(name, x, part.start_dim, part.end_dim, node)
            case nn.Identity():
                return x
        return self.activation(name, part, x)

    def rank(self, node: fx.Node) -> int:
        return len(self.shapes[node])

    def convolution(self, name: str, part: nn.Conv2d | nn.ConvTranspose2d, x: NodeEntry) -> NodeEntry:
        if type(part).forward not in (nn.Conv2d.forward, nn.ConvTranspose2d.forward):
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
        is_up = isinstance(part, nn.ConvTranspose2d)
        attrs |= {"adj": part.output_padding} if is_up else {}
        return self.add("Deconvolution" if is_up else "Convolution", name, self.inputs(name, part, x), **attrs)

    def inputs(self, name: str, part: nn.Linear | nn.Conv2d | nn.ConvTranspose2d, x: NodeEntry) -> list[NodeEntry]:
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
        entry = self.add("BatchNorm", name, inputs, eps=part.eps, momentum=momentum, fix_gamma=is_fixed)
        act = getattr(part, "act", None)  # of timm's norms with an activation
        return entry if act is None or isinstance(act, nn.Identity) else self.activation(f"{name}_act", act, entry)

    def pool(
        self,
        node: fx.Node,
        x: NodeEntry,
        kind: str,
        kernel: Any,
        stride: Any,
        padding: Any,
        ceil_mode: bool,
        dilation: Any = 1,
        **attrs: object,
    ) -> NodeEntry:
        if _pair(dilation) != (1, 1):
            raise _NoOperatorError("a pooling with dilation")
        window = _pair(kernel), _pair(stride or kernel), _pair(padding)
        attrs |= dict(zip(("kernel", "stride", "pad"), window, strict=True))
        before, after = self.shapes[node.all_input_nodes[0]][-2:], self.shapes[node][-2:]
        counts = [(side + 2 * p - k) / s for side, k, s, p in zip(before, *window, strict=True)]
        sides = {"full": tuple(1 + math.ceil(n) for n in counts), "valid": tuple(1 + math.floor(n) for n in counts)}
        # With ceil_mode torch leaves out windows that lie wholly in the padding; "full" has them.
        named = ("full", "valid") if ceil_mode else ("valid",)
        convention = next((name for name in named if sides[name] == after), None)
        if convention is None:
            raise _NoOperatorError(f"a pooling from {before} to {after} with ceil_mode: another --size may fit")
        name = str(node.target).replace(".", "_") if node.op == "call_module" else node.name
        return self.add("Pooling", name, [x], pool_type=kind, pooling_convention=convention, **attrs)

    def adaptive(self, name: str, x: NodeEntry, kind: str, sides: Any, node: fx.Node) -> NodeEntry:
        """Pooling to a size: global, left out where nothing changes, or of whole windows."""
        before = self.shapes[node.all_input_nodes[0]][-2:]
        pair = sides if isinstance(sides, tuple | list) else (sides, sides)
        after = tuple(before[k] if side is None else side for k, side in enumerate(pair))
        if after == (1, 1):
            return self.add("Pooling", name, [x], global_pool=True, kernel=(1, 1), pool_type=kind)
        if after == before:
            return x
        if any(have % want for have, want in zip(before, after, strict=True)):
            raise _NoOperatorError(f"adaptive pooling from {before} to {after}: another --size may divide evenly")
        window = tuple(have // want for have, want in zip(before, after, strict=True))
        return self.add("Pooling", name, [x], kernel=window, stride=window, pool_type=kind)

    def flatten(self, name: str, x: NodeEntry, start: int, end: int, node: fx.Node) -> NodeEntry:
        rank = len(self.shapes[node.all_input_nodes[0]])
        if start % rank != 1 or end % rank != rank - 1:
            raise _NoOperatorError(f"flatten from axis {start} to {end}")
        return x if rank == 2 else self.add("Flatten", name, [x])

    def activation(self, name: str, part: nn.Module, x: NodeEntry) -> NodeEntry:
        act = {nn.ReLU: "relu", nn.Sigmoid: "sigmoid", nn.Tanh: "tanh", nn.Softsign: "softsign"}
        match part:
            case nn.ReLU6() | nn.Hardtanh():
                return self.add("clip", name, [x], a_min=float(part.min_val), a_max=float(part.max_val))
            case nn.LeakyReLU():
                return self.add("LeakyReLU", name, [x], act_type="leaky", slope=part.negative_slope)
            case nn.ELU():
                return self.add("LeakyReLU", name, [x], act_type="elu", slope=part.alpha)
            case nn.SELU():
                return self.add("LeakyReLU", name, [x], act_type="selu")
            case nn.GELU():
                return self.gelu(name, x, part.approximate)
            case nn.Softplus() if part.beta == 1 and part.threshold >= 20:
                return self.add("Activation", name, [x], act_type="softrelu")
            case nn.SiLU():
                gate = self.add("Activation", f"{name}_sigmoid", [x], act_type="sigmoid")
                return self.add("elemwise_mul", name, [x, gate])
            case nn.Hardsigmoid():
                return self.add("hard_sigmoid", name, [x], alpha=1 / 6, beta=0.5)
            case nn.Hardswish():
                gate = self.add("hard_sigmoid", f"{name}_gate", [x], alpha=1 / 6, beta=0.5)
                return self.add("elemwise_mul", name, [x, gate])
        for kind, text in act.items():
            if isinstance(part, kind):
                return self.add("Activation", name, [x], act_type=text)
        raise _NoOperatorError(type(part).__name__)

    def gelu(self, name: str, x: NodeEntry, approximate: str = "none") -> NodeEntry:
        if approximate != "none":
            raise _NoOperatorError(f"GELU with {approximate}")
        return self.add("LeakyReLU", name, [x], act_type="gelu")

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


def _two(op: str, broadcast: str, scalar: str, reverse: str) -> Callable[..., NodeEntry]:
    """A function of two values, either of which may be a number."""

    def handle(w: _Writer, node: fx.Node, a: Any, b: Any, **options: Any) -> NodeEntry:
        if options.get("alpha", 1) != 1 or options.get("rounding_mode") is not None:
            raise _NoOperatorError(f"{op} with {', '.join(options)}")
        if isinstance(a, fx.Node) and isinstance(b, fx.Node):
            same = w.shapes[a] == w.shapes[b]
            return w.add(op if same else broadcast, node.name, [w.entry(a), w.entry(b)])
        value, number, name = (a, b, scalar) if isinstance(a, fx.Node) else (b, a, reverse)
        return w.add(name, node.name, [w.entry(value)], scalar=float(number))

    return handle


def _act(part: nn.Module) -> Callable[..., NodeEntry]:
    def handle(w: _Writer, node: fx.Node, x: fx.Node, *_: Any, **__: Any) -> NodeEntry:
        return w.activation(node.name, part, w.entry(x))

    return handle


def _cat(w: _Writer, node: fx.Node, tensors: Any, dim: int = 0, **_: Any) -> NodeEntry:
    return w.add("Concat", node.name, [w.entry(x) for x in tensors], dim=dim, num_args=len(tensors))


def _flatten(w: _Writer, node: fx.Node, x: fx.Node, start_dim: int = 0, end_dim: int = -1) -> NodeEntry:
    return w.flatten(node.name, w.entry(x), start_dim, end_dim, node)


def _view(w: _Writer, node: fx.Node, x: fx.Node, *shape: Any, **_: Any) -> NodeEntry:
    before, after = w.shapes[x], w.shapes[node]
    if before[0] != after[0]:
        raise _NoOperatorError("a reshape over the images of a batch")
    return w.add("Reshape", node.name, [w.entry(x)], shape=(0, *after[1:]))


def _max_pool(
    w: _Writer, node: fx.Node, x: fx.Node, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1,
    ceil_mode: bool = False, **_: Any,
) -> NodeEntry:  # fmt: skip
    return w.pool(node, w.entry(x), "max", kernel_size, stride, padding, ceil_mode, dilation)


def _avg_pool(
    w: _Writer, node: fx.Node, x: fx.Node, kernel_size: Any, stride: Any = None, padding: Any = 0,
    ceil_mode: bool = False, count_include_pad: bool = True,
) -> NodeEntry:  # fmt: skip
    return w.pool(node, w.entry(x), "avg", kernel_size, stride, padding, ceil_mode, count_include_pad=count_include_pad)


def _adaptive(kind: str) -> Callable[..., NodeEntry]:
    def handle(w: _Writer, node: fx.Node, x: fx.Node, output_size: Any, **_: Any) -> NodeEntry:
        return w.adaptive(node.name, w.entry(x), kind, output_size, node)

    return handle


def _reduced(op: str) -> Callable[..., NodeEntry]:
    def handle(w: _Writer, node: fx.Node, x: fx.Node, dim: Any, keepdim: bool = False, **_: Any) -> NodeEntry:
        axes = (dim,) if isinstance(dim, int) else tuple(dim)
        return w.add(op, node.name, [w.entry(x)], axis=axes, keepdims=keepdim)

    return handle


def _conv2d(
    w: _Writer, node: fx.Node, x: fx.Node, weight: fx.Node, bias: fx.Node | None = None, stride: Any = 1,
    padding: Any = 0, dilation: Any = 1, groups: int = 1,
) -> NodeEntry:  # fmt: skip
    shape = w.shapes[weight]
    inputs = [w.entry(x), w.entry(weight), *([] if bias is None else [w.entry(bias)])]
    attrs = {"kernel": shape[2:], "stride": _pair(stride), "pad": _pair(padding), "dilate": _pair(dilation)}
    return w.add("Convolution", node.name, inputs, num_filter=shape[0], num_group=groups, no_bias=bias is None, **attrs)


def _getitem(w: _Writer, node: fx.Node, x: fx.Node, index: Any) -> NodeEntry:
    parts = index if isinstance(index, tuple) else (index,)
    if not all(isinstance(part, slice) for part in parts):
        raise _NoOperatorError("an index that is no slice")
    ends = {key: tuple(getattr(part, key) for part in parts) for key in ("start", "stop", "step")}
    if any(isinstance(end, fx.Node) for group in ends.values() for end in group):
        raise _NoOperatorError("a slice whose ends are computed")
    attrs = {"begin": ends["start"], "end": ends["stop"]}
    attrs |= {"step": ends["step"]} if any(ends["step"]) else {}
    return w.add("slice", node.name, [w.entry(x)], **attrs)


def _pad(
    w: _Writer, node: fx.Node, x: fx.Node, pad: Any, mode: str = "constant", value: float | None = None
) -> NodeEntry:
    """Pad height and width by ``Pad``; channels, which it does not pad, by zeros that are joined to them."""
    widths = [*map(int, pad), *(0 for _ in range(8 - len(pad)))]
    if mode != "constant" or value or any(widths[6:]) or min(widths) < 0:
        raise _NoOperatorError("padding that is not with zeros")
    entry, name = w.entry(x), node.name
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
    return w.add("Dropout", node.name, [w.entry(x)], p=p)


def _gelu(w: _Writer, node: fx.Node, x: fx.Node, approximate: str = "none") -> NodeEntry:
    return w.gelu(node.name, w.entry(x), approximate)


_ADD = _two("elemwise_add", "broadcast_add", "_plus_scalar", "_plus_scalar")
_SUB = _two("elemwise_sub", "broadcast_sub", "_minus_scalar", "_rminus_scalar")
_MUL = _two("elemwise_mul", "broadcast_mul", "_mul_scalar", "_mul_scalar")
_DIV = _two("elemwise_div", "broadcast_div", "_div_scalar", "_rdiv_scalar")
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("add", "iadd"), _ADD),
    **dict.fromkeys(("sub", "isub"), _SUB),
    **dict.fromkeys(("mul", "imul"), _MUL),
    **dict.fromkeys(("truediv", "itruediv", "div"), _DIV),
    **dict.fromkeys(("cat", "concat"), _cat),
    "flatten": _flatten,
    **dict.fromkeys(("view", "reshape"), _view),
    "max_pool2d": _max_pool,
    "avg_pool2d": _avg_pool,
    "adaptive_avg_pool2d": _adaptive("avg"),
    "adaptive_max_pool2d": _adaptive("max"),
    "mean": _reduced("mean"),
    "sum": _reduced("sum"),
    "amax": _reduced("max"),
    "relu": _act(nn.ReLU()),
    "relu6": _act(nn.ReLU6()),
    "sigmoid": _act(nn.Sigmoid()),
    "tanh": _act(nn.Tanh()),
    "silu": _act(nn.SiLU()),
    "hardswish": _act(nn.Hardswish()),
    "hardsigmoid": _act(nn.Hardsigmoid()),
    "gelu": _gelu,
    "conv2d": _conv2d,
    "getitem": _getitem,
    "pad": _pad,
    "dropout": _dropout,
    **dict.fromkeys(("contiguous", "clone", "detach", "float"), _same),
}
