"""Preprocessing inside of an ONNX file, for programs that have no more than pixels: C++, C#, a browser.

The file takes ``pixels``, uint8[N, H, W, 3], RGB and upright, of any size. ``Resize`` of bytes with antialiasing (opset
18) and without the outside is Pillow's arithmetic in ONNX Runtime, and where a square begins follows from the shape.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from steadytrain.data.arrays import Pixels
from steadytrain.data.loader.crop import Crop
from steadytrain.data.loader.decode import cut_from
from steadytrain.errors import FailedError
from steadytrain.models.engines.engine import require_library
from steadytrain.models.engines.onnx import EXTRA
from steadytrain.models.exported import open_module
from steadytrain.models.weights import Input
from steadytrain.training.inference.trained import Trained

SIZES = ((1, 1), (37, 500), (200, 3000), (3000, 200), (640, 481))  # heights and widths that a file is checked by
MOST_LEVELS = 2
"""Levels of 256 by which a pixel may differ from the loader's, as Pillow's and torch's do: both round twice."""
_FLOAT, _UINT8, _INT32, _INT64, _DOUBLE = 1, 2, 6, 7, 11  # numbers of onnx.TensorProto


class _Graph:
    """Nodes of a graph under way: a call adds one, whose inputs are names or arrays, and returns its output's name."""

    def __init__(self) -> None:
        self.onnx = require_library("onnx", EXTRA)
        self.nodes, self.constants = list[Any](), list[Any]()

    def __call__(self, operator: str, *inputs: Any, output: str = "", **attributes: Any) -> str:
        names = [each if isinstance(each, str) else f"constant/{len(self.nodes)}/{k}" for k, each in enumerate(inputs)]
        arrays = zip(names, inputs, strict=True)
        self.constants += [self.onnx.numpy_helper.from_array(np.asarray(v), k) for k, v in arrays if k is not v]
        output = output or f"preprocessing/{len(self.nodes)}"
        self.nodes.append(self.onnx.helper.make_node(operator, names, [output], **attributes))
        return output


def _preprocess(add: _Graph, crop: Crop, input: Input, output: str) -> None:
    """Add all from ``pixels`` to what the network sees, ``output``: float32[N, C, S, S]."""
    shape, size, by_channel = add("Shape", "pixels"), np.int64(crop.size), (1, crop.channels, 1, 1)
    planes = add("Transpose", "pixels", perm=[0, 3, 1, 2])
    if crop.channels == 1:  # luma in the whole numbers of Pillow's convert("L")
        weights = np.array([19595, 38470, 7471], np.int32).reshape(1, 3, 1, 1)
        luma = add("ReduceSum", add("Mul", add("Cast", planes, to=_INT32), weights), np.array([1]))
        planes = add("Cast", add("Div", add("Add", luma, np.int32(1 << 15)), np.int32(1 << 16)), to=_UINT8)
    # Height and width to resize to, and row and column of the square, as by Crop.plan: Round is to the even number.
    sides, side = add("Gather", shape, np.array([1, 2])), np.int64(crop.size / crop.crop)
    if crop.fit == "pad":
        longer = add("Cast", add("ReduceMax", sides), to=_DOUBLE)
        exact = add("Div", add("Cast", add("Mul", sides, side), to=_DOUBLE), longer)
        resized = add("Max", add("Cast", add("Round", exact), to=_INT64), np.int64(1))
    elif crop.fit == "squash":
        resized = add("Identity", np.array([side, side]))
    else:
        resized = add("Div", add("Mul", sides, side), add("ReduceMin", sides))
    half = add("Div", add("Cast", add("Sub", resized, size), to=_DOUBLE), np.float64(2))
    corner = add("Where", add("Less", half, np.float64(0)), add("Ceil", half), add("Round", half))
    corner = add("Cast", corner, to=_INT64)
    sizes = add("Concat", add("Gather", shape, np.array([0])), np.array([crop.channels]), resized, axis=0)
    kernel = {"mode": "linear"} if crop.interpolation == "bilinear" else {"mode": "cubic", "cubic_coeff_a": -0.5}
    planes = add("Resize", planes, "", "", sizes, antialias=1, exclude_outside=1, **kernel)
    first = add("Max", corner, np.int64(0))
    values = add("Cast", add("Slice", planes, first, add("Add", first, size), np.array([2, 3])), to=_FLOAT)
    if crop.fit == "pad":
        before, none = add("Max", add("Neg", corner), np.int64(0)), np.array([0, 0])
        taken = add("Min", add("Sub", resized, first), size)
        pads = add("Concat", none, before, none, add("Sub", add("Sub", size, before), taken), axis=0)
        fill = np.array(crop.fill or (0,) * crop.channels, np.float32).reshape(by_channel)
        values = add("Add", add("Pad", add("Sub", values, fill), pads), fill)
    mean, std = (np.array(each).reshape(by_channel) for each in (input.mean or 0.0, input.std or 1.0))
    scaled = add("Mul", values, (1 / (255 * std)).astype(np.float32))
    add("Add", scaled, (-mean / std).astype(np.float32), output=output)


def add_preprocessing(path: Path, crop: Crop, input: Input, temperature: float, *, is_multi_label: bool) -> None:
    """Have an ONNX file take ``pixels``, and give ``probabilities`` and ``images``, what the network sees, as well."""
    add = _Graph()
    network, helper = add.onnx.load(str(path)), add.onnx.helper
    graph = network.graph
    [images], [logits] = graph.input, graph.output
    _preprocess(add, crop, input, images.name)
    before = len(add.nodes)
    scaled, kind = add("Div", logits.name, np.float32(temperature)), {} if is_multi_label else {"axis": -1}
    add("Sigmoid" if is_multi_label else "Softmax", scaled, output="probabilities", **kind)
    batch, classes = (dim.dim_param or dim.dim_value for dim in logits.type.tensor_type.shape.dim)
    nodes = [*add.nodes[:before], *graph.node, *add.nodes[before:]]
    del graph.node[:], graph.input[:]
    graph.node.extend(nodes)
    graph.initializer.extend(add.constants)
    graph.input.append(helper.make_tensor_value_info("pixels", _UINT8, [batch, "height", "width", 3]))
    graph.output.extend([helper.make_tensor_value_info("probabilities", _FLOAT, [batch, classes]), images])
    add.onnx.save(network, str(path))


def check_preprocessing(
    path: Path, trained: Trained, crop: Crop, network: Callable[[Tensor], Tensor], squares: Pixels, tolerance: float
) -> float:
    """Return by how many levels of 256 the pixels that a network sees differ from the loader's, on odd sizes, at most.

    The images are made of ``squares``, uint8[n, S, S, C]. Raises FailedError for more than :data:`MOST_LEVELS`, or
    logits that differ from the network's, on the same pixels, by more than ``tolerance``.
    """
    opened, levels, difference = open_module(path).module, 0.0, 0.0
    mean, std = trained.input.mean, torch.tensor(trained.input.std or 1.0).reshape(-1, 1, 1)
    for square, (height, width) in zip(np.resize(squares, (len(SIZES), *squares.shape[1:])), SIZES, strict=True):
        image = Image.fromarray(square.squeeze()).convert("RGB").resize((width, height), Image.Resampling.BICUBIC)
        plain = np.array(image if crop.channels == 3 else image.convert("L")).reshape(height, width, -1)
        loaded = np.empty((1, crop.size, crop.size, crop.channels), np.uint8)
        cut_from(loaded[0], plain, crop, crop.plan(np.array([[height, width]]), np.empty((1, 0))), 0)
        expected = trained.policy.images(torch.from_numpy(loaded), mean, trained.input.std).contiguous()
        with torch.no_grad():
            logits, _, images = opened(torch.from_numpy(np.array(image)[None].repeat(2, axis=0)))
            same = network(images.to(expected)).cpu()
        levels = max(levels, float((255 * std * (images - expected.cpu())).abs().max()))
        difference = max(difference, float((logits - same).abs().max()))
    if not (levels < MOST_LEVELS + 0.01 and difference <= tolerance):  # of a NaN neither is true
        raise FailedError(
            f"in the file, pixels differ from the loader's by {levels:.3g} of 256 levels, logits by {difference:.3g}"
            f" ({MOST_LEVELS} and {tolerance:.3g} are allowed): nothing was written; leave --with-preprocessing out"
        )
    return round(levels, 2)
