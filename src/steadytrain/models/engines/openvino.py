"""OpenVINO's files: ``NAME.xml``, whose metadata is in ``rt_info``, and ``NAME.bin`` with the weights beside it."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from xml.etree import ElementTree

import torch
from torch import Tensor, nn

from steadytrain.models.engines.engine import (
    KEY,
    EngineFormat,
    EngineModule,
    Inputs,
    Metadata,
    OpenedModule,
    StoredPrecision,
    require_library,
    require_sealed,
    seal,
)
from steadytrain.models.engines.onnx import quantize_onnx

EXTRA = "openvino"

CHECKSUM = "steadytrain_sha256"
"""Name of the checksum of the weights in a file's metadata."""


def write_openvino(module: nn.Module, inputs: Inputs, path: Path, precision: StoredPrecision = "fp32") -> None:
    """Write a network; in fp16 its weights have 16 bits, in bf16 it is computed so where it is opened."""
    openvino = require_library("openvino", EXTRA)
    shapes = [[-1, *tensor.shape[1:]] for tensor in inputs]
    network = openvino.convert_model(module, example_input=inputs[0] if len(inputs) == 1 else inputs, input=shapes)
    for places, name in ((network.inputs, "images"), (network.outputs, "logits")):
        for number, place in enumerate(places):
            place.get_tensor().set_names({name if len(places) == 1 else f"{name}_{number}"})
    openvino.save_model(network, str(path), compress_to_fp16=precision == "fp16")


def _quantize(module: nn.Module, inputs: Inputs, path: Path, batches: Iterable[Tensor]) -> None:
    openvino = require_library("openvino", EXTRA)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        quantize_onnx(module, inputs, quantized := Path(folder, "quantized.onnx"), batches)
        openvino.save_model(openvino.convert_model(str(quantized)), str(path), compress_to_fp16=False)


def _add_metadata(path: Path, metadata: Metadata) -> None:
    tree = ElementTree.parse(path)
    about = tree.getroot().find("rt_info")
    about = ElementTree.SubElement(tree.getroot(), "rt_info") if about is None else about
    for name, value in {**metadata, CHECKSUM: seal(path.with_suffix(".bin"))}.items():
        ElementTree.SubElement(about, name, value=value)
    tree.write(path, encoding="utf-8", xml_declaration=True)


def _open(path: Path, device: str, threads: int, precision: StoredPrecision | None) -> OpenedModule:
    openvino = require_library("openvino", EXTRA)
    core = openvino.Core()
    network = core.read_model(str(path))
    values = {name: getattr(value, "value", value) for name, value in network.get_rt_info().items()}
    metadata = {name: value for name, value in values.items() if isinstance(value, str)}
    if CHECKSUM in metadata:
        weights = path.with_suffix(".bin")
        require_sealed(path, weights, weights.stat().st_size, metadata[CHECKSUM])
    precision = precision or json.loads(metadata.get(KEY, "{}")).get("numbers")
    # Left alone, it computes in bf16 where the processor can, whatever numbers the file has.
    hint = {"bf16": "bf16", "fp16": "f16"}.get(precision or "fp32", "f32")
    options = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": hint}
    request = core.compile_model(network, "CPU", options).create_infer_request()
    outputs = range(len(network.outputs))

    def run(inputs: Sequence[Tensor]) -> list[Tensor]:
        arrays = [tensor.detach().cpu().contiguous().numpy() for tensor in inputs]
        results = request.infer(arrays, share_inputs=True)
        return [torch.from_numpy(results[number]) for number in outputs]

    return OpenedModule(EngineModule(run), metadata, "openvino", torch.device("cpu"))


OPENVINO = EngineFormat(
    engine="openvino",
    title="OpenVINO",
    suffix=".xml",
    precisions=("fp32", "fp16", "bf16", "int8"),
    devices=("cpu",),
    packages=("openvino",),
    extra=EXTRA,
    write=write_openvino,
    quantize=_quantize,
    add_metadata=_add_metadata,
    open=_open,
    more_files=lambda path: (path.with_suffix(".bin"),),
)
