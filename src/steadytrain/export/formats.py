"""Write a network as a file that other programs run: functions of a module and example inputs, without a run.

:func:`steadytrain.models.exported.open_module` opens what they write. A network that is exported by
:mod:`steadytrain.export.export` is checked as well.

>>> import tempfile, torch
>>> from steadytrain.models.exported import open_module
>>> net = torch.nn.Linear(4, 2).eval()
>>> path = Path(tempfile.mkdtemp()) / "net.pt2"
>>> write_torch_export(net, torch.zeros(2, 4), path, metadata={"made by": "hand"})
>>> opened = open_module(path)
>>> torch.equal(opened.module(torch.ones(7, 4)), net(torch.ones(7, 4))), opened.metadata
(True, {'made by': 'hand'})
"""

from __future__ import annotations

import copy
import json
import logging
import warnings
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal
from xml.etree import ElementTree

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from tqdm import tqdm

from steadytrain.errors import ModelError, SteadyError, first_line
from steadytrain.files import replacing
from steadytrain.models.exported import require_library, seal, seal_onnx
from steadytrain.training.precision import DTYPES, store

Metadata = Mapping[str, str]
Example = Tensor | Sequence[Tensor]

TENSORRT_BATCHES = (1, 32, 128)
"""The smallest batch, that for which it is optimised, and the largest, where a batch is dynamic."""

MOST_ONNX_BYTES = 2_000_000_000
"""Of the weights in one ``.onnx`` file, whose format ends at 2 GiB."""


def write_onnx(
    module: nn.Module, example: Example, path: Path, *, dynamic_batch: bool = True, metadata: Metadata | None = None
) -> None:
    """Write ONNX by torch's exporter (``dynamo=True``): inputs ``images``, outputs ``logits`` (of several: numbered).

    Args:
        module: in evaluation mode.
        example: its input, or several.
        path: of the file; whole or not at all.
        dynamic_batch: the first dimension of every input, the same for all, may have any size.
        metadata: text by name, in ``metadata_props``.

    Raises:
        ModelError: it cannot be expressed so, is too large, or onnx or onnxscript is not installed.
        StorageError: it cannot be written.
    """
    require_library("onnx")
    require_library("onnxscript")
    inputs, shapes = _inputs(module, example, dynamic_batch)
    if sum(value.nbytes for value in module.state_dict().values()) > MOST_ONNX_BYTES:
        raise ModelError("the network has more than 2 GB of weights, which no .onnx file holds: take .pt2 or .xml")
    with torch.no_grad():
        outputs = module(*inputs)
    num_outputs = 1 if isinstance(outputs, Tensor) else len(torch.utils._pytree.tree_leaves(outputs))
    with _exporting("ONNX", dynamic_batch), replacing(path) as part, _FourDimensions():
        program = torch.onnx.export(
            module,
            inputs,
            dynamo=True,
            dynamic_shapes=shapes,
            input_names=_numbered("images", len(inputs)),
            output_names=_numbered("logits", num_outputs),
            verbose=False,
        )
        assert program is not None
        for node in program.model.graph.all_nodes():
            node.metadata_props.clear()  # where each stood in whose source file
        program.model.metadata_props.clear()
        program.save(str(part), external_data=False)
        add_metadata(part, metadata)


class _FourDimensions(TorchFunctionMode):
    """A mode in which attention is computed on four dimensions: torch's exporter to ONNX takes no other number.

    Hiera, for example, has one more, of windows.
    """

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        call = _attend if func is functional.scaled_dot_product_attention else func
        return call(*args, **(kwargs or {}))


def _attend(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *more: Any, **options: Any
) -> Tensor:
    leading = query.shape[:-2]
    if query.dim() == 4 or not leading == key.shape[:-2] == value.shape[:-2]:
        return functional.scaled_dot_product_attention(query, key, value, attn_mask, *more, **options)
    if attn_mask is not None and attn_mask.dim() > 3:  # others are the same wherever the leading dimensions are
        attn_mask = _to_four(attn_mask.expand(*leading, *attn_mask.shape[-2:]))
    query, key, value = map(_to_four, (query, key, value))
    out = functional.scaled_dot_product_attention(query, key, value, attn_mask, *more, **options)
    return out.reshape(*leading, *out.shape[-2:])


def _to_four(tensor: Tensor) -> Tensor:
    return tensor.flatten(0, -4) if tensor.dim() > 4 else tensor[(None,) * (4 - tensor.dim())]


def write_openvino(
    module: nn.Module,
    example: Example,
    path: Path,
    *,
    dynamic_batch: bool = True,
    metadata: Metadata | None = None,
    fp16: bool = False,
) -> None:
    """Write OpenVINO's form: ``NAME.xml``, and ``NAME.bin`` with the weights beside it; arguments as for ONNX.

    Args:
        fp16: keep the weights in 16 bits, half as large.

    Raises:
        ModelError: it cannot be expressed so, or openvino is not installed.
        StorageError: it cannot be written.
    """
    openvino = require_library("openvino")
    inputs, _ = _inputs(module, example, dynamic_batch)
    shapes = [[-1 if dynamic_batch else tensor.shape[0], *tensor.shape[1:]] for tensor in inputs]
    with _exporting("OpenVINO", dynamic_batch), replacing(path) as part:
        example_input = inputs[0] if len(inputs) == 1 else inputs
        network = openvino.convert_model(module, example_input=example_input, input=shapes)
        for tensor, name in zip(network.inputs, _numbered("images", len(inputs)), strict=True):
            tensor.get_tensor().set_names({name})
        for tensor, name in zip(network.outputs, _numbered("logits", len(network.outputs)), strict=True):
            tensor.get_tensor().set_names({name})
        openvino.save_model(network, str(part), compress_to_fp16=fp16)
        add_metadata(part, metadata)


def convert_onnx_to_openvino(source: Path, path: Path) -> None:
    """Write an ``.onnx`` file, quantized ones included, in OpenVINO's form.

    Raises:
        ModelError: it cannot be expressed so, or openvino is not installed.
        StorageError: it cannot be written.
    """
    openvino = require_library("openvino")
    with _exporting("OpenVINO", True), replacing(path) as part:
        openvino.save_model(openvino.convert_model(str(source)), str(part), compress_to_fp16=False)


def write_torch_export(
    module: nn.Module, example: Example, path: Path, *, dynamic_batch: bool = True, metadata: Metadata | None = None
) -> None:
    """Write a program of ``torch.export``, which ``torch.export.load`` opens; arguments and errors as for ONNX."""
    with _exporting("torch.export", dynamic_batch), replacing(path) as part:
        program = _program(module, example, dynamic_batch)
        for node in program.graph.nodes:
            node.meta.pop("stack_trace", None)  # where it stood in whose source file
        torch.export.save(program, str(part))
        add_metadata(part, metadata)


def write_aot(
    module: nn.Module, example: Example, path: Path, *, dynamic_batch: bool = True, metadata: Metadata | None = None
) -> None:
    """Write a package that AOTInductor compiled for this machine's processor or GPU; arguments as for ONNX.

    ``torch._inductor.aoti_load_package`` opens it. Compiling needs a C++ compiler, and takes a minute or so.

    Raises:
        ModelError: it cannot be compiled.
        StorageError: it cannot be written.
    """
    from torch._inductor import aoti_compile_and_package

    with _exporting("AOTInductor", dynamic_batch), replacing(path) as part:
        program = _program(module, example, dynamic_batch)
        with torch.no_grad():
            # Freezing lets it fold batch norms, and lay weights out as the processor's kernels want them.
            aoti_compile_and_package(program, package_path=str(part), inductor_configs={"freezing": True})
        add_metadata(part, metadata)


def write_tensorrt(
    module: nn.Module,
    example: Example,
    path: Path,
    *,
    dynamic_batch: bool = True,
    metadata: Metadata | None = None,
    numbers: Literal["fp32", "fp16", "bf16"] = "fp32",
) -> None:
    """Build an engine of TensorRT for this GPU, by way of ONNX; the metadata goes into ``NAME.engine.json``.

    Written to its documentation; it has never run, for want of a GPU.

    Args:
        numbers: in which it may compute.

    Raises:
        ModelError: it cannot be built, or tensorrt is not installed.
        StorageError: it cannot be written.
    """
    trt = require_library("tensorrt")
    inputs, _ = _inputs(module, example, dynamic_batch)
    with _exporting("TensorRT", dynamic_batch), replacing(path) as part:
        source = part.with_suffix(".onnx")
        write_onnx(module, inputs, source, dynamic_batch=dynamic_batch)
        builder = trt.Builder(trt.Logger(trt.Logger.ERROR))
        network = builder.create_network(0)
        parser = trt.OnnxParser(network, trt.Logger(trt.Logger.ERROR))
        if not parser.parse_from_file(str(source)):
            raise ModelError(f"TensorRT cannot read the network: {parser.get_error(0)}")
        source.unlink()
        config, profile = builder.create_builder_config(), builder.create_optimization_profile()
        if numbers != "fp32":
            config.set_flag(trt.BuilderFlag.FP16 if numbers == "fp16" else trt.BuilderFlag.BF16)
        if dynamic_batch:
            for number, tensor in enumerate(inputs):
                sizes = [(n, *tensor.shape[1:]) for n in TENSORRT_BATCHES]
                profile.set_shape(network.get_input(number).name, *sizes)
            config.add_optimization_profile(profile)
        engine = builder.build_serialized_network(network, config)
        if engine is None:
            raise ModelError("TensorRT could not build the network")
        part.write_bytes(engine)
        add_metadata(part, metadata)


class Half(nn.Module):
    """A network that computes in 16 bits between images and logits of 32; the module itself is left as it is.

    Batch norms keep their 32 bits, as in training with ``pure-bf16``.
    """

    def __init__(self, module: nn.Module, numbers: Literal["fp16", "bf16"]) -> None:
        super().__init__()
        self.dtype = DTYPES[numbers]
        self.module = store(copy.deepcopy(module), self.dtype)
        self.eval()

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.module(images.to(self.dtype))
        return logits.float()


def halve_onnx(source: Path, path: Path) -> None:
    """Convert an ``.onnx`` file to fp16; images and logits stay fp32.

    Raises:
        ModelError: it cannot be converted, or onnxruntime is not installed.
        StorageError: it cannot be written.
    """
    onnx, float16 = require_library("onnx"), require_library("onnxruntime.transformers.float16")
    with _exporting("fp16", True), replacing(path) as part:
        network = float16.convert_float_to_float16(onnx.load(str(source)), keep_io_types=True)
        onnx.save(network, str(part))


def quantize_onnx(source: Path, path: Path, batches: Iterable[Tensor], *, metadata: Metadata | None = None) -> None:
    """Quantize an ``.onnx`` file with one input to 8 bits, statically: weights for each channel, in the QDQ form.

    Args:
        source: the network in fp32.
        path: of the new file.
        batches: float32 inputs, from whose ranges the scales follow.
        metadata: as for ONNX; None: none.

    Raises:
        ModelError: it cannot be quantized, or onnxruntime is not installed.
        StorageError: it cannot be written.
    """
    onnx, quantization = require_library("onnx"), require_library("onnxruntime.quantization")
    shape_inference = require_library("onnxruntime.quantization.shape_inference")
    arrays = iter([tensor.contiguous().numpy() for tensor in batches])
    name = onnx.load(str(source), load_external_data=False).graph.input[0].name

    class Reader(quantization.CalibrationDataReader):  # type: ignore[misc, name-defined]
        def get_next(self) -> dict[str, Any] | None:
            array = next(arrays, None)
            return None if array is None else {name: array}

    with _exporting("int8", True), replacing(path) as part:
        prepared = part.with_name("prepared.onnx")
        shape_inference.quant_pre_process(str(source), str(prepared), skip_symbolic_shape=True)
        quantization.quantize_static(
            str(prepared),
            str(part),
            Reader(),
            quant_format=quantization.QuantFormat.QDQ,
            per_channel=True,
            activation_type=quantization.QuantType.QUInt8,
            weight_type=quantization.QuantType.QInt8,
        )
        prepared.unlink()
        add_metadata(part, metadata)


def add_metadata(path: Path, metadata: Metadata | None) -> None:
    """Put text by name into an exported file that has none, where :mod:`steadytrain.models.exported` finds it."""
    if not metadata:
        return
    if path.suffix == ".onnx":
        onnx = require_library("onnx")
        network = onnx.load(str(path))
        onnx.helper.set_model_props(network, dict(metadata))
        onnx.save(network, str(path))
        seal_onnx(path)
    elif path.suffix == ".xml":
        tree = ElementTree.parse(path)
        about = tree.getroot().find("rt_info")
        about = ElementTree.SubElement(tree.getroot(), "rt_info") if about is None else about
        for name, value in seal(path, metadata).items():
            ElementTree.SubElement(about, name, value=value)
        tree.write(path, encoding="utf-8", xml_declaration=True)
    elif path.suffix == ".pt2":
        with zipfile.ZipFile(path, "a") as archive:
            root = archive.namelist()[0].partition("/")[0]
            for name, value in metadata.items():
                archive.writestr(f"{root}/extra/{name}", value)
    else:
        path.with_name(f"{path.name}.json").write_text(json.dumps(dict(seal(path, metadata))), encoding="utf-8")


def _inputs(
    module: nn.Module, example: Example, dynamic_batch: bool
) -> tuple[tuple[Tensor, ...], tuple[dict[int, Any], ...] | None]:
    """Return the example's tensors, and which of their dimensions are dynamic; a batch of one is doubled then.

    The exporter takes a dimension of 1 for one that is always 1.
    """
    assert not module.training, "export wants a network in evaluation mode"
    inputs = (example,) if isinstance(example, Tensor) else tuple(example)
    if not dynamic_batch:
        return inputs, None
    inputs = tuple(torch.cat([tensor, tensor]) if tensor.shape[0] == 1 else tensor for tensor in inputs)
    batch = torch.export.Dim("batch", min=1)
    return inputs, tuple({0: batch} for _ in inputs)


def _program(module: nn.Module, example: Example, dynamic_batch: bool) -> torch.export.ExportedProgram:
    inputs, shapes = _inputs(module, example, dynamic_batch)
    with torch.no_grad():
        return torch.export.export(module, inputs, dynamic_shapes=shapes, strict=False)


def _numbered(name: str, count: int) -> list[str]:
    """List names of inputs or outputs.

    >>> _numbered("images", 1), _numbered("images", 2)
    (['images'], ['images_0', 'images_1'])
    """
    return [name] if count == 1 else [f"{name}_{number}" for number in range(count)]


@contextmanager
def _exporting(what: str, dynamic_batch: bool) -> Iterator[None]:
    """Silence the exporters' output, and turn their failures into a ModelError."""
    disabled, interval = logging.root.manager.disable, tqdm.monitor_interval
    logging.disable(logging.WARNING)
    tqdm.monitor_interval = 0  # no thread that watches a bar which nobody sees
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except (SteadyError, OSError):
        raise
    except Exception as error:
        remedy = "; a batch of fixed size may do (dynamic_batch=False)" if dynamic_batch else ""
        raise ModelError(f"{what} cannot take this network ({first_line(error)}){remedy}") from error
    finally:
        logging.disable(disabled)
        tqdm.monitor_interval = interval
