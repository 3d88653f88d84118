"""ONNX files, which ONNX Runtime runs: on the CPU, by CUDA, or by TensorRT.

Their metadata is in ``metadata_props``. The last entry, appended once the file is complete, is a checksum of all before
it: another program that writes the file anew writes that entry in another form, and the file passes unchecked.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from steadytrain.errors import ModelError
from steadytrain.models.engines.engine import (
    EngineFormat,
    EngineModule,
    Inputs,
    Metadata,
    OpenedModule,
    StoredPrecision,
    any_batch,
    no_device,
    require_library,
    require_sealed,
    seal,
)

EXTRA = "export"
MOST_BYTES = 2_000_000_000
"""Bytes of weights in one file, whose format ends at 2 GiB."""

CUDA, TENSORRT = "CUDAExecutionProvider", "TensorrtExecutionProvider"

_SEAL = b"\x72\xeb\x00\x0a\x12steadytrain_sha256\x12\x55"
"""The checksum's entry in the bytes of protobuf, up to its text of 85 bytes.

Its length, 107, takes two bytes: whoever writes the file anew, with this entry, writes one.
"""
_SEAL_BYTES = len(_SEAL) + 85

_TENSORS = {
    "float": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "double": torch.float64,
    **{name: getattr(torch, name) for name in ("bool", "uint8", "int8", "int16", "int32", "int64")},
}
"""ONNX Runtime's names of numbers, as in ``tensor(float16)``."""


def write_onnx(module: nn.Module, inputs: Inputs, path: Path, precision: StoredPrecision = "fp32") -> None:
    """Write ONNX by torch's exporter (``dynamo=True``): inputs ``images``, outputs ``logits`` (of several: numbered).

    In fp16, images and logits stay fp32. Raises ModelError where it is too large, or a library is not installed.
    """
    if precision == "fp16":
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            write_onnx(module, inputs, exact := Path(folder, "exact.onnx"))
            onnx = require_library("onnx", EXTRA)
            float16 = require_library("onnxruntime.transformers.float16", EXTRA)
            onnx.save(float16.convert_float_to_float16(onnx.load(str(exact)), keep_io_types=True), str(path))
        return
    require_library("onnx", EXTRA)
    require_library("onnxscript", EXTRA)
    if sum(value.nbytes for value in module.state_dict().values()) > MOST_BYTES:
        raise ModelError("the network has more than 2 GB of weights, which no .onnx file holds: take .pt2 or .xml")
    with torch.no_grad():
        num_outputs = len(torch.utils._pytree.tree_leaves(module(*inputs)))
    with _FourDimensions():
        program = torch.onnx.export(
            module,
            inputs,
            dynamo=True,
            dynamic_shapes=any_batch(inputs),
            input_names=["images"] if len(inputs) == 1 else [f"images_{k}" for k in range(len(inputs))],
            output_names=["logits"] if num_outputs == 1 else [f"logits_{k}" for k in range(num_outputs)],
            verbose=False,
        )
    assert program is not None
    for node in program.model.graph.all_nodes():
        node.metadata_props.clear()  # where each stood in whose source file
    program.model.metadata_props.clear()
    program.save(str(path), external_data=False)


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


def quantize_onnx(module: nn.Module, inputs: Inputs, path: Path, batches: Iterable[Tensor]) -> None:
    """Write a network with one input in 8 bits, statically: weights for each channel, in the QDQ form.

    ``batches``: float32 inputs, from whose ranges the scales follow. Raises ModelError as :func:`write_onnx` does.
    """
    quantization = require_library("onnxruntime.quantization", EXTRA)
    shape_inference = require_library("onnxruntime.quantization.shape_inference", EXTRA)
    arrays = iter([{"images": tensor.contiguous().numpy()} for tensor in batches])

    class Reader(quantization.CalibrationDataReader):  # type: ignore[misc, name-defined]
        def get_next(self) -> dict[str, Any] | None:
            return next(arrays, None)

    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        exact, prepared = Path(folder, "exact.onnx"), Path(folder, "prepared.onnx")
        write_onnx(module, inputs, exact)
        shape_inference.quant_pre_process(str(exact), str(prepared), skip_symbolic_shape=True)
        quantization.quantize_static(
            str(prepared),
            str(path),
            Reader(),
            quant_format=quantization.QuantFormat.QDQ,
            per_channel=True,
            activation_type=quantization.QuantType.QUInt8,
            weight_type=quantization.QuantType.QInt8,
        )


def _add_metadata(path: Path, metadata: Metadata) -> None:
    onnx = require_library("onnx", EXTRA)
    network = onnx.load(str(path))
    onnx.helper.set_model_props(network, dict(metadata))
    onnx.save(network, str(path))
    text = seal(path)
    with path.open("ab") as file:
        file.write(_SEAL + text.encode())


def _require_whole(path: Path) -> None:
    """Refuse a file that is not as it was sealed. One that another program has written anew passes."""
    size = path.stat().st_size - _SEAL_BYTES
    with path.open("rb") as file:
        file.seek(max(0, size))
        last = file.read()
    if last.startswith(_SEAL):
        require_sealed(path, path, size, last.removeprefix(_SEAL).decode("ascii", "replace"))


def _open(
    path: Path, device: str, threads: int, precision: StoredPrecision | None, *, provider: str = CUDA
) -> OpenedModule:
    """Open a file with a provider of ONNX Runtime for GPUs; by CUDA's alone, also on the CPU where that is asked."""
    _require_whole(path)
    ort = require_library("onnxruntime", EXTRA)
    has_gpu, may_fall_back = provider in ort.get_available_providers(), device == "auto" and provider == CUDA
    if device == "auto":
        device = "cuda" if provider != CUDA or (has_gpu and torch.cuda.is_available()) else "cpu"
    where = torch.device(device)
    providers: list[Any] = ["CPUExecutionProvider"]
    stream = None
    if where.type == "cuda":
        if not has_gpu:
            raise no_device(path, "ONNX Runtime", device, "install onnxruntime-gpu, or take --device cpu")
        stream = torch.cuda.Stream(where)  # type: ignore[no-untyped-call]
        on_gpu = {"device_id": where.index or 0, "user_compute_stream": str(stream.cuda_stream)}
        providers = [*((name, on_gpu) for name in dict.fromkeys((provider, CUDA))), *providers]
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 3
    session = ort.InferenceSession(str(path), options, providers=providers)
    first = session.get_providers()[0]
    if where.type == "cuda" and first != provider:  # it falls back without an error
        if not may_fall_back:
            raise ModelError(
                f"{path} cannot run on {device}: ONNX Runtime runs it by its {first}, since the libraries of its"
                f" {provider} do not load here; install the CUDA, cuDNN or TensorRT that this onnxruntime-gpu is built"
                " for, or take --device cpu"
            )
        where, stream = torch.device("cpu"), None
    engine = "onnxruntime" if provider == CUDA else "onnxruntime-tensorrt"
    run = _bound_session(ort, session, where, stream)
    return OpenedModule(EngineModule(run), session.get_modelmeta().custom_metadata_map, engine, where)


def _bound_session(
    ort: Any, session: Any, where: torch.device, stream: torch.cuda.Stream | None
) -> Callable[[Sequence[Tensor]], list[Tensor]]:
    """Return a function that runs a session of ONNX Runtime on tensors where they lie; no host waits for a GPU.

    The shapes of its outputs are learned by the first inputs of a shape, whose outputs come by way of the host.
    """
    takes = [(each.name, _tensor_dtype(each.type)) for each in session.get_inputs()]
    gives = [each.name for each in session.get_outputs()]
    symbols = {dim for each in session.get_inputs() for dim in each.shape if isinstance(dim, str)}
    # Other dimensions, such as the number of boxes, depend on what is in an image.
    is_fixed = all(isinstance(dim, int) or dim in symbols for each in session.get_outputs() for dim in each.shape)
    learned: dict[tuple[torch.Size, ...], list[tuple[torch.Size, torch.dtype]]] = {}
    at_once, lock = ort.RunOptions(), nullcontext() if stream is None else threading.Lock()
    if stream is not None:
        at_once.add_run_config_entry("disable_synchronize_execution_providers", "1")

    def run(inputs: Sequence[Tensor]) -> list[Tensor]:
        tensors = [
            tensor.detach().to(where, dtype).contiguous() for tensor, (_, dtype) in zip(inputs, takes, strict=True)
        ]
        shapes = tuple(tensor.shape for tensor in tensors)
        binding, place = session.io_binding(), (where.type, where.index or 0)
        for (name, dtype), tensor in zip(takes, tensors, strict=True):
            binding.bind_input(name, *place, _element_type(dtype), list(tensor.shape), tensor.data_ptr())
        with lock, _ordered(stream, tensors):
            if (known := learned.get(shapes)) is not None:
                outputs = [torch.empty(shape, dtype=dtype, device=where) for shape, dtype in known]
                for name, output in zip(gives, outputs, strict=True):
                    element = _element_type(output.dtype)
                    binding.bind_output(name, *place, element, list(output.shape), output.data_ptr())
                session.run_with_iobinding(binding, at_once)
                return outputs
            for name in gives:
                binding.bind_output(name)
            session.run_with_iobinding(binding)
            outputs = [torch.from_numpy(array) for array in binding.copy_outputs_to_cpu()]
        if is_fixed and all(output.numel() for output in outputs):
            learned[shapes] = [(output.shape, output.dtype) for output in outputs]
        return outputs

    return run


def _tensor_dtype(kind: str) -> torch.dtype:
    """Return the numbers of ONNX Runtime's ``tensor(float16)``. Raises ModelError for what is no tensor of numbers."""
    dtype: torch.dtype | None = _TENSORS.get(kind.removeprefix("tensor(").removesuffix(")"))
    if dtype is None:
        raise ModelError(f"its input is a {kind}, and only tensors of {', '.join(_TENSORS)} are passed to it")
    return dtype


def _element_type(dtype: torch.dtype) -> Any:
    """Return numbers as ONNX Runtime's bindings take them: of NumPy's type, or ONNX's number of bfloat16."""
    return 16 if dtype is torch.bfloat16 else torch.empty(0, dtype=dtype).numpy().dtype.type


@contextmanager
def _ordered(stream: torch.cuda.Stream | None, inputs: Sequence[Tensor]) -> Iterator[None]:
    """Let a GPU's stream of an engine take its place in the order of torch's; None: there is none to wait for."""
    if stream is None:
        yield
        return
    current = torch.cuda.current_stream(stream.device)
    stream.wait_stream(current)
    yield
    current.wait_stream(stream)
    for tensor in inputs:
        tensor.record_stream(stream)  # its memory is not given to others before the engine has read it


ONNXRUNTIME = EngineFormat(
    engine="onnxruntime",
    title="ONNX Runtime",
    suffix=".onnx",
    precisions=("fp32", "fp16", "int8"),  # it has no convolutions in bf16 for processors
    devices=("cpu", "cuda"),
    packages=("onnx", "onnxscript", "onnxruntime"),
    extra=EXTRA,
    write=write_onnx,
    quantize=quantize_onnx,
    add_metadata=_add_metadata,
    open=_open,
)
ONNXRUNTIME_TENSORRT = replace(
    ONNXRUNTIME,
    engine="onnxruntime-tensorrt",
    title="ONNX Runtime's TensorRT provider",
    devices=("cuda",),
    open=partial(_open, provider=TENSORRT),
)
"""The same files, by the TensorRT provider of an installed onnxruntime-gpu. Written to its documentation, never run."""
