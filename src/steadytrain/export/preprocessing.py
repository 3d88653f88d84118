"""Preprocessing inside of an ONNX file, for programs that have no more than pixels: C++, C#, a browser.

The file takes ``pixels``, uint8[N, H, W, 3], RGB and upright, of any size, and gives ``logits`` and ``probabilities``,
float32[N, K]. Standard operators resize, crop or pad, and normalise as ``steady predict`` does: ``Resize`` of bytes
with antialiasing (opset 18) that leaves out what is outside is Pillow's arithmetic in ONNX Runtime, and where a square
begins follows from the shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from steadytrain.data.arrays import Pixels
from steadytrain.data.loader.crop import Crop
from steadytrain.data.loader.decode import cut_from
from steadytrain.errors import FailedError, ModelError
from steadytrain.models.engines.engine import require_library
from steadytrain.models.engines.onnx import EXTRA
from steadytrain.models.exported import open_module
from steadytrain.models.weights import Input

OPSET = 18
"""The first whose ``Resize`` has antialiasing."""
SIZES = ((1, 1), (37, 500), (200, 3000), (3000, 200), (640, 481))
"""Heights and widths that a file is checked by, beside the network's own."""
MOST_LEVELS = 2
"""Levels, of 256, by which a pixel may differ from the loader's: both round weights, and each of two passes to levels.

Pillow and torch differ by as much. Without ``exclude_outside``, pixels at the edges differ by up to 17.
"""


@dataclass(frozen=True)
class PreprocessingCheck:
    """The comparison of a file that preprocesses with what ``steady predict`` computes.

    Args:
        sizes: height and width of the images.
        levels: the largest difference of a pixel that the network sees, in levels of 256.
        difference: the largest of a logit.
    """

    sizes: tuple[tuple[int, int], ...]
    levels: float
    difference: float


class _Graph:
    """Nodes of a graph under way: a call adds one, whose inputs are names or arrays, and returns its output's name."""

    def __init__(self, prefix: str) -> None:
        self.onnx = require_library("onnx", EXTRA)
        self.prefix, self.nodes, self.constants = prefix, list[Any](), list[Any]()

    def __call__(self, operator: str, *inputs: Any, output: str = "", **attributes: Any) -> str:
        names = [each if isinstance(each, str) else self._constant(np.asarray(each)) for each in inputs]
        output = output or f"{self.prefix}/{len(self.nodes)}"
        self.nodes.append(self.onnx.helper.make_node(operator, names, [output], **attributes))
        return output

    def _constant(self, values: NDArray[Any]) -> str:
        name = f"{self.prefix}/constant/{len(self.constants)}"
        self.constants.append(self.onnx.numpy_helper.from_array(values, name))
        return name

    def cast(self, values: str, kind: str) -> str:
        """Add a node that makes other numbers of them, such as ``DOUBLE``."""
        return self("Cast", values, to=getattr(self.onnx.TensorProto, kind))


def _placed(add: _Graph, sides: str, crop: Crop) -> tuple[str, str]:
    """Add height and width that images are resized to, and row and column of the square in that, as ``Crop.plan`` does.

    ``sides``: int64[2], of the images. Where ONNX divides whole numbers, it rounds down; ``Round`` is to the even one.
    """
    size, side = crop.size, np.int64(math.floor(crop.size / crop.crop))
    if crop.fit == "pad":
        longer = add("ReduceMax", sides, np.array([0]), keepdims=1)
        exact = add("Div", add.cast(add("Mul", sides, side), "DOUBLE"), add.cast(longer, "DOUBLE"))
        resized = add("Max", add.cast(add("Round", exact), "INT64"), np.int64(1))
    elif crop.fit == "squash":
        resized = add("Identity", np.array([side, side]))
    else:
        resized = add("Div", add("Mul", sides, side), add("ReduceMin", sides, np.array([0]), keepdims=1))
    half = add("Div", add.cast(add("Sub", resized, np.int64(size)), "DOUBLE"), np.float64(2))
    corner = add("Where", add("Less", half, np.float64(0)), add("Ceil", half), add("Round", half))
    return resized, add.cast(corner, "INT64")


def _grey(add: _Graph, pixels: str) -> str:
    """Add the luma of RGB, uint8[N, 1, H, W], in the whole numbers of Pillow's ``convert("L")``."""
    weights = np.array([19595, 38470, 7471], np.int32).reshape(1, 3, 1, 1)
    total = add("ReduceSum", add("Mul", add.cast(pixels, "INT32"), weights), np.array([1]), keepdims=1)
    return add.cast(add("Div", add("Add", total, np.int32(1 << 15)), np.int32(1 << 16)), "UINT8")


def _preprocess(add: _Graph, pixels: str, crop: Crop, input: Input, output: str) -> None:
    """Add all from ``pixels`` to what the network sees, ``output``: float32[N, C, S, S]."""
    per_channel = (1, crop.channels, 1, 1)
    shape, size = add("Shape", pixels), np.int64(crop.size)
    planes = add("Transpose", pixels, perm=[0, 3, 1, 2])
    planes = _grey(add, planes) if crop.channels == 1 else planes
    resized, corner = _placed(add, add("Gather", shape, np.array([1, 2])), crop)
    sizes = add("Concat", add("Gather", shape, np.array([0])), np.array([crop.channels]), resized, axis=0)
    kernel = {"mode": "linear"} if crop.interpolation == "bilinear" else {"mode": "cubic", "cubic_coeff_a": -0.5}
    planes = add("Resize", planes, "", "", sizes, antialias=1, exclude_outside=1, **kernel)
    first = add("Max", corner, np.int64(0))
    values = add.cast(add("Slice", planes, first, add("Add", first, size), np.array([2, 3])), "FLOAT")
    if crop.fit == "pad":
        before = add("Max", add("Neg", corner), np.int64(0))
        taken, none = add("Min", add("Sub", resized, first), size), np.array([0, 0])
        pads = add("Concat", none, before, none, add("Sub", add("Sub", size, before), taken), axis=0)
        fill = np.array(crop.fill or (0,) * crop.channels, np.float32).reshape(per_channel)
        values = add("Add", add("Pad", add("Sub", values, fill), pads), fill)
    mean, std = (np.array(each).reshape(per_channel) for each in (input.mean or 0.0, input.std or 1.0))
    scaled = add("Mul", values, (1 / (255 * std)).astype(np.float32))
    add("Add", scaled, (-mean / std).astype(np.float32), output=output)


def prepend(path: Path, crop: Crop, input: Input, *, temperature: float, is_multi_label: bool) -> Any:
    """Put preprocessing before the network of an ONNX file, and probabilities behind it.

    Returns:
        The preprocessing as a network of its own, onnx.ModelProto from ``pixels`` to ``images``.

    Raises:
        ModelError: the file is of an older opset than 18.
    """
    onnx = require_library("onnx", EXTRA)
    network, helper, kinds = onnx.load(str(path)), onnx.helper, onnx.TensorProto
    if (opset := next(each.version for each in network.opset_import if each.domain in ("", "ai.onnx"))) < OPSET:
        raise ModelError(
            f"{path} is of opset {opset}, and resizing with antialiasing needs {OPSET}: install torch >= 2.10"
        )
    graph, before, after = network.graph, _Graph("preprocessing"), _Graph("probabilities")
    [images], [logits] = graph.input, graph.output
    _preprocess(before, "pixels", crop, input, images.name)
    scaled = after("Div", logits.name, np.float32(temperature))
    named = {"output": "probabilities"}
    after("Sigmoid", scaled, **named) if is_multi_label else after("Softmax", scaled, axis=-1, **named)
    batch, classes = (dim.dim_param or dim.dim_value for dim in logits.type.tensor_type.shape.dim)
    pixels = helper.make_tensor_value_info("pixels", kinds.UINT8, [batch, "height", "width", 3])
    alone = helper.make_graph(before.nodes, "preprocessing", [pixels], [images], before.constants)
    nodes = [*before.nodes, *graph.node, *after.nodes]
    del graph.node[:], graph.input[:]
    graph.node.extend(nodes)
    graph.input.append(pixels)
    graph.output.append(helper.make_tensor_value_info("probabilities", kinds.FLOAT, [batch, classes]))
    graph.initializer.extend([*before.constants, *after.constants])
    onnx.save(network, str(path))
    return helper.make_model(alone, opset_imports=network.opset_import, ir_version=network.ir_version)


def check(
    path: Path,
    alone: Any,
    squares: Pixels,
    crop: Crop,
    *,
    normalise: Callable[[Tensor], Tensor],
    network: Callable[[Tensor], Tensor],
    std: Sequence[float],
    tolerance: float,
) -> PreprocessingCheck:
    """Compare a file that :func:`prepend` has changed with the loader and the network, on images of odd sizes.

    Args:
        path: of the file.
        alone: what :func:`prepend` returned.
        squares: uint8[n, S, S, C], images of which others of all sizes are made.
        crop: that the loader makes squares by.
        normalise: uint8[B, S, S, C] to what the network sees.
        network: the checkpoint's.
        std: of the normalisation, of each channel.
        tolerance: the largest difference of logits on the same normalised images.

    Raises:
        FailedError: the file computes something else.
    """
    ort, opened, draws = require_library("onnxruntime", EXTRA), open_module(path).module, np.empty((1, 0))
    session = ort.InferenceSession(alone.SerializeToString(), providers=["CPUExecutionProvider"])
    levels, difference, inner, sizes = 0.0, 0.0, 0.0, (*SIZES, (crop.size, crop.size))
    for number, (height, width) in enumerate(sizes):
        square = Image.fromarray(squares[number % len(squares)].squeeze()).convert("RGB")
        image = square.resize((width, height), Image.Resampling.BICUBIC)
        plain = np.asarray(image if crop.channels == 3 else image.convert("L")).reshape(height, width, -1)
        expected = np.empty((1, crop.size, crop.size, crop.channels), np.uint8)
        cut_from(expected[0], np.ascontiguousarray(plain), crop, crop.plan(np.array([[height, width]]), draws), 0)
        pixels = np.asarray(image)[None].repeat(2, axis=0)
        seen, theirs = torch.from_numpy(session.run(None, {"pixels": pixels})[0]), normalise(torch.from_numpy(expected))
        levels = max(levels, *(255 * (seen - theirs.cpu()).abs().amax((0, 2, 3)) * torch.tensor(std)).tolist())
        with torch.no_grad():
            logits = opened(torch.from_numpy(pixels))[0]
            inner = max(inner, float((logits - network(seen.to(theirs)).cpu()).abs().max()))
            difference = max(difference, float((logits - network(theirs).cpu()).abs().max()))
    if not (levels < MOST_LEVELS + 0.01 and inner <= tolerance):  # of a NaN neither is true
        raise FailedError(
            f"the preprocessing in the file differs from the loader's by {levels:.3g} of 256 levels, logits from the"
            f" checkpoint's by {inner:.3g} ({MOST_LEVELS} and {tolerance:.3g} are allowed): nothing was written;"
            " export without --with-preprocessing"
        )
    return PreprocessingCheck(sizes, round(levels, 2), difference)
