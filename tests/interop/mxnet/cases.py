"""Small graphs, one or more for each operator: their symbols, arrays and images, and what MXNet 1.9.1 makes of them.

``STEADYTRAIN_MXNET_PYTHON=... python tests/interop/mxnet/cases.py`` writes ``tests/golden/mxnet-operators.npz``.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from steadytrain.interop.mxnet.params import write_params
from steadytrain.interop.mxnet.symbol import Node, Symbol, write_symbol

PROJECT = Path(__file__).parents[3]
ORACLE = PROJECT / "benchmarks" / "peers" / "mxnet_forward.py"
GOLDEN = PROJECT / "tests" / "golden" / "mxnet-operators.npz"
Array = NDArray[Any]
Entry = tuple[int, int]


@dataclass
class Case:
    """A graph with its arrays and images."""

    symbol: Symbol
    params: dict[str, Array]
    images: Array
    aux: set[str]

    @property
    def prefixed(self) -> dict[str, Array]:
        """The arrays as a checkpoint names them."""
        return {f"{'aux' if name in self.aux else 'arg'}:{name}": value for name, value in self.params.items()}


class Graph:
    """A symbol under construction."""

    def __init__(self, seed: int) -> None:
        self.nodes: list[Node] = []
        self.params: dict[str, Array] = {}
        self.aux: set[str] = set()
        self.random = np.random.RandomState(seed)

    def var(self, name: str) -> Entry:
        self.nodes.append(Node("null", name))
        return len(self.nodes) - 1, 0

    def p(self, name: str, *shape: int, positive: bool = False, aux: bool = False) -> Entry:
        value = self.random.rand(*shape) + 0.5 if positive else self.random.randn(*shape)
        self.params[name] = value.astype(np.float32)
        if aux:
            self.aux.add(name)
        return self.var(name)

    def op(self, op: str, *inputs: Entry, **attrs: object) -> Entry:
        name = f"{op.lower().strip('_')}{len(self.nodes)}"
        self.nodes.append(Node(op, name, {key: str(value) for key, value in attrs.items()}, inputs))
        return len(self.nodes) - 1, 0

    def norm(self, x: Entry, channels: int, op: str = "BatchNorm", **attrs: object) -> Entry:
        scale, shift = self.p("gamma", channels), self.p("beta", channels)
        mean, var = self.p("mean", channels, aux=True), self.p("var", channels, positive=True, aux=True)
        return self.op(op, x, scale, shift, mean, var, **attrs)


Make = Callable[[Graph, Entry], Entry]
IMAGES = (2, 4, 9, 9)


def _one(op: str, **attrs: object) -> Make:
    return lambda g, x: g.op(op, x, **attrs)


def _two(op: str, *shape: int) -> Make:
    """Of the images and a parameter, or of the images and themselves squared."""
    return lambda g, x: g.op(op, x, g.p("value", *shape, positive=True) if shape else g.op("square", x))


def _conv(shape: tuple[int, ...], op: str = "Convolution", bias: int | None = None, **attrs: object) -> Make:
    def make(g: Graph, x: Entry) -> Entry:
        inputs = [x, g.p("weight", *shape), *([] if bias is None else [g.p("bias", bias)])]
        return g.op(op, *inputs, kernel=shape[2:], **attrs)

    return make


def _pools() -> Iterable[tuple[str, Make]]:
    for kind in ("max", "avg", "sum"):
        for convention in ("valid", "full"):
            for kernel, stride, pad in ((3, 2, 1), (2, 2, 0), (3, 2, 0), (3, 1, 1)):
                options = {"kernel": (kernel,) * 2, "stride": (stride,) * 2, "pad": (pad,) * 2}
                name = f"pool {kind} {convention} {kernel}/{stride}/{pad}"
                yield name, _one("Pooling", pool_type=kind, pooling_convention=convention, **options)
        outside = {"kernel": (2, 3), "stride": (4, 2), "pad": (1, 1), "pooling_convention": "full"}
        yield f"pool {kind} full outside", _one("Pooling", pool_type=kind, **outside)
        yield f"pool {kind} global", _one("Pooling", pool_type=kind, global_pool=True, kernel=(7, 7), pad=(1, 1))
    inside = {"kernel": (3, 3), "pad": (1, 1), "stride": (2, 2), "count_include_pad": False}
    yield "pool avg inside", _one("Pooling", pool_type="avg", **inside)
    yield "pool avg inside full", _one("Pooling", pool_type="avg", pooling_convention="full", **inside)


CASES: dict[str, Make] = {
    "conv": _conv((6, 4, 3, 3), bias=6, num_filter=6),
    "conv stride pad": _conv((6, 4, 3, 3), num_filter=6, no_bias=True, stride=(2, 1), pad=(1, 2)),
    "conv groups": _conv((6, 2, 3, 3), bias=6, num_filter=6, num_group=2, pad=(1, 1)),
    "conv depthwise": _conv((4, 1, 3, 3), num_filter=4, num_group=4, no_bias="True"),
    "conv dilation": _conv((6, 4, 3, 3), bias=6, num_filter=6, dilate=(2, 2)),
    "norm": lambda g, x: g.norm(x, 4),
    "norm scale": lambda g, x: g.norm(x, 4, fix_gamma=False, eps=2e-5, momentum=0.8),
    "norm global": lambda g, x: g.norm(x, 4, fix_gamma=False, use_global_stats=True),
    "norm dense": lambda g, x: g.norm(g.op("Flatten", x), 324, fix_gamma=False),
    "dense": lambda g, x: g.op("FullyConnected", x, g.p("w", 5, 324), g.p("b", 5), num_hidden=5),
    "dense last": lambda g, x: g.op("FullyConnected", x, g.p("w", 5, 9), num_hidden=5, no_bias=True, flatten=False),
    "concat": lambda g, x: g.op("Concat", x, g.op("square", x), dim=1, num_args=2),
    "concat side": lambda g, x: g.op("Concat", x, g.op("square", x), dim=3, num_args=2),
    "lrn": _one("LRN", nsize=3, alpha=0.1, beta=0.6, knorm=1.5),
    "lrn default": _one("LRN", nsize=5),
    "dropout": _one("Dropout", p=0.4),
    **{
        f"act {kind}": _one("Activation", act_type=kind) for kind in ("relu", "sigmoid", "tanh", "softrelu", "softsign")
    },
    "leaky": _one("LeakyReLU"),
    "leaky slope": _one("LeakyReLU", act_type="leaky", slope=0.1),
    "elu": _one("LeakyReLU", act_type="elu", slope=0.7),
    "selu": _one("LeakyReLU", act_type="selu"),
    "gelu": _one("LeakyReLU", act_type="gelu"),
    "rrelu": _one("LeakyReLU", act_type="rrelu", lower_bound=0.1, upper_bound=0.3),
    "prelu": lambda g, x: g.op("LeakyReLU", x, g.p("gamma", 4), act_type="prelu"),
    "softmax output": lambda g, x: g.op("SoftmaxOutput", g.op("Flatten", x), g.var("softmax_label")),
    "softmax output channels": lambda g, x: g.op("SoftmaxOutput", x, g.var("softmax_label"), multi_output=True),
    "softmax": _one("softmax", axis=1, temperature=2.0),
    "log softmax": _one("log_softmax"),
    "softmax activation": _one("SoftmaxActivation", mode="channel"),
    "softmax activation instance": lambda g, x: g.op("SoftmaxActivation", g.op("Flatten", x)),
    "logistic": lambda g, x: g.op("LogisticRegressionOutput", x, g.var("softmax_label")),
    **{name: _two(name) for name in ("elemwise_add", "_Plus", "elemwise_sub", "_Minus", "elemwise_mul", "_Mul")},
    **{name: _two(name, 1, 4, 1, 1) for name in ("broadcast_add", "broadcast_sub", "broadcast_mul", "broadcast_div")},
    **{name: _two(name, 1, 4, 1, 1) for name in ("broadcast_maximum", "broadcast_minimum")},
    "elemwise_div": lambda g, x: g.op("elemwise_div", x, g.op("_plus_scalar", g.op("square", x), scalar=1.0)),
    "_maximum": _two("_maximum"),
    "_minimum": _two("_minimum"),
    "add_n": lambda g, x: g.op("ElementWiseSum", x, g.op("square", x), x, num_args=3),
    **{
        f"{name} scalar": _one(f"_{name}_scalar", scalar=1.7)
        for name in ("plus", "minus", "rminus", "mul", "div", "maximum", "minimum")
    },
    "rdiv scalar": lambda g, x: g.op("_rdiv_scalar", g.op("exp", x), scalar=1.7),
    "power scalar": _one("_power_scalar", scalar=2.0),
    "old scalars": lambda g, x: g.op("_MinusScalar", g.op("_MulScalar", x, scalar="0.0078125"), scalar="0.5"),
    "identity": _one("identity"),
    "block grad": _one("BlockGrad"),
    "cast": lambda g, x: g.op("Cast", g.op("Cast", x, dtype="float64"), dtype="float32"),
    "slice": _one("slice", begin="(None, 1, 2)", end="(None, 3, 8)", step="(None, 1, 2)"),
    "slice short": _one("slice", begin=(0, 1), end=(2, 3)),
    "slice axis": _one("slice_axis", axis=1, begin=1, end=3),
    "slice axis end": _one("slice_axis", axis=-1, begin=-3, end=None),
    "split": lambda g, x: (g.op("SliceChannel", x, num_outputs=2)[0], 1),
    "split squeeze": lambda g, x: (g.op("split", x, num_outputs=4, axis=1, squeeze_axis=True)[0], 2),
    "reshape": _one("Reshape", shape=(0, -1)),
    "reshape keep": _one("Reshape", shape=(0, 0, -1)),
    "reshape infer": _one("Reshape", shape=(0, 2, -1)),
    "reshape join": _one("Reshape", shape=(0, -3, -2)),
    "reshape split": _one("Reshape", shape=(0, -4, -1, 2, -2)),
    "reshape reverse": _one("Reshape", shape=(-1, 0), reverse=True),
    "reshape images": _one("Reshape", shape=(-1, 324)),
    "reshape old": _one("Reshape", target_shape=(2, 0)),
    "flatten": _one("Flatten"),
    "transpose": _one("transpose", axes=(0, 2, 3, 1)),
    "swap axes": _one("SwapAxis", dim1=1, dim2=3),
    "expand squeeze": lambda g, x: g.op("squeeze", g.op("expand_dims", x, axis=2), axis=(2,)),
    "pad": _one("Pad", mode="constant", pad_width=(0, 0, 0, 0, 1, 2, 3, 0), constant_value=0.5),
    "pad edge": _one("Pad", mode="edge", pad_width=(0, 0, 0, 0, 1, 2, 3, 0)),
    "pad reflect": _one("Pad", mode="reflect", pad_width=(0, 0, 0, 0, 1, 2, 3, 0)),
    "clip": _one("clip", a_min=-0.5, a_max=0.8),
    "mean": _one("mean", axis=(2, 3), keepdims=True),
    "mean exclude": _one("mean", axis=(0, 1), exclude=True),
    "sum": _one("sum", axis=1),
    "max": _one("max", axis=(2, 3)),
    "min": _one("min", axis=-1),
    **{f"l2 {mode}": _one("L2Normalization", mode=mode) for mode in ("instance", "channel", "spatial")},
    "resize": _one("_contrib_BilinearResize2D", height=5, width=13),
    "adaptive": _one("_contrib_AdaptiveAvgPooling2D", output_size=(3, 2)),
    "hard sigmoid": _one("hard_sigmoid"),
    **{name: _one(name) for name in ("relu", "sigmoid", "tanh", "softsign", "exp", "square", "abs", "negative")},
    "sqrt": lambda g, x: g.op("sqrt", g.op("abs", x)),
    "ones": _one("ones_like"),
    "zeros": _one("zeros_like"),
    **dict(_pools()),
}
"""Name -> what makes the graph."""


def case(name: str, *, seed: int = 0) -> Case:
    """A case with drawn arrays and images."""
    graph = Graph(seed)
    end = CASES[name](graph, graph.var("data"))
    images = graph.random.randn(*IMAGES).astype(np.float32)
    return Case(Symbol(tuple(graph.nodes), (end,)), graph.params, images, graph.aux)


def ask(python: str, requests: list[dict[str, Any]], folder: Path) -> None:
    """Have MXNet do what is asked, in one process."""
    (folder / "requests.json").write_text(json.dumps(requests))
    variables = {**os.environ, "MXNET_SUBGRAPH_BACKEND": "NONE"}
    command = [python, str(ORACLE), str(folder / "requests.json")]
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def forward(python: str, cases: dict[str, Case], folder: Path) -> dict[str, Array]:
    """What MXNet computes of each case."""
    requests = []
    for number, each in enumerate(cases.values()):
        files = {key: str(folder / f"{number}.{key}") for key in ("symbol", "params", "images.npy", "out.npy")}
        write_symbol(Path(files["symbol"]), each.symbol)
        write_params(Path(files["params"]), each.prefixed)
        np.save(files["images.npy"], each.images)
        requests.append({"do": "forward"} | {key.removesuffix(".npy"): path for key, path in files.items()})
    ask(python, requests, folder)
    return {name: np.load(request["out"]) for name, request in zip(cases, requests, strict=True)}


def main() -> None:
    """Write the golden file."""
    with tempfile.TemporaryDirectory() as folder:
        outputs = forward(os.environ["STEADYTRAIN_MXNET_PYTHON"], {name: case(name) for name in CASES}, Path(folder))
    np.savez_compressed(GOLDEN, **outputs)  # type: ignore[arg-type]
    print(GOLDEN, len(outputs), GOLDEN.stat().st_size)


if __name__ == "__main__":
    main()
