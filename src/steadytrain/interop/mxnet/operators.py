"""The operators of MXNet's image classifiers, each in terms of torch.

A handler gets the network under construction, the node, its parameters and the values of its inputs, and returns its
output or outputs. What it cannot do exactly, it refuses with the node's name. Laws are those of MXNet 1.9.1; where its
default differs from torch's, the default stands in the handler.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from steadytrain.errors import ModelError
from steadytrain.interop.mxnet.symbol import Attributes, Node

MAX_VALUES = 1 << 28
"""Weights of one layer; the largest of VGG has 103 million."""
MAX_SIDE = 4096
"""Pixels of a side, as of the images that are trained on."""


class Arithmetic(NamedTuple):
    """A function of two values in MXNet's operators, those first that are written.

    Args:
        function: of torch, or of Python's ``operator``.
        pairs: of two values of the same shape, of two that are spread over each other, and older names.
        scalars: of a value and a number; ``reversed``: of a number and a value, empty where the order is the same.
    """

    function: Callable[..., Any]
    pairs: tuple[str, ...]
    scalars: tuple[str, ...]
    reversed: tuple[str, ...] = ()


def _names(new: str, old: str, has_order: bool = False) -> tuple[tuple[str, ...], ...]:
    pairs = f"elemwise_{new}", f"broadcast_{new}", f"_{old}", f"_{old.lower()}", f"_{new}", f"broadcast_{old.lower()}"
    scalars = f"_{old.lower()}_scalar", f"_{old}Scalar"
    return pairs, scalars, (f"_r{old.lower()}_scalar", f"_R{old}Scalar") if has_order else ()


ARITHMETIC = {
    "add": Arithmetic(operator.add, *_names("add", "Plus")),
    "sub": Arithmetic(operator.sub, *_names("sub", "Minus", has_order=True)),
    "mul": Arithmetic(operator.mul, *_names("mul", "Mul")),
    "truediv": Arithmetic(operator.truediv, *_names("div", "Div", has_order=True)),
}
"""Functions of two values, by Python's names: read and written."""
ACTIVATIONS: dict[str, Callable[..., Any]] = {
    "relu": F.relu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "softrelu": F.softplus,
    "softsign": F.softsign,
    "log_sigmoid": F.logsigmoid,
    "mish": F.mish,
}
"""``act_type`` of ``Activation`` -> its function: read and written."""
REDUCTIONS: dict[str, Callable[..., Any]] = {"mean": torch.mean, "sum": torch.sum, "max": torch.amax, "min": torch.amin}
"""Operators over axes: read and written."""


class Value:
    """An intermediate result: its place in the graph, and an example of it, from images of zeros."""

    def __init__(self, place: fx.Node, example: Tensor) -> None:
        self.place, self.example = place, example


NodeValues: TypeAlias = list[Value]


class Builder(Protocol):
    """The interface of the network under construction that handlers use."""

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Value:
        """Add a call of a function of values."""

    def layer(self, node: Node, module: nn.Module, value: Value, names: dict[str, int]) -> Value:
        """Add a layer; ``names``: for each of its parameters and buffers the number of the node's input."""


class BatchNorm(nn.BatchNorm2d):
    """MXNet's batch norm over axis 1, of any rank; with ``global_stats`` it never uses those of the batch."""

    def __init__(self, features: int, *, eps: float, momentum: float, global_stats: bool) -> None:
        super().__init__(features, eps=eps, momentum=momentum)
        self.global_stats = global_stats

    def _check_input_dim(self, input: Tensor) -> None:
        pass

    def forward(self, input: Tensor) -> Tensor:
        if not self.global_stats:
            return super().forward(input)
        return F.batch_norm(input, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)


def reshape(x: Tensor, codes: Sequence[int], reverse: bool = False) -> Tensor:
    """MXNet's reshape: 0 keeps a side, -1 is what is left, -2 keeps all others, -3 joins two, -4 splits one in two.

    >>> reshape(torch.zeros(2, 3, 4, 6), (0, -3, 2, -1)).shape, reshape(torch.zeros(2, 6, 4), (0, -4, -1, 2, -2)).shape
    (torch.Size([2, 12, 2, 3]), torch.Size([2, 3, 2, 4]))
    """
    sides, target = list(x.shape), list(codes)
    if reverse:
        sides.reverse()
        target.reverse()
    result: list[int] = []
    while target:
        code = target.pop(0)
        if code == -1:
            result.append(-1)
            sides = sides[1:]
        elif code == -2:
            result += sides
            sides = []
        elif code == -3:
            result.append(sides[0] * sides[1])
            sides = sides[2:]
        elif code == -4:
            first, second = target.pop(0), target.pop(0)
            side = sides.pop(0)
            first = side // second if first == -1 else first
            result += [first, side // first]
        else:
            result.append(sides[0] if code == 0 else code)
            sides = sides[1:]
    return x.reshape(result[::-1] if reverse else result)


def take(x: Tensor, begin: Sequence[int | None], end: Sequence[int | None], step: Sequence[int | None]) -> Tensor:
    """A slice of the first axes."""
    return x[tuple(slice(*bounds) for bounds in zip(begin, end, step, strict=True))]


def add_empty_windows(
    pooled: Tensor, x: Tensor, kernel: tuple[int, int], stride: tuple[int, int], padding: tuple[int, int], value: float
) -> Tensor:
    """Add the last row and column of windows that lie wholly in the padding, which torch leaves out.

    MXNet's convention "full" has 1 + ceil((side + 2 padding - kernel) / stride) windows, also those without a pixel.
    """
    windows = zip(x.shape[2:], kernel, stride, padding, strict=True)
    height, width = (1 + math.ceil((side + 2 * p - k) / s) for side, k, s, p in windows)
    return F.pad(pooled, (0, width - pooled.shape[3], 0, height - pooled.shape[2]), value=value)


def l2_normalize(x: Tensor, axes: tuple[int, ...], eps: float) -> Tensor:
    """Divide by the root of the sum of squares."""
    return x / (x.square().sum(axes, keepdim=True) + eps).sqrt()


def _convolution(b: Builder, node: Node, a: Attributes, x: NodeValues) -> Value:
    kernel, groups = a.pair("kernel", "?"), a.whole("num_group", 1)
    options: dict[str, Any] = {
        "stride": a.pair("stride", "(1, 1)"),
        "padding": a.pair("pad", "(0, 0)"),
        "dilation": a.pair("dilate", "(1, 1)"),
        "groups": groups,
        "bias": not a.flag("no_bias", False),
    }
    a.choice("layout", "None", "None", "NCHW")
    filters, channels = a.whole("num_filter"), x[0].example.shape[1]
    _require_size(a, "num_filter", filters * channels * kernel[0] * kernel[1])
    return b.layer(
        node,
        nn.Conv2d(channels, filters, kernel, **options),
        x[0],
        {"weight": 1} | ({"bias": 2} if options["bias"] else {}),
    )


def _require_size(a: Attributes, key: str, num_values: int) -> None:
    """Refuse a layer before its memory is taken that no classifier has."""
    if not 0 < num_values <= MAX_VALUES:
        raise a.error(key, f"its layer would have {num_values:,} weights, up to {MAX_VALUES:,} are taken: --size N?")


def _require_side(a: Attributes, key: str, *sides: int) -> None:
    """Refuse a picture before its memory is taken that no classifier has."""
    if not all(0 <= side <= MAX_SIDE for side in sides):
        raise a.error(key, f"a picture would have a side of {max(sides):,}, and up to {MAX_SIDE:,} are taken")


def _dense(b: Builder, node: Node, a: Attributes, x: NodeValues) -> Value:
    value, has_bias = x[0], not a.flag("no_bias", False)
    if a.flag("flatten", True) and value.example.ndim != 2:
        value = b.call(torch.flatten, value, 1)
    units = a.whole("num_hidden")
    _require_size(a, "num_hidden", units * value.example.shape[-1])
    module = nn.Linear(value.example.shape[-1], units, bias=has_bias)
    return b.layer(node, module, value, {"weight": 1} | ({"bias": 2} if has_bias else {}))


def _batch_norm(b: Builder, node: Node, a: Attributes, x: NodeValues) -> Value:
    if a.whole("axis", 1) != 1:
        raise a.error("axis", "only axis 1 (NCHW) can be converted")
    if a.flag("output_mean_var", False):
        raise a.error("output_mean_var", "a norm with several outputs cannot be converted")
    module = BatchNorm(
        x[0].example.shape[1],
        eps=a.number("eps", 1e-3),
        momentum=1 - a.number("momentum", 0.9),
        global_stats=a.flag("use_global_stats", False),
    )
    module.weight.requires_grad_(not a.flag("fix_gamma", True))
    return b.layer(node, module, x[0], {"weight": 1, "bias": 2, "running_mean": 3, "running_var": 4})


def _pooling(b: Builder, node: Node, a: Attributes, x: NodeValues) -> Value:
    kind = a.choice("pool_type", "max", "max", "avg", "sum")
    a.choice("layout", "None", "None", "NCHW")
    is_global = a.flag("global_pool", False)
    kernel = (1, 1) if is_global and not a.text("kernel", "()").strip("() ") else a.pair("kernel", "?")
    stride, padding = a.pair("stride", "(1, 1)"), a.pair("pad", "(0, 0)")
    convention = a.choice("pooling_convention", "valid", "valid", "full")
    includes_padding = a.flag("count_include_pad", True)
    if is_global:
        if kind == "max":
            return b.call(torch.amax, x[0], (2, 3), keepdim=True)
        return b.call(torch.mean if kind == "avg" else torch.sum, x[0], (2, 3), keepdim=True)
    ceil_mode = convention == "full"
    # torch wants no more padding than half the kernel; MXNet allows it.
    if padding[0] * 2 > kernel[0] or padding[1] * 2 > kernel[1]:
        raise a.error("pad", "torch pads a pooling by half of its kernel at most")
    if kind == "max":
        pooled = b.call(F.max_pool2d, x[0], kernel, stride, padding, ceil_mode=ceil_mode)
    else:
        options = {"divisor_override": 1} if kind == "sum" else {}
        pooled = b.call(F.avg_pool2d, x[0], kernel, stride, padding, ceil_mode, includes_padding, **options)
    if not ceil_mode or all(s + p <= k for k, s, p in zip(kernel, stride, padding, strict=True)):
        return pooled  # there is a pixel in every window
    empty = torch.finfo(torch.float32).min if kind == "max" else 0.0
    return b.call(add_empty_windows, pooled, x[0], kernel, stride, padding, empty)


def _activation(b: Builder, node: Node, a: Attributes, x: NodeValues) -> Value:
    return b.call(ACTIVATIONS[a.choice("act_type", "?", *ACTIVATIONS)], x[0])


def _leaky_relu(b: Builder, node: Node, a: Attributes, x: NodeValues) -> Value:
    kind = a.choice("act_type", "leaky", "leaky", "prelu", "elu", "selu", "gelu", "rrelu")
    slope, low, high = a.number("slope", 0.25), a.number("lower_bound", 0.125), a.number("upper_bound", 0.334)
    if kind == "prelu":
        return b.layer(node, nn.PReLU(x[0].example.shape[1]), x[0], {"weight": 1})
    if kind == "rrelu":
        return b.layer(node, nn.RReLU(low, high), x[0], {})
    if kind == "leaky":
        return b.call(F.leaky_relu, x[0], slope)
    if kind == "elu":
        return b.call(F.elu, x[0], slope)
    return b.call(F.selu if kind == "selu" else F.gelu, x[0])


def _softmax(b: Builder, node: Node, a: Attributes, x: NodeValues) -> Value:
    """``SoftmaxOutput`` and ``SoftmaxActivation`` take the channels, or all that belongs to an image."""
    value = x[0]
    if node.op in ("softmax", "log_softmax"):
        temperature = a.text("temperature", "None")
        if a.text("dtype", "None") not in ("None", "float32") or a.flag("use_length", False):
            raise a.error("dtype", "only a plain softmax can be converted")
        scaled = value if temperature == "None" else b.call(torch.div, value, float(temperature))
        return b.call(F.softmax if node.op == "softmax" else F.log_softmax, scaled, a.whole("axis", -1))
    if node.op == "SoftmaxActivation":
        over_channels = a.choice("mode", "instance", "instance", "channel") == "channel"
    else:
        over_channels = a.flag("multi_output", False)
        if a.flag("preserve_shape", False):
            return b.call(F.softmax, value, -1)
    if over_channels or value.example.ndim == 2:
        return b.call(F.softmax, value, 1)
    flat = b.call(F.softmax, b.call(torch.flatten, value, 1), 1)
    return b.call(torch.reshape, flat, (-1, *value.example.shape[1:]))


def _binary(function: Callable[..., Any]) -> Callable[..., Value]:
    def handle(b: Builder, node: Node, a: Attributes, x: NodeValues) -> Value:
        if len(x) != 2:
            raise ModelError(f"the node {node.name} ({node.op}) has {len(x)} inputs and needs 2: the symbol is damaged")
        return b.call(function, x[0], x[1])

    return handle


def _add_n(b: Builder, node: Node, a: Attributes, x: NodeValues) -> Value:
    total = x[0]
    for value in x[1:]:
        total = b.call(operator.add, total, value)
    return total


def _scalar(function: Callable[..., Any], *, is_reversed: bool = False) -> Callable[..., Value]:
    def handle(b: Builder, node: Node, a: Attributes, x: NodeValues) -> Value:
        a.left.discard("is_int")
        scalar = a.number("scalar", 1.0)
        return b.call(function, scalar, x[0]) if is_reversed else b.call(function, x[0], scalar)

    return handle


def _scalar_limit(name: str) -> Callable[..., Value]:
    def handle(b: Builder, node: Node, a: Attributes, x: NodeValues) -> Value:
        a.left.discard("is_int")
        return b.call(torch.clamp, x[0], **{name: a.number("scalar", 1.0)})

    return handle


def _unary(function: Callable[..., Any], **options: Any) -> Callable[..., Value]:
    def handle(b: Builder, node: Node, a: Attributes, x: NodeValues) -> Value:
        return b.call(function, x[0], **options)

    return handle


def _same(b: Builder, node: Node, a: Attributes, x: NodeValues) -> NodeValues:
    return x


def _cast(b: Builder, node: Node, a: Attributes, x: NodeValues) -> NodeValues:
    """Between floating-point formats: the network's own format, or autocast's, takes the place of MXNet's."""
    a.left -= {"cast_narrow", "num_outputs"}
    if node.op != "amp_multicast":
        a.choice("dtype", "float32", "float16", "float32", "float64", "bfloat16")
    return x


def _first(b: Builder, node: Node, a: Attributes, x: NodeValues) -> Value:
    return x[0]


def _concat(b: Builder, node: Node, a: Attributes, x: NodeValues) -> Value:
    return b.call(torch.cat, x, a.whole("dim", 1))


def _lrn(b: Builder, node: Node, a: Attributes, x: NodeValues) -> Value:
    options = {"alpha": a.number("alpha", 1e-4), "beta": a.number("beta", 0.75), "k": a.number("knorm", 2.0)}
    return b.call(F.local_response_norm, x[0], a.whole("nsize"), **options)


def _dropout(b: Builder, node: Node, a: Attributes, x: NodeValues) -> Value:
    a.choice("mode", "training", "training")
    if a.ints("axes"):
        raise a.error("axes", "only dropout of single values can be converted")
    return b.layer(node, nn.Dropout(a.number("p", 0.5)), x[0], {})


def _slice(b: Builder, node: Node, a: Attributes, x: NodeValues) -> Value:
    begin, end, step = a.items("begin"), a.items("end"), a.items("step") or ()
    step = step if len(step) == len(begin) else (None,) * len(begin)
    if any((stride or 1) < 0 for stride in step):
        raise a.error("step", "steps backwards cannot be converted")
    return b.call(take, x[0], begin, end, step)


def _slice_axis(b: Builder, node: Node, a: Attributes, x: NodeValues) -> Value:
    axis = a.whole("axis") % x[0].example.ndim
    before = (None,) * axis
    return b.call(take, x[0], (*before, a.whole("begin")), (*before, a.optional("end")), (*before, None))


def _split(b: Builder, node: Node, a: Attributes, x: NodeValues) -> NodeValues:
    count, axis, squeezes = a.whole("num_outputs"), a.whole("axis", 1), a.flag("squeeze_axis", False)
    axis %= x[0].example.ndim
    side = x[0].example.shape[axis]
    if count < 1 or side % count:
        raise a.error("num_outputs", f"it must divide the side {side}")
    width, before, parts = side // count, (None,) * axis, []
    for number in range(count):
        ends = (*before, number * width), (*before, (number + 1) * width), (*before, None)
        part = b.call(take, x[0], *ends)
        parts.append(b.call(torch.squeeze, part, axis) if squeezes else part)
    return parts


def _reshape(b: Builder, node: Node, a: Attributes, x: NodeValues) -> Value:
    codes, reverse = a.ints("shape"), a.flag("reverse", False)
    target, keeps = a.ints("target_shape"), a.flag("keep_highest", False)
    if not codes:  # the form of 0.5: 0 is what is left
        codes = tuple(-1 if side == 0 else side for side in target)
        codes = (0, *codes[1:]) if keeps else codes
    if reverse and -4 in codes:
        raise a.error("shape", "-4 together with reverse cannot be converted")
    if not codes or min(codes) < -4 or codes.count(-1) > 2:
        raise a.error("shape", "0, -1, -2, -3, -4 and sides can be converted")
    if codes[0] == 1 and x[0].example.shape[0] == 1 and len(codes) > 1 and -1 not in codes:
        raise a.error("shape", "it fixes the number of images: let it begin with 0 or -1")
    return b.call(reshape, x[0], codes, reverse)


def _transpose(b: Builder, node: Node, a: Attributes, x: NodeValues) -> Value:
    axes = a.ints("axes") or tuple(range(x[0].example.ndim))[::-1]
    return b.call(torch.permute, x[0], axes)


def _swap(b: Builder, node: Node, a: Attributes, x: NodeValues) -> Value:
    return b.call(torch.transpose, x[0], a.whole("dim1", 0), a.whole("dim2", 0))


def _expand(b: Builder, node: Node, a: Attributes, x: NodeValues) -> Value:
    return b.call(torch.unsqueeze, x[0], a.whole("axis"))


def _squeeze(b: Builder, node: Node, a: Attributes, x: NodeValues) -> Value:
    axes = a.ints("axis")
    if not axes:
        raise a.error("axis", "name the axes, or one image of a batch of one would lose its first")
    return b.call(torch.squeeze, x[0], axes)


def _pad(b: Builder, node: Node, a: Attributes, x: NodeValues) -> Value:
    mode = a.choice("mode", "constant", "constant", "edge", "reflect")
    widths, value = a.ints("pad_width"), a.number("constant_value", 0.0)
    if len(widths) != 2 * x[0].example.ndim or len(widths) != 8 or any(widths[:4]):
        raise a.error("pad_width", "eight numbers, of which the first four are 0, can be converted")
    sides = (widths[6], widths[7], widths[4], widths[5])
    _require_side(a, "pad_width", *sides)
    if mode == "constant":
        return b.call(F.pad, x[0], sides, "constant", value)
    return b.call(F.pad, x[0], sides, "replicate" if mode == "edge" else "reflect")


def _clip(b: Builder, node: Node, a: Attributes, x: NodeValues) -> Value:
    return b.call(torch.clamp, x[0], a.number("a_min"), a.number("a_max"))


def _reduce(function: Callable[..., Any]) -> Callable[..., Value]:
    def handle(b: Builder, node: Node, a: Attributes, x: NodeValues) -> Value:
        rank = x[0].example.ndim
        axes = tuple(axis % rank for axis in a.ints("axis"))
        if a.flag("exclude", False):
            axes = tuple(axis for axis in range(rank) if axis not in axes)
        axes = axes or tuple(range(rank))
        if 0 in axes:
            raise a.error("axis", "a mean or sum over the images of a batch cannot be converted")
        return b.call(function, x[0], axes, keepdim=a.flag("keepdims", False))

    return handle


def _l2_normalization(b: Builder, node: Node, a: Attributes, x: NodeValues) -> Value:
    mode, rank = a.choice("mode", "instance", "instance", "channel", "spatial"), x[0].example.ndim
    axes = {"instance": tuple(range(1, rank)), "channel": (1,), "spatial": tuple(range(2, rank))}[mode]
    return b.call(l2_normalize, x[0], axes, a.number("eps", 1e-10))


def _bilinear_resize(b: Builder, node: Node, a: Attributes, x: NodeValues) -> Value:
    a.choice("mode", "size", "size")
    aligned = a.flag("align_corners", True)
    sides = (a.whole("height", 1), a.whole("width", 1))
    _require_side(a, "height", *sides)
    return b.call(F.interpolate, x[0], size=sides, mode="bilinear", align_corners=aligned)


def _adaptive_pooling(b: Builder, node: Node, a: Attributes, x: NodeValues) -> Value:
    sides = a.ints("output_size") or (1,)
    _require_side(a, "output_size", *sides)
    return b.call(F.adaptive_avg_pool2d, x[0], (sides[0], sides[-1]))


def _hard_sigmoid(b: Builder, node: Node, a: Attributes, x: NodeValues) -> Value:
    scaled = b.call(operator.add, b.call(operator.mul, x[0], a.number("alpha", 0.2)), a.number("beta", 0.5))
    return b.call(torch.clamp, scaled, 0.0, 1.0)


Handler: TypeAlias = Callable[[Builder, Node, Attributes, NodeValues], Value | NodeValues]

OUTPUTS = {
    **dict.fromkeys(("SoftmaxOutput", "Softmax", "softmax", "SoftmaxActivation", "log_softmax"), _softmax),
    **dict.fromkeys(("LinearRegressionOutput", "MAERegressionOutput", "SVMOutput", "MakeLoss", "make_loss"), _first),
    "LogisticRegressionOutput": _unary(torch.sigmoid),
}
"""Operators that turn logits into what MXNet scores with: they are left out where logits are wanted. Their other inputs
are labels.
"""

LAYERS: dict[str, Handler] = {
    **dict.fromkeys(("Convolution", "Convolution_v1"), _convolution),
    "FullyConnected": _dense,
    **dict.fromkeys(("BatchNorm", "BatchNorm_v1", "CuDNNBatchNorm", "_contrib_SyncBatchNorm"), _batch_norm),
    "LeakyReLU": _leaky_relu,
}
"""Operators whose inputs after the first are parameters."""

OPERATORS: dict[str, Handler] = {
    **LAYERS,
    **OUTPUTS,
    **dict.fromkeys(("Pooling", "Pooling_v1"), _pooling),
    "Activation": _activation,
    **{name: _binary(row.function) for row in ARITHMETIC.values() for name in row.pairs},
    **{name: _scalar(row.function) for row in ARITHMETIC.values() for name in row.scalars},
    **{name: _scalar(row.function, is_reversed=True) for row in ARITHMETIC.values() for name in row.reversed},
    **dict.fromkeys(("_maximum", "_Maximum", "broadcast_maximum"), _binary(torch.maximum)),
    **dict.fromkeys(("_minimum", "_Minimum", "broadcast_minimum"), _binary(torch.minimum)),
    **dict.fromkeys(("ElementWiseSum", "add_n"), _add_n),
    **dict.fromkeys(("_power_scalar", "_PowerScalar"), _scalar(operator.pow)),
    **dict.fromkeys(("_maximum_scalar", "_MaximumScalar"), _scalar_limit("min")),
    **dict.fromkeys(("_minimum_scalar", "_MinimumScalar"), _scalar_limit("max")),
    **dict.fromkeys(("identity", "_copy"), _same),
    **dict.fromkeys(("BlockGrad", "stop_gradient"), _unary(torch.detach)),
    **dict.fromkeys(("Cast", "cast", "amp_cast", "amp_multicast"), _cast),
    **dict.fromkeys(("Concat", "concat"), _concat),
    "LRN": _lrn,
    "Dropout": _dropout,
    **dict.fromkeys(("slice", "crop"), _slice),
    "slice_axis": _slice_axis,
    **dict.fromkeys(("SliceChannel", "split"), _split),
    **dict.fromkeys(("Reshape", "reshape"), _reshape),
    **dict.fromkeys(("Flatten", "flatten"), _unary(torch.flatten, start_dim=1)),
    "transpose": _transpose,
    **dict.fromkeys(("SwapAxis", "swapaxes"), _swap),
    "expand_dims": _expand,
    "squeeze": _squeeze,
    **dict.fromkeys(("Pad", "pad"), _pad),
    "clip": _clip,
    **{name: _reduce(function) for op, function in REDUCTIONS.items() for name in (op, f"{op}_axis")},
    "L2Normalization": _l2_normalization,
    "_contrib_BilinearResize2D": _bilinear_resize,
    "_contrib_AdaptiveAvgPooling2D": _adaptive_pooling,
    "hard_sigmoid": _hard_sigmoid,
    **{name: _unary(getattr(torch, name)) for name in ("sigmoid", "tanh", "exp", "log", "sqrt", "square", "abs")},
    "relu": _unary(F.relu),
    "softsign": _unary(F.softsign),
    "negative": _unary(torch.neg),
    "zeros_like": _unary(torch.zeros_like),
    "ones_like": _unary(torch.ones_like),
}

DETECTION = {
    *("_contrib_MultiBoxPrior", "MultiBoxPrior", "_contrib_MultiBoxTarget", "MultiBoxTarget", "ROIPooling"),
    *("_contrib_MultiBoxDetection", "MultiBoxDetection", "_contrib_Proposal", "_contrib_MultiProposal"),
    *("_contrib_ROIAlign", "_contrib_box_nms", "_contrib_bounding_box"),
}
"""Operators of detectors, which steadytrain does not train."""
